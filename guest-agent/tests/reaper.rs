//! The reaper that waits for every child, as that of process 1 does. It takes the status of every child of the process,
//! so this test binary has a single test.

use std::io::{self, Read};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use vmtrace_agent::reaper::Reaper;

#[test]
fn statuses_and_orphans() {
    // Orphans of our descendants become our children.
    nix::sys::prctl::set_child_subreaper(true).unwrap();
    let reaper = Reaper::of_everything().unwrap();

    // Many at once: each gets its own status, however soon it comes.
    let threads: Vec<_> = (0..8)
        .map(|number| {
            let reaper = reaper.clone();
            thread::spawn(move || {
                for _ in 0..25 {
                    let script = format!("exit {number}");
                    let mut child = reaper.spawn(Command::new("sh").args(["-c", &script])).unwrap();
                    assert_eq!(child.wait().unwrap().code(), Some(number));
                    // Failing to start has a child too, for a moment: its end is nobody else's.
                    let missing = reaper.spawn(Command::new("/no/such").current_dir("/"));
                    assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }

    // After a time without children as well, and with a real-time signal, which nix cannot report.
    thread::sleep(Duration::from_millis(50));
    let (mut from, to) = io::pipe().unwrap();
    let script = "sleep 60 >/dev/null & echo $!; kill -50 $$";
    let mut command = Command::new("sh");
    let mut child = reaper.spawn(command.args(["-c", script]).stdout(to)).unwrap();
    drop(command);
    assert!(format!("{:?}", child.wait().unwrap()).contains("50"));
    let mut orphan = String::new();
    from.read_to_string(&mut orphan).unwrap();
    let mut kill = reaper.spawn(Command::new("kill").args(["-50", orphan.trim()])).unwrap();
    assert!(kill.wait().unwrap().success());
    let stat = format!("/proc/{}/stat", orphan.trim());
    let end = Instant::now() + Duration::from_secs(30);
    // While it goes, the look itself may fail.
    let is_there = || match std::fs::exists(&stat) {
        Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ESRCH as i32) => false,
        there => there.unwrap(),
    };
    while is_there() {
        assert!(Instant::now() < end, "the orphan {orphan} was not reaped");
        thread::sleep(Duration::from_millis(5));
    }
}
