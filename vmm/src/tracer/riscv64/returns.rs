//! Exits of functions: rewritten once, at the attach moment, and from then on switched by one word.
//!
//! Each leads to a stub of its own, in the annex' first 2 MiB, which are mapped read-execute behind
//! its data. A stub's slot calls a program, or does nothing. That call is a `jal`, which reaches
//! 1 MiB: programs that end functions lie in the middle, where every stub reaches all of them.
//!
//! ```text
//! 0        half of the stubs
//!          programs that end functions, as much as is in reach of every stub
//!          the other stubs
//! 2 MiB
//! ```

use crate::kernel::epilogues::{Plan, PlannedExit, slot};
use crate::kernel::{Exit, Kernel};
use crate::tracer::annex::{CODE, Memory};
use crate::tracer::exits::ExitWord;
use crate::tracer::guest::{Guest, GuestError, Image};
use crate::tracer::patch::{Edit, SkipReason};
use crate::tracer::trace::TraceError;
use std::sync::Arc;
use vm_memory::Bytes;
use vmtrace_trampolines::riscv64::encode::NOP;

/// Programs begin at multiples of so many bytes: those of a cache line.
const ALIGN: u64 = 64;
/// As far as a slot's call reaches, less than the end of a stub behind its slot.
const REACH: u64 = (1 << 20) - ALIGN;
/// Room for programs that there must be: some 500, of 256 bytes.
const LEAST: u64 = 128 << 10;

/// What is kept of an exit.
#[derive(Clone, Copy, Debug)]
struct Prepared {
    /// Link address of its `ret`.
    ret: u64,
    /// Offset in the area of its stub's slot, or why it was left alone.
    slot: Result<u64, SkipReason>,
}

/// The exits that are rewritten, and the code that they lead to.
pub(super) struct Returns {
    memory: Arc<dyn Memory>,
    /// Run-time address of the area.
    address: u64,
    /// By address.
    exits: Vec<Prepared>,
    /// Where in the area the next program can be, and where all end.
    free: u64,
    end: u64,
}

/// Where stubs are.
struct Places {
    /// Offset of each stub, in the order of the exits.
    stubs: Vec<u64>,
    /// Where programs begin and end.
    programs: (u64, u64),
    /// Where the last stub ends.
    last: u64,
}

impl Places {
    fn new(lens: &[u64]) -> Option<Self> {
        let all: u64 = lens.iter().sum();
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
        let programs = programs.or_else(|| Self::programs(next, 0))?;
        (next <= CODE).then_some(Self { stubs, programs, last: next })
    }

    /// Between so many bytes of stubs and so many others.
    fn programs(below: u64, above: u64) -> Option<(u64, u64)> {
        let start = below.next_multiple_of(ALIGN);
        let end = REACH.min((start + REACH).checked_sub(above)?) / ALIGN * ALIGN;
        (end >= start + LEAST).then_some((start, end))
    }
}

impl Returns {
    /// For the exits of the functions at these sites (indices), with all stubs in the area, which
    /// is to be mapped at `address`: nobody executes them yet. And what is to be rewritten.
    ///
    /// # Errors
    /// When there is no place for the stubs, or guest memory cannot be used.
    pub(super) fn new(
        guest: &dyn Guest,
        kernel: &Kernel,
        image: &Image,
        memory: &Arc<dyn Memory>,
        address: u64,
        sites: &[usize],
    ) -> Result<(Self, Rewrites), TraceError> {
        let memory = Arc::clone(memory);
        let mut returns = Self { memory, address, exits: Vec::new(), free: 0, end: 0 };
        if sites.is_empty() {
            return Ok((returns, Rewrites::default()));
        }
        let epilogues =
            kernel.epilogues().map_err(|error| TraceError::Kernel(error.to_string()))?;
        let plan = epilogues.plan(sites);
        let lens: Vec<u64> = plan.exits.iter().map(|exit| exit.stub_len() as u64).collect();
        let places = Places::new(&lens).ok_or(TraceError::Returns(plan.exits.len()))?;
        (returns.free, returns.end) = places.programs;
        let rewrites = Rewrites::new(guest, kernel, image, &plan, &places, address)?;
        // At once: small pieces of shared memory are copied byte by byte.
        let mut area = vec![0; usize::try_from(CODE).map_err(|_| TraceError::Annex)?];
        for (exit, &stub) in plan.exits.iter().zip(&places.stubs) {
            let ret = exit.epilogue.ret;
            let code = exit.stub(address.wrapping_add(stub), None, word(image, ret));
            let code = code.ok_or(TraceError::Annex)?;
            let at = usize::try_from(stub).map_err(|_| TraceError::Annex)?;
            let place = area.get_mut(at..).and_then(|rest| rest.get_mut(..code.len()));
            place.ok_or(TraceError::Annex)?.copy_from_slice(&code);
            returns.exits.push(Prepared { ret, slot: Ok(stub + exit.slot_offset() as u64) });
        }
        for part in [0..returns.free, returns.end..places.last] {
            let range = part.start..part.end.max(part.start);
            let bytes = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
            let bytes = bytes.and_then(|(start, end)| area.get(start..end));
            returns.write(range.start, bytes.ok_or(TraceError::Annex)?)?;
        }
        Ok((returns, rewrites))
    }

