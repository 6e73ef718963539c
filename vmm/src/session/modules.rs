//! Modules of the guest's kernel: their functions are traced from before they are first called until
//! their memory is freed, if a filter wants them.

use super::apply::Wanted;
use super::controller::{Controller, Stage};
use super::plan::Plan;
use super::shares::Shares;
use super::triggers::Trigger;
use super::tripwires::Purpose;
use super::vm::{Paused, Vm};
use super::{Tracer, Tracing, arch};
use crate::kernel::{Exit, Functions, Missing, Selection, selects};
use crate::machine::TRAP_INSTRUCTION;
use crate::relay::nanoseconds;
use crate::serve::Globs;
use crate::stream::{MarkKind, Skipped};
use crate::tracer::{Attachment, Fresh, Guest, Module, ModuleFunction, ModuleMoment, TraceError};
use rustc_hash::FxHashSet;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Names of modules that are kept: more than a guest has that does not make them up.
const MOST_NAMES: usize = 4096;
/// Names that a note gives for a reason.
const EXAMPLES: usize = 3;

/// Whether functions of modules can be among those that patterns of a filter mean, for all that can
/// be told without them.
fn can_mean_modules(filter: &[String]) -> bool {
    filter.is_empty() || filter.iter().any(|pattern| pattern.contains(['*', '?', '[']))
}

/// See [`Fresh::words`].
fn words(paused: &Paused<'_>) -> Option<Vec<u64>> {
    let mut words = Vec::new();
    for vcpu in 0..paused.vcpus() {
        words.extend(arch::words(&paused.registers(vcpu).ok()?));
    }
    Some(words)
}

/// Whether a pattern means functions of modules and nothing else.
fn names_modules(pattern: &str) -> bool {
    Functions::of(pattern).module().is_some()
}

impl Tracer {
    /// Whether functions of modules are meant by name.
    #[must_use]
    pub fn names_modules(&self) -> bool {
        let roots = self.limits.roots.iter().flat_map(|roots| &roots.globs.filter);
        self.globs.filter.iter().chain(roots).any(|pattern| names_modules(pattern))
    }
}

/// Sites with the programs that they call.
type Programs = Vec<(usize, u16)>;

impl Controller {
    /// Lets the guest stop when modules come and go, if that can be.
    pub(super) fn watch_modules(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        attachment: &mut Attachment,
    ) {
        if self.kernel.symbols().address("do_init_module").is_none() {
            // It has no modules.
            return;
        }
        let ram = machine.ram();
        let why = match attachment.watch_modules(ram, &self.kernel, &TRAP_INSTRUCTION) {
            Ok(traps) => {
                self.came.get_or_insert_default();
                return self.tripwires.arm_all(paused, traps, |trap| {
                    let told = attachment.module_moment(trap);
                    told.map(|(moment, next)| Purpose::Module { moment, next })
                });
            }
            Err(why) => why,
        };
        let meant = |(_, tracer): (u8, &Tracer)| {
            tracer.names_modules() || can_mean_modules(&tracer.globs.filter)
        };
        let waits = self.tracing.triggers.iter().any(Trigger::names_modules);
        if self.tracing.events.iter().any(|event| event.switch().is_some()) {
            self.note(format!(
                "where modules switch interrupts and preemption is not recorded: {why}"
            ));
        }
        if waits || self.tracing.present().any(meant) {
            self.note(format!("functions of modules are not traced: {why}"));
        }
    }

    /// The functions that filters mean, those of modules that are loaded among them.
    pub(super) fn select(&self, filter: &[String], notrace: &[String]) -> Selection {
        let mut selection = self.kernel.select_with_report(filter, notrace);
        let Stage::Attached { attachment, .. } = &self.stage else { return selection };
        for (site, function) in attachment.module_functions() {
            let names = || function.names.iter().map(|name| &**name);
            if selects(filter, notrace, Some(&function.module), &names()) {
                selection.sites.push(site);
            }
            let is_missing = |pattern: &String| {
                let functions = Functions::of(pattern);
                !names().any(|name| functions.matches(name, Some(&function.module)))
            };
            selection.unmatched.retain(is_missing);
            selection.unmatched_notrace.retain(is_missing);
        }
        selection.sites.sort_unstable();
        selection
    }

