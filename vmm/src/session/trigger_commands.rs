//! Triggers that come and go while the guest runs, each change in one pause.

use super::controller::{Controller, Stage, ticks_now};
use super::tracing::Tracing;
use super::triggers::{Spot, Trigger};
use super::vm::Vm;
use super::{Use, Wants};
use crate::kernel::Selection;
use crate::serve::{Answer, TriggerAction, TriggerSpec};
use crate::stream::MarkKind;
use crate::tracer::Keeper;
use std::collections::VecDeque;
use vmtrace_trampolines::Overflow;

/// What new triggers are given.
pub(super) struct Numbers {
    /// What a user calls the next one.
    id: u32,
    /// Of stops that nobody has had yet.
    free: VecDeque<u16>,
    /// Those that were given back, the longest ago first. A task may still stand in a program that counts for the
    /// trigger that had one, and would count a call for the next.
    rests: VecDeque<u16>,
}

/// Stops that rest before one of them is given again: programs are for one of them, and never go away.
const RESTING: usize = 16;

impl Numbers {
    /// Others than these have.
    pub(super) fn beside(triggers: &[Trigger]) -> Self {
        let is_free = |number: &u16| triggers.iter().all(|it| it.number != *number);
        let last = triggers.iter().map(|it| it.id).max().unwrap_or(0);
        let free = (0..Tracing::MAX_TRIGGERS).filter(is_free).collect();
        Self { id: last.saturating_add(1), free, rests: VecDeque::new() }
    }

    /// Those of another trigger, unless there are too many.
    fn take(&mut self) -> Option<(u32, u16)> {
        let rested = self.rests.len() > RESTING || self.free.is_empty();
        let from = if rested { &mut self.rests } else { &mut self.free };
        let number = from.pop_front()?;
        let id = self.id;
        self.id = id.saturating_add(1);
        Some((id, number))
    }

    fn give_back(&mut self, number: u16) {
        self.rests.push_back(number);
    }
}

impl Controller {
    /// Has something done once, at a call to come: those from this pause on are counted.
    pub(super) fn add_trigger(
        &mut self,
        machine: &dyn Vm,
        action: TriggerAction,
        spec: &TriggerSpec,
    ) -> Answer {
        if action == TriggerAction::Snapshot && self.tracing.overflow != Overflow::Overwrite {
            return Err("this trace is not a flight recorder, which a snapshot is of: boot with \
                        --overflow overwrite for one"
                .into());
        }
        let selection = self.select(&spec.filter, &spec.notrace);
        let (asked, wants) = (spec.condition.as_ref(), Wants::default());
        let returns = Use::of_trigger(asked).returns();
        if returns {
            self.kernel.exits().map_err(|error| error.to_string())?;
            self.look_for_module_exits(machine);
        }
        let (sites, left_out) = self.prepared(selection.sites, returns)?;
        let selection = Selection { sites, ..selection };
        let known = self.known_for(machine, &selection.sites, asked, None, &wants);
        let Spot { sites, globs, condition, notes } =
            Spot::of(&self.kernel, &known, spec, selection).map_err(|error| error.to_string())?;
        let waits = self.waits(&spec.filter)?;
        self.tracing.check_followed(spec.condition.as_ref())?;
        let Some((id, number)) = self.trigger_numbers.take() else {
            return Err(format!(
                "there are {} triggers, and there cannot be more: remove some, such as those that \
                 were done (see trigger list)",
                Tracing::MAX_TRIGGERS
            ));
        };
        // Beginnings that nobody waits for any more are older than what is asked for now: this may be used at once.
        let is_free = |kept: &u16| self.tracing.triggers.iter().all(|it| it.kept != *kept);
        let kept = (0..).find(is_free).unwrap_or(0);
        // Nobody counts there yet.
        if let Stage::Attached { attachment, .. } = &mut self.stage
            && let Err(error) = attachment.counters().count_down(number, spec.call)
        {
            self.trigger_numbers.give_back(number);
            return Err(error.to_string());
        }
        self.look_at_triggers();
        // Also where its functions come later.
        if returns && let Stage::Attached { attachment, .. } = &mut self.stage {
            attachment.counters().begin_calls([Keeper::Trigger(kept)], ticks_now(machine));
        }
        self.tracing.triggers.push(Trigger {
            id,
            action,
            text: spec.to_string(),
            sites,
            globs,
            condition,
            call: spec.call,
            left: spec.call,
            number,
            kept,
            command: None,
            live: true,
            fired: false,
        });
        self.tracing_changed();
        let what = format!("trigger {id} added ({action} at {spec})");
        let done = self.retarget(machine, MarkKind::Filter, &what);
        if done.is_err() {
            self.tracing.triggers.retain(|it| it.id != id);
            self.trigger_numbers.give_back(number);
            self.tracing_changed();
        }
        let mut done = done?;
        done.push_str(&waits);
        notes.iter().for_each(|note| done.push_str(&format!("; {note}")));
        self.tell_left_out(&mut done, &format!("trigger {action} at {spec}"), left_out);
        done.push_str(&self.not_held(id));
        if action == TriggerAction::Start && !self.held_back {
            done.push_str("; tracing goes on until then, since it is not paused");
        }
        Ok(done)
    }

