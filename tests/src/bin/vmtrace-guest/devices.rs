//! A guest whose root drives virtio devices itself, beside its kernel: by their registers (`/dev/mem`,
//! which with `iomem=relaxed` has also those that a driver uses), with queues in memory of its own.

use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

/// Registers (virtio 1.2, 4.2.2).
pub(crate) mod reg {
    pub(crate) const DEVICE_FEATURES: usize = 0x10;
    pub(crate) const DEVICE_FEATURES_SEL: usize = 0x14;
    pub(crate) const DRIVER_FEATURES: usize = 0x20;
    pub(crate) const DRIVER_FEATURES_SEL: usize = 0x24;
    pub(crate) const QUEUE_SEL: usize = 0x30;
    pub(crate) const QUEUE_NUM_MAX: usize = 0x34;
    pub(crate) const QUEUE_NUM: usize = 0x38;
    pub(crate) const QUEUE_READY: usize = 0x44;
    pub(crate) const QUEUE_NOTIFY: usize = 0x50;
    pub(crate) const INTERRUPT_STATUS: usize = 0x60;
    pub(crate) const INTERRUPT_ACK: usize = 0x64;
    pub(crate) const STATUS: usize = 0x70;
    /// Of descriptors, of what is available and of what is used: low half, then high half.
    pub(crate) const RINGS: [usize; 3] = [0x80, 0x90, 0xa0];
}
const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const DEVICE_ID: usize = 8;
/// Device status (virtio 1.2, 2.1), by steps.
pub(crate) const DRIVER: u32 = 1 | 2;
pub(crate) const FEATURES_OK: u32 = DRIVER | 8;
pub(crate) const DRIVER_OK: u32 = FEATURES_OK | 4;
pub(crate) const NEEDS_RESET: u32 = 64;
/// `VIRTIO_F_VERSION_1`.
pub(crate) const VERSION_1: u64 = 1 << 32;
/// Descriptor flags.
const WRITE: u64 = 2;
const ENTROPY: u32 = 4;
pub(crate) const PAGE: usize = 4096;
/// How long a device may take for one request.
const PATIENCE: Duration = Duration::from_secs(120);

