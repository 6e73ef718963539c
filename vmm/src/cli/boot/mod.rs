//! `vmtrace boot`: boots a kernel and traces it.

mod commands;
mod conditions;
mod conversion;
mod disks;
mod emulated;
mod files;
mod here;
mod images;
mod input;
mod interactive;
mod outlet;
mod parse;
mod reports;
mod run_output;
mod shares;
mod times;
mod tracing;
mod triggers;
mod userland;
mod watchers;

use crate::analyze::latency::Kind;
use crate::cli::check::{Live, Rules};
use crate::cli::exit;
use crate::cli::view::parse_time;
use crate::condition::Condition;
use crate::deadline::{self, Deadline, Guard};
use crate::devices::virtio::blk::MAX_DISKS;
use crate::devices::virtio::vsock;
use crate::emulated::{HostArch, THIS_PROGRAM};
use crate::host::{HostMode, choose};
use crate::kernel::arguments::ArgumentSpec;
use crate::machine::DEFAULT_CMDLINE;
use crate::serve::{GuestReaders, TracerSpec};
use crate::stream::Compression;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use conversion::Conversion;
pub(super) use images::modules_in;
use reports::Reports;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use triggers::Triggers;
use vmtrace_system::say;
use vmtrace_trampolines::nesting::Nesting;
use watchers::{Watchers, trace_name, trace_output};

/// The headings of options in `--help`.
mod headings {
    pub(super) const MACHINE: &str = "What to boot";
    pub(super) const TRACE: &str = "What to trace";
    pub(super) const PLACES: &str = "Where it goes";
    pub(super) const RUN: &str = "How it runs";
}

