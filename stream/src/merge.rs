//! Merges the records of all vCPUs into one order.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BinaryHeap, VecDeque};

/// Merges queues that are ordered in themselves (one per vCPU) by time.
///
/// Nothing is ever dropped, and the order inside a queue is never changed: an item whose
/// time goes back takes the time of its predecessor. Equal times are given in the order of
/// the queues. Items are held until [`Merger::drain`] is told that no earlier ones can come.
#[derive(Debug)]
pub struct Merger<T> {
    queues: Vec<Queue<T>>,
    held: usize,
    /// The highest time that was given.
    given: u64,
}

#[derive(Debug)]
struct Queue<T> {
    items: VecDeque<(u64, T)>,
    /// Time of the last item that came in.
    last: u64,
    late: u64,
}

impl<T> Merger<T> {
    /// A merger of so many queues.
    #[must_use]
    pub fn new(queues: usize) -> Self {
        let queues =
            (0..queues).map(|_| Queue { items: VecDeque::new(), last: 0, late: 0 }).collect();
        Self { queues, held: 0, given: 0 }
    }

    /// Items that wait.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held
    }

    /// Items of each queue that came when later ones, of any queue, had been given.
    pub fn late(&self) -> impl Iterator<Item = u64> {
        self.queues.iter().map(|queue| queue.late)
    }

    /// How many items wait in each queue.
    pub fn waiting(&self) -> impl Iterator<Item = usize> {
        self.queues.iter().map(|queue| queue.items.len())
    }

    /// Adds an item to a queue; `None` for a queue that does not exist.
    pub fn push(&mut self, queue: usize, time: u64, item: T) -> Option<()> {
        let queue = self.queues.get_mut(queue)?;
        queue.last = queue.last.max(time);
        queue.items.push_back((queue.last, item));
        queue.late += u64::from(queue.last < self.given);
        self.held += 1;
        Some(())
    }

    /// Adds an item at the time of the queue's last one; `None` for a queue that does not
    /// exist.
    pub fn push_now(&mut self, queue: usize, item: T) -> Option<()> {
        self.push(queue, 0, item)
    }

    /// Gives every item up to and with the time `until`, in order.
    ///
    /// # Errors
    /// Stops at the first error of `give`, and returns it.
    pub fn drain<E>(
        &mut self,
        until: u64,
        give: impl FnMut(usize, T) -> Result<(), E>,
    ) -> Result<(), E> {
        self.give(until, usize::MAX, give)
    }

    /// Gives the earliest items, whatever may still come, until no more than `keep` wait.
    ///
    /// # Errors
    /// Stops at the first error of `give`, and returns it.
    pub fn shrink<E>(
        &mut self,
        keep: usize,
        give: impl FnMut(usize, T) -> Result<(), E>,
    ) -> Result<(), E> {
        self.give(u64::MAX, self.held.saturating_sub(keep), give)
    }

    fn give<E>(
        &mut self,
        until: u64,
        mut count: usize,
        mut give: impl FnMut(usize, T) -> Result<(), E>,
    ) -> Result<(), E> {
        let heads = self.queues.iter().enumerate().filter_map(|(index, queue)| {
            let (time, _) = queue.items.front().filter(|(time, _)| *time <= until)?;
            Some(Reverse((*time, index)))
        });
        let mut heads: Heads = heads.collect();
        while let Some((Reverse((_, index)), limit)) = heads.first() {
            let queue = &mut self.queues[index];
            // This queue goes on until another one is earlier.
            let next = loop {
                let Some((time, _)) = queue.items.front() else { break None };
                let time = *time;
                if time > until || count == 0 {
                    break None;
                }
                if Reverse((time, index)) < limit {
                    break Some(Reverse((time, index)));
                }
                if let Some((_, item)) = queue.items.pop_front() {
                    self.held -= 1;
                    self.given = self.given.max(time);
                    count -= 1;
                    give(index, item)?;
                }
            };
            heads.replace_first(next);
        }
        Ok(())
    }
}

/// Time and number of a queue: the greatest is the earliest.
type Head = Reverse<(u64, usize)>;

/// Behind all of them.
const NONE: Head = Reverse((u64::MAX, usize::MAX));

/// So many are kept in order. That is faster than a heap where they are few.
const FEW: usize = 12;

/// What comes first in each queue.
#[derive(Debug)]
enum Heads {
    /// The earliest is the last.
    Few(Vec<Head>),
    Many(BinaryHeap<Head>),
}

impl FromIterator<Head> for Heads {
    fn from_iter<I: IntoIterator<Item = Head>>(heads: I) -> Self {
        let mut heads: Vec<_> = heads.into_iter().collect();
        if heads.len() > FEW {
            return Self::Many(heads.into());
        }
        heads.sort_unstable();
        Self::Few(heads)
    }
}

impl Heads {
    /// The earliest, and the next one.
    #[inline]
    fn first(&self) -> Option<(Head, Head)> {
        match self {
            Self::Few(heads) => {
                let [.., first] = heads[..] else { return None };
                let next = heads.len().checked_sub(2).and_then(|at| heads.get(at));
                Some((first, next.copied().unwrap_or(NONE)))
            }
            Self::Many(heads) => {
                // One of the two below the top.
                let others = heads.as_slice().iter().skip(1).take(2);
                Some((*heads.peek()?, others.max().copied().unwrap_or(NONE)))
            }
        }
    }

    /// The earliest is another one now, or none.
    #[inline]
    fn replace_first(&mut self, next: Option<Head>) {
        match (self, next) {
            (Self::Few(heads), None) => drop(heads.pop()),
            (Self::Few(heads), Some(next)) => {
                // Up to where it belongs.
                let mut at = heads.len().saturating_sub(1);
                while at > 0 && heads[at - 1] > next {
                    heads[at] = heads[at - 1];
                    at -= 1;
                }
                if let Some(place) = heads.get_mut(at) {
                    *place = next;
                }
            }
            (Self::Many(heads), next) => match (next, heads.peek_mut()) {
                (Some(next), Some(mut top)) => *top = next,
                (None, Some(top)) => drop(PeekMut::pop(top)),
                (_, None) => {}
            },
        }
    }
}
