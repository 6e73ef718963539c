//! What is recorded of the events of real kernels.

use vmtrace::emulated::cache_dir;
use vmtrace::kernel::Kernel;
use vmtrace::session::{EventError, events};
use vmtrace::tracer::Duty;
use vmtrace_trampolines::Point;

const KERNELS: [&str; 6] =
    ["x86_64-6.1", "x86_64-6.12", "x86_64-6.12-rt", "x86_64-7", "riscv64-6.12", "riscv64-7"];

/// Events that a table knows field by field, as the guest's own trace has them.
const KNOWN: [&str; 44] = [
    "sched:sched_switch",
    "sched:sched_waking",
    "sched:sched_wakeup_new",
    "sched:sched_migrate_task",
    "sched:sched_process_fork",
    "sched:sched_process_exec",
    "sched:sched_process_exit",
    "sched:sched_wait_task",
    "sched:sched_stat_runtime",
    "irq:irq_handler_entry",
    "irq:irq_handler_exit",
    "irq:softirq_raise",
    "timer:timer_start",
    "timer:timer_expire_entry",
    "timer:hrtimer_start",
    "timer:hrtimer_expire_entry",
    "raw_syscalls:sys_enter",
    "raw_syscalls:sys_exit",
    "syscalls:sys_enter_openat",
    "block:block_rq_insert",
    "block:block_rq_issue",
    "block:block_rq_complete",
    "block:block_rq_requeue",
    "block:block_bio_queue",
    "net:net_dev_queue",
    "net:net_dev_xmit",
    "net:netif_receive_skb",
    "skb:kfree_skb",
    "skb:consume_skb",
    "kmem:kmalloc",
    "kmem:kfree",
    "kmem:kmem_cache_alloc",
    "kmem:kmem_cache_free",
    "kmem:mm_page_alloc",
    "kmem:mm_page_free",
    "exceptions:page_fault_user",
    "exceptions:page_fault_kernel",
    "workqueue:workqueue_queue_work",
    "workqueue:workqueue_execute_start",
    "signal:signal_generate",
    "signal:signal_deliver",
    "task:task_rename",
    "module:module_load",
    "printk:console",
];
/// Some kernels of riscv64 have none of these.
const NOT_ALL: &str = "exceptions:";

fn kernel(name: &str) -> Kernel {
    let path = cache_dir().unwrap().join("kernels").join(name).join("vmlinuz");
    Kernel::open(&path).unwrap_or_else(|error| panic!("{name}: {error}: run scripts/setup"))
}

// A field that a new kernel computes in another way is left out with a note, which nobody may read in CI.
#[test]
fn all_fields_of_known_events_are_recorded_and_printed() {
    for name in KERNELS {
        let kernel = kernel(name);
        for pattern in KNOWN {
            let (found, notes) = match events(&kernel, pattern) {
                Err(EventError::Unknown(_)) if pattern.starts_with(NOT_ALL) => continue,
                found => found.unwrap_or_else(|e| panic!("{name}: {e}")),
            };
            assert_eq!(notes, [""; 0], "{name}: {pattern}");
            let [found] = &found[..] else { panic!("{name}: {pattern}: {found:?}") };
            let known =
                kernel.events().unwrap().iter().find(|it| it.full_name() == pattern).unwrap();
            let shown: Vec<&str> = found.fields.values.iter().map(|it| &*it.shown.name).collect();
            let fields: Vec<&str> = known.fields.iter().map(|field| &*field.name).collect();
            assert_eq!(shown, fields, "{name}: {pattern}");
            let is_printed = found.fields.print.is_some() || pattern.starts_with("syscalls:");
            assert!(is_printed, "{name}: {pattern} is not printed as the guest prints it");
        }
    }
}

// A probe does not know what the tracepoint passes as its own, and a record has so much room: all events would fail with
// the one that asks for more.
#[test]
fn all_events_can_be_recorded_by_probes() {
    for name in KERNELS {
        let (found, _) = events(&kernel(name), "*").unwrap();
        assert!(found.len() > 300, "{name}: {}", found.len());
        for event in found.iter().filter(|event| !event.fields.in_place) {
            let duty = Duty::new(Point::Probe, vec![0], &event.fields.fields);
            let checked = duty.program(0, None, None).check();
            assert_eq!(checked, Ok(()), "{name}: {}", event.fields.name);
        }
    }
}

// One letter less: whoever types that learns what it is called.
#[test]
fn names_near_to_that_of_no_event_are_told() {
    let kernel = kernel("x86_64-6.12");
    for (pattern, near) in [
        ("sched:sched_swich", "; near: sched:sched_switch"),
        ("sched_swich", "; near: sched_switch"),
        ("sched:sched_swich*", ""),
        ("nothing_that_is_like_one", ""),
    ] {
        let error = events(&kernel, pattern).unwrap_err().to_string();
        let (_, told) = error.rsplit_once(":mod:MODULE'").unwrap();
        assert!(told.starts_with(near) && told.is_empty() == near.is_empty(), "{error}");
    }
}
