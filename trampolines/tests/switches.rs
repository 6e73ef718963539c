//! Stubs where interrupts and preemption are switched: what they report, and what they must not
//! change.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code, reason = "runs machine code in this process")]

mod common;

use common::arch::{ADDRESSINGS, Addressing, Registers, STACK, instructions, jump};
use common::{FakeGuest, Random, Record, entry_program};
use vmtrace_trampolines::x86_64::{Switch, switch_stub};
use vmtrace_trampolines::{Condition, Field, Overflow, Program};

/// Where the fake guest has its count, from the gs base.
const COUNT: u64 = 16;
const ABOVE: u32 = 1 << 31;
const INTERRUPTS: u32 = 1 << 9;

fn low(address: u64) -> u32 {
    u32::try_from(address).unwrap()
}

fn guest(addressing: Addressing) -> FakeGuest {
    let program = Program { fields: vec![Field::Context], ..entry_program() };
    let guest = FakeGuest::with(1, 1 << 16, addressing, Overflow::Drop, &[program]);
    guest.set_current(0, 77);
    guest
}

/// A site with `code` in it that leads through a stub, from `at` bytes into it on.
fn lead(guest: &FakeGuest, switch: Switch, code: &[u8], (at, opcode): (usize, u8)) -> u32 {
    let (site, stub) = (guest.site(3), guest.stub(4));
    let next = site + at as u64 + 5;
    let made = switch_stub(stub, switch, (site, next), guest.program(0)).unwrap();
    // Places are of 64 bytes, and this is the last.
    let mut bytes = made.bytes.clone();
    let second = bytes.split_off(bytes.len().min(64));
    assert_eq!(guest.put(4, &bytes), stub);
    guest.put(5, &second);
    let mut own = code.to_vec();
    own[at..at + 5].copy_from_slice(&jump(site + at as u64, stub));
    own[at] = opcode;
    guest.set_site(3, &own);
    low(stub + made.names)
}

/// Runs the site once, which must keep registers: what was recorded.
fn once(guest: &FakeGuest, tail: &mut u64, random: &mut Random) -> Vec<Record> {
    let mut before: Registers = common::registers(0);
    before.x.fill_with(|| random.next());
    before.stack.fill_with(|| random.next());
    let mut after = before.clone();
    guest.run(3, &mut after);
    // r10 and r11 are free where functions are called.
    for register in (0..16).filter(|it| ![STACK, 10, 11].contains(it)) {
        assert_eq!(before.x[register], after.x[register], "register {register}");
    }
    assert_eq!(before.stack, after.stack);
    let mut found = Vec::new();
    guest.drain(0, tail, |record| found.push(record));
    found
}

fn check(record: &Record, guest: &FakeGuest, names: u32) {
    let common = record.common;
    assert_eq!((common.site, common.caller, common.pid), (names, low(guest.site(3)), 77));
}

// Behind cli and sti everything but rax and the flags is live.
#[test]
fn what_has_been_done_is_told_and_gone_on_from() {
    let mut random = Random(0x1234_5678_9abc_def1);
    for addressing in ADDRESSINGS {
        let guest = guest(addressing);
        let mut tail = guest.ring(0).start();
        // A nop in place of cli. The site itself looks after what the caller has a use for.
        // mov r11, r9; mov r10, r8; nop; <jump>; cmp r11, r9; jne to hlt; cmp r10, r8; jne to hlt; ret
        let code = [
            0x4d, 0x89, 0xcb, 0x4d, 0x89, 0xc2, 0x90, 0, 0, 0, 0, 0, 0x4d, 0x39, 0xcb, 0x75, 6,
            0x4d, 0x39, 0xc2, 0x75, 1, 0xc3, 0xf4,
        ];
        let names = lead(&guest, Switch::Done, &code, (7, 0xe9));
        for _ in 0..2000 {
            let found = once(&guest, &mut tail, &mut random);
            assert_eq!(found.len(), 1);
            check(&found[0], &guest, names);
        }
    }
}

// A handler that is not called, a record of an interruption of code whose interrupts were off.
#[test]
fn interrupts_are_told_where_they_were_on() {
    let mut random = Random(0x1234_5678_9abc_def1);
    for addressing in ADDRESSINGS {
        let guest = guest(addressing);
        let mut tail = guest.ring(0).start();
        let handler = guest.put(6, &[0xc3]);
        let site = guest.site(3);
        for (flags, told) in [(INTERRUPTS, 1), (!INTERRUPTS, 0), (0, 0), (u32::MAX, 1)] {
            // sub rsp, 0xa8; mov dword [rsp + 0x90], flags; <call or jump>; add rsp, 0xa8; ret
            let mut code = vec![0x48, 0x81, 0xec, 0xa8, 0, 0, 0, 0xc7, 0x84, 0x24, 0x90, 0, 0, 0];
            code.extend(flags.to_le_bytes());
            let at = code.len();
            code.extend([0; 5]);
            code.extend([0x48, 0x81, 0xc4, 0xa8, 0, 0, 0, 0xc3]);
            let behind = site + at as u64 + 5;
            for (switch, opcode, told) in [
                (Switch::Handle(handler), 0xe8, told),
                (Switch::HandleCall(handler), 0xe8, 1),
                (Switch::Restore(behind), 0xe9, told),
            ] {
                let names = lead(&guest, switch, &code, (at, opcode));
                let found = once(&guest, &mut tail, &mut random);
                assert_eq!(found.len(), told, "{switch:?} {flags:#x}");
                found.iter().for_each(|record| check(record, &guest, names));
            }
        }
        let names = lead(&guest, Switch::Return, &[0; 5], (0, 0xe9));
        let found = once(&guest, &mut tail, &mut random);
        check(&found[0], &guest, names);
    }
}

