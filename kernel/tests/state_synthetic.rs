//! What the state of a CPU is made of, and where it changes, read off code made by hand.

mod builder;

use builder::code::Code;
use vmtrace_kernel::Kernel;
use vmtrace_kernel::preemptirq::Switch;
use vmtrace_kernel::{NeedResched, PreemptCount};

// Without it `--context` and all latencies that need it are refused for Debian 11's kernels.
#[test]
fn flags_of_kernels_before_5_12_are_known_too() {
    let mut code = Code::new();
    // As 5.10 has it: test ecx, 0xf00000; mov rdx, gs:[0x1fbc0]; mov rcx, [rdx]; and ecx, 8
    code.function("f").ret();
    code.symbol("tracing_generic_entry_update");
    code.raw(&[0xf7, 0xc1, 0, 0, 0xf0, 0]);
    code.raw(&[0x65, 0x48, 0x8b, 0x14, 0x25, 0xc0, 0xfb, 1, 0]);
    code.raw(&[0x48, 0x8b, 0x0a, 0x83, 0xe1, 8]).ret();
    code.symbol("next").ret();
    let kernel = Kernel::parse(code.image()).unwrap();
    assert_eq!(kernel.need_resched(), Some(NeedResched { eager: 3, lazy: None }));
    assert_eq!(kernel.preempt_count(), PreemptCount::Narrow);
}

// It was said that the kernel is built without something which it is built with.
#[test]
fn kernels_before_5_12_are_told_why_interrupts_cannot_be_traced() {
    let told = |old: bool| {
        let mut code = Code::new();
        code.function("f").ret();
        if old {
            code.symbol("native_patch").ret();
        }
        let kernel = Kernel::parse(code.image()).unwrap();
        kernel.switches().unwrap().check(Switch::IrqDisable).unwrap_err().to_string()
    };
    assert!(told(true).contains("newer kernels work"), "{}", told(true));
    assert!(told(false).contains("CONFIG_PARAVIRT_XXL"), "{}", told(false));
}
