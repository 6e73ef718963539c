//! Drained rings under interrupts, preemption and migration: see `common/stress.rs`.

mod common;

use vmtrace_trampolines::Overflow;

// A program that is not atomic against all of these at once loses records, or mixes them.
#[test]
fn nothing_is_lost_or_torn_under_interrupts_preemption_and_migration() {
    common::stress::stress(Overflow::Drop);
}
