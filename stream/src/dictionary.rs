//! Names that both ends know, and that a consumer that joins late is sent first.

use std::collections::{BTreeMap, HashMap};

use zerocopy::IntoBytes;

use super::values::RawValues;
use super::wire::{
    ALIGN, MAX_DESCRIPTION, MAX_FORMATS, MAX_FORMATS_TEXT, MAX_NAME, MAX_PID, MAX_SYMBOLS,
    SymbolHead, TaskEntry, TracerHead,
};

/// Most bytes of names that a dictionary holds.
const MAX_TEXT: usize = 256 << 20;

/// A stretch of kernel text with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// Runtime address of its first byte; for a traced function the key of its records.
    pub address: u64,
    /// Bytes; zero when not known: then only its first byte is its own.
    pub size: u32,
    /// Name.
    pub name: &'a str,
    /// Module that it belongs to; empty for the kernel itself.
    pub module: &'a str,
}

impl<'a> Symbol<'a> {
    /// A symbol of the kernel itself.
    #[must_use]
    pub fn new(address: u64, size: u32, name: &'a str) -> Self {
        Self { address, size, name, module: "" }
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let head = SymbolHead {
            address: self.address.into(),
            size: self.size.into(),
            name: u16::try_from(self.name.len()).unwrap_or(0).into(),
            module: u16::try_from(self.module.len()).unwrap_or(0).into(),
        };
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(self.name.as_bytes());
        out.extend_from_slice(self.module.as_bytes());
        let text = self.name.len() + self.module.len();
        out.resize(out.len() + (text.next_multiple_of(ALIGN) - text), 0);
    }
}

/// A task and its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Process id, as in records.
    pub pid: u32,
    /// Thread group id; zero when not known.
    pub tgid: u32,
    comm: [u8; 16],
}

impl Task {
    /// A task; `comm` is cut at a NUL and at 16 bytes.
    #[must_use]
    pub fn new(pid: u32, tgid: u32, comm: &[u8]) -> Self {
        let mut fixed = [0; 16];
        for (to, from) in fixed.iter_mut().zip(comm.iter().take_while(|byte| **byte != 0)) {
            *to = *from;
        }
        Self { pid, tgid, comm: fixed }
    }

    /// The name, as the guest has it: any bytes but NUL.
    #[must_use]
    pub fn comm(&self) -> &[u8] {
        let length = self.comm.iter().position(|byte| *byte == 0).unwrap_or(self.comm.len());
        &self.comm[..length]
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let entry = TaskEntry { pid: self.pid.into(), tgid: self.tgid.into(), comm: self.comm };
        out.extend_from_slice(entry.as_bytes());
    }

    pub(super) fn decode(entry: &TaskEntry) -> Self {
        Self::new(entry.pid.get(), entry.tgid.get(), &entry.comm)
    }
}

/// A tracer and its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracer<'a> {
    /// Its number, as in records.
    pub number: u8,
    /// Its name.
    pub name: &'a str,
    /// What it does, for people.
    pub description: &'a str,
}

impl Tracer<'_> {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let head = TracerHead {
            number: u32::from(self.number).into(),
            name: u16::try_from(self.name.len()).unwrap_or(0).into(),
            description: u16::try_from(self.description.len()).unwrap_or(0).into(),
        };
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(self.name.as_bytes());
        out.extend_from_slice(self.description.as_bytes());
        let text = self.name.len() + self.description.len();
        out.resize(out.len() + (text.next_multiple_of(ALIGN) - text), 0);
    }
}

/// The dictionary would grow over the limits of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more names than a stream may have ({MAX_SYMBOLS} symbols, {MAX_TEXT} bytes)")]
pub struct DictionaryFull;

/// The formats of values would grow over the limits of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "more formats of values than a stream may have ({MAX_FORMATS} formats, {MAX_FORMATS_TEXT} bytes)"
)]
pub struct FormatsFull;

/// What a format is about: function, tracer and which of their records.
pub(super) type FormatKey = (u32, u8, u8);

