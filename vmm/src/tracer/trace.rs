//! An attachment to a guest: the annex, the programs, and the sites that call them.

use super::annex::{Addressing, Layout, Memory};
use super::arch::{GuestCode, Hook, Installed, Options};
use super::changes::Changes;
use super::counters::{Counters, Keeper, Kind, SiteTables};
use super::dispatch;
use super::edit::{Restored, SkipReason};
use super::error::TraceError;
use super::exits::{AllExits, ExitSkip, ExitWord, HeldExits};
use super::ftrace::{self, Offsets, Record, Records};
use super::guest::Guest;
use super::image::Image;
use super::module_facts::{ModuleFacts, ModuleTraps};
use super::modules::Modules;
use super::patch::{Patcher, Place, Sharing, Skip};
use super::programs::{Duty, Programs, Tables};
use super::readable;
use super::ring::RingReader;
use super::room::Room;
use super::sets::Among;
use super::tasks::{self, Tasks};
use super::tracepoints::Points;
use super::view::View;
use crate::kernel::{Exits, Kernel};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmtrace_trampolines::{Condition, Field, Overflow, Program};

pub(super) fn exits_of(kernel: &Kernel) -> Result<&Exits, TraceError> {
    kernel.exits().map_err(|error| TraceError::Kernel(error.to_string()))
}

/// What attaching did, and how long it took.
#[derive(Clone, Debug, Default)]
pub struct AttachReport {
    /// Sites asked for.
    pub matched: usize,
    /// Sites that call a program now.
    pub patched: usize,
    /// Sites left alone, with reasons.
    pub skipped: Vec<Skip>,
    /// Time for verifying, writing and reading back all sites.
    pub patch_time: Duration,
}

/// What is left of an attachment to a kernel that is gone.
pub struct Past {
    modules: Modules,
}

/// The tracer's hold on one guest.
pub struct Attachment {
    pub(super) image: Image,
    /// Guest-physical address of some text of the kernel.
    pub(super) near: u64,
    pub(super) layout: Layout,
    pub(super) memory: Arc<dyn Memory>,
    pub(super) code: Box<dyn GuestCode>,
    pub(super) counters: Counters,
    tasks: tasks::Offsets,
    pub(super) overflow: Overflow,
    clock_hz: u64,
    pub(super) books: Offsets,
    pub(super) patcher: Patcher,
    /// Memory for the guest's own records, between two pauses.
    records: Vec<Record>,
    /// `None`: what is held is refused to the guest's own ftrace.
    pub(super) sharing: Option<Sharing>,
    pub(super) points: Points,
    /// `None`: modules come and go unseen.
    pub(super) module_traps: Option<ModuleTraps>,
    /// Found before, for those.
    pub(super) module_facts: Option<ModuleFacts>,
    pub(super) modules: Modules,
    programs: Programs,
    pub(super) exits: HeldExits,
    /// By index into [`Switches::all`](crate::kernel::preemptirq::Switches::all), or by the numbers
    /// of those of modules.
    pub(super) switches: HeldExits,
    /// What lets a vCPU stop in a program.
    pub(super) trap: &'static [u8],
    /// Programs know what they can read.
    readable: bool,
    pub(super) changes: Changes,
    /// The kernel has patched its alternatives, and we know.
    settled: bool,
}

impl Attachment {
    /// Puts the annex into the guest's kernel half: right after `ftrace_init`,
    /// when the kernel has finished its own page tables. No site is held yet.
    ///
    /// # Errors
    /// When anything is not as it should be; the guest is then unchanged.
    pub fn new(
        guest: &dyn Guest,
        kernel: &Kernel,
        image: Image,
        memory: Arc<dyn Memory>,
        options: Options<'_>,
    ) -> Result<Self, TraceError> {
        let books = Offsets::find(kernel)?;
        let target = dispatch::of(kernel.arch());
        let tasks = tasks::Offsets::find(kernel)?;
        let Installed { layout, code, area } =
            target.install(guest, kernel, &image, &memory, options)?;
        let power = target.multiplies_by_shifting();
        let counters = Counters::new(&memory, area, options.cpus, power);
        let (patcher, programs) = (Patcher::default(), Programs::default());
        let near = image.physical_of(kernel.sites().first().map_or(0, |site| site.location));
        Ok(Self {
            image,
            near,
            layout,
            memory,
            code,
            counters,
            tasks,
            overflow: options.overflow,
            clock_hz: options.clock_hz,
            books,
            patcher,
            records: Vec::new(),
            sharing: None,
            points: Points::default(),
            module_traps: None,
            module_facts: None,
            modules: Modules::new(kernel),
            programs,
            exits: HeldExits::default(),
            switches: HeldExits::default(),
            trap: &[],
            readable: false,
            changes: Changes::default(),
            settled: target.after_alternatives().is_none(),
        })
    }

