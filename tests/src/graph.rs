//! Calls with their returns: what must hold on every kernel on which they can be traced.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use vmtrace::emulated::FileSource;
use vmtrace::kernel::Exit;
use vmtrace::kernel::{After, Coverage, ExitKind, Kernel};
use vmtrace::stream;

use crate::cases::{Guests, trouble, value};
use crate::trace::{Entry, Trace, WORKLOAD, boot, kernel, missing, some, syscall};

/// Entries on one kernel stack of one tracer, the innermost last: where, and of which function.
type Stack<'a> = Vec<(u64, &'a str)>;

/// What pairing entries and returns by their stack pointers alone comes to.
#[derive(Debug, Default)]
struct Paired {
    /// Returns of the innermost function that is open at their stack pointer.
    matched: usize,
    /// Returns at a place where no function is open: its entry was not seen.
    unseen: usize,
    /// Returns of another function than that.
    wrong: BTreeMap<String, usize>,
    /// Functions that were still open when something above them was entered or returned.
    skipped: usize,
}

/// Pairs all returns of a trace, in the order of time.
fn pair(trace: &Trace) -> Paired {
    enum Kind {
        Entry,
        Return,
        Tail,
    }
    let mut all: Vec<(&Entry, Kind)> = Vec::new();
    all.extend(trace.entries.iter().map(|entry| (entry, Kind::Entry)));
    all.extend(trace.returns.iter().map(|entry| (entry, Kind::Return)));
    all.extend(trace.tails.iter().map(|entry| (entry, Kind::Tail)));
    // A clock of 10 MHz shows the same for several.
    all.sort_by_key(|(entry, _)| (entry.timestamp, entry.number));
    let mut stacks: HashMap<(u8, u64), Stack<'_>> = HashMap::new();
    let mut paired = Paired::default();
    for (record, kind) in all {
        let Some(sp) = record.sp else { continue };
        let stack = stacks.entry((record.tracer, sp >> 14)).or_default();
        while stack.last().is_some_and(|&(open, _)| open < sp) {
            stack.pop();
            paired.skipped += 1;
        }
        match kind {
            Kind::Entry => stack.push((sp, &record.function)),
            // Whoever it jumps to returns for both.
            Kind::Tail => {}
            Kind::Return => {
                match stack.last() {
                    Some(&(open, function)) if open == sp && *function == *record.function => {
                        paired.matched += 1;
                    }
                    Some(&(open, function)) if open == sp => {
                        let pair = format!("{function} ended by {}", record.function);
                        *paired.wrong.entry(pair).or_default() += 1;
                    }
                    _ => paired.unseen += 1,
                }
                while stack.last().is_some_and(|&(open, _)| open == sp) {
                    stack.pop();
                }
            }
        }
    }
    paired
}

/// Functions that are left by nothing but jumps to others, which are traced only if somebody asks for them, and return.
///
/// # Errors
/// When the image cannot be understood.
pub fn jumping(kernel: &Kernel) -> Result<Vec<String>> {
    let exits = kernel.exits()?;
    let only = |site: usize, kind: &dyn Fn(&Exit) -> bool| {
        exits.coverage(site) == Coverage::Whole && exits.of(site).iter().all(kind)
    };
    let sites: HashMap<u64, usize> =
        kernel.sites().iter().map(|site| site.entry).zip(0..).collect();
    let elsewhere = |exit: &Exit| match exit.kind {
        ExitKind::Jump { target } if exit.after == After::Nothing => sites
            .get(&target)
            .is_some_and(|&site| only(site, &|exit| exit.kind == ExitKind::Return)),
        _ => false,
    };
    let mut named: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (site, index) in kernel.sites().iter().zip(0..) {
        named.entry(kernel.site_name(site).unwrap_or_default()).or_default().push(index);
    }
    // Others of the name are left in other ways.
    let alone =
        named.iter().filter(|(_, sites)| matches!(sites[..], [site] if only(site, &elsewhere)));
    Ok(alone.map(|(name, _)| (*name).to_owned()).collect())
}

