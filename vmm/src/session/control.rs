//! Commands to a running trace. Each change of what is traced is one pause of the guest,
//! whose time is in the stream as a mark.

use super::conditions::conditional_of;
use super::controller::{Controller, Stage, ticks_now};
use super::histograms::histogram_of;
use super::limits::Limits;
use super::plan::Plan;
use super::values::values_of;
use super::vm::Vm;
use super::{Doing, Tracer, Tracing, Use, Wants, mark};
use crate::condition::Condition;
use crate::kernel::Selection;
use crate::relay::nanoseconds;
use crate::serve::{Answer, Control, ControlRequest, Globs, HistogramSpec, TracerSpec};
use crate::stream::MarkKind;
use crate::tracer::Keeper;
use std::collections::BTreeMap;
use std::time::Duration;

/// Names of functions that an answer shows.
const EXAMPLES: usize = 3;

impl Controller {
    /// Does what a command says, and answers: why it cannot be done (nothing has changed then, or a
    /// note says what), or what was done.
    pub(super) fn control(&mut self, machine: &dyn Vm, request: ControlRequest) {
        let ControlRequest { command, reply } = request;
        match command {
            Control::Stop => self.stop(machine, reply),
            // Who looks at the stream answers when it has seen what there is.
            Control::LatencyShow { json } if !self.end.has_begun() => {
                self.show_latency(json, reply);
            }
            Control::LatencyStop { json } if !self.end.has_begun() => {
                self.stop_latency(machine, json, reply);
            }
            command => reply.send(self.obey(machine, command)),
        }
    }

    fn obey(&mut self, machine: &dyn Vm, command: Control) -> Answer {
        if self.end.has_begun() && command != Control::Status {
            return Err("the trace has ended".into());
        }
        let wants_tracing = matches!(
            command,
            Control::Filter(_)
                | Control::TracerAdd(_)
                | Control::EventAdd(_)
                | Control::TriggerAdd { .. }
                | Control::LatencyStart { .. }
                | Control::Pause
                | Control::Resume
        );
        if wants_tracing && matches!(self.stage, Stage::Off) {
            return Err("the guest is not traced (any more): see ctl status".into());
        }
        match command {
            Control::Status => Ok(self.status(machine)),
            Control::Filter(globs) => self.filter(machine, &globs),
            Control::TracerAdd(spec) => self.add_tracer(machine, &spec),
            Control::TracerRemove(name) => self.remove_tracer(machine, &name),
            Control::TracerList => Ok(self.list_tracers()),
            Control::EventAdd(glob) => self.add_events(machine, &glob),
            Control::EventRemove(glob) => self.remove_events(machine, &glob),
            Control::EventList => Ok(self.list_events()),
            Control::TriggerAdd { action, spec } => self.add_trigger(machine, action, &spec),
            Control::TriggerRemove(id) => self.remove_trigger(machine, id),
            Control::TriggerList => Ok(self.list_triggers()),
            Control::LatencyStart { kind, over } => self.start_latency(machine, kind, over),
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
            Control::Table => Ok(self.counted()),
            Control::Clear => {
                let relay = self.relay.as_ref().ok_or("tracing has not begun")?;
                let count = relay.clear().ok_or("the relay has failed")?;
                let text = match self.forget_counted() {
                    0 => format!("{count} records forgotten"),
                    calls => format!("{count} records and {calls} counted calls forgotten"),
                };
                self.mark(machine, MarkKind::Note, Duration::ZERO, text.clone());
                Ok(text)
            }
            Control::Snapshot => self.snapshot(machine),
            Control::Mark { ticks, text } => self.add_mark(machine, ticks, text),
            // Answered later.
            Control::LatencyShow { .. } | Control::LatencyStop { .. } | Control::Stop => {
                Err("the trace is about to end".into())
            }
        }
    }

