//! Features that only the x86-64 trampolines have.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use common::arch::{Addressing, instructions, jump};
use common::{FakeGuest, entry_program, words};
use vmtrace_trampolines::marks::{MarkIf, Marks};
use vmtrace_trampolines::x86_64::{INDIRECT_CALL, indirect_stub, stack_bias};
use vmtrace_trampolines::{Condition, Counts, Field, Overflow, Point, Program, RawContext};

const VARIANTS: [(Addressing, Overflow); 4] = [
    (Addressing::PerCpu, Overflow::Drop),
    (Addressing::PerCpu, Overflow::Overwrite),
    (Addressing::Shared, Overflow::Drop),
    (Addressing::Shared, Overflow::Overwrite),
];

// A clobbered argument register would make the traced kernel function misbehave.
#[test]
fn all_registers_but_r10_r11_and_flags_survive() {
    for (addressing, overflow) in VARIANTS {
        let guest = FakeGuest::new(1, 1 << 15, addressing, overflow);
        guest.set_current(0, 1);
        // Enough to take the slow path and, with Drop, the full path.
        for round in 0..3000_u64 {
            let (mut rax, mut rcx, mut rdx) = (round, !round, round << 32);
            let (mut rsi, mut rdi, mut r8, mut r9) = (1_u64, 2_u64, 3_u64, 4_u64);
            let target = guest.site(0);
            let (rbx, mut sum): (u64, u64) = (0x1234_5678_9abc_def0, 0);
            // SAFETY: calls a function that keeps all registers, by this very test;
            // the clobbers cover a C function should it not.
            unsafe {
                core::arch::asm!(
                    "push rbx", "push r12", "push r13", "push r14", "push r15",
                    "mov rbx, 0x123456789abcdef0",
                    "mov r13, rbx", "mov r14, rbx", "mov r15, rbx",
                    "call r12",
                    "xor r13, rbx", "xor r14, rbx", "xor r15, rbx",
                    "or r13, r14", "or r13, r15",
                    "mov r10, r13", "mov r11, rbx",
                    "pop r15", "pop r14", "pop r13", "pop r12", "pop rbx",
                    in("r12") target,
                    inout("rax") rax, inout("rcx") rcx, inout("rdx") rdx,
                    inout("rsi") rsi, inout("rdi") rdi, inout("r8") r8, inout("r9") r9,
                    out("r10") sum, out("r11") _,
                );
            }
            let _ = rbx;
            assert_eq!((rax, rcx, rdx), (round, !round, round << 32));
            assert_eq!((rsi, rdi, r8, r9, sum), (1, 2, 3, 4, 0));
        }
    }
}

// What ftrace's users read first; counts of someone else would blame the wrong code.
#[test]
fn the_state_of_the_cpu_is_that_of_the_call() {
    for (addressing, overflow) in VARIANTS {
        for point in [Point::Entry, Point::Return, Point::Beyond, Point::Probe] {
            let mut fields = vec![Field::Stack, Field::Context];
            // Of which the third has a register that is needed for it.
            fields.extend((1..6).filter(|_| point.enters()).map(Field::Argument));
            let program = Program { point, fields, ..entry_program() };
            let guest = FakeGuest::with(1, 1 << 15, addressing, overflow, &[program]);
            guest.come_from(0, point, 0);
            guest.set_current(0, 1);
            guest.set_upper(0, 0x8000_0000);
            let states = [
                (0, [0x8000_0000, 0, 0]),
                (0x4018_2008, [0x7fff_00ff, 0x1_0002, 0xffff_2aff]),
                (0xffff_ffff, [0x0012_0503, 0xff, 0]),
            ];
            for state in states {
                guest.set_context(0, state);
                guest.run(0, &mut common::registers(7));
            }
            let mut all = Vec::new();
            match overflow {
                Overflow::Drop | Overflow::Block(_) => {
                    guest.drain(0, &mut guest.ring(0).start(), |record| all.push(record));
                }
                Overflow::Overwrite => all = guest.recorded(0),
            }
            assert!(all.iter().all(|record| record.fields[2..].iter().all(|&it| it == 7)));
            let found: Vec<_> = all
                .iter()
                .map(|record| RawContext(record.fields[1]))
                .map(|it| (it.flags(), it.preempt_count(), it.migration(), it.interrupts_on()))
                .collect();
            let far = matches!(addressing, Addressing::Shared);
            // A process cannot switch interrupts off. The second byte of softirqs is the task's, and the third
            // of a wide count is its last.
            let count = |count: u32| if far { count & !0xff_0000 | 0x80_0000 } else { count };
            // Without a count of bans on migration it is 0, whatever was in the register.
            let bans = |bans: u8| if matches!(overflow, Overflow::Overwrite) { 0 } else { bans };
            let expected = [
                (0, count(0x8000_0000), 0, true),
                (if far { 0x1808 } else { 0x2008 }, count(0x7fff_2aff), bans(2), true),
                (0xffff, count(0x0012_0003), bans(0xff), true),
            ];
            assert_eq!(found, expected, "{addressing:?} {overflow:?} {point:?}");
        }
    }
}

