//! Functions of a module that is loaded, used and unloaded.

use std::collections::{BTreeMap, BTreeSet};

use vmtrace::emulated::{FileSource, HostArch, cache_dir};
use vmtrace::initramfs::Modules;
use vmtrace::stream::{Exit, Frame, MarkKind, Reader};

use crate::args::json;
use crate::cases::{Guests, assert_whole, trouble, value, values};
use crate::counts::counted;
use crate::trace::{Entry, Trace, arch_of, missing, syscall};

/// The module that guests load, and its function that is called once for each look at its device.
const MODULE: &str = "dummy";
const FUNCTION: &str = "dummy_get_stats64";
/// What that jumps to.
const BEHIND: &str = "dev_lstats_read";
/// How often it comes, and is used each time.
const ROUNDS: usize = 3;
const READS: usize = 25;
/// The same with every function traced, which takes its time.
const BUSY: usize = 2;

impl Guests {
    /// A module of a kernel of the cache, in the host.
    pub(crate) fn put_module(&self, name: &str, module: &str) -> String {
        let directory = cache_dir().unwrap().join("kernels").join(name).join("modules");
        let content = Modules::open(&directory).unwrap().read(module).unwrap();
        let path = format!("/m/{name}/{module}.ko");
        self.host.with(|host| host.put_file(&path, &FileSource::Bytes(content))).unwrap();
        path
    }

