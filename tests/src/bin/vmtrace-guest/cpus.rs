//! CPUs of the guest that work, go offline and come online again.

use super::{call_getppid, pin, stress};
use anyhow::{Result, ensure};
use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use vmtrace_tests::arch::KEXEC_FILE_LOAD;

const CPU1: &str = "/sys/devices/system/cpu/cpu1/online";
/// System calls on a CPU that is back.
const CALLS: usize = 200;

/// As many rounds of [`stress::work`] on each of these CPUs at a time.
pub(crate) fn load(cpus: usize, rounds: u64) -> Result<()> {
    std::thread::scope(|scope| {
        let work = |cpu| scope.spawn(move || stress::work(cpu, |done| done < rounds));
        let workers: Vec<_> = (0..cpus).map(work).collect();
        for worker in workers {
            println!("worked {}", worker.join().map_err(|_| anyhow::anyhow!("a panic"))??);
        }
        Ok(())
    })
}

/// The second CPU leaves and comes back so many times, and works in between.
pub(crate) fn hotplug(rounds: usize) -> Result<()> {
    println!("pid {}", std::process::id());
    for _ in 0..rounds {
        pin(0)?;
        fs::write(CPU1, "0")?;
        ensure!(pin(1).is_err(), "the CPU has not left");
        fs::write(CPU1, "1")?;
        pin(1)?;
        (0..CALLS).for_each(|_| call_getppid());
    }
    println!("hotplugged {}", rounds * CALLS);
    Ok(())
}

/// The machine is suspended to idle so many times until somebody types something on the console, and works before and
/// behind that on two CPUs.
pub(crate) fn sleep(times: usize) -> Result<()> {
    const DONE: &str = "/sys/power/suspend_stats/success";
    let done = || -> Result<usize> { Ok(fs::read_to_string(DONE)?.trim().parse()?) };
    let calls = |cpu| -> Result<usize> {
        pin(cpu)?;
        (0..CALLS).for_each(|_| call_getppid());
        Ok(CALLS)
    };
    fs::write("/sys/class/tty/ttyS0/power/wakeup", "enabled")?;
    let mut all = calls(0)? + calls(1)?;
    while done()? < times {
        // What is typed while it goes to sleep keeps it from that (EBUSY).
        let slept = fs::write("/sys/power/state", "freeze");
        let error = slept.as_ref().err().map(|error| error.raw_os_error());
        ensure!(matches!(error, None | Some(Some(libc::EBUSY))), "{slept:?}");
        all += calls(0)? + calls(1)?;
    }
    println!("slept: {all}");
    Ok(())
}

/// Another kernel takes the place of this one, with these parameters beside those that let it be seen; `initrd=FILE` is
/// what boot loaders mean by it.
pub(crate) fn kexec(image: &str, parameters: &[&str]) -> Result<()> {
    const NO_INITRAMFS: usize = 4; // KEXEC_FILE_NO_INITRAMFS (linux/kexec.h)
    const SEEN: &str = "console=ttyS0 earlyprintk=ttyS0 panic=-1";
    let kernel = fs::File::open(image)?;
    let named = parameters.iter().find_map(|it| it.strip_prefix("initrd="));
    let initramfs = named.map(fs::File::open).transpose()?;
    let (initrd, flags) = initramfs.as_ref().map_or((-1, NO_INITRAMFS), |it| (it.as_raw_fd(), 0));
    let cmdline = CString::new([&[SEEN], parameters].concat().join(" "))?;
    let len = cmdline.to_bytes_with_nul().len();
    // SAFETY: open files, and a text of that length.
    let loaded = unsafe {
        let (number, fd) = (KEXEC_FILE_LOAD, kernel.as_raw_fd());
        libc::syscall(number, fd, initrd, len, cmdline.as_ptr(), flags)
    };
    ensure!(loaded == 0, "{image}: {}", std::io::Error::last_os_error());
    // SAFETY: no pointers; does not come back.
    unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC) };
    Err(std::io::Error::last_os_error().into())
}
