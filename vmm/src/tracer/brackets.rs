//! The two moments between which the guest's own ftrace changes sites: instructions of its kernel
//! that lead through stubs of ours, which exit to the VMM.
//!
//! Updates hold the guest's `ftrace_lock`, so that they come one after the other.

use super::guest::GuestError;
use super::patch::Edit;
use super::view::View;

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The guest's ftrace knows what it will change, and has changed nothing yet.
    Begin,
    /// It has changed what it wanted to.
    End,
}

/// An instruction of the guest's that leads through a stub.
#[derive(Clone, Copy, Debug)]
pub(super) struct Detour {
    /// Run-time address of the trap in the stub.
    pub(super) trap: u64,
    /// Where a vCPU goes on behind it.
    pub(super) next: u64,
    /// Of the guest's code.
    pub(super) edit: Edit,
    /// Of the stub: what takes the trap away. A task may stand before it for as long as it likes.
    pub(super) quiet: Edit,
}

/// Both, in the order of [`Moment`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Brackets(pub(super) [Detour; 2]);

impl Brackets {
    /// Lays both; whether they hold. If not, nothing has changed.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn lay(&self, view: &View<'_>) -> Result<bool, GuestError> {
        let [begin, end] = &self.0;
        // Nobody can be between them yet.
        if end.edit.apply(view)? && begin.edit.apply(view)? {
            return Ok(true);
        }
        begin.edit.undo(view)?;
        end.edit.undo(view)?;
        Ok(false)
    }

    /// Takes both away; whether the guest's code is as it was.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn remove(&self, view: &View<'_>) -> Result<bool, GuestError> {
        let mut restored = true;
        for detour in &self.0 {
            restored &= detour.edit.restore(view)?;
            detour.quiet.apply(view)?;
        }
        Ok(restored)
    }

    /// Which moment a vCPU that stands at this run-time address is at, and where it goes on.
    pub(super) fn moment(&self, address: u64) -> Option<(Moment, u64)> {
        let [begin, end] = &self.0;
        match address {
            _ if address == begin.trap => Some((Moment::Begin, begin.next)),
            _ if address == end.trap => Some((Moment::End, end.next)),
            _ => None,
        }
    }

    /// Run-time addresses of the traps.
    pub(super) fn traps(&self) -> [u64; 2] {
        self.0.map(|detour| detour.trap)
    }
}
