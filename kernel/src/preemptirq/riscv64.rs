//! Finds these places in riscv64 kernels.
//!
//! Interrupts are on while bit 1 of `sstatus` is set (`SR_SIE`), which single instructions of four
//! bytes change (arch/riscv/include/asm/irqflags.h). A trap clears it, and `sret` sets it as
//! `SR_SPIE` of the status says that was saved (arch/riscv/kernel/entry.S). The preemption count is
//! a word of the current task (`thread_info.preempt_count`), which is loaded, changed and stored.
//!
//! There is no room for a jump to anywhere beside such an instruction. In its place is a `jal`, which
//! reaches 1 MiB, to a **landing** of eight bytes. For landings the kernel's own text has room: what
//! replaces instructions where the processor has some extension (`.alternative`) lies in the text
//! behind each object's code, and is not used any more once the kernel has started. The `jal` leaves
//! its address in a register that nothing reads there. So places with the same instruction and the
//! same free registers share a landing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::riscv64::decode::{Instruction, Kind};
use crate::riscv64::flow::{Flow, Live, TEMPORARY};
use crate::riscv64::tables;
use crate::riscv64::text::{Places, Text};
use crate::{Kernel, KernelError};

use super::{BY_FUNCTION, Replaced, SwitchKind, SwitchSite, Switches, Told, counts_by_function};

pub(super) mod module;

const TP: u8 = 4;
/// `SR_SIE`
const INTERRUPTS: i64 = 2;
/// `t1` to `t6` (processors take a jump by `t0` for a return), and then `a7` to `a0`.
const SCRATCH: [u8; 14] = [6, 7, 28, 29, 30, 31, 17, 16, 15, 14, 13, 12, 11, 10];
/// As far as `jal` reaches in both directions.
const REACH: u64 = (1 << 20) - 2;
/// Bytes of a landing.
const LANDING: u64 = 8;
/// How far behind the text there may be what is jumped to without a landing.
const BEHIND: u64 = 256 << 10;
/// Bytes of what is replaced.
const LEN: u64 = 4;

pub(super) fn find(kernel: &Kernel) -> Result<Switches, KernelError> {
    let text = Text::find(kernel).map_err(KernelError::NoSwitches)?;
    let mut finder = Finder::new(kernel, &text).map_err(KernelError::NoSwitches)?;
    for function in text.functions() {
        finder.search(function);
    }
    finder.entries();
    let both = |one: Told, other: Told| {
        let like = |told: Told| finder.list.iter().filter(|(_, it)| it.told.is_like(told)).count();
        like(one).min(like(other))
    };
    let switched = both(Told::Off, Told::On) > 0;
    // Some change it whatever the kernel's configuration is.
    let by = |add| Told::Count { add, register: 0, task: TP };
    let by_function = counts_by_function(kernel);
    let counted = both(by(1), by(-1)) > 16 && !by_function;
    let Finder { mut list, mut unusable, room, count, .. } = finder;
    if !counted {
        list.retain(|(_, replaced)| !replaced.told.counts());
        unusable.retain(|(_, told)| !told.counts());
    }
    let list = land(list, room, text.range.end.saturating_add(BEHIND), &mut unusable);
    let list = balance(&text, list, &mut unusable);
    let unusable = [false, true].map(|counts| {
        let own = unusable.iter().filter(|(_, told)| told.counts() == counts);
        let mut own: Vec<u64> = own.map(|&(address, _)| address).collect();
        own.sort_unstable();
        own
    });
    let tells = |told: Told| {
        list.iter().any(|site| match site.kind {
            SwitchKind::Replaced(replaced, _) => replaced.told.is_like(told),
            _ => false,
        })
    };
    let entered = tells(Told::Enter(0)) && tells(Told::Leave(0));
    let few = |counts: bool| {
        let known = list.iter().filter(|site| match site.kind {
            SwitchKind::Replaced(replaced, _) => replaced.told.counts() == counts,
            _ => false,
        });
        unusable[usize::from(counts)].len() * 10 > known.count()
    };
    const FEW: &str =
        "its text has too little room for jumps (built without CONFIG_RISCV_ALTERNATIVE?)";
    let interrupts = match (switched, entered) {
        (false, _) => Some("where its code switches interrupts is not known"),
        (true, false) => Some("where its interrupts begin and end is not known"),
        (true, true) => few(false).then_some(FEW),
    };
    let preemption = match (count, counted) {
        (None, _) => Some("where it counts preemptions is not known"),
        _ if by_function => Some(BY_FUNCTION),
        (Some(_), false) => {
            Some("it does not count preemptions (built without CONFIG_PREEMPT_COUNT?)")
        }
        (Some(_), true) => few(true).then_some(FEW),
    };
    Ok(Switches { list, unusable, missing: [interrupts, preemption] })
}

