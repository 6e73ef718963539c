//! The trace stream: the input itself, or frames made of it with valid check values, so that the
//! code after the check is reached. Such frames are also compressed, and then damaged.
use std::io::Write;

use vmtrace::export::{Graph, Json, PlayError, Player, Text};
use vmtrace::stream::{Compressor, Frame, MAGIC, Reader, Record, show_values};

/// CRC-32 as the format has it; written again here, so that the library's own is tested too.
fn crc32(parts: &[&[u8]]) -> [u8; 4] {
    let mut crc = !0u32;
    for byte in parts.iter().copied().flatten() {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & 0u32.wrapping_sub(crc & 1));
        }
    }
    (!crc).to_le_bytes()
}

fn frame(stream: &mut Vec<u8>, kind: u8, flags: u8, sequence: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("small");
    let mut head = vec![kind, 0, flags, 0];
    head.extend_from_slice(&length.to_le_bytes());
    head.extend_from_slice(&sequence.to_le_bytes());
    let check = crc32(&[&head, payload]);
    stream.extend_from_slice(&head);
    stream.extend_from_slice(&check);
    stream.extend_from_slice(payload);
}

/// Values of every type, for the entries of function 0.
const FORMAT: &[u8] = br#"{"values":[{"name":"a","type":"signed","bytes":4},
{"name":"a","type":"unsigned","bytes":8},{"name":"b","type":"bool","bytes":1},
{"name":"c","type":"char"},{"name":"p","type":"pointer"},{"name":"t","type":"text","bytes":12},
{"name":"e","type":"enum","bytes":1,"signed":true,"names":[[-1,"NONE"],[1,"ONE"]]},
{"name":"f","type":"bits","shift":3,"width":9,"signed":true},{"name":"r","type":"raw","bytes":9},
{"name":"l","type":"later","bytes":9}]}"#;

/// The payload of a frame with one format.
fn format(function: u8, tracer: u8, of: u8, text: &[u8]) -> Vec<u8> {
    let mut payload = vec![1, 0, 0, 0, 0, 0, 0, 0, function, 0, 0, 0, tracer, of, 0, 0];
    payload.extend_from_slice(&u32::try_from(text.len()).expect("small").to_le_bytes());
    payload.extend_from_slice(&[0; 4]);
    payload.extend_from_slice(text);
    payload.resize(payload.len().next_multiple_of(8), 0);
    payload
}

/// A stream with a good beginning, and frames made of the input: for each a type, flags, a
/// length in units of 8 bytes, and the payload.
pub(crate) fn sealed(mut input: &[u8]) -> Vec<u8> {
    let mut stream = MAGIC.to_vec();
    stream.extend_from_slice(&[1, 0, 0, 0]);
    let check = crc32(&[&stream]);
    stream.extend_from_slice(&check);
    let mut header = Vec::new();
    for field in [1_000_000_000u64, 0, 0xffff_ffff_0000_0000, 0, 2] {
        header.extend_from_slice(&field.to_le_bytes());
    }
    frame(&mut stream, 1, 0, 0, &header);
    frame(&mut stream, 11, 2, 1, &format(0, 0, 0, FORMAT));
    let mut sequence = 2;
    while let [kind, flags, units, rest @ ..] = input {
        let mut payload = rest[..rest.len().min(usize::from(*units) * 8)].to_vec();
        input = &rest[payload.len()..];
        payload.resize(payload.len().next_multiple_of(8), 0);
        // Half of the formats have a head that fits, so that the text is reached.
        if kind % 12 == 11
            && flags & 4 != 0
            && let [function, tracer, of, text @ ..] = &*payload
        {
            let end = text.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            payload = format(function % 2, tracer % 2, of % 3, &text[..end]);
        }
        frame(&mut stream, kind % 12, flags & 3, sequence, &payload);
        sequence += u32::from(flags & 1 == 0);
    }
    stream
}

