//! Reads the files of a directory of modules, for commands that list their content.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::initramfs::{Error, Modules};
use crate::kernel::{Arch, Kernel};

/// Hands out each module of a directory that is wanted: its name, and its file without compression. Returns
/// which are left out, for the user: without a `modules.dep`, a name may be that of several.
///
/// # Errors
/// When one cannot be read, or taken, with the file's path; or when all that are wanted would be left out.
pub(super) fn each(
    dir: &Path,
    wanted: impl Fn(&str) -> bool,
    mut take: impl FnMut(&str, &[u8]) -> Result<()>,
) -> Result<Vec<String>> {
    let modules = Modules::open(dir)?;
    let (mut any, mut several) = (false, Vec::new());
    for name in modules.names().filter(|name| wanted(name)) {
        match modules.read(name) {
            Ok(data) => {
                take(name, &data).with_context(|| modules.path(name).display().to_string())?;
                any = true;
            }
            Err(error @ Error::Several { .. }) => several.push((name, error)),
            Err(error) => return Err(error.into()),
        }
    }
    let left_out = |(name, error): (&str, Error)| match error {
        Error::Several { pair, .. } => {
            let [one, other] = pair.map(|path| path.display().to_string());
            format!("module {name} is left out: it may be {one} or {other}")
        }
        error => error.to_string(),
    };
    match several.pop() {
        Some((_, error)) if !any => Err(error.into()),
        last => Ok(several.into_iter().chain(last).map(left_out).collect()),
    }
}

/// A module must be one for the kernel.
pub(super) fn check(module: Arch, kernel: &Kernel) -> Result<()> {
    let (module, kernel) = (module.name(), kernel.arch().name());
    ensure!(module == kernel, "it is a module for {module}, and the kernel is one for {kernel}");
    Ok(())
}
