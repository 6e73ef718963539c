//! The templates, assembled.

#![allow(unsafe_code, reason = "slices over assembled code")]

use super::{Addressing, Overflow};
use crate::Template;
use crate::layout::{CHUNK_SIZE, HEADER_SIZE, RECORD_SIZE, control, header, record};
use crate::template::HOLES;

// Holes are `.long`s in the order of `Fixup::ALL`; -1 where a template has none.
// Placeholders in instructions are large so that the long encodings are chosen.
core::arch::global_asm!(
    r#"
    .macro VMTRACE_ENTRY name, shared, overwrite
    .pushsection .rodata.vmtrace_trampolines, "a", @progbits
    .balign 16
    .globl \name\()_start, \name\()_end, \name\()_holes
    .hidden \name\()_start, \name\()_end, \name\()_holes
\name\()_start:
    push    rax
    push    rdx
    .if \shared
    mov     edx, dword ptr gs:[0x11111111]
.L\name\()_cpu = . - 4
    cmp     edx, 0x11111111
.L\name\()_cpus = . - 4
    jae     .L\name\()_out
    mov     r11, qword ptr [rdx*8 + 0x11111111]
.L\name\()_table = . - 4
    .else
    movabs  r11, 0x1111111111111111
.L\name\()_control = . - 8
    .endif
.L\name\()_reserve:
    .if \shared
    mov     rax, qword ptr [r11 + {HEAD}]
    .else
    mov     rax, qword ptr gs:[r11 + {HEAD}]
    .endif
    test    eax, {CHUNK_SIZE} - 1
    jz      .L\name\()_slow
    lea     rdx, [rax + {RECORD_SIZE}]
    .if \shared
    lock cmpxchg qword ptr [r11 + {HEAD}], rdx
    .else
    cmpxchg qword ptr gs:[r11 + {HEAD}], rdx
    .endif
    jne     .L\name\()_reserve
    movsxd  r10, eax
    .if \overwrite
    // A slot of an earlier lap is still committed: withdraw it, then say whose
    // lap this is, so that a reader can tell a record from its predecessor.
    mov     dword ptr [r10 + {FUNCTION}], 0
    shr     rax, 32
    mov     dword ptr [r10 + {RECORD_LAP}], eax
    .endif
    mov     rdx, qword ptr [rsp + 24]
    mov     dword ptr [r10 + {CALLER}], edx
    mov     rdx, qword ptr gs:[0x11111111]
.L\name\()_current = . - 4
    mov     qword ptr [r10 + {TASK}], rdx
    mov     edx, dword ptr [rdx + 0x11111111]
.L\name\()_pid = . - 4
    mov     dword ptr [r10 + {PID}], edx
    rdtsc
    mov     dword ptr [r10 + {TIMESTAMP}], eax
    mov     dword ptr [r10 + {TIMESTAMP} + 4], edx
    mov     rdx, qword ptr [rsp + 16]
    mov     dword ptr [r10 + {FUNCTION}], edx
.L\name\()_out:
    pop     rdx
    pop     rax
    ret

    // The chunk is used up: open the next one if it is drained. The ring's header
    // is found from head itself, so whatever happens to this task in here, the
    // exchange or the verdict "full" is about the ring that head named.
.L\name\()_slow:
    lea     r10, [rax - 1]
    movsxd  r10, r10d
    and     r10, 0xffffffff91111111
.L\name\()_mask = . - 4
    mov     rdx, rax
    cmp     eax, dword ptr [r10 + {END}]
    jne     .L\name\()_same_lap
    shr     rdx, 32
    inc     rdx
    shl     rdx, 32
    or      rdx, qword ptr [r10 + {BASE}]
.L\name\()_same_lap:
    .if \overwrite == 0
    cmp     rdx, qword ptr [r10 + {ROOM}]
    jae     .L\name\()_full
    .endif
    add     rdx, {HEADER_SIZE}
    .if \shared
    lock cmpxchg qword ptr [r11 + {HEAD}], rdx
    .else
    cmpxchg qword ptr gs:[r11 + {HEAD}], rdx
    .endif
    jmp     .L\name\()_reserve
    .if \overwrite == 0
.L\name\()_full:
    lock inc qword ptr [r10 + {DROPPED}]
    jmp     .L\name\()_out
    .endif
\name\()_end:
    .balign 4
\name\()_holes:
    .if \shared
    .long -1
    .else
    .long .L\name\()_control - \name\()_start
    .endif
    .long .L\name\()_current - \name\()_start
    .long .L\name\()_pid - \name\()_start
    .long .L\name\()_mask - \name\()_start
    .if \shared
    .long .L\name\()_cpu - \name\()_start
    .long .L\name\()_cpus - \name\()_start
    .long .L\name\()_table - \name\()_start
    .else
    .long -1, -1, -1
    .endif
    .popsection
    .endm

    VMTRACE_ENTRY vmtrace_entry_percpu_drop, 0, 0
    VMTRACE_ENTRY vmtrace_entry_percpu_overwrite, 0, 1
    VMTRACE_ENTRY vmtrace_entry_shared_drop, 1, 0
    VMTRACE_ENTRY vmtrace_entry_shared_overwrite, 1, 1
"#,
    HEAD = const control::HEAD,
    BASE = const header::BASE,
    END = const header::END,
    ROOM = const header::ROOM,
    DROPPED = const header::DROPPED,
    HEADER_SIZE = const HEADER_SIZE,
    CHUNK_SIZE = const CHUNK_SIZE,
    RECORD_SIZE = const RECORD_SIZE,
    FUNCTION = const record::FUNCTION,
    RECORD_LAP = const record::LAP,
    CALLER = const record::CALLER,
    TASK = const record::TASK,
    PID = const record::PID,
    TIMESTAMP = const record::TIMESTAMP,
);

macro_rules! template {
    ($start:ident, $end:ident, $holes:ident) => {{
        unsafe extern "C" {
            static $start: u8;
            static $end: u8;
            static $holes: [u32; HOLES];
        }
        let len = (&raw const $end).addr() - (&raw const $start).addr();
        // SAFETY: start to end is one run of read-only data, defined above.
        let code = unsafe { core::slice::from_raw_parts(&raw const $start, len) };
        // SAFETY: a table of HOLES aligned words in read-only data, defined above.
        let holes = unsafe { &*(&raw const $holes) };
        Template { code, holes }
    }};
}

/// The trampoline that writes an entry record.
#[must_use]
pub fn entry(addressing: Addressing, overflow: Overflow) -> Template {
    match (addressing, overflow) {
        (Addressing::PerCpu, Overflow::Drop) => template!(
            vmtrace_entry_percpu_drop_start,
            vmtrace_entry_percpu_drop_end,
            vmtrace_entry_percpu_drop_holes
        ),
        (Addressing::PerCpu, Overflow::Overwrite) => template!(
            vmtrace_entry_percpu_overwrite_start,
            vmtrace_entry_percpu_overwrite_end,
            vmtrace_entry_percpu_overwrite_holes
        ),
        (Addressing::Shared, Overflow::Drop) => template!(
            vmtrace_entry_shared_drop_start,
            vmtrace_entry_shared_drop_end,
            vmtrace_entry_shared_drop_holes
        ),
        (Addressing::Shared, Overflow::Overwrite) => template!(
            vmtrace_entry_shared_overwrite_start,
            vmtrace_entry_shared_overwrite_end,
            vmtrace_entry_shared_overwrite_holes
        ),
    }
}
