//! Finds names that are similar to one that was not found.

use std::fmt;

/// Names to choose from, for a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Near {
    /// The nearest first, or in the order of the declaration.
    pub names: Vec<String>,
    /// Which of all these are.
    pub which: Which,
}

/// Which of all names are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// Those that are like what was asked for.
    #[default]
    Like,
    /// The first ones.
    First,
    /// All, as they are few.
    All,
}

/// The end of a message; empty without names.
impl fmt::Display for Near {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.names.join(", ");
        match self.which {
            _ if names.is_empty() => Ok(()),
            Which::Like => write!(f, "; near: {names}"),
            Which::First => write!(f, "; there is {names}, ..."),
            Which::All => write!(f, "; there is only {names}"),
        }
    }
}

impl Near {
    /// The first names, or all.
    pub(crate) fn first<'a>(all: impl Iterator<Item = &'a str>) -> Self {
        /// As many as a line of a message takes.
        const FEW: usize = 10;
        let mut names: Vec<String> = all.take(FEW + 1).map(str::to_owned).collect();
        let which = if names.len() <= FEW { Which::All } else { Which::First };
        names.truncate(FEW);
        Self { names, which }
    }

    /// Up to three names that differ from `wanted` in few letters; or all, if they are few and
    /// none is near.
    #[must_use]
    pub fn to<'a>(wanted: &str, all: impl Iterator<Item = &'a str> + Clone) -> Self {
        const MOST: usize = 3;
        let mut near: Vec<(usize, &str)> = Vec::new();
        for name in all.clone() {
            let most = (wanted.len().max(name.len()) / 3).max(1);
            if let Some(distance) = distance(wanted, name, most)
                && !near.iter().any(|&(_, other)| other == name)
            {
                let place = near.partition_point(|&(other, _)| other <= distance);
                near.insert(place, (distance, name));
                near.truncate(MOST);
            }
        }
        if near.is_empty() {
            let first = Self::first(all);
            return if first.which == Which::All { first } else { Self::default() };
        }
        let names = near.into_iter().map(|(_, name)| name.to_owned()).collect();
        Self { names, which: Which::Like }
    }
}

/// How many letters must be put in, taken out or changed; none if they are more than `most`.
/// A name that begins with the other is near, however long: part of it was left out.
fn distance(one: &str, other: &str, most: usize) -> Option<usize> {
    /// Longer names are not compared: they come from the image.
    const LONGEST: usize = 128;
    let (one, other) = (one.as_bytes(), other.as_bytes());
    if one.len() > LONGEST || other.len() > LONGEST {
        return None;
    }
    let beginning = one.len() >= 3 && other.starts_with(one);
    if one.len().abs_diff(other.len()) > most {
        return beginning.then_some(most);
    }
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.iter().enumerate() {
        let mut left = i + 1;
        let mut diagonal = i;
        for (b, cell) in other.iter().zip(row.iter_mut().skip(1)) {
            let changed = diagonal + usize::from(a != b);
            diagonal = *cell;
            left = changed.min(*cell + 1).min(left + 1);
            *cell = left;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().filter(|&distance| distance <= most).or(beginning.then_some(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    // A slip of the finger would be left without the name that was meant.
    #[test]
    fn near_names_are_found_and_far_ones_are_not() {
        let all = ["f_path", "f_pos", "f_flags", "f_inode", "f_mode", "f_op", "f_cred", "f_lock"]
            .into_iter()
            .chain(["f_owner", "f_ra", "f_ep", "private_data"]);
        let near = |wanted: &str| Near::to(wanted, all.clone()).to_string();
        assert_eq!(near("f_pth"), "; near: f_path");
        assert_eq!(near("flags"), "; near: f_flags");
        assert_eq!(near("f_od"), "; near: f_op, f_mode");
        assert_eq!(near("private"), "; near: private_data");
        assert_eq!(near("dentry_of_the_file"), "", "too many to list all");
        let few = |wanted: &str| Near::to(wanted, ["count", "buf"].into_iter()).to_string();
        assert_eq!(few("x"), "; there is only count, buf");
        assert_eq!(Near::to("x", [].into_iter()).to_string(), "");
        let first = Near::first(all.clone()).to_string();
        assert!(
            first.starts_with("; there is f_path, f_pos") && first.ends_with(", ..."),
            "{first}"
        );
    }

    #[test]
    fn distances_are_the_fewest_changes() {
        for (one, other, expected) in [
            ("", "", 0),
            ("a", "", 1),
            ("kitten", "sitting", 3),
            ("ab", "ba", 2),
            ("abc", "abc", 0),
        ] {
            assert_eq!(distance(one, other, 9), Some(expected), "{one} {other}");
            assert_eq!(distance(other, one, 9), Some(expected), "{other} {one}");
        }
        assert_eq!(distance("kitten", "sitting", 2), None);
    }
}
