//! `vmtrace boot`: boots a kernel and traces it.

mod emulated;
mod files;
mod here;
mod spool;

use crate::cli::check_globs;
use crate::devices::virtio::vsock;
use crate::export::{Export, Graph, Json, Player, Text};
use crate::host::{HostArch, HostMode, THIS_PROGRAM, choose};
use crate::initramfs;
use crate::kernel::{Kernel, KernelError};
use crate::machine::{DEFAULT_CMDLINE, MAX_MEMORY, MIN_MEMORY};
use crate::say::say;
use crate::session::Tracing;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use spool::{Late, Spool};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vmtrace_trampolines::Overflow;

/// Arguments of `vmtrace boot`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Kernel: bzImage, vmlinux, or riscv64 Image, plain, compressed or as EFI zboot image
    pub kernel: PathBuf,
    /// Take the kernel's symbols from this file of the same build: for kernels without
    /// CONFIG_KALLSYMS_ALL
    #[arg(long, value_name = "FILE")]
    pub system_map: Option<PathBuf>,
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
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_memory)]
    pub memory: u64,
    /// Load modules of this directory, which is like /lib/modules/RELEASE, with the built-in
    /// initramfs: those for virtio devices, sockets to the guest among them, and what they need
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
    /// Trace functions that match one of these globs on account of a tracer of their own; may be
    /// repeated. Tracers cost nothing to each other's functions where the kernel has
    /// CALL_OPS (riscv64). -f is the tracer before these, and nothing if absent; a function that
    /// several match belongs to the first
    #[arg(long, value_name = "GLOB[,GLOB...]", value_parser = parse_globs)]
    pub tracer: Vec<TracerArg>,
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
    /// How to print it
    #[arg(long, value_enum, default_value_t = FormatArg::Text, conflicts_with = "output")]
    pub format: FormatArg,
    /// Serve the running trace on this unix socket: see `vmtrace stream` and `vmtrace ctl`
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Where the guest's console goes: stderr, none, or a file
    #[arg(long, value_name = "WHERE", default_value = "stderr")]
    pub console: String,
    /// What happens to records when a ring is full
    #[arg(long, value_enum, default_value_t = OverflowArg::Drop)]
    pub overflow: OverflowArg,
    /// Where to run: on this machine's KVM or in an emulated host
    #[arg(long, value_enum, default_value_t = HostArg::Auto)]
    pub host: HostArg,
    /// Unix socket for connections to the guest's vsock ports: a client writes CONNECT PORT.
    /// Connections of the guest to the host's port P go to PATH_P
    #[arg(long, value_name = "PATH")]
    pub vsock: Option<PathBuf>,
    /// The guest's context identifier (CID)
    #[arg(long, value_name = "N", default_value_t = vsock::GUEST_CID)]
    pub cid: u32,
    /// Stop after so many seconds
    #[arg(long, value_name = "SECS")]
    pub timeout: Option<u64>,
    /// Boot this bzImage, which KERNEL (a vmlinux) was taken from
    #[arg(long, value_name = "FILE", hide = true)]
    pub boot_image: Option<PathBuf>,
    /// Ask there for the host's ports instead
    #[arg(long, hide = true, value_name = "PATH")]
    pub vsock_gateway: Option<PathBuf>,
    /// The initial RAM disk given runs a command, whose end the agent reports
    #[arg(long, hide = true)]
    pub expect_run: bool,
    /// The initial RAM disk given lacks the agent: add it
    #[arg(long, hide = true, requires = "initrd")]
    pub add_agent: bool,
    /// The initial RAM disk given has the modules for vsock
    #[arg(long, hide = true)]
    pub with_modules: bool,
    /// Run the emulated host with one CPU whose clock counts instructions
    #[arg(long, hide = true)]
    pub icount: bool,
}

/// `--format`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// As ftrace's function tracer
    Text,
    /// One JSON object a line
    Json,
    /// As ftrace's function_graph tracer
    Graph,
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

/// `--tracer`: its globs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracerArg(Vec<String>);

impl std::fmt::Display for TracerArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

