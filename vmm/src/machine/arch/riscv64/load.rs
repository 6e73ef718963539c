//! Getting a kernel into memory, with everything it wants to find there
//! (Documentation/arch/riscv/boot.rst, boot-image-header.rst).

use std::fs::File;
use std::io::Read;

use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::fdt::{self, Description};
use super::isa::Isa;
use super::registers::Register;
use super::{Platform, layout, ram_ranges};
use crate::machine::{Annex, Config, ImageBytes, MachineError};

/// A kernel image, and by that the way it is booted.
#[derive(Clone)]
pub enum BootImage {
    /// A flat `Image`, decompressed.
    Flat(ImageBytes),
}

impl BootImage {
    /// A kernel out of its container.
    #[must_use]
    pub fn unpacked(image: ImageBytes) -> BootImage {
        BootImage::Flat(image)
    }

    /// A kernel that unpacks itself, and may move itself; `None` where there is no such thing.
    #[must_use]
    pub fn self_unpacking(_: ImageBytes) -> Option<BootImage> {
        None
    }
}

/// Where vCPU 0 starts.
pub(in crate::machine) struct Boot {
    /// Guest-physical address of the first instruction.
    pub(super) entry: u64,
    /// That of the device tree.
    pub(super) device_tree: u64,
}

/// What an `Image` begins with.
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    code: [U32; 2],
    text_offset: U64,
    image_size: U64,
    flags: U64,
    version: U32,
    reserved: [U32; 3],
    magic: [u8; 8],
    magic2: [u8; 4],
    pe_offset: U32,
}

const MAGIC2: [u8; 4] = *b"RSC\x05";
const FLAG_BIG_ENDIAN: u64 = 1;
/// A kernel maps itself by pages of this size, and wants no more than two for its device tree.
const ALIGNMENT: u64 = 2 << 20;
/// `COMMAND_LINE_SIZE` of riscv, without the end.
const CMDLINE_MAX: usize = 1023;
/// Memory that a kernel wants beyond itself and its initrd before it can say that it has none.
const SLACK: u64 = 16 << 20;
/// Bytes of the seed in the device tree.
const SEED: u64 = 64;

/// Where a kernel goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kernel {
    entry: u64,
    /// End of the memory that it takes, bss included.
    end: u64,
}

/// Where the rest goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Places {
    device_tree: u64,
    initrd: u64,
}

/// Fills memory with everything that vCPU 0 needs.
pub(in crate::machine) fn load(
    config: &Config,
    memory: &GuestMemoryMmap,
    annex: Option<&Annex>,
    platform: &Platform,
    vcpus: &[VcpuFd],
) -> Result<Boot, MachineError> {
    let BootImage::Flat(image) = &config.kernel;
    let image = (**image).as_ref();
    let kernel = inspect(image)?;
    check_cmdline(&config.cmdline)?;
    let initrd = config.initrd.as_deref().unwrap_or_default();
    let places = place(config.memory, &kernel, initrd.len() as u64)?;

    let isa = Isa::of(&vcpus[0])?;
    let timebase = Register::TIMER_FREQUENCY.get(&vcpus[0])?;
    let mut seed = Vec::new();
    File::open("/dev/urandom")
        .and_then(|file| file.take(SEED).read_to_end(&mut seed))
        .map_err(|source| MachineError::System { what: "read /dev/urandom", source })?;
    let tree = fdt::tree(&Description {
        cpus: config.cpus.into(),
        ram: &ram_ranges(config.memory),
        annex: annex.map(|annex| (annex.gpa(), annex.len())),
        cmdline: &config.cmdline,
        initrd: (!initrd.is_empty()).then_some((places.initrd, initrd.len() as u64)),
        timebase: u32::try_from(timebase).map_err(|_| MachineError::NoClock)?,
        isa: &isa,
        wiring: platform.connect(vcpus)?,
        virtio: platform.virtio(),
        seed: &seed,
    })
    .map_err(|e| MachineError::System {
        what: "describe the machine in a device tree",
        source: std::io::Error::other(e),
    })?;
    let write = |what, bytes: &[u8], address| {
        memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(|source| MachineError::GuestMemory { what, source })
    };
    write("kernel", image, kernel.entry)?;
    write("initrd", initrd, places.initrd)?;
    write("device tree", &tree, places.device_tree)?;
    Ok(Boot { entry: kernel.entry, device_tree: places.device_tree })
}

fn invalid(what: impl Into<String>) -> MachineError {
    MachineError::KernelImage(what.into())
}

