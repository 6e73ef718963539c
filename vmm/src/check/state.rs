//! The evidence for one rule, and the result that follows from it.
//!
//! A rule passes or fails only if it would do so whatever the missing records are.

use std::collections::{BTreeMap, HashMap};

use crate::stream::Header;

use super::evidence::{Coverage, Losses};
use super::rule::{Comparison, Functions, Kind};
use super::{Moment, Sight, Verdict, duration, seconds};
use crate::export::STARTS_INIT;

#[derive(Debug)]
pub(super) enum State {
    Count(Count),
    Order(Order),
    Max(Max),
    Within(Within),
    Budget { reached: Option<(Moment, bool)> },
}

#[derive(Debug, Default)]
pub(super) struct Count {
    /// Calls that were recorded, and the first of them.
    calls: u64,
    first: Option<Moment>,
    /// Calls that were counted instead, by tracer.
    counted: BTreeMap<Box<str>, u64>,
}

#[derive(Debug)]
pub(super) struct Order {
    firsts: Vec<Option<Moment>>,
    /// Whether an earlier first call may have been missed, when the last was seen.
    doubtful: bool,
    /// A call that came too early, and whether that is certain.
    early: Option<(Moment, bool)>,
}

#[derive(Debug, Default)]
pub(super) struct Max {
    /// Calls, each once.
    calls: u64,
    /// When the calls began that have not ended.
    open: HashMap<u64, u64>,
    /// Those whose returns were not traced.
    plain: u64,
    /// Of those whose time is known.
    longest: Option<u64>,
    /// Those that took too long, and the longest of them.
    over: u64,
    worst: Option<(u64, String)>,
    /// Those that may have.
    unknown: u64,
}

#[derive(Debug, Default)]
pub(super) struct Within {
    calls: u64,
    /// The first call that nothing has followed yet.
    pending: Option<Moment>,
    longest: u64,
    /// Those that were followed too late, and the first of them.
    over: u64,
    first: Option<(u64, String)>,
    /// Too late, unless what followed in time is missing.
    unknown: u64,
}

impl State {
    pub(super) fn new(kind: &Kind) -> Self {
        match kind {
            Kind::Expect { .. } | Kind::Forbid { .. } => Self::Count(Count::default()),
            Kind::Order { steps } => {
                Self::Order(Order { firsts: vec![None; steps.len()], doubtful: false, early: None })
            }
            Kind::Max { .. } => Self::Max(Max::default()),
            Kind::Within { .. } => Self::Within(Within::default()),
            Kind::Budget { .. } => Self::Budget { reached: None },
        }
    }

    /// Whether it is about the start of init, which was not seen yet.
    pub(super) fn awaits_init(&self) -> bool {
        matches!(self, Self::Budget { reached: None })
    }

    pub(super) fn init_started(&mut self, kind: &Kind, moment: &Moment, losses: &Losses) {
        if let (Self::Budget { reached }, Kind::Budget { until: None, .. }) = (self, kind) {
            reached.get_or_insert_with(|| (moment.clone(), losses.any()));
        }
    }

