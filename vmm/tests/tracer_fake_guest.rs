//! The tracer on plain memory that looks like a guest right after `ftrace_init`: a
//! real kernel's segments and page tables, nops at its sites, `ftrace_page`s made
//! here. Needs the kernels of `scripts/setup`.

use object::{Object, ObjectSegment};
use std::cell::RefCell;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};
use vmtrace::kernel::{Kernel, SiteSection};
use vmtrace::tracer::annex::{self, Addressing};
use vmtrace::tracer::{
    Attachment, Guest, GuestError, Image, Options, PageTables, SkipReason, Tripwire,
};
use vmtrace_trampolines::layout::Record;
use vmtrace_trampolines::x86_64::Overflow;

const KERNELS: [&str; 3] = ["x86_64-6.1", "x86_64-6.12", "x86_64-7"];
const MAP: u64 = 0xffff_ffff_8000_0000;
const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
const DISABLED: u64 = 1 << 25;
const ENABLED: u64 = 1 << 31;
/// Guest-physical places, beyond any image.
const RECORDS: u64 = 0x0a00_0000;
const ANNEX: u64 = 0xc000_0000;

struct Fake {
    kernel: Arc<Kernel>,
    memory: GuestMemoryMmap,
    annex: Arc<FakeAnnex>,
    /// Makes every write from the nth on fail.
    fail_after: RefCell<Option<usize>>,
}

struct FakeAnnex(GuestMemoryMmap);

impl annex::Memory for FakeAnnex {
    fn slice(&self) -> VolatileSlice<'_> {
        self.0.get_slice(GuestAddress(ANNEX), usize::try_from(annex::SIZE).unwrap()).unwrap()
    }
    fn guest_address(&self) -> u64 {
        ANNEX
    }
}

impl Guest for Fake {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), GuestError> {
        self.memory.read_slice(out, GuestAddress(address)).map_err(|_| GuestError::NoRam(address))
    }
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        if let Some(left) = self.fail_after.borrow_mut().as_mut() {
            if *left == 0 {
                return Err(GuestError::NoRam(address));
            }
            *left -= 1;
        }
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(|_| GuestError::NoRam(address))
    }
}

fn kernel(name: &str) -> Arc<Kernel> {
    let cache = vmtrace::host::cache_dir().expect("no cache directory");
    let path = cache.join("kernels").join(name).join("vmlinuz");
    let kernel = Kernel::open(&path);
    Arc::new(kernel.unwrap_or_else(|e| panic!("{}: {e}: run scripts/setup", path.display())))
}

