//! Reads the parts of a vmlinux ELF file that are used: segments, BTF, and the symbol table if
//! there is one.

use std::ops::Range;

use object::LittleEndian as Le;
use object::elf;
use object::read::elf::{FileHeader as _, ProgramHeader as _, SectionHeader as _, Sym as _};

use super::read::{index, wide};
use super::space::Segment;
use super::symbols::{Builder, Symbols};
use super::{Arch, KernelError};

type Header = elf::FileHeader64<Le>;

/// What an ELF file says about itself.
pub(super) struct Elf {
    pub(super) arch: Arch,
    pub(super) segments: Vec<Segment>,
    /// File range of the `.BTF` section.
    pub(super) btf: Option<Range<usize>>,
}

fn damaged(error: impl std::fmt::Display) -> KernelError {
    KernelError::Damaged(format!("ELF: {error}"))
}

/// Which machine an ELF file is for, by its identification alone.
fn machine(data: &[u8]) -> Result<Arch, KernelError> {
    let unsupported = |found: String| Err(KernelError::Architecture { found });
    // e_ident: class at 4, byte order at 5; e_machine at 18.
    let wide = data.get(4) == Some(&2);
    let little = data.get(5) == Some(&1);
    let Some(&[low, high]) = data.get(18..).and_then(<[u8]>::first_chunk::<2>) else {
        return Err(damaged("the header is cut off"));
    };
    let number =
        if little { u16::from_le_bytes([low, high]) } else { u16::from_be_bytes([low, high]) };
    match (number, wide, little) {
        (62, true, true) => Ok(Arch::X86_64),
        (243, true, true) => Ok(Arch::Riscv64),
        (3, ..) => unsupported("i386 (32-bit x86)".to_owned()),
        (62, false, _) => unsupported("x32".to_owned()),
        (243, false, _) => unsupported("riscv32".to_owned()),
        (183, ..) => unsupported("aarch64".to_owned()),
        (40, ..) => unsupported("32-bit Arm".to_owned()),
        (21, ..) => unsupported("powerpc64".to_owned()),
        (22, ..) => unsupported("s390x".to_owned()),
        (258, ..) => unsupported("loongarch64".to_owned()),
        (other, ..) => unsupported(format!("ELF machine {other}")),
    }
}

impl Elf {
    pub(super) fn parse(data: &[u8]) -> Result<Self, KernelError> {
        let arch = machine(data)?;
        let header = Header::parse(data).map_err(damaged)?;
        if header.e_type(Le) != elf::ET_EXEC && header.e_type(Le) != elf::ET_DYN {
            return Err(KernelError::NotAKernel {
                found: "an ELF file that is not an executable (a kernel module or object file?)"
                    .to_owned(),
            });
        }
        let programs = header.program_headers(Le, data).map_err(damaged)?;
        let mut segments = Vec::new();
        for program in programs.iter().filter(|p| p.p_type(Le) == elf::PT_LOAD) {
            let (offset, len) = (program.p_offset(Le), program.p_filesz(Le));
            let need = offset.saturating_add(len);
            if need > wide(data.len()) {
                let have = wide(data.len());
                return Err(KernelError::Truncated { what: "the vmlinux ELF file", need, have });
            }
            segments.push(Segment {
                address: program.p_vaddr(Le),
                offset: index(offset),
                len: index(len),
                executable: program.p_flags(Le).contains(elf::PF_X),
            });
        }
        if segments.is_empty() {
            return Err(KernelError::NotAKernel {
                found: "an ELF file without anything to load (only debug information?)".to_owned(),
            });
        }
        Ok(Self { arch, segments, btf: section(header, data, b".BTF") })
    }
}

/// The file range of a section; absent or damaged tables mean there is none.
fn section(header: &Header, data: &[u8], name: &[u8]) -> Option<Range<usize>> {
    let sections = header.sections(Le, data).ok()?;
    let (_, found) = sections.section_by_name(Le, name)?;
    let (offset, len) = found.file_range(Le)?;
    let range = index(offset)..index(offset.checked_add(len)?);
    (range.end <= data.len()).then_some(range)
}

/// The link addresses of a section, where the file's section table tells them.
pub(super) fn section_addresses(data: &[u8], name: &str) -> Option<Range<u64>> {
    let header = Header::parse(data).ok()?;
    let sections = header.sections(Le, data).ok()?;
    let (_, found) = sections.section_by_name(Le, name.as_bytes())?;
    let start = found.sh_addr(Le);
    Some(start..start.checked_add(found.sh_size(Le))?)
}

/// The symbols of an unstripped vmlinux, for kernels built without kallsyms.
pub(super) fn symbols(data: &[u8]) -> Option<Symbols> {
    let header = Header::parse(data).ok()?;
    let sections = header.sections(Le, data).ok()?;
    let table = sections.symbols(Le, data, elf::SHT_SYMTAB).ok()?;
    let mut builder = Builder::default();
    for symbol in table.symbols() {
        let kind = symbol.st_type();
        let code = kind == elf::STT_FUNC;
        if symbol.st_shndx(Le) == elf::SHN_UNDEF
            || !(code || kind == elf::STT_OBJECT || kind == elf::STT_NOTYPE)
        {
            continue;
        }
        let name = symbol.name(Le, table.strings()).ok().and_then(|n| str::from_utf8(n).ok());
        // Labels of the assembler and of the compiler are no names.
        let Some(name) = name.filter(|n| !n.is_empty() && !n.starts_with('.')) else { continue };
        let kind = match (code, symbol.st_bind()) {
            (true, elf::STB_WEAK) => b'W',
            (true, _) => b'T',
            (false, _) => b'D',
        };
        builder.push(symbol.st_value(Le), kind, name.as_bytes());
    }
    builder.finish_ranked()
}
