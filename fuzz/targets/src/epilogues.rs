//! Exits of riscv64 functions, and where they switch interrupts and preemption: function bodies of
//! arbitrary instructions, and the patches planned for them.

use crate::input::Input;
use crate::kernels::synthetic::{Layout, Machine, Options, build};
use vmtrace::kernel::Kernel;
use vmtrace::kernel::preemptirq::SwitchKind;

/// How functions really end: `ld ra, 8(sp); addi sp, sp, 16; ret`, compressed and not, a tail
/// call, branches over each, `auipc` pairs. How they switch interrupts and count preemptions.
const PIECES: [&[u8]; 18] = [
    &[0x82, 0x80],
    &[0x67, 0x80, 0, 0],
    &[0xa2, 0x60],
    &[0x41, 0x01],
    &[0x83, 0x30, 0x81, 0],
    &[0x13, 0x01, 0x01, 0x01],
    &[0x17, 0x03, 0, 0, 0x67, 0, 0x03, 0],
    &[0x63, 0x04, 0x05, 0],
    &[0x11, 0xc1],
    &[0x01, 0xa0],
    &[0x6f, 0, 0x40, 0],
    &[0x97, 0x05, 0, 0, 0x93, 0x85, 0x45, 0],
    &[0xf3, 0x77, 0x01, 0x10],
    &[0x73, 0x20, 0x07, 0x10],
    &[0x83, 0x27, 0x82, 0, 0x85, 0x27, 0x23, 0x24, 0xf2, 0],
    &[0xb7, 0x07, 0, 0x80],
    &[0xbd, 0x9f],
    &[0x1d, 0x9f],
];
const STUBS: [u64; 3] = [0xffff_ffff_8400_0000, 0xffff_ffff_8000_4000, 0xffff_ffff_ffff_f000];

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choice = input.byte();
    let machine = if choice & 1 == 0 { Machine::Riscv } else { Machine::RiscvCallOps };
    let mut bodies = vec![Vec::new()];
    while !input.is_empty() && bodies.len() < 32 {
        let kind = input.byte();
        let body = bodies.last_mut().expect("never empty");
        match kind {
            0..192 => body.extend(PIECES[usize::from(kind) % PIECES.len()]),
            192..240 => body.extend((input.short() | (u16::from(kind & 1) * 3)).to_le_bytes()),
            _ => bodies.push(Vec::new()),
        }
    }
    let options = Options { bodies, functions: 40, ..Options::new(machine, Layout::AfterBase) };
    let Ok(kernel) = Kernel::parse(build(&options).image) else { return };
    if let Ok(switches) = kernel.switches() {
        for site in switches.all() {
            let SwitchKind::Replaced(replaced, landing) = site.kind else { panic!("{site:?}") };
            assert_eq!(kernel.bytes(site.address, 4), Some(&replaced.word.to_le_bytes()[..]));
            assert_ne!(replaced.link, replaced.through);
            assert!(landing.is_none_or(|it| it.abs_diff(site.address) < 1 << 20));
        }
    }
    let Ok(epilogues) = kernel.epilogues() else { return };
    let all: Vec<usize> = (0..kernel.sites().len()).collect();
    for site in 0..kernel.sites().len() + 1 {
        let _any = epilogues.coverage(site);
    }
    let plan = epilogues.plan(&all);
    for exit in &plan.exits {
        let original = exit.original(&kernel).expect("code of the image");
        for stub in STUBS {
            if let Some(writes) = exit.writes(stub) {
                // What is written is what was there: place for place, as long.
                for ((at, bytes), (was_at, was)) in writes.iter().zip(&original) {
                    assert_eq!((at, bytes.len()), (was_at, was.len()));
                }
                assert_eq!(writes.len(), original.len());
            }
            for common in [None, Some(stub - 0x8_0000), Some(u64::MAX)] {
                if let Some(code) = exit.stub(stub, common, 1) {
                    assert_eq!(code.len(), exit.stub_len());
                }
            }
        }
    }
}