    /// A mark of the agent, which says when, or of a user.
    fn add_mark(&mut self, machine: &dyn Vm, ticks: Option<u64>, text: String) -> Answer {
        let relay = self.relay.as_ref().ok_or("tracing has not begun")?;
        let (ticks, kind) = match ticks {
            // The guest's word for when, but not for a time to come: consumers would wait for it.
            Some(ticks) => (ticks.min(relay.now()), MarkKind::Agent),
            None => (ticks_now(machine), MarkKind::User),
        };
        if relay.try_mark(mark(ticks, kind, Duration::ZERO, text)) {
            Ok(String::new())
        } else {
            Err("too many marks at once: this one is lost".into())
        }
    }

    fn filter(&mut self, machine: &dyn Vm, globs: &Globs) -> Answer {
        let selection = self.select(&globs.filter, &globs.notrace);
        let waits = self.waits(&globs.filter)?;
        let meant = Tracer { globs: globs.clone(), ..Tracer::default() };
        if selection.sites.is_empty() && !meant.names_modules() {
            return Err(self.no_match(&globs.to_string(), &selection));
        }
        let text = if globs.is_empty() { "all functions".to_owned() } else { globs.to_string() };
        // The first one's; the others keep theirs.
        let before = self.tracing.tracers.clone();
        let name = match before.first() {
            Some(Some(first)) => first.name.clone(),
            _ => Tracing::default_name(0),
        };
        let wants = before.first().and_then(Option::as_ref);
        let graph = wants.is_some_and(|first| first.graph);
        let counts = wants.is_some_and(|first| first.counts);
        let by_caller = wants.is_some_and(|first| first.by_caller);
        let mut limits = wants.map(|first| first.limits.clone()).unwrap_or_default();
        if let Some(roots) = &mut limits.roots {
            roots.globs.notrace.clone_from(&globs.notrace);
            let selection = self.select(&roots.globs.filter, &roots.globs.notrace);
            let meant = Tracer { globs: roots.globs.clone(), ..Tracer::default() };
            if selection.sites.is_empty() && !meant.names_modules() {
                return Err(format!(
                    "nothing would be recorded: -n leaves out all roots ({}): name fewer functions",
                    roots.globs.filter.join(",")
                ));
            }
            roots.sites = selection.sites;
        }
        let condition = wants.and_then(|first| first.condition.as_ref());
        let used = match condition {
            Some(condition) if condition.is_of_ends() => Use::Ends,
            _ if graph => Use::Calls,
            _ => Use::Entries,
        };
        let condition = condition.map(|condition| condition.source.clone());
        let wants = wants.map(|first| first.wants.clone()).unwrap_or_default();
        let (mut sites, left_out) = self.prepared(limits.with_roots(selection.sites), graph)?;
        let known = self.known_for(machine, &sites, condition.as_ref(), None, &wants);
        let wanted = wants.of_these(&self.kernel, &known, &sites);
        let (condition, more) =
            conditional_of(&self.kernel, &known, &mut sites, condition.as_ref(), used)
                .map_err(|error| error.to_string())?;
        let (values, mut notes) =
            values_of(&self.kernel, &known, &sites, &wanted).map_err(|error| error.to_string())?;
        notes.extend(more);
        let globs = limits.globs(globs);
        if limits.is_limited() {
            limits.learn_anew(&self.known(machine, &sites), &sites);
        }
        let text = match &condition {
            Some(condition) => format!("{text}{limits} if {}", condition.source),
            None => format!("{text}{limits}"),
        };
        let first = Tracer {
            name,
            text: text.clone(),
            globs,
            sites,
            graph,
            counts,
            by_caller,
            histogram: None,
            wants,
            values,
            condition,
            limits,
        };
        match self.tracing.tracers.first_mut() {
            Some(slot) => *slot = Some(first),
            None => self.tracing.tracers.push(Some(first)),
        }
        self.check_records(&before)?;
        let mut done = self.retarget_or(machine, MarkKind::Filter, &text, before)?;
        done.push_str(&waits);
        notes.iter().for_each(|note| done.push_str(&format!("; {note}")));
        self.tell_left_out(&mut done, &text, left_out);
        self.tell_unmatched(&mut done, [&selection.unmatched, &selection.unmatched_notrace]);
        Ok(done)
    }

