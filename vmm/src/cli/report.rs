//! `vmtrace report`: prints a trace file.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use vmtrace_system::say;

use super::BadUsage;
use super::clock::Clock;
use super::losses::{self, Counted};
use super::terminal::Looks;
use super::view::{View, WHAT, choose, parse_glob, parse_time};
use crate::analyze::Analysis;
use crate::analyze::boot::Boot;
use crate::analyze::latency::{Kind, Latency};
use crate::export::{
    Callers, Colours, Event, Export, Graph, Horizon, Json, PlayError, Player, Stats, Text, Top,
    write_summary,
};
use crate::stream::{Header, StreamError, Summary};

/// Options that are not for reports of a whole trace.
const OF_PARTS: [&str; 20] = [
    "top",
    "stats",
    "summary",
    "graph",
    "filter",
    "notrace",
    "callers",
    "graph_root",
    "max_depth",
    "min_duration",
    "tracer",
    "pid",
    "comm",
    "follow",
    "cpu",
    "module",
    "since",
    "until",
    "limit",
    "clock",
];

/// The heading in `--help` of options that print something else than the records.
const TABLES: &str = "Instead of the records";

/// Print a trace file.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// File written by `vmtrace boot -o`; `-` reads standard input.
    file: PathBuf,
    /// How to print it [default: graph with an option for calls, else text].
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Print only functions that match: GLOB, GLOB:mod:NAME or :mod:NAME (repeatable).
    #[arg(short, long = "filter", value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    filter: Vec<String>,
    /// Print no functions whose name matches (repeatable).
    #[arg(short, long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    notrace: Vec<String>,
    #[command(flatten)]
    view: View,
    /// Print only the closing summary.
    #[arg(long, conflicts_with_all = ["stats", "filter", "format"], help_heading = TABLES)]
    summary: bool,
    /// Print how often each function was entered, the most frequent first.
    #[arg(long, conflicts_with = "format", help_heading = TABLES)]
    stats: bool,
    /// Print where the time goes: for each function self and total time, calls and percentiles.
    #[arg(long, conflicts_with_all = ["stats", "summary", "format", "graph", "min_duration"], help_heading = TABLES)]
    top: bool,
    /// Print who calls the functions that match this glob, and how often (repeatable).
    #[arg(
        long,
        value_name = "GLOB",
        value_parser = parse_glob,
        conflicts_with_all = ["top", "stats", "summary", "format", "graph", "filter"],
        help_heading = TABLES
    )]
    callers: Vec<String>,
    /// Print where the time of the boot went, as text or JSON. The trace must be of boot
    /// --boot-report, or have the same functions (see docs/stream.md).
    #[arg(long, conflicts_with_all = OF_PARTS, help_heading = TABLES)]
    boot: bool,
    /// Print latencies of this kind, as text or JSON: the longest one with what its vCPU did
    /// meanwhile, histograms, sums, and those above a threshold. The trace must be of boot
    /// --latency, or have the same events (see docs/howto/latency.md).
    #[arg(
        long,
        value_enum,
        value_name = "KIND",
        conflicts_with = "boot",
        conflicts_with_all = OF_PARTS,
        help_heading = TABLES
    )]
    latency: Option<Kind>,
    /// With --latency: list those of at least this length, such as 500us.
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "latency", help_heading = TABLES)]
    over: Option<u64>,
    /// Origin of the times. With guest they are those of the guest's own log (dmesg), exact to the
    /// microsecond once the kernel has marked its clock stable.
    #[arg(long, value_enum, default_value_t)]
    clock: Clock,
    #[command(flatten)]
    looks: Looks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// As ftrace's function tracer prints it.
    Text,
    /// One JSON object per line.
    Json,
    /// As ftrace's function_graph tracer prints it.
    Graph,
    /// Header and closing summary as one JSON object.
    RawSummary,
}

