//! Triggers that come and go while the guest works.

use super::Driver;
use crate::exact::{COUNTED, KeptTrigger};
use crate::random::Random;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use vmtrace::serve::{Control, TriggerAction};

/// Triggers whose counts are known, and those that come and go beside them, all on that function too; and the calls
/// at which they come: about as many as are made in a round.
const KEPT: usize = 2;
pub(super) const NOISE: usize = 2;
const CALLS: usize = 3000;

impl Driver<'_> {
    /// Numbers of the triggers that have not come.
    pub(super) fn unfired(&self) -> Result<BTreeSet<u64>> {
        let list: serde_json::Value = serde_json::from_str(&self.command(&Control::TriggerList)?)?;
        let all = list["triggers"].as_array().context("no triggers")?;
        let unfired = all.iter().filter(|one| one["fired"] == false);
        Ok(unfired.filter_map(|one| one["id"].as_u64()).collect())
    }

    pub(super) fn trigger_ids(&self) -> impl Iterator<Item = u64> {
        let kept = self.triggers.iter().map(|kept| kept.id);
        kept.chain(self.noise_triggers.into_iter().flatten()).chain(self.adding)
    }

    /// Takes note that a trigger is gone.
    fn forget(&mut self, id: u64) {
        self.triggers.retain(|kept| kept.id != id);
        self.noise_triggers
            .iter_mut()
            .filter(|noise| **noise == Some(id))
            .for_each(|noise| *noise = None);
        self.tally.triggers += 1;
    }

    /// Adds a trigger that does nothing to what is traced, at one of the calls to come; its number, if there was a
    /// place for it.
    fn add_trigger(&mut self, random: &mut Random) -> Result<Option<KeptTrigger>> {
        let exact = &COUNTED[random.below(COUNTED.len())];
        let call = 1 + random.below(CALLS) as u64;
        // Tracing that goes on is not begun.
        let action = [TriggerAction::Mark, TriggerAction::Start][random.below(2)];
        let full = self.tally.full;
        self.change(&Control::TriggerAdd { action, spec: exact.trigger(call)? }, |driver| {
            let id = driver.said.strip_prefix("trigger ").and_then(|said| said.split_once(' '));
            driver.adding = id.and_then(|(id, _)| id.parse().ok());
            driver.tally.triggers += 1;
        })?;
        let added = self.adding.take();
        ensure!(added.is_some() || self.tally.full > full, "no number in {:?}", self.said);
        Ok(added.map(|id| KeptTrigger::new(id, exact, call)))
    }

    /// Adds or removes one beside those whose counts are known.
    pub(super) fn disturb_triggers(&mut self, random: &mut Random) -> Result<()> {
        let which = random.below(NOISE);
        match self.noise_triggers[which] {
            Some(id) => {
                let remove = Control::TriggerRemove(u32::try_from(id)?);
                self.change(&remove, |driver| driver.forget(id))
            }
            None => {
                let added = self.add_trigger(random)?;
                self.noise_triggers[which] = added.map(|trigger| trigger.id);
                Ok(())
            }
        }
    }

    /// Others stay from now on, whose counts are known, in place of some that have stayed until now.
    pub(super) fn change_triggers(&mut self, random: &mut Random) -> Result<()> {
        if self.triggers.len() == KEPT {
            let id = self.triggers[random.below(KEPT)].id;
            self.change(&Control::TriggerRemove(u32::try_from(id)?), |driver| driver.forget(id))?;
        }
        for _ in self.triggers.len()..KEPT {
            let added = self.add_trigger(random)?;
            self.triggers.extend(added);
        }
        Ok(())
    }

    /// All go.
    pub(super) fn remove_triggers(&mut self) -> Result<()> {
        for id in self.trigger_ids().collect::<Vec<_>>() {
            self.change(&Control::TriggerRemove(u32::try_from(id)?), |driver| driver.forget(id))?;
        }
        Ok(())
    }
}
