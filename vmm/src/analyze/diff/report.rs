//! The data of a report on two traces. Times are in nanoseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use serde::Serialize;

use crate::analyze::Gaps;

use super::Noise;
use super::profile::{Call, Profile, Task};

/// Most tasks whose calls part that are told.
const PARTINGS: usize = 64;

/// What differs between two traces. Other programs rely on the names of its fields: docs/stream.md.
#[derive(Debug, Serialize)]
pub struct Difference {
    /// The first trace.
    pub a: Side,
    /// The second trace.
    pub b: Side,
    /// Counts and times that differ by no more than that much of the larger are equal.
    pub noise_percent: u32,
    /// Times that differ by less are equal.
    pub noise_ns: u64,
    /// Functions that only the first trace has called; the most frequent first.
    pub only_a: Vec<Calls>,
    /// Functions that only the second trace has called.
    pub only_b: Vec<Calls>,
    /// Functions that both have called, not as often; what differs most comes first.
    pub counts: Vec<Whole<u64>>,
    /// Functions that took another time in all; what differs most comes first.
    pub times: Vec<Whole<Times>>,
    /// Where calls of tasks part, the first to do so first.
    pub tasks: Vec<Parting>,
    /// What cannot be said, and why.
    pub untold: Vec<String>,
}

#[derive(Serialize)]
struct Json<'a> {
    event: &'static str,
    version: u32,
    #[serde(flatten)]
    found: &'a Difference,
}

/// A trace.
#[derive(Debug, Serialize)]
pub struct Side {
    /// What it is called.
    pub file: String,
    /// Release of its kernel.
    pub release: String,
    /// Architecture.
    pub arch: String,
    /// vCPUs.
    pub vcpus: u32,
    /// All calls.
    pub calls: u64,
    /// Functions that were called.
    pub functions: usize,
    /// What is missing in it.
    pub missing: Gaps,
}

/// How often a function was called.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Calls {
    /// The function.
    pub function: String,
    /// How often.
    pub calls: u64,
}

/// Something of a function in both traces.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Whole<T> {
    /// The function.
    pub function: String,
    /// In the first trace.
    pub a: T,
    /// In the second trace.
    pub b: T,
}

/// How long calls of a function took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Times {
    /// Calls whose duration is known.
    pub calls: u64,
    /// All of them, without calls of it in itself.
    pub total_ns: u64,
    /// Half of them took no longer.
    pub median_ns: u64,
    /// The longest.
    pub longest_ns: u64,
}

/// Where the calls of a task part.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Parting {
    /// The task's name when it was first seen.
    pub comm: String,
    /// Its process id in each trace.
    pub pid_a: u32,
    /// See `pid_a`.
    pub pid_b: u32,
    /// So many calls are the same.
    pub same: u64,
    /// The last of these.
    pub after: Option<String>,
    /// What comes then in the first trace; none for nothing.
    pub a: Option<Point>,
    /// What comes then in the second trace.
    pub b: Option<Point>,
}

/// A call.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Point {
    /// The function.
    pub function: String,
    /// When.
    pub ns: u64,
}

/// What is known of the functions of a name.
#[derive(Default)]
struct Sum {
    calls: u64,
    times: Times,
}

fn sums(profile: &Profile) -> BTreeMap<&str, Sum> {
    let mut all: BTreeMap<&str, Sum> = BTreeMap::new();
    for function in profile.times.functions.values() {
        let sum = all.entry(&function.name).or_default();
        sum.calls = sum.calls.saturating_add(function.calls);
        sum.times.calls = sum.times.calls.saturating_add(function.timed);
        sum.times.total_ns = sum.times.total_ns.saturating_add(function.total);
        sum.times.longest_ns = sum.times.longest_ns.max(function.longest);
        // Of several of one name that of the most frequent would do; they are few.
        let median = function.times.as_ref().map_or(0, |times| times.value_at_quantile(0.5));
        sum.times.median_ns = sum.times.median_ns.max(median.min(function.longest));
    }
    all
}

fn side(profile: &Profile, file: &str) -> Side {
    Side {
        file: file.to_owned(),
        release: profile.header.release.clone(),
        arch: profile.header.arch.clone(),
        vcpus: profile.header.vcpus,
        calls: profile.times.entries,
        functions: profile.times.functions.len(),
        missing: profile.gaps.clone(),
    }
}

impl Difference {
    /// Of two traces with their names.
    #[must_use]
    pub fn new(a: (&Profile, &str), b: (&Profile, &str), noise: Noise) -> Self {
        let (sides, a, b) = ((side(a.0, a.1), side(b.0, b.1)), a.0, b.0);
        let mut made = Self {
            a: sides.0,
            b: sides.1,
            noise_percent: noise.percent,
            noise_ns: noise.nanoseconds,
            only_a: Vec::new(),
            only_b: Vec::new(),
            counts: Vec::new(),
            times: Vec::new(),
            tasks: Vec::new(),
            untold: Vec::new(),
        };
        made.functions(a, b, noise);
        made.tasks(a, b);
        made
    }

