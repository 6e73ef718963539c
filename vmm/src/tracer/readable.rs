//! Finds the memory of a guest that programs can read without a fault, by walking its page tables.
//!
//! It consists of the RAM in the kernel's direct map, the array of `struct page` and the image's
//! data, as they are mapped when tracing begins, and the kernel stack of the current task. The
//! kernel unmaps none of these later, except poisoned pages. Where these are known (KFENCE), they
//! are left out. Where any page can be one (`debug_pagealloc`), the whole direct map is left out.

use super::dispatch;
use super::guest::Guest;
use super::image::Image;
use super::members::Members;
use crate::kernel::Kernel;
use vmtrace_trampolines::Readable;

/// Areas of the direct map: more are holes between.
const MOST: usize = 4;
/// What is smaller is not worth its compare.
const SMALLEST: u64 = 64 << 10;
/// Between the end of RAM and that of what is looked at.
const LONGEST: u64 = 1 << 40;

/// Parts of the image that stay mapped. (Between them are pages that the kernel gives back.)
const IMAGE: [(&str, &str); 3] =
    [("__start_rodata", "__end_rodata"), ("_sdata", "_edata"), ("__bss_start", "__bss_stop")];

/// What can be read; nothing of what is not understood.
pub(super) fn find(guest: &dyn Guest, kernel: &Kernel, image: &Image) -> Readable {
    let mut areas = Vec::new();
    let target = dispatch::of(kernel.arch());
    if let Some(map) = target.direct_map(guest, kernel, image)
        && !poisons_pages(guest, kernel, image)
    {
        let pool = kfence_pool(guest, kernel, image);
        let mut runs = Runs::default();
        let end = map.start.saturating_add(LONGEST);
        image.tables.pages(guest, (map.start, end), |address, len, physical| {
            // What is not at its place is not the direct map any more.
            if address.wrapping_sub(map.start).wrapping_add(map.physical) != physical {
                return;
            }
            ram(guest, (address, len, physical), |start, end| {
                for (start, end) in without((start, end), pool) {
                    runs.add(start, end);
                }
            });
        });
        let ram = runs.largest();
        if let Some((array, size)) = map.pages {
            let mut runs = Runs::default();
            for &(start, len) in &ram {
                let frame = |address: u64| {
                    (address.wrapping_sub(map.start).wrapping_add(map.physical) / 4096)
                        .saturating_mul(size)
                        .saturating_add(array)
                };
                let bounds = (frame(start), frame(start.saturating_add(len)));
                image.tables.pages(guest, bounds, |address, len, _| {
                    runs.add(address, address.saturating_add(len));
                });
            }
            areas.extend(runs.largest());
        }
        areas.splice(0..0, ram);
    }
    for (start, end) in IMAGE {
        let bounds = kernel.symbols().address(start).zip(kernel.symbols().address(end));
        let Some((start, end)) = bounds else { continue };
        let mut runs = Runs::default();
        image.tables.pages(guest, (image.runtime(start), image.runtime(end)), |at, len, _| {
            runs.add(at, at.saturating_add(len));
        });
        areas.extend(runs.all.into_iter().map(aligned));
    }
    areas.retain(|&(_, len)| len >= 8);
    Readable { areas, stack: stack(kernel) }
}

/// Runs of pages.
#[derive(Default)]
struct Runs {
    all: Vec<(u64, u64)>,
}

impl Runs {
    /// Adds `[start, end)`, which comes after all others.
    fn add(&mut self, start: u64, end: u64) {
        match self.all.last_mut() {
            Some((_, last)) if *last == start => *last = end,
            _ => self.all.push((start, end)),
        }
    }

    /// The largest of them, as addresses and lengths.
    fn largest(self) -> Vec<(u64, u64)> {
        let mut all: Vec<_> = self.all.into_iter().map(aligned).collect();
        all.retain(|&(_, len)| len >= SMALLEST);
        all.sort_unstable_by_key(|&(_, len)| std::cmp::Reverse(len));
        all.truncate(MOST);
        all
    }
}

/// `[start, end)` as address and length, multiples of 8.
fn aligned((start, end): (u64, u64)) -> (u64, u64) {
    let start = start.checked_next_multiple_of(8).unwrap_or(u64::MAX);
    (start, (end / 8 * 8).saturating_sub(start))
}

/// The parts of a page that are RAM: others would be devices.
fn ram(
    guest: &dyn Guest,
    (address, len, physical): (u64, u64, u64),
    mut each: impl FnMut(u64, u64),
) {
    const STEP: u64 = 2 << 20;
    let mut offset = 0;
    while offset < len {
        let end = ((physical + offset + 1).next_multiple_of(STEP) - physical).min(len);
        let held = |offset: u64| guest.read(physical + offset, &mut [0; 8]).is_ok();
        if held(offset) && held(end.saturating_sub(8)) {
            each(address + offset, address + end);
        }
        offset = end;
    }
}

/// What of `[start, end)` is not in the other.
fn without(
    (start, end): (u64, u64),
    other: Option<(u64, u64)>,
) -> impl Iterator<Item = (u64, u64)> {
    let (from, to) = other.unwrap_or((end, end));
    let parts = [(start, end.min(from)), (start.max(to), end)];
    parts.into_iter().filter(|(start, end)| start < end)
}

/// Where KFENCE has its objects, between pages that fault.
fn kfence_pool(guest: &dyn Guest, kernel: &Kernel, image: &Image) -> Option<(u64, u64)> {
    /// That of 4095 objects; usual are 255. A fault in a larger one is a report, and no more.
    const POOL: u64 = 32 << 20;
    let pool =
        guest.read_u64(image.physical_of(kernel.symbols().address("__kfence_pool")?)).ok()?;
    (pool != 0).then(|| (pool, pool.saturating_add(POOL)))
}

