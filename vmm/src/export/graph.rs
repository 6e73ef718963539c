//! Text as ftrace's function_graph tracer prints it.

use std::collections::VecDeque;
use std::io::{self, Write};

use crate::stream::{Context, Header, HostExit, Summary};

use super::digits::{decimal, pad, six};
use super::gather::Gather;
use super::sorted::SortedBy;
use super::tables::Tables;
use super::text::{Clock, TIME_COLUMN, first_lines, legend, loss, mark, name};
use super::values::{write_args, write_returned};
use super::{Called, Entry, Event, Export, Name, Return, Tracepoint, Unfinished};

/// Lines that may wait for an entry, of which the next record of its vCPU tells whether it calls
/// anything.
const WAITING: usize = 4096;
/// Bytes of text that may.
const WAITING_TEXT: usize = 16 << 20;
/// For how many seconds of the trace they may: whoever looks on does not know why.
const PATIENCE: u64 = 1;
/// Deeper calls are not indented further; a kernel's stack has no room for as many.
const INDENTED: u32 = 256;
/// Bytes that a line mostly takes.
const LINE: usize = 128;
/// Those of the column of durations.
const DURATION: usize = 14;
/// Vectors that are kept for lines to come, and how large each may be.
const SPARE: usize = 2 * WAITING;
const LARGE: usize = 512;
/// Where the columns of the state of the CPU begin, of a vCPU with one digit.
const COLUMNS: usize = 5;
/// Width of a task in the lines that tell of a switch.
const TASK: usize = 14;

/// Text as ftrace's function_graph tracer prints it.
#[derive(Debug)]
pub struct Graph<W> {
    out: Gather<W>,
    waiting: VecDeque<Waiting>,
    /// Lines that waited and were taken out, so far.
    taken: u64,
    /// Bytes of the lines that wait.
    waiting_text: usize,
    /// Empty ones.
    spare: Vec<Vec<u8>>,
    cpus: Vec<Cpu>,
    clock: Clock,
    patience: u64,
    /// Width of a vCPU's number.
    width: usize,
    /// Whether records tell the state of the CPU.
    told: bool,
    /// Shown at the end.
    tables: Tables,
}

/// A vCPU's column.
#[derive(Clone, Debug, Default)]
struct Cpu {
    /// The last task and its name.
    task: Option<(u32, String)>,
    /// The number of the waiting entry, counted as `taken`.
    entry: Option<u64>,
    /// The call that was opened last, by depth.
    open: Vec<u64>,
}

/// What is not written yet.
#[derive(Debug)]
enum Waiting {
    Lines(Vec<u8>),
    Entry {
        vcpu: u32,
        frame: u64,
        depth: u32,
        timestamp: u64,
        /// The line without its end, and the switch of tasks before it.
        text: Vec<u8>,
        /// Where its duration is to be.
        at: usize,
    },
}

impl Waiting {
    /// Bytes of its text.
    fn text(&self) -> usize {
        match self {
            Self::Lines(text) | Self::Entry { text, .. } => text.len(),
        }
    }
}

impl<W: Write> Graph<W> {
    /// Text to `out`, which needs no buffer of its own.
    pub fn new(out: W) -> Self {
        Self {
            out: Gather::new(out),
            waiting: VecDeque::new(),
            taken: 0,
            waiting_text: 0,
            spare: Vec::new(),
            cpus: Vec::new(),
            clock: Clock::of(&Header::default()),
            patience: u64::MAX,
            width: 1,
            told: false,
            tables: Tables::default(),
        }
    }

    /// The output.
    pub fn into_inner(self) -> W {
        self.out.into_inner()
    }

    /// A vector for some text: a new one for each line took a third of the time.
    fn spare(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_else(|| Vec::with_capacity(LINE))
    }

    fn give_back(&mut self, mut text: Vec<u8>) {
        if self.spare.len() < SPARE && text.capacity() <= LARGE {
            text.clear();
            self.spare.push(text);
        }
    }

    fn cpu(&mut self, vcpu: u32) -> &mut Cpu {
        let index = usize::try_from(vcpu).unwrap_or(0);
        if self.cpus.len() <= index {
            self.cpus.resize(index + 1, Cpu::default());
        }
        &mut self.cpus[index]
    }

    fn column(&self, line: &mut Vec<u8>, vcpu: u32) {
        line.push(b' ');
        decimal(line, u64::from(vcpu), self.width, b' ');
        line.extend_from_slice(b") ");
    }

