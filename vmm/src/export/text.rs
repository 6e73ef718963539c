//! Text as ftrace's function tracer prints it.
//!
//! The layout is that of a kernel with `noirq-info` in `trace_options`, or, if records have the
//! state of the CPU, with `irq-info`, the default of most kernels.

use std::io::{self, Write};

use crate::stream::{Context, Header, Loss, Mark, Summary};

use super::digits::{decimal, digits, pad, six};
use super::gather::Gather;
use super::sorted::SortedBy;
use super::tables::Tables;
use super::values::write_args;
use super::{Called, Entry, Event, Export, Name, Tracepoint, printable};

/// Column of the time stamps.
pub(super) const TIME_COLUMN: usize = 33;
/// What the columns of the state of the CPU take, before the time.
const CONTEXT: usize = 5;

/// Text as ftrace's function tracer prints it.
#[derive(Debug)]
pub struct Text<W> {
    out: Gather<W>,
    clock: Clock,
    times: Times,
    /// The last tasks, by vCPU.
    tasks: [Who; VCPUS],
    /// Whether records tell the state of the CPU.
    told: bool,
    /// Whether it was said that returns are not printed.
    said: bool,
    /// Shown at the end.
    tables: Tables,
}

impl<W: Write> Text<W> {
    /// Text to `out`, which needs no buffer of its own.
    pub fn new(out: W) -> Self {
        let clock = Clock { start: 0, hz: 1 };
        let (times, tasks) = (Times::of(clock), Default::default());
        let (out, tables) = (Gather::new(out), Tables::default());
        Self { out, clock, times, tasks, told: false, said: false, tables }
    }

    /// The output.
    pub fn into_inner(self) -> W {
        self.out.into_inner()
    }

    /// Who, where, in which state and when.
    fn front(&mut self, who: (Option<&str>, u32), vcpu: u32, context: Option<Context>, at: u64) {
        let (line, (comm, pid)) = (&mut self.out.bytes, who);
        let comm = comm.unwrap_or("<...>").as_bytes();
        let place = usize::try_from(vcpu).unwrap_or(0) % VCPUS;
        if let Some(task) = self.tasks.get_mut(place) {
            // Most records are of the task of the one before.
            let is_it = (task.pid, task.vcpu) == (pid, vcpu) && task.comm == comm;
            if !is_it || task.text.is_empty() {
                *task = Who::new(comm, pid, vcpu);
            }
            line.extend_from_slice(&task.text);
        }
        if let Some(context) = context {
            line.extend_from_slice(&context.columns());
        }
        line.push(b' ');
        self.times.write(line, at);
    }

    /// Without the system, as ftrace has it.
    fn tracepoint(&mut self, event: &Tracepoint<'_>) {
        self.front((event.comm, event.pid), event.vcpu, event.context, event.timestamp);
        let line = &mut self.out.bytes;
        match event.event.symbol {
            Some((full, _)) => {
                let name = full.split_once(':').map_or(full, |(_, name)| name);
                line.extend_from_slice(name.as_bytes());
            }
            None => name(line, &event.event),
        }
        line.extend_from_slice(b": ");
        line.extend_from_slice(event.text().as_bytes());
        line.push(b'\n');
    }

    fn entry(&mut self, entry: &Entry<'_>) {
        self.front((entry.comm, entry.pid), entry.vcpu, entry.context, entry.timestamp);
        let line = &mut self.out.bytes;
        name(line, &entry.function);
        if let Some(args) = &entry.args {
            write_args(line, args);
        }
        if let Some(caller) = &entry.caller {
            line.extend_from_slice(b" <-");
            name(line, caller);
        }
        line.push(b'\n');
    }

    /// This form has no place for returns.
    fn no_returns(&mut self) {
        if !std::mem::replace(&mut self.said, true) {
            let said = b"# returns are not printed in this form: see --format graph\n";
            self.out.bytes.extend_from_slice(said);
        }
    }
}

