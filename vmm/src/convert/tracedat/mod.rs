//! trace.dat, which trace-cmd and KernelShark read. Entries are events of the function tracer,
//! calls those of function_graph, marks and reasons of losses are `trace_marker` prints (marks on
//! vCPU 0), and tracepoints are events with their own fields. Times are nanoseconds since the
//! clock's start.

mod events;
mod file;
mod pages;

use std::fmt::Write as _;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, BufWriter, Write};

use rustc_hash::{FxBuildHasher, FxHashMap};

use super::ground::{Clock, Names};
use crate::export::{Entry, Event, Export, Name, Return, Tasks, Tracepoint, Who};
use crate::stream::{Context, Header, Loss, Mark, Summary};
use events::Events;
use file::{Contents, FUNCTION, GRAPH_ENTRY, GRAPH_EXIT, PRINT};
use pages::Pages;

/// Longest text of a mark; the rest is cut off, as ftrace does.
const TEXT: usize = 1024;

/// The version of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Read by every trace-cmd.
    V6,
    /// Read since trace-cmd 3.0.
    V7,
}

/// trace.dat.
#[derive(Debug)]
pub struct TraceDat {
    out: BufWriter<File>,
    version: Version,
    pages: Pages,
    clock: Clock,
    names: Names,
    tasks: FxHashMap<u32, Box<str>>,
    /// Those of which the names are known.
    recent: Tasks<()>,
    now: u64,
    lost: Vec<u64>,
    events: Events,
    contents: Contents,
}

impl TraceDat {
    /// Writes to `out`, at the end; until then pages are in `scratch`.
    #[must_use]
    pub fn new(out: File, scratch: File, version: Version) -> Self {
        Self {
            out: BufWriter::with_capacity(1 << 18, out),
            version,
            pages: Pages::new(scratch),
            clock: Clock::default(),
            names: Names::new(),
            tasks: FxHashMap::default(),
            recent: Tasks::default(),
            now: 0,
            lost: Vec::new(),
            events: Events::default(),
            contents: Contents::default(),
        }
    }

    fn know(&mut self, name: &Name<'_>) -> io::Result<u64> {
        match self.names.number(name) {
            Some(_) => Ok(name.address),
            None => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the trace has more than a million different addresses, more than any kernel has; \
                 convert fewer functions (-f)",
            )),
        }
    }

    #[inline]
    fn task(&mut self, vcpu: u32, pid: u32, comm: Option<&str>) {
        let who = Who { vcpu, pid, tgid: None, comm };
        if self.recent.get(who).is_some() {
            return;
        }
        let Some(comm) = comm.filter(|_| pid != 0) else { return };
        match self.tasks.get_mut(&pid) {
            Some(known) if **known == *comm => {}
            Some(known) => {
                *known = comm.into();
                // Another vCPU may have it by its former name.
                self.recent = Tasks::default();
            }
            // A stream has names for pids below 4 million only.
            None => {
                self.tasks.insert(pid, comm.into());
            }
        }
        self.recent.keep(who, ());
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        self.task(entry.vcpu, entry.pid, entry.comm);
        let at = self.clock.ns(entry.timestamp);
        self.now = self.now.max(at);
        let function = self.know(&entry.function)?;
        if let Some(place) = entry.place {
            let mut event = [0; 20];
            head(&mut event, GRAPH_ENTRY, entry.pid, entry.context);
            event[8..16].copy_from_slice(&function.to_le_bytes());
            event[16..].copy_from_slice(&place.depth.to_le_bytes());
            return self.pages.event(entry.vcpu, at, &event);
        }
        let caller = entry.caller.as_ref().map_or(Ok(0), |caller| self.know(caller))?;
        let mut event = [0; 24];
        head(&mut event, FUNCTION, entry.pid, entry.context);
        event[8..16].copy_from_slice(&function.to_le_bytes());
        event[16..].copy_from_slice(&caller.to_le_bytes());
        self.pages.event(entry.vcpu, at, &event)
    }

    fn ret(&mut self, ret: &Return<'_>) -> io::Result<()> {
        self.task(ret.vcpu, ret.pid, ret.comm);
        let at = self.clock.ns(ret.timestamp);
        self.now = self.now.max(at);
        let called = at.saturating_sub(ret.duration_ns.unwrap_or(0));
        let mut event = [0; 44];
        head(&mut event, GRAPH_EXIT, ret.pid, ret.context);
        event[8..16].copy_from_slice(&self.know(&ret.function)?.to_le_bytes());
        event[16..24].copy_from_slice(&called.to_le_bytes());
        event[24..32].copy_from_slice(&at.to_le_bytes());
        event[40..].copy_from_slice(&ret.depth.to_le_bytes());
        self.pages.event(ret.vcpu, at, &event)
    }

    fn tracepoint(&mut self, event: &Tracepoint<'_>) -> io::Result<()> {
        self.task(event.vcpu, event.pid, event.comm);
        let at = self.clock.ns(event.timestamp);
        self.now = self.now.max(at);
        let (id, record) = self.events.record(event)?;
        head(record, id, event.pid, event.context);
        self.pages.event(event.vcpu, at, record)
    }

    fn print(&mut self, vcpu: u32, at: u64, text: &str) -> io::Result<()> {
        let text = &text[..text.floor_char_boundary(TEXT)];
        let mut event = vec![0; 16];
        head(&mut event, PRINT, 0, None);
        event.extend(text.bytes().map(|byte| if byte == 0 { b'?' } else { byte }));
        event.push(0);
        event.resize(event.len().next_multiple_of(4), 0);
        self.pages.event(vcpu, at, &event)
    }

    fn loss(&mut self, loss: &Loss) -> io::Result<()> {
        if let Some(lost) = usize::try_from(loss.vcpu).ok().and_then(|it| self.lost.get_mut(it)) {
            *lost = lost.saturating_add(loss.count);
        }
        self.pages.lost(loss.vcpu, loss.count)?;
        // The page that says so must have an event.
        let text = format!("{} records lost: {}", loss.count, loss.reason);
        self.print(loss.vcpu, self.now, &text)
    }

    fn mark(&mut self, mark: &Mark) -> io::Result<()> {
        let at = self.clock.ns(mark.ticks);
        let mut text = mark.kind.to_string();
        if mark.duration_ns > 0 {
            // A text takes all.
            let _ = write!(text, " {}.{:03} us", mark.duration_ns / 1000, mark.duration_ns % 1000);
        }
        if !mark.text.is_empty() {
            text.push_str(": ");
            text.extend(mark.text.chars().map(|c| if c.is_control() { '?' } else { c }));
        }
        self.print(0, at, &text)
    }

    /// All addresses that were seen, in order. A reader takes an address for the last one that is
    /// not above it, so that those in a row with one name need only one line.
    fn kallsyms(&self) -> String {
        let mut all: Vec<_> = self.names.iter().enumerate().collect();
        // Of several names of an address the last one counts.
        all.sort_by_key(|(number, known)| (known.address, std::cmp::Reverse(*number)));
        all.dedup_by_key(|(_, known)| known.address);
        all.dedup_by(|(_, next), (_, known)| known.symbol.is_some() && next.symbol == known.symbol);
        let mut text = String::new();
        for (_, known) in all {
            let address = known.address;
            // A text takes all. Spaces would end the name.
            let _ = match &known.symbol {
                Some((symbol, module)) => {
                    let symbol = symbol.replace(' ', "_");
                    let module = module.replace(' ', "_");
                    if module.is_empty() {
                        writeln!(text, "{address:016x} t {symbol}")
                    } else {
                        writeln!(text, "{address:016x} t {symbol}\t[{module}]")
                    }
                }
                None => writeln!(text, "{address:016x} t {address:#x}"),
            };
        }
        text
    }
}

