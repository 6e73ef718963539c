//! The instruction at a call site.

/// Bytes of a site.
pub(crate) const LEN: usize = BYTES as usize;
/// The same number.
pub(crate) const BYTES: u8 = 5;

/// What a disabled site can hold once the kernel has run `ftrace_init`: one instruction.
/// Before 5.13 kernels chose it by the processor (arch/x86/kernel/alternative.c,
/// `x86_nops[5]`; before, `ideal_nops[NOP_ATOMIC5]`).
pub(crate) const DISABLED: [[u8; LEN]; 2] =
    [[0x0f, 0x1f, 0x44, 0x00, 0x00], [0x66, 0x66, 0x66, 0x66, 0x90]];

/// `endbr64`: where indirect calls may arrive.
pub(crate) const ENDBR: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// A return as kernels write it where no return thunk is needed.
pub(crate) const RETURN: [u8; LEN] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];

/// The same as the low bytes of a word.
pub(crate) const RETURN_WORD: u64 = 0x00cc_cccc_ccc3;

/// A nop of the length of a trap, which is that of a short jump, too.
pub(crate) const QUIET: [u8; 2] = [0x66, 0x90];

/// `lea rsp, [rsp + 8]`: what a site has pushed is gone, and the flags are as they were.
pub(crate) const DROP_RETURN: [u8; 5] = [0x48, 0x8d, 0x64, 0x24, 0x08];

/// A jump from `from` to `target`; `None` when out of reach.
pub(crate) fn jump(from: u64, target: u64) -> Option<[u8; LEN]> {
    let [_, a, b, c, d] = call(from, target)?;
    Some([0xe9, a, b, c, d])
}

/// Where a jump at run-time address `from` leads; `None` when the bytes are no such jump.
pub(crate) fn jump_target(from: u64, bytes: &[u8]) -> Option<u64> {
    let [0xe9, a, b, c, d] = *bytes else { return None };
    let distance = i64::from(i32::from_le_bytes([a, b, c, d]));
    Some(from.wrapping_add(LEN as u64).wrapping_add_signed(distance))
}

/// The same of the first bytes of a word, the first lowest.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a byte and four behind it")]
pub(crate) fn jump_of_word(from: u64, word: u64) -> Option<u64> {
    let distance = i64::from(((word >> 8) as u32).cast_signed());
    (word as u8 == 0xe9).then(|| from.wrapping_add(LEN as u64).wrapping_add_signed(distance))
}

/// A call from a site at run-time address `site` to `target`; `None` when out of
/// reach.
pub(crate) fn call(site: u64, target: u64) -> Option<[u8; LEN]> {
    let distance = target.wrapping_sub(site.wrapping_add(LEN as u64)).cast_signed();
    let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
    Some([0xe8, a, b, c, d])
}

/// What foreign bytes at a site most likely are.
pub(crate) fn describe(bytes: [u8; LEN]) -> &'static str {
    match bytes[0] {
        0xe8 => "a call",
        0xe9 => "a jump",
        0xcc => "a breakpoint",
        _ => "other bytes",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Two instructions could have a context between them.
    #[test]
    fn a_disabled_site_is_one_instruction() {
        assert!(DISABLED.iter().all(|bytes| describe(*bytes) == "other bytes"));
        let ends = |bytes: &[u8; LEN]| bytes.iter().filter(|byte| **byte == 0x90).count();
        assert_eq!(DISABLED.map(|bytes| ends(&bytes)), [0, 1]);
        assert_eq!(DISABLED[1][LEN - 1], 0x90);
    }

    #[test]
    fn jumps_lead_back() {
        let (from, to) = (0xffff_ffff_8100_0000, 0xffff_ffff_8000_1234);
        assert_eq!(jump_target(from, &jump(from, to).unwrap()), Some(to));
        assert_eq!(jump_target(from, &call(from, to).unwrap()), None);
        // Of six bytes, as some exits have.
        let words = [jump, call].map(|make| {
            let [a, b, c, d, e] = make(from, to).unwrap();
            u64::from_le_bytes([a, b, c, d, e, 0x90, 0, 0])
        });
        assert_eq!(words.map(|word| jump_of_word(from, word)), [Some(to), None]);
        assert_eq!(RETURN_WORD.to_le_bytes()[..LEN], RETURN);
    }

    #[test]
    fn calls_reach_both_ways_and_no_further() {
        let base = 0xffff_ffff_8000_0000;
        assert_eq!(call(base, base + 5), Some([0xe8, 0, 0, 0, 0]));
        assert_eq!(call(base + 0x100_0000, base), Some([0xe8, 0xfb, 0xff, 0xff, 0xfe]));
        assert_eq!(call(0x1000, base - (1 << 32)), None);
    }
}
