//! Nanoseconds per entry record, beside a bare clock read in the same run.
#![allow(unsafe_code, reason = "runs machine code in this process")]

#[cfg(target_arch = "x86_64")]
#[path = "../tests/common/mod.rs"]
mod common;

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!(
        "riscv64 runs emulated here, where nanoseconds mean nothing: see its instruction count"
    );
}

#[cfg(target_arch = "x86_64")]
fn main() {
    use common::FakeGuest;
    use common::arch::Addressing;
    use std::time::Instant;
    use vmtrace_trampolines::Overflow;

    const HITS: u32 = 8000;
    const ROUNDS: usize = 2001;

    fn nanoseconds(mut hit: impl FnMut()) -> f64 {
        let start = Instant::now();
        for _ in 0..HITS {
            hit();
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(HITS)
    }
    fn median(figures: &mut [f64]) -> f64 {
        figures.sort_by(f64::total_cmp);
        figures[figures.len() / 2]
    }

    let variants = [
        ("per-cpu, drop", Addressing::PerCpu, Overflow::Drop),
        ("per-cpu, overwrite", Addressing::PerCpu, Overflow::Overwrite),
        ("shared, drop", Addressing::Shared, Overflow::Drop),
    ];
    let guests: Vec<_> = variants
        .iter()
        .map(|&(_, addressing, overflow)| {
            let guest = FakeGuest::new(1, 1 << 20, addressing, overflow);
            guest.set_current(0, 1);
            guest
        })
        .collect();
    let mut tails: Vec<_> = guests.iter().map(|guest| guest.rings[0].start()).collect();
    let mut clock = Vec::new();
    let mut figures = vec![Vec::new(); variants.len()];
    // Interleaved, so that a noisy neighbour hits all alike.
    for _ in 0..ROUNDS {
        clock.push(nanoseconds(|| {
            // SAFETY: rdtsc has no preconditions.
            std::hint::black_box(unsafe { core::arch::x86_64::_rdtsc() });
        }));
        for (index, guest) in guests.iter().enumerate() {
            guest.run_on(0);
            figures[index].push(nanoseconds(|| guest.hit(0)));
            if variants[index].2 == Overflow::Drop {
                guest.drain(0, &mut tails[index], |_| ());
                assert_eq!(guest.dropped(0), 0, "the figure would be that of the full path");
            }
        }
    }
    let clock = median(&mut clock);
    println!("{:<32} {clock:>7.2} ns", "bare clock read (rdtsc)");
    for (figures, (name, ..)) in figures.iter_mut().zip(variants) {
        let figure = median(figures);
        println!(
            "{:<32} {figure:>7.2} ns   ratio {:.2}",
            format!("record, {name}"),
            figure / clock
        );
    }
}
