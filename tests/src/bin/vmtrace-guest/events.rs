//! The guest's own trace of events that vmtrace traces as well.

use super::{TRACING, load, set};
use anyhow::{Context, Result, ensure};
use nix::sys::termios::tcdrain;
use std::fs;
use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;
use vmtrace_tests::events::lines_to_tell;

/// A signal that nobody takes marks where a round begins or ends. The kernel tells of it with
/// interrupts off: no interrupt comes between one side's look at it and the other's.
fn signal(number: libc::c_int) -> Result<()> {
    // SAFETY: takes no pointers; the signal is ignored.
    let result = unsafe { libc::kill(libc::getpid(), number) };
    ensure!(result == 0, "kill: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Names of the task that mark where the work without the guest's own events begins and ends.
fn mark(name: &std::ffi::CStr) -> Result<()> {
    // SAFETY: a string with its end.
    let result = unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    ensure!(result == 0, "prctl: {}", std::io::Error::last_os_error());
    Ok(())
}

extern "C" fn ignore(_: libc::c_int) {}

/// Forks, programs, signals, pipes and sleeps.
fn work() -> Result<()> {
    let handler: extern "C" fn(libc::c_int) = ignore;
    // SAFETY: a handler that does nothing.
    unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
    let mut child = Command::new("/proc/self/exe");
    let status = child.arg("uptime").stdout(Stdio::null()).status().context("no child")?;
    ensure!(status.success(), "{status}");
    // SAFETY: takes no pointers.
    unsafe { libc::raise(libc::SIGUSR1) };
    let (mut reader, mut writer) = std::io::pipe()?;
    let (tell_id, its_id) = std::sync::mpsc::channel();
    let other = thread::spawn(move || {
        // SAFETY: no preconditions.
        let _ = tell_id.send(unsafe { libc::gettid() });
        let mut bytes = [0; 4];
        reader.read_exact(&mut bytes).map(|()| bytes)
    });
    // It sleeps when it is woken, on another CPU than before.
    let its_id = its_id.recv()?;
    thread::sleep(Duration::from_millis(20));
    super::pin_task(its_id, 0)?;
    writer.write_all(b"word")?;
    ensure!(other.join().is_ok_and(|read| read.is_ok_and(|bytes| bytes == *b"word")), "no word");
    Ok(())
}

/// Line after line, each sent before the next one: a UART that is never done keeps a CPU in its
/// interrupt, until the kernel's watchdog cries "soft lockup" (and into the lines).
pub(super) fn tell(lines: &[String]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for line in lines {
        writeln!(out, "{line}")?;
        out.flush()?;
        tcdrain(&out)?;
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Switches the guest's own events (`SYSTEM/NAME`) on and off again, `rounds` times, with work
/// between; prints what it has seen in the last round, then works alone.
pub(super) fn events(rounds: usize, names: &[&str]) -> Result<()> {
    super::pin(1)?;
    set("buffer_size_kb", "8192")?;
    for round in 0..rounds {
        set("trace", "")?;
        for name in names {
            set(&format!("events/{name}/enable"), "1")?;
        }
        signal(libc::SIGURG)?;
        work()?;
        signal(libc::SIGWINCH)?;
        if round + 1 < rounds {
            for name in names {
                set(&format!("events/{name}/enable"), "0")?;
            }
        }
    }
    for name in names.iter().rev() {
        set(&format!("events/{name}/enable"), "0")?;
    }
    mark(c"alone-begin")?;
    work()?;
    mark(c"alone-end")?;
    let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
    let lines = trace.lines().filter(|line| !line.starts_with('#'));
    let tells = |line: &str, signal| line.contains(&format!(" signal_generate: sig={signal} "));
    let mut inside = false;
    let mut told = Vec::new();
    for line in lines {
        inside |= tells(line, libc::SIGURG);
        // The console is slow, and other CPUs are not compared.
        if inside && line.contains(" [001] ") {
            told.push(line.trim());
        }
        if tells(line, libc::SIGWINCH) {
            break;
        }
    }
    tell_trace(&told)
}

/// Tells lines of its trace.
fn tell_trace(lines: &[&str]) -> Result<()> {
    // Its messages stay in its log.
    const LEVELS: &str = "/proc/sys/kernel/printk";
    let levels = fs::read_to_string(LEVELS)?;
    fs::write(LEVELS, "1")?;
    tell(&lines_to_tell(lines))?;
    fs::write(LEVELS, levels)?;
    Ok(())
}

/// A file of so many pages in a loop device: a page is written past the page cache, flushed, and read.
fn block(file: &str) -> Result<()> {
    /// `LOOP_SET_FD` and `LOOP_CLR_FD` (include/uapi/linux/loop.h).
    const SET: libc::c_ulong = 0x4c00;
    const CLEAR: libc::c_ulong = 0x4c01;
    /// As O_DIRECT wants it.
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    fs::write(file, vec![0; 1 << 20])?;
    let open = |path: &str, flags| {
        fs::OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
    };
    let (backing, device) = (open(file, 0)?, open("/dev/loop0", libc::O_DIRECT)?);
    let control = |request: libc::c_ulong, argument: libc::c_int| {
        // SAFETY: the requests take a number.
        let failed = unsafe { libc::ioctl(device.as_raw_fd(), request as _, argument) };
        ensure!(failed == 0, "loop0: {}", std::io::Error::last_os_error());
        Ok(())
    };
    control(SET, backing.as_raw_fd())?;
    let mut page = Page([7; 4096]);
    device.write_all_at(&page.0, 8192)?;
    device.sync_data()?;
    device.read_exact_at(&mut page.0, 4096)?;
    control(CLEAR, 0)?;
    drop(device);
    Ok(fs::remove_file(file)?)
}

/// Brings the loopback device up.
fn loopback() -> Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: any bytes are one, and zeroes have no name and no flags.
    let mut request: libc::ifreq = unsafe { core::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request.ifr_ifru.ifru_flags = libc::IFF_UP.try_into()?;
    // SAFETY: a request with a name that ends.
    let failed =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    ensure!(failed == 0, "lo: {}", std::io::Error::last_os_error());
    Ok(())
}

/// A packet that arrives, and one to a port where nobody is.
fn packets() -> Result<()> {
    let (there, here) = (UdpSocket::bind("127.0.0.1:4711")?, UdpSocket::bind("127.0.0.1:0")?);
    here.send_to(b"packet", there.local_addr()?)?;
    let mut bytes = [0; 16];
    ensure!(there.recv(&mut bytes)? == 6, "no packet");
    here.send_to(b"nobody", "127.0.0.1:9")?;
    Ok(())
}

/// Pages that are touched for the first time, and a file that is looked at.
fn memory() -> Result<()> {
    const LENGTH: usize = 8 * 4096;
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, wherever there is room.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), LENGTH, access, flags, -1, 0) };
    ensure!(start != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    // The first by the kernel itself.
    let file = fs::File::open("/proc/self/stat")?;
    // SAFETY: the first page of the mapping.
    let read = unsafe { libc::read(file.as_raw_fd(), start, 4096) };
    ensure!(read > 0, "stat: {}", std::io::Error::last_os_error());
    for offset in (0..LENGTH).step_by(4096) {
        // SAFETY: in the mapping.
        unsafe { start.cast::<u8>().add(offset).write_volatile(1) };
    }
    // SAFETY: the mapping, which nobody uses any more.
    unsafe { libc::munmap(start, LENGTH) };
    fs::read("/proc/self/stat")?;
    Ok(())
}

/// Events of modules, disks and packets between one pair of signals, and with those of memory between another;
/// events are `SYSTEM/NAME`, with commas. Prints what the guest's own trace has of them.
pub(super) fn more(module: &str, first: &str, second: &str) -> Result<()> {
    super::pin(0)?;
    loopback()?;
    set("buffer_size_kb", "8192")?;
    for number in [libc::SIGUSR2, libc::SIGTTIN] {
        // SAFETY: no handler.
        unsafe { libc::signal(number, libc::SIG_IGN) };
    }
    set("trace", "")?;
    let events = |names: &str, on: &str| {
        names.split(',').try_for_each(|name| set(&format!("events/{name}/enable"), on))
    };
    events(first, "1")?;
    signal(libc::SIGURG)?;
    load(module)?;
    block("/blocks")?;
    super::modules::unload(module)?;
    packets()?;
    signal(libc::SIGWINCH)?;
    events(second, "1")?;
    signal(libc::SIGUSR2)?;
    memory()?;
    packets()?;
    signal(libc::SIGTTIN)?;
    events(second, "0")?;
    events(first, "0")?;
    let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
    let lines: Vec<&str> = trace.lines().filter(|line| !line.starts_with('#')).collect();
    println!("pid {}", std::process::id());
    tell_trace(&lines)
}
