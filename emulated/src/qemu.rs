//! QEMU as a child process. It never outlives this process, and no file of it remains.

use std::collections::VecDeque;
use std::env;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::prctl::{set_no_new_privs, set_pdeathsig};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getppid};

use super::arch::Machine;
use super::error::{Context, HostError, LogTail};

/// The oldest QEMU to try.
pub(super) const MINIMUM: &str = "8.2";

const LOG_MAX: usize = 64 << 10;
const TAIL_LINES: usize = 24;
const DEATHS: [&str; 4] = ["Kernel panic", "BUG: ", "Oops: ", "Unable to "];

/// A QEMU that can be used.
#[derive(Debug, Clone)]
pub struct Qemu {
    /// The program.
    pub program: PathBuf,
    /// What it says its version is.
    pub version: String,
}

impl Qemu {
    /// Finds the one for `machine`: `VMTRACE_QEMU`, or by name in `PATH`.
    pub(super) fn find(machine: &Machine) -> Result<Self, HostError> {
        let name = env::var_os("VMTRACE_QEMU")
            .filter(|v| !v.is_empty())
            .map_or(machine.qemu.into(), PathBuf::from);
        let shown = name.display().to_string();
        let output = match Command::new(&name).arg("--version").stdin(Stdio::null()).output() {
            Ok(output) => output,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(HostError::NoQemu {
                    program: shown,
                    package: machine.qemu_package,
                    minimum: MINIMUM,
                });
            }
            Err(e) => return Err(HostError::BadQemu { program: shown, reason: e.to_string() }),
        };
        let text = String::from_utf8_lossy(&output.stdout);
        let Some(version) = parse_version(&text) else {
            let reason = String::from_utf8_lossy(&output.stderr);
            let reason =
                reason.lines().next().unwrap_or("it does not report its version").to_owned();
            return Err(HostError::BadQemu { program: shown, reason });
        };
        if numbers(&version) < numbers(MINIMUM) {
            return Err(HostError::OldQemu { program: shown, version, minimum: MINIMUM });
        }
        Ok(Self { program: name, version })
    }

    /// Whether it can emulate at all; some are built for KVM alone.
    pub(super) fn has_tcg(&self) -> bool {
        let output =
            Command::new(&self.program).args(["-accel", "help"]).stdin(Stdio::null()).output();
        output.is_ok_and(|o| {
            String::from_utf8_lossy(&o.stdout).lines().any(|line| line.trim() == "tcg")
        })
    }
}

/// `QEMU emulator version 10.0.2 (Debian ...)`.
fn parse_version(text: &str) -> Option<String> {
    let version = text.split_once("version ")?.1;
    let end = version.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(version.len());
    version.get(..end).filter(|v| !v.is_empty()).map(str::to_owned)
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|n| n.parse().ok()).collect()
}

/// A running QEMU. Dropping it kills it and waits for its end.
#[derive(Debug)]
pub(super) struct Process {
    child: Arc<Mutex<Option<Child>>>,
    keeper: Option<thread::JoinHandle<()>>,
}

