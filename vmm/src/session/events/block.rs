//! What block requests say of themselves.

use crate::kernel::Kernel;
use crate::relay::{Letter, OPERATION};
use std::sync::Arc;

/// The bit of which an enumerator is the number.
pub(super) fn bit(kernel: &Kernel, name: &str) -> Option<u64> {
    1_u64.checked_shl(kernel.enumerator(name)?.try_into().ok()?)
}

fn operation(kernel: &Kernel, name: &str) -> Option<u64> {
    kernel.enumerator(name)?.try_into().ok()
}

/// Operations with which a driver passes commands of its own through (`blk_rq_is_passthrough`), by number.
pub(super) fn passed_through(kernel: &Kernel) -> Vec<u64> {
    let names = ["REQ_OP_DRV_IN", "REQ_OP_DRV_OUT", "REQ_OP_SCSI_IN", "REQ_OP_SCSI_OUT"];
    names.into_iter().filter_map(|name| operation(kernel, name)).collect()
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
    // Those of `blktrace` itself came with the letters.
    let zeroes = kernel.enumerator("BLK_TC_WRITE_ZEROES").is_some();
    let has_room = |least, text| room >= least || (zeroes && text == "WZ");
    let known = operations.into_iter().filter(|&(_, text, least)| has_room(least, text));
    let letters = known.filter_map(|(name, text, _)| {
        Some(Letter { mask: OPERATION, value: operation(kernel, name)?, text })
    });
    let others = Letter { mask: 0, value: 0, text: "N" };
    let mut groups = vec![letters.chain([others]).collect()];
    for (name, text, least) in flags {
        match bit(kernel, name).filter(|_| room >= least) {
            Some(bit) => groups.push(vec![Letter { mask: bit, value: bit, text }]),
            // Newer than others.
            None if name == "__REQ_ATOMIC" => {}
            None => return None,
        }
    }
    // A flush before it is told before it.
    groups.swap(0, 1);
    Some(groups.into())
}

/// Error numbers as the kernel returns them, by the status of a request (`blk_errors`, block/blk-core.c).
pub(super) fn errors(kernel: &Kernel) -> Option<Arc<[u64]>> {
    /// Bytes of one: its number, and a pointer to its name.
    const SIZE: usize = 16;
    const MOST: usize = 256;
    let bytes = kernel.code(kernel.symbols().address("blk_errors")?, SIZE * MOST)?;
    let number = |one: &[u8; SIZE]| {
        let [a, b, c, d, ..] = *one;
        i64::from(i32::from_le_bytes([a, b, c, d])).cast_unsigned()
    };
    Some(bytes.as_chunks().0.iter().map(number).collect())
}
