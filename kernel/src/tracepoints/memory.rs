//! Memory that holds a kernel's descriptions of its tracepoints: that of its image file, or a
//! guest's.

use super::super::Kernel;
use super::super::read::index;

/// Memory of a kernel. Addresses are as if all of it, modules too, were linked with the kernel:
/// run-time addresses less its slide. Nothing read through this is trusted.
pub trait Memory {
    /// Fills `out` from an address; whether all of it is there.
    fn read(&self, address: u64, out: &mut [u8]) -> bool;

    /// What pointers in it are above such addresses.
    fn slide(&self) -> u64;
}

impl Memory for Kernel {
    fn read(&self, address: u64, out: &mut [u8]) -> bool {
        match self.bytes(address, out.len()) {
            Some(bytes) => out.copy_from_slice(bytes),
            None => return false,
        }
        true
    }

    fn slide(&self) -> u64 {
        0
    }
}

impl dyn Memory + '_ {
    pub(super) fn array<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read(address, &mut bytes).then_some(bytes)
    }

    pub(super) fn bytes(&self, address: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read(address, &mut bytes).then_some(bytes)
    }

    pub(super) fn count(&self, address: u64) -> Option<u32> {
        self.array(address).map(u32::from_le_bytes)
    }

    /// The pointer at an address, as an address; 0 leads nowhere.
    pub(super) fn pointer(&self, address: u64) -> Option<u64> {
        let word = self.array(address).map(u64::from_le_bytes)?;
        Some(if word == 0 { 0 } else { word.wrapping_sub(self.slide()) })
    }

    /// The text at an address, if it ends.
    pub(super) fn text(&self, address: u64, longest: usize) -> Option<String> {
        // Of a size of which pages are multiples: what is not there begins with a page.
        const PIECE: usize = 64;
        let mut text = Vec::new();
        let mut at = address;
        let mut piece = [0; PIECE];
        while text.len() < longest {
            let len = (PIECE - index(at) % PIECE).min(longest - text.len());
            let piece = piece.get_mut(..len)?;
            if self.read(at, piece) {
                let end = memchr::memchr(0, piece);
                text.extend_from_slice(piece.get(..end.unwrap_or(len))?);
                if end.is_some() {
                    return String::from_utf8(text).ok();
                }
            } else {
                // The last of a section of the file.
                let first = self.array::<1>(at)?;
                if first == [0] {
                    return String::from_utf8(text).ok();
                }
                text.extend(first);
                at = at.wrapping_add(1);
                continue;
            }
            at = at.wrapping_add(len as u64);
        }
        None
    }

    /// The text that the pointer at an address leads to.
    pub(super) fn text_behind(&self, pointer: u64, longest: usize) -> Option<String> {
        self.text(self.pointer(pointer)?, longest)
    }
}
