//! The exits of a module, by its code in memory, before anything of it has run.
//!
//! Stubs are behind the kernel, which modules do not reach: a window leads to a relay before that.
//! So an instruction that depends on its place stays where it is. Code that is freed after start-up
//! lends no room to other code.

use super::plan::Planner;
use super::targets::Targets;
use super::windows::Windows;
use crate::exits::module::{ModuleExits, ModuleRewrite, ModuleText};
use crate::exits::{After, Exit, ExitKind};
use crate::read::index;
use crate::riscv64::text::Text;

/// What to rewrite for the functions that are asked for. `entry` reads the tables of jumps.
///
/// # Errors
/// What about the module is absurd.
pub(crate) fn find(
    module: &ModuleText,
    entry: &dyn Fn(u64) -> Option<i32>,
) -> Result<ModuleExits, &'static str> {
    const UNKNOWN: &str = "its code is at an odd place";
    let regions = module.regions.iter();
    let regions = regions.map(|(start, bytes)| Text::of_module(*start, bytes, &module.pieces));
    let regions: Vec<Text<'_>> = regions.collect::<Option<_>>().ok_or(UNKNOWN)?;
    let mut found = ModuleExits::default();
    for text in &regions {
        let targets = Targets::of_module(module, text, &regions, entry)?;
        add(&mut found, module, text, &targets);
    }
    found.list.sort_unstable_by_key(|exit| exit.address);
    found.rewrites.sort_by_key(|rewrite| rewrite.exit.epilogue.start);
    Ok(found)
}

