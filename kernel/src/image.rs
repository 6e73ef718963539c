//! Extracts a kernel from its containers (bzImage, EFI zboot, compressed files).

use std::ops::Range;

use super::compression::{Compression, LIMIT};
use super::elf::Elf;
use super::read::{index, u16_at, u32_at, u64_at, wide};
use super::space::{Segment, Space};
use super::{Arch, KernelError};

/// Where 64-bit RISC-V kernels are linked: the last 2 GiB of the address space.
pub(super) const RISCV_BASE: u64 = 0xffff_ffff_8000_0000;

/// What the file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// The x86 boot image.
    BzImage,
    /// An ELF file.
    Vmlinux,
    /// The flat riscv64 `Image`.
    Flat,
}

/// A kernel out of its container.
pub(super) struct Image {
    pub(super) arch: Arch,
    pub(super) container: Container,
    /// The outermost compression there was.
    pub(super) compression: Option<Compression>,
    /// ELF (x86) or flat (riscv) bytes.
    pub(super) data: Vec<u8>,
    pub(super) bzimage: Option<Vec<u8>>,
    pub(super) space: Space,
    /// File range of the `.BTF` section, where there are sections.
    pub(super) btf: Option<Range<usize>>,
    /// Whether the file as given can be loaded at another address than it is linked at.
    pub(super) relocatable: bool,
}

impl Image {
    pub(super) fn unpack(bytes: Vec<u8>) -> Result<Self, KernelError> {
        unpack(bytes, None)
    }

    fn flat(data: Vec<u8>) -> Result<Self, KernelError> {
        check_pe(&data)?;
        let whole = Segment { address: RISCV_BASE, offset: 0, len: data.len(), executable: true };
        Ok(Self {
            arch: Arch::Riscv64,
            container: Container::Flat,
            compression: None,
            space: Space::new([whole], data.len()),
            data,
            bzimage: None,
            btf: None,
            relocatable: false,
        })
    }

    fn elf(data: Vec<u8>) -> Result<Self, KernelError> {
        let elf = Elf::parse(&data)?;
        Ok(Self {
            arch: elf.arch,
            container: Container::Vmlinux,
            compression: None,
            space: Space::new(elf.segments, data.len()),
            data,
            bzimage: None,
            btf: elf.btf,
            relocatable: false,
        })
    }
}

/// What a file looks like from its first bytes.
enum Kind {
    Elf,
    BzImage,
    Zboot,
    RiscvFlat,
    Compressed(Compression),
    /// Another architecture's kernel.
    Foreign(&'static str),
    /// Something known that is no kernel.
    Other(&'static str),
    Unknown,
}

fn kind(data: &[u8]) -> Kind {
    /// Up to here a bzImage does not even tell that it is one.
    const SHORTEST: usize = 0x268;
    let at = |offset: usize, magic: &[u8]| {
        data.get(offset..).is_some_and(|tail| tail.starts_with(magic))
    };
    match () {
        () if at(0, b"\x7fELF") => Kind::Elf,
        () if at(0x202, b"HdrS") && at(0x1fe, &[0x55, 0xaa]) => Kind::BzImage,
        () if at(0, b"MZ") && at(4, b"zimg") => Kind::Zboot,
        () if at(0x38, b"RSC\x05") || at(0x30, b"RISCV\0\0\0") => Kind::RiscvFlat,
        () if at(0x38, b"ARM\x64") => Kind::Foreign("aarch64"),
        () if at(0x24, &0x016f_2818_u32.to_le_bytes()) => Kind::Foreign("32-bit Arm"),
        () if at(0, b"MZ") && data.len() < SHORTEST => {
            Kind::Other("the first bytes of an image that is cut off (get it again)")
        }
        () if at(0x38, &0x8182_23cd_u32.to_le_bytes()) => {
            Kind::Foreign("another architecture (an EFI image that is neither x86 nor RISC-V)")
        }
        () if data.is_empty() => Kind::Other("an empty file"),
        () if at(0, b"MZ") => {
            Kind::Other("an EFI program (of a unified kernel image, take the .linux section)")
        }
        () if at(0, b"07070") => Kind::Other("an initramfs"),
        () if at(0, b"!<arch>\n") => {
            Kind::Other("a package or archive (unpack the kernel from it)")
        }
        () if at(0, &[0x27, 0x05, 0x19, 0x56]) => {
            Kind::Other("a U-Boot image (unpack the kernel from it)")
        }
        () => Compression::detect(data).map_or(Kind::Unknown, Kind::Compressed),
    }
}

/// `around` is the compression that has been taken off already: one layer is all there can be.
fn unpack(bytes: Vec<u8>, around: Option<Compression>) -> Result<Image, KernelError> {
    let not_a_kernel = |found: String| {
        let inside = around.map(|c| format!(" inside {} data", c.name())).unwrap_or_default();
        Err(KernelError::NotAKernel { found: found + &inside })
    };
    let mut image = match kind(&bytes) {
        Kind::Elf => Image::elf(bytes)?,
        Kind::RiscvFlat => Image::flat(bytes)?,
        Kind::BzImage if around.is_none() => return bzimage(bytes),
        Kind::Zboot if around.is_none() => return zboot(&bytes),
        Kind::Compressed(compression) if around.is_none() => {
            // Only gzip tells the size, and only modulo 4 GiB: the cap is enough.
            return unpack(compression.decompress(&bytes, None)?, Some(compression));
        }
        Kind::BzImage | Kind::Zboot | Kind::Compressed(_) => {
            return not_a_kernel("an image that was compressed once more (unpack it)".to_owned());
        }
        Kind::Foreign(found) => return Err(KernelError::Architecture { found: found.to_owned() }),
        Kind::Other(what) => return not_a_kernel(what.to_owned()),
        Kind::Unknown => {
            let head: Vec<String> = bytes.iter().take(8).map(|b| format!("{b:02x}")).collect();
            return not_a_kernel(format!("unknown data ({}...)", head.join(" ")));
        }
    };
    image.compression = around;
    Ok(image)
}

/// The bytes of a payload whose place a header tells.
fn payload<'a>(
    bytes: &'a [u8],
    what: &'static str,
    offset: u64,
    len: u64,
) -> Result<&'a [u8], KernelError> {
    // Both come from 32-bit fields, so that the sum cannot overflow.
    let need = offset + len;
    bytes.get(index(offset)..index(need)).ok_or(KernelError::Truncated {
        what,
        need,
        have: wide(bytes.len()),
    })
}

