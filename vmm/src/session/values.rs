//! From what a user asks of a function's calls to what its records have.

use crate::kernel::arguments::{
    ArgumentSpec, Fetch, Last as Behind, NoPrototype, PathError, Prototype, Shape as Typed, Source,
    SpecError, Value,
};
use crate::kernel::{Coverage, ExitKind, Kernel};
use crate::relay::{Recorded, Values};
use crate::serve::Actions;
use crate::stream::{Shape, ValueField};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;
use vmtrace_trampolines::layout::{COMMON_SIZE, MAX_RECORD};
use vmtrace_trampolines::{Field, Last, Read};

/// Words of a record for values: but for a stack pointer and which of them failed.
pub(super) const ROOM: usize = (MAX_RECORD - COMMON_SIZE) / 8 - 3;
/// Names that a note gives for a reason.
const EXAMPLES: usize = 3;

/// What is asked of calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// All parameters.
    pub parameters: bool,
    /// What is returned.
    pub results: bool,
    /// Single values of some functions.
    pub paths: Vec<ArgumentSpec>,
}

impl From<Actions> for Wants {
    fn from(actions: Actions) -> Self {
        Self { parameters: actions.args, results: actions.retval, paths: Vec::new() }
    }
}

impl Wants {
    /// The same without single values.
    pub(super) fn of_types(&self) -> Self {
        Self { paths: Vec::new(), ..*self }
    }

    /// The same without single values of functions that are not among these.
    #[must_use]
    pub fn of_these(&self, kernel: &Kernel, sites: &[usize]) -> Self {
        let traced = |spec: &&ArgumentSpec| {
            let sites_of = kernel.argument_sites(spec).unwrap_or_default();
            sites_of.iter().any(|site| sites.binary_search(site).is_ok())
        };
        Self { paths: self.paths.iter().filter(traced).cloned().collect(), ..*self }
    }
}

/// Why that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum ValuesError {
    /// A value that there is not.
    #[error("{function}: {error}")]
    Path {
        /// The function.
        function: String,
        /// What is wrong.
        error: Box<PathError>,
    },
    /// The value is not one of calls as they are made here.
    #[error("{function}: {path:?} {reason}")]
    Unsupported {
        /// The function.
        function: String,
        /// The value.
        path: String,
        /// Why, and what to do.
        reason: &'static str,
    },
    /// No such function.
    #[error(transparent)]
    Function(#[from] Box<SpecError>),
    /// Nothing to do it for.
    #[error("no function that is traced matches {0:?}: trace it with -f")]
    Untraced(String),
    /// A record has an end.
    #[error(
        "{function}: its values take {words} words of 8 bytes, and a record has room for {ROOM}: \
         ask for fewer, or for shorter texts (path:LENGTH)"
    )]
    TooMany {
        /// The function.
        function: String,
        /// How many.
        words: usize,
    },
}

/// What the records of the functions at `sites` (indices, in order) have, and notes for the user.
///
/// # Errors
/// When something that is asked for by name cannot be.
pub fn values(
    kernel: &Kernel,
    sites: &[usize],
    wanted: &Wants,
) -> Result<(Values, Vec<String>), ValuesError> {
    values_of(kernel, kernel, sites, wanted)
}

/// What is known of functions by their sites.
pub(super) trait Known {
    /// Parameters and result, or why they are not known.
    fn prototype(&self, site: usize) -> Result<Prototype, NoPrototype>;
    /// As [`Kernel::path`].
    fn path(&self, site: usize, text: &str) -> Result<Value, PathError>;
    /// Whether the function may be left by a jump to another one; or why the ends of its calls are not all seen.
    fn leaves(&self, site: usize) -> Result<bool, String>;
    fn name(&self, site: usize) -> String;
}

impl Known for Kernel {
    fn prototype(&self, site: usize) -> Result<Prototype, NoPrototype> {
        self.known_prototype(site)
    }

    fn path(&self, site: usize, text: &str) -> Result<Value, PathError> {
        Kernel::path(self, site, text)
    }

    fn leaves(&self, site: usize) -> Result<bool, String> {
        let exits = self.exits().map_err(|error| error.to_string())?;
        match exits.coverage(site) {
            Coverage::Partial(why) | Coverage::None(why) => Err(why.to_string()),
            Coverage::Whole => {
                Ok(exits.of(site).iter().any(|exit| !matches!(exit.kind, ExitKind::Return)))
            }
        }
    }

    fn name(&self, site: usize) -> String {
        name(self, site)
    }
}

