//! The program that tests and benchmarks run inside guests; static, no shell.
//!
//! ```text
//! vmtrace-guest getppid N CPU...       N calls on each CPU in turn, pinned
//! vmtrace-guest forks N CALLS          N processes that execute nothing, with so many calls each
//! vmtrace-guest executes NAME PROGRAM ARGUMENT...
//!                                      a thread that was called so executes that
//! vmtrace-guest files                  a fixed file workload between two calls of getpgid
//! vmtrace-guest ftrace GLOB files      the same under the guest's own function tracer;
//!                                      prints `ftrace-function NAME` for each seen
//! vmtrace-guest refused FUNCTION       prints what the guest's ftrace says to that filter
//! vmtrace-guest beside N CPUS          the guest's own tracers, one after the other and two at a
//!                                      time, on getppid's function: what each sees, and how often
//!                                      it was called in all
//! vmtrace-guest events N NAME...       the guest's own events (SYSTEM/NAME) on and off so many times,
//!                                      with work between; what it has seen of the last round
//! vmtrace-guest events-more FILE NAME,... NAME,...
//!                                      the same of a module that is loaded, a disk and packets, and then, with more
//!                                      events, of memory
//! vmtrace-guest ftrace-all files       the guest's tracer on all functions, then off
//! vmtrace-guest consume N              N calls of getppid, and as a consumer of the live trace
//!                                      over vsock waits until it has seen all of them
//! vmtrace-guest stranger               asks for the live trace as an unprivileged user; prints why not
//! vmtrace-guest call PORT              standard input to the host's vsock port, and what comes
//!                                      from there to standard output
//! vmtrace-guest agent CID COMMAND      asks the agent of that CID to run a command; what it says
//! vmtrace-guest load FILE              loads a kernel module
//! vmtrace-guest callers FILE           loads a module that is a direct caller of a function
//! vmtrace-guest livepatch FILE N       loads a module that patches a function, which is called N times, and N
//!                                      times again when the patch is gone
//! vmtrace-guest modules FILE ROUNDS READS [beside|busy]
//!                                      the module `dummy` comes, is used so often, and goes; with
//!                                      the guest's own tracer on it, or forks and files beside it
//! vmtrace-guest points ROUNDS N EVENT,... FILE...
//!                                      these modules come, xfs and bridge are used so often, and go;
//!                                      how often the guest's own trace has each event (SYSTEM/NAME)
//! vmtrace-guest bytes PORT N CONSOLE   sends N bytes to that port and gets N; then writes so
//!                                      many to the console and tells how long that took
//! vmtrace-guest bench N                instructions an event, under icount; the guest's function
//!                                      tracer beside N that have nothing to do
//! vmtrace-guest stress CPUS            forks and files until standard input says `end`; tells there
//!                                      where the kernel's code differs from what it was
//! vmtrace-guest load CPUS ROUNDS       forks and files so often on each of so many CPUs at once
//! vmtrace-guest hotplug ROUNDS         CPU 1 leaves, comes back and works, so many times
//! vmtrace-guest sleep TIMES            the machine is suspended to idle until something is typed on the console,
//!                                      so many times, with work between; how often getppid was called
//! vmtrace-guest code SITE ADDRESS...   what the kernel says of its processor's faults, code at these distances
//!                                      from its beginning, and the program that the site calls
//! vmtrace-guest laps                   moves every ring of vmtrace's many laps on
//! vmtrace-guest anywhere SEED N        writes N words anywhere into what vmtrace has in the guest
//! vmtrace-guest queues SEED N          N lives of devices whose queues have any content
//! vmtrace-guest records SEED N         writes N times into the kernel's records of ftrace
//! vmtrace-guest tables SEED N          writes N times into page tables of what vmtrace has in the guest
//! vmtrace-guest kexec IMAGE [initrd=FILE] [PARAMETER]...  goes on with that kernel (x86-64)
//! vmtrace-guest bench-ops              the same for vmtrace with tracers that have nothing to do
//! vmtrace-guest bench-ops MODULE N...  for the guest's tracers beside N that have nothing to do
//! vmtrace-guest bench-graph [guest]    entries with their returns: vmtrace, or the guest's tracer
//! vmtrace-guest bench-args [guest]     the same of entries with arguments
//! vmtrace-guest bench-events WHICH     the same of tracepoints: `switch` or `call`, or `guest`
//! vmtrace-guest bench-hackbench [guest] the same of messages between threads, with all events
//! vmtrace-guest bench-counts [guest]   the same of calls that are counted, sorted, or decided on
//! vmtrace-guest bench-counts load      the same of forks and files with every function traced
//! vmtrace-guest bench-counts graph     the same with the guest's function_graph, of all and of parts of the call tree
//! vmtrace-guest disk FILE SEED N THREADS
//!                                      N random requests of each thread to a disk of zeroes, which must
//!                                      have what was written; then its content as a hash
//! vmtrace-guest tree [guest]           calls that are the same each time; prints what the guest's
//!                                      function_graph shows of them, and this task's stack
//! vmtrace-guest held CPU               a call of getppid on that CPU, on which another task is to run meanwhile
//! vmtrace-guest rounds MS               rounds in which a task waits for its CPU, each with a line of how
//!                                      long that was, and of what the kernel's code is like
//! vmtrace-guest off N                  so many times with preemption, and then with interrupts off, each with a line
//!                                      of how long that was at least
//! vmtrace-guest crash                  panics the kernel (sysrq)
//! vmtrace-guest reboot                 restarts the machine as reboot(8) does
//! vmtrace-guest uptime                 CLOCK_BOOTTIME in nanoseconds
//! ```
#![allow(unsafe_code, reason = "system calls")]

