//! Exits of modules: rewritten when a module is ready and nothing of it has run, switched as those
//! of the kernel from then on.
//!
//! No module reaches the stubs, which are behind the kernel's end. So each window jumps to a relay
//! in the gap, which jumps to the stub. Nobody writes to the windows again, also when the module
//! goes, with its memory. A module that comes again at its old place gets the relays and stubs that
//! it had. Others have them when there is no more room: see [`super::module_stubs`].

use super::gap::Gap;
use super::module_stubs::{Made, Owner, Reclaim, Way};
use super::returns::{Returns, Rewrites, groups, low_half};
use crate::kernel::{Exit, ModuleRewrite};
use crate::kernel::{Site, SiteSection};
use crate::tracer::edit::{Edit, SkipReason};
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::modules::{Fresh, place};
use crate::tracer::spot::{PAGE, Spot};
use crate::tracer::view::View;
use rustc_hash::FxHashMap;

/// Bytes of a relay.
const RELAY: u64 = RELAY_LEN as u64;
const RELAY_LEN: usize = 8;

/// See [`GuestCode::rewrite`](crate::tracer::arch::GuestCode::rewrite).
pub(super) fn rewrite(
    (returns, gap): (&mut Returns, &mut Gap),
    guest: &dyn Guest,
    (view, image): (&View<'_>, &Image),
    fresh: Fresh<'_>,
    exits: &[(usize, Exit)],
    rewrites: &[ModuleRewrite],
) -> Result<(), TraceError> {
    // What it has is not taken from it below.
    for rewrite in rewrites {
        again(returns, gap, guest, image, (rewrite, fresh.address));
    }
    let mut reclaim = Reclaim::new(guest, image, fresh.words, returns.address(0));
    let mut ways = Vec::with_capacity(rewrites.len());
    for rewrite in rewrites {
        let of = (rewrite, fresh.address);
        ways.push(way((returns, gap), guest, image, of, &mut reclaim)?);
    }
    let edits = rewrites.iter().zip(&ways).map(|(rewrite, way)| {
        let way = way.ok_or(SkipReason::NoStub)?;
        edits(guest, image, rewrite, way.relay.wrapping_sub(image.slide))
    });
    let all: Vec<_> = rewrites.iter().map(|rewrite| &rewrite.exit).collect();
    let mut written = Rewrites::of(view, edits.collect(), groups(&all))?;
    written.write(view)?;
    let done = rewrites.iter().zip(&ways).zip(written.skipped());
    let done: FxHashMap<u64, _> = done
        .map(|((rewrite, way), skipped)| {
            let slot = way.map(|way| way.slot).ok_or(SkipReason::NoStub);
            (rewrite.exit.epilogue.ret, skipped.map_or(slot, Err))
        })
        .collect();
    for (number, exit) in exits {
        let slot = done.get(&exit.address).copied().unwrap_or(Err(SkipReason::NoStub));
        returns.of_modules.set_slot(*number, slot);
    }
    Ok(())
}

/// Gives an exit of a module that has come again what it had, if that is still as it was.
fn again(
    returns: &mut Returns,
    gap: &Gap,
    guest: &dyn Guest,
    image: &Image,
    (rewrite, module): (&ModuleRewrite, u64),
) {
    let epilogue = &rewrite.exit.epilogue;
    let Some(made) = returns.of_modules.made.get(epilogue) else { return };
    if is_intact(returns, gap, guest, made) {
        let page = page(guest, image, epilogue.start);
        if let Some(made) = returns.of_modules.made.get_mut(epilogue) {
            (made.owner, made.page) = (Owner::Module(module), page);
        }
    } else {
        log::warn!("a stub of a module was changed by others, and is not used again");
        returns.of_modules.made.remove(epilogue);
    }
}

/// Whether a stub and its relay hold what was written there, with an empty slot.
fn is_intact(returns: &Returns, gap: &Gap, guest: &dyn Guest, made: &Made) -> bool {
    let mut relay = [0; RELAY_LEN];
    returns.holds(made.at, &made.stub)
        && guest.read(gap.physical(made.way.relay), &mut relay).is_ok()
        && relay == made.relay
}

/// Guest-physical address of the page with the code at a link address.
fn page(guest: &dyn Guest, image: &Image, start: u64) -> Option<u64> {
    let page = image.runtime(start) & !(PAGE - 1);
    image.tables.translate(guest, page).ok()
}

/// The relay and the stub of an exit of the module with its `struct module` at this address, which
/// are made if there are none yet; `None` when there is no room. Nobody executes them yet.
fn way(
    (returns, gap): (&mut Returns, &mut Gap),
    guest: &dyn Guest,
    image: &Image,
    (rewrite, module): (&ModuleRewrite, u64),
    reclaim: &mut Reclaim<'_>,
) -> Result<Option<Way>, TraceError> {
    let ModuleRewrite { exit, .. } = rewrite;
    if let Some(made) = returns.of_modules.made.get(&exit.epilogue) {
        return Ok(Some(made.way));
    }
    let len = exit.stub_len() as u64;
    let Some((offset, relay_at)) = room(returns, gap, guest, len, reclaim) else {
        return Ok(None);
    };
    let places = (offset, relay_at);
    let made = match put((returns, gap), guest, image, (rewrite, module), places) {
        Ok(Some(made)) => made,
        other => {
            returns.of_modules.free.give(offset..offset + len);
            returns.of_modules.relays.extend(relay_at);
            return other.map(|_| None);
        }
    };
    if relay_at.is_none() {
        returns.of_modules.relay_bytes += RELAY;
    }
    let way = made.way;
    returns.of_modules.made.insert(exit.epilogue.clone(), made);
    Ok(Some(way))
}

/// Room for a stub of so many bytes (offset in the area) and for its relay (run-time address, `None` for
/// what is next in the gap); `None` when modules that are gone leave none, either.
fn room(
    returns: &mut Returns,
    gap: &Gap,
    guest: &dyn Guest,
    len: u64,
    reclaim: &mut Reclaim<'_>,
) -> Option<(u64, Option<u64>)> {
    loop {
        let of_modules = &mut returns.of_modules;
        // The rest of the gap is for programs and chains.
        let has_next = of_modules.relay_bytes + RELAY <= gap.len() / 2 && gap.has_small(RELAY);
        if (has_next || !of_modules.relays.is_empty())
            && let Some(offset) = of_modules.free.take(len)
        {
            return Some((offset, of_modules.relays.pop()));
        }
        let mut of_modules = std::mem::take(&mut returns.of_modules);
        let is_intact = |made: &Made| is_intact(returns, gap, guest, made);
        let goes_on = reclaim.next(&mut of_modules, &is_intact);
        returns.of_modules = of_modules;
        if !goes_on {
            return None;
        }
    }
}

/// Writes the stub of an exit and its relay to their places; `None` when they do not reach each other.
fn put(
    (returns, gap): (&Returns, &mut Gap),
    guest: &dyn Guest,
    image: &Image,
    (rewrite, module): (&ModuleRewrite, u64),
    (at, relay_at): (u64, Option<u64>),
) -> Result<Option<Made>, TraceError> {
    let ModuleRewrite { exit, .. } = rewrite;
    let address = returns.address(at);
    let id = low_half(image.runtime(exit.epilogue.ret));
    let relay = exit.far_jump(relay_at.unwrap_or_else(|| gap.next_small()), address);
    let stub = exit.stub(address.wrapping_sub(image.slide), None, id);
    let Some((relay, stub)) = relay.zip(stub) else { return Ok(None) };
    returns.write(at, &stub)?;
    let put = match relay_at {
        Some(at) => gap.put_again(guest, at, &relay).map(|()| Some(at)),
        None => gap.put_small(guest, &relay),
    };
    let slot = at + exit.slot_offset() as u64;
    let Some(way) = put?.map(|relay| Way { relay, slot }) else { return Ok(None) };
    let page = page(guest, image, exit.epilogue.start);
    Ok(Some(Made { way, at, stub, relay, owner: Owner::Module(module), page }))
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
