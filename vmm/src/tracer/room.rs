//! Memory for what is kept of a guest's sites and exits. It is taken before the guest runs: in a pause
//! every page that is touched first is a fault, of some thousand instructions.

use super::exits::HeldExits;
use super::ftrace::Record;
use super::modules::Offsets;
use super::patch::Patcher;
use crate::kernel::{FtraceKind, Kernel};
use std::hint::black_box;

/// Memory for an [`Attachment`](super::Attachment), all of it in place.
#[derive(Debug, Default)]
pub struct Room {
    pub(super) patcher: Patcher,
    pub(super) exits: HeldExits,
    pub(super) records: Vec<Record>,
    /// Not memory, but what takes long to find, too.
    pub(super) module_offsets: Option<Offsets>,
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
            module_offsets: Offsets::find(kernel).ok(),
        }
    }
}

/// An empty list with memory for so many, each page of which was written to. Not all bytes of the
/// `filler` are zero: the system would be asked for zeros, and nothing be written.
pub(super) fn touched<T: Clone>(count: usize, filler: T) -> Vec<T> {
    let mut list = Vec::with_capacity(count);
    list.resize(count, filler);
    // Else the compiler may see that nobody reads it.
    let mut list = black_box(list);
    list.clear();
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::resource::{UsageWho, getrusage};

    /// Of this thread.
    fn faults() -> i64 {
        getrusage(UsageWho::RUSAGE_THREAD).unwrap().minor_page_faults()
    }

    // The guest would wait for the pages.
    #[test]
    fn room_is_in_place() {
        // So much that the allocator has nothing of it left over from before.
        const COUNT: usize = 6 << 20;
        let fill = |mut list: Vec<u64>| {
            let before = faults();
            list.resize(COUNT, 7);
            black_box(&list);
            faults() - before
        };
        let (cold, warm) = (fill(Vec::with_capacity(COUNT)), fill(touched(COUNT, 7)));
        // By huge pages, if the system likes.
        assert!(cold > 0 && warm == 0, "{cold} and {warm}");
    }
}
