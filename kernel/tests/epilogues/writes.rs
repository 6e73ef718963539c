//! Writes are inside windows, at each place once, and never where something jumps to.

use crate::image::{Code, Windows, alternatives, branch_target, functions, pairs, window};
use crate::kernels::{each, name_of};
use crate::{HANDLER, ID, STUB};
use std::ops::Range;
use vmtrace_kernel::Kernel;
use vmtrace_kernel::epilogues::Plan;

#[test]
fn writes_stay_in_windows_and_never_meet() {
    each(|name, kernel, plan| {
        check_writes(name, kernel, plan);
        check_tables(name, kernel, plan);
    });
}

/// What needs its place in the text, or is changed by the kernel, is in no window.
pub(crate) fn check_tables(name: &str, kernel: &Kernel, plan: &Plan) {
    let windows = Windows::of(plan);
    for (from, to) in pairs::<12>(kernel, "__start___ex_table", "__stop___ex_table") {
        assert!(!windows.touches(from..from + 2), "{name}: {from:#x} may fault");
        assert!(!windows.inside(to), "{name}: a fixup leads to {to:#x}");
    }
    for (from, to) in pairs::<16>(kernel, "__start___jump_table", "__stop___jump_table") {
        assert!(!windows.touches(from..from + 4), "{name}: {from:#x} is a jump label");
        assert!(!windows.inside(to), "{name}: a jump label leads to {to:#x}");
    }
    for (old, new) in alternatives(kernel) {
        assert!(!windows.touches(old.clone()), "{name}: {old:x?} is replaced");
        assert!(!windows.touches(new.clone()), "{name}: {new:x?} replaces");
    }
    for site in kernel.sites() {
        assert!(!windows.touches(site.location..site.entry + 8), "{name}: {site:x?}");
    }
    for symbol in kernel.symbols().iter() {
        assert!(!windows.inside(symbol.address), "{name}: {} is in a window", symbol.name);
    }
    // Functions, labels of computed gotos.
    for word in kernel.vmlinux().as_chunks().0 {
        let target = u64::from_le_bytes(*word);
        assert!(!windows.inside(target), "{name}: a pointer leads to {target:#x}");
    }
}

/// Every byte is written by one exit at most, within windows, and is known.
pub(crate) fn check_writes(name: &str, kernel: &Kernel, plan: &Plan) {
    let windows = Windows::of(plan);
    let mut written: Vec<Range<u64>> = Vec::new();
    for exit in &plan.exits {
        let site = kernel.sites()[exit.epilogue.site as usize];
        let window = window(exit);
        assert!(window.start >= site.entry + 8, "{name}: {exit:x?}");
        assert!(window.contains(&exit.epilogue.ret) && (6..=31).contains(&exit.epilogue.scratch));
        let writes = exit.writes(STUB).expect("in reach");
        let original = exit.original(kernel).expect("in the image");
        assert_eq!(writes.len(), original.len());
        assert_eq!(writes[0].0, window.start);
        for ((at, new), (old_at, old)) in writes.iter().zip(&original) {
            let range = *at..at + new.len() as u64;
            assert_eq!((at, new.len()), (old_at, old.len()));
            assert!(windows.around(&range), "{name}: {range:x?} is in no window");
            written.push(range);
        }
        let stub = exit.stub(STUB, Some(HANDLER), ID).expect("in reach");
        assert_eq!(stub.len(), exit.stub_len());
        assert_eq!(exit.slot_offset() % 4, 0);
        assert_eq!(stub[exit.slot_offset()..][..4], exit.slot(STUB, Some(HANDLER)).unwrap());
        assert!(exit.writes(STUB - (1 << 32)).is_none(), "a stub 4 GiB away");
        assert!(exit.stub(STUB, Some(HANDLER - (1 << 21)), ID).is_none(), "a handler 2 MiB away");
        assert!(exit.stub(STUB + 2, Some(HANDLER), ID).is_none(), "a slot that is no whole word");
    }
    written.sort_by_key(|range| range.start);
    for pair in written.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{name}: {pair:x?} are written twice");
    }
    // And nothing of a window is left as it was.
    let bytes = |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
    assert_eq!(bytes(&written), bytes(&windows.0), "{name}");
}

#[test]
fn nothing_jumps_into_a_window() {
    each(|name, kernel, plan| {
        let windows = Windows::of(plan);
        let code = Code::of(kernel);
        let mut branches = 0;
        for function in code.all() {
            for (address, word) in code.instructions(function) {
                if let Some(target) = branch_target(address, word) {
                    branches += 1;
                    assert!(!windows.inside(target), "{name}: {address:#x} jumps to {target:#x}");
                }
            }
        }
        assert!(branches > 300_000, "{name}: {branches}");
        // `case` labels, by tables of distances from their own start.
        let mut cases = 0;
        for (site, function) in functions(kernel) {
            let tables = code.tables(function.clone());
            if tables.is_empty() {
                continue;
            }
            for table in tables {
                for entry in (table..).step_by(4) {
                    let Some(bytes) = kernel.bytes(entry, 4) else { break };
                    let distance = i32::from_le_bytes(bytes.try_into().unwrap());
                    let target = table.wrapping_add_signed(distance.into());
                    if !function.contains(&target) || target % 2 != 0 {
                        break;
                    }
                    cases += 1;
                    let what = name_of(kernel, site);
                    assert!(!windows.inside(target), "{name}: a case of {what}, {target:#x}");
                }
            }
        }
        println!("{name}: {branches} branches, {cases} cases");
        assert!(cases > 3000, "{name}: {cases}");
    });
}
