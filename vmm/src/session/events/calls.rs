//! Events of single system calls. All share the two tracepoints of `raw_syscalls`, and the programs
//! of these: each has the records with its number.

use super::made::{Made, shape};
use super::table;
use super::{Event, Hooks, Kernel, Origin, Place, TracedEvent};
use crate::kernel::tracepoints::EventField;
use crate::relay::{EventFields, EventValue, From, OneCall, Part};
use crate::stream::{Shape, ValueField};
use std::sync::Arc;
use vmtrace_trampolines::Field;

/// What all events of one of the tracepoints have in common.
pub(super) struct Calls {
    hooks: Hooks,
    fields: Vec<Field>,
    /// The number of the call.
    number: Part,
    /// Its arguments; of an end its result.
    values: Vec<Part>,
}

impl Calls {
    /// Those of ends of calls, or of their beginnings.
    ///
    /// # Errors
    /// When the kernel's `raw_syscalls` are not as they are known to be.
    pub(super) fn new(kernel: &Kernel, exit: bool) -> Result<Self, String> {
        let name = if exit { "sys_exit" } else { "sys_enter" };
        let events = kernel.events().map_err(|error| error.to_string())?;
        let mut own = events.iter().filter(|event| event.system == "raw_syscalls");
        let found = own.find_map(|event| match &event.origin {
            Origin::Tracepoint(point, address) if event.name == name => {
                Some((event, point, *address))
            }
            _ => None,
        });
        let unknown = || format!("raw_syscalls:{name} is not as expected");
        let (event, point, address) = found.ok_or_else(unknown)?;
        let hooks = super::usable_hooks(kernel, address)?;
        let mut made = Made::new(kernel, point);
        let row = table::find(name).ok_or_else(unknown)?;
        let known = event.fields.iter().all(|field| made.by_row(row, field));
        let mut parts = made.values.into_iter().map(|value| match value.from {
            From::Same(part) => vec![part],
            From::Each(parts) => parts,
            _ => Vec::new(),
        });
        let number = parts.next().and_then(|first| first.into_iter().next());
        let values = parts.flatten().collect();
        let number = number.filter(|_| known).ok_or_else(unknown)?;
        Ok(Self { hooks, fields: made.fields, number, values })
    }

    /// The event of one call, whose number is known or not.
    pub(super) fn one(&self, event: &Event, number: Option<u32>) -> Result<TracedEvent, String> {
        let number =
            number.ok_or("no program can make such a call: it is not in the kernel's table")?;
        // The first field is the number, in every kernel.
        let parts = std::iter::once(&self.number).chain(&self.values);
        let mut values = Vec::new();
        for (field, part) in event.fields.iter().zip(parts) {
            values.push(EventValue {
                shown: ValueField { name: field.name.clone(), shape: typed(field) },
                from: From::Same(part.clone()),
            });
        }
        if values.len() != event.fields.len() {
            return Err("it has more arguments than system calls have".to_owned());
        }
        let call = OneCall { number, place: self.number.clone() };
        let fields = EventFields {
            name: event.full_name(),
            fields: self.fields.clone(),
            values,
            print: Some(print(&event.fields)),
            call: Some(call),
            in_place: false,
        };
        let (fields, from) = (Arc::new(fields), Place::Tracepoint(self.hooks.clone()));
        Ok(TracedEvent { fields, from, address: event.address, module: None })
    }
}

/// All are words, whatever the call makes of them.
fn typed(field: &EventField) -> Shape {
    shape(field, None).unwrap_or(Shape::Unsigned { bytes: 8 })
}

/// As the format file has it (`__set_enter_print_fmt`), but for leading zeros.
fn print(fields: &[EventField]) -> String {
    match fields {
        [_, result] if result.name == "ret" => "0x{ret:x}".to_owned(),
        [_, arguments @ ..] => {
            let each = arguments.iter().map(|field| format!("{0}: 0x{{{0}:x}}", field.name));
            each.collect::<Vec<_>>().join(", ")
        }
        [] => String::new(),
    }
}
