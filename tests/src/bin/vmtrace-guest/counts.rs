//! The cost of conditions, counters and histograms for a call, under icount. Each is measured on a
//! different system call, so that one boot measures all of them.

use super::bench::{Meter, fill_ring, median, small_buffer};
use super::{mark, set, stress};
use anyhow::Result;
use std::fs;
use std::io::Write;
use vmtrace::emulated::HostArch;
use vmtrace_tests::trace::syscall_of;

/// Rounds of [`load`], each of some thousand calls of all functions.
const ROUNDS: u32 = 51;

/// What is measured, and the system call that has it.
const ROWS: [(&str, fn()); 11] = [
    ("count", super::call_getppid),
    ("hist-duration", || call(libc::SYS_getuid, &[])),
    ("hist-argument", || call(libc::SYS_setresuid, &[-1; 3])),
    ("argument-fails", || call(libc::SYS_setresgid, &[-1; 3])),
    ("argument-holds", || call(libc::SYS_setfsuid, &[-1])),
    ("pid-fails", || call(libc::SYS_geteuid, &[])),
    ("retval-fails", || call(libc::SYS_getgid, &[])),
    ("duration-fails", || call(libc::SYS_gettid, &[])),
    ("entry", || call(libc::SYS_setfsgid, &[-1])),
    ("callers", || call(libc::SYS_sched_get_priority_max, &[])),
    ("children-fail", || call(libc::SYS_getegid, &[])),
];

/// One that changes nothing with these arguments.
fn call(number: libc::c_long, args: &[libc::c_long]) {
    let arg = |index: usize| args.get(index).copied().unwrap_or(0);
    // SAFETY: no pointers; asks, or sets an id to "as it is".
    unsafe { libc::syscall(number, arg(0), arg(1), arg(2)) };
}

/// One more of the guest's own events: to begin the file anew would remove those that are there.
fn define(event: &str) -> Result<()> {
    let file = format!("{}/dynamic_events", super::TRACING);
    Ok(fs::OpenOptions::new().append(true).open(file)?.write_all(event.as_bytes())?)
}

/// vmtrace's, which waits for the call of getpgid.
pub(crate) fn counts() -> Result<()> {
    let meter = Meter::new();
    let untraced = ROWS.map(|(_, call)| meter.per(call));
    mark();
    // Whatever leaves records.
    fill_ring(ROWS[4].1);
    fill_ring(ROWS[8].1);
    for ((name, call), untraced) in ROWS.into_iter().zip(untraced) {
        // The first call of a function takes a page of a table.
        meter.per(call);
        let traced = meter.per(call);
        println!("counts {name} {:.1}", traced - untraced);
        println!("counts whole-{name} {traced:.1}");
    }
    Ok(())
}