    /// What to say when functions of a trigger cannot be held.
    fn not_held(&self, id: u32) -> String {
        let Stage::Attached { attachment, from: None } = &self.stage else {
            return String::new();
        };
        let Some(trigger) = self.tracing.triggers.iter().find(|it| it.id == id) else {
            return String::new();
        };
        let sorted = |mut sites: Vec<usize>| {
            sites.sort_unstable();
            sites
        };
        let held = sorted(attachment.sites().map(|(site, _)| site).collect());
        let exits = attachment.exits().filter_map(|(exit, _)| self.site_of_exit(exit));
        let left = sorted(exits.collect());
        let is_held = |site: &&usize| {
            let [enters, leaves] = [&held, &left].map(|all| all.binary_search(site).is_ok());
            match trigger.ends() {
                None => enters,
                // No exit is held before the kernel has patched its alternatives.
                Some(_) if !attachment.is_settled() => true,
                Some(ends) => {
                    let begins = ends.ends(**site).is_some_and(|it| it.entry.is_some());
                    leaves && (enters || !begins)
                }
            }
        };
        match trigger.sites.len() - trigger.sites.iter().filter(is_held).count() {
            0 => String::new(),
            count => format!(
                "; calls of {count} of its {} functions are not seen (see ctl status for what is \
                 skipped, and why)",
                trigger.sites.len()
            ),
        }
    }

    /// Forgets a trigger, and gives back what was held for it alone.
    pub(super) fn remove_trigger(&mut self, machine: &dyn Vm, id: u32) -> Answer {
        let Some(at) = self.tracing.triggers.iter().position(|it| it.id == id) else {
            return Err(format!("there is no trigger {id}: see trigger list"));
        };
        self.look_at_triggers();
        let trigger = self.tracing.triggers.remove(at);
        self.tracing_changed();
        let what = format!("trigger {id} removed");
        let mut done = match self.retarget(machine, MarkKind::Filter, &what) {
            Ok(done) => done,
            Err(error) => {
                self.tracing.triggers.insert(at, trigger);
                self.tracing_changed();
                return Err(error);
            }
        };
        self.trigger_numbers.give_back(trigger.number);
        if trigger.ends().is_some() {
            self.tell_untold(trigger.keeper(), &trigger.to_string(), !trigger.fired);
        }
        let waited = trigger.action == TriggerAction::Start && !trigger.fired;
        if waited && self.held_back && !self.tracing.waits_for_start() {
            done.push_str("; tracing stays paused until ctl resume");
        }
        Ok(done)
    }

    /// One JSON object.
    pub(super) fn list_triggers(&mut self) -> String {
        self.look_at_triggers();
        let one = |it: &Trigger| {
            serde_json::json!({
                "id": it.id,
                "action": it.action.word(),
                "at": it.text,
                "functions": it.sites.len(),
                "waits_for": if it.fired { Vec::new() } else { self.waited_for(&it.globs.filter) },
                "left": if it.fired { 0 } else { it.left },
                "fired": it.fired,
            })
        };
        let all: Vec<_> = self.tracing.triggers.iter().map(one).collect();
        serde_json::json!({ "triggers": all }).to_string()
    }

    /// Looks how many calls are still to come.
    pub(super) fn look_at_triggers(&mut self) {
        let Stage::Attached { attachment, .. } = &mut self.stage else { return };
        for trigger in self.tracing.triggers.iter_mut().filter(|it| !it.fired) {
            if let Some(left) = attachment.counters().left(trigger.number) {
                trigger.left = left;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A stop that is given at once to the next trigger is counted down by who still stands in a program for the
    // last one; a number of a user's that comes again removes somebody else's.
    #[test]
    fn a_stop_rests_before_it_is_given_again() {
        let mut numbers = Numbers::beside(&[]);
        let all: Vec<_> = std::iter::from_fn(|| numbers.take()).collect();
        let expected: Vec<_> = (1..).zip(0..Tracing::MAX_TRIGGERS).collect();
        assert_eq!(all, expected);
        numbers.give_back(7);
        numbers.give_back(3);
        assert_eq!(numbers.take(), Some((257, 7)));
        numbers.give_back(7);
        assert_eq!((numbers.take(), numbers.take()), (Some((258, 3)), Some((259, 7))));
        assert_eq!(numbers.take(), None);
        // Programs are for few numbers, however often triggers come and go.
        let mut numbers = Numbers::beside(&[]);
        let mut given = std::collections::BTreeSet::new();
        for _ in 0..1000 {
            let (_, number) = numbers.take().unwrap();
            given.insert(number);
            numbers.give_back(number);
        }
        assert_eq!(given.len(), RESTING + 1);
    }
}
