//! Finds the places in the kernel's code where a tracepoint is.

use super::super::read::{i32_at, u64_at, wide};
use super::super::{Arch, Kernel, KernelError};
use super::memory::Memory;
use super::prepare::Preparation;

/// What calls a tracepoint's probes, and what has to change for it to do so. Link addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hooks {
    /// Of `struct tracepoint`.
    pub tracepoint: u64,
    /// Of its static key.
    pub key: u64,
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
    /// What they are known by (`struct static_call_key`).
    pub key: u64,
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

/// Where a tracepoint has what (include/linux/tracepoint-defs.h).
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) name: u64,
    key: u64,
    enabled: u64,
    funcs: u64,
    iterator: u64,
    prepares: Prepares,
    /// Key and trampoline of its static calls.
    static_call: Option<(u64, u64)>,
}

/// Where it has what is called when it is switched on.
#[derive(Debug)]
enum Prepares {
    Here(u64),
    /// In a structure of its own, if it has one (since 6.14).
    Behind(u64, u64),
}

impl Layout {
    pub(super) fn find(kernel: &Kernel) -> Result<Self, KernelError> {
        let btf = kernel.btf()?;
        let unknown = "its type information does not describe tracepoints";
        let member = |strukt, name| {
            let found = btf.member_offset(strukt, name).map(u64::from);
            found.ok_or(KernelError::Tracepoints(unknown))
        };
        let own = |name| member("tracepoint", name);
        let prepares = match own("regfunc") {
            Ok(at) => Prepares::Here(at),
            Err(_) => Prepares::Behind(own("ext")?, member("tracepoint_ext", "regfunc")?),
        };
        let static_call = match kernel.arch() {
            Arch::X86_64 => Some((own("static_call_key")?, own("static_call_tramp")?)),
            // It has none (HAVE_STATIC_CALL).
            Arch::Riscv64 => None,
        };
        Ok(Self {
            name: own("name")?,
            key: own("key")?,
            enabled: member("static_key", "enabled")?,
            funcs: own("funcs")?,
            iterator: own("iterator")?,
            prepares,
            static_call,
        })
    }

    /// What a tracepoint says of itself: no code that comes by it is known yet.
    pub(super) fn read(
        &self,
        kernel: &Kernel,
        memory: &dyn Memory,
        tracepoint: u64,
    ) -> Option<Hooks> {
        let at = |offset: u64| tracepoint.wrapping_add(offset);
        let key = at(self.key);
        let prepares = match self.prepares {
            Prepares::Here(offset) => memory.pointer(at(offset))?,
            Prepares::Behind(offset, regfunc) => match memory.pointer(at(offset))? {
                0 => 0,
                ext => memory.pointer(ext.wrapping_add(regfunc))?,
            },
        };
        let static_calls = match self.static_call {
            None => None,
            Some((key, trampoline)) => Some(StaticCalls {
                key: memory.pointer(at(key))?,
                trampoline: memory.pointer(at(trampoline))?,
                sites: Vec::new(),
            }),
        };
        Some(Hooks {
            tracepoint,
            key,
            funcs: at(self.funcs),
            enabled: key.wrapping_add(self.enabled),
            iterator: memory.pointer(at(self.iterator))?,
            branches: Vec::new(),
            static_calls,
            preparation: kernel.preparation(prepares),
        })
    }
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
    /// What calls a tracepoint (link address of its `struct tracepoint`).
    ///
    /// # Errors
    /// When the image does not tell.
    pub fn tracepoint_hooks(&self, tracepoint: u64) -> Result<Hooks, KernelError> {
        let bad = KernelError::Tracepoints;
        let hooks = self.event_layout()?.points.read(self, self.memory(), tracepoint);
        let mut hooks = hooks.ok_or(bad("its tracepoints are not in the file"))?;
        hooks.branches = self.branches_of(hooks.key)?;
        if let Some(known) = &mut hooks.static_calls {
            let sites = self.table("__start_static_call_sites", "__stop_static_call_sites");
            let (start, table) = sites.ok_or(bad("it has no table of static calls"))?;
            known.sites = of_key(calls(start, table), known.key);
        }
        Ok(hooks)
    }

    /// The branches of a static key (link address).
    pub(super) fn branches_of(&self, key: u64) -> Result<Vec<Branch>, KernelError> {
        let labels = self.table("__start___jump_table", "__stop___jump_table");
        let none = KernelError::Tracepoints("it has no table of branches");
        let (start, table) = labels.ok_or(none)?;
        Ok(of_key(branches(start, table), key))
    }

    /// The contents of a table between two symbols, and its address.
    fn table(&self, start: &str, stop: &str) -> Option<(u64, &[u8])> {
        let (start, stop) = (self.symbols().address(start)?, self.symbols().address(stop)?);
        let len = usize::try_from(stop.checked_sub(start)?).ok()?;
        Some((start, self.bytes(start, len)?))
    }
}
