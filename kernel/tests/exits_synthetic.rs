//! Exits of functions made by hand: the hard cases one by one, and damaged data.

// Small numbers are cut to size all over the place here.
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)]

mod builder;

use builder::code::{Code, NOP5, POP, PUSH, everything};
use proptest::prelude::*;
use vmtrace_kernel::{Coverage, Exit, ExitKind, Kernel, Missing, ReturnStats};

/// What is found in the image.
trait Found {
    fn kernel(&self) -> Kernel;
    fn told(&self, function: &str) -> (Vec<(u64, ExitKind)>, Coverage);
    fn to(&self, label: &str) -> ExitKind;
    fn returns(&self) -> ReturnStats;
}

impl Found for Code {
    fn kernel(&self) -> Kernel {
        Kernel::parse(self.image()).unwrap()
    }

    /// Kinds of exits with their distances from the function's entry, and how much that is.
    fn told(&self, function: &str) -> (Vec<(u64, ExitKind)>, Coverage) {
        let kernel = self.kernel();
        let entry = self.labels[function];
        let site = kernel.sites().iter().position(|site| site.entry == entry).unwrap();
        let exits = kernel.exits().unwrap();
        let relative = |exit: &Exit| (exit.address.wrapping_sub(entry), exit.kind);
        (exits.of(site).iter().map(relative).collect(), exits.coverage(site))
    }

    fn to(&self, label: &str) -> ExitKind {
        ExitKind::Jump { target: self.labels[label] }
    }

    fn returns(&self) -> ReturnStats {
        self.kernel().exits().unwrap().returns()
    }
}

const INDIRECT: ExitKind = ExitKind::Indirect { register: 0, len: 5 };

/// If these failed, so would everything.
#[test]
fn returns_and_tail_calls_are_exits() {
    let mut code = Code::new();
    code.function("f").jump_if("f_end").jump("untraced").label("f_end").ret();
    code.function("g").short("g_loop").label("g_loop").short("g_loop");
    code.function("h").jump("h");
    assert_eq!(
        code.told("f"),
        (vec![(15, code.to("untraced")), (20, ExitKind::Return)], Coverage::Whole)
    );
    assert_eq!(code.told("g"), (vec![], Coverage::None(Missing::NoReturn)));
    // It is traced again when it jumps to itself.
    assert_eq!(code.told("h"), (vec![(9, code.to("h"))], Coverage::Whole));
}

/// clang prefixes the jump; without these, no function of its kernels but a few has returns.
#[test]
fn a_return_may_have_a_prefix() {
    let mut code = Code::new();
    code.function("f");
    code.returns.push(code.here());
    code.branch(&[0x2e, 0xe9], 4, "__x86_return_thunk");
    assert_eq!(code.told("f"), (vec![(9, ExitKind::Return)], Coverage::Whole));
}

/// A hook there would write over what follows, or be overwritten.
#[test]
fn what_cannot_be_hooked_is_told() {
    let mut code = Code::new();
    code.function("short").jump_if("short_more").short("next").label("short_more").ret();
    code.symbol("next").ret();
    code.function("conditional").jump_if("untraced").ret();
    code.function("static").at_static_call();
    code.jump("__SCT__call");
    code.function("memory").raw(&[0xff, 0x60, 8]);
    code.function("far").raw(&[0xff, 0x68, 8]);
    code.function("plain").raw(&[0xc3]);
    code.function("stray").jump("middle");
    code.symbol("other").raw(PUSH).label("middle").raw(POP).ret();
    let first = |function: &str| (code.told(function).0.len(), code.told(function).1);
    assert_eq!(first("short"), (1, Coverage::Partial(Missing::ShortJump)));
    assert_eq!(first("conditional"), (1, Coverage::Partial(Missing::ConditionalJump)));
    assert_eq!(first("static"), (0, Coverage::None(Missing::StaticCall)));
    assert_eq!(first("memory"), (0, Coverage::None(Missing::IndirectJump)));
    assert_eq!(first("far"), (0, Coverage::None(Missing::IndirectJump)));
    assert_eq!(first("plain"), (0, Coverage::None(Missing::UnlistedReturn)));
    assert_eq!(first("stray"), (0, Coverage::None(Missing::StrayJump)));
}

