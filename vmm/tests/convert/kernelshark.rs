//! trace.dat read by KernelShark: by its library, which loads what its windows show, and by itself.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmtrace::stream::Summary;

use super::events::{everything, told};
use super::{Folder, many, python, reader, run, stream};

/// Formats and the files of the tests, whose ending tells KernelShark what they are.
const FORMATS: [(&str, &str); 2] = [("trace.dat", "out6.dat"), ("trace.dat-7", "out7.dat")];

/// The rows that KernelShark lists.
fn rows(file: &Path) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/convert/kernelshark/rows.py");
    let mut command = python();
    for (name, value) in reader("kernelshark").get_envs() {
        command.env(name, value.expect("a value"));
    }
    let text = run(command.arg(script).arg(file));
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn kernelshark_lists_calls_losses_and_marks() {
    let folder = Folder::new(&stream());
    for (format, file) in FORMATS {
        folder.convert(&["-o", file, "--format", format]);
        let row = |at: u64, vcpu: u32, (pid, task): (u32, &str), event: &str, info: &str| {
            let latency = if event == "missed_events" { "" } else { "....." };
            json!([at, vcpu, pid, task, latency, event, info])
        };
        let (nobody, dd, worker) = ((0, "<idle>"), (42, "dd"), (43, "dd worker"));
        let [entry, exit] = ["ftrace/funcgraph_entry", "ftrace/funcgraph_exit"];
        let [print, function] = ["ftrace/print", "ftrace/function"];
        let expected = [
            row(1_000, 0, nobody, print, "attach 0.600 us: 4 sites"),
            row(1_000_000, 0, dd, entry, "             |  ksys_read() {"),
            row(1_002_000, 0, dd, entry, "             |    vfs_read() {"),
            row(1_003_000, 0, dd, function, "timer_tick <-- vfs_read"),
            row(1_004_000, 0, dd, entry, "! 500.000 us |      ext4_read();"),
            row(1_100_000, 1, worker, entry, "  1.000 us   |  vfs_read();"),
            row(1_101_000, 1, worker, exit, "  1.000 us   |  }"),
            // KernelShark puts a loss 10 ns before what follows it.
            row(1_100_990, 1, nobody, "missed_events", "missed_events=123"),
            row(1_101_000, 1, nobody, print, "123 records lost: ring-full"),
            row(1_504_000, 0, dd, exit, "! 500.000 us |      }"),
            row(1_504_000, 0, dd, exit, "! 502.000 us |    }"),
            row(2_400_000, 0, dd, exit, "# 1400.000 us |  }"),
            row(900_000_000, 1, worker, entry, "             |  vfs_read() {"),
            row(950_000_000, 0, nobody, print, "console: a line, \"quoted\""),
        ];
        let rows = rows(&folder.path(file));
        for (row, expected) in rows.iter().zip(&expected) {
            assert_eq!(row, expected, "{format}");
        }
        assert_eq!(rows.len(), expected.len(), "{format}: {rows:#?}");
    }
}

#[test]
fn kernelshark_loads_many_pages() {
    let mut writer = many(1_000_000_000);
    writer.end(&Summary::default()).expect("memory");
    let folder = Folder::new(&writer.into_inner().expect("memory"));
    for (format, file) in FORMATS {
        folder.convert(&["-o", file, "--format", format]);
        let rows = rows(&folder.path(file));
        assert_eq!(rows.len(), 40_000, "{format}");
        let time = |row: &Value| row[0].as_u64().expect("a time");
        assert!(rows.iter().map(time).is_sorted() && time(&rows[39_999]) > 199_000_000_000);
        assert!(
            rows.iter().all(|row| row[5] == "ftrace/function" && row[6] == "ksys_read <-- 0x0")
        );
    }
}

// Who filters and plots by fields in the windows finds the events by system and name.
#[test]
fn kernelshark_lists_events_as_the_report_does() {
    let folder = everything();
    folder.convert(&["-o", "out.txt"]);
    let expected = told(&folder.read("out.txt"));
    for (format, file) in FORMATS {
        folder.convert(&["-o", file, "--format", format]);
        let mut rows = rows(&folder.path(file));
        rows.retain(|row| row[5] != "ftrace/print");
        let lost = rows.iter().position(|row| row[5] == "missed_events").expect("a loss");
        assert_eq!(rows.remove(lost)[6], "missed_events=7", "{format}");
        assert_eq!(rows.len(), expected.len(), "{format}");
        for (row, expected) in rows.iter().zip(&expected) {
            let (event, info) = (row[5].as_str().expect("a name"), row[6].as_str().expect("text"));
            let (system, event) = event.split_once('/').expect("a system");
            match system {
                // libtraceevent's plugin has a form of its own for them.
                "sched" => assert!(info.contains(" ==> ") && expected.contains(event), "{row}"),
                _ => assert_eq!(&format!("{event}: {info}"), expected),
            }
        }
    }
}

