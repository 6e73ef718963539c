//! Layout of the kernel's structures: from its BTF, or, in a kernel without BTF, as far as the
//! image itself shows it.

use std::collections::BTreeMap;

use super::image::Image;
use super::read::{index, u64_at, wide};
use super::{Arch, Btf, Symbols, sites};

/// Where members lie in the structures that tracing needs, and no others: found once, before a
/// guest runs, which would wait for it.
#[derive(Debug)]
pub struct Structs {
    source: Source,
    offsets: BTreeMap<Member, u64>,
}

/// A struct and a member of it.
type Member = (&'static str, &'static str);

/// What the layout of structures is known from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The kernel's own type information.
    Btf,
    /// What the image itself shows.
    Image,
}

/// Stands for a member where a size is meant.
const SIZE: &str = "";

/// The same in every kernel of 5.10 to 7.2, whatever its configuration
/// (include/linux/ftrace.h; `pcpu_hot` of 6.2 to 6.14: arch/x86/include/asm/current.h).
const FIXED: [(Member, u64); 9] = [
    (("ftrace_page", "next"), 0),
    (("ftrace_page", "records"), 8),
    (("ftrace_page", "index"), 16),
    (("dyn_ftrace", "ip"), 0),
    (("dyn_ftrace", "flags"), 8),
    (("dyn_ftrace", SIZE), 16),
    (("ftrace_ops", "func"), 0),
    (("pcpu_hot", "current_task"), 0),
    (("pcpu_hot", "cpu_number"), 12),
];

/// What differs from build to build.
const PID: Member = ("task_struct", "pid");
const TGID: Member = ("task_struct", "tgid");
const COMM: Member = ("task_struct", "comm");
const THREAD_INFO: Member = ("task_struct", "thread_info");
const CPU: Member = ("thread_info", "cpu");
const STACK: Member = ("task_struct", "stack");
const DIRECT_CALL: Member = ("ftrace_ops", "direct_call");

/// What ftrace's columns of context are made of, and how often a task was taken off its CPU; only type information
/// tells where.
const CONTEXT: [Member; 7] = [
    ("thread_info", "flags"),
    ("thread_info", "preempt_count"),
    ("pcpu_hot", "preempt_count"),
    ("task_struct", "migration_disabled"),
    ("task_struct", "softirq_disable_cnt"),
    ("task_struct", "nvcsw"),
    ("task_struct", "nivcsw"),
];

impl Structs {
    /// From the type information.
    pub(super) fn from_btf(btf: &Btf) -> Self {
        let fixed = FIXED.into_iter().map(|(member, _)| member);
        let all =
            fixed.chain([PID, TGID, COMM, THREAD_INFO, CPU, STACK, DIRECT_CALL]).chain(CONTEXT);
        let offset = |(strukt, member): Member| match member {
            SIZE => btf.struct_size(strukt),
            member => btf.member_offset(strukt, member),
        };
        let offsets = all.filter_map(|member| Some((member, offset(member)?.into())));
        Self { source: Source::Btf, offsets: offsets.collect() }
    }

    /// Finds what differs from build to build in the first task, which the image holds
    /// ready-made, and in code.
    ///
    /// # Errors
    /// What it is that cannot be told.
    pub(super) fn find(image: &Image, symbols: &Symbols) -> Result<Self, &'static str> {
        let mut offsets = BTreeMap::from(FIXED);
        let task = Task::find(image, symbols).ok_or("the image has no init_task")?;
        let pid = task.pid().ok_or("init_task has no known order")?;
        offsets.extend([(PID, pid), (TGID, pid + 4)]);
        offsets.insert(COMM, task.comm().ok_or("init_task has no name")?);
        if image.arch == Arch::Riscv64 {
            offsets.insert(THREAD_INFO, 0);
            offsets.insert(CPU, cpu(image, symbols).ok_or("no code shows where a task's CPU is")?);
            // Needed, and there, only with CALL_OPS.
            offsets.extend(direct_call(image, symbols).map(|offset| (DIRECT_CALL, offset)));
        }
        Ok(Self { source: Source::Image, offsets })
    }

    /// What it is known from.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The offset of a member of a struct, in bytes.
    pub fn member_offset(&self, strukt: &str, member: &str) -> Option<u64> {
        self.offsets.get(&(strukt, member)).copied()
    }

    /// The size of a struct, in bytes.
    pub fn size(&self, strukt: &str) -> Option<u64> {
        self.member_offset(strukt, SIZE)
    }
}

