//! `vmtrace boot`: boots a kernel and traces it.

use super::exit;
use crate::agent_channel::{AgentMessage, AgentParser};
use crate::export::{PlayError, Player, Text, write_summary};
use crate::initramfs;
use crate::kernel::Kernel;
use crate::machine::{BootImage, Config, DEFAULT_CMDLINE, ExitReason};
use crate::session::{self, Handles, Outcome, Request, SessionError, Tracing};
use crate::stream::Exit;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmtrace_trampolines::x86_64::Overflow;

/// Arguments of `vmtrace boot`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Kernel: bzImage or vmlinux
    pub kernel: PathBuf,
    /// Initial RAM disk instead of the built-in one
    #[arg(long, value_name = "FILE", conflicts_with_all = ["run", "add", "modules"])]
    pub initrd: Option<PathBuf>,
    /// Appended to the kernel's command line
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub cmdline: String,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub cpus: u8,
    /// Guest memory: bytes, or with K, M or G
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    pub memory: u64,
    /// Load the modules in this directory's modules.load (or the named NAME@DIR) with the
    /// built-in initramfs
    #[arg(long, value_name = "DIR")]
    pub modules: Option<PathBuf>,
    /// Let the kernel choose its addresses (boots through its own decompressor)
    #[arg(long)]
    pub kaslr: bool,
    /// Trace functions that match this glob; may be repeated; none means all
    #[arg(short, long, value_name = "GLOB")]
    pub filter: Vec<String>,
    /// Do not trace functions that match this glob; may be repeated
    #[arg(short, long, value_name = "GLOB")]
    pub notrace: Vec<String>,
    /// Begin to trace when this function is first called
    #[arg(long, value_name = "FUNCTION")]
    pub from: Option<String>,
    /// Run a command line in the guest, then power off
    #[arg(long, value_name = "CMD")]
    pub run: Option<String>,
    /// Put this file at /NAME of the built-in initramfs; may be repeated
    #[arg(long, value_name = "FILE")]
    pub add: Vec<PathBuf>,
    /// Write the trace to this file instead of printing it
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Where the guest's console goes: stderr, none, or a file
    #[arg(long, value_name = "WHERE", default_value = "stderr")]
    pub console: String,
    /// What happens to records when a ring is full
    #[arg(long, value_enum, default_value_t = OverflowArg::Drop)]
    pub overflow: OverflowArg,
    /// Where to run: on this machine's KVM or in an emulated host
    #[arg(long, value_enum, default_value_t = HostArg::Auto)]
    pub host: HostArg,
    /// Stop after so many seconds
    #[arg(long, value_name = "SECS")]
    pub timeout: Option<u64>,
    /// Boot this bzImage, which KERNEL (a vmlinux) was taken from
    #[arg(long, value_name = "FILE", hide = true)]
    pub boot_image: Option<PathBuf>,
    /// Run the emulated host with one CPU whose clock counts instructions
    #[arg(long, hide = true)]
    pub icount: bool,
}

/// `--overflow`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OverflowArg {
    /// Drop the new record and count it
    Drop,
    /// Overwrite the oldest: a flight recorder, written when the guest ends
    Overwrite,
}

/// `--host`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HostArg {
    /// KVM when it is usable, else emulated
    Auto,
    /// This machine's KVM
    Kvm,
    /// A QEMU TCG machine with hardware virtualisation
    Emulated,
}

fn parse_size(text: &str) -> Result<u64, String> {
    let unit = match text.chars().last() {
        Some('k' | 'K') => 1 << 10,
        Some('m' | 'M') => 1 << 20,
        Some('g' | 'G') => 1 << 30,
        _ => 1,
    };
    let digits = if unit == 1 { text } else { &text[..text.len() - 1] };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(unit))
        .ok_or_else(|| format!("{text:?} is no size; say for example 512M or 2G"))
}

impl Args {
    /// The guest's whole command line.
    #[must_use]
    pub fn guest_cmdline(&self) -> String {
        format!("{DEFAULT_CMDLINE} {}", self.cmdline).trim_end().to_owned()
    }

