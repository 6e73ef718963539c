//! Installs the annex and the programs in an x86-64 guest.

use super::context::{self, Context};
use super::exit_stubs::{Form, Stub, Stubs, form, named, place, put_stub};
use super::switch_stubs::{self, SwitchStubs};
use super::{brackets, calls, faults, map, site, tracepoint};
use crate::kernel::preemptirq::SwitchSite;
use crate::kernel::tracepoints::Hooks;
use crate::kernel::{After, Exit, ExitKind, Kernel, Site};
use crate::tracer::annex::{Addressing, Layout, Memory, SIZE, TABLE, WITH_TABLES};
use crate::tracer::arch::{Faults, GuestCode, Hook, Installed, Options};
use crate::tracer::call::Call;
use crate::tracer::counters::Area;
use crate::tracer::edit::{Edit, ExitEdit, SkipReason};
use crate::tracer::error::TraceError;
use crate::tracer::exits::{AllExits, ExitWord};
use crate::tracer::ftrace::GuestCall;
use crate::tracer::guest::{Guest, GuestError};
use crate::tracer::image::Image;
use crate::tracer::module_calls::{self, ModuleMoment};
use crate::tracer::spot::Spot;
use crate::tracer::stops::{Moment, ProgramStop, Stops};
use crate::tracer::switch_places::AllSwitches;
use crate::tracer::tracepoints::guest::{Jump, Own, Places, PointReason, Probes};
use crate::tracer::view::{View, word};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use vm_memory::Bytes;
use vmtrace_trampolines::family::Strangers;
use vmtrace_trampolines::x86_64::{self as compiler, Values};
use vmtrace_trampolines::{self as program, Overflow, Point, Program, Readable};

/// Programs begin at multiples of so many bytes: those of a cache line.
const ALIGN: u64 = 64;

pub(super) fn install(
    guest: &dyn Guest,
    kernel: &Kernel,
    image: &Image,
    memory: &Arc<dyn Memory>,
    options: Options<'_>,
) -> Result<Installed, TraceError> {
    let context = Context::find(kernel, image)?;
    let gs_bases = context::gs_bases(guest, kernel, image, options.cpus)?;
    let mut layout = Layout::per_cpu(map::ADDRESS, &gs_bases, compiler::SPENT)?;
    if let Some(buffer) = options.buffer {
        layout = layout.with_buffer(buffer, &map::HOLE)?;
    }
    let values = values(image, &layout, &context);
    layout.install(&memory.slice())?;
    let text = kernel.symbols().address("_text").ok_or(TraceError::NoSymbol("_text"))?;
    let text = image.runtime(text);
    map::map(guest, image, text, memory.guest_address(), layout.far(&**memory)?)?;
    let area = if memory.slice().len() as u64 >= WITH_TABLES {
        map::map_tables(guest, (kernel, image), text, memory.guest_address())?
    } else {
        Area::default()
    };
    let code = Box::new(Code {
        memory: Arc::clone(memory),
        values,
        overflow: options.overflow,
        used: 0,
        programs: Vec::new(),
        sources: Vec::new(),
        unclaimed: FxHashMap::default(),
        shares: false,
        chains: FxHashMap::default(),
        endings: Vec::new(),
        thunk: None,
        settled: false,
        stubs: Stubs::default(),
        switches: SwitchStubs::default(),
        count: context.preempt_count,
        stops: Vec::new(),
        arrays: FxHashMap::default(),
        program_stops: Stops::default(),
        own: Own::of(kernel),
    });
    Ok(Installed { layout, code, area })
}

/// Link addresses of code that is freed when the kernel has booted.
fn values(image: &Image, layout: &Layout, context: &Context) -> Values {
    let addressing = match layout.addressing {
        Addressing::PerCpu(distance) => compiler::Addressing::PerCpu { distance },
        Addressing::Table(table) | Addressing::Array(table) => compiler::Addressing::Shared {
            number: context.cpu_number,
            cpus: layout.rings.len() as u64,
            table,
        },
    };
    Values {
        addressing,
        rings: layout.distance,
        current: context.current,
        pid: context.pid,
        cpu: context.cpu_number,
        slide: image.runtime(0),
        readable: Readable::default(),
        followed: None,
        context: context.state,
    }
}

