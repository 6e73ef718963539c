//! Operating system helpers beyond the standard library, for both vmtrace and its emulated host.

#![warn(clippy::print_stderr, clippy::print_stdout)]

mod limit;
pub mod ports;
pub mod private_socket;
pub mod say;
mod send;
pub mod terminal;

pub use limit::raise_descriptor_limit;
pub use send::send_request;