/// A device's registers.
pub(crate) struct Device(&'static [AtomicU32]);

impl Device {
    /// All that the machine has.
    pub(crate) fn all() -> Result<Vec<Self>> {
        let memory =
            OpenOptions::new().read(true).write(true).open("/dev/mem").context("/dev/mem")?;
        let mut places = places_of_acpi()?;
        if places.is_empty() {
            places = places_of_tree(Path::new("/sys/firmware/devicetree/base"))?;
        }
        let mut devices: Vec<Self> = Vec::new();
        for start in places {
            let at = libc::off_t::try_from(start)?;
            // SAFETY: a new mapping at a place of the kernel's choice, which stays.
            let address = unsafe {
                let (rights, fd) = (libc::PROT_READ | libc::PROT_WRITE, memory.as_raw_fd());
                libc::mmap(std::ptr::null_mut(), PAGE, rights, libc::MAP_SHARED, fd, at)
            };
            let failed = || format!("registers: {}", std::io::Error::last_os_error());
            ensure!(address != libc::MAP_FAILED, failed());
            // SAFETY: a page is mapped there for good; any bits are a word.
            let device = Self(unsafe { slice::from_raw_parts(address.cast(), PAGE / 4) });
            ensure!(device.get(0) == MAGIC, "no device at {start:#x}");
            devices.push(device);
        }
        Ok(devices)
    }

    pub(crate) fn id(&self) -> u32 {
        self.get(DEVICE_ID)
    }

    /// KVM for riscv64 (seen with 6.12) keeps what is loaded from a device into the register of zeroes, and from then
    /// on has that stored where the guest stores zero: values that nobody wants must go to another one.
    pub(crate) fn get(&self, register: usize) -> u32 {
        black_box(self.0[register / 4].load(Ordering::SeqCst))
    }

    pub(crate) fn set(&self, register: usize, value: u32) {
        // Queues are in memory before the device looks; no locked instruction goes to a register.
        fence(Ordering::SeqCst);
        self.0[register / 4].store(value, Ordering::Relaxed);
    }

    /// Begins anew, with those of its features that `wanted` has.
    pub(crate) fn begin(&self, wanted: u64) {
        self.set(reg::STATUS, 0);
        self.set(reg::STATUS, DRIVER);
        for half in [0, 1] {
            self.set(reg::DEVICE_FEATURES_SEL, half);
            self.set(reg::DRIVER_FEATURES_SEL, half);
            let wanted = low(wanted >> (32 * half));
            self.set(reg::DRIVER_FEATURES, self.get(reg::DEVICE_FEATURES) & wanted);
        }
        self.set(reg::STATUS, FEATURES_OK);
    }

    /// Says where a queue is: its descriptors, what is available, what is used.
    pub(crate) fn queue(&self, number: u32, size: u32, rings: [u64; 3]) {
        self.set(reg::QUEUE_SEL, number);
        self.set(reg::QUEUE_NUM, size);
        for (register, address) in reg::RINGS.into_iter().zip(rings) {
            self.set(register, low(address));
            self.set(register + 4, low(address >> 32));
        }
        self.set(reg::QUEUE_READY, 1);
    }
}

/// Physical addresses of registers, as ACPI tables call such devices.
fn places_of_acpi() -> Result<BTreeSet<u64>> {
    let iomem = fs::read_to_string("/proc/iomem")?;
    let places = iomem.lines().filter(|line| line.contains("LNRO0005"));
    let places = places.filter_map(|line| line.trim().split_once('-'));
    places.map(|(start, _)| Ok(u64::from_str_radix(start, 16)?)).collect()
}

/// The same of a device tree, below a node.
fn places_of_tree(node: &Path) -> Result<BTreeSet<u64>> {
    let mut places = BTreeSet::new();
    let compatible = fs::read(node.join("compatible")).unwrap_or_default();
    if compatible.starts_with(b"virtio,mmio") {
        let reg = fs::read(node.join("reg"))?;
        let address = reg.first_chunk().context("no address in the device tree")?;
        places.insert(u64::from_be_bytes(*address));
    }
    for entry in fs::read_dir(node)? {
        let path = entry?.path();
        if path.is_dir() && !path.is_symlink() {
            places.extend(places_of_tree(&path)?);
        }
    }
    Ok(places)
}

/// The lower half of a word.
pub(crate) fn low(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Pages of this process that stay where they are in physical memory.
pub(crate) struct Arena {
    words: &'static [AtomicU64],
    physical: Vec<u64>,
}

impl Arena {
    pub(crate) fn new(pages: usize) -> Result<Self> {
        // SAFETY: a new mapping at a place of the kernel's choice, which stays.
        let address = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let flags =
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_LOCKED | libc::MAP_POPULATE;
            libc::mmap(std::ptr::null_mut(), pages * PAGE, rights, flags, -1, 0)
        };
        ensure!(address != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        // SAFETY: so many bytes are mapped there for good, aligned to a page; any bits are a word.
        let words: &[AtomicU64] =
            unsafe { slice::from_raw_parts(address.cast(), pages * PAGE / 8) };
        // A page that is only read is that of zeroes, which all share.
        words.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        let pagemap = fs::File::open("/proc/self/pagemap")?;
        let mut physical = Vec::new();
        for page in 0..pages {
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, ((address.addr() / PAGE + page) * 8) as u64)?;
            let frame = u64::from_le_bytes(entry) & ((1 << 55) - 1);
            ensure!(frame != 0, "no physical address");
            physical.push(frame * PAGE as u64);
        }
        Ok(Self { words, physical })
    }

    pub(crate) fn page(&self, number: usize) -> &[AtomicU64] {
        &self.words[number * PAGE / 8..][..PAGE / 8]
    }

    /// Guest-physical.
    pub(crate) fn address(&self, page: usize) -> u64 {
        self.physical[page]
    }
}

/// The device that gives random numbers, as a way to write to any memory of the guest.
pub(crate) struct Entropy {
    device: Device,
    arena: Arena,
    requests: u16,
}

impl Entropy {
    pub(crate) fn new() -> Result<Self> {
        let device = Device::all()?.into_iter().find(|device| device.id() == ENTROPY);
        let (device, arena) = (device.context("no device for random numbers")?, Arena::new(3)?);
        device.begin(VERSION_1);
        device.queue(0, 1, [0, 1, 2].map(|page| arena.address(page)));
        device.set(reg::STATUS, DRIVER_OK);
        Ok(Self { device, arena, requests: 0 })
    }

    /// Has the device write so many bytes there.
    pub(crate) fn write(&mut self, physical: u64, len: u32) -> Result<()> {
        const NO_INTERRUPT: u64 = 1;
        let descriptor = self.arena.page(0);
        descriptor[0].store(physical, Ordering::SeqCst);
        descriptor[1].store(u64::from(len) | WRITE << 32, Ordering::SeqCst);
        self.requests = self.requests.wrapping_add(1);
        let available = NO_INTERRUPT | u64::from(self.requests) << 16;
        self.arena.page(1)[0].store(available, Ordering::SeqCst);
        self.device.set(reg::QUEUE_NOTIFY, 0);
        let end = Instant::now() + PATIENCE;
        let used = || low(self.arena.page(2)[0].load(Ordering::SeqCst)) >> 16;
        while used() != u32::from(self.requests) {
            let status = self.device.get(reg::STATUS);
            let request = || format!("request {} for {len} bytes at {physical:#x}", self.requests);
            ensure!(status == DRIVER_OK && Instant::now() < end, "{}: {status:#x}", request());
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}
