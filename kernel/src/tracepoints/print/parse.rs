//! What the arguments of a print format are.

use super::super::super::btf::{Btf, Int, Kind, Word, Words};
use super::super::{Event, EventField};
use super::number::{Number, Type};
use super::tokens::Token;
use super::value::{Choice, Flags, Value};
use super::view::{Place, View};

/// Parentheses, signs and choices in each other. Kernels have about 20.
const DEEPEST: usize = 48;

/// What words mean.
#[derive(Clone, Copy)]
pub(super) struct Meaning<'a> {
    pub(super) btf: &'a Btf,
    pub(super) words: &'a Words,
    pub(super) event: &'a Event,
}

/// Reads one argument.
pub(super) struct Parser<'a> {
    tokens: &'a [Token<'a>],
    meaning: Meaning<'a>,
    depth: usize,
}

/// What a cast leads to.
enum Cast {
    Integer(Type),
    Pointer,
}

/// How close signs bind.
fn closeness(sign: &str) -> Option<u8> {
    Some(match sign {
        "||" => 1,
        "&&" => 2,
        "|" => 3,
        "^" => 4,
        "&" => 5,
        "==" | "!=" => 6,
        "<<" | ">>" => 8,
        "+" | "-" => 9,
        "*" => 10,
        _ => return None,
    })
}

impl<'a> Parser<'a> {
    /// The value of all tokens together.
    pub(super) fn value(tokens: &'a [Token<'a>], meaning: Meaning<'a>) -> Option<Value> {
        let mut this = Self { tokens, meaning, depth: 0 };
        let value = this.choice()?;
        this.tokens.is_empty().then_some(value)
    }

    fn next(&mut self) -> Option<&'a Token<'a>> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(first)
    }

    fn eat(&mut self, sign: &str) -> Option<()> {
        match self.tokens.first()? {
            Token::Sign(own) if *own == sign => self.next().map(drop),
            _ => None,
        }
    }

    fn word(&mut self) -> Option<&'a str> {
        match self.next()? {
            Token::Word(word) => Some(word),
            _ => None,
        }
    }

    /// One more level.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth >= DEEPEST {
            return None;
        }
        self.depth += 1;
        let found = inner(self);
        self.depth -= 1;
        found
    }

    fn choice(&mut self) -> Option<Value> {
        self.deeper(|this| {
            let condition = this.binary(1)?;
            if this.eat("?").is_none() {
                return Some(condition);
            }
            let yes = this.choice()?;
            this.eat(":")?;
            let no = this.choice()?;
            chosen(condition, yes, no)
        })
    }

    fn binary(&mut self, least: u8) -> Option<Value> {
        let mut left = self.unary()?;
        while let Some(Token::Sign(sign)) = self.tokens.first()
            && let Some(close) = closeness(sign)
            && close >= least
        {
            self.next();
            let right = self.binary(close + 1)?;
            left = both(left, sign, right)?;
        }
        Some(left)
    }

    fn unary(&mut self) -> Option<Value> {
        self.deeper(|this| {
            for sign in ["-", "~", "!", "+"] {
                if this.eat(sign).is_some() {
                    return alone(sign, this.unary()?);
                }
            }
            if this.eat("(").is_none() {
                return this.primary();
            }
            if let Some((cast, rest)) = this.cast() {
                this.tokens = rest;
                return match (this.unary()?, cast) {
                    (Value::Number(number), Cast::Integer(kind)) => {
                        Some(Value::Number(number.cast(kind)))
                    }
                    (Value::Number(number), Cast::Pointer) => {
                        Some(Value::Number(number.cast(Type::ULONG)))
                    }
                    (Value::View(view), Cast::Integer(kind)) => view.cast(kind).map(Value::View),
                    (Value::View(view), Cast::Pointer) => {
                        view.promoted()?.cast(Type::ULONG).map(Value::View)
                    }
                    _ => None,
                };
            }
            let value = this.choice()?;
            this.eat(")")?;
            Some(value)
        })
    }

    /// The type behind a parenthesis, if there is one, and what is behind it.
    fn cast(&self) -> Option<(Cast, &'a [Token<'a>])> {
        /// More than any type has.
        const MOST: usize = 8;
        let end = self.tokens.iter().take(MOST).position(|token| *token == Token::Sign(")"))?;
        let (inner, rest) = (self.tokens.get(..end)?, self.tokens.get(end + 1..)?);
        let mut words = Vec::new();
        let mut stars = 0;
        for token in inner {
            match token {
                Token::Word("const" | "volatile") => {}
                Token::Word(word) if stars == 0 => words.push(*word),
                Token::Sign("*") => stars += 1,
                _ => return None,
            }
        }
        let kind = match *words {
            ["struct" | "union", _] if stars > 0 => None,
            ["void"] if stars > 0 => None,
            ["enum", _] if stars > 0 => None,
            ["char"] if stars > 0 => None,
            ["enum", name] => Some(self.meaning.of_enum(name)?),
            _ => Some(self.meaning.of_type(&words)?),
        };
        Some((kind.filter(|_| stars == 0).map_or(Cast::Pointer, Cast::Integer), rest))
    }

    fn primary(&mut self) -> Option<Value> {
        let word = match self.next()? {
            Token::Number(number) => return Some(Value::Number(*number)),
            Token::Text(text) => {
                let mut text = text.clone();
                while let Some(Token::Text(more)) = self.tokens.first() {
                    text.push_str(more);
                    self.next();
                }
                return Some(Value::Text(text));
            }
            Token::Word(word) => *word,
            Token::Sign(_) | Token::Unknown => return None,
        };
        match word {
            "REC" => {
                self.eat("->")?;
                let name = self.word()?;
                let index = match self.eat("[") {
                    None => None,
                    Some(()) => {
                        let Value::Number(number) = self.choice()? else { return None };
                        self.eat("]")?;
                        Some(u32::try_from(number.value).ok()?)
                    }
                };
                self.meaning.field(name, index)
            }
            "__get_str" => {
                self.eat("(")?;
                let field = self.meaning.known(self.word()?)?;
                self.eat(")")?;
                let is_text = field.kind.starts_with("__data_loc") && field.kind.contains("char");
                is_text.then(|| Value::Field(field.name.clone()))
            }
            "__print_symbolic" => {
                self.eat("(")?;
                let value = self.choice()?;
                self.eat(",")?;
                let list = self.list()?;
                Choice::symbolic(value, list)
            }
            "__print_flags" => {
                self.eat("(")?;
                let value = self.choice()?;
                self.eat(",")?;
                let Token::Text(between) = self.next()? else { return None };
                self.eat(",")?;
                let list = self.list()?;
                Flags::new(value, between, list).map(Value::Flags)
            }
            "true" | "false" => Some(Value::Number(Number::truth(word == "true"))),
            _ => match self.meaning.word(word)? {
                Word::Constant(value, long) => Some(Value::Number(constant(value, long))),
                Word::Typedef(_) | Word::Enum(_) => None,
            },
        }
    }

    /// `{ NUMBER, "NAME" }, ...`, up to one without a name, and the end of the parenthesis.
    fn list(&mut self) -> Option<Vec<(u64, String)>> {
        let mut list = Vec::new();
        let mut ended = false;
        loop {
            self.eat("{")?;
            let Value::Number(number) = self.choice()? else { return None };
            self.eat(",")?;
            match self.choice()? {
                Value::Text(name) if !ended => {
                    // These mean something in lists, or are nowhere to be seen.
                    let is_part = |c: char| matches!(c, ' '..='~') && !",={}".contains(c);
                    if !name.chars().all(is_part) {
                        return None;
                    }
                    list.push((number.cast(Type::ULONG).value, name));
                }
                Value::Number(Number { value: 0, .. }) => ended = true,
                _ => return None,
            }
            self.eat("}")?;
            if self.eat(")").is_some() {
                return Some(list);
            }
            self.eat(",")?;
        }
    }
}

