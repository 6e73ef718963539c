//! The programs in a guest.

use super::counters::Kind;
use super::error::TraceError;
use std::collections::HashMap;
use vmtrace_trampolines::histogram::{Calls, Sorted};
use vmtrace_trampolines::layout::Info;
use vmtrace_trampolines::{Condition, Counts, Field, Point, Program};

/// What a site has to do, and for which tracers: one record for all of these tracers, or one for
/// each of their conditions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Duty {
    /// Where in its function the site is.
    pub point: Point,
    /// The tracers, at least one, in the order of their numbers, each once.
    pub parts: Vec<Part>,
}

/// What one tracer wants of a record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// The tracer's number.
    pub tracer: u8,
    /// In the order in which its values are told.
    pub fields: Vec<Field>,
    /// Of which calls; `None` for all. Durations are in nanoseconds.
    pub condition: Option<Condition>,
    /// What it counts instead of recording calls.
    pub counts: Option<Tally>,
}

/// What is counted instead of being recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tally {
    /// Calls, in the table with this number.
    Table(u16),
    /// The same by caller, in the table of callers with this number.
    Callers(u16),
    /// Calls down to the one at which a vCPU stops.
    Stop {
        /// The number of that stop.
        number: u16,
        /// For whom the beginnings of these calls were kept, if they were.
        since: Option<Keeper>,
    },
    /// Nothing: a task is to be followed, or not. Where in a task its process id is.
    Follow {
        /// Whether it is the task that runs, and not one that begins.
        own: bool,
        /// Bytes.
        pid: u32,
        /// Whether it is.
        inside: bool,
    },
    /// An argument by size, in the histograms of the table with this number.
    Sort(u16, Sorted),
    /// Where a call begins that is to be sorted into those when it ends.
    Begin(u16),
    /// Where it ends.
    End(Measure),
    /// Where a call begins of which is decided when it ends, for whom.
    Open(Keeper),
    /// Where one goes on in another function, so that it cannot be told whether it is meant.
    Untold {
        /// For whom.
        keeper: Keeper,
        /// Whether its beginning was kept.
        timed: bool,
    },
}

/// For whom calls are kept until they end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Keeper {
    /// A tracer, by its number.
    Tracer(u8),
    /// A trigger, by a number of its own.
    Trigger(u16),
}

/// By what calls are sorted when they end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Measure {
    /// How long they took.
    Duration,
    /// An integer that they return, of so many bytes, with a sign or without.
    Value(u8, bool),
}

impl Tally {
    /// The table in which it counts, and what that has.
    #[must_use]
    pub fn table(self) -> Option<(u16, Kind)> {
        match self {
            Self::Table(table) => Some((table, Kind::Calls)),
            Self::Callers(table) => Some((table, Kind::Callers)),
            Self::Sort(table, _) | Self::Begin(table) => Some((table, Kind::Histograms)),
            Self::Stop { .. }
            | Self::Follow { .. }
            | Self::End(_)
            | Self::Open(_)
            | Self::Untold { .. } => None,
        }
    }

    /// The same in this table, if it needs one.
    #[must_use]
    pub fn in_table(self, table: u16) -> Self {
        match self {
            Self::Table(_) => Self::Table(table),
            Self::Callers(_) => Self::Callers(table),
            Self::Sort(_, sorted) => Self::Sort(table, sorted),
            Self::Begin(_) => Self::Begin(table),
            Self::Stop { .. }
            | Self::Follow { .. }
            | Self::End(_)
            | Self::Open(_)
            | Self::Untold { .. } => self,
        }
    }

    /// Whether it needs open calls, and nothing else.
    fn is_of_ends(self) -> bool {
        matches!(self, Self::Open(_) | Self::Untold { .. } | Self::Stop { since: Some(_), .. })
    }
}

impl Part {
    /// Whether it is about calls whose beginnings were kept.
    fn is_timed(&self) -> bool {
        let timed = match self.counts {
            Some(Tally::Untold { timed, .. }) => timed,
            Some(Tally::Stop { since, .. }) => since.is_some(),
            _ => false,
        };
        timed || self.fields.contains(&Field::Duration)
    }

    /// For whom its program begins or ends [open calls](Calls), if it does.
    #[must_use]
    pub fn keeper(&self) -> Keeper {
        match self.counts {
            Some(
                Tally::Open(keeper)
                | Tally::Untold { keeper, .. }
                | Tally::Stop { since: Some(keeper), .. },
            ) => keeper,
            _ => Keeper::Tracer(self.tracer),
        }
    }

