//! The guest's own tracers on a function that vmtrace traces as well.

use super::bpf::{Attach, Attached};
use super::{TRACING, call_getppid, pin, set, tell_ftrace};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::Write;
use std::sync::Mutex;
use std::time::Duration;
use vmtrace_tests::random::Random;

/// What of the guest's can use a function's site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Feature {
    Function,
    Graph,
    /// At the entry.
    Kprobe,
    Kretprobe,
    /// Not before 6.5.
    Fprobe,
    /// The function tracer of an instance.
    Instance,
    /// A BPF program that is called directly.
    Fentry,
    /// The same at the return, by a trampoline that calls the function.
    Fexit,
}

const ALL: [Feature; 8] = [
    Feature::Function,
    Feature::Graph,
    Feature::Kprobe,
    Feature::Kretprobe,
    Feature::Fprobe,
    Feature::Instance,
    Feature::Fentry,
    Feature::Fexit,
];

/// The programs of [`Feature::Fentry`] and [`Feature::Fexit`] that are attached.
static PROGRAMS: [Mutex<Option<Attached>>; 2] = [const { Mutex::new(None) }; 2];

const INSTANCE: &str = "instances/beside";

impl Feature {
    /// The definition of a dynamic event, and its name.
    fn event(self, function: &str) -> Option<(String, &'static str)> {
        let (kind, name) = match self {
            Self::Kprobe => ("p:kprobes", "vk"),
            Self::Kretprobe => ("r:kprobes", "vr"),
            Self::Fprobe => ("f:kprobes", "vf"),
            Self::Function | Self::Graph | Self::Instance | Self::Fentry | Self::Fexit => {
                return None;
            }
        };
        Some((format!("{kind}/{name} {function}\n"), name))
    }

    /// A guest that does not know it does without.
    fn is_known(self) -> Result<bool> {
        match self {
            Self::Fprobe => {
                let readme = fs::read_to_string(format!("{TRACING}/README"))?;
                Ok(readme.contains("f[:[<group>/][<event>]] <func-name>"))
            }
            // Kernels of riscv64 without CALL_OPS refuse it where ftrace has a site, traced or not.
            Self::Kprobe | Self::Kretprobe => {
                let Some((definition, name)) = self.event("kernel_clone") else { return Ok(false) };
                if append("dynamic_events", &definition).is_err() {
                    return Ok(false);
                }
                patiently(|| append("dynamic_events", &format!("-:kprobes/{name}\n")))?;
                Ok(true)
            }
            Self::Function | Self::Graph | Self::Instance => Ok(true),
            // Not without type information, or without direct calls.
            Self::Fentry | Self::Fexit => {
                let tried = self.attach("kernel_clone");
                if let Err(error) = &tried {
                    eprintln!("{self:?}: {error:#}");
                }
                Ok(tried.is_ok())
            }
        }
    }

    fn attach(self, function: &str) -> Result<Attached> {
        let attach = if self == Self::Fexit { Attach::Return } else { Attach::Entry };
        Attached::new(attach, function)
    }

    /// Where its program is.
    fn program(self) -> std::sync::MutexGuard<'static, Option<Attached>> {
        let place = &PROGRAMS[usize::from(self == Self::Fexit)];
        place.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Whether it takes a glob of functions.
    fn globs(self) -> bool {
        matches!(self, Self::Function | Self::Graph | Self::Instance)
    }

    /// All that the guest knows.
    fn known() -> Vec<Self> {
        ALL.into_iter().filter(|feature| feature.is_known().unwrap_or(false)).collect()
    }

    /// Makes ready and switches on, for one function.
    pub(super) fn on(self, function: &str) -> Result<()> {
        match self {
            Self::Function | Self::Graph => {
                set("set_ftrace_filter", &format!("{function}\n"))?;
                set("current_tracer", self.tracer())
            }
            Self::Instance => {
                fs::create_dir(format!("{TRACING}/{INSTANCE}"))?;
                set(&format!("{INSTANCE}/set_ftrace_filter"), &format!("{function}\n"))?;
                set(&format!("{INSTANCE}/current_tracer"), self.tracer())
            }
            Self::Kprobe | Self::Kretprobe | Self::Fprobe => {
                let Some((definition, name)) = self.event(function) else { return Ok(()) };
                append("dynamic_events", &definition)?;
                set(&format!("events/kprobes/{name}/enable"), "1")
            }
            Self::Fentry | Self::Fexit => {
                *self.program() = Some(self.attach(function)?);
                Ok(())
            }
        }
    }

    fn tracer(self) -> &'static str {
        if self == Self::Graph { "function_graph" } else { "function" }
    }

    /// Switches off, and leaves nothing behind.
    pub(super) fn off(self) -> Result<()> {
        match self {
            Self::Function | Self::Graph => {
                set("current_tracer", "nop")?;
                set("set_ftrace_filter", "")
            }
            Self::Instance => {
                set(&format!("{INSTANCE}/current_tracer"), "nop")?;
                patiently(|| Ok(fs::remove_dir(format!("{TRACING}/{INSTANCE}"))?))
            }
            Self::Kprobe | Self::Kretprobe | Self::Fprobe => {
                let Some((_, name)) = self.event("") else { return Ok(()) };
                set(&format!("events/kprobes/{name}/enable"), "0")?;
                patiently(|| append("dynamic_events", &format!("-:kprobes/{name}\n")))
            }
            Self::Fentry | Self::Fexit => {
                *self.program() = None;
                Ok(())
            }
        }
    }

    /// Calls of the function that it has seen since its buffer was cleared.
    pub(super) fn seen(self, function: &str) -> Result<usize> {
        let (file, sign) = match self {
            Self::Function => ("trace".to_owned(), format!(": {function} <-")),
            Self::Instance => (format!("{INSTANCE}/trace"), format!(": {function} <-")),
            Self::Graph => ("trace".to_owned(), format!(" {function}()")),
            Self::Kprobe => ("trace".to_owned(), " vk: (".to_owned()),
            Self::Kretprobe => ("trace".to_owned(), " vr: (".to_owned()),
            Self::Fprobe => ("trace".to_owned(), " vf: (".to_owned()),
            Self::Fentry | Self::Fexit => {
                let program = self.program();
                let calls = program.as_ref().context("no program is attached")?.calls()?;
                return Ok(calls.try_into()?);
            }
        };
        let trace = fs::read_to_string(format!("{TRACING}/{file}"))?;
        Ok(trace.lines().filter(|line| line.contains(&sign)).count())
    }
}

