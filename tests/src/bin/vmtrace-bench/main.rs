//! What tracing costs, in instructions, beside the guest's own tracers: everything
//! from one boot of an emulated host whose clock counts instructions (icount). And bytes
//! a second between guest and host, from one boot of an emulated host by the clock.
//!
//! `scripts/bench` runs it; with `ops`, the table for riscv64 alone. The instructions
//! repeat from run to run.

mod ops;

use std::io::Read;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use vmtrace::host::{FileSource, HostArch, HostOptions, Stdin};
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{Trace, WORKLOAD, boot, options, socket_initrd};

const KERNEL: &str = "x86_64-6.12";
/// Under `-icount shift=1` an instruction takes 2 ns of emulated time.
const NANOSECONDS: f64 = 2.0;

static HOST: SharedHost = SharedHost::new(host);

fn host() -> Result<HostOptions> {
    let me = std::env::current_exe()?;
    let workload = me.with_file_name("vmtrace-guest");
    let workload = workload.to_str().context("a path that is no UTF-8")?;
    let options = options(workload, &[KERNEL])?;
    Ok(HostOptions { icount: true, cpus: 1, progress: true, ..options })
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => {
            bytes()?;
            events()?;
            boots()?;
            ops::run()
        }
        Some("ops") => ops::run(),
        Some(other) => bail!("unknown argument {other:?}: say nothing, or ops"),
    }
}

fn run(workload: &str, args: &[&str]) -> Result<(String, Trace)> {
    let command = format!("{WORKLOAD} {workload}");
    let mut all = vec!["--add", WORKLOAD, "--run", &command, "--timeout", "1200"];
    all.extend(args);
    let (finished, trace) = boot(&HOST, KERNEL, &all)?;
    ensure!(finished.end.code == Some(0), "{:?}\n{}", finished.end, finished.err());
    Ok((finished.err(), trace))
}

fn value(text: &str, key: &str) -> Result<f64> {
    let rest = text.lines().find_map(|line| line.trim().strip_prefix(key));
    Ok(rest.with_context(|| format!("no {key:?} in {text}"))?.trim().parse()?)
}

fn events() -> Result<()> {
    let args = ["-f", "__x64_sys_getppid", "--from", "__x64_sys_getpgid"];
    let (text, trace) = run("bench", &args)?;
    ensure!(trace.summary.lost() == 0, "records were lost: {:?}", trace.summary);
    let (untraced, again) =
        (value(&text, "bench untraced ")?, value(&text, "bench untraced-again ")?);
    println!("instructions an event: getppid on {}, one boot", trace.header.release);
    println!("  no tracing                    {untraced:8.1}  (the whole system call)");
    println!("  no tracing, after the others  {again:8.1}");
    for (name, key) in [
        ("guest ftrace function", "bench function "),
        ("guest kprobe", "bench kprobe "),
        ("vmtrace entry record", "bench vmtrace "),
    ] {
        println!("  {name:<28}  {:8.1}", value(&text, key)?);
    }
    Ok(())
}

/// Instructions from power-on to the first program, by the guest's clock.
fn boot_cost(args: &[&str]) -> Result<(f64, Trace)> {
    let (text, trace) = run("uptime", args)?;
    Ok((value(&text, "uptime ")? / NANOSECONDS / 1e9, trace))
}

fn boots() -> Result<()> {
    // A function that no boot calls: the tracer is attached, nothing is hit. With the
    // self-tests, which emulated hosts leave out by default: as a distribution boots.
    let all = ["--cmdline", "cryptomgr.notests=0"];
    let none = ["-f", "__x64_sys_getpgid", all[0], all[1]];
    let (untraced, _) = boot_cost(&none)?;
    println!("\nboot to init, 10^9 instructions (everything on one CPU, the relay too)");
    println!("  untraced                        {untraced:6.2}");
    let print = |name: &str, cost: f64, trace: &Trace| {
        println!(
            "  {name:<30}  {cost:6.2}  {:5.2} times, {} records, {} lost or overwritten",
            cost / untraced,
            trace.summary.records(),
            trace.summary.lost()
        );
    };
    let (cost, trace) = boot_cost(&[&all[..], &["--overflow", "overwrite"]].concat())?;
    print("vmtrace, all, flight recorder", cost, &trace);
    let (cost, trace) = boot_cost(&all)?;
    print("vmtrace, all, relayed", cost, &trace);
    let (sites, patch) = (trace.summary.sites.patched, trace.summary.patch_ns);
    let pause = trace.summary.pauses.max_ns;
    let (cost, trace) =
        boot_cost(&[&none[..2], &["--cmdline", "cryptomgr.notests=0 ftrace=function"]].concat())?;
    print("guest ftrace=function", cost, &trace);
    println!(
        "\npatching {sites} sites: {:.1} million instructions, {:.0} a site; longest pause {:.1} million",
        patch_millions(patch),
        patch_millions(patch) * 1e6 / f64::from(u32::try_from(sites).unwrap_or(u32::MAX)),
        patch_millions(pause),
    );
    Ok(())
}

