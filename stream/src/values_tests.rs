//! Decoded values, and invalid ones that are refused.

use proptest::collection::vec;
use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::check::Check;
use super::wire::{FrameHead, ListHead, kind};
use super::*;

fn shape() -> impl Strategy<Value = Shape> {
    let bytes = || prop::sample::select(vec![1u8, 2, 4, 8]);
    let names = vec((any::<i64>(), ".{0,9}"), 0..4).prop_map(|names| {
        names.into_iter().map(|(number, name)| (i128::from(number) * 2, name.into())).collect()
    });
    prop_oneof![
        bytes().prop_map(|bytes| Shape::Signed { bytes }),
        bytes().prop_map(|bytes| Shape::Unsigned { bytes }),
        bytes().prop_map(|bytes| Shape::Bool { bytes }),
        Just(Shape::Char),
        (bytes(), any::<bool>(), names).prop_map(
            |(bytes, signed, names): (_, _, Vec<(i128, _)>)| {
                // Numbers that some type of the format has.
                let limit = |(number, name): (i128, _)| {
                    (number.clamp(i64::MIN.into(), u64::MAX.into()), name)
                };
                Shape::Enum { bytes, signed, names: names.into_iter().map(limit).collect() }
            }
        ),
        Just(Shape::Pointer),
        (1..200u16).prop_map(|bytes| Shape::Text { bytes }),
        (0..32u8, 1..=32u8, any::<bool>()).prop_map(|(shift, width, signed)| Shape::Bits {
            shift,
            width,
            signed
        }),
        (1..=64u8).prop_map(|bytes| Shape::Raw { bytes }),
        (1..=64u16).prop_map(|count| Shape::Words { bytes: 8 * count }),
        ("later.{0,5}", prop::option::of(any::<u64>()))
            .prop_map(|(kind, bytes)| Shape::Unknown { kind: kind.into(), bytes }),
    ]
}

/// A format that can be.
pub(super) fn format() -> impl Strategy<Value = ValuesFormat> {
    let field = || (".{0,9}", shape()).prop_map(|(name, shape)| ValueField { name, shape });
    let small = |field: &ValueField| match field.shape {
        Shape::Text { bytes } => bytes <= 8,
        Shape::Raw { bytes } => bytes <= 8,
        _ => field.shape.words() == 1,
    };
    let returned = field().prop_filter("a return has 8 bytes", small);
    prop_oneof![
        vec(field(), 0..6).prop_map(|values| (ValuesOf::Entry, values)),
        returned.prop_map(|value| (ValuesOf::Return, vec![value])),
    ]
    .prop_flat_map(|(of, values)| (Just((of, values)), 0..3u32, 0..2u8))
    .prop_map(|((of, values), function, tracer)| ValuesFormat {
        function,
        tracer,
        of,
        values,
        print: None,
    })
}

