//! Analyses a kernel image, without KVM, and without I/O except reading.
//!
//! `image` removes containers and compression. `kallsyms` finds the symbols in the image itself,
//! `sites` the places that can be traced, `exits` where functions are left, `btf` and `structs` the
//! layout of the kernel's structures, and `arguments` what functions take and return. Every byte is
//! untrusted: reads are bounds-checked, sizes are capped, and a damaged image is a [`KernelError`].

use std::io::Read as _;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

pub mod arguments;
mod btf;
mod compression;
mod context;
mod elf;
pub mod epilogues;
mod error;
mod exits;
mod functions;
pub mod glob;
mod image;
mod initcalls;
mod kallsyms;
mod module;
mod near;
mod pages;
pub mod preemptirq;
mod read;
mod riscv64;
mod select;
mod sites;
mod space;
mod structs;
mod symbols;
pub mod tracepoints;

pub use btf::Btf;
pub use compression::Compression;
pub use context::{NeedResched, PreemptCount};
pub use error::KernelError;
pub use exits::module::{ModuleExits, ModulePiece, ModuleRewrite, ModuleText};
pub use exits::{After, Coverage, Exit, ExitKind, Exits, Missing, ReturnStats};
pub use functions::{Functions, selects};
pub use image::Container;
pub use initcalls::Initcall;
pub use module::{ModuleError, ModuleFile, ModuleFunction};
pub use near::{Near, Which};
pub use pages::PageArray;
pub use select::Selection;
pub use sites::{FtraceKind, Site, SiteSection, SiteStats};
pub use structs::{Source, Structs};
pub use symbols::{Symbol, Symbols};

use epilogues::Epilogues;
use image::Image;
use read::{index, wide};
use sites::Sites;

/// A guest architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// 64-bit x86.
    X86_64,
    /// 64-bit RISC-V.
    Riscv64,
}

impl Arch {
    /// The name that Linux and Rust use.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Riscv64 => "riscv64",
        }
    }
}

/// A kernel image with everything that tracing needs to know of it.
pub struct Kernel {
    image: Image,
    banner: String,
    symbols: Symbols,
    sites: Sites,
    btf: OnceLock<Btf>,
    structs: OnceLock<Structs>,
    exits: OnceLock<Exits>,
    switches: OnceLock<preemptirq::Switches>,
    epilogues: OnceLock<Epilogues>,
    arguments: OnceLock<arguments::Arguments>,
    event_layout: OnceLock<tracepoints::EventLayout>,
    events: OnceLock<Vec<tracepoints::Event>>,
    words: OnceLock<btf::Words>,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel")
            .field("arch", &self.image.arch)
            .field("banner", &self.banner)
            .field("symbols", &self.symbols.len())
            .field("sites", &self.sites.stats)
            .finish_non_exhaustive()
    }
}

/// A kernel out of its container and decompressed, without a look at what is in it; see
/// [`Kernel::vmlinux`].
pub fn unpack(path: &Path) -> Result<Vec<u8>, KernelError> {
    Ok(Image::unpack(read_file(path)?)?.data)
}

impl Kernel {
    /// Reads a kernel: a bzImage, a vmlinux, or a riscv64 Image, plain, compressed or as EFI
    /// zboot image.
    pub fn open(path: &Path) -> Result<Self, KernelError> {
        Self::open_with(path, None)
    }

    /// The same, with the symbols taken from a System.map of the same build.
    pub fn open_with(path: &Path, system_map: Option<&Path>) -> Result<Self, KernelError> {
        let symbols = system_map.map(Symbols::from_system_map).transpose()?;
        let image = Image::unpack(read_file(path)?)?;
        if let (Some(symbols), Some(map)) = (&symbols, system_map) {
            check_system_map(&image, symbols, map)?;
        }
        Self::new(image, symbols)
    }

