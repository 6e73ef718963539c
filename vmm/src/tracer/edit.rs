//! Changes of a few bytes of guest memory: verify, write, read back, restore.

use super::guest::{Guest, GuestError};
use super::image::Image;
use super::view::{View, word};

/// Why a site is not traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SkipReason {
    /// It holds something that is not the kernel's own disabled site.
    GuestOwned(&'static str),
    /// The guest's ftrace is active on it, though not by its bytes.
    GuestEnabled,
    /// The guest has disabled it for good (`FTRACE_FL_DISABLED`).
    GuestDisabled,
    /// It lost what was prepared when tracing began, and it is not safe to prepare
    /// it again while the guest runs.
    Unprepared,
    /// The guest's ftrace does not know it.
    Unknown,
    /// It is in memory of `.init.text` that the guest has freed.
    Freed,
    /// The program is out of reach of a call.
    OutOfReach,
    /// It is not in guest RAM.
    NoRam,
    /// It did not hold what was written to it.
    ReadBack,
    /// It has no stub.
    NoStub,
    /// It shares bytes with an exit that was left alone.
    Shared,
    /// It jumps through a register, and what it jumps to checks what it was called with.
    Checked,
}

impl std::fmt::Display for SkipReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::GuestOwned(what) => write!(f, "owner: guest (holds {what})"),
            Self::GuestEnabled => f.write_str("owner: guest (its ftrace is active)"),
            Self::GuestDisabled => f.write_str("disabled by the guest"),
            Self::Unprepared => f.write_str("the guest's ftrace has used it since tracing began"),
            Self::Unknown => f.write_str("unknown to the guest's ftrace"),
            Self::Freed => f.write_str("in freed .init.text"),
            Self::OutOfReach => f.write_str("out of reach of a call"),
            Self::NoRam => f.write_str("not in guest RAM"),
            Self::ReadBack => f.write_str("did not take the patch"),
            Self::NoStub => f.write_str("no stub could be made for it"),
            Self::Shared => f.write_str("it shares code with an exit that was left alone"),
            Self::Checked => f.write_str("the kernel checks where it jumps to (FineIBT)"),
        }
    }
}

/// A few bytes of guest memory, before and after. No context of the guest can stand
/// inside of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edit {
    physical: u64,
    original: u64,
    ours: u64,
    len: u8,
}

impl Edit {
    /// In memory that is written to for its own sake.
    pub(super) const FILLER: Self = Self { physical: 1, original: 1, ours: 1, len: 1 };

    /// `None` unless both are of one length, up to 8.
    #[inline(always)]
    pub(super) fn new(physical: u64, original: &[u8], ours: &[u8]) -> Option<Self> {
        let len = u8::try_from(original.len()).ok().filter(|&len| len <= 8)?;
        let both = (word(original), word(ours));
        (ours.len() == original.len()).then_some(Self {
            physical,
            original: both.0,
            ours: both.1,
            len,
        })
    }

    /// Of the low `len` bytes of two words; `None` unless these are one to eight.
    #[inline(always)]
    pub(super) fn of_words(physical: u64, original: u64, ours: u64, len: u8) -> Option<Self> {
        let unwanted = 8_u8.checked_sub(len).filter(|unwanted| *unwanted < 8)?;
        let mask = u64::MAX >> (8 * unwanted);
        Some(Self { physical, original: original & mask, ours: ours & mask, len })
    }

    /// The same of the running kernel, where its address is a link address.
    pub(super) fn at(&self, image: &Image) -> Self {
        Self { physical: image.physical_of(self.physical), ..*self }
    }

    /// Guest-physical address of what it changes.
    pub(super) fn address(&self) -> u64 {
        self.physical
    }

    /// Puts what was there into `bytes`, which were read from a guest-physical address on, as far as it is
    /// in there, and if all of it is still ours.
    pub(super) fn lay_original(
        &self,
        guest: &dyn Guest,
        from: u64,
        bytes: &mut [u8],
    ) -> Result<(), GuestError> {
        let len = usize::from(self.len).min(8);
        let mut found = [0; 8];
        guest.read(self.physical, &mut found[..len])?;
        if u64::from_le_bytes(found) != self.ours {
            return Ok(());
        }
        for (address, byte) in (self.physical..).zip(&self.original.to_le_bytes()[..len]) {
            let at = address.checked_sub(from).and_then(|at| usize::try_from(at).ok());
            if let Some(place) = at.and_then(|at| bytes.get_mut(at)) {
                *place = *byte;
            }
        }
        Ok(())
    }

    /// Whether what is there is what was.
    pub(super) fn is_untouched(&self, view: &View<'_>) -> Result<bool, GuestError> {
        self.holds(view, self.original)
    }

    /// Whether what is there is ours.
    pub(super) fn is_ours(&self, view: &View<'_>) -> Result<bool, GuestError> {
        self.holds(view, self.ours)
    }

    #[inline]
    fn holds(&self, view: &View<'_>, bytes: u64) -> Result<bool, GuestError> {
        Ok(view.load(self.physical, self.len)? == bytes)
    }