mod bench;
mod beside;
mod bpf;
mod code;
mod counts;
mod cpus;
mod devices;
mod disk;
mod events;
mod family;
mod hackbench;
mod kcore;
mod livepatch;
mod modules;
mod queues;
mod records;
mod scribble;
mod stress;
mod tree;
mod waits;

use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use vmtrace::agent::protocol::{AGENT_PORT, Command as RunCommand, Run};
use vmtrace::agent::{Endpoint, Streams};
use vmtrace::devices::virtio::vsock::TRACE_PORT;
use vmtrace::emulated::HostArch;
use vmtrace::serve::{Format, Globs, Source, StreamRequest, accepted, ask_stream};
use vmtrace_tests::trace::syscall_of;

/// Bytes moved at a time.
const BLOCK: usize = 64 << 10;
const TRACING: &str = "/sys/kernel/tracing";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["getppid", count, cpus @ ..] => getppid(count.parse()?, cpus),
        ["forks", count, calls] => family::forks(count.parse()?, calls.parse()?),
        ["executes", name, program, args @ ..] => family::executes(name, program, args),
        ["files"] => files(),
        ["files", "ends"] => files().and_then(|()| ends()),
        ["ftrace", glob, "files"] => ftrace(glob),
        ["ftrace-all", "files"] => ftrace_all(),
        ["beside", count, cpus] => beside::beside(count.parse()?, cpus.parse()?),
        ["events", rounds, names @ ..] => events::events(rounds.parse()?, names),
        ["events-more", module, first, second] => events::more(module, first, second),
        ["refused", function] => refused(function),
        ["consume", count] => consume(count.parse()?),
        ["stranger"] => stranger(),
        ["call", port] => call(port.parse()?),
        ["agent", cid, command] => agent(cid.parse()?, command),
        ["load", file] => load(file),
        ["callers", file] => livepatch::callers(file),
        ["livepatch", file, reads] => livepatch::livepatch(file, reads.parse()?),
        ["modules", file, rounds, reads, "busy"] => {
            modules::busy(file, rounds.parse()?, reads.parse()?)
        }
        ["modules", file, rounds, reads, beside @ ..] => {
            modules::modules(file, rounds.parse()?, reads.parse()?, beside == ["beside"])
        }
        ["elsewhere", rounds, places, other, files @ ..] => {
            modules::elsewhere((rounds.parse()?, places.parse()?), other, files)
        }
        ["points", rounds, uses, events, files @ ..] => {
            let events: Vec<&str> = events.split(',').collect();
            modules::points(rounds.parse()?, uses.parse()?, &events, files)
        }
        ["bytes", port, count, console] => bytes(port.parse()?, count.parse()?, console.parse()?),
        ["bench", others] => bench::bench(others.parse()?),
        ["bench-ops", which @ ..] => bench::ops(which),
        ["bench-graph"] => bench::graph(false),
        ["bench-graph", "guest"] => bench::graph(true),
        ["bench-args"] => bench::args(false),
        ["bench-events", which] => bench::events(which),
        ["bench-hackbench"] => hackbench::hackbench(false),
        ["bench-hackbench", "guest"] => hackbench::hackbench(true),
        ["bench-args", "guest"] => bench::args(true),
        ["bench-counts"] => counts::counts(),
        ["bench-counts", "guest"] => counts::guest(),
        ["bench-counts", "load"] => counts::load(),
        ["bench-counts", "graph"] => counts::graph(),
        ["disk", file, seed, count, threads] => {
            disk::disk(file, seed.parse()?, count.parse()?, threads.parse()?)
        }
        ["tree"] => tree::tree(false),
        ["tree", "guest"] => tree::tree(true),
        ["rounds", ms] => waits::rounds(ms.parse()?),
        ["off", times] => waits::off(times.parse()?),
        ["held", cpu] => waits::held(cpu.parse()?),
        ["stress", cpus] => stress::stress(cpus.parse()?),
        ["load", cpus, rounds] => cpus::load(cpus.parse()?, rounds.parse()?),
        ["hotplug", rounds] => cpus::hotplug(rounds.parse()?),
        ["sleep", times] => cpus::sleep(times.parse()?),
        ["code", site, others @ ..] => code::code(site, others),
        ["laps"] => scribble::laps(),
        ["anywhere", seed, count] => scribble::anywhere(seed.parse()?, count.parse()?),
        ["queues", seed, count] => queues::queues(seed.parse()?, count.parse()?),
        ["records", seed, count] => records::records(seed.parse()?, count.parse()?),
        ["tables", seed, count] => records::tables(seed.parse()?, count.parse()?),
        ["kexec", image, parameters @ ..] => cpus::kexec(image, parameters),
        ["crash"] => Ok(fs::write("/proc/sysrq-trigger", "c")?),
        ["reboot"] => {
            // SAFETY: takes no pointers.
            unsafe { libc::reboot(libc::RB_AUTOBOOT) };
            bail!("no restart: {}", io::Error::last_os_error())
        }
        ["uptime"] => {
            println!("uptime {}", now(libc::CLOCK_BOOTTIME));
            Ok(())
        }
        _ => bail!("unknown arguments {args:?}"),
    }
}

