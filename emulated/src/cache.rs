//! The directory where `vmtrace setup` (`images/fetch`) puts kernels.

use std::env;
use std::path::PathBuf;

use super::arch::HostArch;
use super::error::HostError;

/// `VMTRACE_CACHE`, or `vmtrace` in the user's cache directory.
pub fn cache_dir() -> Option<PathBuf> {
    let var = |name| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("VMTRACE_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|dir| dir.join("vmtrace")))
        .or_else(|| var("HOME").map(|dir| dir.join(".cache/vmtrace")))
}

/// The emulated host's kernel.
#[derive(Debug, Clone)]
pub struct HostKernel {
    /// The image as the distribution ships it.
    pub image: PathBuf,
    /// Like the content of `/lib/modules/RELEASE`.
    pub modules: PathBuf,
    /// Its release, as far as the cache says.
    pub release: String,
}

impl HostKernel {
    /// Finds it in the cache.
    pub fn find(arch: HostArch) -> Result<Self, HostError> {
        let arch = arch.machine().name;
        let dir = cache_dir().ok_or(HostError::NoCache)?.join("host").join(arch);
        let image = dir.join("vmlinuz");
        if !image.is_file() {
            return Err(HostError::NoKernel { path: image, arch });
        }
        let release =
            std::fs::read_to_string(dir.join("release")).unwrap_or_default().trim().to_owned();
        Ok(Self { image, modules: dir.join("modules"), release })
    }
}
