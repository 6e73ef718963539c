//! The analysis of the real kernels that scripts/setup puts into the cache. Their versions change,
//! so nothing here depends on the numbers of one build.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use vmtrace::kernel::tracepoints::{Event, EventField, ModuleData, Origin, Preparation};
use vmtrace::kernel::{
    Arch, Container, FtraceKind, Kernel, KernelError, ModuleFile, NeedResched, SiteSection, Source,
};

/// A kernel of the cache.
struct Cached {
    folder: PathBuf,
    name: String,
    kernel: Kernel,
}

impl Cached {
    fn open(name: &str) -> Self {
        let folder = kernels().join(name);
        let image = folder.join("vmlinuz");
        assert!(image.exists(), "{} is missing: run scripts/setup", image.display());
        let kernel = Kernel::open(&image).unwrap_or_else(|e| panic!("{name}: {e}"));
        Self { folder, name: name.to_owned(), kernel }
    }

    fn config(&self, option: &str) -> bool {
        let config = self.text("config");
        config.lines().any(|line| line.strip_prefix(option) == Some("=y"))
    }

    fn text(&self, file: &str) -> String {
        std::fs::read_to_string(self.folder.join(file)).unwrap()
    }
}

fn kernels() -> PathBuf {
    let cache = std::env::var_os("VMTRACE_CACHE").map(PathBuf::from).unwrap_or_else(|| {
        Path::new(&std::env::var_os("HOME").expect("HOME")).join(".cache/vmtrace")
    });
    cache.join("kernels")
}

/// The kernels that must be there, and any others that are.
fn each(mut check: impl FnMut(&Cached)) {
    let mut names = ["x86_64-6.1", "x86_64-6.12", "x86_64-7"].map(str::to_owned).to_vec();
    for entry in std::fs::read_dir(kernels()).expect("no kernels in the cache: run scripts/setup") {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !names.contains(&name) && kernels().join(&name).join("vmlinuz").exists() {
            names.push(name);
        }
    }
    for name in names {
        check(&Cached::open(&name));
    }
}

// Files of all kernels, compressed and not; what is damaged in any place is an error or a shorter list.
#[test]
fn functions_of_modules_are_found() {
    each(|cached| {
        let modules = vmtrace::initramfs::Modules::open(&cached.folder.join("modules")).unwrap();
        let data = modules.read("dummy").unwrap();
        let file = ModuleFile::parse(&data).unwrap();
        assert_eq!((file.arch, file.name.as_deref()), (cached.kernel.arch(), Some("dummy")));
        let find = |name: &str| {
            let named = |function: &&vmtrace::kernel::ModuleFunction| {
                function.names.iter().any(|known| known == name)
            };
            file.functions.iter().find(named).unwrap_or_else(|| panic!("{}: {name}", cached.name))
        };
        let init = find("init_module");
        assert_eq!((&*init.section, &*init.names[0]), (".init.text", "dummy_init_module"));
        assert_eq!(find("dummy_get_stats64").section, ".text");
        assert!((8..=10).contains(&file.functions.len()), "{}: {file:?}", cached.name);
        for len in (0..data.len()).step_by(97) {
            let _ = ModuleFile::parse(&data[..len]);
        }
        let mut damaged = data.clone();
        for at in (0..data.len()).step_by(61) {
            damaged[at] ^= 0xff;
            let _ = ModuleFile::parse(&damaged);
            damaged[at] = data[at];
        }
    });
}

// The same of events: whoever waits for those of a module asks for them by these names.
#[test]
fn events_of_modules_are_found() {
    each(|cached| {
        let modules = vmtrace::initramfs::Modules::open(&cached.folder.join("modules")).unwrap();
        let events =
            |data: &[u8]| cached.kernel.module_file_events(&ModuleData::parse(data).ok()?).ok();
        let data = modules.read("xfs").unwrap();
        let all = events(&data).unwrap();
        assert!((400..1000).contains(&all.len()), "{}: {}", cached.name, all.len());
        assert!(all.is_sorted_by_key(|event| event.full_name()), "{}", cached.name);
        let free = all.iter().find(|event| event.full_name() == "xfs:xfs_buf_free").unwrap();
        let field = |name: &str, kind: &str, size, signed| EventField {
            name: name.to_owned(),
            kind: kind.to_owned(),
            size,
            signed,
        };
        let fields = [field("dev", "dev_t", 4, false), field("bno", "xfs_daddr_t", 8, true)];
        assert_eq!(free.fields[..2], fields, "{}: {free:?}", cached.name);
        assert!(free.print.starts_with("\"dev %d:%d daddr 0x%llx "), "{}: {free:?}", cached.name);
        for len in (0..data.len()).step_by(data.len() / 12) {
            let _ = events(&data[..len]);
        }
        let mut damaged = data.clone();
        for at in (0..data.len()).step_by(data.len() / 24) {
            damaged[at] ^= 0xff;
            let _ = events(&damaged);
            damaged[at] = data[at];
        }
        let none = events(&modules.read("dummy").unwrap()).unwrap();
        assert_eq!(none, [], "{}: it has none", cached.name);
    });
}

