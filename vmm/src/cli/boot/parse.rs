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
