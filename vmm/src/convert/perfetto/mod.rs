//! Perfetto's protobuf, as `TrackEvent`s: calls are slices on the track of their thread (of the
//! vCPU for idle tasks, which share a pid), with arguments and returned values as their arguments.
//!
//! Every vCPU has a track of the tasks that ran on it, with losses as instants, and a counter of
//! lost records. Losses are also statistics of trace_processor. Tracepoints are ftrace events. Exits
//! of vCPUs are slices on a track of their vCPU.

mod event;
mod ftrace;
mod wire;

use std::fs::File;
use std::io::{self, Write};
use std::mem;

use rustc_hash::FxHashMap;

use super::ground::{Clock, Names, listed};
use crate::export::{
    Args, Entry, Event, Export, Gather, Name, OutOfGuest, Return, Tracepoint, Unfinished,
};
use crate::stream::{Header, Loss, Mark, MarkKind, Shown, Summary};
use event::{COUNTER, INSTANT, New, SLICE_BEGIN, SLICE_END, TrackEvent, Value};
use ftrace::{Bundle, NoPlace};
use wire::{
    CounterDescriptor, END_OF_TRACE, FtraceCpuStats, FtraceEventBundle, FtraceStats, Interned,
    InternedData, NEEDS_STATE, ProcessDescriptor, START_OF_TRACE, STATE_CLEARED, SystemInfo,
    ThreadDescriptor, TracePacket, TrackDescriptor, Utsname,
};

/// Most lanes: events of further tasks are on one track, as instants.
const LANES: usize = 1 << 19;
/// Tracks that are there always; those of vCPUs follow, then those of lanes.
const MARKS: u64 = 1;
const PAUSES: u64 = 2;
const CONSOLE: u64 = 3;
const CROWD: u64 = 4;
const FIRST_VCPU: u64 = 16;
/// Each vCPU has three: tasks, what was lost, and exits.
const OF_VCPU: u64 = 3;

/// Numbers of interned names of annotations.
const ANNOTATIONS: [&str; 8] =
    ["vcpu", "caller", "value", "duration", "count", "reason", "context", "context at return"];
const VCPU: u64 = 1;
const CALLER: u64 = 2;
const VALUE: u64 = 3;
const DURATION: u64 = 4;
const COUNT: u64 = 5;
const REASON: u64 = 6;
const CONTEXT: u64 = 7;
const CONTEXT_AT_RETURN: u64 = 8;

/// Calls of one task and tracer.
#[derive(Debug)]
struct Lane {
    uuid: u64,
    comm: Box<str>,
    /// Of the main thread of a process: its id.
    process: Option<u32>,
    /// Numbers of the open calls; of those that are over but not on top, unfinished.
    open: Vec<(u64, bool)>,
}

/// Which task was seen last on a vCPU, from when to when.
#[derive(Clone, Debug, Default)]
struct Seen {
    pid: u32,
    comm: String,
    from: u64,
    to: u64,
    records: u64,
    lost: u64,
    bundle: Bundle,
    /// Whether its track of exits is there.
    exits: bool,
}

/// Perfetto's protobuf.
#[derive(Debug)]
pub struct Perfetto {
    out: Gather<File>,
    /// Room for what events have.
    room: Vec<u8>,
    clock: Clock,
    names: Names,
    categories: Vec<Box<str>>,
    lanes: FxHashMap<u64, Lane>,
    vcpus: Vec<Seen>,
    next_uuid: u64,
    no_place: NoPlace,
    /// Time of the latest event.
    now: u64,
}

impl Perfetto {
    /// Writes to `out`.
    #[must_use]
    pub fn new(out: File) -> Self {
        Self {
            out: Gather::new(out),
            room: Vec::new(),
            clock: Clock::default(),
            names: Names::new(),
            categories: Vec::new(),
            lanes: FxHashMap::default(),
            vcpus: Vec::new(),
            next_uuid: 0,
            no_place: NoPlace::new(),
            now: 0,
        }
    }

    fn packet(&mut self, mut packet: TracePacket) -> io::Result<()> {
        packet.trusted_packet_sequence_id = Some(TracePacket::SEQUENCE);
        packet.sequence_flags = packet.sequence_flags.or(Some(NEEDS_STATE));
        // Field 1 of Trace.
        prost::encoding::message::encode(1, &packet, &mut self.out.bytes);
        self.out.done()
    }

