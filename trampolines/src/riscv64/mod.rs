//! riscv64 entry trampolines.
//!
//! A trampoline is entered with the return address into the traced function in
//! `t0` (its entry + 8) and the function's own return address in `ra`. `t1` to
//! `t6` are free there; all else is preserved, `sp` is not used.
//!
//! How a slot is found: `tp` is the current task, its `thread_info.cpu` numbers
//! the control block, and `lr.d`/`sc.d` on that block's head reserve. No
//! instruction of this architecture picks a CPU and reserves at once; none is
//! needed, since the pair is atomic between harts: a task that was migrated
//! after it looked up its CPU reserves in the ring of the CPU on which its
//! function was entered, beside that CPU's own tasks. An interrupt in between
//! makes the pair fail, as does any other hart's reservation: a trampoline always
//! ends with an `sc.d`, so that none that was nested leaves a reservation with
//! which the `sc.d` of the outer one could store its older position. (Kernels end
//! reservations when they return from an exception, too.)
//!
//! Code is generated and not assembled, so that offsets take the shortest form
//! and an x86-64 build can test it.

pub mod encode;

use crate::layout::{CHUNK_SIZE, CONTROL_SIZE, HEADER_SIZE, RECORD_SIZE, control, header, record};
use crate::{Fixup, Overflow, TemplateError};
use encode::register::{RA, T0, T1, T2, T3, T4, T5, TP, ZERO};
use encode::{
    FENCE_W_W, Register, add, addi, amoadd_d, and, beq, bgeu, bne, j, jr, ld, lr_d, lui, lw, or,
    rdtime, sc_d, sd, sext_w, slli, split, srli, sw,
};

/// Most instructions of a trampoline.
const CAPACITY: usize = 64;

/// What is only known when a guest runs.
#[derive(Clone, Copy, Debug)]
pub struct Values {
    /// Offset in a task of the number of the CPU that it runs on.
    pub cpu: u64,
    /// Offset in a task of its pid.
    pub pid: u64,
    /// Address of the first CPU's control block; the others follow it.
    pub controls: u64,
    /// CPUs that have a control block.
    pub cpus: u64,
    /// Bytes from a ring to the next, a power of two.
    pub stride: u64,
}

/// Position-independent code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    words: [u32; CAPACITY],
    len: usize,
}

impl Code {
    const fn new() -> Self {
        Self { words: [0; CAPACITY], len: 0 }
    }

    /// Its instructions, all of 4 bytes.
    #[must_use]
    pub fn instructions(&self) -> &[u32] {
        &self.words[..self.len]
    }

    /// Its bytes as in memory.
    pub fn bytes(&self) -> impl Iterator<Item = u8> {
        self.instructions().iter().flat_map(|word| word.to_le_bytes())
    }

    /// Appends an instruction; returns where it is.
    fn put(&mut self, instruction: u32) -> usize {
        let at = self.len;
        self.words[at] = instruction;
        self.len += 1;
        at
    }

    fn put_all(&mut self, instructions: &[u32]) {
        for &instruction in instructions {
            self.put(instruction);
        }
    }

    /// Makes the placeholder at `from` the branch that `branch` encodes, to here.
    fn land(&mut self, from: usize, branch: impl Fn(i32) -> u32) {
        self.words[from] = branch(distance(from, self.len));
    }

    /// `lw rd, offset(base)` for offsets of up to 31 bits.
    fn load_word(
        &mut self,
        rd: Register,
        base: Register,
        offset: u64,
        what: Fixup,
    ) -> Result<(), TemplateError> {
        let (upper, lower) = parts(offset, what)?;
        if upper == 0 {
            self.put(lw(rd, base, lower));
        } else {
            self.put_all(&[lui(rd, upper), add(rd, rd, base), lw(rd, rd, lower)]);
        }
        Ok(())
    }
}

/// Bytes from one instruction to another.
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "below CAPACITY")]
const fn distance(from: usize, to: usize) -> i32 {
    (to as i32 - from as i32) * 4
}

/// `value` for `lui` and the instruction after it, sign-extended from 32 bits.
fn parts(value: u64, what: Fixup) -> Result<(u32, i32), TemplateError> {
    split(value.cast_signed()).ok_or(TemplateError::Range(what, value))
}

#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small constants")]
const fn imm(value: usize) -> i32 {
    value as i32
}

