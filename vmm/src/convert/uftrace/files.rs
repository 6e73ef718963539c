//! The files that describe records.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use rustc_hash::{FxHashMap, FxHashSet};

use super::super::ground::{Names, Number};
use super::lanes::Lanes;
use crate::export::{Name, printable};
use crate::stream::Header;

/// All tasks have one address space.
const SESSION: &str = "766d747261636530";
/// Where the functions of a module begin, and how far apart they are.
const MODULE: u64 = 1 << 32;
const FUNCTION: u64 = 1 << 4;
/// Most modules: addresses have 47 bits.
const MODULES: usize = 1 << 14;

/// Made up addresses of functions.
#[derive(Debug, Default)]
pub(super) struct Modules {
    numbers: FxHashMap<Box<str>, usize>,
    /// Functions of each, by the numbers of their names.
    functions: Vec<Vec<u32>>,
    /// By the number of the name.
    addresses: Vec<u64>,
}

impl Modules {
    /// The address of a function.
    pub(super) fn address(&mut self, name: &Name<'_>, number: Number) -> u64 {
        let index = usize::try_from(number.number).unwrap_or(usize::MAX);
        if let Some(address) = self.addresses.get(index) {
            return *address;
        }
        let module = match name.symbol {
            Some((_, module)) if !module.is_empty() => module,
            _ => "vmlinux",
        };
        let next = self.functions.len();
        let known = self.numbers.get(module).copied();
        let module = known.unwrap_or_else(|| {
            if next >= MODULES {
                // Those beyond are in the last.
                return next - 1;
            }
            self.functions.push(Vec::new());
            self.numbers.insert(module.into(), next);
            next
        });
        let functions = &mut self.functions[module];
        let place = u64::try_from(functions.len()).unwrap_or(u64::MAX);
        functions.push(number.number);
        // The first module is not at zero, which is not an address.
        let base = MODULE * (u64::try_from(module).unwrap_or(0) + 1);
        let address = base + place * FUNCTION;
        self.addresses.push(address);
        address
    }

    /// Writes the address space and the symbols of its modules.
    pub(super) fn write(&self, folder: &Path, names: &Names) -> io::Result<()> {
        let mut modules = vec![""; self.functions.len()];
        for (name, &number) in &self.numbers {
            modules[number] = name;
        }
        let map = File::create(folder.join(format!("sid-{SESSION}.map")))?;
        let mut map = BufWriter::new(map);
        let mut taken = FxHashSet::default();
        for (number, (module, functions)) in modules.iter().zip(&self.functions).enumerate() {
            let file = file_name(module, number, &mut taken);
            let begin = MODULE * (u64::try_from(number).unwrap_or(0) + 1);
            let length = u64::try_from(functions.len()).unwrap_or(u64::MAX) * FUNCTION;
            let end = begin + length;
            writeln!(map, "{begin:012x}-{end:012x} r-xp 00000000 00:00 0 /vmtrace-guest/{file}")?;
            let mut symbols = BufWriter::new(File::create(folder.join(format!("{file}.sym")))?);
            for (at, function) in (0..).step_by(16).zip(functions) {
                let name = names.get(*function).map_or_else(String::new, |known| {
                    let named = known.symbol.as_ref().map(|(symbol, _)| symbol_name(symbol));
                    named.unwrap_or_else(|| format!("{:#x}", known.address))
                });
                writeln!(symbols, "{at:016x} T {name}")?;
            }
            writeln!(symbols, "{length:016x} ? __sym_end")?;
            symbols.flush()?;
        }
        // Says to uftrace that what is above belongs to a kernel, which none of this does.
        writeln!(map, "7ffffffde000-7ffffffff000 rw-p 00000000 00:00 0 [stack]")?;
        map.flush()
    }
}

/// A name for files of a module: names are the guest's, and may be anything.
fn file_name(module: &str, number: usize, taken: &mut FxHashSet<String>) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let mut name: String =
        module.chars().take(100).map(|c| if good(c) { c } else { '_' }).collect();
    if name.starts_with('.') || taken.contains(&name) {
        name = format!("module-{number}-{name}");
    }
    taken.insert(name.clone());
    name
}

/// A symbol's line ends at a control character, and this one ends the file.
fn symbol_name(symbol: &str) -> String {
    match symbol {
        "" | "__sym_end" | "__dynsym_end" | "__func_end" => format!("{symbol}_"),
        _ => symbol.chars().map(|c| if c.is_control() { '?' } else { c }).collect(),
    }
}

