//! The end of the trace, which may come before that of the guest. It waits for outputs, for a while;
//! the guest and its tripwires do not wait for it.

use super::attach::{Controller, Output};
use super::{Closing, SessionError};
use crate::machine::Machine;
use crate::relay::{self, Ending, Relay, Setup, Targets};
use crate::serve::{Answer, Hub, Patience, Reply, Unwritten};
use crate::stream::{Exit, Summary};
use crate::tracer::Ram;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// How often it is asked whether somebody does not want to wait any more.
const LOOK: Duration = Duration::from_millis(50);

/// How far the end of the trace has come.
#[derive(Default)]
pub(super) struct TraceEnd {
    /// It has begun.
    begun: bool,
    under_way: Option<UnderWay>,
    /// What the primary output did not take.
    unwritten: Unwritten,
    failed: Option<io::Error>,
}

struct UnderWay {
    ending: Ending,
    /// Notes of the summary that the stream ends with.
    notes: usize,
    /// Who has asked for it.
    reply: Reply,
}

impl TraceEnd {
    /// Whether it has begun.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }
}

impl Controller {
    /// Ends the trace; the guest goes on. The answer comes when the stream has ended.
    pub(super) fn stop(&mut self, machine: &Machine, reply: Reply) {
        if self.end.begun {
            return reply.send(Err("the trace has ended".into()));
        }
        self.detach(machine);
        self.begin_end(machine, Exit::Stopped, Patience::WANTED, reply);
    }

    /// Drains what is left and ends the stream, once.
    fn begin_end(&mut self, machine: &Machine, exit: Exit, grace: Duration, reply: Reply) {
        if std::mem::replace(&mut self.end.begun, true) {
            return;
        }
        self.summary.exit = exit;
        self.tell_unfired();
        self.tell_counted();
        self.tell_all_untold();
        let relay = match (self.relay.take(), self.stream.take()) {
            (Some(relay), _) => Ok(relay),
            // Never attached: the stream still says so.
            (None, Some(output)) => self.untraced(machine, output),
            (None, None) => return,
        };
        match relay {
            Ok(relay) => {
                let history = std::mem::take(&mut self.history);
                self.summary.notes.extend(history.note());
                let unseen = self.unseen_of_modules();
                self.summary.notes.extend(unseen);
                relay.traced(history.finish());
                let ending = relay.finish(self.summary.clone(), grace);
                let notes = self.summary.notes.len();
                self.end.under_way = Some(UnderWay { ending, notes, reply });
            }
            Err(error) => {
                reply.send(Err(error.to_string()));
                self.end.failed = Some(error);
            }
        }
    }

    fn untraced(&self, machine: &Machine, output: Output) -> io::Result<Relay> {
        let Output { primary, joins, console, .. } = output;
        let setup = Setup {
            header: self.header(machine, 0),
            stream: Hub::new(primary, machine.vcpus(), relay::resolver(&self.kernel, 0))?,
            joins,
            readers: Vec::new(),
            exits: Vec::new(),
            tasks: crate::tracer::Tasks::none(),
            memory: Box::new(Ram(machine.memory().clone())),
            kernel: Arc::clone(&self.kernel),
            targets: Targets::default(),
            ticks: 0,
            console,
            waiting: None,
        };
        let waker = machine.waker();
        Relay::start(setup, move || waker.wake())
    }

    /// Takes note of the end of the stream if it comes within `time`. Whether nothing is to be
    /// waited for any more.
    pub(super) fn await_end(&mut self, time: Duration) -> bool {
        let Some(under_way) = &self.end.under_way else { return true };
        let Some(end) = under_way.ending.wait(time) else { return false };
        let Some(UnderWay { notes, reply, .. }) = self.end.under_way.take() else { return true };
        reply.send(match end {
            Ok(relay::End { mut summary, unwritten }) => {
                // What has come since is not in the stream.
                let since = self.summary.notes.split_off(notes.min(self.summary.notes.len()));
                summary.notes.extend(since);
                self.summary = summary;
                self.end.unwritten = unwritten;
                stopped(unwritten)
            }
            Err(error) => {
                let text = format!("the trace cannot be written: {error}");
                self.end.failed = Some(error);
                Err(text)
            }
        });
        true
    }

    /// Ends the stream if it has not ended, and tells how the run went, and what the primary output
    /// did not take. `stop` is asked while that takes time.
    ///
    /// # Errors
    /// When the primary output fails.
    pub(super) fn finish(
        mut self,
        machine: &Machine,
        exit: Exit,
        closing: Closing,
        mut stop: impl FnMut() -> bool,
    ) -> Result<(Summary, Unwritten), SessionError> {
        let Closing { run_status, notes } = closing;
        self.summary.run_status = run_status;
        self.summary.notes.extend(notes);
        let wanted = matches!(exit, Exit::Stopped | Exit::Timeout);
        let grace = if wanted { Patience::WANTED } else { Patience::BY_ITSELF };
        self.begin_end(machine, exit, grace, Reply::nobody());
        let mut patient = !wanted;
        while !self.await_end(LOOK) {
            if patient && stop() {
                patient = false;
                self.end.under_way.iter().for_each(|under_way| under_way.ending.hurry());
            }
        }
        match self.end.failed {
            Some(error) => Err(SessionError::Stream(error)),
            // A trace that was stopped has ended earlier than the guest.
            None => Ok((Summary { exit, run_status, ..self.summary }, self.end.unwritten)),
        }
    }
}

fn stopped(unwritten: Unwritten) -> Answer {
    if unwritten.bytes == 0 {
        return Ok("the trace has ended".into());
    }
    Err(format!("the trace has ended, but {unwritten}"))
}
