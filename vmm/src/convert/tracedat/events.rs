//! Events of tracepoints in trace.dat. Each has a format, which describes the fields of its records
//! in the syntax of ftrace's format files (`Documentation/trace/events.rst`).
//!
//! All records of a format have the same fields. So a record with a value that could not be read,
//! or with a number that its enumeration does not name, has another format of the same name.

use std::fmt::Write as _;
use std::io;

use rustc_hash::FxHashMap;

use super::super::ground::{numbered, too_many};
use crate::export::Tracepoint;
use crate::export::fields::{Bits, Form, PREEMPTED, Piece, STATES, names, others, pieces};
use crate::stream::{Shape, Shown, ValueField};

/// The offset after the fields that all events have.
const HEAD: usize = 8;
/// The first number: those below are the kernel's own.
const FIRST_ID: u16 = 512;
/// Texts of at most so many bytes are arrays of that length, as names of tasks are in the kernel
/// (TASK_COMM_LEN), which readers count on; others are as long as they are.
const FIXED: u16 = 16;
/// Most bytes of names.
const NAME: usize = 200;
/// Most bytes of an event: it must fit into a page.
const MOST: usize = 4000;

/// What a field is in one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    /// It could not be read, and is not there.
    Missing,
    Signed(u8),
    Unsigned(u8),
    Bool,
    /// A number that has a name.
    Named(u8),
    Pointer,
    /// Bytes as a number of so many.
    Raw,
    /// An array of characters.
    Fixed(u16),
    /// A text behind all fields.
    Dynamic,
    Bytes(u16),
    Words(u16),
}

/// One format of an event.
#[derive(Debug)]
struct Class {
    id: u16,
    offsets: Box<[usize]>,
    /// Up to the texts.
    size: usize,
}

/// An event with its fields.
#[derive(Debug)]
struct Known {
    label: Box<str>,
    fields: Box<[ValueField]>,
    print: Option<Box<str>>,
    /// Fields with a sign that are printed as 8 bytes.
    wide: Box<[bool]>,
    /// Forms with lists of names, and the numbers of the fields that they are of.
    lists: Box<[(usize, Box<str>)]>,
    /// By what the fields are, and for each list of names whether it has the number.
    classes: FxHashMap<(Vec<Kind>, Vec<bool>), Class>,
}

/// The text of a format.
#[derive(Debug)]
pub(super) struct Format {
    pub(super) system: Box<str>,
    pub(super) text: String,
}

/// All events of a trace.
#[derive(Debug, Default)]
pub(super) struct Events {
    known: FxHashMap<u64, Vec<Known>>,
    formats: Vec<Format>,
    key: (Vec<Kind>, Vec<bool>),
    data: Vec<u8>,
}

impl Events {
    /// The record of an event, of which the first 8 bytes are not filled in, and its number.
    ///
    /// # Errors
    /// When there are too many kinds of events.
    pub(super) fn record(&mut self, event: &Tracepoint<'_>) -> io::Result<(u16, &mut [u8])> {
        let fields = event.fields.map_or(&[][..], |fields| fields.fields());
        let known = self.known.entry(event.event.address).or_default();
        let label = event.event.symbol.map_or("", |(name, _)| name);
        let is = |known: &Known| {
            *known.label == *label
                && known.print.as_deref() == event.print
                && *known.fields == *fields
        };
        let index = known.iter().position(is).unwrap_or_else(|| {
            known.push(Known::new(label, fields, event.print));
            known.len() - 1
        });
        let Some(known) = known.get_mut(index) else { return Err(too_many("events")) };
        let values = || event.fields.iter().flat_map(|fields| fields.words());
        let (kinds, found) = &mut self.key;
        kinds.clear();
        found.clear();
        for ((field, words), wide) in values().zip(&known.wide) {
            kinds.push(words.map_or(Kind::Missing, |words| kind(&field.shape, words, *wide)));
        }
        for (field, form) in &known.lists {
            let number =
                values().nth(*field).and_then(|(field, words)| numeric(&field.shape.show(words?)));
            let (bits, Form::Names(list)) = Form::of(form) else { continue };
            let number = number.map(|value| bits.map_or(value, |bits| bits.of(value)));
            found.push(number.is_some_and(|value| names(list).any(|(it, _)| it == value)));
        }
        if !known.classes.contains_key(&self.key) {
            let id = u16::try_from(self.formats.len()).ok();
            let id = id.and_then(|number| number.checked_add(FIRST_ID));
            let id = id.ok_or_else(|| too_many("events"))?;
            let (class, format) = known.class(id, &self.key);
            self.formats.push(format);
            known.classes.insert(self.key.clone(), class);
        }
        let Some(class) = known.classes.get(&self.key) else { return Err(too_many("events")) };
        let data = &mut self.data;
        data.clear();
        data.resize(class.size, 0);
        for (((field, words), kind), offset) in values().zip(&self.key.0).zip(&class.offsets) {
            let Some(words) = words else { continue };
            put(data, *kind, *offset, &field.shape.show(words), words);
        }
        data.resize(data.len().next_multiple_of(4), 0);
        if data.len() > MOST {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "an event has more bytes than trace.dat has room for",
            ));
        }
        Ok((class.id, data))
    }

    /// All formats, by their systems.
    pub(super) fn into_systems(self) -> Vec<(Box<str>, Vec<String>)> {
        let mut systems: Vec<(Box<str>, Vec<String>)> = Vec::new();
        for Format { system, text } in self.formats {
            match systems.iter_mut().find(|(known, _)| *known == system) {
                Some((_, texts)) => texts.push(text),
                None => systems.push((system, vec![text])),
            }
        }
        systems
    }
}

