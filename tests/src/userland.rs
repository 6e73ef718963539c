//! Commands that guests without a system of their own can run.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::process::Output;

use serde_json::Value;
use vmtrace::emulated::cache_dir;
use vmtrace::initramfs::Archive;
use vmtrace::stream::{Exit, MarkKind};

use crate::args::json;
use crate::cases::Guests;
use crate::live::vmtrace;
use crate::trace::{Trace, WORKLOAD, arch_of, boot, missing, syscall};

impl Guests {
    /// A line that needs a shell gets busybox's, whose programs are those that are meant; the agent's are beside them.
    /// Signals reach what is run: a mask that process 1 had would be theirs.
    ///
    /// The shell is followed: what it began is traced, and what those began, under whatever names, and
    /// nobody else.
    pub fn a_line_that_needs_a_shell_gets_one(&self, name: &str) {
        let run = "ls / | wc -l >/tmp/n && test $(cat /tmp/n) -gt 5 && ls -l /bin/sh | grep -q busybox \
                   && mark counted && ! sh -c 'kill -USR1 $$; exit 0' \
                   && echo lines-counted >/tmp/said && exec cat /tmp/said";
        let args = ["-f", "vfs_*", "--event", "sched:sched_process_fork", "--run", run];
        let args = [&args[..], &["--comm", "sh", "--children", "--overflow", "block"]].concat();
        let (finished, trace) = boot(&self.host, name, &args).unwrap();
        let err = finished.err();
        assert_eq!(finished.end.code, Some(0), "{name}: {err}");
        assert!(err.lines().any(|line| line.trim() == "lines-counted"), "{name}: {err}");
        assert_eq!(trace.summary.exit, Exit::Poweroff, "{name}: {err}");
        assert_eq!(trace.summary.run_status, Some(0), "{name}: {err}");

        let lines = json(&trace);
        let calls = || lines.iter().filter(|line| line["event"] == "entry");
        let pid = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{name}: {value}"));
        let traced: BTreeSet<u64> = calls().map(|call| pid(&call["pid"])).collect();
        let named = |comm: &str| calls().filter(|call| call["comm"] == comm).count();
        for comm in ["sh", "ls", "wc", "cat", "grep", "mark"] {
            assert!(named(comm) > 0, "{name}: {comm} is not traced: {traced:?}");
        }
        // Children come from those that are traced, and the first of all from nobody who is.
        let forks = lines.iter().filter(|line| line["name"] == "sched:sched_process_fork");
        let parents: BTreeSet<u64> = forks.clone().map(|fork| pid(&fork["pid"])).collect();
        let born: BTreeSet<u64> = forks.map(|fork| pid(&fork["fields"]["child_pid"])).collect();
        let strangers: Vec<u64> =
            traced.union(&parents).copied().filter(|pid| !born.contains(pid)).collect();
        let [shell] = strangers[..] else { panic!("{name}: {strangers:?} beside {born:?}") };
        let late = |call: &&Value| call["pid"] == shell && call["comm"] == "cat";
        assert!(calls().any(|call| late(&call)), "{name}: not followed under another name");
        assert!(shell != 1 && traced.is_superset(&born), "{name}: {shell}, {traced:?} of {born:?}");
    }
}

impl Guests {
    /// Of tasks that come by a name in all ways in which they can, and of what they begin, all calls are recorded; of
    /// others none, although their process ids and their memory are those of the first ones by turns.
    pub fn who_is_followed_is_told_to_the_call(&self, name: &str) {
        const ROUNDS: usize = 24;
        // Those from 300 on come several times each.
        const PIDS: u64 = 340;
        // Executed under the name; with a script's name, which begins two others; and named by itself. Processes that
        // execute nothing; and a thread, of a process that is not followed, that executes something.
        let round = format!(
            "{WORKLOAD} getppid 30 0 & {WORKLOAD} getppid 30 1 & /tmp/named getppid 10 0 1; /tmp/other-name; \
             sh -c 'echo -n named >/proc/self/comm; {WORKLOAD} getppid 5 1'; {WORKLOAD} getppid 20 0 1; \
             {WORKLOAD} forks 5 3 & /tmp/named forks 4 2; {WORKLOAD} executes named {WORKLOAD} getppid 3 0; wait; "
        );
        // The guest's own ftrace takes the sites by which tasks are noted, and gives them back.
        let own = "for it in wake_up_new_task __set_task_comm; do echo $it >>/t/set_ftrace_filter; done; \
                   echo function >/t/current_tracer; echo nop >/t/current_tracer; ";
        let half = round.repeat(ROUNDS / 2);
        let run = format!(
            "cp {WORKLOAD} /tmp/named; echo '#!/bin/sh' >/tmp/other-name; chmod 755 /tmp/other-name; \
             echo '{WORKLOAD} getppid 3 0; {WORKLOAD} getppid 4 1 & wait' >>/tmp/other-name; \
             echo {PIDS} >/proc/sys/kernel/pid_max; mkdir /t; mount -t tracefs none /t; {half} {own} {half} true"
        );
        let function = syscall(name, "getppid").unwrap();
        let args = ["-f", &function, "--comm", "named", "--comm", "other-na*", "--children"];
        let more = ["--overflow", "block", "--cpus", "2", "--add", WORKLOAD, "--run", &run];
        let (finished, trace) = boot(&self.host, name, &[&args[..], &more].concat()).unwrap();
        let err = finished.err();
        assert_eq!(finished.end.code, Some(0), "{name}: {err}");
        assert_eq!(trace.summary.run_status, Some(0), "{name}: {err}");
        assert_eq!(missing(&trace.summary), 0, "{name}: {err}");
        let lines = json(&trace);
        let calls = lines.iter().filter(|line| line["event"] == "entry");
        let pids: BTreeSet<u64> = calls.clone().filter_map(|call| call["pid"].as_u64()).collect();
        // So many rounds of more than twenty tasks.
        assert!(pids.last().is_some_and(|&last| last < PIDS), "{name}: {pids:?}");
        // A shell asks once who its parent is, before it is named by itself.
        let of_round = 2 * 10 + (1 + 3 + 4) + 5 + 4 * 2 + 3;
        assert_eq!(calls.count(), ROUNDS * of_round, "{name}: {err}");
    }
}

