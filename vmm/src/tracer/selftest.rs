//! The self-test: before any site is taken for the user, a single one is taken and called once, and
//! exactly its record must appear.
//!
//! A stopped vCPU is set to the site as a call of the function would do, and stopped again right
//! after the site. So everything that a record needs is used: the call in the site, the mapping of
//! the annex, the program, the CPU's control block and ring, the clock, and the offsets in tasks.
//! Meanwhile exceptions are handled by vmtrace's code, so that a program that fails does not crash
//! the guest.

use super::arch::Faults;
use super::dispatch;
use super::edit::SkipReason;
use super::error::TraceError;
use super::guest::{Guest, GuestError};
use super::raw::RawBatch;
use super::ring::RingReader;
use super::trace::Attachment;
use super::tripwire::Tripwire;
use crate::kernel::{Kernel, Site};
use vm_memory::Bytes;
use vmtrace_trampolines::layout::CHUNK_SIZE;

/// Records that are looked for: one, and whether there are more.
const RECORDS: usize = 4;

/// A test that has begun: one site is held.
#[derive(Debug)]
pub struct SelfTest {
    site: usize,
    program: u16,
    /// Link address at which the program returns.
    returns: u64,
    behind: Tripwire,
    faults: Faults,
    start: u64,
    stack: u64,
}

/// What a vCPU did that was sent to the site.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Which one.
    pub vcpu: usize,
    /// The address to which the function would have returned.
    pub returns_to: u64,
    /// Its clock before and after.
    pub ticks: [u64; 2],
}

/// Where a test has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// Behind the site.
    End,
    /// An exception, by its number where that is told.
    Fault(Option<usize>),
}

/// Why there is nothing to be traced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelfTestError {
    /// Guest memory cannot be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A record lacks, or is another one.
    #[error("{0}")]
    Record(String),
    /// The site is not as it was.
    #[error("the site did not hold our call any more")]
    Foreign,
}

impl From<GuestError> for SelfTestError {
    fn from(error: GuestError) -> Self {
        Self::Trace(error.into())
    }
}

impl SelfTest {
    /// The index of its site.
    #[must_use]
    pub fn site(&self) -> usize {
        self.site
    }

    /// Where a vCPU has to go, with this stack pointer.
    #[must_use]
    pub fn start(&self) -> (u64, u64) {
        (self.start, self.stack)
    }

    /// What a vCPU's exceptions are to be led to: see `Faults`.
    #[must_use]
    pub fn faults(&self) -> u64 {
        self.faults.table
    }

    /// The addresses at which it may stop.
    pub fn traps(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.behind.address()).chain(self.faults.traps.iter().copied())
    }

    /// What it means that a vCPU has stopped at this address; `None` if nothing.
    #[must_use]
    pub fn reached(&self, address: u64) -> Option<Reached> {
        if address == self.behind.address() {
            return Some(Reached::End);
        }
        let vector = self.faults.traps.iter().position(|&trap| trap == address)?;
        Some(Reached::Fault((self.faults.traps.len() > 1).then_some(vector)))
    }
}

impl Attachment {
    /// Takes one site alone, to be called by a vCPU with the stack pointer `stack` as from
    /// `returns_to`. `trap` is what exits. Or why this site cannot be taken: another one might. All
    /// vCPUs are paused.
    ///
    /// # Errors
    /// When there is no place for what it needs, or guest memory cannot be used; nothing is held
    /// then.
    pub fn begin_self_test(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        (site, program): (usize, u16),
        trap: &[u8],
        [stack, returns_to]: [u64; 2],
    ) -> Result<Result<SelfTest, SkipReason>, TraceError> {
        let Some(place) = kernel.sites().get(site) else { return Ok(Err(SkipReason::Unknown)) };
        let target = dispatch::of(kernel.arch());
        let image = *self.image();
        let stack = target.call(guest, &image, stack, returns_to)?;
        if let Some(skip) = self.enable(guest, kernel, &[(site, program)])?.skipped.first() {
            return Ok(Err(skip.reason));
        }
        let returns = target.return_address(place);
        let faults = self.code.faults(guest, trap);
        let laid = faults.and_then(|faults| {
            let (behind, start) = self.stop_behind(guest, place, returns, trap)?;
            Ok(SelfTest { site, program, returns, behind, faults, start, stack })
        });
        match laid {
            Ok(test) => Ok(Ok(test)),
            Err(error) => {
                self.disable(guest, &[site])?;
                Err(error)
            }
        }
    }

