//! `vmtrace completions` and `vmtrace man`: files for an installation, generated from the
//! definition of the command line.

use super::{Cli, documented, exit, inspect::ignore_closed_pipe};
use anyhow::{Context as _, Result};
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use std::io::Write as _;
use std::path::PathBuf;

pub(super) const COMPLETIONS_HELP: &str = "\
For one user: vmtrace completions bash > ~/.local/share/bash-completion/completions/vmtrace, \
vmtrace completions fish > ~/.config/fish/completions/vmtrace.fish, and for zsh a file _vmtrace in a \
directory of $fpath. The Debian package has them.";

/// Arguments of `vmtrace completions`.
#[derive(Debug, clap::Args)]
pub(super) struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script.
pub(super) fn completions(args: &Completions) -> Result<u8> {
    ignore_closed_pipe(std::io::stdout().write_all(&script(args.shell)))?;
    Ok(exit::DONE)
}

fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut visible(&Cli::command()), "vmtrace", &mut script);
    script
}

/// The command without what `--help` does not show, which completions for bash would offer.
fn visible(command: &Command) -> Command {
    let mut copy = Command::new(command.get_name().to_owned())
        .args(command.get_arguments().filter(|argument| !argument.is_hide_set()).cloned())
        .subcommands(
            command.get_subcommands().filter(|command| !command.is_hide_set()).map(visible),
        );
    if let Some(about) = command.get_about() {
        copy = copy.about(about.clone());
    }
    if let Some(version) = command.get_version() {
        copy = copy.version(version.to_owned());
    }
    copy
}

/// Arguments of `vmtrace man`.
#[derive(Debug, clap::Args)]
pub(super) struct Man {
    /// The directory to write to, such as /usr/local/share/man/man1; it must be there
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Writes the pages: `vmtrace.1`, and `vmtrace-COMMAND.1` for each command.
pub(super) fn man(args: &Man) -> Result<u8> {
    clap_mangen::generate_to(documented(), &args.directory)
        .with_context(|| format!("cannot write pages to {}", args.directory.display()))?;
    Ok(exit::DONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Arg;
    use std::collections::BTreeSet;
    use std::fs;
    use std::process::{Command as Process, Output, Stdio};

    /// Every command that is shown, by its words.
    fn commands(command: &Command, name: &str) -> Vec<(String, Command)> {
        let below = command.get_subcommands().filter(|command| !command.is_hide_set());
        let below = below.flat_map(|next| commands(next, &format!("{name} {}", next.get_name())));
        std::iter::once((name.to_owned(), command.clone())).chain(below).collect()
    }

    fn all() -> Vec<(String, Command)> {
        let all = commands(&Cli::command(), "vmtrace");
        assert!(all.len() > 15, "{all:?}");
        all
    }

    fn long_options(command: &Command, hidden: bool) -> BTreeSet<String> {
        let chosen = command.get_arguments().filter(|argument| argument.is_hide_set() == hidden);
        chosen.filter_map(Arg::get_long).map(|long| format!("--{long}")).collect()
    }

    fn pages() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        man(&Man { directory: directory.path().to_owned() }).unwrap();
        directory
    }

    /// Runs a program of this machine; `None` if it is not installed.
    fn program(name: &str, arguments: &[&str]) -> Option<Output> {
        match Process::new(name).args(arguments).stdin(Stdio::null()).output() {
            Ok(output) => Some(output),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => panic!("{name}: {error}"),
        }
    }

    /// The text of a page as a reader sees it, or what is wrong with its markup.
    fn render(page: &str) -> Result<String, String> {
        let mut text = String::new();
        for line in page.lines() {
            if let Some(request) = line.strip_prefix(['.', '\'']) {
                let (name, arguments) = request.split_once(' ').unwrap_or((request, ""));
                // Of groff's man(7), those that a page of options needs.
                match name {
                    "TH" | "SH" | "SS" => text += &format!("{arguments}\n"),
                    "TP" | "IP" | "PP" | "RS" | "RE" | "br" | "ie" | "el" => {}
                    _ => return Err(format!("request {line:?}")),
                }
                continue;
            }
            let mut rest = line.chars();
            while let Some(character) = rest.next() {
                match character {
                    '\\' => match rest.next() {
                        // A font, of which there are three.
                        Some('f') if rest.next().is_some_and(|font| "BIR".contains(font)) => {}
                        Some('-') => text.push('-'),
                        Some('\\') => text.push('\\'),
                        Some('&') => {}
                        Some('*') if rest.by_ref().take(3).collect::<String>() == "(Aq" => {
                            text.push('\'');
                        }
                        other => return Err(format!("escape {other:?} in {line:?}")),
                    },
                    character if character.is_control() => {
                        return Err(format!("control: {line:?}"));
                    }
                    character => text.push(character),
                }
            }
            text.push('\n');
        }
        Ok(text)
    }

    #[test]
    fn every_command_has_a_page_with_its_options() {
        let directory = pages();
        let all = all();
        for (name, command) in &all {
            let path = directory.path().join(name.replace(' ', "-") + ".1");
            let page = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
            let text = render(&page).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(page.contains(".TH ") && page.contains(".SH NAME"), "{name}");
            let shown: BTreeSet<_> =
                text.split(|c: char| c.is_whitespace() || "[]|,=".contains(c)).collect();
            for option in long_options(command, false) {
                assert!(shown.contains(&*option), "{name}: {option}: {text}");
            }
            for option in long_options(command, true) {
                assert!(!shown.contains(&*option), "{name}: {option}");
            }
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), all.len());
    }

