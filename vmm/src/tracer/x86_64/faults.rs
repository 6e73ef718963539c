//! Where exceptions are led to while they are ours: stubs, and the descriptors of interrupt gates that
//! name them (Intel SDM volume 3, 6.14.1).

/// Bytes of a stub, and of a descriptor.
pub(super) const STEP: u64 = STUB as u64;
const STUB: usize = 16;
const VECTORS: usize = 32;
const PRESENT_INTERRUPT_GATE: u64 = 0x8e;
/// `__KERNEL_CS` (arch/x86/include/asm/segment.h).
const KERNEL_CODE: u64 = 0x10;

/// The code of all stubs, each with this trap.
pub(super) fn stubs(trap: &[u8]) -> Option<Vec<u8>> {
    let mut stub = [0xcc; STUB];
    stub.get_mut(..trap.len())?.copy_from_slice(trap);
    Some(stub.repeat(VECTORS))
}

/// Where the stubs are, of which the first is at this address.
pub(super) fn traps(stubs: u64) -> impl Iterator<Item = u64> {
    (0..VECTORS as u64).map(move |it| stubs + it * STEP)
}

/// The table that leads to them.
pub(super) fn gates(traps: &[u64]) -> Vec<u8> {
    let gate = |&to: &u64| {
        let low = to & 0xffff | KERNEL_CODE << 16 | PRESENT_INTERRUPT_GATE << 40;
        [low | (to >> 16 & 0xffff) << 48, to >> 32]
    };
    traps.iter().flat_map(gate).flat_map(u64::to_le_bytes).collect()
}
