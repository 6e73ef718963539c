//! End-to-end tests: real kernels in the emulated host.

pub mod anew;
pub mod arch;
pub mod args;
pub mod asking;
pub mod cases;
pub mod clocks;
pub mod conditions;
pub(crate) mod console;
pub mod counts;
pub mod disks;
pub mod ends;
pub mod events;
pub mod exact;
pub mod exits;
pub mod graph;
pub mod hostile;
pub mod latency;
pub mod live;
pub mod livepatch;
pub mod mitigations;
pub mod modules;
pub mod more_events;
pub mod random;
pub mod readers;
pub mod shares;
pub mod soak;
pub mod stress;
pub mod switches;
pub mod terminal;
pub mod trace;
pub mod tree;
pub mod triggers;
pub mod userland;

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{panic, thread};

use anyhow::{Context, Result, ensure};
use vmtrace::emulated::{EmulatedHost, HostArch, HostError, HostOptions, Job, JobEnd};

/// A job that takes longer is stopped; emulation on a busy machine is slow.
const JOB_TIMEOUT: Duration = Duration::from_secs(900);

/// Asks again and again until it is so, for at most this time; whether it was.
pub fn within(time: Duration, mut so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + time;
    loop {
        if so() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// The QEMU that is a child of `parent`.
pub fn qemu_of(parent: u32) -> Option<u32> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let Some((name, rest)) = stat.split_once('(').and_then(|(_, s)| s.rsplit_once(") ")) else {
            return false;
        };
        name.starts_with("qemu-system") && rest.split(' ').nth(1) == Some(&parent.to_string())
    })
}

/// The vmtrace binary of this very source, in the profile that the tests are built with.
pub fn vmtrace() -> Result<PathBuf> {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    if let Some(path) = PATH.get() {
        return Ok(path.clone());
    }
    let path = match std::env::var_os("VMTRACE_EXE") {
        Some(path) => path.into(),
        None => build()?,
    };
    Ok(PATH.get_or_init(|| path).clone())
}

/// The directory of programs that this one was built into.
fn profile() -> Result<PathBuf> {
    let me = std::env::current_exe().context("where am I?")?;
    // PROFILE/deps/test-0123456789abcdef or PROFILE/program
    let dir = me.ancestors().skip(1).find(|dir| !dir.ends_with("deps"));
    Ok(dir.context("no target directory")?.to_owned())
}

/// A test depends on the library alone, so that cargo does not build the binary for it.
fn build() -> Result<PathBuf> {
    let dir = profile()?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // With the features of all packages, as scripts/test has built it.
    command.args(["build", "--quiet", "--locked", "--workspace", "--bin", "vmtrace"]);
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    if dir.ends_with("release") {
        command.arg("--release");
    }
    let status = command.status().context("cannot run cargo")?;
    ensure!(status.success(), "cargo build of vmtrace: {status}");
    Ok(dir.join("vmtrace"))
}

/// The vmtrace for emulated hosts of an architecture.
pub fn vmtrace_for(arch: HostArch) -> Result<PathBuf> {
    if arch.is_native() { vmtrace() } else { cross("vmtrace", arch) }
}

/// The workload program for guests of an architecture.
pub fn workload(arch: HostArch) -> Result<PathBuf> {
    cross("vmtrace-guest", arch)
}

/// `vmtrace` as a user runs it, with programs of this very source for all hosts.
pub fn command() -> Result<Command> {
    let mut command = Command::new(vmtrace()?);
    for arch in HostArch::ALL.into_iter().filter(|arch| !arch.is_native()) {
        // Wherever an older one may lie.
        command.env(format!("VMTRACE_PROGRAM_{}", arch.name()), vmtrace_for(arch)?);
    }
    Ok(command)
}

