//! The controller of a run: what it knows, and what all its parts do with that. [`super::attach`] has its way
//! through the life of a guest.

use super::anew::Kernels;
use super::anomaly::Anomaly;
use super::apply::Ahead;
use super::arch;
use super::ending::TraceEnd;
use super::hang::HangWatch;
use super::history::History;
use super::jumps::Jumps;
use super::latency::{LastPage, Measured};
use super::module_events::ModulePoints;
use super::notes::Notes;
use super::plan::Plan;
use super::selftest::Testing;
use super::switches::Unswitched;
use super::trigger_commands::Numbers;
use super::tripwires::{Purpose, Tripwires};
use super::verdict::Verdict;
use super::vm::{Paused, Vm};
use super::{Commands, Histogram, Tracing, mark};
use crate::deadline::Deadline;
use crate::kernel::{Exit, Exits, Kernel, Missing};
use crate::relay::{ConsoleLines, ExitReader, Relay, nanoseconds};
use crate::serve::{ControlRequest, Join, Sink};
use crate::stream::{MarkKind, Summary};
use crate::tracer::{
    Attachment, Counters, ExitPlan, GuestError, Image, Keeper, ModuleFunction, Room,
};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

pub(super) enum Stage {
    /// The kernel has not said where it is.
    Unknown,
    /// Where it is is known; stops at the tripwire after `ftrace_init`.
    Located { image: Image },
    /// The annex is there, and one site is called to see that all works.
    Testing(Box<Testing>),
    /// Attached; sites are ours, or are not yet: `from` is then the site of `--from`, which waits to be called.
    Attached { attachment: Box<Attachment>, from: Option<usize> },
    /// Not tracing any more, or never.
    Off,
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
    pub(super) room: Room,
    /// What is to be done about exits when tracing begins.
    pub(super) exit_plan: Option<ExitPlan>,
    pub(super) stage: Stage,
    /// Where vCPUs may stop, and for what.
    pub(super) tripwires: Tripwires,
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
    pub(super) keepers: BTreeMap<Keeper, u64>,
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
    pub(super) unswitched: Unswitched,
    /// Tracers of which it was said that they miss something of modules, and what else was said of them.
    pub(super) told_of_modules: HashSet<String>,
    /// Names of modules that were loaded; `None` until modules are seen to come.
    pub(super) came: Option<BTreeSet<Arc<str>>>,
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
    /// Functions in which calls go on.
    pub(super) jumps: Jumps,
}

/// The guest's clock, for which it has to pause.
pub(super) fn ticks_now(machine: &dyn Vm) -> u64 {
    machine.pause().ok().and_then(|paused| paused.tsc(0).ok()).unwrap_or(0)
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
            tripwires: Tripwires::default(),
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
            unswitched: Unswitched::default(),
            told_of_modules: HashSet::new(),
            came: None,
            notes: Notes::default(),
            module_points: BTreeMap::new(),
            deadline,
            ended_by: None,
            commands,
            trigger_numbers,
            latency: None,
            last_page: None,
            events_told: Vec::new(),
            jumps: Jumps::default(),
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

    /// The same of what may be found again and again, if it was not said yet.
    pub(super) fn note_once(&mut self, text: String) {
        if !self.notes.are_full() && !self.summary.notes.contains(&text) {
            self.note(text);
        }
    }

    /// What every site has to do, and every exit, if any are to be traced. Made once for each
    /// change of [`Controller::tracing`], after which [`Controller::tracing_changed`] must be
    /// called.
    pub(super) fn planned(&mut self) -> Arc<Plan> {
        if let Some(plan) = &self.plan {
            return Arc::clone(plan);
        }
        let is_whole = |site: u32| {
            let exits = self.kernel.exits();
            exits.is_ok_and(|exits| self.tracing.sees_ends(exits, site))
        };
        let exits = self.wanted_exits();
        let plan = Plan::with_modules(&self.tracing, &self.module_exits, exits, &is_whole);
        let plan = Arc::new(plan);
        self.plan = Some(Arc::clone(&plan));
        plan
    }

    /// Those of the kernel's functions, if any are of interest.
    fn wanted_exits(&self) -> &[Exit] {
        let exits = self.tracing.wants_exits().then(|| self.kernel.exits().ok()).flatten();
        exits.map_or(&[], Exits::all)
    }

    /// What sites have to do by now: for tracers, too, unless tracing waits or pauses; and while ends are not seen yet,
    /// nothing for those of parts of the call tree.
    pub(super) fn planned_now(&mut self, attachment: &Attachment) -> Arc<Plan> {
        if self.held_back {
            return self.plan_untraced().into();
        }
        let plan = self.planned();
        match attachment.is_settled() || !self.tracing.is_limited() {
            true => plan,
            false => plan.without_nested().into(),
        }
    }

    /// What sites have to do while tracing waits or pauses.
    pub(super) fn plan_untraced(&self) -> Plan {
        Plan::untraced(&self.tracing, &self.module_exits, self.wanted_exits())
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
        self.note(format!("{}: {why}", self.untraced_kernel()));
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
            // Of programs that were made meanwhile.
            for trap in attachment.program_traps() {
                if self.tripwires.at(trap).is_none()
                    && let Some(stop) = attachment.stopped(trap)
                {
                    self.tripwires.arm(Purpose::Program(stop), &paused, trap);
                }
            }
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

    /// The error of a relay that cannot write any more.
    pub(super) fn relay_error(&mut self) -> Option<std::io::Error> {
        self.relay.as_mut()?.error()
    }

    pub(super) fn mark(&self, machine: &dyn Vm, kind: MarkKind, duration: Duration, text: String) {
        if let Some(relay) = &self.relay {
            relay.mark(mark(ticks_now(machine), kind, duration, text));
        }
    }

    /// What is held, and who waits for `--from`, for those who put it back: it is off meanwhile. `None` where nothing is
    /// attached to, which stays as it is.
    pub(super) fn take_attached(&mut self) -> Option<(Box<Attachment>, Option<usize>)> {
        match std::mem::replace(&mut self.stage, Stage::Off) {
            Stage::Attached { attachment, from } => Some((attachment, from)),
            other => {
                self.stage = other;
                None
            }
        }
    }

    /// Lays a tripwire on a function of the kernel's.
    ///
    /// # Errors
    /// As [`Tripwires::lay`].
    pub(super) fn lay(
        &mut self,
        purpose: Purpose,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        image: &Image,
        function: &str,
    ) -> Result<(), GuestError> {
        self.tripwires.lay(purpose, machine.ram(), paused, (&self.kernel, image), function)
    }

    /// Takes a tripwire away. Whether one was armed here.
    pub(super) fn disarm(&mut self, machine: &dyn Vm, paused: &Paused<'_>, address: u64) -> bool {
        self.tripwires.take_away(machine.ram(), paused, address).unwrap_or_else(|error| {
            self.note(error.to_string());
            true
        })
    }

    /// The same of that for this purpose, if there is one.
    pub(super) fn disarm_for(&mut self, machine: &dyn Vm, paused: &Paused<'_>, purpose: Purpose) {
        if let Some(address) = self.tripwires.find(purpose) {
            self.disarm(machine, paused, address);
        }
    }
}
