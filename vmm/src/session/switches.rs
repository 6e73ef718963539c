//! Instructions that switch interrupts and preemption, as they tell events.

use super::TracedEvent;
use super::apply::Wanted;
use super::controller::Controller;
use super::plan::changes;
use crate::kernel::preemptirq::Switch;
use crate::relay::EventTarget;
use crate::tracer::{Attachment, FoundSwitches, Guest, SkipReason, TraceError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Modules that are kept here: more than a guest has that does not make them up.
const MOST_MODULES: usize = 4096;
/// Modules that a note names.
const EXAMPLES: usize = 3;
const NO_ROOM: &str = "no room for the code that takes their place";

/// Places of modules that switch interrupts or preemption while that is traced, and are not recorded.
#[derive(Debug, Default)]
pub(super) struct Unswitched {
    modules: BTreeMap<Arc<str>, Left>,
}

/// Those of a module.
#[derive(Debug, Default)]
struct Left {
    /// How many, of interrupts and of preemption, by why.
    places: BTreeMap<&'static str, [usize; 2]>,
    /// The same of those for which there was no room.
    full: [usize; 2],
    /// Functions that could not be looked through.
    torn: usize,
    /// Which of both was traced while it was there.
    traced: [bool; 2],
}

impl Unswitched {
    fn of(&mut self, module: &Arc<str>) -> Option<&mut Left> {
        if self.modules.len() >= MOST_MODULES {
            return self.modules.get_mut(module);
        }
        Some(self.modules.entry(Arc::clone(module)).or_default())
    }

    /// What was found in a module, which may not be the first time.
    fn found(&mut self, found: &FoundSwitches) {
        // What was known of one that cannot be read by now is so still.
        let Ok(places) = &found.unusable else { return };
        let places = Some(places).filter(|places| !places.is_empty());
        if places.is_none() && found.torn == 0 && !self.modules.contains_key(&found.module) {
            return;
        }
        if let Some(left) = self.of(&found.module) {
            left.places = places.cloned().unwrap_or_default();
            left.torn = found.torn;
        }
    }

    /// There is no room for so many places of a module, of interrupts and of preemption.
    fn full(&mut self, module: &Arc<str>, counts: [usize; 2]) {
        if let Some(left) = self.of(module) {
            for (most, count) in left.full.iter_mut().zip(counts) {
                *most = count.max(*most);
            }
        }
    }

    /// Interrupts, or preemption, are traced while these modules are there.
    fn traced<'a>(&mut self, traced: [bool; 2], modules: impl Iterator<Item = &'a Arc<str>>) {
        for module in modules {
            if let Some(left) = self.modules.get_mut(module) {
                left.traced = [0, 1].map(|of| left.traced[of] || traced[of]);
            }
        }
    }

    /// What the summary says of them.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for (of, what) in ["interrupts", "preemption"].into_iter().enumerate() {
            let mut reasons: BTreeMap<&str, Vec<(usize, &str)>> = BTreeMap::new();
            for (module, left) in self.modules.iter().filter(|(_, left)| left.traced[of]) {
                let full = [(&NO_ROOM, &left.full)];
                for (why, counts) in left.places.iter().chain(full) {
                    if counts[of] > 0 {
                        reasons.entry(why).or_default().push((counts[of], module));
                    }
                }
            }
            for (why, modules) in reasons {
                let (sum, examples) = examples(modules);
                notes.push(format!(
                    "{sum} places of modules that switch {what} are not recorded: {why} ({examples})"
                ));
            }
        }
        let torn =
            self.modules.iter().filter(|(_, left)| left.traced != [false; 2] && left.torn > 0);
        let torn: Vec<_> = torn.map(|(module, left)| (left.torn, &**module)).collect();
        if !torn.is_empty() {
            let (sum, examples) = examples(torn);
            notes.push(format!(
                "what {sum} functions of modules switch is not recorded: they had breakpoints, or what is no \
                 instruction ({examples})"
            ));
        }
        notes
    }
}

/// How many all modules have, and those that have most.
fn examples(mut modules: Vec<(usize, &str)>) -> (usize, String) {
    modules.sort_by_key(|&(count, _)| std::cmp::Reverse(count));
    let sum: usize = modules.iter().map(|(count, _)| count).sum();
    let examples = modules.iter().take(EXAMPLES);
    let examples: Vec<_> = examples.map(|(count, module)| format!("{module} {count}")).collect();
    let more = modules.len().saturating_sub(EXAMPLES);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (sum, format!("{}{more}", examples.join(", ")))
}

