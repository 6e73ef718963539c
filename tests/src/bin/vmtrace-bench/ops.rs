//! riscv64: the cost of tracers of other functions, by the measurement with which the kernel's
//! CALL_OPS were proposed: one tracer of a function, and 0 to 200 tracers of functions that are not
//! called. The guest's own tracers are measured in one boot, vmtrace with each number in a separate
//! boot: without CALL_OPS, it does not take a site that the guest has used.

use crate::guest::{Run, work};
use crate::value;
use anyhow::{Context, Result, ensure};
use std::process::{Command, Stdio};
use vmtrace::emulated::{FileSource, HostOptions};
use vmtrace::kernel::SiteSection;
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{RISCV_KERNELS, kernel};

const FUNCTION: &str = "__riscv_sys_getppid";
const OTHERS: [usize; 6] = [0, 1, 2, 10, 100, 200];
/// In the guest.
const MODULE: &str = "ftrace-ops.ko";

static HOST: SharedHost = SharedHost::new(host);

fn host() -> Result<HostOptions> {
    let mut options = crate::riscv_host()?;
    for name in RISCV_KERNELS {
        let file = FileSource::Path(module(name)?.into());
        options.files.push((module_path(name), file));
    }
    Ok(options)
}

/// The kernel's own benchmark, built for a kernel.
fn module(kernel: &str) -> Result<String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../images/ftrace-ops");
    let output = Command::new(script).arg(kernel).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "images/ftrace-ops: {}", output.status);
    Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
}

/// Where that is in the host.
fn module_path(kernel: &str) -> String {
    format!("/{kernel}/{MODULE}")
}

/// Two tracers of one function, for both kinds of kernels.
pub(crate) fn two() -> Result<()> {
    println!("\ninstructions a call of getppid with two tracers");
    for name in RISCV_KERNELS.into_iter().rev() {
        let guest = measure(name, &[], Some(&[]))?;
        let two = measure(name, &[FUNCTION], None)?;
        println!(
            "  {:<28}  vmtrace {:6.1}, in a fresh ring {:6.1}, guest, two instances {:8.1}",
            two.release,
            value(&two.text, "ops vmtrace ")?,
            value(&two.text, "ops fresh ")?,
            value(&guest.text, "ops two ")?
        );
    }
    Ok(())
}

/// The table, for both kinds of kernels.
pub(crate) fn run() -> Result<()> {
    RISCV_KERNELS.into_iter().rev().try_for_each(table)
}

fn table(name: &'static str) -> Result<()> {
    let kernel = kernel(name)?;
    let sites = kernel.select(&["tcp_*".to_owned()], &[])?;
    let sites = sites.into_iter().map(|site| &kernel.sites()[site]);
    let idle = sites.filter(|site| site.section == SiteSection::Text);
    let idle: Vec<&str> = idle.filter_map(|site| kernel.site_name(site)).collect();
    let Run { text: guest, release, .. } = measure(name, &[], Some(&OTHERS))?;
    let kind = kernel.ftrace_kind();
    println!("\ninstructions a call of getppid on {release}, {kind:?}:");
    println!("  no tracing {:8.1}  (the whole system call)", value(&guest, "ops untraced ")?);
    println!("  guest kprobe {:6.1}", value(&guest, "ops kprobe ")?);
    println!("  one tracer, and so many of functions that are not called:");
    println!(
        "    others  vmtrace record  in a fresh ring  guest ftrace function  guest ftrace_ops that does nothing"
    );
    for count in OTHERS {
        let idle = idle.get(..count).context("too few functions")?;
        let text = measure(name, idle, None)?.text;
        let module = value(&guest, &format!("ops module {count} "))?;
        println!(
            "    {count:6}  {:14.1}  {:15.1}  {:21.1}  {:34.1}",
            value(&text, "ops vmtrace ")?,
            value(&text, "ops fresh ")?,
            value(&guest, &format!("ops function {count} "))?,
            module - value(&guest, "ops module none ")?
        );
    }
    Ok(())
}

/// Boots a guest in which vmtrace has tracers of these functions beside that of getppid, or in
/// which the guest measures its own beside so many.
fn measure(name: &str, others: &[&str], guest: Option<&[usize]>) -> Result<Run> {
    let mut command = "bench-ops".to_owned();
    if let Some(counts) = guest {
        let counts: String = counts.iter().map(|count| format!(" {count}")).collect();
        command.push_str(&format!(" /{MODULE}{counts}"));
    }
    let module = module_path(name);
    let mut args = vec!["--add", &*module, "-f", FUNCTION, "--from", "__riscv_sys_getpgid"];
    args.extend(others.iter().flat_map(|name| ["--tracer", *name]));
    let run = work(&HOST, name, &command, &args)?;
    let summary = &run.summary;
    ensure!(summary.lost() == 0, "records were lost: {summary:?}");
    ensure!(guest.is_some() || summary.sites.skipped.is_empty(), "{summary:?}");
    let tracers = &summary.sites.tracers;
    ensure!(others.is_empty() || tracers.len() == others.len() + 1, "{summary:?}");
    ensure!(tracers.iter().all(|&sites| sites > 0), "{summary:?}");
    Ok(run)
}
