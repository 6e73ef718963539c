//! The guest's own handling of tracepoints, on any architecture (kernel/tracepoint.c): the code
//! that changes them, its lock, and the guest's own probes.

use crate::kernel::Kernel;
use crate::kernel::tracepoints::{Branch, Hooks};
use crate::tracer::call::Call;
use crate::tracer::edit::Edit;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::modules::place;
use crate::tracer::mutex::{LOCKS, UNLOCKS};
use crate::tracer::spot::PAGE;
use crate::tracer::stops::Moment;
use crate::tracer::view::View;
use std::ops::Range;

/// Where the guest changes its tracepoints; not all kernels have all.
const CHANGES: [&str; 4] = [
    "tracepoint_probe_register",
    "tracepoint_probe_register_prio",
    "tracepoint_probe_register_prio_may_exist",
    "tracepoint_probe_unregister",
];
/// Those that each kernel has.
const NEEDED: [&str; 2] = ["tracepoint_probe_register_prio", "tracepoint_probe_unregister"];
/// More than any of these functions has.
const LONGEST: usize = 8192;

/// Why a tracepoint is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointReason {
    /// The code that calls its probes is not as the image and the guest's own state say.
    Unknown,
    /// It is nowhere in code that stays.
    Nowhere,
    /// The guest has more probes than are understood.
    Probes,
    /// What is called is out of reach, or there is no place for it.
    OutOfReach,
    /// It is not in guest RAM.
    NoRam,
    /// It did not hold what was written.
    ReadBack,
    /// The guest's list of its tasks is not as it is known to be.
    Tasks,
}

impl std::fmt::Display for PointReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unknown => "its code is not as the guest's tracepoint says",
            Self::Nowhere => "the kernel's own code does not use it",
            Self::Probes => "it has too many probes of the guest's own",
            Self::OutOfReach => {
                "there is no place left for its probe (fewer events, or conditions, have room)"
            }
            Self::NoRam => "it is not in guest RAM",
            Self::ReadBack => "it did not take the patch",
            Self::Tasks => "tasks cannot be marked as having their system calls traced",
        })
    }
}

/// Where the kernel takes the lock under which it changes its tracepoints, and gives it back.
/// `calls` finds what may be calls in code at a link address. `None` when that is not as it is
/// known to be.
pub(in crate::tracer) fn brackets(
    kernel: &Kernel,
    calls: impl Fn(u64, &[u8]) -> Vec<Call>,
) -> Option<Vec<(Moment, Call)>> {
    let symbols = kernel.symbols();
    let [locks, unlocks] = [&LOCKS[..], &UNLOCKS]
        .map(|names| names.iter().filter_map(|name| symbols.address(name)).collect::<Vec<u64>>());
    if unlocks.is_empty() {
        return None;
    }
    let mut all = Vec::new();
    for name in CHANGES {
        let Some(start) = symbols.address(name) else {
            if NEEDED.contains(&name) {
                return None;
            }
            continue;
        };
        let body = kernel.code(start, LONGEST)?;
        let before = all.len();
        for call in calls(start, body) {
            let moment = match call.target {
                target if locks.contains(&target) => Moment::Begin,
                target if unlocks.contains(&target) => Moment::End,
                _ => continue,
            };
            all.push((moment, call));
        }
        // One that only calls another has neither.
        let own = all.get(before..)?;
        let begins = own.iter().filter(|(moment, _)| *moment == Moment::Begin).count();
        if begins > 1 || (begins == 1) != (own.len() > begins) {
            return None;
        }
        // Who jumps to the lock does not come back.
        if own.iter().any(|(moment, call)| *moment == Moment::Begin && call.jumps) {
            return None;
        }
    }
    let is_sound = all.iter().any(|(moment, _)| *moment == Moment::Begin);
    is_sound.then_some(all)
}

/// Whether somebody has the lock or waits for it.
pub(in crate::tracer) fn is_changing(
    guest: &dyn Guest,
    image: &Image,
    kernel: &Kernel,
) -> Option<bool> {
    let lock = kernel.symbols().address("tracepoints_mutex")?;
    let btf = kernel.btf().ok()?;
    // The others in kernels for real time, the last before 5.15.
    let offset = ["owner", "rtmutex.owner", "lock.owner"];
    let offset = offset.iter().find_map(|member| btf.member_offset("mutex", member))?;
    let owner = guest.read_u64(image.physical_of(lock.wrapping_add(offset.into()))).ok()?;
    Some(owner != 0)
}

/// Which addresses are the kernel's own; all others are of modules.
#[derive(Clone, Debug)]
pub(in crate::tracer) struct Own {
    all: Range<u64>,
    /// Code that the guest frees.
    init: Range<u64>,
}

impl Own {
    pub(in crate::tracer) fn of(kernel: &Kernel) -> Self {
        let symbols = kernel.symbols();
        let address = |name| symbols.address(name).unwrap_or(0);
        let last = || symbols.iter().map(|symbol| symbol.address).max().unwrap_or(0);
        let start = symbols.address("_stext").or_else(|| symbols.address("_text")).unwrap_or(0);
        let start = start.min(symbols.address("_text").unwrap_or(start));
        Self {
            all: start..symbols.address("_end").unwrap_or_else(last),
            init: address("_sinittext")..address("_einittext"),
        }
    }

    /// Whether code at a link address is there as long as the kernel, or its module.
    pub(in crate::tracer) fn stays(&self, code: u64) -> bool {
        !self.init.contains(&code)
    }
}

