//! Stubs of riscv64 where interrupts and preemption are switched, run by a model on any machine: what
//! they report, and what they must not change.

use proptest::prelude::*;
use std::collections::BTreeMap;
use vmtrace_trampolines::riscv64::{Switch, SwitchedWord, landing, switch_stub};

const STUB: u64 = 0xffff_ffff_80b0_1234;
const LANDING: u64 = 0xffff_ffff_8040_0002;
const SITE: u64 = 0xffff_ffff_8031_0006;
const PROGRAM_WORD: u64 = 0xffff_ffff_80b0_0100;
const PROGRAM: u64 = 0xffff_ffff_80b0_5000;
const INTERRUPTS: u64 = 2;
const SAVED_INTERRUPTS: u64 = 32;
const TASK: u64 = 0xffff_ffd0_0000_0000;

/// A hart, as far as stubs need one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hart {
    x: [u64; 32],
    pc: u64,
    sstatus: u64,
    others: BTreeMap<u32, u64>,
    memory: BTreeMap<u64, u64>,
    /// With which `ra` the program was called.
    called: Vec<u64>,
}

impl Hart {
    fn csr(&mut self, number: u32) -> &mut u64 {
        if number == 0x100 { &mut self.sstatus } else { self.others.entry(number).or_default() }
    }

    fn run(&mut self, word: u32) {
        let field = |start: u32, width: u32| word >> start & ((1 << width) - 1);
        let [rd, rs1, rs2] = [7, 15, 20].map(|start| field(start, 5) as usize);
        let (a, b) = (self.x[rs1], self.x[rs2]);
        let immediate = i64::from(word.cast_signed() >> 20);
        let mut next = self.pc + 4;
        let mut result = None;
        match (field(0, 7), field(12, 3)) {
            (0x03, 3) => result = Some(self.memory[&a.wrapping_add_signed(immediate)]),
            (0x13, 0) => result = Some(a.wrapping_add_signed(immediate)),
            (0x1b, 0) => {
                let [low @ .., _, _, _, _] = a.wrapping_add_signed(immediate).to_le_bytes();
                result = Some(i64::from(i32::from_le_bytes(low)).cast_unsigned());
            }
            (0x13, 4) => result = Some(a ^ immediate.cast_unsigned()),
            (0x13, 7) => result = Some(a & immediate.cast_unsigned()),
            (0x33, 7) => result = Some(a & b),
            (0x17, _) => {
                let upper = i64::from((word & !0xfff).cast_signed());
                result = Some(self.pc.wrapping_add_signed(upper));
            }
            (0x37, _) => result = Some(i64::from((word & !0xfff).cast_signed()).cast_unsigned()),
            (0x23, 2 | 3) => {
                let offset = immediate & !0x1f | i64::from(field(7, 5));
                let stored = if field(12, 3) == 2 { b & 0xffff_ffff } else { b };
                self.memory.insert(a.wrapping_add_signed(offset), stored);
            }
            (0x63, funct3 @ (0 | 1)) => {
                assert_eq!(word >> 31, 0, "backward");
                let offset = field(7, 1) << 11 | field(25, 6) << 5 | field(8, 4) << 1;
                if (a == b) == (funct3 == 0) {
                    next = self.pc + u64::from(offset);
                }
            }
            (0x67, 0) => {
                result = Some(next);
                next = a.wrapping_add_signed(immediate) & !1;
            }
            (0x73, funct3) => {
                let set = if funct3 < 4 { a } else { rs1 as u64 };
                let csr = self.csr(word >> 20);
                result = Some(*csr);
                match funct3 & 3 {
                    1 => *csr = set,
                    2 => *csr |= set,
                    _ => *csr &= !set,
                }
            }
            _ => panic!("{word:#x}"),
        }
        if rd != 0
            && let Some(result) = result
        {
            self.x[rd] = result;
        }
        self.pc = next;
    }
}

