//! Guests that are booted and traced in a shared emulated host.

use crate::{Finished, SharedHost};
use anyhow::{Context, Error, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use vmtrace::emulated::{FileSource, HostArch, HostError, HostOptions, cache_dir};
use vmtrace::initramfs::{Builder, Modules};
use vmtrace::kernel::Kernel;
use vmtrace::stream::{
    CountsOf, Exit, Frame, Header, LossReason, MarkKind, Reader, Record, RecordHead, Summary,
    VcpuTotals,
};

/// The guest kernels, by the names of their places in the cache.
pub const KERNELS: [&str; 3] = ["x86_64-6.1", "x86_64-6.12", "x86_64-7"];
/// Those for riscv64: without CALL_OPS, and with.
pub const RISCV_KERNELS: [&str; 2] = ["riscv64-6.12", "riscv64-7"];

/// Those that a test boots: one, which its `turn` decides, so that each kernel has its share and the suite an end in time;
/// all of them where `VMTRACE_TEST_KERNELS` is `all` (`scripts/test --all`).
#[must_use]
pub fn some<'a>(kernels: &[&'a str], turn: usize) -> Vec<&'a str> {
    match std::env::var("VMTRACE_TEST_KERNELS").as_deref() {
        Ok("all") => kernels.to_vec(),
        _ => kernels.iter().cycle().skip(turn).take(1).copied().collect(),
    }
}

pub(crate) const TRACE: &str = "/out/trace";
/// The cache in the host, which has the userland of guests.
pub(crate) const CACHE: &str = "/cache";
/// Where the workload program is in the host and in guests.
pub const WORKLOAD: &str = "/vmtrace-guest";

/// A kernel of the cache.
pub fn kernel(name: &str) -> Result<Kernel> {
    let path = cache_dir().context("no cache directory")?.join("kernels").join(name);
    let path = path.join("vmlinuz");
    Kernel::open(&path).with_context(|| format!("{}: run scripts/setup", path.display()))
}

/// A host that has these kernels, which are of its architecture, and the workload
/// program; kernels are decompressed here, where that is cheap.
pub fn options(workload: &str, kernels: &[&str]) -> Result<HostOptions> {
    let arch = arch_of(kernels.first().context("no kernel")?)?;
    let program = FileSource::Path(workload.into());
    let mut files = vec![(WORKLOAD.to_owned(), program)];
    for name in kernels {
        let kernel = kernel(name)?;
        if let Some(image) = kernel.bzimage() {
            files.push((format!("/k/{name}.bz"), FileSource::Bytes(image.to_vec())));
        }
        files.push((format!("/k/{name}"), FileSource::Bytes(kernel.vmlinux().to_vec())));
    }
    let userland = Path::new("userland").join(arch.name());
    for name in ["busybox", "applets", "package"] {
        let file = userland.join(name);
        let path = cache_dir().context("no cache directory")?.join(&file);
        ensure!(path.is_file(), "{}: run scripts/setup", path.display());
        files.push((format!("{CACHE}/{}", file.display()), FileSource::Path(path)));
    }
    let vmtrace = crate::vmtrace_for(arch)?;
    let source = vmtrace::SOURCE;
    Ok(HostOptions { arch, vmtrace, source, files, memory: 4096, ..HostOptions::default() })
}

/// Kernels' names begin with it.
pub fn arch_of(kernel: &str) -> Result<HostArch> {
    let arch = HostArch::ALL.into_iter().find(|arch| kernel.starts_with(arch.name()));
    arch.context("a kernel of no known architecture")
}

/// What guests are started with. Their consoles tell warnings and worse: every character leaves the guest, and all that
/// a kernel says takes a third of an emulated boot.
#[must_use]
pub fn cmdline(arch: HostArch) -> String {
    format!("{} loglevel=5", arch.guest_cmdline())
}

