//! Finds the places in the kernel's code where a tracepoint is.

use super::super::{Arch, Kernel, KernelError};
use super::keys::{Branch, Call};
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

impl Kernel {
    /// Refuses kernels whose functions that are called through pointers have a hash before them, which is compared at every
    /// such call: a probe without one would be taken for an attack.
    pub(super) fn check_pointers(&self) -> Result<(), KernelError> {
        // What they all have (kernel/cfi.c), and what clang puts before functions of x86-64 that are called from anywhere.
        let signs = ["report_cfi_failure", "__cfi_panic", "__cfi__printk", "__cfi_schedule"];
        match signs.iter().any(|name| self.symbols().address(name).is_some()) {
            true => Err(KernelError::Tracepoints(
                "the kernel checks what it calls through pointers (CONFIG_CFI)",
            )),
            false => Ok(()),
        }
    }

    /// What calls a tracepoint (link address of its `struct tracepoint`).
    ///
    /// # Errors
    /// When the image does not tell.
    pub fn tracepoint_hooks(&self, tracepoint: u64) -> Result<Hooks, KernelError> {
        let bad = KernelError::Tracepoints;
        self.check_pointers()?;
        let hooks = self.event_layout()?.points.read(self, self.memory(), tracepoint);
        let mut hooks = hooks.ok_or(bad("its tracepoints are not in the file"))?;
        hooks.branches = self.branches_of(hooks.key)?;
        if let Some(known) = &mut hooks.static_calls {
            known.sites = self.calls_of(known.key)?;
        }
        Ok(hooks)
    }
}
