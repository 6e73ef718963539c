//! How guests end, as seen from their kernels and not from their consoles.

use vmtrace::stream::{Exit, MarkKind};

use vmtrace::emulated::HostArch;
use vmtrace::kernel::Arch;

use crate::Finished;
use crate::cases::Guests;
use crate::trace::{self, Trace, WORKLOAD, arch_of, boot, kernel, syscall};

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

    /// A CPU that keeps its interrupts off for ever is a hang, with where it is, also where another one
    /// lives on. The guest is a kernel in which a system call was made to do that.
    pub fn a_guest_that_hangs_is_found_out(&self, name: &str) {
        let (hangs, getppid) = self.put_hanging(name, true);
        let call = format!("{WORKLOAD} getppid 1 1");
        let args = ["--run", &call, "--cpus", "2", "--hang-after", "8"];
        let (finished, trace) = self.end(&hangs, "", &args);
        let err = finished.err();
        assert_eq!((finished.end.code, trace.summary.exit), (Some(3), Exit::Hang), "{name}: {err}");
        let begins = format!("guest hangs: interrupts were off for 8 s: vCPU 1 in {getppid}+0x");
        let [note] = &trace.summary.notes[..] else { panic!("{name}: {err}") };
        assert!(note.starts_with(&begins) && note.contains("; the others: vCPU 0 in "), "{note}");
        assert!(err.contains(&format!("vmtrace: note {note}\n")), "{name}: {err}");
        let last = trace.entries.last().unwrap();
        assert_eq!((&*last.function, last.vcpu), (&*getppid, 1), "{name}: {err}");

        // One that the guest does not use is none, nor is one that is idle.
        let cpu = "/sys/devices/system/cpu/cpu1/online";
        let run = format!("echo 0 >{cpu} && sleep 9 && cat {cpu} && echo 1 >{cpu} && sleep 4");
        let args = ["--run", &run, "--cpus", "2", "--hang-after", "4"];
        let (finished, trace) = self.end(name, "", &args);
        let err = finished.err();
        assert_eq!((finished.end.code, trace.summary.exit), (Some(0), Exit::Poweroff), "{err}");
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}: {err}");
    }

    /// A CPU that nobody gets any more, with interrupts on, leaves a guest that does next to nothing. This must be of
    /// kernels that do not take it from a task in the kernel.
    pub fn a_task_that_is_not_given_up_is_found_out(&self, name: &str) {
        let (hangs, getppid) = self.put_hanging(name, false);
        // No shell: those call it, too.
        let call = format!("{WORKLOAD} held 1");
        let args = ["--run", &call, "--cpus", "2", "--hang-after", "8"];
        let (finished, trace) = self.end(&hangs, "", &args);
        let err = finished.err();
        assert_eq!((finished.end.code, trace.summary.exit), (Some(3), Exit::Hang), "{name}: {err}");
        let begins = "guest hangs: others waited for the CPU of a task for 20 s: vCPU 1, task ";
        let [note] = &trace.summary.notes[..] else { panic!("{name}: {err}") };
        let last = trace.entries.last().unwrap();
        assert_eq!((&*last.function, last.vcpu), (&*getppid, 1), "{name}: {err}");
        // In there, or where it was just interrupted.
        let begins = format!("{begins}{} in ", last.pid);
        assert!(note.starts_with(&begins), "{note}");
        assert!(note.contains("; the others: vCPU 0 in "), "{note}");
    }

    /// Puts a kernel there whose getppid goes on for ever, with interrupts off or as they are: its name, and that of
    /// the function.
    fn put_hanging(&self, name: &str, is_off: bool) -> (String, String) {
        let kernel = kernel(name).unwrap();
        let entry = kernel.symbols().address(&syscall(name, "getppid").unwrap()).unwrap();
        // It has several names.
        let getppid = kernel.symbols().primary_at(entry).unwrap();
        let site = kernel.sites().iter().find(|site| site.entry == entry).unwrap();
        let (at, off, on): (u64, &[u8], &[u8]) = match kernel.arch() {
            // cli; jmp to itself
            Arch::X86_64 => (site.location + 5, &[0xfa], &[0xeb, 0xfe]),
            // csrci sstatus, SIE; j to itself
            Arch::Riscv64 => (site.entry + 8, &[0x73, 0x70, 0x01, 0x10], &[0x6f, 0, 0, 0]),
        };
        let code = [if is_off { off } else { &[] }, on].concat();
        let mut image = kernel.vmlinux().to_vec();
        let old = kernel.bytes(at, code.len()).unwrap();
        let offset = old.as_ptr().addr() - kernel.vmlinux().as_ptr().addr();
        image[offset..offset + code.len()].copy_from_slice(&code);
        let hangs = format!("{name}-hangs-{is_off}");
        self.put_kernel(&hangs, image);
        (hangs, getppid.to_owned())
    }

    /// A restart is none of a guest's deaths; a time that is up has a code of its own.
    pub fn other_ends_are_told_apart(&self, name: &str) {
        let reboot = format!("{WORKLOAD} reboot");
        let (finished, trace) = self.end(name, "", &["--run", &reboot]);
        let err = finished.err();
        assert_eq!(trace.summary.exit, Exit::Reset, "{name}: {err}");
        assert_eq!(finished.end.code, Some(1), "{name}: the command did not finish: {err}");
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}: {err}");

        // No device tells of a PC that halts; on riscv64 that is a power-off. The agent is gone by then.
        let halted = match arch_of(name).unwrap() {
            HostArch::X86_64 => Exit::Halt,
            HostArch::Riscv64 => Exit::Poweroff,
        };
        let (finished, trace) = self.end(name, "", &["--run", "halt -f"]);
        let err = finished.err();
        assert_eq!(trace.summary.exit, halted, "{name}: {err}");
        assert_eq!(finished.end.code, Some(1), "{name}: the command did not finish: {err}");
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name}: {err}");

        let (finished, trace) = self.end(name, "", &["--run", "sleep 6000", "--timeout", "20"]);
        let err = finished.err();
        assert_eq!(trace.summary.exit, Exit::Timeout, "{name}: {err}");
        assert_eq!(finished.end.code, Some(124), "{name}: {err}");
        assert!(err.contains("the time was up before --run had finished"), "{name}: {err}");
    }
}