#[test]
fn each_kernel_tells_what_it_is() {
    each(|cached| {
        let kernel = &cached.kernel;
        assert_eq!(kernel.release(), cached.text("release").trim());
        assert!(kernel.banner().starts_with("Linux version "));
        let (arch, container) = match cached.name.split_once('-').unwrap().0 {
            "x86_64" => (Arch::X86_64, Container::BzImage),
            _ => (Arch::Riscv64, Container::Flat),
        };
        assert_eq!((kernel.arch(), kernel.container()), (arch, container));
        assert_eq!(kernel.relocatable(), cached.config("CONFIG_RELOCATABLE"), "{}", cached.name);
        let kind = match arch {
            Arch::X86_64 => FtraceKind::Fentry,
            Arch::Riscv64 if cached.config("CONFIG_DYNAMIC_FTRACE_WITH_CALL_OPS") => {
                FtraceKind::CallOps
            }
            Arch::Riscv64 => FtraceKind::Patchable,
        };
        assert_eq!(kernel.ftrace_kind(), kind, "{}", cached.name);
    });
}

#[test]
fn symbols_are_where_the_image_says() {
    each(|cached| {
        let symbols = cached.kernel.symbols();
        assert!(symbols.len() > 50_000, "{}: {}", cached.name, symbols.len());
        assert!(symbols.iter().map(|s| s.address).is_sorted());
        assert!(symbols.iter().all(|s| s.kind.is_ascii_alphabetic() && !s.name.is_empty()));
        let address = |name: &str| {
            symbols.address(name).unwrap_or_else(|| panic!("{}: no {name}", cached.name))
        };
        let order = ["_text", "_etext", "_sinittext", "_einittext", "_end"].map(address);
        assert!(order.is_sorted(), "{}: {order:x?}", cached.name);
        let banner = cached.kernel.banner();
        let bytes = cached.kernel.bytes(address("linux_banner"), banner.len()).unwrap();
        assert_eq!(bytes, banner.as_bytes());
        // Every symbol finds itself, by name and by address.
        for symbol in symbols.iter() {
            assert!(symbols.addresses(symbol.name).any(|a| a == symbol.address));
            assert!(symbols.names_at(symbol.address).any(|name| name == symbol.name));
        }
    });
}

#[test]
fn sites_are_what_the_compiler_left_for_ftrace() {
    each(|cached| {
        let kernel = &cached.kernel;
        let name = &cached.name;
        let stats = kernel.site_stats();
        assert_eq!(stats.entries, stats.zero + stats.sites, "{name}");
        assert_eq!(stats.sites, stats.text + stats.init_text, "{name}");
        assert_eq!(stats.sites, kernel.sites().len(), "{name}");
        assert!(stats.text > 30_000 && stats.init_text > 1000, "{name}: {stats:?}");
        assert!(stats.unnamed * 50 < stats.sites, "{name}: {stats:?}");
        let weak_are_zeroed = stats.zero > 0;
        assert!(!weak_are_zeroed || stats.unnamed == 0, "{name}: {stats:?}");

        let symbols = kernel.symbols();
        let fentry = symbols.address("__fentry__");
        for site in kernel.sites() {
            let location = site.location;
            match kernel.ftrace_kind() {
                FtraceKind::Fentry => {
                    let code: [u8; 5] = kernel.bytes(location, 5).unwrap().try_into().unwrap();
                    let [0xe8, a, b, c, d] = code else { panic!("{name}: {location:#x}") };
                    let distance = i64::from(i32::from_le_bytes([a, b, c, d]));
                    assert_eq!(Some((location + 5).wrapping_add_signed(distance)), fentry);
                    assert!([0, 4].contains(&(location - site.entry)), "{name}: {site:x?}");
                }
                FtraceKind::Patchable => {
                    assert_eq!(kernel.bytes(location, 8), Some(&[1, 0, 1, 0, 1, 0, 1, 0][..]));
                    assert_eq!(location, site.entry);
                }
                FtraceKind::CallOps => {
                    assert_eq!(kernel.bytes(location, 16).unwrap(), [1, 0].repeat(8));
                    assert_eq!((location + 8, location % 8), (site.entry, 0));
                }
            }
        }
        assert!(kernel.sites().is_sorted_by_key(|s| s.location));
        let named = kernel.sites().iter().filter(|s| kernel.site_name(s).is_some()).count();
        assert_eq!(named, stats.sites - stats.unnamed, "{name}");
    });
}

