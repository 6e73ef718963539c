//! Printing beside the relay: a slow terminal must not keep rings from being drained.

use std::io::{Error, ErrorKind, Result, Write};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Pieces that may wait; the relay hands on up to 256 KiB at once.
const PIECES: usize = 256;

/// Hands what is written to another thread, which writes it to the sink. Ends, and
/// waits for the sink, when it is dropped.
#[derive(Debug)]
pub(super) struct Spool {
    pieces: Option<SyncSender<Vec<u8>>>,
    thread: Option<JoinHandle<Result<()>>>,
    late: Late,
}

/// What went wrong with the last pieces, when nobody wrote any more.
#[derive(Clone, Debug, Default)]
pub(super) struct Late(Arc<Mutex<Option<Error>>>);

impl Late {
    /// To be asked once the spool is gone.
    ///
    /// # Errors
    /// That of the sink; a reader that has seen enough is none.
    pub(super) fn check(&self) -> Result<()> {
        let error = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        error.filter(|error| error.kind() != ErrorKind::BrokenPipe).map_or(Ok(()), Err)
    }
}

impl Spool {
    pub(super) fn new(mut sink: impl Write + Send + 'static) -> Self {
        let (sender, receiver) = sync_channel::<Vec<u8>>(PIECES);
        let thread = std::thread::spawn(move || {
            receiver.into_iter().try_for_each(|piece| sink.write_all(&piece))?;
            sink.flush()
        });
        Self { pieces: Some(sender), thread: Some(thread), late: Late::default() }
    }

    pub(super) fn late(&self) -> Late {
        self.late.clone()
    }

    /// Why the thread takes no more.
    fn error(&mut self) -> Error {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(Err(error))) => error,
            _ => Error::other("the printing thread has ended"),
        }
    }
}

impl Write for Spool {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let sent = self.pieces.as_ref().is_some_and(|to| to.send(bytes.to_vec()).is_ok());
        if sent { Ok(bytes.len()) } else { Err(self.error()) }
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.pieces = None;
        if let Some(thread) = self.thread.take() {
            let error = match thread.join() {
                Ok(result) => result.err(),
                Err(_) => Some(Error::other("the printing thread has panicked")),
            };
            *self.late.0.lock().unwrap_or_else(PoisonError::into_inner) = error;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> Result<usize> {
            std::thread::sleep(std::time::Duration::from_millis(1));
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    struct Failing(ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn everything_is_written_before_it_is_gone() {
        let sink = Shared::default();
        let mut spool = Spool::new(sink.clone());
        (0..100_u8).for_each(|byte| spool.write_all(&[byte]).unwrap());
        drop(spool);
        assert_eq!(*sink.0.lock().unwrap(), (0..100).collect::<Vec<u8>>());
    }

    #[test]
    fn an_error_of_the_sink_comes_back() {
        let mut spool = Spool::new(Failing(ErrorKind::BrokenPipe));
        let error = (0..100_000).find_map(|_| spool.write_all(b"x").err()).unwrap();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }

    // A short trace is all in the spool when the run ends: a full disk must not be a success.
    #[test]
    fn an_error_of_the_last_pieces_is_kept() {
        for (kind, kept) in [(ErrorKind::StorageFull, true), (ErrorKind::BrokenPipe, false)] {
            let mut spool = Spool::new(Failing(kind));
            let late = spool.late();
            spool.write_all(b"x").unwrap();
            drop(spool);
            assert_eq!(late.check().is_err(), kept);
        }
    }
}
