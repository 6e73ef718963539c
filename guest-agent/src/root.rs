//! Makes a directory of the host the guest's root (`--root`), with changes kept in memory.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::unistd::{chdir, chroot};

use crate::applets;
use crate::command::TOOLS;

/// The tag by which the host shares it.
const TAG: &str = "vmtrace-root";

const LOWER: &str = "/vmtrace/lower";
const MEMORY: &str = "/vmtrace/memory";
const SYSTEM: &str = "/vmtrace/system";

/// What is mounted already and stays: it is the guest's own.
const KEPT: [&str; 5] = ["dev", "proc", "sys", "run", "tmp"];

/// Makes it the root. What was in the initramfs is not there any more, but the applets, in
/// [`TOOLS`].
pub(crate) fn enter() -> Result<(), String> {
    for directory in [LOWER, MEMORY, SYSTEM] {
        make(directory.as_ref())?;
    }
    on(LOWER, Some(TAG), "virtiofs", MsFlags::MS_RDONLY, "")?;
    on(MEMORY, None, "tmpfs", MsFlags::empty(), "mode=755")?;
    let (upper, work) = (format!("{MEMORY}/upper"), format!("{MEMORY}/work"));
    make(upper.as_ref())?;
    make(work.as_ref())?;
    let layers = format!("lowerdir={LOWER},upperdir={upper},workdir={work}");
    on(SYSTEM, None, "overlay", MsFlags::empty(), &layers)?;
    // Before /run and /proc go there.
    keep_tools(TOOLS.as_ref())
        .map_err(|e| format!("cannot put the agent's commands into {TOOLS}: {e}"))?;
    for name in KEPT {
        let (from, to) = (Path::new("/").join(name), Path::new(SYSTEM).join(name));
        make(&to)?;
        moved(&from, &to)?;
    }
    chdir(SYSTEM).map_err(|e| format!("{SYSTEM}: {e}"))?;
    moved(".".as_ref(), "/".as_ref())?;
    chroot(".").and_then(|()| chdir("/")).map_err(|e| format!("cannot change the root: {e}"))
}

fn make(directory: &Path) -> Result<(), String> {
    let made = DirBuilder::new().recursive(true).mode(0o755).create(directory);
    made.map_err(|e| format!("cannot make {}: {e}", directory.display()))
}

fn on(
    target: &str,
    source: Option<&str>,
    kind: &str,
    flags: MsFlags,
    data: &str,
) -> Result<(), String> {
    let source = source.unwrap_or(kind);
    let done = mount(Some(source), target, Some(kind), flags, Some(data));
    done.map_err(|e| {
        format!("cannot mount the root: {kind}: {e} (does the kernel have its module?)")
    })
}

fn moved(from: &Path, to: &Path) -> Result<(), String> {
    let done = mount(Some(from), to, None::<&str>, MsFlags::MS_MOVE, None::<&str>);
    done.map_err(|e| format!("cannot move {}: {e}", from.display()))
}

fn keep_tools(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    fs::copy("/proc/self/exe", directory.join("agent"))?;
    link_tools(directory, "agent".as_ref())
}

/// Puts the commands there that other systems lack, as links to the agent.
pub(crate) fn link_tools(directory: &Path, agent: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    applets::NEW.iter().try_for_each(|name| symlink(agent, directory.join(name)))
}
