//! Which code is for which architecture, and what depends on nothing else.

use super::annex::far_size;
use super::arch::Target;
use super::error::TraceError;
use super::exit_plan::ExitPlan;
use super::riscv64::Riscv64;
use super::x86_64::X86_64;
use crate::kernel::{Arch, Kernel, Site};
use vmtrace_trampolines::Point;

/// The architecture of a kernel.
pub(super) fn of(arch: Arch) -> &'static dyn Target {
    match arch {
        Arch::X86_64 => &X86_64,
        Arch::Riscv64 => &Riscv64,
    }
}

/// What entry programs write for the function of `site` (link address): where they
/// return to.
#[must_use]
pub fn return_address(kernel: &Kernel, site: &Site) -> u64 {
    of(kernel.arch()).return_address(site)
}

/// What the stack pointer in records of programs lacks to be that at their function's entry, where
/// the return address is the last that was pushed.
#[must_use]
pub fn stack_bias(kernel: &Kernel, point: Point) -> u64 {
    of(kernel.arch()).stack_bias(point)
}

/// What memory rings of this size need beside the annex's first [`WITH_TABLES`] bytes, if any: its size,
/// and how far behind a multiple of 1 GiB it must begin in guest-physical memory.
///
/// # Errors
/// When the address space of such a kernel has no room for them.
pub fn far_memory(
    arch: Arch,
    cpus: u64,
    buffer: Option<u64>,
) -> Result<Option<(u64, u64)>, TraceError> {
    let (hole, offset) = of(arch).hole();
    match far_size(cpus, buffer) {
        0 => Ok(None),
        size if size <= hole.len => Ok(Some((size, offset))),
        _ => Err(hole.too_small(cpus, buffer.unwrap_or(0))),
    }
}

impl ExitPlan {
    /// For the exits of the functions at these sites (indices), and, if `of_modules`, with room for
    /// those of modules to come.
    ///
    /// # Errors
    /// When there is no place for so many, or nothing is known of the kernel's exits.
    pub fn new(kernel: &Kernel, sites: &[usize], of_modules: bool) -> Result<Self, TraceError> {
        if sites.is_empty() && !of_modules {
            return Ok(Self::default());
        }
        let plan = of(kernel.arch()).plan_exits(kernel, sites, of_modules)?;
        Ok(Self { sites: sites.to_vec(), of_modules, ..plan })
    }
}
