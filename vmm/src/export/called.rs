//! Functions whose calls were counted by caller: the tables at the end of the text output.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::names::unnamed;
use super::stats::share;
use super::{Called, Name};

/// Most pairs of functions and callers that are told apart.
const MOST: usize = 1 << 20;

/// How often functions were called by whom, by tracer, on all vCPUs together.
#[derive(Debug, Default)]
pub(super) struct CalledBy {
    functions: BTreeMap<Key, BTreeMap<Box<str>, u64>>,
    pairs: usize,
    /// Calls there was no room for.
    others: u64,
}

/// In the order of functions with as many calls.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// As it was called then: a module may take the place of another.
    name: Box<str>,
    tracer: Box<str>,
    address: u64,
}

impl CalledBy {
    /// Adds what was counted for a tracer, the first if there are not several.
    pub(super) fn add(&mut self, tracer: Option<&str>, hits: &mut dyn Iterator<Item = Called<'_>>) {
        let tracer = tracer.map_or_else(|| unnamed(0), str::to_owned);
        for Called { function, caller, hits } in hits.filter(|it| it.hits > 0) {
            let (address, name) = (function.address, function.label().into());
            let key = Key { name, tracer: tracer.as_str().into(), address };
            let caller = caller.as_ref().map_or_else(|| "?".to_owned(), Name::label);
            let known =
                self.functions.get_mut(&key).and_then(|callers| callers.get_mut(caller.as_str()));
            match known {
                Some(sum) => *sum = sum.saturating_add(hits),
                None if self.pairs >= MOST => self.others = self.others.saturating_add(hits),
                None => {
                    self.pairs += 1;
                    self.functions.entry(key).or_default().insert(caller.into(), hits);
                }
            }
        }
    }

    /// Writes a table for each function, those of most calls first, and in each the most frequent caller.
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let total = |callers: &BTreeMap<Box<str>, u64>| {
            callers.values().fold(0_u64, |sum, hits| sum.saturating_add(*hits))
        };
        let functions = self.functions.iter();
        let mut functions: Vec<_> = functions.map(|(key, it)| (key, it, total(it))).collect();
        functions.sort_by(|(a, _, of_a), (b, _, of_b)| of_b.cmp(of_a).then_with(|| a.cmp(b)));
        let mut tracers: Vec<_> = functions.iter().map(|(key, ..)| &key.tracer).collect();
        tracers.sort_unstable();
        tracers.dedup();
        for (key, callers, total) in functions {
            let tracer =
                if tracers.len() > 1 { format!(" ({})", key.tracer) } else { String::new() };
            let plural = |many: u64| if many == 1 { "" } else { "s" };
            writeln!(
                out,
                "# callers of {}{tracer}: {total} call{} by {} caller{}",
                key.name,
                plural(total),
                callers.len(),
                plural(callers.len() as u64)
            )?;
            let mut callers: Vec<_> = callers.iter().collect();
            callers.sort_by(|(a, of_a), (b, of_b)| of_b.cmp(of_a).then_with(|| a.cmp(b)));
            for (caller, hits) in callers {
                writeln!(out, "#{hits:>12} {}  {caller}", share(*hits, total))?;
            }
        }
        if self.others > 0 {
            writeln!(out, "# callers of others: {} calls", self.others)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(symbol: &'static str, address: u64) -> Name<'static> {
        Name { address, symbol: Some((symbol, "")), number: None }
    }

    // A call under another caller, or a share of another sum, is a wrong answer without a sign of it.
    #[test]
    fn tables_have_every_call_once_and_the_most_frequent_first() {
        let mut called = CalledBy::default();
        let (read, open) = (name("vfs_read", 1), name("vfs_open", 2));
        let by = |function, caller, hits| Called { function, caller, hits };
        for _ in 0..2 {
            let hits = [
                by(open, Some(name("a", 8)), 5),
                by(read, Some(name("a", 9)), 3),
                // Another place of the same caller.
                by(read, Some(name("a", 7)), 4),
                by(read, Some(name("b", 6)), 20),
                by(read, None, 1),
                by(read, Some(name("c", 5)), 0),
            ];
            called.add(None, &mut hits.into_iter());
        }
        called.add(Some("other"), &mut [by(open, None, u64::MAX)].into_iter());
        called.add(Some("other"), &mut [by(open, None, 2)].into_iter());
        let mut text = Vec::new();
        called.write(&mut text).unwrap();
        let expected = "\
            # callers of vfs_open (other): 18446744073709551615 calls by 1 caller\n\
            #18446744073709551615  100.0%  ?\n\
            # callers of vfs_read (0): 56 calls by 3 callers\n\
            #          40   71.4%  b\n\
            #          14   25.0%  a\n\
            #           2    3.6%  ?\n\
            # callers of vfs_open (0): 10 calls by 1 caller\n\
            #          10  100.0%  a\n";
        assert_eq!(
            String::from_utf8(text).unwrap(),
            expected.replace("(0)", &format!("({})", unnamed(0)))
        );
    }

    // A stream can have any number of pairs: memory must not grow with them, and no call be left out silently.
    #[test]
    fn pairs_that_have_no_room_are_told_together() {
        let mut called = CalledBy::default();
        let at = |address| Name { address, symbol: None, number: None };
        let pairs = MOST as u64 + 3;
        let mut hits = (0..pairs).map(|caller| Called {
            function: at(1),
            caller: Some(at(caller + 2)),
            hits: 2,
        });
        called.add(None, &mut hits);
        assert_eq!((called.pairs, called.others), (MOST, 6));
        let mut text = Vec::new();
        called.write(&mut text).unwrap();
        assert!(text.ends_with(b"\n# callers of others: 6 calls\n"));
    }
}
