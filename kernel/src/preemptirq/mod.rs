//! Finds where the kernel's code switches interrupts and preemption off and on.
//!
//! Kernels have tracepoints there (`preemptirq`, include/trace/events/preemptirq.h) only with
//! `CONFIG_PREEMPTIRQ_TRACEPOINTS`. Without it the instructions themselves are traced: on x86-64
//! each of them has room for a jump.

use std::fmt;

use super::{Arch, Kernel, KernelError};

mod x86_64;

/// The change of a CPU's state that an event reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Switch {
    /// Its interrupts are off from here on.
    IrqDisable,
    /// They are on.
    IrqEnable,
    /// What runs cannot be preempted from here on.
    PreemptDisable,
    /// It can be.
    PreemptEnable,
}

impl Switch {
    /// All, in the order of their names.
    pub const ALL: [Self; 4] =
        [Self::IrqDisable, Self::IrqEnable, Self::PreemptDisable, Self::PreemptEnable];

    /// The name of the kernel's own event for it, of the system `preemptirq`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IrqDisable => "irq_disable",
            Self::IrqEnable => "irq_enable",
            Self::PreemptDisable => "preempt_disable",
            Self::PreemptEnable => "preempt_enable",
        }
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", Kernel::PREEMPTIRQ, self.name())
    }
}

/// An instruction that switches something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchSite {
    /// Link address of the instruction.
    pub address: u64,
    /// What it is.
    pub kind: SwitchKind,
}

/// What switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchKind {
    /// `cli`, and a nop of 5 bytes in the running kernel.
    Cli,
    /// `sti`, and the same.
    Sti,
    /// The call of what handles an interrupt or an exception (link address), of 5 bytes. The
    /// processor has switched interrupts off; `struct pt_regs` is on top of the stack.
    Handle(u64),
    /// The same of what handles a system call. Its saved flags need not say that interrupts were on.
    HandleCall(u64),
    /// The jump, of 5 bytes, to what restores all registers (link address). `struct pt_regs` is on
    /// top of the stack.
    Restore(u64),
    /// The return of a function that handles system calls: the program goes on. 5 bytes that
    /// `.return_sites` names.
    Return,
    /// Adds this to the count of preemptions: 7 bytes for 1 and -1, 11 for others.
    Count(i32),
}

impl SwitchKind {
    /// What is told there.
    #[must_use]
    pub fn switch(self) -> Switch {
        match self {
            Self::Cli | Self::Handle(_) | Self::HandleCall(_) => Switch::IrqDisable,
            Self::Sti | Self::Restore(_) | Self::Return => Switch::IrqEnable,
            Self::Count(add) if add > 0 => Switch::PreemptDisable,
            Self::Count(_) => Switch::PreemptEnable,
        }
    }

    /// Bytes of all that belongs to it.
    #[must_use]
    pub fn size(self) -> u8 {
        match self {
            Self::Cli | Self::Sti => 6,
            Self::Handle(_) | Self::HandleCall(_) | Self::Restore(_) | Self::Return => 5,
            Self::Count(1 | -1) => 7,
            Self::Count(_) => 11,
        }
    }
}

/// All places where a kernel's code that stays switches interrupts and preemption, as far as they
/// can be used.
#[derive(Debug)]
pub struct Switches {
    /// By address.
    list: Vec<SwitchSite>,
    unusable: Vec<u64>,
    /// Why there are none that tell of interrupts, and of preemption.
    missing: [Option<&'static str>; 2],
}

impl Switches {
    /// All, ascending.
    #[must_use]
    pub fn all(&self) -> &[SwitchSite] {
        &self.list
    }

    /// Link addresses of others, which nothing can take the place of: mostly where the count's place
    /// is put into a register, by which few bytes change it.
    #[must_use]
    pub fn unusable(&self) -> &[u64] {
        &self.unusable
    }

    /// Whether one of these can be told.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, switch: Switch) -> Result<(), KernelError> {
        let [interrupts, preemption] = self.missing;
        let missing = match switch {
            Switch::IrqDisable | Switch::IrqEnable => interrupts,
            Switch::PreemptDisable | Switch::PreemptEnable => preemption,
        };
        missing.map_or(Ok(()), |why| Err(KernelError::NoSwitches(why)))
    }
}

impl Kernel {
    /// The system that the kernel's own events for this belong to.
    pub const PREEMPTIRQ: &'static str = "preemptirq";

    /// Where it switches interrupts and preemption off and on, looked for when first asked for.
    ///
    /// # Errors
    /// For kernels of other architectures than x86-64, and those whose tables are damaged or of an
    /// unknown layout.
    pub fn switches(&self) -> Result<&Switches, KernelError> {
        if let Some(switches) = self.switches.get() {
            return Ok(switches);
        }
        let switches = match self.arch() {
            Arch::X86_64 => x86_64::find(self)?,
            Arch::Riscv64 => {
                return Err(KernelError::NoSwitches(
                    "that takes instructions with room for a jump, which riscv64 kernels do not \
                     have",
                ));
            }
        };
        Ok(self.switches.get_or_init(|| switches))
    }
}
