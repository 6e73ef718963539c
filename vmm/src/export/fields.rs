//! Formats the fields of events as the kernel's own trace does.

use super::values::{Args, write_shown};
use super::{Tracepoint, printable};
use crate::stream::Shown;
use std::fmt::Write as _;

/// Letters of a task's state, by bit (include/trace/events/sched.h), and what says that it was
/// preempted.
pub(crate) const STATES: [&str; 8] = ["S", "D", "T", "t", "X", "Z", "P", "I"];
pub(crate) const PREEMPTED: u64 = 0x100;

pub(super) fn text(event: &Tracepoint<'_>) -> String {
    event.fields.map_or_else(String::new, |fields| filled(fields, event.print))
}

fn filled(fields: Args<'_>, print: Option<&str>) -> String {
    let fields: Vec<_> = fields.iter().collect();
    let mut out = String::new();
    let Some(print) = print else {
        for (number, (name, shown)) in fields.iter().enumerate() {
            let blank = if number > 0 { " " } else { "" };
            let _ = write!(out, "{blank}{name}={}", plain(shown.as_ref()));
        }
        return out;
    };
    let find = |name: &str| {
        fields.iter().find(|(known, _)| *known == name).map(|(_, shown)| shown.as_ref())
    };
    for piece in pieces(print) {
        let (name, index, form) = match piece {
            Piece::Text(text) => {
                out.push_str(text);
                continue;
            }
            Piece::Field { name, index, form } => (name, index, form),
        };
        match (find(name), form.strip_prefix("minus ")) {
            (Some(Some(Shown::Words(words))), _) if index.is_some() => {
                let word = index.and_then(|index: usize| words.get(index));
                let word = word.map(|word| Shown::Unsigned(*word));
                out.push_str(&formed(word.as_ref(), form));
            }
            (Some(shown), Some(less)) => {
                let numbers = number(shown).zip(find(less).and_then(number));
                let less = numbers.map(|(value, less)| value.wrapping_sub(less).cast_signed());
                out.push_str(&less.map_or_else(|| "?".to_owned(), |less| less.to_string()));
            }
            (Some(shown), None) => out.push_str(&formed(shown, form)),
            (None, _) => out.push('?'),
        }
    }
    printable(&out)
}

/// A part of how an event is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// As it is.
    Text(&'a str),
    /// A field, or one number of an array, in a form of `docs/stream.md` (none: empty).
    Field { name: &'a str, index: Option<usize>, form: &'a str },
}

/// The parts of how an event is printed, in their order.
pub(crate) fn pieces(print: &str) -> impl Iterator<Item = Piece<'_>> {
    let mut rest = print;
    let mut field = None;
    std::iter::from_fn(move || {
        if let Some(field) = field.take() {
            return Some(field);
        }
        if rest.is_empty() {
            return None;
        }
        let Some((before, after)) = rest.split_once('{') else {
            return Some(Piece::Text(std::mem::take(&mut rest)));
        };
        let Some((inner, after)) = after.split_once('}') else {
            // It has no end.
            (field, rest) = (Some(Piece::Text(after)), "");
            return Some(Piece::Text(before));
        };
        let (name, form) = inner.split_once(':').unwrap_or((inner, ""));
        let (name, index) = match name.strip_suffix(']').and_then(|name| name.split_once('[')) {
            Some((name, index)) => (name, index.parse().ok()),
            None => (name, None),
        };
        field = Some(Piece::Field { name, index, form });
        rest = after;
        Some(Piece::Text(before))
    })
}

/// A value as `%d`, `%u` or `%s` prints it.
fn plain(shown: Option<&Shown<'_>>) -> String {
    match shown {
        None => "?".to_owned(),
        Some(Shown::Text(text)) => printable(&String::from_utf8_lossy(text)),
        Some(Shown::Bool(yes)) => u8::from(*yes).to_string(),
        Some(shown) => {
            let mut out = Vec::new();
            write_shown(&mut out, shown);
            String::from_utf8_lossy(&out).into_owned()
        }
    }
}

