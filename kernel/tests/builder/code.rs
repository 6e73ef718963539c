//! Kernels with code made by hand, and the tables that describe it. Shared like the other kernels.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::OnceLock;

use super::{BANNER, add_sections, wrap_elf};

const BASE: u64 = 0xffff_ffff_8100_0000;
/// Where data begin in the kernel.
pub const DATA: usize = 0x2000;
/// The stack pointer's number in the ORC tables here.
const STACK: u16 = 3;

/// `push rax` and `pop rax`.
pub const PUSH: &[u8] = &[0x50];
pub const POP: &[u8] = &[0x58];
pub const NOP5: &[u8] = &[0x0f, 0x1f, 0x44, 0, 0];

/// An assembler for a few instructions, and the tables that tell of them.
#[derive(Default)]
pub struct Code {
    pub bytes: Vec<u8>,
    pub symbols: Vec<(u64, u8, String)>,
    pub labels: HashMap<String, u64>,
    /// Where a distance to a label belongs, and its size.
    pub distances: Vec<(usize, usize, String)>,
    pub sites: Vec<u64>,
    pub returns: Vec<u64>,
    pub retpolines: Vec<u64>,
    pub static_calls: Vec<u64>,
    pub jump_labels: Vec<(u64, String)>,
    /// Address, its length, and the replacement.
    pub alternatives: Vec<(u64, u8, Vec<u8>)>,
    pub orc: Vec<(u64, u16, u16)>,
    pub no_orc: bool,
}

impl Code {
    pub fn new() -> Self {
        let mut code = Self::default();
        code.symbol("_stext");
        code.raw(&[0xcc; 16]);
        for name in ["__fentry__", "__x86_return_thunk", "__x86_indirect_thunk_rax"] {
            code.symbol(name).raw(&[0xc3]);
        }
        code.symbol("__x86_indirect_thunk_r11").raw(&[0xc3]);
        code.symbol("untraced").depth(8).ret();
        code.symbol("__SCT__call").ret().raw(&[0x0f, 0xb9, 0xcc]);
        code
    }

