//! The memory map that the guest is told.

use super::layout;
use crate::machine::arch::ram_ranges;

/// Usable memory.
pub(super) const RAM: u32 = 1;
/// Not to be touched without being told.
pub(super) const RESERVED: u32 = 2;

/// A part of the guest-physical address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) length: u64,
    /// [`RAM`] or [`RESERVED`].
    pub(super) kind: u32,
}

/// The map of a machine with `memory` bytes of RAM and parts of an annex at (address, length).
pub(super) fn map(memory: u64, annex: impl IntoIterator<Item = (u64, u64)>) -> Vec<Range> {
    let between = |start: u64, end: u64, kind| Range { start, length: end - start, kind };
    let mut ranges = vec![
        between(0, layout::LOW_RAM_END, RAM),
        between(layout::LOW_RAM_END, layout::LEGACY_HOLE, RESERVED),
        between(layout::ACPI, layout::ACPI_END, RESERVED),
    ];
    for (start, length) in ram_ranges(memory) {
        ranges.push(between(start.max(layout::HIGH_RAM), start + length, RAM));
    }
    let reserved = |(start, length)| Range { start, length, kind: RESERVED };
    ranges.extend(annex.into_iter().map(reserved));
    ranges.push(between(layout::KVM_IDENTITY_MAP, layout::KVM_END, RESERVED));
    ranges.sort_by_key(|range| range.start);
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ram_is_there_and_nothing_overlaps() {
        for memory in [64 << 20, 512 << 20, 3 << 30, (3 << 30) + 4096, 5 << 30] {
            for annex in [None, Some((layout::ANNEX_BASE, 64 << 20))] {
                let map = map(memory, annex);
                for pair in map.windows(2) {
                    assert!(pair[0].start + pair[0].length <= pair[1].start, "{pair:x?}");
                }
                let ram: u64 = map.iter().filter(|r| r.kind == RAM).map(|r| r.length).sum();
                let lost = layout::HIGH_RAM - layout::LOW_RAM_END;
                assert_eq!(ram, memory - lost);
                if let Some((start, length)) = annex {
                    assert!(map.contains(&Range { start, length, kind: RESERVED }));
                }
            }
        }
    }
}
