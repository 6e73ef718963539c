//! Splits a command line as a shell would, as far as that is possible without a shell.

use std::fmt;

/// One command of a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Program and arguments; never empty.
    pub words: Vec<String>,
    /// Runs only if the step before it succeeded (`&&`).
    pub after_success: bool,
}

/// How a command line is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// One program after the other.
    Steps(Vec<Step>),
    /// By a shell, because of this word or sign in it.
    Shell(String),
}

/// What begins a command that only a shell understands: words of its syntax, and its builtins that are no programs.
const SHELL_WORDS: [&str; 44] = [
    "!", ".", ":", "alias", "bg", "break", "case", "cd", "command", "continue", "do", "done",
    "elif", "else", "esac", "eval", "exec", "exit", "export", "fg", "fi", "for", "function",
    "getopts", "if", "jobs", "local", "read", "readonly", "return", "select", "set", "shift",
    "source", "then", "trap", "type", "umask", "unalias", "unset", "until", "wait", "while", "{",
];

/// How to run a line where there is a shell, and these programs. What can be run without one is: then no shell is in
/// the trace.
pub(crate) fn understand(line: &str, is_program: impl Fn(&str) -> bool) -> Result<Line, Error> {
    let steps = match split(line) {
        Ok(steps) => steps,
        Err(Error::NeedsShell(sign)) => return Ok(Line::Shell(sign.to_string())),
        Err(error) => return Err(error),
    };
    let names = steps.iter().filter_map(|step| step.words.first());
    let shell = names.into_iter().find(|name| is_shell_word(name) && !is_program(name)).cloned();
    Ok(shell.map_or(Line::Steps(steps), Line::Shell))
}

fn is_shell_word(word: &str) -> bool {
    SHELL_WORDS.contains(&word) || is_assignment(word)
}

/// `NAME=...`
fn is_assignment(word: &str) -> bool {
    let Some((name, _)) = word.split_once('=') else { return false };
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Why a command line cannot be run without a shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Error {
    /// A quote without its end.
    Unterminated(char),
    /// Something that only a shell can do.
    NeedsShell(char),
    /// `&&` without a command before or after it.
    NoCommand,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unterminated(quote) => write!(f, "the command line lacks a closing {quote}"),
            Self::NeedsShell(c) => {
                write!(
                    f,
                    "'{c}' in the command line needs a shell, and there is no /bin/sh: quote it, or boot a system that has one"
                )
            }
            Self::NoCommand => {
                write!(f, "the command line has '&&' without a command before or after it")
            }
        }
    }
}

/// Words, quotes (`'`, `"`, `\`), `;` or a line end, and `&&`. Anything else that a shell would treat
/// specially is refused rather than passed on as text.
pub(crate) fn split(line: &str) -> Result<Vec<Step>, Error> {
    let mut out = Splitter::default();
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\'' => loop {
                match chars.next().ok_or(Error::Unterminated('\''))? {
                    '\'' => break out.open_word(),
                    c => out.push(c),
                }
            },
            '"' => loop {
                match chars.next().ok_or(Error::Unterminated('"'))? {
                    '"' => break out.open_word(),
                    '\\' => match chars.next().ok_or(Error::Unterminated('"'))? {
                        c @ ('"' | '\\' | '$' | '`') => out.push(c),
                        c => {
                            out.push('\\');
                            out.push(c);
                        }
                    },
                    c @ ('$' | '`') => return Err(Error::NeedsShell(c)),
                    c => out.push(c),
                }
            },
            '\\' => out.push(chars.next().ok_or(Error::Unterminated('\\'))?),
            // As in a shell, a line may end behind `&&`.
            '\n' if out.and && out.is_between() => {}
            ';' | '\n' => out.end_step(false)?,
            '&' if chars.peek() == Some(&'&') => {
                chars.next();
                out.end_step(true)?;
            }
            '|' | '<' | '>' | '&' | '(' | ')' | '$' | '`' | '*' | '?' | '[' => {
                return Err(Error::NeedsShell(c));
            }
            c if c.is_whitespace() => out.end_word(),
            c => out.push(c),
        }
    }
    out.end_step(false)?;
    if out.and { Err(Error::NoCommand) } else { Ok(out.steps) }
}

#[derive(Default)]
struct Splitter {
    steps: Vec<Step>,
    words: Vec<String>,
    word: Option<String>,
    and: bool,
}

