//! The `vmtrace` binary: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    vmtrace::main().into()
}
