//! The interrupt controllers that KVM has where the host's processor has them: an APLIC for wired
//! interrupts, which sends messages, and an IMSIC for each hart, which gets them.
#![allow(unsafe_code)]

use kvm_bindings::{
    KVM_DEV_RISCV_AIA_ADDR_APLIC, KVM_DEV_RISCV_AIA_CONFIG_HART_BITS, KVM_DEV_RISCV_AIA_CONFIG_IDS,
    KVM_DEV_RISCV_AIA_CONFIG_SRCS, KVM_DEV_RISCV_AIA_CTRL_INIT, KVM_DEV_RISCV_AIA_GRP_ADDR,
    KVM_DEV_RISCV_AIA_GRP_CONFIG, KVM_DEV_RISCV_AIA_GRP_CTRL, KVM_DEV_RISCV_IMSIC_SIZE,
    kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_RISCV_AIA,
};
use kvm_ioctls::{DeviceFd, VmFd};

use super::layout;
use crate::machine::MachineError;

/// All of them.
pub(super) struct Aia(DeviceFd);

impl Aia {
    /// Makes them, before any vCPU; `None` where the host has none.
    pub(super) fn new(vm: &VmFd) -> Result<Option<Aia>, MachineError> {
        let mut device =
            kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_RISCV_AIA, fd: 0, flags: 0 };
        match vm.create_device(&mut device) {
            Ok(device) => Ok(Some(Aia(device))),
            Err(e) if e.errno() == libc::ENODEV => Ok(None),
            Err(e) => Err(MachineError::kvm("make interrupt controllers")(e)),
        }
    }

    /// Puts them into place once all `harts` vCPUs exist. Returns how many messages an IMSIC knows.
    pub(super) fn connect(&self, harts: u32) -> Result<u32, MachineError> {
        let config = |attribute, value: u32| {
            self.set(KVM_DEV_RISCV_AIA_GRP_CONFIG, u64::from(attribute), &value)
        };
        config(KVM_DEV_RISCV_AIA_CONFIG_SRCS, layout::LAST_IRQ)?;
        config(KVM_DEV_RISCV_AIA_CONFIG_HART_BITS, hart_bits(harts))?;
        let address = |attribute: u32, address: u64| {
            self.set(KVM_DEV_RISCV_AIA_GRP_ADDR, u64::from(attribute), &address)
        };
        address(KVM_DEV_RISCV_AIA_ADDR_APLIC, layout::APLIC)?;
        for hart in 0..harts {
            let imsic = layout::IMSIC + u64::from(hart * KVM_DEV_RISCV_IMSIC_SIZE);
            // 0 is the APLIC's.
            address(1 + hart, imsic)?;
        }
        self.set(KVM_DEV_RISCV_AIA_GRP_CTRL, KVM_DEV_RISCV_AIA_CTRL_INIT.into(), &())?;
        self.ids()
    }

    fn set<T>(&self, group: u32, attribute: u64, value: &T) -> Result<(), MachineError> {
        let attr = kvm_device_attr {
            group,
            attr: attribute,
            addr: std::ptr::from_ref(value) as u64,
            flags: 0,
        };
        self.0.set_device_attr(&attr).map_err(MachineError::kvm("set up interrupt controllers"))
    }

    fn ids(&self) -> Result<u32, MachineError> {
        let mut ids = 0_u32;
        let mut attr = kvm_device_attr {
            group: KVM_DEV_RISCV_AIA_GRP_CONFIG,
            attr: KVM_DEV_RISCV_AIA_CONFIG_IDS.into(),
            addr: (&raw mut ids) as u64,
            flags: 0,
        };
        // SAFETY: KVM writes a u32 for this attribute (kvm_riscv_aia.c, aia_get_attr), to `ids`,
        // which lives until the call is over.
        unsafe { self.0.get_device_attr(&mut attr) }
            .map_err(MachineError::kvm("describe its interrupt controllers"))?;
        Ok(ids)
    }
}

/// Bits of a hart's number that are part of its IMSIC's address; KVM wants one at least.
fn hart_bits(harts: u32) -> u32 {
    u32::BITS - harts.saturating_sub(1).max(1).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hart_has_its_number() {
        let bits = [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)];
        assert!(bits.iter().all(|&(harts, bits)| hart_bits(harts) == bits));
    }
}
