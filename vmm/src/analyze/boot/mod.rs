//! The report on a boot: where its time went.
//!
//! It is made from the calls of a few functions, [`FUNCTIONS`] and [`IDLE`].

mod calls;
mod idle;
mod page;
mod report;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::io;

use crate::export::times::Times;
use crate::export::{Entry, Event, Export, Name, Return, STARTS_INIT, printable, says_init};
use crate::stream::{Header, Mark, MarkKind, Stretch, Summary, TracedOf};

use super::{Analysis, Gaps, nanoseconds};
use calls::Calls;
use idle::Idle;
pub use report::{Function, IdleOf, Initcall, Level, Module, Report, Step};

/// Calls each initcall, of modules, too (init/main.c).
pub const INITCALL: &str = "do_one_initcall";
/// Loads a module, and runs its init function (kernel/module/main.c).
pub const LOAD_MODULE: &str = "load_module";
/// Runs the init function of a module.
pub const INIT_MODULE: &str = "do_init_module";
/// Load a module from a file (kernel/module/main.c since 6.5, fs/kernel_read_file.c), which tells its
/// name: the structures of a module lie where values are not read.
pub const FROM_FILE: [&str; 2] = ["init_module_from_file", "kernel_read_file"];
/// A vCPU has nothing to do, and has again (kernel/time/tick-sched.c).
pub const IDLE: [&str; 2] = ["tick_nohz_idle_enter", "tick_nohz_idle_exit"];

/// Steps on the way to init: the first call of each function, and what it means.
const STEPS: [(&str, &str); 8] = [
    ("rest_init", "the kernel is set up, and makes its first tasks"),
    ("kernel_init_freeable", "the init task runs"),
    ("smp_init", "other vCPUs are brought up"),
    ("driver_init", "the device model is set up, initcalls follow"),
    ("wait_for_initramfs", "the initramfs is waited for"),
    ("prepare_namespace", "the root file system is mounted"),
    ("free_initmem", "memory of the kernel's init code is freed"),
    (STARTS_INIT, "init is started"),
];

/// What `boot --boot-report` traces with durations beside [`INITCALL`], [`LOAD_MODULE`],
/// [`INIT_MODULE`] and the steps to init: what boots are known to spend their time in, and what is
/// not called too often.
pub const FUNCTIONS: [&str; 25] = [
    "async_run_entry_fn",
    "async_synchronize_cookie_domain",
    "_cpu_up",
    "deferred_probe_initcall",
    "do_mount_root",
    "do_populate_rootfs",
    "kernel_init_freeable",
    "mount_root_generic",
    "mark_rodata_ro",
    "msleep",
    "page_alloc_init_late",
    "prepare_namespace",
    "rcu_barrier",
    "really_probe",
    "__request_module",
    "rest_init",
    "run_init_process",
    "sched_init_smp",
    "smp_init",
    "synchronize_rcu",
    "driver_init",
    "unpack_to_rootfs",
    "wait_for_device_probe",
    "wait_for_initramfs",
    "free_initmem",
];

/// Most functions whose meaning is remembered.
const MAX_KNOWN: usize = 1 << 20;

/// What calls of a function mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Role {
    Initcall,
    LoadModule,
    InitModule,
    FromFile,
    IdleEnter,
    IdleExit,
    Step(usize),
    Other,
}

impl Role {
    fn of(function: &Name<'_>) -> Self {
        // Those of modules may have the same names.
        let Some((name, "")) = function.symbol else { return Self::Other };
        match name {
            INITCALL => Self::Initcall,
            LOAD_MODULE => Self::LoadModule,
            INIT_MODULE => Self::InitModule,
            name if FROM_FILE.contains(&name) => Self::FromFile,
            name if name == IDLE[0] => Self::IdleEnter,
            name if name == IDLE[1] => Self::IdleExit,
            name => {
                STEPS.iter().position(|(step, _)| *step == name).map_or(Self::Other, Self::Step)
            }
        }
    }
}

