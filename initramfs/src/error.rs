//! Errors of an initramfs.

use std::io;
use std::path::PathBuf;

/// Why an initramfs cannot be made. The text has the system's reason, so that is no `source`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An input file cannot be opened.
    #[error("cannot read {}: {reason}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
    },
    /// An input file failed while it was copied.
    #[error("cannot copy {path} into the initramfs: {reason}")]
    Read {
        /// Its name in the initramfs.
        path: String,
        /// The system's reason.
        reason: io::Error,
    },
    /// An input file changed its size while it was copied.
    #[error("the file for /{0} changed while it was copied into the initramfs")]
    Changed(String),
    /// Not a regular file.
    #[error("{} is not a regular file; only single files can be added to the initramfs", .0.display())]
    NotAFile(PathBuf),
    /// A path without a usable file name.
    #[error("{} has no name that can be used in the initramfs (UTF-8)", .0.display())]
    NoName(PathBuf),
    /// Two things with one name.
    #[error("/{0} would be in the initramfs twice: rename one of the files")]
    Duplicate(String),
    /// Beyond what the format can hold.
    #[error("/{0} is too large for an initramfs (4 GiB)")]
    TooLarge(String),
    /// The archive cannot be written.
    #[error("cannot write the initramfs: {0}")]
    Write(io::Error),
    /// An entry of the cache that is none.
    #[error("the userland in {} is damaged: {reason}", .path.display())]
    Userland {
        /// The entry.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A directory without modules.
    #[error(
        "{} has no kernel modules (modules.dep); give a directory like /lib/modules/RELEASE",
        .0.display()
    )]
    NoModules(PathBuf),
    /// A directory in which modules would be looked for all day.
    #[error(
        "{} has too many files to look for kernel modules without a modules.dep; give a directory like \
         /lib/modules/RELEASE",
        .0.display()
    )]
    TooManyFiles(PathBuf),
    /// A directory that has more than the modules of one kernel.
    #[error(
        "{} has no modules.dep, and several modules {name} below it ({}, {}); give the directory of one \
         kernel, like /lib/modules/RELEASE",
        .dir.display(),
        .pair[0].display(),
        .pair[1].display()
    )]
    Several {
        /// Their name.
        name: String,
        /// The directory.
        dir: PathBuf,
        /// Two of them.
        pair: Box<[PathBuf; 2]>,
    },
    /// No such module.
    #[error("there is no module {name} in {}", .dir.display())]
    NoModule {
        /// The module.
        name: String,
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// Modules that need each other.
    #[error("the modules that {0} needs need {0} themselves")]
    Circular(String),
    /// A module file that cannot be decompressed or is none.
    #[error("the module file {} is damaged: {reason}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}
