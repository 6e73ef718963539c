//! The sample in every format.

use std::io::Write;

use crate::stream::{
    Counted, EntryRecord, Header, LossReason, Mark, Summary, Symbol, Task, Writer, sample,
};

use super::{Event, Export, Json, PlayError, Player, Stats, Text, write_summary};

/// Plays a stream in pieces of `step` bytes.
fn play<E: Export>(stream: &[u8], step: usize, export: E) -> (E, Result<(), PlayError>) {
    let mut player = Player::new(export);
    let pushed = stream.chunks(step).try_for_each(|piece| player.push(piece));
    let finished = player.finish().map(|_| ());
    (player.into_export(), pushed.and(finished))
}

const TEXT: &str = "\
# tracer: function
#
# vmtrace 0.1.0: Linux 6.12.0-test (x86_64), 2 vCPUs, clock x86-tsc at 2000000000 Hz
#
#           TASK-PID     CPU#     TIMESTAMP  FUNCTION
#              | |         |         |         |
#                                    0.000001: pause 0.070 ms: 2 sites
             cat-7       [001]      0.000010: vfs_read <-ksys_read
worker with spac-123456  [000]      0.000020: ext4_open [ext4] <-0xffffffff81100001
           <...>-99      [000]      0.000030: vfs_read <-ksys_read
             cat-7       [001]      0.000030: vfs_read <-ksys_read
CPU:1 [LOST 5 EVENTS]
          <idle>-0       [001]      0.000050: vfs_read <-ksys_read
        re?named-7       [000]      1.500000: ext4_open [ext4]
        re?named-7       [000]      1.500001: 0xffffffffc00fffff <-0xffffffffdeadbeef
";

#[test]
fn text_looks_like_ftrace() {
    for step in [1, 7, 1 << 20] {
        let mut out = Vec::new();
        play(&sample::stream(), step, Text::new(&mut out)).1.expect("whole");
        assert_eq!(String::from_utf8_lossy(&out), TEXT);
    }
}

#[test]
fn live_text_is_the_same() {
    let player = Player::new(Text::new(Vec::new()));
    let mut writer = Writer::new(player, &sample::header()).expect("header");
    sample::fill(&mut writer).expect("memory");
    writer.end(&sample::summary()).expect("memory");
    let player = writer.into_inner().expect("memory");
    assert_eq!(String::from_utf8_lossy(&player.into_export().into_inner()), TEXT);
}

#[test]
fn a_torn_stream_is_printed_as_far_as_it_goes() {
    let stream = sample::stream();
    let whole_lines = TEXT.lines().count();
    let mut lines = 0;
    for end in 0..stream.len() {
        let mut out = Vec::new();
        let played = play(&stream[..end], 64, Text::new(&mut out)).1;
        let error = played.expect_err("torn").to_string();
        assert!(error.starts_with(&format!("torn stream: it stops at byte {end}, ")), "{error}");
        let text = String::from_utf8_lossy(&out);
        let mut all = TEXT.lines();
        assert!(text.lines().all(|line| all.any(|other| other == line)), "{end}: {text}");
        assert!(text.lines().count() >= lines, "{end}: a longer stream prints less");
        lines = text.lines().count();
    }
    assert_eq!(lines, whole_lines, "only the end is missing");
}

