//! Sets `VMTRACE_SOURCE` at compile time, which identifies the sources of a build.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// The sources of vmtrace.
const SOURCES: [&str; 10] = [
    "Cargo.lock",
    "vmm/src",
    "kernel/src",
    "stream/src",
    "trampolines/src",
    "emulated/src",
    "initramfs/src",
    "initramfs/build.rs",
    "system/src",
    "guest-agent/src",
];

fn main() {
    if let Ok(package) = env::var("CARGO_MANIFEST_DIR") {
        let root = Path::new(&package).join("..");
        println!("cargo::rustc-env=VMTRACE_SOURCE={:016x}", fingerprint(&root));
    }
}

fn fingerprint(root: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    let mut todo: Vec<PathBuf> = SOURCES.map(|path| root.join(path)).into();
    while let Some(path) = todo.pop() {
        println!("cargo::rerun-if-changed={}", path.display());
        match fs::read_dir(&path) {
            Ok(entries) => {
                let mut entries: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
                entries.sort();
                todo.extend(entries);
            }
            Err(_) => {
                path.file_name().hash(&mut hasher);
                fs::read(&path).unwrap_or_default().hash(&mut hasher);
            }
        }
    }
    hasher.finish()
}
