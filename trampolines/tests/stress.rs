//! Tasks, interrupts, preemption and migration against one another, for real.
//!
//! Threads that share a fake CPU are pinned to one processor, so that they preempt
//! each other at any instruction as tasks do, and a signal comes as an interrupt:
//! it hits sites itself (nesting), and it moves the interrupted thread to the
//! other CPU in the middle of a trampoline.
#![allow(unsafe_code, reason = "signals, affinity, gs")]

mod common;

use common::FakeGuest;
use common::arch::{ADDRESSINGS, Addressing, handler};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmtrace_trampolines::Overflow;

static GUEST: OnceLock<FakeGuest> = OnceLock::new();
static HITS: AtomicU64 = AtomicU64::new(0);
static SIGNALS: AtomicU64 = AtomicU64::new(0);
static MIGRATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CPU: Cell<u64> = const { Cell::new(0) };
    static RANDOM: Cell<u64> = const { Cell::new(1) };
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
    assert_eq!(result, 0);
    // Only now is this thread on that processor: what it takes for its CPU and the
    // processor change together as far as anyone else on either of them can tell.
    GUEST.get().unwrap().run_on(cpu);
    CPU.set(cpu);
}

extern "C" fn interrupt(_: i32) {
    let guest = GUEST.get().unwrap();
    SIGNALS.fetch_add(1, Ordering::Relaxed);
    for _ in 0..random() % 4 {
        guest.hit(random());
        HITS.fetch_add(1, Ordering::Relaxed);
    }
    if random().is_multiple_of(4) {
        MIGRATIONS.fetch_add(1, Ordering::Relaxed);
        run_on((CPU.get() + 1) % guest.cpus);
    }
}

fn stress(addressing: Addressing) {
    let guest = GUEST.get_or_init(|| FakeGuest::new(2, 1 << 16, addressing, Overflow::Drop));
    let stop = AtomicBool::new(false);
    // SAFETY: the handler only touches atomics, thread locals without destructors,
    // and async-signal-safe system calls.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handler(interrupt);
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR1, &raw const action, core::ptr::null_mut());
    }
    let mut records: HashMap<u32, u64> = HashMap::new();
    let mut drained = 0_u64;
    std::thread::scope(|scope| {
        let mut tasks = Vec::new();
        for task in 0..6_u64 {
            let stop = &stop;
            tasks.push(scope.spawn(move || {
                RANDOM.set(task * 7919 + 1);
                run_on(task % 2);
                guest.set_current(task % 2, 1);
                // SAFETY: no preconditions.
                SENDER.lock().unwrap().push(unsafe { libc::pthread_self() });
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..64 {
                        guest.hit(random());
                        HITS.fetch_add(1, Ordering::Relaxed);
                    }
                }
                // Stay alive while signals may still be sent.
                while SENDING.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
            }));
        }
        let start = Instant::now();
        // A machine under load sends fewer signals a second.
        let enough = || {
            let (signals, migrations) =
                (SIGNALS.load(Ordering::Relaxed), MIGRATIONS.load(Ordering::Relaxed));
            start.elapsed() > Duration::from_secs(4) && signals > 2000 && migrations > 200
        };
        let mut tails: Vec<_> =
            guest.rings.iter().map(vmtrace_trampolines::layout::Ring::start).collect();
        let drain = |tails: &mut Vec<u64>, records: &mut HashMap<u32, u64>, drained: &mut u64| {
            for cpu in 0..guest.cpus {
                guest.drain(cpu, &mut tails[usize::try_from(cpu).unwrap()], |record| {
                    *records.entry(record.common.site).or_default() += 1;
                    *drained += 1;
                });
            }
        };
        while !enough() && start.elapsed() < Duration::from_secs(60) {
            for &thread in SENDER.lock().unwrap().iter() {
                // SAFETY: these threads live until SENDING is false.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            }
            std::thread::sleep(Duration::from_micros(300));
            drain(&mut tails, &mut records, &mut drained);
        }
        stop.store(true, Ordering::Relaxed);
        SENDING.store(false, Ordering::Release);
        tasks.into_iter().for_each(|task| task.join().unwrap());
        for _ in 0..4 {
            drain(&mut tails, &mut records, &mut drained);
        }
        for (cpu, tail) in (0..guest.cpus).zip(&tails) {
            assert_eq!(*tail, guest.head(cpu), "no record left unpublished");
        }
    });
    let dropped: u64 = (0..guest.cpus).map(|cpu| guest.dropped(cpu)).sum();
    let hits = HITS.load(Ordering::Relaxed);
    let (signals, migrations) =
        (SIGNALS.load(Ordering::Relaxed), MIGRATIONS.load(Ordering::Relaxed));
    println!(
        "{hits} hits, {drained} drained, {dropped} dropped, {signals} signals, {migrations} migrations"
    );
    assert!(signals > 1000 && migrations > 100, "the test did not test");
    assert_eq!(drained + dropped, hits, "a record was lost or made twice");
    let known: Vec<_> = (0..FakeGuest::SITES).map(|site| guest.function(site)).collect();
    assert!(records.keys().all(|function| known.contains(function)), "a torn record");
}

static SENDER: std::sync::Mutex<Vec<libc::pthread_t>> = std::sync::Mutex::new(Vec::new());
static SENDING: AtomicBool = AtomicBool::new(true);

#[test]
fn nothing_is_lost_or_torn_under_interrupts_preemption_and_migration() {
    stress(ADDRESSINGS[0]);
}
