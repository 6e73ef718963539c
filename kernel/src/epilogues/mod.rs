//! How functions of a riscv64 kernel end, and how their ends can be traced.
//!
//! A function that saves its return address in a frame ends in an epilogue: a few instructions up
//! to the `ret` that nothing jumps into. They are replaced once, before any CPU executes them, by a
//! jump to a stub that does the same and can call a handler. From then on only that call is
//! switched on and off. The image alone determines which instructions are replaced (`windows`),
//! what jumps where (`targets`, `tables`), and what is written (`plan`, `patch`).

mod module;
pub(super) mod patch;
mod plan;
mod targets;
mod windows;

pub(super) use module::find as of_module;
pub use patch::{Displaced, Epilogue, Jump, LINK, PlannedExit, Step, slot};

use std::fmt;

use crate::read::index;
use crate::riscv64::text::Text;
use crate::{Arch, Kernel, KernelError, SiteSection};
use plan::Planner;
use targets::Targets;
use windows::Windows;

/// The exits of all traced functions.
#[derive(Debug)]
pub struct Epilogues {
    windows: Windows,
    /// For each site.
    coverage: Vec<Coverage>,
    /// Returns that stay as they are though all are asked for, by address.
    left_out: Vec<u64>,
}

/// How many of a function's exits can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// All of them.
    Whole,
    /// Some; what is missing is of this kind.
    Partial(Missing),
    /// None.
    None(Missing),
}

/// Why an exit cannot be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The code is freed after start-up.
    StartUp,
    /// No exit was found at all.
    NoReturn,
    /// A jump to another function.
    Leaves,
    /// A jump that cannot be followed, or code that is not understood.
    Unclear,
    /// The kernel changes the return itself, or looks it up by its address.
    Fixed,
    /// The return is too short for a jump to anywhere free.
    NoRoom,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::StartUp => "the function is freed after start-up",
            Self::NoReturn => "the function never returns",
            Self::Leaves => "the function ends in a jump to another",
            Self::Unclear => "the function has a jump that cannot be followed",
            Self::Fixed => "the kernel itself changes the return instruction",
            Self::NoRoom => "there is no room for a jump at the return instruction",
        })
    }
}

/// What is rewritten for a run.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The exits, by address. They belong together: windows hold landings of others.
    pub exits: Vec<PlannedExit>,
    /// The exits of the same functions that stay as they are.
    pub left_out: Vec<LeftOut>,
}

/// A return that is not rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Link address of the `ret`.
    pub ret: u64,
    /// Number of the function's site.
    pub site: u32,
    /// Why.
    pub why: Missing,
}

impl Kernel {
    /// How the traced functions of a riscv64 kernel end; looked into when first asked for.
    pub fn epilogues(&self) -> Result<&Epilogues, KernelError> {
        if let Some(epilogues) = self.epilogues.get() {
            return Ok(epilogues);
        }
        let epilogues = Epilogues::find(self).map_err(KernelError::NoEpilogues)?;
        Ok(self.epilogues.get_or_init(|| epilogues))
    }
}

impl Epilogues {
    fn find(kernel: &Kernel) -> Result<Self, &'static str> {
        if kernel.arch() != Arch::Riscv64 {
            return Err("only those of riscv64 kernels are known");
        }
        let text = Text::find(kernel)?;
        let targets = Targets::find(kernel, &text)?;
        let windows = Windows::find(kernel, &text, &targets)?;
        let sites = kernel.sites().iter().map(|site| match site.section {
            SiteSection::InitText => Coverage::None(Missing::StartUp),
            SiteSection::Text => Coverage::None(Missing::Unclear),
        });
        let mut coverage: Vec<Coverage> = sites.collect();
        let all = Planner::new(&windows, 0..kernel.sites().len());
        let mut left_out: Vec<_> = windows.fixed.iter().copied().chain(all.left_out()).collect();
        left_out.sort_by_key(|left_out| left_out.site);
        for function in &windows.functions {
            let first = left_out.partition_point(|left_out| left_out.site < function.site);
            let out =
                left_out[first..].iter().take_while(|left_out| left_out.site == function.site);
            let (count, why) = out.fold((0, None), |(n, why), out| (n + 1, why.or(Some(out.why))));
            let none = function.exits.len() + function.fixed <= count;
            coverage[index(function.site.into())] = match function.missing.or(why) {
                None => Coverage::Whole,
                Some(why) if none => Coverage::None(why),
                Some(why) => Coverage::Partial(why),
            };
        }
        let mut left_out: Vec<u64> = all.left_out().map(|left_out| left_out.ret).collect();
        left_out.sort_unstable();
        Ok(Self { windows, coverage, left_out })
    }

    /// The returns that can be seen when all functions are asked for, each with the number of its
    /// function's site.
    pub fn returns(&self) -> impl Iterator<Item = (u64, u32)> {
        let exits = self.windows.exits.iter().map(|exit| (exit.ret, exit.site));
        exits.filter(|(ret, _)| self.left_out.binary_search(ret).is_err())
    }

    /// How many of a function's exits can be seen when all functions are asked for.
    pub fn coverage(&self, site: usize) -> Coverage {
        self.coverage.get(site).copied().unwrap_or(Coverage::None(Missing::Unclear))
    }

    /// What to rewrite to see the exits of the functions at these sites, given by their numbers.
    ///
    /// A function may have no exits to rewrite, as [`Epilogues::coverage`] tells; and what is left
    /// out may be more than with all functions, which have more room together.
    pub fn plan(&self, wanted: &[usize]) -> Plan {
        let mut plan = Planner::new(&self.windows, wanted.iter().copied()).finish();
        let fixed = wanted.iter().flat_map(|&site| self.windows.fixed_of(site));
        plan.left_out.extend(fixed);
        plan.left_out.sort_by_key(|left_out| left_out.ret);
        plan.left_out.dedup();
        plan
    }
}
