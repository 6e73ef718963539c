//! The user's wish to stop: SIGINT, SIGTERM and SIGHUP, counted.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

/// While this lives, the signals do not end the process but are counted here.
#[derive(Debug)]
pub struct Interrupts {
    count: Arc<AtomicUsize>,
    give_up: Arc<AtomicBool>,
    ids: Vec<SigId>,
}

impl Interrupts {
    /// Takes the signals over. (The default action stays off for the rest of the process's life.)
    #[allow(unsafe_code)]
    pub fn install() -> io::Result<Self> {
        let count = Arc::new(AtomicUsize::new(0));
        let mut this = Self { count, give_up: Arc::default(), ids: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            this.ids.push(flag::register_conditional_default(signal, this.give_up.clone())?);
            let count = this.count.clone();
            let add = move || {
                count.fetch_add(1, Ordering::Relaxed);
            };
            // SAFETY: the handler only adds to an atomic counter, which is async-signal-safe.
            this.ids.push(unsafe { low_level::register(signal, add) }?);
        }
        Ok(this)
    }

    /// From now on the signals end the process as if they were not taken.
    pub fn give_up(&self) {
        self.give_up.store(true, Ordering::Relaxed);
    }

    /// How many came so far.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            low_level::unregister(id);
        }
    }
}
