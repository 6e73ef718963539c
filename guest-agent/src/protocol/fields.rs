//! Little-endian fields of a payload. A `u32` length precedes each byte string.

use super::ProtocolError;

/// Takes fields off the front.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], ProtocolError> {
        let (head, rest) =
            self.0.split_at_checked(count).ok_or(ProtocolError("a frame is too short"))?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ProtocolError> {
        self.take(N)?.try_into().map_err(|_| ProtocolError("a frame is too short"))
    }

    pub(super) fn u8(&mut self) -> Result<u8, ProtocolError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, ProtocolError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, ProtocolError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, ProtocolError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn bytes(&mut self) -> Result<Vec<u8>, ProtocolError> {
        let length = self.u32()?;
        let length = usize::try_from(length).map_err(|_| ProtocolError("a field is too long"))?;
        Ok(self.take(length)?.to_vec())
    }

    /// Byte strings, with their number before them.
    pub(super) fn list(&mut self) -> Result<Vec<Vec<u8>>, ProtocolError> {
        // Not reserved: the number is a claim.
        (0..self.u16()?).map(|_| self.bytes()).collect()
    }

    /// A text for people: what is not UTF-8 or would control a terminal is replaced.
    pub(super) fn text(&mut self) -> Result<String, ProtocolError> {
        Ok(printable(&self.bytes()?))
    }

    pub(super) fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }

    pub(super) fn end(&self) -> Result<(), ProtocolError> {
        if self.0.is_empty() { Ok(()) } else { Err(ProtocolError("a frame is too long")) }
    }
}

pub(super) fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

pub(super) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    // What is too long for the length is far too long for a frame, and refused there.
    out.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend(bytes);
}

pub(super) fn put_list(out: &mut Vec<u8>, list: &[Vec<u8>]) {
    out.extend(u16::try_from(list.len()).unwrap_or(u16::MAX).to_le_bytes());
    for bytes in list {
        put_bytes(out, bytes);
    }
}