/// Calls of a tracer that were left by a jump: how many have ended where what they jumped to has, and how many have not.
pub fn jumped(trace: &Trace, tracer: u8) -> (usize, usize) {
    let of = |list: &[Entry], kind: u8| {
        let own = list.iter().filter(|record| record.tracer == tracer).cloned();
        own.map(|record| (record, kind)).collect::<Vec<_>>()
    };
    let mut all = [of(&trace.entries, 0), of(&trace.tails, 1), of(&trace.aids, 2)].concat();
    all.sort_by_key(|(record, _)| (record.timestamp, record.number));
    // Those that have jumped on each stack, the innermost last.
    let mut stacks: HashMap<u64, Vec<u64>> = HashMap::new();
    let (mut ended, mut unended) = (0, 0);
    for (record, kind) in all {
        let Some(sp) = record.sp else { continue };
        let open = stacks.entry(sp >> 14).or_default();
        while open.last().is_some_and(|&last| last < sp || last == sp && kind < 2) {
            open.pop();
            unended += 1;
        }
        match kind {
            1 => open.push(sp),
            2 => ended += usize::from(open.pop_if(|last| *last == sp).is_some()),
            _ => {}
        }
    }
    (ended, unended)
}

impl Guests {
    /// A return lost, doubled or of another function makes durations that never were.
    ///
    /// As many as a ring holds, so that the figures do not depend on how soon it is drained.
    pub fn a_hundred_thousand_calls_have_a_hundred_thousand_returns(&self, name: &str) {
        self.calls_have_their_returns(name, "1", "0", 100_000);
        self.calls_have_their_returns(name, "2", "0 1", 50_000);
    }

    fn calls_have_their_returns(&self, name: &str, cpus: &str, places: &str, calls: usize) {
        let function = syscall(name, "getppid").unwrap();
        let tracer = format!("--tracer=both={function}:graph+args+retval");
        let work = format!("getppid {calls} {places}");
        let args = ["--graph", "-f", &function, &tracer, "--cpus", cpus];
        let entries = format!("--tracer=entries={function}");
        let args = [&args[..], &[&entries]].concat();
        let (finished, trace) = self.run(name, &work, &args);
        let pid = value(&finished, "pid ");
        for vcpu in 0..cpus.parse().unwrap() {
            let count = |list: &[Entry], tracer: u8| {
                let mine = |e: &&Entry| e.vcpu == vcpu && e.pid == pid && e.tracer == tracer;
                list.iter().filter(mine).count()
            };
            let of = |tracer| (count(&trace.entries, tracer), count(&trace.returns, tracer));
            assert_eq!([of(0), of(1)], [(calls, calls); 2], "vCPU {vcpu} of {cpus}");
            assert_eq!(of(2), (calls, 0), "a tracer of entries alone");
        }
        let paired = pair(&trace);
        assert!(paired.wrong.is_empty() && paired.unseen == 0, "{paired:?}");
        let plain = trace.entries.iter().filter(|entry| entry.tracer == 2);
        assert!({ plain }.all(|entry| entry.sp.is_none()), "its calls would look unfinished");
        assert_eq!(missing(&trace.summary), 0);
        let sites = &trace.summary.sites;
        assert_eq!((sites.direct, sites.combined), (0, 1), "one site, three tracers");
    }

