//! Finds where the kernel may jump to, and which of its bytes must not change.
//!
//! The first instruction of a window may be a jump target, but no later one: a jump there would
//! enter the middle of the replacement. So that none is missed, all text and all data are searched,
//! and a word that only looks like a target counts as one.

use std::ops::Range;

use super::Missing;
use crate::exits::module::ModuleText;
use crate::preemptirq::Switches;
use crate::read::{array_at, i32_at, index};
use crate::riscv64::decode::{Instruction, Kind, RA};
use crate::riscv64::tables::{self, Alternative};
use crate::riscv64::text::{Places, Text};
use crate::{Kernel, sites};

pub(super) struct Targets {
    /// Where a jump, a pointer or a table leads.
    pub(super) places: Places,
    /// What the kernel changes or compares: sites, alternatives, jump labels, and what may fault.
    pub(super) barred: Places,
    /// Code that only runs once it was copied over other code. It lies behind the last function
    /// of its object file, and is no part of it.
    pub(super) replacements: Places,
    /// What replaced code may read, by where it will be.
    pub(super) reads: Vec<(u64, u32)>,
    /// Functions with a jump by a register that no table was found for.
    pub(super) unresolved: Vec<u64>,
    /// A stub is too far away for what depends on its place: `auipc`, and branches back.
    pub(super) are_far: bool,
}

/// How many entries of jump tables are read at most: a hundred times what kernels have.
const ENTRIES: usize = 1 << 20;
/// The same of a module, while the guest waits.
const MODULE_ENTRIES: usize = 1 << 16;

impl Targets {
    pub(super) fn find(kernel: &Kernel, text: &Text<'_>) -> Result<Self, &'static str> {
        let mut targets = Self::within(text);
        targets.add_tables(kernel, text)?;
        let pointers = pointers(kernel, text);
        let mut budget = ENTRIES;
        let start_up = Text::start_up(kernel);
        for code in std::iter::once(text).chain(&start_up) {
            for function in code.functions() {
                let entry = |at| kernel.bytes(at, 4).and_then(|bytes| i32_at(bytes, 0));
                targets.add_function(code, &pointers, function, &entry, &mut budget)?;
            }
        }
        targets.places.insert_places(&pointers);
        targets.unresolved.sort_unstable();
        Ok(targets)
    }

    /// The same of a piece of a module's code, where `all` of it may jump. `entry` reads the tables
    /// of jumps.
    pub(super) fn of_module(
        module: &ModuleText,
        text: &Text<'_>,
        all: &[Text<'_>],
        entry: &dyn Fn(u64) -> Option<i32>,
    ) -> Result<Self, &'static str> {
        let mut targets = Self { are_far: true, ..Self::within(text) };
        for &(from, to) in &module.ways {
            targets.barred.insert_all(from..from.saturating_add(4));
            targets.places.insert(to);
        }
        for &from in &module.labels {
            targets.barred.insert_all(from..from.saturating_add(4));
        }
        for piece in &module.pieces {
            targets.places.insert(piece.start);
            if let Some((_, location)) = piece.site {
                targets.barred.insert_all(location..piece.start.saturating_add(8));
            }
        }
        // Its data is not searched for pointers: a jump to what was loaded stays unresolved.
        let pointers = Places::within(&text.range);
        let mut budget = MODULE_ENTRIES;
        for code in all {
            for function in code.functions() {
                targets.add_function(code, &pointers, function, entry, &mut budget)?;
            }
        }
        // A probe of the guest's own may hide a branch.
        for function in text.functions() {
            let unknown = |address| module.traps.binary_search(&address).is_err();
            let mut all = text.instructions(function.clone());
            if all.any(|(at, it)| text.is_breakpoint(at, it.len) && unknown(at)) {
                targets.unresolved.push(function.start);
            }
        }
        targets.unresolved.sort_unstable();
        Ok(targets)
    }

    fn within(text: &Text<'_>) -> Self {
        Self {
            places: Places::within(&text.range),
            barred: Places::within(&text.range),
            replacements: Places::within(&text.range),
            reads: Vec::new(),
            unresolved: Vec::new(),
            are_far: false,
        }
    }

    /// Where a function jumps, as far as that can be known.
    fn add_function(
        &mut self,
        code: &Text<'_>,
        pointers: &Places,
        function: Range<u64>,
        entry: &dyn Fn(u64) -> Option<i32>,
        budget: &mut usize,
    ) -> Result<(), &'static str> {
        let seen = self.add_code(code, pointers, function.clone());
        let tables = match seen.computed {
            0 => 0,
            _ => self.add_switches(entry, &seen, &function, budget)?,
        };
        let inside = function.start.saturating_add(2)..function.end;
        if tables < seen.computed || (seen.pointers > 0 && !pointers.any(inside)) {
            self.unresolved.push(function.start);
        }
        Ok(())
    }

