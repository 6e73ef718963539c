//! The kernel's own tables of instructions: its returns, and those that it rewrites.

use std::ops::Range;

use crate::read::{array_at, i32_at, index, u64_at, wide};
use crate::{Kernel, KernelError, elf};

use super::marks::Marks;
use super::sweep::{MOST_EDGES, jumps};

/// Where the tables are.
pub(crate) struct Tables<'a> {
    pub(crate) kernel: &'a Kernel,
}

/// What the kernel does to its code, by its tables.
pub(crate) struct Patches {
    /// Bytes that it rewrites.
    pub(crate) bytes: Marks,
    /// Those of them that it rewrites at any time, or that may fault: not only once, by what the
    /// processor is.
    pub(crate) later: Marks,
    /// Static calls, ascending.
    pub(super) static_calls: Vec<u64>,
    /// What is replaced once.
    pub(crate) alternatives: Vec<Alternative>,
    /// Ways from an instruction to another that the code in the image does not show.
    pub(super) ways: Vec<(u64, u64)>,
    /// What comes after instructions that may be nops one day, whatever they are in the image.
    pub(super) nexts: Vec<u64>,
}

/// What code is replaced by: address and length of the original, then of the replacement.
pub(crate) type Alternative = (u64, u8, u64, u8);

/// The largest table that is read. Today's are a few megabytes.
const LIMIT: u64 = 64 << 20;

impl Patches {
    /// The kernel rewrites these at any time.
    fn rewrite(&mut self, address: u64, count: u8) {
        self.bytes.set_all(address, count);
        self.later.set_all(address, count);
    }
}

impl<'a> Tables<'a> {
    /// A table between two symbols, or else a section, and its address.
    ///
    /// # Errors
    /// For one that is not within the image, or larger than any.
    pub(super) fn bytes(
        &self,
        symbols: [&str; 2],
        section: &str,
    ) -> Result<Option<(u64, &'a [u8])>, KernelError> {
        let [start, end] = symbols.map(|name| self.kernel.symbols().address(name));
        let range = start.zip(end).map(|(start, end)| start..end);
        let range = range.or_else(|| elf::section_addresses(self.kernel.vmlinux(), section));
        let Some(Range { start, end }) = range else { return Ok(None) };
        let bytes = match end.checked_sub(start) {
            Some(0) => Some(&[][..]),
            len => {
                len.filter(|&len| len <= LIMIT).and_then(|len| self.kernel.bytes(start, index(len)))
            }
        };
        let bytes = bytes.ok_or_else(|| {
            KernelError::Damaged(format!(
                "{section} at {start:#x} to {end:#x} is not within the image, or too large"
            ))
        })?;
        Ok(Some((start, bytes)))
    }

    /// A list of distances of 4 bytes, each from its own place, as ascending addresses.
    fn list(&self, symbols: [&str; 2], section: &str) -> Result<Option<Vec<u64>>, KernelError> {
        let Some((start, bytes)) = self.bytes(symbols, section)? else { return Ok(None) };
        let places = (0..bytes.len()).step_by(4);
        let mut list: Vec<u64> = places.filter_map(|at| relative(bytes, start, at)).collect();
        list.sort_unstable();
        list.dedup();
        Ok(Some(list))
    }

    /// Returns, ascending.
    pub(crate) fn returns(&self) -> Result<Option<Vec<u64>>, KernelError> {
        self.list(["__return_sites", "__return_sites_end"], ".return_sites")
    }

    /// Jumps and calls through registers that the kernel may rewrite, ascending.
    pub(super) fn retpolines(&self) -> Result<Option<Vec<u64>>, KernelError> {
        self.list(["__retpoline_sites", "__retpoline_sites_end"], ".retpoline_sites")
    }

    /// Everything that is rewritten within the code of `text`, but for returns, jumps through
    /// registers and the entries of functions.
    pub(super) fn patches(&self, text: &Range<u64>) -> Result<Patches, KernelError> {
        let mut patches = Patches {
            bytes: Marks::new(text),
            later: Marks::new(text),
            static_calls: Vec::new(),
            alternatives: Vec::new(),
            ways: Vec::new(),
            nexts: Vec::new(),
        };
        self.alternatives(text, &mut patches)?;
        self.jump_labels(&mut patches)?;
        self.static_calls(&mut patches)?;
        let locks = self.list(["__smp_locks", "__smp_locks_end"], ".smp_locks")?;
        locks.unwrap_or_default().into_iter().for_each(|lock| patches.rewrite(lock, 1));
        let paravirt = ["__parainstructions", "__parainstructions_end"];
        if let Some((_, bytes)) = self.bytes(paravirt, ".parainstructions")? {
            // Address, type and length: 16 bytes with what fills them (until Linux 6.7).
            for entry in bytes.as_chunks::<16>().0 {
                patches.bytes.set_all(u64_at(entry, 0).unwrap_or_default(), entry[9]);
            }
        }
        self.exceptions(&mut patches)?;
        Ok(patches)
    }

