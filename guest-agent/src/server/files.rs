//! Requests that only read: modules, lists of files, contents of files.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use super::link::{Link, OUT_MAX};
use crate::protocol::{DATA_MAX, Entry, Failure, Frame, LoadedModule, Stream};

const MODULES: &str = "/proc/modules";

fn send(link: &mut Link, frame: &Frame) -> io::Result<()> {
    link.queue(frame)?;
    link.drain(OUT_MAX, None)
}

fn fail(link: &mut Link, what: &str, error: &io::Error) -> io::Result<()> {
    send(link, &Frame::Failed(Failure::new(error, format!("{what}: {error}"))))
}

pub(super) fn modules(link: &mut Link) -> io::Result<()> {
    match fs::read_to_string(MODULES) {
        Ok(text) => {
            for module in text.lines().filter_map(LoadedModule::parse) {
                send(link, &Frame::Module(module))?;
            }
            send(link, &Frame::Done)
        }
        // A kernel without loadable modules.
        Err(error) if error.kind() == ErrorKind::NotFound && fs::exists("/proc/self")? => {
            send(link, &Frame::Done)
        }
        Err(error) => fail(link, MODULES, &error),
    }
}

pub(super) fn list(link: &mut Link, path: Vec<u8>) -> io::Result<()> {
    let path = PathBuf::from(OsString::from_vec(path));
    match entries(&path) {
        Ok(entries) => {
            for entry in entries {
                send(link, &Frame::Entry(entry))?;
            }
            send(link, &Frame::Done)
        }
        Err(error) => fail(link, &path.to_string_lossy(), &error),
    }
}

fn entries(path: &PathBuf) -> io::Result<Vec<Entry>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![entry(&fs::symlink_metadata(path)?, path.as_os_str().as_bytes())]);
    }
    let mut entries = Vec::new();
    for file in fs::read_dir(path)? {
        let file = file?;
        match file.metadata() {
            Ok(metadata) => entries.push(entry(&metadata, file.file_name().as_bytes())),
            // Gone meanwhile, as processes in procfs are.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

fn entry(metadata: &Metadata, name: &[u8]) -> Entry {
    Entry { mode: metadata.mode(), size: metadata.len(), name: name.to_vec() }
}

pub(super) fn fetch(link: &mut Link, path: Vec<u8>) -> io::Result<()> {
    let path = PathBuf::from(OsString::from_vec(path));
    let (mut file, metadata) = match open(&path) {
        Ok(opened) => opened,
        Err(error) => return fail(link, &path.to_string_lossy(), &error),
    };
    send(link, &Frame::Entry(entry(&metadata, path.as_os_str().as_bytes())))?;
    let mut bytes = vec![0; DATA_MAX];
    loop {
        match file.read(&mut bytes) {
            Ok(0) => return send(link, &Frame::Done),
            Ok(count) => {
                let data = bytes.get(..count).unwrap_or_default().to_vec();
                send(link, &Frame::Data(Stream::Stdout, data))?;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return fail(link, &path.to_string_lossy(), &error),
        }
    }
}

/// Regular files only: to open a FIFO waits, and to open a device may do anything.
fn open(path: &PathBuf) -> io::Result<(File, Metadata)> {
    let regular = |metadata: Metadata| match metadata.file_type() {
        kind if kind.is_file() => Ok(metadata),
        kind if kind.is_dir() => Err(io::Error::from(ErrorKind::IsADirectory)),
        _ => Err(io::Error::other("not a regular file; run a command that reads it")),
    };
    regular(fs::metadata(path)?)?;
    // Those of procfs and tracefs that would wait for something to happen say so instead.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = regular(file.metadata()?)?;
    Ok((file, metadata))
}
