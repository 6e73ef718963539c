//! Instructions that switch interrupts or preemption, redirected to programs.
//!
//! Each is replaced by one jump or call. No context can be suspended inside of it, before or after
//! the change (`x86_64/switch_stubs.rs`, `riscv64/switch_stubs.rs`), so it can be changed and restored
//! in any pause. Stubs may be written while the guest runs: no context executes them before that.

use super::edit::{Restored, SkipReason};
use super::error::TraceError;
use super::guest::Guest;
use super::modules::FoundSwitches;
use super::sets::Among;
use super::switch_places::{AllSwitches, of};
use super::trace::Attachment;
use super::view::View;
use crate::kernel::Kernel;
use crate::kernel::preemptirq::SwitchSite;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

impl Attachment {
    /// Looks for such instructions in modules that are loaded, in which nobody has done so yet, or
    /// (`again`) in which not all was seen; what was found in each. No module comes or goes meanwhile.
    ///
    /// # Errors
    /// When those of the kernel are not known.
    pub fn find_module_switches(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        again: bool,
    ) -> Result<Vec<FoundSwitches>, TraceError> {
        let unpatched = self.modules_unpatched(guest);
        let Some(traps) = &self.module_traps else { return Ok(Vec::new()) };
        let kernel = (kernel, of(kernel)?.all().len());
        let (image, offsets, count) = (&self.image, &traps.offsets, self.code.preempt_count());
        Ok(self.modules.find_switches(&unpatched, image, kernel, (offsets, count), again))
    }

    /// Those of modules that are loaded, as far as somebody has looked for them, with their indices:
    /// numbers behind those of the kernel's.
    pub fn module_switches(&self) -> impl Iterator<Item = (usize, &SwitchSite)> {
        self.modules.switches()
    }

    /// One of these, by its index.
    #[must_use]
    pub fn module_switch(&self, index: usize) -> Option<&SwitchSite> {
        self.modules.switch(index).map(|(site, _)| site)
    }

    /// The modules that have them, by their indices.
    #[must_use]
    pub fn modules_of_switches(&self) -> FxHashMap<usize, &Arc<str>> {
        self.modules.modules_of_switches()
    }

    /// Gives those of a module back, or those in a part of its memory, and forgets them.
    pub(super) fn leave_switches(
        &mut self,
        guest: &dyn Guest,
        address: u64,
        range: Option<&Range<u64>>,
    ) -> Result<(), TraceError> {
        let switches = self.modules.switches_of(&self.image, address, range);
        if switches.is_empty() {
            return Ok(());
        }
        // What is not ours any more is the guest's, and goes with it.
        let restored = self.disable_switches(guest, &switches);
        self.modules.forget_switches(address, &switches);
        restored.map(|_| ())
    }

    /// Makes the stubs that lead from instructions (indices into
    /// [`Switches::all`](crate::kernel::preemptirq::Switches::all), or numbers of those of modules) to
    /// the programs beside them, where there are none yet; what the records of each have in place of a
    /// site, `None` for one that has no stub: there is no room for one of a module.
    ///
    /// # Errors
    /// When there is no place for those of the kernel; no instruction has changed then.
    pub fn switch_stubs(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        wanted: &[(usize, u16)],
    ) -> Result<Vec<Option<u32>>, TraceError> {
        let all = AllSwitches { kernel: of(kernel)?, modules: &self.modules };
        self.code.switch_stubs(guest, &self.image, (kernel, all), wanted)
    }

    /// Those (indices) that are ours, with the program of each.
    pub fn switches(&self) -> impl Iterator<Item = (usize, u16)> + Clone {
        self.switches.with_programs()
    }

    /// How many are ours.
    #[must_use]
    pub fn held_switches(&self) -> usize {
        self.switches.len()
    }

    /// Lets instructions lead to programs, of which [`Attachment::switch_stubs`] has made stubs. All
    /// vCPUs are paused. Returns what was skipped.
    ///
    /// # Errors
    /// When alternatives are not patched yet, or guest memory cannot be used half-way; all are then
    /// as before.
    pub fn enable_switches(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        wanted: &[(usize, u16)],
    ) -> Result<Vec<(usize, SkipReason)>, TraceError> {
        if !self.is_settled() && !wanted.is_empty() {
            return Err(TraceError::Code("its alternatives are not patched yet"));
        }
        let all = AllSwitches { kernel: of(kernel)?, modules: &self.modules };
        let told =
            |&(index, program): &(usize, u16)| Some((all.get(index)?.kind.switch(), program));
        for (switch, program) in wanted.iter().filter_map(told).collect::<BTreeSet<_>>() {
            self.code.lead_switches(guest, switch, program)?;
        }
        let view = View::with_annex(guest, self.near, &*self.memory);
        let edit = |index: usize, program| {
            let (site, spot) = all.place(&self.image, index)?;
            Some(self.code.switch(&view, &self.image, (index, site, &spot), program))
        };
        Ok(self.switches.hold(&view, wanted, edit)?)
    }

    /// Gives instructions (indices) back. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn disable_switches(
        &mut self,
        guest: &dyn Guest,
        sites: &[usize],
    ) -> Result<Restored, TraceError> {
        let mut sites = Among::new(sites.to_vec());
        let view = View::with_annex(guest, self.near, &*self.memory);
        let released = self.switches.release_if(&view, |site| sites.contains(&site));
        let held = &mut self.switches.with_programs().map(|(_, program)| program);
        self.code.rest_switches(guest, held)?;
        Ok(released?)
    }
}