fn add(found: &mut ModuleExits, module: &ModuleText, text: &Text<'_>, targets: &Targets) {
    let mut windows = Windows::default();
    // Numbers are those of pieces, which are ascending as addresses are.
    for (number, piece) in (0..).zip(&module.pieces) {
        if piece.site.is_some()
            && text.range.contains(&piece.start)
            && piece.start.is_multiple_of(2)
        {
            windows.add_function(text, targets, number, piece.start);
        }
    }
    let piece = |number: u32| module.pieces.get(index(number.into()));
    let site = |number| piece(number).and_then(|piece| piece.site).map(|(site, _)| site);
    let is_wanted =
        |number| site(number).is_some_and(|it| module.wanted.binary_search(&it).is_ok());
    let wanted = windows.functions.iter().map(|function| function.site).filter(|&it| is_wanted(it));
    let wanted: Vec<u32> = wanted.collect();
    let plan = Planner::new(&windows, wanted.iter().map(|&number| index(number.into()))).finish();
    for function in windows.functions.iter().filter(|function| is_wanted(function.site)) {
        let number = index(function.site.into());
        let fixed = windows.fixed_of(number).map(|left_out| left_out.why).next();
        let left_out = plan.left_out.iter().find(|left_out| left_out.site == function.site);
        let why = function.missing.or(fixed).or(left_out.map(|left_out| left_out.why));
        if let Some((why, site)) = why.zip(site(function.site)) {
            found.missing.push((site, why.into()));
        }
    }
    for exit in plan.exits {
        let number = exit.epilogue.site;
        let original = exit.ranges().map(|(at, len)| Some(text.bytes(at, len)?.to_vec()));
        let Some(original) = original.collect::<Option<Vec<_>>>() else { continue };
        if let Some((piece, site)) = piece(number).zip(site(number)).filter(|_| !exit.helper) {
            found.list.push(Exit {
                address: exit.epilogue.ret,
                function: piece.start,
                site,
                kind: ExitKind::Return,
                after: After::Nothing,
            });
        }
        found.rewrites.push(ModuleRewrite { exit, original });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exits::module::ModulePiece;
    use crate::riscv64::decode::{Instruction, Kind};
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::ops::Range;

    const BASE: u64 = 0xffff_ffff_0100_0000;
    /// What is freed.
    const FREED: u64 = BASE + 0x1_0000;

    /// What functions are made of: of two bytes, or of four.
    fn instruction() -> impl Strategy<Value = Vec<u8>> {
        let bytes = |words: &'static [u32], len: usize| {
            proptest::sample::select(words).prop_map(move |word| word.to_le_bytes()[..len].to_vec())
        };
        // `ld ra; ld s0; addi sp; nop; ret`; `beqz a0` and `j`, both ways.
        let short =
            bytes(&[0x60a2, 0x6402, 0x0141, 0x0001, 0x8082, 0x8082, 0xc509, 0xdd75, 0xa021], 2);
        // `auipc a0`, `addi t1, t1`, `jal ra`, `beq`, `ebreak`, `jr t1`.
        let long =
            bytes(&[0x517, 0x0013_0313, 0x0080_00ef, 0x00b5_0463, 0x0010_0073, 0x0003_0067], 4);
        prop_oneof![6 => short, 1 => long]
    }

    fn function() -> impl Strategy<Value = Vec<u8>> {
        let site = [0x13, 0, 0, 0, 0x13, 0, 0, 0];
        proptest::collection::vec(instruction(), 0..40)
            .prop_map(move |rest| [&site[..], &rest.concat()].concat())
    }

    fn module(both: [&[Vec<u8>]; 2]) -> ModuleText {
        let mut module = ModuleText::default();
        for (start, functions) in [BASE, FREED].into_iter().zip(both) {
            let mut at = start;
            for bytes in functions {
                let number = u32::try_from(module.pieces.len()).unwrap();
                module.wanted.push(number);
                let (bytes, site) = (bytes.clone(), Some((number, at)));
                module.pieces.push(ModulePiece { start: at, bytes, name: "f".into(), site });
                at += wide(module.pieces.last().unwrap().bytes.len());
            }
            module.regions.push((start, functions.concat()));
        }
        module
    }

    use crate::read::wide;

    proptest! {
        // A jump into the middle of what was replaced, or a landing that is freed, crashes the guest.
        #[test]
        fn nothing_leads_into_a_window(
            stays in proptest::collection::vec(function(), 0..12),
            freed in proptest::collection::vec(function(), 0..4),
            some in any::<u16>(),
        ) {
            let mut module = module([&stays, &freed]);
            module.wanted.retain(|site| some >> (site % 16) & 1 == 1);
            let found = find(&module, &|_| None).unwrap();
            let mut windows: Vec<Range<u64>> = Vec::new();
            let mut written = BTreeSet::new();
            for rewrite in &found.rewrites {
                let window = rewrite.exit.epilogue.start..rewrite.exit.epilogue.ret + 2;
                let writes = rewrite.exit.writes(BASE + 0x4000_0000).unwrap();
                prop_assert_eq!(writes.len(), rewrite.original.len());
                for ((at, bytes), original) in writes.into_iter().zip(&rewrite.original) {
                    prop_assert_eq!(bytes.len(), original.len());
                    prop_assert_eq!(at < FREED, window.start < FREED);
                    for at in at..at + wide(bytes.len()) {
                        prop_assert!(written.insert(at), "{at:#x} twice");
                    }
                }
                windows.push(window);
            }
            for at in &written {
                prop_assert!(windows.iter().any(|window| window.contains(at)), "{at:#x}");
            }
            for piece in &module.pieces {
                let mut offset = 0;
                while let Some(instruction) = Instruction::at(&piece.bytes, offset) {
                    let at = piece.start + wide(offset);
                    let target = match instruction.kind {
                        Kind::Branch { distance, .. } | Kind::Jump { distance } => {
                            at.wrapping_add_signed(distance.into())
                        }
                        _ => piece.start,
                    };
                    let inside = |window: &&Range<u64>| window.start < target && target < window.end;
                    prop_assert_eq!(windows.iter().find(inside), None, "from {:#x}", at);
                    offset += usize::from(instruction.len);
                }
            }
            // All is either found or told.
            for piece in &module.pieces {
                let (site, _) = piece.site.unwrap();
                let is_told = found.missing.iter().any(|it| it.0 == site);
                let is_found = found.list.iter().any(|exit| exit.site == site);
                let is_wanted = module.wanted.contains(&site);
                prop_assert_eq!(is_wanted, is_told || is_found, "{}", site);
            }
        }

        #[test]
        fn no_module_is_too_odd(
            bytes in proptest::collection::vec(any::<u8>(), 0..600),
            start in any::<u64>(),
            size in 0_usize..600,
            ways in proptest::collection::vec(any::<(u64, u64)>(), 0..4),
        ) {
            let piece = |start: u64, site| ModulePiece {
                start,
                bytes: vec![0; size],
                name: "f".into(),
                site: Some((site, start.wrapping_sub(8))),
            };
            let module = ModuleText {
                pieces: vec![piece(start, 0), piece(start.saturating_add(size as u64), 1)],
                regions: vec![(start, bytes)],
                ways,
                wanted: vec![0, 1],
                ..ModuleText::default()
            };
            let _ = find(&module, &|at| i32::try_from(at & 0xff).ok());
        }
    }
}