/// Arguments of `vmtrace boot`.
#[derive(Clone, Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("tasks").multiple(true)))]
pub struct Args {
    /// Kernel: bzImage, vmlinux, or riscv64 Image, plain, compressed or as EFI zboot image. Without
    /// one, the running kernel of this machine (/boot/vmlinuz-RELEASE) with its modules
    pub kernel: Option<PathBuf>,
    /// Take the kernel's symbols from this file of the same build: for kernels without
    /// CONFIG_KALLSYMS_ALL
    #[arg(long, value_name = "FILE", help_heading = headings::MACHINE)]
    pub system_map: Option<PathBuf>,
    /// Initial RAM disk instead of the built-in one. Its /init is process 1. With --run or --interactive the agent
    /// is process 1 instead, and is added to its files
    #[arg(long, value_name = "FILE", help_heading = headings::MACHINE)]
    pub initrd: Option<PathBuf>,
    /// The agent is process 1 in that.
    #[arg(skip)]
    agent_in_initrd: bool,
    /// Appended to the kernel's command line, which begins with `console=ttyS0 panic=-1`
    #[arg(long, value_name = "TEXT", default_value = "", help_heading = headings::MACHINE)]
    pub cmdline: String,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64), help_heading = headings::MACHINE)]
    pub cpus: u8,
    /// Guest memory: bytes, or with K, M or G
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse::memory, help_heading = headings::MACHINE)]
    pub memory: u64,
    /// Load modules from this directory, which has the layout of /lib/modules/RELEASE. The agent loads
    /// those for virtio devices (sockets to the guest included) and their dependencies: in the built-in
    /// initramfs, under --root, and in an --initrd with --run or --interactive; with any other --initrd
    /// this is an error. auto takes the first of: modules or lib/modules/RELEASE beside the image,
    /// /lib/modules/RELEASE
    #[arg(long, value_name = "DIR|auto", help_heading = headings::MACHINE)]
    pub modules: Option<PathBuf>,
    /// Disks
    #[command(flatten)]
    pub disks: disks::Disks,
    /// Shares
    #[command(flatten)]
    pub shares: shares::Shares,
    /// Where modules are that the guest needs for disks, shares and the output of --run
    #[arg(skip)]
    device_modules: Option<PathBuf>,
    /// Let the kernel choose its addresses (boots through its own decompressor)
    #[arg(long, help_heading = headings::MACHINE)]
    pub kaslr: bool,
    /// Trace functions that match this glob, also those of modules that are loaded later.
    /// GLOB:mod:NAME and :mod:NAME match only functions of such modules. @FILE stands for the globs
    /// in that file. May be repeated
    #[arg(short, long, value_name = "GLOB", help_heading = headings::TRACE)]
    pub filter: Vec<String>,
    /// Do not trace functions that match this glob; may be repeated
    #[arg(short, long, value_name = "GLOB", help_heading = headings::TRACE)]
    pub notrace: Vec<String>,
    /// Add a tracer to that of -f; may be repeated, up to 254 times. A glob with ! before it is an exception
    /// of this tracer. Actions: entry (the default), graph (returns, too), args (parameters), retval (returned
    /// values), count (counts calls, records none), callers (as --count-callers), or hist, hist(retval) and
    /// hist(PARAMETER) (as --hist). A
    /// call of a function that several tracers have is recorded for each. A tracer costs nothing in functions
    /// that it does not trace. Without -f there are only these tracers
    #[arg(long, value_name = "[NAME=]GLOB[,GLOB...][:ACTION[+ACTION...]][ if CONDITION]", value_parser = parse::tracer, help_heading = headings::TRACE)]
    pub tracer: Vec<TracerSpec>,
    /// Record only calls of the functions of -f for which this condition holds. The guest evaluates it
    /// before anything is written. Operands: pid, tgid, comm, cpu, caller (a function), and parameters
    /// by their names (args.NAME for one that has the name of another operand). Operators: ==, !=, <,
    /// <=, >, >=, & (common bits), &&, ||, ! and parentheses. A condition on retval or duration, such as
    /// 'retval < 0' or 'duration > 1ms' (ns, us, ms, s), is evaluated where calls end: of each call that
    /// matches, the return is recorded, with its value, and with the duration if it is known
    #[arg(long = "if", value_name = "CONDITION", value_parser = conditions::parse, help_heading = headings::TRACE)]
    pub condition: Option<Condition>,
    /// Record only what this task (thread) does, of all functions and events, like `--if 'pid ==
    /// N'`; may be repeated
    #[arg(long, value_name = "N", group = "tasks", help_heading = headings::TRACE)]
    pub pid: Vec<u32>,
    /// Record only what tasks of this name do, of all functions and events, like `--if 'comm ==
    /// NAME'`. ? stands for any character, * at the end for any rest; may be repeated
    #[arg(long, value_name = "NAME", value_parser = conditions::parse_comm, group = "tasks", help_heading = headings::TRACE)]
    pub comm: Vec<String>,
    /// With --pid and --comm: also record what all descendants of these tasks do, whatever their
    /// names. In conditions the operand `followed` stands for such tasks
    #[arg(long, requires = "tasks", conflicts_with = "from", help_heading = headings::TRACE)]
    pub children: bool,
    /// Trace this event (tracepoint) with its fields: a name from `vmtrace events`, or a glob, such
    /// as sched:sched_switch or 'block:*'; may be repeated. With ':mod:NAME' at the end, such as
    /// 'xfs:*:mod:xfs', it means events of this module, once it is loaded. Without -f and --tracer
    /// only events are traced
    #[arg(long, value_name = "SYSTEM:NAME", help_heading = headings::TRACE)]
    pub event: Vec<String>,
    /// Trace the returns of the functions of -f as well, and print calls with their durations as
    /// ftrace's function_graph tracer does
    #[arg(long, help_heading = headings::TRACE)]
    pub graph: bool,
    /// With --graph: record only calls of these functions, and what is called in them. The guest decides before
    /// anything is written. The functions are traced whether -f names them or not, unless -n does; a
    /// condition (--if, --comm) has to hold for them, too. May be repeated
    #[arg(long, value_name = "GLOB", requires = "graph", help_heading = headings::TRACE)]
    pub graph_root: Vec<String>,
    /// With --graph: record calls to this depth, of those of -f, or below --graph-root: 1 is the outermost. The guest
    /// decides before anything is written
    #[arg(long, value_name = "N", requires = "graph", value_parser = clap::value_parser!(u8).range(1..=i64::from(Nesting::MAX_DEPTH)), help_heading = headings::TRACE)]
    pub max_depth: Option<u8>,
    /// With --graph: record only calls that take at least this long, such as 10us or 1ms, where they return. The guest
    /// decides before anything is written
    #[arg(long, value_name = "TIME", requires = "graph", conflicts_with_all = ["args", "arg"], value_parser = parse_time, help_heading = headings::TRACE)]
    pub min_duration: Option<u64>,
    /// Record the parameters of the functions of -f, with their names and types from the kernel's
    /// type information
    #[arg(long, help_heading = headings::TRACE)]
    pub args: bool,
    /// Record the values that the functions of -f return, and their returns as --graph does
    #[arg(long, help_heading = headings::TRACE)]
    pub retval: bool,
    /// Record the state of the CPU at every call and event, and show it as ftrace does (`d..2.`):
    /// interrupts off, need-resched, hard or soft interrupt, preemption and migration off
    #[arg(long, help_heading = headings::TRACE)]
    pub context: bool,
    /// Trace every exit of a vCPU to vmtrace as an event host:exit, with its reason, port or address, and
    /// the time that the vCPU was out of the guest, pauses included; and every time in which the host ran
    /// others in its place (preempted). Without -f, --tracer and --event only exits are traced. With
    /// --latency they count as the host's time
    #[arg(long, help_heading = headings::TRACE)]
    pub exits: bool,
    /// Count calls of the functions of -f in the guest instead of recording them: a table at the end
    /// of the trace shows how often each was called on each vCPU
    #[arg(long, conflicts_with_all = ["graph", "args", "retval", "arg"], help_heading = headings::TRACE)]
    pub count: bool,
    /// Make a histogram of the calls of each of these functions in the guest, instead of recording them: by
    /// duration (the default), by returned value (retval), or by a parameter (its name, or args.NAME), such as
    /// 'vfs_read:count if pid == 42'; may be repeated
    #[arg(long, value_name = "GLOB[,GLOB...][:OF][ if CONDITION]", value_parser = parse::hist, help_heading = headings::TRACE)]
    pub hist: Vec<TracerSpec>,
    /// Count calls of each of these functions in the guest by caller, instead of recording them: a table at the
    /// end of the trace shows who called it, and how often. Such as 'vfs_read if pid == 42'; may be repeated
    #[arg(long, value_name = "GLOB[,GLOB...][ if CONDITION]", value_parser = parse::callers, help_heading = headings::TRACE)]
    pub count_callers: Vec<TracerSpec>,
    /// Record these values at calls of functions of -f: parameters, and members of structures to
    /// which they point. A path may have a name (NAME=PATH), and a string a largest length
    /// (PATH:BYTES). FUNCTION is GLOB, GLOB:mod:NAME or :mod:NAME; may be repeated
    #[arg(long, value_name = "FUNCTION: PATH, ...", value_parser = parse::argument, help_heading = headings::TRACE)]
    pub arg: Vec<ArgumentSpec>,
    /// Allow that returns of functions that match this glob are traced later, by `vmtrace ctl
    /// tracer add ...:graph`; may be repeated. Only riscv64 guests need this option, since the ends
    /// of functions are rewritten only during their boot, and those of modules when they are loaded
    #[arg(long, value_name = "GLOB", help_heading = headings::TRACE)]
    pub returns: Vec<String>,
    /// Begin to trace at the first call of this function
    #[arg(long, value_name = "FUNCTION", help_heading = headings::TRACE)]
    pub from: Option<String>,
    /// What is done at calls
    #[command(flatten)]
    pub triggers: Triggers,
    /// Run a command line in the guest, then power off. If the trace goes to a file (-o), the command's standard output
    /// goes to that of vmtrace; else it goes to standard error, as the command's standard error always does. Programs
    /// in the built-in initramfs: the files of --add, cat, echo, false, ls, mark, poweroff, sleep, true, write, and
    /// those of Debian's static busybox (`vmtrace setup` fetches it). Its shell runs lines that have more than words,
    /// quotes, `;` and `&&`. With --initrd or --root: the programs in there, run by their /bin/sh if there is one
    #[arg(long, value_name = "CMD", value_parser = parse::run, help_heading = headings::MACHINE)]
    pub run: Option<String>,
    /// Add this file as /NAME to the built-in initramfs (vmtrace itself: /bin/vmtrace), or to that of --initrd; may be repeated
    #[arg(long, value_name = "FILE", help_heading = headings::MACHINE)]
    pub add: Vec<PathBuf>,
    /// At the end print where the time of the boot went, instead of the trace (-o keeps that): by
    /// initcall, function, idle time, module and step to init, as text or JSON (--format). The
    /// functions that this needs are traced in addition to those of -f, --tracer and --event, or
    /// alone without these
    #[arg(long, help_heading = headings::TRACE)]
    pub boot_report: bool,
    /// At the end print latencies of this kind, instead of the trace (-o keeps that), as the kernel's
    /// tracer of the same name does: the longest one with what its vCPU did meanwhile (events, and
    /// functions of -f if given); also histograms and sums. The events that this needs are traced,
    /// with --context
    #[arg(long, value_enum, value_name = "KIND", conflicts_with = "boot_report", help_heading = headings::TRACE)]
    pub latency: Option<Kind>,
    /// With --latency: list those of at least this length, such as 500us
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "latency", help_heading = headings::TRACE)]
    pub over: Option<u64>,
    /// Write the trace to this file instead of printing it. If its name is that of another format
    /// (trace.dat, *.pftrace, *.html and others: see vmtrace convert), the trace is converted to
    /// that format at the end of the run
    #[arg(short, long, value_name = "FILE", help_heading = headings::PLACES)]
    pub output: Option<PathBuf>,
    /// Compress the trace file: zstd, or zstd:LEVEL (1 by default; levels below 0 are the fastest).
    /// Every subcommand reads compressed and plain traces alike
    #[arg(long, value_name = "HOW", requires = "output", help_heading = headings::PLACES)]
    pub compress: Option<Compression>,
    /// How to print the trace
    #[arg(long, value_enum, conflicts_with = "output", help_heading = headings::PLACES)]
    pub format: Option<FormatArg>,
    /// Serve the running trace on this Unix socket: see `vmtrace stream` and `vmtrace ctl`
    #[arg(long, value_name = "PATH", help_heading = headings::PLACES)]
    pub socket: Option<PathBuf>,
    /// Let processes of the guest read the trace at vsock port 1024 of CID 2. It shows what other
    /// processes do, and where KASLR has put the kernel. Without WHO only processes that connect
    /// from a port below 1024 may read it, which takes a privilege. Marks need no such permission
    #[arg(long, value_enum, value_name = "WHO", num_args = 0..=1, require_equals = true, default_missing_value = "privileged", help_heading = headings::PLACES)]
    pub serve_guest: Option<GuestReaders>,
    /// Where the guest's console goes: stderr, none, or a file
    #[arg(long, value_name = "WHERE", default_value = "stderr", help_heading = headings::PLACES)]
    pub console: String,
    /// Use this terminal as the guest's console. The guest gets every key except Ctrl-]: Ctrl-] q ends the run, Ctrl-]
    /// Ctrl-] sends that key, Ctrl-] ? shows help. The agent runs a shell there, from the built-in initramfs, --initrd
    /// or --root, and the guest powers off when the shell ends. The trace has to go elsewhere (-o, --socket)
    #[arg(short, long, conflicts_with_all = ["run", "console"], help_heading = headings::MACHINE)]
    pub interactive: bool,
    /// Do not record the lines of the guest's console as marks in the trace
    #[arg(long, help_heading = headings::PLACES)]
    pub no_console_marks: bool,
    /// What happens to records when a ring is full
    #[arg(long, value_enum, default_value_t = OverflowArg::Drop, help_heading = headings::TRACE)]
    pub overflow: OverflowArg,
    /// Size of each vCPU's ring: bytes, or with K, M or G, up to 1G. Above the default, all rings
    /// together can have 2046M on x86-64 and 1534M on riscv64, and need as much of this machine's
    /// memory
    #[arg(long, value_name = "SIZE", value_parser = parse::buffer, help_heading = headings::TRACE)]
    pub buffer: Option<u64>,
    /// Where to run: on this machine's KVM or in an emulated host
    #[arg(long, value_enum, default_value_t = HostArg::Auto, help_heading = headings::RUN)]
    pub host: HostArg,
    /// Unix socket for connections to the guest's vsock ports: a client writes CONNECT PORT.
    /// Connections of the guest to the host's port P go to PATH_P
    #[arg(long, value_name = "PATH", help_heading = headings::PLACES)]
    pub vsock: Option<PathBuf>,
    /// Do not confine the process that runs the guest: without seccomp filters, Landlock and
    /// dropped capabilities a guest that exploits a bug of vmtrace can do what you can do
    #[arg(long, help_heading = headings::RUN)]
    pub no_seccomp: bool,
    /// The guest's context identifier (CID)
    #[arg(long, value_name = "N", default_value_t = vsock::GUEST_CID, value_parser = parse::cid, help_heading = headings::MACHINE)]
    pub cid: u32,
    /// Stop after SECS seconds
    #[arg(long, value_name = "SECS", value_parser = parse::timeout, help_heading = headings::RUN)]
    pub timeout: Option<u64>,
    /// End the run with exit code 3 if the guest hangs: one of its CPUs had interrupts off for SECS seconds, or ran
    /// a task in the kernel for as long (20 at the least) while others waited. 0 means never; this is the default
    /// with --interactive, where a debugger may cause that [default: 60]
    #[arg(long, value_name = "SECS", help_heading = headings::RUN)]
    pub hang_after: Option<u64>,
    /// Boot this bzImage, which KERNEL (a vmlinux) was taken from
    #[arg(long, value_name = "FILE", hide = true)]
    pub boot_image: Option<PathBuf>,
    /// Ask there for the host's ports instead
    #[arg(long, hide = true, value_name = "PATH")]
    pub vsock_gateway: Option<PathBuf>,
    /// The initial RAM disk given runs a command, whose end the agent reports
    #[arg(long, hide = true)]
    pub expect_run: bool,
    /// The initial RAM disk given lacks the agent: add it, as that
    #[arg(long, hide = true, requires = "initrd")]
    pub add_agent: Option<AgentArg>,
    /// The initial RAM disk given has the modules for vsock
    #[arg(long, hide = true)]
    pub with_modules: bool,
    /// Standard input has a user's keys and sizes of a terminal
    #[arg(long, hide = true)]
    pub typed: bool,
    /// What there is to say of the filters was said
    #[arg(long, hide = true)]
    pub filters_checked: bool,
    /// Where calls of --exec-at are told: whoever reads it runs the commands
    #[arg(long, hide = true, value_name = "FILE")]
    pub exec_to: Option<PathBuf>,
    /// Trace what a boot report takes, and print none
    #[arg(long, hide = true)]
    pub trace_boot: bool,
    /// Run the emulated host with one CPU whose clock counts instructions
    #[arg(long, hide = true)]
    pub icount: bool,
    /// What the trace must be like: it is checked as it goes, also without -o
    #[command(flatten)]
    pub rules: Rules,
}

