//! A trace of the Common Trace Format 1.8 (diamon.org/ctf): a directory with `metadata`, a stream
//! for each vCPU that has events, and one for marks.
//!
//! Fields have types: numbers stay numbers. Events with different fields (arguments, values) are in
//! separate event classes with the same name. Losses are given as the discarded events of packets,
//! as the format intends. The event `records_lost` additionally has the reason.

mod metadata;
mod packets;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::ground::{Clock, listed};
use crate::export::{Args, Entry, Event, Export, Name, Return, Tail, Tracepoint, printable};
use crate::stream::{Context, Header, Loss, Mark, Shown, Summary};

use metadata::Classes;
use packets::{Packets, Who};

/// Most vCPUs: each has a file that stays open.
const VCPUS: usize = 512;

/// The streams, as metadata numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum StreamId {
    /// Of a vCPU.
    Vcpu = 0,
    /// Of what happened beside the records.
    Marks = 1,
}

/// A field of an event.
#[derive(Clone, Debug)]
enum Value<'a> {
    Unsigned(u64),
    Signed(i64),
    Address(u64),
    Text(Cow<'a, str>),
}

type Fields<'a> = Vec<(Cow<'a, str>, Value<'a>)>;

/// A directory of the Common Trace Format.
#[derive(Debug)]
pub struct Ctf {
    folder: PathBuf,
    header: Header,
    clock: Clock,
    classes: Classes,
    vcpus: BTreeMap<u32, Packets>,
    marks: Option<Packets>,
    now: u64,
}

impl Ctf {
    /// Writes files into `folder`.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            header: Header::default(),
            clock: Clock::default(),
            classes: Classes::default(),
            vcpus: BTreeMap::new(),
            marks: None,
            now: 0,
        }
    }

    /// Readers want times that never go back.
    fn at(&mut self, ticks: u64) -> u64 {
        self.now = self.now.max(self.clock.ns(ticks));
        self.now
    }

    fn vcpu(&mut self, vcpu: u32) -> io::Result<&mut Packets> {
        if !self.vcpus.contains_key(&vcpu) {
            if self.vcpus.len() >= VCPUS {
                let text = format!("the trace has more than {VCPUS} vCPUs: choose some (--cpu)");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            let file = self.folder.join(format!("vcpu_{vcpu}"));
            self.vcpus.insert(vcpu, Packets::new(&file, StreamId::Vcpu, vcpu)?);
        }
        self.vcpus.get_mut(&vcpu).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn write(&mut self, who: &Who<'_>, name: &str, fields: &Fields<'_>) -> io::Result<()> {
        let (class, at) = (self.classes.id(StreamId::Vcpu, name, fields)?, self.now);
        self.vcpu(who.vcpu)?.event(at, class, Some(who), fields)
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        self.at(entry.timestamp);
        let Entry { vcpu, pid, tgid, comm, .. } = *entry;
        let mut fields = function(&entry.function);
        if let Some(caller) = &entry.caller {
            fields.push(("caller".into(), Value::Text(caller.label().into())));
            fields.push(("caller_address".into(), Value::Address(caller.address)));
        }
        depth(&mut fields, entry.place.map(|place| place.depth));
        tracer(&mut fields, entry.tracer);
        context(&mut fields, entry.context);
        push(&mut fields, "arg_", entry.args);
        self.write(&Who { vcpu, pid, tgid, comm }, "func_entry", &fields)
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        self.at(ret.timestamp);
        let Return { vcpu, pid, tgid, comm, .. } = *ret;
        let mut fields = function(&ret.function);
        depth(&mut fields, Some(ret.depth));
        if let Some(duration) = ret.duration_ns {
            fields.push(("duration_ns".into(), Value::Unsigned(duration)));
        }
        tracer(&mut fields, ret.tracer);
        context(&mut fields, ret.context);
        if let Some(value) = ret.value {
            let value = value.shown().map_or(Value::Address(value.raw), |shown| shown_as(&shown));
            fields.push(("ret".into(), value));
        }
        self.write(&Who { vcpu, pid, tgid, comm }, "func_exit", &fields)
    }

    fn tail(&mut self, tail: &Tail<'_>) -> io::Result<()> {
        self.at(tail.timestamp);
        let Tail { vcpu, pid, comm, .. } = *tail;
        let mut fields = function(&tail.function);
        if let Some(target) = &tail.target {
            fields.push(("target".into(), Value::Text(target.label().into())));
        }
        depth(&mut fields, Some(tail.depth));
        tracer(&mut fields, tail.tracer);
        context(&mut fields, tail.context);
        self.write(&Who { vcpu, pid, tgid: None, comm }, "func_tail", &fields)
    }

    fn tracepoint(&mut self, event: &Tracepoint<'_>) -> io::Result<()> {
        self.at(event.timestamp);
        let Tracepoint { vcpu, pid, tgid, comm, .. } = *event;
        let label = event.event.label();
        let (system, name) = label.split_once(':').unwrap_or(("", &label));
        let mut fields = Fields::new();
        push(&mut fields, "", event.fields);
        if system == "sched" {
            as_lttng(&mut fields);
        }
        context(&mut fields, event.context);
        self.write(&Who { vcpu, pid, tgid, comm }, name, &fields)
    }

    fn mark(&mut self, mark: &Mark) -> io::Result<()> {
        let at = self.at(mark.ticks);
        let mut fields: Fields<'_> =
            vec![("text".into(), Value::Text(printable(&mark.text).into()))];
        if mark.duration_ns > 0 {
            fields.push(("duration_ns".into(), Value::Unsigned(mark.duration_ns)));
        }
        let name = format!("vmtrace_{}", mark.kind);
        let class = self.classes.id(StreamId::Marks, &name, &fields)?;
        let marks = match &mut self.marks {
            Some(marks) => marks,
            none => none.insert(Packets::new(&self.folder.join("marks"), StreamId::Marks, 0)?),
        };
        marks.event(at, class, None, &fields)
    }

    /// A packet of its own has the count, so that readers tell when that was.
    fn loss(&mut self, loss: &Loss) -> io::Result<()> {
        let (at, vcpu) = (self.now, loss.vcpu);
        self.vcpu(vcpu)?.lose(at, loss.count)?;
        let fields: Fields<'_> = vec![
            ("count".into(), Value::Unsigned(loss.count)),
            ("reason".into(), Value::Text(loss.reason.to_string().into())),
        ];
        self.write(&Who { vcpu, pid: 0, tgid: None, comm: None }, "records_lost", &fields)?;
        self.vcpu(vcpu)?.close()
    }
}

