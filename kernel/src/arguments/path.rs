//! Parses paths: `[LABEL=]NAME(('->'|'.')MEMBER | '[' N ']')*[:MAX]`.

use std::ops::Range;

use super::{Last, PathError, PathProblem};

/// A path, its parts with their places in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path<'a> {
    pub(super) text: &'a str,
    /// What the value is called: the label, or the path without its length.
    pub(super) shown: &'a str,
    /// A parameter, `$ret` or `retval`.
    pub(super) name: Part<'a>,
    pub(super) steps: Vec<(Step<'a>, Range<usize>)>,
    /// The longest text.
    pub(super) max: Option<(u8, Range<usize>)>,
}

/// A word and its place.
pub(super) type Part<'a> = (&'a str, Range<usize>);

/// From a value to one that it has, or leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step<'a> {
    /// `->MEMBER`
    Arrow(&'a str),
    /// `.MEMBER`
    Dot(&'a str),
    /// `[N]`
    Index(u32),
}

/// Reads from left to right.
struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Path<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Self, PathError> {
        let mut scan = Scanner { text, at: 0 };
        let label = match text.find('=') {
            Some(end) => {
                let label = scan.word(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
                if label.0.is_empty() || !scan.skip("=") || scan.at != end + 1 {
                    return Err(scan.expected("a label of letters, digits, '_', '-' and '.'"));
                }
                Some(label.0)
            }
            None => None,
        };
        scan.blanks();
        let start = scan.at;
        let name = match scan.skip("$ret") {
            true => ("$ret", start..scan.at),
            false => scan.name("a parameter's name or $ret")?,
        };
        let mut steps = Vec::new();
        let mut end = scan.at;
        loop {
            let step = if scan.skip("->") {
                let (member, at) = scan.name("a member's name")?;
                (Step::Arrow(member), at)
            } else if scan.skip(".") {
                let (member, at) = scan.name("a member's name")?;
                (Step::Dot(member), at)
            } else if scan.skip("[") {
                let (number, at) = scan.number(0, i32::MAX.unsigned_abs())?;
                if !scan.skip("]") {
                    return Err(scan.expected("']'"));
                }
                (Step::Index(number), at)
            } else {
                break;
            };
            steps.push(step);
            end = scan.at;
        }
        let mut max = None;
        if scan.skip(":") {
            let (number, at) = scan.number(1, Last::MOST_TEXT.into())?;
            max = u8::try_from(number).ok().map(|number| (number, at));
        }
        scan.blanks();
        if scan.at != text.len() {
            return Err(scan.expected("'->', '.', '[', ':' or the end"));
        }
        let path = text.get(start..end).unwrap_or_default();
        Ok(Self { text, shown: label.unwrap_or(path), name, steps, max })
    }

    pub(super) fn error(&self, at: &Range<usize>, problem: PathProblem) -> PathError {
        PathError { text: self.text.to_owned(), at: at.clone(), problem }
    }
}

impl<'a> Scanner<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn blanks(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn skip(&mut self, token: &str) -> bool {
        self.blanks();
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    /// As many of these characters as there are.
    fn word(&mut self, is_part: impl Fn(char) -> bool) -> Part<'a> {
        self.blanks();
        let rest = self.rest();
        let len = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let start = self.at;
        self.at += len;
        (rest.get(..len).unwrap_or_default(), start..self.at)
    }

    fn name(&mut self, expected: &'static str) -> Result<Part<'a>, PathError> {
        let name = self.word(|c| c.is_ascii_alphanumeric() || c == '_');
        if name.0.is_empty() || name.0.starts_with(|c: char| c.is_ascii_digit()) {
            self.at = name.1.start;
            return Err(self.expected(expected));
        }
        Ok(name)
    }

    fn number(&mut self, least: u32, most: u32) -> Result<(u32, Range<usize>), PathError> {
        let (digits, at) = self.word(|c| c.is_ascii_alphanumeric());
        if digits.is_empty() {
            return Err(self.expected("a number"));
        }
        let number = digits.parse().ok().filter(|number| (least..=most).contains(number));
        let problem = PathProblem::Number { least, most };
        number.map(|number| (number, at.clone())).ok_or_else(|| self.error(at, problem))
    }

    /// What stands here is something else.
    fn expected(&self, expected: &'static str) -> PathError {
        self.error(self.at..self.text.len(), PathProblem::Syntax { expected })
    }

    fn error(&self, at: Range<usize>, problem: PathProblem) -> PathError {
        PathError { text: self.text.to_owned(), at, problem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // A path that is misread shows another value than the one asked for.
    #[test]
    fn paths_have_names_steps_and_lengths() {
        use Step::{Arrow, Dot, Index};
        for (text, shown, name, steps, max) in [
            ("file", "file", "file", vec![], None),
            ("$ret", "$ret", "$ret", vec![], None),
            ("retval->a", "retval->a", "retval", vec![Arrow("a")], None),
            ("a->b.c[3]:16", "a->b.c[3]", "a", vec![Arrow("b"), Dot("c"), Index(3)], Some(16)),
            ("x.y=a[0][1]", "x.y", "a", vec![Index(0), Index(1)], None),
            (" x = a -> b [ 2 ] : 128 ", "x", "a", vec![Arrow("b"), Index(2)], Some(128)),
            (" a . b :1", "a . b", "a", vec![Dot("b")], Some(1)),
        ] {
            let path = Path::parse(text).unwrap();
            let found: Vec<_> = path.steps.iter().map(|(step, _)| *step).collect();
            let found_max = path.max.as_ref().map(|(max, _)| *max);
            assert_eq!((path.shown, path.name.0, found, found_max), (shown, name, steps, max));
            for (step, at) in &path.steps {
                let (Arrow(name) | Dot(name)) = step else { continue };
                assert_eq!(&text[at.clone()], *name, "the place in the text");
            }
        }
    }

    #[test]
    fn errors_point_at_the_place() {
        for (text, at, part) in [
            ("", 0..0, "a parameter's name"),
            ("->a", 0..3, "a parameter's name"),
            ("a->", 3..3, "a member's name"),
            ("a.3", 2..3, "a member's name"),
            ("a[", 2..2, "a number"),
            ("a[x]", 2..3, "a number from 0"),
            ("a[-1]", 2..5, "a number"),
            ("a[1", 3..3, "']'"),
            ("a[99999999999]", 2..13, "a number from 0"),
            ("a:0", 2..3, "a number from 1 to 128"),
            ("a:129", 2..5, "a number from 1 to 128"),
            ("a:", 2..2, "a number"),
            ("a b", 2..3, "the end"),
            ("a*", 1..2, "the end"),
            ("=a", 0..2, "a label"),
            ("a b=c", 2..5, "a label"),
            ("x=", 2..2, "a parameter's name"),
            ("$x", 0..2, "a parameter's name"),
            ("ä", 0..2, "a parameter's name"),
        ] {
            let error = Path::parse(text).unwrap_err();
            assert_eq!(error.at, at, "{text}");
            assert!(error.to_string().contains(part), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,16}", like in "[a$=.>\\[\\]:0-9 -]{0,12}") {
            for text in [text, like] {
                if let Err(error) = Path::parse(&text) {
                    prop_assert!(text.get(error.at.clone()).is_some());
                    error.to_string();
                }
            }
        }
    }
}
