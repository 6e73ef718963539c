//! The integer calling conventions: the words in which a function receives its parameters.
//!
//! System V ABI, AMD64 supplement, 3.2.3; RISC-V ELF psABI, "Integer Calling Convention". Words are
//! numbered: first the registers, then the stack slots of 8 bytes each.

use super::super::Arch;
use super::super::btf::{Btf, Kind};

/// Where a value is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In `count` words from number `first` on, at least one.
    Words { first: u8, count: u8 },
    /// In memory, which this word points to.
    Reference(u8),
    /// In no word: it is empty, a floating-point number, or further away than can be counted.
    Nowhere,
}

/// How a value of a type is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Passed {
    words: u64,
    /// To addresses divisible by 16, where it is on the stack.
    aligned: bool,
    /// Only ever in memory, whatever its size.
    memory: bool,
    float: bool,
}

/// Counts the words as parameters take them.
#[derive(Debug)]
pub(super) struct Convention {
    arch: Arch,
    /// How many registers there are.
    registers: u64,
    /// How many of them are taken.
    taken: u64,
    /// How many stack slots are taken.
    slots: u64,
}

/// How many registers pass parameters.
pub(super) fn registers(arch: Arch) -> &'static [&'static str] {
    match arch {
        Arch::X86_64 => &["rdi", "rsi", "rdx", "rcx", "r8", "r9"],
        Arch::Riscv64 => &["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7"],
    }
}

impl Convention {
    /// At the start of a function that returns a value of this type. None for damaged types.
    pub(super) fn new(btf: &Btf, arch: Arch, result: u32) -> Option<Self> {
        let registers = match arch {
            Arch::X86_64 => 6,
            Arch::Riscv64 => 8,
        };
        // The caller has room for what no registers hold, and passes its address first.
        let taken = u64::from(Passed::of(btf, arch, result)?.in_memory());
        Some(Self { arch, registers, taken, slots: 0 })
    }

    /// Where a value of this type is returned: word 0 stands for the register.
    pub(super) fn result(&self, btf: &Btf, number: u32) -> Option<Place> {
        let passed = Passed::of(btf, self.arch, number)?;
        Some(match self.arch {
            _ if passed.words == 0 || passed.float => Place::Nowhere,
            // Returned again, which RISC-V does not ask for.
            Arch::X86_64 if passed.in_memory() => Place::Reference(0),
            Arch::Riscv64 if passed.in_memory() => Place::Nowhere,
            _ => Place::Words { first: 0, count: u8::try_from(passed.words).ok()? },
        })
    }

    /// The place of the next parameter.
    pub(super) fn next(&mut self, btf: &Btf, number: u32) -> Option<Place> {
        let passed = Passed::of(btf, self.arch, number)?;
        Some(match self.arch {
            _ if passed.words == 0 => Place::Nowhere,
            // In registers of their own, which kernel code does not have.
            Arch::X86_64 if passed.float => Place::Nowhere,
            Arch::X86_64 => {
                if passed.in_memory() || self.taken + passed.words > self.registers {
                    self.stack(passed)
                } else {
                    self.register(passed.words)
                }
            }
            Arch::Riscv64 => {
                let word = Passed { words: 1, aligned: false, memory: false, float: false };
                let place = |this: &mut Self, passed: Passed| match this.registers - this.taken {
                    0 => this.stack(passed),
                    // What does not fit goes on where the stack begins. Pairs of registers are
                    // even for variadic arguments only.
                    left => {
                        this.slots += passed.words.saturating_sub(left);
                        this.register(passed.words)
                    }
                };
                if passed.words > 2 {
                    match place(self, word) {
                        Place::Words { first, .. } => Place::Reference(first),
                        other => other,
                    }
                } else {
                    match place(self, passed) {
                        // Kernel code has no floating-point registers, but nothing shows it.
                        _ if passed.float => Place::Nowhere,
                        place => place,
                    }
                }
            }
        })
    }

