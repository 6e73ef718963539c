//! A guest's memory for many small accesses: where it is in ours is looked up once.

use super::annex::{self, Memory};
use super::guest::{Guest, GuestError};
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::{Bytes, VolatileMemory, VolatileSlice};

/// Guest-physical memory of a guest that is paused, with its annex.
///
/// A guest waits while a hundred thousand places are patched, with five accesses to each: what is
/// in a window costs some ten instructions, everything else a call of [`Guest`].
pub(super) struct View<'a> {
    guest: &'a dyn Guest,
    windows: [Window<'a>; 2],
}

/// A run of guest-physical memory.
#[derive(Clone, Copy, Default)]
struct Window<'a> {
    start: u64,
    len: u64,
    memory: Option<VolatileSlice<'a>>,
}

impl<'a> Window<'a> {
    fn new(start: u64, memory: VolatileSlice<'a>) -> Self {
        Self { start, len: memory.len() as u64, memory: Some(memory) }
    }

    /// Offset of so many bytes from `address`, with the memory that they are in.
    #[inline]
    fn find(&self, address: u64, len: usize) -> Option<(&VolatileSlice<'a>, usize)> {
        let at = address.wrapping_sub(self.start);
        let is_in = at < self.len && len as u64 <= self.len - at;
        self.memory.as_ref().filter(|_| is_in).zip(usize::try_from(at).ok())
    }
}

/// Up to eight bytes as the low ones of a word, the rest zero.
#[inline]
pub(super) fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    let len = bytes.len().min(8);
    word[..len].copy_from_slice(&bytes[..len]);
    u64::from_le_bytes(word)
}

impl<'a> View<'a> {
    /// With windows on the RAM around these two guest-physical addresses, where there is such.
    pub(super) fn ram(guest: &'a dyn Guest, [first, second]: [u64; 2]) -> Self {
        let window = |address| {
            let run = guest.run(address);
            run.map(|(start, memory)| Window::new(start, memory)).unwrap_or_default()
        };
        let first = window(first);
        let second =
            if first.find(second, 1).is_some() { Window::default() } else { window(second) };
        Self { guest, windows: [first, second] }
    }

    /// With windows on the RAM around a guest-physical address and on the annex.
    pub(super) fn with_annex(guest: &'a dyn Guest, address: u64, memory: &'a dyn Memory) -> Self {
        let Self { windows: [first, _], .. } = Self::ram(guest, [address; 2]);
        let slice = memory.slice();
        let front = usize::try_from(annex::SIZE).ok().and_then(|len| slice.subslice(0, len).ok());
        let annex = front.map(|front| Window::new(memory.guest_address(), front));
        Self { guest, windows: [first, annex.unwrap_or_default()] }
    }

    #[inline]
    fn find(&self, address: u64, len: usize) -> Option<(&VolatileSlice<'a>, usize)> {
        let [first, second] = &self.windows;
        first.find(address, len).or_else(|| second.find(address, len))
    }

    /// Fills `out` from guest-physical `address`.
    ///
    /// # Errors
    /// As [`Guest::read`].
    pub(super) fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        match self.find(address, out.len()) {
            Some((memory, at)) => {
                memory.read_slice(out, at).map_err(|_| GuestError::NoRam(address))
            }
            None => self.guest.read(address, out),
        }
    }

    /// Writes `bytes` at guest-physical `address`.
    ///
    /// # Errors
    /// As [`Guest::write`].
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        match self.find(address, bytes.len()) {
            Some((memory, at)) => {
                memory.write_slice(bytes, at).map_err(|_| GuestError::NoRam(address))
            }
            None => self.guest.write(address, bytes),
        }
    }

    /// One to eight bytes at guest-physical `address`, as [`word`] has them.
    ///
    /// # Errors
    /// As [`Guest::read`].
    #[inline]
    pub(super) fn load(&self, address: u64, len: u8) -> Result<u64, GuestError> {
        match self.find(address, len.into()).and_then(|(memory, at)| load(memory, at, len)) {
            Some(word) => Ok(word),
            None => self.load_slowly(address, len),
        }
    }

    #[cold]
    fn load_slowly(&self, address: u64, len: u8) -> Result<u64, GuestError> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes[..usize::from(len.min(8))])?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes the low `len` bytes, one to eight, of a word at guest-physical `address`: four or
    /// eight that are aligned in one store.
    ///
    /// # Errors
    /// As [`Guest::write`].
    #[inline]
    pub(super) fn store(&self, address: u64, word: u64, len: u8) -> Result<(), GuestError> {
        match self.find(address, len.into()).and_then(|(memory, at)| store(memory, at, word, len)) {
            Some(()) => Ok(()),
            None => self.store_slowly(address, word, len),
        }
    }

    #[cold]
    fn store_slowly(&self, address: u64, word: u64, len: u8) -> Result<(), GuestError> {
        if len == 8 && address.is_multiple_of(8) && self.find(address, 8).is_none() {
            return self.guest.write_u64(address, word);
        }
        self.write(address, &word.to_le_bytes()[..usize::from(len.min(8))])
    }
}

