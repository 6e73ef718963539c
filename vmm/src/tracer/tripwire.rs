//! Stopping the guest at a chosen instruction: an `out` to a private port in its
//! place, which exits on every KVM (a breakpoint does not).

use super::arch::site as arch;
use super::guest::{Guest, GuestError, Image};
use crate::kernel::Kernel;

/// Two bytes of guest code replaced by `out imm8, al`.
#[derive(Clone, Copy, Debug)]
pub struct Tripwire {
    address: u64,
    physical: u64,
    original: [u8; 2],
    ours: [u8; 2],
}

impl Tripwire {
    /// Puts a tripwire on the instruction at link address `link`, which must hold
    /// `expected`. All vCPUs are paused.
    ///
    /// # Errors
    /// When it holds something else, or is no RAM; nothing is written then.
    pub fn arm(
        guest: &dyn Guest,
        image: &Image,
        link: u64,
        expected: [u8; 2],
        port: u8,
    ) -> Result<Self, GuestError> {
        let (address, physical) = (image.runtime(link), image.physical_of(link));
        let mut original = [0; 2];
        guest.read(physical, &mut original)?;
        if original != expected {
            return Err(GuestError::Mismatch(format!(
                "no tripwire at {address:#x}: it holds {original:02x?}, not {expected:02x?}"
            )));
        }
        let ours = [0xe6, port];
        guest.write(physical, &ours)?;
        Ok(Self { address, physical, original, ours })
    }

    /// Puts a tripwire on the first instruction of a function, as it is in the
    /// image; behind an `endbr64`, which the kernel verifies when it seals functions
    /// that are never called indirectly (arch/x86/kernel/alternative.c).
    ///
    /// # Errors
    /// As [`Tripwire::arm`]; or the image has no such function.
    pub fn on_function(
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        name: &str,
        port: u8,
    ) -> Result<Self, GuestError> {
        let link = kernel.symbols().address(name).ok_or_else(|| {
            GuestError::Mismatch(format!("the kernel image has no function {name}"))
        })?;
        let sealable = kernel.bytes(link, 4) == Some(&arch::ENDBR);
        let link = if sealable { link + arch::ENDBR.len() as u64 } else { link };
        let expected = kernel
            .bytes(link, 2)
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(|| GuestError::Mismatch(format!("{name} is not in the kernel's file")))?;
        Self::arm(guest, image, link, expected, port)
    }

    /// Run-time address of the instruction.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Puts the original bytes back. All vCPUs are paused.
    ///
    /// # Errors
    /// When it is no RAM, or the guest has overwritten the tripwire.
    pub fn disarm(self, guest: &dyn Guest) -> Result<(), GuestError> {
        let mut now = [0; 2];
        guest.read(self.physical, &mut now)?;
        if now != self.ours {
            return Err(GuestError::Mismatch(format!(
                "the tripwire at {:#x} was overwritten by the guest ({now:02x?})",
                self.address
            )));
        }
        guest.write(self.physical, &self.original)
    }
}
