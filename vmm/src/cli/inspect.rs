//! `vmtrace inspect`: what vmtrace sees in a kernel image.

use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Serialize;

use crate::kernel::{Container, FtraceKind, Kernel, KernelError, SiteStats, Source, Structs};

/// Arguments of `vmtrace inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kernel image: bzImage (vmlinuz), vmlinux, or a riscv64 Image
    kernel: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Take the symbols from this file of the same build
    #[arg(long, value_name = "FILE")]
    system_map: Option<PathBuf>,
}

/// Prints what the image holds, and what cannot be traced and why.
pub fn run(args: Args) -> anyhow::Result<u8> {
    let Args { kernel, json, system_map } = args;
    let kernel = open(&kernel, system_map.as_deref())?;
    let text = if json {
        serde_json::to_string_pretty(&Report::new(&kernel))? + "\n"
    } else {
        table(&kernel)
    };
    ignore_closed_pipe(io::stdout().write_all(text.as_bytes()))?;
    Ok(0)
}

/// Opens a kernel; the error names the file.
pub(super) fn open(path: &Path, system_map: Option<&Path>) -> anyhow::Result<Kernel> {
    Kernel::open_with(path, system_map).with_context(|| path.display().to_string())
}

/// A reader that has seen enough (`| head`) is no failure.
pub(super) fn ignore_closed_pipe(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|error| match error.kind() {
        ErrorKind::BrokenPipe => Ok(()),
        _ => Err(error),
    })
}

/// The JSON form; other programs rely on its keys.
#[derive(Serialize)]
struct Report<'a> {
    release: &'a str,
    arch: &'static str,
    symbols: usize,
    mcount: Mcount,
    ftrace: &'static str,
    btf_bytes: usize,
    layout: &'static str,
    relocatable: bool,
}

#[derive(Serialize)]
struct Mcount {
    entries: usize,
    zero: usize,
    sites: usize,
    text: usize,
    init_text: usize,
    unnamed: usize,
}

impl<'a> Report<'a> {
    fn new(kernel: &'a Kernel) -> Self {
        let SiteStats { entries, zero, sites, text, init_text, unnamed } = kernel.site_stats();
        Self {
            release: kernel.release(),
            arch: kernel.arch().name(),
            symbols: kernel.symbols().len(),
            mcount: Mcount { entries, zero, sites, text, init_text, unnamed },
            ftrace: kernel.ftrace_kind().name(),
            btf_bytes: kernel.btf_len(),
            layout: match kernel.structs().map(Structs::source) {
                Ok(Source::Btf) => "btf",
                Ok(Source::Image) => "image",
                Err(_) => "unknown",
            },
            relocatable: kernel.relocatable(),
        }
    }
}

fn table(kernel: &Kernel) -> String {
    let stats = kernel.site_stats();
    let container = match kernel.container() {
        Container::BzImage => "bzImage",
        Container::Vmlinux => "vmlinux (ELF)",
        Container::Flat => "Image (flat)",
    };
    let compression = kernel.compression().map_or("not compressed", |c| c.name());
    let ftrace = match kernel.ftrace_kind() {
        FtraceKind::Fentry => "fentry: one 5-byte instruction at the head of a function",
        FtraceKind::Patchable => "patchable: two instructions at the head of a function",
        FtraceKind::CallOps => "call_ops: two instructions and a pointer to the tracer",
    };
    let relocatable = if kernel.relocatable() {
        "yes: the kernel may move itself when it boots (KASLR)"
    } else {
        "no: runs where it is linked"
    };
    let structures = match kernel.structs().map(Structs::source) {
        Ok(Source::Btf) => format!("by BTF, {} bytes", kernel.btf_len()),
        Ok(Source::Image) => "by init_task and code, as there is no usable BTF".to_owned(),
        // The row of symbols says what to do.
        Err(KernelError::FunctionSymbols) => "not known by symbols of functions only".to_owned(),
        Err(error) => error.to_string(),
    };
    let mut text = String::new();
    let mut row = |name: &str, value: &str| {
        text.push_str(&format!("{name:<14}{value}\n"));
    };
    row("release", kernel.release());
    row("architecture", kernel.arch().name());
    row("image", &format!("{container}, {compression}"));
    row("relocatable", relocatable);
    let of_functions_only = match kernel.check_traceable() {
        Err(KernelError::FunctionSymbols) => {
            ", of functions only (built without CONFIG_KALLSYMS_ALL?): give the System.map of this very build by --system-map, or its unstripped vmlinux"
        }
        _ => "",
    };
    row("symbols", &format!("{}{of_functions_only}", kernel.symbols().len()));
    row("structures", &structures);
    row("call sites", ftrace);
    let mut count = |name: &str, value: usize, note: &str| {
        text.push_str(format!("  {name:<24}{value:>8}  {note}").trim_end());
        text.push('\n');
    };
    let named = stats.sites - stats.unnamed;
    count("traceable", named, "functions that a filter can choose");
    count("in .text", stats.text, "");
    count("in .init.text", stats.init_text, "until the kernel frees its start-up code");
    text.push_str("not traceable\n");
    let mut count = |name: &str, value: usize, note: &str| {
        text.push_str(&format!("  {name:<24}{value:>8}  {note}\n"));
    };
    count("overridden, removed", stats.zero, "weak functions that the build replaced");
    count("overridden, unnamed", stats.unnamed, "the same, left in the image without a symbol");
    text.push_str(
        "  Functions marked notrace or noinstr (entry code, parts of tracing itself), inlined\n  \
         functions and assembly have no call site. Functions of modules are not in the image.\n",
    );
    text
}
