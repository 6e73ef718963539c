//! The words of C that print formats are made of.

use super::number::{Number, Type};

/// A word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// A name or a keyword.
    Word(&'a str),
    Number(Number),
    /// A string of which all can be shown.
    Text(String),
    Sign(&'static str),
    /// Anything else: what has it is not understood, but what is beside it may be.
    Unknown,
}

/// Signs, longest first.
const SIGNS: [&str; 29] = [
    "->", "<<", ">>", "&&", "||", "==", "!=", "<=", ">=", "(", ")", "[", "]", "{", "}", ",", "?",
    ":", "+", "-", "*", "/", "&", "|", "^", "~", "!", "<", ">",
];

/// All words of a text; none if a string in it has no end.
pub(super) fn tokens(text: &str) -> Option<Vec<Token<'_>>> {
    let mut found = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let (token, after) = match first {
            '"' => {
                let (text, after) = string(rest.get(1..)?)?;
                (text.map_or(Token::Unknown, Token::Text), after)
            }
            '\'' => character(rest)?,
            '0'..='9' => {
                let (digits, after) = word(rest)?;
                (number(digits).map_or(Token::Unknown, Token::Number), after)
            }
            'a'..='z' | 'A'..='Z' | '_' => {
                let (word, after) = word(rest)?;
                (Token::Word(word), after)
            }
            _ => match SIGNS.into_iter().find(|sign| rest.starts_with(sign)) {
                Some(sign) => (Token::Sign(sign), rest.get(sign.len()..)?),
                None => (Token::Unknown, rest.get(first.len_utf8()..)?),
            },
        };
        found.push(token);
        rest = after.trim_start();
    }
    Some(found)
}

/// The letters and digits at the beginning, and what is behind them.
fn word(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    text.split_at_checked(end)
}

/// A string behind its first quote, unless it has what cannot be shown; and what is behind it.
fn string(text: &str) -> Option<(Option<String>, &str)> {
    let mut out = Some(String::new());
    let mut chars = text.chars();
    loop {
        let c = match chars.next()? {
            '"' => return Some((out, chars.as_str())),
            '\\' => Some(chars.next()?).filter(|c| matches!(c, '"' | '\\')),
            c => Some(c).filter(|c| !c.is_control()),
        };
        out = out.zip(c).map(|(mut out, c)| {
            out.push(c);
            out
        });
    }
}

/// A character in quotes.
fn character(text: &str) -> Option<(Token<'static>, &str)> {
    let mut chars = text.strip_prefix('\'')?.chars();
    let c = chars.next()?;
    // Of escapes only the end matters.
    if c == '\\' {
        chars.next()?;
    }
    let after = chars.as_str().strip_prefix('\'')?;
    let shown = matches!(c, ' '..='~') && !matches!(c, '\'' | '\\');
    let number = Number::new(u64::from(u32::from(c)), Type::INT);
    Some((if shown { Token::Number(number) } else { Token::Unknown }, after))
}

/// An integer, with the type that C gives it.
fn number(word: &str) -> Option<Number> {
    let digits = word.trim_end_matches(['u', 'U', 'l', 'L']);
    let suffix = word.get(digits.len()..)?;
    let longs = suffix.matches(['l', 'L']).count();
    let unsigned = suffix.matches(['u', 'U']).count();
    if longs > 2 || unsigned > 1 {
        return None;
    }
    let hex = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X"));
    let octal = digits.strip_prefix('0').filter(|rest| !rest.is_empty());
    let value = match (hex, octal) {
        (Some(hex), _) => u64::from_str_radix(hex, 16),
        (None, Some(octal)) => u64::from_str_radix(octal, 8),
        (None, None) => digits.parse(),
    };
    let value = value.ok()?;
    let decimal = hex.is_none() && octal.is_none();
    let bits: &[u32] = if longs > 0 { &[64] } else { &[32, 64] };
    let types = bits.iter().flat_map(|&bits| {
        [Type { bits, signed: true }, Type { bits, signed: false }].into_iter().filter(
            move |kind| {
                if unsigned > 0 { !kind.signed } else { kind.signed || !decimal }
            },
        )
    });
    let mut fitting = types.filter(|kind| value <= u64::MAX >> (64 - kind.value_bits()));
    Some(Number::new(value, fitting.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_types_of_c() {
        let is = |text: &str, value, bits, signed| {
            assert_eq!(
                tokens(text),
                Some(vec![Token::Number(Number::new(value, Type { bits, signed }))]),
                "{text}"
            );
        };
        is("10", 10, 32, true);
        is("010", 8, 32, true);
        is("0", 0, 32, true);
        is("0xFFFFFFFF", 0xffff_ffff, 32, false);
        is("4294967295", 0xffff_ffff, 64, true);
        is("1U", 1, 32, false);
        is("1ull", 1, 64, false);
        is("0xffffffffffffffff", u64::MAX, 64, false);
        is("'a'", 97, 32, true);
        for text in [
            "18446744073709551616",
            "08",
            "0x",
            "1lll",
            "1f",
            "1uu",
            "$",
            "\u{e4}",
            "9223372036854775808",
            r"'\n'",
        ] {
            assert_eq!(tokens(text), Some(vec![Token::Unknown]), "{text}");
        }
        for text in ["'", "'ab'", "''", r"'\"] {
            assert_eq!(tokens(text), None, "{text}");
        }
    }

    #[test]
    fn strings_end() {
        assert_eq!(tokens(r#""a\"\\b""#), Some(vec![Token::Text("a\"\\b".to_owned())]));
        for text in [r#"""#, r#""a\"#, r#""a\""#, "\""] {
            assert_eq!(tokens(text), None, "{text}");
        }
        for text in [r#""\n""#, "\"\n\""] {
            assert_eq!(tokens(text), Some(vec![Token::Unknown]), "{text}");
        }
    }
}
