//! Finds enumerators, typedefs and enums by name.

use std::hash::{BuildHasher as _, RandomState};

use super::super::Kernel;
use super::super::read::index;
use super::{Btf, ENUM, ENUM64, Kind, TYPEDEF};

/// Enumerators, typedefs and enums of a kernel's type information, to be found by name.
#[derive(Debug)]
pub(crate) struct Words {
    hasher: RandomState,
    /// The hash of a name, the number of its type, and of enumerators which one it is: ascending.
    list: Vec<(u64, u32, u32)>,
}

/// What is known of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The value of an enumerator, and whether its enum is of 8 bytes without a sign.
    Constant(i64, bool),
    /// The number of a typedef.
    Typedef(u32),
    /// The number of an enum.
    Enum(u32),
}

impl Kernel {
    /// The value of an enumerator, whichever its enum is; `None` also where enums differ about it.
    #[must_use]
    pub fn enumerator(&self, name: &str) -> Option<i64> {
        let btf = self.btf().ok()?;
        match self.words(btf).find(btf, name)? {
            Word::Constant(value, _) => Some(value),
            Word::Typedef(_) | Word::Enum(_) => None,
        }
    }

    /// All names are looked at once.
    pub(crate) fn words(&self, btf: &Btf) -> &Words {
        self.words.get_or_init(|| Words::new(btf))
    }
}

/// What is no enumerator has this number.
const ITSELF: u32 = u32::MAX;

impl Words {
    pub(crate) fn new(btf: &Btf) -> Self {
        let hasher = RandomState::new();
        let mut list = Vec::new();
        for number in 0..btf.len() {
            let Some(this) = btf.get(number) else { continue };
            let Ok(number) = u32::try_from(number) else { break };
            match this.kind {
                TYPEDEF => list.push((hasher.hash_one(btf.text(this.name)), number, ITSELF)),
                ENUM | ENUM64 => {
                    let names = btf.enumerators(number).map(|(_, name)| name);
                    let each = (0..ITSELF).zip(names);
                    list.extend(each.map(|(i, name)| (hasher.hash_one(name), number, i)));
                    list.push((hasher.hash_one(tag(btf.text(this.name))), number, ITSELF));
                }
                _ => {}
            }
        }
        list.sort_unstable();
        Self { hasher, list }
    }

    /// What a word means; none also where it means several things.
    pub(crate) fn find(&self, btf: &Btf, name: &str) -> Option<Word> {
        self.search(btf, name, false)
    }

    /// The number of the enum of this name, if there is no other.
    pub(crate) fn find_enum(&self, btf: &Btf, name: &str) -> Option<u32> {
        match self.search(btf, name, true)? {
            Word::Enum(number) => Some(number),
            Word::Constant(..) | Word::Typedef(_) => None,
        }
    }

    fn search(&self, btf: &Btf, name: &str, is_tag: bool) -> Option<Word> {
        /// Damaged information has the same name without end.
        const MOST: usize = 64;
        let hash =
            if is_tag { self.hasher.hash_one(tag(name)) } else { self.hasher.hash_one(name) };
        let first = self.list.partition_point(|&(own, ..)| own < hash);
        let same = self.list.iter().skip(first).take_while(|&&(own, ..)| own == hash);
        let mut found = None;
        for (i, &(_, number, which)) in same.enumerate() {
            if i == MOST {
                return None;
            }
            let Some(this) = btf.get(index(number.into())) else { continue };
            let word = match (this.kind, which) {
                _ if is_tag != (which == ITSELF && this.kind != TYPEDEF) => continue,
                (_, ITSELF) if btf.text(this.name) != name => continue,
                (TYPEDEF, _) => Word::Typedef(number),
                (_, ITSELF) => Word::Enum(number),
                _ => {
                    let found = btf.enumerator_at(this, index(which.into()));
                    let Some((value, own)) = found else { continue };
                    if own != name {
                        continue;
                    }
                    Word::Constant(value, this.size == 8 && !this.flag)
                }
            };
            found = match found {
                None => Some(word),
                Some(known) if alike(btf, known, word) => found,
                Some(_) => return None,
            };
        }
        found
    }
}

/// The names of enums are others than those of anything else.
fn tag(name: &str) -> (&'static str, &str) {
    ("enum", name)
}

/// Whether two words of one name mean the same.
fn alike(btf: &Btf, one: Word, other: Word) -> bool {
    let kind = |number| btf.see(number).map(|seen| seen.kind);
    match (one, other) {
        (Word::Typedef(one), Word::Typedef(other)) | (Word::Enum(one), Word::Enum(other)) => {
            match (kind(one), kind(other)) {
                // Where it leads does not matter here.
                (Some(Kind::Pointer(_)), Some(Kind::Pointer(_))) => true,
                (one, other) => one.is_some() && one == other,
            }
        }
        (one, other) => one == other,
    }
}
