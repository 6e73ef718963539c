//! Values of arguments and returns: how the words of records are described and decoded.

use std::collections::HashSet;

use serde::{Deserialize, Deserializer, Serialize};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::wire::{ALIGN, MAX_VALUE_WORDS, MAX_VALUES, MAX_VALUES_TEXT, ValuesHead};

/// The values of one record, not decoded. The [`ValuesFormat`] of the record's function gives their
/// kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Values<'a> {
    /// Bit *i*: value *i* could not be read; its first word is then the address that could not
    /// be.
    pub failed: u64,
    /// The words of all values, one value after the other.
    pub words: &'a [U64],
}

/// Which records of a function a [`ValuesFormat`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ValuesOf {
    /// Its entries: their words.
    Entry,
    /// Its returns: their value.
    Return,
    /// A tracepoint's events: their words.
    Event,
}

impl ValuesOf {
    /// The number in the format.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Entry => 0,
            Self::Return => 1,
            Self::Event => 2,
        }
    }

    /// `None` for what only a later version knows.
    pub(super) fn of(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Entry),
            1 => Some(Self::Return),
            2 => Some(Self::Event),
            _ => None,
        }
    }
}

/// What the words of records are: for the records that follow in the stream, of one function and
/// tracer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValuesFormat {
    /// Entry address of the function, less the stream's address base: as in records.
    pub function: u32,
    /// Number of the tracer.
    pub tracer: u8,
    /// Which of their records.
    pub of: ValuesOf,
    /// The values in their order, at most [`MAX_VALUES`] with [`MAX_VALUE_WORDS`] words. Of a
    /// return exactly one, with at most 8 bytes.
    pub values: Vec<ValueField>,
    /// How events are printed, if that is known: text with `{NAME}` or `{NAME:FORM}` for fields.
    pub print: Option<String>,
}

/// One value of a format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValueField {
    /// Its name, such as that of the argument.
    pub name: String,
    /// What it is.
    #[serde(flatten)]
    pub shape: Shape,
}

/// What a value is, and how many words it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Shape {
    /// A number with a sign.
    Signed {
        /// Its size: 1, 2, 4 or 8.
        bytes: u8,
    },
    /// A number without a sign.
    Unsigned {
        /// Its size: 1, 2, 4 or 8.
        bytes: u8,
    },
    /// True unless zero.
    Bool {
        /// Its size: 1, 2, 4 or 8.
        bytes: u8,
    },
    /// A character of one byte.
    Char,
    /// A number with names.
    Enum {
        /// Its size: 1, 2, 4 or 8.
        bytes: u8,
        /// Whether the number has a sign.
        #[serde(default)]
        signed: bool,
        /// Numbers and their names; of equal numbers the first counts.
        #[serde(deserialize_with = "enumerators")]
        names: Vec<(i128, Box<str>)>,
    },
    /// An address.
    Pointer,
    /// Text: up to the first zero byte, if there is one.
    Text {
        /// Its longest length, from 1 to 2000.
        bytes: u16,
    },
    /// Some bits of a word.
    Bits {
        /// The lowest.
        shift: u8,
        /// How many, from 1 to 64 less `shift`.
        width: u8,
        /// Whether the highest is a sign.
        #[serde(default)]
        signed: bool,
    },
    /// Bytes of any meaning.
    Raw {
        /// How many, from 1 to 64.
        bytes: u8,
    },
    /// Numbers of 8 bytes without a sign, one behind the other.
    Words {
        /// Bytes of all: a multiple of 8 from 8 to 512.
        bytes: u16,
    },
    /// Of a type that this version does not know.
    #[serde(untagged)]
    Unknown {
        /// The type.
        #[serde(rename = "type")]
        kind: Box<str>,
        /// Its size; one word when it has none.
        #[serde(default, deserialize_with = "any_size", skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
    },
}

