//! The first line of a connection.

use super::spec::{SpecError, TracerSpec, is_name};
use super::trigger::{TriggerAction, TriggerError, TriggerSpec};
use crate::agent::AgentMark;
use crate::analyze::latency::Kind;
use crate::check::parse_time;
use crate::kernel::selects;
use clap::ValueEnum;
use std::fmt;
use vmtrace_agent::protocol::MARK_MAX;

/// Longest first line, its end included; bytes.
pub(super) const LINE_MAX: usize = 16 << 10;

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A process of the host that may open our socket: it may do anything.
    Host,
    /// Any process of the guest: it may mark the trace, and read it if [`super::GuestReaders`] says so.
    Guest,
}

/// How a consumer wants the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The binary format.
    Raw,
    /// As ftrace's function tracer.
    Text,
    /// One JSON object a line.
    Json,
    /// As ftrace's function_graph tracer.
    Graph,
}

/// Functions by name, as `set_ftrace_filter` and `set_ftrace_notrace` have them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Globs {
    /// One of these must match; none: all do.
    pub filter: Vec<String>,
    /// None of these may match.
    pub notrace: Vec<String>,
}

impl Globs {
    /// Whether all functions are meant.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.filter.is_empty() && self.notrace.is_empty()
    }

    /// Whether a function of this name is meant, in this module; `None`: in the kernel itself.
    pub(crate) fn mean(&self, name: &str, module: Option<&str>) -> bool {
        selects(&self.filter, &self.notrace, module, &std::iter::once(name))
    }

    /// `-f GLOB` and `-n GLOB`, any number of them.
    fn parse<'a>(words: impl Iterator<Item = &'a str>) -> Result<Self, RequestError> {
        match options(words)? {
            (globs, None) => Ok(globs),
            (_, Some(_)) => Err(RequestError::Option("-t".to_owned())),
        }
    }
}

impl fmt::Display for Globs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = self.filter.iter().map(|glob| ("-f", glob));
        let options = options.chain(self.notrace.iter().map(|glob| ("-n", glob)));
        for (index, (option, glob)) in options.enumerate() {
            let space = if index == 0 { "" } else { " " };
            write!(f, "{space}{option} {glob}")?;
        }
        Ok(())
    }
}

/// `-f GLOB` and `-n GLOB`, any number of them, and `-t NAME`.
fn options<'a>(
    mut words: impl Iterator<Item = &'a str>,
) -> Result<(Globs, Option<String>), RequestError> {
    let (mut globs, mut tracer) = (Globs::default(), None);
    while let Some(option) = words.next() {
        if !matches!(option, "-f" | "-n" | "-t") {
            return Err(RequestError::Option(cut(option)));
        }
        let value = words.next().ok_or_else(|| RequestError::NoGlob(option.to_owned()))?.to_owned();
        match option {
            "-f" => globs.filter.push(value),
            "-n" => globs.notrace.push(value),
            _ => tracer = Some(value),
        }
    }
    Ok((globs, tracer))
}

/// What a consumer wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamRequest {
    /// How.
    pub format: Format,
    /// Records of which functions.
    pub globs: Globs,
    /// Records of the tracer of this name only.
    pub tracer: Option<String>,
}

