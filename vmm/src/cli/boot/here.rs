//! A run on the KVM of this machine.

use super::commands::{self, Shell};
use super::input::Input;
use super::interactive::{self, Decoder, Keys, Plain, Teller, Typed, UserKeys, Window};
use super::run_output::RunOutput;
use super::{Args, Watchers, trace_name, trace_output};
use crate::agent::protocol::AGENT_PORT;
use crate::agent::{AgentMessage, AgentParser};
use crate::cli::exit;
use crate::deadline::{self, Deadline, Guard};
use crate::devices::virtio::blk::Disk;
use crate::devices::virtio::fs::{Fs, Share};
use crate::devices::virtio::vsock::{self, Vsock};
use crate::emulated::Patience;
use crate::events::{EventLoop, Handle, Signals, Subscription};
use crate::export::{write_losses, write_summary};
use crate::files;
use crate::kernel::Kernel;
use crate::machine::{self, BootImage, Config, ExitReason, ImageBytes, Waker};
use crate::sandbox::{self, Thread};
use crate::serve::{Control, Reply, Services};
use crate::session::{
    self, Closing, Handles, LastLatencies, Outcome, Request, SessionError, Tracing, Work,
};
use crate::stream::Exit;
use anyhow::{Context, Result, anyhow, bail};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use vmtrace_system::private_socket;
use vmtrace_system::say;
use vmtrace_system::terminal::{self, RawTerminal};

/// How long the agent may take to accept a connection.
const AGENT_TIME: Duration = Duration::from_secs(5);
/// How long a guest may take to power off once its `--run` has ended: one that cannot (a kernel
/// without ACPI) halts for good.
const POWER_OFF_TIME: Duration = Duration::from_secs(60);
/// Consumers, and commands, that may wait to be seen to.
const MAX_JOINS: usize = 64;
const MAX_COMMANDS: usize = 256;
/// What a run that does not end is said to have waited for.
const START: &str = "the start of the run";
const EVENTS: &str = "the thread of the event loop";
/// How much longer than `--timeout` it may take until the guest runs.
const START_TIME: Duration = Duration::from_secs(120);
const NO_DRIVER: &str = "no vsock in the guest, so neither consumers nor an agent there: its kernel \
                         has started no driver for it (--modules DIR gives it the modules)";

/// A kernel as the machine loads it.
struct Vmlinux(Arc<Kernel>);

impl AsRef<[u8]> for Vmlinux {
    fn as_ref(&self) -> &[u8] {
        self.0.vmlinux()
    }
}

struct BzImage(Arc<Kernel>);

impl AsRef<[u8]> for BzImage {
    fn as_ref(&self) -> &[u8] {
        self.0.bzimage().unwrap_or_default()
    }
}

fn boot_image(args: &Args, kernel: &Arc<Kernel>) -> Result<BootImage> {
    if !args.kaslr {
        return Ok(BootImage::unpacked(Arc::new(Vmlinux(Arc::clone(kernel)))));
    }
    let image: ImageBytes = match &args.boot_image {
        Some(path) => Arc::new(std::fs::read(path).with_context(|| path.display().to_string())?),
        None => Arc::new(BzImage(Arc::clone(kernel))),
    };
    BootImage::self_unpacking(image)
        .context("--kaslr: kernels of this architecture have no decompressor that could move them")
}

fn console(args: &Args) -> Result<Box<dyn Write + Send>> {
    if args.interactive {
        return Ok(Box::new(interactive::screen()?));
    }
    Ok(match args.console.as_str() {
        "stderr" => Box::new(std::io::stderr()),
        "none" => Box::new(std::io::sink()),
        path => Box::new(File::create(path).with_context(|| path.to_owned())?),
    })
}

/// What the run needs of the file system once the guest runs.
fn confinement(args: &Args) -> sandbox::Settings {
    let sockets = args.socket.iter().chain(&args.vsock);
    let (_, results) = args.rules.files();
    sandbox::Settings {
        unfiltered: args.no_seccomp,
        cleared: sockets.filter_map(|path| path.parent()).map(Path::to_owned).collect(),
        // By links, as they will be opened.
        written: results
            .map(|path| files::target(path).ok().flatten().unwrap_or_else(|| path.clone()))
            .collect(),
        terminal: args.interactive,
    }
}

