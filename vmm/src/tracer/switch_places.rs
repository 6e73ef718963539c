//! All instructions that switch interrupts or preemption, of the kernel and of modules.

use super::error::TraceError;
use super::image::Image;
use super::modules::Modules;
use super::spot::Spot;
use crate::kernel::Kernel;
use crate::kernel::preemptirq::{SwitchSite, Switches};

pub(super) fn of(kernel: &Kernel) -> Result<&Switches, TraceError> {
    kernel.switches().map_err(|error| TraceError::Kernel(error.to_string()))
}

/// All such instructions that there are now: those of the kernel, and behind them those of modules.
#[derive(Clone, Copy)]
pub(super) struct AllSwitches<'a> {
    pub(super) kernel: &'a Switches,
    pub(super) modules: &'a Modules,
}

impl<'a> AllSwitches<'a> {
    pub(super) fn get(&self, index: usize) -> Option<&'a SwitchSite> {
        let own = self.kernel.all().get(index);
        own.or_else(|| self.modules.switch(index).map(|(site, _)| site))
    }

    /// Whether one is of a module.
    pub(super) fn is_of_module(&self, index: usize) -> bool {
        index >= self.kernel.all().len()
    }

    /// One, and where it is in guest memory.
    pub(super) fn place(&self, image: &Image, index: usize) -> Option<(&'a SwitchSite, Spot)> {
        let own = self.kernel.all().get(index).map(|site| (site, Spot::own(image, site.address)));
        own.or_else(|| self.modules.switch(index))
    }
}
