//! Errors that end the playing of a stream.

use std::convert::Infallible;
use std::io;

use crate::stream::{DictionaryFull, StreamError};

use super::Absent;

/// Why playing stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlayError {
    /// The stream is not whole.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The stream has too many names.
    #[error(transparent)]
    Names(#[from] DictionaryFull),
    /// Times cannot be counted from where it was asked for.
    #[error("{0}")]
    Start(String),
    /// Something is asked for that the trace cannot have.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// The output failed.
    #[error("writing the output")]
    Output(#[source] io::Error),
}

impl From<Infallible> for PlayError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl From<PlayError> for io::Error {
    fn from(error: PlayError) -> Self {
        match error {
            PlayError::Output(error) => error,
            other => Self::new(io::ErrorKind::InvalidData, other),
        }
    }
}