/// Bytes of prologue and header.
const BEGIN: usize = 16 + 16 + 40;

/// The same stream compressed; the damage, if there is any, is to the first compressed frame, whose
/// check value fits.
fn packed(plain: &[u8], damage: u8, place: usize) -> Vec<u8> {
    let mut compressor =
        Compressor::new(Vec::new(), "zstd".parse().expect("a way")).expect("memory");
    compressor.write_all(plain).expect("frames");
    let mut stream = compressor.into_inner().expect("memory");
    let (head, payload) = stream[BEGIN..].split_at_mut(16);
    let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
    payload[place % length] ^= damage;
    let check = crc32(&[&head[..12], &payload[..length]]);
    head[12..].copy_from_slice(&check);
    stream
}

/// How many frames and records were read of a stream that has so many bytes decompressed.
fn read(stream: &[u8], size: usize) -> (usize, usize) {
    let Ok(mut reader) = Reader::new(stream) else { return (0, 0) };
    let (mut frames, mut records) = (0, 0);
    while let Ok(Some(frame)) = reader.next_frame() {
        frames += 1;
        match frame {
            Frame::Symbols(symbols) => drop(symbols.map(|it| it.name.len()).collect::<Vec<_>>()),
            Frame::Tracers(list) => assert!(list.count() < size),
            Frame::Values(list) => {
                for values in list {
                    let Some(format) = values.format().expect("verified") else { continue };
                    // Of too few words, of too many, and none could be read.
                    let words = vec![u64::MAX / 3; format.words().min(300)];
                    let shown = show_values(&format.values, 0, &words).count();
                    assert_eq!(shown, format.values.len());
                    let read = show_values(&format.values, u64::MAX, &words);
                    assert!(read.filter(|(_, shown)| shown.is_some()).count() == 0);
                }
            }
            Frame::Tasks(tasks) => assert!(tasks.count() < size),
            Frame::Records(batch) => {
                assert_eq!(batch.records().count(), batch.count as usize);
                records += batch.records().count();
                for record in batch.records() {
                    if let Record::Entry { values: Some(values), .. } = record {
                        assert!(values.words.len() <= 251);
                    }
                }
            }
            _ => {}
        }
    }
    assert!(records * 16 <= size);
    (frames, records)
}

pub(crate) fn run(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else { return };
    let mut stream = if choice & 1 == 1 { sealed(rest) } else { rest.to_vec() };
    let (size, found) = (stream.len(), read(&stream, stream.len()));
    if choice & 3 == 3 {
        assert_eq!(read(&packed(&stream, 0, 0), size), found);
        let [damage, place @ ..] = rest.first_chunk().copied().unwrap_or([1, 2, 3]);
        stream = packed(&stream, damage, u16::from_le_bytes(place).into());
        // What was damaged may say that it is longer.
        read(&stream, size + (1 << 20));
    }
    // All the way to text, in pieces.
    let mut player = Player::new(Text::new(std::io::sink()));
    let size = usize::from(choice >> 1) + 1;
    let _refused = stream.chunks(size).try_for_each(|piece| player.push(piece));
    let _torn = player.finish();
    let mut player = Player::new(Graph::new(std::io::sink()));
    let _refused = player.push(&stream);
    let _torn = player.finish();
    let mut player = Player::new(Json::new(std::io::sink()));
    let _refused = player.push(&stream);
    let _torn = player.finish();
    // One thread and two show the same, and find the same wrong.
    assert_eq!(
        json(|player| player.play(&mut &*stream)),
        json(|player| player.play_file(&mut &*stream))
    );
}

/// What a player shows, and what it says is wrong.
fn json(
    play: impl FnOnce(&mut Player<Json<&mut Vec<u8>>>) -> Result<(), PlayError>,
) -> (Vec<u8>, Option<String>) {
    let mut out = Vec::new();
    let played = play(&mut Player::new(Json::new(&mut out)));
    (out, played.err().map(|error| error.to_string()))
}
