//! The protocol between the emulated host and the outer vmtrace, in both directions.

pub(crate) fn run(input: &[u8]) {
    let Some((&piece, bytes)) = input.split_first() else { return };
    vmtrace::emulated::exercise_wire(bytes, usize::from(piece) + 1);
    // Frames with a head that fits: for each a kind, a stream, a length, and the payload.
    let (mut rest, mut stream) = (bytes, Vec::new());
    while let [kind, number, length, more @ ..] = rest {
        let (payload, more) = more.split_at(more.len().min(usize::from(*length)));
        stream.extend(u32::try_from(payload.len()).expect("small").to_le_bytes());
        stream.extend([*number, 0, 0, number & 0x80, kind % 15, 0, 0, 0]);
        stream.extend(payload);
        rest = more;
    }
    vmtrace::emulated::exercise_wire(&stream, usize::from(piece) + 1);
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let frame = |kind: u8, payload: &str| {
        let length = u8::try_from(payload.len()).expect("short");
        [&[40, kind, 1, length][..], payload.as_bytes()].concat()
    };
    vec![
        frame(0, r#"{"protocol":3,"release":"6.12","kvm_error":null,"notes":["a"],"source":"0"}"#),
        frame(
            1,
            r#"{"program":null,"args":["boot"],"env":{"A":"b"},"stdin":1,"stdout":2,"stderr":3,"outputs":[["/o",4]]}"#,
        ),
        frame(3, r#"{"code":1}"#),
        frame(3, r#"{"signal":9}"#),
        frame(5, "\0\u{1}\0\0"),
        frame(8, r#"{"path":"/x","mode":420}"#),
        frame(11, r#"{"path":"/x","input":5,"output":6}"#),
        frame(12, r#"{"path":"/x"}"#),
        frame(13, r#"{"input":5,"output":6}"#),
    ]
}
