//! Exits of functions: each is rewritten once, at the attach, and from then on switched by one
//! word.
//!
//! Each jumps to its own stub, in the first 2 MiB of the annex, which are mapped read-execute after
//! its data. A slot in the stub calls a program, or does nothing. That call is a `jal`, which
//! reaches 1 MiB. So the programs for ends of functions are in the middle, where every stub reaches
//! all of them.
//!
//! ```text
//! 0        half of the stubs
//!          programs that end functions, as much as is in reach of every stub
//!          the other stubs
//!          stubs of modules, as many as there are, and as reach all programs
//! 2 MiB
//! ```

use super::map;
use super::module_stubs::OfModules;
use crate::kernel::epilogues::{PlannedExit, slot};
use crate::kernel::{Exit, Kernel, KernelError};
use crate::tracer::annex::{CODE, Memory};
use crate::tracer::edit::{Edit, SkipReason};
use crate::tracer::error::TraceError;
use crate::tracer::exit_plan::ExitPlan;
use crate::tracer::exits::ExitWord;
use crate::tracer::guest::GuestError;
use crate::tracer::image::Image;
use crate::tracer::view::View;
use std::borrow::Borrow;
use std::sync::Arc;
use vm_memory::Bytes;
use vmtrace_trampolines::riscv64::encode::NOP;

/// Programs begin at multiples of so many bytes: those of a cache line.
const ALIGN: u64 = 64;
/// As far as a slot's call reaches, less than the end of a stub behind its slot.
const REACH: u64 = (1 << 20) - ALIGN;
/// Room for programs that there must be: some 500, of 256 bytes.
const LEAST: u64 = 128 << 10;
/// Room for stubs of modules, if there is so much: some 9000 at once.
const SPARE: u64 = 192 << 10;

/// The exits that are rewritten, and the code that they lead to.
pub(super) struct Returns {
    memory: Arc<dyn Memory>,
    /// Run-time address of the area.
    address: u64,
    /// See [`ExitPlan::numbers`].
    numbers: Vec<u32>,
    /// Offset in the area of each stub's slot, or why the exit was left alone.
    slots: Vec<Result<u64, SkipReason>>,
    /// Where in the area the next program can be, and where all end.
    free: u64,
    end: u64,
    /// Those of modules.
    pub(super) of_modules: OfModules,
}

/// Where stubs are.
struct Places {
    /// Offset of each stub, in the order of the exits.
    stubs: Vec<u64>,
    /// Where programs begin and end.
    programs: (u64, u64),
    /// Where the last stub ends.
    last: u64,
    /// Where stubs of modules begin and end.
    spare: (u64, u64),
}

impl Places {
    /// With as much room for stubs of modules as those of the kernel leave, if there is to be any.
    fn with_spare(lens: &[u64], of_modules: bool) -> Option<Self> {
        let spares = if of_modules { &[SPARE, SPARE / 4, 0][..] } else { &[0] };
        spares.iter().find_map(|&spare| Self::new(lens, spare))
    }

    /// With room for so many bytes of stubs of modules, which reach all programs as well.
    fn new(lens: &[u64], spare: u64) -> Option<Self> {
        let all = lens.iter().sum::<u64>() + spare;
        let mut stubs = Vec::with_capacity(lens.len());
        let (mut next, mut programs) = (0, None);
        for &len in lens {
            if programs.is_none() && next >= all / 2 {
                let bounds = Self::programs(next, all - next)?;
                programs = Some(bounds);
                next = bounds.1;
            }
            stubs.push(next);
            next += len;
        }
        let programs = programs.or_else(|| Self::programs(next, spare))?;
        let first = next.max(programs.1);
        let spare = (first, first + spare);
        (spare.1 <= CODE).then_some(Self { stubs, programs, last: next, spare })
    }

    /// Between so many bytes of stubs and so many others.
    fn programs(below: u64, above: u64) -> Option<(u64, u64)> {
        let start = below.next_multiple_of(ALIGN);
        let end = REACH.min((start + REACH).checked_sub(above)?) / ALIGN * ALIGN;
        (end >= start + LEAST).then_some((start, end))
    }
}

