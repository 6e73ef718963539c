//! From the way in which the kernel prints an event to the forms of streams (`docs/stream.md`).
//!
//! An event's `print fmt` is C: a format of printf, and what it prints. What this cannot say exactly is not said. All of
//! it comes from the image, and may be anything: what is read is bounded.

mod number;
mod parse;
mod tokens;
mod value;
mod view;

use super::super::Kernel;
use super::Event;
use number::{Number, Type};
use parse::{Meaning, Parser};
use std::fmt::Write as _;
use tokens::{Token, tokens};
use value::{Choice, Said, Value};
use view::{Base, Place};

/// The longest `print fmt`: that of the kernel is a few KiB.
const LONGEST: usize = 64 << 10;
/// The longest text in our own forms.
const LONGEST_FORM: usize = 16 << 10;

/// A part of a format.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    /// A conversion, and an argument.
    Value(Conversion),
}

/// What printf does with an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conversion {
    Number(Type, Base),
    Text,
    Character,
    Pointer,
    /// A pointer as a symbol.
    Symbol,
    /// One that has no form.
    Other,
}

/// What stands for an argument.
#[derive(Debug)]
enum Shown {
    Text(String),
    /// Text before it, a field, which number of it, and a form.
    Field(&'static str, String, Option<u32>, String),
}

impl Kernel {
    /// How an event is printed, as the `print` of streams (`docs/stream.md`): text with `{NAME:FORM}` in the place of
    /// fields, by the event's own [`Event::print`]. None if that prints anything for which there is no form. Symbols
    /// (`%pS`) are addresses.
    pub fn event_print(&self, event: &Event) -> Option<String> {
        print(self.meaning(event)?)
    }

    /// The form in which an event prints a field, such as `names 0=LOW,1=HIGH` (empty: as it is): that of the first
    /// argument which is that field and for which there is one, whatever the others are.
    pub fn event_form(&self, event: &Event, field: &str) -> Option<String> {
        form(self.meaning(event)?, field)
    }

    /// What words mean.
    fn meaning<'a>(&'a self, event: &'a Event) -> Option<Meaning<'a>> {
        let btf = self.btf().ok()?;
        Some(Meaning { btf, words: self.words(btf), event })
    }
}

fn print(meaning: Meaning<'_>) -> Option<String> {
    let tokens = words(meaning.event)?;
    let (parts, arguments) = split(&tokens)?;
    let mut arguments = arguments.into_iter();
    let mut out = String::new();
    for part in parts {
        let conversion = match part {
            Part::Text(text) => {
                out.push_str(plain(&text)?);
                continue;
            }
            Part::Value(conversion) => conversion,
        };
        match shown(conversion, Parser::value(arguments.next()?, meaning)?)? {
            Shown::Text(text) => out.push_str(plain(&text)?),
            Shown::Field(before, name, index, form) => {
                let index = index.map_or(String::new(), |index| format!("[{index}]"));
                let colon = if form.is_empty() { "" } else { ":" };
                // A text takes all.
                let _ = write!(out, "{before}{{{name}{index}{colon}{form}}}");
            }
        }
    }
    (arguments.next().is_none() && out.len() <= LONGEST_FORM).then_some(out)
}

fn form(meaning: Meaning<'_>, field: &str) -> Option<String> {
    let tokens = words(meaning.event)?;
    let (parts, arguments) = split(&tokens)?;
    let conversions = parts.into_iter().filter_map(|part| match part {
        Part::Value(conversion) => Some(conversion),
        Part::Text(_) => None,
    });
    let found = conversions.zip(arguments).find_map(|(conversion, tokens)| {
        match shown(conversion, Parser::value(tokens, meaning)?)? {
            Shown::Field(_, name, None, form) if name == field => Some(form),
            _ => None,
        }
    });
    found.filter(|form| form.len() <= LONGEST_FORM)
}

fn words(event: &Event) -> Option<Vec<Token<'_>>> {
    tokens(Some(&*event.print).filter(|print| print.len() <= LONGEST)?)
}

/// The parts of a format, and the arguments behind it.
fn split<'a>(tokens: &'a [Token<'a>]) -> Option<(Vec<Part>, Vec<&'a [Token<'a>]>)> {
    let Some(Token::Text(_)) = tokens.first() else { return None };
    let mut format = String::new();
    let mut rest = tokens;
    while let Some((Token::Text(text), after)) = rest.split_first() {
        format.push_str(text);
        rest = after;
    }
    let mut depth = 0_usize;
    let mut arguments = rest.split(|token| {
        match token {
            Token::Sign("(" | "[" | "{") => depth = depth.saturating_add(1),
            Token::Sign(")" | "]" | "}") => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && *token == Token::Sign(",")
    });
    // Nothing is between the format and the first of them.
    arguments.next().filter(|none| none.is_empty())?;
    Some((parts(&format)?, arguments.collect()))
}

/// The parts of a format of printf (lib/vsprintf.c); none where one takes more than one argument.
fn parts(format: &str) -> Option<Vec<Part>> {
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut chars = format.chars().peekable();
    let take = |chars: &mut std::iter::Peekable<std::str::Chars<'_>>, of: fn(char) -> bool| {
        let mut taken = String::new();
        while let Some(c) = chars.next_if(|&c| of(c)) {
            taken.push(c);
        }
        taken
    };
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        if chars.next_if_eq(&'%').is_some() {
            text.push('%');
            continue;
        }
        let flags = take(&mut chars, |c| "-+ #0".contains(c));
        let width = take(&mut chars, |c| c.is_ascii_digit());
        let precise = chars.next_if_eq(&'.').is_some();
        take(&mut chars, |c| c.is_ascii_digit());
        let length = take(&mut chars, |c| "hljztLq".contains(c));
        let letter = chars.next().filter(|c| c.is_ascii_alphabetic())?;
        let behind = if letter == 'p' {
            take(&mut chars, |c| c.is_ascii_alphanumeric())
        } else {
            String::new()
        };
        let width: u32 = if width.is_empty() { 0 } else { width.parse().unwrap_or(u32::MAX) };
        let conversion = conversion((&flags, width, precise), &length, letter, &behind);
        if !text.is_empty() {
            parts.push(Part::Text(std::mem::take(&mut text)));
        }
        parts.push(Part::Value(conversion.unwrap_or(Conversion::Other)));
    }
    if !text.is_empty() {
        parts.push(Part::Text(text));
    }
    Some(parts)
}

