//! The tables by which the kernel itself changes its text, or enters it at places to which no
//! instruction jumps: alternatives, jump labels, exceptions.

use std::ops::Range;

use crate::Kernel;
use crate::read::{i32_at, index, u16_at};

/// Code that the kernel replaces when it starts, where the processor has an extension or a flaw.
pub(crate) struct Alternative {
    pub(crate) old: Range<u64>,
    pub(crate) new: Range<u64>,
}

/// An instruction, and where the kernel may go on instead.
pub(crate) struct Detour {
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// `.alternative`; empty in a kernel without.
pub(crate) fn alternatives(kernel: &Kernel) -> Result<Vec<Alternative>, &'static str> {
    const UNKNOWN: &str = "its table of alternatives has a layout that is not known";
    /// Of all code that is replaced, in bytes: a hundred times what kernels have.
    const MOST: u64 = 16 << 20;
    let mut bytes = 0;
    // struct alt_entry since 6.4: what and by what, as distances; vendor, size, number.
    let entries = entries::<16>(kernel, "__alt_start", "__alt_end", UNKNOWN)?;
    let mut alternative = |(address, entry): (u64, &[u8; 16])| {
        let len = u64::from(u16_at(entry, 10)?);
        bytes += len;
        let detour = detour(kernel, address, entry).filter(|_| bytes <= MOST)?;
        let whole = |start: u64| kernel.bytes(start, index(len)).map(|_| start..start + len);
        Some(Alternative { old: whole(detour.from)?, new: whole(detour.to)? })
    };
    entries.map(&mut alternative).collect::<Option<_>>().ok_or(UNKNOWN)
}

/// `__jump_table`; empty in a kernel without.
pub(crate) fn jump_labels(kernel: &Kernel) -> Result<Vec<Detour>, &'static str> {
    const UNKNOWN: &str = "its table of jump labels has a layout that is not known";
    let names = ("__start___jump_table", "__stop___jump_table");
    let entries = entries::<16>(kernel, names.0, names.1, UNKNOWN)?;
    entries
        .map(|(address, entry)| detour(kernel, address, entry))
        .collect::<Option<_>>()
        .ok_or(UNKNOWN)
}

/// `__ex_table`: what may fault, and where it goes on then. Every kernel has it.
pub(crate) fn exceptions(kernel: &Kernel) -> Result<Vec<Detour>, &'static str> {
    const UNKNOWN: &str = "its table of exceptions has a layout that is not known";
    let names = ("__start___ex_table", "__stop___ex_table");
    kernel.symbols().address(names.0).ok_or("its symbols do not say where its tables are")?;
    let entries = entries::<12>(kernel, names.0, names.1, UNKNOWN)?;
    entries
        .map(|(address, entry)| detour(kernel, address, entry))
        .collect::<Option<_>>()
        .ok_or(UNKNOWN)
}

/// Two distances, each from its own place.
fn detour(kernel: &Kernel, address: u64, entry: &[u8]) -> Option<Detour> {
    let from = relative(kernel, address, i32_at(entry, 0)?)?;
    let to = relative(kernel, address + 4, i32_at(entry, 4)?)?;
    Some(Detour { from, to })
}

/// What a distance leads to: code, so that it is even and in the image.
fn relative(kernel: &Kernel, from: u64, distance: i32) -> Option<u64> {
    let to = from.checked_add_signed(distance.into())?;
    (to % 2 == 0 && kernel.bytes(to, 2).is_some()).then_some(to)
}

/// The entries between two symbols, with their addresses; none without the symbols.
fn entries<'a, const N: usize>(
    kernel: &'a Kernel,
    start: &str,
    end: &str,
    unknown: &'static str,
) -> Result<impl Iterator<Item = (u64, &'a [u8; N])>, &'static str> {
    let symbols = kernel.symbols();
    let (Some(start), Some(end)) = (symbols.address(start), symbols.address(end)) else {
        return Ok((0..).step_by(N).zip([].iter()));
    };
    let len = end.checked_sub(start).map(index).filter(|len| len % N == 0).ok_or(unknown)?;
    let bytes = if len == 0 { Some(&[][..]) } else { kernel.bytes(start, len) };
    let bytes = bytes.ok_or(unknown)?;
    Ok((start..).step_by(N).zip(bytes.as_chunks::<N>().0))
}
