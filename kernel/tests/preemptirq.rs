//! The places where the real kernels that scripts/setup puts into the cache switch interrupts and
//! preemption. Their versions change, so the tests check rules and lower bounds, not the numbers of
//! one build.

mod hart;

use hart::{Hart, mix};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use vmtrace_kernel::preemptirq::{Replaced, Switch, SwitchKind, SwitchSite, Told};
use vmtrace_kernel::{Kernel, KernelError};

fn open(name: &str) -> Kernel {
    let cache = std::env::var_os("VMTRACE_CACHE").map(PathBuf::from).unwrap_or_else(|| {
        Path::new(&std::env::var_os("HOME").expect("HOME")).join(".cache/vmtrace")
    });
    let image = cache.join("kernels").join(name).join("vmlinuz");
    assert!(image.exists(), "{} is missing: run scripts/setup", image.display());
    Kernel::open(&image).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn each(check: impl Fn(&str, &Kernel, &[SwitchSite])) {
    for name in ["x86_64-6.1", "x86_64-6.12", "x86_64-6.12-rt", "x86_64-7"] {
        let kernel = open(name);
        let switches = kernel.switches().unwrap_or_else(|error| panic!("{name}: {error}"));
        for switch in Switch::ALL {
            switches.check(switch).unwrap_or_else(|error| panic!("{name} {switch}: {error}"));
        }
        // Nothing in these kernels shares bytes with anything else.
        // But for changes of the count by a register, which are in few functions.
        assert_eq!(switches.unusable(Switch::IrqEnable), [], "{name}");
        let unusable = switches.unusable(Switch::PreemptEnable);
        assert!(unusable.len() <= 200, "{name}: {unusable:x?}");
        let loads =
            |&at: &u64| kernel.bytes(at, 3).is_some_and(|it| it[0] & 0xf8 == 0x48 && it[1] == 0xc7);
        assert!(unusable.iter().all(loads), "{name}: {unusable:x?}");
        check(name, &kernel, switches.all());
    }
}

/// Numbers of an image.
fn count(list: &[SwitchSite], wanted: impl Fn(SwitchKind) -> bool) -> usize {
    list.iter().filter(|site| wanted(site.kind)).count()
}

// A kind of place that is not found is a state that is silently wrong from there on.
#[test]
fn all_kinds_are_found_in_all_kernels() {
    each(|name, _, list| {
        let cli = count(list, |kind| kind == SwitchKind::Cli);
        let sti = count(list, |kind| kind == SwitchKind::Sti);
        let handled = count(list, |kind| matches!(kind, SwitchKind::Handle(_)));
        let restored = count(list, |kind| matches!(kind, SwitchKind::Restore(_)));
        let calls = count(list, |kind| matches!(kind, SwitchKind::HandleCall(_)));
        let returns = count(list, |kind| kind == SwitchKind::Return);
        let inc = count(list, |kind| matches!(kind, SwitchKind::Count { add: 1, .. }));
        let dec = count(list, |kind| matches!(kind, SwitchKind::Count { add: -1, .. }));
        let add = count(list, |kind| matches!(kind, SwitchKind::Count { .. })) - inc - dec;
        let all = [cli, sti, handled, restored, calls, returns, inc, dec, add];
        println!("{name}: cli, sti, handled, restored, calls, returns, inc, dec, add: {all:?}");
        assert!((350..700).contains(&cli) && (400..900).contains(&sti) && sti > cli, "{name}");
        assert!((40..70).contains(&handled), "{name}");
        // New tasks have none that handles anything.
        assert_eq!(restored, handled + 1, "{name}");
        assert!((3..=5).contains(&calls) && returns >= calls - 1, "{name}: {calls} {returns}");
        assert!((1200..3000).contains(&inc) && dec > inc && dec < 2 * inc, "{name}");
        assert!((10..250).contains(&add), "{name}");
    });
}

// Code that is another when the kernel runs, or is freed, must never be written.
#[test]
fn they_are_in_code_that_stays_and_is_as_it_must_be() {
    each(|name, kernel, list| {
        let address = |symbol| kernel.symbols().address(symbol).unwrap();
        let text = address("_stext")..address("_etext");
        let entry = address("__entry_text_start")..address("__entry_text_end");
        let mut end = 0;
        for site in list {
            let SwitchSite { address, kind } = *site;
            assert!(address >= end, "{name}: {address:#x} is within another");
            end = address + u64::from(kind.size());
            assert!(text.contains(&address) && text.contains(&end), "{name}: {address:#x}");
            let bytes = kernel.bytes(address, kind.size().into()).unwrap();
            let (fits, assembly) = match kind {
                SwitchKind::Cli | SwitchKind::Sti => (bytes[..2] == [0xff, 0x15], false),
                SwitchKind::Handle(_) | SwitchKind::HandleCall(_) => (bytes[0] == 0xe8, true),
                SwitchKind::Restore(to) => {
                    (bytes[0] == 0xe9, Some(to) == kernel.symbols().address("error_return"))
                }
                SwitchKind::Return => (bytes[0] == 0xe9, false),
                SwitchKind::Replaced(..) => (false, false),
                SwitchKind::Count { add, wide } => {
                    let begins = if wide { &[0x65, 0x48][..] } else { &[0x65] };
                    let operation = bytes.strip_prefix(begins).unwrap();
                    let fits = match add {
                        1 => operation[..2] == [0xff, 0x05],
                        -1 => operation[..2] == [0xff, 0x0d],
                        add => {
                            let added = i32::from_le_bytes(operation[6..].try_into().unwrap());
                            operation[..2] == [0x81, 0x05] && added == add
                        }
                    };
                    (fits, false)
                }
            };
            assert!(fits, "{name}: {address:#x} {kind:?} {bytes:02x?}");
            assert_eq!(entry.contains(&address), assembly, "{name}: {address:#x} {kind:?}");
        }
        // Whoever traces returns holds others.
        let own: BTreeSet<u64> = list.iter().map(|site| site.address).collect();
        let exits = kernel.exits().unwrap().all();
        assert!(!exits.iter().any(|exit| own.contains(&exit.address)), "{name}");
    });
}

// What locks and unlocks must be among them: without these the count is never 0 again.
#[test]
fn well_known_functions_have_them() {
    each(|name, kernel, list| {
        let within = |symbol: &str, wanted: &dyn Fn(SwitchKind) -> bool| {
            let start = kernel.symbols().address(symbol).unwrap_or_else(|| panic!("{symbol}"));
            let end = kernel.symbols().next_after(start).unwrap();
            list.iter().any(|it| (start..end).contains(&it.address) && wanted(it.kind))
        };
        assert!(within("_raw_spin_lock_irqsave", &|kind| kind == SwitchKind::Cli), "{name}");
        assert!(within("_raw_spin_unlock_irqrestore", &|kind| kind == SwitchKind::Sti), "{name}");
        let begins = |kind| matches!(kind, SwitchKind::Count { add, .. } if add > 1);
        let ends = |kind| matches!(kind, SwitchKind::Count { add, .. } if add < -1);
        assert!(within("irq_enter_rcu", &begins) || within("__irq_enter", &begins), "{name}");
        assert!(within("irq_exit_rcu", &ends) || within("__irq_exit_rcu", &ends), "{name}");
        assert!(within("do_syscall_64", &|kind| kind == SwitchKind::Return), "{name}");
    });
}

fn each_riscv64(check: impl Fn(&str, &Kernel, &[(u64, Replaced, Option<u64>)])) {
    for name in ["riscv64-6.12", "riscv64-7"] {
        let kernel = open(name);
        let switches = kernel.switches().unwrap_or_else(|error| panic!("{name}: {error}"));
        for switch in [Switch::IrqDisable, Switch::IrqEnable] {
            switches.check(switch).unwrap_or_else(|error| panic!("{name} {switch}: {error}"));
        }
        let site = |site: &SwitchSite| match site.kind {
            SwitchKind::Replaced(replaced, landing) => (site.address, replaced, landing),
            other => panic!("{name}: {other:?}"),
        };
        let list: Vec<_> = switches.all().iter().map(site).collect();
        // Where registers hold something, no landing is near, or what is stored is not known.
        let unusable = |switch| switches.unusable(switch).len();
        let unusable = unusable(Switch::IrqDisable) + unusable(Switch::PreemptDisable);
        println!("{name}: {} places, {unusable} unusable", list.len());
        assert!(unusable * 50 < list.len(), "{name}: {unusable} of {}", list.len());
        check(name, &kernel, &list);
    }
}

// A kernel that does not count preemptions says nothing of them, and one that does tells all kinds.
#[test]
fn riscv64_kernels_switch_interrupts_and_count_preemptions() {
    each_riscv64(|name, kernel, list| {
        let count = |wanted: &dyn Fn(Told) -> bool| {
            list.iter().filter(|(_, replaced, _)| wanted(replaced.told)).count()
        };
        let off = count(&|told| told == Told::Off);
        let on = count(&|told| told == Told::On);
        let counted = |wanted: i32| {
            count(&|told| matches!(told, Told::Count { add, .. } if add.signum() == wanted))
        };
        let [less, more] = [counted(-1), counted(1)];
        println!("{name}: off, on, more, less: {:?}", [off, on, more, less]);
        assert!((1500..9000).contains(&off) && on > off && on < 2 * off, "{name}");
        assert_eq!(count(&|told| matches!(told, Told::Enter(_))), 1, "{name}");
        assert_eq!(count(&|told| matches!(told, Told::Leave(_))), 1, "{name}");
        let preemption = kernel.switches().unwrap().check(Switch::PreemptDisable);
        if name == "riscv64-7" {
            assert!(preemption.is_ok(), "{name}: {preemption:?}");
            assert!((3000..12_000).contains(&more) && less > more && less < 2 * more, "{name}");
        } else {
            let error = preemption.unwrap_err();
            assert!(
                matches!(error, KernelError::NoSwitches(why) if why.contains("count")),
                "{name}"
            );
        }
    });
}

/// Whether a hart can run it; a call ends what is looked at, as everything else that leaves.
fn goes_on(word: u32) -> bool {
    let (low, rd) = (word & 0xffff, word >> 7 & 31);
    match low & 3 {
        3 => match word & 0x7f {
            0x67 => false,
            0x6f => rd == 0,
            0x73 => word >> 12 & 7 != 0,
            opcode => {
                [0x03, 0x0f, 0x13, 0x17, 0x1b, 0x23, 0x2f, 0x33, 0x37, 0x3b, 0x63].contains(&opcode)
            }
        },
        // Of floating point, and what is rare; jumps through registers, and breakpoints.
        quadrant => match (quadrant, low >> 13) {
            (0, 0) => low != 0,
            (0, 1 | 4 | 5) | (2, 1 | 5) => false,
            (1, 4) => low & 0x1c60 != 0x1c40 && low & 0x1c60 != 0x1c60,
            (2, 4) => low >> 2 & 31 != 0,
            _ => true,
        },
    }
}

// A register that is read later would be lost: code behind each place must do the same whatever these
// hold.
#[test]
fn riscv64_registers_that_are_taken_are_free() {
    each_riscv64(|name, kernel, list| {
        let code = |at: u64| kernel.bytes(at, 2).map_or(0, |it| u16::from_le_bytes([it[0], it[1]]));
        let (mut steps, mut calls) = (0_u64, 0_u32);
        for (&(at, replaced, _), seed) in
            list.iter().flat_map(|it| (0..4_u64).map(move |n| (it, n)))
        {
            let free = [replaced.link, replaced.through].map(usize::from);
            let harts: [Hart<_>; 2] = [0, u64::MAX].map(|other| {
                let mut x = std::array::from_fn(|n| mix(&[n as u64, seed, at]) & !7);
                x[0] = 0;
                free.iter().for_each(|&register| x[register] ^= other);
                Hart::new(x, at, code)
            });
            let [mut one, mut two] = harts;
            for _ in 0..100 {
                if !goes_on(one.word(one.pc)) {
                    break;
                }
                one.step();
                two.step();
                steps += 1;
                assert_eq!(one.pc, two.pc, "{name}: {at:#x}");
            }
            assert!(one.stores == two.stores && one.effects == two.effects, "{name}: {at:#x}");
            let word = one.word(one.pc);
            let is_call = word & 0xfff == 0x0e7 || word & 0xf07f == 0x9002;
            calls += u32::from(is_call);
            let used = |register: usize| match register {
                10..18 if is_call => true,
                10 | 11 if word & 0xffff == 0x8082 => true,
                _ => !free.contains(&register),
            };
            let differs = (0..32).find(|&it| used(it) && one.x[it] != two.x[it]);
            assert_eq!(differs, None, "{name}: {at:#x} to {:#x}", one.pc);
        }
        println!("{name}: {steps} steps, {calls} calls");
        assert!(steps > 100_000 && calls > 1000, "{name}");
    });
}

// A landing out of reach would be jumped past, and one in code that is used destroys it.
#[test]
fn riscv64_landings_are_free_text_in_reach() {
    each_riscv64(|name, kernel, list| {
        let address = |symbol| kernel.symbols().address(symbol).unwrap();
        let text = address("_stext")..address("_etext");
        let mut landings = BTreeMap::new();
        let mut end = 0;
        for &(at, replaced, landing) in list {
            let Replaced { word, link, through, kept, .. } = replaced;
            assert!(at >= end && text.contains(&at), "{name}: {at:#x}");
            end = at + 4;
            assert_eq!(kernel.bytes(at, 4), Some(&word.to_le_bytes()[..]), "{name}: {at:#x}");
            let scratch = [6, 7, 28, 29, 30, 31, 10, 11, 12, 13, 14, 15, 16, 17];
            assert!(scratch.contains(&link) && scratch.contains(&through), "{name}: {at:#x}");
            assert_ne!(link, through, "{name}: {at:#x}");
            assert_eq!(kept & (1 << link | 1 << through), 0, "{name}: {at:#x}");
            let to = landing.unwrap_or(text.end + (256 << 10));
            assert!(to.abs_diff(at) < 1 << 20, "{name}: {at:#x} {to:#x}");
            let Some(landing) = landing else { continue };
            assert!(text.contains(&landing) && text.contains(&(landing + 8)), "{name}");
            // Who shares one does the same.
            assert_eq!(*landings.entry(landing).or_insert(replaced), replaced, "{name}: {at:#x}");
        }
        let starts: Vec<u64> = landings.keys().copied().collect();
        println!("{name}: {} landings", starts.len());
        assert!(starts.windows(2).all(|two| two[1] >= two[0] + 8), "{name}");
        // Whoever traces returns writes nothing there, nor where something is switched.
        let all: Vec<usize> = (0..kernel.sites().len()).collect();
        for exit in kernel.epilogues().unwrap().plan(&all).exits {
            for (at, bytes) in exit.original(kernel).unwrap() {
                let end = at + bytes.len() as u64;
                let near = landings.range(at.saturating_sub(7)..end).next();
                assert!(near.is_none(), "{name}: {at:#x}");
                let after = list.partition_point(|&(site, ..)| site + 4 <= at);
                let site = list.get(after).map_or(u64::MAX, |&(site, ..)| site);
                assert!(site >= end, "{name}: {site:#x} is in an epilogue at {at:#x}");
            }
        }
    });
}

#[test]
fn well_known_functions_of_riscv64_have_them() {
    each_riscv64(|name, kernel, list| {
        let within = |symbol: &str, wanted: &dyn Fn(Told) -> bool| {
            let start = kernel.symbols().address(symbol).unwrap_or_else(|| panic!("{symbol}"));
            let end = kernel.symbols().next_after(start).unwrap();
            list.iter().any(|(at, it, _)| (start..end).contains(at) && wanted(it.told))
        };
        assert!(within("_raw_spin_lock_irqsave", &|told| told == Told::Off), "{name}");
        assert!(within("_raw_spin_unlock_irqrestore", &|told| told == Told::On), "{name}");
        assert!(within("handle_exception", &|told| matches!(told, Told::Enter(_))), "{name}");
        assert!(within("ret_from_exception", &|told| matches!(told, Told::Leave(_))), "{name}");
        assert!(within("do_trap_ecall_u", &|told| told == Told::On), "{name}");
        let begins = |told| matches!(told, Told::Count { add, .. } if add > 1);
        let locks = within("_raw_spin_lock", &|told| matches!(told, Told::Count { add: 1, .. }));
        // The other does not count preemptions.
        let counts = name == "riscv64-7";
        assert_eq!([within("irq_enter_rcu", &begins), locks], [counts; 2], "{name}");
    });
}
