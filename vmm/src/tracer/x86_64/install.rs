//! The annex and the programs in an x86-64 guest.

use super::context::{self, Context};
use super::{map, site};
use crate::kernel::{Exit, ExitKind, Kernel, Site};
use crate::tracer::annex::{Addressing, Layout, Memory, TABLE};
use crate::tracer::arch::{GuestCode, Hook, Installed};
use crate::tracer::exits::ExitWord;
use crate::tracer::guest::{Guest, GuestError, Image};
use crate::tracer::patch::{Edit, SkipReason};
use crate::tracer::trace::{Options, TraceError};
use rustc_hash::FxHashMap;
use std::sync::Arc;
use vm_memory::Bytes;
use vmtrace_trampolines::x86_64::{self as compiler, Values};
use vmtrace_trampolines::{Overflow, Program, Readable};

/// Programs begin at multiples of so many bytes: those of a cache line.
const ALIGN: u64 = 64;
/// Bytes of half a cache line.
const HALF_LINE: u64 = 32;

pub(super) fn install(
    guest: &dyn Guest,
    kernel: &Kernel,
    image: &Image,
    memory: &Arc<dyn Memory>,
    options: Options<'_>,
    readable: Readable,
) -> Result<Installed, TraceError> {
    let context = Context::find(kernel, image)?;
    let gs_bases = context::gs_bases(guest, kernel, image, options.cpus)?;
    let layout = Layout::per_cpu(map::ADDRESS, &gs_bases, compiler::SPENT)?;
    let values = values(&layout, &context, readable);
    layout.install(&memory.slice())?;
    let text = kernel.symbols().address("_text").ok_or(TraceError::NoSymbol("_text"))?;
    map::map(guest, image, image.runtime(text), memory.guest_address())?;
    let code = Box::new(Code {
        memory: Arc::clone(memory),
        values,
        overflow: options.overflow,
        used: 0,
        programs: Vec::new(),
        endings: Vec::new(),
        thunk: None,
        stubs: FxHashMap::default(),
        forms: FxHashMap::default(),
    });
    Ok(Installed { layout, code })
}

fn values(layout: &Layout, context: &Context, readable: Readable) -> Values {
    let addressing = match layout.addressing {
        Addressing::PerCpu(distance) => compiler::Addressing::PerCpu { distance },
        Addressing::Table(table) | Addressing::Array(table) => compiler::Addressing::Shared {
            number: context.cpu_number,
            cpus: layout.rings.len() as u64,
            table,
        },
    };
    Values { addressing, current: context.current, pid: context.pid, readable }
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
    /// Run-time addresses of their returns.
    endings: Vec<u64>,
    /// Run-time address of the kernel's return thunk, where its processors need one.
    thunk: Option<u64>,
    /// Stubs (run-time addresses) by exit (link address) and program.
    stubs: FxHashMap<(u64, u16), u64>,
    /// What exits that have stubs were (by link address): while they are held they lead to one.
    forms: FxHashMap<u64, Form>,
}

/// An exit's instruction as it is in the running kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Returns.
    Return,
    /// Jumps there (run-time address).
    Jump(u64),
    /// Jumps to what this register has, by these bytes.
    Register([u8; 3], usize),
}