/// Prints the file to standard output.
///
/// # Errors
/// When the file cannot be read or is not a whole stream (what is whole has been printed
/// then), or the output fails.
pub fn run(args: Args) -> Result<u8> {
    args.view.check()?;
    let looks = args.looks;
    let mut screen = looks.open()?;
    let printed = args.print(&mut screen, looks.colours());
    // What there is to say comes behind what a pager shows.
    let seen = screen.finish();
    match printed {
        Ok(Printed { losses, notes }) => {
            if let Some((summary, missed)) = losses {
                losses::tell(&summary, missed)?;
            }
            tell_notes(&notes);
        }
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => {}
        Err(error) => return Err(error),
    }
    seen.map(|()| 0)
}

/// What is to be said once it was printed.
struct Printed {
    losses: Option<(Summary, u64)>,
    notes: Vec<String>,
}

/// Says what a trace does not have of what was asked for.
pub(super) fn tell_notes(notes: &[String]) {
    for note in notes {
        say!("vmtrace: note: {note}");
    }
}

pub(super) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        kind == Some(ErrorKind::BrokenPipe)
    })
}

impl Args {
    fn print(self, mut out: &mut dyn Write, colours: bool) -> Result<Printed> {
        if self.boot {
            return self.whole(Boot::new(), "--boot", out);
        }
        if let Some(kind) = self.latency {
            return self.whole(Latency::new(kind, self.over), "--latency", out);
        }
        let default = if self.view.wants_graph() { Format::Graph } else { Format::Text };
        let format = self.format.unwrap_or(default);
        let only_summary = self.summary || format == Format::RawSummary;
        let export: Box<dyn Export + '_> = match format {
            _ if only_summary => Box::new(Nothing),
            // Each line is written by itself.
            _ if self.stats => Box::new(Stats::new(BufWriter::new(&mut *out))),
            _ if self.top => Box::new(Top::new(BufWriter::new(&mut *out))),
            _ if !self.callers.is_empty() => Box::new(Callers::new(BufWriter::new(&mut *out))),
            Format::Json => Box::new(Json::new(&mut *out)),
            Format::Graph if colours => Box::new(Graph::new(Colours::new(&mut *out))),
            Format::Graph => Box::new(Graph::new(&mut *out)),
            _ if colours => Box::new(Text::new(Colours::new(&mut *out))),
            _ => Box::new(Text::new(&mut *out)),
        };
        let of_some = [&self.filter, &self.notrace, &self.callers];
        let export = self.view.pick(export, of_some.iter().any(|globs| !globs.is_empty()));
        let missed = Cell::new(0);
        let export: Box<dyn Export + '_> = Box::new(Counted { export, missed: &missed });
        let unordered = only_summary || self.stats;
        let (option, filter) =
            if self.callers.is_empty() { ("-f", self.filter) } else { ("--callers", self.callers) };
        let wanted = self.view.wanted(option, &filter);
        let (wants_calls, none) = (self.view.wants_graph(), self.view.none());
        let mut player = self.view.apply(Player::new(export));
        player = choose(player, (filter, self.notrace), &wanted);
        let (mut source, name) = open(&self.file)?;
        let played = play_by(self.clock, &mut source, &mut player, !unordered);
        let lacks_calls = wants_calls && !player.has_calls();
        let Played { header, summary, mut notes } = played_of(player, played).context(name)?;
        notes.extend(wanted.notes(&none));
        if lacks_calls && summary.as_ref().is_some_and(|summary| summary.records() > 0) {
            let note = "the records do not tell which calls are within which and how long they took: \
                        trace with `vmtrace boot --graph`";
            notes.push(note.to_owned());
        }
        let (Some(header), Some(summary)) = (header, summary) else { bail!("no summary") };
        if format == Format::RawSummary {
            raw_summary(&mut out, &header, &summary)?;
        } else if self.summary {
            write_summary(&mut out, &summary)?;
        }
        out.flush()?;
        Ok(Printed { losses: Some((summary, missed.get())), notes })
    }
}

