//! Triggers: at a call of a function that a program counts down to, a vCPU stops, and something is done
//! before it goes on.

use super::arch;
use super::attach::{Controller, Stage};
use super::conditions::{Conditional, ConditionalError, conditional_of};
use super::ends::Use;
use super::follow::Follow;
use super::plan::{Duties, Plan};
use super::tracing::{NOBODY, Tracing};
use super::values::Known;
use super::vm::Vm;
use crate::deadline;
use crate::kernel::{Functions, Kernel, Selection};
use crate::relay::{SNAPSHOT_TIME, Snapshot};
use crate::serve::{Answer, Control, ControlRequest, Globs, Reply, TriggerAction, TriggerSpec};
use crate::stream::MarkKind;
use crate::tracer::{Attachment, Duty, Part, Tally};
use std::collections::BTreeMap;
use std::time::Duration;
use vmtrace_trampolines::{Overflow, Point};

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
        let (condition, notes) =
            conditional_of(kernel, known, &mut sites, spec.condition.as_ref(), Use::Entries)?;
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
        self.globs.filter.iter().any(|glob| module(glob).is_some())
    }

    /// What decides which of several at a site come first.
    fn place(&self) -> (u8, u64) {
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

    /// What sites have to do although nothing is traced: for triggers, and to follow tasks.
    pub(super) fn plan_untraced(&self) -> Plan {
        let mut plan = Plan::default();
        self.plan_always(&mut plan);
        plan
    }

    /// Adds what sites have to do in any case, before all else: who starts to trace traces this
    /// very call.
    pub(super) fn plan_always(&self, plan: &mut Plan) {
        let follows = self.follow.as_ref().map(Follow::parts);
        let mut wanted: BTreeMap<usize, Vec<Part>> = follows.into_iter().flatten().collect();
        let mut unfired: Vec<_> = self.triggers.iter().filter(|it| !it.fired).collect();
        unfired.sort_by_key(|it| it.place());
        for trigger in unfired {
            for &site in &trigger.sites {
                wanted.entry(site).or_default().push(Part {
                    tracer: NOBODY,
                    fields: Vec::new(),
                    condition: trigger.condition.as_ref().and_then(|condition| condition.at(site)),
                    counts: Some(Tally::Stop(trigger.number)),
                });
            }
        }
        if wanted.is_empty() {
            return;
        }
        let mut duties = Duties::behind(std::mem::take(&mut plan.duties));
        let point = Point::Entry;
        for (site, of) in &mut plan.sites {
            let Some(mut parts) = wanted.remove(site) else { continue };
            let planned = duties.all.get(*of as usize);
            parts.extend(planned.into_iter().flat_map(|duty| duty.parts.clone()));
            *of = duties.index(Duty { point, parts });
        }
        for (site, parts) in wanted {
            plan.sites.push((site, duties.index(Duty { point, parts })));
        }
        plan.sites.sort_unstable();
        plan.duties = duties.all;
    }
}

impl Controller {
    /// Lets the guest's programs count down to the calls of triggers: of all that there are when tracing begins.
    pub(super) fn set_triggers(&mut self, attachment: &mut Attachment) {
        let mut failed = Vec::new();
        for trigger in &mut self.tracing.triggers {
            if let Err(error) = attachment.counters().count_down(trigger.number, trigger.left) {
                trigger.fired = true;
                failed.push(format!("{trigger}: {error}"));
            }
        }
        failed.into_iter().for_each(|text| self.note(text));
    }

    /// What sites have to do by now: for tracers, too, unless tracing waits or pauses.
    pub(super) fn planned_now(&mut self) -> std::sync::Arc<Plan> {
        if self.held_back { self.tracing.plan_untraced().into() } else { self.planned() }
    }

