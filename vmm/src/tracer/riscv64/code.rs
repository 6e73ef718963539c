//! The programs in a riscv64 guest, and how its two kinds of sites call them.

use super::calls;
use super::gap::{Gap, MAX_TRAP, NO_TRAP, OpsLayout, TRAP_ENTRY};
use super::landing::Landings;
use super::map;
use super::module_returns;
use super::returns::Returns;
use super::sharing::{self, By, Sharing};
use super::site::{self, Aim};
use super::switch_stubs::SwitchStubs;
use super::tracepoint;
use crate::kernel::preemptirq::{Switch, SwitchSite};
use crate::kernel::tracepoints::Hooks;
use crate::kernel::{Exit, Kernel, ModuleRewrite, Site, SiteSection};
use crate::tracer::annex::{CODE, Memory, OPS, OPS_SIZE};
use crate::tracer::arch::{Faults, GuestCode, Hook};
use crate::tracer::call::Call;
use crate::tracer::edit::{Edit, ExitEdit, SkipReason};
use crate::tracer::error::TraceError;
use crate::tracer::exits::{AllExits, ExitWord};
use crate::tracer::ftrace::GuestCall;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::module_calls::{self, ModuleMoment};
use crate::tracer::modules::Fresh;
use crate::tracer::spot::Spot;
use crate::tracer::stops::{Moment, ProgramStop, Stops};
use crate::tracer::switch_places::AllSwitches;
use crate::tracer::tracepoints::guest::{Jump, Own, Places, PointReason, Probes};
use crate::tracer::view::View;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use vm_memory::Bytes;
use vmtrace_trampolines::family::Strangers;
use vmtrace_trampolines::riscv64::encode::register::{T3, ZERO};
use vmtrace_trampolines::riscv64::encode::{j, jalr, lui, split};
use vmtrace_trampolines::riscv64::{Values, compile};
use vmtrace_trampolines::{Overflow, Program, Readable};

/// How a site finds its way, as the kernel was built.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// By its second instruction, to an entry of a table of jumps; the guest's own calls lead to
    /// `caller` (`ftrace_caller`).
    Patchable { caller: u64 },
    /// By the literal before the function, which `caller` (`ftrace_caller`) follows
    /// to an ops; `none` is the ops of a site without tracer.
    CallOps { caller: u64, none: u64, ops: OpsLayout },
}

/// How a program is called.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    /// By a function's entry, at this run-time address: where the kernel has no CALL_OPS, through
    /// this entry of the tables.
    Entry(u64, u16),
    /// By the stub of an exit, at this run-time address.
    Return(u64),
}

impl Way {
    fn address(self) -> u64 {
        match self {
            Self::Entry(address, _) | Self::Return(address) => address,
        }
    }
}

/// The same program, which goes on at a run-time address in place of its ends; `None` when that is
/// out of reach.
fn going_on(code: vmtrace_trampolines::Code, to: u64) -> Option<Vec<u8>> {
    let vmtrace_trampolines::Code { mut bytes, endings, .. } = code;
    let (upper, lower) = split(to.cast_signed())?;
    let len = bytes.len();
    for ending in endings {
        let behind = i32::try_from(len.checked_sub(ending)?).ok()?;
        bytes.get_mut(ending..ending + 4)?.copy_from_slice(&j(behind).to_le_bytes());
    }
    for word in [lui(T3, upper), jalr(ZERO, T3, lower)] {
        bytes.extend(word.to_le_bytes());
    }
    Some(bytes)
}

pub(super) struct Code {
    pub(super) gap: Gap,
    pub(super) returns: Returns,
    pub(super) kind: Kind,
    pub(super) values: Values,
    pub(super) overflow: Overflow,
    pub(super) memory: Arc<dyn Memory>,
    /// Run-time address of the annex.
    pub(super) annex: u64,
    /// All programs, by number.
    pub(super) programs: Vec<Way>,
    /// What each does, and the one that it goes on to.
    pub(super) sources: Vec<(Program, Option<u16>)>,
    /// Sites are shared with the guest's own ftrace.
    pub(super) sharing: Option<Sharing>,
    pub(super) landings: Landings,
    /// The entries of the tables up to here are in use.
    pub(super) entries: u16,
    /// Arrays of probes beside the programs, by what is in them. None ever goes away.
    pub(super) arrays: HashMap<Vec<u64>, u64>,
    pub(super) switches: SwitchStubs,
    pub(super) program_stops: Stops<ProgramStop>,
    pub(super) own: Own,
}

