//! The built-in initramfs, with the agent as `/init`, and the archive that is added to a user's initramfs.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::archive::Archive;
use crate::error::Error;
use crate::modules::LoadedModule;
use crate::userland::{APPLETS, Userland};

/// The agent for guests of the architecture that vmtrace is built for.
pub static AGENT: &[u8] = include_bytes!(env!("VMTRACE_AGENT"));

/// The folder with what the agent has to do.
const ORDERS: &str = "vmtrace";

/// The agent in a user's own initramfs, whose `/init` stays what it is: `rdinit=` starts it.
pub const AGENT_BESIDE: &str = "/vmtrace/agent";

/// Which file the agent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentAs {
    /// `/init` of the built-in initramfs, with its applets in `/bin`.
    Init,
    /// [`AGENT_BESIDE`], and no other file: the rest is the user's.
    Beside,
}

/// The built-in initramfs: agent, added files, modules, and the command line to run.
#[derive(Debug, Default)]
pub struct Builder {
    run: Option<String>,
    output: Option<bool>,
    files: Vec<PathBuf>,
    modules: Vec<LoadedModule>,
    userland: Option<Userland>,
    shares: String,
    root: Option<String>,
    console: Option<String>,
    without_agent: bool,
}

/// Puts the agent into an initramfs that was made [`Builder::without_agent`].
pub fn add_agent(initramfs: &[u8], role: AgentAs) -> Result<Vec<u8>, Error> {
    let mut archive = Archive::new(Vec::new());
    agent(&mut archive, role)?;
    Ok(before(archive.finish()?, initramfs))
}

/// The kernel takes several archives, one behind the other. The first one is not compressed, so that the kernel can
/// read it whatever the other is.
fn before(mut first: Vec<u8>, second: &[u8]) -> Vec<u8> {
    // It looks for the next one at multiples of 4.
    first.resize(first.len().next_multiple_of(4), 0);
    first.extend_from_slice(second);
    first
}

fn agent(archive: &mut Archive<Vec<u8>>, role: AgentAs) -> Result<(), Error> {
    if role == AgentAs::Beside {
        return archive.bytes(AGENT_BESIDE, 0o755, AGENT);
    }
    archive.bytes("init", 0o755, AGENT)?;
    for applet in APPLETS {
        archive.link(&format!("bin/{applet}"), "../init")?;
    }
    Ok(())
}

impl Builder {
    /// An initramfs whose agent has nothing to run.
    pub fn new() -> Self {
        Self::default()
    }

    /// The command line that the agent runs.
    #[must_use]
    pub fn run(mut self, line: Option<impl Into<String>>) -> Self {
        self.run = line.map(Into::into);
        self
    }

    /// The host takes what that writes, by vsock, both streams `apart` or as standard error.
    #[must_use]
    pub fn output(mut self, apart: bool) -> Self {
        self.output = Some(apart);
        self
    }

    /// Puts a file at `/NAME`, executable if it is so here. vmtrace itself goes to `/bin`, since `/vmtrace` is the
    /// folder of the agent's orders.
    #[must_use]
    pub fn add_file(mut self, file: impl Into<PathBuf>) -> Self {
        self.files.push(file.into());
        self
    }

    /// Modules for the agent to load, in this order; see [`Modules::resolve`](crate::Modules::resolve).
    #[must_use]
    pub fn modules(mut self, modules: Vec<LoadedModule>) -> Self {
        self.modules.extend(modules);
        self
    }

    /// Programs beside the agent's applets, with a shell.
    #[must_use]
    pub fn userland(mut self, userland: Option<Userland>) -> Self {
        self.userland = userland;
        self
    }

    /// Shares for the agent to mount, by their tags, and whether they can be written.
    #[must_use]
    pub fn shares(mut self, shares: impl IntoIterator<Item = (String, bool)>) -> Self {
        for (tag, writable) in shares {
            self.shares += &format!("{tag} {}\n", if writable { "rw" } else { "ro" });
        }
        self
    }

    /// A directory of the host, the share `vmtrace-root`, is the root, where this is process 1 (else
    /// the agent). `None`: the initramfs is the root.
    #[must_use]
    pub fn root(mut self, init: Option<impl Into<String>>) -> Self {
        self.root = init.map(Into::into);
        self
    }