#[test]
fn values_are_what_was_recorded() {
    let [format, ret] = sample::formats();
    let shown: Vec<_> = show_values(&format.values, sample::FAILED, &sample::WORDS).collect();
    let expected = [
        ("file", Some(Shown::Pointer(0xffff_8881_0000_1000))),
        ("count", Some(Shown::Unsigned(0x340))),
        ("count", Some(Shown::Signed(-2))),
        ("now", Some(Shown::Bool(true))),
        ("sep", Some(Shown::Char(b','))),
        ("mode", Some(Shown::Name("NOTHING"))),
        ("how", Some(Shown::Signed(4))),
        ("name", Some(Shown::Text(b"a\"\\\n\xc3\xa4\xff\x85\x1bb".to_vec()))),
        ("flags", Some(Shown::Signed(-2))),
        ("id", Some(Shown::Raw(vec![1, 2, 3]))),
        ("uuid", Some(Shown::Raw((0..10).collect()))),
        ("far", None),
        ("later", Some(Shown::Raw([&[1], &[0; 7][..], &[2], &[0; 7]].concat()))),
        ("end\x1b", Some(Shown::Unsigned(0xff))),
    ];
    assert_eq!(shown, expected);
    // The record was cut in the middle of the text.
    let known = show_values(&format.values, 1, &sample::WORDS[..8]).map(|(_, shown)| shown);
    let known: Vec<_> = known.map(|shown| shown.is_some()).collect();
    assert_eq!((known[0], &known[1..7], &known[7..]), (false, &[true; 6][..], &[false; 7][..]));
    let shown = ret.values[0].shape.show(&[0xdead_beef_ffff_ffea]);
    assert_eq!(shown, Shown::Signed(-22));
    let top = Shape::Enum { bytes: 8, signed: false, names: vec![(1 << 63, "TOP".into())] };
    assert_eq!(top.show(&[1 << 63]), Shown::Name("TOP"));
    assert_eq!(top.show(&[u64::MAX]), Shown::Unsigned(u64::MAX));
    let all = Shape::Bits { shift: 0, width: 64, signed: true };
    assert_eq!(all.show(&[u64::MAX]), Shown::Signed(-1));
    assert_eq!(
        Shape::Text { bytes: 3 }.show(&[u64::from_le_bytes(*b"abcdefgh")]),
        Shown::Text(b"abc".to_vec())
    );
    let signs = 0xffff_ffff_8000_8080;
    assert_eq!(Shape::Signed { bytes: 4 }.show(&[signs]), Shown::Signed(-0x7fff_7f80));
    assert_eq!(Shape::Unsigned { bytes: 4 }.show(&[signs]), Shown::Unsigned(0x8000_8080));
    assert_eq!(Shape::Bool { bytes: 4 }.show(&[1 << 31]), Shown::Bool(true));
    assert_eq!(Shape::Bool { bytes: 4 }.show(&[1 << 32]), Shown::Bool(false));
    // Nobody shall need to look whether all words are there.
    assert_eq!(Shape::Raw { bytes: 9 }.show(&[]), Shown::Raw(vec![0; 9]));
    assert_eq!(Shape::Words { bytes: 16 }.show(&[7]), Shown::Words(vec![7, 0]));
    assert_eq!(Shape::Words { bytes: 8 }.show(&[7, 8]), Shown::Words(vec![7]));
}

fn raw(of: u8, text: &[u8]) -> Result<Option<ValuesFormat>, String> {
    RawValues { function: 1, tracer: 2, of, text }.format()
}

