//! A process ends although a part of its run never does. Each test runs in a separate process.

use std::fs;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use vmtrace::deadline::{Guard, STEP};
use vmtrace::events::{EventLoop, EventOps, Events, MutEventSubscriber};
use vmtrace::sandbox::{Settings, Thread, set_up};
use vmtrace_system::private_socket::PrivateListener;

const DIRECTORY: &str = "VMTRACE_TEST_DIRECTORY";
const SHORT: Duration = Duration::from_millis(300);
/// Far more than any machine needs.
const PATIENCE: Duration = Duration::from_secs(60);
/// None that anything else ends with.
const CODE: u8 = 77;
const EVENTS: &str = "the event loop that hangs";

/// A subscriber that keeps its loop for ever, as nothing should.
struct Stuck(Sender<()>);

impl MutEventSubscriber for Stuck {
    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {}
    fn init(&mut self, _: &mut EventOps<'_>) {
        // Also what a thread holds that is stuck in a write.
        let _lock = std::io::stderr().lock();
        self.0.send(()).unwrap();
        loop {
            std::thread::park();
        }
    }
}

/// The process of the other tests: confined, with a socket, and with an event loop that does not end.
#[test]
#[ignore = "a process of the other tests"]
fn child() {
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).unwrap());
    set_up(&Settings { cleared: vec![directory.clone()], ..Settings::default() }).unwrap();
    let guard = Guard::start(STEP, CODE).unwrap();
    let _socket = PrivateListener::bind(&directory.join("socket")).unwrap();
    let events = EventLoop::start(Thread::Events).unwrap();
    let late = guard.deadline().at_drop(EVENTS, SHORT);
    let handle = events.handle();
    let (begins, begun) = channel();
    std::thread::spawn(move || handle.add(Box::new(Stuck(begins))));
    begun.recv().unwrap();
    fs::write(directory.join("ready"), "").unwrap();
    while fs::exists(directory.join("ready")).unwrap() {
        std::thread::sleep(Duration::from_millis(5));
    }
    // What waits for ever: the join.
    drop(late);
    drop(events);
}

fn start(directory: &Path, stderr: impl Into<Stdio>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--ignored", "--nocapture"]).env(DIRECTORY, directory);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().unwrap()
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lets it hang, and sees it end: its code.
fn ends(child: &mut Child, directory: &Path) -> Option<i32> {
    let ready = directory.join("ready");
    wait_until("it does not begin", || ready.exists());
    assert!(directory.join("socket").exists());
    fs::remove_file(ready).unwrap();
    let mut status = None;
    wait_until("it does not end", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert!(!directory.join("socket").exists(), "the socket is left behind");
    status.unwrap().code()
}

#[test]
fn a_thread_that_never_ends_is_named_and_the_process_ends() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = start(directory.path(), Stdio::piped());
    assert_eq!(ends(&mut child, directory.path()), Some(CODE.into()));
    let said = child.wait_with_output().unwrap().stderr;
    let said = String::from_utf8(said).unwrap();
    let line = said.lines().find(|line| line.starts_with("vmtrace: error: ")).unwrap();
    assert!(line.contains(EVENTS) && line.contains("did not end in time"), "{line}");
}

// `2>&1 | less`, and nobody reads: the last line is not worth a process that hangs.
#[test]
fn it_ends_though_nobody_reads_what_it_says() {
    let directory = tempfile::tempdir().unwrap();
    let (_reader, mut full) = std::io::pipe().unwrap();
    let flags = OFlag::from_bits_retain(fcntl(full.as_fd(), FcntlArg::F_GETFL).unwrap());
    fcntl(full.as_fd(), FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).unwrap();
    while full.write(&[b'x'; 4096]).is_ok() {}
    fcntl(full.as_fd(), FcntlArg::F_SETFL(flags)).unwrap();
    let mut child = start(directory.path(), full);
    assert_eq!(ends(&mut child, directory.path()), Some(CODE.into()));
}
