//! Applies a plan: takes sites and exits, and gives them back.

use super::controller::{Controller, Stage};
use super::plan::{Plan, changes};
use super::shares::Shares;
use super::tripwires::Purpose;
use super::vm::Vm;
use super::{Tracer, Tracing};
use crate::kernel::tracepoints::Hooks;
use crate::kernel::{Exit, Exits};
use crate::relay::{EventTarget, Targets, TracerName, nanoseconds};
use crate::stream::Skipped;
use crate::tracer::{AttachReport, Attachment, ExitSkip, Guest, Keeper, Skip, TraceError};
use rustc_hash::FxHashSet;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names of skipped sites that a summary shows for a reason.
const EXAMPLES: usize = 3;

/// Sites and exits with the programs that they are to call.
#[derive(Default)]
pub(super) struct Wanted {
    pub(super) sites: Vec<(usize, u16)>,
    pub(super) exits: Vec<(usize, u16)>,
    pub(super) events: Vec<(Hooks, u16)>,
    pub(super) switches: Vec<(usize, u16)>,
    /// Others of these, for which there is no stub.
    pub(super) stubless: Vec<usize>,
    /// As in [`Plan::targets`].
    pub(super) targets: BTreeMap<Keeper, Vec<u64>>,
}

/// Places of a plan with the programs that they are to call.
struct Places {
    sites: Vec<(usize, u16)>,
    exits: Vec<(usize, u16)>,
    /// Those of the exits that have no stub yet.
    rest: Vec<(usize, u16)>,
}

/// What was made for a plan before its exits can be held.
pub(super) struct Ahead {
    plan: Arc<Plan>,
    /// `None`: there is no room for all, which is told when it is needed.
    places: Option<Places>,
}

impl Ahead {
    /// Those that its places are to call.
    fn programs(&self) -> impl Iterator<Item = u16> {
        let places = self.places.iter().flat_map(|places| places.sites.iter().chain(&places.exits));
        places.map(|&(_, program)| program)
    }
}

/// Places with the programs of their duties.
fn with_programs(places: &[(usize, u32)], programs: &[u16]) -> Vec<(usize, u16)> {
    let program = |duty: u32| programs.get(duty as usize).copied();
    // It does not grow bit by bit: nearly always all of them are in it.
    let mut all = Vec::with_capacity(places.len());
    all.extend(places.iter().filter_map(|&(place, duty)| Some((place, program(duty)?))));
    all
}

impl Controller {
    /// Makes the stubs of exits that cannot be held yet, and lets the relay know them, while the
    /// guest runs to where they can. To be called whenever it runs.
    pub(super) fn prepare_ahead(&mut self, machine: &dyn Vm) {
        let waits = match &self.stage {
            Stage::Attached { attachment, from: None } => {
                self.tripwires.find(Purpose::Settle).is_some() && !attachment.is_lent()
            }
            _ => false,
        };
        // Once: stubs are for ever, and those of a plan that is changed meanwhile would stay.
        if !waits || self.held_back || self.ahead.is_some() {
            return;
        }
        let plan = self.planned();
        if plan.exits.is_empty() {
            return;
        }
        if let Some((mut attachment, from)) = self.take_attached() {
            let made = self.make_ahead(machine.ram(), &mut attachment, &plan);
            if let Err(error) = &made {
                log::debug!("stubs are not made ahead: {error}");
            }
            self.ahead = Some(Ahead { plan, places: made.ok() });
            self.stage = Stage::Attached { attachment, from };
        }
    }

    fn make_ahead(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        plan: &Plan,
    ) -> Result<Places, TraceError> {
        let plan = &*self.with_tables(attachment, plan)?;
        let programs = self.programs(ram, attachment, plan)?;
        let exits = with_programs(&plan.exits, &programs);
        let words = attachment.stubs(ram, &self.kernel, &exits)?;
        let none = exits.iter().zip(&words).filter(|(_, word)| word.is_none());
        let rest = none.map(|(&exit, _)| exit).collect();
        if let Some(relay) = &self.relay {
            relay.exits(words.into_iter().flatten().collect());
        }
        Ok(Places { sites: with_programs(&plan.sites, &programs), exits, rest })
    }

