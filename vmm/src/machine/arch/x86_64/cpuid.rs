//! What a guest's CPUs say they are: what KVM can do, without what a guest could not use, and with
//! a topology of one package with as many cores as there are vCPUs.

use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2,
};
use kvm_ioctls::{Cap, Kvm};

use crate::machine::MachineError;

/// The CPUID leaves of vCPU `id` of `count`.
pub(super) fn leaves(kvm: &Kvm, id: u8, count: u8) -> Result<CpuId, MachineError> {
    let what = "report what CPUs it offers";
    let supported =
        kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(MachineError::kvm(what))?;
    let deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    let mut leaves = adapt(supported.as_slice(), id, count, deadline);
    if is_tcg() {
        hide_pv_eoi(&mut leaves);
    }
    CpuId::from_entries(&leaves).map_err(|_| MachineError::TooManyLeaves)
}

/// Whether guests can map memory by pages of 1 GiB, up to this guest-physical address.
///
/// # Errors
/// When they cannot, or KVM does not say.
pub(in crate::machine) fn check_far(kvm: &Kvm, end: u64) -> Result<(), MachineError> {
    let what = "report what CPUs it offers";
    let supported =
        kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(MachineError::kvm(what))?;
    reaches(supported.as_slice(), end)
}

fn reaches(supported: &[kvm_cpuid_entry2], end: u64) -> Result<(), MachineError> {
    const FEATURES: u32 = 0x8000_0001;
    const PAGES_OF_1G: u32 = 1 << 26;
    const SIZES: u32 = 0x8000_0008;
    let leaf = |function| supported.iter().find(|leaf| leaf.function == function);
    if leaf(FEATURES).is_none_or(|leaf| leaf.edx & PAGES_OF_1G == 0) {
        return Err(MachineError::FarPages("pages of 1 GiB (pdpe1gb)"));
    }
    // Without that leaf a CPU has 36 bits.
    let bits = leaf(SIZES).map_or(36, |leaf| leaf.eax & 0xff);
    if end.checked_shr(bits).is_some_and(|above| above > 0) {
        return Err(MachineError::FarPages("more physical address bits"));
    }
    Ok(())
}

fn set_bits(register: &mut u32, from: u32, count: u32, value: u32) {
    let mask = (1_u32 << count) - 1;
    *register = *register & !(mask << from) | (value & mask) << from;
}

/// Whether the CPU here is emulated by QEMU (it says so in its hypervisor leaf).
fn is_tcg() -> bool {
    const HYPERVISOR: u32 = 0x4000_0000;
    let leaf = core::arch::x86_64::__cpuid(HYPERVISOR);
    [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).as_flattened() == b"TCGTCGTCGTCG"
}

/// Makes guests end interrupts by an exit (KVM_FEATURE_PV_EOI, Documentation/virt/kvm/x86/cpuid.rst).
///
/// QEMU's `VMRUN` leaves the vector that it injects in `exception_index`, up to the next exit or
/// exception of the guest. When the CPU is kicked or its instruction budget ends before that, the
/// interrupt is delivered a second time, whatever the guest's IF says (seen in QEMU 10.0: handlers
/// nested in themselves, which deadlock on their own locks). An exit soon after every delivery
/// leaves little time for that.
fn hide_pv_eoi(leaves: &mut [kvm_cpuid_entry2]) {
    const KVM_FEATURES: u32 = 0x4000_0001;
    const PV_EOI: u32 = 6;
    for leaf in leaves.iter_mut().filter(|leaf| leaf.function == KVM_FEATURES) {
        set_bits(&mut leaf.eax, PV_EOI, 1, 0);
    }
}

