//! `vmtrace top`: the functions with the most calls of a running trace, live.

use std::cell::RefCell;
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::builder::RangedU64ValueParser;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGSTOP, SIGTERM, SIGTSTP};
use vmtrace_system::say;

use super::keys::Keys;
use super::losses;
use super::report::{is_broken_pipe, tell_skipped};
use super::view::{WHAT, parse_glob, parse_name};
use crate::export::{
    Called, Event, Export, Live, Name, Order, Pick, Picked, PlayError, Player, Rows, SortedBy,
    write_summary,
};
use crate::serve::{self, Format, Globs, Source, StreamRequest};
use crate::stream::{Header, StreamError, Summary};

/// Bytes read at once.
const CHUNK: usize = 256 << 10;
/// How often it is looked whether a signal has come: one may come just before a read.
const LOOK: Duration = Duration::from_millis(200);
/// Rows where there is no terminal.
const ROWS: usize = 20;
/// Of a terminal that does not tell.
const USUAL_SIZE: (u16, u16) = (80, 24);

/// Show the functions with the most calls of a running trace, live.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket of `vmtrace boot --socket`, or vsock:CID:PORT inside a guest
    source: Source,
    /// Seconds between tables, such as 0.5
    #[arg(long, value_name = "SECS", default_value = "1", value_parser = parse_every)]
    every: Duration,
    /// The order of functions
    #[arg(long, value_enum, default_value_t = By::Calls)]
    by: By,
    /// Rows of functions, and of events [default: as many as the terminal has room for, else 20]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    rows: Option<usize>,
    /// End after N tables [default: at the end of the trace]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Only functions that match, and no events: GLOB, GLOB:mod:NAME or :mod:NAME; may be repeated
    #[arg(short, long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    filter: Vec<String>,
    /// No functions that match this glob, and no events; may be repeated
    #[arg(short, long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    notrace: Vec<String>,
    /// Only records of the tracer of this name
    #[arg(long, value_name = "NAME", value_parser = parse_name, help_heading = WHAT)]
    tracer: Option<String>,
    /// Only records of this process id; may be repeated
    #[arg(long, value_name = "PID", help_heading = WHAT)]
    pid: Vec<u32>,
    /// Only records of tasks whose name matches this glob; may be repeated
    #[arg(long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    comm: Vec<String>,
    /// Only records of this vCPU; may be repeated, or a list such as 0,2
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = WHAT)]
    cpu: Vec<u32>,
    /// Wait up to SECS seconds for the socket to appear
    #[arg(long, value_name = "SECS", default_value_t = 0)]
    wait: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum By {
    /// Most calls
    Calls,
    /// Most self time: without the traced functions that it calls
    #[value(name = "self")]
    Own,
    /// Most total time: with the functions that it calls
    Total,
}

/// Shows tables until the trace ends.
///
/// # Errors
/// When there is no trace, it is torn, or the output fails.
pub fn run(args: Args) -> Result<u8> {
    match args.watch() {
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => Ok(0),
        done => done,
    }
}