/// What a value says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown<'a> {
    /// A number with a sign (also one of an enumeration that has no name).
    Signed(i64),
    /// A number without a sign (also one of an enumeration that has no name).
    Unsigned(u64),
    /// Yes or no.
    Bool(bool),
    /// A character.
    Char(u8),
    /// The name of an enumeration's number.
    Name(&'a str),
    /// An address.
    Pointer(u64),
    /// Text, of any bytes but zero.
    Text(Vec<u8>),
    /// Bytes as they are in memory; of a number the lowest comes first.
    Raw(Vec<u8>),
    /// Numbers without a sign.
    Words(Vec<u64>),
}

/// Types that [`Shape`] knows: one of these is not unknown, it is wrong.
const TYPES: [&str; 10] =
    ["signed", "unsigned", "bool", "char", "enum", "pointer", "text", "bits", "raw", "words"];
/// Bytes of the longest text.
const MAX_TEXT: usize = 8 * MAX_VALUE_WORDS;

impl Shape {
    /// How many words of 8 bytes the value takes, 1 or more.
    #[must_use]
    pub fn words(&self) -> usize {
        match self {
            Self::Signed { .. }
            | Self::Unsigned { .. }
            | Self::Bool { .. }
            | Self::Char
            | Self::Enum { .. }
            | Self::Pointer
            | Self::Bits { .. } => 1,
            Self::Text { bytes } | Self::Words { bytes } => usize::from(*bytes).div_ceil(8).max(1),
            Self::Raw { bytes } => usize::from(*bytes).div_ceil(8).max(1),
            Self::Unknown { bytes, .. } => {
                let bytes = usize::try_from(bytes.unwrap_or(8)).unwrap_or(usize::MAX);
                bytes.div_ceil(8).max(1)
            }
        }
    }

    /// What the words of the value say; words that are missing count as zero, and what is above
    /// the value's own bytes does not count.
    #[must_use]
    pub fn show(&self, words: &[u64]) -> Shown<'_> {
        let word = words.first().copied().unwrap_or(0);
        match self {
            Self::Signed { bytes } => Shown::Signed(signed(word, 8 * u32::from(*bytes))),
            Self::Unsigned { bytes } => Shown::Unsigned(unsigned(word, 8 * u32::from(*bytes))),
            Self::Bool { bytes } => Shown::Bool(unsigned(word, 8 * u32::from(*bytes)) != 0),
            Self::Char => Shown::Char(word.to_le_bytes()[0]),
            Self::Enum { bytes, signed: sign, names } => {
                let shown = number(word, 8 * u32::from(*bytes), *sign);
                let found = match shown {
                    Shown::Signed(number) => i128::from(number),
                    Shown::Unsigned(number) => i128::from(number),
                    _ => return shown,
                };
                let name = names.iter().find(|(number, _)| *number == found);
                name.map_or(shown, |(_, name)| Shown::Name(name))
            }
            Self::Pointer => Shown::Pointer(word),
            Self::Text { bytes } => {
                let mut text = low_bytes(words, usize::from(*bytes));
                let end = text.iter().position(|byte| *byte == 0);
                text.truncate(end.unwrap_or(text.len()));
                Shown::Text(text)
            }
            Self::Bits { shift, width, signed } => {
                let word = word.checked_shr(u32::from(*shift)).unwrap_or(0);
                number(word, u32::from(*width), *signed)
            }
            Self::Raw { bytes } => {
                let mut raw = low_bytes(words, usize::from(*bytes));
                raw.resize(usize::from(*bytes), 0);
                Shown::Raw(raw)
            }
            Self::Words { .. } => {
                let all = words.iter().copied().chain(std::iter::repeat(0));
                Shown::Words(all.take(self.words()).collect())
            }
            Self::Unknown { .. } => {
                let words = &words[..words.len().min(self.words())];
                Shown::Raw(words.iter().flat_map(|word| word.to_le_bytes()).collect())
            }
        }
    }

    /// What is impossible about it.
    fn fault(&self) -> Option<String> {
        let possible = match self {
            Self::Signed { bytes }
            | Self::Unsigned { bytes }
            | Self::Bool { bytes }
            | Self::Enum { bytes, .. } => matches!(bytes, 1 | 2 | 4 | 8),
            Self::Text { bytes } => (1..=MAX_TEXT).contains(&usize::from(*bytes)),
            Self::Raw { bytes } => (1..=64).contains(bytes),
            Self::Words { bytes } => (8..=512).contains(bytes) && bytes.is_multiple_of(8),
            Self::Bits { shift, width, .. } => {
                *width > 0 && u32::from(*shift) + u32::from(*width) <= 64
            }
            Self::Char | Self::Pointer => true,
            Self::Unknown { kind, .. } => !TYPES.contains(&&**kind),
        };
        (!possible).then(|| match self {
            Self::Unknown { kind, .. } => {
                format!("its value of type {kind} does not fit that type")
            }
            shape => format!("there is no such value as {shape:?}"),
        })
    }

    /// Bytes of the value, but for what only a later version knows.
    fn bytes(&self) -> usize {
        match self {
            Self::Text { bytes } => usize::from(*bytes),
            Self::Raw { bytes } => usize::from(*bytes),
            shape => 8 * shape.words(),
        }
    }
}

