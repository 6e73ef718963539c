//! The machine itself.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use kvm_ioctls::VmFd;
use vm_memory::GuestMemoryMmap;

use super::arch::{self, Platform};
use super::board::VirtioSet;
use super::control::{Control, STOP_LIMIT};
use super::lock::lock;
use super::vcpu::{self, Vcpu};
use super::{
    Annex, Config, ConsoleSinks, Event, ExitObserver, MachineError, Paused, Room, kvm, memory,
    signal,
};
use crate::devices::{Gate, SerialPort, Witness};
use crate::sandbox::{self, Thread};

/// A virtual machine: made, started, paused as often as its controller wants, stopped.
///
/// Dropping it stops it.
pub struct Machine {
    threads: Vec<JoinHandle<()>>,
    started: bool,
    pub(super) vcpus: Vec<Arc<Mutex<Vcpu>>>,
    pub(super) control: Arc<Control>,
    platform: Arc<Platform>,
    pub(super) gate: Arc<Gate>,
    events: Receiver<Event>,
    clock_hz: u64,
    watch_msr: Option<u32>,
    // Below what is needed by everything above: dropped last.
    _vm: Arc<VmFd>,
    memory: GuestMemoryMmap,
    annex: Option<Annex>,
}

impl Machine {
    /// Makes a machine with its kernel loaded and everything ready to start.
    pub fn new(mut config: Config, sinks: ConsoleSinks) -> Result<Machine, MachineError> {
        signal::install()?;
        let kvm = kvm::open_kvm()?;
        let max = kvm.get_max_vcpus();
        if config.cpus == 0 || usize::from(config.cpus) > max {
            return Err(MachineError::Cpus { asked: config.cpus, max });
        }
        let memory = memory::create_ram(config.memory)?;
        let annex = memory::create_annex(config.annex, config.far, config.memory)?;
        if let Some((start, size)) = annex.as_ref().and_then(Annex::far) {
            arch::check_far(&kvm, start + size)?;
        }
        let vm = Arc::new(kvm.create_vm().map_err(MachineError::kvm("create a machine"))?);
        memory::register(&vm, &memory, annex.as_ref())?;
        let gate = Arc::new(Gate::default());
        let (vsock, disks) = (config.vsock.take(), std::mem::take(&mut config.disks));
        let shares = std::mem::take(&mut config.shares);
        let virtio = VirtioSet { gate: Arc::clone(&gate), vsock, disks, shares };
        let platform = Arc::new(Platform::new(&vm, &memory, annex.as_ref(), sinks, virtio)?);
        let (cpus, watch_msr) = (config.cpus, config.watch_msr);
        let fds = (0..cpus)
            .map(|id| arch::create_vcpu(&kvm, &vm, id, cpus))
            .collect::<Result<Vec<_>, _>>()?;
        let boot = arch::load(&config, &memory, annex.as_ref(), &platform, &fds)?;
        // The images can be large, and are in guest memory now.
        drop(config);
        arch::start_at(&fds[0], &boot)?;
        let vcpus: Vec<_> = fds.into_iter().map(|fd| Arc::new(Mutex::new(Vcpu::new(fd)))).collect();
        if let Some(index) = watch_msr {
            platform.watch(index)?;
        }
        let clock_hz = arch::clock_hz(&lock(&vcpus[0]).fd)?;
        let (sender, events) = channel();
        let control = Arc::new(Control::new(vcpus.len(), watch_msr.is_some(), sender, STOP_LIMIT));
        Ok(Machine {
            threads: Vec::new(),
            started: false,
            vcpus,
            control,
            platform,
            gate,
            events,
            clock_hz,
            watch_msr,
            _vm: vm,
            memory,
            annex,
        })
    }

    /// The guest's RAM, without the annex. The guest may write to it at any time.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// The annex, if the machine has one.
    #[must_use]
    pub fn annex(&self) -> Option<&Annex> {
        self.annex.as_ref()
    }

    /// Number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// Rate of the clock that the guest reads (and [`Paused::tsc`] returns), in Hz.
    #[must_use]
    pub fn clock_hz(&self) -> u64 {
        self.clock_hz
    }

    /// Has the exits of each vCPU observed, in their order; before the start.
    pub fn observe_exits(&mut self, observers: impl IntoIterator<Item = Box<dyn ExitObserver>>) {
        for (vcpu, observer) in self.vcpus.iter().zip(observers) {
            lock(vcpu).exits.observe(observer);
        }
    }

    /// Starts the vCPUs. `ready` is called when each has its thread and none has run yet.
    pub fn start(&mut self, ready: impl FnOnce()) -> Result<(), MachineError> {
        if std::mem::replace(&mut self.started, true) {
            return Err(MachineError::AlreadyStarted);
        }
        let all = Arc::new(OnceLock::new());
        let made = self.make_threads(&all);
        if made.is_ok() {
            ready();
        }
        // When there are not threads for all, those that there are end with the machine.
        let _ = all.set(());
        made
    }