/// A jump from the site, until it is back behind it.
fn through_stub(hart: &mut Hart, switched: &SwitchedWord) {
    let stub = switch_stub(STUB, switched, PROGRAM_WORD).unwrap();
    let landing = landing(LANDING, switched.through, STUB).unwrap();
    hart.memory.insert(PROGRAM_WORD, PROGRAM);
    hart.x[usize::from(switched.link)] = SITE + 4;
    hart.pc = LANDING;
    for _ in 0..64 {
        if hart.pc == SITE + 4 {
            return;
        }
        if hart.pc == PROGRAM {
            assert_eq!(hart.x[5], STUB + stub.names);
            hart.called.push(hart.x[1]);
            // A program keeps all but these.
            for register in [6, 7, 28, 29, 30, 31] {
                hart.x[register] = !hart.x[register];
            }
            hart.pc = hart.x[5];
            continue;
        }
        let (code, from) = match hart.pc {
            LANDING.. if hart.pc < LANDING + 8 => (&landing[..], LANDING),
            _ => (&stub.bytes[..], STUB),
        };
        let at = usize::try_from(hart.pc - from).unwrap();
        hart.run(u32::from_le_bytes(code[at..at + 4].try_into().unwrap()));
    }
    panic!("{:#x}", hart.pc);
}

fn switched() -> impl Strategy<Value = SwitchedWord> {
    let free =
        prop::sample::subsequence(vec![6_u8, 7, 28, 29, 30, 31, 10, 15, 17], 2).prop_shuffle();
    let register = prop::sample::select((5..32_u32).collect::<Vec<_>>());
    let add = prop::sample::select(vec![1, -1, 2, 256, -256, 512, 65536, -65536, 0x11_0000]);
    let task = prop::sample::select(vec![4_u8, 18, 28, 30]);
    (free, register, 0..7_u8, any::<u32>(), add, task)
        .prop_map(|(free, register, form, kept, add, task)| {
            let number = u8::try_from(register).unwrap();
            let (word, switch) = match form {
                0 => (0x1001_7073, Switch::Off(0)),
                1 => (0x1001_7073 | register << 7, Switch::Off(number)),
                2 => (0x1001_6073, Switch::On),
                3 => (0x1000_2073 | register << 15, Switch::Restore(number)),
                // csrw sscratch, zero; csrw sstatus, register
                4 => (0x1400_1073, Switch::Saved(number)),
                5 => (0x1000_1073 | register << 15, Switch::Saved(number)),
                // sw register, 8(task)
                _ => (
                    0x0000_2423 | register << 20 | u32::from(task) << 15,
                    Switch::Count { add, register: number, task },
                ),
            };
            let kept = kept & !(1 << free[0] | 1 << free[1]);
            SwitchedWord { word, switch, link: free[0], through: free[1], kept }
        })
        .prop_filter("the instruction uses it", |it| {
            let register = match it.switch {
                Switch::Off(register) | Switch::Restore(register) | Switch::Saved(register) => {
                    register
                }
                Switch::Count { register, .. } => register,
                Switch::On => 0,
            };
            ![it.link, it.through].contains(&register)
        })
}

proptest! {
    // Whoever is switched must find everything as the instruction alone leaves it; a change that is not
    // told, or told twice, is a state that is wrong from there on.
    #[test]
    fn stubs_do_as_the_instruction_and_tell_changes(
        switched in switched(),
        values in prop::array::uniform32(any::<u64>()),
        sstatus: u64,
        sum in prop::sample::select(vec![0_i32, 1, 2, 255, 256, 512, 65536, 0x11_0000]),
        small: bool,
        own: bool,
    ) {
        let mut x = values;
        (x[0], x[2], x[4]) = (0, 0xffff_ffc8_0000_3f00, TASK);
        if let Switch::Count { register, task, .. } = switched.switch {
            if own {
                x[usize::from(task)] = TASK;
            }
            if small {
                x[usize::from(register)] = i64::from(sum).cast_unsigned();
            }
        }
        let others = BTreeMap::from([(0x140, 7)]);
        let before =
            Hart { x, pc: SITE, sstatus, others, memory: BTreeMap::new(), called: Vec::new() };
        let mut alone = before.clone();
        alone.run(switched.word);
        let mut ours = before.clone();
        through_stub(&mut ours, &switched);
        let (was, is) = (before.sstatus & INTERRUPTS != 0, alone.sstatus & INTERRUPTS != 0);
        let told = match switched.switch {
            Switch::Off(_) => was && !is,
            Switch::On | Switch::Restore(_) => !was && is,
            Switch::Saved(register) => before.x[usize::from(register)] & SAVED_INTERRUPTS != 0,
            Switch::Count { add, register, task } => {
                let sum = before.x[usize::from(register)];
                let told = if add > 0 { sum == i64::from(add).cast_unsigned() } else { sum == 0 };
                told && before.x[usize::from(task)] == TASK
            }
        };
        prop_assert_eq!(&ours.called[..], if told { &[SITE][..] } else { &[] });
        prop_assert_eq!(ours.sstatus, alone.sstatus);
        prop_assert_eq!(&ours.others, &alone.others);
        for register in 1..32 {
            let temporary = matches!(register, 5..8 | 28..32);
            let is_free = [switched.link, switched.through].map(usize::from).contains(&register);
            if !is_free && (!temporary || switched.kept >> register & 1 == 1) {
                prop_assert_eq!(ours.x[register], alone.x[register], "register {}", register);
            }
        }
        // Below the stack pointer nothing counts; but for the word of the program nothing else was
        // written.
        ours.memory.remove(&PROGRAM_WORD);
        let frame = before.x[2] - 128..before.x[2];
        ours.memory.retain(|address, _| !frame.contains(address));
        prop_assert_eq!(&ours.memory, &alone.memory);
    }
}

