//! The x86-64 emulated host: AMD-V, since that is what QEMU's TCG emulates.

use super::machine::Machine;

pub(super) static MACHINE: Machine = Machine {
    name: "x86_64",
    target: "x86_64-unknown-linux-gnu",
    virtualization: "AMD-V",
    qemu: "qemu-system-x86_64",
    qemu_package: "qemu-system-x86",
    // Calibrating a timer against the HPET takes a quarter of a second, and nothing needs it.
    machine: "q35,hpet=off",
    // 5-level paging makes every emulated page walk longer, guests' most of all. Fast string instructions are not fast
    // here: kernels that know of them copy and clear memory by single bytes, each of which is an instruction.
    cpu: "max,+svm,+npt,-la57,-erms,-fsrm,-fsrs,-fzrm,-fsrc",
    virtio_serial: "virtio-serial-pci",
    modules: &["kvm-amd"],
    cmdline: &[
        "console=ttyS0",
        "quiet",
        // A dead host must end QEMU (with -no-reboot), not wait for somebody.
        "panic=-1",
        "oops=panic",
        // An emulated CPU may stand still for as long as the machine below pleases.
        "nowatchdog",
        "rcupdate.rcu_cpu_stall_suppress=1",
        "tsc=reliable",
        "no_timer_check",
        // Start-up time, measured in instructions: nothing here has secrets or hostile neighbours, and the self-tests
        // of ciphers alone were 40 % of it.
        "cryptomgr.notests",
        "initcall_blacklist=jent_mod_init",
        "init_on_alloc=0",
        "nokaslr",
        "mitigations=off",
        "random.trust_cpu=on",
        "audit=0",
    ],
    // QEMU 10 (target/i386/tcg, cpu_clear_ignne): each load of an FPU's state, on any CPU, rewrites the flags of
    // the first CPU and may undo what that one changes at the time: a VMRUN there turns nested paging on, and with
    // that lost the guest runs in its host's memory. One of six guests died, hung or took its host along.
    first_cpu_apart: true,
    // Clocks are as good as the emulation, whatever their watchdog finds; that of Linux 7.2 can wait with interrupts
    // off for a CPU that waits in stop_machine for this one. Self-tests of ciphers are a third of a guest's boot.
    // Watchdogs wait as long as they can: what they have is made for processors, and emulation takes 50 times as long.
    guest_cmdline: "tsc=reliable cryptomgr.notests watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120",
};
