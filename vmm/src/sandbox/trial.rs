//! Tries operations in the sandbox, for tests, which run `vmtrace sandbox`.
#![allow(
    unsafe_code,
    reason = "what is tried here has no safe wrappers, being what nobody should do"
)]

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::ptr;
use std::time::{Duration, Instant};

use libc::{c_int, c_long};

use super::{Thread, arch, enter};

/// Something that a thread may try.
#[derive(Clone, Debug)]
pub enum Deed {
    /// To start a program.
    Program,
    /// To make a process.
    Process,
    /// To make a socket of the Internet.
    Internet,
    /// To make memory executable.
    Code,
    /// To be traced.
    Trace,
    /// To make another machine of KVM.
    Machine,
    /// To enter the guest.
    Guest,
    /// To take `SIGSYS` for itself.
    Handler,
    /// To signal another process.
    Signal,
    /// To start a thread.
    Thread,
    /// To open a file for reading.
    Read(PathBuf),
    /// To make a file, or what there is empty.
    Write(PathBuf),
    /// To remove a file.
    Remove(PathBuf),
    /// To ask whose a terminal is, and to change its settings.
    Terminal,
    /// To panic, which prints a backtrace where that is wanted.
    Panic,
    /// What everybody does: memory, maps, locks, clocks, words.
    Work,
}

/// A thread of this kind tries it.
///
/// # Errors
/// That of the system. What the filter forbids does not come back.
pub fn attempt(thread: Thread, deed: Deed) -> io::Result<()> {
    let trial = std::thread::Builder::new().name(thread.name().to_owned()).spawn(move || {
        enter(thread);
        deed.attempt()
    })?;
    trial.join().map_err(|_| io::Error::other("the thread panicked"))?
}

fn done(result: impl Into<c_long>) -> io::Result<()> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// No descriptor.
const NONE: c_int = -1;
/// `KVM_CREATE_VM`
const CREATE_MACHINE: u64 = 0xae01;

impl Deed {
    fn attempt(self) -> io::Result<()> {
        match self {
            Self::Program => {
                let (program, nothing) = (c"/bin/true", [ptr::null()]);
                // SAFETY: a path, and two lists that end at once.
                done(unsafe { libc::execve(program.as_ptr(), nothing.as_ptr(), nothing.as_ptr()) })
            }
            // SAFETY: the child, should there be one, ends at once.
            Self::Process => match unsafe { libc::fork() } {
                // SAFETY: no precondition.
                0 => unsafe { libc::_exit(0) },
                result => done(result),
            },
            // SAFETY: takes no pointers.
            Self::Internet => done(unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) }),
            Self::Code => {
                let (access, kind) =
                    (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                // SAFETY: new memory, which nobody uses.
                let new = unsafe { libc::mmap(ptr::null_mut(), 4096, access, kind, NONE, 0) };
                done(if new == libc::MAP_FAILED { -1 } else { 0 })
            }
            // SAFETY: lets the parent trace this process, which is about to end.
            Self::Trace => done(unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) }),
            Self::Machine => request(CREATE_MACHINE),
            Self::Guest => request(arch::KVM_RUN),
            Self::Handler => {
                // SAFETY: what signals do by default is no handler.
                let old = unsafe { libc::signal(libc::SIGSYS, libc::SIG_DFL) };
                done(if old == libc::SIG_ERR { -1 } else { 0 })
            }
            // SAFETY: takes no pointers; signal 0 does nothing.
            Self::Signal => done(unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) }),
            Self::Thread => {
                let joined = std::thread::Builder::new().spawn(|| ())?.join();
                joined.map_err(|_| io::Error::other("the thread is gone"))
            }
            Self::Read(path) => File::open(path).map(drop),
            Self::Write(path) => File::create(path).map(drop),
            Self::Remove(path) => fs::remove_file(path),
            Self::Terminal => request(libc::TIOCGPGRP).and(request(libc::TCSETS)),
            Self::Panic => panic!("as it was told to"),
            Self::Work => work(),
        }
    }
}

fn request(request: u64) -> io::Result<()> {
    // SAFETY: there is no descriptor, and the argument is no pointer.
    done(unsafe { libc::ioctl(NONE, request, 0) })
}

fn work() -> io::Result<()> {
    let mut map = HashMap::new();
    for size in (0..24).map(|power| 1_usize << power) {
        let mut bytes = vec![1_u8; size];
        bytes.extend_from_within(..);
        map.insert(size, bytes);
    }
    std::thread::sleep(Duration::from_millis(1));
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let waited = receiver.recv_timeout(Duration::from_millis(1));
    drop(sender);
    let whole = waited.is_err() && map.iter().all(|(size, bytes)| bytes.len() == 2 * size);
    drop(map);
    if whole { Ok(()) } else { Err(io::Error::other("memory is not what was written to it")) }
}

/// How long a request to enter the guest takes that fails at once for want of a descriptor, from a
/// thread of this kind, or one that has entered nothing; the mean of so many.
///
/// # Errors
/// When there is no thread.
pub fn cost(thread: Option<Thread>, calls: u32) -> io::Result<Duration> {
    let measured = std::thread::Builder::new().spawn(move || {
        thread.into_iter().for_each(enter);
        let begin = Instant::now();
        for _ in 0..calls {
            let _ = request(arch::KVM_RUN);
        }
        begin.elapsed() / calls
    })?;
    measured.join().map_err(|_| io::Error::other("the thread panicked"))
}
