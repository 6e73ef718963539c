//! Code in the gap between the kernel's text and its start-up code.
//!
//! Linux maps `[_etext, __init_begin)` read-execute with the text (the two are apart so that their
//! pages can have other rights later), never uses it and never frees it. So it needs no additional
//! mapping, and every module can reach it. No module can reach what is after `_end`.
//!
//! ```text
//! 0x0000  the stub of a trap on a site
//! 0x0200  the stub that sees the annex
//! 0x0400  with CALL_OPS: programs, probes and their arrays; without:
//! 0x0800  nothing but a jump for who has one half of a call (see [`Gap::land`])
//! 0x1000  two copies of a table of jumps
//! 0x2000  as at 0x0800
//! 0x2800  programs, probes and their arrays
//!         stubs that lie as far into their pages as functions do: from the end downwards
//! ```

use super::site::{COPY, ENTRIES, STEP};
use crate::kernel::Kernel;
use crate::tracer::annex::OPS_SIZE;
use crate::tracer::error::TraceError;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::members::Members;
use std::ops::Range;
use vmtrace_trampolines::riscv64::encode::register::{A7, T0, T1, ZERO};
use vmtrace_trampolines::riscv64::encode::{
    FENCE_I, NOP, SFENCE_VMA, addi, auipc, j, jalr, jr, mv, split,
};

const PAGE: u64 = PAGE_LEN as u64;
/// Landings of targets that lie so many bytes apart, or a multiple, are in one place.
pub(super) const COLUMN: u64 = PAGE;
const PAGE_LEN: usize = 4096;
const TRAP: u64 = 0;
const RESUME: u64 = 0x200;
const TABLE: u64 = 0x1000;
/// Of programs with tables, and without.
const PROGRAMS: u64 = 0x2800;
const ALONE: u64 = 0x400;
/// Programs begin at multiples of so many bytes: those of a cache line.
const ALIGN: u64 = 64;
/// Probes and arrays begin at multiples of so many bytes.
const SMALL_ALIGN: u64 = 8;
/// As far as a jump of the tables reaches.
const MAX: u64 = (1 << 20) - PAGE;

/// There is no room.
pub(super) const FULL: TraceError = TraceError::Code("what follows its text is full");
/// The entry of the tables that stands for a trap.
pub(super) const TRAP_ENTRY: u16 = ENTRIES - 1;
/// Most bytes of a trap.
pub(super) const MAX_TRAP: usize = 8;
/// What is at [`Gap::trap`] while no trap is armed.
pub(super) const NO_TRAP: [u8; MAX_TRAP] = [0x13, 0, 0, 0, 0x13, 0, 0, 0];

/// Where the guest's `struct ftrace_ops` has what, and what goes there.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpsLayout {
    pub(super) func: u64,
    pub(super) direct_call: u64,
    /// Run-time address of a function that does nothing.
    stub: u64,
}

impl OpsLayout {
    pub(super) fn find(kernel: &Kernel, image: &Image) -> Result<Self, TraceError> {
        let members = Members::of(kernel)?;
        let member = |name: &'static str| {
            let offset = members.offset("ftrace_ops", name)?;
            let room = offset <= OPS_SIZE - 8;
            room.then_some(offset).ok_or(TraceError::NoMember("ftrace_ops", name))
        };
        let stub =
            kernel.symbols().address("ftrace_stub").ok_or(TraceError::NoSymbol("ftrace_stub"))?;
        Ok(Self {
            func: member("func")?,
            direct_call: member("direct_call")?,
            stub: image.runtime(stub),
        })
    }
}

impl OpsLayout {
    /// One that calls `target`.
    pub(super) fn ops(&self, target: u64) -> Vec<u8> {
        // Who is on the way through ftrace_caller while a site changes hands may still call func.
        self.ops_with(target, self.stub)
    }

    /// One that calls `target` directly, and `func` by way of `ftrace_caller`.
    pub(super) fn ops_with(&self, target: u64, func: u64) -> Vec<u8> {
        let mut ops = vec![0; usize::try_from(OPS_SIZE).unwrap_or(0)];
        for (at, word) in [(self.func, func), (self.direct_call, target)] {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            if let Some(to) = ops.get_mut(at..at.saturating_add(8)) {
                to.copy_from_slice(&word.to_le_bytes());
            }
        }
        ops
    }
}

/// The gap, with our code in it.
#[derive(Debug)]
pub(super) struct Gap {
    address: u64,
    physical: u64,
    len: u64,
    /// Bytes in use, from its beginning on.
    used: u64,
    /// Stubs at its end: where each begins and ends.
    stubs: Vec<Range<u64>>,
    /// There are tables of jumps.
    tables: bool,
}

