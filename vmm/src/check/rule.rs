//! Parses rules.

use std::fmt;

use super::Verdict;
use crate::kernel::glob;

/// Nanoseconds in units of time.
const UNITS: [(&str, u64); 4] = [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];

/// The name for when init is started.
const BOOT: &str = "boot";

/// What a trace must be like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// As it was written, with its verb before it.
    pub text: String,
    /// Where it was written, if in a file: its name, and the line from 1.
    pub place: Option<(String, usize)>,
    pub(super) kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// So often must these be called.
    Expect { functions: Functions, comparison: Comparison, count: u64 },
    /// These must not be called.
    Forbid { functions: Functions },
    /// The first calls of each must come in this order.
    Order { steps: Vec<Functions> },
    /// No call may take longer, in nanoseconds.
    Max { functions: Functions, limit: u64 },
    /// Each call must be followed by one of the others within so many nanoseconds.
    Within { from: Functions, to: Functions, limit: u64 },
    /// The start of init (`None`), or the first call of these, must come so many nanoseconds after
    /// the start of the machine.
    Budget { until: Option<Functions>, limit: u64 },
}

impl Rule {
    /// Whether it is about durations, for which the ends of calls must be seen.
    #[must_use]
    pub fn needs_ends(&self) -> bool {
        matches!(self.kind, Kind::Max { .. })
    }
}

impl Kind {
    /// How long a call took, if that is known well enough: one that is too long only by a time in which the
    /// guest stood still for vmtrace may not be.
    pub(super) fn took(&self, took: Option<u64>, stopped: impl FnOnce(u64) -> u64) -> Option<u64> {
        match self {
            Self::Max { limit, .. } => {
                took.filter(|&took| took <= *limit || took.saturating_sub(stopped(took)) > *limit)
            }
            _ => took,
        }
    }

    /// Whether a verdict stays, whatever other calls there were.
    pub(super) fn is_certain(&self, verdict: Verdict) -> bool {
        let pairs = (self, verdict);
        matches!(
            pairs,
            (Self::Max { .. }, Verdict::Failed) | (Self::Budget { .. }, Verdict::Passed)
        )
    }

    /// All that it is about.
    pub(super) fn functions(&self) -> Vec<&Functions> {
        match self {
            Self::Expect { functions, .. }
            | Self::Forbid { functions }
            | Self::Max { functions, .. } => vec![functions],
            Self::Order { steps } => steps.iter().collect(),
            Self::Within { from, to, .. } => vec![from, to],
            Self::Budget { until, .. } => until.iter().collect(),
        }
    }
}

/// Globs, of which one has to match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Functions(pub(super) Vec<String>);

impl Functions {
    pub(super) fn matches(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| glob::matches(pattern, name))
    }
}

impl fmt::Display for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("|"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Less,
    AtMost,
    Equal,
    AtLeast,
    More,
}

impl Comparison {
    const ALL: [(&'static str, Self); 6] = [
        ("<", Self::Less),
        ("<=", Self::AtMost),
        ("==", Self::Equal),
        ("=", Self::Equal),
        (">=", Self::AtLeast),
        (">", Self::More),
    ];

    pub(super) fn holds(self, found: u64, count: u64) -> bool {
        match self {
            Self::Less => found < count,
            Self::AtMost => found <= count,
            Self::Equal => found == count,
            Self::AtLeast => found >= count,
            Self::More => found > count,
        }
    }
}

/// Why a text is no rule, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError {
    message: String,
    text: String,
    /// Characters before the place.
    column: usize,
}

impl RuleError {
    /// The character at which it is wrong, from 1.
    #[must_use]
    pub fn column(&self) -> usize {
        self.column + 1
    }
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One character is one column, whatever it is.
        let text: String =
            self.text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        write!(f, "{}\n  {text}\n  {:>width$}", self.message, "^", width = self.column + 1)
    }
}

impl std::error::Error for RuleError {}

/// What a rule begins with in a file, and what its option is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// `expect FUNCTION [>= N]`
    Expect,
    /// `forbid FUNCTION`
    Forbid,
    /// `order FUNCTION < FUNCTION...`
    Order,
    /// `max FUNCTION TIME`
    Max,
    /// `within FUNCTION -> FUNCTION TIME`
    Within,
    /// `budget boot|FUNCTION TIME`
    Budget,
}

impl Verb {
    const ALL: [(&'static str, Self); 6] = [
        ("expect", Self::Expect),
        ("forbid", Self::Forbid),
        ("order", Self::Order),
        ("max", Self::Max),
        ("within", Self::Within),
        ("budget", Self::Budget),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, verb)| *verb == self).map_or("", |(name, _)| name)
    }

    /// Reads what follows the verb.
    ///
    /// # Errors
    /// When it is no rule of this kind.
    pub fn rule(self, text: &str) -> Result<Rule, RuleError> {
        let kind = Words::new(text, 0).kind(self)?;
        Ok(Rule { text: format!("{} {}", self.name(), text.trim()), place: None, kind })
    }
}

impl std::str::FromStr for Rule {
    type Err = RuleError;