    /// The programs of a plan's duties, which are made if there are none yet.
    fn programs(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        plan: &Plan,
    ) -> Result<Vec<u16>, TraceError> {
        let mut programs = self.all_programs(ram, attachment, plan);
        // Those of tracers that have just gone may do.
        if let (Err(TraceError::Full(_)), Some(relay)) = (&programs, &self.relay)
            && relay.take_all()
        {
            attachment.are_taken();
            programs = self.all_programs(ram, attachment, plan);
        }
        if programs.is_err() {
            // Nothing will lead to those that were found.
            self.rest_programs(attachment);
        }
        programs
    }

    /// Lets programs rest to which nothing leads, nor will when exits can be held.
    fn rest_programs(&self, attachment: &mut Attachment) {
        attachment.rest_programs(self.ahead.iter().flat_map(Ahead::programs));
    }

    fn all_programs(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        plan: &Plan,
    ) -> Result<Vec<u16>, TraceError> {
        let duties = plan.duties.iter();
        duties.map(|duty| attachment.program(ram, &self.kernel, duty)).collect()
    }

    /// Makes the programs and stubs of a plan, and lets the relay know them: no site has changed,
    /// and the guest may run.
    pub(super) fn prepare(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        plan: &Plan,
    ) -> Result<Wanted, TraceError> {
        self.prepare_rest(ram, attachment, plan, None)
    }

    /// The same with what was made for this plan before, if anything.
    fn prepare_rest(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        plan: &Plan,
        ahead: Option<Places>,
    ) -> Result<Wanted, TraceError> {
        let plan = &*self.with_tables(attachment, plan)?;
        let programs = self.programs(ram, attachment, plan)?;
        let (mut told, mut words) = (Vec::new(), Vec::new());
        let mut wanted = Wanted { targets: plan.targets.clone(), ..Wanted::default() };
        if let Some(Places { sites, exits, rest }) = ahead {
            // The relay knows all the others.
            words.extend(attachment.stubs(ram, &self.kernel, &rest)?.into_iter().flatten());
            (wanted.sites, wanted.exits) = (sites, exits);
            if self.tracing.is_limited() {
                // Its sites were left out until now.
                told = plan.recorded();
            }
        } else {
            told = plan.recorded();
            wanted.sites = with_programs(&plan.sites, &programs);
            if attachment.is_settled() && !plan.exits.is_empty() {
                wanted.exits = with_programs(&plan.exits, &programs);
                let made = attachment.stubs(ram, &self.kernel, &wanted.exits)?;
                words.reserve(made.len());
                words.extend(made.into_iter().flatten());
            }
        }
        let mut events = Vec::new();
        if attachment.watches_tracepoints() {
            for (index, program) in with_programs(&plan.events, &programs) {
                let Some(event) = self.tracing.events.get(index) else { continue };
                let Some(hooks) = event.hooks() else { continue };
                let word = attachment.tracepoint_word(ram, event.known_by(hooks), program)?;
                events.extend(word.map(|word| EventTarget {
                    address: event.address,
                    word,
                    event: Arc::clone(&event.fields),
                }));
                wanted.events.push((self.with_modules(hooks), program));
            }
        }
        if attachment.is_settled() {
            let planned = with_programs(&plan.events, &programs);
            self.prepare_switches(ram, attachment, &planned, (&mut wanted, &mut events))?;
        }
        if let Some(relay) = &self.relay {
            let tracer = |(number, tracer): (u8, &Tracer)| TracerName {
                number,
                name: tracer.name.clone(),
                text: tracer.text.clone(),
                values: tracer.values.clone(),
            };
            let taken = relay.targets(Targets {
                sites: told,
                exits: words,
                events,
                programs: attachment.programs().to_vec(),
                tracers: self.tracing.present().map(tracer).collect(),
            });
            if taken {
                attachment.are_taken();
            }
        }
        Ok(wanted)
    }

    /// Takes the sites and exits of what is planned.
    pub(super) fn enable(
        &mut self,
        machine: &dyn Vm,
        attachment: &mut Attachment,
    ) -> anyhow::Result<()> {
        if attachment.is_lent() {
            self.late = true;
            return Ok(());
        }
        let ram = machine.ram();
        let plan = self.planned_now(attachment);
        let ahead = if attachment.is_settled() { self.ahead.take() } else { None };
        let ahead = ahead.filter(|ahead| Arc::ptr_eq(&ahead.plan, &plan));
        let ahead = ahead.and_then(|ahead| ahead.places);
        let wanted = self.prepare_rest(ram, attachment, &plan, ahead)?;
        let report = self.change(ram, attachment, &wanted)?;
        self.keepers = plan.keepers();
        self.summary.patch_ns += nanoseconds(report.patch_time);
        Ok(())
    }

