//! What guests without a system of their own can run.

use std::collections::BTreeSet;

use serde_json::Value;
use vmtrace::stream::Exit;

use crate::args::json;
use crate::cases::Guests;
use crate::trace::boot;

impl Guests {
    /// A line that needs a shell gets busybox's, whose programs are those that are meant; the agent's are beside them.
    /// Signals reach what is run: a mask that process 1 had would be theirs.
    ///
    /// The shell is followed: what it began is traced, and what those began, under whatever names, and
    /// nobody else.
    pub fn a_line_that_needs_a_shell_gets_one(&self, name: &str) {
        let run = "ls / | wc -l >/tmp/n && test $(cat /tmp/n) -gt 5 && ls -l /bin/sh | grep -q busybox \
                   && mark counted && ! sh -c 'kill -USR1 $$; exit 0' \
                   && echo lines-counted >/tmp/said && exec cat /tmp/said";
        let args = ["-f", "vfs_*", "--event", "sched:sched_process_fork", "--run", run];
        let args = [&args[..], &["--comm", "sh", "--children", "--overflow", "block"]].concat();
        let (finished, trace) = boot(&self.host, name, &args).unwrap();
        let err = finished.err();
        assert_eq!(finished.end.code, Some(0), "{name}: {err}");
        assert!(err.lines().any(|line| line.trim() == "lines-counted"), "{name}: {err}");
        assert_eq!(trace.summary.exit, Exit::Poweroff, "{name}: {err}");
        assert_eq!(trace.summary.run_status, Some(0), "{name}: {err}");

        let lines = json(&trace);
        let calls = || lines.iter().filter(|line| line["event"] == "entry");
        let pid = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{name}: {value}"));
        let traced: BTreeSet<u64> = calls().map(|call| pid(&call["pid"])).collect();
        let named = |comm: &str| calls().filter(|call| call["comm"] == comm).count();
        for comm in ["sh", "ls", "wc", "cat", "grep", "mark"] {
            assert!(named(comm) > 0, "{name}: {comm} is not traced: {traced:?}");
        }
        // Children come from those that are traced, and the first of all from nobody who is.
        let forks = lines.iter().filter(|line| line["name"] == "sched:sched_process_fork");
        let parents: BTreeSet<u64> = forks.clone().map(|fork| pid(&fork["pid"])).collect();
        let born: BTreeSet<u64> = forks.map(|fork| pid(&fork["fields"]["child_pid"])).collect();
        let strangers: Vec<u64> =
            traced.union(&parents).copied().filter(|pid| !born.contains(pid)).collect();
        let [shell] = strangers[..] else { panic!("{name}: {strangers:?} beside {born:?}") };
        let late = |call: &&Value| call["pid"] == shell && call["comm"] == "cat";
        assert!(calls().any(|call| late(&call)), "{name}: not followed under another name");
        assert!(shell != 1 && traced.is_superset(&born), "{name}: {shell}, {traced:?} of {born:?}");
    }
}
