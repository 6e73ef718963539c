//! Getting a kernel into memory, with everything the Linux boot protocol wants it to find there.
//!
//! Both kinds of image are entered in 64-bit mode with the address of `boot_params` in RSI
//! (Documentation/arch/x86/boot.rst, "64-bit Boot Protocol"): a `vmlinux` at its ELF entry, which
//! is what a decompressor would jump to, a `bzImage` at its decompressor.

use std::io::Cursor;

use kvm_ioctls::VcpuFd;
use linux_loader::configurator::{BootConfigurator, BootParams, linux::LinuxBootConfigurator};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use object::elf::{EM_X86_64, FileHeader64, PT_LOAD};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{LittleEndian, elf};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::e820::{self, Range};
use super::{Platform, acpi, layout, tables};
use crate::machine::{Annex, Config, ImageBytes, MachineError};

/// A kernel image, and by that the way it is booted.
#[derive(Clone)]
pub enum BootImage {
    /// A decompressed `vmlinux`: loaded where it was linked to be, entered directly. No KASLR.
    Elf(ImageBytes),
    /// A `bzImage`: decompresses itself in the guest, and moves itself if it has KASLR.
    BzImage(ImageBytes),
}

impl BootImage {
    /// A kernel out of its container.
    #[must_use]
    pub fn unpacked(image: ImageBytes) -> BootImage {
        BootImage::Elf(image)
    }

    /// A kernel that unpacks itself, and may move itself; `None` where there is no such thing.
    #[must_use]
    pub fn self_unpacking(image: ImageBytes) -> Option<BootImage> {
        Some(BootImage::BzImage(image))
    }
}

/// Where vCPU 0 starts.
pub(in crate::machine) struct Boot {
    /// Guest-physical address of the first instruction.
    pub(super) entry: u64,
}

/// What is known about a kernel before it is loaded.
#[derive(Debug, Clone, Copy)]
struct Kernel {
    /// Guest-physical address of the first instruction.
    entry: u64,
    /// End of the memory that it takes before it manages memory itself.
    end: u64,
    /// What it is told about itself.
    header: setup_header,
}

/// Longest command line of a kernel that does not say (`COMMAND_LINE_SIZE` - 1).
const CMDLINE_SIZE: u32 = 2047;
/// Highest address of an initrd for a kernel that does not say.
const INITRD_ADDR_MAX: u32 = 0x7fff_ffff;
/// `type_of_loader`: one without a number.
const LOADER_UNDEFINED: u8 = 0xff;
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
/// `xloadflags`: there is a 64-bit entry, 0x200 bytes after the 32-bit one.
const XLF_KERNEL_64: u16 = 1;
const ENTRY_64: u64 = 0x200;
/// Memory that a kernel wants beyond itself and its initrd before it can say that it has none.
const SLACK: u64 = 16 << 20;

/// What firmware has at its reset vector, in real mode: a pulse on the CPU's reset line.
///
/// Kernels with hardware-reduced ACPI but without EFI reset themselves by jumping there, since
/// `efi_reboot_required` makes them ignore ACPI's reset register.
#[rustfmt::skip]
const RESET_CODE: [u8; 7] = [
    0xb0, 0xfe, // mov al, 0xfe
    0xe6, 0x64, // out 0x64, al
    0xf4,       // hlt
    0xeb, 0xfd, // jmp to the hlt
];