/// What the image alone tells of rewriting the exits of the functions at these sites (indices).
pub(super) fn plan(
    kernel: &Kernel,
    sites: &[usize],
    of_modules: bool,
) -> Result<ExitPlan, TraceError> {
    let failed = |error: KernelError| TraceError::Kernel(error.to_string());
    let plan = kernel.epilogues().map_err(failed)?.plan(sites);
    let lens: Vec<u64> = plan.exits.iter().map(|exit| exit.stub_len() as u64).collect();
    let places = Places::with_spare(&lens, of_modules);
    let places = places.ok_or(TraceError::Returns(plan.exits.len()))?;
    let area = map::code(map::link(kernel)?);
    let len = usize::try_from(places.last).map_err(|_| TraceError::Annex)?;
    let mut planned = ExitPlan {
        numbers: numbers(kernel.exits().map_err(failed)?.all(), &plan.exits),
        slots: Vec::with_capacity(plan.exits.len()),
        groups: groups(&plan.exits),
        rewrites: Vec::with_capacity(plan.exits.len() + plan.exits.len() / 8),
        code: vec![0; len],
        programs: places.programs,
        spare: places.spare,
        ..ExitPlan::default()
    };
    for ((number, exit), &stub) in (0..).zip(&plan.exits).zip(&places.stubs) {
        let address = area.wrapping_add(stub);
        let code = exit.stub(address, None, low_half(exit.epilogue.ret));
        let code = code.ok_or(TraceError::Annex)?;
        let at = usize::try_from(stub).map_err(|_| TraceError::Annex)?;
        let place = planned.code.get_mut(at..).and_then(|rest| rest.get_mut(..code.len()));
        place.ok_or(TraceError::Annex)?.copy_from_slice(&code);
        planned.slots.push(stub + exit.slot_offset() as u64);
        let both = exit.original(kernel).zip(exit.writes(address)).ok_or(TraceError::Annex)?;
        for ((at, original), (_, ours)) in both.0.into_iter().zip(both.1) {
            let parts = original.chunks(8).zip(ours.chunks(8));
            for (at, (original, ours)) in (at..).step_by(8).zip(parts) {
                let edit = Edit::new(at, original, ours).ok_or(TraceError::Annex)?;
                planned.rewrites.push((number, edit));
            }
        }
    }
    Ok(planned)
}

/// Of each exit, which of the planned ones (by address) it is.
fn numbers(exits: &[Exit], planned: &[PlannedExit]) -> Vec<u32> {
    let number = |exit: &Exit| {
        let found = planned.binary_search_by_key(&exit.address, |planned| planned.epilogue.ret);
        found.ok().and_then(|number| u32::try_from(number).ok()).unwrap_or(ExitPlan::NONE)
    };
    exits.iter().map(number).collect()
}

