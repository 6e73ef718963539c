//! Decides which exits are rewritten, and how each reaches its stub.
//!
//! A window of eight bytes has room for a jump to any address. A shorter one jumps to a landing,
//! which has that room: eight bytes of another rewritten window, which are free because its
//! instructions run in its stub. A `jal` reaches landings in a wide range. The two bytes of a bare
//! `ret` reach only 2 KiB. Where no landing is so near, they jump to a relay: four bytes, for a
//! `jal` to a landing.

use std::collections::BTreeSet;

use super::patch::{Displaced, Epilogue, Jump, PlannedExit, Step};
use super::windows::{Exit, FAR, NEAR, Windows};
use super::{LeftOut, Missing, Plan};
use crate::riscv64::encode::{self, distance};

/// How far a jump of two bytes reaches.
const SHORT_REACH: u64 = 2048;

/// Bytes of a window that are free for a jump: where, and how many.
type Piece = (u64, u8);

/// The exits of the plan, as far as it has come.
pub(super) struct Planner<'a> {
    windows: &'a Windows,
    /// For each exit, its part in the plan.
    parts: Vec<Part>,
    /// Exits whose windows have eight or four bytes to lend.
    far: BTreeSet<usize>,
    near: BTreeSet<usize>,
    /// Exits without a way to their stub.
    waiting: Vec<usize>,
}

#[derive(Clone, Default)]
struct Part {
    role: Role,
    /// Bytes at the end of the window that others have.
    lent: u8,
    /// Where the jump at the window's start leads, and on from there to the stub.
    way: Vec<Piece>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Role {
    #[default]
    Out,
    /// Of a function that is asked for.
    Wanted,
    /// Only there to lend its bytes.
    Helper,
}

impl<'a> Planner<'a> {
    /// Finds a way for all exits of the functions at these sites.
    pub(super) fn new(windows: &'a Windows, wanted: impl Iterator<Item = usize>) -> Self {
        let mut planner = Self {
            windows,
            parts: vec![Part::default(); windows.exits.len()],
            far: BTreeSet::new(),
            near: BTreeSet::new(),
            waiting: Vec::new(),
        };
        for function in wanted.filter_map(|site| windows.function(site)) {
            for i in function.exits.clone() {
                let before = std::mem::replace(&mut planner.parts[i].role, Role::Wanted);
                if before == Role::Out && planner.exit(i).longest < FAR {
                    planner.waiting.push(i);
                }
            }
        }
        planner.lend(Role::Wanted);
        planner.place();
        if !planner.waiting.is_empty() {
            planner.lend(Role::Out);
            planner.place();
        }
        for &i in &planner.waiting {
            planner.parts[i].role = Role::Out;
        }
        planner
    }

    /// The exits that no way was found for.
    pub(super) fn left_out(&self) -> impl Iterator<Item = LeftOut> {
        self.waiting.iter().map(|&i| {
            let exit = self.exit(i);
            LeftOut { ret: exit.ret, site: exit.site, why: Missing::NoRoom }
        })
    }

    fn exit(&self, i: usize) -> &'a Exit {
        &self.windows.exits[i]
    }

    /// Makes all windows with a role lend what they can.
    fn lend(&mut self, role: Role) {
        for i in 0..self.parts.len() {
            if self.parts[i].role == role {
                self.sort_in(i);
            }
        }
    }

    fn sort_in(&mut self, i: usize) {
        let room = self.exit(i).room() - self.parts[i].lent;
        let sets = [(&mut self.far, FAR), (&mut self.near, NEAR)];
        for (set, bytes) in sets {
            if room >= bytes {
                set.insert(i)
            } else {
                set.remove(&i)
            };
        }
    }

    /// The next bytes that an exit lends.
    fn piece(&self, i: usize, bytes: u8) -> Piece {
        let end = self.exit(i).end() - u64::from(self.parts[i].lent);
        (end - u64::from(bytes), bytes)
    }

    fn take(&mut self, i: usize, bytes: u8) -> Piece {
        let piece = self.piece(i, bytes);
        self.parts[i].lent += bytes;
        if self.parts[i].role == Role::Out {
            self.parts[i].role = Role::Helper;
        }
        self.sort_in(i);
        piece
    }

