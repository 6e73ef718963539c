//! Programs, and the values of usual kernels.

use super::Instruction;
use vmtrace_trampolines::x86_64::Addressing;
use vmtrace_trampolines::{
    Condition, ContextPlaces, Counters, Counts, Field, Point, Program, Readable,
};

/// Of a guest with 4 GiB.
pub(crate) fn readable() -> Readable {
    let ram = (0xffff_8880_0000_0000, 4 << 30);
    let image = (0xffff_ffff_8220_0000, 0x80_0000);
    Readable { areas: vec![ram, image], stack: Some((32, 16 << 10)) }
}

/// Where tasks are noted that are followed.
pub(crate) const SET: u64 = 0xffff_ffff_8740_0000;

/// Where those are that are known not to be meant.
pub(crate) const STRANGERS: u64 = SET + vmtrace_trampolines::family::SIZE;

/// Of a hit for which there is room.
pub(crate) fn common(all: &[Instruction]) -> &[Instruction] {
    let end = all.iter().position(|one| one.ending).unwrap();
    assert!(all[..end].iter().all(|one| !one.jump), "is one straight run");
    &all[..=end]
}

pub(crate) fn endings(all: &[Instruction]) -> Vec<usize> {
    all.iter().filter(|one| one.ending).map(|one| one.offset).collect()
}

pub(crate) fn with(point: Point, fields: &[Field]) -> Program {
    Program {
        number: 2000,
        tracers: 1,
        point,
        fields: fields.to_vec(),
        condition: None,
        counts: None,
        since: None,
        nesting: None,
        marked: None,
    }
}

/// Of a usual kernel.
pub(crate) fn usual_x86() -> vmtrace_trampolines::x86_64::Values {
    vmtrace_trampolines::x86_64::Values {
        rings: 0,
        addressing: Addressing::PerCpu { distance: 0xffff_8000_1234_5678 },
        current: 0x1_fb80,
        pid: 0x990,
        cpu: 0x20,
        slide: 0,
        readable: readable(),
        followed: Some(SET),
        context: Some(ContextPlaces {
            flags: 0,
            preempt_count: 0x1_fb40,
            resched: None,
            migration: Some(0x7f0),
            softirq: None,
            lazy: None,
        }),
    }
}

/// The same of riscv64.
pub(crate) fn usual_riscv() -> vmtrace_trampolines::riscv64::Values {
    vmtrace_trampolines::riscv64::Values {
        cpu: 32,
        pid: 0x4f0,
        controls: 0xffff_ffff_8160_0000,
        slide: 0,
        readable: readable(),
        followed: Some(SET),
        strangers: None,
        context: Some(ContextPlaces {
            flags: 0,
            preempt_count: 8,
            resched: None,
            migration: Some(0x448),
            softirq: None,
            lazy: None,
        }),
    }
}

pub(crate) const ARGUMENTS: [Field; 4] =
    [Field::Argument(0), Field::Argument(1), Field::Argument(2), Field::Argument(3)];

/// A program that counts.
pub(crate) fn counting(counters: Counters, condition: Option<Condition>) -> Program {
    Program { counts: Some(Counts::Up(counters)), condition, ..with(Point::Entry, &[]) }
}
