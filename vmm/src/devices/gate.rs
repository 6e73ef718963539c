//! Keeps threads of devices away from guest memory while the machine is paused.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

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
}

/// While this lives the gate is not closed.
pub struct Pass<'a>(&'a Gate);

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters, unless the gate is closed. Whoever is inside must come out soon and must not wait
    /// for a vCPU.
    pub fn try_enter(&self) -> Option<Pass<'_>> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        state.inside += 1;
        Some(Pass(self))
    }

    /// Waits until the gate is open.
    pub fn wait_open(&self) {
        let state = self.lock();
        let closed = |state: &mut State| state.closed;
        drop(self.changed.wait_while(state, closed).unwrap_or_else(PoisonError::into_inner));
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
        self.lock().closed = false;
        self.changed.notify_all();
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
                while !ended.load(Ordering::SeqCst) {
                    let Some(_pass) = gate.try_enter() else {
                        gate.wait_open();
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
        for _ in 0..1000 {
            gate.close();
            assert!(!inside.load(Ordering::SeqCst));
            assert!(gate.try_enter().is_none());
            gate.open();
        }
        ended.store(true, Ordering::SeqCst);
        thread.join().unwrap();
        assert!(gate.try_enter().is_some());
    }
}
