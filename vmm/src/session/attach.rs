//! The controller: when to attach, what to hold, when to let go.
//!
//! ```text
//! boot ─ (x86-64: write of MSR_LSTAR) ─► it is known where the kernel is; tripwire
//!                              on early_trace_init
//!      ─ early_trace_init ───► ftrace_init is done: annex, exits rewritten (riscv64), sites
//!                              (or, with --from, a tripwire on that function); tripwire
//!                              on ftrace_free_init_mem
//!      ─ (x86-64) ───────────► stubs of exits are made while the guest runs
//!      ─ rest_init (x86-64) ─► alternatives are patched: returns can be held, programs end
//!                              as the kernel's own code does
//!      ─ ftrace_free_init_mem► sites of .init.text are given back
//!      ─ modules come and go ► their sites are taken, and given back: [`super::modules`]
//!      ─ machine_kexec ──────► the kernel makes room for another: all sites are given back; if that is
//!                              the same, all begins anew: [`super::anew`]
//!      ─ end ────────────────► the same
//! ```
//!
//! Tripwires of [`super::verdict`] tell how the guest ends, from the attach on.
//!
//! Whatever goes wrong with tracing is a note, not an end: the guest lives on.

use super::anew::Kernels;
use super::anomaly::Anomaly;
use super::apply::Ahead;
use super::arch;
use super::ending::TraceEnd;
use super::hang::HangWatch;
use super::history::History;
use super::latency::{LastPage, Measured};
use super::module_events::ModulePoints;
use super::notes::Notes;
use super::plan::Plan;
use super::room;
use super::selftest::Testing;
use super::trigger_commands::Numbers;
use super::verdict::Verdict;
use super::vm::{Paused, Vm};
use super::{Commands, Histogram, SessionError, Tracing, mark};
use crate::deadline::Deadline;
use crate::kernel::{Exit, Exits, Kernel, Missing};
use crate::machine::TRAP_INSTRUCTION;
use crate::relay::{self, ConsoleLines, ExitReader, Relay, Setup, Targets};
use crate::serve::{ControlRequest, Join, Sink};
use crate::stream::{Context, Header, Initcall, MarkKind, Summary};
use crate::tracer::{
    Attachment, Counters, ExitPlan, Image, ModuleFunction, Options, Room, Tripwire,
};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Called right after `ftrace_init` (init/main.c).
const AFTER_FTRACE_INIT: &str = "early_trace_init";
/// Called before `.init.text` is freed (init/main.c, `kernel_init`), the best first.
const BEFORE_FREE_INIT: [&str; 2] = ["ftrace_free_init_mem", "free_initmem"];
/// Called last before another kernel is entered, also after a panic (kernel/kexec_core.c).
const BEFORE_KEXEC: &str = "machine_kexec";

pub(super) enum Stage {
    /// The kernel has not said where it is.
    Unknown,
    /// Where it is is known; stops at the tripwire after `ftrace_init`.
    Located { image: Image, wire: Tripwire },
    /// The annex is there, and one site is called to see that all works.
    Testing(Box<Testing>),
    /// Attached; sites are (or, with `from`, are not yet) ours.
    Attached { attachment: Box<Attachment>, from: Option<From>, wires: Wires },
    /// Not tracing any more, or never.
    Off,
}

/// Tripwires of an attached guest.
#[derive(Default)]
pub(super) struct Wires {
    /// Before `.init.text` is freed.
    init: Option<Tripwire>,
    /// When alternatives are patched.
    settle: Option<Tripwire>,
    /// Before another kernel takes its place.
    leave: Option<Tripwire>,
}

impl Wires {
    /// Whether alternatives are still to be patched.
    pub(super) fn settles(&self) -> bool {
        self.settle.is_some()
    }
}

/// The tripwire of `--from`, on a site.
pub(super) struct From {
    site: usize,
    address: u64,
}

/// Where the stream goes, until there is a relay that has it.
pub(super) struct Output {
    pub(super) primary: Sink,
    pub(super) joins: Receiver<Join>,
    pub(super) console: ConsoleLines,
    /// The exits of each vCPU, if they are traced.
    pub(super) exits: Vec<ExitReader>,
}

