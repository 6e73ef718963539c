//! Finds where the kernel's code switches interrupts and preemption off and on.
//!
//! Kernels have tracepoints there (`preemptirq`, include/trace/events/preemptirq.h) only with
//! `CONFIG_PREEMPTIRQ_TRACEPOINTS`. Without it the instructions themselves are traced: on x86-64
//! each of them has room for a jump, on riscv64 there is such room in reach.

use std::fmt;

use super::{Arch, Kernel, KernelError, ModuleText};
use crate::exits::x86_64::CountPlace;

mod riscv64;
mod x86_64;

/// Why preemptions of such a kernel are not seen.
const BY_FUNCTION: &str = "it counts preemptions by a function (built with CONFIG_DEBUG_PREEMPT)";

/// Whether preemptions are counted in a function (`preempt_count_add` of kernel/sched/core.c) that has no tracepoint.
fn counts_by_function(kernel: &Kernel) -> bool {
    let symbols = kernel.symbols();
    symbols.address("preempt_count_add").is_some()
        && symbols.address("__tracepoint_preempt_disable").is_none()
}

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

    /// Whether it is of interrupts, or else of preemption.
    #[must_use]
    pub fn is_of_interrupts(self) -> bool {
        matches!(self, Self::IrqDisable | Self::IrqEnable)
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", Kernel::PREEMPTIRQ, self.name())
    }
}

/// An instruction that switches something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SwitchSite {
    /// Link address of the instruction.
    pub address: u64,
    /// What it is.
    pub kind: SwitchKind,
}

/// What switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// Changes the count of preemptions: 7 bytes for 1 and -1, 11 for others, and one more where it is wide.
    Count {
        /// What is added.
        add: i32,
        /// The count is the lower half of a word of 64 bits (since 7.3), else all of one of 32.
        wide: bool,
    },
    /// riscv64: what is replaced by a jump, to a landing (link address: room for two instructions,
    /// which others share) or without one to anywhere within 256 KiB behind the text.
    Replaced(Replaced, Option<u64>),
}

/// An instruction of four bytes, which something else executes: a jump to there links `link`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Replaced {
    /// The instruction.
    pub word: u32,
    /// What it switches.
    pub told: Told,
    /// A register that nothing reads, from before the instruction on until it is written again: one
    /// of `t1` to `t6` and `a0` to `a7`.
    pub link: u8,
    /// Another one.
    pub through: u8,
    /// Those of `t0` to `t6` (a bit each) that may be read behind the instruction.
    pub kept: u32,
}

/// What such an instruction switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Told {
    /// Interrupts off: `csrrci rd, sstatus, 2`. Told where they were on.
    Off,
    /// Interrupts on: `csrsi sstatus, 2`, or `csrs sstatus, rs` where the register says so. Told where
    /// they were off.
    On,
    /// Nothing; a trap has. Told where the saved status, in this register, has interrupts on.
    Enter(u8),
    /// Nothing; `sret` will, as this register says.
    Leave(u8),
    /// The count of preemptions: the sum is in the register. Told where it becomes 0, or is 0 no
    /// more, if it is that of the current task.
    Count {
        /// What was added: not 0.
        add: i32,
        /// Where the sum is.
        register: u8,
        /// Where the task is.
        task: u8,
    },
}

impl Told {
    /// Whether it is of preemptions, or else of interrupts.
    fn counts(self) -> bool {
        matches!(self, Self::Count { .. })
    }

    /// Whether both are the same but for registers.
    fn is_like(self, other: Self) -> bool {
        match (self, other) {
            (Self::Count { add, .. }, Self::Count { add: other, .. }) => add == other,
            _ => std::mem::discriminant(&self) == std::mem::discriminant(&other),
        }
    }

    fn switch(self) -> Switch {
        match self {
            Self::Off | Self::Enter(_) => Switch::IrqDisable,
            Self::On | Self::Leave(_) => Switch::IrqEnable,
            Self::Count { add, .. } if add > 0 => Switch::PreemptDisable,
            Self::Count { .. } => Switch::PreemptEnable,
        }
    }
}

