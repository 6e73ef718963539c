use proptest::prelude::*;

use super::*;

fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).unwrap();
    bytes
}

fn decoded(bytes: &[u8]) -> Result<Vec<Frame>, ProtocolError> {
    let mut decoder = Decoder::new();
    decoder.push(bytes);
    std::iter::from_fn(|| decoder.frame().transpose()).collect()
}

/// These bytes are what other versions of either side send.
#[test]
fn the_bytes_of_version_1() {
    let hello = Hello { versions: (1, 3), software: "a 0.1".to_owned() };
    assert_eq!(hello.encode(), b"VMTAGENT\x01\x00\x03\x00\x05a 0.1");
    let run = Run {
        command: Command::Program(vec![b"ls".to_vec(), b"/".to_vec()]),
        directory: b"/x".to_vec(),
        environment: vec![b"A=b".to_vec()],
    };
    let frame = Frame::Request(Request::Run(run));
    let bytes = b"\x1d\0\0\0\x01\x00\x02\0\x02\0\0\0ls\x01\0\0\0/\x02\0\0\0/x\x01\0\x03\0\0\0A=b";
    assert_eq!(encoded(&frame), bytes);
    assert_eq!(encoded(&Frame::Data(Stream::Stderr, b"ab".to_vec())), b"\x03\0\0\0\x10\x02ab");
    assert_eq!(encoded(&Frame::Credit(Stream::Stdin, 258)), b"\x05\0\0\0\x11\x00\x02\x01\0\0");
    assert_eq!(encoded(&Frame::Exited(Exit::Signal(9))), b"\x02\0\0\0\x20\x01\x09");
    assert_eq!(encoded(&Frame::Done), b"\0\0\0\0\x24");
}

#[test]
fn versions_are_negotiated() {
    let hello = |low, high| Hello { versions: (low, high), software: "x".to_owned() };
    assert_eq!(hello(1, 3).common(&hello(2, 9)), Some(3));
    assert_eq!(hello(2, 9).common(&hello(1, 3)), Some(3));
    assert_eq!(hello(1, 1).common(&hello(2, 9)), None);
    assert_eq!(hello(5, 2).common(&hello(1, 9)), None, "an empty range");
    assert_eq!(hello(1, 1).to_string(), "x (agent protocol 1)");
    assert_eq!(hello(1, 3).to_string(), "x (agent protocol 1 to 3)");
}

#[test]
fn hellos_that_are_none() {
    assert_eq!(Hello::decode(b"VMTA"), Ok(None));
    assert!(Hello::decode(b"VMTX").is_err(), "at the first byte that is wrong");
    let (hello, length) = Hello::decode(b"VMTAGENT\x01\0\x01\0\x03a\x1b\xffmore").unwrap().unwrap();
    assert_eq!((hello.software.as_str(), length), ("a\u{fffd}\u{fffd}", 16));
    let long = Hello { versions: VERSIONS, software: "ä".repeat(200) };
    let (short, length) = Hello::decode(&long.encode()).unwrap().unwrap();
    assert_eq!((short.software.len(), length), (254, 8 + 5 + 254));
}

#[test]
fn what_is_too_long_is_refused() {
    assert!(decoded(&[0x01, 0, 4, 0, 1]).is_err(), "256 KiB and 1: before any of it has come");
    assert_eq!(decoded(&[0x00, 0, 4, 0, 1]), Ok(vec![]));
    let list = |length| Frame::Request(Request::List(vec![b'x'; length]));
    let mut bytes = b"before".to_vec();
    assert!(list(PAYLOAD_MAX).encode(&mut bytes).is_err());
    assert_eq!(bytes, b"before");
    assert_eq!(decoded(&encoded(&list(PAYLOAD_MAX - 4))), Ok(vec![list(PAYLOAD_MAX - 4)]));
    let data = |length| Frame::Data(Stream::Stdin, vec![0; length]);
    assert!(data(DATA_MAX + 1).encode(&mut bytes).is_err());
    assert_eq!(encoded(&data(DATA_MAX)).len(), 32 << 10);
}

#[test]
fn frames_that_are_none() {
    for (frame, why) in [
        (&b"\0\0\0\0\x63"[..], "kind"),
        (b"\x01\0\0\0\x12\x03", "stream"),
        (b"\x02\0\0\0\x12\x00\x00", "too long"),
        (b"\x00\0\0\0\x12", "too short"),
        (b"\x02\0\0\0\x20\x01\x00", "signal 0"),
        (b"\x02\0\0\0\x20\x02\x00", "no such end"),
        (b"\x04\0\0\0\x03\xff\xff\xff\xff", "a field longer than the frame"),
        (b"\x03\0\0\0\x01\x00\xff\xff", "65,535 words that are not there"),
        (b"\x01\0\0\0\x01\x02", "command"),
    ] {
        assert!(decoded(frame).is_err(), "{why}");
    }
    // A reason that a later agent may have.
    let failed = Frame::Failed(Failure { reason: Reason::Other, text: "x\u{fffd}".to_owned() });
    assert_eq!(decoded(b"\x07\0\0\0\x21\xee\x02\0\0\0x\x07"), Ok(vec![failed]));
}

