//! Files of kernel modules: the input chooses the architecture, and damages a module that has functions and
//! events.

use std::sync::OnceLock;

use crate::kernels::damage;
use vmtrace::kernel::ModuleFile;
use vmtrace::kernel::tracepoints::{Memory as _, ModuleData};

/// A section: name, type, flags, contents, link, info, bytes of an entry.
type Section = (&'static str, u32, u64, Vec<u8>, u32, u32, u64);

const PROGBITS: u32 = 1;
const SYMTAB: u32 = 2;
const STRTAB: u32 = 3;
const RELA: u32 = 4;
const ALLOC: u64 = 2;
const EXEC: u64 = 4;
/// Where the first section with data is put.
const FIRST: u64 = 1 << 32;

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Place, symbol and addend of pointers, in one table.
fn relocations(kind: u64, list: &[(u64, u64, u64)]) -> Vec<u8> {
    let each = list.iter().map(|&(at, symbol, addend)| [at, symbol << 32 | kind, addend]);
    words(&each.flatten().collect::<Vec<_>>())
}

/// A relocatable file for a machine whose relocation for a pointer is this.
fn module(machine: u16, pointer: u64, table: &'static str) -> Vec<u8> {
    let function = "f";
    let strings = format!("\0{function}\0").into_bytes();
    // Name, kind, section; where it begins, and its bytes.
    let symbol = |name: u64, kind: u64, section: u64, value| {
        words(&[name | kind << 32 | section << 48, value, 0])
    };
    let symbols =
        [symbol(0, 0, 0, 0), symbol(0, 3, 5, 0), symbol(1, 2, 4, 16), symbol(0, 3, 4, 0)].concat();
    let mut sections: Vec<Section> = vec![
        ("", 0, 0, vec![], 0, 0, 0),
        (".shstrtab", STRTAB, 0, vec![], 0, 0, 0),
        (".strtab", STRTAB, 0, strings, 0, 0, 0),
        (".symtab", SYMTAB, 0, symbols, 2, 1, 24),
        (".text", PROGBITS, ALLOC | EXEC, vec![0x90; 64], 0, 0, 0),
        (".data", PROGBITS, ALLOC, vec![0; 256], 0, 0, 0),
        ("_ftrace_events", PROGBITS, ALLOC, vec![0; 16], 0, 0, 0),
        ("r1", RELA, 0, relocations(pointer, &[(0, 1, 0), (8, 1, 64)]), 3, 6, 24),
        ("r2", RELA, 0, relocations(pointer, &[(16, 1, 128), (32, 2, 0)]), 3, 5, 24),
        (table, PROGBITS, ALLOC, vec![0; 8], 0, 0, 0),
        ("r3", RELA, 0, relocations(pointer, &[(0, 3, 16)]), 3, 9, 24),
        (".modinfo", PROGBITS, ALLOC, b"name=m\0".to_vec(), 0, 0, 0),
    ];
    let names: String = sections.iter().map(|section| format!("{}\0", section.0)).collect();
    sections[1].3 = names.clone().into_bytes();
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    file.extend([1_u16, machine].map(u16::to_le_bytes).concat());
    file.extend(1_u32.to_le_bytes());
    let total: usize = sections.iter().map(|section| section.3.len().next_multiple_of(8)).sum();
    file.extend(words(&[0, 0, 64 + total as u64]));
    file.extend([0; 4]);
    let count = u16::try_from(sections.len()).expect("few");
    file.extend([64_u16, 0, 0, 64, count, 1].map(u16::to_le_bytes).concat());
    let mut headers = Vec::new();
    let mut name_at = 0_u32;
    for (name, kind, flags, content, link, info, entry) in sections {
        headers.extend([name_at, kind].map(u32::to_le_bytes).concat());
        headers.extend(words(&[flags, 0, file.len() as u64, content.len() as u64]));
        headers.extend([link, info].map(u32::to_le_bytes).concat());
        headers.extend(words(&[8, entry]));
        file.extend(&content);
        file.resize(file.len().next_multiple_of(8), 0);
        name_at += u32::try_from(name.len() + 1).expect("short");
    }
    file.extend(headers);
    file
}

/// One for each machine.
fn modules() -> &'static [Vec<u8>; 2] {
    static MODULES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    MODULES.get_or_init(|| {
        [module(62, 1, "__mcount_loc"), module(243, 2, "__patchable_function_entries")]
    })
}

pub(crate) fn run(input: &[u8]) {
    let Some((&choice, changes)) = input.split_first() else { return };
    let mut file = modules()[usize::from(choice & 1)].clone();
    damage(&mut file, 0, changes);
    let whole = changes.len() < 5;
    match ModuleFile::parse(&file) {
        Ok(module) => assert!(!whole || module.functions.len() == 1, "{module:?}"),
        Err(error) => assert!(!whole, "{error}"),
    }
    let data = match ModuleData::parse(&file) {
        Ok(data) => data,
        Err(error) => return assert!(!whole, "{error}"),
    };
    for at in 0..0x8000 {
        let mut word = [0; 8];
        let found = data.read(FIRST + 8 * at, &mut word);
        // A pointer to what is 128 bytes behind the beginning.
        let expected = (FIRST + 128).to_le_bytes();
        assert!(!whole || at != 2 || (found && word == expected), "{word:?}");
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    vec![vec![0], vec![1]]
}
