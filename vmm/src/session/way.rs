//! Ways out of functions.

use crate::kernel::{Exit, ExitKind};
use vmtrace_trampolines::Point;

/// By what a function is left, as far as it matters to what is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Way {
    Return,
    /// A return of a function that is not traced.
    Aid,
    Jump,
    Indirect,
}

impl Way {
    /// That of an exit.
    pub(super) fn of(exit: &Exit) -> Self {
        match exit.kind {
            ExitKind::Return if exit.site == Exit::NO_SITE => Self::Aid,
            ExitKind::Return => Self::Return,
            ExitKind::Jump { .. } => Self::Jump,
            ExitKind::Indirect { .. } => Self::Indirect,
        }
    }

    /// That of programs there.
    pub(super) fn point(self) -> Point {
        match self {
            Self::Return => Point::Return,
            Self::Aid => Point::Beyond,
            Self::Jump | Self::Indirect => Point::Tail,
        }
    }
}
