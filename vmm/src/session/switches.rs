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

/// Places of modules that switch interrupts or preemption while that is traced, and are not recorded.
#[derive(Debug, Default)]
pub(super) struct Unswitched {
    /// How many each module has, of interrupts and of preemption, and why.
    modules: BTreeMap<Arc<str>, ([usize; 2], &'static str)>,
}

impl Unswitched {
    fn add(&mut self, module: &Arc<str>, counts: [usize; 2], why: &'static str) {
        let is_kept = self.modules.len() < MOST_MODULES || self.modules.contains_key(module);
        if counts != [0; 2] && is_kept {
            self.modules.insert(Arc::clone(module), (counts, why));
        }
    }

    /// What the summary says of them.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for (of, what) in ["interrupts", "preemption"].into_iter().enumerate() {
            let mut reasons: BTreeMap<&str, Vec<(usize, &str)>> = BTreeMap::new();
            for (module, (counts, why)) in &self.modules {
                if let Some(&count) = counts.get(of).filter(|&&count| count > 0) {
                    reasons.entry(why).or_default().push((count, module));
                }
            }
            for (why, mut modules) in reasons {
                modules.sort_by_key(|&(count, _)| std::cmp::Reverse(count));
                let sum: usize = modules.iter().map(|(count, _)| count).sum();
                let examples = modules.iter().take(EXAMPLES);
                let examples: Vec<_> =
                    examples.map(|(count, module)| format!("{module} {count}")).collect();
                let more = modules.len().saturating_sub(EXAMPLES);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                notes.push(format!(
                    "{sum} places of modules that switch {what} are not recorded: {why} ({}{more})",
                    examples.join(", ")
                ));
            }
        }
        notes
    }
}

impl Controller {
    /// Looks for what modules that are loaded switch, where nobody has done so yet, if that is traced;
    /// how many places were found.
    pub(super) fn look_for_module_switches(
        &mut self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
    ) -> usize {
        let traced = |interrupts: bool| {
            let mut events = self.tracing.events.iter().filter_map(TracedEvent::switch);
            events.any(|switch: Switch| switch.is_of_interrupts() == interrupts)
        };
        let traced = [true, false].map(traced);
        if traced == [false; 2] {
            return 0;
        }
        let all = match attachment.find_module_switches(ram, &self.kernel) {
            Ok(all) => all,
            Err(error) => {
                self.note_once(format!("what modules switch is not recorded: {error}"));
                return 0;
            }
        };
        for FoundSwitches { module, unusable, why, .. } in &all {
            match unusable {
                Ok(counts) => {
                    let [interrupts, preemption] = *counts;
                    let counts = [(interrupts, traced[0]), (preemption, traced[1])]
                        .map(|(count, traced)| if traced { count } else { 0 });
                    self.unswitched.add(module, counts, why);
                }
                // What one lacks others lack, too.
                Err(error) if self.told_of_modules.insert(format!("switches: {error}")) => {
                    self.note(format!(
                        "where modules (such as {module}) switch interrupts and preemption is not \
                         recorded: {error}"
                    ));
                }
                Err(_) => {}
            }
        }
        all.iter().map(|found| found.places).sum()
    }

    /// Makes stubs for these events (indices, with their programs), as far as instructions tell them.
    pub(super) fn prepare_switches(
        &self,
        ram: &dyn Guest,
        attachment: &mut Attachment,
        planned: &[(usize, u16)],
        (wanted, targets): (&mut Wanted, &mut Vec<EventTarget>),
    ) -> Result<(), TraceError> {
        for &(index, program) in planned {
            let Some(event) = self.tracing.events.get(index) else { continue };
            let Some(switch) = event.switch() else { continue };
            let switches = self.kernel.switches();
            let all = switches.map_err(|error| TraceError::Kernel(error.to_string()))?.all();
            let all = all.iter().enumerate().chain(attachment.module_switches());
            let own = all.filter(|(_, site)| site.kind.switch() == switch);
            let sites: Vec<(usize, u16)> = own.map(|(site, _)| (site, program)).collect();
            let words = attachment.switch_stubs(ram, &self.kernel, &sites)?;
            // Places may share a stub.
            for word in words.into_iter().flatten().collect::<BTreeSet<u32>>() {
                let (address, event) = (event.address, Arc::clone(&event.fields));
                targets.push(EventTarget { address, word, event });
            }
            wanted.switches.extend(sites);
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

    /// Says which are left alone.
    pub(super) fn switches_skipped(
        &mut self,
        attachment: &Attachment,
        skipped: &[(usize, SkipReason)],
    ) {
        // How many, and one of them.
        let mut reasons = BTreeMap::<_, (usize, usize)>::new();
        for &(site, reason) in skipped {
            let module = attachment.module_of_switch(site);
            reasons.entry((module, reason)).or_insert((0, site)).0 += 1;
        }
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

    #[test]
    fn what_is_not_recorded_is_told_by_reason_with_the_modules_that_have_most() {
        let mut all = Unswitched::default();
        assert_eq!(all.notes(), Vec::<String>::new());
        let counts =
            [("kvm", [5, 2]), ("rds", [7, 0]), ("none", [0, 0]), ("xfs", [1, 0]), ("a", [1, 0])];
        for (module, counts) in counts {
            all.add(&module.into(), counts, "no room");
        }
        // Loaded again it is the same one.
        all.add(&"rds".into(), [7, 0], "no room");
        assert_eq!(
            all.notes(),
            [
                "14 places of modules that switch interrupts are not recorded: no room (rds 7, kvm 5, \
                 a 1 and 1 more)",
                "2 places of modules that switch preemption are not recorded: no room (kvm 2)",
            ]
        );
        (0..2 * MOST_MODULES).for_each(|n| all.add(&n.to_string().into(), [1, 0], "no room"));
        assert_eq!(all.modules.len(), MOST_MODULES);
    }
}
