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

/// More than either function has: with KASAN they are longer.
const LONGEST: usize = 256;
/// How `movl $imm32, disp32(%rip)` begins, and `movb $imm8, disp32(%rip)`, to which clang shortens it; and their
/// bytes.
const STORES: [([u8; 2], usize); 2] = [([0xc7, 0x05], 10), ([0xc6, 0x05], 7)];
/// What is stored.
const VARIABLE: &str = "ftrace_poke_late";

/// An instruction of the kernel at a link address.
#[derive(Debug, PartialEq, Eq)]
struct Found<B> {
    link: u64,
    bytes: B,
}

/// The first call of (or jump to) one of these functions in another.
fn find(
    kernel: &Kernel,
    function: &'static str,
    callees: &[&str],
) -> Option<Found<[u8; site::LEN]>> {
    let (start, body) = body(kernel, function)?;
    let callees: Vec<u64> =
        callees.iter().filter_map(|name| kernel.symbols().address(name)).collect();
    (start..).zip(body.windows(site::LEN)).find_map(|(link, bytes)| {
        let &[opcode @ (0xe8 | 0xe9), a, b, c, d] = bytes else { return None };
        let target = site::jump_target(link, &[0xe9, a, b, c, d])?;
        let bytes = [opcode, a, b, c, d];
        callees.contains(&target).then_some(Found { link, bytes })
    })
}

/// Where a function begins, and its code.
fn body<'a>(kernel: &'a Kernel, function: &str) -> Option<(u64, &'a [u8])> {
    let start = kernel.symbols().address(function)?;
    let end = kernel.symbols().next_after(start).unwrap_or(u64::MAX);
    let len = usize::try_from(end - start).unwrap_or(LONGEST).min(LONGEST);
    Some((start, kernel.bytes(start, len)?))
}

/// The store behind the call that takes the lock. What compilers put between the two differs: the end of a frame, the 0
/// that the function returns before 5.15, a sanitizer's check.
fn begin(kernel: &Kernel) -> Option<Found<&[u8]>> {
    let lock = find(kernel, PREPARE, &LOCKS)?;
    let (start, body) = body(kernel, PREPARE)?;
    let behind = usize::try_from(lock.link - start).ok()? + site::LEN;
    let code = body.get(behind..)?;
    let link = start + behind as u64;
    let (at, bytes) = only_store(code, link, kernel.symbols().address(VARIABLE))?;
    Some(Found { link: link + at as u64, bytes })
}

/// The one store of 1 into a variable in code at a link address, and how far into it that is. Not every kernel has the
/// variable's symbol.
fn only_store(code: &[u8], link: u64, variable: Option<u64>) -> Option<(usize, &[u8])> {
    let mut found = (0..code.len()).filter_map(|at| {
        let bytes = store(code.get(at..)?)?;
        let target = i32::from_le_bytes(*bytes.get(2..)?.first_chunk()?);
        let target = (link + (at + bytes.len()) as u64).wrapping_add_signed(target.into());
        variable.is_none_or(|variable| variable == target).then_some((at, bytes))
    });
    found.next().filter(|_| found.next().is_none())
}

/// The store that code begins with, if it is one of 1.
fn store(code: &[u8]) -> Option<&[u8]> {
    let (_, len) = STORES.iter().find(|(opcode, _)| code.starts_with(opcode))?;
    let bytes = code.get(..*len)?;
    matches!(bytes.get(6..)?, [1] | [1, 0, 0, 0]).then_some(bytes)
}

