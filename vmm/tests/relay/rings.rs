//! Fills rings as programs do, with the same layout, without a guest.

// Test and benchmark need a part of it each.
#![allow(dead_code, unreachable_pub)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory, VolatileSlice};
use vmtrace::kernel::{After, Kernel};
use vmtrace::relay::{ConsoleLines, Setup, Targets, resolver};
use vmtrace::serve::{Hub, Join, Sink};
use vmtrace::stream::Header;
use vmtrace::tracer::annex::{self, Layout, Memory};
use vmtrace::tracer::ring::RingReader;
use vmtrace::tracer::{Duty, ExitWord, Guest, GuestError, Tasks, return_address};
use vmtrace_trampolines::layout::{COMMON_SIZE, Common, Info, LAP, Ring, below, control, front};
use vmtrace_trampolines::{Field, Point};

use crate::synthetic::{self, Machine};

const ANNEX: u64 = 0xffff_ffff_8000_0000;
const FUNCTIONS: usize = 2000;
/// How far behind the entry of a function its exit is.
const EXIT: u32 = 3;
/// Records of one task, one after the other.
const SLICE: u64 = 500;
const TASKS: u64 = 50;

struct Annex(GuestMemoryMmap);

impl Memory for Annex {
    fn slice(&self) -> VolatileSlice<'_> {
        self.0.get_slice(GuestAddress(0), usize::try_from(annex::SIZE).unwrap()).unwrap()
    }
    fn guest_address(&self) -> u64 {
        0
    }
}

/// No memory at all: tasks have no names here.
struct NoGuest;

impl Guest for NoGuest {
    fn read(&self, address: u64, _: &mut [u8]) -> Result<(), GuestError> {
        Err(GuestError::NoRam(address))
    }
    fn write(&self, address: u64, _: &[u8]) -> Result<(), GuestError> {
        Err(GuestError::NoRam(address))
    }
}

/// An annex, and a kernel whose functions are in the records.
pub struct Rings {
    memory: Arc<dyn Memory>,
    layout: Layout,
    pub kernel: Arc<Kernel>,
    /// What programs write for the functions of the kernel, and entry addresses by that.
    written: Vec<u32>,
    pub entries: HashMap<u32, u32>,
}

#[expect(clippy::cast_possible_truncation, reason = "records have the low halves of addresses")]
fn low(address: u64) -> u32 {
    address as u32
}