    fn track(&mut self, track: TrackDescriptor) -> io::Result<()> {
        self.packet(TracePacket { track_descriptor: Some(track), ..TracePacket::default() })
    }

    #[inline]
    fn event(&mut self, timestamp: u64, event: TrackEvent, new: &New) -> io::Result<()> {
        event.write(&mut self.out.bytes, timestamp, new);
        self.room = event.into_room();
        self.out.done()
    }

    /// An event of which not much is known yet.
    fn new_event(&mut self) -> TrackEvent {
        TrackEvent::in_room(mem::take(&mut self.room))
    }

    /// Something with a name of its own on a track.
    fn named(&mut self, at: u64, track: u64, kind: u64, name: String) -> io::Result<()> {
        let mut event = TrackEvent::new(kind, track);
        event.name = Some(name);
        self.event(at, event, &None)
    }

    /// Gives an event the name of a function.
    fn name(&mut self, event: &mut TrackEvent, new: &mut New, name: &Name<'_>) {
        match self.names.number(name) {
            Some(number) => {
                let iid = Some(u64::from(number.number) + 1);
                event.name_iid = iid;
                if number.new {
                    intern(new, iid, name);
                }
            }
            None => event.name = Some(name.label()),
        }
    }

    fn caller(&mut self, event: &mut TrackEvent, new: &mut New, caller: &Name<'_>) {
        let value = match self.names.number(caller) {
            Some(number) => {
                let iid = u64::from(number.number) + 1;
                if number.new {
                    intern(new, Some(iid), caller);
                }
                Value::TextIid(iid)
            }
            None => Value::Text(caller.label().into()),
        };
        event.annotate(CALLER, &value);
    }

    fn category(&mut self, event: &mut TrackEvent, new: &mut New, tracer: Option<&str>) {
        let Some(tracer) = tracer else { return };
        let known = self.categories.iter().position(|known| **known == *tracer);
        let index = known.unwrap_or_else(|| {
            self.categories.push(tracer.into());
            let iid = Some(self.categories.len() as u64);
            new.get_or_insert_default()
                .event_categories
                .push(Interned { iid, text: Some(tracer.to_owned()) });
            self.categories.len() - 1
        });
        event.category_iid = Some(index as u64 + 1);
    }

    /// The lane of a task and tracer, with its track; `None` when there are too many.
    fn lane(&mut self, task: &Task<'_>) -> io::Result<Option<u64>> {
        // Streams may have renamed tracers for ever; lanes are then shared.
        let tracer = task.tracer.map_or(0, |name| {
            let known = self.categories.iter().position(|known| **known == *name);
            known.map_or(self.categories.len(), |index| index) as u64 & 0xffff
        });
        let idle = task.pid == 0;
        let owner = if idle { task.vcpu } else { task.pid };
        let key = u64::from(idle) << 63 | tracer << 32 | u64::from(owner);
        let comm = task.comm.unwrap_or("<...>");
        let full = self.lanes.len() >= LANES;
        let uuid = match self.lanes.get_mut(&key) {
            Some(lane) if idle || *lane.comm == *comm => return Ok(Some(key)),
            Some(lane) => {
                lane.comm = comm.into();
                lane.uuid
            }
            None if full => return Ok(None),
            None => {
                self.next_uuid += 1;
                let lane = Lane {
                    uuid: self.next_uuid,
                    comm: comm.into(),
                    process: Some(task.pid).filter(|pid| task.tgid == Some(*pid)),
                    open: Vec::new(),
                };
                let uuid = lane.uuid;
                self.lanes.insert(key, lane);
                uuid
            }
        };
        let mut track = TrackDescriptor { uuid: Some(uuid), ..TrackDescriptor::default() };
        let pid = i32::try_from(task.pid).ok();
        if let Some(tid) = pid.filter(|_| !idle) {
            let pid = task.tgid.and_then(|tgid| i32::try_from(tgid).ok()).or(Some(tid));
            let thread_name = Some(comm.to_owned());
            track.thread = Some(ThreadDescriptor { pid, tid: Some(tid), thread_name });
        } else {
            track.name = Some(if idle {
                format!("swapper/{}", task.vcpu)
            } else {
                format!("{comm} {}", task.pid)
            });
        }
        if tracer > 0 {
            // Its calls would not nest with those of another tracer.
            let name = format!("{} of {comm} {}", task.tracer.unwrap_or_default(), task.pid);
            let parent_uuid = self.lanes.get(&(key & !(0xffff << 32))).map(|lane| lane.uuid);
            (track.name, track.parent_uuid, track.thread) = (Some(name), parent_uuid, None);
        }
        self.track(track)?;
        Ok(Some(key))
    }

