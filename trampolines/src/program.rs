//! Programs: an architecture-independent description of what a site has to do.

use crate::callers::{CALLERS, Callers};
use crate::condition::{Condition, Operand, Test, extended};
use crate::histogram::{Calls, Ended, OPEN, Sorted};
use crate::layout::{COMMON_SIZE, Info, MAX_RECORD};
use crate::marks::{MARKS, MarkIf, Marks};
use crate::nesting::{Call, NESTS, Nesting};

/// What happens when a ring is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// The new record is dropped and counted.
    Drop,
    /// The oldest record is overwritten: a flight recorder.
    Overwrite,
    /// The CPU executes this until there is room, as long as [`Control::wait`](crate::layout::Control::wait)
    /// says so; otherwise the new record is dropped and counted. It keeps all registers (riscv64: but `a7`).
    Block(&'static [u8]),
}

impl Overflow {
    /// Whether records are taken out while the guest runs, and none is overwritten.
    #[must_use]
    pub const fn drains(self) -> bool {
        match self {
            Self::Drop | Self::Block(_) => true,
            Self::Overwrite => false,
        }
    }
}

/// How a program is entered, and how it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Point {
    /// Called at a function's entry, by the site itself.
    Entry,
    /// Called where a function is left for another one, by a stub that jumps on.
    Tail,
    /// In place of a function's return: ends it.
    Return,
    /// Called where a function without a site returns, by a stub that returns in its place. Who has called it may have kept
    /// something in any register that it is known not to change (gcc's `-fipa-ra`, which is off where functions have sites).
    Beyond,
    /// Called by a tracepoint, as a function whose first argument is the tracepoint's own: a probe. It only records, and no
    /// program comes behind it. (x86-64: what tells the site is in its code, see [`Code::site`]; riscv64: as an entry.)
    Probe,
}

impl Point {
    /// Whether a function returns there.
    #[must_use]
    pub const fn returns(self) -> bool {
        matches!(self, Self::Return | Self::Beyond)
    }

    /// Whether a function begins there.
    #[must_use]
    pub const fn enters(self) -> bool {
        matches!(self, Self::Entry | Self::Probe)
    }

    /// Whether a function begins there that was given this argument.
    #[must_use]
    pub const fn enters_with(self, argument: u8) -> bool {
        match self {
            Self::Entry => true,
            Self::Probe => argument > 0,
            Self::Tail | Self::Return | Self::Beyond => false,
        }
    }
}

/// What a record has beside what all have: words of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    /// The stack pointer (of x86-64: see [`stack_bias`](crate::x86_64::stack_bias)).
    Stack,
    /// An integer argument by its number, from 0 on: as the calling convention passes it.
    Argument(u8),
    /// What the function returns.
    Value,
    /// Where a tail call through a pointer goes (x86-64: what `r11` had).
    Target,
    /// Which [`Field::Read`]s of the record failed: bit n is that of field n.
    Failed,
    /// Whether interrupts are on, flags of the task, and counts of preemption and migration: a
    /// [`RawContext`](crate::RawContext).
    Context,
    /// How long the call took, in ticks: where [`Program::since`] says when it began.
    Duration,
    /// Memory behind an argument; one that failed has in its first word the address that cannot be
    /// read.
    Read(Read),
    /// The same where the kernel itself follows these pointers at this very place, without a look:
    /// they lead where they should, and nothing fails. (riscv64: to multiples of 8 bytes.)
    Known(Read),
    /// The same where any pointer on the way may be NULL, at which the kernel looks: zeroes then.
    Linked(Read),
    /// 8 bytes of the kernel's own data, by their link address: a multiple of 8.
    Variable(u64),
    /// Of the `task_struct` of the task that runs. (riscv64: from a multiple of 8 bytes on.)
    Task {
        /// Bytes from its beginning on.
        offset: u32,
        /// How many words.
        words: u8,
    },
}

impl Field {
    /// How many words it takes.
    #[must_use]
    pub fn words(self) -> usize {
        match self {
            Self::Read(read) | Self::Known(read) | Self::Linked(read) => read.words(),
            Self::Task { words, .. } => words.into(),
            _ => 1,
        }
    }
}

