//! `vmtrace ctl`: commands to a running trace.

use super::BadUsage;
use crate::agent::{AgentMark, protocol::MARK_MAX};
use crate::analyze::latency::Kind;
use crate::export::{Table, share};
use crate::serve::{
    self, Control, Globs, Source, TracerSpec, TriggerAction, TriggerError, TriggerSpec,
};
use anyhow::{Context, Result};
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use vmtrace_system::say;

/// How long a run may take to answer before the user is told that it is waited for.
const SILENCE: Duration = Duration::from_secs(10);

/// The exit codes, which differ from those of `vmtrace run`.
pub(super) const HELP: &str = "\
The exit code is 0, or 1 for a failure: also where there is no such socket, and when the trace \
refuses the command.";

/// Control a running trace.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket of `vmtrace boot --socket`
    #[arg(value_parser = OsStringValueParser::new().try_map(parse_socket))]
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

/// What could be the path of a socket.
fn parse_socket(text: OsString) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err("name the socket of `vmtrace boot --socket`".to_owned());
    }
    if text.to_string_lossy().starts_with("vsock:") {
        return Err("a trace is controlled only from the machine that runs its guest, by the socket of \
                    `vmtrace boot --socket`; inside a guest there are vmtrace stream and top (a path \
                    that begins so: ./vsock:...)"
            .to_owned());
    }
    Ok(text.into())
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show status
    Status {
        /// As one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Show how often functions were called so far, from tracers that count
    Table(TableArgs),
    /// Trace other functions from now on; all of them without a glob
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
    /// Add, remove or list triggers: what is done at a call to come
    #[command(subcommand)]
    Trigger(TriggerCommand),
    /// Measure latencies while the guest runs, as `vmtrace boot --latency` does from its beginning
    #[command(subcommand)]
    Latency(LatencyCommand),
    /// Stop tracing until `resume`: all sites are given back
    Pause,
    /// Go on after `pause`
    Resume,
    /// End the trace; the guest lives on
    Stop,
    /// Forget the records that are not yet delivered (all of a flight recorder)
    Clear,
    /// Write the content of the flight recorder (boot --overflow overwrite) to the trace, and go on
    Snapshot,
    /// Put a mark into the trace
    Mark {
        /// The text of the mark
        #[arg(required = true)]
        text: Vec<String>,
    },
}

