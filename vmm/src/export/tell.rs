//! Tells what records turned out to be as events, with names.

use crate::stream::Header;

use super::ahead::{Ahead, Held};
use super::error::PlayError;
use super::names::{LATER, Tasks};
use super::pairing::{self, Step, Steps};
use super::values::{Args, Returned};
use super::{Entry, Event, Export, Place, Return, Tail, Tracepoint, Unfinished};

/// What is known of the values of the present record.
#[derive(Debug, Default)]
pub(super) struct Present {
    pub(super) format: Option<u32>,
    pub(super) failed: u64,
    pub(super) words: Vec<u64>,
}

/// Where events get their names.
#[derive(Debug)]
pub(super) struct Teller<E> {
    pub(super) export: E,
    pub(super) ahead: Ahead,
    pub(super) tasks: Tasks,
    pub(super) present: Present,
}

/// Tells of one record.
pub(super) struct Telling<'a, E> {
    pub(super) teller: &'a mut Teller<E>,
    pub(super) header: &'a Header,
    pub(super) vcpu: u32,
    pub(super) held: &'a Held,
    /// What it returned.
    pub(super) value: Option<u64>,
    /// Nothing more once there is this. A result would be copied for each record.
    pub(super) failed: Option<Box<PlayError>>,
}

impl<E: Export> Steps for Telling<'_, E> {
    #[inline]
    fn step(&mut self, step: Step) {
        if self.failed.is_none()
            && let Err(error) =
                self.teller.tell(self.header, self.vcpu, self.held, self.value, &step)
        {
            self.failed = Some(Box::new(error));
        }
    }
}

impl<E: Export> Teller<E> {
    #[inline]
    fn function_index(&mut self, header: &Header, held: &Held) -> u32 {
        match held.function_index {
            LATER => self.ahead.symbols.index(header, held.function),
            index => index,
        }
    }

    #[inline]
    fn other_index(&mut self, header: &Header, held: &Held) -> u32 {
        match held.other_index {
            LATER if held.other != 0 => self.ahead.symbols.index(header, held.other),
            index => index,
        }
    }

    pub(super) fn tell(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        value: Option<u64>,
        step: &Step,
    ) -> Result<(), PlayError> {
        let hides = self.ahead.selection.min_duration.is_some();
        match *step {
            Step::Left(frame) | Step::Evicted(frame) => self.unfinished(header, &frame),
            Step::Entered { id, parent, depth, shown } if shown && !hides => {
                self.entry(header, vcpu, held, Some(Place { frame: id, parent, depth }))
            }
            Step::Tailed { depth, shown } if shown && !hides => {
                let function_index = self.function_index(header, held);
                let target_index = self.other_index(header, held);
                let target = self.ahead.symbols.name(header, held.other, target_index);
                let event = Event::Tail(Tail {
                    timestamp: held.timestamp,
                    vcpu,
                    pid: held.pid,
                    comm: self.tasks.comm(held.pid, held.slot),
                    function: self.ahead.symbols.name(header, held.function, function_index),
                    target: (held.other != 0).then_some(target),
                    tracer: self.ahead.tracers.name(held.tracer()),
                    depth,
                    context: held.context(),
                });
                self.export.event(&event).map_err(PlayError::Output)
            }
            Step::Returned { frame, depth, ticks, shown } if shown => {
                let duration_ns = ticks.map(|ticks| header.duration_ns(ticks));
                if duration_ns < self.ahead.selection.min_duration {
                    return Ok(());
                }
                let function = frame.map_or(held.function, |frame| frame.function);
                let index = if function == held.function {
                    self.function_index(header, held)
                } else {
                    self.ahead.symbols.index(header, function)
                };
                let fields =
                    self.present.format.and_then(|format| self.ahead.formats.fields(format));
                let shape = fields.and_then(|fields| fields.first()).map(|field| &field.shape);
                let event = Event::Return(Return {
                    timestamp: held.timestamp,
                    vcpu,
                    pid: held.pid,
                    comm: self.tasks.comm(held.pid, held.slot),
                    tgid: self.tasks.tgid(held.slot),
                    function: self.ahead.symbols.name(header, function, index),
                    tracer: self.ahead.tracers.name(held.tracer()),
                    depth,
                    duration_ns,
                    value: value.map(|raw| Returned { raw, shape }),
                    frame: frame.filter(|_| !hides).map(|frame| frame.id),
                    whole: frame.is_none() && ticks.is_some(),
                    context: held.context(),
                });
                self.export.event(&event).map_err(PlayError::Output)
            }
            _ => Ok(()),
        }
    }

    #[inline]
    pub(super) fn entry(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        place: Option<Place>,
    ) -> Result<(), PlayError> {
        let (function, caller) = (held.function, held.other);
        let function_index = self.function_index(header, held);
        let caller_index = self.other_index(header, held);
        let fields = self.present.format.and_then(|format| self.ahead.formats.fields(format));
        let Present { failed, words, .. } = &self.present;
        let event = Event::Entry(Entry {
            timestamp: held.timestamp,
            vcpu,
            pid: held.pid,
            comm: self.tasks.comm(held.pid, held.slot),
            tgid: self.tasks.tgid(held.slot),
            function: self.ahead.symbols.name(header, function, function_index),
            caller: (caller != 0).then(|| self.ahead.symbols.name(header, caller, caller_index)),
            tracer: self.ahead.tracers.name(held.tracer()),
            place,
            args: fields.map(|fields| Args { fields, failed: *failed, words }),
            context: held.context(),
        });
        self.export.event(&event).map_err(PlayError::Output)
    }

    pub(super) fn event(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
    ) -> Result<(), PlayError> {
        let (event, caller) = (held.function, held.other);
        let event_index = self.function_index(header, held);
        let caller_index = self.other_index(header, held);
        let format = self.present.format;
        let fields = format.and_then(|format| self.ahead.formats.fields(format));
        let Present { failed, words, .. } = &self.present;
        let event = Event::Tracepoint(Tracepoint {
            timestamp: held.timestamp,
            vcpu,
            pid: held.pid,
            comm: self.tasks.comm(held.pid, held.slot),
            tgid: self.tasks.tgid(held.slot),
            event: self.ahead.symbols.name(header, event, event_index),
            caller: (caller != 0).then(|| self.ahead.symbols.name(header, caller, caller_index)),
            fields: fields.map(|fields| Args { fields, failed: *failed, words }),
            print: format.and_then(|format| self.ahead.formats.print(format)),
            context: held.context(),
        });
        self.export.event(&event).map_err(PlayError::Output)
    }

    pub(super) fn unfinished(
        &mut self,
        header: &Header,
        frame: &pairing::Frame,
    ) -> Result<(), PlayError> {
        if !frame.shown || self.ahead.selection.min_duration.is_some() {
            return Ok(());
        }
        let index = self.ahead.symbols.index(header, frame.function);
        let slot = self.tasks.slot(frame.pid);
        let event = Event::Unfinished(Unfinished {
            vcpu: frame.vcpu,
            pid: frame.pid,
            comm: self.tasks.comm(frame.pid, slot),
            function: self.ahead.symbols.name(header, frame.function, index),
            tracer: self.ahead.tracers.name(frame.tracer),
            place: Place { frame: frame.id, parent: None, depth: frame.depth },
        });
        self.export.event(&event).map_err(PlayError::Output)
    }
}
