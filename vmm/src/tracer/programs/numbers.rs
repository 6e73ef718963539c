//! Programs by their numbers.
//!
//! A program is never taken out of the guest, nor written again: a task may stand in its code for ever. But its code
//! does not know for whom it is. Once nothing in the guest leads to it any more, it rests, and becomes somebody
//! else's who needs the same code, so that tracers can come and go for as long as a guest runs.
//!
//! Not at once: what it has written must have been taken from the rings, where its number means what it meant. And a
//! task that was interrupted in it may have a record still to write, which would be the new owner's. So it rests until
//! several others of the same code do, as long as there is room.

use super::find::Find;
use super::{Duty, Tally};
use crate::tracer::error::TraceError;
use std::collections::{HashMap, HashSet};
use vmtrace_trampolines::Program;
use vmtrace_trampolines::layout::Info;

/// Programs of the same code that rest before one of them is somebody else's.
const RESTING: usize = 4;

/// Programs by number.
#[derive(Debug, Default)]
pub(in crate::tracer) struct Programs {
    /// Of one record each.
    duties: Vec<Duty>,
    /// The same with all that the programs do to which each goes on.
    whole: Vec<Duty>,
    /// By what is done, and the program that is gone on to.
    single: HashMap<(Duty, Option<u16>), u16>,
    /// The first of each duty's.
    first: HashMap<Duty, u16>,
    /// Those of the same code: by what that does, under number 0, and where it goes on.
    alike: HashMap<Alike, Vec<u16>>,
    /// By number: to which each goes on.
    next: Vec<Option<u16>>,
    /// By number: whether each rests.
    states: Vec<State>,
    /// How often they were looked at to see which rest.
    looks: u64,
}

/// What the same code is known by.
type Alike = (Program, Option<u16>);

/// What a program is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Something leads to it, or will.
    Used,
    /// Nothing has since this look.
    Rests {
        since: u64,
        /// The rings have nothing of it any more.
        taken: bool,
    },
}

