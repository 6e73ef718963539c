//! Errors in a kernel image, each with a remedy.

use std::io;
use std::path::PathBuf;

/// The reason why an image cannot be used, or why a part of it is missing.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The file cannot be read. Like the others it leaves it to the caller to name the image.
    #[error("cannot be read: {0}")]
    Read(io::Error),
    /// More bytes than any kernel has.
    #[error("{what} is larger than {limit} MiB, more than any kernel image has")]
    TooLarge {
        /// The file or the payload.
        what: &'static str,
        /// The limit, in MiB.
        limit: u64,
    },
    /// No known container.
    #[error(
        "not a Linux kernel image: {found}; give a bzImage (the vmlinuz of a distribution), a \
         vmlinux ELF file, or a riscv64 Image"
    )]
    NotAKernel {
        /// What it looks like instead.
        found: String,
    },
    /// Its tracepoints cannot be told from the image, or have no place for a probe of ours.
    #[error("the kernel's tracepoints cannot be used: {0}")]
    Tracepoints(&'static str),
    /// A kernel that vmtrace does not know how to trace.
    #[error("a kernel for {found}; vmtrace traces x86-64 and riscv64 kernels")]
    Architecture {
        /// The architecture.
        found: String,
    },
    /// The file ends before what its header promises.
    #[error("{what} is cut off: {need} bytes needed, {have} found; fetch the file again")]
    Truncated {
        /// The part that is cut.
        what: &'static str,
        /// How many bytes its header promises.
        need: u64,
        /// How many there are.
        have: u64,
    },
    /// The payload does not decompress.
    #[error(
        "the {format} payload does not decompress ({reason}); the file is damaged, fetch it again"
    )]
    Decompress {
        /// The compression.
        format: &'static str,
        /// What the decompressor said.
        reason: String,
    },
    /// A header that contradicts itself.
    #[error("damaged kernel image: {0}; fetch the file again")]
    Damaged(String),
    /// No symbol names anywhere.
    #[error(
        "no symbols: the image has no ELF symbol table, and no kallsyms tables, which all kernels with \
         CONFIG_FUNCTION_TRACER have; use a kernel with it, or give a System.map of this very build"
    )]
    NoSymbols,
    /// kallsyms tables with functions only.
    #[error(
        "symbols of functions only (built without CONFIG_KALLSYMS_ALL?), and tracing needs those \
         of data; give the System.map of this very build by --system-map, or its unstripped vmlinux"
    )]
    FunctionSymbols,
    /// kallsyms tables whose addresses fit none of the known encodings.
    #[error(
        "the image has kallsyms tables in a layout vmtrace does not know; give a System.map of \
         this very build, and please report the kernel version"
    )]
    UnknownKallsyms,
    /// The System.map cannot be used.
    #[error("System.map {}: {reason}", path.display())]
    SystemMap {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Nothing can be traced.
    #[error(
        "no call sites: the image has no __mcount_loc table (built without \
         CONFIG_DYNAMIC_FTRACE?); use a kernel with CONFIG_FUNCTION_TRACER=y and \
         CONFIG_DYNAMIC_FTRACE=y"
    )]
    NoSites,
    /// No list of the places where functions return.
    #[error(
        "no exits of functions: the image has no .return_sites list (built without \
         CONFIG_MITIGATION_RETHUNK, before Linux 6.9 CONFIG_RETHUNK?); use a kernel with it"
    )]
    NoReturnSites,
    /// A table of instructions that the kernel rewrites, in an unknown layout.
    #[error(
        "no exits of functions: the image has {table} in a layout vmtrace does not know; trace \
         entries only, and please report the kernel version"
    )]
    UnknownPatchTable {
        /// The table.
        table: &'static str,
    },
    /// No type information.
    #[error("no BTF type information in the image; use a kernel with CONFIG_DEBUG_INFO_BTF=y")]
    NoBtf,
    /// Type information that contradicts itself.
    #[error("the BTF type information is damaged: {0}")]
    BadBtf(String),
    /// Neither type information nor an image that shows what is needed.
    #[error(
        "the layout of the kernel's structures is not known: {why}, and {reason}; use a kernel \
         with CONFIG_DEBUG_INFO_BTF=y"
    )]
    NoLayout {
        /// Why there is no type information.
        why: String,
        /// What cannot be told without.
        reason: &'static str,
    },
    /// Nobody knows where it keeps the state of a CPU.
    #[error(
        "the state of the CPU cannot be recorded: the kernel does not have {0}; leave out --context"
    )]
    NoContext(&'static str),
    /// Nothing tells where it switches interrupts or preemption.
    #[error(
        "where the kernel switches interrupts and preemption cannot be traced: {0}; use a kernel \
         with CONFIG_PREEMPTIRQ_TRACEPOINTS=y"
    )]
    NoSwitches(&'static str),
    /// The ends of functions are not known.
    #[error("the exits of functions cannot be traced: {0}; trace their entries")]
    NoEpilogues(&'static str),
    /// Filters that leave nothing to trace.
    #[error("{}", no_match(globs, near))]
    NoMatch {
        /// The filters that match no function.
        globs: Vec<String>,
        /// What was meant, perhaps: see [`Kernel::near_functions`](super::Kernel::near_functions).
        near: String,
    },
}

fn no_match(globs: &[String], near: &str) -> String {
    if globs.is_empty() {
        return "every function that the filters match is excluded again by --notrace".to_owned();
    }
    let list: Vec<String> = globs.iter().map(|g| format!("'{g}'")).collect();
    format!(
        "no traceable function matches {}{near}; `vmtrace functions KERNEL` lists them all, and those of \
         modules are named by GLOB:mod:NAME",
        list.join(", ")
    )
}
