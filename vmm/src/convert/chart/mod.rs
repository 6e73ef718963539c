//! A flame chart: one HTML page that draws calls by time and depth, a lane for each task. The page is
//! self-contained. Its data is a block of JSON, which its script (`page.js`) shows as text only:
//! names come from the guest and must not become markup.
//!
//! The page has room for the [`Kept::MOST`] longest calls, and for as many entries without a
//! return. It says what is left out.

mod kept;
mod write;

use std::fs::File;
use std::io;

use rustc_hash::FxHashMap;

use super::calls::{Calls, Lane, Tracers};
use super::ground::{Clock, Names, too_many};
use crate::export::{Entry, Event, Export, Name, Return, Unfinished};
use crate::stream::{Header, Loss, Mark, Summary};

use kept::{Call, Instant, Kept};
use write::Page;

/// Calls that are deeper are not shown.
const DEEPEST: u32 = 256;
/// Most marks and losses.
const MARKS: usize = 5000;
/// Most tasks.
const TASKS: usize = 1 << 20;

/// What is known of the end of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum End {
    Seen = 0,
    /// It is not certain that this was its return.
    Uncertain = 1,
    /// Nobody knows when; it lasts until that was known.
    Unseen = 2,
}

/// A flame chart.
#[derive(Debug)]
pub struct Chart {
    out: File,
    header: Header,
    clock: Clock,
    names: Names,
    tracers: Tracers,
    lanes: FxHashMap<Lane, u32>,
    tasks: Vec<Task>,
    calls: Calls<Open>,
    kept: Kept,
    marks: Vec<Marked>,
    /// Times of the first and the last event.
    since: Option<u64>,
    now: u64,
    losses: u64,
    more_marks: u64,
    too_deep: u64,
}

#[derive(Debug)]
struct Task {
    pid: u32,
    vcpu: u32,
    comm: Option<Box<str>>,
    tracer: Option<Box<str>>,
}

#[derive(Debug)]
struct Open {
    since: u64,
    name: u32,
    vcpu: u32,
    depth: u32,
}

#[derive(Debug)]
struct Marked {
    at: u64,
    duration: u64,
    loss: bool,
    text: String,
}

impl Chart {
    /// Writes to `out`, at the end.
    #[must_use]
    pub fn new(out: File) -> Self {
        Self {
            out,
            header: Header::default(),
            clock: Clock::default(),
            names: Names::new(),
            tracers: Tracers::default(),
            lanes: FxHashMap::default(),
            tasks: Vec::new(),
            calls: Calls::new(),
            kept: Kept::default(),
            marks: Vec::new(),
            since: None,
            now: 0,
            losses: 0,
            more_marks: 0,
            too_deep: 0,
        }
    }

    fn at(&mut self, ticks: u64) -> u64 {
        self.now = self.now.max(self.clock.ns(ticks));
        self.since.get_or_insert(self.now);
        self.now
    }

    fn name(&mut self, name: &Name<'_>) -> io::Result<u32> {
        Ok(self.names.number(name).ok_or_else(|| too_many("addresses"))?.number)
    }

    /// The number of a task, whose name is the last one.
    fn task(
        &mut self,
        lane: Lane,
        (pid, vcpu): (u32, u32),
        (comm, tracer): (Option<&str>, Option<&str>),
    ) -> io::Result<u32> {
        let next = u32::try_from(self.tasks.len()).unwrap_or(u32::MAX);
        let number = *self.lanes.entry(lane).or_insert(next);
        if number == next {
            if self.tasks.len() >= TASKS {
                return Err(too_many("tasks"));
            }
            let tracer = tracer.map(Into::into);
            self.tasks.push(Task { pid, vcpu, comm: None, tracer });
        }
        if let Some(task) = usize::try_from(number).ok().and_then(|it| self.tasks.get_mut(it))
            && let Some(comm) = comm
            && task.comm.as_deref() != Some(comm)
        {
            task.comm = Some(comm.into());
        }
        Ok(number)
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let since = self.at(entry.timestamp);
        let lane = Lane::new(entry.vcpu, entry.pid, self.tracers.number(entry.tracer));
        let task = self.task(lane, (entry.pid, entry.vcpu), (entry.comm, entry.tracer))?;
        let name = self.name(&entry.function)?;
        let depth = self.calls.top(lane).map_or(0, |open| open.depth.saturating_add(1));
        if depth >= DEEPEST {
            self.too_deep += 1;
        }
        let vcpu = entry.vcpu;
        if let Some(place) = entry.place {
            if !self.calls.enter(lane, place.frame, Open { since, name, vcpu, depth }) {
                return Err(too_many("tasks"));
            }
        } else if depth < DEEPEST {
            self.kept.instant(Instant { at: since, count: 1, task, depth, name, vcpu });
        }
        Ok(())
    }

