//! What programs do in a guest.

mod find;
mod numbers;

pub(super) use find::Tables;
pub(super) use numbers::Programs;

use super::counters::{Keeper, Kind};
use vmtrace_trampolines::histogram::{Calls, Sorted};
use vmtrace_trampolines::marks::MarkIf;
#[cfg(doc)]
use vmtrace_trampolines::marks::Marks;
use vmtrace_trampolines::nesting::Call;
#[cfg(doc)]
use vmtrace_trampolines::nesting::Nesting;
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Part {
    /// The tracer's number.
    pub tracer: u8,
    /// In the order in which its values are told.
    pub fields: Vec<Field>,
    /// Of which calls; `None` for all. Durations are in nanoseconds.
    pub condition: Option<Condition>,
    /// What it counts instead of recording calls.
    pub counts: Option<Tally>,
    /// How its calls are nested; `None`: in any way.
    pub nested: Option<Nested>,
    /// It is the end of calls that the tracer has [marked](Tally::Mark) where they went on in this function, whose own
    /// calls it does not trace.
    pub aid: bool,
}

/// How calls are nested that are meant: see [`Nesting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nested {
    /// So many levels.
    pub depth: Option<u8>,
    /// What calls the program is for.
    pub call: Call,
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
    /// Nothing: what its nesting says is all.
    Nothing,
    /// Nothing: a task is to be followed, or not. Where in a task its process id is.
    Follow {
        /// The argument with it; `None`: the one that runs.
        argument: Option<u8>,
        /// Bytes.
        pid: u32,
        /// Whether it is.
        inside: bool,
    },
    /// Nothing: a task, the first argument, is to be looked at anew.
    Forget,
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
    /// Nothing: a call goes on in another function whose end is [its own](Part::aid), if it is one of these.
    Mark(MarkIf),
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
            Self::Nothing
            | Self::Stop { .. }
            | Self::Follow { .. }
            | Self::Forget
            | Self::End(_)
            | Self::Open(_)
            | Self::Untold { .. }
            | Self::Mark(_) => None,
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
            Self::Nothing
            | Self::Stop { .. }
            | Self::Follow { .. }
            | Self::Forget
            | Self::End(_)
            | Self::Open(_)
            | Self::Untold { .. }
            | Self::Mark(_) => self,
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
        sorts || self.needs_open_calls() || self.nested.is_some()
    }

    /// Whether its program makes or takes [marks](Marks).
    #[must_use]
    pub fn needs_marks(&self) -> bool {
        self.aid || matches!(self.counts, Some(Tally::Mark(_)))
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
        let fields = fields.to_vec();
        let part = |tracer| {
            let fields = fields.clone();
            Part { tracer, fields, ..Part::default() }
        };
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
                    || part.needs_open_calls()
                    || part.needs_marks()
                    || part.nested.is_some();
                record.nested() == part.nested
                    && record.condition() == part.condition.as_ref()
                    && record.tally() == part.counts
                    && record.is_aid() == part.aid
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
        let part = |part: &Part| Part {
            tracer: part.tracer,
            fields: part.fields.clone(),
            ..Part::default()
        };
        Self { point: self.point, parts: self.parts.iter().map(part).collect() }
    }

    fn condition(&self) -> Option<&Condition> {
        self.parts.first().and_then(|part| part.condition.as_ref())
    }

    fn nested(&self) -> Option<Nested> {
        self.parts.first().and_then(|part| part.nested)
    }

    fn is_aid(&self) -> bool {
        self.parts.first().is_some_and(|part| part.aid)
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
    /// it is about such. Durations are still in nanoseconds, and what its calls are nested in and marked by is not yet
    /// there.
    #[must_use]
    pub fn program(&self, number: u16, counts: Option<Counts>, calls: Option<Calls>) -> Program {
        let tracers = u16::try_from(self.parts.len()).unwrap_or(u16::MAX);
        let (point, fields, condition) = (self.point, self.fields(), self.condition().cloned());
        let since = calls.filter(|_| self.is_timed());
        Program {
            number,
            tracers,
            point,
            fields,
            condition,
            counts,
            since,
            nesting: None,
            marked: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmtrace_trampolines::{Last, Read};

    // A read that fails before there is a place to say so is taken for a value.
    #[test]
    fn a_record_has_what_any_tracer_wants_in_an_order_that_can_be() {
        let read = Field::Read(Read::new(0, &[8], Last::Words { offset: 0, words: 1 }).unwrap());
        let part =
            |tracer, fields: &[Field]| Part { tracer, fields: fields.to_vec(), ..Part::default() };
        let parts = vec![
            part(0, &[Field::Argument(1)]),
            part(3, &[read, Field::Argument(1), Field::Failed, Field::Stack]),
        ];
        let program = Duty { point: Point::Entry, parts }.program(5, None, None);
        assert_eq!(program.fields, [Field::Stack, Field::Failed, Field::Argument(1), read]);
        assert_eq!((program.check(), program.tracers, program.number), (Ok(()), 2, 5));
    }
}
