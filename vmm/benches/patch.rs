//! The time to hold and give back every site of a kernel, for which a guest waits. Needs the
//! kernels of `scripts/setup`.
//!
//! `cargo bench -p vmtrace --bench patch`; an item is a site. `look` is the lower bound: it reads all
//! of them once. `hold_exits` and `make_stubs` (x86-64) do the same for the exits of all functions; an
//! item is an exit.

#[path = "../tests/fake_guest/mod.rs"]
mod fake_guest;

use divan::Bencher;
use divan::counter::ItemsCount;
use fake_guest::Fake;
use std::cell::RefCell;
use std::hint::black_box;
use vmtrace::kernel::ExitKind;
use vmtrace::session::{Plan, Tracer, Tracing};
use vmtrace::tracer::{Attachment, Duty, ExitPlan, Guest};
use vmtrace_trampolines::{Field, Overflow, Point};

const KERNELS: [&str; 3] = ["x86_64-6.12", "riscv64-6.12", "riscv64-7"];
/// Those whose exits become jumps to stubs that are made when they are asked for.
const EXIT_KERNELS: [&str; 1] = ["x86_64-6.12"];
/// Those whose exits are rewritten at the attach moment.
const REWRITTEN_KERNELS: [&str; 2] = ["riscv64-6.12", "riscv64-7"];

fn main() {
    divan::main();
}

fn fake(name: &str) -> (Fake, Vec<usize>) {
    let fake = Fake::quiet(name);
    let sites = fake.all();
    (fake, sites)
}

/// A guest of whose kernel all is parsed that a session parses before the guest runs.
fn parsed(name: &str) -> Fake {
    let fake = Fake::quiet(name);
    fake.kernel.check_traceable().unwrap();
    fake
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

/// A guest that has patched its alternatives, on processors that need no return thunk, and all its
/// exits with their programs.
fn settled(name: &str) -> (Fake, Attachment, Vec<(usize, u16)>) {
    let (fake, sites) = fake(name);
    let exits = fake.kernel.exits().unwrap().all();
    for exit in exits.iter().filter(|exit| matches!(exit.kind, ExitKind::Return)) {
        fake.write(fake.at(exit.address), &[0xc3, 0xcc, 0xcc, 0xcc, 0xcc]).unwrap();
    }
    fake.write(fake.symbol("alternatives_patched"), &1_u32.to_le_bytes()).unwrap();
    let mut attachment = fake.attach();
    attachment.settle(&fake, &fake.kernel).unwrap();
    let mut tracing = Tracing::of(sites, Overflow::Drop);
    tracing.tracers.iter_mut().flatten().for_each(|tracer: &mut Tracer| tracer.graph = true);
    let plan = Plan::of(&tracing, exits);
    let program = |duty| attachment.program(&fake, &fake.kernel, duty).unwrap();
    let programs: Vec<u16> = plan.duties.iter().map(program).collect();
    let exits = plan.exits.iter().map(|&(exit, duty)| (exit, programs[duty as usize])).collect();
    (fake, attachment, exits)
}

/// Makes the stubs of these exits; those that can have one.
fn stubs(fake: &Fake, attachment: &mut Attachment, exits: &[(usize, u16)]) -> Vec<(usize, u16)> {
    let words = attachment.stubs(fake, &fake.kernel, exits).unwrap();
    exits.iter().zip(words).filter_map(|(&exit, word)| word.map(|_| exit)).collect()
}

/// As tracing with returns begins, beside [`hold`]; the stubs are there.
#[divan::bench(args = EXIT_KERNELS, sample_count = 40, sample_size = 1)]
fn hold_exits(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, mut attachment, exits) = settled(name);
    let exits = stubs(&fake, &mut attachment, &exits);
    let indices: Vec<usize> = exits.iter().map(|&(exit, _)| exit).collect();
    let attachment = RefCell::new(attachment);
    bencher
        .counter(ItemsCount::new(exits.len()))
        .with_inputs(|| attachment.borrow_mut().disable_exits(&fake, &indices).unwrap())
        .bench_local_values(|_| {
            let mut attachment = attachment.borrow_mut();
            let skipped = attachment.enable_exits(&fake, &fake.kernel, &exits).unwrap();
            assert_eq!(skipped, []);
        });
}

/// Before that, and once for every exit and program.
#[divan::bench(args = EXIT_KERNELS, sample_count = 8, sample_size = 1)]
fn make_stubs(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, mut attachment, exits) = settled(name);
    let count = stubs(&fake, &mut attachment, &exits).len();
    // A guest that has none yet, each time.
    bencher.counter(ItemsCount::new(count)).with_inputs(|| settled(name)).bench_local_values(
        |(fake, mut attachment, exits)| {
            assert_eq!(stubs(&fake, &mut attachment, &exits).len(), count);
            (fake, attachment)
        },
    );
}

