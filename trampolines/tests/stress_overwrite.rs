//! Flight recorders under interrupts, preemption and migration: see `common/stress.rs`. This is a
//! separate binary, since that module's state is global to the process.

mod common;

use vmtrace_trampolines::Overflow;

// Chunks are counted, cleared and opened by whoever comes first, and interrupted at any instruction
// of that: done twice, or at the wrong time, it loses records or mixes them.
#[test]
fn what_a_flight_recorder_keeps_is_whole_and_the_rest_is_counted() {
    common::stress::stress(Overflow::Overwrite);
}
