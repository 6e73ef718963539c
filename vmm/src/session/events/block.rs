//! What block requests say of themselves.

use crate::kernel::Kernel;
use crate::relay::{Letter, OPERATION};
use std::sync::Arc;

/// Operations with which a driver passes commands of its own through (`blk_rq_is_passthrough`), by number.
pub(super) fn passed_through(kernel: &Kernel) -> Vec<u64> {
    let names = ["REQ_OP_DRV_IN", "REQ_OP_DRV_OUT", "REQ_OP_SCSI_IN", "REQ_OP_SCSI_OUT"];
    let found = kernel.btf().map(|btf| btf.enumerators_named(&names)).unwrap_or_default();
    found.into_iter().flatten().filter_map(|number| number.try_into().ok()).collect()
}

/// The letters of `rwbs`, which has room for so many (`blk_fill_rwbs`, kernel/trace/blktrace.c). With more
/// letters it has become longer.
pub(super) fn letters(kernel: &Kernel, room: u32) -> Option<Arc<[Vec<Letter>]>> {
    /// Room with atomic writes (6.16), and with zones (6.18).
    const ATOMIC: u32 = 9;
    const ZONES: u32 = 10;
    let operations = [
        ("REQ_OP_WRITE", "W", 0),
        ("REQ_OP_WRITE_SAME", "W", 0),
        ("REQ_OP_DISCARD", "D", 0),
        ("REQ_OP_SECURE_ERASE", "DE", 0),
        ("REQ_OP_FLUSH", "F", 0),
        ("REQ_OP_READ", "R", 0),
        ("REQ_OP_ZONE_APPEND", "ZA", ZONES),
        ("REQ_OP_ZONE_RESET", "ZR", ZONES),
        ("REQ_OP_ZONE_RESET_ALL", "ZRA", ZONES),
        ("REQ_OP_ZONE_FINISH", "ZF", ZONES),
        ("REQ_OP_ZONE_OPEN", "ZO", ZONES),
        ("REQ_OP_ZONE_CLOSE", "ZC", ZONES),
        ("REQ_OP_WRITE_ZEROES", "WZ", u32::MAX),
    ];
    let flags = [
        ("__REQ_PREFLUSH", "F", 0),
        ("__REQ_FUA", "F", 0),
        ("__REQ_RAHEAD", "A", 0),
        ("__REQ_SYNC", "S", 0),
        ("__REQ_META", "M", 0),
        ("__REQ_ATOMIC", "U", ATOMIC),
    ];
    let btf = kernel.btf().ok()?;
    // Those of `blktrace` itself came with the letters.
    const ZEROES: &str = "BLK_TC_WRITE_ZEROES";
    let names = operations.iter().chain(&flags).map(|(name, ..)| *name).chain([ZEROES]);
    let mut found = btf.enumerators_named(&names.collect::<Vec<_>>());
    let zeroes = found.pop().flatten().is_some();
    let (numbers, bits) = found.split_at_checked(operations.len())?;
    let mut operation = Vec::new();
    for ((_, text, least), number) in operations.into_iter().zip(numbers) {
        if room >= least || (zeroes && text == "WZ") {
            let value = number.and_then(|number| u64::try_from(number).ok());
            operation.extend(value.map(|value| Letter { mask: OPERATION, value, text }));
        }
    }
    operation.push(Letter { mask: 0, value: 0, text: "N" });
    let mut groups = Vec::new();
    for ((name, text, least), bit) in flags.into_iter().zip(bits) {
        let bit = bit.and_then(|bit| 1_u64.checked_shl(bit.try_into().ok()?));
        match bit.filter(|_| room >= least) {
            Some(bit) => groups.push(vec![Letter { mask: bit, value: bit, text }]),
            // Newer than others.
            None if name == "__REQ_ATOMIC" => {}
            None => return None,
        }
    }
    groups.insert(1, operation);
    Some(groups.into())
}

/// Error numbers as the kernel returns them, by the status of a request (`blk_errors`, block/blk-core.c).
pub(super) fn errors(kernel: &Kernel) -> Option<Arc<[u64]>> {
    /// Bytes of one: its number, and a pointer to its name.
    const SIZE: usize = 16;
    const MOST: usize = 256;
    let start = kernel.symbols().address("blk_errors")?;
    let len = usize::try_from(kernel.symbols().next_after(start)?.checked_sub(start)?).ok()?;
    let bytes = kernel.bytes(start, len.min(SIZE * MOST) / SIZE * SIZE)?;
    let number = |one: &[u8; SIZE]| {
        let [a, b, c, d, ..] = *one;
        i64::from(i32::from_le_bytes([a, b, c, d])).cast_unsigned()
    };
    Some(bytes.as_chunks().0.iter().map(number).collect())
}
