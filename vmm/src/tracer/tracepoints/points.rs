//! What is known of tracepoints, and which are vmtrace's.

use super::guest::PointReason;
use super::marks::Tasks;
use crate::kernel::tracepoints::{Hooks, Preparation, SyscallMarks};
use crate::tracer::edit::{Edit, both};
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::stops::{Moment, Stops};
use crate::tracer::view::View;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A tracepoint that was left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointSkip {
    /// Link address of its `struct tracepoint`.
    pub tracepoint: u64,
    /// Why.
    pub reason: PointReason,
}

/// What is known of tracepoints, and which are ours.
#[derive(Debug, Default)]
pub(in crate::tracer) struct Points {
    pub(super) stops: Stops<Moment>,
    /// Those of the guest's changes of tracepoints that have begun and are not over.
    pub(super) changes: u32,
    /// By link address, with the number of the program of each.
    pub(super) wanted: BTreeMap<u64, (Hooks, u16)>,
    pub(super) held: BTreeMap<u64, Vec<Edit>>,
    /// Programs of those that were not found as they were left: something may still lead there.
    pub(super) left: Vec<u16>,
    /// Static keys that tracepoints have in common, which jump on our account: by the first branch of each.
    pub(super) keys: BTreeMap<u64, Vec<Edit>>,
    /// Run-time addresses of probes, and those that their records tell, by tracepoint and
    /// program. None ever goes away: a task may stand in it.
    pub(super) probes: HashMap<(u64, u16), (u64, u64)>,
    /// Names of the events of modules by their tracepoints: another module may have others in the
    /// place of those of one that is gone.
    pub(super) names: HashMap<u64, Arc<str>>,
    /// Tasks are marked on our account. They stay so while the guest changes its tracepoints.
    pub(super) marked: Option<SyscallMarks>,
}

/// Takes back what was written, the last first; whether all of it was still there.
pub(super) fn restore(edits: &[Edit], view: &View<'_>) -> Result<bool, GuestError> {
    Edit::restore_all(edits.iter().rev(), view)
}

impl Points {
    /// Programs that are called, or will be, or may be.
    pub(in crate::tracer) fn programs(&self) -> impl Iterator<Item = u16> {
        self.wanted.values().map(|&(_, program)| program).chain(self.left.iter().copied())
    }

    /// Gives all back for good; whether all was as it was left.
    pub(in crate::tracer) fn end(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        view: &View<'_>,
    ) -> Result<bool, GuestError> {
        self.wanted.clear();
        let held = std::mem::take(&mut self.held);
        let held = held.into_values().chain(std::mem::take(&mut self.keys).into_values());
        let whole = held.map(|edits| restore(&edits, view)).fold(Ok(true), both);
        // Whatever the guest has made of its tasks, it must not stop any more.
        let marks = self.mark(guest, image, view);
        let whole = both(whole, std::mem::take(&mut self.stops).remove(view));
        marks.and(whole)
    }

    /// Marks tasks if that is wanted, and no more if it is not; false when they cannot be marked.
    /// Not while the guest may be doing so itself.
    pub(super) fn mark(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        view: &View<'_>,
    ) -> Result<bool, GuestError> {
        let marks = self.wanted.values().find_map(|(hooks, _)| match hooks.preparation {
            Preparation::Syscalls(marks) => Some(marks),
            Preparation::Nothing | Preparation::Key(_) | Preparation::Unknown => None,
        });
        let of = |marks| Tasks { guest, image, view, marks };
        if self.changes > 0 {
            return Ok(true);
        }
        match (self.marked, marks) {
            (None, Some(marks)) if of(&marks).mark()? => self.marked = Some(marks),
            (None, Some(_)) => return Ok(false),
            (Some(marks), None) => {
                self.marked = None;
                if !of(&marks).unmark()? {
                    let what = "the guest's list of tasks is not as expected";
                    return Err(GuestError::Mismatch(what.to_owned()));
                }
            }
            (None, None) | (Some(_), Some(_)) => {}
        }
        Ok(true)
    }
}
