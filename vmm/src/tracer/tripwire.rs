//! Stops the guest at a chosen instruction. It is replaced by one that exits on every KVM (a
//! breakpoint does not): an `out` to a private port, or an SBI call.

use super::dispatch;
use super::guest::{Guest, GuestError};
use super::image::Image;
use crate::kernel::Kernel;

/// Most bytes of a trap.
const MAX: usize = 8;

/// Guest code replaced by a trap.
#[derive(Clone, Copy, Debug)]
pub struct Tripwire {
    address: u64,
    physical: u64,
    len: usize,
    original: [u8; MAX],
    ours: [u8; MAX],
}

impl Tripwire {
    /// Puts `trap` on the instructions at link address `link`, which must hold
    /// `expected`. All vCPUs are paused.
    ///
    /// # Errors
    /// When it holds something else, or is no RAM; nothing is written then.
    pub fn arm(
        guest: &dyn Guest,
        image: &Image,
        link: u64,
        expected: &[u8],
        trap: &[u8],
    ) -> Result<Self, GuestError> {
        let (address, physical) = (image.runtime(link), image.physical_of(link));
        let len = trap.len();
        let mut wire = Self { address, physical, len, original: [0; MAX], ours: [0; MAX] };
        let (Some(original), Some(ours)) = (wire.original.get_mut(..len), wire.ours.get_mut(..len))
        else {
            return Err(GuestError::Mismatch(format!("a trap of {len} bytes is too long")));
        };
        ours.copy_from_slice(trap);
        guest.read(physical, original)?;
        if original != expected {
            return Err(GuestError::Mismatch(format!(
                "no tripwire at {address:#x}: it holds {original:02x?}, not {expected:02x?}"
            )));
        }
        guest.write(physical, trap)?;
        Ok(wire)
    }

    /// Puts a tripwire on the first instruction of a function that the kernel does
    /// not write itself. Its bytes must be those of the image.
    ///
    /// # Errors
    /// As [`Tripwire::arm`]; or the image has no such function.
    pub fn on_function(
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        name: &str,
        trap: &[u8],
    ) -> Result<Self, GuestError> {
        let entry = kernel.symbols().address(name).ok_or_else(|| {
            GuestError::Mismatch(format!("the kernel image has no function {name}"))
        })?;
        let link = dispatch::of(kernel.arch()).tripwire(kernel, entry);
        let expected = kernel
            .bytes(link, trap.len())
            .ok_or_else(|| GuestError::Mismatch(format!("{name} is not in the kernel's file")))?;
        Self::arm(guest, image, link, expected, trap)
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
        let mut now = [0; MAX];
        let now = &mut now[..self.len];
        guest.read(self.physical, now)?;
        if now != &self.ours[..self.len] {
            return Err(GuestError::Mismatch(format!(
                "the tripwire at {:#x} was overwritten by the guest ({now:02x?})",
                self.address
            )));
        }
        guest.write(self.physical, &self.original[..self.len])
    }
}
