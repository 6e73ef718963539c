//! A guest that changes whatever it can, before and between the tracer's operations. It is a real
//! kernel's image in plain memory. The input writes arbitrary words at arbitrary times to its
//! sites, records of ftrace, page tables, variables and annex.
//!
//! The tracer may refuse anything, but it must terminate. It may write a byte of the guest only if
//! it wrote that byte last, or if it verified the byte's value before (`Watched::allowed`).
//! Whatever it reports as given back must be given back.

#[path = "../../../vmm/tests/fake_guest/mod.rs"]
mod fake_guest;

use crate::input::Input;
use fake_guest::{DISABLED, Fake, MAP, riscv64};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use vm_memory::Bytes;
use vmtrace::kernel::{Arch, SiteSection};
use vmtrace::tracer::annex::{self, Memory};
use vmtrace::tracer::ring::RingReader;
use vmtrace::tracer::{
    Attachment, Duty, ExitPlan, Guest, GuestError, Options, Part, RawBatch, Tasks, Tripwire,
};
use vmtrace_trampolines::{Condition, Field, Overflow, Point};

/// One kernel for each way to call programs.
const KERNELS: [&str; 3] = ["x86_64-6.12", "riscv64-6.12", "riscv64-7"];
const SITES: usize = 40;
const STEPS: usize = 64;
/// As many records as the rings of the annex could hold.
const MOST: usize = (12 << 20) / 32;

thread_local! {
    static GUESTS: [std::cell::OnceCell<Prey>; KERNELS.len()] = const { [const { std::cell::OnceCell::new() }; KERNELS.len()] };
}

/// A guest, and what of it is of interest.
struct Prey {
    fake: Fake,
    /// Some of the kernel's, among them of `.init.text`.
    sites: Vec<usize>,
    /// Exits (indices) of their functions.
    exits: Vec<usize>,
    /// For returns of these functions, and of none.
    plans: [ExitPlan; 2],
    /// Guest-physical, as the kernel left it.
    text: Vec<(Range<u64>, Vec<u8>)>,
    /// Guest-physical: what the guest may think of changing.
    areas: Vec<Range<u64>>,
}

impl Prey {
    fn new(name: &str) -> Self {
        let fake = Fake::quiet(name);
        let all = fake.all();
        let init = |&&site: &&usize| fake.kernel.sites()[site].section == SiteSection::InitText;
        let mut sites: Vec<usize> =
            all.iter().filter(|site| !init(site)).take(SITES - 8).copied().collect();
        sites.extend(all.iter().filter(init).take(8));
        sites.sort_unstable();
        // The books of ftrace are long, and each change reads them all: of these alone.
        for (at, &site) in (fake.records()..).step_by(16).zip(&sites) {
            fake.write(at, &fake.record(site).to_le_bytes()).expect("RAM");
            fake.write(at + 8, &[0; 8]).expect("RAM");
        }
        fake.write(fake.heap() + 16, &u32::try_from(SITES).expect("small").to_le_bytes())
            .expect("RAM");
        let exits = fake.kernel.exits().expect("a kernel of the cache");
        let of_sites = |index: &usize| {
            let exit = &exits.all()[*index];
            sites.iter().any(|&site| exits.of(site).iter().any(|own| own.address == exit.address))
        };
        let exits: Vec<usize> = (0..exits.all().len()).filter(of_sites).take(64).collect();
        let range = |from: &str, to: &str| fake.symbol(from)..fake.symbol(to);
        let text = [range("_stext", "_etext"), range("_sinittext", "_einittext")]
            .map(|range| {
                let len = usize::try_from(range.end - range.start).expect("small");
                let bytes = fake.read_vec(range.start, len);
                (range, bytes)
            })
            .to_vec();
        let plan =
            ExitPlan::new(&fake.kernel, &sites, false).expect("exits of a kernel of the cache");
        let plans = [plan, ExitPlan::default()];
        let mut prey = Self { fake, sites, exits, plans, text, areas: Vec::new() };
        prey.areas = prey.find_areas();
        prey
    }

