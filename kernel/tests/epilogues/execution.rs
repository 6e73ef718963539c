//! Rewritten exits do the same as the original ones.

use crate::hart::Hart;
use crate::image::window;
use crate::kernels::{each, name_of};
use crate::random::Random;
use crate::{ID, STUB};
use std::collections::HashMap;
use vmtrace_kernel::Kernel;
use vmtrace_kernel::epilogues::{Displaced, LINK, PlannedExit};

#[test]
fn rewritten_exits_do_what_they_did() {
    each(|name, kernel, plan| {
        let special = |exit: &PlannedExit| {
            exit.epilogue.displaced.iter().any(|d| !matches!(d, Displaced::Copy { .. }))
        };
        let mut random = Random(1);
        let mut runs = [0_usize; 3];
        let mut exits = 0;
        for exit in &plan.exits {
            let special = special(exit);
            if !special && !exit.jumps.is_empty() && random.below(10) > 0 {
                continue;
            }
            exits += 1;
            for _ in 0..if special { 8 } else { 3 } {
                runs[compare(name, kernel, exit, &mut random)] += 1;
            }
        }
        println!("{name}: {exits} exits ran; branched away, returned off and on: {runs:?}");
        assert!(exits > 5000 && runs.iter().all(|&n| n > 500), "{name}: {exits} {runs:?}");
    });
}

/// Runs a window as it was and as it will be. Returns 0 if it was left by a branch, otherwise
/// 1 without and 2 with a call of the handler.
pub(crate) fn compare(
    name: &str,
    kernel: &Kernel,
    exit: &PlannedExit,
    random: &mut Random,
) -> usize {
    let on = random.below(2) == 1;
    let stub_at = STUB + 4 * random.below(1 << 16);
    let handler = stub_at - 0x8_0000;
    let halfword = |address: u64| {
        let bytes = kernel.bytes(address, 2).expect("only the window runs");
        u16::from_le_bytes(bytes.try_into().unwrap())
    };
    let window = window(exit);
    let registers = random.registers();
    let context = || format!("{name}: {} {exit:x?}", name_of(kernel, exit.epilogue.site));

    let mut before = Hart::new(registers, window.start, halfword);
    for steps in 0.. {
        assert!(steps < 100, "{}", context());
        before.step();
        if !window.contains(&before.pc) || before.pc == window.start {
            break;
        }
    }

    let mut new: HashMap<u64, u16> = HashMap::new();
    let mut put = |at: u64, bytes: &[u8]| {
        for (i, half) in (0..).step_by(2).zip(bytes.as_chunks().0) {
            new.insert(at + i, u16::from_le_bytes(*half));
        }
    };
    let mut stub = exit.stub(stub_at, Some(handler), ID).unwrap();
    if !on {
        let slot = exit.slot_offset();
        stub[slot..slot + 4].copy_from_slice(&exit.slot(stub_at, None).unwrap());
    }
    for (at, bytes) in exit.writes(stub_at).unwrap() {
        put(at, &bytes);
    }
    put(stub_at, &stub);
    put(handler, &(0x67 | u32::from(LINK) << 15).to_le_bytes());
    let mut after = Hart::new(registers, window.start, |address| {
        *new.get(&address).unwrap_or_else(|| panic!("runs {address:#x}: {}", context()))
    });
    let mut calls = 0;
    for steps in 0.. {
        assert!(steps < 200, "{}", context());
        after.step();
        if after.pc == handler {
            calls += 1;
            let id = after.word(after.x[usize::from(LINK)] + 4);
            assert_eq!(id, ID, "{}", context());
        }
        if !new.contains_key(&after.pc) || after.pc == window.start {
            break;
        }
    }

    // The jump's register is free, and with a call the one that it links, too.
    let returned = before.pc == before.x[1] & !1;
    for x in [&mut before.x, &mut after.x] {
        x[usize::from(exit.epilogue.scratch)] = 0;
        if calls > 0 {
            x[usize::from(LINK)] = 0;
        }
    }
    assert_eq!(before.pc, after.pc, "{}", context());
    assert_eq!(before.x, after.x, "{}", context());
    assert_eq!(before.stores, after.stores, "{}", context());
    assert_eq!(before.effects, after.effects, "{}", context());
    assert_eq!(calls, usize::from(returned && on), "{}", context());
    usize::from(returned) + calls
}
