//! JSON Lines: one object for each event.

use std::io::{self, Write};

use serde::Serialize;

use crate::stream::{Context, Header, Summary};

use super::digits::decimal;
use super::gather::Gather;
use super::kept::{Names, Tasks, Who};
use super::sorted::{SortedBy, by_function};
use super::values::{JsonArgs, JsonReturned};
use super::{Called, Entry, Event, Export, Name, Return, Tail, Tracepoint};

/// One JSON object per line and event; `docs/stream.md` lists the keys.
#[derive(Debug)]
pub struct Json<W: Write> {
    out: Gather<W>,
    header: Header,
    tasks: Tasks<Vec<u8>>,
    names: Names<Quoted>,
}

impl<W: Write> Json<W> {
    /// JSON to `out`, which needs no buffer of its own.
    pub fn new(out: W) -> Self {
        let (out, header) = (Gather::new(out), Header::default());
        Self { out, header, tasks: Tasks::default(), names: Names::default() }
    }

    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out.bytes, line)?;
        self.out.bytes.push(b'\n');
        self.out.done()
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let ns = self.header.nanoseconds(entry.timestamp);
        let out = &mut self.out.bytes;
        begin(out, b"{\"event\":\"entry\"", ns);
        task(&mut self.tasks, out, (entry.vcpu, entry.pid, entry.comm))?;
        named(&mut self.names, out, (b",\"function\":", b",\"module\":"), &entry.function)?;
        if let Some(caller) = &entry.caller {
            named(&mut self.names, out, (b",\"caller\":", b",\"caller_module\":"), caller)?;
        }
        text(out, b",\"tracer\":", entry.tracer)?;
        number(out, b",\"depth\":", entry.place.map(|place| place.depth.into()));
        other(out, b",\"context\":", entry.context.map(Shown))?;
        other(out, b",\"args\":", entry.args.map(JsonArgs))?;
        self.ends()
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        let ns = self.header.nanoseconds(ret.timestamp);
        let out = &mut self.out.bytes;
        begin(out, b"{\"event\":\"return\"", ns);
        task(&mut self.tasks, out, (ret.vcpu, ret.pid, ret.comm))?;
        named(&mut self.names, out, (b",\"function\":", b",\"module\":"), &ret.function)?;
        text(out, b",\"tracer\":", ret.tracer)?;
        number(out, b",\"depth\":", Some(ret.depth.into()));
        match ret.duration_ns {
            Some(_) => number(out, b",\"duration_ns\":", ret.duration_ns),
            None => out.extend_from_slice(b",\"duration_ns\":null"),
        }
        other(out, b",\"context\":", ret.context.map(Shown))?;
        other(out, b",\"value\":", ret.value.map(JsonReturned))?;
        self.ends()
    }

    fn tail(&mut self, tail: &Tail<'_>) -> io::Result<()> {
        let ns = self.header.nanoseconds(tail.timestamp);
        let out = &mut self.out.bytes;
        begin(out, b"{\"event\":\"tail\"", ns);
        task(&mut self.tasks, out, (tail.vcpu, tail.pid, tail.comm))?;
        named(&mut self.names, out, (b",\"function\":", b",\"module\":"), &tail.function)?;
        if let Some(target) = &tail.target {
            named(&mut self.names, out, (b",\"target\":", b",\"target_module\":"), target)?;
        }
        text(out, b",\"tracer\":", tail.tracer)?;
        number(out, b",\"depth\":", Some(tail.depth.into()));
        other(out, b",\"context\":", tail.context.map(Shown))?;
        self.ends()
    }

    /// It has no other order than those of calls.
    fn tracepoint(&mut self, event: &Tracepoint<'_>) -> io::Result<()> {
        let ns = self.header.nanoseconds(event.timestamp);
        let out = &mut self.out.bytes;
        begin(out, b"{\"event\":\"event\"", ns);
        task(&mut self.tasks, out, (event.vcpu, event.pid, event.comm))?;
        text(out, b",\"name\":", Some(&texts(&event.event).0))?;
        other(out, b",\"context\":", event.context.map(Shown))?;
        other(out, b",\"fields\":", event.fields.map(JsonArgs))?;
        self.ends()
    }

    fn ends(&mut self) -> io::Result<()> {
        self.out.bytes.extend_from_slice(b"}\n");
        self.out.done()
    }
}

// Of the lines of which there are millions keys are written as they are: serde_json writes the same, by a call for each.

/// The beginning of a line: what it is, and when.
fn begin(out: &mut Vec<u8>, event: &[u8], ns: i128) {
    out.extend_from_slice(event);
    out.extend_from_slice(b",\"ns\":");
    match u64::try_from(ns) {
        Ok(ns) => drop(decimal(out, ns, 0, b' ')),
        // A vector takes all.
        Err(_) => drop(write!(out, "{ns}")),
    }
}

/// The task of a line.
fn task(
    kept: &mut Tasks<Vec<u8>>,
    out: &mut Vec<u8>,
    who: (u32, u32, Option<&str>),
) -> io::Result<()> {
    let (vcpu, pid, comm) = who;
    let who = Who { vcpu, pid, tgid: None, comm };
    if let Some(made) = kept.get(who) {
        out.extend_from_slice(made);
        return Ok(());
    }
    let begin = out.len();
    number(out, b",\"cpu\":", Some(vcpu.into()));
    number(out, b",\"pid\":", Some(pid.into()));
    if comm.is_none() {
        out.extend_from_slice(b",\"comm\":null");
    }
    text(out, b",\"comm\":", comm)?;
    kept.keep(who, out.get(begin..).unwrap_or_default().to_vec());
    Ok(())
}