/// Leaves out what else a function switches where it cannot be told that it switches something on
/// again: that would be off for long.
fn balance(
    text: &Text<'_>,
    mut list: Vec<SwitchSite>,
    unusable: &mut Vec<(u64, Told)>,
) -> Vec<SwitchSite> {
    let key = |address, told: Told| (text.around(address).start, told.counts());
    let lasts = |&&(_, told): &&(u64, Told)| match told {
        Told::On | Told::Leave(_) => true,
        Told::Count { add, .. } => add < 0,
        Told::Off | Told::Enter(_) => false,
    };
    let out: BTreeSet<(u64, bool)> =
        unusable.iter().filter(lasts).map(|&(address, told)| key(address, told)).collect();
    list.retain(|site| {
        let SwitchKind::Replaced(replaced, _) = site.kind else { return true };
        let stays = !out.contains(&key(site.address, replaced.told));
        if !stays {
            unusable.push((site.address, replaced.told));
        }
        stays
    });
    list
}

/// Gives each a landing in reach, or a way to what lies behind the text; what has neither is unusable.
fn land(
    found: Vec<(u64, Replaced)>,
    mut room: Vec<u64>,
    behind: u64,
    unusable: &mut Vec<(u64, Told)>,
) -> Vec<SwitchSite> {
    let mut list = Vec::with_capacity(found.len());
    let mut alike: BTreeMap<Replaced, Vec<u64>> = BTreeMap::new();
    for (address, replaced) in found {
        if behind.abs_diff(address) <= REACH {
            list.push(SwitchSite { address, kind: SwitchKind::Replaced(replaced, None) });
        } else {
            alike.entry(replaced).or_default().push(address);
        }
    }
    room.sort_unstable();
    // Where there is too little room, those that are most go first.
    let mut alike: Vec<_> = alike.into_iter().collect();
    alike.sort_by_key(|(_, sites)| Reverse(sites.len()));
    for (replaced, mut sites) in alike {
        sites.sort_unstable();
        let mut rest = &sites[..];
        while let Some(&first) = rest.first() {
            let Some((landing, served)) = landing(&room, rest) else {
                unusable.push((first, replaced.told));
                rest = &rest[1..];
                continue;
            };
            let at = room.remove(landing);
            let own = rest.iter().take(served).map(|&address| SwitchSite {
                address,
                kind: SwitchKind::Replaced(replaced, Some(at)),
            });
            list.extend(own);
            rest = &rest[served..];
        }
    }
    list.sort_unstable_by_key(|site| site.address);
    list
}

/// Of the places for landings that serve as many of the first of these as any does, one where most
/// others are left: its index, and how many it serves.
fn landing(room: &[u64], sites: &[u64]) -> Option<(usize, usize)> {
    /// What counts as near.
    const NEAR: u64 = 128 << 10;
    /// How many are looked at.
    const MOST: usize = 64;
    let first = *sites.first()?;
    let farthest = room.partition_point(|&at| at <= first.saturating_add(REACH)).checked_sub(1)?;
    let end = room[farthest].checked_add(REACH).filter(|&end| end >= first)?;
    let served = sites.partition_point(|&address| address <= end);
    let last = *sites.get(served.checked_sub(1)?)?;
    let least = room.partition_point(|&at| at < last.saturating_sub(REACH));
    let others = |&number: &usize| {
        let at = room[number];
        let from = room.partition_point(|&other| other < at.saturating_sub(NEAR));
        room.partition_point(|&other| other <= at.saturating_add(NEAR)) - from
    };
    let step = (farthest.saturating_sub(least) / MOST).max(1);
    (least..=farthest).step_by(step).max_by_key(others).map(|number| (number, served))
}

struct Finder<'a> {
    kernel: &'a Kernel,
    text: &'a Text<'a>,
    flow: Flow,
    /// Offset of the count of preemptions in a task.
    count: Option<u64>,
    /// What others change.
    barred: Places,
    /// Where landings can be.
    room: Vec<u64>,
    list: Vec<(u64, Replaced)>,
    unusable: Vec<(u64, Told)>,
}