/// A conversion that there is a form for.
fn conversion(
    (flags, width, precise): (&str, u32, bool),
    length: &str,
    letter: char,
    behind: &str,
) -> Option<Conversion> {
    /// A number of 64 bits has no more.
    const MOST_DIGITS: u32 = 20;
    // Every value is as long as that.
    let is_plain = !precise && width <= 1 && flags.chars().all(|flag| matches!(flag, '-' | '0'));
    let digits = (flags == "0" && !precise && (2..=MOST_DIGITS).contains(&width)).then_some(width);
    let bits = match length {
        "" => 32,
        "h" => 16,
        "hh" => 8,
        "l" | "ll" | "z" | "L" => 64,
        _ => return None,
    };
    Some(match (letter, digits) {
        ('d' | 'i' | 'u', Some(digits)) => {
            Conversion::Number(Type { bits, signed: letter != 'u' }, Base::Digits(digits))
        }
        _ if !is_plain => return None,
        ('d' | 'i' | 'u', None) => {
            Conversion::Number(Type { bits, signed: letter != 'u' }, Base::Decimal)
        }
        ('x', _) => Conversion::Number(Type { bits, signed: false }, Base::Hex),
        ('s', _) if length.is_empty() => Conversion::Text,
        ('c', _) if length.is_empty() => Conversion::Character,
        ('p', _) => match behind {
            "" | "x" => Conversion::Pointer,
            "S" | "s" | "F" | "f" => Conversion::Symbol,
            _ => return None,
        },
        _ => return None,
    })
}

/// What a conversion prints of a value.
fn shown(conversion: Conversion, value: Value) -> Option<Shown> {
    let say = |said: &Said| match (conversion, said) {
        (Conversion::Text, Said::Text(text)) => Some(text.clone()),
        (Conversion::Character, Said::Number(number)) => {
            let byte = u8::try_from(number.value).ok()?;
            matches!(byte, b' '..=b'~').then(|| char::from(byte).to_string())
        }
        (Conversion::Number(kind, base), Said::Number(number)) => Some(digits(*number, kind, base)),
        _ => None,
    };
    let field = |place: Place, form| Shown::Field("", place.field, place.index, form);
    Some(match (conversion, value) {
        (_, Value::Text(text)) => Shown::Text(say(&Said::Text(text))?),
        (_, Value::Number(number)) => Shown::Text(say(&Said::Number(number))?),
        (Conversion::Text, Value::Field(name)) => Shown::Field("", name, None, String::new()),
        (Conversion::Text, Value::Flags(flags)) => {
            let form = flags.form()?;
            field(flags.view.place, form)
        }
        (Conversion::Number(Type::LONG, Base::Decimal), Value::Less(name, other)) => {
            Shown::Field("", name, None, format!("minus {other}"))
        }
        (Conversion::Number(kind, base), Value::View(view)) => {
            let place = view.place.clone();
            field(place, view.number(kind, base)?)
        }
        (Conversion::Pointer | Conversion::Symbol, Value::View(view)) => {
            let place = view.place.clone();
            let form = view.pointer()?;
            match conversion {
                Conversion::Pointer => field(place, form.to_owned()),
                _ => Shown::Field("0x", place.field, place.index, "x".to_owned()),
            }
        }
        (_, Value::Choice(choice)) => {
            let form = choice.form(say)?;
            field(choice.view.place, form)
        }
        (_, Value::Test(view, number, equal)) => {
            let truth = |yes| Number::truth(yes);
            let other = Value::Number(truth(!equal));
            let Value::Choice(choice) =
                Choice::between(view, number, Said::Number(truth(equal)), other)?
            else {
                return None;
            };
            let form = choice.form(say)?;
            field(choice.view.place, form)
        }
        _ => return None,
    })
}

/// A constant as it is printed.
fn digits(number: Number, kind: Type, base: Base) -> String {
    let number = number.promoted().cast(kind);
    let width = match base {
        Base::Digits(width) => usize::try_from(width).unwrap_or(0),
        Base::Decimal | Base::Hex => 0,
    };
    match base {
        Base::Hex => format!("{:x}", number.value),
        _ if kind.signed => format!("{:0width$}", number.value.cast_signed()),
        _ => format!("{:0width$}", number.value),
    }
}

/// Text that means nothing else in our forms.
fn plain(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.contains(['{', '}']))
}

#[cfg(test)]
mod tests;