impl Args {
    /// Whether a report is asked for as JSON.
    fn as_json(&self, option: &str) -> Result<bool> {
        match self.format {
            None | Some(Format::Text) => Ok(false),
            Some(Format::Json) => Ok(true),
            Some(Format::Graph | Format::RawSummary) => {
                Err(BadUsage(format!("{option} is printed as text or json")).into())
            }
        }
    }

    /// Prints what an analysis makes of a trace: of a stream that is torn as far as it goes, before the
    /// error.
    fn whole(&self, analysis: impl Analysis, option: &str, out: &mut dyn Write) -> Result<Printed> {
        let json = self.as_json(option)?;
        let (mut source, name) = open(&self.file)?;
        let mut player = Player::new(analysis);
        let played = play_through(&mut source, &mut player, true);
        if let (Ok(()), Some(reason)) = (&played, player.export().cannot()) {
            return Err(BadUsage(format!("{name}: {reason}")).into());
        }
        let lacks = player.export().lacks();
        if player.header().is_some() {
            let late = player.late();
            player.into_export().write(late, json, out)?;
        }
        played.context(name)?;
        Ok(Printed { losses: None, notes: lacks.into_iter().collect() })
    }
}

/// A trace and what it is called; `-` is standard input.
pub(super) fn open(path: &Path) -> Result<(File, String)> {
    Ok(match &*path.to_string_lossy() {
        "-" => {
            let standard = io::stdin().as_fd().try_clone_to_owned();
            (standard.map(File::from).context("standard input")?, "standard input".to_owned())
        }
        name => {
            let remedy = || {
                let is_socket = path.metadata().is_ok_and(|of| of.file_type().is_socket());
                if is_socket { ": it is a socket, which vmtrace stream follows" } else { "" }
            };
            let opened = File::open(path);
            (opened.with_context(|| format!("cannot open {name}{}", remedy()))?, name.to_owned())
        }
    })
}

/// What a whole stream has besides events.
pub(super) struct Played {
    pub(super) header: Option<Header>,
    pub(super) summary: Option<Summary>,
    /// What is to be said besides.
    pub(super) notes: Vec<String>,
}

/// Plays all that there is to read, from the beginning to the end. Files are played in order if that
/// is asked for, since they can be read twice.
///
/// # Errors
/// As those of [`Player::play`].
pub(super) fn play_through<E: Export>(
    source: &mut File,
    player: &mut Player<E>,
    in_order: bool,
) -> Result<(), PlayError> {
    play_by(Clock::Trace, source, player, in_order)
}

/// The same with times that are counted from another moment.
///
/// # Errors
/// As those of [`Player::play`], and when it is not known how they are to be counted.
pub(super) fn play_by<E: Export>(
    clock: Clock,
    source: &mut File,
    player: &mut Player<E>,
    in_order: bool,
) -> Result<(), PlayError> {
    if !source.metadata().map_err(StreamError::from)?.is_file() {
        clock.start(None).map_err(PlayError::Start)?;
        player.play(source)?;
        return player.check_tracer();
    }
    if in_order || clock == Clock::Guest {
        let start = source.stream_position().map_err(StreamError::from)?;
        let horizon = Horizon::scan(&mut *source)?;
        if let Some(ticks) = clock.start(Some(&horizon)).map_err(PlayError::Start)? {
            player.set_start(ticks);
        }
        if in_order {
            player.set_horizon(horizon);
        }
        source.seek(io::SeekFrom::Start(start)).map_err(StreamError::from)?;
    }
    player.play_file(source)?;
    player.check_tracer()
}

/// What was played, once what could not be shown has been told.
pub(super) fn played_of<E: Export>(
    player: Player<E>,
    played: Result<(), PlayError>,
) -> Result<Played, PlayError> {
    tell_skipped(&player);
    let (header, summary) = (player.header().cloned(), player.summary().cloned());
    let notes = player.export().notes();
    // What it prints to is the caller's again.
    drop(player);
    played.map(|()| Played { header, summary, notes })
}

