//! Sites that the guest's own ftrace uses as well (arch/riscv/kernel/ftrace.c,
//! arch/riscv/kernel/mcount-dyn.S).
//!
//! With CALL_OPS the literal of such a site points to the guest's ops, which `ftrace_caller` reads
//! twice: for a directly called function, and for one that is called by a list. vmtrace's ops takes its
//! place:
//!
//! ```text
//! ops.direct_call   the program, which goes on with the guest's ops.direct_call, or else with
//!                   ftrace_caller behind where it has looked for that
//! ops.func          calls that of the guest's ops, with these
//! ```
//!
//! So a literal can be written by one store at any time: a context that reads one field from the
//! guest's ops and the other from vmtrace's still calls the guest's function.
//!
//! Without CALL_OPS the guest has a call of `ftrace_caller` in the site, two instructions. While it
//! updates sites, all harts are in `stop_machine`, and such kernels have no preemption: no context can
//! be suspended between the two. At the end of an update vmtrace replaces the first (see [`Gap::land`]
//! for where the guest's second then leads). The second can be written by one store at any time: it is
//! the guest's own, or vmtrace's, which calls a program that continues with `ftrace_caller`.

use super::calls;
use super::gap::{FULL, Gap, MAX_TRAP, NO_TRAP, OpsLayout};
use crate::kernel::Kernel;
use crate::tracer::call::Call;
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::mutex::{LOCKS, UNLOCKS};
use crate::tracer::stops::{Moment, Stops, Stub};
use std::collections::HashMap;
use vmtrace_trampolines::riscv64::encode::register::{A2, RA, SP, T0, T1, T3, ZERO};
use vmtrace_trampolines::riscv64::encode::{NOP, addi, auipc, bne, jalr, jr, ld, sd, split};

/// Where an update begins and takes the lock.
const PREPARE: &str = "ftrace_arch_code_modify_prepare";
/// Where it ends, and gives that back.
const FINISH: &str = "ftrace_arch_code_modify_post_process";
/// Where all harts stand still without CALL_OPS, and what changes the sites then.
const STILL: &str = "__ftrace_modify_code";
const CHANGES: [&str; 1] = ["ftrace_modify_all_code"];
/// More than any of these functions has.
const LONGEST: usize = 256;

const UNKNOWN: TraceError = TraceError::Ftrace("how it changes sites");
/// Of the first two instructions of `ftrace_caller` and the branch behind them.
const FRONT: usize = 12;
/// Where `ftrace_caller` finds the literal, from where a site returns to.
const LITERAL: i32 = -16;

/// What is needed to go on with the guest's own tracers.
#[derive(Debug)]
pub(super) struct Sharing {
    /// Where sites have a literal.
    ops: Option<Literals>,
    /// By the program, and what the guest calls. Never written again: a task may stand in it.
    chains: HashMap<(u16, u64), Chain>,
}

/// How to go on with what is in literals.
#[derive(Debug)]
struct Literals {
    layout: OpsLayout,
    /// Run-time address of `ftrace_caller` behind its first look at the ops.
    behind: u64,
    /// By the run-time address of the guest's ops. Never written again, as above.
    ways: HashMap<u64, Way>,
    /// By the same: run-time addresses of ops that call the trap's stub directly, and the guest's
    /// function by way of a list.
    traps: HashMap<u64, u64>,
}

/// How to go on with an ops of the guest's: run-time addresses.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// After a program.
    on: u64,
    /// In place of the function of the guest's ops.
    func: u64,
}

/// A program that goes on with what the guest calls.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    /// Run-time address of the code.
    pub(super) code: u64,
    /// How a site comes to it.
    pub(super) by: By,
}

/// How a site comes to code of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// By the ops at this run-time address.
    Ops(u64),
    /// By this entry of the tables of jumps.
    Entry(u16),
}

/// The only call of (or jump to) one of these functions in another one.
fn find(kernel: &Kernel, function: &str, callees: &[&str]) -> Option<Call> {
    let symbols = kernel.symbols();
    let start = symbols.address(function)?;
    let body = kernel.code(start, LONGEST)?;
    let callees: Vec<u64> = callees.iter().filter_map(|name| symbols.address(name)).collect();
    let mut found = calls::calls(start, body);
    found.retain(|call| callees.contains(&call.target));
    let &[call] = &found[..] else { return None };
    Some(call)
}

