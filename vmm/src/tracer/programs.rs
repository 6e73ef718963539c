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
    /// The numbers of the tracers, at least one, in order, each once.
    pub tracers: Vec<u8>,
    /// What any of them wants of the record.
    pub fields: Vec<Field>,
}

impl Duty {
    /// To record a function's entry for these tracers.
    #[must_use]
    pub fn entry(tracers: Vec<u8>) -> Self {
        Self { point: Point::Entry, tracers, fields: Vec::new() }
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
        let tracers = u16::try_from(duty.tracers.len()).unwrap_or(u16::MAX);
        let Duty { point, fields, .. } = duty.clone();
        make(&Program { number, tracers, point, fields })?;
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