/// What is known of a function.
#[derive(Debug)]
struct Known {
    role: Role,
    /// The tracer whose calls count, if there are several: one call may have records of each.
    tracer: Option<Box<str>>,
}

/// Where the time of a boot went: is played a trace, and then makes a [`Report`].
#[derive(Debug)]
pub struct Boot {
    header: Header,
    known: HashMap<u64, Known>,
    calls: Calls,
    idle: Idle,
    times: Times,
    /// When each step was first come by, in ticks.
    steps: [Option<u64>; STEPS.len()],
    began: Option<u64>,
    init: Option<u64>,
    last: u64,
    /// There was a call.
    seen: bool,
    /// What was traced was given back.
    ended: bool,
    /// When the guest's first other kernel was traced (kexec), in ticks: the report is of the one before.
    anew: Option<u64>,
    gaps: Gaps,
    /// The trace says which functions were traced; of these, what of them was.
    covered: bool,
    coverage: HashSet<(Role, TracedOf)>,
}

impl Boot {
    /// Whether something of a function was traced, called or not.
    fn traced(&self, role: Role, of: TracedOf) -> bool {
        self.coverage.contains(&(role, of))
    }

    /// Whether idle time is known: it may be none.
    fn knows_idle(&self) -> bool {
        let traced = |role| self.traced(role, TracedOf::Entries);
        self.idle.known || (traced(Role::IdleEnter) && traced(Role::IdleExit))
    }
}

impl Default for Boot {
    fn default() -> Self {
        Self::new()
    }
}

impl Boot {
    /// Before the trace begins.
    #[must_use]
    pub fn new() -> Self {
        Self {
            header: Header::default(),
            known: HashMap::new(),
            calls: Calls::default(),
            idle: Idle::default(),
            times: Times::default(),
            steps: [None; STEPS.len()],
            began: None,
            init: None,
            last: 0,
            seen: false,
            ended: false,
            anew: None,
            gaps: Gaps::new(),
            covered: false,
            coverage: HashSet::new(),
        }
    }

    /// The report, when the trace has ended; `late` records of it were played behind later ones.
    #[must_use]
    pub fn finish(mut self, late: u64) -> Report {
        self.gaps.late = late;
        if self.init.is_none() {
            self.stop_idle(self.last);
        }
        report::make(self)
    }

    /// What a function's calls mean, and whether they count for its times.
    fn role(&mut self, function: &Name<'_>, tracer: Option<&str>, framed: bool) -> (Role, bool) {
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        let known = self
            .known
            .entry(function.address)
            .or_insert_with(|| Known { role: Role::of(function), tracer: None });
        let counts = match (&known.tracer, tracer) {
            (_, None) => true,
            (Some(first), Some(tracer)) => **first == *tracer,
            (None, Some(tracer)) => {
                // Only with returns there are times.
                if framed {
                    known.tracer = Some(tracer.into());
                }
                framed
            }
        };
        (known.role, framed && counts)
    }

    fn entry(&mut self, entry: &Entry<'_>) {
        self.seen = true;
        self.pass(entry.vcpu, entry.timestamp);
        let (role, counts) = self.role(&entry.function, entry.tracer, entry.place.is_some());
        let has_time = matches!(role, Role::Step(_) | Role::Other);
        if counts && has_time && self.init.is_none() {
            self.times.entry(entry);
        }
        self.calls.called(entry);
        let ticks = entry.timestamp;
        match role {
            Role::Initcall => self.calls.initcall(entry),
            Role::LoadModule => self.calls.load(entry),
            Role::InitModule => self.calls.init(entry),
            Role::FromFile => self.calls.read_file(entry),
            Role::IdleEnter if self.init.is_none() => self.idle.enter(entry.vcpu, ticks),
            Role::IdleExit if self.init.is_none() => {
                if let Some(nobody) = self.idle.exit(entry.vcpu, ticks) {
                    self.calls.waited(nobody);
                }
            }
            // Others call some of these as well.
            Role::Step(step) if entry.pid <= 1 => {
                if let Some(first @ None) = self.steps.get_mut(step) {
                    *first = Some(ticks);
                }
                if STEPS.get(step).is_some_and(|(name, _)| *name == STARTS_INIT) {
                    self.init_started(ticks);
                }
            }
            _ => {}
        }
    }