impl<'a> Meaning<'a> {
    fn word(self, word: &str) -> Option<Word> {
        self.words.find(self.btf, word)
    }

    fn known(self, name: &str) -> Option<&'a EventField> {
        self.event.fields.iter().find(|field| field.name == name)
    }

    /// A field, or one number of it.
    fn field(self, name: &str, index: Option<u32>) -> Option<Value> {
        let field = self.known(name)?;
        let (kind, pointer) = (&*field.kind, field.kind.ends_with('*'));
        let (bits, signed) = match (kind, index) {
            _ if kind.starts_with("__") && kind.contains("_loc") => return None,
            (_, None) if kind.starts_with("char[") => {
                return Some(Value::Field(field.name.clone()));
            }
            (_, Some(index)) if kind.starts_with("unsigned long[") => {
                if index >= field.size / 8 {
                    return None;
                }
                (64, false)
            }
            (_, Some(_)) => return None,
            _ if kind.contains('[') => return None,
            _ if !matches!(field.size, 1 | 2 | 4 | 8) || pointer && field.size != 8 => return None,
            _ => (8 * field.size, field.signed && kind != "bool" && !pointer),
        };
        let kind = Type { bits, signed };
        Some(Value::View(View::new(Place { field: field.name.clone(), index, kind, pointer })))
    }

    fn of_number(self, number: u32) -> Option<Type> {
        let (bytes, signed) = match self.btf.see(number)?.kind {
            Kind::Int(Int { bool: true, .. }) => return None,
            Kind::Int(Int { bytes, signed, .. }) | Kind::Enum { bytes, signed } => (bytes, signed),
            Kind::Pointer(_) => (8, false),
            _ => return None,
        };
        matches!(bytes, 1 | 2 | 4 | 8).then_some(Type { bits: 8 * bytes, signed })
    }

    /// An enum. The name alone does not say how large it is: nearly all have 4 bytes, but some have a sign.
    fn of_enum(self, name: &str) -> Option<Type> {
        self.of_number(self.words.find_enum(self.btf, name)?)
    }

    /// An integer type.
    fn of_type(self, words: &[&str]) -> Option<Type> {
        let is = |word: &str| words.contains(&word);
        let known = ["unsigned", "signed", "int", "long", "short", "char"];
        if let [word] = words
            && !known.contains(word)
        {
            let Word::Typedef(number) = self.word(word)? else { return None };
            return self.of_number(number);
        }
        if words.is_empty() || !words.iter().all(|word| known.contains(word)) {
            return None;
        }
        let bits = match () {
            // Its sign is the compiler's choice.
            () if is("char") => (is("signed") || is("unsigned")).then_some(8)?,
            () if is("short") => 16,
            () if is("long") => 64,
            () => 32,
        };
        Some(Type { bits, signed: !is("unsigned") })
    }
}