/// The function of a system call in a kernel of the cache.
pub fn syscall(kernel: &str, call: &str) -> Result<String> {
    Ok(syscall_of(arch_of(kernel)?, call))
}

/// That in all kernels of an architecture.
pub fn syscall_of(arch: HostArch, call: &str) -> String {
    let prefix = match arch {
        HostArch::X86_64 => "__x64_sys_",
        HostArch::Riscv64 => "__riscv_sys_",
    };
    format!("{prefix}{call}")
}

/// An initramfs whose guest has the socket device's driver: see [`initrd`].
pub fn socket_initrd(kernel: &str, line: &str, program: &Path) -> Result<Vec<u8>> {
    initrd(kernel, &["virtio_mmio", "vmw_vsock_virtio_transport"], line, program)
}

/// An initramfs whose guest loads these modules, and runs `line` with `program`. One of another architecture lacks the
/// agent, which the vmtrace there has (`--add-agent`).
pub fn initrd(kernel: &str, modules: &[&str], line: &str, program: &Path) -> Result<Vec<u8>> {
    let cache = cache_dir().context("no cache directory")?;
    let known = Modules::open(&cache.join("kernels").join(kernel).join("modules"))?;
    let modules = known.resolve(modules)?;
    let builder = Builder::new().run(Some(line)).add_file(program).modules(modules);
    let native = arch_of(kernel)?.is_native();
    Ok(if native { builder } else { builder.without_agent() }.build()?)
}

/// One record with its function's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// vCPU.
    pub vcpu: u32,
    /// Clock ticks.
    pub timestamp: u64,
    /// Process.
    pub pid: u32,
    /// All of one function share it.
    pub function: Arc<str>,
    /// For which tracer.
    pub tracer: u8,
    /// The stack pointer at the function's entry, where it is known.
    pub sp: Option<u64>,
    /// Which record of the stream it is: those of a vCPU are in their order.
    pub number: usize,
}

/// A whole trace.
#[derive(Debug)]
pub struct Trace {
    /// Its header.
    pub header: Header,
    /// Entries in the order of the stream: that of time on each vCPU.
    pub entries: Vec<Entry>,
    /// Returns in the same order.
    pub returns: Vec<Entry>,
    /// Jumps to other functions in place of returns.
    pub tails: Vec<Entry>,
    /// Returns of functions that are not traced, in the place of such that are.
    pub aids: Vec<Entry>,
    /// Its last frame.
    pub summary: Summary,
    /// All of it.
    pub stream: Vec<u8>,
}

/// How many records were lost, but for one of each vCPU that the guest's end has stopped in the
/// midst of it: what stops CPUs is an interrupt, which comes at any instruction.
pub fn missing(summary: &Summary) -> u64 {
    missing_after(summary, 1)
}

/// The same of a guest of which so many kernels have ended.
pub fn missing_after(summary: &Summary, ends: u64) -> u64 {
    let unfinished = LossReason::Unfinished.to_string();
    let stopped =
        |vcpu: &VcpuTotals| vcpu.lost_by_reason.get(&unfinished).map_or(0, |it| ends.min(*it));
    summary.lost() - summary.vcpus.iter().map(stopped).sum::<u64>()
}

