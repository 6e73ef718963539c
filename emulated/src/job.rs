//! Jobs: a job runs a vmtrace (or another program) in the emulated host as if it ran here.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::error::HostError;
use super::host::{EmulatedHost, TICK};
use super::interrupts::Interrupts;
use super::link::{Event, Link};
use super::wire::{Exited, Frame, Kind, Run};
use vmtrace_system::terminal;

/// How long a job may take to stop when it was asked to.
const STOP_TIME: Duration = Duration::from_secs(30);
/// How long a killed job may take to be gone.
const KILL_TIME: Duration = Duration::from_secs(10);

/// How long an output of a job that has ended may have neither data nor an end: whatever the job has left is
/// killed by then, and who cannot be killed is stuck in the host's kernel.
const REST_TIME: Duration = Duration::from_secs(60);

/// A job's standard input.
pub enum Stdin {
    /// `/dev/null`.
    Empty,
    /// Whatever can be read there; a thread does it, until its end or the job's.
    Reader(Box<dyn Read + Send>),
}

/// A place for output.
pub type Output<'a> = &'a mut (dyn Write + Send);

/// What to run, and where its output goes as it comes.
pub struct Job<'a> {
    /// Path of the program in the host; none: vmtrace.
    pub program: Option<String>,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its environment, besides `PATH` and `HOME`.
    pub env: BTreeMap<String, String>,
    /// Its standard input.
    pub stdin: Stdin,
    /// Its standard output.
    pub stdout: Output<'a>,
    /// Its standard error.
    pub stderr: Output<'a>,
    /// Paths that the job writes to from beginning to end (they are FIFOs), and where that goes.
    pub outputs: Vec<(String, Output<'a>)>,
    /// Called when an output has taken something.
    pub taken: Option<Box<dyn Fn() + Send + Sync + 'a>>,
    /// Called once it has ended, with how, if that is known; outputs may not be done.
    pub ended: Option<Box<dyn FnOnce(Option<JobEnd>) + Send + 'a>>,
    /// It is stopped after this time.
    pub timeout: Option<Duration>,
    /// It is stopped when this is set, as if its time were over.
    pub overdue: Option<Arc<AtomicBool>>,
    /// The user's signals: the first stops the job, one too many ([`super::Patience`]) ends everything.
    pub interrupts: Option<Arc<Interrupts>>,
}

impl<'a> Job<'a> {
    /// Runs vmtrace with `args`.
    pub fn new<S: Into<String>>(
        args: impl IntoIterator<Item = S>,
        stdout: Output<'a>,
        stderr: Output<'a>,
    ) -> Self {
        Self {
            program: None,
            args: args.into_iter().map(Into::into).collect(),
            env: BTreeMap::new(),
            stdin: Stdin::Empty,
            stdout,
            stderr,
            outputs: Vec::new(),
            taken: None,
            ended: None,
            timeout: None,
            overdue: None,
            interrupts: None,
        }
    }
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobEnd {
    /// Its exit code; none: a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Why it was told to stop, if it was.
    pub stopped: Option<Stopped>,
}

/// Why a job was told to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// It took longer than its timeout, or was [`overdue`](Job::overdue).
    Timeout,
    /// The user's signal.
    Interrupt,
}

impl JobEnd {
    /// The exit code for a process that stands for the job, as a shell would have it.
    pub fn exit_code(&self) -> u8 {
        let code = self.code.or(self.signal.map(|s| 128 + s));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
    }
}

