//! Anomalies: states that must never occur, in the guest or between it and vmtrace. Tracing ends, the guest
//! lives.

use super::controller::Controller;
use super::vm::Vm;

/// Names of functions that a message shows.
const EXAMPLES: usize = 3;

/// Whether there was one.
#[derive(Debug, Default)]
pub(super) struct Anomaly {
    first: Option<String>,
}

impl Anomaly {
    /// There is one.
    pub(super) fn found(&mut self, what: String) {
        self.first.get_or_insert(what);
    }

    /// The first one.
    pub(super) fn take(self) -> Option<String> {
        self.first
    }
}

impl Controller {
    /// Something is not as it has to be: gives everything back and traces no more. The stream is
    /// whole up to here, and goes on with what else there is to tell.
    pub(super) fn anomaly(&mut self, machine: &dyn Vm, what: String) {
        self.note(format!("tracing ends: {what}"));
        self.anomaly.found(what);
        self.detach(machine);
    }

    /// Sites did not hold what was written to them when they were given back.
    pub(super) fn foreign(&mut self, sites: &[usize]) {
        if sites.is_empty() {
            return;
        }
        let names: Vec<_> = sites.iter().take(EXAMPLES).map(|&site| self.name(site)).collect();
        let what = format!(
            "{} sites did not hold our call any more and were left alone (such as {})",
            sites.len(),
            names.join(", ")
        );
        self.note(what.clone());
        self.anomaly.found(what);
    }

    /// What the relay has found in rings.
    pub(super) fn look_at_rings(&mut self, machine: &dyn Vm) {
        let corrupt = self.relay.as_ref().and_then(crate::relay::Relay::corrupt);
        if let Some(what) = corrupt
            && self.anomaly.first.is_none()
        {
            self.anomaly(machine, what);
        }
    }
}
