//! `--clock`: the origin of a trace's times.

use crate::export::Horizon;

/// The origin of times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Clock {
    /// The start of the machine
    #[default]
    Trace,
    /// The time 0 of the guest's own log, so that times are those of dmesg
    Guest,
}

impl Clock {
    /// The ticks that are shown as 0; `None` for those that the trace names itself.
    ///
    /// # Errors
    /// When the trace does not tell: what the user can do.
    pub(super) fn start(self, known: Option<&Horizon>) -> Result<Option<u64>, String> {
        match (self, known) {
            (Self::Trace, _) => Ok(None),
            (Self::Guest, None) => Err("--clock guest needs a file that can be read twice: the \
                                        trace tells the guest's clock at its end"
                .to_owned()),
            (Self::Guest, Some(known)) => match known.guest_clock() {
                Some(clock) => Ok(Some(clock.zero_ticks)),
                None => Err("it does not tell the guest's clock: it is torn, or of a guest that \
                             ended early in its boot, or has another clock than kvm-clock; leave \
                             --clock guest out"
                    .to_owned()),
            },
        }
    }
}
