//! Where the trace from an emulated host is written.

use super::run_output::patience;
use crate::deadline::Deadline;
use crate::serve::{Patience, Primary, Sink, Unwritten};
use std::io::{Error, Result, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How often the end of the run is checked.
const LOOK: Duration = Duration::from_millis(50);

/// What a program's reader may be behind with: little, since the program is to know how far it was read.
const PROGRAM: usize = 1 << 20;

/// Makes the host wait while the output does not keep up, which counts there what it loses by that;
/// once the run has ended only as long as the output goes on to take something.
pub(super) struct Outlet {
    primary: Primary,
    ended: Ended,
    /// Bytes that the output had taken when that was seen.
    begun: Option<u64>,
    left_out: u64,
    /// The output has failed, and whoever wrote to it was told why.
    failed: bool,
}

/// Whether the run has ended, and when.
#[derive(Clone)]
pub(super) struct Ended(Arc<End>);

struct End {
    /// Time for a reader who is waited for, and for one who is not.
    patience: OnceLock<[Patience; 2]>,
    /// Whether readers are not waited for.
    hurry: Box<dyn Fn() -> bool + Send + Sync>,
    /// Told that the wait for them goes on as it should.
    deadline: Deadline,
}

impl Ended {
    /// It has.
    pub(super) fn note(&self) {
        self.0.patience.get_or_init(|| [patience(true), patience(false)]);
    }

    /// The time that is left for a reader who has taken so many bytes since then.
    fn left(&self, [waited_for, other]: &[Patience; 2], taken: u64) -> Option<Duration> {
        let patience = if (self.0.hurry)() { other } else { waited_for };
        patience.left(taken).inspect(|_| self.0.deadline.renew())
    }
}

impl Outlet {
    /// # Errors
    /// When the system has no thread left.
    pub(super) fn start(sink: impl Into<Sink>, deadline: &Deadline) -> Result<Self> {
        let primary = Primary::start(sink)?;
        let (patience, deadline) = (OnceLock::new(), deadline.clone());
        let end = End { patience, hurry: Box::new(|| true), deadline };
        Ok(Self { primary, ended: Ended(Arc::new(end)), begun: None, left_out: 0, failed: false })
    }

    /// For what a program writes, which a person may read after the end, unless there is a `hurry`.
    ///
    /// # Errors
    /// As [`Outlet::start`].
    pub(super) fn of_program(
        sink: Box<dyn Write + Send>,
        hurry: impl Fn() -> bool + Send + Sync + 'static,
        deadline: &Deadline,
    ) -> Result<Self> {
        let mut outlet = Self::start(sink, deadline)?;
        outlet.primary.set_capacity(PROGRAM);
        let (patience, deadline) = (OnceLock::new(), deadline.clone());
        outlet.ended.0 = Arc::new(End { patience, hurry: Box::new(hurry), deadline });
        Ok(outlet)
    }

    /// What has not come out, for those who wait for no lock.
    pub(super) fn unwritten(&self) -> impl Fn() -> Option<Unwritten> + Send + 'static {
        self.primary.unwritten()
    }

    /// To be told when the run has ended.
    pub(super) fn ended(&self) -> Ended {
        self.ended.clone()
    }

    /// All was written, as far as the output has taken it.
    ///
    /// # Errors
    /// When the output fails, or has not taken all in time.
    pub(super) fn finish(mut self) -> Result<()> {
        if self.failed {
            return Ok(());
        }
        self.ended.note();
        let begun = *self.begun.get_or_insert(self.primary.taken());
        let patience = self.ended.0.patience.get().copied().unwrap_or_default();
        let ended = self.ended.clone();
        let mut unwritten =
            self.primary.finish(|taken| ended.left(&patience, taken.saturating_sub(begun)))?;
        unwritten.bytes += self.left_out;
        if unwritten.bytes == 0 { Ok(()) } else { Err(Error::other(unwritten.to_string())) }
    }
}

impl Write for Outlet {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let Self { primary, ended, begun, .. } = self;
        let begun = std::cell::Cell::new(*begun);
        let room = primary.wait_for_room(|taken| match ended.0.patience.get() {
            None => Some(LOOK),
            Some(patience) => {
                let first = begun.get().unwrap_or(taken);
                begun.set(Some(first));
                ended.left(patience, taken.saturating_sub(first))
            }
        });
        self.begun = begun.get();
        if room && self.left_out == 0 {
            self.primary.push(bytes, 0).inspect_err(|_| self.failed = true)?;
        } else {
            // A stream with a hole is none.
            self.left_out += bytes.len() as u64;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::sync::mpsc::{Receiver, channel};

    struct Stuck(Receiver<()>);

    impl Write for Stuck {
        fn write(&mut self, _: &[u8]) -> Result<usize> {
            let _ = self.0.recv();
            Err(ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> Result<usize> {
            Err(ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    // `| head -1`: not an output that is stuck, for which there would be 60 s.
    #[test]
    fn one_that_has_failed_is_not_waited_for() {
        let mut outlet =
            Outlet::of_program(Box::new(Closed), || false, &Deadline::never()).unwrap();
        let error = loop {
            if let Err(error) = outlet.write_all(b"x") {
                break error;
            }
            std::thread::yield_now();
        };
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        let begun = std::time::Instant::now();
        outlet.finish().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    // The host goes on to hand over what its run has left behind: it must come to an end.
    #[test]
    fn a_run_ends_whether_or_not_its_output_is_read() {
        let (_open, opened) = channel();
        let mut outlet = Outlet::start(Box::new(Stuck(opened)), &Deadline::never()).unwrap();
        outlet.primary.set_capacity(10);
        outlet.write_all(&[0; 8]).unwrap();
        outlet.write_all(&[0; 8]).unwrap();
        let patience = Patience::of(Duration::ZERO);
        assert!(outlet.ended().0.patience.set([patience; 2]).is_ok());
        outlet.write_all(&[0; 100]).unwrap();
        let error = outlet.finish().unwrap_err().to_string();
        assert!(error.contains("the last 116 bytes"), "{error}");
    }
}
