//! The parts of a fake guest that are specific to riscv64.

use super::{Fake, Guest, MAP};
use vm_memory::{Bytes, GuestAddress};
use vmtrace::kernel::FtraceKind;
use vmtrace::tracer::{PageTables, annex};
use vmtrace_trampolines::riscv64::encode::register::T0;
use vmtrace_trampolines::riscv64::encode::{NOP, auipc, jalr, split};

const TABLE: u64 = 1;
const LEAF: u64 = 0xef;

/// Where code can be put: behind the text.
pub(crate) fn gap(fake: &Fake) -> u64 {
    fake.link("_etext").next_multiple_of(4096)
}

/// Maps two pages of code at an address by a table at guest-physical `table`.
pub(super) fn map(fake: &Fake, code: u64, table: u64, pages: [u64; 2]) {
    let put = |at: u64, physical: u64, flags: u64| {
        fake.write(at, &(physical >> 12 << 10 | flags).to_le_bytes()).unwrap();
    };
    put(pmds(fake) + 8 * index(code, 2), table, TABLE);
    map_pages(fake, table, pages.map(Some));
}

/// Maps two pages, or nothing, by two entries at guest-physical `entries`.
pub(super) fn map_pages(fake: &Fake, entries: u64, pages: [Option<u64>; 2]) {
    for (at, page) in (entries..).step_by(8).zip(pages) {
        let entry = page.map_or(0, |physical| physical >> 12 << 10 | LEAF);
        fake.write(at, &entry.to_le_bytes()).unwrap();
    }
}

fn index(address: u64, level: u32) -> u64 {
    address >> (12 + 9 * (level - 1)) & 511
}

/// Of the table of the kernel's 2 MiB entries; upper tables follow it.
fn pmds(fake: &Fake) -> u64 {
    fake.heap() - (1 << 20)
}

pub(crate) fn entry(fake: &Fake, number: u64) -> u64 {
    let annex = fake.link("_end").next_multiple_of(2 << 20) - (2 << 20);
    pmds(fake) + 8 * index(annex + (number << 21), 2)
}

pub(crate) fn load(fake: &Fake) {
    fake.memory.write_slice(fake.kernel.vmlinux(), GuestAddress(fake.load)).unwrap();
    let put = |at: u64, physical: u64, flags: u64| {
        fake.write(at, &(physical >> 12 << 10 | flags).to_le_bytes()).unwrap();
    };
    let mut table = pmds(fake);
    for level in 3..=fake.levels {
        let upper = if level == fake.levels {
            fake.symbol("swapper_pg_dir")
        } else {
            pmds(fake) + 4096 * u64::from(level - 2)
        };
        fake.write(upper, &[0; 4096]).unwrap();
        put(upper + 8 * index(MAP, level), table, TABLE);
        table = upper;
    }
    for offset in (0..fake.link("_end") - MAP).step_by(2 << 20) {
        put(pmds(fake) + 8 * index(MAP + offset, 2), fake.load + offset, LEAF);
    }
    put(pmds(fake) + 8 * index(fake.page(), 2), fake.heap(), LEAF);
    for site in 0..fake.kernel.sites().len() {
        let at = fake.at(fake.kernel.sites()[site].location);
        fake.write(at, &disabled(fake, site)).unwrap();
    }
}

/// As the kernel's `ftrace_init` leaves a site.
pub(crate) fn disabled(fake: &Fake, site: usize) -> Vec<u8> {
    disabled_at(fake, fake.kernel.sites()[site].entry)
}

/// The same of the site of a function that begins there.
pub(crate) fn disabled_at(fake: &Fake, entry: u64) -> Vec<u8> {
    if fake.kernel.ftrace_kind() == FtraceKind::Patchable {
        return [NOP, NOP].map(u32::to_le_bytes).concat();
    }
    let mut bytes = fake.link("ftrace_nop_ops").to_le_bytes().to_vec();
    let (upper, _) = split(fake.link("ftrace_caller").wrapping_sub(entry).cast_signed()).unwrap();
    bytes.extend([auipc(T0, upper), NOP].map(u32::to_le_bytes).concat());
    bytes
}