/// What a value is; `wide`: numbers with a sign take 8 bytes.
fn kind(shape: &Shape, words: &[u64], wide: bool) -> Kind {
    let bytes = match shape {
        Shape::Signed { bytes } | Shape::Unsigned { bytes } | Shape::Enum { bytes, .. } => *bytes,
        _ => 8,
    };
    match shape.show(words) {
        Shown::Signed(_) => Kind::Signed(if wide { 8 } else { bytes }),
        Shown::Unsigned(_) => Kind::Unsigned(bytes),
        Shown::Bool(_) => Kind::Bool,
        Shown::Char(_) => Kind::Dynamic,
        Shown::Name(_) => Kind::Named(bytes),
        Shown::Pointer(_) => Kind::Pointer,
        Shown::Text(_) => match shape {
            Shape::Text { bytes } if *bytes <= FIXED => Kind::Fixed(*bytes),
            _ => Kind::Dynamic,
        },
        Shown::Raw(bytes) if bytes.len() <= 8 => Kind::Raw,
        Shown::Raw(bytes) => Kind::Bytes(u16::try_from(bytes.len()).unwrap_or(u16::MAX)),
        Shown::Words(words) => Kind::Words(u16::try_from(words.len()).unwrap_or(u16::MAX)),
    }
}

/// The value as a number, if it is one.
fn numeric(shown: &Shown<'_>) -> Option<u64> {
    match shown {
        Shown::Signed(number) => Some(number.cast_unsigned()),
        Shown::Unsigned(number) | Shown::Pointer(number) => Some(*number),
        Shown::Bool(yes) => Some((*yes).into()),
        _ => None,
    }
}

/// Writes a value to its place, and what has no room there behind all that is there.
fn put(data: &mut Vec<u8>, kind: Kind, offset: usize, shown: &Shown<'_>, words: &[u64]) {
    let bytes = match shown {
        Shown::Raw(bytes) => bytes.clone(),
        Shown::Words(words) => words.iter().flat_map(|word| word.to_le_bytes()).collect(),
        Shown::Text(text) => printable(text),
        Shown::Char(byte) => crate::export::quoted_char(*byte),
        Shown::Name(_) => words.first().copied().unwrap_or(0).to_le_bytes().to_vec(),
        shown => numeric(shown).unwrap_or(0).to_le_bytes().to_vec(),
    };
    if kind == Kind::Dynamic {
        let (at, length) = (data.len(), bytes.len() + 1);
        data.extend_from_slice(&bytes);
        data.push(0);
        let place = u32::try_from(length << 16 | at).unwrap_or(0);
        if let Some(room) = data.get_mut(offset..offset + 4) {
            room.copy_from_slice(&place.to_le_bytes());
        }
        return;
    }
    let length = bytes.len().min(kind.size());
    if let Some(room) = data.get_mut(offset..offset + length) {
        room.copy_from_slice(&bytes[..length]);
    }
}

/// Text in which nothing ends it or a line, and that is not longer than it was.
fn printable(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    for chunk in text.utf8_chunks() {
        for c in chunk.valid().chars() {
            let c = if c.is_control() { '?' } else { c };
            out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        }
        out.extend(chunk.invalid().iter().map(|_| b'?'));
    }
    out
}

