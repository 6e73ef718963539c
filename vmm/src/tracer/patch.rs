//! Rewrites sites: verify, write, read back, remember, restore.

use super::arch::{GuestCode, Hook};
use super::edit::{Edit, Restored, SkipReason};
use super::ftrace::{self, Cursor, Record, Records};
use super::guest::GuestError;
use super::image::Image;
use super::modules::Modules;
use super::sets::{Among, SiteSet};
use super::spot::Spot;
use super::stops::{Moment, Stops};
use super::touched::touched;
use super::view::View;
use crate::kernel::{Kernel, Site, SiteSection};
use std::ops::Range;

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
    /// Run-time address to which the guest's own ftrace lets it go.
    guest_call: Option<u64>,
    /// Its edits are so many from here on in [`Patcher::edits`], in the order in which they
    /// are written.
    first_edit: usize,
    edits: u8,
    /// `None`: a trap.
    program: Option<u16>,
    init: bool,
}

/// All sites that are ours right now.
///
/// A guest waits while tens of thousands of them are written: nothing here is allocated for
/// each, or searched for.
#[derive(Debug, Default)]
pub struct Patcher {
    held: Vec<Held>,
    edits: Vec<Edit>,
    /// Those that the guest refuses on our account, held or not.
    flagged: SiteSet,
    /// Sites are shared with the guest, and not refused to it.
    shares: bool,
    freed: bool,
    /// Programs of those that were not found as they were left: something may still lead there.
    left: Vec<u16>,
}

/// Sites that are the guest's for a while, with what each had: a program, or a trap.
pub(super) type LentSites = Vec<(usize, Option<u16>)>;

/// How sites are shared with the guest's ftrace.
#[derive(Debug)]
pub(super) struct Sharing {
    pub(super) stops: Stops<Moment>,
    /// What is the guest's while its update lasts.
    pub(super) lent: Option<LentSites>,
    /// All that it touches (run-time addresses), in order.
    pub(super) touched: Vec<u64>,
}

/// A guest at rest, what is known of it, and the code in it.
pub(super) struct Place<'a> {
    pub(super) view: View<'a>,
    pub(super) image: &'a Image,
    pub(super) kernel: &'a Kernel,
    pub(super) modules: &'a Modules,
    pub(super) code: &'a dyn GuestCode,
}

impl Place<'_> {
    /// Where a site is, if there is such a site.
    fn spot(&self, site: usize) -> Option<Spot> {
        self.modules.spot(self.kernel, self.image, site)
    }

    /// What the guest's books have of sites.
    fn records<'r>(&self, records: &'r Records) -> SiteRecords<'r> {
        let distance = self.image.runtime(self.code.record_offset());
        SiteRecords { cursor: records.cursor(), distance }
    }
}

/// Finds the guest's records of sites, the next one at once.
struct SiteRecords<'r> {
    cursor: Cursor<'r>,
    /// From a site's location to what the record has for it.
    distance: u64,
}

impl<'r> SiteRecords<'r> {
    #[inline]
    fn find(&mut self, site: &Site) -> Option<&'r Record> {
        self.cursor.find(site.location.wrapping_add(self.distance))
    }
}

impl Patcher {
    /// With memory to hold so many sites by so many edits, of so many sites that there are.
    pub(super) fn with_room(sites: usize, edits: usize, all: usize) -> Self {
        let held = Held {
            site: 1,
            guest_call: Some(1),
            first_edit: 1,
            edits: 1,
            program: Some(1),
            init: true,
        };
        Self {
            held: touched(sites, held),
            edits: touched(edits, Edit::FILLER),
            flagged: SiteSet::with_room(all),
            ..Self::default()
        }
    }

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
    pub(super) fn sites_with_programs(&self) -> impl Iterator<Item = (usize, u16)> + Clone {
        self.held.iter().filter_map(|held| Some((held.site, held.program?)))
    }

    /// Whether all of these sites (indices) call programs.
    pub(super) fn call_programs(&self, sites: &[usize]) -> bool {
        let found = self.sites_with_programs().filter(|(site, _)| sites.contains(site));
        found.count() == sites.len()
    }

    /// The programs to which something leads, or may.
    pub(super) fn programs(&self) -> impl Iterator<Item = u16> {
        self.held.iter().filter_map(|held| held.program).chain(self.left.iter().copied())
    }

