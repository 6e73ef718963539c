//! The sources of event fields, as `TP_fast_assign` defines them in `include/trace/events` of Linux
//! 5.10 to 7.3. A test compares some of them with what guests trace themselves;
//! docs/architecture.md says which.

use crate::kernel::tracepoints::Event;
use std::fmt::Write as _;

/// Events with the same fields.
pub(super) struct Row {
    names: &'static [&'static str],
    /// Of each field by its name; of several for one the first counts that the kernel has.
    pub(super) rules: &'static [(&'static str, Rule)],
    /// How it is printed, with all of its fields, where that is not as the kernel itself says ([`Kernel::event_print`]).
    /// Several for kernels that have others.
    ///
    /// [`Kernel::event_print`]: crate::kernel::Kernel::event_print
    prints: &'static [&'static str],
}

/// What a field is made of. Paths are those of `--arg`.
pub(super) enum Rule {
    /// A value.
    Path(&'static str),
    /// The same where the kernel itself follows these pointers for this event.
    Known(&'static str),
    /// Whether it was preempted, the state of a task, and that of one that has exited.
    SwitchState([&'static str; 3]),
    /// 16 bits in the order of the network.
    Swapped(&'static str),
    /// The same where pointers may be NULL, at which the kernel may look first: 0 then.
    Linked(&'static str),
    /// A pointer that may be a number instead, what is wanted behind it, and what that is if the first is 0
    /// or 1.
    Pointed(&'static str, &'static str, [u64; 2]),
    /// The device of a disk, which may not be there.
    Disk(&'static str),
    /// What a block request says of itself, shifted to the right.
    Request {
        value: &'static str,
        shift: u32,
        /// Its operation and flags, if it matters whether commands are passed through.
        flags: Option<&'static str>,
    },
    /// The operation and flags of a block request, as letters.
    Letters(&'static str),
    /// An error number, by the status of a block request.
    Errno(&'static str),
    /// Whether memory is counted for a group of tasks: flags of the request, and of the cache.
    Accounted(&'static str, &'static str),
    /// The number of the page with this `struct page`.
    Page(&'static str),
    /// A text, and how many bytes of it count, of which the last may end the line: that is left out.
    Line(&'static str, &'static str),
    /// The name of the task that runs.
    Own,
    /// The process id of the task that runs, which each record has.
    OwnPid,
    /// A text that is always empty.
    Empty,
    /// A variable of 8 bytes of the kernel's.
    Variable(&'static str),
    /// A number that is always the same, which the kernel does not print.
    Always(u64),
    /// Numbers of an array, where the kernel itself follows these pointers.
    Each(&'static [&'static str]),
}

/// The row of an event.
pub(super) fn find(name: &str) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.names.contains(&name))
}

/// How an event is printed: by the form that has all of its fields and no others. `{NAME:own}` in it is in the form by
/// which the kernel prints that field.
pub(super) fn print(
    row: &Row,
    event: &Event,
    own: impl Fn(&str) -> Option<String>,
) -> Option<String> {
    let silent = |name: &str| {
        row.rules.iter().any(|(field, rule)| *field == name && matches!(rule, Always(_)))
    };
    let fits = |print: &&&str| {
        let ends = ['}', ':', '['];
        let has = |name: &str| {
            ends.iter().any(|end| print.contains(&format!("{{{name}{end}")))
                || print.contains(&format!(":minus {name}}}"))
        };
        let mut used = print.split('{').skip(1).filter_map(|rest| rest.split(ends).next());
        let known = |name: &str| event.fields.iter().any(|field| field.name == name);
        event.fields.iter().all(|field| has(&field.name) || silent(&field.name)) && used.all(known)
    };
    let mut rest = *row.prints.iter().find(fits)?;
    let mut out = String::new();
    while let Some((before, after)) = rest.split_once(":own}") {
        let (_, field) = before.rsplit_once('{')?;
        let form = own(field)?;
        let colon = if form.is_empty() { "" } else { ":" };
        let _ = write!(out, "{before}{colon}{form}}}");
        rest = after;
    }
    Some(out + rest)
}

use Rule::{
    Accounted, Always, Disk, Each, Empty, Errno, Known, Letters, Line, Linked, Own, OwnPid, Page,
    Path, Pointed, Request, Swapped, SwitchState, Variable,
};

/// `SI_USER` and `SI_KERNEL`: what stands for information that there is not.
const NO_INFO: [u64; 2] = [0, 0x80];

/// Of a request: its operation and flags.
const REQUEST: Option<&str> = Some("rq->cmd_flags");
/// Bits of a place in a sector (`SECTOR_SHIFT`).
const SECTOR: u32 = 9;

const ROWS: &[Row] = &[
    Row {
        names: &["sched_switch"],
        rules: &[
            ("prev_comm", Known("prev->comm")),
            // It is still the one that runs.
            ("prev_pid", OwnPid),
            ("prev_prio", Known("prev->prio")),
            ("prev_state", SwitchState(["preempt", "prev_state", "prev->exit_state"])),
            // Before 5.18 the tracepoint read it off the task itself, where it had its present name from 5.14 on.
            ("prev_state", SwitchState(["preempt", "prev->__state", "prev->exit_state"])),
            ("prev_state", SwitchState(["preempt", "prev->state", "prev->exit_state"])),
            ("next_comm", Known("next->comm")),
            ("next_pid", Known("next->pid")),
            ("next_prio", Known("next->prio")),
        ],
        prints: &["prev_comm={prev_comm} prev_pid={prev_pid} prev_prio={prev_prio} \
                   prev_state={prev_state:state} ==> next_comm={next_comm} next_pid={next_pid} \
                   next_prio={next_prio}"],
    },
    Row {
        names: &["sched_waking", "sched_wakeup", "sched_wakeup_new"],
        rules: &[
            ("comm", Known("p->comm")),
            ("pid", Known("p->pid")),
            ("prio", Known("p->prio")),
            ("success", Always(1)), // before 5.17
            ("target_cpu", Known("p->thread_info.cpu")),
            ("target_cpu", Known("p->cpu")), // before 5.16
        ],
        prints: &[],
    },
    Row {
        names: &["sched_process_fork"],
        rules: &[
            ("parent_comm", Known("parent->comm")),
            ("parent_pid", Known("parent->pid")),
            ("child_comm", Known("child->comm")),
            ("child_pid", Known("child->pid")),
        ],
        prints: &[],
    },
    Row {
        names: &["sched_process_exec"],
        rules: &[
            ("filename", Path("bprm->filename:64")),
            ("pid", Known("p->pid")),
            ("old_pid", Path("old_pid")),
        ],
        prints: &[],
    },
    Row {
        names: &["sched_process_exit", "sched_process_free", "sched_wait_task"],
        rules: &[
            ("comm", Known("p->comm")),
            ("pid", Known("p->pid")),
            ("prio", Known("p->prio")),
            ("group_dead", Path("group_dead")),
        ],
        prints: &[],
    },
    Row {
        names: &["sched_stat_runtime"],
        rules: &[
            ("comm", Known("tsk->comm")),
            ("pid", Known("tsk->pid")),
            ("runtime", Path("runtime")),
            ("vruntime", Path("vruntime")), // before 6.8
        ],
        prints: &[],
    },
    Row {
        names: &["sched_migrate_task"],
        rules: &[
            ("comm", Known("p->comm")),
            ("pid", Known("p->pid")),
            ("prio", Known("p->prio")),
            ("orig_cpu", Known("p->thread_info.cpu")),
            ("orig_cpu", Known("p->cpu")), // before 5.16
            ("dest_cpu", Path("dest_cpu")),
        ],
        prints: &[],
    },
    Row {
        names: &["irq_handler_entry"],
        rules: &[("irq", Path("irq")), ("name", Path("action->name:32"))],
        prints: &[],
    },
    Row {
        names: &["irq_handler_exit"],
        rules: &[("irq", Path("irq")), ("ret", Path("ret"))],
        prints: &[],
    },
    Row {
        names: &["softirq_entry", "softirq_exit", "softirq_raise"],
        rules: &[("vec", Path("vec_nr"))],
        prints: &[],
    },
    Row {
        names: &["timer_init", "timer_expire_exit", "timer_cancel"],
        rules: &[("timer", Path("timer"))],
        prints: &[],
    },
    Row {
        names: &["timer_start"],
        rules: &[
            ("timer", Path("timer")),
            ("function", Known("timer->function")),
            ("expires", Path("expires")),
            ("expires", Known("timer->expires")),
            ("bucket_expiry", Path("bucket_expiry")),
            ("now", Variable("jiffies")),
            ("flags", Path("flags")),
            ("flags", Known("timer->flags")),
        ],
        prints: &[],
    },
    Row {
        names: &["timer_expire_entry"],
        rules: &[
            ("timer", Path("timer")),
            ("now", Variable("jiffies")),
            ("function", Known("timer->function")),
            ("baseclk", Path("baseclk")),
        ],
        prints: &[],
    },
    Row {
        names: &["hrtimer_init", "hrtimer_setup"],
        rules: &[
            ("hrtimer", Path("hrtimer")),
            ("clockid", Path("clockid")),
            ("mode", Path("mode")),
        ],
        prints: &[],
    },
    Row {
        names: &["hrtimer_start"],
        rules: &[
            ("hrtimer", Path("hrtimer")),
            ("function", Known("hrtimer->function")),
            ("expires", Known("hrtimer->node.expires")),
            ("softexpires", Known("hrtimer->_softexpires")),
            ("mode", Path("mode")),
            ("was_armed", Path("was_armed")),
        ],
        prints: &[],
    },
    Row {
        names: &["hrtimer_expire_entry"],
        rules: &[
            ("hrtimer", Path("hrtimer")),
            ("now", Known("now[0]")),
            // Since 7.3 it is the time itself.
            ("now", Path("now")),
            ("function", Known("hrtimer->function")),
        ],
        prints: &[],
    },
    Row {
        names: &["hrtimer_expire_exit", "hrtimer_cancel"],
        rules: &[("hrtimer", Path("hrtimer"))],
        prints: &[],
    },
    Row {
        names: &["net_dev_queue", "netif_receive_skb", "netif_rx"],
        rules: &[
            ("skbaddr", Path("skb")),
            ("len", Path("skb->len")),
            ("name", Path("skb->dev->name:16")),
            ("net_cookie", Path("skb->dev->nd_net.net->net_cookie")),
        ],
        prints: &[],
    },
    Row {
        names: &["net_dev_xmit"],
        rules: &[
            ("skbaddr", Path("skb")),
            ("len", Path("skb_len")),
            ("rc", Path("rc")),
            ("name", Path("dev->name:16")),
            ("net_cookie", Path("dev->nd_net.net->net_cookie")),
        ],
        prints: &[],
    },
    Row {
        names: &["kfree_skb"],
        rules: &[
            ("skbaddr", Path("skb")),
            ("location", Path("location")),
            ("rx_sk", Path("rx_sk")),
            ("protocol", Swapped("skb->protocol")),
            ("reason", Path("reason")),
        ],
        prints: &[],
    },
    Row {
        names: &["consume_skb"],
        rules: &[("skbaddr", Path("skb")), ("location", Path("location"))],
        prints: &[],
    },
    Row {
        names: &[
            "block_rq_insert",
            "block_rq_issue",
            "block_rq_merge",
            "block_rq_requeue",
            "block_io_start",
            "block_io_done",
        ],
        rules: &[
            ("dev", Disk("rq->rq_disk")), // before 5.17
            ("dev", Disk("rq->q->disk")),
            ("sector", Request { value: "rq->__sector", shift: 0, flags: REQUEST }),
            ("nr_sector", Request { value: "rq->__data_len", shift: SECTOR, flags: REQUEST }),
            ("bytes", Known("rq->__data_len")),
            ("ioprio", Known("rq->ioprio")),
            // Since 6.14 that of its first part, which may be done already.
            ("ioprio", Linked("rq->bio->bi_ioprio")),
            ("rwbs", Letters("rq->cmd_flags")),
            ("comm", Own),
            ("cmd", Empty),
        ],
        prints: &[],
    },
    Row {
        names: &["block_rq_complete", "block_rq_error"],
        rules: &[
            ("dev", Disk("rq->rq_disk")), // before 5.17
            ("dev", Disk("rq->q->disk")),
            ("sector", Known("rq->__sector")),
            ("nr_sector", Request { value: "nr_bytes", shift: SECTOR, flags: None }),
            ("error", Errno("error")),
            ("ioprio", Known("rq->ioprio")),
            ("ioprio", Linked("rq->bio->bi_ioprio")),
            ("rwbs", Letters("rq->cmd_flags")),
            ("cmd", Empty),
        ],
        prints: &[],
    },
    Row {
        names: &["block_bio_queue", "block_bio_backmerge", "block_bio_frontmerge", "block_getrq"],
        rules: &[
            ("dev", Disk("bio->bi_bdev->bd_disk")),
            ("dev", Disk("bio->bi_disk")), // before 5.12
            ("sector", Linked("bio->bi_iter.bi_sector")),
            ("nr_sector", Request { value: "bio->bi_iter.bi_size", shift: SECTOR, flags: None }),
            ("rwbs", Letters("bio->bi_opf")),
            ("comm", Own),
        ],
        prints: &[],
    },
    Row {
        names: &["kmalloc"],
        rules: &[
            ("call_site", Path("call_site")),
            ("ptr", Path("ptr")),
            ("bytes_req", Path("bytes_req")),
            ("bytes_alloc", Path("bytes_alloc")),
            ("gfp_flags", Path("gfp_flags")),
            ("node", Path("node")),
        ],
        prints: &[],
    },
    Row {
        names: &["kmem_cache_alloc"],
        rules: &[
            ("call_site", Path("call_site")),
            ("ptr", Path("ptr")),
            ("name", Path("s->name:32")),
            ("bytes_req", Path("bytes_req")), // before 6.1
            ("bytes_req", Known("s->object_size")),
            ("bytes_alloc", Path("bytes_alloc")), // before 6.1
            ("bytes_alloc", Known("s->size")),
            ("gfp_flags", Path("gfp_flags")),
            ("node", Path("node")),
            ("accounted", Accounted("gfp_flags", "s->flags")),
        ],
        prints: &[],
    },
    Row {
        names: &[
            "mm_page_alloc",
            "mm_page_free",
            "mm_page_free_batched",
            "mm_page_alloc_zone_locked",
            "mm_page_pcpu_drain",
        ],
        rules: &[
            ("pfn", Page("page")),
            ("order", Path("order")),
            ("gfp_flags", Path("gfp_flags")),
            ("migratetype", Path("migratetype")),
            ("percpu_refill", Path("percpu_refill")),
        ],
        // The kernel tells the address of the `struct page` as well, which is no field. None has no number, and is
        // told as 0.
        prints: &[
            "pfn=0x{pfn:x} order={order}",
            concat!(
                "pfn={pfn:names 18446744073709551615=0x0} order={order} migratetype={migratetype} ",
                "gfp_flags={gfp_flags:own}",
            ),
            "pfn={pfn:names 18446744073709551615=0x0} order={order} migratetype={migratetype}",
            concat!(
                "pfn={pfn:names 18446744073709551615=0x0} order={order} migratetype={migratetype} ",
                "percpu_refill={percpu_refill}",
            ),
        ],
    },
    Row {
        names: &["kfree"],
        rules: &[("call_site", Path("call_site")), ("ptr", Path("ptr"))],
        prints: &[],
    },
    Row {
        names: &["kmem_cache_free"],
        rules: &[
            ("call_site", Path("call_site")),
            ("ptr", Path("ptr")),
            ("name", Path("s->name:32")),
        ],
        prints: &[],
    },
    Row {
        names: &["page_fault_user", "page_fault_kernel"],
        rules: &[
            ("address", Path("address")),
            ("ip", Path("regs->ip")),
            ("ip", Path("regs->epc")),
            ("error_code", Path("error_code")),
        ],
        prints: &[],
    },
    Row {
        names: &["workqueue_queue_work"],
        rules: &[
            ("work", Path("work")),
            // It may be on a stack, or in a module.
            ("function", Known("work->func")),
            ("workqueue", Path("pwq->wq->name:32")),
            ("req_cpu", Path("req_cpu")),
            ("cpu", Path("pwq->pool->cpu")),
        ],
        prints: &[],
    },
    Row {
        names: &["workqueue_execute_start"],
        rules: &[("work", Path("work")), ("function", Known("work->func"))],
        prints: &[],
    },
    Row {
        names: &["workqueue_execute_end"],
        // By then the work may be gone.
        rules: &[("work", Path("work")), ("function", Path("function"))],
        prints: &[],
    },
    Row {
        names: &["workqueue_activate_work"],
        rules: &[("work", Path("work")), ("function", Known("work->func"))],
        prints: &[],
    },
    Row {
        names: &["signal_generate"],
        rules: &[
            ("sig", Path("sig")),
            ("errno", Pointed("info", "info->si_errno", [0, 0])),
            ("code", Pointed("info", "info->si_code", NO_INFO)),
            ("comm", Known("task->comm")),
            ("pid", Known("task->pid")),
            ("group", Path("group")),
            ("result", Path("result")),
        ],
        prints: &[],
    },
    Row {
        names: &["signal_deliver"],
        rules: &[
            ("sig", Path("sig")),
            ("errno", Pointed("info", "info->si_errno", [0, 0])),
            ("code", Pointed("info", "info->si_code", NO_INFO)),
            ("sa_handler", Path("ka->sa.sa_handler")),
            ("sa_flags", Path("ka->sa.sa_flags")),
        ],
        prints: &[],
    },
    Row {
        names: &["task_rename"],
        rules: &[
            ("pid", Known("task->pid")),
            ("oldcomm", Known("task->comm")),
            ("newcomm", Path("comm:16")),
            ("oom_score_adj", Known("task->signal->oom_score_adj")),
        ],
        prints: &[],
    },
    Row {
        names: &["task_newtask"],
        rules: &[
            ("pid", Known("task->pid")),
            ("comm", Known("task->comm")),
            ("clone_flags", Path("clone_flags")),
            ("oom_score_adj", Known("task->signal->oom_score_adj")),
        ],
        prints: &[],
    },
    Row {
        names: &["console"],
        // Behind the text is what was there before.
        rules: &[("msg", Line("text:120", "len")), ("msg", Line("text:56", "len"))],
        prints: &[],
    },
    Row {
        names: &["module_load"],
        // Where modules are, only the kernel itself reads without a look.
        rules: &[("taints", Known("mod->taints")), ("name", Known("mod->name:56"))],
        prints: &[],
    },
    // Of the registers by which system calls are made those of the kernel's own programs.
    Row {
        names: &["sys_enter"],
        rules: &[
            ("id", Path("id")),
            (
                "args",
                Each(&["regs->di", "regs->si", "regs->dx", "regs->r10", "regs->r8", "regs->r9"]),
            ),
            (
                "args",
                Each(&[
                    "regs->orig_a0",
                    "regs->a1",
                    "regs->a2",
                    "regs->a3",
                    "regs->a4",
                    "regs->a5",
                ]),
            ),
        ],
        prints: &[],
    },
    Row {
        names: &["sys_exit"],
        rules: &[("id", Known("regs->orig_ax")), ("id", Known("regs->a7")), ("ret", Path("ret"))],
        prints: &[],
    },
    Row { names: &["module_free"], rules: &[("name", Known("mod->name:56"))], prints: &[] },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::tracepoints::{EventField, Origin};

    fn event(name: &str, fields: &[&str]) -> Event {
        let field = |name: &&str| EventField {
            name: (*name).to_owned(),
            kind: "int".to_owned(),
            size: 4,
            signed: true,
        };
        Event {
            system: "sched".to_owned(),
            name: name.to_owned(),
            fields: fields.iter().map(field).collect(),
            origin: Origin::Other,
            address: 0,
            print: String::new(),
        }
    }

    const ROW: Row = Row {
        names: &["sched_wakeup"],
        rules: &[("pid", Known("p->pid")), ("success", Always(1))],
        prints: &["pid={pid} prio={prio:own} mode={mode:own}", "pid={pid} prio={prio:03}"],
    };

    // Formats of 5.10, 6.12, and one that has a field nobody knows.
    #[test]
    fn a_field_that_is_always_the_same_is_not_printed() {
        let print = |fields: &[&str]| print(&ROW, &event("sched_wakeup", fields), |_| None);
        let printed = "pid={pid} prio={prio:03}".to_owned();
        assert_eq!(print(&["pid", "prio", "success"]), Some(printed.clone()));
        assert_eq!(print(&["pid", "prio"]), Some(printed));
        assert_eq!(print(&["pid", "prio", "other"]), None);
    }

    #[test]
    fn a_field_can_be_in_the_form_of_the_kernel() {
        let event = event("sched_wakeup", &["pid", "prio", "mode"]);
        let own = |field: &str| Some(if field == "mode" { "names 1=A" } else { "" }.to_owned());
        let printed = "pid={pid} prio={prio} mode={mode:names 1=A}";
        assert_eq!(print(&ROW, &event, own).as_deref(), Some(printed));
        let own = |field: &str| own(field).filter(|_| field == "mode");
        assert_eq!(print(&ROW, &event, own), None, "it is not known");
    }

    // Where the task keeps its state and its CPU has moved over the years; the present place is first.
    #[test]
    fn older_kernels_keep_state_and_cpu_in_other_places() {
        let paths = |event: &str, field: &str| -> Vec<&str> {
            let rules = find(event).unwrap().rules.iter().filter(|(name, _)| *name == field);
            rules
                .filter_map(|(_, rule)| match rule {
                    Known(path) | SwitchState([_, path, _]) => Some(*path),
                    _ => None,
                })
                .collect()
        };
        let states = ["prev_state", "prev->__state", "prev->state"];
        assert_eq!(paths("sched_switch", "prev_state"), states);
        let cpus = ["p->thread_info.cpu", "p->cpu"];
        assert_eq!(paths("sched_waking", "target_cpu"), cpus);
        assert_eq!(paths("sched_migrate_task", "orig_cpu"), cpus);
    }
}
