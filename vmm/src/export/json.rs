//! JSON Lines: one object for each event.

use std::io::{self, Write};

use serde::Serialize;

use crate::stream::{Context, Header, Summary};

use super::gather::Gather;
use super::sorted::{SortedBy, by_function};
use super::values::{JsonArgs, JsonReturned};
use super::{Called, Entry, Event, Export, Name, Return, Tail, Tracepoint};

/// One JSON object per line and event; `docs/stream.md` lists the keys.
#[derive(Debug)]
pub struct Json<W: Write> {
    out: Gather<W>,
    header: Header,
}

impl<W: Write> Json<W> {
    /// JSON to `out`, which needs no buffer of its own.
    pub fn new(out: W) -> Self {
        Self { out: Gather::new(out), header: Header::default() }
    }

    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out.bytes, line)?;
        self.out.bytes.push(b'\n');
        self.out.done()
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let (function, module) = texts(&entry.function);
        let (caller, caller_module) = entry.caller.as_ref().map(texts).unzip();
        let line = Line::Entry {
            ns: Ns(self.header.nanoseconds(entry.timestamp)),
            cpu: entry.vcpu,
            pid: entry.pid,
            comm: entry.comm,
            function: &function,
            module,
            caller: caller.as_deref(),
            caller_module: caller_module.flatten(),
            tracer: entry.tracer,
            depth: entry.place.map(|place| place.depth),
            context: entry.context.map(Shown),
            args: entry.args.map(JsonArgs),
        };
        self.line(&line)
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        let (function, module) = texts(&ret.function);
        let line = Line::Return {
            ns: Ns(self.header.nanoseconds(ret.timestamp)),
            cpu: ret.vcpu,
            pid: ret.pid,
            comm: ret.comm,
            function: &function,
            module,
            tracer: ret.tracer,
            depth: ret.depth,
            duration_ns: ret.duration_ns,
            context: ret.context.map(Shown),
            value: ret.value.map(JsonReturned),
        };
        self.line(&line)
    }

    fn tail(&mut self, tail: &Tail<'_>) -> io::Result<()> {
        let (function, module) = texts(&tail.function);
        let (target, target_module) = tail.target.as_ref().map(texts).unzip();
        let line = Line::Tail {
            ns: Ns(self.header.nanoseconds(tail.timestamp)),
            cpu: tail.vcpu,
            pid: tail.pid,
            comm: tail.comm,
            function: &function,
            module,
            target: target.as_deref(),
            target_module: target_module.flatten(),
            tracer: tail.tracer,
            depth: tail.depth,
            context: tail.context.map(Shown),
        };
        self.line(&line)
    }
}

/// What a line of an event is made of; it has no other order than those of calls.
impl<W: Write> Json<W> {
    fn tracepoint(&mut self, event: &Tracepoint<'_>) -> io::Result<()> {
        let (name, _) = texts(&event.event);
        let line = Line::Event {
            ns: Ns(self.header.nanoseconds(event.timestamp)),
            cpu: event.vcpu,
            pid: event.pid,
            comm: event.comm,
            name: &name,
            context: event.context.map(Shown),
            fields: event.fields.map(JsonArgs),
        };
        self.line(&line)
    }
}

