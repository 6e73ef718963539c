//! Code and constants in the gap between the kernel's text and its start-up code.
//!
//! Linux maps `[_etext, __init_begin)` read-execute with the text (the two are apart
//! so that their pages can have other rights later), never uses it and never frees it.
//! So it needs no mapping of ours, and every module can reach it; none can reach
//! what is behind `_end`.
//!
//! ```text
//! 0x0000  two copies of a table of jumps (kernels without CALL_OPS)
//! 0x1000  the trampoline
//! 0x1400  the stub of a trap on a site
//! 0x1600  the stub that sees the annex
//! 0x2000  one ftrace_ops for each ops (CALL_OPS)
//! ```

use super::site::{COPY, ENTRIES, STEP};
use crate::kernel::Kernel;
use crate::tracer::guest::{Guest, GuestError, Image};
use crate::tracer::members::Members;
use crate::tracer::trace::TraceError;
use vmtrace_trampolines::riscv64::Code;
use vmtrace_trampolines::riscv64::encode::register::{A7, T0, T1, ZERO};
use vmtrace_trampolines::riscv64::encode::{
    FENCE_I, NOP, SFENCE_VMA, addi, auipc, j, jalr, jr, mv, split,
};

const PAGE: u64 = 4096;
const TRAMPOLINE: u64 = 0x1000;
const TRAP: u64 = 0x1400;
const RESUME: u64 = 0x1600;
const OPS: u64 = 0x2000;
/// Bytes for one `ftrace_ops`.
const OPS_SIZE: u64 = 256;

/// The index of the ops that stands for a trap.
pub(super) const TRAP_OPS: u8 = u8::MAX;
/// Most bytes of a trap.
pub(super) const MAX_TRAP: usize = 8;
/// What is at [`Gap::trap`] while no trap is armed.
pub(super) const NO_TRAP: [u8; MAX_TRAP] = [0x13, 0, 0, 0, 0x13, 0, 0, 0];

/// Where the guest's `struct ftrace_ops` has what, and what goes there.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpsLayout {
    func: u64,
    direct_call: u64,
    /// Run-time address of a function that does nothing.
    stub: u64,
}

impl OpsLayout {
    pub(super) fn find(kernel: &Kernel, image: &Image) -> Result<Self, TraceError> {
        let members = Members::of(kernel)?;
        let member = |name: &'static str| {
            let offset = members.offset("ftrace_ops", name)?;
            let room = offset <= OPS_SIZE - 8;
            room.then_some(offset).ok_or(TraceError::NoMember("ftrace_ops", name))
        };
        let stub =
            kernel.symbols().address("ftrace_stub").ok_or(TraceError::NoSymbol("ftrace_stub"))?;
        Ok(Self {
            func: member("func")?,
            direct_call: member("direct_call")?,
            stub: image.runtime(stub),
        })
    }
}

/// The gap, with our code in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gap {
    address: u64,
    physical: u64,
    len: usize,
}

