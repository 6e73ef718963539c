//! Where sites and exits are in guest memory.

use super::edit::{Edit, ExitEdit};
use super::guest::GuestError;
use super::image::Image;
use super::view::{View, word};
use crate::kernel::{Exit, Kernel, Site, SiteSection};
use std::ops::Range;

/// Bytes of a page.
pub(super) const PAGE: u64 = 4096;

/// Where a site is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot {
    pub(super) site: Site,
    /// Guest-physical address.
    pub(super) physical: u64,
    /// That of the next page, where the site goes on there.
    pub(super) beyond: Option<u64>,
}

impl Spot {
    /// Of a site of the kernel itself, which is in one piece.
    pub(super) fn kernel(image: &Image, site: Site) -> Self {
        Self { site, physical: image.physical_of(site.location), beyond: None }
    }

    /// Of all sites of the kernel itself.
    pub(super) fn all(kernel: &Kernel, image: &Image) -> Vec<Self> {
        kernel.sites().iter().map(|&site| Self::kernel(image, site)).collect()
    }

    /// Of an exit of the kernel itself.
    #[inline]
    pub(super) fn exit(image: &Image, exit: &Exit) -> Self {
        Self::own(image, exit.address)
    }

    /// Of another place of the kernel itself, by its link address.
    #[inline]
    pub(super) fn own(image: &Image, address: u64) -> Self {
        Self::place(address, (image.physical_of(address), None))
    }

    /// Of a place at a link address, and at these guest-physical ones.
    #[inline]
    pub(super) fn place(address: u64, (physical, beyond): (u64, Option<u64>)) -> Self {
        let site = Site { location: address, entry: address, section: SiteSection::Text };
        Self { site, physical, beyond }
    }

    /// Where bytes of it are, counted from its beginning on: guest-physical addresses, and which of
    /// these bytes are there.
    fn pieces(&self, bytes: &Range<usize>) -> [(u64, Range<usize>); 2] {
        let len = bytes.len();
        let physical = self.physical.wrapping_add(bytes.start as u64);
        let Some(beyond) = self.beyond else {
            return [(physical, 0..len), (physical, len..len)];
        };
        let on_first = usize::try_from(PAGE - self.physical % PAGE).unwrap_or(bytes.end);
        let first = on_first.saturating_sub(bytes.start).min(len);
        let next = beyond.wrapping_add((bytes.start + first).saturating_sub(on_first) as u64);
        [(physical, 0..first), (next, first..len)]
    }

    /// Up to eight of its bytes, counted from its beginning on.
    #[inline(always)]
    pub(super) fn load<const N: usize>(
        &self,
        view: &View<'_>,
        start: usize,
    ) -> Result<[u8; N], GuestError> {
        match (self.beyond, u8::try_from(N)) {
            // Most sites: a guest waits while a hundred thousand of them are read.
            (None, Ok(len @ 0..=8)) => {
                let word = view.load(self.physical.wrapping_add(start as u64), len)?.to_le_bytes();
                Ok(std::array::from_fn(|at| word[at]))
            }
            _ => self.load_pieces(view, start),
        }
    }

    /// Its first sixteen bytes, as two words.
    #[inline(always)]
    pub(super) fn load_words(&self, view: &View<'_>) -> Result<[u64; 2], GuestError> {
        if self.beyond.is_none() {
            return view.load_words(self.physical);
        }
        Ok([self.load(view, 0)?, self.load(view, 8)?].map(u64::from_le_bytes))
    }

    /// Up to eight of its bytes from its beginning on, as [`word`] has them.
    #[inline(always)]
    pub(super) fn load_word(&self, view: &View<'_>, len: u8) -> Result<u64, GuestError> {
        if self.beyond.is_none() {
            return view.load(self.physical, len);
        }
        let bytes = self.load_pieces::<8>(view, 0)?;
        Ok(word(&bytes[..usize::from(len.min(8))]))
    }

