//! Tracepoints: the kernel's events, and the places in its code where they are.
//!
//! An *event* is a tracepoint as the kernel's own tracing shows it: `sched:sched_switch` with its
//! fields. The image has complete descriptions of them (`_ftrace_events`,
//! include/linux/trace_events.h); BTF gives the offsets in their structures.

mod code;
mod file;
mod keys;
mod memory;
mod module;
mod prepare;
mod print;
mod signature;
mod syscalls;
mod x86_64;

use std::collections::HashMap;

use super::preemptirq::Switch;
use super::read::{index, u64_at};
use super::{Kernel, KernelError};

pub use code::{Hooks, StaticCalls};
pub use file::ModuleData;
pub use keys::{Branch, Call};
pub use memory::Memory;
pub use module::{ModuleTracepoint, ModuleTracepoints, Uses};
pub use prepare::{Preparation, SyscallMarks};

/// A tracepoint as the kernel's own tracing shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The part of the kernel that it belongs to, such as `sched`.
    pub system: String,
    /// Such as `sched_switch`; several systems may have the same.
    pub name: String,
    /// Where it comes from.
    pub origin: Origin,
    /// Link address of its `struct trace_event_call`, or what stands for one: no other event has the
    /// same.
    pub address: u64,
    /// What its format file has, but for the fields that all events have; in that order.
    pub fields: Vec<EventField>,
    /// How its format file prints it, as C; empty when not known.
    pub print: String,
}

/// Where an event comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A tracepoint: its name, and the link address of its `struct tracepoint`. Several events may
    /// come from one.
    Tracepoint(String, u64),
    /// A single system call, which has no tracepoint of its own (`raw_syscalls` has): its number, if
    /// the kernel's table has it, and whether it is about its end.
    Syscall {
        /// As programs use it.
        number: Option<u32>,
        /// It is about what the call returns.
        exit: bool,
    },
    /// Instructions that switch interrupts or preemption ([`Kernel::switches`]), in kernels without
    /// the tracepoint.
    Switch(Switch),
    /// Something else of the kernel's, such as its function tracer.
    Other,
}

/// A field of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventField {
    /// Its name.
    pub name: String,
    /// Its type as C has it, such as `pid_t`, `char[16]` or `__data_loc char[]`.
    pub kind: String,
    /// Bytes in the guest's own record.
    pub size: u32,
    /// Whether it is a number with a sign.
    pub signed: bool,
}

impl Event {
    /// As it is asked for: `sched:sched_switch`.
    pub fn full_name(&self) -> String {
        format!("{}:{}", self.system, self.name)
    }
}

/// More events than any kernel has.
const MOST_EVENTS: usize = 100_000;
/// More fields than any event has.
const MOST_FIELDS: usize = 128;
/// The longest name or type, and the longest format.
const LONGEST: usize = 256;
const LONGEST_PRINT: usize = 16 << 10;

/// Where in the kernel's structures things are.
#[derive(Debug)]
pub(super) struct EventLayout {
    points: code::Layout,
    module: Option<module::Layout>,
    class: u64,
    tracepoint: u64,
    print: u64,
    data: u64,
    system: u64,
    fields: u64,
    stride: u64,
    kind: u64,
    name: u64,
    size: u64,
    signed: u64,
}

impl EventLayout {
    fn find(kernel: &Kernel) -> Result<Self, KernelError> {
        let btf = kernel.btf()?;
        let member = |strukt: &'static str, member: &'static str| {
            let found = btf.member_offset(strukt, member).map(u64::from);
            found.ok_or(KernelError::Tracepoints("its type information does not describe events"))
        };
        let size = btf.struct_size("trace_event_fields").map(u64::from);
        Ok(Self {
            points: code::Layout::find(kernel)?,
            module: module::Layout::find(btf),
            class: member("trace_event_call", "class")?,
            tracepoint: member("trace_event_call", "tp")?,
            print: member("trace_event_call", "print_fmt")?,
            data: member("trace_event_call", "data")?,
            system: member("trace_event_class", "system")?,
            fields: member("trace_event_class", "fields_array")?,
            stride: size
                .filter(|&size| size > 0)
                .ok_or(KernelError::Tracepoints("it has no struct trace_event_fields"))?,
            kind: member("trace_event_fields", "type")?,
            name: member("trace_event_fields", "name")?,
            size: member("trace_event_fields", "size")?,
            signed: member("trace_event_fields", "is_signed")?,
        })
    }
}

impl Kernel {
    /// All events of the image itself (modules have their own), by system and name.
    ///
    /// # Errors
    /// When the image has no events, or no type information to understand them by.
    pub fn events(&self) -> Result<&[Event], KernelError> {
        if let Some(events) = self.events.get() {
            return Ok(events);
        }
        let events = find(self)?;
        Ok(self.events.get_or_init(|| events))
    }

    /// Where in its structures things are: looked for once.
    pub(super) fn event_layout(&self) -> Result<&EventLayout, KernelError> {
        if let Some(layout) = self.event_layout.get() {
            return Ok(layout);
        }
        let layout = EventLayout::find(self)?;
        Ok(self.event_layout.get_or_init(|| layout))
    }

    /// The memory of the image's file.
    fn memory(&self) -> &dyn Memory {
        self
    }
}

