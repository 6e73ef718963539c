//! riscv64: a site is two instructions, in newer kernels (CALL_OPS) with a pointer to an ops before
//! the function. Code is in a gap of the kernel's own mapping. Rings and the stubs of exits are
//! mapped after its end.

mod calls;
mod code;
pub(super) mod context;
mod first;
mod free_list;
mod gap;
mod hold;
mod install;
mod landing;
mod map;
mod module_returns;
mod module_stubs;
pub(super) mod paging;
mod returns;
mod sharing;
mod site;
mod switch_stubs;
mod tracepoint;

use super::annex::{Hole, Memory};
use super::arch::{DirectMap, Installed, Options, Target};
use super::call::Call;
use super::error::TraceError;
use super::exit_plan::ExitPlan;
use super::guest::{Guest, GuestError};
use super::image::Image;
use crate::kernel::{Kernel, Site};
use std::sync::Arc;
use vmtrace_trampolines::Point;

/// See the module's documentation.
pub(super) struct Riscv64;

impl Target for Riscv64 {
    fn calls_in(&self, start: u64, body: &[u8]) -> Vec<Call> {
        calls::calls(start, body)
    }

    fn return_address(&self, site: &Site) -> u64 {
        site.entry.wrapping_add(site::LEN as u64)
    }

    fn start(&self, site: &Site) -> u64 {
        site.entry
    }

    /// Nothing: the return address is in a register.
    fn call(&self, _: &dyn Guest, _: &Image, stack: u64, _: u64) -> Result<u64, GuestError> {
        Ok(stack)
    }

    /// Behind the site, if the function has one: `ftrace_init` writes that without a
    /// look.
    fn tripwire(&self, kernel: &Kernel, entry: u64) -> u64 {
        let sites = kernel.sites();
        let is_site = sites.binary_search_by_key(&entry, |site| site.entry).is_ok();
        if is_site { entry + site::LEN as u64 } else { entry }
    }

    /// None at an entry, where nothing is pushed, and none at a return, where all is popped.
    fn stack_bias(&self, _: Point) -> u64 {
        0
    }

    /// As `kernel_map` says (arch/riscv/mm/init.c). Nothing tells where `struct page`s are.
    fn direct_map(&self, guest: &dyn Guest, kernel: &Kernel, image: &Image) -> Option<DirectMap> {
        let map = kernel.symbols().address("kernel_map")?;
        let member = |name| {
            let offset = kernel.btf().ok()?.member_offset("kernel_mapping", name)?;
            guest.read_u64(image.physical_of(map) + u64::from(offset)).ok()
        };
        let start = member("page_offset")?;
        Some(DirectMap {
            start,
            physical: start.wrapping_sub(member("va_pa_offset")?),
            pages: None,
        })
    }

    fn after_alternatives(&self) -> Option<&'static str> {
        None
    }

    fn multiplies_by_shifting(&self) -> bool {
        true
    }

    fn hole(&self) -> (Hole, u64) {
        (map::HOLE, map::FAR_OFFSET)
    }

    fn plan_exits(
        &self,
        kernel: &Kernel,
        sites: &[usize],
        of_modules: bool,
    ) -> Result<ExitPlan, TraceError> {
        returns::plan(kernel, sites, of_modules)
    }

    fn install(
        &self,
        guest: &dyn Guest,
        kernel: &Kernel,
        image: &Image,
        memory: &Arc<dyn Memory>,
        options: Options<'_>,
    ) -> Result<Installed, TraceError> {
        install::install(guest, kernel, image, memory, options)
    }
}
