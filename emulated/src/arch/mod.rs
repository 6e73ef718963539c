//! Differences between emulated hosts, one file of data for each architecture.

mod machine;
mod riscv64;
mod x86_64;

use vmtrace_kernel::Arch;

pub(crate) use machine::Machine;

/// An architecture that an emulated host can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostArch {
    /// x86-64 with AMD-V.
    X86_64,
    /// riscv64 with the hypervisor extension.
    Riscv64,
}

impl HostArch {
    pub(crate) fn machine(self) -> &'static Machine {
        match self {
            Self::X86_64 => &x86_64::MACHINE,
            Self::Riscv64 => &riscv64::MACHINE,
        }
    }

    /// All there are.
    pub const ALL: [Self; 2] = [Self::X86_64, Self::Riscv64];

    /// That of this machine.
    #[must_use]
    pub fn native() -> Self {
        let name = std::env::consts::ARCH;
        Self::ALL.into_iter().find(|arch| arch.name() == name).unwrap_or(Self::X86_64)
    }

    /// Whether it is that of this machine.
    #[must_use]
    pub fn is_native(self) -> bool {
        self == Self::native()
    }

    /// That which a kernel is for.
    #[must_use]
    pub fn of(kernel: Arch) -> Self {
        match kernel {
            Arch::X86_64 => Self::X86_64,
            Arch::Riscv64 => Self::Riscv64,
        }
    }

    /// As Linux and Rust call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.machine().name
    }

    /// What to put on the command line of guests in an emulated host, before what the user says.
    #[must_use]
    pub fn guest_cmdline(self) -> &'static str {
        self.machine().guest_cmdline
    }
}