    /// Number `part` of its functions is called; with `frame` if its return can be seen. `first`:
    /// no other tracer has told of this call.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn called(
        &mut self,
        kind: &Kind,
        part: usize,
        sight: &Sight<'_>,
        frame: Option<u64>,
        first: bool,
        losses: &Losses,
        header: &Header,
    ) {
        match self {
            _ if !first && !matches!(self, Self::Max(_)) => {}
            Self::Max(max) => max.called(sight, frame, first),
            Self::Count(count) => {
                count.calls += 1;
                count.first.get_or_insert_with(|| sight.moment());
            }
            Self::Order(order) => order.called(part, sight, losses),
            Self::Within(within) => {
                if let Kind::Within { limit, .. } = kind {
                    within.called(part, *limit, sight, losses, header);
                }
            }
            Self::Budget { reached } => {
                reached.get_or_insert_with(|| (sight.moment(), losses.any()));
            }
        }
    }

    /// So many calls of its functions were counted for a tracer, the first if it has no
    /// name. False: it matters when they were.
    pub(super) fn counted(&mut self, tracer: Option<&str>, hits: u64) -> bool {
        let Self::Count(count) = self else { return false };
        let counted = count.counted.entry(tracer.unwrap_or_default().into()).or_default();
        *counted = counted.saturating_add(hits);
        true
    }

    /// One of its functions has returned at `ticks`, or will not be seen to.
    pub(super) fn returned(
        &mut self,
        kind: &Kind,
        header: &Header,
        ticks: u64,
        frame: Option<u64>,
        took: Option<u64>,
        text: impl FnOnce() -> String,
    ) {
        if let (Self::Max(max), Kind::Max { limit, .. }) = (self, kind) {
            max.returned(*limit, header, ticks, frame, took, text);
        }
    }

    /// What follows, at the end of the trace.
    pub(super) fn verdict(
        self,
        kind: &Kind,
        header: &Header,
        losses: &Losses,
        coverage: &Coverage,
        end: u64,
    ) -> (Verdict, String) {
        let all = kind.functions();
        let missing = all.iter().find_map(|functions| coverage.missing(functions));
        let partial = all.iter().find_map(|functions| coverage.partial(functions));
        // What was seen is certain, whatever else was not.
        let certain = match (&self, kind) {
            (Self::Count(count), Kind::Forbid { .. }) => count.range().0 > 0,
            (Self::Max(max), _) => max.over > 0,
            _ => false,
        };
        if let Some(missing) = missing.filter(|_| !certain) {
            return (Verdict::Undecided, missing);
        }
        match (self, kind) {
            (Self::Count(seen), Kind::Expect { comparison, count, .. }) => {
                let missing = if partial.is_some() { u64::MAX } else { losses.most() };
                let (least, most) = seen.range();
                let several = || "several tracers recorded it: choose one (--tracer)".to_owned();
                let why = partial.or_else(|| losses.text());
                let why = why.or_else(|| (least < most).then(several));
                let range = (least, most.saturating_add(missing));
                expect(*comparison, *count, range, seen.first, why)
            }
            (Self::Count(seen), _) => match (seen.range().0, partial.or_else(|| losses.text())) {
                (0, Some(why)) => (Verdict::Undecided, format!("no call was seen, but {why}")),
                (0, None) => (Verdict::Passed, "not called".to_owned()),
                (calls, _) => (Verdict::Failed, format!("{}{}", times(calls), of(seen.first))),
            },
            (Self::Order(order), Kind::Order { steps }) => order.verdict(steps, losses, partial),
            (Self::Max(max), Kind::Max { functions, .. }) => {
                let returns = coverage.has_returns(functions);
                max.verdict(returns, partial.or_else(|| losses.text()))
            }
            (Self::Within(within), Kind::Within { .. }) => {
                let since = |ticks: u64| header.duration_ns(end.saturating_sub(ticks));
                within.verdict(partial.or_else(|| losses.text_of_order()), losses, since)
            }
            (Self::Budget { reached }, Kind::Budget { until, limit }) => {
                let why = partial.or_else(|| losses.text());
                budget(reached, until.as_ref(), *limit, header, why)
            }
            _ => (Verdict::Undecided, "a rule of another kind: this is a bug".to_owned()),
        }
    }
}

fn times(calls: u64) -> String {
    if calls == 1 { "1 call".to_owned() } else { format!("{calls} calls") }
}

/// Which call was the first, if that is known.
fn of(first: Option<Moment>) -> String {
    first.map(|first| format!(", first of {}", first.text)).unwrap_or_default()
}

/// Between `least` and `most` calls there were.
fn expect(
    comparison: Comparison,
    count: u64,
    (least, most): (u64, u64),
    first: Option<Moment>,
    why: Option<String>,
) -> (Verdict, String) {
    let seen = format!("{}{}", times(least), of(first));
    let (at_least, at_most) = (comparison.holds(least, count), comparison.holds(most, count));
    // What holds at both ends holds between, but for equality and its opposite.
    let hidden = comparison == Comparison::Equal && (least..=most).contains(&count);
    match (at_least, at_most) {
        (true, true) => (Verdict::Passed, seen),
        (false, false) if !hidden => (Verdict::Failed, seen),
        _ => {
            let why = why.unwrap_or_default();
            (Verdict::Undecided, format!("{} seen, but {why}", times(least)))
        }
    }
}