/// Fills memory with everything that vCPU 0 needs.
pub(in crate::machine) fn load(
    config: &Config,
    memory: &GuestMemoryMmap,
    annex: Option<&Annex>,
    platform: &Platform,
    _: &[VcpuFd],
) -> Result<Boot, MachineError> {
    let kernel = match &config.kernel {
        BootImage::Elf(image) => inspect_elf((**image).as_ref())?,
        BootImage::BzImage(image) => inspect_bzimage((**image).as_ref())?,
    };
    let cmdline = cmdline(&config.cmdline, kernel.header.cmdline_size)?;
    let initrd = config.initrd.as_deref().unwrap_or_default();
    let initrd_address = place_initrd(config.memory, &kernel, initrd.len() as u64)?;

    match &config.kernel {
        BootImage::Elf(image) => {
            let image = &mut Cursor::new((**image).as_ref());
            Elf::load(memory, None, image, None)
        }
        BootImage::BzImage(image) => {
            let image = &mut Cursor::new((**image).as_ref());
            BzImage::load(memory, Some(GuestAddress(layout::HIGH_RAM)), image, None)
        }
    }
    .map_err(|e| MachineError::KernelImage(e.to_string()))?;
    let write = |what, bytes: &[u8], address| {
        memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(|source| MachineError::GuestMemory { what, source })
    };
    write("initrd", initrd, initrd_address)?;
    write("command line", &cmdline, layout::CMDLINE)?;
    let acpi = acpi::tables(config.cpus, platform.virtio());
    write("ACPI tables", &acpi, layout::ACPI)?;
    write("reset code", &RESET_CODE, layout::RESET_VECTOR)?;
    tables::write(memory)?;

    let mut params = boot_params { hdr: kernel.header, ..Default::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = low(layout::CMDLINE);
    if !initrd.is_empty() {
        params.hdr.ramdisk_image = low(initrd_address);
        params.hdr.ramdisk_size = low(initrd.len() as u64);
    }
    params.acpi_rsdp_addr = layout::ACPI;
    let annex = annex.map(|annex| [Some((annex.gpa(), annex.len())), annex.far()]);
    let ranges = e820::map(config.memory, annex.into_iter().flatten().flatten());
    params.e820_entries = u8::try_from(ranges.len()).unwrap_or(u8::MAX);
    for (entry, Range { start, length, kind }) in params.e820_table.iter_mut().zip(ranges) {
        *entry = boot_e820_entry { addr: start, size: length, r#type: kind };
    }
    LinuxBootConfigurator::write_bootparams(
        &BootParams::new(&params, GuestAddress(layout::ZERO_PAGE)),
        memory,
    )
    .map_err(|e| MachineError::KernelImage(e.to_string()))?;
    Ok(Boot { entry: kernel.entry })
}

/// The low half of an address that is known to be below 4 GiB.
fn low(address: u64) -> u32 {
    debug_assert!(address < 1 << 32);
    #[expect(clippy::cast_possible_truncation, reason = "below 4 GiB")]
    let low = address as u32;
    low
}

fn invalid(what: impl Into<String>) -> MachineError {
    MachineError::KernelImage(what.into())
}

fn inspect_elf(image: &[u8]) -> Result<Kernel, MachineError> {
    let header = FileHeader64::<LittleEndian>::parse(image)
        .map_err(|_| invalid("it is not a 64-bit ELF file"))?;
    let endian = LittleEndian;
    if header.e_machine(endian) != EM_X86_64 || header.e_type(endian) != elf::ET_EXEC {
        return Err(invalid("it is not an executable for x86-64"));
    }
    let segments =
        header.program_headers(endian, image).map_err(|_| invalid("it has no program headers"))?;
    let mut end = 0;
    let mut entry_found = false;
    let entry = header.e_entry(endian);
    for segment in segments.iter().filter(|segment| segment.p_type(endian) == PT_LOAD) {
        let (start, size) = (segment.p_paddr(endian), segment.p_memsz(endian));
        let segment_end = start
            .checked_add(size)
            .filter(|end| *end <= layout::GAP && start >= layout::HIGH_RAM)
            .ok_or_else(|| {
                invalid(format!("it needs memory at {start:#x}, where there is none"))
            })?;
        if segment.data(endian, image).is_err() || segment.p_filesz(endian) > size {
            return Err(invalid("it is truncated"));
        }
        end = end.max(segment_end);
        entry_found |= (start..segment_end).contains(&entry);
    }
    if !entry_found {
        return Err(invalid(format!("its entry point {entry:#x} is not in it")));
    }
    // An ELF file has no header for the boot protocol. This is what the kernel would find there.
    let header = setup_header {
        boot_flag: BOOT_FLAG,
        header: HEADER_MAGIC,
        version: 0x20f,
        loadflags: 1,
        kernel_alignment: 2 << 20,
        initrd_addr_max: INITRD_ADDR_MAX,
        cmdline_size: CMDLINE_SIZE,
        ..Default::default()
    };
    Ok(Kernel { entry, end, header })
}

fn inspect_bzimage(image: &[u8]) -> Result<Kernel, MachineError> {
    const HEADER: usize = 0x1f1;
    let mut header = setup_header::default();
    let bytes = vm_memory::ByteValued::as_mut_slice(&mut header);
    let found =
        image.get(HEADER..HEADER + bytes.len()).ok_or_else(|| invalid("it is truncated"))?;
    bytes.copy_from_slice(found);
    if { header.header } != HEADER_MAGIC || { header.boot_flag } != BOOT_FLAG {
        return Err(invalid("it is not a bzImage"));
    }
    // 2.12 brought xloadflags; all the older fields that are used come with it.
    if { header.version } < 0x20c || { header.xloadflags } & XLF_KERNEL_64 == 0 {
        return Err(invalid("it has no 64-bit entry point"));
    }
    let start = layout::HIGH_RAM;
    let loaded = start + image.len() as u64;
    let unpacked = { header.pref_address }.max(start).checked_add(u64::from(header.init_size));
    let end = unpacked
        .filter(|end| *end <= layout::GAP)
        .ok_or_else(|| invalid("it needs memory where there is none"))?
        .max(loaded);
    header.code32_start = low(start);
    Ok(Kernel { entry: start + ENTRY_64, end, header })
}

/// The command line as it is put into memory.
fn cmdline(text: &str, max: u32) -> Result<Vec<u8>, MachineError> {
    // Kernels take what the header says, but ours has only so much room.
    let room = layout::LOW_RAM_END - layout::CMDLINE - 1;
    let max = usize::try_from(u64::from(max).min(room)).unwrap_or(0);
    if text.len() > max {
        return Err(MachineError::CmdlineTooLong { length: text.len(), max });
    }
    if text.contains('\0') {
        return Err(MachineError::CmdlineNul);
    }
    Ok([text.as_bytes(), &[0]].concat())
}

/// Where the initrd goes: as high as the kernel can see it, so that it is in nobody's way.
fn place_initrd(memory: u64, kernel: &Kernel, size: u64) -> Result<u64, MachineError> {
    let top = memory.min(layout::GAP).min(u64::from(kernel.header.initrd_addr_max) + 1);
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    match top.checked_sub(size).map(|address| address & !0xfff) {
        Some(address) if address >= kernel.end + SLACK => Ok(address),
        _ => Err(MachineError::TooLittleMemory {
            memory: mib(memory),
            kernel: mib(kernel.end),
            initrd: mib(size),
            needed: mib(kernel.end + SLACK + size) + 1,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(end: u64) -> Kernel {
        let header = setup_header { initrd_addr_max: INITRD_ADDR_MAX, ..setup_header::default() };
        Kernel { entry: 0, end, header }
    }

    #[test]
    fn initrd_is_high_but_visible() {
        let kernel = kernel(64 << 20);
        assert_eq!(place_initrd(512 << 20, &kernel, 0x1001).unwrap(), (512 << 20) - 0x2000);
        assert_eq!(place_initrd(5 << 30, &kernel, 0x1000).unwrap(), (2 << 30) - 0x1000);
        assert_eq!(place_initrd(512 << 20, &kernel, 0).unwrap(), 512 << 20);
    }

    #[test]
    fn too_little_memory_is_told_with_what_would_do() {
        let kernel = kernel(64 << 20);
        let error = place_initrd(128 << 20, &kernel, 100 << 20).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the guest needs more memory: its kernel takes 64 MiB and its initrd 100 MiB, and it \
             has 128 MiB; give it at least 181 MiB with --memory"
        );
        assert!(place_initrd(181 << 20, &kernel, 100 << 20).is_ok());
        assert!(place_initrd(128 << 20, &kernel, 1 << 40).is_err());
    }

    #[test]
    fn command_lines() {
        assert_eq!(cmdline("a b", 3).unwrap(), b"a b\0");
        assert!(matches!(
            cmdline("a b", 2),
            Err(MachineError::CmdlineTooLong { length: 3, max: 2 })
        ));
        assert!(matches!(cmdline("a\0b", 100), Err(MachineError::CmdlineNul)));
    }

    #[test]
    fn damaged_images_are_errors() {
        let mut elf = vec![0; 0x200];
        elf[..4].copy_from_slice(b"\x7fELF");
        for image in [&[][..], b"\x7fELF", &[0; 4096], &elf] {
            assert!(matches!(inspect_elf(image), Err(MachineError::KernelImage(_))));
            assert!(matches!(inspect_bzimage(image), Err(MachineError::KernelImage(_))));
        }
    }

    #[test]
    fn a_bzimage_says_what_it_needs() {
        let mut image = vec![0; 0x1000];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x1fe, &BOOT_FLAG.to_le_bytes());
        put(0x202, b"HdrS");
        put(0x206, &0x20f_u16.to_le_bytes());
        put(0x236, &1_u16.to_le_bytes());
        put(0x258, &(16_u64 << 20).to_le_bytes());
        put(0x260, &(48_u32 << 20).to_le_bytes());
        let kernel = inspect_bzimage(&image).unwrap();
        assert_eq!((kernel.entry, kernel.end), (0x10_0200, 64 << 20));
        image[0x236] = 0;
        assert!(inspect_bzimage(&image).is_err());
    }
}
