//! Functions whose calls were counted instead of recorded: the table at the end of the text output.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::{self, Write};

use super::Name;
use super::names::unnamed;

/// Most numbers that are told apart, and so most functions: more than any kernel has.
const MOST: usize = 1 << 20;
/// Most vCPUs that have a column each.
const COLUMNS: usize = 32;
/// Widest column of tracers.
const TRACER: usize = 24;

/// How often functions were entered, by tracer and vCPU.
#[derive(Debug, Default)]
pub(super) struct Counted {
    rows: HashMap<Key, Row>,
    vcpus: BTreeSet<u32>,
    /// Numbers in the rows.
    numbers: usize,
    total: u64,
    /// Hits there was no room for.
    others: u64,
}

/// In the order of rows with as many hits.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Key {
    /// As it was called then: a module may take the place of another.
    name: Box<str>,
    tracer: Box<str>,
    address: u64,
}

#[derive(Debug, Default)]
struct Row {
    total: u64,
    by_vcpu: BTreeMap<u32, u64>,
}

impl Counted {
    /// Adds what was counted on a vCPU for a tracer, the first if there are not several.
    pub(super) fn add(
        &mut self,
        vcpu: u32,
        tracer: Option<&str>,
        hits: &mut dyn Iterator<Item = (Name<'_>, u64)>,
    ) {
        let tracer = tracer.map_or_else(|| unnamed(0), str::to_owned);
        for (function, hits) in hits.filter(|(_, hits)| *hits > 0) {
            self.total = self.total.saturating_add(hits);
            let (address, name) = (function.address, function.label().into());
            let key = Key { tracer: tracer.as_str().into(), address, name };
            let known = self.rows.get(&key).is_some_and(|row| row.by_vcpu.contains_key(&vcpu));
            if !known && self.numbers >= MOST {
                self.others = self.others.saturating_add(hits);
                continue;
            }
            self.numbers += usize::from(!known);
            self.vcpus.insert(vcpu);
            let row = self.rows.entry(key).or_default();
            row.total = row.total.saturating_add(hits);
            let of_vcpu = row.by_vcpu.entry(vcpu).or_default();
            *of_vcpu = of_vcpu.saturating_add(hits);
        }
    }

    /// Rows of the table.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// The table with so many rows at most, and a line for the others.
    pub(super) fn lines(&self, most: usize) -> Vec<String> {
        let mut text = Vec::new();
        // Memory takes everything.
        let _ = self.write_rows(&mut text, most);
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }

    /// Writes the table, the most frequent first; nothing if nothing was counted.
    ///
    /// # Errors
    /// When the output fails.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        self.write_rows(out, usize::MAX)
    }

    fn write_rows(&self, out: &mut impl Write, most: usize) -> io::Result<()> {
        if self.total == 0 {
            return Ok(());
        }
        let functions: HashSet<_> = self.rows.keys().map(|key| (key.address, &key.name)).collect();
        let tracers: HashSet<_> = self.rows.keys().map(|key| &key.tracer).collect();
        let width = tracers.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let width = width.clamp("tracer".len(), TRACER);
        let vcpus = if (2..=COLUMNS).contains(&self.vcpus.len()) {
            self.vcpus.iter().copied().collect()
        } else {
            Vec::new()
        };
        let plural = |many: u64| if many == 1 { "" } else { "s" };
        let count = functions.len() as u64;
        writeln!(
            out,
            "# counted: {count} function{}, {} call{}",
            plural(count),
            self.total,
            plural(self.total)
        )?;
        let mut line =
            |hits: String, cells: &mut dyn Iterator<Item = String>, tracer: &str, name: &str| {
                write!(out, "#{hits:>12}")?;
                for cell in cells {
                    write!(out, "  {cell:>10}")?;
                }
                if tracers.len() > 1 {
                    write!(out, "  {tracer:<width$}")?;
                }
                writeln!(out, "  {name}")
            };
        let mut heads = vcpus.iter().map(|vcpu| format!("[{vcpu:03}]"));
        line("hits".to_owned(), &mut heads, "tracer", "function")?;
        let mut rows: Vec<_> = self.rows.iter().collect();
        rows.sort_unstable_by(|(a, of_a), (b, of_b)| {
            of_b.total.cmp(&of_a.total).then_with(|| a.cmp(b))
        });
        for (key, row) in rows.iter().take(most) {
            let of = |vcpu| row.by_vcpu.get(vcpu).copied().unwrap_or(0).to_string();
            line(row.total.to_string(), &mut vcpus.iter().map(of), &key.tracer, &key.name)?;
        }
        let left = rows.iter().skip(most);
        let hits = left.fold(0_u64, |sum, (_, row)| sum.saturating_add(row.total));
        if hits > 0 {
            let mut none = vcpus.iter().map(|_| String::new());
            let name = format!("({} more functions)", rows.len().saturating_sub(most));
            line(hits.to_string(), &mut none, "", &name)?;
        }
        if self.others > 0 {
            let mut none = vcpus.iter().map(|_| String::new());
            line(self.others.to_string(), &mut none, "", "others")?;
        }
        Ok(())
    }
}
