//! Helpers for several formats: time in nanoseconds, numbers for names, names of tasks.

use std::borrow::Cow;
use std::io;
use std::num::NonZeroU64;

use rustc_hash::FxHashMap;

use crate::export::Name;
use crate::stream::{Header, nanoseconds};

/// Most names that are told apart: as many symbols as a stream may have.
const NAMES: usize = 1 << 20;

/// Ticks to nanoseconds since the start of the clock; what is before it is at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    start: u64,
    hz: u64,
}

impl Default for Clock {
    fn default() -> Self {
        Self { start: 0, hz: 1 }
    }
}

impl Clock {
    pub(super) fn of(header: &Header) -> Self {
        Self { start: header.clock_start, hz: header.clock_hz.max(1) }
    }

    /// Rounded down.
    #[inline]
    pub(super) fn ns(self, ticks: u64) -> u64 {
        let since = ticks.saturating_sub(self.start);
        u64::try_from(nanoseconds(since, self.hz)).unwrap_or(u64::MAX)
    }
}

/// Numbers of an array as text.
pub(super) fn listed(words: &[u64]) -> String {
    words.iter().map(|word| format!("{word:#x}")).collect::<Vec<_>>().join(", ")
}

/// A name that none of the others is: with a number behind it where it must be.
pub(super) fn numbered(name: &str, taken: &[String]) -> String {
    let mut numbered = name.to_owned();
    let mut number = 2;
    while taken.contains(&numbered) {
        numbered = format!("{name}_{number}");
        number += 1;
    }
    numbered
}

/// Why a trace with more kinds of something than a format has room for is refused.
pub(super) fn too_many(what: &str) -> io::Error {
    let text = format!("the trace has too many different {what}: convert fewer functions (-f)");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// What a task is called: all idle tasks share a pid, and are told apart by their vCPU.
pub(super) fn task_name(vcpu: u32, pid: u32, comm: Option<&str>) -> Cow<'_, str> {
    match comm {
        _ if pid == 0 => format!("swapper/{vcpu}").into(),
        comm => comm.unwrap_or("<...>").into(),
    }
}

/// Numbers for names of functions, from 0.
#[derive(Debug)]
pub(super) struct Names {
    numbers: FxHashMap<u64, u32>,
    known: Vec<Known>,
    recent: Box<[Recent]>,
}

/// A name that was asked for.
#[derive(Clone, Copy, Debug, Default)]
struct Recent {
    address: u64,
    /// That of the stream.
    symbol: Option<NonZeroU64>,
    number: Option<u32>,
}

#[derive(Debug)]
pub(super) struct Known {
    pub(super) address: u64,
    /// Name and module, if there is a symbol.
    pub(super) symbol: Option<(Box<str>, Box<str>)>,
    /// That of the stream.
    of_stream: Option<NonZeroU64>,
}

/// The number of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Number {
    pub(super) number: u32,
    /// It has been given just now.
    pub(super) new: bool,
}

impl Names {
    pub(super) fn new() -> Self {
        let recent = vec![Recent::default(); 1 << 12].into();
        Self { numbers: FxHashMap::default(), known: Vec::new(), recent }
    }

    /// The number of a name; `None` when there are too many. An address that has another name than
    /// before (a module took the place of another) gets another number.
    #[inline]
    pub(super) fn number(&mut self, name: &Name<'_>) -> Option<Number> {
        let slot = usize::try_from(name.address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52);
        let slot = slot.unwrap_or(0) & (self.recent.len() - 1);
        let recent = self.recent[slot];
        if let Some(number) = recent.number
            && (recent.address, recent.symbol) == (name.address, name.number)
            && (name.number.is_some() || self.get(number)?.is(name))
        {
            return Some(Number { number, new: false });
        }
        let found = self.look_up(name)?;
        self.recent[slot] =
            Recent { address: name.address, symbol: name.number, number: Some(found.number) };
        Some(found)
    }

    fn look_up(&mut self, name: &Name<'_>) -> Option<Number> {
        if let Some(&number) = self.numbers.get(&name.address)
            && usize::try_from(number).ok().and_then(|it| self.known.get(it))?.is(name)
        {
            return Some(Number { number, new: false });
        }
        let number = u32::try_from(self.known.len()).ok()?;
        if self.known.len() >= NAMES {
            return None;
        }
        let symbol = name.symbol.map(|(symbol, module)| (symbol.into(), module.into()));
        self.known.push(Known { address: name.address, symbol, of_stream: name.number });
        self.numbers.insert(name.address, number);
        Some(Number { number, new: true })
    }

    pub(super) fn get(&self, number: u32) -> Option<&Known> {
        self.known.get(usize::try_from(number).ok()?)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Known> {
        self.known.iter()
    }
}

impl Known {
    /// Whether it is the name of its address.
    fn is(&self, name: &Name<'_>) -> bool {
        if name.number.is_some() && name.number == self.of_stream {
            return true;
        }
        match (&self.symbol, name.symbol) {
            (None, None) => true,
            (Some((symbol, module)), Some(other)) => (&**symbol, &**module) == other,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_nanoseconds_at_any_rate() {
        for (clock_hz, ticks, expected) in [
            (1_000_000_000, 1_005, 5),
            (3_000_000_000, 1_000 + 10, 3),
            (10_000_000, 1_000 + 36_000_000_007, 3_600_000_000_700),
            (u64::MAX, u64::MAX, 999_999_999),
            (1, u64::MAX, u64::MAX),
            (7, 10, 0),
        ] {
            let header = Header { clock_hz, clock_start: 1_000, ..Header::default() };
            assert_eq!(Clock::of(&header).ns(ticks), expected, "{clock_hz} {ticks}");
        }
    }

    // A module may take the place of another.
    #[test]
    fn an_address_with_another_name_is_another() {
        let mut names = Names::new();
        let name = |symbol| Name { address: 0x1000, symbol, number: None };
        let number = |names: &mut Names, symbol| names.number(&name(symbol)).expect("room");
        let first = number(&mut names, Some(("open", "ext4")));
        assert_eq!(first, Number { number: 0, new: true });
        assert_eq!(number(&mut names, Some(("open", "ext4"))), Number { new: false, ..first });
        assert_eq!(number(&mut names, Some(("open", "xfs"))), Number { number: 1, new: true });
        assert_eq!(number(&mut names, None), Number { number: 2, new: true });
        assert_eq!(names.iter().count(), 3);
        assert_eq!(name(Some(("open", "xfs"))).label(), "open [xfs]");
        assert_eq!(name(None).label(), "0x1000");
    }
}