    /// Whether its program begins or ends [open calls](Calls).
    #[must_use]
    pub fn keeps_calls(&self) -> bool {
        let sorts = matches!(self.counts, Some(Tally::Begin(_) | Tally::End(_)));
        sorts || self.needs_open_calls()
    }

    /// Whether its program needs what is kept of [open calls](Calls), without histograms.
    #[must_use]
    pub fn needs_open_calls(&self) -> bool {
        self.is_timed() || self.counts.is_some_and(Tally::is_of_ends)
    }
}

impl Duty {
    /// To record a function's entry for these tracers.
    #[must_use]
    pub fn entry(tracers: Vec<u8>) -> Self {
        Self::new(Point::Entry, tracers, &[])
    }

    /// To record the same for all of these tracers.
    #[must_use]
    pub fn new(point: Point, tracers: Vec<u8>, fields: &[Field]) -> Self {
        let part = |tracer| Part { tracer, fields: fields.to_vec(), condition: None, counts: None };
        Self { point, parts: tracers.into_iter().map(part).collect() }
    }

    /// What any of them wants, each once, in the order in which it stands in a record.
    #[must_use]
    pub fn fields(&self) -> Vec<Field> {
        let mut fields: Vec<Field> = Vec::new();
        for field in self.parts.iter().flat_map(|part| &part.fields) {
            if !fields.contains(field) {
                fields.push(*field);
            }
        }
        // What tells that a read failed must be there before it is read.
        fields.sort_by_key(|field| match field {
            Field::Stack => 0,
            Field::Target | Field::Value | Field::Duration => 1,
            Field::Failed => 2,
            Field::Argument(_)
            | Field::Read(_)
            | Field::Known(_)
            | Field::Linked(_)
            | Field::Variable(_)
            | Field::Task { .. } => 3,
            // Behind all else, whose places are the same with it and without.
            Field::Context => 4,
        });
        fields
    }

    /// The same by one program each: at least one, whose parts have one condition, and record or
    /// count alike. Each that counts has one of its own.
    #[must_use]
    pub fn records(&self) -> Vec<Self> {
        let mut records: Vec<Self> = Vec::new();
        for part in &self.parts {
            let same = |record: &&mut Self| {
                let alone = matches!(part.counts, Some(Tally::End(_) | Tally::Begin(_)))
                    || part.needs_open_calls();
                record.condition() == part.condition.as_ref()
                    && record.tally() == part.counts
                    && (!alone || record.keeper() == part.keeper())
            };
            match records.iter_mut().find(same) {
                Some(record) => record.parts.push(part.clone()),
                None => records.push(Self { point: self.point, parts: vec![part.clone()] }),
            }
        }
        if records.is_empty() {
            records.push(self.clone());
        }
        records
    }

    /// The same of all calls, and recorded, not counted.
    #[must_use]
    pub fn of_all_calls(&self) -> Self {
        let part = |part: &Part| Part { condition: None, counts: None, ..part.clone() };
        Self { point: self.point, parts: self.parts.iter().map(part).collect() }
    }

    fn condition(&self) -> Option<&Condition> {
        self.parts.first().and_then(|part| part.condition.as_ref())
    }

    fn tally(&self) -> Option<Tally> {
        self.parts.first().and_then(|part| part.counts)
    }

    /// Whose it is: the first one's, or the only one's.
    fn keeper(&self) -> Keeper {
        self.parts.first().map_or(Keeper::Tracer(0), Part::keeper)
    }

    /// Whether it is about calls whose beginnings were kept.
    fn is_timed(&self) -> bool {
        self.parts.first().is_some_and(Part::is_timed)
    }

    /// The program for one of its [records](Self::records), which counts like this, of calls that begin there if
    /// it is about such. Durations are still in nanoseconds.
    #[must_use]
    pub fn program(&self, number: u16, counts: Option<Counts>, calls: Option<Calls>) -> Program {
        let tracers = u16::try_from(self.parts.len()).unwrap_or(u16::MAX);
        let (point, fields, condition) = (self.point, self.fields(), self.condition().cloned());
        let since = calls.filter(|_| self.is_timed());
        Program { number, tracers, point, fields, condition, counts, since }
    }
}

