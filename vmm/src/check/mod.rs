//! Checks a trace against rules, for automated tests.
//!
//! A [`Check`] is an [`Export`]: it receives the events of a trace, live or from a file, and then
//! decides for every rule whether it passes, fails, or cannot be decided.

mod evidence;
mod results;
mod rule;
mod state;
mod stops;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;

use crate::export::{Entry, Event, Export, Name, Return, STARTS_INIT, Unfinished, says_init};
use crate::stream::{Header, MarkKind, Stretch, Summary};

use evidence::{Coverage, Doubles, Losses};
use state::State;
use stops::Stops;

pub use results::{Format, write};
pub use rule::{Rule, RuleError, Verb, parse_file, parse_time};

/// Most functions that are remembered.
const MAX_KNOWN: usize = 1 << 20;

/// How it is with a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds.
    Passed,
    /// It does not.
    Failed,
    /// The trace cannot tell.
    Undecided,
}

/// What became of a rule.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The rule.
    pub rule: Rule,
    /// How it is with it.
    pub verdict: Verdict,
    /// Why, for people.
    pub detail: String,
}

/// A moment of a trace.
#[derive(Clone, Debug)]
struct Moment {
    /// So many calls were before it.
    number: u64,
    ticks: u64,
    /// For people.
    text: String,
}

/// Rules, and what was seen of them.
pub struct Check {
    rules: Vec<(Rule, State)>,
    header: Header,
    /// Whether there is a header: of a file that is no trace, nothing is known.
    has_begun: bool,
    /// Which functions are in which rules, by address.
    known: HashMap<u64, Known>,
    losses: Losses,
    stops: Stops,
    coverage: Coverage,
    doubles: Doubles,
    /// Calls that were left unseen, by rule and frame: what shows it is the event that comes next.
    left: Vec<(usize, u64)>,
    /// Functions that were counted, of rules to which it matters when calls were.
    timeless: HashMap<usize, Box<str>>,
    /// Calls so far.
    calls: u64,
    /// The latest time of an event.
    now: u64,
    torn: bool,
}

#[derive(Debug)]
struct Known {
    name: Box<str>,
    /// Indices of rules, and of the functions in each (see [`rule::Kind::functions`]).
    uses: Box<[(usize, usize)]>,
}

/// A call that is seen now; most need no text.
struct Sight<'a> {
    number: u64,
    ticks: u64,
    text: &'a dyn Fn() -> String,
}

impl Sight<'_> {
    fn moment(&self) -> Moment {
        Moment { number: self.number, ticks: self.ticks, text: (self.text)() }
    }
}

impl Check {
    /// Of these rules, before the trace begins.
    #[must_use]
    pub fn new(rules: Vec<Rule>) -> Self {
        let rules = rules.into_iter().map(|rule| {
            let state = State::new(&rule.kind);
            (rule, state)
        });
        Self {
            rules: rules.collect(),
            header: Header::default(),
            has_begun: false,
            known: HashMap::new(),
            losses: Losses::default(),
            stops: Stops::default(),
            coverage: Coverage::default(),
            doubles: Doubles::default(),
            left: Vec::new(),
            timeless: HashMap::new(),
            calls: 0,
            now: 0,
            torn: true,
        }
    }

    /// The globs of the rules.
    pub fn globs(&self) -> impl Iterator<Item = (&Rule, &str)> {
        self.rules.iter().flat_map(|(rule, _)| {
            let globs = rule.kind.functions().into_iter().flat_map(|functions| &functions.0);
            globs.map(move |glob| (rule, &**glob))
        })
    }