// A boot report would put them down to the wrong level, or under no name.
#[test]
fn initcalls_have_their_levels_on_every_kernel() {
    each(|cached| {
        let calls = cached.kernel.initcalls();
        assert!((300..3000).contains(&calls.len()), "{}: {}", cached.name, calls.len());
        let level = |name: &str| calls.iter().find(|call| call.name == name).map(|call| call.level);
        let known = [
            ("spawn_ksoftirqd", "early"),
            ("sock_init", "core"),
            ("kobject_uevent_init", "postcore"),
            ("misc_init", "subsys"),
            ("inet_init", "fs"),
            ("populate_rootfs", "rootfs"),
            ("proc_modules_init", "device"),
            ("max_swapfiles_check", "late"),
        ];
        for (name, expected) in known {
            assert_eq!(level(name), Some(expected), "{}: {name}", cached.name);
        }
        // In the order in which they are called: no level comes twice.
        let mut levels: Vec<_> = calls.iter().map(|call| call.level).collect();
        levels.dedup();
        let all = levels.len();
        levels.sort_unstable();
        levels.dedup();
        assert_eq!(levels.len(), all, "{}", cached.name);
    });
}

#[test]
fn filters_find_what_every_kernel_has() {
    each(|cached| {
        let kernel = &cached.kernel;
        let select = |filter: &str| kernel.select(&[filter.to_owned()], &[]);
        let only = |name: &str| {
            let sites = select(name).unwrap_or_else(|e| panic!("{}: {e}", cached.name));
            assert_eq!(sites.len(), 1, "{}: {name}", cached.name);
            kernel.sites()[sites[0]]
        };
        for name in ["vfs_read", "vfs_write", "do_exit", "schedule", "kernel_clone"] {
            let site = only(name);
            assert_eq!(kernel.symbols().address(name), Some(site.entry));
            assert_eq!(site.section, SiteSection::Text);
            assert_eq!(kernel.site_name(&site), Some(name));
        }
        assert_eq!(only("vfs_caches_init").section, SiteSection::InitText);
        let count = select("vfs_*").unwrap().len();
        assert!((60..150).contains(&count), "{}: {count}", cached.name);
        // Entry code and what must not be traced has no site.
        for name in ["do_syscall_64", "handle_exception", "__schedule", "ftrace_caller"] {
            let result = select(name);
            assert!(matches!(result, Err(KernelError::NoMatch { .. })), "{}: {name}", cached.name);
        }
        let all = kernel.select(&[], &[]).unwrap().len();
        let without = kernel.select(&[], &["vfs_*".to_owned()]).unwrap().len();
        assert_eq!(all - count, without);
    });
}

#[test]
fn types_agree_with_the_image() {
    each(|cached| {
        let kernel = &cached.kernel;
        let btf = kernel.btf().unwrap();
        assert_eq!(btf.bytes().len(), kernel.btf_len());
        let offset = |strukt: &str, member: &str| {
            let found = btf.member_offset(strukt, member);
            u64::from(found.unwrap_or_else(|| panic!("{}: {strukt}.{member}", cached.name)))
        };
        // The first task is built into the image: pid 0, and its name is known.
        let init_task = kernel.symbols().address("init_task").unwrap();
        let comm = init_task + offset("task_struct", "comm");
        assert_eq!(kernel.bytes(comm, 8), Some(&b"swapper\0"[..]));
        assert_eq!(kernel.bytes(init_task + offset("task_struct", "pid"), 4), Some(&[0; 4][..]));
        let tracepoint = kernel.symbols().address("__tracepoint_sched_switch").unwrap();
        let name = kernel.bytes(tracepoint + offset("tracepoint", "name"), 8).unwrap();
        let name = u64::from_le_bytes(name.try_into().unwrap());
        assert_eq!(kernel.bytes(name, 13), Some(&b"sched_switch\0"[..]));
        assert!(btf.struct_size("task_struct").is_some_and(|size| size > 2000));
        offset("dyn_ftrace", "flags");
        offset("ftrace_ops", "func");
    });
}

