//! Tables of tracers that are gone. Others get them, so that tracers like them can come and go for as long as a guest
//! runs.
//!
//! Not at once: a task may still stand in a program that counts there, or know of a histogram there that it has yet to
//! add to. It would count a call for whoever has the table by then. So a table rests until several others like it do,
//! as long as there is room.

use super::{Counters, Kind, NOBODY, Table, of_histograms, span};

/// Tables of one form that rest before one of them is given to somebody else, and of those that take much of the room.
pub(super) const RESTING: usize = 4;
const RESTING_LARGE: usize = 2;
/// Bytes of a vCPU's from which on a table takes much.
const LARGE: u64 = 8 << 20;

impl Counters {
    /// A tracer's number is another's from now on, and its tables are nobody's.
    pub fn forget(&mut self, tracer: u8) {
        self.forgotten += 1;
        for table in self.tables.iter_mut().filter(|table| table.tracer == tracer) {
            (table.tracer, table.rests_since) = (NOBODY, self.forgotten);
        }
        self.callers.forget(tracer, self.forgotten);
    }

    /// Tables (indices) that are nobody's, with places for these functions, and room for what they lack.
    fn resting(
        &self,
        kind: Kind,
        cluster: &[(u64, usize)],
    ) -> impl Iterator<Item = (usize, &Table)> + Clone {
        let all = self.tables.iter().enumerate();
        all.filter(move |(_, table)| {
            (table.tracer, table.kind) == (NOBODY, kind)
                && table.covers(cluster)
                && self.has_room(self.lacking(table, cluster))
        })
    }

    /// Bytes of the histograms of these functions that a table lacks.
    fn lacking(&self, table: &Table, cluster: &[(u64, usize)]) -> u64 {
        if table.kind != Kind::Histograms {
            return 0;
        }
        of_histograms(table.without_histograms(cluster).len(), table.vcpus(self.vcpus))
    }

    /// The table (index) that has rested longest of those that are just as one for these functions would be, if enough of
    /// them rest.
    pub(super) fn rested(&self, kind: Kind, cluster: &[(u64, usize)]) -> Option<usize> {
        let (&(low, _), &(high, _)) = (cluster.first()?, cluster.last()?);
        let form = span(low, high);
        let alike = self.resting(kind, cluster).filter(|(_, table)| (table.from, table.to) == form);
        let longest = alike.clone().min_by_key(|(_, table)| table.rests_since)?;
        let least = if form.1 - form.0 < LARGE { RESTING } else { RESTING_LARGE };
        (alike.count() >= least).then_some(longest.0)
    }

    /// Where there is no room for another one: the smallest table (index) that will do, and of those the one that has
    /// rested longest. Those in which all vCPUs count come last.
    pub(super) fn smallest(&self, kind: Kind, cluster: &[(u64, usize)]) -> Option<usize> {
        let by = |(_, table): &(usize, &Table)| {
            (table.stride == 0, table.to - table.from, table.rests_since)
        };
        self.resting(kind, cluster).min_by_key(by).map(|(index, _)| index)
    }

    /// Gives a table that is nobody's to a tracer, with what it says by now taken. The same index.
    pub(super) fn inherit(&mut self, index: usize, tracer: u8) -> usize {
        let Some(table) = self.tables.get_mut(index) else { return index };
        table.tracer = tracer;
        // Not what the tracer's other tables have.
        let offset = table.offset;
        let before = self.look(|table, _| table.offset == offset);
        self.begin_anew(&before);
        let _ = self.have_taken(before, Vec::new());
        if let Some(table) = self.tables.get_mut(index) {
            table.sites.clear();
        }
        index
    }
}