fn budget(
    reached: Option<(Moment, bool)>,
    until: Option<&Functions>,
    limit: u64,
    header: &Header,
    why: Option<String>,
) -> (Verdict, String) {
    match (reached, until) {
        (Some((moment, doubtful)), _) => {
            let took = header.nanoseconds(moment.ticks);
            if took <= i128::from(limit) {
                (Verdict::Passed, moment.text)
            } else if doubtful {
                let why = why.unwrap_or_default();
                (Verdict::Undecided, format!("{}: too late, but {why}", moment.text))
            } else {
                let over = seconds(took - i128::from(limit));
                (Verdict::Failed, format!("{}: {over} too late", moment.text))
            }
        }
        (None, None) => (
            Verdict::Undecided,
            format!(
                "the trace does not show when init was started: trace {STARTS_INIT}, or make \
                 the console show it (no quiet in --cmdline)"
            ),
        ),
        (None, Some(_)) => match why {
            Some(why) => (Verdict::Undecided, format!("no call was seen, but {why}")),
            None => (Verdict::Failed, "not called".to_owned()),
        },
    }
}

impl Count {
    /// So many calls there were at least, and at most, of those that tracers tell of: one may have
    /// recorded what another has counted.
    fn range(&self) -> (u64, u64) {
        let all = self.counted.values().copied().chain([self.calls]);
        let most = all.clone().fold(0, u64::saturating_add);
        (all.max().unwrap_or(0), most)
    }
}

impl Order {
    fn called(&mut self, part: usize, sight: &Sight<'_>, losses: &Losses) {
        let before = part.checked_sub(1).and_then(|before| self.firsts.get(before)).cloned();
        let Some(first) = self.firsts.get_mut(part) else { return };
        if first.is_some() {
            return;
        }
        *first = Some(sight.moment());
        self.doubtful |= losses.any();
        let early = match before {
            // It is the first of all.
            None => false,
            Some(None) => true,
            Some(Some(before)) => before.number >= sight.number,
        };
        if early && self.early.is_none() {
            self.early = Some((sight.moment(), !losses.any()));
        }
    }

    fn verdict(
        self,
        steps: &[Functions],
        losses: &Losses,
        partial: Option<String>,
    ) -> (Verdict, String) {
        let why = partial.or_else(|| losses.text_of_order());
        let missing = steps.iter().zip(&self.firsts).find(|(_, first)| first.is_none());
        match (self.early, missing) {
            (Some((early, certain)), _) => {
                let text = format!("{}, before what must come first", early.text);
                // A late record may have been of that.
                match why.filter(|_| !certain || losses.late > 0) {
                    Some(why) => (Verdict::Undecided, format!("{text}, but {why}")),
                    None => (Verdict::Failed, text),
                }
            }
            (None, Some((step, _))) => match why {
                Some(why) => (Verdict::Undecided, format!("no call of {step} was seen, but {why}")),
                None => (Verdict::Failed, format!("{step} was not called")),
            },
            (None, None) => match why.filter(|_| self.doubtful || losses.late > 0) {
                Some(why) => (Verdict::Undecided, format!("seen in this order, but {why}")),
                None => {
                    let all: Vec<_> = self.firsts.into_iter().flatten().map(|it| it.text).collect();
                    (Verdict::Passed, all.join(", "))
                }
            },
        }
    }
}

impl Max {
    fn called(&mut self, sight: &Sight<'_>, frame: Option<u64>, first: bool) {
        self.calls += u64::from(first);
        match frame {
            Some(frame) => {
                self.open.insert(frame, sight.ticks);
            }
            None => self.plain += u64::from(first),
        }
    }

