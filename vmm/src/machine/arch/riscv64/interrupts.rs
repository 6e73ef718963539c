//! Interrupts of devices on their way to vCPUs.
//!
//! All are level-triggered: an `irqfd` would only ever raise the pin of KVM's APLIC, whose
//! interrupt would so be lost or never end (`kvm_arch_set_irq_inatomic` in Linux up to 7.2).
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kvm_bindings::{KVM_INTERRUPT_SET, KVM_INTERRUPT_UNSET, kvm_interrupt};
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

use super::aia::Aia;
use super::fdt::Wiring;
use crate::devices::{Harts, IrqLine, Plic};
use crate::machine::MachineError;

ioctl_iow_nr!(KVM_INTERRUPT, kvm_bindings::KVMIO, 0x86, kvm_interrupt);

/// The interrupt controllers of a machine.
pub(super) enum Interrupts {
    /// KVM's.
    Kvm(Arc<VmFd>, Aia),
    /// Ours.
    Plic(Arc<Plic>, Arc<ExternalPins>),
}

impl Interrupts {
    /// Makes them, before any vCPU.
    pub(super) fn new(vm: &Arc<VmFd>) -> Result<Interrupts, MachineError> {
        if let Some(aia) = Aia::new(vm)? {
            return Ok(Interrupts::Kvm(Arc::clone(vm), aia));
        }
        let pins = Arc::new(ExternalPins::default());
        let plic = Plic::new(Box::new(Arc::clone(&pins)));
        Ok(Interrupts::Plic(Arc::new(plic), pins))
    }

    /// The line of interrupt `irq`.
    pub(super) fn line(&self, irq: u32) -> Arc<dyn IrqLine> {
        match self {
            Interrupts::Kvm(vm, _) => {
                Arc::new(Pin { vm: Arc::clone(vm), irq, raised: Mutex::new(false) })
            }
            Interrupts::Plic(plic, _) => Arc::new(plic.line(irq)),
        }
    }

    /// The controller that is a device of ours.
    pub(super) fn plic(&self) -> Option<Arc<Plic>> {
        match self {
            Interrupts::Kvm(..) => None,
            Interrupts::Plic(plic, _) => Some(Arc::clone(plic)),
        }
    }

    /// Connects them with all vCPUs there are.
    pub(super) fn connect(&self, vcpus: &[VcpuFd]) -> Result<Wiring, MachineError> {
        match self {
            Interrupts::Kvm(_, aia) => {
                let harts = u32::try_from(vcpus.len()).unwrap_or(u32::MAX);
                Ok(Wiring::Aia { ids: aia.connect(harts)? })
            }
            Interrupts::Plic(_, pins) => {
                pins.connect(vcpus)?;
                Ok(Wiring::Plic)
            }
        }
    }
}

/// A pin of KVM's APLIC.
struct Pin {
    vm: Arc<VmFd>,
    irq: u32,
    /// Its level. Locked while it changes, so that KVM sees changes in our order.
    raised: Mutex<bool>,
}

impl Pin {
    fn set(&self, raise: bool) {
        let mut raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        if *raised == raise {
            return;
        }
        match self.vm.set_irq_line(self.irq, raise) {
            Ok(()) => *raised = raise,
            Err(e) => log::error!("interrupt {} is lost: {e}", self.irq),
        }
    }
}

impl IrqLine for Pin {
    fn assert(&self) {
        self.set(true);
    }

    fn deassert(&self) {
        self.set(false);
    }
}

/// The external interrupt pins of all vCPUs.
#[derive(Default)]
pub(super) struct ExternalPins(OnceLock<Vec<OwnedFd>>);

impl ExternalPins {
    fn connect(&self, vcpus: &[VcpuFd]) -> Result<(), MachineError> {
        let duplicate = |vcpu: &VcpuFd| {
            // SAFETY: the descriptor is `vcpu`'s, which is open.
            let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
            fd.as_fd().try_clone_to_owned()
        };
        let pins = vcpus.iter().map(duplicate).collect::<Result<_, _>>().map_err(|source| {
            MachineError::System { what: "duplicate the descriptors of vCPUs", source }
        })?;
        // Once a machine.
        let _ = self.0.set(pins);
        Ok(())
    }
}

impl Harts for Arc<ExternalPins> {
    fn count(&self) -> usize {
        self.0.get().map_or(0, Vec::len)
    }

    fn set(&self, hart: usize, raised: bool) {
        let Some(vcpu) = self.0.get().and_then(|pins| pins.get(hart)) else { return };
        let irq = if raised { KVM_INTERRUPT_SET } else { KVM_INTERRUPT_UNSET };
        let interrupt = kvm_interrupt { irq: irq.cast_unsigned() };
        // SAFETY: the descriptor is a vCPU's, and KVM only reads the structure. Other threads than
        // the vCPU's may do this: it is one of the requests for which KVM takes no lock.
        let result = unsafe { ioctl_with_ref(vcpu, KVM_INTERRUPT(), &interrupt) };
        if result != 0 {
            log::error!("an interrupt is lost: {}", std::io::Error::last_os_error());
        }
    }
}
