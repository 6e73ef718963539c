//! What of a trace is printed: the options that several commands share.

use crate::export::{Export, Player};
use crate::kernel::glob;

/// Nanoseconds in units of time.
const UNITS: [(&str, u64); 4] = [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];

/// Which calls are shown.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct View {
    /// Show calls with their durations, as ftrace's function_graph tracer does: `--format graph`
    #[arg(long, conflicts_with = "format")]
    graph: bool,
    /// Show only what functions that match this glob call, and these; may be repeated
    #[arg(long, value_name = "GLOB")]
    graph_root: Vec<String>,
    /// Show no calls deeper than so many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_depth: Option<u32>,
    /// Show only returns of calls that took at least so long, such as 10us or 1ms
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    min_duration: Option<u64>,
    /// Show only records of the tracer of this name
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    tracer: Option<String>,
}

impl View {
    /// Whether calls are what the user asks for.
    pub(super) fn wants_graph(&self) -> bool {
        let rooted = self.graph || !self.graph_root.is_empty();
        rooted || self.max_depth.is_some() || self.min_duration.is_some()
    }

    /// The name of the tracer that is asked for.
    pub(super) fn tracer(&self) -> Option<&str> {
        self.tracer.as_deref()
    }

    /// The player that plays only that.
    pub(super) fn apply<E: Export>(self, mut player: Player<E>) -> Player<E> {
        if !self.graph_root.is_empty() {
            let roots = self.graph_root;
            player =
                player.with_roots(move |name| roots.iter().any(|root| glob::matches(root, name)));
        }
        if let Some(depth) = self.max_depth {
            player = player.with_max_depth(depth);
        }
        if let Some(nanoseconds) = self.min_duration {
            player = player.with_min_duration(nanoseconds);
        }
        match self.tracer {
            Some(name) => player.with_tracer(name),
            None => player,
        }
    }
}

/// A time with its unit, in nanoseconds.
fn parse_time(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).unwrap_or_default();
    let factor = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, factor)| *factor);
    factor
        .and_then(|factor| digits.parse::<u64>().ok()?.checked_mul(factor))
        .ok_or_else(|| format!("{text:?} is no time; say for example 500ns, 10us, 1ms or 2s"))
}

/// A name that a request can have.
fn parse_name(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(char::is_whitespace) {
        return Err("names of tracers have no spaces".to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(parse_time("500ns"), Ok(500));
        assert_eq!(parse_time("10us"), Ok(10_000));
        assert_eq!(parse_time("1ms"), Ok(1_000_000));
        assert_eq!(parse_time("2s"), Ok(2_000_000_000));
        for bad in ["", "10", "ms", "1.5ms", "-1ms", "10 us", "1h", "99999999999s", "1µs"] {
            assert!(parse_time(bad).is_err(), "{bad}");
        }
    }
}
