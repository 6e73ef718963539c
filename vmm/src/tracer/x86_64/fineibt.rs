//! Jumps through a register that FineIBT checks (arch/x86/kernel/alternative.c, `cfi_rewrite_callers`).
//!
//! What such a jump leads to begins 16 bytes before its function, with an instruction that compares a hash in r10 or rax. Programs lose
//! r10, and the flags that some kernels compare with before the jump; and the register does not have the address of a function. So
//! these jumps are left alone. Without FineIBT, clang's checks (CONFIG_CFI) are done before the jump.

use crate::tracer::edit::SkipReason;
use crate::tracer::spot::{PAGE, Spot};
use crate::tracer::view::View;

/// r11: clang's calls through pointers are all by this one, and so are these.
pub(super) const REGISTER: u8 = 11;

/// Bytes in front of such a jump.
const LEN: usize = 14;

/// What they are; `None` is part of the hash.
type Pattern = [Option<u8>; LEN];

/// The bytes, behind so many of the instruction that loads the hash, and the hash.
const fn pattern<const A: usize, const B: usize>(load: [u8; A], rest: [u8; B]) -> Pattern {
    let mut all = [None; LEN];
    let mut at = 0;
    while at < A {
        all[at] = Some(load[at]);
        at += 1;
    }
    at = 0;
    while at < B {
        all[LEN - B + at] = Some(rest[at]);
        at += 1;
    }
    all
}

const PATTERNS: [Pattern; 3] = [
    // Until Linux 6.15: mov $hash, %r10d; sub $16, %r11; nopl
    pattern([0x41, 0xba], [0x49, 0x83, 0xeb, 0x10, 0x0f, 0x1f, 0x40, 0x00]),
    // From 6.16 on: mov $hash, %eax; lea -16(%r11), %r11; nopl
    pattern([0xb8], [0x4d, 0x8d, 0x5b, 0xf0, 0x0f, 0x1f, 0x44, 0x00, 0x00]),
    // The same, "paranoid": mov $hash, %eax; cmp -11(%r11), %eax; cs lea -16(%r11), %r11; jne
    pattern([0xb8], [0x41, 0x3b, 0x43, 0xf5, 0x2e, 0x4d, 0x8d, 0x5b, 0xf0]),
];

/// Whether FineIBT checks the jump at a place of the running kernel, as far as that can be seen on its page: where all of
/// what is seen could be such a check, it is one.
pub(super) fn checks(view: &View<'_>, spot: &Spot) -> Result<bool, SkipReason> {
    let on_page = usize::try_from(spot.physical % PAGE).unwrap_or(0);
    let mut found = [0; LEN];
    let seen = &mut found[..on_page.min(LEN)];
    let from = spot.physical - seen.len() as u64;
    view.read(from, seen).map_err(|_| SkipReason::NoRam)?;
    Ok(is_check(seen))
}

/// Whether these can be the last bytes in front of such a jump.
fn is_check(seen: &[u8]) -> bool {
    PATTERNS.iter().any(|pattern| {
        let last = pattern.iter().rev().zip(seen.iter().rev());
        last.into_iter().all(|(wanted, found)| wanted.is_none_or(|wanted| wanted == *found))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::Ram;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    const HASH: [u8; 4] = [0x12, 0x34, 0x56, 0x78];

    fn before(load: &[u8], rest: &[u8]) -> Vec<u8> {
        [load, &HASH, rest].concat()
    }

    // One that is taken loses its hash, and the guest dies at the first call (6.12: ud2 in the preamble of what it calls).
    #[test]
    fn each_form_is_known_wherever_it_lies() {
        let forms = [
            before(&[0x41, 0xba], &[0x49, 0x83, 0xeb, 0x10, 0x0f, 0x1f, 0x40, 0]),
            before(&[0xb8], &[0x4d, 0x8d, 0x5b, 0xf0, 0x0f, 0x1f, 0x44, 0, 0]),
            before(&[0xb8], &[0x41, 0x3b, 0x43, 0xf5, 0x2e, 0x4d, 0x8d, 0x5b, 0xf0]),
        ];
        let ram = Ram(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x3000)]).unwrap());
        let view = View::ram(&ram, [0x1000, 0x2000]);
        for form in forms {
            for end in 0x1000_u64..0x1040 {
                ram.0.write_slice(&form, GuestAddress(end - LEN as u64)).unwrap();
                let spot = Spot::place(0, (end, None));
                assert!(checks(&view, &spot).unwrap(), "{form:x?} before {end:#x}");
                // Nothing else is one, where there is a byte of it on the page that says so.
                for at in 0..LEN {
                    let is_hash = form[at..].starts_with(&HASH)
                        || (1..4).any(|back| at >= back && form[at - back..].starts_with(&HASH));
                    let byte = GuestAddress(end - (LEN - at) as u64);
                    if is_hash || byte.0 < 0x1000 {
                        continue;
                    }
                    ram.0.write_obj(!form[at], byte).unwrap();
                    assert!(!checks(&view, &spot).unwrap(), "{form:x?} but {at}");
                    ram.0.write_obj(form[at], byte).unwrap();
                }
            }
        }
        // CONFIG_CFI without FineIBT: it has been checked there.
        let checked = [0x44, 0x03, 0x53, 0xf1, 0x74, 0x02, 0x0f, 0x0b];
        assert!(!is_check(&[&[0x41, 0xba][..], &HASH, &checked].concat()));
    }
}
