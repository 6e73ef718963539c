//! Tables of current activity.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use crate::stream::{
    EntryRecord, EventRecord, Header, LossReason, RecordBuffer, ReturnRecord, Summary, Symbol,
    Writer, sample,
};

use super::{Event, Export, Live, Order, Pick, Picked, Player, Rows};

const SECOND: Duration = Duration::from_secs(1);
const OUTER: u32 = 0x8100_0000;
const INNER: u32 = 0x8100_0040;
const POINT: u32 = 0x8100_0080;
const STACK: u64 = 0xffff_c900_0000_1000;

/// A stream that is shown as it is written; times are in microseconds.
struct Running<E: Export> {
    writer: Writer<Vec<u8>>,
    player: Player<E>,
}

impl<E: Export> Running<E> {
    fn new(export: E) -> Self {
        let header = Header { clock_hz: 1_000_000_000, clock_start: 0, ..sample::header() };
        let mut writer = Writer::new(Vec::new(), &header).unwrap();
        for (at, name) in [(OUTER, "outer"), (INNER, "inner"), (POINT, "irq:tick")] {
            writer.symbols([Symbol::new(header.address(at), 64, name)]).unwrap();
        }
        Self { writer, player: Player::new(export) }
    }

    fn enter(&mut self, at: u64, function: u32, depth: u64) -> &mut Self {
        let entry = EntryRecord::new(at * 1000, function, 0, 7).with_sp(STACK - depth * 64);
        let mut buffer = RecordBuffer::new();
        buffer.push_frame(entry);
        self.writer.records(0, &buffer).unwrap();
        self
    }

    fn leave(&mut self, vcpu: u32, at: u64, function: u32, depth: u64) -> &mut Self {
        let ret = ReturnRecord::new(at * 1000, function, 0, 7, STACK - depth * 64);
        let mut buffer = RecordBuffer::new();
        buffer.push_return(ret);
        self.writer.records(vcpu, &buffer).unwrap();
        self
    }

    fn event(&mut self, at: u64) -> &mut Self {
        let mut buffer = RecordBuffer::new();
        buffer.push_event(EventRecord::new(at * 1000, POINT, 0, 7), 0, std::iter::empty());
        self.writer.records(1, &buffer).unwrap();
        self
    }

    /// Shows all that was written.
    fn play(&mut self, until: u64) {
        self.writer.watermark(until * 1000).unwrap();
        self.writer.flush().unwrap();
        let bytes = std::mem::take(self.writer.get_mut());
        self.player.push(&bytes).unwrap();
    }
}

struct Shared(Rc<RefCell<Live>>);

impl Export for Shared {
    fn begin(&mut self, header: &Header) -> std::io::Result<()> {
        self.0.borrow_mut().begin(header)
    }
    fn event(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        self.0.borrow_mut().event(event)
    }
    fn end(&mut self, summary: Option<&Summary>) -> std::io::Result<()> {
        self.0.borrow_mut().end(summary)
    }
}

fn running() -> (Rc<RefCell<Live>>, Running<Shared>) {
    let live = Rc::new(RefCell::new(Live::new(Vec::new())));
    (Rc::clone(&live), Running::new(Shared(live)))
}

fn table(live: &RefCell<Live>, order: Order, rows: usize) -> Vec<String> {
    let lines = live.borrow_mut().table(SECOND, order, Rows::Each(rows));
    let words = |line: String| line.split_whitespace().collect::<Vec<_>>().join(" ");
    lines.into_iter().map(words).collect()
}

// What was some time ago would hide what is now; a call is of the interval in which it ends.
#[test]
fn a_table_is_of_its_interval_alone() {
    let (live, mut trace) = running();
    trace.enter(1, OUTER, 0).enter(2, INNER, 1).leave(0, 5, INNER, 1).enter(6, INNER, 1).event(7);
    trace.play(10);
    let expected = [
        "# 1.00 s, 2 vCPUs: 5.0 records/s, lost so far 0",
        "# calls/s share self us total us function",
        "2.0 66.7% 3.000 3.000 inner",
        "1.0 33.3% - - outer",
        "# events/s share event",
        "1.0 100.0% irq:tick",
    ];
    assert_eq!(table(&live, Order::Calls, 9), expected);
    trace.leave(0, 16, INNER, 1).leave(0, 17, OUTER, 0).play(20);
    // Of its own only what it did beside the calls in it, also that of the interval before.
    let expected = [
        "# 1.00 s, 2 vCPUs: 2.0 records/s, lost so far 0",
        "# calls/s share self us total us function",
        "0.0 0.0% 3.000 16.000 outer",
        "0.0 0.0% 10.000 10.000 inner",
    ];
    assert_eq!(table(&live, Order::Total, 9), expected);
    trace.writer.loss(1, 5, LossReason::Full).unwrap();
    trace.play(21);
    table(&live, Order::Own, 9);
    // Losses stay.
    let expected = "# 1.00 s, 2 vCPUs: 0.0 records/s, lost so far 5 (vcpu1 5)";
    assert_eq!(table(&live, Order::Own, 9)[0], expected);
}

