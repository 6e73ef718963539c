//! Rewriting sites: verify, write, read back, remember, restore.

use super::arch::site;
use super::ftrace::{self, Records};
use super::guest::{Guest, GuestError, Image};
use crate::kernel::{Kernel, Site, SiteSection};
use std::collections::BTreeSet;

/// Why a site is not traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SkipReason {
    /// It holds something that is not the kernel's own disabled site.
    GuestOwned(&'static str),
    /// The guest's ftrace is active on it, though not by its bytes.
    GuestEnabled,
    /// The guest has disabled it for good (`FTRACE_FL_DISABLED`).
    GuestDisabled,
    /// The guest's ftrace does not know it.
    Unknown,
    /// It is in memory of `.init.text` that the guest has freed.
    Freed,
    /// The trampoline is out of reach of a call.
    OutOfReach,
    /// It is not in guest RAM.
    NoRam,
    /// It did not hold what was written to it.
    ReadBack,
}

impl std::fmt::Display for SkipReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::GuestOwned(what) => write!(f, "owner: guest (holds {what})"),
            Self::GuestEnabled => f.write_str("owner: guest (its ftrace is active)"),
            Self::GuestDisabled => f.write_str("disabled by the guest"),
            Self::Unknown => f.write_str("unknown to the guest's ftrace"),
            Self::Freed => f.write_str("in freed .init.text"),
            Self::OutOfReach => f.write_str("out of reach of a call"),
            Self::NoRam => f.write_str("not in guest RAM"),
            Self::ReadBack => f.write_str("did not take the patch"),
        }
    }
}

/// A site that was left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skip {
    /// Index into [`Kernel::sites`].
    pub site: usize,
    /// Why.
    pub reason: SkipReason,
}

/// A site that holds our call.
#[derive(Clone, Copy, Debug)]
struct Held {
    site: usize,
    init: bool,
    physical: u64,
    original: [u8; site::LEN],
    ours: [u8; site::LEN],
    flags_at: u64,
}

/// What giving sites back came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Sites that hold their original bytes again.
    pub sites: usize,
    /// Sites (indices) that did not hold our call any more and were left alone.
    pub foreign: Vec<usize>,
}

/// All sites that are ours right now.
#[derive(Debug, Default)]
pub struct Patcher {
    held: Vec<Held>,
    /// Sites (indices) that the guest refuses on our account, held or not.
    flagged: BTreeSet<usize>,
    freed: bool,
}

/// What a held site is to contain.
#[derive(Clone, Copy, Debug)]
pub(super) enum Patch {
    /// A call to this address.
    Call(u64),
    /// An instruction that exits to the VMM, as short as the site or shorter.
    Trap([u8; 2]),
}

impl Patch {
    fn bytes(self, address: u64, original: [u8; site::LEN]) -> Option<[u8; site::LEN]> {
        match self {
            Self::Call(target) => site::call(address, target),
            Self::Trap(trap) => {
                let mut bytes = original;
                bytes.get_mut(..trap.len())?.copy_from_slice(&trap);
                Some(bytes)
            }
        }
    }
}

impl Patcher {
    /// Sites held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether no site is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Indices of the sites held.
    pub fn sites(&self) -> impl Iterator<Item = usize> {
        self.held.iter().map(|held| held.site)
    }

    /// Puts `patch` on `sites` (indices into `kernel.sites()`). All vCPUs are
    /// paused. Returns what was skipped.
    ///
    /// # Errors
    /// When a write fails half-way; every site touched by this call is put back
    /// first.
    pub(super) fn hold(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        records: &Records,
        sites: &[usize],
        patch: Patch,
    ) -> Result<Vec<Skip>, GuestError> {
        let before = self.held.len();
        let mut skipped = Vec::new();
        for &index in sites {
            let Some(site) = kernel.sites().get(index) else { continue };
            match self.check(guest, image, records, index, site, patch) {
                Err(reason) => skipped.push(Skip { site: index, reason }),
                Ok(held) => {
                    let written = write(guest, &held);
                    match written {
                        Ok(true) => {
                            self.flagged.insert(index);
                            self.held.push(held);
                        }
                        Ok(false) => {
                            undo(guest, &held)?;
                            skipped.push(Skip { site: index, reason: SkipReason::ReadBack });
                        }
                        Err(error) => {
                            let _ = undo(guest, &held);
                            for held in self.held.split_off(before) {
                                let _ = undo(guest, &held);
                            }
                            return Err(error);
                        }
                    }
                }
            }
        }
        Ok(skipped)
    }