    /// What the kernel's own tables name.
    fn add_tables(&mut self, kernel: &Kernel, text: &Text<'_>) -> Result<(), &'static str> {
        for detour in tables::exceptions(kernel)? {
            // Looked up by its address, whatever its length.
            self.barred.insert(detour.from);
            self.places.insert(detour.to);
        }
        for label in tables::jump_labels(kernel)? {
            self.barred.insert_all(label.from..label.from.saturating_add(4));
            self.places.insert(label.to);
        }
        for Alternative { old, new } in tables::alternatives(kernel)? {
            let reads = text.instructions(new.clone());
            let reads = reads.fold(0, |set, (_, instruction)| set | instruction.reads);
            self.reads.push((old.start, reads));
            self.barred.insert_all(old);
            self.replacements.insert_all(new);
        }
        self.reads.sort_unstable();
        for site in kernel.sites() {
            self.barred.insert_all(site.location..site.entry.saturating_add(8));
            self.places.insert(site.entry);
        }
        // They may be replaced themselves, at any time.
        for site in kernel.switches().map(Switches::all).unwrap_or_default() {
            let end = site.address.saturating_add(site.kind.size().into());
            self.barred.insert_all(site.address..end);
        }
        Ok(())
    }

    /// Where the instructions of a function jump, and which addresses they make.
    fn add_code(&mut self, text: &Text<'_>, pointers: &Places, function: Range<u64>) -> Seen {
        // Not followed along jumps: the compiler keeps both halves of an address close together,
        // and an address too many does no harm.
        let mut registers = [Value::Unknown; 32];
        // The registers that were written since the last place that others may jump to.
        let mut fresh = 0_u32;
        let mut seen = Seen::default();
        for (address, instruction) in text.instructions(function) {
            let Instruction { writes, kind, .. } = instruction;
            let mut value = Value::Unknown;
            if self.places.contains(address) || pointers.contains(address) {
                fresh = 0;
            }
            match kind {
                Kind::Branch { distance, .. } | Kind::Jump { distance } => {
                    self.places.insert(address.wrapping_add_signed(distance.into()));
                }
                Kind::Auipc { upper } => {
                    value = Value::Upper(address.wrapping_add_signed(upper.into()));
                }
                Kind::AddImmediate { base, immediate } => {
                    if let Value::Upper(upper) = registers[usize::from(base)] {
                        let made = upper.wrapping_add_signed(immediate.into());
                        if text.range.contains(&made) {
                            self.places.insert(made);
                        } else {
                            seen.addresses.push(made);
                        }
                    }
                }
                Kind::JumpRegister { base, distance } => {
                    let value = registers[usize::from(base)];
                    if let Value::Upper(upper) = value {
                        self.places.insert(upper.wrapping_add_signed(distance.into()));
                    }
                    match value {
                        _ if writes != 0 || base == RA => {}
                        Value::Upper(_) if fresh >> base & 1 == 1 => {}
                        Value::Loaded if fresh >> base & 1 == 1 => seen.pointers += 1,
                        _ => seen.computed += 1,
                    }
                }
                Kind::Load => value = Value::Loaded,
                Kind::Plain | Kind::Fixed => {}
            }
            let jump = matches!(kind, Kind::Jump { .. } | Kind::JumpRegister { .. });
            match writes {
                // What follows is reached from elsewhere.
                0 if jump => fresh = 0,
                // No instruction changes x0, and so it stays unknown.
                0 => {}
                _ => {
                    registers[usize::from(writes)] = value;
                    fresh |= 1 << writes;
                }
            }
        }
        seen
    }

    /// Why an instruction must stay where it is.
    pub(super) fn kept(&self, address: u64, len: u8) -> Option<Missing> {
        let end = address.saturating_add(len.into());
        if self.barred.any(address..end) {
            return Some(Missing::Fixed);
        }
        // Nothing should jump to where no instruction begins; what looks like it is left alone.
        self.places.any(address.saturating_add(2)..end).then_some(Missing::Unclear)
    }

    /// What replaced code within a function may read.
    pub(super) fn reads_within(&self, function: &Range<u64>) -> u32 {
        let first = self.reads.partition_point(|&(old, _)| old < function.start);
        let inside = self.reads[first..].iter().take_while(|(old, _)| *old < function.end);
        inside.fold(0, |set, (_, reads)| set | reads)
    }

    /// Tables of the distances from the table to a function's `case` labels: as long as these
    /// are in the function. Returns how many there are.
    fn add_switches(
        &mut self,
        entry: &dyn Fn(u64) -> Option<i32>,
        seen: &Seen,
        function: &Range<u64>,
        budget: &mut usize,
    ) -> Result<usize, &'static str> {
        const TOO_MANY: &str = "its code has more jump tables than any kernel";
        let mut tables = seen.addresses.clone();
        tables.sort_unstable();
        tables.dedup();
        let mut found = 0;
        for table in tables.into_iter().filter(|table| table % 4 == 0) {
            let mut at = table;
            while let Some(distance) = entry(at) {
                let target = table.wrapping_add_signed(distance.into());
                *budget = budget.checked_sub(1).ok_or(TOO_MANY)?;
                if target % 2 != 0 || !function.contains(&target) {
                    break;
                }
                self.places.insert(target);
                let Some(next) = at.checked_add(4) else { break };
                at = next;
            }
            found += usize::from(at > table);
        }
        Ok(found)
    }
}