    fn find_areas(&self) -> Vec<Range<u64>> {
        let fake = &self.fake;
        let mut areas = Vec::new();
        let mut add = |at: u64, len: u64| areas.push(at..at + len);
        for &site in &self.sites {
            let (link, len) = fake.extent(site);
            add(fake.at(link), len as u64);
        }
        for &exit in &self.exits {
            let exits = fake.kernel.exits().expect("a kernel of the cache");
            add(fake.at(exits.all()[exit].address), 8);
        }
        for _ in 0..8 {
            add(fake.heap(), 24);
            add(fake.records(), 16 * SITES as u64);
            add(fake.heap() + 0x10_0000, 0x2000);
        }
        let tables: &[&str] = match fake.kernel.arch() {
            Arch::X86_64 => &["init_top_pgt", "level3_kernel_pgt", "level2_kernel_pgt"],
            Arch::Riscv64 => &["swapper_pg_dir"],
        };
        for _ in 0..4 {
            for table in tables {
                add(fake.symbol(table), 4096);
            }
            if fake.kernel.arch() == Arch::Riscv64 {
                // The tables below it, and where code is put.
                add(fake.heap() - (1 << 20), 3 * 4096);
                add(fake.at(riscv64::gap(fake)), 0x3000);
            }
        }
        for variable in [
            "ftrace_pages_start",
            "ftrace_ops_list",
            "page_offset_base",
            "vmemmap_base",
            "phys_ram_base",
            "kernel_map",
            "__per_cpu_offset",
            "x86_return_thunk",
            "alternatives_patched",
            "__kfence_pool",
            "_debug_pagealloc_enabled_early",
            "linux_banner",
        ] {
            if let Some(link) = fake.kernel.symbols().address(variable) {
                add(fake.at(link), 16);
            }
        }
        areas
    }
}

/// The guest as the tracer sees it.
struct Watched<'a> {
    prey: &'a Prey,
    /// All writes, of tracer and guest: where, and what was there.
    undo: RefCell<Vec<(u64, Vec<u8>)>>,
    /// What the tracer wrote last, by byte.
    ours: RefCell<HashMap<u64, u8>>,
    /// The tracer is putting its annex there.
    attaching: Cell<bool>,
}

impl Watched<'_> {
    /// As the guest.
    fn scribble(&self, at: u64, bytes: &[u8]) {
        let mut old = vec![0; bytes.len()];
        if self.prey.fake.read(at, &mut old).is_ok() {
            // Memory fails for the tracer alone.
            let failing = self.prey.fake.failing.replace(0..0);
            self.prey.fake.write(at, bytes).expect("RAM");
            self.prey.fake.failing.replace(failing);
            self.undo.borrow_mut().push((at, old));
        }
    }

    /// Whether the tracer may replace `old`.
    fn allowed(&self, at: u64, old: &[u8], new: &[u8]) -> bool {
        if old == new {
            return true;
        }
        let ours = self.ours.borrow();
        if (at..).zip(old).all(|(at, byte)| ours.get(&at) == Some(byte)) {
            return true;
        }
        let fake = &self.prey.fake;
        // Code as the kernel left it.
        let is_kernels = |(range, bytes): &(Range<u64>, Vec<u8>)| {
            let offset =
                at.checked_sub(range.start).and_then(|offset| usize::try_from(offset).ok());
            offset.and_then(|offset| bytes.get(offset..offset + old.len())) == Some(old)
        };
        if self.prey.text.iter().any(is_kernels) {
            return true;
        }
        // The one flag of a record that says to be of a site.
        if let (Ok(before), Ok(after)) = (<[u8; 8]>::try_from(old), <[u8; 8]>::try_from(new))
            && u64::from_le_bytes(before) ^ u64::from_le_bytes(after) == DISABLED
            && let Ok(ip) = fake.read_u64(at - 8)
        {
            return self.prey.sites.iter().any(|&site| fake.record(site) == ip);
        }
        // Entries of page tables that are not in use, and the place for code behind the text.
        let is_gap = fake.kernel.arch() == Arch::Riscv64
            && (fake.at(riscv64::gap(fake))..fake.symbol("__init_begin")).contains(&at);
        let is_entry = self.attaching.get() && at.is_multiple_of(8) && old.len() == 8;
        (is_gap || is_entry) && old.iter().all(|byte| *byte == 0)
    }
}