/// Reads an exit's instruction and verifies it.
fn form(
    guest: &dyn Guest,
    image: &Image,
    exit: &Exit,
    thunk: Option<u64>,
) -> Result<(Form, [u8; 6]), SkipReason> {
    const LONGEST: usize = 6;
    let mut bytes = [0; LONGEST];
    let len = usize::from(exit.size()).min(LONGEST);
    guest
        .read(image.physical_of(exit.address), &mut bytes[..len])
        .map_err(|_| SkipReason::NoRam)?;
    let address = image.runtime(exit.address);
    let [first, second, ..] = bytes;
    let form = match exit.kind {
        ExitKind::Return if bytes[..len] == site::RETURN => Some(Form::Return),
        ExitKind::Return => site::jump_target(address, &bytes[..len])
            .filter(|&target| Some(target) == thunk)
            .map(|_| Form::Return),
        ExitKind::Jump { target } => site::jump_target(address, &bytes[..len])
            .filter(|&found| found == image.runtime(target))
            .map(Form::Jump),
        // jmp *%reg; int3; nop
        ExitKind::Indirect { register, len: 5 } if first == 0xff && second == 0xe0 | register => {
            Some(Form::Register([first, second, 0], 2))
        }
        ExitKind::Indirect { register, len: 6 }
            if bytes[..3] == [0x41, 0xff, 0xe0 | register & 7] =>
        {
            Some(Form::Register([0x41, 0xff, 0xe0 | register & 7], 3))
        }
        // To a thunk of the kernel's, with or without a prefix.
        ExitKind::Indirect { len: 5, .. } => {
            site::jump_target(address, &bytes[..len]).map(Form::Jump)
        }
        ExitKind::Indirect { .. } if first == 0x2e => {
            site::jump_target(address + 1, &bytes[1..len]).map(Form::Jump)
        }
        ExitKind::Indirect { .. } => None,
    };
    let form = form.ok_or(SkipReason::GuestOwned(site::describe([first, 0, 0, 0, 0])))?;
    Ok((form, bytes))
}

impl Code {
    /// Where the next code will be.
    fn next(&self, align: u64) -> u64 {
        map::ADDRESS + self.used.next_multiple_of(align)
    }