// A table that is silently cut would be taken for all there is.
#[test]
fn what_has_no_row_is_told() {
    let (live, mut trace) = running();
    trace.enter(1, OUTER, 0).enter(2, INNER, 1).enter(3, INNER, 2).play(4);
    let expected = [
        "# 1.00 s, 2 vCPUs: 3.0 records/s, lost so far 0",
        "# calls/s share function",
        "2.0 66.7% inner",
        "1.0 33.3% (1 more functions)",
    ];
    assert_eq!(table(&live, Order::Calls, 1), expected);
}

// A terminal that scrolls shows the head of no table.
#[test]
fn a_table_has_no_more_lines_than_asked_for() {
    for lines in [0, 1, 5, 10, 24, 60] {
        for many in [[0, 0, 0], [3, 0, 0], [100, 0, 0], [100, 100, 0], [3, 100, 100], [99, 9, 1]] {
            let rows = Rows::Lines(lines).of(many);
            let all: usize =
                (many.iter().zip(rows)).map(|(many, rows)| rows + usize::from(*many > rows)).sum();
            let heads = 2 + usize::from(many[1] > 0) + 2 * usize::from(many[2] > 0);
            // A section without room still says that there is something.
            let left = many.iter().zip(rows).filter(|(many, rows)| **many > 0 && *rows == 0);
            assert!(all + heads <= lines.max(heads) + left.count(), "{lines} {many:?} {rows:?}");
            assert!(rows.iter().zip(many).all(|(rows, many)| *rows <= many), "{rows:?}");
        }
    }
}

// Ends that are not shown (of another vCPU, a renamed task) would fill the memory up.
#[test]
fn calls_without_an_end_are_forgotten() {
    let live = Rc::new(RefCell::new(Live::new(vec![0])));
    let pick = Pick { cpus: vec![0], ..Pick::default() };
    let mut trace = Running::new(Picked::new(Shared(Rc::clone(&live)), pick));
    for round in 0..600_000 {
        trace.enter(2 * round, OUTER, 0).leave(1, 2 * round + 1, OUTER, 0);
        if round % 10_000 == 0 {
            trace.play(2 * round + 1);
        }
    }
    trace.play(2_000_000);
    assert!(live.borrow().open() <= 1 << 19, "{}", live.borrow().open());
    assert!(live.borrow().open() > 1 << 16, "the test tests nothing");
    assert_eq!(table(&live, Order::Calls, 9)[2], "600000.0 100.0% outer");
}

// A trace of counts alone has no records, and is not one in which nothing was called.
#[test]
fn counts_are_a_table_below() {
    let mut player = Player::new(Live::new(Vec::new()));
    player.push(&sample::counts()).unwrap();
    player.finish().unwrap();
    let lines = player.into_export().table(SECOND, Order::Calls, Rows::Each(2));
    let expected = [
        "# counted: 3 functions, 1017 calls",
        "#        hits       [000]       [001]  tracer  function",
        "#        1000         700         300  calls   vfs_read",
        "#           9           9           0  calls   ext4_open [ext4]",
        "#           8                                  (2 more functions)",
    ];
    assert_eq!(lines[2..], expected);
}

// What this reader alone has not seen is no fault of the trace; what was lost before it came is.
#[test]
fn losses_are_told_from_the_start_on_and_apart() {
    let mut player = Running::new(Live::new(vec![1]));
    player.writer.missed(1, 9, 9).unwrap();
    player.play(1);
    assert_eq!(player.player.export().missed(), 9);
    let mut live = player.player.into_export();
    live.joined(&[(10, 3), (10, 4)]).unwrap();
    let head = live.table(SECOND / 2, Order::Calls, Rows::Each(1)).remove(0);
    let expected =
        "# 0.50 s, 2 vCPUs: 0.0 records/s, lost so far 4 (vcpu1 4), missed here 9 (vcpu1 9)";
    assert_eq!(head, expected);
}