    /// A user sits at the guest's console, with a terminal of so many rows and columns (0: nobody
    /// knows) and of this type: the agent runs a shell there.
    #[must_use]
    pub fn console(mut self, terminal: Option<(u16, u16, &str)>) -> Self {
        self.console = terminal.map(|(rows, columns, kind)| format!("{rows} {columns} {kind}"));
        self
    }

    /// The agent is added later, by [`add_agent`] of a vmtrace for the guest's architecture.
    #[must_use]
    pub fn without_agent(mut self) -> Self {
        self.without_agent = true;
        self
    }

    /// Makes the archive (uncompressed newc).
    pub fn build(&self) -> Result<Vec<u8>, Error> {
        let mut archive = Archive::new(Vec::new());
        for dir in ["dev", "proc", "sys", "run", "tmp", "bin", "vmtrace"] {
            archive.directory(dir, 0o755)?;
        }
        // The kernel opens it for process 1 before anything is mounted.
        archive.char_device("dev/console", 0o600, (5, 1))?;
        if self.without_agent {
            archive.reserve("init");
        } else {
            agent(&mut archive, AgentAs::Init)?;
        }
        if let Some(userland) = &self.userland {
            userland.add(&mut archive)?;
        }
        for file in &self.files {
            add(&mut archive, file, |name| match name {
                ORDERS => format!("bin/{name}"),
                _ => name.to_owned(),
            })?;
        }
        self.orders(&mut archive)?;
        archive.finish()
    }

    /// A user's own initramfs, and before that an archive with the agent, what the agent has to do, and added files.
    /// There is no userland in it. A file of the same name in the user's replaces an added one.
    pub fn build_before(&self, initramfs: &[u8]) -> Result<Vec<u8>, Error> {
        let mut archive = Archive::new(Vec::new());
        archive.directory("vmtrace", 0o755)?;
        if !self.without_agent {
            agent(&mut archive, AgentAs::Beside)?;
        }
        self.orders(&mut archive)?;
        for file in &self.files {
            // Not to /bin here: a directory of that name would break an initramfs whose /bin is a link.
            add(&mut archive, file, str::to_owned)?;
        }
        Ok(before(archive.finish()?, initramfs))
    }

    /// What the agent has to do.
    fn orders(&self, archive: &mut Archive<Vec<u8>>) -> Result<(), Error> {
        for (n, module) in self.modules.iter().enumerate() {
            archive.bytes(
                &format!("vmtrace/modules/{n:03}-{}.ko", module.name),
                0o644,
                &module.content,
            )?;
        }
        if !self.shares.is_empty() {
            archive.bytes("vmtrace/shares", 0o644, self.shares.as_bytes())?;
        }
        if let Some(init) = &self.root {
            archive.bytes("vmtrace/root", 0o644, init.as_bytes())?;
        }
        if let Some(console) = &self.console {
            archive.bytes("vmtrace/console", 0o644, console.as_bytes())?;
        }
        if let Some(run) = &self.run {
            archive.bytes("vmtrace/run", 0o644, run.as_bytes())?;
        }
        if let Some(apart) = self.output {
            let how: &[u8] = if apart { b"apart" } else { b"together" };
            archive.bytes("vmtrace/output", 0o644, how)?;
        }
        Ok(())
    }
}

fn add(
    archive: &mut Archive<Vec<u8>>,
    path: &Path,
    place: impl Fn(&str) -> String,
) -> Result<(), Error> {
    let name =
        path.file_name().and_then(|n| n.to_str()).ok_or_else(|| Error::NoName(path.to_owned()))?;
    let open = |reason| Error::Open { path: path.to_owned(), reason };
    // Before it is opened: a FIFO would wait for somebody to write, and a device may do anything.
    if !fs::metadata(path).map_err(open)?.is_file() {
        return Err(Error::NotAFile(path.to_owned()));
    }
    let file = File::open(path).map_err(open)?;
    let metadata = file.metadata().map_err(open)?;
    let mode = if metadata.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 };
    archive.file(&place(name), mode, metadata.len(), file)
}

#[cfg(test)]
mod tests;