impl<W: Write> Export for Text<W> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.clock = Clock::of(header);
        self.times = Times::of(self.clock);
        first_lines(&mut self.out.bytes, "function", header)?;
        self.told = Context::is_in(header);
        if self.told {
            legend(&mut self.out.bytes, TIME_COLUMN - 2);
        }
        self.out.bytes.extend_from_slice(if self.told {
            b"#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION\n\
              #              | |         |   |||||     |         |\n"
        } else {
            b"#           TASK-PID     CPU#     TIMESTAMP  FUNCTION\n\
              #              | |         |         |         |\n"
        });
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(_) | Event::Tail(_) => self.no_returns(),
            Event::Unfinished(_) => {}
            Event::Tracepoint(event) => self.tracepoint(event),
            Event::Loss(lost) => loss(&mut self.out.bytes, lost),
            Event::Mark(made) => {
                let column = TIME_COLUMN + if self.told { CONTEXT } else { 0 };
                mark(&mut self.out.bytes, self.clock, column, made);
            }
        }
        self.out.done()
    }

    fn looks_at_calls(&self) -> bool {
        false
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
        self.tables.write(&mut self.out)?;
        self.flush()
    }
}

/// What every text begins with.
pub(super) fn first_lines(out: &mut Vec<u8>, tracer: &str, header: &Header) -> io::Result<()> {
    let Header { arch, clock, clock_hz, release, vcpus, vmtrace_version, .. } = header;
    let [arch, clock, release, version] =
        [arch, clock, release, vmtrace_version].map(|text| printable(text));
    let plural = if *vcpus == 1 { "" } else { "s" };
    write!(
        out,
        "# tracer: {tracer}\n\
         #\n\
         # vmtrace {version}: Linux {release} ({arch}), {vcpus} vCPU{plural}, \
         clock {clock} at {clock_hz} Hz\n\
         #\n"
    )
}

/// What the columns of the state of the CPU are, of which the first is this one, as ftrace has it.
pub(super) fn legend(out: &mut Vec<u8>, column: usize) {
    let lines = [
        "  _-----=> irqs-off/BH-disabled",
        " / _----=> need-resched",
        "| / _---=> hardirq/softirq",
        "|| / _--=> preempt-depth",
        "||| / _-=> migrate-disable",
        "|||| /",
    ];
    for line in lines {
        out.push(b'#');
        pad(out, column - 1);
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
}

/// Says that records are missing, as ftrace does.
pub(super) fn loss(out: &mut Vec<u8>, loss: &Loss) {
    out.extend_from_slice(b"CPU:");
    decimal(out, u64::from(loss.vcpu), 0, b' ');
    out.extend_from_slice(b" [LOST ");
    decimal(out, loss.count, 0, b' ');
    out.extend_from_slice(b" EVENTS]\n");
}

/// Says what happened, in a comment.
pub(super) fn mark(out: &mut Vec<u8>, clock: Clock, column: usize, mark: &Mark) {
    out.push(b'#');
    pad(out, column - 1);
    clock.write(out, mark.ticks);
    out.extend_from_slice(format!(": {}", mark.kind).as_bytes());
    if mark.duration_ns > 0 {
        out.push(b' ');
        out.extend_from_slice(milliseconds(mark.duration_ns).as_bytes());
    }
    if !mark.text.is_empty() {
        out.extend_from_slice(b": ");
        out.extend_from_slice(printable(&mark.text).as_bytes());
    }
    out.push(b'\n');
}

/// Ticks to seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    start: u64,
    hz: u64,
}

impl Clock {
    pub(super) fn of(header: &Header) -> Self {
        Self { start: header.clock_start, hz: header.clock_hz.max(1) }
    }

    /// Writes seconds with six digits after the point, rounded to the nearest as ftrace does.
    fn write(self, out: &mut Vec<u8>, ticks: u64) {
        let since = ticks.abs_diff(self.start);
        let (mut seconds, rest) = (since / self.hz, since % self.hz);
        let hz = u128::from(self.hz);
        // The rest is below one second, so that this fits whatever the rate is.
        let micros = match rest.checked_mul(1_000_000) {
            Some(product) if self.hz < 1 << 40 => (product + self.hz / 2) / self.hz,
            _ => u64::try_from((u128::from(rest) * 1_000_000 + hz / 2) / hz).unwrap_or(0),
        };
        seconds += micros / 1_000_000;
        if ticks < self.start {
            // Before the clock's start: rare, and never seen from a kernel.
            let text = format!("-{seconds}");
            pad(out, 5usize.saturating_sub(text.len()));
            out.extend_from_slice(text.as_bytes());
        } else {
            decimal(out, seconds, 5, b' ');
        }
        out.push(b'.');
        decimal(out, micros % 1_000_000, 6, b'0');
    }
}

