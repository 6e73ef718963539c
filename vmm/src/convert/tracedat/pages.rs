//! Sub-buffers of ftrace's ring buffer, as trace.dat has them: pages of 4 KiB, each of one vCPU. A
//! scratch file holds them until everything that precedes them in the file is known.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;

/// Bytes of a page, of which the first are its time, and how much of it is used.
pub(super) const PAGE: usize = 4096;
const HEAD: usize = 16;
/// In the field of how much is used: records were lost before this page, and their number is
/// behind what is used.
const MISSED: u64 = 1 << 31 | 1 << 30;
/// Bits of the time since the event before; what is more needs an event of its own.
const DELTA_BITS: u32 = 27;
const TIME_EXTEND: u32 = 30;
/// Longest data whose length is told by the type, in words of 4 bytes.
const MAX_TYPE: usize = 28;

/// Most pages of a vCPU that are written at a time: they are read in one piece at the end.
const RUN: usize = 8;
/// Most pages of all vCPUs that wait for that, beside one of each.
const WAITING: usize = 1024;

/// Pages of all vCPUs.
#[derive(Debug)]
pub(super) struct Pages {
    scratch: BufWriter<File>,
    written: u32,
    vcpus: Vec<Vcpu>,
    /// Pages of a vCPU that are written at a time.
    run: usize,
}

#[derive(Debug, Default)]
struct Vcpu {
    /// The page that is filled; empty when there is none.
    page: Vec<u8>,
    /// Pages that are full and not in the scratch file yet.
    whole: Vec<u8>,
    /// Time of the latest event.
    time: u64,
    /// Lost before this page.
    missed: u64,
    /// Numbers of the pages in the scratch file.
    list: Vec<u32>,
}

impl Pages {
    pub(super) fn new(scratch: File) -> Self {
        let scratch = BufWriter::with_capacity(64 * PAGE, scratch);
        Self { scratch, written: 0, vcpus: Vec::new(), run: 1 }
    }

    pub(super) fn begin(&mut self, vcpus: u32) {
        let vcpus = usize::try_from(vcpus).unwrap_or(0);
        self.vcpus.resize_with(vcpus, Vcpu::default);
        self.run = (WAITING / vcpus.max(1)).clamp(1, RUN);
    }

    /// Adds an event of a vCPU: `data`, at most a few KiB, which is a multiple of 4 bytes long.
    #[inline]
    pub(super) fn event(&mut self, vcpu: u32, at: u64, data: &[u8]) -> io::Result<()> {
        let Some(state) = usize::try_from(vcpu).ok().and_then(|it| self.vcpus.get_mut(it)) else {
            return Ok(());
        };
        // Readers count on times that never go back. KernelShark takes 0 for no time, and would list
        // what the other vCPUs did first.
        let at = at.max(state.time).max(1);
        // The head, its time extension, a length, the count of what is lost: 4 + 8 + 4 + 8.
        if !state.page.is_empty() && state.page.len() + data.len() + 24 > PAGE {
            self.close(vcpu)?;
        }
        let Some(state) = usize::try_from(vcpu).ok().and_then(|it| self.vcpus.get_mut(it)) else {
            return Ok(());
        };
        let page = &mut state.page;
        if page.is_empty() {
            page.reserve_exact(PAGE);
            page.extend_from_slice(&at.to_le_bytes());
            page.extend_from_slice(&[0; 8]);
            state.time = at;
        }
        let mut delta = at - state.time;
        state.time = at;
        if delta >> DELTA_BITS != 0 {
            let low = u32::try_from(delta & ((1 << DELTA_BITS) - 1)).unwrap_or(0);
            // 59 bits are 18 years.
            let high = u32::try_from(delta >> DELTA_BITS).unwrap_or(u32::MAX);
            page.extend_from_slice(&(TIME_EXTEND | low << 5).to_le_bytes());
            page.extend_from_slice(&high.to_le_bytes());
            delta = 0;
        }
        let delta = u32::try_from(delta).unwrap_or(0) << 5;
        match u32::try_from(data.len() / 4) {
            Ok(words) if data.len() / 4 <= MAX_TYPE => {
                page.extend_from_slice(&(words | delta).to_le_bytes());
            }
            words => {
                let length = words.map_or(0, |words| words * 4 + 4);
                page.extend_from_slice(&delta.to_le_bytes());
                page.extend_from_slice(&length.to_le_bytes());
            }
        }
        page.extend_from_slice(data);
        Ok(())
    }

    /// Records of a vCPU are missing here: its next event begins a page.
    pub(super) fn lost(&mut self, vcpu: u32, count: u64) -> io::Result<()> {
        self.close(vcpu)?;
        if let Some(state) = usize::try_from(vcpu).ok().and_then(|it| self.vcpus.get_mut(it)) {
            state.missed = state.missed.saturating_add(count);
        }
        Ok(())
    }

    fn close(&mut self, vcpu: u32) -> io::Result<()> {
        let Some(state) = usize::try_from(vcpu).ok().and_then(|it| self.vcpus.get_mut(it)) else {
            return Ok(());
        };
        if state.page.is_empty() {
            return Ok(());
        }
        let page = &mut state.page;
        let mut used = (page.len() - HEAD) as u64;
        if state.missed > 0 {
            used |= MISSED;
            page.extend_from_slice(&state.missed.to_le_bytes());
            state.missed = 0;
        }
        page[8..HEAD].copy_from_slice(&used.to_le_bytes());
        page.resize(PAGE, 0);
        if state.whole.is_empty() {
            state.whole.reserve_exact(self.run * PAGE);
        }
        state.whole.extend_from_slice(page);
        page.clear();
        if state.whole.len() >= self.run * PAGE { self.write(vcpu) } else { Ok(()) }
    }

    /// Writes whole pages of a vCPU.
    fn write(&mut self, vcpu: u32) -> io::Result<()> {
        let Some(state) = usize::try_from(vcpu).ok().and_then(|it| self.vcpus.get_mut(it)) else {
            return Ok(());
        };
        self.scratch.write_all(&state.whole)?;
        for _ in state.whole.chunks_exact(PAGE) {
            state.list.push(self.written);
            let next = self.written.checked_add(1);
            self.written = next.ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        }
        state.whole.clear();
        Ok(())
    }

    /// Ends all pages.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        for vcpu in 0..self.vcpus.len() {
            let vcpu = u32::try_from(vcpu).unwrap_or(u32::MAX);
            self.close(vcpu)?;
            self.write(vcpu)?;
        }
        self.scratch.flush()
    }

    /// Bytes of each vCPU's pages.
    pub(super) fn sizes(&self) -> impl Iterator<Item = u64> {
        self.vcpus.iter().map(|vcpu| (vcpu.list.len() * PAGE) as u64)
    }

    /// Writes all pages, one vCPU after the other.
    pub(super) fn copy(&self, out: &mut impl Write) -> io::Result<()> {
        let file = self.scratch.get_ref();
        let mut pages = Vec::new();
        for vcpu in &self.vcpus {
            // Those that follow each other are read at once.
            for run in vcpu.list.chunk_by(|one, next| one.checked_add(1) == Some(*next)) {
                let mut at = run.first().map_or(0, |first| u64::from(*first) * PAGE as u64);
                for part in run.chunks(64) {
                    pages.resize(part.len() * PAGE, 0);
                    file.read_exact_at(&mut pages, at)?;
                    out.write_all(&pages)?;
                    at += pages.len() as u64;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
