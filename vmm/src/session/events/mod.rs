//! Events of tracepoints: from what a user asks for to what their records have.

mod block;
mod calls;
mod made;
mod modules;
mod patterns;
mod plan;
mod table;

use crate::kernel::preemptirq::Switch;
use crate::kernel::tracepoints::{Event, Hooks, Origin, Preparation};
use crate::kernel::{Functions, Kernel, KernelError, Near, glob};
use crate::relay::{EventFields, EventValue, From};
use crate::stream::{Shape, ValueField};
use calls::Calls;
use made::Made;
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) use modules::module_events;
pub use patterns::Patterns;

/// An event that is to be traced.
#[derive(Clone, Debug)]
pub struct TracedEvent {
    /// What it is, and what is recorded.
    pub fields: Arc<EventFields>,
    /// What tells it.
    pub from: Place,
    /// Link address of what it is known by in the kernel: no other event has the same.
    pub address: u64,
    /// The module that it is of, if it is of one.
    pub module: Option<Arc<str>>,
}

/// What tells an event.
#[derive(Clone, Debug)]
pub enum Place {
    /// A tracepoint: what calls its probes.
    Tracepoint(Hooks),
    /// Instructions that switch this.
    Switch(Switch),
}

impl TracedEvent {
    /// What calls its probes, if a tracepoint tells it.
    #[must_use]
    pub fn hooks(&self) -> Option<&Hooks> {
        match &self.from {
            Place::Tracepoint(hooks) => Some(hooks),
            Place::Switch(_) => None,
        }
    }

    /// What instructions switch that tell it, if they do.
    #[must_use]
    pub fn switch(&self) -> Option<Switch> {
        match self.from {
            Place::Tracepoint(_) => None,
            Place::Switch(switch) => Some(switch),
        }
    }

    /// What the probe of its tracepoint is known by.
    pub(super) fn known_by(&self, hooks: &Hooks) -> (u64, &str) {
        (hooks.tracepoint, self.module.as_ref().map_or("", |_| &self.fields.name))
    }

    /// Whether a pattern means it.
    pub(super) fn is_meant_by(&self, pattern: &str) -> bool {
        is_meant_in(pattern, &self.fields.name, self.module.as_deref())
    }

    /// Link address of its `struct tracepoint`, if it has one.
    pub(super) fn tracepoint(&self) -> Option<u64> {
        self.hooks().map(|hooks| hooks.tracepoint)
    }

    /// Whether one moment would be a record of each.
    fn is_beside(&self, other: &Self) -> bool {
        let numbers = [self, other].map(|event| event.fields.call.as_ref().map(|call| call.number));
        (self.tracepoint(), self.switch()) == (other.tracepoint(), other.switch())
            && match numbers {
                [Some(one), Some(other)] => one == other,
                _ => true,
            }
    }
}

/// Why an event cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum EventError {
    /// There is none.
    #[error(
        "no event of the kernel matches '{}': vmtrace events lists all, as SYSTEM:NAME; those of a \
         module that is not loaded yet are '{}:mod:MODULE'{}", .0.pattern, .0.pattern, .0.near
    )]
    Unknown(UnknownEvent),
    /// Only functions have modules of which nothing is told.
    #[error("'{0}' waits for a module, but the kernel does not say where modules have events: {1}")]
    Modules(String, String),
    /// All that match need what is not done.
    #[error("{0}: {1}")]
    Unsupported(String, String),
    /// The kernel does not tell.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// What no event matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownEvent {
    /// As it was asked for.
    pub pattern: String,
    /// What may have been meant.
    pub near: Near,
}

impl UnknownEvent {
    fn new(pattern: &str, events: &[Event]) -> Self {
        let is_glob = pattern.contains(['*', '?', '[', '\\']);
        // Without a system, events of all are meant.
        let name = |event: &Event| match pattern.contains(':') {
            true => event.full_name(),
            false => event.name.clone(),
        };
        let names: Vec<String> = events.iter().filter(|_| !is_glob).map(name).collect();
        let near = Near::to(pattern, names.iter().map(String::as_str));
        Self { pattern: pattern.to_owned(), near }
    }
}

