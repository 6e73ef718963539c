//! Compressed streams decode to the plain ones, and damaged ones do no harm.

use std::io::Write;

use proptest::collection::vec;
use proptest::prelude::*;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

use super::properties::{check_bits, check_cuts, frame_starts, read, seal, step, write};
use super::sample::{self, compressed};
use super::wire::{CompressedHead, FrameHead, HEAD, MAX_PLAIN, kind};
use super::*;

/// Types and lengths of all frames as they are in a file.
fn frames(stream: &[u8]) -> Vec<(u16, usize)> {
    let frame = |&start: &usize| {
        let (head, _) = FrameHead::read_from_prefix(&stream[start..]).unwrap();
        (head.kind.get(), head.length.get() as usize)
    };
    frame_starts(stream).iter().map(frame).collect()
}

/// A stream of so many thousand records.
fn records(thousands: usize) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), &sample::header()).unwrap();
    for _ in 0..thousands {
        writer.entries(0, &[EntryRecord::new(1, 2, 3, 4); 1000]).unwrap();
    }
    writer.end(&Summary::default()).unwrap();
    writer.into_inner().unwrap()
}

proptest! {
    #[test]
    fn a_compressed_stream_is_read_as_the_plain_one(
        steps in vec(step(), 0..20),
        pieces in vec((1..5000usize, any::<bool>()), 1..9),
        level in -7..4_i32,
    ) {
        let (plain, expected) = write(&steps);
        let compression = format!("zstd:{level}").parse().unwrap();
        let mut compressor = Compressor::new(Vec::new(), compression).unwrap();
        let mut rest = &*plain;
        for (size, flush) in pieces.iter().cycle() {
            let (piece, behind) = rest.split_at(rest.len().min(*size));
            compressor.write_all(piece).unwrap();
            if *flush {
                compressor.flush().unwrap();
            }
            rest = behind;
            if rest.is_empty() {
                break;
            }
        }
        let stream = compressor.into_inner().unwrap();
        let minor = VERSION_MINOR.to_le_bytes();
        prop_assert_eq!(&stream[8..12], &[2, 0, minor[0], minor[1]]);
        prop_assert_eq!(read(&stream).expect("whole"), expected);
        // Also in pieces, with places as in the plain stream.
        let (mut decoder, mut whole) = (Decoder::new(), Decoder::new());
        whole.feed(&plain);
        for piece in stream.chunks(pieces[0].0) {
            decoder.feed(piece);
            while decoder.advance().expect("whole") == Progress::Frame {
                whole.advance().expect("whole");
                prop_assert_eq!(decoder.offset(), whole.offset());
            }
        }
        prop_assert!(decoder.finish().is_ok());
        prop_assert_eq!(decoder.offset(), plain.len() as u64);
    }

    /// What zstd says is not believed, nor what stands around it.
    #[test]
    fn hostile_compressed_frames_are_an_error_or_a_stream(
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut stream = compressed(&sample::stream());
        let starts = frame_starts(&stream);
        let payload = &mut stream[starts[1] + HEAD..starts[2]];
        for (place, byte) in damage {
            *place.get_mut(payload) = byte;
        }
        seal(&mut stream[starts[1]..starts[2]]);
        let _refused = read(&stream);
    }
}

#[test]
fn header_and_end_stay_where_they_are_found() {
    let plain = sample::stream();
    let stream = compressed(&plain);
    let kinds: Vec<_> = frames(&stream).iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [kind::HEADER, kind::COMPRESSED, kind::END]);
    assert!(stream.len() < plain.len());
    assert_eq!(frames(&plain)[0], frames(&stream)[0]);
}

#[test]
fn frames_are_compressed_in_blocks() {
    let plain = records(100);
    let stream = compressed(&plain);
    let blocks = frames(&stream).iter().filter(|(kind, _)| *kind == kind::COMPRESSED).count();
    assert!((8..12).contains(&blocks), "{blocks}");
    assert!(stream.len() * 20 < plain.len(), "{} of {}", stream.len(), plain.len());
}

#[test]
fn what_would_be_longer_or_has_no_room_stays_plain() {
    let mut random = 1_u64;
    let noise: Vec<u8> = (0..300 << 10)
        .map(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            random.to_be_bytes()[0]
        })
        .collect();
    let begin = &sample::stream()[..frame_starts(&sample::stream())[1]];
    for (payload, stays) in [(noise, true), (vec![0; 1 << 20], true), (vec![0; 1 << 19], false)] {
        let head = FrameHead::sealed(99, 2, 1, &payload);
        let stream = compressed(&[begin, head.as_bytes(), &payload].concat());
        let kinds: Vec<_> = frames(&stream).iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [kind::HEADER, if stays { 99 } else { kind::COMPRESSED }]);
    }
}

