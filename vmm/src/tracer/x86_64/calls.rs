//! Calls of functions by which the kernel loads and unloads modules (kernel/module/main.c).
//!
//! A call is one instruction of five bytes that nothing in the kernel verifies: in any pause it can
//! be redirected through a stub, and restored.

use super::{map, site};
use crate::kernel::Kernel;
use crate::tracer::edit::Edit;
use crate::tracer::error::TraceError;
use crate::tracer::guest::Guest;
use crate::tracer::image::Image;
use crate::tracer::module_calls::{self, ModuleMoment};
use crate::tracer::stops::{Stops, Stub};

/// Link addresses of the calls of (and jumps to) a function that are in those that may have them.
fn calls(callers: &[(u64, &[u8])], function: u64) -> Vec<u64> {
    let of = |&(start, body): &(u64, &[u8])| {
        let leads = |(link, bytes): (u64, &[u8])| {
            let &[0xe8 | 0xe9, a, b, c, d] = bytes else { return None };
            (site::jump_target(link, &[0xe9, a, b, c, d]) == Some(function)).then_some(link)
        };
        (start..).zip(body.windows(site::LEN)).filter_map(leads).collect::<Vec<_>>()
    };
    callers.iter().flat_map(of).collect()
}

/// Makes the stubs of these functions, to be put at run-time address `at` of an annex that lies at
/// guest-physical `annex`, and what leads there.
///
/// # Errors
/// When the kernel has no such function, or no call of it where it should be.
pub(super) fn make(
    guest: &dyn Guest,
    image: &Image,
    kernel: &Kernel,
    functions: &[(ModuleMoment, &'static str)],
    trap: &[u8],
    (at, annex): (u64, u64),
) -> Result<(Vec<u8>, Stops<ModuleMoment>), TraceError> {
    const UNKNOWN: TraceError = module_calls::UNKNOWN;
    let mut code: Vec<u8> = Vec::new();
    let mut stops = Stops::default();
    let callers: Vec<_> = module_calls::callers(kernel).collect();
    for &(moment, name) in functions {
        let function = kernel.symbols().address(name);
        if function.is_none() && !moment.is_needed() {
            continue;
        }
        let function = function.ok_or(TraceError::NoSymbol(name))?;
        let calls = calls(&callers, function);
        log::debug!("calls of {name}: {calls:x?}");
        if calls.is_empty() {
            if moment.is_needed() {
                return Err(UNKNOWN);
            }
            continue;
        }
        code.resize(code.len().next_multiple_of(16), 0xcc);
        let stub = at + code.len() as u64;
        let next = stub + trap.len() as u64;
        let stop = Stub::new(stub, annex + (stub - map::ADDRESS), trap, &site::QUIET);
        let way = site::jump(next, image.runtime(function));
        let (Some(stop), Some(way)) = (stop, way) else { return Err(UNKNOWN) };
        code.extend(trap);
        code.extend(way);
        stops.stub(moment, stop);
        for link in calls {
            let (from, physical) = (image.runtime(link), image.physical_of(link));
            let mut now = [0; site::LEN];
            guest.read(physical, &mut now)?;
            let expected = kernel.bytes(link, site::LEN);
            let ours = site::jump(from, stub).map(|[_, a, b, c, d]| [now[0], a, b, c, d]);
            let edit = ours.and_then(|ours| Edit::new(physical, &now, &ours));
            let edit = edit.filter(|_| expected == Some(&now[..]));
            stops.lead(edit.ok_or(UNKNOWN)?);
        }
    }
    Ok((code, stops))
}

#[cfg(test)]
mod tests {
    use super::*;

    // A call that is not found is a module whose memory is written after it is gone.
    #[test]
    fn all_calls_of_the_kernel_are_found() {
        for name in ["x86_64-6.1", "x86_64-6.12", "x86_64-6.12-rt", "x86_64-7"] {
            let cache = vmtrace_emulated::cache_dir().expect("no cache directory");
            let path = cache.join("kernels").join(name).join("vmlinuz");
            let kernel = Kernel::open(&path).unwrap();
            let symbol = |name| kernel.symbols().address(name).unwrap();
            let (start, end) = (symbol("_stext"), symbol("_etext"));
            let text = kernel.bytes(start, usize::try_from(end - start).unwrap()).unwrap();
            // Others are told of other things by the last one.
            let needed = module_calls::FUNCTIONS.iter().filter(|(moment, _)| moment.is_needed());
            let functions: Vec<u64> = needed.map(|(_, name)| symbol(name)).collect();
            let mut all = vec![Vec::new(); functions.len()];
            let opcodes = text.iter().enumerate().filter(|(_, byte)| matches!(byte, 0xe8 | 0xe9));
            for (at, _) in opcodes {
                let Some(&[_, a, b, c, d]) = text[at..].first_chunk() else { continue };
                let link = start + at as u64;
                let target = site::jump_target(link, &[0xe9, a, b, c, d]);
                let which = functions.iter().position(|&function| target == Some(function));
                if let Some(which) = which {
                    all[which].push(link);
                }
            }
            let callers: Vec<_> = module_calls::callers(&kernel).collect();
            for (function, all) in functions.into_iter().zip(all) {
                assert_eq!(calls(&callers, function), all, "{name}");
                assert!(!all.is_empty());
            }
        }
    }
}
