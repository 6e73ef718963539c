//! Code that depends on keys: branches of static keys, and static calls (include/linux/jump_label.h,
//! include/linux/static_call_types.h).

use super::super::read::{i32_at, u64_at, wide};
use super::super::{Kernel, KernelError};

/// A branch that is a nop while the tracepoint is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    /// Of the instruction.
    pub code: u64,
    /// Where it jumps to.
    pub target: u64,
}

/// A static call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Of the instruction.
    pub code: u64,
    /// It is a jump.
    pub tail: bool,
}

/// What belongs to a key, and the bits of the key itself in an entry.
pub(super) type Keyed<T> = (u64, u64, T);

/// The lowest bits of the address of a key say what the code is.
const FLAGS: u64 = 3;

/// The entries of a table at `start`, each with its address: one of a guest may be at the end of all
/// addresses.
fn entries(start: u64, table: &[u8], size: usize) -> impl Iterator<Item = (u64, &[u8])> {
    let all = table.chunks_exact(size).enumerate();
    all.map(move |(index, entry)| (start.wrapping_add(wide(index * size)), entry))
}

/// `struct jump_entry {s32 code, target; long key}`, each relative to itself, of a table at `start`.
pub(super) fn branches(start: u64, table: &[u8]) -> impl Iterator<Item = Keyed<Branch>> {
    const SIZE: usize = 16;
    entries(start, table, SIZE).filter_map(|(at, entry)| {
        let relative = |offset: usize, distance: i64| {
            at.wrapping_add(offset as u64).wrapping_add_signed(distance)
        };
        let of = relative(8, u64_at(entry, 8)?.cast_signed());
        let code = relative(0, i32_at(entry, 0)?.into());
        let target = relative(4, i32_at(entry, 4)?.into());
        Some((of & !FLAGS, of & FLAGS, Branch { code, target }))
    })
}

/// `struct static_call_site {s32 addr, key}`, each relative to itself, of a table at `start`.
pub(super) fn calls(start: u64, table: &[u8]) -> impl Iterator<Item = Keyed<Call>> {
    const SIZE: usize = 8;
    const TAIL: u64 = 1;
    entries(start, table, SIZE).filter_map(|(at, entry)| {
        let relative = |offset: usize| {
            let distance = i32_at(entry, offset)?;
            Some(at.wrapping_add(offset as u64).wrapping_add_signed(distance.into()))
        };
        let of = relative(4)?;
        Some((of & !FLAGS, of & FLAGS, Call { code: relative(0)?, tail: of & TAIL != 0 }))
    })
}

/// Those of one key.
fn of_key<T>(all: impl Iterator<Item = Keyed<T>>, key: u64) -> Vec<T> {
    all.filter(|&(of, ..)| of == key).map(|(.., it)| it).collect()
}

impl Kernel {
    /// The branches of a static key (link address).
    pub(super) fn branches_of(&self, key: u64) -> Result<Vec<Branch>, KernelError> {
        let labels = self.table("__start___jump_table", "__stop___jump_table");
        let none = KernelError::Tracepoints("it has no table of branches");
        let (start, table) = labels.ok_or(none)?;
        self.check_branches()?;
        Ok(of_key(branches(start, table), key))
    }

    /// Whether static keys have branches.
    pub(super) fn check_branches(&self) -> Result<(), KernelError> {
        match self.table("__start___jump_table", "__stop___jump_table") {
            // The kernel looks at a variable wherever it comes by.
            Some((_, [])) => {
                Err(KernelError::Tracepoints("the kernel was built without CONFIG_JUMP_LABEL"))
            }
            _ => Ok(()),
        }
    }

    /// The static calls of a key (link address).
    pub(super) fn calls_of(&self, key: u64) -> Result<Vec<Call>, KernelError> {
        let sites = self.table("__start_static_call_sites", "__stop_static_call_sites");
        let none = KernelError::Tracepoints("it has no table of static calls");
        let (start, table) = sites.ok_or(none)?;
        Ok(of_key(calls(start, table), key))
    }

    /// The contents of a table between two symbols, and its address.
    fn table(&self, start: &str, stop: &str) -> Option<(u64, &[u8])> {
        let (start, stop) = (self.symbols().address(start)?, self.symbols().address(stop)?);
        let len = usize::try_from(stop.checked_sub(start)?).ok()?;
        Some((start, self.bytes(start, len)?))
    }
}
