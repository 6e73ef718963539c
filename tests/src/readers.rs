//! Programs of other projects that read vmtrace's output, from `images/readers`.

use std::path::Path;
use std::process::Command;

use vmtrace::emulated::cache_dir;

/// Runs `trace-cmd report` on a file; returns what it says.
///
/// # Panics
/// When it is not there, or refuses the file.
#[must_use]
pub fn trace_cmd_report(file: &Path) -> String {
    let root = cache_dir().unwrap().join("readers/usr");
    let own = root.join("bin/trace-cmd");
    let mut command = Command::new(if own.exists() { &own } else { Path::new("trace-cmd") });
    if own.exists() {
        let folders = std::fs::read_dir(root.join("lib")).unwrap();
        let folders = folders.map(|folder| folder.unwrap().path()).filter(|it| it.is_dir());
        command.env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap());
    }
    let output = command.arg("report").arg("-i").arg(file).output();
    let output = output.expect("trace-cmd is not there: run images/readers (scripts/test does)");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
