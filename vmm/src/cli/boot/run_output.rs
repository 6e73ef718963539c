//! The output of the command of `--run`, separate from the guest's console: it goes to standard output and standard
//! error of this process.

use super::Args;
use crate::agent::protocol::{STDERR_PORT, STDOUT_PORT};
use crate::devices::virtio::vsock::{Host, Incoming};
use crate::sandbox::{self, Thread};
use crate::serve::{FIRST_UNPRIVILEGED_PORT, Patience};
use anyhow::{Context, Result, bail};
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::time::Duration;

/// Read at once.
const PIECE: usize = 64 << 10;
/// How often an end is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// How long an output may take nothing once the run has ended.
pub(super) fn patience(ended_by_itself: bool) -> Patience {
    if ended_by_itself { Patience::of(Patience::BY_ITSELF) } else { Patience::new() }
}

impl Args {
    /// Whether what the command writes to standard output goes to that of this process, since nothing
    /// else does; otherwise it goes to standard error.
    pub(super) fn has_stdout_for_run(&self) -> bool {
        let reports = self.boot_report || self.latency.is_some();
        let same = |a: Metadata, b: Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        let is_stdout = |path: &Path| {
            let here = io::stdout()
                .as_fd()
                .try_clone_to_owned()
                .and_then(|out| File::from(out).metadata());
            std::fs::metadata(path).and_then(|path| Ok(same(path, here?))).unwrap_or(false)
        };
        let nowhere = |path: &Path| path == Path::new("/dev/null");
        let output = self.output.as_deref();
        !reports && output.is_some_and(|path| nowhere(path) || !is_stdout(path))
    }
}

/// Threads that write what comes; each stream has one, so that none holds up the other.
pub(super) struct RunOutput(Vec<Way>);

struct Way {
    name: &'static str,
    /// Bytes that were written.
    taken: Arc<AtomicU64>,
    done: Receiver<io::Result<()>>,
}

impl RunOutput {
    /// Waits for the agent's connections, if a command is run.
    ///
    /// # Errors
    /// When the system has no thread or descriptor left.
    pub(super) fn listen(args: &Args, sockets: &Host) -> Result<Self> {
        let mut ways = Vec::new();
        if args.expects_run() {
            let errors = io::stderr().as_fd().try_clone_to_owned()?;
            ways.push(Way::listen("standard error", STDERR_PORT, errors, sockets)?);
            if args.has_stdout_for_run() {
                let out = io::stdout().as_fd().try_clone_to_owned()?;
                ways.push(Way::listen("standard output", STDOUT_PORT, out, sockets)?);
            }
        }
        Ok(Self(ways))
    }