impl Programs {
    /// The number of the program for `duty`; new ones are given to `make` first, each with that of
    /// the program to which it goes on. `find` tells where somebody's counters of a tally are, and its open
    /// calls.
    pub(in crate::tracer) fn number(
        &mut self,
        duty: &Duty,
        find: &impl Find,
        mut make: impl FnMut(&Program, Option<u16>) -> Result<(), TraceError>,
    ) -> Result<u16, TraceError> {
        if let Some(&number) = self.first.get(duty) {
            self.use_from(number);
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
        find: &impl Find,
        make: &mut impl FnMut(&Program, Option<u16>) -> Result<(), TraceError>,
    ) -> Result<u16, TraceError> {
        let key = (record, next);
        if let Some(&number) = self.single.get(&key) {
            self.use_from(number);
            return Ok(number);
        }
        let counts = match key.0.tally() {
            Some(tally) => Some(find.counts(tally, key.0.keeper()).ok_or(match tally {
                Tally::Stop { .. } => TraceError::Stops,
                _ => TraceError::NotCounted,
            })?),
            None => None,
        };
        let calls = if key.0.is_timed() {
            Some(find.calls(key.0.keeper()).ok_or(TraceError::NotCounted)?)
        } else {
            None
        };
        let nesting = match key.0.nested() {
            Some(nested) => {
                Some(find.nesting(key.0.keeper(), nested).ok_or(TraceError::NotCounted)?)
            }
            None => None,
        };
        let marked = if key.0.is_aid() {
            Some(find.marks(key.0.keeper()).ok_or(TraceError::NotCounted)?)
        } else {
            None
        };
        let alike = (Program { nesting, marked, ..key.0.program(0, counts, calls) }, next);
        let number = match self.rested(&alike, RESTING) {
            Some(number) => self.pass_on(number),
            None => match self.add(&alike, make) {
                Err(full @ TraceError::Full(_)) => {
                    let number = self.rested(&alike, 1).ok_or(full)?;
                    self.pass_on(number)
                }
                added => added?,
            },
        };
        let mut whole = key.0.clone();
        let more = next.and_then(|next| self.whole.get(usize::from(next)));
        whole.parts.extend(more.into_iter().flat_map(|more| more.parts.iter().cloned()));
        put(&mut self.whole, number, whole);
        put(&mut self.duties, number, key.0.clone());
        put(&mut self.next, number, next);
        put(&mut self.states, number, State::Used);
        self.single.insert(key, number);
        Ok(number)
    }

    /// Has a program made under the next number.
    fn add(
        &mut self,
        (program, next): &Alike,
        make: &mut impl FnMut(&Program, Option<u16>) -> Result<(), TraceError>,
    ) -> Result<u16, TraceError> {
        let full = TraceError::Full(self.duties.len());
        let number = u16::try_from(self.duties.len()).map_err(|_| full.clone())?;
        if number > Info::MAX_PROGRAM {
            return Err(full);
        }
        make(&Program { number, ..program.clone() }, *next)?;
        self.alike.entry((program.clone(), *next)).or_default().push(number);
        Ok(number)
    }

    /// The one with this code that has rested longest, if at least so many of them can be somebody else's.
    fn rested(&self, alike: &Alike, least: usize) -> Option<u16> {
        let rested =
            self.alike.get(alike)?.iter().filter_map(|&number| match self.state(number)? {
                State::Rests { since, taken: true } => Some((since, number)),
                State::Rests { .. } | State::Used => None,
            });
        let longest = rested.clone().min()?;
        (rested.count() >= least).then_some(longest.1)
    }

    /// Forgets what a program that rests was for, and with it what goes on to it. The same number.
    fn pass_on(&mut self, number: u16) -> u16 {
        let mut gone = HashSet::from([number]);
        loop {
            let before = gone.len();
            let all = (0..).zip(&self.next);
            let leading = all.filter(|(_, next)| next.is_some_and(|next| gone.contains(&next)));
            let leading: Vec<u16> = leading.map(|(number, _)| number).collect();
            gone.extend(leading);
            if gone.len() == before {
                break;
            }
        }
        self.single.retain(|_, known| !gone.contains(known));
        self.first.retain(|_, known| !gone.contains(known));
        number
    }

    fn state(&self, number: u16) -> Option<State> {
        self.states.get(usize::from(number)).copied()
    }

    /// Something will lead to this one, and so to all to which it goes on.
    fn use_from(&mut self, number: u16) {
        for number in chain(&self.next, number) {
            if let Some(state) = self.states.get_mut(usize::from(number)) {
                *state = State::Used;
            }
        }
    }

    /// Lets all rest but these, and those to which they go on.
    pub(in crate::tracer) fn rest(&mut self, used: impl Iterator<Item = u16>) {
        self.looks += 1;
        let mut rests = vec![true; self.states.len()];
        for number in used {
            for number in chain(&self.next, number) {
                let rests = rests.get_mut(usize::from(number)).filter(|rests| **rests);
                let Some(rests) = rests else { break };
                *rests = false;
            }
        }
        for (state, rests) in self.states.iter_mut().zip(rests) {
            match (rests, *state) {
                (false, _) => *state = State::Used,
                (true, State::Used) => *state = State::Rests { since: self.looks, taken: false },
                (true, State::Rests { .. }) => {}
            }
        }
    }

    /// The rings have nothing any more of what was written before those that rest came to rest.
    pub(in crate::tracer) fn are_taken(&mut self) {
        for state in &mut self.states {
            if let State::Rests { taken, .. } = state {
                *taken = true;
            }
        }
    }

    pub(in crate::tracer) fn whole(&self) -> &[Duty] {
        &self.whole
    }

    pub(in crate::tracer) fn all(&self) -> &[Duty] {
        &self.duties
    }
}

/// A program, and all to which it goes on, one after another.
fn chain(next: &[Option<u16>], number: u16) -> impl Iterator<Item = u16> {
    std::iter::successors(Some(number), |&number| next.get(usize::from(number)).copied().flatten())
}

/// Puts what belongs to a number in its place, or behind all others.
fn put<T>(all: &mut Vec<T>, number: u16, value: T) {
    match all.get_mut(usize::from(number)) {
        Some(place) => *place = value,
        None => all.push(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::counters::Keeper;
    use crate::tracer::programs::{Nested, Part};
    use vmtrace_trampolines::histogram::Calls;
    use vmtrace_trampolines::marks::Marks;
    use vmtrace_trampolines::nesting::{Call, Nesting};
    use vmtrace_trampolines::{Condition, Counters, Counts, Point};

    /// A guest without tables.
    struct Nothing;

    impl Find for Nothing {
        fn counts(&self, _: Tally, _: Keeper) -> Option<Counts> {
            None
        }

        fn calls(&self, _: Keeper) -> Option<Calls> {
            None
        }

        fn marks(&self, _: Keeper) -> Option<Marks> {
            None
        }

        fn nesting(&self, _: Keeper, _: Nested) -> Option<Nesting> {
            None
        }
    }

    /// One whose tables are as far away as their numbers say.
    struct Distances;

    impl Find for Distances {
        fn counts(&self, tally: Tally, _: Keeper) -> Option<Counts> {
            let Tally::Table(table) = tally else { return None };
            Some(Counts::Up(Counters { distance: u64::from(table), stride: 0, rounds: false }))
        }

        fn calls(&self, _: Keeper) -> Option<Calls> {
            None
        }

        fn marks(&self, _: Keeper) -> Option<Marks> {
            None
        }

        fn nesting(&self, keeper: Keeper, Nested { depth, call }: Nested) -> Option<Nesting> {
            let Keeper::Tracer(tracer) = keeper else { return None };
            Some(Nesting { address: u64::from(tracer) << 24, stack_bits: 14, depth, call })
        }
    }

    // What two tracers share has one table: calls of the other one would be open there.
    #[test]
    fn tracers_with_limits_have_programs_of_their_own() {
        let root = Call::Root { again: true };
        let part = |tracer, call: Option<Call>| Part {
            tracer,
            nested: call.map(|call| Nested { depth: None, call }),
            ..Part::default()
        };
        let parts = [part(0, Some(root)), part(1, Some(root)), part(2, None), part(3, None)];
        let duty = Duty { point: Point::Entry, parts: parts.to_vec() };
        let (mut programs, mut made) = (Programs::default(), Vec::new());
        let mut make = |program: &Program, _| {
            made.push((program.tracers, program.nesting.map(|it| (it.address >> 24, it.call))));
            Ok(())
        };
        let first = programs.number(&duty, &Distances, &mut make).unwrap();
        let other = Duty { point: Point::Entry, parts: vec![part(0, Some(Call::Inner))] };
        assert_ne!(programs.number(&other, &Distances, &mut make), Ok(first));
        let one = |tracer, call| (1, Some((tracer, call)));
        assert_eq!(made, [(2, None), one(1, root), one(0, root), one(0, Call::Inner)]);
        assert!(duty.of_all_calls().parts.iter().all(|part| part.nested.is_none()));
        assert_eq!(
            Programs::default().number(&duty, &Nothing, |_, _| Ok(())),
            Err(TraceError::NotCounted)
        );
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
            programs.number(&Duty::entry(tracers), &Nothing, make).unwrap();
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
            condition: condition.map(|count| Condition::Any(vec![Condition::All(vec![]); count])),
            ..Part::default()
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
            programs.number(duty, &Nothing, make).unwrap()
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
        let part = |tracer, counts| Part { tracer, counts, ..Part::default() };
        let table = |number| Some(Tally::Table(number));
        let parts = vec![part(0, table(4)), part(1, None), part(2, table(5)), part(3, None)];
        let duty = Duty { point: Point::Entry, parts };
        let (mut programs, mut made) = (Programs::default(), Vec::new());
        let make = |program: &Program, next| {
            let distance = program.counts.map(|counts| match counts {
                Counts::Up(counters) => counters.distance,
                other => panic!("{other:?}"),
            });
            made.push((distance, program.tracers, next));
            Ok(())
        };
        programs.number(&duty, &Distances, make).unwrap();
        assert_eq!(made, [(Some(5), 1, None), (None, 2, Some(0)), (Some(4), 1, Some(1))]);
        let none = Programs::default().number(&duty, &Nothing, |_, _| Ok(()));
        assert_eq!(none, Err(TraceError::NotCounted));
        assert!(duty.of_all_calls().parts.iter().all(|part| part.counts.is_none()));
    }

    // Numbers go into records, where they have so many bits and no more.
    #[test]
    fn numbers_run_out_and_what_failed_has_none() {
        let mut programs = Programs::default();
        let failed =
            programs.number(&Duty::entry(vec![9]), &Nothing, |_, _| Err(TraceError::Annex));
        assert_eq!(failed, Err(TraceError::Annex));
        for number in 0..=Info::MAX_PROGRAM {
            let [low, high] = number.to_le_bytes();
            let duty = Duty::entry(vec![low, high]);
            assert_eq!(programs.number(&duty, &Nothing, |_, _| Ok(())), Ok(number));
        }
        assert!(matches!(
            programs.number(&Duty::entry(vec![]), &Nothing, |_, _| Ok(())),
            Err(TraceError::Full(2048))
        ));
        assert_eq!(programs.number(&Duty::entry(vec![0, 0]), &Nothing, |_, _| Ok(())), Ok(0));
    }

    fn number(programs: &mut Programs, duty: &Duty) -> (u16, usize) {
        let mut made = 0;
        let make = |_: &Program, _| {
            made += 1;
            Ok(())
        };
        let number = programs.number(duty, &Nothing, make).unwrap();
        (number, made)
    }

    // Tracers that come and go would use up all numbers, and with them a guest's run.
    #[test]
    fn programs_that_rest_become_somebody_elses() {
        let mut programs = Programs::default();
        let tracer = |tracer| Duty::entry(vec![tracer]);
        for of in 0..6 {
            assert_eq!(number(&mut programs, &tracer(of)), (u16::from(of), 1));
        }
        programs.rest([4, 5].into_iter());
        // Their records may still be in the rings.
        assert_eq!(number(&mut programs, &tracer(6)), (6, 1));
        programs.are_taken();
        assert_eq!(number(&mut programs, &tracer(7)), (0, 0));
        assert_eq!(programs.all()[0], tracer(7));
        assert_eq!(programs.whole()[0], tracer(7));
        // Too few rest by now: another one comes to rest later.
        assert_eq!(number(&mut programs, &tracer(8)), (7, 1));
        programs.rest([5, 6, 7, 0].into_iter());
        programs.are_taken();
        // What rests is its own again, and nobody else's.
        assert_eq!(number(&mut programs, &tracer(1)), (1, 0));
        assert_eq!(number(&mut programs, &tracer(9)), (8, 1));
        programs.rest([5, 6, 7, 0].into_iter());
        programs.are_taken();
        // The one that has rested longest, not that with the lowest number.
        assert_eq!(number(&mut programs, &tracer(10)), (2, 0));
        assert_eq!(number(&mut programs, &tracer(0)), (3, 0), "0 is somebody else's");
    }

    // A record of another form would be read as if it were of this one.
    #[test]
    fn only_the_same_code_is_passed_on() {
        let mut programs = Programs::default();
        for tracer in 0..8 {
            number(&mut programs, &Duty::entry(vec![tracer]));
        }
        programs.rest([].into_iter());
        programs.are_taken();
        let others = [
            Duty::new(Point::Return, vec![9], &[]),
            Duty::new(Point::Entry, vec![9], &[vmtrace_trampolines::Field::Stack]),
            Duty::entry(vec![9, 10]),
        ];
        for (other, expected) in others.iter().zip(8..) {
            assert_eq!(number(&mut programs, other), (expected, 1));
        }
        assert_eq!(number(&mut programs, &Duty::entry(vec![9])), (0, 0));
    }

    // One that goes on to another keeps that: it would go on to what is somebody else's by then.
    #[test]
    fn what_is_gone_on_to_is_used_and_what_goes_on_is_forgotten_with_it() {
        let mut programs = Programs::default();
        let part = |tracer, holds: bool| Part {
            tracer,
            condition: holds.then(|| Condition::All(vec![])),
            ..Part::default()
        };
        // Goes on to a program of all calls, which is that of `(0, false)` alone.
        let both = |first, second| Duty {
            point: Point::Entry,
            parts: vec![part(first, true), part(second, false)],
        };
        let plain = |tracer| Duty { point: Point::Entry, parts: vec![part(tracer, false)] };
        assert_eq!(number(&mut programs, &both(1, 0)), (1, 2));
        for tracer in 2..6 {
            number(&mut programs, &plain(tracer));
        }
        programs.rest([1].into_iter());
        programs.are_taken();
        let of = |programs: &mut Programs, tracer| number(programs, &plain(tracer)).0;
        assert_ne!(of(&mut programs, 7), 0, "the other one goes on to it");
        programs.rest([].into_iter());
        programs.are_taken();
        let nowhere = |_: &Program, _| Err(TraceError::Full(1));
        for (tracer, expected) in (8..).zip([3, 4, 5, 0]) {
            let number = programs.number(&plain(tracer), &Nothing, nowhere);
            assert_eq!(number, Ok(expected));
        }
        // It would have one of its parts told for tracer 0, and go on to what tells for another.
        let (first, _) = number(&mut programs, &both(1, 0));
        assert_eq!(programs.whole()[usize::from(first)].parts.len(), 2);
        let next = programs.next[usize::from(first)].unwrap();
        assert_eq!(programs.all()[usize::from(next)], plain(0));
    }

    // Without room there is no reason to wait for others to rest.
    #[test]
    fn without_room_the_first_that_rests_is_passed_on() {
        let mut programs = Programs::default();
        let duty = |number: u16| Duty::entry(number.to_le_bytes().to_vec());
        for tracers in 0..=Info::MAX_PROGRAM {
            number(&mut programs, &duty(tracers));
        }
        programs.rest((0..=Info::MAX_PROGRAM).filter(|number| *number != 77));
        let full = programs.number(&duty(3000), &Nothing, |_, _| Ok(()));
        assert_eq!(full, Err(TraceError::Full(2048)), "not taken yet");
        programs.are_taken();
        assert_eq!(number(&mut programs, &duty(3000)), (77, 0));
        let full = programs.number(&duty(3001), &Nothing, |_, _| Ok(()));
        assert_eq!(full, Err(TraceError::Full(2048)));
        // Nor where the guest has none for its code.
        let mut programs = Programs::default();
        number(&mut programs, &duty(1));
        programs.rest([].into_iter());
        programs.are_taken();
        let nowhere = |_: &Program, _| Err(TraceError::Full(1));
        assert_eq!(programs.number(&duty(2), &Nothing, nowhere), Ok(0));
    }
}
