//! What architectures differ in: the interface. The guest's kernel selects the architecture, not the build:
//! all of it is memory and numbers, so it is tested on any machine.

use super::annex::{Hole, Layout, Memory};
use super::call::Call;
use super::counters::Area;
use super::edit::{Edit, ExitEdit, SkipReason};
use super::error::TraceError;
use super::exit_plan::ExitPlan;
use super::exits::{AllExits, ExitWord};
use super::ftrace::GuestCall;
use super::guest::{Guest, GuestError};
use super::image::Image;
use super::module_calls::ModuleMoment;
use super::modules::Fresh;
use super::spot::Spot;
use super::stops::{Moment, ProgramStop, Stops};
use super::switch_places::AllSwitches;
use super::tracepoints::guest::{Jump, Own, PointReason};
use super::view::View;
use crate::kernel::preemptirq::{Switch, SwitchSite};
use crate::kernel::tracepoints::Hooks;
use crate::kernel::{Exit, Kernel, ModuleRewrite, Site};
use std::ops::Range;
use std::sync::Arc;
use vmtrace_trampolines::family::Strangers;
use vmtrace_trampolines::{Overflow, Point, Program, Readable};

/// Where the kernel has mapped all RAM, one address after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectMap {
    /// Run-time address of its first byte.
    pub(super) start: u64,
    /// The guest-physical address of that.
    pub(super) physical: u64,
    /// The array of `struct page`: run-time address of that of guest-physical address 0, and bytes
    /// of each; `None` when not known.
    pub(super) pages: Option<(u64, u64)>,
}

/// What to write and how.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// What happens when a ring is full.
    pub overflow: Overflow,
    /// vCPUs of the guest.
    pub cpus: u64,
    /// Bytes of each ring; `None`: as many as fit beside the programs.
    pub buffer: Option<u64>,
    /// Ticks a second of the clock that programs read.
    pub clock_hz: u64,
    /// The functions whose exits may be asked for. Where exits can be changed at the attach moment
    /// alone (riscv64) they are rewritten then; elsewhere this means nothing.
    pub returns: &'a ExitPlan,
}

/// An architecture.
pub(super) trait Target: Sync {
    /// Where an entry program returns to (link address): what its records have for the
    /// function of a site.
    fn return_address(&self, site: &Site) -> u64;

    /// Where a call of a site's function comes to the site (link address).
    fn start(&self, site: &Site) -> u64;

    /// Does what a call with the stack pointer `stack` does to memory. Returns the stack pointer
    /// after it.
    ///
    /// # Errors
    /// When there is no stack.
    fn call(
        &self,
        guest: &dyn Guest,
        image: &Image,
        stack: u64,
        returns_to: u64,
    ) -> Result<u64, GuestError>;

    /// What may be calls of and jumps to functions in code at a link address.
    fn calls_in(&self, start: u64, body: &[u8]) -> Vec<Call>;

    /// What a program's stack pointer lacks to be that of its function's entry.
    fn stack_bias(&self, point: Point) -> u64;

    /// Where in the function at link address `entry` a tripwire can be: behind what
    /// the kernel itself writes or verifies there.
    fn tripwire(&self, kernel: &Kernel, entry: u64) -> u64;

    /// Where the running kernel has its direct map, if that can be told.
    fn direct_map(&self, guest: &dyn Guest, kernel: &Kernel, image: &Image) -> Option<DirectMap>;

    /// A function that is called once, when the kernel has patched its alternatives and no other
    /// CPU runs; `None` where that changes nothing for us.
    fn after_alternatives(&self) -> Option<&'static str>;

    /// Whether a program multiplies best by a power of two.
    fn multiplies_by_shifting(&self) -> bool;

    /// Where rings are that do not fit beside the programs, and how far behind a multiple of 1 GiB
    /// their guest-physical memory must begin.
    fn hole(&self) -> (Hole, u64);

    /// What the image alone tells of exits that must be rewritten when tracing begins: those of the
    /// functions at these sites (indices).
    fn plan_exits(
        &self,
        kernel: &Kernel,
        sites: &[usize],
        of_modules: bool,
    ) -> Result<ExitPlan, TraceError>;

