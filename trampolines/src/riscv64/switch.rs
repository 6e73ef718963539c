//! Stubs for the kernel's instructions that switch interrupts or preemption.
//!
//! An instruction of four bytes is replaced by a `jal` to a landing, `auipc; jr` to the stub. The
//! stub executes the instruction, calls a program where something has changed, and goes back to
//! where `jal` came from. So all places with the same instruction and the same free registers share a
//! stub. The program is found by a word beside the stubs, which may change at any time.

use super::encode::register::{RA, SP, T0, T3, TP, ZERO};
use super::encode::{
    Register, SSTATUS, addi, andi, auipc, beq, bne, csrrci, csrrs, csrrsi, jalr, jr, ld, li, sd,
    split,
};

/// `SR_SIE`: interrupts are on.
const INTERRUPTS: i32 = 1 << 1;
/// `SR_SPIE`: they will be, or were.
const SAVED_INTERRUPTS: i32 = 1 << 5;

/// What the instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// Switches interrupts off, and leaves the status in this register (0: nowhere). Told where they
    /// were on.
    Off(u8),
    /// Switches interrupts on. Told where they were off.
    On,
    /// Switches them on if this register says so. Told where they were off and are on.
    Restore(u8),
    /// Something else, where this register has a status that was saved or will be restored. Told where
    /// interrupts are on in it.
    Saved(u8),
    /// Stores a count of 32 bits in a task, the sum that is in this register: told where it becomes 0,
    /// or is 0 no more, if the task is the current one.
    Count {
        /// What was added: not 0.
        add: i32,
        /// The register's number.
        register: u8,
        /// The register with the task.
        task: u8,
    },
}

/// An instruction in whose place is a jump, with registers by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchedWord {
    /// The instruction.
    pub word: u32,
    /// What it does.
    pub switch: Switch,
    /// The register that the jump links: neither `ra`, `sp`, `tp` nor `t0`, and none that the
    /// instruction uses.
    pub link: u8,
    /// Another such register, which is lost.
    pub through: u8,
    /// Those of `t0` to `t6` (a bit each) that must be kept.
    pub kept: u32,
}

/// Two registers that are compared, and whether they must be equal.
type Skip = (Register, Register, bool);

/// Code, and what there is to know of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchStub {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// From its beginning to where the program returns to, which names what is told.
    pub names: u64,
}

/// The landing at `at` that leads to a stub; `None` when that is out of reach.
#[must_use]
pub fn landing(at: u64, through: u8, stub: u64) -> Option<[u8; 8]> {
    let through = Register::new(through)?;
    let (upper, lower) = split(stub.wrapping_sub(at).cast_signed())?;
    let code = [auipc(through, upper), jalr(ZERO, through, lower)];
    let word = u64::from(code[0]) | u64::from(code[1]) << 32;
    Some(word.to_le_bytes())
}

/// The stub at `address`. Its program, one of [`Point::Entry`](crate::Point::Entry), is the one whose
/// address is in the aligned word at `program`, and has the instruction's address in place of its
/// caller. All but the two free registers is kept; the stack below `sp` is used.
///
/// `None` when the word is out of reach, or there are no such registers.
#[must_use]
pub fn switch_stub(address: u64, switched: &SwitchedWord, program: u64) -> Option<SwitchStub> {
    let SwitchedWord { word, switch, link, through, kept } = *switched;
    let (link, through) = (Register::new(link)?, Register::new(through)?);
    if link == through || [ZERO, RA, SP, TP, T0].iter().any(|own| [link, through].contains(own)) {
        return None;
    }
    let mut code = Vec::with_capacity(32);
    // Where it goes on at once, since nothing is to be told: where these two are equal, or not.
    let mut skips: Vec<(usize, Skip)> = Vec::with_capacity(2);
    let mut skip_if = |code: &mut Vec<u32>, a, b, equal| {
        skips.push((code.len(), (a, b, equal)));
        code.push(0);
    };
    let is_set = |code: &mut Vec<u32>, register, bit| code.push(andi(through, register, bit));
    match switch {
        Switch::Off(0) => {
            code.push(csrrci(through, SSTATUS, INTERRUPTS));
            is_set(&mut code, through, INTERRUPTS);
            skip_if(&mut code, through, ZERO, true);
        }
        Switch::Off(status) => {
            code.push(word);
            is_set(&mut code, Register::new(status)?, INTERRUPTS);
            skip_if(&mut code, through, ZERO, true);
        }
        Switch::On => {
            code.push(csrrsi(through, SSTATUS, INTERRUPTS));
            is_set(&mut code, through, INTERRUPTS);
            skip_if(&mut code, through, ZERO, false);
        }
        Switch::Restore(set) => {
            let set = Register::new(set)?;
            code.push(csrrs(through, SSTATUS, set));
            is_set(&mut code, through, INTERRUPTS);
            skip_if(&mut code, through, ZERO, false);
            is_set(&mut code, set, INTERRUPTS);
            skip_if(&mut code, through, ZERO, true);
        }
        Switch::Saved(status) => {
            code.push(word);
            is_set(&mut code, Register::new(status)?, SAVED_INTERRUPTS);
            skip_if(&mut code, through, ZERO, true);
        }
        Switch::Count { add, register, task } => {
            let (register, task) = (Register::new(register)?, Register::new(task)?);
            code.push(word);
            if task != TP {
                skip_if(&mut code, task, TP, false);
            }
            if add > 0 {
                code.extend(li(through, add));
                skip_if(&mut code, through, register, false);
            } else {
                skip_if(&mut code, register, ZERO, false);
            }
        }
    }
    let temporary = (5..8).chain(28..32).filter(|&number: &u8| kept >> number & 1 == 1);
    let kept = [link, RA].into_iter().chain(temporary.filter_map(Register::new));
    let saved: Vec<(Register, i32)> = kept.zip((0..).step_by(8)).collect();
    // The stack pointer is a multiple of 16 (RISC-V calling convention).
    let frame = i32::try_from((saved.len() * 8).next_multiple_of(16)).ok()?;
    code.push(addi(SP, SP, -frame));
    code.extend(saved.iter().map(|&(register, at)| sd(register, SP, at)));
    code.push(addi(RA, link, -4));
    let here = address.wrapping_add(4 * code.len() as u64);
    let (upper, lower) = split(program.wrapping_sub(here).cast_signed())?;
    code.extend([auipc(T3, upper), ld(T3, T3, lower), jalr(T0, T3, 0)]);
    let names = 4 * code.len() as u64;
    code.extend(saved.iter().map(|&(register, at)| ld(register, SP, at)));
    code.push(addi(SP, SP, frame));
    let end = code.len();
    for (at, (a, b, equal)) in skips {
        let distance = i32::try_from(4 * (end - at)).ok()?;
        *code.get_mut(at)? = if equal { beq(a, b, distance) } else { bne(a, b, distance) };
    }
    code.push(jr(link));
    Some(SwitchStub { bytes: code.into_iter().flat_map(u32::to_le_bytes).collect(), names })
}
