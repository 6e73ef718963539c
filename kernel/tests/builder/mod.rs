//! Kernels of a thousand functions, made in memory: every layout that real kernels have, small
//! enough to damage thousands of times. Shared by the tests and the fuzz targets.

// Each user needs a part of it.
#![allow(dead_code, unreachable_pub, missing_docs)]
// Numbers are cut to what an image has room for.
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)]

pub mod code;
pub mod types;

pub use types::btf;

/// What machine and what kind of call sites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    X86,
    Riscv,
    RiscvCallOps,
}

/// Where kallsyms keeps addresses, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Linux 6.1, x86: before the names; per-CPU symbols absolute.
    Before,
    /// Linux 6.12, x86: after the token index; per-CPU symbols absolute.
    After,
    /// Linux 6.12, riscv64: the same, all relative to the base.
    AfterBase,
    /// Linux 7.2: distances.
    Relative,
}

#[derive(Clone, Debug)]
pub struct Options {
    pub machine: Machine,
    pub layout: Layout,
    pub functions: usize,
    /// Zero entries at the head of `__mcount_loc`.
    pub zeros: usize,
    pub kallsyms: bool,
    /// Data symbols too, as with CONFIG_KALLSYMS_ALL.
    pub all_symbols: bool,
    pub mcount: bool,
    pub btf: bool,
    /// Replaces the type information.
    pub types: Option<Vec<u8>>,
    /// riscv64: the words of `__mcount_loc` and the base of kallsyms only in `.rela.dyn`.
    pub relocatable: bool,
    /// Replaces the words of `__mcount_loc`.
    pub table: Option<Vec<u64>>,
    /// riscv64: what functions have after their sites, in turn.
    pub bodies: Vec<Vec<u8>>,
}

impl Options {
    pub fn new(machine: Machine, layout: Layout) -> Self {
        Self {
            machine,
            layout,
            functions: 1000,
            zeros: 5,
            kallsyms: true,
            all_symbols: true,
            mcount: true,
            btf: true,
            types: None,
            relocatable: false,
            table: None,
            bodies: vec![vec![0x82, 0x80]],
        }
    }
}

/// A function that has a call site.
#[derive(Clone, Debug)]
pub struct Function {
    /// None for an overridden weak function.
    pub name: Option<String>,
    pub alias: Option<String>,
    pub entry: u64,
    pub location: u64,
    pub init: bool,
}

pub struct Built {
    /// ELF file (x86) or flat image (riscv64).
    pub image: Vec<u8>,
    pub functions: Vec<Function>,
    pub symbols: Vec<(u64, u8, String)>,
}

pub const BANNER: &str = "Linux version 6.99.0-synthetic (tests) #1 SMP\n";

const X86_BASE: u64 = 0xffff_ffff_8100_0000;
const RISCV_BASE: u64 = 0xffff_ffff_8000_0000;
const PAGE: usize = 0x1000;

struct Memory {
    base: u64,
    bytes: Vec<u8>,
}

