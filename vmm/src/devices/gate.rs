//! Keeps threads of devices away from guest memory while the machine is paused.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::events::Bell;

/// A device's thread enters before it touches guest memory; whoever pauses the machine closes the
/// gate, which waits for those who are inside.
///
/// vCPU threads need no gate: a pause waits for them anyway. It must be closed after they have
/// stopped, since they may wait for a device's thread.
#[derive(Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    inside: usize,
    /// Those who want to know when it opens.
    waiting: Vec<Bell>,
}

/// While this lives the gate is not closed.
pub struct Pass<'a>(&'a Gate);

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters; if the gate is closed, the bell will ring when it opens. Whoever is inside must
    /// come out soon and must not wait for a vCPU.
    pub fn enter(&self, bell: &Bell) -> Option<Pass<'_>> {
        let mut state = self.lock();
        if state.closed {
            if !state.waiting.contains(bell) {
                state.waiting.push(bell.clone());
            }
            return None;
        }
        state.inside += 1;
        Some(Pass(self))
    }

    /// Lets nobody in any more and waits until nobody is inside.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let busy = |state: &mut State| state.inside > 0;
        drop(self.changed.wait_while(state, busy).unwrap_or_else(PoisonError::into_inner));
    }

    /// Undoes [`Gate::close`].
    pub fn open(&self) {
        let mut state = self.lock();
        state.closed = false;
        state.waiting.drain(..).for_each(|bell| bell.ring());
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.inside -= 1;
        // Waking nobody costs a system call, too.
        if state.closed && state.inside == 0 {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn nobody_is_inside_while_it_is_closed() {
        let gate = Arc::new(Gate::default());
        let (inside, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (gate, inside, ended) = (gate.clone(), inside.clone(), ended.clone());
            std::thread::spawn(move || {
                let mut entered = 0_u64;
                let bell = Bell::new().unwrap();
                while !ended.load(Ordering::SeqCst) {
                    let Some(_pass) = gate.enter(&bell) else {
                        std::thread::yield_now();
                        continue;
                    };
                    inside.store(true, Ordering::SeqCst);
                    std::hint::spin_loop();
                    inside.store(false, Ordering::SeqCst);
                    entered += 1;
                }
                entered
            })
        };
        let bell = Bell::new().unwrap();
        for _ in 0..1000 {
            gate.close();
            assert!(!inside.load(Ordering::SeqCst));
            assert!(gate.enter(&bell).is_none());
            assert!(bell.descriptor().read().is_err(), "it has not opened yet");
            gate.open();
            bell.descriptor().read().unwrap();
        }
        ended.store(true, Ordering::SeqCst);
        thread.join().unwrap();
        assert!(gate.enter(&bell).is_some());
    }
}
