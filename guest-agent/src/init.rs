//! Process 1: prepares a minimal system, runs one command line, reports its result, and powers off.
//! It never returns.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::channel::{Channel, drain_console};
use crate::command::{self, Status, TOOLS};
use crate::console::{self, Console};
use crate::output;
use crate::protocol::AGENT_PORT;
use crate::reaper::{Reaper, start_thread};
use crate::root;
use crate::server::{Listener, Server};

/// The command line to run; absent: none was asked for.
const RUN: &str = "/vmtrace/run";
/// Modules to load, in the order of their names.
const MODULES: &str = "/vmtrace/modules";

/// A power-off does not wait longer for a host that takes nothing of the command's output.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(10);

/// The agent in somebody else's initramfs, where it is not `/init`. Beside it are its orders.
const BESIDE: &str = "/vmtrace/agent";

/// Says that the root is a directory of the host, and what process 1 is there, if not the agent.
const ROOT: &str = "/vmtrace/root";
/// Shares to mount: a line for each, with its tag, and rw or ro.
const SHARES: &str = "/vmtrace/shares";

struct Mount {
    kind: &'static str,
    target: &'static str,
    data: &'static str,
    /// A kernel may be built without it.
    optional: bool,
    /// Memory: in somebody else's initramfs there may be files, which it would hide.
    empty: bool,
}

const MOUNTS: [Mount; 6] = [
    Mount { kind: "devtmpfs", target: "/dev", data: "mode=755", optional: false, empty: false },
    Mount { kind: "proc", target: "/proc", data: "", optional: false, empty: false },
    Mount { kind: "sysfs", target: "/sys", data: "", optional: false, empty: false },
    Mount { kind: "tmpfs", target: "/run", data: "mode=755", optional: false, empty: true },
    Mount { kind: "tmpfs", target: "/tmp", data: "mode=1777", optional: false, empty: true },
    Mount {
        kind: "tracefs",
        target: "/sys/kernel/tracing",
        data: "",
        optional: true,
        empty: false,
    },
];

/// The life of process 1.
pub(crate) fn main() -> ! {
    let mount_errors = mount_all();
    let console_error = use_console().err();
    let mut channel = Channel::open();
    report_panics();
    channel.hello();
    for error in mount_errors {
        channel.error(&error);
    }
    if let Some(e) = console_error {
        channel.error(&format!("/dev/console: {e}"));
    }
    for error in load_modules(Path::new(MODULES)) {
        channel.error(&error);
    }
    // What is in the initramfs is not to be seen any more in another root.
    let (run, shares) = (fs::read(RUN), fs::read_to_string(SHARES));
    let output = fs::read(output::ASKED);
    let console = fs::read_to_string(console::ASKED).ok();
    let console = console.as_deref().and_then(Console::parse);
    let entered = enter_root();
    if Path::new(BESIDE).exists()
        && let Err(e) = root::link_tools(TOOLS.as_ref(), BESIDE.as_ref())
    {
        channel.error(&format!("cannot put the agent's commands into {TOOLS}: {e}"));
    }
    for error in mount_shares(shares) {
        channel.error(&error);
    }
    match entered {
        Ok(Some(init)) => {
            let error = Command::new(&init).env("PATH", command::PATH).exec();
            channel.error(&format!("--init {}: {error}", init.display()));
            power_off(&mut channel);
        }
        Ok(None) => {}
        Err(error) => {
            // In the wrong root nothing is as it was meant.
            channel.error(&error);
            channel.exited(command::CANNOT_RUN.into());
            power_off(&mut channel);
        }
    }
    power_off_when_told();
    let reaper = match Reaper::of_everything() {
        Ok(reaper) => reaper,
        Err(e) => {
            channel.error(&format!("cannot start a thread: {e}"));
            power_off(&mut channel);
        }
    };
    let serves = match serve(&reaper) {
        Ok(()) => true,
        Err(reason) => {
            channel.no_vsock(&reason);
            false
        }
    };
    if let Err(reason) = output::begin(output) {
        channel.output_to_console(&reason);
    }
    let result = match (run, console) {
        (Ok(line), _) => Some(command::run(&reaper, &command::line_of(&line))),
        (Err(e), _) if e.kind() != io::ErrorKind::NotFound => Some(Err(format!("{RUN}: {e}"))),
        (Err(_), Some(console)) => Some(console.shell(&reaper)),
        (Err(_), None) if command::has_own_shell() => Some(command::shell(&reaper)),
        // Whoever connects says what happens, until the machine is stopped or `poweroff` was run.
        (Err(_), None) if serves => idle(),
        (Err(_), None) => None,
    };
    // However long the host takes: the command would wait for it as well.
    output::finish(None);
    match result {
        Some(Ok(Status::Exited(code))) => channel.exited(code),
        Some(Ok(Status::Signaled(signal))) => channel.signaled(signal),
        Some(Err(error)) => {
            channel.error(&error);
            channel.exited(command::CANNOT_RUN.into());
        }
        None => {}
    }
    power_off(&mut channel)
}

