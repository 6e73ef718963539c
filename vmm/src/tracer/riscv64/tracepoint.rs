//! The code that calls a tracepoint's probes (include/linux/tracepoint.h,
//! arch/riscv/kernel/jump_label.c).
//!
//! ```text
//! branch:  nop                        or j, while there are probes
//!          call the iterator, which calls each probe of tracepoint.funcs
//! ```
//!
//! The guest stops before it takes and before it releases the lock of its tracepoints: at its calls
//! of these functions (see [`super::calls`]).

use super::calls;
use super::gap::Gap;
use crate::kernel::Kernel;
use crate::kernel::tracepoints::{Branch, Hooks};
use crate::tracer::edit::Edit;
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::stops::{Moment, Stops};
use crate::tracer::tracepoints::guest::{self as points, Places, PointReason, Probes};
use vmtrace_trampolines::riscv64::encode::register::T0;
use vmtrace_trampolines::riscv64::encode::{NOP, j, jal};

/// As far as `jal` reaches.
const REACH: i64 = 1 << 20;
/// From a probe to what its program returns to.
const PROBE_CALL: u64 = 4;
/// `ret`
const RET: u32 = 0x0000_8067;

/// Puts the stubs into the gap, and what leads to them.
///
/// # Errors
/// When the kernel has another code there.
pub(super) fn brackets(
    gap: &mut Gap,
    guest: &dyn Guest,
    image: &Image,
    kernel: &Kernel,
    trap: &[u8],
) -> Result<Stops<Moment>, TraceError> {
    let unknown = || TraceError::Code("how it changes its tracepoints is not known");
    if points::is_changing(guest, image, kernel).ok_or_else(unknown)? {
        return Err(TraceError::Code("it is changing its tracepoints just now; try again"));
    }
    let found = points::brackets(kernel, calls::calls).ok_or_else(unknown)?;
    calls::lead(gap, guest, (image, kernel), &found, trap, &unknown())
}

/// A probe at `at` that calls the program at `program`, and what the program returns to: see
/// [`compile`](vmtrace_trampolines::riscv64::compile). `None` when that is out of reach.
pub(super) fn probe(at: u64, program: u64) -> Option<(Vec<u8>, u64)> {
    let distance = reach(at, program)?;
    Some(([jal(T0, distance), RET].map(u32::to_le_bytes).concat(), at + PROBE_CALL))
}

/// How far `jal` jumps from one address to another; `None` when that is out of reach.
pub(super) fn reach(from: u64, to: u64) -> Option<i32> {
    let distance = to.wrapping_sub(from).cast_signed();
    i32::try_from(distance).ok().filter(|_| (-REACH..REACH).contains(&distance))
}

/// What is to be written, with our own array of probes at run-time address `ours`.
pub(super) fn edits(
    places: &Places<'_>,
    hooks: &Hooks,
    ours: u64,
    probes: &Probes,
) -> Result<Vec<Edit>, PointReason> {
    let array = [&probes.array().to_le_bytes()[..], &ours.to_le_bytes()];
    let mut edits = places.edit(hooks.funcs, array)?;
    // The guest's own probes need them as well.
    let may = |jumps| jumps != probes.all().is_empty();
    let (count, jumps) = points::branches(places, &hooks.branches, jump, may)?;
    edits.extend(jumps);
    if count == 0 { Err(PointReason::Nowhere) } else { Ok(edits) }
}

/// Whether a branch jumps, and what is to be written if it does not.
pub(super) fn jump(places: &Places<'_>, branch: &Branch) -> Result<(bool, Vec<Edit>), PointReason> {
    let found = places.load(branch.code, 4)?;
    let distance = reach(branch.code, branch.target).ok_or(PointReason::OutOfReach)?;
    let jump = j(distance);
    if found == u64::from(jump) {
        return Ok((true, Vec::new()));
    }
    if found != u64::from(NOP) {
        return Err(PointReason::Unknown);
    }
    let both = [NOP, jump].map(u32::to_le_bytes);
    Ok((false, places.edit(branch.code, [&both[0], &both[1]])?))
}
