//! Mounts file systems, loads modules, makes `/dev/kvm`.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use kvm_ioctls::{Kvm, VmFd};
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};

use crate::image::MODULES;

const MOUNTS: [(&str, &str, &str); 7] = [
    ("devtmpfs", "/dev", "mode=755"),
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("tmpfs", "/run", "mode=755"),
    ("tmpfs", "/tmp", "mode=1777"),
    ("tmpfs", "/dev/shm", "mode=1777"),
    ("tracefs", "/sys/kernel/tracing", ""),
];

/// Mounts what programs expect; says what did not work.
pub(super) fn mount_all() -> Vec<String> {
    let mut errors = Vec::new();
    for (kind, target, data) in MOUNTS {
        let _ = fs::create_dir_all(target);
        if let Err(e) = mount(Some(kind), target, Some(kind), MsFlags::empty(), Some(data)) {
            errors.push(format!("cannot mount {kind} at {target}: {e}"));
        }
    }
    errors
}

/// Lets every process see when its own threads run: Debian's kernels do not, and vmtrace tells by it when the host
/// ran others in place of a vCPU. Says what did not work.
pub(super) fn permit_perf_events() -> Option<String> {
    const LEVEL: &str = "/proc/sys/kernel/perf_event_paranoid";
    fs::write(LEVEL, "2").err().map(|e| format!("cannot write {LEVEL}: {e}"))
}

/// Loads the modules in the order of their names. The first result says why there is no `/dev/kvm`, if so.
pub(super) fn load_modules() -> (Option<String>, Vec<String>) {
    let mut errors = Vec::new();
    let mut files: Vec<PathBuf> =
        fs::read_dir(MODULES).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.sort();
    for file in files {
        if let Err(e) = load(&file) {
            errors.push(format!("module {}: {e}", file.display()));
        }
        // Its memory is better used for guests.
        let _ = fs::remove_file(&file);
    }
    let kvm_error = if Path::new("/dev/kvm").exists() {
        None
    } else if errors.is_empty() {
        Some("its modules load, but there is no /dev/kvm".to_owned())
    } else {
        Some(errors.join("; "))
    };
    (kvm_error, errors)
}

/// A VM that nobody uses, for as long as the host lives. Without one the first VM turns KVM on and the last turns it off,
/// and with it two branches in the scheduler, which save and restore what belongs to a vCPU. QEMU (seen in 10.0) forgets
/// its translation of code before it stores what changes that code: another CPU that comes by in between keeps the old
/// code. A vCPU is then loaded that was never saved: a guest without page tables, one of some 2,000 on a busy machine.
///
/// If there can be none, whoever wants a VM says why.
pub(super) fn keep_kvm_on() -> Option<VmFd> {
    Kvm::new().and_then(|kvm| kvm.create_vm()).ok()
}

fn load(path: &Path) -> io::Result<()> {
    Ok(finit_module(File::open(path)?, c"", ModuleInitFlags::empty())?)
}
