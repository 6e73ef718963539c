//! `vmtrace convert`: a trace file for other tools.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use anyhow::{Context, Result};
use clap::ValueEnum;
use clap::builder::PossibleValue;
use vmtrace_system::say;

use super::clock::Clock;
use super::life;
use super::losses::{self, Counted};
use super::view::{check_span, parse_glob, parse_moment, parse_name};
use super::wanted::{Wanted, none_of};
use super::{BadUsage, report, view};
use crate::convert::{Format, Output, Tally};
use crate::export::{
    Absent, Called, Event, Export, Horizon, Name, Pick, Picked, PlayError, Player, SortedBy,
};
use crate::serve::{Globs, Refilter};
use crate::stream::{Compression, Compressor, Header, StreamError, Summary};

/// The messages between a run and the process that converts its trace: the run has ended, and the
/// trace is converted. Until then it gives signs of life.
pub(super) const GO: &[u8] = b"go\n";
pub(super) const DONE: &[u8] = b"done\n";

/// Bytes read and written at once.
const PIECE: usize = 1 << 20;

/// The heading in `--help` of options that select what of a trace is converted.
const WHAT: &str = "What to convert";

/// Convert a trace file to a format of other tools.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// File written by `vmtrace boot -o`; `-` reads standard input.
    file: PathBuf,
    /// Output file or directory; `-` is standard output, for formats that are one file.
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// The format [default: by the ending of OUT].
    #[arg(long, value_enum)]
    format: Option<Target>,
    /// Convert only functions whose name matches (repeatable).
    #[arg(short, long = "filter", value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    filter: Vec<String>,
    /// Convert no functions whose name matches (repeatable).
    #[arg(short, long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    notrace: Vec<String>,
    /// Convert only records of the tracer of this name.
    #[arg(long, value_name = "NAME", value_parser = parse_name, help_heading = WHAT)]
    tracer: Option<String>,
    #[command(flatten)]
    part: Part,
    /// Origin of the times. With guest they are those of the guest's own log (dmesg), exact to the
    /// microsecond once the kernel has marked its clock stable.
    #[arg(long, value_enum, default_value_t)]
    clock: Clock,
    /// Compress a trace of vmtrace (*.vmt): zstd, or zstd:LEVEL
    #[arg(long, value_name = "METHOD")]
    compress: Option<Compression>,
    /// Wait until standard input says so; remove FILE when all of it is converted.
    #[arg(long, hide = true)]
    once_told: bool,
}

/// What of a trace is converted, besides functions.
#[derive(Clone, Debug, clap::Args)]
struct Part {
    /// Convert only records of this process id (repeatable).
    #[arg(long, value_name = "PID", help_heading = WHAT)]
    pid: Vec<u32>,
    /// Convert only records of tasks whose name matches (repeatable).
    #[arg(long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    comm: Vec<String>,
    /// Convert only records of this vCPU (repeatable), or of a list such as 0,2.
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = WHAT)]
    cpu: Vec<u32>,
    /// Convert nothing before this time: seconds as report prints them, such as 1.204530, or with a
    /// unit, such as 1200ms.
    #[arg(long, value_name = "TIME", value_parser = parse_moment, help_heading = WHAT)]
    since: Option<u64>,
    /// Convert nothing after this time.
    #[arg(long, value_name = "TIME", value_parser = parse_moment, help_heading = WHAT)]
    until: Option<u64>,
}

impl Part {
    fn pick(self) -> Pick {
        let Self { pid: pids, comm: comms, cpu: cpus, since, until } = self;
        Pick { pids, comms, cpus, since, until, ..Pick::default() }
    }
}

/// What a trace is made into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// A trace of fewer functions, or a compressed one.
    Trace,
    /// What is for others.
    Other(Format),
}

impl Target {
    /// The ending of names, and the name of the format.
    const TRACE: &str = "vmt";

    /// What goes with the name of a file or directory.
    fn of(place: &Path) -> Option<Self> {
        match place.extension() {
            Some(extension) if extension == Self::TRACE => Some(Self::Trace),
            _ => Format::of(place).map(Self::Other),
        }
    }
}

impl ValueEnum for Target {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Target>> = LazyLock::new(|| {
            let others = Format::value_variants().iter().map(|&format| Target::Other(format));
            others.chain([Target::Trace]).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Trace => Some(PossibleValue::new(Self::TRACE).help(
                "A trace of vmtrace, with the functions that are chosen, or compressed (*.vmt)",
            )),
            Self::Other(format) => format.to_possible_value(),
        }
    }
}