fn function<'a>(name: &Name<'a>) -> Fields<'a> {
    let (symbol, module) = match name.symbol {
        Some((symbol, module)) => (Cow::from(symbol), module),
        None => (name.label().into(), ""),
    };
    let mut fields = vec![
        ("function".into(), Value::Text(symbol)),
        ("address".into(), Value::Address(name.address)),
    ];
    if !module.is_empty() {
        fields.push(("module".into(), Value::Text(module.into())));
    }
    fields
}

fn depth(fields: &mut Fields<'_>, depth: Option<u32>) {
    if let Some(depth) = depth {
        fields.push(("depth".into(), Value::Unsigned(depth.into())));
    }
}

fn tracer<'a>(fields: &mut Fields<'a>, tracer: Option<&'a str>) {
    if let Some(tracer) = tracer {
        fields.push(("tracer".into(), Value::Text(tracer.into())));
    }
}

/// The state of the CPU, under a name that no field of an event has.
fn context(fields: &mut Fields<'_>, context: Option<Context>) {
    if let Some(context) = context {
        fields.push(("common_context".into(), Value::Text(context.to_string().into())));
    }
}

/// Values by name; what could not be read is a text that says so.
fn push(fields: &mut Fields<'_>, before: &str, values: Option<Args<'_>>) {
    for (name, shown) in values.iter().flat_map(Args::iter) {
        let value = shown.map_or(Value::Text("?".into()), |shown| shown_as(&shown));
        fields.push((format!("{before}{name}").into(), value));
    }
}

fn shown_as(shown: &Shown<'_>) -> Value<'static> {
    match shown {
        Shown::Signed(number) => Value::Signed(*number),
        Shown::Unsigned(number) => Value::Unsigned(*number),
        Shown::Bool(yes) => Value::Unsigned((*yes).into()),
        Shown::Char(byte) => Value::Unsigned((*byte).into()),
        Shown::Pointer(address) => Value::Address(*address),
        Shown::Name(name) => Value::Text((*name).to_owned().into()),
        Shown::Text(text) => Value::Text(printable(&String::from_utf8_lossy(text)).into()),
        Shown::Raw(bytes) => {
            let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
            Value::Text(digits.collect::<Vec<_>>().join(" ").into())
        }
        Shown::Words(words) => Value::Text(listed(words).into()),
    }
}

/// What the kernel calls a pid here is a thread: `tid` in traces of LTTng, whose layout readers
/// know (Trace Compass: `LttngEventLayout`). They have both names.
fn as_lttng(fields: &mut Fields<'_>) {
    let named = |name: &str| name.strip_suffix("pid").map(|before| format!("{before}tid"));
    let threads: Fields<'_> = fields
        .iter()
        .filter_map(|(name, value)| Some((named(name)?.into(), value.clone())))
        .collect();
    fields.extend(threads);
}

impl Export for Ctf {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        self.header = header.clone();
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            Event::Tail(tail) => self.tail(tail),
            Event::Tracepoint(event) => self.tracepoint(event),
            // Its entry has no return: there is no moment to tell of.
            Event::Unfinished(_) => Ok(()),
            Event::Loss(loss) => self.loss(loss),
            Event::Mark(mark) => self.mark(mark),
        }
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        self.vcpus.values_mut().chain(&mut self.marks).try_for_each(Packets::end)?;
        fs::write(self.folder.join("metadata"), self.classes.metadata(&self.header))
    }

    fn notes(&self) -> Vec<String> {
        if self.vcpus.is_empty() && self.marks.is_none() {
            return vec!["there are no events: readers say that the trace is empty".to_owned()];
        }
        Vec::new()
    }
}