/// A command in an initramfs of the user's, which stays as it is: compressed and laid out as Debian's are, with a shell; and
/// plain, without one.
pub fn a_command_runs_in_a_users_own_initramfs(kernel: &str) {
    let directory = tempfile::tempdir().unwrap();
    let image = cache_dir().unwrap().join("kernels").join(kernel).join("vmlinuz");
    let trace = directory.path().join("trace");
    let added = directory.path().join("added");
    fs::write(&added, "of --add\n").unwrap();
    let run = |initrd: &[u8], line: &str| -> Output {
        let file = directory.path().join("initrd");
        fs::write(&file, initrd).unwrap();
        let files = [&file, &trace].map(|file| file.to_str().unwrap());
        let mut args = vec!["--initrd", files[0], "-o", files[1], "-f", "vfs_open"];
        args.extend(["--timeout", "300", "--add", added.to_str().unwrap()]);
        vmtrace("boot", &image, &[&args[..], &["--cmdline", "loglevel=5", "--run", line]].concat())
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();

    let line = "cat /tmp/data /run/data /added && test $$ != 1 && ! test -e /started && test -c /dev/null \
                && test -e /sys/kernel && mark in-theirs && readlink /bin && mine";
    let output = run(&debian_style(kernel), line);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert!(err.contains("run status 7") && err.contains("guest poweroff"), "{err}");
    assert_eq!(text(&output.stdout), "of /tmp\nof /run\nof --add\nusr/bin\nmine-is-run\n", "{err}");
    let read = Trace::read(fs::read(&trace).unwrap()).unwrap();
    assert_eq!(read.marks(MarkKind::Agent).unwrap(), ["in-theirs"]);
    assert!(!read.entries.is_empty(), "{err}");

    let mut plain = Archive::new(Vec::new());
    add_busybox(&mut plain, "busybox", kernel);
    plain.file("data", 0o644, 4, &b"o-k\n"[..]).unwrap();
    let output = run(&plain.finish().unwrap(), "busybox cat /data /added; busybox cat /none");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert_eq!(text(&output.stdout), "o-k\nof --add\n", "{err}");
    assert!(err.contains("cat: can't open '/none'") && err.contains("run status 1"), "{err}");
}

fn add_busybox(archive: &mut Archive<Vec<u8>>, path: &str, kernel: &str) {
    let arch = arch_of(kernel).unwrap().name();
    let busybox = cache_dir().unwrap().join("userland").join(arch).join("busybox");
    let busybox = fs::read(busybox).unwrap();
    archive.file(path, 0o755, busybox.len() as u64, &busybox[..]).unwrap();
}

/// An archive for the processor before the system's own, which is compressed, with /bin as a link.
pub(crate) fn debian_style(kernel: &str) -> Vec<u8> {
    let mut early = Archive::new(Vec::new());
    early.file("kernel/x86/microcode/none.bin", 0o644, 0, &b""[..]).unwrap();
    let mut archive = Archive::new(Vec::new());
    add_busybox(&mut archive, "usr/bin/busybox", kernel);
    archive.link("bin", "usr/bin").unwrap();
    for name in ["sh", "cat", "readlink", "stty", "test", "touch"] {
        archive.link(&format!("usr/bin/{name}"), "busybox").unwrap();
    }
    let scripts = [
        ("init", "#!/bin/sh\ntouch /started\n"),
        ("usr/bin/mine", "#!/bin/sh\necho mine-is-run\nexit 7\n"),
    ];
    for (name, script) in scripts {
        archive.file(name, 0o755, script.len() as u64, script.as_bytes()).unwrap();
    }
    for folder in ["tmp", "run"] {
        let content = format!("of /{folder}\n");
        let name = format!("{folder}/data");
        archive.file(&name, 0o644, content.len() as u64, content.as_bytes()).unwrap();
    }
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&archive.finish().unwrap()).unwrap();
    let mut whole = early.finish().unwrap();
    whole.resize(whole.len().next_multiple_of(512), 0);
    whole.extend(gzip.finish().unwrap());
    whole
}