    fn register(&mut self, words: u64) -> Place {
        let first = self.taken;
        self.taken = (self.taken + words).min(self.registers);
        words_at(first, words)
    }

    fn stack(&mut self, passed: Passed) -> Place {
        if passed.aligned {
            self.slots = self.slots.next_multiple_of(2);
        }
        let first = self.registers + self.slots;
        self.slots += passed.words;
        words_at(first, passed.words)
    }
}

fn words_at(first: u64, count: u64) -> Place {
    match (u8::try_from(first), u8::try_from(count)) {
        (Ok(first), Ok(count)) => Place::Words { first, count },
        _ => Place::Nowhere,
    }
}

impl Passed {
    /// None for types that no value has.
    fn of(btf: &Btf, arch: Arch, number: u32) -> Option<Self> {
        let seen = btf.see(number)?;
        let one = |words| Self { words, aligned: false, memory: false, float: false };
        Some(match seen.kind {
            Kind::Void => one(0),
            Kind::Pointer(_) => one(1),
            Kind::Int(int) => Self { aligned: int.bytes > 8, ..one(words(int.bytes)) },
            Kind::Enum { bytes, .. } => one(words(bytes)),
            Kind::Float { bytes } => Self { aligned: bytes > 8, float: true, ..one(words(bytes)) },
            Kind::Compound { size, .. } => {
                let inside = Inside::of(btf, seen.number);
                let memory = arch == Arch::X86_64 && inside.misaligned;
                Self { aligned: inside.wide, memory, float: inside.float, ..one(words(size)) }
            }
            // As parameters these are pointers, and the type information says so.
            Kind::Array { .. } | Kind::Forward | Kind::Prototype | Kind::Other => return None,
        })
    }

    /// Whether no registers hold it.
    fn in_memory(self) -> bool {
        self.memory || self.words > 2
    }
}

fn words(bytes: u32) -> u64 {
    u64::from(bytes).div_ceil(8)
}

/// What there is in a struct that decides how it is passed.
#[derive(Clone, Copy, Debug, Default)]
struct Inside {
    /// A member of 16 bytes, aligned to as many.
    wide: bool,
    /// A member that is not aligned as its type asks for.
    misaligned: bool,
    float: bool,
}

impl Inside {
    fn of(btf: &Btf, number: u32) -> Self {
        /// Members of one struct, those of its own structs too. Larger ones are on the stack in
        /// any case.
        const MOST: usize = 256;
        let mut inside = Self::default();
        let mut queue = vec![(number, 0_u64)];
        let mut seen = 0;
        while let Some((compound, base)) = queue.pop() {
            for (_, member) in btf.members_of(compound) {
                seen += 1;
                if seen > MOST {
                    return inside;
                }
                let at = base + u64::from(member.bits);
                inside.member(btf, member.number, at, member.width > 0, &mut queue);
            }
        }
        inside
    }

    fn member(
        &mut self,
        btf: &Btf,
        number: u32,
        bits: u64,
        field: bool,
        queue: &mut Vec<(u32, u64)>,
    ) {
        // An array is aligned as its elements are.
        let mut number = number;
        for _ in 0..8 {
            let Some(seen) = btf.see(number) else { return };
            let bytes = match seen.kind {
                Kind::Array { element, .. } => {
                    number = element;
                    continue;
                }
                Kind::Compound { .. } => {
                    queue.push((seen.number, bits));
                    return;
                }
                Kind::Int(int) if int.is_field() => return,
                Kind::Int(int) => int.bytes,
                Kind::Enum { bytes, .. } => bytes,
                Kind::Float { bytes } => {
                    self.float = true;
                    bytes
                }
                Kind::Pointer(_) => 8,
                _ => return,
            };
            self.wide |= bytes > 8;
            self.misaligned |= !field && bytes > 0 && !bits.is_multiple_of(8 * u64::from(bytes));
            return;
        }
    }
}