/// Where so many bytes are as two accesses of four, which may overlap. (Copies that are not aligned
/// go byte by byte.)
#[inline]
fn halves(at: usize, len: u8) -> Option<(usize, u32)> {
    (4..8).contains(&len).then(|| (at + usize::from(len) - 4, 8 * u32::from(len - 4)))
}

#[inline]
fn load(memory: &VolatileSlice<'_>, at: usize, len: u8) -> Option<u64> {
    let half = |at| Some(u32::from_le_bytes(memory.get_ref::<[u8; 4]>(at).ok()?.load()));
    if len == 8 {
        return Some(u64::from_le_bytes(memory.get_ref::<[u8; 8]>(at).ok()?.load()));
    }
    if len == 2 {
        return Some(u16::from_le_bytes(memory.get_ref::<[u8; 2]>(at).ok()?.load()).into());
    }
    let (last, shift) = halves(at, len)?;
    let low = half(at)?;
    if shift == 0 {
        return Some(low.into());
    }
    // Of what is in both the upper one counts: the other may be older.
    let keep = (1 << shift) - 1;
    Some(u64::from(low) & keep | u64::from(half(last)?) << shift)
}

#[inline]
fn store(memory: &VolatileSlice<'_>, at: usize, word: u64, len: u8) -> Option<()> {
    #[allow(clippy::cast_possible_truncation, reason = "four bytes of it")]
    let half = |at, word: u64| {
        memory.get_ref::<[u8; 4]>(at).ok()?.store((word as u32).to_le_bytes());
        Some(())
    };
    if len == 8 {
        if let Ok(cell) = memory.get_atomic_ref::<AtomicU64>(at) {
            cell.store(word.to_le(), Ordering::Release);
        } else {
            memory.get_ref::<[u8; 8]>(at).ok()?.store(word.to_le_bytes());
        }
        return Some(());
    }
    if len == 2 {
        #[allow(clippy::cast_possible_truncation, reason = "two bytes of it")]
        memory.get_ref::<[u8; 2]>(at).ok()?.store((word as u16).to_le_bytes());
        return Some(());
    }
    let (last, shift) = halves(at, len)?;
    half(at, word)?;
    if shift > 0 { half(last, word >> shift) } else { Some(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::Ram;
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    /// Memory without windows.
    struct Slow(Ram<GuestMemoryMmap>);

    impl Guest for Slow {
        fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
            self.0.read(address, out)
        }

        fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
            self.0.write(address, bytes)
        }
    }

    // A byte too many is the next function's, one too few half a jump.
    #[test]
    fn windows_and_calls_do_the_same() {
        const START: u64 = 0x1000;
        let ram = || {
            let ranges = [(GuestAddress(START), 64), (GuestAddress(0x8000), 64)];
            Ram(GuestMemoryMmap::from_ranges(&ranges).unwrap())
        };
        let (fast, slow) = (ram(), Slow(ram()));
        let views = [View::ram(&fast, [START, 0x8000]), View::ram(&slow, [START, 0x8000])];
        assert!(views[0].find(0x8000, 64).is_some() && views[1].find(START, 1).is_none());
        let ours = 0x8877_6655_4433_2211_u64;
        for start in [START, 0x8000] {
            for len in 1..=8_u8 {
                for at in [0, 1, 3, 8, 64 - u64::from(len)] {
                    let address = start + at;
                    let held = views.each_ref().map(|view| {
                        view.write(start, &[0xee; 64]).unwrap();
                        view.store(address, ours, len).unwrap();
                        let mut all = [0; 64];
                        view.read(start, &mut all).unwrap();
                        (view.load(address, len).unwrap(), all)
                    });
                    let mut expected = [0xee; 64];
                    let place = usize::try_from(at).unwrap()..;
                    expected[place][..len.into()]
                        .copy_from_slice(&ours.to_le_bytes()[..len.into()]);
                    let low = word(&ours.to_le_bytes()[..len.into()]);
                    assert_eq!(held[0], (low, expected), "{len} bytes at {at}");
                    assert_eq!(held[0], held[1]);
                }
                for view in &views {
                    let end = start + 65 - u64::from(len);
                    assert!(view.load(end, len).is_err() && view.store(end, 0, len).is_err());
                    assert!(view.load(start - 1, len).is_err());
                }
            }
        }
    }
}
