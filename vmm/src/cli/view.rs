//! Options that select what of a trace is printed, shared by several commands.

use super::BadUsage;
use super::wanted::{self, Wanted};
use crate::check::parse_time as parse_unit;
use crate::export::{Export, Pick, Picked, Player};
use crate::kernel::Functions;
use crate::serve::Globs;

/// The heading in `--help` of options that select what of a trace is shown.
pub(super) const WHAT: &str = "What to show";

/// Options that select the calls that are shown.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct View {
    /// Show calls with their durations, as ftrace's function_graph tracer does: `--format graph`
    #[arg(long, conflicts_with = "format", help_heading = WHAT)]
    graph: bool,
    /// Show only functions that match this glob, and what they call; may be repeated
    #[arg(long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    graph_root: Vec<String>,
    /// Show no calls deeper than N levels
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = WHAT)]
    max_depth: Option<u32>,
    /// Show only returns of calls that took at least this long, such as 10us or 1ms
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = WHAT)]
    min_duration: Option<u64>,
    /// Show only records of the tracer of this name
    #[arg(long, value_name = "NAME", value_parser = parse_name, help_heading = WHAT)]
    tracer: Option<String>,
    /// Show only records of this process id; may be repeated
    #[arg(long, value_name = "PID", help_heading = WHAT)]
    pid: Vec<u32>,
    /// Show only records of tasks whose name matches this glob; may be repeated
    #[arg(long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    comm: Vec<String>,
    /// Show only records of this task: by its process id, or from the moment on when its name first
    /// matches this glob, even if its name changes later; may be repeated
    #[arg(long, value_name = "PID|GLOB", value_parser = parse_glob, help_heading = WHAT)]
    follow: Vec<String>,
    /// Show only records of this vCPU; may be repeated, or a list such as 0,2
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = WHAT)]
    cpu: Vec<u32>,
    /// Show only functions of modules that match this glob; may be repeated
    #[arg(long, value_name = "GLOB", value_parser = parse_glob, help_heading = WHAT)]
    module: Vec<String>,
    /// Show nothing before this time: seconds as in the output, such as 1.204530, or with a unit,
    /// such as 1200ms
    #[arg(long, value_name = "TIME", value_parser = parse_moment, help_heading = WHAT)]
    since: Option<u64>,
    /// Show nothing after this time
    #[arg(long, value_name = "TIME", value_parser = parse_moment, help_heading = WHAT)]
    until: Option<u64>,
    /// Show only the first N records
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = WHAT)]
    limit: Option<u64>,
}

impl View {
    /// # Errors
    /// When nothing could be shown.
    pub(super) fn check(&self) -> Result<(), BadUsage> {
        check_span(self.since, self.until)
    }

    /// An export that gets only what is asked for; of some functions, if `of_some` or so it is asked here.
    pub(super) fn pick<'a>(
        &self,
        export: Box<dyn Export + 'a>,
        of_some: bool,
    ) -> Box<dyn Export + 'a> {
        let pick = Pick {
            pids: self.pid.clone(),
            comms: self.comm.clone(),
            follow: self.follow.clone(),
            cpus: self.cpu.clone(),
            modules: self.module.clone(),
            since: self.since,
            until: self.until,
            limit: self.limit,
        };
        if pick.is_all() {
            return export;
        }
        let calls = self.max_depth.is_some() || self.min_duration.is_some();
        let of_some = of_some || calls || self.tracer.is_some() || !self.graph_root.is_empty();
        let picked = Picked::new(export, pick);
        Box::new(if of_some { picked.of_rest() } else { picked })
    }

    /// How notes begin about functions that are not there.
    pub(super) fn none(&self) -> String {
        wanted::none_of(self.tracer())
    }

    /// What is to be told at the end when no function is like it.
    pub(super) fn wanted(&self, option: &'static str, filter: &[String]) -> Wanted {
        let roots = ("--graph-root", &*self.graph_root);
        Wanted::new([(option, filter), roots, ("--module", &*self.module)])
    }

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
        player = player.with_cpus(self.cpu);
        if !self.graph_root.is_empty() {
            let roots = self.graph_root;
            player = player.with_roots(move |name, module| {
                roots.iter().any(|root| Functions::of(root).matches(name, module))
            });
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

/// Plays only functions that one of `filter` matches, of none all, and none of `notrace`; `wanted`
/// sees all that there are.
pub(super) fn choose<E: Export>(
    player: Player<E>,
    (filter, notrace): (Vec<String>, Vec<String>),
    wanted: &Wanted,
) -> Player<E> {
    let globs = Globs { filter, notrace };
    if globs.is_empty() && wanted.is_done() {
        return player;
    }
    let wanted = wanted.clone();
    player.with_filter(move |name, module| {
        wanted.see(name, module);
        globs.mean(name, module)
    })
}

/// A time with its unit, in nanoseconds.
pub(in crate::cli) fn parse_time(text: &str) -> Result<u64, String> {
    parse_unit(text)
        .ok_or_else(|| format!("{text:?} is not a time; use for example 500ns, 10us, 1ms or 2s"))
}

/// A moment of the trace in nanoseconds: seconds with a fraction, or a time with its unit.
pub(super) fn parse_moment(text: &str) -> Result<u64, String> {
    let decimal = || {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit());
        if !is_number(whole) || !is_number(fraction) || fraction.len() > 9 {
            return None;
        }
        let nanoseconds: u64 = format!("{fraction:0<9}").parse().ok()?;
        whole.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(nanoseconds)
    };
    decimal()
        .or_else(|| parse_unit(text))
        .ok_or_else(|| format!("{text:?} is not a time; use for example 1.204530, 1200ms or 2s"))
}