fn number(shown: Option<&Shown<'_>>) -> Option<u64> {
    Some(match shown? {
        Shown::Signed(number) => number.cast_unsigned(),
        Shown::Unsigned(number) | Shown::Pointer(number) => *number,
        Shown::Bool(yes) => u64::from(*yes),
        Shown::Char(byte) => u64::from(*byte),
        Shown::Name(_) | Shown::Text(_) | Shown::Raw(_) | Shown::Words(_) => return None,
    })
}

/// A field in the form in which the event's text has it, such as a number by its name.
pub(crate) fn in_form(event: &Tracepoint<'_>, field: &str) -> Option<String> {
    let form = pieces(event.print?).find_map(|piece| match piece {
        Piece::Field { name, index: None, form } if name == field && !form.is_empty() => Some(form),
        _ => None,
    })?;
    let (_, shown) = event.fields?.iter().find(|(known, _)| *known == field)?;
    Some(formed(shown.as_ref(), form))
}

fn formed(shown: Option<&Shown<'_>>, form: &str) -> String {
    let Some(whole) = number(shown) else { return plain(shown) };
    let (bits, form) = Form::of(form);
    let value = bits.map_or(whole, |bits| bits.of(whole));
    match form {
        Form::Plain | Form::Less if bits.is_none() => plain(shown),
        Form::Plain | Form::Less => value.to_string(),
        Form::Signed => bits.map_or_else(|| plain(shown), |bits| bits.signed(value).to_string()),
        Form::Hex => format!("{value:x}"),
        Form::Address => format!("{value:016x}"),
        Form::State => state(value),
        Form::Digits(width) => match shown {
            Some(Shown::Signed(number)) if bits.is_none() => format!("{number:0width$}"),
            _ => format!("{value:0width$}"),
        },
        Form::Names(list) => match named(list, value) {
            Some(name) => name.to_owned(),
            None => format!("{value:#x}"),
        },
        Form::Flags { list, between, all } => flags(value, list, between, all),
    }
}

/// What a form does with a number, or with some bits of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form<'a> {
    /// As it is, also where the form is not known.
    Plain,
    Signed,
    /// Less another field.
    Less,
    Hex,
    /// With 16 digits.
    Address,
    State,
    /// At least so many.
    Digits(usize),
    /// A list for [`names`] and [`others`].
    Names(&'a str),
    /// Names of bits, from a list for [`names`]; `all`: those without a name are printed, too, and each once.
    Flags {
        list: &'a str,
        between: &'static str,
        all: bool,
    },
}

/// So many bits of a number, and the lowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bits {
    pub(crate) lowest: u32,
    pub(crate) count: u32,
}

impl Bits {
    /// All that it can be.
    pub(crate) fn mask(self) -> u64 {
        u64::MAX >> (64 - self.count)
    }

    pub(crate) fn of(self, value: u64) -> u64 {
        value >> self.lowest & self.mask()
    }

    /// With the highest as the sign.
    fn signed(self, value: u64) -> i64 {
        let above = 64 - self.count;
        (value << above).cast_signed() >> above
    }
}

impl<'a> Form<'a> {
    /// A form of `docs/stream.md`, and which bits of the number it is about, if not all.
    pub(crate) fn of(text: &'a str) -> (Option<Bits>, Self) {
        match text {
            // What is above the 12 bits of a kernel's `dev_t` is in none.
            "major" => return (Some(Bits { lowest: 20, count: 44 }), Self::Plain),
            "minor" => return (Some(Bits { lowest: 0, count: 20 }), Self::Plain),
            _ => {}
        }
        let Some(text) = text.strip_prefix("bits ") else { return (None, Self::one(text)) };
        let mut words = text.splitn(3, ' ');
        let mut number = || words.next()?.parse().ok();
        let (lowest, count) = (number(), number());
        match lowest.zip(count) {
            Some((lowest, count)) if lowest < 64 && (1..=64).contains(&count) => {
                let form = words.next().map_or(Self::Plain, Self::one);
                (Some(Bits { lowest, count }), form)
            }
            _ => (None, Self::Plain),
        }
    }