/// What attaching takes with all exits, which are rewritten then, beside [`attach`].
#[divan::bench(args = REWRITTEN_KERNELS, sample_count = 6, sample_size = 1)]
fn rewrite(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, sites) = fake(name);
    let count = fake.kernel.exits().unwrap().all().len();
    let guest = || {
        let fake = parsed(name);
        let plan = ExitPlan::new(&fake.kernel, &sites, false).unwrap();
        (fake, plan)
    };
    bencher.counter(ItemsCount::new(count)).with_inputs(guest).bench_local_values(
        |(fake, plan)| {
            let attachment = fake.try_attach_with(&plan).unwrap();
            (fake, plan, attachment)
        },
    );
}

/// What is made for that before the guest runs.
#[divan::bench(args = REWRITTEN_KERNELS, sample_count = 6, sample_size = 1)]
fn plan_rewrites(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, sites) = fake(name);
    let count = fake.kernel.exits().unwrap().all().len();
    fake.kernel.epilogues().unwrap();
    bencher
        .counter(ItemsCount::new(count))
        .bench_local(|| ExitPlan::new(&fake.kernel, &sites, false).unwrap());
}

/// The exits that are rewritten, held: one word of each stub.
#[divan::bench(args = REWRITTEN_KERNELS, sample_count = 40, sample_size = 1)]
fn hold_rewritten(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, sites) = fake(name);
    let mut attachment = fake.try_attach_for(&sites).unwrap();
    let duty = Duty::new(Point::Return, vec![0], &[Field::Stack]);
    let program = attachment.program(&fake, &fake.kernel, &duty).unwrap();
    let all: Vec<_> =
        (0..fake.kernel.exits().unwrap().all().len()).map(|exit| (exit, program)).collect();
    // Some have none: their function is left out as a whole.
    let stubs = attachment.stubs(&fake, &fake.kernel, &all).unwrap();
    let exits: Vec<_> =
        all.into_iter().zip(stubs).filter_map(|(exit, stub)| stub.map(|_| exit)).collect();
    let indices: Vec<usize> = exits.iter().map(|&(exit, _)| exit).collect();
    let attachment = RefCell::new(attachment);
    bencher
        .counter(ItemsCount::new(exits.len()))
        .with_inputs(|| attachment.borrow_mut().disable_exits(&fake, &indices).unwrap())
        .bench_local_values(|_| {
            let mut attachment = attachment.borrow_mut();
            assert_eq!(attachment.enable_exits(&fake, &fake.kernel, &exits).unwrap(), []);
        });
}

/// What every site and every exit has to do, for one tracer of all: nobody waits for it.
#[divan::bench(args = EXIT_KERNELS, sample_count = 40, sample_size = 1)]
fn plan(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, sites) = fake(name);
    let exits = fake.kernel.exits().unwrap().all();
    let mut tracing = Tracing::of(sites, Overflow::Drop);
    tracing.tracers.iter_mut().flatten().for_each(|tracer| tracer.graph = true);
    bencher.counter(ItemsCount::new(exits.len())).bench_local(|| Plan::of(&tracing, exits));
}

/// What it takes without.
#[divan::bench(args = REWRITTEN_KERNELS, sample_count = 6, sample_size = 1)]
fn attach(bencher: Bencher<'_, '_>, name: &str) {
    bencher.with_inputs(|| parsed(name)).bench_local_values(|fake| {
        let attachment = fake.attach();
        (fake, attachment)
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

/// What the self-test adds to a pause: one site, held and given back.
#[divan::bench(args = KERNELS, sample_count = 40, sample_size = 1)]
fn self_test(bencher: Bencher<'_, '_>, name: &str) {
    let (fake, sites) = fake(name);
    let mut attachment = fake.attach();
    let program = attachment.program(&fake, &fake.kernel, &Duty::entry(vec![0])).unwrap();
    let (stack, trap) = (fake.link("init_task") + 64, [0x13, 0, 0, 0, 0x13, 0, 0, 0]);
    bencher.bench_local(|| {
        let from = [stack, stack];
        let (kernel, place) = (&fake.kernel, (sites[7], program));
        let test = attachment.begin_self_test(&fake, kernel, place, &trap, from).unwrap().unwrap();
        attachment.end_self_test(&fake, kernel, &test, None).unwrap();
    });
}
