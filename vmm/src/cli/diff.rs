//! `vmtrace diff`: what differs between two traces.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::BadUsage;
use super::exit;
use super::report::{open, play_through, tell_notes};
use super::terminal::Paging;
use super::view::{choose, parse_glob, parse_time};
use super::wanted::Wanted;
use crate::analyze::diff::{Difference, Noise, Profile};
use crate::export::{PlayError, Player};

/// The heading in `--help` of options that select what is compared.
const WHAT: &str = "What to compare";

/// Arguments of `vmtrace diff`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// File written by `vmtrace boot -o`: the older trace
    a: PathBuf,
    /// File written by `vmtrace boot -o`: the newer trace
    b: PathBuf,
    /// Compare only functions that match: GLOB, GLOB:mod:NAME or :mod:NAME; may be repeated
    #[arg(short, long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    filter: Vec<String>,
    /// Compare no functions that match this glob; may be repeated
    #[arg(short, long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    notrace: Vec<String>,
    /// Compare only calls of tasks whose name matches this glob; may be repeated
    #[arg(long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    comm: Vec<String>,
    /// Compare only records of the tracer of this name
    #[arg(long, value_name = "NAME", help_heading = WHAT)]
    tracer: Option<String>,
    /// Counts and times are equal if they differ by no more than PERCENT of the larger one
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=100))]
    noise: u32,
    /// Times are equal if they differ by less than TIME, such as 100us or 1ms
    #[arg(long, value_name = "TIME", default_value = "1ms", value_parser = parse_time)]
    least: u64,
    /// How to print the differences
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    #[command(flatten)]
    paging: Paging,
}

/// `--format`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Text of 80 columns
    Text,
    /// One JSON object
    Json,
}

/// Plays both and prints what differs: 0 nothing beyond noise, 6 something.
///
/// # Errors
/// When a file cannot be read or is not a whole stream (what is whole has been compared then), or
/// the output fails.
pub fn run(args: &Args) -> Result<u8> {
    if [&args.a, &args.b].iter().all(|file| file.as_path() == Path::new("-")) {
        let text = "standard input is one trace: give the other one as a file".to_owned();
        return Err(BadUsage(text).into());
    }
    let wanted = Wanted::new([("-f", &*args.filter)]);
    let (a, name_a, whole_a) = args.profile(&args.a, &wanted)?;
    let (b, name_b, whole_b) = args.profile(&args.b, &wanted)?;
    let noise = Noise { percent: args.noise, nanoseconds: args.least };
    let found = Difference::new((&a, &name_a), (&b, &name_b), noise);
    let seen = args.paging.show(|out| match args.format {
        Format::Text => found.write_text(out),
        Format::Json => found.write_json(out),
    });
    whole_a.context(name_a)?;
    whole_b.context(name_b)?;
    let unmet = a.unmet().iter().filter(|glob| b.unmet().contains(glob));
    let of_some = !args.filter.is_empty() || !args.notrace.is_empty() || args.tracer.is_some();
    // Of functions and tracers that are not compared, no task is known.
    let none = if of_some {
        "of what is otherwise asked for, neither trace has a record of a task"
    } else {
        "neither trace has a task"
    };
    let tasks = unmet.map(|glob| format!("--comm {glob}: {none} of such a name"));
    let none = match &args.tracer {
        Some(name) => format!("in neither trace has tracer {name} a record"),
        None => "neither trace has a record".to_owned(),
    };
    tell_notes(&wanted.notes(&none));
    tell_notes(&tasks.collect::<Vec<_>>());
    seen.map(|()| if found.is_empty() { exit::DONE } else { exit::DIFFERENT })
}

impl Args {
    /// What a file has, what it is called, and whether it is whole.
    fn profile(
        &self,
        path: &Path,
        wanted: &Wanted,
    ) -> Result<(Profile, String, Result<(), PlayError>)> {
        let (mut source, name) = open(path)?;
        let mut player = Player::new(Profile::new(self.comm.clone()));
        if let Some(tracer) = &self.tracer {
            player = player.with_tracer(tracer.clone());
        }
        player = choose(player, (self.filter.clone(), self.notrace.clone()), wanted);
        let played = play_through(&mut source, &mut player, true);
        if let Err(PlayError::Absent(error)) = played {
            return Err(error).context(name);
        }
        if player.header().is_none() {
            played.context(name)?;
            anyhow::bail!("{}: no trace", path.display());
        }
        let late = player.late();
        let mut profile = player.into_export();
        profile.finish(late);
        Ok((profile, name, played))
    }
}