/// A command to the running trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    /// Tell the status.
    Status,
    /// Tell what has been counted.
    Table,
    /// Trace these functions from now on.
    Filter(Globs),
    /// Trace for another tracer, too.
    TracerAdd(TracerSpec),
    /// End the tracer with this name.
    TracerRemove(String),
    /// Tell which tracers there are.
    TracerList,
    /// Trace the events that this pattern matches, too.
    EventAdd(String),
    /// Trace the events that this pattern matches no more.
    EventRemove(String),
    /// Tell which events are traced.
    EventList,
    /// Do something once, at a call to come.
    TriggerAdd {
        /// What.
        action: TriggerAction,
        /// At which call.
        spec: TriggerSpec,
    },
    /// Forget the trigger that was given this number, whether it was done or not.
    TriggerRemove(u32),
    /// Tell which triggers there are.
    TriggerList,
    /// Measure latencies from now on.
    LatencyStart {
        /// Which.
        kind: Kind,
        /// Those of at least so many nanoseconds are listed.
        over: Option<u64>,
    },
    /// Tell what was found of them so far.
    LatencyShow {
        /// As lines of JSON.
        json: bool,
    },
    /// Measure them no more, and tell what was found.
    LatencyStop {
        /// As lines of JSON.
        json: bool,
    },
    /// Give all sites back until `Resume`.
    Pause,
    /// Go on after `Pause`.
    Resume,
    /// End the trace; the guest lives on.
    Stop,
    /// Forget the records that no consumer has been given yet.
    Clear,
    /// Write what a flight recorder has into the stream; it goes on.
    Snapshot,
    /// Put a mark into the trace.
    Mark {
        /// When, in the clock of the records; `None`: now.
        ticks: Option<u64>,
        /// What to show.
        text: String,
    },
}

/// What a connection is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The stream.
    Stream(StreamRequest),
    /// A command.
    Control(Control),
    /// A connection to the agent in the guest.
    Agent,
}

/// Why a first line is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Nothing known.
    #[error(
        "unknown request {0:?}: use raw, text, json or graph, then -f GLOB, -n GLOB or -t TRACER if wanted"
    )]
    Unknown(String),
    /// A guest asks for what is the host's.
    #[error("{0:?} is for processes of the host only")]
    HostOnly(String),
    /// Not a command.
    #[error(
        "unknown command {0:?}: use status, table, filter, tracer, event, trigger, latency, pause, resume, stop, clear, snapshot or mark"
    )]
    Command(String),
    /// Not a command about tracers.
    #[error("unknown command {0:?}: use tracer add SPEC, tracer remove NAME or tracer list")]
    Tracer(String),
    /// Not a command about events.
    #[error("unknown command {0:?}: use event add GLOB, event remove GLOB or event list")]
    Event(String),
    /// Not a command about triggers.
    #[error(
        "unknown command {0:?}: use trigger add ACTION SPEC, trigger remove ID or trigger list"
    )]
    Trigger(String),
    /// Not the number of a trigger.
    #[error("{0:?} is not the number of a trigger: see trigger list")]
    TriggerId(String),
    /// Not a command about latencies.
    #[error(
        "unknown command {0:?}: use latency start KIND [TIME], latency show [json] or latency stop [json]"
    )]
    Latency(String),
    /// Not a kind of latencies.
    #[error("{0:?} is not a kind of latency: use {kinds}", kinds = kinds())]
    Kind(String),
    /// Not a time.
    #[error("{0:?} is not a time: use for example 500ns, 10us, 1ms or 2s")]
    Time(String),
    /// Not a tracer.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Not a trigger.
    #[error(transparent)]
    TriggerSpec(#[from] TriggerError),
    /// Not an option.
    #[error("unknown option {0:?}: use -f GLOB or -n GLOB, or -t TRACER for a stream")]
    Option(String),
    /// A command has something behind it.
    #[error("{verb} takes no arguments, but {more:?} follows it")]
    More {
        /// The command.
        verb: String,
        /// What is too much.
        more: String,
    },
    /// An option without its value.
    #[error("{0} needs a value")]
    NoGlob(String),
    /// A mark that cannot be.
    #[error(
        "a mark is `mark TICKS TEXT`, with 1 to {MARK_MAX} bytes of text without control characters"
    )]
    Mark,
}

