//! Chrome's trace event JSON: calls by `B` and `E` on their threads, everything else as instants.
//! Idle tasks are threads of process 0, one for each vCPU. Losses, marks and exits of vCPUs belong to
//! a process "vmtrace".

use std::fs::File;
use std::io::{self, Write};

use rustc_hash::FxHashMap;
use serde_json::json;

use super::calls::{Calls, Lane, Tracers};
use super::ground::{Clock, task_name};
use crate::export::{
    Entry, Event, Export, Gather, JsonArgs, JsonReturned, Name, Names, OutOfGuest, Return, Tasks,
    Tracepoint, Unfinished, Who, decimal,
};
use crate::stream::{Header, Loss, Mark, Summary};

/// The process of events that belong to no task. No pid of Linux is as high.
const BESIDE: u32 = 1 << 22;

/// Chrome's JSON.
#[derive(Debug)]
pub struct Chrome {
    out: Gather<File>,
    clock: Clock,
    calls: Calls<()>,
    names: FxHashMap<(u32, u32), Box<str>>,
    tracers: Tracers,
    /// Process and thread of tasks, which have their names.
    threads: Tasks<(u32, u32)>,
    texts: Names<Box<str>>,
    first: bool,
    now: u64,
}

impl Chrome {
    /// Writes to `out`.
    #[must_use]
    pub fn new(out: File) -> Self {
        Self {
            out: Gather::new(out),
            clock: Clock::default(),
            calls: Calls::new(),
            names: FxHashMap::default(),
            tracers: Tracers::default(),
            threads: Tasks::default(),
            texts: Names::default(),
            first: true,
            now: 0,
        }
    }

    /// The beginning of an event, up to its own keys.
    fn start(&mut self, kind: &str, at: u64, pid: u32, tid: u32) {
        let out = &mut self.out.bytes;
        out.extend_from_slice(if std::mem::take(&mut self.first) { b"\n" } else { b",\n" });
        out.extend_from_slice(b"{\"ph\":\"");
        out.extend_from_slice(kind.as_bytes());
        out.extend_from_slice(b"\",\"ts\":");
        micros(out, at);
        out.extend_from_slice(b",\"pid\":");
        decimal(out, pid.into(), 0, b' ');
        out.extend_from_slice(b",\"tid\":");
        decimal(out, tid.into(), 0, b' ');
    }

    fn key(&mut self, key: &str, value: impl serde::Serialize) -> io::Result<()> {
        let out = &mut self.out.bytes;
        out.extend_from_slice(b",\"");
        out.extend_from_slice(key.as_bytes());
        out.extend_from_slice(b"\":");
        serde_json::to_writer(out, &value)?;
        Ok(())
    }

    /// A function behind its key.
    fn named(&mut self, key: &[u8], name: &Name<'_>) -> io::Result<()> {
        let out = &mut self.out.bytes;
        out.extend_from_slice(key);
        let quoted = |name: &Name<'_>| Ok(serde_json::to_string(&name.text())?.into());
        match self.texts.find(name, quoted)? {
            Some(text) => out.extend_from_slice(text.as_bytes()),
            None => serde_json::to_writer(out, &name.text())?,
        }
        Ok(())
    }

    /// How long it took.
    fn lasts(&mut self, ns: u64) {
        self.out.bytes.extend_from_slice(b",\"dur\":");
        micros(&mut self.out.bytes, ns);
    }

    /// The first of its arguments.
    fn on(&mut self, vcpu: u32) {
        self.out.bytes.extend_from_slice(b",\"args\":{\"vcpu\":");
        decimal(&mut self.out.bytes, vcpu.into(), 0, b' ');
    }

    fn stop(&mut self) -> io::Result<()> {
        self.out.bytes.push(b'}');
        self.out.done()
    }

