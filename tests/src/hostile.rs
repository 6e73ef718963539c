//! Guests that do harm: to the annex, to their devices, to what their kernel has of ftrace.

use std::collections::BTreeSet;
use std::io::ErrorKind::{Other, TimedOut, WouldBlock};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use vmtrace::emulated::{FileSource, Job};
use vmtrace::serve::{Control, Globs, Source, command};
use vmtrace::stream::Exit;

use crate::Finished;
use crate::cases::{Guests, value};
use crate::console::Console;
use crate::random::Random;
use crate::trace::{
    CACHE, TRACE, Trace, WORKLOAD, arch_of, boot, cmdline, host_lost, lost, syscall,
};

/// How often the workload `laps` calls `getppid` before it does harm.
const LAPS_CALLS: usize = 500;
/// In the host.
const SOCKET: &str = "/hostile.socket";
const DISK: &str = "--disk=/hostile.img,rw";
/// For a guest, and for an answer of vmtrace: a busy machine is ten times slower than an idle one.
const PATIENCE: Duration = Duration::from_secs(400);
/// Between two commands: the guest needs its share of the time.
const BETWEEN: Duration = Duration::from_millis(30);
/// How lines about devices begin: the socket device, and the disk.
const DEVICES: [&str; 2] = ["device 19 ", "device 2 "];

/// To what a guest does harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// Words anywhere in the annex.
    Annex,
    /// Queues of its devices.
    Queues,
    /// Its kernel's records of ftrace, while its own tracer comes and goes.
    Records,
    /// Page tables of the annex.
    Tables,
}

impl Harm {
    /// What the workload calls it, and how often it does it: so that every megabyte of the annex is met, and
    /// each device some hundred times.
    fn how(self) -> (&'static str, u32) {
        match self {
            Self::Annex => ("anywhere", 200_000),
            Self::Queues => ("queues", 300),
            Self::Records => ("records", 400),
            Self::Tables => ("tables", 60),
        }
    }
}

/// What came of commands.
#[derive(Debug, Default)]
struct Commands {
    answered: usize,
    refused: usize,
    /// What was said of those.
    told: BTreeSet<String>,
    /// The first that got no answer: the run must be over.
    unanswered: Option<String>,
}

struct Ended {
    finished: Finished,
    trace: Trace,
    commands: Commands,
}

impl Guests {
    /// A ring that programs cannot have left so ends tracing at once, and the guest lives.
    pub fn a_damaged_ring_ends_tracing_and_not_the_guest(&self, name: &str) {
        let run = format!("{WORKLOAD} laps");
        let getppid = syscall(name, "getppid").unwrap();
        let args = ["-f", &getppid, "--cpus", "2", "--add", WORKLOAD, "--run", &run];
        let (finished, trace) = boot(&self.host, name, &args).unwrap();
        let err = finished.err();
        assert!(err.contains("\nalive"), "{name}: {err}");
        // Of both vCPUs: the ring of one that was left alone goes on.
        assert!(value(&finished, "scribbled ") >= 2, "{name}: {err}");
        assert_eq!(trace.summary.exit, Exit::Poweroff, "{name}: {err}");
        assert_eq!(finished.end.code, Some(1), "{name}: {err}");
        let what = "was overwritten by the guest";
        assert!(err.contains("error: tracing has ended before the guest"), "{name}: {err}");
        assert!(err.contains(what), "{name}: {err}");
        let noted = trace.summary.notes.iter().any(|note| note.contains(what));
        assert!(noted, "{name}: {:?}", trace.summary.notes);
        // What the relay had read by then is there, and nothing of what came afterwards. How much
        // that is depends on when it came by.
        let pid = value(&finished, "pid ");
        let calls = trace.entries.iter().filter(|it| it.pid == pid).count();
        assert!((1..=LAPS_CALLS).contains(&calls), "{name}: {calls} calls; {err}");
    }

