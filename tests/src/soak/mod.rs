//! Long runs: everything is traced for hours while consumers come and go and what is traced changes. `scripts/soak`.

mod changes;
mod lasting;
mod look;
mod verdict;
mod visitors;

pub use look::Look;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{PipeReader, PipeWriter};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use vmtrace::emulated::{
    EmulatedHost, FileSource, HostArch, HostError, HostOptions, Job, JobEnd, Stdin,
};
use vmtrace::kernel::SiteSection;
use vmtrace::serve::Control;

use crate::asking::{Asking, PATIENCE};
use crate::console::Console;
use crate::exact::FUNCTION;
use crate::random::Random;
use crate::trace::{TRACE, WORKLOAD, arch_of, cmdline, kernel, options};
use changes::{Changes, KEPT};
use lasting::{Lasting, Seen};
use verdict::Row;
use visitors::{VISITORS, Visits};

/// In the host: a program that looks at vmtrace, and the socket.
const HELPER: &str = "/host-helper";
const SOCKET: &str = "/soak.socket";
/// Looks at the least: a shorter run has them more often than each minute.
const LOOKS: u32 = 12;
const CPUS: &str = "2";
/// What vmtrace calls the tracer of the filter (`-f`).
const FILTER: &str = "tracer0";
/// Records, of 24 bytes, that fill the queue of a consumer (64 MiB), and a fourth more.
const FILLS: u64 = (80 << 20) / 24;
/// Changes while calls are counted.
const CHANGES: usize = 6;
/// What begins a line by which the helper is asked for a look, and its answer.
pub const LOOK: &str = "look";

/// What is to be run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// For how long, once the guest is up.
    pub time: Duration,
    /// A kernel of the cache.
    pub kernel: String,
    /// What it may be repeated with (not its moments); not 0.
    pub seed: u64,
}

/// Runs it, with a line of figures each minute and a table at the end.
///
/// # Errors
/// With the verdict, if it is a bad one.
pub fn soak(plan: &Plan) -> Result<()> {
    let arch = arch_of(&plan.kernel)?;
    let [workload, helper] =
        ["vmtrace-guest", "host-helper"].map(|program| crate::cross(program, arch));
    let options = options(&workload?.to_string_lossy(), &[&plan.kernel])?;
    let mut host = EmulatedHost::start(&HostOptions { progress: true, ..options })?;
    host.put_file(HELPER, &FileSource::Path(helper?))?;
    let directory = tempfile::tempdir()?;
    let run = Run {
        plan,
        socket: &directory.path().join("socket"),
        lasting: Lasting::default(),
        console: Console::default(),
        looks: Console::default(),
        visits: Visits::default(),
    };
    run.run(&mut host, arch)
}

struct Run<'a> {
    plan: &'a Plan,
    socket: &'a Path,
    lasting: Lasting,
    console: Console,
    /// What the helper says.
    looks: Console,
    visits: Visits,
}

/// What has come of it.
#[derive(Debug, Default)]
struct Done {
    rows: Vec<Row>,
    changes: u64,
    refused: u64,
    answered: u64,
    marks: BTreeSet<String>,
    reasons: BTreeMap<String, u64>,
    /// Calls that the guest has made and vmtrace has counted, and those that had to be, and were, recorded.
    calls: u64,
    recorded: u64,
    rounds: u64,
}

