//! Latencies that are measured while the guest runs. Their events are traced meanwhile. A separate
//! thread evaluates the stream as a reader would (`analyze/latency`); nothing waits for it.

use super::controller::{Controller, Stage};
use super::events::{add_events, events, is_meant};
use super::vm::Vm;
use crate::analyze::latency::{EventsOf, Kind, Latency, Report};
use crate::export::Player;
use crate::serve::{Answer, Look, Reply, Watch};
use crate::stream::MarkKind;
use std::io;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use vmtrace_trampolines::Overflow;

/// Longest page that is an answer, bytes: clients read a MiB at most.
const LONGEST: usize = 700 << 10;

/// What is measured now.
pub(super) struct Measured {
    kind: Kind,
    watch: Watch,
    /// Events (by their addresses) that are traced on this account alone.
    added: Vec<u64>,
}

impl Measured {
    /// Whether it is made of the event with this full name.
    fn needs(&self, name: &str) -> bool {
        self.kind.events().iter().any(|of| is_meant(of.pattern, name))
    }
}

/// Latencies that were measured when the trace ended.
pub(super) struct LastPage {
    kind: Kind,
    page: Receiver<Answer>,
}

/// What was made of latencies that were measured when the trace ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastLatencies {
    /// `irqsoff`, `wakeup` and so on.
    pub kind: &'static str,
    /// The page, as text, or why there is none.
    pub page: Result<String, String>,
}

impl LastPage {
    /// What there is once the stream has ended.
    pub(super) fn take(self) -> LastLatencies {
        let Self { kind, page } = self;
        let answer = page.try_recv().unwrap_or_else(|_| {
            Err("the stream was not evaluated in time when the trace ended".to_owned())
        });
        let page = answer.and_then(|line| {
            serde_json::from_str(&line).map_err(|error| format!("the page is damaged: {error}"))
        });
        LastLatencies { kind: kind.name(), page }
    }
}

/// What makes latencies of the stream.
struct Looking {
    player: Player<Latency>,
    failed: Option<String>,
}

impl Look for Looking {
    fn push(&mut self, bytes: &[u8]) {
        if self.failed.is_none()
            && let Err(error) = self.player.push(bytes)
        {
            self.failed = Some(error.to_string());
        }
    }

    fn seen(&self) -> u64 {
        self.player.watermark()
    }

    fn tell(&mut self, json: bool, behind: bool) -> Answer {
        if let Some(error) = &self.failed {
            return Err(format!("latencies could not be measured from the stream: {error}"));
        }
        let mut report = self.player.export().so_far(self.player.late());
        report.behind = behind;
        let page = if json { lines(report) } else { text(&report) };
        let page = page.map_err(|error| error.to_string())?;
        serde_json::to_string(&page).map_err(|error| error.to_string())
    }
}

/// Lines of JSON; of the episodes that are listed as many of the newest as fit.
fn lines(mut report: Report) -> io::Result<String> {
    loop {
        let mut out = Vec::new();
        report.write_json(&mut out)?;
        if out.len() <= LONGEST || report.listed.is_empty() {
            return Ok(String::from_utf8_lossy(&out).into_owned());
        }
        let oldest = report.listed.len().div_ceil(2);
        report.listed.drain(..oldest);
        report.unlisted += oldest as u64;
    }
}

/// The page, or as many lines of it as fit.
fn text(report: &Report) -> io::Result<String> {
    let mut out = Vec::new();
    report.write_text(&mut out)?;
    if out.len() > LONGEST {
        let end = out.iter().take(LONGEST).rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        out.truncate(end);
        out.extend(b"(the rest is too long for an answer)\n");
    }
    Ok(String::from_utf8_lossy(&out).into_owned())
}

