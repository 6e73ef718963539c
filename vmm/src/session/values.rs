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
    /// The same without single values of functions that are not among these.
    pub(super) fn of_these(&self, kernel: &Kernel, known: &dyn Known, sites: &[usize]) -> Self {
        let traced = |spec: &&ArgumentSpec| {
            let sites_of = kernel.argument_sites(spec).unwrap_or_default();
            sites_of.iter().any(|site| sites.binary_search(site).is_ok())
                || sites.iter().any(|&site| known.is_meant(site, spec))
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
    /// Whether it is about a function of a module.
    fn is_meant(&self, _site: usize, _spec: &ArgumentSpec) -> bool {
        false
    }
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
    let mut all = Collected::new(kernel, known);
    let mut notes = all.prototypes(sites, wanted);
    for spec in &wanted.paths {
        notes.extend(all.paths(sites, spec)?);
    }
    match all.without_room().first() {
        Some(&(site, words)) => Err(ValuesError::TooMany { function: known.name(site), words }),
        None => Ok((all.values(), notes)),
    }
}

/// The same of functions at `sites` of a module that has come: the guest waits, so what cannot be is left out, and
/// notes say so.
pub(super) fn values_of_module(
    kernel: &Kernel,
    known: &dyn Known,
    (module, sites): (&str, &[usize]),
    wanted: &Wants,
) -> (Values, Vec<String>) {
    let mut all = Collected::new(kernel, known);
    let mut notes = all.prototypes(sites, wanted);
    for spec in &wanted.paths {
        let meant = all.of_modules(sites, spec);
        if meant.is_empty() && spec.is_about(module) {
            notes.push(ValuesError::Untraced(spec.function.clone()).to_string());
        }
        let found = spec.paths.iter().filter_map(|path| all.path_of(&meant, path));
        notes.extend(found.map(|(error, count)| without(count, &error)));
    }
    for (site, words) in all.without_room() {
        all.entries.remove(&site);
        notes.push(ValuesError::TooMany { function: known.name(site), words }.to_string());
    }
    (all.values(), notes)
}

fn without(functions: usize, error: &ValuesError) -> String {
    format!("{functions} functions are traced without it: {error}")
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

impl<'a> Collected<'a> {
    fn new(kernel: &'a Kernel, known: &'a dyn Known) -> Self {
        Self { kernel, known, entries: BTreeMap::new(), results: FxHashMap::default() }
    }

    /// Functions (sites) whose values are too many for a record, and how many words they take.
    fn without_room(&self) -> Vec<(usize, usize)> {
        let words = |values: &[Taken]| values.iter().map(|value| value.field.words()).sum();
        let all = self.entries.iter().map(|(&site, values)| (site, words(values)));
        all.filter(|&(_, words)| words > ROOM).collect()
    }

    fn values(self) -> Values {
        let recorded = |values: Vec<Taken>| {
            let fields = values.iter().map(|value| value.field).collect();
            Recorded { fields, values: values.into_iter().map(|value| value.shown).collect() }
        };
        let entries = self.entries.into_iter().map(|(site, values)| (site, recorded(values)));
        Values { entries: Arc::new(entries.collect()), results: Arc::new(self.results) }
    }

    /// Takes what prototypes say, if that is wanted. Notes on functions without.
    fn prototypes(&mut self, sites: &[usize], wanted: &Wants) -> Vec<String> {
        if !wanted.parameters && !wanted.results {
            return Vec::new();
        }
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
        let of_modules = self.of_modules(sites, spec);
        let matching = match self.kernel.argument_sites(spec) {
            Err(_) if !of_modules.is_empty() => Vec::new(),
            matching => matching.map_err(Box::new)?,
        };
        let traced = matching.into_iter().filter(|site| sites.binary_search(site).is_ok());
        let traced: Vec<usize> = traced.chain(of_modules).collect();
        if traced.is_empty() {
            // Its module is still to come.
            let waits = spec.names_module().then(Vec::new);
            return waits.ok_or_else(|| ValuesError::Untraced(spec.function.clone()));
        }
        let mut notes = Vec::new();
        for path in &spec.paths {
            match self.path_of(&traced, path) {
                Some((error, count)) if count == traced.len() => return Err(error),
                Some((error, count)) => notes.push(without(count, &error)),
                None => {}
            }
        }
        Ok(notes)
    }

    /// Those of these functions that are of modules and meant.
    fn of_modules(&self, sites: &[usize], spec: &ArgumentSpec) -> Vec<usize> {
        sites.iter().copied().filter(|&site| self.known.is_meant(site, spec)).collect()
    }

    /// Takes a value of these functions. What the first one lacks that has none, if any, and how many have none.
    fn path_of(&mut self, sites: &[usize], path: &str) -> Option<(ValuesError, usize)> {
        let lacking: Vec<_> =
            sites.iter().filter_map(|&site| self.path(site, path).err()).collect();
        let count = lacking.len();
        Some((lacking.into_iter().next()?, count))
    }

    fn path(&mut self, site: usize, path: &str) -> Result<(), ValuesError> {
        let function = || self.known.name(site);
        let value = self.known.path(site, path);
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
            if site != COUNTS || !text.ends_with("count") {
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

        fn is_meant(&self, site: usize, spec: &ArgumentSpec) -> bool {
            spec.means("m", &[if site == COUNTS { "counts" } else { "other" }].into_iter())
        }

        fn name(&self, site: usize) -> String {
            if site == COUNTS { "counts [m]".to_owned() } else { "other [m]".to_owned() }
        }
    }

    // The module is there and the guest waits: what cannot be must neither end the run nor be left out in silence.
    #[test]
    fn values_of_a_module_are_taken_as_far_as_they_can_be() {
        let of_module = OfModule::new();
        let kernel = &of_module.0;
        let own = [COUNTS, COUNTS + 1];
        let wants = |specs: &[&str]| {
            let paths = specs.iter().map(|text| ArgumentSpec::parse(text).unwrap()).collect();
            Wants { paths, ..Wants::default() }
        };
        let of = |specs: &[&str]| values_of_module(kernel, &of_module, ("m", &own), &wants(specs));
        let (values, notes) = of(&["co*:mod:m: missing, count", "*:mod:other: count"]);
        let fields: Vec<_> = values.entries[&COUNTS].fields.iter().collect();
        assert_eq!((fields, values.entries.len()), (vec![&Field::Argument(2)], 1));
        let [note] = &notes[..] else { panic!("{notes:?}") };
        assert!(note.starts_with("1 functions are traced without it: counts [m]: "), "{note}");
        // Of functions that no other filter means, and of those of all.
        let (values, notes) = of(&["none:mod:m: count", "*: count"]);
        assert_eq!((values.entries.len(), notes.len()), (1, 2), "{notes:?}");
        assert!(
            notes[0].contains("no function that is traced matches \"none:mod:m\""),
            "{notes:?}"
        );
        assert!(
            notes[1].starts_with("1 functions are traced without it: other [m]: "),
            "{notes:?}"
        );
        let many: Vec<_> = (0..=ROOM).map(|it| format!("counts:mod:m: a{it}=count")).collect();
        let (values, notes) = of(&many.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(values.entries.is_empty());
        assert!(notes.last().unwrap().contains("a record has room for"), "{notes:?}");

        // At boot it is still to come. What is asked for live is refused as a whole.
        let later = wants(&["counts:mod:m: count"]);
        assert!(super::values(kernel, &[0], &later).unwrap().0.entries.is_empty());
        assert_eq!(later.of_these(kernel, &of_module, &own), later);
        // A filter that leaves the function out leaves its values out, too.
        let open = kernel.select(&["vfs_open".to_owned()], &[]).unwrap();
        let specs = ["vfs_read: count", "vfs_open: file", "counts:mod:m: count"];
        let kept = wants(&specs).of_these(kernel, kernel, &open);
        assert_eq!(kept, wants(&specs[1..2]));
        let found = values_of(kernel, &of_module, &own, &wants(&["*:mod:m: missing"]));
        assert!(matches!(found, Err(ValuesError::Path { .. })), "{found:?}");
    }
}