/// vCPUs of which the last task is kept.
const VCPUS: usize = 16;

/// A task on a vCPU, as lines begin with it.
#[derive(Debug, Default)]
struct Who {
    comm: Vec<u8>,
    pid: u32,
    vcpu: u32,
    /// Empty: nobody.
    text: Vec<u8>,
}

impl Who {
    fn new(comm: &[u8], pid: u32, vcpu: u32) -> Self {
        let mut text = Vec::with_capacity(48);
        pad(&mut text, 16usize.saturating_sub(comm.len()));
        text.extend_from_slice(comm);
        text.push(b'-');
        let length = decimal(&mut text, u64::from(pid), 0, b' ');
        pad(&mut text, 7usize.saturating_sub(length));
        text.extend_from_slice(b" [");
        decimal(&mut text, u64::from(vcpu), 3, b'0');
        text.extend_from_slice(b"] ");
        Self { comm: comm.to_owned(), pid, vcpu, text }
    }
}

/// Writes times, of which most are in the second of the one before.
#[derive(Clone, Copy, Debug)]
struct Times {
    clock: Clock,
    /// Ticks from the clock's start to that second, of which this is the number.
    begins: u64,
    second: [u8; 5],
    /// 2^64 divided by the clock's rate; 0 where the short way cannot be gone.
    inverse: u64,
}

impl Times {
    fn of(clock: Clock) -> Self {
        // Below, a second as microseconds fits into 60 bits.
        let inverse = if clock.hz < 1 << 40 { u64::MAX / clock.hz.max(1) } else { 0 };
        Self { clock, begins: 0, second: *b"    0", inverse }
    }

    /// As [`Clock::write`], and what stands behind a time.
    #[inline]
    fn write(&mut self, out: &mut Vec<u8>, ticks: u64) {
        let hz = self.clock.hz;
        let since = ticks.checked_sub(self.clock.start);
        if let Some(rest) = since.and_then(|since| since.checked_sub(self.begins))
            && rest < hz
            && self.inverse != 0
        {
            let product = rest * 1_000_000 + hz / 2;
            let estimate = (u128::from(product) * u128::from(self.inverse)) >> 64;
            let mut micros = u64::try_from(estimate).unwrap_or(0);
            // It may be one too few.
            micros += u64::from(product - micros * hz >= hz);
            if micros < 1_000_000 {
                let mut text = *b"00000.000000: ";
                text[..5].copy_from_slice(&self.second);
                text[6..12].copy_from_slice(&six(micros));
                out.extend_from_slice(&text);
                return;
            }
        }
        self.clock.write(out, ticks);
        out.extend_from_slice(b": ");
        if let Some(since) = ticks.checked_sub(self.clock.start)
            && let (second, start) = digits(since / hz, b' ')
            && start >= 15
            && let Some(&last) = second.last_chunk()
        {
            (self.begins, self.second) = (since / hz * hz, last);
        }
    }
}

pub(super) fn name(out: &mut Vec<u8>, name: &Name<'_>) {
    match name.symbol {
        Some((symbol, module)) => {
            out.extend_from_slice(symbol.as_bytes());
            if !module.is_empty() {
                out.extend_from_slice(b" [");
                out.extend_from_slice(module.as_bytes());
                out.push(b']');
            }
        }
        None => out.extend_from_slice(format!("{:#x}", name.address).as_bytes()),
    }
}

/// As ftrace shows times, in seconds.
pub(crate) fn seconds(nanoseconds: u64) -> String {
    format!("{}.{:06}", nanoseconds / 1_000_000_000, nanoseconds / 1_000 % 1_000_000)
}