    /// What became of each rule, in their order, when the trace has ended; `late` records of it
    /// were played behind later ones.
    #[must_use]
    pub fn finish(mut self, late: u64) -> Vec<Outcome> {
        self.settle();
        self.losses.late = late;
        self.losses.torn = self.torn;
        self.coverage.finish();
        let Self { rules, header, has_begun, losses, coverage, timeless, now, .. } = self;
        let outcome = |(index, (rule, state)): (usize, (Rule, State))| {
            if !has_begun {
                let detail = "nothing of the trace could be read".to_owned();
                return Outcome { rule, verdict: Verdict::Undecided, detail };
            }
            let (verdict, detail) = state.verdict(&rule.kind, &header, &losses, &coverage, now);
            match timeless.get(&index).filter(|_| !rule.kind.is_certain(verdict)) {
                Some(name) => {
                    let detail = format!(
                        "calls of {name} were counted, which does not show when they were made: \
                         record them, or choose a tracer that does (--tracer)"
                    );
                    Outcome { rule, verdict: Verdict::Undecided, detail }
                }
                None => Outcome { rule, verdict, detail },
            }
        };
        rules.into_iter().enumerate().map(outcome).collect()
    }

    /// The rules that a function is in.
    fn uses(&mut self, function: &Name<'_>) -> Vec<(usize, usize)> {
        let Some((name, _)) = function.symbol else { return Vec::new() };
        match self.known.get(&function.address) {
            Some(known) if &*known.name == name => known.uses.to_vec(),
            _ => {
                let mut uses = Vec::new();
                for (index, (rule, _)) in self.rules.iter().enumerate() {
                    let all = rule.kind.functions();
                    // Backwards: a call may follow another of the same function, not itself.
                    for (part, functions) in all.into_iter().enumerate().rev() {
                        if functions.matches(name) {
                            uses.push((index, part));
                        }
                    }
                }
                if self.known.len() >= MAX_KNOWN {
                    self.known.clear();
                }
                let known = Known { name: name.into(), uses: uses.clone().into() };
                self.known.insert(function.address, known);
                uses
            }
        }
    }

    fn entry(&mut self, entry: &Entry<'_>) {
        self.pass(entry.vcpu, entry.timestamp);
        self.calls += 1;
        let first = self.doubles.entry(entry);
        let uses = self.uses(&entry.function);
        let init = self.rules.iter().any(|(_, state)| state.awaits_init())
            && entry.function.symbol.is_some_and(|(name, _)| name == STARTS_INIT);
        if uses.is_empty() && !init {
            return;
        }
        let name = entry.function.symbol.map_or("?", |(name, _)| name);
        self.coverage.saw(name);
        let at = self.header.nanoseconds(entry.timestamp);
        let text = || {
            let comm = entry.comm.unwrap_or("<...>");
            format!("{name} at {} on CPU {} by {comm}-{}", seconds(at), entry.vcpu, entry.pid)
        };
        let sight = Sight { number: self.calls, ticks: entry.timestamp, text: &text };
        if init {
            self.init_started(&sight.moment());
        }
        let frame = entry.place.map(|place| place.frame);
        for (index, part) in uses {
            if let Some((rule, state)) = self.rules.get_mut(index) {
                state.called(&rule.kind, part, &sight, frame, first, &self.losses, &self.header);
            }
        }
    }

    /// Calls of which nobody knows when they were.
    fn counted(&mut self, tracer: Option<&str>, function: &Name<'_>, hits: u64) {
        let uses = self.uses(function);
        let Some((name, _)) = function.symbol.filter(|_| hits > 0 && !uses.is_empty()) else {
            return;
        };
        self.coverage.saw(name);
        for (index, _) in uses {
            let state = self.rules.get_mut(index).map(|(_, state)| state);
            if !state.is_some_and(|state| state.counted(tracer, hits)) {
                self.timeless.entry(index).or_insert_with(|| name.into());
            }
        }
    }

