//! Sends the output of the command of `--run` to the host by vsock, separate from the console.

use std::fs::File;
use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, AddressFamily, Shutdown, SockFlag, SockType, VsockAddr, shutdown};

use crate::protocol::{STDERR_PORT, STDOUT_PORT};
use crate::reaper::start_thread;
use crate::server::{non_blocking, pipe_capacity};

/// The file that says that the host takes the command's output, and whether its two streams
/// stay separate.
pub(crate) const ASKED: &str = "/vmtrace/output";
const APART: &[u8] = b"apart";

/// Passed on at once.
const PIECE: usize = 64 << 10;

/// The host answers at once, but in an emulated host on a busy machine the kernel's 2 s may be over.
const ATTEMPTS: usize = 10;

/// What the console is told before it gets the rest.
const CUT: &[u8] = b"vmtrace: the guest has cut its connections to the host, as it does when it is suspended: the \
    output of the command goes on here, and some of it before this may be missing\n";

/// Ports that are root's alone, as the host wants them.
const OWN_PORTS: RangeInclusive<u32> = 512..=1023;

/// The output that is on its way.
static UNDER_WAY: Mutex<Option<Output>> = Mutex::new(None);

struct Output {
    /// What this process had for standard output and standard error.
    console: OwnedFd,
    /// Closed when the command has ended.
    runs: PipeWriter,
    /// Without a sender once the host has everything.
    done: Receiver<()>,
}

/// Sends from now on to the host what this process and its children write, if the host asks for it.
///
/// # Errors
/// Why there is no way, for the user. All goes to the console then.
pub(crate) fn begin(asked: io::Result<Vec<u8>>) -> Result<(), String> {
    let asked = match asked {
        Ok(asked) => asked,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(format!("{ASKED}: {error}")),
    };
    let begun = connect(STDERR_PORT).and_then(|errors| {
        let out = (asked == APART).then(|| connect(STDOUT_PORT)).transpose()?;
        Output::begin(errors, out).map_err(|error| error.to_string())
    });
    *UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner) = Some(begun?);
    Ok(())
}

/// The command has ended: waits until the host has all that it wrote, for no longer than this if it
/// takes nothing. What programs in the background write later goes nowhere.
pub(crate) fn finish(limit: Option<Duration>) {
    // Whoever comes second waits, too.
    let mut under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(Output { console, runs, done }) = under_way.take() else { return };
    let _ = nix::unistd::dup2_stdout(&console);
    let _ = nix::unistd::dup2_stderr(&console);
    drop(runs);
    let more = || match limit {
        None => done.recv().is_ok(),
        Some(limit) => done.recv_timeout(limit).is_ok(),
    };
    while more() {}
}

impl Output {
    fn begin(errors: File, out: Option<File>) -> io::Result<Self> {
        let console = io::stdout().as_fd().try_clone_to_owned()?;
        let (running, runs) = io::pipe()?;
        let (running, (progress, done)) = (Arc::new(running), sync_channel(1));
        let start = |name, socket| -> io::Result<PipeWriter> {
            let (pipe, end) = io::pipe()?;
            non_blocking(&pipe)?;
            let (running, progress) = (Arc::clone(&running), progress.clone());
            let console = File::from(console.try_clone()?);
            start_thread(name, move || {
                // An error is the connection's, and the host's to tell. The command gets SIGPIPE.
                let _ = relay(pipe, (socket, console), running.as_fd(), &progress);
            })?;
            Ok(end)
        };
        let errors = start("stderr", errors)?;
        let out = out.map(|out| start("stdout", out)).transpose()?;
        nix::unistd::dup2_stdout(out.as_ref().unwrap_or(&errors))?;
        nix::unistd::dup2_stderr(&errors)?;
        Ok(Self { console, runs, done })
    }
}

