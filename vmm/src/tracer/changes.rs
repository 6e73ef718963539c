//! Where tasks change that may be noted as strangers, and whether they may be noted now.

use super::counters::Counters;
use super::patch::Patcher;

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

    /// These are the sites where tasks change.
    pub(super) fn are_at(&mut self, sites: Vec<usize>) {
        self.sites = sites;
    }

    /// What is held has changed: a task that changes unseen must not stay a stranger. All vCPUs are paused.
    pub(super) fn look(&mut self, patcher: &Patcher, counters: &Counters) {
        if self.sites.is_empty() {
            return;
        }
        let can_be = self.idle_tasks_are_there && patcher.call_programs(&self.sites);
        if std::mem::replace(&mut self.noted, can_be) != can_be {
            counters.note_strangers(can_be);
        }
    }
}
