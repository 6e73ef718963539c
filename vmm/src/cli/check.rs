//! `vmtrace check`: checks a trace against rules. The same rules are options of `boot`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use vmtrace_system::say;

use super::exit;
use crate::check::{Check, Format, Outcome, Rule, RuleError, Verb, Verdict, parse_file, write};
use crate::export::{PlayError, Player};
use crate::kernel::glob;

/// Rules, and where their results are written.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Rules")]
pub struct Rules {
    /// These functions are called at least once, or as often as given: < N, <= N, = N, >= N, > N.
    /// The functions of all rules are globs, one or several: 'panic|oops_*'
    #[arg(long, value_name = "'F [>= N]'", value_parser = parse(Verb::Expect))]
    expect: Vec<Rule>,
    /// None of these functions is called
    #[arg(long, value_name = "'F|G...'", value_parser = parse(Verb::Forbid))]
    forbid: Vec<Rule>,
    /// The first calls of these functions come in this order
    #[arg(long, value_name = "'F < G...'", value_parser = parse(Verb::Order))]
    order: Vec<Rule>,
    /// No call takes longer (needs returns: --graph)
    #[arg(long, value_name = "'F TIME'", value_parser = parse(Verb::Max))]
    max: Vec<Rule>,
    /// F is called, and each call of it is followed by one of G within this time, whoever calls it
    #[arg(long, value_name = "'F -> G TIME'", value_parser = parse(Verb::Within))]
    within: Vec<Rule>,
    /// Init starts (boot), or this function is called, within this time after the machine's start,
    /// by the guest's clock
    #[arg(long, value_name = "'boot|F TIME'", value_parser = parse(Verb::Budget))]
    budget: Vec<Rule>,
    /// Read rules from a file: one per line, such as 'expect vfs_open >= 1'; # begins a comment
    #[arg(long, value_name = "FILE")]
    rules: Vec<PathBuf>,
    /// Write the results of the rules in this format, to this file if one is given; may be
    /// repeated [default: text; formats: text, junit, tap, github]
    #[arg(long, value_name = "FORMAT[=FILE]", value_parser = parse_results)]
    results: Vec<Results>,
}

/// A format of results, and where they go.
#[derive(Clone, Debug)]
struct Results {
    format: Format,
    file: Option<PathBuf>,
}

fn parse(verb: Verb) -> impl Fn(&str) -> Result<Rule, RuleError> + Clone + Send + Sync + 'static {
    move |text| verb.rule(text)
}

fn parse_results(text: &str) -> Result<Results, String> {
    let (format, file) = match text.split_once('=') {
        Some((format, file)) => (format, Some(file)),
        None => (text, None),
    };
    let format = <Format as clap::ValueEnum>::from_str(format, false)
        .map_err(|_| format!("{format:?} is not a format: text, junit, tap or github"))?;
    match file {
        Some("") => Err("no file name after the =".to_owned()),
        file => Ok(Results { format, file: file.map(PathBuf::from) }),
    }
}

/// Something is wrong with the rules, or there are none.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct BadRules(String);

impl Rules {
    /// All rules, with those of files.
    ///
    /// # Errors
    /// When a file cannot be read, or has what is no rule ([`BadRules`]).
    pub(super) fn all(&self) -> Result<Vec<Rule>> {
        let options =
            [&self.expect, &self.forbid, &self.order, &self.max, &self.within, &self.budget];
        let mut rules: Vec<Rule> = options.into_iter().flatten().cloned().collect();
        for path in &self.rules {
            let name = path.display().to_string();
            let content = fs::read_to_string(path).with_context(|| format!("--rules {name}"))?;
            let file = parse_file(&name, &content).map_err(|(line, error)| {
                BadRules(format!("{name}:{line}:{}: {error}", error.column()))
            })?;
            if file.is_empty() {
                return Err(BadRules(format!("--rules {name}: there is no rule in it")).into());
            }
            rules.extend(file);
        }
        Ok(rules)
    }

    /// Whether there are any.
    pub(super) fn any(&self) -> bool {
        let options =
            [&self.expect, &self.forbid, &self.order, &self.max, &self.within, &self.budget];
        !self.rules.is_empty() || options.into_iter().any(|rules| !rules.is_empty())
    }

    /// Files that are read, and such that are written.
    pub(super) fn files(&self) -> (&[PathBuf], impl Iterator<Item = &PathBuf>) {
        (&self.rules, self.results.iter().filter_map(|results| results.file.as_ref()))
    }

    /// Whether results are asked for.
    pub(super) fn wants_results(&self) -> bool {
        !self.results.is_empty()
    }

    /// Writes the results; those without a file to `out`.
    fn write(&self, out: &mut dyn Write, outcomes: &[Outcome]) -> Result<()> {
        for Results { format, file } in &self.results {
            let Some(file) = file else {
                write(out, outcomes, *format)?;
                continue;
            };
            let name = || format!("cannot write {}", file.display());
            let mut file = File::create(file).with_context(name)?;
            write(&mut file, outcomes, *format).with_context(name)?;
        }
        if self.results.iter().all(|results| results.file.is_some()) {
            write(out, outcomes, Format::Text)?;
        }
        out.flush()?;
        Ok(())
    }
}

