//! Types and tracepoints of modules, from the type information in real module files, and from guest
//! memory with arbitrary content. Needs the kernels of `scripts/setup`.

use object::{Object as _, ObjectSection as _};
use std::path::PathBuf;
use vmtrace::initramfs::Modules;
use vmtrace::kernel::Kernel;
use vmtrace::kernel::arguments::{Fetch, NoPrototype};
use vmtrace::kernel::tracepoints::Memory;

const KERNELS: [&str; 5] = ["x86_64-6.1", "x86_64-6.12", "x86_64-7", "riscv64-6.12", "riscv64-7"];

fn folder(name: &str) -> PathBuf {
    vmtrace_emulated::cache_dir().expect("no cache directory").join("kernels").join(name)
}

fn kernel(name: &str) -> Kernel {
    Kernel::open(&folder(name).join("vmlinuz")).unwrap()
}

/// The type information of a module of a kernel, as the guest has it in memory.
fn split(name: &str, module: &str) -> Vec<u8> {
    let content = Modules::open(&folder(name).join("modules")).unwrap().read(module).unwrap();
    let file = object::File::parse(&*content).unwrap();
    file.section_by_name(".BTF").expect("no .BTF").data().unwrap().to_vec()
}

// Types of a module that are taken for others of the kernel would show arguments that never were.
#[test]
fn functions_and_tracepoints_of_a_module_have_its_own_types() {
    for name in KERNELS {
        let kernel = kernel(name);
        let types = kernel.module_types(&split(name, "xfs")).unwrap();
        let point = kernel.tracepoint_prototype("xfs_buf_get_uncached", Some(&types)).unwrap();
        let names: Vec<_> = point.parameters.iter().map(|value| &*value.name).collect();
        assert_eq!(names, ["bp", "caller_ip"], "{name}");
        let none = kernel.tracepoint_prototype("xfs_buf_get_uncached", None).unwrap_err();
        assert_eq!(none, NoPrototype::Unknown, "{name}");
        let of = |function: &str| kernel.module_prototype(&types, [function].into_iter());
        let function = of("xfs_buf_get_uncached").unwrap();
        assert_eq!(function.parameters.first().unwrap().name, "target", "{name}");
        assert!(function.result.is_some(), "{name}");
        assert_eq!(of("vfs_read").unwrap_err(), NoPrototype::Unknown, "{name}: of the kernel");
        let path = |text: &str| {
            let names = ["xfs_buf_get_uncached.isra.0", "xfs_buf_get_uncached"];
            kernel.module_path(Some(&types), names.into_iter(), text)
        };
        let value = path("numblks").unwrap();
        let fetch = &function.parameters.iter().find(|it| it.name == "numblks").unwrap().fetch;
        assert_eq!(&value.fetch, fetch, "{name}");
        assert!(matches!(fetch, Fetch::Argument(1)), "{name}: {fetch:?}");
        assert!(path("nmblks").unwrap_err().to_string().contains("numblks"), "{name}");
        let error = kernel.module_path(None, ["a"].into_iter(), "x").unwrap_err();
        assert!(error.to_string().contains('a'), "{name}: {error}");
        // A type of the kernel's own, by the number that the module has for it.
        let fault = of("xfs_filemap_fault").unwrap();
        assert_eq!(fault.parameters.first().unwrap().name, "vmf", "{name}");
    }
}

// It comes from the guest's memory.
#[test]
fn damaged_types_of_a_module_are_refused_or_read() {
    let kernel = kernel("x86_64-6.12");
    let whole = split("x86_64-6.12", "dummy");
    assert!(kernel.module_types(&[]).is_err() && kernel.module_types(&whole[..30]).is_err());
    for at in 0..whole.len().min(4096) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0xff;
        if let Ok(types) = kernel.module_types(&damaged) {
            for function in ["dummy_setup", "dummy_xmit", "dummy_get_stats64"] {
                let _ = kernel.module_prototype(&types, [function].into_iter());
            }
        }
    }
}

/// Memory that has something everywhere, or not: most words are small, or lead to other such words.
struct Anything(u64);

impl Memory for Anything {
    fn read(&self, address: u64, out: &mut [u8]) -> bool {
        for (byte, offset) in out.iter_mut().zip(0..) {
            let at = address.wrapping_add(offset);
            let mut word = ((at / 8) ^ self.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            word ^= word >> 29;
            let word = match word % 4 {
                0 => word >> 58,
                1 => 0xffff_ffff_c000_0000 | (word >> 40),
                2 => 0x6161_6161_6161_6161 & word,
                _ => word >> 52,
            };
            *byte = word.to_le_bytes()[usize::try_from(at % 8).unwrap()];
        }
        address % 0x1000 < 0xf00
    }

    fn slide(&self) -> u64 {
        self.0 << 21
    }
}

// A guest can say of a module what it likes.
#[test]
fn whatever_a_module_says_of_its_tracepoints_is_bounded() {
    for name in ["x86_64-6.1", "x86_64-7", "riscv64-7"] {
        let kernel = kernel(name);
        let mut found = 0;
        for seed in 0..2000 {
            let (memory, module) = (Anything(seed), 0xffff_ffff_c000_0000 + (seed << 6));
            if let Ok(tracepoints) = kernel.module_tracepoints(&memory, module) {
                found += tracepoints.uses.len() + tracepoints.own.len();
            }
            let _ = kernel.module_btf(&memory, module);
        }
        assert!(found > 0, "{name}: nothing was ever read");
    }
}
