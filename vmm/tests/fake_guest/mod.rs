//! Plain memory that looks like a guest right after `ftrace_init`, with a real kernel's image, page
//! tables, disabled sites and `ftrace_page`s. Needs the kernels of `scripts/setup`.
#![allow(dead_code, reason = "not every test binary uses all of it")]

pub(crate) mod module;
pub(crate) mod riscv64;
pub(crate) mod stops;
mod x86_64;

use std::cell::{Cell, OnceCell, RefCell};
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::ops::Range;
use std::sync::Arc;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap,
    MmapRegion, VolatileSlice,
};
use vmtrace::kernel::{Arch, FtraceKind, Kernel};
use vmtrace::tracer::annex::{self, Memory};
use vmtrace::tracer::{
    AttachReport, Attachment, Duty, ExitPlan, Guest, GuestError, Image, Options, PageTables, Ram,
    TraceError,
};
use vmtrace_trampolines::Overflow;
use vmtrace_trampolines::layout::{CHUNK_SIZE, COMMON_SIZE, Info};

pub(crate) const X86: [&str; 3] = ["x86_64-6.1", "x86_64-6.12", "x86_64-7"];
pub(crate) const RISCV: [&str; 2] = ["riscv64-6.12", "riscv64-7"];
/// Where kernels of both architectures are linked, but for the last 2 GiB's start.
pub(crate) const MAP: u64 = 0xffff_ffff_8000_0000;
pub(crate) const DISABLED: u64 = 1 << 25;
pub(crate) const ENABLED: u64 = 1 << 31;
pub(crate) const ANNEX: u64 = 0x2_c000_0000;

/// Guest-physical memory of large rings is behind this.
pub(crate) const FAR: u64 = 0x40_0000_0000;

/// Guest-physical bytes of RAM.
const RAM: usize = 256 << 20;
/// From the start of RAM to what the fake kernel has allocated, beyond any image.
const HEAP: u64 = 0x0a00_0000;

/// Where the first control block and the first ring are in the annex.
pub(crate) const CONTROL: usize = 2 << 20;
const RING: usize = 4 << 20;

/// What a program of entries writes.
#[derive(Clone, Copy)]
pub(crate) struct Record {
    pub(crate) task: u64,
    pub(crate) caller: u64,
    pub(crate) pid: u64,
    pub(crate) time: u64,
    pub(crate) site: u64,
    pub(crate) program: u16,
}

pub(crate) fn kernels() -> impl Iterator<Item = &'static str> {
    X86.into_iter().chain(RISCV)
}

pub(crate) struct Fake {
    pub(crate) kernel: Arc<Kernel>,
    memory: GuestMemoryMmap,
    pub(crate) annex: Arc<FakeAnnex>,
    /// Which of the writes to come fail.
    pub(crate) failing: RefCell<Range<usize>>,
    /// Guest-physical memory in which writes are lost.
    pub(crate) stuck: RefCell<Range<u64>>,
    /// Every write: where, and what.
    pub(crate) log: RefCell<Vec<(u64, Vec<u8>)>>,
    /// Of each ring, if that was said.
    pub(crate) buffer: Option<u64>,
    /// Without that, and with windows as a real guest's memory has them.
    quiet: bool,
    /// Guest-physical start of RAM.
    base: u64,
    /// Guest-physical address of the kernel's link address [`MAP`].
    pub(crate) load: u64,
    /// Virtual address of the heap.
    heap: u64,
    /// How far the image was moved from where it is linked, and nothing else (x86-64).
    slide: Cell<u64>,
    /// Of page tables.
    pub(crate) levels: u32,
    /// Offsets in `struct ftrace_ops`, once looked up.
    ops: OnceCell<(u64, u64)>,
    /// Its memory, for others like it.
    file: OnceCell<File>,
    /// What its memory was at first.
    first: Option<File>,
}

pub(crate) struct FakeAnnex(GuestMemoryMmap, usize, Option<u64>);

impl FakeAnnex {
    fn new(size: u64, far: Option<u64>) -> Self {
        let size = usize::try_from(size).unwrap();
        Self(GuestMemoryMmap::from_ranges(&[(GuestAddress(ANNEX), size)]).unwrap(), size, far)
    }
}