    /// Lines that tell that another task runs on the vCPU, if so.
    fn switch(&mut self, vcpu: u32, pid: u32, comm: Option<&str>) -> Vec<u8> {
        let mut lines = self.spare();
        let comm = comm.unwrap_or("<...>");
        let last = &mut self.cpu(vcpu).task;
        if last.as_ref().is_some_and(|(known, _)| *known == pid) {
            return lines;
        }
        if let Some((before, name)) = last.replace((pid, comm.to_owned())) {
            lines.extend_from_slice(b" ------------------------------------------\n");
            self.column(&mut lines, vcpu);
            task(&mut lines, &name, before);
            lines.extend_from_slice(b" => ");
            task(&mut lines, comm, pid);
            lines.extend_from_slice(b"\n ------------------------------------------\n\n");
        }
        lines
    }

    /// A line, but for its end. Returns where its duration is.
    fn line(
        &self,
        out: &mut Vec<u8>,
        (vcpu, context): (u32, Option<Context>),
        duration: Option<u64>,
        depth: u32,
    ) -> usize {
        self.column(out, vcpu);
        if self.told {
            out.push(b' ');
            // Of what was not seen nobody knows it.
            out.extend_from_slice(&context.map_or(*b"     ", Context::columns));
            out.extend_from_slice(b" | ");
        }
        let at = out.len();
        match duration {
            Some(nanoseconds) => write_duration(out, nanoseconds),
            None => pad(out, DURATION),
        }
        out.extend_from_slice(b"|  ");
        pad(out, 2 * usize::try_from(depth.min(INDENTED)).unwrap_or(0));
        at
    }

    /// What is behind all that waits.
    fn push(&mut self, lines: Vec<u8>) {
        if self.waiting.is_empty() {
            self.out.bytes.extend_from_slice(&lines);
        } else if !lines.is_empty() {
            self.wait(Waiting::Lines(lines));
            return;
        }
        self.give_back(lines);
    }

    fn wait(&mut self, waiting: Waiting) {
        self.waiting_text += waiting.text();
        self.waiting.push_back(waiting);
    }

    /// Decides on the entry of a vCPU that waits, if there is one. What is known of it, if it was
    /// the last record's: how the line ends.
    fn decide(&mut self, vcpu: u32, leaf: Option<(u64, Option<u64>, &[u8])>) -> bool {
        let Some(number) = self.cpu(vcpu).entry.take() else { return false };
        let index = usize::try_from(number.wrapping_sub(self.taken)).unwrap_or(usize::MAX);
        let Some(waiting) = self.waiting.get_mut(index) else { return false };
        let before = waiting.text();
        let Waiting::Entry { frame, depth, text, at, .. } = waiting else { return false };
        let (frame, depth, mut line) = (*frame, *depth, std::mem::take(text));
        let leaf = leaf.filter(|leaf| leaf.0 == frame);
        if let Some(nanoseconds) = leaf.and_then(|leaf| leaf.1) {
            put_duration(&mut line, *at, nanoseconds);
        }
        line.extend_from_slice(leaf.map_or(b" {\n", |leaf| leaf.2));
        self.waiting_text = self.waiting_text - before + line.len();
        *waiting = Waiting::Lines(line);
        if leaf.is_none() && depth < INDENTED {
            let open = &mut self.cpu(vcpu).open;
            let index = usize::try_from(depth).unwrap_or(0);
            if open.len() <= index {
                open.resize(index + 1, 0);
            }
            open[index] = frame;
        }
        self.settle();
        leaf.is_some()
    }

    /// Writes what need not wait any more.
    fn settle(&mut self) {
        while let Some(Waiting::Lines(lines)) = self.waiting.front_mut() {
            let lines = std::mem::take(lines);
            self.out.bytes.extend_from_slice(&lines);
            self.waiting_text -= lines.len();
            self.waiting.pop_front();
            self.taken += 1;
            self.give_back(lines);
        }
    }

    /// No entry holds up others for too long.
    fn hurry(&mut self, now: u64) {
        while let Some(&Waiting::Entry { vcpu, timestamp, .. }) = self.waiting.front() {
            let late = now.saturating_sub(timestamp) > self.patience;
            let many = self.waiting.len() > WAITING || self.waiting_text > WAITING_TEXT;
            if !late && !many {
                break;
            }
            self.decide(vcpu, None);
        }
    }

