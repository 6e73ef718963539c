//! Files that are written: whole before anybody sees them.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// The most symbolic links that are followed, as in the kernel.
const LINKS: usize = 40;

/// A file that is whole before anybody sees it, as far as what has its name allows that.
#[derive(Debug)]
pub(crate) enum Output {
    /// A regular file, or nothing yet: replaced once all is written.
    New {
        /// What is written to.
        file: NamedTempFile,
        /// What it becomes.
        target: PathBuf,
        /// The mode of the one that it replaces.
        mode: Option<Permissions>,
    },
    /// A device, a FIFO, or an open file by its name in /proc.
    There(File),
}

impl Output {
    /// Opens a file of that name for writing. Links are followed.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let there = match fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            there => Some(there?),
        };
        let target = match &there {
            Some(there) if !there.is_file() => None,
            _ => target(path)?,
        };
        let Some(target) = target else {
            return Ok(Self::There(OpenOptions::new().write(true).truncate(true).open(path)?));
        };
        let mode = there.as_ref().map(Metadata::permissions);
        let file = tempfile::Builder::new()
            .permissions(mode.clone().unwrap_or(Permissions::from_mode(0o666)))
            .tempfile_in(target.parent().unwrap_or(&target))?;
        Ok(Self::New { file, target, mode })
    }

    /// What is written to.
    pub(crate) fn file(&self) -> &File {
        match self {
            Self::New { file, .. } => file.as_file(),
            Self::There(file) => file,
        }
    }

    /// The directory that it will be in, if it is a file of its own.
    pub(crate) fn directory(&self) -> Option<&Path> {
        match self {
            Self::New { target, .. } => target.parent(),
            Self::There(_) => None,
        }
    }

    /// All is written.
    ///
    /// # Errors
    /// When the file cannot get its name or mode.
    pub(crate) fn done(self) -> io::Result<()> {
        if let Self::New { file, target, mode } = self {
            if let Some(mode) = mode {
                // The umask has had its part in what it was made with.
                file.as_file().set_permissions(mode)?;
            }
            file.persist(target).map_err(|error| error.error)?;
        }
        Ok(())
    }
}

/// Where a path leads once all links are followed, whether or not there is anything; `None` if it
/// leads through /proc, whose links stand for open files.
///
/// # Errors
/// When its directory cannot be found, or links go round in a circle.
pub(crate) fn target(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        let name = path.file_name().ok_or(ErrorKind::IsADirectory)?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new(".")).canonicalize()?;
        if parent.starts_with("/proc") {
            return Ok(None);
        }
        let whole = parent.join(name);
        match fs::read_link(&whole) {
            Ok(to) => path = parent.join(to),
            // Nothing there, or no link.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidInput) => {
                return Ok(Some(whole));
            }
            Err(error) => return Err(error),
        }
    }
    Err(nix::errno::Errno::ELOOP.into())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::unix::fs::{FileTypeExt, symlink};

    use nix::sys::stat::Mode;

    use super::*;

    fn write(path: &Path, content: &str) -> io::Result<()> {
        let output = Output::open(path)?;
        output.file().write_all(content.as_bytes())?;
        output.done()
    }

    // Whoever has the old file open, or loses the connection half way, keeps what there was.
    #[test]
    fn a_file_is_replaced_as_a_whole_and_keeps_its_mode() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "old").unwrap();
        for mode in [0o600, 0o666, 0o751] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let mut before = File::open(&path).unwrap();
            write(&path, "new").unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, mode);
            let mut old = String::new();
            before.read_to_string(&mut old).unwrap();
            assert_eq!((fs::read_to_string(&path).unwrap().as_str(), old.len()), ("new", 3));
        }
        let unfinished = Output::open(&path).unwrap();
        unfinished.file().write_all(b"hal").unwrap();
        drop(unfinished);
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    // Replaced itself, a link would be gone, and what it leads to would stay old.
    #[test]
    fn links_are_followed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        symlink("sub/second", at("first")).unwrap();
        symlink("../file", at("sub/second")).unwrap();
        for content in ["made", "replaced"] {
            write(&at("first"), content).unwrap();
            assert_eq!(fs::read_to_string(at("file")).unwrap(), content);
        }
        for link in ["first", "sub/second"] {
            assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink(), "{link}");
        }
        symlink("round", at("round")).unwrap();
        assert!(write(&at("round"), "").is_err());
        assert!(write(&at("none/file"), "").is_err());
        assert!(write(directory.path(), "").is_err());
    }

    // A device like /dev/null would become a file, and fill up.
    #[test]
    fn what_is_no_file_is_written_and_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        let link = directory.path().join("link");
        symlink("fifo", &link).unwrap();
        let reader = std::thread::spawn({
            let path = path.clone();
            move || fs::read_to_string(path).unwrap()
        });
        write(&link, "through").unwrap();
        assert_eq!(reader.join().unwrap(), "through");
        assert!(fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    // As /dev/stdout: who has opened it goes on to write to the same file.
    #[test]
    fn open_files_by_their_names_in_proc_are_written() {
        use std::os::fd::AsRawFd;
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(b"longer than before").unwrap();
        file.rewind().unwrap();
        let path = format!("/proc/self/fd/{}", file.as_file().as_raw_fd());
        write(Path::new(&path), "through").unwrap();
        let mut content = String::new();
        file.read_to_string(&mut content).unwrap();
        assert_eq!(content, "through");
    }
}
