//! How guests end, as their kernels say it and not as their consoles do.

use vmtrace::stream::{Exit, MarkKind};

use crate::Finished;
use crate::cases::Guests;
use crate::trace::{self, Trace, WORKLOAD, arch_of, boot, syscall};

impl Guests {
    fn end(&self, name: &str, cmdline: &str, args: &[&str]) -> (Finished, Trace) {
        let cmdline = format!("{} {cmdline}", trace::cmdline(arch_of(name).unwrap()));
        let getppid = syscall(name, "getppid").unwrap();
        let all = ["-f", &getppid, "--add", WORKLOAD, "--cmdline", &cmdline];
        boot(&self.host, name, &[&all[..], args].concat()).unwrap()
    }

    /// A panic is one whether or not a console shows it, with what it says; and a run whose
    /// kernel then halts for good ends. Of each kernel one that has its arguments in registers.
    pub fn panics_are_told_by_the_kernel(&self, names: &[&str]) {
        // A program that is given no arguments fails.
        let init = format!("loglevel=0 rdinit={WORKLOAD}");
        for name in names {
            self.panic(name, &init, &[], "Attempted to kill init! exitcode=0x00000100");
        }
        let crash = ["--run", "write /proc/sysrq-trigger c"];
        for cmdline in ["loglevel=0", "loglevel=0 panic=0"] {
            self.panic(names[0], cmdline, &crash, "sysrq triggered crash");
        }
    }

    fn panic(&self, name: &str, cmdline: &str, args: &[&str], message: &str) {
        let (finished, trace) = self.end(name, cmdline, args);
        let err = finished.err();
        assert_eq!(finished.end.code, Some(3), "{name} {cmdline}: {err}");
        assert_eq!(trace.summary.exit, Exit::Panic, "{name} {cmdline}: {err}");
        let note = format!("kernel panic: {message}");
        assert_eq!(trace.summary.notes, std::slice::from_ref(&note), "{name} {cmdline}: {err}");
        assert!(err.contains(&format!("vmtrace: note {note}\n")), "{name} {cmdline}: {err}");
        assert!(!err.contains("Kernel panic - not syncing"), "{name}: the console told: {err}");
        assert!(trace.marks(MarkKind::Exit).unwrap().contains(&note), "{name} {cmdline}");
    }

    /// Whatever a process writes to the console, the guest lives on, and ends as it does.
    pub fn the_console_is_no_witness(&self, name: &str) {
        let run = "echo 'Kernel panic - not syncing: x' && \
                   echo '---[ end Kernel panic - not syncing: x ]---' && echo alive";
        let (finished, trace) = self.end(name, "", &["--run", run]);
        let err = finished.err();
        assert_eq!(finished.end.code, Some(0), "{name}: {err}");
        assert!(err.contains("\nalive"), "{name}: {err}");
        assert_eq!(trace.summary.exit, Exit::Poweroff, "{name}: {err}");
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}: {err}");
    }

    /// A restart is none of a guest's deaths; a time that is up has a code of its own.
    pub fn other_ends_are_told_apart(&self, name: &str) {
        let reboot = format!("{WORKLOAD} reboot");
        let (finished, trace) = self.end(name, "", &["--run", &reboot]);
        let err = finished.err();
        assert_eq!(trace.summary.exit, Exit::Reset, "{name}: {err}");
        assert_eq!(finished.end.code, Some(1), "{name}: the command did not finish: {err}");
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}: {err}");

        let (finished, trace) = self.end(name, "", &["--run", "sleep 6000", "--timeout", "20"]);
        let err = finished.err();
        assert_eq!(trace.summary.exit, Exit::Timeout, "{name}: {err}");
        assert_eq!(finished.end.code, Some(124), "{name}: {err}");
        assert!(err.contains("the time was up before --run had finished"), "{name}: {err}");
    }
}