    /// A kernel from the bytes of its file.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, KernelError> {
        Self::new(Image::unpack(bytes)?, None)
    }

    fn new(mut image: Image, symbols: Option<Symbols>) -> Result<Self, KernelError> {
        let symbols = match symbols {
            Some(symbols) => symbols,
            None => find_symbols(&image)?,
        };
        let banner =
            kallsyms::banner(&image.data, &image.space, Some(&symbols)).unwrap_or_default();
        let sites = Sites::find(&image.data, &image.space, image.arch, &symbols)?;
        if image.container == Container::Flat {
            image.relocatable = !sites::relocations(&image.data, &image.space, &symbols).is_empty();
        }
        Ok(Self {
            image,
            banner,
            symbols,
            sites,
            btf: OnceLock::new(),
            structs: OnceLock::new(),
            exits: OnceLock::new(),
            switches: OnceLock::new(),
            epilogues: OnceLock::new(),
            arguments: OnceLock::new(),
            event_layout: OnceLock::new(),
            events: OnceLock::new(),
            words: OnceLock::new(),
        })
    }

    /// The architecture it runs on.
    pub fn arch(&self) -> Arch {
        self.image.arch
    }

    /// What `uname -r` says in it; empty if the image has no banner.
    pub fn release(&self) -> &str {
        let after = self.banner.strip_prefix("Linux version ").unwrap_or_default();
        after.split_ascii_whitespace().next().unwrap_or_default()
    }

    /// The line that the kernel begins its log with: release, builder, compiler, version.
    pub fn banner(&self) -> &str {
        &self.banner
    }

    /// The kernel itself, out of its container: an ELF file (x86; the build's relocation list may
    /// follow it) or a flat image (riscv64).
    pub fn vmlinux(&self) -> &[u8] {
        &self.image.data
    }

    /// The file as given, if it was a bzImage.
    pub fn bzimage(&self) -> Option<&[u8]> {
        self.image.bzimage.as_deref()
    }

    /// What the file was.
    pub fn container(&self) -> Container {
        self.image.container
    }

    /// How it was compressed.
    pub fn compression(&self) -> Option<Compression> {
        self.image.compression
    }

    /// Whether the file as given can be loaded elsewhere than at its link address, as KASLR does.
    pub fn relocatable(&self) -> bool {
        self.image.relocatable
    }

    /// What the file holds at a link address; none outside the image and in bss.
    pub fn bytes(&self, address: u64, len: usize) -> Option<&[u8]> {
        self.image.space.bytes(&self.image.data, address, len)
    }

    /// The code of the function, or the data, that starts at a link address, up to the next symbol; none
    /// where that is more than `most` bytes away, or not in the image.
    pub fn code(&self, start: u64, most: usize) -> Option<&[u8]> {
        let len = self.symbols.next_after(start)?.checked_sub(start)?;
        let len = usize::try_from(len).ok().filter(|len| *len <= most)?;
        self.bytes(start, len)
    }

    /// All symbols.
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// All call sites, by location.
    pub fn sites(&self) -> &[Site] {
        &self.sites.list
    }

    /// What the call sites come from.
    pub fn site_stats(&self) -> SiteStats {
        self.sites.stats
    }

    /// The name that the kernel would print for a site; none for overridden weak functions.
    pub fn site_name(&self, site: &Site) -> Option<&str> {
        self.symbols.primary_at(site.entry)
    }

    /// The first site (an index) of a function of this name.
    pub fn site_of(&self, name: &str) -> Option<usize> {
        self.sites().iter().position(|site| self.site_name(site) == Some(name))
    }

    /// How sites look in this kernel.
    pub fn ftrace_kind(&self) -> FtraceKind {
        self.sites.kind
    }

    /// The size of the type information, zero without any.
    pub fn btf_len(&self) -> usize {
        self.btf_range().map_or(0, |range| range.len())
    }

    /// The type information, read when first asked for.
    pub fn btf(&self) -> Result<&Btf, KernelError> {
        if let Some(btf) = self.btf.get() {
            return Ok(btf);
        }
        let range = self.btf_range().ok_or(KernelError::NoBtf)?;
        let btf = Btf::parse(self.image.data[range].to_vec())?;
        Ok(self.btf.get_or_init(|| btf))
    }

    /// Whether all is known of it that tracing needs, beside its sites: where its data are, and
    /// the layout of its structures.
    pub fn check_traceable(&self) -> Result<(), KernelError> {
        if !has_data(&self.symbols) {
            return Err(KernelError::FunctionSymbols);
        }
        self.structs().map(drop)
    }

    /// The layout of its structures, by its type information or without; looked into when first
    /// asked for.
    pub fn structs(&self) -> Result<&Structs, KernelError> {
        if let Some(structs) = self.structs.get() {
            return Ok(structs);
        }
        let structs = match self.btf() {
            Ok(btf) => Structs::from_btf(btf),
            // What would be looked into has no names.
            Err(_) if !has_data(&self.symbols) => return Err(KernelError::FunctionSymbols),
            Err(why) => Structs::find(&self.image, &self.symbols).map_err(|reason| {
                let why = match why {
                    // What to do about it is the same for both.
                    KernelError::NoBtf => "no BTF type information in the image".to_owned(),
                    why => why.to_string(),
                };
                KernelError::NoLayout { why, reason }
            })?,
        };
        Ok(self.structs.get_or_init(|| structs))
    }

    fn btf_range(&self) -> Option<Range<usize>> {
        let symbols = self.symbols.address("__start_BTF").zip(self.symbols.address("__stop_BTF"));
        let by_symbols = symbols.and_then(|(start, stop)| {
            let len = index(stop.checked_sub(start)?);
            let (offset, room) = self.image.space.offset(start)?;
            (len > 0 && len <= room).then_some(offset..offset + len)
        });
        by_symbols.or_else(|| self.image.btf.clone())
    }
}

