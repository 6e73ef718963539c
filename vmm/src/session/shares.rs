//! How sites are shared out among tracers.

use crate::tracer::{Duty, Tally};
use vmtrace_trampolines::Point;

/// How sites are shared out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Shares {
    /// Sites of every tracer number.
    pub(super) by_tracer: Vec<u64>,
    /// Sites that call a program made for one tracer.
    pub(super) direct: u64,
    /// Sites that call a program made for several.
    pub(super) combined: u64,
}

impl Shares {
    /// Of sites with these programs.
    pub(super) fn count(
        tracers: usize,
        sites: impl Iterator<Item = (usize, u16)>,
        programs: &[Duty],
    ) -> Self {
        let mut shares = Self { by_tracer: vec![0; tracers], ..Self::default() };
        let mut by_program = vec![0_u64; programs.len()];
        for (_, program) in sites {
            if let Some(count) = by_program.get_mut(usize::from(program)) {
                *count += 1;
            }
        }
        for (count, duty) in by_program.into_iter().zip(programs) {
            if duty.point != Point::Entry {
                continue;
            }
            // What is done beside is nobody's function.
            let parts = duty.parts.iter().filter(|part| part.counts != Some(Tally::Nothing));
            let kind = match parts.clone().count() {
                0 => continue,
                1 => &mut shares.direct,
                _ => &mut shares.combined,
            };
            *kind += count;
            for part in parts {
                if let Some(of_tracer) = shares.by_tracer.get_mut(usize::from(part.tracer)) {
                    *of_tracer += count;
                }
            }
        }
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_told_by_tracer_and_kind() {
        let programs = [Duty::entry(vec![0]), Duty::entry(vec![0, 2])];
        let shares = Shares::count(3, [(1, 0), (2, 1), (3, 1)].into_iter(), &programs);
        assert_eq!(shares, Shares { by_tracer: vec![3, 0, 2], direct: 1, combined: 2 });
        // Where tasks begin, something is done that is not about a function of the tracer's.
        let mut beside = Duty::entry(vec![0]);
        beside.parts[0].counts = Some(Tally::Nothing);
        let both = Duty { parts: [&beside.parts[..], &programs[0].parts].concat(), ..beside };
        let beside = Duty { parts: both.parts[..1].to_vec(), ..both.clone() };
        let shares = Shares::count(1, [(1, 0), (2, 1)].into_iter(), &[beside, both]);
        assert_eq!(shares, Shares { by_tracer: vec![1], direct: 1, combined: 0 });
    }
}
