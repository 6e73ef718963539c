//! Sites that the guest's own ftrace uses as well, in kernels with CALL_OPS
//! (arch/riscv/kernel/ftrace.c, arch/riscv/kernel/mcount-dyn.S).
//!
//! The literal of such a site is the guest's ops, which `ftrace_caller` reads twice: for a function
//! that is called directly, and for one that it calls by way of a list. Ours is in its place:
//!
//! ```text
//! ops.direct_call   the program, which goes on with the guest's ops.direct_call, or else with
//!                   ftrace_caller behind where it has looked for that
//! ops.func          calls that of the guest's ops, with these
//! ```
//!
//! So a literal is one store, whenever it is written: who has read one of the two first and then the
//! other comes to the guest's function all the same.

use super::calls;
use super::gap::{Gap, OpsLayout};
use crate::kernel::Kernel;
use crate::tracer::guest::{Guest, Image};
use crate::tracer::stops::{Moment, Stops};
use crate::tracer::trace::TraceError;
use crate::tracer::tracepoints::guest::Call;
use std::collections::HashMap;
use vmtrace_trampolines::riscv64::encode::register::{A2, T0, T1, T3, ZERO};
use vmtrace_trampolines::riscv64::encode::{NOP, auipc, bne, jalr, jr, ld, split};

/// Where an update begins, and the lock that it takes there.
const PREPARE: &str = "ftrace_arch_code_modify_prepare";
const LOCKS: [&str; 2] = ["mutex_lock", "mutex_lock_nested"];
/// Where it ends, and gives that back.
const FINISH: &str = "ftrace_arch_code_modify_post_process";
const UNLOCKS: [&str; 1] = ["mutex_unlock"];
/// More than either function has.
const LONGEST: u64 = 128;

const UNKNOWN: TraceError = TraceError::Ftrace("how it changes sites");
/// Of the first two instructions of `ftrace_caller` and the branch behind them.
const FRONT: u64 = 12;
/// Where `ftrace_caller` finds the literal, from where a site returns to.
const LITERAL: i32 = -16;

/// What is needed to go on with the guest's own tracers.
#[derive(Debug)]
pub(super) struct Sharing {
    layout: OpsLayout,
    /// Run-time address of `ftrace_caller` behind its first look at the ops.
    behind: u64,
    /// By the run-time address of the guest's ops. Never written again: a task may stand in it.
    ways: HashMap<u64, Way>,
    /// Run-time addresses of our ops, by the program and the guest's ops.
    chains: HashMap<(u16, u64), Chain>,
}

/// How to go on with an ops of the guest's: run-time addresses.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// After a program.
    on: u64,
    /// In place of the function of the guest's ops.
    func: u64,
}

/// What a program and an ops of the guest's make: run-time addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    /// Our ops.
    pub(super) ops: u64,
    /// The code in it.
    pub(super) code: u64,
}

/// The calls (or jumps) of these functions in another one.
fn find(kernel: &Kernel, function: &str, callees: &[&str]) -> Option<Vec<Call>> {
    let symbols = kernel.symbols();
    let start = symbols.address(function)?;
    let len = symbols.next_after(start)?.checked_sub(start).filter(|len| *len <= LONGEST)?;
    let body = kernel.bytes(start, usize::try_from(len).ok()?)?;
    let callees: Vec<u64> = callees.iter().filter_map(|name| symbols.address(name)).collect();
    let mut found = calls::calls(start, body);
    found.retain(|call| callees.contains(&call.target));
    (found.len() == 1).then_some(found)
}

/// Lets the guest stop, by `trap`, before it takes the lock of its code for an update of ftrace, and
/// before it gives that back; all changes of live sites lie between the two. That the lock is not
/// taken yet does no harm: `ftrace_lock` is, and nobody else changes sites.
///
/// # Errors
/// When the kernel has another code there; nothing has changed then.
pub(super) fn brackets(
    gap: &mut Gap,
    guest: &dyn Guest,
    (image, kernel): (&Image, &Kernel),
    trap: &[u8],
) -> Result<Stops<Moment>, TraceError> {
    let begin = find(kernel, PREPARE, &LOCKS).ok_or(UNKNOWN)?;
    let end = find(kernel, FINISH, &UNLOCKS).ok_or(UNKNOWN)?;
    let begin = begin.into_iter().map(|call| (Moment::Begin, call));
    let all: Vec<_> = begin.chain(end.into_iter().map(|call| (Moment::End, call))).collect();
    calls::lead(gap, guest, (image, kernel), &all, trap, &UNKNOWN)
}

impl Sharing {
    /// For a kernel whose `ftrace_caller` is at this run-time address.
    ///
    /// # Errors
    /// When that has another code.
    pub(super) fn find(
        guest: &dyn Guest,
        image: &Image,
        caller: u64,
        layout: OpsLayout,
    ) -> Result<Self, TraceError> {
        /// Of `bne`, all but the distance.
        const BNE: u32 = 0x01ff_f07f;
        let mut front = [0; FRONT as usize];
        image.read(guest, caller, &mut front)?;
        let [a, b, c, d, e, f, g, h, i, j, k, l] = front;
        let words = [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_le_bytes);
        let direct = offset(layout.direct_call)?;
        let expected = [ld(T1, T0, LITERAL), ld(T1, T1, direct), bne(T1, ZERO, 0)];
        if [words[0], words[1], words[2] & BNE] != expected {
            return Err(UNKNOWN);
        }
        Ok(Self { layout, behind: caller + FRONT, ways: HashMap::new(), chains: HashMap::new() })
    }

    /// The chain of a program and an ops of the guest's, if there is one.
    pub(super) fn get(&self, program: u16, ops: u64) -> Option<Chain> {
        self.chains.get(&(program, ops)).copied()
    }

    /// Where a program goes on that is followed by an ops of the guest's (run-time addresses).
    /// `full`: that there is no room.
    ///
    /// # Errors
    /// When there is no room.
    pub(super) fn way(
        &mut self,
        gap: &mut Gap,
        guest: &dyn Guest,
        ops: u64,
        full: &TraceError,
    ) -> Result<u64, TraceError> {
        if let Some(way) = self.ways.get(&ops) {
            return Ok(way.on);
        }
        let at = gap.next_small();
        let (code, func) = self.code(at, ops)?;
        let on = gap.put_small(guest, &code)?.ok_or_else(|| full.clone())?;
        self.ways.insert(ops, Way { on, func: on + func });
        Ok(on)
    }

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

    /// Makes our ops for a program whose code goes on, at run-time address `code`, along the way of
    /// the guest's `ops`.
    ///
    /// # Errors
    /// When there is no room, or no such way.
    pub(super) fn chain(
        &mut self,
        gap: &mut Gap,
        guest: &dyn Guest,
        (program, ops, code): (u16, u64, u64),
        full: &TraceError,
    ) -> Result<(), TraceError> {
        let full = || full.clone();
        let way = self.ways.get(&ops).ok_or_else(full)?;
        let bytes = self.layout.ops_with(code, way.func);
        let ours = gap.put_small(guest, &bytes)?.ok_or_else(full)?;
        self.chains.insert((program, ops), Chain { ops: ours, code });
        Ok(())
    }
}

/// An offset in an ops as instructions have it.
fn offset(of: u64) -> Result<i32, TraceError> {
    i32::try_from(of).ok().filter(|of| (0..2048).contains(of)).ok_or(UNKNOWN)
}
