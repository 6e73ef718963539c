//! Process 1 of the emulated host: the same vmtrace, so that the host needs no userland at all.

mod jobs;
mod port;
mod serve;
mod system;
mod threads;

#[cfg(test)]
pub(super) mod tests;

use std::path::Path;
use std::process::ExitCode;

use crate::image::MARKER;
use vmtrace_system::raise_descriptor_limit;
use vmtrace_system::say;

/// Whether this process is the `/init` of an emulated host. `main` asks before anything else.
pub fn wanted() -> bool {
    std::process::id() == 1 && Path::new(MARKER).exists()
}

/// Sets the system up and serves jobs until the outer vmtrace is gone, which is told of `source`: what this vmtrace
/// was built from. Returning ends the emulated host: the
/// kernel panics when process 1 exits, and is told to reboot then, which ends QEMU.
pub fn main(source: &str) -> ExitCode {
    let mut notes = system::mount_all();
    notes.extend(system::permit_perf_events());
    // Connections take several each.
    raise_descriptor_limit();
    let (kvm_error, module_notes) = system::load_modules();
    let _kept_on = system::keep_kvm_on();
    let notes = notes.into_iter().chain(module_notes).collect();
    let error = match port::open() {
        Ok(port) => serve::serve(port, kvm_error, notes, source),
        Err(e) => Err(e),
    };
    if let Err(e) = error {
        say!("vmtrace: the emulated host cannot go on: {e}");
    }
    ExitCode::FAILURE
}
