//! A fake CPU is a gs base.

use super::{AREA, FakeGuest, PID, STACK_OF, at};
use vmtrace_trampolines::x86_64::{self, Values, compile};
use vmtrace_trampolines::{Code, ContextPlaces, Overflow, Point, Program};

pub(crate) use vmtrace_trampolines::x86_64::{PROBE_CALLED, SPENT};

/// How a control block is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addressing {
    PerCpu,
    Shared,
}

pub(crate) const ADDRESSINGS: [Addressing; 2] = [Addressing::PerCpu, Addressing::Shared];
/// From positions to memory.
pub(crate) const RINGS: i32 = 0x1000_0000;
/// From a site to where the program returns to.
pub(crate) const SITE_RETURN: u64 = 5;

/// Offsets in a CPU's area.
const CURRENT: u64 = 0;
const CPU_NUMBER: u64 = 8;
const PREEMPT_COUNT: u64 = 16;
const CONTROL: u64 = 64;
/// Offsets in a task.
const FLAGS: u64 = 0;
const MIGRATION: u64 = 8;
const SOFTIRQ: u64 = 12;

pub(super) const fn control(per_cpu: u64, cpu: u64) -> u64 {
    per_cpu + cpu * AREA + CONTROL
}

/// call program; ret
pub(crate) fn site(address: u64, program: u64) -> Vec<u8> {
    let mut code = vec![0xe8];
    let distance = program.wrapping_sub(address + 5).cast_signed();
    code.extend(i32::try_from(distance).unwrap().to_le_bytes());
    code.push(0xc3);
    code
}

/// How often each instruction is interrupted for each number of nested hits.
pub(crate) const REPETITIONS: usize = 4;

/// How many signals a stress test takes.
pub(crate) const SIGNALS: u64 = 40_000;

pub(crate) fn ticks() -> u64 {
    // SAFETY: rdtsc has no preconditions.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// A signal handler that may interrupt anything here.
pub(crate) fn handler(handler: extern "C" fn(i32)) -> usize {
    handler as *const () as usize
}

/// What all registers are when a function is called and, then, when it has returned. By number, as
/// instructions have them: rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15.
#[repr(C)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registers {
    pub(crate) x: [u64; 16],
    /// Arguments on the stack. The first lies where `x[STACK]` says, above the return address.
    pub(crate) stack: [u64; 8],
    /// Where that return address points to.
    pub(crate) back: u64,
}

pub(crate) const ARGUMENTS: [usize; 6] = [7, 6, 2, 1, 8, 9];
/// Of those, what returns a function's value.
pub(crate) const VALUE: usize = 0;
pub(crate) const STACK: usize = 4;
/// From the stack pointer of a caller to where its return address lies.
pub(crate) const RETURN_ADDRESS: u64 = 8;

/// Registers that [`FakeGuest::run`] has a use for: none that is not free.
pub(crate) const OWN: [usize; 0] = [];

pub(crate) const fn stack_bias(point: Point) -> u64 {
    x86_64::stack_bias(point)
}

/// Registers that a program may change.
pub(crate) fn free(point: Point) -> &'static [usize] {
    match point {
        Point::Entry | Point::Tail => &[10, 11],
        Point::Return => &[1, 6, 7, 8, 9, 10, 11],
        Point::Probe => &[0, 1, 2, 6, 7, 8, 9, 10, 11],
        // Its caller may know what the function does not change.
        Point::Beyond => &[],
    }
}

#[unsafe(naked)]
unsafe extern "C" fn run(registers: *mut Registers, target: u64) {
    core::arch::naked_asm!(
        "push rbx; push rbp; push r12; push r13; push r14; push r15; push rdi",
        "push [rdi + 184]; push [rdi + 176]; push [rdi + 168]; push [rdi + 160]",
        "push [rdi + 152]; push [rdi + 144]; push [rdi + 136]; push [rdi + 128]",
        "mov [rdi + 32], rsp",
        "lea rax, [rip + 2f]; mov [rdi + 192], rax",
        // Below the stack pointer, where signals leave 128 bytes alone.
        "mov [rsp - 16], rsi",
        "mov rax, [rdi]; mov rcx, [rdi + 8]; mov rdx, [rdi + 16]; mov rbx, [rdi + 24]",
        "mov rbp, [rdi + 40]; mov rsi, [rdi + 48]; mov r8, [rdi + 64]; mov r9, [rdi + 72]",
        "mov r12, [rdi + 96]; mov r13, [rdi + 104]; mov r14, [rdi + 112]; mov r15, [rdi + 120]",
        "mov r10, [rdi + 80]; mov r11, [rdi + 88]",
        "mov rdi, [rdi + 56]",
        "call [rsp - 16]",
        "2: xchg rax, [rsp + 64]",
        "mov [rax + 8], rcx; mov [rax + 16], rdx; mov [rax + 24], rbx; mov [rax + 32], rsp",
        "mov [rax + 40], rbp; mov [rax + 48], rsi; mov [rax + 56], rdi; mov [rax + 64], r8",
        "mov [rax + 72], r9; mov [rax + 80], r10; mov [rax + 88], r11; mov [rax + 96], r12",
        "mov [rax + 104], r13; mov [rax + 112], r14; mov [rax + 120], r15",
        "pop [rax + 128]; pop [rax + 136]; pop [rax + 144]; pop [rax + 152]",
        "pop [rax + 160]; pop [rax + 168]; pop [rax + 176]; pop [rax + 184]",
        "pop [rax]",
        "pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
        "ret",
    )
}