/// The same of functions of which `known` knows more than the kernel's image.
pub(super) fn values_of(
    kernel: &Kernel,
    known: &dyn Known,
    sites: &[usize],
    wanted: &Wants,
) -> Result<(Values, Vec<String>), ValuesError> {
    let (entries, results) = (BTreeMap::new(), FxHashMap::default());
    let mut all = Collected { kernel, known, entries, results };
    let mut notes = Vec::new();
    if wanted.parameters || wanted.results {
        notes.extend(all.prototypes(sites, wanted));
    }
    for spec in &wanted.paths {
        notes.extend(all.paths(sites, spec)?);
    }
    let mut entries = FxHashMap::default();
    for (site, values) in all.entries {
        let words = values.iter().map(|value| value.field.words()).sum();
        if words > ROOM {
            return Err(ValuesError::TooMany { function: known.name(site), words });
        }
        let fields = values.iter().map(|value| value.field).collect();
        let values = values.into_iter().map(|value| value.shown).collect();
        entries.insert(site, Recorded { fields, values });
    }
    Ok((Values { entries: Arc::new(entries), results: Arc::new(all.results) }, notes))
}

fn name(kernel: &Kernel, site: usize) -> String {
    let site = kernel.sites().get(site);
    site.and_then(|site| kernel.site_name(site)).unwrap_or("?").to_owned()
}

/// A value of an entry.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) field: Field,
    pub(super) shown: ValueField,
}

struct Collected<'a> {
    kernel: &'a Kernel,
    known: &'a dyn Known,
    entries: BTreeMap<usize, Vec<Taken>>,
    results: FxHashMap<usize, ValueField>,
}

impl Collected<'_> {
    /// Takes what prototypes say. Notes on functions without.
    fn prototypes(&mut self, sites: &[usize], wanted: &Wants) -> Vec<String> {
        let mut unknown: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for &site in sites {
            let (parameters, result) = match self.known.prototype(site) {
                Ok(prototype) => (prototype.parameters, prototype.result),
                Err(why) => {
                    unknown.entry(why.to_string()).or_default().push(site);
                    // What there is in any case. Not all of it may be meant.
                    let raw = Value {
                        name: "ret".to_owned(),
                        fetch: Fetch::Result,
                        shape: Typed::Raw { bytes: 8 },
                    };
                    (self.kernel.raw_arguments(), Some(raw))
                }
            };
            if wanted.parameters {
                let mut taken: Vec<Taken> = parameters.iter().flat_map(taken).collect();
                shorten(&mut taken);
                if !taken.is_empty() {
                    self.entries.insert(site, taken);
                }
            }
            if let Some(result) = result.filter(|_| wanted.results) {
                // Texts are not read when a function returns.
                let behind = matches!(result.fetch, Fetch::Memory { .. });
                let shape = if behind { Shape::Pointer } else { whole(result.shape) };
                self.results.insert(site, shown(&result.name, &shape));
            }
        }
        let note = |(why, sites): (String, Vec<usize>)| {
            let examples = sites.iter().take(EXAMPLES).map(|&site| self.known.name(site));
            format!(
                "{} functions show raw registers: {why} (such as {})",
                sites.len(),
                examples.collect::<Vec<_>>().join(", ")
            )
        };
        unknown.into_iter().map(note).collect()
    }

    /// Takes what is asked for of single functions.
    fn paths(&mut self, sites: &[usize], spec: &ArgumentSpec) -> Result<Vec<String>, ValuesError> {
        let matching = self.kernel.argument_sites(spec).map_err(Box::new)?;
        let traced = matching.into_iter().filter(|site| sites.binary_search(site).is_ok());
        let traced: Vec<usize> = traced.collect();
        if traced.is_empty() {
            return Err(ValuesError::Untraced(spec.function.clone()));
        }
        let mut notes = Vec::new();
        for path in &spec.paths {
            let mut first = None;
            let (mut without, mut with) = (Vec::new(), 0);
            for &site in &traced {
                match self.path(site, path) {
                    Ok(()) => with += 1,
                    Err(error) => {
                        first = first.or(Some(error));
                        without.push(site);
                    }
                }
            }
            match first {
                Some(error) if with == 0 => return Err(error),
                Some(error) => {
                    let count = without.len();
                    notes.push(format!("{count} functions are traced without it: {error}"));
                }
                None => {}
            }
        }
        Ok(notes)
    }

    fn path(&mut self, site: usize, path: &str) -> Result<(), ValuesError> {
        let function = || name(self.kernel, site);
        let value = self.kernel.path(site, path);
        let value = value
            .map_err(|error| ValuesError::Path { function: function(), error: Box::new(error) })?;
        let unsupported = |reason| {
            let path = path.to_owned();
            ValuesError::Unsupported { function: function(), path, reason }
        };
        if value.fetch == Fetch::Result {
            self.results.insert(site, shown(&value.name, &whole(value.shape)));
            return Ok(());
        }
        if value.fetch.at_return() {
            let reason = "is in memory that the returned pointer leads to, where it cannot be \
                          read: ask for the pointer ($ret)";
            return Err(unsupported(reason));
        }
        let taken = taken(&value);
        if taken.is_empty() {
            return Err(unsupported(
                "is reached through too many pointers: ask for one on the way",
            ));
        }
        let values = self.entries.entry(site).or_default();
        for one in taken {
            if values.iter().all(|known| known.shown.name != one.shown.name) {
                values.push(one);
            }
        }
        Ok(())
    }
}

