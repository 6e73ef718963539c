//! Calls by which the guest's kernel loads and unloads modules.

use super::error::TraceError;
use super::modules::Offsets;
use super::stops::Stops;
use crate::kernel::Kernel;

/// Called when a module is ready and nothing of it has run, when memory of sites is about to be
/// freed (its init functions, and those of the kernel itself), and when a module is about to be
/// unloaded or has failed to load (kernel/module/main.c, kernel/trace/ftrace.c); and what tells others
/// of that before, among whom are those who look whether its tracepoints have probes.
pub(super) const FUNCTIONS: [(ModuleMoment, &str); 4] = [
    (ModuleMoment::Ready, "do_init_module"),
    (ModuleMoment::Freed, "ftrace_free_mem"),
    (ModuleMoment::Gone, "ftrace_release_mod"),
    (ModuleMoment::Told, "blocking_notifier_call_chain"),
];

/// That they are called elsewhere.
pub(super) const UNKNOWN: TraceError = TraceError::Code("its modules are loaded by unknown code");

/// Beginnings of the names of functions that may have calls of these in them: those that the
/// compiler made pieces or variants of, too.
const CALLERS: [&str; 8] = [
    "load_module",
    "do_init_module",
    "__do_sys_delete_module",
    "__se_sys_delete_module",
    "__x64_sys_delete_module",
    "__riscv_sys_delete_module",
    "__do_sys_init_module",
    "init_module_from_file",
];

/// Bytes of the longest of them, several times over.
const LONGEST: usize = 1 << 16;

/// The functions that may have these calls in them: link addresses and code.
pub(super) fn callers(kernel: &Kernel) -> impl Iterator<Item = (u64, &[u8])> {
    let symbols = kernel.symbols();
    let is_caller = |name: &str| {
        CALLERS.iter().any(|caller| {
            name.strip_prefix(caller).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    };
    let mut starts: Vec<u64> =
        symbols.iter().filter(|symbol| is_caller(symbol.name)).map(|it| it.address).collect();
    // One function may have several names.
    starts.sort_unstable();
    starts.dedup();
    starts.into_iter().filter_map(|start| Some((start, kernel.code(start, LONGEST)?)))
}

/// What has become of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleMoment {
    /// It is ready, and nothing of it has run: the first argument is its `struct module`.
    Ready,
    /// Memory is about to be freed: its `struct module` (0: the kernel), first address and end.
    Freed,
    /// It is about to go: the first argument is its `struct module`.
    Gone,
    /// All who want to know are told what becomes of it: the second argument is its state, the third
    /// its `struct module`. Only the tracepoints of modules need it.
    Told,
}

impl ModuleMoment {
    /// The state of a module that goes (`MODULE_STATE_GOING`, include/linux/module.h).
    pub const GOING: u64 = 2;

    /// Whether modules can be traced at all in a kernel where it is not found.
    pub(super) fn is_needed(self) -> bool {
        self != Self::Told
    }
}

/// The traps, and what is needed at them.
#[derive(Debug)]
pub(super) struct ModuleTraps {
    pub(super) stops: Stops<ModuleMoment>,
    pub(super) offsets: Offsets,
}