/// The events that a pattern matches (`SYSTEM:NAME`, or a name of any system), and notes on those
/// that are not traced.
///
/// # Errors
/// When there is none that can be traced.
pub fn events(
    kernel: &Kernel,
    pattern: &str,
) -> Result<(Vec<TracedEvent>, Vec<String>), EventError> {
    // Those are as many as calls of functions: only who names them means them.
    let named = |event: &Event| {
        pattern == event.name || pattern.starts_with(&format!("{}:", Kernel::PREEMPTIRQ))
    };
    let matches = |event: &&Event| {
        let is_switch = matches!(event.origin, Origin::Switch(_));
        is_meant(pattern, &event.full_name()) && (!is_switch || named(event))
    };
    let mut traced: Vec<TracedEvent> = Vec::new();
    let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut notes = Vec::new();
    let (mut calls, mut waiting) = ([None, None], Vec::new());
    for event in kernel.events()?.iter().filter(matches) {
        match one(kernel, event, &mut calls) {
            Ok((made, note)) => {
                // Two events of one tracepoint would be two records of one moment.
                if traced.iter().any(|other| other.is_beside(&made)) {
                    reasons.entry(ANOTHER.to_owned()).or_default().push(event.full_name());
                } else {
                    if made.hooks().is_some_and(|hooks| !hooks.are_used()) {
                        waiting.push(event.full_name());
                    }
                    notes.extend(note);
                    traced.push(made);
                }
            }
            Err(why) => reasons.entry(why).or_default().push(event.full_name()),
        }
    }
    if let Some(module) = Functions::of(pattern).module() {
        let unknown =
            |error: KernelError| EventError::Modules(pattern.to_owned(), error.to_string());
        kernel.check_module_tracepoints().map_err(unknown)?;
        return Ok((Vec::new(), vec![format!("event {pattern} waits for module {module}")]));
    }
    if traced.is_empty() {
        // Why most of them are not: a glob may also match what comes from nowhere.
        return Err(match reasons.into_iter().rev().max_by_key(|(_, names)| names.len()) {
            Some((why, _)) => EventError::Unsupported(pattern.to_owned(), why),
            None => unknown(kernel, pattern),
        });
    }
    notes.extend(reasons.iter().map(|(why, names)| not_traced(why, names)));
    if !waiting.is_empty() {
        notes.push(format!(
            "{} events are traced where modules use them, since the kernel itself does not{}",
            waiting.len(),
            such_as(&waiting)
        ));
    }
    Ok((traced, notes))
}

/// Why nothing matches.
fn unknown(kernel: &Kernel, pattern: &str) -> EventError {
    let mut switches = Switch::ALL.into_iter();
    let means = switches.any(|switch| is_meant(pattern, &switch.to_string()));
    // That takes a look at all code.
    match means.then(|| kernel.switches()) {
        Some(Err(error)) => EventError::Unsupported(pattern.to_owned(), error.to_string()),
        _ => EventError::Unknown(UnknownEvent::new(pattern, kernel.events().unwrap_or_default())),
    }
}

/// What instructions tell: where they are.
fn switched(
    kernel: &Kernel,
    event: &Event,
    switch: Switch,
) -> Result<(TracedEvent, Option<String>), String> {
    let switches = kernel.switches().map_err(|error| error.to_string())?;
    switches.check(switch).map_err(|error| error.to_string())?;
    let names =
        switches.unusable(switch).iter().filter_map(|&at| Some(kernel.symbols().lookup(at)?.0));
    let mut names: Vec<&str> = names.collect();
    names.dedup();
    let examples = names.iter().take(3).copied().collect::<Vec<_>>().join(", ");
    let note = (!names.is_empty()).then(|| {
        let count = names.len();
        format!(
            "{switch} is not recorded everywhere in {count} functions (such as {examples}): no room"
        )
    });
    let values = event.fields.iter().map(|field| EventValue {
        shown: ValueField { name: field.name.clone(), shape: Shape::Pointer },
        from: From::Caller,
    });
    let fields = EventFields {
        name: event.full_name(),
        fields: Vec::new(),
        values: values.collect(),
        print: Some("caller={caller}".to_owned()),
        call: None,
        in_place: true,
    };
    let (from, address) = (Place::Switch(switch), event.address);
    Ok((TracedEvent { fields: Arc::new(fields), from, address, module: None }, note))
}

/// Adds those of which no record is written yet: two events of one tracepoint would be two records
/// of one moment. What there is to say of those that are left out for another one.
pub fn add_events(events: &mut Vec<TracedEvent>, found: Vec<TracedEvent>) -> Option<String> {
    let mut left_out = Vec::new();
    for event in found {
        match events.iter().find(|known| known.is_beside(&event)) {
            None => events.push(event),
            Some(same) if same.address == event.address => {}
            Some(_) => left_out.push(event.fields.name.clone()),
        }
    }
    (!left_out.is_empty()).then(|| not_traced(ANOTHER, &left_out))
}

/// Why an event is left out beside one of the same tracepoint.
const ANOTHER: &str = "its tracepoint has another event, which is traced";

/// Why these events are not traced, for people.
fn not_traced(why: &str, names: &[String]) -> String {
    format!("{} events are not traced: {why}{}", names.len(), such_as(names))
}

