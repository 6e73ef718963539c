//! One consumer's thread: from its queue to its socket.

use super::queue::{Popped, Queue};
use super::refilter::Refilter;
use super::request::{Format, Origin, StreamRequest};
use crate::export::{Json, Player, Text};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
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

/// How often an idle consumer is looked after.
const LOOK: Duration = Duration::from_millis(500);

/// Sends what is in the queue until its end, or until the consumer is gone.
pub(super) fn feed(queue: &Queue, join: Join) {
    let Join { stream, request, .. } = join;
    // An error is the consumer's leaving; there is nobody to tell.
    let _ = sink(&stream, request).and_then(|mut sink| {
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

fn sink(stream: &UnixStream, request: StreamRequest) -> io::Result<Box<dyn Write>> {
    let out = stream.try_clone()?;
    let StreamRequest { format, globs } = request;
    let all = globs.is_empty();
    Ok(match format {
        Format::Raw if all => Box::new(out),
        Format::Raw => Box::new(Refilter::new(out, globs)),
        Format::Text => {
            Box::new(Player::new(Text::new(BufWriter::new(out))).with_filter(accepting(all, globs)))
        }
        Format::Json => {
            Box::new(Player::new(Json::new(BufWriter::new(out))).with_filter(accepting(all, globs)))
        }
    })
}

fn accepting(all: bool, globs: super::Globs) -> impl Fn(&str) -> bool + Send + 'static {
    move |name| all || globs.accepts(name)
}

/// Whether the peer has closed both directions. (One that only sends no more may still read.)
fn hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
    poll(&mut fds, PollTimeout::ZERO).is_ok()
        && fds.first().and_then(PollFd::revents).is_some_and(|found| found.intersects(gone))
}
