//! Constants and fixed layouts of the format; `docs/stream.md` specifies them.

use flate2::Crc;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every stream; not valid UTF-8, and damaged by any newline conversion.
pub const MAGIC: [u8; 8] = *b"\xf5vmtr\r\n\0";
/// Readers reject every other major version.
pub const VERSION_MAJOR: u16 = 1;
/// Grows with additions that older readers may skip.
pub const VERSION_MINOR: u16 = 3;
/// Major version of a stream with compressed frames; all else in it is as in [`VERSION_MAJOR`].
pub const VERSION_COMPRESSED: u16 = 2;
/// Longest payload of a frame, in bytes.
pub const MAX_PAYLOAD: u32 = 1 << 20;
/// Most bytes of frames that are compressed together.
pub(super) const MAX_PLAIN: usize = 1 << 20;
/// How they are compressed: the only way so far.
pub(super) const METHOD_ZSTD: u8 = 1;
/// Most vCPUs that a header may announce.
pub const MAX_VCPUS: u32 = 4096;
/// Longest symbol or module name, in bytes (the kernel's own limit is 511).
pub const MAX_NAME: usize = 1023;
/// Longest description of a tracer, in bytes.
pub const MAX_DESCRIPTION: usize = 4095;
/// Most symbols in the dictionary of a stream.
pub const MAX_SYMBOLS: usize = 1 << 20;
/// Process ids are below this (the kernel's `PID_MAX_LIMIT`).
pub const MAX_PID: u32 = 1 << 22;

/// Most values that a record may have.
pub const MAX_VALUES: usize = 64;
/// Most words that the values of a record may have: as many as fit behind the rest of it.
pub const MAX_VALUE_WORDS: usize = 250;
/// Longest text of a format of values, in bytes.
pub const MAX_VALUES_TEXT: usize = 64 << 10;
/// Most formats of values in a stream, and most bytes of their texts together; of what was
/// replaced only the newest counts.
pub const MAX_FORMATS: usize = 1 << 18;
/// See [`MAX_FORMATS`].
pub const MAX_FORMATS_TEXT: usize = 64 << 20;

/// Frames and their parts are multiples of this many bytes.
pub(super) const ALIGN: usize = 8;
/// Payload of the larger frames: small enough that consumers see them soon.
pub(super) const BATCH: usize = 192 << 10;

/// Frame types.
pub(super) mod kind {
    pub(crate) const HEADER: u16 = 1;
    pub(crate) const SYMBOLS: u16 = 2;
    pub(crate) const TASKS: u16 = 3;
    pub(crate) const RECORDS: u16 = 4;
    pub(crate) const LOSS: u16 = 5;
    pub(crate) const MARK: u16 = 6;
    pub(crate) const WATERMARK: u16 = 7;
    pub(crate) const JOIN: u16 = 8;
    pub(crate) const END: u16 = 9;
    pub(crate) const TRACERS: u16 = 10;
    pub(crate) const VALUES: u16 = 11;
    pub(crate) const TRACED: u16 = 12;
    pub(crate) const COUNTS: u16 = 13;
    pub(crate) const COMPRESSED: u16 = 14;
}

/// Frame flags.
pub(super) mod flag {
    /// Made for this consumer alone: has no number of its own in the trace.
    pub(crate) const LOCAL: u16 = 1;
    /// A reader that does not know the type may skip the frame.
    pub(crate) const OPTIONAL: u16 = 2;
}

/// First 16 bytes of a stream. This layout is the same in every version.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Prologue {
    pub(crate) magic: [u8; 8],
    pub(crate) major: U16,
    pub(crate) minor: U16,
    /// CRC-32 of the 12 bytes before it.
    pub(crate) check: U32,
}

impl Prologue {
    pub(super) fn current() -> Self {
        Self::new(VERSION_MAJOR, VERSION_MINOR)
    }

    pub(super) fn new(major: u16, minor: u16) -> Self {
        let mut prologue =
            Self { magic: MAGIC, major: major.into(), minor: minor.into(), check: 0.into() };
        prologue.check = prologue.expected_check().into();
        prologue
    }

    pub(super) fn expected_check(&self) -> u32 {
        crc32(&[&self.as_bytes()[..12]])
    }
}

/// What stands before every payload.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct FrameHead {
    pub(crate) kind: U16,
    pub(crate) flags: U16,
    /// Bytes of the payload, a multiple of 8.
    pub(crate) length: U32,
    pub(crate) sequence: U32,
    /// CRC-32 of the 12 bytes before it and the payload after it.
    pub(crate) check: U32,
}

pub(super) const HEAD: usize = size_of::<FrameHead>();

