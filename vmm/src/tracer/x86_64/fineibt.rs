//! Jumps through a register that FineIBT checks (arch/x86/kernel/alternative.c, `cfi_rewrite_callers`).
//!
//! What such a jump leads to begins 16 bytes before its function, with an instruction that compares a hash in r10 or rax. Programs lose
//! r10, and the flags that some kernels compare with before the jump; and the register does not have the address of a function. So
//! these jumps are left alone. Without FineIBT, clang's checks (CONFIG_CFI) are done before the jump.

use crate::tracer::edit::SkipReason;
use crate::tracer::image::Image;
use crate::tracer::spot::{PAGE, Spot};
use crate::tracer::view::View;

/// r11: clang's calls through pointers are all by this one, and so are these.
pub(super) const REGISTER: u8 = 11;

/// What all of them have in front of the jump, whatever register has the hash and wherever it is compared: the address of
/// the function becomes that of what is before it.
const MOVES: [[u8; 4]; 2] = [
    // sub $16, %r11
    [0x49, 0x83, 0xeb, 0x10],
    // lea -16(%r11), %r11
    [0x4d, 0x8d, 0x5b, 0xf0],
];

/// Bytes in front of a jump that FineIBT writes, and the last of these, in which the address is moved.
const LEN: usize = 14;
const LAST: usize = 9;

/// Whether FineIBT checks the jump at a place of the running kernel. Where too little is seen of what is in front, it does:
/// the kernel's own code is in one piece, but pages of modules are anywhere.
pub(super) fn checks(view: &View<'_>, image: &Image, spot: &Spot) -> Result<bool, SkipReason> {
    let is_whole = image.physical_of(spot.site.location) == spot.physical;
    let on_page = usize::try_from(spot.physical % PAGE).unwrap_or(0);
    let mut found = [0; LEN];
    let seen = &mut found[..if is_whole { LEN } else { on_page.min(LEN) }];
    let from = spot.physical.checked_sub(seen.len() as u64).ok_or(SkipReason::NoRam)?;
    view.read(from, seen).map_err(|_| SkipReason::NoRam)?;
    Ok(is_check(seen))
}

/// Whether these can be the bytes in front of such a jump.
fn is_check(seen: &[u8]) -> bool {
    let moves = |bytes: &[u8]| MOVES.iter().any(|it| it == bytes);
    seen.len() < LAST || seen.windows(MOVES[0].len()).any(moves)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: [u8; 4] = [0x12, 0x34, 0x56, 0x78];

    fn before(load: &[u8], rest: &[u8]) -> Vec<u8> {
        [load, &HASH, rest].concat()
    }

    // One that is taken loses its hash, or the flags, and the guest dies at the first call (ud2 in the preamble of what it
    // calls).
    #[test]
    fn all_forms_are_known() {
        let forms = [
            // Linux 6.12: mov $hash, %r10d; sub $16, %r11; nopl
            before(&[0x41, 0xba], &[0x49, 0x83, 0xeb, 0x10, 0x0f, 0x1f, 0x40, 0]),
            // Later: mov $hash, %r10d; lea -16(%r11), %r11; nopl
            before(&[0x41, 0xba], &[0x4d, 0x8d, 0x5b, 0xf0, 0x0f, 0x1f, 0x40, 0]),
            // The same, "paranoid": mov $hash, %r10d; cmp -9(%r11), %r10d; lea -16(%r11), %r11; jne
            before(&[0x41, 0xba], &[0x45, 0x3b, 0x53, 0xf7, 0x4d, 0x8d, 0x5b, 0xf0]),
            // Linux 7: mov $hash, %eax; lea -16(%r11), %r11; nopl
            before(&[0xb8], &[0x4d, 0x8d, 0x5b, 0xf0, 0x0f, 0x1f, 0x44, 0, 0]),
            // The same, "paranoid": mov $hash, %eax; cmp -11(%r11), %eax; cs lea -16(%r11), %r11; jne
            before(&[0xb8], &[0x41, 0x3b, 0x43, 0xf5, 0x2e, 0x4d, 0x8d, 0x5b, 0xf0]),
        ];
        for form in &forms {
            assert_eq!(form.len(), LEN);
            for hidden in 0..=LEN {
                assert!(is_check(&form[hidden..]), "{form:x?} from {hidden}");
            }
        }
    }

    // What is left alone for nothing has no returns.
    #[test]
    fn nothing_else_is_one() {
        // CONFIG_CFI without FineIBT has checked it there: add -15(%r11), %r10d; je; ud2
        let checked = before(&[0x41, 0xba], &[0x44, 0x03, 0x53, 0xf1, 0x74, 0x02, 0x0f, 0x0b]);
        // cfi=off: jmp over it.
        let off = [&[0xeb, 0x0c][..], &HASH, &[0x44, 0x03, 0x53, 0xf1, 0x74, 0x02, 0x0f, 0x0b]];
        for bytes in [checked, off.concat(), vec![0x90; LEN], vec![0xcc; LAST]] {
            assert!(!is_check(&bytes), "{bytes:x?}");
        }
    }
}