/// What a run exits with whose rules these are, if all else is well.
fn code(outcomes: &[Outcome]) -> u8 {
    let any = |verdict| outcomes.iter().any(|outcome| outcome.verdict == verdict);
    if any(Verdict::Failed) {
        exit::RULE_FAILED
    } else if any(Verdict::Undecided) {
        exit::FAILED
    } else {
        exit::DONE
    }
}

/// Check whether a trace is as rules say.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// File written by `vmtrace boot -o`; `-` reads standard input
    file: PathBuf,
    /// Rules with their verbs, such as 'expect vfs_open >= 1'
    #[arg(value_name = "RULE", value_parser = |text: &str| text.parse::<Rule>())]
    rule: Vec<Rule>,
    #[command(flatten)]
    rules: Rules,
    /// Only records of the tracer of this name
    #[arg(long, value_name = "NAME")]
    tracer: Option<String>,
}

/// Plays the file and says how it is with each rule: 0 all hold, 5 one fails, 1 one cannot be
/// decided.
///
/// # Errors
/// When the file cannot be read, or the output fails.
pub fn run(args: Args) -> Result<u8> {
    let mut rules = args.rule;
    rules.extend(args.rules.all()?);
    if rules.is_empty() {
        let text = "no rules: give some, such as 'expect vfs_open >= 1', or --rules FILE";
        return Err(BadRules(text.to_owned()).into());
    }
    let (mut source, name) = super::report::open(&args.file)?;
    let mut player = Player::new(Check::new(rules));
    if let Some(name) = args.tracer {
        player = player.with_tracer(name);
    }
    let played = super::report::play_through(&mut source, &mut player, true);
    let late = player.late();
    if let Err(PlayError::Absent(error)) = played {
        return Err(error).context(name);
    }
    let outcomes = player.into_export().finish(late);
    // What was found up to the place where a stream is torn is worth knowing.
    let printed = args.rules.write(&mut io::stdout().lock(), &outcomes);
    played.with_context(|| name)?;
    match printed {
        Err(error) if !super::report::is_broken_pipe(&error) => Err(error),
        _ => Ok(code(&outcomes)),
    }
}

/// Rules of a run, which are checked as it goes.
#[derive(Clone)]
pub(super) struct Live {
    rules: Rules,
    checked: Arc<Mutex<Checked>>,
}

struct Checked {
    player: Option<Player<Check>>,
    error: Option<PlayError>,
}

impl Live {
    /// `None` without rules.
    ///
    /// # Errors
    /// As [`Rules::all`]; and when results are asked for without any rule.
    pub(super) fn new(rules: &Rules) -> Result<Option<Self>> {
        let all = rules.all()?;
        if all.is_empty() {
            if rules.wants_results() {
                let text = "--results: there are no rules that could have results";
                return Err(BadRules(text.to_owned()).into());
            }
            return Ok(None);
        }
        let player = Some(Player::new(Check::new(all)));
        let checked = Arc::new(Mutex::new(Checked { player, error: None }));
        Ok(Some(Self { rules: rules.clone(), checked }))
    }

    /// Looks before the run whether rules are about functions that the kernel has (`all` names),
    /// and that are traced, with their ends (`timed`) where it is about durations.
    ///
    /// # Errors
    /// [`BadRules`] for what there is not. What is not traced now may be later: that is told only.
    pub(super) fn expect_functions(
        &self,
        all: &[&str],
        traced: &[&str],
        timed: &[&str],
    ) -> Result<()> {
        let checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(player) = &checked.player else { return Ok(()) };
        for (rule, glob) in player.export().globs() {
            let any = |names: &[&str]| names.iter().any(|name| glob::matches(glob, name));
            if !any(all) {
                let text = format!(
                    "{}: no function that can be traced matches {glob}: see `vmtrace functions`",
                    rule.text
                );
                return Err(BadRules(text).into());
            }
            if !any(traced) {
                say!("vmtrace: warning: {}: {glob} is not traced (-f {glob})", rule.text);
            } else if rule.needs_ends() && !any(timed) {
                say!(
                    "vmtrace: warning: {}: how long {glob} takes is not traced (--graph)",
                    rule.text
                );
            }
        }
        Ok(())
    }

    /// Says how it is with each rule, once all of the stream was written; returns the exit code of
    /// a run that would exit with `done`.
    ///
    /// # Errors
    /// When results cannot be written.
    pub(super) fn finish(self, done: u8) -> Result<u8> {
        let (player, error) = {
            let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
            (checked.player.take(), checked.error.take())
        };
        let Some(mut player) = player else { return Ok(done) };
        let finished = player.finish().map(|_| ());
        if let Some(error) = error.or(finished.err()) {
            say!("vmtrace: the rules were not checked to the end: {error}");
        }
        let late = player.late();
        let outcomes = player.into_export().finish(late);
        let mut text = Vec::new();
        self.rules.write(&mut text, &outcomes)?;
        say::text(&text);
        Ok(if done == exit::DONE { code(&outcomes) } else { done })
    }
}

impl Write for Live {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        // The run and its trace go on without.
        if checked.error.is_none()
            && let Some(player) = &mut checked.player
            && let Err(error) = player.push(bytes)
        {
            checked.error = Some(error);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
