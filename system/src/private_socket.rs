//! Unix sockets at a path to which only their owner has access.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use nix::sys::stat::{Mode, fchmod};

/// Connections that wait to be accepted; more are refused or wait.
const BACKLOG: i32 = 128;
/// How often, and how long between, the directory's lock is tried for: 2 s in all.
const LOCK_TRIES: u32 = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// After a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listening socket in the file system that only its owner (and root) can connect to.
///
/// The file is made with mode 0600, is never open to others even for a moment, and is removed
/// when this is dropped. What a process that died has left behind is replaced.
#[derive(Debug)]
pub struct PrivateListener {
    listener: UnixListener,
    path: PathBuf,
    file: Made,
}

/// A socket's file by device and inode: only this very file is removed at the end.
type Made = (u64, u64);

/// Those that there are, for whoever ends the process without dropping them.
static ALL: Mutex<Vec<(PathBuf, Made)>> = Mutex::new(Vec::new());

/// Removes the files of all listeners, which nobody can reach any more. It waits for no lock: for
/// those who end a process in which something is stuck.
pub fn remove_all() {
    for (path, made) in ALL.try_lock().iter().flat_map(|all| all.iter()) {
        remove(path, *made);
    }
}

fn remove(path: &Path, made: Made) {
    let ours = |file: fs::Metadata| (file.dev(), file.ino()) == made;
    if fs::symlink_metadata(path).is_ok_and(ours) {
        let _ = fs::remove_file(path);
    }
}

/// Why a socket cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Someone listens there.
    #[error("{}: a running process listens there; end it or choose another path", .0.display())]
    InUse(PathBuf),
    /// Something else has that name.
    #[error("{}: exists and is not a socket; remove it or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The system refuses.
    #[error("{}: cannot listen there", path.display())]
    System {
        /// Where the socket should have been.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl PrivateListener {
    /// Listens at `path`. The listener is non-blocking.
    ///
    /// # Errors
    /// If someone listens there already, if there is something else than a socket, or if the
    /// system refuses (the longest path has 107 bytes).
    pub fn bind(path: &Path) -> Result<PrivateListener, SocketError> {
        let system = |source: io::Error| SocketError::System { path: path.to_owned(), source };
        // Nobody else shall take a socket for stale that is bound and not yet listening.
        let _lock = lock_directory(path).map_err(system)?;
        remove_stale(path)?;
        let make = || -> nix::Result<OwnedFd> {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
            // Linux makes the file with the socket's own mode: no need to touch the umask, which
            // belongs to all threads.
            fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
            bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
            listen(&fd, Backlog::new(BACKLOG)?)?;
            Ok(fd)
        };
        let listener = UnixListener::from(make().map_err(|errno| system(errno.into()))?);
        let file = fs::symlink_metadata(path).map_err(system)?;
        let (path, file) = (path.to_owned(), (file.dev(), file.ino()));
        ALL.lock().unwrap_or_else(PoisonError::into_inner).push((path.clone(), file));
        Ok(PrivateListener { listener, path, file })
    }

    /// The listener itself.
    #[must_use]
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PrivateListener {
    fn drop(&mut self) {
        remove(&self.path, self.file);
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(path, made)| (path, *made) != (&self.path, self.file));
    }
}

/// Takes connections at a [`PrivateListener`] in a thread of its own, as long as it lives.
#[derive(Debug)]
pub struct Acceptor {
    /// Dropped to end the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Listens at `path` and gives every connection, blocking, to `take`, which should return
    /// soon.
    ///
    /// # Errors
    /// As [`PrivateListener::bind`], or when there is no thread for it.
    pub fn start(
        path: &Path,
        take: impl FnMut(UnixStream) + Send + 'static,
    ) -> Result<Acceptor, SocketError> {
        let listener = PrivateListener::bind(path)?;
        let system = |source| SocketError::System { path: path.to_owned(), source };
        let (stop, stopped) = UnixStream::pair().map_err(system)?;
        let thread = std::thread::Builder::new()
            .name("socket".into())
            .spawn(move || accept(&listener, &stopped, take))
            .map_err(system)?;
        Ok(Acceptor { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &PrivateListener, stopped: &UnixStream, mut take: impl FnMut(UnixStream)) {
    loop {
        let mut fds = [
            PollFd::new(listener.listener().as_fd(), PollFlags::POLLIN),
            PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
        ];
        let polled = poll(&mut fds, PollTimeout::NONE);
        let ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|found| !found.is_empty());
        match (polled, fds.map(|fd| ready(&fd))) {
            (Err(nix::Error::EINTR), _) => {}
            (Err(_), _) | (_, [_, true]) => return,
            (Ok(_), _) => match listener.listener().accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(false).is_ok() {
                        take(stream);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Out of descriptors, most likely: not a reason to burn a CPU.
                Err(_) => std::thread::sleep(ACCEPT_PAUSE),
            },
        }
    }
}

/// Keeps other vmtrace processes from making or removing sockets beside `path`.
fn lock_directory(path: &Path) -> io::Result<Flock<File>> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let mut directory = File::open(parent.unwrap_or(Path::new(".")))?;
    for _ in 0..LOCK_TRIES {
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((file, Errno::EWOULDBLOCK)) => directory = file,
            Err((_, errno)) => return Err(errno.into()),
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "another process keeps its directory locked"))
}

fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let system = |source: io::Error| SocketError::System { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system(error)),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(SocketError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    // Non-blocking: a full backlog must not keep us here.
    match connect_now(path) {
        Err(Errno::ECONNREFUSED) => fs::remove_file(path).map_err(system),
        _ => Err(SocketError::InUse(path.to_owned())),
    }
}

/// Connects to a listening socket, at once or not at all; the stream is non-blocking.
pub fn connect_now(path: &Path) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_may_connect_and_nothing_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = PrivateListener::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        UnixStream::connect(&path).unwrap();
        listener.listener().accept().unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn what_the_dead_left_is_replaced_and_the_living_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        // Dropped without being removed, as by a process that was killed.
        drop(UnixListener::bind(&path).unwrap());
        let listener = PrivateListener::bind(&path).unwrap();
        assert!(matches!(PrivateListener::bind(&path), Err(SocketError::InUse(_))));
        UnixStream::connect(&path).unwrap();
        // One that took the name over is not removed by the first.
        fs::remove_file(&path).unwrap();
        let second = PrivateListener::bind(&path).unwrap();
        drop(listener);
        UnixStream::connect(&path).unwrap();
        drop(second);
        fs::write(&path, "precious").unwrap();
        assert!(matches!(PrivateListener::bind(&path), Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn many_at_once_leave_exactly_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || PrivateListener::bind(&path))
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_path_that_cannot_be_is_an_error() {
        let path = Path::new("/nonexistent/socket");
        assert!(matches!(PrivateListener::bind(path), Err(SocketError::System { .. })));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("long".repeat(40));
        assert!(matches!(PrivateListener::bind(&path), Err(SocketError::System { .. })));
    }
}