    /// A filter waits for a module; every call is seen from the first one on, each time that it
    /// comes. Where sites are shared, the guest's own tracer on the same function sees them, too.
    pub fn functions_of_a_module_are_traced(&self, name: &str) {
        let (module, getpgid) = (self.put_module(name, MODULE), syscall(name, "getpgid").unwrap());
        let shares = arch_of(name).unwrap() == HostArch::X86_64;
        let beside = if shares { " beside" } else { "" };
        let run = format!("modules /{MODULE}.ko {ROUNDS} {READS}{beside}");
        let filter = format!(":mod:{MODULE}");
        let counting = format!("counts={filter}:count");
        let mut args = vec!["-f", &filter, "-f", &getpgid, "--cpus", "2", "--add", &module];
        // By arguments, of which the module alone says where they are.
        let device = format!("device={FUNCTION}{filter}:count if dev != 0 && args.stats != 0");
        let nothing = format!("nothing={FUNCTION}{filter}:count if stats == 0");
        // By how calls end, which only the module's own exits and types tell.
        let sorted = format!("sorted={FUNCTION}{filter}:hist");
        let returned = format!("values=dummy_init_module{filter}:hist(retval)");
        let good = format!("good=dummy_init_module{filter} if retval == 0");
        let bad = format!("bad=dummy_init_module{filter} if retval < 0");
        let took = format!("took={FUNCTION}{filter} if duration >= 1ns && dev != 0");
        for tracer in [&counting, &device, &nothing, &sorted, &returned, &good, &bad, &took] {
            args.extend(["--tracer", tracer]);
        }
        // In the second round of the module, which is loaded long after the boot.
        let trigger = format!("{FUNCTION}:mod:{MODULE}:{}", READS + READS / 2);
        args.extend(["--mark-at", &trigger]);
        // Along a pointer, by a structure of the kernel that only the module's types lead to.
        let named = [FUNCTION, "dummy_dev_init"].map(|it| format!("{it}{filter}: name=dev->name"));
        named.iter().for_each(|values| args.extend(["--arg", values]));
        let (finished, trace) = self.run(name, &run, &args);
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(trouble(&err), None, "{name}");
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
        if shares {
            let seen = values(&finished, "guest-saw ");
            assert_eq!(seen, [u32::try_from(READS).unwrap(); ROUNDS], "{name}: {err}");
        }
        assert_whole(name, summary, &err);
        assert_eq!((summary.sites.matched, summary.sites.patched), (1, 1), "{name}");
        assert_eq!(summary.sites.shared > 0, shares, "{name}: {:?}", summary.sites);

        let counts = counted(&json(&trace), "counts", None);
        // Nor is one that is counted lost with the module.
        let calls = |function| {
            let calls = trace.entries.iter().filter(|entry| &*entry.function == function);
            calls.count() as u64
        };
        assert!(calls(FUNCTION) >= (ROUNDS * READS) as u64, "{name}");
        for function in [FUNCTION, "dummy_init_module"] {
            assert_eq!(counts.get(function), Some(&calls(function)), "{name}: {counts:?}");
        }

        let lines = json(&trace);
        for function in [FUNCTION, "dummy_dev_init"] {
            let own = lines.iter().filter(|line| line["function"] == function);
            let own = own.filter(|line| line["event"] == "entry" && line["tracer"] == "tracer0");
            let names: Vec<_> = own.map(|line| &line["args"]["name"]).collect();
            assert!(names.len() >= ROUNDS, "{name}: {function} {names:?}");
            assert!(names.iter().all(|&it| it == "dummy0"), "{name}: {function} {names:?}");
        }

        let of_device = counted(&json(&trace), "device", None);
        assert_eq!(of_device.get(FUNCTION), Some(&calls(FUNCTION)), "{name}: {of_device:?}");
        let of_nothing = counted(&json(&trace), "nothing", None);
        assert_eq!(of_nothing.get(FUNCTION), None, "{name}: {of_nothing:?}");

        let calls_of = |tracer: &str| {
            let own = lines.iter().filter(|line| line["event"] == "hist");
            let own = own.filter(|line| line["tracer"] == tracer && line["missed"] == 0);
            let buckets = own.flat_map(|line| line["buckets"].as_array().unwrap());
            buckets.map(|bucket| bucket[1].as_u64().unwrap()).sum::<u64>()
        };
        assert_eq!(calls_of("sorted"), calls(FUNCTION), "{name}: each call has a duration");
        assert_eq!(calls_of("values"), ROUNDS as u64, "{name}: what each returns");
        let ends = |tracer: &str| {
            let own = lines.iter().filter(|line| line["tracer"] == tracer);
            // Of one that is a jump as well.
            let own = own.filter(|line| line["event"] == "return");
            own.map(|line| line["function"].as_str().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(ends("good"), ["dummy_init_module"; ROUNDS], "{name}");
        assert_eq!(ends("bad"), [""; 0], "{name}");
        let took = ends("took");
        assert!(took.iter().all(|&function| function == FUNCTION), "{name}: {took:?}");
        assert_eq!(took.len() as u64, calls(FUNCTION), "{name}: each call that ends");

        let pid = value(&finished, "pid ");
        let mut mine: Vec<_> = trace.entries.iter().filter(|entry| entry.pid == pid).collect();
        mine.sort_by_key(|entry| entry.timestamp);
        let mine: Vec<&str> = mine.into_iter().map(|entry| &*entry.function).collect();
        // Between two calls of getpgid, in each round.
        let parts: Vec<_> = mine.split(|&function| function == getpgid).collect();
        assert_eq!(parts.len(), 2 * ROUNDS + 1, "{name}: {mine:?}");
        for (number, part) in parts.iter().enumerate() {
            if number % 2 == 1 {
                assert_eq!(*part, [FUNCTION; READS], "{name}");
            } else if number < 2 * ROUNDS {
                let init = part.iter().filter(|&&function| function == "dummy_init_module");
                assert_eq!(init.count(), 1, "{name}: {part:?}");
            }
        }
        let first = mine.iter().find(|&&function| function != getpgid);
        assert_eq!(first, Some(&"dummy_init_module"), "{name}");
        assert_eq!(modules(&trace), BTreeSet::from([MODULE.to_owned()]), "{name}");
        let notes = trace.marks(MarkKind::Note).unwrap();
        let at = format!("--mark-at {trigger}: {FUNCTION} [{MODULE}] on vCPU ");
        let fired = notes.iter().filter(|note| note.starts_with(&at)).count();
        assert_eq!(fired, 1, "{name}: {notes:?}");
        let marks = trace.marks(MarkKind::Filter).unwrap();
        let count = |text: &str| marks.iter().filter(|mark| mark.contains(text)).count();
        for text in ["module dummy loaded", "module dummy is initialised", "module dummy unloaded"]
        {
            assert_eq!(count(text), ROUNDS, "{name}: {marks:?}");
        }
    }

    /// Every call of a function of a module ends as it begins, each time that the module comes, however it
    /// is left: by a return, or by a jump to a function of the kernel that returns in its place.
    pub fn functions_of_a_module_return(&self, name: &str) {
        let module = self.put_module(name, MODULE);
        // Where functions jump to others in their place, and the guest's own tracer is there, too.
        let jumps = arch_of(name).unwrap() == HostArch::X86_64;
        let beside = if jumps { " beside" } else { "" };
        let run = format!("modules /{MODULE}.ko {ROUNDS} {READS}{beside}");
        let filter = format!(":mod:{MODULE}");
        let args = ["-f", &filter, "-f", BEHIND, "--graph", "--retval", "--args", "--cpus", "2"];
        let (finished, trace) = self.run(name, &run, &[&args[..], &["--add", &module]].concat());
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(trouble(&err), None, "{name}");
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
        assert_eq!((missing(summary), &summary.notes[..]), (0, &[][..]), "{name}\n{err}");

        let of = |entries: &[Entry], function: &str| {
            entries.iter().filter(|entry| &*entry.function == function).count()
        };
        let reads = of(&trace.entries, FUNCTION);
        assert!(reads >= ROUNDS * READS, "{name}: {reads}");
        let (tails, returns) = if jumps { (reads, 0) } else { (0, reads) };
        assert_eq!(of(&trace.tails, FUNCTION), tails, "{name}: whether it ends by a jump");
        assert_eq!(of(&trace.returns, FUNCTION), returns, "{name}");
        let lines = json(&trace);
        let lines = |event: &str, function: &str| {
            let own = lines.iter().filter(|line| line["module"] == MODULE);
            let own = own.filter(|line| line["event"] == event && line["function"] == function);
            own.cloned().collect::<Vec<_>>()
        };
        let own = trace.entries.iter().map(|entry| &*entry.function);
        let own: BTreeSet<&str> = own.filter(|function| *function != BEHIND).collect();
        assert!(own.len() > 3, "{name}: {own:?}");
        for function in own {
            let [entries, returns] = ["entry", "return"].map(|event| lines(event, function));
            assert_eq!(entries.len(), returns.len(), "{name}: {function}\n{err}");
            for line in &returns {
                assert!(line["duration_ns"].as_u64().is_some(), "{name}: {line}");
                // By the module's own types. Those of a device's life return nothing.
                assert!(!line["value"].is_string(), "{name}: {line}");
            }
        }
        let init = lines("return", "dummy_init_module");
        assert_eq!(init.len(), ROUNDS, "{name}");
        assert!(init.iter().all(|line| line["value"] == 0), "{name}: {init:?}");
        let setup = lines("return", "dummy_setup");
        assert!(!setup.is_empty() && setup.iter().all(|line| line["value"].is_null()), "{name}");
        let setup = lines("entry", "dummy_setup");
        let device = |line: &serde_json::Value| line["args"]["dev"].as_str().map(str::to_owned);
        assert!(setup.iter().all(|line| device(line).is_some()), "{name}: {setup:?}");
    }

    /// Events of modules, and of the kernel where only modules come by them, are traced each time that
    /// the modules come, and the guest's own trace of them sees them all as well, whether it ends before
    /// the modules go or with them. The kernel looks whether tracepoints of a module that goes are in
    /// use, and warns.
    pub fn events_of_modules_are_traced(&self, name: &str) {
        const EVENTS: [&str; 2] = ["xfs/xfs_buf_get_uncached", "bridge/fdb_delete"];
        const USES: usize = 5;
        let directory = cache_dir().unwrap().join("kernels").join(name).join("modules");
        let known = Modules::open(&directory).unwrap();
        // What libcrc32c asks for when it is initialised, where that is a module.
        let mut modules = known.resolve(&["crc32c_generic"]).unwrap_or_default();
        modules.extend(known.resolve(&["brd", "xfs", "bridge"]).unwrap());
        let (mut run, mut added) = (format!("points {ROUNDS} {USES} {}", EVENTS.join(",")), vec![]);
        for module in modules {
            run.push_str(&format!(" /{}.ko", module.name));
            added.push(format!("/m/{name}/{}.ko", module.name));
            let (path, content) = (added.last().unwrap(), FileSource::Bytes(module.content));
            self.host.with(|host| host.put_file(path, &content)).unwrap();
        }
        let getpgid = syscall(name, "getpgid").unwrap();
        let mut args = vec!["-f", &getpgid, "--cpus", "2"];
        args.extend(["--event", "xfs:xfs_buf_*:mod:xfs", "--event", "bridge:*"]);
        added.iter().for_each(|path| args.extend(["--add", path]));
        let (finished, trace) = self.run(name, &run, &args);
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(trouble(&err), None, "{name}");
        assert_eq!((missing(summary), &summary.notes[..]), (0, &[][..]), "{name}\n{err}");
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");

        let pid = value(&finished, "pid ");
        let mine = json(&trace).into_iter().filter(|line| line["pid"] == pid);
        let mine =
            mine.filter(|line| ["entry", "event"].contains(&line["event"].as_str().unwrap()));
        let mut mine: Vec<_> = mine.collect();
        mine.sort_by_key(|line| line["ns"].as_u64());
        // Between two calls of getpgid, in each round.
        let parts: Vec<_> = mine.split(|line| line["function"] == getpgid).collect();
        assert_eq!(parts.len(), 2 * ROUNDS + 1, "{name}: {mine:?}");
        for event in EVENTS {
            let (full, short) = (event.replace('/', ":"), event.rsplit('/').next().unwrap());
            let own = |line: &&serde_json::Value| line["name"] == full;
            let seen: Vec<usize> = parts
                .iter()
                .skip(1)
                .step_by(2)
                .map(|part| part.iter().filter(own).count())
                .collect();
            assert_eq!(seen[0] % USES, 0, "{name}: {event} {seen:?}");
            assert!(seen[0] >= USES && seen == [seen[0]; ROUNDS], "{name}: {event} {seen:?}");
            let guest = values(&finished, &format!("guest-saw-{short} "));
            assert_eq!(guest, [u32::try_from(seen[0]).unwrap(); ROUNDS - 1], "{name}: {event}");
        }
        let get = mine.iter().find(|line| line["name"] == "xfs:xfs_buf_get_uncached").unwrap();
        let fields: Vec<_> = get["fields"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(fields, ["bp", "caller_ip"], "{name}: {get}");
    }

    /// The memory of what is gone is not written, whatever else the guest does meanwhile.
    pub fn modules_come_and_go_with_every_function_traced(&self, name: &str) {
        let module = self.put_module(name, MODULE);
        let run = format!("modules /{MODULE}.ko {BUSY} 1 busy");
        let (finished, trace) = self.run(name, &run, &["--cpus", "2", "--add", &module]);
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(trouble(&err), None, "{name}");
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
        assert_eq!(
            (summary.exit, &summary.notes[..]),
            (Exit::Poweroff, &[] as &[String]),
            "{name}"
        );
        assert_eq!(summary.sites.matched, summary.sites.patched, "{name}: {:?}", summary.sites);
        let marks = trace.marks(MarkKind::Filter).unwrap();
        let unloaded = marks.iter().filter(|mark| mark.contains("module dummy unloaded"));
        assert_eq!(unloaded.count(), BUSY, "{name}: {marks:?}");
        let callers = modules(&trace);
        assert!(callers.contains(MODULE), "{name}: {callers:?}");
    }

    /// Code of a module that is rewritten too late, wrongly, or when it is gone crashes the guest: with the
    /// returns of every function traced, on all CPUs, while modules come and go.
    pub fn modules_come_and_go_with_every_return_traced(&self, name: &str) {
        let module = self.put_module(name, MODULE);
        let run = format!("modules /{MODULE}.ko {BUSY} 1 busy");
        // Calls and returns can be compared only if none is lost.
        let args = ["--graph", "--overflow", "block", "--cpus", "2", "--add", &module];
        let (finished, trace) = self.run(name, &run, &args);
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(trouble(&err), None, "{name}");
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
        assert_eq!(summary.exit, Exit::Poweroff, "{name}: {err}");
        let untold = |note: &&String| note.contains("of modules") || note.contains("of module");
        assert_eq!(summary.notes.iter().find(untold), None, "{name}");
        let lines = json(&trace);
        let count = |event: &str| {
            let own = lines.iter().filter(|line| line["module"] == MODULE);
            own.filter(|line| line["event"] == event).count()
        };
        let (entries, returns) = (count("entry"), count("return"));
        assert!(returns > 0, "{name}: {entries} entries");
        assert_eq!((missing(summary), entries), (0, returns), "{name}");
    }

    /// Stubs that are never free again run out at the second address of a large module, and those that
    /// are free too early crash the guest: with all returns of its functions traced it comes to other
    /// addresses again and again, and each call of its functions has its return.
    pub fn a_large_module_returns_wherever_it_comes(&self, name: &str) {
        const LARGE: &str = "xfs";
        const TIMES: usize = 6;
        // Two of the module have room.
        const PLACES: usize = 3;
        let directory = cache_dir().unwrap().join("kernels").join(name).join("modules");
        let known = Modules::open(&directory).unwrap();
        let mut modules = known.resolve(&["crc32c_generic"]).unwrap_or_default();
        modules.extend(known.resolve(&[LARGE]).unwrap());
        let (mut run, mut added) = (format!("elsewhere {TIMES} {PLACES} /{MODULE}.ko"), vec![]);
        added.push(self.put_module(name, MODULE));
        for module in modules {
            run.push_str(&format!(" /{}.ko", module.name));
            added.push(format!("/m/{name}/{}.ko", module.name));
            let (path, content) = (added.last().unwrap(), FileSource::Bytes(module.content));
            self.host.with(|host| host.put_file(path, &content)).unwrap();
        }
        let filter = format!(":mod:{LARGE}");
        let mut args = vec!["-f", &filter, "--graph", "--overflow", "block", "--cpus", "2"];
        args.extend(["--timeout", "900"]);
        added.iter().for_each(|path| args.extend(["--add", path]));
        let (finished, trace) = self.run(name, &run, &args);
        let (err, summary) = (finished.err(), &trace.summary);
        assert_eq!(trouble(&err), None, "{name}");
        assert_eq!(value(&finished, "ftrace-enabled "), 1, "{name}");
        assert_eq!((summary.exit, missing(summary)), (Exit::Poweroff, 0), "{name}: {err}");
        let pages = values(&finished, "page ");
        let places: BTreeSet<_> = pages.iter().collect();
        assert!(pages.len() >= TIMES && places.len() >= PLACES, "{name}: {pages:?}");
        let no_stub = |note: &&String| note.contains("no stub");
        assert_eq!(summary.notes.iter().find(no_stub), None, "{name}");

        let mut counts: BTreeMap<String, [usize; 2]> = BTreeMap::new();
        for line in json(&trace).iter().filter(|line| line["module"] == LARGE) {
            let number = ["entry", "return"].iter().position(|&event| line["event"] == event);
            let function = line["function"].as_str().unwrap().to_owned();
            counts.entry(function).or_default()[number.unwrap()] += 1;
        }
        let calls: usize = counts.values().map(|count| count[0]).sum();
        let other = counts.iter().find(|(_, count)| count[0] != count[1]);
        assert_eq!(other, None, "{name}: {:?}", summary.notes);
        println!("{name}: {calls} calls of {} functions, pages {pages:?}", counts.len());
        let init = counts.get("init_xfs_fs").unwrap();
        assert_eq!(init, &[pages.len(); 2], "{name}");
    }
}

/// Modules of the functions of a trace.
fn modules(trace: &Trace) -> BTreeSet<String> {
    let mut reader = Reader::new(&*trace.stream).unwrap();
    let mut modules = BTreeSet::new();
    while let Some(frame) = reader.next_frame().unwrap() {
        if let Frame::Symbols(list) = frame {
            for symbol in list {
                symbol.with_text(|symbol| modules.insert(symbol.module.to_owned()));
            }
        }
    }
    modules.remove("");
    modules
}
