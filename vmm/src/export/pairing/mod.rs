//! Pairs entries, returns and tail jumps to frames: the depth and duration of every call.
//!
//! Only the stack pointer tells which records belong together. There is one stack of open frames
//! for each kernel stack (and tracer). Tasks, vCPUs and interrupts need no special treatment, since
//! each has its own kernel stack. The rules:
//!
//! - A record with a stack pointer closes all frames below it.
//! - A return closes all frames at its own: a chain of tail calls.
//! - A return of a function that is not traced closes them only if the innermost frame jumped.
//! - An entry at a frame's own continues a chain if the frame jumped, or may have; else the frame
//!   was left unseen.
//! - A duration is given only if all of this is certain, and no missing record could change it.

mod gaps;
#[cfg(test)]
mod properties;
mod stack;
#[cfg(test)]
mod tests;

use rustc_hash::FxHashMap;

use crate::export::ahead::Kind;
use crate::stream::{Header, Mark, MarkKind};

use gaps::Gaps;
pub(super) use stack::Frame;
use stack::Stack;

/// Kernel stacks have this size, or are made of such pieces.
const STACK_BITS: u32 = 14;
/// Most stacks, and most open frames in all of them.
const STACKS: usize = 1 << 16;
const FRAMES: usize = 1 << 18;

/// What records with a stack pointer have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) timestamp: u64,
    pub(super) vcpu: u32,
    pub(super) pid: u32,
    pub(super) tracer: u8,
    pub(super) function: u32,
    /// Caller of an entry, target of a tail jump; zero when not known.
    pub(super) other: u32,
    pub(super) sp: u64,
}

/// What the user wants of a function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    /// To see it.
    pub(super) selected: bool,
    /// To see what it calls.
    pub(super) root: bool,
}

impl Choice {
    #[cfg(test)]
    const ALL: Self = Self { selected: true, root: true };
}

/// What a record turns out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A frame has ended before this, nobody knows when.
    Left(Frame),
    /// A frame was forgotten, since there are too many.
    Evicted(Frame),
    /// A frame was opened.
    Entered {
        /// Its number.
        id: u64,
        /// That of the innermost shown frame around it.
        parent: Option<u64>,
        depth: u32,
        shown: bool,
    },
    /// A frame ended; there is none if its entry was not seen.
    Returned {
        frame: Option<Frame>,
        depth: u32,
        /// How long it was open, if that is certain. Without a frame it is all that there is of the call.
        ticks: Option<u64>,
        shown: bool,
    },
    /// A frame jumped elsewhere.
    Tailed { depth: u32, shown: bool },
}

/// Who is told what records turn out to be.
pub(super) trait Steps {
    /// The next.
    fn step(&mut self, step: Step);
}

impl Steps for Vec<Step> {
    fn step(&mut self, step: Step) {
        self.push(step);
    }
}

/// All open frames.
#[derive(Debug)]
pub(super) struct Pairing {
    stacks: FxHashMap<u64, Stack>,
    gaps: Gaps,
    frames: usize,
    evicted: u64,
    last: u64,
    /// Selected frames from this depth on are not shown.
    pub(super) max_depth: u32,
    /// Nobody looks at calls: nothing is paired.
    pub(super) is_idle: bool,
    /// Whether a return or a jump was told of then.
    told: bool,
}

impl Pairing {
    pub(super) fn new(vcpus: usize) -> Self {
        Self {
            stacks: FxHashMap::default(),
            gaps: Gaps::new(vcpus),
            frames: 0,
            evicted: 0,
            last: 0,
            max_depth: u32::MAX,
            is_idle: false,
            told: false,
        }
    }

    /// One for another stream, that shows as much.
    pub(super) fn again(&self, header: &Header) -> Self {
        let new = Self::new(usize::try_from(header.vcpus).unwrap_or(0));
        Self { max_depth: self.max_depth, is_idle: self.is_idle, ..new }
    }

    /// Frames that were forgotten, since there were too many.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// A function was entered.
    pub(super) fn enter(&mut self, call: &Call, choice: Choice, steps: &mut impl Steps) {
        self.last += 1;
        let (id, depth) = (self.last, self.max_depth);
        self.on_stack(call, steps, |stack, steps| stack.enter(id, call, choice, depth, steps));
    }

    /// A function returned.
    pub(super) fn leave(&mut self, call: &Call, choice: Choice, steps: &mut impl Steps) {
        let depth = self.max_depth;
        self.on_stack(call, steps, |stack, steps| {
            stack.leave_by_return(call, choice, depth, steps);
            0
        });
    }

    /// A function was left by a jump.
    pub(super) fn jump(&mut self, call: &Call, choice: Choice, steps: &mut impl Steps) {
        let depth = self.max_depth;
        self.on_stack(call, steps, |stack, steps| {
            stack.leave_by_tail(call, choice, depth, steps);
            0
        });
    }