    /// Whether functions differ. Where calls of tasks part does not count: interrupts and the order
    /// of tasks are never the same twice.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let only = self.only_a.is_empty() && self.only_b.is_empty();
        only && self.counts.is_empty() && self.times.is_empty()
    }

    fn functions(&mut self, a: &Profile, b: &Profile, noise: Noise) {
        let (sums_a, sums_b) = (sums(a), sums(b));
        let names: BTreeSet<&str> = sums_a.keys().chain(sums_b.keys()).copied().collect();
        let (mut absent, mut untraced) = (0_u64, 0_u64);
        let whole = a.is_whole() && b.is_whole();
        for name in names {
            let (of_a, of_b) = (sums_a.get(name), sums_b.get(name));
            let called = |sum: Option<&Sum>| sum.map_or(0, |sum| sum.calls);
            match (called(of_a), called(of_b)) {
                (0, 0) => {}
                (calls, 0) | (0, calls) => {
                    let (other, only) = if called(of_b) == 0 {
                        (b, &mut self.only_a)
                    } else {
                        (a, &mut self.only_b)
                    };
                    if other.covered && !other.traced.contains(name) {
                        untraced += 1;
                    } else if other.is_whole() {
                        only.push(Calls { function: name.to_owned(), calls });
                    } else {
                        absent += 1;
                    }
                }
                (calls_a, calls_b) if whole && !noise.hides_counts(calls_a, calls_b) => {
                    self.counts.push(Whole { function: name.to_owned(), a: calls_a, b: calls_b });
                }
                _ => {}
            }
            if let (true, Some(of_a), Some(of_b)) = (whole, of_a, of_b)
                && of_a.times.calls > 0
                && of_b.times.calls > 0
                && !noise.hides_times(of_a.times.total_ns, of_b.times.total_ns)
            {
                self.times.push(Whole { function: name.to_owned(), a: of_a.times, b: of_b.times });
            }
        }
        let most = |only: &mut Vec<Calls>| {
            only.sort_by(|x, y| y.calls.cmp(&x.calls).then_with(|| x.function.cmp(&y.function)));
        };
        most(&mut self.only_a);
        most(&mut self.only_b);
        self.counts.sort_by_key(|it| std::cmp::Reverse(it.a.abs_diff(it.b)));
        self.times.sort_by_key(|it| std::cmp::Reverse(it.a.total_ns.abs_diff(it.b.total_ns)));

        if untraced > 0 {
            self.untold.push(format!(
                "{untraced} functions were called in one trace and not traced in the other"
            ));
        }
        if absent > 0 {
            self.untold.push(format!(
                "{absent} functions were called in one trace only, but the other has gaps, in which \
                 they may have been called"
            ));
        }
        if !whole {
            self.untold.push(
                "counts and times are not compared: a trace with gaps has too few of them".into(),
            );
        } else if !(a.has_returns && b.has_returns) {
            self.untold
                .push("times are not compared: they need returns in both traces (--graph)".into());
        }
    }

    fn tasks(&mut self, a: &Profile, b: &Profile) {
        let (of_a, of_b) = (a.by_name(), b.by_name());
        let mut cut = 0_u64;
        for (name, tasks_a) in &of_a {
            let Some(tasks_b) = of_b.get(name) else { continue };
            for (task_a, task_b) in tasks_a.iter().zip(tasks_b) {
                match part((a, task_a), (b, task_b)) {
                    Parted::Nowhere => {}
                    Parted::Unknown => cut += 1,
                    Parted::Here(parting) => self.tasks.push(parting),
                }
            }
        }
        let begins = |parting: &Parting| {
            let point = parting.a.as_ref().or(parting.b.as_ref());
            point.map_or(u64::MAX, |point| point.ns)
        };
        self.tasks.sort_by_key(begins);
        let more = self.tasks.len().saturating_sub(PARTINGS);
        self.tasks.truncate(PARTINGS);
        if more > 0 {
            self.untold.push(format!("the calls of {more} more tasks differ"));
        }
        if cut > 0 {
            self.untold.push(format!(
                "the calls of {cut} tasks are the same as far as they were compared: up to the first \
                 gap, or many"
            ));
        }
    }

    /// Writes it as JSON, on one line.
    ///
    /// # Errors
    /// When the output fails.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        let whole = Json { event: "diff", version: 1, found: self };
        serde_json::to_writer(&mut *out, &whole)?;
        writeln!(out)?;
        out.flush()
    }
}

enum Parted {
    Nowhere,
    /// The calls that are known of one are the first of the other's.
    Unknown,
    Here(Parting),
}

fn part((a, task_a): (&Profile, &Task), (b, task_b): (&Profile, &Task)) -> Parted {
    let calls = task_a.calls.iter().zip(&task_b.calls);
    let is_same = |(x, y): &(&Call, &Call)| a.function(**x) == b.function(**y);
    let same = calls.take_while(is_same).count();
    let next = |profile: &Profile, task: &Task| {
        let call = task.calls.get(same).copied();
        call.map(|call| Point { function: profile.function(call).to_owned(), ns: call.ns })
    };
    let (next_a, next_b) = (next(a, task_a), next(b, task_b));
    // What is not known to have ended may go on in the same way.
    let ends = |profile: &Profile, task: &Task| profile.is_whole() && !task.is_cut;
    match (&next_a, &next_b) {
        (Some(_), Some(_)) => {}
        (None, None) if ends(a, task_a) && ends(b, task_b) => return Parted::Nowhere,
        (None, Some(_)) if ends(a, task_a) => {}
        (Some(_), None) if ends(b, task_b) => {}
        _ => return Parted::Unknown,
    }
    let last = same.checked_sub(1).and_then(|last| task_a.calls.get(last));
    Parted::Here(Parting {
        comm: task_a.comm.clone(),
        pid_a: task_a.pid,
        pid_b: task_b.pid,
        same: same as u64,
        after: last.map(|call| a.function(*call).to_owned()),
        a: next_a,
        b: next_b,
    })
}