impl Memory for FakeAnnex {
    fn slice(&self) -> VolatileSlice<'_> {
        self.0.get_slice(GuestAddress(ANNEX), self.1).unwrap()
    }
    fn guest_address(&self) -> u64 {
        ANNEX
    }
    fn far_guest_address(&self) -> Option<u64> {
        self.2
    }
}

impl Guest for Fake {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        Ram(&self.memory).read(address, out)
    }
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        let mut failing = self.failing.borrow_mut();
        let fails = failing.contains(&0);
        *failing = failing.start.saturating_sub(1)..failing.end.saturating_sub(1);
        if fails {
            return Err(GuestError::NoRam(address));
        }
        if self.stuck.borrow().contains(&address) {
            return Ok(());
        }
        if !self.quiet {
            self.log.borrow_mut().push((address, bytes.to_vec()));
        }
        Ram(&self.memory).write(address, bytes)
    }
    fn run(&self, address: u64) -> Option<(u64, VolatileSlice<'_>)> {
        // What goes by windows is seen by nobody.
        let is_in = self.quiet && address.checked_sub(self.base)? < RAM as u64;
        let memory = self.memory.get_slice(GuestAddress(self.base), RAM).ok()?;
        is_in.then_some((self.base, memory))
    }
}

/// A kernel of the cache.
pub(crate) fn kernel(name: &str) -> Arc<Kernel> {
    let cache = vmtrace::emulated::cache_dir().expect("no cache directory");
    let path = cache.join("kernels").join(name).join("vmlinuz");
    let kernel = Kernel::open(&path);
    Arc::new(kernel.unwrap_or_else(|e| panic!("{}: {e}: run scripts/setup", path.display())))
}

impl Fake {
    pub(crate) fn new(name: &str) -> Self {
        Self::with_levels(name, 4)
    }

    /// Without a log: its memory is used by windows.
    pub(crate) fn quiet(name: &str) -> Self {
        let mut fake = Self::new(name);
        fake.quiet = true;
        fake
    }

    /// With memory for tables of counters.
    pub(crate) fn counting(name: &str) -> Self {
        let mut fake = Self::new(name);
        fake.annex = Arc::new(FakeAnnex::new(annex::WITH_TABLES, None));
        fake
    }

    /// Another one that is as this one was when it was first asked for another one, but for its annex and
    /// what has happened to this one. The two share memory until it is written.
    pub(crate) fn again(&self) -> Self {
        let file = self.file.get_or_init(|| {
            let mut file = tempfile::tempfile().unwrap();
            let memory = self.memory.get_slice(GuestAddress(self.base), RAM).unwrap();
            memory.write_all_volatile_to(0, &mut file, RAM).unwrap();
            file
        });
        let file = FileOffset::new(file.try_clone().unwrap(), 0);
        let (all, mine) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let region = MmapRegion::build(Some(file), RAM, all, mine).unwrap();
        let region = GuestRegionMmap::new(region, GuestAddress(self.base)).unwrap();
        Self {
            memory: GuestMemoryMmap::from_regions(vec![region]).unwrap(),
            kernel: Arc::clone(&self.kernel),
            annex: Arc::new(FakeAnnex::new(self.annex.1 as u64, self.annex.2)),
            failing: RefCell::new(0..0),
            stuck: RefCell::new(0..0),
            log: RefCell::new(Vec::new()),
            ops: OnceCell::new(),
            file: OnceCell::new(),
            first: self.file.get().map(|file| file.try_clone().unwrap()),
            slide: self.slide.clone(),
            ..*self
        }
    }

    /// Makes memory what it was when this one was made [`Fake::again`], as for another kernel of the same image.
    pub(crate) fn reload(&self) {
        let mut first = self.first.as_ref().unwrap();
        first.seek(SeekFrom::Start(0)).unwrap();
        let memory = self.memory.get_slice(GuestAddress(self.base), RAM).unwrap();
        memory.read_exact_volatile_from(0, &mut first, RAM).unwrap();
        self.slide.set(0);
    }

