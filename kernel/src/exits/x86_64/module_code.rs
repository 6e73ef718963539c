//! The code of a module, disassembled.

use std::ops::Range;

use crate::exits::Missing;
use crate::exits::module::ModuleText;

use super::marks::Marks;
use super::sweep::{CountPlace, Counted, Edge, How, Sweep};

/// Places that are kept of each kind: a hundred times what the largest module has, so that a guest's
/// cannot fill memory.
const MOST: usize = 1 << 17;
/// Edges of a module: ten times what the largest has. A guest waits while they are gone through.
const MOST_EDGES: usize = 1 << 21;
/// `int3`.
const BREAKPOINT: u8 = 0xcc;

/// A function of a module, or a part of one.
pub(super) struct PieceCode {
    /// Where it is.
    pub(super) range: Range<u64>,
    pub(super) missing: Option<Missing>,
    /// It has a breakpoint, or what is no instruction: others are not seen.
    pub(super) torn: bool,
    /// Where branches end.
    pub(super) targets: Marks,
}

/// All code of a module that its symbols name.
pub(crate) struct ModuleCode {
    /// By address.
    pub(super) pieces: Vec<PieceCode>,
    /// Branches that leave the piece they are in, and ways that the code does not show.
    pub(super) edges: Vec<Edge>,
    /// Where a count of the CPU is changed.
    pub(crate) counted: Vec<Counted>,
    /// `cli` and `sti`.
    pub(crate) flags: Vec<u64>,
}

impl ModuleCode {
    /// With the changes of this count, if one is given.
    pub(crate) fn new(text: &ModuleText, count: Option<CountPlace>) -> Self {
        let mut code = Self {
            pieces: Vec::with_capacity(text.pieces.len()),
            edges: Vec::new(),
            counted: Vec::new(),
            flags: Vec::new(),
        };
        for (number, piece) in text.pieces.iter().enumerate() {
            let next = text.pieces.get(number + 1).map_or(u64::MAX, |next| next.start);
            let len = u64::try_from(piece.bytes.len()).unwrap_or(0);
            let range = piece.start..piece.start.saturating_add(len).min(next);
            let mut sweep = Sweep::new(&range, &piece.bytes, None);
            sweep.count = count;
            sweep.most = MOST_EDGES.saturating_sub(code.edges.len());
            let location = piece.site.map(|(_, location)| location);
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            let swept = sweep.piece(number, &range, location);
            code.edges.append(&mut sweep.edges);
            sweep.counted.truncate(MOST.saturating_sub(code.counted.len()));
            code.counted.append(&mut sweep.counted);
            sweep.flags.truncate(MOST.saturating_sub(code.flags.len()));
            code.flags.append(&mut sweep.flags);
            let (missing, torn) = (swept.missing, swept.stops);
            code.pieces.push(PieceCode { range, missing, torn, targets: sweep.targets });
        }
        // A nop or jump that the kernel is about to write begins with a breakpoint.
        for &at in text.labels.iter().chain(&text.static_calls) {
            if let Some(number) = code.at(at)
                && let Some([BREAKPOINT, ..]) = text.pieces.get(number).and_then(|it| it.from(at))
                && let Some(piece) = code.pieces.get_mut(number)
            {
                piece.torn = true;
            }
        }
        for &(from, target) in &text.ways {
            if let Some(piece) = code.at(from).and_then(|piece| u32::try_from(piece).ok()) {
                code.edges.push(Edge { from, target, piece, len: 0, how: How::Table });
            }
        }
        for i in 0..code.edges.len() {
            let target = code.edges.get(i).map_or(0, |edge| edge.target);
            let Some(number) = code.at(target) else { continue };
            // Behind a return it looks like filling.
            let bytes = text.pieces.get(number).and_then(|piece| piece.from(target));
            let probed = matches!(bytes, Some([BREAKPOINT, ..]));
            if let Some(piece) = code.pieces.get_mut(number) {
                piece.targets.set(target);
                piece.torn |= probed;
            }
        }
        code
    }

    /// The piece that covers an address.
    fn at(&self, address: u64) -> Option<usize> {
        let after = self.pieces.partition_point(|piece| piece.range.start <= address);
        let at = after.checked_sub(1)?;
        self.pieces.get(at).filter(|piece| address < piece.range.end)?;
        Some(at)
    }

    fn piece(&self, address: u64) -> Option<&PieceCode> {
        self.at(address).and_then(|at| self.pieces.get(at))
    }

    /// How many pieces have a breakpoint, or what is no instruction.
    pub(crate) fn torn(&self) -> usize {
        self.pieces.iter().filter(|piece| piece.torn).count()
    }

    /// Whether the piece that covers an address is one of these.
    pub(crate) fn is_torn(&self, address: u64) -> bool {
        self.piece(address).is_some_and(|piece| piece.torn)
    }

    /// Whether `count` bytes from an address on are in one piece.
    pub(crate) fn is_whole(&self, address: u64, count: u8) -> bool {
        let end = address.checked_add(count.into());
        self.piece(address).zip(end).is_some_and(|(piece, end)| end <= piece.range.end)
    }

    /// Whether something is seen to lead behind the first of `count` bytes from an address on.
    pub(crate) fn is_led_into(&self, address: u64, count: u8) -> bool {
        let (behind, count) = (address.wrapping_add(1), count.saturating_sub(1));
        self.piece(address).is_none_or(|piece| piece.targets.any(behind, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exits::module::ModulePiece;

    // A module of returns alone would fill memory while its guest waits.
    #[test]
    fn edges_are_bounded_over_all_functions() {
        const LEN: usize = 1 << 20;
        let piece = |number: u64| ModulePiece {
            start: 0xffff_ffff_c000_0000 + number * LEN as u64,
            bytes: vec![0xc3; LEN],
            ..ModulePiece::default()
        };
        let text = ModuleText { pieces: (0..4).map(piece).collect(), ..ModuleText::default() };
        let code = ModuleCode::new(&text, None);
        assert!(code.edges.len() <= MOST_EDGES + 8, "{}", code.edges.len());
        let missing: Vec<_> = code.pieces.iter().map(|piece| piece.missing.is_some()).collect();
        assert_eq!((missing, code.torn()), (vec![false, false, true, true], 2));
    }
}