fn patch_millions(nanoseconds: u64) -> f64 {
    f64::from(u32::try_from(nanoseconds / 1000).unwrap_or(u32::MAX)) / 1000.0 / NANOSECONDS
}

/// Bytes that are moved in each direction.
const BYTES: usize = 16 << 20;
/// The same for the console, which is slow.
const CONSOLE_BYTES: usize = 16 << 10;
const HELPER: &str = "/bin/helper";
const INITRD: &str = "/initrd";
const SOCKET: &str = "/run/v.sock";
const PORT: &str = "5000";

fn socket_host() -> Result<HostOptions> {
    let me = std::env::current_exe()?;
    let workload = me.with_file_name("vmtrace-guest");
    let line = format!("{WORKLOAD} bytes {PORT} {BYTES} {CONSOLE_BYTES}");
    let initrd = socket_initrd(KERNEL, &line, &workload)?;
    let mut options = options(workload.to_str().context("a path that is no UTF-8")?, &[KERNEL])?;
    options.files.push((INITRD.to_owned(), FileSource::Bytes(initrd)));
    options.files.push((HELPER.to_owned(), FileSource::Path(me.with_file_name("host-helper"))));
    Ok(HostOptions { progress: true, ..options })
}

/// Between a guest and its host through the socket device; beside it QEMU's virtio-serial
/// between that host and this machine, the same host's Unix sockets, and the guest's console.
fn bytes() -> Result<()> {
    let host = SharedHost::new(socket_host);
    let helper = |args: &[&str]| -> Result<String> {
        let done = host.run(Some(HELPER), args, &[], |_| {})?;
        ensure!(done.end.code == Some(0), "{args:?}: {:?}\n{}", done.end, done.err());
        Ok(done.out() + &done.err())
    };
    // Boots the host.
    helper(&["exit", "0"])?;
    println!("bytes a second, {KERNEL}, all emulated; one boot");
    let print = |name: &str, bytes: usize, seconds: f64| {
        let megabytes = f64::from(u32::try_from(bytes).unwrap_or(u32::MAX)) / 1e6;
        println!("  {name:<32} {:8.3} MB/s", megabytes / seconds);
    };
    let count = BYTES.to_string();
    let vsock = format!("{SOCKET}_{PORT}");
    let image = format!("/k/{KERNEL}");
    let cmdline = HostArch::native().guest_cmdline();
    let mut args = vec!["beside", "/init", "boot", &image, "--host", "kvm", "--initrd", INITRD];
    args.extend(["--expect-run", "--vsock", SOCKET, "--timeout", "600", "-o", "/trace"]);
    args.extend(["-f", "__x64_sys_getpgid", "--cmdline", cmdline, "--"]);
    args.extend([HELPER, "bytes", &vsock, &count]);
    let text = helper(&args)?;
    let seconds = |key: &str| Ok::<_, anyhow::Error>(value(&text, key)? / 1e9);
    print("guest to host, virtio-vsock", BYTES, seconds("guest-to-host-nanoseconds ")?);
    print("host to guest, virtio-vsock", BYTES, seconds("host-to-guest-nanoseconds ")?);
    print("guest to host, console (8250)", CONSOLE_BYTES, seconds("console-nanoseconds ")?);

    let text = helper(&["socket-bytes", &count])?;
    print("in the host, Unix socket", BYTES, value(&text, "unix-socket-nanoseconds ")? / 1e9);
    // A job's streams are the port's; starting a job is part of the time.
    let begin = Instant::now();
    let done = host.run(Some(HELPER), &["flood", &count], &[], |_| {})?;
    ensure!(done.stdout.len() == BYTES, "{} bytes", done.stdout.len());
    print("host to QEMU, virtio-serial", BYTES, begin.elapsed().as_secs_f64());
    let begin = Instant::now();
    host.run(Some(HELPER), &["drain"], &[], |job| {
        job.stdin = Stdin::Reader(Box::new(std::io::repeat(0).take(BYTES as u64)));
    })?;
    print("QEMU to host, virtio-serial", BYTES, begin.elapsed().as_secs_f64());
    println!();
    Ok(())
}