fn inspect(image: &[u8]) -> Result<Kernel, MachineError> {
    let (header, _) =
        Header::read_from_prefix(image).map_err(|_| invalid("it is not a riscv64 Image"))?;
    if header.magic2 != MAGIC2 {
        return Err(invalid(
            "it is not a riscv64 Image (a vmlinux is not one: take arch/riscv/boot/Image of the same build)",
        ));
    }
    if header.flags.get() & FLAG_BIG_ENDIAN != 0 {
        return Err(invalid("it is big-endian"));
    }
    let offset = header.text_offset.get();
    if !offset.is_multiple_of(ALIGNMENT) {
        return Err(invalid(format!(
            "it needs to be at {offset:#x} from the beginning of memory, not a multiple of 2 MiB"
        )));
    }
    // Kernels before 5.8 or so do not tell their size.
    let size = header.image_size.get().max(image.len() as u64);
    let entry = layout::RAM.checked_add(offset);
    let end = entry.and_then(|entry| entry.checked_add(size)).filter(|end| *end < 1 << 48);
    match (entry, end) {
        (Some(entry), Some(end)) => Ok(Kernel { entry, end }),
        _ => Err(invalid("it needs memory where there is none")),
    }
}

fn check_cmdline(text: &str) -> Result<(), MachineError> {
    if text.len() > CMDLINE_MAX {
        return Err(MachineError::CmdlineTooLong { length: text.len(), max: CMDLINE_MAX });
    }
    if text.contains('\0') {
        return Err(MachineError::CmdlineNul);
    }
    Ok(())
}

/// The device tree behind the kernel, the initrd as high as there is memory, in nobody's way.
fn place(memory: u64, kernel: &Kernel, initrd: u64) -> Result<Places, MachineError> {
    let device_tree = kernel.end.next_multiple_of(ALIGNMENT);
    let first = device_tree + ALIGNMENT + SLACK;
    let top = layout::RAM + memory;
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    match top.checked_sub(initrd).map(|address| address & !0xfff) {
        Some(address) if address >= first => Ok(Places { device_tree, initrd: address }),
        _ => Err(MachineError::TooLittleMemory {
            memory: mib(memory),
            kernel: mib(kernel.end - layout::RAM),
            initrd: mib(initrd),
            needed: mib(first - layout::RAM + initrd) + 1,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(offset: u64, size: u64, flags: u64) -> Vec<u8> {
        let mut image = vec![0; 4096];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(8, &offset.to_le_bytes());
        put(16, &size.to_le_bytes());
        put(24, &flags.to_le_bytes());
        put(0x30, b"RISCV\0\0\0");
        put(0x38, b"RSC\x05");
        image
    }

    #[test]
    fn an_image_says_what_it_needs() {
        let kernel = inspect(&image(2 << 20, 40 << 20, 0)).unwrap();
        assert_eq!(kernel, Kernel { entry: 0x8020_0000, end: 0x82a0_0000 });
        let kernel = inspect(&image(2 << 20, 0, 0)).unwrap();
        assert_eq!(kernel.end, 0x8020_1000);
    }

    #[test]
    fn damaged_images_are_errors() {
        let mut no_magic = image(2 << 20, 0, 0);
        no_magic[0x38] = 0;
        for bad in [
            vec![],
            vec![0; 63],
            no_magic,
            image(2 << 20, 0, 1),
            image(0x1000, 0, 0),
            image(0, u64::MAX, 0),
            image(!0x1f_ffff, 0, 0),
            b"\x7fELF".repeat(100),
        ] {
            assert!(matches!(inspect(&bad), Err(MachineError::KernelImage(_))));
        }
    }

    #[test]
    fn nothing_overlaps() {
        let kernel = Kernel { entry: 0x8020_0000, end: 0x82a0_0001 };
        let places = place(512 << 20, &kernel, 0x1001).unwrap();
        assert_eq!(places, Places { device_tree: 0x82c0_0000, initrd: 0x9fff_e000 });
        let error = place(128 << 20, &kernel, 100 << 20).unwrap_err();
        let MachineError::TooLittleMemory { needed, .. } = error else { panic!("{error}") };
        assert!(place(needed << 20, &kernel, 100 << 20).is_ok());
        assert!(place((needed - 2) << 20, &kernel, 100 << 20).is_err());
        assert!(place(512 << 20, &kernel, 1 << 40).is_err());
    }

    #[test]
    fn command_lines() {
        check_cmdline(&"x".repeat(1023)).unwrap();
        assert!(matches!(
            check_cmdline(&"x".repeat(1024)),
            Err(MachineError::CmdlineTooLong { length: 1024, max: 1023 })
        ));
        assert!(matches!(check_cmdline("a\0b"), Err(MachineError::CmdlineNul)));
    }
}
