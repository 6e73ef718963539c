//! The seven compressions a kernel image may use.
//!
//! The output is bounded by the size in the image's header, or by [`LIMIT`]. Memory is touched only
//! as output arrives, so that a damaged size field cannot exhaust it.

use std::io::Read;

use super::KernelError;
use super::read::{array_at, index, u32_at, wide};

/// No kernel is larger than this once decompressed (the x86 image window is 1 GiB, and no
/// stripped image comes near half of it).
pub(super) const LIMIT: usize = 512 << 20;

/// Kernels compress with dictionaries of up to 128 MiB; the rest is the decoder's own state.
const DECODER_MEMORY_KIB: u32 = 160 << 10;

/// One of the compressions the kernel's build offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// RFC 1952.
    Gzip,
    /// bzip2.
    Bzip2,
    /// The old `.lzma` container.
    Lzma,
    /// xz, usually with the x86 or RISC-V branch filter.
    Xz,
    /// The lzop container.
    Lzo,
    /// The "legacy" lz4 frame: independent blocks of 8 MiB.
    Lz4,
    /// Zstandard.
    Zstd,
}

impl Compression {
    /// Recognises compressed data by its first bytes.
    pub fn detect(data: &[u8]) -> Option<Self> {
        const MAGICS: [(&[u8], Compression); 7] = [
            (&[0x1f, 0x8b], Compression::Gzip),
            (b"BZh", Compression::Bzip2),
            (&[0x5d, 0, 0], Compression::Lzma),
            (&[0xfd, b'7', b'z', b'X', b'Z', 0], Compression::Xz),
            (&LZOP_MAGIC, Compression::Lzo),
            (&LZ4_MAGIC, Compression::Lz4),
            (&[0x28, 0xb5, 0x2f, 0xfd], Compression::Zstd),
        ];
        MAGICS.iter().find(|(magic, _)| data.starts_with(magic)).map(|&(_, format)| format)
    }

    /// The name people know it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Bzip2 => "bzip2",
            Self::Lzma => "lzma",
            Self::Xz => "xz",
            Self::Lzo => "lzo",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    /// Decompresses `data`, which must hold nothing after the compressed stream. With `size`
    /// given, exactly that many bytes must come out.
    pub(super) fn decompress(
        self,
        data: &[u8],
        size: Option<usize>,
    ) -> Result<Vec<u8>, KernelError> {
        let limit = size.unwrap_or(LIMIT);
        if limit > LIMIT {
            return Err(too_large());
        }
        let damaged = |reason: String| KernelError::Decompress { format: self.name(), reason };
        let output = match self {
            Self::Gzip => stream(flate2::bufread::GzDecoder::new(data), size),
            Self::Bzip2 => stream(bzip2::bufread::BzDecoder::new(data), size),
            Self::Lzma => lzma_rust2::LzmaReader::new_mem_limit(data, DECODER_MEMORY_KIB, None)
                .map_err(|e| e.to_string())
                .and_then(|reader| stream(reader, size)),
            Self::Xz => {
                stream(lzma_rust2::XzReader::new_mem_limit(data, false, DECODER_MEMORY_KIB), size)
            }
            Self::Lzo => lzop(data, limit),
            Self::Lz4 => lz4_legacy(data, limit),
            Self::Zstd => zstd_frames(data, size),
        }
        .map_err(damaged)?;
        match size {
            Some(size) if output.len() != size => {
                Err(damaged(format!("{} bytes came out, the header promises {size}", output.len())))
            }
            None if output.len() > LIMIT => Err(too_large()),
            _ => Ok(output),
        }
    }
}

fn too_large() -> KernelError {
    KernelError::TooLarge { what: "the decompressed kernel", limit: wide(LIMIT >> 20) }
}

/// Reads one byte more than allowed, so that the caller can tell "too much" from "enough".
fn stream(reader: impl Read, size: Option<usize>) -> Result<Vec<u8>, String> {
    let mut output = Vec::with_capacity(size.map_or(0, |size| size + 1));
    let limit = size.unwrap_or(LIMIT);
    reader.take(wide(limit) + 1).read_to_end(&mut output).map_err(|e| e.to_string())?;
    Ok(output)
}

