//! What the fields of events are made of: what a kernel itself computes before it records them.

use super::Recorded;
use crate::kernel::PageArray;
use crate::stream::{Header, Shape};
use std::sync::Arc;

/// What a value is made of. Numbers are places in [`EventFields::fields`](super::EventFields), each with what
/// its words are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum From {
    /// As it was recorded.
    Same(Part),
    /// What a task that leaves its CPU is said to be (`__trace_sched_switch_state`): whether it was
    /// preempted, its state, and its state when it has exited.
    SwitchState([Part; 3]),
    /// 16 bits in the order of the network.
    Swapped(Part),
    /// What is behind a pointer that may be a number instead: 0, the first value here; 1, the second.
    Pointed(Part, Part, [u64; 2]),
    /// The major number of a disk and its first minor one: its `dev_t`.
    Disk([Part; 2]),
    /// What a block request says of itself (include/linux/blktrace_api.h).
    Request {
        /// A number, or `!0`, which stands for 0.
        value: Part,
        /// Bits to shift it by, to the right.
        shift: u32,
        /// Its operation and flags, with the operations of which the kernel tells 0.
        untold: Option<(Part, Vec<u64>)>,
    },
    /// A text, and how many bytes of it count, of which the last may end the line: that is left out.
    Line(Part, Part),
    /// A text of letters: of each group the first that fits.
    Letters(Part, Arc<[Vec<Letter>]>),
    /// By its place in a list.
    Listed(Part, Arc<[u64]>),
    /// Whether any of these bits is set.
    Any(Vec<(Part, u64)>),
    /// The number of a page by the address of its `struct page`, and the variables that tell where these are.
    Page(Part, Vec<Part>, PageArray),
    /// One word each, one behind the other.
    Each(Vec<Part>),
    /// Where it was.
    Caller,
    /// The process id of the task that runs.
    Pid,
    /// The same for every event.
    Always(u64),
}

/// Letters that stand for some bits with a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Letter {
    /// Which bits.
    pub mask: u64,
    /// Their value.
    pub value: u64,
    /// The letters.
    pub text: &'static str,
}

impl From {
    /// How many words it makes, if that does not depend on what it is shown as.
    #[must_use]
    pub fn words(&self) -> Option<usize> {
        match self {
            Self::Same(_) | Self::Line(..) | Self::Letters(..) => None,
            Self::SwitchState(_)
            | Self::Swapped(_)
            | Self::Pointed(..)
            | Self::Disk(_)
            | Self::Request { .. }
            | Self::Listed(..)
            | Self::Any(_)
            | Self::Page(..)
            | Self::Caller
            | Self::Pid
            | Self::Always(_) => Some(1),
            Self::Each(parts) => Some(parts.len()),
        }
    }