fn kinds() -> String {
    Kind::value_variants().iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

/// `add ACTION SPEC`, `remove ID` or `list`, in a line.
fn trigger<'a>(
    line: &str,
    mut words: impl Iterator<Item = &'a str>,
) -> Result<Control, RequestError> {
    let verb = words.next().unwrap_or_default();
    let command = match (verb, words.next()) {
        ("add", Some(action)) => {
            // A condition has spaces.
            let spec = line.split_once(" add ").map_or("", |(_, rest)| rest.trim());
            let spec = spec.strip_prefix(action).unwrap_or_default();
            let action = action.parse().map_err(|error| match error {
                TriggerError::Action(text) => TriggerError::Action(cut(&text)),
                other => other,
            })?;
            return Ok(Control::TriggerAdd { action, spec: spec.trim().parse()? });
        }
        ("remove", Some(id)) => {
            let id = id.parse().map_err(|_| RequestError::TriggerId(cut(id)))?;
            Control::TriggerRemove(id)
        }
        ("list", None) => Control::TriggerList,
        _ => return Err(RequestError::Trigger(cut(verb))),
    };
    match words.next() {
        None => Ok(command),
        Some(more) => Err(RequestError::More { verb: format!("trigger {verb}"), more: cut(more) }),
    }
}

/// `start KIND [TIME]`, `show [json]` or `stop [json]`
fn latency<'a>(mut words: impl Iterator<Item = &'a str>) -> Result<Control, RequestError> {
    let verb = words.next().unwrap_or_default();
    let first = words.next();
    let json = first == Some("json");
    let command = match (verb, first) {
        ("start", Some(name)) => {
            let kinds = Kind::value_variants().iter();
            let kind = kinds.copied().find(|kind| kind.name() == name);
            let kind = kind.ok_or_else(|| RequestError::Kind(cut(name)))?;
            let time = |text| parse_time(text).ok_or_else(|| RequestError::Time(cut(text)));
            Control::LatencyStart { kind, over: words.next().map(time).transpose()? }
        }
        ("show", None | Some("json")) => Control::LatencyShow { json },
        ("stop", None | Some("json")) => Control::LatencyStop { json },
        _ => return Err(RequestError::Latency(cut(verb))),
    };
    match words.next() {
        None => Ok(command),
        Some(more) => Err(RequestError::More { verb: format!("latency {verb}"), more: cut(more) }),
    }
}

/// Not more of a stranger's text than an error should repeat.
fn cut(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(40).collect()
}

impl Request {
    /// Reads a first line, given without its end.
    ///
    /// # Errors
    /// When it is none, or not for this origin.
    pub fn parse(line: &str, origin: Origin) -> Result<Self, RequestError> {
        let mut words = line.split_ascii_whitespace();
        let verb = words.next().unwrap_or_default();
        let format = match verb {
            "raw" => Format::Raw,
            "text" => Format::Text,
            "json" => Format::Json,
            "graph" => Format::Graph,
            "mark" => return mark(line).map(Self::Control),
            "ctl" | "agent" if origin == Origin::Guest => {
                return Err(RequestError::HostOnly(verb.to_owned()));
            }
            "ctl" => return command(line, words).map(Self::Control),
            "agent" => return Ok(Self::Agent),
            other => return Err(RequestError::Unknown(cut(other))),
        };
        let (globs, tracer) = options(words)?;
        Ok(Self::Stream(StreamRequest { format, globs, tracer }))
    }
}

