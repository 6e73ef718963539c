//! The kernel, modules and initial RAM disk of a run: as named, or as found.

use super::{AgentArg, Args, interactive, userland};
use crate::cli::BadUsage;
use crate::cli::module_files::of_another_kernel;
use crate::emulated::HostArch;
use crate::initramfs::{self, AGENT_BESIDE, AgentAs, LoadedModule};
use crate::kernel::Arch;
use anyhow::{Context, Result, anyhow, bail};
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use vmtrace_system::say;

/// `--modules auto`; a directory of that name is `./auto`.
const AUTO: &str = "auto";

/// Modules of the built-in initramfs that make virtio devices work, as far as a
/// kernel has them.
const MODULES: [&str; 3] = ["virtio_mmio", "virtio_rng", "vmw_vsock_virtio_transport"];

/// The same for disks: their driver, and ext4 with what it asks for by no dependency.
const DISK_MODULES: [&str; 5] =
    ["virtio_mmio", "virtio_blk", "crc32c_generic", "crc32c_cryptoapi", "ext4"];

/// The kernel that the user names, or the running one of this machine, which is said.
///
/// # Errors
/// When none is named, and the running one cannot be read.
pub(super) fn kernel(args: &Args) -> Result<PathBuf> {
    if let Some(kernel) = &args.kernel {
        return Ok(kernel.clone());
    }
    let uname = nix::sys::utsname::uname().context("uname")?;
    let release = uname.release().to_string_lossy();
    let image = running(Path::new("/"), &release)?;
    say!("vmtrace: kernel: {}, the running one of this machine", image.display());
    Ok(image)
}

/// The image of the running kernel, below `root`.
fn running(root: &Path, release: &str) -> Result<PathBuf> {
    // As distributions name it: most, Debian on riscv64, and Fedora.
    let places = [
        format!("boot/vmlinuz-{release}"),
        format!("boot/vmlinux-{release}"),
        format!("lib/modules/{release}/vmlinuz"),
    ];
    let first = root.join(&places[0]);
    for place in places {
        let path = root.join(place);
        // A first byte, since directories can be opened, too.
        match File::open(&path).and_then(|mut file| file.read_exact(&mut [0])) {
            Ok(()) => return Ok(path),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(error) => {
                return Err(anyhow!(error).context(format!(
                    "no KERNEL is named, and the image of the running one cannot be read ({}): name \
                     one, or make that readable (as root: chmod a+r)",
                    path.display()
                )));
            }
        }
    }
    bail!(
        "no KERNEL is named, and the running one, {release}, has no image here ({} is missing): name \
         one, or install the running kernel's package",
        first.display()
    )
}

/// Where the modules of a kernel are, as far as the user wants any: those named, or with `auto`,
/// and for a kernel that was not named, those found, which is said.
///
/// # Errors
/// When `auto` finds none.
pub(super) fn modules(args: &Args, image: &Path, release: &str) -> Result<Option<PathBuf>> {
    let auto = match &args.modules {
        Some(dir) if dir == Path::new(AUTO) => true,
        Some(dir) => return Ok(Some(dir.clone())),
        None if args.kernel.is_none() && args.initrd.is_none() => false,
        None => return Ok(None),
    };
    let found = match found_modules(image, release) {
        Err(error) if auto => return Err(error),
        found => found.ok(),
    };
    if let Some(dir) = &found {
        say!("vmtrace: modules: {}", dir.display());
    }
    Ok(found)
}

/// The directory that `--modules` names, or finds as `auto`.
///
/// # Errors
/// When `auto` finds none.
pub(in crate::cli) fn modules_in(dir: PathBuf, image: &Path, release: &str) -> Result<PathBuf> {
    if dir == Path::new(AUTO) { found_modules(image, release) } else { Ok(dir) }
}

/// Where modules of this kernel are.
fn found_modules(image: &Path, release: &str) -> Result<PathBuf> {
    let places = module_places(Path::new("/"), image, release);
    places.iter().find(|dir| dir.join("modules.dep").is_file()).cloned().ok_or_else(|| {
        let places: Vec<_> = places.iter().map(|dir| dir.display().to_string()).collect();
        anyhow!(
            "--modules auto: none of these has modules (modules.dep) of {release}: {}; name the \
             directory: --modules DIR",
            places.join(", ")
        )
    })
}

