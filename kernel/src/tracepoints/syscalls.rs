//! Events of single system calls, which share two tracepoints (kernel/trace/trace_syscalls.c).

use std::collections::HashMap;

use super::super::Kernel;
use super::super::read::{index, u64_at};
use super::{EventField, LONGEST};

/// What functions of the table are called before the name that the source gives a call.
const PREFIXES: [&str; 3] = ["__x64_", "__riscv_", ""];
/// More than any table has.
const MOST: usize = 4096;

/// Whether an event is about a call's end, and the call's name.
pub(super) fn part(event: &str) -> Option<(bool, &str)> {
    let enter = event.strip_prefix("sys_enter_").map(|own| (false, own));
    enter.or_else(|| Some((true, event.strip_prefix("sys_exit_")?)))
}

/// Numbers of system calls by their names: by whose function stands where in the table. None in an
/// image without a table.
pub(super) fn numbers(kernel: &Kernel) -> HashMap<&str, u32> {
    let symbols = kernel.symbols();
    let table = symbols.address("sys_call_table").and_then(|start| {
        let count = index(symbols.next_after(start)?.checked_sub(start)? / 8).min(MOST);
        kernel.bytes(start, 8 * count)
    });
    let table = table.unwrap_or_default();
    let mut numbers = HashMap::new();
    for (number, entry) in (0..).zip(table.chunks_exact(8)) {
        for name in u64_at(entry, 0).into_iter().flat_map(|function| symbols.names_at(function)) {
            let own =
                PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)?.strip_prefix("sys_"));
            if let Some(own) = own {
                // As the kernel itself does, the last one counts.
                numbers.insert(own, number);
            }
        }
    }
    numbers
}

/// The fields of a system call's event (kernel/trace/trace_syscalls.c).
pub(super) fn fields(kernel: &Kernel, data: u64, exit: bool) -> Option<Vec<EventField>> {
    const MOST_ARGUMENTS: u32 = 6;
    let btf = kernel.btf().ok()?;
    let word = |name: &str, kind: &str, size, signed| EventField {
        name: name.to_owned(),
        kind: kind.to_owned(),
        size,
        signed,
    };
    let mut fields = vec![word("__syscall_nr", "int", 4, true)];
    if exit {
        fields.push(word("ret", "long", 8, true));
        return Some(fields);
    }
    let member = |name| btf.member_offset("syscall_metadata", name).map(u64::from);
    let count = kernel.bytes(data.wrapping_add(member("nb_args")?), 4)?;
    let count = u32::from_le_bytes(count.try_into().ok()?).min(MOST_ARGUMENTS);
    let (types, names) = (member("types")?, member("args")?);
    let memory = kernel.memory();
    let (types, names) =
        (memory.pointer(data.wrapping_add(types)), memory.pointer(data.wrapping_add(names)));
    for i in 0..u64::from(count) {
        let text = |table: Option<u64>| memory.text_behind(table?.wrapping_add(8 * i), LONGEST);
        fields.push(word(&text(names)?, &text(types)?, 8, false));
    }
    Some(fields)
}
