//! Tracepoints of modules: traced from before their code runs until the guest looks whether they are
//! still in use.

use super::apply::Wanted;
use super::controller::{Controller, Stage};
use super::events::{add_events, module_events};
use super::module_types::{Linked, module_types};
use super::plan::Plan;
use super::vm::Vm;
use super::{TracedEvent, Tracing};
use crate::kernel::tracepoints::{Hooks, ModuleTracepoint, ModuleTracepoints, Uses};
use crate::tracer::{Attachment, Guest, Image};
use std::sync::Arc;

/// Places of modules in all: whoever loads others for ever must not fill our memory.
const MOST_USES: usize = 1 << 20;

/// What is said when events cannot be held in a module that has come, or not all of them: which of them
/// are of instructions that switch something.
fn untraced(switches: impl Iterator<Item = bool> + Clone) -> &'static str {
    match (switches.clone().any(|is_one| is_one), { switches }.all(|is_one| is_one)) {
        (true, true) => "where modules switch interrupts and preemption is not (all) recorded",
        (true, false) => {
            "events of modules, and where these switch interrupts and preemption, are not (all) recorded"
        }
        (false, _) => "events of modules are not (all) traced",
    }
}

/// What is known of a module.
#[derive(Debug, Default)]
pub(super) struct ModulePoints {
    name: Arc<str>,
    own: Vec<ModuleTracepoint>,
    /// Empty when it is about to go.
    uses: Uses,
}

impl Controller {
    /// What calls a tracepoint, with the code of modules that comes by it.
    pub(super) fn with_modules(&self, hooks: &Hooks) -> Hooks {
        let mut hooks = hooks.clone();
        for module in self.module_points.values() {
            hooks.add(&module.uses);
        }
        hooks
    }

    /// A module is ready, whose `struct module` is at this run-time address: traces those of its
    /// events that are asked for, if tracing has `begun`, and others where it comes by them. How many
    /// events of its own, and how many places that switch interrupts or preemption. All vCPUs are
    /// paused.
    pub(super) fn module_events_ready(
        &mut self,
        machine: &dyn Vm,
        attachment: &mut Attachment,
        (address, name): (u64, &Arc<str>),
        begun: bool,
    ) -> (usize, usize) {
        self.module_events_gone(machine, attachment, address, begun);
        self.forget_module_events(address);
        let ram = machine.ram();
        let before = attachment.held_switches();
        let switches = self.look_for_module_switches(ram, attachment, false) > 0;
        let (count, uses) = self.add_events_of_module(ram, attachment, (address, name));
        if (count > 0 || uses || switches) && begun && !self.held_back {
            self.hold_events(ram, attachment);
        }
        (count, attachment.held_switches().saturating_sub(before))
    }

    /// Adds those of its events that are asked for to those that are traced: how many, and whether it
    /// comes by any that is traced.
    fn add_events_of_module(
        &mut self,
        ram: &dyn Guest,
        attachment: &Attachment,
        (address, name): (u64, &Arc<str>),
    ) -> (usize, bool) {
        let is_known =
            attachment.watches_tracepoints() && self.learn_module(ram, attachment, (address, name));
        if !is_known {
            return (0, false);
        }
        let (found, notes) = self.events_of_module(ram, attachment.image(), address, None);
        notes.into_iter().for_each(|note| self.note_once(note));
        let count = found.len();
        let left_out = add_events(&mut self.tracing.events, found);
        left_out.into_iter().for_each(|note| self.note_once(note));
        let uses = self.module_points.get(&address).is_some_and(|module| {
            let mut hooks = self.tracing.events.iter().filter_map(TracedEvent::hooks);
            hooks.any(|hooks| hooks.is_used_in(&module.uses))
        });
        (count, uses)
    }

    /// A module is about to go, or gone: no event of it is traced, and no code of it changed, any
    /// more, if tracing has `begun`. All vCPUs are paused.
    pub(super) fn module_events_gone(
        &mut self,
        machine: &dyn Vm,
        attachment: &mut Attachment,
        address: u64,
        begun: bool,
    ) {
        let Some(module) = self.module_points.get_mut(&address) else { return };
        let (own, uses) = (std::mem::take(&mut module.own), std::mem::take(&mut module.uses));
        let is_own = |event: &TracedEvent| own.iter().any(|it| it.address == event.address);
        let before = self.tracing.events.len();
        self.tracing.events.retain(|event| !is_own(event));
        let mut hooks = self.tracing.events.iter().filter_map(TracedEvent::hooks);
        let used = hooks.any(|hooks| hooks.is_used_in(&uses));
        if (self.tracing.events.len() < before || used) && begun && !self.held_back {
            self.hold_events(machine.ram(), attachment);
        }
    }

    /// A module is about to go: nobody is to look into it any more.
    pub(super) fn leave_module_events(&mut self, address: u64) {
        if self.module_uses() < MOST_USES {
            self.module_points.entry(address).or_default();
        }
    }

    /// All modules are gone with their kernel, and no event of theirs is traced.
    pub(super) fn forget_events_of_modules(&mut self) {
        for module in std::mem::take(&mut self.module_points).into_values() {
            let is_own =
                |event: &TracedEvent| module.own.iter().any(|it| it.address == event.address);
            self.tracing.events.retain(|event| !is_own(event));
        }
    }