/// Programs in the front of the annex, which sites call without a detour.
struct Code {
    memory: Arc<dyn Memory>,
    values: Values,
    overflow: Overflow,
    /// Bytes of the annex in use, from its beginning on.
    used: u64,
    /// Run-time addresses.
    programs: Vec<u64>,
    /// What each does.
    sources: Vec<(Program, Option<u16>)>,
    /// Run-time addresses of programs that are no tracepoint's probe yet, by their numbers.
    unclaimed: FxHashMap<u16, u64>,
    /// Sites are shared with the guest's own ftrace.
    shares: bool,
    /// Run-time addresses of code that does what a program does and goes on with a call of the
    /// guest's. Never written again: a task may stand in it.
    chains: FxHashMap<(u16, GuestCall), u64>,
    /// Run-time addresses of the programs' returns.
    endings: Vec<u64>,
    /// Run-time address of the kernel's return thunk, where its processors need one.
    thunk: Option<u64>,
    /// The guest has patched its alternatives.
    settled: bool,
    stubs: Stubs,
    switches: SwitchStubs,
    /// Offset of the count of preemptions from the gs base, if that is known.
    count: Option<u64>,
    /// Run-time addresses of stubs through which calls and jumps of the kernel lead, since the guest
    /// stops in them.
    stops: Vec<u64>,
    /// Run-time addresses of arrays of probes, by what is in them. Never written again.
    arrays: FxHashMap<Vec<u64>, u64>,
    program_stops: Stops<ProgramStop>,
    own: Own,
}

/// The call or jump of the guest's own in a site at this run-time address. What leads into the annex
/// is none of the guest's: a chain to a chain would be given back as one.
fn shared(address: u64, bytes: [u8; site::LEN]) -> Option<GuestCall> {
    let jumps = bytes[0] == 0xe9;
    let target = match bytes {
        [0xe8, a, b, c, d] | [0xe9, a, b, c, d] => site::jump_target(address, &[0xe9, a, b, c, d])?,
        _ => return None,
    };
    (!is_in_annex(target)).then_some(GuestCall { target, jumps })
}

fn is_in_annex(address: u64) -> bool {
    (map::ADDRESS..map::ADDRESS + SIZE).contains(&address)
}

impl Code {
    /// Where the next code will be.
    fn next(&self, align: u64) -> u64 {
        map::ADDRESS + self.used.next_multiple_of(align)
    }

    /// Puts code behind all other. Nobody executes it yet.
    fn put(&mut self, bytes: &[u8], align: u64) -> Result<u64, TraceError> {
        let full = TraceError::Full(self.programs.len());
        let at = self.used.next_multiple_of(align);
        let end = at + bytes.len() as u64;
        if end > TABLE {
            return Err(full);
        }
        self.write(map::ADDRESS + at, bytes)?;
        self.used = end;
        Ok(map::ADDRESS + at)
    }

    /// Puts code that ends here as the kernel's own does.
    fn put_ending(&mut self, bytes: &[u8], endings: &[usize]) -> Result<u64, TraceError> {
        let address = self.put(bytes, ALIGN)?;
        for &ending in endings {
            let ending = address + ending as u64;
            self.end(ending)?;
            self.endings.push(ending);
        }
        Ok(address)
    }

