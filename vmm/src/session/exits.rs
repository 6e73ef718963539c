//! Exits of vCPUs: from the machine to the relay.

use super::vm::Vm;
use crate::machine::{ExitCause, ExitObserver, VcpuExit};
use crate::relay::{ExitReader, ExitWriter, exit_log};
use crate::stream::{ExitDir, ExitReason, HostExit};

/// Has the exits of all vCPUs observed, for the relay.
pub(super) fn observe(machine: &mut dyn Vm) -> Vec<ExitReader> {
    let (writers, readers): (Vec<_>, Vec<_>) = (0..machine.vcpus()).map(|_| exit_log()).unzip();
    let observers = writers.into_iter().map(|writer| Box::new(Observer(writer)) as Box<_>);
    machine.observe_exits(observers.collect());
    readers
}

struct Observer(ExitWriter);

impl ExitObserver for Observer {
    fn wants(&self) -> bool {
        self.0.is_on()
    }

    fn begins(&mut self) {
        self.0.begin();
    }

    fn exited(&mut self, exit: Option<VcpuExit>) {
        self.0.put(exit.map(|exit| told(&exit)));
    }
}

/// As the stream tells it.
fn told(exit: &VcpuExit) -> HostExit {
    let dir = |write| if write { ExitDir::Out } else { ExitDir::In };
    let (reason, dir, address) = match exit.cause {
        ExitCause::Port { port, write } => (ExitReason::Io, dir(write), port.into()),
        ExitCause::Memory { address, write } => (ExitReason::Mmio, dir(write), address),
        ExitCause::Msr { index } => (ExitReason::Msr, ExitDir::Out, index.into()),
        ExitCause::Sbi { extension } => (ExitReason::Sbi, ExitDir::None, extension),
        ExitCause::Trap => (ExitReason::Trap, ExitDir::None, 0),
        ExitCause::Full => (ExitReason::Full, ExitDir::None, 0),
        ExitCause::Kick => (ExitReason::Kick, ExitDir::None, 0),
        ExitCause::Shutdown => (ExitReason::Shutdown, ExitDir::None, 0),
        ExitCause::Error => (ExitReason::Error, ExitDir::None, 0),
        ExitCause::Other => (ExitReason::Other, ExitDir::None, 0),
    };
    let duration_ns = u64::try_from(exit.duration.as_nanos()).unwrap_or(u64::MAX);
    HostExit { ticks: exit.ticks, duration_ns, reason, dir, address }
}
