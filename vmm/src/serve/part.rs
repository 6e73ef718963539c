//! What a part of a stream has of it, by time, vCPU and task.

use std::collections::HashMap;

use crate::export::{Absent, Pick, Seen, Span, Unmet, task_name};
use crate::kernel::glob;
use crate::stream::{Dictionaries, Header, Loss, Mark, MarkKind, Stretch};

/// Chooses what is of the part.
#[derive(Debug)]
pub(super) struct Part {
    pick: Pick,
    /// What of it no record was of so far.
    unmet: Unmet,
    /// When the records are.
    span: Span,
    /// By which times are told.
    clock: Header,
    /// The ticks that are time 0, when they are not those of the header.
    zero: Option<u64>,
    /// The first and the last ticks of the part, once the header was seen.
    first: u64,
    last: u64,
    vcpus: Vec<Vcpu>,
    /// Whether the names of tasks are wanted, by process id, until they change.
    known: HashMap<u32, bool>,
}

#[derive(Clone, Debug, Default)]
struct Vcpu {
    /// The time of its newest record.
    newest: u64,
    /// Losses behind that record.
    losses: Vec<Loss>,
}

impl Part {
    /// Most names that are remembered.
    const KNOWN: usize = 1 << 16;

    /// What `pick` chooses by time, vCPU, process id and name; `zero` are the ticks of time 0, if not
    /// those of the header.
    pub(super) fn new(pick: Pick, zero: Option<u64>) -> Self {
        let (vcpus, known, unmet) = (Vec::new(), HashMap::new(), Unmet::of(&pick));
        let (span, clock) = (Span::default(), Header::default());
        Self { pick, unmet, span, clock, zero, first: 0, last: u64::MAX, vcpus, known }
    }

    /// # Errors
    /// When the guest of this header has not all vCPUs.
    pub(super) fn check(&self, header: &Header) -> Result<(), Absent> {
        Absent::check_cpus(&self.pick.cpus, header.vcpus)
    }

