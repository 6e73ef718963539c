//! Branches between the parts of a condition, on any architecture.

use crate::condition::{Condition, Test};
use crate::program::ProgramError;
use dynasmrt::DynamicLabel;

/// The target of a branch, and the outcome for which it is taken. For the other outcome execution
/// continues.
pub(crate) type Way = (DynamicLabel, bool);

/// What an architecture has for it.
pub(crate) trait Branches {
    /// A new label.
    fn label(&mut self) -> DynamicLabel;

    /// What follows is where a label is.
    fn bind(&mut self, label: DynamicLabel);

    /// Goes there in any case.
    fn jump(&mut self, target: DynamicLabel);

    /// The same as [`branch`] where there is a quicker way; whether there is.
    fn quickly(&mut self, _: &Condition, _: Way) -> Result<bool, ProgramError> {
        Ok(false)
    }

    /// Makes one test.
    fn test(&mut self, test: &Test, way: Way) -> Result<(), ProgramError>;
}

/// Goes to a target if the condition is what `when` says, else on.
pub(crate) fn branch(
    to: &mut impl Branches,
    condition: &Condition,
    way: Way,
) -> Result<(), ProgramError> {
    if to.quickly(condition, way)? { Ok(()) } else { branch_by_tests(to, condition, way) }
}

/// The same by all tests of the condition, or of what it consists of.
pub(crate) fn branch_by_tests(
    to: &mut impl Branches,
    condition: &Condition,
    (target, when): Way,
) -> Result<(), ProgramError> {
    // All of them are false when one is, and any is true when one is.
    let (list, decides) = match condition {
        Condition::Test(test) => return to.test(test, (target, when)),
        Condition::All(list) => (list, false),
        Condition::Any(list) => (list, true),
    };
    if when == decides {
        return list.iter().try_for_each(|one| branch(to, one, (target, when)));
    }
    let Some((last, others)) = list.split_last() else {
        to.jump(target);
        return Ok(());
    };
    // It is what the last one is, unless another one has decided.
    let skip = to.label();
    others.iter().try_for_each(|one| branch(to, one, (skip, decides)))?;
    branch(to, last, (target, when))?;
    to.bind(skip);
    Ok(())
}