/// `--format`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// As ftrace's function tracer prints it
    Text,
    /// One JSON object per line
    Json,
    /// As ftrace's function_graph tracer prints it
    Graph,
}

/// `--add-agent`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AgentArg {
    /// `/init` of the built-in initramfs
    Init,
    /// Process 1 beside a user's `/init`
    Beside,
}

/// `--overflow`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OverflowArg {
    /// Drop the new record and count it
    Drop,
    /// Overwrite the oldest: a flight recorder, written when the guest ends
    Overwrite,
    /// Wait: a vCPU whose ring is full leaves the guest until there is room, and nothing is lost
    Block,
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

impl Args {
    /// Whether the agent in the guest has a command to run.
    #[must_use]
    pub fn expects_run(&self) -> bool {
        self.run.is_some() || self.expect_run
    }

    /// For how long a CPU of the guest may have interrupts off; `None`: for ever.
    fn hang_after(&self) -> Option<Duration> {
        const DEFAULT: u64 = 60;
        let seconds = self.hang_after.unwrap_or(if self.interactive { 0 } else { DEFAULT });
        (seconds > 0).then(|| Duration::from_secs(seconds))
    }

    /// Whether disks and shares can be, as far as they can be looked at.
    fn check_devices(&self) -> Result<()> {
        self.shares.check()?;
        let (disks, shares) = (self.disks.disk.len(), self.shares.count());
        if disks + shares > MAX_DISKS {
            bail!(
                "--disk, --share: a machine has {MAX_DISKS} disks and shares at most, not {}",
                disks + shares
            );
        }
        Ok(())
    }