/// The trampoline that writes an entry record.
///
/// # Errors
/// When a value cannot be encoded.
pub fn entry(overflow: Overflow, values: &Values) -> Result<Code, TemplateError> {
    const MAX_CPUS: u64 = 2047;
    let drop = overflow == Overflow::Drop;
    let range = |what, value| Err(TemplateError::Range(what, value));
    if values.cpus == 0 || values.cpus > MAX_CPUS {
        return range(Fixup::CpuCount, values.cpus);
    }
    if !values.stride.is_power_of_two() || values.stride < 2 * CHUNK_SIZE as u64 {
        return range(Fixup::RingMask, values.stride);
    }
    let (controls, below) = parts(values.controls, Fixup::ControlTable)?;
    let (mask, _) = parts(values.stride.wrapping_neg(), Fixup::RingMask)?;
    let cpus = i32::try_from(values.cpus).unwrap_or(0);

    let mut code = Code::new();
    // t1: control block of this CPU.
    code.load_word(T1, TP, values.cpu, Fixup::CpuNumber)?;
    code.put(addi(T2, ZERO, cpus));
    let no_cpu = code.put(0);
    code.put(slli(T1, T1, imm(CONTROL_SIZE.trailing_zeros() as usize)));
    code.put(lui(T2, controls));
    if below != 0 {
        code.put(addi(T2, T2, below));
    }
    code.put(add(T1, T1, T2));
    // t2: the position that becomes ours. Between lr.d and sc.d is only what the
    // architecture guarantees to succeed in the end.
    const { assert!(control::HEAD == 0) };
    let reserve = code.put(lr_d(T2, T1));
    code.put(slli(T3, T2, 64 - imm(CHUNK_SIZE.trailing_zeros() as usize)));
    let slow = code.put(0);
    code.put(addi(T3, T2, imm(RECORD_SIZE)));
    code.put(sc_d(T3, T3, T1));
    code.put(bne(T3, ZERO, distance(code.len, reserve)));
    if drop {
        code.put(sext_w(T2, T2));
    } else {
        // A slot of an earlier lap is still committed: withdraw it, then say
        // whose lap this is, so that a reader can tell a record from its
        // predecessor.
        code.put(srli(T3, T2, 32));
        code.put(sext_w(T2, T2));
        code.put(sw(ZERO, T2, imm(record::FUNCTION)));
        code.put(sw(T3, T2, imm(record::LAP)));
    }
    code.put(sw(RA, T2, imm(record::CALLER)));
    code.put(sd(TP, T2, imm(record::TASK)));
    code.load_word(T3, TP, values.pid, Fixup::Pid)?;
    code.put(sw(T3, T2, imm(record::PID)));
    code.put(rdtime(T3));
    code.put(sd(T3, T2, imm(record::TIMESTAMP)));
    // Stores may overtake each other here; the commit word must not.
    code.put(FENCE_W_W);
    code.put(sw(T0, T2, imm(record::FUNCTION)));
    code.land(no_cpu, |d| bgeu(T1, T2, d));
    code.put(jr(T0));

    // The chunk is used up: open the next one if it is drained. The ring's header
    // (t3) is found from head itself, so whatever happens to this task in here,
    // the exchange or the verdict "full" is about the ring that head named.
    code.land(slow, |d| beq(T3, ZERO, d));
    code.put_all(&[addi(T3, T2, -1), sext_w(T3, T3), lui(T4, mask), and(T3, T3, T4)]);
    code.put_all(&[lw(T4, T3, imm(header::END)), sext_w(T5, T2)]);
    let same_lap = code.put(0);
    code.put_all(&[srli(T5, T2, 32), addi(T5, T5, 1), slli(T5, T5, 32)]);
    code.put_all(&[ld(T4, T3, imm(header::BASE)), or(T5, T5, T4)]);
    // bne skips the next instruction's move of head to t5.
    let next_lap = code.put(0);
    code.land(same_lap, |d| bne(T4, T5, d));
    code.put(addi(T5, T2, 0));
    code.land(next_lap, j);
    let full = if drop {
        code.put(ld(T4, T3, imm(header::ROOM)));
        Some(code.put(0))
    } else {
        None
    };
    code.put(addi(T5, T5, imm(HEADER_SIZE)));
    // If head has moved on, or the store fails: look again.
    code.put(lr_d(T4, T1));
    code.put(bne(T4, T2, distance(code.len, reserve)));
    code.put(sc_d(T4, T5, T1));
    code.put(j(distance(code.len, reserve)));
    if let Some(full) = full {
        code.land(full, |d| bgeu(T5, T4, d));
        // Ends the reservation; if it succeeds, head stays what it was.
        code.put(sc_d(ZERO, T2, T1));
        code.put(addi(T3, T3, imm(header::DROPPED)));
        code.put(addi(T4, ZERO, 1));
        code.put(amoadd_d(ZERO, T4, T3));
        code.put(jr(T0));
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: Values =
        Values { cpu: 32, pid: 1912, controls: 0xffff_ffff_8240_0000, cpus: 64, stride: 1 << 20 };

    /// Instructions from entry to `jr t0` if no branch is taken.
    fn straight(code: &Code) -> usize {
        code.instructions().iter().position(|&word| word == jr(T0)).unwrap() + 1
    }

    // The target is 40 for a record, with the 2 instructions of the site and the 4
    // of the kernel's dispatch (call_ops).
    #[test]
    fn a_record_takes_few_instructions() {
        let worst = Values { cpu: 4096, pid: 4096, controls: 0xffff_ffff_8240_0040, ..VALUES };
        assert_eq!(straight(&entry(Overflow::Drop, &VALUES).unwrap()), 22);
        assert_eq!(straight(&entry(Overflow::Overwrite, &VALUES).unwrap()), 25);
        assert!(straight(&entry(Overflow::Overwrite, &worst).unwrap()) + 6 <= 40);
    }

    #[test]
    fn what_cannot_be_encoded_is_refused() {
        for (values, hole) in [
            (Values { cpus: 0, ..VALUES }, Fixup::CpuCount),
            (Values { cpus: 2048, ..VALUES }, Fixup::CpuCount),
            (Values { stride: 3 << 14, ..VALUES }, Fixup::RingMask),
            (Values { stride: 1 << 14, ..VALUES }, Fixup::RingMask),
            (Values { stride: 1 << 40, ..VALUES }, Fixup::RingMask),
            (Values { pid: 1 << 31, ..VALUES }, Fixup::Pid),
            (Values { cpu: 1 << 40, ..VALUES }, Fixup::CpuNumber),
            (Values { controls: 0x1_0000_0000, ..VALUES }, Fixup::ControlTable),
        ] {
            let error = entry(Overflow::Drop, &values).unwrap_err();
            assert!(matches!(error, TemplateError::Range(what, _) if what == hole), "{error}");
        }
    }
}
