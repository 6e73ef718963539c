//! Exits of a vCPU, for whoever wants to know of them.

use std::time::{Duration, Instant};

/// Why a vCPU has left the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "not every architecture has all of them")]
pub enum ExitCause {
    /// An access to a port.
    Port {
        /// Which.
        port: u16,
        /// Whether it is written.
        write: bool,
    },
    /// An access to memory where a device is.
    Memory {
        /// Guest-physical address.
        address: u64,
        /// Whether it is written.
        write: bool,
    },
    /// A write of a model-specific register.
    Msr {
        /// Which.
        index: u32,
    },
    /// A call of the SBI.
    Sbi {
        /// Number of the extension.
        extension: u64,
    },
    /// A trap instruction.
    Trap,
    /// The guest's code waits for [`Room`](super::Room).
    Full,
    /// The thread was kicked: somebody wants the vCPU to stop.
    Kick,
    /// The guest has ended itself.
    Shutdown,
    /// KVM cannot go on.
    Error,
    /// Anything else.
    Other,
}

/// An exit that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VcpuExit {
    /// What the guest would have read from its clock just before it went on,
    pub ticks: u64,
    /// and when that was read: not before the first of these, nor after the second.
    pub read: (Instant, Instant),
    /// When KVM had handed the vCPU over.
    pub since: Instant,
    /// From then to just before KVM got it back.
    pub duration: Duration,
    /// Why.
    pub cause: ExitCause,
}

/// Sees the exits of one vCPU, on the vCPU's thread: it must return promptly.
pub trait ExitObserver: Send {
    /// The vCPU's thread has begun, and nothing confines it yet.
    fn starts(&mut self);

    /// Whether an exit that begins now is to be told.
    fn wants(&self) -> bool;

    /// An exit has begun that will be told.
    fn left(&mut self, since: Instant);

    /// It is about to be told; the clock has not been read yet.
    fn begins(&mut self);

    /// That is told. `None`: the clock could not be read.
    fn exited(&mut self, exit: Option<VcpuExit>);
}

/// Where a vCPU is.
#[derive(Debug)]
enum State {
    /// In the guest.
    In,
    /// Not in the guest, and if somebody wants to know, since when and why.
    Out(Option<(Instant, ExitCause)>),
}

/// Takes note of exits, if anybody observes them.
pub(super) struct ExitLog {
    observer: Option<Box<dyn ExitObserver>>,
    state: State,
}

impl ExitLog {
    /// Nobody observes.
    pub(super) fn new() -> ExitLog {
        ExitLog { observer: None, state: State::Out(None) }
    }

    /// Somebody does, before the vCPU first enters the guest.
    pub(super) fn observe(&mut self, observer: Box<dyn ExitObserver>) {
        self.observer = Some(observer);
    }

    /// See [`ExitObserver::starts`].
    pub(super) fn starts(&mut self) {
        if let Some(observer) = &mut self.observer {
            observer.starts();
        }
    }

    /// KVM has returned. What completes an instruction's I/O is part of the exit for that.
    pub(super) fn left(&mut self, cause: impl FnOnce() -> ExitCause) {
        if let (Some(observer), State::In) = (&mut self.observer, &self.state) {
            self.state = State::Out(observer.wants().then(|| {
                let since = Instant::now();
                observer.left(since);
                (since, cause())
            }));
        }
    }

    /// It was rather for this.
    #[allow(dead_code, reason = "not every architecture needs it")]
    pub(super) fn is_for(&mut self, cause: ExitCause) {
        if let State::Out(Some((_, known))) = &mut self.state {
            *known = cause;
        }
    }

    /// The guest is about to be entered. `clock` tells what it would read from its own.
    pub(super) fn entering(&mut self, clock: impl FnOnce() -> Option<u64>) {
        if self.observer.is_some() {
            self.over(clock);
            self.state = State::In;
        }
    }