    /// Puts a program that does not end, but goes on at a run-time address.
    fn put_going_on(&mut self, code: program::Code, to: u64) -> Result<u64, TraceError> {
        let full = || TraceError::Full(self.programs.len());
        let program::Code { mut bytes, endings, site, .. } = code;
        if site.is_some() {
            return Err(TraceError::Code("nothing can come behind a probe"));
        }
        // The first is the program's own end, the others are those of its parts.
        let (&ending, others) = endings.split_first().ok_or_else(full)?;
        let jump = site::jump(self.next(ALIGN) + ending as u64, to).ok_or_else(full)?;
        let place = bytes.get_mut(ending..ending + site::LEN).ok_or_else(full)?;
        place.copy_from_slice(&jump);
        self.put_ending(&bytes, others)
    }

    /// Puts a program that tells itself where it is.
    fn put_probe(&mut self, mut code: program::Code) -> Result<u64, TraceError> {
        let [name @ .., _, _, _, _] = (self.next(ALIGN) + compiler::PROBE_CALLED).to_le_bytes();
        let place = code.site.and_then(|at| code.bytes.get_mut(at..at + name.len()));
        place.ok_or(TraceError::Code("a probe does not tell where it is"))?.copy_from_slice(&name);
        self.put_ending(&code.bytes, &code.endings)
    }

    /// Makes code that does what a program does and goes on with the guest's call, if there is none
    /// yet.
    fn put_chain(&mut self, program: u16, call: GuestCall) -> Result<(), TraceError> {
        if self.chains.contains_key(&(program, call)) {
            return Ok(());
        }
        let count = self.programs.len();
        let full = || TraceError::Full(count);
        let (source, next) = self.sources.get(usize::from(program)).ok_or_else(full)?.clone();
        let mut code = compiler::compile(&source, self.overflow, &self.values)?;
        let stop = code.stop;
        let way = if let Some(next) = next {
            // Who comes last goes on with the guest's call.
            self.put_chain(next, call)?;
            *self.chains.get(&(next, call)).ok_or_else(full)?
        } else if call.jumps {
            let way = self.next(ALIGN) + code.bytes.len() as u64;
            code.bytes.extend(site::DROP_RETURN);
            let from = self.next(ALIGN) + code.bytes.len() as u64;
            code.bytes.extend(site::jump(from, call.target).ok_or_else(full)?);
            way
        } else {
            call.target
        };
        let address = self.put_going_on(code, way)?;
        self.note_stop(&source, address, stop, Some(call))?;
        self.chains.insert((program, call), address);
        Ok(())
    }

    /// Takes note of where a vCPU stops in a program that was put at a run-time address.
    fn note_stop(
        &mut self,
        program: &Program,
        address: u64,
        stop: Option<usize>,
        call: Option<GuestCall>,
    ) -> Result<(), TraceError> {
        let physical = self.memory.guest_address() + (address - map::ADDRESS);
        self.program_stops.note(program, (address, physical), stop, call, &site::QUIET)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), TraceError> {
        let offset = address.wrapping_sub(map::ADDRESS);
        let offset = usize::try_from(offset).map_err(|_| TraceError::Annex)?;
        self.memory.slice().write_slice(bytes, offset).map_err(|_| TraceError::Annex)
    }

    /// Puts an array of probes beside the code, if there is none like it yet; where it is. The guest
    /// only ever reads it.
    fn array(&mut self, words: Vec<u64>) -> Result<u64, TraceError> {
        if let Some(&address) = self.arrays.get(&words) {
            return Ok(address);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = self.put(&bytes, 8)?;
        self.arrays.insert(words, at);
        Ok(at)
    }

    /// Lets a return of ours be one of the kernel's: only its first byte can be where a context
    /// stands.
    fn end(&self, ending: u64) -> Result<(), TraceError> {
        let Some(thunk) = self.thunk else { return Ok(()) };
        let jump = site::jump(ending, thunk).ok_or(TraceError::Annex)?;
        self.write(ending, &jump)
    }
}

impl GuestCode for Code {
    fn is_return(&self, view: &View<'_>, image: &Image, address: u64) -> bool {
        let (kind, after) = (ExitKind::Return, After::Nothing);
        let exit = Exit { address, function: address, site: Exit::NO_SITE, kind, after };
        let spot = Spot::exit(image, &exit);
        form(view, image, (&exit, &spot), self.thunk, &self.stops).is_ok()
    }

