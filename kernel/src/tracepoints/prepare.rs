//! What the kernel does, other than patching its code, when a tracepoint is switched on.

use super::super::{Arch, Kernel};
use super::keys::Branch;
use super::x86_64;
use crate::read::index;

/// What a tracepoint needs when it is switched on (`regfunc` of its structure).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Preparation {
    /// Nothing.
    Nothing,
    /// That system calls look for tracers at all.
    Syscalls(SyscallMarks),
    /// That the kernel comes by it at all: branches of a static key beside its own, which several tracepoints
    /// may have in common.
    Key(Vec<Branch>),
    /// What is not understood.
    Unknown,
}

/// How tasks are told that their system calls are traced (`syscall_regfunc`, kernel/tracepoint.c):
/// each has a mark, and who needs the marks is counted. Link addresses, and offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyscallMarks {
    /// The count: an `int`.
    pub users: u64,
    /// The first task, at which the list of all processes begins and ends.
    pub init_task: u64,
    /// In a task, the word with its mark.
    pub work: u64,
    /// The mark: the only bit that is set.
    pub mark: u64,
    /// In a task, its place in the list of all processes.
    pub tasks: u64,
    /// In a task, what all threads of its process have.
    pub signal: u64,
    /// In that, the list of these threads.
    pub threads: u64,
    /// In a task, its place in that list.
    pub thread: u64,
}

impl Kernel {
    /// What the function (link address; 0: none) does that a tracepoint calls when it is switched on.
    pub(super) fn preparation(&self, function: u64) -> Preparation {
        if function == 0 {
            return Preparation::Nothing;
        }
        let is = |name| self.symbols().address(name) == Some(function);
        let known = if is("syscall_regfunc") {
            self.syscall_marks().map(Preparation::Syscalls)
        } else if is("trace_pagefault_reg") {
            // arch/x86/kernel/tracepoint.c, before Linux 7.
            let key = self.symbols().address("trace_pagefault_key");
            let branches = key.and_then(|key| self.branches_of(key).ok());
            branches.filter(|all| !all.is_empty()).map(Preparation::Key)
        } else {
            None
        };
        known.unwrap_or(Preparation::Unknown)
    }

    fn syscall_marks(&self) -> Option<SyscallMarks> {
        let btf = self.btf().ok()?;
        let offset = |strukt, member| btf.member_offset(strukt, member).map(u64::from);
        let (word, bit) = match btf.enumerator("SYSCALL_WORK_BIT_SYSCALL_TRACEPOINT") {
            Some(bit) => ("thread_info.syscall_work", u32::try_from(bit).ok()?),
            // Before 5.11 it was one of the thread's flags, whose numbers only code has.
            None => ("thread_info.flags", self.marked_flag()?),
        };
        let mark = 1_u64.checked_shl(bit)?;
        Some(SyscallMarks {
            users: self.symbols().address("sys_tracepoint_refcount")?,
            init_task: self.symbols().address("init_task")?,
            work: offset("task_struct", word)?,
            mark,
            tasks: offset("task_struct", "tasks")?,
            signal: offset("task_struct", "signal")?,
            threads: offset("signal_struct", "thread_head")?,
            thread: offset("task_struct", "thread_node")?,
        })
    }

    /// The flag that `syscall_regfunc` sets in each task.
    fn marked_flag(&self) -> Option<u32> {
        /// The function has less than 200 bytes.
        const MAX: u64 = 512;
        let start = self.symbols().address("syscall_regfunc")?;
        let len = self.symbols().next_after(start)?.checked_sub(start)?.min(MAX);
        let code = self.bytes(start, index(len))?;
        match self.arch() {
            Arch::X86_64 => x86_64::marked_flag(code),
            Arch::Riscv64 => None,
        }
    }
}
