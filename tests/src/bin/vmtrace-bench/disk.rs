//! Random reads and writes of a disk: vmtrace's, and QEMU's in the same emulated host.

use crate::{KERNEL, value};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;
use vmtrace::emulated::{FileSource, HostArch, HostOptions, cache_dir};
use vmtrace::initramfs::{Builder, Modules};
use vmtrace_tests::SharedHost;
use vmtrace_tests::trace::{WORKLOAD, options};

const DISK: usize = 16 << 20;
/// Requests of each thread, and how many of these there are.
const REQUESTS: usize = 1000;
const THREADS: [usize; 2] = [1, 4];
const HELPER: &str = "/bin/helper";
/// Where QEMU is in the host, with what it needs.
const QEMU: &str = "/q";
const FIRMWARE: [&str; 5] =
    ["bios-microvm.bin", "linuxboot_dma.bin", "linuxboot.bin", "pvh.bin", "kvmvapic.bin"];

fn initrd(threads: usize) -> String {
    format!("/initrd-{threads}")
}

/// QEMU of this machine, its libraries and its firmware.
fn qemu() -> Result<Vec<(String, FileSource)>> {
    let qemu = std::env::var("VMTRACE_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned());
    let path = Command::new("sh").args(["-c", "command -v \"$0\"", &qemu]).output()?;
    let path = String::from_utf8(path.stdout)?.trim().to_owned();
    let needed = Command::new("ldd").arg(&path).output().context("ldd")?;
    let needed = String::from_utf8(needed.stdout)?;
    let mut files = vec![(format!("{QEMU}/qemu"), FileSource::Path(path.into()))];
    for word in needed.split_whitespace().filter(|word| word.starts_with('/')) {
        let name = Path::new(word).file_name().context("a library without a name")?.display();
        let name =
            if word.contains("/ld-linux") { "ld.so".to_owned() } else { format!("lib/{name}") };
        files.push((format!("{QEMU}/{name}"), FileSource::Path(word.into())));
    }
    for name in FIRMWARE {
        let places = ["/usr/share/seabios", "/usr/share/qemu"];
        let found =
            places.into_iter().map(|place| Path::new(place).join(name)).find(|path| path.is_file());
        files.extend(found.map(|path| (format!("{QEMU}/share/{name}"), FileSource::Path(path))));
    }
    Ok(files)
}

fn host() -> Result<HostOptions> {
    let me = std::env::current_exe()?;
    let workload = me.with_file_name("vmtrace-guest");
    let mut options = options(workload.to_str().context("a path that is not UTF-8")?, &[KERNEL])?;
    let modules =
        cache_dir().context("no cache directory")?.join("kernels").join(KERNEL).join("modules");
    let modules = Modules::open(&modules)?;
    for threads in THREADS {
        let line = format!("{WORKLOAD} disk /dev/vda 1 {REQUESTS} {threads}");
        let modules = modules.resolve(&["virtio_mmio", "virtio_blk"])?;
        let built = Builder::new().run(Some(line)).add_file(&workload).modules(modules).build()?;
        options.files.push((initrd(threads), FileSource::Bytes(built)));
        for name in ["ours", "qemu"] {
            options.files.push((format!("/{name}-{threads}"), FileSource::Bytes(vec![0; DISK])));
        }
    }
    options.files.push((HELPER.to_owned(), FileSource::Path(me.with_file_name("host-helper"))));
    options.files.extend(qemu()?);
    Ok(HostOptions { progress: true, ..options })
}

/// Exits, and bytes a second of emulated time, of the same requests to the same disk. Both devices are virtio-mmio's,
/// keep writes in the host's page cache, and flush them when the guest does.
pub(crate) fn run() -> Result<()> {
    let host = SharedHost::new(host);
    println!(
        "random requests of 4 to 64 KiB, half of them writes, O_DIRECT, {KERNEL}; all emulated"
    );
    for threads in THREADS {
        let (initrd, image) = (initrd(threads), format!("/k/{KERNEL}"));
        let cmdline = HostArch::native().guest_cmdline();
        let disk = format!("--disk=/ours-{threads},rw");
        let mut ours = vec!["exits", "/init", "boot", &image, "--host", "kvm", "--initrd", &initrd];
        ours.extend([
            "--expect-run",
            &disk,
            "--timeout",
            "600",
            "-o",
            "/trace",
            "--memory",
            "512M",
        ]);
        ours.extend(["-f", "__x64_sys_getpgid", "--cmdline", cmdline]);
        let (loader, libraries) = (format!("{QEMU}/ld.so"), format!("{QEMU}/lib"));
        let (program, firmware) = (format!("{QEMU}/qemu"), format!("{QEMU}/share"));
        let (image, append) =
            (format!("/k/{KERNEL}.bz"), format!("console=ttyS0 loglevel=5 {cmdline}"));
        let drive = format!("id=d,file=/qemu-{threads},format=raw,if=none,cache=writeback");
        let mut peer =
            vec!["exits", &*loader, "--library-path", &libraries, &program, "-L", &firmware];
        peer.extend(["-machine", "microvm,accel=kvm", "-cpu", "host", "-m", "512", "-nodefaults"]);
        peer.extend(["-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]);
        peer.extend(["-kernel", &image, "-initrd", &initrd, "-append", &append]);
        peer.extend(["-drive", &drive, "-device", "virtio-blk-device,drive=d"]);
        let mut hashes = Vec::new();
        for (name, args) in [("vmtrace", ours), ("QEMU", peer)] {
            let done = host.run(Some(HELPER), &args, &[], |_| {})?;
            let text = done.out() + &done.err();
            ensure!(done.end.code == Some(0), "{name}: {:?}\n{text}", done.end);
            let bytes = value(&text, "disk-read ")? + value(&text, "disk-written ")?;
            let (requests, exits) = (value(&text, "disk-requests ")?, value(&text, "exits ")?);
            let seconds = value(&text, "disk-ns ")? / 1e9;
            println!(
                "  {name:<8} {threads} at a time  {:7.1} MB/s {:6.2} exits a request",
                bytes / 1e6 / seconds,
                exits / requests
            );
            hashes.push(
                text.lines()
                    .find_map(|line| line.split_once("disk-hash "))
                    .context("no hash")?
                    .1
                    .to_owned(),
            );
        }
        ensure!(hashes.first() == hashes.last(), "other contents: {hashes:?}");
    }
    println!();
    Ok(())
}