    /// Whether a program has stopped a vCPU here, for a trigger, which is obeyed then.
    pub(super) fn triggered(&mut self, machine: &dyn Vm, vcpu: usize, address: u64) -> bool {
        let Stage::Attached { attachment, .. } = &mut self.stage else { return false };
        let Some(stopped) = attachment.stopped(address) else { return false };
        // Who had this number before may be meant, in whose program a task has stood since: then not all calls of
        // the one that has it now have come.
        let is_done = attachment.counters().left(stopped.number) == Some(0);
        let of = |it: &Trigger| it.number == stopped.number && is_done;
        let index = self.tracing.triggers.iter().position(of);
        let told = machine.pause().and_then(|paused| paused.registers(vcpu));
        let site = match (told, index.and_then(|index| self.tracing.triggers.get(index))) {
            (Ok(registers), Some(trigger)) => {
                attachment.site_told(&self.kernel, &trigger.sites, arch::told(&registers))
            }
            _ => None,
        };
        let starts = index.is_some_and(|index| self.fire(machine, vcpu, index, site));
        let Stage::Attached { attachment, .. } = &self.stage else { return true };
        // Who starts to trace does so with this call.
        let again = site.filter(|_| starts).and_then(|site| attachment.again(address, site));
        let went_on =
            machine.pause().and_then(|paused| paused.set_rip(vcpu, again.unwrap_or(stopped.next)));
        if let Err(error) = went_on {
            self.note(format!("a vCPU did not go on after a trigger: {error}"));
        }
        true
    }

    /// Does what a trigger is for, and lets its sites go. Whether tracing begins with this.
    fn fire(&mut self, machine: &dyn Vm, vcpu: usize, index: usize, site: Option<usize>) -> bool {
        let function = site.map_or_else(|| "a function".to_owned(), |site| self.name(site));
        // For commands, the name alone.
        let of_module = site.and_then(|site| self.functions.get(&site));
        let called = of_module.map_or_else(|| function.clone(), |of| of.name().to_owned());
        let Some(trigger) = self.tracing.triggers.get_mut(index) else { return false };
        if std::mem::replace(&mut trigger.fired, true) {
            return false;
        }
        let (action, ran) = (trigger.action, trigger.command);
        let text = format!("{trigger}: {function} on vCPU {vcpu}");
        log::debug!("{text}");
        self.plan = None;
        self.mark(machine, MarkKind::Note, Duration::ZERO, text.clone());
        let before = self.held_back;
        match action {
            TriggerAction::Start => self.command(machine, Control::Resume),
            TriggerAction::Stop => self.command(machine, Control::Pause),
            TriggerAction::Snapshot => {
                if let Err(error) = self.snapshot(machine) {
                    self.note(format!("{text}: {error}"));
                }
            }
            TriggerAction::Mark => {}
            TriggerAction::End => self.ended_by = Some(text),
            TriggerAction::Command => {
                let Some(command) = ran else { return false };
                if let Err(error) = (self.commands)(&Called { command, function: called, vcpu }) {
                    self.note(format!("{text}: no command was run: {error}"));
                }
            }
        }
        action == TriggerAction::Start && before
    }

    /// As somebody's who does not wait for an answer.
    fn command(&mut self, machine: &dyn Vm, command: Control) {
        self.request(machine, ControlRequest { command, reply: Reply::nobody() });
    }

    /// Writes what a flight recorder has into the stream; it goes on.
    pub(super) fn snapshot(&mut self, machine: &dyn Vm) -> Answer {
        if self.tracing.overflow != Overflow::Overwrite {
            return Err(
                "this trace is not a flight recorder: its records are written at once (boot with \
                        --overflow overwrite for one)"
                    .into(),
            );
        }
        let paused = machine.pause().map_err(|error| error.to_string())?;
        let relay = self.relay.as_ref().ok_or("tracing has not begun")?;
        // It may wait for the output.
        self.deadline.allow(SNAPSHOT_TIME + deadline::TIME);
        let Snapshot { records, whole } = relay.snapshot().ok_or("the relay has failed")?;
        let mut text = format!("snapshot: {records} records");
        if !whole {
            text.push_str(
                "; the output of the trace was too slow for the others, which stay in the recorder",
            );
        }
        self.count_pause(paused, MarkKind::Note, text.clone());
        Ok(text)
    }

