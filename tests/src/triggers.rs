//! Triggers: actions at calls that the guest itself counts down to.

use vmtrace::stream::{Exit, MarkKind};

use crate::cases::{Guests, function, trouble, value};
use crate::trace::{Trace, WORKLOAD, boot, missing};

/// Calls of the workload, all of them on one vCPU.
const CALLS: usize = 1000;

impl Guests {
    /// A switch that comes a call early or late is not at the call that somebody looks for: exactly
    /// those between must be there, with the very first and last.
    pub fn tracing_begins_and_ends_at_the_very_call(&self, name: &str) {
        let call = function(name, "getppid");
        let triggers = [
            format!("--start-at={call}:101"),
            format!("--mark-at={call}:150"),
            format!("--stop-at={call}:200 if cpu == 1"),
            format!("--start-at={call}:901"),
            format!("--mark-at={call}:1000 if cpu == 0"),
        ];
        let mut args: Vec<&str> = triggers.iter().map(String::as_str).collect();
        args.extend(["-f", &call, "-f", "vfs_*", "--cpus", "2"]);
        let (finished, trace) = self.run(name, &format!("getppid {CALLS} 1"), &args);
        let (err, pid) = (finished.err(), value(&finished, "pid "));
        assert_eq!(trouble(&err), None, "{name}");
        // Its first name may be another one.
        let is_it = |name: &str| name.ends_with("sys_getppid");
        let own = trace.entries.iter().filter(|e| e.pid == pid && is_it(&e.function));
        assert_eq!(own.count(), 100 + 100, "{name}: {err}");
        trace.check_order().unwrap();
        assert_eq!(missing(&trace.summary), 0, "{name}");
        // One trigger has not come, and says so.
        let [note] = &trace.summary.notes[..] else { panic!("{name}: {:?}", trace.summary.notes) };
        assert!(note.contains(&*triggers[4].replacen('=', " ", 1)), "{name}: {note}");
        let notes = trace.marks(MarkKind::Note).unwrap();
        let fired = |trigger: &str| {
            let told = |note: &&String| {
                let rest = note.strip_prefix(&*trigger.replacen('=', " ", 1));
                let function = rest.and_then(|rest| rest.strip_prefix(": "));
                function.and_then(|rest| rest.strip_suffix(" on vCPU 1")).is_some_and(is_it)
            };
            notes.iter().filter(told).count()
        };
        let fired: Vec<usize> = triggers.iter().map(|one| fired(one)).collect();
        assert_eq!(fired, [1, 1, 1, 1, 0], "{name}: {notes:?}");
        self.a_run_ends_at_a_call(name, &call);
    }

    /// A flight recorder that is written at a call has what was before it, and goes on.
    fn a_run_ends_at_a_call(&self, name: &str, call: &str) {
        let (snapshot, end) = (format!("--snapshot-at={call}:500"), format!("--end-at={call}:900"));
        let run = format!("{WORKLOAD} getppid {CALLS} 0");
        // In rings that are not where others are, each larger than what a guest is given by itself.
        let mut args = vec!["-f", call, "--overflow", "overwrite", "--buffer", "16M"];
        args.extend([&*snapshot, &*end]);
        args.extend(["--end-code", "77", "--cpus", "2", "--add", WORKLOAD, "--run", &run]);
        let (finished, trace) = boot(&self.host, name, &args).unwrap();
        let err = finished.err();
        assert_eq!(
            (finished.end.code, trace.summary.exit),
            (Some(77), Exit::Stopped),
            "{name}: {err}"
        );
        assert!(err.contains(&format!("ended by --end-at {call}:900: ")), "{err}");
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}");
        // That of the end has not gone on.
        let pid = value(&finished, "pid ");
        let of = |trace: &Trace| trace.entries.iter().filter(|e| e.pid == pid).count();
        assert_eq!((of(&trace), missing(&trace.summary)), (899, 0), "{name}");
        let notes = trace.marks(MarkKind::Note).unwrap();
        let taken = notes.iter().find_map(|note| {
            note.strip_prefix("snapshot: ")?.strip_suffix(" records")?.parse::<usize>().ok()
        });
        let others = trace.entries.len() - 899;
        assert!(taken.is_some_and(|taken| (499..=499 + others).contains(&taken)), "{notes:?}");
    }
}