    /// Where the next stub of an exit of this form will be.
    ///
    /// A jump through a register must not be predicted by what was seen at another place: on processors
    /// with that fault (Indirect Target Selection), this holds for one whose last byte lies in the upper
    /// half of a cache line, and the kernel leaves a jump of its own as it is only there
    /// (arch/x86/kernel/alternative.c, `cpu_wants_indirect_its_thunk_at`).
    fn next_stub(&self, form: Form, kind: ExitKind) -> u64 {
        let at = self.next(1);
        let (Form::Register(_, len), ExitKind::Indirect { register, .. }) = (form, kind) else {
            return at;
        };
        let last = compiler::indirect_jump(register) + len as u64 - 1;
        let upper = |at: &u64| (at + last) & HALF_LINE != 0;
        (at..at + HALF_LINE).find(upper).unwrap_or(at + HALF_LINE)
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

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), TraceError> {
        let offset = address.wrapping_sub(map::ADDRESS);
        let offset = usize::try_from(offset).map_err(|_| TraceError::Annex)?;
        self.memory.slice().write_slice(bytes, offset).map_err(|_| TraceError::Annex)
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
    fn add(&mut self, _: &dyn Guest, program: &Program) -> Result<(), TraceError> {
        let code = compiler::compile(program, self.overflow, &self.values)?;
        let address = self.put(&code.bytes, ALIGN)?;
        for ending in code.endings {
            let ending = address + ending as u64;
            self.end(ending)?;
            self.endings.push(ending);
        }
        self.programs.push(address);
        Ok(())
    }

    fn is_prepared(&self, _: &Exit) -> bool {
        true
    }

    fn stub(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        exit: &Exit,
        program: u16,
    ) -> Result<Option<ExitWord>, TraceError> {
        let key = (exit.address, program);
        let known = self.stubs.get(&key).copied();
        let form = match self.forms.get(&exit.address) {
            Some(&form) => form,
            None => match form(guest, image, exit, self.thunk) {
                Ok((form, _)) => form,
                // Told when it is to be written.
                Err(_) => return Ok(None),
            },
        };
        let at = known.unwrap_or_else(|| self.next_stub(form, exit.kind));
        let Some(&target) = self.programs.get(usize::from(program)) else { return Ok(None) };
        let site = image.runtime(exit.address);
        let stub = match (form, exit.kind) {
            (Form::Return, _) => compiler::return_stub(at, site, target).map(|code| code.to_vec()),
            (Form::Jump(to), ExitKind::Indirect { register, .. }) => {
                // To the thunk that the kernel has chosen.
                site::jump(at + compiler::indirect_jump(register), to)
                    .and_then(|jump| compiler::indirect_stub(at, target, register, &jump))
            }
            (Form::Jump(to), _) => compiler::tail_stub(at, target, to).map(|code| code.to_vec()),
            (Form::Register(jump, len), ExitKind::Indirect { register, .. }) => {
                // Nothing speculates past it.
                let jump = [&jump[..len], &[0xcc]].concat();
                compiler::indirect_stub(at, target, register, &jump)
            }
            (Form::Register(..), _) => None,
        };
        let Some(stub) = stub else { return Ok(None) };
        if known.is_none() {
            self.used = at - map::ADDRESS;
            self.put(&stub, 1)?;
            self.stubs.insert(key, at);
            self.forms.insert(exit.address, form);
        }
        let names = match exit.kind {
            ExitKind::Return => site,
            ExitKind::Jump { .. } => at + site::LEN as u64,
            ExitKind::Indirect { .. } => at + compiler::INDIRECT_CALL,
        };
        #[allow(clippy::cast_possible_truncation, reason = "the low half")]
        let word = names as u32;
        Ok(Some(ExitWord::new(word, exit)))
    }

    fn exit(
        &self,
        guest: &dyn Guest,
        image: &Image,
        exit: &Exit,
        program: u16,
    ) -> Result<Edit, SkipReason> {
        let (found, bytes) = form(guest, image, exit, self.thunk)?;
        // Its stubs go on as it did when they were made.
        if self.forms.get(&exit.address).is_some_and(|&known| known != found) {
            return Err(SkipReason::GuestOwned("another jump"));
        }
        let stub = self.stubs.get(&(exit.address, program)).ok_or(SkipReason::NoStub)?;
        let jump = site::jump(image.runtime(exit.address), *stub).ok_or(SkipReason::OutOfReach)?;
        // A longer one keeps its end, which is never executed.
        Edit::new(image.physical_of(exit.address), &bytes[..site::LEN], &jump)
            .ok_or(SkipReason::OutOfReach)
    }

    fn mitigate(
        &mut self,
        guest: &dyn Guest,
        image: &Image,
        kernel: &Kernel,
    ) -> Result<(), TraceError> {
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

    fn record(&self, site: &Site) -> u64 {
        site.location
    }

    fn edits(
        &self,
        guest: &dyn Guest,
        image: &Image,
        site: &Site,
        hook: Hook<'_>,
        edits: &mut Vec<Edit>,
    ) -> Result<(), SkipReason> {
        let physical = image.physical_of(site.location);
        let mut original = [0; site::LEN];
        guest.read(physical, &mut original).map_err(|_| SkipReason::NoRam)?;
        if !site::DISABLED.contains(&original) {
            return Err(SkipReason::GuestOwned(site::describe(original)));
        }
        let edit = match hook {
            Hook::Call(program) => self
                .programs
                .get(usize::from(program))
                .and_then(|&target| site::call(image.runtime(site.location), target))
                .and_then(|call| Edit::new(physical, &original, &call)),
            Hook::Trap(trap) => {
                original.get(..trap.len()).and_then(|front| Edit::new(physical, front, trap))
            }
        };
        edits.push(edit.ok_or(SkipReason::OutOfReach)?);
        Ok(())
    }

    fn trap(&self, image: &Image, site: &Site) -> u64 {
        image.runtime(site.location)
    }

    fn resume(&self, _: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        // Absent entries are never cached, and entering the guest serialises.
        Ok(address)
    }

    fn remove(&mut self, _: &dyn Guest, _: &Image, _: &Kernel, _: bool) -> Result<(), GuestError> {
        Ok(())
    }
}
