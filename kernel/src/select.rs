//! Selects the sites that filters match.

use super::near::Near;
use super::read::index;
use super::sites::UNNAMED;
use super::symbols::Symbols;
use super::{Functions, Kernel, KernelError};

/// The result of filters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Indices into [`Kernel::sites`], ascending.
    pub sites: Vec<usize>,
    /// The patterns of the filter that match no function. Those that mean modules are not among
    /// them: what they match is not known before modules are loaded.
    pub unmatched: Vec<String>,
    /// The patterns of what is to be left out that match no function.
    pub unmatched_notrace: Vec<String>,
}

/// Patterns with a note of which have matched anything.
struct Patterns<'a>(Vec<(&'a str, Functions<'a>, bool)>);

impl<'a> Patterns<'a> {
    fn new(patterns: &'a [String]) -> Self {
        Self(patterns.iter().map(|p| (p.as_str(), Functions::of(p), false)).collect())
    }

    /// Whether one matches the symbol number `first` or another at its address. Tries all, so that each is known to match something or not.
    fn matches(&mut self, symbols: &Symbols, first: usize) -> bool {
        let mut any = false;
        for (_, functions, matched) in &mut self.0 {
            if symbols.names_from(first).any(|name| functions.matches(name, None)) {
                (*matched, any) = (true, true);
            }
        }
        any
    }

    fn unmatched(&self) -> Vec<String> {
        let missing = |(_, functions, matched): &&(&str, Functions<'_>, bool)| {
            !matched && functions.module().is_none()
        };
        self.0.iter().filter(missing).map(|(p, ..)| (*p).to_owned()).collect()
    }
}

impl Kernel {
    /// The sites to trace, as indices into [`Kernel::sites`]: those that a filter matches, or all
    /// that have a name without any filter, less those that `notrace` matches. A pattern matches
    /// a site if it matches any symbol at the function's entry.
    ///
    /// It is an error if nothing is left; [`Kernel::select_with_report`] also tells the patterns
    /// that match nothing beside others that do.
    pub fn select(&self, filter: &[String], notrace: &[String]) -> Result<Vec<usize>, KernelError> {
        let selection = self.select_with_report(filter, notrace);
        if selection.sites.is_empty() {
            return Err(self.no_match(selection.unmatched));
        }
        Ok(selection.sites)
    }

    /// The error of filters that leave nothing, with what was meant, perhaps.
    pub fn no_match(&self, globs: Vec<String>) -> KernelError {
        let near = globs.first().map(|glob| self.near_functions(glob)).unwrap_or_default();
        KernelError::NoMatch { globs, near }
    }

    /// The end of a message for a pattern that matches no function: names that differ from it in
    /// few letters, or that the kernel has this function, but without a call site. Empty for
    /// patterns that are no names, and where nothing is near.
    pub fn near_functions(&self, glob: &str) -> String {
        if glob.contains(['*', '?', '[', '\\']) {
            return String::new();
        }
        let space = &self.image.space;
        if self.symbols.addresses(glob).any(|address| space.is_code(address)) {
            return "; the kernel has this function, but without a call site for ftrace".to_owned();
        }
        Near::to(glob, self.sites().iter().filter_map(|site| self.site_name(site))).to_string()
    }

    /// The same with the patterns that match no function.
    pub fn select_with_report(&self, filter: &[String], notrace: &[String]) -> Selection {
        let (mut wanted, mut unwanted) = (Patterns::new(filter), Patterns::new(notrace));
        let mut sites = Vec::new();
        for (i, &symbol) in self.sites.symbols.iter().enumerate() {
            if symbol == UNNAMED {
                continue;
            }
            let first = index(symbol.into());
            let kept = filter.is_empty() || wanted.matches(&self.symbols, first);
            let dropped = !notrace.is_empty() && unwanted.matches(&self.symbols, first);
            if kept && !dropped {
                sites.push(i);
            }
        }
        Selection { sites, unmatched: wanted.unmatched(), unmatched_notrace: unwanted.unmatched() }
    }
}
