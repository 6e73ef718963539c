//! From events to what their programs do.

use super::TracedEvent;
use crate::session::Tracing;
use crate::tracer::Duty;
use vmtrace_trampolines::condition::{Relation, Test};
use vmtrace_trampolines::{Condition, Point};

/// So many system calls are told apart by a program: each is two instructions for all others.
const MOST_CALLS: usize = 12;

impl Tracing {
    /// What each event has to do, in order.
    pub(in crate::session) fn event_duties(&self) -> impl Iterator<Item = Duty> {
        self.events.iter().map(|event| {
            let point = if event.hooks().is_some() { Point::Probe } else { Point::Entry };
            let mut duty = Duty::new(point, vec![0], &event.fields.fields);
            let condition = self.event_condition(event);
            duty.parts.iter_mut().for_each(|part| part.condition.clone_from(&condition));
            duty
        })
    }

    /// Which records of an event's tracepoint are written: of single system calls, where the program
    /// has their number at hand and they are few, those that are meant. The relay looks again.
    fn event_condition(&self, event: &TracedEvent) -> Option<Condition> {
        let asked = self.events_if.clone();
        let number = event.fields.number_operand();
        let Some(operand) = number else { return asked };
        let mut beside: Vec<u64> = self
            .events
            .iter()
            .filter(|other| other.tracepoint() == event.tracepoint())
            .filter_map(|other| Some(other.fields.call.as_ref()?.number.into()))
            .collect();
        beside.sort_unstable();
        let room = Condition::MAX_TESTS - asked.iter().flat_map(Condition::tests).count();
        if beside.len() > room.min(MOST_CALLS) {
            return asked;
        }
        let test = |value| Test::Number { operand, relation: Relation::Equal, value };
        let calls = Condition::Any(beside.into_iter().map(test).map(Condition::Test).collect());
        Some(match asked {
            None => calls,
            Some(asked) => Condition::All(vec![calls, asked]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Place;
    use super::*;
    use crate::kernel::tracepoints::{Hooks, Preparation};
    use crate::relay::{EventFields, OneCall, Part};
    use crate::session::Plan;
    use crate::stream::Shape;
    use std::sync::Arc;
    use vmtrace_trampolines::{Field, Overflow};

    const LONG: Shape = Shape::Signed { bytes: 8 };

    /// System call `number`, whose program has that in `place`.
    fn call(number: u32, place: Field) -> TracedEvent {
        let hooks = Hooks {
            tracepoint: 0x1000,
            key: 0x1008,
            funcs: 0x1010,
            enabled: 0x1008,
            iterator: 0x2000,
            branches: Vec::new(),
            static_calls: None,
            preparation: Preparation::Nothing,
        };
        let fields = EventFields {
            name: format!("syscalls:call{number}"),
            fields: vec![place],
            values: Vec::new(),
            print: None,
            call: Some(OneCall { number, place: Part { field: 0, shape: LONG } }),
            in_place: false,
        };
        let from = Place::Tracepoint(hooks);
        TracedEvent { fields: Arc::new(fields), from, address: number.into(), module: None }
    }

    fn conditions(events: Vec<TracedEvent>, asked: Option<Condition>) -> Vec<Option<Condition>> {
        let all = events.len();
        let tracing =
            Tracing { events, events_if: asked, ..Tracing::of(Vec::new(), Overflow::Drop) };
        let plan = Plan::of(&tracing, &[]);
        // All are one program's.
        assert_eq!(plan.events, (0..all).map(|index| (index, 0)).collect::<Vec<_>>());
        plan.duties.into_iter().map(|duty| duty.parts[0].condition.clone()).collect()
    }

    // A call that nobody asked for costs a few instructions and no room, unless so many are asked
    // for that looking costs more.
    #[test]
    fn few_system_calls_are_told_apart_where_they_happen() {
        let argument = Field::Argument(2);
        let tests = |condition: &Option<Condition>| -> Vec<u64> {
            let all = condition.iter().flat_map(Condition::tests);
            all.filter_map(|test| match test {
                Test::Number { value, .. } => Some(*value),
                _ => None,
            })
            .collect()
        };
        let some = |count: usize| {
            let mut all: Vec<_> = (0..).take(count).map(|n| call(n, argument)).collect();
            all.reverse();
            all
        };
        let found = conditions(some(3), None);
        assert!(matches!(&found[..], [Some(Condition::Any(_))]), "{found:?}");
        assert_eq!(tests(&found[0]), [0, 1, 2]);
        assert_eq!(conditions(some(MOST_CALLS + 1), None), [None]);
        // With what was asked of all events.
        let asked = found[0].clone();
        let found = conditions(some(2), asked.clone());
        assert!(matches!(&found[..], [Some(Condition::All(_))]), "{found:?}");
        assert_eq!(tests(&found[0]), [0, 1, 0, 1, 2]);
        // Where the program does not know the number, the relay tells them apart.
        let unknown = Field::Stack;
        assert_eq!(conditions(vec![call(1, unknown), call(2, unknown)], asked.clone()), [asked]);
    }
}
