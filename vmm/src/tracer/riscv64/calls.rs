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
use crate::tracer::edit::Edit;
use crate::tracer::error::TraceError;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::module_calls::{self, ModuleMoment};
use crate::tracer::stops::{Stops, Stub};
use crate::tracer::tracepoints::guest::Call;
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

/// Calls of these functions in those by which the kernel loads and unloads modules.
fn of_modules(
    kernel: &Kernel,
    functions: &[(ModuleMoment, &'static str)],
) -> Result<Vec<(ModuleMoment, Call)>, TraceError> {
    let mut found = Vec::new();
    let all: Vec<Call> =
        module_calls::callers(kernel).flat_map(|(start, body)| calls(start, body)).collect();
    for &(moment, name) in functions {
        let function = kernel.symbols().address(name);
        if function.is_none() && !moment.is_needed() {
            continue;
        }
        let function = function.ok_or(TraceError::NoSymbol(name))?;
        let own = all.iter().filter(|call| call.target == function);
        let before = found.len();
        found.extend(own.map(|&call| (moment, call)));
        log::debug!("calls of {name}: {:x?}", found.get(before..));
        if found.len() == before && moment.is_needed() {
            return Err(module_calls::UNKNOWN);
        }
    }
    Ok(found)
}

/// Lets all calls of these functions exit to the VMM first, by `trap`: puts stubs into the gap, and
/// what leads there.
///
/// # Errors
/// When the kernel has no such function, or no call of it where it should be.
pub(super) fn modules(
    gap: &mut Gap,
    guest: &dyn Guest,
    (image, kernel): (&Image, &Kernel),
    functions: &[(ModuleMoment, &'static str)],
    trap: &[u8],
) -> Result<Stops<ModuleMoment>, TraceError> {
    let calls = of_modules(kernel, functions)?;
    lead(gap, guest, (image, kernel), &calls, trap, &module_calls::UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    // A call that is not found is a module whose memory is written after it is gone.
    #[test]
    fn all_calls_of_the_kernel_are_found() {
        for name in ["riscv64-6.12", "riscv64-7"] {
            let cache = vmtrace_emulated::cache_dir().expect("no cache directory");
            let path = cache.join("kernels").join(name).join("vmlinuz");
            let kernel = Kernel::open(&path).unwrap();
            let symbol = |name| kernel.symbols().address(name).unwrap();
            let (start, end) = (symbol("_stext"), symbol("_etext"));
            let text = kernel.bytes(start, usize::try_from(end - start).unwrap()).unwrap();
            let all = calls(start, text);
            // Others are told of other things by the last one.
            let needed = module_calls::FUNCTIONS.into_iter().filter(|it| it.0.is_needed());
            for function in needed {
                let address = symbol(function.1);
                let of = |calls: Vec<Call>| -> Vec<u64> {
                    let own = calls.into_iter().filter(|call| call.target == address);
                    own.map(|call| call.link).collect()
                };
                let known = of_modules(&kernel, &[function]).unwrap();
                let known = of(known.into_iter().map(|(_, call)| call).collect());
                assert!(!known.is_empty());
                assert_eq!(known, of(all.clone()), "{name}: {}", function.1);
            }
        }
    }
}
