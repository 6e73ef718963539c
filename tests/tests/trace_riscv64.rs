//! Real riscv64 kernels, with and without CALL_OPS, booted and traced in the emulated host. They
//! must pass the same checks as those of x86-64.

use vmtrace::emulated::HostArch;
use vmtrace_tests::cases::Guests;
use vmtrace_tests::hostile::Harm;
use vmtrace_tests::live::unless_lost;
use vmtrace_tests::trace::{RISCV_KERNELS, options, some};
use vmtrace_tests::{SharedHost, disks, latency, shares, workload};

static GUESTS: Guests = Guests {
    host: SharedHost::new(|| {
        options(&workload(HostArch::Riscv64)?.to_string_lossy(), &RISCV_KERNELS)
    }),
    kernels: &RISCV_KERNELS,
};

#[test]
fn a_hundred_thousand_calls_are_a_hundred_thousand_records() {
    for name in some(&RISCV_KERNELS, 0) {
        GUESTS.a_hundred_thousand_calls_are_a_hundred_thousand_records(name);
    }
}

// Whoever reads a line of dmesg looks for its time in the trace.
#[test]
fn times_are_those_of_the_guests_log() {
    GUESTS.times_are_those_of_the_guests_log("riscv64-6.12");
}

#[test]
fn every_function_can_be_traced_from_boot_to_power_off() {
    GUESTS.every_function_can_be_traced_from_boot_to_power_off();
}

