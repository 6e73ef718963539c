//! Stubs for the kernel's instructions that switch interrupts or preemption.
//!
//! Each calls a program and executes the replaced instruction. The kernel enters and leaves a stub
//! by jumps, so that no task's stack ever holds an address in the kernel's code at which no
//! instruction begins.

use super::compile::jump;
use super::operands::ENDING;

/// What the instruction is, with where it leads as an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// It has been done, and the stub goes on behind it.
    Done,
    /// A call with `struct pt_regs` on top of the stack, of this: told where interrupts were on.
    Handle(u64),
    /// The same, always told.
    HandleCall(u64),
    /// A jump to this with `struct pt_regs` on top of the stack: told where interrupts will be on.
    Restore(u64),
    /// A return.
    Return,
    /// Adds to a count of the CPU: told where that becomes 0, or is 0 no more. It has the lower 31 bits of a
    /// word of 32, or the lower half of a wide one.
    Count {
        /// What is added: not 0.
        add: i32,
        /// Offset of the word from the gs base.
        count: u64,
        /// The word has 64 bits.
        wide: bool,
    },
}

/// Code, and what there is to know of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchStub {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// From its beginning to where the program returns to, which names it.
    pub names: u64,
    /// From its beginning to its return of 5 bytes, if it has one.
    pub ending: Option<usize>,
}

/// Offset in `struct pt_regs` of the second byte of the saved flags, and the bit in it that says that
/// interrupts were on (arch/x86/include/asm/ptrace.h).
const SAVED_FLAGS: u8 = 0x91;
const INTERRUPTS: u8 = 2;

const PUSH_R10: [u8; 2] = [0x41, 0x52];
const PUSH_R11: [u8; 2] = [0x41, 0x53];
const POP_R10: [u8; 2] = [0x41, 0x5a];
const POP_R11: [u8; 2] = [0x41, 0x5b];
const JE: u8 = 0x74;
const JNE: u8 = 0x75;

/// The stub at `address` of an instruction at `site`, behind which code goes on at `next`. Its
/// program, one of [`Point::Entry`](crate::Point::Entry), has `site` in place of its caller.
///
/// Kept are all registers; at [`Switch::Handle`] and its like all but `r10` and `r11`. The flags are
/// lost but for what a count that becomes less leaves in them. `None` when something is out of reach,
/// or `site` is not a sign-extended number of 32 bits.
#[must_use]
pub fn switch_stub(
    address: u64,
    switch: Switch,
    (site, next): (u64, u64),
    program: u64,
) -> Option<SwitchStub> {
    let mut code = Stub { address, bytes: Vec::with_capacity(96), names: 0 };
    let mut ending = None;
    match switch {
        Switch::Done => {
            code.tell_and_keep(site, program)?;
            code.jump_to(next)?;
        }
        Switch::Handle(to) => {
            // The call has pushed where it returns to.
            let skip = code.unless_interrupted(SAVED_FLAGS + 8);
            code.tell(site, program)?;
            code.land(skip)?;
            code.jump_to(to)?;
        }
        Switch::HandleCall(to) => {
            code.tell(site, program)?;
            code.jump_to(to)?;
        }
        Switch::Restore(to) => {
            let skip = code.unless_interrupted(SAVED_FLAGS);
            code.tell(site, program)?;
            code.land(skip)?;
            code.jump_to(to)?;
        }
        Switch::Return => {
            code.tell(site, program)?;
            ending = Some(code.bytes.len());
            code.bytes.extend(ENDING);
        }
        Switch::Count { add, count, wide } => {
            let count = i32::try_from(count.cast_signed()).ok()?;
            code.count(add, (count, wide), (site, next), program)?;
        }
    }
    Some(SwitchStub { bytes: code.bytes, names: code.names, ending })
}

struct Stub {
    address: u64,
    bytes: Vec<u8>,
    names: u64,
}

impl Stub {
    fn here(&self) -> u64 {
        self.address.wrapping_add(self.bytes.len() as u64)
    }

