//! Comma-separated values: a row for each event, with the columns of [`COLUMNS`].

use std::fs::File;
use std::io;

use super::ground::Clock;
use crate::export::{Args, Called, Event, Export, JsonArgs, JsonReturned, Name, Returned, digits};
use crate::stream::{Context, Header, Summary};

/// Times are nanoseconds since the clock's start; what an event has not is empty. `details` is JSON
/// for arguments and returned values, the text of a mark, or the reason of a loss. Losses and counts have
/// the time of what came before them.
const COLUMNS: [&str; 15] = [
    "time_ns",
    "event",
    "vcpu",
    "pid",
    "tgid",
    "comm",
    "function",
    "module",
    "caller",
    "tracer",
    "depth",
    "duration_ns",
    "count",
    "details",
    "context",
];

/// Comma-separated values.
#[derive(Debug)]
pub struct Csv {
    out: csv::Writer<File>,
    clock: Clock,
    now: u64,
}

#[derive(Default)]
struct Row<'a> {
    event: &'a str,
    vcpu: Option<u32>,
    pid: Option<u32>,
    tgid: Option<u32>,
    comm: Option<&'a str>,
    function: Option<Name<'a>>,
    caller: Option<Name<'a>>,
    tracer: Option<&'a str>,
    depth: Option<u32>,
    duration_ns: Option<u64>,
    count: Option<u64>,
    details: String,
    context: Option<Context>,
}

impl Csv {
    /// Writes to `out`.
    #[must_use]
    pub fn new(out: File) -> Self {
        let out = csv::WriterBuilder::new().buffer_capacity(1 << 18).from_writer(out);
        Self { out, clock: Clock::default(), now: 0 }
    }

    fn row(&mut self, at: u64, row: &Row<'_>) -> io::Result<()> {
        let Row { event, comm, tracer, details, .. } = row;
        let out = &mut self.out;
        number(out, Some(at))?;
        out.write_field(event)?;
        for field in [row.vcpu, row.pid, row.tgid] {
            number(out, field.map(u64::from))?;
        }
        out.write_field(comm.unwrap_or_default())?;
        match &row.function {
            Some(Name { symbol: Some((symbol, module)), .. }) => {
                out.write_field(symbol)?;
                out.write_field(module)?;
            }
            Some(name) => {
                out.write_field(name.label())?;
                out.write_field("")?;
            }
            None => {
                out.write_field("")?;
                out.write_field("")?;
            }
        }
        match &row.caller {
            Some(Name { symbol: Some((symbol, "")), .. }) => out.write_field(symbol)?,
            Some(name) => out.write_field(name.label())?,
            None => out.write_field("")?,
        }
        out.write_field(tracer.unwrap_or_default())?;
        for field in [row.depth.map(u64::from), row.duration_ns, row.count] {
            number(out, field)?;
        }
        out.write_field(details)?;
        let columns = row.context.map(Context::columns);
        out.write_field(columns.as_ref().map_or(&[][..], |columns| columns))?;
        out.write_record(None::<&[u8]>)?;
        Ok(())
    }

    fn at(&mut self, ticks: u64) -> u64 {
        let at = self.clock.ns(ticks);
        self.now = self.now.max(at);
        at
    }
}

fn number(out: &mut csv::Writer<File>, number: Option<u64>) -> io::Result<()> {
    let Some(number) = number else { return Ok(out.write_field("")?) };
    let (digits, start) = digits(number, b'0');
    Ok(out.write_field(&digits[start..])?)
}

fn arguments(args: Option<Args<'_>>) -> io::Result<String> {
    Ok(args.map(|args| serde_json::to_string(&JsonArgs(args))).transpose()?.unwrap_or_default())
}

fn returned(value: Option<Returned<'_>>) -> io::Result<String> {
    let text = value.map(|value| serde_json::to_string(&JsonReturned(value))).transpose()?;
    Ok(text.unwrap_or_default())
}

impl Export for Csv {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        Ok(self.out.write_record(COLUMNS)?)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => {
                let at = self.at(entry.timestamp);
                let row = Row {
                    event: "entry",
                    vcpu: Some(entry.vcpu),
                    pid: Some(entry.pid),
                    context: entry.context,
                    tgid: entry.tgid,
                    comm: entry.comm,
                    function: Some(entry.function),
                    caller: entry.caller,
                    tracer: entry.tracer,
                    depth: entry.place.map(|place| place.depth),
                    details: arguments(entry.args)?,
                    ..Row::default()
                };
                self.row(at, &row)
            }
            Event::Return(ret) => {
                let at = self.at(ret.timestamp);
                let row = Row {
                    event: "return",
                    vcpu: Some(ret.vcpu),
                    pid: Some(ret.pid),
                    context: ret.context,
                    tgid: ret.tgid,
                    comm: ret.comm,
                    function: Some(ret.function),
                    tracer: ret.tracer,
                    depth: Some(ret.depth),
                    duration_ns: ret.duration_ns,
                    details: returned(ret.value)?,
                    ..Row::default()
                };
                self.row(at, &row)
            }
            Event::Tail(tail) => {
                let at = self.at(tail.timestamp);
                let row = Row {
                    event: "tail",
                    vcpu: Some(tail.vcpu),
                    pid: Some(tail.pid),
                    context: tail.context,
                    comm: tail.comm,
                    function: Some(tail.function),
                    tracer: tail.tracer,
                    depth: Some(tail.depth),
                    details: tail.target.as_ref().map(Name::label).unwrap_or_default(),
                    ..Row::default()
                };
                self.row(at, &row)
            }
            Event::Tracepoint(event) => {
                let at = self.at(event.timestamp);
                let row = Row {
                    event: "event",
                    vcpu: Some(event.vcpu),
                    pid: Some(event.pid),
                    context: event.context,
                    tgid: event.tgid,
                    comm: event.comm,
                    function: Some(event.event),
                    caller: event.caller,
                    details: arguments(event.fields)?,
                    ..Row::default()
                };
                self.row(at, &row)
            }
            // Its entry has no return: there is no moment to tell of.
            Event::Unfinished(_) => Ok(()),
            Event::Loss(loss) => {
                let row = Row {
                    event: "loss",
                    vcpu: Some(loss.vcpu),
                    count: Some(loss.count),
                    details: loss.reason.to_string(),
                    ..Row::default()
                };
                self.row(self.now, &row)
            }
            Event::Mark(mark) => {
                let kind = mark.kind.to_string();
                let at = self.clock.ns(mark.ticks);
                let row = Row {
                    event: &kind,
                    duration_ns: Some(mark.duration_ns).filter(|ns| *ns > 0),
                    details: mark.text.clone(),
                    ..Row::default()
                };
                self.row(at, &row)
            }
        }
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        hits.filter(|(_, hits)| *hits > 0).try_for_each(|(function, hits)| {
            let row = Row {
                event: "count",
                vcpu: Some(vcpu),
                function: Some(function),
                tracer,
                count: Some(hits),
                ..Row::default()
            };
            self.row(self.now, &row)
        })
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        hits.filter(|it| it.hits > 0).try_for_each(|it| {
            let row = Row {
                event: "count",
                vcpu: Some(vcpu),
                function: Some(it.function),
                caller: it.caller,
                tracer,
                count: Some(it.hits),
                ..Row::default()
            };
            self.row(self.now, &row)
        })
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        self.out.flush()
    }
}
