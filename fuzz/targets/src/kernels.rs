//! Kernels that inputs damage, and the checks of a damaged one that still parses.

#[path = "../../../kernel/tests/builder/mod.rs"]
pub(crate) mod synthetic;

use std::sync::OnceLock;

use synthetic::{Layout, Machine, Options};
use vmtrace::kernel::{Exit, Kernel};

pub(crate) const KINDS: [(Machine, Layout); 6] = [
    (Machine::X86, Layout::Before),
    (Machine::X86, Layout::After),
    (Machine::X86, Layout::Relative),
    (Machine::Riscv, Layout::AfterBase),
    (Machine::RiscvCallOps, Layout::Relative),
    (Machine::RiscvCallOps, Layout::AfterBase),
];

/// Whole images: plain ones, then one in each container.
pub(crate) fn images() -> &'static [Vec<u8>] {
    static IMAGES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    IMAGES.get_or_init(|| {
        let build = |(machine, layout)| synthetic::build(&Options::new(machine, layout)).image;
        let mut images: Vec<_> = KINDS.into_iter().map(build).collect();
        let plain = Options { btf: false, ..Options::new(Machine::X86, Layout::After) };
        images.push(synthetic::build(&plain).image);
        let x86 = zstd::bulk::compress(&images[2], 1).unwrap();
        let riscv = zstd::bulk::compress(&images[4], 1).unwrap();
        images.push(synthetic::bzimage(&x86, Some(images[2].len())));
        images.push(synthetic::zboot(&riscv, b"zstd"));
        images
    })
}

/// Overwrites parts of `image` from `first` on, as the input says: a distance in 24 bits, a
/// length below 8, and that many bytes.
pub(crate) fn damage(image: &mut [u8], first: usize, mut input: &[u8]) {
    let room = image.len() - first;
    while let [a, b, c, len, rest @ ..] = input {
        let distance = u32::from_le_bytes([*a, *b, *c, 0]) as usize % room;
        let len = usize::from(len % 8).min(rest.len());
        let (bytes, rest) = rest.split_at(len);
        for (to, from) in image[first + distance..].iter_mut().zip(bytes) {
            *to = *from;
        }
        input = rest;
    }
}

/// Everything that is asked of a kernel.
pub(crate) fn exercise(bytes: Vec<u8>) {
    let Ok(kernel) = Kernel::parse(bytes) else { return };
    kernel.select_with_report(&["*a*[b-f]*".to_owned()], &["?x*".to_owned()]);
    for site in kernel.sites() {
        kernel.site_name(site);
        kernel.bytes(site.entry, 16);
    }
    for symbol in kernel.symbols().iter() {
        assert!(kernel.symbols().names_at(symbol.address).any(|name| name == symbol.name));
        assert!(kernel.symbols().addresses(symbol.name).any(|a| a == symbol.address));
        kernel.symbols().lookup(symbol.address.wrapping_add(1));
    }
    if let Ok(structs) = kernel.structs() {
        structs.member_offset("task_struct", "in.z");
    }
    arguments(&kernel);
    if let Ok(exits) = kernel.exits() {
        let by_site = (0..kernel.sites().len()).flat_map(|site| exits.of(site));
        // Those of functions without a site are nobody's, and come last.
        assert!(by_site.eq(exits.all().iter().filter(|exit| exit.site != Exit::NO_SITE)));
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

/// Parameters of functions, by what may be any types.
pub(crate) fn arguments(kernel: &Kernel) {
    kernel.raw_arguments();
    for site in 0..kernel.sites().len() {
        assert_eq!(kernel.prototype(site).is_none(), kernel.no_prototype(site).is_some());
    }
    // The functions that have types.
    for site in 0..20 {
        for path in synthetic::types::PATHS {
            if let Err(error) = kernel.path(site, path) {
                assert!(!error.to_string().contains(char::is_control));
            }
        }
    }
}
