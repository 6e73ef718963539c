//! The sandbox of a process that runs a guest. It limits what a guest could do if it took control
//! of one of the threads: see docs/security.md.
//!
//! [`set_up`] is called once in a process, before its second thread starts. Each thread that deals
//! with the guest first [enters](enter) the sandbox: a seccomp filter for its kind, Landlock, and
//! no capabilities. Without [`set_up`] (in tests and other subcommands), [`enter`] does nothing.

mod arch;
mod calls;
mod files;
mod filter;
mod last_words;
mod rights;
pub mod trial;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use vmtrace_system::{say, terminal};

use filter::Filters;
use landlock::RulesetCreated;

pub use last_words::EXIT_CODE;

/// The option that disables the sandbox.
pub const OPTION: &str = "--no-seccomp";

/// A kind of thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// The main thread: the machine's events, commands, changes of what is traced.
    Controller,
    /// Runs a vCPU.
    Vcpu,
    /// From the rings to the stream.
    Relay,
    /// The event loop: sockets, console input, the vsock device, signals.
    Events,
    /// The event loop of consumers.
    Consumers,
    /// Writes the primary output.
    Output,
    /// Writes the guest's console.
    Console,
    /// Reads and writes a disk's file.
    Disk,
    /// Ends the process when a part of the run does not end.
    Watchdog,
}

impl Thread {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Controller,
        Self::Vcpu,
        Self::Relay,
        Self::Events,
        Self::Consumers,
        Self::Output,
        Self::Console,
        Self::Disk,
        Self::Watchdog,
    ];

    /// What it is called, here and by `ps`. Those of vCPUs have their number behind it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Vcpu => "vcpu",
            Self::Relay => "relay",
            Self::Events => "events",
            Self::Consumers => "consumers",
            Self::Output => "output",
            Self::Console => "console",
            Self::Disk => "disk",
            Self::Watchdog => "watchdog",
        }
    }
}

/// How a process is confined.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Nothing is filtered: no seccomp, no Landlock, capabilities stay.
    pub unfiltered: bool,
    /// Directories with files to be removed at the end: sockets.
    pub cleared: Vec<PathBuf>,
    /// Files to be written at the end.
    pub written: Vec<PathBuf>,
    /// The user's terminal is raw, and whoever ends the process restores it.
    pub terminal: bool,
}

/// Why a process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The system refuses.
    #[error("no sandbox: cannot {what} ({OPTION} runs without one)")]
    System {
        /// To do what.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A filter that cannot be: a bug.
    #[error("no sandbox: no filter for {thread} threads ({OPTION} runs without one)")]
    Filter {
        /// Whose.
        thread: &'static str,
        /// Why.
        #[source]
        source: seccompiler::BackendError,
    },
}

impl SandboxError {
    fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

/// What threads enter.
struct Sandbox {
    /// `None`: this kernel has no such filters.
    filters: Option<Filters>,
    /// `None`: this kernel has no Landlock.
    files: Option<RulesetCreated>,
}

static SANDBOX: OnceLock<Sandbox> = OnceLock::new();

/// Confines the process, and says how its threads will be confined. It must have no other thread
/// that deals with a guest yet. Says in a line what this machine has no means for.
///
/// # Errors
/// When the system refuses what it has.
pub fn set_up(settings: &Settings) -> Result<(), SandboxError> {
    let renounced = rights::no_new_privileges();
    rights::limit();
    if settings.unfiltered {
        // The way out leads out of this, too.
        renounced.unwrap_or_else(|error| log::warn!("{error}"));
        return Ok(());
    }
    renounced?;
    rights::drop_most()?;
    let filters = match filter::missing() {
        None => {
            last_words::install()?;
            Some(Filters::new(settings.terminal)?)
        }
        Some(why) => {
            say!(
                "vmtrace: no seccomp filters: this system has none ({why}); {OPTION} silences this"
            );
            None
        }
    };
    let files = files::ruleset(settings)?;
    if files.is_none() {
        log::info!("no Landlock: this kernel has none, or it is off");
    }
    // Once per process; a second time would change nothing for the threads that there are.
    let _ = SANDBOX.set(Sandbox { filters, files });
    Ok(())
}

/// Whether forbidden system calls come as a `SIGSYS` that has a handler.
#[must_use]
pub fn takes_sigsys() -> bool {
    SANDBOX.get().is_some_and(|sandbox| sandbox.filters.is_some())
}

/// Confines this process, which has one thread, to the files of a shared directory: it serves a guest
/// that may have found a bug of its.
///
/// # Errors
/// When the system refuses what it has.
pub fn confine_share(directory: &Path, writable: bool) -> Result<(), SandboxError> {
    rights::no_new_privileges()?;
    rights::keep_for_share(writable)?;
    files::restrict_to(directory, writable)?;
    match filter::missing() {
        None => filter::confine_share(),
        // Who has started this has said so.
        Some(_) => Ok(()),
    }
}

/// The calling thread does from now on what threads of this kind may do. Threads that it starts
/// may do no more than that, whatever they enter.
///
/// A thread that cannot be confined ends the process: it would deal with the guest next.
pub fn enter(thread: Thread) {
    let Some(sandbox) = SANDBOX.get() else { return };
    if let Err(error) = sandbox.confine(thread) {
        terminal::restore();
        say!("vmtrace: error: {:#}", anyhow::Error::from(error));
        std::process::exit(1);
    }
}

impl Sandbox {
    fn confine(&self, thread: Thread) -> Result<(), SandboxError> {
        if let Some(files) = &self.files {
            files::restrict(files)?;
        }
        rights::keep(thread)?;
        if let Some(filters) = &self.filters {
            last_words::this_is(thread);
            filters.install(thread)?;
        }
        Ok(())
    }
}
