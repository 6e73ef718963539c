//! Directories of the host for guests (`--share`): a process of its own answers the FUSE messages
//! that come by a socket, one after the other, and knows nothing of virtio or of guest memory.
//!
//! What the messages mean, and how files are done with them, is fuse-backend-rs' work. Here is what
//! a guest may ask for ([`Rights`]), and who asks: nobody is trusted to ask rightly.

pub mod message;
mod rights;
mod server;

pub use rights::Rights;
pub use server::{READY, ServeError, Server};
