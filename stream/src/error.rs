//! Errors in a stream.

use std::fmt;
use std::io;

use super::wire::{VERSION_COMPRESSED, VERSION_MAJOR, VERSION_MINOR};

/// What can be wrong with a stream. Every variant but `Io` says where (in bytes from the
/// start of the stream), what, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The source failed.
    #[error("reading the stream")]
    Io(#[from] io::Error),
    /// The first bytes are something else.
    #[error(
        "not a vmtrace stream: it begins with \"{}\"; {}",
        .found.escape_ascii(),
        Remedy::Source
    )]
    NotAStream {
        /// First bytes.
        found: Vec<u8>,
    },
    /// Another major version.
    #[error(
        "stream format {major}.{minor}, but this vmtrace reads \
         {VERSION_MAJOR}.0 to {VERSION_MAJOR}.{VERSION_MINOR} and later {VERSION_MAJOR}.x, and \
         compressed {VERSION_COMPRESSED}.x; {}",
        Remedy::Upgrade
    )]
    Version {
        /// Major version.
        major: u16,
        /// Minor version.
        minor: u16,
    },
    /// A compressed stream, and this program cannot decompress.
    #[error(
        "compressed stream, but this program was built without the feature `zstd` of \
         vmtrace-stream; {}",
        Remedy::Feature
    )]
    Compressed,
    /// The stream stops before its end frame.
    #[error("torn stream: it stops at byte {offset}, {place}; {}", Remedy::Torn)]
    Torn {
        /// Where the bytes end.
        offset: u64,
        /// Between or inside which part.
        place: &'static str,
    },
    /// Bytes come after its end frame.
    #[error(
        "the stream ends at byte {offset}, but {} there, which was not read; {}",
        if *.another { "another one begins" } else { "something else follows" },
        Remedy::Apart(*.offset)
    )]
    Followed {
        /// Where the stream ends.
        offset: u64,
        /// Whether what follows begins as a stream does.
        another: bool,
    },
    /// Bytes are not what was written.
    #[error("damaged stream at byte {offset}: {cause}; {remedy}")]
    Damaged {
        /// Where the damaged part begins.
        offset: u64,
        /// What is wrong.
        cause: String,
        /// What to do.
        remedy: Remedy,
    },
}

/// What a user can do about a [`StreamError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Something else was given.
    Source,
    /// A newer format.
    Upgrade,
    /// A format that this program was built without.
    Feature,
    /// The writer or the transport stopped early.
    Torn,
    /// Files were put one behind the other; the first has so many bytes.
    Apart(u64),
    /// The bytes changed on their way.
    Copy,
    /// The writer broke the rules.
    Writer,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "give a file written by `vmtrace boot -o` or a vmtrace socket",
            Self::Upgrade => "use a vmtrace at least as new as the one that wrote it",
            Self::Feature => "build it with that feature",
            Self::Torn => {
                "everything before it is intact: the writer was killed, still writes, or the disk \
                 was full"
            }
            Self::Apart(length) => {
                let next = length.saturating_add(1);
                return write!(
                    f,
                    "everything before it is intact: give each one by itself, as `head -c {length}` \
                     and `tail -c +{next}` tell them apart"
                );
            }
            Self::Copy => "everything before it is intact: copy or transfer the rest again",
            Self::Writer => "everything before it is intact: please report this with the file",
        })
    }
}
