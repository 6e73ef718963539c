//! The controller of a run without KVM: a guest in plain memory, in which things happen in any order.
//! Needs the kernels of `scripts/setup`.
#![cfg(target_arch = "x86_64")]

mod aids;
mod anew;
mod ends;
mod failures;
#[path = "../fake_guest/mod.rs"]
mod fake_guest;
mod jumps;
mod machine;
mod orders;
mod random;
mod switches;
mod tripwires;

use fake_guest::Fake;
use machine::{Ran, Step, Trouble, run};
use std::ops::Range;
use vmtrace::kernel::Kernel;
use vmtrace::serve::Control;
use vmtrace::session::Tracing;
use vmtrace::stream::{Frame, Reader};
use vmtrace_trampolines::Overflow;

const PAGE: usize = 4096;
/// Functions that are traced.
const TRACED: [&str; 3] = ["vfs_read", "vfs_write", "do_sys_openat2"];
/// Where the guest's ftrace begins to change sites, and where that is over.
const BEGIN: &str = "ftrace_arch_code_modify_prepare";
const END: &str = "ftrace_arch_code_modify_post_process";
/// Where the ends of a guest are told. Their traps stay as long as the run.
const ENDS: [&str; 6] =
    ["panic", "oops_enter", "ftrace_bug", "machine_restart", "emergency_restart", "machine_halt"];

fn tracing(kernel: &Kernel) -> Tracing {
    let globs: Vec<_> = TRACED.iter().map(|&name| name.to_owned()).collect();
    let sites = kernel.select(&globs, &[]).unwrap();
    assert_eq!(sites.len(), TRACED.len());
    Tracing::of(sites, Overflow::Drop)
}

fn call(function: &'static str) -> Step {
    Step::Calls(function, vec![0])
}

/// Asks for a trigger.
fn trigger(action: &str, spec: &str) -> Control {
    Control::TriggerAdd { action: action.parse().unwrap(), spec: spec.parse().unwrap() }
}

/// What a guest does that boots, and changes its own ftrace once.
fn boot() -> Vec<Step> {
    vec![
        Step::Located,
        call("early_trace_init"),
        Step::Does(|vm| vm.patch_alternatives()),
        call("rest_init"),
        call("ftrace_free_init_mem"),
        call(BEGIN),
        call(END),
    ]
}

/// A kernel that has just been loaded, and what its image is like while nothing is traced.
struct Subject {
    fake: Fake,
    text: Vec<u8>,
}

impl Subject {
    fn new(name: &str) -> Self {
        let fake = Fake::counting(name);
        Self { text: fake.text(), fake }
    }

    fn kernel(&self) -> &Kernel {
        &self.fake.kernel
    }

    fn run(&self, steps: Vec<Step>, trouble: Trouble) -> Ran {
        run(self.fake.again(), tracing(self.kernel()), steps, trouble)
    }

    /// Where the traps that stay can be.
    fn ends(&self) -> Vec<Range<u64>> {
        let entries = ENDS.iter().filter_map(|name| self.kernel().symbols().address(name));
        entries.map(|entry| entry..entry + 16).collect()
    }

    /// Where the image is not as it was, but for the traps that stay and for what a guest writes itself;
    /// what was there and is now.
    fn differences(&self, ran: &Ran) -> Vec<(u64, [u8; 2])> {
        let fake = &ran.vm.fake;
        let after = fake.text();
        let mut stays = self.ends();
        let (patched, stack) = (fake.link("alternatives_patched"), fake.stack());
        stays.extend([patched..patched + 4, stack - 8..stack]);
        if fake.slide() != 0 {
            // What it says of where it is.
            let list = fake.link("ftrace_ops_list");
            stays.extend(std::iter::once(list..list + 8));
        }
        let mut all = Vec::new();
        let pages = self.text.chunks(PAGE).zip(after.chunks(PAGE));
        for (start, (was, is)) in (fake.link("_text")..).step_by(PAGE).zip(pages) {
            // Most are alike.
            if was != is {
                let bytes = (start..).zip(was.iter().zip(is)).filter(|(_, (was, is))| was != is);
                all.extend(bytes.map(|(at, (&was, &is))| (at, [was, is])));
            }
        }
        all.retain(|(at, _)| !stays.iter().any(|range| range.contains(at)));
        all
    }

    /// Nothing is left in the guest, but for the traps that tell of its end.
    fn assert_restored(&self, ran: &Ran, what: &str) {
        let differences = self.differences(ran);
        assert!(differences.is_empty(), "{what}: {differences:x?}\n{}", ran.notes());
        let ends = self.ends();
        for trap in ran.vm.traps() {
            let trap = trap - ran.vm.fake.slide();
            let of = ends.iter().filter(|end| end.contains(&trap)).count();
            let other = self.kernel().symbols().primary_at(trap);
            let other = other.filter(|name| !ENDS.contains(name));
            assert_eq!((of, other), (1, None), "{what}: a trap is left at {trap:#x}");
        }
    }
}

/// The stream's frames must be whole; the exit that its end tells.
fn exit_of(ran: &Ran) -> vmtrace::stream::Exit {
    let mut reader = Reader::new(&*ran.stream).unwrap();
    let mut exit = None;
    while let Some(frame) = reader.next_frame().unwrap() {
        assert_eq!(exit, None, "something is behind the end");
        if let Frame::End(summary) = frame {
            exit = Some(summary.exit);
        }
    }
    exit.expect("the stream has no end")
}
