//! The riscv64 emulated host: a hart with the hypervisor extension and the AIA.

use super::machine::Machine;

pub(super) static MACHINE: Machine = Machine {
    name: "riscv64",
    target: "riscv64gc-unknown-linux-gnu",
    virtualization: "RISC-V with the H extension",
    qemu: "qemu-system-riscv64",
    qemu_package: "qemu-system-riscv",
    // An IMSIC has room for so many guests' interrupts; KVM emulates those of further vCPUs.
    machine: "virt,aia=aplic-imsic,aia-guests=3",
    // 5-level paging makes every emulated page walk longer, guests' most of all.
    cpu: "rv64,h=true,sv57=off",
    virtio_serial: "virtio-serial-pci",
    modules: &["kvm"],
    cmdline: &[
        "console=ttyS0",
        "quiet",
        // A dead host must end QEMU (with -no-reboot), not wait for somebody.
        "panic=-1",
        "oops=panic",
        // An emulated CPU may stand still for as long as the machine below pleases.
        "nowatchdog",
        "rcupdate.rcu_cpu_stall_suppress=1",
        // Start-up time: nothing here has secrets or hostile neighbours.
        "cryptomgr.notests",
        "initcall_blacklist=jent_mod_init",
        "init_on_alloc=0",
        "mitigations=off",
        "audit=0",
    ],
    first_cpu_apart: false,
    // As on x86-64.
    guest_cmdline: "cryptomgr.notests watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120",
};
