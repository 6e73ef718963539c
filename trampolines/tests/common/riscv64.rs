//! A fake CPU is a number in a task, and `tp` points to the task while a function is called.

use super::{AREA, FakeGuest, PID, STACK_OF, at};
use core::sync::atomic::{AtomicU64, Ordering};
use std::cell::{Cell, RefCell};
use std::sync::Once;
use vmtrace_trampolines::family::Strangers;
use vmtrace_trampolines::layout::CONTROL_SIZE;
use vmtrace_trampolines::riscv64::encode;
use vmtrace_trampolines::riscv64::encode::register::{RA, T0, T1, T3, ZERO};
use vmtrace_trampolines::riscv64::encode::{auipc, j, jal, jalr, jr, lui, split};
use vmtrace_trampolines::riscv64::{Values, compile};
use vmtrace_trampolines::{Code, Point, Program};

pub(crate) use vmtrace_trampolines::riscv64::SPENT;

/// There is one way to find a control block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addressing;

pub(crate) const ADDRESSINGS: [Addressing; 1] = [Addressing];
/// From positions to memory.
pub(crate) const RINGS: i32 = 0;
/// From a site to where the trampoline returns to.
pub(crate) const SITE_RETURN: u64 = 8;

/// Offsets in a task.
const THREAD: u64 = 8;
const CPU: u64 = 32;
/// Bytes of a task.
const TASK: u64 = 64;

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
    static STRANGERS: RefCell<Option<Strangers>> = const { RefCell::new(None) };
}

/// Where tasks are: what `tp` points to while a function is called.
static TASKS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
static FIRST: Once = Once::new();
/// Tasks handed out, in bytes.
static USED: AtomicU64 = AtomicU64::new(0);

/// Programs that this thread compiles from now on know these.
pub(crate) fn know_strangers(strangers: Strangers) {
    STRANGERS.set(Some(strangers));
}

pub(super) const fn control(per_cpu: u64, cpu: u64) -> u64 {
    per_cpu + cpu * CONTROL_SIZE as u64
}

/// auipc t0; jalr t0; ret
pub(crate) fn site(address: u64, program: u64) -> Vec<u8> {
    let (upper, lower) = split(program.wrapping_sub(address).cast_signed()).unwrap();
    let code = [auipc(T0, upper), jalr(T0, T0, lower), jr(RA)];
    code.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// How often each instruction is interrupted for each number of nested hits.
pub(crate) const REPETITIONS: usize = 1;

/// How many signals a stress test takes.
pub(crate) const SIGNALS: u64 = 1_500;

pub(crate) fn ticks() -> u64 {
    let ticks;
    // SAFETY: reading the clock has no preconditions.
    unsafe { core::arch::asm!("rdtime {}", out(reg) ticks) };
    ticks
}

static HANDLER: AtomicU64 = AtomicU64::new(0);

/// A signal handler that may interrupt anything here: while a function is called
/// `tp` is a task, which knows the thread pointer that Rust needs.
pub(crate) fn handler(handler: extern "C" fn(i32)) -> usize {
    HANDLER.store(handler as *const () as u64, Ordering::Relaxed);
    with_thread_pointer as *const () as usize
}

#[unsafe(naked)]
extern "C" fn with_thread_pointer(_: i32) {
    core::arch::naked_asm!(
        "addi sp, sp, -16",
        "sd ra, 0(sp)",
        "sd tp, 8(sp)",
        "la t0, {tasks}",
        "ld t1, 0(t0)",
        "ld t2, 8(t0)",
        "bltu tp, t1, 1f",
        "bgeu tp, t2, 1f",
        "ld tp, {thread}(tp)",
        "1: la t0, {handler}",
        "ld t0, 0(t0)",
        "jalr t0",
        "ld tp, 8(sp)",
        "ld ra, 0(sp)",
        "addi sp, sp, 16",
        "ret",
        tasks = sym TASKS,
        thread = const THREAD,
        handler = sym HANDLER,
    )
}

fn current() -> u64 {
    if CURRENT.get() == 0 {
        let task = TASKS[0].load(Ordering::Relaxed) + USED.fetch_add(TASK, Ordering::Relaxed);
        assert!(task < TASKS[1].load(Ordering::Relaxed), "too many threads");
        let thread: u64;
        // SAFETY: copies a register.
        unsafe { core::arch::asm!("mv {}, tp", out(reg) thread) };
        // SAFETY: in the page of tasks, this thread's own.
        unsafe { at::<u64>(task + THREAD).write_volatile(thread) };
        CURRENT.set(task);
    }
    CURRENT.get()
}

/// Memory of another task of this thread, which [runs](go_on_as) next.
pub(crate) fn another_task() -> u64 {
    CURRENT.set(0);
    current()
}

/// One of its own tasks runs in this thread.
pub(crate) fn go_on_as(task: u64) {
    CURRENT.set(task);
}

/// What all registers are when a function is called and, then, when it has returned, by number.
#[repr(C)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registers {
    pub(crate) x: [u64; 32],
    /// Arguments on the stack, from where `x[STACK]` says.
    pub(crate) stack: [u64; 8],
    /// What `ra` was.
    pub(crate) back: u64,
}

