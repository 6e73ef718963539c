//! The kernel's memory as it is, through `/proc/kcore`.

use anyhow::{Context, Result};
use std::fs;
use std::os::unix::fs::FileExt;

/// Of memory that has a physical address.
struct Segment {
    address: u64,
    physical: u64,
    offset: u64,
    size: u64,
}

pub(crate) struct Kcore {
    file: fs::File,
    segments: Vec<Segment>,
}

fn field(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

impl Kcore {
    pub(crate) fn open() -> Result<Self> {
        const LOAD: u64 = 1;
        let file = fs::File::open("/proc/kcore")?;
        let mut header = [0; 64];
        file.read_exact_at(&mut header, 0)?;
        let (table, count) = (field(&header, 32, 8), field(&header, 56, 2));
        let mut segments = Vec::new();
        for index in 0..count {
            let mut program = [0; 56];
            file.read_exact_at(&mut program, table + 56 * index)?;
            let [offset, address, physical, size] =
                [8, 16, 24, 32].map(|at| field(&program, at, 8));
            // Other segments have -1.
            if field(&program, 0, 4) == LOAD && physical != u64::MAX {
                segments.push(Segment { address, physical, offset, size });
            }
        }
        Ok(Self { file, segments })
    }

    fn read_within(&self, segment: &Segment, before: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, segment.offset + before)?;
        Ok(bytes)
    }

    /// By physical address.
    pub(crate) fn read_physical(&self, start: u64, len: usize) -> Result<Vec<u8>> {
        let found = self.segments.iter().find_map(|segment| {
            let before = start.checked_sub(segment.physical)?;
            (before + len as u64 <= segment.size).then_some((segment, before))
        });
        let (segment, before) = found.context("not in /proc/kcore")?;
        self.read_within(segment, before, len)
    }

    fn segment(&self, address: u64) -> Result<(&Segment, u64)> {
        let found = self.segments.iter().find_map(|segment| {
            let before = address.checked_sub(segment.address)?;
            (before < segment.size).then_some((segment, before))
        });
        found.with_context(|| format!("{address:#x} is not in /proc/kcore"))
    }

    /// By virtual address.
    pub(crate) fn read(&self, address: u64, len: usize) -> Result<Vec<u8>> {
        let (segment, before) = self.segment(address)?;
        self.read_within(segment, before, len)
    }

    /// Of a virtual address.
    pub(crate) fn physical(&self, address: u64) -> Result<u64> {
        let (segment, before) = self.segment(address)?;
        Ok(segment.physical + before)
    }

    /// Words of 8 bytes.
    pub(crate) fn words(&self, address: u64, count: usize) -> Result<Vec<u64>> {
        let bytes = self.read(address, 8 * count)?;
        Ok((0..count).map(|word| field(&bytes, 8 * word, 8)).collect())
    }
}
