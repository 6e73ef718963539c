//! The analysis of kernels that are made in memory: every layout and container, every error, and
//! damage of all kinds.

// Small numbers are cut to size all over the place here.
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)]

mod builder;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use builder::{Layout, Machine, Options, build};
use proptest::prelude::*;
use vmtrace_kernel::{Arch, Btf, Compression, Container, FtraceKind, Kernel, KernelError};
use vmtrace_kernel::{SiteSection, SiteStats};

const KINDS: [(Machine, Layout); 7] = [
    (Machine::X86, Layout::Before),
    (Machine::X86, Layout::After),
    (Machine::X86, Layout::Relative),
    (Machine::Riscv, Layout::AfterBase),
    (Machine::Riscv, Layout::Relative),
    (Machine::RiscvCallOps, Layout::AfterBase),
    (Machine::RiscvCallOps, Layout::Relative),
];

fn options(machine: Machine, layout: Layout) -> Options {
    Options::new(machine, layout)
}

fn x86() -> Options {
    options(Machine::X86, Layout::Relative)
}

fn error(bytes: Vec<u8>) -> String {
    Kernel::parse(bytes).expect_err("this cannot be a kernel").to_string()
}

#[track_caller]
fn assert_error(bytes: Vec<u8>, words: &[&str]) {
    let text = error(bytes);
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
    assert!(!text.contains('\n'), "{text:?} is more than a line");
}

#[test]
fn every_layout_gives_all_symbols_and_sites() {
    for (machine, layout) in KINDS {
        let built = build(&options(machine, layout));
        let kernel = Kernel::parse(built.image).unwrap();
        let context = format!("{machine:?} {layout:?}");

        let found: Vec<_> =
            kernel.symbols().iter().map(|s| (s.address, s.kind as u8, s.name.to_owned())).collect();
        assert_eq!(found, built.symbols, "{context}");
        assert_eq!(kernel.release(), "6.99.0-synthetic");

        assert_eq!(kernel.sites().len(), built.functions.len(), "{context}");
        for (site, function) in kernel.sites().iter().zip(&built.functions) {
            assert_eq!((site.location, site.entry), (function.location, function.entry));
            assert_eq!(site.section == SiteSection::InitText, function.init);
            assert_eq!(kernel.site_name(site), function.name.as_deref(), "{context}");
        }
        let unnamed = built.functions.iter().filter(|f| f.name.is_none()).count();
        let expected =
            SiteStats { entries: 1005, zero: 5, sites: 1000, text: 900, init_text: 100, unnamed };
        assert_eq!(kernel.site_stats(), expected, "{context}");
        let kind = match machine {
            Machine::X86 => FtraceKind::Fentry,
            Machine::Riscv => FtraceKind::Patchable,
            Machine::RiscvCallOps => FtraceKind::CallOps,
        };
        assert_eq!(kernel.ftrace_kind(), kind);
        let x86 = machine == Machine::X86;
        assert_eq!(kernel.arch(), if x86 { Arch::X86_64 } else { Arch::Riscv64 });
        assert_eq!(kernel.container(), if x86 { Container::Vmlinux } else { Container::Flat });
        assert!(!kernel.relocatable());
    }
}

#[test]
fn a_kernel_with_function_symbols_only_is_understood_by_its_sites() {
    for (machine, layout) in KINDS {
        let built = build(&Options { all_symbols: false, ..options(machine, layout) });
        let kernel = Kernel::parse(built.image).unwrap();
        let vfs_read = built.functions[10].entry;
        assert_eq!(kernel.symbols().address("vfs_read"), Some(vfs_read), "{machine:?} {layout:?}");
        assert_eq!(kernel.site_stats().sites, 1000);
        assert_eq!(kernel.release(), "6.99.0-synthetic");
        // To trace it takes more, as it must be found in memory.
        let error = kernel.check_traceable().unwrap_err().to_string();
        assert!(error.contains("CONFIG_KALLSYMS_ALL") && error.contains("--system-map"), "{error}");
    }
}

