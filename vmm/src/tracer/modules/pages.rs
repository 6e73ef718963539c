//! Reads guest memory by pages.

use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::spot::PAGE;

/// Guest memory by pages: names lie side by side.
pub(super) struct Pages<'a> {
    guest: &'a dyn Guest,
    image: &'a Image,
    page: Option<u64>,
    bytes: Box<[u8; PAGE_LEN]>,
}

impl<'a> Pages<'a> {
    pub(super) fn new(guest: &'a dyn Guest, image: &'a Image) -> Self {
        Self { guest, image, page: None, bytes: Box::new([0; PAGE_LEN]) }
    }

    /// The bytes from `address` to the end of its page.
    pub(super) fn rest(&mut self, address: u64) -> Result<&[u8], GuestError> {
        let page = address & !(PAGE - 1);
        if self.page != Some(page) {
            self.page = None;
            let physical = self.image.tables.translate(self.guest, page)?;
            self.guest.read(physical, &mut self.bytes[..])?;
            self.page = Some(page);
        }
        Ok(&self.bytes[usize::try_from(address - page).unwrap_or(0)..])
    }

    /// Text up to its NUL, or so long.
    pub(super) fn text(&mut self, address: u64, most: usize) -> Result<Vec<u8>, GuestError> {
        let mut text = Vec::new();
        let mut at = address;
        while text.len() < most {
            let rest = self.rest(at)?;
            let rest = &rest[..rest.len().min(most - text.len())];
            let end = rest.iter().position(|&byte| byte == 0);
            text.extend_from_slice(&rest[..end.unwrap_or(rest.len())]);
            if end.is_some() {
                break;
            }
            at = at.wrapping_add(rest.len() as u64);
        }
        Ok(text)
    }

    /// So many bytes, or those before the first page that cannot be read.
    pub(super) fn some(&mut self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let Some(at) = address.checked_add(bytes.len() as u64) else { break };
            let Ok(rest) = self.rest(at) else { break };
            bytes.extend_from_slice(&rest[..rest.len().min(len - bytes.len())]);
        }
        bytes
    }

    pub(super) fn word(&self, address: u64) -> Result<u64, GuestError> {
        self.image.read_u64(self.guest, address)
    }

    pub(super) fn count(&self, address: u64) -> Result<u32, GuestError> {
        let mut count = [0; 4];
        self.image.read(self.guest, address, &mut count)?;
        Ok(u32::from_le_bytes(count))
    }

    pub(super) fn all(&self, address: u64, len: usize) -> Result<Vec<u8>, GuestError> {
        let mut bytes = vec![0; len];
        self.image.read(self.guest, address, &mut bytes)?;
        Ok(bytes)
    }
}

/// Guest-physical address of so many bytes, and of the page on which they go on.
pub(in crate::tracer) fn place(
    guest: &dyn Guest,
    image: &Image,
    location: u64,
    span: usize,
) -> Option<(u64, Option<u64>)> {
    let translate = |address| image.tables.translate(guest, address).ok();
    let physical = translate(location)?;
    let next = location.checked_add(span as u64 - 1)? & !(PAGE - 1);
    if next <= location {
        return Some((physical, None));
    }
    Some((physical, Some(translate(next)?)))
}

/// [`PAGE`] for arrays.
const PAGE_LEN: usize = 4096;
