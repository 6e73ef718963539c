//! One consumer's thread: from its queue to its socket.

use super::queue::{Popped, Queue};
use super::refilter::Refilter;
use super::request::{Format, Globs, Origin, StreamRequest};
use crate::export::{Graph, Json, Player, Text};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::HashSet;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Somebody who wants the stream.
#[derive(Debug)]
pub struct Join {
    /// Where it is to be sent; blocking.
    pub stream: UnixStream,
    /// How.
    pub request: StreamRequest,
    /// Who it is.
    pub origin: Origin,
}

/// From globs to functions as records name them: low halves of entry addresses. Only who knows
/// the kernel knows all names of a function.
pub type Resolve = Arc<dyn Fn(&Globs) -> HashSet<u32> + Send + Sync>;

/// How often an idle consumer is looked after.
const LOOK: Duration = Duration::from_millis(500);

/// Sends what is in the queue until its end, or until the consumer is gone.
pub(super) fn feed(queue: &Queue, join: Join, resolve: &Resolve) {
    let Join { stream, request, .. } = join;
    // An error is the consumer's leaving; there is nobody to tell.
    let _ = sink(&stream, &request, resolve).and_then(|mut sink| {
        loop {
            match queue.pop(LOOK) {
                Popped::Chunk(chunk) => {
                    sink.write_all(&chunk)?;
                    sink.flush()?;
                }
                Popped::Wait if hung_up(&stream) => return Ok(()),
                Popped::Wait => {}
                Popped::End => return sink.flush(),
            }
        }
    });
    queue.leave();
}

fn sink(
    stream: &UnixStream,
    request: &StreamRequest,
    resolve: &Resolve,
) -> io::Result<Box<dyn Write>> {
    let out = stream.try_clone()?;
    let out: Box<dyn Write> = match request.format {
        Format::Raw => Box::new(out),
        Format::Text => Box::new(Player::new(Text::new(BufWriter::new(out)))),
        Format::Graph => Box::new(Player::new(Graph::new(BufWriter::new(out)))),
        Format::Json => Box::new(Player::new(Json::new(BufWriter::new(out)))),
    };
    let functions = (!request.globs.is_empty()).then(|| resolve(&request.globs));
    if functions.is_none() && request.tracer.is_none() {
        return Ok(out);
    }
    Ok(Box::new(Refilter::new(out, functions, request.tracer.clone())))
}

/// Whether the peer has closed both directions. (One that only sends no more may still read.)
fn hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
    poll(&mut fds, PollTimeout::ZERO).is_ok()
        && fds.first().and_then(PollFd::revents).is_some_and(|found| found.intersects(gone))
}