    /// The machine is gone: waits until all that came from it is written. Outputs that take nothing
    /// are left, soon if somebody wants to `hurry`, which is asked all the time.
    ///
    /// # Errors
    /// When not all could be written, other than to somebody who has seen enough.
    pub(super) fn finish(self, ended_by_itself: bool, hurry: impl Fn() -> bool) -> Result<()> {
        let (mut waits, mut patience) = (ended_by_itself, patience(ended_by_itself));
        for Way { name, taken, done } in self.0 {
            let before = taken.load(Ordering::Relaxed);
            loop {
                match done.recv_timeout(LOOK) {
                    Ok(Err(error)) if error.kind() != ErrorKind::BrokenPipe => {
                        return Err(error)
                            .context(format!("cannot write what --run has written to {name}"));
                    }
                    Ok(_) => break,
                    Err(RecvTimeoutError::Disconnected) => {
                        bail!("the thread for {name} has failed")
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if hurry() && waits {
                    (waits, patience) = (false, Patience::new());
                }
                if patience.left(taken.load(Ordering::Relaxed) - before).is_none() {
                    bail!("{name} was blocked: part of the output of --run is lost");
                }
            }
        }
        Ok(())
    }
}

impl Way {
    fn listen(name: &'static str, port: u32, sink: OwnedFd, sockets: &Host) -> Result<Self> {
        let (sender, incoming) = sync_channel(1);
        sockets.listen(port, move |Incoming { stream, guest_port, .. }| {
            // As the agent's port on this side is: what any process may connect to is not the command.
            if guest_port < FIRST_UNPRIVILEGED_PORT {
                // One that there is no place for is closed.
                let _ = sender.try_send(stream);
            }
        })?;
        let taken = Arc::<AtomicU64>::default();
        let (tell, done) = channel();
        let counted = Arc::clone(&taken);
        std::thread::Builder::new().name(Thread::Output.name().into()).spawn(move || {
            sandbox::enter(Thread::Output);
            let _ = tell.send(write_all(&incoming, &mut File::from(sink), &counted));
        })?;
        Ok(Self { name, taken, done })
    }
}

/// Writes what the first connection brings that brings anything. Its end tells the agent that all is
/// written.
fn write_all(
    incoming: &Receiver<UnixStream>,
    sink: &mut impl Write,
    taken: &AtomicU64,
) -> io::Result<()> {
    let mut bytes = vec![0; PIECE];
    while taken.load(Ordering::Relaxed) == 0
        && let Ok(stream) = incoming.recv()
    {
        // Read as a file is, which every thread may.
        let mut stream = File::from(OwnedFd::from(stream));
        loop {
            let piece = match stream.read(&mut bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // The machine has ended.
                Ok(0) | Err(_) => break,
                Ok(count) => bytes.get(..count).unwrap_or_default(),
            };
            sink.write_all(piece)?;
            taken.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::args;
    use std::sync::mpsc::SyncSender;
    use std::thread::{self, JoinHandle};

    /// The agent's side, and what is written here.
    struct Written {
        sender: SyncSender<UnixStream>,
        taken: Arc<AtomicU64>,
        thread: JoinHandle<(io::Result<()>, Vec<u8>)>,
    }

    fn written() -> Written {
        let (sender, incoming) = sync_channel(1);
        let taken = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&taken);
        let thread = thread::spawn(move || {
            let mut sink = Vec::new();
            (write_all(&incoming, &mut sink, &counted), sink)
        });
        Written { sender, taken, thread }
    }

    // A connection that the guest has given up came to nothing; its next one is the agent's.
    #[test]
    fn the_first_connection_that_brings_anything_is_written_and_closed_at_last() {
        let Written { sender, taken, thread } = written();
        for bytes in [&b""[..], b"\xff\0both"] {
            let (mut agent, host) = UnixStream::pair().unwrap();
            sender.send(host).unwrap();
            agent.write_all(bytes).unwrap();
            agent.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(agent.read(&mut [0]).unwrap(), 0, "the receipt");
            assert_eq!(taken.load(Ordering::Relaxed), bytes.len() as u64);
        }
        let (result, sink) = thread.join().unwrap();
        assert!(result.is_ok() && sink == b"\xff\0both");
        assert!(sender.send(UnixStream::pair().unwrap().0).is_err(), "nobody takes others");
    }

    #[test]
    fn the_machines_end_is_the_end() {
        let Written { sender, thread, .. } = written();
        drop(sender);
        assert!(thread.join().unwrap().0.is_ok());
    }

    /// An output whose thread will not end before the sender is used.
    fn stuck() -> (std::sync::mpsc::Sender<io::Result<()>>, RunOutput) {
        let (tell, done) = channel();
        (tell, RunOutput(vec![Way { name: "standard output", taken: Arc::default(), done }]))
    }

    #[test]
    fn what_could_not_be_written_is_an_error() {
        let finish = |result| {
            let (tell, output) = stuck();
            tell.send(result).unwrap();
            output.finish(true, || false).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(finish(Ok(())), Ok(()));
        assert_eq!(finish(Err(ErrorKind::BrokenPipe.into())), Ok(()));
        let full = finish(Err(ErrorKind::StorageFull.into())).unwrap_err();
        assert!(full.starts_with("cannot write what --run has written to standard output: "));
    }

    #[test]
    fn an_output_that_takes_nothing_is_left() {
        let (_tell, output) = stuck();
        let begun = std::time::Instant::now();
        let error = output.finish(true, || true).unwrap_err().to_string();
        assert!(error.contains("standard output was blocked: part of the output"), "{error}");
        assert!(begun.elapsed() < Patience::BY_ITSELF / 2);
    }

    // Among the text of a trace it would be lost.
    #[test]
    fn standard_output_is_the_commands_where_nothing_else_goes_there() {
        let has = |options| args(options).unwrap().has_stdout_for_run();
        assert!(has("-o trace") && has("-o trace.csv") && has("-o /dev/null"));
        for other in ["", "--socket s", "-o t --boot-report", "-o t --latency wakeup"] {
            assert!(!has(other), "{other}");
        }
        assert!(!has("-o /dev/stdout"));
    }
}
