//! Counts in every format.

use proptest::prelude::*;

use crate::stream::{
    CallerCount, Count, Header, Stretch, Summary, Symbol, TracedOf, Tracer, Writer, sample,
};

use super::{Event, Export, Graph, Json, Pick, Picked, Player, Stats, Text, Top};

/// Plays what a player of a stream of counts alone is asked to play.
fn play<E: Export>(stream: &[u8], export: E, ask: impl FnOnce(Player<E>) -> Player<E>) -> E {
    let mut player = ask(Player::new(export));
    player.push(stream).expect("a stream");
    player.finish().expect("whole");
    player.into_export()
}

fn text(stream: &[u8], ask: impl FnOnce(Player<Text<Vec<u8>>>) -> Player<Text<Vec<u8>>>) -> String {
    let out = play(stream, Text::new(Vec::new()), ask).into_inner();
    let text = String::from_utf8(out).expect("UTF-8");
    // Without what every text begins with.
    text.lines().skip(6).map(|line| format!("{line}\n")).collect()
}

const TABLE: &str = "\
# counted: 3 functions, 1017 calls
#        hits       [000]       [001]  tracer  function
#        1000         700         300  calls   vfs_read
#           9           9           0  calls   ext4_open [ext4]
#           7           0           7  f?s     ext4_open [ext4]
#           1           0           1  f?s     0xffffffffc00fffff
";

// A trace of counts alone would be shown as one in which nothing was called.
#[test]
fn texts_end_with_a_table() {
    let stream = sample::counts();
    assert_eq!(text(&stream, |player| player), TABLE);
    let graph = play(&stream, Graph::new(Vec::new()), |player| player).into_inner();
    assert!(
        String::from_utf8(graph)
            .expect("UTF-8")
            .ends_with(&format!("CALLS\n# |     |   |                     |   |   |   |\n{TABLE}"))
    );
    // Also of a stream that is torn before its end.
    let mut player = Player::new(Text::new(Vec::new()));
    player.push(&stream[..stream.len() - 8]).expect("whole so far");
    player.finish().expect_err("torn");
    let torn = String::from_utf8(player.into_export().into_inner()).expect("UTF-8");
    assert!(torn.ends_with(TABLE), "{torn}");
    // And nothing where nothing was counted.
    let mut out = Vec::new();
    play(&sample::stream(), Text::new(&mut out), |player| player);
    assert!(!String::from_utf8(out).expect("UTF-8").contains("counted"));
}

// Columns that say nothing are left out: what is not asked for is not shown either.
#[test]
fn counts_are_chosen_as_entries_are() {
    let stream = sample::counts();
    let of_tracer = text(&stream, |player| player.with_tracer("f\x1bs".into()));
    let expected = "# counted: 2 functions, 8 calls\n#        hits  function\n\
                    #           7  ext4_open [ext4]\n#           1  0xffffffffc00fffff\n";
    assert_eq!(of_tracer, expected);
    let of_functions = text(&stream, |player| player.with_filter(|name, _| name == "vfs_read"));
    let expected = "# counted: 1 function, 1000 calls\n\
                    #        hits       [000]       [001]  function\n\
                    #        1000         700         300  vfs_read\n";
    assert_eq!(of_functions, expected);
    // Who calls them is not known.
    assert_eq!(text(&stream, |player| player.with_roots(|_, _| true)), "");
    let picked = |pick: Pick| {
        let mut out = Vec::new();
        play(&stream, Picked::new(Text::new(&mut out), pick), |player| player);
        let text = String::from_utf8(out).expect("UTF-8");
        text.lines().skip(8).map(|line| format!("{line}\n")).collect::<String>()
    };
    let of_cpu = picked(Pick { cpus: vec![1], modules: vec!["ext*".into()], ..Pick::default() });
    assert_eq!(of_cpu, "#           7  ext4_open [ext4]\n");
    let nothing = [
        Pick { pids: vec![7], ..Pick::default() },
        Pick { comms: vec!["*".into()], ..Pick::default() },
        Pick { follow: vec!["*".into()], ..Pick::default() },
        Pick { since: Some(0), ..Pick::default() },
        Pick { until: Some(u64::MAX), ..Pick::default() },
    ];
    for pick in nothing {
        assert_eq!(picked(pick.clone()), "", "{pick:?}");
    }
}

