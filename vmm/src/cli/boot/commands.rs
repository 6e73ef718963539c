//! Runs the commands of triggers (`--exec-at`) on the user's machine.
//!
//! The sandbox of a process that runs a guest forbids it to start others. So a shell is started before the guest, and
//! gets a line for each call; it runs the commands and reports their exit codes. A vmtrace in an emulated host sends
//! these lines to the outer vmtrace, which has the shell.

use crate::serve::CommandSpec;
use crate::session::Called;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use vmtrace_system::say;

/// How long commands may still run after the end of the run, and after another request to stop.
const TIME: Duration = Duration::from_secs(30);
const HURRY: Duration = Duration::from_secs(2);
/// How often it is looked whether somebody is.
const LOOK: Duration = Duration::from_millis(50);
/// Longer names of functions are cut, so that all lines there can be fit in a pipe that nobody reads.
const MAX_NAME: usize = 128;

/// Standard output is the way back, which no command gets: what they write goes to standard error. What a line says is
/// the guest's, or that of whoever controls an emulated host, so that no word of it is ever looked at as a program, and each command runs once, as a trigger does.
const SCRIPT: &str = r#"
seen=
while read -r number cpu function; do
    case $number in '' | 0* | ????* | *[!0-9]*) continue ;; esac
    case $seen in *" $number "*) continue ;; esac
    seen="$seen $number "
    eval "command=\${$number:-}"
    [ -n "$command" ] || continue
    {
        VMTRACE_CPU=$cpu VMTRACE_FUNCTION=$function sh -c "$command" </dev/null >&2
        printf '%s %s\n' "$number" "$?"
    } &
done
wait
"#;

/// The line of a call; the first command is number 1.
pub(super) fn line(called: &Called) -> String {
    let word = |c: char| if c.is_ascii_alphanumeric() || "_.$".contains(c) { c } else { '?' };
    let function: String = called.function.chars().take(MAX_NAME).map(word).collect();
    format!("{} {} {function}\n", called.command + 1, called.vcpu)
}

/// The shell.
pub(super) struct Shell {
    commands: Vec<String>,
    input: ChildStdin,
    results: ChildStdout,
}

impl Shell {
    /// Before the process is confined. `socket` is the run's, for `vmtrace ctl`.
    ///
    /// # Errors
    /// When there is no shell.
    pub(super) fn start(specs: &[CommandSpec], socket: Option<&Path>) -> io::Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, "vmtrace"]).args(specs.iter().map(|spec| &spec.command));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // The user's Ctrl-C ends the run, and not what is done about it.
        command.process_group(0);
        if let Some(socket) = socket.and_then(|socket| std::path::absolute(socket).ok()) {
            command.env("VMTRACE_SOCKET", socket);
        }
        let mut child = command.spawn()?;
        let missing = || io::Error::from(ErrorKind::BrokenPipe);
        let input = child.stdin.take().ok_or_else(missing)?;
        let results = child.stdout.take().ok_or_else(missing)?;
        Ok(Self { commands: specs.iter().map(ToString::to_string).collect(), input, results })
    }

    /// Where the lines of calls go: it never takes long.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(super) fn input(&self) -> io::Result<std::fs::File> {
        Ok(self.input.as_fd().try_clone_to_owned()?.into())
    }

    /// Nobody writes lines any more: waits for the commands, and says which have failed, and which are not waited for.
    pub(super) fn finish(self, hurry: impl Fn() -> bool) {
        let Self { commands, input, results } = self;
        drop(input);
        let said = said(results, hurry);
        report(&commands, said.as_deref()).iter().for_each(|text| say!("vmtrace: {text}"));
    }
}

/// What the shell says until it ends; an error if that takes too long.
fn said(mut results: ChildStdout, hurry: impl Fn() -> bool) -> Result<String, String> {
    let (mut text, begin) = (Vec::new(), Instant::now());
    let lossy = |text: &[u8]| String::from_utf8_lossy(text).into_owned();
    loop {
        if begin.elapsed() > if hurry() { HURRY } else { TIME } {
            return Err(lossy(&text));
        }
        let look = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(results.as_fd(), PollFlags::POLLIN)], look) {
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(_) => return Err(lossy(&text)),
        }
        let mut bytes = [0; 1024];
        match results.read(&mut bytes) {
            Ok(0) => return Ok(lossy(&text)),
            Ok(count) => text.extend_from_slice(bytes.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Err(lossy(&text)),
        }
    }
}

