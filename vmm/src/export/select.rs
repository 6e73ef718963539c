//! The selection of what to show of a trace.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::stream::{Header, Tracer};

use super::Absent;
use super::names::{Symbols, Tracers, unnamed};
use super::pairing::Choice;

/// Most answers of a filter that are remembered.
const KNOWN: usize = 1 << 20;

/// Whether a function with this name, of this module, is wanted.
type Accepts = dyn Fn(&str, Option<&str>) -> bool + Send + Sync;

/// Which functions are wanted.
pub(super) struct Filter {
    accepts: Arc<Accepts>,
    /// Answers by address, until the names change.
    known: HashMap<u32, bool>,
}

impl Filter {
    fn new(accepts: impl Fn(&str, Option<&str>) -> bool + Send + Sync + 'static) -> Self {
        Self { accepts: Arc::new(accepts), known: HashMap::new() }
    }

    /// The same, without what it remembers.
    fn again(&self) -> Self {
        Self { accepts: Arc::clone(&self.accepts), known: HashMap::new() }
    }

    fn accepts(&mut self, symbols: &mut Symbols, header: &Header, function: u32) -> bool {
        if self.known.len() > KNOWN {
            self.known.clear();
        }
        *self.known.entry(function).or_insert_with(|| {
            let index = symbols.index(header, function);
            let name = symbols.name(header, function, index);
            match name.symbol {
                Some((name, module)) => {
                    (self.accepts)(name, (!module.is_empty()).then_some(module))
                }
                None => (self.accepts)(&format!("{:#x}", name.address), None),
            }
        })
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Filter").field("known", &self.known).finish_non_exhaustive()
    }
}

/// Which of the tracers have a name that is wanted.
#[derive(Clone, Debug)]
pub(crate) struct TracerChoice {
    name: String,
    numbers: Vec<bool>,
    /// One had the name, though another may have its number since.
    found: bool,
}

impl TracerChoice {
    /// Those of that name; a tracer without one is called `tracer`, and its number.
    pub(crate) fn new(name: String) -> Self {
        let numbers = (0..=u8::MAX).map(|number| unnamed(number) == name).collect();
        Self { name, numbers, found: false }
    }

    /// A tracer has a name from here on.
    pub(crate) fn learn(&mut self, tracer: Tracer<'_>) {
        if let Some(known) = self.numbers.get_mut(usize::from(tracer.number)) {
            *known = tracer.name == self.name;
            self.found |= *known;
        }
    }

    /// Whether one of the stream's tracers had that name; `all` are those that are known now.
    ///
    /// # Errors
    /// When none had.
    fn check<'a>(&self, all: impl Iterator<Item = &'a str> + Clone) -> Result<(), Absent> {
        if self.found || all.clone().any(|name| name == self.name) {
            return Ok(());
        }
        Err(Absent::tracer(&self.name, all))
    }

    /// The same; `told` are all tracers that have a name now.
    ///
    /// # Errors
    /// When none had.
    pub(crate) fn check_told<'a>(
        &self,
        told: impl Iterator<Item = Tracer<'a>>,
    ) -> Result<(), Absent> {
        let mut tracers = Tracers::default();
        told.for_each(|tracer| tracers.insert(tracer));
        self.check(tracers.all())
    }

    /// Whether a tracer of a record has that name: one without a name is known by that.
    pub(crate) fn meets(&mut self, number: u8) -> bool {
        let is = self.is(number);
        self.found |= is;
        is
    }

    /// Whether that tracer is one.
    pub(crate) fn is(&self, number: u8) -> bool {
        self.numbers.get(usize::from(number)).copied().unwrap_or(false)
    }
}

/// What of a trace is wanted.
#[derive(Debug, Default)]
pub(super) struct Selection {
    filter: Option<Filter>,
    roots: Option<Filter>,
    tracer: Option<TracerChoice>,
    /// These must be vCPUs of the guest.
    pub(super) cpus: Vec<u32>,
    /// Only returns after so many nanoseconds.
    pub(super) min_duration: Option<u64>,
}

impl Selection {
    /// The same, as it is before a stream begins.
    pub(super) fn again(&self) -> Self {
        Self {
            filter: self.filter.as_ref().map(Filter::again),
            roots: self.roots.as_ref().map(Filter::again),
            tracer: self.tracer.clone(),
            cpus: self.cpus.clone(),
            min_duration: self.min_duration,
        }
    }

    pub(super) fn set_filter(
        &mut self,
        accepts: impl Fn(&str, Option<&str>) -> bool + Send + Sync + 'static,
    ) {
        self.filter = Some(Filter::new(accepts));
    }

    pub(super) fn set_roots(
        &mut self,
        accepts: impl Fn(&str, Option<&str>) -> bool + Send + Sync + 'static,
    ) {
        self.roots = Some(Filter::new(accepts));
    }

    pub(super) fn set_tracer(&mut self, name: String) {
        self.tracer = Some(TracerChoice::new(name));
    }

    /// Whether the tracer that is wanted is one of the stream, now that all of it was read.
    ///
    /// # Errors
    /// When it is not.
    pub(super) fn check_tracer(&self, tracers: &Tracers) -> Result<(), Absent> {
        self.tracer.as_ref().map_or(Ok(()), |choice| choice.check(tracers.all()))
    }

    /// Addresses may have other names from here on.
    pub(super) fn renamed(&mut self) {
        for filter in self.filter.iter_mut().chain(&mut self.roots) {
            filter.known.clear();
        }
    }

    pub(super) fn learn(&mut self, tracer: Tracer<'_>) {
        if let Some(choice) = &mut self.tracer {
            choice.learn(tracer);
        }
    }

    /// Whether it depends on the calls around a record, or on its duration, whether it is wanted.
    pub(super) fn is_of_calls(&self) -> bool {
        self.roots.is_some() || self.min_duration.is_some()
    }

    /// Whether records of a tracer are wanted at all.
    #[inline]
    pub(super) fn wants_tracer(&self, number: u8) -> bool {
        self.tracer.as_ref().is_none_or(|choice| choice.is(number))
    }

    /// Whether an entry is wanted of which nobody knows the frame.
    #[inline]
    pub(super) fn wants_plain(
        &mut self,
        symbols: &mut Symbols,
        header: &Header,
        function: u32,
    ) -> bool {
        let framed = self.is_of_calls();
        let filter = self.filter.as_mut();
        // It is asked in any case: who looks for functions sees all.
        filter.is_none_or(|filter| filter.accepts(symbols, header, function)) && !framed
    }

    pub(super) fn choice(
        &mut self,
        symbols: &mut Symbols,
        header: &Header,
        function: u32,
    ) -> Choice {
        let mut ask = |filter: &mut Option<Filter>| {
            filter.as_mut().is_none_or(|filter| filter.accepts(symbols, header, function))
        };
        Choice { selected: ask(&mut self.filter), root: ask(&mut self.roots) }
    }
}