    /// Keeps what it holds in this room. To be called before anything is held.
    #[must_use]
    pub fn with_room(self, room: Room) -> Self {
        let Room { patcher, exits, records, module_facts } = room;
        Self { patcher, exits, records, module_facts, ..self }
    }

    /// What another kernel that runs the same image has to know of this one, which is gone.
    #[must_use]
    pub fn into_past(self) -> Past {
        let mut modules = self.modules;
        modules.end();
        Past { modules }
    }

    /// Gives sites of modules the numbers that they had before. To be called before any module is loaded.
    #[must_use]
    pub fn with_past(self, past: Past) -> Self {
        Self { modules: past.modules, ..self }
    }

    /// From where a vCPU that stands at run-time `address`, at the entry of a
    /// function without arguments, must go on after [`Attachment::new`] so that it
    /// sees the annex. No other CPU may have been started.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn resume(&self, guest: &dyn Guest, address: u64) -> Result<u64, TraceError> {
        Ok(self.code.resume(guest, address)?)
    }

    /// One reader for each vCPU's ring. To be called once.
    #[must_use]
    pub fn readers(&self) -> Vec<RingReader> {
        let readers = RingReader::all(&self.layout, &self.memory, !self.overflow.drains());
        let waits = matches!(self.overflow, Overflow::Block(_));
        readers.iter().for_each(|reader| reader.let_wait(waits));
        readers
    }

    /// A reader of what tasks say of themselves.
    #[must_use]
    pub fn tasks(&self) -> Tasks {
        Tasks::new(self.image, self.tasks)
    }

    /// The running kernel.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Whether there is a trap instruction at run-time `address` that is none of a program of ours, where a task may
    /// come to one that is not armed any more.
    #[must_use]
    pub fn is_foreign_trap(&self, guest: &dyn Guest, address: u64, trap: &[u8]) -> bool {
        let holds = |(at, byte): (u64, &u8)| {
            let mut found = [0];
            let place = self.image.tables.translate(guest, at);
            place.is_ok_and(|place| guest.read(place, &mut found).is_ok()) && found[0] == *byte
        };
        !self.code.is_own(address) && (address..=u64::MAX).zip(trap).all(holds)
    }

    /// How programs find their control block.
    #[must_use]
    pub fn addressing(&self) -> Addressing {
        self.layout.addressing
    }

    /// The number of the program that does this, which is made if there is none yet. All vCPUs are
    /// paused.
    ///
    /// # Errors
    /// When there is no place for it, or guest memory cannot be used; no site has changed then.
    pub fn program(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        duty: &Duty,
    ) -> Result<u16, TraceError> {
        let (code, readable, image) = (&mut self.code, &mut self.readable, &self.image);
        let (counters, trap) = (&self.counters, self.trap);
        let clock_hz = self.clock_hz;
        let find = Tables { counters, slide: image.runtime(0), clock_hz, trap, kernel };
        self.programs.number(duty, &find, |program, next| {
            // Only now it is known what a tick is.
            let in_ticks = |condition: &Condition| condition.in_ticks(clock_hz);
            let condition = program.condition.as_ref().map(in_ticks);
            let program = &Program { condition, ..program.clone() };
            // Not before it is needed: it takes a walk through page tables.
            let reads = program.fields.iter().any(|field| matches!(field, Field::Read(_)));
            if reads && !std::mem::replace(readable, true) {
                let found = readable::find(guest, kernel, image);
                log::debug!("what pointers can lead to: {found:x?}");
                code.allow(found);
            }
            code.add(guest, program, next)
        })
    }

    /// The numbers of tables of this kind in which programs count calls of these sites for a tracer; tables that
    /// there are not yet are made. Sites of modules that are gone have none.
    ///
    /// # Errors
    /// When there is no room, or two of them cannot be told apart. Nothing has changed in the guest.
    pub fn tables(
        &mut self,
        kernel: &Kernel,
        (tracer, kind): (u8, Kind),
        sites: &[usize],
    ) -> Result<SiteTables, TraceError> {
        let target = dispatch::of(kernel.arch());
        let told = sites.iter().filter_map(|&site| {
            let spot = self.modules.spot(kernel, &self.image, site)?;
            Some((target.return_address(&spot.site), site))
        });
        if kind == Kind::Callers {
            let told: Vec<_> = told.map(|(told, site)| (self.image.runtime(told), site)).collect();
            let table = self.counters.callers(tracer, told.iter().copied())?;
            let sites = told.into_iter().map(|(_, site)| (site, table));
            return Ok(sites.collect::<Vec<_>>().into());
        }
        self.counters.tables((tracer, kind), told.collect())
    }

    /// Lets programs that are made from now on follow tasks. To be called once.
    ///
    /// # Errors
    /// When there is no room for their set.
    pub fn follow(&mut self) -> Result<(), TraceError> {
        let family = self.counters.family().ok_or(TraceError::Family)?;
        self.code.follow(family);
        Ok(())
    }

    /// The tables in which programs count.
    pub fn counters(&mut self) -> &mut Counters {
        &mut self.counters
    }

    /// The same as [`Counters::mark_those_to`] with link addresses. All vCPUs are paused.
    pub fn mark_those_to(&self, targets: &BTreeMap<Keeper, Vec<u64>>, all: bool) {
        let at = |list: &Vec<u64>| list.iter().map(|&link| self.image.runtime(link)).collect();
        let targets = targets.iter().map(|(&keeper, list)| (keeper, at(list))).collect();
        self.counters.mark_those_to(&targets, all);
    }

    /// All that is done at a site that calls a program, by the programs' numbers.
    #[must_use]
    pub fn duties(&self) -> &[Duty] {
        self.programs.whole()
    }

    /// All programs made so far, by their numbers: what the records of each have.
    #[must_use]
    pub fn programs(&self) -> &[Duty] {
        self.programs.all()
    }

    /// What is traced has changed: programs to which nothing leads by now, and that are not among the `planned`, rest.
    pub fn rest_programs(&mut self, planned: impl Iterator<Item = u16>) {
        let exits = self.exits.programs().chain(self.switches.programs());
        let used = self.patcher.programs().chain(exits).chain(self.points.programs());
        self.programs.rest(used.chain(planned));
    }

    /// Lets programs that rest become somebody else's: the rings have nothing any more of what was written before
    /// they came to rest.
    pub fn are_taken(&mut self) {
        self.programs.are_taken();
    }

    /// Lets `sites` (indices into `kernel.sites()`, or numbers of those of modules) call the programs with these numbers. All
    /// vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used half-way; the sites are then as before.
    pub fn enable(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        sites: &[(usize, u16)],
    ) -> Result<AttachReport, TraceError> {
        if sites.is_empty() {
            return Ok(AttachReport::default());
        }
        let start = Instant::now();
        let before = self.patcher.len();
        let hooks = sites.iter().map(|&(site, program)| (site, Hook::Call(program)));
        let skipped = self.hold(guest, kernel, hooks)?;
        Ok(AttachReport {
            matched: sites.len(),
            patched: self.patcher.len() - before,
            skipped,
            patch_time: start.elapsed(),
        })
    }

    pub(super) fn hold<'a>(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        sites: impl IntoIterator<Item = (usize, Hook<'a>), IntoIter: Clone>,
    ) -> Result<Vec<Skip>, TraceError> {
        let room = std::mem::take(&mut self.records);
        let records = Records::read(guest, &self.image, kernel, &self.books, room)?;
        log::debug!("the guest's ftrace knows {} sites", records.len());
        let sites = sites.into_iter();
        self.chain(guest, kernel, &records, sites.clone());
        let view = self.view(guest, &records);
        let (image, modules) = (&self.image, &self.modules);
        let place = Place { view, image, kernel, modules, code: &*self.code };
        let held = self.patcher.hold(&place, &records, sites);
        self.records = records.into_room();
        self.changes.look(&self.patcher, &self.counters);
        Ok(held?)
    }

    /// Of sites and the guest's records of them.
    pub(super) fn view<'a>(&self, guest: &'a dyn Guest, records: &Records) -> View<'a> {
        let text = self.near;
        View::ram(guest, [text, records.some_place().unwrap_or(text)])
    }

    /// The function at whose first call [`Attachment::settle`] can be called; `None` where there is
    /// nothing to wait for.
    #[must_use]
    pub fn settles_at(kernel: &Kernel) -> Option<&'static str> {
        dispatch::of(kernel.arch()).after_alternatives()
    }

    /// The guest has patched its alternatives: its exits can be held from now on, and programs end
    /// as its own code does. All vCPUs are paused.
    ///
    /// # Errors
    /// When that is not so, or guest memory cannot be used.
    pub fn settle(&mut self, guest: &dyn Guest, kernel: &Kernel) -> Result<(), TraceError> {
        const DONE: &str = "alternatives_patched";
        if let Some(variable) = kernel.symbols().address(DONE) {
            let mut done = [0; 4];
            guest.read(self.image.physical_of(variable), &mut done)?;
            if u32::from_le_bytes(done) == 0 {
                return Err(TraceError::Code("its alternatives are not patched yet"));
            }
        }
        self.code.mitigate(guest, &self.image, kernel)?;
        self.settled = true;
        Ok(())
    }

    /// Whether the instruction at a link address returns as the guest's own do, when it has patched its alternatives
    /// (x86-64). One that is changed meanwhile does not.
    pub fn is_return(&self, guest: &dyn Guest, address: u64) -> bool {
        let view = View::ram(guest, [self.near; 2]);
        self.settled && self.code.is_return(&view, &self.image, address)
    }

    /// Whether exits can be held.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.settled
    }

    /// Whether returns of a function (index into [`Kernel::sites`]) can be held in this run, as far
    /// as that was decided when it began: see [`Options::returns`]. It is true for functions that
    /// have no exits as well.
    #[must_use]
    pub fn is_prepared(&self, kernel: &Kernel, site: usize) -> bool {
        let Ok(exits) = kernel.exits() else { return true };
        if self.modules.is_of_module(site) {
            return !self.code.rewrites() || self.modules.was_asked(site);
        }
        // They are in the order of their sites.
        let first = exits.all().partition_point(|exit| (exit.site as usize) < site);
        let mut own = first..first + exits.of(site).len();
        own.is_empty() || own.any(|exit| self.code.is_prepared(exit))
    }

    /// Makes the stubs that lead from exits (indices into
    /// [`Exits::all`](crate::kernel::Exits::all), and numbers of those of modules) to the programs beside them; what the records of
    /// each say, if there can be one. The guest may run. Before [`Attachment::settle`] some exits have
    /// none yet: what they do is for the guest to decide.
    ///
    /// # Errors
    /// When there is no place for them; nothing has changed then.
    pub fn stubs(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        exits: &[(usize, u16)],
    ) -> Result<Vec<Option<ExitWord>>, TraceError> {
        let all = AllExits { kernel: exits_of(kernel)?, modules: &self.modules };
        let view = View::with_annex(guest, self.near, &*self.memory);
        self.code.stubs(&view, &self.image, all, exits)
    }

    /// The exits (indices into [`Exits::all`](crate::kernel::Exits::all)) that are ours, with the
    /// program of each.
    pub fn exits(&self) -> impl Iterator<Item = (usize, u16)> + Clone {
        self.exits.with_programs()
    }

    /// How many exits are ours.
    #[must_use]
    pub fn held_exits(&self) -> usize {
        self.exits.len()
    }

    /// Lets exits go through programs, of which [`Attachment::stubs`] has made stubs. All vCPUs are
    /// paused. Returns what was skipped.
    ///
    /// # Errors
    /// When guest memory cannot be used half-way; the exits are then as before.
    pub fn enable_exits(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        exits: &[(usize, u16)],
    ) -> Result<Vec<ExitSkip>, TraceError> {
        let all = AllExits { kernel: exits_of(kernel)?, modules: &self.modules };
        let view = View::with_annex(guest, self.near, &*self.memory);
        let edit = |index: usize, program| {
            let exit = all.get(index)?;
            Some(self.code.exit(&view, &self.image, all, (index, exit), program))
        };
        let skipped = self.exits.hold(&view, exits, edit)?;
        Ok(skipped.into_iter().map(|(exit, reason)| ExitSkip { exit, reason }).collect())
    }

    /// Gives exits (indices) back. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn disable_exits(
        &mut self,
        guest: &dyn Guest,
        exits: &[usize],
    ) -> Result<Restored, TraceError> {
        if exits.is_empty() {
            return Ok(Restored::default());
        }
        let mut exits = Among::new(exits.to_vec());
        let view = View::with_annex(guest, self.near, &*self.memory);
        Ok(self.exits.release_if(&view, |exit| exits.contains(&exit))?)
    }

    /// Gives `sites` back; they can be enabled again at any time. All vCPUs are
    /// paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn disable(&mut self, guest: &dyn Guest, sites: &[usize]) -> Result<Restored, TraceError> {
        if sites.is_empty() {
            return Ok(Restored::default());
        }
        let mut sites = Among::new(sites.to_vec());
        let view = View::ram(guest, [self.near; 2]);
        let restored = self.patcher.release_if(&view, |site| sites.contains(&site));
        self.changes.look(&self.patcher, &self.counters);
        Ok(restored?)
    }

    /// Puts a trap (instructions that exit to the VMM) on a site: the guest stops
    /// when the function is first called. Returns the run-time address of the trap,
    /// or why there is none. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn arm(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
        site: usize,
        trap: &[u8],
    ) -> Result<Result<u64, SkipReason>, TraceError> {
        let skipped = self.hold(guest, kernel, [(site, Hook::Trap(trap))])?;
        Ok(match (skipped.first(), kernel.sites().get(site)) {
            (None, Some(site)) => Ok(self.code.trap(&self.image, site)),
            (Some(skip), _) => Err(skip.reason),
            (None, None) => Err(SkipReason::Unknown),
        })
    }

    /// Takes the trap of [`Attachment::arm`] away. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn disarm(&mut self, guest: &dyn Guest, site: usize) -> Result<(), TraceError> {
        self.disable(guest, &[site])?;
        self.keep_from_taking(site);
        Ok(())
    }

    /// The sites (indices) that write records, with the program of each.
    pub fn sites(&self) -> impl Iterator<Item = (usize, u16)> + Clone {
        self.patcher.sites_with_programs()
    }

    /// How many sites are ours.
    #[must_use]
    pub fn held(&self) -> usize {
        self.patcher.len()
    }

    /// Gives the sites of `.init.text` back, before the guest frees that memory.
    /// All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn release_init(&mut self, guest: &dyn Guest) -> Result<Restored, TraceError> {
        self.changes.init_is_over();
        self.leave_init(guest)
    }

    /// The same at once, where it will not be seen when the guest frees it.
    ///
    /// # Errors
    /// As [`Attachment::release_init`].
    pub fn leave_init(&mut self, guest: &dyn Guest) -> Result<Restored, TraceError> {
        let view = View::ram(guest, [self.near; 2]);
        let restored = self.patcher.release_init(&view);
        self.changes.look(&self.patcher, &self.counters);
        Ok(restored?)
    }

    /// Gives every site back, for good. Programs and rings stay mapped: a
    /// task may be interrupted in them. All vCPUs are paused.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub fn release_all(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
    ) -> Result<Restored, TraceError> {
        // All, even if one fails. Exits first: they may lie over what leads through other stubs.
        let text = self.near;
        let annex = View::with_annex(guest, text, &*self.memory);
        let exits = self.exits.release_if(&annex, |_| true);
        let switches = self.switches.release_if(&annex, |_| true);
        let resting = self.code.rest_switches(guest, &mut std::iter::empty());
        let points = self.points.end(guest, &self.image, &annex);
        let restored = self.patcher.release_if(&View::ram(guest, [text; 2]), |_| true);
        let programs = self.code.stops().remove(&annex);
        let code = self.code.remove(guest, &self.image, kernel, self.patcher.freed());
        let modules = self.end_watching_modules(guest, kernel);
        let sharing = self.end_sharing(guest);
        self.changes.look(&self.patcher, &self.counters);
        let (restored, switches) = (restored?, switches?);
        exits.and(programs).and(code)?;
        resting?;
        if !(sharing? && modules?) {
            return Err(TraceError::Ftrace("its code is not as it was kept"));
        }
        if !switches.foreign.is_empty() {
            return Err(TraceError::Code("where it switches interrupts is not as it was left"));
        }
        if !points? {
            return Err(TraceError::Code("what it has of its tracepoints is not as it was left"));
        }
        self.allow_again(guest, kernel)?;
        Ok(restored)
    }

    /// Lets the guest's own ftrace use the sites that were refused to it and are not held, if none of its tracers is
    /// active. All vCPUs are paused.
    pub(super) fn allow_again(
        &mut self,
        guest: &dyn Guest,
        kernel: &Kernel,
    ) -> Result<(), TraceError> {
        if self.patcher.is_flagging() && ftrace::is_idle(guest, &self.image, kernel) {
            let records = Records::read(guest, &self.image, kernel, &self.books, Vec::new())?;
            let view = self.view(guest, &records);
            let (image, modules) = (&self.image, &self.modules);
            let place = Place { view, image, kernel, modules, code: &*self.code };
            self.patcher.forget(&place, &records)?;
        }
        Ok(())
    }
}
