//! The trace stream: the input as it is, or frames of it with check values that fit, so that
//! what lies behind the check is reached.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vmtrace::export::{Graph, Player, Text};
use vmtrace::stream::{Frame, MAGIC, Reader};

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

/// A stream with a good beginning, and frames made of the input: for each a type, flags, a
/// length in units of 8 bytes, and the payload.
fn sealed(mut input: &[u8]) -> Vec<u8> {
    let mut stream = MAGIC.to_vec();
    stream.extend_from_slice(&[1, 0, 0, 0]);
    let check = crc32(&[&stream]);
    stream.extend_from_slice(&check);
    let mut header = Vec::new();
    for field in [1_000_000_000u64, 0, 0xffff_ffff_0000_0000, 0, 2] {
        header.extend_from_slice(&field.to_le_bytes());
    }
    frame(&mut stream, 1, 0, 0, &header);
    let mut sequence = 1;
    while let [kind, flags, units, rest @ ..] = input {
        let mut payload = rest[..rest.len().min(usize::from(*units) * 8)].to_vec();
        input = &rest[payload.len()..];
        payload.resize(payload.len().next_multiple_of(8), 0);
        frame(&mut stream, kind % 12, flags & 3, sequence, &payload);
        sequence += u32::from(flags & 1 == 0);
    }
    stream
}

fn read(stream: &[u8]) {
    let Ok(mut reader) = Reader::new(stream) else { return };
    let mut records = 0;
    while let Ok(Some(frame)) = reader.next_frame() {
        match frame {
            Frame::Symbols(symbols) => drop(symbols.map(|it| it.name.len()).collect::<Vec<_>>()),
            Frame::Tracers(list) => assert!(list.count() < stream.len()),
            Frame::Tasks(tasks) => assert!(tasks.count() < stream.len()),
            Frame::Records(batch) => {
                assert_eq!(batch.records().count(), batch.count as usize);
                records += batch.records().count();
            }
            _ => {}
        }
    }
    assert!(records * 16 <= stream.len());
}

fuzz_target!(|input: &[u8]| {
    let Some((&choice, rest)) = input.split_first() else { return };
    let stream = if choice & 1 == 1 { sealed(rest) } else { rest.to_vec() };
    read(&stream);
    // All the way to text, in pieces.
    let mut player = Player::new(Text::new(std::io::sink()));
    let size = usize::from(choice >> 1) + 1;
    let _refused = stream.chunks(size).try_for_each(|piece| player.push(piece));
    let _torn = player.finish();
    let mut player = Player::new(Graph::new(std::io::sink()));
    let _refused = player.push(&stream);
    let _torn = player.finish();
});