/// Logs what of a stream could not be shown as it is meant.
pub(super) fn tell_skipped<E: Export>(player: &Player<E>) {
    if player.unknown_records() > 0 {
        log::warn!(
            "{} records of kinds that this vmtrace does not know were skipped",
            player.unknown_records()
        );
    }
    if player.late() > 0 {
        log::warn!("{} records came late: they are shown after later ones", player.late());
    }
    if player.evicted() > 0 {
        log::warn!("{} calls were given up: too many were open at once", player.evicted());
    }
}

fn raw_summary(out: &mut dyn Write, header: &Header, summary: &Summary) -> Result<()> {
    let whole = serde_json::json!({
        "arch": header.arch,
        "clock": header.clock,
        "clock_hz": header.clock_hz,
        "clock_start": header.clock_start,
        "release": header.release,
        "vcpus": header.vcpus,
        "slide": format!("{:#x}", header.slide),
        "vmtrace": header.vmtrace_version,
        "summary": summary,
    });
    serde_json::to_writer_pretty(&mut *out, &whole)?;
    writeln!(out)?;
    Ok(())
}

/// Prints no events.
struct Nothing;

impl Export for Nothing {
    fn begin(&mut self, _: &Header) -> io::Result<()> {
        Ok(())
    }

    fn event(&mut self, _: &Event<'_>) -> io::Result<()> {
        Ok(())
    }

    fn looks_at_calls(&self) -> bool {
        false
    }

    fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::stream::{GuestClock, Writer, sample};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn report(stream: &[u8], options: &[&str]) -> (String, Result<()>) {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(stream).expect("room");
        let path = file.path().to_str().expect("UTF-8");
        let cli = Cli::try_parse_from(["report", path].iter().chain(options)).expect("options");
        let mut out = Vec::new();
        let colours = cli.args.looks.colours();
        let status = cli.args.print(&mut out, colours).map(|_| ());
        (String::from_utf8(out).expect("UTF-8"), status)
    }

    #[test]
    fn prints_only_matching_functions() {
        let (text, status) = report(&sample::stream(), &["-f", "ext4_*", "-f", "0x*"]);
        status.expect("whole");
        let records = text.lines().filter(|line| !line.starts_with('#'));
        let functions: Vec<_> =
            records.filter_map(|line| line.split_once(": ")?.1.split(' ').next()).collect();
        assert_eq!(functions, ["ext4_open", "ext4_open", "0xffffffffc00fffff"]);
    }

    #[test]
    fn colours_are_of_people_alone() {
        let (text, status) = report(&sample::stream(), &["--color", "always"]);
        status.expect("whole");
        assert!(text.contains("\x1b[1mvfs_read\x1b[0m"), "{text}");
        for plain in [&["--color", "never"][..], &["--color", "always", "--format", "json"]] {
            let (text, status) = report(&sample::stream(), plain);
            status.expect("whole");
            assert!(!text.contains('\x1b') && text.contains("vfs_read"), "{text}");
        }
    }

    #[test]
    fn prints_the_summary_alone() {
        let (text, status) = report(&sample::stream(), &["--summary"]);
        status.expect("whole");
        assert!(text.starts_with("vmtrace: sites matched 3, patched 2, skipped 1\n"), "{text}");
        let (text, status) = report(&sample::stream(), &["--format", "raw-summary"]);
        status.expect("whole");
        let whole: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(whole["summary"]["vcpus"][0]["records"], 4);
        assert_eq!(whole["clock_hz"], 2_000_000_000u64);
    }

