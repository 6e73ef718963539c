//! The file behind a disk.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};

/// Bytes of a sector, the unit of all requests (virtio 1.2, section 5.2).
pub const SECTOR: u64 = 512;

/// Behind the end of a file, so that nothing is freed when the file system is asked whether it can.
const BEHIND: u64 = 1 << 20;

/// A raw image or a block device, open and locked: nobody else who locks it (this program, mkfs,
/// fsck) can write it as long as this lives.
#[derive(Debug)]
pub struct Disk {
    file: File,
    path: PathBuf,
    writable: bool,
    bytes: u64,
    discards: bool,
    block_device: bool,
    /// Something was written that the file's device may not have.
    dirty: bool,
    /// An error of the file was told.
    complained: bool,
}

/// Why a file cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// It cannot be opened.
    #[error("{} cannot be opened for {}", path.display(), if *.writable { "reading and writing; without ,rw it is read-only" } else { "reading" })]
    Open {
        /// The file.
        path: PathBuf,
        /// To be written, too.
        writable: bool,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is something else.
    #[error("{} is {kind}: a disk is a file with its raw content (an image), or a block device", path.display())]
    Kind {
        /// What was named.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// There is nothing in it.
    #[error("{} is empty: give it the size of the disk, such as by truncate -s 1G", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Its end is within a sector.
    #[error(
        "{} has {bytes} bytes, and a disk has sectors of 512: make it longer by truncate -s %512, or is it not a raw image (qemu-img convert -O raw)?",
        path.display()
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// Somebody else uses it.
    #[error(
        "{} is used by another program, {}: end that, or copy the file (cp --reflink=auto)",
        path.display(),
        if *.writable { "and two must not write one disk" } else { "which writes it" }
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// To be written here.
        writable: bool,
    },
}