    /// Puts the annex and what programs need into a guest that has just run
    /// `ftrace_init`.
    fn install(
        &self,
        guest: &dyn Guest,
        kernel: &Kernel,
        image: &Image,
        memory: &Arc<dyn Memory>,
        options: Options<'_>,
    ) -> Result<Installed, TraceError>;
}

/// What [`Target::install`] has put into a guest.
pub(super) struct Installed {
    pub(super) layout: Layout,
    pub(super) code: Box<dyn GuestCode>,
    /// Where tables of counters can be.
    pub(super) area: Area,
}

/// Code of ours to which a CPU's exceptions can be led. Run-time addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Faults {
    /// What tells the CPU: x86-64 a table of 32 descriptors, riscv64 the code itself.
    pub(super) table: u64,
    /// Where a vCPU stands when it has exited, by the number of the exception, or for all.
    pub(super) traps: Vec<u64>,
}

/// What a site is to do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hook<'a> {
    /// Call the program with this number.
    Call(u16),
    /// Exit to the VMM by this instruction sequence.
    Trap(&'a [u8]),
}

/// Programs in a guest, and how sites come to call them.
pub(super) trait GuestCode: Send {
    /// Whether the instruction at a link address returns as the guest's own do by now, once it has patched its alternatives
    /// (x86-64).
    fn is_return(&self, _view: &View<'_>, _image: &Image, _address: u64) -> bool {
        false
    }

    /// Programs that are made from now on read the memory behind pointers where this says that
    /// they can.
    fn allow(&mut self, readable: Readable);

    /// Where programs that are made from now on find the set of tasks that are followed (run-time address).
    fn follow(&mut self, family: u64);

    /// Whether tasks are told by fewer instructions if it is noted which are not meant, and it can be: the kernel's
    /// `caller` calls `callee`, whose body is not in it.
    fn notes_strangers(&self, kernel: &Kernel, call: (&str, &str)) -> bool;

    /// Where programs that are made from now on find those.
    fn note_strangers(&mut self, strangers: Strangers);

    /// Makes a program, which goes on to the one with the number `next`, if any, and puts it into
    /// the guest. Numbers come in order.
    ///
    /// # Errors
    /// When there is no place for it.
    fn add(
        &mut self,
        guest: &dyn Guest,
        program: &Program,
        next: Option<u16>,
    ) -> Result<(), TraceError>;

    /// Lets the guest stop, by `trap`, where its ftrace begins to change sites and where that is
    /// over: from then on sites are shared with it.
    ///
    /// # Errors
    /// When the kernel has another code there; nothing has changed then.
    fn bracket(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        trap: &[u8],
    ) -> Result<Stops<Moment>, TraceError>;

    /// Whether sites have to be prepared before they can be held, and not be so while an update of the
    /// guest's own ftrace touches them: [`GuestCode::prepare`], [`GuestCode::unprepare`].
    fn prepares(&self) -> bool {
        false
    }

    /// Lets these calls exit to the VMM first, by `trap`.
    ///
    /// # Errors
    /// When the kernel has another code there; nothing has changed then.
    fn calls(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        calls: &[(ModuleMoment, Call)],
        trap: &[u8],
    ) -> Result<Stops<ModuleMoment>, TraceError>;

