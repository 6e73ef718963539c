//! Instructions that switch interrupts or preemption, redirected to programs.
//!
//! Each is replaced by one jump or call. No context can be suspended inside of it, before or after
//! the change (`x86_64/switch_stubs.rs`, `riscv64/switch_stubs.rs`), so it can be changed and restored
//! in any pause. Stubs may be written while the guest runs: no context executes them before that.

use super::edit::{Restored, SkipReason};
use super::error::TraceError;
use super::guest::Guest;
use super::sets::Among;
use super::trace::Attachment;
use super::view::View;
use crate::kernel::Kernel;
use crate::kernel::preemptirq::Switches;
use std::collections::BTreeSet;

pub(super) fn of(kernel: &Kernel) -> Result<&Switches, TraceError> {
    kernel.switches().map_err(|error| TraceError::Kernel(error.to_string()))
}

impl Attachment {
    /// Makes the stubs that lead from instructions (indices into [`Switches::all`]) to the programs
    /// beside them, where there are none yet; what the records of each have in place of a site.
    ///
    /// # Errors
    /// When there is no place for them; no instruction has changed then.
    pub fn switch_stubs(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        wanted: &[(usize, u16)],
    ) -> Result<Vec<Option<u32>>, TraceError> {
        self.code.switch_stubs(guest, &self.image, kernel, wanted)
    }

    /// Those (indices into [`Switches::all`]) that are ours, with the program of each.
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
        let all = of(kernel)?;
        let told =
            |&(index, program): &(usize, u16)| Some((all.all().get(index)?.kind.switch(), program));
        for (switch, program) in wanted.iter().filter_map(told).collect::<BTreeSet<_>>() {
            self.code.lead_switches(guest, switch, program)?;
        }
        let view = View::with_annex(guest, self.near, &*self.memory);
        let edit = |index: usize, program| {
            let site = all.all().get(index)?;
            Some(self.code.switch(&view, &self.image, (index, site), program).map(Into::into))
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