    fn returned(
        &mut self,
        limit: u64,
        header: &Header,
        ticks: u64,
        frame: Option<u64>,
        took: Option<u64>,
        text: impl FnOnce() -> String,
    ) {
        let began = frame.and_then(|frame| self.open.remove(&frame));
        // It took no longer than until now.
        let most = began.map(|began| header.duration_ns(ticks.saturating_sub(began)));
        match took {
            Some(took) => {
                self.longest = self.longest.max(Some(took));
                if took > limit {
                    self.over += 1;
                    if self.worst.as_ref().is_none_or(|(worst, _)| took > *worst) {
                        self.worst = Some((took, text()));
                    }
                }
            }
            None if most.is_some_and(|most| most <= limit) => {}
            None => self.unknown += 1,
        }
    }

    fn verdict(self, returns: bool, why: Option<String>) -> (Verdict, String) {
        if let Some((worst, text)) = self.worst {
            let over = times(self.over);
            return (Verdict::Failed, format!("{over} too long, {}: {text}", duration(worst)));
        }
        let calls = times(self.calls);
        if self.plain > 0 {
            let text = format!(
                "{calls}, of which {} have no return in the trace: returns are traced by --graph, \
                 and on x86-64 not before rest_init; of several tracers choose one (--tracer)",
                self.plain
            );
            return (Verdict::Undecided, text);
        }
        if self.calls == 0 && !returns {
            return (Verdict::Undecided, "returns of it were not traced (--graph)".to_owned());
        }
        if self.unknown > 0 {
            let text = format!(
                "{calls}, of which {} may have taken longer: they were not seen to begin and end, \
                 or their time is not certain",
                self.unknown
            );
            return (Verdict::Undecided, text);
        }
        let longest = match self.longest {
            Some(longest) => format!("the longest took {}", duration(longest)),
            None => "none too long".to_owned(),
        };
        match why {
            Some(why) => (Verdict::Undecided, format!("{calls}, {longest}, but {why}")),
            None if self.calls == 0 => (Verdict::Passed, "not called".to_owned()),
            None => (Verdict::Passed, format!("{calls}, {longest}")),
        }
    }
}

impl Within {
    fn called(
        &mut self,
        part: usize,
        limit: u64,
        sight: &Sight<'_>,
        losses: &Losses,
        header: &Header,
    ) {
        if part == 0 {
            self.calls += 1;
            self.pending.get_or_insert_with(|| sight.moment());
        } else if let Some(pending) = self.pending.take() {
            let took = header.duration_ns(sight.ticks.saturating_sub(pending.ticks));
            self.longest = self.longest.max(took);
            if took > limit {
                if losses.since(pending.ticks) {
                    self.unknown += 1;
                } else {
                    self.over += 1;
                    self.first.get_or_insert((took, pending.text));
                }
            }
        }
    }

    fn verdict(
        self,
        why: Option<String>,
        losses: &Losses,
        since: impl Fn(u64) -> u64,
    ) -> (Verdict, String) {
        let calls = times(self.calls);
        let sure = losses.late == 0 && !losses.torn;
        if let Some((took, text)) = self.first.filter(|_| sure) {
            let over = times(self.over);
            let text = format!("{over} followed too late: {text}, after {}", duration(took));
            return (Verdict::Failed, text);
        }
        if let Some(pending) = self.pending.filter(|pending| sure && !losses.since(pending.ticks))
            && why.is_none()
        {
            let rest = duration(since(pending.ticks));
            let text = format!("{}: nothing followed in the {rest} to the end", pending.text);
            return (Verdict::Failed, text);
        }
        match why {
            Some(why) => (Verdict::Undecided, format!("{calls} seen, but {why}")),
            None if self.unknown > 0 => (Verdict::Undecided, format!("{calls} seen")),
            None if self.calls == 0 => (Verdict::Failed, "not called".to_owned()),
            None => {
                let longest = duration(self.longest);
                (Verdict::Passed, format!("{calls}, followed after {longest} at most"))
            }
        }
    }
}
