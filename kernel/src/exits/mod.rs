//! Exits: the instructions by which a traced function is left.
//!
//! A function ends by a return, or by a jump to another function that returns in its place (a
//! tail call). On x86-64 the kernel lists its returns, and jumps are found by disassembly. On
//! riscv64 all exits are returns: those of [`Kernel::epilogues`] that can be redirected.

use std::fmt;

use super::read::index;
use super::{Arch, Kernel, KernelError, epilogues};
use module::{ModuleExits, ModuleText};

pub(crate) mod module;
pub(crate) mod x86_64;

/// One place where a traced function is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Exit {
    /// Link address of its instruction.
    pub address: u64,
    /// Link address of the function's entry.
    pub function: u64,
    /// Index into [`Kernel::sites`] of that, or [`Exit::NO_SITE`].
    pub site: u32,
    /// How the function is left there.
    pub kind: ExitKind,
    /// What the function is left for.
    pub after: After,
}

/// What follows where a function is left for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum After {
    /// Its caller, or a function that tells itself where it is left.
    Nothing,
    /// A function that cannot be traced and calls nothing: nobody can tell its end from the jump.
    Leaf,
    /// Functions that cannot be traced: the returns of this group, which have no site, are those in
    /// the place of which they return. A return without a site is one of its group.
    Group(u32),
}

impl After {
    /// The group, if it is one.
    #[must_use]
    pub fn group(self) -> Option<u32> {
        match self {
            Self::Group(group) => Some(group),
            Self::Nothing | Self::Leaf => None,
        }
    }
}

impl Exit {
    /// In place of a site: of a function that cannot be traced, whose returns are those of functions
    /// that jump to it.
    pub const NO_SITE: u32 = u32::MAX;

    /// How many bytes its instruction has in the image of an x86-64 kernel.
    pub fn size(&self) -> u8 {
        match self.kind {
            ExitKind::Return | ExitKind::Jump { .. } => 5,
            ExitKind::Indirect { len, .. } => len,
        }
    }
}

/// How a function is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitKind {
    /// A return. On x86-64 5 bytes that `.return_sites` names, `jmp __x86_return_thunk` in the
    /// image; on riscv64 a `ret`.
    Return,
    /// A tail call: a 5-byte jump to the beginning of a function.
    Jump {
        /// Link address of that function.
        target: u64,
    },
    /// A tail call through a pointer: a jump to `__x86_indirect_thunk_REGISTER` in the image.
    Indirect {
        /// The machine's number of the register with the pointer, 0 to 15.
        register: u8,
        /// Bytes of the jump, 5, or 6 with its prefix.
        len: u8,
    },
}

/// How much of a function's exits is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// All of them.
    Whole,
    /// Not this.
    Partial(Missing),
    /// None, because of this.
    None(Missing),
}

/// Why an exit of a function is not among those that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Missing {
    /// There is no exit.
    NoReturn,
    /// A tail call of 2 bytes.
    ShortJump,
    /// A conditional tail call.
    ConditionalJump,
    /// A tail call that the kernel directs elsewhere as it runs.
    StaticCall,
    /// A jump through a pointer that is not known to leave the function, or not listed.
    IndirectJump,
    /// A jump into the middle of another function, or out of code shared with another.
    StrayJump,
    /// A return that is not in the kernel's list.
    UnlistedReturn,
    /// An exit within code that the kernel replaces.
    Replaced,
    /// A branch ends in the middle of an exit.
    BranchInside,
    /// Bytes that are no known instructions.
    Undecoded,
    /// An overridden weak function.
    Dead,
    /// A function in code that is freed after start-up.
    InitText,
    /// It jumps to a function that cannot be traced, an end of which cannot be used.
    Beyond,
    /// A return with no room for a jump (riscv64).
    NoRoom,
}

impl Missing {
    /// The same in plain words.
    pub fn reason(self) -> &'static str {
        match self {
            Self::NoReturn => "it never returns",
            Self::ShortJump => "it is left by a 2-byte jump, which has no room for a hook",
            Self::ConditionalJump => "it is left by a conditional jump",
            Self::StaticCall => "it is left by a static call, which the kernel rewrites",
            Self::IndirectJump => "it has an indirect jump that cannot be hooked",
            Self::StrayJump => "it jumps into another function, or shares code with one",
            Self::UnlistedReturn => "it has a return that the kernel's list does not name",
            Self::Replaced => "it is left by code that the kernel replaces at start-up",
            Self::BranchInside => "a branch ends in the middle of where it is left",
            Self::Undecoded => "its code cannot be decoded",
            Self::Dead => "it is an overridden weak function, which never runs",
            Self::InitText => "its code is freed after start-up",
            Self::Beyond => "it is left for a function whose end cannot be seen",
            Self::NoRoom => "there is no room for a jump where it returns",
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason())
    }
}

/// What became of the entries of `.return_sites`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReturnStats {
    /// All entries, which is the sum of the others.
    pub listed: usize,
    /// Exits of traced functions, and of those in place of which others return.
    pub exits: usize,
    /// Static-call trampolines, whose "return" is a placeholder.
    pub trampolines: usize,
    /// Outside of the code that stays: start-up code, and alternatives to other code.
    pub outside: usize,
    /// In functions that cannot be traced.
    pub untraced: usize,
    /// In overridden weak functions, which never run.
    pub dead: usize,
    /// In traced functions, but not to be hooked: [`Missing`] tells why.
    pub unusable: usize,
}

