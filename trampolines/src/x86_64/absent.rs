//! What a build for another architecture has in place of the templates.

use super::{Addressing, Overflow};
use crate::Template;

/// No trampoline: a VMM of another architecture has no x86-64 guest.
#[must_use]
pub fn entry(_: Addressing, _: Overflow) -> Template {
    Template { code: &[], holes: &[u32::MAX; crate::template::HOLES] }
}