    /// Whatever a guest does there, vmtrace answers commands meanwhile and ends with the guest, and its stream
    /// is whole. `VMTRACE_HOSTILE_SEEDS=4,5,6` says what to write instead: by hand, for hours.
    pub fn a_guest_may_do_harm(&self, harm: Harm, name: &str, seeds: &[u64]) {
        let seeds = match std::env::var("VMTRACE_HOSTILE_SEEDS") {
            Ok(text) => text.split(',').map(|seed| seed.parse().unwrap()).collect(),
            Err(_) => seeds.to_vec(),
        };
        for seed in seeds {
            let what = format!("{name}, {harm:?}, seed {seed}");
            let Ended { finished, trace, commands } = loop {
                match self.hostile_once(harm, name, seed) {
                    Ok(ended) if ended.finished.err().contains("\nscribbling") => break ended,
                    // Before it has done anything.
                    Ok(ended) => {
                        let err = ended.finished.err();
                        assert!(!err.contains("Error: "), "{what}: {err}");
                        lost(&err).unwrap();
                    }
                    Err(error) if host_lost(&error) => lost(&error.to_string()).unwrap(),
                    Err(error) => panic!("{what}: {error:#}"),
                }
            };
            let (err, code) = (finished.err(), finished.end.code);
            // 1: tracing has ended early; 3: the guest has died; 4: its kernel has killed the command; 124: it hangs.
            let codes = [0, 1, 3, 4, 124].map(Some);
            assert!(codes.contains(&code), "{what}: exit code {code:?}: {err}");
            assert!(!err.contains("panicked at"), "{what}: {err}");
            // One whose device does not write for it does nothing.
            assert!(!err.contains("\nError: request "), "{what}: {err}");
            let (exit, notes) = (trace.summary.exit, &trace.summary.notes);
            let told = match code {
                Some(1) => err.contains("vmtrace: error: ") && !notes.is_empty(),
                Some(3) => exit != Exit::Poweroff && err.contains("vmtrace: guest "),
                Some(124) => exit == Exit::Timeout,
                _ => err.contains("vmtrace: run status"),
            };
            assert!(
                told,
                "{what}: exit code {code:?}, and nobody says why: {exit:?} {notes:?} {err}"
            );
            // The same command again and again has the same to say.
            let left_out: Vec<_> =
                notes.iter().filter(|note| note.contains("left out: ")).collect();
            let different = left_out.iter().collect::<BTreeSet<_>>().len();
            assert_eq!(left_out.len(), different, "{what}: {notes:?}");
            let Commands { answered, refused, told, .. } = commands;
            // One that dies at once is over before any is given.
            if err.contains("\nalive") {
                assert!(answered + refused > 0, "{what}: no command was answered: {err}");
            }
            eprintln!("{what}: {code:?}, {exit:?}; {notes:?}");
            eprintln!("  {answered} commands answered, {refused} refused: {told:?}");
            for line in err.lines().filter(|line| line.starts_with("device ")) {
                eprintln!("  {line}");
            }
            // One that reaches no device, or asks for nothing that it may not, proves nothing.
            if harm == Harm::Queues && err.contains("\nalive") {
                for device in DEVICES {
                    let lines = err.lines().map(str::trim);
                    let mut lines = lines.filter_map(|line| line.strip_prefix(device));
                    let line = lines.next().unwrap_or_else(|| panic!("{what}: {device}: {err}"));
                    assert!(!line.split(' ').any(|word| word == "0"), "{what}: {device}{line}");
                }
            }
        }
    }

