//! Tracers whose exact numbers of calls are known, while other tracers of the same function change.

use crate::random::Random;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmtrace::serve::{Format, Globs, StreamRequest, TracerSpec, TriggerSpec, accepted, ask_stream};

/// What the guest calls, without a socket: it fails. The numbers of its backlogs are all that it is given.
pub const FUNCTION: &str = "__sys_listen";
/// Tells all backlogs apart.
pub const BACKLOGS: u64 = 256;
/// How long after the last change all that is recorded has come.
const PATIENCE: Duration = Duration::from_secs(400);

/// A call: on which CPU, and the backlog.
type Call = (usize, u64);

/// A tracer of which it is known what calls are its own.
#[derive(Debug)]
pub struct Exact {
    /// What stands behind its name and `=`.
    text: &'static str,
    /// What tells of a call.
    tells: Tells,
    /// Whether something is to be done where the function is entered.
    pub at_entry: bool,
    meant: fn(Call) -> bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tells {
    Count,
    Sort,
    Entry,
    Return,
}

const fn one(text: &'static str, tells: Tells, at_entry: bool, meant: fn(Call) -> bool) -> Exact {
    Exact { text, tells, at_entry, meant }
}

/// All of them, of [`FUNCTION`].
pub const EXACT: [Exact; 16] = [
    one("__sys_listen:count", Tells::Count, true, |_| true),
    one("__sys_listen:count if backlog < 100", Tells::Count, true, |(_, log)| log < 100),
    one("__sys_listen:count if cpu == 1 && backlog & 1", Tells::Count, true, |(cpu, log)| {
        cpu == 1 && log & 1 == 1
    }),
    one("__sys_listen:count if pid == 1", Tells::Count, true, |_| false),
    one("__sys_listen:hist", Tells::Sort, true, |_| true),
    one("__sys_listen:hist(retval)", Tells::Sort, true, |_| true),
    one("__sys_listen:hist(backlog) if cpu == 0", Tells::Sort, true, |(cpu, _)| cpu == 0),
    one("__sys_listen:hist if backlog >= 200", Tells::Sort, true, |(_, log)| log >= 200),
    one("__sys_listen if backlog == 17 || backlog == 18", Tells::Entry, true, |(_, log)| {
        matches!(log, 17 | 18)
    }),
    one(
        "__sys_listen:args if comm == vmtrace-g* && backlog > 249",
        Tells::Entry,
        true,
        |(_, log)| log > 249,
    ),
    one("__sys_listen if pid == 1", Tells::Entry, true, |_| false),
    one("__sys_listen if retval < 0 && backlog < 9", Tells::Return, true, |(_, log)| log < 9),
    one("__sys_listen if retval >= 0", Tells::Return, false, |_| false),
    one("__sys_listen if retval == -9 && comm != vmtrace-g*", Tells::Return, false, |_| false),
    one(
        "__sys_listen if duration >= 0ns && cpu == 1 && backlog > 240",
        Tells::Return,
        true,
        |(cpu, log)| cpu == 1 && log > 240,
    ),
    one("__sys_listen if duration > 1000s", Tells::Return, true, |_| false),
];

/// Calls of [`FUNCTION`] that triggers count.
pub const COUNTED: [Exact; 6] = [
    one("__sys_listen", Tells::Count, true, |_| true),
    one("__sys_listen if backlog < 100", Tells::Count, true, |(_, log)| log < 100),
    one("__sys_listen if cpu == 1 && backlog & 1", Tells::Count, true, |(cpu, log)| {
        cpu == 1 && log & 1 == 1
    }),
    one("__sys_listen if comm == vmtrace-g* && cpu == 0", Tells::Count, true, |(cpu, _)| cpu == 0),
    one("__sys_listen if backlog == 17 || backlog == 18", Tells::Count, true, |(_, log)| {
        matches!(log, 17 | 18)
    }),
    one("__sys_listen if pid == 1", Tells::Count, true, |_| false),
];

impl Exact {
    /// As it is asked for, of the call with this number.
    ///
    /// # Errors
    /// When it is none.
    pub fn trigger(&self, call: u64) -> Result<TriggerSpec> {
        Ok(TriggerSpec { call, ..self.text.parse()? })
    }

