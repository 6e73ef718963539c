//! Events of modules that are loaded.

use super::{Made, Place, TracedEvent, check_preparation, not_traced};
use crate::kernel::Kernel;
use crate::kernel::arguments::ModuleTypes;
use crate::kernel::tracepoints::{ModuleTracepoint, Uses};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The events of a module (by its name, with the code of it that comes by tracepoints) that are
/// `wanted`, and notes on those that are not traced. `types` reads what describes them, if there is
/// any that is wanted.
pub(in crate::session) fn module_events(
    kernel: &Kernel,
    module: &Arc<str>,
    (own, uses): (&[ModuleTracepoint], &Uses),
    wanted: impl Fn(&str) -> bool,
    types: impl FnOnce() -> Option<ModuleTypes>,
) -> (Vec<TracedEvent>, Vec<String>) {
    let wanted: Vec<_> = own.iter().filter(|it| wanted(&it.name)).collect();
    if wanted.is_empty() {
        return (Vec::new(), Vec::new());
    }
    let types = types();
    let mut traced = Vec::new();
    let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for tracepoint in wanted {
        match one(kernel, module, (tracepoint, uses), types.as_ref()) {
            Ok(event) => traced.push(event),
            Err(why) => reasons.entry(why).or_default().push(tracepoint.name.clone()),
        }
    }
    (traced, reasons.iter().map(|(why, names)| not_traced(why, names)).collect())
}

fn one(
    kernel: &Kernel,
    module: &Arc<str>,
    (tracepoint, uses): (&ModuleTracepoint, &Uses),
    types: Option<&ModuleTypes>,
) -> Result<TracedEvent, String> {
    let ModuleTracepoint { name, address, point, hooks } = tracepoint;
    check_preparation(hooks)?;
    let mut used = hooks.clone();
    used.add(uses);
    if !used.are_used() {
        return Err(format!("the code of module {module} does not use it"));
    }
    let types = types.ok_or_else(|| format!("module {module} has no type information (BTF)"))?;
    let mut made = Made::new(kernel, point);
    made.by_types(Some(types))?;
    let (fields, from) = (made.fields(name.clone(), None), Place::Tracepoint(hooks.clone()));
    let (fields, module) = (Arc::new(fields), Some(Arc::clone(module)));
    Ok(TracedEvent { fields, from, address: *address, module })
}