#[derive(Debug, Default, clap::Args)]
struct TableArgs {
    /// Print one JSON object per table
    #[arg(long)]
    json: bool,
    /// Also show the counts of each vCPU; JSON always has them
    #[arg(long, conflicts_with = "json")]
    by_cpu: bool,
    /// Show a table every SECS seconds, such as 0.5, until the trace ends
    #[arg(long, value_name = "SECS", value_parser = super::top::parse_every)]
    every: Option<Duration>,
    /// End after N tables [default: 1; with --every, at the end of the trace]
    #[arg(long, value_name = "N", requires = "every", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

#[derive(Debug, clap::Subcommand)]
enum TracerCommand {
    /// Add a tracer: [NAME=]GLOB[,GLOB...][:ACTION[+ACTION...]], with ! before globs that are
    /// exceptions
    Add {
        /// The tracer, as of `vmtrace boot --tracer`
        spec: TracerSpec,
    },
    /// Remove a tracer; the others go on
    Remove {
        /// Its name, as `list` shows it
        name: String,
    },
    /// Show the tracers
    List,
}

#[derive(Debug, clap::Subcommand)]
enum EventCommand {
    /// Trace these events as well: SYSTEM:NAME or a glob, as of `vmtrace boot --event`
    Add {
        /// Which
        #[arg(value_name = "GLOB")]
        glob: String,
    },
    /// Stop tracing these events
    Remove {
        /// Which
        #[arg(value_name = "GLOB")]
        glob: String,
    },
    /// Show the events that are traced
    List,
}

fn action(text: &str) -> Result<TriggerAction, TriggerError> {
    text.parse()
}

#[derive(Debug, clap::Subcommand)]
enum TriggerCommand {
    /// Do something once, at a call of these functions: at the N-th, or the first, of all their calls
    /// from now on for which the condition holds. The guest counts the calls itself and stops only at
    /// that one
    Add {
        /// What: start (end a pause), stop (pause), snapshot (write the flight recorder), mark or end (the
        /// run), as --start-at to --end-at of `vmtrace boot`. Commands (--exec-at) can be given only there
        #[arg(value_name = "start|stop|snapshot|mark|end", value_parser = action)]
        action: TriggerAction,
        /// At which call: GLOB[,GLOB...][:N][ if CONDITION], as of `vmtrace boot --mark-at`. GLOB:mod:NAME waits
        /// for a module
        #[arg(value_name = "SPEC")]
        spec: TriggerSpec,
    },
    /// Remove a trigger, whether it has fired or not
    Remove {
        /// Its number, as `add` and `list` show it
        #[arg(value_name = "ID")]
        id: u32,
    },
    /// Show the triggers, those of the boot as well: what each does, and how many calls are left
    List {
        /// As one JSON object
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, clap::Subcommand)]
enum LatencyCommand {
    /// Begin to measure latencies of this kind, and trace the events that this needs; one kind at a
    /// time
    Start {
        /// Which
        #[arg(value_enum)]
        kind: Kind,
        /// List those of at least this length, such as 500us: the newest 500 of them
        #[arg(long, value_name = "TIME", value_parser = super::view::parse_time)]
        over: Option<u64>,
    },
    /// Show the latencies so far: the longest one with what its vCPU did meanwhile, histograms,
    /// sums
    Show {
        /// As lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Stop measuring, and show the latencies
    Stop {
        /// As lines of JSON
        #[arg(long)]
        json: bool,
    },
}

/// Gives the command, prints the answer.
///
/// # Errors
/// When there is no trace, or it refuses.
pub fn run(args: Args) -> Result<u8> {
    if let Command::Table(wanted) = &args.command {
        return tables(&args.socket, wanted);
    }
    let json = matches!(args.command, Command::Status { json: true });
    let status = matches!(args.command, Command::Status { .. });
    let listed = matches!(args.command, Command::Trigger(TriggerCommand::List { json: false }));
    let command = args.command.into_control()?;
    let tells = matches!(command, Control::LatencyShow { .. } | Control::LatencyStop { .. });
    let text = match ask(&args.socket, &command)? {
        answer if tells => page(&answer)?,
        answer if status && !json => table(&answer)?,
        answer if listed => triggers(&answer)?,
        answer if answer.is_empty() => answer,
        answer => answer + "\n",
    };
    super::inspect::ignore_closed_pipe(std::io::stdout().write_all(text.as_bytes()))?;
    Ok(0)
}

fn ask(socket: &Path, command: &Control) -> Result<String> {
    let stream = super::reach(&Source::Unix(socket.to_owned()), Duration::ZERO)?;
    let tell = || {
        say!(
            "vmtrace: {}: no answer for {} s; waiting for it (is this the socket of `vmtrace boot --socket`?)",
            socket.display(),
            SILENCE.as_secs()
        );
    };
    serve::command_telling(&stream, command, (Some(SILENCE), tell))
        .with_context(|| socket.display().to_string())
}

/// Text of several lines, which an answer has as a string of JSON.
fn page(answer: &str) -> Result<String> {
    serde_json::from_str(answer)
        .context("the answer is not a page: the run is by another version of vmtrace")
}

/// Shows what was counted, once or again and again.
fn tables(socket: &Path, wanted: &TableArgs) -> Result<u8> {
    let last = wanted.count.or(wanted.every.is_none().then_some(1));
    for number in 1_u64.. {
        let answer = match ask(socket, &Control::Table) {
            // The trace was there a moment ago: this is its end.
            Err(_) if number > 1 => break,
            answer => answer?,
        };
        let gap = if number > 1 && !wanted.json { "\n" } else { "" };
        let table = if wanted.json { answer + "\n" } else { counted(&answer, wanted.by_cpu)? };
        match std::io::stdout().write_all(format!("{gap}{table}").as_bytes()) {
            // Who reads has seen enough.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
            written => written.context("cannot write standard output")?,
        }
        if last == Some(number) {
            break;
        }
        std::thread::sleep(wanted.every.unwrap_or_default());
    }
    Ok(0)
}

impl Command {
    fn into_control(self) -> Result<Control> {
        Ok(match self {
            Self::Status { .. } => Control::Status,
            Self::Table(_) => Control::Table,
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
            Self::Trigger(TriggerCommand::Add { action, spec }) => {
                Control::TriggerAdd { action, spec }
            }
            Self::Trigger(TriggerCommand::Remove { id }) => Control::TriggerRemove(id),
            Self::Trigger(TriggerCommand::List { .. }) => Control::TriggerList,
            Self::Latency(LatencyCommand::Start { kind, over }) => {
                Control::LatencyStart { kind, over }
            }
            Self::Latency(LatencyCommand::Show { json }) => Control::LatencyShow { json },
            Self::Latency(LatencyCommand::Stop { json }) => Control::LatencyStop { json },
            Self::Pause => Control::Pause,
            Self::Resume => Control::Resume,
            Self::Stop => Control::Stop,
            Self::Clear => Control::Clear,
            Self::Snapshot => Control::Snapshot,
            Self::Mark { text } => {
                let text = text.join(" ");
                if !AgentMark::is_text(&text) {
                    let text = format!(
                        "a mark is one line of 1 to {MARK_MAX} bytes, without control characters"
                    );
                    return Err(BadUsage(text).into());
                }
                Control::Mark { ticks: None, text }
            }
        })
    }
}

/// The triggers for people: a line for each.
fn triggers(json: &str) -> Result<String> {
    const NO: &str = "the answer is no list of triggers: the run is by another version of vmtrace";
    let answer: serde_json::Value = serde_json::from_str(json).context(NO)?;
    let list = answer.get("triggers").and_then(serde_json::Value::as_array).context(NO)?;
    let line = |one: &serde_json::Value| {
        let number = |key: &str| one.get(key)?.as_u64();
        let (action, at) = (one.get("action")?.as_str()?, one.get("at")?.as_str()?);
        let (id, left, functions) = (number("id")?, number("left")?, number("functions")?);
        let of = if functions == 1 { "" } else { "s" };
        let state = match (one.get("fired")?.as_bool()?, left) {
            (true, _) => "fired".to_owned(),
            (false, 1) => "1 call left".to_owned(),
            (false, left) => format!("{left} calls left"),
        };
        let waits = one.get("waits_for")?.as_array()?.iter().filter_map(serde_json::Value::as_str);
        let waits: String = waits.map(|module| format!(", waits for module {module}")).collect();
        Some(format!("{id}: {action} at {at} ({functions} function{of}): {state}{waits}\n"))
    };
    let lines: Option<String> = list.iter().map(line).collect();
    lines.context(NO)
}

/// The status for people: a line for each key.
fn table(json: &str) -> Result<String> {
    let status: serde_json::Map<String, serde_json::Value> = serde_json::from_str(json)
        .context("the answer is not JSON: the run is by another version of vmtrace")?;
    let mut text = String::new();
    for (key, value) in &status {
        text.push_str(&format!("{key:<10} {}\n", shown(value)));
    }
    Ok(text)
}

/// A value of the status. Each object of a list is a line; its name comes first.
fn shown(value: &serde_json::Value) -> String {
    use serde_json::Value;
    match value {
        Value::String(value) => value.clone(),
        Value::Object(map) if map.is_empty() => "none".to_owned(),
        Value::Object(map) => {
            let name = map.get("name").map(shown);
            let rest = map.iter().filter(|(key, _)| *key != "name");
            let rest = rest.map(|(key, value)| match (key.strip_suffix("_ns"), value.as_u64()) {
                (Some(key), Some(time)) => format!("{key} {:.1?}", Duration::from_nanos(time)),
                _ if value.as_object().is_some_and(|map| !map.is_empty()) => {
                    format!("{key} ({})", shown(value))
                }
                _ => format!("{key} {}", shown(value)),
            });
            let rest = rest.collect::<Vec<_>>().join(", ");
            name.map_or(rest.clone(), |name| format!("{name}: {rest}"))
        }
        Value::Array(list) => {
            let line = if list.iter().any(Value::is_object) { "\n           " } else { " " };
            list.iter().map(shown).collect::<Vec<_>>().join(line)
        }
        other => other.to_string(),
    }
}

/// What has been counted, for people: a line for each function, the one that was called most first.
/// With columns for vCPUs there is a line above that tells which.
fn counted(json: &str, by_cpu: bool) -> Result<String> {
    const NO: &str = "the answer is not a table: the run is by another version of vmtrace";
    let answer: serde_json::Value = serde_json::from_str(json).context(NO)?;
    let counts = answer.get("counts").and_then(serde_json::Value::as_array).context(NO)?;
    let histograms = answer.get("histograms").and_then(serde_json::Value::as_array);
    let histograms = histograms.into_iter().flatten().map(histogram);
    let histograms: String = histograms.collect::<Result<Vec<_>>>()?.concat();
    let callers = answer.get("callers").and_then(serde_json::Value::as_array);
    let callers = called(callers.map_or(&[][..], |callers| callers)).context(NO)?;
    if counts.is_empty() && callers.is_empty() && histograms.is_empty() {
        return Ok("nothing was counted\n".to_owned());
    }
    let word = |count: &serde_json::Value, key: &str| {
        count.get(key).and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
    };
    let tracers: BTreeSet<String> = counts.iter().map(|count| word(count, "tracer")).collect();
    let vcpus = |count: &serde_json::Value| -> BTreeMap<u32, u64> {
        let vcpus = count.get("vcpus").and_then(serde_json::Value::as_object);
        let number = |(vcpu, hits): (&String, &serde_json::Value)| {
            Some((vcpu.parse().ok()?, hits.as_u64()?))
        };
        vcpus.into_iter().flatten().filter_map(number).collect()
    };
    let columns: BTreeSet<u32> = match by_cpu {
        true => counts.iter().flat_map(|count| vcpus(count).into_keys()).collect(),
        false => BTreeSet::new(),
    };
    let mut text = String::new();
    if by_cpu && !counts.is_empty() {
        text.push_str(&format!("{:>14}", "hits"));
        columns.iter().for_each(|vcpu| text.push_str(&format!("  {:>12}", format!("[{vcpu:03}]"))));
        text.push_str(if tracers.len() > 1 { "  function  tracer\n" } else { "  function\n" });
    }
    for count in counts {
        let hits = count.get("hits").and_then(serde_json::Value::as_u64).context(NO)?;
        text.push_str(&format!("{hits:>14}"));
        let own = if by_cpu { vcpus(count) } else { BTreeMap::new() };
        for vcpu in &columns {
            text.push_str(&format!("  {:>12}", own.get(vcpu).copied().unwrap_or(0)));
        }
        text.push_str(&format!("  {}", word(count, "function")));
        if tracers.len() > 1 {
            text.push_str(&format!("  {}", word(count, "tracer")));
        }
        text.push('\n');
    }
    match answer.get("left_out").and_then(serde_json::Value::as_u64) {
        None | Some(0) => {}
        Some(more) => text.push_str(&format!("and {more} functions that were called less\n")),
    }
    text.push_str(&callers);
    text.push_str(&histograms);
    Ok(text)
}

/// Functions with their callers: a line for each pair, with its share of the function's calls.
fn called(callers: &[serde_json::Value]) -> Option<String> {
    let mut text = String::new();
    let mut totals: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    let mut all = Vec::new();
    for it in callers {
        let word = |key: &str| it.get(key).and_then(serde_json::Value::as_str);
        let (function, tracer) = (word("function")?, word("tracer")?);
        let hits = it.get("hits").and_then(serde_json::Value::as_u64)?;
        let total = totals.entry((tracer, function)).or_default();
        *total = total.saturating_add(hits);
        all.push((tracer, function, word("caller")?, hits));
    }
    let several = all.iter().any(|it| all.first().is_some_and(|first| first.0 != it.0));
    for (tracer, function, caller, hits) in all {
        let total = totals.get(&(tracer, function)).copied().unwrap_or(0);
        let share = share(hits, total);
        let tracer = if several { format!("  {tracer}") } else { String::new() };
        text.push_str(&format!("{hits:>14} {share}  {function} <- {caller}{tracer}\n"));
    }
    Some(text)
}

/// One of them as a table.
fn histogram(it: &serde_json::Value) -> Result<String> {
    const NO: &str = "the answer has no such histogram: the run is by another version of vmtrace";
    let word = |key: &str| it.get(key).and_then(serde_json::Value::as_str).context(NO);
    let number = |key: &str| it.get(key).and_then(serde_json::Value::as_u64);
    let buckets = it.get("buckets").and_then(serde_json::Value::as_array).context(NO)?;
    let bucket = |bucket: &serde_json::Value| {
        let low = bucket.get(0)?;
        let low = low.as_u64().map(i128::from).or_else(|| low.as_i64().map(i128::from))?;
        Some((low, bucket.get(1)?.as_u64()?))
    };
    let mut buckets = buckets.iter().map(bucket).collect::<Option<Vec<_>>>().context(NO)?;
    buckets.sort_unstable();
    let title = format!("{} ({}), {}", word("function")?, word("tracer")?, word("of")?);
    let (sum, missed) = (number("total"), number("missed").unwrap_or(0));
    let mut text = Vec::new();
    Table { title: &title, buckets, sum, missed }.write(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_a_table() {
        let json = r#"{"counts":[{"function":"b","tracer":"t","hits":20,"vcpus":{"0":20}},
            {"function":"a","tracer":"t","hits":1,"vcpus":{"1":1}}],"left_out":0}"#;
        let text = counted(json, false).unwrap();
        assert_eq!(text, "            20  b\n             1  a\n");
        let more = json.replacen("\"t\"", "\"u\"", 1).replace(":0}", ":3}");
        let several = counted(&more, false).unwrap();
        assert_eq!(several.lines().next(), Some("            20  b  u"));
        assert!(several.ends_with("and 3 functions that were called less\n"), "{several}");
        assert_eq!(counted(r#"{"counts":[]}"#, true).unwrap(), "nothing was counted\n");
        assert!(counted("fine", false).is_err() && counted("{}", false).is_err());
        // Histograms stand below, or alone.
        let one = r##"{"function":"f","tracer":"t","of":"duration_ns","buckets":[[4,3],[-9223372036854775808,1]],
            "total":18,"missed":2}"##;
        let below = counted(&json.replacen('{', &format!("{{\"histograms\":[{one}],"), 1), false);
        let below = below.unwrap();
        let expected =
            "# histogram: f (t), duration_ns: 4 calls, average 4, total 18, 2 more without a value";
        let lines: Vec<_> = below.lines().skip(2).collect();
        assert_eq!((lines[0], lines.len()), (expected, 3));
        assert!(lines[1].contains("below 0") && lines[2].contains("4 ... 8"), "{below}");
        let alone = counted(&format!("{{\"counts\":[],\"histograms\":[{one}]}}"), false).unwrap();
        assert_eq!(alone.lines().collect::<Vec<_>>(), lines);
        // So do callers, with their shares.
        let call = |caller, hits, tracer| {
            format!(r#"{{"function":"b","caller":"{caller}","tracer":"{tracer}","hits":{hits}}}"#)
        };
        let [most, few, other] = [call("x", 30, "t"), call("y", 10, "t"), call("y", 5, "u")];
        let callers =
            |list: String| counted(&format!("{{\"counts\":[],\"callers\":[{list}]}}"), false);
        let expected = "            30   75.0%  b <- x\n            10   25.0%  b <- y\n";
        assert_eq!(callers(format!("{most},{few}")).unwrap(), expected);
        let several = callers(format!("{most},{few},{other}")).unwrap();
        assert!(several.contains("75.0%  b <- x  t\n"), "{several}");
        assert!(several.ends_with("             5  100.0%  b <- y  u\n"), "{several}");
        assert!(callers("{}".to_owned()).is_err());
        let by_cpu = counted(json, true).unwrap();
        let lines: Vec<Vec<_>> =
            by_cpu.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["hits", "[000]", "[001]", "function"]);
        assert_eq!(lines[1..], [["20", "20", "0", "b"], ["1", "0", "1", "a"]]);
    }

    #[test]
    fn an_answer_may_be_a_page() {
        assert_eq!(page("\"# tracer: irqsoff\\n#\\n\"").unwrap(), "# tracer: irqsoff\n#\n");
        assert!(page("fine").is_err());
    }

    // Scripts parse these lines, and whoever looks wants to know what has come to pass.
    #[test]
    fn triggers_are_a_line_each() {
        let json = r#"{"triggers":[
            {"id":1,"action":"mark","at":"vfs_*:9 if pid == 1","functions":70,"left":4,
             "waits_for":[],"fired":false},
            {"id":12,"action":"end","at":"a:mod:ext4","functions":0,"left":1,"waits_for":["ext4"],"fired":false},
            {"id":13,"action":"exec","at":"a -- b","functions":1,"left":0,"waits_for":[],"fired":true}]}"#;
        assert_eq!(
            triggers(json).unwrap(),
            "1: mark at vfs_*:9 if pid == 1 (70 functions): 4 calls left\n\
             12: end at a:mod:ext4 (0 functions): 1 call left, waits for module ext4\n\
             13: exec at a -- b (1 function): fired\n"
        );
        assert_eq!(triggers("{\"triggers\":[]}").unwrap(), "");
        assert!(triggers("fine").is_err() && triggers("{\"triggers\":[{}]}").is_err());
    }

