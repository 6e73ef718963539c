//! What tracers count: tables before they begin, and what they say.

use super::attach::{Controller, Stage};
use super::tracing::Plan;
use crate::relay::Counted;
use crate::tracer::{Attachment, Counters, Duty, Hits, Part, TraceError};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Functions that an answer has, at most: it is one line.
const MOST: usize = 10_000;

impl Controller {
    /// The duties of a plan, with the tables of those that count. Nothing has changed in the guest.
    pub(super) fn with_tables<'a>(
        &self,
        attachment: &mut Attachment,
        plan: &'a Plan,
    ) -> Result<Cow<'a, [Duty]>, TraceError> {
        let counts = |duty: &Duty| duty.parts.iter().any(|part| part.counts.is_some());
        if !plan.duties.iter().any(counts) {
            return Ok(Cow::Borrowed(&plan.duties));
        }
        let mut sites: BTreeMap<u8, Vec<usize>> = BTreeMap::new();
        for &(site, duty) in &plan.sites {
            let parts = plan.duties.get(duty as usize).into_iter().flat_map(|duty| &duty.parts);
            for part in parts.filter(|part| part.counts.is_some()) {
                sites.entry(part.tracer).or_default().push(site);
            }
        }
        let mut tables: BTreeMap<u8, u16> = BTreeMap::new();
        for (tracer, sites) in sites {
            let table = attachment.counters().table(&self.kernel, tracer, &sites)?;
            tables.insert(tracer, table);
        }
        let with_table = |part: &Part| {
            let counts = part.counts.and_then(|_| tables.get(&part.tracer).copied());
            Part { counts, ..part.clone() }
        };
        let duty = |duty: &Duty| Duty {
            point: duty.point,
            parts: duty.parts.iter().map(with_table).collect(),
        };
        Ok(Cow::Owned(plan.duties.iter().map(duty).collect()))
    }

    /// A number is another tracer's from now on: tells what the one before has counted.
    pub(super) fn number_taken(&mut self, tracer: u8) {
        let Stage::Attached { attachment, .. } = &mut self.stage else { return };
        let hits = attachment.counters().take(&self.kernel, Some(tracer));
        attachment.counters().forget(tracer);
        self.tell(hits);
    }

    /// Tells what has been counted up to now, once.
    pub(super) fn tell_counted(&mut self) {
        let hits = self.take_counted();
        self.tell(hits);
    }

    /// Forgets what has been counted up to now: how many calls.
    pub(super) fn forget_counted(&mut self) -> u64 {
        let hits = self.take_counted();
        hits.iter().flat_map(|hits| &hits.hits).fold(0, |sum, (_, hits)| sum.saturating_add(*hits))
    }

    fn take_counted(&mut self) -> Vec<Hits> {
        match (&mut self.stage, &mut self.counters) {
            (Stage::Attached { attachment, .. }, _) => {
                attachment.counters().take(&self.kernel, None)
            }
            (_, Some(counters)) => counters.take(&self.kernel, None),
            _ => Vec::new(),
        }
    }

    fn tell(&self, hits: Vec<Hits>) {
        let counted = |Hits { tracer, vcpu, hits }| Counted { tracer, vcpu, hits };
        if let (Some(relay), false) = (&self.relay, hits.is_empty()) {
            relay.counted(hits.into_iter().map(counted).collect());
        }
    }

    /// What has been counted up to now as one JSON object: the functions that were called most.
    pub(super) fn counted(&mut self) -> String {
        let counters: Option<&Counters> = match &mut self.stage {
            Stage::Attached { attachment, .. } => Some(attachment.counters()),
            _ => self.counters.as_ref(),
        };
        let all = counters.map(|counters| counters.read(&self.kernel)).unwrap_or_default();
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
        let name = |number: u8| match self.tracing.tracers.get(usize::from(number)) {
            Some(Some(tracer)) => tracer.name.clone(),
            _ => super::Tracing::default_name(number.into()),
        };
        let function = |((tracer, site), hits): &((u8, usize), BTreeMap<u32, u64>)| {
            serde_json::json!({
                "function": self.name(*site),
                "tracer": name(*tracer),
                "hits": total(hits),
                "vcpus": hits.iter().map(|(vcpu, hits)| (vcpu.to_string(), (*hits).into()))
                    .collect::<serde_json::Map<_, _>>(),
            })
        };
        let counts: Vec<_> = functions.iter().take(MOST).map(function).collect();
        serde_json::json!({ "counts": counts, "left_out": left_out }).to_string()
    }
}