fn zstd_frames(data: &[u8], size: Option<usize>) -> Result<Vec<u8>, String> {
    // In one go where the size is known: no window to keep, no copy out of it.
    let Some(size) = size else {
        return stream(zstd::stream::read::Decoder::new(data).map_err(|e| e.to_string())?, None);
    };
    let mut output = Vec::with_capacity(size);
    zstd::bulk::Decompressor::new()
        .and_then(|mut decoder| decoder.decompress_to_buffer(data, &mut output))
        .map_err(|e| e.to_string())?;
    Ok(output)
}

const LZ4_MAGIC: [u8; 4] = 0x184c_2102_u32.to_le_bytes();
const LZ4_BLOCK: usize = 8 << 20;

fn lz4_legacy(data: &[u8], limit: usize) -> Result<Vec<u8>, String> {
    let mut output = Vec::new();
    let mut rest = &data[LZ4_MAGIC.len().min(data.len())..];
    while !rest.is_empty() {
        let length = u32_at(rest, 0).ok_or("a block header is cut off")?;
        let length = index(length.into());
        let block = rest[4..].get(..length).ok_or("a block is cut off")?;
        rest = &rest[4 + length..];
        let start = output.len();
        let room = LZ4_BLOCK.min(limit - start);
        output.resize(start + room, 0);
        let written = lz4_flex::block::decompress_into(block, &mut output[start..])
            .map_err(|e| e.to_string())?;
        output.truncate(start + written);
    }
    Ok(output)
}

const LZOP_MAGIC: [u8; 9] = [0x89, b'L', b'Z', b'O', 0, b'\r', b'\n', 0x1a, b'\n'];

fn lzop(data: &[u8], limit: usize) -> Result<Vec<u8>, String> {
    // Flags of the lzop header: which checksums stand before each block, is there a filter.
    const SUMS_OF_OUTPUT: [u32; 2] = [0x1, 0x100];
    const SUMS_OF_INPUT: [u32; 2] = [0x2, 0x200];
    const FILTER: u32 = 0x800;
    /// Since this version the header also tells the level and the upper half of the time.
    const WITH_LEVEL: u16 = 0x940;

    let mut input = Bytes(data.get(LZOP_MAGIC.len()..).unwrap_or_default());
    let version = u16::from_be_bytes(input.take()?);
    let newer = version >= WITH_LEVEL;
    input.skip(2 + if newer { 2 } else { 0 })?; // library version, version needed
    input.skip(1 + usize::from(newer))?; // method, level
    let flags = u32::from_be_bytes(input.take()?);
    if flags & FILTER != 0 {
        input.skip(4)?;
    }
    input.skip(4 + 4 + if newer { 4 } else { 0 })?; // mode, time
    let [name] = input.take()?;
    input.skip(usize::from(name) + 4)?; // name, checksum

    let count = |sums: [u32; 2]| sums.iter().filter(|&bit| flags & bit != 0).count();
    let mut output = Vec::new();
    loop {
        let expanded = index(u32::from_be_bytes(input.take()?).into());
        if expanded == 0 {
            return Ok(output);
        }
        let stored = index(u32::from_be_bytes(input.take()?).into());
        input.skip(4 * count(SUMS_OF_OUTPUT))?;
        if stored < expanded {
            input.skip(4 * count(SUMS_OF_INPUT))?;
        }
        let block = input.slice(stored)?;
        if expanded > limit - output.len() {
            return Err("more data than the header promises".to_owned());
        }
        if stored == expanded {
            output.extend_from_slice(block);
        } else {
            let start = output.len();
            output.resize(start + expanded, 0);
            let written =
                lzo::decompress_into(block, &mut output[start..]).map_err(|e| format!("{e:?}"))?;
            if written != expanded {
                return Err("a block is shorter than its header promises".to_owned());
            }
        }
    }
}

/// A cursor for the big-endian lzop header.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let value = array_at(self.0, 0).ok_or("the data is cut off")?;
        self.0 = &self.0[N..];
        Ok(value)
    }

    fn slice(&mut self, len: usize) -> Result<&'a [u8], String> {
        let (head, tail) = self.0.split_at_checked(len).ok_or("the data is cut off")?;
        self.0 = tail;
        Ok(head)
    }

    fn skip(&mut self, len: usize) -> Result<(), String> {
        self.slice(len).map(|_| ())
    }
}
