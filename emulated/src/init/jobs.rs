//! Jobs and their byte streams, inside the emulated host.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};

use super::port::ready;
use super::threads;
use crate::wire::{Accepted, Connect, Exited, HEADER, Kind, Listen, Put, Run, WINDOW, header};
use vmtrace_system::private_socket::PrivateListener;
use vmtrace_system::say;

/// Fewer, larger pieces for the port.
const PIPE_SIZE: libc::c_int = 256 << 10;

/// A process that the outer side started.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: u32,
    /// The stream of its standard input.
    pub(super) stdin: Option<u32>,
    pid: Pid,
    /// Keeps the FIFOs from looking closed before the job opened them.
    _writers: Vec<File>,
}

/// A unix socket, for connections to the outer side.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) id: u32,
    listener: PrivateListener,
}

impl Listener {
    pub(super) fn new(id: u32, listen: &Listen) -> io::Result<Self> {
        let path = Path::new(&listen.path);
        make_parents(path)?;
        Ok(Self { id, listener: PrivateListener::bind(path).map_err(io::Error::other)? })
    }

    /// Somebody who has connected; `None`: nobody now.
    pub(super) fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self.listener.listener().accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.listener().as_fd()
    }
}

/// Bytes on their way out of a job.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) id: u32,
    pub(super) credit: u32,
    from: File,
}

/// Bytes on their way into a file or a job.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) id: u32,
    to: File,
    queue: VecDeque<u8>,
    window: u32,
    /// Answered by `DONE` or `FAILED` at its end.
    pub(super) is_put: bool,
    pub(super) closing: bool,
    pub(super) error: Option<io::Error>,
    /// The socket to be shut down at its end.
    socket: Option<UnixStream>,
}

/// Starts a job.
pub(super) fn start(id: u32, run: &Run) -> io::Result<(Job, Vec<Source>, Option<Sink>)> {
    let (stdout, stdout_job) = pipe()?;
    let (stderr, stderr_job) = pipe()?;
    let mut sources = vec![Source::new(run.stdout, stdout)?, Source::new(run.stderr, stderr)?];
    let mut writers = Vec::new();
    for (path, stream) in &run.outputs {
        let (reader, writer) =
            fifo(Path::new(path)).map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))?;
        sources.push(Source::new(*stream, reader)?);
        writers.push(writer);
    }
    let (stdin, sink) = match run.stdin {
        None => (Stdio::null(), None),
        Some(stream) => {
            let (reader, writer) = io::pipe()?;
            let to = File::from(OwnedFd::from(writer));
            unblock(&to)?;
            (Stdio::from(reader), Some(Sink::new(stream, to, false)))
        }
    };
    let program = run.program.as_deref().unwrap_or("/init");
    let child = Command::new(program)
        .arg0(run.program.as_deref().unwrap_or("vmtrace"))
        .args(&run.args)
        .env_clear()
        .env("PATH", "/bin")
        .env("HOME", "/root")
        .envs(&run.env)
        .current_dir("/root")
        .process_group(0)
        .stdin(stdin)
        .stdout(stdout_job)
        .stderr(stderr_job)
        .spawn()?;
    let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
    Ok((Job { id, stdin: run.stdin, pid, _writers: writers }, sources, sink))
}

fn pipe() -> io::Result<(File, io::PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    Ok((File::from(OwnedFd::from(reader)), writer))
}

/// A FIFO with both ends open; the writer is there only to be held.
fn fifo(path: &Path) -> io::Result<(File, File)> {
    make_parents(path)?;
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => mkfifo(path, Mode::from_bits_truncate(0o600))?,
    }
    let reader = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let writer = OpenOptions::new().write(true).open(path)?;
    Ok((reader, writer))
}

fn make_parents(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => fs::DirBuilder::new().recursive(true).mode(0o755).create(parent),
        None => Ok(()),
    }
}

fn unblock(file: &File) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

impl Job {
    pub(super) fn is(&self, pid: libc::pid_t) -> bool {
        pid == self.pid.as_raw()
    }

    /// What to report. Whatever the job left running is killed, so that its streams end.
    pub(super) fn ended(self, status: ExitStatus) -> Exited {
        let _ = killpg(self.pid, Signal::SIGKILL);
        match (status.code(), status.signal()) {
            (Some(code), _) => Exited::Code(code),
            (None, signal) => Exited::Signal(signal.unwrap_or_default()),
        }
    }