    /// Whether the user cares for sockets in the guest.
    #[must_use]
    pub fn wants_vsock(&self) -> bool {
        let modules = self.modules.is_some() || self.with_modules;
        let served = self.serve_guest.is_some_and(|readers| readers != GuestReaders::None);
        modules || served || self.vsock.is_some() || self.socket.is_some()
    }

    /// Whether what a boot report takes is traced.
    fn traces_boot(&self) -> bool {
        self.boot_report || self.trace_boot
    }

    /// Whether where functions are left is traced.
    #[must_use]
    pub fn wants_graph(&self) -> bool {
        let own = self.tracer.iter();
        let mut conditions =
            own.clone().filter_map(|spec| spec.condition.as_ref()).chain(&self.condition);
        self.graph
            || self.retval
            || own.clone().any(|spec| spec.actions.exits())
            || conditions.any(Condition::is_of_ends)
    }

    /// How the trace is printed.
    #[must_use]
    pub fn format(&self) -> FormatArg {
        let usual = if self.wants_graph() { FormatArg::Graph } else { FormatArg::Text };
        self.format.unwrap_or(usual)
    }

    /// The guest's whole command line.
    #[must_use]
    pub fn guest_cmdline(&self) -> String {
        format!("{DEFAULT_CMDLINE} {}", self.cmdline).trim_end().to_owned()
    }
}

