//! Reads the files of a directory of modules, for commands that list their content.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::initramfs::Modules;
use crate::kernel::{Arch, Kernel};

/// Hands out each module of a directory that is wanted: its name, and its file without compression.
///
/// # Errors
/// When one cannot be read, or taken; with the file's path.
pub(super) fn each(
    dir: &Path,
    wanted: impl Fn(&str) -> bool,
    mut take: impl FnMut(&str, &[u8]) -> Result<()>,
) -> Result<()> {
    let modules = Modules::open(dir)?;
    for name in modules.names().filter(|name| wanted(name)) {
        let data = modules.read(name)?;
        take(name, &data).with_context(|| modules.path(name).display().to_string())?;
    }
    Ok(())
}

/// A module must be one for the kernel.
pub(super) fn check(module: Arch, kernel: &Kernel) -> Result<()> {
    let (module, kernel) = (module.name(), kernel.arch().name());
    ensure!(module == kernel, "it is a module for {module}, and the kernel is one for {kernel}");
    Ok(())
}