    fn end(&mut self, lane: Lane, open: &Open, end: End) {
        let Some(&task) = self.lanes.get(&lane) else { return };
        let &Open { since, name, vcpu, depth } = open;
        if depth < DEEPEST {
            let duration = self.now.saturating_sub(since);
            self.kept.call(Call { since, duration, task, depth, name, vcpu, end });
        }
    }

    /// A call of which there is nothing but its end, after so many nanoseconds.
    fn whole(&mut self, ret: &Return<'_>, duration: u64) -> io::Result<()> {
        let since = self.at(ret.timestamp).saturating_sub(duration);
        let lane = Lane::new(ret.vcpu, ret.pid, self.tracers.number(ret.tracer));
        let task = self.task(lane, (ret.pid, ret.vcpu), (ret.comm, ret.tracer))?;
        let (name, vcpu) = (self.name(&ret.function)?, ret.vcpu);
        self.kept.call(Call { since, duration, task, depth: 0, name, vcpu, end: End::Seen });
        Ok(())
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        match ret.duration_ns.filter(|_| ret.whole) {
            Some(duration) => self.whole(ret, duration)?,
            None => self.leave(ret),
        }
        Ok(())
    }

    fn leave(&mut self, ret: &Return<'_>) {
        let Some(frame) = ret.frame else { return };
        self.at(ret.timestamp);
        let lane = Lane::new(ret.vcpu, ret.pid, self.tracers.number(ret.tracer));
        let mut ended = self.calls.leave(lane, frame);
        let last = ended.pop();
        for open in &ended {
            self.end(lane, &open.with, End::Unseen);
        }
        if let Some(open) = last {
            let certain = ret.duration_ns.is_some();
            self.end(lane, &open.with, if certain { End::Seen } else { End::Uncertain });
        }
    }

    fn unfinished(&mut self, left: &Unfinished<'_>) {
        let lane = Lane::new(left.vcpu, left.pid, self.tracers.number(left.tracer));
        if let Some(open) = self.calls.forget(lane, left.place.frame) {
            self.end(lane, &open.with, End::Unseen);
        }
    }

    fn loss(&mut self, loss: &Loss) {
        self.losses = self.losses.saturating_add(loss.count);
        let text = format!("{} records lost on vCPU {}: {}", loss.count, loss.vcpu, loss.reason);
        self.push(Marked { at: self.now, duration: 0, loss: true, text });
    }

    fn mark(&mut self, mark: &Mark) {
        let at = self.at(mark.ticks).saturating_sub(mark.duration_ns);
        let mut text = format!("{}: {}", mark.kind, mark.text);
        text.truncate(text.floor_char_boundary(500));
        self.push(Marked { at, duration: mark.duration_ns, loss: false, text });
    }

    fn push(&mut self, mark: Marked) {
        if self.marks.len() < MARKS {
            self.marks.push(mark);
        } else {
            self.more_marks += 1;
        }
    }
}

impl Export for Chart {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        self.header = header.clone();
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry)?,
            Event::Return(ret) => self.ret(ret)?,
            Event::Unfinished(left) => self.unfinished(left),
            Event::Loss(loss) => self.loss(loss),
            Event::Mark(mark) => self.mark(mark),
            // What is called now is shown inside of it.
            Event::Tail(_) | Event::Tracepoint(_) => {}
        }
        Ok(())
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        self.kept.finish();
        let notes = self.notes();
        Page::new(self).write(&notes)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.kept.notes();
        if self.too_deep > 0 {
            let count = self.too_deep;
            notes.push(format!("{count} calls with {DEEPEST} or more around them: left out"));
        }
        if self.more_marks > 0 {
            let count = self.more_marks;
            notes.push(format!("{count} marks and losses after the first {MARKS}: left out"));
        }
        notes
    }
}