/// The same kernel, but that nobody can read its type information.
fn without_btf(kernel: &Kernel) -> Kernel {
    let mut image = kernel.vmlinux().to_vec();
    let at = memchr::memmem::find(&image, kernel.btf().unwrap().bytes()).unwrap();
    image[at] ^= 0xff;
    Kernel::parse(image).unwrap()
}

// A wrong offset would have trampolines read anything, so that kernels without BTF must be
// understood exactly or not at all.
#[test]
fn structures_are_found_without_type_information() {
    each(|cached| {
        let (with, without) = (&cached.kernel, without_btf(&cached.kernel));
        let (btf, found) = (with.structs().unwrap(), without.structs().unwrap());
        let sources = (btf.source(), found.source());
        assert_eq!(sources, (Source::Btf, Source::Image), "{}", cached.name);
        let mut members = vec![
            ("task_struct", "pid"),
            ("task_struct", "tgid"),
            ("task_struct", "comm"),
            ("ftrace_page", "next"),
            ("ftrace_page", "records"),
            ("ftrace_page", "index"),
            ("dyn_ftrace", "ip"),
            ("dyn_ftrace", "flags"),
            ("ftrace_ops", "func"),
        ];
        match with.arch() {
            Arch::X86_64 if with.symbols().address("pcpu_hot").is_some() => {
                members.extend([("pcpu_hot", "current_task"), ("pcpu_hot", "cpu_number")]);
            }
            Arch::X86_64 => {}
            Arch::Riscv64 => {
                members.extend([("task_struct", "thread_info"), ("thread_info", "cpu")]);
            }
        }
        if with.ftrace_kind() == FtraceKind::CallOps {
            members.push(("ftrace_ops", "direct_call"));
        }
        for (strukt, member) in members {
            let offset = btf.member_offset(strukt, member);
            assert!(offset.is_some(), "{}: {strukt}.{member}", cached.name);
            assert_eq!(found.member_offset(strukt, member), offset, "{strukt}.{member}");
        }
        assert_eq!(found.size("dyn_ftrace"), btf.size("dyn_ftrace"), "{}", cached.name);
    });
}

// Another bit would show tasks as due that are not: each version and architecture has its own.
#[test]
fn flags_that_ask_for_a_reschedule_are_read_off_the_code() {
    each(|cached| {
        let generic = cached.name.ends_with("-7");
        let eager = if generic { 4 } else { 3 };
        let lazy = cached.config("CONFIG_ARCH_HAS_PREEMPT_LAZY").then_some(eager + 1);
        let expected = NeedResched { eager, lazy };
        assert_eq!(cached.kernel.need_resched(), Some(expected), "{}", cached.name);
    });
}

#[test]
fn a_vmlinux_is_as_good_as_the_bzimage_around_it() {
    let cached = Cached::open("x86_64-7");
    let kernel = Kernel::parse(cached.kernel.vmlinux().to_vec()).unwrap();
    assert_eq!(kernel.container(), Container::Vmlinux);
    assert_eq!(kernel.sites(), cached.kernel.sites());
    assert_eq!(kernel.symbols().len(), cached.kernel.symbols().len());
    assert_eq!(kernel.btf_len(), cached.kernel.btf_len());
    assert!(!kernel.relocatable(), "nothing moves it");
}

