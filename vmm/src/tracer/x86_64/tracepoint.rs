//! The code that calls a tracepoint's probes (include/linux/tracepoint.h,
//! arch/x86/kernel/static_call.c and jump_label.c).
//!
//! ```text
//! branch:  nop                        or jmp, while there are probes
//!          array = tracepoint.funcs
//!          if array: call probe       (static) with array[0].data; with more than one the iterator
//! ```
//!
//! The guest verifies a branch when it changes it, and crashes on bytes that it did not write. It
//! changes branches only under its lock, and before that all of them are restored.

use super::{calls, site};
use crate::kernel::Kernel;
use crate::kernel::tracepoints::{Branch, Hooks};
use crate::tracer::edit::Edit;
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::stops::{Moment, Stops};
use crate::tracer::tracepoints::guest::{self as points, Places, PointReason, Probes};
use vmtrace_trampolines::x86_64::PROBE_CALLED;

/// Makes the code of the stubs, to be put at this run-time address of an annex that lies at that
/// guest-physical one, and what leads to them.
///
/// # Errors
/// When the kernel has another code there.
pub(super) fn brackets(
    guest: &dyn Guest,
    image: &Image,
    kernel: &Kernel,
    trap: &[u8],
    at: (u64, u64),
) -> Result<(Vec<u8>, Stops<Moment>), TraceError> {
    let unknown = || TraceError::Code("how it changes its tracepoints is not known");
    if points::is_changing(guest, image, kernel).ok_or_else(unknown)? {
        return Err(TraceError::Code("it is changing its tracepoints just now; try again"));
    }
    let found = points::brackets(kernel, calls::calls).ok_or_else(unknown)?;
    calls::lead(guest, (image, kernel), &found, trap, at, &unknown())
}

/// What is to be written, with our own array of probes at run-time address `ours`.
pub(super) fn edits(
    places: &Places<'_>,
    hooks: &Hooks,
    (probe, ours): (u64, u64),
    probes: &Probes,
) -> Result<Vec<Edit>, PointReason> {
    let too_far = PointReason::OutOfReach;
    let Places { image, own, .. } = *places;
    let array = [&probes.array().to_le_bytes()[..], &ours.to_le_bytes()];
    let mut edits = places.edit(hooks.funcs, array)?;
    let static_calls = hooks.static_calls.as_ref().ok_or(PointReason::Unknown)?;
    let iterator = image.runtime(hooks.iterator);
    // Who calls the trampoline behind it comes to the same.
    let trampoline = image.runtime(static_calls.trampoline);
    let (now, target) = match probes.all() {
        // Not by a pointer.
        [] => (iterator, probe + PROBE_CALLED),
        [[only, ..]] => (*only, iterator),
        _ => (iterator, iterator),
    };
    let mut count = 0;
    for call in static_calls.sites.iter().filter(|call| own.stays(call.code)) {
        count += 1;
        let address = image.runtime(call.code);
        let [opcode, a, b, c, d, ..] = places.load(call.code, 5)?.to_le_bytes();
        let expected = if call.tail { 0xe9 } else { 0xe8 };
        let leads = site::jump_target(address, &[0xe9, a, b, c, d]);
        let known = leads.is_some_and(|leads| [now, trampoline].contains(&leads));
        if opcode != expected || !known {
            return Err(PointReason::Unknown);
        }
        let [_, e, f, g, h] = site::jump(address, target).ok_or(too_far)?;
        let both = [&[opcode, a, b, c, d][..], &[opcode, e, f, g, h]];
        edits.extend(places.edit(call.code, both)?);
    }
    // The guest's own probes need them as well.
    let may = |jumps| jumps != probes.all().is_empty();
    let (branches, jumps) = points::branches(places, &hooks.branches, jump, may)?;
    edits.extend(jumps);
    if count + branches == 0 { Err(PointReason::Nowhere) } else { Ok(edits) }
}

/// Whether a branch jumps, and what is to be written if it does not.
pub(super) fn jump(places: &Places<'_>, branch: &Branch) -> Result<(bool, Vec<Edit>), PointReason> {
    let address = places.image.runtime(branch.code);
    let [a, b, c, d, e, ..] = places.load(branch.code, 5)?.to_le_bytes();
    let bytes = [a, b, c, d, e];
    let goal = places.image.runtime(branch.target);
    let long = site::jump(address, goal).ok_or(PointReason::OutOfReach)?;
    let distance = goal.wrapping_sub(address.wrapping_add(2)).cast_signed();
    let short = i8::try_from(distance).map(|distance| [0xeb, distance.to_le_bytes()[0]]);
    if bytes == long || short.is_ok_and(|short| bytes[..2] == short) {
        return Ok((true, Vec::new()));
    }
    let both = if site::DISABLED.contains(&bytes) {
        [&bytes[..], &long]
    } else if bytes[..2] == site::QUIET {
        let short = short.as_ref().map_err(|_| PointReason::Unknown)?;
        [&site::QUIET[..], short]
    } else {
        return Err(PointReason::Unknown);
    };
    Ok((false, places.edit(branch.code, both)?))
}
