//! A fake guest: CPUs, tasks, rings and sites in the low 2 GiB of a process.
#![allow(unsafe_code, reason = "runs machine code in this process")]
#![allow(dead_code, reason = "not every test binary uses all of it")]

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;
use vmtrace_trampolines::family::SIZE;
use vmtrace_trampolines::layout::{
    CHUNK_SIZE, CLAIMED, COMMON_SIZE, Common, Control, Front, Info, Ring, below, control, front,
};
use vmtrace_trampolines::{Code, Field, Overflow, Point, Program, Readable};

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "riscv64", path = "riscv64.rs")]
pub(crate) mod arch;

pub(crate) mod fault;
pub(crate) mod stress;

use arch::Addressing;

/// Bytes of what belongs to a CPU, and of all tasks.
const AREA: u64 = 4096;
/// Offset of `pid` in a fake task, and of the address of its stack.
pub(crate) const PID: u64 = 40;
const STACK_OF: u64 = 48;
/// Bytes of a fake stack.
pub(crate) const STACK_SIZE: u64 = 1024;
/// Bytes of the areas that can be read.
pub(crate) const HEAP: u64 = 4096;
/// Offset of the first program in the code area; sites and stubs are before it.
const PROGRAMS: usize = 2048;
/// Bytes from a site to the next.
const SITE: usize = 32;
/// Offset of stubs, and bytes of each.
const STUBS: usize = 1024;
const STUB: usize = 64;
const CODE: usize = 32768;

pub(crate) struct FakeGuest {
    pub(crate) cpus: u64,
    pub(crate) rings: Vec<Ring>,
    overflow: Overflow,
    per_cpu: u64,
    tasks: u64,
    code: u64,
    /// Two areas that programs can read, a stack, and nothing behind it.
    heap: u64,
    /// Where programs are, and how many bytes up to their end.
    programs: Vec<u64>,
    used: usize,
    compiled: Vec<Program>,
}

/// A record as it is in a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) common: Common,
    /// From the end downwards.
    pub(crate) fields: Vec<u64>,
}

impl Record {
    pub(crate) fn info(&self) -> Info {
        Info(self.common.info)
    }
}

/// The same numbers in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Registers that all have one value, for [`FakeGuest::run`].
pub(crate) fn registers(value: u64) -> arch::Registers {
    arch::Registers { x: [value; _], stack: [value; _], back: 0 }
}

/// Registers whose arguments tell each which one of which call it is.
pub(crate) fn arguments(call: u64) -> arch::Registers {
    let mut registers = registers(!call);
    for (number, register) in (0..).zip(arch::ARGUMENTS) {
        registers.x[register] = call << 8 | number;
    }
    registers
}

/// What [`arguments`] gives those from 1 to 5.
pub(crate) fn five_arguments(call: u64) -> [u64; 5] {
    [1, 2, 3, 4, 5].map(|number| call << 8 | number)
}

/// The programs of most tests.
pub(crate) fn entry_program() -> Program {
    Program {
        number: 7,
        tracers: 1,
        point: Point::Entry,
        fields: Vec::new(),
        condition: None,
        counts: None,
        since: None,
        nesting: None,
        marked: None,
    }
}

fn map(len: u64, align: u64, protection: i32) -> u64 {
    // Addresses must survive a sign extension from 32 bits; not every
    // architecture has MAP_32BIT.
    static NEXT: AtomicU64 = AtomicU64::new(0x3000_0000);
    let address = NEXT.fetch_add(len + align, Ordering::Relaxed).next_multiple_of(align);
    map_at(address, len, protection);
    address
}

