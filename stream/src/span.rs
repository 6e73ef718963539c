//! Finds runs of complete frames without decoding their payloads.

use zerocopy::FromBytes;

use super::wire::{BatchHead, FrameHead, HEAD, MAGIC, Prologue, kind};

/// One frame of a [`Writer`](super::Writer)'s output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameSpan<'a> {
    /// Head and payload.
    pub bytes: &'a [u8],
    /// Its number.
    pub sequence: u32,
    /// For records: vCPU and how many.
    pub records: Option<(u32, u32)>,
    /// A slow consumer can do without it: records and watermarks.
    pub droppable: bool,
}

/// Cuts what a [`Writer`](super::Writer) wrote into frames. A prologue counts to the frame
/// behind it. Stops at what is no whole frame.
pub fn frame_spans(bytes: &[u8]) -> impl Iterator<Item = FrameSpan<'_>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let skip = if rest.starts_with(&MAGIC) { size_of::<Prologue>() } else { 0 };
        let (head, _) = FrameHead::read_from_prefix(rest.get(skip..)?).ok()?;
        let length = usize::try_from(head.length.get()).ok()?;
        let (bytes, after) = rest.split_at_checked(skip + HEAD + length)?;
        let batch = bytes.get(skip + HEAD..).filter(|_| head.kind.get() == kind::RECORDS);
        let batch = batch.and_then(|payload| BatchHead::read_from_prefix(payload).ok());
        let records = batch.map(|(batch, _)| (batch.vcpu.get(), batch.count.get()));
        rest = after;
        Some(FrameSpan {
            bytes,
            sequence: head.sequence.get(),
            records,
            droppable: matches!(head.kind.get(), kind::RECORDS | kind::WATERMARK),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn spans_are_all_of_the_stream() {
        let stream = sample::stream();
        let spans: Vec<_> = frame_spans(&stream).collect();
        assert_eq!(spans.iter().map(|span| span.bytes.len()).sum::<usize>(), stream.len());
        assert!(spans.iter().map(|span| span.sequence).eq(0..u32::try_from(spans.len()).unwrap()));
        let records: u32 = spans.iter().filter_map(|span| span.records).map(|(_, n)| n).sum();
        assert_eq!(records, 7);
        assert!(frame_spans(&stream[..stream.len() - 1]).count() == spans.len() - 1);
    }
}