    /// Process and thread of a task, named when they are new or renamed.
    fn thread(
        &mut self,
        vcpu: u32,
        pid: u32,
        tgid: Option<u32>,
        comm: Option<&str>,
    ) -> io::Result<(u32, u32)> {
        let who = Who { vcpu, pid, tgid, comm };
        if let Some(&thread) = self.threads.get(who) {
            return Ok(thread);
        }
        let thread = if pid == 0 { (0, vcpu) } else { (tgid.unwrap_or(pid), pid) };
        let name = task_name(vcpu, pid, comm);
        if self.names.get(&thread).is_some_and(|known| **known == *name) {
            self.threads.keep(who, thread);
            return Ok(thread);
        }
        if self.names.insert(thread, name.as_ref().into()).is_some() {
            // Another vCPU may have it by its former name.
            self.threads = Tasks::default();
        }
        self.threads.keep(who, thread);
        self.start("M", self.now, thread.0, thread.1);
        self.key("name", "thread_name")?;
        self.key("args", json!({ "name": name }))?;
        self.stop()?;
        Ok(thread)
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let at = self.clock.ns(entry.timestamp);
        self.now = self.now.max(at);
        let (pid, tid) = self.thread(entry.vcpu, entry.pid, entry.tgid, entry.comm)?;
        let lane = Lane::new(entry.vcpu, entry.pid, self.tracers.number(entry.tracer));
        let nests = entry.place.is_some_and(|place| self.calls.enter(lane, place.frame, ()));
        self.start(if nests { "B" } else { "i" }, at, pid, tid);
        self.named(b",\"name\":", &entry.function)?;
        if let Some(tracer) = entry.tracer {
            self.key("cat", tracer)?;
        }
        self.on(entry.vcpu);
        if let Some(caller) = &entry.caller {
            self.named(b",\"caller\":", caller)?;
        }
        if let Some(context) = entry.context {
            self.key("context", context.to_string())?;
        }
        if let Some(args) = entry.args {
            self.key("arguments", JsonArgs(args))?;
        }
        self.out.bytes.push(b'}');
        if !nests {
            self.key("s", "t")?;
        }
        self.stop()
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        let at = self.clock.ns(ret.timestamp);
        self.now = self.now.max(at);
        let (pid, tid) = self.thread(ret.vcpu, ret.pid, ret.tgid, ret.comm)?;
        let lane = Lane::new(ret.vcpu, ret.pid, self.tracers.number(ret.tracer));
        if let Some(ns) = ret.duration_ns.filter(|_| ret.whole) {
            return self.whole(ret, (at, ns), (pid, tid));
        }
        let ended = ret.frame.map_or(0, |frame| self.calls.count_left(lane, frame));
        for _ in 1..ended {
            self.end_unfinished(at, pid, tid)?;
        }
        let nests = ended > 0;
        self.start(if nests { "E" } else { "i" }, at, pid, tid);
        let mut args = serde_json::Map::new();
        if let Some(context) = ret.context {
            args.insert("context at return".to_owned(), json!(context.to_string()));
        }
        if let Some(value) = ret.value {
            args.insert("value".to_owned(), serde_json::to_value(JsonReturned(value))?);
        }
        if nests {
            if ret.duration_ns.is_none() {
                args.insert("duration".to_owned(), json!("uncertain"));
            }
        } else {
            self.named(b",\"name\":", &ret.function)?;
            self.key("s", "t")?;
            args.insert("event".to_owned(), json!("return without an entry"));
        }
        if !args.is_empty() {
            self.key("args", args)?;
        }
        self.stop()
    }

    /// A call of which there is nothing but its end, after so many nanoseconds.
    fn whole(
        &mut self,
        ret: &Return<'_>,
        (at, ns): (u64, u64),
        (pid, tid): (u32, u32),
    ) -> io::Result<()> {
        self.start("X", at.saturating_sub(ns), pid, tid);
        self.lasts(ns);
        self.named(b",\"name\":", &ret.function)?;
        if let Some(tracer) = ret.tracer {
            self.key("cat", tracer)?;
        }
        let mut args = serde_json::Map::new();
        args.insert("vcpu".to_owned(), json!(ret.vcpu));
        if let Some(context) = ret.context {
            args.insert("context at return".to_owned(), json!(context.to_string()));
        }
        if let Some(value) = ret.value {
            args.insert("value".to_owned(), serde_json::to_value(JsonReturned(value))?);
        }
        self.key("args", args)?;
        self.stop()
    }

    fn end_unfinished(&mut self, at: u64, pid: u32, tid: u32) -> io::Result<()> {
        self.start("E", at, pid, tid);
        self.key("args", json!({ "duration": "unfinished" }))?;
        self.stop()
    }

