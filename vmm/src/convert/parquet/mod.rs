//! Apache Parquet: a row for each call and for each event of other kinds, in one file or in
//! directories by vCPU. The columns are in [`table`], row groups in [`group`], the files in
//! [`parts`].
//!
//! Events arrive ordered by the time of returns, but readers search rows by the time of entries. So
//! each row group is sorted by the time of entries, and calls that began before their group are in
//! separate groups. By the statistics of the other groups readers can tell which to skip.

mod group;
mod parts;
mod table;

use std::fs::File;
use std::io;
use std::path::Path;
use std::rc::Rc;

use super::calls::{Calls, Lane, Open, Tracers};
use super::ground::{Clock, Names, too_many};
use crate::export::{
    Called, Entry, Event, Export, JsonArgs, JsonReturned, Name, Return, Tail, Tracepoint,
    Unfinished,
};
use crate::stream::{Header, Loss, Mark, Summary};
use parts::Parts;
use table::{End, Kind, NONE, Row, whole};

/// Tasks whose names are kept for the next time.
const RECENT: usize = 1 << 12;

/// Apache Parquet.
#[derive(Debug)]
pub struct Parquet {
    parts: Parts,
    clock: Clock,
    names: Names,
    tracers: Tracers,
    calls: Calls<Call>,
    comms: Box<[(u32, Option<Rc<str>>)]>,
    json: Vec<u8>,
    /// The latest time of a record.
    now: i64,
}

/// A call that is open: of its row what is known by its entry.
#[derive(Debug)]
struct Call {
    row: Row,
    comm: Option<Rc<str>>,
    args: Option<Box<[u8]>>,
    /// What was called took so long; nothing if that is not known of all.
    inside: Option<i64>,
}

impl Parquet {
    /// One file, with the rows of all vCPUs.
    #[must_use]
    pub fn new(out: File) -> Self {
        Self::of(Parts::one(out))
    }

    /// A directory for each vCPU in `place`, with files of some million rows in it.
    #[must_use]
    pub fn partitioned(place: &Path) -> Self {
        Self::of(Parts::by_vcpu(place))
    }

    fn of(parts: Parts) -> Self {
        Self {
            parts,
            clock: Clock::default(),
            names: Names::new(),
            tracers: Tracers::default(),
            calls: Calls::new(),
            comms: vec![(0, None); RECENT].into(),
            json: Vec::new(),
            now: 0,
        }
    }

    fn ns(&self, ticks: u64) -> i64 {
        whole(self.clock.ns(ticks))
    }

    fn at(&mut self, ticks: u64) -> i64 {
        let at = self.ns(ticks);
        self.now = self.now.max(at);
        at
    }

    fn name(&mut self, name: Option<&Name<'_>>) -> io::Result<u32> {
        let Some(name) = name else { return Ok(NONE) };
        Ok(self.names.number(name).ok_or_else(|| too_many("addresses"))?.number)
    }

    /// The name of a task, shared by those that ask one after the other.
    fn comm(&mut self, pid: u32, comm: Option<&str>) -> Option<Rc<str>> {
        let comm = comm?;
        let slot = usize::try_from(pid).unwrap_or(0) % RECENT;
        let (known_pid, known) = self.comms.get_mut(slot)?;
        match known {
            Some(known) if *known_pid == pid && **known == *comm => Some(Rc::clone(known)),
            _ => {
                (*known_pid, *known) = (pid, Some(comm.into()));
                known.clone()
            }
        }
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let mut row = Row {
            start: self.at(entry.timestamp),
            vcpu: entry.vcpu.into(),
            pid: entry.pid.into(),
            tgid: entry.tgid.map_or(-1, i64::from),
            function: self.name(Some(&entry.function))?,
            caller: self.name(entry.caller.as_ref())?,
            tracer: self.tracers.number(entry.tracer),
            context: entry.context,
            ..Row::new(if entry.place.is_some() { Kind::Call } else { Kind::Entry })
        };
        if let Some(place) = entry.place {
            row.call = whole(place.frame);
            row.parent = place.parent.map_or(-1, whole);
            row.depth = place.depth.into();
        }
        let comm = self.comm(entry.pid, entry.comm);
        let args = match entry.args {
            Some(args) => {
                self.json.clear();
                serde_json::to_writer(&mut self.json, &JsonArgs(args))?;
                Some(self.json.as_slice())
            }
            None => None,
        };
        let Some(place) = entry.place else {
            return self.parts.add(&self.names, &self.tracers, row, |texts, row| {
                row.comm = texts.optional(comm.as_deref());
                row.args = texts.optional(args);
            });
        };
        let lane = Lane::new(entry.vcpu, entry.pid, row.tracer);
        let call = Call { row, comm, args: args.map(Into::into), inside: Some(0) };
        if self.calls.enter(lane, place.frame, call) { Ok(()) } else { Err(too_many("tasks")) }
    }