    /// A record of a task was seen on a vCPU.
    fn saw(&mut self, vcpu: u32, pid: u32, comm: Option<&str>, at: u64) -> io::Result<()> {
        self.now = self.now.max(at);
        let Some(seen) = self.vcpus.get_mut(position(vcpu)) else { return Ok(()) };
        if seen.records > 0 && seen.pid == pid {
            (seen.to, seen.records) = (at, seen.records + 1);
            return Ok(());
        }
        let comm = comm.unwrap_or("<...>").to_owned();
        let (records, lost, bundle) = (seen.records + 1, seen.lost, mem::take(&mut seen.bundle));
        let exits = seen.exits;
        let new = Seen { pid, comm, from: at, to: at, records, lost, bundle, exits };
        let old = mem::replace(seen, new);
        self.left(vcpu, &old)
    }

    /// Tells from when to when a task was seen.
    fn left(&mut self, vcpu: u32, old: &Seen) -> io::Result<()> {
        if old.records == 0 {
            return Ok(());
        }
        let track = of_vcpu(vcpu);
        self.named(old.from, track, SLICE_BEGIN, format!("{} {}", old.comm, old.pid))?;
        self.event(old.to, TrackEvent::new(SLICE_END, track), &None)
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let at = self.clock.ns(entry.timestamp);
        self.saw(entry.vcpu, entry.pid, entry.comm, at)?;
        let (mut event, mut new) = (self.new_event(), None);
        let task = Task {
            vcpu: entry.vcpu,
            pid: entry.pid,
            tgid: entry.tgid,
            comm: entry.comm,
            tracer: entry.tracer,
        };
        let lane = self.lane(&task)?;
        self.name(&mut event, &mut new, &entry.function);
        self.category(&mut event, &mut new, entry.tracer);
        event.annotate(VCPU, &Value::Uint(entry.vcpu.into()));
        if let Some(caller) = &entry.caller {
            self.caller(&mut event, &mut new, caller);
        }
        if let Some(context) = entry.context {
            event.annotate(CONTEXT, &Value::Text(context.to_string().into()));
        }
        if let Some(args) = &entry.args {
            arguments(&mut event, args);
        }
        (event.kind, event.track_uuid) = (INSTANT, CROWD);
        if let Some(lane) = lane.and_then(|key| self.lanes.get_mut(&key)) {
            event.track_uuid = lane.uuid;
            if let Some(place) = entry.place {
                event.kind = SLICE_BEGIN;
                lane.open.push((place.frame, false));
            }
        }
        self.event(at, event, &new)
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        let at = self.clock.ns(ret.timestamp);
        self.saw(ret.vcpu, ret.pid, ret.comm, at)?;
        let (mut event, mut new) = (self.new_event(), None);
        if let Some(value) = &ret.value {
            let shown = value.shown().map_or(Value::Pointer(value.raw), |shown| value_of(&shown));
            event.annotate(VALUE, &shown);
        }
        if let Some(context) = ret.context {
            event.annotate(CONTEXT_AT_RETURN, &Value::Text(context.to_string().into()));
        }
        let task = Task {
            vcpu: ret.vcpu,
            pid: ret.pid,
            tgid: ret.tgid,
            comm: ret.comm,
            tracer: ret.tracer,
        };
        let key = self.lane(&task)?;
        let lane = key.and_then(|key| self.lanes.get(&key));
        event.track_uuid = lane.map_or(CROWD, |lane| lane.uuid);
        let index =
            ret.frame.and_then(|frame| lane?.open.iter().rposition(|(open, _)| *open == frame));
        if let Some(took) = ret.duration_ns.filter(|_| ret.whole) {
            return self.whole(ret, (at, took), event, new);
        }
        let (Some(key), Some(index)) = (key, index) else {
            event.kind = INSTANT;
            self.category(&mut event, &mut new, ret.tracer);
            self.name(&mut event, &mut new, &ret.function);
            event.annotate(REASON, &Value::Text("return without an entry".into()));
            return self.event(at, event, &new);
        };
        // What is above has not ended where it should have.
        self.cut(key, index + 1, at)?;
        if ret.duration_ns.is_none() {
            event.annotate(DURATION, &Value::Text("uncertain".into()));
        }
        event.kind = SLICE_END;
        self.event(at, event, &new)?;
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.open.truncate(index);
        }
        self.settle(key, at)
    }

    /// A call of which there is nothing but its end, which `event` tells, after so many nanoseconds. Readers put
    /// both into their order.
    fn whole(
        &mut self,
        ret: &Return<'_>,
        (at, took): (u64, u64),
        mut event: TrackEvent,
        mut new: New,
    ) -> io::Result<()> {
        let mut begin = TrackEvent::new(SLICE_BEGIN, event.track_uuid);
        self.name(&mut begin, &mut new, &ret.function);
        self.category(&mut begin, &mut new, ret.tracer);
        begin.annotate(VCPU, &Value::Uint(ret.vcpu.into()));
        self.event(at.saturating_sub(took), begin, &new)?;
        event.kind = SLICE_END;
        self.event(at, event, &None)
    }

    /// Ends the open calls from that one on, as unfinished.
    fn cut(&mut self, key: u64, from: usize, at: u64) -> io::Result<()> {
        while let Some(lane) = self.lanes.get_mut(&key) {
            if lane.open.len() <= from {
                break;
            }
            lane.open.pop();
            let mut event = TrackEvent::new(SLICE_END, lane.uuid);
            event.annotate(DURATION, &Value::Text("unfinished".into()));
            self.event(at, event, &None)?;
        }
        Ok(())
    }

    /// Ends what is over and on top.
    fn settle(&mut self, key: u64, at: u64) -> io::Result<()> {
        while let Some(lane) = self.lanes.get(&key)
            && let Some((_, true)) = lane.open.last()
        {
            let index = lane.open.len() - 1;
            self.cut(key, index, at)?;
        }
        Ok(())
    }

    fn unfinished(&mut self, left: &Unfinished<'_>) -> io::Result<()> {
        let Unfinished { vcpu, pid, comm, tracer, .. } = *left;
        let Some(key) = self.lane(&Task { vcpu, pid, tgid: None, comm, tracer })? else {
            return Ok(());
        };
        if let Some(lane) = self.lanes.get_mut(&key) {
            let frames = lane.open.iter_mut().rev();
            for (frame, over) in frames {
                *over |= *frame == left.place.frame;
            }
        }
        // It ended at some time before.
        self.settle(key, self.now)
    }

    fn loss(&mut self, loss: &Loss) -> io::Result<()> {
        self.hand_on(loss.vcpu)?;
        let Some(seen) = self.vcpus.get_mut(position(loss.vcpu)) else { return Ok(()) };
        seen.lost = seen.lost.saturating_add(loss.count);
        let (at, lost) = (self.now, seen.lost);
        let track = of_vcpu(loss.vcpu);
        let mut event = TrackEvent::new(INSTANT, track);
        event.name = Some(format!("{} records lost", loss.count));
        event.annotate(COUNT, &Value::Uint(loss.count));
        event.annotate(REASON, &Value::Text(loss.reason.to_string().into()));
        self.event(at, event, &None)?;
        let mut event = TrackEvent::new(COUNTER, track + 1);
        // It is signed.
        event.counter_value = Some(lost.min(i64::MAX.cast_unsigned()));
        self.event(at, event, &None)?;
        // A statistic of trace_processor, and what its users look for.
        let (cpu, lost_events) = (Some(loss.vcpu), Some(true));
        let ftrace_events = Some(FtraceEventBundle { cpu, event: Vec::new(), lost_events });
        self.packet(TracePacket { ftrace_events, ..TracePacket::default() })
    }

    /// A time in which a vCPU did not run, up to then.
    fn exit(&mut self, vcpu: u32, at: u64, out: &OutOfGuest<'_>) -> io::Result<()> {
        self.now = self.now.max(at);
        let track = of_vcpu(vcpu) + 2;
        let Some(seen) = self.vcpus.get_mut(position(vcpu)) else { return Ok(()) };
        if !mem::replace(&mut seen.exits, true) {
            let (uuid, name) = (Some(track), Some(format!("vCPU {vcpu} exits")));
            self.track(TrackDescriptor { uuid, name, ..TrackDescriptor::default() })?;
        }
        self.named(at.saturating_sub(out.duration_ns), track, SLICE_BEGIN, out.label())?;
        self.event(at, TrackEvent::new(SLICE_END, track), &None)
    }

    fn tracepoint(&mut self, event: &Tracepoint<'_>) -> io::Result<()> {
        let at = self.clock.ns(event.timestamp);
        if let Some(out) = OutOfGuest::of(event) {
            return self.exit(event.vcpu, at, &out);
        }
        self.saw(event.vcpu, event.pid, event.comm, at)?;
        let Some(seen) = self.vcpus.get_mut(position(event.vcpu)) else { return Ok(()) };
        seen.bundle.push(ftrace::event(event, at, &mut self.no_place));
        if seen.bundle.is_full() { self.hand_on(event.vcpu) } else { Ok(()) }
    }

    /// Writes the events of a vCPU that wait.
    fn hand_on(&mut self, vcpu: u32) -> io::Result<()> {
        let Some(seen) = self.vcpus.get_mut(position(vcpu)) else { return Ok(()) };
        let event = seen.bundle.take();
        if event.is_empty() {
            return Ok(());
        }
        let ftrace_events = Some(FtraceEventBundle { cpu: Some(vcpu), event, lost_events: None });
        self.packet(TracePacket { ftrace_events, ..TracePacket::default() })
    }

    fn mark(&mut self, mark: &Mark) -> io::Result<()> {
        let at = self.clock.ns(mark.ticks);
        let text = match (&*mark.text, mark.kind) {
            (line, MarkKind::Console) => line.to_owned(),
            ("", kind) => kind.to_string(),
            (text, kind) => format!("{kind}: {text}"),
        };
        if mark.duration_ns > 0 {
            self.named(at.saturating_sub(mark.duration_ns), PAUSES, SLICE_BEGIN, text)?;
            return self.event(at, TrackEvent::new(SLICE_END, PAUSES), &None);
        }
        let track = if mark.kind == MarkKind::Console { CONSOLE } else { MARKS };
        self.named(at, track, INSTANT, text)
    }

    fn stats(&mut self, phase: i32) -> io::Result<()> {
        let cpu = |(cpu, seen): (u64, &Seen)| FtraceCpuStats {
            cpu: Some(cpu),
            entries: Some(0),
            overrun: Some(0),
            dropped_events: Some(seen.lost),
        };
        let cpu_stats = (0..).zip(&self.vcpus).map(cpu).collect();
        let ftrace_stats = Some(FtraceStats { phase: Some(phase), cpu_stats });
        self.packet(TracePacket { ftrace_stats, ..TracePacket::default() })
    }
}

