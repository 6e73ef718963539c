//! How the real kernels that scripts/setup puts into the cache print their events. Their versions change, so only what
//! all of them have is compared.

use std::path::{Path, PathBuf};

use vmtrace_kernel::tracepoints::Event;
use vmtrace_kernel::{Arch, Kernel};

const KERNELS: [&str; 6] =
    ["x86_64-6.1", "x86_64-6.12", "x86_64-6.12-rt", "x86_64-7", "riscv64-6.12", "riscv64-7"];

fn open(name: &str) -> Kernel {
    let cache = std::env::var_os("VMTRACE_CACHE").map(PathBuf::from).unwrap_or_else(|| {
        Path::new(&std::env::var_os("HOME").expect("HOME")).join(".cache/vmtrace")
    });
    let image = cache.join("kernels").join(name).join("vmlinuz");
    assert!(image.exists(), "{} is missing: run scripts/setup", image.display());
    Kernel::open(&image).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Those that are the same in all of these kernels.
const SAME: [(&str, &str); 23] = [
    ("sched:sched_waking", "comm={comm} pid={pid} prio={prio} target_cpu={target_cpu:03}"),
    (
        "sched:sched_process_fork",
        "comm={parent_comm} pid={parent_pid} child_comm={child_comm} child_pid={child_pid}",
    ),
    ("sched:sched_process_exec", "filename={filename} pid={pid} old_pid={old_pid}"),
    ("sched:sched_process_free", "comm={comm} pid={pid} prio={prio}"),
    (
        "sched:sched_migrate_task",
        "comm={comm} pid={pid} prio={prio} orig_cpu={orig_cpu} dest_cpu={dest_cpu}",
    ),
    ("irq:irq_handler_entry", "irq={irq} name={name}"),
    ("irq:irq_handler_exit", "irq={irq} ret={ret:names 0=unhandled,*=handled}"),
    (
        "irq:softirq_entry",
        "vec={vec} [action={vec:names 0=HI,1=TIMER,2=NET_TX,3=NET_RX,4=BLOCK,5=IRQ_POLL,6=TASKLET,7=SCHED,8=HRTIMER,9=RCU}]",
    ),
    ("timer:timer_init", "timer={timer:p}"),
    (
        "timer:timer_expire_entry",
        "timer={timer:p} function=0x{function:x} now={now} baseclk={baseclk}",
    ),
    // The kernel prints these as numbers without a sign.
    (
        "timer:hrtimer_expire_entry",
        "hrtimer={hrtimer:p} function=0x{function:x} now={now:bits 0 64}",
    ),
    ("kmem:kfree", "call_site=0x{call_site:x} ptr={ptr:p}"),
    ("kmem:kmem_cache_free", "call_site=0x{call_site:x} ptr={ptr:p} name={name}"),
    ("exceptions:page_fault_user", "address=0x{address:x} ip=0x{ip:x} error_code=0x{error_code:x}"),
    (
        "workqueue:workqueue_queue_work",
        "work struct={work:p} function=0x{function:x} workqueue={workqueue} req_cpu={req_cpu} cpu={cpu}",
    ),
    ("workqueue:workqueue_execute_start", "work struct {work:p}: function 0x{function:x}"),
    (
        "signal:signal_generate",
        "sig={sig} errno={errno} code={code} comm={comm} pid={pid} grp={group} res={result}",
    ),
    (
        "signal:signal_deliver",
        "sig={sig} errno={errno} code={code} sa_handler={sa_handler:x} sa_flags={sa_flags:x}",
    ),
    (
        "task:task_newtask",
        "pid={pid} comm={comm} clone_flags={clone_flags:x} oom_score_adj={oom_score_adj}",
    ),
    ("module:module_load", "{name} {taints:allletters 1=P,4096=O,2=F,1024=C,8192=E}"),
    ("module:module_free", "{name}"),
    (
        "raw_syscalls:sys_enter",
        "NR {id} ({args[0]:x}, {args[1]:x}, {args[2]:x}, {args[3]:x}, {args[4]:x}, {args[5]:x})",
    ),
    ("raw_syscalls:sys_exit", "NR {id} = {ret}"),
];

/// Parts of others.
const PARTS: [(&str, &[&str]); 9] = [
    (
        "kmem:kmalloc",
        &[
            "{gfp_flags:allflags ",
            ",3264=GFP_KERNEL,",
            ",0=none} node={node} accounted=",
            "{gfp_flags:bits 22 1 names 0=false,*=true}",
        ],
    ),
    (
        "skb:kfree_skb",
        &["skbaddr={skbaddr:p} ", " protocol={protocol} ", " reason: {reason:names ", "=TCP_CSUM,"],
    ),
    (
        "block:block_rq_issue",
        &[
            "{dev:bits 20 12},{dev:bits 0 20} {rwbs} {bytes} ({cmd}) {sector} + {nr_sector} ",
            "[{comm}]",
        ],
    ),
    (
        "block:block_rq_complete",
        &["{dev:bits 20 12},{dev:bits 0 20} {rwbs} ({cmd}) {sector} + {nr_sector} ", "[{error}]"],
    ),
    ("net:net_dev_xmit", &["dev={name} skbaddr={skbaddr:p} len={len} rc={rc}"]),
    (
        "timer:timer_start",
        &[
            "timer={timer:p} function=0x{function:x} expires={expires} [timeout={expires:minus now}] ",
            "cpu={flags:bits 0 18} idx={flags:bits 22 10} flags={flags:flags 262144=M,524288=D,1048576=P,2097152=I}",
        ],
    ),
    (
        "timer:hrtimer_start",
        &["expires={expires:bits 0 64} ", " mode={mode:names 0=ABS,1=REL,2=ABS|PINNED,"],
    ),
    ("sched:sched_process_exit", &["comm={comm} pid={pid} prio={prio}"]),
    (
        "sched:sched_switch",
        &[
            "{prev_state:bits 0 8 allflags 1=S,2=D,4=T,8=t,16=X,32=Z,64=P,128=I,0=R}{prev_state:bits 8 1 names 0=,*=+}",
        ],
    ),
];

// A trace that prints an event in another way than the guest's own ftrace would be read wrongly.
#[test]
fn events_are_printed_as_the_kernel_prints_them() {
    for name in KERNELS {
        let kernel = open(name);
        let events = kernel.events().unwrap();
        let find = |full: &str| -> &Event {
            let found = events.iter().find(|event| event.full_name() == full);
            found.unwrap_or_else(|| panic!("{name}: no {full}"))
        };
        let print = |full: &str| {
            let event = find(full);
            kernel.event_print(event).unwrap_or_else(|| panic!("{name} {full}: {}", event.print))
        };
        for (full, wanted) in SAME {
            // riscv64 has not always had these.
            if full.starts_with("exceptions:") && kernel.arch() != Arch::X86_64 {
                continue;
            }
            assert_eq!(print(full), wanted, "{name} {full}");
        }
        for (full, parts) in PARTS {
            let print = print(full);
            assert!(parts.iter().all(|part| print.contains(part)), "{name} {full}: {print}");
        }
        // One field by itself.
        let form = |full: &str, field: &str| kernel.event_form(find(full), field);
        assert!(form("kmem:kmalloc", "gfp_flags").unwrap().starts_with("allflags "), "{name}");
        assert_eq!(form("sched:sched_waking", "pid").as_deref(), Some(""), "{name}");
        assert_eq!(form("sched:sched_waking", "nothing"), None, "{name}");

        let own = events.iter().filter(|event| event.system != "syscalls");
        let (all, said) = own.fold((0, 0), |(all, said), event| {
            (all + 1, said + usize::from(kernel.event_print(event).is_some()))
        });
        println!("{name}: {said} of {all}");
        assert!(said * 10 > all * 7, "{name}: {said} of {all}");
    }
}
