//! The guest's own record of its sites: `struct dyn_ftrace`.
//!
//! A site that we hold is marked `FTRACE_FL_DISABLED` there, so that the guest
//! refuses it (`EINVAL`) instead of finding a call it did not write, which would
//! make it give up ftrace until the next boot (kernel/trace/ftrace.c).

use super::guest::{Guest, Image};
use super::trace::TraceError;
use crate::kernel::Kernel;

/// The guest will not touch such a site (kernel/trace/ftrace.c, 4.5 and later).
pub(super) const DISABLED: u64 = 1 << 25;
/// The guest's own ftrace is active on the site.
pub(super) const ENABLED: u64 = 1 << 31;

/// Bounds against a list that the guest made endless.
const MAX_GROUPS: usize = 1 << 16;
const MAX_RECORDS: usize = 1 << 20;

/// One `struct dyn_ftrace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Run-time address of the site.
    pub(super) ip: u64,
    /// Guest-physical address of its flags.
    pub(super) flags_at: u64,
    /// The flags when read.
    pub(super) flags: u64,
}

/// All records of the running kernel, sorted by address.
#[derive(Debug)]
pub(super) struct Records(Vec<Record>);

/// Offsets in the guest's structures; a search in BTF takes milliseconds.
pub(super) struct Offsets {
    next: u64,
    records: u64,
    index: u64,
    size: u64,
    ip: u64,
    flags: u64,
}

impl Offsets {
    pub(super) fn find(kernel: &Kernel) -> Result<Self, TraceError> {
        let structs = kernel.structs().map_err(|error| TraceError::Kernel(error.to_string()))?;
        let member = |strukt: &'static str, name: &'static str| {
            structs.member_offset(strukt, name).ok_or(TraceError::NoMember(strukt, name))
        };
        Ok(Self {
            next: member("ftrace_page", "next")?,
            records: member("ftrace_page", "records")?,
            index: member("ftrace_page", "index")?,
            size: structs.size("dyn_ftrace").ok_or(TraceError::NoMember("dyn_ftrace", "(size)"))?,
            ip: member("dyn_ftrace", "ip")?,
            flags: member("dyn_ftrace", "flags")?,
        })
    }
}

impl Records {
    /// Follows `ftrace_pages_start`.
    pub(super) fn read(
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        offsets: &Offsets,
    ) -> Result<Self, TraceError> {
        let start = kernel
            .symbols()
            .address("ftrace_pages_start")
            .ok_or(TraceError::NoSymbol("ftrace_pages_start"))?;
        let mut found = Vec::with_capacity(kernel.sites().len());
        let mut group = guest.read_u64(image.physical_of(start))?;
        let mut groups = 0;
        while group != 0 {
            groups += 1;
            if groups > MAX_GROUPS {
                return Err(TraceError::Ftrace("its list of sites has no end"));
            }
            let records = image.read_u64(guest, group.wrapping_add(offsets.records))?;
            let mut index = [0; 4];
            image.read(guest, group.wrapping_add(offsets.index), &mut index)?;
            let count = u32::from_le_bytes(index);
            if found.len() + count as usize > MAX_RECORDS {
                return Err(TraceError::Ftrace("its list of sites is absurdly long"));
            }
            read_group(guest, image, offsets, records, u64::from(count), &mut found)?;
            group = image.read_u64(guest, group.wrapping_add(offsets.next))?;
        }
        found.sort_by_key(|record| record.ip);
        Ok(Self(found))
    }

    pub(super) fn find(&self, ip: u64) -> Option<&Record> {
        let index = self.0.binary_search_by_key(&ip, |record| record.ip).ok()?;
        self.0.get(index)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

fn read_group(
    guest: &dyn Guest,
    image: &Image,
    offsets: &Offsets,
    records: u64,
    count: u64,
    found: &mut Vec<Record>,
) -> Result<(), TraceError> {
    const PAGE_LEN: usize = 4096;
    const PAGE: u64 = PAGE_LEN as u64;
    let size = offsets.size;
    if !(16..=PAGE).contains(&size) || !PAGE.is_multiple_of(size) || !records.is_multiple_of(size) {
        return Err(TraceError::Ftrace("its records have an unknown shape"));
    }
    let field = |bytes: &[u8], at: u64| {
        let at = usize::try_from(at).ok()?;
        Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
    };
    let mut page = [0; PAGE_LEN];
    let mut address = records;
    let end = records.wrapping_add(count * size);
    while address != end {
        let len = (PAGE - address % PAGE).min(end.wrapping_sub(address));
        let bytes = page
            .get_mut(..usize::try_from(len).unwrap_or(0))
            .ok_or(TraceError::Ftrace("its records have an unknown shape"))?;
        let physical = image.tables.translate(guest, address)?;
        guest.read(physical, bytes)?;
        for (at, record) in (0..)
            .step_by(usize::try_from(size).unwrap_or(1))
            .zip(bytes.chunks_exact(usize::try_from(size).unwrap_or(1)))
        {
            let (Some(ip), Some(flags)) = (field(record, offsets.ip), field(record, offsets.flags))
            else {
                return Err(TraceError::Ftrace("its records have an unknown shape"));
            };
            let at: u64 = at;
            found.push(Record { ip, flags, flags_at: physical + at + offsets.flags });
        }
        address = address.wrapping_add(len);
    }
    Ok(())
}

/// Whether no tracer of the guest's own is active: `ftrace_ops_list` is at its
/// sentinel.
pub(super) fn is_idle(guest: &dyn Guest, image: &Image, kernel: &Kernel) -> bool {
    let symbols = kernel.symbols();
    let (Some(list), Some(end)) =
        (symbols.address("ftrace_ops_list"), symbols.address("ftrace_list_end"))
    else {
        return false;
    };
    guest.read_u64(image.physical_of(list)).is_ok_and(|first| first == image.runtime(end))
}