proptest! {
    // Each case copies 60 MB, and there is time for more in the fuzz targets.
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_kernel_gets_an_answer_soon(
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..200),
        keep in prop::option::weighted(0.3, any::<prop::sample::Index>()),
    ) {
        use std::sync::OnceLock;
        static VMLINUX: OnceLock<Vec<u8>> = OnceLock::new();
        let vmlinux = VMLINUX.get_or_init(|| Cached::open("x86_64-6.12").kernel.vmlinux().to_vec());
        let mut damaged = vmlinux.clone();
        for (place, byte) in places {
            let i = place.index(damaged.len());
            damaged[i] = byte;
        }
        if let Some(keep) = keep {
            damaged.truncate(keep.index(damaged.len()));
        }
        let start = Instant::now();
        if let Ok(kernel) = Kernel::parse(damaged) {
            let _ = kernel.structs().map(|structs| structs.member_offset("task_struct", "comm"));
            kernel.select_with_report(&["vfs_*".to_owned()], &[]);
        }
        // Debug builds on a busy machine take a second.
        prop_assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn a_truncated_bzimage_is_told_so() {
    let path = kernels().join("x86_64-6.12/vmlinuz");
    let mut bytes =
        std::fs::read(&path).unwrap_or_else(|e| panic!("{e}: run scripts/setup ({path:?})"));
    bytes.truncate(bytes.len() / 2);
    let error = Kernel::parse(bytes.clone()).unwrap_err();
    assert!(matches!(error, KernelError::Truncated { .. }), "{error}");
    for len in [100, 512] {
        let error = Kernel::parse(bytes[..len].to_vec()).unwrap_err();
        assert!(error.to_string().contains("cut off"), "{error}");
    }
}

/// The program on an image, as a user runs it.
fn vmtrace(arguments: &[&str], image: &Path) -> assert_cmd::Command {
    let mut command = assert_cmd::Command::new(assert_cmd::cargo::cargo_bin!("vmtrace"));
    command.arg(arguments[0]).arg(image).args(&arguments[1..]);
    command
}

fn image(name: &str) -> PathBuf {
    kernels().join(name).join("vmlinuz")
}

#[test]
fn functions_prints_a_sorted_line_for_each_site() {
    let cached = Cached::open("x86_64-6.12");
    let output = vmtrace(&["functions"], &image("x86_64-6.12")).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let lines: Vec<(&str, u64)> = text
        .lines()
        .map(|line| {
            let (name, address) = line.split_once("\t0x").unwrap();
            assert_eq!(address.len(), 16, "{line}");
            (name, u64::from_str_radix(address, 16).unwrap())
        })
        .collect();
    assert!(lines.is_sorted());
    let mut expected: Vec<(&str, u64)> = cached
        .kernel
        .sites()
        .iter()
        .filter_map(|site| Some((cached.kernel.site_name(site)?, site.entry)))
        .collect();
    expected.sort_unstable();
    assert_eq!(lines, expected);

    let some = &["functions", "-f", "vfs_*", "-f", "ksys_*", "-n", "*_read"];
    let output = vmtrace(some, &image("x86_64-6.12")).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let names: Vec<&str> = text.lines().map(|line| line.split('\t').next().unwrap()).collect();
    assert!(names.contains(&"vfs_write") && names.contains(&"ksys_write"), "{names:?}");
    assert!(names.iter().all(|n| !n.ends_with("_read")), "{names:?}");

    let count = ["functions", "--count", "--filter", "vfs_read", "--filter", "not_there"];
    vmtrace(&count, &image("x86_64-6.12"))
        .assert()
        .success()
        .stdout("1\n")
        .stderr("vmtrace: warning: no traceable function matches 'not_there'\n");
}

// A list that is empty because of a slip of the finger must not pass for one that is empty.
#[test]
fn functions_that_are_not_there_are_an_error_that_tells_near_ones() {
    for (glob, near) in [
        ("vfs_raed", "'vfs_raed'; near: vfs_read"),
        ("nosuch*", "'nosuch*'; `vmtrace functions KERNEL`"),
        ("memcpy", "'memcpy'; the kernel has this function, but without a call site"),
    ] {
        let failed = vmtrace(&["functions", "-f", glob], &image("x86_64-6.12"));
        let failed = { failed }.assert().code(1).stdout("");
        let text = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
        assert!(text.contains(near) && text.lines().count() == 1, "{text}");
    }
}

// What works for `boot` is expected here, too; "auto" was looked for as a directory.
#[test]
fn modules_of_an_image_are_found_for_its_lists() {
    for (command, glob, found) in [
        ("functions", &["-f", ":mod:vsock"][..], "__vsock_create"),
        ("events", &[":mod:vmw_vsock_virtio_transport_common"], "vsock:virtio_transport_alloc_pkt"),
    ] {
        let args = [&[command, "--modules", "auto"], glob].concat();
        let listed = vmtrace(&args, &image("x86_64-6.12")).assert().success();
        let text = String::from_utf8(listed.get_output().stdout.clone()).unwrap();
        assert!(text.lines().any(|line| line.starts_with(found)), "{command}: {text}");
    }
}

// A build tree, in which the kernel's own tests may have modules of the same name.
#[test]
fn modules_of_which_nobody_knows_which_are_left_out_of_lists() {
    let modules = image("x86_64-6.12").with_file_name("modules/kernel/net/vmw_vsock");
    let dir = tempfile::tempdir().unwrap();
    for (from, to) in [
        ("vsock", "vsock"),
        ("vsock_loopback", "one/twice"),
        ("vmw_vsock_virtio_transport_common", "other/twice"),
    ] {
        let to = dir.path().join(format!("{to}.ko.xz"));
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(modules.join(format!("{from}.ko.xz")), to).unwrap();
    }
    let list = |command: &[&str]| {
        let args = [command, &["--modules", dir.path().to_str().unwrap()]].concat();
        let output = vmtrace(&args, &image("x86_64-6.12")).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), said)
    };
    let (code, listed, said) = list(&["functions", "-f", "*vsock*"]);
    assert!(code == Some(0) && listed.contains("vsock_poll [vsock]"), "{listed} {said}");
    assert!(said.contains("note: module twice is left out: it may be "), "{said}");
    assert!(said.contains("one/twice.ko.xz") && said.contains("other/twice.ko.xz"), "{said}");
    let (code, listed, said) = list(&["events", "--count"]);
    assert!(code == Some(0) && !listed.is_empty(), "{said}");
    assert!(said.contains("note: module twice is left out"), "{said}");
    // Who wants it has to say which.
    let (code, listed, said) = list(&["functions", "-f", ":mod:twice"]);
    assert!(code == Some(1) && listed.is_empty(), "{listed}");
    assert!(said.contains("several modules twice") && said.lines().count() == 1, "{said}");
}

