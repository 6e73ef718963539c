//! Finds these places in modules.
//!
//! The code is that of a loaded module, whose alternatives are patched, for good. So `cli` and `sti`
//! are what they look like, and the nop of 5 bytes behind one is the rest of its alternative, unless
//! the module's tables say that the kernel rewrites it.

use crate::exits::module::ModuleText;
use crate::exits::x86_64::{CountPlace, Counted, ModuleCode};
use crate::preemptirq::{ModuleSwitches, SwitchKind, SwitchSite};

/// `cli` and `sti`.
const CLI: u8 = 0xfa;
const STI: u8 = 0xfb;
/// Nops of 5 bytes, of kernels since 5.13 and of some before.
const NOPS: [[u8; 5]; 2] = [[0x0f, 0x1f, 0x44, 0, 0], [0x66, 0x66, 0x66, 0x66, 0x90]];

/// `count` is where the count of preemptions is, if that is known.
pub(in crate::preemptirq) fn find(text: &ModuleText, count: Option<CountPlace>) -> ModuleSwitches {
    let code = ModuleCode::new(text, count);
    let mut found = ModuleSwitches { why: "no room for a jump", ..ModuleSwitches::default() };
    let [interrupts, preemption] = &mut found.unusable;
    let mut add = |address: u64, kind: SwitchKind, unusable: &mut Vec<u64>| {
        if code.is_whole(address, kind.size()) && !is_rewritten(text, address, kind.size()) {
            found.list.push(SwitchSite { address, kind });
        } else {
            unusable.push(address);
        }
    };
    for &address in &code.flags {
        match flag(text, address) {
            Some(kind) => add(address, kind, interrupts),
            None => interrupts.push(address),
        }
    }
    for &Counted { address, len, add: added, wide, by_register } in &code.counted {
        match added.map(|add| SwitchKind::Count { add, wide }) {
            Some(kind @ SwitchKind::Count { add: 1.. | ..=-1, .. }) if kind.size() == len => {
                add(address, kind, preemption);
            }
            // What sets it, or only the bit that asks for a reschedule.
            None if !by_register => {}
            _ => preemption.push(address),
        }
    }
    found.list.sort_unstable_by_key(|site| site.address);
    found.unusable.iter_mut().for_each(|own| own.sort_unstable());
    found
}

/// What `cli` or `sti` is that has room for a jump.
fn flag(text: &ModuleText, address: u64) -> Option<SwitchKind> {
    let after = text.pieces.partition_point(|piece| piece.start <= address);
    let piece = text.pieces.get(after.checked_sub(1)?)?;
    let at = usize::try_from(address - piece.start).ok()?;
    let (opcode, nop) = piece.bytes.get(at..)?.split_first()?;
    let nop = nop.first_chunk::<5>()?;
    match *opcode {
        CLI if NOPS.contains(nop) => Some(SwitchKind::Cli),
        STI if NOPS.contains(nop) => Some(SwitchKind::Sti),
        _ => None,
    }
}