    pub fn here(&self) -> u64 {
        BASE + self.bytes.len() as u64
    }

    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend(bytes);
        self
    }

    pub fn label(&mut self, name: &str) -> &mut Self {
        self.labels.insert(name.to_owned(), self.here());
        self
    }

    pub fn symbol(&mut self, name: &str) -> &mut Self {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0xcc);
        self.symbols.push((self.here(), b'T', name.to_owned()));
        self.label(name)
    }

    /// One that can be traced.
    pub fn function(&mut self, name: &str) -> &mut Self {
        self.symbol(name).depth(8).raw(&[0xf3, 0x0f, 0x1e, 0xfa]);
        self.sites.push(self.here());
        self.branch(&[0xe8], 4, "__fentry__")
    }

    pub fn branch(&mut self, code: &[u8], size: usize, to: &str) -> &mut Self {
        self.raw(code);
        self.distances.push((self.bytes.len(), size, to.to_owned()));
        self.raw(&[0; 4][..size])
    }

    pub fn jump(&mut self, to: &str) -> &mut Self {
        self.branch(&[0xe9], 4, to)
    }

    pub fn short(&mut self, to: &str) -> &mut Self {
        self.branch(&[0xeb], 1, to)
    }

    pub fn jump_if(&mut self, to: &str) -> &mut Self {
        self.branch(&[0x0f, 0x84], 4, to)
    }

    pub fn ret(&mut self) -> &mut Self {
        self.returns.push(self.here());
        self.jump("__x86_return_thunk")
    }

    pub fn indirect(&mut self) -> &mut Self {
        self.at_retpoline().jump("__x86_indirect_thunk_rax")
    }

    pub fn at_retpoline(&mut self) -> &mut Self {
        self.retpolines.push(self.here());
        self
    }

    pub fn at_static_call(&mut self) -> &mut Self {
        self.static_calls.push(self.here());
        self
    }

    /// A static branch follows.
    pub fn may_jump(&mut self, to: &str) -> &mut Self {
        self.jump_labels.push((self.here(), to.to_owned()));
        self
    }

    /// So many bytes from here on, so many are replaced.
    pub fn alternative(&mut self, after: u64, len: u8, by: &[u8]) -> &mut Self {
        self.alternatives.push((self.here() + after, len, by.to_vec()));
        self
    }

    /// What ORC tells from here on; 0 for nothing.
    pub fn depth(&mut self, depth: u16) -> &mut Self {
        self.orc.push((self.here(), depth, if depth == 0 { 0 } else { STACK }));
        self
    }

    pub fn image(&self) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        let mut symbols = self.symbols.clone();
        for (at, size, to) in &self.distances {
            let distance = self.labels[to].wrapping_sub(BASE + (at + size) as u64);
            bytes[*at..at + size].copy_from_slice(&distance.to_le_bytes()[..*size]);
        }
        let mut data = |start: &str, end: &str, make: &mut dyn FnMut(u64) -> Vec<u8>| {
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            let address = BASE + bytes.len() as u64;
            symbols.push((address, b'D', start.to_owned()));
            bytes.extend(make(address));
            symbols.push((BASE + bytes.len() as u64, b'D', end.to_owned()));
        };
        let distance = |from: u64, to: u64| (to.wrapping_sub(from) as u32).to_le_bytes();
        let list = |list: &[u64], start: u64| -> Vec<u8> {
            let places = (start..).step_by(4);
            list.iter().zip(places).flat_map(|(&to, from)| distance(from, to)).collect()
        };
        data("_etext", "_data", &mut |address| vec![0; DATA - (address - BASE) as usize]);
        data("linux_banner", "after_banner", &mut |_| BANNER.as_bytes().to_vec());
        data("__start_mcount_loc", "__stop_mcount_loc", &mut |_| {
            self.sites.iter().flat_map(|site| site.to_le_bytes()).collect()
        });
        data("__return_sites", "__return_sites_end", &mut |start| list(&self.returns, start));
        data("__retpoline_sites", "__retpoline_sites_end", &mut |start| {
            list(&self.retpolines, start)
        });
        data("__start_static_call_sites", "__stop_static_call_sites", &mut |start| {
            let entry =
                |(i, &site): (usize, &u64)| [distance(start + 8 * i as u64, site), [0; 4]].concat();
            self.static_calls.iter().enumerate().flat_map(entry).collect()
        });
        data("__start___jump_table", "__stop___jump_table", &mut |start| {
            let entry = |(i, (code, to)): (usize, &(u64, String))| {
                let place = start + 16 * i as u64;
                let target = distance(place + 4, self.labels[to]);
                [&distance(place, *code)[..], &target, &[0; 8]].concat()
            };
            self.jump_labels.iter().enumerate().flat_map(entry).collect()
        });
        let mut replacements = Vec::new();
        data("replacements", "after_replacements", &mut |start| {
            let mut bytes = Vec::new();
            for (address, len, by) in &self.alternatives {
                let place = start + bytes.len() as u64;
                replacements.push((*address, *len, place, by.len() as u8));
                bytes.extend(by);
            }
            bytes
        });
        data("__alt_instructions", "__alt_instructions_end", &mut |start| {
            let entry = |(i, e): (usize, &(u64, u8, u64, u8))| {
                let place = start + 14 * i as u64;
                let (to, by) = (distance(place, e.0), distance(place + 4, e.2));
                [&to[..], &by, &[0; 4], &[e.1, e.3]].concat()
            };
            replacements.iter().enumerate().flat_map(entry).collect()
        });
        let orc = if self.no_orc { &[][..] } else { &self.orc };
        data("__start_orc_unwind_ip", "__stop_orc_unwind_ip", &mut |start| {
            list(&orc.iter().map(|entry| entry.0).collect::<Vec<_>>(), start)
        });
        data("__start_orc_unwind", "__stop_orc_unwind", &mut |_| {
            let entry = |e: &(u64, u16, u16)| [e.1, 0, e.2 | 0x200].map(u16::to_le_bytes).concat();
            orc.iter().flat_map(entry).collect()
        });
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        symbols.sort_by_key(|symbol| symbol.0);
        let mut image = wrap_elf(&bytes, BASE, 62);
        add_sections(&mut image, &symbols, None);
        image
    }
}

/// Every hard case in one image, the size of its code, and where its tables are, less those of
/// sites: if these are damaged, it has no exits.
pub fn everything() -> &'static (Vec<u8>, usize, Range<usize>) {
    static IMAGE: OnceLock<(Vec<u8>, usize, Range<usize>)> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let mut code = Code::new();
        for i in 0..40 {
            let name = |what: &str| format!("{what}{i}");
            code.function(&name("f")).jump_if(&name("f.cold.")).raw(PUSH).raw(POP).ret();
            code.jump("untraced").indirect().short(&name("f"));
            code.symbol(&name("f.cold.")).depth(8).ret();
            code.function(&name("g")).may_jump(&name("f.cold."));
            code.raw(NOP5).at_static_call().jump("__SCT__call");
            code.alternative(0, 5, &[0x90]);
            code.raw(NOP5).ret().raw(b"\x0f\x0bxen").depth(0).ret();
        }
        let tables = 4 * (code.returns.len() + code.retpolines.len())
            + 30 * code.alternatives.len()
            + 10 * code.orc.len();
        let first = 4096 + DATA + 64 + 8 * code.sites.len();
        (code.image(), code.bytes.len(), first..first + tables)
    })
}
