//! Disassembles a piece of code from its beginning to its end, every instruction once.

use std::ops::{Range, RangeInclusive};

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use crate::exits::Missing;
use crate::read::index;

use super::marks::Marks;

/// An instruction that goes elsewhere than to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Edge {
    pub(super) from: u64,
    /// 0 where the instruction does not tell.
    pub(super) target: u64,
    /// Number of the piece of code that it is in.
    pub(super) piece: u32,
    pub(super) len: u8,
    pub(super) how: How,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    Jump,
    /// One of 2 bytes.
    Short,
    Conditional,
    /// Through a register or memory, or to another segment.
    Indirect,
    /// `ret` itself.
    Return,
    /// By a table, not by the code as it is in the image.
    Table,
}

/// Code that something must lead to, if it ever runs.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// Number of the piece of code that it is in.
    pub(super) piece: u32,
    /// From the end of the code before, which may be where a nop that is led to stands, to its
    /// first instruction that does something.
    pub(super) start: RangeInclusive<u64>,
}

/// An instruction that adds to a count of the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) address: u64,
    /// Of the instruction.
    pub(crate) len: u8,
    /// What is added; `None`: something else is done to it.
    pub(crate) add: Option<i32>,
    /// The count is a word of 64 bits (7.3).
    pub(crate) wide: bool,
    /// It changes the count in a way that nothing can take the place of: it puts the count's place into a
    /// register, by which it is changed later, or exchanges it with one.
    pub(crate) by_register: bool,
    /// It adds or subtracts in a form that is not known. (In the kernel itself only the `add` of
    /// `__local_bh_enable_ip` does, which keeps one.)
    pub(crate) otherwise: bool,
}

/// A count of the CPU, as instructions name its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CountPlace {
    /// Offset from the gs base, as what lies that far from an instruction.
    pub(crate) near: u64,
    /// The same as a number in an instruction, which differs where code is not at the address by
    /// which it is decoded.
    pub(crate) plain: u64,
}

/// What became of a piece of code.
#[derive(Clone, Copy, Debug)]
pub(super) struct Swept {
    /// Where the code that belongs to it ends.
    pub(super) end: u64,
    pub(super) missing: Option<Missing>,
    /// Code goes on to a breakpoint: what is behind that may be the rest of another instruction.
    pub(super) stops: bool,
}

/// A hundred times what the largest kernels have; damage must not fill memory.
pub(super) const MOST_EDGES: usize = 1 << 23;

pub(super) struct Sweep<'a> {
    text: Range<u64>,
    bytes: &'a [u8],
    decoder: Decoder<'a>,
    /// What functions that can be traced call first.
    fentry: Option<u64>,
    /// All that leave the piece they are in.
    pub(super) edges: Vec<Edge>,
    /// Where branches end.
    pub(super) targets: Marks,
    /// Pieces of code that call something.
    pub(super) callers: Vec<u32>,
    /// Code after an instruction that does not go on to the next, by piece.
    pub(super) blocks: Vec<Block>,
    /// Most edges, and most blocks: code that has more is not gone through.
    pub(super) most: usize,
    /// A count of the CPU.
    pub(super) count: Option<CountPlace>,
    /// Where it is written.
    pub(super) counted: Vec<Counted>,
    /// `cli` and `sti`.
    pub(super) flags: Vec<u64>,
}

impl<'a> Sweep<'a> {
    /// `bytes` are those of `text`.
    pub(super) fn new(text: &Range<u64>, bytes: &'a [u8], fentry: Option<u64>) -> Self {
        Self {
            text: text.clone(),
            bytes,
            decoder: Decoder::with_ip(64, bytes, text.start, DecoderOptions::NONE),
            fentry,
            edges: Vec::new(),
            targets: Marks::new(text),
            callers: Vec::new(),
            blocks: Vec::new(),
            most: MOST_EDGES,
            count: None,
            counted: Vec::new(),
            flags: Vec::new(),
        }
    }

