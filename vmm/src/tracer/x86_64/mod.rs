//! x86-64: sites are 5-byte nops or calls, the annex is mapped by 2 MiB entries.

mod brackets;
mod calls;
pub(super) mod context;
mod exit_stubs;
mod faults;
mod fineibt;
mod install;
pub(super) mod map;
pub(super) mod paging;
pub(super) mod site;
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
pub(super) struct X86_64;

impl Target for X86_64 {
    fn calls_in(&self, start: u64, body: &[u8]) -> Vec<Call> {
        calls::calls(start, body)
    }

    fn return_address(&self, site: &Site) -> u64 {
        site.location.wrapping_add(site::LEN as u64)
    }

    fn start(&self, site: &Site) -> u64 {
        site.location
    }

    fn call(
        &self,
        guest: &dyn Guest,
        image: &Image,
        stack: u64,
        returns_to: u64,
    ) -> Result<u64, GuestError> {
        let below = stack.wrapping_sub(8);
        guest.write_u64(image.tables.translate(guest, below)?, returns_to)?;
        Ok(below)
    }

    fn stack_bias(&self, point: Point) -> u64 {
        vmtrace_trampolines::x86_64::stack_bias(point)
    }

    /// `page_offset_base` and `vmemmap_base`, where the kernel moves them (arch/x86/mm/kaslr.c;
    /// Documentation/arch/x86/x86_64/mm.rst for those that it does not).
    fn direct_map(&self, guest: &dyn Guest, kernel: &Kernel, image: &Image) -> Option<DirectMap> {
        let variable = |name| {
            let address = kernel.symbols().address(name)?;
            guest.read_u64(image.physical_of(address)).ok()
        };
        let usual = |four, five| if image.tables.levels() == 4 { four } else { five };
        let fixed = usual(0xffff_8880_0000_0000, 0xff11_0000_0000_0000);
        let start = variable("page_offset_base").unwrap_or(fixed);
        let fixed = usual(0xffff_ea00_0000_0000, 0xffd4_0000_0000_0000);
        let pages = variable("vmemmap_base").unwrap_or(fixed);
        let size = kernel.btf().ok()?.struct_size("page");
        Some(DirectMap { start, physical: 0, pages: size.map(|size| (pages, size.into())) })
    }

    /// `alternative_instructions` has run by then (init/main.c, `start_kernel`).
    fn after_alternatives(&self) -> Option<&'static str> {
        Some("rest_init")
    }

    /// Behind the site, if the function has one, which we or the guest may have changed. Behind an
    /// `endbr64`, which the kernel verifies when it seals functions that are never called
    /// indirectly (arch/x86/kernel/alternative.c).
    fn tripwire(&self, kernel: &Kernel, entry: u64) -> u64 {
        let sites = kernel.sites();
        if let Ok(index) = sites.binary_search_by_key(&entry, |site| site.entry)
            && let Some(site) = sites.get(index)
        {
            return self.return_address(site);
        }
        let sealable = kernel.bytes(entry, site::ENDBR.len()) == Some(&site::ENDBR);
        if sealable { entry + site::ENDBR.len() as u64 } else { entry }
    }

    fn multiplies_by_shifting(&self) -> bool {
        false
    }

    fn hole(&self) -> (Hole, u64) {
        (map::HOLE, map::FAR_OFFSET)
    }

    /// Nothing: they can be changed at any time.
    fn plan_exits(&self, _: &Kernel, _: &[usize], _: bool) -> Result<ExitPlan, TraceError> {
        Ok(ExitPlan::default())
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