pub(crate) const ARGUMENTS: [usize; 8] = [10, 11, 12, 13, 14, 15, 16, 17];
/// Of those, what returns a function's value.
pub(crate) const VALUE: usize = 10;
pub(crate) const STACK: usize = 2;
/// From the stack pointer of a caller to what a record's stack field has.
pub(crate) const RETURN_ADDRESS: u64 = 0;

/// Registers that [`FakeGuest::run`] sets itself: gp and tp.
pub(crate) const OWN: [usize; 2] = [3, 4];

/// Programs do not tell where they are.
pub(crate) const PROBE_CALLED: u64 = 0;

/// The stack field needs no correction.
pub(crate) const fn stack_bias(_: Point) -> u64 {
    0
}

/// Registers that a program may change; ra changes with every call, x0 never.
pub(crate) fn free(point: Point) -> &'static [usize] {
    match point {
        Point::Entry | Point::Tail | Point::Probe => &[0, 1, 5, 6, 7, 28, 29, 30, 31],
        // And t1, in which a function's end names itself.
        Point::Return | Point::Beyond => &[0, 1, 5, 6, 7, 28, 29, 30, 31, 12, 13, 14, 15, 16, 17],
    }
}

#[unsafe(naked)]
unsafe extern "C" fn run(registers: *mut Registers, target: u64, task: u64) {
    core::arch::naked_asm!(
        "addi sp, sp, -128",
        "sd s0, 0(sp)",
        "sd s1, 8(sp)",
        "sd s2, 16(sp)",
        "sd s3, 24(sp)",
        "sd s4, 32(sp)",
        "sd s5, 40(sp)",
        "sd s6, 48(sp)",
        "sd s7, 56(sp)",
        "sd s8, 64(sp)",
        "sd s9, 72(sp)",
        "sd s10, 80(sp)",
        "sd s11, 88(sp)",
        "sd ra, 96(sp); sd tp, 104(sp); sd a0, 112(sp); sd gp, 120(sp)",
        "addi sp, sp, -64",
        "ld t0, 256(a0); sd t0, 0(sp)",
        "ld t0, 264(a0); sd t0, 8(sp)",
        "ld t0, 272(a0); sd t0, 16(sp)",
        "ld t0, 280(a0); sd t0, 24(sp)",
        "ld t0, 288(a0); sd t0, 32(sp)",
        "ld t0, 296(a0); sd t0, 40(sp)",
        "ld t0, 304(a0); sd t0, 48(sp)",
        "ld t0, 312(a0); sd t0, 56(sp)",
        "sd sp, 16(a0); sd a2, 32(a0); sd gp, 24(a0)",
        "la t0, 2f; sd t0, 320(a0)",
        "mv tp, a2; mv t2, a1",
        "ld x8, 64(a0)",
        "ld x9, 72(a0)",
        "ld x11, 88(a0)",
        "ld x12, 96(a0)",
        "ld x13, 104(a0)",
        "ld x14, 112(a0)",
        "ld x15, 120(a0)",
        "ld x16, 128(a0)",
        "ld x17, 136(a0)",
        "ld x18, 144(a0)",
        "ld x19, 152(a0)",
        "ld x20, 160(a0)",
        "ld x21, 168(a0)",
        "ld x22, 176(a0)",
        "ld x23, 184(a0)",
        "ld x24, 192(a0)",
        "ld x25, 200(a0)",
        "ld x26, 208(a0)",
        "ld x27, 216(a0)",
        "ld a0, 80(a0)",
        ".option push; .option norvc",
        "jalr ra, 0(t2)",
        "2: .option pop",
        "ld t2, 176(sp)",
        "sd sp, 16(t2)",
        "sd x1, 8(t2)",
        "sd x3, 24(t2)",
        "sd x4, 32(t2)",
        "sd x5, 40(t2)",
        "sd x6, 48(t2)",
        "sd x8, 64(t2)",
        "sd x9, 72(t2)",
        "sd x10, 80(t2)",
        "sd x11, 88(t2)",
        "sd x12, 96(t2)",
        "sd x13, 104(t2)",
        "sd x14, 112(t2)",
        "sd x15, 120(t2)",
        "sd x16, 128(t2)",
        "sd x17, 136(t2)",
        "sd x18, 144(t2)",
        "sd x19, 152(t2)",
        "sd x20, 160(t2)",
        "sd x21, 168(t2)",
        "sd x22, 176(t2)",
        "sd x23, 184(t2)",
        "sd x24, 192(t2)",
        "sd x25, 200(t2)",
        "sd x26, 208(t2)",
        "sd x27, 216(t2)",
        "sd x28, 224(t2)",
        "sd x29, 232(t2)",
        "sd x30, 240(t2)",
        "sd x31, 248(t2)",
        "ld t0, 0(sp); sd t0, 256(t2)",
        "ld t0, 8(sp); sd t0, 264(t2)",
        "ld t0, 16(sp); sd t0, 272(t2)",
        "ld t0, 24(sp); sd t0, 280(t2)",
        "ld t0, 32(sp); sd t0, 288(t2)",
        "ld t0, 40(sp); sd t0, 296(t2)",
        "ld t0, 48(sp); sd t0, 304(t2)",
        "ld t0, 56(sp); sd t0, 312(t2)",
        "addi sp, sp, 64",
        "ld s0, 0(sp)",
        "ld s1, 8(sp)",
        "ld s2, 16(sp)",
        "ld s3, 24(sp)",
        "ld s4, 32(sp)",
        "ld s5, 40(sp)",
        "ld s6, 48(sp)",
        "ld s7, 56(sp)",
        "ld s8, 64(sp)",
        "ld s9, 72(sp)",
        "ld s10, 80(sp)",
        "ld s11, 88(sp)",
        "ld ra, 96(sp); ld tp, 104(sp); ld gp, 120(sp)",
        "addi sp, sp, 128",
        "ret",
    )
}