impl Kind {
    /// Whether forms of numbers are for it.
    fn is_number(self) -> bool {
        matches!(self, Self::Signed(_) | Self::Unsigned(_) | Self::Bool | Self::Pointer)
    }

    /// Bytes in the record's own part.
    fn size(self) -> usize {
        match self {
            Self::Missing => 0,
            Self::Signed(bytes) | Self::Unsigned(bytes) | Self::Named(bytes) => bytes.into(),
            Self::Bool => 1,
            Self::Pointer | Self::Raw => 8,
            Self::Dynamic => 4,
            Self::Fixed(bytes) | Self::Bytes(bytes) => bytes.into(),
            Self::Words(words) => 8 * usize::from(words),
        }
    }

    fn align(self) -> usize {
        match self {
            Self::Missing | Self::Fixed(_) | Self::Bytes(_) => 1,
            Self::Words(_) => 8,
            kind => kind.size(),
        }
    }

    /// Its declaration, as C has it.
    fn declared(self, name: &str) -> String {
        let number = |sign: bool, bytes: u8| match (sign, bytes) {
            (true, 1) => "s8",
            (true, 2) => "short",
            (true, 4) => "int",
            (true, _) => "long",
            (false, 1) => "u8",
            (false, 2) => "unsigned short",
            (false, 4) => "unsigned int",
            (false, _) => "unsigned long",
        };
        match self {
            Self::Missing => String::new(),
            Self::Signed(bytes) => format!("{} {name}", number(true, bytes)),
            Self::Unsigned(bytes) | Self::Named(bytes) => {
                format!("{} {name}", number(false, bytes))
            }
            Self::Bool => format!("bool {name}"),
            Self::Pointer => format!("void * {name}"),
            Self::Raw => format!("unsigned long {name}"),
            Self::Fixed(bytes) => format!("char {name}[{bytes}]"),
            Self::Dynamic => format!("__data_loc char[] {name}"),
            Self::Bytes(bytes) => format!("u8 {name}[{bytes}]"),
            Self::Words(words) => format!("unsigned long {name}[{words}]"),
        }
    }
}

impl Known {
    fn new(label: &str, fields: &[ValueField], print: Option<&str>) -> Self {
        let mut wide = vec![false; fields.len()];
        let mut lists = Vec::new();
        for piece in print.into_iter().flat_map(pieces) {
            let Piece::Field { name, form, .. } = piece else { continue };
            let Some(index) = fields.iter().position(|field| field.name == name) else { continue };
            let (bits, parsed) = Form::of(form);
            let Form::Names(list) = parsed else {
                wide[index] |= !form.is_empty();
                continue;
            };
            lists.push((index, form.into()));
            // What has no name is hexadecimal.
            wide[index] |= bits.is_some() || others(list).is_none();
        }
        Self {
            label: label.into(),
            fields: fields.into(),
            print: print.map(Into::into),
            wide: wide.into(),
            lists: lists.into(),
            classes: FxHashMap::default(),
        }
    }

