//! What waits for its turn, by queue.

use std::collections::VecDeque;
use std::mem;

use super::ahead::Held;
use super::names::LATER;
use crate::stream::{Header, Loss, Mark};

/// An item that waits until it is shown, and is no record.
#[derive(Debug)]
pub(super) enum Other {
    Loss(Loss),
    Mark(Box<Mark>),
}

/// Most records of a part, where they come one by one.
const PART: usize = 4096;
/// Room for so many is used again.
const SPARE: usize = 64;

/// Items of a queue, in their order.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    parts: VecDeque<Part>,
    /// Records of the first part that are gone.
    gone: usize,
    /// What is beside records, one after the other: see [`Ahead::hold`](super::ahead::Ahead::hold).
    pub(super) beside: VecDeque<u64>,
    /// For the next part.
    spare: Vec<Held>,
    /// Parts with names that have come since there were other names.
    named: usize,
}

#[derive(Debug)]
enum Part {
    /// At least one.
    Records(Vec<Held>),
    /// The same, with names looked up.
    Named(Vec<Held>),
    Other(Other),
}

impl Waiting {
    /// Of all vCPUs, and of marks.
    pub(super) fn queues(header: &Header) -> Vec<Self> {
        let queues = usize::try_from(header.vcpus).unwrap_or(0) + 1;
        (0..queues).map(|_| Self::default()).collect()
    }

    /// A record is the last.
    #[inline]
    pub(super) fn add(&mut self, held: Held) {
        if let Some(Part::Records(records)) = self.parts.back_mut()
            && records.len() < PART
        {
            records.push(held);
        } else {
            let mut records = mem::take(&mut self.spare);
            records.push(held);
            self.parts.push_back(Part::Records(records));
        }
    }

    /// Records are the last, of which the names were looked up.
    pub(super) fn add_all(&mut self, records: Vec<Held>) {
        if !records.is_empty() {
            self.named += 1;
            self.parts.push_back(Part::Named(records));
        }
    }

    /// There are other names from here on.
    pub(super) fn rename(&mut self) {
        // They are the newest: all before were seen to when there were other names last.
        for part in self.parts.iter_mut().rev() {
            if self.named == 0 {
                break;
            }
            if let Part::Named(records) = part {
                self.named -= 1;
                let mut records = mem::take(records);
                for held in &mut records {
                    (held.function_index, held.other_index) = (LATER, LATER);
                }
                *part = Part::Records(records);
            }
        }
        // Others are gone.
        self.named = 0;
    }

    /// What is no record is the last.
    pub(super) fn add_other(&mut self, item: Other) {
        self.parts.push_back(Part::Other(item));
    }

    /// Takes the first item, if it is a record.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Held> {
        let held = *self.first()?.0;
        self.pass();
        Some(held)
    }

    /// The first item, if it is a record, and what is beside that and later ones. It is taken by
    /// [`Waiting::pass`]: who needs it only until then does without a copy.
    #[inline]
    pub(super) fn first(&mut self) -> Option<(&mut Held, &mut VecDeque<u64>)> {
        let Some(Part::Records(records) | Part::Named(records)) = self.parts.front_mut() else {
            return None;
        };
        Some((records.get_mut(self.gone)?, &mut self.beside))
    }

    /// The first item, which is a record, is gone.
    #[inline]
    pub(super) fn pass(&mut self) {
        self.gone += 1;
        if let Some(Part::Records(records) | Part::Named(records)) = self.parts.front()
            && self.gone >= records.len()
        {
            self.next_part();
        }
    }

    /// The same if it is none.
    pub(super) fn next_other(&mut self) -> Option<Other> {
        match self.parts.pop_front()? {
            Part::Other(item) => Some(item),
            records => {
                self.parts.push_front(records);
                None
            }
        }
    }

    #[inline(never)]
    fn next_part(&mut self) {
        self.gone = 0;
        if let Some(Part::Records(mut records)) = self.parts.pop_front()
            && records.capacity() <= SPARE
        {
            records.clear();
            self.spare = records;
        }
    }

    /// Where names of tasks are that are in use.
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> {
        let records = self.parts.iter().map(|part| match part {
            Part::Records(records) | Part::Named(records) => &records[..],
            Part::Other(_) => &[],
        });
        records.flatten().skip(self.gone).map(|held| held.slot)
    }

    /// The values of a record, which is the next: its format, what failed, and words.
    pub(super) fn values(&mut self, words: &mut Vec<u64>) -> Option<(u32, u64)> {
        let (head, failed) = (self.beside.pop_front()?, self.beside.pop_front()?);
        let count = usize::from(head.to_le_bytes()[0]).min(self.beside.len());
        words.extend(self.beside.drain(..count));
        Some((u32::try_from(head >> 8).ok()?, failed))
    }
}

/// Moves what is beside a record, which is the next of `beside`, behind `to`, but for the duration, which is returned.
#[inline(never)]
pub(super) fn move_beside(
    held: &Held,
    beside: &mut VecDeque<u64>,
    to: &mut Vec<u64>,
) -> Option<u64> {
    if held.has_value() {
        to.extend(beside.pop_front());
    }
    let took = if held.kind().is_whole() { beside.pop_front() } else { None };
    if held.has_format() {
        let words = beside.front().map_or(0, |head| usize::from(head.to_le_bytes()[0]));
        let all = (2 + words).min(beside.len());
        to.extend(beside.drain(..all));
    }
    took
}

/// How many words of values wait, told by who knows the order but has not got them.
#[derive(Debug, Default)]
pub(super) struct Words {
    queues: Vec<Owners>,
    words: usize,
}

#[derive(Debug, Default)]
struct Owners {
    /// Items that came in.
    items: u64,
    /// Numbers of those that have words, and how many.
    owners: VecDeque<(u64, u32)>,
}

impl Words {
    pub(super) fn new(queues: usize) -> Self {
        Self { queues: (0..queues).map(|_| Owners::default()).collect(), words: 0 }
    }

    /// Words that wait.
    pub(super) fn len(&self) -> usize {
        self.words
    }

    /// An item has come into a queue, with so many words.
    #[inline]
    pub(super) fn add(&mut self, queue: usize, words: usize) {
        let Some(of) = self.queues.get_mut(queue) else { return };
        if words > 0 {
            of.owners.push_back((of.items, u32::try_from(words).unwrap_or(u32::MAX)));
            self.words += words;
        }
        of.items += 1;
    }

    /// So many items of each queue wait by now.
    pub(super) fn keep(&mut self, waiting: impl Iterator<Item = usize>) {
        if self.words == 0 {
            return;
        }
        for (of, waiting) in self.queues.iter_mut().zip(waiting) {
            let gone = of.items.saturating_sub(u64::try_from(waiting).unwrap_or(0));
            while let Some((_, words)) = of.owners.pop_front_if(|(item, _)| *item < gone) {
                self.words = self.words.saturating_sub(usize::try_from(words).unwrap_or(0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Too few would end the bound on memory, too many the order.
    #[test]
    fn words_are_counted_while_they_wait() {
        let mut words = Words::new(2);
        for (queue, count) in [(0, 0), (0, 3), (1, 5), (0, 0), (0, 7), (2, 9)] {
            words.add(queue, count);
        }
        let mut after = |waiting: [usize; 2]| {
            words.keep(waiting.into_iter());
            words.len()
        };
        assert_eq!([after([4, 1]), after([3, 1]), after([2, 1])], [15, 15, 12]);
        assert_eq!([after([1, 0]), after([0, 0])], [7, 0]);
    }
}