/// Writes what was asked for, and says on standard error what could not be.
///
/// # Errors
/// When the file cannot be read or is not a whole stream (what is whole has been converted then),
/// or the output fails.
pub fn run(args: Args) -> Result<u8> {
    if !args.once_told {
        return convert(args);
    }
    let stream = args.file.clone();
    let name = || stream.display().to_string();
    let mut told = Vec::new();
    let _ = io::stdin().read_to_end(&mut told);
    let code = match (told == GO, stream.metadata().with_context(name)?.len()) {
        // The run has failed before it had anything to write, and says so.
        (_, 0) => 0,
        (true, _) => {
            life::tell().context("no thread")?;
            convert(args)?
        }
        (false, _) => {
            say!("vmtrace: note: the trace is in {}", stream.display());
            return Ok(0);
        }
    };
    std::fs::remove_file(&stream).with_context(name)?;
    io::stdout().write_all(DONE).context("standard output")?;
    Ok(code)
}

fn convert(args: Args) -> Result<u8> {
    let Args { file, output: place, format, filter, notrace, tracer, clock, part, .. } = args;
    check_span(part.since, part.until)?;
    let part = part.pick();
    let (compress, once_told) = (args.compress, args.once_told);
    let shown = place.display().to_string();
    let target = format.or_else(|| Target::of(&place)).ok_or_else(|| {
        let (trace, others) = (Target::TRACE, Format::list());
        BadUsage(format!("{shown}: no format goes with this name; use --format {others}|{trace}"))
    })?;
    let (mut source, name) = report::open(&file)?;
    let format = match target {
        Target::Trace if clock != Clock::Trace => {
            let reason = "--clock is for other formats: a trace of vmtrace has the times of its records, \
                          and whoever reads it chooses the clock";
            return Err(BadUsage(reason.to_owned()).into());
        }
        Target::Trace => {
            let globs = Globs { filter, notrace };
            return trace(source, &name, &place, (globs, tracer, part), compress);
        }
        Target::Other(_) if compress.is_some() => {
            let reason = "--compress is for traces of vmtrace: name OUT *.vmt, or use --format vmt";
            return Err(BadUsage(reason.to_owned()).into());
        }
        Target::Other(format) => format,
    };
    let output = format.output(&place).with_context(|| format!("cannot write {shown}"))?;
    let times = Pick { since: part.since, until: part.until, ..Pick::default() };
    let mut torn = Ok(());
    let wanted = Wanted::new([("-f", &*filter)]);
    let mut notes = Vec::new();
    let mut seen_here = wanted.clone();
    if !part.is_all() {
        let scratch = output.scratch().with_context(|| format!("cannot write {shown}"))?;
        let seer = (&wanted, tracer.clone());
        (source, torn) = part_of(source, &name, scratch, (part, clock), (seer, &mut notes))?;
        // All functions were seen: of the part there may be fewer.
        seen_here = Wanted::default();
    }
    let writer = format.writer(&output).with_context(|| format!("cannot write {shown}"))?;
    let mut tally = Tally::new(writer, format);
    let missed = Cell::new(0);
    let export: Box<dyn Export + '_> =
        Box::new(Counted { export: Box::new(Lent(&mut tally)), missed: &missed });
    // Marks that a part has so that it can be understood are not shown before it begins.
    let export = if times.is_all() {
        export
    } else {
        Box::new(Picked::new(export, times)) as Box<dyn Export>
    };
    let none = none_of(tracer.as_deref());
    let mut player = view::choose(Player::new(export), (filter, notrace), &seen_here);
    if let Some(tracer) = tracer {
        player = player.with_tracer(tracer);
    }
    let played = report::play_by(clock, &mut source, &mut player, true);
    let played = report::played_of(player, played);
    let unsaid: Vec<_> = tally.told().collect();
    let begun = tally.has_begun();
    drop(tally);
    match &played {
        Err(PlayError::Output(_) | PlayError::Absent(_)) => {}
        _ if !begun => {}
        // What is whole of a torn trace is worth having.
        _ => output.commit().with_context(|| format!("cannot write {shown}"))?,
    }
    for line in unsaid {
        say!("vmtrace: note: {line}");
    }
    let played = match played {
        Err(PlayError::Output(error)) => {
            return Err(error).with_context(|| format!("cannot write {shown}"));
        }
        played => torn.and_then(|()| played.context(name))?,
    };
    // The run has told of them itself.
    if let Some(summary) = played.summary.filter(|_| !once_told) {
        losses::tell(&summary, missed.get())?;
        notes.extend(wanted.notes(&none));
        report::tell_notes(&notes);
    }
    Ok(0)
}