    /// A function was left by a jump, and nothing else is heard of the call.
    pub(super) fn jump_last(&mut self, call: &Call, choice: Choice, steps: &mut impl Steps) {
        let depth = self.max_depth;
        self.on_stack(call, steps, |stack, steps| {
            if stack.leave_by_tail(call, choice, depth, steps) {
                stack.leave_at(call, true, steps);
            }
            0
        });
    }

    /// A function returned that is not traced: those that jumped to it do.
    pub(super) fn leave_others(&mut self, call: &Call, steps: &mut impl Steps) {
        self.on_stack(call, steps, |stack, steps| {
            stack.leave_by_aid(call, steps);
            0
        });
    }

    /// A record where nothing is paired, of a call of which there are others.
    #[inline]
    pub(super) fn pass(&mut self, kind: Kind, choice: Choice, steps: &mut impl Steps) {
        let (depth, shown) = (0, choice.selected);
        match kind {
            Kind::Entry => steps.step(Step::Entered { id: 0, parent: None, depth, shown }),
            Kind::Return | Kind::Tail | Kind::Last if shown && !self.told => {
                self.told = true;
                steps.step(Step::Returned { frame: None, depth, ticks: None, shown });
            }
            // One that has ended what jumped to it comes behind that jump.
            _ => {}
        }
    }

    /// A call ended of which nothing else is recorded, by a jump or by a return: so long it took.
    pub(super) fn whole(
        &mut self,
        call: &Call,
        choice: Choice,
        (jumps, ticks): (bool, Option<u64>),
        steps: &mut impl Steps,
    ) {
        self.plain(call.vcpu);
        let (depth, shown) = (0, choice.selected && choice.root && self.max_depth > 0);
        if jumps {
            steps.step(Step::Tailed { depth, shown });
        }
        steps.step(Step::Returned { frame: None, depth, ticks, shown });
    }

    /// A record without a stack pointer.
    pub(super) fn plain(&mut self, vcpu: u32) {
        self.gaps.plain(vcpu);
    }

    /// Records of a vCPU are missing here.
    pub(super) fn loss(&mut self, vcpu: u32) {
        self.gaps.begin(vcpu);
    }

    /// Something happened: what that means for calls. Gives those that it ends.
    pub(super) fn mark(&mut self, mark: &Mark) -> Vec<Step> {
        let mut steps = Vec::new();
        // Calls of a kernel that is gone (kexec) do not end in the next one.
        if mark.kind == MarkKind::Attach {
            self.finish(&mut steps);
        }
        if mark.leaves_calls_uncertain() {
            self.change();
        }
        steps
    }

    /// Other functions are traced from here on.
    pub(super) fn change(&mut self) {
        self.gaps.change();
    }

    /// Nothing follows: gives all open frames, the newest first.
    pub(super) fn finish(&mut self, steps: &mut Vec<Step>) {
        let from = steps.len();
        self.stacks.drain().for_each(|(_, mut stack)| stack.leave_all(steps));
        self.frames = 0;
        if let Some(left) = steps.get_mut(from..) {
            left.sort_by_key(|step| match step {
                Step::Left(frame) => std::cmp::Reverse(frame.id),
                _ => std::cmp::Reverse(0),
            });
        }
    }

    /// `act` returns how many frames were forgotten.
    fn on_stack<S: Steps>(
        &mut self,
        call: &Call,
        steps: &mut S,
        act: impl FnOnce(&mut Stack, &mut S) -> u64,
    ) {
        let key = call.sp >> STACK_BITS | u64::from(call.tracer) << (64 - STACK_BITS);
        let stacks = self.stacks.len();
        let stack = self.stacks.entry(key).or_default();
        let before = stack.len();
        let (now, doubtful) = self.gaps.record(call.vcpu, stack.seen);
        if doubtful {
            stack.doubt();
        }
        stack.seen = Some(now);
        stack.unwind(call.sp, call.pid, steps);
        self.evicted += act(stack, steps);
        self.frames = self.frames - before + stack.len();
        if stacks >= STACKS || self.frames > FRAMES {
            self.evict(steps);
        }
    }

    /// Forgets the half of the stacks that was not heard of for longest.
    #[cold]
    fn evict(&mut self, steps: &mut impl Steps) {
        let age = |stack: &Stack| stack.seen.map_or(0, |seen| seen.clock);
        let mut ages: Vec<_> = self.stacks.values().map(age).collect();
        let middle = ages.len() / 2;
        let (_, &mut limit, _) = ages.select_nth_unstable(middle);
        let mut left = Vec::new();
        self.stacks.retain(|_, stack| {
            let keep = age(stack) >= limit;
            if !keep {
                stack.leave_all(&mut left);
            }
            keep
        });
        self.frames -= left.len();
        self.evicted += u64::try_from(left.len()).unwrap_or(0);
        left.into_iter().for_each(|step| steps.step(step));
    }
}