impl Controller {
    /// Whether something that switches interrupts, or else preemption, is traced.
    pub(super) fn traces_switches(&self, interrupts: bool) -> bool {
        let mut events = self.tracing.events.iter().filter_map(TracedEvent::switch);
        events.any(|switch: Switch| switch.is_of_interrupts() == interrupts)
    }

    /// Looks for what modules that are loaded switch, where nobody has done so yet, or (`again`: the guest
    /// runs) where not all could be seen, if that is traced; how many places were found.
    pub(super) fn look_for_module_switches(
        &mut self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        again: bool,
    ) -> usize {
        let traced = [true, false].map(|interrupts| self.traces_switches(interrupts));
        if traced == [false; 2] {
            return 0;
        }
        let all = match attachment.find_module_switches(ram, &self.kernel, again) {
            Ok(all) => all,
            Err(error) => {
                self.note_once(format!("what modules switch is not recorded: {error}"));
                return 0;
            }
        };
        for found in &all {
            self.unswitched.found(found);
            // What one lacks others lack, too.
            if let Err(error) = &found.unusable
                && self.told_of_modules.insert(format!("switches: {error}"))
            {
                self.note(format!(
                    "where modules (such as {}) switch interrupts and preemption is not recorded: {error}",
                    found.module
                ));
            }
        }
        self.unswitched.traced(traced, attachment.modules().iter().map(|module| &module.name));
        all.iter().map(|found| found.places).sum()
    }

    /// Makes stubs for these events (indices, with their programs), as far as instructions tell them:
    /// first all of the kernel's, since there need not be room for those of modules.
    pub(super) fn prepare_switches(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        planned: &[(usize, u16)],
        (wanted, targets): (&mut Wanted, &mut Vec<EventTarget>),
    ) -> Result<(), TraceError> {
        let traced = |&(index, program): &(usize, u16)| {
            let event = self.tracing.events.get(index)?;
            Some((event, event.switch()?, program))
        };
        for of_modules in [false, true] {
            for (event, switch, program) in planned.iter().filter_map(traced) {
                let all = self.kernel.switches();
                let all = all.map_err(|error| TraceError::Kernel(error.to_string()))?.all().iter();
                let own = all.enumerate().filter(|_| !of_modules);
                let all = own.chain(attachment.module_switches().filter(|_| of_modules));
                let sites = all.filter(|(_, site)| site.kind.switch() == switch);
                let sites: Vec<(usize, u16)> = sites.map(|(site, _)| (site, program)).collect();
                let words = attachment.switch_stubs(ram, &self.kernel, &sites)?;
                for (&site, word) in sites.iter().zip(&words) {
                    match word {
                        Some(_) => wanted.switches.push(site),
                        None => wanted.stubless.push(site.0),
                    }
                }
                // Places may share a stub.
                for word in words.into_iter().flatten().collect::<BTreeSet<u32>>() {
                    let (address, event) = (event.address, Arc::clone(&event.fields));
                    targets.push(EventTarget { address, word, event });
                }
            }
        }
        Ok(())
    }

    /// Makes those that are ours those that are wanted. What was left alone.
    pub(super) fn change_switches(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        wanted: &[(usize, u16)],
    ) -> Result<Vec<(usize, SkipReason)>, TraceError> {
        if wanted.is_empty() && attachment.held_switches() == 0 {
            return Ok(Vec::new());
        }
        let (leave, take) = changes(attachment.switches(), wanted);
        attachment.disable_switches(ram, &leave)?;
        attachment.enable_switches(ram, &self.kernel, &take)
    }

