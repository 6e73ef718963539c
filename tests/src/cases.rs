//! Test cases for guests of every architecture, however they are booted.

use std::collections::BTreeSet;
use std::sync::Arc;

use vmtrace::emulated::{EmulatedHost, FileSource};
use vmtrace::kernel::SiteSection;
use vmtrace::stream::{Exit, Summary};

use crate::stress::stress;
use crate::trace::{Trace, WORKLOAD, boot, kernel, missing, some, syscall};
use crate::{Finished, SharedHost};

/// Guest kernels of one architecture in an emulated host.
#[derive(Debug)]
pub struct Guests {
    /// Where they are booted.
    pub host: SharedHost,
    /// Their names in the cache.
    pub kernels: &'static [&'static str],
}

/// The values after `key` on lines of the console.
pub fn values(finished: &Finished, key: &str) -> Vec<u32> {
    let err = finished.err();
    let lines = err.lines().filter_map(|line| line.trim().strip_prefix(key));
    lines.filter_map(|rest| rest.trim().parse().ok()).collect()
}

/// The first of them.
pub fn value(finished: &Finished, key: &str) -> u32 {
    let first = values(finished, key).first().copied();
    first.unwrap_or_else(|| panic!("no {key} in {}", finished.err()))
}

pub(crate) fn function(kernel: &str, call: &str) -> String {
    syscall(kernel, call).unwrap()
}

/// A line of the console that no kernel should have.
pub fn trouble(console: &str) -> Option<&str> {
    const TROUBLE: [&str; 6] =
        ["WARNING:", "BUG:", "W+X", "Oops", "self-detected stall", "blocked for more than"];
    let bad = |line: &&str| TROUBLE.iter().any(|bad| line.contains(bad));
    console.lines().find(|line| bad(line) && !line.contains("passed"))
}

/// Fails unless a trace has all records, and nothing is to be said of it. First what that is: a run
/// of CI keeps the beginning alone.
pub fn assert_whole(name: &str, summary: &Summary, err: &str) {
    let found = (missing(summary), &summary.notes[..]);
    assert_eq!(found, (0, &[] as &[String]), "{name}: {:?}\n{err}", summary.vcpus);
}

impl Guests {
    /// Boots a kernel of the cache and runs a command line of the workload program.
    pub fn run(&self, name: &str, workload: &str, args: &[&str]) -> (Finished, Trace) {
        let command = format!("{WORKLOAD} {workload}");
        let mut all = vec!["--add", WORKLOAD, "--run", &command];
        all.extend(args);
        let (finished, trace) = boot(&self.host, name, &all).unwrap();
        let err = finished.err();
        assert_eq!(finished.end.code, Some(0), "{err}");
        let bad = |line: &&str| line.contains("WARNING:") || line.contains("BUG:");
        // That the processor has a fault is no fault of the guest's.
        let mut lines = err.lines().filter(|line| !line.contains("admin-guide/hw-vuln/"));
        let bad = lines.find(bad);
        assert_eq!(bad, None, "{name}: {err}");
        (finished, trace)
    }

    /// A record lost, doubled or invented is what this tool must not do.
    pub fn a_hundred_thousand_calls_are_a_hundred_thousand_records(&self, name: &str) {
        for (cpus, places) in [("1", "0"), ("2", "0 1")] {
            let (finished, trace) = self.run(
                name,
                &format!("getppid 100000 {places}"),
                &["-f", &function(name, "getppid"), "--cpus", cpus],
            );
            let pid = value(&finished, "pid ");
            for vcpu in 0..cpus.parse().unwrap() {
                let mine = trace.entries.iter().filter(|e| e.vcpu == vcpu && e.pid == pid);
                assert_eq!(mine.count(), 100_000, "vCPU {vcpu} of {cpus}");
            }
            assert_eq!(missing(&trace.summary), 0);
            trace.check_order().unwrap();
        }
    }