    fn hostile_once(&self, harm: Harm, name: &str, seed: u64) -> Result<Ended> {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("socket");
        let (image, getppid) = (format!("/k/{name}"), syscall(name, "getppid")?);
        let (word, count) = harm.how();
        let run = format!("{WORKLOAD} {word} {seed} {count}");
        // For what drives devices itself, whoever else does.
        let cmdline = format!("{} nokaslr iomem=relaxed", cmdline(arch_of(name)?));
        let mut args = vec!["boot", &image, "--host", "kvm", "-o", TRACE, "--timeout", "45"];
        args.extend(["--cmdline", &cmdline, "-f", &getppid, "-f", "vfs_*", "--graph"]);
        args.extend(["--cpus", "2", "--add", WORKLOAD, "--run", &run, "--socket", SOCKET]);
        if harm == Harm::Queues {
            args.push(DISK);
        }
        let (mut stdout, console, mut stream) = (Vec::new(), Console::default(), Vec::new());
        let mut stderr = console.clone();
        let mut job = Job::new(args, &mut stdout, &mut stderr);
        job.timeout = Some(PATIENCE);
        job.env.insert("VMTRACE_CACHE".to_owned(), CACHE.to_owned());
        job.outputs.push((TRACE.to_owned(), &mut stream));
        let (over, mut commands) = (AtomicBool::new(false), Ok(Commands::default()));
        let end = self.host.with(|host| {
            let disk = FileSource::Bytes(vec![0; 1 << 20]);
            host.put_file("/hostile.img", &disk)?;
            let tunnel = host.tunnel(&socket, SOCKET);
            thread::scope(|scope| {
                if tunnel.is_ok() {
                    scope.spawn(|| commands = Commands::give(&socket, &console, &over, seed));
                }
                let end = host.run(job);
                over.store(true, Ordering::Relaxed);
                console.end();
                // Who still waits for an answer learns that there is none.
                drop(tunnel);
                end
            })
        })?;
        let stderr = console.text().into_bytes();
        let finished = Finished { end, stdout, stderr, outputs: Vec::new() };
        let said = || format!("{end:?}\n{}", finished.err());
        let commands = commands.with_context(said)?;
        let trace = Trace::read(stream).with_context(said)?;
        Ok(Ended { finished, trace, commands })
    }
}

impl Commands {
    /// Gives one after the other from when the guest does harm, until the run is over.
    fn give(socket: &Path, console: &Console, over: &AtomicBool, seed: u64) -> Result<Self> {
        let (mut commands, mut random) = (Self::default(), Random::new(seed));
        let begins = |said: &str| said.contains("\nscribbling").then_some(());
        if !matches!(console.wait(PATIENCE, begins), Ok(Some(()))) {
            return Ok(commands);
        }
        let globs = |filter: &str| Globs { filter: vec![filter.to_owned()], notrace: Vec::new() };
        while !over.load(Ordering::Relaxed) {
            let control = match random.below(7) {
                0 => Control::Pause,
                1 => Control::Resume,
                2 => Control::Filter(globs("vfs_*")),
                3 => Control::Filter(globs("*_get*")),
                4 => Control::TracerAdd("other=ksys_*,vfs_r*:args+retval".parse()?),
                5 => Control::TracerRemove("other".to_owned()),
                _ => Control::Status,
            };
            thread::sleep(BETWEEN);
            // The run may be over before it listens to this one.
            let Ok(stream) = Source::Unix(socket.into()).connect(Duration::ZERO) else { break };
            stream.set_read_timeout(Some(PATIENCE))?;
            match command(&stream, &control) {
                Err(error) if [WouldBlock, TimedOut].contains(&error.kind()) => {
                    bail!("no answer to {control:?} in {PATIENCE:?}");
                }
                Err(error)
                    if error.kind() != Other || error.to_string().starts_with("no answer") =>
                {
                    let unanswered = format!("{control:?}: {error}");
                    commands.unanswered.get_or_insert(unanswered);
                    continue;
                }
                Ok(_) => commands.answered += 1,
                // vmtrace has found something, or there is nothing to do.
                Err(error) => {
                    commands.refused += 1;
                    commands.told.insert(error.to_string());
                }
            }
            if let Some(unanswered) = &commands.unanswered {
                bail!("no answer, and yet the run has gone on: {unanswered}");
            }
        }
        Ok(commands)
    }
}
