//! The open frames of one kernel stack.

use super::gaps::Moment;
use super::{Call, Choice, Step, Steps};

/// Most open frames of a stack; a kernel's has room for some hundred.
const FRAMES: usize = 4096;

/// A function that was entered and not left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::export) struct Frame {
    /// Its number, from 1, in the order of entries.
    pub(in crate::export) id: u64,
    pub(in crate::export) function: u32,
    caller: u32,
    sp: u64,
    /// Clock ticks of its entry.
    entered: u64,
    pub(in crate::export) pid: u32,
    /// Where it was entered.
    pub(in crate::export) vcpu: u32,
    pub(in crate::export) tracer: u8,
    /// The selected frames around it.
    pub(in crate::export) depth: u32,
    /// Where it jumped to instead of returning.
    tail: Option<u32>,
    /// Its end may have been missed.
    doubtful: bool,
    in_root: bool,
    selected: bool,
    /// Selected, and not too deep.
    pub(in crate::export) shown: bool,
}

impl Frame {
    /// How long it was open, if that is certain.
    fn ticks(&self, now: u64) -> Option<u64> {
        if self.doubtful { None } else { now.checked_sub(self.entered) }
    }
}

/// The open frames of one kernel stack: outer ones first, so that stack pointers never rise.
#[derive(Debug, Default)]
pub(super) struct Stack {
    frames: Vec<Frame>,
    /// When it last had a record.
    pub(super) seen: Option<Moment>,
}

/// What a new frame is among the others.
struct Place {
    depth: u32,
    in_root: bool,
    selected: bool,
    shown: bool,
}

impl Stack {
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    pub(super) fn doubt(&mut self) {
        self.frames.iter_mut().for_each(|frame| frame.doubtful = true);
    }

    /// Ends the innermost `count` frames without a return.
    fn leave(&mut self, count: usize, steps: &mut impl Steps) {
        for _ in 0..count {
            let Some(frame) = self.frames.pop() else { return };
            steps.step(Step::Left(frame));
        }
    }

    pub(super) fn leave_all(&mut self, steps: &mut impl Steps) {
        self.leave(self.frames.len(), steps);
    }

    /// A record has the stack pointer `sp`: what is below is gone. Then, where another task is in
    /// the stack by now, all is.
    pub(super) fn unwind(&mut self, sp: u64, pid: u32, steps: &mut impl Steps) {
        let below = self.frames.iter().rev().take_while(|frame| frame.sp < sp).count();
        self.leave(below, steps);
        // Not without that: in the middle of a switch, the task on a stack has the other's pid.
        if below > 0 && self.frames.last().is_some_and(|top| top.pid != pid) {
            self.leave_all(steps);
        }
    }

    /// How many frames are at `sp`, which are a chain of tail calls.
    fn chain(&self, sp: u64) -> usize {
        self.frames.iter().rev().take_while(|frame| frame.sp == sp).count()
    }

    fn place(&self, choice: Choice, max_depth: u32) -> Place {
        let parent = self.frames.last();
        let depth =
            parent.map_or(0, |parent| parent.depth.saturating_add(u32::from(parent.selected)));
        let in_root = choice.root || parent.is_some_and(|parent| parent.in_root);
        let selected = choice.selected && in_root;
        Place { depth, in_root, selected, shown: selected && depth < max_depth }
    }