// What is told of the count is what the kernel goes by; a wrong flag behind dec is a preemption that
// never comes.
#[test]
fn counts_are_told_where_they_leave_0_and_become_0() {
    let mut random = Random(0x1234_5678_9abc_def1);
    let guest = guest(Addressing::PerCpu);
    let mut tail = guest.ring(0).start();
    let softirq = 0x200;
    // A word of 32 bits, and one of 64, each with what says that the CPU is not to preempt and without.
    for (above, wide, upper) in [(0, false, 7), (ABOVE, false, 7), (0, true, 0), (0, true, ABOVE)] {
        for (add, before, told) in [
            (1, 0, true),
            (1, 1, false),
            (1, softirq, false),
            (softirq, 0, true),
            (softirq, 1, false),
            (-1, 1, true),
            (-1, 2, false),
            (-1, softirq + 1, false),
            (-softirq, softirq, true),
            (-softirq, softirq + 1, false),
            (-softirq, 2 * softirq, false),
        ] {
            // <jump>; setz cl; ret
            let code = [0, 0, 0, 0, 0, 0x0f, 0x94, 0xc1, 0xc3];
            let switch = Switch::Count { add, count: COUNT, wide };
            let names = lead(&guest, switch, &code, (0, 0xe9));
            guest.set_upper(0, upper);
            let start = before.cast_unsigned() | above;
            guest.set_context(0, (0, [start, 0, 0]));
            let mut registers: Registers = common::registers(0x5a5a_5a5a_5a5a_5a00);
            registers.x.iter_mut().skip(12).for_each(|it| *it = random.next());
            let kept = registers.clone();
            guest.run(3, &mut registers);
            let end = start.wrapping_add_signed(add);
            if add < 0 {
                let is_zero = end == 0 && (!wide || upper == 0);
                assert_eq!(registers.x[1] & 0xff, u64::from(is_zero), "{add} to {start:#x}");
            }
            for register in [0, 2, 3, 5, 6, 7, 8, 9, 12, 13, 14, 15] {
                assert_eq!(registers.x[register], kept.x[register], "register {register}");
            }
            let mut found = Vec::new();
            guest.drain(0, &mut tail, |record| found.push(record));
            assert_eq!(found.len(), usize::from(told), "{add} to {start:#x}");
            // The state that a record has is one in which nobody is preempted.
            let within = if add > 0 { end } else { start };
            for record in &found {
                check(record, &guest, names);
                // The byte of softirqs is the task's, which has none.
                let within = u64::from(within & !0xff00);
                assert_eq!(record.fields[0] >> 32, within, "{add} to {start:#x}");
            }
            let all = u64::from(upper) << 32 | u64::from(end);
            assert_eq!(guest.wide_count(0), all, "{add} to {start:#x}");
        }
    }
}

// Most changes of the count are within others: each instruction is one for each lock of the kernel.
#[test]
fn changes_within_others_are_cheap() {
    for (add, wide, most) in [
        (1, false, 4),
        (-1, false, 6),
        (0x100, false, 4),
        (-0x100, false, 6),
        (1, true, 4),
        (-1, true, 4),
    ] {
        let switch = Switch::Count { add, count: 0x35008, wide };
        let stub = switch_stub(0x1000, switch, (0x2000, 0x2007), 0x4000).unwrap();
        // Without those in between: the two of a branch that is not taken, and those that tell.
        let all = instructions(&stub.bytes).len();
        let told = if add > 0 { 9 } else { 7 };
        assert_eq!(all - told, most, "{add} {wide}");
        assert!(stub.bytes.len() <= 96, "{} bytes", stub.bytes.len());
    }
}

#[test]
fn what_is_out_of_reach_has_no_stub() {
    let near = (0xffff_ffff_8100_0000_u64, 0xffff_ffff_8000_0000_u64);
    let made = |site, to| switch_stub(near.1, Switch::Done, (site, site + 6), to).is_some();
    assert!(made(near.0, near.1 + 4096));
    assert!(!made(0x1_0000_0000, near.1 + 4096) && !made(near.0, 1 << 44));
    let count = |add, count| {
        let switch = Switch::Count { add, count, wide: false };
        switch_stub(near.1, switch, (near.0, near.0 + 7), near.1 + 4096).is_some()
    };
    assert!(count(1, 0xffff_ffff_83db_d030) && !count(1, 1 << 40));
    assert!(!count(0, 8) && !count(i32::MIN, 8));
}

// Conditions on the task hold there as at functions.
#[test]
fn tasks_are_told_apart() {
    let none = Condition::Any(vec![]);
    let program = Program { condition: Some(none), ..entry_program() };
    let guest = FakeGuest::with(1, 1 << 16, Addressing::PerCpu, Overflow::Drop, &[program]);
    guest.set_current(0, 77);
    let mut tail = guest.ring(0).start();
    lead(&guest, Switch::Done, &[0x90, 0, 0, 0, 0, 0, 0xc3], (1, 0xe9));
    assert_eq!(once(&guest, &mut tail, &mut Random(7)), []);
}
