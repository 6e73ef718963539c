//! Guests that start their kernel again: what each of their kernels has told.

use crate::trace::Trace;
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use vmtrace::stream::{CountsOf, Frame, MarkKind, Reader, Record};

/// How the note begins that comes before what another kernel of the guest tells.
pub const BEGINS: &str = "the guest's kernel starts anew (kexec)";

/// What one kernel of a guest has told. Places are names with how far behind their beginning it is.
#[derive(Debug, Default)]
pub struct Part {
    /// How it begins; empty for the first one.
    pub begins: String,
    /// Functions that were called, with from where.
    pub called: BTreeSet<(String, String)>,
    /// The same of those that were only counted.
    pub counted: BTreeSet<(String, String)>,
    /// First fields of events.
    pub fields: BTreeSet<u64>,
}

/// The kernels of a guest, in their order.
///
/// # Errors
/// When the stream is not whole.
pub fn parts(trace: &Trace) -> Result<Vec<Part>> {
    let mut reader = Reader::new(&*trace.stream)?;
    let mut names: BTreeMap<u64, (u64, String)> = BTreeMap::new();
    let place = |names: &BTreeMap<u64, (u64, String)>, low: u32| {
        let address = trace.header.address(low);
        let found = names.range(..=address).next_back();
        let inside = found.filter(|(start, (size, _))| address - *start < (*size).max(1));
        match inside {
            Some((start, (_, name))) => format!("{name}+{:#x}", address - start),
            None => format!("{address:#x}"),
        }
    };
    let mut parts = vec![Part::default()];
    while let Some(frame) = reader.next_frame()? {
        let part = parts.last_mut().context("there is one")?;
        match frame {
            Frame::Symbols(list) => {
                for symbol in list {
                    let size = symbol.size.into();
                    symbol.with_text(|it| names.insert(it.address, (size, it.name.to_owned())));
                }
            }
            Frame::Records(batch) => {
                for record in batch.records() {
                    match record {
                        Record::Entry { entry, .. } => {
                            let [function, caller] = [entry.function.get(), entry.caller.get()];
                            let pair = (place(&names, function), place(&names, caller));
                            part.called.insert(pair);
                        }
                        Record::Event { values: Some(values), .. } => {
                            part.fields.extend(values.words.first().map(|word| word.get()));
                        }
                        _ => {}
                    }
                }
            }
            Frame::Counts(counts) if counts.of == Some(CountsOf::Callers) => {
                for it in counts.callers() {
                    let pair = (place(&names, it.function), place(&names, it.caller));
                    part.counted.insert(pair);
                }
            }
            Frame::Mark(mark) if mark.kind == MarkKind::Note && mark.text.starts_with(BEGINS) => {
                parts.push(Part { begins: mark.text, ..Part::default() });
            }
            _ => {}
        }
    }
    Ok(parts)
}