#[test]
fn json_has_a_line_for_each_count() {
    let mut out = Vec::new();
    play(&sample::counts(), Json::new(&mut out), |player| player);
    let text = String::from_utf8(out).expect("UTF-8");
    let lines: Vec<_> = text.lines().filter(|line| line.contains(r#""event":"count""#)).collect();
    let expected = [
        r#"{"event":"count","function":"vfs_read","tracer":"calls","cpu":0,"hits":600}"#,
        r#"{"event":"count","function":"ext4_open","module":"ext4","tracer":"calls","cpu":0,"hits":9}"#,
        r#"{"event":"count","function":"vfs_read","tracer":"calls","cpu":1,"hits":300}"#,
        r#"{"event":"count","function":"ext4_open","module":"ext4","tracer":"f?s","cpu":1,"hits":7}"#,
        r#"{"event":"count","function":"0xffffffffc00fffff","tracer":"f?s","cpu":1,"hits":1}"#,
        r#"{"event":"count","function":"vfs_read","tracer":"calls","cpu":0,"hits":100}"#,
    ];
    assert_eq!(lines, expected);
}

#[test]
fn statistics_of_functions_have_counted_calls() {
    let mut out = Vec::new();
    play(&sample::counts(), Stats::new(&mut out), |player| player);
    let text = String::from_utf8(out).expect("UTF-8");
    let expected = "# 1017 entries of 3 functions, 0 lost\n#  entries   share  function\n      \
                    1000   98.3%  vfs_read\n";
    assert!(text.starts_with(expected), "{text}");
    assert!(text.lines().last().is_some_and(|line| line.starts_with("# of several tracers: ")));
}

// A list of calls in which those that are only counted are missing would be taken for all of them.
#[test]
fn the_list_of_times_has_counted_calls() {
    let mut out = Vec::new();
    play(&sample::counts(), Top::new(&mut out), |player| player);
    let text = String::from_utf8(out).expect("UTF-8");
    assert!(text.starts_with("# 1017 calls of 3 functions, 0 records lost;"), "{text}");
    let row: Vec<_> = text.lines().nth(2).expect("a row").split_whitespace().collect();
    assert_eq!(row, ["-", "-", "1000", "0", "-", "-", "-", "-", "vfs_read"]);
    assert!(text.lines().last().is_some_and(|line| line.starts_with("# of several tracers: ")));
}

fn writer(vcpus: u32) -> Writer<Vec<u8>> {
    let header = Header { vcpus, ..sample::header() };
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    writer.symbols([Symbol::new(sample::READ, 64, "vfs_read")]).expect("room");
    writer
}

fn stream(mut writer: Writer<Vec<u8>>) -> Vec<u8> {
    writer.end(&Summary::default()).expect("memory");
    writer.into_inner().expect("memory")
}

// Sums of what a hostile stream says must not wrap or panic, and no column is made for each of
// thousands of vCPUs.
#[test]
fn sums_and_columns_are_bounded() {
    let mut writer = writer(4096);
    let function = sample::header().offset(sample::READ).expect("an address of the window");
    for vcpu in 0..4096 {
        writer.counts(vcpu, 0, &[Count { function, hits: u64::MAX }]).expect("vCPU");
    }
    let expected = "# counted: 1 function, 18446744073709551615 calls\n#        hits  function\n\
                    #18446744073709551615  vfs_read\n";
    assert_eq!(text(&stream(writer), |player| player), expected);
}

// A module may take the place of another, and a number of a tracer have another name: what was
// counted before is not theirs.
#[test]
fn counts_have_the_names_of_their_time() {
    let mut writer = writer(1);
    let function = sample::header().offset(sample::OPEN).expect("an address of the window");
    let traced = Stretch { since: 0, until: u64::MAX, tracer: 1, of: TracedOf::Entries };
    writer.traced(&traced, &[function]).expect("memory");
    for (module, tracer, hits) in [("ext4", "one", 3), ("xfs", "one", 2), ("xfs", "two", 1)] {
        writer.tracer(Tracer { number: 1, name: tracer, description: "" }).expect("memory");
        let open = Symbol { address: sample::OPEN, size: 64, name: "open", module };
        writer.symbols([open]).expect("room");
        writer.counts(0, 1, &[Count { function, hits }]).expect("vCPU");
    }
    let expected = "# counted: 2 functions, 6 calls\n#        hits  tracer  function\n\
                    #           3  one     open [ext4]\n\
                    #           2  one     open [xfs]\n\
                    #           1  two     open [xfs]\n";
    assert_eq!(text(&stream(writer), |player| player), expected);
}

/// A stream of counts by caller: on two vCPUs, from a caller with a name and one without.
fn by_caller() -> Vec<u8> {
    let header = sample::header();
    let offset = |address| header.offset(address).expect("an address of the window");
    let (read, open) = (offset(sample::READ), offset(sample::OPEN));
    let mut writer = Writer::new(Vec::new(), &header).expect("header");
    let module = Symbol { address: sample::OPEN, size: 64, name: "ext4_open", module: "ext4" };
    writer.symbols([Symbol::new(sample::READ, 64, "vfs_read"), module]).expect("room");
    let count = |function, caller, hits| CallerCount { function, caller, hits };
    writer.callers(0, 0, &[count(read, open + 9, 30), count(open, 0, 2)]).expect("vCPU");
    writer.callers(1, 0, &[count(read, open + 9, 5), count(read, 16, 5)]).expect("vCPU");
    writer.callers(1, 0, &[count(read, open + 33, 0)]).expect("vCPU");
    writer.end(&Summary::default()).expect("memory");
    writer.into_inner().expect("memory")
}

// A form that drops the caller, or the call, shows something else than what was counted.
#[test]
fn callers_are_told_by_who_can_and_counted_by_others() {
    let stream = by_caller();
    let base = sample::header().address_base;
    let expected = format!(
        "# callers of vfs_read: 40 calls by 2 callers\n\
         #          35   87.5%  ext4_open [ext4]\n\
         #           5   12.5%  {:#x}\n\
         # callers of ext4_open [ext4]: 2 calls by 1 caller\n\
         #           2  100.0%  ?\n",
        base + 16
    );
    assert_eq!(text(&stream, |player| player), expected);
    let graph = play(&stream, Graph::new(Vec::new()), |player| player).into_inner();
    assert!(String::from_utf8(graph).expect("UTF-8").ends_with(&expected));
    let mut out = Vec::new();
    play(&stream, Json::new(&mut out), |player| player);
    let json = String::from_utf8(out).expect("UTF-8");
    let lines: Vec<_> = json.lines().filter(|line| line.contains("event\":\"count\"")).collect();
    assert_eq!(
        lines[..2],
        [
            r#"{"event":"count","function":"vfs_read","caller":"ext4_open","caller_module":"ext4","cpu":0,"hits":30}"#,
            r#"{"event":"count","function":"ext4_open","module":"ext4","cpu":0,"hits":2}"#,
        ]
    );
    assert_eq!(lines.len(), 4, "{json}");
    // As report --callers has those of records.
    let mut out = Vec::new();
    play(&stream, super::Callers::new(&mut out), |player| player);
    let callers = String::from_utf8(out).expect("UTF-8");
    assert!(callers.contains("vfs_read: 40 calls\n        35   87.5%  ext4_open"), "{callers}");
    // They are calls of the function where callers are not told apart.
    let mut out = Vec::new();
    play(&stream, Stats::new(&mut out), |player| player);
    let stats = String::from_utf8(out).expect("UTF-8");
    assert!(stats.starts_with("# 42 entries of 2 functions, 0 lost\n"), "{stats}");
    let one = text(&stream, |player| player.with_tracer("another".into()));
    assert_eq!(one, "");
    let pick = Pick { cpus: vec![0], ..Pick::default() };
    let mut out = Vec::new();
    play(&stream, Picked::new(Text::new(&mut out), pick), |player| player);
    let picked = String::from_utf8(out).expect("UTF-8");
    assert!(picked.contains("# callers of vfs_read: 30 calls by 1 caller\n"), "{picked}");
}

/// Sums of hits by name and vCPU, as the lines of JSON say.
#[derive(Default)]
struct Sums(std::collections::BTreeMap<(String, u32), u64>);

impl Export for Sums {
    fn begin(&mut self, _: &Header) -> std::io::Result<()> {
        Ok(())
    }
    fn event(&mut self, _: &Event<'_>) -> std::io::Result<()> {
        Ok(())
    }
    fn counts(
        &mut self,
        vcpu: u32,
        _: Option<&str>,
        hits: &mut dyn Iterator<Item = (super::Name<'_>, u64)>,
    ) -> std::io::Result<()> {
        for (name, hits) in hits {
            *self.0.entry((name.label(), vcpu)).or_default() += hits;
        }
        Ok(())
    }
    fn end(&mut self, _: Option<&Summary>) -> std::io::Result<()> {
        Ok(())
    }
}

proptest! {
    // However counts are cut into frames, and whatever is between them.
    #[test]
    fn counts_add_up_however_they_come(
        hits in prop::collection::vec((0..2_u32, 0..4_u32, 0..u64::from(u32::MAX)), 0..40),
        step in 1..200_usize,
    ) {
        let mut writer = writer(2);
        let mut expected = std::collections::BTreeMap::new();
        for &(vcpu, function, hits) in &hits {
            writer.counts(vcpu, 0, &[Count { function, hits }]).expect("vCPU");
            let name = format!("{:#x}", Header::TOP_4_GIB + u64::from(function));
            *expected.entry((name, vcpu)).or_default() += hits;
            if hits % 3 == 0 {
                writer.watermark(hits).expect("memory");
            }
        }
        let stream = stream(writer);
        let mut player = Player::new(Sums::default());
        for piece in stream.chunks(step) {
            player.push(piece).expect("a stream");
        }
        player.finish().expect("whole");
        prop_assert_eq!(player.into_export().0, expected);
    }
}