// A tail call that lost its target, or went elsewhere, would crash the guest.
#[test]
fn a_tail_call_through_a_register_goes_on_and_tells_where() {
    let fields = vec![Field::Stack, Field::Target, Field::Argument(0), Field::Argument(2)];
    let program = Program {
        number: 3,
        tracers: 1,
        point: Point::Tail,
        fields,
        condition: None,
        counts: None,
        since: None,
        nesting: None,
        marked: None,
    };
    for addressing in [Addressing::PerCpu, Addressing::Shared] {
        for overflow in [Overflow::Drop, Overflow::Overwrite] {
            // Of rax, rcx, rdi and r8 to r11, by their numbers: and how to jump there.
            let jumps: [(u8, &[u8]); 7] = [
                (0, &[0xff, 0xe0]),
                (1, &[0xff, 0xe1]),
                (7, &[0xff, 0xe7]),
                (8, &[0x41, 0xff, 0xe0]),
                (9, &[0x41, 0xff, 0xe1]),
                (10, &[0x41, 0xff, 0xe2]),
                (11, &[0x41, 0xff, 0xe3]),
            ];
            for (register, jump_on) in jumps {
                let guest = FakeGuest::with(
                    1,
                    1 << 15,
                    addressing,
                    overflow,
                    std::slice::from_ref(&program),
                );
                guest.set_current(0, 1);
                let target = guest.put(1, &[0xc3]);
                let stub = guest.stub(0);
                let code = indirect_stub(stub, guest.program(0), register, jump_on).unwrap();
                guest.put(0, &code);
                guest.set_site(0, &jump(guest.site(0), stub));
                let mut below = 0;
                // Past the end of a chunk, and past that of the ring.
                for _ in 0..2000 {
                    let (mut rax, mut rcx, mut rdi, mut r8, mut r9) =
                        (target, target, target, target, target);
                    let mut rdx = 0x1234_5678_9abc_def0_u64;
                    let site = guest.site(0);
                    // SAFETY: calls a function that keeps all registers but r10 and r11, by
                    // this very test; the clobbers cover a C function should it not.
                    unsafe {
                        core::arch::asm!(
                            "mov r13, rsp; call r12",
                            in("r12") site, out("r13") below,
                            inout("rax") rax, inout("rcx") rcx, inout("rdx") rdx,
                            inout("rdi") rdi, inout("r8") r8, inout("r9") r9,
                            out("rsi") _, inout("r10") target => _, inout("r11") target => _,
                        );
                    }
                    assert_eq!([rax, rcx, rdi, r8, r9], [target; 5]);
                    assert_eq!(rdx, 0x1234_5678_9abc_def0);
                }
                let mut all = Vec::new();
                if overflow == Overflow::Drop {
                    guest.drain(0, &mut guest.ring(0).start(), |record| all.push(record));
                } else {
                    all = guest.recorded(0);
                }
                assert!(all.len() > 400, "{register}");
                let mut stacks = std::collections::BTreeSet::new();
                for record in all {
                    let [stack, to, first, third] = record.fields[..] else { panic!() };
                    assert_eq!((to, first, third), (target, target, 0x1234_5678_9abc_def0));
                    let site = u32::try_from(stub + INDIRECT_CALL).unwrap();
                    assert_eq!(record.common.site, site);
                    stacks.insert(stack + stack_bias(Point::Tail));
                }
                // All calls were made from one place, and an entry is found by the very stack pointer.
                assert_eq!(stacks.into_iter().collect::<Vec<u64>>(), [below - 8]);
            }
        }
    }
}

/// Calls what goes on through a register, all of them with this target. What its mark is.
#[inline(never)]
fn go(site: u64, target: u64) -> u64 {
    let below: u64;
    // SAFETY: calls a function that keeps all registers but r10 and r11, as the test above shows.
    unsafe {
        core::arch::asm!(
            "mov r13, rsp; call r12",
            in("r12") site, out("r13") below, in("rax") target, in("r9") target,
            inout("r10") target => _, inout("r11") 0_u64 => _,
        );
    }
    below - 8 - u64::from(Marks::LESS)
}