    /// Of all bits.
    fn one(text: &'a str) -> Self {
        let flags = |list, between, all| Self::Flags { list, between, all };
        match text.split_once(' ') {
            Some(("names", list)) => Self::Names(list),
            Some(("flags", list)) => flags(list, "|", false),
            Some(("letters", list)) => flags(list, "", false),
            Some(("allflags", list)) => flags(list, "|", true),
            Some(("allletters", list)) => flags(list, "", true),
            Some(("minus", _)) => Self::Less,
            Some(_) => Self::Plain,
            None => match text {
                "x" => Self::Hex,
                "p" => Self::Address,
                "state" => Self::State,
                "signed" => Self::Signed,
                _ => {
                    let width = text.strip_prefix('0').and_then(|width| width.parse().ok());
                    let width: Option<usize> = width.filter(|width| *width > 0);
                    width.map_or(Self::Plain, |width| Self::Digits(width.min(20)))
                }
            },
        }
    }
}

/// Numbers and names of a list, without the name for all others.
pub(crate) fn names(list: &str) -> impl Iterator<Item = (u64, &str)> {
    let own = list.split(',').filter_map(|pair| pair.split_once('='));
    own.filter_map(|(number, name)| Some((number.parse().ok()?, name)))
}

/// The name that a list has for all other numbers.
pub(crate) fn others(list: &str) -> Option<&str> {
    list.split(',').find_map(|pair| pair.strip_prefix("*="))
}

/// The name of a number.
fn named(list: &str, value: u64) -> Option<&str> {
    let found = names(list).find(|(number, _)| *number == value);
    found.map(|(_, name)| name).or_else(|| others(list))
}

/// Names of the bits that are set, with `between` between them. With `all` it is as `__print_flags` has it: each name
/// takes its bits away, and what is left stands behind them; 0 has a name of its own.
fn flags(value: u64, list: &str, between: &str, all: bool) -> String {
    if !all {
        let set = names(list).filter(|(bits, _)| *bits != 0 && value & bits == *bits);
        let set: Vec<&str> = set.map(|(_, name)| name).collect();
        return set.join(between);
    }
    if value == 0 {
        let zero = names(list).find(|(bits, _)| *bits == 0);
        return zero.map(|(_, name)| name.to_owned()).unwrap_or_default();
    }
    let mut left = value;
    let mut out = Vec::new();
    for (bits, name) in names(list) {
        if bits != 0 && left & bits == bits {
            left &= !bits;
            out.push(name.to_owned());
        }
    }
    if left != 0 {
        out.push(format!("{left:#x}"));
    }
    out.join(between)
}