impl Returns {
    /// For the exits of a plan, with all stubs in the area, which is to be mapped at `address`:
    /// nobody executes them yet. And what is to be rewritten.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub(super) fn new(
        view: &View<'_>,
        image: &Image,
        memory: &Arc<dyn Memory>,
        address: u64,
        plan: &ExitPlan,
    ) -> Result<(Self, Rewrites), TraceError> {
        let memory = Arc::clone(memory);
        let (free, end) = plan.programs;
        let numbers = plan.numbers.clone();
        let slots = plan.slots.iter().map(|&slot| Ok(slot)).collect();
        let of_modules = OfModules::new(plan.spare);
        let returns = Self { memory, address, numbers, slots, free, end, of_modules };
        let rewrites = Rewrites::new(view, image, plan)?;
        let moved;
        let code = if image.slide == 0 {
            &plan.code
        } else {
            moved = renamed(plan, image.slide);
            &moved
        };
        let last = code.len() as u64;
        for (start, stop) in [(0, free.min(last)), (end.min(last), last)] {
            let bytes = usize::try_from(start).ok().zip(usize::try_from(stop).ok());
            let bytes = bytes.and_then(|(start, stop)| code.get(start..stop));
            returns.write(start, bytes.ok_or(TraceError::Annex)?)?;
        }
        Ok((returns, rewrites))
    }

    /// What was not rewritten cannot be held.
    pub(super) fn leave_out(&mut self, rewrites: &Rewrites) {
        for (slot, skipped) in self.slots.iter_mut().zip(&rewrites.skipped) {
            if let Some(reason) = *skipped {
                *slot = Err(reason);
            }
        }
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), TraceError> {
        let offset = usize::try_from(offset).map_err(|_| TraceError::Annex)?;
        self.memory.slice().write_slice(bytes, offset).map_err(|_| TraceError::Annex)
    }

    /// Whether the area holds these bytes.
    pub(super) fn holds(&self, offset: u64, bytes: &[u8]) -> bool {
        let mut held = vec![0; bytes.len()];
        let offset = usize::try_from(offset).ok();
        let read = offset.map(|offset| self.memory.slice().read_slice(&mut held, offset));
        read.is_some_and(|read| read.is_ok()) && held == bytes
    }

    /// Run-time address of what is so far in the area.
    pub(super) fn address(&self, offset: u64) -> u64 {
        self.address.wrapping_add(offset)
    }

    /// Puts a program that ends functions behind all others; `None` when there is no room. Nobody
    /// executes it yet.
    pub(super) fn put(&mut self, code: &[u8]) -> Result<Option<u64>, TraceError> {
        let end = self.free + code.len() as u64;
        if end > self.end {
            return Ok(None);
        }
        self.write(self.free, code)?;
        let address = self.address.wrapping_add(self.free);
        self.free = end.next_multiple_of(ALIGN);
        Ok(Some(address))
    }

    /// Guest-physical address of code in it.
    pub(super) fn physical(&self, address: u64) -> u64 {
        self.memory.guest_address().wrapping_add(address.wrapping_sub(self.address))
    }

    /// Of an exit, by its index; `None` when it was not to be rewritten.
    #[inline]
    fn slot(&self, exit: usize) -> Option<Result<u64, SkipReason>> {
        let Some(&number) = self.numbers.get(exit) else { return self.of_modules.slot(exit) };
        self.slots.get(usize::try_from(number).ok()?).copied()
    }

    /// Whether an exit (index) was to be rewritten.
    pub(super) fn is_prepared(&self, exit: usize) -> bool {
        self.slot(exit).is_some()
    }

    /// Whether an exit (index) was rewritten.
    pub(super) fn has_way(&self, exit: usize) -> bool {
        matches!(self.slot(exit), Some(Ok(_)))
    }

    /// What records of an exit say, if it was rewritten.
    pub(super) fn named(&self, image: &Image, (index, exit): (usize, &Exit)) -> Option<ExitWord> {
        self.slot(index)?.ok()?;
        Some(ExitWord::new(low_half(image.runtime(exit.address)), exit))
    }

    /// What is to be written for an exit (index) to call the program at run-time address `program`.
    /// Verifies that it calls none.
    pub(super) fn edit(
        &self,
        view: &View<'_>,
        exit: usize,
        program: u64,
    ) -> Result<Edit, SkipReason> {
        let at = self.slot(exit).ok_or(SkipReason::NoStub)??;
        let physical = self.memory.guest_address() + at;
        let nothing = NOP.to_le_bytes();
        if view.load(physical, 4).map_err(|_| SkipReason::NoRam)? != u64::from(NOP) {
            return Err(SkipReason::GuestOwned("other bytes"));
        }
        let call = slot(self.address.wrapping_add(at), Some(program));
        Edit::new(physical, &nothing, &call.ok_or(SkipReason::OutOfReach)?)
            .ok_or(SkipReason::OutOfReach)
    }
}

/// What records of an exit have in place of a site.
pub(super) fn low_half(ret: u64) -> u32 {
    #[allow(clippy::cast_possible_truncation, reason = "the low half")]
    let word = ret as u32;
    word
}

