//! Why a guest cannot be traced.

use super::guest::GuestError;

/// Why a guest cannot be traced, or not any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// Guest memory is not as it should be.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The image lacks what is needed.
    #[error("{0}")]
    Kernel(String),
    /// A symbol is missing.
    #[error("the kernel image has no symbol {0}")]
    NoSymbol(&'static str),
    /// A structure lacks a member, or nothing tells where it is.
    #[error("the offset of {0}.{1} in the kernel is not known")]
    NoMember(&'static str, &'static str),
    /// The annex has no place for so many rings.
    #[error("no rings for {0} vCPUs: 1 to 64 can be traced")]
    Cpus(u64),
    /// Rings of this size have no place in the guest's address space.
    #[error(
        "no room in the kernel's address space for a ring of {}K for each of {cpus} vCPUs: give \
         --buffer {}K or less, or fewer --cpus", size >> 10, most >> 10
    )]
    Buffer {
        /// Bytes of each.
        size: u64,
        /// So many would have room.
        most: u64,
        /// How many there are to be.
        cpus: u64,
    },
    /// The annex memory is unusable.
    #[error("the annex memory is too small")]
    Annex,
    /// There is no room for another table of counters.
    #[error(
        "no room to count so many functions for {0} vCPUs: count fewer functions, or use fewer \
         vCPUs or fewer tracers that count"
    )]
    Counters(u64),
    /// Some functions cannot be counted.
    #[error("these functions cannot be counted: they are not in the image, or are too short")]
    NotCounted,
    /// There is no room for another counter of calls at whose end a vCPU stops.
    #[error("no room for another counter that stops the guest at a call")]
    Stops,
    /// There is no room for the set of tasks that are followed.
    #[error("no room to note which tasks are followed: leave out --children")]
    Family,
    /// The kernel has no place for trampolines.
    #[error("no place for trampolines in the guest's kernel: {0}")]
    Code(&'static str),
    /// The guest's own ftrace is not as expected.
    #[error("the data of the guest's ftrace is not as expected: {0}")]
    Ftrace(&'static str),
    /// A program cannot be made.
    #[error(transparent)]
    Program(#[from] vmtrace_trampolines::ProgramError),
    /// There is no place for what so many exits lead to.
    #[error(
        "no room for the {0} exits of the functions whose returns may be traced: name fewer \
         (--graph, --returns)"
    )]
    Returns(usize),
    /// There is no place for another program.
    #[error(
        "no place for another program after {0}: too many combinations of tracers, or too many \
         different conditions and values in one run; start a new one"
    )]
    Full(usize),
}