/// Runs the subcommand; returns the exit code.
///
/// # Errors
/// When vmtrace itself fails.
pub fn run(mut args: Args) -> Result<u8> {
    interactive::check(&args)?;
    if !args.interactive {
        input::survive_background().context("cannot block SIGTTIN")?;
    }
    images::start_agent(&mut args)?;
    let roots = &mut args.graph_root;
    for globs in [&mut args.filter, &mut args.notrace, &mut args.returns, roots] {
        *globs = super::from_files(std::mem::take(globs))?;
    }
    let image = images::kernel(&args)?;
    files::check(&args, &image)?;
    args.check_devices()?;
    let disks = args.disks.open()?;
    let reports = Reports::new(&args)?;
    let rules = Live::new(&args.rules)?;
    // What is wrong with the kernel or the filters is said before anything boots.
    let kernel = Arc::new(super::inspect::open(&image, args.system_map.as_deref())?);
    kernel.check_traceable().with_context(|| image.display().to_string())?;
    images::check_cmdline(&args.cmdline, kernel.arch())?;
    images::check_length(&args, "", kernel.arch())?;
    args.modules = images::modules(&args, &image, kernel.release())?;
    args.device_modules = images::device_modules(&args, &image, kernel.release());
    args.trace_latency(&kernel);
    let (tracing, notes) = args.tracing(&kernel)?;
    if let Some(rules) = &rules {
        let names = |sites: &mut dyn Iterator<Item = usize>| -> Vec<&str> {
            let site = |index| kernel.site_name(kernel.sites().get(index)?);
            sites.filter_map(site).collect()
        };
        let all = names(&mut (0..kernel.sites().len()));
        let traced = tracing.present().flat_map(|(_, tracer)| tracer.sites.iter().copied());
        let tells = |tracer: &crate::session::Tracer| {
            tracer.graph && tracer.histogram.is_none() && !tracer.counts
        };
        let graphs = tracing.present().filter(|(_, tracer)| tells(tracer));
        let timed = graphs.flat_map(|(_, tracer)| tracer.sites.iter().copied());
        rules.expect_functions(&all, &names(&mut { traced }), &names(&mut { timed }))?;
    }
    // Also for those of modules: to look takes a second, in which the guest would wait when one is loaded.
    if tracing.may_want_exits() {
        let exits = kernel.exits();
        if !tracing.returning().is_empty() {
            let asked = match () {
                () if args.graph => "--graph: ",
                () if args.boot_report => "--boot-report: ",
                () if args.trace_boot => "--trace-boot: ",
                () => "where calls end is asked for: ",
            };
            exits.with_context(|| format!("{asked}{}", image.display()))?;
        }
    }
    if args.kaslr && args.boot_image.is_none() && kernel.bzimage().is_none() {
        bail!(
            "--kaslr needs a bzImage, whose decompressor chooses the addresses; {} is not one",
            image.display()
        );
    }
    let guest = HostArch::of(kernel.arch());
    let initrd = images::initrd(&args, guest, kernel.release())?;
    let conversion = Conversion::prepare(&mut args)?;
    let args = &args;
    let mode = match args.host {
        HostArg::Auto => HostMode::Auto,
        HostArg::Kvm => HostMode::Kvm,
        HostArg::Emulated => HostMode::Emulated,
    };
    let choice = choose(mode, guest, Path::new(THIS_PROGRAM))?;
    if choice.emulated {
        images::check_length(args, guest.guest_cmdline(), kernel.arch())?;
    }
    if args.host == HostArg::Auto {
        say!("vmtrace: {choice}");
    }
    let watchers = Watchers { rules: rules.clone(), reports: reports.clone() };
    let shares = args.shares.start(args.no_seccomp)?;
    let mut guard = None;
    let code = if choice.emulated {
        emulated::run(args, &watchers, &kernel, initrd, (&disks, shares), &mut guard)
    } else {
        let is_chosen = !args.filter.is_empty() || !args.tracer.is_empty();
        tracing::uncovered(&kernel, &tracing, is_chosen);
        for note in notes {
            say!("vmtrace: {note}");
        }
        here::run(args, &watchers, kernel, tracing, (initrd, disks, shares), &mut guard)
    };
    let deadline = guard.as_ref().map_or_else(Deadline::never, Guard::deadline);
    deadline.run_has_ended();
    deadline.set_code(*code.as_ref().unwrap_or(&exit::FAILED));
    // Also of a run that has failed: what was traced until then is worth having.
    let code = conversion::then(code, conversion, &deadline).and_then(|code| {
        conversion::end_by_signals()?;
        reports.print()?;
        rules.map_or(Ok(code), |rules| rules.finish(code))
    });
    deadline.set_code(*code.as_ref().unwrap_or(&exit::FAILED));
    // What is still to be said is said by whoever has called this.
    deadline.begin("standard error", deadline::TIME);
    std::mem::forget(guard);
    code
}

#[cfg(test)]
mod tests;