    #[cold]
    fn load_pieces<const N: usize>(
        &self,
        view: &View<'_>,
        start: usize,
    ) -> Result<[u8; N], GuestError> {
        let mut found = [0; N];
        self.read(view, start, &mut found)?;
        Ok(found)
    }

    /// Reads so many of its bytes, counted from its beginning on.
    pub(super) fn read(
        &self,
        view: &View<'_>,
        start: usize,
        bytes: &mut [u8],
    ) -> Result<(), GuestError> {
        for (physical, place) in self.pieces(&(start..start + bytes.len())) {
            let bytes = bytes.get_mut(place).unwrap_or_default();
            if !bytes.is_empty() {
                view.read(physical, bytes)?;
            }
        }
        Ok(())
    }

    /// Writes bytes of it, counted from its beginning on.
    #[inline]
    pub(super) fn store(
        &self,
        view: &View<'_>,
        start: usize,
        bytes: &[u8],
    ) -> Result<(), GuestError> {
        if let (None, Ok(len @ 1..=8)) = (self.beyond, u8::try_from(bytes.len())) {
            return view.store(self.physical.wrapping_add(start as u64), word(bytes), len);
        }
        for (physical, place) in self.pieces(&(start..start + bytes.len())) {
            view.write(physical, bytes.get(place).unwrap_or_default())?;
        }
        Ok(())
    }

    /// What puts the low `len` bytes of a word in the place of its own, one to eight from its
    /// beginning on; `None` when that cannot be.
    #[inline(always)]
    pub(super) fn exchange(&self, original: u64, ours: u64, len: u8) -> Option<ExitEdit> {
        if self.beyond.is_none() {
            return Edit::of_words(self.physical, original, ours, len).map(Into::into);
        }
        let (original, ours) = (original.to_le_bytes(), ours.to_le_bytes());
        let len = usize::from(len);
        self.exchange_bytes(0, original.get(..len)?, ours.get(..len)?)
    }

    /// What puts bytes of ours in the place of as many of its own, up to eight, counted from its
    /// beginning on; `None` when that cannot be.
    pub(super) fn exchange_bytes(
        &self,
        start: usize,
        original: &[u8],
        ours: &[u8],
    ) -> Option<ExitEdit> {
        let [(first, here), (next, there)] = self.pieces(&(start..start + ours.len()));
        let part = |physical, place: Range<usize>| {
            Edit::new(physical, original.get(place.clone())?, ours.get(place)?)
        };
        // All of it may be on the second page.
        let (first, here, there) = match here.is_empty() {
            true => (next, there, 0..0),
            false => (first, here, there),
        };
        let beyond = match there.is_empty() {
            true => None,
            false => Some(Box::new(part(next, there)?)),
        };
        Some(ExitEdit { first: part(first, here)?, beyond })
    }

    /// Adds what puts bytes of ours in the place of as many of its own, or more, counted from its
    /// beginning on; `None` when that cannot be.
    #[inline(always)]
    pub(super) fn replace(
        &self,
        start: usize,
        original: &[u8],
        ours: &[u8],
        edits: &mut Vec<Edit>,
    ) -> Option<()> {
        if self.beyond.is_some() {
            return self.replace_pieces(start, original, ours, edits);
        }
        let physical = self.physical.wrapping_add(start as u64);
        edits.push(Edit::new(physical, original.get(..ours.len())?, ours)?);
        Some(())
    }

    #[cold]
    fn replace_pieces(
        &self,
        start: usize,
        original: &[u8],
        ours: &[u8],
        edits: &mut Vec<Edit>,
    ) -> Option<()> {
        for (physical, place) in self.pieces(&(start..start + ours.len())) {
            let (original, ours) = (original.get(place.clone())?, ours.get(place)?);
            if !ours.is_empty() {
                edits.push(Edit::new(physical, original, ours)?);
            }
        }
        Some(())
    }
}