// Readers refuse a block that is longer than the longest.
#[test]
fn what_does_not_fit_into_a_block_begins_another() {
    let plain = sample::stream();
    let begin = &plain[..frame_starts(&plain)[1]];
    let first = vec![0; 1 << 10];
    let rest = MAX_PLAIN - (HEAD + first.len()) - HEAD;
    for (second, blocks) in [(vec![0; rest], 1), (vec![0; rest + 8], 2)] {
        let [one, other] = [&first, &second].map(|it| FrameHead::sealed(99, 2, 1, it));
        let parts = [begin, one.as_bytes(), &first, other.as_bytes(), &second];
        let kinds: Vec<_> =
            frames(&compressed(&parts.concat())).iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds[0], kind::HEADER);
        assert_eq!(kinds[1..], vec![kind::COMPRESSED; blocks]);
    }
}

// The longest block there is: one that a writer makes must be one that readers take.
#[test]
fn the_longest_block_is_read() {
    let plain = sample::stream();
    let begin = &plain[..frame_starts(&plain)[1]];
    let payload = vec![0; MAX_PLAIN - HEAD];
    let head = FrameHead::sealed(99, 2, 1, &payload);
    let stream = compressed(&[begin, head.as_bytes(), &payload].concat());
    let kinds: Vec<_> = frames(&stream).iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [kind::HEADER, kind::COMPRESSED]);
    let mut decoder = Decoder::new();
    decoder.feed(&stream);
    assert_eq!(decoder.advance().unwrap(), Progress::Frame);
    assert_eq!(decoder.advance().unwrap(), Progress::Frame);
    assert!(matches!(decoder.frame(), Some(Frame::Skipped(99))));
    // The longest frame.
    let payload = vec![0; MAX_PAYLOAD as usize];
    let head = FrameHead::sealed(99, 2, 1, &payload);
    let mut decoder = Decoder::new();
    decoder.feed(&[begin, head.as_bytes(), &payload].concat());
    assert_eq!(decoder.advance().unwrap(), Progress::Frame);
    assert_eq!(decoder.advance().unwrap(), Progress::Frame);
}

#[test]
fn what_is_gathered_is_there_once_it_is_flushed() {
    let plain = sample::stream();
    let starts = frame_starts(&plain);
    let mut stream = Vec::new();
    let mut compressor = Compressor::new(&mut stream, "zstd".parse().unwrap()).unwrap();
    compressor.write_all(&plain[..starts[5] + 3]).unwrap();
    compressor.flush().unwrap();
    drop(compressor);
    let mut decoder = Decoder::new();
    decoder.feed(&stream);
    let mut given = 0;
    while decoder.advance().unwrap() == Progress::Frame {
        given += 1;
    }
    assert_eq!(given, 5);
}

#[test]
fn every_cut_of_a_compressed_stream_is_torn() {
    let stream = compressed(&sample::stream());
    check_cuts(&stream);
    let end = *frame_starts(&stream).last().unwrap();
    let error = read(&stream[..end - 1]).unwrap_err().to_string();
    assert!(error.contains("inside a frame"), "{error}");
    // It ends where its bytes do, also for whoever has not taken all of a block.
    let mut decoder = Decoder::new();
    decoder.feed(&stream[..end]);
    assert_eq!(decoder.advance().unwrap(), Progress::Frame);
    assert_eq!(decoder.advance().unwrap(), Progress::Frame);
    let torn = decoder.finish();
    assert!(
        matches!(torn, Err(StreamError::Torn { offset, .. }) if offset == end as u64),
        "{torn:?}"
    );
}

#[test]
fn every_flipped_bit_of_a_compressed_stream_is_recognised() {
    check_bits(compressed(&sample::stream()));
}

/// The error when the frame behind the header has this instead of what it has.
fn refused(change: impl FnOnce(&mut CompressedHead, &mut Vec<u8>)) -> String {
    let stream = compressed(&sample::stream());
    let starts = frame_starts(&stream);
    let (start, end) = (starts[1], starts[2]);
    let (head, data) = CompressedHead::read_from_prefix(&stream[start + HEAD..end]).unwrap();
    let (mut head, mut data) = (head, data[..head.size.get() as usize].to_vec());
    change(&mut head, &mut data);
    let mut payload = [head.as_bytes(), &data].concat();
    payload.resize(payload.len().next_multiple_of(8), 0);
    let frame = FrameHead::sealed(kind::COMPRESSED, 0, 1, &payload);
    let parts = [&stream[..start], frame.as_bytes(), &payload, &stream[end..]];
    read(&parts.concat()).expect_err("refused").to_string()
}

fn number(bytes: usize) -> U32 {
    u32::try_from(bytes).unwrap().into()
}