impl Fake {
    fn new(name: &str) -> Self {
        let kernel = kernel(name);
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 256 << 20)]).unwrap();
        let elf = object::File::parse(kernel.vmlinux()).unwrap();
        for segment in elf.segments() {
            // The per-CPU segment of older kernels is linked at 0; nothing here needs it.
            if let Some(physical) = segment.address().checked_sub(MAP) {
                memory.write_slice(segment.data().unwrap(), GuestAddress(physical)).unwrap();
            }
        }
        let annex = GuestMemoryMmap::from_ranges(&[(
            GuestAddress(ANNEX),
            usize::try_from(annex::SIZE).unwrap(),
        )])
        .unwrap();
        let fake = Self {
            memory,
            annex: Arc::new(FakeAnnex(annex)),
            fail_after: RefCell::new(None),
            kernel,
        };
        // Some kernels fill the upper levels at run time (arch/x86/kernel/head64.c).
        let top = fake.symbol("level3_kernel_pgt") | 0x67;
        fake.write(fake.symbol("init_top_pgt") + 8 * 511, &top.to_le_bytes()).unwrap();
        let upper = fake.symbol("level2_kernel_pgt") | 0x63;
        fake.write(fake.symbol("level3_kernel_pgt") + 8 * 510, &upper.to_le_bytes()).unwrap();
        for slot in 8..=fake.symbol("_end") >> 21 {
            let entry = (slot << 21) | 0x1e3;
            fake.write(fake.symbol("level2_kernel_pgt") + 8 * slot, &entry.to_le_bytes()).unwrap();
        }
        let records = RECORDS | 0x1e3;
        let slot = fake.symbol("level2_kernel_pgt") + 8 * (RECORDS >> 21);
        fake.write(slot, &records.to_le_bytes()).unwrap();
        // As cleanup_highmap leaves it: only the image, and here the records.
        let table = fake.symbol("level2_kernel_pgt");
        let end = fake.symbol("_end") >> 21;
        for slot in (0..512).filter(|slot| !(8..=end).contains(slot) && *slot != RECORDS >> 21) {
            fake.write(table + 8 * slot, &[0; 8]).unwrap();
        }
        for (cpu, base) in (0_u64..).zip([0xffff_8880_0fc0_0000_u64, 0xffff_8880_0fd0_0000]) {
            fake.write(fake.symbol("__per_cpu_offset") + 8 * cpu, &base.to_le_bytes()).unwrap();
        }
        // One ftrace_page with all records; x86 layouts are alike in all three.
        let page = RECORDS;
        let records = RECORDS + 4096;
        for (index, site) in (0_u64..).zip(fake.kernel.sites()) {
            fake.write(site.location - MAP, &NOP).unwrap();
            fake.write(records + 16 * index, &site.location.to_le_bytes()).unwrap();
            fake.write(records + 16 * index + 8, &0_u64.to_le_bytes()).unwrap();
        }
        let count = u32::try_from(fake.kernel.sites().len()).unwrap();
        fake.write(page, &0_u64.to_le_bytes()).unwrap();
        fake.write(page + 8, &(MAP + records).to_le_bytes()).unwrap();
        fake.write(page + 16, &count.to_le_bytes()).unwrap();
        fake.write(fake.symbol("ftrace_pages_start"), &(MAP + page).to_le_bytes()).unwrap();
        let end = fake.kernel.symbols().address("ftrace_list_end").unwrap();
        fake.write(fake.symbol("ftrace_ops_list"), &end.to_le_bytes()).unwrap();
        fake
    }

    /// Guest-physical address of a symbol.
    fn symbol(&self, name: &str) -> u64 {
        self.kernel.symbols().address(name).unwrap_or_else(|| panic!("{name}")) - MAP
    }

    fn image(&self) -> Image {
        let tables = PageTables::from_registers(self.symbol("init_top_pgt"), 0);
        let entry = self.kernel.symbols().address("entry_SYSCALL_64").unwrap();
        Image::locate(self, &self.kernel, "entry_SYSCALL_64", entry, tables).unwrap()
    }

    fn attach(&self) -> Attachment {
        let options = Options { overflow: Overflow::Drop, cpus: 2 };
        let annex = Arc::clone(&self.annex) as Arc<dyn annex::Memory>;
        Attachment::new(self, &self.kernel, self.image(), annex, options).unwrap()
    }

    fn flags(&self, site: usize) -> u64 {
        self.read_u64(RECORDS + 4096 + 16 * site as u64 + 8).unwrap()
    }

    fn set_flags(&self, site: usize, flags: u64) {
        let at = RECORDS + 4096 + 16 * site as u64 + 8;
        self.write(at, &flags.to_le_bytes()).unwrap();
    }

    fn bytes(&self, site: usize) -> [u8; 5] {
        let mut bytes = [0; 5];
        self.read(self.kernel.sites()[site].location - MAP, &mut bytes).unwrap();
        bytes
    }

    fn all(&self) -> Vec<usize> {
        self.kernel.select(&[], &[]).unwrap()
    }

    fn text(&self) -> Vec<u8> {
        let (start, end) = (self.symbol("_text"), self.symbol("_end"));
        let mut bytes = vec![0; usize::try_from(end - start).unwrap()];
        self.read(start, &mut bytes).unwrap();
        // The annex stays mapped: that table may differ.
        let table = usize::try_from(self.symbol("level2_kernel_pgt") - start).unwrap();
        bytes[table..table + 4096].fill(0);
        bytes
    }
}