impl Trace {
    /// Reads a stream to its end, which must be whole.
    pub fn read(stream: Vec<u8>) -> Result<Self> {
        let mut reader = Reader::new(&stream[..])?;
        let header = reader.header().clone();
        let mut names: BTreeMap<u64, Arc<str>> = BTreeMap::new();
        let (mut entries, mut returns) = (Vec::new(), Vec::new());
        let (mut tails, mut aids) = (Vec::new(), Vec::new());
        let (mut summary, mut number, mut events) = (None, 0, 0);
        while let Some(frame) = reader.next_frame()? {
            match frame {
                Frame::Symbols(list) => {
                    for symbol in list {
                        symbol.with_text(|s| names.insert(s.address, s.name.into()));
                    }
                }
                Frame::Records(batch) => {
                    for record in batch.records() {
                        let (list, sp) = match record {
                            Record::Entry { sp, .. } => (&mut entries, sp),
                            Record::Return { ret, .. } if ret.head.flags & RecordHead::AID != 0 => {
                                (&mut aids, Some(ret.sp.get()))
                            }
                            Record::Return { ret, .. } => (&mut returns, Some(ret.sp.get())),
                            Record::Tail { tail, .. } => (&mut tails, Some(tail.sp.get())),
                            Record::Event { .. } => {
                                events += 1;
                                continue;
                            }
                            Record::Other(..) => bail!("a record of another kind"),
                        };
                        let function = record.function().context("a record of no function")?;
                        let function = names.get(&header.address(function));
                        let function = function.context("a function without name")?;
                        let head = record.head();
                        list.push(Entry {
                            vcpu: batch.vcpu,
                            timestamp: head.timestamp.get(),
                            pid: head.pid.get(),
                            function: Arc::clone(function),
                            tracer: head.tracer,
                            sp,
                            number,
                        });
                        number += 1;
                    }
                }
                Frame::End(end) => summary = Some(*end),
                _ => {}
            }
        }
        let summary = summary.context("the trace has no end")?;
        let records = entries.len() + returns.len() + tails.len() + aids.len() + events;
        ensure!(summary.records() == records as u64, "the totals are wrong");
        Ok(Self { header, entries, returns, tails, aids, summary, stream })
    }

    /// How often functions were called, as the guest has counted them.
    ///
    /// # Errors
    /// When the stream is not whole.
    pub fn counted(&self) -> Result<BTreeMap<Arc<str>, i64>> {
        let mut reader = Reader::new(&*self.stream)?;
        let mut names: BTreeMap<u64, Arc<str>> = BTreeMap::new();
        let mut counted = BTreeMap::new();
        while let Some(frame) = reader.next_frame()? {
            match frame {
                Frame::Symbols(list) => {
                    for symbol in list {
                        symbol.with_text(|s| names.insert(s.address, s.name.into()));
                    }
                }
                Frame::Counts(counts) if counts.of == Some(CountsOf::Entries) => {
                    for count in counts.counts() {
                        let name = names.get(&self.header.address(count.function));
                        let name = name.context("a function without name")?;
                        *counted.entry(Arc::clone(name)).or_default() += i64::try_from(count.hits)?;
                    }
                }
                _ => {}
            }
        }
        Ok(counted)
    }

    /// The texts of marks of a kind.
    ///
    /// # Errors
    /// When the stream is not whole.
    pub fn marks(&self, kind: MarkKind) -> Result<Vec<String>> {
        let mut reader = Reader::new(&*self.stream)?;
        let mut texts = Vec::new();
        while let Some(frame) = reader.next_frame()? {
            if let Frame::Mark(mark) = frame
                && mark.kind == kind
            {
                texts.push(mark.text);
            }
        }
        Ok(texts)
    }

    /// Names of the functions in the records of one process.
    pub fn functions(&self, pid: u32) -> BTreeSet<&str> {
        self.entries.iter().filter(|e| e.pid == pid).map(|e| &*e.function).collect()
    }

    /// Fails unless records of each vCPU are in the order of time. They need not be where an
    /// interrupt can come between a record's reservation and its look at the clock, and hits
    /// sites itself.
    pub fn check_order(&self) -> Result<()> {
        let mut last: BTreeMap<u32, u64> = BTreeMap::new();
        for entry in &self.entries {
            let last = last.entry(entry.vcpu).or_default();
            ensure!(*last <= entry.timestamp, "vCPU {}: {last} {entry:?}", entry.vcpu);
            *last = entry.timestamp;
        }
        Ok(())
    }
}