    fn jump_to(&mut self, to: u64) -> Option<()> {
        self.bytes.extend(jump(0xe9, self.here(), to)?);
        Some(())
    }

    /// A conditional jump to a place that is not known yet.
    fn branch(&mut self, opcode: u8) -> usize {
        self.bytes.extend([opcode, 0]);
        self.bytes.len()
    }

    /// That place is here.
    fn land(&mut self, behind: usize) -> Option<()> {
        let distance = i8::try_from(self.bytes.len().checked_sub(behind)?).ok()?;
        *self.bytes.get_mut(behind.checked_sub(1)?)? = distance.to_le_bytes()[0];
        Some(())
    }

    /// test byte [rsp + flags], 2; jz
    fn unless_interrupted(&mut self, flags: u8) -> usize {
        self.bytes.extend([0xf6, 0x84, 0x24]);
        self.bytes.extend(u32::from(flags).to_le_bytes());
        self.bytes.push(INTERRUPTS);
        self.branch(JE)
    }

    /// push site; call program; pop r11. r10, r11 and the flags are lost.
    fn tell(&mut self, site: u64, program: u64) -> Option<()> {
        self.bytes.push(0x68);
        self.bytes.extend(i32::try_from(site.cast_signed()).ok()?.to_le_bytes());
        self.bytes.extend(jump(0xe8, self.here(), program)?);
        self.names = self.bytes.len() as u64;
        self.bytes.extend(POP_R11);
        Some(())
    }

    /// The same; only the flags are lost.
    fn tell_and_keep(&mut self, site: u64, program: u64) -> Option<()> {
        self.bytes.extend(PUSH_R10);
        self.bytes.extend(PUSH_R11);
        self.tell(site, program)?;
        self.bytes.extend(POP_R11);
        self.bytes.extend(POP_R10);
        Some(())
    }

    /// An instruction on the word of the count, or on all 64 bits of it: its opcode and operation
    /// (`gs:[disp32]`), then its immediate.
    fn on_count(
        &mut self,
        [opcode, operation]: [u8; 2],
        (count, wide): (i32, bool),
        immediate: &[u8],
    ) {
        self.bytes.push(0x65);
        if wide {
            self.bytes.push(0x48);
        }
        self.bytes.extend([opcode, 0x04 | operation << 3, 0x25]);
        self.bytes.extend(count.to_le_bytes());
        self.bytes.extend(immediate);
    }

    /// inc, dec or add, as it was.
    fn add(&mut self, add: i32, count: (i32, bool)) {
        match add {
            1 => self.on_count([0xff, 0], count, &[]),
            -1 => self.on_count([0xff, 1], count, &[]),
            _ => self.on_count([0x81, 0], count, &add.to_le_bytes()),
        }
    }

    /// A record is written while the count is not 0: on the CPU whose count it is.
    fn count(
        &mut self,
        add: i32,
        count: (i32, bool),
        (site, next): (u64, u64),
        program: u64,
    ) -> Option<()> {
        let (at, wide) = count;
        // The bit above the count, in its word of 32 bits: there is none in a wide one's.
        let above: u32 = if wide { 0 } else { 1 << 31 };
        if add > 0 {
            // test [count], 0x7fffffff
            self.on_count([0xf7, 0], (at, false), &(!above).to_le_bytes());
            let plain = self.branch(JNE);
            self.add(add, count);
            self.tell_and_keep(site, program)?;
            self.jump_to(next)?;
            self.land(plain)?;
        } else {
            let last = add.checked_neg().filter(|&last| last > 0)?.cast_unsigned();
            // cmp [count], last, with the bit above and without
            let mut tell = None;
            if above != 0 {
                self.on_count([0x81, 7], (at, false), &(last | above).to_le_bytes());
                tell = Some(self.branch(JE));
            }
            self.on_count([0x81, 7], (at, false), &last.to_le_bytes());
            let plain = self.branch(JNE);
            if let Some(tell) = tell {
                self.land(tell)?;
            }
            self.tell_and_keep(site, program)?;
            self.land(plain)?;
        }
        self.add(add, count);
        self.jump_to(next)
    }
}