/// Programs by number. None ever goes away: a task may stand in its code for ever.
#[derive(Debug, Default)]
pub(super) struct Programs {
    /// Of one record each.
    duties: Vec<Duty>,
    /// The same with all that the programs do to which each goes on.
    whole: Vec<Duty>,
    /// By what is done, and the program that is gone on to.
    single: HashMap<(Duty, Option<u16>), u16>,
    /// The first of each duty's.
    first: HashMap<Duty, u16>,
}

impl Programs {
    /// The number of the program for `duty`; new ones are given to `make` first, each with that of
    /// the program to which it goes on. `find` tells where somebody's counters of a tally are, and its open
    /// calls.
    pub(super) fn number(
        &mut self,
        duty: &Duty,
        find: &(impl Fn(Tally, Keeper) -> Option<Counts>, impl Fn(Keeper) -> Option<Calls>),
        mut make: impl FnMut(&Program, Option<u16>) -> Result<(), TraceError>,
    ) -> Result<u16, TraceError> {
        if let Some(&number) = self.first.get(duty) {
            return Ok(number);
        }
        let mut records = duty.records().into_iter().rev();
        let last = records.next().unwrap_or_else(|| duty.clone());
        let mut first = self.single(last, None, find, &mut make)?;
        for record in records {
            first = self.single(record, Some(first), find, &mut make)?;
        }
        self.first.insert(duty.clone(), first);
        Ok(first)
    }

    fn single(
        &mut self,
        record: Duty,
        next: Option<u16>,
        (find, calls): &(
            impl Fn(Tally, Keeper) -> Option<Counts>,
            impl Fn(Keeper) -> Option<Calls>,
        ),
        make: &mut impl FnMut(&Program, Option<u16>) -> Result<(), TraceError>,
    ) -> Result<u16, TraceError> {
        let key = (record, next);
        if let Some(&number) = self.single.get(&key) {
            return Ok(number);
        }
        let full = TraceError::Full(self.duties.len());
        let number = u16::try_from(self.duties.len()).map_err(|_| full.clone())?;
        if number > Info::MAX_PROGRAM {
            return Err(full);
        }
        let counts = match key.0.tally() {
            Some(tally) => Some(find(tally, key.0.keeper()).ok_or(match tally {
                Tally::Stop { .. } => TraceError::Stops,
                _ => TraceError::NotCounted,
            })?),
            None => None,
        };
        let calls = if key.0.is_timed() {
            Some(calls(key.0.keeper()).ok_or(TraceError::NotCounted)?)
        } else {
            None
        };
        make(&key.0.program(number, counts, calls), next)?;
        let mut whole = key.0.clone();
        let more = next.and_then(|next| self.whole.get(usize::from(next)));
        whole.parts.extend(more.into_iter().flat_map(|more| more.parts.iter().cloned()));
        self.whole.push(whole);
        self.duties.push(key.0.clone());
        self.single.insert(key, number);
        Ok(number)
    }

    pub(super) fn whole(&self) -> &[Duty] {
        &self.whole
    }

