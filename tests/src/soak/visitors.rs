//! Consumers that come, read for a while, and go: some read all, some stop reading, some are killed.

use std::collections::BTreeSet;
use std::io::ErrorKind::{TimedOut, WouldBlock};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vmtrace::serve::{Format, Globs, StreamRequest, accepted, ask_stream};
use vmtrace::stream::{Frame, LossReason, Reader, StreamError};

use crate::asking::PATIENCE;
use crate::random::Random;
use crate::stress::connect;

/// At once.
pub(super) const VISITORS: u64 = 4;
/// The longest visit.
const LONGEST_MS: usize = 15_000;
/// How often those who read look whether they are to go.
const LOOK: Duration = Duration::from_millis(100);

/// A consumer of the raw stream.
pub(super) fn join(socket: &Path) -> Result<UnixStream> {
    let stream = connect(socket)?;
    let request = StreamRequest { format: Format::Raw, globs: Globs::default(), tracer: None };
    ask_stream(&stream, &request)?;
    Ok(stream)
}

/// What has become of them.
#[derive(Debug, Default)]
pub(super) struct Visits {
    /// Nobody is to come, and who is there goes.
    quiet: AtomicBool,
    over: AtomicBool,
    /// Who is there now.
    present: AtomicUsize,
    tally: Mutex<Tally>,
}

/// Visits by kind.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub read: u64,
    pub stopped: u64,
    pub killed: u64,
    /// Records that visitors got.
    pub records: u64,
    /// Records that they were told they had missed.
    pub missed: u64,
    /// What went wrong.
    pub wrong: BTreeSet<String>,
}

impl Tally {
    pub(super) fn visits(&self) -> u64 {
        self.read + self.stopped + self.killed
    }
}

impl Visits {
    pub(super) fn tally(&self) -> Tally {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, change: impl FnOnce(&mut Tally)) {
        change(&mut self.tally.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Sends all away, and lets nobody come until [`Visits::go_on`].
    pub(super) fn leave(&self) -> Result<()> {
        self.quiet.store(true, Ordering::SeqCst);
        let gone = crate::within(PATIENCE, || self.present.load(Ordering::SeqCst) == 0);
        ensure!(gone, "a consumer does not go");
        Ok(())
    }

    pub(super) fn go_on(&self) {
        self.quiet.store(false, Ordering::SeqCst);
    }

    /// For good.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    fn must_go(&self, until: Instant) -> bool {
        Instant::now() > until || self.quiet.load(Ordering::SeqCst) || self.is_over()
    }

    /// One visitor after the other, until the end.
    pub(super) fn receive(&self, socket: &Path, vmtrace: &Path, seed: u64) {
        let mut random = Random::new(seed);
        while !self.is_over() {
            self.present.fetch_add(1, Ordering::SeqCst);
            if !self.quiet.load(Ordering::SeqCst)
                && let Err(error) = self.visit(socket, vmtrace, &mut random)
            {
                // A guest that ends takes all with it.
                if !crate::within(Duration::from_secs(5), || self.is_over()) {
                    let error = format!("a consumer: {error:#}");
                    self.note(|tally| tally.wrong.extend([error]));
                }
            }
            self.present.fetch_sub(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(10 + random.below(1000) as u64));
        }
    }

    fn visit(&self, socket: &Path, vmtrace: &Path, random: &mut Random) -> Result<()> {
        let time = Duration::from_millis(200 + random.below(LONGEST_MS) as u64);
        let until = Instant::now() + time;
        match random.below(3) {
            0 => self.kill(socket, vmtrace, random, until),
            kind => self.read(socket, kind == 1, until),
        }
    }

    /// Follows the trace as another program does, and is killed.
    fn kill(
        &self,
        socket: &Path,
        vmtrace: &Path,
        random: &mut Random,
        until: Instant,
    ) -> Result<()> {
        let mut command = Command::new(vmtrace);
        command.arg("stream").arg(socket).args(["--wait", "300"]);
        command.args(["--format", ["text", "json", "graph", "top", "raw"][random.below(5)]]);
        if random.below(2) == 0 {
            command.args(["-f", "vfs_*"]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().context("vmtrace stream")?;
        let mut ended = None;
        while !self.must_go(until) && ended.is_none() {
            thread::sleep(LOOK);
            ended = child.try_wait()?;
        }
        // SIGKILL
        child.kill()?;
        child.wait()?;
        if let Some(status) = ended {
            bail!("vmtrace stream has ended by itself: {status}");
        }
        self.note(|tally| tally.killed += 1);
        Ok(())
    }

    /// Reads the stream from the middle and checks it; takes nothing of it in between if it `stops`.
    fn read(&self, socket: &Path, stops: bool, until: Instant) -> Result<()> {
        let stream = join(socket)?;
        let own = stream.try_clone()?;
        let mut reader = Reader::new(accepted(stream)?)?;
        own.set_read_timeout(Some(LOOK))?;
        if stops {
            while !self.must_go(until) {
                thread::sleep(LOOK);
            }
        }
        let (mut records, mut missed) = (0, 0);
        // What has waited meanwhile is read for as long again: it must say what is missing of it.
        let until = if stops { Instant::now() + Duration::from_secs(5) } else { until };
        while !self.must_go(until) {
            match reader.next_frame() {
                Ok(Some(Frame::Records(batch))) => records += u64::from(batch.count),
                Ok(Some(Frame::Loss(loss))) if loss.reason == LossReason::Consumer => {
                    missed += loss.count;
                }
                Ok(Some(_)) => {}
                Ok(None) => bail!("its stream has ended"),
                Err(StreamError::Io(error)) if [WouldBlock, TimedOut].contains(&error.kind()) => {}
                Err(error) => return Err(error).context("its stream"),
            }
        }
        self.note(|tally| {
            tally.records += records;
            tally.missed += missed;
            if stops {
                tally.stopped += 1;
            } else {
                tally.read += 1;
            }
        });
        Ok(())
    }
}
