//! Calls of triggers: what is done while a vCPU stands there, and how it goes on.

use super::arch;
use super::controller::{Controller, Stage};
use super::triggers::{Called, Trigger};
use super::vm::Vm;
use crate::deadline;
use crate::kernel::Functions;
use crate::relay::{SNAPSHOT_TIME, Snapshot};
use crate::serve::{Answer, Control, ControlRequest, Reply, TriggerAction};
use crate::stream::MarkKind;
use crate::tracer::{Attachment, Stopped};
use std::time::Duration;
use vmtrace_trampolines::Overflow;

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

    /// A program has stopped a vCPU at this address for a trigger, which is obeyed. Whether this was attended to.
    pub(super) fn triggered(
        &mut self,
        machine: &dyn Vm,
        vcpu: usize,
        address: u64,
        stopped: Stopped,
    ) -> bool {
        let Stage::Attached { attachment, .. } = &mut self.stage else { return false };
        // Who had this number before may be meant, in whose program a task has stood since: then not all calls of
        // the one that has it now have come.
        let is_done = attachment.counters().left(stopped.number) == Some(0);
        let of = |it: &Trigger| it.number == stopped.number && is_done;
        let index = self.tracing.triggers.iter().position(of);
        let told = machine.pause().and_then(|paused| paused.registers(vcpu));
        let site = match (told, index.and_then(|index| self.tracing.triggers.get(index))) {
            (Ok(registers), Some(trigger)) if stopped.at_end => {
                let (ram, told) = (machine.ram(), arch::told(&registers));
                attachment.exit_told(ram, &self.kernel, &trigger.sites, told).ok().flatten()
            }
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
        // Not of the calls that come behind this one.
        let ends = trigger.ends().is_some().then(|| (trigger.keeper(), trigger.to_string()));
        let text = format!("{trigger}: {function} on vCPU {vcpu}");
        log::debug!("{text}");
        if let Some((keeper, name)) = ends {
            self.tell_untold(keeper, &name, true);
        }
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
            for module in trigger.modules().filter(|module| !came(module)) {
                text.push_str(&format!("; module {module} was not loaded"));
            }
            text
        };
        let texts: Vec<_> = unfired.map(text).collect();
        texts.into_iter().for_each(|text| self.note(text));
    }
}