impl Disk {
    /// Opens and locks a disk; one that is not `writable` is opened for reading alone.
    ///
    /// # Errors
    /// When it cannot be a disk, or somebody else uses it.
    pub fn open(path: &Path, writable: bool) -> Result<Disk, DiskError> {
        let here = || path.to_owned();
        let error = |source| DiskError::Open { path: here(), writable, source };
        // Before it is opened: a pipe would wait for its other end.
        let kind = fs::metadata(path).map_err(error)?.file_type();
        let not = |kind| DiskError::Kind { path: here(), kind };
        let block_device = kind.is_block_device();
        if kind.is_dir() {
            return Err(not("a directory"));
        } else if !block_device && !kind.is_file() {
            return Err(not("neither a file nor a block device"));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(writable).custom_flags(OFlag::O_NONBLOCK.bits());
        let mut file = options.open(path).map_err(error)?;
        // A device's length is not in its inode.
        let bytes = file.seek(SeekFrom::End(0)).map_err(error)?;
        if bytes == 0 {
            return Err(DiskError::Empty { path: here() });
        } else if !bytes.is_multiple_of(SECTOR) {
            return Err(DiskError::Size { path: here(), bytes });
        }
        let in_use = || DiskError::InUse { path: here(), writable };
        // By flock, as mkfs, fsck and udev lock block devices: locks of ranges are QEMU's, which
        // has the file open as well where there is an emulated host.
        match if writable { file.try_lock() } else { file.try_lock_shared() } {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(in_use()),
            Err(TryLockError::Error(source)) => {
                log::warn!("{}: cannot be locked: {source}", path.display());
            }
        }
        if writable && has_locked_ranges(&file) {
            return Err(in_use());
        }
        let discards = writable && if block_device { frees(&file) } else { punches(&file, bytes) };
        let (path, dirty, complained) = (here(), false, false);
        Ok(Disk { file, path, writable, bytes, discards, block_device, dirty, complained })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the guest may write it.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Whether it is a device.
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// Its length in bytes, a multiple of [`SECTOR`].
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it can give back the room of sectors that the guest discards.
    #[must_use]
    pub fn discards(&self) -> bool {
        self.discards
    }

    pub(super) fn read(&mut self, to: &mut [u8], offset: u64) -> Result<(), Failed> {
        let done = self.file.read_exact_at(to, offset);
        self.check("read", done)
    }

    pub(super) fn write(&mut self, from: &[u8], offset: u64) -> Result<(), Failed> {
        self.dirty = true;
        let done = self.file.write_all_at(from, offset);
        self.check("written", done)
    }

    /// What was written is on the file's own device when this returns.
    pub(super) fn flush(&mut self) -> Result<(), Failed> {
        if !self.writable {
            return Ok(());
        }
        let done = self.file.sync_data();
        self.dirty &= done.is_err();
        self.check("flushed", done)
    }

    /// Gives back the room of these bytes, as far as the file can.
    pub(super) fn discard(&mut self, offset: u64, bytes: u64) -> Result<(), Failed> {
        // What is only advice may be ignored.
        self.change(FallocateFlags::FALLOC_FL_PUNCH_HOLE, offset, bytes).map(|_| ())
    }

    /// Makes these bytes zero, with or without their room; false: the file has no such means.
    pub(super) fn zero(&mut self, offset: u64, bytes: u64, unmap: bool) -> Result<bool, Failed> {
        let how = if unmap {
            FallocateFlags::FALLOC_FL_PUNCH_HOLE
        } else {
            FallocateFlags::FALLOC_FL_ZERO_RANGE
        };
        self.change(how, offset, bytes)
    }

    fn change(&mut self, how: FallocateFlags, offset: u64, bytes: u64) -> Result<bool, Failed> {
        self.dirty = true;
        match allocate(&self.file, how, offset, bytes) {
            Ok(()) => Ok(true),
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(false),
            Err(errno) => self.check("cleared", Err(errno.into())).map(|()| true),
        }
    }

    /// A guest could bring about any number of errors: one is told.
    fn check(&mut self, what: &str, done: io::Result<()>) -> Result<(), Failed> {
        done.map_err(|error| {
            if !std::mem::replace(&mut self.complained, true) {
                log::warn!("--disk {}: cannot be {what}: {error}", self.path.display());
            }
            Failed
        })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The guest's power does not fail when the machine ends: what it has not flushed is kept.
        if self.dirty {
            let _ = self.flush();
        }
    }
}

/// The file has an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failed;

fn allocate(file: &File, how: FallocateFlags, offset: u64, bytes: u64) -> nix::Result<()> {
    let number = |value| i64::try_from(value).map_err(|_| Errno::EFBIG);
    let how = how | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, how, number(offset)?, number(bytes)?)
}

/// Whether holes can be made in a file.
fn punches(file: &File, bytes: u64) -> bool {
    let behind = bytes.next_multiple_of(BEHIND);
    allocate(file, FallocateFlags::FALLOC_FL_PUNCH_HOLE, behind, BEHIND).is_ok()
}

/// Whether a block device discards, as its driver says.
fn frees(file: &File) -> bool {
    let most = || {
        let device = file.metadata().ok()?.rdev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let queue = format!("/sys/dev/block/{major}:{minor}/queue/discard_max_bytes");
        fs::read_to_string(queue).ok()?.trim().parse::<u64>().ok()
    };
    most().is_some_and(|most| most > 0)
}

/// Whether another program has locked a part of it, as QEMU does.
fn has_locked_ranges(file: &File) -> bool {
    let as_short = |constant: i32| libc::c_short::try_from(constant).unwrap_or_default();
    let (l_type, l_whence) = (as_short(libc::F_WRLCK), as_short(libc::SEEK_SET));
    let mut lock = libc::flock { l_type, l_whence, l_start: 0, l_len: 0, l_pid: 0 };
    let asked = fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock));
    asked.is_ok() && lock.l_type != as_short(libc::F_UNLCK)
}