    /// As it is asked for, with that name.
    ///
    /// # Errors
    /// When it is none.
    pub fn spec(&self, name: &str) -> Result<TracerSpec> {
        Ok(TracerSpec { name: Some(name.to_owned()), ..self.text.parse()? })
    }

    /// Of so many calls on each CPU, with backlogs from 0 on, round and round.
    fn expected(&self, calls: &[u64]) -> u64 {
        let of = |(cpu, &calls): (usize, &u64)| -> u64 {
            let own = |log: &u64| (self.meant)((cpu, *log));
            let times = |log: u64| calls / BACKLOGS + u64::from(log < calls % BACKLOGS);
            (0..BACKLOGS).filter(own).map(times).sum()
        };
        calls.iter().enumerate().map(of).sum()
    }
}

/// Records by tracer and kind.
type Records = BTreeMap<(String, String), u64>;

/// What a consumer has got.
#[derive(Debug, Default)]
struct Seen {
    records: Records,
    marks: Vec<String>,
    lost: u64,
    ended: Option<String>,
}

/// A consumer of the records of [`FUNCTION`].
#[derive(Debug)]
pub struct Consumer(Arc<(Mutex<Seen>, Condvar)>);

impl Consumer {
    /// Reads from now on, in a thread of its own.
    ///
    /// # Errors
    /// When it is refused.
    pub fn new(stream: UnixStream) -> Result<Self> {
        let globs = Globs { filter: vec![FUNCTION.to_owned()], notrace: Vec::new() };
        ask_stream(&stream, &StreamRequest { format: Format::Json, globs, tracer: None })?;
        let stream = accepted(stream)?;
        let shared = Arc::new((Mutex::new(Seen::default()), Condvar::new()));
        let own = Self(shared.clone());
        std::thread::spawn(move || Self(shared).read(BufReader::new(stream)));
        Ok(own)
    }

    fn read(&self, lines: impl BufRead) {
        let (seen, changed) = &*self.0;
        let note = |ended: String| {
            seen.lock().unwrap_or_else(PoisonError::into_inner).ended = Some(ended);
            changed.notify_all();
        };
        for line in lines.lines() {
            let line: Value = match line.map(|line| serde_json::from_str(&line)) {
                Ok(Ok(line)) => line,
                other => return note(format!("{other:?}")),
            };
            let text = |key: &str| line[key].as_str().unwrap_or_default().to_owned();
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            match &*text("event") {
                kind @ ("entry" | "return") => {
                    *seen.records.entry((text("tracer"), kind.to_owned())).or_default() += 1;
                }
                "mark" => seen.marks.push(line.to_string()),
                "loss" => seen.lost += 1,
                _ => continue,
            }
            changed.notify_all();
        }
        note("the end".to_owned());
    }

    /// What has come until a mark with this text has, how often something was lost, and the marks since the last
    /// time.
    fn until(&self, mark: &str) -> Result<(Records, u64, Vec<String>)> {
        let (seen, changed) = &*self.0;
        let end = Instant::now() + PATIENCE;
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        while !seen.marks.iter().any(|line| line.contains(mark)) {
            ensure!(seen.ended.is_none(), "the stream has ended: {:?}", seen.ended);
            let left = end.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "no mark {mark:?}: {:?}", seen.marks);
            seen = changed.wait_timeout(seen, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let marks = std::mem::take(&mut seen.marks);
        Ok((seen.records.clone(), seen.lost, marks))
    }
}

/// One that is there, with what it must have told so far.
#[derive(Debug)]
pub struct Kept {
    /// Its name.
    pub name: String,
    /// Which it is.
    pub exact: &'static Exact,
    expected: u64,
}

impl Kept {
    /// A random one.
    pub fn new(random: &mut Random, name: String) -> Self {
        Self { name, exact: &EXACT[random.below(EXACT.len())], expected: 0 }
    }
}

/// A trigger of which it is known how many calls are its own.
#[derive(Debug)]
pub struct KeptTrigger {
    /// Its number.
    pub id: u64,
    /// Its calls.
    pub exact: &'static Exact,
    /// At which of them it comes.
    pub call: u64,
    /// It has come.
    pub fired: bool,
    expected: u64,
}

impl KeptTrigger {
    /// One that has just been added.
    #[must_use]
    pub fn new(id: u64, exact: &'static Exact, call: u64) -> Self {
        Self { id, exact, call, fired: false, expected: 0 }
    }

