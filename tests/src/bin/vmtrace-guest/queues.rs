//! A guest that gives its devices queues of any content: addresses, lengths, indices, chains that lead back.

use super::call_getppid;
use super::devices::{Arena, DRIVER_OK, Device, NEEDS_RESET, PAGE, VERSION_1, low, reg};
use super::scribble::begin;
use anyhow::{Result, ensure};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;
use vmtrace::machine::ANNEX_BASE;
use vmtrace::tracer::annex;
use vmtrace_tests::random::Random;

/// Queues of a device that are met.
const QUEUES: usize = 4;
/// Entries of a queue that are written: a page of descriptors.
const ENTRIES: usize = 256;
/// Pages of what buffers hold, behind three for each queue.
const BUFFERS: usize = 32;
/// How often something of running queues is changed before all of it is.
const CHANGES: usize = 6;
/// `VIRTQ_DESC_F_NEXT`, `_WRITE`, `_INDIRECT`.
const NEXT: u64 = 1;
const WRITE: u64 = 2;
const INDIRECT: u64 = 4;

struct Hostile {
    arena: Arena,
    random: Random,
}

impl Hostile {
    fn chance(&mut self, of: usize) -> bool {
        self.random.below(of) == 0
    }

    /// Outside the guest's memory, at its edges, or wrapping. What else there is in that memory is left alone,
    /// so that the guest lives for long.
    fn nowhere(&mut self) -> u64 {
        let edges = [
            ANNEX_BASE,
            ANNEX_BASE + annex::SIZE - 8,
            ANNEX_BASE - 8,
            0xf000_0000,
            0xffff_ffff,
            u64::MAX,
            u64::MAX - 15,
            1 << 63,
        ];
        match self.random.below(2 * edges.len()) {
            edge if edge < edges.len() => edges[edge],
            _ => self.random.word() >> self.random.below(24) | 1 << 36,
        }
    }

    /// Two words. What lies in the arena does not go beyond its page, unless it goes far beyond all memory.
    fn descriptor(&mut self, size: usize) -> [u64; 2] {
        let offset = if self.chance(4) { self.random.below(PAGE) } else { 0 };
        let far = self.chance(16);
        let address = if far {
            self.nowhere()
        } else {
            let page = 3 * QUEUES + self.random.below(BUFFERS);
            self.arena.address(page) + offset as u64
        };
        let rest = PAGE - offset;
        let len = match self.random.below(8) {
            0 => 0,
            1 => 0x8000_0000 | self.random.word() >> 33,
            2 => u64::from(u32::MAX),
            3..6 => rest as u64,
            _ => self.random.below(rest.min(64)) as u64,
        };
        let flags = match self.random.below(16) {
            0 => self.random.word() >> 48,
            1 => self.random.below(8) as u64 | INDIRECT,
            _ => self.random.below(4) as u64,
        };
        // To any, itself too; now and then to none.
        let next = if self.chance(16) {
            self.random.word() >> 48
        } else {
            self.random.below(size.max(1)) as u64
        };
        let flags = if self.chance(3) { flags | NEXT } else { flags };
        [address, len | flags << 32 | next << 48]
    }

    /// What a driver of the block device or of the socket device could say, and what none would.
    fn message(&mut self, page: usize, size: usize) {
        let words: Vec<u64> = match self.random.below(4) {
            // A request and a sector.
            0 => vec![self.random.below(16) as u64, self.random.word() >> self.random.below(64)],
            // From the guest to a port of the host's: lengths, an operation, what there is room for.
            1 => {
                let ports = [1024, 1025, self.random.word() & 0xffff_ffff];
                let port = ports[self.random.below(ports.len())];
                let len = self.random.below(PAGE) as u64 >> self.random.below(12);
                let operation = self.random.below(9) as u64;
                vec![
                    3,
                    2,
                    self.random.below(8) as u64 | port << 32,
                    len | 1 << 32 | operation << 48,
                    self.random.word() >> self.random.below(64),
                    self.random.word() >> self.random.below(64),
                ]
            }
            // A table that a descriptor leads to.
            2 => (0..64).flat_map(|_| self.descriptor(size)).collect(),
            _ => (0..64).map(|_| self.random.word() >> self.random.below(64)).collect(),
        };
        for (place, word) in self.arena.page(page).iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
    }

    fn write_descriptor(&mut self, queue: usize, size: usize) {
        let words = self.descriptor(size);
        let at = 2 * self.random.below(size.min(ENTRIES));
        for (place, word) in self.arena.page(3 * queue)[at..].iter().zip(words) {
            place.store(word, Ordering::SeqCst);
        }
    }

    /// A chain as drivers of disks make it: a header, data, a place for the status.
    fn request(&mut self, queue: usize) {
        let header = self.random.below(BUFFERS - 2);
        let places = [header, header + 1, header + 2].map(|page| 3 * QUEUES + page);
        let sector = self.random.word() >> self.random.below(64);
        let words = [self.random.below(9) as u64 >> self.random.below(4), sector];
        for (place, word) in self.arena.page(places[0]).iter().zip(words) {
            place.store(word, Ordering::SeqCst);
        }
        let data = self.random.below(PAGE / 512 + 1) as u64 * 512;
        let direction = self.random.below(2) as u64 * WRITE;
        let parts = [(16, NEXT), (data, NEXT | direction), (1, WRITE)];
        for (number, (page, (len, flags))) in (0..).zip(places.into_iter().zip(parts)) {
            let words = [self.arena.address(page), len | flags << 32 | (number + 1) << 48];
            let at = usize::try_from(2 * number).unwrap_or_default();
            for (place, word) in self.arena.page(3 * queue)[at..].iter().zip(words) {
                place.store(word, Ordering::SeqCst);
            }
        }
    }

