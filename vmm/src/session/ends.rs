//! Conditions on how a call ends: which part is evaluated where, and how tracers and triggers with one work.

use super::conditions::Conditional;
use super::histograms::Histogram;
use super::tracing::{NOBODY, Tracer, Tracing};
use super::triggers::Trigger;
use super::way::Way;
use crate::condition::{Condition, FOLLOWED, is_of_ends};
use crate::kernel::Exit;
use crate::serve::Globs;
use crate::tracer::{Keeper, Part, Tally};
use vmtrace_trampolines::condition::{Operand, Test};
use vmtrace_trampolines::{Condition as Compiled, Field};

/// What a tracer does with calls beside its condition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doing {
    /// It records entries and returns.
    pub graph: bool,
    /// It records what functions return.
    pub results: bool,
    /// It records what functions are given.
    pub parameters: bool,
    /// It counts calls, or sorts them.
    pub counts: bool,
}

/// Where a condition is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// When functions are entered, and nowhere else.
    Entries,
    /// Of calls whose returns are recorded as well: whenever there is a record.
    Calls,
    /// Of calls of which nothing but the end is recorded: each part where it is known.
    Ends,
}

/// Why a tracer cannot have a condition on how calls end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndsError {
    /// Entries are over before it is known whether they are meant.
    #[error(
        "a condition on retval or duration records only the ends of calls, since neither is known when a \
         function is entered: leave out graph (--graph)"
    )]
    Graph,
    /// The same of what they are given.
    #[error(
        "a condition on retval or duration records only the ends of calls, where arguments are no longer \
         known: leave out args (--args, --arg), or trace entries by a tracer of its own (--tracer \
         GLOB:args)"
    )]
    Arguments,
    /// They are counted before it is known.
    #[error(
        "count, callers and hist look at calls when they begin, before retval and duration are known: leave these \
         out of the condition; hist(duration) and hist(retval) show how many there are of each size"
    )]
    Counts,
}

impl Use {
    /// That of a tracer that does this.
    ///
    /// # Errors
    /// Why it cannot have this condition.
    pub fn of(condition: Option<&Condition>, doing: Doing) -> Result<Self, EndsError> {
        let Doing { graph, results, parameters, counts } = doing;
        match condition.is_some_and(Condition::is_of_ends) {
            false if graph || results => Ok(Self::Calls),
            false => Ok(Self::Entries),
            true if counts => Err(EndsError::Counts),
            true if graph => Err(EndsError::Graph),
            true if parameters => Err(EndsError::Arguments),
            true => Ok(Self::Ends),
        }
    }

    /// That of a trigger.
    pub(super) fn of_trigger(condition: Option<&Condition>) -> Self {
        if condition.is_some_and(Condition::is_of_ends) { Self::Ends } else { Self::Entries }
    }

    /// Whether returns are recorded, or looked at.
    #[must_use]
    pub fn returns(self) -> bool {
        self != Self::Entries
    }
}

/// The parts of a condition, by where they are looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parted {
    /// When the function is entered, if that is of interest at all.
    pub(super) entry: Option<Compiled>,
    /// Where it is left.
    pub(super) end: Compiled,
    /// The same where it is not known what it returns: what else there is.
    pub(super) else_end: Compiled,
    /// Whether it looks at what is returned.
    pub(super) by_value: bool,
}

/// Where an operand is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Entry,
    Anywhere,
    End,
}

fn known(test: &Test) -> Known {
    match test {
        Test::Number { operand: Operand::Argument { .. } | Operand::Cpu, .. }
        | Test::Text { .. } => Known::Entry,
        Test::Number { operand: Operand::Value { .. } | Operand::Duration, .. } => Known::End,
        Test::Number { operand: Operand::Task(_), .. }
        | Test::Caller { .. }
        | Test::Bytes { .. }
        | Test::Followed { .. } => Known::Anywhere,
    }
}

/// All that has to hold, one by one.
fn flatten(condition: Compiled, all: &mut Vec<Compiled>) {
    match condition {
        Compiled::All(list) => list.into_iter().for_each(|one| flatten(one, all)),
        other => all.push(other),
    }
}

