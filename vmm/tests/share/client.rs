//! The guest's side of a share: FUSE messages as a kernel sends them, and invalid ones.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use vmtrace_share::message::{ANSWER, Answer, REQUEST, Request};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

pub(crate) use vmtrace_share::message::opcode as op;

pub(crate) const ROOT: u64 = 1;

/// A connection to a process that serves a directory.
pub(crate) struct Client {
    stream: UnixStream,
    child: Child,
    unique: u64,
    /// Who asks.
    pub(crate) user: u32,
}

/// Numbers as they stand in messages.
pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// A name with its end.
pub(crate) fn name(name: &str) -> Vec<u8> {
    [name.as_bytes(), b"\0"].concat()
}

impl Client {
    /// Starts a process, as this user if one is named.
    pub(crate) fn start(directory: &Path, writable: bool, user: Option<u32>) -> Client {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("vmtrace"));
        command.arg("serve-share").arg("--directory").arg(directory);
        command.args(writable.then_some("--writable"));
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        let child = command.spawn().unwrap();
        drop(command);
        let mut said = [0];
        (&ours).read_exact(&mut said).unwrap();
        assert_eq!(said, [vmtrace_share::READY]);
        let mut client = Client { stream: ours, child, unique: 0, user: 0 };
        let offered = client.begin(u32::MAX);
        assert_eq!(offered[..4], 7_u32.to_le_bytes(), "version");
        client
    }

    /// Begins, once more if need be, with a kernel that can do this; what is offered to it.
    pub(crate) fn begin(&mut self, flags: u32) -> Vec<u8> {
        // Version 7.36
        let mut init = words(&[7, 36, 1 << 17, flags]);
        init.resize(64, 0);
        self.ask(op::INIT, 0, &init).unwrap()
    }

    /// Sends a message as it is.
    pub(crate) fn send(&mut self, opcode: u32, node: u64, body: &[u8]) {
        self.unique += 1;
        let mut header = Request::new_zeroed();
        header.length = u32::try_from(REQUEST + body.len()).unwrap().into();
        header.opcode = opcode.into();
        header.unique = self.unique.into();
        header.node = node.into();
        (header.uid, header.gid) = (self.user.into(), self.user.into());
        self.stream.write_all(&[header.as_bytes(), body].concat()).unwrap();
    }

    /// The answer to that, or its error.
    pub(crate) fn answer(&mut self) -> Result<Vec<u8>, i32> {
        let mut bytes = [0; ANSWER];
        self.stream.read_exact(&mut bytes).unwrap();
        let header = Answer::read_from_bytes(&bytes).unwrap();
        assert_eq!(header.unique.get(), self.unique);
        let mut body = vec![0; usize::try_from(header.length.get()).unwrap() - ANSWER];
        self.stream.read_exact(&mut body).unwrap();
        if header.error.get() == 0 { Ok(body) } else { Err(-header.error.get()) }
    }

    pub(crate) fn ask(&mut self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        self.send(opcode, node, body);
        self.answer()
    }

    /// The node of a name.
    pub(crate) fn lookup(&mut self, node: u64, what: &str) -> Result<u64, i32> {
        self.ask(op::LOOKUP, node, &name(what)).map(|entry| long(&entry, 0))
    }

    /// A handle.
    pub(crate) fn open(&mut self, node: u64, flags: i32) -> Result<u64, i32> {
        let flags = u32::try_from(flags).unwrap();
        self.ask(op::OPEN, node, &words(&[flags, 0])).map(|open| long(&open, 0))
    }

    pub(crate) fn read(&mut self, node: u64, handle: u64, size: u32) -> Result<Vec<u8>, i32> {
        let body = [&handle.to_le_bytes(), &[0; 8][..], &words(&[size, 0, 0, 0, 0, 0])].concat();
        self.ask(op::READ, node, &body)
    }

    pub(crate) fn write(&mut self, node: u64, handle: u64, data: &[u8]) -> Result<Vec<u8>, i32> {
        let size = u32::try_from(data.len()).unwrap();
        let head = [&handle.to_le_bytes(), &[0; 8][..], &words(&[size, 0, 0, 0, 0, 0])].concat();
        self.ask(op::WRITE, node, &[head, data.to_vec()].concat())
    }

    pub(crate) fn create(&mut self, node: u64, what: &str) -> Result<(u64, u64), i32> {
        let flags = u32::try_from(libc::O_RDWR | libc::O_CREAT).unwrap();
        let body = [words(&[flags, 0o100_644, 0, 0]), name(what)].concat();
        let made = self.ask(op::CREATE, node, &body)?;
        Ok((long(&made, 0), long(&made, 128)))
    }

    /// Sends what is left, and returns how the process ended and what it said.
    pub(crate) fn end(self) -> (Option<i32>, String) {
        drop(self.stream);
        let output = self.child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Sends bytes that may be anything.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }
}
