//! Values of arguments and returns: their kinds, and how they are shown.

use std::io::Write;
use std::ops::RangeInclusive;

use rustc_hash::FxHashMap;
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::stream::{
    RawValues, Shape, Shown, ValueField, ValuesOf, number_repeated, show_values, split_values,
};

use super::digits::{decimal, hexadecimal};
use super::printable;

/// Formats that were replaced and may still be those of records that wait, and bytes of their
/// texts.
const REPLACED: usize = 1024;
const REPLACED_TEXT: usize = 64 << 20;

/// Values of arguments, in their order.
#[derive(Clone, Copy, Debug)]
pub struct Args<'a> {
    pub(super) fields: &'a [ValueField],
    pub(super) failed: u64,
    pub(super) words: &'a [u64],
}

impl<'a> Args<'a> {
    /// Names, without control characters and each there once, and values. `None` is what could
    /// not be read.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, Option<Shown<'a>>)> + use<'a> {
        show_values(self.fields, self.failed, self.words)
    }

    /// What the values are.
    pub(crate) fn fields(&self) -> &'a [ValueField] {
        self.fields
    }

    /// What the values are, and their words. `None` is what could not be read.
    pub(crate) fn words(
        &self,
    ) -> impl Iterator<Item = (&'a ValueField, Option<&'a [u64]>)> + use<'a> {
        split_values(self.fields, self.failed, self.words)
    }
}

/// What a function returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returned<'a> {
    /// What the register for it held.
    pub raw: u64,
    /// What it is, if that is known.
    pub shape: Option<&'a Shape>,
}

impl<'a> Returned<'a> {
    /// What it says, if it is known what it is.
    #[must_use]
    pub fn shown(&self) -> Option<Shown<'a>> {
        self.shape.map(|shape| shape.show(&[self.raw]))
    }
}

/// Formats so far. A record is given its format when it is read, because there may be another
/// one by the time that it is printed.
#[derive(Debug, Default)]
pub(super) struct Formats {
    current: FxHashMap<(u32, u8, ValuesOf), u32>,
    known: Vec<Known>,
    replaced: usize,
    replaced_text: usize,
}

#[derive(Debug)]
struct Known {
    fields: Vec<ValueField>,
    words: usize,
    /// Length of its text.
    text: usize,
    print: Option<String>,
}

impl Formats {
    pub(super) fn insert(&mut self, values: &RawValues<'_>) {
        // A reader has refused what is wrong; what is of later versions is not known.
        let Ok(Some(format)) = values.format() else { return };
        let (key, words) = ((format.function, format.tracer, format.of), format.words());
        let print = format.print.as_deref().map(printable);
        let mut fields = format.values;
        for field in &mut fields {
            field.name = printable(&field.name);
            if let Shape::Enum { names, .. } = &mut field.shape {
                names.iter_mut().for_each(|(_, name)| *name = printable(name).into());
            }
        }
        number_repeated(&mut fields);
        let old = self.current.get(&key).and_then(|index| self.known.get(position(*index)));
        if let Some(old) = old {
            if old.fields == fields && old.print == print {
                return;
            }
            self.replaced += 1;
            self.replaced_text += old.text;
        }
        let Ok(index) = u32::try_from(self.known.len()) else { return };
        self.known.push(Known { fields, words, text: values.text.len(), print });
        self.current.insert(key, index);
    }

    /// The number of the present format, and how many words it is about.
    #[inline]
    pub(super) fn find(&self, function: u32, tracer: u8, of: ValuesOf) -> Option<(u32, usize)> {
        let index = *self.current.get(&(function, tracer, of))?;
        Some((index, self.known.get(position(index))?.words))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.current.is_empty()
    }

    /// The values of a format.
    pub(super) fn fields(&self, index: u32) -> Option<&[ValueField]> {
        self.known.get(position(index)).map(|known| &*known.fields)
    }

    /// How events of a format are printed.
    pub(super) fn print(&self, index: u32) -> Option<&str> {
        self.known.get(position(index))?.print.as_deref()
    }

    /// Whether [`Formats::sweep`] is worth its cost.
    pub(super) fn is_crowded(&self) -> bool {
        self.replaced > self.current.len() + REPLACED || self.replaced_text > REPLACED_TEXT
    }

    /// Forgets what was replaced: no record waits.
    pub(super) fn sweep(&mut self) {
        let mut all: Vec<_> = self.known.drain(..).map(Some).collect();
        for index in self.current.values_mut() {
            let known = all.get_mut(position(*index)).and_then(Option::take);
            *index = u32::try_from(self.known.len()).unwrap_or(u32::MAX);
            self.known.extend(known);
        }
        (self.replaced, self.replaced_text) = (0, 0);
    }
}