impl Run<'_> {
    fn run(&self, host: &mut EmulatedHost, arch: HostArch) -> Result<()> {
        let kernel = kernel(&self.plan.kernel)?;
        let kept = kernel.sites().iter().filter(|site| site.section == SiteSection::Text);
        let named: Vec<&str> = kept.filter_map(|site| kernel.site_name(site)).collect();
        let (image, work) =
            (format!("/k/{}", self.plan.kernel), format!("{WORKLOAD} stress {CPUS}"));
        // It comes to its end by itself.
        let limit = self.plan.time * 2 + PATIENCE * 4;
        let (cmdline, seconds) = (cmdline(arch), limit.as_secs().to_string());
        let kept = format!("{KEPT}={FUNCTION}:count");
        let mut args = vec!["watch", "boot", &image, "--host", "kvm", "-o", TRACE, "-f", "*"];
        args.extend(["--tracer", &kept, "--returns", "*", "--cpus", CPUS, "--memory", "512M"]);
        args.extend(["--timeout", &seconds, "--socket", SOCKET, "--cmdline", &cmdline]);
        args.extend(["--add", WORKLOAD, "--run", &work]);

        let (trace, trace_in) = std::io::pipe()?;
        let (reader, input) = std::io::pipe()?;

        let vmtrace = crate::vmtrace()?;
        let tunnel = host.tunnel(self.socket, SOCKET)?;
        let done = Mutex::new((Done::default(), Ok(())));
        let end = thread::scope(|scope| {
            scope.spawn(|| self.lasting.read(trace));
            for number in 0..VISITORS {
                let (vmtrace, seed) = (&vmtrace, self.plan.seed + 1 + number);
                scope.spawn(move || self.visits.receive(self.socket, vmtrace, seed));
            }
            scope.spawn(|| {
                let mut guest = Asking::new(self.console.clone(), input);
                let (mut changes, mut figures) =
                    (Changes::new(self.socket, &named), Done::default());
                let driven = self.drive(&mut guest, &mut changes, &mut figures);
                self.visits.end();
                // However it went; the guest may be gone.
                guest.end();
                figures.take(changes);
                *done.lock().unwrap_or_else(PoisonError::into_inner) = (figures, driven);
            });
            let end = self.host(host, args, reader, trace_in, limit + PATIENCE);
            self.visits.end();
            self.console.end();
            self.looks.end();
            // Who still waits for an answer learns that there is none.
            drop(tunnel);
            end
        });
        let (done, driven) = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.judge(&done, driven, end)
    }

    /// vmtrace in the host, to its end; that of the trace follows.
    fn host(
        &self,
        host: &mut EmulatedHost,
        args: Vec<&str>,
        input: PipeReader,
        mut trace: PipeWriter,
        timeout: Duration,
    ) -> Result<JobEnd, HostError> {
        let (mut stdout, mut stderr) = (self.looks.clone(), self.console.clone());
        let mut job = Job::new(args, &mut stdout, &mut stderr);
        job.program = Some(HELPER.to_owned());
        job.env.insert("VMTRACE_CACHE".to_owned(), crate::trace::CACHE.to_owned());
        job.timeout = Some(timeout);
        job.stdin = Stdin::Reader(Box::new(input));
        job.outputs.push((TRACE.to_owned(), &mut trace));
        host.run(job)
    }

    fn drive(&self, guest: &mut Asking, changes: &mut Changes<'_>, done: &mut Done) -> Result<()> {
        let time = self.plan.time;
        let every = Duration::from_secs(60).min(time / LOOKS);
        guest.ready()?;
        self.visits.leave()?;
        self.warm_up()?;
        self.visits.go_on();
        let begin = Instant::now();
        let mut random = Random::new(self.plan.seed);
        println!("{}", verdict::HEADER);
        let mut next = every;
        while begin.elapsed() < time {
            self.round(guest, changes, &mut random, done)?;
            // What it is, the verdict says.
            ensure!(self.visits.tally().wrong.is_empty(), "the run was ended by what follows");
            if begin.elapsed() >= next {
                let row = self.row(guest, changes, done, begin.elapsed())?;
                println!("{row}");
                done.rows.push(row);
                next = begin.elapsed() + every;
            }
        }
        self.visits.end();
        Ok(())
    }

    /// As many consumers as ever come let their queues fill up. Queues share what is in several of them: so one comes
    /// after the other, when the former's is full. The allocator keeps what they took: without this the memory of vmtrace
    /// would grow until this has happened by chance.
    fn warm_up(&self) -> Result<()> {
        let mut idle = Vec::new();
        for _ in 0..VISITORS {
            idle.push(visitors::join(self.socket)?);
            let end = Instant::now() + PATIENCE;
            let before = self.lasting.seen().records();
            while self.lasting.seen().records() < before + FILLS {
                ensure!(Instant::now() < end, "a queue does not fill up");
                thread::sleep(Duration::from_secs(1));
            }
        }
        Ok(())
    }

    /// Changes while calls are made that the guest counts itself, or while its own tracers come and go; and a pause
    /// now and then.
    fn round(
        &self,
        guest: &mut Asking,
        changes: &mut Changes<'_>,
        random: &mut Random,
        done: &mut Done,
    ) -> Result<()> {
        done.rounds += 1;
        match random.below(8) {
            0 => {
                changes.pause(&Control::Pause)?;
                thread::sleep(Duration::from_millis(random.below(2000) as u64));
                return changes.pause(&Control::Resume);
            }
            1 => {
                let churn = guest.request(&format!("churn {}", 1 + random.below(1 << 30)))?;
                let ours = changes.disturb(random);
                let theirs = guest.answer(&churn);
                ours?;
                return theirs.map(drop);
            }
            _ => {}
        }
        guest.ask("begin")?;
        for _ in 0..=random.below(CHANGES) {
            changes.disturb(random)?;
        }
        let calls = guest.ask("finish")?;
        let calls =
            calls.iter().filter_map(|line| line.strip_prefix("called ")?.parse::<u64>().ok());
        let calls: u64 = calls.sum();
        let ends = format!("round {} ends", done.rounds);
        changes.mark(ends.clone())?;
        done.calls += calls;
        let counted = changes.counted()?;
        ensure!(
            counted == done.calls,
            "the guest has made {} calls of {FUNCTION}, vmtrace has counted {counted}",
            done.calls
        );
        // The stream is behind by no more than what is in the rings; all of this is in front of the mark.
        let seen = self.lasting.until(&ends)?;
        done.recorded(&seen)
    }

    /// The figures, while no consumer is there but the one that lasts.
    fn row(
        &self,
        guest: &mut Asking,
        changes: &mut Changes<'_>,
        done: &Done,
        elapsed: Duration,
    ) -> Result<Row> {
        self.visits.leave()?;
        let mut left = Ok(0);
        let gone = crate::within(PATIENCE, || {
            left = changes.json(&Control::Status).map(|status| match &status["consumers"] {
                serde_json::Value::Number(count) => count.as_u64().unwrap_or(u64::MAX),
                _ => u64::MAX,
            });
            !matches!(left, Ok(1..))
        });
        let left = left?;
        ensure!(gone, "{left} consumers have gone, and are still served");
        let number = done.rows.len();
        guest.line(&format!("{LOOK} {number}"))?;
        let told = format!("{LOOK} {number} ");
        let find = |said: &str| {
            said.lines().find_map(|line| Some(line.strip_prefix(&told)?.trim().to_owned()))
        };
        let look = self.looks.wait(PATIENCE, find)?.context("no look at vmtrace")?;
        self.visits.go_on();
        let seen = self.lasting.seen();
        Ok(Row {
            elapsed,
            records: seen.records(),
            lost: seen.lost(),
            changes: changes.changes,
            refused: changes.refused,
            visits: self.visits.tally().visits(),
            look: look.parse().context(look)?,
        })
    }

    fn judge(&self, done: &Done, driven: Result<()>, end: Result<JobEnd, HostError>) -> Result<()> {
        let mut wrong = Vec::new();
        let said = self.console.text();
        if let Err(error) = driven {
            wrong.push(format!("{error:#}"));
        }
        match end {
            Ok(end) if end.code == Some(0) => {}
            Ok(end) => wrong.push(format!("vmtrace has ended with {end:?}")),
            Err(error) => wrong.push(format!("the host: {error}")),
        }
        let seen = self.lasting.end()?;
        verdict::print(done, &seen, &self.visits.tally(), &said, &mut wrong);
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        println!("verdict: good");
        Ok(())
    }
}

impl Done {
    fn take(&mut self, changes: Changes<'_>) {
        (self.changes, self.refused) = (changes.changes, changes.refused);
        (self.answered, self.marks, self.reasons) =
            (changes.answered, changes.marks, changes.reasons);
    }

    /// Records of the calls so far: as many as there were calls, but for losses that were told.
    fn recorded(&mut self, seen: &Seen) -> Result<()> {
        self.recorded = seen.exact.get(FILTER).copied().unwrap_or(0);
        let missing = self.calls.checked_sub(self.recorded);
        let missing = missing.with_context(|| {
            format!("{} records of {} calls of {FUNCTION}", self.recorded, self.calls)
        })?;
        let lost = seen.lost();
        ensure!(
            missing <= lost,
            "{missing} of {} calls have no record, {lost} are told",
            self.calls
        );
        Ok(())
    }
}
