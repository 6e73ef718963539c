//! Which of the patterns of a command line have met functions in a trace.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::kernel::{Functions, Near, glob};

/// How lines about a trace begin, or about what a tracer has recorded in it.
pub(super) fn none_of(tracer: Option<&str>) -> String {
    match tracer {
        Some(name) => format!("tracer {name} has no record"),
        None => "the trace has no record".to_owned(),
    }
}

/// Patterns that no function was like so far. Threads share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// All are met: the rest is not looked at.
    done: AtomicBool,
    rest: Mutex<Rest>,
}

#[derive(Debug, Default)]
struct Rest {
    unmet: Vec<Pattern>,
    functions: BTreeSet<String>,
    modules: BTreeSet<String>,
}

#[derive(Debug)]
struct Pattern {
    option: &'static str,
    text: String,
    of_module: bool,
}

impl Pattern {
    fn is(&self, name: &str, module: Option<&str>) -> bool {
        if self.of_module {
            return glob::matches(&self.text, module.unwrap_or_default());
        }
        Functions::of(&self.text).matches(name, module)
    }
}

impl Wanted {
    /// Names that are kept: a kernel has fewer functions.
    const MOST: usize = 1 << 17;

    /// These options with their patterns, of functions or, as `--module`, of modules.
    pub(super) fn new<'a>(options: impl IntoIterator<Item = (&'static str, &'a [String])>) -> Self {
        let pattern = |option, text: &String| {
            let of_module = option == "--module";
            Pattern { option, text: text.clone(), of_module }
        };
        let patterns = |(option, texts): (&'static str, &'a [String])| {
            texts.iter().map(move |text| pattern(option, text))
        };
        let unmet: Vec<_> = options.into_iter().flat_map(patterns).collect();
        let done = AtomicBool::new(unmet.is_empty());
        let rest = Mutex::new(Rest { unmet, ..Rest::default() });
        Self(Arc::new(Shared { done, rest }))
    }

    /// Whether there is nothing to look for.
    pub(super) fn is_done(&self) -> bool {
        self.0.done.load(Ordering::Relaxed)
    }

    /// There is a record of this function, or several.
    pub(super) fn see(&self, name: &str, module: Option<&str>) {
        if self.is_done() {
            return;
        }
        let mut rest = self.0.rest.lock().unwrap_or_else(PoisonError::into_inner);
        rest.unmet.retain(|pattern| !pattern.is(name, module));
        self.0.done.store(rest.unmet.is_empty(), Ordering::Relaxed);
        if rest.functions.len() < Self::MOST {
            rest.functions.insert(name.to_owned());
        }
        if let Some(module) = module
            && rest.modules.len() < Self::MOST
        {
            rest.modules.insert(module.to_owned());
        }
    }

    /// A line for each pattern that was like none, with names that are near; `none` is the beginning of
    /// a sentence, such as [`none_of`].
    pub(super) fn notes(&self, none: &str) -> Vec<String> {
        let rest = self.0.rest.lock().unwrap_or_else(PoisonError::into_inner);
        let note = |Pattern { option, text, of_module }: &Pattern| {
            let (what, names) =
                if *of_module { ("module", &rest.modules) } else { ("function", &rest.functions) };
            let is_glob = text.contains(['*', '?', '[', '\\', ':']);
            let near = if is_glob {
                Near::default()
            } else {
                Near::to(text, names.iter().map(String::as_str))
            };
            format!("{option} {text}: {none} of such a {what}{near}")
        };
        rest.unmet.iter().map(note).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A name with a slip in it prints nothing, as one that was never called.
    #[test]
    fn what_met_nothing_is_told_with_what_is_near() {
        let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let functions = texts(&["vfs_raed", "vfs_*", "x*", "ext4_open:mod:ext4"]);
        let modules = texts(&["ext", "ext4"]);
        let wanted = Wanted::new([("-f", &*functions), ("--module", &*modules)]);
        let other = wanted.clone();
        other.see("vfs_read", None);
        other.see("ext4_open", None);
        wanted.see("ext4_sync", Some("ext4"));
        assert_eq!(
            wanted.notes(&none_of(None)),
            [
                "-f vfs_raed: the trace has no record of such a function; near: vfs_read",
                "-f x*: the trace has no record of such a function",
                "-f ext4_open:mod:ext4: the trace has no record of such a function",
                "--module ext: the trace has no record of such a module; near: ext4",
            ]
        );
        assert!(!wanted.is_done());
        wanted.see("ext4_open", Some("ext4"));
        wanted.see("xvfs_raed", Some("ext"));
        wanted.see("vfs_raed", None);
        assert!(wanted.is_done() && wanted.notes(&none_of(None)).is_empty());
    }
}
