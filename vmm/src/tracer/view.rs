//! Guest memory for many small accesses: its host address is looked up once.

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
#[derive(Clone, Copy)]
struct Window<'a> {
    start: u64,
    memory: VolatileSlice<'a>,
}

impl Default for Window<'_> {
    /// One with nothing in it.
    fn default() -> Self {
        Self { start: 0, memory: VolatileSlice::from(<&mut [u8]>::default()) }
    }
}

impl<'a> Window<'a> {
    /// So many bytes from `address` on, if all are in here.
    #[inline(always)]
    fn find(&self, address: u64, len: usize) -> Option<VolatileSlice<'a>> {
        // What lies before the window is far behind its end.
        let at = usize::try_from(address.wrapping_sub(self.start)).ok()?;
        self.memory.subslice(at, len).ok()
    }
}

/// Up to eight bytes as the low ones of a word, the rest zero.
#[inline(always)]
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
            run.map(|(start, memory)| Window { start, memory }).unwrap_or_default()
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
        let start = memory.guest_address();
        let annex = front.map(|memory| Window { start, memory });
        Self { guest, windows: [first, annex.unwrap_or_default()] }
    }

    #[inline(always)]
    fn find(&self, address: u64, len: usize) -> Option<VolatileSlice<'a>> {
        let [first, second] = &self.windows;
        first.find(address, len).or_else(|| second.find(address, len))
    }

    /// The eight bytes from `address` on: one look for a window does for whatever is shorter, too.
    #[inline(always)]
    fn eight(&self, address: u64) -> Option<Eight<'a>> {
        self.find(address, 8).map(Eight)
    }

    /// Fills `out` from guest-physical `address`.
    ///
    /// # Errors
    /// As [`Guest::read`].
    pub(super) fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        match self.find(address, out.len()) {
            Some(memory) => memory.read_slice(out, 0).map_err(|_| GuestError::NoRam(address)),
            None => self.guest.read(address, out),
        }
    }

    /// Writes `bytes` at guest-physical `address`.
    ///
    /// # Errors
    /// As [`Guest::write`].
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        match self.find(address, bytes.len()) {
            Some(memory) => memory.write_slice(bytes, 0).map_err(|_| GuestError::NoRam(address)),
            None => self.guest.write(address, bytes),
        }
    }

    /// One to eight bytes at guest-physical `address`, as [`word`] has them.
    ///
    /// # Errors
    /// As [`Guest::read`].
    #[inline(always)]
    pub(super) fn load(&self, address: u64, len: u8) -> Result<u64, GuestError> {
        match self.eight(address).and_then(|eight| eight.load(len)) {
            Some(word) => Ok(word),
            None => self.load_slowly(address, len),
        }
    }

    /// Two words at guest-physical `address`.
    ///
    /// # Errors
    /// As [`Guest::read`].
    #[inline(always)]
    pub(super) fn load_words(&self, address: u64) -> Result<[u64; 2], GuestError> {
        if let Some(place) = self.find(address, 16)
            && let (Ok(first), Ok(second)) = (place.get_ref::<u64>(0), place.get_ref::<u64>(8))
        {
            return Ok([first.load(), second.load()].map(u64::from_le));
        }
        Ok([self.load(address, 8)?, self.load(address.wrapping_add(8), 8)?])
    }

    #[cold]
    #[inline(never)]
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
    #[inline(always)]
    pub(super) fn store(&self, address: u64, word: u64, len: u8) -> Result<(), GuestError> {
        match self.eight(address).and_then(|eight| eight.store(word, len)) {
            Some(()) => Ok(()),
            None => self.store_slowly(address, word, len),
        }
    }

    #[cold]
    #[inline(never)]
    fn store_slowly(&self, address: u64, word: u64, len: u8) -> Result<(), GuestError> {
        if len == 8 && address.is_multiple_of(8) && self.find(address, 8).is_none() {
            return self.guest.write_u64(address, word);
        }
        self.write(address, &word.to_le_bytes()[..usize::from(len.min(8))])
    }

    /// Writes a word with no other bytes as [`View::store`] does, and reads back: whether it holds.
    ///
    /// # Errors
    /// As [`Guest::write`] and [`Guest::read`].
    #[inline(always)]
    pub(super) fn put(&self, address: u64, word: u64, len: u8) -> Result<bool, GuestError> {
        if let Some(held) = self.eight(address).and_then(|eight| eight.put(word, len)) {
            return Ok(held == word);
        }
        self.store_slowly(address, word, len)?;
        Ok(self.load_slowly(address, len)? == word)
    }
}

/// Eight bytes of guest memory.
#[derive(Clone, Copy)]
struct Eight<'a>(VolatileSlice<'a>);

impl Eight<'_> {
    /// The first `len` of them; `None` unless these are one to eight.
    #[inline(always)]
    fn load(self, len: u8) -> Option<u64> {
        let unwanted = 8_u8.checked_sub(len).filter(|unwanted| *unwanted < 8)?;
        let all = u64::from_le(self.0.get_ref::<u64>(0).ok()?.load());
        Some(all & u64::MAX >> (8 * unwanted))
    }

    /// Writes the low `len` bytes of a word to the first of them; `None`, and nothing written, where
    /// there is no quick way for so many.
    #[inline(always)]
    fn store(self, word: u64, len: u8) -> Option<()> {
        self.put(word, len).map(drop)
    }

    /// The same, and reads them back.
    ///
    /// (All in whole words: copies that are not aligned go byte by byte.)
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "so many bytes of it")]
    fn put(self, word: u64, len: u8) -> Option<u64> {
        let four = |at| self.0.get_ref::<u32>(at).ok();
        match len {
            8 => {
                let place = self.0.get_ref::<u64>(0).ok()?;
                match self.0.get_atomic_ref::<AtomicU64>(0) {
                    Ok(aligned) => aligned.store(word.to_le(), Ordering::Release),
                    Err(_) => place.store(word.to_le()),
                }
                Some(u64::from_le(place.load()))
            }
            // Two halves, which overlap.
            5..8 => {
                let (first, last) = (four(0)?, four(usize::from(len - 4))?);
                first.store((word as u32).to_le());
                last.store(((word >> (8 * (len - 4))) as u32).to_le());
                self.load(len)
            }
            4 => {
                let place = four(0)?;
                place.store((word as u32).to_le());
                Some(u32::from_le(place.load()).into())
            }
            2 => {
                let place = self.0.get_ref::<u16>(0).ok()?;
                place.store((word as u16).to_le());
                Some(u16::from_le(place.load()).into())
            }
            _ => None,
        }
    }
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
                        let word = word(&ours.to_le_bytes()[..len.into()]);
                        let mut stored = [0; 64];
                        view.read(start, &mut stored).unwrap();
                        view.write(start, &[0xee; 64]).unwrap();
                        assert!(view.put(address, word, len).unwrap());
                        let mut all = [0; 64];
                        view.read(start, &mut all).unwrap();
                        assert_eq!(stored, all, "{len} bytes at {at}");
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
                    let words = view.load_words(start + 3).unwrap();
                    assert_eq!(words[0], view.load(start + 3, 8).unwrap());
                    assert_eq!(words[1], view.load(start + 11, 8).unwrap());
                    assert!(view.load_words(start + 49).is_err());
                    let end = start + 65 - u64::from(len);
                    assert!(view.load(end, len).is_err() && view.store(end, 0, len).is_err());
                    assert!(view.load(start - 1, len).is_err());
                }
            }
        }
    }
}
