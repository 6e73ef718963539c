//! The exits of traced functions, and how many bytes before each `ret` can be displaced with it.

use std::ops::Range;

use super::targets::Targets;
use super::{LeftOut, Missing};
use crate::read::{index, wide};
use crate::riscv64::decode::{Instruction, Kind};
use crate::riscv64::text::Text;
use crate::{Kernel, SiteSection};

/// `t1` to `t6`. Not `t0` and `ra`: processors take a jump by them for a return.
pub(super) const SCRATCH: [u8; 6] = [6, 7, 28, 29, 30, 31];

/// What an exit's own jump takes: `auipc; jr`.
pub(super) const FAR: u8 = 8;
/// `jal`
pub(super) const NEAR: u8 = 4;

const ALL_SCRATCH: u32 = 1 << 6 | 1 << 7 | 0xf << 28;

/// The longest window: with room for the landings of many others.
const LONGEST: u64 = 120;

/// How many exits are looked at: twenty times what kernels have.
const MOST: usize = 1 << 20;

/// A `ret`, and what before it may be displaced with it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exit {
    pub(super) ret: u64,
    ret_len: u8,
    pub(super) site: u32,
    /// Where its code ends in the arena.
    code: u32,
    /// The longest window, in bytes with the `ret`.
    pub(super) longest: u8,
    /// The window if nobody else needs room in it.
    pub(super) shortest: u8,
    /// What the function reads: behind a branch it may need these registers.
    reads: u32,
}

impl Exit {
    /// The address behind the `ret`.
    pub(super) fn end(&self) -> u64 {
        self.ret + u64::from(self.ret_len)
    }

    /// The address of a window of some length.
    pub(super) fn start(&self, len: u8) -> u64 {
        self.end() - u64::from(len)
    }

    /// Bytes that jumps of other exits can have.
    pub(super) fn room(&self) -> u8 {
        self.longest.saturating_sub(FAR)
    }
}

/// A traced function.
#[derive(Clone, Debug)]
pub(super) struct Function {
    pub(super) site: u32,
    /// Exits by number.
    pub(super) exits: Range<usize>,
    /// How many returns must stay as they are.
    pub(super) fixed: usize,
    /// Of another exit, that cannot be seen.
    pub(super) missing: Option<Missing>,
}

/// All traced functions and their exits, both by address.
#[derive(Debug, Default)]
pub(super) struct Windows {
    pub(super) functions: Vec<Function>,
    pub(super) exits: Vec<Exit>,
    /// Returns that must stay as they are.
    pub(super) fixed: Vec<LeftOut>,
    /// The code of the exits.
    arena: Vec<u8>,
}