/// The fields that all events have.
fn head(event: &mut [u8], kind: u16, pid: u32, context: Option<Context>) {
    let Context { flags, depths } = context.unwrap_or_default();
    event[..2].copy_from_slice(&kind.to_le_bytes());
    event[2..4].copy_from_slice(&[flags, depths]);
    event[4..8].copy_from_slice(&pid.to_le_bytes());
}

impl Export for TraceDat {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        self.pages.begin(header.vcpus);
        self.lost = vec![0; usize::try_from(header.vcpus).unwrap_or(0)];
        let no_null = |text: &str| text.replace('\0', "?");
        let mut hasher = FxBuildHasher.build_hasher();
        hasher.write_u64(header.clock_start);
        hasher.write(header.release.as_bytes());
        self.contents = Contents {
            vcpus: header.vcpus,
            uname: no_null(&format!("Linux {} {}", header.release, header.arch)),
            version: no_null(&format!("vmtrace {}", header.vmtrace_version)),
            id: hasher.finish(),
            ..Contents::default()
        };
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            // What is called now is shown inside of it; what has no end stays open.
            Event::Tail(_) | Event::Unfinished(_) => Ok(()),
            Event::Tracepoint(event) => self.tracepoint(event),
            Event::Loss(loss) => self.loss(loss),
            Event::Mark(mark) => self.mark(mark),
        }
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        self.pages.finish()?;
        self.contents.kallsyms = self.kallsyms();
        self.contents.systems = std::mem::take(&mut self.events).into_systems();
        let mut tasks: Vec<_> = self.tasks.iter().collect();
        tasks.sort_unstable();
        self.contents.cmdlines = tasks.iter().fold(String::new(), |mut text, (pid, comm)| {
            // A text takes all.
            let _ = writeln!(text, "{pid} {comm}");
            text
        });
        let lost = (0..).zip(&self.lost);
        let stats = lost.map(|(vcpu, lost): (u32, _)| format!("CPU: {vcpu}\noverrun: {lost}\n"));
        self.contents.stats = stats.collect();
        match self.version {
            Version::V6 => file::version_6(&mut self.out, &self.contents, &self.pages)?,
            Version::V7 => file::version_7(&mut self.out, &self.contents, &self.pages)?,
        }
        self.out.flush()
    }
}
