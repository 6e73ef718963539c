//! What guests without a system of their own can run.

use vmtrace::stream::Exit;

use crate::cases::Guests;
use crate::trace::{boot, syscall};

impl Guests {
    /// A line that needs a shell gets busybox's, whose programs are those that are meant; the agent's are beside them.
    /// Signals reach what is run: a mask that process 1 had would be theirs.
    pub fn a_line_that_needs_a_shell_gets_one(&self, name: &str) {
        let getppid = syscall(name, "getppid").unwrap();
        let run = "ls / | wc -l >/tmp/n && test $(cat /tmp/n) -gt 5 && ls -l /bin/sh | grep -q busybox \
                   && mark counted && ! sh -c 'kill -USR1 $$; exit 0' && echo lines-counted";
        let (finished, trace) = boot(&self.host, name, &["-f", &getppid, "--run", run]).unwrap();
        let err = finished.err();
        assert_eq!(finished.end.code, Some(0), "{name}: {err}");
        assert!(err.lines().any(|line| line.trim() == "lines-counted"), "{name}: {err}");
        assert_eq!(trace.summary.exit, Exit::Poweroff, "{name}: {err}");
        assert_eq!(trace.summary.run_status, Some(0), "{name}: {err}");
    }
}