    fn allow(&mut self, readable: Readable) {
        self.values.readable = readable;
    }

    fn follow(&mut self, family: u64) {
        self.values.followed = Some(family);
    }

    fn notes_strangers(&self, _: &Kernel, _: (&str, &str)) -> bool {
        false
    }

    fn note_strangers(&mut self, _: Strangers) {}

    fn add(
        &mut self,
        _: &dyn Guest,
        program: &Program,
        next: Option<u16>,
    ) -> Result<(), TraceError> {
        let code = compiler::compile(program, self.overflow, &self.values)?;
        let stop = code.stop;
        let address = match next {
            None if program.point == Point::Probe => {
                let address = self.put_probe(code)?;
                self.unclaimed.insert(program.number, address);
                address
            }
            None => self.put_ending(&code.bytes, &code.endings)?,
            Some(next) => {
                let full = || TraceError::Full(self.programs.len());
                let next = *self.programs.get(usize::from(next)).ok_or_else(full)?;
                self.put_going_on(code, next)?
            }
        };
        self.note_stop(program, address, stop, None)?;
        self.programs.push(address);
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
        let at = self.next(ALIGN);
        let (code, brackets) =
            brackets::make(guest, image, kernel, trap, (at, self.memory.guest_address()))?;
        self.put(&code, ALIGN)?;
        self.stops.extend(brackets.traps());
        self.shares = true;
        Ok(brackets)
    }

    fn calls(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        calls: &[(ModuleMoment, Call)],
        trap: &[u8],
    ) -> Result<Stops<ModuleMoment>, TraceError> {
        let at = (self.next(ALIGN), self.memory.guest_address());
        let image = (image, kernel);
        let (code, stops) = calls::lead(guest, image, calls, trap, at, &module_calls::UNKNOWN)?;
        self.put(&code, ALIGN)?;
        self.stops.extend(stops.traps());
        Ok(stops)
    }

    fn guest_call(&self, view: &View<'_>, image: &Image, spot: &Spot) -> Option<GuestCall> {
        let found = spot.load(view, 0).ok()?;
        self.shares.then(|| shared(image.runtime(spot.site.location), found))?
    }

    fn chain(&mut self, _: &dyn Guest, program: u16, call: GuestCall) -> Result<(), TraceError> {
        self.put_chain(program, call)
    }

    fn is_prepared(&self, _: usize) -> bool {
        true
    }

    fn tracepoint_brackets(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
        trap: &[u8],
    ) -> Result<Stops<Moment>, TraceError> {
        let at = self.next(ALIGN);
        let (code, stops) =
            tracepoint::brackets(guest, image, kernel, trap, (at, self.memory.guest_address()))?;
        self.put(&code, ALIGN)?;
        self.stops.extend(stops.traps());
        Ok(stops)
    }

    fn probe(&mut self, _: &dyn Guest, program: u16) -> Result<(u64, u64), TraceError> {
        // The first tracepoint has the program itself, each other one a copy.
        let address = match self.unclaimed.remove(&program) {
            Some(address) => address,
            None => {
                let full = || TraceError::Full(self.programs.len());
                let (source, _) = self.sources.get(usize::from(program)).ok_or_else(full)?;
                self.put_probe(compiler::compile(source, self.overflow, &self.values)?)?
            }
        };
        Ok((address, address + compiler::PROBE_CALLED))
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
        let ours = self.array(probes.behind(probe)).map_err(|_| PointReason::OutOfReach)?;
        let places = Places { guest, view, image, own: &self.own };
        tracepoint::edits(&places, hooks, (probe, ours), &probes)
    }

    fn jumps(&self) -> (&Own, Jump) {
        (&self.own, tracepoint::jump)
    }

