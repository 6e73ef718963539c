//! Follows the loading and unloading of modules of the guest's kernel, and takes their sites.

use super::edit::Restored;
use super::error::TraceError;
use super::guest::Guest;
use super::module_calls::ModuleMoment;
use super::module_facts::{ModuleFacts, ModuleTraps};
use super::modules::{Ends, Fresh, Loaded, Module, ModuleCoverage, ModuleError, ModuleFunction};
use super::spot::Spot;
use super::trace::Attachment;
use super::view::View;
use crate::kernel::{Exit, Kernel};
use std::ops::Range;
use std::sync::Arc;

impl Attachment {
    /// Lets the guest stop, by `trap`, when a module comes and goes; where it then stands (run-time
    /// addresses). All vCPUs are paused.
    ///
    /// # Errors
    /// What is missing; nothing has changed then.
    pub fn watch_modules(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        trap: &[u8],
    ) -> Result<Vec<u64>, TraceError> {
        let ModuleFacts { offsets, calls } = match self.module_facts.take() {
            Some(facts) => facts,
            None => ModuleFacts::find(kernel)?,
        };
        let stops = self.code.calls(guest, &self.image, kernel, &calls, trap)?;
        let view = View::with_annex(guest, self.near, &*self.memory);
        if !stops.lay(&view)? {
            return Err(TraceError::Code("the code that loads its modules cannot be changed"));
        }
        let traps = stops.traps().collect();
        self.module_traps = Some(ModuleTraps { stops, offsets });
        Ok(traps)
    }

    /// Whether modules are seen to come and go.
    #[must_use]
    pub fn watches_modules(&self) -> bool {
        self.module_traps.is_some()
    }

    /// Whether modules are seen before the guest looks whether their tracepoints are in use.
    #[must_use]
    pub fn watches_module_tracepoints(&self) -> bool {
        self.module_traps.as_ref().is_some_and(|traps| traps.stops.is_for(ModuleMoment::Told))
    }

    /// What becomes of a module where a vCPU stands at this run-time address, and where it goes on.
    #[must_use]
    pub fn module_moment(&self, address: u64) -> Option<(ModuleMoment, u64)> {
        self.module_traps.as_ref()?.stops.find(address)
    }