    /// Compares what vmtrace says of it in a list, and its marks since the last time, with what must be after so
    /// many more calls on each CPU.
    fn compare(&mut self, calls: &[u64], list: &Value, marks: &[String]) -> Result<()> {
        self.expected += self.exact.expected(calls);
        let fired = self.expected >= self.call;
        let comes = fired && !std::mem::replace(&mut self.fired, fired);
        let all = list["triggers"].as_array().with_context(|| format!("no triggers: {list}"))?;
        let own = all.iter().find(|one| one["id"] == self.id);
        let own = own.with_context(|| format!("{self:?} is not in {list}"))?;
        let told = (own["left"].as_u64(), own["fired"].as_bool());
        let told_marks =
            marks.iter().filter(|mark| mark.contains(&format!("trigger {} (", self.id)));
        let told_marks = told_marks.count();
        let expected = (Some(self.call.saturating_sub(self.expected)), Some(fired));
        ensure!(
            told == expected && told_marks == usize::from(comes),
            "{self:?}: {told:?} and {told_marks} marks, expected {expected:?} and {comes}, after {calls:?}"
        );
        Ok(())
    }
}

/// Compares what tracers have told with what they must have, after so many more calls on each CPU.
/// The same of triggers. `table` and `list` are vmtrace's answers; `mark` the text of a mark behind all calls. Returns
/// how many tracers were compared.
///
/// # Errors
/// When one has told of a call too many or too few.
pub fn compare(
    (kept, triggers): (&mut [Kept], &mut [KeptTrigger]),
    calls: &[u64],
    (table, list): (&str, &str),
    (consumer, mark): (&Consumer, &str),
) -> Result<usize> {
    let table: Value = serde_json::from_str(table)?;
    let list: Value = serde_json::from_str(list)?;
    let (records, lost, marks) = consumer.until(mark)?;
    triggers.iter_mut().try_for_each(|trigger| trigger.compare(calls, &list, &marks))?;
    // A tracer has all of its lines here.
    let of = |list: &str, name: &str, hits: &dyn Fn(&Value) -> u64| -> Result<u64> {
        let lines = table[list].as_array().with_context(|| format!("no {list}: {table}"))?;
        Ok(lines.iter().filter(|line| line["tracer"] == name).map(hits).sum())
    };
    let mut compared = 0;
    for Kept { name, exact, expected } in kept {
        *expected += exact.expected(calls);
        let record =
            |kind: &str| records.get(&(name.clone(), kind.to_owned())).copied().unwrap_or(0);
        let (told, others) = match exact.tells {
            Tells::Count => (of("counts", name, &|line| line["hits"].as_u64().unwrap_or(0))?, 0),
            Tells::Sort => {
                let missed = of("histograms", name, &|line| line["missed"].as_u64().unwrap_or(0))?;
                let calls = |line: &Value| {
                    let buckets = line["buckets"].as_array().into_iter().flatten();
                    buckets.filter_map(|bucket| bucket[1].as_u64()).sum()
                };
                (of("histograms", name, &calls)? + missed, 0)
            }
            // Nobody can tell whose they were.
            Tells::Entry | Tells::Return if lost > 0 => continue,
            Tells::Entry => (record("entry"), record("return")),
            Tells::Return => (record("return"), record("entry")),
        };
        ensure!(
            (told, others) == (*expected, 0),
            "{name}={}: {told} of {expected} calls, and {others} that are not meant, after {calls:?}; {lost} losses",
            exact.text
        );
        compared += 1;
    }
    Ok(compared)
}

#[cfg(test)]
mod tests {
    use super::*;

    // With a wrong model a right total looks like a lost call, and the other way around.
    #[test]
    fn what_is_expected_is_what_is_called() {
        let calls = [1000, 300];
        for exact in &COUNTED {
            assert_eq!(exact.trigger(3).unwrap().call, 3);
        }
        for exact in EXACT.iter().chain(&COUNTED) {
            exact.spec("name").unwrap();
            let each = calls
                .iter()
                .enumerate()
                .flat_map(|(cpu, &calls)| (0..calls).map(move |call| (cpu, call % BACKLOGS)));
            let expected = each.filter(|&call| (exact.meant)(call)).count();
            assert_eq!(exact.expected(&calls), expected as u64, "{}", exact.text);
        }
    }
}