    /// What was written for the sites (indices) that are `wanted`.
    pub(super) fn edits_of(&self, wanted: impl Fn(usize) -> bool) -> impl Iterator<Item = &Edit> {
        let held = self.held.iter().filter(move |held| wanted(held.site));
        held.flat_map(|held| held.own(&self.edits))
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
        let before = self.held.len();
        let mut next = place.records(records);
        let mut skipped = Vec::new();
        let sites = sites.into_iter();
        self.held.reserve(sites.size_hint().0);
        self.edits.reserve(sites.size_hint().0);
        for (index, hook) in sites {
            let Some(spot) = place.spot(index) else { continue };
            let first = self.edits.len();
            let reason = match self.add(place, &mut next, (index, &spot), hook) {
                Ok(record) => match self.write(&place.view, first, record) {
                    Ok(true) => continue,
                    written => {
                        let undone = self.undo_from(place, records, self.held.len() - 1);
                        if let Err(error) = written.and(undone) {
                            let _ = self.undo_from(place, records, before);
                            return Err(error);
                        }
                        SkipReason::ReadBack
                    }
                },
                Err(reason) => reason,
            };
            self.edits.truncate(first);
            skipped.push(Skip { site: index, reason });
        }
        if !self.shares {
            self.held.iter().skip(before).for_each(|held| self.flagged.insert(held.site));
        }
        Ok(skipped)
    }

    /// Marks a site in the guest's books, patches it by the edits from the `first` on, and reads all
    /// back: whether it holds.
    #[inline(always)]
    fn write(&self, view: &View<'_>, first: usize, record: &Record) -> Result<bool, GuestError> {
        let flags = record.flags | ftrace::DISABLED;
        let mut holds = self.shares || view.put(record.flags_at, flags, 8)?;
        let Some(edits) = self.edits.get(first..) else { return Ok(false) };
        for edit in edits {
            holds &= edit.apply(view)?;
        }
        Ok(holds)
    }

    /// Puts back all but the first `count` of the sites held, as far as that is possible, with the
    /// flags that they had in these records.
    ///
    /// # Errors
    /// When guest memory cannot be written; all others are put back all the same.
    fn undo_from(
        &mut self,
        place: &Place<'_>,
        records: &Records,
        count: usize,
    ) -> Result<(), GuestError> {
        let mut records = place.records(records);
        let mut undone = Ok(());
        for held in self.held.drain(count..).rev() {
            let own = held.own(&self.edits).iter().rev();
            let edits = own.map(|edit| edit.undo(&place.view)).fold(Ok(()), Result::and);
            let record = place.spot(held.site).and_then(|spot| records.find(&spot.site));
            let flags = match record.filter(|_| !self.shares) {
                Some(record) => {
                    let was_flagged = record.flags & ftrace::DISABLED != 0;
                    set_flag(&place.view, record.flags_at, was_flagged)
                }
                None => Ok(()),
            };
            undone = undone.and(edits).and(flags);
        }
        self.edits.truncate(self.held.last().map_or(0, |held| held.range().end));
        undone
    }