    fn stubs(
        &mut self,
        view: &View<'_>,
        image: &Image,
        exits: AllExits<'_>,
        wanted: &[(usize, u16)],
    ) -> Result<Vec<Option<ExitWord>>, TraceError> {
        if self.stubs.last.is_empty() {
            self.stubs.last = vec![None; exits.kernel.all().len()];
        }
        let mut words = Vec::with_capacity(wanted.len());
        let mut made = Vec::with_capacity(wanted.len());
        // Nearly all are of ten bytes.
        let mut code = Vec::with_capacity(wanted.len() * 10);
        let start = self.next(1);
        for &(index, program) in wanted {
            let exit = exits.get(index).zip(self.programs.get(usize::from(program)));
            let word = exit.and_then(|(exit, &target)| {
                let at = match self.stubs.find(index, program) {
                    Some(at) => at,
                    None => {
                        let before = code.len();
                        let form = match self.stubs.last(index) {
                            Some(last) => last.form,
                            // Whatever the guest makes of it by then.
                            None if !self.settled
                                && exit.kind == ExitKind::Return
                                && exit.site != Exit::NO_SITE =>
                            {
                                Form::Return
                            }
                            // Which way it goes is not known yet.
                            None if !self.settled
                                && !matches!(exit.kind, ExitKind::Jump { .. }) =>
                            {
                                return None;
                            }
                            // A wrong one is told when it is to be written.
                            None => {
                                let spot = exits.spot(image, index)?;
                                form(view, image, (exit, &spot), self.thunk, &self.stops).ok()?.0
                            }
                        };
                        let site = image.runtime(exit.address);
                        let free = start + before as u64;
                        let at = place(free, form, exit.kind);
                        // What lies between is never executed.
                        code.resize(before + usize::try_from(at - free).ok()?, 0xcc);
                        if put_stub(&mut code, at, site, exit, form, target).is_none() {
                            code.truncate(before);
                            return None;
                        }
                        made.push((index, Stub { program, at, form }));
                        at
                    }
                };
                Some(named(image, exit, at))
            });
            words.push(word);
        }
        // At once, and none if there is no room for all.
        if !code.is_empty() {
            self.put(&code, 1)?;
        }
        for (exit, stub) in made {
            self.stubs.insert(exit, stub);
        }
        Ok(words)
    }

    fn exit(
        &self,
        view: &View<'_>,
        image: &Image,
        exits: AllExits<'_>,
        (index, exit): (usize, &Exit),
        program: u16,
    ) -> Result<ExitEdit, SkipReason> {
        let spot = exits.spot(image, index).ok_or(SkipReason::Unknown)?;
        let (found, bytes) = form(view, image, (exit, &spot), self.thunk, &self.stops)?;
        let last = self.stubs.last(index).ok_or(SkipReason::NoStub)?;
        // Its stubs go on as it did when they were made.
        if last.form != found {
            return Err(SkipReason::GuestOwned("another jump"));
        }
        let stub = self.stubs.of(last, index, program).ok_or(SkipReason::NoStub)?;
        let jump = site::jump(image.runtime(exit.address), stub).ok_or(SkipReason::OutOfReach)?;
        // A longer one keeps its end, which is never executed.
        spot.exchange(bytes, word(&jump), site::BYTES).ok_or(SkipReason::OutOfReach)
    }

