//! Instructions that switch interrupts and preemption, as they tell events.

use super::apply::Wanted;
use super::controller::Controller;
use super::plan::changes;
use crate::relay::EventTarget;
use crate::tracer::{Attachment, Guest, SkipReason, TraceError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

impl Controller {
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
            let own = all.iter().enumerate().filter(|(_, site)| site.kind.switch() == switch);
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
    pub(super) fn switches_skipped(&mut self, skipped: &[(usize, SkipReason)]) {
        let mut reasons: BTreeMap<SkipReason, (usize, usize)> = BTreeMap::new();
        for &(site, reason) in skipped {
            reasons.entry(reason).or_insert((0, site)).0 += 1;
        }
        for (reason, (count, site)) in reasons {
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
