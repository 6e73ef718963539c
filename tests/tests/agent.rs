//! The agent in a guest of the emulated host, and `vmtrace run` on this side of it.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::thread;

use vmtrace::emulated::cache_dir;
use vmtrace::initramfs::Modules;
use vmtrace::stream::{Frame, MarkKind, Reader};
use vmtrace_tests::live::{LiveGuest, unless_lost, vmtrace};
use vmtrace_tests::trace::{arch_of, syscall};
use vmtrace_tests::{command, workload};

fn run(socket: &Path, args: &[&str]) -> Output {
    vmtrace("run", socket, args)
}

/// The same with something to read.
fn pipe(socket: &Path, args: &[&str], input: &[u8]) -> Output {
    let mut command = command().unwrap();
    command.arg("run").arg(socket).args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(input).unwrap());
        child.wait_with_output().unwrap()
    })
}

/// The guest connects to sockets here, though its VMM is in the emulated host: what it sends
/// comes back, after it has said that it sends no more.
fn ports_of_the_host(socket: &Path, port_5001: &Path) {
    let listener = UnixListener::bind(port_5001).unwrap();
    let echo = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        stream.write_all(&bytes).unwrap();
        drop(stream);
        // And one that closes at once.
        drop(listener.accept().unwrap());
    });
    let input: Vec<u8> = (0..500_000_u32).flat_map(u32::to_le_bytes).collect();
    let out = pipe(socket, &["/vmtrace-guest", "call", "5001"], &input);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(out.stdout == input, "{} bytes", out.stdout.len());
    let out = run(socket, &["/vmtrace-guest", "call", "5001"]);
    assert!(out.status.success() && out.stdout.is_empty(), "{out:?}");
    echo.join().unwrap();
    // One that nobody listens at any more, and one that nobody ever has.
    for port in ["5001", "5002"] {
        let out = run(socket, &["/vmtrace-guest", "call", port]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && said.contains("reset"), "{port}: {said}");
    }
}

/// A module that processes of the guest reach the guest's own ports by, as a file.
fn loopback_module(kernel: &str, directory: &Path) -> PathBuf {
    let modules = cache_dir().unwrap().join("kernels").join(kernel).join("modules");
    let needed = Modules::open(&modules).unwrap().resolve(&["vsock_loopback"]).unwrap();
    // What it needs is what the device's driver needs.
    let module = needed.last().unwrap();
    let file = directory.join(format!("{}.ko", module.name));
    std::fs::write(&file, &module.content).unwrap();
    file
}

/// The agent runs commands as root: for the host, and for nobody in the guest.
fn only_for_the_host(socket: &Path) {
    let loaded = run(socket, &["/vmtrace-guest", "load", "/vsock_loopback.ko"]);
    assert!(loaded.status.success(), "{loaded:?}");
    // By the loopback's CID and by the guest's own.
    for cid in ["1", "3"] {
        let out = run(socket, &["/vmtrace-guest", "agent", cid, "echo a stranger ran this"]);
        let (text, error) = (&*out.stdout, String::from_utf8_lossy(&out.stderr));
        assert!(!out.status.success() && text.is_empty(), "{out:?}");
        let refusal = "the agent serves only the host (CID 2), and this is CID 1";
        assert!(error.contains(refusal), "by CID {cid}: {error}");
    }
    let out = run(socket, &["echo", "the host"]);
    assert_eq!((out.status.code(), &*out.stdout), (Some(0), &b"the host\n"[..]), "{out:?}");
}

// What a user has a guest without any userland for: commands with all their streams, files, modules, and marks that
// are found in the trace.
#[test]
fn a_guest_is_used_from_outside() {
    for kernel in ["x86_64-6.1", "x86_64-7", "riscv64-6.12"] {
        unless_lost(|| from_outside(kernel));
    }
}

