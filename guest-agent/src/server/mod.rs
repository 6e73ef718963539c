//! Serves connections: each has a thread, and makes one request.

mod files;
mod link;
mod run;
mod vsock;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::protocol::{Decoder, Failure, Frame, Hello, Reason, Request};
use crate::reaper::{Reaper, start_thread};
use link::Link;
pub(crate) use link::{non_blocking, pipe_capacity};
pub use vsock::Listener;

/// The largest number of connections at once; more are refused.
pub const CONNECTIONS: usize = 64;

/// A connection says within this time what it is for.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Whoever does not read the last words in this time does not get them.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// Who the agent says it is.
pub const SOFTWARE: &str = concat!("vmtrace-agent ", env!("CARGO_PKG_VERSION"));

/// Serves any number of listeners and sockets.
#[derive(Debug, Clone)]
pub struct Server {
    reaper: Arc<Reaper>,
    hello: Hello,
    connections: Arc<AtomicUsize>,
}

impl Server {
    /// A server whose commands are children of `reaper`.
    pub fn new(reaper: Arc<Reaper>) -> Self {
        Self { reaper, hello: Hello::new(SOFTWARE), connections: Arc::default() }
    }

    /// As an agent of other versions would.
    #[must_use]
    pub fn with_hello(self, hello: Hello) -> Self {
        Self { hello, ..self }
    }

    /// Serves one connection in a thread of its own.
    pub fn attend(&self, socket: OwnedFd) {
        let slot = Slot::take(&self.connections);
        if slot.is_none() {
            let text =
                format!("the agent serves {CONNECTIONS} connections already; try again later");
            return self.refuse(socket, Failure { reason: Reason::Busy, text });
        }
        let server = self.clone();
        // Without a thread the socket is closed, which is an answer too.
        let _ = start_thread("connection", move || {
            // An error is the connection's: nobody is left to tell.
            let _ = server.converse(socket);
            drop(slot);
        });
    }

    /// For a listener that anybody can reach: tells whoever is not the host so.
    pub(crate) fn refuse_stranger(&self, socket: OwnedFd, cid: u32) {
        let text = format!("the agent serves only the host (CID 2), and this is CID {cid}");
        self.refuse(socket, Failure { reason: Reason::Denied, text });
    }

    fn refuse(&self, socket: OwnedFd, failure: Failure) {
        let refuse = || -> io::Result<()> {
            let mut link = Link::new(socket)?;
            link.queue_hello(&self.hello);
            link.queue(&Frame::Failed(failure))?;
            // These few bytes fit into any new socket.
            link.flush()
        };
        let _ = refuse();
    }

    fn converse(&self, socket: OwnedFd) -> io::Result<()> {
        let mut link = Link::new(socket)?;
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        link.queue_hello(&self.hello);
        let theirs = link.expect(deadline, Decoder::hello)?;
        if self.hello.common(&theirs).is_none() {
            // The other side knows by our hello.
            return link.drain(0, Some(deadline));
        }
        let answered = match link.expect(deadline, Decoder::frame) {
            Ok(Frame::Request(request)) => self.answer(&mut link, request),
            Ok(_) => Err(unexpected()),
            Err(error) => Err(error),
        };
        let Err(error) = answered else {
            // However slow the reader is.
            return link.drain(0, None);
        };
        if error.kind() == io::ErrorKind::InvalidData {
            let failure = Failure { reason: Reason::BadRequest, text: error.to_string() };
            link.queue(&Frame::Failed(failure))?;
            link.drain(0, Some(Instant::now() + LAST_WORDS))?;
        }
        Err(error)
    }

    fn answer(&self, link: &mut Link, request: Request) -> io::Result<()> {
        let failed = match request {
            Request::Run(run) => match run::start(&self.reaper, &run) {
                Ok(running) => return running.serve(link),
                Err(failure) => failure,
            },
            Request::Modules => return files::modules(link),
            Request::List(path) => return files::list(link, path),
            Request::Fetch(path) => return files::fetch(link, path),
        };
        Ok(link.queue(&Frame::Failed(failed))?)
    }
}

/// A message that has no place here.
fn unexpected() -> io::Error {
    crate::protocol::ProtocolError("a frame that was not expected").into()
}

/// One of [`CONNECTIONS`].
struct Slot(Arc<AtomicUsize>);

impl Slot {
    fn take(count: &Arc<AtomicUsize>) -> Option<Self> {
        let more = |count| (count < CONNECTIONS).then_some(count + 1);
        let taken = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.ok().map(|_| Self(Arc::clone(count)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
