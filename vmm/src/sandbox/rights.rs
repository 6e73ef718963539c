//! Drops privileges of the process and sets its limits.

use std::io;

use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl::set_no_new_privs;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::{SandboxError, Thread};

/// Descriptors that are ever open at once: every connection takes a few, and their numbers are
/// bounded elsewhere.
const DESCRIPTORS: u64 = 65_536;

/// What a privileged user may go on to use: sockets of other users' directories are removed at the
/// end, and the relay runs before vCPUs that keep every CPU busy.
const KEPT: [Capability; 2] = [Capability::CAP_DAC_OVERRIDE, Capability::CAP_SYS_NICE];

/// No program that this process might start gets more than it has.
pub(super) fn no_new_privileges() -> Result<(), SandboxError> {
    set_no_new_privs().map_err(|errno| {
        SandboxError::system("renounce new privileges (PR_SET_NO_NEW_PRIVS)")(errno.into())
    })
}

/// No core files, which would hold the guest's memory, and no more descriptors than are needed.
///
/// There is none for processes: RLIMIT_NPROC counts all threads of the user. Seccomp sees to that.
pub(super) fn limit() {
    let most = [(Resource::RLIMIT_CORE, 0), (Resource::RLIMIT_NOFILE, DESCRIPTORS)];
    for (what, most) in most {
        let set = getrlimit(what).and_then(|(soft, hard)| {
            if hard <= most { Ok(()) } else { setrlimit(what, soft.min(most), most) }
        });
        if let Err(errno) = set {
            log::warn!("{what:?} cannot be limited: {errno}");
        }
    }
}

/// Before there is any thread. Who has no capabilities drops none.
pub(super) fn drop_most() -> Result<(), SandboxError> {
    let all = |set| caps::read(None, set).unwrap_or_default();
    if all(CapSet::Permitted).is_empty() {
        return Ok(());
    }
    if all(CapSet::Effective).contains(&Capability::CAP_SETPCAP) {
        // What programs could get that are started by exec: there are none, and if there were,
        // no_new_privs would keep them from it.
        caps::clear(None, CapSet::Bounding)
            .unwrap_or_else(|error| log::warn!("the bounding set cannot be cleared: {error}"));
    }
    keep_of(&KEPT)
}

/// What a privileged user's share needs: to read all there is, and where the guest may write, to
/// give files to the users that it means.
pub(super) fn keep_for_share(writable: bool) -> Result<(), SandboxError> {
    use Capability as Cap;
    let others =
        [Cap::CAP_CHOWN, Cap::CAP_FOWNER, Cap::CAP_FSETID, Cap::CAP_SETUID, Cap::CAP_SETGID];
    let kept: Vec<_> =
        others.into_iter().filter(|_| writable).chain([Cap::CAP_DAC_OVERRIDE]).collect();
    keep_of(&kept)
}

/// The calling thread keeps what its kind needs.
pub(super) fn keep(thread: Thread) -> Result<(), SandboxError> {
    let kept: &[_] = match thread {
        Thread::Controller => &KEPT,
        // They remove sockets.
        Thread::Events | Thread::Watchdog => &KEPT[..1],
        _ => &[],
    };
    keep_of(kept)
}

fn keep_of(kept: &[Capability]) -> Result<(), SandboxError> {
    let had = caps::read(None, CapSet::Permitted).map_err(error)?;
    if had.is_empty() {
        return Ok(());
    }
    let kept: CapsHashSet = kept.iter().copied().filter(|one| had.contains(one)).collect();
    for set in [CapSet::Effective, CapSet::Permitted] {
        caps::set(None, set, &kept).map_err(error)?;
    }
    caps::clear(None, CapSet::Inheritable).map_err(error)
}

fn error(error: caps::errors::CapsError) -> SandboxError {
    SandboxError::system("drop capabilities")(io::Error::other(error))
}
