//! Stubs for exits of functions: they call programs and then leave the function.

use super::{fineibt, site};
use crate::kernel::{Exit, ExitKind};
use crate::tracer::edit::SkipReason;
use crate::tracer::exits::ExitWord;
use crate::tracer::image::Image;
use crate::tracer::spot::Spot;
use crate::tracer::view::View;
use rustc_hash::FxHashMap;
use vmtrace_trampolines::x86_64 as compiler;

/// Bytes of half a cache line.
const HALF_LINE: u64 = 32;

/// The stubs of exits. No search leads to them while exits have one program each.
#[derive(Default)]
pub(super) struct Stubs {
    /// Of each exit (by index) the last that was made, if any.
    pub(super) last: Vec<Option<Stub>>,
    /// Those made before, by exit and program.
    older: FxHashMap<(usize, u16), u64>,
}

/// The stub of an exit.
#[derive(Clone, Copy)]
pub(super) struct Stub {
    pub(super) program: u16,
    /// Run-time address.
    pub(super) at: u64,
    /// What the exit was: while it is held it leads to one of its stubs.
    pub(super) form: Form,
}

impl Stubs {
    /// The last one of an exit.
    #[inline]
    pub(super) fn last(&self, exit: usize) -> Option<&Stub> {
        self.last.get(exit)?.as_ref()
    }

    /// Where that of an exit to a program is.
    #[inline]
    pub(super) fn find(&self, exit: usize, program: u16) -> Option<u64> {
        self.of(self.last(exit)?, exit, program)
    }

    /// The same of an exit with this last one.
    #[inline]
    pub(super) fn of(&self, last: &Stub, exit: usize, program: u16) -> Option<u64> {
        let is_last = last.program == program;
        if is_last { Some(last.at) } else { self.older.get(&(exit, program)).copied() }
    }

    pub(super) fn insert(&mut self, exit: usize, stub: Stub) {
        // Those of modules come behind the kernel's.
        if exit >= self.last.len() {
            self.last.resize(exit + 1, None);
        }
        if let Some(last) = self.last.get_mut(exit)
            && let Some(before) = last.replace(stub)
        {
            self.older.insert((exit, before.program), before.at);
        }
    }
}

/// An exit's instruction as it is in the running kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Returns.
    Return,
    /// A function without a site returns, by a jump there (run-time address of the thunk that the kernel has chosen), or itself.
    Beyond(Option<u64>),
    /// Jumps there (run-time address).
    Jump(u64),
    /// Jumps to what this register has, by these bytes.
    Register([u8; 3], u8),
}

/// Reads an exit's instruction and verifies it: what it is, and its bytes, the first lowest.
#[inline(always)]
pub(super) fn form(
    view: &View<'_>,
    image: &Image,
    (exit, spot): (&Exit, &Spot),
    thunk: Option<u64>,
    stops: &[u64],
) -> Result<(Form, u64), SkipReason> {
    // Words, and no arrays: a guest waits while tens of thousands are read.
    let found = spot.load_word(view, exit.size()).map_err(|_| SkipReason::NoRam)?;
    let address = image.runtime(exit.address);
    let jumps_to = site::jump_of_word(address, found);
    let form = match exit.kind {
        ExitKind::Return if exit.site == Exit::NO_SITE => match found == site::RETURN_WORD {
            true => Some(Form::Beyond(None)),
            false => jumps_to.filter(|_| jumps_to == thunk).map(|to| Form::Beyond(Some(to))),
        },
        ExitKind::Return if found == site::RETURN_WORD => Some(Form::Return),
        ExitKind::Return => jumps_to.filter(|_| jumps_to == thunk).map(|_| Form::Return),
        // Or to a stub of ours that goes on there: where the guest stops for its modules, and such.
        ExitKind::Jump { target } => {
            jumps_to.filter(|to| *to == image.runtime(target) || stops.contains(to)).map(Form::Jump)
        }
        ExitKind::Indirect { register: fineibt::REGISTER, .. }
            if fineibt::checks(view, image, spot)? =>
        {
            return Err(SkipReason::Checked);
        }
        ExitKind::Indirect { register, len } => indirect(address, found, jumps_to, register, len),
    };
    form.map(|form| (form, found)).ok_or_else(|| {
        let [first, ..] = found.to_le_bytes();
        SkipReason::GuestOwned(site::describe([first, 0, 0, 0, 0]))
    })
}

