//! Bounds-checked little-endian reads: everything in an image is untrusted.

/// The `N` bytes at `offset`.
pub(super) fn array_at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk::<N>().copied()
}

pub(super) fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    array_at(bytes, offset).map(u16::from_le_bytes)
}

pub(super) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    array_at(bytes, offset).map(u32::from_le_bytes)
}

pub(super) fn i32_at(bytes: &[u8], offset: usize) -> Option<i32> {
    array_at(bytes, offset).map(i32::from_le_bytes)
}

pub(super) fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    array_at(bytes, offset).map(u64::from_le_bytes)
}

/// A file offset or size as an index; what does not fit is past any buffer's end anyway.
pub(super) fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// An index as an address or a size. Exact: vmtrace is built for 64-bit hosts only.
pub(super) fn wide(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// The text up to the first NUL at `offset`, when it is UTF-8 and no longer than `limit`.
pub(super) fn text_at(bytes: &[u8], offset: usize, limit: usize) -> Option<&str> {
    let tail = bytes.get(offset..)?;
    let tail = &tail[..tail.len().min(limit)];
    let end = memchr::memchr(0, tail)?;
    std::str::from_utf8(&tail[..end]).ok()
}