/// The same of the guest's own, where it has them: its events of functions (fprobes, or kprobes), what hangs on
/// them, and its tracers.
pub(crate) fn guest() -> Result<()> {
    const EVENT: &str = "vmtrace_bench";
    let meter = Meter::new();
    small_buffer()?;
    let getppid = syscall_of(HostArch::native(), "getppid");
    let ids = "__sys_setresuid";
    let untraced = ROWS.map(|(_, call)| meter.per(call));
    let [getting, _, setting, ..] = ROWS.map(|(_, call)| call);
    let ([get, _, arguments, ..], print) =
        (untraced, |name: &str, figure: f64| println!("counts {name} {figure:.1}"));

    // riscv64 before CALL_OPS has no kprobe on a site: behind it, where arguments have no names.
    let kinds = [
        (format!("f:{EVENT}/in {getppid}"), format!("f:{EVENT}/ids {ids} ruid=$arg1:u32")),
        (format!("p:{EVENT}/in {getppid}"), format!("p:{EVENT}/ids {ids} ruid=$arg1:u32")),
        (format!("p:{EVENT}/in {getppid}+8"), format!("p:{EVENT}/ids {ids}+8 ruid=%a0:u32")),
    ];
    let has = |(first, second): &(String, String)| {
        set("dynamic_events", "").is_ok() && define(first).is_ok() && define(second).is_ok()
    };
    let has_entries = kinds.iter().any(has);
    let ends = ['f', 'r'].map(|kind| {
        let at = if kind == 'f' { "%return" } else { "" };
        format!("{kind}:{EVENT}/out {getppid}{at} value=$retval:s64")
    });
    let has_ends = ends.iter().any(|end| define(end).is_ok());

    // A trigger, or events with a filter that fails.
    let hang = |event: &str, trigger: &str| {
        set(&format!("events/{EVENT}/{event}/trigger"), trigger).is_ok()
    };
    let filtered = |event: &str, filter: &str, call: fn(), untraced: f64| -> Result<f64> {
        set(&format!("events/{EVENT}/{event}/filter"), filter)?;
        set(&format!("events/{EVENT}/{event}/enable"), "1")?;
        meter.per(call);
        let figure = meter.per(call) - untraced;
        set(&format!("events/{EVENT}/{event}/enable"), "0")?;
        set(&format!("events/{EVENT}/{event}/filter"), "0")?;
        Ok(figure)
    };
    if has_entries {
        print("argument-fails", filtered("ids", "ruid == 12345", setting, arguments)?);
        let by_pid = "hist:keys=common_pid";
        if hang("in", by_pid) {
            meter.per(getting);
            print("count", meter.per(getting) - get);
            hang("in", &format!("!{by_pid}"));
        }
        let by_id = "hist:keys=ruid.log2";
        if hang("ids", by_id) {
            meter.per(setting);
            print("hist-argument", meter.per(setting) - arguments);
            hang("ids", &format!("!{by_id}"));
        }
    }
    if has_ends {
        print("retval-fails", filtered("out", "value < 0", getting, get)?);
    }
    // How long a call took is made of two events by a third one.
    let duration = format!(
        "hist:keys=common_pid:took=common_timestamp.usecs-$ts:onmatch({EVENT}.in).trace({EVENT}_took,$took)"
    );
    let is_timed = has_entries
        && has_ends
        && define(&format!("s:synthetic/{EVENT}_took u64 took")).is_ok()
        && hang("in", "hist:keys=common_pid:ts=common_timestamp.usecs")
        && hang("out", &duration)
        && set(&format!("events/synthetic/{EVENT}_took/trigger"), "hist:keys=took.log2").is_ok();
    if is_timed {
        meter.per(getting);
        print("hist-duration", meter.per(getting) - get);
    }
    hang("out", &format!("!{duration}"));
    hang("in", "!hist:keys=common_pid:ts=common_timestamp.usecs");

    print("entry", meter.function()? - get);
    // No task of this program.
    set("set_ftrace_pid", "2")?;
    print("pid-fails", meter.function()? - get);
    set("set_ftrace_pid", "")?;
    // Microseconds.
    set("tracing_thresh", "1000")?;
    print("duration-fails", meter.tracer("function_graph")? - get);
    set("tracing_thresh", "0")?;

    let plain = rounds(&meter)?;
    set("current_tracer", "function")?;
    rounds(&meter)?;
    let seen = entries()?;
    let traced = rounds(&meter)?;
    let calls = (entries()? - seen) / f64::from(ROUNDS);
    set("current_tracer", "nop")?;
    println!("counts round {plain:.0}");
    println!("counts calls {calls:.0}");
    print("each", (traced - plain) / calls);
    Ok(())
}

/// Records that the guest's own tracer has made so far.
fn entries() -> Result<f64> {
    let stats = fs::read_to_string(format!("{}/per_cpu/cpu0/stats", super::TRACING))?;
    let values = ["entries: ", "overrun: "].map(|key| {
        let value = stats.lines().find_map(|line| line.strip_prefix(key));
        value.and_then(|value| value.trim().parse::<f64>().ok()).unwrap_or(0.0)
    });
    Ok(values.iter().sum())
}

/// Instructions of a round of work.
fn rounds(meter: &Meter) -> Result<f64> {
    let mut result = Ok(0);
    let time = median(|| {
        let done = stress::work(0, |rounds| rounds < 1);
        if done.is_err() {
            result = done;
        }
    });
    result?;
    Ok(time / meter.instruction)
}

/// The same work while vmtrace has every function, from the call of getpgid to that of getsid.
pub(crate) fn load() -> Result<()> {
    let meter = Meter::new();
    rounds(&meter)?;
    let plain = rounds(&meter)?;
    mark();
    // The first call of a function takes a page of a table.
    rounds(&meter)?;
    let traced = rounds(&meter)?;
    call(libc::SYS_getsid, &[]);
    println!("counts round {plain:.0}");
    println!("counts more {:.0}", traced - plain);
    println!("counts rounds {}", 2 * ROUNDS);
    Ok(())
}

/// The same work under the guest's function_graph: all calls, those in calls of a function that nobody calls, and those
/// of one level.
pub(crate) fn graph() -> Result<()> {
    let meter = Meter::new();
    small_buffer()?;
    let getsid = format!("{}\n", syscall_of(HostArch::native(), "getsid"));
    rounds(&meter)?;
    let plain = rounds(&meter)?;
    println!("counts round {plain:.0}");
    for (name, root, depth) in [("all", "", "0"), ("rooted", &getsid, "0"), ("shallow", "", "1")] {
        set("set_graph_function", root)?;
        set("max_graph_depth", depth)?;
        set("current_tracer", "function_graph")?;
        rounds(&meter)?;
        println!("counts more-{name} {:.0}", rounds(&meter)? - plain);
        set("current_tracer", "nop")?;
    }
    Ok(())
}
