//! Stresses programs with concurrent tasks, interrupts, preemption and migration.
//!
//! Threads that share a fake CPU are pinned to one processor, so that they preempt each other at any
//! instruction as tasks do. A signal stands for an interrupt: its handler hits sites itself
//! (nesting), and moves the interrupted thread to the other CPU in the middle of a program. Threads
//! signal each other, so that even on a slow machine signals arrive at any instruction of the thread
//! on the other processor.

use super::arch::{ADDRESSINGS, ARGUMENTS, Addressing, SIGNALS, handler, ticks};
use super::{FakeGuest, Record, entry_program, registers};
use std::cell::Cell;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use vmtrace_trampolines::{Field, Overflow, Program};

const THREADS: u64 = 6;

/// That of the variant that runs; never freed, since a late signal may find it.
static GUEST: AtomicPtr<FakeGuest> = AtomicPtr::new(core::ptr::null_mut());
static HITS: AtomicU64 = AtomicU64::new(0);
static SIGNALLED: AtomicU64 = AtomicU64::new(0);
static MIGRATED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CPU: Cell<u64> = const { Cell::new(0) };
    static RANDOM: Cell<u64> = const { Cell::new(1) };
}

fn guest() -> &'static FakeGuest {
    // SAFETY: null, or from `Box::leak`.
    unsafe { GUEST.load(Ordering::Acquire).as_ref() }.expect("a variant runs")
}

fn random() -> u64 {
    RANDOM.with(|state| {
        let mut x = state.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        state.set(x);
        x
    })
}

fn run_on(cpu: u64) {
    // SAFETY: a zeroed cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { core::mem::zeroed() };
    // SAFETY: the index is below the size of the set.
    unsafe { libc::CPU_SET(usize::try_from(cpu).unwrap(), &mut set) };
    // SAFETY: a valid set for the calling thread.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    assert_eq!(result, 0, "needs two processors");
    // Only now is this thread on that processor: what it takes for its CPU and the
    // processor change together as far as anyone else on either of them can tell.
    guest().run_on(cpu);
    CPU.set(cpu);
}

/// Arguments by which a record is known to be of one call.
const fn arguments(site: u64) -> [u64; 2] {
    [site, !(site << 32)]
}

/// Returns what a record of it has for its caller.
fn hit() -> u64 {
    let site = random() % FakeGuest::SITES;
    let mut registers = registers(site);
    [registers.x[ARGUMENTS[0]], registers.x[ARGUMENTS[1]]] = arguments(site);
    guest().run(site, &mut registers);
    HITS.fetch_add(1, Ordering::Relaxed);
    registers.back
}

extern "C" fn interrupt(_: i32) {
    SIGNALLED.fetch_add(1, Ordering::Relaxed);
    for _ in 0..random() % 4 {
        hit();
    }
    if random().is_multiple_of(4) {
        MIGRATED.fetch_add(1, Ordering::Relaxed);
        run_on((CPU.get() + 1) % guest().cpus);
    }
}

fn enough() -> bool {
    let signals = SIGNALS / ADDRESSINGS.len() as u64;
    SIGNALLED.load(Ordering::Relaxed) > signals && MIGRATED.load(Ordering::Relaxed) > signals / 8
}

fn work(task: u64, threads: &Mutex<Vec<libc::pthread_t>>, all: &Barrier, caller: &AtomicU64) {
    let guest = guest();
    RANDOM.set(task * 7919 + 1);
    run_on(task % 2);
    guest.set_current(task % 2, 1);
    caller.store(hit(), Ordering::Relaxed);
    // SAFETY: no preconditions.
    threads.lock().unwrap().push(unsafe { libc::pthread_self() });
    all.wait();
    let threads = threads.lock().unwrap().clone();
    while !enough() {
        for _ in 0..64 {
            hit();
        }
        let other = threads[usize::try_from(random() % THREADS).unwrap()];
        // SAFETY: these threads live until they all have met again.
        unsafe { libc::pthread_kill(other, libc::SIGUSR1) };
    }
    all.wait();
}