    /// Forgets a module.
    pub(super) fn forget_module_events(&mut self, address: u64) {
        self.module_points.remove(&address);
    }

    /// Reads what modules that are loaded have of tracepoints, where that is not known yet: nobody
    /// asked for events before.
    pub(super) fn learn_modules(&mut self, machine: &dyn Vm) {
        let stage = std::mem::replace(&mut self.stage, Stage::Off);
        if let Stage::Attached { attachment, .. } = &stage {
            let ram = machine.ram();
            for module in attachment.modules() {
                self.learn_module(ram, attachment, (module.address(), &module.name));
            }
        }
        self.stage = stage;
    }

    /// The events of modules that are loaded that a pattern means, and notes on those that are not
    /// traced.
    pub(super) fn events_of_modules(
        &self,
        machine: &dyn Vm,
        pattern: &str,
    ) -> (Vec<TracedEvent>, Vec<String>) {
        let Stage::Attached { attachment, .. } = &self.stage else { return Default::default() };
        let (ram, image) = (machine.ram(), attachment.image());
        let each = self.module_points.keys();
        let each = each.map(|&at| self.events_of_module(ram, image, at, Some(pattern)));
        let (found, notes): (Vec<_>, Vec<_>) = each.unzip();
        (found.into_iter().flatten().collect(), notes.into_iter().flatten().collect())
    }

    /// The same of one module: those that a pattern means, or any that was asked for.
    fn events_of_module(
        &self,
        ram: &dyn Guest,
        image: &Image,
        address: u64,
        pattern: Option<&str>,
    ) -> (Vec<TracedEvent>, Vec<String>) {
        let Some(module) = self.module_points.get(&address) else { return Default::default() };
        let wanted = |event: &str| match pattern {
            Some(pattern) => super::events::is_meant_in(pattern, event, Some(&module.name)),
            None => self.tracing.patterns.want(event, &module.name),
        };
        let types = || module_types(&self.kernel, ram, image, address);
        module_events(&self.kernel, &module.name, (&module.own, &module.uses), wanted, types)
    }

    /// Reads what a module has; whether it is known now.
    fn learn_module(
        &mut self,
        ram: &dyn Guest,
        attachment: &Attachment,
        (address, name): (u64, &Arc<str>),
    ) -> bool {
        if self.module_points.contains_key(&address) {
            return true;
        }
        if !attachment.watches_module_tracepoints() {
            self.note_once("events of modules are not traced: how they go is not known".into());
            return false;
        }
        let image = attachment.image();
        let memory = Linked { guest: ram, image };
        match self.kernel.module_tracepoints(&memory, address.wrapping_sub(image.slide)) {
            Ok(found) if self.module_uses() + found.uses.len() > MOST_USES => {
                self.note_once("events of more modules are not traced: they are too many".into());
                false
            }
            Ok(ModuleTracepoints { own, uses }) => {
                let name = Arc::clone(name);
                self.module_points.insert(address, ModulePoints { name, own, uses });
                true
            }
            Err(error) => {
                self.note_once(format!("events of module {name} are not traced: {error}"));
                false
            }
        }
    }

    fn module_uses(&self) -> usize {
        // An entry without any takes room, too.
        self.module_points.values().map(|module| module.uses.len() + 16).sum()
    }

    /// Lets the tracepoints of the events that are traced, and what switches interrupts and preemption,
    /// call their programs, and no others.
    fn hold_events(&mut self, ram: &dyn Guest, attachment: &mut Attachment) {
        self.plan = None;
        let events = self.tracing.events.clone();
        let (events_if, overflow) = (self.tracing.events_if.clone(), self.tracing.overflow);
        let context = self.tracing.context;
        let only = Tracing { events, events_if, context, ..Tracing::of(Vec::new(), overflow) };
        let are_switches = || self.tracing.events.iter().map(|event| event.switch().is_some());
        let Wanted { events, switches, stubless, .. } =
            match self.prepare(ram, attachment, &Plan::of(&only, &[])) {
                Ok(wanted) => wanted,
                Err(error) => {
                    self.note_once(format!("{}: {error}", untraced(are_switches())));
                    return;
                }
            };
        match self.change_switches(ram, attachment, &switches) {
            Ok(skipped) => self.switches_skipped(attachment, &skipped, &stubless),
            Err(error) => self.note_once(format!("{}: {error}", untraced([true].into_iter()))),
        }
        match attachment.hold_tracepoints(ram, events) {
            Ok(skipped) => self.tracepoints_skipped(&skipped),
            Err(error) => self.note_once(format!("{}: {error}", untraced([false].into_iter()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Who measures times off looks for them, not for events of modules.
    #[test]
    fn what_is_not_traced_is_named() {
        let text = |switches: &[bool]| untraced(switches.iter().copied());
        assert!(text(&[true, true]).starts_with("where modules switch"));
        assert!(text(&[false]).starts_with("events of modules are"));
        assert!(text(&[]).starts_with("events of modules are"));
        let both = text(&[false, true]);
        assert!(both.contains("events of modules, and where these switch"), "{both}");
    }
}
