//! The limit of open files.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit of open files as far as possible: every connection takes one or two
/// descriptors, and many systems have a limit of 1024.
pub fn raise_descriptor_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        log::debug!("cannot raise the limit of open files: {errno}");
    }
}