    /// What to trace in `kernel`.
    ///
    /// # Errors
    /// When no function matches, or that of `--from` cannot be traced.
    pub fn tracing(&self, kernel: &Kernel) -> Result<Tracing> {
        let sites = kernel.select(&self.filter, &self.notrace)?;
        let selection = kernel.select_with_report(&self.filter, &self.notrace);
        for glob in selection.unmatched.iter().chain(&selection.unmatched_notrace) {
            eprintln!("vmtrace: warning: no function matches {glob:?}");
        }
        let from = match &self.from {
            None => None,
            Some(name) => Some(find(kernel, name)?),
        };
        let overflow = match self.overflow {
            OverflowArg::Drop => Overflow::Drop,
            OverflowArg::Overwrite => Overflow::Overwrite,
        };
        Ok(Tracing { sites, from, overflow })
    }
}

fn find(kernel: &Kernel, name: &str) -> Result<usize> {
    let mut sites = kernel
        .sites()
        .iter()
        .enumerate()
        .filter(|(_, site)| kernel.symbols().names_at(site.entry).any(|symbol| symbol == name));
    match (sites.next(), sites.next()) {
        (Some((index, _)), None) => Ok(index),
        (Some(_), Some(_)) => bail!("--from {name}: the kernel has several functions of that name"),
        (None, _) => bail!(
            "--from {name}: no such function can be traced in {}: see `vmtrace functions`",
            kernel.release()
        ),
    }
}

/// Runs the subcommand; returns the exit code.
///
/// # Errors
/// When vmtrace itself fails.
pub fn run(args: &Args) -> Result<u8> {
    run_here(args)
}

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
        return Ok(BootImage::Elf(Arc::new(Vmlinux(Arc::clone(kernel)))));
    }
    if let Some(path) = &args.boot_image {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        return Ok(BootImage::BzImage(Arc::new(bytes)));
    }
    if kernel.bzimage().is_none() {
        bail!(
            "--kaslr needs a bzImage, whose decompressor chooses the addresses; {} is none",
            args.kernel.display()
        );
    }
    Ok(BootImage::BzImage(Arc::new(BzImage(Arc::clone(kernel)))))
}

/// Modules of the built-in initramfs that make virtio devices work, as far as a
/// kernel has them.
const MODULES: [&str; 3] = ["virtio_mmio", "virtio_rng", "vmw_vsock_virtio_transport"];

fn initrd(args: &Args) -> Result<Vec<u8>> {
    if let Some(path) = &args.initrd {
        return std::fs::read(path).with_context(|| path.display().to_string());
    }
    let mut builder = initramfs::Builder::new().run(args.run.as_deref());
    for file in &args.add {
        builder = builder.add_file(file);
    }
    if let Some(dir) = &args.modules {
        let modules = initramfs::Modules::open(dir)?;
        let names: Vec<_> =
            MODULES.into_iter().filter(|name| modules.names().any(|has| has == *name)).collect();
        builder = builder.modules(modules.resolve(&names)?);
    }
    Ok(builder.build()?)
}

fn console(args: &Args) -> Result<Box<dyn Write + Send>> {
    Ok(match args.console.as_str() {
        "stderr" => Box::new(std::io::stderr()),
        "none" => Box::new(std::io::sink()),
        path => Box::new(std::fs::File::create(path).with_context(|| path.to_owned())?),
    })
}

/// A stream in, text on stdout.
struct TextOut(Player<Text<std::io::Stdout>>);