fn parse_globs(text: &str) -> Result<TracerArg, String> {
    let globs: Vec<String> = text.split(',').map(str::to_owned).collect();
    check_globs(&globs).map_err(|error| error.to_string())?;
    Ok(TracerArg(globs))
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

/// A size that a machine can have.
fn parse_memory(text: &str) -> Result<u64, String> {
    let size = parse_size(text)?;
    if !(MIN_MEMORY..=MAX_MEMORY).contains(&size) || !size.is_multiple_of(4096) {
        return Err("a guest has 64M to 1024G of memory, in pages of 4K".to_owned());
    }
    Ok(size)
}

impl Args {
    /// Whether the agent in the guest has a command to run.
    #[must_use]
    pub fn expects_run(&self) -> bool {
        self.run.is_some() || self.expect_run
    }

    /// Whether the user cares for sockets in the guest.
    #[must_use]
    pub fn wants_vsock(&self) -> bool {
        let modules = self.modules.is_some() || self.with_modules;
        modules || self.vsock.is_some() || self.socket.is_some()
    }

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
        let none = self.filter.is_empty() && !self.tracer.is_empty();
        let filters = std::iter::once(&self.filter).chain(self.tracer.iter().map(|arg| &arg.0));
        let (mut tracers, mut unmatched, mut unmatched_notrace) = (vec![], vec![], vec![]);
        for (number, globs) in filters.enumerate() {
            if number == 0 && none {
                tracers.push(Vec::new());
                continue;
            }
            let selection = kernel.select_with_report(globs, &self.notrace);
            tracers.push(selection.sites);
            unmatched.extend(selection.unmatched);
            // The same for each.
            unmatched_notrace = selection.unmatched_notrace;
        }
        if tracers.len() > Tracing::MAX_TRACERS {
            bail!("--tracer: there can be {} at most", Tracing::MAX_TRACERS - 1);
        }
        let from = match &self.from {
            None => None,
            Some(name) => Some(find(kernel, name)?),
        };
        let overflow = match self.overflow {
            OverflowArg::Drop => Overflow::Drop,
            OverflowArg::Overwrite => Overflow::Overwrite,
        };
        let tracing = Tracing { tracers, from, overflow };
        let sites = tracing.sites();
        if sites.is_empty() {
            return Err(KernelError::NoMatch { globs: unmatched }.into());
        }
        for glob in unmatched.iter().chain(&unmatched_notrace) {
            say!("vmtrace: warning: no function matches {glob:?}");
        }
        for (count, arg) in tracing.counts(sites).into_iter().skip(1).zip(&self.tracer) {
            if count == 0 {
                say!("vmtrace: warning: --tracer {arg} has no function of its own");
            }
        }
        Ok(tracing)
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

/// Modules of the built-in initramfs that make virtio devices work, as far as a
/// kernel has them.
const MODULES: [&str; 3] = ["virtio_mmio", "virtio_rng", "vmw_vsock_virtio_transport"];

/// The guest's initial RAM disk; one for another architecture lacks the agent.
fn initrd(args: &Args, guest: HostArch) -> Result<Vec<u8>> {
    if let Some(path) = &args.initrd {
        let content = std::fs::read(path).with_context(|| path.display().to_string())?;
        return Ok(if args.add_agent { initramfs::add_agent(&content)? } else { content });
    }
    let mut builder = initramfs::Builder::new().run(args.run.as_deref());
    if !guest.is_native() {
        builder = builder.without_agent();
    }
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

/// Where the trace stream of a run goes.
fn trace_output(args: &Args) -> Result<(Box<dyn Write + Send>, Late)> {
    if let Some(path) = &args.output {
        let file = std::fs::File::create(path).with_context(|| path.display().to_string())?;
        return Ok((Box::new(file), Late::default()));
    }
    let out = std::io::stdout();
    let export: Box<dyn Export + Send> = match args.format {
        FormatArg::Text => Box::new(Text::new(out)),
        FormatArg::Json => Box::new(Json::new(out)),
        FormatArg::Graph => Box::new(Graph::new(out)),
    };
    let spool = Spool::new(Player::new(export));
    let late = spool.late();
    Ok((Box::new(spool), late))
}

/// What an output of the trace is called in errors.
fn trace_name(args: &Args) -> String {
    let path = args.output.as_deref();
    path.map_or_else(
        || "the trace to standard output".to_owned(),
        |path| path.display().to_string(),
    )
}

/// Runs the subcommand; returns the exit code.
///
/// # Errors
/// When vmtrace itself fails.
pub fn run(args: &Args) -> Result<u8> {
    files::check(args)?;
    // What is wrong with the kernel or the filters is said before anything boots.
    let kernel = Arc::new(super::inspect::open(&args.kernel, args.system_map.as_deref())?);
    kernel.check_traceable().with_context(|| args.kernel.display().to_string())?;
    let tracing = args.tracing(&kernel)?;
    if args.kaslr && args.boot_image.is_none() && kernel.bzimage().is_none() {
        bail!(
            "--kaslr needs a bzImage, whose decompressor chooses the addresses; {} is none",
            args.kernel.display()
        );
    }
    let guest = HostArch::of(kernel.arch());
    let initrd = initrd(args, guest)?;
    let mode = match args.host {
        HostArg::Auto => HostMode::Auto,
        HostArg::Kvm => HostMode::Kvm,
        HostArg::Emulated => HostMode::Emulated,
    };
    let choice = choose(mode, guest, Path::new(THIS_PROGRAM))?;
    if args.host == HostArg::Auto {
        say!("vmtrace: {choice}");
    }
    if choice.emulated {
        emulated::run(args, &kernel, initrd)
    } else {
        here::run(args, kernel, tracing, initrd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    pub(super) fn args(line: &str) -> Result<Args, clap::Error> {
        let words = ["boot", "vmlinuz"].into_iter().chain(line.split_whitespace());
        <Line as clap::Parser>::try_parse_from(words).map(|line| line.args)
    }

    // An emulated host gets the options as they were given here.
    #[test]
    fn tracers_are_lists_of_globs() {
        let args = args("--tracer vfs_*,ksys_read --tracer tcp_*").unwrap();
        let tracers: Vec<_> = args.tracer.iter().map(ToString::to_string).collect();
        assert_eq!(tracers, ["vfs_*,ksys_read", "tcp_*"]);
        assert_eq!(args.tracer[0], TracerArg(vec!["vfs_*".into(), "ksys_read".into()]));
        for bad in ["", "a,", ",a", "a,,b"] {
            assert!(parse_globs(bad).is_err(), "{bad:?}");
        }
    }

    // A file gets the stream itself, whatever it is to look like.
    #[test]
    fn forms_are_for_what_is_printed() {
        assert_eq!(args("-o file").unwrap().format, FormatArg::Text);
        assert_eq!(args("--format graph").unwrap().format, FormatArg::Graph);
        assert!(args("-o file --format json").is_err());
    }

    // An emulated host would boot first, or be given memory that has wrapped around.
    #[test]
    fn memory_that_no_machine_has_is_a_usage_error() {
        for good in ["64M", "67108864", "1G", "1024G"] {
            assert!(args(&format!("--memory {good}")).is_ok(), "{good}");
        }
        for bad in ["0", "1", "63M", "1025G", "67108865", "18446744073709551615"] {
            let error = args(&format!("--memory {bad}")).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{bad}");
        }
    }

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