impl Guest for Watched<'_> {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        self.prey.fake.read(address, out)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        let mut old = vec![0; bytes.len()];
        self.prey.fake.read(address, &mut old)?;
        self.prey.fake.write(address, bytes)?;
        self.undo.borrow_mut().push((address, old.clone()));
        assert!(
            self.allowed(address, &old, bytes),
            "the tracer replaces what is the guest's at {address:#x}: {old:02x?} by {bytes:02x?}"
        );
        self.ours.borrow_mut().extend((address..).zip(bytes.iter().copied()));
        Ok(())
    }
}

/// Puts all back, however the run ends.
impl Drop for Watched<'_> {
    fn drop(&mut self) {
        *self.prey.fake.failing.borrow_mut() = 0..0;
        for (at, old) in self.undo.borrow_mut().drain(..).rev() {
            // A panic on the way must not become an abort.
            let _ = self.prey.fake.write(at, &old);
        }
    }
}

/// The tracer at work.
struct Held {
    attachment: Attachment,
    readers: Vec<RingReader>,
    tasks: Tasks,
    programs: Vec<u16>,
    returns: Vec<u16>,
}

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let number = usize::from(input.byte()) % KERNELS.len();
    GUESTS.with(|guests| {
        let prey = guests[number].get_or_init(|| Prey::new(KERNELS[number]));
        drive(prey, &mut input);
    });
}

fn attach(watched: &Watched<'_>, choice: u8) -> Option<Held> {
    let fake = &watched.prey.fake;
    let options = Options {
        overflow: if choice & 1 == 0 { Overflow::Drop } else { Overflow::Overwrite },
        cpus: [2, 1, 64, 65][usize::from(choice >> 1 & 3)],
        // For the largest there is no memory.
        buffer: [None, Some(32 << 10), None, Some(64 << 20)][usize::from(choice >> 4 & 3)],
        clock_hz: 1_000_000_000,
        returns: &watched.prey.plans[usize::from(choice >> 3 & 1)],
    };
    // Where the kernel is, the guest says as well.
    let (symbol, tables) = fake.tables();
    let memory = Arc::clone(&fake.annex) as Arc<dyn Memory>;
    watched.attaching.set(true);
    let attached =
        vmtrace::tracer::Image::locate(watched, &fake.kernel, symbol, fake.link(symbol), tables)
            .map_err(|error| error.to_string())
            .and_then(|image| {
                Attachment::new(watched, &fake.kernel, image, memory, options)
                    .map_err(|error| error.to_string())
            });
    watched.attaching.set(false);
    match attached {
        Ok(attachment) => Some(Held {
            readers: attachment.readers(),
            tasks: attachment.tasks(),
            programs: Vec::new(),
            returns: Vec::new(),
            attachment,
        }),
        Err(text) => {
            assert!(!text.is_empty());
            None
        }
    }
}

fn drive(prey: &Prey, input: &mut Input<'_>) {
    let watched = Watched {
        prey,
        undo: RefCell::default(),
        ours: RefCell::default(),
        attaching: Cell::new(false),
    };
    let choice = input.byte();
    // Before anything else as well.
    for _ in 0..choice >> 6 {
        corrupt(&watched, input);
    }
    let Some(mut held) = attach(&watched, choice) else { return };
    let mut dirty = Vec::new();
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        step(&watched, &mut held, input, &mut dirty);
    }
    withdraw(&watched, &mut held);
    let annex = Memory::slice(&*prey.fake.annex);
    for offset in dirty {
        annex.write_obj(0_u64, offset).expect("in the annex");
    }
}

/// The guest changes a word of what is its own.
fn corrupt(watched: &Watched<'_>, input: &mut Input<'_>) {
    let prey = watched.prey;
    let fake = &prey.fake;
    let area = &prey.areas[input.below(prey.areas.len())];
    let words = usize::try_from(area.end - area.start).expect("small").div_ceil(8).max(1);
    let at = area.start + 8 * input.below(words) as u64;
    let (kind, value) = (input.byte(), input.word());
    let page = value >> 8 & 0xff;
    let word = match kind % 12 {
        0 => 0,
        1 => u64::MAX,
        2 => value,
        3 => value & 0xff,
        // Pointers: to the books, to nearby, to the image, to where nothing is.
        4 => fake.page() + (value & 0x3f) * 8,
        5 => fake.page() + (page << 12),
        6 => MAP + (value & 0x3fff_ffff),
        7 => fake.record(prey.sites[usize::try_from(value % SITES as u64).expect("small")]),
        // Entries of page tables: of either architecture, small pages or large, or tables.
        8 => (fake.heap() + (page << 12)) | value & 0xff | 1,
        9 => (fake.heap() + (page << 12)) >> 2 | value & 0xff | 1,
        10 => (fake.load + (page << 21)) | value & 0x1ff | 1,
        _ => fake.read_u64(at).unwrap_or(0) ^ 1 << (value & 63),
    };
    let len = if kind & 0x80 == 0 { 8 } else { 1 + usize::from(kind >> 4 & 7) };
    watched.scribble(at, &word.to_le_bytes()[..len]);
}

