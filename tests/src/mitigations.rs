//! Mitigations of processor vulnerabilities stay effective: code that vmtrace puts into the guest returns as
//! the guest's own code does.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use vmtrace::kernel::{Exit, ExitKind, Kernel, SiteSection};

use crate::cases::Guests;
use crate::trace::{self, WORKLOAD, arch_of, kernel, syscall};

/// What the kernel leaves of a return that needs no thunk.
const RETURN: [u8; 5] = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];
/// Where programs take back what they have saved, right before they return: `pop rdx; pop rax`.
const POPS: [u8; 2] = [0x5a, 0x58];

/// How a guest is made to close a fault that its processor need not have.
#[derive(Clone, Copy, Debug)]
pub struct Closed {
    /// On the kernel's command line.
    pub cmdline: &'static str,
    /// The file of /sys/devices/system/cpu/vulnerabilities, and what is in it then.
    pub says: (&'static str, &'static str),
    /// By which function of its own it then returns; none: as the processor does.
    pub thunk: Option<&'static str>,
}

fn bytes(hex: &str) -> Result<Vec<u8>> {
    let digits = (0..hex.len() / 2).map(|at| hex.get(2 * at..2 * at + 2).unwrap_or_default());
    Ok(digits.map(|digits| u8::from_str_radix(digits, 16)).collect::<Result<_, _>>()?)
}

/// Where the jump at `from` leads; `None` for other code.
fn leads(from: u64, code: &[u8]) -> Option<u64> {
    let &[0xe9, a, b, c, d, ..] = code else { return None };
    Some((from + 5).wrapping_add_signed(i32::from_le_bytes([a, b, c, d]).into()))
}

/// Returns of functions that nobody traces, in either half of a cache line.
fn returns(kernel: &Kernel) -> Result<Vec<u64>> {
    let traced = kernel.select(&["vfs_*".to_owned()], &[])?;
    // Whoever is traced and jumps there ends with it.
    let jumped: BTreeSet<u64> = kernel
        .exits()?
        .all()
        .iter()
        .filter_map(|exit| match exit.kind {
            ExitKind::Jump { target } => Some(target),
            _ => None,
        })
        .collect();
    let own = |exit: &&Exit| {
        let site = kernel.sites().get(exit.site as usize);
        exit.kind == ExitKind::Return
            && site.is_some_and(|site| site.section == SiteSection::Text)
            && !traced.contains(&(exit.site as usize))
            && !jumped.contains(&exit.function)
    };
    let all = kernel.exits()?.all().iter().filter(own).map(|exit| exit.address);
    let [mut lower, mut upper] = [Vec::new(), Vec::new()];
    for address in all.step_by(100) {
        if address & 32 == 0 { &mut lower } else { &mut upper }.push(address);
    }
    lower.truncate(20);
    upper.truncate(20);
    Ok([lower, upper].concat())
}

impl Guests {
    /// A bare return of ours in such a guest is the very one that its kernel has done away with.
    pub fn programs_return_as_the_guests_own_code_does(&self, name: &str, closed: Closed) {
        let Closed { cmdline, says: (file, text), thunk } = closed;
        let kernel = kernel(name).unwrap();
        let base = kernel.symbols().address("_text").unwrap();
        let function = syscall(name, "getppid").unwrap();
        let [site] = kernel.select(std::slice::from_ref(&function), &[]).unwrap()[..] else {
            panic!()
        };
        let site = kernel.sites()[site].location - base;
        let own = returns(&kernel).unwrap();
        let offsets: Vec<String> = own.iter().map(|at| format!("{:x}", at - base)).collect();
        let work = format!("getppid 1000 0 1 && {WORKLOAD} code {site:x} {}", offsets.join(" "));
        let cmdline = format!("{} nokaslr {cmdline}", trace::cmdline(arch_of(name).unwrap()));
        let args = ["--graph", "-f", "vfs_*", "-f", &function, "--cpus", "2"];
        let args = [&args[..], &["--cmdline", &cmdline]].concat();
        let (finished, trace) = self.run(name, &work, &args);
        let err = finished.err();
        let said = |key: &str| -> Result<String> {
            let mut lines = err.lines().filter_map(|line| line.trim().strip_prefix(key));
            Ok(lines.next().with_context(|| format!("no {key:?} in {err}"))?.trim().to_owned())
        };
        let vulnerability = said(&format!("vulnerability {file} ")).unwrap();
        assert!(vulnerability.contains(text), "{name} {cmdline}: {vulnerability}");

        // As the kernel has it.
        let thunk = thunk.map(|thunk| kernel.symbols().address(thunk).unwrap());
        let mut led = 0;
        for (address, offset) in own.iter().zip(&offsets) {
            let code = bytes(&said(&format!("code {offset} ")).unwrap()).unwrap();
            match leads(*address, &code) {
                Some(to) => assert_eq!(Some(to), thunk, "{name} {cmdline}: at {address:#x}"),
                None => assert_eq!(code, RETURN, "{name} {cmdline}: at {address:#x}"),
            }
            led += usize::from(leads(*address, &code).is_some());
        }
        assert_eq!(led > 0, thunk.is_some(), "{name} {cmdline}: {led} of {}", own.len());

        // And as we have it.
        let program = said("program ").unwrap();
        let (offset, code) = program.split_once(' ').unwrap();
        let start = 0xffff_ffff_8000_0000 + u64::from_str_radix(offset, 16).unwrap();
        let code = bytes(code).unwrap();
        let at = code.windows(2).position(|pair| pair == POPS).unwrap() + POPS.len();
        let end = &code[at..at + RETURN.len()];
        let to = leads(start + at as u64, end);
        assert_eq!(to, thunk, "{name} {cmdline}: a program ends by {end:02x?}");
        assert!(thunk.is_some() || end == RETURN, "{name} {cmdline}: {end:02x?}");

        let count = |list: &[trace::Entry]| {
            list.iter().filter(|entry| entry.function.ends_with("sys_getppid")).count()
        };
        let counts = (count(&trace.entries), count(&trace.returns));
        assert!(counts.0 >= 2000 && counts.0 == counts.1, "{name} {cmdline}: {counts:?}");
        assert_eq!(trace.summary.notes, [] as [&str; 0], "{name} {cmdline}");
    }
}
