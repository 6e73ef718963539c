//! Reads the code of a module, and the tables that describe it. Everything is bounded, and nothing
//! is trusted.

use super::pages::Pages;
use crate::kernel::{Arch, Btf, ModulePiece, ModuleText};
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;

/// Sections of a module: several times what the largest has.
const MOST_SECTIONS: usize = 1 << 12;
const TOO_MANY: ExitsError = ExitsError::Absurd("it has more sections than a module can have");
const TOO_MUCH: ExitsError = ExitsError::Absurd("it has more code than a module can have");
/// Bytes of the name of one that is looked for, and some more.
const NAME: usize = 64;
/// Bytes of all code of a module.
const MOST_CODE: usize = 64 << 20;
/// Bytes of a table of a module.
const MOST_TABLE: u64 = 4 << 20;
/// Bytes of a table at the end of memory, of which nothing tells the length.
const LAST_TABLE: u64 = 64 << 10;
/// Code of a function without a size.
const UNSIZED: u64 = 4096;

/// Why the exits of a module cannot be found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExitsError {
    /// Guest memory is not as it should be.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// Something is absurd, or missing.
    #[error("{0}")]
    Absurd(&'static str),
    /// The kernel's own exits are not known.
    #[error("{0}")]
    Kernel(String),
}

/// Where a module has what.
#[derive(Clone, Copy, Debug)]
pub(in crate::tracer) struct Offsets {
    /// Or what it is that the kernel does not say.
    what: Result<What, &'static str>,
    /// Tables, each with the number of its entries: `None` where the kernel has no such.
    static_calls: Option<(u64, u64)>,
    labels: Option<(u64, u64)>,
    exceptions: Option<(u64, u64)>,
}

/// What exits are found by.
#[derive(Clone, Copy, Debug)]
enum What {
    /// The list of returns, in a section (x86-64).
    Returns { sect_attrs: u64, sections: Sections },
    /// All of the code (riscv64).
    Code(Memory),
}

/// The memory of a module by kinds (`struct module_memory`, since 6.4); its own table of instructions
/// that stop: an address, and where that has its entries, which begin with a distance; and who sets a
/// parameter, with the lock for that.
#[derive(Clone, Copy, Debug)]
struct Memory {
    first: u64,
    stride: u64,
    base: u64,
    size: u64,
    traps: (u64, u64),
    trap: u64,
    setter: u64,
}

/// `MOD_TEXT` and `MOD_INIT_TEXT` (include/linux/module.h).
const TEXT: u64 = 0;
const INIT_TEXT: u64 = 4;

/// What tells names and addresses of sections: files in sysfs.
#[derive(Clone, Copy, Debug)]
enum Sections {
    /// An array, with the number of its entries.
    Array { count: u64, first: u64, size: u64, name: u64, address: u64 },
    /// A list of pointers, which ends with none (since 6.14).
    List { list: u64, name: u64, address: u64 },
}

impl Offsets {
    /// By the kernel's type information.
    pub(super) fn find(arch: Arch, btf: &Btf) -> Self {
        let offset = |strukt: &str, member: &str| btf.member_offset(strukt, member).map(u64::from);
        let table = |table, count| Some((offset("module", table)?, offset("module", count)?));
        let array = || {
            Some(Sections::Array {
                count: offset("module_sect_attrs", "nsections")?,
                first: offset("module_sect_attrs", "attrs")?,
                size: btf.struct_size("module_sect_attr")?.into(),
                name: offset("module_sect_attr", "battr.attr.name")?,
                address: offset("module_sect_attr", "address")?,
            })
        };
        let list = || {
            let group = offset("module_sect_attrs", "grp").unwrap_or(0);
            Some(Sections::List {
                list: group + offset("attribute_group", "bin_attrs")?,
                name: offset("bin_attribute", "attr.name")?,
                address: offset("bin_attribute", "private")?,
            })
        };
        // Distances come first.
        let relative = offset("bug_entry", "bug_addr_disp") == Some(0);
        let owner = offset("mutex", "owner").or_else(|| {
            // PREEMPT_RT
            Some(offset("mutex", "rtmutex")? + offset("rt_mutex_base", "owner")?)
        });
        let memory = || {
            Some(What::Code(Memory {
                setter: offset("module", "param_lock")? + owner?,
                first: offset("module", "mem")?,
                stride: btf.struct_size("module_memory")?.into(),
                base: offset("module_memory", "base")?,
                size: offset("module_memory", "size")?,
                traps: table("bug_table", "num_bugs")?,
                trap: btf.struct_size("bug_entry").filter(|&size| size >= 4 && relative)?.into(),
            }))
        };
        let sections = || {
            let sect_attrs = offset("module", "sect_attrs")?;
            Some(What::Returns { sect_attrs, sections: array().or_else(list)? })
        };
        let what = match arch {
            Arch::X86_64 => {
                sections().ok_or("the kernel does not say where sections of modules are")
            }
            Arch::Riscv64 => memory().ok_or("the kernel does not say where code of modules is"),
        };
        Self {
            what,
            static_calls: table("static_call_sites", "num_static_call_sites"),
            labels: table("jump_entries", "num_jump_entries"),
            exceptions: table("extable", "num_exentries"),
        }
    }