    /// What is available: mostly as many more as there can be, of any number.
    fn offer(&mut self, queue: usize, size: usize) {
        let ring = self.arena.page(3 * queue + 1);
        let index = ring[0].load(Ordering::Relaxed) >> 16 & 0xffff;
        let more = match self.random.below(12) {
            0 => self.random.word(),
            _ => self.random.below(size.min(8) + 1) as u64,
        };
        for place in &ring[1..=ENTRIES / 4] {
            let entry = |random: &mut Random| match random.below(200) {
                0 => random.word() & 0xffff,
                _ => random.below(size) as u64,
            };
            let word = (0..4).fold(0, |word, _| word << 16 | entry(&mut self.random));
            place.store(word, Ordering::SeqCst);
        }
        let flags = self.random.below(2) as u64;
        let index = index.wrapping_add(more) & 0xffff;
        let first = self.random.below(size) as u64;
        ring[0].store(flags | index << 16 | first << 32 | first << 48, Ordering::SeqCst);
    }

    /// Another life of a device. Returns whether it has used something, and whether it has refused to go on.
    fn round(&mut self, device: &Device) -> [bool; 2] {
        // It has forgotten its queues before they change.
        device.set(reg::STATUS, 0);
        for page in 0..3 * QUEUES {
            self.arena.page(page).iter().for_each(|word| word.store(0, Ordering::SeqCst));
        }
        let wanted =
            if self.chance(16) { self.random.word() } else { self.random.word() | VERSION_1 };
        device.begin(wanted);
        let mut sizes = [0; QUEUES];
        for (queue, size) in sizes.iter_mut().enumerate() {
            let number = u32::try_from(queue).unwrap_or_default();
            device.set(reg::QUEUE_SEL, number);
            let most = device.get(reg::QUEUE_NUM_MAX);
            if most == 0 {
                continue;
            }
            let said = if self.chance(16) {
                low(self.random.word()) >> self.random.below(32)
            } else {
                1 << self.random.below(most.ilog2() as usize + 1)
            };
            *size = usize::try_from(said).unwrap_or(0).clamp(1, ENTRIES);
            let rings = [0, 1, 2].map(|ring| self.arena.address(3 * queue + ring));
            let rings = rings.map(|ring| match self.random.below(48) {
                0 => self.nowhere(),
                1 => ring | self.random.below(16) as u64,
                _ => ring,
            });
            device.queue(number, said, rings);
            for _ in 0..*size {
                self.write_descriptor(queue, *size);
            }
            self.offer(queue, *size);
            // What is offered first.
            if *size > 2 && self.chance(2) {
                let words = self.arena.page(3 * queue + 1);
                words[0].store(1 << 16, Ordering::SeqCst);
            }
        }
        for buffer in 0..BUFFERS {
            self.message(3 * QUEUES + buffer, sizes[0].max(1));
        }
        for (queue, _) in sizes.iter().enumerate().filter(|(_, size)| **size > 2) {
            self.request(queue);
        }
        device.set(reg::STATUS, DRIVER_OK);
        for _ in 0..CHANGES {
            let queue = self.random.below(QUEUES);
            device.set(reg::QUEUE_NOTIFY, u32::try_from(queue).unwrap_or_default());
            if sizes[queue] > 0 {
                self.write_descriptor(queue, sizes[queue]);
                self.offer(queue, sizes[queue]);
            }
            let buffer = self.random.below(BUFFERS);
            self.message(3 * QUEUES + buffer, sizes[0].max(1));
            call_getppid();
            if self.chance(4) {
                thread::sleep(Duration::from_millis(1));
            }
        }
        let refused = device.get(reg::STATUS) & NEEDS_RESET != 0;
        device.set(reg::INTERRUPT_ACK, device.get(reg::INTERRUPT_STATUS));
        let mut used = (0..QUEUES).map(|queue| self.arena.page(3 * queue + 2));
        let used = used.any(|ring| ring[0].load(Ordering::SeqCst) >> 16 & 0xffff != 0);
        [used, refused]
    }
}

/// So many lives of devices; the guest should see the end of it.
pub(crate) fn queues(seed: u64, rounds: usize) -> Result<()> {
    let devices = Device::all()?;
    ensure!(devices.len() > 1, "only {} devices", devices.len());
    let arena = Arena::new(3 * QUEUES + BUFFERS)?;
    let mut hostile = Hostile { arena, random: Random::new(seed) };
    begin();
    let mut seen = vec![[0_u32; 2]; devices.len()];
    for _ in 0..rounds {
        let which = hostile.random.below(devices.len());
        let [used, refused] = hostile.round(&devices[which]);
        seen[which][0] += u32::from(used);
        seen[which][1] += u32::from(refused);
    }
    for (device, [used, refused]) in devices.iter().zip(seen) {
        device.set(reg::STATUS, 0);
        println!("device {} used {used} refused {refused}", device.id());
    }
    println!("alive");
    Ok(())
}
