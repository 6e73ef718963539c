//! What is traced changes at random, by commands over the control socket.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind::{Other, TimedOut, WouldBlock};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use vmtrace::serve::{Control, Globs, TracerSpec, command};

use crate::exact::FUNCTION;
use crate::random::Random;
use crate::stress::{FULL, connect, random_globs};

/// Tracers that come and go. Programs are never taken out of a guest, and equal ones are shared: so these are few
/// enough for a run of any length.
const TRACERS: [&str; 8] = [
    "vfs_*:graph",
    "ksys_*,vfs_r*:args+retval",
    "*_get*:count",
    "kmem_cache_*:callers",
    "do_*:graph if comm == vmtrace-g*",
    "vfs_*:hist",
    "*:count",
    "schedule*,try_to_wake_up",
];
/// Places for them.
const PLACES: usize = 3;
/// Events that come and go.
const EVENTS: [&str; 3] = ["sched:*", "timer:*", "irq:*"];
/// Counts all calls of [`FUNCTION`], from the beginning to the end.
pub(super) const KEPT: &str = "kept";

/// Who gives commands.
pub(super) struct Changes<'a> {
    socket: &'a Path,
    /// Functions by name.
    named: &'a [&'a str],
    places: [bool; PLACES],
    events: [bool; EVENTS.len()],
    /// Texts of marks that were asked for.
    pub marks: BTreeSet<String>,
    /// Commands that were answered, those of them that change something, and those that were refused.
    pub answered: u64,
    pub changes: u64,
    pub refused: u64,
    /// Why.
    pub reasons: BTreeMap<String, u64>,
}

impl<'a> Changes<'a> {
    pub(super) fn new(socket: &'a Path, named: &'a [&'a str]) -> Self {
        Self {
            socket,
            named,
            places: [false; PLACES],
            events: [false; EVENTS.len()],
            marks: BTreeSet::new(),
            answered: 0,
            changes: 0,
            refused: 0,
            reasons: BTreeMap::new(),
        }
    }

    /// Gives a command; `None` when vmtrace has refused it, which it may only do where there is no place.
    fn command(&mut self, control: &Control) -> Result<Option<String>> {
        let stream = connect(self.socket)?;
        match command(&stream, control) {
            Ok(answer) => {
                self.answered += 1;
                Ok(Some(answer))
            }
            Err(error) if [WouldBlock, TimedOut].contains(&error.kind()) => {
                bail!("no answer to {control:?}")
            }
            Err(error) if error.kind() == Other && error.to_string().contains(FULL) => {
                self.refused += 1;
                *self.reasons.entry(FULL.to_owned()).or_default() += 1;
                Ok(None)
            }
            Err(error) => Err(error).with_context(|| format!("{control:?}")),
        }
    }

    /// One that must be answered.
    pub(super) fn give(&mut self, control: &Control) -> Result<String> {
        self.command(control)?.with_context(|| format!("{control:?} was refused"))
    }

    fn change(&mut self, control: &Control) -> Result<bool> {
        let done = self.command(control)?.is_some();
        self.changes += u64::from(done);
        Ok(done)
    }

    pub(super) fn mark(&mut self, text: String) -> Result<()> {
        self.give(&Control::Mark { ticks: None, text: text.clone() })?;
        self.marks.insert(text);
        Ok(())
    }

    pub(super) fn json(&mut self, control: &Control) -> Result<Value> {
        Ok(serde_json::from_str(&self.give(control)?)?)
    }

    /// Calls of [`FUNCTION`] that vmtrace has counted.
    pub(super) fn counted(&mut self) -> Result<u64> {
        let table = self.json(&Control::Table)?;
        let counts = table["counts"].as_array().with_context(|| format!("no counts: {table}"))?;
        let own = counts.iter().filter(|line| line["tracer"] == KEPT);
        Ok(own.filter_map(|line| line["hits"].as_u64()).sum())
    }

    /// Something else is traced from now on; the calls of [`FUNCTION`] still are.
    pub(super) fn disturb(&mut self, random: &mut Random) -> Result<()> {
        match random.below(8) {
            0..2 => self.filter(random),
            2..5 => self.tracer(random),
            5 => {
                let which = random.below(EVENTS.len());
                let glob = EVENTS[which].to_owned();
                let there = self.events[which];
                let control =
                    if there { Control::EventRemove(glob) } else { Control::EventAdd(glob) };
                self.events[which] ^= self.change(&control)?;
                Ok(())
            }
            6 => self.mark(format!("mark {}", self.marks.len())),
            _ => {
                let ask = [Control::Status, Control::TracerList, Control::EventList];
                self.give(&ask[random.below(ask.len())]).map(drop)
            }
        }
    }

    /// Everything in two of three cases.
    fn filter(&mut self, random: &mut Random) -> Result<()> {
        let mut globs = Globs { filter: vec!["*".to_owned()], notrace: Vec::new() };
        if random.below(3) == 0 {
            globs = random_globs(random, self.named);
            globs.filter.push(FUNCTION.to_owned());
        }
        self.change(&Control::Filter(globs)).map(drop)
    }

    fn tracer(&mut self, random: &mut Random) -> Result<()> {
        let which = random.below(PLACES);
        let name = format!("visitor{which}");
        let control = if self.places[which] {
            Control::TracerRemove(name)
        } else {
            let text = TRACERS[random.below(TRACERS.len())];
            Control::TracerAdd(TracerSpec { name: Some(name), ..text.parse()? })
        };
        self.places[which] ^= self.change(&control)?;
        Ok(())
    }

    /// All is given back for a while, or tracing goes on.
    pub(super) fn pause(&mut self, control: &Control) -> Result<()> {
        self.change(control).map(drop)
    }
}
