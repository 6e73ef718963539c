//! The data of a boot report. Field names are stable.

use std::io::{self, Write};

use serde::Serialize;

use crate::export::times;
use crate::stream::TracedOf;

use super::calls::{Call, Calls, Kind};
use super::{Boot, INIT_MODULE, INITCALL, LOAD_MODULE, Role, STARTS_INIT, STEPS};
use crate::analyze::{Gaps, seconds};

/// Most functions in a report.
const MOST_FUNCTIONS: usize = 100;
/// Levels in the order in which the kernel calls them.
const LEVELS: [&str; 10] =
    ["early", "pure", "core", "postcore", "arch", "subsys", "fs", "rootfs", "device", "late"];
/// What is called an initcall whose level is not known.
const NO_LEVEL: &str = "?";

/// Where the time of a boot went. Times are nanoseconds of the guest's clock, those called `ns` since
/// its start; what is not known is none.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `boot-report`.
    pub event: &'static str,
    /// Of the fields: a number that changes when one of these means something else.
    pub version: u32,
    /// Release of the kernel.
    pub release: String,
    /// Architecture.
    pub arch: String,
    /// vCPUs.
    pub vcpus: u32,
    /// When init was started.
    pub init_ns: Option<u64>,
    /// Up to when times are counted: init, or the end of the trace.
    pub until_ns: u64,
    /// Steps to init, in their order.
    pub steps: Vec<Step>,
    /// Initcalls by level, in the order in which the kernel calls them.
    pub levels: Vec<Level>,
    /// Initcalls of the kernel itself, in their order.
    pub initcalls: Vec<Initcall>,
    /// Up to 100 functions, the one with the most time of its own first.
    pub functions: Vec<Function>,
    /// Time in which no vCPU had anything to do.
    pub idle_ns: Option<u64>,
    /// The same of each vCPU.
    pub idle: Vec<IdleOf>,
    /// Modules, in the order in which they were loaded, also those that came after init.
    pub modules: Vec<Module>,
    /// What is missing in the trace.
    pub missing: Gaps,
    /// What can therefore, or because it was not traced, not be told: a sentence each.
    pub untold: Vec<String>,
}

/// A step to init.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// When.
    pub ns: u64,
    /// Time to the next one.
    pub took_ns: u64,
    /// The function whose first call it is.
    pub function: Option<&'static str>,
    /// What it is.
    pub what: &'static str,
}

/// Initcalls of a level.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Level {
    /// Such as `subsys`; `?` for those whose level is not known.
    pub level: String,
    /// Calls.
    pub calls: u64,
    /// Calls whose duration is known.
    pub timed: u64,
    /// All of those together.
    pub duration_ns: u64,
    /// Time of it in which no vCPU had anything to do.
    pub idle_ns: u64,
}

/// An initcall.
#[derive(Clone, Debug, Serialize)]
pub struct Initcall {
    /// The function, if that is known.
    pub function: Option<String>,
    /// Its level, if that is known.
    pub level: Option<String>,
    /// When it was called.
    pub ns: u64,
    /// The vCPU.
    pub cpu: u32,
    /// The task.
    pub pid: u32,
    /// How long it took.
    pub duration_ns: Option<u64>,
    /// Time of it in which no vCPU had anything to do.
    pub idle_ns: u64,
}

/// A function.
#[derive(Clone, Debug, Serialize)]
pub struct Function {
    /// Its name.
    pub function: String,
    /// Calls up to init.
    pub calls: u64,
    /// Calls whose duration is known.
    pub timed: u64,
    /// Without the calls in it that were traced.
    pub self_ns: u64,
    /// With them.
    pub total_ns: u64,
    /// The longest call.
    pub longest_ns: u64,
}

/// Time in which a vCPU had nothing to do.
#[derive(Clone, Debug, Serialize)]
pub struct IdleOf {
    /// The vCPU.
    pub cpu: u32,
    /// How long.
    pub idle_ns: u64,
}

/// A module.
#[derive(Clone, Debug, Serialize)]
pub struct Module {
    /// Its name, if that is known.
    pub module: Option<String>,
    /// When it was loaded.
    pub ns: u64,
    /// How long that took.
    pub duration_ns: Option<u64>,
    /// How long its own init function took, of that.
    pub init_ns: Option<u64>,
    /// Time of it in which no vCPU had anything to do.
    pub idle_ns: u64,
    /// Whether that was before init.
    pub before_init: bool,
}

