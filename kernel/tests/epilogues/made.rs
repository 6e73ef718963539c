//! Functions that no kernel has: every kind of code, and what cannot be covered.

use crate::builder::{self, Layout, Machine, Options};
use crate::execution::compare;
use crate::image::{Code, Windows, branch_target};
use crate::kernels::epilogues;
use crate::part::check_part;
use crate::random::Random;
use crate::writes::check_tables;
use proptest::prelude::*;
use vmtrace_kernel::Kernel;
use vmtrace_kernel::epilogues::{Coverage, Missing};

/// An instruction of some kind, with random operands.
fn instruction() -> impl Strategy<Value = Vec<u8>> {
    let short = |code: u16, open: u16| {
        any::<u16>().prop_map(move |bits| (code | bits & open).to_le_bytes().to_vec())
    };
    let full = |code: u32, open: u32| {
        any::<u32>().prop_map(move |bits| (code | bits & open).to_le_bytes().to_vec())
    };
    let epilogue = prop_oneof![
        Just(0x60a2_u16), // ld ra, 8(sp)
        Just(0x6402),     // ld s0, 0(sp)
        Just(0x6105),     // addi sp, sp, 32
        Just(0x8526),     // mv a0, s1
    ];
    let fixed = prop_oneof![
        Just(0x1005_b52f_u32), // lr.d a0, (a1)
        Just(0x18d7_262f),     // sc.w a2, a3, (a4)
        Just(0x0010_0073),     // ebreak
        Just(0x0000_80e7),     // jalr ra
        Just(0x0000_100b),     // not known
    ];
    prop_oneof![
        8 => epilogue.prop_map(|code| code.to_le_bytes().to_vec()),
        2 => Just(vec![0x82, 0x80]),           // ret
        1 => Just(vec![0x67, 0x80, 0, 0]),     // ret
        2 => full(0x0000_0513, 0xfffd_8000),   // addi a0, any, any
        1 => full(0x0000_0313, 0xf005_8f80),   // addi any, some, any
        1 => full(0x0065_0533, 0x001f_8000),   // add a0, some, t1 and others
        1 => full(0x00a5_3023, 0xfe00_0f80),   // sd a0, any(a0)
        1 => full(0x0000_0597, 0x0000_f000),   // auipc a1, a little
        2 => short(0xc001, 0x2f98),            // beqz or bnez, ahead
        1 => short(0xd065, 0x2f98),            // the same, back
        1 => full(0x0000_0063, 0x01f0_9f00),   // beq or bne, ahead
        1 => short(0xa001, 0x0018),            // j, ahead
        1 => short(0xa001, 0x1ffc),            // j anywhere
        1 => full(0x1000_2573, 0x000f_8000),   // csrrs a0, sstatus, any
        1 => fixed.prop_map(|code| code.to_le_bytes().to_vec()),
    ]
}

fn bodies() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let body = prop::collection::vec(instruction(), 0..24).prop_map(|instructions| {
        let mut body = instructions.concat();
        body.extend([0x82, 0x80]);
        body
    });
    prop::collection::vec(body, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    // Whatever functions are made of: no write meets another, nothing jumps into a window, and
    // what runs does the same as before.
    #[test]
    fn any_functions_are_rewritten_soundly(
        bodies in bodies(),
        call_ops in any::<bool>(),
        one in any::<prop::sample::Index>(),
        seed in any::<u64>(),
    ) {
        let machine = if call_ops { Machine::RiscvCallOps } else { Machine::Riscv };
        let options = Options::new(machine, Layout::AfterBase);
        let built = builder::build(&Options { bodies, btf: false, ..options });
        let kernel = Kernel::parse(built.image).unwrap();
        let epilogues = epilogues(&kernel);
        let all: Vec<usize> = (0..kernel.sites().len()).collect();
        let one = one.index(all.len());
        for wanted in [&all, &all[one..=one], &all[one / 2..=one]] {
            let plan = epilogues.plan(wanted);
            check_part("synthetic", &kernel, wanted, &plan);
            check_tables("synthetic", &kernel, &plan);
            let windows = Windows::of(&plan);
            let code = Code::of(&kernel);
            for (address, word) in code.all().flat_map(|range| code.instructions(range)) {
                let target = branch_target(address, word);
                prop_assert!(!target.is_some_and(|target| windows.inside(target)), "{:x}", address);
            }
            let mut random = Random(seed);
            for exit in &plan.exits {
                compare("synthetic", &kernel, exit, &mut random);
            }
        }
    }
}

#[test]
fn what_cannot_be_seen_of_a_function_is_told() {
    const EPILOGUE: [u16; 4] = [0x60a2, 0x6402, 0x6105, 0x8082];
    let body = |code: &[u16], tail: &[u16]| -> Vec<u8> {
        code.iter().chain(tail).flat_map(|half| half.to_le_bytes()).collect()
    };
    let cases: [(Vec<u8>, Coverage); 10] = [
        // Long enough for the landings of others.
        (body(&[0x8526; 24], &EPILOGUE), Coverage::Whole),
        // beqz a0, to the last two instructions; then j there.
        (body(&[0xc119, 0xa011], &EPILOGUE), Coverage::Whole),
        (body(&[0x9002], &[]), Coverage::None(Missing::NoReturn)),
        // auipc t1, 0x80; jr t1
        (body(&[0x0317, 0x0008, 0x8302], &[]), Coverage::None(Missing::Leaves)),
        (body(&[0x0317, 0x0008, 0x8302], &EPILOGUE), Coverage::Partial(Missing::Leaves)),
        // j .+0x80000
        (body(&[0x006f, 0x0008], &EPILOGUE), Coverage::Partial(Missing::Leaves)),
        // ld a5, 0(a0); jr a5: to no place in this function.
        (body(&[0x611c, 0x8782], &EPILOGUE), Coverage::Partial(Missing::Unclear)),
        // add a5, a5, a4; jr a5: by no table.
        (body(&[0x97ba, 0x8782], &EPILOGUE), Coverage::Partial(Missing::Unclear)),
        // The loaded register is another one on the way by the branch, which leads to the jump.
        (body(&[0xc111, 0x611c, 0x8782], &EPILOGUE), Coverage::Partial(Missing::Unclear)),
        // add a0, a0, t1; beqz a0, back to it: t1 cannot be the jump's.
        (body(&[0x0533, 0x0065, 0xdd75], &EPILOGUE[1..]), Coverage::Whole),
    ];
    for machine in [Machine::Riscv, Machine::RiscvCallOps] {
        let bodies = cases.iter().map(|(body, _)| body.clone()).collect();
        let options = Options::new(machine, Layout::Relative);
        let built = builder::build(&Options { bodies, ..options });
        let kernel = Kernel::parse(built.image).unwrap();
        let epilogues = epilogues(&kernel);
        // Behind those that the tables name, and one whole turn.
        for (site, (body, coverage)) in (20..).zip(&cases) {
            assert_eq!(epilogues.coverage(site), *coverage, "{body:x?}");
            let plan = epilogues.plan(&[site]);
            let own = plan.exits.iter().filter(|exit| !exit.helper);
            let t1 = body.starts_with(&[0x33, 0x05]);
            let clear = !matches!(coverage, Coverage::Partial(Missing::Unclear));
            for exit in own {
                // Anything may jump into a function that is not understood.
                assert_eq!(exit.epilogue.len == 2, !clear, "{body:x?}: {exit:x?}");
                assert_eq!(exit.epilogue.scratch != 6, t1, "{body:x?}: {exit:x?}");
            }
        }
        assert_eq!(epilogues.coverage(950), Coverage::None(Missing::StartUp));
    }
}
