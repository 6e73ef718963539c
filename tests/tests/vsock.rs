//! The kernel's own vsock_test between a guest and the device, in the emulated host.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use vmtrace::emulated::{FileSource, HostArch, HostOptions};
use vmtrace_tests::live::unless_lost;
use vmtrace_tests::trace::{RISCV_KERNELS, cmdline, options, socket_initrd};
use vmtrace_tests::{SharedHost, cross};

const HELPER: &str = "/bin/helper";
const PEER: &str = "/bin/vsock-test";
const SOCKET: &str = "/run/v.sock";
/// Cases of the test that are of other sockets than streams: see `vsock_test --list`.
const OTHER_SOCKETS: [u8; 9] = [6, 7, 8, 9, 11, 13, 15, 19, 25];
/// Zero-copy sending, which the host's Unix sockets do not have.
const ZERO_COPY: [u8; 2] = [18, 20];
/// What Linux 6.1 itself cannot: the test is that of 6.12. An error for bad buffers, SIGPIPE, zero-copy sending, credit
/// for SO_RCVLOWAT, SIOCOUTQ.
const NOT_YET: [u8; 7] = [12, 16, 17, 18, 20, 22, 24];
const CASES: usize = 17;

static USUAL: Guests = Guests {
    host: SharedHost::new(|| host(HostArch::X86_64, &["x86_64-6.12", "x86_64-7"])),
    arch: HostArch::X86_64,
};
static OTHERS: Guests = Guests {
    host: SharedHost::new(|| host(HostArch::X86_64, &["x86_64-6.1", "x86_64-7"])),
    arch: HostArch::X86_64,
};
static RISCV: Guests = Guests {
    host: SharedHost::new(|| host(HostArch::Riscv64, &RISCV_KERNELS)),
    arch: HostArch::Riscv64,
};

struct Guests {
    host: SharedHost,
    arch: HostArch,
}

/// The directory of the test's programs.
fn programs(arch: HostArch) -> anyhow::Result<PathBuf> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../images/vsock-test");
    let mut command = Command::new(script);
    if !arch.is_native() {
        command.arg(arch.name());
    }
    let output = command.stderr(Stdio::inherit()).output()?;
    anyhow::ensure!(output.status.success(), "images/vsock-test: {}", output.status);
    Ok(String::from_utf8(output.stdout)?.trim_end().into())
}

/// A program of these tests.
fn program(arch: HostArch, name: &str, native: &str) -> anyhow::Result<PathBuf> {
    if arch.is_native() { Ok(native.into()) } else { cross(name, arch) }
}

fn skips(cases: &[u8]) -> Vec<String> {
    cases.iter().map(|case| format!("--skip={case}")).collect()
}

/// The guest's part, as its initramfs: `mode` is the guest's.
fn initrd(arch: HostArch, kernel: &str, mode: &str) -> anyhow::Result<Vec<u8>> {
    let skip = skips(&OTHER_SOCKETS).join(" ");
    let address = if mode == "client" { "--control-host=host " } else { "" };
    let line = format!("/guest --mode={mode} {address}--control-port=9999 --peer-cid=2 {skip}");
    socket_initrd(kernel, &line, &programs(arch)?.join("guest"))
}

fn host(arch: HostArch, kernels: &[&str]) -> anyhow::Result<HostOptions> {
    let workload = program(arch, "vmtrace-guest", env!("CARGO_BIN_EXE_vmtrace-guest"))?;
    let helper = program(arch, "host-helper", env!("CARGO_BIN_EXE_host-helper"))?;
    let mut options = options(&workload.to_string_lossy(), kernels)?;
    let mut add = |name: &str, source| options.files.push((name.to_owned(), source));
    add(HELPER, FileSource::Path(helper));
    add(PEER, FileSource::Path(programs(arch)?.join("host")));
    for kernel in kernels {
        for mode in ["client", "server"] {
            add(&format!("/i/{kernel}-{mode}"), FileSource::Bytes(initrd(arch, kernel, mode)?));
        }
    }
    Ok(options)
}

impl Guests {
    fn check(&self, kernel: &str, guest: &str, peer: &[&str], skip: &[u8]) {
        let (image, initrd) = (format!("/k/{kernel}"), format!("/i/{kernel}-{guest}"));
        let cmdline = cmdline(self.arch);
        let mut args: Vec<&str> = vec!["beside", "/init", "boot", &image, "--host", "kvm"];
        args.extend(["--initrd", &initrd, "--expect-run", "--vsock", SOCKET, "--timeout", "600"]);
        args.extend(["-f", "vfs_read", "-o", "/trace"]);
        args.extend((!self.arch.is_native()).then_some("--add-agent=init"));
        args.extend(["--cmdline", &cmdline, "--", PEER]);
        args.extend(peer);
        let lacks: &[u8] = if kernel.ends_with("-6.1") { &NOT_YET } else { &[] };
        let skip: BTreeSet<u8> = skip.iter().chain(lacks).copied().collect();
        let passed = CASES - skip.len();
        let skip = skips(&OTHER_SOCKETS.into_iter().chain(skip).collect::<Vec<_>>());
        args.extend(skip.iter().map(String::as_str));
        let change = |job: &mut vmtrace::emulated::Job<'_>| {
            job.env.insert("VSOCK_PATH".into(), SOCKET.into());
        };
        let done = self.host.run(Some(HELPER), &args, &[], change).unwrap();
        let (out, err) = (done.out(), done.err());
        assert_eq!(done.end.code, Some(0), "{kernel}: {out}\n{err}");
        let ok = out
            .lines()
            .filter(|line| line.starts_with(char::is_numeric) && line.ends_with("...ok"));
        assert_eq!(ok.count(), passed, "{kernel}: {out}\n{err}");
    }

    fn client(&self, kernel: &str) {
        let peer = ["--mode=server", "--control-port=9999", "--peer-cid=3"];
        unless_lost(|| self.check(kernel, "client", &peer, &[]));
    }

    fn server(&self, kernel: &str) {
        let peer = ["--mode=client", "--control-host=guest", "--control-port=9999", "--peer-cid=3"];
        unless_lost(|| self.check(kernel, "server", &peer, &ZERO_COPY));
    }
}

// Opening, closing, half closing, credit, splitting: what Linux expects of a peer.
#[test]
fn the_kernels_own_test_passes_with_the_guest_as_client() {
    USUAL.client("x86_64-6.12");
    USUAL.client("x86_64-7");
}

#[test]
fn the_kernels_own_test_passes_with_the_guest_as_server() {
    USUAL.server("x86_64-6.12");
}

#[test]
#[ignore = "another host and four boots: for changes of the device"]
fn the_kernels_own_test_passes_on_other_kernels() {
    for kernel in ["x86_64-6.1", "x86_64-7"] {
        OTHERS.client(kernel);
        OTHERS.server(kernel);
    }
}

#[test]
#[ignore = "another host and four boots: for changes of the device"]
fn the_kernels_own_test_passes_on_riscv64() {
    for kernel in RISCV_KERNELS {
        RISCV.client(kernel);
        RISCV.server(kernel);
    }
}
