//! Pseudo-random numbers for tests.

use crate::hart::mix;

/// Numbers that are the same in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 += 1;
        mix(&[self.0])
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Registers whose values branches tell apart, and often enough do not.
    pub(crate) fn registers(&mut self) -> [u64; 32] {
        let mut registers = [0; 32];
        for register in &mut registers[1..] {
            *register = match self.below(4) {
                0 => 0,
                1 => self.below(3).wrapping_sub(1),
                _ => self.next(),
            };
        }
        // A place to return to, and a stack.
        registers[1] = 0xffff_ffff_9000_0000 + 2 * self.below(1 << 20);
        registers[2] = self.next() & !15;
        registers
    }
}
