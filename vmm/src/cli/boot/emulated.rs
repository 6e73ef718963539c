//! A run in the emulated host: the same run as one job there, with files, console and
//! trace passed through. Images are decompressed and records printed here, where
//! instructions are cheap.

use super::commands::Shell;
use super::input::Foreground;
use super::interactive::{self, Typing};
use super::outlet::{Ended, Outlet};
use super::{Args, OverflowArg, Watchers, disks, shares, trace_name, trace_output};
use crate::cli::exit;
use crate::deadline::{self, Deadline, Guard};
use crate::devices::virtio::blk::Disk;
use crate::devices::virtio::fs::Share;
use crate::emulated::{
    EmulatedHost, FileSource, HostArch, HostError, HostOptions, Interrupts, Job, JobEnd, Output,
    Stdin, Stopped, Tunnel,
};
use crate::kernel::Kernel;
use crate::tracer;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmtrace_system::say;

const VMLINUX: &str = "/job/vmlinux";
const BZIMAGE: &str = "/job/bzImage";
const INITRD: &str = "/job/initrd";
const SYSTEM_MAP: &str = "/job/System.map";
const TRACE: &str = "/job/trace";
const CONSOLE: &str = "/job/console";
const SOCKET: &str = "/job/socket";
const VSOCK: &str = "/job/vsock";
const GATEWAY: &str = "/job/vsock-gateway";
const CALLS: &str = "/job/calls";
const SHARES: &str = "/job/shares";

/// The part of a run that the message names if the run does not end.
const HOST: &str = "vmtrace in the emulated host, or that host,";
/// How long a signal may take to end a run there, and then the host, if nothing else does.
const HURRY: Duration = Duration::from_secs(120);
/// How much longer a run with a `--timeout` may take: it is prepared there, where instructions take their time,
/// and ends.
const AROUND: Duration = Duration::from_secs(240);
/// How long a run that tells something lives after that in any case.
const ALIVE: Duration = Duration::from_secs(60);
/// How long a run that is late may take to say why, and to end: what it does not do by itself is done to it.
const REMEDY: Duration = Duration::from_secs(60);
/// How long a log says nothing that is whole, and how often that is looked at.
const LOG_PAUSE: Duration = Duration::from_millis(500);
const LOG_LOOKS: usize = 8;
/// How long sockets may take to be closed: each has its own time for that.
const CLOSING: Duration = Duration::from_secs(30);

/// Memory of the host beside that of the guest and the files, MiB.
const HOST_MEMORY: u64 = 1024;

