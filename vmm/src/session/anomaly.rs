//! Anomalies: states that must never occur, in the guest or between it and vmtrace. Tracing ends, the guest
//! lives.

use super::controller::{Controller, Stage};
use super::vm::Vm;
use crate::machine::{MachineError, TRAP_INSTRUCTION};

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

    /// A vCPU came to a trap instruction at this run-time address that is not armed, and has gone on behind it.
    pub(super) fn strayed(&mut self, machine: &dyn Vm, address: u64) {
        let Stage::Attached { attachment, .. } = &self.stage else { return };
        if attachment.is_foreign_trap(machine.ram(), address, &TRAP_INSTRUCTION) {
            let place = self.place(address);
            self.anomaly(machine, format!("a tripwire that nobody set was hit at {place}"));
        }
    }

    /// A vCPU stands at a trap that nobody attends to: if it is armed, it would come to it again for ever.
    pub(super) fn unattended(
        &mut self,
        machine: &dyn Vm,
        address: u64,
    ) -> Result<(), MachineError> {
        // Mostly, a second vCPU was at the same tripwire: it goes on with the original.
        if self.tripwires.is_over(address) {
            return Ok(());
        }
        let paused = machine.pause()?;
        let was_armed = self.disarm(machine, &paused, address);
        drop(paused);
        if was_armed {
            let place = self.place(address);
            self.anomaly(machine, format!("a tripwire that nobody knows was hit at {place}"));
        }
        Ok(())
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