impl Gap {
    /// Finds it and makes sure that nothing is in it; with room for `tables` of jumps or without.
    pub(super) fn find(
        guest: &dyn Guest,
        kernel: &Kernel,
        image: &Image,
        tables: bool,
    ) -> Result<Self, TraceError> {
        let symbol =
            |name: &'static str| kernel.symbols().address(name).ok_or(TraceError::NoSymbol(name));
        let start = symbol("_etext")?.next_multiple_of(PAGE);
        let end = symbol("__init_begin")?;
        let len = end.saturating_sub(start).min(MAX) / PAGE * PAGE;
        if len < 4 * PAGE {
            return Err(TraceError::Code("its text and its start-up code are too close"));
        }
        let (address, physical) = (image.runtime(start), image.physical_of(start));
        let mut held = [0; PAGE_LEN];
        for page in (0..len).step_by(held.len()) {
            let found = image.tables.translate(guest, address + page)?;
            if found != physical + page {
                return Err(TraceError::Code("what follows its text is mapped elsewhere"));
            }
            guest.read(found, &mut held)?;
            if held != [0; PAGE_LEN] {
                return Err(TraceError::Code("what follows its text is in use"));
            }
        }
        let used = if tables { PROGRAMS } else { ALONE };
        Ok(Self { address, physical, len, used, stubs: Vec::new(), tables })
    }

    /// Writes what is there before any program. `caller`: run-time address of `ftrace_caller`, where
    /// that finds what a site calls.
    pub(super) fn fill(&self, guest: &dyn Guest, caller: Option<u64>) -> Result<(), TraceError> {
        // The trap may need a7; afterwards what the site does by then is done.
        let before = [mv(T1, A7)].map(u32::to_le_bytes).concat();
        let mut after = vec![mv(A7, T1)];
        match caller {
            // The site itself would fire a kprobe at it once more.
            Some(caller) => {
                let at = self.address + TRAP + (before.len() + MAX_TRAP + 4) as u64;
                let way = split(caller.wrapping_sub(at).cast_signed());
                let (upper, lower) = way.ok_or(TraceError::Code("its ftrace is out of reach"))?;
                after.extend([auipc(T1, upper), jalr(ZERO, T1, lower)]);
            }
            None => after.extend([addi(T0, T0, -8), jr(T0)]),
        }
        let after: Vec<u8> = after.into_iter().flat_map(u32::to_le_bytes).collect();
        self.write(guest, TRAP, &[&before[..], &NO_TRAP, &after].concat())?;
        if self.tables { self.aim(guest, TRAP_ENTRY, self.address + TRAP) } else { Ok(()) }
    }

    /// Guest-physical address of code in it.
    pub(super) fn physical(&self, address: u64) -> u64 {
        self.physical.wrapping_add(address.wrapping_sub(self.address))
    }

    /// Writes code and reads it back.
    fn write(&self, guest: &dyn Guest, at: u64, code: &[u8]) -> Result<(), TraceError> {
        guest.write(self.physical + at, code)?;
        let mut held = vec![0; code.len()];
        guest.read(self.physical + at, &mut held)?;
        if held != code {
            return Err(TraceError::Code("what follows its text did not take them"));
        }
        Ok(())
    }

    /// Puts a program behind all other code: `None` when there is no room. Nobody executes it yet.
    pub(super) fn put(
        &mut self,
        guest: &dyn Guest,
        code: &[u8],
    ) -> Result<Option<u64>, TraceError> {
        self.put_at(guest, self.next(ALIGN), code)
    }

    /// The same for what is small: a probe, or an array of words.
    pub(super) fn put_small(
        &mut self,
        guest: &dyn Guest,
        code: &[u8],
    ) -> Result<Option<u64>, TraceError> {
        self.put_at(guest, self.next(SMALL_ALIGN), code)
    }

    /// Puts what is small where something else of ours was, at a run-time address. Nobody executes
    /// it any more, nor yet.
    pub(super) fn put_again(
        &self,
        guest: &dyn Guest,
        address: u64,
        code: &[u8],
    ) -> Result<(), TraceError> {
        self.write(guest, address.wrapping_sub(self.address), code)
    }

    /// Whether there is room for [`Gap::put_small`] of so many bytes.
    pub(super) fn has_small(&self, len: u64) -> bool {
        self.next(SMALL_ALIGN) + len <= self.end()
    }

    /// Where what is put behind all other code must end.
    fn end(&self) -> u64 {
        self.stubs.iter().map(|stub| stub.start).min().unwrap_or(self.len)
    }

    /// Bytes of it in all.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Run-time address at which [`Gap::put_small`] puts what comes next.
    pub(super) fn next_small(&self) -> u64 {
        self.address + self.next(SMALL_ALIGN)
    }

    fn next(&self, align: u64) -> u64 {
        self.used.next_multiple_of(align)
    }