/// The stubs of a kernel that was moved: they name their exits by run-time addresses, in the last
/// word of each.
fn renamed(plan: &ExitPlan, slide: u64) -> Vec<u8> {
    let mut code = plan.code.clone();
    for &slot in &plan.slots {
        let at = usize::try_from(slot).unwrap_or(usize::MAX).saturating_add(8);
        let name = code.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<4>());
        if let Some(name) = name {
            *name = u32::from_le_bytes(*name).wrapping_add(low_half(slide)).to_le_bytes();
        }
    }
    code
}

/// All that is to be rewritten.
#[derive(Default)]
pub(super) struct Rewrites {
    /// Of which exits.
    all: Vec<(u32, Edit)>,
    /// Of each exit, why it is left alone.
    skipped: Vec<Option<SkipReason>>,
    /// See [`ExitPlan::groups`].
    groups: Vec<u32>,
}

impl Rewrites {
    /// Of exits by what is to be rewritten for each, or why it is left alone. Verifies that the guest
    /// holds what is expected.
    pub(super) fn of(
        view: &View<'_>,
        exits: Vec<Result<Vec<Edit>, SkipReason>>,
        groups: Vec<u32>,
    ) -> Result<Self, GuestError> {
        let mut rewrites = Self { all: Vec::new(), skipped: vec![None; exits.len()], groups };
        for (exit, edits) in (0..).zip(exits) {
            match edits {
                Ok(edits) => {
                    for edit in edits {
                        rewrites.add(view, exit, edit)?;
                    }
                }
                Err(reason) => rewrites.skip(exit, reason),
            }
        }
        rewrites.spread();
        Ok(rewrites)
    }

    fn add(&mut self, view: &View<'_>, exit: u32, edit: Edit) -> Result<(), GuestError> {
        if !edit.is_untouched(view)? {
            self.skip(exit, SkipReason::GuestOwned("other code where it returns"));
        }
        self.all.push((exit, edit));
        Ok(())
    }

    /// Of each exit, why it was left alone, if it was.
    pub(super) fn skipped(&self) -> &[Option<SkipReason>] {
        &self.skipped
    }

    /// Verifies that the guest holds what the image does. Of exits that share their bytes all are
    /// left alone, or none.
    fn new(view: &View<'_>, image: &Image, plan: &ExitPlan) -> Result<Self, TraceError> {
        let mut rewrites = Self {
            all: Vec::with_capacity(plan.rewrites.len()),
            skipped: vec![None; plan.slots.len()],
            groups: plan.groups.clone(),
        };
        for &(exit, ref edit) in &plan.rewrites {
            rewrites.add(view, exit, edit.at(image))?;
        }
        rewrites.spread();
        Ok(rewrites)
    }

    fn skip(&mut self, exit: u32, reason: SkipReason) {
        let skipped = usize::try_from(exit).ok().and_then(|exit| self.skipped.get_mut(exit));
        if let Some(skipped) = skipped {
            *skipped = skipped.or(Some(reason));
        }
    }

    fn is_skipped(&self, exit: u32) -> bool {
        let skipped = usize::try_from(exit).ok().and_then(|exit| self.skipped.get(exit));
        skipped.is_none_or(Option::is_some)
    }

    /// Leaves those alone, too, that share bytes with what is left alone.
    fn spread(&mut self) {
        let both = self.groups.iter().zip(&self.skipped);
        let mut lost: Vec<u32> =
            both.filter(|(_, skipped)| skipped.is_some()).map(|(&group, _)| group).collect();
        if lost.is_empty() {
            return;
        }
        lost.sort_unstable();
        for (group, skipped) in self.groups.iter().zip(&mut self.skipped) {
            if skipped.is_none() && lost.binary_search(group).is_ok() {
                *skipped = Some(SkipReason::Shared);
            }
        }
    }