pub(super) struct Controller {
    pub(super) kernel: Arc<Kernel>,
    pub(super) tracing: Tracing,
    /// What was planned for it last: see [`Controller::planned`].
    pub(super) plan: Option<Arc<Plan>>,
    /// What was made for it before exits can be held.
    pub(super) ahead: Option<Ahead>,
    /// For what will be held, until there is a guest that holds it.
    room: Room,
    /// What is to be done about exits when tracing begins.
    exit_plan: Option<ExitPlan>,
    pub(super) stage: Stage,
    pub(super) stream: Option<Output>,
    pub(super) relay: Option<Relay>,
    pub(super) summary: Summary,
    /// No site is ours, by command.
    pub(super) held_back: bool,
    /// How the trace ends.
    pub(super) end: TraceEnd,
    /// How the guest ends.
    pub(super) verdict: Verdict,
    /// Whether it hangs.
    pub(super) hang: HangWatch,
    pub(super) anomaly: Anomaly,
    /// What was traced when.
    pub(super) history: History,
    /// Those that the guest has left for others.
    pub(super) kernels: Kernels,
    /// Of a guest that is not traced any more.
    pub(super) counters: Option<Counters>,
    /// When consumers are told next of what they say.
    pub(super) counts_due: Instant,
    /// Of tracers that are gone, by the number that nobody has taken yet: not all may have been told.
    pub(super) gone: BTreeMap<u8, (String, Option<Histogram>)>,
    /// Tracers that keep open calls, with what tells of which functions: see [`Plan::keepers`].
    pub(super) keepers: BTreeMap<u8, u64>,
    /// Sites are to be taken when an update of the guest's ftrace is over.
    pub(super) late: bool,
    /// Requests that wait for the same.
    pub(super) waiting: Vec<ControlRequest>,
    /// Functions of modules, also of those that are gone, by their sites.
    pub(super) functions: FxHashMap<usize, Arc<ModuleFunction>>,
    /// Exits of functions of modules that are loaded, as far as anybody wants returns: indices behind
    /// those of the kernel's own, ascending.
    pub(super) module_exits: Vec<(usize, Exit)>,
    /// Sites of functions of modules of which not all ends can be seen.
    pub(super) unseen: BTreeMap<Missing, BTreeSet<usize>>,
    /// Tracers of which it was said that they miss something of modules, and what else was said of them.
    pub(super) unvalued: Vec<String>,
    /// Notes that were left out.
    pub(super) notes: Notes,
    /// What modules that are loaded have of tracepoints, by the addresses of their `struct module`.
    pub(super) module_points: BTreeMap<u64, ModulePoints>,
    /// Of the run.
    pub(super) deadline: Deadline,
    /// The trigger that ends the run.
    pub(super) ended_by: Option<String>,
    /// Of triggers.
    pub(super) commands: Commands,
    /// What triggers are given that are added.
    pub(super) trigger_numbers: Numbers,
    /// Latencies that are measured.
    pub(super) latency: Option<Measured>,
    /// Those that were measured when the trace ended.
    pub(super) last_page: Option<LastPage>,
    /// Events that the stream says are traced now.
    pub(super) events_told: Vec<String>,
}

/// The guest's clock, for which it has to pause.
pub(super) fn ticks_now(machine: &dyn Vm) -> u64 {
    machine.pause().ok().and_then(|paused| paused.tsc(0).ok()).unwrap_or(0)
}