// Two lines about one slip look like two.
#[test]
fn what_is_wrong_with_filters_is_said_once() {
    let options = ["boot", "-f", "vfs_open", "-f", "vfs_raed", "--tracer", "a=vfs_raed,vfs_read"];
    let more =
        ["--tracer", "b=vfs_raed:args", "--returns", "vfs_raed", "--modules", "/nonexistent"];
    let output = vmtrace(&[&options[..], &more].concat(), &image("x86_64-6.12")).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    // The boot ends behind it, for want of modules.
    assert_eq!(text.matches("vfs_raed").count(), 1, "{text}");
    assert!(text.contains("no function matches \"vfs_raed\"; near: vfs_read,"), "{text}");
    let none = ["boot", "-f", "vfs_open", "-n", "vfs_open", "--tracer", "vfs_read"];
    let options = [&none[..], &["--modules", "/nonexistent"]].concat();
    let output = vmtrace(&options, &image("x86_64-6.12")).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("warning: -f vfs_open -n vfs_open has no function\n"), "{text}");
}

// What tracers of the same functions, or patterns of the same events, have to say of them.
#[test]
fn notes_are_said_once() {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: vmtrace::cli::boot::Args,
    }
    let kernel = Cached::open("x86_64-6.12").kernel;
    for line in [
        "-f vfs_* --args --tracer a=vfs_*:args",
        "--tracer a=vfs_*:args --tracer b=vfs_*:args",
        "--event xdp:* --event xdp:* --event xdp:xdp_*",
        "-f :mod:ext4 --tracer a=:mod:ext4",
    ] {
        let words = ["boot", "vmlinuz"].into_iter().chain(line.split(' '));
        let line = <Line as clap::Parser>::parse_from(words);
        let (_, notes) = line.args.tracing(&kernel).unwrap();
        let different: std::collections::BTreeSet<_> = notes.iter().collect();
        assert_eq!(different.len(), notes.len(), "{notes:?}");
        assert!(!notes.is_empty());
    }
}

// A script must be able to tell a slip in its own command line from a run that failed.
#[test]
fn wrong_names_in_conditions_and_histograms_are_usage() {
    for (options, told) in [
        (["--if", "nosuch > 3"], "at character 1: \"nosuch > 3\""),
        (["--if", "pid == 1 && comm > 3"], "at character 13: \"comm > 3\""),
        (["--tracer", "vfs_read if caller == nosuch"], "has no function \"nosuch\""),
        (["--start-at", "vfs_read if nosuch == 1"], "no such parameter"),
        (["--hist", "vfs_read:nosuch"], "no histogram of nosuch"),
    ] {
        let args = [&["boot", "-f", "vfs_read"], &options[..]].concat();
        let failed = vmtrace(&args, &image("x86_64-6.12")).assert().code(2).stdout("");
        let text = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
        assert!(text.contains(told), "{text}");
    }
}

// `perf`, `nm` and debuggers know functions by the addresses of their symbols; the site is before it
// or behind it.
#[test]
fn functions_have_the_addresses_of_their_symbols_on_every_kernel() {
    for name in ["x86_64-6.12", "riscv64-6.12", "riscv64-7"] {
        let cached = Cached::open(name);
        let output = vmtrace(&["functions", "-f", "vfs_read"], &image(name)).assert().success();
        let address = cached.kernel.symbols().address("vfs_read").unwrap();
        let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
        assert_eq!(text, format!("vfs_read\t{address:#018x}\n"), "{name}");
    }
}