/// Where code and data of the kernel and its modules are in guest-physical memory.
#[derive(Clone, Copy)]
pub(in crate::tracer) struct Places<'a> {
    pub(in crate::tracer) guest: &'a dyn Guest,
    pub(in crate::tracer) view: &'a View<'a>,
    pub(in crate::tracer) image: &'a Image,
    pub(in crate::tracer) own: &'a Own,
}

impl Places<'_> {
    /// Where so many bytes (up to 8) are that begin at a link address, in one or two pieces: each
    /// its guest-physical address and length.
    fn pieces(&self, link: u64, len: usize) -> Result<[(u64, usize); 2], PointReason> {
        if self.own.all.contains(&link) {
            return Ok([(self.image.physical_of(link), len), (0, 0)]);
        }
        let at = place(self.guest, self.image, self.image.runtime(link), len);
        let (first, beyond) = at.ok_or(PointReason::NoRam)?;
        let there = match beyond {
            Some(_) => usize::try_from(PAGE - first % PAGE).unwrap_or(len).min(len),
            None => len,
        };
        Ok([(first, there), (beyond.unwrap_or(0), len - there)])
    }

    /// Up to 8 bytes at a link address, the first the lowest.
    pub(in crate::tracer) fn load(&self, link: u64, len: u8) -> Result<u64, PointReason> {
        let mut word = 0;
        let mut shift = 0;
        for (physical, len) in self.pieces(link, len.into())? {
            let Some(len) = u8::try_from(len).ok().filter(|len| *len > 0) else { continue };
            let piece = self.view.load(physical, len).map_err(|_| PointReason::NoRam)?;
            word |= piece << shift;
            shift += 8 * u32::from(len);
        }
        Ok(word)
    }

    /// What changes bytes at a link address: one edit, or two where they are on two pages.
    pub(in crate::tracer) fn edit(
        &self,
        link: u64,
        [before, after]: [&[u8]; 2],
    ) -> Result<Vec<Edit>, PointReason> {
        let mut from = 0;
        let mut edits = Vec::with_capacity(1);
        for (physical, len) in self.pieces(link, before.len())? {
            if len > 0 {
                let part = from..from + len;
                let [before, after] =
                    [before, after].map(|bytes| bytes.get(part.clone()).unwrap_or_default());
                edits.push(Edit::new(physical, before, after).ok_or(PointReason::Unknown)?);
            }
            from += len;
        }
        Ok(edits)
    }
}

/// Whether a branch jumps, and what is to be written if it does not: each architecture has its own.
pub(in crate::tracer) type Jump =
    fn(&Places<'_>, &Branch) -> Result<(bool, Vec<Edit>), PointReason>;

/// How many of these branches stay, and what is to be written for all of them to jump; all must be as they `may` be
/// (whether one jumps).
pub(in crate::tracer) fn branches(
    places: &Places<'_>,
    branches: &[Branch],
    jump: Jump,
    may: impl Fn(bool) -> bool,
) -> Result<(usize, Vec<Edit>), PointReason> {
    let (mut count, mut edits) = (0, Vec::new());
    for branch in branches.iter().filter(|branch| places.own.stays(branch.code)) {
        count += 1;
        let (jumps, edit) = jump(places, branch)?;
        if !may(jumps) {
            return Err(PointReason::Unknown);
        }
        edits.extend(edit);
    }
    Ok((count, edits))
}

/// The guest's own probes of a tracepoint.
pub(in crate::tracer) struct Probes {
    /// Run-time address of their array; 0: there is none.
    array: u64,
    /// Function, data and priority of each.
    all: Vec<[u64; 3]>,
}

impl Probes {
    /// Reads them.
    pub(in crate::tracer) fn read(places: &Places<'_>, hooks: &Hooks) -> Result<Self, PointReason> {
        const MOST: u64 = 32;
        const SIZE: u64 = 24;
        let Places { guest, image, .. } = *places;
        let array = places.load(hooks.funcs, 8)?;
        let enabled = places.load(hooks.enabled, 4)?;
        // While there is no bracket open both say the same.
        if (array != 0) != (enabled != 0) {
            return Err(PointReason::Unknown);
        }
        let mut all = Vec::new();
        if array == 0 {
            return Ok(Self { array, all });
        }
        for number in 0..MOST {
            let word = |offset| {
                let at = array.wrapping_add(number * SIZE + offset);
                image.read_u64(guest, at).map_err(|_| PointReason::NoRam)
            };
            let function = word(0)?;
            if function == 0 {
                let none = all.is_empty();
                return if none { Err(PointReason::Unknown) } else { Ok(Self { array, all }) };
            }
            all.push([function, word(8)?, word(16)?]);
        }
        Err(PointReason::Probes)
    }

    /// Run-time address of their array; 0: there is none.
    pub(in crate::tracer) fn array(&self) -> u64 {
        self.array
    }

    /// The only one, or none, or several.
    pub(in crate::tracer) fn all(&self) -> &[[u64; 3]] {
        &self.all
    }

    /// The words of an array with ours (run-time address) before them.
    pub(in crate::tracer) fn behind(&self, probe: u64) -> Vec<u64> {
        // Who was about to call the guest's first probe has its data in hand.
        let data = self.all.first().map_or(0, |&[_, data, _]| data);
        let all = [[probe, data, 0]].into_iter().chain(self.all.iter().copied()).chain([[0; 3]]);
        all.flatten().collect()
    }
}