// A mark of a call that goes on elsewhere would be taken for that of another one, which ends where it is looked for.
#[test]
fn calls_are_marked_by_where_they_go() {
    for addressing in [Addressing::PerCpu, Addressing::Shared] {
        for (register, is_alone) in [(0, true), (9, true), (10, true), (0, false), (10, false)] {
            let (address, all) = words(Marks::SIZE / 8 + 512);
            let marks = Marks { address: address.next_multiple_of(4096) };
            let mut guest = FakeGuest::new(1, 1 << 15, addressing, Overflow::Drop);
            guest.set_current(0, 1);
            let target = guest.put(1, &[0xc3]);
            let mut at: Option<usize> = None;
            // Where the second table begins.
            let begin = usize::try_from((marks.address - address + Marks::TARGETS) / 8).unwrap();
            let place =
                |target| &all[begin + usize::try_from(Marks::target_place(target)).unwrap()];
            let never = Some(Condition::Any(vec![]));
            let cases = [
                (MarkIf::Always, None, 0, true),
                (MarkIf::Always, never.clone(), 0, false),
                (MarkIf::Known, None, target, true),
                (MarkIf::Known, None, 0, false),
                (MarkIf::Known, None, target + 16, false),
                (MarkIf::Known, None, target | 1 << 63, false),
                (MarkIf::Known, never.clone(), target, false),
                (MarkIf::Never, None, target, false),
                (MarkIf::Never, never, target, false),
            ];
            for (going, condition, known, is_marked) in cases {
                let counts = Some(Counts::Mark(marks, going));
                let mark = Program { point: Point::Tail, counts, condition, ..entry_program() };
                place(target).store(known, Ordering::Relaxed);
                let mark = guest.add(&mark, addressing, None);
                let fields = vec![Field::Stack, Field::Target];
                let before = Program { point: Point::Tail, fields, ..entry_program() };
                // As a rule it comes behind one that records.
                let program = match is_alone {
                    true => mark,
                    false => guest.add(&before, addressing, Some(mark)),
                };
                let stub = guest.stub(0);
                let jump_on: &[u8] = match register {
                    0 => &[0xff, 0xe0],
                    9 => &[0x41, 0xff, 0xe1],
                    _ => &[0x41, 0xff, 0xe2],
                };
                let code = indirect_stub(stub, guest.program(program), register, jump_on).unwrap();
                guest.put(0, &code);
                guest.set_site(0, &jump(guest.site(0), stub));
                let site = guest.site(0);
                let own = go(site, target);
                // Also when the ring is full.
                for round in 0..3000 {
                    let left = [0, own, own + 64][round % 3];
                    // Whoever is marked before all others tells where.
                    at = at.or_else(|| all.iter().position(|it| it.load(Ordering::Relaxed) == own));
                    let word = &all[at.unwrap()];
                    word.store(left, Ordering::Relaxed);
                    assert_eq!(go(site, target), own);
                    let expected = match (is_marked, left) {
                        (true, _) => own,
                        // Another call has left it, and nobody takes it for the mark of this one.
                        (false, left) if left == own => 0,
                        (false, left) => left,
                    };
                    assert_eq!(word.swap(0, Ordering::Relaxed), expected, "{left:x}");
                }
                place(target).store(0, Ordering::Relaxed);
                assert!(all.iter().all(|word| word.load(Ordering::Relaxed) == 0));
            }
        }
    }
}

/// Where a single step found itself, one after the other.
static STEPS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

extern "C" fn stepped(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives the context of the thread that was interrupted.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    let at = context.uc_mcontext.gregs[libc::REG_RIP as usize].cast_unsigned();
    // Nobody else steps, and what steps holds no lock.
    STEPS.lock().unwrap().push(at);
}

/// Calls a function step by step.
fn step(function: u64) {
    // SAFETY: a function that keeps all registers but r10 and r11, as another test shows; each of
    // its instructions is followed by a signal that changes nothing.
    unsafe {
        core::arch::asm!(
            "pushfq", "or dword ptr [rsp], 0x100", "popfq",
            "call {target}",
            "pushfq", "and dword ptr [rsp], 0xfffffeff", "popfq",
            target = in(reg) function,
            out("r10") _, out("r11") _,
        );
    }
}

// What a hit costs is what the processor executes, not what can be read in the code: the benchmarks'
// figures and the promise in disassembly.rs are about this very path.
#[test]
fn a_hit_executes_the_one_straight_run_that_was_counted() {
    // SAFETY: the handler takes a lock that no code holds that is stepped.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = stepped as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGTRAP, &raw const action, core::ptr::null_mut());
    }
    for (addressing, overflow) in VARIANTS {
        for fields in [vec![], vec![Field::Argument(0)], vec![Field::Stack, Field::Argument(2)]] {
            let program = Program { fields, ..entry_program() };
            let guest =
                FakeGuest::with(1, 1 << 15, addressing, overflow, &[program.clone(), program]);
            guest.set_current(0, 1);
            let (start, end) = (guest.program(0), guest.program(1));
            let len = usize::try_from(end - start).unwrap();
            // SAFETY: this is the program's code.
            let code = unsafe { std::slice::from_raw_parts(guest.code(start), len) };
            let decoded = instructions(code);
            // Up to the first that returns, as the decoder says where instructions begin.
            let ending = decoded.iter().position(|&(offset, _)| code[offset] == 0xc3).unwrap();
            let expected: Vec<u64> =
                decoded[..=ending].iter().map(|&(offset, _)| start + offset as u64).collect();
            for _ in 0..3 {
                STEPS.lock().unwrap().clear();
                step(guest.site(0));
                let steps = STEPS.lock().unwrap();
                let inside = |at: &u64| (start..end).contains(at);
                let executed: Vec<u64> = steps.iter().copied().filter(inside).collect();
                assert_eq!(executed, expected, "{addressing:?} {overflow:?}");
            }
        }
    }
}