#[test]
fn json_has_one_object_per_line() {
    let mut out = Vec::new();
    play(&sample::stream(), 1 << 20, Json::new(&mut out)).1.expect("whole");
    let text = String::from_utf8(out).expect("UTF-8");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(
        lines[0],
        r#"{"event":"header","arch":"x86_64","clock":"x86-tsc","clock_hz":2000000000,"clock_start":1000,"release":"6.12.0-test","vcpus":2,"slide":"0x1000000","vmtrace":"0.1.0"}"#
    );
    assert_eq!(
        lines[1],
        r#"{"event":"mark","ns":1000,"kind":"pause","duration_ns":70000,"text":"2 sites"}"#
    );
    assert_eq!(
        lines[3],
        r#"{"event":"entry","ns":20000,"cpu":0,"pid":123456,"comm":"worker with spac","function":"ext4_open","module":"ext4","caller":"0xffffffff81100001"}"#
    );
    assert_eq!(
        lines[4],
        r#"{"event":"entry","ns":30000,"cpu":0,"pid":99,"comm":null,"function":"vfs_read","caller":"ksys_read"}"#
    );
    assert_eq!(lines[6], r#"{"event":"loss","cpu":1,"count":5,"reason":"ring-full"}"#);
    let end: serde_json::Value = serde_json::from_str(lines[lines.len() - 1]).expect("JSON");
    assert_eq!(end["event"], "end");
    assert_eq!(end["summary"]["vcpus"][1]["records"], 3);
    assert_eq!(end["summary"]["exit"], "triple-fault");
}

#[test]
fn statistics_count_every_function() {
    let mut out = Vec::new();
    play(&sample::stream(), 1 << 20, Stats::new(&mut out)).1.expect("whole");
    let expected = "\
# 7 entries of 3 functions, 5 lost
#  entries   share  function
         4   57.1%  vfs_read
         2   28.6%  ext4_open [ext4]
         1   14.3%  0xffffffffc00fffff
";
    assert_eq!(String::from_utf8_lossy(&out), expected);
}

#[test]
fn the_summary_has_stable_lines() {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    sample::fill(&mut writer).expect("memory");
    let summary = writer.end(&sample::summary()).expect("memory");
    let print = |summary: &Summary| {
        let mut out = Vec::new();
        write_summary(&mut out, summary).expect("memory");
        String::from_utf8(out).expect("UTF-8")
    };
    let expected = "\
vmtrace: sites matched 3, patched 2, skipped 1
vmtrace: skipped 1 busy (such as schedule)
vmtrace: tracers 2 (tracer0 1, fs 2), sites direct 1, combined 1
vmtrace: shared 1 sites with the guest's own ftrace at the most, 3 updates of it
vmtrace: records 7 (vcpu0 4, vcpu1 3), lost 5 (vcpu0 0, vcpu1 5)
vmtrace: lost vcpu1 5 ring-full
vmtrace: pauses 1, total 0.070 ms, longest 0.070 ms, patching 0.012 ms
vmtrace: guest triple fault
vmtrace: run status -1
vmtrace: note nothing else
";
    assert_eq!(print(&summary), expected);
    let counted = Summary { counted: Some(Counted { functions: 3, calls: 45 }), ..summary };
    let with = expected
        .replace("vmtrace: pauses", "vmtrace: counted 45 calls of 3 functions\nvmtrace: pauses");
    assert_eq!(print(&counted), with);
    let empty = "\
vmtrace: sites matched 0, patched 0, skipped 0
vmtrace: records 0 (), lost 0 ()
vmtrace: pauses 0, total 0.000 ms, longest 0.000 ms, patching 0.000 ms
vmtrace: guest unknown
";
    assert_eq!(print(&Summary::default()), empty);
}

/// Takes nothing.
struct Full;

impl Write for Full {
    fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::StorageFull.into())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_output_that_fails_stops_the_player() {
    let error = play(&sample::stream(), 1 << 20, Text::new(Full)).1.expect_err("closed");
    assert!(matches!(error, PlayError::Output(_)));
}

/// Counts, and checks the order inside each vCPU.
#[derive(Default)]
struct Counts {
    entries: usize,
    marks: usize,
    last: [u64; 2],
}

impl Export for Counts {
    fn begin(&mut self, _: &Header) -> std::io::Result<()> {
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        match event {
            Event::Entry(entry) => {
                let last = &mut self.last[usize::try_from(entry.vcpu).expect("two")];
                assert!(*last < entry.timestamp);
                *last = entry.timestamp;
                self.entries += 1;
            }
            Event::Mark(_) => self.marks += 1,
            _ => {}
        }
        Ok(())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn without_watermarks_memory_stays_bounded_and_nothing_is_dropped() {
    let mut writer =
        Writer::new(Player::new(Counts::default()), &sample::header()).expect("header");
    for round in 0..60 {
        for vcpu in 0..2 {
            let time = |at| u64::from(round * 10_000 + at + 1);
            let records: Vec<_> =
                (0..10_000u32).map(|at| EntryRecord::new(time(at), 1, 2, 3)).collect();
            writer.entries(vcpu, &records).expect("no failure");
        }
    }
    writer.flush().expect("no failure");
    assert!(writer.get_mut().held() <= 1 << 20);
    writer.end(&Summary::default()).expect("no failure");
    let player = writer.into_inner().expect("no failure");
    assert!(player.disordered() > 0);
    assert_eq!(player.into_export().entries, 1_200_000);
}

#[test]
fn long_marks_do_not_pile_up() {
    let mut writer =
        Writer::new(Player::new(Counts::default()), &sample::header()).expect("header");
    let mark = Mark { text: "x".repeat(60_000), ..sample::mark() };
    for _ in 0..1000 {
        writer.mark(&mark).expect("no failure");
    }
    writer.flush().expect("no failure");
    assert!(writer.get_mut().held() < 300);
    writer.end(&Summary::default()).expect("no failure");
    assert_eq!(writer.into_inner().expect("no failure").into_export().marks, 1000);
}

/// Plays a stream as a file, with a second thread.
fn play_file<E: Export>(mut stream: &[u8], export: E) -> (Player<E>, Result<(), PlayError>) {
    let mut player = Player::new(export);
    let played = player.play_file(&mut stream);
    (player, played)
}

// All that a file is good for is played by two threads: what one of them knows and the other does not
// is a wrong name or a missing line. Cut off anywhere, and with any byte wrong.
#[test]
fn two_threads_show_what_one_shows() {
    let whole = sample::stream();
    let cut = (0..whole.len()).map(|end| whole[..end].to_vec());
    let wrong = (0..whole.len()).step_by(7).map(|at| {
        let mut stream = whole.clone();
        stream[at] ^= 0x10;
        stream
    });
    let others = [whole.clone(), sample::values()];
    for stream in others.into_iter().chain(cut).chain(wrong) {
        let (mut one, mut two) = (Vec::new(), Vec::new());
        let (_, expected) = play(&stream, 1 << 20, Text::new(&mut one));
        let (player, played) = play_file(&stream, Text::new(&mut two));
        let said = |result: &Result<(), PlayError>| result.as_ref().err().map(ToString::to_string);
        assert_eq!(said(&played), said(&expected));
        drop(player);
        assert_eq!(String::from_utf8_lossy(&two), String::from_utf8_lossy(&one));
    }
}

// Many tasks that are renamed again and again, a tracer that was never told, and a module that takes
// the place of another: each is a state that both threads must have at the same record.
#[test]
fn two_threads_have_the_same_names_at_each_record() {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    for round in 0..30_000u32 {
        let name = |what: &str| format!("{what}{round}");
        writer.task(Task::new(round % 7, 1, name("t").as_bytes())).expect("memory");
        if round % 100 == 0 {
            let (function, module) = (name("f"), name("m"));
            let address = sample::header().address(1);
            let symbol = Symbol { module: &module, ..Symbol::new(address, 16, &function) };
            writer.symbols(std::iter::once(symbol)).expect("memory");
        }
        let mut record = EntryRecord::new(u64::from(round) * 10, 1, 2, round % 7);
        record.head.tracer = u8::try_from(round / 10_000).expect("small");
        writer.entries(round % 2, &[record]).expect("memory");
        if round % 5000 == 0 {
            writer.loss(0, 3, LossReason::Full).expect("memory");
        }
    }
    writer.end(&Summary::default()).expect("memory");
    let stream = writer.into_inner().expect("memory");
    let (mut one, mut two) = (Vec::new(), Vec::new());
    play(&stream, 1 << 16, Json::new(&mut one)).1.expect("whole");
    play_file(&stream, Json::new(&mut two)).1.expect("whole");
    assert!(one.len() > 1 << 20, "{} bytes", one.len());
    assert_eq!(two, one);
}

// The other thread must not wait for one that has gone.
#[test]
fn an_output_that_fails_ends_both_threads() {
    let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
    for round in 0..200_u64 {
        let records: Vec<_> =
            (0..1000).map(|number| EntryRecord::new(round * 1000 + number, 1, 2, 3)).collect();
        writer.entries(0, &records).expect("memory");
    }
    let stream = writer.into_inner().expect("memory");
    let (_, played) = play_file(&stream, Text::new(Full));
    match played {
        Err(PlayError::Output(error)) => {
            assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        }
        other => panic!("{other:?}"),
    }
}
