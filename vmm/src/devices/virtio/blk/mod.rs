//! A block device (virtio 1.2, section 5.2): a raw image or a block device of the host.
//!
//! A [`Disk`] is the file, opened before the guest runs. A [`Block`] makes a device of it. Its
//! thread executes requests one after the other, since reads and writes of files may block. Data
//! passes through a buffer of fixed size, so that the machine can pause while the thread waits for
//! the file. When a write is answered, its data is in the host's page cache; when a flush is
//! answered, it is on the host's disk.

mod disk;
mod request;
mod worker;

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_blk as blk;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vmm_sys_util::eventfd::EventFd;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::{Activation, Broken, VirtioDevice, read_part};
use crate::events::EventLoop;
use crate::sandbox::Thread;

pub use disk::{Disk, DiskError, SECTOR};
use worker::{Server, Shared};

/// The most disks that a machine can have: interrupts are limited.
pub const MAX_DISKS: usize = 16;

/// Descriptors of the queue, and of a request at most.
const QUEUE_SIZE: u16 = 256;
/// Ranges in a request to discard or to clear.
const MAX_RANGES: u32 = 16;
/// Sectors in a range: 1 GiB, which file systems free within a moment.
const MAX_RANGE: u32 = 1 << 21;

const FEATURES_FLUSH: u64 = 1 << blk::VIRTIO_BLK_F_FLUSH;
const FEATURES_DISCARD: u64 = 1 << blk::VIRTIO_BLK_F_DISCARD;
const FEATURES_ZEROES: u64 = 1 << blk::VIRTIO_BLK_F_WRITE_ZEROES;

/// `struct virtio_blk_config` (section 5.2.4), up to what is offered here.
#[derive(Default, IntoBytes, Immutable)]
#[repr(C)]
struct Config {
    capacity: U64,
    size_max: U32,
    seg_max: U32,
    geometry: U32,
    blk_size: U32,
    topology: [U32; 2],
    writeback: u8,
    unused: u8,
    num_queues: U16,
    max_discard_sectors: U32,
    max_discard_seg: U32,
    discard_sector_alignment: U32,
    max_write_zeroes_sectors: U32,
    max_write_zeroes_seg: U32,
    write_zeroes_may_unmap: u8,
    unused1: [u8; 3],
}

/// The device. Dropping it ends its thread when that has finished what it does.
pub struct Block {
    features: u64,
    config: Config,
    shared: Arc<Shared>,
    thread: Option<EventLoop>,
}

impl Block {
    /// A device with its thread; `number` is its place among the disks.
    ///
    /// # Errors
    /// If the system has no descriptors or threads left.
    pub fn new(number: usize, disk: Disk) -> io::Result<Block> {
        let mut device = Block::unserved(number, disk)?;
        let thread = EventLoop::start(Thread::Disk)?;
        thread.handle().add(Box::new(Server(Arc::clone(&device.shared))))?.keep();
        device.thread = Some(thread);
        Ok(device)
    }

    /// A device that does something only when its worker is given its turn.
    ///
    /// # Errors
    /// As [`Block::new`].
    pub fn with_worker(number: usize, disk: Disk) -> io::Result<(Block, Worker)> {
        let device = Block::unserved(number, disk)?;
        let worker = Worker(Arc::clone(&device.shared));
        Ok((device, worker))
    }

    fn unserved(number: usize, disk: Disk) -> io::Result<Block> {
        let mut features = 1 << blk::VIRTIO_BLK_F_SEG_MAX | 1 << blk::VIRTIO_BLK_F_BLK_SIZE;
        let mut config = Config {
            capacity: (disk.bytes() / SECTOR).into(),
            // All but header and status.
            seg_max: u32::from(QUEUE_SIZE - 2).into(),
            blk_size: U32::new(512),
            ..Config::default()
        };
        if disk.writable() {
            features |= FEATURES_FLUSH | FEATURES_ZEROES;
            config.max_write_zeroes_sectors = MAX_RANGE.into();
            config.max_write_zeroes_seg = MAX_RANGES.into();
            config.write_zeroes_may_unmap = disk.discards().into();
        } else {
            features |= 1 << blk::VIRTIO_BLK_F_RO;
        }
        if disk.discards() {
            features |= FEATURES_DISCARD;
            config.max_discard_sectors = MAX_RANGE.into();
            config.max_discard_seg = MAX_RANGES.into();
            config.discard_sector_alignment = U32::new(1);
        }
        // Not its name, which is none of the guest's business.
        let shared = Arc::new(Shared::new(disk, &format!("vmtrace-{number}"))?);
        Ok(Block { features, config, shared, thread: None })
    }
}

impl VirtioDevice for Block {
    fn device_id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_part(self.config.as_bytes(), offset, data);
    }

    fn activate(&mut self, active: Activation) -> Result<(), Broken> {
        self.shared.activate(active)
    }

    fn notify(&mut self, _queue: usize) -> Result<(), Broken> {
        self.shared.bell.ring();
        Ok(())
    }

    fn doorbell(&self) -> Option<&EventFd> {
        Some(self.shared.bell.descriptor())
    }

    fn reset(&mut self) {
        self.shared.reset();
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.shared.end();
        self.thread.take();
        self.shared.reset();
    }
}

/// The thread's part, for those who give it its turns themselves: tests, fuzzers.
pub struct Worker(Arc<Shared>);

impl Worker {
    /// Does what there is to do now.
    pub fn turn(&mut self) {
        self.0.serve();
    }
}
