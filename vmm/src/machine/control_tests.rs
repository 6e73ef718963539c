//! Tests with threads that do what vCPU threads do, but for entering a guest.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use super::*;
use crate::machine::signal;

const SHORT: Duration = Duration::from_millis(200);

struct Fake {
    control: Arc<Control>,
    events: Receiver<Event>,
    /// How often each thread has "run the guest".
    turns: Arc<Vec<AtomicUsize>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Life {
    Good,
    /// Panics on its third turn.
    Dies,
    /// Does not look at the control for two seconds on its third turn.
    Sleeps,
    /// Hits a trap on its third turn.
    Traps,
}

fn fake(lives: &[Life]) -> Fake {
    signal::install().unwrap();
    let (sender, events) = channel();
    let control = Arc::new(Control::new(lives.len(), false, sender, SHORT));
    let turns: Arc<Vec<_>> = Arc::new(lives.iter().map(|_| AtomicUsize::new(0)).collect());
    let threads = lives.iter().copied().enumerate();
    let threads = threads.map(|(id, life)| {
        let (control, turns) = (Arc::clone(&control), Arc::clone(&turns));
        std::thread::spawn(move || live(id, life, &control, &turns[id]))
    });
    let threads = threads.collect();
    Fake { control, events, turns, threads }
}

fn live(id: usize, life: Life, control: &Control, turns: &AtomicUsize) {
    let registration = control.register(id);
    loop {
        if control.attention() && control.checkpoint(id) == Go::End {
            break;
        }
        let turn = turns.fetch_add(1, Ordering::SeqCst);
        // "In the guest": a kick ends the sleep, as it does in KVM_RUN.
        std::thread::sleep(Duration::from_micros(100));
        match life {
            Life::Dies if turn == 3 => panic!("for the test"),
            Life::Sleeps if turn == 3 => std::thread::sleep(Duration::from_secs(2)),
            Life::Traps if turn == 3 => {
                control.hold(id, Event::Trap { vcpu: id, address: 7 });
                if control.checkpoint(id) == Go::End {
                    break;
                }
            }
            _ => {}
        }
    }
    registration.finish();
}

impl Fake {
    fn wait(&self, id: usize, turn: usize) {
        while self.turns[id].load(Ordering::SeqCst) < turn {
            std::thread::yield_now();
        }
    }

    fn all(&self) -> Vec<usize> {
        self.turns.iter().map(|turns| turns.load(Ordering::SeqCst)).collect()
    }

    fn end(self) {
        assert!(self.control.stop().is_empty());
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn a_pause_stops_all_and_a_resume_starts_all() {
    let fake = fake(&[Life::Good; 4]);
    for round in 1..100 {
        (0..4).for_each(|id| fake.wait(id, round));
        fake.control.pause().unwrap();
        assert!(matches!(fake.control.pause(), Err(MachineError::AlreadyPaused)));
        let before = fake.all();
        std::thread::sleep(Duration::from_micros(300));
        assert_eq!(fake.all(), before);
        fake.control.resume();
    }
    fake.end();
}

#[test]
fn machines_that_have_not_started_can_be_paused() {
    let (sender, _events) = channel();
    let control = Control::new(2, false, sender, SHORT);
    control.pause().unwrap();
    control.resume();
    assert!(control.stop().is_empty());
}

#[test]
fn a_held_vcpu_counts_as_stopped_and_waits_for_its_release() {
    let fake = fake(&[Life::Good, Life::Traps]);
    assert_eq!(fake.events.recv().unwrap(), Event::Trap { vcpu: 1, address: 7 });
    fake.control.pause().unwrap();
    fake.control.resume();
    fake.wait(0, fake.all()[0] + 10);
    assert_eq!(fake.all()[1], 4);
    // released within a pause it goes on after it
    fake.control.pause().unwrap();
    fake.control.release(1).unwrap();
    assert!(matches!(fake.control.release(1), Err(MachineError::NotParked(1))));
    assert!(matches!(fake.control.release(2), Err(MachineError::NoVcpu(2))));
    std::thread::sleep(Duration::from_millis(1));
    assert_eq!(fake.all()[1], 4);
    fake.control.resume();
    fake.wait(1, 10);
    fake.end();
}

#[test]
fn a_dead_thread_is_an_error_not_a_hang() {
    let fake = fake(&[Life::Good, Life::Dies]);
    let event = fake.events.recv().unwrap();
    assert!(matches!(event, Event::Exit(ExitReason::InternalError(_))), "{event:?}");
    assert!(matches!(fake.control.pause(), Err(MachineError::VcpuDied(1))));
    assert!(fake.control.stop().is_empty());
}

#[test]
fn a_stuck_thread_is_an_error_not_a_hang() {
    let fake = fake(&[Life::Good, Life::Sleeps]);
    fake.wait(1, 4);
    std::thread::sleep(Duration::from_millis(20));
    match fake.control.pause() {
        Err(MachineError::PauseTimeout { vcpus, .. }) => assert_eq!(vcpus, [1]),
        other => panic!("{other:?}"),
    }
    // the others go on
    fake.wait(0, fake.all()[0] + 10);
    assert_eq!(fake.control.stop(), [1]);
}

#[test]
fn after_an_exit_nobody_runs_but_pauses_work() {
    let fake = fake(&[Life::Good; 3]);
    fake.wait(2, 5);
    assert!(fake.control.exit());
    assert!(!fake.control.exit());
    fake.control.announce(ExitReason::PowerOff);
    assert_eq!(fake.events.recv().unwrap(), Event::Exit(ExitReason::PowerOff));
    fake.control.pause().unwrap();
    let before = fake.all();
    fake.control.resume();
    std::thread::sleep(Duration::from_millis(1));
    assert_eq!(fake.all(), before);
    fake.end();
}

#[test]
fn traps_are_a_set() {
    let (sender, _events) = channel();
    let control = Control::new(1, true, sender, SHORT);
    assert!(control.set_trap(7, true));
    assert!(!control.set_trap(7, true));
    assert!(control.is_armed(7) && !control.is_armed(8));
    assert!(control.set_trap(7, false));
    assert!(!control.set_trap(7, false));
    assert!(!control.is_armed(7));
    assert!(control.take_watch());
    assert!(!control.take_watch());
}
