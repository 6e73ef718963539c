//! The kernel's own vsock_test between a guest and the device, in the emulated host.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use vmtrace::host::{FileSource, HostArch, HostOptions, cache_dir};
use vmtrace::initramfs::{Builder, Modules};
use vmtrace_tests::SharedHost;
use vmtrace_tests::live::unless_lost;
use vmtrace_tests::trace::{KERNELS, options};

const HELPER: &str = "/bin/helper";
const PEER: &str = "/bin/vsock-test";
const SOCKET: &str = "/run/v.sock";
/// Cases of the test that are of other sockets than streams: see `vsock_test --list`.
const OTHER_SOCKETS: [u8; 9] = [6, 7, 8, 9, 11, 13, 15, 19, 25];
/// Zero-copy sending, which the host's Unix sockets do not have.
const ZERO_COPY: [u8; 2] = [18, 20];

static HOST: SharedHost = SharedHost::new(host);

/// The directory of the test's programs.
fn programs() -> anyhow::Result<PathBuf> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../images/vsock-test");
    let output = Command::new(script).stderr(Stdio::inherit()).output()?;
    anyhow::ensure!(output.status.success(), "images/vsock-test: {}", output.status);
    Ok(String::from_utf8(output.stdout)?.trim_end().into())
}

fn skips(cases: &[u8]) -> Vec<String> {
    cases.iter().map(|case| format!("--skip={case}")).collect()
}

/// The guest's part, as its initramfs: `mode` is the guest's.
fn initrd(kernel: &str, mode: &str) -> anyhow::Result<Vec<u8>> {
    let cache = cache_dir().ok_or_else(|| anyhow::anyhow!("no cache directory"))?;
    let modules = Modules::open(&cache.join("kernels").join(kernel).join("modules"))?;
    let modules = modules.resolve(&["virtio_mmio", "vmw_vsock_virtio_transport"])?;
    let skip = skips(&OTHER_SOCKETS).join(" ");
    let address = if mode == "client" { "--control-host=host " } else { "" };
    let line = format!("/guest --mode={mode} {address}--control-port=9999 --peer-cid=2 {skip}");
    Ok(Builder::new()
        .run(Some(line))
        .add_file(programs()?.join("guest"))
        .modules(modules)
        .build()?)
}

fn host() -> anyhow::Result<HostOptions> {
    let mut options = options(env!("CARGO_BIN_EXE_vmtrace-guest"), &KERNELS[1..2])?;
    let mut add = |name: &str, source| options.files.push((name.to_owned(), source));
    add(HELPER, FileSource::Path(env!("CARGO_BIN_EXE_host-helper").into()));
    add(PEER, FileSource::Path(programs()?.join("host")));
    for kernel in &KERNELS[1..2] {
        for mode in ["client", "server"] {
            add(&format!("/i/{kernel}-{mode}"), FileSource::Bytes(initrd(kernel, mode)?));
        }
    }
    Ok(options)
}

fn check(kernel: &str, guest: &str, peer: &[&str], skip: &[u8], passed: usize) {
    let (image, initrd) = (format!("/k/{kernel}"), format!("/i/{kernel}-{guest}"));
    let mut args: Vec<&str> = vec!["beside", "/init", "boot", &image, "--host", "kvm"];
    args.extend(["--initrd", &initrd, "--expect-run", "--vsock", SOCKET, "--timeout", "600"]);
    args.extend(["-f", "__x64_sys_getppid", "-o", "/trace"]);
    args.extend(["--cmdline", HostArch::native().guest_cmdline(), "--", PEER]);
    args.extend(peer);
    let skip = skips(&[&OTHER_SOCKETS, skip].concat());
    args.extend(skip.iter().map(String::as_str));
    let change = |job: &mut vmtrace::host::Job<'_>| {
        job.env.insert("VSOCK_PATH".into(), SOCKET.into());
    };
    let done = HOST.run(Some(HELPER), &args, &[], change).unwrap();
    let (out, err) = (done.out(), done.err());
    assert_eq!(done.end.code, Some(0), "{kernel}: {out}\n{err}");
    let ok =
        out.lines().filter(|line| line.starts_with(char::is_numeric) && line.ends_with("...ok"));
    assert_eq!(ok.count(), passed, "{out}\n{err}");
}

// Opening, closing, half closing, credit, splitting: what Linux expects of a peer.
#[test]
fn the_kernels_own_test_passes_with_the_guest_as_client() {
    let peer = ["--mode=server", "--control-port=9999", "--peer-cid=3"];
    unless_lost(|| check("x86_64-6.12", "client", &peer, &[], 17));
}

#[test]
fn the_kernels_own_test_passes_with_the_guest_as_server() {
    let peer = ["--mode=client", "--control-host=guest", "--control-port=9999", "--peer-cid=3"];
    unless_lost(|| check("x86_64-6.12", "server", &peer, &ZERO_COPY, 15));
}