/// Whether there is a moment from `since` to `until`, both in nanoseconds.
///
/// # Errors
/// When there is none: an empty result would pass for a trace in which nothing happened.
pub(super) fn check_span(since: Option<u64>, until: Option<u64>) -> Result<(), BadUsage> {
    match (since, until) {
        (Some(since), Some(until)) if until < since => {
            Err(BadUsage("--until is before --since: exchange the two".to_owned()))
        }
        _ => Ok(()),
    }
}

/// A glob, of functions, tasks or modules.
///
/// # Errors
/// When it is empty, as of a script's variable that is not set: the output would be, too.
pub(super) fn parse_glob(text: &str) -> Result<String, String> {
    match text {
        "" => Err("nothing matches an empty glob: leave the option out for all".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

/// A name that a request can have.
pub(super) fn parse_name(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(char::is_whitespace) {
        return Err("names of tracers have no spaces".to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory as _;

    // "5" and "5100ms" are both times, and the wrong way round they choose nothing.
    #[test]
    fn times_are_the_right_way_round() {
        let checked = |since, until| check_span(since, until).map_err(|error| error.to_string());
        for (since, until) in [(None, Some(1)), (Some(2), None), (Some(2), Some(2))] {
            assert_eq!(checked(since, until), Ok(()));
        }
        assert!(checked(Some(3), Some(2)).unwrap_err().contains("exchange"));
    }

    // What narrows a trace is looked for together, not between formats and pagers.
    #[test]
    fn what_selects_is_a_group_of_its_own_in_the_help() {
        let all = ["--filter", "--notrace", "--tracer"];
        let tasks = [&all[..], &["--pid", "--comm", "--cpu"]].concat();
        let times = [&tasks[..], &["--since", "--until"]].concat();
        for (command, heading, selecting, others) in [
            ("report", WHAT, &times, &["--format", "--clock"][..]),
            ("stream", WHAT, &times, &["--format", "--output"]),
            ("top", WHAT, &tasks, &["--every", "--by", "--rows", "--wait"]),
            ("convert", "What to convert", &times, &["--output", "--format", "--compress"]),
            ("diff", "What to compare", &[&all[..], &["--comm"]].concat(), &["--noise", "--least"]),
        ] {
            let mut cli = Cli::command();
            let command = cli.find_subcommand_mut(command).expect("a command");
            let help = command.render_help().to_string();
            let (before, group) = help.split_once(&format!("\n{heading}:\n")).expect(heading);
            let group = group.split_once("\n\n").map_or(group, |(group, _)| group);
            // The first column: the help of one may name another.
            let has = |text: &str, option: &str| {
                let columns = text.lines().filter_map(|line| line.trim_start().split("  ").next());
                columns.filter(|line| line.starts_with('-')).any(|line| line.contains(option))
            };
            for option in selecting {
                assert!(has(group, option), "{option}: {help}");
            }
            for option in others {
                assert!(has(before, option) && !has(group, option), "{option}: {help}");
            }
        }
    }

    #[test]
    fn moments_are_as_they_are_shown() {
        assert_eq!(parse_moment("1.204530"), Ok(1_204_530_000));
        assert_eq!(parse_moment("2"), Ok(2_000_000_000));
        assert_eq!(parse_moment("1200ms"), Ok(1_200_000_000));
        for bad in ["", ".5", "1.", "-1", "1.2.3", "1.0000000001", "99999999999999", "1,5", "1 s"] {
            assert!(parse_moment(bad).is_err(), "{bad}");
        }
    }

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