    /// The row of a call that has ended, or never will.
    fn call(&mut self, call: Call, ret: Option<&Return<'_>>) -> io::Result<()> {
        let Call { mut row, comm, args, inside } = call;
        let value = if let Some(ret) = ret {
            row.stop = self.ns(ret.timestamp);
            row.stop_vcpu = ret.vcpu.into();
            row.stop_context = ret.context;
            row.duration = ret.duration_ns.map_or(-1, whole);
            row.own = match (inside, ret.duration_ns) {
                (Some(inside), Some(_)) => (row.duration - inside).max(0),
                _ => -1,
            };
            row.end = match (row.target, ret.duration_ns) {
                (_, None) => End::Uncertain,
                (NONE, Some(_)) => End::Return,
                (_, Some(_)) => End::Jump,
            };
            self.value(ret)?
        } else {
            row.end = End::Unseen;
            false
        };
        let value = Some(self.json.as_slice()).filter(|_| value);
        self.parts.add(&self.names, &self.tracers, row, |texts, row| {
            row.comm = texts.optional(comm.as_deref());
            row.args = texts.optional(args.as_deref());
            row.value = texts.optional(value);
        })
    }

    /// Puts what was returned into `json`, if that is known.
    fn value(&mut self, ret: &Return<'_>) -> io::Result<bool> {
        let Some(value) = ret.value else { return Ok(false) };
        self.json.clear();
        serde_json::to_writer(&mut self.json, &JsonReturned(value))?;
        Ok(true)
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        let at = self.at(ret.timestamp);
        let tracer = self.tracers.number(ret.tracer);
        let lane = Lane::new(ret.vcpu, ret.pid, tracer);
        let mut ended = ret.frame.map_or(Vec::new(), |frame| self.calls.leave(lane, frame));
        if let Some(mut call) = ended.pop() {
            if !ended.is_empty() {
                call.with.inside = None;
            }
            ended.into_iter().try_for_each(|left| self.call(left.with, None))?;
            if let Some(around) = self.calls.top(lane) {
                let (inside, took) = (around.inside, ret.duration_ns);
                around.inside = inside.zip(took).map(|(sum, took)| sum.saturating_add(whole(took)));
            }
            return self.call(call.with, Some(ret));
        }
        // Of a whole call nobody knows where it began, and what it called.
        let (kind, end, took) = match ret.duration_ns.filter(|_| ret.whole) {
            Some(took) => (Kind::Call, End::Return, whole(took)),
            None => (Kind::Return, End::Nothing, 0),
        };
        let row = Row {
            end,
            // Not before the clock's start, as everywhere.
            start: at.saturating_sub(took).max(0),
            stop: at,
            stop_vcpu: ret.vcpu.into(),
            vcpu: ret.vcpu.into(),
            pid: ret.pid.into(),
            tgid: ret.tgid.map_or(-1, i64::from),
            depth: ret.depth.into(),
            duration: ret.duration_ns.map_or(-1, whole),
            function: self.name(Some(&ret.function))?,
            tracer,
            stop_context: ret.context,
            ..Row::new(kind)
        };
        let value = self.value(ret)?;
        let value = Some(self.json.as_slice()).filter(|_| value);
        self.parts.add(&self.names, &self.tracers, row, |texts, row| {
            row.comm = texts.optional(ret.comm);
            row.value = texts.optional(value);
        })
    }

    /// The call that jumps is told by its depth: it is the innermost one that was traced.
    fn tail(&mut self, tail: &Tail<'_>) -> io::Result<()> {
        let at = self.at(tail.timestamp);
        let (function, target) =
            (self.name(Some(&tail.function))?, self.name(tail.target.as_ref())?);
        let tracer = self.tracers.number(tail.tracer);
        let lane = Lane::new(tail.vcpu, tail.pid, tracer);
        if let Some(call) = self.calls.top(lane)
            && call.row.depth == i64::from(tail.depth)
            && call.row.function == function
            && target != NONE
        {
            call.row.target = target;
            return Ok(());
        }
        let row = Row {
            start: at,
            vcpu: tail.vcpu.into(),
            pid: tail.pid.into(),
            depth: tail.depth.into(),
            function,
            target,
            tracer,
            context: tail.context,
            ..Row::new(Kind::Jump)
        };
        self.parts.add(&self.names, &self.tracers, row, |texts, row| {
            row.comm = texts.optional(tail.comm);
        })
    }

