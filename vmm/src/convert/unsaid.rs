//! What a format cannot express: it is counted while a trace is converted, and reported once.

use std::io;

use super::Format;
use crate::export::{Called, Event, Export, Name, SortedBy};
use crate::stream::{Header, Summary};

/// The parts of a trace that some formats cannot express.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fact {
    /// Arguments of an entry.
    Args,
    /// What a function returned.
    Value,
    /// A jump at the end of a function.
    Tail,
    /// The tracer that an event is of.
    Tracer,
    /// The caller of a function.
    Caller,
    /// An entry of which no return was recorded.
    Plain,
    /// A return.
    Return,
    /// A return whose entry is not in the trace.
    Orphan,
    /// A call of which there is nothing but its return, and how long it took.
    Whole,
    /// A return after a time that is not certain.
    Uncertain,
    /// A call whose return is not in the trace.
    Unfinished,
    /// Something that happened beside the records.
    Mark,
    /// Why records are missing.
    Reason,
    /// Records are missing.
    Loss,
    /// A tracepoint.
    Event,
    /// How often a function was entered on a vCPU, beside what was recorded.
    Counted,
    /// A histogram of a function's calls on a vCPU, beside what was recorded.
    Sorted,
    /// The state of the CPU.
    Context,
    /// Something before the start of the clock.
    Early,
}

impl Fact {
    /// What there are so many of.
    fn plural(self) -> &'static str {
        match self {
            Self::Args => "entries with arguments",
            Self::Value => "returned values",
            Self::Tail => "jumps at the ends of functions",
            Self::Tracer => "events that name their tracer",
            Self::Caller => "entries with a caller",
            Self::Plain => "entries without a recorded return",
            Self::Return => "returns",
            Self::Orphan => "returns without an entry",
            Self::Whole => "calls of which the trace has only the ends, with their durations",
            Self::Uncertain => "returns of which it is not certain how long the call took",
            Self::Unfinished => "calls without a return",
            Self::Mark => "marks",
            Self::Reason => "losses with a reason",
            Self::Loss => "losses",
            Self::Event => "events of tracepoints",
            Self::Counted => "counts of calls",
            Self::Sorted => "histograms of calls",
            Self::Context => "events with the state of their CPU",
            Self::Early => "events before the clock's start",
        }
    }
}

/// What became of it: the one table of what formats cannot say.
fn unsaid(format: Format) -> &'static [(Fact, &'static str)] {
    use Fact::{
        Args, Caller, Context, Counted, Early, Event as Point, Loss, Mark, Orphan, Plain, Reason,
    };
    use Fact::{Return, Sorted, Tail, Tracer, Uncertain, Unfinished, Value, Whole};
    const INSIDE: &str = "what was jumped to is shown inside of the function that jumped";
    const LEFT_OUT: &str = "left out";
    const AT_START: &str = "at the clock's start";
    match format {
        Format::Text => &[
            (Return, "left out, see --format graph"),
            (Tail, LEFT_OUT),
            (Tracer, "not distinguished"),
            (Reason, "counted without it"),
        ],
        Format::Graph => &[
            (Tail, INSIDE),
            (Tracer, "not distinguished"),
            (Caller, LEFT_OUT),
            (Reason, "counted without it"),
        ],
        Format::Json => &[(Unfinished, "they have no line of their own")],
        Format::TraceDat6 | Format::TraceDat7 => &[
            (Args, LEFT_OUT),
            (Value, LEFT_OUT),
            (Tail, INSIDE),
            (Tracer, "not distinguished"),
            (Caller, LEFT_OUT),
            (Uncertain, "shown as if they had taken no time"),
            (Unfinished, "shown as open"),
            (Counted, LEFT_OUT),
            (Sorted, LEFT_OUT),
            (Early, AT_START),
        ],
        Format::Uftrace => &[
            (Args, LEFT_OUT),
            (Value, LEFT_OUT),
            (Tail, INSIDE),
            (Caller, LEFT_OUT),
            (Plain, "shown as if they had taken no time; boot with --graph for returns"),
            (Orphan, LEFT_OUT),
            (Whole, LEFT_OUT),
            (Uncertain, "shown as if they had taken that long"),
            (Unfinished, "shown as open, or as left at the next record: their times are not known"),
            (Point, "without their fields; all of them only in replay --event-full"),
            (Mark, "where calls are open; all of them only in replay --event-full"),
            (Loss, "shown as calls, in a task for each vCPU"),
            (Context, LEFT_OUT),
            (Counted, LEFT_OUT),
            (Sorted, LEFT_OUT),
            (Early, AT_START),
        ],
        Format::Ctf => &[
            (Unfinished, "they have no event of their own"),
            (Counted, LEFT_OUT),
            (Sorted, LEFT_OUT),
            (Early, AT_START),
        ],
        Format::Parquet | Format::ParquetDir => &[(Sorted, LEFT_OUT), (Early, AT_START)],
        Format::Folded => &[
            (Args, LEFT_OUT),
            (Value, LEFT_OUT),
            (Tail, INSIDE),
            (Orphan, LEFT_OUT),
            (Uncertain, "their time is attributed to no function"),
            (Unfinished, "their time is attributed to no function"),
            (Point, LEFT_OUT),
            (Mark, LEFT_OUT),
            (Loss, LEFT_OUT),
            (Context, LEFT_OUT),
            (Counted, LEFT_OUT),
            (Sorted, LEFT_OUT),
        ],
        Format::Html => &[
            (Args, LEFT_OUT),
            (Value, LEFT_OUT),
            (Tail, INSIDE),
            (Caller, LEFT_OUT),
            (Plain, "shown as ticks; boot with --graph for returns"),
            (Orphan, LEFT_OUT),
            (Unfinished, "shown with a dashed line, up to where that was known"),
            (Point, LEFT_OUT),
            (Context, LEFT_OUT),
            (Counted, LEFT_OUT),
            (Sorted, LEFT_OUT),
            (Early, AT_START),
        ],
        Format::Chrome => {
            &[(Tail, INSIDE), (Counted, LEFT_OUT), (Sorted, LEFT_OUT), (Early, AT_START)]
        }
        Format::Csv => {
            &[(Unfinished, "they have no row of their own"), (Sorted, LEFT_OUT), (Early, AT_START)]
        }
        Format::Perfetto => {
            &[(Tail, INSIDE), (Counted, LEFT_OUT), (Sorted, LEFT_OUT), (Early, AT_START)]
        }
    }
}

