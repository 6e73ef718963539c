//! Redirects calls in the kernel's code through stubs that exit to the VMM.
//!
//! A call is two instructions, between which a task may be suspended for any time:
//!
//! ```text
//! auipc rd, upper
//! jalr  ra, lower(rd)
//! ```
//!
//! So only the first is changed. The stub is at the same offset in its page as the function, so that
//! the unchanged second instruction reaches it. Whatever value a task has in `rd`, it reaches either
//! the function or the stub.

use super::gap::{FULL, Gap, MAX_TRAP, NO_TRAP};
use crate::kernel::Kernel;
use crate::tracer::call::Call;
use crate::tracer::edit::Edit;
use crate::tracer::error::TraceError;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::stops::{Stops, Stub};
use std::collections::HashMap;
use vmtrace_trampolines::riscv64::encode::register::{T2, ZERO};
use vmtrace_trampolines::riscv64::encode::{auipc, jalr, split};

/// Bytes of an instruction that is not compressed.
const LEN: usize = 4;
/// Bits of `auipc` beside its constant.
const BELOW_UPPER: u32 = 0xfff;

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
pub(super) fn calls(start: u64, body: &[u8]) -> Vec<Call> {
    // Compressed instructions are of two bytes.
    let pairs = (start..).step_by(2).zip(body.windows(2 * LEN).step_by(2));
    let found = |(link, pair): (u64, &[u8])| {
        let &[a, b, c, d, e, f, g, h] = pair else { return None };
        call(link, u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
    };
    pairs.filter_map(found).collect()
}

/// A function's stub: exits, and goes on to the function. A call's registers for temporaries are
/// free; the trap takes a7, which no argument of the functions that are meant is in.
fn stub(trap: &[u8], at: u64, function: u64) -> Option<Vec<u8>> {
    let jump = at.wrapping_add(MAX_TRAP as u64);
    let (upper, lower) = split(function.wrapping_sub(jump).cast_signed())?;
    let go_on = [auipc(T2, upper), jalr(ZERO, T2, lower)].map(u32::to_le_bytes).concat();
    (trap.len() == MAX_TRAP).then(|| [trap, &go_on].concat())
}

/// What leads a call through a stub at a run-time address, which lies as far into its page as the
/// function; `None` when the kernel has another code there.
pub(super) fn redirect(
    guest: &dyn Guest,
    (image, kernel): (&Image, &Kernel),
    call: Call,
    stub: u64,
) -> Result<Option<Edit>, GuestError> {
    let (mut now, at) = ([0; 2 * LEN], image.physical_of(call.link));
    guest.read(at, &mut now)?;
    if kernel.bytes(call.link, now.len()) != Some(&now) {
        return Ok(None);
    }
    let [a, b, c, d, ..] = now;
    let first = u32::from_le_bytes([a, b, c, d]);
    // By as many pages as the stub is away from the function.
    let pages = stub.wrapping_sub(image.runtime(call.target)).cast_signed();
    let upper = i64::from((first & !BELOW_UPPER).cast_signed()) + pages;
    let Ok(upper) = i32::try_from(upper) else { return Ok(None) };
    debug_assert_eq!(upper.cast_unsigned() & BELOW_UPPER, 0, "{stub:#x}");
    let ours = first & BELOW_UPPER | upper.cast_unsigned();
    Ok(Edit::new(at, &first.to_le_bytes(), &ours.to_le_bytes()))
}

/// Puts a stub into the gap for each function that these call, and what leads there; each vCPU that
/// comes stops by `trap`, for what is beside the call. Nothing has been written to the guest's own
/// code yet. `unknown`: that the kernel has another code there.
///
/// # Errors
/// When there is no room, or as `unknown` says.
pub(super) fn lead<M: Copy>(
    gap: &mut Gap,
    guest: &dyn Guest,
    (image, kernel): (&Image, &Kernel),
    calls: &[(M, Call)],
    trap: &[u8],
    unknown: &TraceError,
) -> Result<Stops<M>, TraceError> {
    let unknown = || unknown.clone();
    let mut stubs = HashMap::new();
    let mut stops = Stops::default();
    for &(means, call) in calls {
        let function = image.runtime(call.target);
        let address = match stubs.get(&function) {
            Some(&known) => known,
            None => {
                let code = |at| stub(trap, at, function);
                let put = gap.put_like(guest, function, 2 * MAX_TRAP, code)?;
                let (address, physical) = put.ok_or(FULL)?;
                let stop = Stub::new(address, physical, trap, &NO_TRAP).ok_or_else(unknown)?;
                stops.stub(means, stop);
                *stubs.entry(function).or_insert(address)
            }
        };
        stops.lead(redirect(guest, (image, kernel), call, address)?.ok_or_else(unknown)?);
    }
    Ok(stops)
}
