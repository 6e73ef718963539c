//! Builds the guest agent for the same target, as a small static program, so that the library can embed it.
//!
//! `VMTRACE_AGENT` is the path of the result at compile time.

use std::env;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const PACKAGE: &str = "vmtrace-agent";

/// The agent goes into every built-in initramfs: small before fast.
const PROFILE: &[&str] = &[
    "profile.release.opt-level=\"z\"",
    "profile.release.lto=\"fat\"",
    "profile.release.codegen-units=1",
    "profile.release.panic=\"abort\"",
    "profile.release.debug=false",
    "profile.release.strip=true",
];

fn main() -> ExitCode {
    match build() {
        Ok(agent) => {
            println!("cargo::rustc-env=VMTRACE_AGENT={}", agent.display());
            ExitCode::SUCCESS
        }
        Err(e) => {
            println!("cargo::error=cannot build the guest agent: {e}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<PathBuf, String> {
    let var = |name: &str| env::var(name).map_err(|e| format!("{name}: {e}"));
    let root = PathBuf::from(var("CARGO_MANIFEST_DIR")?).join("..");
    for input in ["guest-agent/src", "guest-agent/Cargo.toml", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", root.join(input).display());
    }
    let target = var("TARGET")?;
    // A directory of its own: cargo holds a lock on the one that this build uses. All builds share it, debug ones and
    // those for other architectures: the agent is the same. OUT_DIR is [TRIPLE/]PROFILE/build/PACKAGE/out in the target
    // directory.
    let out = PathBuf::from(var("OUT_DIR")?);
    let above_profile = out.ancestors().nth(4).unwrap_or(&out);
    let shared = above_profile.parent().filter(|_| above_profile.ends_with(&target));
    let target_dir = shared.unwrap_or(above_profile).join("agent");

    let mut cargo = Command::new(var("CARGO")?);
    cargo.current_dir(&root).args(["build", "--release", "--locked", "--package", PACKAGE]);
    cargo.args(["--target", &target]).arg("--target-dir").arg(&target_dir);
    for setting in PROFILE {
        cargo.args(["--config", setting]);
    }
    // What belongs to the outer build (clippy's driver, coverage or sanitizer flags, its profile) is not the agent's.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        let foreign = [
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "CLIPPY_ARGS",
            "RUSTFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
        ];
        if foreign.contains(&&*name)
            || name.starts_with("CARGO_PROFILE_")
            || name.starts_with("CARGO_BUILD_")
        {
            cargo.env_remove(&*name);
        }
    }
    cargo.env("RUSTFLAGS", "-C target-feature=+crt-static");
    let output = cargo.output().map_err(|e| format!("cargo does not start: {e}"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr).replace('\n', "\n  ");
        return Err(format!("cargo: {}\n  {errors}", output.status));
    }
    Ok(target_dir.join(target).join("release").join(PACKAGE))
}
