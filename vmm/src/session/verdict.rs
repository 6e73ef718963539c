//! How the guest ends, from its kernel's own code: tripwires on the functions by which a kernel
//! dies or restarts. They cost nothing until they are hit. Its console is not trusted: any
//! process of the guest can write there, and with `loglevel=0` the kernel does not.

use super::arch;
use super::controller::Controller;
use super::printk::{self, Arguments};
use super::tripwires::Purpose;
use super::vm::{Paused, Vm};
use crate::kernel::Kernel;
use crate::machine::{ExitReason, MachineError, TRAP_INSTRUCTION};
use crate::stream::MarkKind;
use crate::tracer::{Guest, Image, Scheduling};
use std::cell::OnceCell;
use std::time::{Duration, Instant};

/// How long a guest whose kernel has panicked may take to print, to notify and to reset itself.
/// One that does not is taken for halted: with `panic=0` it never ends.
const LAST_WORDS: Duration = Duration::from_secs(60);
/// Why a kernel panics that has not said it where it counts.
const UNTOLD: &str = "the guest's pvpanic device was told so; its console does not say why";
/// The longest format of a panic.
const FORMAT: usize = 1024;

/// What a function says about the guest when it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndSign {
    /// The kernel gives up.
    Panic,
    /// The kernel has met a bug of its own and tries to go on.
    Oops,
    /// Its ftrace has found what it did not write, or could not be.
    FtraceBug,
    /// Somebody wants a restart.
    Restart,
    /// Nothing is to run any more.
    Halt,
}

/// Where each is told: `panic` and `oops_enter` in kernel/panic.c, `emergency_restart` in
/// kernel/reboot.c, `machine_restart` in arch/*/kernel/reboot.c or reset.c, `ftrace_bug` in
/// kernel/trace/ftrace.c.
const FUNCTIONS: [(&str, EndSign); 5] = [
    ("ftrace_bug", EndSign::FtraceBug),
    ("panic", EndSign::Panic),
    ("oops_enter", EndSign::Oops),
    ("machine_restart", EndSign::Restart),
    ("emergency_restart", EndSign::Restart),
];

/// What is known of the guest's end.
#[derive(Default)]
pub(super) struct Verdict {
    /// The kernel that is watched: where it runs.
    pub(super) image: Option<Image>,
    /// Its scheduler, as far as it is known, once somebody has asked.
    scheduling: OnceCell<Option<Scheduling>>,
    /// The first panic's message, and when.
    panicked: Option<(String, Instant)>,
    restarts: bool,
    /// It halts, and no device will tell.
    pub(super) halts: bool,
    /// Another kernel runs, in which there are no tripwires yet, or is going to.
    left: bool,
}

impl Verdict {
    /// What is known of the scheduler of the kernel that is watched.
    pub(super) fn scheduling(&self, kernel: &Kernel) -> Option<Scheduling> {
        let image = self.image.as_ref()?;
        *self.scheduling.get_or_init(|| Scheduling::find(kernel, image))
    }

    /// When a guest that has panicked is taken for halted. One whose kernel has left to another,
    /// which saves what there is to save (kdump), is not.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.panicked.as_ref().filter(|_| !self.left).map(|(_, when)| *when + LAST_WORDS)
    }

    /// Whether a kernel of the guest's has panicked.
    pub(super) fn has_panicked(&self) -> bool {
        self.panicked.is_some()
    }

    /// The kernel says why it panics, which counts more than that a device was told.
    fn panics(&mut self, message: String) {
        if self.panicked.as_ref().is_none_or(|(known, _)| known == UNTOLD) {
            self.panicked = Some((message, Instant::now()));
        }
    }

    /// The kernel has told the pvpanic device that it panics, and `why` on its console if that counts. With `leaves`
    /// another one will run, and nobody else tells when. Returns the reason where the panic is news.
    fn told(&mut self, why: impl FnOnce() -> Option<String>, leaves: bool) -> Option<&str> {
        self.left |= leaves;
        if self.panicked.is_some() {
            return None;
        }
        let message = why().unwrap_or_else(|| UNTOLD.to_owned());
        Some(self.panicked.insert((message, Instant::now())).0.as_str())
    }

    /// How a guest has ended that has panicked.
    pub(super) fn panic(&self) -> Option<ExitReason> {
        let (message, _) = self.panicked.as_ref()?;
        Some(ExitReason::Panic { message: message.clone() })
    }

    /// The true reason of an exit, which the machine knows by what its devices were told.
    pub(super) fn of(&self, reason: ExitReason) -> ExitReason {
        match (reason, self.panic()) {
            (reason @ ExitReason::InternalError(_), _) => reason,
            (_, Some(panic)) => panic,
            // The last of x86's ways to restart (`BOOT_TRIPLE`, arch/x86/kernel/reboot.c).
            (ExitReason::TripleFault, None) if self.restarts => ExitReason::Reset,
            (reason, None) => reason,
        }
    }
}

