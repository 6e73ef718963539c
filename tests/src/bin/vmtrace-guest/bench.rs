//! Instructions per event, under icount.

use super::bpf::Switches;
use super::{TRACING, call_getppid, mark, now, set};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::{ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;
use vmtrace::emulated::HostArch;
use vmtrace_tests::arch::spin;
use vmtrace_tests::trace::syscall_of;

/// More records than a ring has, and how many of them at once.
const RING: u32 = 400_000;
const STEP: u32 = 20_000;
/// Instances of the guest's tracing that have nothing to do.
const IDLE: &str = "idle";
/// One that traces what is traced already.
const SECOND: &str = "second";
/// ftrace knows a function by one of its names only, whichever that is, and tells of a wrong one
/// only when a newline ends it.
const FILTER: &str = "*sys_getppid\n";

/// Nanoseconds of `body`, the median of many runs: the relay and interrupts take
/// some of them.
pub(crate) fn median(mut body: impl FnMut()) -> f64 {
    let mut figures: Vec<i64> = (0..51)
        .map(|_| {
            let start = now(libc::CLOCK_MONOTONIC);
            body();
            now(libc::CLOCK_MONOTONIC) - start
        })
        .collect();
    figures.sort_unstable();
    f64::from(i32::try_from(figures[figures.len() / 2]).unwrap_or(i32::MAX))
}

/// Calls of a batch. While there are records the relay, which has the same CPU, runs every half a millisecond: twice as
/// long, about half of all batches of riscv64 would have a pass of it, and a median would be of either kind.
const BATCH: u32 = 100;

/// A clock that counts instructions.
pub(crate) struct Meter {
    /// Nanoseconds of one.
    pub(crate) instruction: f64,
}

impl Meter {
    pub(crate) fn new() -> Self {
        const LOOP: u32 = 10_000;
        // Two instructions a round: how long is one?
        Self { instruction: median(|| spin(LOOP)) / f64::from(2 * LOOP) }
    }

    /// Instructions of a call of getppid.
    fn per_call(&self) -> f64 {
        self.per(call_getppid)
    }

    pub(crate) fn per(&self, call: fn()) -> f64 {
        self.per_of(call, BATCH)
    }

    /// By so many at once.
    fn per_of(&self, call: fn(), count: u32) -> f64 {
        let calls = || (0..count).for_each(|_| call());
        median(calls) / f64::from(count) / self.instruction
    }

    /// Instructions of a switch of tasks.
    fn per_switch(&self, switches: f64) -> f64 {
        self.per_of(call_round, 5) / switches
    }

    /// The same with a BPF program that records it.
    fn switch_by_bpf(&self, switches: f64) -> Result<f64> {
        let program = Switches::new()?;
        let figure = || -> Result<f64> {
            let figure = self.per_switch(switches);
            let records = program.take();
            // One that is refused a place costs less.
            ensure!((500..Switches::MOST).contains(&records), "{records} records by BPF");
            Ok(figure)
        };
        figure()?;
        figure()
    }

    fn kprobe(&self) -> Result<f64> {
        // riscv64 before CALL_OPS has none on a site: behind it.
        let function = syscall_of(HostArch::native(), "getppid");
        let define = |at| set("kprobe_events", &format!("p:vmtrace_bench {function}{at}"));
        define("").or_else(|_| define("+8"))?;
        set("events/kprobes/vmtrace_bench/enable", "1")?;
        self.per_call();
        let kprobe = self.per_call();
        set("events/kprobes/vmtrace_bench/enable", "0")?;
        set("kprobe_events", "")?;
        Ok(kprobe)
    }

    /// Under a tracer of the guest's own.
    pub(crate) fn tracer(&self, name: &str) -> Result<f64> {
        set("set_ftrace_filter", FILTER)?;
        set("current_tracer", name)?;
        self.per_call();
        let figure = self.per_call();
        set("current_tracer", "nop")?;
        set("set_ftrace_filter", "")?;
        Ok(figure)
    }

    pub(crate) fn function(&self) -> Result<f64> {
        self.tracer("function")
    }

    /// Under two instances of the guest's function tracer.
    fn two(&self) -> Result<f64> {
        add_instance(SECOND, FILTER)?;
        let figure = self.function()?;
        remove_instance(SECOND)?;
        Ok(figure)
    }
}

/// Small, and filled once before anything is measured: the first touch of a page of its
/// buffer is a fault in the hypervisor, no cost of the tracer.
pub(crate) fn small_buffer() -> Result<()> {
    set("buffer_size_kb", "64")
}

/// Another instance of the guest's tracing, with a function tracer.
fn add_instance(name: &str, filter: &str) -> Result<()> {
    fs::create_dir(format!("{TRACING}/instances/{name}"))?;
    set(&format!("instances/{name}/buffer_size_kb"), "64")?;
    set(&format!("instances/{name}/set_ftrace_filter"), filter)?;
    set(&format!("instances/{name}/current_tracer"), "function")
}

fn remove_instance(name: &str) -> Result<()> {
    set(&format!("instances/{name}/current_tracer"), "nop")?;
    Ok(fs::remove_dir(format!("{TRACING}/instances/{name}"))?)
}

/// The guest's own tracers, its function tracer beside so many that have nothing to do, and
/// vmtrace.
pub(crate) fn bench(others: usize) -> Result<()> {
    let meter = Meter::new();
    let untraced = meter.per_call();
    small_buffer()?;
    let mut idle = Idle::new()?;
    idle.grow(others)?;
    let function = meter.function()?;
    idle.end()?;
    let two = meter.two()?;
    let graph = meter.tracer("function_graph")?;
    let kprobe = meter.kprobe()?;
    let again = meter.per_call();

    // vmtrace waits for this call: --from the function of getpgid
    mark();
    fill_ring(call_getppid);
    let vmtrace = meter.per_call();
    println!("bench untraced {untraced:.1}");
    println!("bench untraced-again {again:.1}");
    println!("bench function {:.1}", function - untraced);
    println!("bench two {:.1}", two - untraced);
    println!("bench graph {:.1}", graph - untraced);
    println!("bench kprobe {:.1}", kprobe - untraced);
    println!("bench vmtrace {:.1}", vmtrace - again);
    Ok(())
}

/// As with the guest's buffers: once through the whole ring, so that the hypervisor has mapped
/// all of its pages. With pauses for the relay, which has the same CPU.
pub(crate) fn fill_ring(call: fn()) {
    fill_ring_by(call, 1);
}

/// With calls of so many records each.
fn fill_ring_by(call: fn(), records: u32) {
    for _ in 0..RING.div_ceil(STEP) {
        (0..STEP / records).for_each(|_| call());
        std::thread::sleep(Duration::from_millis(5));
    }
    // What it has not done yet would be counted as ours.
    std::thread::sleep(Duration::from_millis(500));
}

/// What vmtrace costs. Or with `guest`, a module of the kernel's own benchmark and how many
/// tracers of other functions are to be beside the one that is measured: the guest's own.
pub(crate) fn ops(guest: &[&str]) -> Result<()> {
    let meter = Meter::new();
    let untraced = meter.per_call();
    println!("ops untraced {untraced:.1}");
    if let [module, counts @ ..] = guest {
        let counts: Vec<usize> = counts.iter().map(|n| n.parse()).collect::<Result<_, _>>()?;
        small_buffer()?;
        println!("ops kprobe {:.1}", meter.kprobe()? - untraced);
        println!("ops module none {:.1}", sample(&meter, module, 0, 0)?);
        for count in &counts {
            println!("ops module {count} {:.1}", sample(&meter, module, 1, *count)?);
        }
        println!("ops two {:.1}", meter.two()? - untraced);
        let mut idle = Idle::new()?;
        for count in counts {
            idle.grow(count)?;
            println!("ops function {count} {:.1}", meter.function()? - untraced);
        }
        return idle.end();
    }
    let again = meter.per_call();
    mark();
    meter.per_call();
    println!("ops fresh {:.1}", meter.per_call() - again);
    fill_ring(call_getppid);
    println!("ops vmtrace {:.1}", meter.per_call() - again);
    Ok(())
}

/// A system call whose function has three integers as arguments, and changes nothing.
fn call_setresuid() {
    // SAFETY: changes no user id.
    unsafe { libc::syscall(libc::SYS_setresuid, -1, -1, -1) };
}

/// Three integer arguments: what the guest's own events cost, or vmtrace.
pub(crate) fn args(guest: bool) -> Result<()> {
    const EVENT: &str = "vmtrace_bench/args";
    const VALUES: &str = "__sys_setresuid ruid=$arg1:u32 euid=$arg2:u32 suid=$arg3:u32";
    let meter = Meter::new();
    let untraced = meter.per(call_setresuid);
    println!("args untraced {untraced:.1}");
    if guest {
        small_buffer()?;
        // Older kernels have no events by fprobes.
        let define = |kind| set("dynamic_events", &format!("{kind}:{EVENT} {VALUES}"));
        // riscv64 before CALL_OPS has no kprobe on a site: behind it, where arguments have no names.
        let behind = || {
            let values = "__sys_setresuid+8 ruid=%a0:u32 euid=%a1:u32 suid=%a2:u32";
            set("dynamic_events", &format!("p:{EVENT} {values}"))
        };
        let kind = define("f").map(|()| "fprobe");
        let kind = kind.or_else(|_| define("p").or_else(|_| behind()).map(|()| "kprobe"))?;
        set(&format!("events/{EVENT}/enable"), "1")?;
        meter.per(call_setresuid);
        println!("args {kind} {:.1}", meter.per(call_setresuid) - untraced);
        set(&format!("events/{EVENT}/filter"), "ruid == 12345")?;
        println!("args filtered {:.1}", meter.per(call_setresuid) - untraced);
        return Ok(());
    }
    mark();
    fill_ring(call_setresuid);
    println!("args vmtrace {:.1}", meter.per(call_setresuid) - untraced);
    Ok(())
}

/// Entries and returns: what the guest's own tracer costs, or vmtrace.
pub(crate) fn graph(guest: bool) -> Result<()> {
    let meter = Meter::new();
    let untraced = meter.per_call();
    println!("graph untraced {untraced:.1}");
    if guest {
        small_buffer()?;
        println!("graph guest {:.1}", meter.tracer("function_graph")? - untraced);
        return Ok(());
    }
    mark();
    fill_ring(call_getppid);
    println!("graph vmtrace {:.1}", meter.per_call() - untraced);
    Ok(())
}

/// With a priority that children inherit. A fair scheduler sometimes lets a task go on at once when
/// it is woken, and sometimes not: two ways that differ by more instructions than an event costs.
pub(crate) fn be_real_time() -> Result<()> {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: of this process; the parameter is only read.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) };
    ensure!(result == 0, "sched_setscheduler: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Two processes that hand a byte to each other: a round is two switches.
struct PingPong {
    child: libc::pid_t,
}

/// What the rounds go by: where to write, and where to read.
static PIPES: [AtomicI32; 2] = [AtomicI32::new(-1), AtomicI32::new(-1)];

impl PingPong {
    fn start() -> Result<Self> {
        let pipe = || -> Result<[i32; 2]> {
            let mut ends = [-1; 2];
            // SAFETY: room for two descriptors.
            let result = unsafe { libc::pipe(ends.as_mut_ptr()) };
            ensure!(result == 0, "pipe: {}", std::io::Error::last_os_error());
            Ok(ends)
        };
        let ([there_out, there_in], [back_out, back_in]) = (pipe()?, pipe()?);
        be_real_time()?;
        // SAFETY: this program has one thread; the child makes system calls only.
        let child = unsafe { libc::fork() };
        ensure!(child >= 0, "fork: {}", std::io::Error::last_os_error());
        if child == 0 {
            loop {
                hand_on(there_out, back_in);
            }
        }
        PIPES[0].store(there_in, Ordering::Relaxed);
        PIPES[1].store(back_out, Ordering::Relaxed);
        Ok(Self { child })
    }

    /// Switches that a round takes, as the kernel counts them.
    fn switches(&self) -> Result<f64> {
        const ROUNDS: u32 = 1000;
        let count = || -> Result<u32> {
            let status = fs::read_to_string("/proc/self/status")?;
            let lines = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
            lines.map(|(_, count)| Ok(count.trim().parse::<u32>()?)).sum()
        };
        let before = count()?;
        (0..ROUNDS).for_each(|_| call_round());
        // This side's own are half of them.
        Ok(2.0 * f64::from(count()? - before) / f64::from(ROUNDS))
    }
}

impl Drop for PingPong {
    fn drop(&mut self) {
        // SAFETY: a child of ours, not reaped yet.
        unsafe {
            libc::kill(self.child, libc::SIGKILL);
            libc::waitpid(self.child, std::ptr::null_mut(), 0);
        }
    }
}

/// Reads a byte here and writes it there.
fn hand_on(from: i32, to: i32) {
    let mut byte = [0_u8];
    // SAFETY: a byte to read into, and to write.
    unsafe {
        libc::read(from, byte.as_mut_ptr().cast(), 1);
        libc::write(to, byte.as_ptr().cast(), 1);
    }
}

fn call_round() {
    let [to, from] = [&PIPES[0], &PIPES[1]].map(|end| end.load(Ordering::Relaxed));
    // SAFETY: a byte to write, and to read into.
    unsafe {
        libc::write(to, [0_u8].as_ptr().cast(), 1);
        libc::read(from, [0_u8].as_mut_ptr().cast(), 1);
    }
}

/// Tracepoints: a switch of tasks, and beginning and end of a system call. What the guest's own
/// events cost, or vmtrace's `which`.
pub(crate) fn events(which: &str) -> Result<()> {
    let meter = Meter::new();
    let pair = PingPong::start()?;
    let switches = pair.switches()?;
    println!("events per-round {switches:.1}");
    let switch = meter.per_switch(switches);
    let call = meter.per_call();
    println!("events untraced-switch {switch:.1}");
    println!("events untraced-switch-again {:.1}", meter.per_switch(switches));
    println!("events untraced-call {call:.1}");
    match which {
        "guest" => {
            small_buffer()?;
            let own = |event: &str, measure: &dyn Fn() -> f64| -> Result<f64> {
                set(&format!("events/{event}/enable"), "1")?;
                measure();
                let figure = measure();
                set(&format!("events/{event}/enable"), "0")?;
                Ok(figure)
            };
            let switched = own("sched/sched_switch", &|| meter.per_switch(switches))?;
            println!("events switch {:.1}", switched - switch);
            println!("events bpf-switch {:.1}", meter.switch_by_bpf(switches)? - switch);
            println!("events call {:.1}", own("raw_syscalls", &|| meter.per_call())? - call);
        }
        "switch" => {
            mark();
            fill_ring_by(call_round, 2);
            println!("events switch {:.1}", meter.per_switch(switches) - switch);
        }
        _ => {
            mark();
            fill_ring_by(call_getppid, 2);
            println!("events call {:.1}", meter.per_call() - call);
        }
    }
    Ok(())
}

/// Instances with a function tracer each, every one on a function that is not called.
struct Idle {
    /// Lines of `available_filter_functions`: ftrace takes their numbers, and does not
    /// look through all of its functions then.
    lines: Vec<usize>,
    count: usize,
}

impl Idle {
    fn new() -> Result<Self> {
        let all = fs::read_to_string(format!("{TRACING}/available_filter_functions"))?;
        let lines = all.lines().enumerate().filter(|(_, name)| name.starts_with("tcp_"));
        Ok(Self { lines: lines.map(|(line, _)| line + 1).collect(), count: 0 })
    }

    fn grow(&mut self, count: usize) -> Result<()> {
        while self.count < count {
            let line = self.lines.get(self.count).context("too few functions")?;
            add_instance(&format!("{IDLE}{}", self.count), &format!("{line}\n"))?;
            self.count += 1;
        }
        Ok(())
    }

    fn end(self) -> Result<()> {
        (0..self.count).try_for_each(|number| remove_instance(&format!("{IDLE}{number}")))
    }
}

/// Instructions of a call in the kernel's ftrace-ops.c, which loads, tells and unloads:
/// with so many ops on the function that it calls, and on one that it does not call.
fn sample(meter: &Meter, module: &str, relevant: usize, irrelevant: usize) -> Result<f64> {
    const CALLS: u32 = 10_000;
    let mut options = fs::OpenOptions::new();
    let mut messages = options.read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg")?;
    // SAFETY: a seek to the end.
    unsafe { libc::lseek(messages.as_raw_fd(), 0, libc::SEEK_END) };
    let file = fs::File::open(module)?;
    let parameters = format!(
        "nr_function_calls={CALLS} nr_ops_relevant={relevant} nr_ops_irrelevant={irrelevant}\0"
    );
    // SAFETY: an open file, a text that ends with 0.
    let result =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), parameters.as_ptr(), 0) };
    let error = std::io::Error::last_os_error();
    // It leaves again by failing.
    ensure!(result == -1 && error.raw_os_error() == Some(libc::EINVAL), "{module}: {error}");
    let mut line = [0; 8192];
    loop {
        let len = match messages.read(&mut line) {
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::BrokenPipe => continue,
            Err(error) => return Err(error).context("no figures of the module"),
        };
        let text = String::from_utf8_lossy(&line[..len]);
        if text.contains("Attempted ") {
            let period = text.split(" in ").nth(1).and_then(|rest| rest.split("ns").next());
            let period: u32 = period.context("no period")?.parse()?;
            return Ok(f64::from(period) / f64::from(CALLS) / meter.instruction);
        }
    }
}