    /// Says which patterns match no function, beside others that do.
    fn tell_unmatched(&self, done: &mut String, patterns: [&[String]; 2]) {
        for glob in patterns.into_iter().flatten() {
            let near = self.kernel.near_functions(glob);
            done.push_str(&format!("; no function matches {glob:?}{near}"));
        }
    }

    /// What to say when nothing can be traced of what was asked for.
    fn no_match(&self, asked: &str, selection: &Selection) -> String {
        let asked = if asked.is_empty() { "it" } else { asked };
        let near = selection.unmatched.iter().map(|glob| self.kernel.near_functions(glob));
        let near = near.collect::<String>();
        let next = if near.is_empty() { ": see vmtrace functions" } else { &near };
        format!("no function that can be traced matches {asked}{next}")
    }

    fn add_tracer(&mut self, machine: &dyn Vm, spec: &TracerSpec) -> Answer {
        let selection = self.select(&spec.filter, &spec.notrace);
        let waits = self.waits(&spec.filter)?;
        let globs = Globs { filter: spec.filter.clone(), notrace: spec.notrace.clone() };
        let meant = Tracer { globs: globs.clone(), ..Tracer::default() };
        if selection.sites.is_empty() && !meant.names_modules() {
            return Err(self.no_match(&spec.to_string(), &selection));
        }
        let before = self.tracing.tracers.clone();
        let sites = selection.sites;
        let mut wants = Wants::from(spec.actions);
        wants.results |= spec.condition.as_ref().is_some_and(Condition::tells_value);
        let (asked, sorts) = (spec.condition.as_ref(), spec.histogram.as_ref());
        let doing = Doing {
            graph: spec.actions.graph,
            results: spec.actions.retval,
            parameters: spec.actions.args,
            counts: spec.actions.counts() || sorts.is_some(),
        };
        let used = Use::of(asked, doing).map_err(|error| error.to_string())?;
        let sorts_ends = sorts.is_some_and(|sorts| !matches!(sorts, HistogramSpec::Argument(_)));
        let graph = used.returns() || sorts_ends;
        if graph {
            self.kernel.exits().map_err(|error| error.to_string())?;
            self.look_for_module_exits(machine);
        }
        let (mut sites, left_out) = self.prepared(sites, graph)?;
        let known = self.known_for(machine, &sites, asked, sorts, &wants);
        let (histogram, sorted) =
            histogram_of(&known, &mut sites, sorts).map_err(|error| error.to_string())?;
        let (condition, more) = conditional_of(&self.kernel, &known, &mut sites, asked, used)
            .map_err(|error| error.to_string())?;
        self.tracing.check_followed(asked)?;
        let (values, mut notes) =
            values_of(&self.kernel, &known, &sites, &wants).map_err(|error| error.to_string())?;
        notes.extend(sorted);
        notes.extend(more);
        let (name, text, own) = (String::new(), spec.to_string(), sites.len());
        let tracer = Tracer {
            name,
            text,
            globs,
            sites,
            graph,
            counts: spec.actions.counts(),
            by_caller: spec.actions.callers,
            histogram,
            wants,
            values,
            condition,
            limits: Limits::default(),
        };
        let Some(number) = self.tracing.add(tracer) else {
            return Err(format!(
                "there are {} tracers, and there cannot be more",
                Tracing::MAX_TRACERS
            ));
        };
        let name = match &spec.name {
            Some(name) => name.clone(),
            None => Tracing::default_name(number.into()),
        };
        if self.tracing.find(&name).is_some() {
            self.tracing.tracers = before;
            return Err(format!(
                "there is a tracer {name} already: choose another name, or remove it first"
            ));
        }
        if let Some(Some(tracer)) = self.tracing.tracers.get_mut(usize::from(number)) {
            tracer.name.clone_from(&name);
        }
        self.check_records(&before)?;
        self.number_taken(number);
        let mut done = self.retarget_or(
            machine,
            MarkKind::Filter,
            &format!("tracer {name} added ({spec}), {own} functions"),
            before,
        )?;
        done.push_str(&waits);
        notes.iter().for_each(|note| done.push_str(&format!("; {note}")));
        self.tell_left_out(&mut done, &spec.to_string(), left_out);
        self.tell_unmatched(&mut done, [&selection.unmatched, &selection.unmatched_notrace]);
        Ok(done)
    }

