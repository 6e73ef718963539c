//! The annex and the trampolines in a riscv64 guest, and its two kinds of sites.

use super::context::Context;
use super::gap::{Gap, MAX_TRAP, NO_TRAP, OpsLayout, TRAP_OPS};
use super::map;
use super::site::{self, Aim};
use crate::kernel::{FtraceKind, Kernel, Site, SiteSection};
use crate::tracer::annex::{Addressing, Layout, Memory};
use crate::tracer::arch::{GuestCode, Hook, Installed};
use crate::tracer::guest::{Guest, GuestError, Image};
use crate::tracer::patch::{Edit, SkipReason};
use crate::tracer::trace::{Options, TraceError};
use std::sync::Arc;
use vmtrace_trampolines::riscv64::encode::NOP;
use vmtrace_trampolines::riscv64::{Values, entry};

pub(super) fn install(
    guest: &dyn Guest,
    kernel: &Kernel,
    image: &Image,
    memory: &Arc<dyn Memory>,
    options: Options,
) -> Result<Installed, TraceError> {
    let symbol =
        |name: &'static str| kernel.symbols().address(name).ok_or(TraceError::NoSymbol(name));
    let context = Context::find(kernel)?;
    let layout = Layout::numbered(map::address(kernel, image)?, options.cpus)?;
    let (Addressing::Array(controls) | Addressing::Table(controls) | Addressing::PerCpu(controls)) =
        layout.addressing;
    let values = Values {
        cpu: context.cpu,
        pid: context.pid,
        controls,
        cpus: options.cpus,
        stride: layout.stride(),
    };
    let trampoline = entry(options.overflow, &values)?;
    let (kind, ops) = if kernel.ftrace_kind() == FtraceKind::CallOps {
        let kind = Kind::CallOps {
            caller: image.runtime(symbol("ftrace_caller")?),
            none: image.runtime(symbol("ftrace_nop_ops")?),
        };
        (kind, Some(OpsLayout::find(kernel, image)?))
    } else {
        (Kind::Patchable, None)
    };
    let gap = Gap::find(guest, kernel, image, ops.is_some())?;
    layout.install(&memory.slice(), &[])?;
    let mut code = Code { gap, kind, prepared: Vec::new() };
    let done = gap.fill(guest, &trampoline, ops).and_then(|()| {
        code.prepare(guest, image, kernel)?;
        Ok(map::map(guest, image, layout.address, memory.guest_address())?)
    });
    if let Err(error) = done {
        // Nobody calls it yet.
        let _ = code.remove(guest, image, kernel, false);
        let _ = gap.clear(guest);
        return Err(error);
    }
    Ok(Installed { layout, code: Box::new(code) })
}

/// How a site finds its way, as the kernel was built.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// By its second instruction, to an entry of a table of jumps.
    Patchable,
    /// By the literal before the function, which `caller` (`ftrace_caller`) follows
    /// to an ops; `none` is the ops of a site without tracer.
    CallOps { caller: u64, none: u64 },
}

struct Code {
    gap: Gap,
    kind: Kind,
    /// Sites whose first instruction is ours; see [`Code::prepare`].
    prepared: Vec<usize>,
}

impl Code {
    /// Gives every site the first instruction of a call, which does nothing but
    /// change `t0`, dead at a function's entry. (CALL_OPS kernels do so themselves.)
    ///
    /// A call is two instructions, and no pause can tell whether some interrupted
    /// context stands between them. That it would execute the second without the
    /// first is excluded by never changing the first again, and doing it now: one
    /// CPU runs, with interrupts off, in a function that is no site.
    fn prepare(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
    ) -> Result<(), GuestError> {
        if let Kind::CallOps { .. } = self.kind {
            return Ok(());
        }
        for (index, site) in kernel.sites().iter().enumerate() {
            let Some(aim) = Aim::new(image.runtime(site.entry), self.gap.table()) else {
                continue;
            };
            let physical = image.physical_of(site.entry);
            if read(guest, physical)? == [NOP, NOP] {
                self.prepared.push(index);
                guest.write(physical, &aim.first().to_le_bytes())?;
            }
        }
        Ok(())
    }
}

/// Both instructions of a site.
fn read(guest: &dyn Guest, physical: u64) -> Result<[u32; 2], GuestError> {
    let mut bytes = [0; site::LEN];
    guest.read(physical, &mut bytes)?;
    let [a, b, c, d, e, f, g, h] = bytes;
    Ok([[a, b, c, d], [e, f, g, h]].map(u32::from_le_bytes))
}

impl GuestCode for Code {
    fn record(&self, site: &Site) -> u64 {
        match self.kind {
            Kind::Patchable => site.entry,
            Kind::CallOps { .. } => site.entry.wrapping_add(site::SECOND),
        }
    }

    fn edits(
        &self,
        guest: &dyn Guest,
        image: &Image,
        site: &Site,
        hook: Hook<'_>,
        edits: &mut Vec<Edit>,
    ) -> Result<(), SkipReason> {
        let (entry, physical) = (image.runtime(site.entry), image.physical_of(site.entry));
        let found = read(guest, physical).map_err(|_| SkipReason::NoRam)?;
        let mut add = |physical, original: &[u8], ours: &[u8]| {
            edits.push(Edit::new(physical, original, ours).ok_or(SkipReason::OutOfReach)?);
            Ok(())
        };
        let index = match hook {
            Hook::Call(ops) => ops.number(),
            Hook::Trap(trap) => {
                let len = trap.len().min(MAX_TRAP);
                add(self.gap.trap().1, &NO_TRAP[..len], trap)?;
                TRAP_OPS
            }
        };
        let (first, second) = match self.kind {
            Kind::Patchable => {
                let aim = Aim::new(entry, self.gap.table()).ok_or(SkipReason::OutOfReach)?;
                if found == [NOP, NOP] {
                    return Err(SkipReason::Unprepared);
                }
                (aim.first(), aim.call(index))
            }
            Kind::CallOps { caller, none } => {
                let [first, second] = site::call(entry, caller).ok_or(SkipReason::OutOfReach)?;
                let at = physical.wrapping_sub(8);
                if guest.read_u64(at).map_err(|_| SkipReason::NoRam)? != none {
                    return Err(SkipReason::GuestOwned("the ops of another tracer"));
                }
                let ours = self.gap.ops(index).to_le_bytes();
                add(at, &none.to_le_bytes(), &ours)?;
                (first, second)
            }
        };
        if found != [first, NOP] {
            return Err(SkipReason::GuestOwned(site::describe(found)));
        }
        let at = physical + site::SECOND;
        add(at, &NOP.to_le_bytes(), &second.to_le_bytes())
    }

    fn trap(&self, _: &Image, _: &Site) -> u64 {
        self.gap.trap().0
    }

    fn resume(&self, guest: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        self.gap.resume(guest, address)
    }

    /// Takes the first instructions back: with a nop behind each they do nothing, so
    /// this is safe at any time. To put them there again would not be.
    fn remove(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        freed: bool,
    ) -> Result<(), GuestError> {
        for index in std::mem::take(&mut self.prepared) {
            let Some(site) = kernel.sites().get(index) else { continue };
            if freed && site.section == SiteSection::InitText {
                continue;
            }
            let Some(aim) = Aim::new(image.runtime(site.entry), self.gap.table()) else {
                continue;
            };
            let physical = image.physical_of(site.entry);
            if read(guest, physical)? == [aim.first(), NOP] {
                guest.write(physical, &NOP.to_le_bytes())?;
            }
        }
        Ok(())
    }
}