fn find(kernel: &Kernel) -> Result<Vec<Event>, KernelError> {
    let layout = kernel.event_layout()?;
    let symbols = kernel.symbols();
    let table =
        symbols.address("__start_ftrace_events").zip(symbols.address("__stop_ftrace_events"));
    let (start, stop) = table.ok_or(KernelError::Tracepoints("it was built without events"))?;
    let count = index(stop.saturating_sub(start) / 8).min(MOST_EVENTS);
    let words = kernel
        .bytes(start, count * 8)
        .ok_or(KernelError::Tracepoints("its table of events is not in the file"))?;
    let tables = Tables { points: tracepoints(kernel), syscalls: syscalls::numbers(kernel) };
    let mut events: Vec<Event> =
        (0..count).filter_map(|i| event(kernel, layout, &tables, u64_at(words, 8 * i)?)).collect();
    // The table itself is none of the events'.
    let places = (start..stop).step_by(8);
    let own = Switch::ALL.into_iter().zip(places).map(|(it, at)| switch(it, at));
    let missing = own.filter(|own| !events.iter().any(|it| it.full_name() == own.full_name()));
    let missing: Vec<Event> = missing.collect();
    events.extend(missing);
    events.sort_by(|a, b| (&a.system, &a.name).cmp(&(&b.system, &b.name)));
    Ok(events)
}

/// What stands for the tracepoint that a kernel has not: known by `address`.
fn switch(switch: Switch, address: u64) -> Event {
    let caller =
        EventField { name: "caller".to_owned(), kind: "void *".to_owned(), size: 8, signed: false };
    Event {
        system: Kernel::PREEMPTIRQ.to_owned(),
        name: switch.name().to_owned(),
        origin: Origin::Switch(switch),
        address,
        fields: vec![caller],
        print: "\"caller=%pS\", REC->caller".to_owned(),
    }
}

/// What events are found by.
struct Tables<'a> {
    /// Names of tracepoints by their link addresses.
    points: HashMap<u64, &'a str>,
    /// Numbers of system calls.
    syscalls: HashMap<&'a str, u32>,
}

/// Names of tracepoints by the link address of each.
fn tracepoints(kernel: &Kernel) -> HashMap<u64, &str> {
    let named = kernel.symbols().iter().filter_map(|symbol| {
        let name = symbol.name.strip_prefix("__tracepoint_")?;
        Some((symbol.address, name))
    });
    named.collect()
}

fn event(kernel: &Kernel, layout: &EventLayout, tables: &Tables<'_>, call: u64) -> Option<Event> {
    let memory = kernel.memory();
    let at = |offset: u64| call.wrapping_add(offset);
    let class = memory.pointer(at(layout.class))?;
    let system = memory.text_behind(class.wrapping_add(layout.system), LONGEST)?;
    // Name and tracepoint are one word.
    let point = memory.pointer(at(layout.tracepoint))?;
    let (name, origin) = match tables.points.get(&point) {
        Some(&name) => {
            // Events may have other names than their tracepoints.
            let symbol =
                kernel.symbols().names_at(call).find_map(|name| name.strip_prefix("event_"));
            let own = symbol.unwrap_or(name).to_owned();
            (own, Origin::Tracepoint(name.to_owned(), point))
        }
        None => {
            let name = memory.text(point, LONGEST)?;
            let origin = match (&*system, syscalls::part(&name)) {
                ("syscalls", Some((exit, own))) => {
                    Origin::Syscall { number: tables.syscalls.get(own).copied(), exit }
                }
                _ => Origin::Other,
            };
            (name, origin)
        }
    };
    let fields = match origin {
        Origin::Syscall { exit, .. } => {
            syscalls::fields(kernel, memory.pointer(at(layout.data))?, exit)?
        }
        _ => layout.fields(memory, class),
    };
    let print = layout.print(memory, call);
    Some(Event { system, name, origin, address: call, fields, print })
}

impl EventLayout {
    /// The fields of the events of a class, by its address.
    fn fields(&self, memory: &dyn Memory, class: u64) -> Vec<EventField> {
        let table = memory.pointer(class.wrapping_add(self.fields));
        let places = table.into_iter().flat_map(|table| {
            (0..MOST_FIELDS as u64).map(move |i| table.wrapping_add(i * self.stride))
        });
        places.map_while(|at| self.field(memory, at)).collect()
    }

    fn field(&self, memory: &dyn Memory, at: u64) -> Option<EventField> {
        let at = |offset: u64| at.wrapping_add(offset);
        let kind = u64::from_le_bytes(memory.array(at(self.kind))?);
        if kind == 0 || kind == u64::MAX {
            return None;
        }
        let size = memory.count(at(self.size))?;
        let [signed] = memory.array(at(self.signed))?;
        Some(EventField {
            name: memory.text_behind(at(self.name), LONGEST)?,
            kind: counted(&memory.text_behind(at(self.kind), LONGEST)?, size),
            size,
            signed: signed & 1 != 0,
        })
    }

    /// How an event is printed, by the address of its `struct trace_event_call`.
    fn print(&self, memory: &dyn Memory, call: u64) -> String {
        memory.text_behind(call.wrapping_add(self.print), LONGEST_PRINT).unwrap_or_default()
    }
}

/// A type whose count of characters is a name in the image, which the kernel replaces at boot.
fn counted(kind: &str, size: u32) -> String {
    match kind.strip_prefix("char[").and_then(|rest| rest.strip_suffix(']')) {
        Some(count) if !count.is_empty() && count.parse::<u32>().is_err() => {
            format!("char[{size}]")
        }
        _ => kind.to_owned(),
    }
}
