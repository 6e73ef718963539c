//! `vmtrace run` as a program, with an agent in this process at a socket like that of `vmtrace boot --socket`.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmtrace_agent::reaper::Reaper;
use vmtrace_agent::server::Server;

struct Guest {
    dir: tempfile::TempDir,
}

impl Guest {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let server = Server::new(Reaper::new());
        thread::spawn(move || {
            for socket in listener.incoming() {
                let mut socket = socket.unwrap();
                let mut line = [0; 6];
                socket.read_exact(&mut line).unwrap();
                assert_eq!(&line, b"agent\n");
                socket.write_all(b"OK\n").unwrap();
                server.attend(socket.into());
            }
        });
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
        command.arg("run").arg(self.path("s")).args(args).stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// A command that has written a line.
    fn started(&self, args: &[&str]) -> (Child, String) {
        let mut child = self.command(args).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        (child, line)
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn streams_and_statuses_are_the_commands() {
    let guest = Guest::start();
    let out = guest.run(&[
        "--",
        "sh",
        "-c",
        "echo -- \"$@\"; echo err >&2; exit 9",
        "x",
        "-c",
        "--modules",
    ]);
    assert_eq!(out.status.code(), Some(9));
    assert_eq!((text(&out.stdout), text(&out.stderr)), ("-- -c --modules\n", "err\n"));
    // Options of the command need no `--`.
    assert_eq!(guest.run(&["sh", "-c", "kill -9 $$"]).status.code(), Some(128 + 9));
    let out = guest.run(&["--cwd", "/proc", "-e", "A=b", "-c", "pwd; echo $A"]);
    assert_eq!(text(&out.stdout), "/proc\nb\n");

    let mut cat =
        guest.command(&["cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let input = vec![b'x'; 3 << 20];
    let mut stdin = cat.stdin.take().unwrap();
    let writer = thread::spawn({
        let input = input.clone();
        move || stdin.write_all(&input).unwrap()
    });
    let out = cat.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(out.status.success() && out.stdout == input);
}

#[test]
fn failures_have_the_numbers_of_shells() {
    let guest = Guest::start();
    let code = |args: &[&str]| {
        let out = guest.run(args);
        assert!(text(&out.stderr).starts_with("vmtrace: error: "), "{out:?}");
        out.status.code().unwrap()
    };
    assert_eq!(code(&["no-such-program"]), 127);
    assert_eq!(code(&["/etc/passwd"]), 126);
    assert_eq!(code(&["--cwd", "/no/where", "true"]), 125);
    fs::remove_file(guest.path("s")).unwrap();
    assert_eq!(code(&["true"]), 125);
    assert_eq!(code(&["--modules"]), 1);
    let usage = |args: &[&str]| assert_eq!(guest.run(args).status.code(), Some(2), "{args:?}");
    usage(&[]);
    usage(&["--modules", "true"]);
    usage(&["--list", "/", "--fetch", "/x"]);
    usage(&["-o", "x", "true"]);
}

// Who starts a guest cannot know when its agent is there.
#[test]
fn a_socket_and_an_agent_are_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let run = |wait: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
        command.arg("run").arg(&socket).args(["--wait", wait, "--", "sh", "-c", "exit 9"]);
        command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    assert_eq!(run("0").wait().unwrap().code(), Some(125));
    let mut child = run("600");
    let listener = UnixListener::bind(&socket).unwrap();
    let accept = |answer: &str| {
        let (mut socket, _) = listener.accept().unwrap();
        socket.read_exact(&mut [0; 6]).unwrap();
        socket.write_all(answer.as_bytes()).unwrap();
        socket
    };
    // As vmtrace does before the guest has a driver, and a VMM that starts.
    drop(accept("ERR no agent in the guest\n"));
    drop(accept("OK\n"));
    let agent = accept("OK\n");
    let server = Server::new(Reaper::new());
    thread::spawn(move || server.attend(agent.into()));
    assert_eq!(child.wait().unwrap().code(), Some(9));
}

#[test]
fn the_first_signal_is_the_commands_and_the_second_kills_it() {
    let guest = Guest::start();
    let interrupt = |child: &Child| {
        kill(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    };
    let (mut child, _) =
        guest.started(&["sh", "-c", "trap 'exit 3' INT; echo; while :; do sleep 0.01; done"]);
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(3));

    let script = "trap 'echo no' INT; echo $$; while :; do sleep 0.01; done";
    let (mut child, pid) = guest.started(&["sh", "-c", script]);
    interrupt(&child);
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "no\n");
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(125));
    while Path::new("/proc").join(pid.trim()).exists() {
        thread::yield_now();
    }
}

#[test]
fn files_of_the_guest() {
    let guest = Guest::start();
    let at = |name: &str| guest.path(name).to_str().unwrap().to_owned();
    let content = vec![7; 1 << 20];
    fs::write(at("file"), &content).unwrap();
    fs::create_dir(at("dir")).unwrap();
    fs::write(at("dir/a\x1b[2Jb"), "12345").unwrap();

    assert!(guest.run(&["--fetch", &at("file")]).stdout == content);
    let out = guest.run(&["--fetch", &at("file"), "-o", &at("copy")]);
    assert!(out.status.success() && fs::read(at("copy")).unwrap() == content, "{out:?}");
    // What cannot be had leaves the older file as it was, and nothing beside it.
    let out = guest.run(&["--fetch", &at("none"), "-o", &at("copy")]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("none: No such file"), "{out:?}");
    assert!(fs::read(at("copy")).unwrap() == content);
    assert_eq!(fs::read_dir(guest.dir.path()).unwrap().count(), 4);
    // A device (as /dev/null) or a link that became a file would be the user's loss.
    std::os::unix::fs::symlink("fifo", at("link")).unwrap();
    nix::unistd::mkfifo(guest.path("fifo").as_path(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let reader = thread::spawn({
        let fifo = at("fifo");
        move || fs::read(fifo).unwrap()
    });
    let out = guest.run(&["--fetch", &at("file"), "-o", &at("link")]);
    assert!(out.status.success(), "{out:?}");
    assert!(reader.join().unwrap() == content);
    let is = |name: &str| fs::symlink_metadata(at(name)).unwrap().file_type();
    assert!(is("link").is_symlink() && is("fifo").is_fifo());

    let list = guest.run(&["--list", &at("dir")]);
    let line = text(&list.stdout);
    assert!(line.starts_with("-rw") && line.ends_with("            5 a\u{fffd}[2Jb\n"), "{line:?}");
    assert_eq!(guest.run(&["--modules"]).status.code(), Some(0));
}