    /// Whether a breakpoint is there.
    fn is_breakpoint(&self, address: u64) -> bool {
        let at = address.checked_sub(self.text.start).and_then(|at| usize::try_from(at).ok());
        at.and_then(|at| self.bytes.get(at)) == Some(&0xcc)
    }

    /// Decodes a piece of code. `site` is where it may call `__fentry__`: a call elsewhere begins
    /// another function, a weak one that was overridden and lost its symbol.
    pub(super) fn piece(&mut self, number: u32, piece: &Range<u64>, site: Option<u64>) -> Swept {
        let broken = |end| Swept { end, missing: Some(Missing::Undecoded), stops: true };
        let mut stops = false;
        let mut instruction = Instruction::default();
        // Where the last instruction ended, if it does not go on to the next.
        let mut ended: Option<u64> = None;
        let mut before = Code::INVALID;
        let mut at = piece.start;
        if !self.seek(at) {
            return broken(at);
        }
        while at < piece.end {
            if ended.is_some()
                && let Some(filling) = self.filling(&(at..piece.end))
            {
                at += filling;
                if at >= piece.end || !self.seek(at) {
                    break;
                }
            }
            self.decoder.decode_out(&mut instruction);
            let next = instruction.next_ip();
            let code = instruction.code();
            let full = self.edges.len().max(self.blocks.len()) > self.most;
            if code == Code::INVALID || next > piece.end || next <= at || full {
                return broken(at);
            }
            stops |= code == Code::Int3 && ended.is_none();
            if let Some(from) = ended
                && !matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Int3)
            {
                self.blocks.push(Block { piece: number, start: from..=at });
                ended = None;
            }
            if instruction.segment_prefix() == Register::GS || code == Code::Mov_rm64_imm32 {
                self.counted.extend(self.count.and_then(|count| counted(&instruction, count)));
            }
            if instruction.op0_kind() == OpKind::NearBranch64 {
                let target = instruction.near_branch_target();
                let how = match code {
                    Code::Call_rel32_64 if Some(target) == self.fentry && Some(at) != site => {
                        let endbr = if before == Code::Endbr64 { 4 } else { 0 };
                        return Swept { end: at - endbr, missing: None, stops };
                    }
                    Code::Call_rel32_64 => {
                        if Some(at) != site {
                            self.calls(number);
                        }
                        None
                    }
                    Code::Jmp_rel32_64 => Some(How::Jump),
                    Code::Jmp_rel8_64 => Some(How::Short),
                    _ => Some(How::Conditional),
                };
                self.targets.set(target);
                // Behind a return it looks like filling.
                stops |= self.is_breakpoint(target);
                if matches!(how, Some(How::Jump | How::Short)) {
                    ended = Some(next);
                }
                // A function that jumps to its own entry, where it is traced again, is left too.
                if let Some(how) = how
                    && (target <= piece.start || target >= piece.end)
                {
                    self.edge(&instruction, number, target, how);
                }
            } else {
                match instruction.mnemonic() {
                    Mnemonic::Jmp | Mnemonic::Jmpe => {
                        self.edge(&instruction, number, 0, How::Indirect);
                        ended = Some(next);
                    }
                    Mnemonic::Call => self.calls(number),
                    Mnemonic::Cli | Mnemonic::Sti if self.flags.len() < MOST_EDGES => {
                        self.flags.push(at);
                    }
                    Mnemonic::Ret => {
                        self.edge(&instruction, number, 0, How::Return);
                        ended = Some(next);
                    }
                    // Xen's prefix for an instruction that it shall emulate.
                    Mnemonic::Ud2 if self.rest(next).starts_with(b"xen") => {
                        at = next + 3;
                        before = code;
                        if !self.seek(at) {
                            break;
                        }
                        continue;
                    }
                    // Not iretq and lretq: kernel functions use them to go on to what follows.
                    _ => {}
                }
            }
            before = code;
            at = next;
        }
        Swept { end: piece.end, missing: None, stops }
    }

    fn calls(&mut self, piece: u32) {
        if self.callers.last() != Some(&piece) {
            self.callers.push(piece);
        }
    }

    fn edge(&mut self, instruction: &Instruction, piece: u32, target: u64, how: How) {
        let len = u8::try_from(instruction.len()).unwrap_or(u8::MAX);
        self.edges.push(Edge { from: instruction.ip(), target, piece, len, how });
    }

    fn seek(&mut self, address: u64) -> bool {
        let Some(position) = address.checked_sub(self.text.start).map(index) else { return false };
        self.decoder.set_ip(address);
        self.decoder.set_position(position).is_ok()
    }

    fn rest(&self, address: u64) -> &'a [u8] {
        let position = address.checked_sub(self.text.start).map(index);
        position.and_then(|position| self.bytes.get(position..)).unwrap_or_default()
    }

    /// The length of what fills the room between pieces of code, if there is any: one-byte
    /// instructions, or what the linker leaves.
    fn filling(&self, at: &Range<u64>) -> Option<u64> {
        let rest = self.rest(at.start);
        let rest = &rest[..rest.len().min(index(at.end - at.start))];
        let run = |byte: u8| rest.iter().take_while(|&&b| b == byte).count();
        let count = match rest.first()? {
            byte @ (0xcc | 0x90) => run(*byte),
            0 if run(0) == rest.len() => rest.len(),
            0 => run(0) / 16 * 16,
            _ => 0,
        };
        u64::try_from(count).ok().filter(|&count| count > 0)
    }
}

