//! Parses text into expressions.

use super::{Comparison, Condition, Expression};
use vmtrace_trampolines::condition::Relation;

/// Deepest nesting of parentheses and `!`.
const DEPTH: usize = 32;
/// Longest text, bytes: what a person writes, and what a control socket takes.
const LONGEST: usize = 4096;

/// Why a text is no condition.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConditionError {
    /// Something else was expected.
    #[error("condition: {expected} was expected {place}")]
    Expected {
        /// What.
        expected: &'static str,
        /// Where.
        place: String,
    },
    /// A quote without its end.
    #[error("condition: the quote {0} is not closed")]
    Quote(String),
    /// It has too many parts.
    #[error("condition: {0}")]
    TooLong(&'static str),
}

/// Where something stands, in words.
pub(super) fn place(text: &str, at: usize) -> String {
    let rest = text.get(at..).unwrap_or_default();
    let shown: String = rest.chars().take(24).collect();
    match (shown.is_empty(), shown.len() < rest.len()) {
        (true, _) => "at the end".to_owned(),
        (false, more) => {
            let column = text.get(..at).unwrap_or_default().chars().count() + 1;
            format!("at character {column}: {shown:?}{}", if more { "..." } else { "" })
        }
    }
}

pub(super) fn parse(text: &str) -> Result<Expression, ConditionError> {
    if text.len() > LONGEST {
        return Err(ConditionError::TooLong("it is longer than 4096 bytes"));
    }
    let mut parser = Parser { text, at: 0, comparisons: 0 };
    let expression = parser.any(0)?;
    parser.space();
    if parser.at < text.len() {
        return Err(parser.expected("&&, || or the end"));
    }
    Ok(expression)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    comparisons: usize,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    fn expected(&self, expected: &'static str) -> ConditionError {
        ConditionError::Expected { expected, place: place(self.text, self.at) }
    }

    /// Takes this, behind spaces, if it stands here.
    fn take(&mut self, token: &str) -> bool {
        self.space();
        let here = self.rest().starts_with(token);
        self.at += if here { token.len() } else { 0 };
        here
    }

    fn any(&mut self, depth: usize) -> Result<Expression, ConditionError> {
        self.list(depth, "||", Self::all, Expression::Any)
    }

    fn all(&mut self, depth: usize) -> Result<Expression, ConditionError> {
        self.list(depth, "&&", Self::one, Expression::All)
    }

    fn list(
        &mut self,
        depth: usize,
        between: &str,
        part: fn(&mut Self, usize) -> Result<Expression, ConditionError>,
        whole: fn(Vec<Expression>) -> Expression,
    ) -> Result<Expression, ConditionError> {
        let first = part(self, depth)?;
        let mut all = vec![first];
        while self.take(between) {
            all.push(part(self, depth)?);
        }
        match all.len() {
            1 => Ok(all.remove(0)),
            _ => Ok(whole(all)),
        }
    }

    fn one(&mut self, depth: usize) -> Result<Expression, ConditionError> {
        if depth > DEPTH {
            return Err(ConditionError::TooLong("it is nested more than 32 deep"));
        }
        if self.take("!") {
            return Ok(Expression::Not(Box::new(self.one(depth + 1)?)));
        }
        if self.take("(") {
            let inner = self.any(depth + 1)?;
            return match self.take(")") {
                true => Ok(inner),
                false => Err(self.expected("&&, || or )")),
            };
        }
        self.comparison().map(Expression::Compare)
    }

    fn comparison(&mut self) -> Result<Comparison, ConditionError> {
        self.comparisons += 1;
        if self.comparisons > Condition::MAX {
            return Err(ConditionError::TooLong("it has more than 64 comparisons"));
        }
        self.space();
        let at = self.at;
        let operand = self.operand();
        if operand.is_empty() {
            return Err(self.expected(
                "an operand (pid, tgid, comm, cpu, caller, retval, duration, a parameter)",
            ));
        }
        let Some(relation) = self.relation() else {
            // Not a single =, nor a word.
            self.space();
            let ends = self.rest().is_empty()
                || [")", "&&", "||"].iter().any(|end| self.rest().starts_with(end));
            return match ends {
                true => Ok(Comparison {
                    operand,
                    relation: Relation::NotEqual,
                    value: "0".to_owned(),
                    at,
                }),
                false => Err(self.expected("==, !=, <, <=, >, >= or &")),
            };
        };
        Ok(Comparison { operand, relation, value: self.value()?, at })
    }

    /// A name, or a way along pointers: what can be written in `--arg`.
    fn operand(&mut self) -> String {
        let rest = self.rest();
        let mut end = 0;
        loop {
            let tail = rest.get(end..).unwrap_or_default();
            let named = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '$' | '[' | ']');
            match tail.chars().next() {
                Some(c) if named(c) => end += c.len_utf8(),
                Some('-') if tail.starts_with("->") => end += 2,
                _ => break,
            }
        }
        self.at += end;
        rest.get(..end).unwrap_or_default().to_owned()
    }

    fn relation(&mut self) -> Option<Relation> {
        self.space();
        if self.rest().starts_with("&&") {
            return None;
        }
        let all = [
            ("==", Relation::Equal),
            ("!=", Relation::NotEqual),
            ("<=", Relation::LessEqual),
            (">=", Relation::GreaterEqual),
            ("<", Relation::Less),
            (">", Relation::Greater),
            ("&", Relation::Common),
        ];
        all.into_iter().find(|(token, _)| self.take(token)).map(|(_, relation)| relation)
    }

    fn value(&mut self) -> Result<String, ConditionError> {
        self.space();
        let rest = self.rest();
        if let Some(quote @ ('"' | '\'')) = rest.chars().next() {
            let inner = rest.get(1..).unwrap_or_default();
            let Some((value, _)) = inner.split_once(quote) else {
                return Err(ConditionError::Quote(place(self.text, self.at)));
            };
            self.at += value.len() + 2;
            return Ok(value.to_owned());
        }
        let ends = |c: char| {
            c.is_whitespace() || matches!(c, '(' | ')' | '&' | '|' | '<' | '>' | '=' | '"' | '\'')
        };
        let end = rest.find(ends).unwrap_or(rest.len());
        if end == 0 {
            return Err(self.expected("a value"));
        }
        self.at += end;
        Ok(rest.get(..end).unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(expression: &Expression) -> String {
        let list = |all: &[Expression]| all.iter().map(shown).collect::<Vec<_>>().join(" ");
        match expression {
            Expression::All(all) => format!("(all {})", list(all)),
            Expression::Any(all) => format!("(any {})", list(all)),
            Expression::Not(one) => format!("(not {})", shown(one)),
            Expression::Compare(one) => format!("{}{:?}{:?}", one.operand, one.relation, one.value),
        }
    }

    // A condition that is read otherwise than it was meant records other calls.
    #[test]
    fn conditions_are_read_as_c_has_them() {
        for (text, expected) in [
            ("pid==1", "pidEqual\"1\""),
            (" pid == 1 ", "pidEqual\"1\""),
            ("count", "countNotEqual\"0\""),
            ("flags&0x40", "flagsCommon\"0x40\""),
            ("a && b", "(all aNotEqual\"0\" bNotEqual\"0\")"),
            ("a & 1 && b", "(all aCommon\"1\" bNotEqual\"0\")"),
            ("a<1 || b>=-2 && c!=3", "(any aLess\"1\" (all bGreaterEqual\"-2\" cNotEqual\"3\"))"),
            ("!(a <= 1||b)", "(not (any aLessEqual\"1\" bNotEqual\"0\"))"),
            ("!!a", "(not (not aNotEqual\"0\"))"),
            (
                "comm == \"a b\" && (comm!='kworker/*')",
                "(all commEqual\"a b\" commNotEqual\"kworker/*\")",
            ),
            ("comm == ssh* || f->f_flags & 1", "(any commEqual\"ssh*\" f->f_flagsCommon\"1\")"),
            ("args.pid > $1", "args.pidGreater\"$1\""),
        ] {
            let condition: Condition = text.parse().unwrap();
            assert_eq!(shown(condition.expression()), expected, "{text:?}");
            assert_eq!(condition.text(), text.trim());
        }
    }

    #[test]
    fn what_is_no_condition_is_refused_with_its_place() {
        for (text, message) in [
            ("", "retval, duration, a parameter) was expected at the end"),
            ("pid = 1", "==, !=, <, <=, >, >= or & was expected at character 5: \"= 1\""),
            ("pid == ", "a value was expected at the end"),
            ("pid == 1 &&", "duration, a parameter) was expected at the end"),
            ("(pid == 1", "&&, || or ) was expected at the end"),
            ("pid == 1)", "&&, || or the end was expected at character 9: \")\""),
            ("\u{e9}\u{e9} == == 1", "a value was expected at character 7: \"== 1\""),
            ("comm == \"a", "the quote at character 9: \"\\\"a\" is not closed"),
            ("a b", "==, !=, <, <=, >, >= or & was expected at character 3: \"b\""),
        ] {
            let error = text.parse::<Condition>().unwrap_err().to_string();
            assert!(error.ends_with(message), "{text:?}: {error}");
        }
        let deep = format!("{}a{}", "(".repeat(40), ")".repeat(40));
        let long = vec!["a"; 65].join("&&");
        let longer = "a".repeat(5000);
        for text in [&deep, &"!".repeat(1000), &long, &longer] {
            assert!(matches!(text.parse::<Condition>(), Err(ConditionError::TooLong(_))));
        }
    }

    // Conditions of several options hold at once, whatever each of them is.
    #[test]
    fn all_of_several_keep_their_own_order() {
        let parsed = |text: &str| text.parse::<Condition>().unwrap();
        let all = Condition::all(&[&parsed("a || b"), &parsed("c")]).unwrap().unwrap();
        assert_eq!(all.text(), "(a || b) && (c)");
        assert_eq!(
            shown(all.expression()),
            "(all (any aNotEqual\"0\" bNotEqual\"0\") cNotEqual\"0\")"
        );
        assert_eq!(Condition::all(&[]), Ok(None));
        assert_eq!(Condition::all(&[&parsed("a")]).unwrap().unwrap().text(), "a");
    }
}