    /// Whether every record has room for what its tracers want; else they are those of before.
    fn check_records(&mut self, before: &[Option<Tracer>]) -> Result<(), String> {
        Plan::of(&self.tracing, &[]).check().map_err(|(site, error)| {
            self.tracing.tracers = before.to_vec();
            format!("{}: {error}", self.name(site))
        })
    }

    /// The functions (sites) of a tracer without those whose returns it wants and cannot get in
    /// this run, and how many and which these are.
    ///
    /// # Errors
    /// When none is left.
    pub(super) fn prepared(
        &self,
        sites: Vec<usize>,
        graph: bool,
    ) -> Result<(Vec<usize>, Option<String>), String> {
        let Stage::Attached { attachment, .. } = &self.stage else { return Ok((sites, None)) };
        if !graph {
            return Ok((sites, None));
        }
        let (sites, left_out): (Vec<_>, Vec<_>) =
            sites.into_iter().partition(|&site| attachment.is_prepared(&self.kernel, site));
        let names: Vec<_> = left_out.iter().take(EXAMPLES).map(|&site| self.name(site)).collect();
        let which = format!("{} functions (such as {})", left_out.len(), names.join(", "));
        match (sites.is_empty(), left_out.is_empty()) {
            (_, true) => Ok((sites, None)),
            (false, false) => Ok((sites, Some(which))),
            (true, false) => Err(format!(
                "no returns of {which}: for guests of this architecture, functions whose returns \
                 may be asked for must be named at boot, or before their module is loaded; boot \
                 with --returns GLOB or --graph"
            )),
        }
    }

    pub(super) fn tell_left_out(
        &mut self,
        done: &mut String,
        what: &str,
        left_out: Option<String>,
    ) {
        let Some(left_out) = left_out else { return };
        let left_out = format!("left out: {left_out}, not named by --returns or --graph at boot");
        done.push_str("; ");
        done.push_str(&left_out);
        self.note_once(format!("{what}: {left_out}"));
    }

    fn remove_tracer(&mut self, machine: &dyn Vm, name: &str) -> Answer {
        let Some(number) = self.tracing.find(name) else {
            return Err(format!("there is no tracer {name}: see tracer list"));
        };
        let before = self.tracing.tracers.clone();
        let slot = self.tracing.tracers.get_mut(usize::from(number));
        if let Some(removed) = slot.and_then(Option::take) {
            self.gone.insert(number, (removed.name, removed.histogram));
        }
        let done =
            self.retarget_or(machine, MarkKind::Filter, &format!("tracer {name} removed"), before);
        if done.is_ok() {
            self.tell_untold(Keeper::Tracer(number), name, true);
        }
        if done.is_err() {
            self.gone.remove(&number);
        }
        done
    }

    /// One line: names with what each traces.
    fn list_tracers(&self) -> String {
        let list: Vec<_> = self
            .tracing
            .present()
            .map(|(_, tracer)| {
                format!("{}: {} ({} sites)", tracer.name, tracer.text, tracer.sites.len())
            })
            .collect();
        list.join("; ")
    }

    /// As [`Controller::retarget`]; when nothing could be changed, tracers are those of before.
    fn retarget_or(
        &mut self,
        machine: &dyn Vm,
        kind: MarkKind,
        what: &str,
        before: Vec<Option<Tracer>>,
    ) -> Answer {
        self.tracing_changed();
        let done = self.retarget(machine, kind, what);
        if done.is_err() {
            self.tracing.tracers = before;
            self.tracing_changed();
        }
        done
    }

