//! Sorted lists of sites: a guest waits while tens of thousands of them are put into tables, for which trees
//! and maps take several times as long.

/// What tells functions (link addresses), with their sites. In order.
#[derive(Clone, Debug, Default)]
pub(super) struct Told(Vec<(u64, usize)>);

impl Told {
    /// Adds these, which are in order; those that are there have these sites from now on. False when
    /// two addresses are in the same unit of so many bytes; nothing has changed then.
    #[must_use]
    pub(super) fn add(&mut self, more: &[(u64, usize)], unit: u64) -> bool {
        let mut all = Vec::with_capacity(self.0.len() + more.len());
        let mut old = self.0.iter().copied().peekable();
        for &(told, site) in more {
            while let Some(before) = old.next_if(|&(before, _)| before < told) {
                all.push(before);
            }
            while old.next_if(|&(before, _)| before == told).is_some() {}
            all.push((told, site));
        }
        all.extend(old);
        all.dedup_by_key(|(told, _)| *told);
        let is_told = all.is_sorted_by(|(before, _), (next, _)| before / unit < next / unit);
        if is_told {
            self.0 = all;
        }
        is_told
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, usize)> {
        self.0.iter().copied()
    }

    pub(super) fn retain(&mut self, keeps: impl Fn(usize) -> bool) {
        self.0.retain(|&(_, site)| keeps(site));
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// The numbers of the tables in which sites are counted.
#[derive(Clone, Debug, Default)]
pub struct SiteTables(Vec<(usize, u16)>);

impl From<Vec<(usize, u16)>> for SiteTables {
    fn from(mut all: Vec<(usize, u16)>) -> Self {
        all.sort_unstable();
        Self(all)
    }
}

impl SiteTables {
    /// That of a site. `next` is where it is likely to be found, and where the next one is after that:
    /// those who ask for all in order need no search.
    #[must_use]
    pub fn get(&self, site: usize, next: &mut usize) -> Option<u16> {
        let is_next = self.0.get(*next).is_some_and(|&(at, _)| at == site);
        if !is_next {
            *next = self.0.binary_search_by_key(&site, |&(at, _)| at).ok()?;
        }
        let &(_, table) = self.0.get(*next)?;
        *next += 1;
        Some(table)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A function that is told by another's counter is counted as that.
    #[test]
    fn addresses_are_in_units_of_their_own() {
        let mut told = Told::default();
        assert!(told.add(&[(16, 1), (40, 2)], 8));
        assert!(told.add(&[(8, 5), (16, 3), (31, 4), (48, 6)], 8));
        let all = [(8, 5), (16, 3), (31, 4), (40, 2), (48, 6)];
        assert_eq!(told.iter().collect::<Vec<_>>(), all);
        for bad in [&[(17, 7)][..], &[(100, 7), (103, 8)], &[(47, 7)], &[(24, 7)]] {
            assert!(!told.add(bad, 8), "{bad:?}");
            assert_eq!(told.iter().collect::<Vec<_>>(), all, "{bad:?}");
        }
        told.retain(|site| site != 4);
        assert!(told.add(&[(24, 7)], 8));
    }

    // A site that is asked for out of order must not be given another's table.
    #[test]
    fn tables_are_found_in_any_order() {
        let tables = SiteTables::from(vec![(7, 1), (3, 0), (9, 2)]);
        let mut next = 0;
        let mut get = |site| tables.get(site, &mut next);
        let asked = [3, 7, 9, 10, 7, 9, 3, 4, 3].map(&mut get);
        let found = [0, 1, 2].map(Some);
        let [a, b, c] = found;
        assert_eq!(asked, [a, b, c, None, b, c, a, None, a]);
    }
}
