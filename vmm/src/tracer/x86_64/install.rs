//! The annex and the programs in an x86-64 guest.

use super::context::{self, Context};
use super::{map, site};
use crate::kernel::{Kernel, Site};
use crate::tracer::annex::{Addressing, Layout, Memory, TABLE};
use crate::tracer::arch::{GuestCode, Hook, Installed};
use crate::tracer::guest::{Guest, GuestError, Image};
use crate::tracer::patch::{Edit, SkipReason};
use crate::tracer::trace::{Options, TraceError};
use std::sync::Arc;
use vm_memory::Bytes;
use vmtrace_trampolines::x86_64::{self as compiler, Values};
use vmtrace_trampolines::{Overflow, Program};

/// Programs begin at multiples of so many bytes: those of a cache line.
const ALIGN: u64 = 64;

pub(super) fn install(
    guest: &dyn Guest,
    kernel: &Kernel,
    image: &Image,
    memory: &Arc<dyn Memory>,
    options: Options,
) -> Result<Installed, TraceError> {
    let context = Context::find(kernel, image)?;
    let gs_bases = context::gs_bases(guest, kernel, image, options.cpus)?;
    let layout = Layout::per_cpu(map::ADDRESS, &gs_bases, compiler::SPENT)?;
    let values = values(&layout, &context);
    layout.install(&memory.slice())?;
    let text = kernel.symbols().address("_text").ok_or(TraceError::NoSymbol("_text"))?;
    map::map(guest, image, image.runtime(text), memory.guest_address())?;
    let code = Box::new(Code {
        memory: Arc::clone(memory),
        values,
        overflow: options.overflow,
        used: 0,
        programs: Vec::new(),
    });
    Ok(Installed { layout, code })
}

fn values(layout: &Layout, context: &Context) -> Values {
    let addressing = match layout.addressing {
        Addressing::PerCpu(distance) => compiler::Addressing::PerCpu { distance },
        Addressing::Table(table) | Addressing::Array(table) => compiler::Addressing::Shared {
            number: context.cpu_number,
            cpus: layout.rings.len() as u64,
            table,
        },
    };
    Values { addressing, current: context.current, pid: context.pid }
}

/// Programs in the front of the annex, which sites call without a detour.
struct Code {
    memory: Arc<dyn Memory>,
    values: Values,
    overflow: Overflow,
    /// Bytes of the annex in use, from its beginning on.
    used: u64,
    /// Run-time addresses.
    programs: Vec<u64>,
}

impl Code {
    /// Puts code behind all other. Nobody executes it yet.
    fn put(&mut self, bytes: &[u8]) -> Result<u64, TraceError> {
        let full = TraceError::Full(self.programs.len());
        let at = self.used.next_multiple_of(ALIGN);
        let end = at + bytes.len() as u64;
        if end > TABLE {
            return Err(full);
        }
        let offset = usize::try_from(at).map_err(|_| TraceError::Annex)?;
        self.memory.slice().write_slice(bytes, offset).map_err(|_| TraceError::Annex)?;
        self.used = end;
        Ok(map::ADDRESS + at)
    }
}

impl GuestCode for Code {
    fn add(&mut self, _: &dyn Guest, program: &Program) -> Result<(), TraceError> {
        let code = compiler::compile(program, self.overflow, &self.values)?;
        let address = self.put(&code.bytes)?;
        self.programs.push(address);
        Ok(())
    }

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
            Hook::Call(program) => self
                .programs
                .get(usize::from(program))
                .and_then(|&target| site::call(image.runtime(site.location), target))
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