    /// Adds its words for what is shown as `shape`; whether something of it could not be read.
    pub(super) fn add(&self, shape: &Shape, recorded: &Recorded<'_>, words: &mut Vec<u64>) -> bool {
        let number = |part| recorded.number(part);
        let (word, lost) = match self {
            Self::Same(part) => match part.shape {
                Shape::Text { .. } | Shape::Raw { .. } => {
                    let (own, lost) = recorded.words(part);
                    words.extend(own.iter().copied().chain([0; 32]).take(shape.words()));
                    return lost;
                }
                _ => number(part),
            },
            Self::Line(part, len) => {
                let ((own, lost), (len, more)) = (recorded.words(part), number(len));
                let bytes: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
                let len = usize::try_from(len).unwrap_or(usize::MAX).min(bytes.len());
                let line = bytes.get(..len).unwrap_or_default();
                add_text(line.strip_suffix(b"\n").unwrap_or(line), shape.words(), words);
                return lost || more;
            }
            Self::Letters(part, groups) => {
                let (flags, lost) = number(part);
                add_text(letters(flags, groups).as_bytes(), shape.words(), words);
                return lost;
            }
            Self::Each(parts) => {
                let mut lost = false;
                for (word, one) in parts.iter().map(number) {
                    words.push(word);
                    lost |= one;
                }
                return lost;
            }
            Self::SwitchState(parts) => {
                let [preempted, task, exited] = parts.each_ref().map(number);
                let lost = preempted.1 || task.1 || exited.1;
                (switch_state(preempted.0, task.0, exited.0), lost)
            }
            Self::Swapped(part) => {
                let (word, lost) = number(part);
                let [a, b, ..] = word.to_le_bytes();
                (u16::from_be_bytes([a, b]).into(), lost)
            }
            Self::Pointed(pointer, member, [none, one]) => match number(pointer).0 {
                0 => (*none, false),
                1 => (*one, false),
                _ => number(member),
            },
            Self::Disk(parts) => {
                let [(major, lost), (minor, more)] = parts.each_ref().map(number);
                (major << MINOR_BITS | minor & MINOR, lost || more)
            }
            Self::Request { value, shift, untold } => {
                let (value, lost) = number(value);
                let (untold, more) = untold.as_ref().map_or((false, false), |(flags, none)| {
                    let (flags, lost) = number(flags);
                    (none.contains(&(flags & OPERATION)), lost)
                });
                let value = if untold || value == u64::MAX { 0 } else { value >> shift };
                (value, lost || more)
            }
            Self::Listed(part, list) => {
                let (at, lost) = number(part);
                let found = usize::try_from(at).ok().and_then(|at| list.get(at));
                (found.copied().unwrap_or(0), lost || found.is_none())
            }
            Self::Any(bits) => {
                let mut all = (0, false);
                for (part, mask) in bits {
                    let (word, lost) = number(part);
                    all = (all.0 | u64::from(word & mask != 0), all.1 || lost);
                }
                all
            }
            Self::Page(page, variables, array) => {
                let (page, lost) = number(page);
                let mut values = [0; 2];
                for (value, part) in values.iter_mut().zip(variables) {
                    *value = number(part).0;
                }
                (array.number(page, &values), lost)
            }
            Self::Always(number) => (*number, false),
            Self::Caller => (Header::TOP_4_GIB | u64::from(recorded.caller), false),
            Self::Pid => (recorded.pid.into(), false),
        };
        words.push(word);
        lost
    }
}

/// `MKDEV` (include/linux/kdev_t.h).
const MINOR_BITS: u32 = 20;
const MINOR: u64 = (1 << MINOR_BITS) - 1;
/// `REQ_OP_MASK` (include/linux/blk_types.h).
pub const OPERATION: u64 = 0xff;

fn letters(flags: u64, groups: &[Vec<Letter>]) -> String {
    let first = |group: &Vec<Letter>| group.iter().find(|it| flags & it.mask == it.value).copied();
    groups.iter().filter_map(first).map(|letter| letter.text).collect()
}

/// A text that ends with a NUL, cut where it has no room.
fn add_text(text: &[u8], count: usize, words: &mut Vec<u64>) {
    let room = (8 * count).saturating_sub(1);
    let bytes: Vec<u8> = text.iter().copied().take(room).chain([0; 256]).take(8 * count).collect();
    words.extend(bytes.as_chunks().0.iter().map(|chunk| u64::from_le_bytes(*chunk)));
}

/// Something that was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which field.
    pub field: usize,
    /// What it is in the guest's memory.
    pub shape: Shape,
}

impl Part {
    /// The number that it is, with its sign.
    pub(super) fn number(&self, words: &[u64]) -> u64 {
        let word = words.first().copied().unwrap_or(0);
        let (bits, shift, signed) = match self.shape {
            Shape::Signed { bytes } => (8 * u32::from(bytes), 0, true),
            Shape::Enum { bytes, signed, .. } => (8 * u32::from(bytes), 0, signed),
            Shape::Unsigned { bytes } | Shape::Bool { bytes } => (8 * u32::from(bytes), 0, false),
            Shape::Char => (8, 0, true),
            Shape::Bits { shift, width, signed } => (width.into(), shift.into(), signed),
            _ => (64, 0, false),
        };
        let above = 64 - bits.clamp(1, 64);
        let word = word.checked_shr(shift).unwrap_or(0) << above;
        if signed { (word.cast_signed() >> above).cast_unsigned() } else { word >> above }
    }
}

