//! Parameters of the functions of the real kernels that scripts/setup puts into the cache. Their
//! versions change, so the tests check rules, shares of functions, and structures that have been
//! the same for years.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use vmtrace_kernel::arguments::{
    Fetch, Last, NoPrototype, PathProblem, Prototype, Shape, Source, Value,
};
use vmtrace_kernel::{Arch, Kernel};

struct Cached {
    name: &'static str,
    kernel: Kernel,
    /// For the prototypes of all sites, types read before.
    took: Duration,
    prototypes: Vec<Option<Prototype>>,
}

impl Cached {
    fn site(&self, function: &str) -> usize {
        let sites = self.kernel.select(&[function.to_owned()], &[]);
        sites.unwrap_or_else(|e| panic!("{}: {e}", self.name))[0]
    }

    fn prototype(&self, function: &str) -> &Prototype {
        let prototype = self.prototypes[self.site(function)].as_ref();
        prototype.unwrap_or_else(|| panic!("{}: no prototype of {function}", self.name))
    }

    fn path(&self, function: &str, path: &str) -> Value {
        let value = self.kernel.path(self.site(function), path);
        value.unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    fn problem(&self, function: &str, path: &str) -> (PathProblem, String) {
        let error = self.kernel.path(self.site(function), path).unwrap_err();
        (error.problem.clone(), error.to_string())
    }

    fn offset(&self, strukt: &str, member: &str) -> i32 {
        let offset = self.kernel.btf().unwrap().member_offset(strukt, member);
        let offset = offset.unwrap_or_else(|| panic!("{}: no {strukt}.{member}", self.name));
        i32::try_from(offset).unwrap()
    }
}

fn each(check: impl Fn(&Cached)) {
    static KERNELS: OnceLock<Vec<Cached>> = OnceLock::new();
    let cache = std::env::var_os("VMTRACE_CACHE").map(PathBuf::from).unwrap_or_else(|| {
        Path::new(&std::env::var_os("HOME").expect("HOME")).join(".cache/vmtrace")
    });
    let open = |name: &'static str| {
        let image = cache.join("kernels").join(name).join("vmlinuz");
        assert!(image.exists(), "{} is missing: run scripts/setup", image.display());
        let kernel = Kernel::open(&image).unwrap_or_else(|e| panic!("{name}: {e}"));
        kernel.btf().unwrap();
        let start = Instant::now();
        let prototypes = (0..kernel.sites().len()).map(|site| kernel.prototype(site)).collect();
        Cached { name, kernel, took: start.elapsed(), prototypes }
    };
    let names = ["x86_64-6.1", "x86_64-6.12", "x86_64-7", "riscv64-6.12", "riscv64-7"];
    KERNELS.get_or_init(|| names.map(open).into()).iter().for_each(check);
}

fn memory(hops: &[i32], last: Last) -> Fetch {
    Fetch::Memory { from: Source::Argument(0), hops: hops.into(), last }
}

fn word(offset: i32, size: u8) -> Last {
    Last::Word { offset, size }
}

// Without it, --args would show registers for most functions, or keep a guest from starting.
#[test]
fn most_functions_have_a_prototype_and_all_are_found_fast() {
    each(|cached| {
        let (kernel, name) = (&cached.kernel, cached.name);
        let all = kernel.sites().len();
        let known = cached.prototypes.iter().flatten().count();
        let values: usize = cached.prototypes.iter().flatten().map(|p| p.parameters.len()).sum();
        let left_out: usize = cached.prototypes.iter().flatten().map(|p| p.left_out.len()).sum();
        let took = cached.took;
        println!(
            "{name}: {known} of {all} sites have a prototype, with {values} parameters and \
             {left_out} left out; in {took:?}"
        );
        assert!(known * 100 > all * 90, "{name}: {known} of {all}");
        assert!(left_out * 1000 < values, "{name}: {left_out} of {values}");
        // Both cores may be busy with something else; unoptimised it is ten times slower.
        let most = if cfg!(debug_assertions) { 5000 } else { 500 };
        assert!(took < Duration::from_millis(most), "{name}: {took:?}");
        for (site, prototype) in cached.prototypes.iter().enumerate() {
            let Some(why) = kernel.no_prototype(site) else { continue };
            assert!(prototype.is_none(), "{name}");
            assert_ne!(why, NoPrototype::Damaged, "{name}: {:?}", kernel.sites()[site]);
            assert_ne!(why, NoPrototype::NoTypes, "{name}");
            let function = kernel.site_name(&kernel.sites()[site]).unwrap_or_default();
            if function.contains(".isra.") {
                assert_eq!(why, NoPrototype::Changed, "{name}: {function}");
            }
        }
    });
}

