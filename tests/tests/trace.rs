//! Real kernels, booted and traced in the emulated host.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use vmtrace::kernel::SiteSection;
use vmtrace::stream::Exit;
use vmtrace_tests::trace::{KERNELS, Trace, WORKLOAD, boot, kernel, options};
use vmtrace_tests::{Finished, SharedHost};

static HOST: SharedHost =
    SharedHost::new(|| options(env!("CARGO_BIN_EXE_vmtrace-guest"), &KERNELS));

/// Boots a kernel of the cache and runs a command line of the workload program.
fn run(name: &str, workload: &str, args: &[&str]) -> (Finished, Trace) {
    let command = format!("{WORKLOAD} {workload}");
    let mut all = vec!["--add", WORKLOAD, "--run", &command];
    all.extend(args);
    let (finished, trace) = boot(&HOST, name, &all).unwrap();
    let err = finished.err();
    assert_eq!(finished.end.code, Some(0), "{err}");
    assert!(!err.contains("WARNING:") && !err.contains("BUG:"), "{err}");
    (finished, trace)
}

/// The value after `key` on a line of the console.
fn value(finished: &Finished, key: &str) -> u32 {
    let err = finished.err();
    let lines = err.lines().filter_map(|line| line.trim().strip_prefix(key));
    let value = lines.filter_map(|rest| rest.trim().parse().ok()).next();
    value.unwrap_or_else(|| panic!("no {key} in {err}"))
}

// A record lost, doubled or invented is what this tool must not do.
#[test]
fn a_hundred_thousand_calls_are_a_hundred_thousand_records() {
    for (cpus, places) in [("1", "0"), ("2", "0 1")] {
        let (finished, trace) = run(
            "x86_64-6.12",
            &format!("getppid 100000 {places}"),
            &["-f", "__x64_sys_getppid", "--cpus", cpus],
        );
        let pid = value(&finished, "pid ");
        for vcpu in 0..cpus.parse().unwrap() {
            let mine = trace.entries.iter().filter(|e| e.vcpu == vcpu && e.pid == pid);
            assert_eq!(mine.count(), 100_000, "vCPU {vcpu} of {cpus}");
        }
        assert_eq!(trace.summary.lost(), 0);
        trace.check_order().unwrap();
    }
}

// From ftrace_init to power-off, with every function that can be traced: no oops,
// no W+X page, nothing skipped, everything given back.
#[test]
fn every_function_can_be_traced_from_boot_to_power_off() {
    for name in KERNELS {
        let (finished, trace) = boot(&HOST, name, &["--cpus", "2", "--run", "true"]).unwrap();
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(finished.end.code, Some(0), "{name}: {err}");
        for bad in ["WARNING:", "BUG:", "W+X", "Oops", "rcu_sched self-detected"] {
            let found = err.lines().find(|line| line.contains(bad) && !line.contains("passed"));
            assert_eq!(found, None, "{name}");
        }
        assert_eq!(summary.sites.patched, summary.sites.matched, "{name}: {summary:?}");
        assert!(summary.sites.patched > 30_000, "{name}");
        assert_eq!(summary.exit, Exit::Poweroff, "{name}");
        assert_eq!(summary.notes, [] as [&str; 0], "{name}");
        assert!(trace.entries.len() > 1_000_000, "{name}: {}", trace.entries.len());
        assert!(trace.entries.iter().any(|e| e.vcpu == 1), "{name}: no record of vCPU 1");
        // Nothing of .init.text before it is freed is missed, and nothing comes after.
        let seen: BTreeSet<&str> = trace.entries.iter().map(|e| &*e.function).collect();
        let kernel = kernel(name).unwrap();
        let init = kernel.sites().iter().filter(|s| s.section == SiteSection::InitText);
        let init = init.filter_map(|s| kernel.site_name(s)).filter(|name| seen.contains(name));
        assert!(init.count() > 300, "{name}: hardly any function of .init.text");
    }
}

// The slide is found without any help of the guest.
#[test]
fn kaslr_kernels_are_traced_where_they_are() {
    let mut slides = BTreeSet::new();
    for name in KERNELS {
        let image = format!("--boot-image=/k/{name}.bz");
        let (_, trace) = run(name, "files", &["-f", "vfs_*", "--cpus", "2", "--kaslr", &image]);
        slides.insert(trace.header.slide);
        let names: BTreeSet<&str> = trace.entries.iter().map(|e| &*e.function).collect();
        assert!(names.contains("vfs_open") && names.contains("vfs_rename"), "{name}: {names:?}");
    }
    assert_ne!(slides, BTreeSet::from([0]), "no kernel moved: was KASLR on?");
}