// A site that calls anything but the trampoline crashes the guest; one that is not
// given back keeps calling it for ever.
#[test]
fn every_site_calls_the_trampoline_and_is_given_back() {
    for name in KERNELS {
        let fake = Fake::new(name);
        let before = fake.text();
        let mut attachment = fake.attach();
        assert!(matches!(attachment.addressing(), Addressing::PerCpu(_)), "{name}");
        let sites = fake.all();
        let report = attachment.enable(&fake, &fake.kernel, &sites).unwrap();
        assert_eq!((report.matched, report.patched), (sites.len(), sites.len()), "{name}");
        assert_eq!(report.skipped, [], "{name}");
        for &site in &sites {
            let [opcode, distance @ ..] = fake.bytes(site);
            let next = fake.kernel.sites()[site].location + 5;
            let target = next.wrapping_add_signed(i64::from(i32::from_le_bytes(distance)));
            assert_eq!((opcode, target), (0xe8, MAP), "{name}: site {site}");
            assert_eq!(fake.flags(site), DISABLED);
        }
        let restored = attachment.release_all(&fake, &fake.kernel).unwrap();
        assert_eq!((restored.sites, restored.foreign), (sites.len(), vec![]), "{name}");
        assert!(fake.text() == before, "{name}: the image is not as it was");
        assert!(sites.iter().all(|&site| fake.flags(site) == 0), "{name}");
    }
}

// A writable and executable page is what the kernel's W^X check warns about.
#[test]
fn the_annex_is_mapped_by_what_it_is_for() {
    let fake = Fake::new("x86_64-6.12");
    fake.attach();
    let table = fake.symbol("level2_kernel_pgt");
    for slot in 0..8 {
        let entry = fake.read_u64(table + 8 * slot).unwrap();
        assert_eq!(entry & 0x000f_ffff_ffe0_0000, ANNEX + (slot << 21));
        let (writable, executable) = (entry & 2 != 0, entry >> 63 == 0);
        assert_eq!((writable, executable), (slot != 0, slot == 0), "slot {slot}: {entry:#x}");
    }
    assert_eq!(fake.read_u64(table + 8 * 40).unwrap() & 1, 0);
}

#[test]
fn a_slot_in_use_refuses_the_annex_and_changes_nothing() {
    let fake = Fake::new("x86_64-6.12");
    let table = fake.symbol("level2_kernel_pgt");
    fake.write(table + 8 * 5, &0x1e3_u64.to_le_bytes()).unwrap();
    let options = Options { overflow: Overflow::Drop, cpus: 2 };
    let annex = Arc::clone(&fake.annex) as Arc<dyn annex::Memory>;
    let result = Attachment::new(&fake, &fake.kernel, fake.image(), annex, options);
    assert!(result.err().unwrap().to_string().contains("no place for the annex"));
    assert_eq!(fake.read_u64(table).unwrap(), 0);
}

#[test]
fn what_the_guest_uses_is_left_alone_with_a_reason() {
    let fake = Fake::new("x86_64-6.12");
    let sites = fake.all();
    let at = |site: usize| fake.kernel.sites()[site].location - MAP;
    let [call, poke, odd, enabled, disabled] = sites[..5] else { panic!() };
    fake.write(at(call), &[0xe8, 1, 2, 3, 4]).unwrap();
    fake.write(at(poke), &[0xcc]).unwrap();
    fake.write(at(odd), &[0x0f, 0x1f, 0x44, 0, 1]).unwrap();
    fake.set_flags(enabled, ENABLED | 1);
    fake.set_flags(disabled, DISABLED);
    // One that the guest's ftrace has no record of.
    let unknown = sites[7];
    fake.write(RECORDS + 4096 + 16 * unknown as u64, &[0; 8]).unwrap();
    let mut attachment = fake.attach();
    let report = attachment.enable(&fake, &fake.kernel, &sites[..10]).unwrap();
    let reasons: Vec<_> = report.skipped.iter().map(|skip| (skip.site, skip.reason)).collect();
    assert_eq!(
        reasons,
        [
            (call, SkipReason::GuestOwned("a call")),
            (poke, SkipReason::GuestOwned("a breakpoint")),
            (odd, SkipReason::GuestOwned("other bytes")),
            (enabled, SkipReason::GuestEnabled),
            (disabled, SkipReason::GuestDisabled),
            (unknown, SkipReason::Unknown),
        ]
    );
    assert_eq!(report.patched, 4);
    assert_eq!(fake.bytes(call), [0xe8, 1, 2, 3, 4]);
}