/// Pointers in data: words of eight bytes that are an address in the text.
fn pointers(kernel: &Kernel, text: &Text<'_>) -> Places {
    let mut pointers = Places::within(&text.range);
    let image = &kernel.image;
    for segment in image.space.segments() {
        let skip = index(segment.address.next_multiple_of(8) - segment.address);
        let end = segment.offset + segment.len;
        let bytes = image.data.get(segment.offset..end).unwrap_or_default();
        for word in bytes.get(skip..).unwrap_or_default().as_chunks().0 {
            pointers.insert(u64::from_le_bytes(*word));
        }
    }
    // In a relocatable kernel the words are zero until it has started.
    for entry in sites::relocations(&image.data, &image.space, &kernel.symbols) {
        pointers.insert(array_at(entry, 16).map_or(0, u64::from_le_bytes));
    }
    pointers
}

/// What a register holds, as far as jumps by it need to know.
#[derive(Clone, Copy)]
enum Value {
    Unknown,
    /// The upper part of an address, by `auipc`.
    Upper(u64),
    /// A pointer, if it is jumped to: those of the image are all known.
    Loaded,
}

/// What a function has beside plain jumps and returns.
#[derive(Default)]
struct Seen {
    /// Jumps to what was loaded.
    pointers: usize,
    /// Jumps to what was computed, as from a table of distances.
    computed: usize,
    /// Addresses outside the text that it makes.
    addresses: Vec<u64>,
}
