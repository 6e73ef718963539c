//! Tests of the host's end of the connection, which runs in a thread of this process.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;

use super::{port::Port, serve};
use crate::link::{Event, Link};

/// A link, and what keeps it up.
pub(crate) fn server() -> (Link, mpsc::Receiver<Event>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    std::thread::spawn(|| {
        serve::serve(Port::of(File::from(OwnedFd::from(theirs))), None, vec![], "")
    });
    let (sender, events) = mpsc::channel();
    let link = Link::start(ours, sender).unwrap();
    let hello = events.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(matches!(hello, Event::Hello(_)), "{hello:?}");
    (link, events)
}