#[test]
fn patterns_may_stand_in_a_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let globs = format!("@{}", file.path().display());
    let args = ["functions", "--count", "-f", &globs, "-f", "ksys_read"];
    let failed = vmtrace(&args, &image("x86_64-6.12")).assert().code(1).stdout("");
    let text = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
    assert!(text.contains("has no patterns of functions"), "{text}");
    std::fs::write(file.path(), "# reading\nvfs_read vfs_write\n\n  vfs_readv # and this\n")
        .unwrap();
    vmtrace(&args, &image("x86_64-6.12")).assert().success().stdout("4\n").stderr("");
}

#[test]
fn a_placeholder_of_a_system_map_is_told_as_such() {
    let map = kernels().join("x86_64-7/modules/System.map");
    let map = map.to_str().unwrap();
    let failed = vmtrace(&["functions", "--system-map", map], &image("x86_64-7"));
    let failed = { failed }.assert().code(1);
    let text = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
    assert!(text.contains("this is a placeholder"), "{text}");
}

#[test]
fn a_reader_that_stops_early_is_no_failure() {
    let vmtrace = assert_cmd::cargo::cargo_bin!("vmtrace");
    let script = r#""$0" functions "$1" | head -n 1 >/dev/null; exit "${PIPESTATUS[0]}""#;
    assert_cmd::Command::new("bash")
        .args(["-c", script])
        .arg(vmtrace)
        .arg(image("x86_64-6.1"))
        .assert()
        .success()
        .stderr("");
}

#[test]
fn inspect_tells_people_and_programs() {
    let cached = Cached::open("x86_64-6.12");
    let output = vmtrace(&["inspect", "--json"], &image("x86_64-6.12")).assert().success();
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let stats = cached.kernel.site_stats();
    let expected = serde_json::json!({
        "release": cached.kernel.release(),
        "arch": "x86_64",
        "symbols": cached.kernel.symbols().len(),
        "mcount": {
            "entries": stats.entries,
            "zero": stats.zero,
            "sites": stats.sites,
            "text": stats.text,
            "init_text": stats.init_text,
            "unnamed": stats.unnamed,
        },
        "ftrace": "fentry",
        "btf_bytes": cached.kernel.btf_len(),
        "layout": "btf",
        "relocatable": true,
    });
    assert_eq!(report, expected);

    let output = vmtrace(&["inspect"], &image("x86_64-6.12")).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    for part in [cached.kernel.release(), "bzImage", "traceable", &stats.zero.to_string()] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn what_is_no_kernel_gets_one_line_and_exit_code_1() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    for (file, reason) in [
        (here.as_path(), "not a Linux kernel image: unknown data (5b 70 61"),
        (Path::new("/nothing/there"), "cannot be read: No such file or directory"),
        (Path::new("/proc/self"), "cannot be read: "),
    ] {
        for command in ["inspect", "functions"] {
            let failed = vmtrace(&[command], file).assert().code(1).stdout("");
            let text = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
            let begin = format!("vmtrace: error: {}: {reason}", file.display());
            assert!(text.starts_with(&begin) && text.lines().count() == 1, "{text}");
        }
    }
}

