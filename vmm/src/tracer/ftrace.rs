//! The guest's own record of its sites: `struct dyn_ftrace`.
//!
//! If the guest's ftrace finds a call at a site that it did not write, it disables itself until the
//! next boot (kernel/trace/ftrace.c). The flags of a record tell which sites an update changes
//! ([`is_touched`]): these are given back for the duration of the update. Where that is impossible,
//! a held site is marked `FTRACE_FL_DISABLED`, so that the guest refuses to trace it (`EINVAL`).

use super::guest::Guest;

use super::error::TraceError;
use super::image::Image;
use super::members::Members;
use crate::kernel::Kernel;

/// The guest will not touch such a site (kernel/trace/ftrace.c, 4.5 and later).
pub(super) const DISABLED: u64 = 1 << 25;
/// The guest's own ftrace is active on the site.
pub(super) const ENABLED: u64 = 1 << 31;

/// The other flags, in pairs: what is wanted, and what the site's instruction is made for now. Those
/// of `CALL_OPS` are bits of the count before 6.3, which nothing counts up to.
const REGS: [u64; 2] = [1 << 30, 1 << 29];
const TRAMP: [u64; 2] = [1 << 28, 1 << 27];
const DIRECT: [u64; 2] = [1 << 24, 1 << 23];
const CALL_OPS: [u64; 2] = [1 << 22, 1 << 21];
/// How many tracers of the guest's own the site has: the bits that are count in all versions.
const COUNT: u64 = (1 << 19) - 1;

/// Whether an update of the guest's ftrace reads or writes the site of a record with these flags, as
/// they are when it begins (`ftrace_check_record`, kernel/trace/ftrace.c); `on` as
/// `ftrace_enabled` is then.
pub(super) fn is_touched(flags: u64, on: bool) -> bool {
    let enabled = flags & ENABLED != 0;
    if flags & DISABLED != 0 && !enabled {
        return false;
    }
    let count = flags & COUNT;
    let wanted = count > 0 && on;
    if !wanted || !enabled {
        return wanted != enabled;
    }
    let differs = |[want, is]: [u64; 2]| (flags & want != 0) != (flags & is != 0);
    // Only a tracer that is alone on a site is called directly.
    let alone = |pair: [u64; 2]| if count == 1 { differs(pair) } else { flags & pair[1] != 0 };
    differs(REGS) || differs(TRAMP) || alone(DIRECT) || alone(CALL_OPS)
}

/// Whether the guest's ftrace is switched on (sysctl `kernel.ftrace_enabled`).
pub(super) fn is_on(guest: &dyn Guest, image: &Image, kernel: &Kernel) -> Result<bool, TraceError> {
    const NAME: &str = "ftrace_enabled";
    let variable = kernel.symbols().address(NAME).ok_or(TraceError::NoSymbol(NAME))?;
    let mut on = [0; 4];
    guest.read(image.physical_of(variable), &mut on)?;
    Ok(u32::from_le_bytes(on) != 0)
}

/// Bounds against a list that the guest made endless.
const MAX_GROUPS: usize = 1 << 16;
const MAX_RECORDS: usize = 1 << 20;

/// What the guest's own ftrace has put into a site that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GuestCall {
    /// Run-time address: of code, or of the ops where sites have a literal.
    pub(super) target: u64,
    /// It is a jump: what it leads to returns to the caller of the function.
    pub(super) jumps: bool,
}

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

/// Offsets in the guest's structures.
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
        let members = Members::of(kernel)?;
        Ok(Self {
            next: members.offset("ftrace_page", "next")?,
            records: members.offset("ftrace_page", "records")?,
            index: members.offset("ftrace_page", "index")?,
            size: members.size("dyn_ftrace")?,
            ip: members.offset("dyn_ftrace", "ip")?,
            flags: members.offset("dyn_ftrace", "flags")?,
        })
    }
}

impl Records {
    /// Follows `ftrace_pages_start`. The list has `room`'s memory.
    pub(super) fn read(
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        offsets: &Offsets,
        room: Vec<Record>,
    ) -> Result<Self, TraceError> {
        let start = kernel
            .symbols()
            .address("ftrace_pages_start")
            .ok_or(TraceError::NoSymbol("ftrace_pages_start"))?;
        let mut found = room;
        found.clear();
        found.reserve(kernel.sites().len());
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
        // They mostly are in order, which this sort sees before it takes any memory.
        found.sort_unstable_by_key(|record| record.ip);
        Ok(Self(found))
    }

    /// Its memory, for the next time.
    pub(super) fn into_room(self) -> Vec<Record> {
        self.0
    }

    /// To find them one after the other.
    pub(super) fn cursor(&self) -> Cursor<'_> {
        Cursor { records: &self.0, next: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Addresses of those of whose flags this is true, in order.
    pub(super) fn with_flags(&self, is: impl Fn(u64) -> bool) -> Vec<u64> {
        self.0.iter().filter(|record| is(record.flags)).map(|record| record.ip).collect()
    }

    /// Whether the guest's own ftrace is active on any site.
    pub(super) fn any_enabled(&self) -> bool {
        self.0.iter().any(|record| record.flags & ENABLED != 0)
    }

    /// The guest-physical address of one of them.
    pub(super) fn some_place(&self) -> Option<u64> {
        self.0.first().map(|record| record.flags_at)
    }
}

/// Finds records, the next one at once.
pub(super) struct Cursor<'a> {
    records: &'a [Record],
    next: usize,
}

