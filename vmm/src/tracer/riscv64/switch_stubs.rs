//! Stubs for instructions that switch interrupts or preemption, the landings that lead to them, and
//! the jumps that replace these.
//!
//! A landing is written into text that the kernel does not use any more, and a stub into the gap,
//! both before anything leads there. They stay: a task may stand in them. The stubs of an event find
//! their program by a word, which changes in a pause.

use super::gap::Gap;
use super::tracepoint::reach;
use crate::kernel::Kernel;
use crate::kernel::preemptirq::{Replaced, Switch, SwitchKind, SwitchSite, Told};
use crate::tracer::edit::{ExitEdit, SkipReason};
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::spot::Spot;
use crate::tracer::view::View;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use vmtrace_trampolines::riscv64::encode::register::T0;
use vmtrace_trampolines::riscv64::encode::{Register, jal, jr};
use vmtrace_trampolines::riscv64::{Switch as Does, SwitchedWord, landing, switch_stub};

const LEN: usize = 4;
const LANDING: usize = 8;
/// Stubs must be near the end of the text.
const BEHIND: TraceError = TraceError::Code(
    "code of other tracers is where that of preemptirq:* must be; trace these events first, and \
     remove and add them later",
);

/// What is there of all this. Run-time addresses, but for those of landings.
#[derive(Default)]
pub(super) struct SwitchStubs {
    /// Of each event, the word with its program's address, and which program that is.
    programs: FxHashMap<Switch, (u64, Option<u16>)>,
    /// What does nothing.
    nothing: Option<u64>,
    /// What their records have in place of a site, beside them.
    stubs: FxHashMap<Replaced, (u64, u32)>,
    /// Landings (link addresses), or why there is none.
    landings: FxHashMap<u64, Option<SkipReason>>,
}

impl SwitchStubs {
    /// Makes what leads from one of these to its program, as far as it is not there yet; what its
    /// records say, `None` where that cannot be.
    ///
    /// # Errors
    /// When there is no room, or guest memory cannot be used. No instruction has changed then.
    pub(super) fn make(
        &mut self,
        (guest, gap): (&dyn Guest, &mut Gap),
        (image, kernel): (&Image, &Kernel),
        site: &SwitchSite,
    ) -> Result<Option<u32>, TraceError> {
        let SwitchKind::Replaced(replaced, way) = site.kind else { return Ok(None) };
        let switch = site.kind.switch();
        let nothing = match self.nothing {
            Some(nothing) => nothing,
            None => {
                let code = jr(T0).to_le_bytes();
                let at = gap.put_small(guest, &code)?.ok_or(super::gap::FULL)?;
                *self.nothing.insert(at)
            }
        };
        let program = match self.programs.get(&switch) {
            Some(&(program, _)) => program,
            None => {
                let program = gap.put_small(guest, &nothing.to_le_bytes())?;
                let program = program.ok_or(super::gap::FULL)?;
                self.programs.insert(switch, (program, None));
                program
            }
        };
        let (stub, word) = match self.stubs.get(&replaced) {
            Some(&known) => known,
            None => {
                let at = gap.next_small();
                let made = switch_stub(at, &word(&replaced), program);
                let made =
                    made.ok_or(TraceError::Code("its switches of interrupts are unusual"))?;
                let stub = gap.put_small(guest, &made.bytes)?.ok_or(super::gap::FULL)?;
                #[allow(clippy::cast_possible_truncation, reason = "the low half")]
                let word = (stub + made.names) as u32;
                *self.stubs.entry(replaced).or_insert((stub, word))
            }
        };
        match way {
            Some(at) if !self.landings.contains_key(&at) => {
                let refused = land((guest, image, kernel), at, replaced.through, stub)?;
                self.landings.insert(at, refused);
            }
            Some(_) => {}
            // Half of them would tell what is not so.
            None if reach(image.runtime(site.address), stub).is_none() => return Err(BEHIND),
            None => {}
        }
        Ok(Some(word))
    }

