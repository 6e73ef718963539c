//! Disks of guests, with `vmtrace boot` run as a user would.

use std::fs;
use std::path::Path;
use std::process::Output;

use vmtrace::emulated::cache_dir;

use crate::live::{LiveGuest, vmtrace};
use crate::trace::{arch_of, syscall};
use crate::workload;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Bytes that are another in each place, and by each seed.
pub fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56).to_le_bytes()[0]
    };
    (0..length).map(|_| next()).collect()
}

/// As `vmtrace-guest disk` tells it.
fn fnv(bytes: &[u8]) -> u64 {
    let begin = 0xcbf2_9ce4_8422_2325;
    bytes.iter().fold(begin, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

fn boot(kernel: &str, options: &[String], run: &str) -> Output {
    let image = cache_dir().unwrap().join("kernels").join(kernel).join("vmlinuz");
    let fsync = syscall(kernel, "fsync").unwrap();
    let mut args = vec!["-f", &fsync, "--timeout", "300", "--cmdline", "loglevel=5", "--run", run];
    args.extend(options.iter().map(String::as_str));
    vmtrace("boot", &image, &args)
}

/// What the guest writes is what is in the file, and nothing else; what it may only read stays.
pub fn files_have_what_the_guest_has_written(kernel: &str) {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (mut content, source) = (noise(4 * MIB, 1), noise(2 * MIB, 2));
    fs::write(at("a"), &content).unwrap();
    fs::write(at("b,c"), &source).unwrap();
    fs::write(at("d"), vec![0; 8 * MIB]).unwrap();
    let workload = workload(arch_of(kernel).unwrap()).unwrap();
    let options = [
        format!("--disk={},rw", at("a").display()),
        format!("--disk={}", at("b,c").display()),
        format!("--disk={},rw", at("d").display()),
        format!("--add={}", workload.display()),
    ];
    // A copy from the one to the other; a write that must fail; a part that is given back.
    let run = "dd if=/dev/vdb of=/dev/vda bs=64k seek=3 count=20 conv=notrunc,fsync \
               && ! dd if=/dev/vda of=/dev/vdb bs=512 count=1 conv=fsync \
               && blkdiscard -o 2097152 -l 1048576 /dev/vda \
               && /vmtrace-guest disk /dev/vdc 1 250 3 \
               && echo $(cat /sys/block/vda/serial) $(cat /sys/block/vda/ro /sys/block/vdb/ro)";
    let output = boot(kernel, &options, run);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(err.contains("vmtrace-0 0 1"), "{err}");
    assert!(out.contains("dd-"), "its fsync is traced: {out}");
    // Several threads at once, requests of all sizes, and each had what it had written.
    let hash = format!("disk-hash {:016x}", fnv(&fs::read(at("d")).unwrap()));
    assert!(err.contains("disk-requests 750") && err.contains(&hash), "{hash}: {err}");
    content[192 * KIB..][..1280 * KIB].copy_from_slice(&source[..1280 * KIB]);
    content[2 * MIB..3 * MIB].fill(0);
    assert!(fs::read(at("a")).unwrap() == content, "another content");
    assert!(fs::read(at("b,c")).unwrap() == source, "a disk was written that is only read");
}

/// A machine whose power fails keeps what was flushed.
pub fn what_was_flushed_outlives_vmtrace(kernel: &str) {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk");
    let content = noise(2 * MIB, 3);
    fs::write(&image, &content).unwrap();
    let (disk, console) = (format!("--disk={},rw", image.display()), directory.path().join("said"));
    let console = console.to_str().unwrap().to_owned();
    let run = "dd if=/dev/vda of=/dev/vda bs=64k count=4 seek=8 conv=notrunc,fsync && echo flush-ed >/dev/console; sleep 1000";
    let mut guest =
        LiveGuest::boot_in(directory, kernel, &[&disk, "--console", &console, "--run", run]);
    guest.wait_until(|| said(Path::new(&console)).contains("flush-ed"));
    guest.signal("KILL");
    guest.end();
    let mut expected = content.clone();
    expected[512 * KIB..768 * KIB].copy_from_slice(&content[..256 * KIB]);
    assert!(fs::read(&image).unwrap() == expected, "a flush was none");
}

fn said(console: &Path) -> String {
    fs::read(console)
        .map_or_else(|_| String::new(), |said| String::from_utf8_lossy(&said).into_owned())
}