#[test]
fn a_site_that_the_guest_took_over_is_not_written_at_the_end() {
    let fake = Fake::new("x86_64-6.12");
    let sites = &fake.all()[..3];
    let mut attachment = fake.attach();
    attachment.enable(&fake, &fake.kernel, sites).unwrap();
    let foreign = [0xe9, 9, 9, 9, 9];
    fake.write(fake.kernel.sites()[sites[1]].location - MAP, &foreign).unwrap();
    let restored = attachment.release_all(&fake, &fake.kernel).unwrap();
    assert_eq!((restored.sites, restored.foreign), (2, vec![sites[1]]));
    assert_eq!(fake.bytes(sites[1]), foreign);
}

// The guest counts users by the flag: clearing it under an active tracer makes it
// give up ftrace.
#[test]
fn the_flag_stays_while_the_guests_own_tracer_is_active() {
    let fake = Fake::new("x86_64-6.12");
    let sites = &fake.all()[..3];
    let mut attachment = fake.attach();
    attachment.enable(&fake, &fake.kernel, sites).unwrap();
    fake.write(fake.symbol("ftrace_ops_list"), &0x1234_u64.to_le_bytes()).unwrap();
    attachment.release_all(&fake, &fake.kernel).unwrap();
    for &site in sites {
        assert_eq!((fake.bytes(site), fake.flags(site)), (NOP, DISABLED));
    }
    // And such a site is still ours to take again.
    assert_eq!(attachment.enable(&fake, &fake.kernel, sites).unwrap().patched, 3);
}

#[test]
fn freed_init_text_is_never_written_again() {
    let fake = Fake::new("x86_64-7");
    let sites = fake.all();
    let mut attachment = fake.attach();
    attachment.enable(&fake, &fake.kernel, &sites).unwrap();
    let is_init = |&&site: &&usize| fake.kernel.sites()[site].section == SiteSection::InitText;
    let init: Vec<_> = sites.iter().filter(is_init).copied().collect();
    assert!(init.len() > 1000);
    assert_eq!(attachment.release_init(&fake).unwrap().sites, init.len());
    for &site in &init {
        assert_eq!(fake.bytes(site), NOP);
        // The memory has another use now.
        fake.write(fake.kernel.sites()[site].location - MAP, &[0xcc; 5]).unwrap();
    }
    let report = attachment.enable(&fake, &fake.kernel, &init).unwrap();
    assert_eq!(report.patched, 0);
    assert!(report.skipped.iter().all(|skip| skip.reason == SkipReason::Freed));
    attachment.release_all(&fake, &fake.kernel).unwrap();
    assert!(init.iter().all(|&site| fake.bytes(site) == [0xcc; 5]));
}

// Memory that fails for good cannot be put back, but nothing may count as held.
#[test]
fn a_failure_half_way_is_an_error_and_holds_nothing() {
    let fake = Fake::new("x86_64-6.12");
    let sites = &fake.all()[..50];
    let mut attachment = fake.attach();
    // Two writes a site.
    *fake.fail_after.borrow_mut() = Some(61);
    assert!(attachment.enable(&fake, &fake.kernel, sites).is_err());
    *fake.fail_after.borrow_mut() = None;
    assert_eq!(attachment.held(), 0);
}

