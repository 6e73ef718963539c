//! Maps link addresses to offsets in the image.

use std::ops::Range;

use super::read::{array_at, index, wide};

/// One contiguous piece of the kernel: file bytes and the address they are linked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) offset: usize,
    /// Bytes in the file; memory beyond them (bss) has none.
    pub(super) len: usize,
    pub(super) executable: bool,
}

/// Translates between link addresses and offsets in the image.
#[derive(Debug, Default)]
pub(super) struct Space {
    segments: Vec<Segment>,
}

impl Space {
    /// Keeps the segments whose file bytes really lie within an image of `len` bytes.
    pub(super) fn new(segments: impl IntoIterator<Item = Segment>, len: usize) -> Self {
        let inside = |s: &Segment| {
            s.len > 0
                && s.offset.checked_add(s.len).is_some_and(|end| end <= len)
                && s.address.checked_add(wide(s.len)).is_some()
        };
        Self { segments: segments.into_iter().filter(inside).collect() }
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The offset of the byte at `address`, and how many bytes of its segment follow.
    pub(super) fn offset(&self, address: u64) -> Option<(usize, usize)> {
        self.segments.iter().find_map(|s| {
            let into = index(address.checked_sub(s.address)?);
            (into < s.len).then(|| (s.offset + into, s.len - into))
        })
    }

    /// Whether code may be at `address`. The segments' flags do not tell: in 7.2 start-up code is
    /// in one that is not executable. Only the per-CPU segment of older kernels, linked at zero,
    /// is certain to have none.
    pub(super) fn is_code(&self, address: u64) -> bool {
        self.code_bounds().is_some_and(|code| code.contains(&address))
            && self.offset(address).is_some()
    }

    /// The lowest and the highest address where code may be.
    pub(super) fn code_bounds(&self) -> Option<Range<u64>> {
        let first = self.segments.iter().filter(|s| s.executable).map(|s| s.address).min()?;
        let end = self.segments.iter().map(|s| s.address + wide(s.len)).max()?;
        Some(first..end)
    }

    /// The link address of the byte at `offset`.
    pub(super) fn address(&self, offset: usize) -> Option<u64> {
        self.segments.iter().find_map(|s| {
            let into = offset.checked_sub(s.offset)?;
            (into < s.len).then(|| s.address + wide(into))
        })
    }

    pub(super) fn bytes<'a>(&self, image: &'a [u8], address: u64, len: usize) -> Option<&'a [u8]> {
        let (offset, room) = self.offset(address)?;
        (len <= room).then(|| image.get(offset..offset + len)).flatten()
    }

    pub(super) fn array<const N: usize>(&self, image: &[u8], address: u64) -> Option<[u8; N]> {
        array_at(self.bytes(image, address, N)?, 0)
    }
}