impl Rings {
    pub fn new(cpus: u64) -> Rings {
        let options = synthetic::Options {
            functions: FUNCTIONS,
            ..synthetic::Options::new(Machine::X86, synthetic::Layout::Relative)
        };
        let kernel = Kernel::parse(synthetic::build(&options).image).unwrap();
        let bases: Vec<_> = (0..cpus).map(|cpu| 0xffff_8880_3fc0_0000 + (cpu << 15)).collect();
        let layout = Layout::per_cpu(ANNEX, &bases, 256).unwrap();
        let size = usize::try_from(annex::SIZE).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).unwrap();
        let memory: Arc<dyn Memory> = Arc::new(Annex(memory));
        layout.install(&memory.slice()).unwrap();
        let sites = kernel.sites().iter();
        let pairs = sites.map(|site| (low(return_address(&kernel, site)), low(site.entry)));
        let (written, entries) = (pairs.clone().map(|pair| pair.0).collect(), pairs.collect());
        Rings { memory, layout, kernel: Arc::new(kernel), written, entries }
    }

    /// What a relay of them needs, and where consumers join.
    pub fn setup(&self, primary: impl Into<Sink>) -> (Setup, Sender<Join>) {
        let (joining, joins): (_, Receiver<Join>) = channel();
        let vcpus = self.layout.rings.len();
        let header = Header {
            arch: "x86_64".into(),
            clock: "x86-tsc".into(),
            clock_hz: 2_000_000_000,
            vcpus: u32::try_from(vcpus).unwrap(),
            address_base: Header::TOP_4_GIB,
            ..Header::default()
        };
        let setup = Setup {
            header,
            stream: Hub::new(primary, vcpus, resolver(&self.kernel, 0)).unwrap(),
            joins,
            readers: self.readers(false),
            exits: Vec::new(),
            tasks: Tasks::none(),
            memory: Box::new(NoGuest),
            kernel: Arc::clone(&self.kernel),
            targets: Targets {
                sites: (0..self.kernel.sites().len()).collect(),
                programs: vec![Duty::entry(vec![0])],
                ..Targets::default()
            },
            ticks: 0,
            console: ConsoleLines::default(),
            waiting: None,
        };
        (setup, joining)
    }

    /// The annex, to which guests write.
    pub fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    /// What lies where in it.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A reader of each ring, which programs overwrite or not.
    pub fn readers(&self, overwrite: bool) -> Vec<RingReader> {
        RingReader::all(&self.layout, &self.memory, overwrite)
    }

    /// Accounts say of every chunk that it was opened in the first lap: what is behind the head does
    /// not count.
    pub fn open_all(&self) {
        let memory = self.memory.slice();
        for ring in &self.layout.rings {
            let states = (0..ring.chunks()).map(|chunk| {
                self.layout.offset(ring) + ring.front_offset(chunk) + front::STATE as u64
            });
            for at in states {
                let word =
                    memory.get_atomic_ref::<AtomicU64>(usize::try_from(at).unwrap()).unwrap();
                word.store(LAP, Ordering::Relaxed);
            }
        }
    }

    /// Bytes of every ring, in the memory that guests write to.
    pub fn slots(&self, mut each: impl FnMut(&VolatileSlice<'_>)) {
        let memory = self.memory.slice();
        for ring in &self.layout.rings {
            let start = usize::try_from(self.layout.offset(ring)).unwrap();
            let size = usize::try_from(ring.size()).unwrap();
            each(&memory.subslice(start, size).unwrap());
        }
    }

    /// Writes records until the rings are full; says how many.
    pub fn fill(&self, from: u64) -> u64 {
        let mut count = 0;
        for cpu in 0..self.layout.rings.len() {
            while self.write(cpu, self.record(from + count)) {
                count += 1;
            }
        }
        count
    }

    /// Programs of entries and returns, both with their stack pointers, and an exit of every function.
    pub fn calls(&self) -> Targets {
        let exits = self.kernel.sites().iter().map(|site| ExitWord {
            word: low(site.entry).wrapping_add(EXIT),
            function: site.entry,
            target: 0,
            after: After::Nothing,
            is_aid: false,
        });
        let duty = |point| Duty::new(point, vec![0], &[Field::Stack]);
        Targets {
            exits: exits.collect(),
            programs: vec![duty(Point::Entry), duty(Point::Return)],
            sites: (0..self.kernel.sites().len()).collect(),
            ..Targets::default()
        }
    }

    /// The same as [`Rings::fill`] by these programs: each call and then its return.
    pub fn fill_calls(&self, from: u64) -> u64 {
        let mut count = 0;
        for cpu in 0..self.layout.rings.len() {
            while let Some(end) = self.reserve_of(cpu, COMMON_SIZE + 8) {
                let number = from + count;
                let mut record = Common { timestamp: number * 100, ..self.record(number / 2) };
                record.info =
                    Info::new(COMMON_SIZE + 8, u16::from(number % 2 == 1), 1, Info::DRAINED).0;
                if number % 2 == 1 {
                    record.site = self.entries[&record.site].wrapping_add(EXIT);
                }
                let memory = self.memory.slice();
                word(&memory, end - COMMON_SIZE - 8).store((number / 2).to_le(), Ordering::Relaxed);
                self.publish(end, record);
                count += 1;
            }
        }
        count
    }

    /// The record with this number: several functions, callers and tasks.
    pub fn record(&self, number: u64) -> Common {
        let function = |number: u64| {
            let index = number.wrapping_mul(7) % self.written.len() as u64;
            self.written[usize::try_from(index).unwrap()]
        };
        let task = number / SLICE % TASKS;
        Common {
            timestamp: number * 100,
            site: function(number),
            caller: function(number / 3),
            task: 0xffff_8880_0000_0000 + (task << 13),
            pid: low(task),
            info: Info::new(COMMON_SIZE, 0, 1, Info::DRAINED).0,
        }
    }

    /// What a program does on this CPU.
    pub fn hit(&self, cpu: usize, record: Common) {
        if !self.write(cpu, record) {
            let memory = self.memory.slice();
            let position = self.head(&memory, cpu).load(Ordering::Relaxed);
            let ring = &self.layout.rings[cpu];
            let account = self.start(cpu) + offset(ring.front_offset(ring.chunk(position)));
            word(&memory, account + front::DROPPED).fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether programs wait where the ring of this CPU is full.
    pub fn waits(&self, cpu: usize) -> bool {
        let memory = self.memory.slice();
        let at = offset(self.layout.controls[cpu]) + control::WAIT;
        word(&memory, at).load(Ordering::Relaxed) != 0
    }

    /// Where the ring of this CPU is in the annex.
    fn start(&self, cpu: usize) -> usize {
        offset(self.layout.offset(&self.layout.rings[cpu]))
    }

    fn head<'a>(&self, memory: &'a VolatileSlice<'_>, cpu: usize) -> &'a AtomicU64 {
        word(memory, offset(self.layout.controls[cpu]) + control::HEAD)
    }

    /// Reserves, fills and publishes a record; false when the ring is full.
    fn write(&self, cpu: usize, record: Common) -> bool {
        let reserved = self.reserve(cpu);
        if let Some(end) = reserved {
            self.publish(end, record);
        }
        reserved.is_some()
    }

    /// What a program with fields does on this CPU, whose ring has room.
    pub fn hit_with(&self, cpu: usize, record: Common, fields: &[u64]) {
        let size = COMMON_SIZE + 8 * fields.len();
        let end = self.reserve_of(cpu, size).unwrap();
        let memory = self.memory.slice();
        for (at, &field) in (end - size..end).step_by(8).zip(fields.iter().rev()) {
            word(&memory, at).store(field.to_le(), Ordering::Relaxed);
        }
        self.publish(end, record);
    }

    /// Reserves a record, and tells where in the annex it ends; `None` when the ring is full.
    pub fn reserve(&self, cpu: usize) -> Option<usize> {
        self.reserve_of(cpu, COMMON_SIZE)
    }

    /// The same of one with so many bytes.
    fn reserve_of(&self, cpu: usize, size: usize) -> Option<usize> {
        let (ring, start, memory) = (&self.layout.rings[cpu], self.start(cpu), self.memory.slice());
        let head = self.head(&memory, cpu);
        let mut position = head.load(Ordering::Relaxed);
        if ring.is_spent(position) {
            let account = |chunk| start + offset(ring.front_offset(chunk));
            let next = word(&memory, account(ring.chunk(position)) + front::NEXT);
            let opening = (position & !(LAP - 1)).wrapping_add(next.load(Ordering::Relaxed));
            let room = word(&memory, account(ring.chunk(opening)) + front::ROOM);
            if room.load(Ordering::Acquire) != opening {
                return None;
            }
            position = opening;
        }
        head.store(position.wrapping_sub(size as u64), Ordering::Relaxed);
        Some(start + offset(ring.offset(position)))
    }

    /// Fills and publishes a record that was reserved.
    pub fn publish(&self, end: usize, record: Common) {
        let memory = self.memory.slice();
        let half = |below: usize, value: u32, order: Ordering| {
            memory.get_atomic_ref::<AtomicU32>(end - below).unwrap().store(value.to_le(), order);
        };
        let whole = |below: usize, value: u64| {
            word(&memory, end - below).store(value.to_le(), Ordering::Relaxed);
        };
        half(below::INFO, record.info, Ordering::Relaxed);
        whole(below::TIMESTAMP, record.timestamp);
        half(below::CALLER, record.caller, Ordering::Relaxed);
        whole(below::TASK, record.task);
        half(below::PID, record.pid, Ordering::Relaxed);
        half(below::SITE, record.site, Ordering::Release);
    }

    /// Records that fit into a chunk of a ring.
    pub fn records_of_a_chunk(&self) -> u64 {
        let ring: &Ring = &self.layout.rings[0];
        (ring.front_offset(0) - ring.spent()) / COMMON_SIZE as u64 + 1
    }
}

fn offset(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

fn word<'a>(memory: &'a VolatileSlice<'_>, offset: usize) -> &'a AtomicU64 {
    memory.get_atomic_ref(offset).unwrap()
}
