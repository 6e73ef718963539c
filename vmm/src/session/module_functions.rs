//! Functions of a module that is ready, for the tracers and triggers that want them: which, and what is
//! known of their arguments and results.

use super::conditions::Conditional;
use super::controller::Controller;
use super::module_types::{WithModules, module_types};
use super::values::values_of_module;
use crate::kernel::selects;
use crate::relay::Values;
use crate::serve::Globs;
use crate::tracer::{Attachment, Guest, Module, ModuleFunction};
use std::sync::Arc;

fn owned<T: Clone>((site, value): (&usize, &T)) -> (usize, T) {
    (*site, value.clone())
}

impl Controller {
    /// Gives the functions of a module to the tracers and triggers that want them: those that any does.
    pub(super) fn take_up(
        &mut self,
        ram: &dyn Guest,
        attachment: &Attachment,
        module: &Module,
    ) -> Vec<usize> {
        let mut all = Vec::new();
        let mut notes: Vec<(String, String)> = Vec::new();
        let is_typed =
            |condition: &Option<Conditional>| condition.as_ref().is_some_and(|it| !it.is_general());
        let typed = self.tracing.present().any(|(_, it)| {
            it.wants.parameters
                || it.wants.results
                || !it.wants.paths.is_empty()
                || it.histogram.is_some()
                || is_typed(&it.condition)
        }) || self.tracing.triggers.iter().any(|it| is_typed(&it.condition));
        // To read the types takes its time, in which the guest waits.
        let (kernel, functions) = (&*self.kernel, &self.functions);
        let with_types = || {
            let image = attachment.image();
            let types = || module_types(kernel, ram, image, module.address);
            let types = typed.then(types).flatten();
            let types = types.map(|types| (Arc::clone(&module.name), types));
            let mut modules = attachment.modules().iter();
            let loaded = modules.find(|loaded| loaded.is_at(module.address));
            let ends = loaded.map(|loaded| attachment.module_ends(kernel, loaded));
            let (types, ends) = (types.into_iter().collect(), ends.unwrap_or_default());
            WithModules { kernel, functions, types, ends }
        };
        let mut known: Option<WithModules<'_>> = None;
        let selected = |Globs { filter, notrace }: &Globs| {
            let wants = |(_, function): &&(usize, Arc<ModuleFunction>)| {
                let names = function.names.iter().map(|name| &**name);
                selects(filter, notrace, Some(&module.name), &names)
            };
            let mut own: Vec<usize> =
                module.functions.iter().filter(wants).map(|(site, _)| *site).collect();
            own.sort_unstable();
            own
        };
        for tracer in self.tracing.tracers.iter_mut().flatten() {
            let mut own = selected(&tracer.globs);
            if own.is_empty() && !tracer.wants.paths.iter().any(|spec| spec.is_about(&module.name))
            {
                continue;
            }
            let known = known.get_or_insert_with(with_types);
            let mut more = Vec::new();
            if let Some(condition) = &mut tracer.condition {
                more.extend(condition.extend(kernel, known, &mut own));
            }
            if let Some(histogram) = &mut tracer.histogram {
                more.extend(histogram.extend(known, &mut own));
            }
            let (values, of_values) =
                values_of_module(kernel, known, (&module.name, &own), &tracer.wants);
            more.extend(of_values);
            let Values { entries, results } = &mut tracer.values;
            if !values.entries.is_empty() {
                Arc::make_mut(entries).extend(values.entries.iter().map(owned));
            }
            if !values.results.is_empty() {
                Arc::make_mut(results).extend(values.results.iter().map(owned));
            }
            notes.extend(more.into_iter().map(|note| (tracer.name.clone(), note)));
            let roots = tracer.limits.roots.as_ref().map(|roots| selected(&roots.globs));
            tracer.limits.learn_more(known, &own, roots.unwrap_or_default());
            all.extend_from_slice(&own);
            tracer.sites.extend(own);
            tracer.sites.sort_unstable();
        }
        for trigger in self.tracing.triggers.iter_mut().filter(|trigger| !trigger.fired) {
            let mut own = selected(&trigger.globs);
            if let (Some(condition), false) = (&mut trigger.condition, own.is_empty()) {
                let known = known.get_or_insert_with(with_types);
                let more = condition.extend(kernel, known, &mut own);
                let name = trigger.to_string();
                notes.extend(more.into_iter().map(|note| (name.clone(), note)));
            }
            all.extend_from_slice(&own);
            trigger.sites.extend(own);
            trigger.sites.sort_unstable();
        }
        all.sort_unstable();
        all.dedup();
        if !all.is_empty() {
            self.plan = None;
            self.summary.sites.matched += all.len() as u64;
        }
        // What one lacks others lack, too: what the first module lacks is told.
        let key = |tracer: &str| format!("values of {tracer}");
        notes.retain(|(tracer, _)| !self.told_of_modules.contains(&key(tracer)));
        for (tracer, note) in notes {
            self.told_of_modules.insert(key(&tracer));
            self.note(format!("{tracer}: {note}"));
        }
        all
    }
}
