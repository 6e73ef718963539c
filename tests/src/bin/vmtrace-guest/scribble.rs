//! A guest that writes to the annex, by `/dev/mem`. The annex is in no memory map of the guest, so
//! its kernel allows that.

use super::call_getppid;
use anyhow::{Context, Result, ensure};
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;
use vmtrace::machine::ANNEX_BASE;
use vmtrace::tracer::annex;
use vmtrace_tests::random::Random;

/// Where control blocks are in the annex (vmm/src/tracer/annex.rs), as words.
const CONTROLS: usize = (2 << 20) / 8;
const CONTROLS_END: usize = CONTROLS + CONTROLS_SIZE / 8;
/// On x86-64 they lie as far from each other as the areas of CPUs; behind those of riscv64 there are
/// ops, which are none.
#[cfg(target_arch = "x86_64")]
const CONTROLS_SIZE: usize = 2 << 20;
#[cfg(not(target_arch = "x86_64"))]
const CONTROLS_SIZE: usize = 1 << 20;
/// How often it calls `getppid` before and after [`laps`].
const CALLS: usize = 500;
/// Words that are written between two system calls.
const BURST: usize = 16;

fn map() -> Result<&'static [AtomicU64]> {
    let len = usize::try_from(annex::SIZE)?;
    let memory = OpenOptions::new().read(true).write(true).open("/dev/mem").context("/dev/mem")?;
    // SAFETY: a new mapping at a place of the kernel's choice, which stays.
    let address = unsafe {
        let (rights, at) = (libc::PROT_READ | libc::PROT_WRITE, libc::off_t::try_from(ANNEX_BASE)?);
        let fd = memory.as_raw_fd();
        libc::mmap(std::ptr::null_mut(), len, rights, libc::MAP_SHARED, fd, at)
    };
    ensure!(address != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    // SAFETY: so many bytes are mapped there for good, aligned to a page; any bits are a word.
    Ok(unsafe { slice::from_raw_parts(address.cast(), len / 8) })
}

/// Lets every ring be many laps further than it is: what programs write goes on as before.
pub(crate) fn laps() -> Result<()> {
    const LAPS: u64 = 100 << 32;
    println!("pid {}", std::process::id());
    // What the relay has not read by then is lost: it is given two seconds in which to read some.
    for _ in 0..CALLS / 10 {
        (0..10).for_each(|_| call_getppid());
        thread::sleep(Duration::from_millis(40));
    }
    let controls = map()?.get(CONTROLS..CONTROLS_END).context("a small annex")?;
    let mut moved = 0;
    for control in controls.iter().filter(|word| word.load(Ordering::Relaxed) != 0) {
        control.fetch_add(LAPS, Ordering::Relaxed);
        moved += 1;
    }
    println!("scribbled {moved}");
    (0..CALLS).for_each(|_| call_getppid());
    println!("alive");
    Ok(())
}

/// Says that harm is done from now on. Whoever gives commands at the same time begins to do so.
pub(crate) fn begin() {
    println!("scribbling");
    thread::sleep(Duration::from_secs(2));
}

/// Words anywhere, of any kind, so many; this may be the end of the guest.
pub(crate) fn anywhere(seed: u64, count: usize) -> Result<()> {
    let (annex, mut random) = (map()?, Random::new(seed));
    begin();
    for round in 0..count {
        let word = &annex[random.below(annex.len())];
        match random.below(4) {
            0 => word.store(random.word(), Ordering::Relaxed),
            1 => word.store(random.word() >> random.below(64), Ordering::Relaxed),
            2 => drop(word.fetch_add(1 << random.below(64), Ordering::Relaxed)),
            // What means something elsewhere.
            _ => {
                let other = annex[random.below(annex.len())].load(Ordering::Relaxed);
                word.store(other, Ordering::Relaxed);
            }
        }
        if round % BURST == 0 {
            call_getppid();
        }
    }
    println!("alive");
    Ok(())
}
