//! A guest's own trace of its calls and stacks: vmtrace must report the same, and must not change
//! the stacks.

use std::collections::BTreeMap;

use serde_json::Value;
use vmtrace::kernel::Kernel;
use vmtrace::stream::Exit;

use crate::Finished;
use crate::args::json;
use crate::cases::{Guests, value};
use crate::trace::{boot, kernel, syscall};

/// The system calls that the workload makes.
const CALLS: [&str; 2] = ["newfstat", "openat"];

/// Names with their depths.
type Tree = Vec<(u64, String)>;

/// Lines of the console that begin with a word, without it.
fn lines<'a>(console: &'a str, word: &str) -> Vec<&'a str> {
    console.lines().filter_map(|line| line.trim().strip_prefix(word)?.strip_prefix(' ')).collect()
}

fn of_guest(console: &str, call: &str) -> Tree {
    let parse = |line: &str| {
        let (depth, name) = line.split_once(' ').unwrap();
        (depth.parse().unwrap(), name.to_owned())
    };
    lines(console, &format!("tree-{call}")).into_iter().map(parse).collect()
}

/// The tree below a function that is there most often.
fn of_trace(events: &[Value], pid: u32, function: &str) -> Tree {
    let mut mine = events.iter().filter(|line| line["event"] == "entry" && line["pid"] == pid);
    let mut trees: BTreeMap<Tree, usize> = BTreeMap::new();
    let mut tree: Option<(u64, Tree)> = None;
    loop {
        let next = mine.next();
        let depth = next.and_then(|line| line["depth"].as_u64());
        if let Some((root, _)) = &tree
            && depth.is_none_or(|depth| depth <= *root)
            && let Some((_, done)) = tree.take()
        {
            *trees.entry(done).or_default() += 1;
        }
        let (Some(line), Some(depth)) = (next, depth) else { break };
        let name = line["function"].as_str().unwrap();
        match &mut tree {
            Some((root, tree)) => tree.push((depth - *root, name.to_owned())),
            None if name == function => tree = Some((depth, vec![(0, name.to_owned())])),
            None => {}
        }
    }
    let usual = trees.into_iter().max_by_key(|(_, count)| *count);
    usual.map(|(tree, _)| tree).unwrap_or_default()
}

/// Whether two names are of one function: it may have several.
fn is_same(kernel: &Kernel, ours: &str, theirs: &str) -> bool {
    let symbols = kernel.symbols();
    ours == theirs || symbols.addresses(ours).any(|at| symbols.names_at(at).any(|n| n == theirs))
}

/// The functions of the first call trace of a console.
fn backtrace(finished: &Finished) -> Vec<String> {
    let err = finished.err();
    let lines = err.lines().skip_while(|line| !line.contains("Call Trace:")).skip(1);
    let symbol = |line: &str| {
        let words = line.split_whitespace().find(|word| word.contains("+0x"))?;
        Some(words.split('+').next()?.to_owned())
    };
    let lines = lines.take_while(|line| !line.contains("</TASK>") && !line.contains("---["));
    // Those with a question mark are only what lies about on the stack.
    let lines = lines.filter(|line| !line.contains(" ? "));
    lines.filter_map(symbol).take_while(|name| !name.starts_with("RIP")).collect()
}

impl Guests {
    /// A tree with a call missing, or at another depth, tells another story than the kernel's.
    pub fn calls_are_nested_as_the_guests_own_tracer_shows(&self, name: &str) {
        let (getppid, getpgid) =
            (syscall(name, "getppid").unwrap(), syscall(name, "getpgid").unwrap());
        let (guest, _) = self.run(name, "tree guest", &["-f", &getppid]);
        let guest = guest.err();
        let (finished, trace) = self.run(name, "tree", &["--graph", "--from", &getpgid]);
        let (pid, events) = (value(&finished, "pid "), json(&trace));
        let kernel = kernel(name).unwrap();
        for call in CALLS {
            let theirs = of_guest(&guest, call);
            let ours = of_trace(&events, pid, &syscall(name, call).unwrap());
            assert!(theirs.len() > 5, "{name}: {theirs:?}");
            let same = theirs.len() == ours.len()
                && ours
                    .iter()
                    .zip(&theirs)
                    .all(|(a, b)| a.0 == b.0 && is_same(&kernel, &a.1, &b.1));
            assert!(same, "{name}: {ours:#?}\nand the guest's own: {theirs:#?}");
        }
        // And who asks the guest for its stacks sees no difference.
        let (before, after) = (lines(&guest, "stack"), finished.err());
        assert!(before.len() > 5 && before == lines(&after, "stack"), "{before:?} {after}");
    }

    /// Whoever looks for the cause of a panic must not find ours.
    pub fn a_panic_shows_the_same_calls_with_every_return_traced(&self, name: &str) {
        let getppid = syscall(name, "getppid").unwrap();
        let crash = format!("{} crash", crate::trace::WORKLOAD);
        let panic = |args: &[&str]| {
            let all = ["--add", crate::trace::WORKLOAD, "--run", &crash];
            let (finished, trace) = boot(&self.host, name, &[&all[..], args].concat()).unwrap();
            assert_eq!(trace.summary.exit, Exit::Panic, "{}", finished.err());
            backtrace(&finished)
        };
        let plain = panic(&["-f", &getppid]);
        assert!(plain.iter().any(|name| name.starts_with("panic")), "{plain:?}");
        assert!(plain.len() > 5, "{plain:?}");
        assert_eq!(panic(&["--graph", "--overflow", "overwrite"]), plain, "{name}");
    }
}