impl Controller {
    /// Measures latencies of this kind from now on; those of at least `over` nanoseconds are listed.
    pub(super) fn start_latency(
        &mut self,
        machine: &dyn Vm,
        kind: Kind,
        over: Option<u64>,
    ) -> Answer {
        let name = kind.name();
        if let Some(measured) = &self.latency {
            return Err(format!(
                "{} is measured already, and only one kind can be at a time: use \
                 latency stop first",
                measured.kind.name()
            ));
        }
        self.can_measure(name)?;
        let before = self.tracing.events.clone();
        let notes = match self.add_those_of(kind) {
            Ok(notes) => notes,
            Err(error) => {
                self.tracing.events = before;
                return Err(error);
            }
        };
        let known = |address: u64| before.iter().any(|event| event.address == address);
        let all = self.tracing.events.iter().map(|event| event.address);
        let added: Vec<u64> = all.filter(|&address| !known(address)).collect();
        // Before its events are traced: it sees them all.
        let watch = self.look_at_the_stream(machine, kind, over);
        let done = watch.and_then(|watch| {
            self.watch_now(machine)?;
            self.tracing_changed();
            let text = format!("latency {name} begins");
            Ok((watch, self.retarget(machine, MarkKind::Filter, &text)?))
        });
        let (watch, mut done) = match done {
            Ok(done) => done,
            Err(error) => {
                self.tracing.events = before;
                self.tracing_changed();
                return Err(error);
            }
        };
        self.latency = Some(Measured { kind, watch, added });
        if matches!(&self.stage, Stage::Attached { attachment, .. } if !attachment.is_settled()) {
            done.push_str("; switches of interrupts and preemption are recorded from rest_init on");
        }
        notes.iter().for_each(|note| done.push_str(&format!("; {note}")));
        Ok(done)
    }

    /// # Errors
    /// Why latencies cannot be measured now, or in this run.
    fn can_measure(&self, name: &str) -> Result<(), String> {
        if self.tracing.overflow == Overflow::Overwrite {
            return Err(format!(
                "{name} cannot be measured while a flight recorder runs, whose records come at its \
                 end: boot without --overflow overwrite, or with --latency {name}"
            ));
        }
        if self.tracing.events_if.is_some() {
            return Err(format!(
                "{name} needs the events of all tasks, and this run traces those of some \
                 (--pid, --comm): boot without these"
            ));
        }
        match &self.stage {
            Stage::Attached { .. } if self.relay.is_some() => Ok(()),
            _ => Err(format!(
                "tracing has not begun: try again when ctl status says tracing, or boot with \
                 --latency {name}"
            )),
        }
    }

    /// Adds the events that a kind is made of to those that are traced; what there is to say of them.
    fn add_those_of(&mut self, kind: Kind) -> Result<Vec<String>, String> {
        let name = kind.name();
        let mut notes = Vec::new();
        for &EventsOf { pattern, needed } in kind.events() {
            let (found, more) = match events(&self.kernel, pattern) {
                Ok(found) => found,
                Err(_) if !needed => continue,
                Err(error) => {
                    let others = "see vmtrace events for what this kernel reports; wakeup, \
                                  wakeup_rt and osnoise need only what most kernels report";
                    return Err(format!("{name} cannot be measured: {error}; {others}"));
                }
            };
            notes.extend(more);
            let names: Vec<_> = found.iter().map(|event| event.fields.name.clone()).collect();
            add_events(&mut self.tracing.events, found);
            let is_there =
                |name: &&String| self.tracing.events.iter().any(|it| it.fields.name == **name);
            if let Some(missing) = names.iter().find(|name| needed && !is_there(name)) {
                return Err(format!(
                    "{name} cannot be measured: another event of the tracepoint of {missing} is \
                     traced; use event remove for it first (see event list)"
                ));
            }
        }
        Ok(notes)
    }

    fn look_at_the_stream(
        &self,
        machine: &dyn Vm,
        kind: Kind,
        over: Option<u64>,
    ) -> Result<Watch, String> {
        let player = Player::new(Latency::live(kind, over));
        let look = Looking { player, failed: None };
        let relay = self.relay.as_ref().ok_or("tracing has not begun")?;
        let watch = Watch::new(Box::new(look), machine.vcpus()).and_then(|(watch, watched)| {
            relay.watch(watched)?;
            Ok(watch)
        });
        watch.map_err(|error| format!("the stream cannot be evaluated: {error}"))
    }

    /// Has what was found so far told, by who looks for it.
    pub(super) fn show_latency(&self, json: bool, reply: Reply) {
        match (&self.latency, &self.relay) {
            (Some(measured), Some(relay)) => {
                let now = relay.now();
                relay.reach(now);
                measured.watch.ask(now, json, reply);
            }
            _ => reply.send(Err(NONE.into())),
        }
    }

    /// Gives back what is traced for latencies alone, and has told what was found.
    pub(super) fn stop_latency(&mut self, machine: &dyn Vm, json: bool, reply: Reply) {
        let Some(measured) = self.latency.take() else { return reply.send(Err(NONE.into())) };
        let before = self.tracing.events.clone();
        self.tracing.events.retain(|event| !measured.added.contains(&event.address));
        self.tracing_changed();
        let text = format!("latency {} ends", measured.kind.name());
        let done = self.retarget(machine, MarkKind::Filter, &text);
        match (done, &self.relay) {
            (Err(error), _) => {
                self.tracing.events = before;
                self.tracing_changed();
                self.latency = Some(measured);
                reply.send(Err(error));
            }
            (Ok(_), Some(relay)) => {
                let now = relay.now();
                relay.reach(now);
                measured.watch.ask_last(now, json, reply);
            }
            (Ok(_), None) => reply.send(Err("the trace has ended".into())),
        }
    }

