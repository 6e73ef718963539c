//! Finds the calls between which the guest's ftrace changes sites: from
//! `ftrace_arch_code_modify_prepare` to `..._post_process` (arch/x86/kernel/ftrace.c).
//!
//! All changes of live sites happen between two instructions in these functions, with `text_mutex`
//! held. The entries of the functions would be wrong: there other tasks may still hold the lock, or
//! pokes are pending. A context can only be suspended at the first byte of what is replaced.

use super::{map, site};
use crate::kernel::Kernel;
use crate::tracer::edit::Edit;
use crate::tracer::error::TraceError;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::mutex::{LOCKS, UNLOCKS};
use crate::tracer::stops::{Moment, Stops, Stub};

const PREPARE: &str = "ftrace_arch_code_modify_prepare";
const FINISH: &str = "ftrace_arch_code_modify_post_process";

/// More than either function has.
const LONGEST: usize = 96;
/// `movl $imm32, disp32(%rip)`.
const STORE: [u8; 2] = [0xc7, 0x05];
/// `xor %eax, %eax`.
const CLEAR: [u8; 2] = [0x31, 0xc0];
/// Bytes of a store.
const STORE_LEN: usize = 10;

/// An instruction of the kernel at a link address.
struct Found<const N: usize> {
    link: u64,
    bytes: [u8; N],
}

/// The first call of (or jump to) one of these functions in another.
fn find(kernel: &Kernel, function: &'static str, callees: &[&str]) -> Option<Found<{ site::LEN }>> {
    let start = kernel.symbols().address(function)?;
    let body = kernel.bytes(start, LONGEST)?;
    let callees: Vec<u64> =
        callees.iter().filter_map(|name| kernel.symbols().address(name)).collect();
    (start..).zip(body.windows(site::LEN)).find_map(|(link, bytes)| {
        let &[opcode @ (0xe8 | 0xe9), a, b, c, d] = bytes else { return None };
        let target = site::jump_target(link, &[0xe9, a, b, c, d])?;
        let bytes = [opcode, a, b, c, d];
        callees.contains(&target).then_some(Found { link, bytes })
    })
}

/// The store behind the call that takes the lock. Before 5.15 the function returns 0, which may be
/// put between the two.
fn begin(kernel: &Kernel) -> Option<Found<STORE_LEN>> {
    let behind = find(kernel, PREPARE, &LOCKS)?.link + site::LEN as u64;
    let clears = kernel.bytes(behind, CLEAR.len())? == CLEAR;
    let link = behind + if clears { CLEAR.len() as u64 } else { 0 };
    let bytes: [u8; STORE_LEN] = kernel.bytes(link, STORE_LEN)?.try_into().ok()?;
    bytes.starts_with(&STORE).then_some(Found { link, bytes })
}

/// Makes the code of both stubs, to be put at run-time address `at` of an annex that lies at
/// guest-physical `annex`, and what leads there.
///
/// # Errors
/// When the kernel has another code there.
pub(super) fn make(
    guest: &dyn Guest,
    image: &Image,
    kernel: &Kernel,
    trap: &[u8],
    (at, annex): (u64, u64),
) -> Result<(Vec<u8>, Stops<Moment>), TraceError> {
    let unknown = || TraceError::Ftrace("how it changes sites");
    let (begin, end) = begin(kernel).zip(find(kernel, FINISH, &UNLOCKS)).ok_or_else(unknown)?;
    verify(guest, image, &begin)?;
    verify(guest, image, &end)?;
    let len = trap.len() as u64;
    let mut stops = Stops::default();
    let mut stop = |moment, link, bytes: &[u8; site::LEN], ours: Option<[u8; site::LEN]>, stub| {
        stops.stub(moment, Stub::new(stub, annex + (stub - map::ADDRESS), trap, &site::QUIET)?);
        stops.lead(Edit::new(image.physical_of(link), bytes, &ours?)?);
        Some(())
    };

    // trap; movl; jmp back
    let from = image.runtime(begin.link);
    let [a, b, c, d, e, f, g, h, i, j] = begin.bytes;
    let variable = from
        .wrapping_add(STORE_LEN as u64)
        .wrapping_add_signed(i32::from_le_bytes([c, d, e, f]).into());
    let mut code = trap.to_vec();
    let behind = at + (code.len() + STORE_LEN) as u64;
    let distance = i32::try_from(variable.wrapping_sub(behind).cast_signed());
    code.extend([a, b]);
    code.extend(distance.map_err(|_| unknown())?.to_le_bytes());
    code.extend([g, h, i, j]);
    code.extend(site::jump(behind, from + STORE_LEN as u64).ok_or_else(unknown)?);
    let front = [a, b, c, d, e];
    stop(Moment::Begin, begin.link, &front, site::jump(from, at), at).ok_or_else(unknown)?;

    // trap; jmp mutex_unlock
    code.resize(code.len().next_multiple_of(16), 0xcc);
    let stub = at + code.len() as u64;
    let from = image.runtime(end.link);
    let [opcode, a, b, c, d] = end.bytes;
    let unlock = site::jump_target(from, &[0xe9, a, b, c, d]).ok_or_else(unknown)?;
    code.extend(trap);
    code.extend(site::jump(stub + len, unlock).ok_or_else(unknown)?);
    let ours = site::jump(from, stub).map(|[_, a, b, c, d]| [opcode, a, b, c, d]);
    stop(Moment::End, end.link, &end.bytes, ours, stub).ok_or_else(unknown)?;
    Ok((code, stops))
}

/// Whether the running kernel has what its image has.
fn verify<const N: usize>(
    guest: &dyn Guest,
    image: &Image,
    found: &Found<N>,
) -> Result<(), GuestError> {
    let mut now = [0; N];
    guest.read(image.physical_of(found.link), &mut now)?;
    if now != found.bytes {
        let address = image.runtime(found.link);
        return Err(GuestError::Mismatch(format!(
            "{address:#x} holds {now:02x?}, not {:02x?}",
            found.bytes
        )));
    }
    Ok(())
}