/// A program of this very source for another architecture, optimised: it runs emulated. It is built
/// once for each process: a test asks for it at every command of a guest that runs.
pub fn cross(program: &str, arch: HostArch) -> Result<PathBuf> {
    static BUILT: Mutex<Vec<(String, HostArch, PathBuf)>> = Mutex::new(Vec::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let known = built.iter().find(|(name, of, _)| name == program && *of == arch);
    if let Some((_, _, path)) = known {
        return Ok(path.clone());
    }
    let path = cross_build(program, arch)?;
    built.push((program.to_owned(), arch, path.clone()));
    Ok(path)
}

fn cross_build(program: &str, arch: HostArch) -> Result<PathBuf> {
    let target = match arch {
        HostArch::X86_64 => "x86_64-unknown-linux-gnu",
        HostArch::Riscv64 => "riscv64gc-unknown-linux-gnu",
    };
    // DIRECTORY/TARGET/PROFILE
    let directory = profile()?.ancestors().nth(2).context("no target directory")?.to_owned();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--locked", "--release", "--target", target]);
    command.args(["--workspace", "--bin", program, "--target-dir"]).arg(&directory);
    let status = command
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "cargo build of {program} for {target}: {status}");
    Ok(directory.join(target).join("release").join(program))
}

/// A job's end and everything it wrote.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub end: JobEnd,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// Its outputs, in the order they were asked for.
    pub outputs: Vec<Vec<u8>>,
}

impl Finished {
    /// Standard output as text.
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard error as text.
    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

/// An emulated host for all tests of a test binary, booted when the first one needs it and again if it broke.
/// It ends with the process.
#[derive(Debug)]
pub struct SharedHost {
    options: fn() -> Result<HostOptions>,
    host: Mutex<Option<EmulatedHost>>,
}

/// Writes why a test fails when it does: the harness says it when all are over, which a run whose time is up never sees.
fn tell_failures_at_once() {
    /// Bytes of a message that are shown.
    const SHOWN: usize = 4000;
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let harness = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let text = info.to_string();
            let shown = text.get(..text.floor_char_boundary(SHOWN)).unwrap_or_default();
            let name = thread::current().name().unwrap_or("?").to_owned();
            // Not by a macro, whose output the harness keeps to itself.
            let _ = io::stderr().write_all(format!("\n{name}: {shown}\n").as_bytes());
            harness(info);
        }));
    });
}

impl SharedHost {
    /// For a `static`.
    pub const fn new(options: fn() -> Result<HostOptions>) -> Self {
        Self { options, host: Mutex::new(None) }
    }

    /// Uses the host; tests that want it meanwhile wait.
    pub fn with<T>(&self, f: impl FnOnce(&mut EmulatedHost) -> Result<T, HostError>) -> Result<T> {
        tell_failures_at_once();
        // A test that failed while it had the host does not spoil it for others.
        let mut slot = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        let host = match slot.take() {
            Some(host) => host,
            None => EmulatedHost::start(&(self.options)()?)?,
        };
        let host = slot.insert(host);
        let result = f(host);
        let broken = matches!(
            result,
            Err(HostError::Died { .. }
                | HostError::Stuck(_)
                | HostError::Interrupted
                | HostError::Protocol(_))
        );
        if broken {
            *slot = None;
        }
        Ok(result?)
    }

    /// Runs vmtrace with `args`; what it writes to `outputs` is kept.
    pub fn vmtrace(&self, args: &[&str], outputs: &[&str]) -> Result<Finished> {
        self.run(None, args, outputs, |_| {})
    }

    /// Runs a program of the host (none: vmtrace), after `change` had its way with the job.
    pub fn run(
        &self,
        program: Option<&str>,
        args: &[&str],
        outputs: &[&str],
        change: impl FnOnce(&mut Job<'_>),
    ) -> Result<Finished> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let mut written: Vec<Vec<u8>> = outputs.iter().map(|_| Vec::new()).collect();
        let mut job = Job::new(args.iter().copied(), &mut stdout, &mut stderr);
        job.program = program.map(str::to_owned);
        job.timeout = Some(JOB_TIMEOUT);
        for (path, out) in outputs.iter().zip(&mut written) {
            job.outputs.push(((*path).to_owned(), out));
        }
        change(&mut job);
        let end = self.with(|host| host.run(job))?;
        Ok(Finished { end, stdout, stderr, outputs: written })
    }
}
