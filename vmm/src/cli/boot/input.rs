//! Forwards standard input to the guest's console.

use super::interactive::{Keys, Typed};
use crate::events::{EventOps, EventSet, Events, MutEventSubscriber, Timer, watch};
use crate::machine::SerialInput;
use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use std::io::{self, Read, Stdin};
use std::time::{Duration, Instant};

/// The time until a full console is tried again.
const AGAIN: Duration = Duration::from_millis(10);
/// The time until a terminal is tried again that is another job's.
const ANOTHERS: Duration = Duration::from_millis(500);

const STDIN: u32 = 0;
const TIMER: u32 = 1;

/// Keeps a run that reads its terminal in the background from being stopped for it (SIGTTIN): reads by this thread, and
/// those that it starts from now on, fail with EIO instead. (Programs that they start are not concerned: the standard
/// library gives them no blocked signal.)
pub(super) fn survive_background() -> io::Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTTIN);
    Ok(signals.thread_block()?)
}

/// Standard input that waits for its terminal while that is another job's; see [`survive_background`].
pub(super) struct Foreground;

impl Read for Foreground {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match nix::unistd::read(io::stdin(), bytes) {
                Err(Errno::EIO) => std::thread::sleep(ANOTHERS),
                read => return Ok(read?),
            }
        }
    }
}

/// From the standard input to the console, as fast as the guest takes it.
pub(super) struct Input {
    stdin: Stdin,
    keys: Box<dyn Keys>,
    /// Told of what is not for the guest.
    other: Box<dyn FnMut(&Typed) + Send>,
    console: SerialInput,
    timer: Timer,
    /// What the console has not taken yet.
    rest: Vec<u8>,
    watched: Watched,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Watched {
    Yes,
    /// While there is a rest.
    No,
    /// The terminal is another job's: this one is in the background.
    Anothers,
    /// Files are always ready, and cannot be waited for.
    Never,
    Ended,
}

impl Input {
    pub(super) fn new(
        console: SerialInput,
        keys: Box<dyn Keys>,
        other: impl FnMut(&Typed) + Send + 'static,
    ) -> io::Result<Self> {
        let (timer, rest, watched) = (Timer::new()?, Vec::new(), Watched::No);
        let other = Box::new(other);
        Ok(Self { stdin: io::stdin(), keys, other, console, timer, rest, watched })
    }

    /// Reads once; that does not wait, since there is something, or the end.
    fn read(&mut self, ops: &mut EventOps<'_>) {
        let mut bytes = [0; 1024];
        // Not by the buffer of `Stdin`: of what is in there nobody tells.
        match nix::unistd::read(&self.stdin, &mut bytes) {
            Ok(count @ 1..) => {
                let typed = self.keys.take(bytes.get(..count).unwrap_or_default());
                (self.other)(&typed);
                self.rest.extend(typed.keys);
            }
            Err(Errno::EINTR) => {}
            Err(Errno::EIO) => {
                self.unwatch(ops);
                self.watched = Watched::Anothers;
            }
            Ok(_) | Err(_) => {
                self.unwatch(ops);
                self.watched = Watched::Ended;
            }
        }
    }

    fn unwatch(&mut self, ops: &mut EventOps<'_>) {
        if self.watched == Watched::Yes {
            let _ = ops.remove(Events::empty(&self.stdin));
            self.watched = Watched::No;
        }
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        if self.watched == Watched::No {
            let added = ops.add(Events::with_data(&self.stdin, STDIN, EventSet::IN));
            self.watched = if added.is_ok() { Watched::Yes } else { Watched::Never };
        }
    }

    /// Gives the console what it takes.
    fn push(&mut self, ops: &mut EventOps<'_>) {
        let taken = self.console.push(&self.rest);
        self.rest.drain(..taken.min(self.rest.len()));
        if self.rest.is_empty() {
            self.watch(ops);
        } else {
            self.unwatch(ops);
        }
        let again = match self.watched {
            _ if !self.rest.is_empty() => Some(AGAIN),
            Watched::Never => Some(Duration::ZERO),
            Watched::Anothers => Some(ANOTHERS),
            _ => None,
        };
        self.timer.set(again.map(|after| Instant::now() + after));
    }
}

impl MutEventSubscriber for Input {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if events.data() == TIMER && self.watched == Watched::Anothers {
            self.watched = Watched::No;
        }
        let ready = events.data() == STDIN || self.watched == Watched::Never;
        if ready && self.rest.is_empty() {
            self.read(ops);
        }
        self.push(ops);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.timer.events(TIMER));
        self.push(ops);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::pty::openpty;
    use std::process::{Command, Stdio};
    use std::thread;

    /// Has this test's program be the one in the background.
    const VARIABLE: &str = "VMTRACE_TEST_BACKGROUND";

    #[test]
    fn a_process_in_the_background() {
        if std::env::var_os(VARIABLE).is_none() {
            return;
        }
        survive_background().unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 8];
            let read = Foreground.read(&mut bytes).map(|count| bytes[..count].to_vec());
            sender.send(read).unwrap();
        });
        // Long enough for more than one look.
        let read = receiver.recv_timeout(3 * ANOTHERS);
        assert!(read.is_err(), "another job's line is not read: {read:?}");
    }

    // `vmtrace boot ... &` stopped before its guest had said a word.
    #[test]
    fn a_run_goes_on_in_the_background_of_a_terminal() {
        let pty = openpty(None, None).unwrap();
        nix::unistd::write(&pty.master, b"a line for the shell\n").unwrap();
        let name = "cli::boot::input::tests::a_process_in_the_background";
        let terminal = || Stdio::from(pty.slave.try_clone().unwrap());
        // A session of its own, whose terminal this is: bash takes it from its standard error. A job that is stopped has
        // a code above 128.
        let mut shell = Command::new("setsid");
        shell.args(["--ctty", "--wait", "bash", "-mc", "\"$@\" <&0 & wait $!; exit $?", "bash"]);
        shell.arg(std::env::current_exe().unwrap()).args(["--exact", name, "--nocapture"]);
        shell.env(VARIABLE, "1").stdin(terminal()).stdout(Stdio::piped()).stderr(terminal());
        let output = shell.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(said.contains("1 passed"), "{said}");
    }
}