fn map_at(address: u64, len: u64, protection: i32) {
    // SAFETY: a new anonymous mapping, nothing existing is replaced.
    let mapped = unsafe {
        libc::mmap(
            at(address),
            usize::try_from(len).unwrap(),
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
    };
    assert_eq!(mapped.addr() as u64, address, "no memory there");
}

/// So many words, all 0, and their address.
pub(crate) fn words(count: u64) -> (u64, &'static [AtomicU64]) {
    words_of(map(8 * count, 4096, libc::PROT_READ | libc::PROT_WRITE), count)
}

/// The same at an address that nothing has yet.
pub(crate) fn words_at(address: u64, count: u64) -> &'static [AtomicU64] {
    map_at(address, 8 * count, libc::PROT_READ | libc::PROT_WRITE);
    words_of(address, count).1
}

fn words_of(address: u64, count: u64) -> (u64, &'static [AtomicU64]) {
    let count = usize::try_from(count).unwrap();
    // SAFETY: all of a mapping that stays, aligned, only used atomically.
    (address, unsafe { core::slice::from_raw_parts(at::<AtomicU64>(address), count) })
}

/// The set of tasks that all guests follow, and its address.
pub(crate) fn followed() -> (u64, &'static [AtomicU8]) {
    static SET: OnceLock<(u64, &[AtomicU8])> = OnceLock::new();
    *SET.get_or_init(|| {
        let (address, _) = words(SIZE / 8);
        // SAFETY: all of a mapping that stays, only used like this.
        (address, unsafe {
            core::slice::from_raw_parts(at(address), usize::try_from(SIZE).unwrap())
        })
    })
}

/// Where a ring is.
fn memory_of(ring: &Ring) -> u64 {
    ring.address() + u64::from(arch::RINGS.cast_unsigned())
}

