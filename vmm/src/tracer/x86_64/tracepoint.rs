//! What calls a tracepoint's probes (include/linux/tracepoint.h, arch/x86/kernel/static_call.c and
//! jump_label.c).
//!
//! ```text
//! branch:  nop                        or jmp, while there are probes
//!          array = tracepoint.funcs
//!          if array: call probe       (static) with array[0].data; with more than one the iterator
//! ```
//!
//! The guest verifies branches when it changes them and dies of what it did not write; it changes
//! nothing but under its lock, and by then all is as it was.

use super::site;
use crate::kernel::Kernel;
use crate::kernel::tracepoints::Hooks;
use crate::tracer::arch::PointReason;
use crate::tracer::guest::{Guest, Image};
use crate::tracer::patch::Edit;
use crate::tracer::stops::{Moment, Stops, Stub};
use crate::tracer::trace::TraceError;
use crate::tracer::tracepoints::guest::{self as points, Call, Probes};
use crate::tracer::view::View;

/// What may be calls and jumps in code at a link address.
fn calls(start: u64, body: &[u8]) -> Vec<Call> {
    let all = (start..).zip(body.windows(site::LEN));
    let call = |(link, bytes): (u64, &[u8])| {
        let &[opcode @ (0xe8 | 0xe9), a, b, c, d] = bytes else { return None };
        let target = site::jump_target(link, &[0xe9, a, b, c, d])?;
        Some(Call { link, target, jumps: opcode == 0xe9 })
    };
    all.filter_map(call).collect()
}

/// Makes the code of the stubs, to be put at run-time address `at` of an annex that lies there in
/// guest-physical memory, and what leads to them.
///
/// # Errors
/// When the kernel has another code there.
pub(super) fn brackets(
    guest: &dyn Guest,
    image: &Image,
    kernel: &Kernel,
    trap: &[u8],
    (at, annex): (u64, u64),
) -> Result<(Vec<u8>, Stops<Moment>), TraceError> {
    let unknown = || TraceError::Code("how it changes its tracepoints is not known");
    if points::is_changing(guest, image, kernel).ok_or_else(unknown)? {
        return Err(TraceError::Code("it is changing its tracepoints just now; try again"));
    }
    let mut code = Vec::new();
    let mut stops = Stops::default();
    for (moment, call) in points::brackets(kernel, calls).ok_or_else(unknown)? {
        let mut now = [0; site::LEN];
        guest.read(image.physical_of(call.link), &mut now)?;
        if kernel.bytes(call.link, site::LEN) != Some(&now) {
            return Err(unknown());
        }
        code.resize(code.len().next_multiple_of(8), 0xcc);
        let stub = at + code.len() as u64;
        let next = stub + trap.len() as u64;
        code.extend(trap);
        code.extend(site::jump(next, image.runtime(call.target)).ok_or_else(unknown)?);
        let [_, a, b, c, d] = site::jump(image.runtime(call.link), stub).ok_or_else(unknown)?;
        let ours = [now[0], a, b, c, d];
        let edit = Edit::new(image.physical_of(call.link), &now, &ours);
        let stop = Stub::new(stub, annex + (stub - super::map::ADDRESS), trap, &site::QUIET);
        let (edit, stop) = edit.zip(stop).ok_or_else(unknown)?;
        stops.stub(moment, stop);
        stops.lead(edit);
    }
    Ok((code, stops))
}

/// What is to be written, with our own array of probes at run-time address `ours`.
pub(super) fn edits(
    view: &View<'_>,
    image: &Image,
    hooks: &Hooks,
    (probe, ours): (u64, u64),
    probes: &Probes,
    init: &std::ops::Range<u64>,
) -> Result<Vec<Edit>, PointReason> {
    let too_far = PointReason::OutOfReach;
    let funcs = image.physical_of(hooks.funcs);
    let mut edits =
        vec![Edit::new(funcs, &probes.array().to_le_bytes(), &ours.to_le_bytes()).ok_or(too_far)?];
    let static_calls = hooks.static_calls.as_ref().ok_or(PointReason::Unknown)?;
    let iterator = image.runtime(hooks.iterator);
    // Who calls the trampoline behind it comes to the same.
    let trampoline = image.runtime(static_calls.trampoline);
    let (now, target) = match probes.all() {
        [] => (iterator, probe),
        [[only, ..]] => (*only, iterator),
        _ => (iterator, iterator),
    };
    let stays = |code: &u64| !init.contains(code);
    let calls = static_calls.sites.iter().filter(|call| stays(&call.code));
    let mut count = 0;
    for call in calls {
        count += 1;
        let (at, address) = (image.physical_of(call.code), image.runtime(call.code));
        let found = view.load(at, 5).map_err(|_| PointReason::NoRam)?;
        let [opcode, a, b, c, d, ..] = found.to_le_bytes();
        let expected = if call.tail { 0xe9 } else { 0xe8 };
        let leads = site::jump_target(address, &[0xe9, a, b, c, d]);
        let known = leads.is_some_and(|leads| [now, trampoline].contains(&leads));
        if opcode != expected || !known {
            return Err(PointReason::Unknown);
        }
        let [_, e, f, g, h] = site::jump(address, target).ok_or(too_far)?;
        let before = [opcode, a, b, c, d];
        edits.push(Edit::new(at, &before, &[opcode, e, f, g, h]).ok_or(too_far)?);
    }
    for branch in hooks.branches.iter().filter(|branch| stays(&branch.code)) {
        count += 1;
        let (at, address) = (image.physical_of(branch.code), image.runtime(branch.code));
        let found = view.load(at, 5).map_err(|_| PointReason::NoRam)?.to_le_bytes();
        let [a, b, c, d, e, ..] = found;
        let bytes = [a, b, c, d, e];
        let goal = image.runtime(branch.target);
        let long = site::jump(address, goal).ok_or(too_far)?;
        let distance = goal.wrapping_sub(address.wrapping_add(2)).cast_signed();
        let short = i8::try_from(distance).map(|distance| [0xeb, distance.to_le_bytes()[0]]);
        let jumps = bytes == long || short.is_ok_and(|short| bytes[..2] == short);
        let edit = match (jumps, probes.all().is_empty()) {
            // The guest's own probes need it as well.
            (true, false) => continue,
            (false, true) if site::DISABLED.contains(&bytes) => Edit::new(at, &bytes, &long),
            (false, true) if bytes[..2] == site::QUIET => {
                Edit::new(at, &site::QUIET, &short.map_err(|_| PointReason::Unknown)?)
            }
            _ => return Err(PointReason::Unknown),
        };
        edits.push(edit.ok_or(too_far)?);
    }
    if count == 0 { Err(PointReason::Nowhere) } else { Ok(edits) }
}
