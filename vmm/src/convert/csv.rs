//! Comma-separated values: a row for each event, with the columns of [`COLUMNS`].

use std::fs::File;
use std::io::{self, Write};

use super::ground::Clock;
use crate::export::{
    Args, Called, Event, Export, Gather, JsonArgs, JsonReturned, Name, Names, Returned, Tasks, Who,
    decimal,
};
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
    out: Gather<File>,
    clock: Clock,
    now: u64,
    tasks: Tasks<Vec<u8>>,
    functions: Names<Box<[u8]>>,
    callers: Names<Box<[u8]>>,
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
        Self {
            out: Gather::new(out),
            clock: Clock::default(),
            now: 0,
            tasks: Tasks::default(),
            functions: Names::default(),
            callers: Names::default(),
        }
    }

    fn row(&mut self, at: u64, row: &Row<'_>) -> io::Result<()> {
        let Row { event, comm, tracer, details, .. } = row;
        let out = &mut self.out.bytes;
        decimal(out, at, 0, b' ');
        text(out, event);
        match (row.vcpu, row.pid) {
            (Some(vcpu), Some(pid)) => {
                let who = Who { vcpu, pid, tgid: row.tgid, comm: *comm };
                if let Some(kept) = self.tasks.get(who) {
                    out.extend_from_slice(kept);
                } else {
                    let begin = out.len();
                    task(out, row);
                    self.tasks.keep(who, out.get(begin..).unwrap_or_default().to_vec());
                }
            }
            _ => task(out, row),
        }
        match &row.function {
            Some(name) => named(&mut self.functions, out, name, function)?,
            None => out.extend_from_slice(b",,"),
        }
        match &row.caller {
            Some(name) => named(&mut self.callers, out, name, caller)?,
            None => out.push(b','),
        }
        text(out, tracer.unwrap_or_default());
        for field in [row.depth.map(u64::from), row.duration_ns, row.count] {
            number(out, field);
        }
        text(out, details);
        let columns = row.context.map(Context::columns);
        field(out, columns.as_ref().map_or(&[][..], |columns| columns));
        out.push(b'\n');
        self.out.done()
    }

    fn at(&mut self, ticks: u64) -> u64 {
        let at = self.clock.ns(ticks);
        self.now = self.now.max(at);
        at
    }
}

/// Columns of a vCPU and its task.
fn task(out: &mut Vec<u8>, row: &Row<'_>) {
    for field in [row.vcpu, row.pid, row.tgid] {
        number(out, field.map(u64::from));
    }
    text(out, row.comm.unwrap_or_default());
}

/// Those of a function.
fn function(out: &mut Vec<u8>, name: &Name<'_>) {
    match name.symbol {
        Some((symbol, module)) => {
            text(out, symbol);
            text(out, module);
        }
        None => {
            text(out, &name.text());
            text(out, "");
        }
    }
}

/// That of a caller.
fn caller(out: &mut Vec<u8>, name: &Name<'_>) {
    text(out, &name.text());
}

/// What is written of a name.
fn named(
    kept: &mut Names<Box<[u8]>>,
    out: &mut Vec<u8>,
    name: &Name<'_>,
    write: impl Fn(&mut Vec<u8>, &Name<'_>),
) -> io::Result<()> {
    let made = kept.find(name, |name| {
        let mut made = Vec::new();
        write(&mut made, name);
        Ok(made.into())
    })?;
    match made {
        Some(made) => out.extend_from_slice(made),
        None => write(out, name),
    }
    Ok(())
}

/// Another field, behind a comma.
fn number(out: &mut Vec<u8>, number: Option<u64>) {
    out.push(b',');
    if let Some(number) = number {
        decimal(out, number, 0, b' ');
    }
}

/// The same of a text.
fn text(out: &mut Vec<u8>, text: &str) {
    field(out, text.as_bytes());
}

/// The same of any bytes.
fn field(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(b',');
    let is_plain = |&byte: &u8| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b',';
    if bytes.iter().all(is_plain) {
        out.extend_from_slice(bytes);
        return;
    }
    let mut writer = csv_core::Writer::new();
    let (mut rest, mut room) = (bytes, [0; 256]);
    loop {
        let (result, read, written) = writer.field(rest, &mut room);
        out.extend_from_slice(room.get(..written).unwrap_or_default());
        rest = rest.get(read..).unwrap_or_default();
        if matches!(result, csv_core::WriteResult::InputEmpty) {
            break;
        }
    }
    let (_, written) = writer.finish(&mut room);
    out.extend_from_slice(room.get(..written).unwrap_or_default());
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
        self.out.bytes.extend_from_slice(COLUMNS.join(",").as_bytes());
        self.out.bytes.push(b'\n');
        Ok(())
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
                    details: tail.target.as_ref().map(Name::text).unwrap_or_default().into_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use csv_core::{ReadFieldResult, Reader};

    /// The fields of a row.
    fn fields(mut row: &[u8]) -> Vec<String> {
        let (mut reader, mut fields, mut field) = (Reader::new(), Vec::new(), Vec::new());
        loop {
            let mut room = [0; 16];
            let (result, read, written) = reader.read_field(row, &mut room);
            row = &row[read..];
            field.extend_from_slice(&room[..written]);
            match result {
                ReadFieldResult::Field { record_end } => {
                    fields.push(String::from_utf8(std::mem::take(&mut field)).unwrap());
                    if record_end {
                        assert!(row.is_empty(), "{row:?}");
                        return fields;
                    }
                }
                ReadFieldResult::InputEmpty | ReadFieldResult::OutputFull => {}
                ReadFieldResult::End => panic!("no end of the row"),
            }
        }
    }

    // A comma in a task's name moves all that is behind it into other columns.
    #[test]
    fn fields_are_read_as_they_were() {
        let long = "a\"b,".repeat(200);
        let texts = ["", "vfs_read", "a b", "a,b", "say \"it\"", "two\nlines", "\r", "ä\t", &long];
        let mut row = b"0".to_vec();
        for given in texts {
            text(&mut row, given);
        }
        number(&mut row, Some(u64::MAX));
        number(&mut row, None);
        row.push(b'\n');
        let mut expected: Vec<String> =
            ["0"].iter().chain(&texts).map(ToString::to_string).collect();
        expected.extend([u64::MAX.to_string(), String::new()]);
        assert_eq!(fields(&row), expected);
        let plain = b",a b,vfs_read [m]";
        let mut row = Vec::new();
        for given in ["a b", "vfs_read [m]"] {
            text(&mut row, given);
        }
        assert_eq!(row, plain, "without quotes that nobody needs");
    }
}
