//! Triggers: at a call of a function that a program counts down to, or where that ends, a vCPU stops, and something is
//! done before it goes on (by `firing.rs`).

use super::conditions::{Conditional, ConditionalError, conditional_of};
use super::ends::Use;
use super::tracing::{NOBODY, Tracing};
use super::values::Known;
use crate::kernel::{Functions, Kernel, Selection};
use crate::serve::{Globs, TriggerAction, TriggerSpec};
use crate::tracer::{Part, Tally};

/// A call at which a command is to be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Called {
    /// Which of the commands: from 0 on, in the order of the triggers that have one.
    pub command: usize,
    /// What was called.
    pub function: String,
    /// Where.
    pub vcpu: usize,
}

/// Has the command of a call run, and does not wait for it: a vCPU does.
pub type Commands = Box<dyn FnMut(&Called) -> std::io::Result<()> + Send>;

/// Something to be done once, at a call of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trigger {
    /// Who asks for it by which number: from 1 on, never given twice in a run.
    pub id: u32,
    /// What.
    pub action: TriggerAction,
    /// The calls as they were asked for.
    pub text: String,
    /// Functions (indices into [`Kernel::sites`](crate::kernel::Kernel::sites), and behind those numbers of
    /// sites of modules that are loaded), in order.
    pub sites: Vec<usize>,
    /// The same for functions that come later: those of modules.
    pub globs: Globs,
    /// Of which calls; `None` for all.
    pub condition: Option<Conditional>,
    /// Which of these calls, of all functions and vCPUs together: from 1 on.
    pub call: u64,
    /// How many of them were still to come when that was looked at last.
    pub left: u64,
    /// The number of the stop that programs count down to: another trigger may have had it before.
    pub number: u16,
    /// The number of the calls that are kept for it until they end: no other trigger's that there is.
    pub kept: u16,
    /// Which of the commands it runs: from 0 on.
    pub command: Option<usize>,
    /// It was asked for while the guest ran.
    pub live: bool,
    /// It was done.
    pub fired: bool,
}

/// Where a trigger is.
#[derive(Clone, Debug)]
pub struct Spot {
    /// As those of a [`Trigger`].
    pub sites: Vec<usize>,
    /// As that of a [`Trigger`].
    pub globs: Globs,
    /// Of which calls; `None` for all.
    pub condition: Option<Conditional>,
    /// What the user should know of it.
    pub notes: Vec<String>,
}

/// Why a trigger can be nowhere.
#[derive(Debug, thiserror::Error)]
pub enum SpotError {
    /// A pattern, and names that are like it.
    #[error("no function of {release} that can be traced matches {glob:?}{near}")]
    NoMatch {
        /// Of the kernel.
        release: String,
        /// The pattern.
        glob: String,
        /// As [`Kernel::near_functions`].
        near: String,
    },
    /// No such argument, or another type.
    #[error(transparent)]
    Condition(#[from] ConditionalError),
}

impl Spot {
    /// Where that is in a kernel.
    ///
    /// # Errors
    /// When a pattern matches nothing, or the condition cannot be.
    pub fn find(kernel: &Kernel, spec: &TriggerSpec) -> Result<Self, SpotError> {
        Self::of(kernel, kernel, spec, kernel.select_with_report(&spec.filter, &spec.notrace))
    }

    /// The same of these functions, of which `known` knows more than the kernel's image.
    pub(super) fn of(
        kernel: &Kernel,
        known: &dyn Known,
        spec: &TriggerSpec,
        selection: Selection,
    ) -> Result<Self, SpotError> {
        // Who names a module waits for it.
        if let Some(glob) = selection.unmatched.iter().find(|glob| module(glob).is_none()) {
            let (release, near) = (kernel.release().to_owned(), kernel.near_functions(glob));
            return Err(SpotError::NoMatch { release, glob: glob.clone(), near });
        }
        let mut sites = selection.sites;
        let used = Use::of_trigger(spec.condition.as_ref());
        let (condition, notes) =
            conditional_of(kernel, known, &mut sites, spec.condition.as_ref(), used)?;
        let globs = Globs { filter: spec.filter.clone(), notrace: spec.notrace.clone() };
        Ok(Self { sites, globs, condition, notes })
    }
}

/// The module that a pattern names, if it does.
fn module(glob: &str) -> Option<&str> {
    Functions::of(glob).module()
}

impl std::fmt::Display for Trigger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { id, action, text, .. } = self;
        match self.live {
            true => write!(f, "trigger {id} ({action} at {text})"),
            false => write!(f, "{} {text}", action.option()),
        }
    }
}

impl Trigger {
    /// Whether functions of modules are meant by name.
    pub(super) fn names_modules(&self) -> bool {
        self.modules().next().is_some()
    }

    /// The modules that it names.
    pub(super) fn modules(&self) -> impl Iterator<Item = &str> {
        self.globs.filter.iter().filter_map(|glob| module(glob))
    }

    /// What it has a site do, if anything.
    pub(super) fn part(&self, site: usize) -> Option<Part> {
        if let Some(ends) = self.ends() {
            return ends.ends(site)?.begin(NOBODY, self.keeper());
        }
        Some(Part {
            tracer: NOBODY,
            condition: self.condition.as_ref().and_then(|condition| condition.at(site)),
            counts: Some(Tally::Stop { number: self.number, since: None }),
            ..Part::default()
        })
    }

    /// What decides which of several at a site come first.
    pub(super) fn place(&self) -> (u8, u64) {
        match (self.action, self.live) {
            // A call at which tracing starts is made again, and counted again by what comes before: that must be
            // nothing but those that start later.
            (TriggerAction::Start, _) => (0, self.left),
            // The newest first, which only adds a program to those of the others.
            (TriggerAction::End, true) => (3, 0),
            (_, true) => (1, u64::MAX - u64::from(self.id)),
            (_, false) => (2, 0),
        }
    }
}

impl Tracing {
    /// Most triggers of a trace at a time.
    pub const MAX_TRIGGERS: u16 = 256;

    /// Whether nothing is traced before a trigger says so.
    #[must_use]
    pub fn waits_for_start(&self) -> bool {
        self.triggers.iter().any(|trigger| trigger.action == TriggerAction::Start && !trigger.fired)
    }
}
