//! A vCPU and the loop of its thread.

use std::sync::{Arc, Mutex};

use kvm_ioctls::VcpuFd;

use super::arch::{self, Platform};
use super::control::{Control, Go};
use super::exits::ExitLog;
use super::lock::lock;
use super::signal::{self, ImmediateExit};
use super::{Event, ExitReason};
use crate::devices::Outcome;

/// How many exits completing one instruction's I/O may take; more is a bug of somebody's.
const MAX_COMPLETIONS: usize = 10_000;

/// What came of one entry into the guest.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// What there was to do is done.
    Continue,
    /// The thread was kicked; no I/O is pending.
    Interrupted,
    /// The guest executed what may be a trap instruction.
    Trap,
    /// The guest's code has found no room for what it has to write.
    Full,
    /// The guest wrote a watched register; the write is done.
    #[allow(dead_code, reason = "not every architecture has such registers")]
    MsrWrite {
        /// Which.
        index: u32,
        /// What.
        value: u64,
    },
    /// The guest's kernel has told that it panics.
    Panics {
        /// And that its crash kernel will run.
        crash_kernel: bool,
    },
    /// The guest is gone.
    Exit(ExitReason),
}

impl From<Outcome> for Step {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Continue => Self::Continue,
            Outcome::PowerOff => Self::Exit(ExitReason::PowerOff),
            Outcome::Reset => Self::Exit(ExitReason::Reset),
            Outcome::Panics { crash_kernel } => Self::Panics { crash_kernel },
            Outcome::Panicked => Self::Exit(ExitReason::Panic { message: String::new() }),
        }
    }
}

/// A vCPU. Its thread holds the lock while it runs and not while it is parked.
pub(super) struct Vcpu {
    pub(super) fd: VcpuFd,
    pub(super) immediate_exit: ImmediateExit,
    pub(super) exits: ExitLog,
}

impl Vcpu {
    pub(super) fn new(mut fd: VcpuFd) -> Vcpu {
        let immediate_exit = ImmediateExit::new(&mut fd);
        Vcpu { fd, immediate_exit, exits: ExitLog::new() }
    }

    /// The exit that it is on is over: it will not go on.
    fn is_out_for_good(&mut self) {
        self.exits.over(|| arch::clock(&self.fd).ok());
    }

    /// Completes the I/O of the last exit without running guest code. `None` when that is all,
    /// otherwise what else must be dealt with first.
    fn complete(&mut self, platform: &Platform) -> Option<Step> {
        for _ in 0..MAX_COMPLETIONS {
            self.immediate_exit.set(true);
            match arch::run(&mut self.fd, platform, &mut self.exits) {
                Step::Continue => {}
                Step::Interrupted => return None,
                step => return Some(step),
            }
        }
        Some(Step::Exit(ExitReason::InternalError("the I/O of an instruction does not end".into())))
    }
}

/// The thread of vCPU `id`.
pub(super) fn run(id: usize, vcpu: &Arc<Mutex<Vcpu>>, control: &Control, platform: &Platform) {
    let registration = control.register(id);
    let kickable = signal::receive_kicks(&lock(vcpu).immediate_exit, vcpu.clone());
    let mut go = Go::Run;
    while go == Go::Run {
        // A statement of its own: the lock is not held over what follows.
        let turn = turn(id, &mut lock(vcpu), control, platform);
        go = match turn {
            Turn::Again => Go::Run,
            Turn::Checkpoint => control.checkpoint(id),
            Turn::Event(event) => {
                control.hold(id, event);
                control.checkpoint(id)
            }
            Turn::Exit(reason) => {
                lock(vcpu).is_out_for_good();
                if control.exit() {
                    control.announce(platform.board().last_words(reason));
                }
                control.checkpoint(id)
            }
        };
    }
    drop(kickable);
    registration.finish();
}

/// What the thread does next, without the vCPU's lock.
enum Turn {
    Again,
    Checkpoint,
    Event(Event),
    Exit(ExitReason),
}

/// Enters the guest once, or makes the vCPU ready to be looked at.
fn turn(id: usize, this: &mut Vcpu, control: &Control, platform: &Platform) -> Turn {
    // This order: a kick that comes in between is seen at the look or by KVM_RUN.
    this.immediate_exit.set(false);
    let step = if control.attention() {
        match this.complete(platform) {
            Some(step) => step,
            None => return Turn::Checkpoint,
        }
    } else if control.room().is_stalled() {
        return stand_still(this, control);
    } else {
        this.exits.entering(|| arch::clock(&this.fd).ok());
        arch::run(&mut this.fd, platform, &mut this.exits)
    };
    let event = match step {
        Step::Continue | Step::Interrupted => return Turn::Again,
        Step::Full => {
            if control.room().wait(id, || control.attention()) {
                control.kick();
            }
            return Turn::Again;
        }
        Step::Exit(reason) => return Turn::Exit(reason),
        Step::Trap => {
            // First the instruction must be over, or KVM would later skip what is then there.
            if let Some(Step::Exit(reason)) = this.complete(platform) {
                return Turn::Exit(reason);
            }
            let address = arch::trap_address(&this.fd);
            let armed = address.filter(|address| control.is_armed(*address));
            let done = match armed {
                Some(address) => arch::set_program_counter(&this.fd, address),
                None => arch::refuse_trap(&this.fd),
            };
            match (done, armed, address) {
                (Err(e), ..) => return Turn::Exit(ExitReason::InternalError(e.to_string())),
                (Ok(()), Some(address), _) => Event::Trap { vcpu: id, address },
                (Ok(()), None, Some(address)) if arch::is_in_kernel(&this.fd) => {
                    Event::Stray { vcpu: id, address }
                }
                (Ok(()), None, _) => return Turn::Again,
            }
        }
        Step::Panics { crash_kernel } => {
            if let Some(Step::Exit(reason)) = this.complete(platform) {
                return Turn::Exit(reason);
            }
            Event::Panics { vcpu: id, crash_kernel }
        }
        Step::MsrWrite { index, value } => {
            if let Some(Step::Exit(reason)) = this.complete(platform) {
                return Turn::Exit(reason);
            }
            if !control.take_watch() {
                return Turn::Again;
            }
            platform.end_watch();
            Event::MsrWrite { vcpu: id, index, value }
        }
    };
    Turn::Event(event)
}

/// Waits with all others until there is room; the guest is told that it was stopped.
fn stand_still(this: &Vcpu, control: &Control) -> Turn {
    control.room().wait_with_all(|| control.attention());
    match arch::paused(&this.fd) {
        Ok(()) => Turn::Again,
        Err(error) => Turn::Exit(ExitReason::InternalError(error.to_string())),
    }
}
