//! The table of tripwires: at which address of the guest a vCPU may stop, and for what. All that is armed is in it, so
//! that [`Controller::trapped`](super::controller::Controller::trapped) knows who attends to a stop.
//!
//! There are two sorts. The session's own are on functions of the kernel; the table has what was there before. Others
//! are written by whoever they belong to: the [`Attachment`](crate::tracer::Attachment), which takes them out of the
//! guest again, or the self-test.

use super::verdict::EndSign;
use super::vm::Paused;
use crate::kernel::Kernel;
use crate::machine::TRAP_INSTRUCTION;
use crate::tracer::{
    Guest, GuestError, Image, ModuleMoment, Moment, Reached, Stopped as ProgramStop, Tripwire,
};
use std::collections::{BTreeMap, BTreeSet};

/// What a tripwire is for. `next` is the run-time address at which a vCPU goes on from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// `ftrace_init` is done: the guest can be attached to.
    Attach,
    /// The function of `--from` is called.
    From,
    /// Alternatives are patched.
    Settle,
    /// `.init.text` is about to be freed.
    FreeInit,
    /// Another kernel is about to take the place of this one.
    Leave,
    /// The guest's kernel tells how it ends.
    End(EndSign),
    /// An update of the guest's ftrace begins or ends.
    Update { moment: Moment, next: u64 },
    /// A change of the guest's tracepoints begins or ends.
    Tracepoints { moment: Moment, next: u64 },
    /// A module comes or goes.
    Module { moment: ModuleMoment, next: u64 },
    /// A program has counted down to the call of a trigger.
    Program(ProgramStop),
    /// The call of the self-test is over.
    SelfTest(Reached),
}

impl Purpose {
    /// Whether it belongs to what is held, and goes when that is given back.
    fn is_of_attachment(self) -> bool {
        match self {
            Self::Update { .. }
            | Self::Tracepoints { .. }
            | Self::Module { .. }
            | Self::Program(_) => true,
            Self::Attach
            | Self::From
            | Self::Settle
            | Self::FreeInit
            | Self::Leave
            | Self::End(_)
            | Self::SelfTest(_) => false,
        }
    }
}

struct Armed {
    purpose: Purpose,
    /// Of the session's own: what takes it out of the guest.
    own: Option<Tripwire>,
}

/// See above. Addresses are run-time addresses.
#[derive(Default)]
pub(super) struct Tripwires {
    armed: BTreeMap<u64, Armed>,
    /// Where there was one. A vCPU may have come to it before it was taken away, of which is heard afterwards.
    over: BTreeSet<u64>,
}

impl Tripwires {
    /// Lays one of the session's own on a function. Its bytes must be those of the image.
    ///
    /// # Errors
    /// As [`Tripwire::on_function`]; nothing has changed then.
    pub(super) fn lay(
        &mut self,
        purpose: Purpose,
        guest: &dyn Guest,
        paused: &Paused<'_>,
        (kernel, image): (&Kernel, &Image),
        function: &str,
    ) -> Result<(), GuestError> {
        let wire = Tripwire::on_function(guest, image, kernel, function, &TRAP_INSTRUCTION)?;
        self.enter(paused, wire.address(), Armed { purpose, own: Some(wire) });
        Ok(())
    }

    /// Arms one that somebody else has written, or writes in this pause.
    pub(super) fn arm(&mut self, purpose: Purpose, paused: &Paused<'_>, address: u64) {
        self.enter(paused, address, Armed { purpose, own: None });
    }

    /// The same for each of these; what one is for tells `purpose`.
    pub(super) fn arm_all(
        &mut self,
        paused: &Paused<'_>,
        addresses: impl IntoIterator<Item = u64>,
        purpose: impl Fn(u64) -> Option<Purpose>,
    ) {
        for address in addresses {
            if let Some(purpose) = purpose(address) {
                self.arm(purpose, paused, address);
            }
        }
    }

    fn enter(&mut self, paused: &Paused<'_>, address: u64, armed: Armed) {
        paused.arm_trap(address);
        self.over.remove(&address);
        self.armed.insert(address, armed);
    }

    /// Takes one away, of which the guest gets its bytes back if it is the session's own. Returns whether one was
    /// armed here, be it in this table or not.
    ///
    /// # Errors
    /// When the bytes cannot be put back. It is taken away all the same.
    pub(super) fn take_away(
        &mut self,
        guest: &dyn Guest,
        paused: &Paused<'_>,
        address: u64,
    ) -> Result<bool, GuestError> {
        let was_armed = paused.disarm_trap(address);
        if was_armed {
            self.over.insert(address);
        }
        if let Some(Armed { own: Some(wire), .. }) = self.armed.remove(&address) {
            wire.disarm(guest)?;
        }
        Ok(was_armed)
    }

    /// Lets nobody stop any more at those that are of what is held. They are still in the guest.
    pub(super) fn disarm_attachment(&mut self, guest: &dyn Guest, paused: &Paused<'_>) {
        for address in self.all(Purpose::is_of_attachment) {
            // Without bytes of our own there is nothing that could fail.
            let _ = self.take_away(guest, paused, address);
        }
    }

    /// What the one at an address is for.
    pub(super) fn at(&self, address: u64) -> Option<Purpose> {
        self.armed.get(&address).map(|armed| armed.purpose)
    }

    /// Whether there was one at an address, and is none any more.
    pub(super) fn is_over(&self, address: u64) -> bool {
        self.over.contains(&address)
    }

    /// Where the one for this is, if there is one.
    pub(super) fn find(&self, purpose: Purpose) -> Option<u64> {
        let mut all = self.armed.iter();
        all.find(|(_, armed)| armed.purpose == purpose).map(|(&address, _)| address)
    }

    /// Where those for such purposes are.
    pub(super) fn all(&self, is_meant: impl Fn(Purpose) -> bool) -> Vec<u64> {
        let meant = self.armed.iter().filter(|(_, armed)| is_meant(armed.purpose));
        meant.map(|(&address, _)| address).collect()
    }
}