#[test]
fn a_relocatable_riscv_kernel_has_its_words_in_rela_dyn() {
    for (machine, layout) in KINDS.into_iter().filter(|kind| kind.0 != Machine::X86) {
        let built = build(&Options { relocatable: true, ..options(machine, layout) });
        let kernel = Kernel::parse(built.image).unwrap();
        let locations: Vec<u64> = kernel.sites().iter().map(|s| s.location).collect();
        let expected: Vec<u64> = built.functions.iter().map(|f| f.location).collect();
        assert_eq!(locations, expected, "{machine:?} {layout:?}");
        assert!(kernel.relocatable());
    }
}

#[test]
fn an_unstripped_vmlinux_may_do_without_kallsyms() {
    let nothing = Options { kallsyms: false, ..x86() };
    let functions = Options { all_symbols: false, ..x86() };
    for options in [nothing, functions] {
        let mut built = build(&options);
        builder::add_sections(&mut built.image, &built.symbols, None);
        let kernel = Kernel::parse(built.image).unwrap();
        assert_eq!(kernel.symbols().len(), built.symbols.len());
        assert_eq!(kernel.symbols().address("vfs_read"), Some(built.functions[10].entry));
        assert_eq!(kernel.site_stats().sites, 1000);
        kernel.check_traceable().unwrap();
    }
}

#[test]
fn a_section_has_the_types_where_no_symbol_tells() {
    let mut built = build(&Options { all_symbols: false, ..x86() });
    let btf = builder::btf();
    let start = built.image.windows(btf.len()).position(|window| window == btf).unwrap();
    assert_eq!(Kernel::parse(built.image.clone()).unwrap().btf_len(), 0);
    builder::add_sections(&mut built.image, &[], Some(start..start + btf.len()));
    let kernel = Kernel::parse(built.image).unwrap();
    assert_eq!(kernel.btf().unwrap().member_offset("task_struct", "comm"), Some(8));
}

#[test]
fn a_riscv_vmlinux_is_as_good_as_the_flat_image() {
    let flat = build(&options(Machine::RiscvCallOps, Layout::Relative));
    let elf = builder::wrap_elf(&flat.image, 0xffff_ffff_8000_0000, 243);
    let (flat, elf) = (Kernel::parse(flat.image).unwrap(), Kernel::parse(elf).unwrap());
    assert_eq!(elf.arch(), Arch::Riscv64);
    assert_eq!(elf.sites(), flat.sites());
    assert_eq!(elf.ftrace_kind(), FtraceKind::CallOps);
}

#[test]
fn symbols_are_found_by_name_and_by_address() {
    let built = build(&x86());
    let kernel = Kernel::parse(built.image).unwrap();
    let symbols = kernel.symbols();
    let entry = |i: usize| built.functions[i].entry;

    assert_eq!(symbols.address("vfs_read"), Some(entry(10)));
    assert_eq!(symbols.address("vfs_reap"), None);
    assert_eq!(symbols.address(""), None);
    let duplicates: Vec<u64> = symbols.addresses("dup_static").collect();
    assert_eq!(duplicates.len(), 17);
    assert!(duplicates.is_sorted());
    assert_eq!(symbols.address("dup_static"), duplicates.first().copied());

    assert_eq!(symbols.names_at(entry(3)).collect::<Vec<_>>(), ["function_3", "alias_3"]);
    assert_eq!(symbols.lookup(entry(3) + 5), Some(("function_3", entry(3))));
    assert_eq!(symbols.lookup(entry(3) - 1), Some(("function_2", entry(2))));
    assert_eq!(symbols.lookup(0x1000), Some(("pcpu_hot", 0x1000)));
    assert_eq!(symbols.lookup(0x1001), None, "past the last per-CPU symbol");
    assert_eq!(symbols.lookup(0xffff_ffff_0000_0000), None);
    assert_eq!(symbols.lookup(u64::MAX), None);
    assert_eq!(symbols.lookup(0), None);
}