/// A trace that has only a part of another, in `file`, and whether that other was whole. `wanted` sees
/// the functions of all of it, or of all that one tracer has recorded.
fn part_of(
    mut source: File,
    name: &str,
    mut file: File,
    (part, clock): (Pick, Clock),
    ((wanted, tracer), notes): ((&Wanted, Option<String>), &mut Vec<String>),
) -> Result<(File, Result<()>)> {
    let mut zero = None;
    if clock == Clock::Guest {
        let is_file = source.metadata().context(name.to_owned())?.is_file();
        let known = is_file.then(|| Horizon::scan(&mut source)).transpose();
        let known = known.context(name.to_owned())?;
        zero = clock.start(known.as_ref()).map_err(PlayError::Start).context(name.to_owned())?;
        source.rewind().context(name.to_owned())?;
    }
    let shown = || "cannot write a temporary file".to_owned();
    let sink = io::BufWriter::with_capacity(PIECE, file.try_clone().with_context(shown)?);
    let mut refilter = Refilter::by_names(sink, Globs::default(), None).with_part(part, zero);
    refilter = seeing(refilter, wanted, tracer);
    let whole = cut(&mut source, name, &mut refilter, &shown)?.map(|_| ());
    notes.extend(refilter.notes());
    let is_empty = file.stream_position().with_context(shown)? == 0;
    file.rewind().with_context(shown)?;
    match whole {
        Err(error) if is_empty => Err(error),
        whole => Ok((file, whole)),
    }
}

/// A refilter that shows `wanted` all functions, or those of one tracer, if that looks for any.
fn seeing<W: io::Write>(
    refilter: Refilter<W>,
    wanted: &Wanted,
    tracer: Option<String>,
) -> Refilter<W> {
    if wanted.is_done() {
        return refilter;
    }
    let wanted = wanted.clone();
    refilter.with_seer(tracer, move |name, module| {
        wanted.see(name, module);
        !wanted.is_done()
    })
}

/// Gives `refilter` all that there is. Returns whether that was whole, with its summary.
fn cut<W: io::Write>(
    source: &mut File,
    name: &str,
    refilter: &mut Refilter<W>,
    shown: &dyn Fn() -> String,
) -> Result<Result<Option<Summary>>> {
    let mut piece = vec![0; PIECE];
    let played = loop {
        let bytes = match source.read(&mut piece).context(name.to_owned())? {
            0 => break refilter.finish().map_err(anyhow::Error::from),
            len => piece.get(..len).unwrap_or_default(),
        };
        match refilter.write_all(bytes) {
            Err(error) if error.get_ref().is_some_and(|inner| inner.is::<StreamError>()) => {
                break Err(error.into());
            }
            Err(error) if error.get_ref().is_some_and(|inner| inner.is::<Absent>()) => {
                let absent = error.downcast::<Absent>().map_err(anyhow::Error::from);
                return Err(absent.map_or_else(|error| error, anyhow::Error::from))
                    .context(name.to_owned());
            }
            written => written.with_context(shown)?,
        }
    };
    if played.is_ok() {
        refilter.check_tracer().context(name.to_owned())?;
    }
    refilter.flush().with_context(shown)?;
    Ok(played.context(name.to_owned()))
}

/// Writes a trace of what is chosen, compressed or not, whatever the source is.
fn trace(
    mut source: File,
    name: &str,
    place: &Path,
    (globs, tracer, part): (Globs, Option<String>, Pick),
    compress: Option<Compression>,
) -> Result<u8> {
    let shown = || format!("cannot write {}", place.display());
    let output = Output::file(place).with_context(shown)?;
    let file = io::BufWriter::with_capacity(PIECE, output.handle().with_context(shown)?);
    let sink: Box<dyn io::Write> = match compress {
        Some(how) => Box::new(Compressor::new(file, how).with_context(shown)?),
        None => Box::new(file),
    };
    let wanted = Wanted::new([("-f", &*globs.filter)]);
    let none = none_of(tracer.as_deref());
    let mut refilter = Refilter::by_names(sink, globs, tracer.clone()).with_part(part, None);
    refilter = seeing(refilter, &wanted, tracer);
    let played = cut(&mut source, name, &mut refilter, &shown)?;
    let notes = [refilter.notes(), wanted.notes(&none)].concat();
    drop(refilter);
    // What is whole of a torn trace is worth having; nothing of what is none.
    if output.handle().and_then(|file| file.metadata()).is_ok_and(|file| file.len() > 0) {
        output.commit().with_context(shown)?;
    }
    if let Some(summary) = played? {
        losses::tell(&summary, 0)?;
        report::tell_notes(&notes);
    }
    Ok(0)
}

/// An export that is looked at later.
struct Lent<'a, E>(&'a mut E);

impl<E: Export> Export for Lent<'_, E> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.0.begin(header)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        self.0.event(event)
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        self.0.counts(vcpu, tracer, hits)
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        self.0.callers(vcpu, tracer, hits)
    }

    fn sorted(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        self.0.sorted(by, words)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.0.end(summary)
    }
}