/// Bits of a task's state (include/linux/sched.h).
mod state {
    pub(super) const REPORT: u64 = 0x7f;
    pub(super) const IDLE: u64 = 0x402;
    pub(super) const REPORT_IDLE: u64 = 0x80;
    pub(super) const REPORT_MAX: u64 = 0x100;
    pub(super) const UNINTERRUPTIBLE: u64 = 2;
    /// Waits for a lock of a kernel for real time, or is frozen.
    pub(super) const SHOWN_AS_UNINTERRUPTIBLE: u64 = 0x1000 | 0x8000;
}

fn switch_state(preempted: u64, task: u64, exited: u64) -> u64 {
    if preempted != 0 {
        return state::REPORT_MAX;
    }
    let mut found = (task | exited) & state::REPORT;
    if task & state::IDLE == state::IDLE {
        found = state::REPORT_IDLE;
    }
    if task & state::SHOWN_AS_UNINTERRUPTIBLE != 0 {
        found = state::UNINTERRUPTIBLE;
    }
    found.checked_ilog2().map_or(0, |bit| 1 << bit)
}

#[cfg(test)]
mod tests {
    use super::super::{EventFields, Known};
    use super::*;
    use vmtrace_trampolines::Field;

    fn number(field: usize) -> Part {
        Part { field, shape: Shape::Unsigned { bytes: 8 } }
    }

    /// What a value makes of three numbers that were recorded.
    fn made(from: &From, shape: &Shape, recorded: [u64; 3]) -> (Vec<u64>, bool) {
        let event = Arc::new(EventFields {
            name: String::new(),
            fields: (0..3).map(Field::Argument).collect(),
            values: Vec::new(),
            print: None,
            call: None,
            in_place: false,
        });
        let known = Known::new(0, &event);
        let recorded = Recorded { known: &known, fields: &recorded, lost: 0, caller: 0, pid: 0 };
        let mut words = Vec::new();
        let lost = from.add(shape, &recorded, &mut words);
        (words, lost)
    }

    fn word(from: &From, recorded: [u64; 3]) -> (u64, bool) {
        let (words, lost) = made(from, &Shape::Unsigned { bytes: 8 }, recorded);
        (words[0], lost)
    }

    // include/trace/events/block.h and include/linux/blktrace_api.h: a device or a place that is not the
    // kernel's own leads to another disk.
    #[test]
    fn requests_say_of_themselves_what_the_kernel_says_of_them() {
        let disk = From::Disk([number(0), number(1)]);
        assert_eq!(word(&disk, [7, 3, 0]), (7 << 20 | 3, false));
        assert_eq!(word(&disk, [0, 0, 0]), (0, false), "there is none");
        let sectors = |shift, untold| From::Request { value: number(0), shift, untold };
        assert_eq!(word(&sectors(9, None), [4096, 34, 0]), (8, false));
        let untold = Some((number(1), vec![34, 35]));
        assert_eq!(word(&sectors(0, untold.clone()), [2048, 0x4001, 0]), (2048, false));
        assert_eq!(word(&sectors(0, untold.clone()), [2048, 0x4022, 0]), (0, false));
        assert_eq!(word(&sectors(0, untold), [u64::MAX, 1, 0]), (0, false), "no place yet");
        let error = From::Listed(number(0), Arc::new([0, (-95_i64).cast_unsigned()]));
        assert_eq!(word(&error, [1, 0, 0]), ((-95_i64).cast_unsigned(), false));
        assert_eq!(word(&error, [2, 0, 0]), (0, true), "nobody knows that one");
        let behind = From::Pointed(number(0), number(1), [8, 9]);
        for (pointer, expected) in [(0, 8), (1, 9), (2, 5)] {
            assert_eq!(word(&behind, [pointer, 5, 0]), (expected, false));
        }
        let any = From::Any(vec![(number(0), 4), (number(1), 8)]);
        for (recorded, expected) in [([4, 0, 0], 1), ([0, 8, 0], 1), ([8, 4, 0], 0)] {
            assert_eq!(word(&any, recorded), (expected, false), "{recorded:?}");
        }
    }

