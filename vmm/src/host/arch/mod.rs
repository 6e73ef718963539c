//! What differs between emulated hosts of different architectures: one file of data each.

mod x86_64;

/// The machine an emulated host is.
#[derive(Debug)]
pub(super) struct Machine {
    /// As in the cache's `host/NAME`.
    pub(super) name: &'static str,
    /// What is emulated, for people.
    pub(super) virtualization: &'static str,
    pub(super) qemu: &'static str,
    pub(super) qemu_package: &'static str,
    pub(super) machine: &'static str,
    pub(super) cpu: &'static str,
    pub(super) virtio_serial: &'static str,
    /// Modules that make `/dev/kvm`; those they need come along.
    pub(super) modules: &'static [&'static str],
    /// The host kernel's command line.
    pub(super) cmdline: &'static [&'static str],
}

/// An architecture that an emulated host can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostArch {
    /// x86-64 with AMD-V.
    #[default]
    X86_64,
}

impl HostArch {
    pub(super) fn machine(self) -> &'static Machine {
        match self {
            Self::X86_64 => &x86_64::MACHINE,
        }
    }
}