impl Windows {
    pub(super) fn find(
        kernel: &Kernel,
        text: &Text<'_>,
        targets: &Targets,
    ) -> Result<Self, &'static str> {
        let mut windows = Self::default();
        for (number, site) in (0..).zip(kernel.sites()) {
            let code = text.range.contains(&site.entry) && site.entry % 2 == 0;
            if site.section == SiteSection::Text && code {
                windows.add_function(text, targets, number, site.entry);
            }
            if windows.exits.len() > MOST {
                return Err("it has more exits than any kernel");
            }
        }
        Ok(windows)
    }

    pub(super) fn add_function(
        &mut self,
        text: &Text<'_>,
        targets: &Targets,
        site: u32,
        entry: u64,
    ) {
        let function = text.function(entry);
        let first = self.exits.len();
        let first_fixed = self.fixed.len();
        let resolved = targets.unresolved.binary_search(&entry).is_err();
        let mut missing = (!resolved).then_some(Missing::Unclear);
        let mut reads = targets.reads_within(&function);
        let mut before: Option<Instruction> = None;
        // Where the instructions began that may be displaced with the next `ret`.
        let mut start = None;
        for (address, instruction) in text.instructions(function.clone()) {
            let previous = before.replace(instruction);
            let end = address.saturating_add(instruction.len.into());
            if targets.replacements.any(address..end) {
                start = None;
                continue;
            }
            reads |= instruction.reads;
            if let Some(why) = targets.kept(address, instruction.len) {
                if instruction.is_ret() {
                    self.fixed.push(LeftOut { ret: address, site, why });
                }
                start = None;
                continue;
            }
            if start.is_none() || !resolved || targets.places.contains(address) {
                start = Some(address);
            }
            let inside =
                |distance: i32| function.contains(&address.wrapping_add_signed(distance.into()));
            match instruction.kind {
                Kind::Auipc { .. } if targets.are_far => {}
                Kind::Plain | Kind::Load | Kind::AddImmediate { .. } | Kind::Auipc { .. } => {
                    continue;
                }
                Kind::Branch { distance, .. } if inside(distance) && targets.are_far => {}
                Kind::Branch { distance, .. } if inside(distance) => continue,
                Kind::Branch { .. } => missing = Some(Missing::Leaves),
                Kind::Jump { distance } if instruction.writes == 0 && !inside(distance) => {
                    missing = Some(Missing::Leaves);
                }
                Kind::JumpRegister { .. } if instruction.is_ret() => {
                    self.add_exit(text, site, start.unwrap_or(address), address, instruction.len);
                }
                Kind::JumpRegister { base, .. } if instruction.writes == 0 => {
                    // The tail of a function that is the same as another.
                    let leaves = previous.is_some_and(|previous| {
                        previous.writes == base && matches!(previous.kind, Kind::Auipc { .. })
                    });
                    if leaves {
                        missing = Some(Missing::Leaves);
                    }
                }
                Kind::Jump { .. } | Kind::JumpRegister { .. } | Kind::Fixed => {}
            }
            start = None;
        }
        for number in first..self.exits.len() {
            self.exits[number].reads = reads;
            self.choose(number);
        }
        let exits = first..self.exits.len();
        let fixed = self.fixed.len() - first_fixed;
        let none = exits.is_empty() && fixed == 0;
        let missing = missing.or(none.then_some(Missing::NoReturn));
        self.functions.push(Function { site, exits, fixed, missing });
    }

    fn add_exit(&mut self, text: &Text<'_>, site: u32, mut start: u64, ret: u64, len: u8) {
        if self.exits.len() > MOST {
            return;
        }
        let end = ret + u64::from(len);
        // From the front, where instructions begin.
        while end - start > LONGEST {
            start += text.instruction(start).map_or(2, |instruction| instruction.len.into());
        }
        let Ok(longest) = u8::try_from(end - start) else { return };
        let Some(bytes) = text.bytes(start, longest.into()) else { return };
        self.arena.extend_from_slice(bytes);
        let Ok(code) = u32::try_from(self.arena.len()) else { return };
        self.exits.push(Exit { ret, ret_len: len, site, code, longest, shortest: len, reads: 0 });
    }

    /// Takes the lengths of an exit's windows from its code.
    fn choose(&mut self, number: usize) {
        let exit = self.exits[number];
        let instructions: Vec<_> = self.instructions(&exit, exit.longest).collect();
        let mut free = ALL_SCRATCH;
        let (mut longest, mut near, mut far) = (exit.ret_len, None, None);
        for (address, instruction) in instructions.iter().rev() {
            free &= !occupied(instruction, exit.reads);
            if free == 0 {
                break;
            }
            longest = u8::try_from(exit.end() - address).unwrap_or(longest);
            near = near.or((longest >= NEAR).then_some(longest));
            far = far.or((longest >= FAR).then_some(longest));
        }
        let shortest = far.or(near).unwrap_or(longest);
        self.exits[number] = Exit { longest, shortest, ..exit };
    }

    /// The bytes of an exit's window of some length.
    pub(super) fn bytes(&self, exit: &Exit, len: u8) -> &[u8] {
        let end = index(exit.code.into());
        end.checked_sub(len.into()).and_then(|start| self.arena.get(start..end)).unwrap_or_default()
    }

    /// The instructions of an exit's window of some length, the last of them its `ret`.
    pub(super) fn instructions(
        &self,
        exit: &Exit,
        len: u8,
    ) -> impl Iterator<Item = (u64, Instruction)> {
        let bytes = self.bytes(exit, len);
        let start = exit.end() - wide(bytes.len());
        let mut offset = 0;
        std::iter::from_fn(move || {
            let instruction = Instruction::at(bytes, offset)?;
            let address = start + wide(offset);
            offset += usize::from(instruction.len);
            Some((address, instruction))
        })
    }

    /// The function of a site.
    pub(super) fn function(&self, site: usize) -> Option<&Function> {
        let number = |function: &Function| index(function.site.into());
        let i = self.functions.binary_search_by_key(&site, number).ok()?;
        self.functions.get(i)
    }

    /// The returns of a site's function that must stay as they are.
    pub(super) fn fixed_of(&self, site: usize) -> impl Iterator<Item = LeftOut> {
        let first = self.fixed.partition_point(|out| index(out.site.into()) < site);
        let of_site = move |out: &&LeftOut| index(out.site.into()) == site;
        self.fixed[first..].iter().take_while(of_site).copied()
    }

    /// The length of an exit's window if it needs so many bytes.
    pub(super) fn len(&self, exit: &Exit, needed: u8) -> u8 {
        if needed <= exit.shortest {
            return exit.shortest;
        }
        let starts = self.instructions(exit, exit.longest).map(|(address, _)| exit.end() - address);
        let lens = starts.filter_map(|len| u8::try_from(len).ok());
        lens.filter(|&len| len >= needed).last().unwrap_or(exit.longest)
    }

    /// A register that a jump at the start of a window may use.
    pub(super) fn scratch(&self, exit: &Exit, len: u8) -> Option<u8> {
        let instructions = self.instructions(exit, len);
        let taken = instructions.fold(0, |set, (_, i)| set | occupied(&i, exit.reads));
        SCRATCH.into_iter().find(|&register| taken >> register & 1 == 0)
    }
}

/// The registers that the jump in the place of an instruction must leave alone.
fn occupied(instruction: &Instruction, function: u32) -> u32 {
    match instruction.kind {
        // In the stub, a branch jumps by the same register.
        Kind::Branch { .. } => instruction.reads | function,
        _ => instruction.reads,
    }
}