/// Whose an event is.
struct Task<'a> {
    vcpu: u32,
    pid: u32,
    tgid: Option<u32>,
    comm: Option<&'a str>,
    tracer: Option<&'a str>,
}

fn position(vcpu: u32) -> usize {
    usize::try_from(vcpu).unwrap_or(usize::MAX)
}

fn of_vcpu(vcpu: u32) -> u64 {
    FIRST_VCPU + OF_VCPU * u64::from(vcpu)
}

/// A name has a number from here on: as that of an event, and as the value of an annotation, since it may be a
/// caller, too.
fn intern(new: &mut New, iid: Option<u64>, name: &Name<'_>) {
    let named = || Interned { iid, text: Some(name.label()) };
    let new = new.get_or_insert_default();
    new.event_names.push(named());
    new.debug_annotation_string_values.push(named());
}

/// Arguments by their names. What could not be read has none.
fn arguments(event: &mut TrackEvent, args: &Args<'_>) {
    for (name, shown) in args.iter() {
        let value = shown.as_ref().map_or(Value::Text("?".into()), value_of);
        event.annotate_by(name, &value);
    }
}

fn value_of<'a>(shown: &Shown<'a>) -> Value<'a> {
    match shown {
        Shown::Signed(number) => Value::Int(*number),
        Shown::Unsigned(number) => Value::Uint(*number),
        Shown::Bool(yes) => Value::Bool(*yes),
        Shown::Char(byte) => Value::Text(char::from(*byte).to_string().into()),
        Shown::Name(name) => Value::Text((*name).into()),
        Shown::Pointer(address) => Value::Pointer(*address),
        Shown::Text(bytes) => Value::Text(String::from_utf8_lossy(bytes).into_owned().into()),
        Shown::Raw(bytes) => {
            Value::Text(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into())
        }
        Shown::Words(words) => Value::Text(listed(words).into()),
    }
}