#[test]
fn traps_replace_two_bytes_and_leave() {
    let fake = Fake::new("x86_64-6.12");
    let image = fake.image();
    let before = fake.text();
    let wire =
        Tripwire::on_function(&fake, &image, &fake.kernel, "early_trace_init", 0xe7).unwrap();
    let mut bytes = [0; 2];
    fake.read(wire.address() - MAP, &mut bytes).unwrap();
    assert_eq!(bytes, [0xe6, 0xe7]);
    // This kernel has IBT: the endbr64 before it must stay, or the kernel warns.
    assert_eq!(wire.address(), fake.kernel.symbols().address("early_trace_init").unwrap() + 4);
    let again = Tripwire::on_function(&fake, &image, &fake.kernel, "early_trace_init", 0xe7);
    assert!(again.is_err(), "what a tripwire replaces is verified");
    wire.disarm(&fake).unwrap();
    assert!(fake.text() == before);

    let mut attachment = fake.attach();
    let site = fake.kernel.select(&["vfs_read".into()], &[]).unwrap()[0];
    let address = attachment.arm(&fake, &fake.kernel, site, [0xe6, 0xe7]).unwrap().unwrap();
    assert_eq!(address, fake.kernel.sites()[site].location);
    assert_eq!(fake.bytes(site), [0xe6, 0xe7, 0x44, 0, 0]);
    attachment.disarm(&fake, site).unwrap();
    assert_eq!((fake.bytes(site), fake.flags(site)), (NOP, DISABLED));
    assert_eq!(attachment.enable(&fake, &fake.kernel, &[site]).unwrap().patched, 1);
}

#[test]
fn another_kernel_than_the_image_is_recognised() {
    let fake = Fake::new("x86_64-6.12");
    let tables = PageTables::from_registers(fake.symbol("init_top_pgt"), 0);
    let entry = fake.kernel.symbols().address("entry_SYSCALL_64").unwrap();
    for slide in [2_u64 << 20, 0x1000, 1 << 40, 0_u64.wrapping_sub(2 << 20)] {
        let result = Image::locate(
            &fake,
            &fake.kernel,
            "entry_SYSCALL_64",
            entry.wrapping_add(slide),
            tables,
        );
        assert!(result.is_err(), "{slide:#x}");
    }
}

// Everything below is guest memory: whatever is in it, no panic and no hang.
#[test]
fn hostile_books_are_an_error_not_a_hang() {
    let fake = Fake::new("x86_64-6.12");
    let mut attachment = fake.attach();
    let sites = &fake.all()[..3];
    // A list that leads to itself.
    fake.write(RECORDS, &(MAP + RECORDS).to_le_bytes()).unwrap();
    assert!(attachment.enable(&fake, &fake.kernel, sites).is_err());
    fake.write(RECORDS, &0_u64.to_le_bytes()).unwrap();
    // Absurd counts, and records that are nowhere.
    fake.write(RECORDS + 16, &u32::MAX.to_le_bytes()).unwrap();
    assert!(attachment.enable(&fake, &fake.kernel, sites).is_err());
    fake.write(RECORDS + 16, &10_u32.to_le_bytes()).unwrap();
    for records in [0, 1, 8, u64::MAX, u64::MAX - 15, MAP, 0x7fff_ffff_f000] {
        fake.write(RECORDS + 8, &records.to_le_bytes()).unwrap();
        let _ = attachment.enable(&fake, &fake.kernel, sites);
    }
    assert_eq!(fake.bytes(sites[0]), NOP);
}

#[test]
fn rings_that_the_guest_scribbled_over_are_noticed() {
    let fake = Fake::new("x86_64-6.12");
    let attachment = fake.attach();
    let memory = annex::Memory::slice(&*fake.annex);
    let mut state = 0x1234_5678_9abc_def1_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..200 {
        let mut readers = attachment.readers();
        // Controls, and the beginning of the rings.
        for area in [2_usize << 20, 3 << 20, 4 << 20, 8 << 20] {
            for word in 0..32 {
                let value = if round % 2 == 0 { random() } else { random() % (1 << 34) };
                memory.write_obj(value, area + word * 8).unwrap();
            }
        }
        for reader in &mut readers {
            let mut out: Vec<Record> = Vec::with_capacity(1000);
            reader.drain(&mut out);
            reader.finish(&mut out);
            assert!(out.len() < 1 << 19);
        }
    }
}
