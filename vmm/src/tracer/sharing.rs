//! Sites that the guest's own ftrace uses as well.
//!
//! During an update by the guest's ftrace, the sites that it changes are given back; afterwards they
//! are taken again. A site that the guest uses then has a call of a program that records and
//! continues with the guest's.

use super::arch::Hook;
use super::edit::SkipReason;
use super::error::TraceError;
use super::ftrace::{self, Records};
use super::guest::Guest;
use super::patch::{Place, Sharing, Skip};
use super::spot::Spot;
use super::stops::Moment;
use super::trace::Attachment;
use super::view::View;
use crate::kernel::{Kernel, Site, SiteSection};
use std::collections::BTreeMap;

/// What has become of sites at the beginning of an update.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lent {
    /// So many are the guest's for now.
    pub sites: usize,
    /// These (indices) did not hold our call.
    pub foreign: Vec<usize>,
}

impl Attachment {
    /// Lets the guest stop, by `trap`, before and after each update of its own ftrace; where it
    /// then stands (run-time addresses). To be called before any site is held, when no such update
    /// can be under way. All vCPUs are paused.
    ///
    /// # Errors
    /// When the kernel updates sites in an unknown way: it is refused what is held.
    pub fn share(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        trap: &[u8],
    ) -> Result<Vec<u64>, TraceError> {
        // Without this no update could be understood.
        ftrace::is_on(guest, &self.image, kernel)?;
        let stops = self.code.bracket(guest, &self.image, kernel, trap)?;
        let view = View::with_annex(guest, self.near, &*self.memory);
        if !stops.lay(&view)? {
            return Err(TraceError::Ftrace("its code cannot be changed"));
        }
        if self.code.prepares() {
            // Those that the guest has traced before it came here.
            let all = Spot::all(kernel, &self.image);
            if let Err(error) = self.code.prepare(guest, &view, &self.image, &all) {
                stops.remove(&view)?;
                return Err(error);
            }
        }
        self.patcher.share();
        let traps = stops.traps().collect();
        self.sharing = Some(Sharing { stops, lent: None, touched: Vec::new() });
        Ok(traps)
    }

    /// Which moment of an update a vCPU that stands at this run-time address is at, and where it
    /// goes on from there.
    #[must_use]
    pub fn moment(&self, address: u64) -> Option<(Moment, u64)> {
        self.sharing.as_ref()?.stops.find(address)
    }