/// A name as `events.txt` has it: `provider:name` without space.
pub(super) fn event_name(label: &str, most: usize) -> String {
    let (provider, name) = label.split_once(':').unwrap_or(("vmtrace", label));
    let clean = |text: &str| -> String {
        let good = |c: char| c.is_ascii_graphic() && c != ':';
        let text: String =
            text.chars().take(most / 2).map(|c| if good(c) { c } else { '_' }).collect();
        if text.is_empty() { "_".to_owned() } else { text }
    };
    format!("{}:{}", clean(provider), clean(name))
}

/// `events.txt`.
pub(super) fn events(folder: &Path, events: &FxHashMap<Box<str>, u64>) -> io::Result<()> {
    let mut sorted: Vec<_> = events.iter().collect();
    sorted.sort_by_key(|(_, id)| **id);
    let mut text = String::new();
    for (name, id) in sorted {
        // A text takes all.
        let _ = writeln!(text, "EVENT: {id} {name}");
    }
    fs::write(folder.join("events.txt"), text)
}

/// `task.txt`. A task is called as the program of its session is, up to a slash.
pub(super) fn tasks(folder: &Path, lanes: &Lanes) -> io::Result<()> {
    let mut out = BufWriter::new(File::create(folder.join("task.txt"))?);
    let mut processes = FxHashSet::default();
    const AT: &str = "timestamp=0.000000000";
    for task in lanes.sorted() {
        let name: String = printable(&task.name())
            .chars()
            .map(|c| if "/\"".contains(c) { '-' } else { c })
            .collect();
        let (tid, pid) = (task.tid, task.pid);
        if processes.insert(pid) {
            writeln!(out, "SESS {AT} pid={pid} sid={SESSION} exename=\"{name}\"")?;
        }
        writeln!(out, "TASK {AT} tid={tid} pid={pid}")?;
        // Its own name, whatever that of its process is.
        if tid != pid && processes.insert(tid) {
            writeln!(out, "SESS {AT} pid={tid} sid={SESSION} exename=\"{name}\"")?;
        }
    }
    out.flush()
}

/// `info`.
pub(super) fn info(folder: &Path, header: &Header, lanes: &Lanes) -> io::Result<()> {
    /// Sessions, symbols relative to modules, a deepest stack, events.
    const FEATURES: u64 = 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7;
    /// Lines: exename, cmdline, cpuinfo, osinfo, taskinfo, `uftrace_version`.
    const LINES: u64 = 1 << 0 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 13;
    let mut out = BufWriter::new(File::create(folder.join("info"))?);
    out.write_all(b"Ftrace!\0")?;
    out.write_all(&4_u32.to_le_bytes())?; // version
    out.write_all(&40_u16.to_le_bytes())?; // of this header
    out.write_all(&[1, 2])?; // little endian, 64 bits
    out.write_all(&FEATURES.to_le_bytes())?;
    out.write_all(&LINES.to_le_bytes())?;
    out.write_all(&1024_u16.to_le_bytes())?;
    out.write_all(&[0; 6])?;
    // uftrace reads lines of at most 4 KiB.
    let line = |text: &str| printable(text).chars().take(200).collect::<String>();
    writeln!(out, "exename:vmlinux")?;
    writeln!(out, "cmdline:vmtrace convert --format uftrace")?;
    writeln!(out, "cpuinfo:lines=2")?;
    writeln!(out, "cpuinfo:nr_cpus={0} / {0}", header.vcpus)?;
    writeln!(out, "cpuinfo:desc=vCPUs of vmtrace, {}", line(&header.arch))?;
    writeln!(out, "osinfo:lines=3")?;
    writeln!(out, "osinfo:kernel=Linux {}", line(&header.release))?;
    writeln!(out, "osinfo:hostname=guest")?;
    writeln!(out, "osinfo:distro=a guest of vmtrace")?;
    let tids: Vec<_> = lanes.sorted().iter().map(|task| task.tid.to_string()).collect();
    writeln!(out, "taskinfo:lines=2")?;
    writeln!(out, "taskinfo:nr_tid={}", tids.len())?;
    writeln!(out, "taskinfo:tids={}", tids.join(","))?;
    writeln!(out, "uftrace_version:vmtrace {}", line(&header.vmtrace_version))?;
    out.flush()
}
