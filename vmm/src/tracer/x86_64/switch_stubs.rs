//! Stubs for instructions that switch interrupts or preemption, and the jumps and calls that
//! replace these.

use super::site;
use crate::kernel::preemptirq::{SwitchKind, SwitchSite};
use crate::tracer::edit::{ExitEdit, SkipReason};
use crate::tracer::image::Image;
use crate::tracer::spot::Spot;
use crate::tracer::switch_places::AllSwitches;
use crate::tracer::view::View;
use rustc_hash::FxHashMap;
use vmtrace_trampolines::x86_64::{Switch, SwitchStub, switch_stub};

/// Bytes of stubs for instructions of modules: for some 5,000. A guest that loads modules at ever other
/// places does not leave others without room.
const OF_MODULES: usize = 384 << 10;

/// Stubs that there are. None ever goes away: a task may stand in it.
#[derive(Default)]
pub(super) struct SwitchStubs {
    /// Run-time addresses, and what their records say, by instruction (index) and program.
    known: FxHashMap<(usize, u16), (u64, u32)>,
    /// Bytes of those of modules.
    of_modules: usize,
}

/// Stubs that are to be put into the guest.
#[derive(Default)]
pub(super) struct Made {
    pub(super) code: Vec<u8>,
    /// Run-time addresses of their returns.
    pub(super) endings: Vec<u64>,
    stubs: Vec<((usize, u16), (u64, u32))>,
    of_modules: bool,
}

/// Room for stubs.
struct Space {
    /// Bytes.
    left: usize,
    is_full: bool,
}

impl Space {
    /// A stub, if there is room for it. Behind one for which there was none, none is made at all: a guest
    /// waits.
    fn make(&mut self, make: impl FnOnce() -> Option<SwitchStub>) -> Option<SwitchStub> {
        if self.is_full {
            return None;
        }
        let stub = make()?;
        let left = self.left.checked_sub(stub.bytes.len());
        self.is_full = left.is_none();
        self.left = left?;
        Some(stub)
    }
}

impl SwitchStubs {
    /// Makes those of instructions beside their programs that there are not yet, for the run-time
    /// address `start`: those of modules, as far as there is room in so many bytes, or all others.
    /// `programs` are run-time addresses.
    pub(super) fn make(
        &self,
        (start, left): (u64, u64),
        image: &Image,
        (all, programs): (AllSwitches<'_>, &[u64]),
        count: Option<u64>,
        (wanted, of_modules): (&[(usize, u16)], bool),
    ) -> Made {
        let mut made = Made { of_modules, ..Made::default() };
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        let own = OF_MODULES.saturating_sub(self.of_modules);
        // The kernel's are all put, or none.
        let left = if of_modules { left.min(own) } else { usize::MAX };
        let mut space = Space { left, is_full: false };
        for &place in wanted {
            let (index, program) = place;
            if all.is_of_module(index) != of_modules || self.known.contains_key(&place) {
                continue;
            }
            let Some(site) = all.get(index) else { continue };
            let Some(&target) = programs.get(usize::from(program)) else { continue };
            let at = start + made.code.len() as u64;
            let stub = space.make(|| make(image, site, (at, target), count));
            if let Some(stub) = stub {
                made.code.extend(stub.bytes);
                made.endings.extend(stub.ending.map(|ending| at + ending as u64));
                #[allow(clippy::cast_possible_truncation, reason = "the low half")]
                let word = (at + stub.names) as u32;
                made.stubs.push((place, (at, word)));
            }
        }
        made
    }

    /// These are in the guest now.
    pub(super) fn are_put(&mut self, made: Made) {
        if made.of_modules {
            self.of_modules += made.code.len();
        }
        self.known.extend(made.stubs);
    }

    /// What the records of an instruction (index) to a program say, if it has a stub.
    pub(super) fn word(&self, place: (usize, u16)) -> Option<u32> {
        self.known.get(&place).map(|&(_, word)| word)
    }

    /// The run-time address of that of an instruction (index) to a program.
    pub(super) fn find(&self, index: usize, program: u16) -> Option<u64> {
        self.known.get(&(index, program)).map(|&(stub, _)| stub)
    }
}

/// Bytes of the longest instruction.
const LONGEST: usize = 12;

/// The stub at `at` of an instruction, to a program at a run-time address; `count` is the offset of
/// the count of preemptions from the gs base. `None` when there can be none.
fn make(
    image: &Image,
    site: &SwitchSite,
    (at, program): (u64, u64),
    count: Option<u64>,
) -> Option<SwitchStub> {
    let switch = match site.kind {
        SwitchKind::Cli | SwitchKind::Sti => Switch::Done,
        SwitchKind::Handle(to) => Switch::Handle(image.runtime(to)),
        SwitchKind::HandleCall(to) => Switch::HandleCall(image.runtime(to)),
        SwitchKind::Restore(to) => Switch::Restore(image.runtime(to)),
        SwitchKind::Return => Switch::Return,
        SwitchKind::Count { add, wide } => Switch::Count { add, count: count?, wide },
        SwitchKind::Replaced(..) => return None,
    };
    let address = image.runtime(site.address);
    switch_stub(at, switch, (address, address + u64::from(site.kind.size())), program)
}

/// What leads to a stub in place of the instruction, which is verified: all of it must be what the
/// kernel or a module has there when its alternatives are patched.
pub(super) fn edit(
    view: &View<'_>,
    image: &Image,
    (switch, spot): (&SwitchSite, &Spot),
    stub: u64,
    (thunk, count): (Option<u64>, Option<u64>),
) -> Result<ExitEdit, SkipReason> {
    let mut found = [0; LONGEST];
    let bytes = found.get_mut(..switch.kind.size().into()).ok_or(SkipReason::OutOfReach)?;
    spot.read(view, 0, bytes).map_err(|_| SkipReason::NoRam)?;
    let address = image.runtime(switch.address);
    let leads = |opcode| match *bytes {
        [first, a, b, c, d] if first == opcode => site::jump_target(address, &[0xe9, a, b, c, d]),
        _ => None,
    };
    // The nop behind cli and sti is an instruction of its own.
    let begins = usize::from(matches!(switch.kind, SwitchKind::Cli | SwitchKind::Sti));
    let fits = match switch.kind {
        SwitchKind::Cli => is_flag(bytes, 0xfa),
        SwitchKind::Sti => is_flag(bytes, 0xfb),
        SwitchKind::Handle(to) | SwitchKind::HandleCall(to) => {
            leads(0xe8) == Some(image.runtime(to))
        }
        SwitchKind::Restore(to) => leads(0xe9) == Some(image.runtime(to)),
        SwitchKind::Return => {
            *bytes == site::RETURN || leads(0xe9).is_some_and(|to| Some(to) == thunk)
        }
        SwitchKind::Count { add, wide } => {
            count.is_some_and(|count| is_count(bytes, address, (add, wide), count))
        }
        SwitchKind::Replaced(..) => return Err(SkipReason::NoStub),
    };
    let original = bytes.get(begins..begins + site::LEN).ok_or(SkipReason::OutOfReach)?;
    if !fits {
        let first = original.first().copied().unwrap_or(0);
        return Err(SkipReason::GuestOwned(site::describe([first, 0, 0, 0, 0])));
    }
    let from = address + begins as u64;
    let ours = match switch.kind {
        SwitchKind::Handle(_) | SwitchKind::HandleCall(_) => site::call(from, stub),
        _ => site::jump(from, stub),
    };
    // What is longer keeps its end, which is never executed.
    let ours = ours.ok_or(SkipReason::OutOfReach)?;
    spot.exchange_bytes(begins, original, &ours).ok_or(SkipReason::OutOfReach)
}

/// `cli` or `sti` and a nop.
fn is_flag(bytes: &[u8], opcode: u8) -> bool {
    bytes.split_first().is_some_and(|(&first, nop)| {
        first == opcode && site::DISABLED.iter().any(|known| nop == known)
    })
}

/// `inc`, `dec` or `add` of the word at `count` from the gs base. With KASLR the distance is not that
/// of the image, so that it is the place that counts.
fn is_count(bytes: &[u8], address: u64, (add, wide): (i32, bool), count: u64) -> bool {
    let begins: &[u8] = if wide { &[0x65, 0x48] } else { &[0x65] };
    let Some(behind) = bytes.strip_prefix(begins) else { return false };
    let (operation, distance, immediate) = match *behind {
        [a, b, c, d, e, f] => ([a, b], [c, d, e, f], None),
        [a, b, c, d, e, f, g, h, i, j] => ([a, b], [c, d, e, f], Some([g, h, i, j])),
        _ => return false,
    };
    let known = match (operation, immediate) {
        ([0xff, 0x05], None) => add == 1,
        ([0xff, 0x0d], None) => add == -1,
        ([0x81, 0x05], Some(added)) => i32::from_le_bytes(added) == add,
        _ => false,
    };
    let next = address.wrapping_add(bytes.len() as u64);
    let place = next.wrapping_add_signed(i32::from_le_bytes(distance).into());
    known && place == count
}

#[cfg(test)]
mod tests {
    use super::*;

