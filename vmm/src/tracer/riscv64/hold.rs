//! The instructions that are written to sites to hold them, and those of the guest.

use super::code::{Code, instructions};
use super::sharing::By;
use super::site;
use crate::tracer::arch::GuestCode;
use crate::tracer::edit::{Edit, SkipReason};
use crate::tracer::ftrace::GuestCall;
use crate::tracer::image::Image;
use crate::tracer::spot::Spot;
use crate::tracer::view::View;
use vmtrace_trampolines::riscv64::encode::NOP;

impl Code {
    /// [`GuestCode::edits`] of a site that comes to an entry of the tables: the second instruction.
    pub(super) fn by_tables(
        &self,
        view: &View<'_>,
        image: &Image,
        spot: &Spot,
        (program, way): (Option<u16>, u16),
        edits: &mut Vec<Edit>,
    ) -> Result<Option<GuestCall>, SkipReason> {
        let entry = image.runtime(spot.site.entry);
        let [first, second] = instructions(spot.load(view, 0).map_err(|_| SkipReason::NoRam)?);
        let aim = self.aim(entry).ok_or(SkipReason::OutOfReach)?;
        let (guests, way) = if [first, second] == [aim.first(), NOP] {
            (None, way)
        } else if [first, second] == [NOP, NOP] {
            return Err(SkipReason::Unprepared);
        } else {
            let owned = SkipReason::GuestOwned(site::describe([first, second]));
            let guests = self.guest_call(view, image, spot).ok_or(owned)?;
            let By::Entry(way) = self.beside(program, guests)? else {
                return Err(SkipReason::NoStub);
            };
            (Some(guests), way)
        };
        let (theirs, ours) = (second.to_le_bytes(), aim.call(way).to_le_bytes());
        let replaced = spot.replace(site::SECOND, &theirs, &ours, edits);
        replaced.map(|()| guests).ok_or(SkipReason::OutOfReach)
    }

    /// The same of one that comes to an ops: the literal before it, and the second instruction unless
    /// that is the guest's call already. `caller` and `none` as in [`Kind::CallOps`].
    pub(super) fn by_literal(
        &self,
        view: &View<'_>,
        image: &Image,
        spot: &Spot,
        (caller, none): (u64, u64),
        program: Option<u16>,
        edits: &mut Vec<Edit>,
    ) -> Result<Option<GuestCall>, SkipReason> {
        let entry = image.runtime(spot.site.entry);
        let [literal, code] = spot.load_words(view).map_err(|_| SkipReason::NoRam)?;
        let found = instructions(code.to_le_bytes());
        let [first, second] = site::call(entry, caller).ok_or(SkipReason::OutOfReach)?;
        let guests = match literal == none {
            true => None,
            false => {
                const OTHER: SkipReason = SkipReason::GuestOwned("the ops of another tracer");
                Some(self.shared(literal).ok_or(OTHER)?)
            }
        };
        let expected = if guests.is_none() { NOP } else { second };
        if !site::is(found, [first, expected]) {
            return Err(SkipReason::GuestOwned(site::describe(found)));
        }
        let ours = match guests {
            None => self.ops(program),
            Some(guests) => match self.beside(program, guests)? {
                By::Ops(ours) => ours,
                By::Entry(_) => return Err(SkipReason::NoStub),
            },
        };
        let mut replaced = spot.replace(0, &literal.to_le_bytes(), &ours.to_le_bytes(), edits);
        if guests.is_none() {
            let (nop, second) = (NOP.to_le_bytes(), second.to_le_bytes());
            let call = spot.replace(site::LITERAL + site::SECOND, &nop, &second, edits);
            replaced = replaced.and(call);
        }
        replaced.map(|()| guests).ok_or(SkipReason::OutOfReach)
    }

    /// What the guest has in a site whose second instruction is not ours: both instructions of it.
    pub(super) fn theirs(
        &self,
        entry: u64,
        [found, second]: [u32; 2],
        caller: u64,
    ) -> Option<[u32; 2]> {
        if second == NOP {
            return Some([NOP; 2]);
        }
        self.sharing.as_ref()?;
        let known = [caller].into_iter().chain(self.landings.called(entry));
        let known =
            known.filter_map(|target| site::call(entry, target)).find(|call| call[1] == second);
        // One that is called directly, before the first is ours.
        known.or_else(|| site::called(entry, [found, second]).map(|_| [found, second]))
    }
}