#[test]
fn filters_choose_as_set_ftrace_filter_does() {
    let built = build(&x86());
    let kernel = Kernel::parse(built.image).unwrap();
    let select = |filter: &[&str], notrace: &[&str]| {
        let own = |globs: &[&str]| globs.iter().map(|&g| g.to_owned()).collect::<Vec<_>>();
        kernel.select_with_report(&own(filter), &own(notrace))
    };
    let named = built.functions.iter().filter(|f| f.name.is_some()).count();
    assert_eq!(select(&[], &[]).sites.len(), named, "all, less those without a symbol");
    assert_eq!(select(&["vfs_*"], &[]).sites, [10, 11]);
    assert_eq!(select(&["vfs_*"], &["*_read"]).sites, [11]);
    assert_eq!(select(&["alias_43"], &[]).sites, [43], "by any symbol at the entry");
    assert_eq!(select(&[], &["alias_*"]).sites.len(), named - 25);
    assert_eq!(select(&["dup_static"], &[]).sites.len(), 17, "every function of the name");

    let report = select(&["vfs_read", "nothing*"], &["not_there"]);
    assert_eq!(report.sites, [10]);
    assert_eq!(report.unmatched, ["nothing*"]);
    assert_eq!(report.unmatched_notrace, ["not_there"]);

    let error = kernel.select(&["nothing*".to_owned()], &[]).unwrap_err().to_string();
    assert!(error.contains("no traceable function matches 'nothing*'"), "{error}");
    let error = kernel.select(&["vfs_read".to_owned()], &["vfs_*".to_owned()]).unwrap_err();
    assert!(error.to_string().contains("--notrace"), "{error}");
}

#[test]
fn btf_tells_offsets_through_unnamed_members_and_typedefs() {
    let kernel = Kernel::parse(build(&x86()).image).unwrap();
    let btf = kernel.btf().unwrap();
    assert_eq!(btf.bytes(), builder::btf());
    assert_eq!(kernel.btf_len(), btf.bytes().len());
    for (member, offset) in [
        ("pid", Some(0)),
        ("a", Some(4)),
        ("b", Some(4)),
        ("comm", Some(8)),
        ("in", Some(24)),
        ("in.x", Some(24)),
        ("in.z", Some(29)),
        ("in.comm", None),
        ("pid.x", None),
        ("x", None),
        ("", None),
    ] {
        assert_eq!(btf.member_offset("task_struct", member), offset, "{member}");
    }
    assert_eq!(btf.struct_size("task_struct"), Some(32));
    assert_eq!(btf.struct_size("inner"), Some(8));
    assert_eq!(btf.struct_size("inner_t"), None, "a typedef");
    assert_eq!(btf.member_offset("nothing", "pid"), None);

    let without = Kernel::parse(build(&Options { btf: false, ..x86() }).image).unwrap();
    assert_eq!(without.btf_len(), 0);
    assert!(matches!(without.btf(), Err(KernelError::NoBtf)));
    let structs = without.structs().unwrap();
    let task =
        ["pid", "tgid", "comm", "prio"].map(|member| structs.member_offset("task_struct", member));
    assert_eq!(task, [Some(8), Some(12), Some(72), None]);
    let riscv = Options { btf: false, ..Options::new(Machine::Riscv, Layout::AfterBase) };
    let error = Kernel::parse(build(&riscv).image).unwrap().structs().unwrap_err().to_string();
    assert!(error.contains("no BTF") && error.contains("no code shows"), "{error}");
}

#[test]
fn bytes_are_found_at_link_addresses() {
    let built = build(&x86());
    let kernel = Kernel::parse(built.image).unwrap();
    for site in kernel.sites() {
        assert_eq!(kernel.bytes(site.location, 5), Some(&[0xe8, 0, 0, 0, 0][..]));
    }
    let first = kernel.symbols().address("_stext").unwrap();
    assert_eq!(kernel.bytes(first - 1, 1), None);
    assert_eq!(kernel.bytes(first, 1 << 40), None);
    assert_eq!(kernel.bytes(first, 0), Some(&[][..]));
    assert_eq!(kernel.bytes(u64::MAX, 8), None);
}

