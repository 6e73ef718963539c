//! Traces converted to vmtrace's own format: with fewer functions, compressed or not.

use std::process::Command;

use super::{Folder, many, stream};

/// What `report` prints of a file as JSON.
fn report(folder: &Folder, file: &str, options: &[&str]) -> Vec<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
    command.current_dir(&folder.0).args(["report", file, "--format", "json"]).args(options);
    let output = command.output().expect("vmtrace runs");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines().map(str::to_owned).collect()
}

/// Those without the summary, which is of another stream, and losses alone: a loss has the time of the
/// record before it, which may not be there.
fn events(folder: &Folder, file: &str, options: &[&str]) -> (Vec<String>, Vec<String>) {
    let mut lines = report(folder, file, options);
    let last = lines.pop().expect("a summary");
    assert!(last.starts_with("{\"event\":\"end\""), "{last}");
    lines.into_iter().partition(|line| line.starts_with("{\"event\":\"loss\""))
}

// A part of a trace that is another trace than the part of it that is shown would mislead whoever
// gets it.
#[test]
fn a_part_has_what_is_shown_of_the_whole() {
    let folder = Folder::new(&stream());
    for (number, options) in
        [&["-f", "vfs_*"][..], &["-n", "*read"], &["-f", ":mod:ext4", "-f", "timer_*"], &[]]
            .iter()
            .enumerate()
    {
        let part = format!("part{number}.vmt");
        folder.convert(&[&["-o", &part], *options].concat());
        let shown = events(&folder, "trace.vmt", options);
        assert!(shown.0.len() == 1 && shown.1.len() > 3, "{options:?}: {shown:?}");
        assert_eq!(events(&folder, &part, &[]), shown, "{options:?}");
    }
    assert_eq!(report(&folder, "part3.vmt", &[]), report(&folder, "trace.vmt", &[]), "all of it");
}

#[test]
fn what_is_compressed_is_smaller_and_the_same() {
    let whole = {
        let mut writer = many(1_000_000);
        writer.end(&vmtrace::stream::Summary::default()).expect("memory");
        writer.into_inner().expect("memory")
    };
    let folder = Folder::new(&whole);
    folder.convert(&["-o", "small.vmt", "--compress", "zstd:3"]);
    let small = std::fs::read(folder.path("small.vmt")).expect("a file");
    assert!(small.len() * 4 < whole.len(), "{} of {}", small.len(), whole.len());
    assert_eq!(report(&folder, "small.vmt", &[]), report(&folder, "trace.vmt", &[]));
    // And back again.
    std::fs::write(folder.path("trace.vmt"), &small).expect("room");
    folder.convert(&["-o", "again", "--format", "vmt"]);
    assert_eq!(report(&folder, "again", &[]), report(&folder, "small.vmt", &[]));
    let again = std::fs::metadata(folder.path("again")).expect("a file").len();
    assert!(again > small.len() as u64 * 3, "{again}");
}

// What is whole of a torn trace stays torn; what cannot be is said, and no file is left.
#[test]
fn what_cannot_be_is_said() {
    let folder = Folder::new(&stream());
    let refused = |options: &[&str]| {
        let output = folder.vmtrace(options);
        (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    let (code, said) = refused(&["-o", "t.vmt", "--clock", "guest"]);
    assert!(code == Some(2) && said.contains("--clock is for other formats"), "{said}");
    let (code, said) = refused(&["-o", "t.json", "--compress", "zstd"]);
    assert!(code == Some(2) && said.contains("use --format vmt"), "{said}");
    std::fs::write(folder.path("trace.vmt"), b"no trace of anything").expect("room");
    let (code, said) = refused(&["-o", "t.vmt"]);
    assert!(code == Some(1) && said.contains("trace.vmt"), "{said}");
    assert!(!folder.path("t.vmt").exists() && !folder.path("t.json").exists());

    let whole = stream();
    std::fs::write(folder.path("trace.vmt"), &whole[..whole.len() - 100]).expect("room");
    for compress in [&[][..], &["--compress", "zstd"]] {
        let (code, said) = refused(&[&["-o", "t.vmt"], compress].concat());
        assert!(code == Some(1) && said.contains("torn"), "{said}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrace"));
        let output = command.current_dir(&folder.0).args(["report", "t.vmt"]).output().unwrap();
        let (shown, said) = (output.stdout, String::from_utf8(output.stderr).unwrap());
        assert!(output.status.code() == Some(1) && said.contains("torn"), "{said}");
        assert!(String::from_utf8(shown).unwrap().contains("timer_tick"), "{said}");
    }
}
