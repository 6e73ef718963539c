//! What the machine tells its controller.

use std::fmt;

/// Something the controller must see.
///
/// [`Event::Trap`], [`Event::Stray`], [`Event::Panics`] and [`Event::MsrWrite`] leave their vCPU parked: it counts as
/// stopped in every pause and goes on only after [`Machine::release`](super::Machine::release).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A vCPU executed an armed trap instruction. Its program counter is at `address` again, so
    /// that after the original bytes are back it runs them.
    ///
    /// Several vCPUs can hit one trap before it is disarmed: each sends its own event, so an
    /// event can name a trap that is disarmed by the time it is read. Releasing the vCPU is then
    /// all there is to do.
    Trap {
        /// The vCPU, counted from 0.
        vcpu: usize,
        /// Guest-virtual address of the trap instruction.
        address: u64,
    },
    /// A vCPU executed, in kernel mode, what may be a trap instruction, and none is armed there. It had no effect, and
    /// the program counter is behind it. A guest's own access to that port looks the same.
    Stray {
        /// The vCPU, counted from 0.
        vcpu: usize,
        /// Guest-virtual address where the instruction is if it is a trap.
        address: u64,
    },
    /// The guest's kernel tells the pvpanic device that it panics. What it printed before has arrived.
    Panics {
        /// The vCPU, counted from 0.
        vcpu: usize,
        /// Its crash kernel is going to run (kdump).
        crash_kernel: bool,
    },
    /// The first write to the register named by
    /// [`Config::watch_msr`](super::Config::watch_msr); the write has already taken effect and the
    /// watch is over.
    MsrWrite {
        /// The vCPU, counted from 0.
        vcpu: usize,
        /// Number of the model-specific register.
        index: u32,
        /// What was written.
        value: u64,
    },
    /// The guest is gone: no vCPU will run again. Memory and registers can still be read.
    /// Sent once.
    Exit(ExitReason),
    /// Somebody called [`Waker::wake`](super::Waker::wake), once or more often; the next call
    /// after [`Machine::awake`](super::Machine::awake) is another event.
    Wake,
}

/// Why a guest is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest powered itself off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest faulted while delivering a double fault (or reset itself this way).
    TripleFault,
    /// The guest kernel panicked, and then halted, reset or powered off.
    ///
    /// Of itself the machine knows it by the kernel's message on the console, until it is told that
    /// the console is no witness; see [`Machine::console_is_no_witness`](super::Machine::console_is_no_witness).
    Panic {
        /// The reason the kernel gave.
        message: String,
    },
    /// The guest has halted all its CPUs, as it was asked to. The machine cannot tell that from a guest
    /// that is idle; its owner can.
    Halt,
    /// A CPU of the guest, or all, cannot be interrupted any more. The machine does not know; its owner does.
    Hang {
        /// For how long, and where it is.
        message: String,
    },
    /// KVM or this program could not go on, with registers of the vCPU where there are any.
    InternalError(String),
}

impl ExitReason {
    /// Whether the guest is gone though nobody wanted that.
    #[must_use]
    pub fn is_death(&self) -> bool {
        match self {
            Self::Panic { .. } | Self::TripleFault | Self::Hang { .. } => true,
            Self::PowerOff | Self::Reset | Self::Halt | Self::InternalError(_) => false,
        }
    }
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExitReason::PowerOff => write!(f, "power-off"),
            ExitReason::Reset => write!(f, "reset"),
            ExitReason::TripleFault => write!(f, "triple fault"),
            ExitReason::Panic { message } => write!(f, "kernel panic: {message}"),
            ExitReason::Halt => write!(f, "halt"),
            ExitReason::Hang { message } => write!(f, "guest hangs: {message}"),
            ExitReason::InternalError(what) => write!(f, "internal error: {what}"),
        }
    }
}