    fn place(&mut self) {
        let (short, near): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|&i| self.exit(i).longest < NEAR);
        // Those that reach least choose first, and landings go before relays.
        let short = self.place_each(short, |planner, from| Some(vec![planner.near_landing(from)?]));
        let short = self.place_each(short, Self::by_relay);
        self.waiting = self.place_each(near, |planner, from| Some(vec![planner.landing(from)?]));
        self.waiting.extend(short);
    }

    /// Finds ways for some exits and returns the others.
    fn place_each(
        &mut self,
        mut exits: Vec<usize>,
        way: impl Fn(&mut Self, u64) -> Option<Vec<Piece>>,
    ) -> Vec<usize> {
        exits.retain(|&i| {
            let exit = self.exit(i);
            let way = way(self, exit.start(exit.shortest));
            let found = way.is_some();
            self.parts[i].way = way.unwrap_or_default();
            !found
        });
        exits
    }

    /// The lowest landing that a jump of two bytes reaches: those at lower addresses have chosen
    /// already, and the higher ones are nearer to those to come.
    fn near_landing(&mut self, from: u64) -> Option<Piece> {
        let host = self.in_short_reach(&self.far, from, FAR).next()?;
        Some(self.take(host, FAR))
    }

    /// A relay that a jump of two bytes reaches, and a landing that the relay reaches.
    fn by_relay(&mut self, from: u64) -> Option<Vec<Piece>> {
        let host = self.in_short_reach(&self.near, from, NEAR).next()?;
        let before = self.parts[host].role;
        let relay = self.take(host, NEAR);
        let landing = self.landing(relay.0);
        if landing.is_none() {
            self.parts[host].lent -= NEAR;
            self.parts[host].role = before;
            self.sort_in(host);
        }
        Some(vec![relay, landing?])
    }

    /// The landing next to an address, in reach of `jal`.
    fn landing(&mut self, from: u64) -> Option<Piece> {
        let after = self.windows.exits.partition_point(|exit| exit.ret < from);
        let candidates = [self.far.range(after..).next(), self.far.range(..after).next_back()];
        let pieces = candidates.into_iter().flatten().map(|&i| (i, self.piece(i, FAR).0));
        let (host, piece) = pieces.min_by_key(|&(_, piece)| piece.abs_diff(from))?;
        encode::jal(0, distance(from, piece))?;
        Some(self.take(host, FAR))
    }

    /// Those of some exits whose next bytes a jump of two bytes reaches.
    fn in_short_reach(
        &self,
        hosts: &BTreeSet<usize>,
        from: u64,
        bytes: u8,
    ) -> impl Iterator<Item = usize> {
        let exits = &self.windows.exits;
        let first = exits.partition_point(|exit| exit.end().saturating_add(SHORT_REACH) < from);
        let end = exits.partition_point(|exit| exit.ret < from.saturating_add(2 * SHORT_REACH));
        let reached =
            move |&i: &usize| encode::short_jump(distance(from, self.piece(i, bytes).0)).is_some();
        hosts.range(first..end.max(first)).copied().filter(reached)
    }

    /// The plan with all that it takes to write it.
    pub(super) fn finish(self) -> Plan {
        let exits = self.parts.iter().enumerate().filter(|(_, part)| part.role != Role::Out);
        let exits = exits.filter_map(|(i, part)| self.planned(self.exit(i), part)).collect();
        Plan { exits, left_out: self.left_out().collect() }
    }

    fn planned(&self, exit: &Exit, part: &Part) -> Option<PlannedExit> {
        let len = self.windows.len(exit, if part.lent > 0 { FAR + part.lent } else { 0 });
        let scratch = self.windows.scratch(exit, len)?;
        let start = exit.start(len);
        let first = (start, exit.longest.min(FAR));
        let next = part.way.iter().map(|&(to, _)| Some(to)).chain([None]);
        let pieces = std::iter::once(&first).chain(&part.way).zip(next);
        let jumps = pieces.map(|(&(at, bytes), next)| {
            let step = match (next, bytes) {
                (None, _) => Step::Far,
                (Some(to), NEAR..) => Step::Near { to },
                (Some(to), _) => Step::Short { to },
            };
            Jump { at, step }
        });
        let jumps = jumps.collect();
        let displaced = self.windows.instructions(exit, len).filter(|(_, i)| !i.is_ret());
        let displaced = displaced.map(|(address, instruction)| {
            let bytes = self.windows.bytes(exit, u8::try_from(exit.end() - address).unwrap_or(0));
            Displaced::new(address, instruction, bytes)
        });
        let epilogue = Epilogue {
            site: exit.site,
            start,
            len,
            ret: exit.ret,
            displaced: displaced.collect::<Option<_>>()?,
            scratch,
        };
        Some(PlannedExit { epilogue, helper: part.role == Role::Helper, lent: part.lent, jumps })
    }
}