pub(super) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Controller {
    pub(super) fn new(
        kernel: Arc<Kernel>,
        tracing: Tracing,
        stream: Output,
        commands: Commands,
        deadline: Deadline,
        hang: HangWatch,
    ) -> Self {
        // What the image tells is found out before there is a guest that waits for it; what is
        // missing is told when it is needed.
        let _ = kernel.structs();
        let exit_plan = ExitPlan::new(&kernel, &tracing.returning(), tracing.may_want_exits()).ok();
        let held_back = tracing.waits_for_start();
        let trigger_numbers = Numbers::beside(&tracing.triggers);
        let mut controller = Self {
            kernel,
            tracing,
            plan: None,
            ahead: None,
            room: Room::default(),
            exit_plan,
            stage: Stage::Unknown,
            stream: Some(stream),
            relay: None,
            summary: Summary::default(),
            held_back,
            end: TraceEnd::default(),
            verdict: Verdict::default(),
            hang,
            anomaly: Anomaly::default(),
            history: History::default(),
            kernels: Kernels::default(),
            counters: None,
            counts_due: Instant::now(),
            gone: BTreeMap::new(),
            keepers: BTreeMap::new(),
            late: false,
            waiting: Vec::new(),
            functions: FxHashMap::default(),
            module_exits: Vec::new(),
            unseen: BTreeMap::new(),
            unvalued: Vec::new(),
            notes: Notes::default(),
            module_points: BTreeMap::new(),
            deadline,
            ended_by: None,
            commands,
            trigger_numbers,
            latency: None,
            last_page: None,
            events_told: Vec::new(),
        };
        controller.tracing_changed();
        if !controller.tracing.is_empty() {
            let plan = controller.planned();
            controller.room = Room::new(&controller.kernel, plan.sites.len(), plan.exits.len());
        }
        controller
    }

    /// There are other tracers, or others are gone.
    pub(super) fn tracing_changed(&mut self) {
        self.plan = None;
        let plan = self.planned();
        let of_ends = plan.only_left(&self.tracing);
        self.summary.sites.matched = (plan.sites.len() + of_ends) as u64;
    }

    pub(super) fn note(&mut self, text: String) {
        self.notes.keep(&mut self.summary.notes, text);
    }

    /// What every site has to do, and every exit, if any are to be traced. Made once for each
    /// change of [`Controller::tracing`], after which [`Controller::tracing_changed`] must be
    /// called.
    pub(super) fn planned(&mut self) -> Arc<Plan> {
        if let Some(plan) = &self.plan {
            return Arc::clone(plan);
        }
        let exits = self.tracing.wants_exits().then(|| self.kernel.exits().ok()).flatten();
        let plan =
            Plan::with_modules(&self.tracing, &self.module_exits, exits.map_or(&[], Exits::all));
        let plan = Arc::new(plan);
        self.plan = Some(Arc::clone(&plan));
        plan
    }

    /// What sites have to do by now: for tracers, too, unless tracing waits or pauses.
    pub(super) fn planned_now(&mut self) -> Arc<Plan> {
        if self.held_back { Plan::untraced(&self.tracing).into() } else { self.planned() }
    }

    pub(super) fn name(&self, site: usize) -> String {
        if let Some(function) = self.functions.get(&site) {
            return format!("{} [{}]", function.name(), function.module);
        }
        let site = self.kernel.sites().get(site);
        site.and_then(|site| self.kernel.site_name(site)).unwrap_or("a site").to_owned()
    }

    /// Gives up tracing; the guest goes on.
    pub(super) fn give_up(&mut self, why: &dyn std::fmt::Display) {
        let what =
            if self.kernels.anew > 0 { "the kernel that started anew (kexec) is " } else { "" };
        self.note(format!("{what}not traced: {why}"));
        self.stage = Stage::Off;
    }

    /// A pause ends, after which others may be traced than before.
    pub(super) fn account(&mut self, paused: Paused<'_>, kind: MarkKind, text: String) {
        let ticks = self.count_pause(paused, kind, text);
        self.note_traced(ticks);
    }

    /// A pause ends: count it, and put it into the stream. Returns when, in ticks.
    pub(super) fn count_pause(&mut self, paused: Paused<'_>, kind: MarkKind, text: String) -> u64 {
        let ticks = paused.tsc(0).unwrap_or(0);
        if let Stage::Attached { attachment, .. } = &self.stage {
            attachment.program_traps().for_each(|trap| {
                paused.arm_trap(trap);
            });
        }
        arch::code_changed();
        let duration = paused.resume();
        let pauses = &mut self.summary.pauses;
        pauses.count += 1;
        pauses.total_ns += nanoseconds(duration);
        pauses.max_ns = pauses.max_ns.max(nanoseconds(duration));
        if let Some(relay) = &self.relay {
            relay.mark(mark(ticks, kind, duration, text));
        }
        self.tell_events(ticks);
        ticks
    }

    /// The kernel is in memory, and no vCPU has run.
    pub(super) fn loaded(&mut self, machine: &dyn Vm) {
        if self.tracing.is_empty() {
            return;
        }
        let located = machine.pause().map_err(anyhow::Error::from).and_then(|paused| {
            let image = arch::loaded(&self.kernel, &paused.registers(0)?)?;
            let stage = image.map(|image| self.wait(machine, &paused, image)).transpose();
            arch::code_changed();
            stage
        });
        match located {
            Ok(Some(stage)) => self.stage = stage,
            Ok(None) => {}
            Err(error) => self.give_up(&error),
        }
    }

    /// The guest has told where one of its symbols is.
    pub(super) fn entry_known(&mut self, machine: &dyn Vm, vcpu: usize, address: u64) {
        if !matches!(self.stage, Stage::Unknown) || self.tracing.is_empty() {
            return;
        }
        let located = machine.pause().map_err(anyhow::Error::from).and_then(|paused| {
            let image = self.locate(machine, &paused, vcpu, arch::WATCHED_SYMBOL, address)?;
            self.check_next(machine.ram(), vcpu, &image)?;
            let stage = self.wait(machine, &paused, image)?;
            self.account(paused, MarkKind::Pause, "kernel located".into());
            Ok(stage)
        });
        match located {
            Ok(stage) => self.stage = stage,
            Err(error) if self.kernels.waits() => {
                self.next_is_untraced(&error);
                self.stage = Stage::Off;
            }
            Err(error) => self.give_up(&error),
        }
    }

    fn locate(
        &self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        symbol: &str,
        address: u64,
    ) -> anyhow::Result<Image> {
        let tables = arch::tables(&paused.registers(vcpu)?);
        Ok(Image::locate(machine.ram(), &self.kernel, symbol, address, tables)?)
    }

    /// Makes the guest stop after `ftrace_init`.
    fn wait(&self, machine: &dyn Vm, paused: &Paused<'_>, image: Image) -> anyhow::Result<Stage> {
        let ram = machine.ram();
        let name = AFTER_FTRACE_INIT;
        let wire = Tripwire::on_function(ram, &image, &self.kernel, name, &TRAP_INSTRUCTION)?;
        paused.arm_trap(wire.address());
        Ok(Stage::Located { image, wire })
    }

    /// A tripwire was hit; the vCPU stands at it.
    pub(super) fn trapped(
        &mut self,
        machine: &dyn Vm,
        vcpu: usize,
        address: u64,
    ) -> Result<(), SessionError> {
        if self.end_told(machine, vcpu, address)
            || self.guest_updates(machine, vcpu, address)
            || self.self_tested(machine, vcpu, address)
            || self.guest_changes_tracepoints(machine, vcpu, address)
            || self.module_told(machine, vcpu, address)
            || self.triggered(machine, vcpu, address)
        {
            return Ok(());
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Off);
        match stage {
            Stage::Located { image, wire } if wire.address() == address => {
                let plan = self.planned();
                let paused = machine.pause()?;
                self.disarm(machine, &paused, wire);
                match self.attach(machine, &paused, vcpu, image, address, &plan) {
                    Ok(stage) => self.stage = stage,
                    Err(error) => self.give_up(&error),
                }
                if matches!(self.stage, Stage::Testing(_)) {
                    self.count_pause(paused, MarkKind::Pause, "self-test".into());
                } else {
                    let text = format!("{} sites", self.summary.sites.patched);
                    self.account(paused, MarkKind::Attach, text);
                }
            }
            Stage::Attached { mut attachment, from: Some(from), wires }
                if from.address == address =>
            {
                let plan = self.planned();
                let paused = machine.pause()?;
                paused.disarm_trap(address);
                let enabled = attachment
                    .disarm(machine.ram(), from.site)
                    .map_err(anyhow::Error::from)
                    .and_then(|()| self.enable(machine, &mut attachment, &plan));
                self.stage = Stage::Attached { attachment, from: None, wires };
                if let Err(error) = enabled {
                    self.note(format!("not traced: {error}"));
                }
                let text = format!("{} sites", self.summary.sites.patched);
                self.account(paused, MarkKind::Attach, text);
            }
            Stage::Attached {
                mut attachment,
                from,
                wires: Wires { settle: Some(wire), init, .. },
            } if wire.address() == address => {
                let plan = self.planned();
                let paused = machine.pause()?;
                self.disarm(machine, &paused, wire);
                let ram = machine.ram();
                let mut settled = attachment.settle(ram, &self.kernel).map_err(Into::into);
                let waits = !plan.exits.is_empty() || self.tracing.waits_for_alternatives();
                if from.is_none() && waits {
                    settled = settled.and_then(|()| self.enable(machine, &mut attachment, &plan));
                }
                if let Err(error) = settled {
                    self.note(format!("returns and switches are not traced: {error}"));
                }
                let mut text = format!("{} exits", attachment.held_exits());
                if attachment.held_switches() > 0 {
                    let held = attachment.held_switches();
                    let _ = write!(text, ", {held} switches of interrupts and preemption");
                }
                let leave = self.before_kexec(machine, &paused, attachment.image());
                let wires = Wires { init, settle: None, leave };
                self.stage = Stage::Attached { attachment, from, wires };
                self.account(paused, MarkKind::Filter, text);
            }
            Stage::Attached {
                mut attachment,
                from,
                wires: Wires { init: Some(wire), settle, leave },
            } if wire.address() == address => {
                let paused = machine.pause()?;
                self.disarm(machine, &paused, wire);
                let text = match attachment.release_init(machine.ram()) {
                    Ok(restored) => format!("{} sites of .init.text given back", restored.sites),
                    Err(error) => {
                        self.note(error.to_string());
                        String::new()
                    }
                };
                // Late initcalls are over: from now on it goes evenly.
                self.look_at_clock(machine, &paused, attachment.image());
                let wires = Wires { init: None, settle, leave };
                self.stage = Stage::Attached { attachment, from, wires };
                // Nobody can call these any more: nothing is missed of them.
                self.count_pause(paused, MarkKind::Filter, text);
            }
            Stage::Attached { attachment, from, wires }
                if wires.leave.as_ref().is_some_and(|wire| wire.address() == address) =>
            {
                let slide = attachment.image().slide;
                self.stage = Stage::Attached { attachment, from, wires };
                self.kernel_leaves(machine, slide);
            }
            // A second vCPU was at the same tripwire: it goes on with the original.
            other => self.stage = other,
        }
        Ok(())
    }

    /// A tripwire where the kernel leaves for another one; none in kernels that cannot.
    fn before_kexec(
        &self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        image: &Image,
    ) -> Option<Tripwire> {
        let (ram, name) = (machine.ram(), BEFORE_KEXEC);
        let wire = Tripwire::on_function(ram, image, &self.kernel, name, &TRAP_INSTRUCTION).ok()?;
        paused.arm_trap(wire.address());
        Some(wire)
    }

    pub(super) fn disarm(&mut self, machine: &dyn Vm, paused: &Paused<'_>, wire: Tripwire) {
        paused.disarm_trap(wire.address());
        if let Err(error) = wire.disarm(machine.ram()) {
            self.note(error.to_string());
        }
    }

    fn attach(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        image: Image,
        stopped: u64,
        plan: &Plan,
    ) -> anyhow::Result<Stage> {
        let ram = machine.ram();
        // By now the kernel has its own page tables.
        let entry = self.kernel.symbols().address(AFTER_FTRACE_INIT).unwrap_or(0);
        let entry = image.runtime(entry);
        let image = self.locate(machine, paused, vcpu, AFTER_FTRACE_INIT, entry)?;
        self.begin_anew(paused)?;
        let annex = machine.annex().ok_or_else(|| anyhow::anyhow!("the machine has no annex"))?;
        let sites = self.tracing.returning();
        let of_modules = self.tracing.may_want_exits();
        // Another one when the tracers have changed since.
        let fits = |plan: &ExitPlan| plan.sites() == sites && plan.is_of_modules() == of_modules;
        let exit_plan = match self.exit_plan.take().filter(fits) {
            Some(plan) => plan,
            None => ExitPlan::new(&self.kernel, &sites, of_modules)?,
        };
        let (overflow, cpus) = (self.tracing.overflow, machine.vcpus() as u64);
        let clock_hz = machine.clock_hz();
        let buffer = self.tracing.buffer;
        let options = Options { overflow, cpus, buffer, clock_hz, returns: &exit_plan };
        let attachment = Attachment::new(ram, &self.kernel, image, annex, options)?;
        let mut attachment = attachment.with_room(std::mem::take(&mut self.room));
        if let Some(past) = self.kernels.past.take() {
            attachment = attachment.with_past(past);
        }
        attachment.stop_by(&TRAP_INSTRUCTION);
        if self.tracing.follow.is_some() {
            attachment.follow()?;
        }
        self.share(machine, paused, &mut attachment);
        let attachment = Box::new(attachment);
        match self.begin_self_test(machine, paused, vcpu, attachment, stopped, plan)? {
            Ok(testing) => Ok(Stage::Testing(Box::new(testing))),
            Err(attachment) => self.begin_tracing(machine, paused, vcpu, attachment, stopped, plan),
        }
    }

    /// All that is needed is in the guest: starts the relay and takes sites. The vCPU goes on at
    /// `stopped`.
    pub(super) fn begin_tracing(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        mut attachment: Box<Attachment>,
        stopped: u64,
        plan: &Plan,
    ) -> anyhow::Result<Stage> {
        // Not before: triggers may have been added in the self-test.
        self.set_triggers(&mut attachment);
        match self.take_sites(machine, paused, vcpu, &mut attachment, stopped, plan) {
            Ok((from, wires)) => Ok(Stage::Attached { attachment, from, wires }),
            Err(error) => {
                self.give_back(machine, paused, attachment);
                Err(error)
            }
        }
    }

    fn take_sites(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        attachment: &mut Attachment,
        stopped: u64,
        plan: &Plan,
    ) -> anyhow::Result<(Option<From>, Wires)> {
        let (ram, image) = (machine.ram(), *attachment.image());
        paused.set_rip(vcpu, attachment.resume(ram, stopped)?)?;
        self.watch_tracepoints(machine, paused, attachment);
        self.watch_modules(machine, paused, attachment);
        match self.stream.take() {
            Some(output) => self.begin_stream(machine, paused, attachment, output)?,
            None => self.go_on(attachment)?,
        }
        let from = match self.tracing.from {
            None => {
                self.enable(machine, attachment, plan)?;
                None
            }
            Some(site) => match attachment.arm(ram, &self.kernel, site, &TRAP_INSTRUCTION)? {
                Ok(address) => {
                    paused.arm_trap(address);
                    Some(From { site, address })
                }
                Err(reason) => anyhow::bail!("--from {}: {reason}", self.name(site)),
            },
        };
        // After the exits, which are found by what the image has there.
        self.watch_the_end(machine, paused, image);
        let wire = |name: &str| {
            let wire = Tripwire::on_function(ram, &image, &self.kernel, name, &TRAP_INSTRUCTION);
            wire.inspect(|wire| {
                paused.arm_trap(wire.address());
            })
        };
        // Always: a live filter may want functions of .init.text later.
        let init = BEFORE_FREE_INIT.iter().find_map(|name| wire(name).ok());
        let settle = Attachment::settles_at(&self.kernel).map(wire).transpose();
        if init.is_none() {
            // Without it we could not know when that memory is gone.
            let restored = attachment.release_init(ram)?;
            if restored.sites > 0 {
                self.note("functions of .init.text are not traced: no tripwire".into());
            }
        }
        let settle = settle.unwrap_or_else(|error| {
            if self.tracing.waits_for_alternatives() {
                self.note(format!("returns and switches are not traced: {error}"));
            }
            None
        });
        // Else then, since alternatives may be in that code.
        let leave = match settle {
            None => self.before_kexec(machine, paused, &image),
            Some(_) => None,
        };
        let wires = Wires { init, settle, leave };
        Ok((from, wires))
    }

    fn begin_stream(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        attachment: &Attachment,
        output: Output,
    ) -> anyhow::Result<()> {
        let image = attachment.image();
        let Output { primary, joins, console, exits } = output;
        exits.iter().for_each(ExitReader::begin);
        let resolve = relay::resolver(&self.kernel, image.slide);
        let setup = Setup {
            header: self.header(machine, image.slide),
            stream: self.hub(machine, primary, resolve)?,
            joins,
            readers: attachment.readers(),
            exits,
            tasks: attachment.tasks(),
            memory: machine.shared_ram(),
            kernel: Arc::clone(&self.kernel),
            targets: Targets::default(),
            ticks: paused.tsc(0)?,
            console,
            waiting: room::waiting(machine, self.tracing.overflow),
        };
        self.relay = Some(Relay::start(setup, machine.waker())?);
        Ok(())
    }

    pub(super) fn header(&self, machine: &dyn Vm, slide: u64) -> Header {
        let mut header = Header {
            arch: std::env::consts::ARCH.to_owned(),
            clock: arch::CLOCK.to_owned(),
            clock_hz: machine.clock_hz(),
            // A guest's clock starts at 0 with the machine.
            clock_start: 0,
            release: self.kernel.release().to_owned(),
            vcpus: u32::try_from(machine.vcpus()).unwrap_or(0),
            slide,
            address_base: Header::TOP_4_GIB,
            vmtrace_version: env!("CARGO_PKG_VERSION").to_owned(),
            extra: self.tracing.context.then(Context::header).into_iter().collect(),
        };
        if self.tracing.calls_initcalls(&self.kernel) {
            let calls = self.kernel.initcalls();
            header.add_initcalls(calls.iter().map(|call| Initcall {
                address: call.address.wrapping_add(slide),
                name: call.name,
                level: call.level,
            }));
        }
        header
    }

    /// The error of a relay that cannot write any more.
    pub(super) fn relay_error(&mut self) -> Option<std::io::Error> {
        self.relay.as_mut()?.error()
    }

    pub(super) fn mark(&self, machine: &dyn Vm, kind: MarkKind, duration: Duration, text: String) {
        if let Some(relay) = &self.relay {
            relay.mark(mark(ticks_now(machine), kind, duration, text));
        }
    }

    /// Gives every site back, whether the guest lives or is gone.
    pub(super) fn detach(&mut self, machine: &dyn Vm) {
        // Whoever waits is told that the trace has ended.
        self.waiting.clear();
        let stage = std::mem::replace(&mut self.stage, Stage::Off);
        let paused = match machine.pause() {
            Ok(paused) => paused,
            Err(error) => {
                self.note(format!("sites were not given back: {error}"));
                return;
            }
        };
        match stage {
            Stage::Unknown if !self.tracing.is_empty() => {
                let symbol = arch::WATCHED_SYMBOL;
                if self.next_never_told(&format!("it said where it is ({symbol})")) {
                    return;
                }
                self.note(format!(
                    "not traced: the guest ended before it said where it is ({symbol}), so \
                     before ftrace_init"
                ));
            }
            Stage::Located { wire, .. } => {
                self.disarm(machine, &paused, wire);
                if self.next_never_told(AFTER_FTRACE_INIT) {
                    return;
                }
                self.note(format!("not traced: the guest ended before {AFTER_FTRACE_INIT}"));
            }
            Stage::Testing(testing) => self.abandon_self_test(machine, &paused, *testing),
            Stage::Attached { attachment, from, wires } => {
                if let Some(from) = from {
                    paused.disarm_trap(from.address);
                    let name = self.name(from.site);
                    self.note(format!("not traced: {name} was never called"));
                }
                for wire in [wires.init, wires.settle, wires.leave].into_iter().flatten() {
                    self.disarm(machine, &paused, wire);
                }
                self.look_at_clock(machine, &paused, attachment.image());
                if let Some(text) = self.give_back(machine, &paused, attachment) {
                    self.account(paused, MarkKind::Detach, text);
                }
            }
            Stage::Unknown | Stage::Off => {}
        }
    }

    /// Gives all back that is held; what there is to tell of it.
    pub(super) fn give_back(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        mut attachment: Box<Attachment>,
    ) -> Option<String> {
        for trap in attachment.traps() {
            paused.disarm_trap(trap);
        }
        self.counters = Some(attachment.counters().clone());
        let released = attachment.release_all(machine.ram(), &self.kernel);
        self.kernels.past = Some(attachment.into_past());
        match released {
            Ok(restored) => {
                self.foreign(&restored.foreign);
                Some(format!("{} sites given back", restored.sites))
            }
            Err(error) => {
                let what = format!("not all sites were given back: {error}");
                self.note(what.clone());
                self.anomaly.found(what);
                None
            }
        }
    }
}
