//! Signals of the process as events.

use std::ffi::c_int;
use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;

use super::{EventOps, EventSet, Events, MutEventSubscriber, watch};

/// Calls something for every signal of some kinds (several of one kind that come at once may be
/// one).
pub struct Signals<F> {
    /// Written by the handlers.
    pipe: UnixStream,
    what: F,
}

impl<F: FnMut()> Signals<F> {
    /// Handles these signals from now on.
    ///
    /// # Errors
    /// When one of them cannot be handled.
    pub fn new(signals: &[c_int], what: F) -> io::Result<Self> {
        let (pipe, write) = UnixStream::pair()?;
        pipe.set_nonblocking(true)?;
        for signal in signals {
            signal_hook::low_level::pipe::register(*signal, write.try_clone()?)?;
        }
        Ok(Self { pipe, what })
    }
}

impl<F: FnMut()> MutEventSubscriber for Signals<F> {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        let mut bytes = [0; 64];
        loop {
            match (&self.pipe).read(&mut bytes) {
                Ok(count @ 1..) => (0..count).for_each(|_| (self.what)()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => return,
            }
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, Events::new(&self.pipe, EventSet::IN));
    }
}