    fn ret(&mut self, ret: &Return<'_>) {
        self.pass(ret.vcpu, ret.timestamp);
        if self.init.is_none() {
            self.times.ret(ret);
        }
        if let Some(frame) = ret.frame {
            self.calls.returned(frame, ret.duration_ns);
        }
    }

    fn mark(&mut self, mark: &Mark) {
        match mark.kind {
            MarkKind::Detach => self.ended = true,
            // With --from there are two of the same kernel.
            MarkKind::Attach if self.ended => self.anew = self.anew.or(Some(mark.ticks)),
            _ => {}
        }
        if self.anew.is_some() {
            return;
        }
        self.last = self.last.max(mark.ticks);
        match mark.kind {
            // A part of a trace has those before it as well.
            MarkKind::Attach if !self.seen => self.began = Some(mark.ticks),
            MarkKind::Console if says_init(&mark.text) => self.init_started(mark.ticks),
            _ => {}
        }
    }

    fn init_started(&mut self, ticks: u64) {
        if self.init.is_none() {
            self.init = Some(ticks);
            self.stop_idle(ticks);
        }
    }

    fn stop_idle(&mut self, ticks: u64) {
        if let Some(nobody) = self.idle.stop(ticks) {
            self.calls.waited(nobody);
        }
    }

    /// A record of a vCPU.
    fn pass(&mut self, vcpu: u32, ticks: u64) {
        self.last = self.last.max(ticks);
        if self.init.is_none() {
            self.idle.seen(vcpu);
        }
    }

    fn nanoseconds(&self, ticks: u64) -> u64 {
        nanoseconds(&self.header, ticks)
    }
}

impl Analysis for Boot {
    fn write(self, late: u64, json: bool, out: &mut dyn io::Write) -> io::Result<()> {
        let report = self.finish(late);
        if json { report.write_json(out) } else { report.write_text(out) }
    }
}

impl Export for Boot {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        let mut known = HashMap::new();
        for call in header.initcalls() {
            known.insert(call.address, (printable(call.level), printable(call.name)));
        }
        self.calls = Calls::new(known);
        self.idle = Idle::new(usize::try_from(header.vcpus).unwrap_or(0));
        self.header = header.clone();
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        self.gaps.event(&self.header, event);
        if self.anew.is_some() {
            return Ok(());
        }
        match event {
            Event::Entry(entry) => self.entry(entry),
            Event::Return(ret) => self.ret(ret),
            Event::Tail(tail) => self.pass(tail.vcpu, tail.timestamp),
            Event::Tracepoint(event) => self.pass(event.vcpu, event.timestamp),
            Event::Unfinished(unfinished) => {
                if self.init.is_none() {
                    self.times.unfinished(unfinished);
                }
                self.calls.returned(unfinished.place.frame, None);
            }
            Event::Loss(loss) => {
                if self.init.is_none() {
                    self.idle.loss(loss.vcpu);
                }
            }
            Event::Mark(mark) => self.mark(mark),
        }
        Ok(())
    }

    fn traced(
        &mut self,
        stretch: &Stretch,
        functions: &mut dyn Iterator<Item = Name<'_>>,
    ) -> io::Result<()> {
        self.covered = true;
        for function in functions {
            self.coverage.insert((Role::of(&function), stretch.of));
        }
        Ok(())
    }

    fn joined(&mut self, totals: &[(u64, u64)]) -> io::Result<()> {
        self.gaps.begin_at(totals);
        Ok(())
    }

    fn end(&mut self, summary: Option<&Summary>) -> io::Result<()> {
        self.gaps.end(summary);
        Ok(())
    }
}