impl Code {
    /// Run-time address of the ops of a program; without one, of that of traps.
    pub(super) fn ops(&self, program: Option<u16>) -> u64 {
        self.annex + OPS + program.map_or(0, |number| u64::from(number) + 1) * OPS_SIZE
    }

    /// How a site comes to a program that goes on with what the guest calls. A trap does not go on:
    /// the site is executed again.
    pub(super) fn beside(&self, program: Option<u16>, guests: GuestCall) -> Result<By, SkipReason> {
        let sharing = self.sharing.as_ref().ok_or(SkipReason::NoStub)?;
        let by = match (program, self.kind) {
            (Some(number), _) => sharing.get(number, guests.target).map(|chain| chain.by),
            (None, Kind::Patchable { .. }) => Some(By::Entry(TRAP_ENTRY)),
            (None, Kind::CallOps { .. }) => sharing.trap(guests.target).map(By::Ops),
        };
        by.ok_or(SkipReason::NoStub)
    }

    /// What is in a site as what its guest calls. An ops of ours is none of the guest's: a chain to a
    /// chain would be given back as one.
    pub(super) fn shared(&self, target: u64) -> Option<GuestCall> {
        let shares = self.sharing.is_some() && !self.is_own(target);
        shares.then_some(GuestCall { target, jumps: false })
    }

    /// The next entry of the tables that can be a program's, if there is one.
    fn next_entry(&self) -> Option<u16> {
        (self.entries..TRAP_ENTRY).find(|&entry| !self.landings.keeps(entry))
    }

    /// Takes note of where a vCPU stops in a program that was put at a run-time address of the gap.
    fn note_stop(
        &mut self,
        program: &Program,
        address: u64,
        stop: Option<usize>,
        call: Option<GuestCall>,
    ) -> Result<(), TraceError> {
        let physical = self.gap.physical(address);
        self.program_stops.note(program, (address, physical), stop, call, &NO_TRAP)
    }

    /// Writes the ops that calls `target`, where the kernel has such.
    pub(super) fn put_ops(&self, program: Option<u16>, target: u64) -> Result<(), TraceError> {
        let Kind::CallOps { ops, .. } = self.kind else { return Ok(()) };
        let at = usize::try_from(self.ops(program) - self.annex).map_err(|_| TraceError::Annex)?;
        let written = self.memory.slice().write_slice(&ops.ops(target), at);
        written.map_err(|_| TraceError::Annex)
    }

    /// From the site of the function at a run-time address to the tables.
    pub(super) fn aim(&self, entry: u64) -> Option<Aim> {
        Aim::new(entry, self.gap.table())
    }
}

/// Bytes from what the table has of a site to the function's entry.
pub(super) fn front(site: &Site) -> usize {
    usize::try_from(site.entry.wrapping_sub(site.location)).unwrap_or(0)
}

/// The guest's memory, with a window at its sites.
pub(super) fn text<'a>(guest: &'a dyn Guest, kernel: &Kernel, image: &Image) -> View<'a> {
    let text = kernel.sites().first().map_or(0, |site| image.physical_of(site.entry));
    View::ram(guest, [text; 2])
}

pub(super) fn instructions([a, b, c, d, e, f, g, h]: [u8; site::LEN]) -> [u32; 2] {
    [[a, b, c, d], [e, f, g, h]].map(u32::from_le_bytes)
}

/// More than any function has in which a call is looked for, in bytes.
const LONGEST: usize = 64 << 10;

impl GuestCode for Code {
    fn allow(&mut self, readable: Readable) {
        self.values.readable = readable;
    }

    fn follow(&mut self, family: u64) {
        self.values.followed = Some(family);
    }

    fn notes_strangers(&self, kernel: &Kernel, (caller, callee): (&str, &str)) -> bool {
        let symbols = kernel.symbols();
        let (Some(start), Some(callee)) = (symbols.address(caller), symbols.address(callee)) else {
            return false;
        };
        let body = kernel.code(start, LONGEST).unwrap_or_default();
        calls::calls(start, body).iter().any(|call| call.target == callee)
    }

    fn note_strangers(&mut self, strangers: Strangers) {
        self.values.strangers = Some(strangers);
    }

