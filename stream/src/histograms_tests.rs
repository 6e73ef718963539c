use std::collections::BTreeMap;

use super::counts::{self, Bucket, CountsOf, HistogramOf};
use super::sample::{self, header};
use super::{Frame, Reader, Summary, Symbol, Tracer, Writer};

/// Words by vCPU, tracer, what is sorted, function and number.
type Words = BTreeMap<(u32, u8, HistogramOf, String, u32, u8), u64>;

fn words(stream: &[u8]) -> Words {
    let mut all = Words::new();
    let mut reader = Reader::new(stream).expect("a stream");
    while let Some(frame) = reader.next_frame().expect("whole") {
        let Frame::Counts(counts) = frame else { continue };
        let Some(CountsOf::Sorted(of)) = counts.of else { panic!("{counts:?}") };
        for Bucket { function, bucket, hits } in counts.buckets() {
            let key = (counts.vcpu, counts.tracer, of, counts.name.to_owned(), function, bucket);
            let sum = all.entry(key).or_default();
            *sum = sum.wrapping_add(hits);
        }
    }
    all
}

fn bucket(function: u32, bucket: u8, hits: u64) -> Bucket {
    Bucket { function, bucket, hits }
}

// A word of another vCPU, tracer, argument or function is in no histogram where it belongs, and in one
// where it does not; who joins late must see what the others see.
#[test]
fn words_add_up_and_late_joiners_have_them_all() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    let durations = (HistogramOf::Durations, "");
    let long = "n".repeat(255) + "\u{e4}";
    let mut expected = Words::new();
    let told = [
        ((0, 0), durations, bucket(16, 10, 3)),
        ((0, 0), durations, bucket(16, 10, 4)),
        ((0, 0), durations, bucket(16, Bucket::SUM, u64::MAX)),
        ((0, 0), durations, bucket(16, Bucket::SUM, 2)),
        ((1, 0), durations, bucket(16, 10, 5)),
        ((1, 1), (HistogramOf::Values, ""), bucket(16, 10, 6)),
        ((1, 1), (HistogramOf::Arguments, "count"), bucket(16, Bucket::NEGATIVE, 7)),
        ((1, 1), (HistogramOf::Arguments, "pos"), bucket(32, Bucket::MISSED, 8)),
        ((1, 2), (HistogramOf::Arguments, long.as_str()), bucket(32, 64, 9)),
    ];
    for (of, (what, name), word) in told {
        writer.buckets(of, (what, name), &[word]).expect("vCPU");
        // What does not fit of a name is cut between characters.
        let name = name.chars().filter(char::is_ascii).collect::<String>();
        let sum = expected.entry((of.0, of.1, what, name, word.function, word.bucket)).or_default();
        *sum = sum.wrapping_add(word.hits);
    }
    writer.buckets((0, 0), durations, &[]).expect("vCPU");
    assert!(writer.buckets((2, 0), durations, &[bucket(1, 1, 1)]).is_err(), "no such vCPU");
    let mut joined = writer.join().expect("memory");
    let begin = writer.get_mut().len();
    writer.buckets((0, 0), durations, &[bucket(16, 10, 100)]).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    let bytes = writer.into_inner().expect("memory");
    joined.extend_from_slice(&bytes[begin..]);
    *expected.get_mut(&(0, 0, HistogramOf::Durations, String::new(), 16, 10)).unwrap() += 100;
    assert_eq!(words(&bytes), expected);
    assert_eq!(words(&joined), expected);
}

// The words of a tracer that is gone would be those of the next one of its number.
#[test]
fn late_joiners_have_none_of_what_has_another_name_now() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("header");
    let offset = header().offset(sample::READ).expect("in the window");
    let tracer = |name| Tracer { number: 1, name, description: "" };
    writer.tracer(tracer("one")).expect("memory");
    writer.symbols([Symbol::new(sample::READ, 64, "vfs_read")]).expect("memory");
    let what = (HistogramOf::Durations, "");
    writer.buckets((0, 1), what, &[bucket(offset, 3, 1)]).expect("vCPU");
    writer.buckets((0, 2), what, &[bucket(offset, 4, 1), bucket(5, 4, 1)]).expect("vCPU");
    writer.tracer(tracer("another")).expect("memory");
    let other = Symbol { module: "xfs", ..Symbol::new(sample::READ, 64, "another") };
    writer.symbols([other]).expect("memory");
    let mut joined = writer.join().expect("memory");
    let begin = writer.get_mut().len();
    writer.end(&Summary::default()).expect("memory");
    joined.extend_from_slice(&writer.into_inner().expect("memory")[begin..]);
    let left = (0, 2, HistogramOf::Durations, String::new(), 5, 4);
    assert_eq!(words(&joined), Words::from([(left, 1)]));
}

// A frame that says more than it has must not be read beyond its end.
#[test]
fn what_a_frame_says_of_its_name_is_not_trusted() {
    let mut payload = Vec::new();
    let words = [bucket(1, 2, 3), bucket(1, 4, 5)];
    counts::encode_buckets((1, 2), (HistogramOf::Arguments, "count"), &words, &mut payload);
    assert!(payload.len().is_multiple_of(8));
    let name = |payload: &[u8]| counts::Counts::decode(payload).map(|it| it.name.to_owned());
    assert_eq!(name(&payload).as_deref(), Some("count"));
    for (len, expected) in [(8, Some("count\0\0\0")), (9, None), (u16::MAX, None)] {
        payload[6..8].copy_from_slice(&len.to_le_bytes());
        assert_eq!(name(&payload).as_deref(), expected, "{len}");
    }
    payload[6..8].copy_from_slice(&5_u16.to_le_bytes());
    let end = payload.len() - 8;
    payload[end] = 0xff;
    assert_eq!(name(&payload).as_deref(), Some("?"), "no text");
    payload[5] = 5;
    assert!(counts::Counts::decode(&payload).is_some_and(|it| it.of.is_none()));
}

// Rows with wrong numbers before them.
#[test]
fn buckets_have_lower_ends() {
    let lows: Vec<_> = [0, 1, 2, 11, 64].into_iter().map(Bucket::low).collect();
    assert_eq!(lows, [Some(0), Some(1), Some(2), Some(1024), Some(1 << 63)]);
    assert_eq!(Bucket::low(Bucket::NEGATIVE), Some(i128::from(i64::MIN)));
    assert!([Bucket::SUM, Bucket::MISSED, 68, 255].into_iter().all(|it| Bucket::low(it).is_none()));
}
