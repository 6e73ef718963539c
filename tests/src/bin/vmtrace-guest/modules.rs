//! A module that is loaded, used and unloaded.

use super::{TRACING, load, mark, set, tell_ftrace};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fs;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::ptr::null;

/// Of the module `dummy`: called once for each look at its device's counters.
const FUNCTION: &str = "dummy_get_stats64";

/// Loads the module `dummy` from a file, has its device's counters read so often between two calls of
/// getpgid, and unloads it; all that so often. With `beside` the guest's own function tracer is on
/// the same function, from before the module is loaded, and in every other round until after it is
/// gone.
pub(super) fn modules(file: &str, rounds: u32, reads: usize, beside: bool) -> Result<()> {
    println!("pid {}", std::process::id());
    if beside {
        set("current_tracer", "nop")?;
        set("set_ftrace_pid", &std::process::id().to_string())?;
    }
    for round in 0..rounds {
        if beside {
            set("set_ftrace_filter", &format!("{FUNCTION}:mod:dummy\n"))?;
            set("current_tracer", "function")?;
        }
        load(file)?;
        if beside {
            set("trace", "")?;
            set("tracing_on", "1")?;
        }
        mark();
        for _ in 0..reads {
            let counters = fs::read_to_string("/proc/net/dev")?;
            ensure!(counters.contains("dummy0"), "no dummy0: {counters}");
        }
        mark();
        if beside {
            set("tracing_on", "0")?;
            let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
            let seen = trace.lines().filter(|line| line.contains(FUNCTION)).count();
            println!("guest-saw {seen}");
            if round % 2 == 0 {
                set("current_tracer", "nop")?;
            }
        }
        unload(file)?;
        if beside {
            set("current_tracer", "nop")?;
        }
    }
    tell_ftrace()
}

/// Loads modules from files, has them come by tracepoints so often (by mounting what is no file system
/// from /dev/ram0, and by bridges that come and go) between two calls of getpgid, and unloads them; all
/// that so often. From the second round on the guest's own trace has the events (SYSTEM/NAME), too: in
/// every other round until the modules are gone.
pub(super) fn points(rounds: u32, uses: usize, events: &[&str], files: &[&str]) -> Result<()> {
    println!("pid {}", std::process::id());
    set("tracing_on", "1")?;
    for round in 0..rounds {
        for file in files {
            load(file)?;
        }
        let switch = |state: &str| {
            let mut each = events.iter();
            each.try_for_each(|event| set(&format!("events/{event}/enable"), state))
        };
        if round > 0 {
            set("trace", "")?;
            switch("1")?;
        }
        mark();
        for _ in 0..uses {
            mount_nothing("/dev/ram0", c"xfs")?;
            bridge()?;
        }
        mark();
        if round > 0 {
            let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
            for event in events {
                let name = event.rsplit('/').next().unwrap_or(event);
                let seen = trace.lines().filter(|line| line.contains(&format!(" {name}: ")));
                println!("guest-saw-{name} {}", seen.count());
            }
            if round % 2 == 1 {
                switch("0")?;
            }
        }
        for file in files.iter().rev() {
            unload(file)?;
        }
    }
    tell_ftrace()
}

/// Loads modules from files and unloads them, so often and until the last one was at so many places; every
/// second time another one is loaded before and unloaded after them, so that they lie elsewhere. Says at which
/// page the last one lies. Where the kernel puts modules is its own affair: it has four times the rounds.
pub(super) fn elsewhere((rounds, places): (u32, usize), other: &str, files: &[&str]) -> Result<()> {
    let last = name(files.last().context("no module")?)?;
    let mut pages = BTreeSet::new();
    for round in 0..4 * rounds {
        if round >= rounds && pages.len() >= places {
            break;
        }
        let all: Vec<&str> = match round % 2 {
            0 => files.to_vec(),
            _ => [&[other], files].concat(),
        };
        for file in &all {
            load(file)?;
        }
        let modules = fs::read_to_string("/proc/modules")?;
        let line = modules.lines().find(|line| line.split(' ').next() == Some(&last));
        let address = line.and_then(|line| line.split(' ').find_map(|it| it.strip_prefix("0x")));
        let address = u64::from_str_radix(address.context("it has no address")?, 16)?;
        ensure!(address != 0, "its address is not told");
        println!("page {}", address >> 12 & 0xff_ffff);
        pages.insert(address);
        for file in all.iter().rev() {
            unload(file)?;
        }
    }
    tell_ftrace()
}

/// The name of the module in a file.
fn name(file: &str) -> Result<String> {
    let stem = Path::new(file).file_stem().and_then(|stem| stem.to_str());
    Ok(stem.context("no name")?.replace('-', "_"))
}

/// Unloads the module that was loaded from a file.
pub(super) fn unload(file: &str) -> Result<()> {
    let name = CString::new(name(file)?)?;
    // SAFETY: a string and flags.
    let failed = unsafe { libc::syscall(libc::SYS_delete_module, name.as_ptr(), 0) };
    ensure!(failed == 0, "cannot unload {file}: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Mounts what is no such file system, which fails.
fn mount_nothing(device: &str, kind: &CStr) -> Result<()> {
    let device = CString::new(device)?;
    let place = c"/tmp".as_ptr();
    // SAFETY: strings, flags and no data.
    let failed =
        unsafe { libc::mount(device.as_ptr(), place, kind.as_ptr(), libc::MS_RDONLY, null()) };
    let error = std::io::Error::last_os_error();
    ensure!(failed != 0, "mounted");
    ensure!(error.raw_os_error() == Some(libc::EINVAL), "not mounted: {error}");
    Ok(())
}

/// A bridge comes and goes.
fn bridge() -> Result<()> {
    // include/uapi/linux/sockios.h
    const ADD: libc::Ioctl = 0x89a0;
    const DELETE: libc::Ioctl = 0x89a1;
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    for request in [ADD, DELETE] {
        // SAFETY: a descriptor, and a name that these requests read.
        let failed = unsafe { libc::ioctl(socket.as_raw_fd(), request, c"vbr0".as_ptr()) };
        ensure!(failed == 0, "no bridge: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

/// As [`modules`], while all CPUs fork and use files.
pub(super) fn busy(file: &str, rounds: u32, reads: usize) -> Result<()> {
    const FOR_EVER: &str = "1000000000";
    let mut load = Command::new(std::env::current_exe()?);
    let mut load = load.args(["load", "2", FOR_EVER]).spawn()?;
    let done = modules(file, rounds, reads, false);
    load.kill()?;
    load.wait()?;
    done
}