fn number(word: u64, bits: u32, sign: bool) -> Shown<'static> {
    if sign { Shown::Signed(signed(word, bits)) } else { Shown::Unsigned(unsigned(word, bits)) }
}

/// The lowest bits, from 1 to 64.
fn unsigned(word: u64, bits: u32) -> u64 {
    let above = 64 - bits.clamp(1, 64);
    word << above >> above
}

/// The lowest bits with their sign, from 1 to 64.
fn signed(word: u64, bits: u32) -> i64 {
    let above = 64 - bits.clamp(1, 64);
    (word << above).cast_signed() >> above
}

fn low_bytes(words: &[u64], bytes: usize) -> Vec<u8> {
    let words = words.iter().take(bytes.div_ceil(8));
    words.flat_map(|word| word.to_le_bytes()).take(bytes).collect()
}

/// A number of an enumeration: of a size that [`i64`] or [`u64`] has.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Signed(i64),
    Unsigned(u64),
}

fn enumerators<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<(i128, Box<str>)>, D::Error> {
    let names = Vec::<(Number, Box<str>)>::deserialize(deserializer)?;
    let wide = |number| match number {
        Number::Signed(number) => i128::from(number),
        Number::Unsigned(number) => i128::from(number),
    };
    Ok(names.into_iter().map(|(number, name)| (wide(number), name)).collect())
}

/// A later version may mean something else by it.
fn any_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(serde_json::Value::deserialize(deserializer)?.as_u64())
}

/// The text of a format.
#[derive(Serialize)]
struct TextOut<'a> {
    values: &'a [ValueField],
    #[serde(skip_serializing_if = "Option::is_none")]
    print: Option<&'a str>,
}

#[derive(Deserialize)]
struct TextIn {
    values: Vec<ValueField>,
    #[serde(default)]
    print: Option<String>,
}

impl ValuesFormat {
    /// Words of all values.
    #[must_use]
    pub fn words(&self) -> usize {
        self.values.iter().fold(0, |sum, field| sum.saturating_add(field.shape.words()))
    }

    /// The values as they are on the wire.
    ///
    /// # Errors
    /// When there is no such format: says why.
    pub(super) fn text(&self) -> Result<String, String> {
        if let Some(fault) = self.fault() {
            return Err(fault);
        }
        let text =
            serde_json::to_string(&TextOut { values: &self.values, print: self.print.as_deref() });
        let text = text.map_err(|error| error.to_string())?;
        if text.len() > MAX_VALUES_TEXT {
            return Err(format!("{} bytes of text, at most {MAX_VALUES_TEXT}", text.len()));
        }
        Ok(text)
    }