impl Process {
    /// Starts `command`; `inherit` are the descriptors named in its arguments. `on_exit` is called when it ended.
    pub(super) fn start(
        mut command: Command,
        inherit: Vec<OwnedFd>,
        on_exit: impl FnOnce(Option<ExitStatus>) + Send + 'static,
    ) -> Result<Self, HostError> {
        isolate(&mut command, &inherit);
        let child = Arc::new(Mutex::new(None));
        let (started, start) = mpsc::channel();
        let slot = child.clone();
        // The kernel takes the end of the *thread* that forked for the parent's death: keep it alive.
        let keeper = thread::Builder::new().name("qemu-keeper".to_owned()).spawn(move || {
            match command.spawn() {
                Ok(child) => {
                    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX));
                    *lock(&slot) = Some(child);
                    drop(inherit);
                    let _ = started.send(Ok(()));
                    // Not reaped before the slot is locked: nobody can signal a pid that is somebody else's by now.
                    while waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)
                        == Err(nix::Error::EINTR)
                    {}
                    let status = lock(&slot).take().and_then(|mut child| child.wait().ok());
                    on_exit(status);
                }
                Err(e) => drop(started.send(Err(e))),
            }
        });
        let keeper = keeper.context("start a thread")?;
        let process = Self { child, keeper: Some(keeper) };
        start.recv().map_err(io::Error::other).and_then(|r| r).context("start QEMU")?;
        Ok(process)
    }

    pub(super) fn kill(&self) {
        if let Some(child) = lock(&self.child).as_mut() {
            let _ = child.kill();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

/// Own process group (a terminal's Ctrl-C is ours to pass on), killed with us, given descriptors kept open.
#[allow(unsafe_code)]
fn isolate(command: &mut Command, inherit: &[OwnedFd]) {
    let fds: Vec<_> = inherit.iter().map(AsRawFd::as_raw_fd).collect();
    let parent = Pid::this();
    command.process_group(0);
    let prepare = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        // It needs nothing that it does not have, and its memory is the guest's: none of it on disk.
        set_no_new_privs()?;
        setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
        if getppid() != parent {
            // We are gone already; the signal was not armed in time.
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        for &fd in &fds {
            // SAFETY: the descriptors are open: `Process::start` holds them until after the fork.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls and reads what it owns; it neither
    // allocates nor takes locks.
    unsafe { command.pre_exec(prepare) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The last bytes of a log, filled by a thread of its own.
#[derive(Debug, Clone, Default)]
pub(super) struct Log(Arc<Mutex<VecDeque<u8>>>);

impl Log {
    /// Copies `from` until it ends; to standard error as well if `show`.
    pub(super) fn follow(
        &self,
        mut from: impl Read + Send + 'static,
        show: bool,
    ) -> Result<(), HostError> {
        let log = self.clone();
        let copy = move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                let bytes = buffer.get(..n).unwrap_or_default();
                log.push(bytes);
                if show {
                    let _ = io::Write::write_all(&mut io::stderr(), bytes);
                }
            }
        };
        thread::Builder::new()
            .name("host-log".to_owned())
            .spawn(copy)
            .map(drop)
            .context("start a thread")
    }

    fn push(&self, bytes: &[u8]) {
        let mut log = lock(&self.0);
        log.extend(bytes);
        let excess = log.len().saturating_sub(LOG_MAX);
        log.drain(..excess);
    }

    /// The last lines, without what a terminal would act on.
    pub(super) fn tail(&self) -> LogTail {
        let bytes: Vec<u8> = lock(&self.0).iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let clean =
            |line: &str| line.trim_end().chars().filter(|c| !c.is_control()).collect::<String>();
        let lines: Vec<String> = text.lines().map(clean).filter(|line| !line.is_empty()).collect();
        // What a dying kernel says first matters more than its last words.
        let start = lines
            .iter()
            .rposition(|line| DEATHS.iter().any(|death| line.contains(death)))
            .map_or(lines.len().saturating_sub(TAIL_LINES), |n| n.saturating_sub(TAIL_LINES / 2));
        LogTail(lines.into_iter().skip(start).take(TAIL_LINES).collect())
    }
}

/// How a process ended, in words.
pub(super) fn describe(status: Option<ExitStatus>) -> String {
    status.map_or_else(|| "QEMU ended".to_owned(), |status| format!("QEMU: {status}"))
}

/// Whether it was a fault of its own: an assertion that failed, or a processor's exception.
pub(super) fn crashed(status: Option<ExitStatus>) -> bool {
    const FAULTS: [Signal; 5] =
        [Signal::SIGABRT, Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGILL, Signal::SIGFPE];
    let signal = status.and_then(|status| status.signal());
    signal.is_some_and(|signal| FAULTS.iter().any(|&fault| fault as i32 == signal))
}

/// `/proc/self/fd/N`: a name that QEMU can open for a file that has none.
pub(super) fn fd_path(fd: &impl AsRawFd) -> PathBuf {
    Path::new("/proc/self/fd").join(fd.as_raw_fd().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn versions() {
        let version =
            parse_version("QEMU emulator version 10.0.2 (Debian 1:10.0.2)\nCopyright").unwrap();
        assert_eq!(version, "10.0.2");
        assert!(numbers(&version) > numbers(MINIMUM));
        assert!(numbers("7.2.19") < numbers(MINIMUM));
        assert!(numbers("8.2.0") > numbers(MINIMUM));
        assert_eq!(parse_version("something else"), None);
    }

    #[test]
    fn the_log_keeps_its_end() {
        let log = Log::default();
        for n in 0..20_000 {
            log.push(format!("line {n}\x1b[2J\r\n").as_bytes());
        }
        let tail = log.tail();
        assert_eq!((tail.0.len(), tail.0[TAIL_LINES - 1].as_str()), (TAIL_LINES, "line 19999[2J"));
        assert!(log.0.lock().unwrap().len() <= LOG_MAX);
        log.push(b"Kernel panic - why\n");
        (0..100).for_each(|_| log.push(b"stack\n"));
        assert!(log.tail().0.contains(&"Kernel panic - why".to_owned()));
    }

    #[test]
    fn crashes_are_told_from_other_ends() {
        for (signal, crash) in
            [(libc::SIGABRT, true), (libc::SIGSEGV, true), (libc::SIGKILL, false)]
        {
            assert_eq!(crashed(Some(ExitStatus::from_raw(signal))), crash, "{signal}");
        }
        assert!(!crashed(Some(ExitStatus::from_raw(libc::SIGABRT << 8))), "a status, no signal");
        assert!(!crashed(None));
    }

    #[test]
    fn dropping_kills() {
        let (tx, rx) = mpsc::channel();
        let mut command = Command::new("sleep");
        command.arg("600");
        let start = Instant::now();
        // Started by a thread that ends at once: that must not kill it.
        let process = thread::spawn(|| {
            Process::start(command, Vec::new(), move |s| tx.send(s).unwrap()).unwrap()
        });
        let process = process.join().unwrap();
        assert!(rx.recv_timeout(Duration::from_millis(100)).is_err());
        drop(process);
        assert!(!rx.recv().unwrap().unwrap().success());
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}
