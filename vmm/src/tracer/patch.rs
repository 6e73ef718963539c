//! Rewriting sites: verify, write, read back, remember, restore.

use super::arch::{GuestCode, Hook};
use super::ftrace::{self, Records};
use super::guest::{Guest, GuestError, Image};
use super::trace::Ops;
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
    /// It lost what was prepared when tracing began, and it is not safe to prepare
    /// it again while the guest runs.
    Unprepared,
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
            Self::Unprepared => f.write_str("the guest's ftrace has used it since tracing began"),
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

/// A few bytes of guest memory, before and after. No context of the guest can stand
/// inside of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edit {
    physical: u64,
    len: usize,
    original: [u8; 8],
    ours: [u8; 8],
}

impl Edit {
    /// `None` unless both are of one length, up to 8.
    pub(super) fn new(physical: u64, original: &[u8], ours: &[u8]) -> Option<Self> {
        let len = original.len();
        let mut edit = Self { physical, len, original: [0; 8], ours: [0; 8] };
        edit.original.get_mut(..len)?.copy_from_slice(original);
        (ours.len() == len).then(|| edit.ours[..len].copy_from_slice(ours))?;
        Some(edit)
    }

    fn holds(&self, guest: &dyn Guest, bytes: &[u8; 8]) -> Result<bool, GuestError> {
        let mut now = [0; 8];
        guest.read(self.physical, &mut now[..self.len])?;
        Ok(now == *bytes)
    }

    fn write(&self, guest: &dyn Guest, bytes: &[u8; 8]) -> Result<(), GuestError> {
        if self.len == 8 && self.physical.is_multiple_of(8) {
            guest.write_u64(self.physical, u64::from_le_bytes(*bytes))
        } else {
            guest.write(self.physical, &bytes[..self.len])
        }
    }
}

/// A site that holds our call.
#[derive(Clone, Debug)]
struct Held {
    site: usize,
    /// `None`: a trap.
    ops: Option<Ops>,
    init: bool,
    /// In the order in which they are written.
    edits: Vec<Edit>,
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

/// A guest at rest, what is known of it, and the code in it.
pub(super) struct Place<'a> {
    pub(super) guest: &'a dyn Guest,
    pub(super) image: &'a Image,
    pub(super) kernel: &'a Kernel,
    pub(super) code: &'a dyn GuestCode,
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

    /// The same with what each has.
    pub(super) fn sites_with_ops(&self) -> impl Iterator<Item = (usize, Ops)> {
        self.held.iter().filter_map(|held| Some((held.site, held.ops?)))
    }

    /// Lets sites (indices into `kernel.sites()`) do what the hook beside each says. All
    /// vCPUs are paused. Returns what was skipped.
    ///
    /// # Errors
    /// When a write fails half-way; every site touched by this call is put back
    /// first.
    pub(super) fn hold<'a>(
        &mut self,
        place: &Place<'_>,
        records: &Records,
        sites: impl IntoIterator<Item = (usize, Hook<'a>)>,
    ) -> Result<Vec<Skip>, GuestError> {
        let guest = place.guest;
        let before = self.held.len();
        let mut skipped = Vec::new();
        for (index, hook) in sites {
            let Some(site) = place.kernel.sites().get(index) else { continue };
            match self.check(place, records, index, site, hook) {
                Err(reason) => skipped.push(Skip { site: index, reason }),
                Ok(held) => match held.write(guest) {
                    Ok(true) => {
                        self.flagged.insert(index);
                        self.held.push(held);
                    }
                    Ok(false) => {
                        held.undo(guest)?;
                        skipped.push(Skip { site: index, reason: SkipReason::ReadBack });
                    }
                    Err(error) => {
                        let _ = held.undo(guest);
                        for held in self.held.split_off(before) {
                            let _ = held.undo(guest);
                        }
                        return Err(error);
                    }
                },
            }
        }
        Ok(skipped)
    }