    /// Puts code of this many bytes where it lies as far into its page as the run-time address
    /// `like`: its run-time and guest-physical address; `None` when there is no room, or no such
    /// code.
    pub(super) fn put_like(
        &mut self,
        guest: &dyn Guest,
        like: u64,
        len: usize,
        code: impl FnOnce(u64) -> Option<Vec<u8>>,
    ) -> Result<Option<(u64, u64)>, TraceError> {
        let size = len as u64;
        // The gap begins with a page.
        let highest = self.len.saturating_sub(size + like % PAGE) / PAGE * PAGE;
        let taken = |at: u64| self.stubs.iter().any(|it| at < it.end && it.start < at + size);
        let pages = (0..=highest).rev().step_by(PAGE_LEN).map(|page| page + like % PAGE);
        let Some(at) = { pages }.find(|&at| !taken(at)).filter(|&at| at >= self.used) else {
            return Ok(None);
        };
        let Some(code) = code(self.address + at).filter(|code| code.len() == len) else {
            return Ok(None);
        };
        self.write(guest, at, &code)?;
        self.stubs.push(at..at + size);
        Ok(Some((self.address + at, self.physical + at)))
    }

    fn put_at(
        &mut self,
        guest: &dyn Guest,
        at: u64,
        code: &[u8],
    ) -> Result<Option<u64>, TraceError> {
        let end = at + code.len() as u64;
        if end > self.end() {
            return Ok(None);
        }
        self.write(guest, at, code)?;
        self.used = end;
        Ok(Some(self.address + at))
    }

    /// Lets an entry of both tables lead to `target`, in the gap.
    pub(super) fn aim(&self, guest: &dyn Guest, entry: u16, target: u64) -> Result<(), TraceError> {
        for copy in [0, COPY] {
            self.jump(guest, TABLE + copy + u64::from(entry) * u64::from(STEP), target)?;
        }
        Ok(())
    }

    fn jump(&self, guest: &dyn Guest, at: u64, target: u64) -> Result<(), TraceError> {
        let distance = target.wrapping_sub(self.address + at).cast_signed();
        let distance = i32::try_from(distance).unwrap_or(0);
        self.write(guest, at, &j(distance).to_le_bytes())
    }

    /// The entry of the tables that is in the place of the landing of `target`; `None` when there can be
    /// none.
    pub(super) fn landing(target: u64) -> Option<u16> {
        let entry = u16::try_from(target % COPY / u64::from(STEP)).ok()?;
        (target.is_multiple_of(STEP.into()) && entry != TRAP_ENTRY).then_some(entry)
    }

    /// Lets whoever has one half of our call and one of the guest's, of `target`, come to `target`. By the
    /// stub at the run-time address that is returned, which stays as it is.
    ///
    /// The `auipc` of a site leads to within 2 KiB of the tables, and the guest's `jalr` adds what
    /// makes that an address as far into its page as `target`: one of three.
    ///
    /// # Errors
    /// When there is no room.
    pub(super) fn land(&mut self, guest: &dyn Guest, target: u64) -> Result<u64, TraceError> {
        let way = split(target.wrapping_sub(self.next_small()).cast_signed());
        let (upper, lower) = way.ok_or(FULL)?;
        let code = [auipc(T1, upper), jalr(ZERO, T1, lower)].map(u32::to_le_bytes).concat();
        let stub = self.put_small(guest, &code)?.ok_or(FULL)?;
        let within = target % PAGE;
        self.jump(guest, TABLE + within, stub)?;
        let beside = if within < COPY { TABLE + PAGE } else { TABLE - PAGE };
        self.jump(guest, beside + within, stub)?;
        Ok(stub)
    }

    /// Puts the zeros back: only while no context of the guest can be in here.
    pub(super) fn clear(&self, guest: &dyn Guest) -> Result<(), GuestError> {
        guest.write(self.physical, &vec![0; usize::try_from(self.used).unwrap_or(0)])
    }

    /// Run-time address of the tables of jumps.
    pub(super) fn table(&self) -> u64 {
        self.address + TABLE
    }

    /// Whether a run-time address is in here.
    pub(super) fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.address) < self.len
    }

    /// Run-time address of the stub of a trap.
    pub(super) fn trap_stub(&self) -> u64 {
        self.address + TRAP
    }

    /// Run-time and guest-physical address of the place for a trap.
    pub(super) fn trap(&self) -> (u64, u64) {
        (self.address + TRAP + 4, self.physical + TRAP + 4)
    }

    /// Writes the stub that lets a hart see new mappings and new code, and then goes
    /// on at `address`; t1 is lost. Returns the stub's address.
    pub(super) fn resume(&self, guest: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        let stub = self.address + RESUME;
        let Some((upper, lower)) = split(address.wrapping_sub(stub + 8).cast_signed()) else {
            return Err(GuestError::Mismatch(format!("{address:#x} is not kernel text")));
        };
        let code = [SFENCE_VMA, FENCE_I, auipc(T1, upper), jalr(ZERO, T1, lower)];
        guest.write(self.physical + RESUME, &code.map(u32::to_le_bytes).concat())?;
        Ok(stub)
    }
}

const _: () =
    assert!(NO_TRAP[0] as u32 == NOP && ENTRIES as u64 * STEP as u64 <= COPY && COPY * 2 <= PAGE);
