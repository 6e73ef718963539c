//! The instructions at a call site: two of 4 bytes, at any even address.

use vmtrace_trampolines::riscv64::encode::register::T0;
use vmtrace_trampolines::riscv64::encode::{NOP, auipc, jalr, split};

/// Bytes of a literal, which lies before the function.
pub(super) const LITERAL: usize = 8;
/// Bytes of a site, from the function's entry on.
pub(super) const LEN: usize = 8;
/// Offset of its second instruction.
pub(super) const SECOND: usize = 4;
/// Bytes from one entry of a [`table`](Aim) to the next.
pub(super) const STEP: u8 = 4;
/// Entries of a table.
pub(super) const ENTRIES: u16 = 512;
/// Distance of the second copy of a table from the first.
pub(super) const COPY: u64 = 2048;

/// How a site reaches every entry of a table by its second instruction alone.
///
/// That instruction adds 12 signed bits to what `auipc` makes of the site's own
/// address, so the reach is a window of 4 KiB whose place differs from site to site.
/// A table of 2 KiB lies in it as a whole or not; of two side by side, one always does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aim {
    upper: u32,
    /// Of the first entry.
    lower: i32,
}

impl Aim {
    /// From the site at `entry` to the tables at `table`; `None` when out of reach.
    pub(super) fn new(entry: u64, table: u64) -> Option<Self> {
        const HALF: i32 = ENTRIES as i32 * STEP as i32 / 2;
        [table, table + COPY].into_iter().find_map(|copy| {
            let distance = copy.wrapping_sub(entry).cast_signed();
            let (upper, middle) = split(distance + i64::from(HALF))?;
            let lower = middle - HALF;
            (lower >= -2048 && middle + HALF <= 2048).then_some(Self { upper, lower })
        })
    }

    /// The site's first instruction, for good.
    pub(super) fn first(self) -> u32 {
        auipc(T0, self.upper)
    }

    /// The second instruction that calls an entry of the table.
    pub(super) fn call(self, entry: u16) -> u32 {
        jalr(T0, T0, self.lower + i32::from(entry) * i32::from(STEP))
    }
}

/// Both instructions of a call from `entry` to `target`; `None` when out of reach.
pub(super) fn call(entry: u64, target: u64) -> Option<[u32; 2]> {
    let (upper, lower) = split(target.wrapping_sub(entry).cast_signed())?;
    Some([auipc(T0, upper), jalr(T0, T0, lower)])
}

/// Where a call at `entry` leads, if these are its instructions: the inverse of [`call`].
pub(super) fn called(entry: u64, [first, second]: [u32; 2]) -> Option<u64> {
    let upper = i64::from((first & !0xfff).cast_signed());
    let lower = i64::from(second.cast_signed() >> 20);
    let target = entry.wrapping_add_signed(upper + lower);
    (call(entry, target) == Some([first, second])).then_some(target)
}

/// What a kprobe of the guest's puts over an instruction of four bytes.
const EBREAK: u32 = 0x0010_0073;

/// Whether a site with a literal holds these instructions: the first, which nobody changes, may be
/// under a kprobe of the guest's, which does what that does.
pub(super) fn is([first, second]: [u32; 2], expected: [u32; 2]) -> bool {
    (first == expected[0] || first == EBREAK) && second == expected[1]
}

/// What foreign instructions at a site most likely are.
pub(super) fn describe([first, second]: [u32; 2]) -> &'static str {
    const C_EBREAK: u32 = 0x9002;
    const CALL: u32 = jalr(T0, T0, 0);
    if [first, second].contains(&EBREAK) || first & 0xffff == C_EBREAK {
        "a breakpoint"
    } else if second & 0xf_ffff == CALL {
        "a call"
    } else if second == NOP {
        "another first instruction"
    } else {
        "other bytes"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn target(entry: u64, upper: u32, jalr: u32) -> u64 {
        let upper = i64::from((upper << 12).cast_signed());
        let lower = i64::from(jalr.cast_signed() >> 20);
        entry.wrapping_add_signed(upper + lower)
    }

    proptest! {
        // A site that cannot reach one of the entries could never get that ops; one
        // that reaches another place crashes the guest.
        #[test]
        fn every_site_reaches_every_entry(site in 0_u64..0x40_0000, gap in 0x800_u64..0xc00) {
            let entry = 0xffff_ffff_8000_0000 + site * 2;
            let table = 0xffff_ffff_8000_0000 + gap * 4096;
            let aim = Aim::new(entry, table).unwrap();
            let base = target(entry, aim.upper, aim.call(0));
            prop_assert!(base == table || base == table + COPY);
            for index in 0..ENTRIES {
                let jalr = aim.call(index);
                prop_assert_eq!(jalr & 0xf_ffff, 0x282e7);
                prop_assert_eq!(target(entry, aim.upper, jalr), base + 4 * u64::from(index));
            }
        }
    }

    #[test]
    fn what_is_out_of_reach_is_refused() {
        assert_eq!(Aim::new(0x4000_0000, 0xffff_ffff_8000_0000), None);
        assert_eq!(call(0xffff_ffff_8000_0000, 0x4000_0000), None);
    }

    // From the first address of Debian's 7.2 to its ftrace_caller, by GNU as.
    #[test]
    fn calls_are_those_of_the_kernel() {
        let [first, second] = call(0xffff_ffff_8000_0000, 0xffff_ffff_8002_29e8).unwrap();
        assert_eq!((first, second), (0x0002_3297, 0x9e82_82e7));
        let back = |words| called(0xffff_ffff_8000_0000, words);
        assert_eq!(back([first, second]), Some(0xffff_ffff_8002_29e8));
        // Of another register, or no call.
        assert_eq!(back([first ^ 1 << 7, second]), None);
        assert_eq!(back([first, NOP]), None);
    }
}