/// Nanoseconds as milliseconds with three digits, rounded to the nearest.
pub(super) fn milliseconds(nanoseconds: u64) -> String {
    let micros = nanoseconds / 1000 + u64::from(nanoseconds % 1000 >= 500);
    format!("{}.{:03} ms", micros / 1000, micros % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(start: u64, hz: u64, ticks: u64) -> String {
        let mut out = Vec::new();
        Clock { start, hz }.write(&mut out, ticks);
        String::from_utf8(out).expect("ASCII")
    }

    // The short way is gone by nearly all lines: a microsecond that differs is another time.
    #[test]
    fn times_are_those_of_the_clock_whichever_way_they_are_written() {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for hz in [1, 3, 1000, 24_000_000, 999_999_937, 2_899_999_000, (1 << 40) - 1, 1 << 41] {
            for start in [0, 12_345_678_901, u64::MAX - 10 * hz, u64::MAX] {
                let clock = Clock { start, hz };
                let mut times = Times::of(clock);
                let mut ticks = start;
                for round in 0..3000_u64 {
                    // Mostly a little on, sometimes far, to the edges of a second, or back.
                    ticks = match round % 16 {
                        0 => start.wrapping_add(next() % (hz.saturating_mul(200_000) | 1)),
                        1 => start.wrapping_add(hz * (round % 7) + hz - 1),
                        2 => start.wrapping_add(hz * (round % 7)),
                        3 => ticks.saturating_sub(next() % hz),
                        4 => next(),
                        _ => ticks.wrapping_add(next() % (hz / 1000 + 2)),
                    };
                    let mut out = Vec::new();
                    times.write(&mut out, ticks);
                    let written = String::from_utf8(out).expect("ASCII");
                    assert_eq!(written, format!("{}: ", time(start, hz, ticks)), "{hz} {ticks}");
                }
            }
        }
    }

    // A line of another task or vCPU that begins as the one before names the wrong one.
    #[test]
    fn lines_begin_with_their_own_task() {
        let mut text = Text::new(Vec::new());
        let tasks = [("cat", 7, 0), ("cat", 7, 16), ("cat", 8, 16), ("dog", 8, 16), ("cat", 7, 0)];
        for (comm, pid, vcpu) in tasks {
            text.out.bytes.clear();
            text.front((Some(comm), pid), vcpu, None, 3);
            let expected = format!("{comm:>16}-{pid:<7} [{vcpu:03}]      3.000000: ");
            assert_eq!(String::from_utf8_lossy(&text.out.bytes), expected);
        }
        text = Text::new(Vec::new());
        text.front((Some(""), 0), 0, None, 0);
        assert_eq!(text.out.bytes, b"                -0       [000]      0.000000: ");
        text.out.bytes.clear();
        text.front((None, 0), 0, None, 0);
        assert_eq!(text.out.bytes, b"           <...>-0       [000]      0.000000: ");
    }

    #[test]
    fn ticks_become_seconds_exactly() {
        assert_eq!(time(0, 2_000_000_000, 0), "    0.000000");
        assert_eq!(time(0, 2_000_000_000, 999), "    0.000000");
        assert_eq!(time(0, 2_000_000_000, 1000), "    0.000001");
        assert_eq!(time(0, 2_000_000_000, 1_999_999_999), "    1.000000");
        assert_eq!(time(0, 3, 1), "    0.333333");
        assert_eq!(time(0, 3, 2), "    0.666667");
        assert_eq!(time(5, 1, 123_461), "123456.000000");
        assert_eq!(time(1000, 1000, 0), "   -1.000000");
        assert_eq!(time(1000, 1000, 999), "   -0.001000");
        assert_eq!(time(0, u64::MAX, u64::MAX - 1), "    1.000000");
        assert_eq!(time(0, 1, u64::MAX), format!("{}.000000", u64::MAX));
        assert_eq!(time(0, 24_000_000, 24_000_000 * 60 + 12), "   60.000001");
    }

    #[test]
    fn durations_are_rounded() {
        assert_eq!(milliseconds(0), "0.000 ms");
        assert_eq!(milliseconds(1_234_499), "1.234 ms");
        assert_eq!(milliseconds(1_234_500), "1.235 ms");
        assert_eq!(milliseconds(u64::MAX), "18446744073709.552 ms");
    }
}
