//! Redirects calls in the kernel's code through stubs that exit to the VMM.
//!
//! A call is one instruction of five bytes that nothing in the kernel verifies: in any pause it can
//! be redirected, and restored.

use super::{map, site};
use crate::kernel::Kernel;
use crate::tracer::call::Call;
use crate::tracer::edit::Edit;
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::stops::{Stops, Stub};
use rustc_hash::FxHashMap;

/// What may be calls and jumps in code at a link address.
pub(super) fn calls(start: u64, body: &[u8]) -> Vec<Call> {
    let all = (start..).zip(body.windows(site::LEN));
    let call = |(link, bytes): (u64, &[u8])| {
        let &[opcode @ (0xe8 | 0xe9), a, b, c, d] = bytes else { return None };
        let target = site::jump_target(link, &[0xe9, a, b, c, d])?;
        Some(Call { link, target, jumps: opcode == 0xe9 })
    };
    all.filter_map(call).collect()
}

/// Makes a stub for each function that these call, to be put at run-time address `at` of an annex that
/// lies at guest-physical `annex`, and what leads there; each vCPU that comes stops by `trap`, for
/// what is beside the call. Nothing has been written to the guest's own code yet. `unknown`: that the
/// kernel has another code there.
///
/// # Errors
/// As `unknown` says, or when guest memory cannot be read.
pub(super) fn lead<M: Copy>(
    guest: &dyn Guest,
    (image, kernel): (&Image, &Kernel),
    calls: &[(M, Call)],
    trap: &[u8],
    (at, annex): (u64, u64),
    unknown: &TraceError,
) -> Result<(Vec<u8>, Stops<M>), TraceError> {
    let unknown = || unknown.clone();
    let mut code: Vec<u8> = Vec::new();
    let mut stops = Stops::default();
    let mut stubs: FxHashMap<u64, u64> = FxHashMap::default();
    for &(means, call) in calls {
        let stub = match stubs.get(&call.target) {
            Some(&known) => known,
            None => {
                code.resize(code.len().next_multiple_of(16), 0xcc);
                let stub = at + code.len() as u64;
                let stop = Stub::new(stub, annex + (stub - map::ADDRESS), trap, &site::QUIET);
                let next = stub + trap.len() as u64;
                let way = site::jump(next, image.runtime(call.target)).ok_or_else(unknown)?;
                stops.stub(means, stop.ok_or_else(unknown)?);
                code.extend(trap);
                code.extend(way);
                *stubs.entry(call.target).or_insert(stub)
            }
        };
        let (from, physical) = (image.runtime(call.link), image.physical_of(call.link));
        let mut now = [0; site::LEN];
        guest.read(physical, &mut now)?;
        if kernel.bytes(call.link, now.len()) != Some(&now) {
            return Err(unknown());
        }
        let [_, a, b, c, d] = site::jump(from, stub).ok_or_else(unknown)?;
        let edit = Edit::new(physical, &now, &[now[0], a, b, c, d]);
        stops.lead(edit.ok_or_else(unknown)?);
    }
    Ok((code, stops))
}