/// How many formats there are, and bytes of their texts: what both ends limit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FormatsSize {
    count: usize,
    text: usize,
}

impl FormatsSize {
    /// With a text of that length in the place of one of `old` bytes, if there is one.
    pub(super) fn with(self, text: usize, old: Option<usize>) -> Result<Self, FormatsFull> {
        let count = self.count + usize::from(old.is_none());
        let text = (self.text - old.unwrap_or(0)).saturating_add(text);
        if count > MAX_FORMATS || text > MAX_FORMATS_TEXT {
            return Err(FormatsFull);
        }
        Ok(Self { count, text })
    }
}

#[derive(Clone, Debug)]
struct StoredSymbol {
    size: u32,
    name: Box<str>,
    module: Box<str>,
}

/// All names of a stream so far.
#[derive(Clone, Debug, Default)]
pub struct Dictionaries {
    symbols: BTreeMap<u64, StoredSymbol>,
    tasks: HashMap<u32, Task>,
    /// Names and descriptions by number.
    tracers: BTreeMap<u8, (Box<str>, Box<str>)>,
    text: usize,
    /// Texts of the formats of values.
    formats: BTreeMap<FormatKey, Box<[u8]>>,
    formats_size: FormatsSize,
}

impl Dictionaries {
    /// No names yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a symbol; names are cut at [`MAX_NAME`] bytes. Says whether
    /// anything is new; a size of zero does not replace a known one.
    ///
    /// # Errors
    /// When the limits of the format are reached.
    pub fn insert_symbol(&mut self, symbol: Symbol<'_>) -> Result<bool, DictionaryFull> {
        let Symbol { address, size, name, module } = symbol;
        let (name, module) = (cut(name), cut(module));
        let known = self.symbols.get(&address);
        let same = known.filter(|old| (&*old.name, &*old.module) == (name, module));
        if same.is_some_and(|old| size == 0 || size == old.size) {
            return Ok(false);
        }
        let old = known.map_or(0, |old| old.name.len() + old.module.len());
        let text = self.text - old + name.len() + module.len();
        if text > MAX_TEXT || (known.is_none() && self.symbols.len() >= MAX_SYMBOLS) {
            return Err(DictionaryFull);
        }
        self.text = text;
        self.symbols
            .insert(address, StoredSymbol { size, name: name.into(), module: module.into() });
        Ok(true)
    }

    /// Whether this symbol takes the place of another one's: only those of modules do, what the
    /// kernel itself calls by two names is one.
    pub(super) fn replaces_symbol(&self, symbol: Symbol<'_>) -> bool {
        self.symbols.get(&symbol.address).is_some_and(|old| {
            let same = (&*old.name, &*old.module) == (cut(symbol.name), cut(symbol.module));
            let of_kernel = symbol.module.is_empty() && old.module.is_empty();
            !(same || of_kernel)
        })
    }

    /// Adds or renames a task. Says whether anything is new; pids that cannot be are not.
    pub fn insert_task(&mut self, task: Task) -> bool {
        task.pid < MAX_PID && self.tasks.insert(task.pid, task) != Some(task)
    }

    /// Adds or renames a tracer; texts are cut at their limits. Says whether anything is new.
    pub fn insert_tracer(&mut self, tracer: Tracer<'_>) -> bool {
        let (name, description) = (cut(tracer.name), tracer.description);
        let description = &description[..description.floor_char_boundary(MAX_DESCRIPTION)];
        let known = self.tracers.get(&tracer.number);
        if known.is_some_and(|old| (&*old.0, &*old.1) == (name, description)) {
            return false;
        }
        self.tracers.insert(tracer.number, (name.into(), description.into()));
        true
    }