    fn check(
        &self,
        guest: &dyn Guest,
        image: &Image,
        records: &Records,
        index: usize,
        site: &Site,
        patch: Patch,
    ) -> Result<Held, SkipReason> {
        let init = site.section == SiteSection::InitText;
        if init && self.freed {
            return Err(SkipReason::Freed);
        }
        let address = image.runtime(site.location);
        let physical = image.physical_of(site.location);
        let mut original = [0; site::LEN];
        guest.read(physical, &mut original).map_err(|_| SkipReason::NoRam)?;
        if original != site::DISABLED {
            return Err(SkipReason::GuestOwned(site::describe(original)));
        }
        let record = records.find(address).ok_or(SkipReason::Unknown)?;
        if record.flags & ftrace::ENABLED != 0 {
            return Err(SkipReason::GuestEnabled);
        }
        if record.flags & ftrace::DISABLED != 0 && !self.flagged.contains(&index) {
            return Err(SkipReason::GuestDisabled);
        }
        let ours = patch.bytes(address, original).ok_or(SkipReason::OutOfReach)?;
        Ok(Held { site: index, init, physical, original, ours, flags_at: record.flags_at })
    }

    /// Gives every held site of `.init.text` back, before the guest frees that
    /// memory; none of it is written ever after.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub fn release_init(&mut self, guest: &dyn Guest) -> Result<Restored, GuestError> {
        self.freed = true;
        // The guest drops its records of these sites next: no flag to clear.
        self.release(guest, false, |held| held.init)
    }

    /// Gives every held site back. With `flags` the guest may use the sites
    /// itself again: only while none of its tracers is active, since it does its
    /// books by that flag.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn release_all(
        &mut self,
        guest: &dyn Guest,
        flags: bool,
    ) -> Result<Restored, GuestError> {
        self.release(guest, flags, |_| true)
    }

    /// Gives one site back, if it is held. The guest keeps refusing it, so that it
    /// can be held again at any time.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn release_one(
        &mut self,
        guest: &dyn Guest,
        site: usize,
    ) -> Result<Restored, GuestError> {
        self.release(guest, false, |held| held.site == site)
    }

    /// Gives back the held sites for which `wanted` is true.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    fn release(
        &mut self,
        guest: &dyn Guest,
        flags: bool,
        wanted: impl Fn(&Held) -> bool,
    ) -> Result<Restored, GuestError> {
        let mut restored = Restored::default();
        let (out, kept) = self.held.drain(..).partition(|held| wanted(held));
        self.held = kept;
        let out: Vec<Held> = out;
        for held in out {
            let mut now = [0; site::LEN];
            guest.read(held.physical, &mut now)?;
            if now == held.ours {
                guest.write(held.physical, &held.original)?;
                guest.read(held.physical, &mut now)?;
            }
            if now == held.original {
                restored.sites += 1;
            } else {
                restored.foreign.push(held.site);
            }
            if flags {
                set_flag(guest, held.flags_at, false)?;
                self.flagged.remove(&held.site);
            }
        }
        Ok(restored)
    }
}

/// Marks the site in the guest's books, patches it, reads both back.
fn write(guest: &dyn Guest, held: &Held) -> Result<bool, GuestError> {
    set_flag(guest, held.flags_at, true)?;
    guest.write(held.physical, &held.ours)?;
    let mut now = [0; site::LEN];
    guest.read(held.physical, &mut now)?;
    Ok(now == held.ours && guest.read_u64(held.flags_at)? & ftrace::DISABLED != 0)
}

fn undo(guest: &dyn Guest, held: &Held) -> Result<(), GuestError> {
    guest.write(held.physical, &held.original)?;
    set_flag(guest, held.flags_at, false)
}

fn set_flag(guest: &dyn Guest, flags_at: u64, set: bool) -> Result<(), GuestError> {
    let flags = guest.read_u64(flags_at)?;
    let flags = if set { flags | ftrace::DISABLED } else { flags & !ftrace::DISABLED };
    guest.write(flags_at, &flags.to_le_bytes())
}