    /// The trace ends: has told what was found by then, unless nothing is measured. What the guest was
    /// doing then is a number in the page.
    pub(super) fn end_latency(&mut self, machine: &dyn Vm) {
        let Some(Measured { kind, watch, .. }) = self.latency.take() else { return };
        let text = format!("latency {} ends with the trace", kind.name());
        self.mark(machine, MarkKind::Filter, Duration::ZERO, text);
        let (reply, page) = Reply::here();
        // Only the end of the stream is late enough.
        watch.ask_last(u64::MAX, false, reply);
        self.last_page = Some(LastPage { kind, page });
    }

    /// Whether events of this name must be traced as long as latencies are measured, and why.
    pub(super) fn needed_for_latency(&self, name: &str) -> Option<String> {
        let measured = self.latency.as_ref().filter(|measured| measured.needs(name))?;
        let kind = measured.kind.name();
        Some(format!("{name} is traced for the latency {kind}: latency stop ends that"))
    }

    /// These events (by their addresses) are traced on others' account as well; how many of them were
    /// not.
    pub(super) fn keep_for_others(&mut self, events: &[u64]) -> usize {
        let Some(measured) = &mut self.latency else { return 0 };
        let before = measured.added.len();
        measured.added.retain(|address| !events.contains(address));
        before - measured.added.len()
    }
}

const NONE: &str = "no latency is measured: latency start KIND begins that";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analyze::latency::Episode;
    use crate::stream::{Header, Writer};

    fn looking(kind: Kind) -> Looking {
        let mut looking =
            Looking { player: Player::new(Latency::live(kind, Some(0))), failed: None };
        let header = Header { vcpus: 2, clock_hz: 1_000_000_000, ..Header::default() };
        let mut writer = Writer::new(Vec::new(), &header).unwrap();
        writer.tell_watermark(77).unwrap();
        looking.push(&writer.into_inner().unwrap());
        looking
    }

    #[test]
    fn what_was_found_so_far_is_one_line() {
        let mut looking = looking(Kind::Wakeup);
        assert_eq!(looking.seen(), 77);
        let answer = looking.tell(false, false).unwrap();
        let page: String = serde_json::from_str(&answer).unwrap();
        assert!(!answer.contains('\n') && page.starts_with("# tracer: wakeup\n"), "{page}");
        // The stream goes on: it is not torn, and was not joined too late.
        assert!(page.contains("no task was woken") && !page.contains("note:"), "{page}");
        let behind: String = serde_json::from_str(&looking.tell(false, true).unwrap()).unwrap();
        assert!(behind.contains("note: the output of the trace is too slow"), "{behind}");
        let json: String = serde_json::from_str(&looking.tell(true, true).unwrap()).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["event"], &json["behind"]), (&"latencies".into(), &true.into()));
        looking.push(b"what is no frame, and long enough to be seen as none");
        assert!(looking.tell(false, false).unwrap_err().contains("stream"));
    }

    // Control connections are of small buffers, and clients read no more than a MiB.
    #[test]
    fn answers_are_bounded() {
        let mut report = looking(Kind::Osnoise).player.export().so_far(0);
        report.over_ns = Some(0);
        let long = Episode { comm: "x".repeat(3000), ..Episode::default() };
        report.listed = std::iter::repeat_n(long, 500).collect();
        let page = text(&report).unwrap();
        assert!(page.len() <= LONGEST + 100 && page.ends_with("too long for an answer)\n"));
        let all = lines(report).unwrap();
        assert!(all.len() <= LONGEST && all.lines().count() == 126, "{}", all.lines().count());
        assert!(all.ends_with('\n') && all.contains("\"unlisted\":375"));
    }

    #[test]
    fn the_events_of_a_kind_are_its_own() {
        let (watch, _watched) = Watch::new(Box::new(looking(Kind::Osnoise)), 1).unwrap();
        let measured = Measured { kind: Kind::Osnoise, watch, added: Vec::new() };
        assert!(measured.needs("sched:sched_switch") && measured.needs("irq_vectors:x_entry"));
        assert!(!measured.needs("sched:sched_waking"));
    }
}