    /// Lets these sites be held, of a module of which no code has run yet, or such as an update of the
    /// guest's own ftrace has just changed. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    fn prepare(
        &mut self,
        _: &dyn Guest,
        _: &View<'_>,
        _: &Image,
        _: &[Spot],
    ) -> Result<(), TraceError> {
        Ok(())
    }

    /// Takes back what [`GuestCode::prepare`] has written to sites that are not held. All vCPUs are
    /// paused.
    ///
    /// # Errors
    /// Which sites were not given back, and why; all others are.
    fn unprepare(&mut self, _: &View<'_>, _: &Image, _: &[Spot]) -> Result<(), GuestError> {
        Ok(())
    }

    /// What the guest's own ftrace has put into a site, if there is something that can be shared.
    fn guest_call(&self, view: &View<'_>, image: &Image, spot: &Spot) -> Option<GuestCall>;

    /// Makes code that does what a program does and goes on with the guest's call, if there is none
    /// yet.
    ///
    /// # Errors
    /// When there is no place for it.
    fn chain(&mut self, guest: &dyn Guest, program: u16, call: GuestCall)
    -> Result<(), TraceError>;

    /// The same for a trap, where it cannot go on with the guest's call as it is.
    ///
    /// # Errors
    /// When there is no place for it.
    fn chain_trap(&mut self, _: &dyn Guest, _: GuestCall) -> Result<(), TraceError> {
        Ok(())
    }

    /// Whether a run-time address is where code of ours is.
    fn is_own(&self, address: u64) -> bool;

    /// How far behind a site's [`Site::location`] is what the guest's `dyn_ftrace` has for it.
    fn record_offset(&self) -> u64;

    /// What the guest's `dyn_ftrace` has for the site (link address).
    fn record(&self, site: &Site) -> u64 {
        site.location.wrapping_add(self.record_offset())
    }

    /// Adds what is to be written for a site to do what `hook` says: in this order, and back in the
    /// opposite one. Verifies that it is disabled, or holds a call of the guest's own that can be
    /// shared, which is returned.
    fn edits(
        &self,
        view: &View<'_>,
        image: &Image,
        spot: &Spot,
        hook: Hook<'_>,
        edits: &mut Vec<Edit>,
    ) -> Result<Option<GuestCall>, SkipReason>;

    /// Puts code into the guest that exits by `trap` at any exception that is led to it.
    ///
    /// # Errors
    /// When there is no place for it.
    fn faults(&mut self, guest: &dyn Guest, trap: &[u8]) -> Result<Faults, TraceError>;

    /// Where a vCPU stands (run-time address) when [`Hook::Trap`] at the site exits.
    fn trap(&self, image: &Image, site: &Site) -> u64;

    /// Whether an exit (index) can be held in this run, as far as that was decided at the attach moment.
    fn is_prepared(&self, exit: usize) -> bool;

    /// Whether an exit (index) of a module has all that it takes to be held.
    fn has_way(&self, _exit: usize) -> bool {
        true
    }

    /// Whether exits must be rewritten before they run.
    fn rewrites(&self) -> bool {
        false
    }

    /// Rewrites exits of a module of which nothing has run, where that is so. What cannot be
    /// rewritten is told when it is to be held. `exits` have these numbers. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used; nothing has changed then.
    fn rewrite(
        &mut self,
        _guest: &dyn Guest,
        _view: &View<'_>,
        _image: &Image,
        _fresh: Fresh<'_>,
        _exits: &[(usize, Exit)],
        _rewrites: &[ModuleRewrite],
    ) -> Result<(), TraceError> {
        Ok(())
    }

    /// A module has come, with functions at these run-time addresses.
    fn module_came(&mut self, _image: &Image, _functions: &mut dyn Iterator<Item = u64>) {}

    /// A module (by the run-time address of its `struct module`) goes, or what of it is in `range`: these
    /// exits, of which none is held. Its code may run until the kernel frees it.
    fn module_goes(
        &mut self,
        _image: &Image,
        _module: u64,
        _range: Option<&Range<u64>>,
        _exits: &[usize],
    ) {
    }

    /// Makes the stubs that lead from these exits (indices) to the programs beside them, where
    /// there are none yet; what the records of each say, `None` for one that cannot have a stub (yet:
    /// before the guest has patched its alternatives). The guest may run: nobody executes them yet.
    ///
    /// # Errors
    /// When there is no place for them; nothing has changed then.
    fn stubs(
        &mut self,
        view: &View<'_>,
        image: &Image,
        exits: AllExits<'_>,
        wanted: &[(usize, u16)],
    ) -> Result<Vec<Option<ExitWord>>, TraceError>;

    /// What is to be written for an exit, with its index, to go through the stub to `program`.
    /// Verifies what is there.
    fn exit(
        &self,
        view: &View<'_>,
        image: &Image,
        exits: AllExits<'_>,
        exit: (usize, &Exit),
        program: u16,
    ) -> Result<ExitEdit, SkipReason>;

    /// Makes the stubs that lead from instructions that switch interrupts or preemption (indices) to
    /// the programs beside them, where there are none yet; what the records of each say, `None` for one
    /// that has no stub: there is no room for one of a module.
    ///
    /// # Errors
    /// When there is no place for those of the kernel; no instruction has changed then.
    fn switch_stubs(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        all: (&Kernel, AllSwitches<'_>),
        wanted: &[(usize, u16)],
    ) -> Result<Vec<Option<u32>>, TraceError>;

    /// Lets all stubs of an event lead to a program, where each has no program of its own. All vCPUs
    /// are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    fn lead_switches(&mut self, _: &dyn Guest, _: Switch, _: u16) -> Result<(), TraceError> {
        Ok(())
    }

    /// Lets stubs lead to nothing that lead to others than these programs: a place that is not found as
    /// it was left may still come to them. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    fn rest_switches(
        &mut self,
        _: &dyn Guest,
        _: &mut dyn Iterator<Item = u16>,
    ) -> Result<(), TraceError> {
        Ok(())
    }

    /// What is to be written for such an instruction, with its index, to go through the stub to
    /// `program`. Verifies what is there.
    fn switch(
        &self,
        view: &View<'_>,
        image: &Image,
        site: (usize, &SwitchSite, &Spot),
        program: u16,
    ) -> Result<ExitEdit, SkipReason>;

    /// Offset of the count of preemptions from the gs base, where there is such and it is known.
    fn preempt_count(&self) -> Option<u64> {
        None
    }

    /// Lets the guest stop, by `trap`, before it waits for the lock under which it changes its
    /// tracepoints, and before it gives that back. Nothing has been written to its code yet.
    ///
    /// # Errors
    /// When the kernel has another code there.
    fn tracepoint_brackets(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        trap: &[u8],
    ) -> Result<Stops<Moment>, TraceError>;

    /// Makes a probe of a tracepoint, of a program of [`Point::Probe`](vmtrace_trampolines::Point::Probe): its run-time
    /// address, and that which its records tell.
    ///
    /// # Errors
    /// When there is no place for it.
    fn probe(&mut self, guest: &dyn Guest, program: u16) -> Result<(u64, u64), TraceError>;

    /// What is to be written for a tracepoint to call a probe of ours (run-time address) before the
    /// guest's own, in this order. Verifies what is there.
    ///
    /// # Errors
    /// Why it has to be left alone.
    fn tracepoint(
        &mut self,
        view: &View<'_>,
        guest: &dyn Guest,
        image: &Image,
        hooks: &Hooks,
        probe: u64,
    ) -> Result<Vec<Edit>, PointReason>;

    /// Which addresses are the kernel's own, and how a branch of its is made to jump.
    fn jumps(&self) -> (&Own, Jump);

    /// The guest has chosen how it mitigates what its processors do: programs end as its own code
    /// does from now on. All vCPUs are paused.
    fn mitigate(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
    ) -> Result<(), TraceError>;

    /// From where a vCPU that stands at `address`, at the entry of a function, must
    /// go on to see the annex.
    fn resume(&self, guest: &dyn Guest, address: u64) -> Result<u64, GuestError>;

    /// Where vCPUs stop in programs.
    fn stops(&self) -> &Stops<ProgramStop>;

    /// From where a vCPU that has stopped in a program, which goes on with `call`, does what its site
    /// does by now: calls `program`. `None` where that cannot be.
    fn again(&self, program: u16, call: Option<GuestCall>) -> Option<u64>;

    /// Takes back what was written beside the edits, when no site is held; `freed`
    /// tells whether the guest has freed `.init.text`.
    fn remove(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        freed: bool,
    ) -> Result<(), GuestError>;
}