    /// What was not rewritten cannot be held.
    pub(super) fn leave_out(&mut self, rewrites: &Rewrites) {
        for (prepared, skipped) in self.exits.iter_mut().zip(&rewrites.skipped) {
            if let Some(reason) = *skipped {
                prepared.slot = Err(reason);
            }
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), TraceError> {
        let offset = usize::try_from(offset).map_err(|_| TraceError::Annex)?;
        self.memory.slice().write_slice(bytes, offset).map_err(|_| TraceError::Annex)
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

    fn find(&self, exit: &Exit) -> Option<&Prepared> {
        let found = self.exits.binary_search_by_key(&exit.address, |prepared| prepared.ret);
        self.exits.get(found.ok()?)
    }

    /// Whether an exit was to be rewritten.
    pub(super) fn is_prepared(&self, exit: &Exit) -> bool {
        self.find(exit).is_some()
    }

    /// What records of an exit say, if it was rewritten.
    pub(super) fn named(&self, image: &Image, exit: &Exit) -> Option<ExitWord> {
        self.find(exit)?.slot.ok()?;
        Some(ExitWord::new(word(image, exit.address), exit))
    }

    /// What is to be written for an exit to call the program at run-time address `program`.
    /// Verifies that it calls none.
    pub(super) fn edit(
        &self,
        guest: &dyn Guest,
        exit: &Exit,
        program: u64,
    ) -> Result<Edit, SkipReason> {
        let at = self.find(exit).ok_or(SkipReason::NoStub)?.slot?;
        let physical = self.memory.guest_address() + at;
        let (nothing, mut found) = (NOP.to_le_bytes(), [0; 4]);
        guest.read(physical, &mut found).map_err(|_| SkipReason::NoRam)?;
        if found != nothing {
            return Err(SkipReason::GuestOwned("other bytes"));
        }
        let call = slot(self.address.wrapping_add(at), Some(program));
        Edit::new(physical, &nothing, &call.ok_or(SkipReason::OutOfReach)?)
            .ok_or(SkipReason::OutOfReach)
    }
}

/// What records of an exit have in place of a site.
fn word(image: &Image, ret: u64) -> u32 {
    #[allow(clippy::cast_possible_truncation, reason = "the low half")]
    let word = image.runtime(ret) as u32;
    word
}

/// A run of code: where it is in guest-physical memory, what it is and what it is to be.
struct Rewrite {
    exit: usize,
    physical: u64,
    original: Vec<u8>,
    ours: Vec<u8>,
}

/// All that is to be rewritten.
#[derive(Default)]
pub(super) struct Rewrites {
    all: Vec<Rewrite>,
    /// Of each exit, why it is left alone.
    skipped: Vec<Option<SkipReason>>,
    /// Of each exit, the first of those that lend bytes to each other and to it.
    groups: Vec<usize>,
}

impl Rewrites {
    /// Verifies that the guest holds what the image does. Of exits that share their bytes all are
    /// left alone, or none.
    fn new(
        guest: &dyn Guest,
        kernel: &Kernel,
        image: &Image,
        plan: &Plan,
        places: &Places,
        address: u64,
    ) -> Result<Self, TraceError> {
        let mut rewrites = Self {
            all: Vec::with_capacity(plan.exits.len()),
            skipped: vec![None; plan.exits.len()],
            groups: groups(&plan.exits),
        };
        for (index, (exit, &stub)) in plan.exits.iter().zip(&places.stubs).enumerate() {
            let both = exit.original(kernel).zip(exit.writes(address.wrapping_add(stub)));
            let Some((original, ours)) = both else {
                rewrites.skip(index, SkipReason::OutOfReach);
                continue;
            };
            for ((at, original), (_, ours)) in original.into_iter().zip(ours) {
                let physical = image.physical_of(at);
                let mut found = vec![0; original.len()];
                guest.read(physical, &mut found)?;
                if found != original {
                    rewrites.skip(index, SkipReason::GuestOwned("other code where it returns"));
                }
                rewrites.all.push(Rewrite { exit: index, physical, original, ours });
            }
        }
        rewrites.spread();
        Ok(rewrites)
    }

    fn skip(&mut self, exit: usize, reason: SkipReason) {
        if let Some(skipped) = self.skipped.get_mut(exit) {
            *skipped = skipped.or(Some(reason));
        }
    }

    fn is_skipped(&self, exit: usize) -> bool {
        self.skipped.get(exit).is_none_or(Option::is_some)
    }

    /// Leaves those alone, too, that share bytes with what is left alone.
    fn spread(&mut self) {
        let both = self.groups.iter().zip(&self.skipped);
        let mut lost: Vec<usize> =
            both.filter(|(_, skipped)| skipped.is_some()).map(|(&group, _)| group).collect();
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
    pub(super) fn write(&mut self, guest: &dyn Guest) -> Result<(), GuestError> {
        let written: Vec<bool> = self.all.iter().map(|one| !self.is_skipped(one.exit)).collect();
        let mut failed = Vec::new();
        for one in self.all.iter().filter(|one| !self.is_skipped(one.exit)) {
            match one.apply(guest) {
                Ok(true) => {}
                Ok(false) => failed.push(one.exit),
                Err(error) => {
                    self.undo(guest);
                    return Err(error);
                }
            }
        }
        for exit in failed {
            self.skip(exit, SkipReason::ReadBack);
        }
        self.spread();
        for (one, written) in self.all.iter().zip(written) {
            if written && self.is_skipped(one.exit) {
                guest.write(one.physical, &one.original)?;
            }
        }
        Ok(())
    }

    /// Puts all back, as far as that is possible, while nobody has run since.
    pub(super) fn undo(&self, guest: &dyn Guest) {
        for one in self.all.iter().filter(|one| !self.is_skipped(one.exit)) {
            let _ = guest.write(one.physical, &one.original);
        }
    }
}

impl Rewrite {
    /// Whether it holds.
    fn apply(&self, guest: &dyn Guest) -> Result<bool, GuestError> {
        guest.write(self.physical, &self.ours)?;
        let mut found = vec![0; self.ours.len()];
        guest.read(self.physical, &mut found)?;
        Ok(found == self.ours)
    }
}

/// Of each exit, by address, the first of those that it shares bytes with, itself included.
fn groups(exits: &[PlannedExit]) -> Vec<usize> {
    let mut leaders: Vec<usize> = (0..exits.len()).collect();
    let leader = |leaders: &[usize], mut exit: usize| {
        while let Some(&next) = leaders.get(exit).filter(|&&next| next != exit) {
            exit = next;
        }
        exit
    };
    for (guest, exit) in exits.iter().enumerate() {
        // The first is in the exit's own window.
        for jump in exit.jumps.iter().skip(1) {
            let host = exits.partition_point(|host| host.epilogue.start <= jump.at);
            let host = host.saturating_sub(1);
            let (a, b) = (leader(&leaders, guest), leader(&leaders, host));
            if let Some(of_later) = leaders.get_mut(a.max(b)) {
                *of_later = a.min(b);
            }
        }
    }
    (0..exits.len()).map(|exit| leader(&leaders, exit)).collect()
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
            let places = Places::new(&lens).unwrap();
            let (start, end) = places.programs;
            prop_assert!(start + LEAST <= end && start % ALIGN == 0);
            for (&at, &len) in places.stubs.iter().zip(&lens) {
                prop_assert!(at + len <= start || at >= end, "{at:#x} is in {start:#x} to {end:#x}");
                prop_assert!(at + len <= CODE);
                for slot in [at, at + len - 12] {
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
        assert!(Places::new(&[16; 80_000]).is_some());
        assert!(Places::new(&[16; 130_000]).is_none());
        assert!(Places::new(&[16; 1_000_000]).is_none());
    }
}
