//! Types of functions of modules, by what the guest's kernel keeps of them.

use super::controller::{Controller, Stage};
use super::ends::is_parameter;
use super::values::{Known, Wants};
use super::vm::Vm;
use crate::condition::{Condition, is_of_ends};
use crate::kernel::Kernel;
use crate::kernel::arguments::{
    ArgumentSpec, ModuleTypes, NoPrototype, PathError, Prototype, Value,
};
use crate::kernel::tracepoints::Memory;
use crate::serve::HistogramSpec;
use crate::tracer::{Ends, Guest, Image, ModuleFunction, Unseen};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The guest's memory, by addresses as if its modules were linked with the kernel.
pub(super) struct Linked<'a> {
    pub(super) guest: &'a dyn Guest,
    pub(super) image: &'a Image,
}

impl Memory for Linked<'_> {
    fn read(&self, address: u64, out: &mut [u8]) -> bool {
        self.image.read(self.guest, self.image.runtime(address), out).is_ok()
    }

    fn slide(&self) -> u64 {
        self.image.slide
    }
}

/// The types of a module that is loaded, whose `struct module` is at this run-time address. None if
/// the guest has none, or damaged ones.
pub(super) fn module_types(
    kernel: &Kernel,
    guest: &dyn Guest,
    image: &Image,
    address: u64,
) -> Option<ModuleTypes> {
    let memory = Linked { guest, image };
    let split = kernel.module_btf(&memory, address.wrapping_sub(image.slide))?;
    kernel.module_types(&split).ok()
}

/// Functions of the kernel and of modules.
pub(super) struct WithModules<'a> {
    pub(super) kernel: &'a Kernel,
    /// Of modules, by their sites.
    pub(super) functions: &'a FxHashMap<usize, Arc<ModuleFunction>>,
    /// Of modules by their names, as far as there are any.
    pub(super) types: FxHashMap<Arc<str>, ModuleTypes>,
    /// How those of modules are left, as far as somebody has looked.
    pub(super) ends: Ends,
}

impl Known for WithModules<'_> {
    fn prototype(&self, site: usize) -> Result<Prototype, NoPrototype> {
        let Some(function) = self.functions.get(&site) else {
            return self.kernel.known_prototype(site);
        };
        let types = self.types.get(&function.module).ok_or(NoPrototype::NoTypes)?;
        self.kernel.module_prototype(types, function.names.iter().map(|name| &**name))
    }

    fn path(&self, site: usize, text: &str) -> Result<Value, PathError> {
        let Some(function) = self.functions.get(&site) else {
            return self.kernel.path(site, text);
        };
        let types = self.types.get(&function.module);
        self.kernel.module_path(types, function.names.iter().map(|name| &**name), text)
    }

    fn leaves(&self, site: usize) -> Result<bool, String> {
        if !self.functions.contains_key(&site) {
            return self.kernel.leaves(site);
        }
        let end = self.ends.get(&site).cloned().unwrap_or(Err(Unseen::Unasked));
        end.map_err(|why| why.to_string())
    }

    fn is_meant(&self, site: usize, spec: &ArgumentSpec) -> bool {
        self.functions.get(&site).is_some_and(|function| {
            spec.means(&function.module, &function.names.iter().map(|name| &**name))
        })
    }

    fn name(&self, site: usize) -> String {
        match self.functions.get(&site) {
            Some(function) => format!("{} [{}]", function.name(), function.module),
            None => self.kernel.name(site),
        }
    }
}

impl Controller {
    /// [`Controller::known`] of functions that are to be traced with these; types only if any of them
    /// looks at such.
    pub(super) fn known_for(
        &self,
        machine: &dyn Vm,
        sites: &[usize],
        condition: Option<&Condition>,
        sorts: Option<&HistogramSpec>,
        wants: &Wants,
    ) -> WithModules<'_> {
        let looks =
            condition.is_some_and(|it| it.is_about(|name| is_parameter(name) || is_of_ends(name)));
        let is_valued = wants.parameters || wants.results || !wants.paths.is_empty();
        let is_typed = looks || sorts.is_some() || is_valued;
        self.known(machine, if is_typed { sites } else { &[] })
    }

    /// What is known of functions of which some may be of modules; of those at these sites (in order) their
    /// types, too.
    pub(super) fn known(&self, machine: &dyn Vm, sites: &[usize]) -> WithModules<'_> {
        let (mut types, mut ends) = (FxHashMap::default(), Ends::default());
        if let Stage::Attached { attachment, .. } = &self.stage {
            let ram = machine.ram();
            let has =
                |sites_of: &[usize]| sites_of.iter().any(|site| sites.binary_search(site).is_ok());
            for module in attachment.modules().iter().filter(|module| has(&module.sites)) {
                let found = module_types(&self.kernel, ram, attachment.image(), module.address());
                types.extend(found.map(|found| (Arc::clone(&module.name), found)));
                ends.extend(attachment.module_ends(&self.kernel, module));
            }
        }
        WithModules { kernel: &self.kernel, functions: &self.functions, types, ends }
    }
}
