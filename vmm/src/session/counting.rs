//! What tracers count: tables before they begin, and what they say.

use super::controller::{Controller, Stage};
use super::duties::Duties;
use super::plan::Plan;
use super::{Conditional, Histogram, Tracer};
use crate::export::Words;
use crate::relay;
use crate::stream::Header;
use crate::tracer::{
    Attachment, Buckets, CallerHits, Counted, Counters, Duty, Hits, Keeper, Kind, Nested, Part,
    SiteTables, Tally, TraceError,
};
use rustc_hash::FxHashMap;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Functions that an answer has, at most: it is one line.
const MOST: usize = 10_000;
/// How often consumers are told of what has been counted; of more functions it takes longer to find,
/// and no more than one part in so many of the time is for that.
const EVERY: Duration = Duration::from_secs(1);
const SHARE: u32 = 20;

/// A hash whose sums tell sets of numbers apart (the last steps of SplitMix64).
fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Plan {
    /// The sites that may write records, not those that count alone.
    pub(super) fn recorded(&self) -> Vec<usize> {
        let records = |duty: &Duty| {
            let is_counted = |part: &Part| {
                part.counts.is_some_and(|it| it == Tally::Nothing || it.table().is_some())
            };
            !duty.parts.iter().all(is_counted)
        };
        let records: Vec<bool> = self.duties.iter().map(records).collect();
        let mut all = Vec::with_capacity(self.sites.len());
        let is_told = |duty: u32| records.get(duty as usize) == Some(&true);
        all.extend(self.sites.iter().filter(|(_, duty)| is_told(*duty)).map(|&(site, _)| site));
        all
    }

    /// What tells whether who keeps open calls still has the same functions: a sum of hashes of each. That of more functions is added, and that of some of them subtracted.
    pub(super) fn keepers(&self) -> BTreeMap<Keeper, u64> {
        let keeps = |duty: &Duty| duty.parts.iter().any(|part| part.keeps_calls());
        let mut all: BTreeMap<Keeper, u64> = BTreeMap::new();
        if !self.duties.iter().any(keeps) {
            return BTreeMap::new();
        }
        for (kind, places) in [(0, &self.sites), (1, &self.exits)] {
            for &(place, duty) in places {
                let parts = self.duties.get(duty as usize).into_iter().flat_map(|duty| &duty.parts);
                for part in parts.filter(|part| part.keeps_calls()) {
                    let sum = all.entry(part.keeper()).or_default();
                    *sum = sum.wrapping_add(mixed(2 * place as u64 + kind));
                }
            }
        }
        all
    }

    /// Who keeps only some of the calls that begin: what is left over of one could be taken for the beginning of
    /// another one, which is not kept.
    pub(super) fn choosy(&self) -> BTreeSet<Keeper> {
        let parts = self.duties.iter().flat_map(|duty| &duty.parts);
        let begins = |part: &&Part| {
            let begins = matches!(part.counts, Some(Tally::Open(_) | Tally::Begin(_)));
            begins && part.condition.is_some() || part.nested.is_some()
        };
        parts.filter(begins).map(Part::keeper).collect()
    }
}