/// What a register holds, as far as it is known from straight code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Unknown,
    Constant(i64),
    /// The task, as `tp`.
    Task,
    /// The count of preemptions with so much added.
    Count(i64),
}

impl<'a> Finder<'a> {
    fn new(kernel: &'a Kernel, text: &'a Text<'a>) -> Result<Self, &'static str> {
        let flow = Flow::find(kernel, text)?;
        let mut barred = Places::within(&text.range);
        let mut replacements = Vec::new();
        for tables::Alternative { old, new } in tables::alternatives(kernel)? {
            for range in [&old, &new] {
                barred.insert_all(range.clone());
            }
            if text.range.contains(&new.start) {
                replacements.push(new);
            }
        }
        for label in tables::jump_labels(kernel)? {
            barred.insert_all(label.from..label.from.saturating_add(LEN));
        }
        for detour in tables::exceptions(kernel)? {
            barred.insert_all(detour.from..detour.from.saturating_add(LEN));
        }
        for site in kernel.sites() {
            barred.insert_all(site.location..site.entry.saturating_add(8));
        }
        let count = count(kernel);
        let room = landings(replacements);
        let (list, unusable) = (Vec::new(), Vec::new());
        Ok(Self { kernel, text, flow, count, barred, room, list, unusable })
    }

    /// Finds what a function switches.
    fn search(&mut self, function: Range<u64>) {
        // Most functions have none of it.
        let mut all = self.text.instructions(function.clone());
        if !all.any(|(address, it)| self.may_switch(self.word(address, &it), it.len)) {
            return;
        }
        let mut found = Vec::new();
        let known = self.tasks(function.clone());
        let mut values = known;
        let targets = self.targets(function.clone());
        for (address, instruction) in self.text.instructions(function.clone()) {
            let word = self.word(address, &instruction);
            let told = match word & 0xfff0_707f {
                // csrrci rd, sstatus; csrrsi zero, sstatus; csrrs zero, sstatus, rs
                0x1000_7073 if source(word) == 2 => Some(Told::Off),
                0x1000_6073 if source(word) == 2 && target(word) == 0 => Some(Told::On),
                0x1000_2073 if source(word) != 0 && target(word) == 0 => {
                    match values[usize::from(source(word))] {
                        Value::Constant(set) if set & INTERRUPTS == 0 => None,
                        _ => Some(Told::On),
                    }
                }
                _ => self.stored(word, instruction.len, &values),
            };
            if let Some(told) = told {
                found.push((address, (word, instruction.len), told));
            }
            let value = self.value(word, &instruction, &values);
            let jumps = matches!(instruction.kind, Kind::Jump { .. } | Kind::JumpRegister { .. });
            let next = address + u64::from(instruction.len);
            // Who comes from elsewhere, or back from a call, may have something else there.
            if jumps || targets.binary_search(&next).is_ok() || self.flow.leads_to(next) {
                values = known;
            } else if instruction.writes != 0 {
                values[usize::from(instruction.writes)] = value;
            }
        }
        if found.is_empty() {
            return;
        }
        let live = self.flow.live(self.text, function);
        for (address, instruction, told) in found {
            self.add(&live, address, instruction, told);
        }
    }

    /// Whether it looks like what switches something.
    fn may_switch(&self, word: u32, len: u8) -> bool {
        let Some(count) = self.count else { return len == 4 && word >> 20 == 0x100 };
        match len {
            2 => word & 0xe003 == 0xc000 && u64::from(short_offset(word)) == count,
            _ => {
                let stores = word & 0x707f == 0x2023 && u64::from(store_offset(word)) == count;
                stores || word & 0x7f == 0x73 && word >> 20 == 0x100
            }
        }
    }

    /// The registers that may hold the task in a function: `tp`, and those that it is copied to. The
    /// stub makes sure.
    fn tasks(&self, function: Range<u64>) -> [Value; 32] {
        let mut values = [Value::Unknown; 32];
        values[usize::from(TP)] = Value::Task;
        for (address, instruction) in self.text.instructions(function) {
            let word = self.word(address, &instruction);
            // mv rd, tp
            let copy = match instruction.len {
                2 => word & 0xf07f == 0x8012,
                _ => word & 0xffff_f07f == 0x0002_0013,
            };
            if copy {
                values[usize::from(instruction.writes)] = Value::Task;
            }
        }
        values
    }

    /// Where jumps of a function lead.
    fn targets(&self, function: Range<u64>) -> Vec<u64> {
        let target = |(address, instruction): (u64, Instruction)| match instruction.kind {
            Kind::Branch { distance, .. } | Kind::Jump { distance } => {
                Some(address.wrapping_add_signed(distance.into()))
            }
            _ => None,
        };
        let mut targets: Vec<u64> = self.text.instructions(function).filter_map(target).collect();
        targets.sort_unstable();
        targets
    }

    fn word(&self, address: u64, instruction: &Instruction) -> u32 {
        let bytes = self.text.bytes(address, instruction.len.min(4).into()).unwrap_or_default();
        bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
    }

    /// What a store into the count of preemptions tells.
    fn stored(&self, word: u32, len: u8, values: &[Value; 32]) -> Option<Told> {
        // c.sw register, offset(base); sw register, offset(base)
        let (is_store, base, register, offset) = match len {
            2 => (word & 0xe003 == 0xc000, near(word, 7), near(word, 2), short_offset(word)),
            _ => (word & 0x707f == 0x2023, source(word), second(word), store_offset(word)),
        };
        let own = is_store && values[usize::from(base)] == Value::Task;
        if !own || Some(u64::from(offset)) != self.count {
            return None;
        }
        let add = match values[usize::from(register)] {
            Value::Count(add) => i32::try_from(add).ok()?,
            // What sets it.
            Value::Constant(_) => return None,
            Value::Unknown | Value::Task if register == 0 || base != TP => return None,
            Value::Unknown | Value::Task => 0,
        };
        Some(Told::Count { add, register, task: base })
    }

    /// What an instruction leaves in the register that it writes.
    fn value(&self, word: u32, instruction: &Instruction, values: &[Value; 32]) -> Value {
        let of = |register: u8| match register {
            0 => Value::Constant(0),
            _ => values[usize::from(register)],
        };
        if instruction.len == 2 {
            return short(word, of, self.count);
        }
        let immediate = i64::from(word.cast_signed() >> 20);
        match word & 0x707f {
            // lw, lwu
            0x2003 | 0x6003 if of(source(word)) == Value::Task => {
                let own = u64::try_from(immediate).ok() == self.count;
                if own { Value::Count(0) } else { Value::Unknown }
            }
            // addi, addiw
            0x0013 | 0x001b => of(source(word)).plus(immediate),
            // addw, subw
            0x003b => match (word >> 25, of(second(word))) {
                (0, Value::Constant(add)) => of(source(word)).plus(add),
                (0x20, Value::Constant(less)) => of(source(word)).plus(less.wrapping_neg()),
                (0, other) => match of(source(word)) {
                    Value::Constant(add) => other.plus(add),
                    _ => Value::Unknown,
                },
                _ => Value::Unknown,
            },
            _ if word & 0x7f == 0x37 => Value::Constant((word & !0xfff).cast_signed().into()),
            _ => Value::Unknown,
        }
    }

    /// Takes note of a place, if a jump can be there.
    fn add(&mut self, live: &Live, address: u64, (word, len): (u32, u8), told: Told) {
        let after = live.at(address + LEN);
        let written = if matches!(told, Told::Count { .. }) { 0 } else { 1 << target(word) };
        let taken = live.at(address) | after | written;
        let mut free = SCRATCH.into_iter().filter(|&register| taken >> register & 1 == 0);
        let barred = self.barred.any(address..address + LEN);
        let known = !matches!(told, Told::Count { add: 0, .. });
        match (free.next(), free.next()) {
            (Some(link), Some(through)) if known && !barred && len == 4 => {
                let kept = after & TEMPORARY;
                self.list.push((address, Replaced { word, told, link, through, kept }));
            }
            _ => self.unusable.push((address, told)),
        }
    }

    /// Where the assembly has saved the status, and where it sets that for its `sret`.
    fn entries(&mut self) {
        let symbols = self.kernel.symbols();
        let function = |name| {
            let start = symbols.address(name)?;
            self.text.range.contains(&start).then(|| self.text.function(start))
        };
        let (Some(enter), Some(leave)) =
            (function("handle_exception"), function("ret_from_exception"))
        else {
            return;
        };
        // csrw sscratch, zero: from here on a trap is one of the kernel's. One before is of a way that
        // returns at once.
        let (mut status, mut entered) = (None, None);
        for (address, instruction) in self.text.instructions(enter.clone()) {
            let word = self.word(address, &instruction);
            // csrrc status, sstatus, rs
            if word & 0xfff0_707f == 0x1000_3073 && target(word) != 0 {
                status = Some(target(word));
            }
            if word == 0x1400_1073
                && let Some(status) = status
            {
                entered = Some((address, word, Told::Enter(status)));
            }
        }
        // csrw sstatus, rs
        let set = |&(_, word): &(u64, u32)| word & 0xfff0_7fff == 0x1000_1073 && source(word) != 0;
        let all = self.text.instructions(leave.clone());
        let left = all.map(|(at, instruction)| (at, self.word(at, &instruction))).find(set);
        let (Some((enters, word, told)), Some((leaves, last))) = (entered, left) else { return };
        let live = self.flow.live(self.text, enter);
        self.add(&live, enters, (word, 4), told);
        let live = self.flow.live(self.text, leave);
        self.add(&live, leaves, (last, 4), Told::Leave(source(last)));
    }
}

/// Offset of the count of preemptions in a task, if it is known; not all kernels count there.
pub(super) fn count(kernel: &Kernel) -> Option<u64> {
    let structs = kernel.structs().ok()?;
    let within = |of, member| structs.member_offset(of, member);
    let first = within("task_struct", "thread_info") == Some(0);
    within("thread_info", "preempt_count").filter(|_| first)
}

impl Value {
    fn plus(self, add: i64) -> Self {
        match self {
            Self::Task if add == 0 => Self::Task,
            Self::Unknown | Self::Task => Self::Unknown,
            Self::Constant(value) => Self::Constant(value.wrapping_add(add)),
            Self::Count(value) => Self::Count(value.wrapping_add(add)),
        }
    }
}

/// What an instruction of two bytes leaves in the register that it writes.
fn short(half: u32, of: impl Fn(u8) -> Value, count: Option<u64>) -> Value {
    let rd = target(half);
    let low = (half >> 2 & 0x1f).to_le_bytes()[0];
    let [high, other] = [near(half, 7), near(half, 2)];
    let small = i64::from((half >> 12 & 1) << 5 | half >> 2 & 0x1f);
    let small = small << 58 >> 58;
    match (half & 3, half >> 13 & 7) {
        // c.lw
        (0, 2) if of(high) == Value::Task => {
            let own = Some(u64::from(short_offset(half))) == count;
            if own { Value::Count(0) } else { Value::Unknown }
        }
        // c.addi, c.addiw
        (1, 0 | 1) => of(rd).plus(small),
        // c.li
        (1, 2) => Value::Constant(small),
        // c.lui
        (1, 3) => Value::Constant(small << 12),
        // c.subw, c.addw
        (1, 4) if half >> 10 & 7 == 7 => match (half >> 5 & 3, of(other)) {
            (0, Value::Constant(less)) => of(high).plus(less.wrapping_neg()),
            (1, Value::Constant(add)) => of(high).plus(add),
            (1, count) => match of(high) {
                Value::Constant(add) => count.plus(add),
                _ => Value::Unknown,
            },
            _ => Value::Unknown,
        },
        // c.mv
        (2, 4) if half >> 12 & 1 == 0 && low != 0 => of(low),
        _ => Value::Unknown,
    }
}

/// The offset of `c.lw` and `c.sw`.
fn short_offset(half: u32) -> u32 {
    half >> 7 & 0x38 | half >> 4 & 4 | half << 1 & 0x40
}

/// The offset of `sw`.
fn store_offset(word: u32) -> u32 {
    word >> 25 << 5 | word >> 7 & 0x1f
}

/// One of the registers that short forms know.
fn near(half: u32, from: u32) -> u8 {
    8 + (half >> from & 7).to_le_bytes()[0]
}

/// Room for landings in what replaces other code.
fn landings(mut replacements: Vec<Range<u64>>) -> Vec<u64> {
    /// Ten times what kernels have.
    const MOST: usize = 1 << 15;
    replacements.sort_unstable_by_key(|range| range.start);
    let mut room = Vec::new();
    let mut next = 0;
    let mut end = 0;
    for range in replacements {
        if range.start > end {
            next = range.start;
        }
        end = range.end.max(end);
        while next + LANDING <= end && room.len() < MOST {
            room.push(next);
            next += LANDING;
        }
    }
    room
}

/// The register that an instruction writes.
fn target(word: u32) -> u8 {
    (word >> 7 & 0x1f).to_le_bytes()[0]
}

/// The first register that an instruction reads.
fn source(word: u32) -> u8 {
    (word >> 15 & 0x1f).to_le_bytes()[0]
}

/// The second one.
fn second(word: u32) -> u8 {
    (word >> 20 & 0x1f).to_le_bytes()[0]
}