    /// Moves the image of a kernel that has not run, as one that chooses where it runs does: its page tables, and
    /// what it has written of its own addresses.
    pub(crate) fn move_by(&self, slide: u64) {
        if self.slide.replace(slide) != slide {
            x86_64::map_image(self, slide);
            self.books();
            self.log.borrow_mut().clear();
        }
    }

    /// How far the image was moved.
    pub(crate) fn slide(&self) -> u64 {
        self.slide.get()
    }

    /// The run-time address of a link address.
    pub(crate) fn runtime(&self, link: u64) -> u64 {
        link + self.slide()
    }

    /// With a ring of so many bytes for each vCPU.
    pub(crate) fn with_buffer(name: &str, levels: u32, buffer: u64) -> Self {
        // Not where the rings are.
        let mut fake = Self::with_heap(name, levels, 0xffff_ffff_9fe0_0000);
        let far = vmtrace::tracer::far_memory(fake.kernel.arch(), 2, Some(buffer)).unwrap();
        let (size, offset) = far.unwrap();
        fake.annex = Arc::new(FakeAnnex::new(annex::WITH_TABLES + size, Some(FAR + offset)));
        fake.buffer = Some(buffer);
        fake
    }

    /// One that sees every write, and one whose memory is used by windows.
    pub(crate) fn both(name: &str) -> [Self; 2] {
        [Self::new(name), Self::quiet(name)]
    }

    /// With so many levels of page tables.
    pub(crate) fn with_levels(name: &str, levels: u32) -> Self {
        Self::with_heap(name, levels, 0xffff_ffff_a000_0000)
    }

