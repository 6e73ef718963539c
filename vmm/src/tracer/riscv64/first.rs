//! First instructions of calls, on kernels without CALL_OPS: they are the trace's before any site is
//! held, and until its end.

use super::code::{Code, Kind, front, instructions};
use super::site;
use crate::tracer::error::TraceError;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::spot::Spot;
use crate::tracer::view::View;

impl Code {
    /// Gives each the first instruction of a call, which does nothing but change `t0`, dead at a
    /// function's entry, or has the guest's call go another way to where it goes (see [`Gap::land`]).
    /// (CALL_OPS kernels do so themselves.)
    ///
    /// A call is two instructions, and no pause can tell whether some interrupted
    /// context stands between them. That it would execute the second without the
    /// first is excluded by changing the first only when there is no such context: for a module before
    /// anything of it has run, for sites that an update of the guest's has changed at its end, and for
    /// all of the kernel's when one CPU runs, with interrupts off, in a function that is no site.
    pub(super) fn give_first(
        &mut self,
        guest: &dyn Guest,
        view: &View<'_>,
        image: &Image,
        spots: &[Spot],
    ) -> Result<(), TraceError> {
        let Kind::Patchable { caller } = self.kind else { return Ok(()) };
        for spot in spots {
            let entry = image.runtime(spot.site.entry);
            let (Some(aim), front) = (self.aim(entry), front(&spot.site)) else { continue };
            let found = instructions(spot.load(view, front)?);
            if self.theirs(entry, found, caller) != Some(found) {
                continue;
            }
            if let Some(target) = site::called(entry, found).filter(|&target| target != caller) {
                let programs = self.entries;
                // Ours otherwise, and already prepared.
                let is_theirs = !self.gap.contains(target);
                let site = (entry, target);
                if !is_theirs || !self.landings.direct(&mut self.gap, guest, site, programs)? {
                    continue;
                }
            }
            spot.store(view, front, &aim.first().to_le_bytes())?;
        }
        Ok(())
    }

    /// Whatever is behind the first instructions does what it did before, so this is safe at any time. To
    /// put them there again would not be.
    pub(super) fn give_back(
        &mut self,
        view: &View<'_>,
        image: &Image,
        spots: &[Spot],
    ) -> Result<(), GuestError> {
        let Kind::Patchable { caller } = self.kind else { return Ok(()) };
        let mut failed = Vec::new();
        for spot in spots {
            let entry = image.runtime(spot.site.entry);
            match self.give_back_first(view, spot, (entry, caller)) {
                Ok(()) => {}
                // The others can be.
                Err(error) => failed.push((entry, error)),
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(GuestError::Several(failed)) }
    }

    /// Gives the first instruction of a site back if that is ours and the second is not. `entry` and
    /// `caller` are run-time addresses.
    fn give_back_first(
        &mut self,
        view: &View<'_>,
        spot: &Spot,
        (entry, caller): (u64, u64),
    ) -> Result<(), GuestError> {
        let (Some(aim), front) = (self.aim(entry), front(&spot.site)) else { return Ok(()) };
        let found = instructions(spot.load(view, front)?);
        let theirs = self.theirs(entry, found, caller).filter(|_| found[0] == aim.first());
        let Some(theirs) = theirs.filter(|theirs| *theirs != found) else { return Ok(()) };
        spot.store(view, front, &theirs[0].to_le_bytes())?;
        if instructions(spot.load(view, front)?) != theirs {
            return Err(GuestError::Mismatch("it did not take its own instruction".into()));
        }
        self.landings.leave(entry);
        Ok(())
    }
}
