//! The `vmtrace` binary: everything is in the library.

fn main() {}
