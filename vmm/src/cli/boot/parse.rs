//! Values of options.

use crate::kernel::arguments::ArgumentSpec;
use crate::machine::{MAX_MEMORY, MIN_MEMORY};
use crate::serve::{SpecError, TracerSpec};
use crate::tracer::annex::{LEAST_BUFFER, MOST_BUFFER};
use vmtrace_trampolines::layout::CHUNK_SIZE;

pub(super) fn tracer(text: &str) -> Result<TracerSpec, String> {
    text.parse().map_err(|error: SpecError| error.to_string())
}

/// Of `--hist`: a tracer with that action alone.
pub(super) fn hist(text: &str) -> Result<TracerSpec, String> {
    TracerSpec::sorting(text).map_err(|error| error.to_string())
}

/// Of `--count-callers`: the same.
pub(super) fn callers(text: &str) -> Result<TracerSpec, String> {
    TracerSpec::by_caller(text).map_err(|error| error.to_string())
}

pub(super) fn argument(text: &str) -> Result<ArgumentSpec, String> {
    ArgumentSpec::parse(text).map_err(|error| error.to_string())
}

/// A command line that the agent or a shell can run.
pub(super) fn run(text: &str) -> Result<String, String> {
    vmtrace_agent::understand(text, |_| false)?;
    Ok(text.to_owned())
}

/// A CID that a guest can have.
pub(super) fn cid(text: &str) -> Result<u32, String> {
    let cid = text.parse().ok().filter(|cid| (3..u32::MAX).contains(cid));
    cid.ok_or_else(|| "a guest has one from 3 on, below 4294967295".to_owned())
}

/// Seconds in which something can be done.
pub(super) fn timeout(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("the run would end before it begins: leave it out for no limit".to_owned()),
        Ok(seconds) => Ok(seconds),
        Err(_) => Err("use whole seconds, such as 600".to_owned()),
    }
}

fn size(text: &str) -> Result<u64, String> {
    let unit = match text.chars().last() {
        Some('k' | 'K') => 1 << 10,
        Some('m' | 'M') => 1 << 20,
        Some('g' | 'G') => 1 << 30,
        _ => 1,
    };
    let digits = if unit == 1 { text } else { &text[..text.len() - 1] };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(unit))
        .ok_or_else(|| format!("{text:?} is not a size; use for example 512M or 2G"))
}

/// A size that a machine can have.
pub(super) fn memory(text: &str) -> Result<u64, String> {
    let size = size(text)?;
    if !(MIN_MEMORY..=MAX_MEMORY).contains(&size) || !size.is_multiple_of(4096) {
        return Err("a guest has 64M to 1024G of memory, in pages of 4K".to_owned());
    }
    Ok(size)
}

/// A size that a ring can have.
pub(super) fn buffer(text: &str) -> Result<u64, String> {
    let size = size(text)?;
    if !(LEAST_BUFFER..=MOST_BUFFER).contains(&size) || !size.is_multiple_of(CHUNK_SIZE as u64) {
        return Err("a ring has 32K to 1G, in multiples of 16K".to_owned());
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    // An emulated host was booted before it was said.
    #[test]
    fn cids_that_are_reserved_are_usage_errors() {
        assert_eq!((cid("3"), cid("4294967294")), (Ok(3), Ok(u32::MAX - 1)));
        for bad in ["", "x", "-1", "0", "2", "4294967295", "4294967296"] {
            assert!(cid(bad).unwrap_err().contains("from 3 on"), "{bad}");
        }
    }

    // 0 is no limit for others (timeout of coreutils), and here it was none at all.
    #[test]
    fn a_run_has_some_time() {
        assert_eq!((timeout("1"), timeout("18446744073709551615")), (Ok(1), Ok(u64::MAX)));
        assert!(timeout("0").unwrap_err().contains("no limit"));
        for bad in ["", "-1", "1.5", "10s", "18446744073709551616"] {
            assert!(timeout(bad).unwrap_err().contains("such as 600"), "{bad}");
        }
    }

    // The guest would boot first, and be traced by nobody.
    #[test]
    fn rings_that_there_cannot_be_are_usage_errors() {
        for (text, size) in
            [("32K", 32 << 10), ("48K", 48 << 10), ("64M", 64 << 20), ("1G", 1 << 30)]
        {
            assert_eq!(buffer(text), Ok(size));
        }
        for bad in ["0", "16K", "33K", "2G", "1025M", "x", "18446744073709551615"] {
            assert!(buffer(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!(size("5G"), Ok(5 << 30));
        assert_eq!(size("4096"), Ok(4096));
        for bad in ["", "M", "1T", "-1", "99999999999G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