/// Where a value of an entry is in a record: two words of a struct are two values. None for what
/// no program can fetch.
pub(super) fn taken(value: &Value) -> Vec<Taken> {
    let Value { name, fetch, shape } = value;
    let one = |field: Field, shape: &Shape| vec![Taken { field, shown: shown(name, shape) }];
    match fetch {
        Fetch::Argument(number) => one(Field::Argument(*number), &whole(shape.clone())),
        Fetch::Words(numbers) => {
            let word = |(index, &number): (usize, &u8)| {
                let name = format!("{name}[{index}]");
                let shown = shown(&name, &Shape::Raw { bytes: 8 });
                Taken { field: Field::Argument(number), shown }
            };
            numbers.iter().enumerate().map(word).collect()
        }
        Fetch::Result | Fetch::Memory { from: Source::Result, .. } => Vec::new(),
        Fetch::Memory { from: Source::Argument(number), hops, last } => {
            let words = |bytes: u8| bytes.div_ceil(8);
            let (last, shape) = match *last {
                Behind::Word { offset, .. } => {
                    (Last::Words { offset, words: 1 }, whole(shape.clone()))
                }
                Behind::Text { offset, max } => {
                    (Last::Text { offset, words: words(max) }, Shape::Text { bytes: max.into() })
                }
                Behind::Bytes { offset, size } => {
                    (Last::Words { offset, words: words(size) }, Shape::Raw { bytes: size })
                }
            };
            let read = Read::new(*number, hops, last);
            read.map_or_else(Vec::new, |read| one(Field::Read(read), &shape))
        }
    }
}

/// Takes pointers in place of texts until the record has room, the last first.
pub(super) fn shorten(values: &mut Vec<Taken>) {
    let words = |values: &[Taken]| values.iter().map(|one| one.field.words()).sum::<usize>();
    while words(values) > ROOM {
        let text = values.iter_mut().rev().find(|one| one.field.words() > 1);
        match text.map(|one| (one.field, one)) {
            Some((Field::Read(read), one)) => {
                one.field = Field::Argument(read.argument());
                one.shown.shape = Shape::Pointer;
            }
            _ => {
                values.pop();
            }
        }
    }
}

fn shown(name: &str, shape: &Shape) -> ValueField {
    ValueField { name: name.to_owned(), shape: shape.clone() }
}

/// As the stream tells it, of what is in one word.
pub(super) fn whole(shape: Typed) -> Shape {
    match shape {
        Typed::Signed { bytes } => Shape::Signed { bytes },
        Typed::Unsigned { bytes } => Shape::Unsigned { bytes },
        Typed::Bool => Shape::Bool { bytes: 1 },
        Typed::Char => Shape::Char,
        Typed::Enum { bytes, signed, names } => {
            let number = |number: i64| match signed {
                true => i128::from(number),
                false => i128::from(number.cast_unsigned()),
            };
            let named = |(value, name): &(i64, String)| (number(*value), name.as_str().into());
            Shape::Enum { bytes, signed, names: names.iter().map(named).collect() }
        }
        Typed::Pointer => Shape::Pointer,
        Typed::Text => Shape::Text { bytes: 8 },
        Typed::Bits { shift, width, signed } => Shape::Bits { shift, width, signed },
        Typed::Raw { bytes } => Shape::Raw { bytes: bytes.min(8) },
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Site of a function of a module that has an argument `count`. The next ones are of others.
    pub(crate) const COUNTS: usize = 1 << 20;

    /// A kernel, and what is known of a module's functions.
    pub(crate) struct OfModule(pub(crate) Kernel);

    impl OfModule {
        pub(crate) fn new() -> Self {
            let cache = vmtrace_emulated::cache_dir().expect("no cache directory");
            Self(Kernel::open(&cache.join("kernels/x86_64-6.12/vmlinuz")).unwrap())
        }
    }

    impl Known for OfModule {
        fn prototype(&self, _: usize) -> Result<Prototype, NoPrototype> {
            Err(NoPrototype::NoTypes)
        }

        fn path(&self, site: usize, text: &str) -> Result<Value, PathError> {
            if (site, text) != (COUNTS, "count") {
                return self.0.path(usize::MAX, text);
            }
            let shape = Typed::Unsigned { bytes: 8 };
            Ok(Value { name: text.to_owned(), fetch: Fetch::Argument(2), shape })
        }

        fn leaves(&self, site: usize) -> Result<bool, String> {
            match site {
                COUNTS => Ok(true),
                _ => Err("it never returns".to_owned()),
            }
        }

        fn name(&self, site: usize) -> String {
            if site == COUNTS { "counts [m]".to_owned() } else { "other [m]".to_owned() }
        }
    }
}