    fn entry(&mut self, entry: &Entry<'_>) {
        let Entry { vcpu, pid, comm, timestamp, context, .. } = *entry;
        self.decide(vcpu, None);
        let mut text = self.switch(vcpu, pid, comm);
        let depth = entry.place.map_or(0, |place| place.depth);
        let at = self.line(&mut text, (vcpu, context), None, depth);
        name(&mut text, &entry.function);
        match &entry.args {
            Some(args) => write_args(&mut text, args),
            None => text.extend_from_slice(b"()"),
        }
        if let Some(place) = entry.place {
            self.cpu(vcpu).entry = Some(self.taken + self.waiting.len() as u64);
            self.wait(Waiting::Entry { vcpu, frame: place.frame, depth, timestamp, text, at });
        } else {
            // Nobody knows what it calls.
            text.extend_from_slice(b";\n");
            self.push(text);
        }
        self.hurry(timestamp);
    }

    fn ret(&mut self, ret: &Return<'_>) {
        let Return { vcpu, pid, comm, depth, duration_ns, .. } = *ret;
        let mut value = Vec::new();
        if let Some(returned) = &ret.value {
            value.extend_from_slice(b" = ");
            write_returned(&mut value, returned);
        }
        let mut leaf = Vec::new();
        if !value.is_empty() {
            comment(&mut leaf, b"; /*", &value);
        }
        let ending = if leaf.is_empty() { b";\n" } else { &*leaf };
        let decided = self.decide(vcpu, ret.frame.map(|frame| (frame, duration_ns, ending)));
        if ret.whole {
            // A line of its own, as of one in which nothing was called.
            let mut lines = self.switch(vcpu, pid, comm);
            self.line(&mut lines, (vcpu, ret.context), duration_ns, depth);
            name(&mut lines, &ret.function);
            lines.extend_from_slice(b"()");
            lines.extend_from_slice(ending);
            self.push(lines);
        } else if !decided {
            let mut lines = self.switch(vcpu, pid, comm);
            self.line(&mut lines, (vcpu, ret.context), duration_ns, depth);
            let index = usize::try_from(depth).unwrap_or(usize::MAX);
            let opened = self.cpu(vcpu).open.get(index).copied();
            if ret.frame.is_none() || opened != ret.frame {
                close(&mut lines, &ret.function, &value);
            } else if value.is_empty() {
                lines.extend_from_slice(b"}\n");
            } else {
                comment(&mut lines, b"} /*", &value);
            }
            self.push(lines);
        }
        self.hurry(ret.timestamp);
    }

    /// A comment inside of what is open, as ftrace has it.
    fn tracepoint(&mut self, event: &Tracepoint<'_>) {
        let Tracepoint { vcpu, pid, comm, timestamp, .. } = *event;
        self.decide(vcpu, None);
        // What no task does is no switch of tasks.
        let mut lines =
            if pid == HostExit::PID { Vec::new() } else { self.switch(vcpu, pid, comm) };
        let depth = u32::try_from(self.cpu(vcpu).open.len()).unwrap_or(0);
        self.line(&mut lines, (vcpu, event.context), None, depth);
        lines.extend_from_slice(b"/* ");
        let full = event.event.symbol.map_or("", |(full, _)| full);
        let own = full.split_once(':').map_or(full, |(_, name)| name);
        let text = event.text().replace("*/", "* /");
        lines.extend_from_slice(format!("{own}: {text} */\n").as_bytes());
        self.push(lines);
        self.hurry(timestamp);
    }

    fn unfinished(&mut self, left: &Unfinished<'_>) {
        let ending = (left.place.frame, None, &b"; /* unfinished */\n"[..]);
        if !self.decide(left.vcpu, Some(ending)) {
            let mut lines = Vec::new();
            self.line(&mut lines, (left.vcpu, None), None, left.place.depth);
            close(&mut lines, &left.function, b", unfinished");
            self.push(lines);
        }
    }
}