fn command<'a>(
    line: &str,
    mut words: impl Iterator<Item = &'a str>,
) -> Result<Control, RequestError> {
    let verb = words.next().unwrap_or_default();
    let command = match verb {
        "status" => Control::Status,
        "table" => Control::Table,
        "filter" => return Ok(Control::Filter(Globs::parse(words)?)),
        "tracer" => match (words.next(), words.next()) {
            // A condition has spaces.
            (Some("add"), Some(_)) => {
                let spec = line.split_once(" add ").map_or("", |(_, spec)| spec.trim());
                return Ok(Control::TracerAdd(spec.parse()?));
            }
            (Some("remove"), Some(name)) if is_name(name) => Control::TracerRemove(name.to_owned()),
            (Some("list"), None) => Control::TracerList,
            (verb, _) => return Err(RequestError::Tracer(cut(verb.unwrap_or_default()))),
        },
        "event" => match (words.next(), words.next()) {
            (Some("add"), Some(glob)) => Control::EventAdd(glob.to_owned()),
            (Some("remove"), Some(glob)) => Control::EventRemove(glob.to_owned()),
            (Some("list"), None) => Control::EventList,
            (verb, _) => return Err(RequestError::Event(cut(verb.unwrap_or_default()))),
        },
        "trigger" => return trigger(line, words),
        "latency" => return latency(words),
        "pause" => Control::Pause,
        "resume" => Control::Resume,
        "stop" => Control::Stop,
        "clear" => Control::Clear,
        "snapshot" => Control::Snapshot,
        "mark" => {
            let text = line.split_once("mark").map_or("", |(_, text)| text.trim());
            let text = AgentMark::is_text(text).then(|| text.to_owned());
            return Ok(Control::Mark { ticks: None, text: text.ok_or(RequestError::Mark)? });
        }
        other => return Err(RequestError::Command(cut(other))),
    };
    match words.next() {
        None => Ok(command),
        Some(more) => Err(RequestError::More { verb: verb.to_owned(), more: cut(more) }),
    }
}