pub(crate) fn foreign(fake: &Fake, site: usize) -> Vec<u8> {
    let entry = fake.kernel.sites()[site].entry;
    let distance = fake.link("ftrace_caller").wrapping_sub(entry).cast_signed();
    let (upper, lower) = split(distance).unwrap();
    let mut bytes = match fake.kernel.ftrace_kind() {
        FtraceKind::CallOps => fake.link("ftrace_list_end").to_le_bytes().to_vec(),
        _ => Vec::new(),
    };
    bytes.extend([auipc(T0, upper), jalr(T0, T0, lower)].map(u32::to_le_bytes).concat());
    bytes
}

pub(crate) fn tables(fake: &Fake) -> (&'static str, PageTables) {
    let mode = u64::from(fake.levels) + 5;
    ("early_trace_init", PageTables::riscv64(mode << 60 | fake.symbol("swapper_pg_dir") >> 12))
}

/// Where `auipc t0` and `jalr t0` at `entry` lead; `None` if they are something else.
pub(crate) fn call(entry: u64, first: u32, second: u32) -> Option<u64> {
    if first & 0xfff != auipc(T0, 0) || second & 0xf_ffff != jalr(T0, T0, 0) {
        return None;
    }
    let upper = i64::from((first & !0xfff).cast_signed());
    let lower = i64::from(second.cast_signed() >> 20);
    Some(entry.wrapping_add_signed(upper + lower))
}

/// Where a jump at `address` leads.
pub(crate) fn jump(fake: &Fake, address: u64) -> u64 {
    let word = fake.word(fake.at(address));
    assert_eq!(word & 0xfff, 0x6f, "no jump at {address:#x}");
    let bits = |from: u32, count: u32| word >> from & ((1 << count) - 1);
    let distance = bits(21, 10) << 1 | bits(20, 1) << 11 | bits(12, 8) << 12 | bits(31, 1) << 20;
    address.wrapping_add_signed(i64::from((distance << 11).cast_signed() >> 11))
}

pub(crate) fn target(fake: &Fake, site: usize) -> u64 {
    let entry = fake.kernel.sites()[site].entry;
    let at = fake.at(entry);
    target_of(fake, entry, [fake.word(at), fake.word(at + 4)], || fake.read_u64(at - 8).unwrap())
}

/// Where a call from the function at `entry` ends up, with these instructions in it and, where there
/// is such, that literal before it; panics unless it is a sound call.
pub(crate) fn target_of(
    fake: &Fake,
    entry: u64,
    [first, second]: [u32; 2],
    literal: impl Fn() -> u64,
) -> u64 {
    let target = call(entry, first, second).expect("no call");
    if fake.kernel.ftrace_kind() == FtraceKind::Patchable {
        return jump(fake, target);
    }
    // As the kernel's ftrace_caller does it.
    assert_eq!(target, fake.link("ftrace_caller"));
    let (func, direct_call) = *fake.ops.get_or_init(|| {
        let btf = fake.kernel.btf().unwrap();
        let member = |name| u64::from(btf.member_offset("ftrace_ops", name).unwrap());
        (member("func"), member("direct_call"))
    });
    let ops = literal();
    let annex = fake.link("_end").next_multiple_of(2 << 20) - (2 << 20);
    let word = |address: u64| {
        let offset = usize::try_from(address - annex).unwrap();
        annex::Memory::slice(&*fake.annex).read_obj::<u64>(offset).unwrap()
    };
    assert_eq!(word(ops + func), fake.link("ftrace_stub"));
    word(ops + direct_call)
}

/// Guest-physical address of the entry that maps the annex' code.
pub(crate) fn code_entry(fake: &Fake) -> u64 {
    entry(fake, annex::SIZE >> 21)
}
