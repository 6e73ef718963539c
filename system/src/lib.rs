//! What both vmtrace and its emulated host need of the operating system, beyond the standard
//! library.

#![warn(clippy::print_stderr, clippy::print_stdout)]

mod limit;
pub mod ports;
pub mod private_socket;
pub mod say;
pub mod terminal;

pub use limit::raise_descriptor_limit;