    /// From ftrace_init to power-off, with every function that can be traced: no oops,
    /// no W+X page, nothing skipped, everything given back.
    /// All of it, whatever the machine's speed, since vCPUs wait for room; and as many calls as were
    /// counted beside the records.
    pub fn every_function_can_be_traced_from_boot_to_power_off(&self) {
        let args = ["--cpus", "2", "--run", "true", "--overflow", "block", "-f", "*"];
        let args = [&args[..], &["--tracer", "counts=*:count", "--compress", "zstd"]].concat();
        for name in some(self.kernels, 2) {
            let (finished, trace) = boot(&self.host, name, &args).unwrap();
            let (err, summary) = (finished.err(), &trace.summary);
            assert_eq!(finished.end.code, Some(0), "{name}: {err}");
            assert_eq!(trouble(&err), None, "{name}");
            assert_eq!(summary.sites.patched, summary.sites.matched, "{name}: {summary:?}");
            assert!(summary.sites.patched > 30_000, "{name}");
            assert_eq!(summary.exit, Exit::Poweroff, "{name}");
            assert_whole(name, summary, &err);
            let mut counted = trace.counted().unwrap();
            for entry in &trace.entries {
                *counted.entry(Arc::clone(&entry.function)).or_default() -= 1;
            }
            counted.retain(|_, more| *more != 0);
            // The guest's end stops vCPUs, and tasks that were preempted, anywhere: between a record and
            // the count of it as well.
            let differ: u64 = counted.values().map(|more| more.unsigned_abs()).sum();
            assert!(differ <= 4, "{name}: more counted than recorded: {counted:?}");
            assert!(trace.entries.len() > 1_000_000, "{name}: {}", trace.entries.len());
            assert!(trace.stream.len() < 6 * trace.entries.len(), "{name}: hardly compressed");
            assert!(trace.entries.iter().any(|e| e.vcpu == 1), "{name}: no record of vCPU 1");
            // Nothing of .init.text before it is freed is missed, and nothing comes after.
            let seen: BTreeSet<&str> = trace.entries.iter().map(|e| &*e.function).collect();
            let kernel = kernel(name).unwrap();
            let init = kernel.sites().iter().filter(|s| s.section == SiteSection::InitText);
            let init = init.filter_map(|s| kernel.site_name(s)).filter(|name| seen.contains(name));
            assert!(init.count() > 300, "{name}: hardly any function of .init.text");
        }
    }