/// Lets the guest stop, by `trap`, before it takes the lock of its code for an update of ftrace, and
/// before it gives that back; all changes of live sites lie between the two. That the lock is not
/// taken yet does no harm: `ftrace_lock` is, and nobody else changes sites.
///
/// # Errors
/// When the kernel has another code there; nothing has changed then.
pub(super) fn around_updates(
    gap: &mut Gap,
    guest: &dyn Guest,
    (image, kernel): (&Image, &Kernel),
    trap: &[u8],
) -> Result<Stops<Moment>, TraceError> {
    let begin = find(kernel, PREPARE, &LOCKS).ok_or(UNKNOWN)?;
    let end = find(kernel, FINISH, &UNLOCKS).ok_or(UNKNOWN)?;
    calls::lead(
        gap,
        guest,
        (image, kernel),
        &[(Moment::Begin, begin), (Moment::End, end)],
        trap,
        &UNKNOWN,
    )
}

/// The same before and after the changes of an update, while all harts stand still.
///
/// # Errors
/// When the kernel has another code there; nothing has changed then.
pub(super) fn around_changes(
    gap: &mut Gap,
    guest: &dyn Guest,
    (image, kernel): (&Image, &Kernel),
    trap: &[u8],
) -> Result<Stops<Moment>, TraceError> {
    let call = find(kernel, STILL, &CHANGES).filter(|call| !call.jumps).ok_or(UNKNOWN)?;
    let function = image.runtime(call.target);
    let put = gap.put_like(guest, function, AROUND, |at| around(trap, at, function))?;
    let (address, physical) = put.ok_or(FULL)?;
    let mut stops = Stops::default();
    for (moment, offset) in [(Moment::Begin, 0), (Moment::End, SECOND)] {
        let stop = Stub::new(address + offset, physical + offset, trap, &NO_TRAP);
        stops.stub(moment, stop.ok_or(UNKNOWN)?);
    }
    stops.lead(calls::redirect(guest, (image, kernel), call, address)?.ok_or(UNKNOWN)?);
    Ok(stops)
}

/// Bytes of a stub that exits before and after a call, and where its second trap is.
const AROUND: usize = 2 * MAX_TRAP + 28;
const SECOND: u64 = MAX_TRAP as u64 + 16;

/// Such a stub of a function that has one argument and returns nothing.
fn around(trap: &[u8], at: u64, function: u64) -> Option<Vec<u8>> {
    let call = at + MAX_TRAP as u64 + 8;
    let (upper, lower) = split(function.wrapping_sub(call).cast_signed())?;
    let before = [addi(SP, SP, -16), sd(RA, SP, 0), auipc(RA, upper), jalr(RA, RA, lower)];
    let after = [ld(RA, SP, 0), addi(SP, SP, 16), jr(RA)];
    let bytes =
        |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    (trap.len() == MAX_TRAP).then(|| [trap, &bytes(&before), trap, &bytes(&after)].concat())
}

impl Sharing {
    /// For a kernel without literals.
    pub(super) fn new() -> Self {
        Self { ops: None, chains: HashMap::new() }
    }

    /// For one with literals, whose `ftrace_caller` is at this run-time address.
    ///
    /// # Errors
    /// When that has another code.
    pub(super) fn with_literals(
        guest: &dyn Guest,
        image: &Image,
        caller: u64,
        layout: OpsLayout,
    ) -> Result<Self, TraceError> {
        /// Of `bne`, all but the distance.
        const BNE: u32 = 0x01ff_f07f;
        let mut front = [0; FRONT];
        image.read(guest, caller, &mut front)?;
        let [a, b, c, d, e, f, g, h, i, j, k, l] = front;
        let words = [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_le_bytes);
        let direct = offset(layout.direct_call)?;
        let expected = [ld(T1, T0, LITERAL), ld(T1, T1, direct), bne(T1, ZERO, 0)];
        if [words[0], words[1], words[2] & BNE] != expected {
            return Err(UNKNOWN);
        }
        let behind = caller + FRONT as u64;
        let ops = Literals { layout, behind, ways: HashMap::new(), traps: HashMap::new() };
        Ok(Self { ops: Some(ops), chains: HashMap::new() })
    }