    /// The exit is over, though the guest may never be entered again.
    pub(super) fn over(&mut self, clock: impl FnOnce() -> Option<u64>) {
        let (Some(observer), State::Out(open)) = (&mut self.observer, &mut self.state) else {
            return;
        };
        if let Some((since, cause)) = open.take() {
            observer.begins();
            // First the duration: what ends at the ticks and is so long is within the exit,
            // whatever comes between the two.
            let duration = since.elapsed();
            let before = Instant::now();
            let ticks = clock();
            let read = (before, Instant::now());
            observer.exited(ticks.map(|ticks| VcpuExit { ticks, read, since, duration, cause }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Seen {
        wants: Arc<AtomicBool>,
        exits: Arc<Mutex<Vec<Option<VcpuExit>>>>,
        begun: bool,
        since: Option<Instant>,
    }

    impl ExitObserver for Seen {
        fn starts(&mut self) {}

        fn left(&mut self, since: Instant) {
            assert!(self.since.replace(since).is_none(), "the one before was not told");
        }

        fn wants(&self) -> bool {
            self.wants.load(Ordering::Relaxed)
        }

        fn begins(&mut self) {
            self.begun = true;
        }

        fn exited(&mut self, exit: Option<VcpuExit>) {
            assert!(std::mem::take(&mut self.begun), "the clock was read before");
            let since = self.since.take().expect("an exit that has begun");
            if let Some(exit) = exit {
                assert_eq!(exit.since, since);
                assert!(since + exit.duration <= exit.read.0 && exit.read.0 <= exit.read.1);
            }
            self.exits.lock().unwrap().push(exit);
        }
    }

    fn told(seen: &Seen) -> Vec<(u64, ExitCause)> {
        let exits = std::mem::take(&mut *seen.exits.lock().unwrap());
        exits.iter().flatten().map(|exit| (exit.ticks, exit.cause)).collect()
    }

    // The rest of an instruction's I/O, and the kick with which that ends, are no exits of their own.
    #[test]
    fn an_exit_lasts_until_the_guest_is_entered() {
        let seen = Seen::default();
        seen.wants.store(true, Ordering::Relaxed);
        let mut log = ExitLog::new();
        log.observe(Box::new(seen.clone()));
        log.left(|| ExitCause::Kick);
        log.entering(|| Some(1));
        assert_eq!(told(&seen), [], "it had not been in the guest");
        let port = ExitCause::Port { port: 0x3f8, write: true };
        log.left(|| port);
        log.left(|| ExitCause::Other);
        log.left(|| ExitCause::Kick);
        assert_eq!(told(&seen), []);
        log.entering(|| Some(2));
        assert_eq!(told(&seen), [(2, port)]);
        log.entering(|| Some(3));
        log.left(|| ExitCause::Other);
        log.is_for(ExitCause::Trap);
        log.over(|| Some(4));
        log.over(|| Some(5));
        assert_eq!(told(&seen), [(4, ExitCause::Trap)]);
        log.entering(|| Some(6));
        log.left(|| ExitCause::Shutdown);
        log.over(|| None);
        assert_eq!(*seen.exits.lock().unwrap(), [None]);
    }

    // What began before would begin before the trace.
    #[test]
    fn an_exit_that_nobody_wanted_when_it_began_is_not_told() {
        let seen = Seen::default();
        let mut log = ExitLog::new();
        log.observe(Box::new(seen.clone()));
        log.entering(|| Some(1));
        log.left(|| ExitCause::Kick);
        seen.wants.store(true, Ordering::Relaxed);
        log.entering(|| Some(2));
        assert_eq!(told(&seen), []);
        log.left(|| ExitCause::Kick);
        seen.wants.store(false, Ordering::Relaxed);
        log.entering(|| Some(3));
        assert_eq!(told(&seen), [(3, ExitCause::Kick)]);
    }

    #[test]
    fn without_an_observer_nothing_is_looked_at() {
        let mut log = ExitLog::new();
        log.entering(|| unreachable!("no clock is read"));
        log.left(|| unreachable!("no cause is found"));
        log.over(|| unreachable!("no clock is read"));
    }
}
