//! The thread flag that switches on the tracing of system calls, in kernels before 5.11 on x86-64.
//! The first word of a task holds these flags.

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

/// The number of the flag that this code sets in tasks, if there is exactly one.
pub(super) fn marked_flag(code: &[u8]) -> Option<u32> {
    let decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let mut flags = decoder.into_iter().filter_map(|instruction| set(&instruction));
    let first = flags.next()?;
    flags.all(|flag| flag == first).then_some(first)
}

/// The flag that an atomic instruction sets (`set_bit` of a constant number).
fn set(instruction: &Instruction) -> Option<u32> {
    let of_task = instruction.op_count() == 2
        && instruction.op0_kind() == OpKind::Memory
        && instruction.has_lock_prefix()
        && instruction.memory_base() != Register::RIP
        && instruction.memory_index() == Register::None;
    let at = u32::try_from(instruction.memory_displacement64()).ok().filter(|at| *at < 8)?;
    let number = instruction.try_immediate(1).ok().filter(|_| of_task)?;
    let bit = match instruction.mnemonic() {
        Mnemonic::Or => number.is_power_of_two().then(|| number.trailing_zeros())?,
        Mnemonic::Bts => u32::try_from(number).ok()?,
        _ => return None,
    };
    Some(8 * at + bit).filter(|flag| *flag < 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    // `syscall_regfunc` of Debian's 5.10: the count of readers of the list of tasks is another
    // atomic instruction there.
    const LOOP: [u8; 23] = [
        0x48, 0x8b, 0x96, 0x58, 0x03, 0x00, 0x00, // mov rdx, [rsi + 0x358]
        0xf0, 0x80, 0x48, 0x03, 0x10, // lock or byte [rax + 3], 0x10
        0xb8, 0x00, 0xfe, 0xff, 0xff, // mov eax, -512
        0xf0, 0x0f, 0xc1, 0x42, 0x04, // lock xadd [rdx + 4], eax
        0xc3,
    ];

    // A wrong flag would be set in every task, whatever it means there.
    #[test]
    fn the_flag_is_the_one_that_the_kernel_sets() {
        assert_eq!(marked_flag(&LOOP), Some(28));
        assert_eq!(marked_flag(&[0xf0, 0x0f, 0xba, 0x28, 0x0b]), Some(11), "lock bts [rax], 11");
    }

    #[test]
    fn what_sets_no_single_flag_of_a_task_is_refused() {
        let with = |at: usize, byte: u8| {
            let mut code = LOOP;
            code[at] = byte;
            marked_flag(&code)
        };
        assert_eq!(with(11, 0x30), None, "two flags");
        assert_eq!(with(10, 0x08), None, "behind the flags");
        assert_eq!(with(7, 0x90), None, "not atomic");
        let mut two = LOOP.to_vec();
        two.splice(12..12, [0xf0, 0x80, 0x48, 0x03, 0x20]);
        assert_eq!(marked_flag(&two), None, "one flag and another");
        assert_eq!(marked_flag(&[]), None);
    }
}
