//! The output of a conversion: it appears at its path only when it is complete.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::files;

/// A file or a directory that appears at its place when it is finished.
#[derive(Debug)]
pub struct Output {
    place: PathBuf,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    File(files::Output),
    Directory(TempDir),
    Standard(File),
}

impl Output {
    /// A file, which will take the place of one that is there; a device or a FIFO is written to as it is. `-` is
    /// standard output.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn file(place: &Path) -> io::Result<Self> {
        if place == Path::new("-") {
            let standard = File::from(io::stdout().as_fd().try_clone_to_owned()?);
            return Ok(Self { place: place.to_owned(), kind: Kind::Standard(standard) });
        }
        if place.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "a directory is there"));
        }
        let file = files::Output::open(place)?;
        Ok(Self { place: place.to_owned(), kind: Kind::File(file) })
    }

    /// A directory, where nothing may be but an empty one.
    ///
    /// # Errors
    /// When something is there, or it cannot be made.
    pub fn directory(place: &Path) -> io::Result<Self> {
        let taken = match fs::read_dir(place) {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        if taken {
            let reason = "something is there: this format is a directory, and wants a new one";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, reason));
        }
        let directory = tempfile::Builder::new()
            .prefix(".vmtrace-")
            .permissions(mode(0o777))
            .tempdir_in(beside(place))?;
        Ok(Self { place: place.to_owned(), kind: Kind::Directory(directory) })
    }

    /// The file to write to.
    ///
    /// # Errors
    /// When it is a directory, or the system has no descriptors left.
    pub fn handle(&self) -> io::Result<File> {
        match &self.kind {
            Kind::File(file) => file.file().try_clone(),
            Kind::Standard(file) => file.try_clone(),
            Kind::Directory(_) => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    /// The directory to write to; for files, the one that they will be in.
    #[must_use]
    pub fn path(&self) -> &Path {
        match &self.kind {
            Kind::Directory(directory) => directory.path(),
            Kind::File(file) => file.directory().unwrap_or(Path::new("/tmp")),
            Kind::Standard(_) => Path::new("/tmp"),
        }
    }

    /// A file without a name, for what must be kept until the end; where the output will be, since
    /// it is about as large.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn scratch(&self) -> io::Result<File> {
        match &self.kind {
            Kind::File(file) => match file.directory() {
                Some(directory) => tempfile::tempfile_in(directory),
                None => tempfile::tempfile(),
            },
            Kind::Directory(directory) => tempfile::tempfile_in(directory.path()),
            Kind::Standard(_) => tempfile::tempfile(),
        }
    }

    /// It is finished: moves it to its place.
    ///
    /// # Errors
    /// When it cannot be moved there.
    pub fn commit(self) -> io::Result<()> {
        match self.kind {
            Kind::Standard(_) => Ok(()),
            Kind::File(file) => file.done(),
            Kind::Directory(directory) => {
                // Takes the place of an empty directory.
                fs::rename(directory.path(), &self.place)?;
                let _ = directory.keep();
                Ok(())
            }
        }
    }
}

/// Subject to the umask, as for any file.
fn mode(mode: u32) -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(mode)
}

/// The directory that something is in.
fn beside(place: &Path) -> &Path {
    match place.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    // Who reads a trace while it is made must not take a part for the whole.
    #[test]
    fn nothing_is_seen_before_it_is_whole() {
        let folder = tempfile::tempdir().expect("a directory");
        let place = folder.path().join("trace.csv");
        fs::write(&place, "old").expect("room");
        let output = Output::file(&place).expect("a file");
        output.handle().expect("a file").write_all(b"new").expect("room");
        assert_eq!(fs::read(&place).expect("there"), b"old");
        output.commit().expect("moved");
        assert_eq!(fs::read(&place).expect("there"), b"new");
        drop(Output::file(&place).expect("a file"));
        assert_eq!(fs::read_dir(&folder).expect("there").count(), 1, "nothing is left behind");
    }

    // /dev/null would become a file, for all programs of the machine; a link would lead nowhere any more.
    #[test]
    fn what_is_no_file_of_its_own_is_written_to() {
        let folder = tempfile::tempdir().expect("a directory");
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        let from = fifo.clone();
        let reader = std::thread::spawn(move || fs::read(from).expect("what is written"));
        let write = |place: &Path| {
            let output = Output::file(place).expect("there");
            output.handle().expect("a file").write_all(b"through").expect("a reader");
            output.scratch().expect("room");
            output.commit().expect("nothing to move");
        };
        write(&fifo);
        assert_eq!(reader.join().expect("no panic"), b"through");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("target", &link).expect("a link");
        write(&link);
        assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
        assert_eq!(fs::read(folder.path().join("target")).expect("there"), b"through");
        assert_eq!(fs::read_dir(&folder).expect("there").count(), 3, "nothing else");
    }

    #[test]
    fn a_directory_takes_nobodys_place() {
        let folder = tempfile::tempdir().expect("a directory");
        let place = folder.path().join("out");
        fs::create_dir(&place).expect("a directory");
        let output = Output::directory(&place).expect("an empty one may be there");
        fs::write(output.path().join("part"), "x").expect("room");
        output.commit().expect("moved");
        assert_eq!(fs::read(place.join("part")).expect("there"), b"x");
        let error = Output::directory(&place).expect_err("there is something");
        assert!(error.to_string().contains("something is there"), "{error}");
        assert!(Output::file(&place).is_err());
        assert!(Output::directory(&folder.path().join("none/out")).is_err());
    }
}