impl SwitchKind {
    /// What is told there.
    #[must_use]
    pub fn switch(self) -> Switch {
        match self {
            Self::Cli | Self::Handle(_) | Self::HandleCall(_) => Switch::IrqDisable,
            Self::Sti | Self::Restore(_) | Self::Return => Switch::IrqEnable,
            Self::Count { add, .. } if add > 0 => Switch::PreemptDisable,
            Self::Count { .. } => Switch::PreemptEnable,
            Self::Replaced(replaced, _) => replaced.told.switch(),
        }
    }

    /// Bytes of all that belongs to it.
    #[must_use]
    pub fn size(self) -> u8 {
        match self {
            Self::Replaced(..) => 4,
            Self::Cli | Self::Sti => 6,
            Self::Handle(_) | Self::HandleCall(_) | Self::Restore(_) | Self::Return => 5,
            Self::Count { add: 1 | -1, wide } => 7 + u8::from(wide),
            Self::Count { wide, .. } => 11 + u8::from(wide),
        }
    }
}

/// All places where a kernel's code that stays switches interrupts and preemption, as far as they
/// can be used.
#[derive(Debug)]
pub struct Switches {
    /// By address.
    list: Vec<SwitchSite>,
    /// Of interrupts, and of preemption; both ascending.
    unusable: [Vec<u64>; 2],
    /// Why there are none that tell of interrupts, and of preemption.
    missing: [Option<&'static str>; 2],
}

impl Switches {
    /// All, ascending.
    #[must_use]
    pub fn all(&self) -> &[SwitchSite] {
        &self.list
    }

    /// Link addresses of others that switch the same, which nothing can take the place of: mostly
    /// where the count's place is put into a register, by which few bytes change it.
    #[must_use]
    pub fn unusable(&self, switch: Switch) -> &[u64] {
        let [interrupts, preemption] = &self.unusable;
        if switch.is_of_interrupts() { interrupts } else { preemption }
    }

    /// Whether one of these can be told.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, switch: Switch) -> Result<(), KernelError> {
        let [interrupts, preemption] = self.missing;
        let missing = if switch.is_of_interrupts() { interrupts } else { preemption };
        missing.map_or(Ok(()), |why| Err(KernelError::NoSwitches(why)))
    }
}

/// The same of a module that is loaded, by addresses as if it were linked with the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleSwitches {
    /// By address.
    pub list: Vec<SwitchSite>,
    /// Others, by address.
    pub unusable: Vec<UnusableSwitch>,
    /// Functions and parts of them with a breakpoint, or with what is no instruction, of which nothing is
    /// told. A while later they may be as they should.
    pub torn: usize,
}

/// An instruction of a module that switches something, and that nothing can take the place of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnusableSwitch {
    /// Link address.
    pub address: u64,
    /// Whether it is of interrupts, or else of preemption.
    pub is_of_interrupts: bool,
    /// Why nothing can.
    pub why: &'static str,
}

impl Kernel {
    /// Where a module's code, which is that of `text`, switches interrupts and preemption off and on.
    /// The count of preemptions is at `count` from the gs base, if that is known, in a kernel that was
    /// moved so far from its link address (x86-64).
    #[must_use]
    pub fn module_switches(
        &self,
        text: &ModuleText,
        count: Option<u64>,
        slide: u64,
    ) -> ModuleSwitches {
        match self.arch() {
            Arch::X86_64 => {
                let near = |count: u64| count.wrapping_sub(slide);
                let count = count.map(|count| CountPlace { near: near(count), plain: count });
                x86_64::module::find(text, count)
            }
            Arch::Riscv64 => {
                let counts = |switches: &Switches| switches.check(Switch::PreemptEnable).is_ok();
                let counts = self.switches().is_ok_and(counts);
                riscv64::module::find(text, riscv64::count(self).filter(|_| counts))
            }
        }
    }

    /// The system that the kernel's own events for this belong to.
    pub const PREEMPTIRQ: &'static str = "preemptirq";

    /// Where it switches interrupts and preemption off and on, looked for when first asked for.
    ///
    /// # Errors
    /// For kernels whose tables are damaged or of an unknown layout.
    pub fn switches(&self) -> Result<&Switches, KernelError> {
        if let Some(switches) = self.switches.get() {
            return Ok(switches);
        }
        let switches = match self.arch() {
            Arch::X86_64 => x86_64::find(self)?,
            Arch::Riscv64 => riscv64::find(self)?,
        };
        Ok(self.switches.get_or_init(|| switches))
    }
}
