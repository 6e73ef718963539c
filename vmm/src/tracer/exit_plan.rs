//! Plans the rewriting of exits as far as the image alone determines it. The plan is made before
//! the guest runs, since the guest waits for all work that is left for the start of tracing.

use super::edit::Edit;

/// What is to be rewritten for the exits of some functions, and the stubs that they lead to. All
/// addresses are link addresses. Where exits can be changed at any time there is nothing in it.
#[derive(Debug, Default)]
pub struct ExitPlan {
    /// Functions (indices into [`Kernel::sites`](crate::kernel::Kernel::sites)) whose exits may be asked for.
    pub(super) sites: Vec<usize>,
    /// Of each exit (by index into [`Exits::all`](crate::kernel::Exits::all)) its number here, or
    /// [`ExitPlan::NONE`].
    pub(super) numbers: Vec<u32>,
    /// Offset in the code of the one word of an exit's stub that is ever changed.
    pub(super) slots: Vec<u64>,
    /// Of each exit, the first of those that lend bytes to each other and to it.
    pub(super) groups: Vec<u32>,
    /// What is to be rewritten, of which exits.
    pub(super) rewrites: Vec<(u32, Edit)>,
    /// All stubs.
    pub(super) code: Vec<u8>,
    /// Where in the code programs go.
    pub(super) programs: (u64, u64),
    /// Exits of modules may be asked for.
    pub(super) of_modules: bool,
    /// Where behind the code their stubs go.
    pub(super) spare: (u64, u64),
}

impl ExitPlan {
    /// In place of a number.
    pub(super) const NONE: u32 = u32::MAX;

    /// The functions (indices) that it was made for.
    #[must_use]
    pub fn sites(&self) -> &[usize] {
        &self.sites
    }

    /// Whether it has room for exits of modules.
    #[must_use]
    pub fn is_of_modules(&self) -> bool {
        self.of_modules
    }

    /// Whether there is any code.
    pub(super) fn has_code(&self) -> bool {
        !self.sites.is_empty() || self.of_modules
    }
}
