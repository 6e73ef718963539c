//! A repeatable sequence of calls, and the guest's own trace of it.

use super::{TRACING, mark, set};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use vmtrace::emulated::HostArch;
use vmtrace_tests::trace::syscall_of;

/// How often each is made: an interrupt may come in between.
const CALLS: usize = 15;
/// System calls with their functions.
const NAMES: [&str; 2] = ["newfstat", "openat"];

fn call(name: &str) {
    // SAFETY: a buffer that is long enough.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: pointers to that and to a text.
    unsafe {
        match name {
            "newfstat" => libc::syscall(libc::SYS_fstat, 0, &raw mut stat),
            _ => libc::syscall(libc::SYS_openat, libc::AT_FDCWD, c"/tmp/none/at/all".as_ptr(), 0),
        }
    };
}

/// Makes them; with the guest's own function_graph if so, of which this prints the usual tree.
/// And who is on this task's kernel stack.
pub(crate) fn tree(guest: bool) -> Result<()> {
    println!("pid {}", std::process::id());
    for name in NAMES {
        call(name);
    }
    for name in NAMES {
        let function = syscall_of(HostArch::native(), name);
        if guest {
            set("options/funcgraph-irqs", "0")?;
            set("set_ftrace_pid", &std::process::id().to_string())?;
            set("set_graph_function", &format!("{function}\n"))?;
            set("current_tracer", "function_graph")?;
        } else {
            mark();
        }
        (0..CALLS).for_each(|_| call(name));
        if guest {
            // Switching tracers clears the buffer: stop and read before.
            set("tracing_on", "0")?;
            let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
            set("current_tracer", "nop")?;
            set("tracing_on", "1")?;
            for (depth, called) in usual(&trace).with_context(|| trace.clone())? {
                println!("tree-{name} {depth} {called}");
            }
        }
    }
    for line in fs::read_to_string("/proc/self/stack")?.lines() {
        let symbol = line.split_whitespace().last().unwrap_or_default();
        println!("stack {}", symbol.split('+').next().unwrap_or_default());
    }
    Ok(())
}

/// Depths and names of the tree that is there most often.
fn usual(trace: &str) -> Option<Vec<(usize, String)>> {
    let mut trees: BTreeMap<Vec<(usize, String)>, usize> = BTreeMap::new();
    let mut tree: Vec<(usize, String)> = Vec::new();
    for line in trace.lines().filter(|line| !line.starts_with('#')) {
        let Some((_, text)) = line.split_once("|  ") else { continue };
        let name = text.trim_start();
        let depth = (text.len() - name.len()) / 2;
        if let Some((name, rest)) = name.split_once('(') {
            tree.push((depth, name.to_owned()));
            if depth > 0 || !rest.contains(';') {
                continue;
            }
        } else if depth > 0 {
            continue;
        }
        *trees.entry(std::mem::take(&mut tree)).or_default() += 1;
    }
    trees.into_iter().max_by_key(|(_, count)| *count).map(|(tree, _)| tree)
}