/// Runs the guest on the KVM of this machine; returns the exit code. `guard` has a deadline from the moment on
/// when the process is confined.
pub(super) fn run(
    args: &Args,
    watchers: &Watchers,
    kernel: Arc<Kernel>,
    tracing: Tracing,
    (initrd, disks, shares): (Vec<u8>, Vec<Disk>, Vec<Share>),
    guard: &mut Option<Guard>,
) -> Result<u8> {
    let specs = &args.triggers.exec_at;
    let shell = (!specs.is_empty() && args.exec_to.is_none())
        .then(|| Shell::start(specs, args.socket.as_deref()).context("--exec-at: cannot start sh"))
        .transpose()?;
    let mut told = match (&shell, &args.exec_to) {
        (Some(shell), _) => Some(shell.input()?),
        (None, Some(path)) => Some(told_to(path)?),
        (None, None) => None,
    };
    sandbox::set_up(&confinement(args))?;
    let deadline = if args.icount {
        // The clock counts instructions, and jumps where nobody has any: seconds are nothing.
        Deadline::never()
    } else {
        let guard =
            guard.insert(Guard::start(deadline::STEP, exit::FAILED).context("no watchdog")?);
        guard.deadline()
    };
    match args.timeout.map(Duration::from_secs) {
        Some(timeout) => deadline.begin(START, timeout.saturating_add(START_TIME)),
        None => deadline.begin_open(START),
    }
    let events = EventLoop::start(Thread::Events).context("no event loop")?;
    let _events = deadline.at_drop(EVENTS, deadline::TIME);
    let (joining, joins) = sync_channel(MAX_JOINS);
    let (commands, control) = sync_channel(MAX_COMMANDS);
    let waker = Arc::new(OnceLock::<Waker>::new());
    let mut services = Services::new(joining, commands, {
        let waker = Arc::clone(&waker);
        Arc::new(move || {
            if let Some(waker) = waker.get() {
                waker.wake();
            }
        })
    });
    services.readers = args.serve_guest.unwrap_or_default();
    let options = vsock::Options {
        cid: args.cid,
        socket: args.vsock.clone(),
        gateway: args.vsock_gateway.clone(),
        ..vsock::Options::default()
    };
    let (device, sockets) = Vsock::new(&options, &events.handle())?;
    let sockets = Arc::new(sockets);
    services.agent = Some({
        let sockets = Arc::clone(&sockets);
        Arc::new(move |client| {
            sockets.pass(client, AGENT_PORT, AGENT_TIME, |error| {
                format!("no agent in the guest: {error} (--modules gives the guest a driver)")
            });
        })
    });
    let marks = services.clone();
    let server = services.serve(&events.handle(), args.socket.as_deref())?;
    let door = server.door();
    sockets.listen(vsock::TRACE_PORT, move |incoming| {
        door.take_guest(incoming.stream, incoming.guest_port);
    })?;
    let run_output = RunOutput::listen(args, &sockets).context("--run")?;
    let shares = shares.into_iter().map(|share| Fs::new(share, &events.handle()));
    let shares = shares.collect::<std::io::Result<Vec<_>>>().context("--share")?;
    let machine = Config {
        cpus: args.cpus,
        memory: args.memory,
        kernel: boot_image(args, &kernel)?,
        initrd: Some(initrd),
        cmdline: args.guest_cmdline(),
        annex: 0,
        far: None,
        watch_msr: None,
        vsock: Some(device),
        disks,
        shares,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let said = Arc::new(Mutex::new(Said::default()));
    let agent = Arc::clone(&said);
    let window = Window::new().context("no window")?;
    let agents_window = window.clone();
    let give_up = {
        let (said, stop, waker) = (Arc::clone(&said), Arc::clone(&stop), Arc::clone(&waker));
        move || {
            said.lock().unwrap_or_else(PoisonError::into_inner).stays_on = true;
            stop.store(true, Ordering::Relaxed);
            if let Some(waker) = waker.get() {
                waker.wake();
            }
        }
    };
    // Of one run.
    let mut give_up = Some(give_up);
    let timers = events.handle();
    let mut parser = AgentParser::new();
    let stream = trace_output(args, watchers)?;
    let request = Request {
        machine,
        console: console(args)?,
        console_marks: !args.no_console_marks,
        agent: Box::new(move |bytes| {
            let mut said = agent.lock().unwrap_or_else(PoisonError::into_inner);
            parser.extend(bytes).for_each(|message| match message {
                // Nobody waits for the answer: a vCPU is calling.
                AgentMessage::Mark(mark) => {
                    let mark = Control::Mark { ticks: Some(mark.ticks), text: mark.text };
                    said.lost_marks += u64::from(marks.control(mark, Reply::nobody()).is_err());
                }
                AgentMessage::Hello(_) => agents_window.agent_is_up(),
                message => said.take(message),
            });
            if let Some(give_up) = said.status.and_then(|_| give_up.take()) {
                timers.after(POWER_OFF_TIME, give_up);
            }
        }),
        work: Work {
            kernel,
            tracing,
            stream,
            joins,
            control,
            timeout: args.timeout.map(Duration::from_secs),
            hang: args.hang_after(),
            deadline: deadline.clone(),
            commands: Box::new(move |called| match &mut told {
                Some(told) => told.write_all(commands::line(called).as_bytes()),
                None => Ok(()),
            }),
            closing: Box::new({
                let said = Arc::clone(&said);
                let wanted = args.wants_vsock();
                move || {
                    let said = said.lock().unwrap_or_else(PoisonError::into_inner);
                    let missing =
                        (wanted && !sockets.driver_seen()).then(|| match &said.no_vsock {
                            Some(reason) => format!("{NO_DRIVER}; the agent says: {reason}"),
                            None => NO_DRIVER.to_owned(),
                        });
                    let stays_on = said.stays_on.then(|| {
                        let seconds = POWER_OFF_TIME.as_secs();
                        format!("{seconds} s after --run the guest had not powered off: stopped")
                    });
                    let lost_marks = (said.lost_marks > 0).then(|| {
                        format!(
                            "{} marks of the guest were lost: it made too many",
                            said.lost_marks
                        )
                    });
                    let notes = missing.into_iter().chain(stays_on).chain(lost_marks).collect();
                    Closing { run_status: said.status, notes }
                }
            }),
        },
    };
    let asked = Arc::clone(&stop);
    let outcome = {
        let stopped = Arc::clone(&stop);
        let keys: Option<Box<dyn Keys>> = match args.console.as_str() {
            _ if args.interactive => Some(Box::new(UserKeys::default())),
            _ if args.typed => Some(Box::new(Decoder::default())),
            "stderr" => Some(Box::new(Plain)),
            _ => None,
        };
        let at_terminal = args.interactive;
        let events = events.handle();
        let patience = Arc::default();
        let ending =
            Ending { stop, waker: Arc::clone(&waker), patience, deadline: deadline.clone() };
        // Before the terminal is raw: none of them may end the process from then on.
        listen_to_signals(&events, ending.clone());
        let _terminal = at_terminal.then(take_terminal).transpose()?;
        session::run(
            request,
            move |handles| {
                let _ = waker.set(handles.waker.clone());
                // A command may have come before there was anybody to wake.
                handles.waker.wake();
                listen_to_user(&events, handles, ending, keys, (window, at_terminal));
            },
            move || stopped.load(Ordering::Relaxed),
        )
    };
    // Nobody is let in any more.
    deadline.begin(EVENTS, deadline::TIME);
    drop(server);
    // Asked all the time while these wait as long as they may.
    let hurry = || {
        deadline.renew();
        asked.load(Ordering::Relaxed)
    };
    if let Some(shell) = shell {
        deadline.begin("what --exec-at has started", deadline::TIME);
        shell.finish(hurry);
    }
    let by_itself = outcome.as_ref().is_ok_and(|outcome| outcome.exit.is_some());
    deadline.begin("what --run has written", deadline::TIME);
    let run_output = run_output.finish(by_itself, hurry);
    let outcome = match outcome {
        Err(SessionError::Stream(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            return Ok(exit::DONE);
        }
        Err(error @ SessionError::Stream(_)) => {
            return Err(error).context(trace_name(args));
        }
        outcome => outcome?,
    };
    let (words, code) = verdict(args, &outcome);
    let whole = outcome.unwritten.bytes == 0 && run_output.is_ok();
    deadline.set_code(
        code.as_ref().map_or(exit::FAILED, |code| if whole { *code } else { exit::FAILED }),
    );
    deadline.begin("standard error", deadline::TIME);
    let mut text = Vec::new();
    let said = said.lock().unwrap_or_else(PoisonError::into_inner);
    write_summary(&mut text, &outcome.summary)?;
    write_losses(&mut text, &outcome.summary, 0)?;
    text.extend(outcome.latencies.iter().flat_map(|all| last_latencies(all).into_bytes()));
    say::text(&text);
    for error in &said.errors {
        say!("vmtrace: agent: {error}");
    }
    if let Some(reason) = &said.to_console {
        let is = match args.console.as_str() {
            // It may well be what the run was for.
            "none" => "has gone with the guest's console, which --console none leaves out",
            _ => "is mixed with the guest's console",
        };
        say!(
            "vmtrace: the output of --run {is}: {reason} (--modules DIR gives the guest a driver)"
        );
    }
    if outcome.unwritten.bytes > 0 {
        run_output.err().iter().for_each(|error| say!("vmtrace: error: {error:#}"));
        bail!("the trace is not whole: {}", outcome.unwritten);
    }
    run_output?;
    words.iter().for_each(|words| say!("vmtrace: {words}"));
    code
}

/// What the user is told of latencies that were measured by command to the end of the run.
fn last_latencies(LastLatencies { kind, page }: &LastLatencies) -> String {
    match page {
        Ok(page) => {
            format!("vmtrace: latency {kind}, which was measured to the end of the trace:\n{page}")
        }
        Err(error) => format!(
            "vmtrace: latency {kind} was measured to the end of the trace, and has no page: {error} (of a \
             trace in a file vmtrace report FILE --latency {kind} makes it)\n"
        ),
    }
}

/// The file, or pipe, of `--exec-to`.
fn told_to(path: &Path) -> Result<File> {
    let file = OpenOptions::new().append(true).create(true).open(path);
    file.with_context(|| format!("--exec-to {}", path.display()))
}

/// What the user is told of how the run went, and the exit code.
fn verdict(args: &Args, outcome: &Outcome) -> (Option<String>, Result<u8>) {
    if let (Some(by), None) = (&outcome.ended_by, &outcome.anomaly) {
        return (Some(format!("ended by {by}")), Ok(args.triggers.end_code));
    }
    let unfinished = args.expects_run() && outcome.summary.run_status.is_none();
    let anomaly = outcome.anomaly.as_deref();
    let anomaly = anomaly.map(|what| format!("tracing has ended before the guest: {what}"));
    match (&outcome.exit, anomaly) {
        (Some(reason), anomaly) if reason.is_death() => {
            return (anomaly.map(|what| format!("error: {what}")), Ok(exit::GUEST_DIED));
        }
        (Some(ExitReason::InternalError(what)), _) => {
            return (None, Err(anyhow!("the machine failed: {what}")));
        }
        (_, Some(what)) => return (None, Err(anyhow!(what))),
        (_, None) => {}
    }
    let code = match &outcome.exit {
        None if outcome.summary.exit == Exit::Timeout && unfinished => {
            let words = "error: the time was up before --run had finished: see --timeout";
            return (Some(words.to_owned()), Ok(exit::TIMED_OUT));
        }
        _ if outcome.summary.run_status.is_some_and(|status| status != 0) => Ok(exit::RUN_FAILED),
        None if outcome.summary.exit == Exit::Stopped && unfinished => {
            Err(anyhow!("stopped before --run had finished"))
        }
        _ if unfinished => Err(anyhow!(
            "the guest ended without reporting how --run had ended: if the command has not ended it itself, the kernel may lack \
             a driver of the port by which that is told (/dev/ttyS1: CONFIG_SERIAL_8250, and on x86-64 \
             CONFIG_SERIAL_8250_PNP, on riscv64 CONFIG_SERIAL_OF_PLATFORM)"
        )),
        _ => Ok(exit::DONE),
    };
    (None, code)
}

/// What the agent has said.
#[derive(Default)]
struct Said {
    status: Option<i32>,
    errors: Vec<String>,
    no_vsock: Option<String>,
    /// Why the command's output went to the console.
    to_console: Option<String>,
    /// The guest has not powered off in time.
    stays_on: bool,
    /// Marks that there was no room for.
    lost_marks: u64,
}

impl Said {
    /// A hostile guest may say any number of things.
    const MAX_ERRORS: usize = 20;

    fn take(&mut self, message: AgentMessage) {
        match message {
            AgentMessage::Exit(status) => self.status = Some(status.into()),
            // As shells have it.
            AgentMessage::Signal(signal) => self.status = Some(128 + i32::from(signal)),
            AgentMessage::NoVsock(reason) => self.no_vsock = Some(reason),
            AgentMessage::ToConsole(reason) => self.to_console = Some(reason),
            AgentMessage::Error(text) if self.errors.len() < Self::MAX_ERRORS => {
                self.errors.push(text);
            }
            _ => {}
        }
    }
}

/// What ends the run: signals, and a key.
#[derive(Clone)]
struct Ending {
    stop: Arc<AtomicBool>,
    waker: Arc<OnceLock<Waker>>,
    patience: Arc<Patience>,
    deadline: Deadline,
}

impl Ending {
    fn ask(&self) {
        self.deadline.hurry();
        self.stop.store(true, Ordering::Relaxed);
        // Who starts the machine looks once the waker is there.
        self.waker.get().into_iter().for_each(Waker::wake);
        if self.patience.signal(Patience::now()) {
            // The orderly end hangs: the user insists.
            terminal::restore();
            private_socket::remove_all();
            std::process::exit(i32::from(exit::FAILED));
        }
    }
}

/// Console input with the keys that end the run, and the size of the terminal.
fn listen_to_user(
    events: &Handle,
    handles: Handles,
    ending: Ending,
    keys: Option<Box<dyn Keys>>,
    (window, at_terminal): (Window, bool),
) {
    let Handles { console, agent, .. } = handles;
    if let Some(keys) = keys {
        let resized = window.clone();
        let other = move |typed: &Typed| {
            typed.size.into_iter().for_each(|size| resized.resize(size));
            (0..typed.ends).for_each(|_| ending.ask());
        };
        let input = Input::new(console, keys, other);
        keep("no console input", input.and_then(|input| events.add(Box::new(input))));
    }
    if at_terminal {
        let follower = interactive::follow(&window);
        keep("no sizes", follower.and_then(|follower| events.add(Box::new(follower))));
    }
    let teller = Teller::new(window, agent);
    keep("no sizes", teller.and_then(|teller| events.add(Box::new(teller))));
}

/// The terminal, which signals give back that nothing else here handles.
fn take_terminal() -> Result<RawTerminal> {
    let sigsys = sandbox::takes_sigsys().then_some(libc::SIGSYS);
    let taken: Vec<_> = sigsys.into_iter().chain([machine::kick_signal()]).collect();
    interactive::take_terminal(&taken)
}

/// Those that end the run in order.
fn listen_to_signals(events: &Handle, ending: Ending) {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let signals = Signals::new(&[SIGINT, SIGTERM, SIGHUP], move || ending.ask());
    let signals = signals.and_then(|signals| events.add(Box::new(signals)));
    keep("signals are not handled", signals);
}

/// Until the event loop ends. The run goes on without what cannot be.
fn keep(without: &str, subscription: std::io::Result<Subscription>) {
    match subscription {
        Ok(subscription) => subscription.keep(),
        Err(error) => log::warn!("{without}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::args;
    use crate::serve::Unwritten;
    use crate::stream::Summary;

    fn code(options: &str, end: (Exit, Option<ExitReason>), status: Option<i32>) -> Result<u8> {
        code_with(options, end, status, None)
    }

    fn code_with(
        options: &str,
        (end, exit): (Exit, Option<ExitReason>),
        run_status: Option<i32>,
        anomaly: Option<&str>,
    ) -> Result<u8> {
        let summary = Summary { exit: end, run_status, ..Summary::default() };
        let (unwritten, anomaly) = (Unwritten::default(), anomaly.map(str::to_owned));
        let outcome =
            Outcome { summary, exit, unwritten, anomaly, ended_by: None, latencies: None };
        verdict(&args(options)?, &outcome).1
    }

    // What is missing from the trace may be what somebody looks for.
    #[test]
    fn a_trace_that_had_to_end_is_no_success() {
        let anomaly = Some("the ring of vCPU 0 was overwritten");
        let off = || (Exit::Poweroff, Some(ExitReason::PowerOff));
        for status in [Some(0), Some(1)] {
            let error = code_with("--run ls", off(), status, anomaly).unwrap_err().to_string();
            assert!(error.contains("the ring of vCPU 0"), "{error}");
        }
        let died = (Exit::TripleFault, Some(ExitReason::TripleFault));
        assert_eq!(code_with("", died, None, anomaly).unwrap(), exit::GUEST_DIED);
    }

    // Scripts take 0 for a command that has run, and succeeded.
    #[test]
    fn success_is_a_run_that_has_finished() {
        let run = "--run ls";
        let off = || (Exit::Poweroff, Some(ExitReason::PowerOff));
        let (stopped, timeout) = ((Exit::Stopped, None), (Exit::Timeout, None));
        assert_eq!(code(run, off(), Some(0)).unwrap(), exit::DONE);
        assert_eq!(code(run, off(), Some(1)).unwrap(), exit::RUN_FAILED);
        assert_eq!(code(run, stopped.clone(), Some(0)).unwrap(), exit::DONE);
        assert_eq!(code(run, stopped.clone(), Some(1)).unwrap(), exit::RUN_FAILED);
        let error = |end, options| format!("{:#}", code(options, end, None).unwrap_err());
        assert_eq!(error(stopped.clone(), run), "stopped before --run had finished");
        // What an emulated host has of it.
        assert!(error(stopped.clone(), "--expect-run").starts_with("stopped before"));
        // Not the command's failure, and not ours.
        assert_eq!(code(run, timeout.clone(), None).unwrap(), exit::TIMED_OUT);
        assert_eq!(code(run, timeout, Some(1)).unwrap(), exit::RUN_FAILED);
        assert!(error(off(), run).contains("without reporting how --run had ended"));
        assert!(
            error((Exit::Unknown, None), run).contains("without reporting how --run had ended")
        );
    }

    #[test]
    fn without_a_run_any_orderly_end_is_one() {
        for end in [Exit::Stopped, Exit::Timeout] {
            assert_eq!(code("", (end, None), None).unwrap(), exit::DONE);
        }
        let died = || (Exit::TripleFault, Some(ExitReason::TripleFault));
        assert_eq!(code("", died(), None).unwrap(), exit::GUEST_DIED);
        assert_eq!(code("--run ls", died(), None).unwrap(), exit::GUEST_DIED);
        let panic = || Some(ExitReason::Panic { message: "x".into() });
        assert_eq!(code("", (Exit::Panic, panic()), None).unwrap(), exit::GUEST_DIED);
        // Also after its command has succeeded.
        assert_eq!(code("--run ls", (Exit::Panic, panic()), Some(0)).unwrap(), exit::GUEST_DIED);
    }
}