    fn check(
        &self,
        place: &Place<'_>,
        records: &Records,
        index: usize,
        site: &Site,
        hook: Hook<'_>,
    ) -> Result<Held, SkipReason> {
        let init = site.section == SiteSection::InitText;
        if init && self.freed {
            return Err(SkipReason::Freed);
        }
        let edits = place.code.edits(place.guest, place.image, site, hook)?;
        let record = records
            .find(place.image.runtime(place.code.record(site)))
            .ok_or(SkipReason::Unknown)?;
        if record.flags & ftrace::ENABLED != 0 {
            return Err(SkipReason::GuestEnabled);
        }
        if record.flags & ftrace::DISABLED != 0 && !self.flagged.contains(&index) {
            return Err(SkipReason::GuestDisabled);
        }
        let ops = match hook {
            Hook::Call(ops) => Some(ops),
            Hook::Trap(_) => None,
        };
        Ok(Held { site: index, ops, init, edits, flags_at: record.flags_at })
    }

    /// Whether the guest has freed `.init.text`.
    pub(super) fn freed(&self) -> bool {
        self.freed
    }

    /// Gives every held site of `.init.text` back, before the guest frees that
    /// memory; none of it is written ever after. The guest drops its records of
    /// these sites next: no flag to clear.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub fn release_init(&mut self, guest: &dyn Guest) -> Result<Restored, GuestError> {
        self.freed = true;
        self.release(guest, |held| held.init)
    }

    /// Gives back the held sites for which `wanted` (of an index) is true. The guest
    /// keeps refusing them, so that they can be held again at any time.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn release_if(
        &mut self,
        guest: &dyn Guest,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<Restored, GuestError> {
        self.release(guest, |held| wanted(held.site))
    }

    /// Lets the guest use all sites itself again that are not held: only while none
    /// of its tracers is active, since it does its books by that flag.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn forget(
        &mut self,
        place: &Place<'_>,
        records: &Records,
    ) -> Result<(), GuestError> {
        for index in std::mem::take(&mut self.flagged) {
            let Some(site) = place.kernel.sites().get(index) else { continue };
            if site.section == SiteSection::InitText && self.freed {
                continue;
            }
            if let Some(record) = records.find(place.image.runtime(place.code.record(site))) {
                set_flag(place.guest, record.flags_at, false)?;
            }
        }
        self.flagged = self.sites().collect();
        Ok(())
    }

    fn release(
        &mut self,
        guest: &dyn Guest,
        wanted: impl Fn(&Held) -> bool,
    ) -> Result<Restored, GuestError> {
        let mut restored = Restored::default();
        let (out, kept) = self.held.drain(..).partition(|held| wanted(held));
        self.held = kept;
        let out: Vec<Held> = out;
        for held in out {
            if held.restore(guest)? {
                restored.sites += 1;
            } else {
                restored.foreign.push(held.site);
            }
        }
        Ok(restored)
    }
}

impl Held {
    /// Marks the site in the guest's books, patches it, reads all back.
    fn write(&self, guest: &dyn Guest) -> Result<bool, GuestError> {
        set_flag(guest, self.flags_at, true)?;
        for edit in &self.edits {
            edit.write(guest, &edit.ours)?;
            if !edit.holds(guest, &edit.ours)? {
                return Ok(false);
            }
        }
        Ok(guest.read_u64(self.flags_at)? & ftrace::DISABLED != 0)
    }

    fn undo(&self, guest: &dyn Guest) -> Result<(), GuestError> {
        for edit in self.edits.iter().rev() {
            edit.write(guest, &edit.original)?;
        }
        set_flag(guest, self.flags_at, false)
    }

    /// Puts the site back if all of it is still ours; else leaves it alone. Whether
    /// it is as it was.
    fn restore(&self, guest: &dyn Guest) -> Result<bool, GuestError> {
        if self.all(guest, |edit| &edit.ours)? {
            for edit in self.edits.iter().rev() {
                edit.write(guest, &edit.original)?;
            }
        }
        self.all(guest, |edit| &edit.original)
    }

    fn all(
        &self,
        guest: &dyn Guest,
        bytes: impl Fn(&Edit) -> &[u8; 8],
    ) -> Result<bool, GuestError> {
        for edit in &self.edits {
            if !edit.holds(guest, bytes(edit))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn set_flag(guest: &dyn Guest, flags_at: u64, set: bool) -> Result<(), GuestError> {
    let flags = guest.read_u64(flags_at)?;
    let flags = if set { flags | ftrace::DISABLED } else { flags & !ftrace::DISABLED };
    guest.write(flags_at, &flags.to_le_bytes())
}
