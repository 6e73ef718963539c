//! Nanoseconds per record, compared with a bare clock read in the same run.
#![allow(unsafe_code, reason = "runs machine code in this process")]

#[cfg(target_arch = "x86_64")]
mod calls;
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
    use calls::{Calls, DEPTH, Returns};
    use common::arch::Addressing::{PerCpu, Shared};
    use vmtrace_trampolines::Overflow::{Drop, Overwrite};
    use vmtrace_trampolines::{Field, Point, Program};

    const ROUNDS: usize = 2001;
    let record = |point, fields: &[Field]| {
        let fields = fields.to_vec();
        Program { point, fields, ..common::entry_program() }
    };
    let plain = [record(Point::Entry, &[])];
    let three = [record(Point::Entry, &[0, 1, 2].map(Field::Argument))];
    let graph = [record(Point::Entry, &[Field::Stack]), record(Point::Return, &[Field::Stack])];
    let (one, nested) = (1, DEPTH);
    let mut rows = [
        ("record", Calls::new(PerCpu, Drop, &plain, Returns::Plain, one)),
        ("record, overwrite", Calls::new(PerCpu, Overwrite, &plain, Returns::Plain, one)),
        ("record, shared", Calls::new(Shared, Drop, &plain, Returns::Plain, one)),
        ("record, three arguments", Calls::new(PerCpu, Drop, &three, Returns::Plain, one)),
        ("entry and return", Calls::new(PerCpu, Drop, &graph, Returns::Patched, one)),
        (
            "entry and return, overwrite",
            Calls::new(PerCpu, Overwrite, &graph, Returns::Patched, one),
        ),
        ("nested, nothing", Calls::untraced(Returns::Plain, nested)),
        ("nested, hijacked only", Calls::untraced(Returns::Hijacked, nested)),
        ("nested, entries", Calls::new(PerCpu, Drop, &graph, Returns::Plain, nested)),
        ("nested, entries and returns", Calls::new(PerCpu, Drop, &graph, Returns::Patched, nested)),
        ("nested, entries, hijacked", Calls::new(PerCpu, Drop, &graph, Returns::Hijacked, nested)),
    ];
    let mut clock = Vec::new();
    let mut figures = vec![Vec::new(); rows.len()];
    // Interleaved, so that a noisy neighbour hits all alike.
    for _ in 0..ROUNDS {
        clock.push(calls::nanoseconds(|| {
            // SAFETY: rdtsc has no preconditions.
            std::hint::black_box(unsafe { core::arch::x86_64::_rdtsc() });
        }));
        for ((_, calls), figures) in rows.iter_mut().zip(&mut figures) {
            figures.push(calls.time());
        }
    }
    let clock = calls::median(&mut clock);
    println!("{:<32} {clock:>7.2} ns", "bare clock read (rdtsc)");
    for ((name, calls), figures) in rows.iter().zip(&mut figures) {
        let figure = calls::median(figures) / calls.depth() as f64;
        let each = if calls.depth() > 1 { " each" } else { "" };
        let name = format!("{name}{each}");
        println!("{name:<32} {figure:>7.2} ns   ratio {:.2}", figure / clock);
    }
    println!("entry and return are to cost at most 2.4 bare clock reads");
}
