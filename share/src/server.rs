//! The process that answers requests.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use fuse_backend_rs::api::server;
use fuse_backend_rs::passthrough::{Config, PassthroughFs};
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader};
use nix::sys::memfd::{MFdFlags, memfd_create};
use zerocopy::{FromBytes, IntoBytes};

use crate::Rights;
use crate::message::{ANSWER, Answer, MAX, Offer, REQUEST, Request, Wishes, is_silent, opcode};

/// The byte that a server sends first, when it is ready.
pub const READY: u8 = b'R';

/// How long a guest may believe what it was told of names and files: the host may change them.
const BELIEF: Duration = Duration::from_secs(1);

/// Why a server has ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The other side is gone.
    #[error("the socket has failed")]
    Socket(#[from] io::Error),
    /// The other side has sent what is no message, so that nobody knows where the next one begins.
    #[error("a message has the impossible length of {0} bytes")]
    Length(u32),
    /// An answer was made and could not be sent.
    #[error("cannot send an answer: {0}")]
    Answer(String),
}

/// A directory, and what may be done with it.
pub struct Server {
    files: server::Server<PassthroughFs>,
    rights: Rights,
    /// Files are the user's own, whoever has made them in the guest.
    squash: bool,
    /// Where the library writes an answer to, as to a device: whether it has, it does not always say.
    out: File,
    _root: File,
}

impl Server {
    /// A server of a directory, which is opened now: what it is called may change afterwards.
    ///
    /// # Errors
    /// When that is not there, or no directory, or not to be looked at.
    pub fn open(directory: &Path, rights: Rights) -> io::Result<Server> {
        let root = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(directory)?;
        let config = Config {
            // The library opens it by name, and again for each guest that begins. The last part makes
            // it follow the link.
            root_dir: format!("/proc/self/fd/{}/.", root.as_raw_fd()),
            entry_timeout: BELIEF,
            attr_timeout: BELIEF,
            ..Config::default()
        };
        let files = PassthroughFs::new(config)?;
        files.import()?;
        let squash = !nix::unistd::geteuid().is_root();
        let out = memfd_create(c"answer", MFdFlags::MFD_CLOEXEC)?.into();
        Ok(Server { files: server::Server::new(files), rights, squash, out, _root: root })
    }

    /// Answers until the other side has no more to ask, or is gone: a VMM that ends does not wait for answers.
    ///
    /// # Errors
    /// When there is no way to go on.
    pub fn serve(&self, stream: &UnixStream) -> Result<(), ServeError> {
        match self.answer_all(stream) {
            Err(ServeError::Socket(error))
                if matches!(
                    error.kind(),
                    ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof
                ) =>
            {
                Ok(())
            }
            done => done,
        }
    }

    fn answer_all(&self, mut stream: &UnixStream) -> Result<(), ServeError> {
        stream.write_all(&[READY])?;
        let (mut message, mut answer) = (Vec::with_capacity(MAX), vec![0; ANSWER + MAX]);
        loop {
            message.resize(REQUEST, 0);
            if stream.read(&mut message[..1])? == 0 {
                return Ok(());
            }
            stream.read_exact(&mut message[1..])?;
            let Ok(mut header) = Request::read_from_bytes(&message) else { return Ok(()) };
            let length = usize::try_from(header.length.get()).unwrap_or(usize::MAX);
            if !(REQUEST..=MAX).contains(&length) {
                return Err(ServeError::Length(header.length.get()));
            }
            message.resize(length, 0);
            stream.read_exact(&mut message[REQUEST..])?;
            if self.squash {
                // Changing to another user would fail; all there is, is this one's.
                (header.uid, header.gid) = (0.into(), 0.into());
                message[..REQUEST].copy_from_slice(header.as_bytes());
            }
            let done = match self.rights.judge(&header, &message) {
                Ok(()) => self.answer(&header, &mut message, &mut answer)?,
                Err(errno) => Err(errno),
            };
            match done {
                Ok(length) => stream.write_all(answer.get(..length).unwrap_or_default())?,
                Err(_) if is_silent(header.opcode.get()) => {}
                Err(errno) => {
                    stream.write_all(Answer::bare(header.unique.get(), errno).as_bytes())?;
                }
            }
        }
    }

    /// Does what is asked for; how long the answer is, or the number of one that is missing.
    fn answer(
        &self,
        header: &Request,
        message: &mut [u8],
        room: &mut [u8],
    ) -> Result<Result<usize, i32>, ServeError> {
        let lost = |error: &dyn std::fmt::Display| ServeError::Answer(error.to_string());
        let mut out = &self.out;
        out.rewind()?;
        let wishes = (header.opcode.get() == opcode::INIT).then(|| wishes(message)).flatten();
        let reader = Reader::<()>::from_fuse_buffer(FuseBuf::new(message));
        let reader = reader.map_err(|error| lost(&error))?;
        let writer = FuseDevWriter::new(out.as_raw_fd(), room).map_err(|error| lost(&error))?;
        let done = self.files.handle_message(reader, writer.into(), None, None);
        let length = usize::try_from(out.stream_position()?).unwrap_or(usize::MAX);
        match (done, room.get_mut(..length)) {
            (_, Some(answer)) if length >= ANSWER => {
                out.rewind()?;
                out.read_exact(answer)?;
                let whole = Answer::read_from_prefix(answer)
                    .is_ok_and(|(head, _)| u64::from(head.length.get()) == length as u64);
                if let Some(wishes) = wishes {
                    enlarge(&wishes, answer);
                }
                if whole { Ok(Ok(length)) } else { Err(lost(&"it is torn")) }
            }
            // The library thinks that nobody waits for this one.
            (Ok(_), _) if header.opcode.get() == opcode::DESTROY => Ok(Err(0)),
            (done, _) => {
                log::debug!("an invalid message: {:?}", done.err());
                Ok(Err(libc::EINVAL))
            }
        }
    }
}

fn wishes(message: &[u8]) -> Option<Wishes> {
    Some(Wishes::read_from_prefix(message.get(REQUEST..)?).ok()?.0)
}

/// The library offers writes of a page, and no more.
fn enlarge(wishes: &Wishes, answer: &mut [u8]) {
    if let Some(Ok((offer, _))) = answer.get_mut(ANSWER..).map(Offer::mut_from_prefix) {
        offer.enlarge(wishes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Shutdown;

    // A run that was ended while its guest waited for a file would tell of an error that there is not.
    #[test]
    fn who_is_gone_before_the_answer_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let server = Server::open(directory.path(), Rights::Read).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let request = Request {
            length: u32::try_from(REQUEST).unwrap().into(),
            opcode: opcode::STATFS.into(),
            unique: 7.into(),
            node: 1.into(),
            uid: 0.into(),
            gid: 0.into(),
            pid: 0.into(),
            extensions: 0.into(),
        };
        theirs.write_all(request.as_bytes()).unwrap();
        drop(theirs);
        // What it has sent is there, and there is nobody for the answer.
        assert!(server.serve(&ours).is_ok());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&request.as_bytes()[..9]).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        assert!(server.serve(&ours).is_ok(), "in the middle of a request");
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&[0; REQUEST]).unwrap();
        assert!(matches!(server.serve(&ours), Err(ServeError::Length(0))));
    }
}
