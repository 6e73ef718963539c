//! The parts of a fake guest that are specific to x86-64.

use super::{Fake, Guest, HEAP, MAP};
use object::{Object, ObjectSegment};
use vm_memory::{Bytes, GuestAddress};
use vmtrace::tracer::PageTables;

pub(super) const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];

pub(super) fn load(fake: &Fake) {
    let elf = object::File::parse(fake.kernel.vmlinux()).unwrap();
    for segment in elf.segments() {
        // The per-CPU segment of older kernels is linked at 0; nothing here needs it.
        if let Some(physical) = segment.address().checked_sub(MAP) {
            fake.memory.write_slice(segment.data().unwrap(), GuestAddress(physical)).unwrap();
        }
    }
    // Some kernels fill the upper levels at run time (arch/x86/kernel/head64.c).
    let top = fake.symbol("level3_kernel_pgt") | 0x67;
    fake.write(fake.symbol("init_top_pgt") + 8 * 511, &top.to_le_bytes()).unwrap();
    let upper = fake.symbol("level2_kernel_pgt") | 0x63;
    fake.write(fake.symbol("level3_kernel_pgt") + 8 * 510, &upper.to_le_bytes()).unwrap();
    map_image(fake, 0);
    for (cpu, base) in (0_u64..).zip([0xffff_8880_0fc0_0000_u64, 0xffff_8880_0fd0_0000]) {
        fake.write(fake.symbol("__per_cpu_offset") + 8 * cpu, &base.to_le_bytes()).unwrap();
    }
    for site in fake.kernel.sites() {
        fake.write(fake.at(site.location), &NOP).unwrap();
    }
}

/// Maps the image where it was moved to, as `cleanup_highmap` leaves it: nothing else, but here the heap.
pub(super) fn map_image(fake: &Fake, slide: u64) {
    let (end, moved) = (fake.symbol("_end") >> 21, slide >> 21);
    assert!(end + moved < HEAP >> 21, "the heap is there");
    for slot in 0..512_u64 {
        let own = slot.checked_sub(moved).filter(|own| (8..=end).contains(own));
        let entry = match own.or((slot == HEAP >> 21).then_some(slot)) {
            Some(page) => (page << 21) | 0x1e3,
            None => 0,
        };
        fake.write(fake.entry(slot), &entry.to_le_bytes()).unwrap();
    }
}

pub(super) fn tables(fake: &Fake) -> (&'static str, PageTables) {
    ("entry_SYSCALL_64", PageTables::x86_64(fake.symbol("init_top_pgt"), 0))
}

pub(super) fn target(fake: &Fake, site: usize) -> u64 {
    let [0xe8, ref distance @ ..] = fake.bytes(site)[..] else { panic!("no call") };
    let distance = i32::from_le_bytes(distance.try_into().unwrap());
    let next = fake.kernel.sites()[site].location + 5;
    next.wrapping_add_signed(i64::from(distance))
}

/// Maps two pages of code at an address by a table at guest-physical `table`.
pub(super) fn map(fake: &Fake, code: u64, table: u64, pages: [u64; 2]) {
    fake.write(fake.entry((code - MAP) >> 21), &(table | 0x63).to_le_bytes()).unwrap();
    for (number, page) in (0..).zip(pages) {
        fake.write(table + 8 * number, &(page | 0x63).to_le_bytes()).unwrap();
    }
}