    /// Makes the sites that are ours those that should be.
    pub(super) fn retarget(&mut self, machine: &dyn Vm, kind: MarkKind, what: &str) -> Answer {
        let stage = std::mem::replace(&mut self.stage, Stage::Off);
        let ram = machine.ram();
        // It will be as it is to be then.
        let later = format!("{what}, from when tracing begins");
        let mut attachment = match stage {
            Stage::Attached { attachment, from: None } => attachment,
            Stage::Attached { mut attachment, from } => {
                // All vCPUs are paused when the awaited call comes.
                self.look_for_module_switches(ram, &mut attachment, true);
                self.stage = Stage::Attached { attachment, from };
                return Ok(later);
            }
            stage => {
                let is_over = matches!(stage, Stage::Off);
                self.stage = stage;
                return Ok(if is_over { what.to_owned() } else { later });
            }
        };
        if self.tracing.wants_exits() {
            self.find_module_exits(ram, &mut attachment, None);
            self.tell_unseen(&attachment);
        }
        // A vCPU may stand at a trigger meanwhile.
        let again = kind == MarkKind::Filter;
        self.look_for_module_switches(ram, &mut attachment, again);
        self.look_at_fixed_calls(ram, &attachment);
        let plan = self.planned_now(&attachment);
        // The guest still runs: what cannot be is found out before anything is touched.
        let paused = self.prepare(ram, &mut attachment, &plan).map_err(|error| error.to_string());
        let paused = paused
            .and_then(|wanted| Ok((machine.pause().map_err(|error| error.to_string())?, wanted)));
        let (paused, wanted) = match paused {
            Ok(both) => both,
            Err(error) => {
                self.stage = Stage::Attached { attachment, from: None };
                return Err(error);
            }
        };
        // Who goes on with the same functions has seen all ends: its open calls stay.
        let keepers = plan.keepers();
        let begin =
            keepers.iter().filter(|(number, sites)| self.keepers.get(number) != Some(sites));
        attachment
            .counters()
            .begin_calls(begin.map(|(number, _)| *number), paused.tsc(0).unwrap_or(0));
        let changed = self.change(ram, &mut attachment, &wanted);
        self.keepers = if changed.is_ok() { keepers } else { BTreeMap::new() };
        let (count, switches) = (attachment.held(), attachment.held_switches());
        self.stage = Stage::Attached { attachment, from: None };
        let mut text = match wanted.events.len() {
            0 => format!("{what}: {count} sites"),
            events => format!("{what}: {count} sites, {events} events"),
        };
        if switches > 0 {
            text.push_str(&format!(", {switches} switches of interrupts and preemption"));
        }
        let text = match &changed {
            Ok(report) => {
                self.summary.patch_ns += nanoseconds(report.patch_time);
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
    fn status(&self, machine: &dyn Vm) -> String {
        let state = match &self.stage {
            _ if self.end.has_begun() => "ended",
            Stage::Unknown | Stage::Located { .. } | Stage::Testing(_) => "booting",
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
        let shared = self.shared();
        serde_json::json!({
            "state": state,
            "release": self.kernel.release(),
            "vcpus": machine.vcpus(),
            "sites": {
                "matched": sites.matched,
                "patched": sites.patched,
                "direct": sites.direct,
                "combined": sites.combined,
                "exits": match &self.stage {
                    Stage::Attached { attachment, .. } => attachment.held_exits(),
                    _ => 0,
                },
                "switches": match &self.stage {
                    Stage::Attached { attachment, .. } => attachment.held_switches(),
                    _ => 0,
                },
                "skipped": sites.skipped.iter().map(|skipped| skipped.count).sum::<u64>(),
                "shared": shared.values().sum::<usize>(),
                "shared_with": shared,
                "guest_updates": sites.guest_updates,
            },
            "tracers": self.tracing.present().map(|(number, tracer)| serde_json::json!({
                "name": tracer.name,
                "functions": tracer.text,
                "sites": sites.tracers.get(usize::from(number)).copied().unwrap_or(sites.patched),
            })).collect::<Vec<_>>(),
            "triggers": self.tracing.triggers.iter().map(|trigger| serde_json::json!({
                "id": trigger.id,
                "at": trigger.to_string(),
                "waits_for": match trigger.fired {
                    true => Vec::new(),
                    false => self.waited_for(&trigger.globs.filter),
                },
                "fired": trigger.fired,
            })).collect::<Vec<_>>(),
            "records": vcpus.iter().map(|vcpu| vcpu.records).collect::<Vec<_>>(),
            "lost": vcpus.iter().map(|vcpu| vcpu.lost).collect::<Vec<_>>(),
            "modules": self.modules(),
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
