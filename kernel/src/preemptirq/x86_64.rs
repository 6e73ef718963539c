//! Finds these places in x86-64 kernels.
//!
//! With `CONFIG_PARAVIRT_XXL` every `cli` and `sti` of C code is an alternative of 6 bytes, a call
//! through `pv_ops` until it is replaced by the instruction and a nop (arch/x86/include/asm/
//! paravirt.h). Interrupts and exceptions enter C code by a call in `.entry.text`, and leave by
//! `jmp error_return` (arch/x86/entry/entry_64.S, `idtentry_body`). The preemption count is a
//! per-CPU word that is changed in place (arch/x86/include/asm/preempt.h).

use std::ops::Range;

use crate::exits::x86_64::{CountPlace, Counted, Survey, Tables};
use crate::read::{i32_at, index};
use crate::{Kernel, KernelError};

use super::{BY_FUNCTION, SwitchKind, SwitchSite, Switches, counts_by_function};

pub(super) mod module;

/// What the assembly calls for a system call (arch/x86/entry/entry_64.S, entry_64_compat.S).
const CALLS: [&str; 4] =
    ["do_syscall_64", "do_fast_syscall_32", "do_SYSENTER_32", "do_int80_syscall_32"];
/// Where a new task first goes to its program from; before Linux 6.6 without the ending.
const NEW_TASK: [&str; 2] = ["ret_from_fork_asm", "ret_from_fork"];
/// Bytes of a call, a jump, and a return with the room beside it.
const BRANCH: u8 = 5;
const CALL: u8 = 0xe8;
const JUMP: u8 = 0xe9;

pub(super) fn find(kernel: &Kernel) -> Result<Switches, KernelError> {
    if !crate::has_data(kernel.symbols()) {
        return Err(KernelError::FunctionSymbols);
    }
    let tables = Tables { kernel };
    let count = count(kernel);
    let place = count.map(|count| CountPlace { near: count, plain: count });
    let survey = Survey::new(&tables, place)?;
    let mut finder =
        Finder { kernel, survey, list: Vec::new(), unusable: [Vec::new(), Vec::new()] };
    let alternatives = finder.alternatives();
    let entries = finder.entries(&tables)?;
    let interrupts = match (alternatives, entries) {
        // It patches what `.parainstructions` lists, from 5.12 on alternatives.
        (false, _) if kernel.symbols().address("native_patch").is_some() => Some(
            "before 5.12 such code is patched as .parainstructions says, which vmtrace does not read (newer \
             kernels work)",
        ),
        (false, _) => Some(
            "its code switches interrupts by single bytes, without room for a jump (built without \
             CONFIG_PARAVIRT_XXL?)",
        ),
        (_, false) => Some("where its interrupts begin and end is not known"),
        (true, true) => None,
    };
    let preemption = match count {
        None => Some("where it counts preemptions is not known"),
        // Most places call a function then, whose sum is by what they pass.
        Some(_) if counts_by_function(kernel) => Some(BY_FUNCTION),
        Some(_) if !finder.counts() => {
            Some("it does not count preemptions in place (built without CONFIG_PREEMPT_COUNT?)")
        }
        Some(_) => None,
    };
    let Finder { mut list, mut unusable, .. } = finder;
    list.sort_unstable_by_key(|site| site.address);
    unusable.iter_mut().for_each(|own| own.sort_unstable());
    Ok(Switches { list, unusable, missing: [interrupts, preemption] })
}

/// Offset of the count of preemptions from the gs base: of symbols of CPUs from 0 on up to 6.14,
/// a link address later.
fn count(kernel: &Kernel) -> Option<u64> {
    match kernel.symbols().address("pcpu_hot") {
        Some(hot) => {
            let member = kernel.structs().ok()?.member_offset("pcpu_hot", "preempt_count")?;
            Some(hot.wrapping_add(member))
        }
        None => kernel.symbols().address("__preempt_count"),
    }
}

struct Finder<'a> {
    kernel: &'a Kernel,
    survey: Survey<'a>,
    list: Vec<SwitchSite>,
    /// Of interrupts, and of preemption.
    unusable: [Vec<u64>; 2],
}