/// What the run says there is written here as far as that is possible, as what it says itself.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        say::text(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Boots an emulated host and runs the guest there; returns the exit code.
pub(super) fn run(
    args: &Args,
    watchers: &Watchers,
    kernel: &Kernel,
    initrd: Vec<u8>,
    (disks, shares): (&[Disk], Vec<Share>),
    guard: &mut Option<Guard>,
) -> Result<u8> {
    let interrupts = Arc::new(Interrupts::install().context("cannot handle signals")?);
    let deadline =
        guard.insert(Guard::start(HURRY, exit::FAILED).context("no watchdog")?).deadline();
    let limit = |part| match args.timeout.map(Duration::from_secs) {
        // Time there is counted by instructions.
        Some(timeout) if !args.icount => deadline.begin(part, timeout.saturating_add(AROUND)),
        _ => deadline.begin_open(part),
    };
    limit("the start of the emulated host");
    let files = files(args, kernel, initrd)?;
    // Each file is there twice while the initramfs is unpacked, and once in vmtrace.
    let content: u64 = files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let rings = tracer::far_memory(kernel.arch(), args.cpus.into(), args.buffer)?;
    let rings = rings.map_or(0, |(size, _)| size);
    let memory = args.memory.saturating_add(content.saturating_mul(3)).saturating_add(rings);
    let memory = HOST_MEMORY + memory / (1 << 20);
    let arch = HostArch::of(kernel.arch());
    let defaults = HostOptions::new(arch)?;
    let options = HostOptions {
        cpus: if args.icount { 1 } else { defaults.cpus },
        memory: u32::try_from(memory).context("--memory: too much for an emulated host")?,
        icount: args.icount,
        files: files
            .into_iter()
            .map(|(name, bytes)| (name.to_owned(), FileSource::Bytes(bytes)))
            .collect(),
        disks: disks::for_host(disks),
        source: crate::SOURCE,
        progress: true,
        interrupts: Some(Arc::clone(&interrupts)),
        ..defaults
    };
    let commands = &args.triggers.exec_at;
    let shell = (!commands.is_empty())
        .then(|| {
            Shell::start(commands, args.socket.as_deref()).context("--exec-at: cannot start sh")
        })
        .transpose()?;
    let mut calls = shell.as_ref().map(Shell::input).transpose()?;
    let mut host = EmulatedHost::start(&options).map_err(|error| enough(error, memory))?;
    let _host = deadline.at_drop(HOST, deadline::TIME);
    let tunnel = |here: &Option<PathBuf>, there| {
        here.as_deref().map(|here| host.tunnel(here, there)).transpose()
    };
    let _tunnels = (tunnel(&args.socket, SOCKET)?, tunnel(&args.vsock, VSOCK)?);
    let _gateway = args.vsock.as_deref().map(|here| host.gateway(GATEWAY, here)).transpose()?;
    let mut line = job_args(args, arch);
    line.extend(disks::in_host(disks));
    line.extend(shares::in_host(&shares, SHARES));
    let _shares = (!shares.is_empty()).then(|| offer(&host, shares)).transpose()?;
    let _sockets = deadline.at_drop("a connection to the run", CLOSING);
    let mut trace = Outlet::start(trace_output(args, watchers)?, &deadline)?;
    deadline.set_lost(Box::new(|| Some("what was not written by then is lost".to_owned())));
    let mut console: Box<dyn Write + Send> = match args.console.as_str() {
        _ if args.interactive => Box::new(interactive::screen()?),
        "stderr" | "none" => Box::new(std::io::sink()),
        path => Box::new(std::fs::File::create(path).with_context(|| path.to_owned())?),
    };
    // The trace has an output of its own: this is what --run writes.
    let mut stdout =
        args.has_stdout_for_run().then(|| run_stdout(args, &interrupts, &deadline)).transpose()?;
    let stdout_ended = stdout.as_ref().map(Outlet::ended);
    let unwritten: Vec<_> = stdout.iter().chain([&trace]).map(Outlet::unwritten).collect();
    let (mut no_stdout, mut stderr) = (Stderr, Stderr);
    let mut job = match &mut stdout {
        Some(stdout) => Job::new(line, stdout, &mut stderr),
        None => Job::new(line, &mut no_stdout, &mut stderr),
    };
    let mut terminal = None;
    if args.interactive {
        // It knows of a raw terminal that is to be taken again, so it is first.
        job.stdin = Stdin::Reader(Box::new(Typing::new(Arc::clone(&interrupts))?));
        // Not before: while the host comes up Ctrl-C ends it.
        terminal = Some(interactive::take_terminal(&[])?);
    } else if args.console == "stderr" {
        job.stdin = Stdin::Reader(Box::new(Foreground));
    }
    let ended = trace.ended();
    job.taken = Some(Box::new({
        let deadline = deadline.clone();
        move || deadline.allow(ALIVE)
    }));
    job.ended = Some(Box::new({
        let deadline = deadline.clone();
        move |end: Option<JobEnd>| {
            // Those who have a time of their own renew it.
            deadline.begin("what reads the run's output", deadline::TIME);
            if let Some(end) = end {
                deadline.set_code(end.exit_code());
                deadline.set_lost(Box::new(move || {
                    let bytes: u64 =
                        unwritten.iter().map(|it| it().unwrap_or_default().bytes).sum();
                    (bytes > 0).then(|| format!("{bytes} bytes of its output are lost"))
                }));
            }
            ended.note();
            stdout_ended.iter().for_each(Ended::note);
        }
    }));
    limit(HOST);
    let overdue = Arc::new(AtomicBool::new(false));
    job.overdue = Some(Arc::clone(&overdue));
    deadline.set_remedy(Box::new(move || overdue.store(true, Ordering::Relaxed)), REMEDY);
    job.outputs.push((TRACE.to_owned(), &mut trace));
    job.outputs.push((CONSOLE.to_owned(), &mut *console));
    job.outputs.extend(calls.iter_mut().map(|calls| (CALLS.to_owned(), calls as Output<'_>)));
    let asked = Arc::clone(&interrupts);
    job.interrupts = Some(interrupts);
    if let Ok(level) = std::env::var("VMTRACE_LOG") {
        job.env.insert("VMTRACE_LOG".to_owned(), level);
    }
    let end = host.run(job).map_err(|error| named(error, args));
    drop(terminal);
    drop(calls);
    if let Some(shell) = shell {
        deadline.begin("what --exec-at has started", deadline::TIME);
        shell.finish(|| {
            deadline.renew();
            asked.count() > 0
        });
    }
    deadline.begin("an output of the run", deadline::TIME);
    // Also of a host that has died.
    let written = stdout.map_or(Ok(()), Outlet::finish);
    let end = end?;
    // Also of a run that was late.
    let traced = trace.finish().with_context(|| format!("cannot write {}", trace_name(args)));
    in_time(end, &host)?;
    traced?;
    written.context("cannot write what --run has written to standard output")?;
    Ok(end.exit_code())
}

/// An error if the run did not end by itself: its log then has what its threads did.
fn in_time(end: JobEnd, host: &EmulatedHost) -> Result<()> {
    if end.stopped.is_some() && end.signal == Some(libc::SIGKILL) {
        let log = whole_log(host);
        bail!("vmtrace in the emulated host did not end when it was asked to, and was killed{log}");
    }
    ensure!(
        end.stopped != Some(Stopped::Timeout),
        "the run did not end in time: vmtrace in the emulated host ended when it was asked to{}",
        host.log_tail()
    );
    Ok(())
}

/// The end of the host's log, which may come later than the end of a job: by a serial port.
fn whole_log(host: &EmulatedHost) -> String {
    let mut log = host.log_tail().to_string();
    for _ in 0..LOG_LOOKS {
        std::thread::sleep(LOG_PAUSE);
        let more = host.log_tail().to_string();
        if std::mem::replace(&mut log, more) == log {
            break;
        }
    }
    log
}

/// For what the command writes to standard output.
fn run_stdout(
    args: &Args,
    interrupts: &Arc<Interrupts>,
    deadline: &Deadline,
) -> std::io::Result<Outlet> {
    let sink = std::fs::File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    let (limited, interrupts) = (args.timeout.is_some(), Arc::clone(interrupts));
    Outlet::of_program(Box::new(sink), move || limited || interrupts.count() > 0, deadline)
}

/// The servers of shares, for the vmtrace in the host: each is there once.
fn offer(host: &EmulatedHost, shares: Vec<Share>) -> Result<Tunnel, HostError> {
    let servers: Vec<_> = shares.into_iter().map(|share| Some(share.server)).collect();
    let servers = Mutex::new(servers);
    host.offer(SHARES, move |number| {
        let mut servers = servers.lock().unwrap_or_else(PoisonError::into_inner);
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        let server = servers.get_mut(number).and_then(Option::take);
        server.ok_or_else(|| std::io::ErrorKind::NotFound.into())
    })
}

/// What QEMU says of memory that it does not get names no cause that the user knows.
fn enough(error: HostError, mebibytes: u64) -> anyhow::Error {
    let refused = error.to_string().contains("Cannot allocate memory");
    let error = anyhow::Error::from(error);
    if refused {
        error.context(format!(
            "this machine does not have {mebibytes} MiB for guest and emulated host: give the \
             guest less (--memory, --buffer)"
        ))
    } else {
        error
    }
}

/// Outputs have the user's names.
fn named(error: HostError, args: &Args) -> HostError {
    match error {
        HostError::Output { what, reason } => {
            let what = match what.as_str() {
                TRACE => trace_name(args),
                CONSOLE if args.interactive => "the guest's console to the terminal".to_owned(),
                CONSOLE => args.console.clone(),
                _ => what,
            };
            HostError::Output { what, reason }
        }
        error => error,
    }
}

fn files(args: &Args, kernel: &Kernel, initrd: Vec<u8>) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut files = vec![(VMLINUX, kernel.vmlinux().to_vec()), (INITRD, initrd)];
    if let Some(image) = kernel.bzimage().filter(|_| args.kaslr) {
        files.push((BZIMAGE, image.to_vec()));
    }
    if let Some(path) = &args.system_map {
        let map = std::fs::read(path).with_context(|| path.display().to_string())?;
        files.push((SYSTEM_MAP, map));
    }
    Ok(files)
}

/// The command line of the vmtrace in the host.
fn job_args(args: &Args, arch: HostArch) -> Vec<String> {
    let console = match args.console.as_str() {
        same @ ("stderr" | "none") if !args.interactive => same,
        _ => CONSOLE,
    };
    let overflow = match args.overflow {
        OverflowArg::Drop => "drop",
        OverflowArg::Overwrite => "overwrite",
        OverflowArg::Block => "block",
    };
    let (cpus, memory) = (args.cpus.to_string(), args.memory.to_string());
    let mut job: Vec<String> = [
        "boot",
        VMLINUX,
        "--host",
        "kvm",
        "--filters-checked",
        "--initrd",
        INITRD,
        "-o",
        TRACE,
        "--console",
        console,
        "--overflow",
        overflow,
        "--cpus",
        &cpus,
        "--memory",
        &memory,
    ]
    .map(str::to_owned)
    .to_vec();
    job.push(format!("--cmdline={} {}", arch.guest_cmdline(), args.cmdline));
    job.extend(args.buffer.map(|size| format!("--buffer={size}")));
    job.extend(args.filter.iter().map(|glob| format!("--filter={glob}")));
    job.extend(args.notrace.iter().map(|glob| format!("--notrace={glob}")));
    let flags = [
        (args.graph, "--graph"),
        (args.args, "--args"),
        (args.retval, "--retval"),
        (args.context, "--context"),
        (args.exits, "--exits"),
        (args.count, "--count"),
        (args.interactive, "--typed"),
        (args.no_console_marks, "--no-console-marks"),
        (args.traces_boot(), "--trace-boot"),
        (args.no_seccomp, "--no-seccomp"),
        (args.children, "--children"),
        // Its clock is that of nobody who waits.
        (args.icount, "--icount"),
    ];
    job.extend(flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag.to_owned()));
    job.extend(args.graph_root.iter().map(|glob| format!("--graph-root={glob}")));
    job.extend(args.max_depth.map(|depth| format!("--max-depth={depth}")));
    job.extend(args.min_duration.map(|ns| format!("--min-duration={ns}ns")));
    job.extend(args.arg.iter().map(|values| format!("--arg={values}")));
    job.extend(args.returns.iter().map(|glob| format!("--returns={glob}")));
    let tracers = args.tracer.iter().chain(&args.hist).chain(&args.count_callers);
    job.extend(tracers.map(|globs| format!("--tracer={globs}")));
    job.extend(args.condition.iter().map(|condition| format!("--if={condition}")));
    job.extend(args.pid.iter().map(|pid| format!("--pid={pid}")));
    job.extend(args.comm.iter().map(|comm| format!("--comm={comm}")));
    job.extend(args.event.iter().map(|event| format!("--event={event}")));
    job.extend(args.triggers.options());
    if !args.triggers.exec_at.is_empty() {
        job.push(format!("--exec-to={CALLS}"));
    }
    job.extend(args.from.iter().map(|name| format!("--from={name}")));
    job.extend(args.timeout.iter().map(|seconds| format!("--timeout={seconds}")));
    job.push(format!("--hang-after={}", args.hang_after().map_or(0, |time| time.as_secs())));
    if args.socket.is_some() {
        job.push(format!("--socket={SOCKET}"));
    }
    if args.vsock.is_some() {
        job.push(format!("--vsock={VSOCK}"));
        job.push(format!("--vsock-gateway={GATEWAY}"));
    }
    if let Some(readers) = args.serve_guest.and_then(|readers| readers.to_possible_value()) {
        job.push(format!("--serve-guest={}", readers.get_name()));
    }
    job.push(format!("--cid={}", args.cid));
    if args.modules.is_some() {
        job.push("--with-modules".to_owned());
    }
    if args.system_map.is_some() {
        job.push(format!("--system-map={SYSTEM_MAP}"));
    }
    if args.kaslr {
        job.extend(["--kaslr".to_owned(), format!("--boot-image={BZIMAGE}")]);
    }
    if !arch.is_native() {
        match (&args.initrd, args.agent_in_initrd) {
            (None, _) => job.push("--add-agent=init".to_owned()),
            (Some(_), true) => job.push("--add-agent=beside".to_owned()),
            (Some(_), false) => {}
        }
    }
    if args.expects_run() {
        job.push("--expect-run".to_owned());
    }
    job
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::args;

    // The guest is there, and so are its exits.
    #[test]
    fn exits_are_asked_for_in_the_host() {
        let asks = |options| {
            let job = job_args(&args(options).unwrap(), HostArch::X86_64);
            job.iter().any(|option| option == "--exits")
        };
        assert_eq!([asks("--exits"), asks("--context")], [true, false]);
    }

    // The agent here cannot run there; in a user's own initrd it must not be its /init.
    #[test]
    fn the_host_of_another_architecture_adds_its_agent() {
        let added = |options: &str, arch: HostArch| {
            let mut args = args(options).unwrap();
            super::super::images::start_agent(&mut args).unwrap();
            job_args(&args, arch).into_iter().find(|option| option.starts_with("--add-agent"))
        };
        let other = HostArch::ALL.into_iter().find(|arch| !arch.is_native()).unwrap();
        for (options, expected) in [
            ("--run ls", Some("--add-agent=init")),
            ("--initrd i --run ls", Some("--add-agent=beside")),
            ("--initrd i --interactive", Some("--add-agent=beside")),
            ("--initrd i --interactive --cmdline=rdinit=/init", None),
            ("--initrd i", None),
        ] {
            assert_eq!(added(options, other).as_deref(), expected, "{options}");
            assert_eq!(added(options, HostArch::native()), None, "{options}");
        }
    }

    // The user has never heard of /job/trace.
    #[test]
    fn outputs_have_the_users_names() {
        let said = |options, what: &str| {
            let reason = std::io::Error::from_raw_os_error(libc::ENOSPC);
            let error = HostError::Output { what: what.to_owned(), reason };
            format!("{:#}", anyhow::Error::from(named(error, &args(options).unwrap())))
        };
        let full = "No space left on device (os error 28)";
        assert_eq!(said("-o /disk/t", TRACE), format!("cannot write /disk/t: {full}"));
        assert_eq!(said("--console c", CONSOLE), format!("cannot write c: {full}"));
        assert!(said("", TRACE).starts_with("cannot write the trace to standard output: "));
        assert!(said("", "standard output").starts_with("cannot write standard output: "));
    }
}