    pub(super) fn signal(&self, number: u32) {
        let signal = i32::try_from(number).ok().and_then(|n| Signal::try_from(n).ok());
        // It may have ended meanwhile.
        let _ = match signal {
            Some(Signal::SIGKILL) => {
                threads::states(self.pid).iter().for_each(|line| say!("vmtrace: {line}"));
                killpg(self.pid, Signal::SIGKILL)
            }
            Some(signal) => kill(self.pid, signal),
            None => Ok(()),
        };
    }
}

impl Source {
    fn new(id: u32, from: File) -> io::Result<Self> {
        unblock(&from)?;
        // Only a matter of speed.
        let _ = fcntl(&from, FcntlArg::F_SETPIPE_SZ(PIPE_SIZE));
        Ok(Self { id, credit: WINDOW, from })
    }

    /// What the job wrote, as much as may be sent and there is room for, as a whole frame at the beginning of `room`:
    /// its length. `None`: nothing now. 0: its end.
    pub(super) fn read(&mut self, room: &mut [u8]) -> io::Result<Option<usize>> {
        let most = usize::try_from(self.credit).unwrap_or(usize::MAX);
        let Some((head, data)) = room.split_first_chunk_mut::<HEADER>() else { return Ok(None) };
        let most = most.min(data.len());
        let Some(n) = ready(self.from.read(data.get_mut(..most).unwrap_or_default()))? else {
            return Ok(None);
        };
        *head = header(Kind::Data, self.id, n);
        self.credit -= u32::try_from(n).unwrap_or(self.credit);
        Ok(Some(if n == 0 { 0 } else { HEADER + n }))
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.from.as_fd()
    }
}

impl Sink {
    fn new(id: u32, to: File, is_put: bool) -> Self {
        Self {
            id,
            to,
            queue: VecDeque::new(),
            window: WINDOW,
            is_put,
            closing: false,
            error: None,
            socket: None,
        }
    }

    /// A file to be filled.
    pub(super) fn put(id: u32, put: &Put) -> io::Result<Self> {
        let path = Path::new(&put.path);
        make_parents(path)?;
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let to = OpenOptions::new().write(true).create_new(true).mode(put.mode).open(path)?;
        Ok(Self::new(id, to, true))
    }

    /// A connection to a unix socket: both directions.
    pub(super) fn connect(connect: &Connect) -> io::Result<(Self, Source)> {
        let &Connect { input, output, ref path } = connect;
        Self::socket(UnixStream::connect(path)?, Accepted { input, output })
    }

    /// Both directions of a socket.
    pub(super) fn socket(socket: UnixStream, numbers: Accepted) -> io::Result<(Self, Source)> {
        let file = |socket: &UnixStream| socket.try_clone().map(|s| File::from(OwnedFd::from(s)));
        let source = Source::new(numbers.output, file(&socket)?)?;
        let mut sink = Self::new(numbers.input, file(&socket)?, false);
        sink.socket = Some(socket);
        Ok((sink, source))
    }

    /// Whether its end is worth knowing before anything is written: the other direction may be
    /// over already, and nothing else would tell.
    pub(super) fn is_socket(&self) -> bool {
        self.socket.is_some()
    }

    /// Nobody reads it any more.
    pub(super) fn hang_up(&mut self) {
        self.error = Some(io::ErrorKind::BrokenPipe.into());
    }

    /// Takes bytes from the outer side; false: more than it may send.
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        let Some(window) = u32::try_from(bytes.len()).ok().and_then(|n| self.window.checked_sub(n))
        else {
            return false;
        };
        self.window = window;
        self.queue.extend(bytes);
        true
    }

    pub(super) fn pending(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Writes what can be written now, and says how much.
    pub(super) fn write(&mut self) -> u32 {
        let mut written = 0;
        while self.error.is_none() && !self.queue.is_empty() {
            match ready(self.to.write(self.queue.as_slices().0)) {
                Ok(Some(n)) => {
                    self.queue.drain(..n);
                    written += u32::try_from(n).unwrap_or_default();
                }
                Ok(None) => break,
                Err(e) => self.error = Some(e),
            }
        }
        if self.error.is_some() {
            // Drop the rest, but let the sender come to its end.
            written += u32::try_from(self.queue.len()).unwrap_or_default();
            self.queue.clear();
        }
        self.window = self.window.saturating_add(written);
        written
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Some(socket) = &self.socket {
            // The peer may have been quicker.
            let _ = socket.shutdown(Shutdown::Write);
        }
    }
}

impl AsFd for Sink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.to.as_fd()
    }
}