    /// Code that is replaced as the processor needs it.
    fn alternatives(&self, text: &Range<u64>, patches: &mut Patches) -> Result<(), KernelError> {
        let symbols = ["__alt_instructions", "__alt_instructions_end"];
        let Some((start, bytes)) = self.bytes(symbols, ".altinstructions")? else { return Ok(()) };
        // Until 5.12 with the length of padding, until 6.3 with flags of 16 bits, now of 32.
        let layouts = [(14, 12), (12, 10), (13, 10)];
        let entries = layouts
            .iter()
            .find_map(|&(size, lengths)| alternatives(bytes, start, size, lengths, self.kernel));
        let entries = entries.ok_or(KernelError::UnknownPatchTable { table: "alternatives" })?;
        for &(original, len, replacement, replacement_len) in &entries {
            if patches.ways.len() > MOST_EDGES {
                let reason = "more alternatives jump than any kernel has".to_owned();
                return Err(KernelError::Damaged(reason));
            }
            patches.bytes.set_all(original, len);
            patches.nexts.push(original.wrapping_add(len.into()));
            if let Some(code) = self.kernel.bytes(replacement, replacement_len.into()) {
                let found = jumps(code, replacement, code.len());
                patches.ways.extend(found.map(|target| (original, target)));
            }
            // A test that is made only until the code is replaced stands in a place of its own:
            // a test, a jump for yes, a jump for no.
            if let Some(target) = self.jump(original)
                && !text.contains(&target)
                && let Some(code) = self.kernel.bytes(target, 24)
            {
                patches.ways.extend(jumps(code, target, 3).map(|target| (original, target)));
            }
        }
        patches.alternatives = entries;
        Ok(())
    }

    /// Where a 5-byte jump goes.
    fn jump(&self, address: u64) -> Option<u64> {
        let code = self.kernel.bytes(address, 5)?;
        let distance = i32_at(code, 1)?;
        (code[0] == 0xe9).then(|| address.wrapping_add(5).wrapping_add_signed(distance.into()))
    }

    /// `struct jump_entry`: distances to the code and to the target, then the key.
    fn jump_labels(&self, patches: &mut Patches) -> Result<(), KernelError> {
        let symbols = ["__start___jump_table", "__stop___jump_table"];
        let Some((start, bytes)) = self.bytes(symbols, "__jump_table")? else { return Ok(()) };
        for at in (0..bytes.len()).step_by(16) {
            let code = relative(bytes, start, at);
            let target = relative(bytes, start, at + 4);
            let Some((code, target)) = code.zip(target) else { continue };
            // A short jump, the nop in its place, or else 5 bytes.
            let short = self.kernel.bytes(code, 2).and_then(|bytes| array_at(bytes, 0));
            let len = if matches!(short, Some([0xeb, _] | [0x66, 0x90])) { 2 } else { 5 };
            patches.rewrite(code, len);
            patches.nexts.push(code.wrapping_add(len.into()));
            patches.ways.push((code, target));
        }
        Ok(())
    }

    /// `struct static_call_site`: distances to the code and to the key.
    fn static_calls(&self, patches: &mut Patches) -> Result<(), KernelError> {
        let symbols = ["__start_static_call_sites", "__stop_static_call_sites"];
        let Some((start, bytes)) = self.bytes(symbols, ".static_call_sites")? else {
            return Ok(());
        };
        for at in (0..bytes.len()).step_by(8) {
            if let Some(site) = relative(bytes, start, at) {
                patches.rewrite(site, 5);
                patches.static_calls.push(site);
            }
        }
        patches.static_calls.sort_unstable();
        Ok(())
    }

    /// `struct exception_table_entry`: distances to the instruction and to where it goes on after
    /// a fault, then the type.
    fn exceptions(&self, patches: &mut Patches) -> Result<(), KernelError> {
        let symbols = ["__start___ex_table", "__stop___ex_table"];
        let Some((start, bytes)) = self.bytes(symbols, "__ex_table")? else { return Ok(()) };
        for at in (0..bytes.len()).step_by(12) {
            let instruction = relative(bytes, start, at);
            let target = relative(bytes, start, at + 4);
            if let Some((instruction, target)) = instruction.zip(target) {
                patches.rewrite(instruction, 1);
                patches.ways.push((instruction, target));
            }
        }
        Ok(())
    }
}

/// The entries of `.altinstructions`, if they are of this size, with the two lengths there.
fn alternatives(
    bytes: &[u8],
    start: u64,
    size: usize,
    lengths: usize,
    kernel: &Kernel,
) -> Option<Vec<Alternative>> {
    if !bytes.len().is_multiple_of(size) {
        return None;
    }
    let entry = |at: usize| {
        let (original, replacement) =
            (relative(bytes, start, at)?, relative(bytes, start, at + 4)?);
        let [len, replacement_len] = array_at(bytes, at + lengths)?;
        let code = |address: u64, len: u8| kernel.bytes(address, len.into()).is_some();
        let fit = replacement_len <= len
            && code(original, len)
            && (replacement_len == 0 || code(replacement, replacement_len));
        fit.then_some((original, len, replacement, replacement_len))
    };
    (0..bytes.len()).step_by(size).map(entry).collect()
}

/// The address that a distance from its own place tells.
fn relative(bytes: &[u8], start: u64, at: usize) -> Option<u64> {
    Some(start.wrapping_add(wide(at)).wrapping_add_signed(i32_at(bytes, at)?.into()))
}
