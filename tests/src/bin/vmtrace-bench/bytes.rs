//! Bytes a second between guest and host.

use crate::{KERNEL, value};
use anyhow::{Context, Result, ensure};
use std::io::Read;
use std::time::Instant;
use vmtrace::emulated::{FileSource, HostArch, HostOptions, Stdin};
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{WORKLOAD, options, socket_initrd};

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
    let mut options = options(workload.to_str().context("a path that is not UTF-8")?, &[KERNEL])?;
    options.files.push((INITRD.to_owned(), FileSource::Bytes(initrd)));
    options.files.push((HELPER.to_owned(), FileSource::Path(me.with_file_name("host-helper"))));
    Ok(HostOptions { progress: true, ..options })
}

/// Between a guest and its host through the socket device; beside it QEMU's virtio-serial
/// between that host and this machine, the same host's Unix sockets, and the guest's console.
pub(crate) fn run() -> Result<()> {
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