// Two parameters in one word, or one that is not where the caller puts it, would be shown as
// something that was never passed.
#[test]
fn parameters_take_words_in_order() {
    each(|cached| {
        let registers = cached.kernel.raw_arguments().len();
        let (mut structs, mut stack) = (0, 0);
        for prototype in cached.prototypes.iter().flatten() {
            let words = prototype.parameters.iter().flat_map(|value| match &value.fetch {
                Fetch::Argument(word) => vec![*word],
                Fetch::Words(words) => words.clone(),
                Fetch::Memory { from: Source::Argument(word), .. } => vec![*word],
                other => panic!("{}: {other:?} of a parameter", cached.name),
            });
            let words: Vec<u8> = words.collect();
            structs +=
                prototype.parameters.iter().filter(|v| matches!(v.fetch, Fetch::Words(_))).count();
            stack += words.iter().filter(|word| usize::from(**word) >= registers).count();
            let mut sorted = words.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), words.len(), "{}: {prototype:?}", cached.name);
            let simple = prototype.left_out.is_empty()
                && prototype.parameters.iter().all(|v| !matches!(v.fetch, Fetch::Words(_)));
            // But for the room for a struct that is returned, the first ones are taken.
            let first = words.first().copied().unwrap_or(0);
            assert!(first <= 1 || !simple, "{}: {prototype:?}", cached.name);
            let expected: Vec<u8> = (first..).take(words.len()).collect();
            assert!(!simple || words == expected, "{}: {prototype:?}", cached.name);
            if let Some(value) = &prototype.result {
                assert!(value.fetch.at_return(), "{}: {value:?}", cached.name);
            }
        }
        println!("{}: {structs} structs in two words, {stack} words on the stack", cached.name);
        assert!(structs > 50 && stack > 50, "{}: {structs} {stack}", cached.name);
    });
}

// The first thing that anybody traces.
#[test]
fn parameters_have_their_names_and_types() {
    each(|cached| {
        let prototype = cached.prototype("vfs_read");
        let value = |name: &str, word, shape| Value {
            name: name.to_owned(),
            fetch: Fetch::Argument(word),
            shape,
        };
        assert_eq!(
            prototype.parameters,
            [
                value("file", 0, Shape::Pointer),
                value("buf", 1, Shape::Pointer),
                value("count", 2, Shape::Unsigned { bytes: 8 }),
                value("pos", 3, Shape::Pointer),
            ],
            "{}: buf is room for text and no text",
            cached.name
        );
        let result = prototype.result.as_ref().unwrap();
        assert_eq!(result.fetch, Fetch::Result);
        assert_eq!(result.shape, Shape::Signed { bytes: 8 });

        let open = &cached.prototype("filp_open").parameters;
        let last = Last::Text { offset: 0, max: 32 };
        assert_eq!((&open[0].fetch, &open[0].shape), (&memory(&[], last), &Shape::Text));
        assert_eq!(open[2].shape, Shape::Unsigned { bytes: 2 }, "umode_t");
        // kuid_t, a struct.
        let chown = &cached.prototype("vfs_fchown").parameters;
        assert_eq!(chown[1], value("user", 1, Shape::Unsigned { bytes: 4 }));
        assert_eq!(cached.prototype("make_kuid").result.as_ref().unwrap().shape, chown[1].shape);
        assert_eq!(cached.prototype("blk_mq_free_request").result, None, "void");
        let names: Vec<String> =
            cached.kernel.raw_arguments().into_iter().map(|value| value.name).collect();
        match cached.kernel.arch() {
            Arch::X86_64 => assert_eq!(names, ["rdi", "rsi", "rdx", "rcx", "r8", "r9"]),
            Arch::Riscv64 => assert_eq!(names[..2], ["a0", "a1"]),
        }
    });
}

// More than six (x86-64) or eight (riscv64) parameters: behind them, others would be shown.
#[test]
fn parameters_behind_the_registers_are_on_the_stack() {
    each(|cached| {
        let count = cached.prototype("do_mmap").parameters.len();
        assert!(count >= 8, "{}: {count}", cached.name);
        let last = cached.prototype("do_mmap").parameters.last().unwrap();
        assert_eq!(last.name, "uf");
        let word = u8::try_from(count - 1).unwrap();
        assert_eq!(last.fetch, Fetch::Argument(word), "{}", cached.name);
    });
}

