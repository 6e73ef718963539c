//! What a run needs of its machine: a real one has KVM ([`Kvm`]), tests have others.

use crate::machine::{
    Detour, Diverted, Event, ExitObserver, Machine, MachineError, Registers, Room,
};
use crate::sandbox::{self, Thread};
use crate::tracer::{Guest, Ram, annex};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use vm_memory::GuestMemoryMmap;

/// Wakes a controller that waits for events.
pub type Wake = Box<dyn Fn() + Send>;

/// A machine whose kernel is loaded. As [`Machine`], where each of these is described.
pub trait Vm {
    /// The guest's RAM.
    fn ram(&self) -> &dyn Guest;
    /// The same, for another thread.
    fn shared_ram(&self) -> Box<dyn Guest + Send>;
    /// See [`Machine::annex`].
    fn annex(&self) -> Option<Arc<dyn annex::Memory>>;
    /// See [`Machine::vcpus`].
    fn vcpus(&self) -> usize;
    /// See [`Machine::clock_hz`].
    fn clock_hz(&self) -> u64;
    /// See [`Machine::observe_exits`].
    fn observe_exits(&mut self, observers: Vec<Box<dyn ExitObserver>>);
    /// Starts the vCPUs; the calling thread is the one that attends to them.
    ///
    /// # Errors
    /// As [`Machine::start`].
    fn start(&mut self) -> Result<(), MachineError>;
    /// See [`Machine::events`].
    fn events(&self) -> &Receiver<Event>;
    /// See [`Machine::waker`].
    fn waker(&self) -> Wake;
    /// See [`Machine::awake`].
    fn awake(&self);
    /// See [`Machine::pause`].
    ///
    /// # Errors
    /// As there.
    fn pause(&self) -> Result<Paused<'_>, MachineError>;
    /// See [`Machine::release`].
    ///
    /// # Errors
    /// As there.
    fn release(&self, vcpu: usize) -> Result<(), MachineError>;
    /// See [`Machine::watch_again`].
    ///
    /// # Errors
    /// As there.
    fn watch_again(&self) -> Result<bool, MachineError>;
    /// See [`Machine::room`].
    fn room(&self) -> Arc<Room>;
    /// See [`Machine::console_is_no_witness`].
    fn console_is_no_witness(&self);
    /// See [`Machine::console_is_witness`].
    fn console_is_witness(&self);
    /// See [`Machine::kernel_has_panicked`].
    fn kernel_has_panicked(&self) -> Option<String>;
}

/// All vCPUs of a machine are stopped until this is dropped. As [`crate::machine::Paused`], where each of
/// these is described.
#[allow(missing_docs, clippy::missing_errors_doc, reason = "described there")]
pub trait Stopped {
    fn vcpus(&self) -> usize;
    fn registers(&self, vcpu: usize) -> Result<Registers, MachineError>;
    fn is_stopped(&self, vcpu: usize) -> Result<bool, MachineError>;
    fn set_rip(&self, vcpu: usize, address: u64) -> Result<(), MachineError>;
    fn divert(&self, vcpu: usize, detour: &Detour) -> Result<Diverted, MachineError>;
    fn put_back(&self, vcpu: usize, diverted: &Diverted) -> Result<(), MachineError>;
    fn tsc(&self, vcpu: usize) -> Result<u64, MachineError>;
    fn arm_trap(&self, address: u64) -> bool;
    fn disarm_trap(&self, address: u64) -> bool;
    fn duration(&self) -> Duration;
}

/// See [`Stopped`].
pub struct Paused<'a>(Box<dyn Stopped + 'a>);

impl<'a> Paused<'a> {
    /// A pause that has begun.
    pub fn new(stopped: impl Stopped + 'a) -> Self {
        Self(Box::new(stopped))
    }

    /// Ends the pause; returns how long it was.
    pub fn resume(self) -> Duration {
        self.0.duration()
    }
}

impl<'a> Deref for Paused<'a> {
    type Target = dyn Stopped + 'a;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// A machine by KVM.
pub(super) struct Kvm {
    machine: Machine,
    ram: Ram<GuestMemoryMmap>,
}

impl Kvm {
    pub(super) fn new(machine: Machine) -> Self {
        let ram = Ram(machine.memory().clone());
        Self { machine, ram }
    }

    /// Stops it: see [`Machine::stop`].
    pub(super) fn stop(self) {
        self.machine.stop();
    }
}

impl Vm for Kvm {
    fn ram(&self) -> &dyn Guest {
        &self.ram
    }

    fn shared_ram(&self) -> Box<dyn Guest + Send> {
        Box::new(self.ram.clone())
    }

    fn annex(&self) -> Option<Arc<dyn annex::Memory>> {
        self.machine.annex().map(|annex| Arc::new(annex.clone()) as Arc<dyn annex::Memory>)
    }

    fn vcpus(&self) -> usize {
        self.machine.vcpus()
    }

    fn clock_hz(&self) -> u64 {
        self.machine.clock_hz()
    }

    fn observe_exits(&mut self, observers: Vec<Box<dyn ExitObserver>>) {
        self.machine.observe_exits(observers);
    }

    fn start(&mut self) -> Result<(), MachineError> {
        // Everything is open that this thread needs but what the sandbox was told of.
        self.machine.start(|| sandbox::enter(Thread::Controller))
    }

    fn events(&self) -> &Receiver<Event> {
        self.machine.events()
    }

    fn waker(&self) -> Wake {
        let waker = self.machine.waker();
        Box::new(move || waker.wake())
    }

    fn awake(&self) {
        self.machine.awake();
    }

    fn pause(&self) -> Result<Paused<'_>, MachineError> {
        self.machine.pause().map(Paused::new)
    }

    fn release(&self, vcpu: usize) -> Result<(), MachineError> {
        self.machine.release(vcpu)
    }

    fn watch_again(&self) -> Result<bool, MachineError> {
        self.machine.watch_again()
    }

    fn room(&self) -> Arc<Room> {
        self.machine.room()
    }

    fn console_is_no_witness(&self) {
        self.machine.console_is_no_witness();
    }

    fn console_is_witness(&self) {
        self.machine.console_is_witness();
    }

    fn kernel_has_panicked(&self) -> Option<String> {
        self.machine.kernel_has_panicked()
    }
}

impl Stopped for crate::machine::Paused<'_> {
    fn vcpus(&self) -> usize {
        self.vcpus()
    }

    fn registers(&self, vcpu: usize) -> Result<Registers, MachineError> {
        self.registers(vcpu)
    }

    fn is_stopped(&self, vcpu: usize) -> Result<bool, MachineError> {
        self.is_stopped(vcpu)
    }

    fn set_rip(&self, vcpu: usize, address: u64) -> Result<(), MachineError> {
        self.set_rip(vcpu, address)
    }

    fn divert(&self, vcpu: usize, detour: &Detour) -> Result<Diverted, MachineError> {
        self.divert(vcpu, detour)
    }

    fn put_back(&self, vcpu: usize, diverted: &Diverted) -> Result<(), MachineError> {
        self.put_back(vcpu, diverted)
    }

    fn tsc(&self, vcpu: usize) -> Result<u64, MachineError> {
        self.tsc(vcpu)
    }

    fn arm_trap(&self, address: u64) -> bool {
        self.arm_trap(address)
    }

    fn disarm_trap(&self, address: u64) -> bool {
        self.disarm_trap(address)
    }

    fn duration(&self) -> Duration {
        self.duration()
    }
}