/// Again while it is busy: a child that another thread has just forked has our files open until it
/// is gone.
fn patiently(mut remove: impl FnMut() -> Result<()>) -> Result<()> {
    const TIMES: usize = 5000;
    for _ in 0..TIMES {
        match remove() {
            Err(error) if is_busy(&error) => std::thread::sleep(Duration::from_millis(1)),
            done => return done,
        }
    }
    remove()
}

fn is_busy(error: &anyhow::Error) -> bool {
    let error = error.root_cause().downcast_ref::<std::io::Error>();
    error.and_then(std::io::Error::raw_os_error) == Some(libc::EBUSY)
}

fn append(file: &str, text: &str) -> Result<()> {
    let path = format!("{TRACING}/{file}");
    let mut file = fs::OpenOptions::new().append(true).open(&path)?;
    file.write_all(text.as_bytes()).with_context(|| format!("{path} <- {text:?}"))
}

/// As many calls on each CPU.
pub(super) fn calls(count: usize, cpus: usize) -> Result<usize> {
    for cpu in 0..cpus {
        pin(cpu)?;
        (0..count).for_each(|_| call_getppid());
    }
    Ok(count * cpus)
}

/// The function of getppid as the guest's ftrace names it: one of several names at its address.
pub(super) fn function() -> Result<String> {
    let all = fs::read_to_string(format!("{TRACING}/available_filter_functions"))?;
    let name = all.lines().find(|name| name.ends_with("_sys_getppid"));
    Ok(name.context("getppid cannot be traced")?.to_owned())
}

/// Each of the guest's tracers on the function of getppid: calls before, with it, and after;
/// then each beside the kprobe, or where there is none the instance, going first or last. Tells what
/// each has seen, and all calls made.
pub(crate) fn beside(count: usize, cpus: usize) -> Result<()> {
    let function = &*function()?;
    println!("pid {}", std::process::id());
    let mut total = calls(count, cpus)?;
    let known = Feature::known();
    for &feature in &known {
        set("trace", "")?;
        feature.on(function)?;
        let made = calls(count, cpus)?;
        let seen = feature.seen(function)?;
        feature.off()?;
        println!("beside {feature:?} {seen} of {made}");
        ensure!(seen == made, "{feature:?} has seen {seen} of {made}");
        total += made + calls(count, cpus)?;
    }
    let has_kprobes = known.contains(&Feature::Kprobe);
    let other = if has_kprobes { Feature::Kprobe } else { Feature::Instance };
    let others = known.iter().filter(|&&feature| feature != other);
    let mut pairs: Vec<_> = others.flat_map(|&it| [(it, other), (other, it)]).collect();
    if known.contains(&Feature::Fexit) {
        // The kernel makes a new trampoline of both, and calls that instead.
        pairs.extend([(Feature::Fentry, Feature::Fexit), (Feature::Fexit, Feature::Fentry)]);
    }
    for (a, b) in pairs {
        // Both on, the one or the other off first.
        set("trace", "")?;
        a.on(function)?;
        total += calls(count, cpus)?;
        b.on(function)?;
        // A tracer that begins clears the buffer.
        let before = [a.seen(function)?, b.seen(function)?];
        let made = calls(count, cpus)?;
        let after = [a.seen(function)?, b.seen(function)?];
        let seen = [after[0] - before[0], after[1] - before[1]];
        a.off()?;
        total += made + calls(count, cpus)?;
        b.off()?;
        total += calls(count, cpus)?;
        println!("both {a:?} {b:?} {seen:?} of {made}");
        ensure!(seen == [made; 2], "{a:?} and {b:?} have seen {seen:?} of {made}");
    }
    println!("called {total}");
    tell_ftrace()
}

/// Functions that the guest's work calls, other than that of getppid.
const OTHERS: [&str; 5] = ["vfs_*", "kernel_clone", "do_sys_openat2", "ksys_*", "dup_*"];

/// Some of the guest's tracers come and go, chosen by `seed`, as changes from outside go on: they see
/// every call of getppid. Which ones, in one word.
pub(super) fn churn(seed: u64) -> Result<String> {
    const CPUS: usize = 2;
    let mut random = Random::new(seed);
    let mut below = |bound| random.below(bound);
    let known = Feature::known();
    let getppid = function()?;
    let mut done = String::new();
    for _ in 0..2 {
        let feature = known.get(below(known.len())).copied().unwrap_or(Feature::Function);
        let other = OTHERS.get(if feature.globs() { below(OTHERS.len()) } else { 1 }).copied();
        let is_counted = below(2) == 0;
        let name = if is_counted { &*getppid } else { other.unwrap_or("vfs_read") };
        set("trace", "")?;
        feature.on(name)?;
        let made = calls(10 + below(20), CPUS)?;
        if is_counted {
            let seen = feature.seen(name)?;
            ensure!(seen == made, "{feature:?} has seen {seen} of {made}");
        }
        feature.off()?;
        done += &format!("{feature:?}:{name},");
    }
    Ok(done)
}
