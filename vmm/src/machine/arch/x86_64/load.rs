//! Getting a kernel into memory.

use vm_memory::GuestMemoryMmap;

use super::Platform;
use crate::machine::{Annex, Config, ImageBytes, MachineError};

/// A kernel image, and by that the way it is booted.
#[derive(Clone)]
pub enum BootImage {
    /// A decompressed `vmlinux`: loaded where it was linked to be, entered directly. No KASLR.
    Elf(ImageBytes),
    /// A `bzImage`: decompresses itself in the guest, and moves itself if it has KASLR.
    BzImage(ImageBytes),
}

/// Where vCPU 0 starts.
pub(in crate::machine) struct Boot {
    pub(super) entry: u64,
}

/// Fills memory with everything that vCPU 0 needs.
pub(in crate::machine) fn load(
    _config: &Config,
    _memory: &GuestMemoryMmap,
    _annex: Option<&Annex>,
    _platform: &Platform,
) -> Result<Boot, MachineError> {
    Err(MachineError::KernelImage("booting is not implemented yet".into()))
}
