//! Reads the `struct module` of a module in guest memory. Everything is bounded, and nothing is
//! trusted.

use super::pages::{Pages, place};
use super::text;
use crate::kernel::{FtraceKind, Kernel};
use crate::tracer::error::TraceError;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use std::collections::BTreeMap;

/// `MODULE_NAME_LEN` (include/linux/module.h).
const NAME: usize = 56;
/// `KSYM_NAME_LEN` of 6.1 and later.
const SYMBOL_NAME: usize = 512;
/// Sites and symbols of one module: several times what the largest has.
const MOST_SITES: u32 = 1 << 17;
const MOST_SYMBOLS: u32 = 1 << 19;
/// Bytes of names of one module.
const MOST_TEXT: usize = 32 << 20;
/// Bytes of `Elf64_Sym`.
const SYMBOL: usize = 24;
/// `STT_FUNC`.
const FUNCTION: u8 = 2;

/// Why a module cannot be traced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModuleError {
    /// Guest memory is not as it should be.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// Its sites cannot be prepared.
    #[error(transparent)]
    Sites(#[from] TraceError),
    /// Something is absurd.
    #[error("it has {0}")]
    Absurd(&'static str),
}

/// Where a module has what.
#[derive(Clone, Copy, Debug)]
pub(in crate::tracer) struct Offsets {
    /// What the table of sites has.
    kind: FtraceKind,
    name: u64,
    callsites: u64,
    callsites_count: u64,
    kallsyms: u64,
    symtab: u64,
    symbols_count: u64,
    strtab: u64,
    /// Where its code has what.
    pub(super) text: text::Offsets,
}

impl Offsets {
    /// By the kernel's type information.
    ///
    /// # Errors
    /// What it is that it lacks.
    pub(in crate::tracer) fn find(kernel: &Kernel) -> Result<Self, String> {
        let btf = kernel.btf().map_err(|error| error.to_string())?;
        let offset = |strukt: &str, member: &str| {
            let found = btf.member_offset(strukt, member).map(u64::from);
            found.ok_or_else(|| format!("the kernel has no {strukt}.{member}"))
        };
        Ok(Self {
            kind: kernel.ftrace_kind(),
            name: offset("module", "name")?,
            callsites: offset("module", "ftrace_callsites")?,
            callsites_count: offset("module", "num_ftrace_callsites")?,
            kallsyms: offset("module", "kallsyms")?,
            symtab: offset("mod_kallsyms", "symtab")?,
            symbols_count: offset("mod_kallsyms", "num_symtab")?,
            strtab: offset("mod_kallsyms", "strtab")?,
            text: text::Offsets::find(kernel.arch(), btf),
        })
    }
}

/// A function of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleSymbol {
    /// Run-time address.
    pub address: u64,
    /// Bytes; 0 when not known.
    pub size: u32,
    /// Its name.
    pub name: Box<str>,
}

/// A site, by run-time addresses.
pub(super) struct Found {
    pub(super) location: u64,
    pub(super) entry: u64,
    pub(super) names: Vec<Box<str>>,
    pub(super) size: u32,
    pub(super) pages: (u64, Option<u64>),
}

/// A module as it is in memory.
pub(super) struct Raw {
    pub(super) address: u64,
    pub(super) name: String,
    pub(super) sites: Vec<Found>,
    pub(super) symbols: Vec<ModuleSymbol>,
    pub(super) left_out: usize,
}

/// A name as it can be shown.
fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Names that the build puts on the padding before functions.
fn is_padding(name: &[u8]) -> bool {
    name.starts_with(b"__pfx_") || name.starts_with(b"__cfi_")
}

pub(super) fn read(
    guest: &dyn Guest,
    image: &Image,
    offsets: &Offsets,
    address: u64,
) -> Result<Raw, ModuleError> {
    let member = |offset: u64| address.wrapping_add(offset);
    let mut pages = Pages::new(guest, image);
    let name = shown(&pages.text(member(offsets.name), NAME)?);
    if name.is_empty() {
        return Err(ModuleError::Absurd("no name"));
    }
    let kallsyms = pages.word(member(offsets.kallsyms))?;
    let (symbols, mut named) = symbols(&mut pages, offsets, kallsyms)?;
    let count = pages.count(member(offsets.callsites_count))?;
    if count > MOST_SITES {
        return Err(ModuleError::Absurd("more sites than a module can have"));
    }
    let table = pages.word(member(offsets.callsites))?;
    let table = pages.all(table, if count == 0 { 0 } else { count as usize * 8 })?;
    let mut raw =
        Raw { address, name, sites: Vec::with_capacity(count as usize), symbols, left_out: 0 };
    let mut locations: Vec<u64> =
        table.as_chunks::<8>().0.iter().map(|&word| u64::from_le_bytes(word)).collect();
    locations.sort_unstable();
    locations.dedup();
    // Zeros are of weak functions that were overridden.
    for location in locations.into_iter().filter(|&location| location != 0) {
        let entries = offsets.kind.entries(location);
        let found = entries.into_iter().find_map(|entry| Some((entry, named.remove(&entry)?)));
        let at = place(guest, image, location, offsets.kind.span());
        let (Some((entry, (names, size))), Some(at)) = (found, at) else {
            raw.left_out += 1;
            continue;
        };
        raw.sites.push(Found { location, entry, names, size, pages: at });
    }
    Ok(raw)
}

/// Names and size of what begins at an address.
type Named = BTreeMap<u64, (Vec<Box<str>>, u32)>;

/// The functions of a module by its own table, and the same by address.
fn symbols(
    pages: &mut Pages<'_>,
    offsets: &Offsets,
    kallsyms: u64,
) -> Result<(Vec<ModuleSymbol>, Named), ModuleError> {
    let member = |offset: u64| kallsyms.wrapping_add(offset);
    let count = pages.count(member(offsets.symbols_count))?;
    if count > MOST_SYMBOLS {
        return Err(ModuleError::Absurd("more symbols than a module can have"));
    }
    let strtab = pages.word(member(offsets.strtab))?;
    let table = pages.word(member(offsets.symtab))?;
    let table = pages.all(table, if count == 0 { 0 } else { count as usize * SYMBOL })?;
    let mut named = Named::new();
    let mut text = 0;
    // The first is none.
    for symbol in table.as_chunks::<SYMBOL>().0.iter().skip(1) {
        let [a, b, c, d, info, _, e, f, rest @ ..] = *symbol;
        let (values, _) = rest.as_chunks::<8>();
        let [value, size] = [0, 1].map(|at| values.get(at).map_or(0, |&w| u64::from_le_bytes(w)));
        let (name, section) = (u32::from_le_bytes([a, b, c, d]), u16::from_le_bytes([e, f]));
        if name == 0 || value == 0 || section == 0 || info & 0xf != FUNCTION {
            continue;
        }
        let name = pages.text(strtab.wrapping_add(name.into()), SYMBOL_NAME)?;
        if name.is_empty() || is_padding(&name) {
            continue;
        }
        text += name.len();
        if text > MOST_TEXT {
            return Err(ModuleError::Absurd("longer names than a module can have"));
        }
        let size = u32::try_from(size).unwrap_or(0);
        let (names, known) = named.entry(value).or_default();
        names.push(shown(&name).into());
        *known = (*known).max(size);
    }
    let symbol = |(&address, (names, size)): (&u64, &(Vec<Box<str>>, u32))| {
        Some(ModuleSymbol { address, size: *size, name: names.first()?.clone() })
    };
    Ok((named.iter().filter_map(symbol).collect(), named))
}
