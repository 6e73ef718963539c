//! Tests of each rule alone.

use super::*;

const A: u32 = 1;
const B: u32 = 2;
const C: u32 = 3;
/// Of no trace.
const X: u32 = 99;
/// Return addresses.
const HERE: u32 = 1000;
const THERE: u32 = 1001;

/// What happened to frames, in a line each.
struct Trace {
    pairing: Pairing,
    now: u64,
    vcpu: u32,
    pid: u32,
    tracer: u8,
    choice: Choice,
}

impl Trace {
    fn new() -> Self {
        let pairing = Pairing::new(2);
        Self { pairing, now: 0, vcpu: 0, pid: 7, tracer: 0, choice: Choice::ALL }
    }

    /// Every record is 10 ticks after the one before.
    fn record(
        &mut self,
        function: u32,
        other: u32,
        sp: u64,
        act: fn(&mut Pairing, &Call, Choice, &mut Vec<Step>),
    ) -> String {
        self.now += 10;
        let Self { now: timestamp, vcpu, pid, tracer, choice, .. } = *self;
        let sp = 0x10_0000 + sp;
        let call = Call { timestamp, vcpu, pid, tracer, function, other, sp };
        let mut steps = Vec::new();
        act(&mut self.pairing, &call, choice, &mut steps);
        lines(&steps)
    }

    fn enter(&mut self, function: u32, caller: u32, sp: u64) -> String {
        self.record(function, caller, sp, Pairing::enter)
    }

    fn leave(&mut self, function: u32, sp: u64) -> String {
        self.record(function, 0, sp, Pairing::leave)
    }

    fn jump(&mut self, function: u32, target: u32, sp: u64) -> String {
        self.record(function, target, sp, Pairing::jump)
    }

    fn jump_last(&mut self, function: u32, target: u32, sp: u64) -> String {
        self.record(function, target, sp, Pairing::jump_last)
    }

    fn leave_others(&mut self, function: u32, sp: u64) -> String {
        self.record(function, 0, sp, |pairing, call, _, steps| pairing.leave_others(call, steps))
    }

    fn finish(&mut self) -> String {
        let mut steps = Vec::new();
        self.pairing.finish(&mut steps);
        lines(&steps)
    }
}

fn lines(steps: &[Step]) -> String {
    let shown = |shown: bool| if shown { "" } else { " hidden" };
    let line = |step: &Step| match *step {
        Step::Left(frame) => format!("left {}", frame.function),
        Step::Evicted(frame) => format!("evicted {}", frame.function),
        Step::Entered { depth, shown: it, .. } => format!("in at {depth}{}", shown(it)),
        Step::Tailed { depth, .. } => format!("jump at {depth}"),
        Step::Returned { frame, depth, ticks, shown: it } => {
            let function = frame.map_or("?".to_owned(), |frame| frame.function.to_string());
            let ticks = ticks.map_or("?".to_owned(), |ticks| ticks.to_string());
            format!("out {function} at {depth} after {ticks}{}", shown(it))
        }
    };
    steps.iter().map(line).collect::<Vec<_>>().join("; ")
}

#[test]
fn calls_nest() {
    let mut trace = Trace::new();
    assert_eq!(trace.enter(A, HERE, 0x300), "in at 0");
    assert_eq!(trace.enter(B, HERE, 0x200), "in at 1");
    assert_eq!(trace.leave(B, 0x200), "out 2 at 1 after 10");
    assert_eq!(trace.enter(B, HERE, 0x200), "in at 1");
    assert_eq!(trace.leave(B, 0x200), "out 2 at 1 after 10");
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after 50");
    assert_eq!(trace.finish(), "");
}

#[test]
fn a_higher_stack_pointer_ends_what_is_below() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    trace.enter(B, HERE, 0x200);
    trace.enter(C, HERE, 0x100);
    assert_eq!(trace.leave(A, 0x300), "left 3; left 2; out 1 at 0 after 30");
}

#[test]
fn a_return_ends_a_chain() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    assert_eq!(trace.jump(A, B, 0x300), "jump at 0");
    assert_eq!(trace.enter(B, HERE, 0x300), "in at 1");
    assert_eq!(trace.jump(B, C, 0x300), "jump at 1");
    assert_eq!(trace.enter(C, HERE, 0x300), "in at 2");
    let out = "out 3 at 2 after 10; out 2 at 1 after 30; out 1 at 0 after 50";
    assert_eq!(trace.leave(C, 0x300), out);
}

#[test]
fn a_function_may_jump_to_itself() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    trace.jump(A, A, 0x300);
    assert_eq!(trace.enter(A, HERE, 0x300), "in at 1");
    assert_eq!(trace.leave(A, 0x300), "out 1 at 1 after 10; out 1 at 0 after 30");
}