/// Calls a function with these registers.
pub(crate) fn call(function: u64, registers: &mut Registers) {
    // SAFETY: what is there is a function that changes nothing but registers and rings.
    unsafe { run(registers, function) };
}

/// `hlt`: does not move on, unlike `int3`.
pub(crate) const FAULT: &[u8] = &[0xf4];
pub(crate) const FAULT_SIGNAL: i32 = libc::SIGSEGV;

/// Offsets and lengths of a program's instructions.
pub(crate) fn instructions(code: &[u8]) -> Vec<(usize, usize)> {
    use capstone::prelude::*;
    let decoder = Capstone::new().x86().mode(arch::x86::ArchMode::Mode64).build();
    let decoded = decoder.unwrap();
    let all = decoded.disasm_all(code, 0).unwrap();
    all.iter().map(|one| (usize::try_from(one.address()).unwrap(), one.bytes().len())).collect()
}

/// Changes code.
pub(crate) fn patch(code: *mut u8, bytes: &[u8]) {
    // SAFETY: the caller says that there is code, which this thread alone runs.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), code, bytes.len()) };
}

/// `jmp`
pub(crate) fn jump(from: u64, to: u64) -> Vec<u8> {
    let distance = i32::try_from(to.wrapping_sub(from + 5).cast_signed()).unwrap();
    let mut code = vec![0xe9];
    code.extend(distance.to_le_bytes());
    code
}

/// `endbr64`, which does nothing.
/// Waits for nothing (pause).
pub(crate) const WAIT: &[u8] = &[0xf3, 0x90];

pub(crate) const NOP: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// In place of what stops a CPU: writes what tells the site to this word, below 2 GiB.
pub(crate) fn stop(word: u64) -> &'static [u8] {
    // mov [word], r10
    let address = u32::try_from(word).unwrap();
    [[0x4c, 0x89, 0x14, 0x25], address.to_le_bytes()].concat().leak()
}

/// A program at an address that goes on with another one in place of its end, as the VMM makes it.
pub(super) fn going_on(code: Code, address: u64, to: u64) -> Vec<u8> {
    let Code { mut bytes, endings, .. } = code;
    let ending = endings[0];
    bytes[ending..ending + 5].copy_from_slice(&jump(address + ending as u64, to));
    bytes
}

impl FakeGuest {
    /// Lets a site end by a program of [`Point::Return`], through a stub. What its record has for
    /// it.
    pub(crate) fn return_from(&self, site: u64, program: usize) -> u32 {
        let stub = self.stub(0);
        let code = x86_64::return_stub(stub, self.site(site), self.program(program)).unwrap();
        self.put(0, &code);
        self.set_site(site, &jump(self.site(site), stub));
        u32::try_from(self.site(site)).unwrap()
    }

    /// The same by a program of [`Point::Beyond`].
    pub(crate) fn beyond_from(&self, site: u64, program: usize) -> u32 {
        let stub = self.stub(0);
        let leave = [0xc3, 0xcc, 0xcc, 0xcc, 0xcc];
        let code = x86_64::beyond_stub(stub, self.program(program), leave).unwrap();
        self.put(0, &code);
        self.set_site(site, &jump(self.site(site), stub));
        u32::try_from(stub + x86_64::BEYOND_CALL).unwrap()
    }

    /// Lets a site be a program of [`Point::Probe`], as kernels enter it: from every other one as through a
    /// pointer. What its record has for it.
    pub(crate) fn probe_from(&self, site: u64, program: usize) -> u32 {
        let called = self.program(program) + PROBE_CALLED;
        let entered = if site.is_multiple_of(2) { called } else { self.program(program) };
        self.set_site(site, &jump(self.site(site), entered));
        u32::try_from(called).unwrap()
    }

    /// Lets a site go on to another function through a stub that calls an entry program. What its
    /// record has for it.
    pub(crate) fn tail_from(&self, site: u64, program: usize) -> u32 {
        let (stub, target) = (self.stub(0), self.put(1, &[0xc3]));
        self.put(0, &x86_64::tail_stub(stub, self.program(program), target).unwrap());
        self.set_site(site, &jump(self.site(site), stub));
        u32::try_from(stub + 5).unwrap()
    }

    /// A function that calls another one and returns, with where its call returns to.
    pub(crate) fn caller_of(&self, function: u64) -> (u64, u64) {
        self.caller_at(2, function)
    }