/// Whether the kernel rewrites something there.
fn is_rewritten(text: &ModuleText, address: u64, len: u8) -> bool {
    /// Of a site, and of other instructions that are rewritten at most.
    const LEN: u64 = 5;
    let end = address.saturating_add(len.into());
    let overlaps = |at: u64| at < end && address < at.saturating_add(LEN);
    let any = |list: &[u64]| {
        let first = list.partition_point(|&at| at.saturating_add(LEN) <= address);
        list.get(first).is_some_and(|&at| overlaps(at))
    };
    let after = text.pieces.partition_point(|piece| piece.start <= address);
    let piece = after.checked_sub(1).and_then(|at| text.pieces.get(at));
    let site = piece.and_then(|piece| piece.site);
    any(&text.labels) || any(&text.static_calls) || site.is_some_and(|(_, at)| overlaps(at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exits::module::ModulePiece;

    const BASE: u64 = 0xffff_ffff_c000_0000;
    const COUNT: u64 = 0x3_5008;
    const NOP: [u8; 5] = NOPS[0];
    const SITE: [u8; 5] = NOPS[0];

    fn place(slide: u64) -> CountPlace {
        CountPlace { near: COUNT.wrapping_sub(slide), plain: COUNT }
    }

    /// A function with its site and this code behind it.
    fn function(code: &[&[u8]]) -> ModuleText {
        let bytes = [&SITE[..], &code.concat()].concat();
        let piece = ModulePiece { start: BASE, bytes, name: "f".into(), site: Some((7, BASE)) };
        ModuleText { pieces: vec![piece], ..ModuleText::default() }
    }

    /// An instruction at this distance from the beginning on the count, of which it has the place
    /// `behind` its own end.
    fn on_count(at: u64, begins: &[u8], immediate: &[u8], slide: u64) -> Vec<u8> {
        let len = u64::try_from(begins.len() + 4 + immediate.len()).unwrap();
        let distance = place(slide).near.wrapping_sub(BASE + at + len).cast_signed();
        // As the processor adds it.
        #[allow(clippy::cast_possible_truncation, reason = "of 32 bits, sign-extended")]
        let distance = (distance as i32).to_le_bytes();
        [begins, &distance, immediate].concat()
    }

    fn kinds(found: &ModuleSwitches) -> Vec<(u64, SwitchKind)> {
        found.list.iter().map(|site| (site.address - BASE, site.kind)).collect()
    }

    #[test]
    fn flags_with_room_are_found_and_others_are_told() {
        let text = function(&[&[CLI], &NOP, &[STI], &NOPS[1], &[STI, 0xf4], &[CLI, 0x90], &[0xc3]]);
        let found = find(&text, None);
        assert_eq!(kinds(&found), [(5, SwitchKind::Cli), (11, SwitchKind::Sti)]);
        assert_eq!(found.unusable, [vec![BASE + 17, BASE + 19], vec![]]);
        // Bytes of other instructions are none.
        let text = function(&[&[0xb8, 0, 0, 0, CLI], &NOP, &[0xc3]]);
        assert_eq!(find(&text, None).list, []);
        // What the function does not have as a whole is of somebody else.
        let mut text = function(&[&[CLI], &NOP]);
        text.pieces[0].bytes.pop();
        let found = find(&text, None);
        assert_eq!((found.list.len(), &found.unusable[0][..]), (0, &[BASE + 5][..]));
    }

    // Both would write there.
    #[test]
    fn what_is_rewritten_or_led_into_is_left_alone() {
        let text = || function(&[&[CLI], &NOP, &[0xc3]]);
        let unusable = |text: &ModuleText| {
            let found = find(text, None);
            (found.list.is_empty(), found.unusable[0] == [BASE + 5])
        };
        assert_eq!(unusable(&text()), (false, false));
        for at in [BASE + 1, BASE + 6, BASE + 10] {
            let labels = ModuleText { labels: vec![BASE - 9, at, BASE + 90], ..text() };
            assert_eq!(unusable(&labels), (true, true), "{at:#x}");
            let calls = ModuleText { static_calls: vec![at], ..text() };
            assert_eq!(unusable(&calls), (true, true), "{at:#x}");
            let ways = ModuleText { ways: vec![(BASE, at)], ..text() };
            assert_eq!(unusable(&ways), (at > BASE + 5, at > BASE + 5), "{at:#x}");
        }
        for at in [BASE, BASE + 11] {
            let labels = ModuleText { labels: vec![at], ..text() };
            assert_eq!(unusable(&labels), (false, false), "{at:#x}");
        }
        // A branch into the nop, from the function itself and from another one.
        let own = function(&[&[CLI], &NOP, &[0xeb, 0xfd]]);
        assert_eq!(unusable(&own), (true, true));
        let mut other = text();
        let jump = [0xe9_u8, 0, 0, 0, 0];
        other.pieces.push(ModulePiece {
            start: BASE + 0x100,
            bytes: jump.into(),
            ..ModulePiece::default()
        });
        assert_eq!(unusable(&other), (false, false));
        let distance = (BASE + 8).wrapping_sub(BASE + 0x105).cast_signed();
        let distance = i32::try_from(distance).unwrap().to_le_bytes();
        other.pieces[1].bytes[1..].copy_from_slice(&distance);
        assert_eq!(unusable(&other), (true, true));
    }

    // Everything comes from the guest.
    #[test]
    fn any_code_and_tables_are_looked_through() {
        let mut state = 3_u64;
        let mut next = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            (state >> 33) % bound
        };
        let mut seen = 0;
        for round in 0..3000 {
            let mut text = ModuleText::default();
            // At the end of memory, too.
            let mut start = if round % 2 == 0 { BASE } else { 0_u64.wrapping_sub(300) };
            for _ in 0..next(4) {
                let mut bytes = Vec::new();
                for _ in 0..next(12) {
                    match next(5) {
                        0 => bytes.push(CLI),
                        1 => bytes.extend([STI, 0x0f]),
                        2 | 3 => bytes.extend(NOP),
                        _ => bytes.push(next(256).to_le_bytes()[0]),
                    }
                }
                let site = (next(2) == 0).then(|| (7, start.wrapping_add(next(9))));
                text.pieces.push(ModulePiece { start, bytes, name: "f".into(), site });
                start = start.saturating_add(next(80));
            }
            let mut list = |count| {
                let mut list: Vec<u64> =
                    (0..next(count)).map(|_| BASE.wrapping_add(next(100))).collect();
                list.sort_unstable();
                list
            };
            (text.labels, text.static_calls) = (list(5), list(5));
            text.ways = list(5).into_iter().zip(list(5)).collect();
            for site in find(&text, Some(place(next(9)))).list {
                let of = text.pieces.iter().find(|piece| {
                    let at = site.address.checked_sub(piece.start);
                    let end = at.map(|at| at + u64::from(site.kind.size()));
                    end.is_some_and(|end| end <= u64::try_from(piece.bytes.len()).unwrap())
                });
                assert!(of.is_some(), "{site:?} is not within a function: {text:x?}");
                seen += 1;
            }
        }
        assert!(seen > 100, "{seen}");
    }

    #[test]
    fn changes_of_the_count_are_found_wherever_the_kernel_is() {
        for slide in [0, 0x1d00_0000] {
            let [inc, dec, add] =
                [&[0x65, 0xff, 0x05][..], &[0x65, 0xff, 0x0d], &[0x65, 0x81, 0x05]];
            let five = 5_i32.to_le_bytes();
            let code = [
                on_count(5, inc, &[], slide),
                on_count(12, dec, &[], slide),
                on_count(19, add, &five, slide),
                // and: only the bit that asks for a reschedule.
                on_count(30, &[0x65, 0x81, 0x25], &five, slide),
                // It may be changed by this register.
                [&[0x48, 0xc7, 0xc0][..], &u32::try_from(COUNT).unwrap().to_le_bytes()].concat(),
                // Of another word.
                on_count(48, inc, &[], slide + 8),
            ];
            let text = function(&[&code.concat(), &[0xc3]]);
            let found = find(&text, Some(place(slide)));
            let count = |add| SwitchKind::Count { add, wide: false };
            assert_eq!(kinds(&found), [(5, count(1)), (12, count(-1)), (19, count(5))]);
            assert_eq!(found.unusable, [vec![], vec![BASE + 41]]);
            assert_eq!(find(&text, None).list, []);
        }
        let wide = on_count(5, &[0x65, 0x48, 0xff, 0x05], &[], 0);
        let found = find(&function(&[&wide]), Some(place(0)));
        assert_eq!(kinds(&found), [(5, SwitchKind::Count { add: 1, wide: true })]);
        // By a byte, which leaves no room.
        let short = on_count(5, &[0x65, 0x83, 0x05], &[1], 0);
        let found = find(&function(&[&short]), Some(place(0)));
        assert_eq!(found.list, []);
    }
}