fn position(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

/// Writes arguments as ftrace does, with their parentheses.
#[inline(never)]
pub(super) fn write_args(out: &mut Vec<u8>, args: &Args<'_>) {
    out.push(b'(');
    for (number, (name, shown)) in args.iter().enumerate() {
        if number > 0 {
            out.extend_from_slice(b", ");
        }
        out.extend_from_slice(name.as_bytes());
        out.push(b'=');
        match shown {
            Some(shown) => write_shown(out, &shown),
            None => out.push(b'?'),
        }
    }
    out.push(b')');
}

/// Writes what was returned. Where nobody knows what it is, a number that may be an error is
/// taken for one, as ftrace does.
#[inline(never)]
pub(super) fn write_returned(out: &mut Vec<u8>, returned: &Returned<'_>) {
    let shown = returned.shown().unwrap_or_else(|| {
        let raw = returned.raw.cast_signed();
        let narrow = u32::try_from(returned.raw).map(|low| i64::from(low.cast_signed()));
        let number = narrow.unwrap_or(raw);
        if (-4095..0).contains(&number) {
            Shown::Signed(number)
        } else {
            Shown::Pointer(returned.raw)
        }
    });
    write_shown(out, &shown);
}

/// Addresses of the kernel, and not small negative numbers.
const KERNEL: RangeInclusive<u64> = 0xff00_0000_0000_0000..=u64::MAX - 4095;

pub(super) fn write_shown(out: &mut Vec<u8>, shown: &Shown<'_>) {
    match shown {
        Shown::Signed(number) => {
            if *number < 0 {
                out.push(b'-');
            }
            decimal(out, number.unsigned_abs(), 0, b' ');
        }
        Shown::Unsigned(number) if KERNEL.contains(number) => hexadecimal(out, *number),
        Shown::Unsigned(number) => {
            decimal(out, *number, 0, b' ');
        }
        Shown::Bool(true) => out.extend_from_slice(b"true"),
        Shown::Bool(false) => out.extend_from_slice(b"false"),
        Shown::Char(byte) => quoted(out, &[*byte], b'\''),
        Shown::Name(name) => out.extend_from_slice(name.as_bytes()),
        Shown::Pointer(address) => hexadecimal(out, *address),
        Shown::Text(text) => quoted(out, text, b'"'),
        Shown::Raw(bytes) => match little(bytes) {
            Some(number) => hexadecimal(out, number),
            None => out.extend_from_slice(hex(bytes).as_bytes()),
        },
        Shown::Words(words) => {
            out.push(b'[');
            for (number, word) in words.iter().enumerate() {
                out.extend_from_slice(if number > 0 { b", " } else { b"" });
                hexadecimal(out, *word);
            }
            out.push(b']');
        }
    }
}

/// A character in its quotes.
pub(crate) fn quoted_char(byte: u8) -> Vec<u8> {
    let mut out = Vec::new();
    write_shown(&mut out, &Shown::Char(byte));
    out
}

/// Text in quotes; escaped as in C is what would end it, or move a terminal's cursor.
fn quoted(out: &mut Vec<u8>, text: &[u8], quote: u8) {
    let byte = |out: &mut Vec<u8>, byte: u8| {
        // A vector takes all.
        let _ = write!(out, "\\x{byte:02x}");
    };
    out.push(quote);
    for chunk in text.utf8_chunks() {
        for c in chunk.valid().chars() {
            let mut utf8 = [0; 4];
            let utf8 = c.encode_utf8(&mut utf8).as_bytes();
            match c {
                '\n' => out.extend_from_slice(b"\\n"),
                '\r' => out.extend_from_slice(b"\\r"),
                '\t' => out.extend_from_slice(b"\\t"),
                '\\' => out.extend_from_slice(b"\\\\"),
                _ if utf8 == [quote] => out.extend_from_slice(&[b'\\', quote]),
                _ if c.is_control() => utf8.iter().for_each(|part| byte(out, *part)),
                _ => out.extend_from_slice(utf8),
            }
        }
        chunk.invalid().iter().for_each(|part| byte(out, *part));
    }
    out.push(quote);
}

/// Up to 8 bytes as the number that they are.
fn little(bytes: &[u8]) -> Option<u64> {
    let mut whole = [0; 8];
    whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(u64::from_le_bytes(whole))
}

/// Bytes in their order, two digits each.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Arguments as a JSON object.
#[derive(Debug)]
pub(crate) struct JsonArgs<'a>(pub(crate) Args<'a>);

impl Serialize for JsonArgs<'_> {
    #[inline(never)]
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, shown) in self.0.iter() {
            map.serialize_entry(name, &shown.as_ref().map(JsonShown))?;
        }
        map.end()
    }
}

/// What was returned, in JSON: where nobody knows what it is, a number without a sign.
#[derive(Debug)]
pub(crate) struct JsonReturned<'a>(pub(crate) Returned<'a>);