/// Calls a function with these registers.
pub(crate) fn call(function: u64, registers: &mut Registers) {
    // SAFETY: what is there is a function that changes nothing but registers and rings.
    unsafe { run(registers, function, current()) };
}

/// No instruction.
pub(crate) const FAULT: &[u8] = &[0; 4];
pub(crate) const FAULT_SIGNAL: i32 = libc::SIGILL;

/// Offsets and lengths of a program's instructions.
pub(crate) fn instructions(code: &[u8]) -> Vec<(usize, usize)> {
    let words = code.chunks_exact(4).map(|word| word != [0; 4]);
    words.enumerate().filter(|&(_, code)| code).map(|(index, _)| (4 * index, 4)).collect()
}

/// Changes code.
pub(crate) fn patch(code: *mut u8, bytes: &[u8]) {
    // SAFETY: the caller says that there is code, which this thread alone runs.
    unsafe {
        core::ptr::copy_nonoverlapping(bytes.as_ptr(), code, bytes.len());
        core::arch::asm!("fence.i");
    }
}

fn code<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn distance(from: u64, to: u64) -> i32 {
    i32::try_from(to.wrapping_sub(from).cast_signed()).unwrap()
}

/// Does nothing.
/// Waits for nothing, and changes what may be (li a7, 5).
pub(crate) const WAIT: &[u8] = &[0x93, 0x08, 0x50, 0x00];