fn from_outside(name: &str) {
    let workload = workload(arch_of(name).unwrap()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let module = loopback_module(name, directory.path());
    let (call, trigger) = command_at_a_call(name, directory.path());
    let args = [
        ["--add", workload.to_str().unwrap()],
        ["--add", module.to_str().unwrap()],
        ["--exec-at", &trigger],
    ];
    let mut guest = LiveGuest::boot(name, args.as_flattened());
    let (socket, vsock) = (guest.at("socket"), guest.at("vsock"));
    guest.wait_until(|| run(&socket, &["true"]).status.success());
    for way in [&socket, &vsock] {
        let out = run(way, &["-c", "echo out && cat /no/such"]);
        assert_eq!((out.status.code(), &*out.stdout), (Some(1), &b"out\n"[..]), "{out:?}");
        assert!(String::from_utf8_lossy(&out.stderr).contains("No such file"), "{out:?}");
    }
    assert_eq!(run(&socket, &["no-such-program"]).status.code(), Some(127));

    let input: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let out = pipe(&socket, &["cat"], &input);
    assert!(out.status.success() && out.stdout == input, "{} bytes", out.stdout.len());
    ports_of_the_host(&socket, &guest.at("vsock_5001"));

    let modules = run(&socket, &["--modules"]);
    let text = String::from_utf8_lossy(&modules.stdout);
    assert!(text.contains("vmw_vsock_virtio_transport ") && text.contains(" Live "), "{text}");
    let list = run(&socket, &["--list", "/vmtrace/modules"]);
    assert!(String::from_utf8_lossy(&list.stdout).contains("-virtio_mmio.ko\n"), "{list:?}");
    let agent = run(&socket, &["--fetch", "/init"]);
    if arch_of(name).unwrap().is_native() {
        assert!(agent.stdout == vmtrace::initramfs::AGENT);
    }
    assert!(agent.stdout.starts_with(b"\x7fELF"), "{agent:?}");

    let many: Vec<_> = (0..20)
        .map(|n| {
            let socket = socket.clone();
            thread::spawn(move || run(&socket, &["echo", &n.to_string()]).stdout)
        })
        .collect();
    for (n, out) in many.into_iter().enumerate() {
        assert_eq!(out.join().unwrap(), format!("{n}\n").into_bytes());
    }

    only_for_the_host(&socket);
    // This run has no --serve-guest: not even root reads.
    let out = run(&socket, &["/vmtrace-guest", "consume", "1"]);
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && error.contains("does not serve its guest"), "{error}");

    let out = run(&socket, &["/vmtrace-guest", "getppid", "10", "0"]);
    assert!(out.status.success(), "{out:?}");
    // It runs while the guest goes on, and asks for its own run.
    let (called, status) = (directory.path().join("called"), directory.path().join("status"));
    guest.wait_until(|| called.exists());
    let told = std::fs::read_to_string(&called).unwrap();
    // Its first name may be another one.
    assert!(told.ends_with("sys_getppid 0\n"), "{name}: {told}");
    assert!(std::fs::read_to_string(&status).unwrap().contains(&call), "{name}");
    let marked = run(&socket, &["mark", "half way"]);
    assert!(marked.status.success(), "{marked:?}");
    // The connection ends with the guest.
    assert_eq!(run(&socket, &["poweroff"]).status.code(), Some(125));
    let ended = guest.end();
    let said = ended.said();
    assert_eq!(ended.status.code(), Some(0), "{name}: {said}");
    assert_eq!(marks(&guest.at("trace")), ["half way"], "{name}: {said}");
    let refused = "vmtrace: agent: vsock: refused a connection from CID 1, which is not the host";
    assert!(said.contains(refused), "{name}: {said}");
    let failed = format!("vmtrace: note --exec-at {trigger}: exit status 3");
    assert!(said.contains(&failed), "{name}: {said}");
}

/// A function of the workload's, and what is to be run here at its third call.
fn command_at_a_call(name: &str, directory: &Path) -> (String, String) {
    let (call, here) = (syscall(name, "getppid").unwrap(), directory.display());
    let vmtrace = command().unwrap();
    let vmtrace = vmtrace.get_program().to_str().unwrap();
    let status = format!("{vmtrace} ctl \"$VMTRACE_SOCKET\" status >{here}/status");
    let called = format!(
        "echo \"$VMTRACE_FUNCTION $VMTRACE_CPU\" >{here}/new && mv {here}/new {here}/called"
    );
    let trigger = format!("{call}:3 -- {status}; {called}; exit 3");
    (call, trigger)
}

/// The guest's marks, which lie in the time of the trace.
fn marks(trace: &Path) -> Vec<String> {
    let trace = std::fs::read(trace).unwrap();
    let mut reader = Reader::new(&*trace).unwrap();
    let (mut all, mut agent) = (Vec::new(), Vec::new());
    while let Some(frame) = reader.next_frame().unwrap() {
        if let Frame::Mark(mark) = frame {
            all.push((mark.ticks, mark.kind));
            if mark.kind == MarkKind::Agent {
                agent.push(mark.text);
            }
        }
    }
    let at = |kind| all.iter().find(|mark| mark.1 == kind).map(|mark| mark.0);
    let (first, last) = (at(MarkKind::Attach).unwrap(), at(MarkKind::Detach).unwrap());
    let agent_ticks = all.iter().filter(|mark| mark.1 == MarkKind::Agent).map(|mark| mark.0);
    agent_ticks.for_each(|ticks| assert!((first..last).contains(&ticks), "{all:?}"));
    agent
}
