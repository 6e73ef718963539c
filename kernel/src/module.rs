//! Files of kernel modules: finds what can be traced in one, before it is loaded.

use std::collections::BTreeMap;

use object::elf::{
    EM_RISCV, EM_X86_64, ET_REL, FileHeader64, R_RISCV_64, R_X86_64_64, Rela64, SHT_RELA, STT_FUNC,
    STT_SECTION,
};
use object::read::elf::{FileHeader as _, Rela as _, SectionHeader as _, Sym as _};
use object::{LittleEndian, SectionIndex};

use super::Arch;

type Elf = FileHeader64<LittleEndian>;

/// A function of a module that can be traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFunction {
    /// Its names, the one that the kernel prints first.
    pub names: Vec<String>,
    /// The section that it is in.
    pub section: String,
    /// Where it begins in that.
    pub offset: u64,
}

/// A module's file (ELF, not compressed).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFile {
    /// What it says that it is called.
    pub name: Option<String>,
    /// The architecture that it is for.
    pub arch: Arch,
    /// In the order of its table.
    pub functions: Vec<ModuleFunction>,
}

/// Why a file is no module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModuleError {
    /// No ELF file, or a damaged one.
    #[error("it is damaged: {0}")]
    Elf(String),
    /// Of another kind.
    #[error("it is not a module of a 64-bit x86 or RISC-V kernel")]
    Other,
    /// A table refers to what is not there.
    #[error("it is damaged: one of its tables refers to what is not in it")]
    Table,
    /// It has more data than any module.
    #[error("it is damaged, or no module: it has more data than any module has")]
    Large,
}

impl From<object::read::Error> for ModuleError {
    fn from(error: object::read::Error) -> Self {
        Self::Elf(error.to_string())
    }
}

/// Symbols of a section by their offsets, the first of the file first.
type Names<'a> = BTreeMap<(usize, u64), Vec<&'a [u8]>>;

impl ModuleFile {
    /// Reads the sites that `__mcount_loc` will have (x86-64) or `__patchable_function_entries`
    /// has (riscv64), by its relocations.
    ///
    /// # Errors
    /// When it is no module, or a damaged one.
    pub fn parse(data: &[u8]) -> Result<Self, ModuleError> {
        let (header, endian, arch) = header(data)?;
        let sections = header.sections(endian, data)?;
        let symbols = sections.symbols(endian, data, object::elf::SHT_SYMTAB)?;
        let absolute = absolute(arch);
        let table = match arch {
            Arch::X86_64 => &b"__mcount_loc"[..],
            Arch::Riscv64 => &b"__patchable_function_entries"[..],
        };
        let mut names = Names::new();
        for (index, symbol) in symbols.enumerate() {
            let section = symbols.symbol_section(endian, symbol, index)?;
            let (Some(section), STT_FUNC) = (section, symbol.st_type()) else { continue };
            let name = symbols.symbol_name(endian, symbol)?;
            names.entry((section.0, symbol.st_value(endian))).or_default().push(name);
        }
        let mut functions = Vec::new();
        for (_, section) in sections.enumerate() {
            if section.sh_type(endian) != SHT_RELA {
                continue;
            }
            let of = SectionIndex(section.info_link(endian).0);
            if sections.section_name(endian, sections.section(of)?)? != table {
                continue;
            }
            let Some((relocations, _)) = section.rela(endian, data)? else { continue };
            for relocation in relocations {
                if relocation.r_type(endian, false) != absolute {
                    return Err(ModuleError::Table);
                }
                let place = place(&symbols, endian, relocation).ok_or(ModuleError::Table)?;
                let (section, offset) = place?;
                let found = starts(arch, offset)
                    .find_map(|start| Some((start, names.get(&(section, start))?)));
                // Of a weak function that another has taken the place of.
                let Some((offset, names)) = found else { continue };
                let header = sections.section(SectionIndex(section))?;
                let section = sections.section_name(endian, header)?;
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let names = names.iter().map(|name| text(name)).collect();
                functions.push(ModuleFunction { names, section: text(section), offset });
            }
        }
        functions.sort_by(|a, b| (&a.section, a.offset).cmp(&(&b.section, b.offset)));
        functions.dedup();
        let information = sections.section_by_name(endian, b".modinfo");
        let information = information.map(|(_, section)| section.data(endian, data)).transpose()?;
        let name = information.unwrap_or_default().split(|byte| *byte == 0);
        let mut name = name.filter_map(|entry| entry.strip_prefix(b"name="));
        let name = name.next().map(|name| String::from_utf8_lossy(name).into_owned());
        Ok(Self { name, arch, functions })
    }
}

/// What a module's file begins with.
pub(crate) fn header(data: &[u8]) -> Result<(&Elf, LittleEndian, Arch), ModuleError> {
    let header = Elf::parse(data)?;
    let endian = header.endian()?;
    let arch = match header.e_machine(endian) {
        EM_X86_64 => Arch::X86_64,
        EM_RISCV => Arch::Riscv64,
        _ => return Err(ModuleError::Other),
    };
    if header.e_type(endian) != ET_REL {
        return Err(ModuleError::Other);
    }
    Ok((header, endian, arch))
}

/// The kind of relocations that are addresses.
pub(crate) fn absolute(arch: Arch) -> object::elf::RelocationType {
    match arch {
        Arch::X86_64 => R_X86_64_64,
        Arch::Riscv64 => R_RISCV_64,
    }
}

/// Section and offset of what a relocation means; `None` when there is no such thing.
pub(crate) fn place<'a>(
    symbols: &object::read::elf::SymbolTable<'a, Elf>,
    endian: LittleEndian,
    relocation: &Rela64<LittleEndian>,
) -> Option<Result<(usize, u64), ModuleError>> {
    let index = relocation.symbol(endian, false)?;
    let symbol = match symbols.symbol(index) {
        Ok(symbol) => symbol,
        Err(error) => return Some(Err(error.into())),
    };
    let section = match symbols.symbol_section(endian, symbol, index) {
        Ok(section) => section?,
        Err(error) => return Some(Err(error.into())),
    };
    let base = if symbol.st_type() == STT_SECTION { 0 } else { symbol.st_value(endian) };
    Some(Ok((section.0, base.wrapping_add_signed(relocation.r_addend.get(endian)))))
}

/// Where the function of a site may begin.
fn starts(arch: Arch, site: u64) -> impl Iterator<Item = u64> {
    let places = match arch {
        // Behind endbr64, if there is one.
        Arch::X86_64 => [Some(site), site.checked_sub(4)],
        // Behind the word for ops, if there is one.
        Arch::Riscv64 => [Some(site), site.checked_add(8)],
    };
    places.into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_module_is_refused() {
        assert!(matches!(ModuleFile::parse(b""), Err(ModuleError::Elf(_))));
        assert!(matches!(ModuleFile::parse(&[0x7f; 64]), Err(ModuleError::Elf(_))));
    }
}