    /// Writes ours; whether it holds.
    #[inline]
    pub(super) fn apply(&self, view: &View<'_>) -> Result<bool, GuestError> {
        view.put(self.physical, self.ours, self.len)
    }

    /// Writes what was there.
    pub(super) fn undo(&self, view: &View<'_>) -> Result<(), GuestError> {
        view.store(self.physical, self.original, self.len)
    }

    /// Writes what was there if it still holds ours; whether it is as it was.
    pub(super) fn restore(&self, view: &View<'_>) -> Result<bool, GuestError> {
        if self.holds(view, self.ours)? {
            self.undo(view)?;
        }
        self.holds(view, self.original)
    }

    /// [`Edit::restore`] of all, even if one fails; whether all is as it was.
    pub(super) fn restore_all<'a>(
        edits: impl IntoIterator<Item = &'a Self>,
        view: &View<'_>,
    ) -> Result<bool, GuestError> {
        edits.into_iter().map(|edit| edit.restore(view)).fold(Ok(true), both)
    }
}

/// Whether both are so. The first error is told.
pub(super) fn both<E>(a: Result<bool, E>, b: Result<bool, E>) -> Result<bool, E> {
    a.and_then(|a| b.map(|b| a & b))
}

/// What is to be written for one.
#[derive(Clone, Debug)]
pub(super) struct ExitEdit {
    /// All of it, or the part on its first page.
    pub(super) first: Edit,
    /// The part on the next page, which lies elsewhere.
    pub(super) beyond: Option<Box<Edit>>,
}

impl From<Edit> for ExitEdit {
    fn from(first: Edit) -> Self {
        Self { first, beyond: None }
    }
}

impl ExitEdit {
    pub(super) fn parts(&self) -> impl Iterator<Item = &Edit> {
        std::iter::once(&self.first).chain(self.beyond.as_deref())
    }

    #[inline]
    pub(super) fn apply(&self, view: &View<'_>) -> Result<bool, GuestError> {
        match &self.beyond {
            None => self.first.apply(view),
            Some(beyond) => Ok(self.first.apply(view)? && beyond.apply(view)?),
        }
    }

    pub(super) fn undo(&self, view: &View<'_>) {
        for part in self.parts() {
            let _ = part.undo(view);
        }
    }

    /// A part that is not ours is left as it is, and so is the other.
    pub(super) fn restore(&self, view: &View<'_>) -> Result<bool, GuestError> {
        match &self.beyond {
            None => self.first.restore(view),
            Some(beyond) if self.first.is_ours(view)? && beyond.is_ours(view)? => {
                Ok(self.first.restore(view)? && beyond.restore(view)?)
            }
            Some(beyond) => Ok(self.first.is_untouched(view)? && beyond.is_untouched(view)?),
        }
    }
}

/// What giving sites back came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Sites that hold their original bytes again.
    pub sites: usize,
    /// Sites (indices) that did not hold our call any more and were left alone.
    pub foreign: Vec<usize>,
}

impl Restored {
    /// Adds a place that was given back to `all`, unless one failed; whether this one is as it was before.
    #[inline]
    pub(super) fn add(
        all: &mut Result<Self, GuestError>,
        place: usize,
        given_back: Result<bool, GuestError>,
    ) -> bool {
        let whole = matches!(given_back, Ok(true));
        match (given_back, &mut *all) {
            (Ok(true), Ok(all)) => all.sites += 1,
            (Ok(false), Ok(all)) => all.foreign.push(place),
            (Ok(_), Err(_)) => {}
            (Err(error), _) => *all = Err(error),
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::Ram;
    use crate::tracer::guest::Guest;
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    // Half of a jump, with the other half of somebody else, leads anywhere.
    #[test]
    fn an_exit_on_two_pages_is_given_back_as_a_whole() {
        const BEYOND: u64 = 0x8000;
        let ranges = [(GuestAddress(0), 0x1000), (GuestAddress(BEYOND), 0x1000)];
        let ram = Ram(GuestMemoryMmap::from_ranges(&ranges).unwrap());
        let view = View::ram(&ram, [0, BEYOND]);
        let first = Edit::new(0xffe, &[1, 2], &[0xe9, 8]).unwrap();
        let beyond = Edit::new(BEYOND, &[3, 4, 5], &[9, 10, 11]).unwrap();
        let both = ExitEdit { first, beyond: Some(Box::new(beyond)) };
        let held = || [view.load(0xffe, 2).unwrap(), view.load(BEYOND, 3).unwrap()];
        let [was, ours] = [[0x0201, 0x05_0403], [0x08e9, 0x0b_0a09]];
        both.undo(&view);
        assert_eq!(held(), was);
        assert!(both.apply(&view).unwrap() && held() == ours);
        assert!(both.restore(&view).unwrap() && held() == was);
        assert!(both.restore(&view).unwrap(), "it is as it was");
        for (at, byte) in [(0xffe, 0xcc), (BEYOND + 2, 0xcc)] {
            assert!(both.apply(&view).unwrap());
            ram.write(at, &[byte]).unwrap();
            let before = held();
            assert!(!both.restore(&view).unwrap());
            assert_eq!(held(), before, "neither is touched");
        }
    }
}
