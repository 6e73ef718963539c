//! What a machine is made of.

use std::io::Write;
use std::sync::Arc;

use super::arch::BootImage;
use crate::devices::virtio::blk::Disk;
use crate::devices::virtio::fs::Fs;
use crate::devices::virtio::vsock::Vsock;

/// Bytes of a kernel image, shared with whoever else reads it (an `Arc<Vec<u8>>` coerces).
pub type ImageBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The smallest memory a machine is made with, in bytes: less than this boots no Linux kernel.
pub const MIN_MEMORY: u64 = 64 << 20;
/// The largest, in bytes.
pub const MAX_MEMORY: u64 = 1 << 40;

/// Everything [`Machine::new`](super::Machine::new) needs to know.
pub struct Config {
    /// Number of vCPUs, at least 1 and at most what KVM offers.
    pub cpus: u8,
    /// Guest memory in bytes, a multiple of 4 KiB and at least [`MIN_MEMORY`].
    pub memory: u64,
    /// The kernel, and by that the way it is booted.
    pub kernel: BootImage,
    /// The initial RAM disk.
    pub initrd: Option<Vec<u8>>,
    /// The whole kernel command line; nothing is added to it. See
    /// [`DEFAULT_CMDLINE`](super::DEFAULT_CMDLINE).
    pub cmdline: String,
    /// Size in bytes of the annex, a multiple of 2 MiB, at most [`MAX_ANNEX`](super::MAX_ANNEX);
    /// 0 for none.
    pub annex: u64,
    /// A second part of the annex, if there shall be one.
    pub far: Option<Far>,
    /// Stop the guest once, at the first write to this model-specific register:
    /// [`Event::MsrWrite`](super::Event::MsrWrite).
    pub watch_msr: Option<u32>,
    /// The socket device, if there shall be one.
    pub vsock: Option<Vsock>,
    /// Block devices in this order, with file systems at most
    /// [`MAX_DISKS`](crate::devices::virtio::blk::MAX_DISKS).
    pub disks: Vec<Disk>,
    /// File system devices.
    pub shares: Vec<Fs>,
}

/// A second part of the annex, in guest-physical memory behind all RAM and devices. To this process
/// it lies right behind the first part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Far {
    /// Its size in bytes, a multiple of 2 MiB.
    pub size: u64,
    /// Its distance from a multiple of 1 GiB, at which it begins: a multiple of 2 MiB.
    pub offset: u64,
}

/// Gets bytes that the guest sends to the agent's port.
pub type AgentSink = Box<dyn FnMut(&[u8]) + Send>;

/// Where the guest's serial output goes.
pub struct ConsoleSinks {
    /// Gets what the guest writes to its console (ttyS0), from a thread of its own: blocking here
    /// never stops a vCPU. When a slow sink has let 4 MiB pile up, further output is dropped.
    pub console: Box<dyn Write + Send>,
    /// Gets what the guest writes to its second serial port (ttyS1), the agent's channel, in
    /// pieces of any size. Called by vCPU threads: it must return promptly and must not call the
    /// machine.
    pub agent: AgentSink,
    /// Gets what the guest writes to its console as well, when it does, byte by byte. Called by
    /// vCPU threads, as `agent`.
    pub heard: AgentSink,
}

impl ConsoleSinks {
    /// Sinks that forget everything.
    #[must_use]
    pub fn none() -> ConsoleSinks {
        ConsoleSinks {
            console: Box::new(std::io::sink()),
            agent: Box::new(|_| ()),
            heard: Box::new(|_| ()),
        }
    }
}