/// And for shares: what they need comes first, as dependencies.
const SHARE_MODULES: [&str; 3] = ["virtio_mmio", "fuse", "virtiofs"];

/// What keeps the changes of a root that may only be read.
const ROOT_MODULE: &str = "overlay";

/// And for what a command writes.
const OUTPUT_MODULES: [&str; 2] = ["virtio_mmio", "vmw_vsock_virtio_transport"];

/// Where the modules are that disks, shares and the output of a command need, for the agent to load: those of the
/// run, or as found.
pub(super) fn device_modules(args: &Args, image: &Path, release: &str) -> Option<PathBuf> {
    let devices = args.needs_devices();
    let nobody_loads_them = args.initrd.is_some() && !args.agent_in_initrd;
    if !devices && args.run.is_none() || nobody_loads_them {
        return None;
    }
    if args.modules.is_some() {
        return args.modules.clone();
    }
    let places = module_places(Path::new("/"), image, release);
    let found = places.into_iter().find(|dir| dir.join("modules.dep").is_file());
    match &found {
        Some(dir) if devices => {
            say!("vmtrace: modules for disks and shares: {}", dir.display());
        }
        Some(dir) => say!("vmtrace: modules for the output of --run: {}", dir.display()),
        // The agent says what it has come to.
        None if !devices => {}
        None => say!(
            "vmtrace: no modules of {release} are found: the guest has its disks and shares if \
             virtio_mmio, virtio_blk and virtiofs are built into its kernel, or with --modules DIR"
        ),
    }
    found
}

/// Where the modules of an image may be, the likeliest first: beside the image, in the folder that has both, in the tree
/// that it is in the `boot` of, and in the system's.
fn module_places(root: &Path, image: &Path, release: &str) -> Vec<PathBuf> {
    // The link's own folder may be anywhere: `vmlinuz` of a distribution is a link.
    let image = image.canonicalize().unwrap_or_else(|_| image.to_owned());
    let beside = image.parent().unwrap_or(Path::new("."));
    let mut places = vec![beside.join("modules")];
    // An image may say anything.
    if release.is_empty() || release.starts_with('.') || release.contains('/') {
        return places;
    }
    // Distributions have images in `usr/lib/modules/RELEASE`, too.
    places.push(beside.to_owned());
    // Where both are there, one mostly leads to the other.
    let in_tree = ["lib/modules", "usr/lib/modules"].map(|dir| Path::new(dir).join(release));
    let trees = [Some(beside), beside.parent(), Some(root)];
    places.extend(
        trees.into_iter().flatten().flat_map(|tree| in_tree.iter().map(|it| tree.join(it))),
    );
    places.dedup();
    places
}