/// A function in quotes, and its module, or nothing.
type Quoted = [Box<[u8]>; 2];

/// A name, or address without one, and the module, if there is one: behind these.
fn named(
    kept: &mut Names<Quoted>,
    out: &mut Vec<u8>,
    (key, of_module): (&[u8], &[u8]),
    name: &Name<'_>,
) -> io::Result<()> {
    let quoted = |name: &Name<'_>| {
        let quoted = |of: Option<&str>| {
            let mut quoted = Vec::new();
            text(&mut quoted, b"", of).map(|()| quoted.into())
        };
        let (function, module) = texts(name);
        Ok::<Quoted, io::Error>([quoted(Some(&function))?, quoted(module)?])
    };
    let Some([function, module]) = kept.find(name, quoted)? else {
        let (function, module) = texts(name);
        text(out, key, Some(&function))?;
        return text(out, of_module, module);
    };
    out.extend_from_slice(key);
    out.extend_from_slice(function);
    if !module.is_empty() {
        out.extend_from_slice(of_module);
        out.extend_from_slice(module);
    }
    Ok(())
}

/// A number behind its key, if there is one.
fn number(out: &mut Vec<u8>, key: &[u8], number: Option<u64>) {
    if let Some(number) = number {
        out.extend_from_slice(key);
        decimal(out, number, 0, b' ');
    }
}

/// The same of a text.
fn text(out: &mut Vec<u8>, key: &[u8], text: Option<&str>) -> io::Result<()> {
    let Some(text) = text else { return Ok(()) };
    out.extend_from_slice(key);
    let is_plain = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
    if text.bytes().all(is_plain) {
        out.push(b'"');
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
        return Ok(());
    }
    Ok(serde_json::to_writer(out, text)?)
}

/// The same of anything else.
fn other(out: &mut Vec<u8>, key: &[u8], value: Option<impl Serialize>) -> io::Result<()> {
    let Some(value) = value else { return Ok(()) };
    out.extend_from_slice(key);
    Ok(serde_json::to_writer(out, &value)?)
}

/// What other lines are made of.
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
        ns: i128,
        kind: String,
        duration_ns: u64,
        text: &'a str,
    },
    End {
        summary: &'a Summary,
    },
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
                let ns = self.header.nanoseconds(mark.ticks);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU64;

    // A name that a guest has chosen ends its text, or the line.
    #[test]
    fn lines_are_json_whatever_the_guest_calls_its_tasks() {
        let mut tasks = Tasks::default();
        let names = ["cat", "", "a b", "\"", "\\", "\n{", "\u{7f}", "\u{1b}[2J", "ä", "\u{fffd}"];
        for comm in names {
            for ns in [0, 1, -1, i128::from(u64::MAX), i128::from(u64::MAX) * 1000, i128::MIN / 2] {
                let mut out = Vec::new();
                begin(&mut out, b"{\"event\":\"entry\"", ns);
                task(&mut tasks, &mut out, (3, u32::MAX, Some(comm))).unwrap();
                text(&mut out, b",\"tracer\":", Some(comm)).unwrap();
                text(&mut out, b",\"module\":", None).unwrap();
                number(&mut out, b",\"depth\":", Some(u64::MAX));
                other(&mut out, b",\"context\":", Some("d.h..")).unwrap();
                out.push(b'}');
                let line = std::str::from_utf8(&out).unwrap();
                assert!(!line.contains('\n') && !line.contains('\u{1b}'), "{line}");
                let start =
                    format!("{{\"event\":\"entry\",\"ns\":{ns},\"cpu\":3,\"pid\":4294967295,");
                assert!(line.starts_with(&start), "{line}");
                let found: serde_json::Value = serde_json::from_str(line).unwrap();
                assert_eq!((&found["comm"], &found["tracer"]), (&comm.into(), &comm.into()));
                assert_eq!(
                    (&found["depth"], &found["context"]),
                    (&u64::MAX.into(), &"d.h..".into())
                );
                assert_eq!(found.get("module"), None);
            }
        }
        let mut out = Vec::new();
        begin(&mut out, b"{\"event\":\"tail\"", 5);
        task(&mut tasks, &mut out, (0, 0, None)).unwrap();
        assert_eq!(out, b"{\"event\":\"tail\",\"ns\":5,\"cpu\":0,\"pid\":0,\"comm\":null");
    }

    // Nearly all names of lines are those that were written before.
    #[test]
    fn names_are_their_own_whatever_was_written_before() {
        let mut names = Names::default();
        let all = [
            (Some(("vfs_read", "")), 1, ",F\"vfs_read\""),
            (Some(("a\"b", "ext4")), 2, ",F\"a\\\"b\",M\"ext4\""),
            // In the place of the first.
            (Some(("other", "")), 4097, ",F\"other\""),
            (None, 0, ",F\"0xffffffff81000000\""),
        ];
        for (symbol, number, expected) in all.iter().chain(&all) {
            let number = NonZeroU64::new(*number);
            let name = Name { address: 0xffff_ffff_8100_0000, symbol: *symbol, number };
            let mut out = Vec::new();
            for _ in 0..2 {
                out.clear();
                named(&mut names, &mut out, (b",F", b",M"), &name).unwrap();
                assert_eq!(String::from_utf8_lossy(&out), *expected);
            }
        }
    }
}