    /// Sections of a module: names, as far as they matter, and run-time addresses.
    fn sections(
        sections: Sections,
        pages: &mut Pages<'_>,
        attrs: u64,
    ) -> Result<Vec<(Vec<u8>, u64)>, ExitsError> {
        let attrs = pages.word(attrs)?;
        if attrs == 0 {
            return Err(ExitsError::Absurd("the guest does not say where its sections are"));
        }
        let mut found = Vec::new();
        let mut add = |pages: &mut Pages<'_>, name: u64, address: u64| {
            let name = pages.word(name)?;
            found.push((pages.text(name, NAME)?, pages.word(address)?));
            Ok::<(), GuestError>(())
        };
        match sections {
            Sections::Array { count, first, size, name, address } => {
                let count = u64::from(pages.count(attrs.wrapping_add(count))?);
                if count > MOST_SECTIONS as u64 {
                    return Err(TOO_MANY);
                }
                for at in (0..count).map(|n| attrs.wrapping_add(first + n * size)) {
                    add(pages, at.wrapping_add(name), at.wrapping_add(address))?;
                }
            }
            Sections::List { list, name, address } => {
                let list = pages.word(attrs.wrapping_add(list))?;
                let mut at = (0..MOST_SECTIONS as u64).map(|n| list.wrapping_add(n * 8));
                loop {
                    let Some(next) = at.next() else {
                        return Err(TOO_MANY);
                    };
                    match pages.word(next)? {
                        0 => break,
                        at => add(pages, at.wrapping_add(name), at.wrapping_add(address))?,
                    }
                }
            }
        }
        Ok(found)
    }

    /// What `.return_sites` names: run-time addresses, ascending.
    fn returns(
        sections: Sections,
        pages: &mut Pages<'_>,
        attrs: u64,
    ) -> Result<Vec<u64>, ExitsError> {
        let sections = Self::sections(sections, pages, attrs)?;
        let start = sections.iter().find(|(name, _)| name == b".return_sites").map(|&(_, at)| at);
        let start = start.ok_or(ExitsError::Absurd("it has no list of its returns"))?;
        // Up to what comes next: what lies between names no return, or one by chance, which is
        // looked at before it is used.
        let next = sections.iter().map(|&(_, at)| at).filter(|&at| at > start).min();
        let len = next.map_or(LAST_TABLE, |next| next - start);
        let len = if len > MOST_TABLE { LAST_TABLE } else { len };
        let table = pages.some(start, usize::try_from(len).unwrap_or(0));
        let places = (0..).map(|n: u64| start.wrapping_add(n * 4));
        let distances = table.as_chunks::<4>().0.iter().map(|it| i32::from_le_bytes(*it));
        let mut returns: Vec<u64> = places
            .zip(distances)
            .map(|(place, distance)| place.wrapping_add_signed(distance.into()))
            .collect();
        returns.sort_unstable();
        returns.dedup();
        Ok(returns)
    }

    /// All code of a module by run-time addresses: what stays, and what is freed.
    fn code(
        memory: &Memory,
        pages: &Pages<'_>,
        module: u64,
    ) -> Result<Vec<(u64, Vec<u8>)>, ExitsError> {
        // Files for that are there before anything else of it runs.
        if pages.word(module.wrapping_add(memory.setter))? != 0 {
            return Err(ExitsError::Absurd("a process sets a parameter while it is loaded"));
        }
        let mut code = Vec::new();
        let mut left = MOST_CODE;
        for kind in [TEXT, INIT_TEXT] {
            let at = module.wrapping_add(memory.first + kind * memory.stride);
            let base = pages.word(at.wrapping_add(memory.base))?;
            let len = pages.count(at.wrapping_add(memory.size))?;
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            left = left.checked_sub(len).ok_or(TOO_MUCH)?;
            if len > 0 {
                code.push((base, pages.all(base, len)?));
            }
        }
        code.sort_unstable_by_key(|&(base, _)| base);
        let overlap = |pair: &[(u64, Vec<u8>)]| match pair {
            [(base, code), (next, _)] => next.wrapping_sub(*base) < code.len() as u64,
            _ => false,
        };
        if code.windows(2).any(overlap) {
            return Err(ExitsError::Absurd("what is freed of its code is not apart from the rest"));
        }
        Ok(code)
    }

    /// A table of entries of so many bytes, and its run-time address.
    fn table(
        pages: &Pages<'_>,
        module: u64,
        members: Option<(u64, u64)>,
        size: u64,
    ) -> Result<(u64, Vec<u8>), ExitsError> {
        let Some((table, count)) = members else { return Ok((0, Vec::new())) };
        let count = u64::from(pages.count(module.wrapping_add(count))?);
        if count * size > MOST_TABLE {
            return Err(ExitsError::Absurd("it has a longer table than a module can have"));
        }
        let table = pages.word(module.wrapping_add(table))?;
        let len = usize::try_from(count * size).unwrap_or(0);
        Ok((table, if len == 0 { Vec::new() } else { pages.all(table, len)? }))
    }
}