/// The guest changes a word of the annex.
fn corrupt_annex(watched: &Watched<'_>, input: &mut Input<'_>, dirty: &mut Vec<usize>) {
    let memory = Memory::slice(&*watched.prey.fake.annex);
    let (place, value) = (input.word(), input.word());
    let size = usize::try_from(annex::SIZE).expect("small");
    let near = usize::try_from(place >> 8 & 0x3ff).expect("small") * 8;
    let offset = match place % 8 {
        // Programs, controls, the beginning of the rings, and their accounts.
        0 => near,
        1 | 2 => (2 << 20) + near,
        3 => (3 << 20) + near,
        4 => (4 << 20) + near + (8 << 10),
        5 => (10 << 20) + near + (8 << 10),
        6 => (4 << 20) + (near << 7 & !0x3fff) + (16 << 10) - 64 + (near & 0x38),
        _ => usize::try_from(place >> 8).expect("64 bits") % (size / 8) * 8,
    };
    let value = match value & 7 {
        0 => value >> 32,
        1 => u64::MAX - (value >> 32),
        2 => memory.read_obj::<u64>(offset).expect("in the annex") ^ 1 << (value >> 58),
        3 => {
            memory.read_obj::<u64>(offset).expect("in the annex").wrapping_sub(value >> 50 & 0x3ff8)
        }
        _ => value,
    };
    memory.write_obj(value, offset).expect("in the annex");
    dirty.push(offset);
}

fn some(input: &mut Input<'_>, of: &[usize]) -> Vec<usize> {
    let mask = input.word();
    (0..).zip(of).filter(|(bit, _)| mask >> (bit & 63) & 1 != 0).map(|(_, &one)| one).collect()
}

fn duty(input: &mut Input<'_>, point: Point) -> Duty {
    let tracers: Vec<u8> = (0..1 + input.byte() % 4).collect();
    let fields = match (point, input.byte() % 3) {
        (_, 0) => vec![],
        (Point::Return, _) => vec![Field::Stack, Field::Value],
        (Point::Entry, 1) => vec![Field::Argument(0), Field::Argument(5)],
        (Point::Entry | Point::Tail | Point::Beyond, _) => vec![Field::Stack],
    };
    let of = input.byte();
    let condition = |tracer: u8| match of >> (2 * (tracer & 3)) & 3 {
        0 | 1 => None,
        all => Some(Condition::Any(vec![Condition::All(vec![]); usize::from(all)])),
    };
    let parts = tracers.into_iter().map(|tracer| Part {
        tracer,
        fields: fields.clone(),
        condition: condition(tracer),
        ..Part::default()
    });
    Duty { point, parts: parts.collect() }
}