    /// Lets all stubs of an event lead to a program, by its number and run-time address. One that is on
    /// its way there comes to this one or to that before.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub(super) fn lead(
        &mut self,
        (guest, gap): (&dyn Guest, &Gap),
        switch: Switch,
        (program, to): (u16, u64),
    ) -> Result<(), TraceError> {
        let Some((word, leads)) = self.programs.get_mut(&switch) else { return Ok(()) };
        gap.put_again(guest, *word, &to.to_le_bytes())?;
        *leads = Some(program);
        Ok(())
    }

    /// Lets those lead to nothing that lead to others than these.
    ///
    /// # Errors
    /// When guest memory cannot be used.
    pub(super) fn rest(
        &mut self,
        (guest, gap): (&dyn Guest, &Gap),
        programs: &mut dyn Iterator<Item = u16>,
    ) -> Result<(), TraceError> {
        let Some(nothing) = self.nothing else { return Ok(()) };
        let used: BTreeSet<u16> = programs.collect();
        for (word, leads) in self.programs.values_mut() {
            if leads.is_some_and(|program| !used.contains(&program)) {
                gap.put_again(guest, *word, &nothing.to_le_bytes())?;
                *leads = None;
            }
        }
        Ok(())
    }

    /// What leads to a stub in place of an instruction, which is verified.
    pub(super) fn edit(
        &self,
        view: &View<'_>,
        image: &Image,
        (site, spot): (&SwitchSite, &Spot),
    ) -> Result<ExitEdit, SkipReason> {
        let SwitchKind::Replaced(replaced, way) = site.kind else {
            return Err(SkipReason::NoStub);
        };
        let &(stub, _) = self.stubs.get(&replaced).ok_or(SkipReason::NoStub)?;
        let to = match way {
            Some(at) => match self.landings.get(&at) {
                Some(None) => image.runtime(at),
                Some(&Some(reason)) => return Err(reason),
                None => return Err(SkipReason::NoStub),
            },
            None => stub,
        };
        let found: [u8; LEN] = spot.load(view, 0).map_err(|_| SkipReason::NoRam)?;
        if found != replaced.word.to_le_bytes() {
            return Err(SkipReason::GuestOwned("another instruction"));
        }
        let distance = reach(image.runtime(site.address), to).ok_or(SkipReason::OutOfReach)?;
        let link = Register::new(replaced.link).ok_or(SkipReason::NoStub)?;
        let jump = jal(link, distance).to_le_bytes();
        spot.exchange_bytes(0, &found, &jump).ok_or(SkipReason::OutOfReach)
    }
}

/// What a stub needs to know.
fn word(replaced: &Replaced) -> SwitchedWord {
    let Replaced { word, told, link, through, kept } = *replaced;
    let [target, source] = [7, 15].map(|from| (word >> from & 0x1f).to_le_bytes()[0]);
    let switch = match told {
        Told::Off => Does::Off(target),
        // By an immediate.
        Told::On if word >> 14 & 1 == 1 => Does::On,
        Told::On => Does::Restore(source),
        Told::Enter(status) | Told::Leave(status) => Does::Saved(status),
        Told::Count { add, register, task } => Does::Count { add, register, task },
    };
    SwitchedWord { word, switch, link, through, kept }
}

/// Writes a landing at a link address that leads to a stub, if that is as it is in the image; why not,
/// otherwise.
fn land(
    (guest, image, kernel): (&dyn Guest, &Image, &Kernel),
    at: u64,
    through: u8,
    stub: u64,
) -> Result<Option<SkipReason>, TraceError> {
    let physical = image.physical_of(at);
    let mut found = [0; LANDING];
    guest.read(physical, &mut found)?;
    if kernel.bytes(at, LANDING) != Some(&found[..]) {
        return Ok(Some(SkipReason::GuestOwned("other code where a jump would land")));
    }
    let Some(code) = landing(image.runtime(at), through, stub) else {
        return Ok(Some(SkipReason::OutOfReach));
    };
    guest.write(physical, &code)?;
    guest.read(physical, &mut found)?;
    Ok((found != code).then_some(SkipReason::ReadBack))
}