    /// One more format.
    fn class(&self, id: u16, (kinds, found): &(Vec<Kind>, Vec<bool>)) -> (Class, Format) {
        let (system, name) = self.label.split_once(':').unwrap_or(("vmtrace", &self.label));
        let (system, name) = (identifier(system, &[]), identifier(name, &[]));
        let mut text = format!("name: {name}\nID: {id}\nformat:\n{}\n", super::file::COMMON);
        let (mut offsets, mut size) = (Vec::new(), HEAD);
        let mut taken: Vec<String> = Vec::new();
        for (field, kind) in self.fields.iter().zip(kinds) {
            let name = identifier(&field.name, &taken);
            size = size.next_multiple_of(kind.align());
            offsets.push(size);
            if *kind != Kind::Missing {
                let (declared, bytes) = (kind.declared(&name), kind.size());
                let signed = u8::from(matches!(kind, Kind::Signed(_)));
                // A text takes all.
                let _ = writeln!(
                    text,
                    "\tfield:{declared};\toffset:{size};\tsize:{bytes};\tsigned:{signed};"
                );
            }
            size += kind.size();
            taken.push(name);
        }
        let mut print = Print::default();
        let mut found = found.iter();
        let mut add = |print: &mut Print, name: &str, index: Option<usize>, form: &str| {
            let field = self.fields.iter().position(|field| field.name == name);
            let Some(at) = field else { return print.text("?") };
            let listed = matches!(Form::of(form), (_, Form::Names(_)))
                && found.next().is_some_and(|found| *found);
            let rec = format!("REC->{}", taken[at]);
            if let Some(less) = form.strip_prefix("minus ") {
                let less = self.fields.iter().position(|field| field.name == less);
                let are_numbers =
                    |&less: &usize| [at, less].iter().all(|&it| kinds[it].is_number());
                return match less.filter(are_numbers) {
                    Some(less) => print.add("%lld", &format!("{rec} - REC->{}", taken[less])),
                    None => print.text("?"),
                };
            }
            match (kinds[at], index) {
                (Kind::Words(words), Some(index)) if index >= words.into() => print.text("?"),
                (Kind::Words(_), Some(index)) => {
                    print.value(
                        Kind::Unsigned(8),
                        &format!("{rec}[{index}]"),
                        form,
                        &Names::default(),
                    );
                }
                (kind, _) => {
                    let names = match &self.fields[at].shape {
                        Shape::Enum { names, bytes, .. } => {
                            let above = 64 - 8 * u32::from((*bytes).clamp(1, 8));
                            let masked = names.iter().map(|(number, name)| {
                                let low = u64::try_from(number & i128::from(u64::MAX));
                                (low.unwrap_or(0) << above >> above, &**name)
                            });
                            masked.collect()
                        }
                        _ => Vec::new(),
                    };
                    print.value(kind, &rec, form, &Names { own: names, listed });
                }
            }
        };
        match self.print.as_deref() {
            Some(template) => {
                for piece in pieces(template) {
                    match piece {
                        Piece::Text(text) => print.text(text),
                        Piece::Field { name, index, form } => add(&mut print, name, index, form),
                    }
                }
            }
            None => {
                for (number, field) in self.fields.iter().enumerate() {
                    let blank = if number > 0 { " " } else { "" };
                    print.text(&format!("{blank}{}=", field.name));
                    add(&mut print, &field.name, None, "");
                }
            }
        }
        // A text takes all.
        let _ = writeln!(text, "\nprint fmt: \"{}\"{}", print.format, print.arguments);
        let class = Class { id, offsets: offsets.into(), size };
        (class, Format { system: system.into(), text })
    }
}

/// Names for the numbers of a field.
#[derive(Debug, Default)]
struct Names<'a> {
    /// Of its type.
    own: Vec<(u64, &'a str)>,
    /// The list of its form has one for its number.
    listed: bool,
}

/// Some bits of a number, as C has them.
fn of_bits(rec: &str, bits: Bits) -> String {
    let Bits { lowest, count } = bits;
    match (lowest, count) {
        (0, 64) => rec.to_owned(),
        (0, _) => format!("({rec} & {:#x})", bits.mask()),
        _ => format!("(({rec} >> {lowest}) & {:#x})", bits.mask()),
    }
}

/// What an event is printed by: text with `%`, and arguments.
#[derive(Debug, Default)]
struct Print {
    format: String,
    arguments: String,
}

impl Print {
    fn text(&mut self, text: &str) {
        for c in text.chars() {
            match c {
                '%' => self.format.push_str("%%"),
                '"' | '\\' => self.format.extend(['\\', c]),
                // Readers take a format for damaged behind others.
                ' '..='~' => self.format.push(c),
                _ => self.format.push('?'),
            }
        }
    }

    fn add(&mut self, format: &str, argument: &str) {
        self.format.push_str(format);
        self.arguments.push_str(", ");
        self.arguments.push_str(argument);
    }

