//! The requests that a guest may make. This is a list of allowed requests: new or unknown ones are
//! refused.

use libc::{EINVAL, ENOSYS, EPERM, EROFS};

use crate::message::{REQUEST, Request, opcode as op};

/// What may be done with a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// Nothing changes, whatever is asked for.
    Read,
    /// Files are made, changed and removed.
    Write,
}

impl Rights {
    /// Whether a request (with its header) goes on to the files.
    ///
    /// # Errors
    /// The number of the error that it is answered with, if anybody waits for an answer.
    pub(crate) fn judge(self, header: &Request, message: &[u8]) -> Result<(), i32> {
        let body = message.get(REQUEST..).unwrap_or_default();
        match header.opcode.get() {
            op::LOOKUP => one_name(body),
            op::FORGET | op::BATCH_FORGET | op::GETATTR | op::READLINK | op::READ => Ok(()),
            op::STATFS | op::RELEASE | op::FSYNC | op::FLUSH | op::INIT | op::READDIR => Ok(()),
            op::RELEASEDIR | op::FSYNCDIR | op::INTERRUPT | op::DESTROY => Ok(()),
            op::READDIRPLUS | op::LSEEK => Ok(()),
            op::OPEN | op::OPENDIR => self.open(word(body, 0)?),
            op::ACCESS => {
                let writes = word(body, 0)? & libc::W_OK.unsigned_abs() != 0;
                if writes { self.change() } else { Ok(()) }
            }
            op::MKNOD => self.change().and_then(|()| node(word(body, 0)?)),
            op::SETATTR | op::SYMLINK | op::MKDIR | op::UNLINK | op::RMDIR | op::RENAME => {
                self.change()
            }
            op::LINK | op::WRITE | op::CREATE | op::FALLOCATE | op::RENAME2 => self.change(),
            // Known, and not offered: a guest does without. Where nothing changes they say so.
            op::SETXATTR | op::REMOVEXATTR | op::COPY_FILE_RANGE | op::TMPFILE => {
                self.change().and(Err(ENOSYS))
            }
            _ => Err(ENOSYS),
        }
    }

    fn change(self) -> Result<(), i32> {
        if self == Rights::Write { Ok(()) } else { Err(EROFS) }
    }

    /// With these flags of open(2).
    fn open(self, flags: u32) -> Result<(), i32> {
        let access = flags & libc::O_ACCMODE.unsigned_abs();
        let made =
            (libc::O_CREAT | libc::O_TRUNC | libc::O_TMPFILE & !libc::O_DIRECTORY).unsigned_abs();
        let reads = access == libc::O_RDONLY.unsigned_abs() && flags & made == 0;
        if reads { Ok(()) } else { self.change() }
    }
}

/// A directory's entry, and no way out of it. A kernel asks for `..` only to serve NFS.
fn one_name(body: &[u8]) -> Result<(), i32> {
    let name = body.split(|byte| *byte == 0).next().unwrap_or_default();
    let leads_on = name.is_empty() || name.contains(&b'/') || matches!(name, b"." | b"..");
    if leads_on { Err(EINVAL) } else { Ok(()) }
}

/// A device that a guest makes would be one of this host's, for whoever may open it.
fn node(mode: u32) -> Result<(), i32> {
    match mode & libc::S_IFMT {
        libc::S_IFCHR | libc::S_IFBLK => Err(EPERM),
        _ => Ok(()),
    }
}

fn word(body: &[u8], at: usize) -> Result<u32, i32> {
    let bytes = body.get(at..).and_then(<[u8]>::first_chunk).ok_or(EINVAL)?;
    Ok(u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromZeros, IntoBytes};

    fn judge(rights: Rights, opcode: u32, first: i32) -> Result<(), i32> {
        let mut header = Request::new_zeroed();
        header.opcode = opcode.into();
        let message = [header.as_bytes(), &first.to_le_bytes(), &[0; 60]].concat();
        rights.judge(&header, &message)
    }

    // Whatever a guest's kernel thinks of how it is mounted.
    #[test]
    fn who_may_read_changes_nothing() {
        for opcode in 0..100 {
            if judge(Rights::Read, opcode, 0) == Ok(()) {
                let reads = "2 3 5 14 15 17 18 20 25 26 27 28 29 30 34 36 38 42 44 46";
                assert!(reads.split(' ').any(|one| one == opcode.to_string()), "{opcode}");
            }
        }
        for opcode in [4, 6, 8, 9, 10, 11, 12, 13, 16, 21, 24, 35, 43, 45, 47, 51] {
            assert_eq!(judge(Rights::Read, opcode, 0), Err(EROFS), "{opcode}");
        }
        for flags in
            [libc::O_WRONLY, libc::O_RDWR, libc::O_TRUNC, libc::O_CREAT, libc::O_TMPFILE, 3]
        {
            assert_eq!(judge(Rights::Read, op::OPEN, flags), Err(EROFS), "{flags:o}");
            assert_eq!(judge(Rights::Write, op::OPEN, flags), Ok(()));
        }
        for flags in [0, libc::O_DIRECTORY, libc::O_NONBLOCK, libc::O_APPEND, libc::O_NOFOLLOW] {
            assert_eq!(judge(Rights::Read, op::OPEN, flags), Ok(()), "{flags:o}");
        }
        assert_eq!(judge(Rights::Read, op::ACCESS, libc::W_OK), Err(EROFS));
        assert_eq!(judge(Rights::Read, op::ACCESS, libc::R_OK | libc::X_OK), Ok(()));
    }

    // Not even to look at: a directory may be moved away while a guest has it.
    #[test]
    fn names_lead_nowhere_but_into_a_directory() {
        let mut header = Request::new_zeroed();
        header.opcode = op::LOOKUP.into();
        let look =
            |name: &[u8]| Rights::Write.judge(&header, &[header.as_bytes(), name, &[0]].concat());
        for name in [&b"a"[..], b"...", b"..a", b".a", b"a b", b"\xff"] {
            assert_eq!(look(name), Ok(()), "{name:?}");
        }
        for name in [&b""[..], b".", b"..", b"a/b", b"/", b"../a", b"a/"] {
            assert_eq!(look(name), Err(EINVAL), "{name:?}");
        }
    }

    #[test]
    fn no_guest_makes_devices_or_what_nobody_knows() {
        let mode = |kind: u32| i32::try_from(kind | 0o600).unwrap();
        for (kind, result) in [
            (libc::S_IFCHR, Err(EPERM)),
            (libc::S_IFBLK, Err(EPERM)),
            (libc::S_IFREG, Ok(())),
            (libc::S_IFIFO, Ok(())),
        ] {
            assert_eq!(judge(Rights::Write, op::MKNOD, mode(kind)), result, "{kind:o}");
        }
        // ioctl, locks, maps of memory, and what is not there yet.
        for opcode in [0, 31, 32, 33, 37, 39, 40, 41, 48, 49, 50, 52, 53, 4096, u32::MAX] {
            assert_eq!(judge(Rights::Write, opcode, 0), Err(ENOSYS), "{opcode}");
        }
        let mut header = Request::new_zeroed();
        header.opcode = op::OPEN.into();
        assert_eq!(Rights::Write.judge(&header, header.as_bytes()), Err(EINVAL), "without flags");
    }
}
