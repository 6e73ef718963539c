//! Finds the flags that a function tests, on x86-64: a per-CPU variable points to the task, whose
//! first word holds the flags.

use std::collections::{BTreeSet, HashMap};

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use super::{PreemptCount, Value};

/// Bits of the flags that the code tests one by one.
pub(super) fn tested(code: &[u8]) -> BTreeSet<u8> {
    let mut bits = BTreeSet::new();
    let mut values = HashMap::new();
    for instruction in Decoder::new(64, code, DecoderOptions::NONE) {
        bits.extend(tests(&instruction, &values));
        let written = (instruction.op_count() > 0 && instruction.op0_kind() == OpKind::Register)
            .then(|| instruction.op0_register().full_register());
        let reads_alone = matches!(
            instruction.mnemonic(),
            Mnemonic::Test | Mnemonic::Cmp | Mnemonic::Bt | Mnemonic::Push
        );
        if let Some(register) = written.filter(|_| !reads_alone) {
            match result(&instruction, &values) {
                Some(value) => values.insert(register, value),
                None => values.remove(&register),
            };
        }
    }
    bits
}

/// How the count of preemptions is kept, by what the code asks of its bits for NMIs.
pub(super) fn preempt_count(code: &[u8]) -> Option<PreemptCount> {
    const NARROW: u64 = 0xf0_0000;
    const WIDE: u64 = 0xf000_0000;
    let masks: BTreeSet<u64> = Decoder::new(64, code, DecoderOptions::NONE)
        .into_iter()
        .filter(|it| matches!(it.mnemonic(), Mnemonic::Test | Mnemonic::And))
        .filter_map(|it| immediate(&it).map(|mask| mask & 0xffff_ffff))
        .collect();
    match (masks.contains(&NARROW), masks.contains(&WIDE)) {
        (true, false) => Some(PreemptCount::Narrow),
        (false, true) => Some(PreemptCount::Wide),
        _ => None,
    }
}

/// The register, and by how much it is to be shifted: `ah` and its like are the second byte.
fn part(register: Register) -> (Register, u32) {
    let second = matches!(register, Register::AH | Register::BH | Register::CH | Register::DH);
    (register.full_register(), if second { 8 } else { 0 })
}

/// What an operand has.
fn operand(
    instruction: &Instruction,
    number: u32,
    values: &HashMap<Register, Value>,
) -> Option<Value> {
    match instruction.op_kind(number) {
        OpKind::Register => {
            let (register, shift) = part(instruction.op_register(number));
            let value = values.get(&register).copied()?;
            if shift == 0 { Some(value) } else { value.shifted(shift) }
        }
        OpKind::Memory if instruction.segment_prefix() == Register::GS => {
            (instruction.memory_size().size() == 8).then_some(Value::Task)
        }
        OpKind::Memory => {
            let task = values.get(&instruction.memory_base()) == Some(&Value::Task)
                && instruction.memory_index() == Register::None;
            let at = u32::try_from(instruction.memory_displacement64()).ok()?;
            (task && at < 8).then_some(Value::Flags(8 * at))
        }
        _ => None,
    }
}

fn immediate(instruction: &Instruction) -> Option<u64> {
    let last = instruction.op_count().checked_sub(1)?;
    // Masks of 32 bits are sign-extended; those of a flag are small.
    instruction.try_immediate(last).ok()
}

/// The bit that an instruction tests.
fn tests(instruction: &Instruction, values: &HashMap<Register, Value>) -> Option<u8> {
    let mask = match instruction.mnemonic() {
        Mnemonic::Test | Mnemonic::And => immediate(instruction)?,
        Mnemonic::Bt => 1_u64.checked_shl(u32::try_from(immediate(instruction)?).ok()?)?,
        _ => return None,
    };
    operand(instruction, 0, values)?.bit(mask)
}

/// What it leaves in the register that it writes.
fn result(instruction: &Instruction, values: &HashMap<Register, Value>) -> Option<Value> {
    match instruction.mnemonic() {
        Mnemonic::Mov | Mnemonic::Movzx => operand(instruction, 1, values),
        Mnemonic::Shr => {
            let by = u32::try_from(immediate(instruction)?).ok()?;
            operand(instruction, 0, values)?.shifted(by)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(code: &[u8]) -> Vec<u8> {
        tested(code).into_iter().collect()
    }

    // The one for NMIs is where the other counts nothing.
    #[test]
    fn a_count_is_known_by_the_mask_of_nmis() {
        // test eax, 0xf00000; test eax, 0xf0000
        let narrow = [0xa9, 0, 0, 0xf0, 0, 0xa9, 0, 0, 0xf, 0];
        assert_eq!(preempt_count(&narrow), Some(PreemptCount::Narrow));
        // test esi, 0xf0000000; test esi, 0xf000000
        let wide = [0xf7, 0xc6, 0, 0, 0, 0xf0, 0xf7, 0xc6, 0, 0, 0, 0xf];
        assert_eq!(preempt_count(&wide), Some(PreemptCount::Wide));
        assert_eq!(preempt_count(&[narrow, [0; 10]].concat()), Some(PreemptCount::Narrow));
        assert_eq!((preempt_count(&narrow[5..]), preempt_count(&[])), (None, None));
    }

    // As compilers of several years write it (bytes of `objdump -d`).
    #[test]
    fn the_flags_are_told_from_the_count_of_preemptions() {
        // mov rax, gs:[0x35000]; mov rdi, [rax]; and edi, 8; test ch, 1
        let by_and = [
            0x65, 0x48, 0x8b, 0x04, 0x25, 0, 0x50, 3, 0, 0x48, 0x8b, 0x38, 0x83, 0xe7, 8, 0xf6,
            0xc5, 1,
        ];
        assert_eq!(bits(&by_and), [3]);
        // mov rax, gs:[0x35000]; mov rdx, [rax]; shr rdx, 4; and edx, 1; mov rcx, [rax];
        // shr rcx, 5; and ecx, 1
        let by_shift = [
            0x65, 0x48, 0x8b, 0x04, 0x25, 0, 0x50, 3, 0, 0x48, 0x8b, 0x10, 0x48, 0xc1, 0xea, 4,
            0x83, 0xe2, 1, 0x48, 0x8b, 0x08, 0x48, 0xc1, 0xe9, 5, 0x83, 0xe1, 1,
        ];
        assert_eq!(bits(&by_shift), [4, 5]);
        // mov rax, gs:[0x35000]; test byte [rax], 8; bt dword [rax], 4; test byte [rax+1], 2;
        // test byte [rax+0x10], 1
        let in_memory = [
            0x65, 0x48, 0x8b, 0x04, 0x25, 0, 0x50, 3, 0, 0xf6, 0, 8, 0x0f, 0xba, 0x20, 4, 0xf6,
            0x40, 1, 2, 0xf6, 0x40, 0x10, 1,
        ];
        assert_eq!(bits(&in_memory), [3, 4, 9]);
        // mov eax, gs:[0x1fb40]; test eax, 0xf0000; mov rdx, [rdx]; and edx, 8
        let others = [
            0x65, 0x8b, 0x04, 0x25, 0x40, 0xfb, 1, 0, 0xa9, 0, 0, 0xf, 0, 0x48, 0x8b, 0x12, 0x83,
            0xe2, 8,
        ];
        assert_eq!(bits(&others), [0_u8; 0]);
    }
}