/// `init_task`, as init/init_task.c fills it in.
struct Task {
    address: u64,
    words: Vec<u64>,
    /// A stack canary stands between the task's numbers and its parents.
    canary: bool,
}

impl Task {
    fn find(image: &Image, symbols: &Symbols) -> Option<Self> {
        /// Larger than any `task_struct`.
        const MAX: u64 = 64 << 10;
        let address = symbols.address("init_task")?;
        let len = symbols.next_after(address)?.checked_sub(address)?.min(MAX);
        let (_, room) = image.space.offset(address)?;
        let bytes = image.space.bytes(&image.data, address, index(len).min(room))?;
        let words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut words: Vec<u64> = words.collect();
        sites::relocate(&image.data, &image.space, symbols, address, &mut words);
        Some(Self { address, words, canary: symbols.address("__stack_chk_fail").is_some() })
    }

    /// `pid` and `tgid`, the canary, and then a row like no other: `real_parent` and `parent`,
    /// which are the task itself, `children` and `sibling`, two empty lists, and
    /// `group_leader`, itself again (include/linux/sched.h).
    fn pid(&self) -> Option<u64> {
        let is_row = |&(at, row): &(usize, &[u64])| {
            let here = |words: usize| self.address.wrapping_add(8 * wide(at + words));
            let (task, children, sibling) = (self.address, here(2), here(4));
            row == [task, task, children, children, sibling, sibling, task]
        };
        let (at, _) = only(self.words.windows(7).enumerate().filter(is_row))?;
        let at = at.checked_sub(if self.canary { 2 } else { 1 })?;
        // Both numbers of the first task are 0.
        (self.words.get(at) == Some(&0)).then_some(8 * wide(at))
    }

    fn comm(&self) -> Option<u64> {
        let name = u64::from_le_bytes(*b"swapper\0");
        let places = self.words.windows(2).enumerate().filter(|(_, pair)| **pair == [name, 0]);
        only(places).map(|(at, _)| 8 * wide(at))
    }
}

/// The one item, if there is no other.
fn only<T>(mut items: impl Iterator<Item = T>) -> Option<T> {
    let item = items.next()?;
    items.next().is_none().then_some(item)
}

/// `thread_info.cpu` of riscv64 (arch/riscv/include/asm/thread_info.h), at the head of a task,
/// which `tp` points to: read as an `int`, and more often than anything else but the count of
/// preemptions, which stands before it, at 8.
fn cpu(image: &Image, symbols: &Symbols) -> Option<u64> {
    /// `lw REGISTER, OFFSET(tp)` without either.
    const LOAD: u32 = 0x0002_2003;
    const AFTER_COUNT: u64 = 12;
    /// The end of `thread_info`'s part that all configurations share.
    const END: u64 = 48;
    const OFTEN: usize = 50;
    let (start, end) =
        symbols.address("_text").or(symbols.address("_start")).zip(symbols.address("_etext"))?;
    let text = image.space.bytes(&image.data, start, index(end.checked_sub(start)?))?;
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    for code in text.windows(4).step_by(2) {
        let code = code.try_into().map_or(0, u32::from_le_bytes);
        if code & 0x000f_f07f == LOAD {
            *counts.entry(u64::from(code >> 20)).or_default() += 1;
        }
    }
    let (offset, count) =
        counts.range(AFTER_COUNT..END).max_by_key(|(_, count)| **count).map(|(o, c)| (*o, *c))?;
    (count >= OFTEN).then_some(offset)
}

/// `ftrace_ops.direct_call`, which `ftrace_caller` of a kernel with CALL_OPS loads first
/// (arch/riscv/kernel/mcount-dyn.S): from the literal before the function, `ld t1, -16(t0)` and
/// `ld t1, OFFSET(t1)`.
fn direct_call(image: &Image, symbols: &Symbols) -> Option<u64> {
    const LITERAL: u64 = 0xff02_b303;
    const LOAD: u64 = 0x0003_3303;
    let code = image.space.bytes(&image.data, symbols.address("ftrace_caller")?, 8)?;
    let code = u64_at(code, 0)?;
    let (literal, load) = (code & 0xffff_ffff, code >> 32);
    (literal == LITERAL && load & 0x800f_ffff == LOAD).then_some(load >> 20)
}