/// KernelShark itself, with windows that nobody sees.
struct Windows {
    child: Child,
    said: PathBuf,
}

impl Windows {
    /// Lines of Qt about the screen that is not there, which come with any file.
    const OF_QT: [&str; 3] = ["This plugin does not support ", "QOpenGLWidget: ", "qt.qpa."];

    fn open(folder: &Folder, name: &str) -> Self {
        let shark = reader("kernelshark");
        // Root gets a warning first, which waits for a click.
        let mut command = if is_root() {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-user=1000"]).arg(shark.get_program());
            command
        } else {
            Command::new(shark.get_program())
        };
        for (name, value) in shark.get_envs() {
            let value = value.expect("a value");
            command.env(name, value);
            if name == "LD_LIBRARY_PATH" {
                let folders = std::env::split_paths(value);
                let mut plugins =
                    folders.flat_map(|it| [it.join("qt5/plugins"), it.join("qt6/plugins")]);
                command.env("QT_PLUGIN_PATH", plugins.find(|it| it.exists()).expect("of Qt"));
            }
        }
        let said = folder.path(&format!("{name}.said"));
        command.stderr(File::create(&said).expect("room"));
        command.env("QT_QPA_PLATFORM", "offscreen");
        let home = folder.path("home");
        if !home.exists() {
            std::fs::DirBuilder::new().mode(0o700).create(&home).expect("room");
        }
        for name in ["HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"] {
            command.env(name, &home);
        }
        let child = command.arg("-i").arg(name).current_dir(&folder.0).spawn().expect("it runs");
        Self { child, said }
    }

    /// What it has said of the file.
    fn said(&mut self) -> Vec<String> {
        assert!(self.child.try_wait().expect("a child").is_none(), "it has ended");
        let said = std::fs::read_to_string(&self.said).expect("UTF-8");
        let lines = said.lines().filter(|line| !Self::OF_QT.iter().any(|it| line.starts_with(it)));
        lines.map(str::to_owned).collect()
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether it can be run as somebody who is not root.
fn can_be_shown() -> bool {
    let mut namespace = Command::new("unshare");
    is_root()
        .then(|| namespace.args(["--user", "--map-user=1000", "true"]).output())
        .is_none_or(|tried| tried.is_ok_and(|output| output.status.success()))
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").expect("procfs").uid() == 0
}

#[test]
fn kernelshark_shows_a_file_and_complains_of_nothing() {
    if !can_be_shown() {
        // Its library, which reads the file, was tested above.
        eprintln!(
            "root cannot be anybody else here (user namespaces): KernelShark's windows are not tried"
        );
        return;
    }
    let folder = everything();
    std::fs::write(folder.path("bad.dat"), "no trace of anything").expect("room");
    // How long it takes until a complaint would be there.
    let begin = Instant::now();
    let mut bad = Windows::open(&folder, "bad.dat");
    while !bad.said().iter().any(|line| line.starts_with("ERROR: ")) {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", bad.said());
        std::thread::sleep(Duration::from_millis(20));
    }
    let enough = begin.elapsed() * 3 + Duration::from_secs(1);
    // What this machine makes Qt say of any file, such as of fonts.
    let loading = |line: &str| line.starts_with("Loading ");
    let mut noise = bad.said();
    noise.retain(|line| !line.starts_with("ERROR: ") && !loading(line));
    drop(bad);
    for (format, file) in FORMATS {
        folder.convert(&["-o", file, "--format", format]);
        let mut windows = Windows::open(&folder, file);
        let begin = Instant::now();
        while !windows.said().iter().any(|line| loading(line)) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", windows.said());
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(enough);
        let mut said = windows.said();
        // A plugin is for traces of hosts, and says so of any other.
        said.retain(|line| !noise.contains(line) && !line.starts_with("plugin \"kvm_combo\" "));
        assert_eq!(said, [format!("Loading  \"{file}\"")]);
    }
}