fn find_symbols(image: &Image) -> Result<Symbols, KernelError> {
    let unknown = match kallsyms::read(&image.data, &image.space, image.arch) {
        Ok(Some(symbols)) if has_data(&symbols) => return Ok(symbols),
        Ok(functions) => functions.ok_or(KernelError::NoSymbols),
        Err(error) => Err(error),
    };
    let table = (image.container != Container::Flat).then(|| elf::symbols(&image.data)).flatten();
    table.map_or(unknown, Ok)
}

/// Whether not only functions have symbols.
fn has_data(symbols: &Symbols) -> bool {
    symbols.address("linux_banner").is_some()
}

/// A System.map of another build would put every hook in the wrong place.
fn check_system_map(image: &Image, symbols: &Symbols, path: &Path) -> Result<(), KernelError> {
    let reason = match symbols.address("linux_banner") {
        None => "it does not name linux_banner, and so cannot be checked against the image",
        Some(address) => {
            let text = image.space.bytes(&image.data, address, kallsyms::BANNER.len());
            if text == Some(kallsyms::BANNER) {
                return Ok(());
            }
            "it belongs to another kernel: linux_banner is not where it says"
        }
    };
    Err(KernelError::SystemMap { path: path.to_owned(), reason: reason.to_owned() })
}

fn read_file(path: &Path) -> Result<Vec<u8>, KernelError> {
    /// An unstripped vmlinux with debug information of the largest configurations.
    const LIMIT: u64 = 2 << 30;
    let file = std::fs::File::open(path).map_err(KernelError::Read)?;
    let size = file.metadata().map_err(KernelError::Read)?.len();
    let mut bytes = Vec::with_capacity(index(size.min(LIMIT)) + 1);
    file.take(LIMIT + 1).read_to_end(&mut bytes).map_err(KernelError::Read)?;
    if wide(bytes.len()) > LIMIT {
        return Err(KernelError::TooLarge { what: "the file", limit: LIMIT >> 20 });
    }
    Ok(bytes)
}
