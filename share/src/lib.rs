//! Shares directories of the host with guests (`--share`). A separate process answers the FUSE
//! messages that it receives from a socket, one after the other. It knows nothing of virtio or of
//! guest memory.
//!
//! fuse-backend-rs interprets the messages and executes them on files. This crate decides what a
//! guest may ask for ([`Rights`]). No request is trusted to be valid.

pub mod message;
mod rights;
mod server;

pub use rights::Rights;
pub use server::{READY, ServeError, Server};
