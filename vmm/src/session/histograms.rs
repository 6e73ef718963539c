//! From a histogram as people ask for it to what programs sort calls by.

use super::conditions::integer;
use super::values::Known;
use super::way::Way;
use crate::kernel::Kernel;
use crate::kernel::arguments::{Fetch, Value};
use crate::serve::HistogramSpec;
use crate::stream::{Bucket, HistogramOf};
use crate::tracer::{Measure, Tally};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;
use vmtrace_trampolines::histogram::{BUCKETS, Sorted};

/// Names that a note gives for a reason.
const EXAMPLES: usize = 3;

/// What a tracer sorts the calls of its functions by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// What is sorted.
    pub of: HistogramOf,
    /// Which argument.
    pub name: String,
    /// By site: how it is had there.
    sites: Arc<FxHashMap<usize, How>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Argument(Sorted),
    End(Measure),
}

/// Why there can be no histogram.
#[derive(Debug, thiserror::Error)]
#[error("no histogram of {what}: {function}: {why}")]
pub struct HistogramError {
    what: String,
    function: String,
    why: String,
}

impl Histogram {
    /// What a program does at the entry of the function at a site.
    pub(super) fn entry(&self, site: usize) -> Option<Tally> {
        // Which table is known when there is a guest.
        Some(match self.sites.get(&site)? {
            How::Argument(sorted) => Tally::Sort(0, *sorted),
            How::End(_) => Tally::Begin(0),
        })
    }

    /// What a program does where it is left.
    pub(super) fn exit(&self, site: usize, way: Way) -> Option<Tally> {
        match (self.sites.get(&site)?, way) {
            // A tail call has ended it already.
            (_, Way::Aid) | (How::Argument(_), _) => None,
            (How::End(measure), _) => Some(Tally::End(*measure)),
        }
    }

    /// Whether functions differ in what is done.
    pub(super) fn is_particular(&self) -> bool {
        self.of != HistogramOf::Durations
    }

    /// Whether it takes their returns.
    #[must_use]
    pub fn exits(&self) -> bool {
        self.of != HistogramOf::Arguments
    }

    /// Has it be one of more functions, at `sites`, which lose those that have no such thing; notes say which.
    pub(super) fn extend(&mut self, known: &dyn Known, sites: &mut Vec<usize>) -> Vec<String> {
        let wanted = match self.of {
            HistogramOf::Arguments => HistogramSpec::Argument(self.name.clone()),
            HistogramOf::Durations => HistogramSpec::Duration,
            HistogramOf::Values => HistogramSpec::Value,
        };
        let (found, without) = of_each(known, sites, &wanted);
        Arc::make_mut(&mut self.sites).extend(found);
        without.into_iter().map(|without| note(known, &wanted, without)).collect()
    }

    /// A word of the histogram of the function at a site, as streams have it.
    pub(super) fn bucket(&self, site: usize, word: u8) -> u8 {
        let signed = match self.sites.get(&site) {
            Some(How::Argument(sorted)) => sorted.signed,
            Some(How::End(Measure::Value(_, signed))) => *signed,
            _ => false,
        };
        if signed && word == BUCKETS - 1 { Bucket::NEGATIVE } else { word }
    }
}

/// Resolves what a histogram is to be of, if one is wanted, for the functions at `sites`, which loses those that
/// have no such thing; notes say which.
///
/// # Errors
/// When none has.
pub fn histogram(
    kernel: &Kernel,
    sites: &mut Vec<usize>,
    wanted: Option<&HistogramSpec>,
) -> Result<(Option<Histogram>, Vec<String>), HistogramError> {
    histogram_of(kernel, sites, wanted)
}

/// The same of functions of which `known` knows more than the kernel's image.
pub(super) fn histogram_of(
    known: &dyn Known,
    sites: &mut Vec<usize>,
    wanted: Option<&HistogramSpec>,
) -> Result<(Option<Histogram>, Vec<String>), HistogramError> {
    let Some(wanted) = wanted else { return Ok((None, Vec::new())) };
    let (of, name) = match wanted {
        HistogramSpec::Duration => (HistogramOf::Durations, ""),
        HistogramSpec::Value => (HistogramOf::Values, ""),
        HistogramSpec::Argument(name) => (HistogramOf::Arguments, name.as_str()),
    };
    let (found, without) = of_each(known, sites, wanted);
    if found.is_empty()
        && let Some((why, first)) = without.iter().next()
    {
        let function = first.first().map(|&site| known.name(site)).unwrap_or_default();
        return Err(HistogramError { what: wanted.to_string(), function, why: why.clone() });
    }
    let notes = without.into_iter().map(|without| note(known, wanted, without)).collect();
    let histogram = Histogram { of, name: name.to_owned(), sites: Arc::new(found) };
    Ok((Some(histogram), notes))
}