fn set(file: &str, text: &str) -> Result<()> {
    fs::write(format!("{TRACING}/{file}"), text).with_context(|| format!("{file} <- {text:?}"))
}

fn pin(cpu: usize) -> Result<()> {
    pin_task(0, cpu)
}

/// Lets a task, 0 for this one, run on one CPU alone.
fn pin_task(task: libc::pid_t, cpu: usize) -> Result<()> {
    // SAFETY: a zeroed cpu_set_t is an empty set.
    let mut mask: libc::cpu_set_t = unsafe { core::mem::zeroed() };
    // SAFETY: the macro checks the index against the set's size.
    unsafe { libc::CPU_SET(cpu, &mut mask) };
    // SAFETY: a valid set.
    let result = unsafe { libc::sched_setaffinity(task, size_of_val(&mask), &raw const mask) };
    if result != 0 {
        bail!("no CPU {cpu}: {}", io::Error::last_os_error());
    }
    Ok(())
}

fn call_getppid() {
    // SAFETY: no arguments, always succeeds.
    unsafe { libc::syscall(libc::SYS_getppid) };
}

fn getppid(count: u64, cpus: &[&str]) -> Result<()> {
    println!("pid {}", std::process::id());
    for cpu in cpus {
        pin(cpu.parse()?)?;
        for _ in 0..count {
            call_getppid();
        }
    }
    Ok(())
}