/// `mark TICKS TEXT`
fn mark(line: &str) -> Result<Control, RequestError> {
    let rest = line.trim().split_once(' ').map_or("", |(_, rest)| rest);
    let AgentMark { ticks, text } = AgentMark::parse(rest).ok_or(RequestError::Mark)?;
    Ok(Control::Mark { ticks: Some(ticks), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(line: &str) -> Result<Request, RequestError> {
        Request::parse(line, Origin::Host)
    }

    #[test]
    fn streams() {
        let Ok(Request::Stream(request)) = host("text -f vfs_* -n *_read -f ksys_read") else {
            panic!("refused");
        };
        assert_eq!(request.format, Format::Text);
        assert_eq!(request.globs.to_string(), "-f vfs_* -f ksys_read -n *_read");
        assert_eq!(request.tracer, None);
        let Ok(Request::Stream(request)) = host("graph -t vfs -f vfs_*") else {
            panic!("refused");
        };
        assert_eq!((request.format, request.tracer.as_deref()), (Format::Graph, Some("vfs")));
        let Ok(Request::Stream(all)) = Request::parse("raw\r", Origin::Guest) else {
            panic!("refused");
        };
        assert!(all.globs.is_empty());
    }

    #[test]
    fn commands() {
        assert_eq!(host("ctl status"), Ok(Request::Control(Control::Status)));
        let mark = |ticks, text: &str| Request::Control(Control::Mark { ticks, text: text.into() });
        assert_eq!(host("ctl mark a b"), Ok(mark(None, "a b")));
        assert_eq!(host("mark 17 a b"), Ok(mark(Some(17), "a b")));
        assert_eq!(host("agent"), Ok(Request::Agent));
        let add = Control::TracerAdd("fs=vfs_*,!vfs_read".parse().unwrap());
        assert_eq!(host("ctl tracer add fs=vfs_*,!vfs_read"), Ok(Request::Control(add)));
        let text = "fs=vfs_*:graph if pid == 1 && comm != \"a b if c\"";
        let add = Control::TracerAdd(text.parse().unwrap());
        assert_eq!(host(&format!("ctl tracer add {text}")), Ok(Request::Control(add)));
        let remove = Control::TracerRemove("fs".into());
        assert_eq!(host("ctl tracer remove fs"), Ok(Request::Control(remove)));
        assert_eq!(host("ctl tracer list"), Ok(Request::Control(Control::TracerList)));
        let add = Control::EventAdd("block:*".into());
        assert_eq!(host("ctl event add block:*"), Ok(Request::Control(add)));
        let remove = Control::EventRemove("a:b".into());
        assert_eq!(host("ctl event remove a:b"), Ok(Request::Control(remove)));
        assert_eq!(host("ctl event list"), Ok(Request::Control(Control::EventList)));
        assert_eq!(host("ctl event add"), Err(RequestError::Event("add".into())));
        // A condition has what else would be words of a command.
        for text in ["vfs_read", "vfs_*,!vfs_read:3 if comm == \"a add stop b\" && pid == 1"] {
            for action in ["start", "stop", "snapshot", "mark", "end"] {
                let (spec, action) = (text.parse().unwrap(), action.parse().unwrap());
                let add = Control::TriggerAdd { action, spec };
                let line = format!("ctl trigger add {action} {text}");
                assert_eq!(host(&line), Ok(Request::Control(add)));
            }
        }
        let remove = Control::TriggerRemove(12);
        assert_eq!(host("ctl trigger remove 12"), Ok(Request::Control(remove)));
        assert_eq!(host("ctl trigger list"), Ok(Request::Control(Control::TriggerList)));
        let exec = host("ctl trigger add exec panic -- reboot").unwrap_err();
        assert_eq!(exec, RequestError::TriggerSpec(TriggerError::Exec));
        let start = |kind, over| Request::Control(Control::LatencyStart { kind, over });
        assert_eq!(host("ctl latency start osnoise"), Ok(start(Kind::Osnoise, None)));
        let over = Some(500_000);
        assert_eq!(host("ctl latency start wakeup_rt 500us"), Ok(start(Kind::WakeupRt, over)));
        let show = |json| Request::Control(Control::LatencyShow { json });
        assert_eq!(host("ctl latency show"), Ok(show(false)));
        assert_eq!(host("ctl latency show json"), Ok(show(true)));
        let stop = Request::Control(Control::LatencyStop { json: false });
        assert_eq!(host("ctl latency stop"), Ok(stop));
        let unknown = host("ctl latency start hwlat").unwrap_err().to_string();
        assert!(unknown.contains("irqsoff, preemptoff"), "{unknown}");
        assert!(host("ctl event list x").is_err() && host("ctl event add a b").is_err());
    }

    // A guest process must not steer the trace of its own guest.
    #[test]
    fn guests_only_read_and_mark() {
        for line in ["ctl stop", "ctl status", "agent"] {
            let error = Request::parse(line, Origin::Guest).unwrap_err();
            assert!(matches!(error, RequestError::HostOnly(_)), "{line}");
        }
        assert!(Request::parse("mark 1 x", Origin::Guest).is_ok());
    }

    #[test]
    fn nonsense() {
        for line in [
            "",
            "get",
            "raw -f",
            "raw vfs_*",
            "raw -t",
            "ctl filter -t vfs",
            "ctl",
            "ctl go",
            "ctl pause 10",
            "ctl status --json",
            "ctl stop vfs_*",
            "ctl tracer",
            "ctl tracer add",
            "ctl tracer add a:b",
            "ctl tracer add a b",
            "ctl tracer add a b if pid == 1",
            "ctl tracer add a if pid = 1",
            "ctl tracer remove",
            "ctl tracer remove a/b",
            "ctl tracer list all",
            "ctl trigger",
            "ctl trigger add",
            "ctl trigger add mark",
            "ctl trigger add vfs_read",
            "ctl trigger add resume vfs_read",
            "ctl trigger add mark vfs_read:0",
            "ctl trigger add mark vfs_read vfs_write",
            "ctl trigger add mark vfs_read if pid = 1",
            "ctl trigger add mark :mod:xfs:0",
            "ctl trigger remove",
            "ctl trigger remove -1",
            "ctl trigger remove mark",
            "ctl trigger remove 1 2",
            "ctl trigger list json",
            "ctl latency",
            "ctl latency start",
            "ctl latency start irqsoff 5",
            "ctl latency start irqsoff 5us x",
            "ctl latency show text",
            "ctl latency stop json x",
            "mark",
            "mark x y",
            "mark 1",
            "mark 1 a\u{7}",
        ] {
            assert!(host(line).is_err(), "{line}");
        }
        assert!(host(&format!("mark 1 {}", "x".repeat(MARK_MAX + 1))).is_err());
    }
}