/// The guest's initial RAM disk; one for another architecture lacks the agent.
pub(super) fn initrd(args: &Args, guest: HostArch, release: &str) -> Result<Vec<u8>> {
    let own = args.initrd.as_ref();
    let own = own.map(|path| std::fs::read(path).with_context(|| path.display().to_string()));
    let own = own.transpose()?;
    if let (Some(own), Some(path)) = (&own, &args.initrd) {
        // The kernel would say so in its log, and then that it has no root.
        if !initramfs::is_initrd(own) {
            let what = "not an initial RAM disk: neither a cpio archive nor compressed in a way of the kernel's";
            return Err(BadUsage(format!("--initrd: {} is {what}", path.display())).into());
        }
        userland::check_own(args, own)?;
    }
    let own = match own {
        Some(content) if !args.agent_in_initrd => {
            if !args.add.is_empty() {
                let builder = initramfs::Builder::new().without_agent();
                let builder = args.add.iter().fold(builder, initramfs::Builder::add_file);
                return Ok(builder.build_before(&content)?);
            }
            return Ok(match args.add_agent {
                Some(AgentArg::Init) => initramfs::add_agent(&content, AgentAs::Init)?,
                Some(AgentArg::Beside) => initramfs::add_agent(&content, AgentAs::Beside)?,
                None => content,
            });
        }
        own => own,
    };
    let mut builder = initramfs::Builder::new().run(args.run.as_deref());
    if args.run.is_some() {
        builder = builder.output(args.has_stdout_for_run());
    }
    builder = builder.userland(userland::find(args, guest)?);
    builder = builder.shares(args.shares.mounts()).root(args.shares.process_1());
    let terminal = interactive::for_guest(args);
    let terminal = terminal.as_ref().map(|(rows, columns, kind)| (*rows, *columns, &**kind));
    builder = builder.console(terminal);
    if !guest.is_native() {
        builder = builder.without_agent();
    }
    for file in &args.add {
        builder = builder.add_file(file);
    }
    if let Some(dir) = args.modules.as_ref().or(args.device_modules.as_ref()) {
        let modules = guest_modules(args, dir).inspect(|modules| {
            let mut contents = modules.iter().map(|module| &module.content);
            let other = contents.find_map(|content| of_another_kernel(content, release));
            if let Some(other) = other {
                say!(
                    "vmtrace: warning: {}: these are modules of Linux {other}, and the kernel is {release}: \
                     it refuses them (Exec format error), unless its versions of symbols (CONFIG_MODVERSIONS) are theirs",
                    dir.display()
                );
            }
        });
        builder = builder.modules(match modules {
            // The user has not asked for any, and the agent says what it has come to.
            Err(error) if args.modules.is_none() && !args.needs_devices() => {
                say!("vmtrace: no modules for the output of --run: {error}");
                Vec::new()
            }
            modules => modules?,
        });
    }
    Ok(match own {
        Some(own) => builder.build_before(&own)?,
        None => builder.build()?,
    })
}

/// Has the kernel start the agent in an initial RAM disk of the user's, where a command or a shell is to be run by it.
///
/// # Errors
/// When the user has something else started, or asks for what the agent would have to do.
pub(super) fn start_agent(args: &mut Args) -> Result<(), BadUsage> {
    let Some(initrd) = &args.initrd else { return Ok(()) };
    // What is behind -- is for process 1.
    let mut words = args.cmdline.split_whitespace().take_while(|word| *word != "--");
    let other = words.find(|word| word.starts_with("rdinit="));
    args.agent_in_initrd = match (&args.run, other) {
        (Some(_), Some(word)) => {
            return Err(BadUsage(format!(
                "--run: in an --initrd the agent runs the command as process 1 (rdinit={AGENT_BESIDE}), \
                 and --cmdline has {word}: leave out one of them"
            )));
        }
        (Some(_), None) => true,
        (None, other) => args.interactive && other.is_none(),
    };
    if !args.agent_in_initrd {
        return match args.modules {
            Some(_) => Err(BadUsage(
                "--modules: with --initrd they are loaded only for --run and --interactive; an initial \
                 RAM disk of your own loads its own"
                    .to_owned(),
            )),
            None => Ok(()),
        };
    }
    if args.interactive {
        say!(
            "vmtrace: a shell in {}, run by the agent; for its own /init add: --cmdline rdinit=/init",
            initrd.display()
        );
    }
    args.cmdline = format!("rdinit={AGENT_BESIDE} {}", args.cmdline).trim_end().to_owned();
    Ok(())
}

/// Refuses words of the command line that no x86-64 guest of vmtrace survives: its devices interrupt by the I/O APIC
/// alone (hardware-reduced ACPI), and without that the kernel takes their interrupts for exceptions.
///
/// # Errors
/// Which word that is, and what to do instead.
pub(super) fn check_cmdline(cmdline: &str, arch: Arch) -> Result<(), BadUsage> {
    let mut words = cmdline.split_whitespace().take_while(|word| *word != "--");
    let fatal = |word: &&str| match *word {
        "noapic" | "nolapic" | "disableapic" | "nosmp" | "maxcpus=0" | "acpi=noirq" => true,
        word => {
            word.strip_prefix("pci=").is_some_and(|how| how.split(',').any(|it| it == "noacpi"))
        }
    };
    let Some(word) = words.find(fatal).filter(|_| arch == Arch::X86_64) else { return Ok(()) };
    let instead = match word {
        "nosmp" | "maxcpus=0" => "use --cpus 1, or maxcpus=1",
        _ => "leave it out",
    };
    Err(BadUsage(format!(
        "--cmdline has {word}: the guest would use no I/O APIC, by which alone its devices interrupt; {instead}"
    )))
}