    /// The same in one of the places of [`FakeGuest::put`].
    pub(crate) fn caller_at(&self, place: usize, function: u64) -> (u64, u64) {
        let stub = self.stub(place);
        self.put(place, &site(stub, function));
        (stub, stub + SITE_RETURN)
    }

    /// Calls a function with these registers.
    pub(crate) fn run(&self, site: u64, registers: &mut Registers) {
        call(self.site(site), registers);
    }

    pub(super) fn compile(&self, program: &Program, addressing: Addressing) -> Code {
        let table = self.per_cpu + CONTROL + 64;
        for cpu in 0..self.cpus {
            let area = self.per_cpu + cpu * AREA;
            // SAFETY: all inside the mappings made by `new`, aligned, not shared yet.
            unsafe {
                at::<u64>(area + CURRENT).write(self.tasks);
                at::<u64>(area + CPU_NUMBER).write(cpu);
                at::<u64>(table + 8 * cpu).write(control(self.per_cpu, cpu));
            }
        }
        let addressing = match addressing {
            // gs is the area's address; the block lies CONTROL bytes into it.
            Addressing::PerCpu => x86_64::Addressing::PerCpu { distance: CONTROL },
            Addressing::Shared => {
                x86_64::Addressing::Shared { number: CPU_NUMBER, cpus: self.cpus, table }
            }
        };
        let values = Values {
            rings: RINGS,
            addressing,
            current: CURRENT,
            pid: PID,
            cpu: CPU_NUMBER,
            slide: 0,
            readable: self.readable(),
            followed: Some(super::followed().0),
            context: Some(ContextPlaces {
                flags: FLAGS,
                preempt_count: PREEMPT_COUNT,
                // As kernels before 5.11.
                migration: (self.overflow != Overflow::Overwrite).then_some(MIGRATION),
                softirq: Some(SOFTIRQ),
                // One of the two as kernels with a flag up there, and with a wide count.
                resched: matches!(addressing, x86_64::Addressing::Shared { .. })
                    .then_some(PREEMPT_COUNT + 7),
                lazy: matches!(addressing, x86_64::Addressing::Shared { .. }).then_some(FLAGS + 2),
            }),
        };
        compile(program, self.overflow, &values).unwrap()
    }

    /// The calling thread runs on `cpu` from now on.
    pub(crate) fn run_on(&self, cpu: u64) {
        const ARCH_SET_GS: i32 = 0x1001;
        let base = self.per_cpu + cpu * AREA;
        // SAFETY: gs is unused by Rust and glibc on x86-64.
        let result = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) };
        assert_eq!(result, 0);
    }

    /// The calling thread is the task `pid` on `cpu`. Returns the task.
    pub(crate) fn set_current(&self, cpu: u64, pid: u32) -> u64 {
        let task = self.tasks + u64::from(pid) % 16 * 64;
        // SAFETY: inside the mappings of `new`.
        unsafe { at::<u32>(task + PID).write_volatile(pid) };
        // SAFETY: as above.
        unsafe { at::<u64>(task + STACK_OF).write_volatile(self.stack()) };
        // SAFETY: as above.
        unsafe { at::<u64>(self.per_cpu + cpu * AREA + CURRENT).write_volatile(task) };
        self.run_on(cpu);
        task
    }

    /// Gives the current task on `cpu` a state: its flags, and counts of preemption, migration and
    /// softirqs.
    pub(crate) fn set_context(&self, cpu: u64, (flags, counts): (u32, [u32; 3])) {
        let area = self.per_cpu + cpu * AREA;
        // SAFETY: inside the mappings of `new`.
        let task = unsafe { at::<u64>(area + CURRENT).read_volatile() };
        let [preempt, migration, softirq] = counts;
        let places = [
            (task + FLAGS, flags),
            (area + PREEMPT_COUNT, preempt),
            (task + MIGRATION, migration),
            (task + SOFTIRQ, softirq),
        ];
        for (place, value) in places {
            // SAFETY: as above.
            unsafe { at::<u32>(place).write_volatile(value) };
        }
    }

    /// What a CPU has in the upper half of a wide count.
    pub(crate) fn set_upper(&self, cpu: u64, upper: u32) {
        // SAFETY: inside the mappings of `new`.
        unsafe { at::<u32>(self.per_cpu + cpu * AREA + PREEMPT_COUNT + 4).write_volatile(upper) };
    }

    /// A wide count of preemptions of a CPU.
    pub(crate) fn wide_count(&self, cpu: u64) -> u64 {
        // SAFETY: inside the mappings of `new`.
        unsafe { at::<u64>(self.per_cpu + cpu * AREA + PREEMPT_COUNT).read_volatile() }
    }

    /// Calls the traced function `site` on the CPU of this thread.
    pub(crate) fn hit(&self, site: u64) {
        // SAFETY: a C ABI function without arguments was written there.
        let function: extern "C" fn() = unsafe { core::mem::transmute(at::<u8>(self.site(site))) };
        function();
    }
}
