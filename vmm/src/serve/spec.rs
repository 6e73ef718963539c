//! Parses specifications of tracers: `[NAME=]GLOB[,GLOB...][:ACTION[+ACTION...]][ if CONDITION]`.

use crate::condition::{Condition, ConditionError};
use std::fmt;
use std::str::FromStr;

/// Longest name of a tracer, bytes.
const NAME_MAX: usize = 32;

/// Between functions and the module that they must be in.
pub(super) const MODULE: &str = ":mod:";

/// Between what is traced and under which condition.
pub(super) const IF: &str = " if ";

/// What a tracer does with a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Actions {
    /// Records where it is left, too.
    pub graph: bool,
    /// Records its parameters.
    pub args: bool,
    /// Records where it is left, and what it returns.
    pub retval: bool,
    /// Counts its calls, and records nothing.
    pub count: bool,
    /// Counts its calls by caller, and records nothing.
    pub callers: bool,
}

impl Actions {
    /// All words for them.
    const KNOWN: &'static str =
        "entry, graph, args, retval, count, callers, hist, hist(retval) or hist(PARAMETER)";

    /// Whether it records where functions are left.
    #[must_use]
    pub fn exits(self) -> bool {
        self.graph || self.retval
    }

    /// Whether it records calls from their beginnings to their ends: what they return needs only the ends where such a
    /// condition chooses them.
    #[must_use]
    pub fn graphs(self, condition: Option<&Condition>) -> bool {
        self.graph || (self.retval && !condition.is_some_and(Condition::is_of_ends))
    }

    /// Whether it counts calls instead of recording them.
    #[must_use]
    pub fn counts(self) -> bool {
        self.count || self.callers
    }
}

/// What calls are sorted by, into a histogram of each function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HistogramSpec {
    /// How long they take.
    Duration,
    /// What they return.
    Value,
    /// This parameter (`args.NAME` where it is called as something else is).
    Argument(String),
}

impl HistogramSpec {
    /// Before what is sorted, as an action.
    const WORD: &str = "hist";

    /// The duration, or what is named, if it can be a name.
    fn of(name: &str) -> Option<Self> {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
        Some(match name {
            "duration" => Self::Duration,
            "retval" => Self::Value,
            _ if name.is_empty() || !name.chars().all(good) => return None,
            _ => Self::Argument(name.to_owned()),
        })
    }

    /// An action, if it is one of these.
    fn action(word: &str) -> Option<Self> {
        let of = word.strip_prefix(Self::WORD)?;
        if of.is_empty() {
            return Some(Self::Duration);
        }
        Self::of(of.strip_prefix('(')?.strip_suffix(')')?)
    }
}

impl fmt::Display for HistogramSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Duration => "duration",
            Self::Value => "retval",
            Self::Argument(name) => name,
        })
    }
}

/// A tracer that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracerSpec {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Functions that it traces.
    pub filter: Vec<String>,
    /// Exceptions of its own: globs with `!` before them.
    pub notrace: Vec<String>,
    /// What it does.
    pub actions: Actions,
    /// Sorts calls, and records nothing.
    pub histogram: Option<HistogramSpec>,
    /// Of which calls; `None` for all.
    pub condition: Option<Condition>,
}

/// Why a text is no tracer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// A name that could not be told from something else.
    #[error("{0:?} is not the name of a tracer: use letters, digits, - and _, at most {NAME_MAX}")]
    Name(String),
    /// Between two commas.
    #[error("{0:?} has an empty glob: use GLOB[,GLOB...], with ! before exceptions")]
    NoGlob(String),
    /// A name of a function has none.
    #[error("{0:?} is not a glob: names of functions have no spaces")]
    Space(String),
    /// Behind the colon.
    #[error("{0:?} is not an action of a tracer: use {known}", known = Actions::KNOWN)]
    Action(String),
    /// Nothing is recorded of what is only counted.
    #[error(
        "a tracer with count, callers or hist does nothing else: make {0:?} several tracers, one for each \
         action"
    )]
    Count(String),
    /// Of what has no place for one.
    #[error("{0:?} has a name, but {1} takes none: use --tracer NAME=GLOB:{2}")]
    Named(String, &'static str, &'static str),
    /// Of what has none but its own.
    #[error("{0:?} has an action, but --count-callers takes none: use --tracer GLOB:ACTION")]
    NoAction(String),
    /// No histogram is of that.
    #[error("no histogram of {0:?}: use duration, retval or the name of a parameter")]
    Sorted(String),
    /// Behind `if`.
    #[error(transparent)]
    Condition(#[from] ConditionError),
}

/// Whether a tracer can have this name.
pub(super) fn is_name(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    !text.is_empty() && text.len() <= NAME_MAX && text.chars().all(good)
}

