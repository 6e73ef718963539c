//! The annex and the trampoline in an x86-64 guest.

use super::context::{self, Context};
use super::{map, site};
use crate::kernel::{Kernel, Site};
use crate::tracer::annex::{Addressing, Layout, Memory};
use crate::tracer::arch::{GuestCode, Hook, Installed};
use crate::tracer::guest::{Guest, GuestError, Image};
use crate::tracer::patch::{Edit, SkipReason};
use crate::tracer::trace::{Options, TraceError};
use std::sync::Arc;
use vmtrace_trampolines::Fixup;
use vmtrace_trampolines::x86_64 as trampoline;

pub(super) fn install(
    guest: &dyn Guest,
    kernel: &Kernel,
    image: &Image,
    memory: &Arc<dyn Memory>,
    options: Options,
) -> Result<Installed, TraceError> {
    let context = Context::find(kernel, image)?;
    let gs_bases = context::gs_bases(guest, kernel, image, options.cpus)?;
    let layout = Layout::per_cpu(map::ADDRESS, &gs_bases)?;
    let code = trampoline_code(&layout, &context, options)?;
    layout.install(&memory.slice(), &code)?;
    let text = kernel.symbols().address("_text").ok_or(TraceError::NoSymbol("_text"))?;
    map::map(guest, image, image.runtime(text), memory.guest_address())?;
    let code = Box::new(Code { target: map::ADDRESS });
    Ok(Installed { layout, code })
}

fn trampoline_code(
    layout: &Layout,
    context: &Context,
    options: Options,
) -> Result<Vec<u8>, TraceError> {
    let mut values = vec![
        (Fixup::Current, context.current),
        (Fixup::Pid, context.pid),
        (Fixup::RingMask, layout.stride().wrapping_neg()),
        (Fixup::CpuNumber, context.cpu_number),
        (Fixup::CpuCount, layout.rings.len() as u64),
    ];
    let addressing = match layout.addressing {
        Addressing::PerCpu(distance) => {
            values.push((Fixup::ControlFromGs, distance));
            trampoline::Addressing::PerCpu
        }
        Addressing::Table(address) | Addressing::Array(address) => {
            values.push((Fixup::ControlTable, address));
            trampoline::Addressing::Shared
        }
    };
    let template = trampoline::entry(addressing, options.overflow);
    let mut code = vec![0; template.code().len()];
    template.instantiate(&mut code, &values)?;
    Ok(code)
}

/// The trampoline, which sites call without a detour: every ops is the same.
struct Code {
    target: u64,
}

impl GuestCode for Code {
    fn record(&self, site: &Site) -> u64 {
        site.location
    }

    fn edits(
        &self,
        guest: &dyn Guest,
        image: &Image,
        site: &Site,
        hook: Hook<'_>,
        edits: &mut Vec<Edit>,
    ) -> Result<(), SkipReason> {
        let physical = image.physical_of(site.location);
        let mut original = [0; site::LEN];
        guest.read(physical, &mut original).map_err(|_| SkipReason::NoRam)?;
        if !site::DISABLED.contains(&original) {
            return Err(SkipReason::GuestOwned(site::describe(original)));
        }
        let edit = match hook {
            Hook::Call(_) => site::call(image.runtime(site.location), self.target)
                .and_then(|call| Edit::new(physical, &original, &call)),
            Hook::Trap(trap) => {
                original.get(..trap.len()).and_then(|front| Edit::new(physical, front, trap))
            }
        };
        edits.push(edit.ok_or(SkipReason::OutOfReach)?);
        Ok(())
    }

    fn trap(&self, image: &Image, site: &Site) -> u64 {
        image.runtime(site.location)
    }

    fn resume(&self, _: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        // Absent entries are never cached, and entering the guest serialises.
        Ok(address)
    }

    fn remove(&mut self, _: &dyn Guest, _: &Image, _: &Kernel, _: bool) -> Result<(), GuestError> {
        Ok(())
    }
}
