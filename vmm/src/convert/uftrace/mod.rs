//! A data directory of uftrace. Its files are as defined by uftrace's `utils/data-file.c`,
//! `utils/session.c` and `cmds/info.c`:
//!
//! - `info`: a header, and lines about the machine.
//! - `task.txt`: tasks, and sessions, which name the address space and the command of each.
//! - `sid-*.map`: the address space. Every module of the guest (and `vmlinux`) is a mapping with
//!   symbols of its own. Addresses are artificial, 16 bytes for each function: records have 48 bits
//!   for them, and a module may be loaded at a former address of another.
//! - `TID.dat`: records of a task: 8 bytes of time, and 8 of type, depth and address.
//! - `events.txt`: names of events; `extern.dat`: times and texts, which are marks and losses here.

mod files;
mod lanes;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use rustc_hash::FxHashMap;

use super::calls::{Calls, Lane, Tracers};
use super::ground::{Clock, Names, too_many};
use crate::export::{Entry, Event, Export, Name, Return, Tracepoint, Unfinished, printable};
use crate::stream::{Header, Loss, Mark, Summary};

use files::Modules;
use lanes::{Kind, Lanes, PIDS, Who};

/// Calls that are deeper have no record: there are 10 bits for the depth.
const DEEPEST: u32 = 1 << 10;
/// What uftrace calls events of the program, counted from here.
const EVENTS: u64 = 1_000_000;
/// uftrace's event for a task that is on another CPU.
const WATCH_CPU: u64 = 100_011;
/// Most names of events, and most bytes of one: uftrace has room for 511.
const MOST_EVENTS: usize = 1 << 16;
const EVENT_NAME: usize = 200;
/// Most bytes of a text beside the functions: uftrace reads 1023.
const TEXT: usize = 1000;

/// A data directory of uftrace.
#[derive(Debug)]
pub struct Uftrace {
    folder: PathBuf,
    /// Marks and losses.
    texts: BufWriter<File>,
    header: Header,
    clock: Clock,
    names: Names,
    modules: Modules,
    tracers: Tracers,
    lanes: Lanes,
    calls: Calls<Call>,
    events: FxHashMap<Box<str>, u64>,
    /// Calls that were left unseen, or, if nothing follows, never.
    left: Vec<(Lane, Call)>,
    now: u64,
    /// When the last loss ended.
    lost: u64,
    /// When the last text was.
    told: u64,
    too_deep: u64,
    cut: u64,
}

#[derive(Clone, Copy, Debug)]
struct Call {
    depth: u32,
    address: u64,
}

impl Uftrace {
    /// Writes files into `folder`.
    ///
    /// # Errors
    /// When a file cannot be made.
    pub fn new(folder: &Path) -> io::Result<Self> {
        let texts = BufWriter::new(File::create(folder.join("extern.dat"))?);
        Ok(Self {
            folder: folder.to_owned(),
            texts,
            header: Header::default(),
            clock: Clock::default(),
            names: Names::new(),
            modules: Modules::default(),
            tracers: Tracers::default(),
            lanes: Lanes::new(folder),
            calls: Calls::new(),
            events: FxHashMap::default(),
            left: Vec::new(),
            now: 0,
            lost: 0,
            told: 0,
            too_deep: 0,
            cut: 0,
        })
    }

    /// uftrace wants times that never go back.
    fn at(&mut self, ticks: u64) -> u64 {
        self.now = self.now.max(self.clock.ns(ticks));
        self.now
    }

    fn address(&mut self, name: &Name<'_>) -> io::Result<u64> {
        let number = self.names.number(name).ok_or_else(|| too_many("addresses"))?;
        Ok(self.modules.address(name, number))
    }

    fn depth(&mut self, lane: Lane) -> u32 {
        self.calls.top(lane).map_or(0, |call| call.depth.saturating_add(1))
    }

    /// The task is seen on a vCPU.
    fn see(&mut self, lane: Lane, who: Who<'_>, at: u64, depth: u32) -> io::Result<()> {
        let vcpu = who.vcpu;
        if self.lanes.see(lane, who)? { self.on(lane, vcpu, at, depth) } else { Ok(()) }
    }

    /// The task is on this vCPU from here on.
    fn on(&mut self, lane: Lane, vcpu: u32, at: u64, depth: u32) -> io::Result<()> {
        let depth = depth.min(DEEPEST - 1);
        self.lanes.record(lane, at, Kind::EventWithData, depth, WATCH_CPU)?;
        self.lanes.data(lane, &vcpu.to_le_bytes())
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let at = self.at(entry.timestamp);
        let lane = Lane::new(entry.vcpu, entry.pid, self.tracers.number(entry.tracer));
        let Entry { vcpu, pid, tgid, comm, tracer, .. } = *entry;
        let depth = self.depth(lane);
        let moved = self.lanes.see(lane, Who { vcpu, pid, tgid, comm, tracer })?;
        let address = self.address(&entry.function)?;
        let call = Call { depth, address };
        if let Some(place) = entry.place
            && !self.calls.enter(lane, place.frame, call)
        {
            return Err(too_many("tasks"));
        }
        if depth >= DEEPEST {
            self.too_deep += 1;
        } else {
            self.lanes.record(lane, at, Kind::Entry, depth, address)?;
        }
        if moved {
            // Inside of the call: uftrace shows no other events if it is not asked to.
            self.on(lane, vcpu, at, depth + 1)?;
        }
        if entry.place.is_none() { self.exit(lane, at, call) } else { Ok(()) }
    }

