//! What is asked of a trace that it cannot have, and what it happens not to have.

use crate::kernel::{Near, glob};

use super::Pick;
use crate::export::seconds;
use crate::stream::Header;

/// Something is asked for that a trace cannot have: nothing would pass for a guest that did nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Absent {
    /// The guest has no such vCPU.
    #[error("--cpu {wanted}: the guest has no such vCPU; {}", there_are(*vcpus))]
    Vcpu {
        /// Its number.
        wanted: u32,
        /// How many there are.
        vcpus: u32,
    },
    /// The trace has no tracer of that name.
    #[error("--tracer {wanted}: the trace has no such tracer{near}")]
    Tracer {
        /// The name.
        wanted: String,
        /// Names that it has.
        near: Near,
    },
}

fn there_are(vcpus: u32) -> String {
    match vcpus {
        0 | 1 => "there is only 0".to_owned(),
        more => format!("there are 0 to {}", more - 1),
    }
}

impl Absent {
    /// Of vCPUs that are asked for the first one that a guest with so many does not have.
    ///
    /// # Errors
    /// That one.
    pub(crate) fn check_cpus(cpus: &[u32], vcpus: u32) -> Result<(), Self> {
        let missing = cpus.iter().find(|cpu| **cpu >= vcpus);
        missing.map_or(Ok(()), |&wanted| Err(Self::Vcpu { wanted, vcpus }))
    }

    /// Of a name that none of these tracers has.
    pub(crate) fn tracer<'a>(wanted: &str, all: impl Iterator<Item = &'a str> + Clone) -> Self {
        Self::Tracer { wanted: wanted.to_owned(), near: Near::to(wanted, all) }
    }
}

/// Of which records it is known whether they are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Seen {
    /// All of the trace.
    #[default]
    All,
    /// Those that other options have left: the trace may have more.
    Rest,
}

impl Seen {
    /// The beginning of a sentence.
    fn none(self) -> &'static str {
        match self {
            Self::All => "no record",
            Self::Rest => "no record of what is otherwise asked for",
        }
    }
}

/// What selects tasks and vCPUs, of which no record has come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unmet(Vec<Asked>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Asked {
    Pid(u32),
    Comm(String),
    Follow(String),
    Cpu(u32),
}

impl Unmet {
    /// All that a pick asks for.
    pub(crate) fn of(pick: &Pick) -> Self {
        let pids = pick.pids.iter().copied().map(Asked::Pid);
        let comms = pick.comms.iter().cloned().map(Asked::Comm);
        let follow = pick.follow.iter().cloned().map(Asked::Follow);
        let cpus = pick.cpus.iter().copied().map(Asked::Cpu);
        Self(pids.chain(comms).chain(follow).chain(cpus).collect())
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A task of that name has a record there.
    pub(crate) fn meet(&mut self, (vcpu, pid): (u32, u32), comm: &str) {
        self.0.retain(|asked| match asked {
            Asked::Pid(wanted) => *wanted != pid,
            Asked::Comm(wanted) => !glob::matches(wanted, comm),
            Asked::Follow(wanted) => match wanted.parse::<u32>() {
                Ok(wanted) => wanted != pid,
                Err(_) => !glob::matches(wanted, comm),
            },
            Asked::Cpu(wanted) => *wanted != vcpu,
        });
    }

    /// Something was counted there.
    pub(crate) fn count(&mut self, vcpu: u32) {
        self.0.retain(|asked| *asked != Asked::Cpu(vcpu));
    }

    /// A line for each that is left.
    pub(crate) fn notes(&self, of: Seen) -> impl Iterator<Item = String> + '_ {
        let none = of.none();
        self.0.iter().map(move |asked| match asked {
            Asked::Pid(pid) => format!("--pid {pid}: {none} is of that process id"),
            Asked::Comm(glob) => format!("--comm {glob}: {none} is of a task of such a name"),
            Asked::Follow(task) => format!("--follow {task}: {none} is of such a task"),
            Asked::Cpu(cpu) => format!("--cpu {cpu}: {none} is of that vCPU"),
        })
    }
}

/// The times of records, and whether one is of those that are asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Span {
    /// Of the first and the last one, in ticks.
    ticks: Option<(u64, u64)>,
    met: bool,
}

impl Span {
    /// There is a record of this time.
    #[inline]
    pub(crate) fn see(&mut self, ticks: u64, wanted: bool) {
        let (first, last) = self.ticks.unwrap_or((ticks, ticks));
        self.ticks = Some((first.min(ticks), last.max(ticks)));
        self.met |= wanted;
    }

    /// A line if there are records, and none of those times.
    pub(crate) fn note(&self, clock: &Header, pick: &Pick, of: Seen) -> Option<String> {
        let (first, last) = self.ticks.filter(|_| !self.met)?;
        let given = [("--since", pick.since), ("--until", pick.until)];
        let given: Vec<_> =
            given.into_iter().filter_map(|(option, at)| at.map(|_| option)).collect();
        let note = format!("{}: {} is of that time", given.join(", "), of.none());
        if of == Seen::Rest {
            return Some(note);
        }
        let nanoseconds = |ticks| clock.nanoseconds(ticks).max(0).try_into().unwrap_or(u64::MAX);
        let at = |ticks| seconds(nanoseconds(ticks));
        Some(format!("{note}: the first is at {} s, the last at {} s", at(first), at(last)))
    }
}