impl Parted {
    /// `None` when a part is known neither when a function is entered nor when it is left.
    pub(super) fn of(condition: Compiled) -> Option<Self> {
        let mut all = Vec::new();
        flatten(condition, &mut all);
        let (mut entry, mut anywhere, mut end) = (Vec::new(), Vec::new(), Vec::new());
        for one in all {
            let has = |at| one.tests().any(|test| known(test) == at);
            match (has(Known::Entry), has(Known::End)) {
                (true, true) => return None,
                (true, false) => entry.push(one),
                (false, true) => end.push(one),
                (false, false) => anywhere.push(one),
            }
        }
        let looks = |kind: fn(Operand) -> bool| end.iter().any(|one| one.looks_at(kind));
        let by_value = looks(|operand| matches!(operand, Operand::Value { .. }));
        let by_time = looks(|operand| operand == Operand::Duration);
        // What holds at either is looked at where it spares most: before a beginning is kept.
        let timed = by_time || !entry.is_empty();
        let at = if timed { &mut entry } else { &mut end };
        at.append(&mut anywhere);
        let of_value = |one: &Compiled| one.looks_at(|it| matches!(it, Operand::Value { .. }));
        let else_end = end.iter().filter(|one| !of_value(one)).cloned().collect();
        Some(Self {
            entry: timed.then_some(Compiled::All(entry)),
            end: Compiled::All(end),
            else_end: Compiled::All(else_end),
            by_value,
        })
    }
}

/// What is decided where a function is left.
pub(super) struct End {
    /// Whether the call is meant; `None` for all.
    pub(super) condition: Option<Compiled>,
    /// Whether its beginning was kept.
    pub(super) timed: bool,
    /// Whether it is not known what it returns, which matters.
    pub(super) untold: bool,
}

impl Parted {
    /// Somebody's part where a function is entered: only to keep when that was, for `keeper`.
    pub(super) fn begin(&self, tracer: u8, keeper: Keeper) -> Option<Part> {
        let condition = unless_empty(self.entry.clone()?);
        let counts = Some(Tally::Open(keeper));
        Some(Part { tracer, condition, counts, ..Part::default() })
    }

    /// What is decided where the function is left this way. `None` where a jump has ended the call already.
    pub(super) fn end(&self, way: Way) -> Option<End> {
        let untold = match way {
            Way::Aid => return None,
            Way::Return => false,
            Way::Jump | Way::Indirect => self.by_value,
        };
        let condition = if untold { &self.else_end } else { &self.end };
        let condition = unless_empty(condition.clone());
        Some(End { condition, timed: self.entry.is_some(), untold })
    }
}

/// `None` for what always holds.
fn unless_empty(condition: Compiled) -> Option<Compiled> {
    Some(condition).filter(|all| *all != Compiled::All(Vec::new()))
}

impl Tracer {
    /// Its condition, if that is about the ends of calls.
    pub(super) fn ends(&self) -> Option<&Conditional> {
        self.condition.as_ref().filter(|condition| condition.is_of_ends())
    }

    /// Its part where a function is left, if it is about the ends of calls.
    pub(super) fn end_part(&self, number: u8, exit: &Exit, way: Way) -> Option<Part> {
        let ends = self.ends()?.ends(exit.site as usize)?;
        let End { condition, timed, untold } = ends.end(way)?;
        let mut fields = match way {
            _ if untold => Vec::new(),
            Way::Return | Way::Aid => self.return_fields(exit.site),
            Way::Jump => vec![Field::Stack],
            Way::Indirect => vec![Field::Stack, Field::Target],
        };
        let keeper = Keeper::Tracer(number);
        let counts = untold.then_some(Tally::Untold { keeper, timed });
        if timed && !untold {
            fields.push(Field::Duration);
        }
        Some(Part { tracer: number, fields, condition, counts, ..Part::default() })
    }
}

impl Trigger {
    /// Its condition, if that is about the ends of calls.
    pub(super) fn ends(&self) -> Option<&Conditional> {
        self.condition.as_ref().filter(|condition| condition.is_of_ends())
    }

    /// For whom calls are kept until they end, if it is about the ends of calls.
    pub(super) fn keeper(&self) -> Keeper {
        Keeper::Trigger(self.kept)
    }

    /// Whether it is still to come, where a function is left.
    pub(super) fn waits_for_end(&self) -> bool {
        !self.fired && self.ends().is_some()
    }

    /// Its part where a function is left, if it is about the ends of calls.
    pub(super) fn end_part(&self, exit: &Exit, way: Way) -> Option<Part> {
        let ends = self.ends()?.ends(exit.site as usize)?;
        let End { condition, timed, untold } = ends.end(way)?;
        let keeper = self.keeper();
        let counts = Some(match untold {
            true => Tally::Untold { keeper, timed },
            false => Tally::Stop { number: self.number, since: timed.then_some(keeper) },
        });
        Some(Part { tracer: NOBODY, condition, counts, ..Part::default() })
    }
}