/// What the first calls have said; a record may be taken before its call has come back to say so.
fn first_caller(caller: &AtomicU64) -> u64 {
    loop {
        match caller.load(Ordering::Relaxed) {
            0 => std::thread::yield_now(),
            known => return known,
        }
    }
}

/// Runs each way in which programs find their CPU until there was enough of everything.
pub(crate) fn stress(overflow: Overflow) {
    for addressing in ADDRESSINGS {
        for count in [&HITS, &SIGNALLED, &MIGRATED] {
            count.store(0, Ordering::Relaxed);
        }
        variant(addressing, overflow);
    }
}

fn variant(addressing: Addressing, overflow: Overflow) {
    let identified = [Field::Argument(0), Field::Argument(1)];
    let programs = [
        Program { fields: identified.to_vec(), ..entry_program() },
        Program {
            number: 8,
            fields: [&identified[..], &[Field::Argument(3); 3]].concat(),
            ..entry_program()
        },
    ];
    let guest = Box::leak(Box::new(FakeGuest::with(2, 1 << 16, addressing, overflow, &programs)));
    (4..FakeGuest::SITES).for_each(|site| guest.call_from(site, 1));
    GUEST.store(guest, Ordering::Release);
    let guest = self::guest();
    // SAFETY: the handler only touches atomics, thread locals without destructors,
    // and async-signal-safe system calls.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handler(interrupt);
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR1, &raw const action, core::ptr::null_mut());
    }
    let (threads, caller) = (Mutex::new(Vec::new()), AtomicU64::new(0));
    let all = Barrier::new(usize::try_from(THREADS).unwrap());
    let start = ticks();
    let mut kept = 0_u64;
    let mut take = |record: &Record| {
        let common = record.common;
        let site = record.fields[0];
        assert_eq!(record.fields[..2], arguments(site), "a torn record");
        assert_eq!(common.site, guest.function(site), "a torn record");
        let program = &programs[usize::from(site >= 4)];
        assert_eq!(record.info().size(), program.size(), "a torn record");
        assert_eq!(record.info().program(), program.number, "another's record");
        assert_eq!(common.pid, 1);
        assert_eq!(u64::from(common.caller), first_caller(&caller) & 0xffff_ffff);
        assert_eq!(record.fields[2..], [site; 3][..if site < 4 { 0 } else { 3 }]);
        assert!((start..=ticks()).contains(&common.timestamp));
        kept += 1;
    };
    std::thread::scope(|scope| {
        let tasks: Vec<_> = (0..THREADS)
            .map(|task| {
                let (threads, all, caller) = (&threads, &all, &caller);
                scope.spawn(move || work(task, threads, all, caller))
            })
            .collect();
        let mut tails: Vec<_> = guest.rings.iter().map(|ring| ring.start()).collect();
        while overflow == Overflow::Drop && !tasks.iter().all(|task| task.is_finished()) {
            for (cpu, tail) in (0..).zip(&mut tails) {
                guest.drain(cpu, tail, |record| take(&record));
            }
            std::thread::yield_now();
        }
        tasks.into_iter().for_each(|task| task.join().unwrap());
        for (cpu, tail) in (0..).zip(&mut tails).filter(|_| overflow == Overflow::Drop) {
            guest.drain(cpu, tail, |record| take(&record));
            assert_eq!(*tail, guest.head(cpu), "no record left unpublished");
        }
    });
    if overflow == Overflow::Overwrite {
        for cpu in 0..guest.cpus {
            guest.recorded(cpu).iter().for_each(&mut take);
        }
    }
    let sum = |count: &dyn Fn(u64) -> u64| (0..guest.cpus).map(count).sum::<u64>();
    let lost = sum(&|cpu| guest.dropped(cpu)) + sum(&|cpu| guest.overwritten(cpu));
    let hits = HITS.load(Ordering::Relaxed);
    println!(
        "{addressing:?}, {overflow:?}: {hits} hits, {kept} kept, {lost} lost, {} signals, {} migrations",
        SIGNALLED.load(Ordering::Relaxed),
        MIGRATED.load(Ordering::Relaxed)
    );
    assert!(kept > 100, "the test did not test");
    assert_eq!(kept + lost, hits, "a record was lost or made twice");
}