/// The payload in each compression, with and without the appended size.
fn payloads() -> [(Compression, &'static [u8]); 7] {
    macro_rules! fixture {
        ($name:literal) => {
            include_bytes!(concat!("fixtures/kernel/payload.", $name))
        };
    }
    [
        (Compression::Gzip, fixture!("gz")),
        (Compression::Bzip2, fixture!("bz2")),
        (Compression::Lzma, fixture!("lzma")),
        (Compression::Xz, fixture!("xz")),
        (Compression::Lzo, fixture!("lzo")),
        (Compression::Lz4, fixture!("lz4")),
        (Compression::Zstd, fixture!("zst")),
    ]
}

const PAYLOAD: &[u8] = include_bytes!("fixtures/kernel/payload.elf");

fn packed(compression: Compression, payload: &[u8]) -> Vec<u8> {
    let size = (compression != Compression::Gzip).then_some(PAYLOAD.len());
    builder::bzimage(payload, size)
}

#[test]
fn a_bzimage_may_have_any_compression() {
    for (compression, payload) in payloads() {
        assert_eq!(Compression::detect(payload), Some(compression));
        // The payload has no symbols, which is noticed only after it came out right.
        for file in [packed(compression, payload), payload.to_vec()] {
            let result = Kernel::parse(file);
            assert!(matches!(result, Err(KernelError::NoSymbols)), "{compression:?}: {result:?}");
        }
        let mut short = packed(compression, payload);
        short.truncate(short.len() - 80);
        assert_error(short, &["the bzImage is cut off", "fetch the file again"]);

        let mut wrong_size = PAYLOAD.len() + 1;
        if compression == Compression::Gzip {
            wrong_size = 0;
        }
        let file = builder::bzimage(&payload[..payload.len() - 4], Some(wrong_size));
        assert_error(file, &[compression.name(), "does not decompress"]);
    }
}

#[test]
fn a_whole_kernel_comes_out_of_its_containers() {
    let image = build(&x86()).image;
    let plain = Kernel::parse(image.clone()).unwrap();
    let lz4 = builder::lz4_legacy(&lz4_flex::block::compress(&image));
    let zstd = zstd::bulk::compress(&image, 3).unwrap();
    for (compression, payload) in [(Compression::Lz4, &lz4), (Compression::Zstd, &zstd)] {
        let file = builder::bzimage(payload, Some(image.len()));
        let kernel = Kernel::parse(file.clone()).unwrap();
        assert_eq!(kernel.container(), Container::BzImage);
        assert_eq!(kernel.compression(), Some(compression));
        assert_eq!(kernel.bzimage(), Some(&file[..]));
        assert_eq!(kernel.vmlinux(), image);
        assert_eq!(kernel.sites(), plain.sites());
        assert!(kernel.relocatable());
    }

    let flat = build(&options(Machine::RiscvCallOps, Layout::Relative)).image;
    let zstd = zstd::bulk::compress(&flat, 3).unwrap();
    for file in [zstd.clone(), builder::zboot(&zstd, b"zstd")] {
        let kernel = Kernel::parse(file).unwrap();
        assert_eq!(kernel.container(), Container::Flat);
        assert_eq!(kernel.compression(), Some(Compression::Zstd));
        assert_eq!(kernel.bzimage(), None);
        assert_eq!(kernel.vmlinux(), flat);
    }
}

#[test]
fn errors_name_what_is_missing_and_what_to_do() {
    let without = |change: fn(&mut Options)| {
        let mut options = x86();
        change(&mut options);
        build(&options).image
    };
    assert_error(without(|o| o.mcount = false), &["no __mcount_loc", "CONFIG_DYNAMIC_FTRACE=y"]);
    assert_error(without(|o| o.table = Some(vec![0; 9])), &["no call sites"]);
    assert_error(without(|o| o.kallsyms = false), &["no kallsyms tables", "System.map"]);
    assert_error(
        without(|o| o.table = Some(vec![0xffff_ffff_0000_0000])),
        &["damaged", "0xffffffff00000000"],
    );

    let machine = |number: u16| builder::wrap_elf(&[0; 64], 0x1000, number);
    assert_error(machine(3), &["i386", "x86-64 and riscv64"]);
    assert_error(machine(183), &["aarch64"]);
    assert_error(machine(40), &["32-bit Arm"]);
    assert_error(machine(22), &["s390x"]);
    assert_error(machine(9999), &["9999"]);
    let mut class = machine(243);
    class[4] = 1;
    assert_error(class, &["riscv32"]);
    let mut arm64 = build(&options(Machine::Riscv, Layout::Relative)).image;
    arm64[0x30..0x40].copy_from_slice(b"\0\0\0\0\0\0\0\0ARM\x64\0\0\0\0");
    assert_error(arm64, &["aarch64"]);
    let mut zimage = vec![0; 64];
    zimage[0x24..0x28].copy_from_slice(&0x016f_2818_u32.to_le_bytes());
    assert_error(zimage, &["32-bit Arm"]);

    assert_error(Vec::new(), &["not a Linux kernel image", "an empty file"]);
    assert_error(b"#!/bin/sh\n".to_vec(), &["not a Linux kernel image", "23 21 2f"]);
    assert_error(b"070701000000".to_vec(), &["an initramfs"]);
    assert_error(zstd::bulk::compress(b"070701000", 1).unwrap(), &["an initramfs inside zstd"]);
    assert_error(b"!<arch>\ndebian-binary".to_vec(), &["a package"]);
    let mut object = build(&x86()).image;
    object[16] = 1;
    assert_error(object, &["kernel module"]);

    let mut elf = build(&x86()).image;
    elf.truncate(elf.len() / 2);
    assert_error(elf, &["the vmlinux ELF file is cut off"]);
    let mut header = build(&x86()).image;
    header.truncate(50);
    assert_error(header, &["damaged", "ELF"]);
}

#[test]
fn a_system_map_replaces_the_symbols_if_it_belongs_to_the_kernel() {
    let built = build(&Options { kallsyms: false, ..x86() });
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("vmlinux");
    let map = folder.path().join("System.map");
    std::fs::write(&image, &built.image).unwrap();
    let lines = |shift: u64| -> String {
        let line =
            |s: &(u64, u8, String)| format!("{:016x} {} {}\n", s.0 + shift, s.1 as char, s.2);
        built.symbols.iter().map(line).collect()
    };
    let open = |text: String| {
        std::fs::write(&map, text).unwrap();
        Kernel::open_with(&image, Some(&map)).map_err(|e| e.to_string())
    };
    let kernel = open(lines(0)).unwrap();
    assert_eq!(kernel.symbols().len(), built.symbols.len());
    assert_eq!(kernel.site_stats().sites, 1000);

    assert!(open(lines(8)).unwrap_err().contains("another kernel"));
    assert!(open(lines(0).replace("linux_banner", "x")).unwrap_err().contains("linux_banner"));
    assert!(open("what is this\n".to_owned()).unwrap_err().contains("line 1"));
    assert!(open(String::new()).unwrap_err().contains("no symbols"));
    let missing = Kernel::open(&folder.path().join("nothing")).unwrap_err().to_string();
    assert!(missing.starts_with("cannot be read: No such file"), "{missing}");
    let missing = Kernel::open_with(&image, Some(&folder.path().join("map"))).unwrap_err();
    assert!(missing.to_string().contains("System.map"), "{missing}");
}

/// Whatever is done to an image: an answer, soon. The limit is far above what any of them takes,
/// as other tests run at the same time.
#[track_caller]
fn survives(bytes: Vec<u8>) -> Result<(), TestCaseError> {
    let start = Instant::now();
    if let Ok(kernel) = Kernel::parse(bytes) {
        kernel.select_with_report(&["*a*".to_owned()], &["b*".to_owned()]);
        kernel.symbols().lookup(kernel.sites()[0].entry);
        if let Ok(structs) = kernel.structs() {
            structs.member_offset("task_struct", "in.z");
        }
        for site in 0..kernel.sites().len().min(50) {
            kernel.prototype(site);
            let _ = kernel.path(site, "task->in.z").map_err(|error| error.to_string());
        }
        if let Ok(epilogues) = kernel.epilogues() {
            let all: Vec<usize> = (0..kernel.sites().len()).collect();
            for exit in epilogues.plan(&all).exits {
                exit.writes(0xffff_ffff_9000_0000);
                exit.original(&kernel);
                exit.stub(0xffff_ffff_9000_0000, Some(0xffff_ffff_9000_1000), 1);
            }
        }
    }
    prop_assert!(start.elapsed() < Duration::from_secs(10));
    Ok(())
}

fn kind() -> impl Strategy<Value = usize> {
    0..KINDS.len()
}

/// A copy of one of the kernels, to be damaged.
fn whole(kind: usize) -> Vec<u8> {
    static IMAGES: [OnceLock<Vec<u8>>; KINDS.len()] = [const { OnceLock::new() }; KINDS.len()];
    let (machine, layout) = KINDS[kind];
    IMAGES[kind].get_or_init(|| build(&options(machine, layout)).image).clone()
}

/// Overwritten bytes: where, relative to the whole, and with what.
fn damage() -> impl Strategy<Value = Vec<(prop::sample::Index, Vec<u8>)>> {
    let byte = prop_oneof![Just(0_u8), Just(0xff), Just(0x80), any::<u8>()];
    prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(byte, 1..9)), 1..6)
}

