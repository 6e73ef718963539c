//! Runs a command in the guest, with its streams on this side.
//!
//! The calling thread reads the connection and waits for nothing else. One thread for each output writes it, and
//! grants credit for what it has written. Another thread reads the input, within the agent's credit. So a stream
//! that blocks stops only itself.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use nix::sys::socket::{Shutdown, shutdown};

use super::client::{AgentError, Connection, unexpected};
use super::protocol::{DATA_MAX, Exit, Frame, ProtocolError, Request, Run, Stream, WINDOW};

/// The standard streams of a command.
pub struct Streams<'a> {
    /// Read by a thread that may outlive the command, since a read cannot be taken back.
    pub stdin: Box<dyn Read + Send>,
    /// When it fails, the command finds its standard output closed.
    pub stdout: &'a mut (dyn Write + Send),
    /// Likewise.
    pub stderr: &'a mut (dyn Write + Send),
}

/// What other threads can do to a command.
#[derive(Debug, Clone)]
pub struct Handle(Arc<Shared>);

impl Handle {
    /// Sends a signal to the command's process group. An error is the connection's, which [`Connection::run`] has
    /// too.
    pub fn signal(&self, number: u8) {
        let _ = self.0.send(&Frame::Signal(number));
    }

    /// Ends the connection, at which the agent kills the process group.
    pub fn disconnect(&self) {
        self.0.close();
    }
}

#[derive(Debug)]
struct Shared {
    socket: File,
    /// Held while a frame is written.
    sending: Mutex<()>,
    /// What may be sent to standard input; `None`: nothing any more.
    credit: Mutex<Option<u32>>,
    changed: Condvar,
}

impl Shared {
    fn send(&self, frame: &Frame) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes)?;
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        (&self.socket).write_all(&bytes)
    }

    fn credit(&self) -> MutexGuard<'_, Option<u32>> {
        self.credit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop_input(&self) {
        *self.credit() = None;
        self.changed.notify_all();
    }

    fn close(&self) {
        self.stop_input();
        // It may be closed already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }

    /// Waits until something may be sent to standard input; `None`: never again.
    fn room(&self) -> Option<usize> {
        let credit = self.changed.wait_while(self.credit(), |credit| *credit == Some(0));
        let credit = (*credit.unwrap_or_else(PoisonError::into_inner))?;
        Some(usize::try_from(credit).map_or(DATA_MAX, |credit| credit.min(DATA_MAX)))
    }

    fn send_input(&self, mut stdin: impl Read) -> io::Result<()> {
        let mut bytes = vec![0; DATA_MAX];
        while let Some(room) = self.room() {
            let count = match stdin.read(bytes.get_mut(..room).unwrap_or_default()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // A terminal that was hung up has ended too.
                Ok(0) | Err(_) => return self.send(&Frame::End(Stream::Stdin)),
                Ok(count) => count,
            };
            if let Some(credit) = &mut *self.credit() {
                *credit = credit.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
            }
            let data = bytes.get(..count).unwrap_or_default().to_vec();
            self.send(&Frame::Data(Stream::Stdin, data))?;
        }
        Ok(())
    }
}

impl Connection {
    /// Runs a command to its end. `started` gets a handle once the agent was asked.
    ///
    /// # Errors
    /// When the command cannot be started, the agent or the connection fails, or an output does (other than by a
    /// closed pipe, as that is somebody who has seen enough).
    pub fn run(
        mut self,
        run: Run,
        streams: Streams<'_>,
        started: impl FnOnce(Handle),
    ) -> Result<Exit, AgentError> {
        let Streams { stdin, stdout, stderr } = streams;
        self.request(Request::Run(run))?;
        let shared = Arc::new(Shared {
            socket: self.socket.try_clone()?,
            sending: Mutex::default(),
            credit: Mutex::new(Some(WINDOW)),
            changed: Condvar::new(),
        });
        started(Handle(Arc::clone(&shared)));
        let input = Arc::clone(&shared);
        // An error is the connection's, which is noticed below.
        thread::spawn(move || drop(input.send_input(stdin)));
        let (ended, written) = thread::scope(|scope| {
            let (out, out_writer) = output(Stream::Stdout, &shared);
            let (err, err_writer) = output(Stream::Stderr, &shared);
            let out_thread = scope.spawn(|| out_writer.write(stdout));
            let err_thread = scope.spawn(|| err_writer.write(stderr));
            let ended = self.relay(&shared, &out, &err);
            // The threads write what has come, and end.
            drop((out, err));
            let join = |thread: thread::ScopedJoinHandle<'_, io::Result<()>>| {
                thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread has failed")))
            };
            let (out, err) = (join(out_thread), join(err_thread));
            (ended, out.and(err))
        });
        shared.close();
        let exit = ended?;
        written.map_err(AgentError::Output)?;
        Ok(exit)
    }

    fn relay(&mut self, shared: &Shared, out: &Taker, err: &Taker) -> Result<Exit, AgentError> {
        loop {
            match self.frame()? {
                Frame::Data(Stream::Stdout, bytes) => out.take(bytes)?,
                Frame::Data(Stream::Stderr, bytes) => err.take(bytes)?,
                Frame::End(Stream::Stdout | Stream::Stderr) => {}
                Frame::Credit(Stream::Stdin, more) => {
                    if let Some(credit) = &mut *shared.credit() {
                        *credit =
                            credit.checked_add(more).ok_or(ProtocolError("too much credit"))?;
                    }
                    shared.changed.notify_all();
                }
                Frame::Stop(Stream::Stdin) => shared.stop_input(),
                Frame::Exited(exit) => return Ok(exit),
                other => return Err(unexpected(other)),
            }
        }
    }
}

/// The way to an output here: one end for the thread that reads the connection, one for a thread that writes.
fn output(stream: Stream, shared: &Shared) -> (Taker, Writer<'_>) {
    let (sender, pieces) = channel();
    let waiting = Arc::new(AtomicU32::new(0));
    let taker = Taker { pieces: sender, waiting: Arc::clone(&waiting) };
    (taker, Writer { stream, shared, pieces, waiting })
}

struct Taker {
    pieces: Sender<Vec<u8>>,
    /// Bytes that were taken and not written yet.
    waiting: Arc<AtomicU32>,
}

impl Taker {
    /// Hands bytes to the thread; the window bounds what waits there.
    fn take(&self, bytes: Vec<u8>) -> Result<(), ProtocolError> {
        let count = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        if self.waiting.fetch_add(count, Ordering::Relaxed).saturating_add(count) > WINDOW {
            return Err(ProtocolError("more output than was agreed to"));
        }
        // The thread lives until there can be no more pieces.
        let _ = self.pieces.send(bytes);
        Ok(())
    }
}

struct Writer<'a> {
    stream: Stream,
    shared: &'a Shared,
    pieces: Receiver<Vec<u8>>,
    waiting: Arc<AtomicU32>,
}

impl Writer<'_> {
    fn write(self, sink: &mut dyn Write) -> io::Result<()> {
        let mut result = Ok(());
        for piece in self.pieces {
            if result.is_err() {
                continue;
            }
            result = sink.write_all(&piece).and_then(|()| sink.flush());
            let frame = if result.is_ok() {
                let count = u32::try_from(piece.len()).unwrap_or(u32::MAX);
                self.waiting.fetch_sub(count, Ordering::Relaxed);
                Frame::Credit(self.stream, count)
            } else {
                Frame::Stop(self.stream)
            };
            // An error of the connection is noticed where it is read.
            let _ = self.shared.send(&frame);
        }
        match result {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }
}
