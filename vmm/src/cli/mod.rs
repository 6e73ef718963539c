//! Command line: a file per subcommand, which parses, calls and prints.

pub mod boot;
pub mod check;
mod clock;
pub mod convert;
pub mod ctl;
mod defaults;
pub mod diff;
pub mod doctor;
pub mod events;
mod examples;
pub mod functions;
pub mod inspect;
mod keys;
mod life;
mod losses;
mod module_files;
mod pages;
pub mod report;
pub mod run;
pub mod sandbox;
mod setup;
mod share;
pub mod stream;
mod terminal;
pub mod top;
mod view;
mod wanted;

use crate::export::{Absent, PlayError};
use crate::serve::Source;
use crate::session::{ConditionalError, HistogramError, ValuesError};
use crate::tracer::TraceError;
use anyhow::Context as _;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use vmtrace_system::say;

/// Trace functions of an unmodified guest kernel, from the hypervisor.
#[derive(Debug, Parser)]
#[command(name = "vmtrace", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// How a run ends that does not end by itself, and what it exits with.
const BOOT_HELP: &str = "\
SIGINT, SIGTERM and SIGHUP end the run in order: the trace is whole. Signals that come together are \
one request (timeout of coreutils sends two). A third or later one, a second or more after the \
first, ends it at once, with a torn trace.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a kernel and trace it
    #[command(after_help = BOOT_HELP)]
    Boot(Box<boot::Args>),
    /// Check a trace against rules
    Check(Box<check::Args>),
    /// Print the completion script of a shell
    #[command(after_help = pages::COMPLETIONS_HELP)]
    Completions(pages::Completions),
    /// Convert a trace file to a format of other tools
    Convert(convert::Args),
    /// Control a running trace
    #[command(after_help = ctl::HELP)]
    Ctl(ctl::Args),
    /// Compare two traces: functions that only one has called, counts and times that differ
    Diff(diff::Args),
    /// Show what this machine can do, and how to get the rest
    Doctor(doctor::Args),
    /// List the events (tracepoints) of a kernel with their fields
    #[command(after_help = events::HELP)]
    Events(events::Args),
    /// List the functions of a kernel that can be traced
    Functions(functions::Args),
    /// Show what vmtrace sees in a kernel image
    Inspect(inspect::Args),
    /// Write the manual pages, one for each command
    Man(pages::Man),
    /// Print a trace file
    Report(report::Args),
    /// Run a command in a guest, or look at its files and modules, by its agent
    #[command(after_help = run::HELP)]
    Run(Box<run::Args>),
    #[command(hide = true)]
    Sandbox(sandbox::Args),
    #[command(hide = true)]
    ServeShare(share::Args),
    /// Fetch what an emulated host needs, busybox for guests, and kernels to trace
    Setup(setup::Args),
    /// Follow a running trace
    Stream(stream::Args),
    /// Show the functions with the most calls of a running trace, live; q ends it
    Top(top::Args),
}

/// What happens inside, for those who look: `VMTRACE_LOG` is error, warn, info, debug
/// or trace. What users must know is in errors and in the summary.
struct Stderr;

impl log::Log for Stderr {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let level = record.level().as_str().to_ascii_lowercase();
        say!("vmtrace: {level}: {}: {}", record.target(), record.args());
    }

    fn flush(&self) {}
}

/// What the process exits with.
pub mod exit {
    /// Done.
    pub const DONE: u8 = 0;
    /// vmtrace failed.
    pub const FAILED: u8 = 1;
    /// Something is asked for that there is not.
    pub const USAGE: u8 = 2;
    /// The guest died of a panic or a triple fault; the trace is complete.
    pub const GUEST_DIED: u8 = 3;
    /// The command of `--run` failed.
    pub const RUN_FAILED: u8 = 4;
    /// A rule failed.
    pub const RULE_FAILED: u8 = 5;
    /// Two traces differ.
    pub const DIFFERENT: u8 = 6;
    /// A thread of the VMM has made a system call that it may not make; see docs/security.md.
    pub const SANDBOXED: u8 = crate::sandbox::EXIT_CODE;
    /// The time of `--timeout` was up before `--run` had finished; as `timeout` of coreutils.
    pub const TIMED_OUT: u8 = 124;
}

/// Options that do not go together, or not with the kernel, which no parser of options knows.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct BadUsage(String);

