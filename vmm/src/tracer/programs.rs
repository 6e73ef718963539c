//! Which programs there are in a guest.

use super::trace::TraceError;
use std::collections::HashMap;
use vmtrace_trampolines::layout::Info;
use vmtrace_trampolines::{Field, Point, Program};

/// What a site has to do, and on whose account: one record that serves all of these tracers.
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
        let part = |tracer| Part { tracer, fields: fields.to_vec() };
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
            Field::Target | Field::Value => 1,
            Field::Failed => 2,
            Field::Argument(_) | Field::Read(_) => 3,
        });
        fields
    }

    /// The program for it.
    #[must_use]
    pub fn program(&self, number: u16) -> Program {
        let tracers = u16::try_from(self.parts.len()).unwrap_or(u16::MAX);
        Program { number, tracers, point: self.point, fields: self.fields() }
    }
}

/// Programs by number. None ever goes away: a task may stand in its code for ever.
#[derive(Debug, Default)]
pub(super) struct Programs {
    duties: Vec<Duty>,
    numbers: HashMap<Duty, u16>,
}

impl Programs {
    /// The number of the program for `duty`; a new one is given to `make` first.
    pub(super) fn number(
        &mut self,
        duty: &Duty,
        make: impl FnOnce(&Program) -> Result<(), TraceError>,
    ) -> Result<u16, TraceError> {
        if let Some(&number) = self.numbers.get(duty) {
            return Ok(number);
        }
        let full = TraceError::Full(self.duties.len());
        let number = u16::try_from(self.duties.len()).map_err(|_| full.clone())?;
        if number > Info::MAX_PROGRAM {
            return Err(full);
        }
        make(&duty.program(number))?;
        self.duties.push(duty.clone());
        self.numbers.insert(duty.clone(), number);
        Ok(number)
    }

    pub(super) fn all(&self) -> &[Duty] {
        &self.duties
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
        let part = |tracer, fields: &[Field]| Part { tracer, fields: fields.to_vec() };
        let parts = vec![
            part(0, &[Field::Argument(1)]),
            part(3, &[read, Field::Argument(1), Field::Failed, Field::Stack]),
        ];
        let program = Duty { point: Point::Entry, parts }.program(5);
        assert_eq!(program.fields, [Field::Stack, Field::Failed, Field::Argument(1), read]);
        assert_eq!((program.check(), program.tracers, program.number), (Ok(()), 2, 5));
    }

    // A program that is made twice takes the place of others, for ever.
    #[test]
    fn equal_duties_share_a_program() {
        let mut programs = Programs::default();
        let mut made = Vec::new();
        for tracers in [vec![0], vec![0, 1], vec![0], vec![1], vec![0, 1]] {
            let make = |program: &Program| {
                made.push((program.number, program.tracers));
                Ok(())
            };
            programs.number(&Duty::entry(tracers), make).unwrap();
        }
        assert_eq!(made, [(0, 1), (1, 2), (2, 1)]);
        assert_eq!(programs.all().len(), 3);
    }

    // Numbers go into records, where they have so many bits and no more.
    #[test]
    fn numbers_run_out_and_what_failed_has_none() {
        let mut programs = Programs::default();
        let failed = programs.number(&Duty::entry(vec![9]), |_| Err(TraceError::Annex));
        assert_eq!(failed, Err(TraceError::Annex));
        for number in 0..=Info::MAX_PROGRAM {
            let [low, high] = number.to_le_bytes();
            let duty = Duty::entry(vec![low, high]);
            assert_eq!(programs.number(&duty, |_| Ok(())), Ok(number));
        }
        assert!(matches!(
            programs.number(&Duty::entry(vec![]), |_| Ok(())),
            Err(TraceError::Full(2048))
        ));
        assert_eq!(programs.number(&Duty::entry(vec![0, 0]), |_| Ok(())), Ok(0));
    }
}