pub(crate) const NOP: [u8; 4] = encode::NOP.to_le_bytes();

/// In place of what stops a CPU: writes what tells the site to this word, at a multiple of 8 below 2 GiB.
pub(crate) fn stop(word: u64) -> &'static [u8] {
    const T0: u32 = 5;
    const T5: u32 = 30;
    let address = u32::try_from(word).unwrap();
    let upper = address.wrapping_add(0x800) & !0xfff;
    let lower = address.wrapping_sub(upper);
    // lui t5, upper; sd t0, lower(t5)
    let store = (lower >> 5 & 0x7f) << 25 | T0 << 20 | T5 << 15 | 3 << 12 | (lower & 0x1f) << 7;
    [(upper | T5 << 7 | 0x37).to_le_bytes(), (store | 0x23).to_le_bytes()].concat().leak()
}

/// A program that goes on with another one in place of its ends, as the VMM makes it.
pub(super) fn going_on(code: Code, _: u64, to: u64) -> Vec<u8> {
    let Code { mut bytes, endings, .. } = code;
    let len = bytes.len();
    let (upper, lower) = split(to.cast_signed()).unwrap();
    for ending in endings {
        let behind = i32::try_from(len - ending).unwrap();
        bytes[ending..ending + 4].copy_from_slice(&j(behind).to_le_bytes());
    }
    bytes.extend([lui(T3, upper), jalr(ZERO, T3, lower)].into_iter().flat_map(u32::to_le_bytes));
    bytes
}

impl FakeGuest {
    /// Lets a site end by a program of [`Point::Return`], through a stub. What its record has for
    /// it.
    pub(crate) fn return_from(&self, site: u64, program: usize) -> u32 {
        let stub = self.stub(0);
        let named = u32::try_from(self.site(site)).unwrap() + 2;
        self.put(0, &code([jal(T1, distance(stub, self.program(program))), 0, named]));
        self.set_site(site, &code([j(distance(self.site(site), stub))]));
        named
    }

    /// The same by a program of [`Point::Beyond`].
    pub(crate) fn beyond_from(&self, site: u64, program: usize) -> u32 {
        self.return_from(site, program)
    }

    /// The same by a program of [`Point::Probe`], which it calls.
    pub(crate) fn probe_from(&self, site: u64, program: usize) -> u32 {
        self.call_from(site, program);
        self.function(site)
    }

    /// Lets a site go on to another function through a stub that calls an entry program. What its
    /// record has for it.
    pub(crate) fn tail_from(&self, site: u64, program: usize) -> u32 {
        let (stub, target) = (self.stub(0), self.put(1, &code([jr(RA)])));
        let (upper, lower) = split(i64::from(distance(stub, self.program(program)))).unwrap();
        let on = j(distance(stub + 8, target));
        self.put(0, &code([auipc(T0, upper), jalr(T0, T0, lower), on]));
        self.set_site(site, &code([j(distance(self.site(site), stub))]));
        u32::try_from(stub + 8).unwrap()
    }

    /// A function that calls another one and returns, with where its call returns to.
    pub(crate) fn caller_of(&self, function: u64) -> (u64, u64) {
        self.caller_at(2, function)
    }

