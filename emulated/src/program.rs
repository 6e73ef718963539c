//! The vmtrace program for an emulated host: this one, or one built for another architecture.

use std::env;
use std::path::{Path, PathBuf};

use super::arch::HostArch;
use super::cache::cache_dir;
use super::error::HostError;

/// This program itself, wherever its file is now.
pub const THIS_PROGRAM: &str = "/proc/self/exe";

/// Finds the vmtrace for hosts of `arch`: this program, or in this order
///
/// - the file that `VMTRACE_PROGRAM_ARCH` names (`VMTRACE_PROGRAM_riscv64`),
/// - `vmtrace-ARCH` beside this program, or in `../lib/vmtrace` as packages have it,
/// - cargo's output for that architecture, if this program is in cargo's output,
/// - `programs/ARCH/vmtrace` in the cache.
///
/// # Errors
/// When there is none; says how to get it.
pub fn program(arch: HostArch) -> Result<PathBuf, HostError> {
    if arch.is_native() {
        return Ok(THIS_PROGRAM.into());
    }
    let machine = arch.machine();
    let named = env::var_os(format!("VMTRACE_PROGRAM_{}", machine.name)).filter(|v| !v.is_empty());
    let places = match named {
        Some(path) => vec![path.into()],
        None => {
            let exe = env::current_exe().unwrap_or_default();
            places(&exe, machine.name, machine.target)
        }
    };
    match places.iter().find(|path| path.is_file()) {
        Some(path) => Ok(path.clone()),
        None => Err(HostError::NoProgram { arch: machine.name, target: machine.target, places }),
    }
}

fn places(exe: &Path, name: &str, target: &str) -> Vec<PathBuf> {
    let mut places = Vec::new();
    if let Some(dir) = exe.parent() {
        let file = format!("vmtrace-{name}");
        places.push(dir.join(&file));
        places.extend(dir.parent().map(|prefix| prefix.join("lib/vmtrace").join(&file)));
        // TARGET_DIR/TARGET/PROFILE/vmtrace
        if let (Some(profile), Some(output)) = (dir.file_name(), dir.ancestors().nth(2)) {
            let profile = output.join(target).join(profile);
            let release = output.join(target).join("release");
            places.push(profile.join("vmtrace"));
            if profile != release {
                places.push(release.join("vmtrace"));
            }
        }
    }
    places.extend(cache_dir().map(|cache| cache.join("programs").join(name).join("vmtrace")));
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_for_beside_this_one() {
        let exe = Path::new("/src/target/x86_64-unknown-linux-gnu/debug/vmtrace");
        let places = places(exe, "riscv64", "riscv64gc-unknown-linux-gnu");
        let expected = [
            "/src/target/x86_64-unknown-linux-gnu/debug/vmtrace-riscv64",
            "/src/target/x86_64-unknown-linux-gnu/lib/vmtrace/vmtrace-riscv64",
            "/src/target/riscv64gc-unknown-linux-gnu/debug/vmtrace",
            "/src/target/riscv64gc-unknown-linux-gnu/release/vmtrace",
        ];
        assert!(expected.iter().zip(&places).all(|(path, place)| Path::new(path) == place));
        let places = super::places(Path::new("/opt/v/bin/vmtrace"), "riscv64", "riscv64gc");
        assert_eq!(places[1], Path::new("/opt/v/lib/vmtrace/vmtrace-riscv64"));
    }
}