/// What a line is made of.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Line<'a> {
    Header {
        arch: &'a str,
        clock: &'a str,
        clock_hz: u64,
        clock_start: u64,
        release: &'a str,
        vcpus: u32,
        slide: String,
        vmtrace: &'a str,
    },
    Entry {
        ns: Ns,
        cpu: u32,
        pid: u32,
        comm: Option<&'a str>,
        function: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        module: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        caller: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        caller_module: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tracer: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        depth: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        context: Option<Shown>,
        #[serde(skip_serializing_if = "Option::is_none")]
        args: Option<JsonArgs<'a>>,
    },
    Return {
        ns: Ns,
        cpu: u32,
        pid: u32,
        comm: Option<&'a str>,
        function: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        module: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tracer: Option<&'a str>,
        depth: u32,
        duration_ns: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        context: Option<Shown>,
        #[serde(skip_serializing_if = "Option::is_none")]
        value: Option<JsonReturned<'a>>,
    },
    Tail {
        ns: Ns,
        cpu: u32,
        pid: u32,
        comm: Option<&'a str>,
        function: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        module: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        target: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        target_module: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tracer: Option<&'a str>,
        depth: u32,
        #[serde(skip_serializing_if = "Option::is_none")]
        context: Option<Shown>,
    },
    Event {
        ns: Ns,
        cpu: u32,
        pid: u32,
        comm: Option<&'a str>,
        name: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        context: Option<Shown>,
        #[serde(skip_serializing_if = "Option::is_none")]
        fields: Option<JsonArgs<'a>>,
    },
    Count {
        function: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        module: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        caller: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        caller_module: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tracer: Option<&'a str>,
        cpu: u32,
        hits: u64,
    },
    Hist {
        function: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        module: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        tracer: Option<&'a str>,
        cpu: u32,
        of: &'a str,
        buckets: Vec<(i128, u64)>,
        #[serde(skip_serializing_if = "Option::is_none")]
        total: Option<u64>,
        missed: u64,
    },
    Loss {
        cpu: u32,
        count: u64,
        reason: String,
    },
    Mark {
        ns: Ns,
        kind: String,
        duration_ns: u64,
        text: &'a str,
    },
    End {
        summary: &'a Summary,
    },
}

/// Nanoseconds, which mostly fit into 64 bits: these are written faster.
struct Ns(i128);

impl Serialize for Ns {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match i64::try_from(self.0) {
            Ok(ns) => serializer.serialize_i64(ns),
            Err(_) => serializer.serialize_i128(self.0),
        }
    }
}

/// The state of a CPU, as text.
struct Shown(Context);

impl Serialize for Shown {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

/// Name, or address without one, and module.
fn texts<'a>(name: &Name<'a>) -> (std::borrow::Cow<'a, str>, Option<&'a str>) {
    match name.symbol {
        Some((symbol, module)) => (symbol.into(), Some(module).filter(|it| !it.is_empty())),
        None => (format!("{:#x}", name.address).into(), None),
    }
}

impl<W: Write> Export for Json<W> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.header = header.clone();
        let line = Line::Header {
            arch: &header.arch,
            clock: &header.clock,
            clock_hz: header.clock_hz,
            clock_start: header.clock_start,
            release: &header.release,
            vcpus: header.vcpus,
            slide: format!("{:#x}", header.slide),
            vmtrace: &header.vmtrace_version,
        };
        self.line(&line)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            Event::Tail(tail) => self.tail(tail),
            Event::Tracepoint(event) => self.tracepoint(event),
            // Its entry has no return: there is no moment to tell of.
            Event::Unfinished(_) => Ok(()),
            Event::Loss(loss) => self.line(&Line::Loss {
                cpu: loss.vcpu,
                count: loss.count,
                reason: loss.reason.to_string(),
            }),
            Event::Mark(mark) => {
                let ns = Ns(self.header.nanoseconds(mark.ticks));
                self.line(&Line::Mark {
                    ns,
                    kind: mark.kind.to_string(),
                    duration_ns: mark.duration_ns,
                    text: &mark.text,
                })
            }
        }
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        let hits = hits.map(|(function, hits)| Called { function, caller: None, hits });
        self.callers(vcpu, tracer, &mut { hits })
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        hits.filter(|it| it.hits > 0).try_for_each(|it| {
            let (function, module) = texts(&it.function);
            let (caller, caller_module) = it.caller.as_ref().map(texts).unzip();
            self.line(&Line::Count {
                function: &function,
                module,
                caller: caller.as_deref(),
                caller_module: caller_module.flatten(),
                tracer,
                cpu: vcpu,
                hits: it.hits,
            })
        })
    }

    fn sorted(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        by_function(words, |name, words| {
            let (function, module) = texts(name);
            self.line(&Line::Hist {
                function: &function,
                module,
                tracer: by.tracer,
                cpu: by.vcpu,
                of: by.label(),
                buckets: words.buckets(),
                total: words.sum(by.of),
                missed: words.missed(),
            })
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        if let Some(summary) = summary {
            self.line(&Line::End { summary })?;
        }
        self.flush()
    }
}
