//! Sets of sites and of exits, by their numbers. Look-ups are fast, since a guest waits while tens of
//! thousands are made.

use super::touched::touched;

/// Some of the sites of a kernel, by their indices.
#[derive(Debug, Default)]
pub(super) struct SiteSet(Vec<bool>);

impl SiteSet {
    /// An empty one with memory for sites below this.
    pub(super) fn with_room(sites: usize) -> Self {
        let mut room = touched(sites, true);
        room.resize(sites, false);
        Self(room)
    }

    pub(super) fn insert(&mut self, site: usize) {
        if site >= self.0.len() {
            self.0.resize((site + 1).next_power_of_two(), false);
        }
        if let Some(is_in) = self.0.get_mut(site) {
            *is_in = true;
        }
    }

    pub(super) fn remove(&mut self, site: usize) {
        if let Some(is_in) = self.0.get_mut(site) {
            *is_in = false;
        }
    }

    pub(super) fn contains(&self, site: usize) -> bool {
        self.0.get(site).copied().unwrap_or(false)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().filter_map(|(site, &is_in)| is_in.then_some(site))
    }
}

impl FromIterator<usize> for SiteSet {
    fn from_iter<I: IntoIterator<Item = usize>>(sites: I) -> Self {
        let mut set = Self::default();
        sites.into_iter().for_each(|site| set.insert(site));
        set
    }
}

/// Some keys, to ask for others one after the other: those that come in order, as most do, are
/// found at once.
pub(crate) struct Among<K> {
    sorted: Vec<K>,
    /// The first that is not below what was asked for last, or behind that if it was this one.
    next: usize,
}

impl<K: Ord> Among<K> {
    pub(crate) fn new(mut keys: Vec<K>) -> Self {
        keys.sort_unstable();
        Self { sorted: keys, next: 0 }
    }

    /// Whether it is one of them.
    pub(crate) fn contains(&mut self, key: &K) -> bool {
        let next = self.sorted.get(self.next);
        if next == Some(key) {
            self.next += 1;
            return true;
        }
        let before = self.next.checked_sub(1).and_then(|before| self.sorted.get(before));
        if before.is_none_or(|before| before < key) && next.is_none_or(|next| key < next) {
            return false;
        }
        let found = self.sorted.binary_search(key);
        self.next = match found {
            Ok(at) => at + 1,
            Err(at) => at,
        };
        found.is_ok()
    }

    /// All of them, in order.
    pub(crate) fn into_sorted(self) -> Vec<K> {
        self.sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        // A site that is not found keeps our call for ever.
        #[test]
        fn numbers_are_found_in_any_order(
            numbers in proptest::collection::vec(0_usize..40, 0..20),
            asked in proptest::collection::vec(0_usize..44, 0..60),
        ) {
            let mut among = Among::new(numbers.clone());
            for number in asked.into_iter().chain(0..44) {
                prop_assert_eq!(among.contains(&number), numbers.contains(&number), "{}", number);
            }
        }
    }
}
