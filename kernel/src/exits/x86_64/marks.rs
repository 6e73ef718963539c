//! A bit for every byte of the kernel's code.

use std::ops::Range;

use crate::read::{index, wide};

/// Marks on addresses of one range; those elsewhere cannot be marked.
#[derive(Debug)]
pub(crate) struct Marks {
    start: u64,
    len: u64,
    words: Vec<u64>,
}

impl Marks {
    /// None marked.
    pub(crate) fn new(range: &Range<u64>) -> Self {
        let len = range.end.saturating_sub(range.start);
        let words = vec![0; index(len.div_ceil(64))];
        Self { start: range.start, len, words }
    }

    pub(crate) fn set(&mut self, address: u64) {
        if let Some((word, bit)) = self.place(address) {
            self.words[word] |= bit;
        }
    }

    /// Marks `count` bytes. Tables say so of a few bytes only.
    pub(crate) fn set_all(&mut self, address: u64, count: u8) {
        (0..count.into()).for_each(|i| self.set(address.wrapping_add(i)));
    }

    pub(super) fn is_set(&self, address: u64) -> bool {
        self.place(address).is_some_and(|(word, bit)| self.words[word] & bit != 0)
    }

    /// Whether one of `count` bytes is marked.
    pub(crate) fn any(&self, address: u64, count: u8) -> bool {
        (0..count.into()).any(|i| self.is_set(address.wrapping_add(i)))
    }

    /// Index of the word that has the address's bit, within bounds.
    fn place(&self, address: u64) -> Option<(usize, u64)> {
        let at = address.wrapping_sub(self.start);
        debug_assert!(self.len <= wide(self.words.len()) * 64);
        (at < self.len).then(|| (index(at / 64), 1 << (at % 64)))
    }
}
