//! What calls a tracepoint's probes (include/linux/tracepoint.h, arch/riscv/kernel/jump_label.c).
//!
//! ```text
//! branch:  nop                        or j, while there are probes
//!          call the iterator, which calls each probe of tracepoint.funcs
//! ```
//!
//! The guest stops where it is about to take or give back the lock of its tracepoints. It calls
//! those functions by two instructions, between which a task may stand for as long as it likes:
//!
//! ```text
//! auipc rd, upper
//! jalr  ra, lower(rd)
//! ```
//!
//! So only the first changes, and our stub lies where the second, as it is, leads from there: as far
//! into its page as the function. Whatever a task has in `rd`, it comes to one of the two.

use super::gap::{Gap, MAX_TRAP, NO_TRAP};
use crate::kernel::Kernel;
use crate::kernel::tracepoints::Hooks;
use crate::tracer::arch::PointReason;
use crate::tracer::guest::{Guest, Image};
use crate::tracer::patch::Edit;
use crate::tracer::stops::{Moment, Stops, Stub};
use crate::tracer::trace::TraceError;
use crate::tracer::tracepoints::guest::{self as points, Call, Probes};
use crate::tracer::view::View;
use std::collections::HashMap;
use std::ops::Range;
use vmtrace_trampolines::riscv64::encode::register::{T0, T2, ZERO};
use vmtrace_trampolines::riscv64::encode::{NOP, auipc, j, jal, jalr, split};

/// Bytes of an instruction that is not compressed.
const LEN: usize = 4;
/// As far as `jal` reaches.
const REACH: i64 = 1 << 20;
/// Bits of `auipc` beside its constant.
const BELOW_UPPER: u32 = 0xfff;
/// From a probe to what its program returns to.
const PROBE_CALL: u64 = 4;
/// `ret`
const RET: u32 = 0x0000_8067;

/// What `auipc`, and `jalr` behind it, call or jump to from the link address `link`.
fn call(link: u64, first: u32, second: u32) -> Option<Call> {
    const AUIPC: u32 = 0x17;
    const JALR: u32 = 0x67;
    const RA: u32 = 1;
    let register = |bits: u32| bits & 0x1f;
    let is_pair = first & 0x7f == AUIPC
        && second & 0x707f == JALR
        && register(first >> 7) == register(second >> 15);
    let into = register(second >> 7);
    if !is_pair || ![0, RA].contains(&into) {
        return None;
    }
    let upper = i64::from((first & !BELOW_UPPER).cast_signed());
    let lower = i64::from(second.cast_signed() >> 20);
    Some(Call { link, target: link.wrapping_add_signed(upper + lower), jumps: into == 0 })
}

/// What may be calls and jumps in code at a link address.
fn calls(start: u64, body: &[u8]) -> Vec<Call> {
    // Compressed instructions are of two bytes.
    let pairs = (start..).step_by(2).zip(body.windows(2 * LEN).step_by(2));
    let found = |(link, pair): (u64, &[u8])| {
        let &[a, b, c, d, e, f, g, h] = pair else { return None };
        call(link, u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
    };
    pairs.filter_map(found).collect()
}

/// A function's stub: exits, and goes on to the function. A call's registers for temporaries are
/// free; the trap takes a7, which no argument of these functions is in.
fn stub(trap: &[u8], at: u64, function: u64) -> Option<Vec<u8>> {
    let jump = at.wrapping_add(MAX_TRAP as u64);
    let (upper, lower) = split(function.wrapping_sub(jump).cast_signed())?;
    let go_on = [auipc(T2, upper), jalr(ZERO, T2, lower)].map(u32::to_le_bytes).concat();
    (trap.len() == MAX_TRAP).then(|| [trap, &go_on].concat())
}

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
    let mut stubs = HashMap::new();
    let mut stops = Stops::default();
    for (moment, call) in points::brackets(kernel, calls).ok_or_else(unknown)? {
        let (from, function) = (image.runtime(call.link), image.runtime(call.target));
        let (mut now, at) = ([0; 2 * LEN], image.physical_of(call.link));
        guest.read(at, &mut now)?;
        if kernel.bytes(call.link, now.len()) != Some(&now) {
            return Err(unknown());
        }
        let address = match stubs.get(&function) {
            Some(&known) => known,
            None => {
                let code = |at| stub(trap, at, function);
                let put = gap.put_like(guest, function, 2 * MAX_TRAP, code)?;
                let (address, physical) =
                    put.ok_or(TraceError::Code("what follows its text is full"))?;
                let stop = Stub::new(address, physical, trap, &NO_TRAP).ok_or_else(unknown)?;
                stops.stub(moment, stop);
                *stubs.entry(function).or_insert(address)
            }
        };
        let [a, b, c, d, ..] = now;
        let first = u32::from_le_bytes([a, b, c, d]);
        // By as many pages as the stub is away from the function.
        let pages = address.wrapping_sub(function).cast_signed();
        let upper = i64::from((first & !BELOW_UPPER).cast_signed()) + pages;
        let upper = i32::try_from(upper).map_err(|_| unknown())?;
        debug_assert_eq!(upper.cast_unsigned() & BELOW_UPPER, 0, "{from:#x}");
        let ours = first & BELOW_UPPER | upper.cast_unsigned();
        let edit = Edit::new(at, &first.to_le_bytes(), &ours.to_le_bytes());
        stops.lead(edit.ok_or_else(unknown)?);
    }
    Ok(stops)
}

/// A probe at `at` that calls the program at `program`, and what the program returns to: see
/// [`compile`](vmtrace_trampolines::riscv64::compile). `None` when that is out of reach.
pub(super) fn probe(at: u64, program: u64) -> Option<(Vec<u8>, u64)> {
    let distance = reach(at, program)?;
    Some(([jal(T0, distance), RET].map(u32::to_le_bytes).concat(), at + PROBE_CALL))
}

fn reach(from: u64, to: u64) -> Option<i32> {
    let distance = to.wrapping_sub(from).cast_signed();
    i32::try_from(distance).ok().filter(|_| (-REACH..REACH).contains(&distance))
}

/// What is to be written, with our own array of probes at run-time address `ours`.
pub(super) fn edits(
    view: &View<'_>,
    image: &Image,
    hooks: &Hooks,
    ours: u64,
    probes: &Probes,
    init: &Range<u64>,
) -> Result<Vec<Edit>, PointReason> {
    let too_far = PointReason::OutOfReach;
    let funcs = image.physical_of(hooks.funcs);
    let array = Edit::new(funcs, &probes.array().to_le_bytes(), &ours.to_le_bytes());
    let mut edits = vec![array.ok_or(too_far)?];
    let mut count = 0;
    for branch in hooks.branches.iter().filter(|branch| !init.contains(&branch.code)) {
        count += 1;
        let at = image.physical_of(branch.code);
        let found = view.load(at, 4).map_err(|_| PointReason::NoRam)?;
        let distance = reach(branch.code, branch.target).ok_or(too_far)?;
        let jump = j(distance);
        match (found == u64::from(jump), probes.all().is_empty()) {
            // The guest's own probes need it as well.
            (true, false) => {}
            (false, true) if found == u64::from(NOP) => {
                let edit = Edit::new(at, &NOP.to_le_bytes(), &jump.to_le_bytes());
                edits.push(edit.ok_or(too_far)?);
            }
            _ => return Err(PointReason::Unknown),
        }
    }
    if count == 0 { Err(PointReason::Nowhere) } else { Ok(edits) }
}
