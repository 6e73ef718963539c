//! What is known of how modules of the guest's kernel come and go.

use super::call::Call;
use super::dispatch;
use super::error::TraceError;
use super::module_calls::{self, ModuleMoment};
use super::modules::Offsets;
use super::stops::Stops;
use crate::kernel::Kernel;

/// What the image alone tells of how modules come and go.
#[derive(Debug)]
pub(super) struct ModuleFacts {
    pub(super) offsets: Offsets,
    pub(super) calls: Vec<(ModuleMoment, Call)>,
}

impl ModuleFacts {
    /// Finds it.
    ///
    /// # Errors
    /// What is not known of this kernel.
    pub(super) fn find(kernel: &Kernel) -> Result<Self, TraceError> {
        let offsets = Offsets::find(kernel).map_err(TraceError::Kernel)?;
        let target = dispatch::of(kernel.arch());
        let calls = module_calls::find(kernel, |start, body| target.calls_in(start, body))?;
        Ok(Self { offsets, calls })
    }
}

/// The traps, and what is needed at them.
#[derive(Debug)]
pub(super) struct ModuleTraps {
    pub(super) stops: Stops<ModuleMoment>,
    pub(super) offsets: Offsets,
}