// Fields by their names and types are what a format file in the guest would say.
#[test]
fn events_have_the_fields_of_their_format_on_every_kernel() {
    let declared = [
        ("prev_comm", "char[16]", 16, false),
        ("prev_pid", "pid_t", 4, true),
        ("prev_prio", "int", 4, true),
        ("prev_state", "long", 8, true),
        ("next_comm", "char[16]", 16, false),
        ("next_pid", "pid_t", 4, true),
        ("next_prio", "int", 4, true),
    ];
    each(|cached| {
        let name = &cached.name;
        let events = cached.kernel.events().unwrap();
        assert!(events.len() > 1000, "{name}: {}", events.len());
        let names: Vec<String> = events.iter().map(|event| event.full_name()).collect();
        let order = |event: &Event| (event.system.clone(), event.name.clone());
        assert!(events.is_sorted_by_key(order), "{name}");
        assert!(events.iter().all(|event| !event.name.is_empty()), "{name}");
        let find = |full: &str| {
            let found = names.iter().position(|name| name == full);
            &events[found.unwrap_or_else(|| panic!("{name}: no {full}"))]
        };
        let switch = find("sched:sched_switch");
        let fields = switch
            .fields
            .iter()
            .map(|field| (&*field.name, &*field.kind, field.size, field.signed));
        let fields: Vec<_> = fields.collect();
        for (found, wanted) in fields.iter().zip(declared) {
            // Text has no sign, or that of `char`.
            assert_eq!((found.0, found.1, found.2), (wanted.0, wanted.1, wanted.2), "{name}");
            assert!(found.1.starts_with("char[") || found.3 == wanted.3, "{name}: {found:?}");
        }
        assert_eq!(fields.len(), declared.len(), "{name}");
        assert!(switch.print.contains("==> next_comm=%s next_pid=%d"), "{name}");
        let open: Vec<_> = find("syscalls:sys_enter_openat").fields.iter().collect();
        let open: Vec<&str> = open.iter().map(|field| &*field.name).collect();
        assert_eq!(open, ["__syscall_nr", "dfd", "filename", "flags", "mode"], "{name}");

        // From the tables of the architectures (Documentation: syscall_64.tbl, unistd.h).
        let number = |full: &str| match find(full).origin {
            Origin::Syscall { number, exit } => (number, exit),
            _ => panic!("{name}: {full}"),
        };
        let known = match cached.kernel.arch() {
            Arch::X86_64 => [("read", 0), ("getppid", 110), ("openat", 257), ("clone3", 435)],
            Arch::Riscv64 => [("read", 63), ("getppid", 173), ("openat", 56), ("clone3", 435)],
        };
        for (call, wanted) in known {
            assert_eq!(number(&format!("syscalls:sys_enter_{call}")), (Some(wanted), false));
            assert_eq!(number(&format!("syscalls:sys_exit_{call}")), (Some(wanted), true));
        }
        let calls = events.iter().filter(|event| event.system == "syscalls");
        let unknown = calls
            .clone()
            .filter(|event| !matches!(event.origin, Origin::Syscall { number: Some(_), .. }));
        let unknown: Vec<&str> = unknown.map(|event| &*event.name).collect();
        // Those of 32-bit programs, and of other architectures.
        assert!(unknown.len() * 4 < calls.count(), "{name}: {unknown:?}");
        assert!(unknown.contains(&"sys_enter_mmap_pgoff"), "{name}: {unknown:?}");

        // What probes get is known of all, and where the kernel comes by them of nearly all.
        let (mut points, mut nowhere) = (0, 0);
        for event in events {
            let Origin::Tracepoint(point, at) = &event.origin else { continue };
            points += 1;
            let prototype = cached.kernel.tracepoint_prototype(point, None);
            assert!(prototype.is_ok(), "{name} {point}: {prototype:?}");
            let hooks = cached.kernel.tracepoint_hooks(*at).unwrap();
            nowhere += usize::from(!hooks.are_used());
            if point == "sys_enter" || point == "sys_exit" {
                // The one bit is SYSCALL_WORK_SYSCALL_TRACEPOINT of include/linux/thread_info.h.
                let marks =
                    matches!(&hooks.preparation, Preparation::Syscalls(marks) if marks.mark == 2);
                assert!(marks, "{name} {point}: {:?}", hooks.preparation);
            }
        }
        assert!(points > 500 && nowhere * 10 < points, "{name}: {nowhere} of {points}");
    });
}

#[test]
fn events_are_listed_for_people_and_programs() {
    let one = vmtrace(&["events", "sched:sched_waking", "--json"], &image("x86_64-6.12"));
    let output = { one }.assert().success();
    let line: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(
        (&line["name"], &line["tracepoint"]),
        (&"sched:sched_waking".into(), &"sched_waking".into())
    );
    let field = serde_json::json!({"name": "pid", "type": "pid_t", "size": 4, "signed": true});
    assert_eq!(line["fields"][1], field);
    assert_eq!(line.get("only_arguments"), None);
    // What is recorded of others is not what is listed.
    let only = ["events", "xdp:mem_return_failed", "--json"];
    let output = vmtrace(&only, &image("x86_64-6.12")).assert().success();
    let line: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(line["only_arguments"], true);
    vmtrace(&only[..2], &image("x86_64-6.12")).assert().success().stdout(
        "xdp:mem_return_failed\tconst struct page * page, u32 mem_id, u32 mem_type\t[only arguments]\n",
    );
    vmtrace(&["events", "sched_wakeup*"], &image("riscv64-7")).assert().success().stdout(
        "sched:sched_wakeup\tchar comm[16], pid_t pid, int prio, int target_cpu\n\
             sched:sched_wakeup_new\tchar comm[16], pid_t pid, int prio, int target_cpu\n",
    );
    let failed = vmtrace(&["events", "sched:nosuch*"], &image("x86_64-6.12"));
    let failed = { failed }.assert().code(1).stdout("");
    let text = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
    assert!(text.contains("no event of the kernel matches 'sched:nosuch*'"), "{text}");
}