impl Controller {
    /// A plan with the tables of those that count: sites of other memory count in other tables. Nothing
    /// has changed in the guest.
    pub(super) fn with_tables<'a>(
        &self,
        attachment: &mut Attachment,
        plan: &'a Plan,
    ) -> Result<Cow<'a, Plan>, TraceError> {
        let parts = plan.duties.iter().flat_map(|duty| &duty.parts);
        for part in parts.filter(|part| part.needs_open_calls()) {
            attachment.counters().open_calls(part.keeper())?;
        }
        for part in plan.duties.iter().flat_map(|duty| &duty.parts) {
            if let Some(Nested { depth, .. }) = part.nested {
                attachment.counters().make_nests(part.keeper(), depth)?;
            }
        }
        let parts = plan.duties.iter().flat_map(|duty| &duty.parts);
        let mut unmarked = BTreeSet::new();
        for part in parts.filter(|part| part.needs_marks()) {
            if let Err(error) = attachment.counters().make_marks(part.keeper())
                && unmarked.insert(part.keeper())
            {
                log::warn!(
                    "calls that go on in functions that are not traced have no end: {error}"
                );
            }
        }
        if !unmarked.is_empty() {
            let without = plan.without_marks(&unmarked);
            return Ok(Cow::Owned(self.with_tables(attachment, &without)?.into_owned()));
        }
        let kind = |part: &Part| Some(part.counts?.table()?.1);
        let in_table = |part: &Part| kind(part).is_some();
        let counts = |duty: &Duty| duty.parts.iter().any(in_table);
        if !plan.duties.iter().any(counts) {
            return Ok(Cow::Borrowed(plan));
        }
        let mut sites: BTreeMap<u8, (Vec<usize>, Kind)> = BTreeMap::new();
        let duty = |duty: u32| plan.duties.get(duty as usize);
        for &(site, of) in &plan.sites {
            let parts = duty(of).into_iter().flat_map(|duty| &duty.parts);
            for (part, kind) in parts.filter_map(|part| Some((part, kind(part)?))) {
                sites.entry(part.tracer).or_insert((Vec::new(), kind)).0.push(site);
            }
        }
        // With where the next site is expected.
        let mut tables: Vec<(u8, SiteTables, usize)> = Vec::with_capacity(sites.len());
        for (tracer, (sites, kind)) in sites {
            tables.push((tracer, attachment.tables(&self.kernel, (tracer, kind), &sites)?, 0));
        }
        let mut whole = Plan { sites: Vec::with_capacity(plan.sites.len()), ..plan.clone() };
        // Duties that count are made anew behind the others.
        let mut duties = Duties::behind(std::mem::take(&mut whole.duties));
        // Most sites count in the tables that others with the same duty do.
        let counting: Vec<bool> = plan.duties.iter().map(counts).collect();
        let mut made: FxHashMap<(u32, Vec<Option<u16>>), Option<u32>> = FxHashMap::default();
        let mut key = (0, Vec::new());
        let mut last = None;
        for &(site, of) in &plan.sites {
            let planned = duty(of).filter(|_| counting.get(of as usize) == Some(&true));
            let Some(planned) = planned else {
                whole.sites.push((site, of));
                continue;
            };
            let mut table = |part: &Part| {
                let (_, tables, next) = tables.iter_mut().find(|(it, ..)| *it == part.tracer)?;
                if in_table(part) { tables.get(site, next) } else { None }
            };
            let is_last = last.is_some()
                && key.0 == of
                && planned.parts.iter().map(&mut table).eq(key.1.iter().copied());
            if !is_last {
                key = (of, planned.parts.iter().map(table).collect());
                last = Some(*made.entry(key.clone()).or_insert_with(|| {
                    let with_table = |(part, table): (&Part, &Option<u16>)| {
                        let counts = match part.counts {
                            Some(counts) if in_table(part) => Some(counts.in_table((*table)?)),
                            other => other,
                        };
                        Some(Part { counts, ..part.clone() })
                    };
                    let parts = planned.parts.iter().zip(&key.1);
                    let parts: Vec<Part> = parts.filter_map(with_table).collect();
                    let point = planned.point;
                    (!parts.is_empty()).then(|| duties.index(Duty { point, parts }))
                }));
            }
            whole.sites.extend(last.flatten().map(|duty| (site, duty)));
        }
        whole.duties = duties.all;
        // Nobody has these any more: no program shall be made for them.
        let made = whole.duties.get(plan.duties.len()).cloned();
        let stand_in = made.unwrap_or_else(|| Duty::entry(vec![0]));
        let planned = whole.duties.iter_mut().take(plan.duties.len());
        planned.filter(|duty| counts(duty)).for_each(|duty| duty.clone_from(&stand_in));
        Ok(Cow::Owned(whole))
    }

    /// A number is another tracer's from now on: tells what the one before has counted.
    pub(super) fn number_taken(&mut self, tracer: u8) {
        let Some(counters) = self.counters() else { return };
        let mut counted = counters.take(Some(tracer));
        counters.forget(tracer);
        let buckets = std::mem::take(&mut counted.buckets);
        self.tell(counted);
        // What it sorts is not what the one before did.
        if let Some((_, Some(histogram))) = self.gone.remove(&tracer) {
            let sorted = Counted { buckets, ..Counted::default() };
            self.tell_sorted(sorted, |_| Some(&histogram));
        }
    }

    /// Tells what has been counted up to now, once.
    pub(super) fn tell_counted(&mut self) {
        let hits = self.take_counted();
        self.tell(hits);
    }

    /// Notes of how many calls of a tracer's or a trigger's was not decided whether they were meant, or from where they came, and why
    /// not. Nobody wants to know unless `told`.
    pub(super) fn tell_untold(&mut self, keeper: Keeper, name: &str, told: bool) {
        let [crowded, elsewhere] =
            self.counters().map_or([0; 2], |counters| counters.take_untold(keeper));
        if !told {
            return;
        }
        if crowded > 0 {
            self.note(format!(
                "{name}: {crowded} calls were not compared with its condition: too many others were open, so \
                 that there was no place to keep when they began; trace fewer functions"
            ));
        }
        if elsewhere > 0 {
            self.note(format!(
                "{name}: {elsewhere} calls were not compared with its condition: they were left by a jump to \
                 another function, which returned a value in their place; trace that one"
            ));
        }
        let unrooted = self.counters().map_or(0, |counters| counters.take_unrooted(keeper));
        if unrooted > 0 {
            self.note(format!(
                "{name}: {unrooted} calls are left out with what they called: so many kernel stacks had open calls that \
                 there was no place to keep how deep these are; trace fewer functions, or without --graph-root and \
                 --max-depth"
            ));
        }
        let Keeper::Tracer(number) = keeper else { return };
        let uncalled = self.counters().map_or(0, |counters| counters.take_crowded(Some(number)));
        if uncalled > 0 {
            self.note(format!(
                "{name}: {uncalled} calls were counted for no caller: there were so many pairs of functions and \
                 callers that these found no place in the table; count fewer functions"
            ));
        }
    }

    /// The same of all that are there.
    pub(super) fn tell_all_untold(&mut self) {
        let ends = |tracer: &Tracer| tracer.condition.as_ref().is_some_and(Conditional::is_of_ends);
        let told = |(_, it): &(u8, &Tracer)| ends(it) || it.by_caller || it.limits.is_limited();
        let present = self.tracing.present().filter(told);
        let tracers = present.map(|(number, it)| (Keeper::Tracer(number), it.name.clone()));
        let triggers = self.tracing.triggers.iter().filter(|it| it.waits_for_end());
        let triggers = triggers.map(|it| (it.keeper(), it.to_string()));
        for (keeper, name) in tracers.chain(triggers).collect::<Vec<_>>() {
            self.tell_untold(keeper, &name, true);
        }
    }

    /// Forgets what has been counted up to now: how many calls that nobody has been told of.
    pub(super) fn forget_counted(&mut self) -> u64 {
        self.counters().map_or(0, Counters::clear)
    }

    /// When consumers are to be told of what has been counted: if there are any, and it can be.
    pub(super) fn counts_deadline(&mut self) -> Option<Instant> {
        let due = self.counts_due;
        let counts = self.relay.is_some() && self.counters().is_some_and(|it| !it.is_empty());
        counts.then_some(due)
    }

    /// Tells it when it is time. Nobody pauses for that: counters only grow.
    pub(super) fn tell_counts(&mut self) {
        let began = Instant::now();
        if self.counts_deadline().is_none_or(|due| due > began) {
            return;
        }
        // A file gets all at its end: it would only grow by more of them.
        if self.relay.as_ref().is_some_and(|relay| relay.consumers() > 0) {
            self.tell_counted();
        }
        let ended = Instant::now();
        self.counts_due = ended + EVERY.max(ended.duration_since(began) * SHARE);
    }

    fn take_counted(&mut self) -> Counted {
        self.counters().map(|counters| counters.take(None)).unwrap_or_default()
    }

    /// Of the guest that is traced, or was.
    fn counters(&mut self) -> Option<&mut Counters> {
        match &mut self.stage {
            Stage::Attached { attachment, .. } => Some(attachment.counters()),
            _ => self.counters.as_mut(),
        }
    }

    /// Tells what functions of modules were counted that are gone.
    pub(super) fn tell_gone(&self, attachment: &mut Attachment, gone: &[usize]) {
        self.tell(attachment.counters().take_gone(gone));
    }

    fn tell(&self, counted: Counted) {
        self.tell_sorted(counted, |tracer| Some(self.sorter(tracer)?.1));
    }

    /// The name and the histogram of a tracer that is there, or was.
    fn sorter(&self, number: u8) -> Option<(&str, &Histogram)> {
        match self.tracing.numbered(number) {
            Some((_, tracer)) => Some((&tracer.name, tracer.histogram.as_ref()?)),
            None => {
                let (name, histogram) = self.gone.get(&number)?;
                Some((name, histogram.as_ref()?))
            }
        }
    }

    /// The name of a tracer that is there, or was.
    fn counter(&self, number: u8) -> String {
        match self.tracing.numbered(number) {
            Some((_, tracer)) => tracer.name.clone(),
            None => match self.gone.get(&number) {
                Some((name, _)) => name.clone(),
                None => super::Tracing::default_name(number.into()),
            },
        }
    }

    fn tell_sorted<'a>(&self, counted: Counted, histogram: impl Fn(u8) -> Option<&'a Histogram>) {
        let Some(relay) = &self.relay else { return };
        if counted.is_empty() {
            return;
        }
        let Counted { hits, buckets, callers } = counted;
        let sorted = buckets.into_iter().filter_map(|Buckets { tracer, vcpu, words }| {
            let histogram = histogram(tracer)?;
            let translated = words
                .into_iter()
                .map(|(site, word, count)| (site, histogram.bucket(site, word), count));
            let (of, name) = (histogram.of, histogram.name.clone());
            Some(relay::Sorted { tracer, vcpu, of, name, words: translated.collect() })
        });
        relay.counted(hits, callers, sorted.collect());
    }

    /// What has been counted up to now as one JSON object: the functions that were called most.
    pub(super) fn counted(&mut self) -> String {
        let Counted { hits: all, buckets, callers } =
            self.counters().map(|counters| counters.read()).unwrap_or_default();
        let mut functions: BTreeMap<(u8, usize), BTreeMap<u32, u64>> = BTreeMap::new();
        for Hits { tracer, vcpu, hits } in all {
            for (site, hits) in hits {
                functions.entry((tracer, site)).or_default().insert(vcpu, hits);
            }
        }
        let total = |hits: &BTreeMap<u32, u64>| {
            hits.values().fold(0_u64, |sum, hits| sum.saturating_add(*hits))
        };
        let mut functions: Vec<_> = functions.into_iter().collect();
        functions.sort_by_key(|(key, hits)| (std::cmp::Reverse(total(hits)), *key));
        let left_out = functions.len().saturating_sub(MOST);
        let function = |((tracer, site), hits): &((u8, usize), BTreeMap<u32, u64>)| {
            serde_json::json!({
                "function": self.name(*site),
                "tracer": self.counter(*tracer),
                "hits": total(hits),
                "vcpus": hits.iter().map(|(vcpu, hits)| (vcpu.to_string(), (*hits).into()))
                    .collect::<serde_json::Map<_, _>>(),
            })
        };
        let counts: Vec<_> = functions.iter().take(MOST).map(function).collect();
        let (histograms, unshown) = self.sorted(&buckets);
        let (callers, unnamed) = self.called(&callers);
        let left_out = left_out + unshown + unnamed;
        serde_json::json!({
            "counts": counts,
            "callers": callers,
            "left_out": left_out,
            "histograms": histograms,
        })
        .to_string()
    }

    /// Functions with their callers, of all vCPUs together: pairs of most calls, and how many others there are.
    fn called(&self, hits: &[CallerHits]) -> (Vec<serde_json::Value>, usize) {
        let mut names: BTreeMap<u32, String> = BTreeMap::new();
        let mut all: BTreeMap<(u8, usize, String), u64> = BTreeMap::new();
        for CallerHits { tracer, hits, .. } in hits {
            for &(site, caller, count) in hits {
                let name = names.entry(caller).or_insert_with(|| self.caller(caller));
                let sum = all.entry((*tracer, site, name.clone())).or_default();
                *sum = sum.saturating_add(count);
            }
        }
        let mut all: Vec<_> = all.into_iter().collect();
        all.sort_by(|(a, of_a), (b, of_b)| of_b.cmp(of_a).then_with(|| a.cmp(b)));
        let shown = all.iter().take(MOST).map(|((tracer, site, caller), hits)| {
            serde_json::json!({
                "function": self.name(*site),
                "caller": caller,
                "tracer": self.counter(*tracer),
                "hits": hits,
            })
        });
        (shown.collect(), all.len().saturating_sub(MOST))
    }

    /// The function in which the low half of a run-time address is, or the address.
    fn caller(&self, low: u32) -> String {
        let place = self.place(Header::TOP_4_GIB | u64::from(low));
        match place.split_once('+') {
            Some((name, offset)) => match offset.split_once(' ') {
                Some((_, module)) => format!("{name} {module}"),
                None => name.to_owned(),
            },
            None => place,
        }
    }

    /// Histograms of all vCPUs together: those of most calls, and how many others there are.
    fn sorted(&self, buckets: &[Buckets]) -> (Vec<serde_json::Value>, usize) {
        let mut all: BTreeMap<(u8, usize), Words> = BTreeMap::new();
        for Buckets { tracer, words, .. } in buckets {
            let Some((_, histogram)) = self.sorter(*tracer) else { continue };
            for &(site, word, count) in words {
                let bucket = histogram.bucket(site, word);
                all.entry((*tracer, site)).or_default().add(bucket, count);
            }
        }
        let mut all: Vec<_> = all.into_iter().collect();
        all.sort_by_key(|(key, words)| (std::cmp::Reverse(words.calls()), *key));
        let shown = all.iter().take(MOST).filter_map(|((tracer, site), words)| {
            let (name, histogram) = self.sorter(*tracer)?;
            Some(serde_json::json!({
                "function": self.name(*site),
                "tracer": name,
                "of": histogram.of.label(&histogram.name),
                "buckets": words.buckets(),
                "missed": words.missed(),
                "total": words.sum(histogram.of),
            }))
        });
        (shown.collect(), all.len().saturating_sub(MOST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::Measure;
    use vmtrace_trampolines::{Field, Point};

    // If a change of others began open calls anew, those that are open would be left out of a table, and nobody
    // would know; if one of its own did not, an end could be taken for that of an earlier call.
    #[test]
    fn open_calls_stay_while_functions_do() {
        let sorts = |point, tracer, tally| {
            let mut duty = Duty::new(point, vec![tracer], &[]);
            duty.parts[0].counts = Some(tally);
            duty
        };
        let duties = vec![
            Duty::entry(vec![0]),
            sorts(Point::Entry, 1, Tally::Begin(0)),
            sorts(Point::Return, 1, Tally::End(Measure::Duration)),
            Duty::new(Point::Return, vec![2], &[Field::Duration]),
            sorts(Point::Entry, 3, Tally::Table(0)),
        ];
        let plan = |sites: &[(usize, u32)], exits: &[(usize, u32)]| Plan {
            duties: duties.clone(),
            sites: sites.to_vec(),
            exits: exits.to_vec(),
            events: Vec::new(),
            ..Plan::default()
        };
        let before = plan(&[(5, 1), (6, 1), (9, 4)], &[(10, 2), (11, 3)]).keepers();
        let [one, two] = [1, 2].map(Keeper::Tracer);
        assert_eq!(before.keys().copied().collect::<Vec<_>>(), [one, two]);
        // Others come and go.
        assert_eq!(plan(&[(4, 0), (5, 1), (6, 1)], &[(10, 2), (11, 3)]).keepers(), before);
        let fewer = plan(&[(5, 1)], &[(10, 2), (11, 3)]).keepers();
        assert!(fewer[&one] != before[&one] && fewer[&two] == before[&two]);
        let fewer = plan(&[(5, 1), (6, 1)], &[(10, 2)]).keepers();
        assert!(fewer[&one] == before[&one] && !fewer.contains_key(&two));
        assert!(plan(&[(4, 0), (9, 4)], &[]).keepers().is_empty());
        // Those of a module are added when it comes.
        let module = plan(&[(6, 1)], &[(10, 2)]).keepers();
        let others = plan(&[(5, 1)], &[(11, 3)]).keepers();
        assert_eq!(before[&one], others[&one].wrapping_add(module[&one]));
        // Sums of numbers are the same for others.
        assert_ne!(plan(&[(4, 1), (7, 1)], &[(10, 2)]).keepers()[&one], before[&one]);
    }
}
