//! What the controller sees of the machine.

use super::*;

impl Vm for FakeVm {
    fn ram(&self) -> &dyn Guest {
        &self.fake
    }

    fn shared_ram(&self) -> Box<dyn Guest + Send> {
        Box::new(self.fake.ram())
    }

    fn annex(&self) -> Option<Arc<dyn Memory>> {
        Some(Arc::clone(&self.fake.annex) as Arc<dyn Memory>)
    }

    fn vcpus(&self) -> usize {
        VCPUS
    }

    fn clock_hz(&self) -> u64 {
        1_000_000_000
    }

    fn observe_exits(&mut self, _: Vec<Box<dyn ExitObserver>>) {}

    fn start(&mut self) -> Result<(), MachineError> {
        Ok(())
    }

    // Asked before each wait for an event: what came before was attended to.
    fn events(&self) -> &Receiver<Event> {
        self.advance();
        &self.events
    }

    fn waker(&self) -> Wake {
        let (sender, woken) = (self.sender.clone(), Arc::clone(&self.woken));
        Box::new(move || {
            if !woken.swap(true, Ordering::Relaxed) {
                let _ = sender.send(Event::Wake);
            }
        })
    }

    fn awake(&self) {
        self.woken.store(false, Ordering::Relaxed);
        self.state.borrow_mut().asked = false;
    }

    fn pause(&self) -> Result<Paused<'_>, MachineError> {
        let mut state = self.state.borrow_mut();
        assert!(!state.paused, "a pause in a pause");
        state.pauses += 1;
        if self.failing.borrow_mut().remove(&state.pauses) {
            return Err(MachineError::NoVcpu(usize::MAX));
        }
        state.paused = true;
        Ok(Paused::new(AllStopped(self)))
    }

    fn release(&self, vcpu: usize) -> Result<(), MachineError> {
        let mut state = self.state.borrow_mut();
        assert!(!state.paused, "released in a pause");
        let parked = state.parked[vcpu].take();
        let at = parked.unwrap_or_else(|| panic!("vCPU {vcpu} was not parked"));
        if state.registers[vcpu].rip == at && state.traps.contains(&at) {
            state.again.insert(vcpu);
        }
        state.released += 1;
        Ok(())
    }

    fn watch_again(&self) -> Result<bool, MachineError> {
        let mut state = self.state.borrow_mut();
        assert!(state.paused, "watched while vCPUs run");
        state.watches += 1;
        Ok(true)
    }

    fn room(&self) -> Arc<Room> {
        Arc::clone(&self.room)
    }

    fn console_is_no_witness(&self) {}
    fn console_is_witness(&self) {}
    fn kernel_has_panicked(&self) -> Option<String> {
        self.state.borrow_mut().printed.take()
    }
}

struct AllStopped<'a>(&'a FakeVm);

impl Drop for AllStopped<'_> {
    fn drop(&mut self) {
        let vm = self.0;
        vm.state.borrow_mut().paused = false;
        if vm.broken || std::thread::panicking() {
            return;
        }
        let trap = vm.fake.trap();
        for address in vm.traps() {
            let bytes = vm.bytes(address, trap.len());
            assert_eq!(bytes, trap, "{address:#x} is armed and holds no trap");
        }
    }
}

impl Stopped for AllStopped<'_> {
    fn vcpus(&self) -> usize {
        VCPUS
    }

    fn registers(&self, vcpu: usize) -> Result<Registers, MachineError> {
        Ok(self.0.state.borrow().registers[vcpu])
    }

    fn is_stopped(&self, _: usize) -> Result<bool, MachineError> {
        Ok(false)
    }

    fn set_rip(&self, vcpu: usize, address: u64) -> Result<(), MachineError> {
        self.0.state.borrow_mut().registers[vcpu].rip = address;
        Ok(())
    }

    fn divert(&self, vcpu: usize, detour: &Detour) -> Result<Diverted, MachineError> {
        let state = &mut *self.0.state.borrow_mut();
        assert!(state.away.is_none(), "sent away twice");
        if state.self_call == SelfCall::Refused {
            return Err(MachineError::NoVcpu(vcpu));
        }
        let registers = &mut state.registers[vcpu];
        state.away = Some((vcpu, *registers, *detour));
        (registers.rip, registers.rsp) = (detour.address, detour.stack);
        Ok(Diverted::default())
    }

    fn put_back(&self, vcpu: usize, _: &Diverted) -> Result<(), MachineError> {
        let mut state = self.0.state.borrow_mut();
        let (whose, registers, _) = state.away.take().expect("nobody was sent away");
        assert_eq!(whose, vcpu);
        state.registers[vcpu] = registers;
        Ok(())
    }

    fn tsc(&self, _: usize) -> Result<u64, MachineError> {
        let mut state = self.0.state.borrow_mut();
        state.clock += 100;
        Ok(state.clock)
    }

    fn arm_trap(&self, address: u64) -> bool {
        self.0.state.borrow_mut().traps.insert(address)
    }

    fn disarm_trap(&self, address: u64) -> bool {
        self.0.state.borrow_mut().traps.remove(&address)
    }

    fn duration(&self) -> Duration {
        Duration::from_micros(1)
    }
}
