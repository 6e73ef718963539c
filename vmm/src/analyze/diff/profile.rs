//! The profile of a trace that is compared with another's.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use crate::analyze::{Gaps, nanoseconds};
use crate::export::times::Times;
use crate::export::{Entry, Event, Export, Name, Return};
use crate::kernel::glob;
use crate::stream::{Header, Stretch, Summary, TracedOf};

/// Most calls of a task that are kept.
const CALLS_OF_TASK: usize = 1 << 16;
/// Most calls of all tasks that are kept: 16 bytes each.
const CALLS: usize = 1 << 22;
/// Most tasks whose calls are kept.
const TASKS: usize = 1 << 14;
/// Most functions that are told apart.
const FUNCTIONS: usize = 1 << 20;

/// A call, in the order in which a task made them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    /// Of [`Profile::names`].
    pub(super) name: u32,
    /// Since the start of the clock.
    pub(super) ns: u64,
}

/// The calls of a task.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) pid: u32,
    /// Its name when it was first seen.
    pub(super) comm: String,
    pub(super) calls: Vec<Call>,
    /// There are more.
    pub(super) is_cut: bool,
}

/// What is known of a function.
#[derive(Debug)]
struct Known {
    name: u32,
    /// The tracer whose records count, if there are several: one call may have records of each.
    tracer: Option<Box<str>>,
}

/// One of the two traces: is played it, and is then compared with another.
#[derive(Debug)]
pub struct Profile {
    pub(super) header: Header,
    pub(super) times: Times,
    pub(super) gaps: Gaps,
    /// Names of functions; of calls.
    pub(super) names: Vec<String>,
    known: HashMap<u64, Known>,
    /// Which of all tasks: globs of names; none for all.
    comms: Vec<String>,
    /// Those of them that matched the name of no task so far.
    unmet: Vec<String>,
    tasks: HashMap<u32, Task>,
    kept: usize,
    /// Records are missing from here on: calls behind that are not compared.
    has_lost: bool,
    /// The trace says which functions were traced, and these were.
    pub(super) covered: bool,
    pub(super) traced: HashSet<String>,
    /// Functions whose calls were counted where those of some tasks are asked for: nobody knows
    /// whether these have called them.
    nobodys: HashSet<String>,
    pub(super) has_returns: bool,
}

impl Profile {
    /// Of the calls of tasks with a name that one of these globs matches, or (none) of all.
    #[must_use]
    pub fn new(comms: Vec<String>) -> Self {
        Self {
            header: Header::default(),
            times: Times::default(),
            gaps: Gaps::new(),
            names: Vec::new(),
            known: HashMap::new(),
            unmet: comms.clone(),
            comms,
            tasks: HashMap::new(),
            kept: 0,
            has_lost: false,
            covered: false,
            traced: HashSet::new(),
            nobodys: HashSet::new(),
            has_returns: false,
        }
    }

    /// `late` records of the trace were played behind later ones.
    pub fn finish(&mut self, late: u64) {
        self.gaps.late = late;
    }

    /// Globs of names of tasks that matched none.
    pub fn unmet(&self) -> &[String] {
        &self.unmet
    }

    fn wants(&mut self, comm: Option<&str>) -> bool {
        let comm = comm.unwrap_or_default();
        self.unmet.retain(|glob| !glob::matches(glob, comm));
        self.comms.is_empty() || self.comms.iter().any(|glob| glob::matches(glob, comm))
    }

    /// The number of a function's name if its record counts.
    fn name(&mut self, function: &Name<'_>, tracer: Option<&str>) -> Option<u32> {
        if !self.known.contains_key(&function.address) {
            let name = u32::try_from(self.names.len()).ok()?;
            if self.known.len() >= FUNCTIONS {
                return None;
            }
            self.names.push(function.label());
            self.known.insert(function.address, Known { name, tracer: None });
        }
        let known = self.known.get_mut(&function.address)?;
        let counts = match (&known.tracer, tracer) {
            (_, None) => true,
            (Some(first), Some(tracer)) => **first == *tracer,
            (None, Some(tracer)) => {
                known.tracer = Some(tracer.into());
                true
            }
        };
        counts.then_some(known.name)
    }

    fn entry(&mut self, entry: &Entry<'_>) {
        if !self.wants(entry.comm) {
            return;
        }
        let Some(name) = self.name(&entry.function, entry.tracer) else { return };
        self.times.entry(entry);
        // What runs on an idle CPU are interrupts.
        if self.has_lost || entry.pid == 0 {
            return;
        }
        let room = self.tasks.len() < TASKS;
        let task = match self.tasks.get_mut(&entry.pid) {
            Some(task) => task,
            None if room => self.tasks.entry(entry.pid).or_insert_with(|| Task {
                pid: entry.pid,
                comm: entry.comm.unwrap_or("?").to_owned(),
                calls: Vec::new(),
                is_cut: false,
            }),
            None => return,
        };
        if task.calls.len() >= CALLS_OF_TASK || self.kept >= CALLS {
            task.is_cut = true;
            return;
        }
        task.calls.push(Call { name, ns: nanoseconds(&self.header, entry.timestamp) });
        self.kept += 1;
    }

    fn ret(&mut self, ret: &Return<'_>) {
        self.has_returns = true;
        if self.wants(ret.comm) && self.name(&ret.function, ret.tracer).is_some() {
            self.times.ret(ret);
        }
    }

    /// Tasks by name, those of one name by pid: that is the order in which they were made.
    pub(super) fn by_name(&self) -> BTreeMap<&str, Vec<&Task>> {
        let mut all: BTreeMap<&str, Vec<&Task>> = BTreeMap::new();
        for task in self.tasks.values() {
            all.entry(&task.comm).or_default().push(task);
        }
        for tasks in all.values_mut() {
            tasks.sort_by_key(|task| task.pid);
        }
        all
    }

    /// The name of a call's function.
    pub(super) fn function(&self, call: Call) -> &str {
        self.names.get(call.name as usize).map_or("?", String::as_str)
    }

    /// Whether something is missing, so that what is not there may have been called.
    pub(super) fn is_whole(&self) -> bool {
        self.gaps.lost == 0 && !self.gaps.torn && !self.gaps.joined
    }
}

impl Export for Profile {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.header = header.clone();
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        self.gaps.event(&self.header, event);
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            Event::Unfinished(unfinished) => {
                let counts = self.wants(unfinished.comm)
                    && self.name(&unfinished.function, unfinished.tracer).is_some();
                if counts {
                    self.times.unfinished(unfinished);
                }
            }
            Event::Loss(_) => self.has_lost = true,
            Event::Tail(_) | Event::Tracepoint(_) | Event::Mark(_) => {}
        }
        Ok(())
    }

    fn traced(
        &mut self,
        stretch: &Stretch,
        functions: &mut dyn Iterator<Item = Name<'_>>,
    ) -> io::Result<()> {
        if stretch.of == TracedOf::Entries {
            self.covered = true;
            self.traced.extend(functions.map(|function| function.label()).take(FUNCTIONS));
        }
        Ok(())
    }

    fn counts(
        &mut self,
        _: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        for (function, hits) in hits.filter(|(_, hits)| *hits > 0) {
            if !self.comms.is_empty() {
                self.nobodys.insert(function.label());
            } else if self.name(&function, tracer).is_some() {
                self.times.counted(&function, hits);
            }
        }
        Ok(())
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        self.gaps.begin_at(totals);
        self.has_lost |= self.gaps.joined;
        Ok(())
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.gaps.end(summary);
        self.traced.retain(|function| !self.nobodys.contains(function));
        Ok(())
    }
}