    /// Puts a trap where the program returns to; that, and from where a vCPU has to go on.
    fn stop_behind(
        &self,
        guest: &dyn Guest,
        site: &Site,
        returns: u64,
        trap: &[u8],
    ) -> Result<(Tripwire, u64), TraceError> {
        let image = self.image();
        // The kernel may have patched what is there.
        let mut there = vec![0; trap.len()];
        guest.read(image.physical_of(returns), &mut there)?;
        let start = image.runtime(dispatch::of(image.tables.of()).start(site));
        let start = self.resume(guest, start)?;
        Ok((Tripwire::arm(guest, image, returns, &there, trap)?, start))
    }

    /// Gives the site back, looks at what was recorded, if there is something to be `seen`, and
    /// leaves the rings as they were. All vCPUs are paused.
    ///
    /// # Errors
    /// When it is not exactly what had to be.
    pub fn end_self_test(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        test: &SelfTest,
        seen: Option<Seen>,
    ) -> Result<(), SelfTestError> {
        let &SelfTest { site, program, returns, behind, .. } = test;
        let disarmed = behind.disarm(guest);
        let restored = self.disable(guest, &[site])?;
        // What is traced next may be another function: this one is the guest's again.
        self.allow_again(guest, kernel)?;
        disarmed?;
        if !restored.foreign.is_empty() || restored.sites != 1 {
            return Err(SelfTestError::Foreign);
        }
        let Some(seen) = seen else { return Ok(()) };
        let found = self.recorded();
        for &(cpu, ref batch, lost) in &found {
            let expected = usize::from(cpu == seen.vcpu);
            if batch.records.len() != expected || lost > 0 {
                return Err(SelfTestError::Record(format!(
                    "the ring of vCPU {cpu} has {} records and lost {lost}, not {expected} and 0",
                    batch.records.len()
                )));
            }
        }
        let record = found.iter().find_map(|(_, batch, _)| batch.records.first());
        let Some(record) = record else {
            let what = format!("there is no ring of vCPU {}", seen.vcpu);
            return Err(SelfTestError::Record(what));
        };
        let image = self.image();
        let low = |word: u64| word & u64::from(u32::MAX);
        let is = |what: &str, is: u64, should: u64| {
            let text = || format!("its record has {what} {is:#x}, not {should:#x}");
            if is == should { Ok(()) } else { Err(SelfTestError::Record(text())) }
        };
        is("the site", record.site.into(), low(image.runtime(returns)))?;
        is("the program", record.program.into(), program.into())?;
        is("the caller", record.caller.into(), low(seen.returns_to))?;
        // Who boots is pid 0 (init/init_task.c).
        is("the pid", record.pid.into(), 0)?;
        if let Some(task) = kernel.symbols().address("init_task") {
            is("the task", record.task, image.runtime(task))?;
        }
        let [before, after] = seen.ticks;
        if !(before..=after).contains(&record.timestamp) {
            return Err(SelfTestError::Record(format!(
                "its record has the time {}, which is not between {before} and {after}",
                record.timestamp
            )));
        }
        self.clean(&found).map_err(SelfTestError::Trace)
    }

    /// What is in each ring, and how much was lost there.
    fn recorded(&self) -> Vec<(usize, RawBatch, u64)> {
        let overwrite = !self.overflow.drains();
        let readers = RingReader::all(&self.layout, &self.memory, overwrite);
        let take = |(cpu, mut reader): (usize, RingReader)| {
            let mut batch = RawBatch::with_capacity(RECORDS);
            let (lost, unfinished) = reader.finish(&mut batch);
            let damaged = u64::from(reader.corrupt().is_some());
            (cpu, batch, lost + unfinished.len() as u64 + damaged)
        };
        readers.into_iter().enumerate().map(take).collect()
    }

    /// Makes the rings those of a fresh annex.
    fn clean(&self, found: &[(usize, RawBatch, u64)]) -> Result<(), TraceError> {
        let memory = self.memory.slice();
        for (ring, _) in
            self.layout.rings.iter().zip(found).filter(|(_, it)| !it.1.records.is_empty())
        {
            let at = usize::try_from(self.layout.offset(ring)).map_err(|_| TraceError::Annex)?;
            memory.write_slice(&[0; CHUNK_SIZE], at).map_err(|_| TraceError::Annex)?;
        }
        self.layout.install(&memory)
    }
}
