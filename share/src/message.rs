//! The headers of FUSE messages (include/uapi/linux/fuse.h). All numbers are little-endian, as on
//! both architectures.

use zerocopy::little_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The longest message, in bytes: 1 MiB of data, and a page for the rest.
pub const MAX: usize = (1 << 20) + 4096;

/// `struct fuse_in_header`: what every request begins with.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Request {
    /// Bytes of the message, this header among them.
    pub length: U32,
    /// What is asked for: `enum fuse_opcode`.
    pub opcode: U32,
    /// Which request this is, for its answer.
    pub unique: U64,
    /// The file.
    pub node: U64,
    /// The user who asks.
    pub uid: U32,
    /// The group.
    pub gid: U32,
    /// The process.
    pub pid: U32,
    /// Length of extensions, in 8 bytes, and padding.
    pub extensions: U32,
}

/// `struct fuse_out_header`: what every answer begins with.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Answer {
    /// Bytes of the message, this header among them.
    pub length: U32,
    /// 0, or an error's number, negative.
    pub error: I32,
    /// The request's.
    pub unique: U64,
}

/// Bytes that every request has.
pub const REQUEST: usize = size_of::<Request>();
/// Bytes that every answer has.
pub const ANSWER: usize = size_of::<Answer>();

/// `struct fuse_init_in`, as far as it is looked at: behind the header.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Wishes {
    /// Version of the protocol.
    pub version: [U32; 2],
    /// Bytes read ahead.
    pub readahead: U32,
    /// What the guest's kernel can do.
    pub flags: U32,
}

/// `struct fuse_init_out` up to what was added last here (version 7.28), behind the header.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Offer {
    /// Version of the protocol.
    pub version: [U32; 2],
    /// Bytes read ahead.
    pub readahead: U32,
    /// What both can do.
    pub flags: U32,
    /// Requests that nobody waits for.
    pub background: [U16; 2],
    /// The most bytes of a write.
    pub write: U32,
    /// Resolution of times, in ns.
    pub resolution: U32,
    /// The most pages of a request.
    pub pages: U16,
    /// For DAX.
    pub alignment: U16,
}

impl Offer {
    /// `FUSE_ASYNC_READ`, `FUSE_BIG_WRITES`, `FUSE_AUTO_INVAL_DATA`, `FUSE_PARALLEL_DIROPS` and
    /// `FUSE_MAX_PAGES`: to send many requests, of many pages, and to drop what it remembers of a file
    /// that has changed.
    const LARGE: u32 = 1 << 0 | 1 << 5 | 1 << 12 | 1 << 18 | Self::PAGES;
    const PAGES: u32 = 1 << 22;
    /// 1 MiB of pages of 4 KiB.
    const MOST: u16 = 256;

    /// Adds what a guest can do that wishes for this, and costs a server nothing.
    pub(crate) fn enlarge(&mut self, wishes: &Wishes) {
        let flags = self.flags.get() | wishes.flags.get() & Self::LARGE;
        self.flags = flags.into();
        // The kernel's limit without the flag: 32 pages.
        let pages = if flags & Self::PAGES == 0 { 32 } else { Self::MOST };
        if flags & Self::PAGES != 0 {
            self.pages = pages.into();
        }
        self.write = (u32::from(pages) << 12).into();
    }
}

/// What is asked for.
#[allow(missing_docs, reason = "as in enum fuse_opcode")]
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
}

/// Whether nobody answers such a request.
#[must_use]
pub fn is_silent(opcode: u32) -> bool {
    matches!(opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT)
}

impl Answer {
    /// That of a request that failed with this error of `errno.h`, or has nothing to say (0).
    #[must_use]
    pub fn bare(unique: u64, errno: i32) -> Answer {
        let length = U32::new(u32::try_from(ANSWER).unwrap_or_default());
        Answer { length, error: I32::new(-errno), unique: unique.into() }
    }
}