    fn ret(&mut self, ret: &Return<'_>) {
        self.pass(ret.vcpu, ret.timestamp);
        for (index, _) in self.uses(&ret.function) {
            let header = &self.header;
            let Some((rule, state)) = self.rules.get_mut(index) else { continue };
            let comm = ret.comm.unwrap_or("<...>");
            let until = header.nanoseconds(ret.timestamp);
            let took = rule.kind.took(ret.duration_ns, |took| self.stops.within(until, took));
            state.returned(&rule.kind, header, ret.timestamp, ret.frame, took, || {
                let name = ret.function.symbol.map_or("?", |(name, _)| name);
                let at = seconds(header.nanoseconds(ret.timestamp));
                format!("{name}, returned at {at} on CPU {} by {comm}-{}", ret.vcpu, ret.pid)
            });
        }
    }

    fn unfinished(&mut self, unfinished: &Unfinished<'_>) {
        let uses = self.uses(&unfinished.function);
        self.left.extend(uses.into_iter().map(|(index, _)| (index, unfinished.place.frame)));
    }

    /// Calls that were left unseen have ended by now, nobody knows when.
    fn settle(&mut self) {
        for (index, frame) in self.left.drain(..) {
            if let Some((rule, state)) = self.rules.get_mut(index) {
                state.returned(&rule.kind, &self.header, self.now, Some(frame), None, String::new);
            }
        }
    }

    fn init_started(&mut self, moment: &Moment) {
        for (rule, state) in &mut self.rules {
            state.init_started(&rule.kind, moment, &self.losses);
        }
    }

    /// A record of a vCPU.
    fn pass(&mut self, vcpu: u32, ticks: u64) {
        self.now = self.now.max(ticks);
        self.settle();
        self.losses.record(vcpu, ticks);
    }
}

impl Export for Check {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.header = header.clone();
        self.has_begun = true;
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            Event::Tail(tail) => self.pass(tail.vcpu, tail.timestamp),
            Event::Tracepoint(event) => self.pass(event.vcpu, event.timestamp),
            Event::Unfinished(unfinished) => self.unfinished(unfinished),
            Event::Loss(loss) => self.losses.lost(loss.vcpu, loss.count),
            Event::Mark(mark) => {
                self.now = self.now.max(mark.ticks);
                self.stops.add(&self.header, mark);
                if mark.kind == MarkKind::Console && says_init(&mark.text) {
                    let at = seconds(self.header.nanoseconds(mark.ticks));
                    let text = format!("{:?} at {at}", mark.text);
                    let moment = Moment { number: self.calls, ticks: mark.ticks, text };
                    self.init_started(&moment);
                }
            }
        }
        Ok(())
    }

    fn traced(
        &mut self,
        stretch: &Stretch,
        functions: &mut dyn Iterator<Item = Name<'_>>,
    ) -> io::Result<()> {
        self.coverage.window(stretch);
        for function in functions {
            if !self.uses(&function).is_empty()
                && let Some((name, _)) = function.symbol
            {
                self.coverage.traced(stretch, name);
            }
        }
        Ok(())
    }

    fn counts(
        &mut self,
        _: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) -> io::Result<()> {
        hits.for_each(|(function, hits)| self.counted(tracer, &function, hits));
        Ok(())
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        self.losses.joined = totals.iter().any(|&totals| totals != (0, 0));
        Ok(())
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.torn = summary.is_none();
        Ok(())
    }
}

/// As ftrace shows times.
fn seconds(nanoseconds: i128) -> String {
    let (sign, all) = (if nanoseconds < 0 { "-" } else { "" }, nanoseconds.unsigned_abs());
    format!("{sign}{}.{:06} s", all / 1_000_000_000, all / 1_000 % 1_000_000)
}

/// A duration in the largest unit of which it is at least one.
fn duration(nanoseconds: u64) -> String {
    let shown = |unit: u64, name: &str| {
        format!("{}.{:03} {name}", nanoseconds / unit, nanoseconds % unit * 1000 / unit)
    };
    match nanoseconds {
        0..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => shown(1_000, "us"),
        1_000_000..1_000_000_000 => shown(1_000_000, "ms"),
        _ => shown(1_000_000_000, "s"),
    }
}
