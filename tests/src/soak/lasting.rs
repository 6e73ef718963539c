//! The consumer that lasts: the trace itself, read from its first byte to its last, and checked.

use std::collections::BTreeMap;
use std::io::{PipeReader, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use vmtrace::stream::{Frame, MarkKind, Reader, Record, Summary};

use crate::asking::PATIENCE;
use crate::exact::FUNCTION;

/// What it has seen so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Of each vCPU: records.
    pub records: Vec<u64>,
    /// Of each vCPU: losses by the name of their reason.
    pub lost: Vec<BTreeMap<String, u64>>,
    /// Records of entries of the function whose calls are counted, by the name of the tracer.
    pub exact: BTreeMap<String, u64>,
    /// Marks of users, and how often each has come.
    pub marks: BTreeMap<String, u64>,
    /// The end of the stream, or why it is none.
    pub end: Option<Result<Summary, String>>,
}

impl Seen {
    pub(super) fn records(&self) -> u64 {
        self.records.iter().sum()
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost.iter().flat_map(BTreeMap::values).sum()
    }

    /// Fails unless the totals are those of the summary, vCPU by vCPU and reason by reason.
    pub(super) fn compare(&self, summary: &Summary) -> Result<()> {
        let told = summary.vcpus.iter().map(|vcpu| (vcpu.records, vcpu.lost));
        let seen = self.lost.iter().map(|reasons| reasons.values().sum());
        let seen: Vec<(u64, u64)> = self.records.iter().copied().zip(seen).collect();
        ensure!(told.eq(seen.iter().copied()), "seen {seen:?}, the summary: {:?}", summary.vcpus);
        let reasons = summary.vcpus.iter().map(|vcpu| &vcpu.lost_by_reason);
        ensure!(reasons.eq(&self.lost), "seen {:?}, the summary: {:?}", self.lost, summary.vcpus);
        Ok(())
    }
}

/// Shared by who reads and who asks what was read.
#[derive(Clone, Debug, Default)]
pub(super) struct Lasting(Arc<(Mutex<Seen>, Condvar)>);

impl Lasting {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads to the end. What is wrong with the stream is told by what it has seen; the rest is read all the same, so
    /// that vmtrace can go on.
    pub(super) fn read(&self, mut stream: PipeReader) {
        let end = self.check(&mut stream).map_err(|error| format!("{error:#}"));
        self.lock().end = Some(end);
        self.0.1.notify_all();
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    }

    /// The reader itself verifies numbers of frames and records, and sums of losses.
    fn check(&self, stream: &mut impl Read) -> Result<Summary> {
        let mut reader = Reader::new(stream)?;
        let header = reader.header().clone();
        let vcpus = usize::try_from(header.vcpus)?;
        let mut times = vec![0; vcpus];
        {
            let mut seen = self.lock();
            (seen.records, seen.lost) = (vec![0; vcpus], vec![BTreeMap::new(); vcpus]);
        }
        let mut exact = None;
        // Numbers are used again when a tracer has gone.
        let mut tracers: BTreeMap<u8, String> = BTreeMap::new();
        while let Some(frame) = reader.next_frame()? {
            match frame {
                Frame::Symbols(symbols) => {
                    for symbol in symbols {
                        if symbol.name == FUNCTION.as_bytes() && symbol.module.is_empty() {
                            exact = header.offset(symbol.address);
                        }
                    }
                }
                Frame::Records(batch) => {
                    let vcpu = usize::try_from(batch.vcpu)?;
                    let last = times.get_mut(vcpu).context("a vCPU that does not exist")?;
                    let mut own: BTreeMap<u8, u64> = BTreeMap::new();
                    for record in batch.records() {
                        let head = record.head();
                        let time = head.timestamp.get();
                        ensure!(*last <= time, "vCPU {vcpu}: {time} after {last}");
                        *last = time;
                        if let Record::Entry { entry, .. } = record
                            && Some(entry.function.get()) == exact
                        {
                            *own.entry(head.tracer).or_default() += 1;
                        }
                    }
                    let mut seen = self.lock();
                    seen.records[vcpu] += u64::from(batch.count);
                    for (tracer, count) in own {
                        let name =
                            tracers.get(&tracer).context("a record of a tracer without a name")?;
                        *seen.exact.entry(name.clone()).or_default() += count;
                    }
                }
                Frame::Tracers(list) => {
                    let texts = list.filter_map(|tracer| {
                        tracer.with_text(|tracer| (tracer.number, tracer.name.to_owned()))
                    });
                    tracers.extend(texts);
                }
                Frame::Loss(loss) => {
                    let mut seen = self.lock();
                    let lost = seen.lost.get_mut(usize::try_from(loss.vcpu)?);
                    let lost = lost.context("a vCPU that does not exist")?;
                    *lost.entry(loss.reason.to_string()).or_default() += loss.count;
                }
                Frame::Mark(mark) => {
                    let mut seen = self.lock();
                    if mark.kind == MarkKind::User {
                        *seen.marks.entry(mark.text).or_default() += 1;
                        self.0.1.notify_all();
                    }
                }
                Frame::End(summary) => {
                    ensure!(reader.next_frame()?.is_none(), "something follows the end");
                    return Ok(*summary);
                }
                _ => {}
            }
        }
        bail!("the stream has no end")
    }

    /// What was seen so far.
    pub(super) fn seen(&self) -> Seen {
        self.lock().clone()
    }

    /// What was seen when this mark had come.
    pub(super) fn until(&self, mark: &str) -> Result<Seen> {
        self.wait(|seen| seen.marks.contains_key(mark), mark)
    }

    /// The end of the stream.
    pub(super) fn end(&self) -> Result<Seen> {
        self.wait(|seen| seen.end.is_some(), "the end")
    }

    fn wait(&self, so: impl Fn(&Seen) -> bool, what: &str) -> Result<Seen> {
        let end = Instant::now() + PATIENCE;
        let mut seen = self.lock();
        while !so(&seen) {
            ensure!(seen.end.is_none(), "the trace has ended before {what}: {:?}", seen.end);
            let left = end.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "{what} does not come in the trace");
            seen = self.0.1.wait_timeout(seen, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(seen.clone())
    }
}
