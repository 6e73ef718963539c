//! Signals that end or stop this process at once: their handlers restore the user's terminal first.
//!
//! Signals that end a run in order (SIGINT, SIGTERM, SIGHUP) have other handlers. SIGSEGV keeps the
//! handler of the standard library, which runs on a separate stack: it turns a stack overflow into
//! SIGABRT.

use std::ffi::{c_int, c_void};
use std::sync::Once;

use libc::siginfo_t;
use signal_hook::low_level::{emulate_default_handler, exit};
use vmm_sys_util::signal::register_signal_handler;
use vmtrace_system::terminal;

/// All other signals that end the process by default and can be caught, except SIGPIPE, which
/// programs in Rust ignore.
const ENDS: [c_int; 18] = [
    libc::SIGABRT,
    libc::SIGALRM,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGIO,
    libc::SIGPROF,
    libc::SIGPWR,
    libc::SIGQUIT,
    libc::SIGSTKFLT,
    libc::SIGSYS,
    libc::SIGTRAP,
    libc::SIGTSTP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGVTALRM,
    libc::SIGXCPU,
    libc::SIGXFSZ,
];

/// Handles them from now on, and all real-time signals, except those that have a handler already.
pub(super) fn give_the_terminal_back(taken: &[c_int]) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let all = ENDS.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX());
        for signal in all.filter(|signal| !taken.contains(signal)) {
            if let Err(error) = register_signal_handler(signal, handler) {
                log::warn!("signal {signal} is not handled: {error}");
            }
        }
    });
}

/// Only does what may be done in a signal handler.
extern "C" fn handler(signal: c_int, _: *mut siginfo_t, _: *mut c_void) {
    if signal == libc::SIGTSTP {
        terminal::lend();
        // Once this goes on, SIGCONT has the terminal made raw again.
        let _ = emulate_default_handler(signal);
        return;
    }
    terminal::restore();
    match signal {
        // It takes this one for one that is ignored by default.
        libc::SIGIO => {}
        // Returns only for signals that it does not know.
        signal => drop(emulate_default_handler(signal)),
    }
    exit(128 + signal);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::interactive;
    use nix::pty::openpty;
    use nix::sys::signal::{Signal, kill};
    use nix::sys::termios::tcgetattr;
    use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
    use nix::unistd::Pid;
    use std::os::fd::OwnedFd;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    const PATIENCE: Duration = Duration::from_secs(60);
    /// Has this test's program be the one that is signalled.
    const VARIABLE: &str = "VMTRACE_TEST_RAW_TERMINAL";

    #[test]
    #[allow(clippy::exit, reason = "what would be an end of the test is none of its parent's")]
    fn a_process_with_a_raw_terminal() {
        if std::env::var_os(VARIABLE).is_none() {
            return;
        }
        let window = interactive::Window::new().unwrap();
        let events = crate::events::EventLoop::start(crate::sandbox::Thread::Events).unwrap();
        let follower = interactive::follow(&window).unwrap();
        events.handle().add(Box::new(follower)).unwrap().keep();
        // Last: a raw terminal is what the parent waits for.
        let _terminal = interactive::take_terminal(&[]).unwrap();
        std::thread::sleep(2 * PATIENCE);
    }

    struct Raw {
        child: Child,
        terminal: OwnedFd,
        _user: OwnedFd,
    }

    impl Raw {
        fn start() -> Self {
            let pty = openpty(None, None).unwrap();
            let name = "cli::boot::interactive::ends::tests::a_process_with_a_raw_terminal";
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", name, "--nocapture"]).env(VARIABLE, "1");
            command.stdin(Stdio::from(pty.slave.try_clone().unwrap()));
            let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let this = Self { child, terminal: pty.slave, _user: pty.master };
            this.wait_for_raw();
            this
        }

        fn wait_for_raw(&self) {
            let end = Instant::now() + PATIENCE;
            while !self.is_raw() {
                assert!(Instant::now() < end, "the terminal is not raw");
                std::thread::sleep(Duration::from_millis(5));
            }
        }

        fn is_raw(&self) -> bool {
            let settings: libc::termios = tcgetattr(&self.terminal).unwrap().into();
            let raw = settings.c_lflag & (libc::ECHO | libc::ISIG | libc::ICANON) == 0;
            assert_eq!(raw, settings.c_oflag & libc::OPOST == 0, "half raw");
            raw
        }

        fn pid(&self) -> Pid {
            Pid::from_raw(self.child.id().try_into().unwrap())
        }

        /// What becomes of it.
        fn signal(&self, signal: c_int) -> WaitStatus {
            let id = self.child.id().to_string();
            let sent = Command::new("kill").args(["-s", &signal.to_string(), &id]).status();
            assert!(sent.unwrap().success());
            let end = Instant::now() + PATIENCE;
            let flags = WaitPidFlag::WUNTRACED | WaitPidFlag::WNOHANG;
            loop {
                match waitpid(self.pid(), Some(flags)).unwrap() {
                    WaitStatus::StillAlive => {}
                    status => return status,
                }
                assert!(Instant::now() < end, "signal {signal} is ignored");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    impl Drop for Raw {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[test]
    fn a_signal_that_ends_the_process_gives_the_terminal_back() {
        for signal in ENDS.into_iter().chain([libc::SIGRTMIN(), libc::SIGRTMAX()]) {
            if signal == libc::SIGTSTP {
                continue;
            }
            let raw = Raw::start();
            let status = raw.signal(signal);
            let ended = match status {
                // As it would have without a handler, where that is possible.
                WaitStatus::Signaled(_, by, _) => by as c_int == signal,
                WaitStatus::Exited(_, code) => code == 128 + signal,
                _ => false,
            };
            assert!(ended, "signal {signal}: {status:?}");
            assert!(!raw.is_raw(), "signal {signal}");
        }
    }

    #[test]
    fn a_process_that_is_stopped_gives_the_terminal_back_and_takes_it_again() {
        let raw = Raw::start();
        for _ in 0..2 {
            let status = raw.signal(libc::SIGTSTP);
            assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
            assert!(!raw.is_raw());
            kill(raw.pid(), Signal::SIGCONT).unwrap();
            raw.wait_for_raw();
        }
        let status = raw.signal(libc::SIGQUIT);
        assert!(matches!(status, WaitStatus::Signaled(_, Signal::SIGQUIT, _)), "{status:?}");
        assert!(!raw.is_raw());
    }
}
