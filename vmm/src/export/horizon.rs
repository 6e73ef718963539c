//! For each place of a finished stream, the earliest time that follows, so that events can be shown
//! in one order.

use std::io::Read;

use crate::stream::{Frame, GuestClock, Mark, Reader, StreamError};

/// The resolution of places, in bytes of the stream.
const GRAIN: u64 = 64 << 10;
/// A mark that is further behind what is before it is not waited for, in seconds: whoever makes
/// one may name any time.
const MARK_BEHIND: u64 = 1;

/// For every place of a stream the earliest time of what comes behind it.
///
/// [`Player::with_horizon`](super::Player::with_horizon) shows a stream in order by it, whatever its
/// watermarks say and however late a record is, and lets nothing wait longer than it must. It has 16
/// bytes for each 64 KiB of the stream at most.
#[derive(Debug, Default)]
pub struct Horizon {
    /// Offset behind a frame, and the earliest time of that and of all behind; both rise.
    bounds: Vec<(u64, u64)>,
    /// The offset up to which this is known.
    end: u64,
    /// The first of `bounds` that is not passed yet.
    next: usize,
    /// The last offset that was asked for.
    offset: u64,
    guest_clock: Option<GuestClock>,
}

impl Horizon {
    /// Reads a stream to its end, or as far as it is whole.
    ///
    /// # Errors
    /// When the source fails. What is wrong with the stream is told by who reads it then.
    pub fn scan(source: impl Read) -> Result<Self, StreamError> {
        let mut horizon = Self::default();
        let mut reader = match Reader::trusting(source) {
            Err(error @ StreamError::Io(_)) => return Err(error),
            Err(_) => return Ok(horizon),
            Ok(reader) => reader,
        };
        let behind = reader.header().clock_hz.saturating_mul(MARK_BEHIND);
        let vcpus = usize::try_from(reader.header().vcpus).unwrap_or(0);
        // As the merger has them: of a vCPU, none goes back.
        let mut last = vec![0_u64; vcpus];
        let mut newest = 0;
        loop {
            let earliest = match reader.next_frame() {
                Err(error @ StreamError::Io(_)) => return Err(error),
                Ok(None) | Err(_) => break,
                Ok(Some(Frame::Records(batch))) => {
                    let vcpu = usize::try_from(batch.vcpu).ok();
                    let Some(last) = vcpu.and_then(|vcpu| last.get_mut(vcpu)) else { continue };
                    let mut earliest = None;
                    for time in batch.times() {
                        *last = time.max(*last);
                        earliest.get_or_insert(*last);
                    }
                    newest = newest.max(*last);
                    earliest
                }
                Ok(Some(Frame::Loss(loss))) => {
                    usize::try_from(loss.vcpu).ok().and_then(|vcpu| last.get(vcpu)).copied()
                }
                Ok(Some(Frame::Mark(Mark { ticks, .. }))) => {
                    newest = newest.max(ticks);
                    (ticks >= newest.saturating_sub(behind)).then_some(ticks)
                }
                Ok(Some(Frame::End(summary))) => {
                    horizon.guest_clock = summary.guest_clock;
                    None
                }
                Ok(Some(_)) => None,
            };
            horizon.end = reader.offset();
            if let Some(earliest) = earliest {
                horizon.add(earliest);
            }
        }
        Ok(horizon)
    }

    /// The clock of the guest's log, if the stream has an end that tells it.
    #[must_use]
    pub fn guest_clock(&self) -> Option<&GuestClock> {
        self.guest_clock.as_ref()
    }

    fn add(&mut self, earliest: u64) {
        let end = self.end;
        while self.bounds.last().is_some_and(|&(_, bound)| bound >= earliest) {
            self.bounds.pop();
        }
        // The offset before the present one's begin does not matter: up to its end it is to come.
        match self.bounds.last_mut() {
            Some((offset, _)) if *offset / GRAIN == end / GRAIN => *offset = end,
            _ => self.bounds.push((end, earliest)),
        }
    }

    /// Nothing that begins at `offset` or behind it has a time up to this; `None` where that is
    /// not known. Offsets must not go back.
    pub(super) fn at(&mut self, offset: u64) -> Option<u64> {
        self.offset = offset;
        while self.bounds.get(self.next).is_some_and(|&(end, _)| end <= offset) {
            self.next += 1;
        }
        match self.bounds.get(self.next) {
            Some(&(_, bound)) => Some(bound.saturating_sub(1)),
            None => (offset < self.end).then_some(u64::MAX),
        }
    }

    /// Whether more of what it knows is to come.
    pub(super) fn is_within(&self) -> bool {
        self.offset < self.end
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Event, Export, Player};
    use super::*;
    use crate::stream::{EntryRecord, Header, LossReason, MarkKind, Summary, Writer, sample};
    use proptest::prelude::*;
    use std::io;

    /// Times of events in the order in which they are shown, and texts of notes.
    #[derive(Debug, Default)]
    struct Shown(Vec<u64>, Vec<String>);

