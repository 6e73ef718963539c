//! Records as programs write them.

use vmtrace_trampolines::layout::{COMMON_SIZE, Info};

/// A record as a program wrote it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawRecord {
    /// Raw clock (x86: TSC) at the hit, in ticks.
    pub timestamp: u64,
    /// A `task_struct` pointer.
    pub task: u64,
    /// Low half of what tells the site.
    pub site: u32,
    /// Low half of the address to which the function returns.
    pub caller: u32,
    /// Of the task.
    pub pid: u32,
    /// Number of the program.
    pub program: u16,
    /// How many fields there are in [`RawBatch::extra`].
    pub fields: u8,
    /// Where they begin.
    pub extra: u32,
    /// For how many tracers, as the record itself says (overwrite only; else 1).
    pub tracers: u16,
}

impl RawRecord {
    /// No program has this number.
    pub const NO_PROGRAM: u16 = u16::MAX;

    /// From the upper 32 bytes.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "each half of a word is a field")]
    pub(super) fn new([task, caller_pid, timestamp, site_info]: [u64; 4]) -> Self {
        let info = Info((site_info >> 32) as u32);
        Self {
            timestamp,
            task,
            site: site_info as u32,
            caller: caller_pid as u32,
            pid: (caller_pid >> 32) as u32,
            program: info.program(),
            fields: (info.size() / 8).saturating_sub(4) as u8,
            extra: 0,
            tracers: info.tracers() as u16,
        }
    }
}

/// Records of one ring, in their order.
#[derive(Clone, Debug, Default)]
pub struct RawBatch {
    /// The records.
    pub records: Vec<RawRecord>,
    /// Their fields.
    pub extra: Vec<u64>,
}

impl RawBatch {
    /// One for up to `count` records.
    #[must_use]
    pub fn with_capacity(count: usize) -> Self {
        Self { records: Vec::with_capacity(count), extra: Vec::new() }
    }

    /// Whether another record can be added without growing.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.records.len() < self.records.capacity()
    }

    /// Bytes that these records took in their ring.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.records.len() * COMMON_SIZE + self.extra.len() * size_of::<u64>()) as u64
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.records.clear();
        self.extra.clear();
    }

    /// Adds the records of `other`, which is empty then.
    pub fn append(&mut self, other: &mut Self) {
        let base = u32::try_from(self.extra.len()).unwrap_or(u32::MAX);
        let moved = other.records.drain(..);
        self.records.extend(moved.map(|record| RawRecord { extra: record.extra + base, ..record }));
        self.extra.append(&mut other.extra);
    }

    /// Moves the newest records, up to `count` of them, to the empty `other`.
    pub fn split_newest(&mut self, count: usize, other: &mut Self) {
        other.clear();
        let keep = self.records.len().saturating_sub(count);
        for record in self.records.drain(keep..) {
            let extra = u32::try_from(other.extra.len()).unwrap_or(u32::MAX);
            let start = record.extra as usize;
            let end = start + usize::from(record.fields);
            other.extra.extend_from_slice(self.extra.get(start..end).unwrap_or_default());
            other.records.push(RawRecord { extra, ..record });
        }
    }

    /// The fields of a record.
    #[must_use]
    pub fn fields(&self, record: &RawRecord) -> &[u64] {
        let start = record.extra as usize;
        self.extra.get(start..start + usize::from(record.fields)).unwrap_or_default()
    }
}