    /// Says which are left alone, and those for which there is no stub.
    pub(super) fn switches_skipped(
        &mut self,
        attachment: &Attachment,
        skipped: &[(usize, SkipReason)],
        stubless: &[usize],
    ) {
        if skipped.is_empty() && stubless.is_empty() {
            return;
        }
        let modules = attachment.modules_of_switches();
        // How many, and one of them.
        let mut reasons = BTreeMap::<_, (usize, usize)>::new();
        let mut add = |site: usize, reason| {
            let module = modules.get(&site).copied();
            reasons.entry((module, reason)).or_insert((0, site)).0 += 1;
        };
        skipped.iter().for_each(|&(site, reason)| add(site, reason));
        let mut full = BTreeMap::<_, [usize; 2]>::new();
        for &site in stubless {
            match (modules.get(&site), attachment.module_switch(site)) {
                (Some(&module), Some(place)) => {
                    let [interrupts, preemption] = full.entry(module).or_default();
                    let is_of_interrupts = place.kind.switch().is_of_interrupts();
                    *if is_of_interrupts { interrupts } else { preemption } += 1;
                }
                _ => add(site, SkipReason::NoStub),
            }
        }
        full.into_iter().for_each(|(module, counts)| self.unswitched.full(module, counts));
        let traced = [true, false].map(|interrupts| self.traces_switches(interrupts));
        self.unswitched.traced(traced, modules.values().copied());
        for ((module, reason), (count, site)) in reasons {
            if let Some(module) = module {
                self.note_once(format!(
                    "{count} places of module {module} that switch interrupts or preemption are not \
                     traced: {reason}"
                ));
                continue;
            }
            let address = self.kernel.switches().ok().and_then(|all| all.all().get(site));
            let address = address.map_or(0, |site| site.address);
            let (name, start) = self.kernel.symbols().lookup(address).unwrap_or(("code", 0));
            let offset = address.saturating_sub(start);
            self.note_once(format!(
                "{count} places that switch interrupts or preemption are not traced: {reason} (such as \
                 {name}+{offset:#x})"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(module: &str, why: &'static str, counts: [usize; 2], torn: usize) -> FoundSwitches {
        let unusable = Ok([(why, counts)].into_iter().collect());
        FoundSwitches { module: module.into(), places: 1, unusable, torn }
    }

    #[test]
    fn what_is_not_recorded_is_told_by_reason_with_the_modules_that_have_most() {
        let mut all = Unswitched::default();
        assert_eq!(all.notes(), Vec::<String>::new());
        let counts =
            [("kvm", [5, 2]), ("rds", [7, 0]), ("none", [0, 0]), ("xfs", [1, 0]), ("a", [1, 0])];
        // Loaded again it is the same one.
        for (module, counts) in counts.into_iter().chain(counts) {
            all.found(&found(module, "no room", counts, 0));
        }
        let modules: Vec<Arc<str>> = all.modules.keys().cloned().collect();
        all.traced([true; 2], modules.iter());
        assert_eq!(
            all.notes(),
            [
                "14 places of modules that switch interrupts are not recorded: no room (rds 7, kvm 5, \
                 a 1 and 1 more)",
                "2 places of modules that switch preemption are not recorded: no room (kvm 2)",
            ]
        );
        (0..2 * MOST_MODULES).for_each(|n| all.found(&found(&n.to_string(), "no room", [1, 0], 0)));
        assert_eq!(all.modules.len(), MOST_MODULES);
    }

    // Who traces preemption later would think that all of it is recorded.
    #[test]
    fn what_is_traced_later_is_told_of_modules_that_are_there_then() {
        let mut all = Unswitched::default();
        let [gone, stays]: [Arc<str>; 2] = ["gone".into(), "stays".into()];
        for module in [&gone, &stays] {
            all.found(&found(module, "why", [1, 2], 3));
        }
        assert_eq!(all.notes(), Vec::<String>::new(), "nothing is traced");
        all.traced([true, false], [&gone, &stays].into_iter());
        let places = |count: usize, what: &str, modules: &str| {
            format!(
                "{count} places of modules that switch {what} are not recorded: why ({modules})"
            )
        };
        let interrupts = places(2, "interrupts", "gone 1, stays 1");
        let torn = |count: usize, modules: &str| {
            format!(
                "what {count} functions of modules switch is not recorded: they had breakpoints, or \
                 what is no instruction ({modules})"
            )
        };
        let both = torn(6, "gone 3, stays 3");
        assert_eq!(all.notes(), [interrupts.clone(), both.clone()]);
        all.traced([true; 2], [&stays].into_iter());
        let preemption = places(2, "preemption", "stays 2");
        assert_eq!(all.notes(), [interrupts.clone(), preemption.clone(), both]);
        // By then there is no breakpoint any more, but no room, either.
        all.found(&found(&gone, "why", [1, 2], 0));
        all.found(&found(&stays, "why", [1, 2], 0));
        all.full(&stays, [0, 4]);
        all.full(&stays, [0, 3]);
        let full = "4 places of modules that switch preemption are not recorded: no room for the \
                    code that takes their place (stays 4)";
        assert_eq!(all.notes(), [interrupts, full.to_owned(), preemption]);
    }
}