/// How it is had of the functions at these sites, which lose those that have no such thing: why, and which.
fn of_each(
    known: &dyn Known,
    sites: &mut Vec<usize>,
    wanted: &HistogramSpec,
) -> (FxHashMap<usize, How>, BTreeMap<String, Vec<usize>>) {
    let mut found = FxHashMap::default();
    let mut without: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    sites.retain(|&site| match how(known, site, wanted) {
        Ok(how) => {
            found.insert(site, how);
            true
        }
        Err(why) => {
            without.entry(why).or_default().push(site);
            false
        }
    });
    (found, without)
}

/// Says of which functions there is none, and why.
fn note(known: &dyn Known, wanted: &HistogramSpec, (why, sites): (String, Vec<usize>)) -> String {
    let examples: Vec<_> = sites.iter().take(EXAMPLES).map(|&site| known.name(site)).collect();
    let (count, examples) = (sites.len(), examples.join(", "));
    format!("{count} functions have no histogram of {wanted} (such as {examples}): {why}")
}

/// How it is had of the function at a site, or why not.
fn how(known: &dyn Known, site: usize, wanted: &HistogramSpec) -> Result<How, String> {
    if let HistogramSpec::Argument(path) = wanted {
        let path = path.strip_prefix("args.").unwrap_or(path);
        let value = known.path(site, path).map_err(|error| error.to_string())?;
        let Fetch::Argument(number) = value.fetch else {
            return Err(format!("{path:?} is not itself an integer argument"));
        };
        let (bytes, signed) = width(&value)?;
        return Ok(How::Argument(Sorted { number, bytes, signed }));
    }
    known.leaves(site)?;
    if *wanted == HistogramSpec::Duration {
        return Ok(How::End(Measure::Duration));
    }
    let prototype = known.prototype(site).map_err(|why| why.to_string())?;
    let result = prototype.result.ok_or("it returns nothing")?;
    let (bytes, signed) = width(&result)?;
    Ok(How::End(Measure::Value(bytes, signed)))
}

fn width(value: &Value) -> Result<(u8, bool), String> {
    integer(&value.shape).ok_or_else(|| format!("{:?} is not an integer", value.name))
}

#[cfg(test)]
mod tests {
    use super::super::values::tests::{COUNTS, OfModule};
    use super::*;

    // What has no such argument would be sorted by what another function has in that register.
    #[test]
    fn functions_of_a_module_are_sorted_by_arguments_of_their_own() {
        let of_module = OfModule::new();
        let wanted = HistogramSpec::Argument("count".to_owned());
        let (found, _) = histogram(&of_module.0, &mut Vec::new(), Some(&wanted)).unwrap();
        let mut histogram = found.unwrap();
        let mut own = vec![COUNTS, COUNTS + 1];
        let notes = histogram.extend(&of_module, &mut own);
        assert_eq!(own, [COUNTS]);
        let sorted = Sorted { number: 2, bytes: 8, signed: false };
        assert_eq!(histogram.entry(COUNTS), Some(Tally::Sort(0, sorted)));
        assert_eq!(histogram.entry(COUNTS + 1), None);
        let [note] = &notes[..] else { panic!("{notes:?}") };
        assert!(note.contains("no histogram of count (such as other [m])"), "{note}");
    }

    // A call of which no end is seen would take a place among the open ones for ever.
    #[test]
    fn functions_of_a_module_are_sorted_by_ends_that_are_seen() {
        let of_module = OfModule::new();
        let extended = |wanted| {
            let (found, _) = histogram(&of_module.0, &mut Vec::new(), Some(&wanted)).unwrap();
            let (mut histogram, mut own) = (found.unwrap(), vec![COUNTS, COUNTS + 1]);
            let notes = histogram.extend(&of_module, &mut own);
            (histogram, own, notes)
        };
        let (histogram, own, notes) = extended(HistogramSpec::Duration);
        assert_eq!((own, histogram.entry(COUNTS)), (vec![COUNTS], Some(Tally::Begin(0))));
        let end = histogram.exit(COUNTS, Way::Jump);
        assert_eq!(end, Some(Tally::End(Measure::Duration)));
        let [note] = &notes[..] else { panic!("{notes:?}") };
        assert!(note.contains("(such as other [m]): it never returns"), "{note}");
        // Its type is not known.
        let (histogram, own, notes) = extended(HistogramSpec::Value);
        assert!(own.is_empty() && histogram.entry(COUNTS).is_none(), "{own:?}");
        assert_eq!(notes.len(), 2, "{notes:?}");
    }
}