    fn exit(&mut self, lane: Lane, at: u64, call: Call) -> io::Result<()> {
        if call.depth >= DEEPEST {
            return Ok(());
        }
        self.lanes.record(lane, at, Kind::Exit, call.depth, call.address)
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        let Some(frame) = ret.frame else { return Ok(()) };
        let at = self.at(ret.timestamp);
        let lane = Lane::new(ret.vcpu, ret.pid, self.tracers.number(ret.tracer));
        let ended = self.calls.leave(lane, frame);
        if ended.is_empty() {
            return Ok(());
        }
        let Return { vcpu, pid, tgid, comm, tracer, .. } = *ret;
        self.see(lane, Who { vcpu, pid, tgid, comm, tracer }, at, ended[0].with.depth)?;
        ended.iter().try_for_each(|call| self.exit(lane, at, call.with))
    }

    fn unfinished(&mut self, left: &Unfinished<'_>) {
        let lane = Lane::new(left.vcpu, left.pid, self.tracers.number(left.tracer));
        if let Some(call) = self.calls.forget(lane, left.place.frame) {
            self.left.push((lane, call.with));
        }
    }

    /// Something follows: what was left unseen is not open any more.
    fn leave(&mut self) -> io::Result<()> {
        let (mut left, now) = (std::mem::take(&mut self.left), self.now);
        left.drain(..).try_for_each(|(lane, call)| self.exit(lane, now, call))?;
        self.left = left;
        Ok(())
    }

    fn tracepoint(&mut self, event: &Tracepoint<'_>) -> io::Result<()> {
        let at = self.at(event.timestamp);
        let lane = Lane::new(event.vcpu, event.pid, 0);
        let Tracepoint { vcpu, pid, tgid, comm, .. } = *event;
        let depth = self.depth(lane);
        self.see(lane, Who { vcpu, pid, tgid, comm, tracer: None }, at, depth)?;
        let name = files::event_name(&event.event.label(), EVENT_NAME);
        let next = EVENTS + u64::try_from(self.events.len()).unwrap_or(u64::MAX);
        if self.events.len() >= MOST_EVENTS && !self.events.contains_key(&*name) {
            return Err(too_many("events"));
        }
        let id = *self.events.entry(name.into()).or_insert(next);
        self.lanes.record(lane, at, Kind::Event, depth.min(DEEPEST - 1), id)
    }

    fn mark(&mut self, mark: &Mark) -> io::Result<()> {
        let at = self.at(mark.ticks);
        let mut text = mark.kind.to_string();
        if mark.duration_ns > 0 {
            let (micros, rest) = (mark.duration_ns / 1000, mark.duration_ns % 1000);
            text = format!("{text} {micros}.{rest:03} us");
        }
        if !mark.text.is_empty() {
            text = format!("{text}: {}", mark.text);
        }
        self.text(at, &text)
    }

    /// A loss is a call in a task of its own, which everything that uftrace does shows; texts are
    /// shown inside of calls only, so that it lasts a nanosecond.
    fn loss(&mut self, loss: &Loss) -> io::Result<()> {
        let at = self.now.max(self.lost);
        self.lost = at.saturating_add(1);
        let pid = PIDS.saturating_add(loss.vcpu);
        let lane = Lane::new(loss.vcpu, pid, u16::MAX);
        let comm = format!("vCPU {} losses", loss.vcpu);
        let comm = Some(&*comm);
        self.lanes.see(lane, Who { vcpu: loss.vcpu, pid, tgid: None, comm, tracer: None })?;
        let function = format!("records lost ({})", loss.reason);
        // No address of a function.
        let address =
            self.address(&Name { address: 0, symbol: Some((&function, "")), number: None })?;
        self.lanes.record(lane, at, Kind::Entry, 0, address)?;
        let text = format!("{} records lost on vCPU {}: {}", loss.count, loss.vcpu, loss.reason);
        self.text(at, &text)?;
        self.lanes.record(lane, self.lost, Kind::Exit, 0, address)
    }

    fn text(&mut self, at: u64, text: &str) -> io::Result<()> {
        let mut text = printable(text);
        if text.len() > TEXT {
            self.cut += 1;
            text.truncate(text.floor_char_boundary(TEXT - 3));
            text.push_str("...");
        }
        self.told = self.told.max(at);
        let (seconds, rest) = (self.told / 1_000_000_000, self.told % 1_000_000_000);
        writeln!(self.texts, "{seconds}.{rest:09} {text}")
    }
}

impl Export for Uftrace {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        self.header = header.clone();
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        if !self.left.is_empty() && !matches!(event, Event::Unfinished(_)) {
            self.leave()?;
        }
        match event {
            Event::Entry(entry) => self.entry(entry)?,
            Event::Return(ret) => self.ret(ret)?,
            Event::Unfinished(left) => self.unfinished(left),
            Event::Tracepoint(event) => self.tracepoint(event)?,
            Event::Mark(mark) => self.mark(mark)?,
            Event::Loss(loss) => self.loss(loss)?,
            // What is called now is shown inside of it.
            Event::Tail(_) => {}
        }
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        self.texts.flush()?;
        self.lanes.flush()?;
        self.modules.write(&self.folder, &self.names)?;
        files::events(&self.folder, &self.events)?;
        files::tasks(&self.folder, &self.lanes)?;
        files::info(&self.folder, &self.header, &self.lanes)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.lanes.is_empty() {
            notes.push("no task has records: uftrace says that there is no data".to_owned());
        }
        if self.too_deep > 0 {
            let (count, most) = (self.too_deep, DEEPEST);
            notes.push(format!("{count} calls with {most} or more around them: left out"));
        }
        if self.cut > 0 {
            notes.push(format!("{} texts of more than {TEXT} bytes: cut off", self.cut));
        }
        notes
    }
}
