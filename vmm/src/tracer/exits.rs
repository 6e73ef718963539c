//! Rewrites the instructions by which functions are left: verify, write, read back, restore.
//!
//! On x86-64 an exit becomes a jump to its own stub. A context can only be suspended at its first
//! byte, before and after the change, so it can be changed and restored in any pause. On riscv64
//! the stub is there from the start, and one instruction in it becomes a call.

use super::edit::{Edit, ExitEdit, Restored, SkipReason};
use super::guest::GuestError;
use super::image::Image;
use super::modules::Modules;
use super::spot::Spot;
use super::touched::touched;
use super::view::View;
use crate::kernel::{After, Exit, ExitKind, Exits};

/// All exits that there are now: those of the kernel, and behind them those of modules.
#[derive(Clone, Copy)]
pub(super) struct AllExits<'a> {
    pub(super) kernel: &'a Exits,
    pub(super) modules: &'a Modules,
}

impl<'a> AllExits<'a> {
    pub(super) fn get(&self, index: usize) -> Option<&'a Exit> {
        let own = self.kernel.all().get(index);
        own.or_else(|| self.modules.exit(index).map(|(exit, _)| exit))
    }

    /// Where one is in guest memory.
    pub(super) fn spot(&self, image: &Image, index: usize) -> Option<Spot> {
        let own = self.kernel.all().get(index).map(|exit| Spot::exit(image, exit));
        own.or_else(|| self.modules.exit(index).map(|(_, spot)| spot))
    }
}

/// An exit that was left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitSkip {
    /// Index into [`Exits::all`], or behind those the number of one of a module.
    pub exit: usize,
    /// Why.
    pub reason: SkipReason,
}

/// What records of an exit have in place of a site, and what that means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitWord {
    /// The low half of an address.
    pub word: u32,
    /// Link address of the function that is left.
    pub function: u64,
    /// Link address of the function that is jumped to; 0 when it is not known.
    pub target: u64,
    /// What follows.
    pub after: After,
    /// The function is not traced: this is the end of those that jumped to it.
    pub is_aid: bool,
}

impl ExitWord {
    /// Of an exit whose records have this word.
    pub(super) fn new(word: u32, exit: &Exit) -> Self {
        let target = match exit.kind {
            ExitKind::Jump { target } => target,
            ExitKind::Return | ExitKind::Indirect { .. } => 0,
        };
        let is_aid = exit.site == Exit::NO_SITE;
        Self { word, function: exit.function, target, after: exit.after, is_aid }
    }
}

/// An exit that is ours, or another instruction that leads to a stub.
#[derive(Clone, Debug)]
struct Held {
    exit: usize,
    program: u16,
    edit: ExitEdit,
}

/// All exits that are ours right now, or all others of a kind.
#[derive(Debug, Default)]
pub(super) struct HeldExits {
    held: Vec<Held>,
    /// Programs of those that were not found as they were left: something may still lead there.
    left: Vec<u16>,
}

impl HeldExits {
    /// With memory to hold so many.
    pub(super) fn with_room(exits: usize) -> Self {
        let held = touched(exits, Held { exit: 1, program: 1, edit: Edit::FILLER.into() });
        Self { held, left: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Indices with the program of each.
    pub(super) fn with_programs(&self) -> impl Iterator<Item = (usize, u16)> + Clone {
        self.held.iter().map(|held| (held.exit, held.program))
    }

    /// The programs to which something leads, or may.
    pub(super) fn programs(&self) -> impl Iterator<Item = u16> {
        self.held.iter().map(|held| held.program).chain(self.left.iter().copied())
    }

    /// What was written for those (indices) that are `wanted`.
    pub(super) fn edits_of(&self, wanted: impl Fn(usize) -> bool) -> impl Iterator<Item = &Edit> {
        let held = self.held.iter().filter(move |held| wanted(held.exit));
        held.flat_map(|held| held.edit.parts())
    }

    /// Lets exits go through the programs beside them, by what `edit` (of an index and a program)
    /// says. All vCPUs are paused. Returns what was skipped.
    ///
    /// # Errors
    /// When a write fails half-way; every exit touched by this call is put back first.
    pub(super) fn hold(
        &mut self,
        view: &View<'_>,
        wanted: &[(usize, u16)],
        edit: impl Fn(usize, u16) -> Option<Result<ExitEdit, SkipReason>>,
    ) -> Result<Vec<(usize, SkipReason)>, GuestError> {
        let before = self.held.len();
        let mut skipped = Vec::new();
        self.held.reserve(wanted.len());
        for &(index, program) in wanted {
            let Some(edit) = edit(index, program) else { continue };
            let held = edit.map(|edit| Held { exit: index, program, edit });
            let reason = match held {
                Err(reason) => reason,
                Ok(held) => {
                    let applied = held.edit.apply(view);
                    self.held.push(held);
                    match applied {
                        Ok(true) => continue,
                        Ok(false) => {
                            self.undo_from(view, self.held.len() - 1);
                            SkipReason::ReadBack
                        }
                        Err(error) => {
                            self.undo_from(view, before);
                            return Err(error);
                        }
                    }
                }
            };
            skipped.push((index, reason));
        }
        Ok(skipped)
    }

    fn undo_from(&mut self, view: &View<'_>, count: usize) {
        for held in self.held.drain(count..).rev() {
            held.edit.undo(view);
        }
    }

    /// Gives back those for which `wanted` (of an index) is true, where they are still ours.
    ///
    /// # Errors
    /// When guest memory cannot be written; the others are given back all the same.
    pub(super) fn release_if(
        &mut self,
        view: &View<'_>,
        mut wanted: impl FnMut(usize) -> bool,
    ) -> Result<Restored, GuestError> {
        let mut restored = Ok(Restored::default());
        let left = &mut self.left;
        self.held.retain(|held| {
            if !wanted(held.exit) {
                return true;
            }
            if !Restored::add(&mut restored, held.exit, held.edit.restore(view)) {
                left.push(held.program);
            }
            false
        });
        restored
    }
}