    /// Writes and reads back: only while one CPU runs, with interrupts off, and none of its frames
    /// is of a function that is left by one of the exits. What does not hold is put back with all
    /// that shares bytes with it.
    ///
    /// # Errors
    /// When guest memory cannot be used half-way; all is then put back.
    pub(super) fn write(&mut self, view: &View<'_>) -> Result<(), GuestError> {
        let mut failed = Vec::new();
        for (exit, edit) in self.all.iter().filter(|(exit, _)| !self.is_skipped(*exit)) {
            match edit.apply(view) {
                Ok(true) => {}
                Ok(false) => failed.push(*exit),
                Err(error) => {
                    self.undo(view);
                    return Err(error);
                }
            }
        }
        if failed.is_empty() {
            return Ok(());
        }
        let before = self.skipped.clone();
        for exit in failed {
            self.skip(exit, SkipReason::ReadBack);
        }
        self.spread();
        let was_skipped = |exit: u32| {
            let skipped = usize::try_from(exit).ok().and_then(|exit| before.get(exit));
            skipped.is_none_or(Option::is_some)
        };
        for &(exit, ref edit) in &self.all {
            if !was_skipped(exit) && self.is_skipped(exit) {
                edit.undo(view)?;
            }
        }
        Ok(())
    }

    /// Puts all back, as far as that is possible, while nobody has run since.
    pub(super) fn undo(&self, view: &View<'_>) {
        for (_, edit) in self.all.iter().filter(|(exit, _)| !self.is_skipped(*exit)) {
            let _ = edit.undo(view);
        }
    }
}

/// Of each exit, by address, the first of those that it shares bytes with, itself included.
pub(super) fn groups<E: Borrow<PlannedExit>>(exits: &[E]) -> Vec<u32> {
    let mut leaders: Vec<usize> = (0..exits.len()).collect();
    let leader = |leaders: &[usize], mut exit: usize| {
        while let Some(&next) = leaders.get(exit).filter(|&&next| next != exit) {
            exit = next;
        }
        exit
    };
    for (guest, exit) in exits.iter().enumerate() {
        // The first is in the exit's own window.
        for jump in exit.borrow().jumps.iter().skip(1) {
            let host = exits.partition_point(|host| host.borrow().epilogue.start <= jump.at);
            let host = host.saturating_sub(1);
            let (a, b) = (leader(&leaders, guest), leader(&leaders, host));
            if let Some(of_later) = leaders.get_mut(a.max(b)) {
                *of_later = a.min(b);
            }
        }
    }
    let group = |exit| u32::try_from(leader(&leaders, exit)).unwrap_or(u32::MAX);
    (0..exits.len()).map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        // A stub that cannot call every program would leave its exit untraced.
        #[test]
        fn every_stub_reaches_every_program(
            lens in proptest::collection::vec((4_u64..40).prop_map(|words| words * 4), 0..20_000),
        ) {
            let places = Places::with_spare(&lens, true).unwrap();
            let (start, end) = places.programs;
            prop_assert!(start + LEAST <= end && start % ALIGN == 0);
            for (&at, &len) in places.stubs.iter().zip(&lens) {
                prop_assert!(at + len <= start || at >= end, "{at:#x} is in {start:#x} to {end:#x}");
                prop_assert!(at + len <= CODE);
                let (first, behind) = places.spare;
                prop_assert!(at + len <= first && end <= first && behind <= CODE);
                for slot in [at, at + len - 12, first, first.max(behind.saturating_sub(12))] {
                    for program in [start, end - ALIGN] {
                        prop_assert!(slot_reaches(slot, program), "{slot:#x} {program:#x}");
                    }
                }
            }
        }
    }

    fn slot_reaches(from: u64, to: u64) -> bool {
        slot(from, Some(to)).is_some()
    }

    #[test]
    fn too_many_stubs_are_refused() {
        assert!(Places::new(&[16; 80_000], 0).is_some());
        assert!(Places::new(&[16; 130_000], 0).is_none());
        assert!(Places::new(&[16; 1_000_000], 0).is_none());
    }
}
