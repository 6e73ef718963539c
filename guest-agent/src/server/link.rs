//! A connection that reads and writes frames without blocking.

use std::fs::File;
use std::io::{self, ErrorKind, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::protocol::{Decoder, Frame, Hello, ProtocolError};

/// No more output is produced while this many bytes wait to be sent.
pub(super) const OUT_MAX: usize = 64 << 10;

/// Read at once.
const CHUNK: usize = 32 << 10;

pub(super) struct Link {
    socket: File,
    decoder: Decoder,
    out: Vec<u8>,
    sent: usize,
    chunk: Vec<u8>,
}

impl Link {
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        non_blocking(&socket)?;
        let socket = File::from(socket);
        Ok(Self {
            socket,
            decoder: Decoder::new(),
            out: Vec::new(),
            sent: 0,
            chunk: vec![0; CHUNK],
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Bytes that wait to be sent.
    pub(super) fn waiting(&self) -> usize {
        self.out.len() - self.sent
    }

    pub(super) fn queue_hello(&mut self, hello: &Hello) {
        self.out.extend(hello.encode());
    }

    pub(super) fn queue(&mut self, frame: &Frame) -> Result<(), ProtocolError> {
        frame.encode(&mut self.out)
    }

    /// Sends what can be sent now.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while self.waiting() > 0 {
            match self.socket.write(self.out.get(self.sent..).unwrap_or_default()) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(())
    }

    /// Sends until no more than `rest` bytes wait.
    pub(super) fn drain(&mut self, rest: usize, deadline: Option<Instant>) -> io::Result<()> {
        loop {
            self.flush()?;
            if self.waiting() <= rest {
                return Ok(());
            }
            wait_for(self.fd(), PollFlags::POLLOUT, deadline)?;
        }
    }

    /// Reads once, if there is something; `false` at the end.
    pub(super) fn fill(&mut self) -> io::Result<bool> {
        match self.socket.read(&mut self.chunk) {
            Ok(0) => Ok(false),
            Ok(count) => {
                self.decoder.push(self.chunk.get(..count).unwrap_or_default());
                Ok(true)
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }

    /// The next frame that is there already.
    pub(super) fn frame(&mut self) -> Result<Option<Frame>, ProtocolError> {
        self.decoder.frame()
    }

    /// Waits for a message, which `take` finds in the decoder.
    pub(super) fn expect<T>(
        &mut self,
        deadline: Instant,
        take: fn(&mut Decoder) -> Result<Option<T>, ProtocolError>,
    ) -> io::Result<T> {
        loop {
            if let Some(message) = take(&mut self.decoder)? {
                return Ok(message);
            }
            self.flush()?;
            let mut wanted = PollFlags::POLLIN;
            wanted.set(PollFlags::POLLOUT, self.waiting() > 0);
            wait_for(self.fd(), wanted, Some(deadline))?;
            if !self.fill()? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

pub(crate) fn non_blocking(fd: &impl AsFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// The most that a pipe holds.
pub(crate) fn pipe_capacity(pipe: &PipeReader) -> usize {
    let capacity = fcntl(pipe, FcntlArg::F_GETPIPE_SZ).ok();
    capacity.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(1 << 20)
}

fn wait_for(fd: BorrowedFd<'_>, wanted: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
    let timeout = match deadline.map(|deadline| deadline.checked_duration_since(Instant::now())) {
        None => PollTimeout::NONE,
        Some(Some(left)) => PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX),
        Some(None) => return Err(ErrorKind::TimedOut.into()),
    };
    match poll(&mut [PollFd::new(fd, wanted)], timeout) {
        Err(nix::Error::EINTR) | Ok(_) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
