//! Selects some of the events.

use std::collections::HashSet;
use std::io;

use crate::kernel::glob;
use crate::stream::{Header, MarkKind, Stretch, Summary};

use super::{Called, Event, Export, Name, Seen, SortedBy, Span, Unmet};

/// Which events are wanted: those that every condition accepts that is given. Losses and marks are
/// not asked for tasks and functions; but of some tasks, vCPUs or functions alone, lines of the
/// console are not wanted, and of some tasks or times, counts are not.
#[derive(Clone, Debug, Default)]
pub struct Pick {
    /// Of tasks with these process ids.
    pub pids: Vec<u32>,
    /// Of tasks whose name matches one of these globs.
    pub comms: Vec<String>,
    /// Of tasks with this process id, or that had a name which matches this glob then or before.
    pub follow: Vec<String>,
    /// Of these vCPUs.
    pub cpus: Vec<u32>,
    /// Of functions of modules that match one of these globs.
    pub modules: Vec<String>,
    /// Not before so many nanoseconds.
    pub since: Option<u64>,
    /// Not after so many nanoseconds.
    pub until: Option<u64>,
    /// Only the first so many records.
    pub limit: Option<u64>,
}

impl Pick {
    /// Whether what was counted on a vCPU is wanted: nobody knows whose calls they were, and when.
    pub(crate) fn takes_counts(&self, vcpu: u32) -> bool {
        let of_some = !self.pids.is_empty() || !self.comms.is_empty() || !self.follow.is_empty();
        let in_time = self.since.or(self.until).is_some();
        !of_some && !in_time && (self.cpus.is_empty() || self.cpus.contains(&vcpu))
    }

    /// Whether everything is wanted.
    #[must_use]
    pub fn is_all(&self) -> bool {
        !self.is_of_some() && self.since.or(self.until).or(self.limit).is_none()
    }

    /// Whether only some tasks, vCPUs or functions are wanted.
    pub(crate) fn is_of_some(&self) -> bool {
        let lists = [&self.comms, &self.follow, &self.modules];
        !self.pids.is_empty()
            || !self.cpus.is_empty()
            || lists.into_iter().any(|list| !list.is_empty())
    }
}

/// Hands on the events that are wanted.
#[derive(Debug)]
pub struct Picked<E> {
    export: E,
    pick: Pick,
    /// What of it no record was of so far.
    unmet: Unmet,
    /// When the records are, if they are asked for by time.
    span: Span,
    /// Which records come here.
    seen: Seen,
    header: Header,
    /// Tasks that are followed.
    followed: HashSet<u32>,
    /// Tasks whose last name is no reason to follow them: this is most of what is asked.
    others: Option<(u32, String)>,
    records: u64,
    ended: bool,
}

/// What is asked of an event.
struct Of<'a> {
    pid: u32,
    comm: Option<&'a str>,
    vcpu: u32,
    module: &'a str,
}

impl<E: Export> Picked<E> {
    /// Hands on to `export`.
    pub fn new(export: E, pick: Pick) -> Self {
        let (header, followed, unmet) = (Header::default(), HashSet::new(), Unmet::of(&pick));
        let (span, seen) = (Span::default(), Seen::All);
        let (others, records, ended) = (None, 0, false);
        Self { export, pick, unmet, span, seen, header, followed, others, records, ended }
    }

    /// What comes here are not all records of a trace, as other options have left some out: notes say no
    /// more than that.
    #[must_use]
    pub(crate) fn of_rest(self) -> Self {
        Self { seen: Seen::Rest, ..self }
    }

    fn is_in_time(&self, ticks: u64) -> bool {
        if self.pick.since.or(self.pick.until).is_none() {
            return true;
        }
        let at = self.header.nanoseconds(ticks);
        self.pick.since.is_none_or(|since| at >= i128::from(since))
            && self.pick.until.is_none_or(|until| at <= i128::from(until))
    }

    /// Whether a task is followed, now that it has this name.
    fn follows(&mut self, pid: u32, comm: Option<&str>) -> bool {
        if self.pick.follow.is_empty() || self.followed.contains(&pid) {
            return true;
        }
        let comm = comm.unwrap_or_default();
        if self.others.as_ref().is_some_and(|(other, name)| *other == pid && name == comm) {
            return false;
        }
        let is = |task: &String| match task.parse::<u32>() {
            Ok(number) => number == pid,
            Err(_) => glob::matches(task, comm),
        };
        let follows = self.pick.follow.iter().any(is);
        if follows {
            self.followed.insert(pid);
        } else {
            self.others = Some((pid, comm.to_owned()));
        }
        follows
    }