    /// A value of a kind, by an expression, in a form.
    fn value(&mut self, kind: Kind, rec: &str, form: &str, known: &Names<'_>) {
        let (bits, form) = Form::of(form);
        if !kind.is_number() {
            return self.plain(kind, rec, &known.own);
        }
        let whole = bits.is_none();
        let rec = &bits.map_or_else(|| rec.to_owned(), |bits| of_bits(rec, bits));
        match form {
            Form::Hex => self.add("%llx", rec),
            Form::Address => self.add("%016llx", rec),
            Form::State => {
                let letters = (0..).zip(STATES).map(|(bit, letter)| (1 << bit, letter));
                let all = (1_u64 << STATES.len()) - 1;
                let letters = symbols(letters);
                let some = format!("{rec} & {all:#x}");
                let flags = format!(r#"({some}) ? __print_flags({some}, "|", {letters}) : "R""#);
                self.add("%s", &flags);
                self.add("%s", &format!(r#"{rec} & {PREEMPTED:#x} ? "+" : """#));
            }
            Form::Names(list) => match (known.listed, others(list)) {
                (true, _) => {
                    let list = symbols(names(list));
                    self.add("%s", &format!("__print_symbolic({rec}, {list})"));
                }
                (false, Some(others)) => self.text(others),
                (false, None) => self.add("0x%llx", rec),
            },
            Form::Flags { list, between, all: false } => {
                let all = names(list).fold(0, |all, (bits, _)| all | bits);
                let list = symbols(names(list));
                let some = format!("{rec} & {all:#x}");
                self.add("%s", &format!(r#"__print_flags({some}, "{between}", {list})"#));
            }
            // A list with nothing in it is none that readers know.
            Form::Flags { list, all: true, .. } if names(list).all(|(bits, _)| bits == 0) => {
                self.add("0x%llx", rec);
            }
            Form::Flags { list, between, all: true } => {
                let zero = symbols(names(list).filter(|(bits, _)| *bits == 0).take(1));
                let list = symbols(names(list).filter(|(bits, _)| *bits != 0));
                let flags = format!(r#"__print_flags({rec}, "{between}", {list})"#);
                let zero = zero.split('"').nth(1).unwrap_or_default();
                self.add("%s", &format!(r#"({rec}) ? {flags} : "{zero}""#));
            }
            Form::Digits(width) => {
                let letter = if whole && matches!(kind, Kind::Signed(_)) { 'd' } else { 'u' };
                self.add(&format!("%0{width}ll{letter}"), rec);
            }
            Form::Signed => match bits {
                Some(Bits { count, .. }) if count < 64 => {
                    // Readers do not know `^`, and on the right they take what binds less out of its parentheses.
                    let (sign, all) = (count - 1, 1_u64 << count);
                    self.add("%lld", &format!("{rec} - (({rec} >> {sign}) * {all:#x})"));
                }
                Some(_) => self.add("%lld", rec),
                None => self.plain(kind, rec, &known.own),
            },
            Form::Plain | Form::Less if whole => self.plain(kind, rec, &known.own),
            Form::Plain | Form::Less => self.add("%llu", rec),
        }
    }

    fn plain(&mut self, kind: Kind, rec: &str, named: &[(u64, &str)]) {
        match kind {
            Kind::Missing => self.text("?"),
            Kind::Signed(1) => self.add("%hhd", rec),
            Kind::Signed(2) => self.add("%hd", rec),
            Kind::Signed(4) => self.add("%d", rec),
            Kind::Signed(_) => self.add("%lld", rec),
            Kind::Unsigned(8..) => self.add("%llu", rec),
            Kind::Unsigned(_) | Kind::Bool => self.add("%u", rec),
            Kind::Named(_) => {
                let list = symbols(named.iter().copied());
                self.add("%s", &format!("__print_symbolic({rec}, {list})"));
            }
            Kind::Pointer | Kind::Raw => self.add("0x%llx", rec),
            Kind::Fixed(_) => self.add("%s", rec),
            Kind::Dynamic => {
                let name = rec.trim_start_matches("REC->");
                self.add("%s", &format!("__get_str({name})"));
            }
            Kind::Bytes(bytes) => self.add("%s", &format!("__print_hex_str({rec}, {bytes})")),
            Kind::Words(words) => {
                for index in 0..words {
                    self.format.push_str(if index == 0 { "[" } else { ", " });
                    self.add("0x%llx", &format!("{rec}[{index}]"));
                }
                self.text("]");
            }
        }
    }
}

/// Numbers and texts for them.
fn symbols<'a>(list: impl Iterator<Item = (u64, &'a str)>) -> String {
    let good = |c: char| matches!(c, ' '..='~') && !matches!(c, '"' | '\\' | '%');
    let each = list.map(|(number, name)| {
        let name: String = name.chars().map(|c| if good(c) { c } else { '?' }).collect();
        format!(r#"{{ {number}, "{name}" }}"#)
    });
    each.collect::<Vec<_>>().join(", ")
}

/// A name that readers take for one word, and that none of the others is.
fn identifier(name: &str, taken: &[String]) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut name: String = name.chars().take(NAME).map(|c| if good(c) { c } else { '_' }).collect();
    if name.is_empty()
        || name.starts_with("common_")
        || name.starts_with(|c: char| c.is_ascii_digit())
    {
        name.insert(0, '_');
    }
    numbered(&name, taken)
}