/// Whether the kernel takes freed pages out of the direct map (`debug_pagealloc=on`).
fn poisons_pages(guest: &dyn Guest, kernel: &Kernel, image: &Image) -> bool {
    let symbols = kernel.symbols();
    let Some(early) = symbols.address("_debug_pagealloc_enabled_early") else { return false };
    let mut on = [0];
    guest.read(image.physical_of(early), &mut on).map_or(true, |()| on != [0])
}

/// Where a task has the address of its stack, and `THREAD_SIZE`.
fn stack(kernel: &Kernel) -> Option<(u64, u64)> {
    let offset = Members::of(kernel).ok()?.offset("task_struct", "stack").ok()?;
    Some((offset, stack_size(kernel)?))
}

/// `THREAD_SIZE`.
pub(super) fn stack_size(kernel: &Kernel) -> Option<u64> {
    const SIZES: std::ops::RangeInclusive<u64> = 4 << 10..=64 << 10;
    let symbols = kernel.symbols();
    let bounds =
        [("__start_init_stack", "__end_init_stack"), ("__start_init_task", "__end_init_task")];
    let size = bounds
        .iter()
        .find_map(|(start, end)| symbols.address(end)?.checked_sub(symbols.address(start)?))?;
    (SIZES.contains(&size) && size.is_power_of_two()).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Arch;
    use crate::tracer::guest::GuestError;
    use crate::tracer::paging::PageTables;

    /// RAM up to 15 MiB, and again from 1 GiB on, with page tables in its first pages.
    struct Memory(Vec<u8>);

    const MIB: u64 = 1 << 20;

    impl Memory {
        fn set(&mut self, table: u64, index: u64, entry: u64) {
            let at = usize::try_from(table + 8 * index).unwrap();
            self.0[at..at + 8].copy_from_slice(&entry.to_le_bytes());
        }
    }

    impl Guest for Memory {
        fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
            let at = usize::try_from(address % (1 << 30)).unwrap();
            let bytes = self.0.get(at..at + out.len()).filter(|_| address < 2 << 30);
            out.copy_from_slice(bytes.ok_or(GuestError::NoRam(address))?);
            Ok(())
        }

        fn write(&self, address: u64, _: &[u8]) -> Result<(), GuestError> {
            Err(GuestError::NoRam(address))
        }
    }

    // What is read where nothing is mapped is the end of the guest; where a device is, it may be
    // the end of that.
    #[test]
    fn only_ram_at_its_place_is_readable() {
        const BASE: u64 = 0xffff_8880_0000_0000;
        let mut memory = Memory(vec![0; 15 << 20]);
        let [root, third, second, first] = [0x1000, 0x2000, 0x3000, 0x4000];
        memory.set(root, BASE >> 39 & 511, third | 1);
        memory.set(third, 0, second | 1);
        // One page of 1 GiB, of which only the beginning is RAM: it ends within 2 MiB that are looked at as one.
        memory.set(third, 1, 1 << 30 | 0x81);
        // Pages of 2 MiB: 0 to 4, a hole, 6 to 8, one that is another's, and one of small pages.
        for page in [0, 1, 3] {
            memory.set(second, page, (page * 2 * MIB) | 0x81);
        }
        memory.set(second, 4, (2 * MIB) | 0x81);
        memory.set(second, 5, first | 1);
        for page in (0..512).filter(|page| !(100..110).contains(page)) {
            memory.set(first, page, (10 * MIB + page * 4096) | 1);
        }
        let tables = PageTables::x86_64(root, 0);
        let mut runs = Runs::default();
        tables.pages(&memory, (BASE, BASE + LONGEST), |address, len, physical| {
            if address - BASE == physical {
                ram(&memory, (address, len, physical), |start, end| runs.add(start, end));
            }
        });
        let found: Vec<_> =
            runs.all.iter().map(|(start, end)| (start - BASE, end - BASE)).collect();
        let small = 10 * MIB + 100 * 4096;
        let expected = [
            (0, 4 * MIB),
            (6 * MIB, 8 * MIB),
            (10 * MIB, small),
            (small + 10 * 4096, 12 * MIB),
            (1 << 30, (1 << 30) + 14 * MIB),
        ];
        assert_eq!(found, expected);
        let largest: Vec<_> = runs.largest().iter().map(|(_, len)| *len / MIB).collect();
        assert_eq!(largest, [14, 4, 2, 1], "the smallest is left out");
        // From within a page to within another.
        let mut parts = Vec::new();
        tables.pages(&memory, (BASE + MIB, BASE + 3 * MIB), |at, len, physical| {
            parts.push((at - BASE, len, physical));
        });
        assert_eq!(parts, [(MIB, MIB, MIB), (2 * MIB, MIB, 2 * MIB)]);
        // Tables without end, and none.
        memory.set(root, 0, root | 1);
        tables.pages(&memory, (0, u64::MAX), |_, _, _| {});
        PageTables::none(Arch::X86_64).pages(&memory, (0, u64::MAX), |_, _, _| unreachable!());
    }

    #[test]
    fn what_faults_on_purpose_is_cut_out() {
        let parts = |other| without((10, 20), other).collect::<Vec<_>>();
        assert_eq!(parts(None), [(10, 20)]);
        assert_eq!(parts(Some((12, 15))), [(10, 12), (15, 20)]);
        assert_eq!(parts(Some((0, 15))), [(15, 20)]);
        assert_eq!(parts(Some((15, 40))), [(10, 15)]);
        assert_eq!(parts(Some((5, 40))), []);
        assert_eq!(parts(Some((30, 40))), [(10, 20)]);
        assert_eq!(aligned((3, 31)), (8, 16));
    }
}