    /// The chain of a program and what the guest calls, if there is one.
    pub(super) fn get(&self, program: u16, target: u64) -> Option<Chain> {
        self.chains.get(&(program, target)).copied()
    }

    /// Where a program goes on that is followed by what the guest calls (run-time addresses).
    ///
    /// # Errors
    /// When there is no room.
    pub(super) fn way(
        &mut self,
        gap: &mut Gap,
        guest: &dyn Guest,
        target: u64,
    ) -> Result<u64, TraceError> {
        let Some(literals) = &mut self.ops else { return Ok(target) };
        if let Some(way) = literals.ways.get(&target) {
            return Ok(way.on);
        }
        let (code, func) = literals.code(gap.next_small(), target)?;
        let on = gap.put_small(guest, &code)?.ok_or(FULL)?;
        literals.ways.insert(target, Way { on, func: on + func });
        Ok(on)
    }

    /// The ops of a trap on a site in which the guest has the ops `target`, if there is one
    /// (run-time addresses).
    pub(super) fn trap(&self, target: u64) -> Option<u64> {
        self.ops.as_ref()?.traps.get(&target).copied()
    }

    /// Makes it, if sites have literals; `stub`: run-time address of the trap's stub.
    ///
    /// # Errors
    /// When there is no room.
    pub(super) fn put_trap(
        &mut self,
        gap: &mut Gap,
        guest: &dyn Guest,
        (target, stub): (u64, u64),
    ) -> Result<(), TraceError> {
        if self.ops.is_none() || self.trap(target).is_some() {
            return Ok(());
        }
        self.way(gap, guest, target)?;
        let literals = self.ops.as_mut().ok_or(FULL)?;
        let way = literals.ways.get(&target).ok_or(FULL)?;
        let ops = gap.put_small(guest, &literals.layout.ops_with(stub, way.func))?.ok_or(FULL)?;
        literals.traps.insert(target, ops);
        Ok(())
    }

    /// Makes the chain of a program whose code goes on, at run-time address `code`, along the way of
    /// what the guest calls. `entry`: makes an entry of the tables of jumps that leads there.
    ///
    /// # Errors
    /// When there is no room, or no such way.
    pub(super) fn chain(
        &mut self,
        gap: &mut Gap,
        guest: &dyn Guest,
        (program, target, code): (u16, u64, u64),
        entry: impl FnOnce(&Gap) -> Result<u16, TraceError>,
    ) -> Result<(), TraceError> {
        let by = match &self.ops {
            None => By::Entry(entry(gap)?),
            Some(literals) => {
                let way = literals.ways.get(&target).ok_or(FULL)?;
                let bytes = literals.layout.ops_with(code, way.func);
                By::Ops(gap.put_small(guest, &bytes)?.ok_or(FULL)?)
            }
        };
        self.chains.insert((program, target), Chain { code, by });
        Ok(())
    }
}

impl Literals {
    /// The code of a way at run-time address `at`, and where in it that of `func` begins.
    fn code(&self, at: u64, ops: u64) -> Result<(Vec<u8>, u64), TraceError> {
        // Of what follows, in bytes.
        const JUMP: u64 = 16;
        const DIRECT: i32 = 24;
        const FUNC: u64 = 28;
        const OPS: i32 = 48;
        let (upper, lower) =
            split(self.behind.wrapping_sub(at + JUMP).cast_signed()).ok_or(UNKNOWN)?;
        let words = [
            auipc(T1, 0),
            ld(T1, T1, OPS),
            ld(T1, T1, offset(self.layout.direct_call)?),
            bne(T1, ZERO, DIRECT - 12),
            auipc(T3, upper),
            jalr(ZERO, T3, lower),
            jr(T1),
            auipc(A2, 0),
            ld(A2, A2, OPS - 28),
            ld(T1, A2, offset(self.layout.func)?),
            jr(T1),
            NOP,
        ];
        let code = words.into_iter().flat_map(u32::to_le_bytes).chain(ops.to_le_bytes());
        Ok((code.collect(), FUNC))
    }
}

/// An offset in an ops as instructions have it.
fn offset(of: u64) -> Result<i32, TraceError> {
    i32::try_from(of).ok().filter(|of| (0..2048).contains(of)).ok_or(UNKNOWN)
}