    // What cannot be is a usage error before anybody is asked, and says where.
    #[test]
    fn triggers_are_understood() {
        use clap::Parser as _;
        let parse = |words: &[&str]| {
            let words = [&["vmtrace", "ctl", "s", "trigger"], words].concat();
            crate::cli::Cli::try_parse_from(words).map_err(|error| error.to_string())
        };
        let crate::cli::Command::Ctl(args) =
            parse(&["add", "end", "a,b:3 if x > 4K"]).unwrap().command
        else {
            panic!("another command");
        };
        let Control::TriggerAdd { action, spec } = args.command.into_control().unwrap() else {
            panic!("another command");
        };
        assert_eq!((action, &*spec.to_string()), (TriggerAction::End, "a,b:3 if x > 4K"));
        let refused = |words: &[&str]| parse(words).unwrap_err();
        assert!(refused(&["add", "exec", "a -- b"]).contains("boot --exec-at"));
        assert!(refused(&["add", "resume", "a"]).contains("start, stop, snapshot, mark or end"));
        assert!(refused(&["add", "mark", "a:0"]).contains("\"0\" is not the number of a call"));
        assert!(refused(&["add", "mark", "a if pid ="]).contains("pid ="));
        assert!(parse(&["remove", "a"]).is_err() && parse(&["add", "mark"]).is_err());
        assert!(parse(&["list", "--json"]).is_ok() && parse(&["remove", "3"]).is_ok());
    }

    #[test]
    fn a_status_is_a_table() {
        let text = table(r#"{"state":"tracing","records":[1,2],"sites":{"matched":3}}"#).unwrap();
        assert_eq!(text, "records    1 2\nsites      matched 3\nstate      tracing\n");
        let pauses = table(r#"{"pauses":{"count":2,"max_ns":213735285,"total_ns":999}}"#).unwrap();
        assert_eq!(pauses, "pauses     count 2, max 213.7ms, total 999.0ns\n");
        assert!(table("fine").is_err());
        let modules = r#"{"modules":[{"functions":21,"name":"dummy"},{"functions":3,"name":"xfs"}],
            "sites":{"shared":1,"shared_with":{"kprobes":1},"with":{}}}"#;
        assert_eq!(
            table(modules).unwrap(),
            "modules    dummy: functions 21\n           xfs: functions 3\n\
             sites      shared 1, shared_with (kprobes 1), with none\n"
        );
    }
}