#[test]
fn calls_are_nested_as_the_guests_own_tracer_shows() {
    GUESTS.calls_are_nested_as_the_guests_own_tracer_shows("riscv64-7");
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn a_panic_shows_the_same_calls_with_every_return_traced() {
    GUESTS.a_panic_shows_the_same_calls_with_every_return_traced("riscv64-7");
}

#[test]
fn arguments_and_results_are_those_of_the_calls() {
    for name in some(&RISCV_KERNELS, 1) {
        GUESTS.arguments_and_results_are_those_of_the_calls(name);
    }
}

#[test]
fn a_hundred_thousand_calls_have_a_hundred_thousand_returns() {
    for name in some(&RISCV_KERNELS, 2) {
        GUESTS.a_hundred_thousand_calls_have_a_hundred_thousand_returns(name);
    }
}

#[test]
fn a_part_of_the_call_tree_is_whole() {
    for name in some(&RISCV_KERNELS, 0) {
        GUESTS.a_part_of_the_call_tree_is_whole(name);
    }
}

#[test]
fn every_function_can_be_traced_with_its_returns() {
    GUESTS.every_function_can_be_traced_with_its_returns();
}

#[test]
fn a_whole_boot_has_a_return_for_every_entry() {
    GUESTS.a_whole_boot_has_a_return_for_every_entry("riscv64-6.12");
}

#[test]
fn the_guests_own_ftrace_sees_the_same_and_keeps_working() {
    GUESTS.the_guests_own_ftrace_sees_the_same_and_keeps_working();
}

#[test]
fn both_trace_the_same_function() {
    for name in some(&RISCV_KERNELS, 3) {
        GUESTS.both_trace_the_same_function(name);
    }
}

#[test]
fn counts_are_those_of_the_records() {
    for name in some(&RISCV_KERNELS, 4) {
        GUESTS.counts_are_those_of_the_records(name);
    }
}

#[test]
#[ignore = "code for it runs in trampolines/tests, guests as on x86-64: with scripts/test --all"]
fn tracing_begins_and_ends_at_the_very_call() {
    for name in some(&RISCV_KERNELS, 5) {
        GUESTS.tracing_begins_and_ends_at_the_very_call(name);
    }
}

// Where programs are that end functions, and where those stop, is this architecture's own.
#[test]
fn triggers_see_how_calls_end() {
    for name in some(&RISCV_KERNELS, 6) {
        GUESTS.triggers_see_how_calls_end(name);
    }
}

#[test]
#[ignore = "code for it runs in trampolines/tests, guests as on x86-64: with scripts/test --all"]
fn conditions_hold_of_exactly_the_calls_that_are_meant() {
    for name in some(&RISCV_KERNELS, 6) {
        GUESTS.conditions_hold_of_exactly_the_calls_that_are_meant(name);
    }
}

#[test]
fn events_of_devices_and_memory_are_those_of_the_guests_own_trace() {
    for name in some(&RISCV_KERNELS, 8) {
        GUESTS.events_of_devices_and_memory_are_those_of_the_guests_own_trace(name);
    }
}

#[test]
fn events_are_those_of_the_guests_own_trace() {
    for name in some(&RISCV_KERNELS, 7) {
        GUESTS.events_are_those_of_the_guests_own_trace(name);
    }
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn system_calls_are_told_apart() {
    GUESTS.system_calls_are_told_apart("riscv64-6.12");
}

// Who was seen not to be followed is told by a note of that, which must not outlive what it says.
#[test]
fn children_that_are_followed_are_told_to_the_call() {
    for name in some(&RISCV_KERNELS, 1) {
        GUESTS.who_is_followed_is_told_to_the_call(name);
    }
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn a_line_that_needs_a_shell_gets_one() {
    GUESTS.a_line_that_needs_a_shell_gets_one("riscv64-7");
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn a_kernel_without_type_information_is_traced() {
    GUESTS.a_kernel_without_type_information_is_traced("riscv64-7");
}

#[test]
#[ignore = "code for it runs in trampolines/tests, guests as on x86-64: with scripts/test --all"]
fn from_begins_at_the_first_call() {
    for name in some(&RISCV_KERNELS, 8) {
        GUESTS.from_begins_at_the_first_call(name);
    }
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn overwrite_keeps_the_newest_and_counts_the_rest() {
    GUESTS.overwrite_keeps_the_newest_and_counts_the_rest("riscv64-7");
}

#[test]
#[ignore = "four minutes, on x86-64 they are made each time: with scripts/test --all"]
fn random_changes_leave_no_trace() {
    GUESTS.random_changes_leave_no_trace(&some(&RISCV_KERNELS, 0));
}

#[test]
fn panics_are_told_by_the_kernel() {
    GUESTS.panics_are_told_by_the_kernel(&some(&RISCV_KERNELS, 1));
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn the_console_is_no_witness() {
    GUESTS.the_console_is_no_witness("riscv64-7");
}

#[test]
fn a_guest_that_hangs_is_found_out() {
    GUESTS.a_guest_that_hangs_is_found_out("riscv64-7");
}

#[test]
fn other_ends_are_told_apart() {
    GUESTS.other_ends_are_told_apart("riscv64-7");
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn a_damaged_ring_ends_tracing_and_not_the_guest() {
    GUESTS.a_damaged_ring_ends_tracing_and_not_the_guest("riscv64-6.12");
}

#[test]
fn files_have_what_the_guest_has_written() {
    unless_lost(|| disks::files_have_what_the_guest_has_written("riscv64-6.12"));
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn a_guest_reads_and_writes_directories() {
    unless_lost(|| shares::a_guest_reads_and_writes_directories("riscv64-6.12"));
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn a_directory_is_the_root() {
    unless_lost(|| shares::a_directory_is_the_root("riscv64-7", "riscv64"));
}

#[test]
fn switches_agree_with_the_state_of_the_cpu() {
    for kernel in some(&RISCV_KERNELS, 1) {
        GUESTS.switches_agree_with_the_state_of_the_cpu(kernel);
    }
}

#[test]
fn times_off_are_as_long_as_they_were() {
    unless_lost(|| latency::times_off_are_as_long_as_they_were("riscv64-7"));
}

#[test]
#[ignore = "nothing in it is of this architecture: with scripts/test --all"]
fn a_task_is_the_noise_of_another() {
    unless_lost(|| latency::a_task_is_the_noise_of_another("riscv64-6.12"));
}

#[test]
fn a_guest_may_write_anything_into_the_annex() {
    GUESTS.a_guest_may_do_harm(Harm::Annex, "riscv64-6.12", &[1]);
}

#[test]
fn a_guest_may_give_its_devices_anything() {
    GUESTS.a_guest_may_do_harm(Harm::Queues, "riscv64-7", &[1]);
}

#[test]
fn a_guest_may_change_its_records_of_ftrace() {
    GUESTS.a_guest_may_do_harm(Harm::Records, "riscv64-7", &[1]);
}

#[test]
fn a_guest_may_change_the_page_tables_of_the_annex() {
    GUESTS.a_guest_may_do_harm(Harm::Tables, "riscv64-6.12", &[1]);
}

#[test]
fn direct_callers_of_modules_are_shared() {
    for name in some(&RISCV_KERNELS, 9) {
        GUESTS.direct_callers_of_modules_are_shared(name);
    }
}

#[test]
#[ignore = "those that return are, too: with scripts/test --all"]
fn functions_of_a_module_are_traced() {
    for name in some(&RISCV_KERNELS, 10) {
        GUESTS.functions_of_a_module_are_traced(name);
    }
}

#[test]
fn events_of_modules_are_traced() {
    GUESTS.events_of_modules_are_traced("riscv64-6.12");
}

#[test]
#[ignore = "another does it with returns: with scripts/test --all"]
fn modules_come_and_go_with_every_function_traced() {
    GUESTS.modules_come_and_go_with_every_function_traced("riscv64-6.12");
}

#[test]
fn functions_of_a_module_return() {
    for name in some(&RISCV_KERNELS, 11) {
        GUESTS.functions_of_a_module_return(name);
    }
}

#[test]
#[ignore = "two minutes: with scripts/test --all"]
fn a_large_module_returns_wherever_it_comes() {
    // 7.2 takes turns at two addresses, whose stubs are used again as they are.
    GUESTS.a_large_module_returns_wherever_it_comes("riscv64-6.12");
}

#[test]
fn modules_come_and_go_with_every_return_traced() {
    for name in some(&RISCV_KERNELS, 12) {
        GUESTS.modules_come_and_go_with_every_return_traced(name);
    }
}
