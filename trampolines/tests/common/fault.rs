//! An instruction of a program that faults once, so that a handler interrupts the program there.

use super::FakeGuest;
use super::arch::{FAULT, FAULT_SIGNAL, handler, patch};

/// Where the program faults, until it has.
#[derive(Default)]
pub(crate) struct Fault {
    /// What is to be put back, and where.
    instruction: Option<(u64, Vec<u8>)>,
    /// How often it has faulted.
    pub(crate) met: u64,
}

impl Fault {
    /// The code of a program with this number, which is not the last, and where that is.
    pub(crate) fn code_of(guest: &FakeGuest, program: usize) -> (u64, Vec<u8>) {
        let start = guest.program(program);
        let len = usize::try_from(guest.program(program + 1) - start).unwrap();
        // SAFETY: this is the program's code.
        (start, unsafe { std::slice::from_raw_parts(guest.code(start), len) }.to_vec())
    }

    /// Lets the instruction at an address fault, which these are the first bytes of.
    pub(crate) fn put(&mut self, guest: &FakeGuest, address: u64, bytes: &[u8]) {
        let faults = &FAULT[..bytes.len().min(FAULT.len())];
        self.instruction = Some((address, bytes[..faults.len()].to_vec()));
        patch(guest.code(address), faults);
    }

    /// Whether it has not faulted yet.
    pub(crate) fn waits(&self) -> bool {
        self.instruction.is_some()
    }

    /// Puts back what was there. Whether it had not been put back before.
    pub(crate) fn take_back(&mut self, guest: &FakeGuest) -> bool {
        let Some((address, bytes)) = self.instruction.take() else { return false };
        patch(guest.code(address), &bytes);
        true
    }

    /// The same by the handler. A fault that is not one of ours would come again for ever.
    pub(crate) fn meet(&mut self, guest: &FakeGuest) {
        if !self.take_back(guest) {
            std::process::abort();
        }
        self.met += 1;
    }

    /// Faults are this handler's from now on, which may do anything: it runs while programs do, in their thread,
    /// which holds nothing it needs.
    pub(crate) fn handle(interrupt: extern "C" fn(i32)) {
        // SAFETY: see above.
        unsafe {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = handler(interrupt);
            libc::sigaction(FAULT_SIGNAL, &raw const action, core::ptr::null_mut());
        }
    }
}