/// Serves the host over vsock, if the guest has it, beside everything else.
fn serve(reaper: &Arc<Reaper>) -> Result<(), String> {
    let listener = Listener::bind(AGENT_PORT)?;
    let server = Server::new(Arc::clone(reaper));
    let thread = start_thread("vsock", move || {
        let error = listener.serve(&server, |line| Channel::open().error(line));
        Channel::open().error(&format!("vsock: {error}"));
    });
    thread.map_err(|e| format!("cannot start a thread: {e}"))
}

/// The applet `poweroff`, and `poweroff` and `halt` within busybox's shell, ask process 1 by a signal. By a handler: a
/// mask is inherited, and signals would be blocked in whatever is run.
fn power_off_when_told() {
    if let Ok(mut told) = Signals::new([SIGUSR1, SIGUSR2]) {
        let _ = start_thread("poweroff", move || {
            if told.forever().next().is_some() {
                power_off(&mut Channel::open());
            }
        });
    }
}

fn mount_all() -> Vec<String> {
    let mut errors = Vec::new();
    let is_guest = Path::new(BESIDE).exists();
    for m in MOUNTS {
        // /sys/kernel/tracing is sysfs's to make; the others may be missing in somebody else's initramfs.
        if !Path::new(m.target).exists() {
            let _ = fs::DirBuilder::new().recursive(true).mode(0o755).create(m.target);
        }
        if is_guest && m.empty {
            continue;
        }
        let flags = if m.kind == "devtmpfs" {
            MsFlags::MS_NOSUID
        } else {
            MsFlags::MS_NOSUID | MsFlags::MS_NODEV
        };
        match mount(Some(m.kind), m.target, Some(m.kind), flags, Some(m.data)) {
            Ok(()) | Err(nix::Error::EBUSY) => {}
            Err(_) if m.optional => {}
            Err(e) => errors.push(format!("cannot mount {} at {}: {e}", m.kind, m.target)),
        }
    }
    errors
}

/// Goes to the root that was asked for, if one was; what is process 1 there, if not the agent.
fn enter_root() -> Result<Option<PathBuf>, String> {
    let init = match fs::read(ROOT) {
        Ok(init) => command::line_of(&init),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("{ROOT}: {e}")),
    };
    root::enter()?;
    Ok((!init.is_empty()).then(|| init.into()))
}

/// Mounts shares of the host below /mnt.
fn mount_shares(list: io::Result<String>) -> Vec<String> {
    let list = match list {
        Ok(list) => list,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(e) => return vec![format!("{SHARES}: {e}")],
    };
    let shares = list.lines().filter_map(|line| line.split_once(' '));
    let mounted = shares.map(|(tag, how)| {
        let target = Path::new("/mnt").join(tag);
        let _ = fs::DirBuilder::new().recursive(true).mode(0o755).create(&target);
        let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        flags.set(MsFlags::MS_RDONLY, how != "rw");
        let done = mount(Some(tag), &target, Some("virtiofs"), flags, None::<&str>);
        done.map_err(|e| format!("cannot mount share {tag} at {}: {e}", target.display()))
    });
    mounted.filter_map(Result::err).collect()
}

/// The kernel gives process 1 its console only if the initramfs has a node for it.
fn use_console() -> io::Result<()> {
    let console = OpenOptions::new().read(true).write(true).open("/dev/console");
    let (file, error) = match console {
        Ok(file) => (file, None),
        // Without any console there must still be a standard input and output.
        Err(e) => (OpenOptions::new().read(true).write(true).open("/dev/null")?, Some(e)),
    };
    nix::unistd::dup2_stdin(&file)?;
    nix::unistd::dup2_stdout(&file)?;
    nix::unistd::dup2_stderr(&file)?;
    error.map_or(Ok(()), Err)
}

fn load_modules(dir: &Path) -> Vec<String> {
    let mut files: Vec<PathBuf> = match fs::read_dir(dir) {
        Ok(entries) => entries.flatten().map(|e| e.path()).collect(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(e) => return vec![format!("{}: {e}", dir.display())],
    };
    files.sort();
    files
        .iter()
        .filter_map(|file| load_module(file).err().map(|e| format!("module {}: {e}", name(file))))
        .collect()
}

fn load_module(path: &Path) -> io::Result<()> {
    match finit_module(File::open(path)?, c"", ModuleInitFlags::empty()) {
        Ok(()) | Err(nix::Error::EEXIST) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The end of process 1 is a kernel panic, so a defect of ours must end in a power-off instead.
fn report_panics() {
    std::panic::set_hook(Box::new(|info| {
        let mut channel = Channel::open();
        channel.error(&format!("defect in the agent: {info}"));
        power_off_now(&mut channel);
    }));
}

fn power_off(channel: &mut Channel) -> ! {
    output::finish(Some(OUTPUT_TIMEOUT));
    power_off_now(channel);
}

/// Without a look at the command's output, of which nobody knows who has it.
fn power_off_now(channel: &mut Channel) -> ! {
    channel.drain();
    drain_console();
    nix::unistd::sync();
    let _ = reboot(RebootMode::RB_POWER_OFF);
    // A machine that cannot be powered off: be idle rather than end.
    idle()
}

fn idle() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}
