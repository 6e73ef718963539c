//! Tracepoints as Perfetto's ftrace events, in bundles of one vCPU each: typed messages for those
//! that trace_processor makes tables of (`sched_slice`, `thread_state`, slices of interrupts and
//! system calls), `GenericFtraceEvent` for all others.

use std::collections::BTreeSet;

use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint};

use super::super::ground::listed;
use super::wire::{Generic, GenericField, GenericValue};
use crate::export::Tracepoint;
use crate::stream::Shown;

/// Bytes of a bundle, from which on it is written.
const FULL: usize = 1 << 16;
/// `FtraceEvent.timestamp`, `.pid`, `.common_flags` and `.generic`.
const TIMESTAMP: u32 = 1;
const PID: u32 = 2;
const COMMON_FLAGS: u32 = 5;
const GENERIC: u32 = 327;
/// Most fields without a place that are named.
const NAMED: usize = 16;

/// A field: its name, number, what it is, and whether the message means something else without it.
struct Column(&'static str, u32, What, bool);

#[derive(Clone, Copy)]
enum What {
    Number,
    Text,
    Words,
}

const fn need(name: &'static str, number: u32) -> Column {
    Column(name, number, What::Number, true)
}

const fn number(name: &'static str, number: u32) -> Column {
    Column(name, number, What::Number, false)
}

const fn text(name: &'static str, number: u32) -> Column {
    Column(name, number, What::Text, false)
}

const WAKEUP: &[Column] = &[
    text("comm", 1),
    need("pid", 2),
    number("prio", 3),
    number("success", 4),
    number("target_cpu", 5),
];
const SOFTIRQ: &[Column] = &[need("vec", 1)];
const TASK: &[Column] = &[text("comm", 1), need("pid", 2), number("prio", 3)];
const WORK: &[Column] = &[need("work", 1), number("function", 2)];

/// Events, their numbers in `FtraceEvent`, and the fields of their messages: those of
/// `protos/perfetto/trace/ftrace` in Perfetto's repository.
const TABLE: &[(&str, u32, &[Column])] = &[
    (
        "sched:sched_switch",
        4,
        &[
            text("prev_comm", 1),
            need("prev_pid", 2),
            number("prev_prio", 3),
            need("prev_state", 4),
            text("next_comm", 5),
            need("next_pid", 6),
            number("next_prio", 7),
        ],
    ),
    ("power:cpu_idle", 13, &[need("state", 1), need("cpu_id", 2)]),
    ("power:cpu_frequency", 11, &[need("state", 1), need("cpu_id", 2)]),
    ("sched:sched_wakeup", 17, WAKEUP),
    ("sched:sched_waking", 20, WAKEUP),
    ("sched:sched_wakeup_new", 114, WAKEUP),
    ("irq:softirq_entry", 24, SOFTIRQ),
    ("irq:softirq_exit", 25, SOFTIRQ),
    ("irq:softirq_raise", 26, SOFTIRQ),
    ("irq:irq_handler_entry", 36, &[need("irq", 1), text("name", 2)]),
    ("irq:irq_handler_exit", 37, &[need("irq", 1), need("ret", 2)]),
    ("workqueue:workqueue_execute_start", 58, WORK),
    ("workqueue:workqueue_execute_end", 57, WORK),
    (
        "task:task_newtask",
        235,
        &[need("pid", 1), text("comm", 2), need("clone_flags", 3), number("oom_score_adj", 4)],
    ),
    (
        "task:task_rename",
        236,
        &[need("pid", 1), text("oldcomm", 2), text("newcomm", 3), number("oom_score_adj", 4)],
    ),
    ("sched:sched_process_exec", 237, &[text("filename", 1), need("pid", 2), number("old_pid", 3)]),
    (
        "sched:sched_process_exit",
        238,
        &[text("comm", 1), need("pid", 2), number("tgid", 3), number("prio", 4)],
    ),
    (
        "sched:sched_process_fork",
        239,
        &[
            text("parent_comm", 1),
            need("parent_pid", 2),
            text("child_comm", 3),
            need("child_pid", 4),
        ],
    ),
    ("sched:sched_process_free", 240, TASK),
    ("sched:sched_process_wait", 242, TASK),
    ("raw_syscalls:sys_enter", 329, &[need("id", 1), Column("args", 2, What::Words, false)]),
    ("raw_syscalls:sys_exit", 330, &[need("id", 1), need("ret", 2)]),
    (
        "sched:sched_migrate_task",
        491,
        &[
            text("comm", 1),
            need("pid", 2),
            number("prio", 3),
            number("orig_cpu", 4),
            number("dest_cpu", 5),
        ],
    ),
];

/// Events of a vCPU that are not written yet, in order of time.
#[derive(Clone, Debug, Default)]
pub(super) struct Bundle {
    pub(super) events: Vec<Vec<u8>>,
    bytes: usize,
}

impl Bundle {
    pub(super) fn push(&mut self, event: Vec<u8>) {
        self.bytes += event.len();
        self.events.push(event);
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes >= FULL
    }

    /// What is in it; it is empty then.
    pub(super) fn take(&mut self) -> Vec<Vec<u8>> {
        self.bytes = 0;
        std::mem::take(&mut self.events)
    }
}

/// Fields that the messages have no place for: event and field.
pub(super) type NoPlace = BTreeSet<(&'static str, Box<str>)>;

/// An event as a `FtraceEvent`. `at`: nanoseconds.
pub(super) fn event(event: &Tracepoint<'_>, at: u64, no_place: &mut NoPlace) -> Vec<u8> {
    let mut out = Vec::with_capacity(96);
    varint(&mut out, TIMESTAMP, at);
    // Readers are fast where the pid is next, and the event behind it.
    varint(&mut out, PID, event.pid.into());
    let (number, message) = typed(event, no_place).unwrap_or_else(|| (GENERIC, generic(event)));
    bytes(&mut out, number, &message);
    if let Some(context) = event.context {
        varint(&mut out, COMMON_FLAGS, context.flags.into());
    }
    out
}

fn varint(out: &mut Vec<u8>, field: u32, number: u64) {
    encode_key(field, WireType::Varint, out);
    encode_varint(number, out);
}

fn bytes(out: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    encode_key(field, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// The message of an event that Perfetto knows, if all is there that it needs.
fn typed(event: &Tracepoint<'_>, no_place: &mut NoPlace) -> Option<(u32, Vec<u8>)> {
    let (label, _) = event.event.symbol?;
    let (name, id, columns) = TABLE.iter().find(|(known, ..)| *known == label)?;
    let fields: Vec<_> = event.fields?.iter().collect();
    let mut out = Vec::with_capacity(80);
    let mut used = 0;
    for Column(name, number, what, needed) in *columns {
        let Some((_, shown)) = fields.iter().find(|(known, _)| known == name) else {
            if *needed {
                return None;
            }
            continue;
        };
        used += 1;
        match (what, shown.as_ref()?) {
            (What::Number, Shown::Signed(value)) => {
                varint(&mut out, *number, value.cast_unsigned());
            }
            (What::Number, Shown::Unsigned(value) | Shown::Pointer(value)) => {
                varint(&mut out, *number, *value);
            }
            (What::Number, Shown::Bool(yes)) => varint(&mut out, *number, (*yes).into()),
            (What::Text, Shown::Text(text)) => {
                bytes(&mut out, *number, String::from_utf8_lossy(text).as_bytes());
            }
            (What::Words, Shown::Words(words)) => {
                words.iter().for_each(|word| varint(&mut out, *number, *word));
            }
            _ => return None,
        }
    }
    if used < fields.len() {
        for (field, _) in &fields {
            let known = columns.iter().any(|Column(known, ..)| known == field);
            if !known && no_place.len() < NAMED && !no_place.contains(&(*name, (*field).into())) {
                no_place.insert((*name, (*field).into()));
            }
        }
    }
    Some((*id, out))
}

fn generic(event: &Tracepoint<'_>) -> Vec<u8> {
    let label = event.event.symbol.map_or_else(|| event.event.label(), |(name, _)| name.to_owned());
    let name = label.split_once(':').map_or(&*label, |(_, name)| name);
    let fields = event.fields.iter().flat_map(|fields| fields.iter());
    let field = fields.map(|(name, shown)| {
        let unread = GenericValue::Text("?".to_owned());
        GenericField {
            name: Some(name.to_owned()),
            value: Some(shown.map_or(unread, |shown| value(&shown))),
        }
    });
    Generic { event_name: Some(name.to_owned()), field: field.collect() }.encode_to_vec()
}

fn value(shown: &Shown<'_>) -> GenericValue {
    match shown {
        Shown::Signed(number) => GenericValue::Int(*number),
        Shown::Unsigned(number) | Shown::Pointer(number) => GenericValue::Uint(*number),
        Shown::Bool(yes) => GenericValue::Uint((*yes).into()),
        Shown::Char(byte) => GenericValue::Text(char::from(*byte).to_string()),
        Shown::Name(name) => GenericValue::Text((*name).to_owned()),
        Shown::Text(text) => GenericValue::Text(String::from_utf8_lossy(text).into_owned()),
        Shown::Raw(bytes) => {
            GenericValue::Text(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
        }
        Shown::Words(words) => GenericValue::Text(listed(words)),
    }
}
