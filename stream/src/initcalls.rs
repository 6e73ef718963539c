//! Initcalls of the kernel in a header: the level of each such function.

use super::Header;

/// Keys begin with this; the level follows.
const KEY: &str = "initcalls.";
/// Bytes of a value, and of all of them; the rest is left out.
const VALUE: usize = 48 << 10;
const ALL: usize = 256 << 10;

/// A function that the kernel calls once while it boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initcall<'a> {
    /// Its address in the running kernel.
    pub address: u64,
    /// Its name.
    pub name: &'a str,
    /// Its level, such as `subsys`.
    pub level: &'a str,
}

impl Header {
    /// Adds initcalls, those of a level one after the other. What has no place in a header is left
    /// out: addresses beyond the stream's window, names with white space, and more than 256 KiB.
    pub fn add_initcalls<'a>(&mut self, calls: impl IntoIterator<Item = Initcall<'a>>) {
        let mut all = 0;
        for call in calls {
            let Some(offset) = self.offset(call.address) else { continue };
            let line = format!("{offset:08x} {}\n", call.name);
            all += line.len();
            if all > ALL || call.name.contains(char::is_whitespace) || line.len() > VALUE {
                continue;
            }
            let is_of = |key: &str| key.strip_prefix(KEY) == Some(call.level);
            match self.extra.last_mut() {
                Some((key, value)) if is_of(key) && value.len() + line.len() <= VALUE => {
                    value.push_str(&line);
                }
                _ => self.extra.push((format!("{KEY}{}", call.level), line)),
            }
        }
    }

    /// The initcalls that it names, in their order.
    pub fn initcalls(&self) -> impl Iterator<Item = Initcall<'_>> {
        let levels =
            self.extra.iter().filter_map(|(key, value)| Some((key.strip_prefix(KEY)?, value)));
        levels.flat_map(move |(level, value)| {
            value.lines().filter_map(move |line| {
                let (offset, name) = line.split_once(' ')?;
                let address = self.address(u32::from_str_radix(offset, 16).ok()?);
                Some(Initcall { address, name, level })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Decoder, Frame, Progress, Writer};

    // Most that a kernel can have goes through a stream, and what is no list harms nobody.
    #[test]
    fn initcalls_go_through_a_header() {
        let base = Header::TOP_4_GIB;
        let mut header = Header { clock_hz: 1, vcpus: 1, address_base: base, ..Header::default() };
        let names: Vec<_> = (0..4000).map(|number| format!("{number:0>30}_init")).collect();
        let levels = ["early", "core", "device"];
        let made: Vec<_> = (0u64..)
            .zip(&names)
            .map(|(number, name)| Initcall {
                address: base + 0x8000_0000 + number * 16,
                name,
                level: levels[usize::try_from(number / 1500).expect("small")],
            })
            .collect();
        let long = "x".repeat(VALUE);
        let odd = [
            Initcall { address: base, name: &long, level: "late" },
            Initcall { address: 7, name: "elsewhere", level: "late" },
            Initcall { address: base, name: "of two\nlines", level: "late" },
        ];
        header.add_initcalls(made.iter().copied().chain(odd));
        // As few as there can be: a reader has a limit for each, and one for all.
        assert!(header.extra.iter().all(|(_, value)| value.len() <= VALUE));
        assert_eq!(header.extra.len(), 5);
        header.extra.push(("initcalls.late".into(), "zz x\nnothing\n\n80000000 last".into()));
        let writer = Writer::new(Vec::new(), &header).expect("it can be sent");
        let mut decoder = Decoder::new();
        decoder.feed(&writer.into_inner().expect("memory"));
        assert!(matches!(decoder.advance(), Ok(Progress::Frame)));
        let Some(Frame::Header(read)) = decoder.frame() else { panic!("no header") };
        let mut found: Vec<_> = read.initcalls().collect();
        let last = found.pop().expect("some");
        assert_eq!((last.address, last.name, last.level), (base + 0x8000_0000, "last", "late"));
        assert_eq!(found, made);
        header.add_initcalls(made.iter().cycle().take(20_000).copied());
        assert!(Writer::new(Vec::new(), &header).is_ok(), "a header may be too long now");
    }
}
