//! What the threads that deal with a guest may do, and the results of forbidden operations.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use vmtrace::sandbox::{EXIT_CODE, Thread};

fn attempt(thread: Thread, deed: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
    command.args(["sandbox", thread.name()]).args(deed).stdin(Stdio::null());
    command.env("RUST_BACKTRACE", "full").output().unwrap()
}

/// What it exited with, as shells have it, and what it said.
fn end(thread: Thread, deed: &[&str]) -> (Option<i32>, String) {
    let output = attempt(thread, deed);
    let signal = output.status.signal().map(|signal| 128 + signal);
    (output.status.code().or(signal), String::from_utf8(output.stderr).unwrap())
}

/// Whether this machine's kernel has seccomp filters. Where it has none (an old kernel, an emulation
/// of programs alone) there is nothing to be tested; the emulated host has them in any case.
fn filters() -> bool {
    let (code, said) = end(Thread::Vcpu, &["work"]);
    assert_eq!(code, Some(0), "{said}");
    let missing = said.contains("no seccomp filters");
    if missing {
        eprintln!("not tested: {said}");
    }
    !missing
}

fn landlock() -> bool {
    let (_, said) =
        end(Thread::Controller, &["read", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")]);
    let missing = said.contains("done");
    if missing {
        eprintln!("not tested: no Landlock here");
    }
    !missing
}

// What somebody would do who has got hold of a thread.
#[test]
fn what_is_forbidden_ends_the_process_and_is_named() {
    if !filters() {
        return;
    }
    for thread in Thread::ALL {
        for (deed, call) in [
            ("program", "(execve)"),
            ("process", "(clone)"),
            ("internet", "(socket)"),
            ("code", "(mmap)"),
            ("trace", "(ptrace)"),
            ("machine", "(ioctl)"),
            ("handler", "(rt_sigaction)"),
            ("signal", "(tgkill)"),
        ] {
            let (code, said) = end(thread, &[deed]);
            assert_eq!(code, Some(EXIT_CODE.into()), "{thread:?} {deed}: {said}");
            let line = said.lines().find(|line| line.starts_with("vmtrace: error: sandbox: "));
            let line = line.unwrap_or_else(|| panic!("{thread:?} {deed}: {said}"));
            assert!(line.contains(call) && line.contains(thread.name()), "{line}");
            assert!(line.contains("--no-seccomp"), "{line}");
        }
    }
}

// Else runs end that nobody attacks.
#[test]
fn what_every_thread_does_is_allowed() {
    for thread in Thread::ALL {
        let (code, said) = end(thread, &["work"]);
        assert_eq!((code, said.lines().last()), (Some(0), Some("done")), "{thread:?}: {said}");
        // With a backtrace, whose files cannot be opened.
        let (code, said) = end(thread, &["panic"]);
        assert_eq!(code, Some(1), "{thread:?}: {said}");
        assert!(said.contains("as it was told to"), "{thread:?}: {said}");
        assert!(said.contains("refused: the thread panicked"), "{thread:?}: {said}");
    }
}

// Any of them may be the one that ends a run, and a terminal that stays raw is of no use to anybody.
#[test]
fn terminals_are_restored_where_they_are_raw_and_left_alone_elsewhere() {
    if !filters() {
        return;
    }
    for thread in Thread::ALL {
        let (code, said) = end(thread, &["terminal"]);
        assert_eq!(code, Some(EXIT_CODE.into()), "{thread:?}: {said}");
        assert!(said.contains("(ioctl)"), "{said}");
        // It gets as far as the descriptor, of which there is none.
        let (code, said) = end(thread, &["terminal", "--terminal"]);
        assert_eq!(code, Some(1), "{thread:?}: {said}");
        assert!(said.contains("Bad file descriptor"), "{said}");
    }
}

#[test]
fn each_kind_of_thread_has_its_own_rights() {
    if !filters() {
        return;
    }
    let killed = Some(EXIT_CODE.into());
    for thread in Thread::ALL {
        // There is no descriptor: whoever may ask is told so.
        let (code, said) = end(thread, &["guest"]);
        if thread == Thread::Vcpu {
            assert!(code == Some(1) && said.contains("Bad file descriptor"), "{said}");
        } else {
            assert_eq!(code, killed, "{thread:?}: {said}");
        }
        // By clone, since the library's first attempt is refused; it blocks signals meanwhile, so
        // that there are no last words.
        let (code, said) = end(thread, &["thread"]);
        let starts = matches!(thread, Thread::Controller | Thread::Relay);
        assert_eq!(code, if starts { Some(0) } else { killed }, "{thread:?}: {said}");
        let (code, said) = end(thread, &["read", "/proc/self/maps"]);
        let why = match thread {
            Thread::Controller => "Permission denied",
            _ => "Function not implemented",
        };
        if thread != Thread::Controller || landlock() {
            assert!(code == Some(1) && said.contains(why), "{thread:?}: {said}");
        }
    }
}

// A controller that is not the user's any more reaches no file of his but those of the run.
#[test]
fn files_are_out_of_reach_that_the_run_does_not_need() {
    if !landlock() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(at("sockets")).unwrap();
    for file in ["there", "other", "sockets/socket"] {
        fs::write(at(file), "precious").unwrap();
    }
    let controller = |deed: &[&str]| end(Thread::Controller, deed);
    let refused = |deed: &[&str]| {
        let (code, said) = controller(deed);
        assert!(code == Some(1) && said.contains("Permission denied"), "{deed:?}: {said}");
    };
    let done = |deed: &[&str]| {
        let (code, said) = controller(deed);
        assert_eq!(code, Some(0), "{deed:?}: {said}");
    };
    let kept = |name: &str| fs::read_to_string(at(name)).unwrap() == "precious";
    refused(&["write", &at("other")]);
    refused(&["write", &at("other"), "--written", &at("there")]);
    refused(&["remove", &at("other"), "--cleared", &at("sockets")]);
    refused(&["read", &at("other"), "--written", &at("other")]);
    refused(&["write", &at("sockets/new"), "--cleared", &at("sockets")]);
    assert!(kept("other"));
    done(&["write", &at("there"), "--written", &at("there")]);
    assert!(!kept("there"));
    done(&["write", &at("new"), "--written", &at("new")]);
    done(&["remove", &at("sockets/socket"), "--cleared", &at("sockets")]);
    assert!(!Path::new(&at("sockets/socket")).exists());
    // A pipe, for which there are no rules, here as there.
    done(&["write", "/dev/stdout", "--written", "/dev/stdout"]);
}

#[test]
fn the_way_out_is_one() {
    for thread in Thread::ALL {
        for deed in ["internet", "code"] {
            let (code, said) = end(thread, &[deed, "--no-seccomp"]);
            assert_eq!(code, Some(0), "{thread:?} {deed}: {said}");
        }
    }
}
