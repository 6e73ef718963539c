//! Decompresses frames.

use super::frame::PayloadError;
use super::span::frame_spans;
use super::wire::{ALIGN, CompressedHead, FrameHead, MAX_PLAIN, METHOD_ZSTD, kind};

use zerocopy::FromBytes;

/// The frames in the last compressed frame: at most [`MAX_PLAIN`] bytes, whatever its head says.
#[derive(Debug, Default)]
pub(super) struct Expanded {
    zstd: zstd_frames::Decompressor,
    plain: Vec<u8>,
}

impl Expanded {
    /// The frames.
    pub(super) fn plain(&self) -> &[u8] {
        &self.plain
    }

    /// Takes the payload of a compressed frame with that number; what is then in there are whole
    /// frames that may be there.
    pub(super) fn fill(&mut self, payload: &[u8], sequence: u32) -> Result<(), PayloadError> {
        self.plain.clear();
        let (head, data) = CompressedHead::ref_from_prefix(payload)
            .map_err(|_| malformed("it is shorter than its fixed part"))?;
        if head.method != METHOD_ZSTD {
            return Err(PayloadError::Unknown(format!("compression method {}", head.method)));
        }
        let size = |size: u32| usize::try_from(size).unwrap_or(usize::MAX);
        let length = size(head.length.get());
        if length > MAX_PLAIN || !length.is_multiple_of(ALIGN) {
            return Err(PayloadError::Malformed(format!(
                "{length} bytes compressed; multiples of {ALIGN} up to {MAX_PLAIN} are"
            )));
        }
        let data = data.get(..size(head.size.get()));
        let data = data.ok_or_else(|| malformed("its data are cut off"))?;
        self.plain.resize(length, 0);
        self.zstd.decompress(data, &mut self.plain).map_err(PayloadError::Malformed)?;
        self.check(sequence, head.frames.get())
    }

    fn check(&self, sequence: u32, frames: u32) -> Result<(), PayloadError> {
        let (mut whole, mut count) = (0, 0);
        for span in frame_spans(&self.plain) {
            let head = FrameHead::ref_from_prefix(span.bytes);
            let kind = head.map_or(0, |(head, _)| head.kind.get());
            if matches!(kind, kind::HEADER | kind::END | kind::COMPRESSED) {
                let cause = format!("a frame of type {kind} is inside, where it must not be");
                return Err(PayloadError::Malformed(cause));
            }
            if count == 0 && span.sequence != sequence {
                return Err(malformed("the first frame inside has another number"));
            }
            whole += span.bytes.len();
            count += 1;
        }
        if whole != self.plain.len() || count != frames || count == 0 {
            return Err(malformed("there are not as many whole frames inside as it says"));
        }
        Ok(())
    }
}

fn malformed(cause: &str) -> PayloadError {
    PayloadError::Malformed(cause.to_owned())
}

#[cfg(feature = "zstd")]
mod zstd_frames {
    use std::fmt;

    use zstd::bulk;
    use zstd::zstd_safe::find_frame_compressed_size;

    /// What every zstd frame begins with, but those of versions that nobody has any more.
    const MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();

    #[derive(Default)]
    pub(super) struct Decompressor(Option<bulk::Decompressor<'static>>);

    impl Decompressor {
        /// Fills all of `to`.
        pub(super) fn decompress(&mut self, data: &[u8], to: &mut [u8]) -> Result<(), String> {
            if !data.starts_with(&MAGIC) || find_frame_compressed_size(data) != Ok(data.len()) {
                return Err("it is not one whole frame of zstd".to_owned());
            }
            let zstd = match &mut self.0 {
                Some(zstd) => zstd,
                none => none.insert(bulk::Decompressor::new().map_err(|it| it.to_string())?),
            };
            match zstd.decompress_to_buffer(data, to) {
                Ok(length) if length == to.len() => Ok(()),
                Ok(length) => Err(format!("it has {length} bytes inside and not {}", to.len())),
                Err(error) => Err(error.to_string()),
            }
        }
    }

    impl fmt::Debug for Decompressor {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Decompressor")
        }
    }
}

#[cfg(not(feature = "zstd"))]
mod zstd_frames {
    #[derive(Debug, Default)]
    pub(super) struct Decompressor;

    impl Decompressor {
        /// Not asked for: such streams are refused at their beginning.
        pub(super) fn decompress(&mut self, _: &[u8], _: &mut [u8]) -> Result<(), String> {
            Err("this program was built without zstd".to_owned())
        }
    }
}