impl Args {
    fn watch(self) -> Result<u8> {
        let name = self.source.to_string();
        super::check_globs(self.filter.iter().chain(&self.notrace))?;
        let stream = super::reach(&self.source, Duration::from_secs(self.wait))?;
        let globs = Globs { filter: self.filter, notrace: self.notrace };
        let tracer = self.tracer.clone();
        let request = StreamRequest { format: Format::Raw, globs, tracer };
        serve::ask_stream(&stream, &request).with_context(|| name.clone())?;
        // Of the same socket: how long a read waits.
        let socket = stream.try_clone().with_context(|| name.clone())?;
        let mut source = serve::accepted(stream).with_context(|| name.clone())?;
        let live = Rc::new(RefCell::new(Live::new(self.cpu.clone())));
        let cpus = self.cpu.clone();
        let pick = Pick { pids: self.pid, comms: self.comm, cpus, ..Pick::default() };
        let export = Shared(Rc::clone(&live));
        let export: Box<dyn Export> =
            if pick.is_all() { Box::new(export) } else { Box::new(Picked::new(export, pick)) };
        let mut player = Player::new(export).with_cpus(self.cpu);
        if let Some(tracer) = self.tracer {
            player = player.with_tracer(tracer);
        }
        let signals = Signals::new().context("cannot handle signals")?;
        let order = match self.by {
            By::Calls => Order::Calls,
            By::Own => Order::Own,
            By::Total => Order::Total,
        };
        let unwritten = "cannot write standard output";
        let mut screen = Screen::new(self.rows).context(unwritten)?;
        let draw = |screen: &mut Screen, since: Instant| {
            let mut live = live.borrow_mut();
            let drawn = screen.draw(|rows| live.table(since.elapsed(), order, rows));
            drawn.context(unwritten)
        };
        let mut chunk = vec![0; CHUNK];
        let (mut since, mut tables) = (Instant::now(), 0);
        let fed = loop {
            if signals.end.load(Ordering::Relaxed) || screen.is_left() {
                return Ok(0);
            }
            if signals.stop.swap(false, Ordering::Relaxed) {
                screen.lend().context(unwritten)?;
            }
            let left = self.every.saturating_sub(since.elapsed());
            if left.is_zero() {
                draw(&mut screen, since)?;
                since = Instant::now();
                tables += 1;
                if self.count == Some(tables) {
                    return Ok(0);
                }
                continue;
            }
            match read(&socket, &mut source, &mut chunk, left.min(LOOK)) {
                Ok(None) => {}
                Ok(Some(0)) => break Ok(()),
                Ok(Some(length)) => {
                    if let Err(error) = player.push(chunk.get(..length).unwrap_or_default()) {
                        break Err(error);
                    }
                }
                Err(error) => break Err(StreamError::from(error).into()),
            }
        };
        let finished: Result<(), PlayError> = player.finish().map(|_| ());
        draw(&mut screen, since)?;
        drop(screen);
        tell_skipped(&player);
        fed.and(finished).context(name)?;
        if let Some(summary) = player.summary() {
            let mut text = Vec::new();
            write_summary(&mut text, summary)?;
            say::text(&text);
            losses::tell(summary, live.borrow().missed())?;
        }
        Ok(0)
    }
}

/// Reads what there is; `None` if nothing comes in so long.
fn read(
    socket: &UnixStream,
    source: &mut impl Read,
    chunk: &mut [u8],
    wait: Duration,
) -> io::Result<Option<usize>> {
    // Zero would be for ever.
    socket.set_read_timeout(Some(wait.max(Duration::from_millis(1))))?;
    match source.read(chunk) {
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut
            ) =>
        {
            Ok(None)
        }
        done => done.map(Some),
    }
}

/// Which signals have come.
struct Signals {
    /// One that ends a program; a second one ends it at once.
    end: Arc<AtomicBool>,
    /// One that stops it (Ctrl-Z).
    stop: Arc<AtomicBool>,
}

impl Signals {
    fn new() -> io::Result<Self> {
        let [end, stop] = [false; 2].map(|set| Arc::new(AtomicBool::new(set)));
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&end))?;
            signal_hook::flag::register(signal, Arc::clone(&end))?;
        }
        signal_hook::flag::register(SIGTSTP, Arc::clone(&stop))?;
        Ok(Self { end, stop })
    }
}

/// Where tables go: in place on a terminal, else one after the other.
struct Screen {
    terminal: bool,
    /// What is typed there.
    keys: Option<Keys>,
    rows: Option<usize>,
    tables: u64,
}

impl Screen {
    /// Clear, home, and no cursor, which would jump about.
    const TAKE: &[u8] = b"\x1b[2J\x1b[H\x1b[?25l";
    const GIVE_BACK: &[u8] = b"\x1b[?25h";

