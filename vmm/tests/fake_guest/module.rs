//! A module in a fake guest.

use super::{Arch, Fake, FtraceKind, Guest, MAP, riscv64, x86_64};
use std::cell::Cell;
use vmtrace::tracer::{Attachment, Module as Loaded, ModuleError};

/// Of the heap: behind the records of all of the kernel's sites.
const BOOKS: u64 = 0x10_0000;
/// Where the module's code is mapped, by pages that do not lie side by side.
pub(crate) const CODE: u64 = MAP + (0x0a00_0000 | 0x20_0000);
const PAGES: [u64; 2] = [0x3000, 0x1000];

/// A module with three functions: one that begins with `endbr64` where there is such, one whose site
/// goes over the end of a page, and its init function, which has two names.
pub(crate) struct Module<'a> {
    fake: &'a Fake,
    /// Run-time address of its `struct module`.
    pub(crate) books: u64,
    sites: [u64; 3],
    /// Run-time address of its code.
    code: Cell<u64>,
}

impl<'a> Module<'a> {
    /// With sites at these places of its code, as the table of sites has them.
    pub(crate) fn new(fake: &'a Fake, sites: [u64; 3]) -> Self {
        let module = Self { fake, books: fake.page() + BOOKS, sites, code: Cell::new(CODE) };
        // Page tables: one of small pages behind the heap's entry.
        let (table, pages) = (module.table(), module.pages());
        match fake.kernel.arch() {
            Arch::X86_64 => x86_64::map(fake, CODE, table, pages),
            Arch::Riscv64 => riscv64::map(fake, CODE, table, pages),
        }
        module.write();
        module
    }

    fn table(&self) -> u64 {
        self.fake.heap() + BOOKS + 0x1_0000
    }

    fn pages(&self) -> [u64; 2] {
        PAGES.map(|page| self.page(page))
    }

    /// Run-time address of its code.
    pub(crate) fn address(&self) -> u64 {
        self.code.get()
    }

    /// So many bytes are its first function's.
    pub(crate) fn is_plain(&self, size: u64) {
        const FIRST: u64 = 0x2000 + 24;
        self.set(FIRST + 16, &size.to_le_bytes());
    }

    /// Its code has this address next, one of 256 (riscv64).
    pub(crate) fn comes_at(&self, number: u64) {
        self.code.set(CODE + number * 0x2000);
        riscv64::map_pages(self.fake, self.entries(), self.pages().map(Some));
    }

    /// Its code is freed: where it was nothing is mapped, or `others` have the address (riscv64).
    pub(crate) fn is_freed(&self, others: bool) {
        const OTHERS: u64 = 0x8000;
        let pages = self.pages().map(|page| others.then_some(page + OTHERS));
        riscv64::map_pages(self.fake, self.entries(), pages);
    }

    fn entries(&self) -> u64 {
        self.table() + 16 * ((self.address() - CODE) / 0x2000)
    }

    /// Guest-physical address of a page of code.
    fn page(&self, page: u64) -> u64 {
        self.fake.heap() + BOOKS + 0x2_0000 + page
    }

    /// Guest-physical address of a place of the code.
    fn code(&self, place: u64) -> u64 {
        self.page(PAGES[usize::try_from(place / 4096).unwrap()]) + place % 4096
    }

    pub(crate) fn put(&self, place: u64, bytes: &[u8]) {
        for (at, byte) in (place..).zip(bytes) {
            self.fake.write(self.code(at), &[*byte]).unwrap();
        }
    }

    pub(crate) fn get<const N: usize>(&self, place: u64) -> [u8; N] {
        let mut places = place..;
        [(); N].map(|()| self.fake.read_vec(self.code(places.next().unwrap()), 1)[0])
    }

    pub(crate) fn offset(&self, strukt: &str, member: &str) -> u64 {
        self.fake.kernel.btf().unwrap().member_offset(strukt, member).unwrap().into()
    }

    pub(crate) fn set(&self, place: u64, bytes: &[u8]) {
        self.fake.write(self.fake.heap() + BOOKS + place, bytes).unwrap();
    }

    pub(crate) fn member(&self, member: &str, bytes: &[u8]) {
        self.set(self.offset("module", member), bytes);
    }

    /// Where the function of the site at a place begins.
    pub(crate) fn entry(&self, place: u64) -> u64 {
        match self.fake.kernel.ftrace_kind() {
            FtraceKind::Fentry if place == self.sites[0] => place - 4,
            FtraceKind::Fentry | FtraceKind::Patchable => place,
            FtraceKind::CallOps => place + 8,
        }
    }

    /// As the guest's ftrace leaves the site at a place.
    pub(crate) fn disabled(&self, place: u64) -> Vec<u8> {
        match self.fake.kernel.arch() {
            Arch::X86_64 => vec![0x0f, 0x1f, 0x44, 0, 0],
            Arch::Riscv64 => riscv64::disabled_at(self.fake, self.address() + self.entry(place)),
        }
    }

