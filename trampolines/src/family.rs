//! Tasks that are followed: a set of process ids, which grows with each fork of a task in it; and tasks of which it is
//! known that they are not meant.

use crate::condition::{Condition, Operand, Test};

/// Bytes of a set: one for each possible process id (`PID_MAX_LIMIT` of 64-bit kernels). It is 1 if the task
/// is followed, else 0. So a plain store is enough, and no store of another CPU can be lost.
pub const SIZE: u64 = 1 << PID_BITS;

pub(crate) const PID_BITS: u32 = 22;
/// What errors call the set.
pub(crate) const FAMILY: &str = "the set of tasks that are followed";

/// Tasks that a condition was seen to hold of or not, which few instructions tell from all others: a place of 8 bytes for
/// each, found by the address of the task (its `task_struct`, at a multiple of 64 bytes), with that address; one more
/// for a task that the condition was seen to hold of. For tasks whose addresses are 64 MiB apart it is the same place,
/// of which one has it.
///
/// Who is meant by its name alone is not noted: the name may be another one at once, or has been read while it was
/// written, and nobody forgets the task after that. All who get such a name are put into the set before that.
///
/// A task stays in its place for as long as nobody [forgets](crate::Counts::Forget) it: whoever can change what the
/// condition says of a task has to do that afterwards, or before that if the set of tasks that are followed already
/// says so. Whoever forgets adds 2 to the place, so that it never has what it had: it then has what no task has, and
/// nobody puts a task there who has looked before that.
///
/// ```text
/// + 0      places
/// + 8 MiB  not 0: tasks can be put into places. Written by the VMM alone.
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strangers {
    /// Where they are: a multiple of 4096; with its length a sign-extended number of 32 bits.
    pub address: u64,
    /// What does not hold of them: about the task alone.
    pub members: Condition,
}

impl Strangers {
    /// Bytes of all.
    pub const SIZE: u64 = Self::OPEN + 8;
    /// Where it is said whether tasks can be put into places.
    pub const OPEN: u64 = 1 << Self::BITS;
    /// Bytes of places: 2 to this.
    pub(crate) const BITS: u32 = 23;
    /// Bits of a task's address that are 0, less those of a place.
    pub(crate) const SHIFT: u32 = 3;

    /// What holds of members: one of either, of which the second ones look at bytes that others can change at any time.
    pub(crate) fn tests(&self) -> (Condition, Condition) {
        let (mut lasting, mut names) = (Vec::new(), Vec::new());
        sort(&self.members, &mut lasting, &mut names);
        (Condition::Any(lasting), Condition::Any(names))
    }
}

fn sort(condition: &Condition, lasting: &mut Vec<Condition>, names: &mut Vec<Condition>) {
    match condition {
        Condition::Any(list) => list.iter().for_each(|one| sort(one, lasting, names)),
        one if one.tests().any(|test| matches!(test, Test::Bytes { .. })) => {
            names.push(one.clone());
        }
        one => lasting.push(one.clone()),
    }
}

/// What must be true of the name that a task gets, by [`Test::Text`] of this argument, so that `named` holds of it
/// from then on. `None` if that is not known by its name alone: `named` is more than a list of names and other things
/// that do not change, one of which has to be right.
#[must_use]
pub fn renamed(named: &Condition, argument: u8) -> Option<Condition> {
    match named {
        Condition::Any(list) => {
            let list = list.iter().map(|one| renamed(one, argument)).collect::<Option<Vec<_>>>();
            Some(Condition::Any(list?))
        }
        // A list of one.
        Condition::All(list) => match &list[..] {
            [one] => renamed(one, argument),
            _ => None,
        },
        Condition::Test(Test::Bytes { bytes, equal: true, .. }) => {
            Some(Condition::Test(Test::Text { argument, bytes: bytes.clone() }))
        }
        Condition::Test(Test::Number { operand: Operand::Task(_), .. }) => {
            Some(Condition::Any(Vec::new()))
        }
        Condition::Test(_) => None,
    }
}