    impl Export for Shown {
        fn begin(&mut self, _: &Header) -> io::Result<()> {
            Ok(())
        }
        fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
            match event {
                Event::Entry(entry) => self.0.push(entry.timestamp),
                Event::Mark(mark) if mark.kind == MarkKind::Note => self.1.push(mark.text.clone()),
                Event::Mark(mark) => self.0.push(mark.ticks),
                _ => {}
            }
            Ok(())
        }
        fn end(&mut self, _: Option<&Summary>) -> io::Result<()> {
            Ok(())
        }
    }

    fn shown(mut player: Player<Shown>, stream: &[u8]) -> (Shown, u64) {
        for piece in stream.chunks(1000) {
            player.push(piece).expect("a stream");
        }
        player.finish().expect("whole");
        let late = player.late();
        (player.into_export(), late)
    }

    /// What a writer does next.
    #[derive(Clone, Debug)]
    enum Step {
        /// Writes records of a vCPU, so many and so far apart.
        Records(u32, u64, u64),
        Loss(u32),
        Mark(u64),
        Watermark(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..3_u32, 1..400_u64, 0..1000_u64).prop_map(|(v, n, by)| Step::Records(v, n, by)),
            1 => (0..3_u32).prop_map(Step::Loss),
            1 => (0..400_000_u64).prop_map(Step::Mark),
            2 => (0..400_000_u64).prop_map(Step::Watermark),
        ]
    }

    fn write(steps: &[Step]) -> Vec<u8> {
        let mut writer = begin(steps);
        writer.end(&Summary::default()).expect("memory");
        writer.into_inner().expect("memory")
    }

    fn begin(steps: &[Step]) -> Writer<Vec<u8>> {
        let header = Header { vcpus: 3, clock_hz: 1_000_000_000, ..sample::header() };
        let mut writer = Writer::new(Vec::new(), &header).expect("header");
        let mut times = [1_u64; 3];
        for step in steps {
            match *step {
                Step::Records(vcpu, count, by) => {
                    let time = times.get_mut(vcpu as usize).expect("a vCPU");
                    let mut record = || {
                        *time += by;
                        EntryRecord::new(*time, 1, 2, 3)
                    };
                    let records: Vec<_> = (0..count).map(|_| record()).collect();
                    writer.entries(vcpu, &records)
                }
                Step::Loss(vcpu) => writer.loss(vcpu, 1, LossReason::Full),
                Step::Mark(ticks) => {
                    writer.mark(&Mark { ticks, kind: MarkKind::Pause, ..sample::mark() })
                }
                // True or not.
                Step::Watermark(ticks) => writer.watermark(ticks),
            }
            .expect("memory");
        }
        writer
    }

    proptest! {
        // However late the records of a vCPU come, and whatever watermarks say.
        #[test]
        fn a_finished_stream_is_shown_in_order(steps in prop::collection::vec(step(), 0..80)) {
            let stream = write(&steps);
            let horizon = Horizon::scan(&*stream).expect("memory");
            let player = Player::new(Shown::default()).with_horizon(horizon);
            let (Shown(times, notes), late) = shown(player, &stream);
            let (Shown(mut live, _), _) = shown(Player::new(Shown::default()), &stream);
            prop_assert!(times.is_sorted());
            prop_assert_eq!(late, 0);
            prop_assert!(notes.is_empty());
            live.sort_unstable();
            prop_assert_eq!(times, live);
        }
    }

    // A line of the console is written by another thread than a mark of a pause, and may come behind it.
    #[test]
    fn marks_are_shown_by_their_times() {
        let mark = |ms: u64| Step::Mark(ms * 1_000_000);
        let steps = [mark(2_000), mark(1_998), Step::Watermark(1), mark(2_010), mark(2_003)];
        let stream = write(&[&steps[..], &[mark(5), mark(2_020), mark(2_015)]].concat());
        let horizon = Horizon::scan(&*stream).expect("memory");
        let player = Player::new(Shown::default()).with_horizon(horizon);
        let (Shown(times, _), _) = shown(player, &stream);
        let times: Vec<_> = times.iter().map(|ticks| ticks / 1_000_000).collect();
        assert_eq!(times, [5, 1_998, 2_000, 2_003, 2_010, 2_015, 2_020]);
        // While they come, too, as long as they wait.
        let stream = write(&[&steps[..], &[Step::Watermark(2_010_000_000)]].concat());
        let (Shown(times, _), _) = shown(Player::new(Shown::default()), &stream);
        let times: Vec<_> = times.iter().map(|ticks| ticks / 1_000_000).collect();
        assert_eq!(times, [1_998, 2_000, 2_003, 2_010]);
    }

    // Memory: what can be shown is, though all of one vCPU comes after all of another only now and
    // then.
    #[test]
    fn nothing_waits_longer_than_it_must() {
        let round = |_| [Step::Records(0, 10_000, 7), Step::Records(1, 10_000, 7)];
        let stream = write(&(0..100).flat_map(round).collect::<Vec<_>>());
        let horizon = Horizon::scan(&*stream).expect("memory");
        let mut player = Player::new(Shown::default()).with_horizon(horizon);
        for piece in stream.chunks(1000) {
            player.push(piece).expect("a stream");
            assert!(player.held() <= 25_000, "{}", player.held());
        }
    }

    // While a trace is being written nobody knows what comes: one writer that is preempted does not
    // stop everything for long, and what comes late is shown all the same, and counted.
    #[test]
    fn a_live_stream_is_not_stopped_by_one_writer_and_says_so() {
        let records = |vcpu, count| Step::Records(vcpu, count, 1_000_000);
        let steps = [records(0, 20), Step::Watermark(1), records(0, 180), Step::Watermark(1)];
        let mut player = Player::new(Shown::default());
        let late = [&steps[..], &[records(1, 5)]].concat();
        let (whole, before) = (write(&late), begin(&steps).into_inner().expect("memory"));
        player.push(&before).expect("a stream");
        assert!((95..200).contains(&player.held()), "{} wait", player.held());
        let (Shown(times, notes), late) = shown(Player::new(Shown::default()), &whole);
        assert_eq!((times.len(), late), (205, 5));
        assert_eq!(notes, ["5 records came late: they are shown after later ones"]);
    }
}