// A loop that calls one function after the other from one place looks the same: what the first
// one took is not known then.
#[test]
fn a_jump_to_who_knows_where_has_no_duration() {
    for target in [0, X] {
        let mut trace = Trace::new();
        trace.enter(A, HERE, 0x300);
        trace.jump(A, target, 0x300);
        assert_eq!(trace.enter(B, HERE, 0x300), "in at 1");
        assert_eq!(trace.leave(B, 0x300), "out 2 at 1 after 10; out 1 at 0 after ?");
    }
}

#[test]
fn an_unseen_jump_continues_the_chain_without_duration() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    assert_eq!(trace.enter(B, HERE, 0x300), "in at 1");
    assert_eq!(trace.leave(B, 0x300), "out 2 at 1 after 10; out 1 at 0 after ?");
}

#[test]
fn another_caller_means_that_the_first_has_gone_on() {
    for jumps in [false, true] {
        let mut trace = Trace::new();
        trace.enter(A, HERE, 0x300);
        if jumps {
            trace.jump(A, X, 0x300);
        }
        assert_eq!(trace.enter(B, THERE, 0x300), "left 1; in at 0");
        assert_eq!(trace.leave(B, 0x300), "out 2 at 0 after 10");
    }
}

// Its way out is one that has no record: that must not make a chain without end.
#[test]
fn the_same_function_again_is_another_call() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    assert_eq!(trace.enter(A, HERE, 0x300), "left 1; in at 0");
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after 10");
}

#[test]
fn a_jump_to_where_only_returns_are_traced_has_a_duration() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    trace.jump(A, X, 0x300);
    assert_eq!(trace.leave(X, 0x300), "out ? at 1 after ?; out 1 at 0 after 20");
    trace.enter(A, HERE, 0x300);
    trace.jump(A, 0, 0x300);
    assert_eq!(trace.leave(X, 0x300), "out ? at 1 after ?; out 1 at 0 after ?");
}

#[test]
fn a_return_of_another_function_is_none_of_this_frame() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    assert_eq!(trace.leave(B, 0x300), "left 1; out ? at 0 after ?");
    trace.enter(A, HERE, 0x300);
    trace.jump(A, B, 0x300);
    assert_eq!(trace.leave(A, 0x300), "left 1; out ? at 0 after ?");
}

#[test]
fn what_was_open_at_the_start_has_no_duration() {
    let mut trace = Trace::new();
    assert_eq!(trace.leave(A, 0x200), "out ? at 0 after ?");
    assert_eq!(trace.jump(B, C, 0x300), "jump at 0");
    assert_eq!(trace.enter(C, HERE, 0x300), "in at 0");
    assert_eq!(trace.leave(C, 0x300), "out 3 at 0 after 10");
}

// Where only a part of the call tree is recorded, what a function jumps to is too deep for that, and where it is left is not.
#[test]
fn a_chain_of_jumps_whose_entries_are_not_there_ends_with_its_return() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    assert_eq!(trace.jump(A, B, 0x300), "jump at 0");
    assert_eq!(trace.jump(B, C, 0x300), "jump at 1");
    assert_eq!(trace.leave(C, 0x300), "out ? at 1 after ?; out 1 at 0 after 30");
    trace.enter(A, HERE, 0x300);
    trace.jump(A, B, 0x300);
    // Another one is left there.
    assert_eq!(trace.jump(C, B, 0x300), "left 1; jump at 0");
}

#[test]
fn what_is_open_at_the_end_is_told() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    trace.enter(B, HERE, 0x200);
    assert_eq!(trace.finish(), "left 2; left 1");
}

#[test]
fn stacks_have_nothing_to_do_with_each_other() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    // An interrupt on its own stack, with the pid of the task.
    assert_eq!(trace.enter(B, HERE, 0x8_0300), "in at 0");
    // And one on the task's stack.
    assert_eq!(trace.leave(B, 0x8_0300), "out 2 at 0 after 10");
    assert_eq!(trace.enter(C, HERE, 0x100), "in at 1");
    // A task that goes on elsewhere.
    trace.vcpu = 1;
    assert_eq!(trace.leave(C, 0x100), "out 3 at 1 after 10");
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after 50");
}

#[test]
fn tracers_have_nothing_to_do_with_each_other() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    trace.tracer = 1;
    assert_eq!(trace.enter(A, HERE, 0x300), "in at 0");
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after 10");
    trace.tracer = 0;
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after 30");
}

#[test]
fn another_task_on_a_stack_has_nothing_of_the_last() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    trace.enter(B, HERE, 0x100);
    trace.pid = 8;
    assert_eq!(trace.enter(C, HERE, 0x200), "left 2; left 1; in at 0");
    // Nor at the same place.
    trace.pid = 9;
    assert_eq!(trace.enter(A, HERE, 0x200), "left 3; in at 0");
}

// The middle of a switch is on the stack of the next task with the pid of the one before.
#[test]
fn the_pid_is_only_a_label() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    trace.pid = 8;
    assert_eq!(trace.enter(B, HERE, 0x200), "in at 1");
    assert_eq!(trace.leave(B, 0x200), "out 2 at 1 after 10");
    trace.pid = 7;
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after 30");
}