    fn unfinished(&mut self, left: &Unfinished<'_>) -> io::Result<()> {
        let lane = Lane::new(left.vcpu, left.pid, self.tracers.number(left.tracer));
        let Some(call) = self.calls.forget(lane, left.place.frame) else { return Ok(()) };
        self.left(lane, call)
    }

    /// A call that was left unseen took some of the time of what is around it, nobody knows how much.
    fn left(&mut self, lane: Lane, call: Open<Call>) -> io::Result<()> {
        if let Some(around) = self.calls.top(lane) {
            around.inside = None;
        }
        self.call(call.with, None)
    }

    fn tracepoint(&mut self, event: &Tracepoint<'_>) -> io::Result<()> {
        let row = Row {
            start: self.at(event.timestamp),
            vcpu: event.vcpu.into(),
            pid: event.pid.into(),
            tgid: event.tgid.map_or(-1, i64::from),
            function: self.name(Some(&event.event))?,
            caller: self.name(event.caller.as_ref())?,
            context: event.context,
            ..Row::new(Kind::Event)
        };
        self.json.clear();
        if let Some(fields) = event.fields {
            serde_json::to_writer(&mut self.json, &JsonArgs(fields))?;
        }
        let args = Some(self.json.as_slice()).filter(|_| event.fields.is_some());
        self.parts.add(&self.names, &self.tracers, row, |texts, row| {
            row.comm = texts.optional(event.comm);
            row.args = texts.optional(args);
        })
    }

    fn loss(&mut self, loss: &Loss) -> io::Result<()> {
        let row = Row {
            start: self.now,
            vcpu: loss.vcpu.into(),
            count: whole(loss.count),
            ..Row::new(Kind::Loss)
        };
        self.parts.add(&self.names, &self.tracers, row, |texts, row| {
            row.text = texts.optional(Some(&*loss.reason.to_string()));
        })
    }

    fn mark(&mut self, mark: &Mark) -> io::Result<()> {
        let at = self.ns(mark.ticks);
        let lasts = mark.duration_ns > 0;
        let duration = if lasts { whole(mark.duration_ns) } else { -1 };
        // Not before the clock's start, as everywhere.
        let start = if lasts { at.saturating_sub(duration).max(0) } else { at };
        let stop = if lasts { at } else { -1 };
        let row = Row { start, stop, duration, ..Row::new(Kind::Mark) };
        self.parts.add(&self.names, &self.tracers, row, |texts, row| {
            row.mark = texts.optional(Some(&*mark.kind.to_string()));
            row.text = texts.optional(Some(&*mark.text));
        })
    }
}

impl Export for Parquet {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        self.parts.begin(header)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            Event::Tail(tail) => self.tail(tail),
            Event::Tracepoint(event) => self.tracepoint(event),
            Event::Unfinished(left) => self.unfinished(left),
            Event::Loss(loss) => self.loss(loss),
            Event::Mark(mark) => self.mark(mark),
        }
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        let tracer = self.tracers.number(tracer);
        hits.filter(|(_, hits)| *hits > 0).try_for_each(|(function, hits)| {
            let row = Row {
                start: self.now,
                vcpu: vcpu.into(),
                function: self.name(Some(&function))?,
                tracer,
                count: whole(hits),
                ..Row::new(Kind::Count)
            };
            self.parts.add(&self.names, &self.tracers, row, |_, _| ())
        })
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        let tracer = self.tracers.number(tracer);
        hits.filter(|it| it.hits > 0).try_for_each(|it| {
            let row = Row {
                start: self.now,
                vcpu: vcpu.into(),
                function: self.name(Some(&it.function))?,
                caller: self.name(it.caller.as_ref())?,
                tracer,
                count: whole(it.hits),
                ..Row::new(Kind::Count)
            };
            self.parts.add(&self.names, &self.tracers, row, |_, _| ())
        })
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        // Those that the player said have been left while others were above them.
        for call in self.calls.take() {
            self.call(call.with, None)?;
        }
        self.parts.end(&self.names, &self.tracers, summary)
    }
}