    /// A module is ready, whose `struct module` is at this run-time address: its sites have numbers
    /// from now on. None of them is held. All vCPUs are paused.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub fn load_module(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        address: u64,
    ) -> Result<Module, ModuleError> {
        // It cannot have gone unseen; but who says so is the guest.
        if self.modules.find(address).is_some() {
            let _ = self.unload_module(guest, address, None);
        }
        let Some(traps) = &self.module_traps else {
            return Err(ModuleError::Absurd("come unasked"));
        };
        let module = self.modules.load(guest, &self.image, &traps.offsets, address)?;
        let entries = module.functions.iter().map(|(_, function)| function.site.entry);
        let image = self.image;
        self.code.module_came(&image, &mut entries.map(|entry| image.runtime(entry)));
        let view = View::ram(guest, [self.near; 2]);
        let sites = module.functions.iter().map(|&(site, _)| site);
        let spots = self.spots(kernel, sites);
        self.code.prepare(guest, &view, &self.image, &spots)?;
        Ok(module)
    }

    fn spots(&self, kernel: &Kernel, sites: impl Iterator<Item = usize>) -> Vec<Spot> {
        sites.filter_map(|site| self.modules.spot(kernel, &self.image, site)).collect()
    }

    /// Looks for the exits of modules that are loaded, in which nobody has done so yet; how much was
    /// found of each. No module comes or goes meanwhile. Where exits must be rewritten before they
    /// run, only those of the `fresh` module are, and all vCPUs are paused then.
    ///
    /// # Errors
    /// When guest memory cannot be used while exits are rewritten; the exits are then as before.
    pub fn find_module_exits(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        fresh: Option<Fresh<'_>>,
    ) -> Result<Vec<ModuleCoverage>, TraceError> {
        let unpatched = self.modules_unpatched(guest);
        let Some(traps) = &self.module_traps else { return Ok(Vec::new()) };
        let found = self.modules.find_exits(&unpatched, &self.image, kernel, &traps.offsets, fresh);
        let mut all = Vec::with_capacity(found.len());
        let view = View::ram(guest, [self.near; 2]);
        for (coverage, rewrites) in found {
            if let Some(fresh) = fresh.filter(|_| !rewrites.is_empty()) {
                let exits = &coverage.exits;
                self.code.rewrite(guest, &view, &self.image, fresh, exits, &rewrites)?;
            }
            all.push(coverage);
        }
        Ok(all)
    }

    /// Exits of functions of modules that are loaded, as far as somebody has looked for them, with
    /// their indices: numbers behind those of the kernel's.
    pub fn module_exits(&self) -> impl Iterator<Item = (usize, &Exit)> {
        self.modules.exits()
    }

    /// How the functions of a module that is loaded are left, as far as somebody has looked for that.
    #[must_use]
    pub fn module_ends(&self, kernel: &Kernel, loaded: &Loaded) -> Ends {
        self.modules.ends(kernel, loaded, |exit| self.code.has_way(exit))
    }

    /// Gives exits of a module back, or those in a part of its memory, and forgets them.
    fn leave_exits(
        &mut self,
        guest: &dyn Guest,
        address: u64,
        range: Option<&Range<u64>>,
    ) -> Result<(), TraceError> {
        let exits = self.modules.exits_of(&self.image, address, range);
        // What is not ours any more is the guest's, and goes with it.
        let restored = self.disable_exits(guest, &exits);
        self.code.module_goes(&self.image, address, range, &exits);
        if let Some(range) = range {
            self.modules.forget_exits(address, range, &exits);
        }
        restored.map(|_| ())
    }

    /// A module (by its `struct module`) is about to go, or (`range`) a part of its memory: gives
    /// its exits and sites back, which are none any more. The sites were these. All vCPUs are paused.
    ///
    /// An update of the guest's ftrace may be under way, and others may begin before the guest has
    /// dropped its own records of them: so they must hold what it has left there.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn unload_module(
        &mut self,
        guest: &dyn Guest,
        address: u64,
        range: Option<Range<u64>>,
    ) -> Result<(Vec<usize>, Restored), TraceError> {
        let exits = self.leave_exits(guest, address, range.as_ref());
        let switches = self.leave_switches(guest, address, range.as_ref());
        let sites = match range {
            Some(range) => {
                let sites = self.modules.within(&self.image, address, range);
                self.modules.forget(&sites);
                sites
            }
            None => self.modules.remove(address).map(|gone| gone.sites).unwrap_or_default(),
        };
        let restored = self.disable(guest, &sites);
        for &site in &sites {
            self.keep_from_taking(site);
        }
        self.patcher.unflag(&sites);
        exits.and(switches)?;
        Ok((sites, restored?))
    }

    /// The modules that are loaded.
    #[must_use]
    pub fn modules(&self) -> &[Loaded] {
        self.modules.loaded()
    }

    /// Functions of modules that are loaded, with the numbers of their sites.
    pub fn module_functions(&self) -> impl Iterator<Item = (usize, &Arc<ModuleFunction>)> {
        self.modules.present()
    }

    /// Whether a site is one of a module.
    #[must_use]
    pub fn is_of_module(&self, site: usize) -> bool {
        self.modules.is_of_module(site)
    }

    /// Modules come and go unseen from now on. Whether the guest's code is as it was.
    pub(super) fn end_watching_modules(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
    ) -> Result<bool, TraceError> {
        let Some(ModuleTraps { stops, .. }) = self.module_traps.take() else { return Ok(true) };
        let view = View::with_annex(guest, self.near, &*self.memory);
        let removed = stops.remove(&view);
        let present = self.modules.present().map(|(site, _)| site);
        let spots = self.spots(kernel, present);
        self.code.unprepare(&view, &self.image, &spots)?;
        Ok(removed?)
    }
}
