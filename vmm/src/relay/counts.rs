//! Counts on their way into the stream.

use super::names::{Functions, ModuleNames};
use crate::kernel::Kernel;
use crate::serve::Hub;
use crate::stream::{Count, Writer};
use crate::tracer::Hits;
use std::io;

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
