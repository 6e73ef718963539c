//! The kernel image in the memory of a guest.

use super::guest::{Guest, GuestError};
use super::paging::PageTables;
use crate::kernel::Kernel;

/// The running kernel image: link addresses to run-time and physical ones.
///
/// The image is one contiguous run in virtual and in physical memory; the two
/// distances are independent of each other under KASLR.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// Run-time minus link address (KASLR).
    pub slide: u64,
    /// Physical minus run-time address, wrapping.
    pub physical: u64,
    /// The kernel's own page tables.
    pub tables: PageTables,
}

impl Image {
    /// The image of a kernel that is loaded at guest-physical `address` and has not
    /// run yet. It is taken to run where it is linked.
    ///
    /// # Errors
    /// When the image does not say where it begins.
    pub fn loaded(kernel: &Kernel, address: u64) -> Result<Self, GuestError> {
        let start = kernel.symbols().address("_start").ok_or_else(|| {
            GuestError::Mismatch("the kernel image has no symbol _start".to_owned())
        })?;
        let tables = PageTables::none(kernel.arch());
        Ok(Self { slide: 0, physical: address.wrapping_sub(start), tables })
    }

    /// Recognises the kernel in memory: `entry_address` is where the running
    /// kernel says one of its symbols is, found under the page table `root`.
    ///
    /// # Errors
    /// When the slide is absurd or the kernel's banner is not where it should be.
    pub fn locate(
        guest: &dyn Guest,
        kernel: &Kernel,
        symbol: &str,
        address: u64,
        tables: PageTables,
    ) -> Result<Self, GuestError> {
        let mismatch = |text: String| GuestError::Mismatch(text);
        let required = |name: &str| {
            kernel
                .symbols()
                .address(name)
                .ok_or_else(|| mismatch(format!("the kernel image has no symbol {name}")))
        };
        let slide = address.wrapping_sub(required(symbol)?);
        if !tables.is_slide(slide) {
            return Err(mismatch(format!(
                "the guest runs another kernel than the image given: {symbol} is at {address:#x}"
            )));
        }
        let banner = required("linux_banner")?;
        let runtime = banner.wrapping_add(slide);
        let physical = tables.translate(guest, runtime)?;
        let expected = kernel.banner().as_bytes();
        let mut found = vec![0; expected.len()];
        guest.read(physical, &mut found)?;
        if found != expected {
            return Err(mismatch(format!(
                "the guest runs another kernel than the image given: its banner is not {:?}",
                kernel.banner().trim_end()
            )));
        }
        let physical = physical.wrapping_sub(runtime);
        let image = Self { slide, physical, tables };
        // From here on the kernel's own tables, which every process shares.
        let root = image.physical_of(required(tables.kernel_root())?);
        Ok(Self { tables: tables.with_root(root), ..image })
    }

    /// The run-time address of a link address.
    #[must_use]
    pub fn runtime(&self, link: u64) -> u64 {
        link.wrapping_add(self.slide)
    }

    /// The guest-physical address of a link address in the image.
    #[must_use]
    pub fn physical_of(&self, link: u64) -> u64 {
        self.runtime(link).wrapping_add(self.physical)
    }

    /// Reads at a run-time virtual address, by the kernel's page tables.
    ///
    /// # Errors
    /// When it is not mapped or no RAM.
    pub fn read(&self, guest: &dyn Guest, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        const PAGE: usize = 4096;
        let mut address = address;
        let mut rest = out;
        while !rest.is_empty() {
            let in_page = usize::try_from(address % PAGE as u64).unwrap_or(0);
            let (now, later) = rest.split_at_mut(rest.len().min(PAGE - in_page));
            guest.read(self.tables.translate(guest, address)?, now)?;
            address = address.wrapping_add(now.len() as u64);
            rest = later;
        }
        Ok(())
    }

    /// A word at a run-time virtual address.
    ///
    /// # Errors
    /// As [`Image::read`].
    pub fn read_u64(&self, guest: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        let mut bytes = [0; 8];
        self.read(guest, address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}