/// Memory that a program reads, along pointers, from an argument on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Read {
    argument: u8,
    hops: [i32; Self::MAX_HOPS],
    count: u8,
    last: Last,
}

/// What is read in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Last {
    /// So many words from this offset on.
    Words {
        /// Bytes from the last pointer on.
        offset: i32,
        /// How many.
        words: u8,
    },
    /// A string that ends with a NUL or is cut after so many words.
    Text {
        /// Bytes from the last pointer on.
        offset: i32,
        /// How many.
        words: u8,
    },
}

impl Read {
    /// Most pointers on the way.
    pub const MAX_HOPS: usize = 8;

    /// From an argument (see [`Field::Argument`]): each of `hops` is the offset of the next
    /// pointer from the one before. `None` when there are too many, or too many or no words.
    #[must_use]
    pub fn new(argument: u8, hops: &[i32], last: Last) -> Option<Self> {
        let mut array = [0; Self::MAX_HOPS];
        array.get_mut(..hops.len())?.copy_from_slice(hops);
        let read = Self { argument, hops: array, count: u8::try_from(hops.len()).ok()?, last };
        let longest = (MAX_RECORD - COMMON_SIZE) / 8;
        (1..longest).contains(&read.words()).then_some(read)
    }

    /// The argument with the first pointer.
    #[must_use]
    pub fn argument(self) -> u8 {
        self.argument
    }

    /// Offsets of the pointers on the way.
    #[must_use]
    pub fn hops(&self) -> &[i32] {
        self.hops.get(..usize::from(self.count)).unwrap_or_default()
    }

    /// What is read in the end.
    #[must_use]
    pub fn last(self) -> Last {
        self.last
    }

    /// How many words it takes.
    #[must_use]
    pub fn words(self) -> usize {
        match self.last {
            Last::Words { words, .. } | Last::Text { words, .. } => words.into(),
        }
    }
}

/// Memory of a guest that can be read at any time, wherever a pointer leads: what is elsewhere is
/// not tried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readable {
    /// Addresses and lengths in bytes, all multiples of 8. The likeliest come first.
    pub areas: Vec<(u64, u64)>,
    /// The kernel stack of the task that runs: offset of its address in a task, and its length.
    pub stack: Option<(u64, u64)>,
}

impl Readable {
    /// Most bytes of an area from which 8 can be read.
    pub(crate) fn starts(&self) -> impl Iterator<Item = (u64, u64)> {
        self.areas.iter().filter(|&&(_, len)| len >= 8).map(|&(start, len)| (start, len - 7))
    }
}

/// Counters of calls, one of 8 bytes for each function, in a table for each CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Counters {
    /// Bytes from the address that tells the site (where the program returns to, in the function)
    /// to its counter of CPU 0, wrapping: within 2 GiB; riscv64, whose modules are 2 GiB before all
    /// else of the kernel, within 4 GiB.
    pub distance: u64,
    /// Bytes from a CPU's table to that of the next one: a multiple of 4096, less than 2 GiB.
    /// With 0 all CPUs have one table.
    pub stride: u64,
    /// Counters lie at the multiple of 8 that is not above `address + distance`, and the distance
    /// is a multiple of 8; otherwise all are at multiples of 8 as they are.
    pub rounds: bool,
}

impl Counters {
    /// Whether instructions can have these.
    fn check(self) -> Result<(), ProgramError> {
        let Self { distance, stride, rounds } = self;
        const FAR: i64 = 1 << 32;
        // What two instructions add ends with a page.
        if !(-FAR..FAR - 8192).contains(&distance.cast_signed()) {
            return Err(ProgramError::Range("the distance of counters", distance));
        }
        if rounds && !distance.is_multiple_of(8) {
            return Err(ProgramError::Counts(
                "cannot round at a distance that is not a multiple of 8",
            ));
        }
        if i32::try_from(stride).is_err() {
            return Err(ProgramError::Range("the size of a table of counters", stride));
        }
        if !stride.is_multiple_of(4096) {
            return Err(ProgramError::Counts("needs tables of whole pages"));
        }
        Ok(())
    }
}