fn bzimage(bytes: Vec<u8>) -> Result<Image, KernelError> {
    /// Boot protocol that introduced payload_offset and payload_length.
    const WITH_PAYLOAD: u16 = 0x208;
    let short = || KernelError::Truncated {
        what: "the bzImage setup header",
        need: 0x268,
        have: wide(bytes.len()),
    };
    let version = u16_at(&bytes, 0x206).ok_or_else(short)?;
    if version < WITH_PAYLOAD {
        return Err(KernelError::NotAKernel {
            found: format!("a bzImage of boot protocol {version:#x}, older than Linux 2.6.26"),
        });
    }
    let sectors = match bytes.get(0x1f1).copied().ok_or_else(short)? {
        0 => 4,
        n => n,
    };
    let relocatable = bytes.get(0x234).copied().ok_or_else(short)? != 0;
    let offset = u32_at(&bytes, 0x248).ok_or_else(short)?;
    let len = u32_at(&bytes, 0x24c).ok_or_else(short)?;
    let offset = (u64::from(sectors) + 1) * 512 + u64::from(offset);
    let packed = payload(&bytes, "the bzImage", offset, len.into())?;

    let compression = Compression::detect(packed).ok_or_else(|| {
        KernelError::Damaged("the payload's compression is not one of the kernel's".to_owned())
    })?;
    // The build appends the uncompressed size; to gzip that is part of the format.
    let (stream, size) = packed.split_last_chunk::<4>().ok_or_else(short)?;
    let stream = if compression == Compression::Gzip { packed } else { stream };
    let size = index(u32::from_le_bytes(*size).into());
    let data = compression.decompress(stream, Some(size))?;
    if kind(&data).is_not_elf() {
        return Err(KernelError::Damaged("the bzImage's payload is not an ELF file".to_owned()));
    }
    let mut image = Image::elf(data)?;
    if image.arch != Arch::X86_64 {
        return Err(KernelError::Damaged("the bzImage's payload is not an x86 kernel".to_owned()));
    }
    image.container = Container::BzImage;
    image.compression = Some(compression);
    image.relocatable = relocatable;
    image.bzimage = Some(bytes);
    Ok(image)
}

impl Kind {
    fn is_not_elf(&self) -> bool {
        !matches!(self, Self::Elf)
    }
}

/// An EFI "zboot" image: a small EFI program that carries a compressed flat image.
fn zboot(bytes: &[u8]) -> Result<Image, KernelError> {
    let short =
        || KernelError::Truncated { what: "the zboot header", need: 64, have: wide(bytes.len()) };
    let offset = u32_at(bytes, 8).ok_or_else(short)?;
    let len = u32_at(bytes, 12).ok_or_else(short)?;
    let packed = payload(bytes, "the zboot image", offset.into(), len.into())?;
    let compression = Compression::detect(packed).ok_or_else(|| {
        KernelError::Damaged(
            "the zboot payload's compression is not one of the kernel's".to_owned(),
        )
    })?;
    // The uncompressed size stands after the payload, but not in every version and compression.
    unpack(compression.decompress(packed, None)?, Some(compression))
}

/// A flat image with an EFI stub is a PE file too, whose sections tell how long it must be.
fn check_pe(data: &[u8]) -> Result<(), KernelError> {
    let Some(need) = pe_len(data) else { return Ok(()) };
    if need > wide(data.len()) {
        let have = wide(data.len());
        return Err(KernelError::Truncated { what: "the riscv64 Image", need, have });
    }
    // image_size counts bss too, so that only an absurd value says anything.
    match u64_at(data, 0x10) {
        Some(size) if size > 4 * wide(LIMIT) => {
            Err(KernelError::Damaged(format!("the riscv64 Image claims {size} bytes of memory")))
        }
        _ => Ok(()),
    }
}

/// The end of the last PE section, when this is a PE file.
fn pe_len(data: &[u8]) -> Option<u64> {
    if !data.starts_with(b"MZ") {
        return None;
    }
    let pe = index(u32_at(data, 0x3c)?.into());
    if !data.get(pe..)?.starts_with(b"PE\0\0") {
        return None;
    }
    let sections = usize::from(u16_at(data, pe + 6)?);
    let optional = usize::from(u16_at(data, pe + 20)?);
    let table = data.get(pe + 24 + optional..)?;
    (0..sections)
        .map_while(|i| Some((u32_at(table, i * 40 + 16)?, u32_at(table, i * 40 + 20)?)))
        .map(|(len, offset)| u64::from(len) + u64::from(offset))
        .max()
}