impl Report {
    /// As one JSON object, in a line.
    ///
    /// # Errors
    /// When the output fails.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        serde_json::to_writer(&mut *out, self)?;
        writeln!(out)
    }
}

pub(super) fn make(boot: Boot) -> Report {
    let until_ns = boot.nanoseconds(boot.init.unwrap_or(boot.last));
    let header = &boot.header;
    let calls = &boot.calls;
    let of = |kind| calls.list.iter().filter(move |call| call.kind == kind);
    let initcalls: Vec<_> = of(Kind::Initcall)
        .map(|call| Initcall {
            function: call.name.clone(),
            level: call.level.clone(),
            ns: boot.nanoseconds(call.start),
            cpu: call.vcpu,
            pid: call.pid,
            duration_ns: call.duration,
            idle_ns: header.duration_ns(call.waited),
        })
        .collect();
    let loads = calls
        .list
        .iter()
        .filter(|call| matches!(call.kind, Kind::Load | Kind::Init) && !Calls::is_within(call));
    let module = |call: &Call| Module {
        module: call.name.clone(),
        ns: boot.nanoseconds(call.start),
        duration_ns: call.duration,
        init_ns: call.init,
        idle_ns: header.duration_ns(call.waited),
        before_init: boot.init.is_none_or(|init| call.start < init),
    };
    let modules = loads.map(module).collect();
    let idle_of = |(cpu, ticks)| IdleOf { cpu, idle_ns: header.duration_ns(ticks) };
    let known = boot.knows_idle();
    Report {
        event: "boot-report",
        version: 1,
        release: header.release.clone(),
        arch: header.arch.clone(),
        vcpus: header.vcpus,
        init_ns: boot.init.map(|init| boot.nanoseconds(init)),
        until_ns,
        steps: steps(&boot, until_ns),
        levels: levels(&initcalls),
        functions: functions(&boot),
        idle_ns: known.then(|| header.duration_ns(boot.idle.all)),
        idle: if known { boot.idle.each().map(idle_of).collect() } else { Vec::new() },
        untold: untold(&boot, &initcalls),
        initcalls,
        modules,
        missing: boot.gaps,
    }
}

fn steps(boot: &Boot, until: u64) -> Vec<Step> {
    let mut steps = vec![(0, None, "the machine starts")];
    if let Some(began) = boot.began {
        let what = "tracing begins, right after the kernel's ftrace_init";
        steps.push((boot.nanoseconds(began), None, what));
    }
    for (&(function, what), &ticks) in STEPS.iter().zip(&boot.steps) {
        // A line of the console says it, too.
        let init = boot.init.filter(|_| function == STARTS_INIT);
        if let Some(ticks) = init.or(ticks) {
            steps.push((boot.nanoseconds(ticks), Some(function), what));
        }
    }
    // What comes after init is no step to it.
    steps.retain(|&(ns, ..)| ns <= until);
    steps.sort_by_key(|&(ns, ..)| ns);
    let ends: Vec<_> = steps.iter().skip(1).map(|&(ns, ..)| ns).chain([until]).collect();
    let step = |((ns, function, what), end): ((u64, _, _), u64)| Step {
        ns,
        took_ns: end.saturating_sub(ns),
        function,
        what,
    };
    steps.into_iter().zip(ends).map(step).collect()
}

fn levels(initcalls: &[Initcall]) -> Vec<Level> {
    let mut levels: Vec<Level> = Vec::new();
    for call in initcalls {
        let name = call.level.as_deref().unwrap_or(NO_LEVEL);
        let index = levels.iter().position(|level| level.level == name).unwrap_or_else(|| {
            levels.push(Level { level: name.to_owned(), ..Level::default() });
            levels.len() - 1
        });
        let Some(level) = levels.get_mut(index) else { continue };
        level.calls += 1;
        level.timed += u64::from(call.duration_ns.is_some());
        level.duration_ns = level.duration_ns.saturating_add(call.duration_ns.unwrap_or(0));
        level.idle_ns = level.idle_ns.saturating_add(call.idle_ns);
    }
    let order = |level: &Level| LEVELS.iter().position(|name| *name == level.level);
    levels.sort_by_key(|level| order(level).unwrap_or(LEVELS.len()));
    levels
}

