//! Programs for guests without a system of their own: Debian's static busybox, which `vmtrace setup` puts into the
//! cache.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use crate::archive::Archive;
use crate::error::Error;

/// A limit above the size of any busybox.
const MAX_BUSYBOX: u64 = 64 << 20;
const MAX_TEXT: u64 = 64 << 10;
const MAX_NAME: usize = 64;

/// The agent's applets; each has a link in `/bin`.
pub const APPLETS: [&str; 9] =
    ["cat", "echo", "false", "ls", "mark", "poweroff", "sleep", "true", "write"];

/// What the agent does better: it is process 1.
const AGENTS_ALONE: [&str; 3] = ["mark", "poweroff", "write"];
/// They are for a process 1 that is busybox.
const OF_NO_USE: [&str; 2] = ["init", "linuxrc"];

/// A busybox and the names of its programs.
#[derive(Debug, Clone)]
pub struct Userland {
    busybox: Vec<u8>,
    programs: BTreeSet<String>,
    package: String,
}

impl Userland {
    /// Reads an entry of the cache: `busybox`, `applets` (a name a line), and `package`.
    ///
    /// # Errors
    /// When something of it is missing or damaged.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let busybox = read(&dir.join("busybox"), MAX_BUSYBOX)?;
        let damaged =
            |what: &str| Error::Userland { path: dir.to_owned(), reason: what.to_owned() };
        if !busybox.starts_with(b"\x7fELF") {
            return Err(damaged("busybox is not a program"));
        }
        let text = |name| read(&dir.join(name), MAX_TEXT).map(|text| String::from_utf8(text).ok());
        let applets = text("applets")?.ok_or_else(|| damaged("the names are not text"))?;
        let package = text("package")?.unwrap_or_default();
        let programs: BTreeSet<_> = applets.lines().map(str::to_owned).collect();
        if !programs.contains("sh") || !programs.iter().all(|name| is_name(name)) {
            return Err(damaged("these are not names of programs"));
        }
        Ok(Self { busybox, programs, package })
    }

    /// Whether it has this program.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.programs.contains(name)
    }

    /// The names of its programs, sorted.
    pub fn programs(&self) -> impl Iterator<Item = &str> {
        self.programs.iter().map(String::as_str)
    }

    /// Puts it into an archive: names that the agent has in /bin are the agent's there, and real in /usr/bin.
    pub(crate) fn add(&self, archive: &mut Archive<Vec<u8>>) -> Result<(), Error> {
        archive.bytes("bin/busybox", 0o755, &self.busybox)?;
        // Where scripts look for interpreters.
        archive.link("sbin", "bin")?;
        archive.directory("usr/bin", 0o755)?;
        archive.link("usr/bin/env", "../../bin/busybox")?;
        let not_linked = |name: &str| AGENTS_ALONE.contains(&name) || OF_NO_USE.contains(&name);
        for name in self.programs().filter(|name| !not_linked(name) && *name != "busybox") {
            if APPLETS.contains(&name) {
                archive.link(&format!("usr/bin/{name}"), "../../bin/busybox")?;
            } else {
                archive.link(&format!("bin/{name}"), "busybox")?;
            }
        }
        archive.bytes("vmtrace/userland", 0o644, self.package.as_bytes())
    }
}

/// It becomes a part of a path.
fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "[._-".contains(c);
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(good) && !name.starts_with('.')
}

fn read(path: &Path, max: u64) -> Result<Vec<u8>, Error> {
    let open = |reason| Error::Open { path: path.to_owned(), reason };
    let mut content = Vec::new();
    File::open(path).map_err(open)?.take(max + 1).read_to_end(&mut content).map_err(open)?;
    if content.len() as u64 > max {
        return Err(open(io::Error::from(io::ErrorKind::FileTooLarge)));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn entry(applets: &str, busybox: &[u8]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("busybox"), busybox).unwrap();
        fs::write(dir.path().join("applets"), applets).unwrap();
        fs::write(dir.path().join("package"), "busybox-static 1\n").unwrap();
        dir
    }

    #[test]
    fn names_are_those_of_the_list() {
        let dir = entry("[\n[[\nls\nsh\nwc\n", b"\x7fELF");
        let userland = Userland::open(dir.path()).unwrap();
        assert!(userland.has("wc") && userland.has("[[") && !userland.has("mark"));
        assert_eq!(userland.programs().count(), 5);
    }

    // They become paths of the guest.
    #[test]
    fn what_is_no_userland_is_an_error() {
        let error = |applets: &str, busybox: &[u8]| {
            Userland::open(entry(applets, busybox).path()).unwrap_err().to_string()
        };
        for bad in ["", "ls\n", "sh\n..\n", "sh\na/b\n", "sh\n\n", "sh\na b\n"] {
            assert!(error(bad, b"\x7fELF").contains("not names of programs"), "{bad:?}");
        }
        assert!(error("sh\n", b"#!/bin/sh").contains("is not a program"));
        let dir = entry("sh\n", b"\x7fELF");
        fs::remove_file(dir.path().join("applets")).unwrap();
        let error = Userland::open(dir.path()).unwrap_err();
        assert!(matches!(error, Error::Open { path, .. } if path.ends_with("applets")));
    }
}