    // A module that is nothing but such instructions has ten thousands of them, and the guest waits.
    #[test]
    fn what_has_no_room_is_not_made_again_and_again() {
        let mut made = 0;
        let mut space = Space { left: 10, is_full: false };
        let mut of = |len: usize| {
            let stub = || {
                made += 1;
                Some(SwitchStub { bytes: vec![0; len], names: 0, ending: None })
            };
            space.make(stub).is_some()
        };
        assert_eq!([4, 5, 4, 1, 1].map(&mut of), [true, true, false, false, false]);
        assert_eq!(made, 3);
    }

    // A place that is not verified as a whole is not traced, or another one is written.
    #[test]
    fn changes_of_a_count_are_verified_as_a_whole() {
        const AT: u64 = 0xffff_ffff_8100_0000;
        // From behind the instruction to the place.
        let bytes = |begins: &[u8], len: u8, count: u64, immediate: &[u8]| {
            let distance = count.wrapping_sub(AT + u64::from(len)).cast_signed();
            let distance = i32::try_from(distance).unwrap().to_le_bytes();
            [begins, &distance, immediate].concat()
        };
        let count = AT + 0x12_3456;
        for (add, wide, begins, immediate) in [
            (1, false, &[0x65, 0xff, 0x05][..], &[][..]),
            (-1, false, &[0x65, 0xff, 0x0d], &[]),
            (0x200, false, &[0x65, 0x81, 0x05], &[0, 2, 0, 0]),
            (1, true, &[0x65, 0x48, 0xff, 0x05], &[]),
            (-1, true, &[0x65, 0x48, 0xff, 0x0d], &[]),
            (-0x100_0000, true, &[0x65, 0x48, 0x81, 0x05], &[0, 0, 0, 0xff]),
        ] {
            let size = SwitchKind::Count { add, wide }.size();
            assert!(usize::from(size) <= LONGEST);
            let code = bytes(begins, size, count, immediate);
            assert_eq!(code.len(), usize::from(size));
            assert!(is_count(&code, AT, (add, wide), count), "{add} {wide}");
            assert!(!is_count(&code, AT, (add, !wide), count));
            assert!(!is_count(&code, AT, (-add, wide), count));
            assert!(!is_count(&code, AT, (add, wide), count + 4));
            assert!(!is_count(&code[1..], AT, (add, wide), count));
        }
    }
}
