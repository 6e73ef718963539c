//! Arguments and returned values in every format.

use std::fmt::Write;

use crate::stream::{
    EntryRecord, RecordBuffer, ReturnRecord, Shape, Summary, Symbol, TailRecord, ValueField,
    ValuesFormat, ValuesOf, Writer, sample,
};

use super::{Export, Graph, Json, Player, Text};

fn play<E: Export>(stream: &[u8], step: usize, mut player: Player<E>) -> E {
    stream.chunks(step).for_each(|piece| player.push(piece).expect("a stream"));
    player.finish().expect("whole");
    player.into_export()
}

fn lines(text: &[u8], skip: usize) -> String {
    let text = std::str::from_utf8(text).expect("UTF-8");
    text.lines().skip(skip).fold(String::new(), |mut out, line| {
        writeln!(out, "{line}").expect("memory");
        out
    })
}

/// The arguments of the sample that could be read, or were recorded.
const ALL: &str = r#"(file=0xffff888100001000, count=832, count#2=-2, now=true, sep=',', mode=NOTHING, how=4, name="a\"\\\nä\xff\x85\x1bb", flags=-2, id=0x30201, uuid=00010203040506070809, far=?, later=01000000000000000200000000000000, end?=255)"#;
const NONE: &str = "(file=?, count=?, count#2=?, now=?, sep=?, mode=?, how=?, name=?, flags=?, id=?, uuid=?, far=?, later=?, end?=?)";
const SOME: &str = "(file=?, count=832, count#2=-2, now=true, sep=',', mode=NOTHING, how=4, name=?, flags=?, id=?, uuid=?, far=?, later=?, end?=?)";

#[test]
fn text_has_arguments_as_func_args_does() {
    let expected = format!(
        "\
\x20          <...>-7       [000]      0.000010: vfs_read{NONE} <-ksys_read
           <...>-7       [000]      0.000020: vfs_read{ALL} <-ksys_read
# returns are not printed in this form: see --format graph
           <...>-7       [000]      0.000040: 0xffffffffc0100000 <-ksys_read
           <...>-7       [000]      0.000050: vfs_read <-ksys_read
           <...>-7       [000]      0.000060: vfs_read{SOME} <-ksys_read
"
    );
    for step in [1, 7, 1 << 20] {
        let text = play(&sample::values(), step, Player::new(Text::new(Vec::new())));
        assert_eq!(lines(&text.into_inner(), 6), expected);
    }
}

#[test]
fn calls_have_arguments_and_values() {
    let text = play(&sample::values(), 1 << 20, Player::new(Graph::new(Vec::new())));
    let expected = format!(
        "\
\x200)               |  vfs_read{NONE};
 0)   10.000 us   |  vfs_read{ALL}; /* = -22 */
 0)               |  0xffffffffc0100000();
 0)               |  vfs_read();
 0)   10.000 us   |  vfs_read{SOME}; /* = false */
"
    );
    assert_eq!(lines(&text.into_inner(), 6), expected);
}

