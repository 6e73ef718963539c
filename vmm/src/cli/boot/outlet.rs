//! Where the trace of an emulated host comes out.

use crate::serve::{Patience, Primary, Sink};
use std::io::{Error, Result, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How often it is looked whether the run has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Makes the host wait while the output does not keep up, which counts there what it loses by that;
/// once the run has ended only as long as the output goes on to take something.
#[derive(Debug)]
pub(super) struct Outlet {
    primary: Primary,
    ended: Ended,
    /// Bytes that the output had taken when that was seen.
    begun: Option<u64>,
    left_out: u64,
}

/// Whether the run has ended, and when.
#[derive(Clone, Debug, Default)]
pub(super) struct Ended(Arc<OnceLock<Patience>>);

impl Ended {
    /// It has.
    pub(super) fn note(&self) {
        self.0.get_or_init(Patience::new);
    }
}

impl Outlet {
    /// # Errors
    /// When the system has no thread left.
    pub(super) fn start(sink: impl Into<Sink>) -> Result<Self> {
        let primary = Primary::start(sink)?;
        Ok(Self { primary, ended: Ended::default(), begun: None, left_out: 0 })
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
        self.ended.note();
        let begun = *self.begun.get_or_insert(self.primary.taken());
        let patience = self.ended.0.get().copied().unwrap_or_default();
        let mut unwritten =
            self.primary.finish(|taken| patience.left(taken.saturating_sub(begun)))?;
        unwritten.bytes += self.left_out;
        if unwritten.bytes == 0 { Ok(()) } else { Err(Error::other(unwritten.to_string())) }
    }
}

impl Write for Outlet {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let Self { primary, ended, begun, .. } = self;
        let begun = std::cell::Cell::new(*begun);
        let room = primary.wait_for_room(|taken| match ended.0.get() {
            None => Some(LOOK),
            Some(patience) => {
                let first = begun.get().unwrap_or(taken);
                begun.set(Some(first));
                patience.left(taken.saturating_sub(first))
            }
        });
        self.begun = begun.get();
        if room && self.left_out == 0 {
            self.primary.push(bytes, 0)?;
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

    // The host goes on to hand over what its run has left behind: it must come to an end.
    #[test]
    fn a_run_ends_whether_or_not_its_output_is_read() {
        let (_open, opened) = channel();
        let mut outlet = Outlet::start(Box::new(Stuck(opened))).unwrap();
        outlet.primary.set_capacity(10);
        outlet.write_all(&[0; 8]).unwrap();
        outlet.write_all(&[0; 8]).unwrap();
        let patience = Patience::of(Duration::ZERO);
        outlet.ended().0.set(patience).unwrap();
        outlet.write_all(&[0; 100]).unwrap();
        let error = outlet.finish().unwrap_err().to_string();
        assert!(error.contains("the last 116 bytes"), "{error}");
    }
}
