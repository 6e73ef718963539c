//! Memory for what is kept of a guest's sites and exits. It is taken before the guest runs: in a pause
//! every page that is touched first is a fault, of some thousand instructions.

use super::exits::HeldExits;
use super::ftrace::Record;
use super::module_facts::ModuleFacts;
use super::patch::Patcher;
use super::touched::touched;
use crate::kernel::{FtraceKind, Kernel};

/// Memory for an [`Attachment`](super::Attachment), all of it in place.
#[derive(Debug, Default)]
pub struct Room {
    pub(super) patcher: Patcher,
    pub(super) exits: HeldExits,
    pub(super) records: Vec<Record>,
    /// Not memory, but what takes long to find, too.
    pub(super) module_facts: Option<ModuleFacts>,
}

impl Room {
    /// To hold so many sites and exits of a kernel.
    #[must_use]
    pub fn new(kernel: &Kernel, sites: usize, exits: usize) -> Self {
        let all_sites = kernel.sites().len();
        let edits = match kernel.ftrace_kind() {
            // A literal and a call.
            FtraceKind::CallOps => 2 * sites,
            FtraceKind::Fentry | FtraceKind::Patchable => sites,
        };
        let record = Record { ip: 1, flags_at: 1, flags: 1 };
        Self {
            patcher: Patcher::with_room(sites, edits, all_sites),
            exits: HeldExits::with_room(exits),
            records: touched(all_sites, record),
            // What is missing is told when it is needed.
            module_facts: ModuleFacts::find(kernel).ok(),
        }
    }
}