/// What the user should know of that.
fn report(commands: &[String], said: Result<&str, &String>) -> Vec<String> {
    let text = said.unwrap_or_else(|text| text);
    let failed = text.lines().filter_map(|line| {
        let (number, status) = line.split_once(' ')?;
        let index = number.parse::<usize>().ok()?.checked_sub(1)?;
        let command = commands.get(index).filter(|_| status != "0")?;
        Some(format!("note --exec-at {command}: exit status {status}"))
    });
    let left = said
        .is_err()
        .then(|| "note commands of --exec-at still run: they are not waited for".to_owned());
    failed.chain(left).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write as _;

    fn called(command: usize, function: &str) -> Called {
        Called { command, function: function.to_owned(), vcpu: 3 }
    }

    /// What is said of commands for which these lines come, run in a directory of their own, and what they leave in
    /// its file `out`.
    fn run(commands: &[&str], lines: &[String]) -> (Vec<String>, String) {
        let directory = tempfile::tempdir().unwrap();
        let here = directory.path().display();
        let specs: Vec<CommandSpec> = commands
            .iter()
            .map(|command| format!("f -- cd {here}; {command}").parse().unwrap())
            .collect();
        let shell = Shell::start(&specs, Some(Path::new("s"))).unwrap();
        lines.iter().for_each(|line| shell.input().unwrap().write_all(line.as_bytes()).unwrap());
        let Shell { commands, input, results } = shell;
        drop(input);
        let said = said(results, || false);
        let notes = report(&commands, said.as_deref());
        (notes, fs::read_to_string(directory.path().join("out")).unwrap_or_default())
    }

    // What a command gets is all that tells it where it was called.
    #[test]
    fn a_command_knows_its_call() {
        let command = "printf '%s\\n' $VMTRACE_FUNCTION $VMTRACE_CPU ${VMTRACE_SOCKET##*/} >out";
        let (notes, out) = run(&["exit 9", command], &[line(&called(1, "vfs_read"))]);
        assert_eq!((notes, &*out), (Vec::new(), "vfs_read\n3\ns\n"));
    }

    // One that fails is told, those that run at the end are waited for, and standard output is no command's.
    #[test]
    fn ends_are_told() {
        let commands = ["echo 2 7; exit 3", "sleep 0.3; echo late >out", "exit 4", "exit 5"];
        let lines = [0, 1, 0, 3].map(|number| line(&called(number, "a")));
        let (mut notes, out) = run(&commands, &lines);
        assert_eq!(out, "late\n");
        notes.sort_by_key(|note| note.chars().last());
        let [one, other] = &notes[..] else { panic!("{notes:?}") };
        assert!(
            one.starts_with("note --exec-at f -- cd ") && one.ends_with(": exit status 3"),
            "{one}"
        );
        assert!(other.ends_with("; exit 5: exit status 5"), "{other}");
    }

    // A line may be a hostile guest's, through an emulated host: only commands of the user's are ever run.
    #[test]
    fn a_hostile_line_runs_nothing() {
        let own = line(&called(0, "a b;$(touch out)`touch out`\nx"));
        assert_eq!(own, "1 3 a?b?$?touch?out??touch?out??x\n");
        let lines = [
            "1;touch${IFS}out",
            "$(touch out)",
            "9 0 x",
            "99999999999999999999 0 x",
            "256 0 x",
            "0 0 x",
            "",
            "-1 x",
            "1x 0 f",
            "`touch out` 1",
        ];
        let mut lines = lines.map(|line| format!("{line}\n")).to_vec();
        lines.push("1 $(touch\tout) `touch out` $(touch out) \\\n".to_owned());
        lines.push(line(&called(0, "once_more")));
        let (notes, out) = run(&["printf '%s' \"$VMTRACE_CPU|$VMTRACE_FUNCTION\" >>out"], &lines);
        assert_eq!((notes, &*out), (Vec::new(), "$(touch|out) `touch out` $(touch out) \\"));
        assert!(!Path::new("out").exists());
    }

    // CI would hang with a command that hangs.
    #[test]
    fn a_command_that_hangs_is_left() {
        let spec = "f -- sleep 4".parse().unwrap();
        let shell = Shell::start(&[spec], None).unwrap();
        shell.input().unwrap().write_all(line(&called(0, "f")).as_bytes()).unwrap();
        let Shell { commands, input, results } = shell;
        drop(input);
        let begin = Instant::now();
        let said = said(results, || true);
        assert!(begin.elapsed() < Duration::from_secs(10));
        let [note] = &report(&commands, said.as_deref())[..] else { panic!("{said:?}") };
        assert!(note.contains("still run"), "{note}");
    }
}