    fn add(
        &mut self,
        guest: &dyn Guest,
        program: &Program,
        next: Option<u16>,
    ) -> Result<(), TraceError> {
        let full = TraceError::Full(self.programs.len());
        let mut stop = None;
        let mut code = || {
            let code = compile(program, self.overflow, &self.values)?;
            stop = code.stop;
            let Some(next) = next else { return Ok(code.bytes) };
            let next = self.programs.get(usize::from(next)).map(|way| way.address());
            next.and_then(|next| going_on(code, next)).ok_or_else(|| full.clone())
        };
        if program.point.returns() {
            let address = self.returns.put(&code()?)?.ok_or(full.clone())?;
            let place = (address, self.returns.physical(address));
            self.program_stops.note(program, place, stop, None, &NO_TRAP)?;
            self.programs.push(Way::Return(address));
            self.sources.push((program.clone(), next));
            return Ok(());
        }
        let entry = match self.kind {
            Kind::Patchable { .. } => self.next_entry().ok_or_else(|| full.clone())?,
            Kind::CallOps { .. } => 0,
        };
        let address = self.gap.put(guest, &code()?)?.ok_or(full.clone())?;
        self.note_stop(program, address, stop, None)?;
        match self.kind {
            Kind::Patchable { .. } => {
                self.gap.aim(guest, entry, address)?;
                self.entries = entry + 1;
            }
            Kind::CallOps { .. } => self.put_ops(Some(program.number), address)?,
        }
        self.programs.push(Way::Entry(address, entry));
        self.sources.push((program.clone(), next));
        Ok(())
    }

    fn bracket(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        trap: &[u8],
    ) -> Result<Stops<Moment>, TraceError> {
        let place = (image, kernel);
        let (sharing, brackets) = match self.kind {
            Kind::CallOps { caller, ops, .. } => {
                let sharing = Sharing::with_literals(guest, image, caller, ops)?;
                (sharing, sharing::around_updates(&mut self.gap, guest, place, trap)?)
            }
            Kind::Patchable { .. } => {
                self.landings.open(&mut self.gap, guest)?;
                let brackets = sharing::around_changes(&mut self.gap, guest, place, trap)?;
                (Sharing::new(), brackets)
            }
        };
        self.sharing = Some(sharing);
        Ok(brackets)
    }

    fn prepares(&self) -> bool {
        matches!(self.kind, Kind::Patchable { .. })
    }

    fn calls(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        calls: &[(ModuleMoment, Call)],
        trap: &[u8],
    ) -> Result<Stops<ModuleMoment>, TraceError> {
        let image = (image, kernel);
        calls::lead(&mut self.gap, guest, image, calls, trap, &module_calls::UNKNOWN)
    }

    fn prepare(
        &mut self,
        guest: &dyn Guest,
        view: &View<'_>,
        image: &Image,
        spots: &[Spot],
    ) -> Result<(), TraceError> {
        self.give_first(guest, view, image, spots)
    }

    fn unprepare(
        &mut self,
        view: &View<'_>,
        image: &Image,
        spots: &[Spot],
    ) -> Result<(), GuestError> {
        self.give_back(view, image, spots)
    }

    fn guest_call(&self, view: &View<'_>, image: &Image, spot: &Spot) -> Option<GuestCall> {
        let found = instructions(spot.load(view, front(&spot.site)).ok()?);
        let entry = image.runtime(spot.site.entry);
        match self.kind {
            Kind::Patchable { caller } => {
                // The first is ours already.
                let is_prepared = found[0] == self.aim(entry)?.first();
                let theirs = self.theirs(entry, found, caller).filter(|_| is_prepared)?;
                self.shared(site::called(entry, theirs)?)
            }
            Kind::CallOps { caller, none, .. } => {
                let [first, second] = site::call(entry, caller)?;
                let literal = u64::from_le_bytes(spot.load(view, 0).ok()?);
                let is_called = site::is(found, [first, second]) && literal != none;
                is_called.then(|| self.shared(literal))?
            }
        }
    }

    fn chain(
        &mut self,
        guest: &dyn Guest,
        program: u16,
        call: GuestCall,
    ) -> Result<(), TraceError> {
        let full = TraceError::Full(self.programs.len());
        let known = |sharing: &Sharing| sharing.get(program, call.target);
        if self.sharing.as_ref().and_then(known).is_some() {
            return Ok(());
        }
        let source = self.sources.get(usize::from(program)).cloned();
        let (source, next) = source.ok_or_else(|| full.clone())?;
        if let Some(next) = next {
            // Who comes last goes on with the guest's call.
            self.chain(guest, next, call)?;
        }
        let entry = self.next_entry();
        let sharing = self.sharing.as_mut().ok_or_else(|| full.clone())?;
        let way = match self.landings.stub(call.target) {
            // From anywhere in our code.
            Some(stub) => stub,
            None => sharing.way(&mut self.gap, guest, call.target)?,
        };
        let next = next.and_then(|next| sharing.get(next, call.target));
        let code = compile(&source, self.overflow, &self.values)?;
        let stop = code.stop;
        let code =
            going_on(code, next.map_or(way, |next| next.code)).ok_or_else(|| full.clone())?;
        let at = self.gap.put(guest, &code)?.ok_or_else(|| full.clone())?;
        let entries = &mut self.entries;
        let aim = |gap: &Gap| {
            let entry = entry.ok_or(full)?;
            gap.aim(guest, entry, at)?;
            *entries = entry + 1;
            Ok(entry)
        };
        sharing.chain(&mut self.gap, guest, (program, call.target, at), aim)?;
        self.note_stop(&source, at, stop, Some(call))
    }

