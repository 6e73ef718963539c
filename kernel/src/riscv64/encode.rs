//! Encodes the instructions of redirected exits and their stubs.

use super::decode::{Condition, RA};

/// `nop` in four bytes.
pub(crate) const NOP: u32 = 0x0000_0013;
/// `nop` in two bytes.
pub(crate) const SHORT_NOP: u16 = 0x0001;
/// `ret` in four bytes.
pub(crate) const RET: u32 = jalr(0, RA, 0);

const fn bits(value: i64, start: u32, width: u32) -> u32 {
    #[allow(clippy::cast_possible_truncation, reason = "cut to the width")]
    let value = (value.cast_unsigned() >> start) as u32;
    value & ((1 << width) - 1)
}

/// Whether a distance is even and within `bits` bits with the sign.
const fn fits(distance: i64, bits: u32) -> bool {
    let reach = 1 << (bits - 1);
    distance % 2 == 0 && distance >= -reach && distance < reach
}

/// From one address to another, the short way around.
pub(crate) const fn distance(from: u64, to: u64) -> i64 {
    to.wrapping_sub(from).cast_signed()
}

pub(crate) const fn auipc(rd: u8, upper: u32) -> u32 {
    0x17 | (rd as u32) << 7 | upper << 12
}

pub(crate) const fn addi(rd: u8, rs: u8, immediate: i64) -> u32 {
    0x13 | (rd as u32) << 7 | (rs as u32) << 15 | bits(immediate, 0, 12) << 20
}

pub(crate) const fn jalr(rd: u8, base: u8, immediate: i64) -> u32 {
    0x67 | (rd as u32) << 7 | (base as u32) << 15 | bits(immediate, 0, 12) << 20
}

/// `jal rd, . + distance`; none beyond 1 MiB.
pub(crate) fn jal(rd: u8, distance: i64) -> Option<u32> {
    fits(distance, 21).then(|| {
        0x6f | u32::from(rd) << 7
            | bits(distance, 12, 8) << 12
            | bits(distance, 11, 1) << 20
            | bits(distance, 1, 10) << 21
            | bits(distance, 20, 1) << 31
    })
}

/// `c.j . + distance`; none beyond 2 KiB.
pub(crate) fn short_jump(distance: i64) -> Option<u16> {
    let word = 0xa001
        | bits(distance, 11, 1) << 12
        | bits(distance, 4, 1) << 11
        | bits(distance, 8, 2) << 9
        | bits(distance, 10, 1) << 8
        | bits(distance, 6, 1) << 7
        | bits(distance, 7, 1) << 6
        | bits(distance, 1, 3) << 3
        | bits(distance, 5, 1) << 2;
    fits(distance, 12).then(|| u16::try_from(word).ok()).flatten()
}

/// A branch over the next eight bytes.
pub(crate) fn branch_over_two(condition: Condition) -> u32 {
    const DISTANCE: i64 = 12;
    0x63 | bits(DISTANCE, 11, 1) << 7
        | bits(DISTANCE, 1, 4) << 8
        | u32::from(condition.funct3) << 12
        | u32::from(condition.rs1) << 15
        | u32::from(condition.rs2) << 20
        | bits(DISTANCE, 5, 6) << 25
        | bits(DISTANCE, 12, 1) << 31
}

/// `auipc rd` and the immediate of the next instruction that add up to `to` when they stand at
/// `from`; none beyond 2 GiB.
pub(crate) fn address(rd: u8, from: u64, to: u64) -> Option<(u32, i64)> {
    let distance = distance(from, to);
    let upper = distance.checked_add(0x800)? >> 12;
    let reach = -(1 << 19)..1 << 19;
    reach.contains(&upper).then(|| (auipc(rd, bits(upper, 0, 20)), distance - (upper << 12)))
}

/// `auipc rd; addi rd`: loads an address.
pub(crate) fn load_address(rd: u8, from: u64, to: u64) -> Option<[u8; 8]> {
    let (first, low) = address(rd, from, to)?;
    Some(pair(first, addi(rd, rd, low)))
}

/// `auipc through; jr through`
pub(crate) fn far_jump(through: u8, from: u64, to: u64) -> Option<[u8; 8]> {
    let (first, low) = address(through, from, to)?;
    Some(pair(first, jalr(0, through, low)))
}

fn pair(first: u32, second: u32) -> [u8; 8] {
    (u64::from(first) | u64::from(second) << 32).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::decode::{Instruction, Kind};
    use super::*;

    // From GNU as 2.40.
    #[test]
    fn encodings_are_those_of_the_assembler() {
        assert_eq!(RET, 0x0000_8067);
        assert_eq!(jalr(1, 6, -4), 0xffc3_00e7);
        assert_eq!(addi(10, 11, -2048), 0x8005_8513);
        assert_eq!(auipc(6, 0xf_ffff), 0xffff_f317);
        assert_eq!(jal(1, -0x10_0000), Some(0x8000_00ef));
        assert_eq!(jal(0, 0xf_fffe), Some(0x7fff_f06f));
        assert_eq!([-2048, 2046, 330].map(short_jump), [0xb001, 0xaffd, 0xa2a9].map(Some));
        assert_eq!(branch_over_two(Condition { funct3: 4, rs1: 27, rs2: 0 }), 0x000d_c663);
    }

    #[test]
    fn what_is_out_of_reach_is_refused() {
        assert_eq!([-2050, 2048, 1].map(short_jump), [None; 3]);
        assert_eq!([-0x10_0002, 0x10_0000, 1].map(|distance| jal(1, distance)), [None; 3]);
        let far = |distance| address(6, 1 << 40, (1_u64 << 40).wrapping_add(distance)).is_some();
        assert!(far(0x7fff_f7ff) && !far(0x7fff_f800));
        assert!(far(0_u64.wrapping_sub(0x8000_0800)) && !far(0_u64.wrapping_sub(0x8000_0801)));
        assert!(address(6, 0, 1 << 63).is_none());
    }

    proptest! {
        #[test]
        fn addresses_add_up(from: u64, distance in -(1_i64 << 31)..(1 << 31) - 0x800) {
            let to = from.wrapping_add_signed(distance);
            let code = far_jump(6, from, to).unwrap();
            let (first, second) = (Instruction::at(&code, 0), Instruction::at(&code, 4));
            let (Some(Kind::Auipc { upper }), Some(Kind::JumpRegister { base: 6, distance })) =
                (first.map(|i| i.kind), second.map(|i| i.kind))
            else {
                panic!("{first:?} {second:?}");
            };
            let arrived = from.wrapping_add_signed(upper.into());
            prop_assert_eq!(arrived.wrapping_add_signed(distance.into()), to);
        }

        #[test]
        fn jumps_go_where_they_are_read_to_go(halves in -(1_i64 << 19)..1 << 19) {
            let goes = |code: &[u8]| match Instruction::at(code, 0).unwrap().kind {
                Kind::Jump { distance } => i64::from(distance),
                other => panic!("{other:?}"),
            };
            let distance = halves * 2;
            prop_assert_eq!(goes(&jal(0, distance).unwrap().to_le_bytes()), distance);
            let short = distance % 2048;
            prop_assert_eq!(goes(&short_jump(short).unwrap().to_le_bytes()), short);
        }
    }
}
