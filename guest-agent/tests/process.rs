//! The agent as an ordinary process: command lines, applets, exit statuses.

use std::process::{Command, Output};

fn agent(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmtrace-agent")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_command_line_gives_its_status_and_output() {
    let out = agent(&["run", "echo a 'b c' && exit 7; echo d"]);
    // A system that runs tests has a shell.
    assert_eq!((out.status.code(), text(&out.stdout)), (Some(7), "a b c\n"));
    assert_eq!(agent(&["run", "kill -9 $$"]).status.code(), Some(137));
    assert_eq!(agent(&["run", "kill -64 $$"]).status.code(), Some(128 + 64));
    assert_eq!(agent(&["run", "no-such-program"]).status.code(), Some(127));
}

#[test]
fn applets() {
    let dir = std::env::temp_dir().join(format!("vmtrace-agent-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let file = dir.join("file");
    let file = file.to_str().unwrap();
    assert!(agent(&["applet", "write", file, "some text"]).status.success());
    assert_eq!(text(&agent(&["applet", "cat", file, file]).stdout), "some text\nsome text\n");
    assert_eq!(text(&agent(&["applet", "ls", dir.to_str().unwrap()]).stdout), "file\n");
    std::fs::remove_dir_all(&dir).unwrap();

    assert_eq!(text(&agent(&["applet", "echo", "a", "b"]).stdout), "a b\n");
    assert_eq!(text(&agent(&["applet", "echo", "-n", "a"]).stdout), "a");
    assert!(agent(&["applet", "sleep", "0.01"]).status.success());
    assert_eq!(agent(&["applet", "sleep", "-1"]).status.code(), Some(2));
    assert_eq!(agent(&["applet", "false"]).status.code(), Some(1));
    let missing = agent(&["applet", "cat", "/no/such/file"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("/no/such/file"));
}

#[test]
fn serving_has_no_other_options() {
    for options in [&["serve", "--port"][..], &["serve", "--port", "x"], &["serve", "1025"]] {
        assert_eq!(agent(options).status.code(), Some(2), "{options:?}");
    }
}

#[test]
fn marks_are_one_line() {
    for text in ["", "a\nb", &"x".repeat(201)] {
        let out = agent(&["mark", text]);
        assert_eq!(out.status.code(), Some(1), "{text:?}");
        assert!(text.len() < 200 || self::text(&out.stderr).contains("201 bytes, 200 are allowed"));
    }
}
