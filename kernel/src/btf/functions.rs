//! Finds functions by name.

use std::hash::{BuildHasher as _, RandomState};

use super::super::read::index;
use super::{Btf, DECLARATION_TAG, FUNCTION};

/// The functions of a kernel's type information, to be found by name.
#[derive(Debug)]
pub(crate) struct Functions {
    hasher: RandomState,
    /// The hash of a name, and the number of its function: ascending.
    list: Vec<(u64, u32)>,
    /// Functions of one name and different types have been left out by who wrote it: pahole from
    /// 1.25 on does. Before, it kept the first that it came across.
    pub(crate) consistent: bool,
}

/// What is known of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    Unknown,
    /// The number of the function's type.
    Known(u32),
    /// Several functions of that name have different types.
    Ambiguous,
}

impl Functions {
    /// Of the types from a number on: 0 has all.
    pub(crate) fn new(btf: &Btf, from: usize) -> Self {
        let hasher = RandomState::new();
        let mut list = Vec::new();
        let mut consistent = false;
        for number in from..btf.len() {
            let this = btf.get(number);
            let Ok(number) = u32::try_from(number) else { break };
            match this.map(|this| (this.kind, btf.text(this.name))) {
                Some((FUNCTION, name)) if !name.is_empty() => {
                    list.push((hasher.hash_one(name), number));
                }
                // Marked by pahole from 1.26 on.
                Some((DECLARATION_TAG, "bpf_kfunc")) => consistent = true,
                _ => {}
            }
        }
        list.sort_unstable();
        Self { hasher, list, consistent }
    }

    /// The type of the functions of this name, if it is the same for all.
    pub(crate) fn find(&self, btf: &Btf, name: &str) -> Named {
        /// Damaged information has the same function without end.
        const MOST: usize = 64;
        let hash = self.hasher.hash_one(name);
        let first = self.list.partition_point(|&(own, _)| own < hash);
        let same = self.list.iter().skip(first).take_while(|&&(own, _)| own == hash);
        let mut found = Named::Unknown;
        for (i, &(_, number)) in same.enumerate() {
            if i == MOST {
                return Named::Ambiguous;
            }
            let Some(function) = btf.get(index(number.into())) else { continue };
            if btf.text(function.name) != name {
                continue;
            }
            found = match found {
                Named::Unknown => Named::Known(function.size),
                Named::Known(other) if alike(btf, other, function.size) => found,
                _ => return Named::Ambiguous,
            };
        }
        found
    }
}

/// Whether two functions have the same parameters and result.
fn alike(btf: &Btf, one: u32, other: u32) -> bool {
    one == other || btf.signature(one).is_some_and(|one| Some(one) == btf.signature(other))
}