    fn unfinished(&mut self, left: &Unfinished<'_>) -> io::Result<()> {
        let lane = Lane::new(left.vcpu, left.pid, self.tracers.number(left.tracer));
        if self.calls.forget(lane, left.place.frame).is_none() {
            return Ok(());
        }
        // Its thread is known by its process, which a name has been given for.
        let (pid, tid) = if left.pid == 0 {
            (0, left.vcpu)
        } else {
            let known = self.names.keys().find(|(_, tid)| *tid == left.pid);
            known.copied().unwrap_or((left.pid, left.pid))
        };
        self.end_unfinished(self.now, pid, tid)
    }

    /// A time in which a vCPU did not run, up to then.
    fn exit(&mut self, event: &Tracepoint<'_>, at: u64, out: &OutOfGuest<'_>) -> io::Result<()> {
        let ns = out.duration_ns;
        self.start("X", at.saturating_sub(ns), BESIDE, event.vcpu);
        self.lasts(ns);
        self.key("name", out.label())?;
        self.key("cat", "host")?;
        if let Some(fields) = event.fields {
            self.key("args", json!({ "fields": JsonArgs(fields) }))?;
        }
        self.stop()
    }

    fn tracepoint(&mut self, event: &Tracepoint<'_>) -> io::Result<()> {
        let at = self.clock.ns(event.timestamp);
        self.now = self.now.max(at);
        if let Some(out) = OutOfGuest::of(event) {
            return self.exit(event, at, &out);
        }
        let (pid, tid) = self.thread(event.vcpu, event.pid, event.tgid, event.comm)?;
        self.start("i", at, pid, tid);
        let label = event.event.text();
        let (system, name) = label.split_once(':').unwrap_or(("", &label));
        self.key("name", name)?;
        if !system.is_empty() {
            self.key("cat", system)?;
        }
        self.key("s", "t")?;
        self.on(event.vcpu);
        if let Some(context) = event.context {
            self.key("context", context.to_string())?;
        }
        if let Some(fields) = event.fields {
            self.key("fields", JsonArgs(fields))?;
        }
        self.out.bytes.push(b'}');
        self.stop()
    }

    fn loss(&mut self, loss: &Loss) -> io::Result<()> {
        self.start("i", self.now, BESIDE, loss.vcpu);
        self.key("name", format!("{} records lost", loss.count))?;
        self.key("s", "t")?;
        let reason = loss.reason.to_string();
        self.key("args", json!({ "vcpu": loss.vcpu, "count": loss.count, "reason": reason }))?;
        self.stop()
    }

    fn mark(&mut self, mark: &Mark) -> io::Result<()> {
        let at = self.clock.ns(mark.ticks).saturating_sub(mark.duration_ns);
        let lasts = mark.duration_ns > 0;
        self.start(if lasts { "X" } else { "i" }, at, BESIDE, BESIDE);
        self.key("name", mark.kind.to_string())?;
        if lasts {
            self.lasts(mark.duration_ns);
        } else {
            self.key("s", "p")?;
        }
        self.key("args", json!({ "text": mark.text }))?;
        self.stop()
    }
}

/// Nanoseconds as microseconds with three digits.
fn micros(out: &mut Vec<u8>, ns: u64) {
    decimal(out, ns / 1000, 0, b' ');
    out.push(b'.');
    decimal(out, ns % 1000, 3, b'0');
}

impl Export for Chrome {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        self.out.bytes.extend_from_slice(br#"{"displayTimeUnit":"ns","otherData":"#);
        let about = json!({
            "arch": header.arch,
            "release": header.release,
            "vcpus": header.vcpus,
            "vmtrace": header.vmtrace_version,
        });
        serde_json::to_writer(&mut self.out.bytes, &about)?;
        self.out.bytes.extend_from_slice(br#","traceEvents":["#);
        for (tid, name) in [(BESIDE, "marks".to_owned())]
            .into_iter()
            .chain((0..header.vcpus).map(|vcpu| (vcpu, format!("vCPU {vcpu}"))))
        {
            self.start("M", 0, BESIDE, tid);
            self.key("name", "thread_name")?;
            self.key("args", json!({ "name": name }))?;
            self.stop()?;
        }
        self.start("M", 0, BESIDE, BESIDE);
        self.key("name", "process_name")?;
        self.key("args", json!({ "name": "vmtrace" }))?;
        self.stop()
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

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        self.out.bytes.extend_from_slice(b"\n]}\n");
        self.out.flush()
    }
}
