//! Output to a terminal: through a pager and in colours, as git does it.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};

use super::inspect::ignore_closed_pipe;

/// Options about it.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Looks {
    /// Colours: auto means at a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = When::Auto)]
    color: When,
    #[command(flatten)]
    paging: Paging,
}

/// The option of what is only plain text.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Paging {
    /// Print at a terminal without a pager
    #[arg(long)]
    no_pager: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum When {
    Auto,
    Always,
    Never,
}

/// What of the surroundings counts.
struct Surroundings {
    terminal: bool,
    variable: fn(&str) -> Option<OsString>,
    has_less: fn() -> bool,
}

impl Looks {
    /// Whether lines get colours.
    #[must_use]
    pub(super) fn colours(self) -> bool {
        self.colours_in(&Surroundings::real())
    }

    fn colours_in(self, around: &Surroundings) -> bool {
        let set = |name: &str| (around.variable)(name).filter(|value| !value.is_empty());
        match self.color {
            When::Always => true,
            When::Never => false,
            When::Auto => {
                let dumb = set("TERM").is_none_or(|term| term == "dumb");
                around.terminal && !dumb && set("NO_COLOR").is_none()
            }
        }
    }

    /// As [`Paging::open`].
    ///
    /// # Errors
    /// As that.
    pub(super) fn open(self) -> Result<Screen> {
        self.paging.open()
    }
}

impl Paging {
    fn pager_in(self, around: &Surroundings) -> Option<OsString> {
        if self.no_pager || !around.terminal {
            return None;
        }
        let named = ["VMTRACE_PAGER", "PAGER"].into_iter().find_map(around.variable);
        let pager = named.or_else(|| (around.has_less)().then(|| "less".into()))?;
        (!pager.is_empty() && pager != "cat").then_some(pager)
    }

    /// Where to print.
    ///
    /// # Errors
    /// When the pager cannot be started.
    pub(super) fn open(self) -> Result<Screen> {
        let Some(pager) = self.pager_in(&Surroundings::real()) else {
            return Ok(Screen::Plain(io::stdout().lock()));
        };
        // A key that interrupts the pager's search must not end what it reads from.
        signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::new(AtomicBool::new(false)))
            .context("signals")?;
        Screen::paged(&pager)
    }

    /// Prints with `print`, and waits until it was seen. Whoever leaves the pager has seen enough.
    ///
    /// # Errors
    /// When the pager cannot be started, or the output fails.
    pub(super) fn show(self, print: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let mut screen = self.open()?;
        let printed = {
            let mut out = BufWriter::with_capacity(1 << 16, &mut screen);
            print(&mut out).and_then(|()| out.flush())
        };
        let seen = screen.finish();
        ignore_closed_pipe(printed)?;
        seen
    }
}

impl Surroundings {
    fn real() -> Self {
        Self {
            terminal: io::stdout().is_terminal(),
            variable: |name| std::env::var_os(name),
            has_less,
        }
    }
}

fn has_less() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join("less").is_file())
}

/// The terminal, a pager, or whatever standard output is.
pub(super) enum Screen {
    /// Standard output.
    Plain(io::StdoutLock<'static>),
    /// A program that shows it.
    Pager {
        /// What it was called.
        name: OsString,
        /// The program, with its input.
        child: Child,
    },
}

impl Screen {
    fn paged(pager: &OsStr) -> Result<Self> {
        let mut command = Command::new("sh");
        command.arg("-c").arg(pager).stdin(Stdio::piped());
        // What git gives them: less ends where all fits, keeps colours, and leaves the text there.
        for (name, value) in [("LESS", "FRX"), ("LV", "-c")] {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        let name = pager.to_owned();
        let child = command.spawn().with_context(|| format!("the pager {}", name.display()))?;
        Ok(Self::Pager { name, child })
    }

    /// All is printed: waits until it was seen.
    ///
    /// # Errors
    /// When there is no such pager.
    pub(super) fn finish(self) -> Result<()> {
        let Self::Pager { name, mut child } = self else { return Ok(()) };
        drop(child.stdin.take());
        let status = child.wait().context("the pager")?;
        // As the shell says it.
        if matches!(status.code(), Some(126 | 127)) {
            bail!("the pager '{}' cannot be run: set PAGER, or use --no-pager", name.display());
        }
        Ok(())
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(out) => out.write(bytes),
            Self::Pager { child: Child { stdin: Some(input), .. }, .. } => input.write(bytes),
            Self::Pager { .. } => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(out) => out.flush(),
            Self::Pager { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Surroundings =
        Surroundings { terminal: true, variable: |_| None, has_less: || true };

    fn looks(color: When) -> Looks {
        Looks { color, paging: Paging { no_pager: false } }
    }

    // Bytes of a terminal in a file are what nobody can search.
    #[test]
    fn colours_are_for_terminals() {
        let term =
            Surroundings { variable: |name| (name == "TERM").then(|| "xterm".into()), ..NOTHING };
        let file = Surroundings { terminal: false, ..term };
        let term = Surroundings { terminal: true, ..term };
        let refused = Surroundings {
            variable: |name| ["TERM", "NO_COLOR"].contains(&name).then(|| "1".into()),
            ..NOTHING
        };
        let dumb =
            Surroundings { variable: |name| (name == "TERM").then(|| "dumb".into()), ..NOTHING };
        let auto =
            [&term, &file, &refused, &dumb].map(|around| looks(When::Auto).colours_in(around));
        assert_eq!(auto, [true, false, false, false]);
        assert!(looks(When::Always).colours_in(&file) && !looks(When::Never).colours_in(&term));
    }

    #[test]
    fn pagers_are_those_of_the_user() {
        let pager = |around: &Surroundings| Paging { no_pager: false }.pager_in(around);
        assert_eq!(pager(&NOTHING), Some("less".into()));
        assert_eq!(pager(&Surroundings { has_less: || false, ..NOTHING }), None);
        assert_eq!(pager(&Surroundings { terminal: false, ..NOTHING }), None);
        let own = Surroundings { variable: |name| Some(format!("my {name}").into()), ..NOTHING };
        assert_eq!(pager(&own), Some("my VMTRACE_PAGER".into()));
        assert_eq!(Paging { no_pager: true }.pager_in(&own), None);
        for none in [|_: &str| Some("".into()), |_: &str| Some("cat".into())] {
            assert_eq!(pager(&Surroundings { variable: none, ..NOTHING }), None);
        }
    }

    // A pager that is not there looks like one that the user has left.
    #[test]
    fn a_pager_gets_all_or_there_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("shown");
        let mut screen = Screen::paged(format!("cat >{}", file.display()).as_ref()).unwrap();
        let text = vec![b'x'; 1 << 20];
        screen.write_all(&text).unwrap();
        screen.finish().unwrap();
        assert!(std::fs::read(&file).unwrap() == text);
        let screen = Screen::paged("no-such-pager-of-vmtrace 2>/dev/null".as_ref()).unwrap();
        let error = screen.finish().unwrap_err().to_string();
        assert!(error.contains("no-such-pager") && error.contains("--no-pager"), "{error}");
        let mut left = Screen::paged("true".as_ref()).unwrap();
        let error = (0..1000).find_map(|_| left.write_all(&text).err());
        assert_eq!(error.map(|error| error.kind()), Some(io::ErrorKind::BrokenPipe));
        left.finish().unwrap();
    }
}