    /// Of the patterns of a filter, those that wait for a module: what an answer says of them.
    ///
    /// # Errors
    /// When they wait for nothing, since modules cannot be traced.
    pub(super) fn waits(&self, filter: &[String]) -> Result<String, String> {
        let Stage::Attached { attachment, .. } = &self.stage else { return Ok(String::new()) };
        let names = filter.iter().any(|pattern| names_modules(pattern));
        if names && !attachment.watches_modules() {
            return Err("functions of modules cannot be traced in this guest".into());
        }
        let waiting = self.waited_for(filter);
        let texts = waiting.iter().map(|module| format!("; waits for module {module}"));
        Ok(texts.collect())
    }

    /// The modules that these patterns name, as they do it, without those that are loaded.
    pub(super) fn waited_for<'a>(&self, filter: &'a [String]) -> Vec<&'a str> {
        let mut waiting: Vec<_> =
            filter.iter().filter_map(|pattern| Functions::of(pattern).module()).collect();
        waiting.sort_unstable();
        waiting.dedup();
        if matches!(self.stage, Stage::Off) {
            return Vec::new();
        }
        if let Stage::Attached { attachment, .. } = &self.stage {
            let is_loaded = |wanted: &&str| {
                let pattern = format!(":mod:{wanted}");
                let mut modules = attachment.modules().iter();
                modules.any(|module| Functions::of(&pattern).reaches(&module.name))
            };
            waiting.retain(|wanted| !is_loaded(wanted));
        }
        waiting
    }

    /// A module comes or goes. Whether this was attended to.
    pub(super) fn module_told(
        &mut self,
        machine: &dyn Vm,
        vcpu: usize,
        (moment, next): (ModuleMoment, u64),
    ) -> bool {
        if !matches!(self.stage, Stage::Attached { .. }) {
            return false;
        }
        let paused = match machine.pause() {
            Ok(paused) => paused,
            Err(error) => {
                // It stands there still, and the machine is gone.
                self.note(format!("a module was not seen to come or go: {error}"));
                return true;
            }
        };
        let Some((mut attachment, from)) = self.take_attached() else { return false };
        let told = match paused.registers(vcpu) {
            Ok(registers) => {
                let word = |index| match arch::argument(&registers, index) {
                    Some(arch::Argument::Word(word)) => word,
                    _ => 0,
                };
                let [module, start, end] = [0, 1, 2].map(word);
                let begun = from.is_none();
                match moment {
                    ModuleMoment::Ready => {
                        self.module_ready((machine, &paused), &mut attachment, module, begun)
                    }
                    // Of the kernel itself: given back long ago.
                    ModuleMoment::Freed if module == 0 => Ok(None),
                    ModuleMoment::Freed => {
                        self.module_gone(machine, &mut attachment, module, Some(start..end))
                    }
                    ModuleMoment::Gone => {
                        self.module_events_gone(machine, &mut attachment, module, begun);
                        self.forget_module_events(module);
                        self.module_gone(machine, &mut attachment, module, None)
                    }
                    // Of others than modules it was not told here: the state is the second, the
                    // module the third.
                    ModuleMoment::Told if start == ModuleMoment::GOING => {
                        self.module_events_gone(machine, &mut attachment, end, begun);
                        self.leave_module_events(end);
                        Ok(None)
                    }
                    ModuleMoment::Told => Ok(None),
                }
            }
            Err(error) => Err(error.to_string()),
        };
        let went_on = paused.set_rip(vcpu, next);
        self.stage = Stage::Attached { attachment, from };
        match &told {
            Ok(Some((text, count))) if *count > 0 => {
                self.account(paused, MarkKind::Filter, text.clone());
            }
            Ok(Some((text, _))) => {
                self.count_pause(paused, MarkKind::Note, text.clone());
            }
            Ok(None) | Err(_) => {
                self.count_pause(paused, MarkKind::Pause, "modules".into());
            }
        }
        if let Err(error) = told {
            self.note(error);
        }
        if let Err(error) = went_on {
            self.note(format!("a vCPU did not go on after a module's trap: {error}"));
        }
        true
    }

    /// A module is ready: what it was, and how many of its functions are traced.
    fn module_ready(
        &mut self,
        (machine, paused): (&dyn Vm, &Paused<'_>),
        attachment: &mut Attachment,
        address: u64,
        begun: bool,
    ) -> Result<Option<(String, usize)>, String> {
        let ram = machine.ram();
        let module = attachment.load_module(ram, &self.kernel, address);
        let switches = self.traces_switches(true) || self.traces_switches(false);
        let module = module.map_err(|error| match switches {
            true => format!(
                "functions of a module, and where it switches interrupts and preemption, are not traced: {error}"
            ),
            false => format!("functions of a module are not traced: {error}"),
        })?;
        let module = Arc::new(module);
        let name = Arc::clone(&module.name);
        let came = self.came.get_or_insert_default();
        if came.len() < MOST_NAMES {
            came.insert(Arc::clone(&name));
        }
        for (site, function) in &module.functions {
            self.functions.insert(*site, Arc::clone(function));
        }
        if let Some(relay) = &self.relay {
            relay.module(Arc::clone(&module));
        }
        let sites = self.asked_exits(&module);
        if self.tracing.wants_exits() || !sites.is_empty() {
            let words = if sites.is_empty() { None } else { words(paused) };
            let fresh = Fresh { address, sites: &sites, words: words.as_deref() };
            self.find_module_exits(ram, attachment, Some(fresh));
        }
        // Some want functions only if all of their ends are seen.
        let own = self.take_up(ram, attachment, &module);
        self.tell_unseen(attachment);
        if module.left_out > 0 && !own.is_empty() {
            let count = module.left_out;
            self.note(format!(
                "{count} functions of module {name} are not traced: they have no name, or no place"
            ));
        }
        let taken = if own.is_empty() || !begun {
            Ok(0)
        } else {
            self.take(machine, attachment, &own, &name)
        };
        let (events, switches) =
            self.module_events_ready(machine, attachment, (address, &name), begun);
        let taken = taken.map_err(|error| format!("module {name} is not traced: {error}"))?;
        let all = module.functions.len();
        let mut text = format!("module {name} loaded: {taken} of {all} functions");
        if events > 0 {
            text.push_str(&format!(", {events} events"));
        }
        if switches > 0 {
            text.push_str(&format!(", {switches} switches of interrupts and preemption"));
        }
        Ok(Some((text, taken)))
    }

    /// Functions (sites) of a module whose returns are asked for, or may be later.
    fn asked_exits(&self, module: &Module) -> Vec<usize> {
        let globs = &self.tracing.returns_of_modules;
        let is_asked = |(_, function): &&(usize, Arc<ModuleFunction>)| {
            let names = function.names.iter().map(|name| &**name);
            self.tracing.leaving().any(|(Globs { filter, notrace }, _)| {
                selects(filter, notrace, Some(&module.name), &names)
            }) || (!globs.is_empty() && selects(globs, &[], Some(&module.name), &names))
        };
        let mut sites: Vec<_> =
            module.functions.iter().filter(is_asked).map(|&(site, _)| site).collect();
        sites.sort_unstable();
        sites
    }

    /// Looks for the exits of modules that are loaded. Some kernels' must be rewritten while their module is
    /// fresh.
    pub(super) fn find_module_exits(
        &mut self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        fresh: Option<Fresh<'_>>,
    ) {
        let all = match attachment.find_module_exits(ram, &self.kernel, fresh) {
            Ok(all) => all,
            Err(error) => {
                self.note(format!("returns of functions of a module are not traced: {error}"));
                return;
            }
        };
        for found in all {
            self.module_exits.extend_from_slice(&found.exits);
            self.plan = None;
        }
        self.module_exits.sort_unstable_by_key(|&(index, _)| index);
    }

    /// The same for what is about to be asked for, which may depend on them.
    pub(super) fn look_for_module_exits(&mut self, machine: &dyn Vm) {
        if let Some((mut attachment, from)) = self.take_attached() {
            self.find_module_exits(machine.ram(), &mut attachment, None);
            self.stage = Stage::Attached { attachment, from };
        }
    }

    /// Takes note of the functions of modules of which returns are wanted and not, or not all, seen.
    pub(super) fn tell_unseen(&mut self, attachment: &Attachment) {
        if !self.tracing.wants_exits() {
            return;
        }
        for loaded in attachment.modules() {
            let module = &loaded.name;
            let graphed = |site: usize| {
                self.tracing.leaving().any(|(_, sites)| sites.binary_search(&site).is_ok())
            };
            match loaded.missing() {
                Ok(missing) => {
                    for &(site, reason) in missing.iter().filter(|&&(site, _)| graphed(site)) {
                        self.unseen.entry(reason).or_default().insert(site);
                    }
                }
                Err(_) if !loaded.sites.iter().any(|&site| graphed(site)) => {}
                // What one lacks others lack, too.
                Err(why) => {
                    if self.told_of_modules.insert(format!("returns: {why}")) {
                        self.note(format!(
                            "returns of functions of modules (such as those of {module}) are not \
                             seen: {why}"
                        ));
                    }
                }
            }
            let text = format!("exits of functions of module {module} have no place");
            if loaded.unplaced() > 0 && self.told_of_modules.insert(text.clone()) {
                self.note(format!("{} {text}", loaded.unplaced()));
            }
        }
    }

    /// What the summary says of functions of modules of which not all ends were seen: at the end, since
    /// modules come and go.
    pub(super) fn unseen_of_modules(&self) -> Vec<String> {
        let note = |(reason, sites): (&Missing, &BTreeSet<usize>)| {
            let examples: Vec<_> = sites.iter().take(EXAMPLES).map(|&it| self.name(it)).collect();
            format!(
                "returns of {} functions of modules were not (all) seen: {reason} (such as {})",
                sites.len(),
                examples.join(", ")
            )
        };
        self.unseen.iter().map(note).collect()
    }

    /// What the summary says of patterns that have waited for a module all the time.
    pub(super) fn never_loaded(&self) -> Option<String> {
        let came = self.came.as_ref().filter(|came| came.len() < MOST_NAMES)?;
        let tracers = self.tracing.present();
        let roots = self.tracing.present().filter_map(|(_, tracer)| tracer.limits.roots.as_ref());
        let roots = roots.flat_map(|roots| &roots.globs.filter);
        let all = tracers.flat_map(|(_, tracer)| &tracer.globs.filter).chain(roots);
        let waits = |pattern: &&String| {
            let meant = Functions::of(pattern);
            meant.module().is_some() && !came.iter().any(|name| meant.reaches(name))
        };
        let waiting: BTreeSet<&str> = all.filter(waits).map(String::as_str).collect();
        let patterns = waiting.into_iter().collect::<Vec<_>>().join(", ");
        (!patterns.is_empty()).then(|| {
            format!(
                "no module that {patterns} could mean was loaded (functions that are built into the kernel are of no \
                 module)"
            )
        })
    }

    /// Lets these sites of a module call their programs: how many do.
    fn take(
        &mut self,
        machine: &dyn Vm,
        attachment: &mut Attachment,
        own: &[usize],
        name: &str,
    ) -> Result<usize, TraceError> {
        let ram = machine.ram();
        let (mut only, own_exits) = self.only(own);
        let mut plan = self.plan_only(attachment, &only, &own_exits);
        let wanted = match self.prepare(ram, attachment, &plan) {
            Err(error) if !plan.exits.is_empty() => {
                // Entries may have a place all the same, but for those that wait for their ends.
                self.module_exits.retain(|exit| !own_exits.contains(exit));
                self.note(format!("returns of module {name} are not traced: {error}"));
                only.leave_what_waits(|_| true);
                self.tracing.leave_what_waits(|site| own.binary_search(site).is_ok());
                self.tracing_changed();
                plan = self.plan_only(attachment, &only, &[]);
                self.prepare(ram, attachment, &plan)?
            }
            wanted => wanted?,
        };
        let Wanted { mut sites, exits, .. } = wanted;
        if !exits.is_empty() {
            let skipped = attachment.enable_exits(ram, &self.kernel, &exits)?;
            self.exits_skipped(&skipped);
            if self.learn_unheld(&skipped) {
                let (only, own_exits) = self.only(own);
                let plan = self.plan_only(attachment, &only, &own_exits);
                sites = self.prepare(ram, attachment, &plan)?.sites;
            }
        }
        // Functions of the kernel end in the place of these: others may want their ends, too.
        let held = |index| exits.binary_search_by_key(&index, |&(index, _)| index).is_ok();
        let groups = |&(index, exit): &(usize, Exit)| held(index) && exit.after.group().is_some();
        if own_exits.iter().any(groups) {
            let all = self.planned_now(attachment);
            let all = self.prepare(ram, attachment, &all)?;
            let skipped = self.change_exits(ram, attachment, &all)?;
            self.exits_skipped(&skipped);
            // Functions that are held already have it with the next change of what is traced.
            self.learn_unheld(&skipped);
        }
        if attachment.is_lent() {
            let all = sites.len();
            sites.retain(|&(site, _)| attachment.can_take(&self.kernel, site));
            // The rest when the update is over.
            self.late |= sites.len() < all;
        }
        let report = attachment.enable(ram, &self.kernel, &sites)?;
        for Skipped { reason, count, examples } in self.skipped(&report.skipped) {
            let examples = examples.join(", ");
            self.note(format!(
                "{count} functions of module {name} are not traced: {reason} (such as {examples})"
            ));
        }
        sites.retain(|(site, _)| report.skipped.iter().all(|skip| skip.site != *site));
        self.count_sites(attachment, &sites, u64::saturating_add);
        let shared = attachment.shared().values().sum::<usize>() as u64;
        self.summary.sites.shared = self.summary.sites.shared.max(shared);
        self.summary.patch_ns += nanoseconds(report.patch_time);
        // None of their calls has begun: others that are open stay.
        for (keeper, places) in plan.keepers() {
            let all = self.keepers.entry(keeper).or_default();
            *all = all.wrapping_add(places);
        }
        if self.held_back {
            only.tracers.clear();
        }
        let only_left = if exits.is_empty() { 0 } else { plan.only_left(&only) };
        Ok(report.patched + only_left)
    }

    /// What is to be done at sites of modules by now. Triggers do not wait while tracing does.
    fn plan_only(&self, attachment: &Attachment, only: &Tracing, exits: &[(usize, Exit)]) -> Plan {
        if self.held_back {
            return Plan::untraced(only, exits, &[]);
        }
        let plan = Plan::with_modules(only, exits, &[], &|_| true);
        match attachment.is_settled() || !only.is_limited() {
            true => plan,
            false => plan.without_nested(),
        }
    }

    /// What is to be done at these sites of modules and nowhere else, and where their functions are left.
    fn only(&self, own: &[usize]) -> (Tracing, Vec<(usize, Exit)>) {
        let tracers = self.tracing.tracers.iter().map(|tracer| {
            let tracer = tracer.as_ref()?;
            let is_own = |site: &&usize| own.binary_search(site).is_ok();
            let sites = tracer.sites.iter().filter(is_own).copied().collect();
            Some(tracer.with_sites(sites))
        });
        let (tracers, overflow) = (tracers.collect(), self.tracing.overflow);
        let context = self.tracing.context;
        let mut triggers = self.tracing.triggers.clone();
        for trigger in &mut triggers {
            trigger.sites.retain(|site| own.binary_search(site).is_ok());
        }
        let only = Tracing { tracers, triggers, context, ..Tracing::of(Vec::new(), overflow) };
        let is_own = |(_, exit): &&(usize, Exit)| own.binary_search(&(exit.site as usize)).is_ok();
        let exits = self.module_exits.iter().filter(is_own).copied().collect();
        (only, exits)
    }

    /// A module, or a part of its memory, is about to go.
    fn module_gone(
        &mut self,
        machine: &dyn Vm,
        attachment: &mut Attachment,
        address: u64,
        range: Option<std::ops::Range<u64>>,
    ) -> Result<Option<(String, usize)>, String> {
        let Some(module) = attachment.modules().iter().find(|module| module.is_at(address)) else {
            return Ok(None);
        };
        let (name, init) = (Arc::clone(&module.name), range.is_some());
        let held: Programs = attachment.sites().collect();
        let gone = attachment.unload_module(machine.ram(), address, range);
        let (mut sites, restored) = gone
            .map_err(|error| format!("functions of module {name} were not given back: {error}"))?;
        sites.sort_unstable();
        if !self.keepers.is_empty() {
            // Their calls have ended: others that are open stay.
            let (only, exits) = self.only(&sites);
            for (keeper, places) in self.plan_only(attachment, &only, &exits).keepers() {
                let all = self.keepers.entry(keeper).or_default();
                *all = all.wrapping_sub(places);
            }
        }
        let exits = self.module_exits.len();
        let left: FxHashSet<usize> = attachment.module_exits().map(|(index, _)| index).collect();
        self.module_exits.retain(|(index, _)| left.contains(index));
        if self.module_exits.len() < exits {
            self.plan = None;
        }
        self.tell_gone(attachment, &sites);
        let is_gone = |site: &usize| sites.binary_search(site).is_ok();
        let mut matched: Vec<usize> = Vec::new();
        for tracer in self.tracing.tracers.iter_mut().flatten() {
            matched.extend(tracer.sites.iter().copied().filter(is_gone));
            tracer.sites.retain(|site| !is_gone(site));
            tracer.limits.retain(|site| !is_gone(site));
        }
        // Those that wait for more calls go on with the next module of this name.
        for trigger in &mut self.tracing.triggers {
            matched.extend(trigger.sites.iter().copied().filter(is_gone));
            trigger.sites.retain(|site| !is_gone(site));
        }
        matched.sort_unstable();
        matched.dedup();
        if !matched.is_empty() {
            self.plan = None;
            let total = &mut self.summary.sites.matched;
            *total = total.saturating_sub(matched.len() as u64);
        }
        let held: Programs = held.into_iter().filter(|(site, _)| is_gone(site)).collect();
        self.count_sites(attachment, &held, u64::saturating_sub);
        self.foreign(&restored.foreign);
        let what = if init { "is initialised" } else { "unloaded" };
        let text = format!("module {name} {what}: {} sites given back", held.len());
        Ok(Some((text, held.len())))
    }

    /// Puts sites that have come, or are gone, into the summary.
    fn count_sites(
        &mut self,
        attachment: &Attachment,
        of: &[(usize, u16)],
        change: fn(u64, u64) -> u64,
    ) {
        let tracers = self.tracing.tracers.len();
        let shares = Shares::count(tracers, of.iter().copied(), attachment.duties());
        let sites = &mut self.summary.sites;
        sites.patched = change(sites.patched, of.len() as u64);
        sites.direct = change(sites.direct, shares.direct);
        sites.combined = change(sites.combined, shares.combined);
        for (total, count) in sites.tracers.iter_mut().zip(shares.by_tracer) {
            *total = change(*total, count);
        }
    }

    /// The modules that are loaded, each with how many functions it has and how many of them are
    /// traced.
    pub(super) fn modules(&self) -> Vec<serde_json::Value> {
        let Stage::Attached { attachment, .. } = &self.stage else { return Vec::new() };
        let held = attachment.sites().map(|(site, _)| site);
        let mut held: Vec<_> = held.filter(|&site| attachment.is_of_module(site)).collect();
        held.sort_unstable();
        let module = |module: &crate::tracer::Loaded| {
            let traced = module.sites.iter().filter(|site| held.binary_search(site).is_ok());
            serde_json::json!({
                "name": &*module.name,
                "functions": module.sites.len(),
                "traced": traced.count(),
            })
        };
        attachment.modules().iter().map(module).collect()
    }
}