    /// As it is when a module is ready.
    pub(crate) fn write(&self) {
        const KALLSYMS: u64 = 0x1000;
        const SYMTAB: u64 = 0x2000;
        const STRTAB: u64 = 0x3000;
        const CALLSITES: u64 = 0x4000;
        const RECORDS: u64 = 0x5000;
        let code = self.address();
        for place in self.sites {
            self.put(place, &self.disabled(place));
        }
        self.member("name", b"test_module\0");
        self.member("ftrace_callsites", &(self.books + CALLSITES).to_le_bytes());
        self.member("num_ftrace_callsites", &4_u32.to_le_bytes());
        self.member("kallsyms", &(self.books + KALLSYMS).to_le_bytes());
        let kallsyms = |member, bytes: &[u8]| {
            self.set(KALLSYMS + self.offset("mod_kallsyms", member), bytes);
        };
        kallsyms("symtab", &(self.books + SYMTAB).to_le_bytes());
        kallsyms("num_symtab", &6_u32.to_le_bytes());
        kallsyms("strtab", &(self.books + STRTAB).to_le_bytes());
        // One has two names; one is no function; one is elsewhere.
        let mut strings = vec![0];
        let mut symbol = |number: u64, name: &str, info: u8, section: u16, value: u64| {
            let at = SYMTAB + 24 * number;
            let name_at = u32::try_from(strings.len()).unwrap();
            strings.extend(name.as_bytes());
            strings.push(0);
            self.set(at, &name_at.to_le_bytes());
            self.set(at + 4, &[info, 0]);
            self.set(at + 6, &section.to_le_bytes());
            self.set(at + 8, &value.to_le_bytes());
            // Not beyond what is mapped.
            let size = (code + 0x2000).saturating_sub(value).min(32);
            self.set(at + 16, &size.to_le_bytes());
        };
        let [plain, across, init] = self.sites.map(|place| code + self.entry(place));
        symbol(0, "none", 2, 1, code);
        symbol(1, "plain", 2, 1, plain);
        symbol(2, "across", 2, 1, across);
        symbol(3, "my_init", 2, 2, init);
        symbol(4, "init_module", 0x12, 2, init);
        symbol(5, "printk", 0x10, 0, code + 0x30);
        self.set(STRTAB, &strings);
        for (number, place) in (0..).zip(self.sites) {
            let ip = match self.fake.kernel.ftrace_kind() {
                FtraceKind::CallOps => place + 12,
                FtraceKind::Fentry | FtraceKind::Patchable => place,
            };
            self.set(CALLSITES + 8 * number, &(code + place).to_le_bytes());
            self.set(RECORDS + 16 * number, &(code + ip).to_le_bytes());
            self.set(RECORDS + 16 * number + 8, &0_u64.to_le_bytes());
        }
        // Of a weak function.
        self.set(CALLSITES + 8 * 3, &0_u64.to_le_bytes());
        // Behind the kernel's own.
        let page = self.books + 0x6000;
        self.set(0x6000, &0_u64.to_le_bytes());
        self.set(0x6008, &(self.books + RECORDS).to_le_bytes());
        self.set(0x6010, &3_u32.to_le_bytes());
        self.fake.write(self.fake.heap(), &page.to_le_bytes()).unwrap();
    }

    /// A place of the code that its table of returns, at another one, names.
    pub(crate) fn returns(&self, table: u64, places: &[u64]) {
        const ATTRS: u64 = 0x7000;
        const LIST: u64 = 0x7800;
        const NAMES: u64 = 0x8000;
        let len = 4 * u64::try_from(places.len()).unwrap();
        for (at, place) in (table..).step_by(4).zip(places) {
            let distance = i32::try_from(place.wrapping_sub(at).cast_signed()).unwrap();
            self.put(at, &distance.to_le_bytes());
        }
        self.set(NAMES, b".text\0");
        self.set(NAMES + 0x40, b".return_sites\0");
        let sections = [(NAMES, CODE), (NAMES + 0x40, CODE + table), (NAMES, CODE + table + len)];
        self.member("sect_attrs", &(self.books + ATTRS).to_le_bytes());
        let btf = self.fake.kernel.btf().unwrap();
        let offset = |strukt, member| btf.member_offset(strukt, member).map(u64::from);
        let array = offset("module_sect_attrs", "attrs").zip(btf.struct_size("module_sect_attr"));
        let (entries, size, name, address) = match array {
            Some((attrs, size)) if offset("module_sect_attr", "address").is_some() => {
                let count = self.offset("module_sect_attrs", "nsections");
                self.set(ATTRS + count, &3_u32.to_le_bytes());
                let name = self.offset("module_sect_attr", "battr.attr.name");
                (ATTRS + attrs, u64::from(size), name, self.offset("module_sect_attr", "address"))
            }
            _ => {
                let list = self.offset("attribute_group", "bin_attrs");
                let group = offset("module_sect_attrs", "grp").unwrap_or(0);
                self.set(ATTRS + group + list, &(self.books + LIST).to_le_bytes());
                let size = u64::from(btf.struct_size("bin_attribute").unwrap());
                for number in 0..3 {
                    let at = self.books + LIST + 0x40 + number * size;
                    self.set(LIST + 8 * number, &at.to_le_bytes());
                }
                self.set(LIST + 24, &0_u64.to_le_bytes());
                let name = self.offset("bin_attribute", "attr.name");
                (LIST + 0x40, size, name, self.offset("bin_attribute", "private"))
            }
        };
        for (number, (text, section)) in (0..).zip(sections) {
            let at = entries + number * size;
            self.set(at + name, &(self.books + text).to_le_bytes());
            self.set(at + address, &section.to_le_bytes());
        }
    }

    pub(crate) fn set_flags(&self, number: u64, flags: u64) {
        self.set(0x5000 + 16 * number + 8, &flags.to_le_bytes());
    }

    pub(crate) fn load(&self, attachment: &mut Attachment) -> Result<Loaded, ModuleError> {
        attachment.load_module(self.fake, &self.fake.kernel, self.books)
    }
}
