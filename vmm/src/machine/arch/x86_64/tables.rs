//! Segment descriptors and page tables for the first instruction.

use kvm_bindings::{kvm_segment, kvm_sregs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::layout;
use crate::machine::MachineError;

const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

/// Page table entry: present, writable.
const TABLE: u64 = 3;
/// Page table entry: present, writable, 2 MiB.
const PAGE_2M: u64 = 3 | 1 << 7;

/// The boot protocol's selectors: `__BOOT_CS` 0x10, `__BOOT_DS` 0x18, and a task state segment,
/// which virtual machine entry wants.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;

/// Descriptors by selector: flat, ring 0, present.
const DESCRIPTORS: [u64; 5] =
    [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff];

/// Writes the tables.
pub(super) fn write(memory: &GuestMemoryMmap) -> Result<(), MachineError> {
    let put = |address: u64, words: &[u64]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        memory
            .write_slice(&bytes, GuestAddress(address))
            .map_err(|source| MachineError::GuestMemory { what: "first page tables", source })
    };
    put(layout::GDT, &DESCRIPTORS)?;
    let page = |n: u64| layout::PAGE_TABLES + n * 0x1000;
    put(page(0), &[page(1) | TABLE])?;
    let directories: Vec<u64> = (2..6).map(|n| page(n) | TABLE).collect();
    put(page(1), &directories)?;
    let pages: Vec<u64> = (0..4 * 512).map(|n| n << 21 | PAGE_2M).collect();
    put(page(2), &pages)
}

/// Makes a vCPU at reset one in 64-bit mode that uses the tables.
pub(super) fn use_them(sregs: &mut kvm_sregs) {
    sregs.cs = segment(CODE);
    for data in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *data = segment(DATA);
    }
    sregs.tr = segment(TASK);
    sregs.gdt.base = layout::GDT;
    sregs.gdt.limit = 8 * 5 - 1;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr3 = layout::PAGE_TABLES;
    sregs.cr0 |= CR0_PE | CR0_PG;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME | EFER_LMA;
}

/// What the CPU would load for a selector of [`DESCRIPTORS`].
fn segment(selector: u16) -> kvm_segment {
    let descriptor = DESCRIPTORS[usize::from(selector / 8)];
    let bits = |from: u32, count: u32| {
        #[expect(clippy::cast_possible_truncation, reason = "at most 4 bits")]
        let bits = (descriptor >> from & ((1 << count) - 1)) as u8;
        bits
    };
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: bits(40, 4),
        s: bits(44, 1),
        dpl: bits(45, 2),
        present: bits(47, 1),
        avl: bits(52, 1),
        l: bits(53, 1),
        db: bits(54, 1),
        g: bits(55, 1),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryBackend;

    use super::*;

    #[test]
    fn the_first_four_gib_map_to_themselves() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write(&memory).unwrap();
        let read = |address: u64| memory.read_obj::<u64>(GuestAddress(address)).unwrap();
        for address in [0_u64, 0x7000, 0x10_0000, 0xbfff_ffff, 0xc000_0000, 0xffff_ffff] {
            let mut table = layout::PAGE_TABLES;
            for level in [39, 30] {
                let entry = read(table + (address >> level & 511) * 8);
                assert_eq!(entry & 0xfff, TABLE);
                table = entry & !0xfff;
            }
            let entry = read(table + (address >> 21 & 511) * 8);
            assert_eq!(entry, address & !0x1f_ffff | PAGE_2M);
        }
        const { assert!(layout::PAGE_TABLES + 6 * 0x1000 <= layout::CMDLINE) };
        assert!(memory.check_address(GuestAddress(layout::CMDLINE)).is_some());
    }

    #[test]
    fn segments_match_their_descriptors() {
        let code = segment(CODE);
        assert_eq!(
            (code.type_, code.s, code.present, code.l, code.db, code.g),
            (11, 1, 1, 1, 0, 1)
        );
        let data = segment(DATA);
        assert_eq!((data.type_, data.s, data.present, data.l, data.db, data.g), (3, 1, 1, 0, 1, 1));
        let task = segment(TASK);
        assert_eq!((task.type_, task.s, task.present), (11, 0, 1));
    }
}