/// Where programs find histograms: in the place of a function's counter is the address of its histogram for
/// that CPU.
pub type Histograms = Counters;

/// What is counted instead of being recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counts {
    /// Calls, by function and CPU.
    Up(Counters),
    /// The same by caller as well.
    ByCaller(Callers),
    /// Calls down to 0, all in one counter: at the one that makes it 0 the CPU stops. Where they begin or where
    /// they end.
    Down {
        /// The number of the stop, for who put the program somewhere.
        number: u16,
        /// Address of the counter of 8 bytes, a multiple of 8; a sign-extended number of 32 bits.
        counter: u64,
        /// What stops a CPU. What tells the site is in a register then (x86-64: `r10`, riscv64:
        /// `t0`; its low half at a return). At an entry all that the function has is in its place (riscv64: but
        /// `a7`, in `t1`).
        trap: &'static [u8],
    },
    /// Nothing: what its [nesting](Program::nesting) says is all.
    Nothing,
    /// Nothing: a task is to be [followed](crate::family) or not.
    Follow {
        /// The argument with it, in a register; `None`: the one that runs.
        argument: Option<u8>,
        /// Where in a task its process id is.
        pid: u32,
        /// Whether it is.
        inside: bool,
    },
    /// Nothing: a task, the first argument, is none of the [strangers](crate::family::Strangers) any more.
    Forget,
    /// Values of an argument, by size.
    Sort(Histograms, Sorted),
    /// Calls, until they end: at [`Point::Entry`]. Without histograms they are those that others [look
    /// for](Program::since).
    Begin(Option<Histograms>, Calls),
    /// What has become of them, by size: where they end.
    End(Calls, Ended),
    /// Calls of which cannot be told whether they are meant, all in [one counter](Calls::UNTOLD): left for another
    /// function, which returns in their place, at [`Point::Tail`].
    Untold(Calls),
    /// Nothing: a call goes on in another function, at [`Point::Tail`]. Its end is [looked for](Program::marked) there. Of
    /// calls that are not meant no mark is left, nor one that was left by another call in their place.
    Mark(Marks, MarkIf),
}

impl Counts {
    fn is_at(self, point: Point) -> bool {
        match self {
            Self::Down { .. } => true,
            Self::Up(_)
            | Self::ByCaller(_)
            | Self::Nothing
            | Self::Follow { .. }
            | Self::Forget
            | Self::Sort(..)
            | Self::Begin(..) => point == Point::Entry,
            Self::End(..) => matches!(point, Point::Return | Point::Tail),
            Self::Untold(_) | Self::Mark(..) => point == Point::Tail,
        }
    }

    fn check(self) -> Result<(), ProgramError> {
        match self {
            Self::Up(counters) => counters.check(),
            Self::ByCaller(callers) => check_callers(callers),
            Self::Sort(histograms, Sorted { bytes, .. }) => {
                histograms.check().and_then(|()| check_integer(bytes))
            }
            Self::Begin(histograms, calls) => {
                histograms.map_or(Ok(()), Counters::check).and_then(|()| check_calls(calls))
            }
            Self::Untold(calls) => check_calls(calls),
            Self::Mark(marks, _) => check_marks(marks),
            Self::End(calls, ended) => {
                check_calls(calls)?;
                match ended {
                    Ended::Duration { multiplier: 1.., shift: 0..=32 } => Ok(()),
                    Ended::Duration { .. } => {
                        Err(ProgramError::Counts("cannot make these nanoseconds"))
                    }
                    Ended::Value { bytes, .. } => check_integer(bytes),
                }
            }
            Self::Down { counter, .. } if i32::try_from(counter.cast_signed()).is_err() => {
                Err(ProgramError::Range(STOPS, counter))
            }
            Self::Down { counter, .. } if !counter.is_multiple_of(8) => {
                Err(ProgramError::Counts("needs a counter at a multiple of 8"))
            }
            Self::Follow { argument: Some(6..), .. } => {
                Err(ProgramError::Counts("follows tasks that are in registers"))
            }
            Self::Down { .. } | Self::Follow { .. } | Self::Forget | Self::Nothing => Ok(()),
        }
    }
}