    /// Lines about what no record was of.
    pub(super) fn unmet(&self) -> impl Iterator<Item = String> + '_ {
        self.unmet.notes(Seen::All).chain(self.span.note(&self.clock, &self.pick, Seen::All))
    }

    pub(super) fn begin(&mut self, header: &Header) {
        let start = self.zero.unwrap_or(header.clock_start);
        let clock = Header { clock_start: start, ..header.clone() };
        let from = |nanoseconds| earliest(&clock, nanoseconds);
        // An end before all ticks, or a beginning after them: no ticks are in between.
        self.first =
            self.pick.since.map_or(Some(0), |since| from(since.into())).unwrap_or(u64::MAX);
        let behind = self.pick.until.and_then(|until| from(i128::from(until) + 1));
        self.last = match behind {
            Some(behind) => behind.saturating_sub(1),
            None => u64::MAX,
        };
        self.clock = clock;
        self.vcpus = vec![Vcpu::default(); usize::try_from(header.vcpus).unwrap_or(0)];
    }

    fn has_vcpu(&self, vcpu: u32) -> bool {
        self.pick.cpus.is_empty() || self.pick.cpus.contains(&vcpu)
    }

    /// Whether a record is of the part.
    pub(super) fn has(&mut self, vcpu: u32, ticks: u64, pid: u32, names: &Dictionaries) -> bool {
        if !self.unmet.is_empty() {
            self.unmet.meet((vcpu, pid), &task_name(pid, names.task(pid)));
        }
        let in_time = (self.first..=self.last).contains(&ticks);
        self.span.see(ticks, in_time);
        let pick = &self.pick;
        in_time
            && (pick.cpus.is_empty() || pick.cpus.contains(&vcpu))
            && (pick.pids.is_empty() || pick.pids.contains(&pid))
            && (pick.comms.is_empty() || self.has_name(pid, names))
    }

    fn has_name(&mut self, pid: u32, names: &Dictionaries) -> bool {
        if self.known.len() > Self::KNOWN {
            self.known.clear();
        }
        let comms = &self.pick.comms;
        *self.known.entry(pid).or_insert_with(|| {
            let name = task_name(pid, names.task(pid));
            comms.iter().any(|pattern| glob::matches(pattern, &name))
        })
    }

    /// A task has another name from here on.
    pub(super) fn renamed(&mut self, pid: u32) {
        self.known.remove(&pid);
    }

    /// Records of a vCPU are missing here. Whether they may be of the part is known with the next
    /// record of the vCPU.
    pub(super) fn lost(&mut self, loss: Loss) {
        let has = self.has_vcpu(loss.vcpu);
        let Some(vcpu) = index(loss.vcpu).and_then(|it| self.vcpus.get_mut(it)).filter(|_| has)
        else {
            return;
        };
        // So that there are no more of them than reasons, however long no record comes.
        match vcpu.losses.iter_mut().find(|it| it.reason == loss.reason) {
            Some(known) => {
                known.count = known.count.saturating_add(loss.count);
                known.total = loss.total;
            }
            None => vcpu.losses.push(loss),
        }
    }

    /// The losses before this record that may be of the part.
    #[inline]
    pub(super) fn before(&mut self, vcpu: u32, ticks: u64) -> Vec<Loss> {
        let Some(vcpu) = index(vcpu).and_then(|it| self.vcpus.get_mut(it)) else {
            return Vec::new();
        };
        let (from, losses) = (vcpu.newest, std::mem::take(&mut vcpu.losses));
        vcpu.newest = ticks.max(from);
        if from <= self.last && ticks >= self.first { losses } else { Vec::new() }
    }

    /// The losses that no record follows.
    pub(super) fn rest(&mut self) -> Vec<Loss> {
        let vcpus = 0..u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX);
        vcpus.flat_map(|vcpu| self.before(vcpu, u64::MAX)).collect()
    }

    /// Whether a mark is of the part, or has to be known to understand it.
    pub(super) fn has_mark(&self, mark: &Mark) -> bool {
        // Without those of kind `detach`, a second kernel of the guest's is the part's first (analyze/boot).
        let tells = [MarkKind::Attach, MarkKind::Filter, MarkKind::Events, MarkKind::Clock];
        let first = if tells.contains(&mark.kind) { 0 } else { self.first };
        let said = mark.kind == MarkKind::Console && self.pick.is_of_some();
        (first..=self.last).contains(&mark.ticks) && !said
    }

    /// What of a stretch is of the part.
    pub(super) fn cut(&self, stretch: Stretch) -> Option<Stretch> {
        let (since, until) = (stretch.since.max(self.first), stretch.until.min(self.last));
        (since <= until).then_some(Stretch { since, until, ..stretch })
    }

    /// Whether what was counted on a vCPU is of the part.
    pub(super) fn has_counts(&self, vcpu: u32) -> bool {
        self.pick.takes_counts(vcpu)
    }

    /// What a reader is told of it.
    pub(super) fn note(&self) -> String {
        let moment = |name: &str, at: Option<u64>| {
            at.map(|at| format!(" {name} {}.{:09} s", at / 1_000_000_000, at % 1_000_000_000))
        };
        let list = |name: &str, list: String| (!list.is_empty()).then(|| format!(" {name} {list}"));
        let numbers = |all: &[u32]| all.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let parts = [
            moment("since", self.pick.since),
            moment("until", self.pick.until),
            list("vCPU", numbers(&self.pick.cpus)),
            list("pid", numbers(&self.pick.pids)),
            list("task", self.pick.comms.join(",")),
        ];
        format!("a part of the trace:{}", parts.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

fn index(vcpu: u32) -> Option<usize> {
    usize::try_from(vcpu).ok()
}

/// The first ticks that are not before this time; `None` when all are.
fn earliest(clock: &Header, nanoseconds: i128) -> Option<u64> {
    let is_before = |ticks| clock.nanoseconds(ticks) < nanoseconds;
    if is_before(u64::MAX) {
        return None;
    }
    let (mut low, mut high) = (0, u64::MAX);
    while low < high {
        let middle = low + (high - low) / 2;
        if is_before(middle) { low = middle + 1 } else { high = middle }
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use super::super::{Globs, Refilter};
    use super::*;
    use crate::stream::{EntryRecord, Frame, LossReason, Reader, Summary, Writer};
    use proptest::prelude::*;
    use std::io::Write as _;

    /// What a vCPU does next: a record so many ticks later, or a loss of so many.
    #[derive(Clone, Debug)]
    enum Step {
        Record(u64),
        Loss(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<(u32, Step)>> {
        let step = prop_oneof![(0..20_u64).prop_map(Step::Record), (1..5_u64).prop_map(Step::Loss)];
        prop::collection::vec((0..3_u32, step), 0..60)
    }

    fn header() -> Header {
        Header { vcpus: 3, clock_hz: 1_000_000_000, ..Header::default() }
    }

    proptest! {
        // A record too many or too few is another trace, and a loss that is not told makes a part that
        // looks whole.
        #[test]
        fn a_part_has_all_records_of_its_time_and_what_may_have_been_lost_then(
            steps in steps(), since in 0..200_u64, length in 0..200_u64,
        ) {
            let until = since + length;
            let mut writer = Writer::new(Vec::new(), &header()).expect("header");
            let mut now = [0; 3];
            for (vcpu, step) in &steps {
                match step {
                    Step::Record(by) => {
                        now[*vcpu as usize] += by;
                        let record = EntryRecord::new(now[*vcpu as usize], 1, 2, 3);
                        writer.entries(*vcpu, &[record]).expect("memory");
                    }
                    Step::Loss(count) => writer.loss(*vcpu, *count, LossReason::Full).expect("memory"),
                }
            }
            writer.end(&Summary::default()).expect("memory");
            let pick = Pick { since: Some(since), until: Some(until), ..Pick::default() };
            let mut part = Vec::new();
            let refilter = Refilter::by_names(&mut part, Globs::default(), None);
            let mut refilter = refilter.with_part(pick, None);
            for piece in writer.into_inner().expect("memory").chunks(100) {
                refilter.write_all(piece).expect("a stream");
            }
            let told = refilter.finish().expect("whole").expect("a summary");
            refilter.flush().expect("memory");
            drop(refilter);
            let (mut records, mut lost) = ([const { Vec::new() }; 3], [0; 3]);
            let mut reader = Reader::new(&*part).expect("a stream");
            while let Some(frame) = reader.next_frame().expect("a stream") {
                match frame {
                    Frame::Records(batch) => {
                        let times = batch.whole_records().map(|(it, _)| it.head().timestamp.get());
                        records[batch.vcpu as usize].extend(times);
                    }
                    Frame::Loss(loss) => lost[loss.vcpu as usize] += loss.count,
                    _ => {}
                }
            }
            for vcpu in 0..3 {
                let own = steps.iter().filter(|(of, _)| *of as usize == vcpu);
                let (mut now, mut times, mut losses, mut open) = (0, Vec::new(), 0, 0);
                for (_, step) in own {
                    match step {
                        Step::Loss(count) => open += count,
                        Step::Record(by) => {
                            if now <= until && now + by >= since {
                                losses += open;
                            }
                            (now, open) = (now + by, 0);
                            times.extend((since..=until).contains(&now).then_some(now));
                        }
                    }
                }
                if now <= until {
                    losses += open;
                }
                prop_assert_eq!(&records[vcpu], &times);
                prop_assert_eq!(lost[vcpu], losses);
                prop_assert_eq!(told.vcpus[vcpu].lost, losses);
            }
        }

        // One tick off, and the record that a report shows at that time is not in the part.
        #[test]
        fn a_part_begins_with_the_first_tick_of_its_time(
            clock_start in prop_oneof![0..1000_u64, any::<u64>()],
            clock_hz in prop_oneof![1..100_u64, 1..5_000_000_000_u64],
            nanoseconds in prop_oneof![0..1000_u64, any::<u64>()],
        ) {
            let clock = Header { clock_start, clock_hz, ..Header::default() };
            let wanted = i128::from(nanoseconds);
            match earliest(&clock, wanted) {
                Some(0) => prop_assert!(clock.nanoseconds(0) >= wanted),
                Some(ticks) => {
                    prop_assert!(clock.nanoseconds(ticks) >= wanted);
                    prop_assert!(clock.nanoseconds(ticks - 1) < wanted);
                }
                None => prop_assert!(clock.nanoseconds(u64::MAX) < wanted),
            }
        }
    }
}
