//! The fuzz targets.
//!
//! A target is a function that takes an input and panics when something is wrong. Targets are called
//! by libFuzzer (`fuzz/fuzz_targets`), and on stable Rust by the loop in `tests/bounded.rs`.

mod agent;
mod arguments;
mod blk;
mod btf;
mod command_line;
mod convert;
mod epilogues;
mod exits;
mod guest;
mod host_wire;
mod image;
mod initramfs;
mod input;
mod kallsyms;
mod kernels;
mod module_file;
mod modules;
mod request;
mod ring;
mod sites;
mod stream_reader;
mod values;
mod vsock;
mod walk;

use kernels::synthetic;

/// A target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// As `scripts/fuzz` and the files under `fuzz/seeds` have it.
    pub name: &'static str,
    /// Panics when the program does with these bytes what it must not.
    pub run: fn(&[u8]),
    /// Inputs that get far, for a fuzzer that knows nothing of the format.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Without inputs of its own: the target starts from something whole and damages it.
fn none() -> Vec<Vec<u8>> {
    Vec::new()
}

/// All targets, by name.
pub const TARGETS: [Target; 22] = [
    Target { name: "agent", run: agent::run, seeds: none },
    Target { name: "arguments", run: arguments::run, seeds: arguments::seeds },
    Target { name: "blk", run: blk::run, seeds: none },
    Target { name: "btf", run: btf::run, seeds: none },
    Target { name: "command_line", run: command_line::run, seeds: command_line::seeds },
    Target { name: "convert", run: convert::run, seeds: none },
    Target { name: "epilogues", run: epilogues::run, seeds: none },
    Target { name: "exits", run: exits::run, seeds: none },
    Target { name: "guest", run: guest::run, seeds: none },
    Target { name: "host_wire", run: host_wire::run, seeds: host_wire::seeds },
    Target { name: "image", run: image::run, seeds: none },
    Target { name: "initramfs", run: initramfs::run, seeds: initramfs::seeds },
    Target { name: "kallsyms", run: kallsyms::run, seeds: none },
    Target { name: "module_file", run: module_file::run, seeds: module_file::seeds },
    Target { name: "modules", run: modules::run, seeds: modules::seeds },
    Target { name: "request", run: request::run, seeds: request::seeds },
    Target { name: "ring", run: ring::run, seeds: none },
    Target { name: "sites", run: sites::run, seeds: none },
    Target { name: "stream_reader", run: stream_reader::run, seeds: none },
    Target { name: "values", run: values::run, seeds: values::seeds },
    Target { name: "vsock", run: vsock::run, seeds: none },
    Target { name: "walk", run: walk::run, seeds: none },
];

/// The target of this name.
#[must_use]
pub fn find(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