impl Memory {
    fn here(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    fn align(&mut self, to: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
    }

    fn u32(&mut self, value: u32) {
        self.bytes.extend(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.bytes.extend(value.to_le_bytes());
    }
}

/// `init_task`: numbers at 8, parents and lists behind them, the name at 72.
fn first_task(memory: &mut Memory, symbols: &mut Vec<(u64, u8, String)>) {
    memory.align(16);
    let task = memory.here();
    symbols.push((task, b'D', "init_task".to_owned()));
    let (children, sibling) = (task + 32, task + 48);
    let name = u64::from_le_bytes(*b"swapper\0");
    let row = [task, task, children, children, sibling, sibling, task];
    [&[2, 0][..], &row, &[name, 0]].concat().into_iter().for_each(|word| memory.u64(word));
    symbols.push((memory.here(), b'D', "after_init_task".to_owned()));
}

/// Builds a kernel.
pub fn build(options: &Options) -> Built {
    let x86 = options.machine == Machine::X86;
    let base = if x86 { X86_BASE } else { RISCV_BASE };
    let mut memory = Memory { base, bytes: Vec::new() };
    let mut symbols: Vec<(u64, u8, String)> = Vec::new();
    if x86 {
        symbols.push((0x1000, b'A', "pcpu_hot".to_owned()));
    } else {
        memory.bytes = flat_header();
        symbols.push((base, b'T', "_start".to_owned()));
        memory.align(2 * PAGE);
    }
    let functions = text(options, &mut memory, &mut symbols);

    memory.align(16);
    symbols.push((memory.here(), b'D', "linux_banner".to_owned()));
    memory.bytes.extend(BANNER.as_bytes());
    memory.bytes.push(0);
    first_task(&mut memory, &mut symbols);

    if !x86 {
        detours(&functions, &mut memory, &mut symbols);
    }
    let mut relocations = Vec::new();
    if options.mcount {
        mcount(options, &functions, &mut memory, &mut symbols, &mut relocations);
    }
    if options.btf {
        memory.align(8);
        symbols.push((memory.here(), b'D', "__start_BTF".to_owned()));
        memory.bytes.extend(options.types.clone().unwrap_or_else(btf));
        symbols.push((memory.here(), b'D', "__stop_BTF".to_owned()));
    }
    if options.relocatable {
        memory.align(8);
        symbols.push((memory.here(), b'D', "__rela_dyn_start".to_owned()));
        for (place, value) in relocations {
            for word in [place, 3, value] {
                memory.u64(word);
            }
        }
        symbols.push((memory.here(), b'D', "__rela_dyn_end".to_owned()));
    }
    symbols.push((base + 0x40_0000, b'B', "_end".to_owned()));
    symbols.sort_by_key(|s| s.0);
    if options.kallsyms {
        let chosen: Vec<_> = symbols
            .iter()
            .filter(|s| options.all_symbols || s.1 == b'T' || s.1 == b't')
            .cloned()
            .collect();
        kallsyms(options, &chosen, &mut memory);
    }
    memory.align(PAGE);
    let image = if x86 { elf(&memory, options.machine) } else { memory.bytes };
    Built { image, functions, symbols }
}

fn text(
    options: &Options,
    memory: &mut Memory,
    symbols: &mut Vec<(u64, u8, String)>,
) -> Vec<Function> {
    let mark = |symbols: &mut Vec<_>, memory: &Memory, name: &str| {
        symbols.push((memory.here(), b'T', name.to_owned()));
    };
    mark(symbols, memory, "_stext");
    // No function with a site may stand where the linker's own symbols do.
    memory.bytes.extend([0x90; 64]);
    mark(symbols, memory, "__fentry__");
    memory.bytes.extend([0xc3; 32]);
    let mut functions = Vec::new();
    for i in 0..options.functions {
        let init = i >= options.functions * 9 / 10;
        if init && functions.iter().all(|f: &Function| !f.init) {
            mark(symbols, memory, "_etext");
            memory.align(PAGE);
            mark(symbols, memory, "_sinittext");
            memory.bytes.extend([0x90; 16]);
        }
        memory.align(16);
        let name = match i {
            10 => "vfs_read".to_owned(),
            11 => "vfs_write".to_owned(),
            12 => "f".repeat(200),
            _ if i % 60 == 9 => "dup_static".to_owned(),
            _ => format!("function_{i}"),
        };
        let name = (i % 50 != 7).then_some(name);
        let alias = (i % 40 == 3).then(|| format!("alias_{i}")).filter(|_| name.is_some());
        let (entry, location) = match options.machine {
            Machine::X86 => {
                let entry = memory.here();
                if i % 3 != 0 {
                    memory.bytes.extend([0xf3, 0x0f, 0x1e, 0xfa]);
                }
                let location = memory.here();
                memory.bytes.extend([0xe8, 0, 0, 0, 0, 0xc3]);
                (entry, location)
            }
            Machine::Riscv => {
                let entry = memory.here();
                memory.bytes.extend([1, 0].repeat(4));
                memory.bytes.extend(&options.bodies[i % options.bodies.len()]);
                (entry, entry)
            }
            Machine::RiscvCallOps => {
                let location = memory.here();
                memory.bytes.extend([1, 0].repeat(8));
                memory.bytes.extend(&options.bodies[i % options.bodies.len()]);
                (location + 8, location)
            }
        };
        for name in name.iter().chain(&alias) {
            symbols.push((entry, if i % 2 == 0 { b'T' } else { b't' }, name.clone()));
        }
        functions.push(Function { name, alias, entry, location, init });
    }
    memory.align(16);
    mark(symbols, memory, "_einittext");
    functions
}

/// The tables by which a riscv64 kernel changes and leaves its code: exceptions, jump labels and
/// alternatives, each naming what is a little behind the sites of some functions; and pointers.
fn detours(functions: &[Function], memory: &mut Memory, symbols: &mut Vec<(u64, u8, String)>) {
    let tables: [(&str, &str, &[u32]); 3] = [
        ("__start___ex_table", "__stop___ex_table", &[0]),
        ("__start___jump_table", "__stop___jump_table", &[0, 0]),
        ("__alt_start", "__alt_end", &[2 << 16, 0]),
    ];
    for (number, (start, stop, rest)) in tables.into_iter().enumerate() {
        memory.align(8);
        symbols.push((memory.here(), b'D', start.to_owned()));
        for pair in functions.chunks_exact(2).skip(number).step_by(100) {
            for function in pair {
                let distance = (function.entry + 10).wrapping_sub(memory.here());
                memory.u32(distance as u32);
            }
            rest.iter().for_each(|&word| memory.u32(word));
        }
        symbols.push((memory.here(), b'D', stop.to_owned()));
        // Two symbols at one address would come in another order.
        memory.u32(0);
    }
    memory.align(8);
    functions.iter().skip(37).step_by(40).for_each(|function| memory.u64(function.entry + 10));
}

fn mcount(
    options: &Options,
    functions: &[Function],
    memory: &mut Memory,
    symbols: &mut Vec<(u64, u8, String)>,
    relocations: &mut Vec<(u64, u64)>,
) {
    memory.align(8);
    symbols.push((memory.here(), b'D', "__start_mcount_loc".to_owned()));
    let words = options.table.clone().unwrap_or_else(|| {
        let zeros = std::iter::repeat_n(0, options.zeros);
        zeros.chain(functions.iter().map(|f| f.location)).collect()
    });
    for word in words {
        if options.relocatable {
            relocations.push((memory.here(), word));
            memory.u64(0);
        } else {
            memory.u64(word);
        }
    }
    symbols.push((memory.here(), b'D', "__stop_mcount_loc".to_owned()));
    // Not a pointer: the end of the table for those who have to guess it.
    memory.u64(u64::MAX);
}

fn token(byte: usize) -> String {
    match byte {
        1 => "function_".to_owned(),
        0x21..=0x7e => char::from(byte as u8).to_string(),
        _ => format!("t{byte}"),
    }
}

fn kallsyms(options: &Options, symbols: &[(u64, u8, String)], memory: &mut Memory) {
    let alignment = if options.layout == Layout::Relative { 4 } else { 8 };
    let base = if options.layout == Layout::AfterBase { RISCV_BASE } else { X86_BASE };
    let word = |address: u64, own: u64| -> u32 {
        match options.layout {
            Layout::Before | Layout::After if address < 1 << 32 => address as u32,
            Layout::Before | Layout::After => (base as i64 - 1 - address as i64) as u32,
            Layout::AfterBase => (address - base) as u32,
            Layout::Relative => address.wrapping_sub(own) as u32,
        }
    };
    let addresses = |memory: &mut Memory| {
        memory.align(alignment);
        for symbol in symbols {
            let own = memory.here();
            memory.u32(word(symbol.0, own));
        }
        memory.align(alignment);
        if options.layout != Layout::Relative {
            memory.u64(if options.relocatable { 0 } else { base });
        }
    };
    if options.layout == Layout::Before {
        addresses(memory);
    }
    memory.align(alignment);
    memory.u32(symbols.len() as u32);
    memory.align(alignment);
    let names = memory.bytes.len();
    let mut markers = Vec::new();
    for (i, (_, kind, name)) in symbols.iter().enumerate() {
        if i % 256 == 0 {
            markers.push((memory.bytes.len() - names) as u32);
        }
        let mut packed = vec![*kind];
        match name.strip_prefix("function_") {
            Some(rest) => packed.extend([&[1], rest.as_bytes()].concat()),
            None => packed.extend(name.as_bytes()),
        }
        match packed.len() {
            len @ 0..128 => memory.bytes.push(len as u8),
            len => memory.bytes.extend([(len & 0x7f) as u8 | 0x80, (len >> 7) as u8]),
        }
        memory.bytes.extend(packed);
    }
    memory.align(alignment);
    markers.into_iter().for_each(|m| memory.u32(m));
    let by_name = |memory: &mut Memory| {
        memory.align(alignment);
        let mut order: Vec<usize> = (0..symbols.len()).collect();
        order.sort_by_key(|&i| &symbols[i].2);
        order.into_iter().for_each(|i| memory.bytes.extend(&(i as u32).to_be_bytes()[1..]));
    };
    if options.layout == Layout::Before {
        by_name(memory);
    }
    memory.align(alignment);
    let table = memory.bytes.len();
    let mut positions = Vec::new();
    for byte in 0..256 {
        positions.push((memory.bytes.len() - table) as u16);
        memory.bytes.extend(token(byte).into_bytes());
        memory.bytes.push(0);
    }
    memory.align(alignment);
    positions.into_iter().for_each(|p| memory.bytes.extend(p.to_le_bytes()));
    if options.layout != Layout::Before {
        addresses(memory);
        by_name(memory);
    }
}

/// An ELF file with one segment for everything.
fn elf(memory: &Memory, machine: Machine) -> Vec<u8> {
    let number: u16 = if machine == Machine::X86 { 62 } else { 243 };
    wrap_elf(&memory.bytes, memory.base, number)
}

/// An ELF file whose only segment has `bytes` at `address`.
pub fn wrap_elf(bytes: &[u8], address: u64, machine: u16) -> Vec<u8> {
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0];
    file.resize(16, 0);
    file.extend([2_u16.to_le_bytes(), machine.to_le_bytes()].concat());
    file.extend(1_u32.to_le_bytes());
    for word in [0x100_0000_u64, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 1, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    file.extend([1_u32.to_le_bytes(), 7_u32.to_le_bytes()].concat());
    let len = bytes.len() as u64;
    for word in [PAGE as u64, address, 0x100_0000, len, len, PAGE as u64] {
        file.extend(word.to_le_bytes());
    }
    file.resize(PAGE, 0);
    file.extend(bytes);
    file
}

fn flat_header() -> Vec<u8> {
    let mut header = vec![0x6f, 0, 0, 0, 0, 0, 0, 0];
    for word in [0x20_0000_u64, 0x40_0000, 0] {
        header.extend(word.to_le_bytes());
    }
    header.extend([2_u32.to_le_bytes(), [0; 4]].concat());
    header.resize(0x30, 0);
    header.extend(b"RISCV\0\0\0RSC\x05\0\0\0\0");
    header
}

/// Gives an ELF file of [`wrap_elf`] sections: a symbol table, and `.BTF` for a piece of it.
pub fn add_sections(
    file: &mut Vec<u8>,
    symbols: &[(u64, u8, String)],
    btf: Option<std::ops::Range<usize>>,
) {
    let mut strings = vec![0];
    let mut table = vec![0; 24];
    for (address, kind, name) in symbols {
        table.extend((strings.len() as u32).to_le_bytes());
        // Global, function or object, in a section.
        table.extend([if kind.eq_ignore_ascii_case(&b't') { 0x12 } else { 0x11 }, 0, 1, 0]);
        table.extend([address.to_le_bytes(), [0; 8]].concat());
        strings.extend(name.as_bytes());
        strings.push(0);
    }
    let names = b"\0.symtab\0.strtab\0.BTF\0";
    let mut place = |bytes: &[u8]| {
        let start = file.len().next_multiple_of(8);
        file.resize(start, 0);
        file.extend(bytes);
        start..file.len()
    };
    let (table, strings, names) = (place(&table), place(&strings), place(names));
    // Name, type, range, link, information, size of an entry.
    let headers = [
        (0, 0, 0..0, 0, 0, 0),
        (1, 2, table, 2, 1, 24),
        (9, 3, strings, 0, 0, 0),
        (9, 3, names, 0, 0, 0),
        (17, 1, btf.unwrap_or(0..0), 0, 0, 0),
    ];
    let start = file.len().next_multiple_of(8);
    file.resize(start, 0);
    for (name, kind, range, link, information, entry) in headers {
        for word in [name, kind] {
            file.extend(u32::to_le_bytes(word));
        }
        for word in [0, 0, range.start as u64, range.len() as u64] {
            file.extend(word.to_le_bytes());
        }
        for word in [link, information] {
            file.extend(u32::to_le_bytes(word));
        }
        for word in [8_u64, entry] {
            file.extend(word.to_le_bytes());
        }
    }
    file[40..48].copy_from_slice(&(start as u64).to_le_bytes());
    file[60..64].copy_from_slice(&[5, 0, 3, 0]);
}

/// A bzImage around a compressed payload, with the uncompressed size that the build appends to
/// all but gzip.
pub fn bzimage(payload: &[u8], appended: Option<usize>) -> Vec<u8> {
    let mut file = vec![0; 3 * 512];
    file[0x1f1] = 2;
    file[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    file[0x202..0x206].copy_from_slice(b"HdrS");
    file[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    file[0x234] = 1;
    file[0x236] = 1;
    let mut payload = payload.to_vec();
    payload.extend(appended.map(|size| (size as u32).to_le_bytes()).into_iter().flatten());
    file[0x248..0x24c].copy_from_slice(&100_u32.to_le_bytes());
    file[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    file.resize(3 * 512 + 100, 0);
    file.extend(payload);
    file.resize(file.len() + 64, 0);
    file
}

/// An EFI zboot image around a compressed payload.
pub fn zboot(payload: &[u8], name: &[u8]) -> Vec<u8> {
    let mut file = b"MZ\0\0zimg".to_vec();
    file.extend([128_u32.to_le_bytes(), (payload.len() as u32).to_le_bytes()].concat());
    file.resize(24, 0);
    file.extend(name);
    file.resize(0x38, 0);
    file.extend(0x8182_23cd_u32.to_le_bytes());
    file.resize(128, 0);
    file.extend(payload);
    file.extend([0; 32]);
    file
}

/// lz4 in the "legacy" frame.
pub fn lz4_legacy(compressed_block: &[u8]) -> Vec<u8> {
    let mut data = 0x184c_2102_u32.to_le_bytes().to_vec();
    data.extend((compressed_block.len() as u32).to_le_bytes());
    data.extend(compressed_block);
    data
}
