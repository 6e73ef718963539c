//! The limit of open files.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// As high as it goes: every connection takes a descriptor or two, and many systems begin with
/// 1024.
pub fn raise_descriptor_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        log::debug!("cannot raise the limit of open files: {errno}");
    }
}