impl Splitter {
    fn open_word(&mut self) {
        self.word.get_or_insert_default();
    }

    fn push(&mut self, c: char) {
        self.word.get_or_insert_default().push(c);
    }

    fn end_word(&mut self) {
        self.words.extend(self.word.take());
    }

    /// Whether the next command has not begun.
    fn is_between(&self) -> bool {
        self.words.is_empty() && self.word.is_none()
    }

    fn end_step(&mut self, and: bool) -> Result<(), Error> {
        self.end_word();
        if self.words.is_empty() {
            return if and || self.and { Err(Error::NoCommand) } else { Ok(()) };
        }
        let words = std::mem::take(&mut self.words);
        self.steps.push(Step { words, after_success: self.and });
        self.and = and;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<(bool, Vec<String>)> {
        split(line).unwrap().into_iter().map(|s| (s.after_success, s.words)).collect()
    }

    fn step(after: bool, words: &[&str]) -> (bool, Vec<String>) {
        (after, words.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn words_and_quotes() {
        assert_eq!(words("ls  /"), [step(false, &["ls", "/"])]);
        assert_eq!(
            words(r#"echo 'a b' "c \"d\" $x"#.replace("$x", "e\"").as_str()),
            [step(false, &["echo", "a b", "c \"d\" e"])]
        );
        assert_eq!(words(r"echo a\ b '' x''y"), [step(false, &["echo", "a b", "", "xy"])]);
        assert_eq!(words(r#"echo "a\n" '*?$|'"#), [step(false, &["echo", r"a\n", "*?$|"])]);
        assert_eq!(words("  "), []);
    }

    #[test]
    fn sequences() {
        assert_eq!(
            words("a;b\nc && d;"),
            [step(false, &["a"]), step(false, &["b"]), step(false, &["c"]), step(true, &["d"]),]
        );
        assert_eq!(words("a ; ; b"), [step(false, &["a"]), step(false, &["b"])]);
    }

    // What ran without a shell before there was one still does.
    #[test]
    fn a_shell_is_for_what_needs_one() {
        let needs = |line: &str| match understand(line, |name| name == "read").unwrap() {
            Line::Shell(what) => Some(what),
            Line::Steps(_) => None,
        };
        for line in ["ls /", "a; b && c", "echo '|' \"a>b\" x=1 ~ # {a,b}", "test -e /x", "./x=1"] {
            assert_eq!(needs(line), None, "{line}");
        }
        for (line, what) in [
            ("ls / | wc -l", "|"),
            ("echo a >/tmp/b", ">"),
            ("echo $HOME", "$"),
            ("a || b", "|"),
            ("ls /*", "*"),
            ("[ -e /x ]", "["),
            ("true; if true; then true; fi", "if"),
            ("cd /tmp && ls", "cd"),
            ("A=1 env", "A=1"),
            ("{ ls; }", "{"),
        ] {
            assert_eq!(needs(line).as_deref(), Some(what), "{line}");
        }
        // A program of that name is what was always meant.
        assert_eq!(needs("read x"), None);
        assert_eq!(understand("echo 'a", |_| false), Err(Error::Unterminated('\'')));
        assert_eq!(understand("a &&", |_| false), Err(Error::NoCommand));
    }

    #[test]
    fn a_line_may_end_behind_and() {
        assert_eq!(words("a &&\n  b"), [step(false, &["a"]), step(true, &["b"])]);
        assert_eq!(split("a &&\n"), Err(Error::NoCommand));
    }

    #[test]
    fn refusals() {
        assert_eq!(split("a | b"), Err(Error::NeedsShell('|')));
        assert_eq!(split("a & b"), Err(Error::NeedsShell('&')));
        assert_eq!(split("echo $HOME"), Err(Error::NeedsShell('$')));
        assert_eq!(split("echo \"$HOME\""), Err(Error::NeedsShell('$')));
        assert_eq!(split("a &&"), Err(Error::NoCommand));
        assert_eq!(split("&& a"), Err(Error::NoCommand));
        assert_eq!(split("a && ; b"), Err(Error::NoCommand));
        assert_eq!(split("echo 'a"), Err(Error::Unterminated('\'')));
        assert_eq!(split("echo \\"), Err(Error::Unterminated('\\')));
    }
}
