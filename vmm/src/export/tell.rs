//! Tells what records turned out to be as events, with names.

use std::num::NonZeroU64;

use crate::stream::Header;

use super::ahead::{Ahead, Held};
use super::error::PlayError;
use super::names::{LATER, Tasks};
use super::pairing::{Frame, Step, Steps};
use super::values::{Args, Returned};
use super::{Entry, Event, Export, Place, Return, Tail, Tracepoint, Unfinished};

/// What a record turned out to be, of what is shown. There is one of these for most records, and they may be
/// handed to another thread: so it has no more of a frame than is told.
#[derive(Clone, Copy, Debug)]
pub(super) enum Told {
    /// An entry of which nobody knows where in the call graph it is.
    Plain,
    /// A tracepoint.
    Event,
    /// A call begins.
    Entered { id: u64, parent: Option<u64>, depth: u32 },
    /// A call of that function ends, which may be another than the record's.
    Returned { function: u32, frame: Option<NonZeroU64>, depth: u32, ticks: Option<u64> },
    /// A call goes on elsewhere.
    Tailed { depth: u32 },
    /// A call that has ended unseen, or has not ended.
    Left { function: u32, id: u64, pid: u32, vcpu: u32, depth: u32, tracer: u8 },
}

impl Told {
    /// What is shown of a step of a record of that function.
    #[inline]
    pub(super) fn of(step: &Step, function: u32) -> Option<Self> {
        match *step {
            Step::Left(frame) | Step::Evicted(frame) => {
                let Frame { function, id, pid, vcpu, depth, tracer, shown, .. } = frame;
                shown.then_some(Self::Left { function, id, pid, vcpu, depth, tracer })
            }
            Step::Entered { id, parent, depth, shown } => {
                shown.then_some(Self::Entered { id, parent, depth })
            }
            Step::Returned { frame, depth, ticks, shown } => shown.then(|| Self::Returned {
                function: frame.map_or(function, |frame| frame.function),
                frame: frame.and_then(|frame| NonZeroU64::new(frame.id)),
                depth,
                ticks,
            }),
            Step::Tailed { depth, shown } => shown.then_some(Self::Tailed { depth }),
        }
    }
}

/// What is known of the values of the present record.
#[derive(Debug, Default)]
pub(super) struct Present {
    pub(super) format: Option<u32>,
    pub(super) failed: u64,
    pub(super) words: Vec<u64>,
}

impl Present {
    /// There are none.
    pub(super) fn clear(&mut self) {
        self.format = None;
        self.words.clear();
    }

    /// Takes them as [`Ahead::hold`] has put them.
    pub(super) fn read<'a>(&mut self, from: &mut impl Iterator<Item = &'a u64>) {
        let (Some(head), Some(failed)) = (from.next(), from.next()) else { return };
        self.format = u32::try_from(head >> 8).ok();
        self.failed = *failed;
        let words = usize::from(head.to_le_bytes()[0]);
        self.words.extend(from.take(words));
    }
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
            && let Some(told) = Told::of(&step, self.held.function)
            && let Err(error) =
                self.teller.tell(self.header, self.vcpu, self.held, self.value, &told)
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

    /// Tells what a record turned out to be, with the value that it returned.
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn tell(
        &mut self,
        header: &Header,
        vcpu: u32,
        held: &Held,
        value: Option<u64>,
        told: &Told,
    ) -> Result<(), PlayError> {
        let hides = self.ahead.selection.min_duration.is_some();
        match *told {
            Told::Plain => self.entry(header, vcpu, held, None),
            Told::Event => self.event(header, vcpu, held),
            Told::Entered { id, parent, depth } if !hides => {
                self.entry(header, vcpu, held, Some(Place { frame: id, parent, depth }))
            }
            Told::Tailed { depth } if !hides => {
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
            Told::Returned { function, frame, depth, ticks } => {
                let duration_ns = ticks.map(|ticks| header.duration_ns(ticks));
                if duration_ns < self.ahead.selection.min_duration {
                    return Ok(());
                }
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
                    frame: frame.filter(|_| !hides).map(NonZeroU64::get),
                    whole: frame.is_none() && ticks.is_some(),
                    context: held.context(),
                });
                self.export.event(&event).map_err(PlayError::Output)
            }
            Told::Left { function, id, pid, vcpu, depth, tracer } if !hides => {
                let index = self.ahead.symbols.index(header, function);
                let slot = self.tasks.slot(pid);
                let event = Event::Unfinished(Unfinished {
                    vcpu,
                    pid,
                    comm: self.tasks.comm(pid, slot),
                    function: self.ahead.symbols.name(header, function, index),
                    tracer: self.ahead.tracers.name(tracer),
                    place: Place { frame: id, parent: None, depth },
                });
                self.export.event(&event).map_err(PlayError::Output)
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn entry(
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

    fn event(&mut self, header: &Header, vcpu: u32, held: &Held) -> Result<(), PlayError> {
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
}