    pub(super) fn all(&self) -> &[Duty] {
        &self.duties
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmtrace_trampolines::{Counters, Last, Read};

    // A read that fails before there is a place to say so is taken for a value.
    #[test]
    fn a_record_has_what_any_tracer_wants_in_an_order_that_can_be() {
        let read = Field::Read(Read::new(0, &[8], Last::Words { offset: 0, words: 1 }).unwrap());
        let part = |tracer, fields: &[Field]| Part {
            tracer,
            fields: fields.to_vec(),
            condition: None,
            counts: None,
        };
        let parts = vec![
            part(0, &[Field::Argument(1)]),
            part(3, &[read, Field::Argument(1), Field::Failed, Field::Stack]),
        ];
        let program = Duty { point: Point::Entry, parts }.program(5, None, None);
        assert_eq!(program.fields, [Field::Stack, Field::Failed, Field::Argument(1), read]);
        assert_eq!((program.check(), program.tracers, program.number), (Ok(()), 2, 5));
    }

    // A program that is made twice takes the place of others, for ever.
    #[test]
    fn equal_duties_share_a_program() {
        let mut programs = Programs::default();
        let mut made = Vec::new();
        for tracers in [vec![0], vec![0, 1], vec![0], vec![1], vec![0, 1]] {
            let make = |program: &Program, _| {
                made.push((program.number, program.tracers));
                Ok(())
            };
            programs.number(&Duty::entry(tracers), &(|_, _| None, |_| None), make).unwrap();
        }
        assert_eq!(made, [(0, 1), (1, 2), (2, 1)]);
        assert_eq!(programs.all().len(), 3);
    }

    // A record that two tracers share although only one of them means the call is a call that the
    // other one asked not to see.
    #[test]
    fn tracers_with_other_conditions_have_records_of_their_own() {
        let part = |tracer, condition: Option<usize>| Part {
            tracer,
            fields: vec![],
            condition: condition.map(|count| Condition::Any(vec![Condition::All(vec![]); count])),
            counts: None,
        };
        let parts = |list: &[(u8, Option<usize>)]| Duty {
            point: Point::Entry,
            parts: list.iter().map(|&(tracer, condition)| part(tracer, condition)).collect(),
        };
        let (mut programs, mut made) = (Programs::default(), Vec::new());
        let mut number = |duty: &Duty| {
            let make = |program: &Program, next| {
                made.push((program.number, program.tracers, program.condition.is_some(), next));
                Ok(())
            };
            programs.number(duty, &(|_, _| None, |_| None), make).unwrap()
        };
        let all = parts(&[(0, Some(1)), (1, None), (2, Some(2)), (3, Some(1))]);
        assert_eq!(number(&all), 2);
        assert_eq!(number(&parts(&[(2, Some(2))])), 0);
        assert_eq!(number(&all.of_all_calls()), 3);
        assert_eq!(number(&all), 2);
        assert_eq!(
            made,
            [
                (0, 1, true, None),
                (1, 1, false, Some(0)),
                (2, 2, true, Some(1)),
                (3, 4, false, None)
            ]
        );
        let tracers = programs.whole()[2].parts.iter().map(|part| part.tracer);
        assert_eq!(tracers.collect::<Vec<_>>(), [0, 3, 1, 2]);
        assert_eq!(programs.all()[2], parts(&[(0, Some(1)), (3, Some(1))]));
    }

    // One that counts for two tracers counts for neither alone; a self-test of one that counts would wait
    // for a record for ever.
    #[test]
    fn tracers_that_count_have_programs_of_their_own() {
        let part = |tracer, counts| Part { tracer, fields: vec![], condition: None, counts };
        let table = |number| Some(Tally::Table(number));
        let parts = vec![part(0, table(4)), part(1, None), part(2, table(5)), part(3, None)];
        let duty = Duty { point: Point::Entry, parts };
        let counters = |tally, _| match tally {
            Tally::Table(table) => {
                Some(Counts::Up(Counters { distance: u64::from(table), stride: 0, rounds: false }))
            }
            _ => None,
        };
        let (mut programs, mut made) = (Programs::default(), Vec::new());
        let make = |program: &Program, next| {
            let distance = program.counts.map(|counts| match counts {
                Counts::Up(counters) => counters.distance,
                other => panic!("{other:?}"),
            });
            made.push((distance, program.tracers, next));
            Ok(())
        };
        programs.number(&duty, &(counters, |_| None), make).unwrap();
        assert_eq!(made, [(Some(5), 1, None), (None, 2, Some(0)), (Some(4), 1, Some(1))]);
        let none = Programs::default().number(&duty, &(|_, _| None, |_| None), |_, _| Ok(()));
        assert_eq!(none, Err(TraceError::NotCounted));
        assert!(duty.of_all_calls().parts.iter().all(|part| part.counts.is_none()));
    }

    // Numbers go into records, where they have so many bits and no more.
    #[test]
    fn numbers_run_out_and_what_failed_has_none() {
        let mut programs = Programs::default();
        let failed = programs
            .number(&Duty::entry(vec![9]), &(|_, _| None, |_| None), |_, _| Err(TraceError::Annex));
        assert_eq!(failed, Err(TraceError::Annex));
        for number in 0..=Info::MAX_PROGRAM {
            let [low, high] = number.to_le_bytes();
            let duty = Duty::entry(vec![low, high]);
            assert_eq!(programs.number(&duty, &(|_, _| None, |_| None), |_, _| Ok(())), Ok(number));
        }
        assert!(matches!(
            programs.number(&Duty::entry(vec![]), &(|_, _| None, |_| None), |_, _| Ok(())),
            Err(TraceError::Full(2048))
        ));
        assert_eq!(
            programs.number(&Duty::entry(vec![0, 0]), &(|_, _| None, |_| None), |_, _| Ok(())),
            Ok(0)
        );
    }
}
