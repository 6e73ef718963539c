//! When programs may note which tasks are not meant: see [`Strangers`].

use super::trace::Attachment;
use crate::kernel::Kernel;
use vmtrace_trampolines::Condition;
use vmtrace_trampolines::family::Strangers;

impl Attachment {
    /// Lets programs that are made from now on note tasks of which it is seen that `members` does not hold, if that
    /// saves anything. These sites (indices) will always have programs by which tasks are [forgotten](super::Tally::Forget)
    /// before `members` may hold of them; tasks are noted only while all are held. They are noted only if for each of
    /// `calls` one of the kernel's first functions calls the other one. To be called once.
    pub fn note_strangers(
        &mut self,
        kernel: &Kernel,
        members: &Condition,
        sites: Vec<usize>,
        calls: &[(&[&str], &str)],
    ) {
        let is_there = |&(callers, callee): &(&[&str], _)| {
            callers.iter().any(|caller| self.code.notes_strangers(kernel, (caller, callee)))
        };
        if sites.is_empty() || !calls.iter().all(is_there) {
            return;
        }
        // Without room all tests are made at each call.
        let Some(address) = self.counters.strangers() else { return };
        self.code.note_strangers(Strangers { address, members: members.clone() });
        self.changes.are_at(sites);
    }
}