impl EmulatedHost {
    /// Runs a job to its end. Other jobs can follow unless the host itself failed.
    pub fn run(&mut self, job: Job<'_>) -> Result<JobEnd, HostError> {
        let link = self.link.clone();
        let number = link.number();
        let mut run = Run { program: job.program, args: job.args, env: job.env, ..Run::default() };
        let mut outputs: Vec<(String, u32, mpsc::Receiver<Vec<u8>>, Output<'_>)> = Vec::new();
        for (what, out) in [("standard output", job.stdout), ("standard error", job.stderr)] {
            let (stream, data) = link.open_read();
            outputs.push((what.to_owned(), stream, data, out));
        }
        for (path, out) in job.outputs {
            let (stream, data) = link.open_read();
            run.outputs.push((path.clone(), stream));
            outputs.push((path, stream, data, out));
        }
        let streams: Vec<u32> = outputs.iter().map(|o| o.1).collect();
        if let [stdout, stderr, ..] = streams.as_slice() {
            (run.stdout, run.stderr) = (*stdout, *stderr);
        }
        let stdin = match job.stdin {
            Stdin::Empty => None,
            Stdin::Reader(reader) => Some((link.open_write(), reader)),
        };
        run.stdin = stdin.as_ref().map(|(stream, _)| *stream);
        let request =
            Frame::json(Kind::Run, number, &run).map_err(|e| HostError::Protocol(e.to_string()))?;

        let taken = job.taken.unwrap_or_else(|| Box::new(|| ()));
        let limits = Limits {
            timeout: job.timeout,
            overdue: job.overdue.as_deref(),
            interrupts: job.interrupts.as_deref(),
        };
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let writers: Vec<_> = outputs
                .into_iter()
                .map(|(what, stream, data, out)| {
                    let (link, taken, over) = (&link, &taken, &over);
                    let rest = move || over.load(Ordering::Relaxed).then_some(REST_TIME);
                    (what, scope.spawn(move || forward(link, stream, &data, out, (taken, &rest))))
                })
                .collect();
            let end = self.send(&request).and_then(|()| {
                if let Some((stream, reader)) = stdin {
                    let link = link.clone();
                    // Not scoped: it may wait for input that never comes.
                    thread::spawn(move || link.copy(stream, reader));
                }
                self.wait(number, &run, limits)
            });
            job.ended.into_iter().for_each(|ended| ended(end.as_ref().ok().copied()));
            run.stdin.into_iter().for_each(|stream| link.abandon(stream));
            if end.is_err() {
                // Without an end nobody closes the streams, and the writers would wait for ever.
                streams.iter().for_each(|stream| link.abandon(*stream));
            }
            over.store(true, Ordering::Relaxed);
            let (mut failed, mut is_stuck) = (None, false);
            for (what, writer) in writers {
                match writer.join() {
                    Ok(Ok(())) => {}
                    // Whoever read it has enough; the job was told so.
                    Ok(Err(Cut::Output(e))) if e.kind() == io::ErrorKind::BrokenPipe => {}
                    Ok(Err(Cut::Output(reason))) => {
                        failed = failed.or(Some(HostError::Output { what, reason }));
                    }
                    Ok(Err(Cut::Silent)) => is_stuck = true,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            if is_stuck {
                self.kill();
                return Err(HostError::Stuck(self.log.tail()));
            }
            end.and_then(|end| failed.map_or(Ok(end), Err))
        })
    }

    fn wait(&mut self, job: u32, run: &Run, limits: Limits<'_>) -> Result<JobEnd, HostError> {
        let begin = Instant::now();
        let before = limits.count();
        let mut stopped = None;
        let mut deadline: Option<(Instant, i32)> = None;
        loop {
            match self.event(TICK)? {
                Some(Event::Exited(id, exited)) if id == job => {
                    let (code, signal) = match exited {
                        Exited::Code(code) => (Some(code), None),
                        Exited::Signal(signal) => (None, Some(signal)),
                    };
                    return Ok(JobEnd { code, signal, stopped });
                }
                Some(Event::Failed(id, reason)) if id == job => {
                    let program = run.program.as_deref().unwrap_or("vmtrace");
                    return Err(HostError::Failed { what: format!("run {program}"), reason });
                }
                _ => {}
            }
            let interrupts = limits.count() - before;
            if limits.interrupts.is_some_and(Interrupts::insists) {
                // Of the further signals none has a way back.
                terminal::restore();
                // Output may be stuck in a pipe that nobody reads; a further signal is not to be waited for.
                limits.interrupts.iter().for_each(|i| i.give_up());
                self.kill();
                return Err(HostError::Interrupted);
            }
            if stopped.is_none() {
                if interrupts > 0 {
                    stopped = Some(Stopped::Interrupt);
                } else if limits.are_passed(begin) {
                    stopped = Some(Stopped::Timeout);
                }
                if stopped.is_some() {
                    self.signal(job, libc::SIGINT)?;
                    deadline = Some((Instant::now() + STOP_TIME, libc::SIGKILL));
                }
            }
            match deadline {
                Some((time, signal)) if Instant::now() > time => {
                    if signal != libc::SIGKILL {
                        self.kill();
                        return Err(HostError::Stuck(self.log.tail()));
                    }
                    self.signal(job, signal)?;
                    deadline = Some((Instant::now() + KILL_TIME, 0));
                }
                _ => {}
            }
        }
    }

    fn signal(&self, job: u32, signal: i32) -> Result<(), HostError> {
        self.send(&Frame::number(Kind::Signal, job, signal.unsigned_abs()))
    }
}

#[derive(Clone, Copy)]
struct Limits<'a> {
    timeout: Option<Duration>,
    overdue: Option<&'a AtomicBool>,
    interrupts: Option<&'a Interrupts>,
}