fn functions(boot: &Boot) -> Vec<Function> {
    let timed = boot.times.functions.values().filter(|function| function.timed > 0);
    let function = |times: &times::Function| Function {
        function: times.name.clone(),
        calls: times.calls,
        timed: times.timed,
        self_ns: times.own_time,
        total_ns: times.total,
        longest_ns: times.longest,
    };
    let mut functions: Vec<_> = timed.map(function).collect();
    functions.sort_by(|a, b| {
        let key = |it: &Function| (it.self_ns, it.total_ns, it.calls);
        key(b).cmp(&key(a)).then_with(|| a.function.cmp(&b.function))
    });
    functions.truncate(MOST_FUNCTIONS);
    functions
}

/// What cannot be told, and why.
fn untold(boot: &Boot, initcalls: &[Initcall]) -> Vec<String> {
    let mut all = Vec::new();
    if let Some(anew) = boot.anew {
        let since = seconds(boot.nanoseconds(anew));
        all.push(format!(
            "boots of kernels that the guest has started since (kexec): see the next one by vmtrace convert \
             TRACE --since {since} -o NEXT.vmt, and its report"
        ));
    }
    let traced = |role, of| boot.traced(role, of);
    // A trace of an older vmtrace does not say what was traced.
    let not = |role, name: &str| {
        if traced(role, TracedOf::Entries) {
            format!("{name} was traced, and not called")
        } else if boot.covered {
            format!("{name} was not traced")
        } else {
            format!("{name} has no record")
        }
    };
    if boot.init.is_none() {
        let why = not(Role::Step(STEPS.len() - 1), STARTS_INIT);
        all.push(format!(
            "when init was started: {why}, and no line of the console shows it; times are counted \
             to the end of the trace"
        ));
    }
    if boot.began.is_some() {
        all.push("what the kernel does before tracing begins".to_owned());
    }
    if initcalls.is_empty() {
        all.push(format!("initcalls: {}", not(Role::Initcall, INITCALL)));
    } else {
        let many = |count: usize| (count > 0).then_some(count);
        let untimed = initcalls.iter().filter(|call| call.duration_ns.is_none()).count();
        if let Some(count) = many(untimed) {
            let why = if !boot.covered || traced(Role::Initcall, TracedOf::Returns) {
                "their returns were not seen, or are not certain"
            } else {
                "their returns were not traced (--graph)"
            };
            all.push(format!("how long {count} of {} initcalls took: {why}", initcalls.len()));
        }
        if let Some(count) = many(initcalls.iter().filter(|call| call.function.is_none()).count()) {
            all.push(format!(
                "which functions {count} initcalls are: neither the argument of {INITCALL} (--args) \
                 nor the function itself was traced"
            ));
        }
        let known = |call: &&Initcall| call.function.is_some() && call.level.is_none();
        if let Some(count) = many(initcalls.iter().filter(known).count()) {
            all.push(format!("the levels of {count} initcalls: the trace does not name them"));
        }
    }
    if boot.calls.more > 0 {
        all.push(format!("{} more initcalls and modules: these are too many", boot.calls.more));
    }
    if !boot.knows_idle() {
        let why = not(Role::IdleEnter, super::IDLE[0]);
        all.push(format!("idle time: {why}"));
    }
    if !boot.times.functions.values().any(|function| function.timed > 0) {
        all.push("times of functions: none has a return in this trace (--graph)".to_owned());
    }
    let modules = [(Role::LoadModule, LOAD_MODULE), (Role::InitModule, INIT_MODULE)];
    let is_module = |call: &Call| matches!(call.kind, Kind::Load | Kind::Init);
    if !boot.calls.list.iter().any(is_module)
        && let Some((role, name)) =
            modules.into_iter().find(|&(role, _)| !traced(role, TracedOf::Entries))
    {
        all.push(format!("modules: {}", not(role, name)));
    }
    if !boot.gaps.is_empty() {
        all.push(
            "anything that was in records that are missing (see above): counts and times are at \
             least these"
                .to_owned(),
        );
    }
    all
}