#[test]
fn modules_as_the_kernel_prints_them() {
    let line = "vsock 61440 2 vmw_vsock_virtio_transport,vmw_vsock_virtio_transport_common, Live \
                0xffffffffc0400000 (E)";
    let users = ["vmw_vsock_virtio_transport", "vmw_vsock_virtio_transport_common"];
    let module = LoadedModule {
        name: "vsock".to_owned(),
        size: 61440,
        address: 0xffff_ffff_c040_0000,
        state: "Live".to_owned(),
        users: users.map(str::to_owned).to_vec(),
    };
    assert_eq!(LoadedModule::parse(line), Some(module));
    let own = LoadedModule::parse("x 1 0 [permanent], Loading 0x0000000000000000").unwrap();
    assert_eq!((own.users.len(), own.address, own.state.as_str()), (0, 0, "Loading"));
    assert_eq!(LoadedModule::parse("x 1 - - Live 0x10").unwrap().address, 16);
    for line in ["", "x", "x y 0 - Live 0x0", "x 1 0 - Live", "x 1 0 - Live 10"] {
        assert_eq!(LoadedModule::parse(line), None, "{line}");
    }
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..20)
}

fn stream() -> impl Strategy<Value = Stream> {
    prop::sample::select(vec![Stream::Stdin, Stream::Stdout, Stream::Stderr])
}

fn frame() -> impl Strategy<Value = Frame> {
    let list = || prop::collection::vec(bytes(), 0..4);
    let command = prop_oneof![list().prop_map(Command::Program), bytes().prop_map(Command::Line)];
    let run = (command, bytes(), list()).prop_map(|(command, directory, environment)| Run {
        command,
        directory,
        environment,
    });
    let request = prop_oneof![
        run.prop_map(Request::Run),
        Just(Request::Modules),
        bytes().prop_map(Request::List),
        bytes().prop_map(Request::Fetch),
    ];
    let exit = prop_oneof![any::<u8>().prop_map(Exit::Status), (1..=127_u8).prop_map(Exit::Signal)];
    let text = || "\\PC{0,10}";
    let reason = prop::sample::select(vec![Reason::Other, Reason::Denied, Reason::Busy]);
    let module = (text(), any::<u64>(), any::<u64>(), text(), prop::collection::vec(text(), 0..3))
        .prop_map(|(name, size, address, state, users)| LoadedModule {
            name,
            size,
            address,
            state,
            users,
        });
    prop_oneof![
        request.prop_map(Frame::Request),
        (stream(), bytes()).prop_map(|(stream, bytes)| Frame::Data(stream, bytes)),
        (stream(), any::<u32>()).prop_map(|(stream, bytes)| Frame::Credit(stream, bytes)),
        stream().prop_map(Frame::End),
        stream().prop_map(Frame::Stop),
        any::<u8>().prop_map(Frame::Signal),
        exit.prop_map(Frame::Exited),
        (reason, text()).prop_map(|(reason, text)| Frame::Failed(Failure { reason, text })),
        (any::<u32>(), any::<u64>(), bytes()).prop_map(|(mode, size, name)| Frame::Entry(Entry {
            mode,
            size,
            name
        })),
        module.prop_map(Frame::Module),
        Just(Frame::Done),
    ]
}

proptest! {
    #[test]
    fn frames_survive_in_pieces_of_any_size(
        frames in prop::collection::vec(frame(), 0..6),
        size in 1..40_usize,
    ) {
        let bytes: Vec<u8> = frames.iter().flat_map(encoded).collect();
        let mut decoder = Decoder::new();
        let mut out = Vec::new();
        for piece in bytes.chunks(size) {
            decoder.push(piece);
            while let Some(frame) = decoder.frame().unwrap() {
                out.push(frame);
            }
        }
        prop_assert_eq!(out, frames);
    }

    /// Whatever comes: no panic, and what was understood says the same when it is sent again.
    #[test]
    fn any_bytes(
        kind in prop::sample::select(vec![1_u8, 3, 4, 16, 17, 18, 19, 20, 32, 33, 34, 35, 36, 99]),
        payload in prop::collection::vec(prop_oneof![Just(0), 0..6_u8, any::<u8>()], 0..60),
    ) {
        let length = u32::try_from(payload.len()).unwrap();
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.extend(&payload);
        if let Ok(frames) = decoded(&bytes) {
            prop_assert_eq!(frames.len(), 1);
            let again: Vec<u8> = frames.iter().flat_map(encoded).collect();
            prop_assert_eq!(decoded(&again), Ok(frames));
        }
    }

    #[test]
    fn any_first_bytes(mut bytes in bytes(), magic in any::<bool>()) {
        if magic {
            bytes.splice(..0, b"VMTAGENT".iter().copied());
        }
        if let Ok(Some((hello, length))) = Hello::decode(&bytes) {
            prop_assert!(length <= bytes.len());
            prop_assert!(!hello.software.chars().any(char::is_control));
        }
    }
}