    /// A thread for each vCPU, which waits until `all` have one.
    fn make_threads(&mut self, all: &Arc<OnceLock<()>>) -> Result<(), MachineError> {
        for (id, vcpu) in self.vcpus.iter().enumerate() {
            let all = Arc::clone(all);
            let (vcpu, control, platform) =
                (Arc::clone(vcpu), Arc::clone(&self.control), Arc::clone(&self.platform));
            let thread = std::thread::Builder::new()
                .name(format!("{}{id}", Thread::Vcpu.name()))
                .spawn(move || {
                    lock(&vcpu).exits.starts();
                    sandbox::enter(Thread::Vcpu);
                    all.wait();
                    vcpu::run(id, &vcpu, &control, &platform);
                })
                .map_err(|source| MachineError::System { what: "start a vCPU's thread", source })?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// What the controller must see, in order.
    #[must_use]
    pub fn events(&self) -> &Receiver<Event> {
        &self.events
    }

    /// A handle that puts [`Event::Wake`] among the events, from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.control))
    }

    /// Whoever has [`Event::Wake`] looks at everything from now on: the next wake is another event.
    pub fn awake(&self) {
        self.control.awake();
    }

    /// Stops all vCPUs out of guest mode with their I/O complete.
    ///
    /// Takes as long as the slowest vCPU needs to leave the guest, at most 10 s. Works before the
    /// start and after the guest's exit as well. Fails while another pause is held.
    pub fn pause(&self) -> Result<Paused<'_>, MachineError> {
        Paused::new(self)
    }

    /// Lets a vCPU go on that is parked on an event. Inside a pause it goes on when that ends.
    pub fn release(&self, vcpu: usize) -> Result<(), MachineError> {
        self.control.release(vcpu)
    }

    /// Has the next write of the register of [`Config::watch_msr`] seen, as the first one was: the guest
    /// starts another kernel. False: none is watched. To be called in a pause.
    ///
    /// # Errors
    /// When KVM does not watch it again.
    pub fn watch_again(&self) -> Result<bool, MachineError> {
        let Some(index) = self.watch_msr else { return Ok(false) };
        // Whoever writes it before there is a filter is not seen, and nobody waits for that.
        self.control.begin_watch();
        self.platform.watch_again(index)?;
        Ok(true)
    }

    /// What vCPUs wait for that execute [`WAIT_INSTRUCTION`](super::WAIT_INSTRUCTION).
    #[must_use]
    pub fn room(&self) -> Arc<Room> {
        Arc::clone(self.control.room())
    }

    /// From now on nothing on the guest's console tells of its end: its kernel is asked itself.
    pub fn console_is_no_witness(&self) {
        let _ = self.platform.board().panic_watch().set(Witness::Nobody);
    }

    /// The guest's kernel cannot be asked any more: what its console says counts again.
    pub fn console_is_witness(&self) {
        let _ = self.platform.board().panic_watch().set(Witness::Whole);
    }

    /// The guest's kernel panics: what its console says of the end of that counts. Returns the reason that was
    /// given there, if the console was believed.
    pub fn kernel_has_panicked(&self) -> Option<String> {
        self.platform.board().panic_watch().set(Witness::EndAlone)
    }

    /// What is typed at the guest's console (ttyS0).
    #[must_use]
    pub fn serial_input(&self) -> SerialInput {
        SerialInput(self.platform.board().console())
    }

    /// The way in to the agent: the guest's second serial port (ttyS1).
    #[must_use]
    pub fn agent_input(&self) -> SerialInput {
        SerialInput(self.platform.board().agent())
    }

    /// Stops the machine and waits for its threads. What the guest has written to its console has
    /// reached the sink then, unless that is slow.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let stuck = self.control.stop();
        for (id, thread) in self.threads.drain(..).enumerate() {
            if stuck.contains(&id) {
                // It holds its own references to all it uses: let it be.
                log::error!("vCPU {id} does not stop; its thread is left behind");
            } else if thread.join().is_err() {
                log::error!("the thread of vCPU {id} panicked");
            }
        }
        self.platform.board().flush();
    }
}

/// Wakes a controller that waits for events.
#[derive(Clone)]
pub struct Waker(Arc<Control>);

impl Waker {
    /// Puts an [`Event::Wake`] among the events.
    pub fn wake(&self) {
        self.0.wake();
    }
}

/// The receiving side of a serial port of the guest.
#[derive(Clone)]
pub struct SerialInput(Arc<SerialPort>);

impl SerialInput {
    /// Sends bytes to the guest; returns how many were taken. The guest reads at its own pace;
    /// 64 KiB are kept for it, what does not fit is not taken.
    #[must_use]
    pub fn push(&self, bytes: &[u8]) -> usize {
        self.0.push(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_and_their_handles_can_change_threads() {
        fn send<T: Send>() {}
        fn share<T: Send + Sync + Clone>() {}
        send::<Machine>();
        share::<Waker>();
        share::<SerialInput>();
        share::<Annex>();
    }
}