fn apply(
    image: &mut [u8],
    range: std::ops::Range<usize>,
    damage: Vec<(prop::sample::Index, Vec<u8>)>,
) {
    for (place, bytes) in damage {
        let start = range.start + place.index(range.len());
        for (to, from) in image[start..].iter_mut().zip(bytes) {
            *to = from;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn a_truncated_image_is_no_problem(kind in kind(), at in any::<prop::sample::Index>()) {
        let mut image = whole(kind);
        image.truncate(at.index(image.len()));
        survives(image)?;
    }

    #[test]
    fn a_damaged_image_is_no_problem(kind in kind(), damage in damage()) {
        let mut image = whole(kind);
        let whole = 0..image.len();
        apply(&mut image, whole, damage);
        survives(image)?;
    }

    #[test]
    fn damaged_headers_are_no_problem(kind in kind(), damage in damage(), boxed in any::<bool>()) {
        let mut image = whole(kind);
        if boxed {
            let size = image.len();
            image = builder::bzimage(&zstd::bulk::compress(&image, 1).unwrap(), Some(size));
            apply(&mut image, 0x1f0..0x264, damage);
        } else {
            apply(&mut image, 0..120, damage);
        }
        survives(image)?;
    }

    #[test]
    fn damaged_tables_are_no_problem(kind in kind(), damage in damage()) {
        // The tables are in the last third, behind code and sites.
        let mut image = whole(kind);
        let tables = image.len() * 2 / 3..image.len();
        apply(&mut image, tables, damage);
        survives(image)?;
    }

    #[test]
    fn damaged_payloads_are_no_problem(
        which in 0..7_usize,
        damage in damage(),
        keep in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let (compression, payload) = payloads()[which];
        let mut payload = payload.to_vec();
        if cut {
            payload.truncate(keep.index(payload.len()));
        } else {
            let whole = 0..payload.len();
            apply(&mut payload, whole, damage);
        }
        survives(packed(compression, &payload))?;
        survives(payload)?;
    }

    #[test]
    fn damaged_btf_is_no_problem(damage in damage(), keep in any::<prop::sample::Index>(), cut in any::<bool>()) {
        let mut bytes = builder::btf();
        if cut {
            bytes.truncate(keep.index(bytes.len()));
        } else {
            let whole = 0..bytes.len();
            apply(&mut bytes, whole, damage);
        }
        if let Ok(btf) = Btf::parse(bytes) {
            for member in ["pid", "comm", "in.z", "nothing", "in.in.in"] {
                btf.member_offset("task_struct", member);
            }
            btf.struct_size("inner");
            for number in 0..u32::try_from(btf.len()).unwrap() {
                btf.type_name(number);
            }
        }
    }

    #[test]
    fn any_words_may_stand_in_the_table(words in prop::collection::vec(any::<u64>(), 1..40), near in any::<bool>()) {
        let words = words.into_iter().map(|w| if near { 0xffff_ffff_8100_0000 + w % 60_000 } else { w });
        survives(build(&Options { table: Some(words.collect()), ..x86() }).image)?;
    }
}