/// A return in a cold part would be nobody's, or a jump there would be a tail call.
#[test]
fn cold_parts_belong_to_the_function_that_jumps_there() {
    let mut code = Code::new();
    code.function("f").jump_if("f.cold").label("f_back").ret();
    code.function("g").jump_if("g_cold").ret();
    code.function("one").jump_if("shared.cold").ret();
    code.function("two").jump_if("shared.cold").ret();
    // Only a static branch leads there.
    code.function("h").may_jump("h.cold");
    code.raw(NOP5).ret();
    code.symbol("f.cold").depth(8).raw(PUSH).raw(POP).jump_if("f_back").ret();
    code.symbol("g.cold").depth(8).raw(PUSH).label("g_cold").raw(POP).jump("untraced");
    code.symbol("shared.cold").depth(8).ret();
    code.symbol("h.cold").depth(8).ret();
    let entry = |name: &str| code.labels[name];
    let cold = entry("f.cold") + 8 - entry("f");
    let exits = vec![(15, ExitKind::Return), (cold, ExitKind::Return)];
    assert_eq!(code.told("f"), (exits, Coverage::Whole));
    let cold = entry("g.cold") + 2 - entry("g");
    let exits = vec![(15, ExitKind::Return), (cold, code.to("untraced"))];
    assert_eq!(code.told("g"), (exits, Coverage::Whole));
    let cold = entry("h.cold") - entry("h");
    let exits = vec![(14, ExitKind::Return), (cold, ExitKind::Return)];
    assert_eq!(code.told("h"), (exits, Coverage::Whole));
    // Whose exit the shared part's is cannot be known there.
    let partial = (vec![(15, ExitKind::Return)], Coverage::Partial(Missing::StrayJump));
    assert_eq!((code.told("one"), code.told("two")), (partial.clone(), partial));
}

/// A computed goto that were taken for a tail call would end the function over and over.
#[test]
fn only_indirect_jumps_that_leave_are_exits() {
    let mut code = Code::new();
    code.function("tail").indirect().raw(&[0xcc]);
    code.function("prefixed").at_retpoline();
    code.raw(&[0x2e]).jump("__x86_indirect_thunk_r11");
    code.function("deep").raw(PUSH).depth(16).indirect();
    code.function("goto").indirect().raw(&[0xcc]).raw(PUSH).raw(POP).ret();
    // The same, but the code behind is what a static branch leads to.
    code.function("led").may_jump("led_to");
    code.raw(NOP5).indirect().label("led_to").raw(&[0x66, 0x90]).ret();
    code.function("unlisted").jump("__x86_indirect_thunk_rax");
    let register = ExitKind::Indirect { register: 11, len: 6 };
    assert_eq!(code.told("tail"), (vec![(9, INDIRECT)], Coverage::Whole));
    assert_eq!(code.told("prefixed"), (vec![(9, register)], Coverage::Whole));
    let none = (vec![], Coverage::None(Missing::IndirectJump));
    assert_eq!((code.told("deep"), code.told("unlisted")), (none.clone(), none));
    let partial = Coverage::Partial(Missing::IndirectJump);
    assert_eq!(code.told("goto"), (vec![(17, ExitKind::Return)], partial));
    let exits = vec![(14, INDIRECT), (21, ExitKind::Return)];
    assert_eq!(code.told("led"), (exits, Coverage::Whole));
    // Without knowing the stack nothing tells them apart.
    code.no_orc = true;
    assert_eq!(code.told("tail"), (vec![], Coverage::None(Missing::IndirectJump)));
}

/// Dead code must not be hooked because of the function before it.
#[test]
fn overridden_functions_are_left_out() {
    let mut code = Code::new();
    code.function("f").ret();
    // One whose site the build left, and one whose site it took away.
    code.function("weak").ret();
    code.function("g").ret();
    code.function("removed").ret();
    code.function("h").ret();
    // One that could not be traced: ORC alone tells.
    code.depth(0).raw(PUSH).ret().jump("untraced");
    code.symbols.retain(|symbol| symbol.2 != "weak" && symbol.2 != "removed");
    let removed = code.labels["removed"] + 4;
    code.sites.retain(|&site| site != removed);
    let only = (vec![(9, ExitKind::Return)], Coverage::Whole);
    for function in ["f", "g", "h"] {
        assert_eq!(code.told(function), only, "{function}");
    }
    assert_eq!(code.told("weak"), (vec![], Coverage::None(Missing::Dead)));
    let stats = code.returns();
    assert_eq!((stats.dead, stats.exits, stats.trampolines, stats.untraced), (3, 3, 1, 1));
}

