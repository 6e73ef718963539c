//! Runs every fuzz target on stable Rust: the inputs in `fuzz/seeds`, the target's own seeds, then
//! random mutations of these for a bounded time.
//!
//! `VMTRACE_FUZZ_SECONDS` is the time for each target, and `VMTRACE_FUZZ_INPUTS` the largest number of inputs.
//! `VMTRACE_FUZZ_SEED` is the seed of the random numbers: the same seed gives the same inputs in the same
//! order. Without any of these the inputs are the same few every time, since a suite must not fail at random;
//! `scripts/fuzz` looks for more. A failing input is written to `VMTRACE_FUZZ_KEEP`, or to the folder for
//! temporary files. With `VMTRACE_FUZZ_TRACE` every input is written there before it runs, to find one that
//! kills the process or never returns.

use peak_alloc::PeakAlloc;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use vmtrace_targets::{Target, find};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Longest input that is made here, bytes.
const LONGEST: usize = 2048;
/// What a run of one input may hold at once. (The largest kernels of the targets are far below.)
const MOST_MEMORY: usize = 1 << 30;
/// An input that takes longer has no end. Runs take milliseconds.
const HANG: Duration = Duration::from_secs(120);
/// Without another wish.
const SECONDS: u64 = 2;
const INPUTS: u64 = 200;
const SEED: u64 = 1;
/// Inputs that are remembered to be changed again.
const POOL: usize = 512;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text:?}")))
}

/// Files of the folder, in the order of their names.
fn kept(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../seeds").join(name);
    let Ok(files) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = files.map(|file| file.expect("readable").path()).collect();
    files.sort();
    let read = |path: PathBuf| (path.clone(), std::fs::read(path).expect("readable"));
    files.into_iter().map(read).collect()
}

/// The input that is being run, since when.
type Current = Arc<Mutex<Option<(Instant, Vec<u8>)>>>;

/// Says which input has no end, since nothing else would.
fn watch(current: &Current, target: Target) {
    let current = Arc::downgrade(current);
    std::thread::spawn(move || {
        while let Some(current) = current.upgrade() {
            if let Some((since, input)) = &*current.lock().expect("no panic while held")
                && since.elapsed() > HANG
            {
                let file = keep(target, input);
                eprintln!("{}: an input takes more than {HANG:?}: {}", target.name, file.display());
                std::process::abort();
            }
            drop(current);
            std::thread::sleep(Duration::from_millis(200));
        }
    });
}

fn keep(target: Target, input: &[u8]) -> PathBuf {
    let folder =
        std::env::var_os("VMTRACE_FUZZ_KEEP").map_or_else(std::env::temp_dir, PathBuf::from);
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let file = folder.join(format!("{}-{hash:016x}", target.name));
    if let Err(error) = std::fs::write(&file, input) {
        eprintln!("{}: {error}", file.display());
    }
    file
}

fn fuzz(name: &str) {
    let target = find(name).expect("a target");
    let wished = number("VMTRACE_FUZZ_SECONDS");
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let chosen = wished.map_or(SEED, |_| u64::try_from(clock.as_micros()).unwrap_or(0));
    let seed = number("VMTRACE_FUZZ_SEED").unwrap_or(chosen);
    let time = Duration::from_secs(wished.unwrap_or(SECONDS));
    let most = number("VMTRACE_FUZZ_INPUTS").unwrap_or(wished.map_or(INPUTS, |_| u64::MAX));
    let trace = std::env::var_os("VMTRACE_FUZZ_TRACE").map(PathBuf::from);
    let current = Current::default();
    watch(&current, target);
    let run = |input: &[u8], what: &str| {
        if let Some(file) = &trace {
            std::fs::write(file, input).expect("writable");
        }
        *current.lock().expect("no panic while held") = Some((Instant::now(), input.to_vec()));
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let done = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
        let held = MEMORY.peak_usage().saturating_sub(before);
        *current.lock().expect("no panic while held") = None;
        let failed = |why: &str| {
            let file = keep(target, input);
            eprintln!("{name}: {what} {why}: {} (VMTRACE_FUZZ_SEED={seed})", file.display());
        };
        if let Err(panic) = done {
            failed("fails");
            resume_unwind(panic);
        }
        if held > MOST_MEMORY {
            failed("takes too much memory");
            panic!("{held} bytes at once");
        }
    };

    for (path, input) in kept(name) {
        run(&input, &path.display().to_string());
    }
    let mut pool = (target.seeds)();
    for seed in &pool {
        run(seed, "a seed");
    }
    let start = Instant::now();
    let mut chance = SmallRng::seed_from_u64(seed);
    let mut count = 0_u64;
    while count < most && start.elapsed() < time {
        let input = next(&mut chance, &pool);
        run(&input, &format!("input {count}"));
        count += 1;
        // There is no coverage to go by: what came last is as good as any.
        if pool.len() < POOL {
            pool.push(input);
        } else {
            pool[chance.random_range(0..POOL)] = input;
        }
    }
    println!("{name}: {count} inputs in {:.1?}, VMTRACE_FUZZ_SEED={seed}", start.elapsed());
}

/// Bytes of chance, or something from the pool with a few changes.
fn next(chance: &mut SmallRng, pool: &[Vec<u8>]) -> Vec<u8> {
    if pool.is_empty() || chance.random_ratio(1, 3) {
        let most = 1 << chance.random_range(0..12);
        return (0..chance.random_range(1..=most)).map(|_| chance.random()).collect();
    }
    let mut input = pool[chance.random_range(0..pool.len())].clone();
    for _ in 0..chance.random_range(1..=6) {
        change(chance, &mut input, pool);
    }
    input.truncate(LONGEST);
    input
}

fn change(chance: &mut SmallRng, input: &mut Vec<u8>, pool: &[Vec<u8>]) {
    let at = chance.random_range(0..=input.len());
    match chance.random_range(0..7) {
        // A piece of another.
        0 => {
            let other = &pool[chance.random_range(0..pool.len())];
            let from = chance.random_range(0..=other.len());
            let to = chance.random_range(from..=other.len());
            input.splice(at..at, other[from..to].iter().copied());
        }
        // A piece of itself less.
        1 => drop(input.drain(at..at + chance.random_range(0..=(input.len() - at).min(32)))),
        // A number that is at some limit.
        2 => {
            const LIMITS: [u64; 8] = [0, 1, 0x7f, 0xff, 0x8000, 0xffff, 1 << 31, u64::MAX];
            let value = LIMITS[chance.random_range(0..LIMITS.len())].to_le_bytes();
            let len = 1 << chance.random_range(0..4);
            for (to, from) in input.iter_mut().skip(at).zip(&value[..len]) {
                *to = *from;
            }
        }
        3 => input.insert(at, chance.random()),
        4 => {
            if let Some(byte) = input.get_mut(at) {
                *byte ^= 1 << chance.random_range(0..8);
            }
        }
        5 => {
            if let Some(byte) = input.get_mut(at) {
                *byte = byte.wrapping_add_signed(chance.random_range(-16..=16));
            }
        }
        _ => {
            if let Some(byte) = input.get_mut(at) {
                *byte = chance.random();
            }
        }
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            fuzz(stringify!($name));
        })*

        // One that is not run here is not run at all.
        #[test]
        fn all_targets_are_run() {
            let here = [$(stringify!($name)),*];
            assert!(vmtrace_targets::TARGETS.iter().map(|target| target.name).eq(here));
        }
    };
}

targets! {
    agent arguments blk btf command_line convert epilogues exits guest host_wire image initramfs kallsyms module_file
    modules request ring sites stream_reader values vsock walk
}