/// QEMU's emulated AMD-V has races (docs/architecture.md) by which a guest, or its host, can hang or die of nested
/// faults, without any tracing as well. They have been got round as far as they are known; so many guests may be
/// lost in a test run before it is taken for a fault of ours.
const LOST_GUESTS: usize = 3;
/// As often a guest that was lost is run without tracing, and both counts are shown.
const UNTRACED: usize = 3;
static LOST: AtomicUsize = AtomicUsize::new(0);

/// Boots `kernel` with `args`; the console and the summary are its standard error.
pub fn boot(host: &SharedHost, kernel: &str, args: &[&str]) -> Result<(Finished, Trace)> {
    loop {
        let how = match boot_once(host, kernel, args) {
            Ok((finished, trace)) => {
                let err = finished.err();
                let hung = trace.summary.exit == Exit::Timeout && !args.contains(&"--timeout")
                    || trace.summary.exit == Exit::Hang && !args.contains(&"--hang-after");
                match lost_sign(&err) {
                    _ if hung => format!("timeout\n{err}"),
                    Some(sign) => format!("{sign}\n{err}"),
                    None => return Ok((finished, trace)),
                }
            }
            Err(error) if host_lost(&error) => error.to_string(),
            Err(error) => return Err(error),
        };
        lost(&format!("{kernel} {args:?}: {how}"))?;
        let untraced = (0..UNTRACED).filter(|_| is_lost_untraced(host, kernel, args)).count();
        eprintln!("  the same guest without tracing: {untraced} of {UNTRACED} lost");
    }
}

/// Options that make a guest, with and without a value; all others are of its trace.
const OF_GUEST: [&str; 8] =
    ["--cpus", "--memory", "--add", "--run", "--cmdline", "--initrd", "--modules", "--boot-image"];
const OF_GUEST_ALONE: [&str; 1] = ["--kaslr"];

fn without_tracing<'a>(args: &[&'a str]) -> Vec<&'a str> {
    let mut kept = Vec::new();
    let mut rest = args.iter();
    while let Some(&arg) = rest.next() {
        let name = arg.split('=').next().unwrap_or(arg);
        if OF_GUEST_ALONE.contains(&name) {
            kept.push(arg);
        } else if OF_GUEST.contains(&name) {
            kept.push(arg);
            kept.extend(rest.next().filter(|_| name == arg));
        }
    }
    kept
}

/// Whether a guest is lost that is not traced: what vmtrace loses must not be taken for that.
fn is_lost_untraced(host: &SharedHost, kernel: &str, args: &[&str]) -> bool {
    // One function that nobody calls, from its first call on: that is, none.
    let Ok(none) = syscall(kernel, "vhangup") else { return false };
    let args = [&without_tracing(args)[..], &["-f", &none, "--from", &none]].concat();
    match boot_once(host, kernel, &args) {
        Ok((finished, trace)) => {
            lost_sign(&finished.err()).is_some() || trace.summary.exit == Exit::Timeout
        }
        Err(error) => host_lost(&error),
    }
}

/// The emulated host itself, by its kernel's panic or silently; none of its programs can bring that about
/// but the first one, which is ours, by its end. Or a virtual CPU that has entered a guest never comes out of it.
pub fn host_lost(error: &Error) -> bool {
    match error.downcast_ref() {
        Some(HostError::Died { log, .. }) => !log.to_string().contains("kill init"),
        // A process in it that cannot even be killed.
        Some(HostError::Stuck(_)) => true,
        _ => false,
    }
}

/// What says that the emulation has lost a guest: exceptions while it enters an exception,
/// one within the other, until no stack is left.
const LOST_SIGNS: [&str; 3] =
    ["guest triple fault", "stack guard page was hit", "traps: PANIC: double fault"];

/// A sign on a guest's console, and in vmtrace's summary behind it, that it was lost.
pub fn lost_sign(said: &str) -> Option<&'static str> {
    let sign = LOST_SIGNS.into_iter().find(|sign| said.contains(sign));
    sign.or_else(|| is_stale(said).then_some("a breakpoint that is not in memory"))
}