/// What is traced, and of which calls.
fn split_condition(text: &str) -> Result<(&str, Option<Condition>), SpecError> {
    Ok(match text.split_once(IF) {
        Some((text, condition)) => (text.trim_end(), Some(condition.parse()?)),
        None => (text, None),
    })
}

/// Globs, and what stands behind their colon: not those of `GLOB:mod:NAME`.
fn split_words(text: &str) -> (&str, Option<&str>) {
    let from = text.rfind(MODULE).map_or(0, |at| at + MODULE.len());
    match text[from..].split_once(':') {
        None => (text, None),
        Some((globs, words)) => (&text[..from + globs.len()], Some(words)),
    }
}

/// Functions, and exceptions: of the globs in `text`.
fn split_globs(globs: &str, text: &str) -> Result<(Vec<String>, Vec<String>), SpecError> {
    let (mut filter, mut notrace) = (Vec::new(), Vec::new());
    for glob in globs.split(',') {
        let (list, glob) = match glob.strip_prefix('!') {
            Some(glob) => (&mut notrace, glob),
            None => (&mut filter, glob),
        };
        if glob.is_empty() {
            return Err(SpecError::NoGlob(text.to_owned()));
        }
        if glob.contains(char::is_whitespace) {
            return Err(SpecError::Space(glob.to_owned()));
        }
        list.push(glob.to_owned());
    }
    Ok((filter, notrace))
}

impl TracerSpec {
    /// One that only sorts calls: `GLOB[,GLOB...][:OF][ if CONDITION]`, by their duration if nothing is said.
    ///
    /// # Errors
    /// Why it is none.
    pub fn sorting(text: &str) -> Result<Self, SpecError> {
        let (text, condition) = split_condition(text)?;
        if text.contains('=') {
            return Err(SpecError::Named(text.to_owned(), "--hist", "hist"));
        }
        let (globs, of) = split_words(text);
        let histogram = match of {
            None => HistogramSpec::Duration,
            Some(of) => HistogramSpec::of(of).ok_or_else(|| SpecError::Sorted(of.to_owned()))?,
        };
        let (filter, notrace) = split_globs(globs, text)?;
        let (name, actions, histogram) = (None, Actions::default(), Some(histogram));
        Ok(Self { name, filter, notrace, actions, histogram, condition })
    }
}

impl TracerSpec {
    /// One that only counts calls by caller: `GLOB[,GLOB...][ if CONDITION]`.
    ///
    /// # Errors
    /// Why it is none.
    pub fn by_caller(text: &str) -> Result<Self, SpecError> {
        let (text, condition) = split_condition(text)?;
        if text.contains('=') {
            return Err(SpecError::Named(text.to_owned(), "--count-callers", "callers"));
        }
        let (globs, words) = split_words(text);
        if words.is_some() {
            return Err(SpecError::NoAction(text.to_owned()));
        }
        let (filter, notrace) = split_globs(globs, text)?;
        let actions = Actions { callers: true, ..Actions::default() };
        Ok(Self { name: None, filter, notrace, actions, histogram: None, condition })
    }
}

impl FromStr for TracerSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (text, condition) = split_condition(text)?;
        let (name, rest) = match text.split_once('=') {
            None => (None, text),
            Some((name, _)) if !is_name(name) => return Err(SpecError::Name(name.to_owned())),
            Some((name, rest)) => (Some(name.to_owned()), rest),
        };
        let (globs, words) = split_words(rest);
        let mut actions = Actions::default();
        let mut histogram = None;
        for word in words.into_iter().flat_map(|words| words.split('+')) {
            match word {
                "entry" => {}
                "graph" => actions.graph = true,
                "args" => actions.args = true,
                "retval" => actions.retval = true,
                "count" => actions.count = true,
                "callers" => actions.callers = true,
                other => match HistogramSpec::action(other) {
                    Some(of) => histogram = Some(of),
                    None => return Err(SpecError::Action(other.to_owned())),
                },
            }
        }
        let alone = actions.counts() || histogram.is_some();
        if alone && words.is_some_and(|words| words.contains('+')) {
            return Err(SpecError::Count(text.to_owned()));
        }
        let (filter, notrace) = split_globs(globs, text)?;
        Ok(Self { name, filter, notrace, actions, histogram, condition })
    }
}

/// `GLOB[,GLOB...]`, with `!` before exceptions.
pub(super) fn write_globs(
    f: &mut fmt::Formatter<'_>,
    filter: &[String],
    notrace: &[String],
) -> fmt::Result {
    let exceptions = notrace.iter().map(|glob| ("!", glob));
    let globs = filter.iter().map(|glob| ("", glob)).chain(exceptions);
    for (index, (mark, glob)) in globs.enumerate() {
        let comma = if index == 0 { "" } else { "," };
        write!(f, "{comma}{mark}{glob}")?;
    }
    Ok(())
}

