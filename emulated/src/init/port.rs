//! The virtio-serial port to the outer vmtrace.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use crate::wire::PORT;

const PORTS: &str = "/sys/class/virtio-ports";
/// It appears a moment after its driver was loaded.
const PATIENCE: Duration = Duration::from_secs(20);

/// The port; never blocks.
#[derive(Debug)]
pub(super) struct Port(File);

pub(super) fn open() -> io::Result<Port> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(device) = find() {
            let path = format!("/dev/{device}");
            let flags = nix::fcntl::OFlag::O_NONBLOCK.bits();
            return OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(flags)
                .open(path)
                .map(Port);
        }
        if Instant::now() > end {
            return Err(io::Error::other("there is no virtio-serial port for it"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn find() -> Option<String> {
    fs::read_dir(PORTS).ok()?.flatten().find_map(|entry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        (name.trim_end() == PORT).then(|| entry.file_name().into_string().ok())?
    })
}

impl Port {
    /// One that is open already.
    #[cfg(test)]
    pub(super) fn of(file: File) -> Self {
        Self(file)
    }

    /// Bytes that are there; `None`: nothing now. No bytes: the outer side is gone.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        ready(self.0.read(buffer))
    }

    /// How many bytes were taken; `None`: none now.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<Option<usize>> {
        ready(self.0.write(bytes))
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// "Not now" is no error.
pub(super) fn ready(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(n) => Ok(Some(n)),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}