#[test]
fn structs_in_words_have_members() {
    each(|cached| {
        let function = "timespec64_add_safe";
        let words: Vec<&Fetch> =
            cached.prototype(function).parameters.iter().map(|value| &value.fetch).collect();
        assert_eq!(words, [&Fetch::Words(vec![0, 1]), &Fetch::Words(vec![2, 3])]);
        let value = cached.path(function, "nanoseconds=rhs.tv_nsec");
        assert_eq!(value.name, "nanoseconds");
        assert_eq!((value.fetch, value.shape), (Fetch::Argument(3), Shape::Signed { bytes: 8 }));
        let value = cached.path(function, "$ret.tv_sec");
        assert_eq!((value.fetch, value.shape), (Fetch::Result, Shape::Signed { bytes: 8 }));
        let (problem, _) = cached.problem(function, "$ret.tv_nsec");
        assert_eq!(problem, PathProblem::SecondRegister);
    });
}

// A wrong offset or a hop too few shows other memory than the one asked for.
#[test]
fn paths_lead_through_structs_and_pointers() {
    each(|cached| {
        let at = |strukt: &str, member: &str| cached.offset(strukt, member);
        let path = |function: &str, text: &str| {
            let value = cached.path(function, text);
            (value.fetch, value.shape)
        };
        let unsigned = |bytes| Shape::Unsigned { bytes };
        let dentry = at("file", "f_path.dentry");
        let name = at("dentry", "d_name.name");
        let text = |max| (memory(&[dentry, name], Last::Text { offset: 0, max }), Shape::Text);
        assert_eq!(path("vfs_read", "file->f_path.dentry->d_name.name"), text(64));
        assert_eq!(path("vfs_read", "file.f_path.dentry.d_name.name:20"), text(20), "forgiving");
        let fetch = |hops: &[i32], offset, size| memory(hops, word(offset, size));
        let flags = (fetch(&[], at("file", "f_flags"), 4), unsigned(4));
        assert_eq!(path("vfs_read", "file->f_flags"), flags);
        let inode = at("file", "f_inode");
        let mode = (fetch(&[inode], at("inode", "i_mode"), 2), unsigned(2));
        assert_eq!(path("vfs_read", "file->f_inode->i_mode"), mode);
        let uid = (fetch(&[inode], at("inode", "i_uid"), 4), unsigned(4));
        assert_eq!(path("vfs_read", "file->f_inode->i_uid"), uid, "kuid_t");
        let dentry = (fetch(&[], at("file", "f_path.dentry"), 8), Shape::Pointer);
        assert_eq!(path("vfs_read", "file->f_path.dentry"), dentry);
        let whole = Last::Bytes { offset: at("file", "f_path"), size: 16 };
        let whole = (memory(&[], whole), Shape::Raw { bytes: 16 });
        assert_eq!(path("vfs_read", "file->f_path"), whole);
        let position = Fetch::Memory { from: Source::Argument(3), hops: vec![], last: word(0, 8) };
        assert_eq!(path("vfs_read", "pos[0]"), (position, Shape::Signed { bytes: 8 }));

        let comm = at("task_struct", "comm");
        let name = |max| (memory(&[], Last::Text { offset: comm, max }), Shape::Text);
        assert_eq!(path("wake_up_process", "p->comm"), name(16));
        assert_eq!(path("wake_up_process", "p->comm:8"), name(8));
        assert_eq!(path("wake_up_process", "p->comm[3]"), (fetch(&[], comm + 3, 1), Shape::Char));
        // In an unnamed struct for its random layout.
        let pid = (fetch(&[], at("task_struct", "pid"), 4), Shape::Signed { bytes: 4 });
        assert_eq!(path("wake_up_process", "p->pid"), pid);
        let limit = at("signal_struct", "rlim") + 7 * 16 + 8;
        let limit = (fetch(&[at("task_struct", "signal")], limit, 8), unsigned(8));
        assert_eq!(path("wake_up_process", "p->signal->rlim[7].rlim_max"), limit);
        let (hops, last) = (vec![], Last::Text { offset: comm, max: 16 });
        let result = Fetch::Memory { from: Source::Result, hops, last };
        assert_eq!(path("get_pid_task", "retval->comm"), (result, Shape::Text));
    });
}

