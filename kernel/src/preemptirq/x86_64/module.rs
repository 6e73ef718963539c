//! Finds these places in modules.
//!
//! The code is that of a loaded module, whose alternatives are patched, for good. So `cli` and `sti`
//! are what they look like, and the nop of 5 bytes behind one is the rest of its alternative, unless
//! the module's tables say that the kernel rewrites it.

use crate::exits::module::ModuleText;
use crate::exits::x86_64::{CountPlace, Counted, ModuleCode};
use crate::preemptirq::{ModuleSwitches, SwitchKind, SwitchSite, UnusableSwitch};

/// `cli` and `sti`.
const CLI: u8 = 0xfa;
const STI: u8 = 0xfb;
/// Nops of 5 bytes, of kernels since 5.13 and of some before.
const NOPS: [[u8; 5]; 2] = [[0x0f, 0x1f, 0x44, 0, 0], [0x66, 0x66, 0x66, 0x66, 0x90]];

/// Why a place is left alone.
const NO_ROOM: &str = "no room for a jump";
const REWRITTEN: &str = "the kernel rewrites code there";
const LED_INTO: &str = "a jump may lead into the room for one";
const OTHERWISE: &str = "the count is changed in a form that is not replaced";

/// `count` is where the count of preemptions is, if that is known.
pub(in crate::preemptirq) fn find(text: &ModuleText, count: Option<CountPlace>) -> ModuleSwitches {
    let code = ModuleCode::new(text, count);
    let mut found = ModuleSwitches { torn: code.torn(), ..ModuleSwitches::default() };
    let mut add = |address: u64, kind: Result<SwitchKind, &'static str>, is_of_interrupts: bool| {
        // Behind a breakpoint it need not be an instruction at all.
        if code.is_torn(address) {
            return;
        }
        let kind = kind.and_then(|kind| {
            let len = kind.size();
            let why = match () {
                () if !code.is_whole(address, len) => NO_ROOM,
                () if is_rewritten(text, address, len) => REWRITTEN,
                () if code.is_led_into(address, len) => LED_INTO,
                () => return Ok(kind),
            };
            Err(why)
        });
        match kind {
            Ok(kind) => found.list.push(SwitchSite { address, kind }),
            Err(why) => found.unusable.push(UnusableSwitch { address, is_of_interrupts, why }),
        }
    };
    for &address in &code.flags {
        add(address, flag(text, address).ok_or(NO_ROOM), true);
    }
    for &Counted { address, len, add: added, wide, by_register, otherwise } in &code.counted {
        let kind = match added.map(|add| SwitchKind::Count { add, wide }) {
            Some(kind @ SwitchKind::Count { add: 1.. | ..=-1, .. }) if kind.size() == len => {
                Ok(kind)
            }
            // What sets it, or only the bit that asks for a reschedule.
            None if !by_register && !otherwise => continue,
            _ => Err(OTHERWISE),
        };
        add(address, kind, false);
    }
    found.list.sort_unstable_by_key(|site| site.address);
    found.unusable.sort_unstable_by_key(|place| place.address);
    found
}

