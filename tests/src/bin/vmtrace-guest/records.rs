//! A guest that changes what its kernel has of ftrace and of page tables. No program can write there, but the
//! devices that it drives itself can: what they write is theirs, the seed decides where.

use super::call_getppid;
use super::devices::Entropy;
use super::kcore::Kcore;
use super::scribble::begin;
use super::set;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::thread;
use std::time::Duration;
use vmtrace::machine::ANNEX_BASE;
use vmtrace::tracer::annex;
use vmtrace_tests::random::Random;

/// `sizeof(struct dyn_ftrace)`: an address and flags.
const RECORD: u64 = 16;
/// So many records are told from others: those of functions of this name, which both sides trace.
const TRACED: &str = " vfs_";
/// How far behind a function's address that of its record can be.
const SITE: u64 = 16;
/// Entries of page tables for the annex's first bytes: 2 MiB each.
const ENTRIES: usize = 8;
/// Entries of a table.
const TABLE_ENTRIES: usize = 512;
/// Bytes that are written, between changes of the guest's own tracer.
const BURST: usize = 8;

fn symbols() -> Result<String> {
    fs::read_to_string("/proc/kallsyms").context("/proc/kallsyms")
}

fn address(line: &str) -> Option<u64> {
    u64::from_str_radix(line.split(' ').next()?, 16).ok()
}

fn symbol(symbols: &str, name: &str) -> Result<u64> {
    let line = symbols.lines().find(|line| line.split(' ').nth(2) == Some(name));
    line.and_then(address).with_context(|| format!("no {name}"))
}

/// The virtual addresses of all records, with those of their functions' sites.
fn all_records(kcore: &Kcore, symbols: &str) -> Result<Vec<[u64; 2]>> {
    let mut records = Vec::new();
    let mut page = kcore.words(symbol(symbols, "ftrace_pages_start")?, 1)?[0];
    while page != 0 {
        // struct ftrace_page: the next, its records, how many.
        let [next, start, count] = kcore.words(page, 3)?[..] else { bail!("no page") };
        let count = usize::try_from(count & 0xffff_ffff)?;
        let words = kcore.words(start, 2 * count)?;
        let places = (0..).map(|index| start + RECORD * index);
        records.extend(places.zip(words.chunks(2)).map(|(place, words)| [place, words[0]]));
        page = next;
    }
    Ok(records)
}

/// Writes into its records so often, while its own tracer of functions that vmtrace traces comes and goes; this
/// may be its end.
pub(crate) fn records(seed: u64, count: usize) -> Result<()> {
    let (kcore, symbols, mut random) = (Kcore::open()?, symbols()?, Random::new(seed));
    let all = all_records(&kcore, &symbols)?;
    let functions: Vec<u64> =
        symbols.lines().filter(|line| line.contains(TRACED)).filter_map(address).collect();
    let is_traced = |site: u64| functions.iter().any(|&at| (at..at + SITE).contains(&site));
    let traced: Vec<_> = all.iter().filter(|[_, site]| is_traced(*site)).collect();
    ensure!(all.len() > 10_000 && traced.len() > 20, "{} {}", all.len(), traced.len());
    let mut entropy = Entropy::new()?;
    set("set_ftrace_filter", "vfs_*")?;
    println!("records {} {}", all.len(), traced.len());
    begin();
    for round in 0..count {
        let [place, _] = match random.below(4) {
            0 => all[random.below(all.len())],
            _ => *traced[random.below(traced.len())],
        };
        // Mostly the flags alone, of which a few bits are a count.
        let at = if random.below(8) == 0 { random.below(8) } else { 8 + random.below(8) };
        let len = 1 + random.below(16 - at).min(random.below(4));
        entropy.write(kcore.physical(place)? + at as u64, u32::try_from(len)?)?;
        call_getppid();
        let _ = fs::metadata("/tmp");
        if round % BURST == 0 {
            // The kernel may have found out, and refuse.
            let tracer = if (round / BURST).is_multiple_of(2) { "function" } else { "nop" };
            let _ = set("current_tracer", tracer);
        }
    }
    println!("alive");
    Ok(())
}

/// The table (physical address) with the entry (index) for the annex's first byte, in or below a table of riscv64 from
/// an entry on (RISC-V privileged specification, 10.4.1: an entry that allows nothing leads to a table).
fn riscv64_table(
    kcore: &Kcore,
    table: u64,
    from: usize,
    depth: usize,
) -> Result<Option<(u64, usize)>> {
    const VALID: u64 = 1;
    const RIGHTS: u64 = 0b1110;
    const LEVELS: usize = 5;
    let bytes = kcore.read_physical(table, 8 * TABLE_ENTRIES)?;
    let entries = bytes.as_chunks().0.iter().map(|entry| u64::from_le_bytes(*entry));
    for (index, entry) in entries.enumerate().skip(from) {
        let physical = (entry >> 10 & ((1 << 44) - 1)) << 12;
        if entry & VALID == 0 {
            continue;
        }
        if entry & RIGHTS != 0 {
            // The first 2 MiB are mapped elsewhere.
            if (ANNEX_BASE..ANNEX_BASE + annex::SIZE).contains(&physical) {
                return Ok(Some((table, index)));
            }
        } else if depth + 1 < LEVELS
            && let Some(found) = riscv64_table(kcore, physical, 0, depth + 1)?
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Writes into the page tables of what vmtrace has in the guest so often; this is most likely its end.
pub(crate) fn tables(seed: u64, count: usize) -> Result<()> {
    let (kcore, symbols, mut random) = (Kcore::open()?, symbols()?, Random::new(seed));
    let (table, first) = match symbol(&symbols, "level2_kernel_pgt") {
        // x86-64: for the highest 2 GiB, the first of which the annex begins.
        Ok(table) => (kcore.physical(table)?, 0),
        Err(_) => {
            let root = kcore.physical(symbol(&symbols, "swapper_pg_dir")?)?;
            riscv64_table(&kcore, root, TABLE_ENTRIES / 2, 0)?.context("the annex is not mapped")?
        }
    };
    println!("table {table:#x} {first}");
    let mut entropy = Entropy::new()?;
    begin();
    for _ in 0..count {
        let at = match random.below(4) {
            // Tables of counters, and all else that is mapped there.
            0 => random.below(4096),
            _ => 8 * (first + random.below(ENTRIES)) % 4096 + random.below(8),
        };
        entropy.write(table + at as u64, 1)?;
        // What a processor has looked up goes with what others do.
        for _ in 0..4 {
            call_getppid();
            thread::sleep(Duration::from_millis(5));
        }
    }
    println!("alive");
    Ok(())
}