/// An enumerator: an int where it fits into one.
fn constant(value: i64, long: bool) -> Number {
    let kind = match value {
        _ if long && i32::try_from(value).is_err() => Type::ULONG,
        _ if i32::try_from(value).is_ok() => Type::INT,
        _ if u32::try_from(value).is_ok() => Type { bits: 32, signed: false },
        _ => Type::LONG,
    };
    Number::new(value.cast_unsigned(), kind)
}

/// What a sign makes of what is behind it.
fn alone(sign: &str, value: Value) -> Option<Value> {
    Some(match (sign, value) {
        ("!", value) => match value.test()? {
            Value::Test(view, number, equal) => Value::Test(view, number, !equal),
            Value::Number(number) => Value::Number(Number::truth(number.value == 0)),
            _ => return None,
        },
        ("+", Value::Number(number)) => Value::Number(number.promoted()),
        ("-", Value::Number(number)) => {
            let number = number.promoted();
            Value::Number(Number::new(number.value.wrapping_neg(), number.kind))
        }
        ("~", Value::Number(number)) => {
            let number = number.promoted();
            Value::Number(Number::new(!number.value, number.kind))
        }
        _ => return None,
    })
}

/// What a sign makes of what is on both sides.
fn both(left: Value, sign: &str, right: Value) -> Option<Value> {
    use Value::{Less, Test, View};
    Some(match (sign, left, right) {
        (sign @ ("&&" | "||"), left, right) => match (left.test()?, right.test()?) {
            // One that is known decides, or does not matter.
            (Value::Number(number), other) | (other, Value::Number(number)) => {
                let yes = number.value != 0;
                if yes == (sign == "||") { Value::Number(Number::truth(yes)) } else { other }
            }
            _ => return None,
        },
        (_, Value::Number(left), Value::Number(right)) => {
            Value::Number(left.calculate(sign, right)?)
        }
        (">>", View(view), Value::Number(by)) => View(view.shifted(by)?),
        ("&", View(view), Value::Number(mask)) | ("&", Value::Number(mask), View(view)) => {
            View(view.masked(mask)?)
        }
        ("==" | "!=", View(view), Value::Number(number))
        | ("==" | "!=", Value::Number(number), View(view)) => {
            let (view, number) = view.compared(number)?;
            Test(view, number, sign == "==")
        }
        ("-", View(left), View(right)) if left.is_long() && right.is_long() => {
            Less(left.place.field, right.place.field)
        }
        _ => return None,
    })
}

/// `condition ? yes : no`
fn chosen(condition: Value, yes: Value, no: Value) -> Option<Value> {
    match condition.test()? {
        Value::Number(number) => Some(if number.value != 0 { yes } else { no }),
        Value::Test(view, number, equal) => {
            let (same, others) = if equal { (yes, no) } else { (no, yes) };
            Choice::between(view, number, same.said()?, others)
        }
        _ => None,
    }
}

impl Value {
    /// As a condition: a test, or a number.
    fn test(self) -> Option<Self> {
        match self {
            Self::View(view) => Some(Self::Test(view, 0, false)),
            Self::Test(..) | Self::Number(_) => Some(self),
            _ => None,
        }
    }
}