// A kernel's function that only loses registers: it would be told by crashes far away.
#[test]
fn stubs_without_two_free_registers_are_refused() {
    let made = |link, through| {
        let switched = SwitchedWord { word: 0, switch: Switch::On, link, through, kept: 0 };
        switch_stub(STUB, &switched, PROGRAM_WORD).is_some()
    };
    assert!(made(6, 7));
    assert!(!made(5, 6) && !made(6, 1) && !made(2, 6) && !made(6, 4));
    assert!(!made(6, 6) && !made(0, 6) && !made(6, 0) && !made(6, 32) && !made(32, 6));
    let out_of_reach = SwitchedWord { word: 0, switch: Switch::On, link: 6, through: 7, kept: 0 };
    assert!(switch_stub(STUB, &out_of_reach, 1 << 40).is_none());
    assert!(landing(LANDING, 6, 1 << 40).is_none() && landing(LANDING, 40, STUB).is_none());
}

// Places where nothing is told are passed a hundred times as often as others.
#[test]
fn nothing_told_costs_few_instructions() {
    let base = Hart {
        x: [0; 32],
        pc: SITE,
        sstatus: INTERRUPTS,
        others: BTreeMap::new(),
        memory: BTreeMap::new(),
        called: Vec::new(),
    };
    let steps = |switch, word, sstatus| {
        let switched = SwitchedWord { word, switch, link: 6, through: 7, kept: 0 };
        let stub = switch_stub(STUB, &switched, PROGRAM_WORD).unwrap();
        let mut hart = Hart { sstatus, ..base.clone() };
        (hart.pc, hart.x[6], hart.x[4], hart.x[15], hart.x[18]) = (STUB, SITE + 4, TASK, 0, 1);
        let mut steps = 0;
        while hart.pc != SITE + 4 {
            let at = usize::try_from(hart.pc - STUB).unwrap();
            hart.run(u32::from_le_bytes(stub.bytes[at..at + 4].try_into().unwrap()));
            steps += 1;
        }
        // The jump to the landing, and the landing.
        steps + 3
    };
    let nested = |task| Switch::Count { add: 1, register: 15, task };
    let all = [
        ("off", steps(Switch::Off(14), 0x1001_7773, 0)),
        ("off, nowhere", steps(Switch::Off(0), 0x1001_7073, 0)),
        ("on", steps(Switch::On, 0x1001_6073, INTERRUPTS)),
        ("restored, on before", steps(Switch::Restore(15), 0x1007_a073, INTERRUPTS)),
        ("restored, off", steps(Switch::Restore(15), 0x1007_a073, 0)),
        ("saved", steps(Switch::Saved(15), 0x1400_1073, 0)),
        ("counted", steps(nested(4), 0x00f2_2423, 0)),
        ("counted of another", steps(nested(18), 0x00f9_2423, 0)),
    ];
    println!("{all:?}");
    assert!(all.iter().all(|&(_, steps)| steps <= 9), "{all:?}");
}
