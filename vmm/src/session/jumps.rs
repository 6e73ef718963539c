//! Functions in which calls go on by a jump through a pointer. Which they are is known when it happens: from then on
//! their returns end such calls.

use super::controller::{Controller, Stage};
use super::vm::Vm;
use crate::relay::Relay;
use crate::stream::MarkKind;
use std::time::{Duration, Instant};

/// How often the guest pauses for that. A change of many functions takes longer, and no more than one part in so many
/// of the time is for that.
const EVERY: Duration = Duration::from_millis(200);
const SHARE: u32 = 50;

/// Those that are still to be followed.
#[derive(Debug, Default)]
pub(super) struct Jumps {
    /// Sites of functions, each with that of one in which calls of it went on.
    new: Vec<(u32, u32)>,
    due: Option<Instant>,
    /// It was tried in vain: there is no room for more, and trying again would pause the guest for nothing.
    is_refused: bool,
}

impl Controller {
    /// When the guest is to pause for what calls have gone on in, if they have.
    pub(super) fn jumps_deadline(&self) -> Option<Instant> {
        self.jumps.due.filter(|_| !self.jumps.new.is_empty())
    }

    /// Has calls end in what they were seen to go on in.
    pub(super) fn follow_jumps(&mut self, machine: &dyn Vm) {
        let told = self.relay.as_ref().map(Relay::jumps).unwrap_or_default();
        for (function, target) in told {
            let site = |address| {
                let sites = self.kernel.sites();
                let first = sites.partition_point(|site| site.entry < address);
                sites.get(first).filter(|site| site.entry == address)?;
                u32::try_from(first).ok()
            };
            // Functions of modules, and what cannot be traced, are not followed.
            let (Some(function), Some(target)) = (site(function), site(target)) else { continue };
            match self.tracing.lacks_ends(function, target) {
                true => self.jumps.new.push((function, target)),
                // Another tracer may.
                false => drop(self.tracing.learned.insert((function, target))),
            }
        }
        if self.jumps.new.is_empty() {
            return;
        }
        let is_traced = matches!(self.stage, Stage::Attached { from: None, .. });
        if !is_traced || self.jumps.is_refused || self.end.has_begun() {
            self.jumps.new.clear();
            return;
        }
        let began = Instant::now();
        if self.jumps.due.is_some_and(|due| due > began) {
            return;
        }
        if self.is_lent() {
            // Nothing can be held while the guest updates its own.
            self.jumps.due = Some(began + EVERY);
            return;
        }
        let before = (self.tracing.learned.clone(), self.planned());
        self.tracing.learned.extend(self.jumps.new.drain(..));
        self.tracing_changed();
        // Not all ends of what they go on in may be seen; and while tracing pauses there is nothing to do.
        if *self.planned() == *before.1 || self.held_back {
            return;
        }
        if let Err(error) = self.retarget(machine, MarkKind::Note, "calls that jump are followed") {
            self.jumps.is_refused = true;
            self.tracing.learned = before.0;
            self.tracing_changed();
            self.note_once(format!("calls that go on through pointers have no end: {error}"));
        }
        let ended = Instant::now();
        self.jumps.due = Some(ended + EVERY.max(ended.duration_since(began) * SHARE));
    }
}