/// The live trace as JSON lines, of `getppid` alone.
fn trace() -> Result<Box<dyn Read + Send>> {
    let source = Source::Vsock { cid: 2, port: TRACE_PORT };
    let stream = source.connect(Duration::from_secs(20)).context("no trace port")?;
    let globs =
        Globs { filter: vec![syscall_of(HostArch::native(), "getppid")], notrace: Vec::new() };
    ask_stream(&stream, &StreamRequest { format: Format::Json, globs, tracer: None })?;
    Ok(Box::new(accepted(stream)?))
}

fn stranger() -> Result<()> {
    const NOBODY: libc::uid_t = 65534;
    // SAFETY: no pointers; this process has no other thread.
    let failed = unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) };
    if failed != 0 {
        bail!("still root: {}", io::Error::last_os_error());
    }
    match trace() {
        Ok(_) => bail!("the trace is served"),
        Err(error) => println!("stranger: {error:#}"),
    }
    Ok(())
}

fn consume(count: u64) -> Result<()> {
    let mut lines = BufReader::new(trace()?).lines();
    let first = lines.next().context("no stream")??;
    println!("consume {first}");
    (0..count).for_each(|_| call_getppid());
    let mut seen = 0;
    while seen < count {
        let line = lines.next().context("the stream ended early")??;
        if line.contains("\"loss\"") {
            bail!("{line}");
        }
        seen += u64::from(line.contains("\"entry\""));
    }
    println!("consumed {seen}");
    Ok(())
}

/// What a process of the guest may not, even with the agent's port within its reach.
fn agent(cid: u32, command: &str) -> Result<()> {
    let connection = Endpoint::Vsock { cid, port: AGENT_PORT }.connect()?;
    let command = RunCommand::Line(command.into());
    let command = Run { command, directory: Vec::new(), environment: Vec::new() };
    let (mut stdout, mut stderr) = (io::stdout(), io::stderr());
    let streams =
        Streams { stdin: Box::new(io::empty()), stdout: &mut stdout, stderr: &mut stderr };
    let exit = connection.run(command, streams, |_| {})?;
    println!("the agent's command has ended: {exit:?}");
    Ok(())
}

/// Prints whether the guest's ftrace is still on: it ends itself at what it does not expect.
fn tell_ftrace() -> Result<()> {
    println!("ftrace-enabled {}", fs::read_to_string("/proc/sys/kernel/ftrace_enabled")?.trim());
    Ok(())
}

fn load(file: &str) -> Result<()> {
    let module = fs::File::open(file).with_context(|| file.to_owned())?;
    // SAFETY: a file descriptor and an empty string.
    let failed =
        unsafe { libc::syscall(libc::SYS_finit_module, module.as_raw_fd(), c"".as_ptr(), 0) };
    if failed != 0 {
        bail!("cannot load {file}: {}", io::Error::last_os_error());
    }
    Ok(())
}

fn host_port(port: u32) -> Result<UnixStream> {
    let source = Source::Vsock { cid: 2, port };
    source.connect(Duration::ZERO).with_context(|| format!("the host's port {port}"))
}

fn call(port: u32) -> Result<()> {
    let stream = host_port(port)?;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            copy(&mut io::stdin(), &mut &stream)?;
            stream.shutdown(Shutdown::Write)
        });
        match copy(&mut &stream, &mut io::stdout()) {
            // The other side has closed: Linux forgets it when this one is shut down later, until
            // that is answered (`SOCK_DONE` in `vsock_shutdown`, net/vmw_vsock/af_vsock.c).
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(0),
            done => done,
        }
    })?;
    Ok(())
}

/// By read and write: `splice` from a socket keeps the pipe locked while it waits, and whoever
/// is at its other end.
fn copy(from: &mut dyn Read, to: &mut dyn Write) -> io::Result<u64> {
    io::copy(from, to)
}