impl<'a> Cursor<'a> {
    /// The record of the site at run-time address `ip`.
    #[inline]
    pub(super) fn find(&mut self, ip: u64) -> Option<&'a Record> {
        let next = self.records.get(self.next).filter(|record| record.ip == ip);
        let record = next.or_else(|| self.search(ip))?;
        self.next += 1;
        Some(record)
    }

    /// The same in any order; the next one is then where it was found.
    #[cold]
    fn search(&mut self, ip: u64) -> Option<&'a Record> {
        self.next = self.records.binary_search_by_key(&ip, |record| record.ip).ok()?;
        self.records.get(self.next)
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
    let unknown = || TraceError::Ftrace("its records have an unknown shape");
    let small = |number: u64| usize::try_from(number).map_err(|_| unknown());
    let (step, ip_at, flags_at) = (small(size)?, small(offsets.ip)?, small(offsets.flags)?);
    let field =
        |record: &[u8], at| record.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
    let mut page = [0; PAGE_LEN];
    let mut address = records;
    let end = records.wrapping_add(count * size);
    while address != end {
        let len = (PAGE - address % PAGE).min(end.wrapping_sub(address));
        let bytes = page.get_mut(..small(len)?).ok_or_else(unknown)?;
        let mut physical = image.tables.translate(guest, address)?;
        guest.read(physical, bytes)?;
        for record in bytes.chunks_exact(step) {
            let both = field(record, ip_at).zip(field(record, flags_at));
            let (ip, flags) = both.ok_or_else(unknown)?;
            found.push(Record { ip, flags, flags_at: physical.wrapping_add(offsets.flags) });
            physical = physical.wrapping_add(size);
        }
        address = address.wrapping_add(len);
    }
    Ok(())
}

/// Whether no tracer of the guest's own is active: `ftrace_ops_list` is at its sentinel, and nobody
/// holds `ftrace_lock`. (`ftrace_shutdown` empties the list first and lowers the counts of records
/// then; a flag that goes in between makes the guest give up its ftrace.)
pub(super) fn is_idle(guest: &dyn Guest, image: &Image, kernel: &Kernel) -> bool {
    let symbols = kernel.symbols();
    let (Some(list), Some(end), Some(lock)) = (
        symbols.address("ftrace_ops_list"),
        symbols.address("ftrace_list_end"),
        symbols.address("ftrace_lock"),
    ) else {
        return false;
    };
    // With PREEMPT_RT a mutex is one of these. First in the other kind, in all versions.
    let btf = kernel.btf().ok();
    let member = |name| btf.as_ref()?.member_offset(name, "owner");
    let owner = member("mutex").or_else(|| member("rt_mutex_base")).unwrap_or(0);
    let word = |at: u64| guest.read_u64(image.physical_of(at));
    word(list).is_ok_and(|first| first == image.runtime(end))
        && word(lock + u64::from(owner)) == Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    // A site too few is a call that the guest does not know, and the end of its ftrace.
    #[test]
    fn updates_touch_what_the_guest_says() {
        let touched = |flags| is_touched(flags, true);
        // Nothing to do: idle, or called as it is to be.
        for flags in [0, ENABLED | 1, ENABLED | 5, DISABLED, DISABLED | 1, 1 << 19 | 1 << 20] {
            assert!(!touched(flags), "{flags:#x}");
        }
        assert!(touched(1) && touched(ENABLED) && touched(ENABLED | DISABLED));
        for [want, is] in [REGS, TRAMP, DIRECT, CALL_OPS] {
            assert!(!touched(ENABLED | 1 | want | is));
            assert!(touched(ENABLED | 1 | want) && touched(ENABLED | 1 | is));
        }
        // With a second tracer the site is not the first one's any more.
        for [want, is] in [DIRECT, CALL_OPS] {
            assert!(touched(ENABLED | 2 | want | is) && !touched(ENABLED | 2 | want));
        }
        assert!(!touched(ENABLED | 2 | REGS[0] | REGS[1]));
        // Switched off, all that is called goes, and nothing comes.
        assert!(is_touched(ENABLED | 1, false) && !is_touched(1, false));
    }

    // A record that is not found is a site that is not traced; a wrong one is another's flags.
    #[test]
    fn records_are_found_in_any_order() {
        let record = |ip| Record { ip, flags_at: ip + 8, flags: 0 };
        let records = Records([0x10, 0x20, 0x30, 0x40].map(record).to_vec());
        let mut cursor = records.cursor();
        for ip in [0x10, 0x20, 0x40, 0x40, 0x10, 0x30] {
            assert_eq!(cursor.find(ip), Some(&record(ip)));
            assert_eq!(cursor.find(ip + 1), None);
        }
    }
}