    fn switch_stubs(
        &mut self,
        _: &dyn Guest,
        image: &Image,
        (_, all): (&Kernel, AllSwitches<'_>),
        wanted: &[(usize, u16)],
    ) -> Result<Vec<Option<u32>>, TraceError> {
        // Those of modules have what room the kernel's leave.
        for of_modules in [false, true] {
            let room = (self.next(1), TABLE.saturating_sub(self.used));
            let programs = (all, &self.programs[..]);
            let wanted = (wanted, of_modules);
            let made = self.switches.make(room, image, programs, self.count, wanted);
            // At once, and none of the kernel's if there is no room for all.
            if !made.code.is_empty() {
                self.put(&made.code, 1)?;
            }
            for &ending in &made.endings {
                self.end(ending)?;
                self.endings.push(ending);
            }
            self.switches.are_put(made);
        }
        Ok(wanted.iter().map(|&place| self.switches.word(place)).collect())
    }

    fn switch(
        &self,
        view: &View<'_>,
        image: &Image,
        (index, site, spot): (usize, &SwitchSite, &Spot),
        program: u16,
    ) -> Result<ExitEdit, SkipReason> {
        let stub = self.switches.find(index, program).ok_or(SkipReason::NoStub)?;
        switch_stubs::edit(view, image, (site, spot), stub, (self.thunk, self.count))
    }

    fn preempt_count(&self) -> Option<u64> {
        self.count
    }

    fn mitigate(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
    ) -> Result<(), TraceError> {
        self.settled = true;
        let symbols = kernel.symbols();
        let (Some(variable), Some(none)) =
            (symbols.address("x86_return_thunk"), symbols.address("__x86_return_thunk"))
        else {
            // It has no return thunks.
            return Ok(());
        };
        let thunk = guest.read_u64(image.physical_of(variable))?;
        self.thunk = (thunk != image.runtime(none)).then_some(thunk);
        self.endings.iter().try_for_each(|&ending| self.end(ending))
    }

    fn is_own(&self, address: u64) -> bool {
        is_in_annex(address)
    }

    fn record_offset(&self) -> u64 {
        0
    }

    fn edits(
        &self,
        view: &View<'_>,
        image: &Image,
        spot: &Spot,
        hook: Hook<'_>,
        edits: &mut Vec<Edit>,
    ) -> Result<Option<GuestCall>, SkipReason> {
        let address = image.runtime(spot.site.location);
        let original = spot.load(view, 0).map_err(|_| SkipReason::NoRam)?;
        let guests = if site::DISABLED.contains(&original) {
            None
        } else {
            let shared = if self.shares { shared(address, original) } else { None };
            Some(shared.ok_or(SkipReason::GuestOwned(site::describe(original)))?)
        };
        let program = match hook {
            Hook::Call(program) => program,
            Hook::Trap(trap) => {
                let replaced = spot.replace(0, &original, trap, edits);
                return replaced.map(|()| guests).ok_or(SkipReason::OutOfReach);
            }
        };
        let target = match guests {
            None => self.programs.get(usize::from(program)),
            Some(call) => Some(self.chains.get(&(program, call)).ok_or(SkipReason::NoStub)?),
        };
        let call = target.and_then(|&target| site::call(address, target));
        let replaced = call.and_then(|call| spot.replace(0, &original, &call, edits));
        replaced.map(|()| guests).ok_or(SkipReason::OutOfReach)
    }

    fn faults(&mut self, _: &dyn Guest, trap: &[u8]) -> Result<Faults, TraceError> {
        let stubs = self.put(&faults::stubs(trap).ok_or(TraceError::Annex)?, faults::STEP)?;
        let traps: Vec<u64> = faults::traps(stubs).collect();
        Ok(Faults { table: self.put(&faults::gates(&traps), faults::STEP)?, traps })
    }

    fn trap(&self, image: &Image, site: &Site) -> u64 {
        image.runtime(site.location)
    }

    fn resume(&self, _: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        // Absent entries are never cached, and entering the guest serialises.
        Ok(address)
    }

    fn stops(&self) -> &Stops<ProgramStop> {
        &self.program_stops
    }

    fn again(&self, program: u16, call: Option<GuestCall>) -> Option<u64> {
        match call {
            None => self.programs.get(usize::from(program)).copied(),
            Some(call) => self.chains.get(&(program, call)).copied(),
        }
    }

    fn remove(&mut self, _: &dyn Guest, _: &Image, _: &Kernel, _: bool) -> Result<(), GuestError> {
        Ok(())
    }
}