impl Write for TextOut {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self.0.push(bytes) {
            Ok(()) => Ok(bytes.len()),
            Err(PlayError::Output(error)) => Err(error),
            Err(error) => Err(std::io::Error::other(error)),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Where the trace stream of a run goes.
pub(super) fn trace_output(args: &Args) -> Result<Box<dyn Write + Send>> {
    Ok(match &args.output {
        Some(path) => {
            Box::new(std::fs::File::create(path).with_context(|| path.display().to_string())?)
        }
        None => Box::new(TextOut(Player::new(Text::new(std::io::stdout())))),
    })
}

fn run_here(args: &Args) -> Result<u8> {
    let kernel =
        Arc::new(Kernel::open(&args.kernel).with_context(|| args.kernel.display().to_string())?);
    let tracing = args.tracing(&kernel)?;
    let machine = Config {
        cpus: args.cpus,
        memory: args.memory,
        kernel: boot_image(args, &kernel)?,
        initrd: Some(initrd(args)?),
        cmdline: args.guest_cmdline(),
        annex: 0,
        watch_msr: None,
    };
    let said = Arc::new(Mutex::new(Said::default()));
    let agent = Arc::clone(&said);
    let mut parser = AgentParser::new();
    let request = Request {
        kernel,
        machine,
        console: console(args)?,
        agent: Box::new(move |bytes| {
            let mut said = agent.lock().unwrap_or_else(PoisonError::into_inner);
            parser.extend(bytes).for_each(|message| said.take(message));
        }),
        tracing,
        stream: trace_output(args)?,
        timeout: args.timeout.map(Duration::from_secs),
        run_status: Box::new({
            let said = Arc::clone(&said);
            move || said.lock().unwrap_or_else(PoisonError::into_inner).status
        }),
    };
    let stop = Arc::new(AtomicBool::new(false));
    let outcome = {
        let stopped = Arc::clone(&stop);
        let interactive = args.console == "stderr";
        session::run(
            request,
            move |handles| start_helpers(handles, &stop, interactive),
            move || stopped.load(Ordering::Relaxed),
        )
    };
    let outcome = match outcome {
        Err(SessionError::Stream(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            return Ok(exit::DONE);
        }
        outcome => outcome?,
    };
    let mut text = Vec::new();
    let said = said.lock().unwrap_or_else(PoisonError::into_inner);
    write_summary(&mut text, &outcome.summary)?;
    std::io::stderr().write_all(&text)?;
    for error in &said.errors {
        eprintln!("vmtrace: agent: {error}");
    }
    exit_code(args, &outcome)
}

fn exit_code(args: &Args, outcome: &Outcome) -> Result<u8> {
    let unfinished = args.run.is_some() && outcome.summary.run_status.is_none();
    Ok(match &outcome.exit {
        Some(ExitReason::Panic { .. } | ExitReason::TripleFault) => exit::GUEST_DIED,
        Some(ExitReason::InternalError(what)) => bail!("the machine failed: {what}"),
        None if outcome.summary.exit == Exit::Timeout && unfinished => {
            bail!("the time was up before --run had finished: see --timeout")
        }
        _ if outcome.summary.run_status.is_some_and(|status| status != 0) => exit::RUN_FAILED,
        _ if unfinished && outcome.exit.is_some() => {
            bail!("the guest ended without saying how --run had ended")
        }
        _ => exit::DONE,
    })
}

/// What the agent has said.
#[derive(Default)]
struct Said {
    status: Option<i32>,
    errors: Vec<String>,
}

impl Said {
    /// A hostile guest may say any number of things.
    const MAX_ERRORS: usize = 20;

    fn take(&mut self, message: AgentMessage) {
        match message {
            AgentMessage::Exit(status) => self.status = Some(status.into()),
            // As shells have it.
            AgentMessage::Signal(signal) => self.status = Some(128 + i32::from(signal)),
            AgentMessage::Error(text) if self.errors.len() < Self::MAX_ERRORS => {
                self.errors.push(text);
            }
            _ => {}
        }
    }
}

/// Threads beside the run: console input, and the signals that end it.
fn start_helpers(handles: Handles, stop: &Arc<AtomicBool>, interactive: bool) {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let Handles { waker, console, .. } = handles;
    if interactive {
        // Ends with the process: a read from a terminal cannot be interrupted.
        std::thread::spawn(move || {
            let mut bytes = [0; 1024];
            while let Ok(len @ 1..) = std::io::stdin().read(&mut bytes) {
                let mut rest = bytes.get(..len).unwrap_or_default();
                while !rest.is_empty() {
                    let taken = console.push(rest);
                    rest = rest.get(taken..).unwrap_or_default();
                    if !rest.is_empty() {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                }
            }
        });
    }
    let stop = Arc::clone(stop);
    match signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]) {
        Ok(mut signals) => {
            std::thread::spawn(move || {
                let mut seen = 0;
                for _ in &mut signals {
                    stop.store(true, Ordering::Relaxed);
                    waker.wake();
                    seen += 1;
                    if seen > 2 {
                        // The orderly end hangs: the user insists.
                        std::process::exit(i32::from(exit::FAILED));
                    }
                }
            });
        }
        Err(error) => log::warn!("signals are not handled: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        assert_eq!(parse_size("5G"), Ok(5 << 30));
        assert_eq!(parse_size("4096"), Ok(4096));
        for bad in ["", "M", "1T", "-1", "99999999999G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
