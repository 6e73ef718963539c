//! Functions in which calls go on by a jump through a pointer. Which they are is known when it happens: from then on
//! their returns end such calls.

use super::controller::{Controller, Stage};
use super::vm::Vm;
use crate::relay::Relay;
use crate::stream::MarkKind;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often the guest pauses for that. A change of many functions takes longer (most of it while the guest runs), and no
/// more than one part in so many of the time is for that.
const EVERY: Duration = Duration::from_millis(200);
const SHARE: u32 = 10;

/// How long to wait when it has failed, and how often it may.
const AGAIN: Duration = Duration::from_secs(10);
const FAILURES: u32 = 3;
/// How often what is traced is changed for it, each time after a longer wait. A change makes stubs for ends, which have their
/// room for good: the user's own changes need some, too.
const CHANGES: u32 = 24;

/// Those that are still to be followed.
#[derive(Debug, Default)]
pub(super) struct Jumps {
    /// Sites of functions, each with that of one in which calls of it went on.
    new: Vec<(u32, u32)>,
    /// Sites of functions, each with where calls of it went on that is no function of the kernel's own that can be traced.
    elsewhere: BTreeMap<u32, u64>,
    due: Option<Instant>,
    changes: u32,
    failures: u32,
}

impl Jumps {
    /// The guest starts a kernel, for which all programs are made anew.
    pub(super) fn kernel_starts(&mut self) {
        (self.changes, self.failures, self.due) = (0, 0, None);
    }

    /// Whether more can be followed.
    fn goes_on(&self) -> bool {
        self.changes < CHANGES && self.failures < FAILURES
    }
}

impl Controller {
    /// When the guest is to pause for what calls have gone on in, if they have.
    pub(super) fn jumps_deadline(&self) -> Option<Instant> {
        self.jumps.due.filter(|_| !self.jumps.new.is_empty())
    }

    /// Calls of a function went on in a function of a module, or in one that cannot be traced, which is not followed.
    fn goes_elsewhere(&mut self, function: u32, target: u64) {
        // Last what takes long: a guest may tell of many.
        if !self.jumps.elsewhere.contains_key(&function)
            && self.tracing.pairs_calls_of(function)
            && !self.functions.values().any(|it| it.site.entry == target)
        {
            self.jumps.elsewhere.insert(function, target);
        }
    }

    /// What there is to say at the end of calls that went on where their ends are not seen.
    pub(super) fn not_followed(&mut self) -> Option<String> {
        self.look_at_jumps();
        self.tracing.learned.append(&mut self.jumps.new);
        let mut found = self.tracing.not_followed(&self.kernel);
        found.extend(&self.jumps.elsewhere);
        let (&function, &target) = found.first_key_value()?;
        let target =
            self.kernel.symbols().primary_at(target).unwrap_or("code outside of the image");
        Some(format!(
            "calls of {} functions have no end where they go on, through pointers, in functions whose ends are not all seen (such \
             as {} in {target})",
            found.len(),
            self.name(function as usize)
        ))
    }

    /// Takes what the relay has seen.
    fn look_at_jumps(&mut self) {
        let told = self.relay.as_ref().map(Relay::jumps).unwrap_or_default();
        for (function, target) in told {
            let site = |address| {
                let sites = self.kernel.sites();
                let first = sites.partition_point(|site| site.entry < address);
                sites.get(first).filter(|site| site.entry == address)?;
                u32::try_from(first).ok()
            };
            let Some(function) = site(function) else { continue };
            let Some(target) = site(target) else {
                self.goes_elsewhere(function, target);
                continue;
            };
            match self.tracing.lacks_ends(function, target) {
                true => self.jumps.new.push((function, target)),
                // Another tracer may.
                false => self.tracing.learned.push((function, target)),
            }
        }
    }

    /// Has calls end in what they were seen to go on in.
    pub(super) fn follow_jumps(&mut self, machine: &dyn Vm) {
        self.look_at_jumps();
        if self.jumps.new.is_empty() {
            return;
        }
        if self.end.has_begun() || !self.jumps.goes_on() {
            // Of use when the user changes what is traced.
            self.tracing.learned.append(&mut self.jumps.new);
            return;
        }
        if !matches!(self.stage, Stage::Attached { from: None, .. }) || self.held_back {
            // When tracing begins all is planned anew.
            self.tracing.learned.append(&mut self.jumps.new);
            self.tracing_changed();
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
        let planned = self.planned();
        let before = self.tracing.learned.len();
        self.tracing.learned.append(&mut self.jumps.new);
        self.tracing_changed();
        // Not all ends of what they go on in may be seen.
        let mut wait = EVERY;
        if *self.planned() == *planned {
            self.plan = Some(planned);
        } else if let Err(error) =
            self.retarget(machine, MarkKind::Note, "calls that jump are followed")
        {
            self.jumps.new = self.tracing.learned.split_off(before);
            self.tracing_changed();
            self.jumps.failures += 1;
            wait = AGAIN;
            if !self.jumps.goes_on() {
                self.note_once(format!("calls that go on through pointers have no end: {error}"));
            }
        } else {
            self.jumps.changes += 1;
            wait *= self.jumps.changes;
            if !self.jumps.goes_on() {
                self.note_once(format!(
                    "calls that go on through pointers have no end unless that was seen in the first {CHANGES} changes for it"
                ));
            }
        }
        let ended = Instant::now();
        self.jumps.due = Some(ended + wait.max(ended.duration_since(began) * SHARE));
    }
}