    /// Makes the sites and exits that are ours those that are wanted, and accounts for them.
    pub(super) fn change(
        &mut self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        wanted: &Wanted,
    ) -> Result<AttachReport, TraceError> {
        let changed = self.change_exits(ram, attachment, wanted);
        let skipped = changed.as_deref().unwrap_or_default();
        let before = self.plan.clone();
        let (is_open, is_unseen) = (self.learn_unheld(skipped), self.learn_unseen(skipped));
        let differs = is_unseen && before.is_none_or(|before| *self.planned() != *before);
        let again = match is_open || differs {
            true => {
                let plan = self.planned_now(attachment);
                let prepared = self.prepare(ram, attachment, &plan);
                if let Err(error) = &prepared {
                    self.note_once(format!(
                        "calls that are left at such exits are taken to be open: {error}"
                    ));
                }
                prepared.ok()
            }
            false => None,
        };
        let wanted = again.as_ref().unwrap_or(wanted);
        let changed = match differs && again.is_some() {
            true => self.change_exits(ram, attachment, wanted),
            false => changed,
        };
        if attachment.counters().tell_shared() {
            self.note(
                "what all vCPUs count is reported as of vCPU 0: no room for tables of each".into(),
            );
        }
        if attachment.watches_tracepoints() {
            let skipped = attachment.hold_tracepoints(ram, wanted.events.clone())?;
            self.tracepoints_skipped(&skipped);
        }
        let switches_skipped = self.change_switches(ram, attachment, &wanted.switches)?;
        self.switches_skipped(attachment, &switches_skipped, &wanted.stubless);
        let (leave, take) = if attachment.held() == 0 {
            (Vec::new(), Cow::Borrowed(&wanted.sites))
        } else {
            let (leave, take) = changes(attachment.sites(), &wanted.sites);
            (leave, Cow::Owned(take))
        };
        let left = attachment.disable(ram, &leave);
        let report = left.and_then(|_| attachment.enable(ram, &self.kernel, &take));
        self.rest_programs(attachment);
        self.count(attachment);
        if let Ok(report) = &report {
            self.summary.sites.skipped = self.skipped(&report.skipped);
        }
        self.exits_skipped(&changed?);
        report
    }

    /// Calls that are left at these exits are open for ever, to tracers of parts of the call tree. Whether that is news.
    pub(super) fn learn_unheld(&mut self, skips: &[ExitSkip]) -> bool {
        if skips.is_empty() || !self.tracing.is_limited() {
            return false;
        }
        let mut sites = self.left_at(skips);
        sites.sort_unstable();
        let (mut news, mut roots) = (false, Vec::new());
        for tracer in self.tracing.tracers.iter_mut().flatten() {
            let Tracer { sites: own, limits, .. } = tracer;
            let before = limits.endless_roots();
            if limits.learn_unheld(&sites, |site| own.binary_search(site).is_ok()) {
                news = true;
                roots.extend(limits.endless_roots().into_iter().filter(|it| !before.contains(it)));
            }
        }
        if let Some(&first) = roots.first() {
            self.note_once(format!(
                "what {} roots call is not recorded: not all of their exits are traced (such as of {})",
                roots.len(),
                self.name(first)
            ));
        }
        if news {
            self.plan = None;
        }
        news
    }

    /// Calls that go on in functions that are left at these exits are not seen to end. Whether that is news.
    fn learn_unseen(&mut self, skips: &[ExitSkip]) -> bool {
        if skips.is_empty() || !self.tracing.wants_aid() {
            return false;
        }
        let before = self.tracing.unheld.len();
        let of_kernel = |site: &usize| *site < self.kernel.sites().len();
        let sites = self.left_at(skips).into_iter().filter(of_kernel);
        let sites: Vec<u32> = sites.filter_map(|site| u32::try_from(site).ok()).collect();
        self.tracing.unheld.extend(sites);
        let is_news = self.tracing.unheld.len() > before;
        if is_news {
            self.plan = None;
        }
        is_news
    }

