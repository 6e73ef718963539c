//! Events of a module, from its file. Its data is relocated as the module loader would do it.

use object::elf::{SHF_ALLOC, SHF_EXECINSTR, SHT_NOBITS, SHT_RELA};
use object::read::elf::{FileHeader as _, SectionHeader as _};

use super::super::module::{ModuleError, absolute, header, place};
use super::super::read::u64_at;
use super::super::{Arch, Kernel, KernelError};
use super::memory::Memory;
use super::module::{Layout, MOST_EVENTS};
use super::{Event, EventLayout, Origin};

/// The address of the first section, where no kernel has anything.
const BASE: u64 = 1 << 32;
/// What lies between the beginnings of two sections at least.
const APART: u64 = 1 << 12;
/// Sections that a file may have, and bytes of all together.
const MOST_SECTIONS: usize = 1 << 12;
const MOST_BYTES: usize = 256 << 20;

/// The data of a module's file as if it were in memory, its pointers to itself filled in. Nothing is
/// where a loaded module has it.
#[derive(Clone, Debug)]
pub struct ModuleData {
    arch: Arch,
    /// Addresses ascending.
    sections: Vec<Section>,
    /// Of the table of events.
    events: Vec<u8>,
}

#[derive(Clone, Debug)]
struct Section {
    address: u64,
    bytes: Vec<u8>,
}

impl ModuleData {
    /// Reads a module's file (ELF, not compressed).
    ///
    /// # Errors
    /// When it is no module, or a damaged one.
    pub fn parse(data: &[u8]) -> Result<Self, ModuleError> {
        let (header, endian, arch) = header(data)?;
        let absolute = absolute(arch);
        let sections = header.sections(endian, data)?;
        let symbols = sections.symbols(endian, data, object::elf::SHT_SYMTAB)?;
        // By the section's number: its place in the list.
        let mut places = vec![None; sections.len()];
        let mut placed: Vec<Section> = Vec::new();
        let (mut next, mut total) = (BASE, 0);
        for (number, section) in sections.enumerate() {
            let flags = section.sh_flags(endian);
            let is_data = flags.contains(SHF_ALLOC) && !flags.contains(SHF_EXECINSTR);
            if !is_data || section.sh_type(endian) == SHT_NOBITS || placed.len() == MOST_SECTIONS {
                continue;
            }
            let bytes = section.data(endian, data)?.to_vec();
            total += bytes.len();
            if total > MOST_BYTES {
                return Err(ModuleError::Large);
            }
            if let Some(place) = places.get_mut(number.0) {
                *place = Some(placed.len());
            }
            let address = next;
            next += (bytes.len() as u64).next_multiple_of(APART) + APART;
            placed.push(Section { address, bytes });
        }
        let place_of = |number: usize| places.get(number).copied().flatten();
        for (_, section) in sections.enumerate() {
            if section.sh_type(endian) != SHT_RELA {
                continue;
            }
            let Some(target) = place_of(section.info_link(endian).0) else { continue };
            let Some((relocations, _)) = section.rela(endian, data)? else { continue };
            for relocation in relocations {
                if relocation.r_type(endian, false) != absolute {
                    continue;
                }
                // Of others, such as the kernel, nothing is needed, nor where code is.
                let Some(meant) = place(&symbols, endian, relocation) else { continue };
                let (section, offset) = meant?;
                let Some(to) = place_of(section).and_then(|to| placed.get(to)) else { continue };
                let value = to.address.wrapping_add(offset);
                let at = usize::try_from(relocation.r_offset.get(endian)).ok();
                let word = at
                    .zip(placed.get_mut(target))
                    .and_then(|(at, section)| section.bytes.get_mut(at..at.checked_add(8)?));
                word.ok_or(ModuleError::Table)?.copy_from_slice(&value.to_le_bytes());
            }
        }
        let table = sections.section_by_name(endian, b"_ftrace_events");
        let table = table.and_then(|(number, _)| placed.get(place_of(number.0)?));
        let events = table.map(|table| table.bytes.clone()).unwrap_or_default();
        Ok(Self { arch, sections: placed, events })
    }

    /// The architecture that it is for.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.arch
    }
}

impl Memory for ModuleData {
    fn read(&self, address: u64, out: &mut [u8]) -> bool {
        let after = self.sections.partition_point(|section| section.address <= address);
        let found = || {
            let section = self.sections.get(after.checked_sub(1)?)?;
            let at = usize::try_from(address - section.address).ok()?;
            section.bytes.get(at..at.checked_add(out.len())?)
        };
        match found() {
            Some(bytes) => out.copy_from_slice(bytes),
            None => return false,
        }
        true
    }

    fn slide(&self) -> u64 {
        0
    }
}

impl Kernel {
    /// The events of a module for this kernel, by name, with addresses of no meaning.
    ///
    /// # Errors
    /// When the kernel does not say how it describes events of modules.
    pub fn module_file_events(&self, module: &ModuleData) -> Result<Vec<Event>, KernelError> {
        let (layout, own) = self.module_layout()?;
        let calls = module.events.chunks_exact(8).filter_map(|word| u64_at(word, 0));
        let calls = calls.take(MOST_EVENTS as usize);
        let mut events: Vec<Event> =
            calls.filter_map(|call| file_event(module, layout, own, call)).collect();
        events.sort_by(|a, b| (&a.system, &a.name).cmp(&(&b.system, &b.name)));
        Ok(events)
    }
}

fn file_event(memory: &dyn Memory, layout: &EventLayout, own: &Layout, call: u64) -> Option<Event> {
    let head = own.head(memory, layout, call)?;
    let fields = layout.fields(memory, head.class);
    let print = layout.print(memory, call);
    let origin = Origin::Tracepoint(head.point.clone(), head.tracepoint);
    Some(Event { system: head.system, name: head.point, origin, address: call, fields, print })
}