/// The exits of a kernel's traced functions.
#[derive(Debug)]
pub struct Exits {
    /// By site, then by address.
    list: Vec<Exit>,
    /// For each site where its exits begin in the list, and the list's end.
    starts: Vec<u32>,
    /// For each site what is missing, if anything.
    missing: Vec<Option<Missing>>,
    returns: ReturnStats,
    fixed_calls: Vec<(u32, u64)>,
}

impl Exits {
    /// All of them, by site, then by address; those without a site come last.
    pub fn all(&self) -> &[Exit] {
        &self.list
    }

    /// Those of one function, by its index in [`Kernel::sites`]; none for an index without site.
    pub fn of(&self, site: usize) -> &[Exit] {
        let bounds = self.starts.get(site).zip(self.starts.get(site.saturating_add(1)));
        let range = bounds.map(|(&start, &end)| index(start.into())..index(end.into()));
        range.and_then(|range| self.list.get(range)).unwrap_or_default()
    }

    /// How much is known of the exits of one function, by its index in [`Kernel::sites`].
    pub fn coverage(&self, site: usize) -> Coverage {
        match (self.of(site), self.missing.get(site).copied().flatten()) {
            ([], missing) => Coverage::None(missing.unwrap_or(Missing::NoReturn)),
            (_, None) => Coverage::Whole,
            (_, Some(missing)) => Coverage::Partial(missing),
        }
    }

    /// Functions (sites) of which only static calls for security modules are missing, with the addresses of these, in order.
    /// The kernel directs them before it calls `rest_init`: to a return where it has no such module, which then is never
    /// executed (security/security.c, `LSM_STATIC_CALL`; since Linux 6.12).
    pub fn fixed_calls(&self) -> &[(u32, u64)] {
        &self.fixed_calls
    }

    /// What became of the kernel's list of returns (x86-64; else all zero).
    pub fn returns(&self) -> ReturnStats {
        self.returns
    }

    /// Puts exits, in any order, in theirs.
    fn new(mut list: Vec<Exit>, missing: Vec<Option<Missing>>, returns: ReturnStats) -> Self {
        list.sort_unstable_by_key(|exit| (exit.site, exit.address));
        let mut starts = Vec::with_capacity(missing.len() + 1);
        let mut next = 0;
        for site in 0..=missing.len() {
            next += list[next..].iter().take_while(|exit| index(exit.site.into()) < site).count();
            starts.push(u32::try_from(next).unwrap_or(u32::MAX));
        }
        Self { list, starts, missing, returns, fixed_calls: Vec::new() }
    }
}

impl Kernel {
    /// The exits of all functions that have a site in code that stays, looked for when first
    /// asked for.
    ///
    /// # Errors
    /// For x86-64 kernels without a list of returns, and those whose tables are damaged or of an
    /// unknown layout.
    pub fn exits(&self) -> Result<&Exits, KernelError> {
        if let Some(exits) = self.exits.get() {
            return Ok(exits);
        }
        let exits = match self.arch() {
            Arch::X86_64 => x86_64::find(self)?,
            Arch::Riscv64 => riscv64(self)?,
        };
        Ok(self.exits.get_or_init(|| exits))
    }

    /// The exits of a module's functions. On riscv64 those of the functions that are asked for, with
    /// what is to be rewritten before anything of the module runs; `entry` reads a word of its data,
    /// by link address.
    ///
    /// # Errors
    /// As [`Kernel::exits`], since those of the kernel tell what follows where a function of a module
    /// is left for one of the kernel's; and when the module's tables are absurd.
    pub fn module_exits(
        &self,
        text: &ModuleText,
        entry: &dyn Fn(u64) -> Option<i32>,
    ) -> Result<ModuleExits, KernelError> {
        match self.arch() {
            Arch::X86_64 => x86_64::module::find(self, text),
            Arch::Riscv64 => epilogues::of_module(text, entry).map_err(KernelError::NoEpilogues),
        }
    }
}

/// Those of a riscv64 kernel that can be redirected when all are.
fn riscv64(kernel: &Kernel) -> Result<Exits, KernelError> {
    let epilogues = kernel.epilogues()?;
    let exit = |(address, site): (u64, u32)| {
        let function = kernel.sites().get(index(site.into())).map_or(0, |site| site.entry);
        Exit { address, function, site, kind: ExitKind::Return, after: After::Nothing }
    };
    let list = epilogues.returns().map(exit).collect();
    let missing = (0..kernel.sites().len()).map(|site| match epilogues.coverage(site) {
        epilogues::Coverage::Whole => None,
        epilogues::Coverage::Partial(why) | epilogues::Coverage::None(why) => Some(why.into()),
    });
    Ok(Exits::new(list, missing.collect(), ReturnStats::default()))
}

impl From<epilogues::Missing> for Missing {
    fn from(why: epilogues::Missing) -> Self {
        match why {
            epilogues::Missing::StartUp => Self::InitText,
            epilogues::Missing::NoReturn => Self::NoReturn,
            epilogues::Missing::Leaves => Self::StrayJump,
            epilogues::Missing::Unclear => Self::IndirectJump,
            epilogues::Missing::Fixed => Self::Replaced,
            epilogues::Missing::NoRoom => Self::NoRoom,
        }
    }
}
