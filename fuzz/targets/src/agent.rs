//! The agent's protocol, in both directions, and the agent's lines on the serial port.
use vmtrace::agent::AgentParser;
use vmtrace::agent::protocol::{Decoder, Frame, HEADER, PAYLOAD_MAX};

/// Frames of the input: for each a kind, a length, and the payload.
fn frames(mut input: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let [kind, length, rest @ ..] = input {
        let (payload, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        bytes.extend(u32::try_from(payload.len()).expect("small").to_le_bytes());
        bytes.push(kind % 40);
        bytes.extend(payload);
        input = rest;
    }
    bytes
}

fn read(bytes: &[u8], size: usize, hello: bool) {
    let mut decoder = Decoder::new();
    let mut greeted = !hello;
    for piece in bytes.chunks(size) {
        decoder.push(piece);
        if !greeted {
            match decoder.hello() {
                Ok(Some(_)) => greeted = true,
                Ok(None) => continue,
                Err(_) => return,
            }
        }
        loop {
            match decoder.frame() {
                Ok(Some(frame)) => again(&frame),
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

/// What was understood says the same when it is sent again, unless it has grown: what is not text is replaced, by
/// more bytes.
fn again(frame: &Frame) {
    let mut bytes = Vec::new();
    if frame.encode(&mut bytes).is_ok() {
        assert!(bytes.len() <= HEADER + PAYLOAD_MAX);
        let mut decoder = Decoder::new();
        decoder.push(&bytes);
        assert_eq!(decoder.frame().as_ref(), Ok(&Some(frame.clone())));
    }
}

pub(crate) fn run(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else { return };
    let size = usize::from(choice >> 2) + 1;
    match choice & 3 {
        0 => read(rest, size, true),
        1 => read(&[b"VMTAGENT\x01\0\x01\0\x01x", frames(rest).as_slice()].concat(), size, true),
        2 => read(&frames(rest), size, false),
        _ => {
            let lines = [b"vmtrace-agent 1 ".as_slice(), rest].concat();
            AgentParser::new().extend(&lines).for_each(drop);
        }
    }
}
