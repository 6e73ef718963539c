//! `vmtrace ctl`: commands to a running trace.

use crate::serve::{self, Control, Globs, Source, TracerSpec};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

/// Control a running trace.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket of `vmtrace boot --socket`
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show status
    Status {
        /// As one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Show how often functions were called, as tracers that count have it by now
    Table {
        /// As one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Trace other functions from now on; without a glob all
    Filter {
        /// Functions to trace: GLOB, GLOB:mod:NAME or :mod:NAME
        #[arg(value_name = "GLOB")]
        globs: Vec<String>,
        /// Functions to trace, as an option
        #[arg(short, long, value_name = "GLOB")]
        filter: Vec<String>,
        /// Functions not to trace
        #[arg(short, long, value_name = "GLOB")]
        notrace: Vec<String>,
    },
    /// Add, remove or list tracers
    #[command(subcommand)]
    Tracer(TracerCommand),
    /// Add, remove or list events (tracepoints)
    #[command(subcommand)]
    Event(EventCommand),
    /// Give all sites back until `resume`
    Pause,
    /// Go on after `pause`
    Resume,
    /// End the trace; the guest lives on
    Stop,
    /// Forget the records that are not yet delivered (all of a flight recorder)
    Clear,
    /// Write what a flight recorder (boot --overflow overwrite) has by now into the trace; it goes on
    Snapshot,
    /// Put a mark into the trace
    Mark {
        /// What it shows
        #[arg(required = true)]
        text: Vec<String>,
    },
}

#[derive(Debug, clap::Subcommand)]
enum TracerCommand {
    /// Trace for another tracer, too: [NAME=]GLOB[,GLOB...][:ACTION[+ACTION...]], with ! before
    /// globs that are exceptions
    Add {
        /// What it traces
        spec: TracerSpec,
    },
    /// End a tracer; the others go on
    Remove {
        /// Its name, as `list` shows it
        name: String,
    },
    /// Show the tracers
    List,
}

#[derive(Debug, clap::Subcommand)]
enum EventCommand {
    /// Trace these events, too: SYSTEM:NAME or a glob, as of `vmtrace boot --event`
    Add {
        /// Which
        #[arg(value_name = "GLOB")]
        glob: String,
    },
    /// Trace these events no more
    Remove {
        /// Which
        #[arg(value_name = "GLOB")]
        glob: String,
    },
    /// Show the events that are traced
    List,
}

/// Gives the command, prints the answer.
///
/// # Errors
/// When there is no trace, or it refuses.
pub fn run(args: Args) -> Result<u8> {
    let json = matches!(args.command, Command::Status { json: true });
    let status = matches!(args.command, Command::Status { .. });
    let counts = matches!(args.command, Command::Table { json: false });
    let command = args.command.into_control()?;
    let name = args.socket.display().to_string();
    let stream = super::reach(&Source::Unix(args.socket), Duration::ZERO)?;
    let answer = serve::command(&stream, &command).with_context(|| name)?;
    let text = match answer {
        answer if status && !json => table(&answer)?,
        answer if counts => counted(&answer)?,
        answer if answer.is_empty() => answer,
        answer => answer + "\n",
    };
    super::inspect::ignore_closed_pipe(std::io::stdout().write_all(text.as_bytes()))?;
    Ok(0)
}

impl Command {
    fn into_control(self) -> Result<Control> {
        Ok(match self {
            Self::Status { .. } => Control::Status,
            Self::Table { .. } => Control::Table,
            Self::Filter { globs, mut filter, notrace } => {
                filter.splice(0..0, globs);
                let (filter, notrace) = (super::from_files(filter)?, super::from_files(notrace)?);
                super::check_globs(filter.iter().chain(&notrace))?;
                Control::Filter(Globs { filter, notrace })
            }
            Self::Tracer(TracerCommand::Add { spec }) => Control::TracerAdd(spec),
            Self::Tracer(TracerCommand::Remove { name }) => Control::TracerRemove(name),
            Self::Tracer(TracerCommand::List) => Control::TracerList,
            Self::Event(EventCommand::Add { glob }) => {
                super::check_globs([&glob])?;
                Control::EventAdd(glob)
            }
            Self::Event(EventCommand::Remove { glob }) => {
                super::check_globs([&glob])?;
                Control::EventRemove(glob)
            }
            Self::Event(EventCommand::List) => Control::EventList,
            Self::Pause => Control::Pause,
            Self::Resume => Control::Resume,
            Self::Stop => Control::Stop,
            Self::Clear => Control::Clear,
            Self::Snapshot => Control::Snapshot,
            Self::Mark { text } => {
                let text = text.join(" ");
                if text.contains('\n') {
                    bail!("a mark is one line");
                }
                Control::Mark { ticks: None, text }
            }
        })
    }
}

/// The status for people: a line for each key.
fn table(json: &str) -> Result<String> {
    let status: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(json).context("the answer is not JSON: it is another vmtrace")?;
    let mut text = String::new();
    for (key, value) in &status {
        let value = match value {
            serde_json::Value::String(value) => value.clone(),
            serde_json::Value::Object(map) => {
                let pair = |(key, value): (&String, &serde_json::Value)| match (
                    key.strip_suffix("_ns"),
                    value.as_u64(),
                ) {
                    (Some(key), Some(time)) => format!("{key} {:.1?}", Duration::from_nanos(time)),
                    _ => format!("{key} {value}"),
                };
                map.iter().map(pair).collect::<Vec<_>>().join(", ")
            }
            serde_json::Value::Array(list) => {
                let list: Vec<_> = list.iter().map(ToString::to_string).collect();
                list.join(" ")
            }
            other => other.to_string(),
        };
        text.push_str(&format!("{key:<10} {value}\n"));
    }
    Ok(text)
}

/// What has been counted, for people: a line for each function, the one that was called most first.
fn counted(json: &str) -> Result<String> {
    const NO: &str = "the answer is no table: it is another vmtrace";
    let answer: serde_json::Value = serde_json::from_str(json).context(NO)?;
    let counts = answer.get("counts").and_then(serde_json::Value::as_array).context(NO)?;
    if counts.is_empty() {
        return Ok("nothing was counted\n".to_owned());
    }
    let word = |count: &serde_json::Value, key: &str| {
        count.get(key).and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
    };
    let tracers: BTreeSet<String> = counts.iter().map(|count| word(count, "tracer")).collect();
    let mut text = String::new();
    for count in counts {
        let hits = count.get("hits").and_then(serde_json::Value::as_u64).context(NO)?;
        text.push_str(&format!("{hits:>14}  {}", word(count, "function")));
        if tracers.len() > 1 {
            text.push_str(&format!("  {}", word(count, "tracer")));
        }
        text.push('\n');
    }
    match answer.get("left_out").and_then(serde_json::Value::as_u64) {
        None | Some(0) => {}
        Some(more) => text.push_str(&format!("and {more} functions that were called less\n")),
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_a_table() {
        let json = r#"{"counts":[{"function":"b","tracer":"t","hits":20,"vcpus":{"0":20}},
            {"function":"a","tracer":"t","hits":1,"vcpus":{"1":1}}],"left_out":0}"#;
        let text = counted(json).unwrap();
        assert_eq!(text, "            20  b\n             1  a\n");
        let several = counted(&json.replacen("\"t\"", "\"u\"", 1).replace(":0}", ":3}")).unwrap();
        assert_eq!(several.lines().next(), Some("            20  b  u"));
        assert!(several.ends_with("and 3 functions that were called less\n"), "{several}");
        assert_eq!(counted(r#"{"counts":[]}"#).unwrap(), "nothing was counted\n");
        assert!(counted("fine").is_err() && counted("{}").is_err());
    }

    #[test]
    fn a_status_is_a_table() {
        let text = table(r#"{"state":"tracing","records":[1,2],"sites":{"matched":3}}"#).unwrap();
        assert_eq!(text, "records    1 2\nsites      matched 3\nstate      tracing\n");
        let pauses = table(r#"{"pauses":{"count":2,"max_ns":213735285,"total_ns":999}}"#).unwrap();
        assert_eq!(pauses, "pauses     count 2, max 213.7ms, total 999.0ns\n");
        assert!(table("fine").is_err());
    }
}
