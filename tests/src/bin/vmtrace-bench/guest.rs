//! One boot of a guest, and the number of its records of any kind.

use anyhow::{Context, Result, ensure};
use vmtrace::stream::{Frame, Mark, Reader, Record, Summary};
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{WORKLOAD, arch_of, host_lost, lost, lost_sign};

const TRACE: &str = "/out/trace";

/// What came of it.
pub(crate) struct Run {
    /// The guest's console and the summary.
    pub(crate) text: String,
    /// Of the kernel.
    pub(crate) release: String,
    /// Records by kind.
    pub(crate) records: Records,
    pub(crate) marks: Vec<Mark>,
    pub(crate) summary: Summary,
    /// Calls that were counted and not recorded.
    pub(crate) calls: u64,
    /// Bytes of the trace.
    pub(crate) bytes: usize,
}

#[derive(Default)]
pub(crate) struct Records {
    pub(crate) entries: u64,
    pub(crate) returns: u64,
    pub(crate) tails: u64,
    pub(crate) events: u64,
}

/// Boots `kernel` with `args`, again if the emulation loses the guest.
pub(crate) fn boot(host: &SharedHost, kernel: &str, args: &[&str]) -> Result<Run> {
    loop {
        let how = match boot_once(host, kernel, args) {
            Ok(run) => match lost_sign(&run.text) {
                Some(sign) => format!("{sign}\n{}", run.text),
                None => return Ok(run),
            },
            Err(error) if host_lost(&error) => error.to_string(),
            Err(error) => return Err(error),
        };
        lost(&format!("{kernel} {args:?}: {how}"))?;
    }
}

/// The same with the workload program, which is given this `command`. The guest's own buffers are
/// small: each of its instances has one.
pub(crate) fn work(host: &SharedHost, kernel: &str, command: &str, args: &[&str]) -> Result<Run> {
    let command = format!("{WORKLOAD} {command}");
    let cmdline = format!("{} trace_buf_size=64k", arch_of(kernel)?.guest_cmdline());
    let all = ["--add", WORKLOAD, "--run", &command, "--cmdline", &cmdline];
    boot(host, kernel, &[&all[..], args].concat())
}

fn boot_once(host: &SharedHost, kernel: &str, args: &[&str]) -> Result<Run> {
    let cmdline = arch_of(kernel)?.guest_cmdline();
    let kernel = format!("/k/{kernel}");
    let mut all = vec!["boot", &kernel, "--host", "kvm", "-o", TRACE, "--timeout", "1200"];
    if !args.contains(&"--cmdline") {
        all.extend(["--cmdline", cmdline]);
    }
    all.extend(args);
    let mut finished = host.vmtrace(&all, &[TRACE])?;
    let trace = finished.outputs.pop().context("no output")?;
    let text = finished.err();
    let fails = || format!("{all:?}: {:?}\n{text}", finished.end);
    let read = read(&trace).with_context(fails)?;
    if lost_sign(&text).is_none() {
        ensure!(finished.end.code == Some(0), fails());
    }
    Ok(Run { text, ..read })
}

/// What the trace tells; the guest's console is not in it.
fn read(trace: &[u8]) -> Result<Run> {
    let mut reader = Reader::new(trace)?;
    let release = reader.header().release.clone();
    let (mut records, mut marks, mut summary) = (Records::default(), Vec::new(), None);
    let mut calls = 0;
    while let Some(frame) = reader.next_frame()? {
        match frame {
            Frame::Records(batch) => batch.records().for_each(|record| match record {
                Record::Entry { .. } => records.entries += 1,
                Record::Return { .. } => records.returns += 1,
                Record::Tail { .. } => records.tails += 1,
                Record::Event { .. } => records.events += 1,
                Record::Other(..) => {}
            }),
            Frame::Mark(mark) => marks.push(mark),
            Frame::Counts(counts) => calls += counts.counts().map(|count| count.hits).sum::<u64>(),
            Frame::End(end) => summary = Some(*end),
            _ => {}
        }
    }
    let summary = summary.context("the trace has no end")?;
    let counted = records.entries + records.returns + records.tails + records.events;
    ensure!(counted == summary.records(), "the totals are wrong");
    let (text, bytes) = (String::new(), trace.len());
    Ok(Run { text, release, records, marks, summary, calls, bytes })
}
