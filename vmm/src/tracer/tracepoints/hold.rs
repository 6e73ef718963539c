//! Lets tracepoints call probes, and gives them back.

use super::guest::{Places, PointReason, branches};
use super::points::{PointSkip, Points, restore};
use crate::kernel::Kernel;
use crate::kernel::tracepoints::{Branch, Hooks, Preparation};
use crate::tracer::edit::Edit;
use crate::tracer::error::TraceError;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::stops::Moment;
use crate::tracer::trace::Attachment;
use crate::tracer::view::View;
use std::collections::BTreeMap;

impl Attachment {
    /// Lets the guest stop, by `trap`, around its changes of tracepoints; where it then stands
    /// (run-time addresses). To be called when no such change can be under way. All vCPUs are
    /// paused.
    ///
    /// # Errors
    /// When the kernel changes them in an unknown way: none can be held then.
    pub fn watch_tracepoints(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        trap: &[u8],
    ) -> Result<Vec<u64>, TraceError> {
        let stops = self.code.tracepoint_brackets(guest, &self.image, kernel, trap)?;
        let view = View::with_annex(guest, self.near, &*self.memory);
        if !stops.lay(&view)? {
            return Err(TraceError::Code("its code cannot be changed"));
        }
        self.points.stops = stops;
        Ok(self.points.stops.traps().collect())
    }

    /// Whether tracepoints can be held.
    #[must_use]
    pub fn watches_tracepoints(&self) -> bool {
        !self.points.stops.is_empty()
    }

    /// Whether a vCPU that stands at this run-time address begins or ends a change of tracepoints,
    /// and where it goes on from there.
    #[must_use]
    pub fn tracepoint_moment(&self, address: u64) -> Option<(Moment, u64)> {
        self.points.stops.find(address)
    }

