//! What can go wrong with a machine.

use std::io;

/// An error of the machine. The text does not repeat the source: print the chain.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// There is no `/dev/kvm`.
    #[error(
        "/dev/kvm does not exist: this machine has no usable KVM (its kernel needs the kvm module, its CPU or its hypervisor must offer virtualisation)"
    )]
    NoKvm,
    /// `/dev/kvm` may not be opened.
    #[error(
        "no permission to open /dev/kvm: become a member of the group that owns it (usually kvm) or run as root"
    )]
    KvmPermission,
    /// Opening `/dev/kvm` failed otherwise.
    #[error("cannot open /dev/kvm")]
    KvmOpen(#[source] io::Error),
    /// The API version is not 12.
    #[error("/dev/kvm has API version {0}, this program needs 12")]
    KvmApi(i32),
    /// A needed capability is missing.
    #[error("KVM of this machine lacks {0}, which this program needs")]
    KvmCapability(&'static str),
    /// A request to KVM failed.
    #[error("KVM refused to {what}")]
    Kvm {
        /// What was to be done.
        what: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },

    /// Number of vCPUs out of range.
    #[error("cannot make {asked} vCPUs: between 1 and {max} are possible here")]
    Cpus {
        /// How many were asked for.
        asked: u8,
        /// How many KVM offers.
        max: usize,
    },
    /// There are no more interrupts.
    #[error("the machine has no interrupts for so many disks and shares")]
    TooManyDevices,
    /// Memory size that no machine can have.
    #[error(
        "cannot make a machine with {0} bytes of memory: it must be a multiple of 4 KiB, at least 64 MiB and at most 1 TiB"
    )]
    MemorySize(u64),
    /// Host memory could not be reserved.
    #[error("cannot reserve {bytes} bytes of host memory for the guest")]
    MemoryReserve {
        /// How many bytes.
        bytes: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Size or place of the annex's second part that is not possible.
    #[error("{0} bytes is not a possible size of a second part of the annex")]
    FarSize(u64),
    /// The host has no room for the annex's second part.
    #[error(
        "the rings take {} MiB, and this machine has {} MiB of memory left: give a smaller --buffer, or fewer --cpus", asked >> 20, available >> 20
    )]
    FarMemory {
        /// Bytes.
        asked: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// The processor cannot map the annex's second part.
    #[error(
        "rings of this size need {0}, which KVM does not give guests here: give a smaller --buffer (without it rings are as large as they can be anywhere), or less --memory"
    )]
    FarPages(&'static str),
    /// Annex size that is not possible.
    #[error(
        "an annex of {asked} bytes is not possible: it must be a multiple of 2 MiB and at most {max} bytes"
    )]
    AnnexSize {
        /// What was asked for.
        asked: u64,
        /// The largest.
        max: u64,
    },
    /// The kernel and the initrd do not fit.
    #[error(
        "the guest needs more memory: its kernel takes {kernel} MiB and its initrd {initrd} MiB, and it has {memory} MiB; give it at least {needed} MiB with --memory"
    )]
    TooLittleMemory {
        /// Memory of the guest in MiB.
        memory: u64,
        /// What the kernel takes while it starts, in MiB.
        kernel: u64,
        /// Size of the initrd in MiB.
        initrd: u64,
        /// What would do, in MiB.
        needed: u64,
    },
    /// The kernel command line is too long.
    #[error("the kernel command line is {length} bytes long, this kernel takes at most {max}")]
    CmdlineTooLong {
        /// Its length in bytes.
        length: usize,
        /// The longest in bytes.
        max: usize,
    },
    /// The kernel command line holds a NUL.
    #[error("the kernel command line contains a NUL byte")]
    CmdlineNul,
    /// The kernel image cannot be booted.
    #[error("this kernel cannot be booted: {0}")]
    KernelImage(String),
    /// Writing to guest memory failed while the guest was prepared.
    #[error("cannot write the guest's {what} to its memory")]
    GuestMemory {
        /// What was written.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: vm_memory::GuestMemoryError,
    },

    /// Two devices at one address: a mistake of this program.
    #[error("two devices want the same {0}")]
    Overlap(&'static str),
    /// More CPUID leaves or registers than KVM's interface takes.
    #[error("this CPU has more CPUID leaves than KVM's interface takes")]
    TooManyLeaves,
    /// KVM does not have a model-specific register that every CPU of this kind has.
    #[error("KVM refused to set model-specific register {0:#x}")]
    NoMsr(u32),
    /// KVM does not tell the clock.
    #[error("KVM does not report the guest's clock")]
    NoClock,
    /// A thread could not be started, or a signal handler not be installed.
    #[error("cannot {what}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// [`Machine::start`](super::Machine::start) was called twice.
    #[error("the machine has already been started")]
    AlreadyStarted,
    /// A pause is asked for while one is held.
    #[error("the machine is already paused")]
    AlreadyPaused,
    /// vCPUs that did not stop.
    #[error("vCPUs {vcpus:?} did not stop within {seconds} s")]
    PauseTimeout {
        /// Which, counted from 0.
        vcpus: Vec<usize>,
        /// How long they were given.
        seconds: u64,
    },
    /// A vCPU's thread is gone though nobody stopped it.
    #[error("the thread of vCPU {0} died")]
    VcpuDied(usize),
    /// A vCPU that does not exist.
    #[error("there is no vCPU {0}")]
    NoVcpu(usize),
    /// Releasing a vCPU that is not parked on an event.
    #[error("vCPU {0} is not parked on an event")]
    NotParked(usize),
}

impl MachineError {
    pub(crate) fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> MachineError {
        move |e| MachineError::Kvm { what, source: io::Error::from_raw_os_error(e.errno()) }
    }
}