    /// A function is entered: another frame, behind those at the same place only if they jumped
    /// to it. Returns how many were forgotten for it.
    pub(super) fn enter(
        &mut self,
        id: u64,
        call: &Call,
        choice: Choice,
        max_depth: u32,
        steps: &mut impl Steps,
    ) -> u64 {
        let mut evicted = 0;
        let chain = self.chain(call.sp);
        if let Some(top) = self.frames.last().filter(|_| chain > 0).copied() {
            let same = |one, other| one == other || one == 0 || other == 0;
            let mut members = self.frames.iter().rev().take(chain);
            let again = members.any(|frame| frame.function == call.function);
            let certain = top.tail == Some(call.function);
            if top.pid != call.pid || !same(top.caller, call.other) || (again && !certain) {
                // The caller has gone on, and the end of these was not seen.
                self.leave(chain, steps);
            } else if !certain {
                // A jump that is not recorded, or one to who knows where; or else the caller came
                // here once more, as loops do.
                let members = self.frames.iter_mut().rev().take(chain);
                members.for_each(|frame| frame.doubtful = true);
            }
        }
        if self.frames.len() >= FRAMES {
            for oldest in self.frames.drain(..FRAMES / 2).rev() {
                steps.step(Step::Evicted(oldest));
                evicted += 1;
            }
        }
        let Place { depth, in_root, selected, shown } = self.place(choice, max_depth);
        let parent = self.frames.iter().rev().find(|frame| frame.shown).map(|frame| frame.id);
        self.frames.push(Frame {
            id,
            function: call.function,
            caller: call.other,
            sp: call.sp,
            entered: call.timestamp,
            pid: call.pid,
            vcpu: call.vcpu,
            tracer: call.tracer,
            depth,
            tail: None,
            doubtful: false,
            in_root,
            selected,
            shown,
        });
        steps.step(Step::Entered { id, parent, depth, shown });
        evicted
    }

    /// A function returns: all frames at the same place do.
    pub(super) fn leave_by_return(
        &mut self,
        call: &Call,
        choice: Choice,
        max_depth: u32,
        steps: &mut impl Steps,
    ) {
        let chain = self.chain(call.sp);
        let top = self.frames.last().filter(|_| chain > 0).copied();
        let (own, certain) = match top {
            Some(top) if top.tail.is_none() => (top.function == call.function, true),
            // Jumped to what is traced where it returns, but not where it is entered.
            Some(Frame { tail: Some(target), .. }) if target == call.function => (false, true),
            Some(Frame { tail: Some(0), function, .. }) if function != call.function => {
                (false, false)
            }
            _ => (false, true),
        };
        let jumped = top.is_some_and(|top| match top.tail {
            None => false,
            Some(target) => target == call.function || (target == 0 && !certain),
        });
        if !own && !jumped {
            self.leave(chain, steps);
        }
        if !own {
            let Place { depth, shown, .. } = self.place(choice, max_depth);
            steps.step(Step::Returned { frame: None, depth, ticks: None, shown });
        }
        if own || jumped {
            self.leave_at(call, certain, steps);
        }
    }

    /// All frames at the place of a record end with it.
    pub(super) fn leave_at(&mut self, call: &Call, certain: bool, steps: &mut impl Steps) {
        let keep = self.frames.len() - self.chain(call.sp);
        while self.frames.len() > keep {
            let Some(frame) = self.frames.pop() else { return };
            let ticks = frame.ticks(call.timestamp).filter(|_| certain);
            let Frame { depth, shown, .. } = frame;
            steps.step(Step::Returned { frame: Some(frame), depth, ticks, shown });
        }
    }

    /// A function returns that is not traced: if the innermost frame at that place jumped, it was
    /// there, or to another that went on there.
    pub(super) fn leave_by_aid(&mut self, call: &Call, steps: &mut impl Steps) {
        let top = self.frames.last().filter(|top| top.sp == call.sp);
        if let Some(target) = top.and_then(|top| top.tail) {
            self.leave_at(call, target != 0, steps);
        }
    }

    /// A function is left by a jump. Whether its frame is there.
    pub(super) fn leave_by_tail(
        &mut self,
        call: &Call,
        choice: Choice,
        max_depth: u32,
        steps: &mut impl Steps,
    ) -> bool {
        let chain = self.chain(call.sp);
        if let Some(top) = self.frames.last_mut().filter(|_| chain > 0) {
            if top.function == call.function && top.tail.is_none() {
                top.tail = Some(call.other);
                let Frame { depth, shown, .. } = *top;
                steps.step(Step::Tailed { depth, shown });
                return true;
            }
            // Jumped to what is traced where it is left, but not where it is entered.
            let goes_on = top.tail == Some(call.function);
            if goes_on {
                top.tail = Some(call.other);
                let Place { depth, shown, .. } = self.place(choice, max_depth);
                steps.step(Step::Tailed { depth, shown });
                return true;
            }
            self.leave(chain, steps);
        }
        let Place { depth, shown, .. } = self.place(choice, max_depth);
        steps.step(Step::Tailed { depth, shown });
        false
    }
}