    /// Reads a rule with its verb.
    fn from_str(text: &str) -> Result<Self, RuleError> {
        let mut words = Words::new(text, 0);
        let verb = words.next();
        let known = verb.as_ref().and_then(|word| {
            Verb::ALL.iter().find(|(name, _)| *name == word.text).map(|(_, verb)| *verb)
        });
        let Some(known) = known else {
            let names = Verb::ALL.map(|(name, _)| name).join(", ");
            return Err(words.wrong(verb, &format!("one of {names}")));
        };
        let kind = words.kind(known)?;
        Ok(Self { text: text.trim().to_owned(), place: None, kind })
    }
}

/// The rules of a file: one a line; empty lines and what follows a `#` are for people.
///
/// # Errors
/// With the number of the line, from 1.
pub fn parse_file(name: &str, content: &str) -> Result<Vec<Rule>, (usize, RuleError)> {
    let mut rules = Vec::new();
    for (number, line) in (1..).zip(content.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim_end();
        if !line.trim().is_empty() {
            let rule: Rule = line.parse().map_err(|error| (number, error))?;
            rules.push(Rule { place: Some((name.to_owned(), number)), ..rule });
        }
    }
    Ok(rules)
}

/// A piece of a rule and the column at which it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Word {
    text: String,
    column: usize,
}

impl Word {
    fn is_operator(&self) -> bool {
        self.text == "->" || self.text.starts_with(['<', '>', '=', '|'])
    }
}

struct Words<'a> {
    whole: &'a str,
    words: std::iter::Peekable<std::vec::IntoIter<Word>>,
    /// Behind the last one.
    end: usize,
}

impl<'a> Words<'a> {
    fn new(whole: &'a str, skipped: usize) -> Self {
        let chars: Vec<char> = whole.chars().collect();
        let is = |at: usize, c: char| chars.get(at) == Some(&c);
        let arrow = |at: usize| is(at, '-') && is(at + 1, '>');
        let mut words = Vec::new();
        let mut at = skipped;
        while let Some(&first) = chars.get(at) {
            let column = at;
            at += 1;
            match first {
                c if c.is_whitespace() => continue,
                '-' if is(at, '>') => at += 1,
                '<' | '>' | '=' if is(at, '=') => at += 1,
                '<' | '>' | '=' | '|' => {}
                _ => {
                    let ends = |at: usize| {
                        let ends = |c: &char| c.is_whitespace() || "<>=|".contains(*c);
                        chars.get(at).is_none_or(ends) || arrow(at)
                    };
                    while !ends(at) {
                        at += 1;
                    }
                }
            }
            let text = chars.get(column..at).unwrap_or_default().iter().collect();
            words.push(Word { text, column });
        }
        Self { whole, end: whole.trim_end().chars().count(), words: words.into_iter().peekable() }
    }

    fn next(&mut self) -> Option<Word> {
        self.words.next()
    }

    /// The error for a word, or none, where something else had to be.
    fn wrong(&self, found: Option<Word>, expected: &str) -> RuleError {
        let (found, column) = match found {
            Some(word) => (format!("not {:?}", word.text), word.column),
            None => ("but nothing follows".to_owned(), self.end),
        };
        let message = format!("expected here: {expected}, {found}");
        RuleError { message, text: self.whole.to_owned(), column }
    }

    fn kind(mut self, verb: Verb) -> Result<Kind, RuleError> {
        let kind = match verb {
            Verb::Expect => {
                let functions = self.functions()?;
                let (comparison, count) = match self.next() {
                    None => (Comparison::AtLeast, 1),
                    Some(word) => {
                        let known = Comparison::ALL.iter().find(|(text, _)| *text == word.text);
                        let Some(&(_, comparison)) = known else {
                            return Err(self.wrong(Some(word), "one of < <= = >= > and a number"));
                        };
                        (comparison, self.number()?)
                    }
                };
                Kind::Expect { functions, comparison, count }
            }
            Verb::Forbid => Kind::Forbid { functions: self.functions()? },
            Verb::Order => {
                let mut steps = vec![self.functions()?];
                self.operator("<")?;
                steps.push(self.functions()?);
                while self.words.peek().is_some() {
                    self.operator("<")?;
                    steps.push(self.functions()?);
                }
                Kind::Order { steps }
            }
            Verb::Max => Kind::Max { functions: self.functions()?, limit: self.time()? },
            Verb::Within => {
                let from = self.functions()?;
                self.operator("->")?;
                Kind::Within { from, to: self.functions()?, limit: self.time()? }
            }
            Verb::Budget => {
                let functions = self.functions()?;
                let until = Some(functions).filter(|functions| functions.0 != [BOOT]);
                Kind::Budget { until, limit: self.time()? }
            }
        };
        match self.next() {
            None => Ok(kind),
            more => Err(self.wrong(more, "the end")),
        }
    }

    fn functions(&mut self) -> Result<Functions, RuleError> {
        let mut globs = Vec::new();
        loop {
            match self.next() {
                Some(word) if !word.is_operator() => globs.push(word.text),
                other => return Err(self.wrong(other, "a function, such as vfs_read or vfs_*")),
            }
            if self.words.next_if(|word| word.text == "|").is_none() {
                return Ok(Functions(globs));
            }
        }
    }

