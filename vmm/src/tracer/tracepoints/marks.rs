//! The flag of tasks whose system calls are traced (`syscall_regfunc`, kernel/tracepoint.c).
//!
//! The guest counts the users of these flags. vmtrace adds itself to that count, so that the guest
//! neither sets the flags again nor clears them while vmtrace needs them. A new task inherits its
//! parent's flag.

use crate::kernel::tracepoints::SyscallMarks;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::view::View;

/// More threads than a kernel can have (`PID_MAX_LIMIT`), and steps along its lists.
const MOST: u32 = 4 << 20;

/// A guest that is paused and changes no tracepoint.
pub(super) struct Tasks<'a> {
    pub(super) guest: &'a dyn Guest,
    pub(super) image: &'a Image,
    pub(super) view: &'a View<'a>,
    pub(super) marks: &'a SyscallMarks,
}

impl Tasks<'_> {
    /// Marks all; whether the guest has its tasks as it is known to. If not, nothing is changed.
    pub(super) fn mark(&self) -> Result<bool, GuestError> {
        let Some(all) = self.find() else { return Ok(false) };
        let users = self.users()?;
        let Some(more) = users.checked_add(1).filter(|more| *more > 0) else { return Ok(false) };
        for task in all {
            self.change(task, |work| work | self.marks.mark)?;
        }
        self.set_users(more)?;
        Ok(true)
    }

    /// Needs the marks no more: they go if nobody else does. Whether the guest has its tasks, and
    /// its count, as it is known to.
    pub(super) fn unmark(&self) -> Result<bool, GuestError> {
        let users = self.users()?;
        if users < 1 {
            return Ok(false);
        }
        if users == 1 {
            let Some(all) = self.find() else { return Ok(false) };
            for task in all {
                self.change(task, |work| work & !self.marks.mark)?;
            }
        }
        self.set_users(users - 1)?;
        Ok(true)
    }

    fn users(&self) -> Result<i32, GuestError> {
        let word = self.view.load(self.image.physical_of(self.marks.users), 4)?;
        #[allow(clippy::cast_possible_truncation, reason = "four bytes were read")]
        Ok((word as u32).cast_signed())
    }

    fn set_users(&self, users: i32) -> Result<(), GuestError> {
        let at = self.image.physical_of(self.marks.users);
        self.view.store(at, users.cast_unsigned().into(), 4)
    }

    /// Changes what a task has to do at system calls. No vCPU runs, and the guest changes it by
    /// single instructions.
    fn change(&self, work: u64, new: impl Fn(u64) -> u64) -> Result<(), GuestError> {
        let old = self.view.load(work, 8)?;
        if new(old) == old { Ok(()) } else { self.view.store(work, new(old), 8) }
    }

    /// Guest-physical addresses of the words with the marks: of the first task, which all others
    /// come from, and of all threads of all processes.
    fn find(&self) -> Option<Vec<u64>> {
        let marks = self.marks;
        let first = self.image.runtime(marks.init_task);
        let mut found = vec![self.work(first)?];
        let mut left = MOST;
        self.each(first.wrapping_add(marks.tasks), &mut left, &mut |node, left| {
            let process = node.wrapping_sub(marks.tasks);
            let signal = self.word(process.wrapping_add(marks.signal))?;
            self.each(signal.wrapping_add(marks.threads), left, &mut |node, _| {
                found.push(self.work(node.wrapping_sub(marks.thread))?);
                Some(())
            })
        })?;
        Some(found)
    }

    fn work(&self, task: u64) -> Option<u64> {
        let at = task.wrapping_add(self.marks.work);
        let physical = self.image.tables.translate(self.guest, at).ok()?;
        // It must be there before anything is changed, and in one piece.
        self.view.load(physical, 8).ok().filter(|_| physical.is_multiple_of(8))?;
        Some(physical)
    }

    fn word(&self, address: u64) -> Option<u64> {
        self.image.read_u64(self.guest, address).ok()
    }

    /// Every entry of a list (`struct list_head`, without its head); `None` when it has no end, as
    /// an entry shows that comes again (Brent's algorithm).
    fn each(
        &self,
        head: u64,
        left: &mut u32,
        see: &mut dyn FnMut(u64, &mut u32) -> Option<()>,
    ) -> Option<()> {
        let mut node = self.word(head)?;
        let (mut kept, mut steps, mut until) = (head, 0_u32, 1_u32);
        while node != head {
            *left = left.checked_sub(1)?;
            see(node, left)?;
            if steps == until {
                (kept, steps, until) = (node, 0, until.saturating_mul(2));
            }
            steps += 1;
            node = self.word(node)?;
            if node == kept && node != head {
                return None;
            }
        }
        Some(())
    }
}