// A wrong bit is as good as a random one.
#[test]
fn bit_fields_and_enums_are_read_by_their_bits_and_names() {
    each(|cached| {
        for (function, path, strukt, member, bits) in [
            ("wake_up_process", "p->sched_migrated", "task_struct", "sched_migrated", 1),
            ("wake_up_process", "p->in_iowait", "task_struct", "in_iowait", 1),
            ("do_writepages", "wbc->for_kupdate", "writeback_control", "for_kupdate", 1),
            ("do_writepages", "wbc->range_cyclic", "writeback_control", "range_cyclic", 1),
            ("netif_rx", "skb->pkt_type", "sk_buff", "pkt_type", 3),
            ("netif_rx", "skb->ip_summed", "sk_buff", "ip_summed", 2),
        ] {
            let value = cached.path(function, path);
            let Fetch::Memory { last: Last::Word { offset, size }, .. } = value.fetch else {
                panic!("{}: {value:?}", cached.name);
            };
            let Shape::Bits { shift, width, signed: false } = value.shape else {
                panic!("{}: {value:?}", cached.name);
            };
            assert_eq!(width, bits, "{} {path}", cached.name);
            assert!(shift + width <= 8 * size, "{} {path}", cached.name);
            let byte = offset + i32::from(shift / 8);
            assert_eq!(byte, cached.offset(strukt, member), "{} {path}", cached.name);
        }
        // Neighbours in one word have different bits.
        let shift = |path| match cached.path("netif_rx", path).shape {
            Shape::Bits { shift, .. } => shift,
            other => panic!("{other:?}"),
        };
        assert_ne!(shift("skb->pkt_type"), shift("skb->ignore_df"));

        let mode = cached.path("do_writepages", "wbc->sync_mode");
        let offset = cached.offset("writeback_control", "sync_mode");
        let index = mode.fetch.clone();
        let wbc = Fetch::Memory { from: Source::Argument(1), hops: vec![], last: word(offset, 4) };
        assert_eq!(index, wbc);
        let Shape::Enum { names, .. } = &mode.shape else { panic!("{mode:?}") };
        assert!(names.contains(&(1, "WB_SYNC_ALL".to_owned())), "{names:?}");
    });
}

// What cannot be had must be told before the guest starts, with a way out.
#[test]
fn errors_name_what_there_is() {
    each(|cached| {
        for (path, parts) in [
            ("fil->f_flags", &["'fil' (character 1)", "vfs_read has no such", "near: file"][..]),
            ("x", &["there is only file, buf, count, pos"]),
            ("file->f_pth", &["'f_pth' (character 7)", "struct file has no", "near: f_path"]),
            ("x=file->f_path->dentry", &["struct path, which is not a pointer; write '.'"]),
            ("count.x", &["type size_t and has no members"]),
            ("count[0]", &["has no elements"]),
            ("count:3", &["'3' (character 7)", "size_t is not a string"]),
            ("file->f_path.dentry->d_inode->i_sb->s_id[99]", &["from [0] to [31]"]),
            ("*file->f_inode", &["a parameter's name or $ret is expected"]),
            ("file[0]", &["struct file has ", "take a member; there is f_"]),
            ("$ret->x", &["type ssize_t and has no members"]),
            ("file->f_op->read.x", &["type function * and has no members"]),
        ] {
            let (_, message) = cached.problem("vfs_read", path);
            for part in parts {
                assert!(message.contains(part), "{} {path}: {message}", cached.name);
            }
            assert!(!message.contains('\n'), "{message}");
        }
        let (_, message) = cached.problem("blk_mq_free_request", "$ret");
        assert!(message.contains("returns no value"), "{message}");
        let changed = cached.kernel.select(&["*.isra.0".to_owned()], &[]).unwrap()[0];
        let message = cached.kernel.path(changed, "x").unwrap_err().to_string();
        assert!(message.contains("the compiler has changed its parameters"), "{message}");
    });
}

#[test]
fn functions_of_arguments_are_found_or_near_ones_told() {
    use vmtrace_kernel::arguments::ArgumentSpec;
    each(|cached| {
        let sites = |text| {
            let spec = ArgumentSpec::parse(text).unwrap();
            cached.kernel.argument_sites(&spec).map_err(|error| error.to_string())
        };
        assert_eq!(sites("vfs_read: file"), Ok(vec![cached.site("vfs_read")]));
        assert!(sites("vfs_*: file").unwrap().len() > 10);
        let error = sites("vfs_raed: file").unwrap_err();
        assert!(error.contains("no traceable function matches 'vfs_raed'"), "{error}");
        assert!(error.contains("; near: ") && error.contains("vfs_read"), "{error}");
        assert!(!sites("qx_*z: file").unwrap_err().contains("near"));
    });
}
