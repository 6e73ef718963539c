//! Open calls, for formats that nest them: a stack for each task and tracer.

use rustc_hash::FxHashMap;

/// Most tasks and tracers together whose calls are kept.
const LANES: usize = 1 << 20;

/// Whose calls nest: those of one task, or of a vCPU's idle task (all idle tasks share a pid), and
/// tracer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lane(u64);

impl Lane {
    /// The lane of a task; `tracer` is a number that tells it from others.
    pub(super) fn new(vcpu: u32, pid: u32, tracer: u16) -> Self {
        let idle = pid == 0;
        let owner = if idle { vcpu } else { pid };
        Self(u64::from(idle) << 63 | u64::from(tracer) << 32 | u64::from(owner))
    }
}

/// Numbers for the tracers of a trace; zero is for the one of a trace that has no others.
#[derive(Debug, Default)]
pub(super) struct Tracers(Vec<Box<str>>);

impl Tracers {
    pub(super) fn number(&mut self, name: Option<&str>) -> u16 {
        let Some(name) = name else { return 0 };
        let known = self.0.iter().position(|known| **known == *name);
        let index = known.unwrap_or_else(|| {
            self.0.push(name.into());
            self.0.len() - 1
        });
        u16::try_from(index + 1).unwrap_or(u16::MAX)
    }

    /// The name that has a number.
    pub(super) fn name(&self, number: u16) -> Option<&str> {
        self.0.get(usize::from(number).checked_sub(1)?).map(|name| &**name)
    }
}

/// A call that is open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open<T> {
    /// The number of the call.
    pub(super) frame: u64,
    /// What the format wants to know of it.
    pub(super) with: T,
}

/// Open calls of all lanes. There are never more than the player has open.
#[derive(Debug)]
pub(super) struct Calls<T> {
    lanes: FxHashMap<Lane, Vec<Open<T>>>,
}

impl<T> Calls<T> {
    pub(super) fn new() -> Self {
        Self { lanes: FxHashMap::default() }
    }

    /// The innermost open call.
    pub(super) fn top(&mut self, lane: Lane) -> Option<&mut T> {
        Some(&mut self.lanes.get_mut(&lane)?.last_mut()?.with)
    }

    /// A call begins. Returns whether there is room for it.
    pub(super) fn enter(&mut self, lane: Lane, frame: u64, with: T) -> bool {
        if self.lanes.len() >= LANES && !self.lanes.contains_key(&lane) {
            self.lanes.retain(|_, open| !open.is_empty());
            if self.lanes.len() >= LANES {
                return false;
            }
        }
        self.lanes.entry(lane).or_default().push(Open { frame, with });
        true
    }

    /// A call ends: that one, behind those that are above it and have not ended where they should
    /// have. Nothing when it is not open.
    pub(super) fn leave(&mut self, lane: Lane, frame: u64) -> Vec<Open<T>> {
        let Some(open) = self.lanes.get_mut(&lane) else { return Vec::new() };
        match open.iter().rposition(|call| call.frame == frame) {
            Some(index) => open.drain(index..).rev().collect(),
            None => Vec::new(),
        }
    }

    /// The same for who asks only how many.
    #[inline]
    pub(super) fn count_left(&mut self, lane: Lane, frame: u64) -> usize {
        let Some(open) = self.lanes.get_mut(&lane) else { return 0 };
        let Some(index) = open.iter().rposition(|call| call.frame == frame) else { return 0 };
        let count = open.len() - index;
        open.truncate(index);
        count
    }

    /// A call has ended unseen. It is closed if it is the innermost one, else with what is around.
    pub(super) fn forget(&mut self, lane: Lane, frame: u64) -> Option<Open<T>> {
        let open = self.lanes.get_mut(&lane)?;
        if open.last()?.frame == frame { open.pop() } else { None }
    }

    /// All that are open, in the order of their beginnings.
    pub(super) fn take(&mut self) -> Vec<Open<T>> {
        let mut open: Vec<_> = self.lanes.drain().flat_map(|(_, open)| open).collect();
        open.sort_by_key(|call| call.frame);
        open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_above_ends_first() {
        let mut calls = Calls::new();
        let lane = Lane::new(1, 7, 0);
        for frame in 1..=4 {
            assert!(calls.enter(lane, frame, ()));
        }
        assert!(calls.forget(lane, 2).is_none());
        assert_eq!(calls.forget(lane, 4).map(|call| call.frame), Some(4));
        let ended: Vec<_> = calls.leave(lane, 2).iter().map(|call| call.frame).collect();
        assert_eq!(ended, [3, 2]);
        assert!(calls.leave(lane, 2).is_empty());
        assert!(calls.leave(Lane::new(1, 7, 1), 1).is_empty(), "of another tracer");
        assert!(calls.top(lane).is_some());
        // Idle tasks are those of vCPUs, others wander.
        assert_eq!(Lane::new(0, 7, 0), Lane::new(1, 7, 0));
        assert_ne!(Lane::new(0, 0, 0), Lane::new(1, 0, 0));
    }
}