/// Whether instructions can have a table of so many bytes, which begins at a multiple.
pub(crate) fn check_table(
    what: &'static str,
    address: u64,
    size: u64,
    multiple: u64,
) -> Result<(), ProgramError> {
    let end = address.wrapping_add(size);
    let reached = |address: u64| i32::try_from(address.cast_signed()).is_ok();
    if !reached(address) || !reached(end) || end < address {
        return Err(ProgramError::Range(what, address));
    }
    if !address.is_multiple_of(multiple) {
        return Err(ProgramError::Table(what, multiple));
    }
    Ok(())
}

fn check_calls(Calls { address }: Calls) -> Result<(), ProgramError> {
    check_table(OPEN, address, Calls::SIZE, 64)
}

fn check_marks(Marks { address }: Marks) -> Result<(), ProgramError> {
    check_table(MARKS, address, Marks::SIZE, 4096)
}

fn check_callers(Callers { address, stride }: Callers) -> Result<(), ProgramError> {
    check_table(CALLERS, address, Callers::SIZE, 64)?;
    if i32::try_from(stride).is_err() {
        return Err(ProgramError::Range("the size of a table of callers", stride));
    }
    if !stride.is_multiple_of(4096) || (1..Callers::SIZE).contains(&stride) {
        return Err(ProgramError::Counts("needs whole tables of callers"));
    }
    Ok(())
}

fn check_nesting(nesting: Nesting, program: &Program) -> Result<(), ProgramError> {
    let point = program.point;
    let refused = |what| Err(ProgramError::Nesting(what, point));
    if !(12..=20).contains(&nesting.stack_bits) {
        return refused("knows stacks of 4 KiB to 1 MiB");
    }
    if !(1..=Nesting::MAX_DEPTH).contains(&nesting.levels()) {
        return refused("has 1 to 16 levels");
    }
    if (nesting.call == Call::Fresh) != (program.counts == Some(Counts::Nothing)) {
        return refused("does nothing else at the first call of a task");
    }
    let is_there = match nesting.call {
        Call::Root { .. } | Call::Inner | Call::Endless { .. } | Call::Fresh => {
            point == Point::Entry
        }
        Call::Ends => point != Point::Entry,
        Call::GoesOn | Call::MayGoOn => point == Point::Tail,
    };
    if !is_there {
        return refused("is for calls that do other things there");
    }
    check_table(NESTS, nesting.address, Nesting::size(nesting.depth), 4096)
}

fn check_integer(bytes: u8) -> Result<(), ProgramError> {
    match bytes {
        1 | 2 | 4 | 8 => Ok(()),
        _ => Err(ProgramError::Counts("knows integers of 1, 2, 4 or 8 bytes")),
    }
}

/// What errors call the counter of [`Counts::Down`].
pub(crate) const STOPS: &str = "the counter of a stop";

/// What a site has to do: write one record with these fields, or count, calls of which a condition
/// holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// Its number, in every record: up to [`Info::MAX_PROGRAM`].
    pub number: u16,
    /// For how many tracers: 1 to 256.
    pub tracers: u16,
    /// Where it runs.
    pub point: Point,
    /// From the end of a record downwards, below what all have.
    pub fields: Vec<Field>,
    /// Which calls; `None` for all.
    pub condition: Option<Condition>,
    /// Counts calls here instead of recording them, without fields.
    pub counts: Option<Counts>,
    /// Only calls whose beginnings are here: they end with this, and [`Field::Duration`] and
    /// [`Operand::Duration`] are known.
    pub since: Option<Calls>,
    /// Only calls that are nested so; `None` for all.
    pub nesting: Option<Nesting>,
    /// Only calls that have gone on here from elsewhere: their marks are taken with this. `None` for all.
    pub marked: Option<Marks>,
}