impl Limits<'_> {
    fn count(&self) -> usize {
        self.interrupts.map_or(0, Interrupts::count)
    }

    fn are_passed(&self, begin: Instant) -> bool {
        self.timeout.is_some_and(|timeout| begin.elapsed() > timeout)
            || self.overdue.is_some_and(|overdue| overdue.load(Ordering::Relaxed))
    }
}

/// Why an output was not written to its end.
#[derive(Debug)]
enum Cut {
    /// Whoever takes it does not.
    Output(io::Error),
    /// The host says nothing more of it.
    Silent,
}

/// Writes a stream out as it comes, and lets more come only then. `rest` tells how long nothing may come, if there is
/// a limit by now.
fn forward(
    link: &Link,
    stream: u32,
    data: &mpsc::Receiver<Vec<u8>>,
    out: Output<'_>,
    (taken, rest): (&dyn Fn(), &dyn Fn() -> Option<Duration>),
) -> Result<(), Cut> {
    loop {
        let bytes = next(data, rest)?;
        let Some(bytes) = bytes else { return Ok(()) };
        if let Err(e) = out.write_all(&bytes).and_then(|()| out.flush()) {
            let _ = link.stop(stream);
            return Err(Cut::Output(e));
        }
        taken();
        let _ = link.grant(stream, bytes.len());
    }
}

/// What comes next of a stream; none at its end.
fn next(
    data: &mpsc::Receiver<Vec<u8>>,
    rest: &dyn Fn() -> Option<Duration>,
) -> Result<Option<Vec<u8>>, Cut> {
    let mut since = None;
    loop {
        match data.recv_timeout(TICK) {
            Ok(bytes) => return Ok(Some(bytes)),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(None),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if let Some(rest) = rest()
            && since.get_or_insert_with(Instant::now).elapsed() > rest
        {
            return Err(Cut::Silent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What a job has left that cannot be killed keeps its outputs open: nobody would ever learn of it.
    #[test]
    fn an_output_that_never_ends_is_waited_for_while_the_job_lives_alone() {
        let (sender, data) = mpsc::channel();
        let looks = std::cell::Cell::new(0);
        // The job lives for a while.
        let rest = || {
            looks.set(looks.get() + 1);
            (looks.get() > 3).then_some(Duration::ZERO)
        };
        assert!(matches!(next(&data, &rest), Err(Cut::Silent)));
        assert!(looks.get() > 3, "it is not cut while the job lives");
        sender.send(vec![7]).unwrap();
        let rest = || Some(Duration::ZERO);
        assert_eq!(next(&data, &rest).unwrap(), Some(vec![7]));
        drop(sender);
        assert_eq!(next(&data, &rest).unwrap(), None);
    }
}