    /// On riscv64 with its heap at this address.
    fn with_heap(name: &str, levels: u32, heap: u64) -> Self {
        let kernel = kernel(name);
        let (base, load, heap) = match kernel.arch() {
            Arch::X86_64 => (0, 0, MAP + HEAP),
            Arch::Riscv64 => (0x8000_0000, 0x8020_0000, heap),
        };
        let fake = Self {
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(base), RAM)]).unwrap(),
            annex: Arc::new(FakeAnnex::new(annex::SIZE, None)),
            failing: RefCell::new(0..0),
            stuck: RefCell::new(0..0),
            buffer: None,
            log: RefCell::new(Vec::new()),
            quiet: false,
            base,
            load,
            heap,
            slide: Cell::new(0),
            levels,
            ops: OnceCell::new(),
            file: OnceCell::new(),
            first: None,
            kernel,
        };
        match fake.kernel.arch() {
            Arch::X86_64 => x86_64::load(&fake),
            Arch::Riscv64 => riscv64::load(&fake),
        }
        fake.books();
        fake.log.borrow_mut().clear();
        fake
    }

    /// Guest-physical address of the heap.
    pub(crate) fn heap(&self) -> u64 {
        self.base + HEAP
    }

    /// One `ftrace_page` with all records; layouts are alike in all kernels.
    fn books(&self) {
        let (page, records) = (self.heap(), self.records());
        for index in 0..self.kernel.sites().len() {
            let at = records + 16 * index as u64;
            self.write(at, &self.runtime(self.record(index)).to_le_bytes()).unwrap();
            self.write(at + 8, &0_u64.to_le_bytes()).unwrap();
        }
        let count = u32::try_from(self.kernel.sites().len()).unwrap();
        self.write(page, &0_u64.to_le_bytes()).unwrap();
        self.write(page + 8, &(self.heap + 4096).to_le_bytes()).unwrap();
        self.write(page + 16, &count.to_le_bytes()).unwrap();
        self.write(self.symbol("ftrace_pages_start"), &self.heap.to_le_bytes()).unwrap();
        // As ftrace_init leaves it.
        self.write(self.symbol("ftrace_enabled"), &1_u32.to_le_bytes()).unwrap();
        let none = self.runtime(self.link("ftrace_list_end"));
        self.write(self.symbol("ftrace_ops_list"), &none.to_le_bytes()).unwrap();
    }

    /// Virtual address of the `ftrace_page`.
    pub(crate) fn page(&self) -> u64 {
        self.heap
    }

    /// Guest-physical address of the records.
    pub(crate) fn records(&self) -> u64 {
        self.heap() + 4096
    }

    /// Guest-physical address of a link address.
    pub(crate) fn at(&self, link: u64) -> u64 {
        link - MAP + self.load
    }

    pub(crate) fn link(&self, name: &str) -> u64 {
        self.kernel.symbols().address(name).unwrap_or_else(|| panic!("{name}"))
    }

    /// Guest-physical address of a symbol.
    pub(crate) fn symbol(&self, name: &str) -> u64 {
        self.at(self.link(name))
    }

    pub(crate) fn read_vec(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(address, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn word(&self, address: u64) -> u32 {
        u32::from_le_bytes(self.read_vec(address, 4).try_into().unwrap())
    }

    /// `dyn_ftrace.ip` of a site.
    pub(crate) fn record(&self, site: usize) -> u64 {
        let site = &self.kernel.sites()[site];
        match self.kernel.ftrace_kind() {
            FtraceKind::Fentry => site.location,
            FtraceKind::Patchable => site.entry,
            FtraceKind::CallOps => site.entry + 4,
        }
    }

    /// Link address and length of all that a site is.
    pub(crate) fn extent(&self, site: usize) -> (u64, usize) {
        let location = self.kernel.sites()[site].location;
        match self.kernel.ftrace_kind() {
            FtraceKind::Fentry => (location, 5),
            FtraceKind::Patchable => (location, 8),
            FtraceKind::CallOps => (location, 16),
        }
    }

    pub(crate) fn bytes(&self, site: usize) -> Vec<u8> {
        let (link, len) = self.extent(site);
        self.read_vec(self.at(link), len)
    }

    /// What the guest's own ftrace would leave in a site for a tracer of its own.
    pub(crate) fn foreign(&self, site: usize) -> Vec<u8> {
        match self.kernel.arch() {
            Arch::X86_64 => vec![0xe8, 1, 2, 3, 4],
            Arch::Riscv64 => riscv64::foreign(self, site),
        }
    }

    /// Where a call from the site ends up; panics unless it is a sound call.
    pub(crate) fn target(&self, site: usize) -> u64 {
        match self.kernel.arch() {
            Arch::X86_64 => x86_64::target(self, site),
            Arch::Riscv64 => riscv64::target(self, site),
        }
    }

    /// Where the first program is.
    pub(crate) fn program(&self) -> u64 {
        match self.kernel.arch() {
            Arch::X86_64 => MAP,
            Arch::Riscv64 if self.kernel.ftrace_kind() == FtraceKind::CallOps => {
                riscv64::gap(self) + 0x400
            }
            Arch::Riscv64 => riscv64::gap(self) + 0x2800,
        }
    }

    pub(crate) fn image(&self) -> Image {
        self.locate(self.slide()).unwrap()
    }

    /// The symbol by which the kernel is found, and its page tables.
    pub(crate) fn tables(&self) -> (&'static str, PageTables) {
        match self.kernel.arch() {
            Arch::X86_64 => x86_64::tables(self),
            Arch::Riscv64 => riscv64::tables(self),
        }
    }

    /// Recognises the kernel where it would be if it had been moved by `slide`.
    pub(crate) fn locate(&self, slide: u64) -> Result<Image, GuestError> {
        let (symbol, tables) = self.tables();
        let address = self.link(symbol).wrapping_add(slide);
        Image::locate(self, &self.kernel, symbol, address, tables)
    }

    /// What makes a vCPU exit.
    pub(crate) fn trap(&self) -> &'static [u8] {
        match self.kernel.arch() {
            Arch::X86_64 => &[0xe6, 0xea],
            Arch::Riscv64 => &[0xb7, 0xd8, 0x76, 0x09, 0x73, 0, 0, 0],
        }
    }

    /// A stack pointer, in a place of the image where nothing of interest is.
    pub(crate) fn stack(&self) -> u64 {
        self.link("init_task") + 64
    }

    /// Its RAM, without what this counts and keeps.
    pub(crate) fn ram(&self) -> Ram<GuestMemoryMmap> {
        Ram(self.memory.clone())
    }

    /// The first vCPU's program writes this, so many times.
    pub(crate) fn hit(&self, record: Record, times: usize) {
        self.hit_with(record, &[], times);
    }

    /// The same with these fields.
    pub(crate) fn hit_with(&self, record: Record, fields: &[u64], times: usize) {
        let memory = self.annex.slice();
        let size = COMMON_SIZE + 8 * fields.len();
        let mut head: u64 = memory.read_obj(CONTROL).unwrap();
        for _ in 0..times {
            let Record { task, caller, pid, time, site, program } = record;
            let info = u64::from(Info::new(size, program, 1, Info::DRAINED).0);
            let end = RING + usize::try_from(head % CHUNK_SIZE as u64).unwrap();
            let words = [task, caller | pid << 32, time, site | info << 32];
            // The last field comes first.
            let all: Vec<u8> =
                fields.iter().rev().chain(&words).flat_map(|word| word.to_le_bytes()).collect();
            memory.write_slice(&all, end - size).unwrap();
            head -= size as u64;
            memory.write_obj(head, CONTROL).unwrap();
        }
    }

    pub(crate) fn attach(&self) -> Attachment {
        self.try_attach().unwrap()
    }

    pub(crate) fn try_attach(&self) -> Result<Attachment, TraceError> {
        self.try_attach_for(&[])
    }

    /// For returns of the functions at these sites, too.
    pub(crate) fn try_attach_for(&self, returns: &[usize]) -> Result<Attachment, TraceError> {
        self.try_attach_with(&ExitPlan::new(&self.kernel, returns, false)?)
    }

    /// With what was made for those before.
    pub(crate) fn try_attach_with(&self, returns: &ExitPlan) -> Result<Attachment, TraceError> {
        let (overflow, clock_hz) = (Overflow::Drop, 1_000_000_000);
        let options = Options { overflow, cpus: 2, buffer: self.buffer, clock_hz, returns };
        let annex = Arc::clone(&self.annex) as Arc<dyn Memory>;
        Attachment::new(self, &self.kernel, self.image(), annex, options)
    }

    /// Lets sites call the program of the first tracer.
    pub(crate) fn enable(
        &self,
        attachment: &mut Attachment,
        sites: &[usize],
    ) -> Result<AttachReport, TraceError> {
        let program = attachment.program(self, &self.kernel, &Duty::entry(vec![0]))?;
        let sites: Vec<_> = sites.iter().map(|&site| (site, program)).collect();
        attachment.enable(self, &self.kernel, &sites)
    }

    pub(crate) fn flags(&self, site: usize) -> u64 {
        self.read_u64(self.records() + 16 * site as u64 + 8).unwrap()
    }

    pub(crate) fn set_flags(&self, site: usize, flags: u64) {
        let at = self.records() + 16 * site as u64 + 8;
        self.write(at, &flags.to_le_bytes()).unwrap();
    }

    pub(crate) fn all(&self) -> Vec<usize> {
        self.kernel.select(&[], &[]).unwrap()
    }

    /// The whole image, but for what stays: the annex in the page tables and, on
    /// riscv64, the code.
    pub(crate) fn text(&self) -> Vec<u8> {
        let (start, end) = (self.symbol("_text"), self.symbol("_end"));
        let mut bytes = self.read_vec(start, usize::try_from(end - start).unwrap());
        let mut forget = |link: u64, len: usize| {
            let at = usize::try_from(self.at(link) - start).unwrap();
            bytes[at..at + len].fill(0);
        };
        match self.kernel.arch() {
            Arch::X86_64 => forget(self.link("level2_kernel_pgt"), 4096),
            Arch::Riscv64 => {
                let len = self.link("__init_begin") - riscv64::gap(self);
                forget(riscv64::gap(self), usize::try_from(len).unwrap());
            }
        }
        bytes
    }

    /// Guest-physical address of the entry that maps the nth 2 MiB of the annex.
    pub(crate) fn entry(&self, number: u64) -> u64 {
        match self.kernel.arch() {
            Arch::X86_64 => self.symbol("level2_kernel_pgt") + 8 * number,
            Arch::Riscv64 => riscv64::entry(self, number),
        }
    }
}