    /// Adds a site with what is to be written for it, behind all others: the guest's record of it. Edits
    /// of one that is refused may be left behind.
    #[inline(always)]
    fn add<'r>(
        &mut self,
        place: &Place<'_>,
        records: &mut SiteRecords<'r>,
        (index, spot): (usize, &Spot),
        hook: Hook<'_>,
    ) -> Result<&'r Record, SkipReason> {
        let site = &spot.site;
        let init = site.section == SiteSection::InitText;
        if init && self.freed {
            return Err(SkipReason::Freed);
        }
        let first = self.edits.len();
        let call = place.code.edits(&place.view, place.image, spot, hook, &mut self.edits)?;
        let record = records.find(site).ok_or(SkipReason::Unknown)?;
        match (record.flags & ftrace::ENABLED != 0, call) {
            (true, None) => return Err(SkipReason::GuestEnabled),
            (false, Some(_)) => return Err(SkipReason::GuestOwned("a call")),
            _ => {}
        }
        let was_flagged = record.flags & ftrace::DISABLED != 0;
        if was_flagged && !self.flagged.contains(index) {
            return Err(SkipReason::GuestDisabled);
        }
        let program = match hook {
            Hook::Call(program) => Some(program),
            Hook::Trap(_) => None,
        };
        let edits = u8::try_from(self.edits.len() - first).map_err(|_| SkipReason::OutOfReach)?;
        self.held.push(Held {
            site: index,
            guest_call: call.map(|call| call.target),
            first_edit: first,
            edits,
            program,
            init,
        });
        Ok(record)
    }

    /// The guest drops its records of these sites.
    pub(super) fn unflag(&mut self, sites: &[usize]) {
        sites.iter().for_each(|&site| self.flagged.remove(site));
    }

    /// Whether the guest has freed `.init.text`.
    pub(super) fn freed(&self) -> bool {
        self.freed
    }

    /// Sites that are held from now on are shared with the guest.
    pub(super) fn share(&mut self) {
        self.shares = true;
    }

    /// Whether sites are refused to the guest instead.
    pub(super) fn is_flagging(&self) -> bool {
        !self.shares
    }

    /// Where the guest's own ftrace lets held sites go.
    pub(super) fn guest_calls(&self) -> impl Iterator<Item = u64> {
        self.held.iter().filter_map(|held| held.guest_call)
    }

    /// Gives back the held sites of whose flags this is true: which these were, with their programs,
    /// and what it came to.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn lend(
        &mut self,
        place: &Place<'_>,
        records: &Records,
        is_touched: impl Fn(u64) -> bool,
    ) -> Result<(LentSites, Restored), GuestError> {
        let mut records = place.records(records);
        let mut lent = Vec::new();
        for held in &self.held {
            let record = place.spot(held.site).and_then(|spot| records.find(&spot.site));
            if record.is_some_and(|record| is_touched(record.flags)) {
                lent.push((held.site, held.program));
            }
        }
        let mut sites = Among::new(lent.iter().map(|&(site, _)| site).collect());
        let restored = self.release(&place.view, |held| sites.contains(&held.site))?;
        Ok((lent, restored))
    }

    /// Gives every held site of `.init.text` back, before the guest frees that
    /// memory; none of it is written ever after. The guest drops its records of
    /// these sites next: no flag to clear.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn release_init(&mut self, view: &View<'_>) -> Result<Restored, GuestError> {
        self.freed = true;
        self.release(view, |held| held.init)
    }

    /// Gives back the held sites for which `wanted` (of an index) is true. The guest
    /// keeps refusing them, so that they can be held again at any time.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn release_if(
        &mut self,
        view: &View<'_>,
        mut wanted: impl FnMut(usize) -> bool,
    ) -> Result<Restored, GuestError> {
        self.release(view, |held| wanted(held.site))
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
        let mut records = place.records(records);
        for index in std::mem::take(&mut self.flagged).iter() {
            let Some(Spot { site, .. }) = place.spot(index) else { continue };
            if site.section == SiteSection::InitText && self.freed {
                continue;
            }
            if let Some(record) = records.find(&site) {
                set_flag(&place.view, record.flags_at, false)?;
            }
        }
        let held = self.sites().collect();
        self.flagged = held;
        Ok(())
    }

    fn release(
        &mut self,
        view: &View<'_>,
        mut wanted: impl FnMut(&Held) -> bool,
    ) -> Result<Restored, GuestError> {
        let mut restored = Ok(Restored::default());
        let mut kept = 0;
        let (all, left) = (&mut self.edits, &mut self.left);
        self.held.retain_mut(|held| {
            if !wanted(held) {
                if held.first_edit != kept {
                    all.copy_within(held.range(), kept);
                    held.first_edit = kept;
                }
                kept += usize::from(held.edits);
                return true;
            }
            // When one fails the others are given back all the same.
            if !Restored::add(&mut restored, held.site, held.restore(view, all)) {
                left.extend(held.program);
            }
            false
        });
        all.truncate(kept);
        restored
    }
}

impl Held {
    /// Where its edits are in [`Patcher::edits`].
    fn range(&self) -> Range<usize> {
        self.first_edit..self.first_edit + usize::from(self.edits)
    }

    fn own<'a>(&self, edits: &'a [Edit]) -> &'a [Edit] {
        edits.get(self.range()).unwrap_or_default()
    }

    /// Puts the site back if all of it is still ours; else leaves it alone. Whether
    /// it is as it was.
    fn restore(&self, view: &View<'_>, edits: &[Edit]) -> Result<bool, GuestError> {
        let edits = self.own(edits);
        if all(view, edits, Edit::is_ours)? {
            for edit in edits.iter().rev() {
                edit.undo(view)?;
            }
        }
        all(view, edits, Edit::is_untouched)
    }
}

/// Whether this is so of all edits.
fn all(
    view: &View<'_>,
    edits: &[Edit],
    holds: impl Fn(&Edit, &View<'_>) -> Result<bool, GuestError>,
) -> Result<bool, GuestError> {
    for edit in edits {
        if !holds(edit, view)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn set_flag(view: &View<'_>, flags_at: u64, set: bool) -> Result<(), GuestError> {
    let flags = view.load(flags_at, 8)?;
    let flags = if set { flags | ftrace::DISABLED } else { flags & !ftrace::DISABLED };
    view.store(flags_at, flags, 8)
}
