//! Times in which vCPUs did not run: from the machine to the relay.

use super::vm::Vm;
use crate::machine::{ExitCause, ExitObserver, Preemption, Preemptions, VcpuExit};
use crate::relay::{ExitReader, ExitWriter, HostTimes, Scheduled, exit_log, nanoseconds};
use crate::stream::{ExitDir, ExitReason, HostExit};
use std::io::{Error, ErrorKind};
use std::time::Instant;

/// Has the exits of all vCPUs observed, for the relay. If the host does not tell when it runs others in
/// place of a vCPU, why.
pub(super) fn observe(machine: &mut dyn Vm) -> (Vec<ExitReader>, Option<String>) {
    let refused = Preemptions::of_this_thread().err();
    let (writers, readers): (Vec<_>, Vec<_>) = (0..machine.vcpus()).map(|_| exit_log()).unzip();
    let asks = refused.is_none();
    let observers = writers.into_iter().map(|writer| Box::new(Observer { writer, asks }) as Box<_>);
    machine.observe_exits(observers.collect());
    (readers, refused.map(|why| not_told(&why)))
}

fn not_told(why: &Error) -> String {
    let remedy = match why.kind() {
        ErrorKind::PermissionDenied => {
            " (sysctl kernel.perf_event_paranoid=2 permits it, unless a container forbids it)"
        }
        _ => "",
    };
    format!(
        "the time in which the host runs others in place of a vCPU is not known: perf_event_open: \
         {why}{remedy}"
    )
}

/// Tells the relay what its vCPU's thread does.
struct Observer {
    writer: ExitWriter,
    /// Whether it asks for preemptions.
    asks: bool,
}

impl ExitObserver for Observer {
    fn starts(&mut self) {
        if !self.asks {
            return;
        }
        let own = Preemptions::of_this_thread().map_err(|why| not_told(&why));
        self.writer.scheduler(own.map(|mut own| Box::new(move || own.next().map(scheduled)) as _));
    }

    fn wants(&self) -> bool {
        self.writer.is_on()
    }

    fn left(&mut self, since: Instant) {
        self.writer.left(since);
    }

    fn begins(&mut self) {
        self.writer.begin();
    }

    fn exited(&mut self, exit: Option<VcpuExit>) {
        let times = exit.as_ref().map(|exit| HostTimes {
            out: (exit.since, exit.since + exit.duration),
            read: exit.read,
        });
        self.writer.put_with(exit.map(|exit| told(&exit)), times);
    }
}

fn scheduled(preemption: Preemption) -> Scheduled {
    match preemption {
        Preemption::Of(from, until) => Scheduled::Preempted { from, until },
        Preemption::Unknown => Scheduled::Unknown,
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
    HostExit { ticks: exit.ticks, duration_ns: nanoseconds(exit.duration), reason, dir, address }
}