    /// What records of a program say that is called at a tracepoint (link address, and if it is of a
    /// module the name of its event, else nothing), by a probe that is made if there is none yet. `None` when there is
    /// no place for one: others are none the worse for it, and who wants to hold it is told.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn tracepoint_word(
        &mut self,
        guest: &dyn Guest,
        (tracepoint, name): (u64, &str),
        program: u16,
    ) -> Result<Option<u32>, TraceError> {
        // Records of the one that was there before must not be taken for those of this one.
        if self.points.names.get(&tracepoint).map_or("", |known| known) != name {
            self.points.probes.retain(|&(at, _), _| at != tracepoint);
            self.points.names.insert(tracepoint, name.into());
        }
        let key = (tracepoint, program);
        let word = match self.points.probes.get(&key) {
            Some(&(_, word)) => word,
            None => {
                let made = match self.code.probe(guest, program) {
                    Err(TraceError::Full(_)) => return Ok(None),
                    made => made?,
                };
                self.points.probes.insert(key, made);
                made.1
            }
        };
        #[allow(clippy::cast_possible_truncation, reason = "the low half")]
        Ok(Some(word as u32))
    }

    /// Lets these tracepoints call these programs, and no others: at once, or when the guest has
    /// changed what it is changing. All vCPUs are paused. Returns those that were left alone.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn hold_tracepoints(
        &mut self,
        guest: &dyn Guest,
        wanted: Vec<(Hooks, u16)>,
    ) -> Result<Vec<PointSkip>, TraceError> {
        let wanted: BTreeMap<_, _> = wanted
            .into_iter()
            .map(|(hooks, program)| (hooks.tracepoint, (hooks, program)))
            .collect();
        let before = std::mem::replace(&mut self.points.wanted, wanted);
        let view = View::with_annex(guest, self.near, &*self.memory);
        let changed: Vec<u64> = self.points.held.keys().copied().collect();
        for tracepoint in changed {
            if before.get(&tracepoint) != self.points.wanted.get(&tracepoint)
                && let Some(edits) = self.points.held.remove(&tracepoint)
            {
                let restored = restore(&edits, &view);
                if !matches!(restored, Ok(true)) {
                    self.points.left.extend(before.get(&tracepoint).map(|&(_, program)| program));
                }
                restored?;
            }
        }
        self.take_tracepoints(guest)
    }

    /// Whether a tracepoint (link address) is ours now.
    #[must_use]
    pub fn holds_tracepoint(&self, tracepoint: u64) -> bool {
        self.points.held.contains_key(&tracepoint)
    }

    /// How many tracepoints are ours.
    #[must_use]
    pub fn held_tracepoints(&self) -> usize {
        self.points.held.len()
    }

    fn take_tracepoints(&mut self, guest: &dyn Guest) -> Result<Vec<PointSkip>, TraceError> {
        let mut skipped = Vec::new();
        if self.points.changes > 0 {
            return Ok(skipped);
        }
        let view = View::with_annex(guest, self.near, &*self.memory);
        let is_marked = self.points.mark(guest, &self.image, &view)?;
        for (&tracepoint, (hooks, program)) in &self.points.wanted {
            // Modules may come that use it.
            if self.points.held.contains_key(&tracepoint) || !hooks.are_used() {
                continue;
            }
            if !is_marked && matches!(hooks.preparation, Preparation::Syscalls(_)) {
                skipped.push(PointSkip { tracepoint, reason: PointReason::Tasks });
                continue;
            }
            if let (Some(key), Preparation::Key(branches)) = (key(hooks), &hooks.preparation)
                && !self.points.keys.contains_key(&key)
            {
                match held(self.jumps(&view, guest, branches), &view)? {
                    Ok(edits) => drop(self.points.keys.insert(key, edits)),
                    Err(reason) => {
                        skipped.push(PointSkip { tracepoint, reason });
                        continue;
                    }
                }
            }
            let probe = self.points.probes.get(&(tracepoint, *program));
            let edits = match probe {
                Some(&(probe, _)) => self.code.tracepoint(&view, guest, &self.image, hooks, probe),
                None => Err(PointReason::OutOfReach),
            };
            match held(edits, &view)? {
                Ok(edits) => drop(self.points.held.insert(tracepoint, edits)),
                Err(reason) => skipped.push(PointSkip { tracepoint, reason }),
            }
        }
        self.points.drop_keys(&view)?;
        Ok(skipped)
    }

    /// What is to be written for branches of a static key to jump, of which the guest may be a user, too.
    fn jumps(
        &self,
        view: &View<'_>,
        guest: &dyn Guest,
        all: &[Branch],
    ) -> Result<Vec<Edit>, PointReason> {
        let (own, jump) = self.code.jumps();
        let places = Places { guest, view, image: &self.image, own };
        let (count, edits) = branches(&places, all, jump, |_| true)?;
        if count == 0 { Err(PointReason::Nowhere) } else { Ok(edits) }
    }

    /// The guest begins to change tracepoints: gives ours back. How many these were, and whether all
    /// was as it was left. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn lend_tracepoints(&mut self, guest: &dyn Guest) -> Result<(usize, bool), TraceError> {
        self.points.changes += 1;
        let view = View::with_annex(guest, self.near, &*self.memory);
        let (mut count, mut whole) = (0, true);
        for (_, edits) in std::mem::take(&mut self.points.held) {
            whole &= restore(&edits, &view)?;
            count += 1;
        }
        for (_, edits) in std::mem::take(&mut self.points.keys) {
            whole &= restore(&edits, &view)?;
        }
        Ok((count, whole))
    }

    /// A change of tracepoints is over: takes them again, if there is no other. Returns how many,
    /// and what was left alone. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn take_tracepoints_again(
        &mut self,
        guest: &dyn Guest,
    ) -> Result<(usize, Vec<PointSkip>), TraceError> {
        self.points.changes = self.points.changes.saturating_sub(1);
        let before = self.points.held.len();
        let skipped = self.take_tracepoints(guest)?;
        Ok((self.points.held.len() - before, skipped))
    }
}

impl Points {
    /// Gives back the static keys that no tracepoint needs which is ours.
    fn drop_keys(&mut self, view: &View<'_>) -> Result<(), GuestError> {
        let held = self.wanted.iter().filter(|(at, _)| self.held.contains_key(at));
        let needed: Vec<u64> = held.filter_map(|(_, (hooks, _))| key(hooks)).collect();
        let unused = self.keys.extract_if(.., |key, _| !needed.contains(key));
        unused.map(|(_, edits)| restore(&edits, view).map(drop)).fold(Ok(()), Result::and)
    }
}

/// What the static key is known by that a tracepoint needs beside its own.
fn key(hooks: &Hooks) -> Option<u64> {
    match &hooks.preparation {
        Preparation::Key(branches) => branches.first().map(|branch| branch.code),
        Preparation::Nothing | Preparation::Syscalls(_) | Preparation::Unknown => None,
    }
}

/// Writes edits, if there are any to be written; all of them, or none.
fn held(
    edits: Result<Vec<Edit>, PointReason>,
    view: &View<'_>,
) -> Result<Result<Vec<Edit>, PointReason>, GuestError> {
    let edits = match edits {
        Ok(edits) => edits,
        Err(reason) => return Ok(Err(reason)),
    };
    let mut holds = true;
    for edit in &edits {
        holds &= edit.apply(view)?;
    }
    if holds {
        return Ok(Ok(edits));
    }
    edits.iter().rev().try_for_each(|edit| edit.undo(view))?;
    Ok(Err(PointReason::ReadBack))
}