impl Export for Perfetto {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        self.vcpus = vec![Seen::default(); position(header.vcpus)];
        self.next_uuid = of_vcpu(header.vcpus);
        let names = (1..)
            .zip(ANNOTATIONS)
            .map(|(iid, name)| Interned { iid: Some(iid), text: Some(name.to_owned()) });
        let interned_data = Some(InternedData {
            debug_annotation_names: names.collect(),
            ..InternedData::default()
        });
        let utsname = Some(Utsname {
            sysname: Some("Linux".to_owned()),
            release: Some(header.release.clone()),
            machine: Some(header.arch.clone()),
        });
        let version = Some(format!("vmtrace {}", header.vmtrace_version));
        self.packet(TracePacket {
            interned_data,
            sequence_flags: Some(STATE_CLEARED),
            system_info: Some(SystemInfo { utsname, tracing_service_version: version }),
            ..TracePacket::default()
        })?;
        self.stats(START_OF_TRACE)?;
        let tracks =
            [(MARKS, "marks"), (PAUSES, "pauses"), (CONSOLE, "console"), (CROWD, "other tasks")];
        for (uuid, name) in tracks {
            let (uuid, name) = (Some(uuid), Some(name.to_owned()));
            self.track(TrackDescriptor { uuid, name, ..TrackDescriptor::default() })?;
        }
        for vcpu in 0..header.vcpus {
            let (uuid, name) = (Some(of_vcpu(vcpu)), Some(format!("vCPU {vcpu}")));
            self.track(TrackDescriptor { uuid, name, ..TrackDescriptor::default() })?;
            self.track(TrackDescriptor {
                uuid: Some(of_vcpu(vcpu) + 1),
                name: Some(format!("vCPU {vcpu} lost records")),
                counter: Some(CounterDescriptor {}),
                ..TrackDescriptor::default()
            })?;
        }
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            // What is called now is shown inside of it.
            Event::Tail(_) => Ok(()),
            Event::Tracepoint(event) => self.tracepoint(event),
            Event::Unfinished(left) => self.unfinished(left),
            Event::Loss(loss) => self.loss(loss),
            Event::Mark(mark) => self.mark(mark),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        for vcpu in 0..u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX) {
            self.hand_on(vcpu)?;
        }
        for (vcpu, seen) in (0..).zip(mem::take(&mut self.vcpus)) {
            let lost = seen.lost;
            self.left(vcpu, &seen)?;
            self.vcpus.push(Seen { lost, ..Seen::default() });
        }
        // A process has the last name of its main thread.
        let mut processes: Vec<_> = self
            .lanes
            .values()
            .filter_map(|lane| Some((lane.process?, lane.comm.clone())))
            .collect();
        processes.sort_unstable();
        for (pid, comm) in processes {
            let uuid = Some(u64::from(pid) << 32);
            let (pid, process_name) = (i32::try_from(pid).ok(), Some(comm.into()));
            let process = Some(ProcessDescriptor { pid, process_name });
            self.track(TrackDescriptor { uuid, process, ..TrackDescriptor::default() })?;
        }
        self.stats(END_OF_TRACE)?;
        self.flush()
    }

    fn notes(&self) -> Vec<String> {
        let each = self.no_place.iter().map(|(event, field)| format!("{field} of {event}"));
        let all = each.collect::<Vec<_>>().join(", ");
        if all.is_empty() {
            return Vec::new();
        }
        vec![format!("fields that its messages have no place for: {all}: left out")]
    }
}
