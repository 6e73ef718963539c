//! Triggers: at a call of a function that a program counts down to, a vCPU stops, and something is done
//! before it goes on.

use super::arch;
use super::attach::{Controller, Stage};
use super::conditions::Conditional;
use super::follow::Follow;
use super::tracing::{Duties, NOBODY, Plan, Tracing};
use super::vm::Vm;
use crate::deadline;
use crate::relay::{SNAPSHOT_TIME, Snapshot};
use crate::serve::{Answer, Control, ControlRequest, Reply};
use crate::stream::MarkKind;
use crate::tracer::{Attachment, Duty, Part, Tally};
use std::collections::BTreeMap;
use std::time::Duration;
use vmtrace_trampolines::{Overflow, Point};

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Tracing begins, or goes on.
    Start,
    /// Tracing pauses.
    Stop,
    /// What a flight recorder has is written into the stream.
    Snapshot,
    /// A mark is put into the trace.
    Mark,
    /// The run ends.
    End,
    /// A command is run beside the VMM.
    Command,
}

impl Action {
    /// The option that asks for it.
    #[must_use]
    pub fn option(self) -> &'static str {
        match self {
            Self::Start => "--start-at",
            Self::Stop => "--stop-at",
            Self::Snapshot => "--snapshot-at",
            Self::Mark => "--mark-at",
            Self::End => "--end-at",
            Self::Command => "--exec-at",
        }
    }
}

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
    /// What.
    pub action: Action,
    /// The calls as they were asked for.
    pub text: String,
    /// Functions (indices into [`Kernel::sites`](crate::kernel::Kernel::sites)), in order.
    pub sites: Vec<usize>,
    /// Of which calls; `None` for all.
    pub condition: Option<Conditional>,
    /// Which of these calls, of all functions and vCPUs together: from 1 on.
    pub call: u64,
    /// It was done.
    pub fired: bool,
}

impl std::fmt::Display for Trigger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.action.option(), self.text)
    }
}

impl Tracing {
    /// Most triggers of a trace.
    pub const MAX_TRIGGERS: usize = 256;

    /// Whether nothing is traced before a trigger says so.
    #[must_use]
    pub fn waits_for_start(&self) -> bool {
        self.triggers.iter().any(|trigger| trigger.action == Action::Start && !trigger.fired)
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
        for (number, trigger) in (0..).zip(&self.triggers).filter(|(_, trigger)| !trigger.fired) {
            for &site in &trigger.sites {
                wanted.entry(site).or_default().push(Part {
                    tracer: NOBODY,
                    fields: Vec::new(),
                    condition: trigger.condition.as_ref().and_then(|condition| condition.at(site)),
                    counts: Some(Tally::Stop(number)),
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
    /// Lets the guest's programs count down to the calls of triggers.
    pub(super) fn set_triggers(&mut self, attachment: &mut Attachment) {
        let mut failed = Vec::new();
        for (number, trigger) in (0..).zip(&mut self.tracing.triggers) {
            if let Err(error) = attachment.counters().count_down(number, trigger.call) {
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
        let Stage::Attached { attachment, .. } = &self.stage else { return false };
        let Some(stopped) = attachment.stopped(address) else { return false };
        let number = usize::from(stopped.number);
        let told = machine.pause().and_then(|paused| paused.registers(vcpu));
        let site = match (told, self.tracing.triggers.get(number)) {
            (Ok(registers), Some(trigger)) => {
                attachment.site_told(&self.kernel, &trigger.sites, arch::told(&registers))
            }
            _ => None,
        };
        let starts = self.fire(machine, vcpu, number, site);
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
    fn fire(&mut self, machine: &dyn Vm, vcpu: usize, number: usize, site: Option<usize>) -> bool {
        let function = site.map_or_else(|| "a function".to_owned(), |site| self.name(site));
        let Some(trigger) = self.tracing.triggers.get_mut(number) else { return false };
        if std::mem::replace(&mut trigger.fired, true) {
            return false;
        }
        let (action, text) = (trigger.action, format!("{trigger}: {function} on vCPU {vcpu}"));
        log::debug!("{text}");
        self.plan = None;
        self.mark(machine, MarkKind::Note, Duration::ZERO, text.clone());
        let before = self.held_back;
        match action {
            Action::Start => self.command(machine, Control::Resume),
            Action::Stop => self.command(machine, Control::Pause),
            Action::Snapshot => {
                if let Err(error) = self.snapshot(machine) {
                    self.note(format!("{text}: {error}"));
                }
            }
            Action::Mark => {}
            Action::End => self.ended_by = Some(text),
            Action::Command => {
                let before = self.tracing.triggers.iter().take(number);
                let command = before.filter(|trigger| trigger.action == Action::Command).count();
                if let Err(error) = (self.commands)(&Called { command, function, vcpu }) {
                    self.note(format!("{text}: no command was run: {error}"));
                }
            }
        }
        action == Action::Start && before
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
        let text = |trigger: &Trigger| match trigger.call {
            1 => format!("{trigger}: there was no such call"),
            call => format!("{trigger}: there were not {call} such calls"),
        };
        let texts: Vec<_> = unfired.map(text).collect();
        texts.into_iter().for_each(|text| self.note(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trigger(action: Action, sites: &[usize]) -> Trigger {
        let (text, sites) = ("x".to_owned(), sites.to_vec());
        Trigger { action, text, sites, condition: None, call: 1, fired: false }
    }

    // A trigger behind the records of its site starts to trace one call late; a tracer that is lost at a
    // trigger's site has a hole there.
    #[test]
    fn triggers_come_before_what_else_a_site_does() {
        let mut tracing = Tracing::of(vec![2, 5, 7], Overflow::Drop);
        tracing.triggers = vec![trigger(Action::Start, &[5, 6]), trigger(Action::End, &[5])];
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
}