/// Refuses a command line that the kernel has no room for, as the machine does, which comes later: in an emulated host
/// not before that has started. `added` is what that host adds.
///
/// # Errors
/// How long it is.
pub(super) fn check_length(args: &Args, added: &str, arch: Arch) -> Result<(), BadUsage> {
    // COMMAND_LINE_SIZE of arch/x86/include/asm/setup.h and arch/riscv/include/uapi/asm/setup.h, without the NUL.
    let most = match arch {
        Arch::X86_64 => 2047,
        Arch::Riscv64 => 1023,
    };
    let own = args.guest_cmdline().len();
    let length = own + if added.is_empty() { 0 } else { added.len() + 1 };
    if length <= most {
        return Ok(());
    }
    Err(BadUsage(format!(
        "--cmdline: the kernel's command line would have {length} bytes, of which {} are vmtrace's own, and this kernel takes at \
         most {most}; shorten it by {}",
        length - args.cmdline.trim_end().len(),
        length - most
    )))
}

impl Args {
    /// Whether the guest needs drivers of disks or shares.
    fn needs_devices(&self) -> bool {
        self.disks.any() || self.shares.count() > 0
    }
}

/// The modules that a run needs, of those in a directory.
fn guest_modules(args: &Args, dir: &Path) -> Result<Vec<LoadedModule>, initramfs::Error> {
    let modules = initramfs::Modules::open(dir)?;
    let usual = MODULES.iter().filter(|_| args.modules.is_some());
    let wanted = usual
        .chain(OUTPUT_MODULES.iter().filter(|_| args.run.is_some()))
        .chain(DISK_MODULES.iter().filter(|_| args.disks.any()))
        .chain(SHARE_MODULES.iter().filter(|_| args.shares.count() > 0))
        .chain(args.shares.root.iter().map(|_| &ROOT_MODULE));
    let names: Vec<_> =
        wanted.copied().filter(|name| modules.names().any(|has| has == *name)).collect();
    modules.resolve(&names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::{args, without_kernel};
    use std::fs;

    /// Makes empty files and the folders above them.
    fn tree(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        root
    }

    #[test]
    fn a_named_kernel_is_taken() {
        assert_eq!(kernel(&args("").unwrap()).unwrap(), Path::new("vmlinuz"));
        assert!(args("other").is_err(), "two kernels");
    }

    #[test]
    fn the_running_kernel_is_found_where_distributions_have_it() {
        for place in ["boot/vmlinuz-6.1", "boot/vmlinux-6.1", "lib/modules/6.1/vmlinuz"] {
            let root = tree(&[place, "boot/vmlinuz-6.2"]);
            assert_eq!(running(root.path(), "6.1").unwrap(), root.path().join(place));
        }
    }

    // The user has named nothing that such an error could be about.
    #[test]
    fn a_running_kernel_without_an_image_is_one_clear_error() {
        let root = tree(&["boot/vmlinuz-6.2"]);
        let error = format!("{:#}", running(root.path(), "6.1").unwrap_err());
        let path = root.path().join("boot/vmlinuz-6.1");
        assert!(error.starts_with("no KERNEL is named"), "{error}");
        assert!(error.contains(&format!("{} is missing", path.display())), "{error}");
        assert!(error.contains("install"), "{error}");
        // Not readable, whoever runs this test: a directory.
        fs::create_dir(&path).unwrap();
        let error = format!("{:#}", running(root.path(), "6.1").unwrap_err());
        assert!(error.contains("cannot be read") && error.contains("chmod"), "{error}");
        assert!(error.contains("Is a directory") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn modules_are_found_beside_the_image_first() {
        let system = tree(&["lib/modules/6.1/modules.dep"]);
        let find = |image: &Path| {
            let places = module_places(system.path(), image, "6.1");
            places.into_iter().find(|dir| dir.join("modules.dep").is_file()).unwrap()
        };
        let beside = tree(&["vmlinuz", "modules/modules.dep", "lib/modules/6.1/modules.dep"]);
        let image = beside.path().join("vmlinuz");
        let expected = image.canonicalize().unwrap().with_file_name("modules");
        assert_eq!(find(&image), expected);
        let unpacked = tree(&["boot/vmlinuz-6.1", "lib/modules/6.1/modules.dep"]);
        let root = unpacked.path().canonicalize().unwrap();
        assert_eq!(find(&root.join("boot/vmlinuz-6.1")), root.join("lib/modules/6.1"));
        // As distributions have them where `lib` leads to `usr/lib`, which not everybody unpacks.
        let merged = tree(&["boot/vmlinuz-6.1", "usr/lib/modules/6.1/modules.dep"]);
        let root = merged.path().canonicalize().unwrap();
        assert_eq!(find(&root.join("boot/vmlinuz-6.1")), root.join("usr/lib/modules/6.1"));
        let both = tree(&["usr/lib/modules/6.1/vmlinuz", "usr/lib/modules/6.1/modules.dep"]);
        let dir = both.path().canonicalize().unwrap().join("usr/lib/modules/6.1");
        assert_eq!(find(&dir.join("vmlinuz")), dir);
        let alone = tree(&["vmlinuz"]);
        let found = find(&alone.path().join("vmlinuz"));
        assert_eq!(found, system.path().join("lib/modules/6.1"));
    }

    // An image says what its release is.
    #[test]
    fn no_release_leads_elsewhere() {
        for release in ["", "../../tmp", "..", "a/../../b", "/tmp"] {
            let places = module_places(Path::new("/"), Path::new("/k/vmlinuz"), release);
            assert_eq!(places, [Path::new("/k/modules")], "{release:?}");
        }
    }

    #[test]
    fn modules_are_looked_for_when_asked_for_or_without_a_kernel() {
        let tree = tree(&["vmlinuz", "modules/modules.dep"]);
        let root = tree.path().canonicalize().unwrap();
        let image = root.join("vmlinuz");
        let find = |args: &Args| modules(args, &image, "6.1-none").unwrap();
        assert_eq!(find(&args("").unwrap()), None);
        assert_eq!(find(&args("--modules auto").unwrap()), Some(root.join("modules")));
        assert_eq!(find(&args("--modules ./auto").unwrap()), Some("./auto".into()));
        assert_eq!(find(&args("--modules dir").unwrap()), Some("dir".into()));
        assert_eq!(find(&without_kernel("").unwrap()), Some(root.join("modules")));
        assert_eq!(find(&without_kernel("--initrd file").unwrap()), None);
        fs::remove_dir_all(root.join("modules")).unwrap();
        assert_eq!(find(&without_kernel("").unwrap()), None);
        let error = modules(&args("--modules auto").unwrap(), &image, "6.1-none").unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("/lib/modules/6.1-none") && error.contains("--modules DIR"),
            "{error}"
        );
    }

    // The kernel would start another process 1, and the run would end without a status; or the agent, and not what the user
    // has named.
    #[test]
    fn a_command_in_a_users_initrd_is_run_by_the_agent() {
        let add = |options: &str| {
            let mut args = args(options).unwrap();
            start_agent(&mut args).map(|()| args.cmdline).map_err(|error| error.to_string())
        };
        let asked = "rdinit=/vmtrace/agent";
        assert_eq!(add("--initrd i --run ls").unwrap(), asked);
        assert_eq!(add("--initrd i --run ls --cmdline a").unwrap(), format!("{asked} a"));
        for other in ["--initrd i --cmdline=rdinit=/x", "--run ls --cmdline=rdinit=/x", "--run ls"]
        {
            assert!(!add(other).unwrap().contains(asked), "{other}");
        }
        let error = add("--initrd i --run ls --cmdline=rdinit=/x").unwrap_err();
        assert!(
            error.contains("--cmdline has rdinit=/x") && error.contains("leave out"),
            "{error}"
        );
        let error = add("--initrd i --modules auto").unwrap_err();
        assert!(error.contains("loaded only for --run and --interactive"), "{error}");
        // Who sits at the console gets a shell, unless something else is named.
        assert_eq!(add("--initrd i --interactive").unwrap(), asked);
        assert!(add("--initrd i --interactive --modules auto").is_ok());
        assert_eq!(add("--initrd i --interactive --cmdline=rdinit=/init").unwrap(), "rdinit=/init");
        assert_eq!(add("--initrd i").unwrap(), "");
        assert!(add("--initrd i --modules auto --run ls").is_ok());
        let mut behind = args("--initrd i --run ls").unwrap();
        behind.cmdline = "quiet -- rdinit=/x".to_owned();
        assert!(start_agent(&mut behind).is_ok());
        assert_eq!(behind.cmdline, format!("{asked} quiet -- rdinit=/x"));
    }

    // The guest panics early in its boot, with an exception that nothing on the console explains.
    #[test]
    fn a_guest_without_an_io_apic_is_refused() {
        for word in [
            "noapic",
            "nolapic",
            "disableapic",
            "nosmp",
            "maxcpus=0",
            "acpi=noirq",
            "pci=noacpi",
            "pci=nomsi,noacpi",
        ] {
            let line = format!("quiet {word} debug");
            let error = check_cmdline(&line, Arch::X86_64).unwrap_err().to_string();
            assert!(error.contains(&format!("--cmdline has {word}: ")), "{error}");
            assert!(check_cmdline(&line, Arch::Riscv64).is_ok(), "{word}");
        }
        for line in ["", "maxcpus=1", "nolapic_timer nox2apic", "acpi=ht pci=off", "quiet -- nosmp"]
        {
            assert!(check_cmdline(line, Arch::X86_64).is_ok(), "{line}");
        }
    }

    // It was refused when the emulated host had started, half a minute later.
    #[test]
    fn a_command_line_without_room_is_refused_at_once() {
        let mut args = args("").unwrap();
        let own = args.guest_cmdline().len() + 1;
        for (arch, most) in [(Arch::X86_64, 2047), (Arch::Riscv64, 1023)] {
            for added in ["", "quiet"] {
                let room = most - own - if added.is_empty() { 0 } else { added.len() + 1 };
                args.cmdline = "x".repeat(room);
                assert!(check_length(&args, added, arch).is_ok(), "{arch:?} {added}");
                args.cmdline.push_str("xyz  ");
                let error = check_length(&args, added, arch).unwrap_err().to_string();
                assert!(error.contains(&format!("at most {most}; shorten it by 3")), "{error}");
            }
        }
    }

    // The guest panicked for want of a root.
    #[test]
    fn an_initrd_is_an_archive() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut args = args("").unwrap();
        args.initrd = Some(path.clone());
        let take = |content: &[u8]| {
            fs::write(&path, content).unwrap();
            initrd(&args, HostArch::X86_64, "").map_err(|error| {
                assert!(error.is::<BadUsage>());
                error.to_string()
            })
        };
        let archive = initramfs::Archive::new(Vec::new()).finish().unwrap();
        let padded = [&[0; 512], &*archive].concat();
        for content in [&archive[..], &padded, b"BZh91AY", b"\x02\x21\x4c\x18", b"070707", b""] {
            assert_eq!(take(content).unwrap(), content);
        }
        for content in
            [&b"root:x:0:0:root:/root:/bin/sh\n"[..], b"\x7fELF", b"MZ", &[0; 64], b"\0x"]
        {
            let error = take(content).unwrap_err();
            assert!(
                error.starts_with("--initrd: ") && error.contains("not an initial RAM disk"),
                "{error}"
            );
        }
    }

    // Nobody has asked for them: a run without them is one as before there was such an output.
    #[test]
    fn modules_for_the_output_of_a_command_are_no_must() {
        let tree = tree(&["vmlinuz", "modules/modules.dep"]);
        let root = tree.path().canonicalize().unwrap();
        let find = |options: &str| {
            let mut args = args(options).unwrap();
            args.device_modules = device_modules(&args, &root.join("vmlinuz"), "6.1-none");
            args
        };
        assert_eq!(find("").device_modules, None);
        let run = find("--run ls");
        assert_eq!(run.device_modules, Some(root.join("modules")));
        assert!(initrd(&run, HostArch::X86_64, "").is_ok(), "a list of modules that names none");
        let shares = find("--run ls --share /");
        assert!(initrd(&shares, HostArch::X86_64, "").is_err());
    }
}