    // What the check above would let through if it let everything through.
    #[test]
    fn a_broken_page_is_seen() {
        for bad in [".XX a", ".nosuch", "\\fXbold\\fR", "a \\zb", "a \x07"] {
            assert!(render(bad).is_err(), "{bad:?}");
        }
        assert_eq!(render("\\fBa\\-b\\fR it\\*(Aqs").unwrap(), "a-b it's\n");
    }

    // groff's own opinion, where it is installed; the checks above do not need it.
    #[test]
    fn groff_has_nothing_to_say() {
        let directory = pages();
        for entry in fs::read_dir(directory.path()).unwrap() {
            let path = entry.unwrap().path();
            let path = path.to_str().unwrap();
            let Some(output) = program("groff", &["-man", "-ww", "-z", path]) else { return };
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && said.is_empty(), "{path}: {said}");
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = man(&Man { directory: "/nonexistent/man1".into() }).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("/nonexistent/man1: No such file"), "{error}");
    }

    #[test]
    fn completions_have_what_is_shown_and_nothing_else() {
        let hidden: BTreeSet<_> = all().iter().flat_map(|(_, c)| long_options(c, true)).collect();
        assert!(hidden.contains("--expect-run"), "{hidden:?}");
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(script(shell)).unwrap();
            let has = |word: &str| {
                // fish has options without their dashes: -l NAME
                let fish = word.strip_prefix("--").map(|name| format!("-l {name}"));
                let word = fish.filter(|_| shell == Shell::Fish).unwrap_or(word.to_owned());
                script.match_indices(&word).any(|(at, _)| {
                    let next = script[at + word.len()..].chars().next();
                    next.is_none_or(|next| !next.is_alphanumeric() && next != '-')
                })
            };
            for (name, command) in all() {
                let word = name.split(' ').next_back().unwrap_or_default();
                assert!(has(word), "{shell}: {name}");
                for option in long_options(&command, false) {
                    assert!(has(&option), "{shell}: {name} {option}");
                }
            }
            assert!(!script.contains("sandbox\""), "{shell}");
            for option in &hidden {
                assert!(!has(option), "{shell}: {option}");
            }
        }
    }

    // bash is on every machine that has run scripts/setup.
    #[test]
    fn bash_completes() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("vmtrace");
        fs::write(&file, script(Shell::Bash)).unwrap();
        let complete = |line: &str| -> Vec<String> {
            // As readline does it: the words, the cursor in the last one; command, word, word before.
            let code = r#"source "$1"; shift
                complete -p vmtrace >/dev/null || exit 9
                COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
                _vmtrace vmtrace "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
                ((${#COMPREPLY[@]} == 0)) || printf '%s\n' "${COMPREPLY[@]}""#;
            let file = file.to_str().unwrap();
            let mut arguments = vec!["--norc", "-uc", code, "bash", file];
            arguments.extend(line.split(' '));
            let output = program("bash", &arguments).expect("bash is missing");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && said.is_empty(), "{line}: {said}");
            String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
        };
        assert_eq!(complete("vmtrace bo"), ["boot"]);
        assert_eq!(complete("vmtrace do"), ["doctor"]);
        assert_eq!(complete("vmtrace sandb"), [""; 0]);
        assert_eq!(complete("vmtrace boot --mod"), ["--modules"]);
        assert_eq!(complete("vmtrace boot --overflow "), ["drop", "overwrite", "block"]);
        assert_eq!(complete("vmtrace ctl socket tracer re"), ["remove"]);
        assert_eq!(complete("vmtrace completions f"), ["fish"]);
        let kernel = directory.path().join("vmlinuz");
        fs::write(&kernel, "").unwrap();
        let kernel = kernel.to_str().unwrap();
        assert_eq!(
            complete(&format!("vmtrace boot --initrd {}", &kernel[..kernel.len() - 2])),
            [kernel]
        );
    }

    // Where these shells are installed.
    #[test]
    fn zsh_and_fish_read_their_scripts() {
        let directory = tempfile::tempdir().unwrap();
        for (shell, name) in [(Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
            let file = directory.path().join(name);
            fs::write(&file, script(shell)).unwrap();
            let Some(output) = program(name, &["-n", file.to_str().unwrap()]) else { continue };
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && said.is_empty(), "{name}: {said}");
        }
    }
}