/// The same store as `bytes` of one at `from`, at another address.
fn moved(bytes: &[u8], from: u64, to: u64) -> Option<Vec<u8>> {
    let (opcode, rest) = bytes.split_at_checked(2)?;
    let (displacement, value) = rest.split_first_chunk::<4>()?;
    let distance = i64::from(i32::from_le_bytes(*displacement));
    // From the end of the instruction, which is as long there.
    let distance =
        i32::try_from(from.wrapping_sub(to).cast_signed().checked_add(distance)?).ok()?;
    Some([opcode, &distance.to_le_bytes(), value].concat())
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
    verify(guest, image, begin.link, begin.bytes)?;
    verify(guest, image, end.link, &end.bytes)?;
    let len = trap.len() as u64;
    let mut stops = Stops::default();
    let mut stop = |moment, link, bytes: &[u8; site::LEN], ours: Option<[u8; site::LEN]>, stub| {
        stops.stub(moment, Stub::new(stub, annex + (stub - map::ADDRESS), trap, &site::QUIET)?);
        stops.lead(Edit::new(image.physical_of(link), bytes, &ours?)?);
        Some(())
    };

    // trap; mov; jmp back
    let from = image.runtime(begin.link);
    let size = begin.bytes.len() as u64;
    let mut code = trap.to_vec();
    code.extend(moved(begin.bytes, from, at + len).ok_or_else(unknown)?);
    code.extend(site::jump(at + len + size, from + size).ok_or_else(unknown)?);
    let front = begin.bytes.first_chunk().ok_or_else(unknown)?;
    stop(Moment::Begin, begin.link, front, site::jump(from, at), at).ok_or_else(unknown)?;

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
fn verify(guest: &dyn Guest, image: &Image, link: u64, bytes: &[u8]) -> Result<(), GuestError> {
    let mut now = vec![0; bytes.len()];
    guest.read(image.physical_of(link), &mut now)?;
    if now != bytes {
        let address = image.runtime(link);
        return Err(GuestError::Mismatch(format!(
            "{address:#x} holds {now:02x?}, not {bytes:02x?}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // With clang's kernels nothing that we trace could be shared with the guest's own ftrace.
    #[test]
    fn stores_of_both_compilers_are_known_and_moved() {
        // movl $1, 0x1234(%rip); nop, and movb $1, 0x12e9a39(%rip); cs jmp
        let long = [0xc7, 5, 0x34, 0x12, 0, 0, 1, 0, 0, 0, 0x90];
        let short = [0xc6, 5, 0x39, 0x9a, 0x2e, 1, 1, 0x2e, 0xe9];
        assert_eq!(store(&long), Some(&long[..10]));
        assert_eq!(store(&short), Some(&short[..7]));
        assert_eq!((store(&short[..6]), store(&[0x90; 10])), (None, None));
        let zero = [0xc7, 5, 0x34, 0x12, 0, 0, 0, 0, 0, 0];
        assert_eq!(store(&zero), None, "what ends the change");
        let at = moved(&short[..7], 0xffff_ffff_8106_3d60, 0xffff_ffff_8106_3d00).unwrap();
        assert_eq!(at, [0xc6, 5, 0x99, 0x9a, 0x2e, 1, 1]);
        assert_eq!(moved(&long[..10], 0, 0x34).unwrap(), [0xc7, 5, 0, 0x12, 0, 0, 1, 0, 0, 0]);
        assert_eq!(moved(&short[..7], 1 << 40, 0), None, "out of reach");
    }

    // With frame pointers, or sanitizers, it is not right behind the call; a kernel without CONFIG_KALLSYMS_ALL does not
    // say where the variable is.
    #[test]
    fn the_store_is_found_behind_what_compilers_put_before_it() {
        const STORE: [u8; 10] = [0xc7, 5, 0x34, 0x12, 0, 0, 1, 0, 0, 0];
        // pop %rbp, and mov $imm32, %rdi; call
        let check = [0x48, 0xc7, 0xc7, 0, 0x10, 0, 0x82, 0xe8, 0, 0, 0, 0];
        for before in [&[][..], &[0x5d], &[0x31, 0xc0, 0x5d], &check] {
            let code = [before, &STORE, &[0xc3]].concat();
            let at = before.len();
            let variable = 0x1000 + at as u64 + 10 + 0x1234;
            for named in [None, Some(variable)] {
                assert_eq!(only_store(&code, 0x1000, named), Some((at, &STORE[..])));
            }
            assert_eq!(only_store(&code, 0x1000, Some(variable + 1)), None);
            assert_eq!(only_store(&[&code[..], &STORE].concat(), 0x1000, None), None, "which?");
        }
    }
}
