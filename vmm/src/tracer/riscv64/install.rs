//! Installs the annex and the programs' data in a riscv64 guest.

use super::code::{Code, Kind, text};
use super::context::Context;
use super::gap::{Gap, OpsLayout};
use super::landing::Landings;
use super::map;
use super::returns::Returns;
use super::switch_stubs::SwitchStubs;
use crate::kernel::{FtraceKind, Kernel};
use crate::tracer::annex::{Addressing, Layout, Memory, WITH_TABLES};
use crate::tracer::arch::{GuestCode, Installed, Options};
use crate::tracer::counters::Area;
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::spot::Spot;
use crate::tracer::stops::Stops;
use crate::tracer::tracepoints::guest::Own;
use std::collections::HashMap;
use std::sync::Arc;
use vmtrace_trampolines::Readable;
use vmtrace_trampolines::riscv64::{SPENT, Values};

pub(super) fn install(
    guest: &dyn Guest,
    kernel: &Kernel,
    image: &Image,
    memory: &Arc<dyn Memory>,
    options: Options<'_>,
) -> Result<Installed, TraceError> {
    let symbol =
        |name: &'static str| kernel.symbols().address(name).ok_or(TraceError::NoSymbol(name));
    let context = Context::find(kernel)?;
    let mut layout = Layout::numbered(image.runtime(map::link(kernel)?), options.cpus, SPENT)?;
    if let Some(buffer) = options.buffer {
        layout = layout.with_buffer(buffer, &map::HOLE)?;
    }
    let far = layout.far(&**memory)?;
    let (Addressing::Array(controls) | Addressing::Table(controls) | Addressing::PerCpu(controls)) =
        layout.addressing;
    let values = Values {
        cpu: context.cpu,
        pid: context.pid,
        controls,
        slide: image.runtime(0),
        readable: Readable::default(),
        followed: None,
        strangers: None,
        context: context.state,
    };
    let caller = image.runtime(symbol("ftrace_caller")?);
    let kind = if kernel.ftrace_kind() == FtraceKind::CallOps {
        Kind::CallOps {
            caller,
            none: image.runtime(symbol("ftrace_nop_ops")?),
            ops: OpsLayout::find(kernel, image)?,
        }
    } else {
        Kind::Patchable { caller }
    };
    let has_tables = matches!(kind, Kind::Patchable { .. });
    let gap = Gap::find(guest, kernel, image, has_tables)?;
    layout.install(&memory.slice())?;
    let at = map::code(layout.address);
    let view = text(guest, kernel, image);
    let (returns, mut rewrites) = Returns::new(&view, image, memory, at, options.returns)?;
    let mut code = Code {
        gap,
        returns,
        kind,
        values,
        overflow: options.overflow,
        memory: Arc::clone(memory),
        annex: layout.address,
        programs: Vec::new(),
        sources: Vec::new(),
        sharing: None,
        landings: Landings::new(caller),
        entries: 0,
        arrays: HashMap::new(),
        switches: SwitchStubs::default(),
        program_stops: Stops::default(),
        own: Own::of(kernel),
    };
    let again = match kind {
        Kind::Patchable { .. } => None,
        Kind::CallOps { caller, .. } => Some(caller),
    };
    let done = code.gap.fill(guest, again).and_then(|()| {
        code.put_ops(None, code.gap.trap_stub())?;
        code.prepare(guest, &view, image, &Spot::all(kernel, image))?;
        rewrites.write(&view)?;
        let annex = memory.guest_address();
        let with_code = options.returns.has_code();
        map::map(guest, image, layout.address, annex, with_code, far)?;
        if (memory.slice().len() as u64) < WITH_TABLES {
            return Ok(Area::default());
        }
        Ok(map::map_tables(guest, image, layout.address, annex)?)
    });
    let area = match done {
        Ok(area) => area,
        Err(error) => {
            // Nobody calls it yet.
            let _ = code.remove(guest, image, kernel, false);
            let _ = code.gap.clear(guest);
            rewrites.undo(&view);
            return Err(error);
        }
    };
    code.returns.leave_out(&rewrites);
    Ok(Installed { layout, code: Box::new(code), area })
}
