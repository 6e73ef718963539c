//! Tracepoints beside the guest's own tracing.

use super::controller::{Controller, Stage};
use super::events::{TracedEvent, add_events, events};
use super::mark;
use super::tripwires::{Purpose, Tripwires};
use super::vm::{Paused, Vm};
use crate::analyze::latency::Kind;
use crate::kernel::glob;
use crate::kernel::preemptirq::{Switch, Switches};
use crate::machine::TRAP_INSTRUCTION;
use crate::serve::Answer;
use crate::stream::MarkKind;
use crate::tracer::{Attachment, Moment, PointSkip};
use clap::ValueEnum;
use std::time::Duration;

/// Names of events that a mark has, unless latencies are made of more.
const NAMED: usize = 20;

/// What a mark says of events that are traced: those that latencies are made of are all named.
fn told(held: &[String]) -> String {
    let is_needed = |name: &&String| {
        let mut all = Kind::value_variants().iter().flat_map(|kind| kind.events());
        all.any(|of| glob::matches(of.pattern, name))
    };
    let (needed, others): (Vec<_>, Vec<_>) = held.iter().partition(is_needed);
    let room = NAMED.saturating_sub(needed.len());
    let named: Vec<_> =
        needed.iter().chain(others.iter().take(room)).map(|it| it.as_str()).collect();
    match held.len() - named.len() {
        _ if held.is_empty() => "none".to_owned(),
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// Lets vCPUs stop at these traps of [`Attachment::watch_tracepoints`].
fn arm(tripwires: &mut Tripwires, paused: &Paused<'_>, attachment: &Attachment, traps: Vec<u64>) {
    tripwires.arm_all(paused, traps, |trap| {
        let told = attachment.tracepoint_moment(trap);
        told.map(|(moment, next)| Purpose::Tracepoints { moment, next })
    });
}

impl Controller {
    /// Lets tracepoints be held, if any are asked for: the guest is watched from then on, and not
    /// before.
    pub(super) fn watch_tracepoints(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        attachment: &mut Attachment,
    ) {
        if !self.tracing.has_tracepoints() || attachment.watches_tracepoints() {
            return;
        }
        let ram = machine.ram();
        match attachment.watch_tracepoints(ram, &self.kernel, &TRAP_INSTRUCTION) {
            Ok(traps) => arm(&mut self.tripwires, paused, attachment, traps),
            Err(error) => self.note(format!("events are not traced: {error}")),
        }
    }

    /// The guest begins or ends a change of its tracepoints. Whether this was attended to.
    pub(super) fn guest_changes_tracepoints(
        &mut self,
        machine: &dyn Vm,
        vcpu: usize,
        (moment, next): (Moment, u64),
    ) -> bool {
        let Stage::Attached { attachment, .. } = &mut self.stage else { return false };
        let paused = match machine.pause() {
            Ok(paused) => paused,
            Err(error) => {
                self.note(format!("a change of the guest's tracepoints was not seen: {error}"));
                return true;
            }
        };
        let ram = machine.ram();
        let mut skipped = Vec::new();
        let done = match moment {
            Moment::Begin => attachment.lend_tracepoints(ram),
            Moment::End => attachment.take_tracepoints_again(ram).map(|(count, left)| {
                skipped = left;
                (count, true)
            }),
        };
        let went_on = paused.set_rip(vcpu, next);
        let (count, failed) = match done {
            Ok((count, true)) => (count, went_on.err().map(|error| error.to_string())),
            Ok((count, false)) => {
                (count, Some("a tracepoint did not hold what was written to it".to_owned()))
            }
            Err(error) => (0, Some(error.to_string())),
        };
        let text = match moment {
            Moment::Begin => format!("the guest begins to change tracepoints: {count} not traced"),
            Moment::End => format!("the guest has changed tracepoints: {count} traced again"),
        };
        if count > 0 {
            self.count_pause(paused, MarkKind::Note, text);
        } else {
            // Nothing has changed for who reads the trace.
            log::debug!("{text}");
            drop(paused);
        }
        self.tracepoints_skipped(&skipped);
        if let Some(why) = failed {
            self.anomaly(machine, why);
        }
        true
    }

    /// Traces more events from now on.
    pub(super) fn add_events(&mut self, machine: &dyn Vm, glob: &str) -> Answer {
        let before = (self.tracing.events.clone(), self.tracing.patterns.clone());
        self.tracing.patterns.add(glob);
        let found = self.find_events(machine, glob);
        let (found, mut notes) = match found {
            Ok(found) => found,
            Err(error) => {
                self.tracing.patterns = before.1;
                return Err(error);
            }
        };
        let waits = found.is_empty();
        let addresses: Vec<u64> = found.iter().map(|event| event.address).collect();
        let left_out = add_events(&mut self.tracing.events, found);
        let kept = self.keep_for_others(&addresses);
        if self.tracing.events.len() == before.0.len() && !waits {
            if kept > 0 {
                return Ok(format!("event {glob} added: it was traced for a latency, and stays"));
            }
            return Err(left_out.unwrap_or_else(|| format!("{glob} is traced already")));
        }
        notes.extend(left_out);
        let mut done = self.watch_now(machine).and_then(|()| {
            self.tracing_changed();
            self.retarget(machine, MarkKind::Filter, &format!("event {glob} added"))
        });
        match &mut done {
            Ok(done) => notes.iter().for_each(|note| done.push_str(&format!("; {note}"))),
            Err(_) => {
                (self.tracing.events, self.tracing.patterns) = before;
                self.tracing_changed();
            }
        }
        done
    }

    /// The events that a pattern means, of the kernel and the modules that are loaded, and notes.
    fn find_events(
        &mut self,
        machine: &dyn Vm,
        glob: &str,
    ) -> Result<(Vec<TracedEvent>, Vec<String>), String> {
        let own = events(&self.kernel, glob);
        self.learn_modules(machine);
        let (found, notes) = self.events_of_modules(machine, glob);
        match own {
            // What it would wait for is there.
            Ok((own, _)) if own.is_empty() && !found.is_empty() => Ok((found, notes)),
            Ok((mut own, mut own_notes)) => {
                own.extend(found);
                own_notes.extend(notes);
                Ok((own, own_notes))
            }
            Err(_) if !found.is_empty() => Ok((found, notes)),
            Err(error) => Err(notes.into_iter().next().unwrap_or_else(|| error.to_string())),
        }
    }

    /// Traces these events no more.
    pub(super) fn remove_events(&mut self, machine: &dyn Vm, glob: &str) -> Answer {
        let mut meant = self.tracing.events.iter().filter(|event| event.is_meant_by(glob));
        if let Some(why) = meant.find_map(|event| self.needed_for_latency(&event.fields.name)) {
            return Err(why);
        }
        let before = (self.tracing.events.clone(), self.tracing.patterns.clone());
        self.tracing.events.retain(|event| !event.is_meant_by(glob));
        let waited = self.tracing.patterns.remove(glob);
        if self.tracing.events.len() == before.0.len() && !waited {
            self.tracing.patterns = before.1;
            return Err(format!("no event that is traced matches {glob}: see event list"));
        }
        self.tracing_changed();
        let done = self.retarget(machine, MarkKind::Filter, &format!("event {glob} removed"));
        if done.is_err() {
            (self.tracing.events, self.tracing.patterns) = before;
            self.tracing_changed();
        }
        done
    }

    /// One line: the names of all, and the patterns of those of modules.
    pub(super) fn list_events(&self) -> String {
        let names = self.tracing.events.iter().map(|event| event.fields.name.as_str());
        names.chain(self.tracing.patterns.of_modules()).collect::<Vec<_>>().join("; ")
    }

    /// Says in the stream which events are traced from this time on, if these are others than
    /// before: readers must not make anything of one before that and one behind it.
    pub(super) fn tell_events(&mut self, ticks: u64) {
        let Some(relay) = &self.relay else { return };
        if self.tracing.events.is_empty() && self.events_told.is_empty() {
            return;
        }
        let held = match &self.stage {
            Stage::Attached { attachment, .. } => self.held_events(attachment),
            _ => Vec::new(),
        };
        if held == self.events_told {
            return;
        }
        relay.mark(mark(ticks, MarkKind::Events, Duration::ZERO, told(&held)));
        self.events_told = held;
    }

    /// Names of the events that are told now.
    fn held_events(&self, attachment: &Attachment) -> Vec<String> {
        let mut switches: Vec<Switch> = Vec::new();
        // To find them takes its time, which is for those who trace them.
        if attachment.held_switches() > 0 {
            let all = self.kernel.switches().map(Switches::all).unwrap_or_default();
            let switch = |(site, _): (usize, u16)| all.get(site).map(|site| site.kind.switch());
            for switch in attachment.switches().filter_map(switch) {
                if !switches.contains(&switch) {
                    switches.push(switch);
                }
            }
        }
        let is_held = |event: &&TracedEvent| match (event.tracepoint(), event.switch()) {
            (Some(tracepoint), _) => attachment.holds_tracepoint(tracepoint),
            (None, switch) => switch.is_some_and(|switch| switches.contains(&switch)),
        };
        let events = self.tracing.events.iter().filter(is_held);
        events.map(|event| event.fields.name.clone()).collect()
    }

    /// Begins to watch a guest that runs.
    pub(super) fn watch_now(&mut self, machine: &dyn Vm) -> Result<(), String> {
        let Stage::Attached { attachment, .. } = &mut self.stage else { return Ok(()) };
        if !self.tracing.has_tracepoints() || attachment.watches_tracepoints() {
            return Ok(());
        }
        let paused = machine.pause().map_err(|error| error.to_string())?;
        let ram = machine.ram();
        let traps = attachment.watch_tracepoints(ram, &self.kernel, &TRAP_INSTRUCTION);
        let traps = traps.map_err(|error| error.to_string())?;
        arm(&mut self.tripwires, &paused, attachment, traps);
        Ok(())
    }

    /// Says which tracepoints are left alone.
    pub(super) fn tracepoints_skipped(&mut self, skipped: &[PointSkip]) {
        for skip in skipped {
            let events = &self.tracing.events;
            let event = events.iter().find(|event| event.tracepoint() == Some(skip.tracepoint));
            let name = event.map_or("a tracepoint", |event| &event.fields.name).to_owned();
            self.note(format!("{name} is not traced: {}", skip.reason));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A reader that does not find an event of a latency there takes it for one that was not traced.
    #[test]
    fn what_latencies_are_made_of_is_named_of_however_many_events() {
        let mut held: Vec<String> = (0..40).map(|n| format!("sched:other{n}")).collect();
        assert_eq!(told(&held[..2]), "sched:other0, sched:other1");
        assert_eq!(told(&[]), "none");
        held.push("irq:softirq_exit".into());
        held.push("sched:sched_switch".into());
        let text = told(&held);
        assert!(text.starts_with("irq:softirq_exit, sched:sched_switch, sched:other0, "), "{text}");
        assert!(text.ends_with(", sched:other17 and 22 more"), "{text}");
    }
}