impl Controller {
    /// Lays the tripwires, at the moment when the guest is attached to: one CPU runs, and it is in
    /// none of these functions.
    pub(super) fn watch_the_end(&mut self, machine: &dyn Vm, paused: &Paused<'_>, image: Image) {
        let mut missing = Vec::new();
        let halt = arch::HALT.map(|name| (name, EndSign::Halt));
        for (name, sign) in FUNCTIONS.into_iter().chain(halt) {
            let laid = self.lay(Purpose::End(sign), machine, paused, &image, name);
            if let Err(error) = laid {
                missing.push((name, sign, error));
            }
        }
        for (name, sign, error) in missing {
            let untold = match sign {
                EndSign::Panic => {
                    "only the guest's console shows whether it panics, and anybody in the \
                                guest can write there"
                }
                EndSign::Oops => "an oops of the guest is not reported",
                EndSign::FtraceBug => "it is not reported when the guest gives up its own ftrace",
                EndSign::Restart => "a restart of this kind is not distinguished from a reset",
                EndSign::Halt => "a guest that halts does not end the run",
            };
            self.note(format!("{untold}: no tripwire on {name}: {error}"));
        }
        self.verdict.image = Some(image);
        self.verdict.scheduling = OnceCell::new();
        self.verdict.left = false;
        if self.tripwires.find(Purpose::End(EndSign::Panic)).is_some() {
            machine.console_is_no_witness();
        }
    }

    /// The kernel leaves for another one, and takes no tripwire with it: of that one the console
    /// tells, unless this one has panicked.
    ///
    /// # Errors
    /// When vCPUs do not stop: the tripwires stay.
    pub(super) fn leave_the_end(&mut self, machine: &dyn Vm) -> Result<(), MachineError> {
        let paused = machine.pause()?;
        for address in self.tripwires.all(|purpose| matches!(purpose, Purpose::End(_))) {
            self.disarm(machine, &paused, address);
        }
        (self.verdict.left, self.verdict.image) = (true, None);
        self.hang.boots_anew();
        if self.verdict.panicked.is_none() {
            machine.console_is_witness();
        }
        Ok(())
    }

    /// A tripwire of these was hit, at this address. Whether this was attended to.
    pub(super) fn end_told(
        &mut self,
        machine: &dyn Vm,
        vcpu: usize,
        address: u64,
        sign: EndSign,
    ) -> bool {
        let Some(image) = self.verdict.image else { return false };
        let paused = match machine.pause() {
            Ok(paused) => paused,
            Err(error) => {
                self.note(format!("how the guest ends is not known: {error}"));
                return true;
            }
        };
        let ram = machine.ram();
        let text = match sign {
            EndSign::Panic => {
                let message = message(ram, &image, &self.kernel, &paused, vcpu);
                let _ = machine.kernel_has_panicked();
                let text = format!("kernel panic: {message}");
                self.verdict.panics(message);
                text
            }
            EndSign::Oops => {
                self.note(
                    "the guest's kernel has met a bug of its own (oops): see its console".into(),
                );
                "kernel oops".to_owned()
            }
            EndSign::FtraceBug => "the guest's ftrace gives up".to_owned(),
            EndSign::Restart => {
                self.verdict.restarts = true;
                "kernel restarts".to_owned()
            }
            EndSign::Halt => {
                self.verdict.halts = true;
                "kernel halts".to_owned()
            }
        };
        self.lift(machine, &paused, address);
        self.account(paused, MarkKind::Note, text);
        if sign == EndSign::FtraceBug {
            let what = "the guest's own ftrace has found a site that is not as it left it, and has \
                        given up (ftrace_bug: see its console)";
            self.anomaly(machine, what.to_owned());
        }
        true
    }

    /// The kernel has told the pvpanic device that it panics: for kernels where no tripwire is on that.
    pub(super) fn panic_told(&mut self, machine: &dyn Vm, crash_kernel: bool) {
        let leaves = crash_kernel && self.tripwires.find(Purpose::Leave).is_none();
        if leaves {
            self.hang.boots_anew();
        }
        if let Some(message) = self.verdict.told(|| machine.kernel_has_panicked(), leaves) {
            let text = format!("kernel panic: {message}");
            self.mark(machine, MarkKind::Note, Duration::ZERO, text);
        }
    }