    /// Adds or replaces a format of values. Says whether anything is new.
    ///
    /// # Errors
    /// When the limits of the format are reached.
    pub fn insert_values(&mut self, values: RawValues<'_>) -> Result<bool, FormatsFull> {
        let key = (values.function, values.tracer, values.of);
        let known = self.formats.get(&key);
        if known.is_some_and(|known| **known == *values.text) {
            return Ok(false);
        }
        let old = known.map(|known| known.len());
        self.formats_size = self.formats_size.with(values.text.len(), old)?;
        self.formats.insert(key, values.text.into());
        Ok(true)
    }

    /// All formats of values, by function.
    pub fn values(&self) -> impl Iterator<Item = RawValues<'_>> {
        self.formats.iter().map(|(&(function, tracer, of), text)| RawValues {
            function,
            tracer,
            of,
            text,
        })
    }

    /// The present name of a tracer.
    #[must_use]
    pub fn tracer(&self, number: u8) -> Option<Tracer<'_>> {
        let (name, description) = self.tracers.get(&number)?;
        Some(Tracer { number, name, description })
    }

    /// All tracers by number.
    pub fn tracers(&self) -> impl Iterator<Item = Tracer<'_>> {
        self.tracers.iter().map(|(&number, (name, description))| Tracer {
            number,
            name,
            description,
        })
    }

    /// The symbol that begins at or contains `address`.
    #[must_use]
    pub fn symbol(&self, address: u64) -> Option<Symbol<'_>> {
        let (start, found) = self.symbols.range(..=address).next_back()?;
        let inside = address - start < u64::from(found.size.max(1));
        inside.then(|| view(*start, found))
    }

    /// The present name of a process.
    #[must_use]
    pub fn task(&self, pid: u32) -> Option<&Task> {
        self.tasks.get(&pid)
    }

    /// All symbols by address.
    pub fn symbols(&self) -> impl Iterator<Item = Symbol<'_>> {
        self.symbols.iter().map(|(address, stored)| view(*address, stored))
    }

    /// All tasks, in no order.
    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.tasks.values()
    }
}

fn view(address: u64, stored: &StoredSymbol) -> Symbol<'_> {
    Symbol { address, size: stored.size, name: &stored.name, module: &stored.module }
}

/// The text up to the longest name that the format allows.
pub(super) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_NAME)]
}

/// Which 32-bit addresses (or pids) were seen: tells the relay when a name must be sent.
///
/// Made for one question per record; forgets everything when it would grow over a million
/// entries, which costs repeated look-ups and nothing else.
#[derive(Clone, Debug)]
pub struct AddressSet {
    slots: Vec<u32>,
    used: usize,
    zero: bool,
}

impl Default for AddressSet {
    fn default() -> Self {
        Self { slots: vec![0; 1024], used: 0, zero: false }
    }
}

impl AddressSet {
    const LIMIT: usize = 1 << 20;