/// A function, or a part of one, by run-time address.
pub(super) struct Function<'a> {
    pub(super) start: u64,
    /// Bytes; 0 when not known.
    pub(super) size: u32,
    pub(super) name: &'a str,
    /// Number and run-time address of its site.
    pub(super) site: Option<(u32, u64)>,
}

/// Where a distance leads that is at a place of a table, which has this run-time address, by address
/// as if it were linked with the kernel.
fn relative(image: &Image, table: u64, at: usize, bytes: &[u8]) -> Option<u64> {
    let distance = bytes.get(at..at.checked_add(4)?)?.first_chunk::<4>()?;
    let distance = i64::from(i32::from_le_bytes(*distance));
    let to = table.wrapping_add(at as u64).wrapping_add_signed(distance);
    Some(to.wrapping_sub(image.slide))
}

/// The code of a module with its `struct module` at this run-time address, and with these
/// functions, which are ascending.
pub(super) fn read(
    guest: &dyn Guest,
    image: &Image,
    offsets: &Offsets,
    module: u64,
    functions: &[Function<'_>],
) -> Result<ModuleText, ExitsError> {
    let pages = Pages::new(guest, image);
    let link = |address: u64| address.wrapping_sub(image.slide);
    let mut text = ModuleText::default();
    let mut code = 0;
    for (number, function) in functions.iter().enumerate() {
        let next = functions.get(number + 1).map_or(u64::MAX, |next| next.start);
        let room = next.saturating_sub(function.start);
        let len = match function.size {
            0 => room.min(UNSIZED),
            size => room.min(size.into()),
        };
        let len = usize::try_from(len).unwrap_or(0);
        code += len;
        if code > MOST_CODE {
            return Err(TOO_MUCH);
        }
        text.pieces.push(ModulePiece {
            start: link(function.start),
            bytes: pages.all(function.start, len)?,
            name: function.name.into(),
            site: function.site.map(|(site, location)| (site, link(location))),
        });
    }
    // Distances to the code, and to where it goes (arch/x86/include/asm/extable.h,
    // include/linux/{jump_label,static_call_types}.h).
    let (table, bytes) = Offsets::table(&pages, module, offsets.static_calls, 8)?;
    text.static_calls =
        (0..bytes.len()).step_by(8).filter_map(|at| relative(image, table, at, &bytes)).collect();
    let ways = |table: u64, bytes: &[u8], size: usize| -> Vec<(u64, u64)> {
        let way =
            |at| Some((relative(image, table, at, bytes)?, relative(image, table, at + 4, bytes)?));
        (0..bytes.len()).step_by(size).filter_map(way).collect()
    };
    let (table, bytes) = Offsets::table(&pages, module, offsets.labels, 16)?;
    let labels = ways(table, &bytes, 16);
    text.labels = labels.iter().map(|&(from, _)| from).collect();
    let (table, bytes) = Offsets::table(&pages, module, offsets.exceptions, 12)?;
    text.ways = ways(table, &bytes, 12);
    text.ways.extend(labels);
    text.static_calls.sort_unstable();
    text.labels.sort_unstable();
    Ok(text)
}

/// The same with what exits are found by.
pub(super) fn read_with_exits(
    guest: &dyn Guest,
    image: &Image,
    offsets: &Offsets,
    module: u64,
    functions: &[Function<'_>],
) -> Result<ModuleText, ExitsError> {
    let what = offsets.what.map_err(ExitsError::Absurd)?;
    let mut text = read(guest, image, offsets, module, functions)?;
    let mut pages = Pages::new(guest, image);
    let link = |address: u64| address.wrapping_sub(image.slide);
    match what {
        What::Returns { sect_attrs, sections } => {
            let attrs = module.wrapping_add(sect_attrs);
            let returns = Offsets::returns(sections, &mut pages, attrs)?;
            text.returns = returns.into_iter().map(link).collect();
            text.returns.sort_unstable();
        }
        What::Code(memory) => {
            let code = Offsets::code(&memory, &pages, module)?;
            text.regions = code.into_iter().map(|(base, bytes)| (link(base), bytes)).collect();
            let Memory { traps, trap, .. } = memory;
            let (table, bytes) = Offsets::table(&pages, module, Some(traps), trap)?;
            let size = usize::try_from(trap).unwrap_or(usize::MAX);
            let places = (0..bytes.len()).step_by(size);
            text.traps = places.filter_map(|at| relative(image, table, at, &bytes)).collect();
            text.traps.sort_unstable();
        }
    }
    Ok(text)
}
