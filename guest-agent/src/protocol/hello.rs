//! The greeting that each side sends first. Its form never changes, so that any two versions
//! understand it.

use super::ProtocolError;
use super::fields::printable;

/// The versions of the protocol that this program speaks: the lowest and the highest.
pub const VERSIONS: (u16, u16) = (1, 1);

const MAGIC: &[u8; 8] = b"VMTAGENT";

/// Who speaks, and which versions of the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The lowest and the highest version of the protocol.
    pub versions: (u16, u16),
    /// Program and version, for people; at most 255 bytes.
    pub software: String,
}

impl Hello {
    /// That of this program, as `software`.
    pub fn new(software: &str) -> Self {
        Self { versions: VERSIONS, software: software.to_owned() }
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(self.versions.0.to_le_bytes());
        out.extend(self.versions.1.to_le_bytes());
        let end = self.software.floor_char_boundary(usize::from(u8::MAX));
        let text = self.software.as_bytes().get(..end).unwrap_or_default();
        out.extend(u8::try_from(text.len()));
        out.extend(text);
        out
    }

    /// From the first bytes, and how many these were; `None`: there must be more.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ProtocolError> {
        let known = bytes.len().min(MAGIC.len());
        if bytes.get(..known) != MAGIC.get(..known) {
            return Err(ProtocolError("it begins with something else"));
        }
        let Some([a0, a1, b0, b1, length, rest @ ..]) = bytes.get(MAGIC.len()..) else {
            return Ok(None);
        };
        let length = usize::from(*length);
        let Some(text) = rest.get(..length) else { return Ok(None) };
        let versions = (u16::from_le_bytes([*a0, *a1]), u16::from_le_bytes([*b0, *b1]));
        let hello = Self { versions, software: printable(text) };
        Ok(Some((hello, MAGIC.len() + 5 + length)))
    }

    /// The highest version that both speak.
    pub fn common(&self, other: &Self) -> Option<u16> {
        let highest = self.versions.1.min(other.versions.1);
        (highest >= self.versions.0.max(other.versions.0)).then_some(highest)
    }
}

impl std::fmt::Display for Hello {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (low, high) = self.versions;
        write!(f, "{} (agent protocol {low}", self.software)?;
        if low == high { f.write_str(")") } else { write!(f, " to {high})") }
    }
}
