//! Instructions an event, under icount.

use super::{call_getppid, mark, now, set};
use anyhow::Result;
use vmtrace_tests::arch::{SYSCALL, spin};

/// Nanoseconds of `body`, the median of many runs: the relay and interrupts take
/// some of them.
fn median(mut body: impl FnMut()) -> f64 {
    let mut figures: Vec<i64> = (0..51)
        .map(|_| {
            let start = now(libc::CLOCK_MONOTONIC);
            body();
            now(libc::CLOCK_MONOTONIC) - start
        })
        .collect();
    figures.sort_unstable();
    f64::from(i32::try_from(figures[figures.len() / 2]).unwrap_or(i32::MAX))
}

/// A clock that counts instructions.
struct Meter {
    /// Nanoseconds of one.
    instruction: f64,
}

impl Meter {
    fn new() -> Self {
        const LOOP: u32 = 10_000;
        // Two instructions a round: how long is one?
        Self { instruction: median(|| spin(LOOP)) / f64::from(2 * LOOP) }
    }

    /// Instructions of a call of getppid.
    fn per_call(&self) -> f64 {
        const CALLS: u32 = 200;
        let calls = || (0..CALLS).for_each(|_| call_getppid());
        median(calls) / f64::from(CALLS) / self.instruction
    }

    fn kprobe(&self) -> Result<f64> {
        set("kprobe_events", &format!("p:vmtrace_bench {SYSCALL}getppid"))?;
        set("events/kprobes/vmtrace_bench/enable", "1")?;
        self.per_call();
        let kprobe = self.per_call();
        set("events/kprobes/vmtrace_bench/enable", "0")?;
        set("kprobe_events", "")?;
        Ok(kprobe)
    }

    fn function(&self) -> Result<f64> {
        // ftrace knows a function by one of its names only, whichever that is, and tells
        // of a wrong one only when a newline ends it.
        set("set_ftrace_filter", "*sys_getppid\n")?;
        set("current_tracer", "function")?;
        self.per_call();
        let function = self.per_call();
        set("current_tracer", "nop")?;
        set("set_ftrace_filter", "")?;
        Ok(function)
    }
}

/// Small, and filled once before anything is measured: the first touch of a page of its
/// buffer is a fault in the hypervisor, no cost of the tracer.
fn small_buffer() -> Result<()> {
    set("buffer_size_kb", "64")
}

pub(crate) fn bench() -> Result<()> {
    let meter = Meter::new();
    let untraced = meter.per_call();
    small_buffer()?;
    let function = meter.function()?;
    let kprobe = meter.kprobe()?;
    let again = meter.per_call();

    // vmtrace waits for this call: --from the function of getpgid
    mark();
    meter.per_call();
    let vmtrace = meter.per_call();
    println!("bench untraced {untraced:.1}");
    println!("bench untraced-again {again:.1}");
    println!("bench function {:.1}", function - untraced);
    println!("bench kprobe {:.1}", kprobe - untraced);
    println!("bench vmtrace {:.1}", vmtrace - again);
    Ok(())
}
