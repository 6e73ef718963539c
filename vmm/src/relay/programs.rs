//! From records as programs leave them to records of the stream.

use super::Targets;
use super::names::Place;
use crate::kernel::Kernel;
use crate::stream::{EntryRecord, Header, RecordBuffer, ReturnRecord, TailRecord};
use crate::tracer::{Duty, RawRecord, stack_bias};
use vmtrace_trampolines::{Field, Point};

/// What the records of a program have.
#[derive(Clone, Debug)]
pub(super) struct Format {
    pub(super) point: Point,
    /// Numbers of its tracers, and whether each wants stack pointers.
    tracers: Vec<(u8, bool)>,
    /// How many fields there are.
    fields: usize,
    /// Which of them is the stack pointer, and what it lacks.
    stack: Option<usize>,
    bias: u64,
    /// Which of them is the value returned, and which the function jumped to.
    value: Option<usize>,
    target: Option<usize>,
}

impl Format {
    fn new(kernel: &Kernel, duty: &Duty, wants_stack: impl Fn(u8) -> bool) -> Self {
        let find = |field| duty.fields.iter().position(|&other| other == field);
        Self {
            point: duty.point,
            tracers: duty.tracers.iter().map(|&number| (number, wants_stack(number))).collect(),
            fields: duty.fields.len(),
            stack: find(Field::Stack),
            bias: stack_bias(kernel, duty.point),
            value: find(Field::Value),
            target: find(Field::Target),
        }
    }

    /// The place of a record, with where it jumps to if that is only known when it happens.
    #[inline]
    pub(super) fn refine(&self, place: Place, fields: &[u64]) -> Place {
        let Some(&target) = self.target.and_then(|index| fields.get(index)) else { return place };
        let target = u32::try_from(target.wrapping_sub(Header::TOP_4_GIB)).unwrap_or(0);
        Place { target, ..place }
    }

    /// Adds a record for every tracer.
    #[inline]
    pub(super) fn write(
        &self,
        batch: &mut RecordBuffer,
        time: u64,
        record: &RawRecord,
        fields: &[u64],
        place: &Place,
    ) {
        if let (Point::Entry, None, &[(tracer, _)]) = (self.point, self.stack, &self.tracers[..]) {
            let entry = EntryRecord::new(time, place.function, record.caller, record.pid);
            return batch.push(entry.of_tracer(tracer));
        }
        let field = |index: Option<usize>| fields.get(index?).copied();
        let sp = field(self.stack).map(|sp| sp.wrapping_add(self.bias));
        let (function, caller, pid) = (place.function, record.caller, record.pid);
        for &(tracer, wants_stack) in &self.tracers {
            match (self.point, sp.filter(|_| wants_stack)) {
                (Point::Entry, None) => {
                    batch.push(EntryRecord::new(time, function, caller, pid).of_tracer(tracer));
                }
                (Point::Entry, Some(sp)) => {
                    let entry = EntryRecord::new(time, function, caller, pid).of_tracer(tracer);
                    batch.push_frame(entry.with_sp(sp));
                }
                (Point::Return, sp) => {
                    let sp = sp.unwrap_or(0);
                    let ret = ReturnRecord::new(time, function, caller, pid, sp).of_tracer(tracer);
                    match field(self.value) {
                        Some(value) => batch.push_return_value(ret.with_value(value)),
                        None => batch.push_return(ret),
                    }
                }
                (Point::Tail, sp) => {
                    let sp = sp.unwrap_or(0);
                    let tail = TailRecord::new(time, function, place.target, pid, sp);
                    batch.push_tail(tail.of_tracer(tracer));
                }
            }
        }
    }
}

/// The formats of all programs, by number.
#[derive(Debug, Default)]
pub(super) struct Programs(Vec<Format>);

impl Programs {
    /// These are all that there are.
    pub(super) fn set(&mut self, kernel: &Kernel, targets: &Targets) {
        let graph = |number| targets.tracers.iter().any(|t| t.number == number && t.graph);
        let duties = targets.programs.iter();
        self.0 = duties.map(|duty| Format::new(kernel, duty, graph)).collect();
    }

    /// What a record has, if a program can have written it.
    #[inline]
    pub(super) fn format(&self, record: &RawRecord) -> Option<&Format> {
        let format = self.0.get(usize::from(record.program))?;
        (format.fields == usize::from(record.fields)).then_some(format)
    }

    /// How many records one of a program would have become.
    pub(super) fn tracers(&self, program: u16) -> u64 {
        self.0.get(usize::from(program)).map_or(1, |format| format.tracers.len() as u64)
    }
}