impl fmt::Display for TracerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}=")?;
        }
        write_globs(f, &self.filter, &self.notrace)?;
        let Actions { graph, args, retval, count, callers } = self.actions;
        let words = [
            (graph, "graph"),
            (args, "args"),
            (retval, "retval"),
            (count, "count"),
            (callers, "callers"),
        ];
        for (index, (_, word)) in words.into_iter().filter(|(wanted, _)| *wanted).enumerate() {
            write!(f, "{}{word}", if index == 0 { ":" } else { "+" })?;
        }
        if let Some(of) = &self.histogram {
            write!(f, ":{}({of})", HistogramSpec::WORD)?;
        }
        if let Some(condition) = &self.condition {
            write!(f, "{IF}{condition}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // `vfs_read:retval if retval > 0` was refused for a graph that nobody had asked for.
    #[test]
    fn what_ends_return_is_no_graph() {
        for (text, graphs) in [
            ("a:retval", true),
            ("a:retval if pid == 1", true),
            ("a:retval if retval > 0", false),
            ("a:retval if duration > 1ms", false),
            ("a:args if retval > 0", false),
            ("a:graph+retval if retval > 0", true),
        ] {
            let spec: TracerSpec = text.parse().unwrap();
            assert_eq!(spec.actions.graphs(spec.condition.as_ref()), graphs, "{text}");
        }
    }

    // An emulated host and a running trace get tracers as text again.
    #[test]
    fn tracers_survive_being_text() {
        for text in [
            "vfs_*",
            "fs=vfs_*,ksys_read,!vfs_read",
            "vfs_read:graph",
            "a-1=*:graph",
            "!x",
            "a:args+retval",
            "a:graph+args+retval",
            "ext4_*:mod:ext4,vfs_read",
            "fs=:mod:ext4,vfs_read,!a:mod:b:graph",
            "vfs_read if count > 4K",
            "reads=vfs_read:count if count > 4K",
            "who=ksys_read,!a:mod:b:callers if pid == 3",
            "vfs_*:hist(duration)",
            "a=x:mod:y,z:hist(retval) if pid == 1",
            "vfs_read:hist(args.count)",
            "a=x,!y:args if pid == 1 && comm == \"a=b:c if d\"",
        ] {
            assert_eq!(text.parse::<TracerSpec>().unwrap().to_string(), text);
        }
        let spec: TracerSpec = "fs=a*,!ab*,b:entry+graph".parse().unwrap();
        assert_eq!((spec.name.as_deref(), spec.actions.graph), (Some("fs"), true));
        assert_eq!(
            (spec.filter, spec.notrace),
            (vec!["a*".into(), "b".into()], vec!["ab*".into()])
        );
    }

    // What is sorted by something else than was asked for is an answer to another question.
    #[test]
    fn histograms_are_tracers_of_their_own() {
        for (text, spec) in [
            ("vfs_*", "vfs_*:hist(duration)"),
            ("a:mod:b,!c:retval", "a:mod:b,!c:hist(retval)"),
            ("vfs_read:args.count if count > 4K", "vfs_read:hist(args.count) if count > 4K"),
        ] {
            assert_eq!(TracerSpec::sorting(text).unwrap().to_string(), spec);
            assert_eq!(TracerSpec::sorting(text).unwrap(), spec.parse().unwrap());
        }
        for bad in ["", "a,", "a:", "a:b c", "a:b+count", "x=a", "a b", "a if pid = 1"] {
            assert!(TracerSpec::sorting(bad).is_err(), "{bad:?}");
        }
    }

    // As above, of callers.
    #[test]
    fn callers_are_counted_by_tracers_of_their_own() {
        for (text, spec) in [
            ("vfs_*", "vfs_*:callers"),
            ("a:mod:b,!c if pid == 1", "a:mod:b,!c:callers if pid == 1"),
        ] {
            assert_eq!(TracerSpec::by_caller(text).unwrap().to_string(), spec);
            assert_eq!(TracerSpec::by_caller(text).unwrap(), spec.parse().unwrap());
        }
        for bad in ["", "a,", "a:", "a:count", "a:callers", "x=a", "a b", "a if pid = 1"] {
            assert!(TracerSpec::by_caller(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_is_no_tracer_is_refused() {
        for bad in [
            "",
            "a,",
            ",a",
            "a,,b",
            "=a",
            "a b=c",
            "a:",
            "a:grpah",
            "a:graph+",
            "!",
            "n=",
            "\u{e9}=a",
            "a b",
            "a if ",
            "a if pid = 1",
            " if pid == 1",
            "a:count+graph",
            "a:entry+count",
            "a:count+callers",
            "a:callers(x)",
            "a:hist+count",
            "a:hist+hist(x)",
            "a:hist()",
            "a:hist(x",
            "a:hist(x y)",
            "a:histx",
        ] {
            assert!(bad.parse::<TracerSpec>().is_err(), "{bad:?}");
        }
    }
}