    fn new(rows: Option<usize>) -> io::Result<Self> {
        let terminal = io::stdout().is_terminal();
        if terminal {
            put(Self::TAKE)?;
        }
        Ok(Self { terminal, keys: terminal.then(Keys::new), rows, tables: 0 })
    }

    /// Whether somebody typed that there was enough of it.
    fn is_left(&mut self) -> bool {
        self.keys.as_mut().is_some_and(Keys::say_end)
    }

    /// Stops this process, until it is to go on: others have the terminal meanwhile.
    fn lend(&mut self) -> io::Result<()> {
        if let Some(keys) = &mut self.keys {
            put(Self::GIVE_BACK)?;
            keys.give_back();
        }
        signal_hook::low_level::raise(SIGSTOP)?;
        if let Some(keys) = &mut self.keys {
            keys.take();
            put(Self::TAKE)?;
        }
        Ok(())
    }

    fn draw(&mut self, table: impl FnOnce(Rows) -> Vec<String>) -> io::Result<()> {
        let text = if self.terminal {
            let size = terminal_size::terminal_size_of(io::stdout());
            let (width, height) = size.map_or(USUAL_SIZE, |(width, height)| (width.0, height.0));
            // A line below stays free for the end.
            let lines = usize::from(height).saturating_sub(1);
            let table = table(self.rows.map_or(Rows::Lines(lines), Rows::Each));
            in_place(&table, usize::from(width), lines)
        } else {
            let table = table(Rows::Each(self.rows.unwrap_or(ROWS)));
            let gap = if self.tables > 0 { "\n" } else { "" };
            format!("{gap}{}\n", table.join("\n"))
        };
        self.tables += 1;
        put(text.as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.terminal {
            // Nobody is left to be told.
            let _ = put(Self::GIVE_BACK);
        }
    }
}

/// What draws a table over the last one: no line is wrapped, and nothing scrolls.
fn in_place(table: &[String], width: usize, height: usize) -> String {
    let cut = |line: &String| line.chars().take(width).collect::<String>();
    let lines: Vec<_> = table.iter().take(height).map(cut).collect();
    // Cleared before it is written: behind the last column, that column would be cleared, too.
    format!("\x1b[H\x1b[K{}\n\x1b[J", lines.join("\n\x1b[K"))
}

fn put(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// Seconds between tables.
///
/// # Errors
/// When it is no such number.
pub(super) fn parse_every(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=86_400.0).contains(seconds));
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| format!("{text:?}: use seconds from 0.01 to 86400, such as 0.5"))
}

/// What is looked at between events.
struct Shared(Rc<RefCell<Live>>);

impl Export for Shared {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.0.borrow_mut().begin(header)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        self.0.borrow_mut().event(event)
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        self.0.borrow_mut().counts(vcpu, tracer, hits)
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        self.0.borrow_mut().callers(vcpu, tracer, hits)
    }

    fn sorted(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        self.0.borrow_mut().sorted(by, words)
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        self.0.borrow_mut().joined(totals)
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.0.borrow_mut().end(summary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A line that wraps moves all below it, and one too many scrolls the first out of sight.
    #[test]
    fn a_table_stays_in_its_place() {
        let table = ["# head", "a long line", "last"].map(str::to_owned);
        assert_eq!(in_place(&table, 6, 2), "\x1b[H\x1b[K# head\n\x1b[Ka long\n\x1b[J");
        assert_eq!(in_place(&[], 0, 0), "\x1b[H\x1b[K\n\x1b[J");
    }

    // Zero would be a loop that only draws.
    #[test]
    fn intervals_are_seconds() {
        assert_eq!(parse_every("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_every("2"), Ok(Duration::from_secs(2)));
        for bad in ["", "0", "-1", "nan", "inf", "1s", "1e9"] {
            assert!(parse_every(bad).is_err(), "{bad}");
        }
    }
}
