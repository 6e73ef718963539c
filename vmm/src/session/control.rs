//! Commands to a running trace. Each change of what is traced is one pause of the guest,
//! whose time is in the stream as a mark.

use super::attach::{Controller, Stage, nanoseconds};
use super::mark;
use crate::machine::Machine;
use crate::serve::{Answer, Control, Globs};
use crate::stream::{Exit, MarkKind};
use crate::tracer::Ram;
use std::time::Duration;

impl Controller {
    /// Does what a command says.
    ///
    /// # Errors
    /// Why it cannot be done; nothing has changed then, or a note says what.
    pub(super) fn control(&mut self, machine: &Machine, command: Control) -> Answer {
        if self.ended && command != Control::Status {
            return Err("the trace has ended".into());
        }
        match command {
            Control::Status => Ok(self.status(machine)),
            Control::Filter(globs) => self.filter(machine, &globs),
            Control::Pause if self.held_back => Err("tracing is paused already".into()),
            Control::Pause => {
                self.held_back = true;
                self.retarget(machine, MarkKind::Pause, "tracing paused")
            }
            Control::Resume if !self.held_back => Err("tracing is not paused".into()),
            Control::Resume => {
                self.held_back = false;
                self.retarget(machine, MarkKind::Resume, "tracing resumed")
            }
            Control::Stop => {
                self.detach(machine);
                self.end(machine, Exit::Stopped).map_err(|error| error.to_string())?;
                Ok("the trace has ended".into())
            }
            Control::Clear => {
                let relay = self.relay.as_ref().ok_or("tracing has not begun")?;
                let count = relay.clear().ok_or("the relay has failed")?;
                let text = format!("{count} records forgotten");
                self.mark(machine, MarkKind::Note, Duration::ZERO, text.clone());
                Ok(text)
            }
            Control::Mark { ticks, text } => self.agent_mark(machine, ticks, text),
        }
    }

    /// A mark of the agent or of a user.
    fn agent_mark(&mut self, machine: &Machine, ticks: Option<u64>, text: String) -> Answer {
        let relay = self.relay.as_ref().ok_or("tracing has not begun")?;
        match ticks {
            None => self.mark(machine, MarkKind::Agent, Duration::ZERO, text),
            Some(ticks) => {
                // The guest's word for when, but not for a time to come: consumers would
                // wait for it.
                let ticks = ticks.min(relay.now());
                relay.mark(mark(ticks, MarkKind::Agent, Duration::ZERO, text));
            }
        }
        Ok(String::new())
    }

    fn filter(&mut self, machine: &Machine, globs: &Globs) -> Answer {
        let selection = self.kernel.select_with_report(&globs.filter, &globs.notrace);
        if selection.sites.is_empty() {
            return Err(format!(
                "no function that can be traced matches {}: see vmtrace functions",
                if globs.is_empty() { "it".to_owned() } else { globs.to_string() }
            ));
        }
        // What the others have beside it stays theirs.
        match self.tracing.tracers.first_mut() {
            Some(first) => *first = selection.sites,
            None => self.tracing.tracers.push(selection.sites),
        }
        self.summary.sites.matched = self.tracing.sites().len() as u64;
        let text = if globs.is_empty() { "all functions".to_owned() } else { globs.to_string() };
        let mut done = self.retarget(machine, MarkKind::Filter, &text)?;
        for glob in selection.unmatched.iter().chain(&selection.unmatched_notrace) {
            done.push_str(&format!("; no function matches {glob:?}"));
        }
        Ok(done)
    }

    /// Makes the sites that are ours those that should be.
    fn retarget(&mut self, machine: &Machine, kind: MarkKind, what: &str) -> Answer {
        let stage = std::mem::replace(&mut self.stage, Stage::Off);
        let Stage::Attached { mut attachment, from: None, init } = stage else {
            // Not yet attached, or waiting for --from: it will be as it is to be then.
            self.stage = stage;
            return Ok(format!("{what}, from when tracing begins"));
        };
        let (leave, take) = match self.held_back {
            true => (attachment.sites().map(|(site, _)| site).collect(), Vec::new()),
            false => self.tracing.changes(attachment.sites()),
        };
        if let Some(relay) = &self.relay {
            relay.functions(take.iter().map(|&(site, _)| site).collect());
        }
        let paused = match machine.pause() {
            Ok(paused) => paused,
            Err(error) => {
                self.stage = Stage::Attached { attachment, from: None, init };
                return Err(error.to_string());
            }
        };
        let ram = Ram(machine.memory());
        let changed = attachment
            .disable(&ram, &leave)
            .and_then(|_| attachment.enable_for(&ram, &self.kernel, &take));
        let count = attachment.held();
        self.count(&attachment);
        self.stage = Stage::Attached { attachment, from: None, init };
        let text = format!("{what}: {count} sites");
        let text = match &changed {
            Ok(report) => {
                self.summary.patch_ns += nanoseconds(report.patch_time);
                self.summary.sites.skipped = self.skipped(&report.skipped);
                text
            }
            Err(error) => format!("{text}, after an error: {error}"),
        };
        self.account(paused, kind, text.clone());
        match changed {
            Ok(_) => Ok(text),
            Err(_) => {
                self.note(text.clone());
                Err(text)
            }
        }
    }

    /// One JSON object.
    fn status(&self, machine: &Machine) -> String {
        let state = match &self.stage {
            _ if self.ended => "ended",
            Stage::Unknown | Stage::Located { .. } => "booting",
            Stage::Attached { from: Some(_), .. } => "waiting",
            Stage::Attached { .. } if self.held_back => "paused",
            Stage::Attached { .. } => "tracing",
            Stage::Off => "off",
        };
        let status = self.relay.as_ref().and_then(crate::relay::Relay::status);
        let (vcpus, consumers) = status.map_or_else(
            || (self.summary.vcpus.clone(), 0),
            |status| (status.vcpus, status.consumers),
        );
        let sites = &self.summary.sites;
        serde_json::json!({
            "state": state,
            "release": self.kernel.release(),
            "vcpus": machine.vcpus(),
            "sites": {
                "matched": sites.matched,
                "patched": sites.patched,
                "skipped": sites.skipped.iter().map(|skipped| skipped.count).sum::<u64>(),
            },
            "records": vcpus.iter().map(|vcpu| vcpu.records).collect::<Vec<_>>(),
            "lost": vcpus.iter().map(|vcpu| vcpu.lost).collect::<Vec<_>>(),
            "consumers": consumers,
            "pauses": {
                "count": self.summary.pauses.count,
                "total_ns": self.summary.pauses.total_ns,
                "max_ns": self.summary.pauses.max_ns,
            },
            "notes": self.summary.notes,
        })
        .to_string()
    }
}