fn adapt(
    supported: &[kvm_cpuid_entry2],
    id: u8,
    count: u8,
    deadline: bool,
) -> Vec<kvm_cpuid_entry2> {
    let (id, count) = (u32::from(id), u32::from(count));
    // Bits of an APIC ID that tell the core within the package.
    let bits = count.next_power_of_two().trailing_zeros();
    let slots = 1 << bits;
    let max = supported.iter().find(|e| e.function == 0).map_or(0, |e| e.eax);
    let topology = [0xb, 0x1f];
    let mut leaves: Vec<_> =
        supported.iter().filter(|e| !topology.contains(&e.function)).copied().collect();
    for leaf in &mut leaves {
        match (leaf.function, leaf.index) {
            (1, _) => {
                set_bits(&mut leaf.ebx, 24, 8, id);
                set_bits(&mut leaf.ebx, 16, 8, slots.min(255));
                set_bits(&mut leaf.ebx, 8, 8, 8); // CLFLUSH of 64 bytes
                set_bits(&mut leaf.ecx, 24, 1, u32::from(deadline)); // not told, depends on the APIC
                set_bits(&mut leaf.ecx, 31, 1, 1); // hypervisor
                set_bits(&mut leaf.edx, 28, 1, u32::from(count > 1)); // HTT: more than one ID
            }
            // Caches: the last level belongs to all, the others to a core.
            (4 | 0x8000_001d, _) if leaf.eax & 0x1f != 0 => {
                let shared = leaf.eax >> 5 & 7 >= 3;
                set_bits(&mut leaf.eax, 14, 12, if shared { slots - 1 } else { 0 });
                if leaf.function == 4 {
                    set_bits(&mut leaf.eax, 26, 6, (slots - 1).min(63));
                }
            }
            // FRED: event delivery without the IDT and LSTAR, by which the slide is found.
            (7, 1) => set_bits(&mut leaf.eax, 17, 1, 0),
            (0x8000_0008, _) => {
                set_bits(&mut leaf.ecx, 0, 8, count - 1);
                set_bits(&mut leaf.ecx, 12, 4, bits);
            }
            (0x8000_001e, _) => {
                (leaf.eax, leaf.ebx, leaf.ecx) = (id, id, 0);
            }
            // Memory encryption, which this machine has not; a topology that is not ours.
            (0x8000_001f | 0x8000_0026, _) => {
                (leaf.eax, leaf.ebx, leaf.ecx, leaf.edx) = (0, 0, 0, 0);
            }
            _ => {}
        }
    }
    let levels = [(0, 1, 1 << 8), (bits, count, 2 << 8), (0, 0, 0)];
    for function in topology.into_iter().filter(|function| *function <= max) {
        for (index, (shift, cpus, kind)) in (0..).zip(levels) {
            leaves.push(kvm_cpuid_entry2 {
                function,
                index,
                flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                eax: shift,
                ebx: cpus,
                ecx: kind | index,
                edx: id,
                ..Default::default()
            });
        }
    }
    leaves
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supported() -> Vec<kvm_cpuid_entry2> {
        let leaf = |function, index, eax| kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx: 0xffff_ffff,
            ecx: 0xffff_ffff,
            edx: 0xffff_ffff,
            ..Default::default()
        };
        vec![
            leaf(0, 0, 0x1f),
            leaf(1, 0, 0),
            leaf(4, 0, 0x21),
            leaf(4, 1, 0x63),
            leaf(4, 2, 0),
            leaf(7, 1, 0xffff_ffff),
            leaf(0xb, 0, 0),
            leaf(0x8000_0008, 0, 0),
            leaf(0x8000_001e, 0, 0),
            leaf(0x8000_001f, 0, 3),
        ]
    }

    fn find(leaves: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        let mut found = leaves.iter().filter(|e| e.function == function && e.index == index);
        let leaf = *found.next().unwrap();
        assert!(found.next().is_none());
        leaf
    }

    #[test]
    fn topology_is_one_package_of_cores() {
        for (count, bits) in [(1, 0), (2, 1), (3, 2), (8, 3), (255, 8)] {
            for id in [0, count - 1] {
                let leaves = adapt(&supported(), id, count, true);
                assert_eq!(find(&leaves, 1, 0).ebx >> 24, u32::from(id));
                for function in [0xb, 0x1f] {
                    let smt = find(&leaves, function, 0);
                    assert_eq!((smt.eax, smt.ebx, smt.ecx), (0, 1, 0x100));
                    let core = find(&leaves, function, 1);
                    assert_eq!((core.eax, core.ebx, core.ecx), (bits, u32::from(count), 0x201));
                    assert_eq!((smt.edx, core.edx), (u32::from(id), u32::from(id)));
                }
                assert_eq!(find(&leaves, 4, 0).eax >> 14 & 0xfff, 0);
                assert_eq!(find(&leaves, 4, 1).eax >> 14 & 0xfff, (1 << bits) - 1);
                assert_eq!(find(&leaves, 4, 2).eax, 0);
                assert_eq!(find(&leaves, 0x8000_0008, 0).ecx & 0xff, u32::from(count) - 1);
                assert_eq!(find(&leaves, 0x8000_0008, 0).ecx >> 12 & 15, bits);
                assert_eq!(find(&leaves, 0x8000_001e, 0).eax, u32::from(id));
            }
        }
    }

    #[test]
    fn what_would_hurt_is_hidden() {
        let leaves = adapt(&supported(), 0, 1, false);
        assert_eq!(find(&leaves, 7, 1).eax & 1 << 17, 0);
        assert_eq!(find(&leaves, 1, 0).ecx & 1 << 24, 0);
        assert_eq!(find(&leaves, 1, 0).ecx & 1 << 31, 1 << 31);
        assert_eq!(find(&leaves, 1, 0).edx & 1 << 28, 0);
        assert_eq!(find(&leaves, 0x8000_001f, 0).eax, 0);
        assert_eq!(find(&adapt(&supported(), 0, 1, true), 1, 0).ecx & 1 << 24, 1 << 24);
    }

    #[test]
    fn interrupts_end_by_an_exit() {
        let mut leaves = vec![kvm_cpuid_entry2 {
            function: 0x4000_0001,
            eax: 0xffff_ffff,
            ..Default::default()
        }];
        hide_pv_eoi(&mut leaves);
        assert_eq!(leaves[0].eax, 0xffff_ffbf);
    }

    #[test]
    fn no_topology_leaf_beyond_the_highest() {
        let mut supported = supported();
        supported[0].eax = 0xd;
        let leaves = adapt(&supported, 0, 2, true);
        assert!(leaves.iter().any(|e| e.function == 0xb));
        assert!(!leaves.iter().any(|e| e.function == 0x1f));
    }

    // A guest whose page tables have a bit that its CPU reserves dies of that, and says nothing.
    #[test]
    fn far_memory_must_be_in_reach() {
        let leaf =
            |function, eax, edx| kvm_cpuid_entry2 { function, eax, edx, ..Default::default() };
        let cpu = |bits, edx| [leaf(0x8000_0001, 0, edx), leaf(0x8000_0008, bits, 0)];
        assert!(reaches(&cpu(36, 1 << 26), 1 << 33).is_ok());
        assert!(reaches(&cpu(36, 1 << 26), (1 << 36) + 1).is_err());
        assert!(reaches(&cpu(40, 0), 1 << 33).unwrap_err().to_string().contains("pdpe1gb"));
        assert!(reaches(&[], 1 << 33).is_err());
    }
}