    /// Says which triggers have come to nothing.
    pub(super) fn tell_unfired(&mut self) {
        let unfired = self.tracing.triggers.iter().filter(|trigger| !trigger.fired);
        let text = |trigger: &Trigger| {
            let mut text = match trigger.call {
                1 => format!("{trigger}: there was no such call"),
                call => format!("{trigger}: there were not {call} such calls"),
            };
            // Also of modules that are gone.
            let came = |module: &str| {
                let pattern = format!(":mod:{module}");
                let mut all = self.functions.values();
                all.any(|function| Functions::of(&pattern).reaches(&function.module))
            };
            let named = trigger.globs.filter.iter().filter_map(|glob| module(glob));
            for module in named.filter(|module| !came(module)) {
                text.push_str(&format!("; module {module} was not loaded"));
            }
            text
        };
        let texts: Vec<_> = unfired.map(text).collect();
        texts.into_iter().for_each(|text| self.note(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trigger(number: u16, action: TriggerAction, sites: &[usize]) -> Trigger {
        let (text, sites) = ("x".to_owned(), sites.to_vec());
        Trigger {
            id: u32::from(number) + 1,
            action,
            text,
            sites,
            globs: Globs::default(),
            condition: None,
            call: 1,
            left: 1,
            number,
            command: None,
            live: false,
            fired: false,
        }
    }

    // A trigger behind the records of its site starts to trace one call late; a tracer that is lost at a
    // trigger's site has a hole there.
    #[test]
    fn triggers_come_before_what_else_a_site_does() {
        let mut tracing = Tracing::of(vec![2, 5, 7], Overflow::Drop);
        tracing.triggers =
            vec![trigger(0, TriggerAction::Start, &[5, 6]), trigger(1, TriggerAction::End, &[5])];
        let stops = |plan: &Plan| {
            let of = |of: u32| plan.duties[of as usize].parts.iter();
            let kind = |part: &Part| match part.counts {
                Some(Tally::Stop(number)) => (part.tracer, Some(number)),
                _ => (part.tracer, None),
            };
            let all = plan.sites.iter().map(|&(site, duty)| (site, of(duty).map(kind).collect()));
            all.collect::<Vec<(usize, Vec<_>)>>()
        };
        let (first, second, own) = ((NOBODY, Some(0)), (NOBODY, Some(1)), (0, None));
        let all = [(2, vec![own]), (5, vec![first, second, own]), (6, vec![first]), (7, vec![own])];
        assert_eq!(stops(&tracing.plan(&[])), all);
        let alone = [(5, vec![first, second]), (6, vec![first])];
        assert_eq!(stops(&tracing.plan_untraced()), alone);
        assert!(tracing.waits_for_start());
        tracing.triggers[0].fired = true;
        let all = [(2, vec![own]), (5, vec![second, own]), (7, vec![own])];
        assert_eq!(stops(&tracing.plan(&[])), all);
        assert!(!tracing.waits_for_start());
    }

    // A call at which tracing starts is made again, and all before that trigger count it twice: a mark comes a call
    // early, or tracing starts at another. Nothing comes behind the end of a run.
    #[test]
    fn who_starts_first_counts_first_and_who_ends_comes_last() {
        let mut tracing = Tracing::of(vec![7], Overflow::Drop);
        let order = [
            (TriggerAction::Mark, 1, false),
            (TriggerAction::Start, 9, false),
            (TriggerAction::End, 1, true),
            (TriggerAction::Mark, 1, true),
            (TriggerAction::Start, 3, true),
            (TriggerAction::Stop, 1, true),
        ];
        let all = (0..).zip(order).map(|(number, (action, left, live))| Trigger {
            left,
            live,
            ..trigger(number, action, &[5])
        });
        tracing.triggers = all.collect();
        let plan = tracing.plan_untraced();
        let stops: Vec<_> = plan.duties[0].parts.iter().map(|part| part.counts).collect();
        assert_eq!(stops, [4, 1, 5, 3, 0, 2].map(|number| Some(Tally::Stop(number))));
    }
}
