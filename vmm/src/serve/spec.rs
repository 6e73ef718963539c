//! Tracers as people write them: `[NAME=]GLOB[,GLOB...][:ACTION[+ACTION...]][ if CONDITION]`.

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
}

impl Actions {
    /// All words for them.
    const KNOWN: &'static str =
        "entry, graph, args, retval, count, hist, hist(retval) or hist(PARAMETER)";

    /// Whether it records where functions are left.
    #[must_use]
    pub fn exits(self) -> bool {
        self.graph || self.retval
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

    /// The duration, or what is named.
    #[must_use]
    pub fn of(name: &str) -> Self {
        match name {
            "duration" => Self::Duration,
            "retval" => Self::Value,
            _ => Self::Argument(name.to_owned()),
        }
    }

    /// An action, if it is one of these.
    fn action(word: &str) -> Option<Self> {
        let of = word.strip_prefix(Self::WORD)?;
        if of.is_empty() {
            return Some(Self::Duration);
        }
        let name = of.strip_prefix('(')?.strip_suffix(')')?;
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
        (!name.is_empty() && name.chars().all(good)).then(|| Self::of(name))
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
    #[error("{0:?} is no name of a tracer: say letters, digits, - and _, at most {NAME_MAX}")]
    Name(String),
    /// Between two commas.
    #[error("{0:?} has an empty glob: say GLOB[,GLOB...], with ! before exceptions")]
    NoGlob(String),
    /// A name of a function has none.
    #[error("{0:?} is no glob: names of functions have no spaces")]
    Space(String),
    /// Behind the colon.
    #[error("{0:?} is no action of a tracer: say {known}", known = Actions::KNOWN)]
    Action(String),
    /// Nothing is recorded of what is only counted.
    #[error("count and hist are the only action of a tracer: let {0:?} be several, one for each")]
    Count(String),
    /// Behind `if`.
    #[error(transparent)]
    Condition(#[from] ConditionError),
}

/// Whether a tracer can have this name.
pub(super) fn is_name(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    !text.is_empty() && text.len() <= NAME_MAX && text.chars().all(good)
}

impl FromStr for TracerSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (text, condition) = match text.split_once(IF) {
            Some((text, condition)) => (text.trim_end(), Some(condition.parse()?)),
            None => (text, None),
        };
        let (name, rest) = match text.split_once('=') {
            None => (None, text),
            Some((name, _)) if !is_name(name) => return Err(SpecError::Name(name.to_owned())),
            Some((name, rest)) => (Some(name.to_owned()), rest),
        };
        // Not the colons of GLOB:mod:NAME.
        let from = rest.rfind(MODULE).map_or(0, |at| at + MODULE.len());
        let (globs, words) = match rest[from..].split_once(':') {
            None => (rest, None),
            Some((globs, words)) => (&rest[..from + globs.len()], Some(words)),
        };
        let mut actions = Actions::default();
        let mut histogram = None;
        for word in words.into_iter().flat_map(|words| words.split('+')) {
            match word {
                "entry" => {}
                "graph" => actions.graph = true,
                "args" => actions.args = true,
                "retval" => actions.retval = true,
                "count" => actions.count = true,
                other => match HistogramSpec::action(other) {
                    Some(of) => histogram = Some(of),
                    None => return Err(SpecError::Action(other.to_owned())),
                },
            }
        }
        let alone = actions.count || histogram.is_some();
        if alone && words.is_some_and(|words| words.contains('+')) {
            return Err(SpecError::Count(text.to_owned()));
        }
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
        let Actions { graph, args, retval, count } = self.actions;
        let words = [(graph, "graph"), (args, "args"), (retval, "retval"), (count, "count")];
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
