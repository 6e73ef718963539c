//! Chooses between KVM on this machine and an emulated host.

use std::fmt;
use std::path::Path;

use super::probe;
use crate::emulated::HostArch;

/// Where the user wants jobs to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostMode {
    /// On this machine's KVM if that is usable.
    #[default]
    Auto,
    /// On this machine's KVM whatever it is like.
    Kvm,
    /// In an emulated host.
    Emulated,
}

/// Where jobs run, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// In an emulated host.
    pub emulated: bool,
    /// Why, in one line.
    pub reason: String,
}

/// A guest that KVM of this machine cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "KVM of this machine runs {native} guests, and the kernel is for {guest}; leave out --host to run it in an emulated host"
)]
pub struct ForeignKvm {
    /// This machine's architecture.
    pub native: &'static str,
    /// The kernel's.
    pub guest: &'static str,
}

/// Decides for guests of architecture `guest`; `vmtrace` is the program that can look at KVM (see
/// [`probe::probe`]).
///
/// # Errors
/// When a KVM is asked for that cannot have such guests.
pub fn choose(mode: HostMode, guest: HostArch, vmtrace: &Path) -> Result<Choice, ForeignKvm> {
    let (native, name) = (HostArch::native().name(), guest.name());
    let (emulated, reason) = match mode {
        HostMode::Kvm if !guest.is_native() => {
            return Err(ForeignKvm { native, guest: name });
        }
        HostMode::Auto if !guest.is_native() => {
            (true, format!("the kernel is for {name}, this machine is {native}"))
        }
        HostMode::Kvm => (false, "as asked for".to_owned()),
        HostMode::Emulated => (true, "as asked for".to_owned()),
        HostMode::Auto => match probe::probe(vmtrace).problem() {
            None => (false, "all checks of it passed".to_owned()),
            Some(problem) => (true, format!("KVM is not usable here ({problem})")),
        },
    };
    Ok(Choice { emulated, reason })
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.emulated { "in an emulated host" } else { "on this machine's KVM" };
        write!(f, "running {place}: {}", self.reason)
    }
}
