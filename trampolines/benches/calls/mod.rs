//! Functions that call each other, traced in several ways.

use crate::common::FakeGuest;
use crate::common::arch::{Addressing, jump};
use std::time::Instant;
use vmtrace_trampolines::{Overflow, Program};

/// Of nested calls: fewer than a processor predicts returns of (16 or more).
pub(crate) const DEPTH: usize = 12;
const CALLS: u32 = 4000;

/// How functions end.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Returns {
    Plain,
    /// By a jump to a stub that goes on to a program.
    Patched,
    /// The return address was replaced by that of a handler, which returns to the real one: what
    /// function graph tracers of kernels do. Only what the processor cannot predict in that: no
    /// record, no bookkeeping but a stack of addresses.
    Hijacked,
}

pub(crate) struct Calls {
    guest: FakeGuest,
    tail: u64,
    depth: usize,
    function: extern "C" fn(),
}

pub(crate) fn nanoseconds(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}

pub(crate) fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// `call` or `jmp`.
fn branch(opcode: u8, from: u64, to: u64) -> Vec<u8> {
    let mut code = jump(from, to);
    code[0] = opcode;
    code
}

impl Calls {
    /// Functions that are not traced.
    pub(crate) fn untraced(returns: Returns, depth: usize) -> Self {
        Self::of(Addressing::PerCpu, Overflow::Drop, &[], returns, depth)
    }

    /// Functions that call each other so deep. The first program is called at their entries, the
    /// second at their returns if these are patched.
    pub(crate) fn new(
        addressing: Addressing,
        overflow: Overflow,
        programs: &[Program],
        returns: Returns,
        depth: usize,
    ) -> Self {
        Self::of(addressing, overflow, programs, returns, depth)
    }

    fn of(
        addressing: Addressing,
        overflow: Overflow,
        programs: &[Program],
        returns: Returns,
        depth: usize,
    ) -> Self {
        let entries = !programs.is_empty();
        let some = [crate::common::entry_program()];
        let programs = if entries { programs } else { &some };
        // Room for all that one round records; a flight recorder goes round in what it has.
        let size = if overflow == Overflow::Drop { 8 << 20 } else { 1 << 20 };
        let guest = FakeGuest::with(1, size, addressing, overflow, programs);
        guest.set_current(0, 1);
        // Stubs are 64 bytes: a function, and behind it the stub of its return.
        for level in 0..depth {
            let start = guest.stub(level);
            let mut code = Vec::new();
            let at = |code: &mut Vec<u8>, opcode, to| {
                let from = start + code.len() as u64;
                code.extend(branch(opcode, from, to));
            };
            if entries {
                at(&mut code, 0xe8, guest.program(0));
            }
            if returns == Returns::Hijacked {
                at(&mut code, 0xe8, guest.stub(14));
            }
            if level + 1 < depth {
                at(&mut code, 0xe8, guest.stub(level + 1));
            }
            if returns == Returns::Patched {
                let stub = start + 32;
                at(&mut code, 0xe9, stub);
                code.resize(32, 0xcc);
                let program = guest.program(1);
                let stub = vmtrace_trampolines::x86_64::return_stub(stub, start, program);
                code.extend(stub.unwrap());
            } else {
                code.push(0xc3);
            }
            guest.put(level, &code);
        }
        if returns == Returns::Hijacked {
            hijack(&guest);
        }
        // SAFETY: a function without arguments was just written there; what it changes are
        // registers that the C ABI does not keep.
        let function = unsafe {
            core::mem::transmute::<*const (), extern "C" fn()>(core::ptr::with_exposed_provenance(
                usize::try_from(guest.stub(0)).unwrap(),
            ))
        };
        Self { tail: guest.rings[0].start(), guest, depth, function }
    }

    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Of a call of the outermost.
    pub(crate) fn time(&mut self) -> f64 {
        self.guest.run_on(0);
        let figure = nanoseconds(|| (self.function)());
        if self.guest.overflow() == Overflow::Drop {
            self.guest.drain(0, &mut self.tail, |_| ());
            assert_eq!(self.guest.dropped(0), 0, "the figure would be that of the full path");
        }
        figure
    }
}

/// Place 14: puts the return address of the caller on a stack beside the CPU's and that of place 15
/// in its stead. Place 15: returns to what is on top.
fn hijack(guest: &FakeGuest) {
    // Behind the control block, from where on nothing of a CPU's area is used.
    const TOP: u32 = 1024;
    let handler = u32::try_from(guest.stub(15)).unwrap().to_le_bytes();
    let [a, b, c, d] = TOP.to_le_bytes();
    let mut enter = vec![];
    // mov r11, gs:[TOP]; mov r10, [rsp + 8]; mov gs:[r11 + TOP + 8], r10
    enter.extend([0x65, 0x4c, 0x8b, 0x1c, 0x25, a, b, c, d]);
    enter.extend([0x4c, 0x8b, 0x54, 0x24, 0x08]);
    enter.extend([0x65, 0x4d, 0x89, 0x93, a + 8, b, c, d]);
    // add r11, 8; mov gs:[TOP], r11; mov qword [rsp + 8], handler; ret
    enter.extend([0x49, 0x83, 0xc3, 0x08]);
    enter.extend([0x65, 0x4c, 0x89, 0x1c, 0x25, a, b, c, d]);
    enter.extend([0x48, 0xc7, 0x44, 0x24, 0x08]);
    enter.extend(handler);
    enter.push(0xc3);
    guest.put(14, &enter);
    let mut back = vec![];
    // mov r11, gs:[TOP]; sub r11, 8; mov gs:[TOP], r11; push gs:[r11 + TOP + 8]; ret
    back.extend([0x65, 0x4c, 0x8b, 0x1c, 0x25, a, b, c, d]);
    back.extend([0x49, 0x83, 0xeb, 0x08]);
    back.extend([0x65, 0x4c, 0x89, 0x1c, 0x25, a, b, c, d]);
    back.extend([0x65, 0x41, 0xff, 0xb3, a + 8, b, c, d]);
    back.push(0xc3);
    guest.put(15, &back);
}
