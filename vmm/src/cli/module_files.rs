//! Reads the files of a directory of modules, for commands that list their content.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::initramfs::{Error, Modules};
use crate::kernel::{Arch, Kernel};

/// Hands out each module of a directory that is wanted: its name, and its file without compression. Returns what to tell
/// the user: which are left out (without a `modules.dep`, a name may be that of several), and whether they are those of
/// another kernel than this one.
///
/// # Errors
/// When one cannot be read, or taken, with the file's path; or when all that are wanted would be left out.
pub(super) fn each(
    dir: &Path,
    kernel: &Kernel,
    wanted: impl Fn(&str) -> bool,
    mut take: impl FnMut(&str, &[u8]) -> Result<()>,
) -> Result<Vec<String>> {
    let modules = Modules::open(dir)?;
    let (mut any, mut several, mut other) = (false, Vec::new(), None);
    for name in modules.names().filter(|name| wanted(name)) {
        match modules.read(name) {
            Ok(data) => {
                take(name, &data).with_context(|| modules.path(name).display().to_string())?;
                any = true;
                other = other.or_else(|| of_another_kernel(&data, kernel.release()));
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
        last => {
            let other = other.map(|other| {
                let (dir, release) = (dir.display(), kernel.release());
                format!("{dir}: these are modules of Linux {other}, and the kernel is {release}")
            });
            Ok(several.into_iter().chain(last).map(left_out).chain(other).collect())
        }
    }
}

/// The release of the kernel that a module is for (`vermagic`), if it is said and another one.
pub(super) fn of_another_kernel(module: &[u8], release: &str) -> Option<String> {
    const KEY: &[u8] = b"vermagic=";
    let at = module.windows(KEY.len()).position(|bytes| bytes == KEY)?;
    let said = module.get(at + KEY.len()..)?.split(|byte| matches!(byte, 0 | b' ')).next()?;
    let said = String::from_utf8_lossy(said).escape_default().to_string();
    (!release.is_empty() && said != release).then_some(said)
}

/// A module must be one for the kernel.
pub(super) fn check(module: Arch, kernel: &Kernel) -> Result<()> {
    let (module, kernel) = (module.name(), kernel.arch().name());
    ensure!(module == kernel, "it is a module for {module}, and the kernel is one for {kernel}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // A guest would say so in its log only, after its boot; and what is listed for it may not be in its modules.
    #[test]
    fn modules_of_another_kernel_are_told() {
        let module = b"\x7fELF\0license=GPL\0vermagic=6.12.94+deb13 SMP preempt mod_unload \0";
        let other = |release| of_another_kernel(module, release);
        assert_eq!(other("6.12.95+deb13").as_deref(), Some("6.12.94+deb13"));
        assert_eq!((other("6.12.94+deb13"), other("")), (None, None));
        assert_eq!(of_another_kernel(b"\x7fELF", "6.1"), None);
        assert_eq!(of_another_kernel(b"vermagic=\x1b", "6.1").as_deref(), Some("\\u{1b}"));
    }
}