impl Tracing {
    /// Whose returns are looked at: patterns and sites of tracers, and of triggers that are still to come there.
    pub(super) fn leaving(&self) -> impl Iterator<Item = (&Globs, &[usize])> {
        let tracers = self.present().filter(|(_, tracer)| tracer.graph);
        let tracers = tracers.map(|(_, tracer)| (&tracer.globs, &*tracer.sites));
        let triggers = self.triggers.iter().filter(|it| it.waits_for_end());
        tracers.chain(triggers.map(|trigger| (&trigger.globs, &*trigger.sites)))
    }

    /// Has those that keep calls until their ends, or look at nothing else, lose these sites: their ends cannot
    /// be held.
    pub(super) fn leave_what_waits(&mut self, are_left: impl Fn(&usize) -> bool) {
        for trigger in self.triggers.iter_mut().filter(|it| it.ends().is_some()) {
            trigger.sites.retain(|site| !are_left(site));
        }
        for tracer in self.tracers.iter_mut().flatten() {
            if tracer.ends().is_some() || tracer.histogram.as_ref().is_some_and(Histogram::exits) {
                tracer.sites.retain(|site| !are_left(site));
            }
        }
    }
}

/// Whether an operand is the function's own when it is entered, and neither the task's nor the CPU's.
pub(super) fn is_parameter(operand: &str) -> bool {
    let others = matches!(operand, "pid" | "tgid" | "cpu" | "comm" | "caller" | FOLLOWED);
    !others && !is_of_ends(operand)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmtrace_trampolines::condition::Relation;

    fn test(operand: Operand) -> Compiled {
        Compiled::Test(Test::Number { operand, relation: Relation::Equal, value: 1 })
    }

    // A part that is looked at where it is not known is another condition; one that is not looked at
    // at all records what was not asked for.
    #[test]
    fn every_part_is_looked_at_where_it_is_known() {
        let argument = test(Operand::Argument { number: 0, bytes: 8, signed: false });
        let value = test(Operand::Value { bytes: 4, signed: true });
        let (time, task, cpu) =
            (test(Operand::Duration), test(Operand::Task(8)), test(Operand::Cpu));
        let all = |list: &[&Compiled]| Compiled::All(list.iter().map(|&one| one.clone()).collect());
        let any = |list: &[&Compiled]| Compiled::Any(list.iter().map(|&one| one.clone()).collect());
        let parted =
            |entry: Option<&[&Compiled]>, end: &[&Compiled], rest: &[&Compiled], by_value| {
                let (entry, end, else_end) = (entry.map(all), all(end), all(rest));
                Some(Parted { entry, end, else_end, by_value })
            };
        // No beginning is kept where none is needed.
        assert_eq!(Parted::of(value.clone()), parted(None, &[&value], &[], true));
        let both = any(&[&value, &task]);
        assert_eq!(Parted::of(both.clone()), parted(None, &[&both], &[], true));
        let nested = all(&[&task, &all(&[&value])]);
        assert_eq!(Parted::of(nested), parted(None, &[&value, &task], &[&task], true));
        assert_eq!(Parted::of(time.clone()), parted(Some(&[]), &[&time], &[&time], false));
        let mixed = all(&[&task, &time, &value]);
        assert_eq!(Parted::of(mixed), parted(Some(&[&task]), &[&time, &value], &[&time], true));
        let given = all(&[&argument, &value, &task]);
        assert_eq!(Parted::of(given), parted(Some(&[&argument, &task]), &[&value], &[], true));
        let moved = all(&[&cpu, &value]);
        assert_eq!(Parted::of(moved), parted(Some(&[&cpu]), &[&value], &[], true));
        assert_eq!(Parted::of(any(&[&argument, &value])), None);
        assert_eq!(Parted::of(all(&[&task, &any(&[&cpu, &all(&[&task, &time])])])), None);
    }

    #[test]
    fn what_a_tracer_cannot_do_with_ends_is_refused() {
        let condition: Condition = "retval < 0".parse().unwrap();
        let other: Condition = "args.retval < 0".parse().unwrap();
        let doing = Doing::default();
        let of = |condition: &Condition, doing| Use::of(Some(condition), doing);
        assert_eq!(of(&condition, doing), Ok(Use::Ends));
        assert_eq!(of(&condition, Doing { results: true, ..doing }), Ok(Use::Ends));
        assert_eq!(of(&other, Doing { results: true, ..doing }), Ok(Use::Calls));
        assert_eq!(of(&other, Doing { counts: true, ..doing }), Ok(Use::Entries));
        for (doing, error) in [
            (Doing { graph: true, ..doing }, EndsError::Graph),
            (Doing { parameters: true, ..doing }, EndsError::Arguments),
            (Doing { counts: true, ..doing }, EndsError::Counts),
        ] {
            assert_eq!(of(&condition, doing), Err(error));
        }
    }
}