fn state(value: u64) -> String {
    let bits = (0..).zip(STATES).filter(|(bit, _)| value >> bit & 1 != 0);
    let letters: Vec<&str> = bits.map(|(_, letter)| letter).collect();
    let letters = if letters.is_empty() { "R".to_owned() } else { letters.join("|") };
    let preempted = if value & PREEMPTED == 0 { "" } else { "+" };
    letters + preempted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Shape, ValueField};

    // Another letter is another story of why a task has left its CPU.
    #[test]
    fn states_have_the_letters_of_the_kernel() {
        for (value, letters) in
            [(0, "R"), (1, "S"), (2, "D"), (0x100, "R+"), (0x21, "S|Z"), (0x80, "I")]
        {
            assert_eq!(state(value), letters, "{value:#x}");
        }
    }

    // An array's numbers are printed by themselves, and one that is not there is none.
    #[test]
    fn numbers_of_arrays_have_places() {
        let fields = [
            ValueField { name: "id".to_owned(), shape: Shape::Signed { bytes: 8 } },
            ValueField { name: "args".to_owned(), shape: Shape::Words { bytes: 16 } },
        ];
        let args = Args { fields: &fields, failed: 0, words: &[1, 10, 11] };
        let print = "NR {id} ({args[0]:x}, {args[1]:x}, {args[2]}, {args[x]}) {args}";
        assert_eq!(filled(args, Some(print)), "NR 1 (a, b, ?, [0xa, 0xb]) [0xa, 0xb]");
        assert_eq!(filled(args, None), "id=1 args=[0xa, 0xb]");
    }

    #[test]
    fn forms_are_those_of_printf() {
        let shown = Shown::Signed(7);
        assert_eq!(formed(Some(&shown), "03"), "007");
        assert_eq!(formed(Some(&shown), "names 1=A,7=B"), "B");
        assert_eq!(formed(Some(&shown), "names 1=A"), "0x7");
        assert_eq!(formed(Some(&shown), "names 1=A,*=C"), "C");
        assert_eq!(formed(Some(&Shown::Unsigned(255)), "x"), "ff");
        assert_eq!(formed(Some(&Shown::Unsigned(0x80_0003)), "major"), "8");
        assert_eq!(formed(None, "03"), "?");
        // Of a timer: CPU 3, deferrable and safe with interrupts off.
        let flags = Shown::Unsigned(0x28_0003 | 5 << 22);
        assert_eq!(formed(Some(&flags), "bits 0 18"), "3");
        assert_eq!(formed(Some(&flags), "bits 22 10"), "5");
        assert_eq!(formed(Some(&flags), "flags 262144=M,524288=D,2097152=I"), "D|I");
        assert_eq!(formed(Some(&flags), "letters 524288=D,2097152=I"), "DI");
        assert_eq!(formed(Some(&Shown::Unsigned(0)), "flags 1=A"), "");
        // A name takes its bits, and what nobody has is a number.
        let all = "allflags 3264=KERNEL,3072=RECLAIM,64=IO,1024=DIRECT,0=none";
        for (value, printed) in [
            (3264, "KERNEL"),
            (3264 | 1, "KERNEL|0x1"),
            (3072 | 64, "RECLAIM|IO"),
            (1024, "DIRECT"),
            (0x8000, "0x8000"),
            (0, "none"),
        ] {
            assert_eq!(formed(Some(&Shown::Unsigned(value)), all), printed, "{value}");
        }
        assert_eq!(formed(Some(&Shown::Unsigned(0)), "allflags 1=A"), "");
        assert_eq!(formed(Some(&Shown::Unsigned(7)), "allletters 1=A,2=B"), "AB0x4");
        // Any form may be of some bits.
        assert_eq!(formed(Some(&flags), "bits 19 3 names 5=B"), "B");
        assert_eq!(formed(Some(&flags), "bits 19 3 names 1=B"), "0x5");
        assert_eq!(formed(Some(&flags), "bits 22 10 allflags 1=A"), "A|0x4");
        assert_eq!(formed(Some(&flags), "bits 19 3 03"), "005");
        assert_eq!(formed(Some(&flags), "bits 19 3 signed"), "-3");
        assert_eq!(formed(Some(&flags), "bits 19 3 unheard of"), "5");
        // Numbers with a sign, as other types.
        let minus = Shown::Signed(-1);
        for (form, printed) in [
            ("", "-1"),
            ("03", "-01"),
            ("bits 0 32", "4294967295"),
            ("bits 0 32 x", "ffffffff"),
            ("bits 0 64 signed", "-1"),
            ("names 18446744073709551615=none", "none"),
            ("names 0=A", "0xffffffffffffffff"),
            ("signed", "-1"),
        ] {
            assert_eq!(formed(Some(&minus), form), printed, "{form}");
        }
        // Streams may be anybody's.
        for form in ["bits 64 1", "bits 0 0", "bits 0 65", "bits 1", "bits", "flags", "minus x"] {
            assert_eq!(formed(Some(&shown), form), "7", "{form}");
        }
    }

    #[test]
    fn one_field_can_be_less_another() {
        let field = |name: &str, shape| ValueField { name: name.to_owned(), shape };
        let fields = [
            field("expires", Shape::Unsigned { bytes: 8 }),
            field("now", Shape::Unsigned { bytes: 8 }),
            field("name", Shape::Text { bytes: 8 }),
        ];
        let args = |words| Args { fields: &fields, failed: 0, words };
        let print = "[{expires:minus now}] {expires:minus gone} {expires:minus name}";
        assert_eq!(filled(args(&[9, 5, 0x61]), Some(print)), "[4] ? ?");
        // Of one that is over already.
        assert_eq!(filled(args(&[5, 9, 0x61]), Some(print)), "[-4] ? ?");
    }
}