    /// The same in one of the places of [`FakeGuest::put`].
    pub(crate) fn caller_at(&self, place: usize, function: u64) -> (u64, u64) {
        // addi sp, sp, -16; sd ra, 0(sp) ... ld ra, 0(sp); addi sp, sp, 16
        const SAVE: [u32; 2] = [0xff01_0113, 0x0011_3023];
        const RESTORE: [u32; 2] = [0x0001_3083, 0x0101_0113];
        let stub = self.stub(place);
        let (upper, lower) = split(i64::from(distance(stub + 8, function))).unwrap();
        let call = [auipc(T0, upper), jalr(RA, T0, lower)];
        let code = code([SAVE[0], SAVE[1], call[0], call[1], RESTORE[0], RESTORE[1], jr(RA)]);
        self.put(place, &code);
        (stub, stub + 16)
    }

    /// Calls a function with these registers.
    pub(crate) fn run(&self, site: u64, registers: &mut Registers) {
        call(self.site(site), registers);
    }

    pub(super) fn compile(&self, program: &Program, _: Addressing) -> Code {
        // The first guest's tasks serve all, also guests of tests in other threads.
        FIRST.call_once(|| {
            TASKS[0].store(self.tasks, Ordering::Relaxed);
            TASKS[1].store(self.tasks + AREA, Ordering::Relaxed);
        });
        let values = Values {
            cpu: CPU,
            pid: PID,
            controls: self.per_cpu,
            slide: 0,
            readable: self.readable(),
            followed: Some(super::followed().0),
            strangers: STRANGERS.with_borrow(Clone::clone),
            context: None,
        };
        compile(program, self.overflow, &values).unwrap()
    }

    /// The calling thread runs on `cpu` from now on.
    pub(crate) fn run_on(&self, cpu: u64) {
        // SAFETY: in the page of tasks, this thread's own.
        unsafe { at::<u32>(current() + CPU).write_volatile(u32::try_from(cpu).unwrap()) };
    }

    /// The calling thread is the task `pid` on `cpu`. Returns the task.
    pub(crate) fn set_current(&self, cpu: u64, pid: u32) -> u64 {
        let task = current();
        // SAFETY: in the page of tasks, this thread's own.
        unsafe { at::<u32>(task + PID).write_volatile(pid) };
        // SAFETY: as above.
        unsafe { at::<u64>(task + STACK_OF).write_volatile(self.stack()) };
        self.run_on(cpu);
        task
    }

    /// Calls the traced function `site` on the CPU of this thread.
    pub(crate) fn hit(&self, site: u64) {
        // SAFETY: a function without arguments was written there; it and the
        // trampoline clobber ra and t0 to t6 alone, and tp is put back.
        unsafe {
            core::arch::asm!(
                "mv {saved}, tp",
                "mv tp, {task}",
                "jalr ra, 0({function})",
                "mv tp, {saved}",
                saved = out(reg) _,
                task = in(reg) current(),
                function = in(reg) self.site(site),
                out("ra") _, out("t0") _, out("t1") _, out("t2") _, out("t3") _, out("t4") _,
                out("t5") _, out("t6") _,
            );
        }
    }

    /// Calls `site` while this thread has a reservation on the head of `cpu`, as an
    /// interrupt of a trampoline does. Whether the reservation outlived that.
    pub(crate) fn hit_inside_a_reservation(&self, site: u64, cpu: u64) -> bool {
        let failed: u64;
        // SAFETY: as in `hit`; the word at `head` is an aligned one of the mappings,
        // and at most gets the value that it has.
        unsafe {
            core::arch::asm!(
                "mv {saved}, tp",
                "mv tp, {task}",
                "lr.d {value}, ({head})",
                "jalr ra, 0({function})",
                "mv tp, {saved}",
                "sc.d {failed}, {value}, ({head})",
                saved = out(reg) _,
                value = out(reg) _,
                failed = out(reg) failed,
                head = in(reg) control(self.per_cpu, cpu),
                task = in(reg) current(),
                function = in(reg) self.site(site),
                out("ra") _, out("t0") _, out("t1") _, out("t2") _, out("t3") _, out("t4") _,
                out("t5") _, out("t6") _,
            );
        }
        failed == 0
    }
}