impl FrameHead {
    /// The head of a payload.
    pub(super) fn sealed(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Self {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        debug_assert!(length <= MAX_PAYLOAD);
        let mut head = Self {
            kind: kind.into(),
            flags: flags.into(),
            length: length.into(),
            sequence: sequence.into(),
            check: 0.into(),
        };
        head.check = head.expected_check(payload).into();
        head
    }

    pub(super) fn expected_check(&self, payload: &[u8]) -> u32 {
        crc32(&[&self.as_bytes()[..12], payload])
    }

    pub(super) fn is_local(&self) -> bool {
        self.flags.get() & flag::LOCAL != 0
    }
}

/// CRC-32 (ISO-HDLC, as in zlib and gzip) of the parts one after the other.
pub(super) fn crc32(parts: &[&[u8]]) -> u32 {
    let mut crc = Crc::new();
    for part in parts {
        crc.update(part);
    }
    crc.sum()
}

/// Fixed part of a header frame; `strings` pairs of key and value follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct HeaderFixed {
    pub(crate) clock_hz: U64,
    pub(crate) clock_start: U64,
    pub(crate) address_base: U64,
    pub(crate) slide: U64,
    pub(crate) vcpus: U32,
    pub(crate) strings: U32,
}

/// Two lengths, then the two texts, then zeros up to a multiple of 8.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct PairHead {
    pub(crate) key: U16,
    pub(crate) value: U16,
}

/// Number of entries that follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct ListHead {
    pub(crate) count: U32,
    pub(crate) reserved: U32,
}

/// A symbol; name and module follow, then zeros up to a multiple of 8.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct SymbolHead {
    pub(crate) address: U64,
    pub(crate) size: U32,
    pub(crate) name: U16,
    pub(crate) module: U16,
}

/// A task.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct TaskEntry {
    pub(crate) pid: U32,
    pub(crate) tgid: U32,
    pub(crate) comm: [u8; 16],
}

/// A tracer; name and description follow, then zeros up to a multiple of 8.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct TracerHead {
    pub(crate) number: U32,
    pub(crate) name: U16,
    pub(crate) description: U16,
}

/// A format of values; its text follows, then zeros up to a multiple of 8.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct ValuesHead {
    pub(crate) function: U32,
    pub(crate) tracer: u8,
    pub(crate) of: u8,
    pub(crate) reserved: U16,
    pub(crate) text: U32,
    pub(crate) more: U32,
}

/// Head of a list of functions that were traced; as many numbers follow, then zeros up to a
/// multiple of 8.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct TracedHead {
    pub(crate) since: U64,
    pub(crate) until: U64,
    pub(crate) count: U32,
    pub(crate) tracer: u8,
    pub(crate) of: u8,
    pub(crate) reserved: U16,
}

/// Head of counts; as many [`CountEntry`] follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct CountsHead {
    pub(crate) vcpu: U32,
    pub(crate) tracer: u8,
    pub(crate) of: u8,
    pub(crate) name: U16,
    pub(crate) count: U32,
    pub(crate) more: U32,
}

/// How often a function was entered.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct CountEntry {
    pub(crate) function: U32,
    /// The word of a histogram, or the caller.
    pub(crate) bucket: U32,
    pub(crate) hits: U64,
}

/// Head of a record batch; the records follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct BatchHead {
    pub(crate) vcpu: U32,
    pub(crate) count: U32,
    /// Records of this vCPU before this batch, from the start of the trace.
    pub(crate) first: U64,
}

/// A loss.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct LossFixed {
    pub(crate) vcpu: U32,
    pub(crate) reason: U32,
    pub(crate) count: U64,
    /// Lost on this vCPU up to and with this frame.
    pub(crate) total: U64,
}

/// A mark; the text follows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct MarkFixed {
    pub(crate) ticks: U64,
    pub(crate) duration_ns: U64,
    pub(crate) kind: U32,
    pub(crate) text: U32,
}

/// A watermark.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct WatermarkFixed {
    pub(crate) ticks: U64,
}

/// Head of the totals in join and end frames: `vcpus` times [`TotalEntry`], then, in an end
/// frame, `json` bytes of text.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct TotalsHead {
    pub(crate) vcpus: U32,
    pub(crate) json: U32,
}

/// Records and losses of one vCPU since the start of the trace.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct TotalEntry {
    pub(crate) records: U64,
    pub(crate) lost: U64,
}

/// Head of a compressed frame; `size` bytes of data follow, then zeros up to a multiple of 8.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct CompressedHead {
    /// Bytes of the frames inside, at most [`MAX_PLAIN`].
    pub(crate) length: U32,
    pub(crate) size: U32,
    /// How many frames are inside.
    pub(crate) frames: U32,
    pub(crate) method: u8,
    pub(crate) reserved: [u8; 3],
}