    /// Adds a value; says whether it is new.
    #[inline]
    pub fn insert(&mut self, value: u32) -> bool {
        if value == 0 {
            return !std::mem::replace(&mut self.zero, true);
        }
        let mask = self.slots.len() - 1;
        let mut slot = Self::hash(value) & mask;
        loop {
            match self.slots[slot] {
                0 => break,
                found if found == value => return false,
                _ => slot = (slot + 1) & mask,
            }
        }
        self.slots[slot] = value;
        self.used += 1;
        if self.used * 2 > self.slots.len() {
            self.grow();
        }
        true
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    fn hash(value: u32) -> usize {
        // Multiplicative hashing: the upper half of the product depends on every bit.
        let product = u64::from(value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        usize::try_from(product >> 32).unwrap_or(0)
    }

    #[cold]
    fn grow(&mut self) {
        if self.used >= Self::LIMIT {
            return self.clear();
        }
        let larger = vec![0; self.slots.len() * 2];
        let old = std::mem::replace(&mut self.slots, larger);
        self.used = 0;
        for value in old.into_iter().filter(|value| *value != 0) {
            self.insert(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_is_found_by_every_byte_of_it() {
        let mut names = Dictionaries::new();
        assert_eq!(names.insert_symbol(Symbol::new(0x1000, 0x10, "first")), Ok(true));
        assert_eq!(names.insert_symbol(Symbol::new(0x1000, 0x10, "first")), Ok(false));
        assert_eq!(names.insert_symbol(Symbol::new(0x1000, 0, "first")), Ok(false));
        assert_eq!(names.insert_symbol(Symbol::new(0x1010, 0, "sizeless")), Ok(true));
        let name = |address| names.symbol(address).map(|symbol| symbol.name);
        assert_eq!(name(0xfff), None);
        assert_eq!(name(0x1000), Some("first"));
        assert_eq!(name(0x100f), Some("first"));
        assert_eq!(name(0x1010), Some("sizeless"));
        assert_eq!(name(0x1011), None);
        assert_eq!(name(u64::MAX), None);
    }

    // A hostile stream, or a guest that loads modules for ever, must not fill our memory.
    #[test]
    fn there_are_no_more_names_than_there_may_be() {
        let mut names = Dictionaries { text: MAX_TEXT - 4, ..Dictionaries::default() };
        assert_eq!(names.insert_symbol(Symbol::new(1, 1, "four")), Ok(true));
        assert_eq!(names.insert_symbol(Symbol::new(2, 1, "x")), Err(DictionaryFull));
        assert_eq!(names.insert_symbol(Symbol::new(1, 1, "fiver")), Err(DictionaryFull));
        assert_eq!(names.insert_symbol(Symbol::new(1, 1, "same")), Ok(true));
        let mut names = Dictionaries::new();
        let most = MAX_SYMBOLS as u64;
        for address in 0..most {
            assert_eq!(names.insert_symbol(Symbol::new(address, 1, "")), Ok(true));
        }
        assert_eq!(names.insert_symbol(Symbol::new(most, 1, "")), Err(DictionaryFull));
        assert_eq!(names.insert_symbol(Symbol::new(0, 1, "another")), Ok(true));
    }

    #[test]
    fn long_names_are_cut_between_characters() {
        let mut names = Dictionaries::new();
        let long = "ä".repeat(MAX_NAME);
        names.insert_symbol(Symbol::new(1, 1, &long)).expect("room");
        assert_eq!(names.symbol(1).map(|symbol| symbol.name.len()), Some(MAX_NAME - 1));
    }

    #[test]
    fn only_possible_pids_are_tasks() {
        let mut names = Dictionaries::new();
        assert!(names.insert_task(Task::new(1, 1, b"init\0rubbish")));
        assert!(!names.insert_task(Task::new(1, 1, b"init")));
        assert!(names.insert_task(Task::new(1, 1, b"systemd")));
        assert!(!names.insert_task(Task::new(MAX_PID, 0, b"impossible")));
        assert_eq!(names.task(1).map(Task::comm), Some(&b"systemd"[..]));
        assert_eq!(Task::new(2, 2, b"exactly16bytes!!").comm(), b"exactly16bytes!!");
    }

    #[test]
    fn tracers_are_renamed_and_cut() {
        let mut names = Dictionaries::new();
        let tracer = |name| Tracer { number: 7, name, description: "vfs_*:graph" };
        assert!(names.insert_tracer(tracer("vfs")));
        assert!(!names.insert_tracer(tracer("vfs")));
        assert!(names.insert_tracer(tracer("files")));
        assert_eq!(names.tracer(7), Some(tracer("files")));
        let long = "ä".repeat(MAX_DESCRIPTION);
        names.insert_tracer(Tracer { number: 0, name: "", description: &long });
        let lengths: Vec<_> = names.tracers().map(|tracer| tracer.description.len()).collect();
        assert_eq!(lengths, [MAX_DESCRIPTION - 1, 11]);
    }

    #[test]
    fn an_address_set_tells_new_from_known() {
        let mut set = AddressSet::default();
        for round in [true, false] {
            for value in (0..100_000).map(|value: u32| value.wrapping_mul(16)) {
                assert_eq!(set.insert(value), round, "{value}");
            }
        }
        set.clear();
        assert!(set.insert(16));
    }
}