/// From a pipe to the host, until the pipe's end, or what is in it when `running` is closed; and until
/// the host says by the end of the connection that it has everything. Tells of what has moved. Goes on to the
/// console where the guest itself has cut the connection.
fn relay(
    mut pipe: PipeReader,
    (mut socket, mut console): (impl Read + Write + AsFd, impl Write),
    running: BorrowedFd<'_>,
    progress: &SyncSender<()>,
) -> io::Result<()> {
    let mut bytes = vec![0; PIECE];
    let mut is_cut = false;
    // Once the command has ended: what may still be its own.
    let mut left = None;
    loop {
        if left.is_none() && wait(&pipe, running)? {
            left = Some(pipe_capacity(&pipe));
        }
        let most = left.map_or(PIECE, |left| PIECE.min(left));
        match pipe.read(bytes.get_mut(..most).unwrap_or_default()) {
            Ok(0) => break,
            Ok(count) => {
                let mut piece = bytes.get(..count).unwrap_or_default();
                if !is_cut {
                    is_cut = !send(&mut socket, &mut piece)?;
                    if is_cut {
                        console.write_all(CUT)?;
                    }
                }
                console.write_all(piece)?;
                left = left.map(|left| left - count);
                let _ = progress.try_send(());
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock && left.is_none() => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    drop(pipe);
    if is_cut {
        return Ok(());
    }
    shutdown(socket.as_fd().as_raw_fd(), Shutdown::Write)?;
    while socket.read(&mut bytes)? > 0 {}
    Ok(())
}

/// Sends all of `bytes`, and leaves what was not: whether there still is a connection. One that the host has
/// closed is an error (`EPIPE`).
fn send(socket: &mut impl Write, bytes: &mut &[u8]) -> io::Result<bool> {
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(count) => *bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // As the driver leaves it when the machine is suspended (net/vmw_vsock/virtio_transport.c).
            Err(error)
                if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::NotConnected) =>
            {
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Waits for something in the pipe, or that `running` is closed: whether it is.
fn wait(pipe: &PipeReader, running: BorrowedFd<'_>) -> io::Result<bool> {
    let mut fds = [pipe.as_fd(), running].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    match poll(&mut fds, PollTimeout::NONE) {
        Err(Errno::EINTR) => Ok(false),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(fds.last().and_then(PollFd::any).unwrap_or(true)),
    }
}

/// A connection to a port of the host.
fn connect(port: u32) -> Result<File, String> {
    let mut attempts = 0;
    loop {
        match connect_once(port) {
            Err(Errno::ETIMEDOUT) if attempts < ATTEMPTS => attempts += 1,
            done => {
                return done.map(File::from).map_err(|error| match error {
                    Errno::EAFNOSUPPORT => "the kernel has no AF_VSOCK".to_owned(),
                    error => format!("vsock port {port} of the host: {error}"),
                });
            }
        }
    }
}

fn connect_once(port: u32) -> nix::Result<OwnedFd> {
    let (kind, flags) = (SockType::Stream, SockFlag::SOCK_CLOEXEC);
    let socket = socket::socket(AddressFamily::Vsock, kind, flags, None)?;
    let bind = |own| socket::bind(socket.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_ANY, own));
    let mut bound = Err(Errno::EADDRINUSE);
    for own in OWN_PORTS.rev() {
        bound = bind(own);
        if bound != Err(Errno::EADDRINUSE) {
            break;
        }
    }
    bound?;
    socket::connect(socket.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_HOST, port))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::thread::{self, JoinHandle};

    struct Relay {
        pipe: PipeWriter,
        host: UnixStream,
        runs: PipeWriter,
        done: Receiver<()>,
        thread: JoinHandle<io::Result<()>>,
    }

    fn relayed() -> Relay {
        let ((from, pipe), (running, runs)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let (host, socket) = UnixStream::pair().unwrap();
        non_blocking(&from).unwrap();
        let (progress, done) = sync_channel(1);
        let socket = File::from(OwnedFd::from(socket));
        let thread =
            thread::spawn(move || relay(from, (socket, io::sink()), running.as_fd(), &progress));
        Relay { pipe, host, runs, done, thread }
    }

    /// Until the connection's end, which is answered by `dropping` the host's side.
    fn read_all(mut host: &UnixStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        host.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn all_bytes_come_and_the_host_has_the_last_word() {
        let Relay { mut pipe, host, runs: _runs, done, thread } = relayed();
        let bytes: Vec<u8> = (0..250_000_u32).flat_map(u32::to_le_bytes).collect();
        let sent = bytes.clone();
        let writer = thread::spawn(move || pipe.write_all(&sent).unwrap());
        assert!(read_all(&host) == bytes);
        writer.join().unwrap();
        // All was read, and yet the host may still have to write it.
        while done.recv_timeout(Duration::from_millis(50)).is_ok() {}
        assert!(!thread.is_finished());
        drop(host);
        thread.join().unwrap().unwrap();
        assert!(done.recv().is_err());
    }

    // A daemon has the command's pipe, and may even go on to write.
    #[test]
    fn the_commands_end_is_the_end_whoever_has_its_pipe() {
        for floods in [false, true] {
            let Relay { mut pipe, host, runs, thread, .. } = relayed();
            pipe.write_all(b"its own").unwrap();
            let daemon = thread::spawn(move || {
                while floods && pipe.write_all(&[0; 4096]).is_ok() {}
                thread::sleep(Duration::from_millis(100));
                pipe
            });
            drop(runs);
            assert!(read_all(&host).starts_with(b"its own"));
            drop(host);
            thread.join().unwrap().unwrap();
            let mut pipe = daemon.join().unwrap();
            assert_eq!(pipe.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        }
    }

    // As it is for whoever writes to `head`.
    #[test]
    fn a_host_that_has_seen_enough_ends_the_pipe() {
        let Relay { mut pipe, host, runs: _runs, thread, .. } = relayed();
        drop(host);
        let error = loop {
            if let Err(error) = pipe.write_all(b"more") {
                break error;
            }
            thread::yield_now();
        };
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        assert!(thread.join().unwrap().is_err());
    }

    /// A connection that is cut after so many bytes.
    struct Cut(UnixStream, usize);

    impl Read for Cut {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(ErrorKind::NotConnected.into())
        }
    }

    impl Write for Cut {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = self.1.min(bytes.len());
            self.1 -= count;
            if count == 0 {
                return Err(ErrorKind::ConnectionReset.into());
            }
            self.0.write(bytes.get(..count).unwrap_or_default())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl AsFd for Cut {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    // A guest that was suspended has no connections any more, and the command has done nothing wrong.
    #[test]
    fn what_there_is_no_connection_for_goes_to_the_console() {
        let ((from, mut pipe), (running, _runs)) = (io::pipe().unwrap(), io::pipe().unwrap());
        non_blocking(&from).unwrap();
        let (host, socket) = UnixStream::pair().unwrap();
        let (progress, _done) = sync_channel(1);
        let thread = thread::spawn(move || {
            let mut console = Vec::new();
            relay(from, (Cut(socket, 7), &mut console), running.as_fd(), &progress).unwrap();
            console
        });
        pipe.write_all(b"before and after").unwrap();
        thread::sleep(Duration::from_millis(20));
        pipe.write_all(b", and more").unwrap();
        drop(pipe);
        let console = thread.join().unwrap();
        assert_eq!(read_all(&host), b"before ");
        assert_eq!(console, [CUT, b"and after, and more"].concat());
    }
}
