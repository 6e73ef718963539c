//! Counts the signals by which a user stops a run: SIGINT, SIGTERM and SIGHUP.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

/// Which signal ends the process at once: the third or a later one, a second or more after the
/// first. Signals that come together are one request: `timeout` of coreutils signals its child and
/// then the child's whole process group, a terminal signals the group, and a script may do both.
#[derive(Debug, Default)]
pub struct Patience {
    count: AtomicUsize,
    first: AtomicU64,
}

impl Patience {
    /// Signals within this time of the first are the same request.
    const TOGETHER: Duration = Duration::from_secs(1);
    /// The first that may end everything at once.
    const HARD: usize = 3;

    /// One has come, at this time of a clock that only goes forward; whether it is one too many.
    /// Async-signal-safe.
    pub fn signal(&self, now: Duration) -> bool {
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let count = self.count.fetch_add(1, Ordering::SeqCst) + 1;
        if count == 1 {
            self.first.store(now, Ordering::SeqCst);
        }
        let since = now.saturating_sub(self.first.load(Ordering::SeqCst));
        count >= Self::HARD && Duration::from_nanos(since) >= Self::TOGETHER
    }

    /// Now, for [`Self::signal`]. Async-signal-safe.
    #[allow(unsafe_code)]
    pub fn now() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes one timespec through the pointer, which is valid for it. There is always
        // such a clock.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
        let seconds = Duration::from_secs(time.tv_sec.try_into().unwrap_or_default());
        seconds + Duration::from_nanos(time.tv_nsec.try_into().unwrap_or_default())
    }

    /// How many came so far.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

/// While this lives, the signals do not end the process but are counted here.
#[derive(Debug)]
pub struct Interrupts {
    patience: Arc<Patience>,
    insists: Arc<AtomicBool>,
    give_up: Arc<AtomicBool>,
    ids: Vec<SigId>,
}

impl Interrupts {
    /// Takes the signals over. (The default action stays off for the rest of the process's life.)
    #[allow(unsafe_code)]
    pub fn install() -> io::Result<Self> {
        let (patience, insists) = (Arc::default(), Arc::default());
        let mut this = Self { patience, insists, give_up: Arc::default(), ids: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            this.ids.push(flag::register_conditional_default(signal, this.give_up.clone())?);
            let (patience, insists) = (this.patience.clone(), this.insists.clone());
            let add = move || {
                if patience.signal(Patience::now()) {
                    insists.store(true, Ordering::Relaxed);
                }
            };
            // SAFETY: the handler only asks for the time and uses atomics, which is async-signal-safe.
            this.ids.push(unsafe { low_level::register(signal, add) }?);
        }
        Ok(this)
    }

    /// As if a signal had come.
    pub fn ask(&self) {
        if self.patience.signal(Patience::now()) {
            self.insists.store(true, Ordering::Relaxed);
        }
    }

    /// From now on the signals end the process as if they were not taken.
    pub fn give_up(&self) {
        self.give_up.store(true, Ordering::Relaxed);
    }

    /// How many came so far.
    pub fn count(&self) -> usize {
        self.patience.count()
    }

    /// Whether the user does not want to wait for an orderly end any more: see [`Patience`].
    pub fn insists(&self) -> bool {
        self.insists.load(Ordering::Relaxed)
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            low_level::unregister(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_is_hard(times_ms: &[u64]) -> bool {
        let patience = Patience::default();
        let hard = times_ms.iter().map(|&ms| patience.signal(Duration::from_millis(ms)));
        hard.last().unwrap_or_default()
    }

    // A trace that is torn by the second signal of `timeout` was the reason for this.
    #[test]
    fn signals_that_come_together_are_one_request() {
        assert!(!last_is_hard(&[5000]));
        assert!(!last_is_hard(&[5000, 5002]));
        assert!(!last_is_hard(&[5000, 5002, 5003, 5999]));
        // Twice is not yet insisting, whenever.
        assert!(!last_is_hard(&[5000, 60_000]));
        assert!(last_is_hard(&[5000, 5002, 6000]));
        assert!(last_is_hard(&[5000, 20_000, 20_001]));
    }

    #[test]
    fn real_signals_are_counted() {
        use nix::sys::signal::{Signal, raise};
        let interrupts = Interrupts::install().unwrap();
        for _ in 0..5 {
            raise(Signal::SIGHUP).unwrap();
        }
        assert_eq!(interrupts.count(), 5);
        let before = Patience::now();
        while Patience::now() < before + Patience::TOGETHER {
            std::thread::sleep(Duration::from_millis(50));
        }
        raise(Signal::SIGHUP).unwrap();
        assert!(interrupts.insists());
    }
}
