//! Landings for contexts that have executed one half of vmtrace's call and continue with the other half
//! of the guest's, on kernels without CALL_OPS.
//!
//! The first instruction of a site stays vmtrace's while the second is the guest's. `ftrace_caller`,
//! which all tracers share, has one landing. Each function that the guest calls directly (BPF programs
//! and other direct callers of ftrace) has one as long as a site calls it. Two functions at the same
//! offset in their pages cannot have landings at the same time.

use super::gap::{COLUMN, Gap};
use super::site::STEP;
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use std::collections::{BTreeMap, HashMap};

/// BPF trampolines begin at multiples of so many bytes (`BPF_PROG_CHUNK_SIZE`,
/// include/linux/filter.h): entries of the tables at such are left for them.
const CHUNK: u16 = 64;

/// The landings of a guest.
#[derive(Debug)]
pub(super) struct Landings {
    /// `ftrace_caller`, whose landing is never another's: a run-time address.
    caller: u64,
    /// By how far into a page it is: where it leads to, and by which stub (run-time addresses).
    open: BTreeMap<u64, (u64, u64)>,
    /// What is called directly in prepared sites, by the run-time address of the function.
    sites: HashMap<u64, u64>,
}

impl Landings {
    /// None yet; `caller`: run-time address of `ftrace_caller`.
    pub(super) fn new(caller: u64) -> Self {
        Self { caller, open: BTreeMap::new(), sites: HashMap::new() }
    }

    /// Whether an entry of the tables is not for programs.
    pub(super) fn keeps(&self, entry: u16) -> bool {
        let mut targets = self.open.keys().chain([&self.caller]);
        let mut is_open = || targets.any(|&target| Gap::landing(target) == Some(entry));
        entry.is_multiple_of(CHUNK / u16::from(STEP)) || is_open()
    }

    /// Makes that of `ftrace_caller`.
    ///
    /// # Errors
    /// When there is no room, or can be none.
    pub(super) fn open(&mut self, gap: &mut Gap, guest: &dyn Guest) -> Result<(), TraceError> {
        const FAR: TraceError = TraceError::Ftrace("where its tracers are called");
        Gap::landing(self.caller).ok_or(FAR)?;
        let stub = gap.land(guest, self.caller)?;
        self.open.insert(self.caller % COLUMN, (self.caller, stub));
        Ok(())
    }

    /// Lets a site of the guest's, of the function at run-time address `entry`, have our first
    /// instruction with the second of a call of `target`, at a moment when nobody stands between the
    /// two in any site. Whether that can be: not beside another target that lies as far into its page,
    /// and not where a program's entry is. Entries of the tables below `programs` may be such.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub(super) fn direct(
        &mut self,
        gap: &mut Gap,
        guest: &dyn Guest,
        (entry, target): (u64, u64),
        programs: u16,
    ) -> Result<bool, TraceError> {
        let within = target % COLUMN;
        let known = self.open.get(&within).map(|&(known, _)| known);
        if known != Some(target) {
            let is_used =
                |other| other == self.caller || self.sites.values().any(|&it| it == other);
            let Some(number) = Gap::landing(target) else { return Ok(false) };
            let is_program = number < programs && !self.keeps(number);
            if is_program || known.is_some_and(is_used) {
                return Ok(false);
            }
            let stub = match gap.land(guest, target) {
                Err(error) if error == super::gap::FULL => return Ok(false),
                stub => stub?,
            };
            self.open.insert(within, (target, stub));
        }
        self.sites.insert(entry, target);
        Ok(true)
    }

    /// What the guest calls directly in the prepared site of the function at run-time address `entry`.
    pub(super) fn called(&self, entry: u64) -> Option<u64> {
        self.sites.get(&entry).copied()
    }

    /// The site is the guest's as a whole again.
    pub(super) fn leave(&mut self, entry: u64) {
        self.sites.remove(&entry);
    }

    /// A stub that goes on to a target (run-time addresses).
    pub(super) fn stub(&self, target: u64) -> Option<u64> {
        let &(known, stub) = self.open.get(&(target % COLUMN))?;
        (known == target).then_some(stub)
    }
}
