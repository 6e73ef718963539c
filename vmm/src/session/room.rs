//! Room in the rings, between the vCPUs that wait for it and the relay that makes it.

use super::vm::Vm;
use crate::machine::Room;
use crate::relay::Waiting;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmtrace_trampolines::Overflow;

/// Those who wait, if programs do that.
pub(super) fn waiting(machine: &dyn Vm, overflow: Overflow) -> Option<Box<dyn Waiting>> {
    match overflow {
        Overflow::Drop | Overflow::Overwrite => None,
        Overflow::Block(_) => Some(Box::new(Vcpus(machine.room()))),
    }
}

struct Vcpus(Arc<Room>);

impl Waiting for Vcpus {
    fn made_room(&self) {
        self.0.made();
    }

    fn close(&self, closed: bool) {
        self.0.close(closed);
    }

    fn wanted_for(&self) -> Option<Duration> {
        self.0.wanted_for()
    }

    fn stalls(&self) -> Vec<(Instant, Duration)> {
        self.0.stalls().into_iter().map(|stall| (stall.begun, stall.time)).collect()
    }

    fn waited(&self) -> Vec<Duration> {
        self.0.waited()
    }
}
