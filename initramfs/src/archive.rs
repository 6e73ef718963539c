//! Writes a cpio archive that the kernel can unpack: every path once, parents before children, and no data
//! of the build machine (owners, times, inode numbers).

use std::collections::BTreeSet;
use std::io::{self, Read, Write};

use cpio::newc::{self, ModeFileType};

use crate::error::Error;

/// Writes an archive entry by entry.
#[derive(Debug)]
pub struct Archive<W> {
    out: W,
    names: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    /// One that begins here.
    pub fn new(out: W) -> Self {
        Self { out, names: BTreeSet::new() }
    }

    /// A directory and those above it; a directory that exists already is left as it is.
    pub fn directory(&mut self, path: &str, mode: u32) -> Result<(), Error> {
        let path = relative(path);
        if path.is_empty() || self.names.contains(path) {
            return Ok(());
        }
        self.parents(path)?;
        self.entry(path, ModeFileType::Directory, mode, (0, 0), 0, io::empty())
    }

    /// A file of exactly `size` bytes.
    pub fn file(
        &mut self,
        path: &str,
        mode: u32,
        size: u64,
        content: impl Read,
    ) -> Result<(), Error> {
        self.entry(relative(path), ModeFileType::Regular, mode, (0, 0), size, content)
    }

    /// A file with this content.
    pub fn bytes(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<(), Error> {
        self.file(path, mode, u64::try_from(content.len()).unwrap_or(u64::MAX), content)
    }

    /// A symbolic link.
    pub fn link(&mut self, path: &str, target: &str) -> Result<(), Error> {
        let size = u64::try_from(target.len()).unwrap_or(u64::MAX);
        self.entry(relative(path), ModeFileType::Symlink, 0o777, (0, 0), size, target.as_bytes())
    }

    /// A character device.
    pub fn char_device(&mut self, path: &str, mode: u32, number: (u32, u32)) -> Result<(), Error> {
        self.entry(relative(path), ModeFileType::Char, mode, number, 0, io::empty())
    }

    /// Nothing may have this name: it is in another archive.
    pub fn reserve(&mut self, path: &str) {
        self.names.insert(relative(path).to_owned());
    }

    /// Ends the archive.
    pub fn finish(self) -> Result<W, Error> {
        newc::trailer(self.out).map_err(Error::Write)
    }

    fn parents(&mut self, path: &str) -> Result<(), Error> {
        match path.rsplit_once('/') {
            Some((parent, _)) => self.directory(parent, 0o755),
            None => Ok(()),
        }
    }

    fn entry(
        &mut self,
        path: &str,
        kind: ModeFileType,
        mode: u32,
        (major, minor): (u32, u32),
        size: u64,
        content: impl Read,
    ) -> Result<(), Error> {
        self.parents(path)?;
        if !self.names.insert(path.to_owned()) {
            return Err(Error::Duplicate(path.to_owned()));
        }
        let size32 = u32::try_from(size).map_err(|_| Error::TooLarge(path.to_owned()))?;
        let mut entry = newc::Builder::new(path)
            .ino(u32::try_from(self.names.len()).unwrap_or(u32::MAX))
            .mode(mode)
            .set_mode_file_type(kind)
            .rdev_major(major)
            .rdev_minor(minor)
            .write(&mut self.out, size32);
        // Its size is in the archive already: a file that shrinks or grows meanwhile is an error.
        let copied = io::copy(&mut content.take(size + 1), &mut entry)
            .map_err(|reason| Error::Read { path: path.to_owned(), reason })?;
        if copied != size {
            return Err(Error::Changed(path.to_owned()));
        }
        entry.finish().map_err(Error::Write)?;
        Ok(())
    }
}

fn relative(path: &str) -> &str {
    path.trim_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_once_and_parents_first() {
        let mut archive = Archive::new(Vec::new());
        archive.file("/a/b/c", 0o644, 3, &b"abc"[..]).unwrap();
        archive.directory("a/b", 0o700).unwrap();
        archive.link("/bin/x", "../a/b/c").unwrap();
        let error = archive.file("a/b/c", 0o644, 0, io::empty()).unwrap_err();
        assert!(matches!(error, Error::Duplicate(path) if path == "a/b/c"));
        let bytes = archive.finish().unwrap();

        let mut names = Vec::new();
        let mut rest = bytes.as_slice();
        loop {
            let reader = newc::Reader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            names.push(format!("{} {:o}", reader.entry().name(), reader.entry().mode()));
            rest = reader.finish().unwrap();
        }
        assert_eq!(names, ["a 40755", "a/b 40755", "a/b/c 100644", "bin 40755", "bin/x 120777"]);
    }

    #[test]
    fn a_file_of_another_size_is_an_error() {
        for content in [&b"ab"[..], &b"abcd"[..]] {
            let error = Archive::new(Vec::new()).file("x", 0o644, 3, content).unwrap_err();
            assert!(matches!(error, Error::Changed(_) | Error::Read { .. }), "{error}");
        }
    }
}