    fn chain_trap(&mut self, guest: &dyn Guest, call: GuestCall) -> Result<(), TraceError> {
        let stub = self.gap.trap_stub();
        match &mut self.sharing {
            Some(sharing) => sharing.put_trap(&mut self.gap, guest, (call.target, stub)),
            None => Ok(()),
        }
    }

    /// Or ops of ours.
    fn is_own(&self, address: u64) -> bool {
        let annex = self.annex..map::code(self.annex) + CODE;
        self.gap.contains(address) || annex.contains(&address)
    }

    /// At the function's entry, or with the literal before it at the second instruction.
    fn record_offset(&self) -> u64 {
        match self.kind {
            Kind::Patchable { .. } => 0,
            Kind::CallOps { .. } => (site::LITERAL + site::SECOND) as u64,
        }
    }

    fn edits(
        &self,
        view: &View<'_>,
        image: &Image,
        spot: &Spot,
        hook: Hook<'_>,
        edits: &mut Vec<Edit>,
    ) -> Result<Option<GuestCall>, SkipReason> {
        let (program, way) = match hook {
            Hook::Call(program) => match self.programs.get(usize::from(program)) {
                Some(&Way::Entry(_, way)) => (Some(program), way),
                Some(Way::Return(_)) | None => return Err(SkipReason::OutOfReach),
            },
            Hook::Trap(trap) => {
                let quiet = NO_TRAP.get(..trap.len()).ok_or(SkipReason::OutOfReach)?;
                let edit = Edit::new(self.gap.trap().1, quiet, trap);
                edits.push(edit.ok_or(SkipReason::OutOfReach)?);
                (None, TRAP_ENTRY)
            }
        };
        match self.kind {
            Kind::Patchable { .. } => self.by_tables(view, image, spot, (program, way), edits),
            Kind::CallOps { caller, none, .. } => {
                self.by_literal(view, image, spot, (caller, none), program, edits)
            }
        }
    }

    fn faults(&mut self, guest: &dyn Guest, trap: &[u8]) -> Result<Faults, TraceError> {
        let full = TraceError::Full(self.programs.len());
        let table = self.gap.put(guest, trap)?.ok_or(full)?;
        Ok(Faults { table, traps: vec![table] })
    }

    fn trap(&self, _: &Image, _: &Site) -> u64 {
        self.gap.trap().0
    }

    fn is_prepared(&self, exit: usize) -> bool {
        self.returns.is_prepared(exit)
    }

    fn has_way(&self, exit: usize) -> bool {
        self.returns.has_way(exit)
    }

    fn rewrites(&self) -> bool {
        true
    }

    fn rewrite(
        &mut self,
        guest: &dyn Guest,
        view: &View<'_>,
        image: &Image,
        fresh: Fresh<'_>,
        exits: &[(usize, Exit)],
        rewrites: &[ModuleRewrite],
    ) -> Result<(), TraceError> {
        let places = (&mut self.returns, &mut self.gap);
        module_returns::rewrite(places, guest, (view, image), fresh, exits, rewrites)
    }

    fn module_came(&mut self, image: &Image, functions: &mut dyn Iterator<Item = u64>) {
        self.returns.of_modules.come(image, functions);
    }

    fn module_goes(
        &mut self,
        image: &Image,
        module: u64,
        range: Option<&Range<u64>>,
        exits: &[usize],
    ) {
        self.returns.of_modules.leave(image, module, range, exits);
    }

    fn stubs(
        &mut self,
        _: &View<'_>,
        image: &Image,
        exits: AllExits<'_>,
        wanted: &[(usize, u16)],
    ) -> Result<Vec<Option<ExitWord>>, TraceError> {
        let word = |&(index, _): &(usize, u16)| {
            exits.get(index).and_then(|exit| self.returns.named(image, (index, exit)))
        };
        Ok(wanted.iter().map(word).collect())
    }

