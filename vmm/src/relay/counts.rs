//! Puts counts into the stream.

use super::names::{Callers, Functions, ModuleNames};
use crate::kernel::Kernel;
use crate::serve::Hub;
use crate::stream::{Bucket, CallerCount, Count, HistogramOf, Writer};
use crate::tracer::{CallerHits, Hits};
use std::io;

/// What was added to histograms of a tracer on a vCPU.
#[derive(Clone, Debug)]
pub struct Sorted {
    /// The tracer's number.
    pub tracer: u8,
    /// The vCPU on which the calls began.
    pub vcpu: u32,
    /// What is sorted.
    pub of: HistogramOf,
    /// Which argument.
    pub name: String,
    /// Sites (indices), numbers as those of [`Bucket::bucket`], and what is to be added.
    pub words: Vec<(usize, u8, u64)>,
}

/// Writes histograms, with the names of their functions before them.
///
/// # Errors
/// When the sink fails or there is no such vCPU.
pub(super) fn write_sorted(
    writer: &mut Writer<Hub>,
    (functions, kernel, modules): (&Functions, &Kernel, &ModuleNames),
    sorted: &[Sorted],
) -> io::Result<()> {
    for Sorted { tracer, vcpu, of, name, words } in sorted {
        let buckets: Vec<_> = words
            .iter()
            .filter_map(|&(site, bucket, hits)| {
                let function = functions.entry_of(kernel, modules, site)?;
                Some(Bucket { function, bucket, hits })
            })
            .collect();
        let symbol = |it: &Bucket| functions.symbol(kernel, modules, it.function);
        writer.symbols(buckets.iter().filter_map(symbol))?;
        writer.buckets((*vcpu, *tracer), (*of, name), &buckets)?;
    }
    Ok(())
}

/// Writes counts, with the names of their functions before them.
///
/// # Errors
/// When the sink fails or there is no such vCPU.
pub(super) fn write(
    writer: &mut Writer<Hub>,
    (functions, kernel, modules): (&Functions, &Kernel, &ModuleNames),
    counted: &[Hits],
) -> io::Result<()> {
    for Hits { tracer, vcpu, hits } in counted {
        let hits = hits.iter().filter(|(_, hits)| *hits > 0);
        let counts: Vec<_> = hits
            .filter_map(|&(site, hits)| {
                let function = functions.entry_of(kernel, modules, site)?;
                Some(Count { function, hits })
            })
            .collect();
        let name = |count: &Count| functions.symbol(kernel, modules, count.function);
        writer.symbols(counts.iter().filter_map(name))?;
        writer.counts(*vcpu, *tracer, &counts)?;
    }
    Ok(())
}

/// Writes counts by caller, with the names of functions and callers before them.
///
/// # Errors
/// When the sink fails or there is no such vCPU.
pub(super) fn write_callers(
    writer: &mut Writer<Hub>,
    (functions, kernel, modules): (&Functions, &Kernel, &ModuleNames),
    callers: &mut Callers,
    counted: &[CallerHits],
) -> io::Result<()> {
    for CallerHits { tracer, vcpu, hits } in counted {
        let hits = hits.iter().filter(|(.., hits)| *hits > 0);
        let counts: Vec<_> = hits
            .filter_map(|&(site, caller, hits)| {
                let function = functions.entry_of(kernel, modules, site)?;
                Some(CallerCount { function, caller, hits })
            })
            .collect();
        let name = |count: &CallerCount| functions.symbol(kernel, modules, count.function);
        writer.symbols(counts.iter().filter_map(name))?;
        writer.symbols(
            counts.iter().filter_map(|count| callers.name(kernel, modules, count.caller)),
        )?;
        writer.callers(*vcpu, *tracer, &counts)?;
    }
    Ok(())
}