/// Counts what an export is given and its format cannot say.
#[derive(Debug)]
pub struct Tally<E> {
    export: E,
    format: Format,
    /// By fact.
    counts: [u64; 32],
    clock_start: u64,
    begun: bool,
    /// Facts that this format cannot say, one bit each.
    wanted: u32,
}

impl<E: Export> Tally<E> {
    /// Counts for `export`, which makes `format`.
    pub fn new(export: E, format: Format) -> Self {
        let wanted = unsaid(format).iter().fold(0, |bits, (fact, _)| bits | bit(*fact));
        Self { export, format, counts: [0; 32], clock_start: 0, begun: false, wanted }
    }

    /// A line for each kind of things that the output does not say.
    pub fn told(&self) -> impl Iterator<Item = String> {
        let name = self.format.name();
        let facts = unsaid(self.format).iter().filter_map(|(fact, what)| {
            let count = self.counts.get(*fact as usize).filter(|count| **count > 0)?;
            Some(format!("{count} {}: {what}", fact.plural()))
        });
        facts.chain(self.export.notes()).map(move |line| format!("{name}: {line}"))
    }

    /// Whether there was anything to convert.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    fn count(&mut self, fact: Fact) {
        if self.wanted & bit(fact) != 0
            && let Some(count) = self.counts.get_mut(fact as usize)
        {
            *count += 1;
        }
    }
}

fn bit(fact: Fact) -> u32 {
    1 << fact as u32
}

impl<E: Export> Export for Tally<E> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock_start = header.clock_start;
        self.begun = true;
        self.export.begin(header)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        let facts: &[(Fact, bool)] = match event {
            Event::Entry(entry) => &[
                (Fact::Args, entry.args.is_some()),
                (Fact::Tracer, entry.tracer.is_some()),
                (Fact::Caller, entry.caller.is_some() && entry.place.is_some()),
                (Fact::Plain, entry.place.is_none()),
                (Fact::Early, entry.timestamp < self.clock_start),
            ],
            Event::Return(ret) => &[
                (Fact::Return, true),
                (Fact::Value, ret.value.is_some()),
                (Fact::Orphan, ret.frame.is_none() && !ret.whole),
                (Fact::Whole, ret.whole),
                (Fact::Uncertain, ret.frame.is_some() && ret.duration_ns.is_none()),
                (Fact::Early, ret.timestamp < self.clock_start),
            ],
            Event::Tail(_) => &[(Fact::Tail, true)],
            Event::Tracepoint(event) => {
                &[(Fact::Event, true), (Fact::Early, event.timestamp < self.clock_start)]
            }
            Event::Unfinished(_) => &[(Fact::Unfinished, true)],
            Event::Mark(mark) => {
                &[(Fact::Mark, true), (Fact::Early, mark.ticks < self.clock_start)]
            }
            Event::Loss(_) => &[(Fact::Loss, true), (Fact::Reason, true)],
        };
        for (fact, is) in facts {
            if *is {
                self.count(*fact);
            }
        }
        if event.context().is_some() {
            self.count(Fact::Context);
        }
        self.export.event(event)
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        let mut counted = 0_u64;
        let mut hits = hits.inspect(|_| counted += 1);
        let told = self.export.counts(vcpu, tracer, &mut hits);
        // Also what the export has not looked at.
        hits.for_each(drop);
        (0..counted).for_each(|_| self.count(Fact::Counted));
        told
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        let mut counted = 0_u64;
        let mut hits = hits.inspect(|_| counted += 1);
        let told = self.export.callers(vcpu, tracer, &mut hits);
        // Also what the export has not looked at.
        hits.for_each(drop);
        (0..counted).for_each(|_| self.count(Fact::Counted));
        told
    }

    fn sorted(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        let mut functions = 0_u64;
        let mut last = None;
        let mut words = words.inspect(|(name, ..)| {
            functions += u64::from(last.replace(name.address) != Some(name.address));
        });
        let told = self.export.sorted(by, &mut words);
        // Also what the export has not looked at.
        words.for_each(drop);
        (0..functions).for_each(|_| self.count(Fact::Sorted));
        told
    }

    fn flush(&mut self) -> io::Result<()> {
        // Nobody looks before the end.
        Ok(())
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.export.end(summary)
    }
}