impl Gap {
    /// Finds it and makes sure that nothing is in it.
    pub(super) fn find(
        guest: &dyn Guest,
        kernel: &Kernel,
        image: &Image,
        ops: bool,
    ) -> Result<Self, TraceError> {
        let symbol =
            |name: &'static str| kernel.symbols().address(name).ok_or(TraceError::NoSymbol(name));
        let start = symbol("_etext")?.next_multiple_of(PAGE);
        let end = symbol("__init_begin")?;
        let len = if ops { OPS + u64::from(ENTRIES) * OPS_SIZE } else { OPS };
        if end.checked_sub(start).is_none_or(|room| room < len) {
            return Err(TraceError::Code("its text and its start-up code are too close"));
        }
        let (address, physical) = (image.runtime(start), image.physical_of(start));
        for page in (0..len).step_by(4096) {
            let found = image.tables.translate(guest, address + page)?;
            if found != physical + page {
                return Err(TraceError::Code("what follows its text is mapped elsewhere"));
            }
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let mut held = vec![0; len];
        guest.read(physical, &mut held)?;
        if held.iter().any(|&byte| byte != 0) {
            return Err(TraceError::Code("what follows its text is in use"));
        }
        Ok(Self { address, physical, len })
    }

    /// Writes everything and reads it back.
    pub(super) fn fill(
        &self,
        guest: &dyn Guest,
        trampoline: &Code,
        ops: Option<OpsLayout>,
    ) -> Result<(), TraceError> {
        let mut image = vec![0_u8; self.len];
        let mut put = |at: u64, bytes: &[u8]| {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            let to = image.get_mut(at..at.saturating_add(bytes.len()));
            to.map(|to| to.copy_from_slice(bytes)).ok_or(TraceError::Code("too little room"))
        };
        let code: Vec<u8> = trampoline.bytes().collect();
        put(TRAMPOLINE, &code)?;
        // The trap may need a7; afterwards the site is executed again.
        let before = [mv(T1, A7)].map(u32::to_le_bytes).concat();
        let after = [mv(A7, T1), addi(T0, T0, -8), jr(T0)].map(u32::to_le_bytes).concat();
        put(TRAP, &[&before[..], &NO_TRAP, &after].concat())?;
        for index in 0..=u8::MAX {
            let number = u64::from(index);
            let target = if index == TRAP_OPS { TRAP } else { TRAMPOLINE };
            match ops {
                Some(layout) => {
                    let at = OPS + number * OPS_SIZE;
                    // Who is on the way through ftrace_caller while a site changes
                    // hands may still call func.
                    put(at + layout.func, &layout.stub.to_le_bytes())?;
                    put(at + layout.direct_call, &(self.address + target).to_le_bytes())?;
                }
                None => {
                    for copy in [0, COPY] {
                        let at = copy + number * u64::from(STEP);
                        let distance = i32::try_from(target - at).unwrap_or(0);
                        put(at, &j(distance).to_le_bytes())?;
                    }
                }
            }
        }
        guest.write(self.physical, &image)?;
        let mut held = vec![0; self.len];
        guest.read(self.physical, &mut held)?;
        if held != image {
            return Err(TraceError::Code("what follows its text did not take them"));
        }
        Ok(())
    }

    /// Puts the zeros back: only while no context of the guest can be in here.
    pub(super) fn clear(&self, guest: &dyn Guest) -> Result<(), GuestError> {
        guest.write(self.physical, &vec![0; self.len])
    }

    /// Run-time address of the tables of jumps.
    pub(super) fn table(&self) -> u64 {
        self.address
    }

    /// Run-time address of an ops.
    pub(super) fn ops(&self, index: u8) -> u64 {
        self.address + OPS + u64::from(index) * OPS_SIZE
    }

    /// Run-time and guest-physical address of the place for a trap.
    pub(super) fn trap(&self) -> (u64, u64) {
        (self.address + TRAP + 4, self.physical + TRAP + 4)
    }

    /// Writes the stub that lets a hart see new mappings and new code, and then goes
    /// on at `address`; t1 is lost. Returns the stub's address.
    pub(super) fn resume(&self, guest: &dyn Guest, address: u64) -> Result<u64, GuestError> {
        let stub = self.address + RESUME;
        let Some((upper, lower)) = split(address.wrapping_sub(stub + 8).cast_signed()) else {
            return Err(GuestError::Mismatch(format!("{address:#x} is no kernel text")));
        };
        let code = [SFENCE_VMA, FENCE_I, auipc(T1, upper), jalr(ZERO, T1, lower)];
        guest.write(self.physical + RESUME, &code.map(u32::to_le_bytes).concat())?;
        Ok(stub)
    }
}

const _: () =
    assert!(NO_TRAP[0] as u32 == NOP && ENTRIES as u64 * STEP as u64 <= COPY && COPY * 2 <= PAGE);