/// What an instruction does to the word of the count, if it writes there or makes others do so.
fn counted(instruction: &Instruction, count: CountPlace) -> Option<Counted> {
    let (address, len) = (instruction.ip(), u8::try_from(instruction.len()).ok()?);
    if instruction.code() == Code::Mov_rm64_imm32 {
        let taken = instruction.op0_kind() == OpKind::Register
            && instruction.immediate32to64().cast_unsigned() == count.plain;
        return taken.then_some(Counted {
            address,
            len,
            add: None,
            wide: false,
            by_register: true,
            otherwise: false,
        });
    }
    let place = match instruction.memory_base() {
        Register::RIP => count.near,
        Register::None => count.plain,
        _ => return None,
    };
    if instruction.op0_kind() != OpKind::Memory
        || instruction.memory_index() != Register::None
        || instruction.memory_displacement64() != place
    {
        return None;
    }
    let add = match instruction.code() {
        Code::Inc_rm32 | Code::Inc_rm64 => Some(1),
        Code::Dec_rm32 | Code::Dec_rm64 => Some(-1),
        Code::Add_rm32_imm32 => Some(instruction.immediate32().cast_signed()),
        Code::Add_rm64_imm32 => i32::try_from(instruction.immediate32to64()).ok(),
        Code::Add_rm32_imm8 => Some(instruction.immediate8to32()),
        Code::Add_rm64_imm8 => i32::try_from(instruction.immediate8to64()).ok(),
        _ if matches!(instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test) => return None,
        _ => None,
    };
    let wide = instruction.memory_size().size() == 8;
    let by_register = instruction.mnemonic() == Mnemonic::Xadd;
    let adds = matches!(instruction.mnemonic(), Mnemonic::Add | Mnemonic::Sub);
    Some(Counted { address, len, add, wide, by_register, otherwise: adds && add.is_none() })
}

/// Where code that stands elsewhere until the kernel copies it may go, at most so many
/// instructions of it.
pub(super) fn jumps(bytes: &[u8], address: u64, limit: usize) -> impl Iterator<Item = u64> {
    let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    let mut left = limit;
    std::iter::from_fn(move || {
        while left > 0 && decoder.can_decode() {
            left -= 1;
            decoder.decode_out(&mut instruction);
            if instruction.is_invalid() {
                return None;
            }
            if instruction.op0_kind() == OpKind::NearBranch64
                && instruction.code() != Code::Call_rel32_64
            {
                if matches!(instruction.code(), Code::Jmp_rel32_64 | Code::Jmp_rel8_64) {
                    left = 0;
                }
                return Some(instruction.near_branch_target());
            }
        }
        None
    })
}