    fn wants(&mut self, of: &Of<'_>, ticks: Option<u64>) -> bool {
        if !self.unmet.is_empty() {
            self.unmet.meet((of.vcpu, of.pid), of.comm.unwrap_or_default());
        }
        let in_time = ticks.is_none_or(|ticks| self.is_in_time(ticks));
        if let Some(ticks) = ticks {
            self.span.see(ticks, in_time);
        }
        // Also of a time that is not wanted: a task may change its name after that.
        let follows = self.follows(of.pid, of.comm);
        let pick = &self.pick;
        follows
            && (pick.pids.is_empty() || pick.pids.contains(&of.pid))
            && (pick.cpus.is_empty() || pick.cpus.contains(&of.vcpu))
            && any(&pick.comms, of.comm.unwrap_or_default())
            && any(&pick.modules, of.module)
            && in_time
    }
}

/// Whether one of the globs matches, if there are any.
fn any(globs: &[String], text: &str) -> bool {
    globs.is_empty() || globs.iter().any(|pattern| glob::matches(pattern, text))
}

fn module<'a>(name: &Name<'a>) -> &'a str {
    name.symbol.map_or("", |(_, module)| module)
}

impl<E: Export> Export for Picked<E> {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.header = header.clone();
        self.export.begin(header)
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        let of = |pid, comm, vcpu, function| Of { pid, comm, vcpu, module: module(function) };
        let (wanted, is_record) = match event {
            Event::Entry(it) => {
                let of = of(it.pid, it.comm, it.vcpu, &it.function);
                (self.wants(&of, Some(it.timestamp)), true)
            }
            Event::Return(it) => {
                let of = of(it.pid, it.comm, it.vcpu, &it.function);
                (self.wants(&of, Some(it.timestamp)), true)
            }
            Event::Tail(it) => {
                let of = of(it.pid, it.comm, it.vcpu, &it.function);
                (self.wants(&of, Some(it.timestamp)), true)
            }
            Event::Tracepoint(it) => {
                let of = of(it.pid, it.comm, it.vcpu, &it.event);
                (self.wants(&of, Some(it.timestamp)), true)
            }
            Event::Unfinished(it) => {
                let of = of(it.pid, it.comm, it.vcpu, &it.function);
                (self.wants(&of, None), false)
            }
            // It may have been of any task, at any time up to the next record.
            Event::Loss(loss) => {
                (self.pick.cpus.is_empty() || self.pick.cpus.contains(&loss.vcpu), false)
            }
            Event::Mark(mark) => {
                let said = mark.kind == MarkKind::Console && self.pick.is_of_some();
                (self.is_in_time(mark.ticks) && !said, false)
            }
        };
        if !wanted {
            return Ok(());
        }
        if is_record {
            self.records += 1;
            if self.pick.limit.is_some_and(|limit| self.records > limit) {
                // As a reader that has seen enough.
                self.ended = true;
                self.export.end(None)?;
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        self.export.event(event)
    }

    fn traced(
        &mut self,
        stretch: &Stretch,
        functions: &mut dyn Iterator<Item = Name<'_>>,
    ) -> io::Result<()> {
        self.export.traced(stretch, functions)
    }

    fn counts(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        self.unmet.count(vcpu);
        let pick = &self.pick;
        if !pick.takes_counts(vcpu) {
            return Ok(());
        }
        let wanted = |name: &Name<'_>| any(&pick.modules, module(name));
        self.export.counts(vcpu, tracer, &mut hits.filter(|(name, _)| wanted(name)))
    }

    fn callers(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = Called<'_>>,
    ) -> io::Result<()> {
        self.unmet.count(vcpu);
        let pick = &self.pick;
        if !pick.takes_counts(vcpu) {
            return Ok(());
        }
        let wanted = |it: &Called<'_>| any(&pick.modules, module(&it.function));
        self.export.callers(vcpu, tracer, &mut hits.filter(wanted))
    }

    fn sorted(
        &mut self,
        by: &SortedBy<'_>,
        words: &mut dyn Iterator<Item = (Name<'_>, u8, u64)>,
    ) -> io::Result<()> {
        self.unmet.count(by.vcpu);
        let pick = &self.pick;
        if !pick.takes_counts(by.vcpu) {
            return Ok(());
        }
        let wanted = |name: &Name<'_>| any(&pick.modules, module(name));
        self.export.sorted(by, &mut words.filter(|(name, ..)| wanted(name)))
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        self.export.joined(totals)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.export.flush()
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        if self.ended { Ok(()) } else { self.export.end(summary) }
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.export.notes();
        let time = self.span.note(&self.header, &self.pick, self.seen);
        notes.extend(self.unmet.notes(self.seen).chain(time));
        notes
    }
}