// The reference is the guest's own function tracer under the same workload.
#[test]
fn the_same_functions_as_the_guests_own_ftrace() {
    for name in ["x86_64-6.1", "x86_64-7"] {
        let (finished, trace) = run(name, "files", &["-f", "vfs_*", "-f", "__x64_sys_getpgid"]);
        let pid = value(&finished, "pid ");
        let mine: Vec<&str> =
            trace.entries.iter().filter(|e| e.pid == pid).map(|e| &*e.function).collect();
        // The workload itself is between two calls of getpgid.
        let marks: Vec<usize> = (0..mine.len()).filter(|&i| mine[i].contains("getpgid")).collect();
        let [start, end] = marks[..] else { panic!("{name}: {marks:?}") };
        let ours: BTreeSet<&str> = mine[start + 1..end].iter().copied().collect();
        // A filter that leaves the vfs_* sites to the guest.
        let (finished, _) = run(name, "ftrace 'vfs_*' files", &["-f", "__x64_sys_getppid"]);
        let err = finished.err();
        let theirs: BTreeSet<&str> =
            err.lines().filter_map(|line| line.trim().strip_prefix("ftrace-function ")).collect();
        assert!(theirs.len() >= 8, "{name}: {err}");
        assert_eq!(ours, theirs, "{name}: vmtrace on the left, ftrace on the right");
    }
}

// A site that is ours must be refused (EINVAL), not break the guest's ftrace.
#[test]
fn the_guests_ftrace_keeps_working_beside_us() {
    for name in KERNELS {
        let (finished, _) = run(name, "refused vfs_read", &["-f", "vfs_*"]);
        let err = finished.err();
        assert!(err.contains("ftrace-filter refused 22"), "{name}: {err}");
        let (finished, trace) = run(name, "ftrace-all files", &["-f", "vfs_*"]);
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
        assert!(!trace.functions(value(&finished, "pid ")).is_empty(), "{name}");
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}");
    }
}

#[test]
fn from_begins_at_the_first_call() {
    let args = ["-f", "vfs_*", "--from", "vfs_rename"];
    let (finished, trace) = run("x86_64-6.12", "files", &args);
    let first = trace.entries.iter().find(|e| e.pid == value(&finished, "pid ")).unwrap();
    assert_eq!(&*first.function, "vfs_rename");
    assert_eq!(&*trace.entries[0].function, "vfs_rename", "nothing before it");
}

// A flight recorder keeps the newest and knows how many it has overwritten.
#[test]
fn overwrite_keeps_the_newest_and_counts_the_rest() {
    let args = ["-f", "__x64_sys_getppid", "--overflow", "overwrite"];
    let (_, trace) = run("x86_64-6.12", "getppid 600000 0", &args);
    assert_eq!(trace.summary.records() + trace.summary.lost(), 600_000);
    assert!(trace.summary.lost() > 100_000 && trace.entries.len() > 100_000);
    trace.check_order().unwrap();
}

// Ends are told apart, and the trace is whole after each.
#[test]
fn ends_are_told_apart() {
    let command = format!("{WORKLOAD} crash");
    let args = ["-f", "vfs_*", "--add", WORKLOAD, "--run", &command];
    let (finished, trace) = boot(&HOST, "x86_64-6.12", &args).unwrap();
    assert_eq!((finished.end.code, trace.summary.exit), (Some(3), Exit::Panic));
    assert!(trace.entries.iter().any(|e| &*e.function == "vfs_write"));

    let (finished, trace) = boot(&HOST, "x86_64-6.12", &["-f", "vfs_*", "--run", "false"]).unwrap();
    assert_eq!(finished.end.code, Some(4), "{}", finished.err());
    assert_eq!((trace.summary.run_status, trace.summary.exit), (Some(1), Exit::Poweroff));

    let args = ["-f", "vfs_*", "--run", "sleep 1000", "--timeout", "45"];
    let (finished, trace) = boot(&HOST, "x86_64-6.12", &args).unwrap();
    assert_eq!((finished.end.code, trace.summary.exit), (Some(1), Exit::Timeout));
}

#[test]
fn eight_vcpus_and_memory_above_4_gib() {
    let args = ["-f", "__x64_sys_getppid", "--cpus", "8", "--memory", "5G"];
    let (_, trace) = run("x86_64-6.12", "getppid 1000 0 1 2 3 4 5 6 7", &args);
    for vcpu in 0..8 {
        assert_eq!(trace.entries.iter().filter(|e| e.vcpu == vcpu).count(), 1000, "vCPU {vcpu}");
    }
}

// The command as a user types it, on whatever this machine is.
#[test]
fn the_command_line_works_end_to_end() {
    let vmlinuz = vmtrace::host::cache_dir().unwrap().join("kernels/x86_64-6.12/vmlinuz");
    let run = || {
        Command::new(vmtrace_tests::vmtrace().unwrap())
            .arg("boot")
            .arg(&vmlinuz)
            .args(["--filter", "vfs_*", "--run", "ls /", "--timeout", "240"])
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    // Once more if the emulation loses the guest; see `vmtrace_tests::trace::boot`.
    let mut output = run();
    if output.status.code() == Some(3) {
        output = run();
    }
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(out.starts_with("# tracer: function\n"), "{out}");
    assert!(out.contains("vfs_open <-"), "{out}");
    assert!(err.contains("vmtrace: run status 0"), "{err}");
}
