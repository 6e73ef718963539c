//! Stops of the guest: instructions of its kernel are redirected through stubs, which exit to the VMM
//! and continue at the original target.

use super::edit::{Edit, both};
use super::error::TraceError;
use super::ftrace::GuestCall;
use super::guest::GuestError;
use super::view::View;
use vmtrace_trampolines::{Counts, Point, Program};

/// What begins and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The guest is about to change something, and has changed nothing yet.
    Begin,
    /// It has changed what it wanted to.
    End,
}

/// What a program stops for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProgramStop {
    /// The number of the stop.
    pub(super) number: u16,
    /// The call of the guest's own with which the program goes on.
    pub(super) call: Option<GuestCall>,
    /// Whether the program is where a function is left.
    pub(super) at_end: bool,
}

/// A stub in which a vCPU stops.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stub {
    /// Run-time address of the trap in it.
    pub(super) trap: u64,
    /// Where a vCPU goes on behind it.
    pub(super) next: u64,
    /// Of the stub: what takes the trap away. A task may stand before it for as long as it likes.
    pub(super) quiet: Edit,
}

impl Stub {
    /// With its trap at run-time address `at`, guest-physical `physical`, behind which a vCPU goes on;
    /// the front of `nops` takes the trap away. `None` when that is shorter.
    pub(super) fn new(at: u64, physical: u64, trap: &[u8], nops: &[u8]) -> Option<Self> {
        let quiet = Edit::new(physical, trap, nops.get(..trap.len())?)?;
        Some(Self { trap: at, next: at + trap.len() as u64, quiet })
    }
}

/// Stubs, each with what it stands for, and what leads there.
#[derive(Clone, Debug)]
pub(super) struct Stops<M> {
    stubs: Vec<(M, Stub)>,
    /// Of the guest's code. No context can stand inside of what they change.
    edits: Vec<Edit>,
}

impl<M> Default for Stops<M> {
    fn default() -> Self {
        Self { stubs: Vec::new(), edits: Vec::new() }
    }
}

impl Stops<ProgramStop> {
    /// Takes note of where a vCPU stops in a program, so many bytes (`stop`) behind its beginning at a
    /// run-time and a guest-physical address; `nops` as in [`Stub::new`].
    pub(super) fn note(
        &mut self,
        program: &Program,
        (address, physical): (u64, u64),
        stop: Option<usize>,
        call: Option<GuestCall>,
        nops: &[u8],
    ) -> Result<(), TraceError> {
        let (Some(at), Some(Counts::Down { number, trap, .. })) = (stop, program.counts) else {
            return Ok(());
        };
        let stub = Stub::new(address + at as u64, physical + at as u64, trap, nops);
        let at_end = program.point != Point::Entry;
        self.stub(ProgramStop { number, call, at_end }, stub.ok_or(TraceError::Annex)?);
        Ok(())
    }
}

impl<M: Copy> Stops<M> {
    /// Adds a stub.
    pub(super) fn stub(&mut self, means: M, stub: Stub) {
        self.stubs.push((means, stub));
    }

    /// Adds what leads to one.
    pub(super) fn lead(&mut self, edit: Edit) {
        self.edits.push(edit);
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.stubs.is_empty()
    }

    /// Lets all lead to their stubs; whether all do. If not, nothing has changed that can be written.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn lay(&self, view: &View<'_>) -> Result<bool, GuestError> {
        for (at, edit) in self.edits.iter().enumerate() {
            let laid = edit.apply(view);
            if !matches!(laid, Ok(true)) {
                // All are tried: one that cannot be written is no reason to leave the others.
                let undone =
                    self.edits.iter().take(at + 1).map(|edit| edit.undo(view).map(|()| false));
                return undone.fold(laid, both);
            }
        }
        Ok(true)
    }

    /// Lets them lead where they did, and none stop any more; whether the guest's code is as it was.
    ///
    /// # Errors
    /// When guest memory cannot be written.
    pub(super) fn remove(&self, view: &View<'_>) -> Result<bool, GuestError> {
        let restored = Edit::restore_all(&self.edits, view);
        let quiet = self.stubs.iter().map(|(_, stub)| stub.quiet.apply(view).map(|_| true));
        quiet.fold(restored, both)
    }

    /// What it means that a vCPU stands at this run-time address, and where it goes on.
    pub(super) fn find(&self, address: u64) -> Option<(M, u64)> {
        let (means, stub) = self.stubs.iter().find(|(_, stub)| stub.trap == address)?;
        Some((*means, stub.next))
    }

    /// Whether any stands for this.
    pub(super) fn is_for(&self, means: M) -> bool
    where
        M: PartialEq,
    {
        self.stubs.iter().any(|(known, _)| *known == means)
    }

    /// Run-time addresses of the traps.
    pub(super) fn traps(&self) -> impl Iterator<Item = u64> {
        self.stubs.iter().map(|(_, stub)| stub.trap)
    }
}