    /// Puts back what was under a tripwire of these. A vCPU that stands inside it begins again.
    fn lift(&mut self, machine: &dyn Vm, paused: &Paused<'_>, address: u64) {
        let inside = address + 1..address + TRAP_INSTRUCTION.len() as u64;
        for vcpu in 0..paused.vcpus() {
            let stands = paused.registers(vcpu).map(|registers| arch::program_counter(&registers));
            if stands.is_ok_and(|at| inside.contains(&at)) {
                // It has done nothing yet but load a register that is the trap's.
                let _ = paused.set_rip(vcpu, address);
            }
        }
        self.disarm(machine, paused, address);
    }
}

/// What `panic` was called with, as it would print it.
fn message(
    ram: &dyn Guest,
    image: &Image,
    kernel: &Kernel,
    paused: &Paused<'_>,
    vcpu: usize,
) -> String {
    let registers = match paused.registers(vcpu) {
        Ok(registers) => registers,
        Err(error) => return format!("its message is not known: {error}"),
    };
    let mut arguments = Words { ram, image, registers, next: 0 };
    let format = arguments.next().and_then(|address| arguments.string(address, FORMAT));
    match format {
        Some(format) => printk::format(&format, &mut arguments),
        None => format!("its message is not in the memory of {}", kernel.release()),
    }
}

/// The arguments of a function at whose beginning a vCPU stands.
struct Words<'a> {
    ram: &'a dyn Guest,
    image: &'a Image,
    registers: crate::machine::Registers,
    next: usize,
}

impl Arguments for Words<'_> {
    fn next(&mut self) -> Option<u64> {
        let index = self.next;
        self.next += 1;
        match arch::argument(&self.registers, index)? {
            arch::Argument::Word(word) => Some(word),
            arch::Argument::Stack(address) => self.image.read_u64(self.ram, address).ok(),
        }
    }

    fn string(&self, address: u64, most: usize) -> Option<Vec<u8>> {
        let mut text = Vec::new();
        // Byte by byte up to the end of what is mapped; it is a short text.
        for at in (0..most as u64).map(|offset| address.wrapping_add(offset)) {
            let mut byte = [0];
            match self.image.read(self.ram, at, &mut byte) {
                Ok(()) if byte[0] != 0 => text.push(byte[0]),
                Ok(()) => break,
                Err(_) if text.is_empty() => return None,
                Err(_) => break,
            }
        }
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panicked() -> Verdict {
        Verdict { panicked: Some(("x".into(), Instant::now())), ..Verdict::default() }
    }

    // Scripts go by the exit code, which goes by this.
    #[test]
    fn the_kernels_word_counts() {
        let panic = ExitReason::Panic { message: "x".into() };
        for seen in [ExitReason::Reset, ExitReason::PowerOff, ExitReason::TripleFault] {
            assert_eq!(panicked().of(seen.clone()), panic);
            assert_eq!(Verdict::default().of(seen.clone()), seen);
        }
        let hangs = ExitReason::Hang { message: "y".into() };
        assert_eq!(
            (panicked().of(hangs.clone()), Verdict::default().of(hangs.clone())),
            (panic.clone(), hangs)
        );
        let failed = ExitReason::InternalError("KVM".into());
        assert_eq!(panicked().of(failed.clone()), failed);
        let restarts = Verdict { restarts: true, ..Verdict::default() };
        assert_eq!(restarts.of(ExitReason::TripleFault), ExitReason::Reset);
        assert_eq!(restarts.of(ExitReason::PowerOff), ExitReason::PowerOff);
        assert!(panicked().deadline() > Some(Instant::now()));
        // A crash kernel takes its time.
        assert_eq!(Verdict { left: true, ..panicked() }.deadline(), None);
        assert_eq!(Verdict { left: true, ..panicked() }.of(ExitReason::Reset), panic);
        assert_eq!((Verdict::default().deadline(), Verdict::default().panic()), (None, None));
    }

    // Who waits for a crash kernel must not end it, and who does not must not wait for ever; why the kernel panics is
    // worth more than that it does.
    #[test]
    fn what_a_device_is_told_counts_as_long_as_nobody_knows_better() {
        let message = |verdict: &Verdict| verdict.panicked.clone().map(|(message, _)| message);
        for leaves in [false, true] {
            let mut verdict = Verdict::default();
            assert_eq!(verdict.told(|| None, leaves), Some(UNTOLD));
            assert_eq!(verdict.deadline().is_none(), leaves);
            assert_eq!(verdict.told(|| panic!("it is known"), false), None);
            assert_eq!(verdict.deadline().is_none(), leaves);
            verdict.panics("x".into());
            verdict.panics("y".into());
            assert_eq!(message(&verdict).as_deref(), Some("x"));
        }
        let mut verdict = panicked();
        assert_eq!(verdict.told(|| panic!("it is known"), true), None);
        assert_eq!((verdict.deadline(), message(&verdict).as_deref()), (None, Some("x")));
        let mut verdict = Verdict::default();
        assert_eq!(verdict.told(|| Some("z".into()), false), Some("z"));
    }
}