impl<W: Write> Export for Graph<W> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        self.patience = header.clock_hz.saturating_mul(PATIENCE);
        self.width = header.vcpus.saturating_sub(1).to_string().len();
        first_lines(&mut self.out.bytes, "function_graph", header)?;
        self.told = Context::is_in(header);
        if self.told {
            legend(&mut self.out.bytes, COLUMNS);
        }
        self.out.bytes.extend_from_slice(if self.told {
            b"# CPU|||||  DURATION                  FUNCTION CALLS\n\
              # |  |||||   |   |                     |   |   |   |\n"
        } else {
            b"# CPU  DURATION                  FUNCTION CALLS\n\
              # |     |   |                     |   |   |   |\n"
        });
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            // What it jumped to is shown in it, as ftrace does.
            Event::Tail(_) => {}
            Event::Unfinished(left) => self.unfinished(left),
            Event::Tracepoint(event) => self.tracepoint(event),
            Event::Loss(lost) => {
                self.decide(lost.vcpu, None);
                let mut lines = Vec::new();
                loss(&mut lines, lost);
                self.push(lines);
            }
            Event::Mark(made) => {
                let mut lines = Vec::new();
                mark(&mut lines, self.clock, TIME_COLUMN, made);
                self.push(lines);
                self.hurry(made.ticks);
            }
        }
        self.out.done()
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        self.tables.counted.add(vcpu, tracer, hits);
        Ok(())
    }

    fn callers(
        &mut self,
        _: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        self.tables.called.add(tracer, hits);
        Ok(())
    }

    fn sorted(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        self.tables.sorted.add(by, words);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        while let Some(&Waiting::Entry { vcpu, .. }) = self.waiting.front() {
            self.decide(vcpu, None);
        }
        self.tables.write(&mut self.out)?;
        self.flush()
    }
}

/// The end of a call whose beginning is not above.
fn close(out: &mut Vec<u8>, function: &Name<'_>, how: &[u8]) {
    out.extend_from_slice(b"} /* ");
    name(out, function);
    comment(out, b"", how);
}

/// The end of a line with a comment.
fn comment(out: &mut Vec<u8>, before: &[u8], text: &[u8]) {
    out.extend_from_slice(before);
    out.extend_from_slice(text);
    out.extend_from_slice(b" */\n");
}

/// A task in the middle of its column, its name cut as ftrace does.
fn task(out: &mut Vec<u8>, comm: &str, pid: u32) {
    let short = &comm[..comm.floor_char_boundary(7)];
    let text = format!("{short}-{pid}");
    let spaces = TASK.saturating_sub(text.len());
    pad(out, spaces / 2);
    out.extend_from_slice(text.as_bytes());
    pad(out, spaces - spaces / 2);
}

/// Writes a duration to its place in a line.
fn put_duration(line: &mut Vec<u8>, at: usize, nanoseconds: u64) {
    let end = line.len();
    write_duration(line, nanoseconds);
    if line.len() == end + DURATION {
        line.copy_within(end.., at);
        line.truncate(end);
    } else {
        let duration = line.split_off(end);
        line.splice(at..at + DURATION, duration);
    }
}

/// ftrace's marks for durations that are longer than so many nanoseconds.
const MARKS: [(u64, u8); 6] = [
    (1_000_000_000, b'$'),
    (100_000_000, b'@'),
    (10_000_000, b'*'),
    (1_000_000, b'#'),
    (100_000, b'!'),
    (10_000, b'+'),
];

/// A duration in microseconds, with ftrace's mark for long ones: [`DURATION`] characters, if that is enough.
fn write_duration(out: &mut Vec<u8>, nanoseconds: u64) {
    let mark = MARKS.iter().find(|(limit, _)| nanoseconds > *limit);
    out.push(mark.map_or(b' ', |(_, mark)| *mark));
    out.push(b' ');
    let mut length = decimal(out, nanoseconds / 1000, 0, b' ');
    // Not more than seven digits and a point.
    let digits = 7usize.saturating_sub(length).min(3);
    if digits > 0 {
        let [.., a, b, c] = six(nanoseconds % 1000);
        out.push(b'.');
        out.extend_from_slice(&[a, b, c][..digits]);
        length += 1 + digits;
    }
    out.extend_from_slice(b" us ");
    pad(out, 8usize.saturating_sub(length));
}

#[cfg(test)]
mod tests {
    use super::*;

    // Beside lines of a kernel's.
    #[test]
    fn durations_are_those_of_ftrace() {
        let shown = |nanoseconds| {
            let mut out = Vec::new();
            write_duration(&mut out, nanoseconds);
            String::from_utf8(out).expect("ASCII")
        };
        assert_eq!(shown(120), "  0.120 us    ");
        assert_eq!(shown(10_000), "  10.000 us   ");
        assert_eq!(shown(10_001), "+ 10.001 us   ");
        assert_eq!(shown(123_456), "! 123.456 us  ");
        assert_eq!(shown(1_234_567), "# 1234.567 us ");
        assert_eq!(shown(12_345_678), "* 12345.67 us ");
        assert_eq!(shown(123_456_789), "@ 123456.7 us ");
        assert_eq!(shown(1_234_567_891), "$ 1234567 us  ");
        assert_eq!(shown(u64::MAX), "$ 18446744073709551 us ");
    }
}