fn at<T>(address: u64) -> *mut T {
    core::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

impl FakeGuest {
    pub(crate) const SITES: u64 = 8;

    /// One whose functions all call one entry program, as most tests want it.
    pub(crate) fn new(cpus: u64, size: u64, addressing: Addressing, overflow: Overflow) -> Self {
        Self::with(cpus, size, addressing, overflow, &[entry_program()])
    }

    /// One with these programs: its functions call the first.
    pub(crate) fn with(
        cpus: u64,
        size: u64,
        addressing: Addressing,
        overflow: Overflow,
        programs: &[Program],
    ) -> Self {
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let per_cpu = map(AREA * cpus, 4096, rw);
        let tasks = map(AREA, 4096, rw);
        let memory = map(size * cpus, CHUNK_SIZE as u64, rw);
        let code = map(CODE as u64, 4096, rw | libc::PROT_EXEC);
        let heap = map(2 * HEAP + STACK_SIZE, 4096, rw);
        // Positions need not be addresses.
        let first = memory.wrapping_sub(arch::RINGS.cast_unsigned().into());
        let ring = |cpu| Ring::new(first + cpu * size, size, arch::SPENT).unwrap();
        let rings: Vec<_> = (0..cpus).map(ring).collect();
        for (cpu, ring) in (0..cpus).zip(&rings) {
            // SAFETY: inside the mappings made above, aligned, not shared yet.
            unsafe { at::<Control>(arch::control(per_cpu, cpu)).write(ring.control()) };
            for chunk in 0..ring.chunks() {
                let address = memory_of(ring) + ring.front_offset(chunk);
                // SAFETY: as above.
                unsafe { at::<Front>(address).write(ring.front(chunk)) };
            }
        }
        let mut guest = Self {
            cpus,
            rings,
            overflow,
            per_cpu,
            tasks,
            code,
            heap,
            programs: Vec::new(),
            used: CODE,
            compiled: programs.to_vec(),
        };
        let mut text = vec![0; PROGRAMS];
        for program in programs {
            let address = code + text.len() as u64;
            let compiled = named(guest.compile(program, addressing), address);
            guest.programs.push(address);
            text.extend(compiled.bytes);
            text.resize(text.len().next_multiple_of(16), 0);
        }
        for site in 0..usize::try_from(Self::SITES).unwrap() {
            let at = code + (site * SITE) as u64;
            let site_code = arch::site(at, guest.programs[0]);
            assert!(site_code.len() <= SITE);
            text[site * SITE..][..site_code.len()].copy_from_slice(&site_code);
        }
        assert!(text.len() <= CODE);
        guest.used = text.len();
        // SAFETY: `code` is so many writable bytes.
        unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), at(code), text.len()) };
        guest
    }

    /// Compiles one more program, which goes on with another one in place of its end. Its number.
    pub(crate) fn add(
        &mut self,
        program: &Program,
        addressing: Addressing,
        next: Option<usize>,
    ) -> usize {
        let address = self.code + self.used as u64;
        let code = named(self.compile(program, addressing), address);
        let bytes = match next {
            Some(next) => arch::going_on(code, address, self.programs[next]),
            None => code.bytes,
        };
        assert!(self.used + bytes.len() <= CODE);
        // SAFETY: inside of the code area, behind what is used.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), at(address), bytes.len()) };
        self.used = (self.used + bytes.len()).next_multiple_of(16);
        self.programs.push(address);
        self.compiled.push(program.clone());
        self.programs.len() - 1
    }

    /// What programs can read: the middle of the heap, its end, and the stack of the task.
    fn readable(&self) -> Readable {
        let areas = vec![(self.heap + HEAP / 2, HEAP / 2), (self.heap + HEAP, HEAP)];
        Readable { areas, stack: Some((STACK_OF, STACK_SIZE)) }
    }

    /// Words that [`FakeGuest::readable`] is about, and their address.
    pub(crate) fn heap(&self) -> (u64, &[AtomicU64]) {
        let words = usize::try_from((2 * HEAP + STACK_SIZE) / 8).unwrap();
        // SAFETY: all of a mapping of `new`, aligned, only used atomically.
        (self.heap, unsafe { core::slice::from_raw_parts(at::<AtomicU64>(self.heap), words) })
    }

    /// Where the stack of tasks is.
    pub(crate) fn stack(&self) -> u64 {
        self.heap + 2 * HEAP
    }

    /// What was given to [`FakeGuest::with`].
    pub(crate) fn compiled(&self) -> &[Program] {
        &self.compiled
    }

    pub(crate) fn program(&self, index: usize) -> u64 {
        self.programs[index]
    }

    /// Puts code where the site is, to be called by [`FakeGuest::hit`].
    pub(crate) fn set_site(&self, site: u64, code: &[u8]) {
        assert!(code.len() <= SITE);
        // SAFETY: inside of the code area.
        unsafe { core::ptr::copy_nonoverlapping(code.as_ptr(), at(self.site(site)), code.len()) };
    }

    pub(crate) fn site(&self, site: u64) -> u64 {
        self.code + site % Self::SITES * SITE as u64
    }

    /// What the record of a hit has for a function.
    pub(crate) fn function(&self, site: u64) -> u32 {
        u32::try_from(self.site(site) + arch::SITE_RETURN).unwrap()
    }

    fn word(&self, address: u64) -> &AtomicU64 {
        // SAFETY: inside the mappings of `new`, aligned, only used atomically.
        unsafe { AtomicU64::from_ptr(at(address)) }
    }

    fn half(&self, address: u64) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(at(address)) }
    }

    pub(crate) fn head(&self, cpu: u64) -> u64 {
        self.word(arch::control(self.per_cpu, cpu)).load(Ordering::Acquire)
    }

    pub(crate) fn ring(&self, cpu: u64) -> Ring {
        self.rings[usize::try_from(cpu).unwrap()]
    }

    /// A word of a chunk's account.
    pub(crate) fn front(&self, cpu: u64, chunk: u64, field: usize) -> &AtomicU64 {
        let ring = self.ring(cpu);
        self.word(memory_of(&ring) + ring.front_offset(chunk) + field as u64)
    }

    pub(crate) fn dropped(&self, cpu: u64) -> u64 {
        let count = |chunk| self.front(cpu, chunk, front::DROPPED).load(Ordering::Acquire);
        (0..self.ring(cpu).chunks()).map(count).sum()
    }

    pub(crate) fn overwritten(&self, cpu: u64) -> u64 {
        let count = |chunk| self.front(cpu, chunk, front::STATE).load(Ordering::Acquire);
        (0..self.ring(cpu).chunks()).map(|chunk| count(chunk) & 0xffff_ffff).sum()
    }

    fn address(&self, cpu: u64, position: u64) -> u64 {
        let ring = self.ring(cpu);
        memory_of(&ring) + ring.offset(position)
    }

    /// The published record that ends at a position; `None` when there is none.
    fn published(&self, cpu: u64, position: u64) -> Option<Record> {
        let end = self.address(cpu, position);
        if self.half(end - below::SITE as u64).load(Ordering::Acquire) == 0 {
            return None;
        }
        // SAFETY: inside a chunk, aligned; nobody writes it until there is room again.
        let common = unsafe { at::<Common>(end - COMMON_SIZE as u64).read_volatile() };
        let count = (Info(common.info).size() - COMMON_SIZE) as u64 / 8;
        let field = |index| self.word(end - COMMON_SIZE as u64 - 8 * index);
        let fields = (1..=count).map(|index| field(index).load(Ordering::Relaxed)).collect();
        Some(Record { common, fields })
    }

    /// Takes the published records of `cpu` from `tail` on, as the VMM does.
    pub(crate) fn drain(&self, cpu: u64, tail: &mut u64, mut record: impl FnMut(Record)) {
        let ring = self.ring(cpu);
        let head = self.head(cpu);
        assert!(ring.is_position(head), "head {head:#x}");
        while *tail != head {
            if ring.is_spent(*tail) {
                let chunk = ring.chunk(*tail);
                let start = memory_of(&ring) + chunk * CHUNK_SIZE as u64;
                let len = usize::try_from(ring.front_offset(0)).unwrap();
                // SAFETY: all of the chunk but its account; nobody writes it now.
                unsafe { core::ptr::write_bytes(at::<u8>(start), 0, len) };
                let room = ring.opening(chunk, (*tail >> 32) + 1);
                self.front(cpu, chunk, front::ROOM).store(room, Ordering::Release);
                *tail = ring.next_opening(*tail);
                continue;
            }
            let Some(found) = self.published(cpu, *tail) else { break };
            *tail -= found.info().size() as u64;
            record(found);
        }
    }

    /// All records of a flight recorder that are whole, the oldest first.
    pub(crate) fn recorded(&self, cpu: u64) -> Vec<Record> {
        let ring = self.ring(cpu);
        let head = self.head(cpu);
        let state = |chunk| self.front(cpu, chunk, front::STATE).load(Ordering::Acquire) >> 32;
        let mut chunks: Vec<_> = (0..ring.chunks()).map(|chunk| (state(chunk), chunk)).collect();
        chunks.retain(|&(lap, _)| lap != 0 && lap != CLAIMED);
        chunks.sort_unstable();
        let mut all = Vec::new();
        for (lap, chunk) in chunks {
            let mut position = ring.opening(chunk, lap);
            let end = if ring.chunk(head) == chunk { head } else { 0 };
            while !ring.is_spent(position) && position != end {
                let word = self.word(self.address(cpu, position) - 8).load(Ordering::Acquire);
                if word == 0 {
                    // Reserved only, of a length not known yet: what follows it ends further down.
                    position -= 8;
                    continue;
                }
                all.extend(self.published(cpu, position));
                position -= Info((word >> 32) as u32).size() as u64;
            }
        }
        all
    }

    /// Whether who finds the ring of `cpu` full waits for room.
    pub(crate) fn set_wait(&self, cpu: u64, on: bool) {
        let word = self.word(arch::control(self.per_cpu, cpu) + control::WAIT as u64);
        word.store(on.into(), Ordering::Release);
    }

    /// Does one exchange of head, as a writer does by whom the test then stands in.
    pub(crate) fn exchange(&self, cpu: u64, from: u64, to: u64) {
        let head = self.word(arch::control(self.per_cpu, cpu));
        head.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).unwrap();
    }

    /// Writes 4 bytes of the record that ends at a position.
    pub(crate) fn write(&self, cpu: u64, position: u64, below: usize, value: u32) {
        self.half(self.address(cpu, position) - below as u64).store(value, Ordering::Release);
    }

    /// Puts code beside the sites, in one of 16 places.
    pub(crate) fn put(&self, place: usize, code: &[u8]) -> u64 {
        let address = self.stub(place);
        assert!(code.len() <= STUB && place < (PROGRAMS - STUBS) / STUB);
        // SAFETY: inside of the code area.
        unsafe { core::ptr::copy_nonoverlapping(code.as_ptr(), at(address), code.len()) };
        address
    }

    /// Where [`FakeGuest::put`] puts it.
    pub(crate) fn stub(&self, place: usize) -> u64 {
        self.code + (STUBS + place * STUB) as u64
    }

    /// Lets a site call another program.
    pub(crate) fn call_from(&self, site: u64, program: usize) {
        self.set_site(site, &arch::site(self.site(site), self.programs[program]));
    }

    /// Calls a function with registers and a stack at random, but for those that are `set`, as
    /// [`FakeGuest::run_kept`]. Each call from one function has the same stack pointer, also where the compiler could
    /// have made it a part of that.
    #[inline(never)]
    pub(crate) fn call(&self, site: u64, point: Point, random: &mut Random, set: &[(usize, u64)]) {
        let mut before = registers(0);
        before.x.fill_with(|| random.next());
        before.stack.fill_with(|| random.next());
        for &(register, value) in set {
            before.x[register] = value;
        }
        self.run_kept(site, point, &before);
    }

    /// Calls a function with these registers, of which it leaves all as they were that are not free.
    #[inline(never)]
    pub(crate) fn run_kept(&self, site: u64, point: Point, before: &arch::Registers) {
        let mut after = before.clone();
        self.run(site, &mut after);
        for register in (0..before.x.len()).filter(|&register| register != arch::STACK) {
            if !arch::free(point).contains(&register) && !arch::OWN.contains(&register) {
                assert_eq!(before.x[register], after.x[register], "{point:?} {register}");
            }
        }
        assert_eq!(before.stack, after.stack);
    }

    /// Lets a site come to a program of this point. Those of entries are called by the site itself.
    pub(crate) fn come_from(&self, site: u64, point: Point, program: usize) {
        match point {
            Point::Entry => self.call_from(site, program),
            Point::Tail => drop(self.tail_from(site, program)),
            Point::Return => drop(self.return_from(site, program)),
            Point::Beyond => drop(self.beyond_from(site, program)),
            Point::Probe => drop(self.probe_from(site, program)),
        }
    }

    /// Code, to be changed.
    pub(crate) fn code(&self, address: u64) -> *mut u8 {
        assert!((self.code..self.code + CODE as u64).contains(&address));
        at(address)
    }

    pub(crate) fn overflow(&self) -> Overflow {
        self.overflow
    }
}

/// A program that is to lie at an address, which it tells if nothing else does.
fn named(mut code: Code, address: u64) -> Code {
    if let Some(at) = code.site {
        let name = u32::try_from(address + arch::PROBE_CALLED).unwrap();
        code.bytes[at..at + 4].copy_from_slice(&name.to_le_bytes());
    }
    code
}

/// Whether a program has a field.
pub(crate) fn has(program: &Program, field: Field) -> bool {
    program.below(field).is_some()
}

/// Offset and length of the bytes of a fake task that tests may use.
pub(crate) const NAME: (u32, usize) = (16, 16);

impl FakeGuest {
    /// Writes such bytes of a task.
    pub(crate) fn set_name(&self, task: u64, name: [u8; NAME.1]) {
        // SAFETY: inside of a task, which nobody uses now.
        unsafe { at::<[u8; NAME.1]>(task + u64::from(NAME.0)).write_volatile(name) };
    }
}
