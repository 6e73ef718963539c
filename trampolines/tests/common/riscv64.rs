//! A CPU is a number in a task, and the task is in `tp` while a function is called.

use super::{AREA, FakeGuest, PID, at};
use core::sync::atomic::{AtomicU64, Ordering};
use std::cell::Cell;
use std::sync::Once;
use vmtrace_trampolines::layout::CONTROL_SIZE;
use vmtrace_trampolines::riscv64::encode::register::{RA, T0};
use vmtrace_trampolines::riscv64::encode::{auipc, jalr, jr, split};
use vmtrace_trampolines::riscv64::{Values, compile};
use vmtrace_trampolines::{Code, Program};

pub(crate) use vmtrace_trampolines::riscv64::SPENT;

/// There is one way to find a control block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addressing;

pub(crate) const ADDRESSINGS: [Addressing; 1] = [Addressing];
/// From a site to where the trampoline returns to.
pub(crate) const SITE_RETURN: u64 = 8;

/// Offsets in a task.
const THREAD: u64 = 8;
const CPU: u64 = 32;
/// Bytes of a task.
const TASK: u64 = 64;

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Where tasks are: what `tp` points to while a function is called.
static TASKS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
static FIRST: Once = Once::new();
/// Tasks handed out, in bytes.
static USED: AtomicU64 = AtomicU64::new(0);

pub(super) const fn control(per_cpu: u64, cpu: u64) -> u64 {
    per_cpu + cpu * CONTROL_SIZE as u64
}

/// auipc t0; jalr t0; ret
pub(super) fn site(address: u64, program: u64) -> Vec<u8> {
    let (upper, lower) = split(program.wrapping_sub(address).cast_signed()).unwrap();
    let code = [auipc(T0, upper), jalr(T0, T0, lower), jr(RA)];
    code.into_iter().flat_map(u32::to_le_bytes).collect()
}

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

impl FakeGuest {
    pub(super) fn compile(&self, program: &Program, _: Addressing) -> Code {
        // The first guest's tasks serve all, also guests of tests in other threads.
        FIRST.call_once(|| {
            TASKS[0].store(self.tasks, Ordering::Relaxed);
            TASKS[1].store(self.tasks + AREA, Ordering::Relaxed);
        });
        let values = Values { cpu: CPU, pid: PID, controls: self.per_cpu };
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
