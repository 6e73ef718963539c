//! Takes what is in the rings at the end, and in flight recorders at a snapshot. A ring may be larger than
//! the output's queue should become: so it is taken in pieces, as fast as the output accepts them.

use super::write::Last;
use super::{BATCH, Drain, reason};
use crate::serve::Patience;
use crate::stream::LossReason;
use crate::tracer::ring::RingReader;
use crate::tracer::ring::rest::Rest;
use std::io;
use std::time::{Duration, Instant};

/// How long a snapshot waits for the output in all: no vCPU runs meanwhile.
pub const SNAPSHOT_TIME: Duration = Duration::from_secs(30);

/// What a snapshot has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Records.
    pub records: u64,
    /// Nothing was left because the output took too long.
    pub whole: bool,
}

impl Drain {
    /// Takes what flight recorders have, while nobody writes there. What was begun and is not finished
    /// stays there, and counts as lost when it is overwritten. So does what the output takes too long
    /// for: it is for the next snapshot, or the end.
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn snapshot(&mut self) -> io::Result<Snapshot> {
        let left = self.bounded();
        self.snapshot_within(left)
    }

    /// How long the output may take from now on while no vCPU runs, by what it has taken then (see
    /// [`Primary::wait_for_room`](crate::serve::Primary)).
    pub(super) fn bounded(&mut self) -> impl Fn(u64) -> Option<Duration> + Copy + use<> {
        let (begun, patience) = (Instant::now(), Patience::new());
        let before = self.writer.get_mut().primary().taken();
        move |taken| {
            let in_all = SNAPSHOT_TIME.checked_sub(begun.elapsed())?;
            Some(patience.left(taken.saturating_sub(before))?.min(in_all))
        }
    }

    /// The same as long as `left` allows (see [`Primary::wait_for_room`](crate::serve::Primary)).
    ///
    /// # Errors
    /// When the primary output fails.
    pub fn snapshot_within(
        &mut self,
        left: impl Fn(u64) -> Option<Duration>,
    ) -> io::Result<Snapshot> {
        self.tasks.start_pass();
        let mut snapshot = Snapshot { records: 0, whole: true };
        for vcpu in 0..self.readers.len() {
            let Some(reader) = self.readers.get_mut(vcpu).filter(|reader| reader.overwrites())
            else {
                continue;
            };
            let (lost, mut rest) = reader.rest();
            self.lost(vcpu, lost, LossReason::Overwritten)?;
            snapshot.records += self.exits.gather(vcpu, true, &mut self.writer)?;
            snapshot.records += self.take_pieces(vcpu, &mut rest, &left)?;
            if !rest.is_empty() {
                snapshot.whole = false;
                break;
            }
        }
        self.writer.flush()?;
        Ok(snapshot)
    }

    /// Writes what is left in a ring, as long as the output has room for it in time: how many records.
    fn take_pieces(
        &mut self,
        vcpu: usize,
        rest: &mut Rest,
        left: &impl Fn(u64) -> Option<Duration>,
    ) -> io::Result<u64> {
        let mut records = 0;
        loop {
            records += self.take_piece(vcpu, rest)?;
            if rest.is_empty() || !self.writer.get_mut().primary().wait_for_room(left) {
                return Ok(records);
            }
        }
    }

    /// Writes the next piece of what is left in a ring: how many records.
    fn take_piece(&mut self, vcpu: usize, rest: &mut Rest) -> io::Result<u64> {
        self.pulse.beat();
        self.raw.clear();
        let Some(reader) = self.readers.get_mut(vcpu) else { return Ok(0) };
        let Some(order) = self.orders.get_mut(vcpu) else { return Ok(0) };
        order.resume(&mut self.raw);
        let before = self.raw.records.len();
        reader.take_rest(rest, &mut self.raw, BATCH);
        let taken = (self.raw.records.len() - before) as u64;
        let last = rest.is_empty();
        order.settle(&mut self.raw, last);
        self.write(vcpu, if last { Last::All } else { Last::None })?;
        Ok(taken)
    }

    /// Takes what is in the rings until nothing comes, at the end of what writes there, as long as `left` allows:
    /// then what is still there is lost. How many records that are; `None`: nothing was in the way.
    pub(super) fn take_until_stuck(
        &mut self,
        left: impl Fn(u64) -> Option<Duration> + Copy,
    ) -> io::Result<Option<u64>> {
        loop {
            let is_stuck = !self.writer.get_mut().primary().wait_for_room(left);
            if !is_stuck && !self.pass()? {
                return Ok(None);
            }
            // What was on its way has come. A guest may go on to write there for ever.
            self.readers.iter_mut().for_each(RingReader::seal);
            if is_stuck {
                return self.give_up().map(Some);
            }
        }
    }

    /// Takes all that is left in a ring at the end, as long as the output takes it. Returns how many
    /// records were left in a flight recorder.
    pub(super) fn take_rest(
        &mut self,
        vcpu: usize,
        left: impl Fn(u64) -> Option<Duration>,
    ) -> io::Result<u64> {
        let overwrites = self.overwrites(vcpu);
        let Some(reader) = self.readers.get_mut(vcpu) else {
            self.write_exits(vcpu)?;
            return Ok(0);
        };
        let (lost, mut rest) = reader.rest();
        self.lost(vcpu, lost, reason(overwrites))?;
        self.exits.gather(vcpu, overwrites, &mut self.writer)?;
        self.take_pieces(vcpu, &mut rest, &left)?;
        let left_there = if rest.is_empty() { 0 } else { self.leave(vcpu, &mut rest)? };
        let unfinished = std::mem::take(&mut rest.unfinished).into_iter();
        let unfinished = unfinished.map(|program| self.programs.tracers(program)).sum();
        self.lost(vcpu, unfinished, LossReason::Unfinished)?;
        self.write_exits(vcpu)?;
        Ok(left_there)
    }

    /// Writes the exits for which nothing has to wait any more. There may be more than had room among those that
    /// waited for records.
    fn write_exits(&mut self, vcpu: usize) -> io::Result<()> {
        let overwrites = self.overwrites(vcpu);
        self.raw.clear();
        while self.exits.gather(vcpu, overwrites, &mut self.writer)? > 0 {
            self.write(vcpu, Last::All)?;
            if self.exits.waiting(vcpu) > 0 {
                break;
            }
        }
        Ok(())
    }

    /// Nobody takes what is left in a ring any more: it is lost. How many records.
    fn leave(&mut self, vcpu: usize, rest: &mut Rest) -> io::Result<u64> {
        let Some(reader) = self.readers.get_mut(vcpu) else { return Ok(0) };
        let overwrites = reader.overwrites();
        let given_up = reader.leave_rest(rest);
        self.lost(vcpu, given_up, reason(overwrites))?;
        // Those of the last piece that wait for newer ones.
        self.take_piece(vcpu, rest)?;
        Ok(given_up)
    }
}