fn bytes(port: u32, count: u64, console: usize) -> Result<()> {
    // The peer measures: from when it is connected until it has seen the other's end.
    let stream = host_port(port)?;
    let mut zeros = BufReader::with_capacity(BLOCK, io::repeat(0).take(count));
    io::copy(&mut zeros, &mut &stream)?;
    drop(stream);
    let stream = host_port(port)?;
    let got = io::copy(&mut BufReader::with_capacity(BLOCK, stream), &mut io::sink())?;
    if got != count {
        bail!("{got} of {count} bytes");
    }
    let line = [[b'.'; 63].as_slice(), b"\n"].concat();
    let mut out = fs::OpenOptions::new().write(true).open("/dev/console")?;
    let start = now(libc::CLOCK_MONOTONIC);
    for _ in 0..console / line.len() {
        out.write_all(&line)?;
    }
    // SAFETY: a file descriptor.
    unsafe { libc::tcdrain(out.as_raw_fd()) };
    println!("\nconsole-nanoseconds {}", now(libc::CLOCK_MONOTONIC) - start);
    Ok(())
}

fn mark() {
    // SAFETY: no pointers.
    unsafe { libc::syscall(libc::SYS_getpgid, 0) };
}

fn files() -> Result<()> {
    mark();
    println!("pid {}", std::process::id());
    let path = "/tmp/vmtrace-workload";
    for round in 0..20 {
        fs::write(path, vec![round; 5000])?;
        assert_eq!(fs::read(path)?.len(), 5000);
        fs::metadata(path)?;
        fs::rename(path, "/tmp/vmtrace-workload-2")?;
        fs::create_dir("/tmp/vmtrace-dir")?;
        assert!(fs::read_dir("/tmp")?.count() >= 2);
        fs::remove_dir("/tmp/vmtrace-dir")?;
        fs::remove_file("/tmp/vmtrace-workload-2")?;
    }
    mark();
    Ok(())
}

/// Calls that fail, and calls that take long and not.
fn ends() -> Result<()> {
    for _ in 0..25 {
        // SAFETY: no pointers, and no descriptor.
        let closed = unsafe { libc::syscall(libc::SYS_close, -1) };
        assert_eq!(closed, -1);
    }
    for milliseconds in [1, 150, 1, 1, 150, 150, 1] {
        let time = libc::timespec { tv_sec: 0, tv_nsec: milliseconds * 1_000_000 };
        // SAFETY: a time, and nobody wants to know what is left of it.
        let failed = unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0) };
        if failed != 0 {
            bail!("no sleep: {}", io::Error::last_os_error());
        }
    }
    Ok(())
}

fn ftrace(glob: &str) -> Result<()> {
    set("current_tracer", "nop")?;
    set("set_ftrace_filter", glob)?;
    set("set_ftrace_pid", &std::process::id().to_string())?;
    set("trace", "")?;
    set("current_tracer", "function")?;
    files()?;
    // Switching tracers clears the buffer: stop and read before.
    set("tracing_on", "0")?;
    let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
    set("current_tracer", "nop")?;
    for function in functions_in(&trace) {
        println!("ftrace-function {function}");
    }
    Ok(())
}

fn ftrace_all() -> Result<()> {
    set("set_ftrace_filter", "")?;
    set("current_tracer", "function")?;
    files()?;
    set("current_tracer", "nop")?;
    tell_ftrace()
}

fn refused(function: &str) -> Result<()> {
    // A word that no space ends is only looked at when the file is closed, unheard.
    match fs::write(format!("{TRACING}/set_ftrace_filter"), format!("{function}\n")) {
        Ok(()) => println!("ftrace-filter accepted"),
        Err(error) => println!("ftrace-filter refused {}", error.raw_os_error().unwrap_or(0)),
    }
    Ok(())
}

/// Nanoseconds.
fn now(clock: libc::clockid_t) -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid timespec.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn functions_in(trace: &str) -> BTreeSet<&str> {
    trace
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(": ")?.1.split(' ').next())
        .collect()
}