    // `blk_fill_rwbs` of kernel/trace/blktrace.c.
    #[test]
    fn letters_stand_for_the_bits_of_a_request() {
        let letter = |mask, value, text| Letter { mask, value, text };
        let operation = vec![letter(0xff, 1, "W"), letter(0xff, 5, "DE"), letter(0, 0, "N")];
        let groups =
            [vec![letter(1 << 18, 1 << 18, "F")], operation, vec![letter(1 << 11, 1 << 11, "S")]];
        let from = From::Letters(number(0), groups.into());
        let text = |flags, bytes| {
            let (words, lost) = made(&from, &Shape::Text { bytes }, [flags, 0, 0]);
            assert!(!lost);
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            String::from_utf8(bytes).unwrap()
        };
        assert_eq!(text(1, 8), "W\0\0\0\0\0\0\0");
        assert_eq!(text(1 << 18 | 1 << 11 | 5, 8), "FDES\0\0\0\0");
        assert_eq!(text(0x22, 10), format!("N{}", "\0".repeat(15)));
        let mut long = Vec::new();
        add_text(b"0123456789", 1, &mut long);
        assert_eq!(long, [u64::from_le_bytes(*b"0123456\0")], "it ends");
    }

    // `console` (include/trace/events/printk.h) has a buffer of which only the beginning is the text.
    #[test]
    fn lines_end_where_their_length_says() {
        let text = Part { field: 0, shape: Shape::Text { bytes: 8 } };
        let from = From::Line(text, number(1));
        let buffer = u64::from_le_bytes(*b"lazy\nzy?");
        let line = |len| {
            let (words, lost) = made(&from, &Shape::Text { bytes: 8 }, [buffer, len, 0]);
            assert!(!lost && words.len() == 1);
            words[0].to_le_bytes()
        };
        assert_eq!(line(3), *b"laz\0\0\0\0\0");
        assert_eq!(line(5), *b"lazy\0\0\0\0", "the end of the line is left out");
        assert_eq!((line(0), line(6)), ([0; 8], *b"lazy\nz\0\0"));
        assert_eq!((line(8), line(u64::MAX)), (*b"lazy\nzy\0", *b"lazy\nzy\0"), "it ends");
    }

    // Values from `include/trace/events/sched.h` and `fs/proc/array.c` of 6.12.
    #[test]
    fn states_are_those_that_the_kernel_reports() {
        for (preempted, task, exited, reported) in [
            (0, 0, 0, 0),
            (1, 1, 0, 0x100),
            (0, 1, 0, 1),
            (0, 2, 0, 2),
            (0, 0x402, 0, 0x80),
            (0, 0x80, 0x20, 0x20),
            (0, 0x80, 0x10, 0x10),
            (0, 0x2001, 0, 1),
            (0, 0x1000, 0, 2),
            (0, 0x8000, 0, 2),
            (0, 0x40, 0, 0x40),
        ] {
            assert_eq!(switch_state(preempted, task, exited), reported, "{task:#x}");
        }
    }

    #[test]
    fn parts_have_the_size_that_they_have_in_memory() {
        let part = |shape| Part { field: 0, shape };
        let word = [0xffff_1234_ffff_ff85];
        assert_eq!(part(Shape::Signed { bytes: 1 }).number(&word).cast_signed(), -123);
        assert_eq!(part(Shape::Unsigned { bytes: 1 }).number(&word), 0x85);
        assert_eq!(part(Shape::Bits { shift: 32, width: 16, signed: false }).number(&word), 0x1234);
        assert_eq!(part(Shape::Pointer).number(&word), word[0]);
        assert_eq!(part(Shape::Char).number(&word).cast_signed(), -123);
        assert_eq!(part(Shape::Unsigned { bytes: 4 }).number(&word), 0xffff_ff85);
        assert_eq!(part(Shape::Bool { bytes: 2 }).number(&word), 0xff85);
        let numbered = |signed| Shape::Enum { bytes: 4, signed, names: Vec::new() };
        assert_eq!(part(numbered(false)).number(&word), 0xffff_ff85);
        assert_eq!(part(numbered(true)).number(&word).cast_signed(), -123);
    }
}