#[test]
fn a_gap_makes_what_is_open_doubtful() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    trace.pairing.loss(0);
    assert_eq!(trace.enter(B, HERE, 0x200), "in at 1");
    assert_eq!(trace.leave(B, 0x200), "out 2 at 1 after 10");
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after ?");
}

#[test]
fn a_gap_elsewhere_is_one_of_those_who_may_have_been_there() {
    let mut trace = Trace::new();
    // Two records that follow each other: the task was nowhere else.
    trace.enter(A, HERE, 0x300);
    trace.pairing.loss(1);
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after 10");
    // It has left, and come back from there; or may have.
    for back in [0, 1] {
        trace.enter(A, HERE, 0x300);
        trace.enter(C, HERE, 0x8_0300);
        trace.vcpu = back;
        assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after ?");
        (trace.vcpu, _) = (0, trace.pairing.loss(1));
    }
    // A record without a stack pointer ends a gap as well.
    trace.pairing.plain(1);
    trace.enter(A, HERE, 0x300);
    trace.enter(C, HERE, 0x8_0300);
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after 20");
}

#[test]
fn other_functions_make_what_is_open_doubtful() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 0x300);
    trace.pairing.change();
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after ?");
}

#[test]
fn a_clock_that_was_set_back_tells_no_duration() {
    let mut trace = Trace::new();
    trace.now = 1000;
    trace.enter(A, HERE, 0x300);
    trace.now = 0;
    assert_eq!(trace.leave(A, 0x300), "out 1 at 0 after ?");
}

#[test]
fn depth_counts_what_is_selected() {
    let mut trace = Trace::new();
    let none = Choice { selected: false, root: false };
    let below = Choice { selected: true, root: false };
    trace.pairing.max_depth = 2;
    trace.choice = below;
    // Called from no root.
    assert_eq!(trace.enter(A, HERE, 0x800), "in at 0 hidden");
    trace.choice = Choice::ALL;
    assert_eq!(trace.enter(B, HERE, 0x700), "in at 0");
    trace.choice = none;
    assert_eq!(trace.enter(C, HERE, 0x600), "in at 1 hidden");
    trace.choice = below;
    assert_eq!(trace.enter(A, HERE, 0x500), "in at 1");
    assert_eq!(trace.enter(A, HERE, 0x400), "in at 2 hidden");
    assert_eq!(trace.leave(A, 0x400), "out 1 at 2 after 10 hidden");
    assert_eq!(trace.leave(A, 0x500), "out 1 at 1 after 30");
    trace.choice = none;
    assert_eq!(trace.leave(C, 0x600), "out 3 at 1 after 50 hidden");
    assert_eq!(trace.leave(C, 0x600), "out ? at 1 after ? hidden");
}

#[test]
fn memory_is_bounded() {
    let mut trace = Trace::new();
    // No kernel's stack: chains of functions that jump to each other for ever.
    let mut evicted = 0;
    for function in 1..20_000 {
        let steps = trace.enter(function, HERE, 0x300);
        evicted += steps.matches("evicted").count();
        trace.jump(function, function + 1, 0x300);
    }
    assert!(trace.pairing.frames <= 4096);
    assert_eq!(evicted + trace.pairing.frames, 19_999);
    assert_eq!(trace.pairing.evicted(), evicted as u64);
    // More stacks than there are tasks.
    for stack in 1..70_000 {
        trace.enter(A, HERE, stack << STACK_BITS);
        assert!(trace.pairing.stacks.len() <= STACKS + 1);
    }
    for stack in 1..75 {
        (0..4000).for_each(|at| drop(trace.enter(A, HERE, (stack << STACK_BITS) + 4000 - at)));
        assert!(trace.pairing.frames <= FRAMES + 1);
    }
    let open = trace.pairing.frames;
    assert_eq!(trace.finish().matches("left").count(), open);
    assert_eq!(trace.pairing.frames, 0);
}

// Else what is called next by the same caller, through one that is not traced, looks as if these had
// called it.
#[test]
fn what_is_not_traced_ends_those_that_jumped_to_it() {
    let mut trace = Trace::new();
    trace.enter(A, HERE, 80);
    trace.enter(B, HERE, 40);
    // Called as any other.
    assert_eq!(trace.leave_others(X, 20), "");
    assert_eq!(trace.leave_others(X, 40), "", "B has not jumped");
    trace.jump(B, X, 40);
    assert_eq!(trace.enter(C, THERE, 20), "in at 2");
    assert_eq!(trace.leave(C, 20), "out 3 at 2 after 10");
    // X has gone on to another one.
    assert_eq!(trace.leave_others(X + 1, 40), "out 2 at 1 after 60");
    assert_eq!(trace.leave(A, 80), "out 1 at 0 after 80");
    // And one of which nothing is heard.
    trace.enter(A, HERE, 80);
    assert_eq!(trace.jump_last(A, X, 80), "jump at 0; out 1 at 0 after 10");
    assert_eq!(trace.jump_last(B, X, 80), "jump at 0", "its entry was not seen");
    assert_eq!(trace.finish(), "");
}
