//! Page tables of both architectures, in a few pages of memory. Each translation must equal that of
//! a simple walk written from the manuals. No walk may read outside of memory or fail to terminate.

use crate::input::Input;
use vmtrace::tracer::{Guest, GuestError, Image, PageTables};

const PAGES: usize = 16;
const PAGE: u64 = 4096;
const SIZE: u64 = PAGES as u64 * PAGE;

struct Memory(Vec<u8>);

impl Guest for Memory {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        let start = usize::try_from(address).map_err(|_| GuestError::NoRam(address))?;
        let end = start.checked_add(out.len()).ok_or(GuestError::NoRam(address))?;
        out.copy_from_slice(self.0.get(start..end).ok_or(GuestError::NoRam(address))?);
        Ok(())
    }

    fn write(&self, address: u64, _: &[u8]) -> Result<(), GuestError> {
        panic!("a walk writes at {address:#x}");
    }
}

/// Intel SDM vol. 3, 4.5; The RISC-V Instruction Set Manual, volume II, 12.3 to 12.5.
fn reference(memory: &Memory, riscv: bool, root: u64, levels: u32, address: u64) -> Option<u64> {
    let mut table = root;
    for level in (0..levels).rev() {
        let shift = 12 + 9 * level;
        let entry = memory.read_u64(table.checked_add((address >> shift & 511) * 8)?).ok()?;
        if entry & 1 == 0 {
            return None;
        }
        let (target, leaf) = if riscv {
            ((entry >> 10 & ((1 << 44) - 1)) << 12, entry & 0b1110 != 0)
        } else {
            (entry & 0x000f_ffff_ffff_f000, level <= 2 && entry & 0x80 != 0)
        };
        if leaf || level == 0 {
            let inside = (1 << shift) - 1;
            return Some(target & !inside | address & inside);
        }
        table = target;
    }
    None
}

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choice = input.byte();
    let riscv = choice & 1 != 0;
    let levels =
        if riscv { 3 + u32::from(choice >> 1) % 3 } else { 4 + u32::from(choice >> 1) % 2 };
    let mut memory = Memory(vec![0; PAGES * 4096]);
    let mut addresses = Vec::new();
    while !input.is_empty() {
        let kind = input.byte();
        let (place, value) = (input.short(), input.word());
        if kind % 4 == 3 {
            addresses.push(value);
            continue;
        }
        // An entry: of any bits, or one that leads to a page here.
        let page = value % PAGES as u64;
        let flags = value >> 8 & 0xff | u64::from(kind & 0x40 == 0);
        let entry = match (kind % 4, riscv) {
            (0, _) => value,
            (_, false) => (page * PAGE) | flags,
            (_, true) => page << 10 | flags,
        };
        let slot = usize::from(place) % (PAGES * 512) * 8;
        memory.0[slot..slot + 8].copy_from_slice(&entry.to_le_bytes());
        // What it would map, were it in any of the levels.
        let index = slot as u64 / 8 % 512;
        addresses.extend([12, 21, 30, 39].map(|shift| index << shift | value >> 52));
    }
    let root = if choice & 0x80 != 0 { u64::MAX } else { u64::from(choice >> 4) * PAGE };
    let tables = if riscv {
        PageTables::riscv64(u64::from(levels + 5) << 60 | root >> 12 & ((1 << 44) - 1))
    } else {
        PageTables::x86_64(root, u64::from(levels - 4) << 12)
    };
    let root =
        if riscv { (root >> 12 & ((1 << 44) - 1)) << 12 } else { root & 0x000f_ffff_ffff_f000 };
    addresses.truncate(256);
    let image = Image { slide: 0, physical: 0, tables };
    for address in addresses {
        let found = tables.translate(&memory, address).ok();
        assert_eq!(found, reference(&memory, riscv, root, levels, address), "{address:#x}");
        // Over the end of a page, and of the address space.
        let mut out = [0; 24];
        let at = address | 0xff4;
        let read = image.read(&memory, at, &mut out).is_ok();
        let byte = |at: u64| {
            let physical = reference(&memory, riscv, root, levels, at)?;
            let mut byte = [0];
            (physical < SIZE).then(|| memory.read(physical, &mut byte).expect("in memory"))?;
            Some(byte[0])
        };
        let expected: Option<Vec<u8>> = (0..24).map(|by| byte(at.wrapping_add(by))).collect();
        assert_eq!(read.then(|| out.to_vec()), expected, "{at:#x}");
    }
    // The root is the guest's to say, too.
    for address in [0, u64::MAX] {
        let _any = tables.with_root(u64::MAX - u64::from(choice)).translate(&memory, address);
    }
}
