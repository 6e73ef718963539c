//! The end of the trace, which may come before that of the guest. It waits for outputs, for a while;
//! the guest and its tripwires do not wait for it.

use super::controller::{Controller, Output};
use super::latency::{LastLatencies, LastPage};
use super::vm::Vm;
use super::{Closing, SessionError};
use crate::deadline;
use crate::relay::{self, Ending, Relay, Setup, Targets};
use crate::serve::{Answer, Hub, Patience, Reply, Resolve, Sink, Unwritten};
use crate::stream::{Exit, Summary};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// Who has asked for it, until they have an answer.
    reply: Option<Reply>,
    /// How often the relay has told that it goes on, and when that was seen.
    seen: (u64, Instant),
}

impl UnderWay {
    /// Whether the relay goes on.
    fn goes_on(&mut self) -> bool {
        let beats = self.ending.beats();
        if beats != self.seen.0 {
            self.seen = (beats, Instant::now());
        }
        self.seen.1.elapsed() < deadline::TIME
    }
}

impl TraceEnd {
    /// Whether it has begun.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }
}

impl Controller {
    /// Ends the trace; the guest goes on. The answer comes when the stream has ended.
    pub(super) fn stop(&mut self, machine: &dyn Vm, reply: Reply) {
        if self.end.begun {
            return reply.send(Err("the trace has ended".into()));
        }
        self.detach(machine);
        self.begin_end(machine, Exit::Stopped, Patience::WANTED, reply);
    }

    /// Drains what is left and ends the stream, once.
    fn begin_end(&mut self, machine: &dyn Vm, exit: Exit, grace: Duration, reply: Reply) {
        if std::mem::replace(&mut self.end.begun, true) {
            return;
        }
        self.summary.exit = exit;
        self.end_latency(machine);
        self.tell_unfired();
        self.tell_counted();
        self.tell_all_untold();
        let not_followed = self.not_followed();
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
                self.summary.notes.extend(self.unswitched.notes());
                self.summary.notes.extend(self.never_loaded());
                self.summary.notes.extend(not_followed);
                relay.traced(history.finish());
                let ending = relay.finish(self.summary.clone(), grace);
                let notes = self.summary.notes.len();
                let seen = (ending.beats(), Instant::now());
                self.end.under_way = Some(UnderWay { ending, notes, reply: Some(reply), seen });
            }
            Err(error) => {
                reply.send(Err(error.to_string()));
                self.end.failed = Some(error);
            }
        }
    }

    /// Where the stream goes. What has not come out there is told if the process must end.
    pub(super) fn hub(&self, machine: &dyn Vm, primary: Sink, resolve: Resolve) -> io::Result<Hub> {
        let hub = Hub::new(primary, machine.vcpus(), resolve)?;
        let unwritten = hub.primary().unwritten();
        self.deadline.set_lost(Box::new(move || {
            let Unwritten { bytes, records } = unwritten().unwrap_or_default();
            Some(format!(
                "the trace is torn: what was in the rings is lost, and {bytes} bytes after them with {records} \
                 records"
            ))
        }));
        Ok(hub)
    }

    fn untraced(&self, machine: &dyn Vm, output: Output) -> io::Result<Relay> {
        let Output { primary, joins, console, .. } = output;
        let setup = Setup {
            header: self.header(machine, 0),
            stream: self.hub(machine, primary, relay::resolver(&self.kernel, 0))?,
            joins,
            readers: Vec::new(),
            exits: Vec::new(),
            tasks: crate::tracer::Tasks::none(),
            memory: machine.shared_ram(),
            kernel: Arc::clone(&self.kernel),
            targets: Targets::default(),
            ticks: 0,
            console,
            waiting: None,
        };
        Relay::start(setup, machine.waker())
    }

    /// Takes note of the end of the stream if it comes within `time`. Whether nothing is to be
    /// waited for any more.
    pub(super) fn await_end(&mut self, time: Duration) -> bool {
        let Some(under_way) = &mut self.end.under_way else { return true };
        let Some(end) = under_way.ending.wait(time) else {
            if !under_way.goes_on()
                && let Some(reply) = under_way.reply.take()
            {
                // Nobody waits for ever; the run goes on.
                reply.send(Err("the trace does not end: its relay is stuck".into()));
            }
            return false;
        };
        let Some(UnderWay { notes, reply, .. }) = self.end.under_way.take() else { return true };
        self.deadline.set_lost(Box::new(|| None));
        reply.unwrap_or_else(Reply::nobody).send(match end {
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

    /// When it is to be looked at whether the end of the trace goes on, if somebody waits for it.
    pub(super) fn end_deadline(&self) -> Option<Instant> {
        let under_way = self.end.under_way.as_ref().filter(|end| end.reply.is_some())?;
        under_way.seen.1.checked_add(deadline::TIME)
    }

    /// Ends the stream if it has not ended, and tells how the run went, what the primary output
    /// did not take, and what was made of latencies. `stop` is asked while that takes time.
    ///
    /// # Errors
    /// When the primary output fails.
    pub(super) fn finish(
        mut self,
        machine: &dyn Vm,
        exit: Exit,
        closing: Closing,
        mut stop: impl FnMut() -> bool,
    ) -> Result<(Summary, Unwritten, Option<LastLatencies>), SessionError> {
        let Closing { run_status, notes } = closing;
        self.summary.run_status = run_status;
        self.summary.notes.extend(notes);
        let wanted = matches!(exit, Exit::Stopped | Exit::Timeout);
        let grace = if wanted { Patience::WANTED } else { Patience::BY_ITSELF };
        self.deadline.begin("the relay's thread, or an output of the trace,", deadline::TIME);
        self.begin_end(machine, exit, grace, Reply::nobody());
        let mut patient = !wanted;
        let mut seen = None;
        while !self.await_end(LOOK) {
            // It waits for outputs as long as they have time, and tells so.
            let beats = self.end.under_way.as_ref().map(|end| end.ending.beats());
            if std::mem::replace(&mut seen, beats) != beats {
                self.deadline.renew();
            }
            if patient && stop() {
                patient = false;
                self.end.under_way.iter().for_each(|under_way| under_way.ending.hurry());
            }
        }
        match self.end.failed {
            Some(error) => Err(SessionError::Stream(error)),
            // A trace that was stopped has ended earlier than the guest.
            None => {
                let latencies = self.last_page.map(LastPage::take);
                Ok((Summary { exit, run_status, ..self.summary }, self.end.unwritten, latencies))
            }
        }
    }
}

fn stopped(unwritten: Unwritten) -> Answer {
    if unwritten.bytes == 0 {
        return Ok("the trace has ended".into());
    }
    Err(format!("the trace has ended, but {unwritten}"))
}