    /// Sites of functions that are left at these exits, or by a jump to what is.
    fn left_at(&self, skips: &[ExitSkip]) -> Vec<usize> {
        let of_modules = self.module_exits.iter().map(|(index, exit)| (*index, exit));
        let kernel = self.kernel.exits().ok().map_or(&[][..], Exits::all);
        let all = || of_modules.clone().chain(kernel.iter().enumerate());
        let skipped: FxHashSet<usize> = skips.iter().map(|skip| skip.exit).collect();
        let left = || all().filter(|(index, _)| skipped.contains(index)).map(|(_, exit)| exit);
        let groups: FxHashSet<u32> = left()
            .filter(|exit| exit.site == Exit::NO_SITE)
            .filter_map(|exit| exit.after.group())
            .collect();
        let jumps = all().map(|(_, exit)| exit);
        let jumps = jumps.filter(|exit| exit.after.group().is_some_and(|it| groups.contains(&it)));
        let sites = left().chain(jumps).map(|exit| exit.site);
        sites.filter(|&site| site != Exit::NO_SITE).map(|site| site as usize).collect()
    }

    /// Says which exits were left alone.
    pub(super) fn exits_skipped(&mut self, skips: &[ExitSkip]) {
        let skip = |skip: &ExitSkip| {
            let site = self.site_of_exit(skip.exit).unwrap_or(usize::MAX);
            Skip { site, reason: skip.reason }
        };
        let skips: Vec<_> = skips.iter().map(skip).collect();
        for Skipped { reason, count, examples } in self.skipped(&skips) {
            let examples = examples.join(", ");
            // Each change of what is traced tries them again.
            self.note_once(format!(
                "{count} exits are not traced: {reason} (such as of {examples})"
            ));
        }
    }

    /// The site (index) of the function that is left at an exit (index), of the kernel or of a module.
    pub(super) fn site_of_exit(&self, index: usize) -> Option<usize> {
        let own = self.kernel.exits().ok().and_then(|exits| exits.all().get(index));
        own.map(|exit| exit.site as usize).or_else(|| {
            let at = self.module_exits.binary_search_by_key(&index, |&(index, _)| index).ok()?;
            self.module_exits.get(at).map(|(_, exit)| exit.site as usize)
        })
    }

    /// Makes the exits that are ours those that are wanted, and has those calls marked whose ends are seen there.
    pub(super) fn change_exits(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        Wanted { exits, targets, .. }: &Wanted,
    ) -> Result<Vec<ExitSkip>, TraceError> {
        // Not while their ends are given back.
        attachment.mark_those_to(targets, false);
        let changed = self.give_and_take_exits(ram, attachment, exits);
        match &changed {
            Ok(_) => attachment.mark_those_to(targets, true),
            Err(_) => attachment.mark_those_to(&BTreeMap::new(), false),
        }
        changed
    }

    fn give_and_take_exits(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        wanted: &[(usize, u16)],
    ) -> Result<Vec<ExitSkip>, TraceError> {
        if wanted.is_empty() && attachment.held_exits() == 0 {
            return Ok(Vec::new());
        }
        if attachment.held_exits() == 0 {
            return attachment.enable_exits(ram, &self.kernel, wanted);
        }
        let (leave, take) = changes(attachment.exits(), wanted);
        attachment.disable_exits(ram, &leave)?;
        attachment.enable_exits(ram, &self.kernel, &take)
    }

    /// Puts the sites that are ours into the summary.
    pub(super) fn count(&mut self, attachment: &Attachment) {
        let sites = &mut self.summary.sites;
        sites.patched = attachment.held() as u64;
        let tracers = &self.tracing.tracers;
        let shares = Shares::count(tracers.len(), attachment.sites(), attachment.duties());
        (sites.direct, sites.combined) = (shares.direct, shares.combined);
        if tracers.len() > 1 {
            sites.tracers = shares.by_tracer;
            let name = |(number, tracer): (usize, &Option<Tracer>)| match tracer {
                Some(tracer) => tracer.name.clone(),
                None => Tracing::default_name(number),
            };
            sites.names = tracers.iter().enumerate().map(name).collect();
        }
    }

    pub(super) fn skipped(&self, skips: &[Skip]) -> Vec<Skipped> {
        let mut reasons: BTreeMap<String, Skipped> = BTreeMap::new();
        for skip in skips {
            let reason = skip.reason.to_string();
            let entry = reasons
                .entry(reason.clone())
                .or_insert_with(|| Skipped { reason, ..Skipped::default() });
            entry.count += 1;
            if entry.examples.len() < EXAMPLES {
                entry.examples.push(self.name(skip.site));
            }
        }
        reasons.into_values().collect()
    }
}
