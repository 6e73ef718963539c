//! The table of system calls that each kind of thread may make. docs/security.md describes it.
//!
//! It was made by reading the code of the threads, and by tracing them. [`COMMON`] has the calls
//! that the C library and the standard library may make at any time. A missing call ends the run,
//! so harmless calls are allowed generously.

use libc::c_int;
use syscalls::Sysno;

use super::{Thread, arch};

/// What an argument must be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Test {
    /// This value.
    Is(u64),
    /// Any but this.
    IsNot(u64),
    /// All of these bits are set.
    Has(u64),
    /// None of these bits is set.
    HasNot(u64),
    /// The process itself.
    IsMe,
}

/// A call with its arguments' numbers and what these must be, all of it.
pub(super) type Conditional = (Sysno, &'static [(u8, Test)]);

/// Every thread: memory, locks, clocks, descriptors that are open, its own end.
const COMMON: &[Sysno] = &[
    Sysno::read,
    Sysno::write,
    Sysno::readv,
    Sysno::writev,
    Sysno::pread64,
    Sysno::pwrite64,
    Sysno::preadv,
    Sysno::pwritev,
    Sysno::close,
    Sysno::lseek,
    Sysno::fstat,
    Sysno::fcntl,
    Sysno::dup,
    Sysno::dup3,
    Sysno::ppoll,
    Sysno::pselect6,
    // By what name a C library waits for a lock is its own business.
    Sysno::futex,
    Sysno::futex_wait,
    Sysno::futex_wake,
    Sysno::futex_requeue,
    Sysno::futex_waitv,
    Sysno::membarrier,
    Sysno::munmap,
    Sysno::mremap,
    Sysno::madvise,
    Sysno::mincore,
    Sysno::msync,
    Sysno::brk,
    Sysno::clock_gettime,
    Sysno::clock_getres,
    Sysno::clock_nanosleep,
    Sysno::nanosleep,
    Sysno::gettimeofday,
    Sysno::getrandom,
    Sysno::getcpu,
    Sysno::getpid,
    Sysno::getppid,
    Sysno::gettid,
    Sysno::getuid,
    Sysno::geteuid,
    Sysno::getgid,
    Sysno::getegid,
    Sysno::getrusage,
    Sysno::sched_yield,
    Sysno::sched_getaffinity,
    Sysno::sched_getparam,
    Sysno::sched_getscheduler,
    Sysno::rt_sigprocmask,
    Sysno::rt_sigpending,
    Sysno::rt_sigsuspend,
    Sysno::rt_sigtimedwait,
    Sysno::rt_sigreturn,
    Sysno::sigaltstack,
    Sysno::set_robust_list,
    Sysno::set_tid_address,
    Sysno::rseq,
    Sysno::restart_syscall,
    Sysno::exit,
    Sysno::exit_group,
    Sysno::eventfd2,
    Sysno::timerfd_create,
    Sysno::timerfd_settime,
    Sysno::timerfd_gettime,
    // Handlers of signals tell of them by a socket, in whatever thread.
    Sysno::sendto,
];

const MASK: u64 = 0xffff_ffff;
#[allow(clippy::cast_sign_loss, reason = "small positive constants of C")]
const fn bits(constant: c_int) -> u64 {
    constant as u64 & MASK
}

/// Every thread, with conditions: no memory is ever made executable, nobody else is signalled, and
/// nobody takes the last words away.
const COMMON_IF: &[Conditional] = &[
    (Sysno::mmap, &[(2, Test::HasNot(bits(libc::PROT_EXEC)))]),
    (Sysno::mprotect, &[(2, Test::HasNot(bits(libc::PROT_EXEC)))]),
    (Sysno::rt_sigaction, &[(0, Test::IsNot(bits(libc::SIGSYS)))]),
    (Sysno::tgkill, &[(0, Test::IsMe)]),
    (Sysno::prctl, &[(0, Test::Is(bits(libc::PR_SET_NAME)))]),
    (Sysno::prctl, &[(0, Test::Is(bits(libc::PR_GET_NAME)))]),
    (Sysno::prctl, &[(0, Test::Is(bits(libc::PR_SET_VMA)))]),
];

/// Of any descriptor: that it does not block or is not inherited, how much there is to read, whether
/// it is a terminal (glibc asks by `TCGETS2` from 2.42 on), and how large that is.
const DESCRIPTOR_REQUESTS: &[u64] = &[
    libc::FIONBIO,
    libc::FIONREAD,
    libc::FIOCLEX,
    libc::FIONCLEX,
    libc::TCGETS,
    libc::TCGETS2,
    libc::TIOCGWINSZ,
];

/// To restore a terminal that is raw (glibc does by `TCSETS2` from 2.42 on), if this process has it: any
/// thread may end the process, and who can write to a terminal can upset it anyway.
pub(super) const TERMINAL_REQUESTS: &[u64] = &[libc::TCSETS, libc::TCSETS2, libc::TIOCGPGRP];

/// Sockets that there are.
const SOCKET_IO: &[Sysno] = &[
    Sysno::sendmsg,
    Sysno::recvfrom,
    Sysno::recvmsg,
    Sysno::shutdown,
    Sysno::getsockopt,
    Sysno::setsockopt,
    Sysno::getsockname,
    Sysno::getpeername,
];
/// New ones.
const SOCKETS: &[Sysno] = &[Sysno::connect, Sysno::accept, Sysno::accept4];
const SOCKETS_IF: &[Conditional] = &[
    (Sysno::socket, &[(0, Test::Is(bits(libc::AF_UNIX)))]),
    (Sysno::socketpair, &[(0, Test::Is(bits(libc::AF_UNIX)))]),
];

/// An event loop.
const EVENTS: &[Sysno] =
    &[Sysno::epoll_create1, Sysno::epoll_ctl, Sysno::epoll_pwait, Sysno::epoll_pwait2];

/// Starts threads, never processes. (What `clone3` wants is in memory, where no filter sees it: it
/// is refused, and the C library takes `clone`.)
const THREADS_IF: &[Conditional] = &[(
    Sysno::clone,
    &[(0, Test::Has(bits(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND)))],
)];

/// What the C library, the standard library or a backtrace may look for, and do without.
const LOOKS: &[Sysno] = &[
    Sysno::openat,
    Sysno::statx,
    Sysno::newfstatat,
    Sysno::readlinkat,
    Sysno::faccessat,
    Sysno::faccessat2,
    Sysno::getcwd,
    Sysno::uname,
    Sysno::sysinfo,
    Sysno::prlimit64,
];
/// A socket whose listener is gone.
const REMOVAL: &[Sysno] = &[Sysno::unlinkat];
/// Results are written at the end.
const RENAMING: &[Sysno] = &[
    Sysno::renameat2,
    Sysno::fchmod,
    Sysno::fchmodat,
    Sysno::ftruncate,
    Sysno::fsync,
    Sysno::fdatasync,
    Sysno::getdents64,
];
/// The file of a disk: to flush it, to make holes in it.
const FILE: &[Sysno] = &[Sysno::fdatasync, Sysno::fallocate];
/// Threads that are started later enter the sandbox under the controller's filter.
const ENTERING: &[Sysno] = &[
    Sysno::seccomp,
    Sysno::landlock_restrict_self,
    Sysno::capget,
    Sysno::capset,
    Sysno::setpriority,
];
const ENTERING_IF: &[Conditional] =
    &[(Sysno::prctl, &[(0, Test::Is(bits(libc::PR_SET_NO_NEW_PRIVS)))])];

/// What the process of a share does with files, and as whom.
const SHARED_FILES: &[Sysno] = &[
    Sysno::openat,
    Sysno::statx,
    Sysno::newfstatat,
    Sysno::fstatfs,
    Sysno::statfs,
    Sysno::readlinkat,
    Sysno::faccessat,
    Sysno::faccessat2,
    Sysno::getdents64,
    Sysno::mkdirat,
    Sysno::mknodat,
    Sysno::symlinkat,
    Sysno::linkat,
    Sysno::unlinkat,
    Sysno::renameat2,
    Sysno::fchmod,
    Sysno::fchmodat,
    Sysno::fchmodat2,
    Sysno::fchownat,
    Sysno::ftruncate,
    Sysno::fallocate,
    Sysno::utimensat,
    Sysno::fsync,
    Sysno::fdatasync,
    Sysno::setresuid,
    Sysno::setresgid,
    Sysno::setgroups,
    Sysno::umask,
];

/// The process of a share: it has one thread.
pub(super) fn of_share() -> Calls {
    let any =
        [COMMON, arch::COMMON, SHARED_FILES, SOCKET_IO, arch::REMOVAL, arch::RENAMING].concat();
    let refused = vec![Sysno::clone3];
    let conditional = COMMON_IF.to_vec();
    Calls { any, conditional, requests: DESCRIPTOR_REQUESTS.to_vec(), refused }
}

/// What a kind of thread may do.
#[derive(Debug)]
pub(super) struct Calls {
    /// Whatever the arguments are.
    pub(super) any: Vec<Sysno>,
    /// With these.
    pub(super) conditional: Vec<Conditional>,
    /// Requests of `ioctl`, the most frequent first.
    pub(super) requests: Vec<u64>,
    /// Answered with `ENOSYS`: it is done without.
    pub(super) refused: Vec<Sysno>,
}

/// The row of the table.
pub(super) fn of(thread: Thread) -> Calls {
    let mut any = [COMMON, arch::COMMON].concat();
    let mut conditional = COMMON_IF.to_vec();
    let mut requests = Vec::new();
    let looks = [LOOKS, arch::LOOKS].concat();
    let removal = [REMOVAL, arch::REMOVAL].concat();
    let events = [EVENTS, arch::EVENTS].concat();
    let mut refused = vec![Sysno::clone3];
    match thread {
        Thread::Controller => {
            let renaming = [RENAMING, arch::RENAMING].concat();
            // The relay is started later, and by it others: they have no more than this.
            any.extend([events, SOCKET_IO.into(), SOCKETS.into(), ENTERING.into()].concat());
            any.extend([looks, removal, renaming].concat());
            conditional.extend([THREADS_IF, SOCKETS_IF, ENTERING_IF].concat());
            requests.extend([arch::VCPU_REQUESTS, arch::INTERRUPT_REQUESTS].concat());
            requests.push(arch::KVM_GET_MP_STATE);
        }
        Thread::Vcpu => {
            requests.push(arch::KVM_RUN);
            requests.extend([arch::INTERRUPT_REQUESTS, arch::VCPU_REQUESTS].concat());
            refused.extend([looks, removal].concat());
        }
        Thread::Relay => {
            // It starts the output's and the consumers' threads.
            any.extend([events, SOCKET_IO.into(), ENTERING.into()].concat());
            conditional.extend([THREADS_IF, ENTERING_IF].concat());
            refused.extend([looks, removal].concat());
        }
        Thread::Events => {
            any.extend([events, SOCKET_IO.into(), SOCKETS.into(), removal].concat());
            any.extend([Sysno::statx, Sysno::newfstatat]);
            conditional.extend(SOCKETS_IF);
            requests.extend(arch::INTERRUPT_REQUESTS);
            refused.extend(looks.into_iter().filter(|call| !any.contains(call)));
        }
        Thread::Consumers => {
            any.extend([events, SOCKET_IO.into()].concat());
            refused.extend([looks, removal].concat());
        }
        Thread::Disk => {
            any.extend(events);
            any.extend(FILE);
            requests.extend(arch::INTERRUPT_REQUESTS);
            refused.extend([looks, removal].concat());
        }
        Thread::Watchdog => {
            // In the place of the event loop.
            any.extend(removal);
            any.extend([Sysno::statx, Sysno::newfstatat]);
            refused.extend(looks.into_iter().filter(|call| !any.contains(call)));
        }
        Thread::Output | Thread::Console => {
            any.extend([Sysno::fsync, Sysno::fdatasync]);
            refused.extend([looks, removal].concat());
        }
    }
    requests.extend(DESCRIPTOR_REQUESTS);
    Calls { any, conditional, requests, refused }
}