/// Why a program cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// Something of the guest is out of the reach of an instruction.
    #[error("{0} ({1:#x}) cannot be encoded")]
    Range(&'static str, u64),
    /// The record would be too long.
    #[error("a record of {0} bytes is too long (at most {MAX_RECORD})")]
    TooLong(usize),
    /// There is no such thing at this point.
    #[error("{0:?} is not known at {1:?}")]
    Field(Field, Point),
    /// Nobody knows where the kernel keeps it.
    #[error("{0:?} is not known of this kernel")]
    Unknown(Field),
    /// There is no such thing at this point, or at all.
    #[error("a condition {0} (at {1:?})")]
    Condition(&'static str, Point),
    /// How deep a call is cannot be known like that.
    #[error("a program that knows how deep calls are {0} (at {1:?})")]
    Nesting(&'static str, Point),
    /// Programs know other places of it.
    #[error("{0} cannot begin but at a multiple of {1}")]
    Table(&'static str, u64),
    /// What counts cannot be like that.
    #[error("a program that counts {0}")]
    Counts(&'static str),
    /// It is about tasks that are followed, and none is.
    #[error("no tasks are followed")]
    NotFollowed,
    /// Numbers are used up.
    #[error("a program cannot have number {0} or {1} tracers")]
    Number(u16, u16),
    /// The assembler refused it.
    #[error("the program cannot be assembled: {0}")]
    Assembler(String),
}

impl Program {
    /// Bytes of its record.
    #[must_use]
    pub fn size(&self) -> usize {
        COMMON_SIZE + 8 * self.fields.iter().map(|field| field.words()).sum::<usize>()
    }

    /// Its fields, and how far below the end of a record the first word of each is, in bytes: the
    /// others are below that.
    pub fn places(&self) -> impl Iterator<Item = (Field, usize)> {
        self.fields.iter().scan(COMMON_SIZE, |end, &field| {
            let below = *end + 8;
            *end += 8 * field.words();
            Some((field, below))
        })
    }

    /// How far below the end of a record a field is, in bytes.
    #[must_use]
    pub fn below(&self, field: Field) -> Option<usize> {
        self.places().find(|&(other, _)| other == field).map(|(_, below)| below)
    }

    /// What its records say of themselves. `overwrite` records get the tag of their lap later.
    pub(crate) fn info(&self, overflow: Overflow) -> Info {
        match overflow {
            Overflow::Drop | Overflow::Block(_) => {
                Info::new(self.size(), self.number, 1, Info::DRAINED)
            }
            Overflow::Overwrite => Info::new(self.size(), self.number, self.tracers, 0),
        }
    }

    /// Whether it looks how its calls are nested before it looks at its condition. Levels are given back whatever else is
    /// asked for. A root begins although nothing is to be recorded of it itself: what holds of it need not hold of what it
    /// calls, unless that is about their task. Without roots, levels are of what is recorded.
    pub(crate) fn nests_first(&self) -> bool {
        let of_task = |test: &Test| match test {
            Test::Number { operand, .. } => matches!(operand, Operand::Task(_)),
            Test::Bytes { .. } | Test::Followed { .. } => true,
            Test::Caller { .. } | Test::Text { .. } => false,
        };
        let rooted = self.nesting.is_some_and(|it| {
            !matches!(it.call, Call::Root { again: false } | Call::Endless { root: true })
        });
        self.point != Point::Entry
            || rooted && self.condition.as_ref().is_some_and(|it| !it.tests().all(of_task))
    }

    /// Whether its point can have a condition.
    fn check_condition(&self, condition: &Condition) -> Result<(), ProgramError> {
        let refused = |what| Err(ProgramError::Condition(what, self.point));
        if condition.tests().count() > Condition::MAX_TESTS {
            return refused("has too many comparisons");
        }
        for test in condition.tests() {
            match test {
                Test::Number { operand, value, .. } => {
                    let (bytes, signed) = operand.width();
                    if !matches!(bytes, 1 | 2 | 4 | 8) || extended(*value, bytes, signed) != *value
                    {
                        return refused("compares with what the operand can never be");
                    }
                    let known = match operand {
                        Operand::Argument { number, .. } => self.point.enters_with(*number),
                        Operand::Value { .. } => self.point == Point::Return,
                        Operand::Duration => self.since.is_some(),
                        Operand::Cpu | Operand::Task(_) => true,
                    };
                    if !known {
                        return refused("is about what is not known");
                    }
                }
                Test::Bytes { bytes, .. } | Test::Text { bytes, .. }
                    if bytes.len() > Condition::MAX_BYTES =>
                {
                    return refused("compares with more bytes than a task's name has");
                }
                // As many are in registers on all architectures.
                Test::Text { argument, .. }
                    if !self.point.enters_with(*argument) || *argument > 5 =>
                {
                    return refused("is about what is not known");
                }
                Test::Text { .. } => {}
                Test::Caller { .. } | Test::Bytes { .. } | Test::Followed { .. } => {}
            }
        }
        Ok(())
    }

    /// Whether it can be compiled at all.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), ProgramError> {
        if self.size() > MAX_RECORD {
            return Err(ProgramError::TooLong(self.size()));
        }
        if self.number > Info::MAX_PROGRAM || !(1..=256).contains(&self.tracers) {
            return Err(ProgramError::Number(self.number, self.tracers));
        }
        let is_plain = self.since.is_none() && self.nesting.is_none() && self.marked.is_none();
        if self.point == Point::Probe && !(is_plain && self.counts.is_none()) {
            return Err(ProgramError::Counts("is not for tracepoints"));
        }
        if let Some(counts) = self.counts {
            if !counts.is_at(self.point) {
                return Err(ProgramError::Counts("is not for what this one is called by"));
            }
            if !self.fields.is_empty() {
                return Err(ProgramError::Counts("has no fields"));
            }
            counts.check()?;
        }
        if let Some(calls) = self.since {
            let ends = matches!(self.counts, None | Some(Counts::Untold(_) | Counts::Down { .. }));
            if matches!(self.point, Point::Entry | Point::Beyond) || !ends {
                return Err(ProgramError::Counts("does not look for what has begun"));
            }
            check_calls(calls)?;
        }
        if let Some(marks) = self.marked {
            let alone = self.counts.is_none() && self.since.is_none() && self.nesting.is_none();
            if self.point == Point::Entry || !alone {
                return Err(ProgramError::Counts("does not look for what has gone on"));
            }
            check_marks(marks)?;
        }
        if let Some(condition) = &self.condition {
            self.check_condition(condition)?;
        }
        if let Some(nesting) = self.nesting {
            check_nesting(nesting, self)?;
        }
        for (index, &field) in self.fields.iter().enumerate() {
            let known = match field {
                Field::Stack => true,
                Field::Argument(number) => {
                    self.point == Point::Tail || self.point.enters_with(number)
                }
                Field::Value => self.point == Point::Return,
                Field::Target => self.point == Point::Tail,
                Field::Failed | Field::Context => true,
                Field::Duration => self.since.is_some(),
                Field::Known(read) | Field::Linked(read) => self.point.enters_with(read.argument()),
                Field::Variable(_) => self.point.enters(),
                Field::Task { words, .. } => self.point.enters() && words > 0,
                // What fails must be able to say so, in what is there by then.
                Field::Read(read) => {
                    let before = self.fields.get(..index).unwrap_or_default();
                    self.point.enters_with(read.argument()) && before.contains(&Field::Failed)
                }
            };
            if !known {
                return Err(ProgramError::Field(field, self.point));
            }
        }
        Ok(())
    }
}

/// Machine code that can lie anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Where in it are the returns (x86-64: of 5 bytes, `ret` and four `int3`, so that a jump to
    /// the kernel's return thunk can take the place of each).
    pub endings: Vec<usize>,
    /// Where in it is what stops a CPU ([`Counts::Down`]).
    pub stop: Option<usize>,
    /// Where in it the low half of the address that tells the site belongs, 4 bytes, if nothing else tells it.
    pub site: Option<usize>,
}
