//! Errors of an emulated host.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why there is no emulated host, or why it did not do its job. The text has the system's reason, so that is no
/// `source`.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// No QEMU.
    #[error(
        "{program} is not installed; install {package} (QEMU {minimum} or newer): apt install {package}, or in a clone scripts/setup"
    )]
    NoQemu {
        /// The program looked for.
        program: String,
        /// Debian's package with it.
        package: &'static str,
        /// The oldest version that will do.
        minimum: &'static str,
    },
    /// QEMU does not even tell its version.
    #[error("{program} does not run: {reason}")]
    BadQemu {
        /// The program.
        program: String,
        /// What it said.
        reason: String,
    },
    /// A QEMU without what is needed.
    #[error(
        "{program} is version {version}, {minimum} or newer is needed; install a newer one (Debian 12: from bookworm-backports), or in a clone run scripts/setup"
    )]
    OldQemu {
        /// The program.
        program: String,
        /// Its version.
        version: String,
        /// The oldest version that will do.
        minimum: &'static str,
    },
    /// Nowhere to look for kernels.
    #[error("there is no cache directory: set HOME, XDG_CACHE_HOME or VMTRACE_CACHE")]
    NoCache,
    /// No kernel for the emulated host.
    #[error("there is no host kernel at {}; run: vmtrace setup host-{arch}", .path.display())]
    NoKernel {
        /// Where it was looked for.
        path: PathBuf,
        /// The host's architecture.
        arch: &'static str,
    },
    /// No vmtrace to run in the emulated host.
    #[error(
        "there is no vmtrace for {arch} hosts ({}); run scripts/setup, or: cargo build --release --target {target} --package vmtrace",
        .places.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoProgram {
        /// The architecture.
        arch: &'static str,
        /// As Rust calls it.
        target: &'static str,
        /// Where it was looked for.
        places: Vec<PathBuf>,
    },
    /// A kernel that cannot be used.
    #[error("the host kernel {} cannot be used: {reason}", .path.display())]
    BadKernel {
        /// Its file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The host's initramfs cannot be made.
    #[error("cannot prepare the emulated host: {0}")]
    Initramfs(vmtrace_initramfs::Error),
    /// A system call that hardly ever fails.
    #[error("cannot {what}: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        reason: io::Error,
    },
    /// It was not up in time.
    #[error("the emulated host was not up after {} s{log}", .after.as_secs())]
    StartTimeout {
        /// How long it was waited for.
        after: Duration,
        /// The end of its log.
        log: LogTail,
    },
    /// It is gone.
    #[error("the emulated host died ({how}){log}")]
    Died {
        /// How QEMU ended.
        how: String,
        /// By a fault of its own.
        crashed: bool,
        /// The end of its log.
        log: LogTail,
    },
    /// It came up without KVM.
    #[error("the emulated host has no usable KVM: {reason}{log}")]
    NoKvm {
        /// Why.
        reason: String,
        /// The end of its log.
        log: LogTail,
    },
    /// A job that does not end although it was killed.
    #[error("the job in the emulated host does not end, not even after SIGKILL{0}")]
    Stuck(LogTail),
    /// The user does not want to wait.
    #[error("interrupted")]
    Interrupted,
    /// The other side answered with an error.
    #[error("the emulated host cannot {what}: {reason}")]
    Failed {
        /// What was asked for.
        what: String,
        /// Its answer.
        reason: String,
    },
    /// An input of a job.
    #[error("cannot read {what}: {reason}")]
    Input {
        /// Which.
        what: String,
        /// The system's reason.
        reason: io::Error,
    },
    /// An output of a job.
    #[error("cannot write {what}: {reason}")]
    Output {
        /// Which.
        what: String,
        /// The system's reason.
        reason: io::Error,
    },
    /// The connection does not work as it should.
    #[error("{0}")]
    Protocol(String),
}

impl From<vmtrace_initramfs::Error> for HostError {
    fn from(error: vmtrace_initramfs::Error) -> Self {
        Self::Initramfs(error)
    }
}

/// The last lines of a log, as they are shown below an error.
#[derive(Debug, Clone, Default)]
pub struct LogTail(pub(super) Vec<String>);

impl std::fmt::Display for LogTail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        write!(f, "; the end of its log:")?;
        self.0.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// Names what failed, for [`HostError::System`].
pub(super) trait Context<T> {
    fn context(self, what: &'static str) -> Result<T, HostError>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: &'static str) -> Result<T, HostError> {
        self.map_err(|e| HostError::System { what, reason: e.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // As users see it.
    #[test]
    fn causes_are_said_once() {
        let reason = || io::Error::from_raw_os_error(libc::ENOSPC);
        let open = vmtrace_initramfs::Error::Open { path: "/file".into(), reason: reason() };
        for error in [
            HostError::System { what: "make a pipe", reason: reason() },
            HostError::Input { what: "/file".to_owned(), reason: reason() },
            HostError::Output { what: "/file".to_owned(), reason: reason() },
            open.into(),
        ] {
            let text = format!("{:#}", anyhow::Error::from(error));
            assert_eq!(text.matches("No space left").count(), 1, "{text}");
        }
    }
}
