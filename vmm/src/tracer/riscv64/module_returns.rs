//! Exits of modules: rewritten when a module is ready and nothing of it has run, switched as those
//! of the kernel from then on.
//!
//! No module reaches the stubs, which are behind the kernel's end. So each window jumps to a relay
//! in the gap, which jumps to the stub. Nobody writes to the windows again, also when the module
//! goes, with its memory. Neither relays nor stubs are ever freed: a context may stand there as long
//! as it likes. A module that comes again at its old place gets those that it had.

use super::gap::Gap;
use super::module_stubs::Way;
use super::returns::{Returns, Rewrites, groups, low_half};
use crate::kernel::{Exit, ModuleRewrite};
use crate::kernel::{Site, SiteSection};
use crate::tracer::edit::{Edit, SkipReason};
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::modules::place;
use crate::tracer::spot::Spot;
use crate::tracer::view::View;
use rustc_hash::FxHashMap;

/// Bytes of a relay.
const RELAY: u64 = 8;

/// See [`GuestCode::rewrite`](crate::tracer::arch::GuestCode::rewrite).
pub(super) fn rewrite(
    (returns, gap): (&mut Returns, &mut Gap),
    guest: &dyn Guest,
    (view, image): (&View<'_>, &Image),
    exits: &[(usize, Exit)],
    rewrites: &[ModuleRewrite],
) -> Result<(), TraceError> {
    let mut ways = Vec::with_capacity(rewrites.len());
    for rewrite in rewrites {
        ways.push(way(returns, gap, guest, image, rewrite)?);
    }
    let edits = rewrites.iter().zip(&ways).map(|(rewrite, way)| {
        let way = way.ok_or(SkipReason::NoStub)?;
        edits(guest, image, rewrite, way.relay.wrapping_sub(image.slide))
    });
    let all: Vec<_> = rewrites.iter().map(|rewrite| &rewrite.exit).collect();
    let mut written = Rewrites::of(view, edits.collect(), groups(&all))?;
    written.write(view)?;
    let slots = &mut returns.of_modules.slots;
    let done = rewrites.iter().zip(&ways).zip(written.skipped());
    let done: FxHashMap<u64, _> = done
        .map(|((rewrite, way), skipped)| {
            let slot = way.map(|way| way.slot).ok_or(SkipReason::NoStub);
            (rewrite.exit.epilogue.ret, skipped.map_or(slot, Err))
        })
        .collect();
    for (number, exit) in exits {
        slots.insert(*number, done.get(&exit.address).copied().unwrap_or(Err(SkipReason::NoStub)));
    }
    Ok(())
}

/// The relay and the stub of an exit, which are made if there are none yet; `None` when there is no
/// room. Nobody executes them yet.
fn way(
    returns: &mut Returns,
    gap: &mut Gap,
    guest: &dyn Guest,
    image: &Image,
    rewrite: &ModuleRewrite,
) -> Result<Option<Way>, TraceError> {
    let ModuleRewrite { exit, .. } = rewrite;
    if let Some(&way) = returns.of_modules.made.get(&exit.epilogue) {
        return Ok(Some(way));
    }
    let offset = returns.of_modules.free;
    let end = offset + exit.stub_len() as u64;
    // The rest of the gap is for programs and chains.
    if end > returns.of_modules.end || returns.of_modules.relays + RELAY > gap.len() / 2 {
        return Ok(None);
    }
    let stub = returns.address(offset);
    let id = low_half(image.runtime(exit.epilogue.ret));
    let at = gap.next_small();
    let relay = exit.far_jump(at, stub);
    let made = exit.stub(stub.wrapping_sub(image.slide), None, id);
    let Some((relay, stub)) = relay.zip(made) else { return Ok(None) };
    returns.write(offset, &stub)?;
    let Some(relay) = gap.put_small(guest, &relay)? else { return Ok(None) };
    let way = Way { relay, slot: offset + exit.slot_offset() as u64 };
    let of_modules = &mut returns.of_modules;
    of_modules.free = end.next_multiple_of(4);
    of_modules.relays += RELAY;
    of_modules.made.insert(exit.epilogue.clone(), way);
    Ok(Some(way))
}

/// What is to be written for an exit to lead to the relay at a link address. The pages of a module
/// lie anywhere.
fn edits(
    guest: &dyn Guest,
    image: &Image,
    rewrite: &ModuleRewrite,
    relay: u64,
) -> Result<Vec<Edit>, SkipReason> {
    let writes = rewrite.exit.writes(relay).ok_or(SkipReason::OutOfReach)?;
    let mut edits = Vec::new();
    for ((at, ours), original) in writes.iter().zip(&rewrite.original) {
        if ours.len() != original.len() {
            return Err(SkipReason::OutOfReach);
        }
        let parts = original.chunks(8).zip(ours.chunks(8));
        for (address, (original, ours)) in (*at..).step_by(8).zip(parts) {
            let pages = place(guest, image, image.runtime(address), ours.len());
            let (physical, beyond) = pages.ok_or(SkipReason::NoRam)?;
            let site = Site { location: address, entry: address, section: SiteSection::Text };
            let spot = Spot { site, physical, beyond };
            spot.replace(0, original, ours, &mut edits).ok_or(SkipReason::OutOfReach)?;
        }
    }
    Ok(edits)
}