    fn fault(&self) -> Option<String> {
        let values = &self.values;
        if values.len() > MAX_VALUES {
            return Some(format!("{} values, at most {MAX_VALUES}", values.len()));
        }
        if let Some(fault) = values.iter().find_map(|field| field.shape.fault()) {
            return Some(fault);
        }
        // What a later version knows may be longer than this one can say.
        let known = |field: &&ValueField| !matches!(field.shape, Shape::Unknown { .. });
        let words: usize = values.iter().filter(known).map(|field| field.shape.words()).sum();
        if words > MAX_VALUE_WORDS {
            return Some(format!("{words} words of values, at most {MAX_VALUE_WORDS}"));
        }
        let returned = match &**values {
            [one] => one.shape.bytes() <= 8,
            _ => false,
        };
        (self.of == ValuesOf::Return && !returned)
            .then(|| "a return has one value, with at most 8 bytes".to_owned())
    }
}

/// A format as it is in a frame: its text may be anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawValues<'a> {
    /// Entry address of the function, less the stream's address base.
    pub function: u32,
    /// Number of the tracer.
    pub tracer: u8,
    /// Which of their records: 0 entries, 1 returns, 2 events, others are of later versions.
    pub of: u8,
    /// The values, as JSON.
    pub text: &'a [u8],
}

impl RawValues<'_> {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let head = ValuesHead {
            function: self.function.into(),
            tracer: self.tracer,
            of: self.of,
            reserved: 0.into(),
            text: u32::try_from(self.text.len()).unwrap_or(0).into(),
            more: 0.into(),
        };
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(self.text);
        let padding = self.text.len().next_multiple_of(ALIGN) - self.text.len();
        out.resize(out.len() + padding, 0);
    }

    /// What it says; `None` when it is about what only a later version knows.
    ///
    /// # Errors
    /// When the text is not that of a format: says why.
    pub fn format(&self) -> Result<Option<ValuesFormat>, String> {
        let Self { function, tracer, .. } = *self;
        if self.text.len() > MAX_VALUES_TEXT {
            return Err(format!("{} bytes of text, at most {MAX_VALUES_TEXT}", self.text.len()));
        }
        let Some(of) = ValuesOf::of(self.of) else { return Ok(None) };
        let text: TextIn =
            serde_json::from_slice(self.text).map_err(|error| format!("its values: {error}"))?;
        let TextIn { values, print } = text;
        let format = ValuesFormat { function, tracer, of, values, print };
        format.fault().map_or(Ok(Some(format)), Err)
    }
}

/// The values of a record one by one: what they are, and their words. `None`: the value could not
/// be read, or the record has no words for it.
pub fn split_values<'f, 'w>(
    fields: &'f [ValueField],
    failed: u64,
    words: &'w [u64],
) -> impl Iterator<Item = (&'f ValueField, Option<&'w [u64]>)> + use<'f, 'w> {
    let mut rest = Some(words);
    fields.iter().enumerate().map(move |(index, field)| {
        let split = rest.and_then(|rest| rest.split_at_checked(field.shape.words()));
        rest = split.map(|(_, rest)| rest);
        let lost = u32::try_from(index).ok().and_then(|index| failed.checked_shr(index));
        let own = split.filter(|_| lost.is_some_and(|lost| lost & 1 == 0));
        (field, own.map(|(own, _)| own))
    })
}

/// The values of a record one by one: names, and what they say. `None` as of [`split_values`].
pub fn show_values<'f>(
    fields: &'f [ValueField],
    failed: u64,
    words: &[u64],
) -> impl Iterator<Item = (&'f str, Option<Shown<'f>>)> {
    split_values(fields, failed, words)
        .map(|(field, own)| (&*field.name, own.map(|own| field.shape.show(own))))
}

/// Makes the names differ: of those that repeat, the later ones get `#2`, `#3` and so on.
pub fn number_repeated(fields: &mut [ValueField]) {
    let mut known = HashSet::new();
    for field in fields {
        let plain = field.name.clone();
        let mut number = 2u32;
        while !known.insert(field.name.clone()) {
            field.name = format!("{plain}#{number}");
            number += 1;
        }
    }
}