/// Frames in the place of those that were compressed.
fn with_inside(inside: &[u8], frames: u32) -> String {
    refused(|head, data| {
        *data = zstd::bulk::compress(inside, 1).unwrap();
        (head.length, head.size) = (number(inside.len()), number(data.len()));
        head.frames = frames.into();
    })
}

#[test]
fn what_is_wrong_with_a_compressed_frame_is_told() {
    let says = |error: String, what: &str| assert!(error.contains(what), "{what}: {error}");
    says(refused(|head, _| head.method = 2), "compression method 2 is not known");
    says(refused(|head, _| head.method = 2), "use a vmtrace at least as new");
    says(refused(|head, _| head.length = number(MAX_PLAIN + 8)), "up to 1048576");
    says(refused(|head, _| head.length = 4.into()), "multiples of 8");
    says(refused(|head, _| head.length = (head.length.get() + 8).into()), "bytes inside and not");
    says(refused(|head, _| head.size = u32::MAX.into()), "its data are cut off");
    says(refused(|head, _| head.size = 9.into()), "not one whole frame of zstd");
    says(refused(|head, _| head.frames = 3.into()), "not as many whole frames");
    says(refused(|_, data| data[0] = 0), "not one whole frame of zstd");
    let twice = |head: &mut CompressedHead, data: &mut Vec<u8>| {
        data.extend_from_within(..);
        head.size = (head.size.get() * 2).into();
    };
    says(refused(twice), "not one whole frame of zstd");
    let plain = sample::stream();
    let starts = frame_starts(&plain);
    let end = starts[starts.len() - 1];
    says(with_inside(&plain[starts[2]..end], 12), "another number");
    says(with_inside(&plain[starts[1]..end + 8], 1), "not as many whole frames");
    says(with_inside(&plain[starts[0]..starts[1]], 1), "a frame of type 1 is inside");
    says(with_inside(&plain[end..], 1), "a frame of type 9 is inside");
    says(with_inside(&[], 0), "not as many whole frames");
    let nested = compressed(&plain);
    let starts = frame_starts(&nested);
    says(with_inside(&nested[starts[1]..starts[2]], 1), "a frame of type 14 is inside");
}

// 16 MiB of zeros in some hundred bytes.
#[test]
fn no_more_is_decompressed_than_was_announced() {
    let zeros = vec![0; 16 << 20];
    let error = refused(|head, data| {
        *data = zstd::bulk::compress(&zeros, 1).unwrap();
        head.size = number(data.len());
    });
    assert!(error.contains("damaged stream at byte"), "{error}");
}

// Readers of version 1 know no such frame: a stream that says 1 has none.
#[test]
fn compressed_frames_are_of_compressed_streams() {
    let mut stream = compressed(&sample::stream());
    stream[..16].copy_from_slice(&sample::stream()[..16]);
    let error = read(&stream).unwrap_err().to_string();
    assert!(error.contains("frame type 14 is not known"), "{error}");
    let stream = compressed(&sample::stream());
    let starts = frame_starts(&stream);
    let error = read(&[&stream[..16], &stream[starts[1]..]].concat()).unwrap_err().to_string();
    assert!(error.contains("where the header must"), "{error}");
}

#[test]
fn only_plain_streams_are_compressed() {
    let stream = sample::stream();
    for bytes in [&compressed(&stream)[..], &b"#!/bin/sh\nexit 1\n"[..]] {
        let mut compressor = Compressor::new(Vec::new(), "zstd".parse().unwrap()).unwrap();
        let error = compressor.write_all(bytes).unwrap_err().to_string();
        assert!(error.contains("only a plain stream"), "{error}");
    }
    let start = frame_starts(&stream)[1];
    for length in [(1 << 20) + 8, 4_u32] {
        let mut impossible = stream.clone();
        impossible[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
        let mut compressor = Compressor::new(Vec::new(), "zstd".parse().unwrap()).unwrap();
        let error = compressor.write_all(&impossible).unwrap_err().to_string();
        assert!(error.contains("impossible size"), "{error}");
    }
}

#[test]
fn ways_to_compress() {
    let read = |text: &str| text.parse::<Compression>();
    assert_eq!(read("zstd"), read("zstd:1"));
    assert!(read("zstd:-5").is_ok() && read("zstd:19").is_ok());
    for (bad, says) in [
        ("gzip", "use zstd or zstd:LEVEL"),
        ("", "use zstd"),
        ("zstd:", "levels of zstd are"),
        ("zstd:x", "levels of zstd are"),
        ("zstd:23", "to 22"),
    ] {
        let error = read(bad).unwrap_err();
        assert!(error.contains(says), "{bad:?}: {error}");
    }
}
