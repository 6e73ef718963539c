//! When programs may note which tasks are not meant: see [`Strangers`].

use super::trace::Attachment;
use crate::kernel::Kernel;
use vmtrace_trampolines::Condition;
use vmtrace_trampolines::family::Strangers;

/// What lets tasks be noted.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Where tasks change (indices), if those are noted that are not meant.
    sites: Vec<usize>,
    /// Whether they can be noted now.
    noted: bool,
    /// Idle tasks come by none of these sites, and may get the memory of others that have ended. All of them are there when
    /// `.init.text` is freed (`smp_init`), if that was seen.
    idle_tasks_are_there: bool,
}

impl Changes {
    /// The guest is about to free `.init.text`.
    pub(super) fn init_is_over(&mut self) {
        self.idle_tasks_are_there = true;
    }
}

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
        self.changes.sites = sites;
    }

    /// What is held has changed: a task that changes unseen must not stay a stranger. All vCPUs are paused.
    pub(super) fn look_at_changes(&mut self) {
        let Changes { sites, noted, idle_tasks_are_there } = &mut self.changes;
        if sites.is_empty() {
            return;
        }
        let can_be = *idle_tasks_are_there && self.patcher.call_programs(sites);
        if std::mem::replace(noted, can_be) != can_be {
            self.counters.note_strangers(can_be);
        }
    }
}