fn such_as(names: &[String]) -> String {
    let examples = names.iter().take(3).map(String::as_str).collect::<Vec<_>>().join(", ");
    format!(" (such as {examples})")
}

/// Whether nothing is known of where this event's fields come from: its records have the arguments of
/// its tracepoint.
pub fn has_only_arguments(event: &Event) -> bool {
    matches!(event.origin, Origin::Tracepoint(..)) && table::find(&event.name).is_none()
}

/// Whether a pattern means the event with this full name, in this module; `None`: in the kernel itself.
pub fn is_meant_in(pattern: &str, name: &str, module: Option<&str>) -> bool {
    let of = Functions::of(pattern);
    let is_there = match module {
        Some(module) => of.reaches(module),
        None => of.module().is_none(),
    };
    is_there && is_meant(of.glob(), name)
}

/// Whether a pattern means the event with this full name.
pub(super) fn is_meant(pattern: &str, name: &str) -> bool {
    let own = name.split_once(':').map_or(name, |(_, own)| own);
    glob::matches(pattern, if pattern.contains(':') { name } else { own })
}

/// Where the kernel's code comes by a tracepoint that can be traced.
fn usable_hooks(kernel: &Kernel, address: u64) -> Result<Hooks, String> {
    let hooks = kernel.tracepoint_hooks(address).map_err(|error| error.to_string())?;
    check_preparation(&hooks)?;
    if !hooks.are_used() && kernel.check_module_tracepoints().is_err() {
        return Err("the kernel's own code does not use it".to_owned());
    }
    Ok(hooks)
}

fn check_preparation(hooks: &Hooks) -> Result<(), String> {
    if hooks.preparation == Preparation::Unknown {
        return Err("the guest's kernel must be prepared for it, which only its own tracing does"
            .to_owned());
    }
    Ok(())
}

/// An event, and what there is to say of it. What beginnings and ends of system calls have in common
/// is found once.
fn one(
    kernel: &Kernel,
    event: &Event,
    calls: &mut [Option<Result<Calls, String>>; 2],
) -> Result<(TracedEvent, Option<String>), String> {
    let (point, address) = match &event.origin {
        Origin::Tracepoint(name, address) => (name, *address),
        Origin::Syscall { number, exit } => {
            let known = calls.get_mut(usize::from(*exit)).ok_or("no such calls")?;
            let known = known.get_or_insert_with(|| Calls::new(kernel, *exit));
            let known = known.as_ref().map_err(String::clone)?;
            return Ok((known.one(event, *number)?, None));
        }
        Origin::Switch(switch) => return switched(kernel, event, *switch),
        Origin::Other => return Err("it does not come from a tracepoint".to_owned()),
    };
    let hooks = usable_hooks(kernel, address)?;
    let mut made = Made::new(kernel, point);
    let row = table::find(&event.name);
    let mut unknown = Vec::new();
    match row {
        Some(row) => {
            for field in &event.fields {
                if !made.by_row(row, field) {
                    unknown.push(field.name.as_str());
                }
            }
        }
        None => made.by_types(None)?,
    }
    let note = (!unknown.is_empty())
        .then(|| format!("{} is traced without {}", event.full_name(), unknown.join(", ")));
    let print = row.filter(|_| unknown.is_empty()).and_then(|row| {
        let written = table::print(row, event, |field| kernel.event_form(event, field));
        written.or_else(|| kernel.event_print(event))
    });
    let fields = Arc::new(made.fields(event.full_name(), print));
    Ok((TracedEvent { fields, from: Place::Tracepoint(hooks), address, module: None }, note))
}

#[cfg(test)]
mod tests {
    use super::*;

    // `--event syscalls:sys_enter_openat --event 'raw_syscalls:*'` had no sys_enter, and nothing said so.
    #[test]
    fn what_is_left_out_for_another_event_is_told() {
        let event = |name: &str, address| {
            let name = name.to_owned();
            let (fields, values) = (Vec::new(), Vec::new());
            let fields =
                EventFields { name, fields, values, print: None, call: None, in_place: true };
            TracedEvent {
                fields: Arc::new(fields),
                from: Place::Switch(Switch::IrqDisable),
                address,
                module: None,
            }
        };
        let mut events = Vec::new();
        assert_eq!(add_events(&mut events, vec![event("a:one", 1)]), None);
        assert_eq!(add_events(&mut events, vec![event("a:one", 1)]), None, "asked for twice");
        assert_eq!(
            add_events(&mut events, vec![event("b:other", 2)]).as_deref(),
            Some(
                "1 events are not traced: its tracepoint has another event, which is traced \
                 (such as b:other)"
            )
        );
        assert_eq!(events.len(), 1);
    }
}