/// What a jump through a register has become, of so many bytes.
fn indirect(
    address: u64,
    found: u64,
    jumps_to: Option<u64>,
    register: u8,
    len: u8,
) -> Option<Form> {
    let [first, second, third, ..] = found.to_le_bytes();
    match len {
        // jmp *%reg; int3; nop
        5 if first == 0xff && second == 0xe0 | register => {
            Some(Form::Register([first, second, 0], 2))
        }
        6 if [first, second, third] == [0x41, 0xff, 0xe0 | register & 7] => {
            Some(Form::Register([first, second, third], 3))
        }
        // To a thunk of the kernel's, with or without a prefix.
        5 => jumps_to.map(Form::Jump),
        _ if first == 0x2e => site::jump_of_word(address + 1, found >> 8).map(Form::Jump),
        _ => None,
    }
}

/// Where the stub of an exit of this form will be, with the next free byte at `at`.
///
/// A jump through a register must not be predicted by what was seen at another place: on processors
/// with that fault (Indirect Target Selection), this holds for one whose last byte lies in the upper
/// half of a cache line, and the kernel leaves a jump of its own as it is only there
/// (arch/x86/kernel/alternative.c, `cpu_wants_indirect_its_thunk_at`).
pub(super) fn place(at: u64, form: Form, kind: ExitKind) -> u64 {
    let (Form::Register(_, len), ExitKind::Indirect { register, .. }) = (form, kind) else {
        return at;
    };
    let last = compiler::indirect_jump(register) + u64::from(len) - 1;
    let upper = |at: &u64| (at + last) & HALF_LINE != 0;
    (at..at + HALF_LINE).find(upper).unwrap_or(at + HALF_LINE)
}

/// Adds the stub at `at` of an exit (at run-time address `site`) that is of this form. `None`, and
/// nothing added, when it cannot have one.
#[inline]
pub(super) fn put_stub(
    code: &mut Vec<u8>,
    at: u64,
    site: u64,
    exit: &Exit,
    form: Form,
    program: u64,
) -> Option<()> {
    match (form, exit.kind) {
        (Form::Return, _) => {
            code.extend_from_slice(&compiler::return_stub(at, site, program)?);
        }
        (Form::Beyond(thunk), _) => {
            let leave = match thunk {
                Some(to) => site::jump(at + compiler::BEYOND_RETURN, to)?,
                None => site::RETURN,
            };
            code.extend_from_slice(&compiler::beyond_stub(at, program, leave)?);
        }
        (Form::Jump(to), ExitKind::Indirect { register, .. }) => {
            // To the thunk that the kernel has chosen.
            let jump = site::jump(at + compiler::indirect_jump(register), to)?;
            code.extend(compiler::indirect_stub(at, program, register, &jump)?);
        }
        (Form::Jump(to), _) => code.extend_from_slice(&compiler::tail_stub(at, program, to)?),
        (Form::Register(jump, len), ExitKind::Indirect { register, .. }) => {
            // Nothing speculates past it.
            let jump = [jump.get(..usize::from(len))?, &[0xcc]].concat();
            code.extend(compiler::indirect_stub(at, program, register, &jump)?);
        }
        (Form::Register(..), _) => return None,
    }
    Some(())
}

/// What records of an exit with a stub at `at` say.
pub(super) fn named(image: &Image, exit: &Exit, at: u64) -> ExitWord {
    let names = match exit.kind {
        ExitKind::Return if exit.site == Exit::NO_SITE => at + compiler::BEYOND_CALL,
        ExitKind::Return => image.runtime(exit.address),
        ExitKind::Jump { .. } => at + site::LEN as u64,
        ExitKind::Indirect { .. } => at + compiler::INDIRECT_CALL,
    };
    #[allow(clippy::cast_possible_truncation, reason = "the low half")]
    let word = names as u32;
    ExitWord::new(word, exit)
}