    fn operator(&mut self, operator: &str) -> Result<(), RuleError> {
        match self.next() {
            Some(word) if word.text == operator => Ok(()),
            other => Err(self.wrong(other, operator)),
        }
    }

    fn number(&mut self) -> Result<u64, RuleError> {
        let word = self.next();
        let number = word.as_ref().and_then(|word| word.text.parse().ok());
        number.ok_or_else(|| self.wrong(word, "a number"))
    }

    fn time(&mut self) -> Result<u64, RuleError> {
        let word = self.next();
        let time = word.as_ref().and_then(|word| parse_time(&word.text));
        time.ok_or_else(|| self.wrong(word, "a time, such as 500ns, 10us, 5ms or 2s"))
    }
}

/// A time with its unit, in nanoseconds.
#[must_use]
pub fn parse_time(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).unwrap_or_default();
    let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit)?;
    digits.parse::<u64>().ok()?.checked_mul(*factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn functions(text: &str) -> Functions {
        Functions(text.split('|').map(str::to_owned).collect())
    }

    // Without returns such a rule is undecided when the whole boot is over.
    #[test]
    fn only_durations_need_ends() {
        let needs = |text: &str| text.parse::<Rule>().unwrap().needs_ends();
        assert!(needs("max vfs_read 5ms"));
        for text in ["expect vfs_open", "forbid panic", "order a<b", "within a -> b 1ms"] {
            assert!(!needs(text), "{text}");
        }
    }

    #[test]
    fn rules_are_read_with_and_without_spaces() {
        let rule = |text: &str| text.parse::<Rule>().unwrap().kind;
        let expect = |text, comparison, count| Kind::Expect {
            functions: functions(text),
            comparison,
            count,
        };
        assert_eq!(rule("expect vfs_open"), expect("vfs_open", Comparison::AtLeast, 1));
        assert_eq!(rule("expect a|b>=3"), expect("a|b", Comparison::AtLeast, 3));
        assert_eq!(rule(" expect  a | b == 0 "), expect("a|b", Comparison::Equal, 0));
        assert_eq!(rule("expect v[!a-c]?s_* < 7"), expect("v[!a-c]?s_*", Comparison::Less, 7));
        assert_eq!(
            rule("forbid panic|oops_enter"),
            Kind::Forbid { functions: functions("panic|oops_enter") }
        );
        assert_eq!(
            rule("order a<b|c < d"),
            Kind::Order { steps: vec![functions("a"), functions("b|c"), functions("d")] }
        );
        assert_eq!(rule("max f 5ms"), Kind::Max { functions: functions("f"), limit: 5_000_000 });
        let within = Kind::Within { from: functions("a"), to: functions("b"), limit: 10_000 };
        assert_eq!(rule("within a->b 10us"), within);
        assert_eq!(rule("within a -> b 10us"), within);
        assert_eq!(rule("budget boot 2s"), Kind::Budget { until: None, limit: 2_000_000_000 });
        let until = Some(functions("rest_init"));
        assert_eq!(rule("budget rest_init 7ns"), Kind::Budget { until, limit: 7 });
        assert_eq!(Verb::Max.rule(" f 5ms ").unwrap().text, "max f 5ms");
    }

    // Who does not see where a rule is wrong, tries until the rule means something else.
    #[test]
    fn errors_point_at_the_place() {
        let error = |text: &str| {
            let error = text.parse::<Rule>().unwrap_err();
            (error.column(), error.to_string())
        };
        let (column, text) = error("expect vfs_open >= many");
        assert_eq!(column, 20);
        assert_eq!(
            text,
            "expected here: a number, not \"many\"\n  expect vfs_open >= many\n                     ^"
        );
        let columns = [
            ("", 1),
            ("expects a", 1),
            ("expect", 7),
            ("expect >= 1", 8),
            ("expect a > = 1", 12),
            ("expect a >= -1", 13),
            ("expect a >= 1 2", 15),
            ("expect a|", 10),
            ("expect a b", 10),
            ("order a", 8),
            ("order a <= b", 9),
            ("max f", 6),
            ("max f 5", 7),
            ("max f 1.5ms", 7),
            ("max f 99999999999s", 7),
            ("within a b 5ms", 10),
            ("within a -> 5ms", 16),
            ("budget boot", 12),
            ("forbid \u{e4}\u{f6} x", 11),
        ];
        for (text, expected) in columns {
            assert_eq!(error(text).0, expected, "{text}");
        }
        assert!(!error("expect a \u{1b}[2J").1.contains('\u{1b}'));
    }

    #[test]
    fn files_have_a_rule_a_line() {
        let rules = parse_file("r", "# rules\n\nexpect a # often\n  max b 5ms\n").unwrap();
        let places: Vec<_> = rules.iter().map(|rule| rule.place.clone().unwrap().1).collect();
        assert_eq!(places, [3, 4]);
        assert_eq!(rules[0].text, "expect a");
        let (line, error) = parse_file("r", "expect a\nmax b\n").unwrap_err();
        assert_eq!((line, error.column()), (2, 6));
    }
}
