//! What a process holds: memory, threads, descriptors.

use std::fmt;
use std::fs;
use std::str::FromStr;

use anyhow::{Context, Error, Result, ensure};

/// A mapping of at least so many KiB, whose memory is not reserved, is the guest's memory or the annex's. vmtrace's own
/// largest ones are heaps of threads, of 64 MiB (glibc's `HEAP_MAX_SIZE`).
const OF_GUEST: u64 = 128 << 10;

/// One look at a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Resident memory (`VmRSS`), KiB. Pages of the guest's are part of it once they were touched.
    pub resident: u64,
    /// The same without the memory of the guest and of the annex, KiB.
    pub own: u64,
    /// The size of what was left out, KiB. It only changes when a heap of vmtrace's own has become part of it, as the
    /// kernel merges mappings that touch.
    pub left_out: u64,
    /// Threads.
    pub threads: u64,
    /// Open descriptors.
    pub descriptors: u64,
}

impl Look {
    /// Looks at a process, which may end any moment.
    ///
    /// # Errors
    /// When it is gone, or its kernel does not tell (`CONFIG_PROC_PAGE_MONITOR`).
    pub fn at(pid: u32) -> Result<Self> {
        let read = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            fs::read_to_string(&path).context(path)
        };
        let (status, maps) = (read("status")?, read("smaps")?);
        let field = |name: &str| value(&status, name).with_context(|| format!("no {name}"));
        let (resident, threads) = (field("VmRSS:")?, field("Threads:")?);
        let (left_out, guest) = of_guest(&maps);
        ensure!(guest > 0, "no memory of the guest in {maps}");
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
        Ok(Self { resident, own: resident.saturating_sub(guest), left_out, threads, descriptors })
    }
}

/// The number behind a name at the beginning of a line.
fn value(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_ascii_whitespace().next()?.parse().ok()
}

/// KiB of the mappings of the guest's memory, and what of it is resident, from `smaps`.
fn of_guest(maps: &str) -> (u64, u64) {
    let (mut size, mut resident, mut sum) = (0, 0, (0, 0));
    for line in maps.lines() {
        let number = || value(line, line.split(' ').next()?);
        match line.split(' ').next() {
            Some("Size:") => size = number().unwrap_or(0),
            Some("Rss:") => resident = number().unwrap_or(0),
            // The last line of a mapping.
            Some("VmFlags:") if size >= OF_GUEST && line.split(' ').any(|flag| flag == "nr") => {
                sum = (sum.0 + size, sum.1 + resident);
            }
            _ => {}
        }
    }
    sum
}

impl fmt::Display for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resident, own, left_out, threads, descriptors } = self;
        write!(f, "{resident} {own} {left_out} {threads} {descriptors}")
    }
}

impl FromStr for Look {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers: Vec<u64> = text.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let &[resident, own, left_out, threads, descriptors] = &numbers[..] else {
            anyhow::bail!("not a look: {text:?}");
        };
        Ok(Self { resident, own, left_out, threads, descriptors })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The guest touches more and more of its memory, which would hide what vmtrace itself takes, or look like it.
    #[test]
    fn memory_of_the_guest_is_told_from_our_own() {
        let map = |size: u64, resident: u64, flags: &str| {
            format!(
                "7f0000000000-7f0020000000 rw-p 00000000 00:00 0\nSize: {size} kB\nRss: {resident} kB\nPss: 7 kB\n\
                 VmFlags: rd wr mr mw me ac {flags}\n"
            )
        };
        let heap = map(65_536, 900, "nr sd");
        let ram = map(524_288, 5000, "nr sd");
        let reserved = map(524_288, 70, "sd");
        assert_eq!(of_guest(&format!("{heap}{ram}{reserved}")), (524_288, 5000));
        let look = Look { resident: 1, own: 2, left_out: 5, threads: 3, descriptors: 4 };
        assert_eq!(look.to_string().parse::<Look>().unwrap(), look);
        "1 2 3".parse::<Look>().unwrap_err();
    }
}