    /// The reference is the guest's own function tracer under the same workload. And that
    /// tracer may use all functions, ours or not.
    pub fn the_guests_own_ftrace_sees_the_same_and_keeps_working(&self) {
        for name in some(self.kernels, 0) {
            let filter = ["-f", "vfs_*", "-f", &function(name, "getpgid")];
            let run =
                format!("files && {WORKLOAD} refused vfs_read && {WORKLOAD} ftrace-all files");
            let (finished, trace) = self.run(name, &run, &filter);
            let err = finished.err();
            let [pid, beside] = values(&finished, "pid ")[..] else { panic!("{name}: {err}") };
            assert!(err.contains("ftrace-filter accepted"), "{name}: {err}");
            assert_eq!(trouble(&err), None, "{name}");
            assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
            assert!(!trace.functions(beside).is_empty(), "{name}");
            assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}");

            let mine: Vec<&str> =
                trace.entries.iter().filter(|e| e.pid == pid).map(|e| &*e.function).collect();
            // The workload itself is between two calls of getpgid.
            let marks: Vec<usize> =
                (0..mine.len()).filter(|&i| mine[i].contains("getpgid")).collect();
            let [start, end] = marks[..] else { panic!("{name}: {marks:?}") };
            let ours: BTreeSet<&str> = mine[start + 1..end].iter().copied().collect();
            // A filter that leaves the vfs_* sites to the guest.
            let (finished, _) =
                self.run(name, "ftrace 'vfs_*' files", &["-f", &function(name, "getppid")]);
            let err = finished.err();
            let theirs: BTreeSet<&str> = err
                .lines()
                .filter_map(|line| line.trim().strip_prefix("ftrace-function "))
                .collect();
            assert!(theirs.len() >= 8, "{name}: {err}");
            assert_eq!(ours, theirs, "{name}: vmtrace on the left, ftrace on the right");
        }
    }

    /// Both trace the same function: the guest's own tracers come and go, alone and two at a time, on
    /// two CPUs, and neither side misses a call.
    pub fn both_trace_the_same_function(&self, name: &str) {
        let function = function(name, "getppid");
        let (finished, trace) =
            self.run(name, "beside 40 2", &["-f", &function, "-f", "vfs_*", "--cpus", "2"]);
        let (err, summary) = (finished.err(), &trace.summary);
        let (pid, calls) = (value(&finished, "pid "), value(&finished, "called "));
        let mine = trace.entries.iter();
        let mine = mine.filter(|e| e.pid == pid && e.function.ends_with("sys_getppid"));
        assert_eq!(mine.count(), usize::try_from(calls).unwrap(), "{name}: {err}");
        assert_eq!(trouble(&err), None, "{name}");
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
        assert_whole(name, summary, &err);
        let sites = &summary.sites;
        assert_eq!((sites.matched, sites.shared), (sites.patched, 1), "{name}: {sites:?}");
        // Direct calls go another way than what all tracers share.
        for program in ["Fentry", "Fexit"] {
            assert!(err.contains(&format!("beside {program} ")), "{name}: no BPF: {err}");
        }
        // Fewer where the guest has no kprobes at sites.
        let least = if err.contains("beside Kprobe") { 20 } else { 15 };
        assert!(sites.guest_updates > least, "{name}: {sites:?}");
    }

    /// Records begin with the function that was asked for.
    pub fn from_begins_at_the_first_call(&self, name: &str) {
        let args = ["-f", "vfs_*", "--from", "vfs_rename"];
        let (finished, trace) = self.run(name, "files", &args);
        let first = trace.entries.iter().find(|e| e.pid == value(&finished, "pid ")).unwrap();
        assert_eq!(&*first.function, "vfs_rename");
        assert_eq!(&*trace.entries[0].function, "vfs_rename", "nothing before it");
    }

    /// A flight recorder keeps the newest and knows how many it has overwritten.
    pub fn overwrite_keeps_the_newest_and_counts_the_rest(&self, name: &str) {
        let args = ["-f", &function(name, "getppid"), "--overflow", "overwrite"];
        let (_, trace) = self.run(name, "getppid 600000 0", &args);
        assert_eq!(trace.summary.records() + trace.summary.lost(), 600_000);
        assert!(trace.summary.lost() > 100_000 && trace.entries.len() > 100_000);
        trace.check_order().unwrap();
    }

    /// Puts a changed kernel into the host, to be booted by this name.
    pub(crate) fn put_kernel(&self, name: &str, image: Vec<u8>) {
        let (place, file) = (format!("/k/{name}"), FileSource::Bytes(image));
        self.host.with(|host: &mut EmulatedHost| host.put_file(&place, &file)).unwrap();
    }

    /// Kernels whose type information nobody can read, as those have that are built without.
    pub fn a_kernel_without_type_information_is_traced(&self, name: &str) {
        let kernel = kernel(name).unwrap();
        let mut image = kernel.vmlinux().to_vec();
        let btf = kernel.btf().unwrap().bytes();
        let at = image.windows(btf.len()).position(|bytes| bytes == btf).unwrap();
        image[at] ^= 0xff;
        let plain = format!("{name}-without-btf");
        self.put_kernel(&plain, image);
        let args = ["-f", &function(name, "getppid"), "--cpus", "2"];
        let (finished, trace) = self.run(&plain, "getppid 1000 0 1", &args);
        let pid = value(&finished, "pid ");
        for vcpu in 0..2 {
            let mine = trace.entries.iter().filter(|e| e.vcpu == vcpu && e.pid == pid);
            assert_eq!(mine.count(), 1000, "vCPU {vcpu}");
        }
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}");
    }

    /// Sites are given back and taken again under load, without a guest noticing.
    pub fn random_changes_leave_no_trace(&self, names: &[&str]) {
        for name in names {
            stress(&self.host, name).unwrap();
        }
    }
}