    fn exit(
        &self,
        view: &View<'_>,
        _: &Image,
        _: AllExits<'_>,
        exit: (usize, &Exit),
        program: u16,
    ) -> Result<ExitEdit, SkipReason> {
        match self.programs.get(usize::from(program)) {
            Some(&Way::Return(program)) => self.returns.edit(view, exit.0, program).map(Into::into),
            Some(Way::Entry(..)) | None => Err(SkipReason::NoStub),
        }
    }

    fn switch_stubs(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        (kernel, all): (&Kernel, AllSwitches<'_>),
        wanted: &[(usize, u16)],
    ) -> Result<Vec<Option<u32>>, TraceError> {
        let place = (image, kernel);
        let word = |&(index, _): &(usize, u16)| {
            let Some(site) = all.get(index) else { return Ok(None) };
            self.switches.make((guest, &mut self.gap), place, site)
        };
        wanted.iter().map(word).collect()
    }

    fn lead_switches(
        &mut self,
        guest: &dyn Guest,
        switch: Switch,
        program: u16,
    ) -> Result<(), TraceError> {
        let Some(&Way::Entry(to, _)) = self.programs.get(usize::from(program)) else {
            return Err(TraceError::Full(self.programs.len()));
        };
        self.switches.lead((guest, &self.gap), switch, (program, to))
    }

    fn rest_switches(
        &mut self,
        guest: &dyn Guest,
        programs: &mut dyn Iterator<Item = u16>,
    ) -> Result<(), TraceError> {
        self.switches.rest((guest, &self.gap), programs)
    }

    fn switch(
        &self,
        view: &View<'_>,
        image: &Image,
        (_, site, spot): (usize, &SwitchSite, &Spot),
        _: u16,
    ) -> Result<ExitEdit, SkipReason> {
        self.switches.edit(view, image, (site, spot))
    }

    fn tracepoint_brackets(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        trap: &[u8],
    ) -> Result<Stops<Moment>, TraceError> {
        tracepoint::brackets(&mut self.gap, guest, image, kernel, trap)
    }

    fn probe(&mut self, guest: &dyn Guest, program: u16) -> Result<(u64, u64), TraceError> {
        let full = || TraceError::Full(self.programs.len());
        let Some(&Way::Entry(target, _)) = self.programs.get(usize::from(program)) else {
            return Err(full());
        };
        let made = tracepoint::probe(self.gap.next_small(), target);
        let (code, word) = made.ok_or_else(full)?;
        let address = self.gap.put_small(guest, &code)?.ok_or_else(full)?;
        Ok((address, word))
    }

    fn tracepoint(
        &mut self,
        view: &View<'_>,
        guest: &dyn Guest,
        image: &Image,
        hooks: &Hooks,
        probe: u64,
    ) -> Result<Vec<Edit>, PointReason> {
        let places = Places { guest, view, image, own: &self.own };
        let probes = Probes::read(&places, hooks)?;
        let words = probes.behind(probe);
        let array = match self.arrays.get(&words) {
            Some(&array) => array,
            None => {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                let put = self.gap.put_small(guest, &bytes).map_err(|_| PointReason::NoRam)?;
                let array = put.ok_or(PointReason::OutOfReach)?;
                self.arrays.insert(words, array);
                array
            }
        };
        tracepoint::edits(&places, hooks, array, &probes)
    }

    fn jumps(&self) -> (&Own, Jump) {
        (&self.own, tracepoint::jump)
    }

    fn mitigate(&mut self, _: &dyn Guest, _: &Image, _: &Kernel) -> Result<(), TraceError> {
        Ok(())
    }

    fn resume(&self, guest: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        self.gap.resume(guest, address)
    }

    fn stops(&self) -> &Stops<ProgramStop> {
        &self.program_stops
    }

    /// As behind the trap of a site, which is executed again.
    fn again(&self, _: u16, _: Option<GuestCall>) -> Option<u64> {
        Some(self.gap.trap().0 + MAX_TRAP as u64)
    }

    fn remove(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        freed: bool,
    ) -> Result<(), GuestError> {
        let kept = |site: &&Site| !(freed && site.section == SiteSection::InitText);
        let sites = kernel.sites().iter().filter(kept);
        let spots: Vec<_> = sites.map(|&site| Spot::kernel(image, site)).collect();
        self.unprepare(&text(guest, kernel, image), image, &spots)
    }
}