fn step(watched: &Watched<'_>, held: &mut Held, input: &mut Input<'_>, dirty: &mut Vec<usize>) {
    let prey = watched.prey;
    let kernel = &prey.fake.kernel;
    let step = input.byte();
    match step % 20 {
        0..6 => corrupt(watched, input),
        6..8 => (0..8).for_each(|_| corrupt_annex(watched, input, dirty)),
        8 | 9 => {
            let program = held.attachment.program(watched, kernel, &duty(input, Point::Entry));
            held.programs.extend(program);
            let sites = some(input, &prey.sites);
            let program = held.programs.get(input.below(held.programs.len().max(1)));
            let Some(&program) = program else { return };
            let wanted: Vec<_> = sites.iter().map(|&site| (site, program)).collect();
            let before: Vec<_> = held.attachment.sites().collect();
            match held.attachment.enable(watched, kernel, &wanted) {
                Ok(report) => {
                    assert_eq!(report.patched + report.skipped.len(), report.matched);
                    assert_eq!(held.attachment.sites().count(), before.len() + report.patched);
                }
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    assert!(held.attachment.sites().eq(before), "nothing is held of what failed");
                }
            }
        }
        10 => {
            let sites = some(input, &prey.sites);
            // What could not be put back is not held either.
            let _any = held.attachment.disable(watched, &sites);
            assert!(held.attachment.sites().all(|(site, _)| !sites.contains(&site)));
        }
        11 => drop(held.attachment.release_init(watched)),
        12 => {
            for reader in &mut held.readers {
                let mut batch = RawBatch::with_capacity(2000);
                match step >> 5 {
                    0..5 => drop(reader.drain(&mut batch)),
                    5 => reader.newest(&mut batch),
                    6 => drop(reader.clear()),
                    _ => drop(reader.finish(&mut batch)),
                }
                assert!(batch.records.len() <= MOST);
            }
        }
        13 => {
            let (task, pid) = (prey.fake.page() + (input.word() & 0x1f_ffff), input.word());
            for task in [task, pid, u64::MAX - (pid & 0xfff)] {
                held.tasks.refresh(watched, task, u32::from(step) >> 5);
            }
        }
        14 => {
            // It may say that it is not so far.
            if held.attachment.settle(watched, kernel).is_err() && !held.attachment.is_settled() {
                return;
            }
            let program = held.attachment.program(watched, kernel, &duty(input, Point::Return));
            held.returns.extend(program);
            let exits = some(input, &prey.exits);
            let Some(&program) = held.returns.last() else { return };
            let wanted: Vec<_> = exits.iter().map(|&exit| (exit, program)).collect();
            let _any = held.attachment.stubs(watched, kernel, &wanted);
            let _any = held.attachment.enable_exits(watched, kernel, &wanted);
        }
        15 => {
            let exits = some(input, &prey.exits);
            let _any = held.attachment.disable_exits(watched, &exits);
        }
        16 => {
            let trap = trap(kernel.arch());
            let site = prey.sites[input.below(SITES)];
            if let Ok(Ok(_)) = held.attachment.arm(watched, kernel, site, trap) {
                if step & 0x80 != 0 {
                    corrupt(watched, input);
                }
                let _any = held.attachment.disarm(watched, site);
            }
        }
        17 => {
            let image = *held.attachment.image();
            let trap = trap(kernel.arch());
            let wire = Tripwire::on_function(watched, &image, kernel, "early_trace_init", trap);
            if let Ok(wire) = wire {
                if step & 0x80 != 0 {
                    let at = prey.fake.at(wire.address());
                    watched.scribble(at, &input.word().to_le_bytes()[..2]);
                }
                let _any = wire.disarm(watched);
            }
            let _any = held.attachment.resume(watched, prey.fake.link("early_trace_init"));
        }
        18 => {
            // Memory fails a few times from some write on.
            let (from, count) = (usize::from(step >> 5), 1 + usize::from(input.byte() % 4));
            *prey.fake.failing.borrow_mut() = from..from + count;
        }
        _ => withdraw(watched, held),
    }
}

/// What each architecture's machine takes for a trap.
fn trap(arch: Arch) -> &'static [u8] {
    match arch {
        Arch::X86_64 => &[0xe6, 0xe7],
        Arch::Riscv64 => &[0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0],
    }
}

/// All is given back, or it is said what is not.
fn withdraw(watched: &Watched<'_>, held: &mut Held) {
    let prey = watched.prey;
    *prey.fake.failing.borrow_mut() = 0..0;
    let before: BTreeMap<usize, u16> = held.attachment.sites().collect();
    let restored = match held.attachment.release_all(watched, &prey.fake.kernel) {
        Ok(restored) => restored,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!(held.attachment.held(), 0);
            return;
        }
    };
    assert_eq!(held.attachment.held(), 0);
    assert!(restored.sites + restored.foreign.len() >= before.len());
    for site in before.into_keys().filter(|site| !restored.foreign.contains(site)) {
        let (link, len) = prey.fake.extent(site);
        let at = prey.fake.at(link);
        let kernels = prey.text.iter().find_map(|(range, bytes)| {
            let offset = usize::try_from(at.checked_sub(range.start)?).ok()?;
            bytes.get(offset..offset + len)
        });
        assert_eq!(Some(&*prey.fake.bytes(site)), kernels, "site {site} was not given back");
    }
}