impl Serialize for JsonReturned<'_> {
    #[inline(never)]
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.shown() {
            Some(shown) => JsonShown(&shown).serialize(serializer),
            None => serializer.serialize_u64(self.0.raw),
        }
    }
}

struct JsonShown<'a>(&'a Shown<'a>);

impl Serialize for JsonShown<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Shown::Signed(number) => serializer.serialize_i64(*number),
            Shown::Unsigned(number) => serializer.serialize_u64(*number),
            Shown::Bool(yes) => serializer.serialize_bool(*yes),
            Shown::Char(byte) => serializer.serialize_char(char::from(*byte)),
            Shown::Name(name) => serializer.serialize_str(name),
            Shown::Pointer(address) => serializer.collect_str(&format_args!("{address:#x}")),
            Shown::Text(text) => serializer.serialize_str(&String::from_utf8_lossy(text)),
            Shown::Raw(bytes) => match little(bytes) {
                Some(number) => serializer.collect_str(&format_args!("{number:#x}")),
                None => serializer.serialize_str(&hex(bytes)),
            },
            Shown::Words(words) => serializer.collect_seq(words),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(shown: &Shown<'_>) -> String {
        let mut out = Vec::new();
        write_shown(&mut out, shown);
        String::from_utf8(out).expect("UTF-8")
    }

    // Whatever the guest has in its memory: a line stays a line, and quotes end where they do.
    #[test]
    fn text_cannot_leave_its_quotes() {
        let shown = |bytes: &[u8]| text(&Shown::Text(bytes.to_vec()));
        assert_eq!(shown(b"a\"b\\c'\n\r\t\x1b[2J\x7f"), r#""a\"b\\c'\n\r\t\x1b[2J\x7f""#);
        assert_eq!(shown("ä\u{85}€".as_bytes()), "\"ä\\xc2\\x85€\"");
        assert_eq!(shown(b"\xff\xe2\x82x"), r#""\xff\xe2\x82x""#);
        assert_eq!(text(&Shown::Char(b'\'')), r"'\''");
        assert_eq!(text(&Shown::Char(b'"')), "'\"'");
        assert_eq!(text(&Shown::Char(0)), r"'\x00'");
        assert_eq!(text(&Shown::Char(0xe4)), r"'\xe4'");
    }

    #[test]
    fn numbers_are_whole() {
        assert_eq!(text(&Shown::Signed(i64::MIN)), "-9223372036854775808");
        assert_eq!(text(&Shown::Unsigned(u64::MAX)), "18446744073709551615");
        // An address, whatever its type: `unsigned long ip`.
        let ip = Shown::Unsigned(0xffff_ffff_8100_1234);
        assert_eq!(text(&ip), "0xffffffff81001234");
        assert_eq!(text(&Shown::Unsigned(0xfeff_ffff_ffff_ffff)), "18374686479671623679");
        assert_eq!(text(&Shown::Pointer(0)), "0x0");
        assert_eq!(text(&Shown::Raw(vec![1, 2, 3])), "0x30201");
        assert_eq!(text(&Shown::Raw(vec![1; 9])), "01".repeat(9));
    }

    // As the kernel's own print_graph_retval.
    #[test]
    fn returned_errors_are_found_without_types() {
        let shown = |raw| {
            let mut out = Vec::new();
            write_returned(&mut out, &Returned { raw, shape: None });
            String::from_utf8(out).expect("ASCII")
        };
        assert_eq!(shown(0x340), "0x340");
        assert_eq!(shown(u64::MAX - 21), "-22");
        assert_eq!(shown(0xffff_ffea), "-22");
        assert_eq!(shown(0xffff_f000), "0xfffff000");
        assert_eq!(shown(0xffff_8880_ffff_ffff), "0xffff8880ffffffff");
    }

    // A stream that replaces its formats for ever needs no more memory for it.
    #[test]
    fn formats_that_were_replaced_are_forgotten() {
        let mut formats = Formats::default();
        let mut swept = 0;
        for round in 0..10_000u32 {
            let text = format!(r#"{{"values":[{{"name":"a{round}","type":"char"}}]}}"#);
            for function in [1, 2] {
                let (tracer, of, text) = (3, 0, text.as_bytes());
                formats.insert(&RawValues { function, tracer, of, text });
            }
            if formats.is_crowded() {
                formats.sweep();
                swept += 1;
            }
            let (index, words) = formats.find(2, 3, ValuesOf::Entry).expect("known");
            assert_eq!(words, 1);
            assert_eq!(formats.fields(index).expect("known")[0].name, format!("a{round}"));
        }
        assert!(swept > 10 && formats.known.len() < 2000, "{swept} {}", formats.known.len());
        assert_eq!(formats.find(2, 3, ValuesOf::Return), None);
    }
}