    /// Whether an update of the guest's ftrace is under way. No site may be taken then.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.sharing.as_ref().is_some_and(|sharing| sharing.lent.is_some())
    }

    /// Whether a site can be taken now: not while an update is under way that touches it.
    #[must_use]
    pub fn can_take(&self, kernel: &Kernel, site: usize) -> bool {
        let Some(Sharing { lent: Some(_), touched, .. }) = &self.sharing else { return true };
        let spot = self.modules.spot(kernel, &self.image, site);
        let record = spot.map(|spot| self.image.runtime(self.code.record(&spot.site)));
        record.is_some_and(|record| touched.binary_search(&record).is_err())
    }

    /// An update begins: gives back the sites that it touches. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used, or an update is under way already. The hold on the guest
    /// must end then.
    pub fn lend(&mut self, guest: &dyn Guest, kernel: &Kernel) -> Result<Lent, TraceError> {
        if self.is_lent() {
            return Err(TraceError::Ftrace("an update begins within another"));
        }
        let on = ftrace::is_on(guest, &self.image, kernel)?;
        let records = Records::read(guest, &self.image, kernel, &self.books, Vec::new())?;
        let view = self.view(guest, &records);
        let (image, modules) = (&self.image, &self.modules);
        let place = Place { view, image, kernel, modules, code: &*self.code };
        let lent = self.patcher.lend(&place, &records, |flags| ftrace::is_touched(flags, on));
        self.changes.look(&self.patcher, &self.counters);
        let (lent, restored) = lent?;
        let sites = lent.len();
        if let Some(sharing) = &mut self.sharing {
            sharing.lent = Some(lent);
            sharing.touched = records.with_flags(|flags| ftrace::is_touched(flags, on));
        }
        self.prepare_touched(guest, kernel, false)?;
        Ok(Lent { sites, foreign: restored.foreign })
    }

    /// An update is over: takes again what was given back for it, traps as `trap`. Returns how many
    /// that were, and what was left to the guest. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used, or no update was under way. The hold on the guest must end
    /// then.
    pub fn take_again(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        trap: &[u8],
    ) -> Result<(usize, Vec<Skip>), TraceError> {
        let lent = self.sharing.as_mut().and_then(|sharing| sharing.lent.take());
        let lent = lent.ok_or(TraceError::Ftrace("an update ends that did not begin"))?;
        self.prepare_touched(guest, kernel, true)?;
        if lent.is_empty() {
            return Ok((0, Vec::new()));
        }
        let hooks = lent.iter().map(|&(site, program)| match program {
            Some(program) => (site, Hook::Call(program)),
            None => (site, Hook::Trap(trap)),
        });
        let mut skipped = self.hold(guest, kernel, hooks)?;
        // Given back for good meanwhile.
        skipped.retain(|skip| skip.reason != SkipReason::Freed);
        Ok((lent.len(), skipped))
    }

    /// Lets the sites that an update touches be held again behind it, or be what the guest has left
    /// there before it: ours or not. All vCPUs are paused.
    fn prepare_touched(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        prepared: bool,
    ) -> Result<(), TraceError> {
        let touched = self.sharing.as_ref().map_or(&[][..], |sharing| &sharing.touched);
        if touched.is_empty() || !self.code.prepares() {
            return Ok(());
        }
        let record = |site: &Site| self.image.runtime(self.code.record(site));
        // Records of the image's sites are in the order of the sites, and those of modules are few.
        let sites = kernel.sites();
        let found =
            touched.iter().filter_map(|address| sites.binary_search_by_key(address, record).ok());
        let of_modules = self.modules.present().map(|(site, _)| site);
        let spots =
            found.chain(of_modules).filter_map(|site| self.modules.spot(kernel, &self.image, site));
        let is_meant = |spot: &Spot| {
            let is_gone = self.patcher.freed() && spot.site.section == SiteSection::InitText;
            !is_gone && touched.binary_search(&record(&spot.site)).is_ok()
        };
        let spots: Vec<Spot> = spots.filter(is_meant).collect();
        let view = View::ram(guest, [self.near; 2]);
        if prepared {
            self.code.prepare(guest, &view, &self.image, &spots)?;
        } else {
            self.code.unprepare(&view, &self.image, &spots)?;
        }
        Ok(())
    }

    /// A site that is the guest's while its update lasts is not to be ours after that.
    pub(super) fn keep_from_taking(&mut self, site: usize) {
        if let Some(lent) = self.sharing.as_mut().and_then(|sharing| sharing.lent.as_mut()) {
            lent.retain(|&(other, _)| other != site);
        }
    }

    /// Makes the code by which these sites go on with the guest's calls that are in them.
    pub(super) fn chain<'a>(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        records: &Records,
        sites: impl Iterator<Item = (usize, Hook<'a>)>,
    ) {
        if self.sharing.is_none() || !records.any_enabled() {
            return;
        }
        let view = self.view(guest, records);
        for (site, hook) in sites {
            let spot = self.modules.spot(kernel, &self.image, site);
            let call = spot.and_then(|spot| self.code.guest_call(&view, &self.image, &spot));
            let Some(call) = call else { continue };
            let made = match hook {
                Hook::Call(program) => self.code.chain(guest, program, call),
                Hook::Trap(_) => self.code.chain_trap(guest, call),
            };
            if let Err(error) = made {
                // The site will have no stub, and be skipped for that.
                log::debug!("no chain to {:#x}: {error}", call.target);
            }
        }
    }

    /// Of the sites that are ours, those that the guest's own ftrace uses as well: how many, by what
    /// they go on to (run-time addresses).
    #[must_use]
    pub fn shared(&self) -> BTreeMap<u64, usize> {
        let mut shared = BTreeMap::new();
        for target in self.patcher.guest_calls() {
            *shared.entry(target).or_default() += 1;
        }
        shared
    }

    /// The guest's updates go unseen from now on. No site is held.
    pub(super) fn end_sharing(&mut self, guest: &dyn Guest) -> Result<bool, TraceError> {
        let Some(Sharing { stops, .. }) = self.sharing.take() else { return Ok(true) };
        let view = View::with_annex(guest, self.near, &*self.memory);
        Ok(stops.remove(&view)?)
    }
}