/// Whether a trace was asked for what it cannot have.
fn asks_for_absent(error: &anyhow::Error) -> bool {
    let absent = |error: &PlayError| matches!(error, PlayError::Absent(_));
    error.is::<Absent>() || error.downcast_ref::<PlayError>().is_some_and(absent)
}

/// Connects to a running trace; tries for so long.
fn reach(source: &Source, wait: Duration) -> anyhow::Result<UnixStream> {
    source.connect(wait).with_context(|| {
        let is_file = matches!(source, Source::Unix(path) if path.is_file());
        let remedy = if is_file {
            "it is a file, which vmtrace report prints"
        } else {
            "see vmtrace boot --socket"
        };
        format!("{source}: no running trace can be reached there; {remedy}")
    })
}

/// Patterns with those of files in the place of `@FILE`: any number a line, `#` begins a comment.
///
/// # Errors
/// When a file cannot be read, or has none.
fn from_files(globs: Vec<String>) -> anyhow::Result<Vec<String>> {
    let mut all = Vec::new();
    for glob in globs {
        let Some(path) = glob.strip_prefix('@') else {
            all.push(glob);
            continue;
        };
        let text = std::fs::read_to_string(path).with_context(|| path.to_owned())?;
        let before = all.len();
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
        all.extend(lines.flat_map(str::split_whitespace).map(str::to_owned));
        // Nothing at all would mean every function.
        anyhow::ensure!(all.len() > before, "{path} has no patterns of functions");
    }
    Ok(all)
}

/// Globs that go into a line of words.
fn check_globs<'a>(globs: impl IntoIterator<Item = &'a String>) -> Result<(), BadUsage> {
    let mut globs = globs.into_iter();
    let bad = globs.find(|glob| glob.is_empty() || glob.contains(char::is_whitespace));
    bad.map_or(Ok(()), |glob| {
        Err(BadUsage(format!("{glob:?} is not a glob: names have no spaces, and are not empty")))
    })
}

/// The command line with what its options do by default, and examples.
fn documented() -> clap::Command {
    examples::add(defaults::add(Cli::command()))
}

/// Parses the command line and runs it. Returns the exit code; usage errors exit
/// with 2 in here.
#[must_use]
pub fn main() -> u8 {
    let matches = documented().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    if log::set_logger(&Stderr).is_ok() {
        let level = std::env::var("VMTRACE_LOG").ok().and_then(|level| level.parse().ok());
        log::set_max_level(level.unwrap_or(log::LevelFilter::Error));
    }
    let result = match cli.command {
        Command::Boot(args) => boot::run(*args),
        Command::Check(args) => check::run(*args),
        Command::Completions(args) => pages::completions(&args),
        Command::Convert(args) => convert::run(args),
        Command::Ctl(args) => ctl::run(args),
        Command::Diff(args) => diff::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Events(args) => events::run(args),
        Command::Functions(args) => functions::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Man(args) => pages::man(&args),
        Command::Report(args) => report::run(args),
        Command::Run(args) => run::run(*args),
        Command::Sandbox(args) => sandbox::run(args),
        Command::ServeShare(args) => share::run(&args),
        Command::Setup(args) => setup::run(&args),
        Command::Stream(args) => stream::run(args),
        Command::Top(args) => top::run(args),
    };
    result.unwrap_or_else(|error| {
        say!("vmtrace: error: {error:#}");
        let is_usage = error.is::<ValuesError>()
            || error.is::<check::BadRules>()
            || error.is::<BadUsage>()
            || asks_for_absent(&error)
            || error.is::<ConditionalError>()
            || error.is::<HistogramError>()
            || error.is::<TraceError>();
        if is_usage { exit::USAGE } else { exit::FAILED }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All commands, and theirs.
    fn commands(of: &clap::Command, all: &mut Vec<clap::Command>) {
        for command in of.get_subcommands() {
            all.push(command.clone());
            commands(command, all);
        }
    }

    // Lines that end where the author's did are broken again, each, by a terminal that is not as wide.
    #[test]
    fn what_is_behind_the_options_is_wrapped_by_the_terminal() {
        let mut all = Vec::new();
        commands(&Cli::command(), &mut all);
        let texts = all.iter().filter_map(|command| command.get_after_help());
        let texts: Vec<_> = texts.map(ToString::to_string).collect();
        assert!(texts.len() > 4, "{texts:?}");
        for text in texts {
            assert!(!text.contains('\n') && !text.contains("  "), "{text}");
        }
    }
}
