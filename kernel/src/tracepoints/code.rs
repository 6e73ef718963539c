//! Where the kernel's code comes by a tracepoint.

use super::super::read::{i32_at, u64_at};
use super::super::{Arch, Kernel, KernelError};
use super::prepare::Preparation;

/// What calls a tracepoint's probes, and what has to change for it to do so. Link addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hooks {
    /// Of `struct tracepoint`.
    pub tracepoint: u64,
    /// Of its array of probes.
    pub funcs: u64,
    /// Of the count in its static key.
    pub enabled: u64,
    /// What calls all probes of the array.
    pub iterator: u64,
    /// Branches to the calls.
    pub branches: Vec<Branch>,
    /// The calls, where they are static ones (x86-64); elsewhere all are of the iterator.
    pub static_calls: Option<StaticCalls>,
    /// What it asks for beside these when it is switched on.
    pub preparation: Preparation,
}

impl Hooks {
    /// Whether the kernel's own code comes by it at all.
    #[must_use]
    pub fn are_used(&self) -> bool {
        let is_called = self.static_calls.as_ref().is_none_or(|calls| !calls.sites.is_empty());
        is_called && !self.branches.is_empty()
    }
}

/// Calls that lead to the only probe there is, or to the iterator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticCalls {
    /// The code behind which calls go where a call site was not patched.
    pub trampoline: u64,
    /// The calls.
    pub sites: Vec<Call>,
}

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

impl Kernel {
    /// What calls a tracepoint (link address of its `struct tracepoint`).
    ///
    /// # Errors
    /// When the image does not tell.
    pub fn tracepoint_hooks(&self, tracepoint: u64) -> Result<Hooks, KernelError> {
        let bad = KernelError::Tracepoints;
        let btf = self.btf()?;
        let unknown = "its type information does not describe tracepoints";
        let member =
            |name| btf.member_offset("tracepoint", name).map(u64::from).ok_or(bad(unknown));
        let at = |offset: u64| tracepoint.wrapping_add(offset);
        let word = |address| self.word(address).ok_or(bad("its tracepoints are not in the file"));
        let key = at(member("key")?);
        let enabled = btf.member_offset("static_key", "enabled").ok_or(bad(unknown))?;
        let prepares = match member("regfunc") {
            Ok(regfunc) => word(at(regfunc))?,
            Err(_) => {
                let regfunc = btf.member_offset("tracepoint_ext", "regfunc").ok_or(bad(unknown))?;
                match word(at(member("ext")?))? {
                    0 => 0,
                    ext => word(ext.wrapping_add(regfunc.into()))?,
                }
            }
        };
        let static_calls = match self.arch() {
            Arch::X86_64 => {
                let call_key = word(at(member("static_call_key")?))?;
                Some(StaticCalls {
                    trampoline: word(at(member("static_call_tramp")?))?,
                    sites: self.calls(call_key).ok_or(bad("it has no table of static calls"))?,
                })
            }
            // It has none (HAVE_STATIC_CALL).
            Arch::Riscv64 => None,
        };
        Ok(Hooks {
            tracepoint,
            funcs: at(member("funcs")?),
            enabled: key.wrapping_add(enabled.into()),
            iterator: word(at(member("iterator")?))?,
            branches: self.branches(key).ok_or(bad("it has no table of branches"))?,
            static_calls,
            preparation: self.preparation(prepares),
        })
    }

    /// The contents of a table between two symbols, and its address.
    fn table(&self, start: &str, stop: &str) -> Option<(u64, &[u8])> {
        let (start, stop) = (self.symbols().address(start)?, self.symbols().address(stop)?);
        let len = usize::try_from(stop.checked_sub(start)?).ok()?;
        Some((start, self.bytes(start, len)?))
    }

    /// `struct jump_entry {s32 code, target; long key}`, each relative to itself.
    fn branches(&self, key: u64) -> Option<Vec<Branch>> {
        const SIZE: usize = 16;
        /// Bits of a key that say how the branch was compiled.
        const FLAGS: u64 = 3;
        let (start, table) = self.table("__start___jump_table", "__stop___jump_table")?;
        let own =
            (start..).step_by(SIZE).zip(table.chunks_exact(SIZE)).filter_map(|(at, entry)| {
                let relative = |offset: usize, distance: i64| {
                    at.wrapping_add(offset as u64).wrapping_add_signed(distance)
                };
                let of = relative(8, u64_at(entry, 8)?.cast_signed());
                (of & !FLAGS == key).then_some(())?;
                let code = relative(0, i32_at(entry, 0)?.into());
                let target = relative(4, i32_at(entry, 4)?.into());
                Some(Branch { code, target })
            });
        Some(own.collect())
    }

    /// `struct static_call_site {s32 addr, key}`, each relative to itself.
    fn calls(&self, key: u64) -> Option<Vec<Call>> {
        const SIZE: usize = 8;
        const TAIL: u64 = 1;
        const FLAGS: u64 = 3;
        let (start, table) = self.table("__start_static_call_sites", "__stop_static_call_sites")?;
        let own =
            (start..).step_by(SIZE).zip(table.chunks_exact(SIZE)).filter_map(|(at, entry)| {
                let relative = |offset: usize| {
                    let distance = i32_at(entry, offset)?;
                    Some(at.wrapping_add(offset as u64).wrapping_add_signed(distance.into()))
                };
                let of = relative(4)?;
                let call = Call { code: relative(0)?, tail: of & TAIL != 0 };
                (of & !FLAGS == key).then_some(call)
            });
        Some(own.collect())
    }
}
