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
    let Some(value) = number(shown) else { return plain(shown) };
    let named = |list| {
        let found = names(list).find(|(number, _)| *number == value);
        found.map(|(_, name)| name.to_owned())
    };
    match form {
        "" => plain(shown),
        "x" => format!("{value:x}"),
        "p" => format!("{value:016x}"),
        "state" => state(value),
        "major" => (value >> 20).to_string(),
        "minor" => (value & 0xf_ffff).to_string(),
        _ => match form.split_once(' ') {
            Some(("names", list)) => named(list).unwrap_or_else(|| plain(shown)),
            Some(("flags", list)) => flags(value, list, "|"),
            Some(("letters", list)) => flags(value, list, ""),
            Some(("bits", places)) => bits(places)
                .map_or_else(|| plain(shown), |(shift, mask)| (value >> shift & mask).to_string()),
            _ => match form.strip_prefix('0') {
                Some(width) => {
                    format!("{value:0width$}", width = width.parse().unwrap_or(0).min(20))
                }
                None => plain(shown),
            },
        },
    }
}

/// Numbers and names of the form `names`.
pub(crate) fn names(list: &str) -> impl Iterator<Item = (u64, &str)> {
    let own = list.split(',').filter_map(|pair| pair.split_once('='));
    own.filter_map(|(number, name)| Some((number.parse().ok()?, name)))
}

/// Names of the bits that are set, with `between` between them, as `__print_flags` puts them. Bits without a
/// name are not printed.
fn flags(value: u64, list: &str, between: &str) -> String {
    let set = names(list).filter(|(bits, _)| *bits != 0 && value & bits == *bits);
    let set: Vec<&str> = set.map(|(_, name)| name).collect();
    set.join(between)
}

/// Of the form `bits`, which has the lowest bit and how many: the shift to the right, and the mask behind it.
pub(crate) fn bits(places: &str) -> Option<(u32, u64)> {
    let (from, count) = places.split_once(' ')?;
    let (from, count): (u32, u32) = (from.parse().ok()?, count.parse().ok()?);
    (from < 64 && (1..=64).contains(&count)).then(|| (from, u64::MAX >> (64 - count)))
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
        assert_eq!(formed(Some(&shown), "names 1=A"), "7");
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