/// What `cli` or `sti` is that has room for a jump.
fn flag(text: &ModuleText, address: u64) -> Option<SwitchKind> {
    let after = text.pieces.partition_point(|piece| piece.start <= address);
    let (opcode, nop) = text.pieces.get(after.checked_sub(1)?)?.from(address)?.split_first()?;
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

    /// Addresses of places that are left alone, of interrupts and of preemption, with why.
    fn left(found: &ModuleSwitches) -> [Vec<(u64, &'static str)>; 2] {
        [true, false].map(|of_interrupts| {
            let own = found.unusable.iter().filter(|it| it.is_of_interrupts == of_interrupts);
            own.map(|it| (it.address - BASE, it.why)).collect()
        })
    }

    #[test]
    fn flags_with_room_are_found_and_others_are_told() {
        let text = function(&[&[CLI], &NOP, &[STI], &NOPS[1], &[STI, 0xf4], &[CLI, 0x90], &[0xc3]]);
        let found = find(&text, None);
        assert_eq!(kinds(&found), [(5, SwitchKind::Cli), (11, SwitchKind::Sti)]);
        assert_eq!(left(&found), [vec![(17, NO_ROOM), (19, NO_ROOM)], vec![]]);
        // Bytes of other instructions are none.
        let text = function(&[&[0xb8, 0, 0, 0, CLI], &NOP, &[0xc3]]);
        assert_eq!(find(&text, None).list, []);
        // What the function does not have as a whole is of somebody else.
        let mut text = function(&[&[CLI], &NOP]);
        text.pieces[0].bytes.pop();
        let found = find(&text, None);
        assert_eq!((found.list, found.unusable, found.torn), (vec![], vec![], 1));
    }

    // It would be written into the middle of an instruction, or is not seen and never told.
    #[test]
    fn nothing_is_told_of_functions_that_are_being_changed() {
        let text = |code: &[&[u8]]| {
            let mut text = function(code);
            let other =
                ModulePiece { start: BASE + 0x100, ..function(&[&[STI], &NOP]).pieces.remove(0) };
            let site = other.site.map(|(number, at)| (number, at + 0x100));
            text.pieces.push(ModulePiece { site, ..other });
            text
        };
        let places = |text: &ModuleText| {
            let found = find(text, Some(place(0)));
            assert_eq!(found.unusable, []);
            (kinds(&found), found.torn)
        };
        let sti = (0x105, SwitchKind::Sti);
        let whole = text(&[&[CLI], &NOP, &NOP, &[0xc3]]);
        assert_eq!(places(&whole), (vec![(5, SwitchKind::Cli), sti], 0));
        // A breakpoint in place of the first byte of a nop, or of an instruction that is as long.
        let labels = [BASE + 11];
        for code in
            [[0xcc, 0x1f, 0x44, 0, 0], [0xcc, 0x90, 0x90, 0x90, 0x90], [0xcc, 0xfb, 0x0f, 0x1f, 0]]
        {
            let torn = text(&[&[CLI], &NOP, &code, &[0xc3]]);
            assert_eq!(places(&torn), (vec![sti], 1), "{code:x?}");
        }
        // A probe where only a jump leads to.
        let probed = text(&[&[0xeb, 0x01], &[0xc3], &[0xcc], &NOP, &[0xc3]]);
        assert_eq!(places(&probed), (vec![sti], 1));
        // Where nothing goes on to it, it is only known by the table.
        let behind = text(&[&[CLI], &NOP, &[0xc3], &[0xcc; 5]]);
        assert_eq!(places(&behind), (vec![(5, SwitchKind::Cli), sti], 0));
        let labels = ModuleText { labels: labels.iter().map(|at| at + 1).collect(), ..behind };
        assert_eq!(places(&labels), (vec![sti], 1));
    }

    // Both would write there.
    #[test]
    fn what_is_rewritten_or_led_into_is_left_alone() {
        let text = || function(&[&[CLI], &NOP, &[0xc3]]);
        let unusable = |text: &ModuleText| {
            let found = find(text, None);
            let why = left(&found)[0].first().map(|&(at, why)| (at == 5).then_some(why).unwrap());
            (found.list.is_empty(), why)
        };
        let (rewritten, led_into) = ((true, Some(REWRITTEN)), (true, Some(LED_INTO)));
        assert_eq!(unusable(&text()), (false, None));
        for at in [BASE + 1, BASE + 6, BASE + 10] {
            let labels = ModuleText { labels: vec![BASE - 9, at, BASE + 90], ..text() };
            assert_eq!(unusable(&labels), rewritten, "{at:#x}");
            let calls = ModuleText { static_calls: vec![at], ..text() };
            assert_eq!(unusable(&calls), rewritten, "{at:#x}");
            let ways = ModuleText { ways: vec![(BASE, at)], ..text() };
            let expected = if at > BASE + 5 { led_into } else { (false, None) };
            assert_eq!(unusable(&ways), expected, "{at:#x}");
        }
        for at in [BASE, BASE + 11] {
            let labels = ModuleText { labels: vec![at], ..text() };
            assert_eq!(unusable(&labels), (false, None), "{at:#x}");
        }
        // A branch into the nop, from the function itself and from another one.
        let own = function(&[&[CLI], &NOP, &[0xeb, 0xfd]]);
        assert_eq!(unusable(&own), led_into);
        let mut other = text();
        let jump = [0xe9_u8, 0, 0, 0, 0];
        other.pieces.push(ModulePiece {
            start: BASE + 0x100,
            bytes: jump.into(),
            ..ModulePiece::default()
        });
        assert_eq!(unusable(&other), (false, None));
        let distance = (BASE + 8).wrapping_sub(BASE + 0x105).cast_signed();
        let distance = i32::try_from(distance).unwrap().to_le_bytes();
        other.pieces[1].bytes[1..].copy_from_slice(&distance);
        assert_eq!(unusable(&other), led_into);
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
            assert_eq!(left(&found), [vec![], vec![(41, OTHERWISE)]]);
            assert_eq!(find(&text, None).list, []);
        }
        let wide = on_count(5, &[0x65, 0x48, 0xff, 0x05], &[], 0);
        let found = find(&function(&[&wide]), Some(place(0)));
        assert_eq!(kinds(&found), [(5, SwitchKind::Count { add: 1, wide: true })]);
    }

    // Who does not count them says that all are recorded.
    #[test]
    fn other_forms_of_changes_of_the_count_are_told() {
        for (begins, immediate) in [
            // add by a byte, sub, add of a register.
            (&[0x65, 0x83, 0x05][..], &[1][..]),
            (&[0x65, 0x83, 0x05], &[0x80]),
            (&[0x65, 0x48, 0x83, 0x05], &[2]),
            (&[0x65, 0x81, 0x2d], &[0, 2, 0, 0]),
            (&[0x65, 0x83, 0x2d], &[2]),
            (&[0x65, 0x01, 0x35], &[]),
        ] {
            let found = find(&function(&[&on_count(5, begins, immediate, 0)]), Some(place(0)));
            assert_eq!((kinds(&found), found.torn), (vec![], 0), "{begins:x?}");
            assert_eq!(left(&found), [vec![], vec![(5, OTHERWISE)]], "{begins:x?}");
        }
        // By an address in the instruction, which does not move with the code.
        for slide in [0, 0x1d00_0000] {
            let at = |address: u64| u32::try_from(address).unwrap().to_le_bytes();
            let own = [&[0x65, 0xff, 0x04, 0x25][..], &at(COUNT)].concat();
            let other = [&[0x65, 0xff, 0x04, 0x25][..], &at(COUNT + 8)].concat();
            let found = find(&function(&[&own, &other]), Some(place(slide)));
            assert_eq!(left(&found), [vec![], vec![(5, OTHERWISE)]], "{slide:#x}");
            assert_eq!(found.list, []);
        }
    }
}