/// Bytes that are no instructions must neither hide exits nor make some up.
#[test]
fn data_within_code_is_stepped_over() {
    let mut code = Code::new();
    // "xen" and cpuid would decode as a jump.
    code.function("f").raw(&[0x0f, 0x0b]).raw(b"xen").raw(&[0x0f, 0xa2]).ret();
    // iretq, as the kernel uses it to go on.
    code.function("g").raw(&[0x48, 0xcf]).ret();
    // No instruction; what follows is not known to be code.
    code.function("h").jump_if("h_end").ret().raw(&[0x06]).label("h_end").ret();
    // The next function begins within an instruction.
    code.function("cut").raw(&[0x90, 0x48, 0xb8]);
    code.symbols.push((code.here(), b'T', "after".to_owned()));
    code.raw(&[0; 16]);
    assert_eq!(code.told("f"), (vec![(16, ExitKind::Return)], Coverage::Whole));
    assert_eq!(code.told("g"), (vec![(11, ExitKind::Return)], Coverage::Whole));
    let partial = (vec![(15, ExitKind::Return)], Coverage::Partial(Missing::Undecoded));
    assert_eq!(code.told("h"), partial);
    assert_eq!(code.returns().unusable, 1);
    assert_eq!(code.told("cut"), (vec![], Coverage::None(Missing::Undecoded)));
}

/// The kernel would write over a hook there, or a branch would end within it.
#[test]
fn exits_in_code_that_is_rewritten_or_branched_into_are_left_out() {
    let mut code = Code::new();
    code.function("f");
    code.alternative(4, 1, &[0x90]);
    code.ret();
    code.function("g").jump_if("g_inside").label("g_jump").jump("untraced");
    let inside = code.labels["g_jump"] + 2;
    code.labels.insert("g_inside".to_owned(), inside);
    // A jump out of the function that only the replacement has.
    code.function("h");
    code.alternative(0, 5, &[0xe9, 0xf0, 0xff, 0xff, 0xff]);
    code.raw(NOP5).ret();
    assert_eq!(code.told("f"), (vec![], Coverage::None(Missing::Replaced)));
    assert_eq!(code.told("g"), (vec![], Coverage::None(Missing::BranchInside)));
    assert_eq!(code.told("h").1, Coverage::Partial(Missing::StrayJump));
}

/// Errors must tell what to do instead of durations.
#[test]
fn images_without_a_list_of_returns_are_refused() {
    let mut code = Code::new();
    code.function("f").ret();
    code.returns.clear();
    let error = code.kernel().exits().unwrap_err().to_string();
    assert!(error.contains(".return_sites") && error.contains("RETHUNK"), "{error}");

    // A replacement longer than its original: not a layout that is known.
    let mut code = Code::new();
    code.function("f").alternative(0, 1, &[0x90; 2]);
    code.ret();
    let error = code.kernel().exits().unwrap_err().to_string();
    assert!(error.contains("alternatives"), "{error}");
}

proptest! {
    /// A damaged image may give any answer, but neither a panic nor one that contradicts itself.
    #[test]
    fn damage_is_no_panic(
        writes in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 1_usize..9), 1..12),
        part in 0..3,
    ) {
        let (image, code, tables) = everything();
        let mut image = image.clone();
        let (first, size) = match part {
            0 => (4096, *code),
            1 => (tables.start, tables.len()),
            _ => (0, image.len() - 8),
        };
        for (at, value, len) in writes {
            let at = first + at.index(size);
            image[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
        }
        if let Ok(kernel) = Kernel::parse(image)
            && let Ok(exits) = kernel.exits()
        {
            prop_assert!(exits.all().is_sorted_by_key(|exit| (exit.site, exit.address)));
            // Exits of functions whose site the damage took away belong to none.
            let sites = kernel.sites().len();
            let with_site = exits.all().iter().filter(|exit| exit.site != Exit::NO_SITE);
            prop_assert!((0..sites).flat_map(|site| exits.of(site)).eq(with_site));
            for site in 0..kernel.sites().len() {
                let none = matches!(exits.coverage(site), Coverage::None(_));
                prop_assert_eq!(none, exits.of(site).is_empty());
            }
            let stats = exits.returns();
            let parts = [stats.exits, stats.trampolines, stats.outside, stats.untraced, stats.dead];
            prop_assert_eq!(stats.listed, parts.iter().sum::<usize>() + stats.unusable);
        }
    }
}
