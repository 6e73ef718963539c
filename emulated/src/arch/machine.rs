//! The parameters in which emulated hosts of different architectures differ.

/// The parameters of an emulated host's machine.
#[derive(Debug)]
pub(crate) struct Machine {
    /// As in the cache's `host/NAME`.
    pub(crate) name: &'static str,
    /// As Rust calls it.
    pub(crate) target: &'static str,
    /// What is emulated, for people.
    pub(crate) virtualization: &'static str,
    pub(crate) qemu: &'static str,
    pub(crate) qemu_package: &'static str,
    pub(crate) machine: &'static str,
    pub(crate) cpu: &'static str,
    pub(crate) virtio_serial: &'static str,
    /// Modules that make `/dev/kvm`; those they need come along.
    pub(crate) modules: &'static [&'static str],
    /// The host kernel's command line.
    pub(crate) cmdline: &'static [&'static str],
    /// Whether nothing may run a guest on the first of several CPUs.
    pub(crate) first_cpu_apart: bool,
    /// What guests are told beside the rest.
    pub(crate) guest_cmdline: &'static str,
}