    /// Of every function, only what files are opened by is recorded, three levels of it, from boot to power-off: each
    /// such call is there with all that it calls, and nothing else.
    pub fn a_part_of_the_call_tree_is_whole(&self, name: &str) {
        const ROOT: &str = "do_sys_openat2";
        const DEEPEST: &str = "path_openat";
        let middle = if name.ends_with("-7") { "do_file_open" } else { "do_filp_open" };
        let counted = format!("--tracer=counted={ROOT},{DEEPEST}:count");
        let args = ["--graph", "-f", "*", "--graph-root", ROOT, "--max-depth", "3", "--cpus", "2"];
        let args = [&args[..], &["--overflow", "block", &counted]].concat();
        let (finished, trace) = self.run(name, "files", &args);
        let (err, counted) = (finished.err(), trace.counted().unwrap());
        assert_eq!(missing(&trace.summary), 0, "{err}");
        let mut stacks: HashMap<u64, Vec<u64>> = HashMap::new();
        let mut all: Vec<_> = trace.entries.iter().map(|entry| (entry, true)).collect();
        all.extend(trace.returns.iter().chain(&trace.aids).map(|entry| (entry, false)));
        all.sort_by_key(|(entry, _)| (entry.timestamp, entry.number));
        let mut calls: BTreeMap<(usize, &str), usize> = BTreeMap::new();
        for (record, enters) in all.iter().filter(|(record, _)| record.tracer == 0) {
            let sp = record.sp.unwrap();
            let open = stacks.entry(sp >> 14).or_default();
            if enters == &true {
                // What a function goes on in has its stack pointer.
                open.retain(|&outer| outer >= sp);
                open.push(sp);
                *calls.entry((open.len(), &record.function)).or_default() += 1;
            } else {
                open.retain(|&outer| outer > sp);
            }
        }
        assert!(stacks.values().all(Vec::is_empty), "{name}: calls without ends: {err}");
        let of = |depth, function| calls.get(&(depth, function)).copied().unwrap_or(0);
        let functions = |depth| calls.keys().filter(move |(at, _)| *at == depth).count();
        let total = |function: &str| usize::try_from(counted[function]).unwrap();
        let roots = of(1, ROOT);
        assert!(roots > 20, "{name}: {roots}: {err}");
        assert_eq!((roots, functions(1)), (total(ROOT), 1), "{name}: {calls:?}");
        assert_eq!(of(2, middle), roots, "{name}: {calls:?}");
        // Once more where it cannot be done without waiting; others than these open files, too.
        let deepest = of(3, DEEPEST);
        assert!((roots..=total(DEEPEST)).contains(&deepest), "{name}: {calls:?}");
        assert!(functions(2) > 2 && functions(3) > 2, "{name}: {calls:?}");
        assert_eq!(calls.keys().filter(|(depth, _)| *depth > 3).count(), 0, "{name}: {calls:?}");
        // Those of calls, each once.
        let ends = trace.returns.iter().filter(|record| record.tracer == 0).count();
        let entries: usize = calls.values().sum();
        assert!(ends > entries / 2 && ends <= entries, "{name}: {ends} of {entries}");
    }

    /// From boot to power-off, with every function, its arguments and where it is left, and a CPU that
    /// leaves and comes back: no oops, and every return is one of the function that was entered last
    /// at its stack pointer.
    pub fn every_function_can_be_traced_with_its_returns(&self) {
        some(self.kernels, 1).iter().for_each(|name| self.traces_everything(name, "hotplug 2"));
    }

    /// Where a jump through a pointer leads is known when it happens: all but the first such calls have an end, which is
    /// that of the very call in which they went on.
    pub fn calls_end_where_pointers_lead(&self, name: &str) {
        const JUMPS: &str = "vfs_getattr_nosec";
        let run =
            "i=0; while [ $i -lt 16 ]; do ls -l / /bin; sleep 0.5; i=$((i + 1)); done >/dev/null";
        let args =
            ["-f", JUMPS, "--graph", "--tracer=others=*_getattr:graph", "--overflow", "block"];
        let args = [&args[..], &["--cpus", "2", "--run", run]].concat();
        let (finished, trace) = boot(&self.host, name, &args).unwrap();
        assert_eq!(finished.end.code, Some(0), "{}", finished.err());
        assert_eq!(trouble(&finished.err()), None);
        let (ended, unended) = jumped(&trace, 0);
        println!("{name}: {ended} calls ended, {unended} not");
        // How soon all are followed depends on how long changes take.
        let first = trace.aids.iter().map(|aid| aid.timestamp).min().unwrap();
        let is_later = |tail: &&Entry| tail.tracer == 0 && tail.timestamp > first;
        let later = trace.tails.iter().filter(is_later).count();
        assert!(ended > 200 && ended * 2 > later, "{name}: {ended} of {later} ended");
        assert!(trace.aids.iter().all(|aid| *aid.function != *JUMPS), "{name}");
        let of = |list: &[Entry], tracer: u8, kind: u8| {
            let own = list.iter().filter(|record| record.tracer == tracer).cloned();
            own.map(|record| (record, kind)).collect::<Vec<_>>()
        };
        let lists = [of(&trace.tails, 0, 0), of(&trace.returns, 1, 1), of(&trace.aids, 0, 2)];
        let mut all = lists.concat();
        all.sort_by_key(|(record, _)| (record.timestamp, record.number));
        // How many calls have ended at each place of a stack since one jumped there.
        let mut since: HashMap<u64, usize> = HashMap::new();
        for (record, kind) in all {
            let Some(sp) = record.sp else { continue };
            match kind {
                0 => drop(since.insert(sp, 0)),
                1 => drop(since.get_mut(&sp).map(|count| *count += 1)),
                _ => assert_eq!(since.remove(&sp), Some(1), "{name}: {record:?}"),
            };
        }
    }

