//! The `vmtrace` binary; all of its code is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    // The emulated host runs this very binary as its process 1.
    if vmtrace::emulated::init::wanted() {
        return vmtrace::emulated::init::main(vmtrace::SOURCE);
    }
    vmtrace::main().into()
}