#[test]
fn texts_that_are_no_formats_are_refused() {
    let refused = [
        "",
        "{}",
        r#"{"values":{}}"#,
        r#"{"values":[]} x"#,
        r#"{"values":[{"name":"a"}]}"#,
        r#"{"values":[{"type":"char"}]}"#,
        r#"{"values":[{"name":"a","type":"signed"}]}"#,
        r#"{"values":[{"name":"a","type":"signed","bytes":3}]}"#,
        r#"{"values":[{"name":"a","type":"signed","bytes":-1}]}"#,
        r#"{"values":[{"name":"a","type":"bits","shift":60,"width":5}]}"#,
        r#"{"values":[{"name":"a","type":"bits","shift":0,"width":0}]}"#,
        r#"{"values":[{"name":"a","type":"text","bytes":2001}]}"#,
        r#"{"values":[{"name":"a","type":"raw","bytes":0}]}"#,
        r#"{"values":[{"name":"a","type":"words","bytes":0}]}"#,
        r#"{"values":[{"name":"a","type":"words","bytes":12}]}"#,
        r#"{"values":[{"name":"a","type":"words","bytes":520}]}"#,
        r#"{"values":[{"name":"a","type":"enum","bytes":4,"names":[[18446744073709551616,"a"]]}]}"#,
        "{\"values\":[{\"name\":\"\u{0}\",\"type\":\"char\"}]}",
    ];
    for text in refused {
        assert!(raw(0, text.as_bytes()).is_err(), "{text}");
    }
    assert!(raw(0, b"{\"values\":[{\"name\":\"\xff\",\"type\":\"char\"}]}").is_err());
    let repeat = |text: &str, count| format!("{{\"values\":[{}]}}", vec![text; count].join(","));
    let one = r#"{"name":"a","type":"char"}"#;
    assert!(raw(0, repeat(one, MAX_VALUES).as_bytes()).is_ok());
    assert!(raw(0, repeat(one, MAX_VALUES + 1).as_bytes()).is_err());
    let long = r#"{"name":"a","type":"text","bytes":2000}"#;
    assert!(raw(0, repeat(long, 1).as_bytes()).is_ok());
    assert!(raw(0, repeat(long, 2).as_bytes()).is_err());
    assert!(raw(1, repeat(one, 1).as_bytes()).is_ok());
    assert!(raw(1, repeat(one, 2).as_bytes()).is_err());
    assert!(raw(1, repeat(long, 1).as_bytes()).is_err());
    assert!(raw(1, repeat(r#"{"name":"a","type":"later","bytes":16}"#, 1).as_bytes()).is_err());
    let spaces = [repeat(one, 1).as_bytes(), &vec![b' '; MAX_VALUES_TEXT]].concat();
    assert!(raw(0, &spaces[..MAX_VALUES_TEXT]).is_ok());
    assert!(raw(0, &spaces[..=MAX_VALUES_TEXT]).is_err());
    let event = raw(2, repeat(one, 2).as_bytes()).expect("a format");
    assert_eq!(event.map(|format| format.of), Some(ValuesOf::Event));
    // Nothing is known of what a later version describes.
    assert_eq!(raw(3, b"anything"), Ok(None));
}

// A writer's mistake must not become a stream that no reader takes.
#[test]
fn a_writer_refuses_what_readers_would() {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    let [format, mut ret] = sample::formats();
    ret.values.clear();
    assert!(writer.values(&ret).is_err());
    let mut wide = format.clone();
    wide.values = vec![ValueField { name: String::new(), shape: Shape::Signed { bytes: 16 } }];
    assert!(writer.values(&wide).is_err());
    let around = r#"{"values":[{"name":"","type":"char"}]}"#.len();
    for (length, taken) in [(MAX_VALUES_TEXT - around, true), (MAX_VALUES_TEXT - around + 1, false)]
    {
        wide.values[0] = ValueField { name: "x".repeat(length), shape: Shape::Char };
        assert_eq!(writer.values(&wide).is_ok(), taken, "{length}");
    }
    let unknown = RawValues { function: 0, tracer: 0, of: 0, text: b"{}" };
    assert!(writer.raw_values(unknown).is_err());
    writer.flush().expect("memory");
    let begin = writer.get_mut().len();
    writer.values(&format).expect("room");
    writer.values(&format).expect("room");
    writer.flush().expect("memory");
    let bytes = writer.get_mut()[begin..].to_vec();
    assert_eq!(frame_spans(&bytes).count(), 1, "what is known is left out");
}

#[test]
fn types_of_later_versions_are_raw() {
    let text = br#"{"new":1,"values":[
        {"name":"a","type":"float","bytes":16,"names":{"x":[]}},
        {"name":"b","type":"complex","bytes":"many"},
        {"name":"c","type":"char","more":true}]}"#;
    let format = raw(0, text).expect("a format").expect("of entries");
    assert_eq!(format.words(), 4);
    let shown: Vec<_> = show_values(&format.values, 0, &[1, 2, 3, 0x141]).collect();
    let bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let expected = [
        ("a", Some(Shown::Raw(bytes(&[1, 2])))),
        ("b", Some(Shown::Raw(bytes(&[3])))),
        ("c", Some(Shown::Char(b'A'))),
    ];
    assert_eq!(shown, expected);
    let endless = Shape::Unknown { kind: "later".into(), bytes: Some(u64::MAX) };
    assert_eq!(endless.show(&[7]), Shown::Raw(bytes(&[7])));
    // Who passes it on loses nothing of it.
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    let values = RawValues { function: 1, tracer: 2, of: 0, text };
    writer.raw_values(values).expect("room");
    assert_eq!(writer.names().values().collect::<Vec<_>>(), [values]);
    let later = RawValues { of: 9, ..values };
    writer.raw_values(later).expect("room");
    let joined = writer.join().expect("memory");
    let mut reader = Reader::new(&*joined).expect("a stream");
    let Some(Frame::Join(_)) = reader.next_frame().expect("whole") else { panic!("a join") };
    let Some(Frame::Values(list)) = reader.next_frame().expect("whole") else { panic!("values") };
    assert_eq!(list.collect::<Vec<_>>(), [values, later]);
}

// A hostile stream must not fill the memory of those who read it.
#[test]
fn readers_refuse_more_formats_than_there_may_be() {
    let text = vec![b' '; MAX_VALUES_TEXT];
    let (mut check, mut sequence) = (Check::default(), 0u32);
    let mut take = |function, text: &[u8]| {
        let mut payload = ListHead { count: 1.into(), reserved: 0.into() }.as_bytes().to_vec();
        RawValues { function, tracer: 0, of: 0, text }.encode(&mut payload);
        let frame = Frame::parse(kind::VALUES, 0, &payload).expect("a list");
        let head = FrameHead {
            kind: kind::VALUES.into(),
            flags: 0.into(),
            length: 0.into(),
            sequence: sequence.into(),
            check: 0.into(),
        };
        sequence += 1;
        check.frame(&head, &frame)
    };
    let most = u32::try_from(MAX_FORMATS_TEXT / MAX_VALUES_TEXT).expect("small");
    (0..most).for_each(|function| take(function, &text).expect("room"));
    // In the place of one of the same length.
    take(0, &text).expect("room");
    let error = take(most, &text).expect_err("full");
    assert!(error.starts_with("more formats of values than a stream may have"), "{error}");
    (0..most).for_each(|function| take(function, b"").expect("room"));
    let all = u32::try_from(MAX_FORMATS).expect("small");
    (most..all).for_each(|function| take(function, b"").expect("room"));
    assert!(take(all, b"").is_err());
}

#[test]
fn writers_refuse_more_formats_than_there_may_be() {
    let mut names = Dictionaries::new();
    let text = vec![b' '; MAX_VALUES_TEXT];
    let mut insert =
        |function, text: &[u8]| names.insert_values(RawValues { function, tracer: 0, of: 0, text });
    let most = u32::try_from(MAX_FORMATS_TEXT / MAX_VALUES_TEXT).expect("small");
    (0..most).for_each(|function| assert_eq!(insert(function, &text), Ok(true)));
    assert_eq!(insert(0, &text), Ok(false));
    assert_eq!(insert(most, &text), Err(FormatsFull));
    assert_eq!(insert(0, b""), Ok(true));
    assert_eq!(insert(most, &text), Ok(true));
}

#[test]
fn names_that_repeat_are_numbered() {
    let names = ["a", "b", "a", "a#2", "a", ""].map(str::to_owned);
    let mut fields = names.map(|name| ValueField { name, shape: Shape::Char });
    number_repeated(&mut fields);
    let names: Vec<_> = fields.iter().map(|field| &*field.name).collect();
    assert_eq!(names, ["a", "b", "a#2", "a#2#2", "a#3", ""]);
}

// The longest record there is: its size is one byte.
#[test]
fn words_that_do_not_fit_are_left_out() {
    let mut buffer = RecordBuffer::new();
    let entry = EntryRecord::new(5, 1, 2, 3).of_tracer(4);
    for _ in 0..300 {
        buffer.push_values(entry, Some(6), 7, 0..10_000);
    }
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    writer.records(0, &buffer).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let bytes = writer.into_inner().expect("memory");
    let (mut reader, mut records) = (Reader::new(&*bytes).expect("a stream"), 0);
    let mut frames = 0;
    while let Some(frame) = reader.next_frame().expect("whole") {
        let Frame::Records(batch) = frame else { continue };
        frames += 1;
        for (record, bytes) in batch.whole_records() {
            assert_eq!((bytes.len(), record.head().tracer), (255 * 8, 4));
            let Record::Entry { sp: Some(6), values: Some(values), .. } = record else {
                panic!("an entry with values");
            };
            assert_eq!((values.failed, values.words.len()), (7, MAX_VALUE_WORDS));
            assert!(values.words.iter().map(|word| word.get()).eq(0..250));
            records += 1;
        }
        assert!(batch.entries().is_none());
    }
    assert_eq!((records, frames), (300, 4));
}

#[test]
fn records_with_values_are_passed_on_as_they_are() {
    let mut buffer = RecordBuffer::new();
    buffer.push_values(EntryRecord::new(5, 1, 2, 3), None, 7, [8, 9]);
    let mut again = RecordBuffer::new();
    assert!(again.push_whole(buffer.as_bytes()));
    assert_eq!(again.as_bytes(), buffer.as_bytes());
    // It says that values follow: at least what failed must.
    let mut cut = buffer.as_bytes()[..24].to_vec();
    cut[9] = 3;
    assert!(!again.push_whole(&cut));
    assert!(Batch::new(0, 0, 1, &cut).entries().is_none());
}