    /// A kernel that may be preempted nearly everywhere, and says so when it sleeps where it must not.
    pub fn a_realtime_kernel_is_traced_as_others_are(&self, name: &str) {
        let file = FileSource::Bytes(kernel(name).unwrap().vmlinux().to_vec());
        self.host.with(|host| host.put_file(&format!("/k/{name}"), &file)).unwrap();
        self.traces_everything(name, &format!("load 2 20 && {WORKLOAD} hotplug 1"));
        self.calls_have_their_returns(name, "2", "0 1", 50_000);
        self.both_trace_the_same_function(name);
    }

    fn traces_everything(&self, name: &str, work: &str) {
        let args = ["--graph", "--args", "--retval", "--cpus", "2", "--overflow", "overwrite"];
        let (finished, trace) = self.run(name, work, &args);
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(trouble(&err), None, "{name}");
        assert!(err.contains("hotplugged "), "{name}: {err}");
        assert_eq!(summary.sites.patched, summary.sites.matched, "{name}: {summary:?}");
        assert_eq!(summary.exit, stream::Exit::Poweroff, "{name}");
        assert_eq!(summary.notes, [] as [&str; 0], "{name}");
        let paired = pair(&trace);
        println!(
            "{name}: {} entries, {} returns, {} tails, {paired:?}",
            trace.entries.len(),
            trace.returns.len(),
            trace.tails.len()
        );
        assert!(paired.matched > 25_000, "{name}: {paired:?}");
        // Entries that were overwritten, and functions that end by what cannot be traced.
        assert!(paired.unseen * 20 < paired.matched, "{name}: {paired:?}");
        let wrong: usize = paired.wrong.values().sum();
        assert!(wrong * 200 < paired.matched, "{name}: {paired:?}");
    }

    /// From the beginning of a boot to power-off: every return has its entry, and every entry its
    /// return, but for functions in which tasks are at the end.
    ///
    /// Not more functions than the reader pairs in the time of a test; none is lost, since vCPUs wait for room.
    pub fn a_whole_boot_has_a_return_for_every_entry(&self, name: &str) {
        let few = ["v*", "d*", "sc*", "tty*", "f*", "!*lock*", "!fdt*", "!down*", "!format*"];
        let few = [&few[..], &["!desc*", "!fw*", "!dev_*"]].concat().join(",");
        let tracer = format!("--tracer={few}:graph");
        let (finished, trace) =
            boot(&self.host, name, &[&tracer, "--overflow", "block", "--run", "true"]).unwrap();
        assert_eq!(finished.end.code, Some(0), "{}", finished.err());
        assert_eq!(trouble(&finished.err()), None);
        assert_eq!(
            (missing(&trace.summary), trace.summary.notes.len()),
            (0, 0),
            "{}",
            finished.err()
        );
        let paired = pair(&trace);
        assert!(paired.matched > 50_000, "{paired:?}");
        assert_eq!(paired.matched, trace.returns.len(), "{paired:?}");
        let mut open: HashMap<&str, i64> = HashMap::new();
        trace.entries.iter().for_each(|entry| *open.entry(&entry.function).or_default() += 1);
        trace.returns.iter().for_each(|entry| *open.entry(&entry.function).or_default() -= 1);
        let kernel = kernel(name).unwrap();
        let exits = kernel.exits().unwrap();
        for (site, index) in kernel.sites().iter().zip(0..) {
            if exits.coverage(index) != Coverage::Whole {
                open.remove(kernel.site_name(site).unwrap_or_default());
            }
        }
        open.retain(|_, count| *count != 0);
        println!("{name}: {} returns, open at the end: {open:?}", trace.returns.len());
        // Each in a function that waits.
        assert!(open.len() < 20 && open.values().all(|&count| (1..100).contains(&count)));
        let waiting =
            open.keys().filter(|name| name.contains("schedule") || name.contains("futex"));
        assert!(waiting.count() > 0, "nobody waits at the end?");
    }
}