/// Whether a guest has died of an int3 that was no more in its memory: the kernel changes its code by
/// such, waits until all CPUs have seen the new code, and shows what is there when it dies. So the
/// emulation has executed what it had translated before. (vmtrace writes none: its traps are others.)
fn is_stale(said: &str) -> bool {
    const INT3: &str = "cc";
    let Some((_, rest)) = said.split_once("Oops: int3:") else { return false };
    let code = rest.lines().find_map(|line| line.split_once("] Code: "));
    // The address is that behind the instruction.
    let before = code.and_then(|(_, code)| code.split_once(" <")?.0.split(' ').next_back());
    before.is_some_and(|byte| byte.len() == 2 && byte != INT3)
}

/// Counts a guest that the emulation has lost; fails when that are too many.
pub fn lost(how: &str) -> Result<()> {
    let lost = LOST.fetch_add(1, Ordering::Relaxed) + 1;
    eprintln!("guest {lost} lost by the emulation: {}", how.lines().next().unwrap_or_default());
    ensure!(lost <= LOST_GUESTS, "too many guests are lost: {how}");
    Ok(())
}

/// The same without a look at how the guest ended.
pub(crate) fn boot_once(
    host: &SharedHost,
    kernel: &str,
    args: &[&str],
) -> Result<(Finished, Trace)> {
    let arch = arch_of(kernel)?;
    let kernel = format!("/k/{kernel}");
    let cmdline = cmdline(arch);
    let mut all = vec!["boot", &kernel, "--host", "kvm", "-o", TRACE];
    if !args.contains(&"--timeout") {
        all.extend(["--timeout", "240"]);
    }
    if !args.contains(&"--cmdline") {
        all.extend(["--cmdline", &cmdline]);
    }
    all.extend(args);
    let mut finished = host.run(None, &all, &[TRACE], |job| {
        job.env.insert("VMTRACE_CACHE".to_owned(), CACHE.to_owned());
    })?;
    let trace = finished.outputs.pop().context("no output")?;
    let trace = Trace::read(trace)
        .with_context(|| format!("{all:?}: {:?}\n{}", finished.end, finished.err()))?;
    Ok((finished, trace))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What the emulation has lost is no defect of ours; an int3 that is there would be somebody's.
    #[test]
    fn a_breakpoint_that_is_gone_is_told_from_one_that_is_there() {
        let said = |code: &str| {
            format!(
                "[  140.440833] Oops: int3: 0000 [#1] SMP NOPTI\r\n[  140.441631] RIP: 0010:__schedule+0x2a7\r\n\
                 [  140.441871] Code: {code}\r\n[  140.441933] RSP: 0018:ffffffff83203e00\r\n"
            )
        };
        assert!(lost_sign(&said("95 c2 e9 27 05 00 00 0f <1f> 44 00 00")).is_some());
        assert_eq!(lost_sign(&said("95 c2 e9 27 05 00 00 cc <1f> 44 00 00")), None);
        for other in ["Bad RIP value.", "<1f> 44", "Unable to access opcode bytes at 0x1."] {
            assert_eq!(lost_sign(&said(other)), None, "{other}");
        }
        assert_eq!(lost_sign("Oops: 0000 [#1]\n[ 1.0] Code: 0f <1f> 44"), None);
    }

    // Another guest than the one that was lost tells nothing about it.
    #[test]
    fn a_guest_is_the_same_without_tracing() {
        let traced = ["-f", "vfs_*", "--cpus", "2", "--kaslr", "--graph", "--boot-image=/k/x.bz"];
        assert_eq!(without_tracing(&traced), ["--cpus", "2", "--kaslr", "--boot-image=/k/x.bz"]);
        assert_eq!(without_tracing(&["--run", "ls -f", "-n", "x"]), ["--run", "ls -f"]);
    }
}
