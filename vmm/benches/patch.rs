//! Every site of a kernel, held and given back: what a guest waits for. Needs the kernels of
//! `scripts/setup`.
//!
//! `cargo bench -p vmtrace --bench patch`; an item is a site. `look` is the floor: all
//! of them read once.

#[path = "../tests/fake_guest/mod.rs"]
mod fake_guest;

use divan::Bencher;
use divan::counter::ItemsCount;
use fake_guest::Fake;
use std::cell::RefCell;
use std::hint::black_box;
use vmtrace::tracer::Guest;

const KERNELS: [&str; 3] = ["x86_64-6.12", "riscv64-6.12", "riscv64-7"];

fn main() {
    divan::main();
}

fn fake(name: &str) -> (Fake, Vec<usize>) {
    let fake = Fake::quiet(name);
    let sites = fake.all();
    (fake, sites)
}

/// As tracing begins.
#[divan::bench(args = KERNELS, sample_count = 40, sample_size = 1)]
fn hold(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, sites) = fake(name);
    let attachment = RefCell::new(fake.attach());
    bencher
        .counter(ItemsCount::new(sites.len()))
        .with_inputs(|| attachment.borrow_mut().disable(&fake, &sites).unwrap())
        .bench_local_values(|_| {
            let report = fake.enable(&mut attachment.borrow_mut(), &sites).unwrap();
            assert_eq!(report.patched, sites.len());
        });
}

/// As it ends.
#[divan::bench(args = KERNELS, sample_count = 40, sample_size = 1)]
fn give_back(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, sites) = fake(name);
    let attachment = RefCell::new(fake.attach());
    bencher
        .counter(ItemsCount::new(sites.len()))
        .with_inputs(|| fake.enable(&mut attachment.borrow_mut(), &sites).unwrap())
        .bench_local_values(|_| {
            let restored = attachment.borrow_mut().disable(&fake, &sites).unwrap();
            assert_eq!(restored.sites, sites.len());
        });
}

/// A look at every site.
#[divan::bench(args = KERNELS, sample_count = 40, sample_size = 1)]
fn look(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, sites) = fake(name);
    let places: Vec<_> = sites.iter().map(|&site| fake.extent(site)).collect();
    let mut bytes = [0; 16];
    bencher.counter(ItemsCount::new(sites.len())).bench_local(|| {
        for &(link, len) in &places {
            fake.read(fake.at(link), &mut bytes[..len]).unwrap();
            black_box(&mut bytes);
        }
    });
}
