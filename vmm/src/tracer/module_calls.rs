//! Calls by which the guest's kernel loads and unloads modules.

use super::call::Call;
use super::error::TraceError;
use crate::kernel::Kernel;

/// Called when a module is ready and nothing of it has run, when memory of sites is about to be
/// freed (its init functions, and those of the kernel itself), and when a module is about to be
/// unloaded or has failed to load (kernel/module/main.c, kernel/trace/ftrace.c); and what tells others
/// of that before, among whom are those who look whether its tracepoints have probes.
const FUNCTIONS: [(ModuleMoment, &str); 4] = [
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

/// Code of the functions that may have these calls in them, with its link addresses.
fn callers(kernel: &Kernel) -> impl Iterator<Item = (u64, &[u8])> {
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

/// These calls in a kernel, each with what is happening there: from the image alone. `calls` finds what may
/// be calls in code at a link address. It takes long: all symbols are looked at.
///
/// # Errors
/// When the kernel has no such function, or no call of it where it should be.
pub(super) fn find(
    kernel: &Kernel,
    calls: impl Fn(u64, &[u8]) -> Vec<Call>,
) -> Result<Vec<(ModuleMoment, Call)>, TraceError> {
    let all: Vec<Call> = callers(kernel).flat_map(|(start, body)| calls(start, body)).collect();
    let mut found = Vec::new();
    for (moment, name) in FUNCTIONS {
        let function = kernel.symbols().address(name);
        if function.is_none() && !moment.is_needed() {
            continue;
        }
        let function = function.ok_or(TraceError::NoSymbol(name))?;
        let before = found.len();
        let own = all.iter().filter(|call| call.target == function);
        found.extend(own.map(|&call| (moment, call)));
        log::debug!("calls of {name}: {:x?}", found.get(before..));
        if found.len() == before && moment.is_needed() {
            return Err(UNKNOWN);
        }
    }
    Ok(found)
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
    fn is_needed(self) -> bool {
        self != Self::Told
    }
}

#[cfg(test)]
mod tests {
    use super::super::dispatch;
    use super::*;

    // A call that is not found is a module whose memory is written after it is gone.
    #[test]
    fn all_calls_of_the_kernel_are_found() {
        let kernels = [
            "x86_64-6.1",
            "x86_64-6.12",
            "x86_64-6.12-rt",
            "x86_64-7",
            "riscv64-6.12",
            "riscv64-7",
        ];
        for name in kernels {
            let cache = vmtrace_emulated::cache_dir().expect("no cache directory");
            let kernel = Kernel::open(&cache.join("kernels").join(name).join("vmlinuz")).unwrap();
            let symbol = |name| kernel.symbols().address(name).unwrap();
            let (start, end) = (symbol("_stext"), symbol("_etext"));
            let text = kernel.bytes(start, usize::try_from(end - start).unwrap()).unwrap();
            let calls = |start, body: &[u8]| dispatch::of(kernel.arch()).calls_in(start, body);
            let all = calls(start, text);
            let known = find(&kernel, calls).unwrap();
            // Others are told of other things by the last one.
            for (moment, function) in FUNCTIONS.into_iter().filter(|(it, _)| it.is_needed()) {
                let of = known.iter().filter(|(it, _)| *it == moment);
                let known: Vec<Call> = of.map(|(_, call)| *call).collect();
                let address = symbol(function);
                let of = all.iter().filter(|call| call.target == address);
                assert!(!known.is_empty(), "{name}: {function}");
                assert_eq!(known, of.copied().collect::<Vec<_>>(), "{name}: {function}");
            }
        }
    }
}