    // The header's zero with everything that is shown: who reads JSON computes with it.
    #[test]
    fn times_are_counted_from_where_the_guests_log_begins() {
        let begin = sample::header().clock_start;
        let clock = GuestClock {
            zero_ticks: begin + 50_000,
            zero_ns: 25_000,
            early_ns: 7_000_000,
            drift_ns: -5,
        };
        let mut writer = Writer::new(Vec::new(), &sample::header()).expect("header");
        sample::fill(&mut writer).expect("memory");
        let summary = Summary { guest_clock: Some(clock), ..sample::summary() };
        writer.end(&summary).expect("memory");
        let stream = writer.into_inner().expect("memory");
        let json = |options: &[&str]| {
            let (text, status) = report(&stream, &[&["--format", "json"], options].concat());
            status.expect("whole");
            let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
            lines.collect::<Vec<serde_json::Value>>()
        };
        let (trace, guest) = (json(&["--clock", "trace"]), json(&["--clock", "guest"]));
        assert_eq!(trace, json(&[]));
        assert_eq!(guest[0]["clock_start"], begin + 50_000);
        assert_eq!(trace.len(), guest.len());
        let times = |lines: &[serde_json::Value]| {
            lines.iter().filter_map(|line| line["ns"].as_i64()).collect::<Vec<_>>()
        };
        let moved: Vec<_> = times(&trace).iter().map(|ns| ns - 25_000).collect();
        assert!(moved.iter().any(|ns| *ns < 0) && moved.iter().any(|ns| *ns > 0), "{moved:?}");
        assert_eq!(times(&guest), moved);
        assert_eq!(guest.last().expect("the end")["summary"]["guest_clock"]["zero_ns"], 25_000);
        // Without an order, too.
        let (stats, status) = report(&stream, &["--stats", "--clock", "guest"]);
        status.expect("whole");
        assert!(stats.contains("vfs_read"), "{stats}");
        let (text, _) = report(&stream, &["--summary"]);
        let line = "vmtrace: clock 0 of the guest's log is 0.000025 s of the trace, early times 0.007000 s ahead\n";
        assert!(text.contains(line), "{text}");
    }

    // Times on a clock that nobody knows would be taken for those of dmesg.
    #[test]
    fn a_guests_clock_that_is_not_known_is_refused() {
        let stream = sample::stream();
        for stream in [&stream[..], &stream[..stream.len() - 1]] {
            let (text, status) = report(stream, &["--clock", "guest"]);
            let error = format!("{:#}", status.expect_err("no clock"));
            assert!(text.is_empty() && error.contains("leave --clock guest out"), "{error}");
        }
    }

    #[test]
    fn a_torn_file_is_printed_and_then_refused() {
        let stream = sample::stream();
        let (text, status) = report(&stream[..stream.len() - 1], &[]);
        assert!(text.contains("vfs_read <-ksys_read"));
        let error = format!("{:#}", status.expect_err("torn"));
        assert!(error.contains("torn stream"), "{error}");
        let (text, status) = report(b"\x7fELF and so on", &[]);
        assert_eq!(text, "");
        let error = format!("{:#}", status.expect_err("another file"));
        assert!(error.contains("not a vmtrace stream"), "{error}");
    }

    // Thirty options in one list are not read.
    #[test]
    fn the_help_is_in_groups() {
        let help = Cli::command().render_help().to_string();
        let place = |text: &str| help.find(text).unwrap_or_else(|| panic!("no {text}: {help}"));
        let words =
            ["Options:", "--format", WHAT, "--filter", "--since", TABLES, "--top", "--over"];
        let places = words.map(place);
        assert!(places.is_sorted(), "{help}");
    }

    #[test]
    fn a_closed_pipe_is_no_error() {
        let error = PlayError::Output(ErrorKind::BrokenPipe.into());
        assert!(is_broken_pipe(&anyhow::Error::from(error).context("file")));
        let error = PlayError::Output(ErrorKind::StorageFull.into());
        assert!(!is_broken_pipe(&error.into()));
    }
}