#[test]
fn json_has_arguments_in_their_order() {
    let mut out = Vec::new();
    play(&sample::values(), 1 << 20, Player::new(Json::new(&mut out)));
    let text = lines(&out, 1);
    let lines: Vec<_> = text.lines().collect();
    let null = r#"{"file":null,"count":null,"count#2":null,"now":null,"sep":null,"mode":null,"how":null,"name":null,"flags":null,"id":null,"uuid":null,"far":null,"later":null,"end?":null}"#;
    let all = r#"{"file":"0xffff888100001000","count":832,"count#2":-2,"now":true,"sep":",","mode":"NOTHING","how":4,"name":"a\"\\\nä��\u001bb","flags":-2,"id":"0x30201","uuid":"00010203040506070809","far":null,"later":"01000000000000000200000000000000","end?":255}"#;
    assert!(lines[0].ends_with(&format!(r#""caller":"ksys_read","args":{null}}}"#)), "{text}");
    assert!(lines[1].ends_with(&format!(r#""depth":0,"args":{all}}}"#)), "{text}");
    assert!(lines[2].ends_with(r#""duration_ns":10000,"value":-22}"#), "{text}");
    assert!(
        lines[3].ends_with(r#""function":"0xffffffffc0100000","caller":"ksys_read"}"#),
        "{text}"
    );
    assert!(lines[4].ends_with(r#""function":"vfs_read","caller":"ksys_read"}"#), "{text}");
    assert!(lines[6].ends_with(r#""value":false}"#), "{text}");
}

const READ: u32 = 0x8110_0000;
const LOCK: u32 = 0x8110_0040;
const STACK: u64 = 0xffff_c900_0000_1000;

fn begin() -> Writer<Vec<u8>> {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    let symbol = |function, name| Symbol::new(sample::header().address(function), 64, name);
    writer.symbols([symbol(READ, "read"), symbol(LOCK, "lock")]).expect("room");
    writer
}

fn end(mut writer: Writer<Vec<u8>>) -> Vec<u8> {
    writer.end(&Summary::default()).expect("memory");
    writer.into_inner().expect("memory")
}

fn format(function: u32, of: ValuesOf, shape: Shape) -> ValuesFormat {
    let values = vec![ValueField { name: "a".into(), shape }];
    ValuesFormat { function, tracer: 0, of, values, print: None }
}

fn entry(at: u64, function: u32) -> EntryRecord {
    EntryRecord::new(at * 2_000, function, 0, 1)
}

fn give(at: u64, function: u32, sp: u64, value: u64) -> crate::stream::ReturnValueRecord {
    ReturnRecord::new(at * 2_000, function, 0, 1, sp).with_value(value)
}

fn graph(stream: &[u8]) -> String {
    lines(&play(stream, 1 << 20, Player::new(Graph::new(Vec::new()))).into_inner(), 6)
}

// Where the brace is, and whether its function is named, is not a matter of values.
#[test]
fn braces_have_values() {
    let mut writer = begin();
    let ret = Shape::Enum { bytes: 4, signed: true, names: vec![(-2, "GONE".into())] };
    writer.values(&format(READ, ValuesOf::Return, ret)).expect("room");
    writer.values(&format(LOCK, ValuesOf::Entry, Shape::Char)).expect("room");
    let mut buffer = RecordBuffer::new();
    let low = STACK - 64;
    buffer.push_frame(entry(1, READ).with_sp(STACK));
    buffer.push_values(entry(2, LOCK), Some(low), 0, [0x41]);
    // Nobody knows what this is.
    buffer.push_return_value(give(3, LOCK, low, 0x340));
    buffer.push_return_value(give(4, READ, STACK, 0xffff_fffe));
    buffer.push_frame(entry(5, READ).with_sp(STACK));
    buffer.push_values(entry(6, LOCK), Some(low), 0, [0x42]);
    buffer.push_tail(TailRecord::new(14_000, LOCK, READ, 1, low));
    buffer.push_frame(entry(7, READ).with_sp(low));
    buffer.push_return_value(give(8, READ, low, u64::MAX));
    // Its entry was not seen.
    buffer.push_return_value(give(9, LOCK, STACK + 64, 0xffff_ffea));
    buffer.push_values(entry(10, LOCK), Some(STACK), 1, [0x43]);
    writer.records(0, &buffer).expect("vCPU");
    let expected = "\
\x200)               |  read() {
 0)   1.000 us    |    lock(a='A'); /* = 0x340 */
 0)   3.000 us    |  } /* = GONE */
 0)               |  read() {
 0)               |    lock(a='B') {
 0)   1.000 us    |      read(); /* = -1 */
 0)   2.000 us    |    } /* = -1 */
 0)               |  } /* read, unfinished */
 0)               |  } /* lock = -22 */
 0)               |  lock(a=?); /* unfinished */
";
    let text = graph(&end(writer));
    assert!(text.contains("lock(a='A'); /* = 0x340 */\n"), "{text}");
    assert_eq!(text, expected);
}

// A record that waits keeps the format that it was read with.
#[test]
fn formats_are_for_the_records_that_follow() {
    let mut writer = begin();
    let mut buffer = RecordBuffer::new();
    let round = |writer: &mut Writer<Vec<u8>>, buffer: &mut RecordBuffer, at| {
        buffer.clear();
        buffer.push_values(entry(at, READ), Some(STACK), 0, [0x0141]);
        buffer.push_return_value(give(at + 1, READ, STACK, 0x0141));
        writer.records(0, buffer).expect("vCPU");
    };
    round(&mut writer, &mut buffer, 1);
    let shapes = [Shape::Char, Shape::Unsigned { bytes: 2 }, Shape::Pointer];
    for (at, shape) in (1..).zip(shapes) {
        for of in [ValuesOf::Entry, ValuesOf::Return] {
            writer.values(&format(READ, of, shape.clone())).expect("room");
        }
        round(&mut writer, &mut buffer, at * 10);
    }
    // So often that the old ones are forgotten.
    for number in 0..5_000u64 {
        let shape = Shape::Text { bytes: u16::try_from(number % 8).expect("small") + 1 };
        writer.values(&format(READ, ValuesOf::Entry, shape)).expect("room");
        round(&mut writer, &mut buffer, 100 + number * 10);
    }
    // Of another tracer.
    writer
        .values(&ValuesFormat { tracer: 1, ..format(READ, ValuesOf::Entry, Shape::Char) })
        .expect("room");
    buffer.clear();
    buffer.push_values(entry(100_000, READ), None, 0, [0x41]);
    writer.records(0, &buffer).expect("vCPU");
    let text = graph(&end(writer));
    let calls: Vec<_> = text.lines().map(|line| &line[21..]).collect();
    let expected = [
        "read(); /* = 0x141 */",
        "read(a='A'); /* = 'A' */",
        "read(a=321); /* = 321 */",
        "read(a=0x141); /* = 0x141 */",
    ];
    assert_eq!(calls[..4], expected);
    assert_eq!(calls[4], r#"read(a="A"); /* = 0x141 */"#);
    assert_eq!(calls[5], r#"read(a="A\x01"); /* = 0x141 */"#);
    assert_eq!(calls.len(), 4 + 5_000 + 1);
    assert_eq!(calls[5_004], r#"read(a="A");"#);
}

// Whatever a guest writes into its rings: not more waits than a reader has room for.
#[test]
fn without_watermarks_the_memory_of_values_stays_bounded() {
    let mut writer =
        Writer::new(Player::new(Text::new(std::io::sink())), &sample::header()).expect("header");
    writer.values(&format(READ, ValuesOf::Entry, Shape::Text { bytes: 2000 })).expect("room");
    let mut buffer = RecordBuffer::new();
    for at in 0..200 {
        buffer.clear();
        (0..500).for_each(|_| buffer.push_values(entry(at, READ), None, 0, 0..250));
        writer.records(0, &buffer).expect("no failure");
        writer.flush().expect("no failure");
        assert!(writer.get_mut().held() < 20_000);
    }
    writer.end(&Summary::default()).expect("no failure");
    assert!(writer.into_inner().expect("no failure").disordered() > 0);
}

// What is not asked for leaves nothing behind that the next record would take for its own.
#[test]
fn records_that_are_left_out_take_their_values_along() {
    let mut writer = begin();
    for function in [READ, LOCK] {
        writer.values(&format(function, ValuesOf::Entry, Shape::Char)).expect("room");
    }
    let mut buffer = RecordBuffer::new();
    for number in 0..10 {
        let function = if number % 3 == 0 { LOCK } else { READ };
        let sp = (number % 2 == 0).then_some(STACK);
        buffer.push_values(entry(number, function), sp, 0, [0x30 + number]);
    }
    writer.records(0, &buffer).expect("vCPU");
    let player = Player::new(Text::new(Vec::new())).with_filter(|name, _| name == "lock");
    let text = lines(&play(&end(writer), 1 << 20, player).into_inner(), 6);
    let calls: Vec<_> = text.lines().map(|line| &line[line.len() - 11..]).collect();
    assert_eq!(calls, ["lock(a='0')", "lock(a='3')", "lock(a='6')", "lock(a='9')"]);
}
