//! `vmtrace boot` of riscv64 kernels on any machine: hosts, containers of images, ends of guests.
//! tests/trace_riscv64.rs tests the content of traces.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use vmtrace::emulated::{HostArch, cache_dir};

/// A kernel of the cache: its directory and its image.
fn kernel(name: &str) -> (PathBuf, PathBuf) {
    let dir = cache_dir().unwrap().join("kernels").join(name);
    let image = dir.join("vmlinuz");
    assert!(image.is_file(), "{}: run scripts/setup", image.display());
    (dir, image)
}

fn vmtrace(args: &[&str]) -> Command {
    let mut command = vmtrace_tests::command().unwrap();
    command.args(args);
    command
}

fn boot(image: &Path, args: &[&str]) -> Command {
    let mut command = vmtrace(&["boot"]);
    command.arg(image).args(["--filter", "vfs_read", "-o", "/dev/null", "--timeout", "240"]);
    command.args(args);
    command
}

/// What the guest's command wrote, and what vmtrace did.
fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(content).unwrap();
    gzip.finish().unwrap()
}

/// As the kernel's build makes `vmlinuz.efi`: a header, and the compressed image.
fn zboot(content: &[u8]) -> Vec<u8> {
    let payload = gzip(content);
    let mut image = vec![0; 4096];
    image[..8].copy_from_slice(b"MZ\0\0zimg");
    image[8..12].copy_from_slice(&4096_u32.to_le_bytes());
    image[12..16].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    image[24..28].copy_from_slice(b"gzip");
    image.extend(payload);
    image
}

#[test]
fn any_container_boots_with_two_vcpus_to_power_off() {
    let dir = tempfile::tempdir().unwrap();
    type Pack = fn(&[u8]) -> Vec<u8>;
    for (name, pack) in [("riscv64-6.12", gzip as Pack), ("riscv64-7", zboot)] {
        let image = dir.path().join(name);
        fs::write(&image, pack(&fs::read(kernel(name).1).unwrap())).unwrap();
        let options = ["--cpus", "2", "--run", "cat /proc/cpuinfo", "--boot-report"];
        let output = boot(&image, &options).output().unwrap();
        let said = text(&output);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(said.contains("guest poweroff\n") && said.contains("run status 0\n"), "{said}");
        assert_eq!(said.matches("processor\t").count(), 2, "both harts are up: {said}");
        assert!(!said.contains("BUG:") && !said.contains("WARNING:"), "{said}");
        // Where the time of the boot went, on this architecture.
        let page = String::from_utf8_lossy(&output.stdout);
        assert!(page.contains(" (riscv64), 2 vCPUs\nInit is started "), "{page}");
        for part in ["\n  subsys  ", "\nLONGEST INITCALLS ", "\n  vCPU 1  ", " init is started "] {
            assert!(page.contains(part), "no {part:?} in {page}");
        }
        let unknown = ["which functions", "the levels of", "idle time:", "initcalls:"];
        assert!(!unknown.iter().any(|what| page.contains(what)), "{page}");
    }
}

#[test]
#[ignore = "trace_riscv64.rs tells more ends apart: with scripts/test --all"]
fn ends_of_guests_are_told_apart() {
    let (_, image) = kernel("riscv64-6.12");
    // From before there is a console to after it: the debug console of the SBI.
    let early = ["--cmdline", "earlycon=sbi"];
    let output = boot(&image, &["--run", "write /proc/sysrq-trigger c"]).args(early).output();
    let output = output.unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains("bootconsole [sbi0] enabled") && said.contains("guest panic\n"),
        "{said}"
    );

    let output = boot(&image, &["--console", "none", "--run", "false"]).output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", text(&output));
}

/// A host processor without AIA, as most have none: a PLIC of ours takes its place.
#[test]
fn hosts_without_interrupt_controllers_will_do() {
    let dir = tempfile::tempdir().unwrap();
    let qemu = dir.path().join("qemu");
    let script = "#!/bin/bash\n\
                  args=(\"${@/#virt,aia=*/virt}\")\n\
                  exec qemu-system-riscv64 \"${args[@]/#rv64,/rv64,ssaia=off,smaia=off,}\"\n";
    fs::write(&qemu, script).unwrap();
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).unwrap();
    let (cache, image) = kernel("riscv64-7");
    let modules = cache.join("modules");
    let args = ["--cpus", "2", "--modules", modules.to_str().unwrap()];
    let output = boot(&image, &args)
        .args(["--run", "cat /proc/interrupts"])
        .env("VMTRACE_QEMU", &qemu)
        .output()
        .unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let line = |device: &str| {
        let line = said.lines().find(|line| line.contains("PLIC") && line.ends_with(device));
        line.unwrap_or_else(|| panic!("no interrupt of {device}: {said}"))
    };
    for device in ["ttyS1", "virtio0"] {
        let counts: Vec<u32> =
            line(device).split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
        assert!(counts.len() == 2 && counts.iter().sum::<u32>() > 0, "{}", line(device));
    }
}

#[test]
fn what_cannot_be_is_said_before_anything_boots() {
    if HostArch::Riscv64.is_native() {
        return;
    }
    let (_, image) = kernel("riscv64-6.12");
    let output = boot(&image, &["--host", "kvm"]).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("KVM of this machine runs") && said.contains("leave out --host"),
        "{said}"
    );

    let output = boot(&image, &[]).env("VMTRACE_PROGRAM_riscv64", "/no/such/vmtrace").output();
    let output = output.unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("/no/such/vmtrace") && said.contains("scripts/setup"), "{said}");

    let output = boot(&image, &["--kaslr"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
}

#[test]
fn kvm_is_usable_in_the_emulated_host() {
    let output = vmtrace(&["doctor", "--json", "--boot"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let host = &report["emulated_hosts"]["riscv64"];
    assert_eq!(host["usable"], true, "{report:#}");
    let checks = host["checks"].as_array().unwrap();
    assert!(checks.iter().any(|check| check["name"] == "start"), "{report:#}");
}