impl Finder<'_> {
    fn add(&mut self, address: u64, kind: SwitchKind) {
        self.list.push(SwitchSite { address, kind });
    }

    /// `cli` and `sti` in C code; whether there are both.
    fn alternatives(&mut self) -> bool {
        const LEN: u8 = 6;
        let assembly = self.entry_text().unwrap_or_default();
        let mut found = Vec::new();
        let mut others = Vec::new();
        for &(original, len, replacement, replacement_len) in &self.survey.patches.alternatives {
            let code = self.kernel.bytes(replacement, replacement_len.into());
            let kind = match code {
                Some([0xfa]) => Some(SwitchKind::Cli),
                Some([0xfb]) => Some(SwitchKind::Sti),
                _ => None,
            };
            match kind.filter(|_| len == LEN && self.survey.text.contains(&original)) {
                Some(_) if assembly.contains(&original) => {}
                Some(kind) => found.push((original, kind)),
                None => others.push(original..original.wrapping_add(len.into())),
            }
        }
        found.sort_unstable_by_key(|&(address, _)| address);
        found.dedup();
        others.sort_unstable_by_key(|range| range.start);
        let both = [SwitchKind::Cli, SwitchKind::Sti]
            .map(|wanted| found.iter().any(|&(_, kind)| kind == wanted));
        for &(address, kind) in &found {
            // Another alternative there must be of the same instruction: the call is one as well.
            let end = address.wrapping_add(LEN.into());
            let until = others.partition_point(|other| other.start < end);
            let near = others.get(until.saturating_sub(8)..until).unwrap_or_default();
            let shared = near.iter().any(|it| it.end > address && *it != (address..end));
            let rewritten = self.survey.patches.later.any(address, LEN);
            let led_into = self.survey.is_led_into(address.wrapping_add(1), LEN - 1);
            if shared || rewritten || led_into {
                self.unusable[0].push(address);
            } else {
                self.add(address, kind);
            }
        }
        both == [true; 2]
    }

    /// The text of the assembly through which all come into the kernel.
    fn entry_text(&self) -> Option<Range<u64>> {
        let symbols = self.kernel.symbols();
        Some(symbols.address("__entry_text_start")?..symbols.address("__entry_text_end")?)
    }

    /// Where a branch of 5 bytes with this opcode leads.
    fn branch(&self, address: u64, opcode: u8) -> Option<u64> {
        let bytes = self.kernel.bytes(address, BRANCH.into())?;
        let distance = i32_at(bytes, 1)?;
        let next = address.wrapping_add(BRANCH.into());
        (bytes.first() == Some(&opcode)).then(|| next.wrapping_add_signed(distance.into()))
    }

    /// Calls of handlers and what follows them; whether there are any.
    fn entries(&mut self, tables: &Tables<'_>) -> Result<bool, KernelError> {
        let symbols = self.kernel.symbols();
        let (Some(text), Some(out)) = (self.entry_text(), symbols.address("error_return")) else {
            return Ok(false);
        };
        let calls: Vec<u64> = CALLS.iter().filter_map(|name| symbols.address(name)).collect();
        let len = index(text.end.saturating_sub(text.start));
        let code = self.kernel.bytes(text.start, len).unwrap_or_default();
        // A byte of another instruction may look like a branch, but does not lead there.
        let mut found = Vec::new();
        for at in memchr::memchr2_iter(CALL, JUMP, code) {
            let address = text.start.wrapping_add(crate::read::wide(at));
            if self.branch(address, JUMP) == Some(out) {
                let before = address.wrapping_sub(BRANCH.into());
                if let Some(handler) = self.branch(before, CALL).filter(|it| self.begins(*it)) {
                    found.push((before, SwitchKind::Handle(handler)));
                    found.push((address, SwitchKind::Restore(out)));
                }
            } else if let Some(handler) = self.branch(address, CALL)
                && calls.contains(&handler)
            {
                found.push((address, SwitchKind::HandleCall(handler)));
            }
        }
        let interrupts = found.iter().any(|(_, kind)| matches!(kind, SwitchKind::Restore(_)));
        let called = found.iter().any(|(_, kind)| matches!(kind, SwitchKind::HandleCall(_)));
        let returns = tables.returns()?.unwrap_or_default();
        let mut ends = false;
        for start in calls {
            let end = symbols.next_after(start).unwrap_or(start);
            let first = returns.partition_point(|&address| address < start);
            let own = returns.iter().skip(first).take_while(|&&address| address < end);
            for &address in own {
                ends = true;
                found.push((address, SwitchKind::Return));
            }
        }
        // From 6.9 on the jump is an alternative as a whole: with FRED it leads elsewhere, and is not
        // held then.
        let new_tasks = self.new_tasks();
        let whole = |&(address, len, ..): &(u64, u8, u64, u8)| {
            Some(address) == new_tasks.map(|(at, _)| at) && len == BRANCH
        };
        let is_whole = self.survey.patches.alternatives.iter().any(whole);
        found.extend(new_tasks);
        for (address, kind) in found {
            let patches = &self.survey.patches;
            let rewritten = if is_whole && Some((address, kind)) == new_tasks {
                patches.later.any(address, BRANCH)
            } else {
                patches.bytes.any(address, BRANCH)
            };
            if rewritten || self.survey.is_led_into(address.wrapping_add(1), BRANCH - 1) {
                self.unusable[0].push(address);
            } else {
                self.add(address, kind);
            }
        }
        Ok(interrupts && called && ends)
    }

    /// Whether a function begins here.
    fn begins(&self, address: u64) -> bool {
        self.kernel.symbols().names_at(address).next().is_some()
    }

    /// Where a new task leaves for its program: a jump behind a call.
    fn new_tasks(&self) -> Option<(u64, SwitchKind)> {
        let symbols = self.kernel.symbols();
        let out = symbols.address("swapgs_restore_regs_and_return_to_usermode")?;
        NEW_TASK.iter().filter_map(|name| symbols.address(name)).find_map(|start| {
            let end = symbols.next_after(start)?;
            let leaves = |at: &u64| {
                self.branch(*at, JUMP) == Some(out)
                    && self.branch(at.wrapping_sub(BRANCH.into()), CALL).is_some()
            };
            let at = (start..end.min(start.wrapping_add(1024))).find(leaves)?;
            Some((at, SwitchKind::Restore(out)))
        })
    }

    /// Changes of the count of preemptions; whether there are any both ways.
    fn counts(&mut self) -> bool {
        let all = self.survey.counted().to_vec();
        for Counted { address, len, add, wide, by_register, .. } in all {
            if by_register {
                // The instruction that changes it by a register has 3 bytes.
                self.unusable[1].push(address);
                continue;
            }
            // What sets it, or only the bit that asks for a reschedule.
            let Some(kind) = add.map(|add| SwitchKind::Count { add, wide }) else { continue };
            let rewritten = self.survey.patches.bytes.any(address, len);
            let led_into = self.survey.is_led_into(address.wrapping_add(1), len - 1);
            if rewritten || led_into || len != kind.size() || add == Some(0) {
                self.unusable[1].push(address);
            } else {
                self.add(address, kind);
            }
        }
        let is_there = |wanted| {
            let adds = |kind| matches!(kind, SwitchKind::Count { add, .. } if add == wanted);
            self.list.iter().any(|it| adds(it.kind))
        };
        is_there(1) && is_there(-1)
    }
}
