//! Property tests: whatever a machine does, and whatever is lost, all that is reported of calls is
//! true.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::{Call, Choice, Pairing, Step};

/// Small numbers, so that the same functions and stack pointers occur again and again.
const FUNCTIONS: u32 = 5;
const TASKS: usize = 4;
const VCPUS: usize = 3;

/// What may happen beside calls and returns.
#[derive(Clone, Copy, Debug)]
struct World {
    losses: bool,
    /// Functions are left by jumps to what is not traced, tasks end in the middle.
    unseen_ends: bool,
    /// Jumps that are not recorded, or to unknown places.
    unknown_jumps: bool,
}

/// Functions that are open at one place of a stack: all but the last have jumped.
#[derive(Clone, Debug)]
struct Chain {
    sp: u64,
    caller: u32,
    /// Function and time of its entry.
    members: Vec<(u32, u64)>,
    /// The last has jumped to what is not traced.
    blind: bool,
}

#[derive(Clone, Debug)]
struct Stack {
    base: u64,
    pid: u32,
    chains: Vec<Chain>,
}

impl Stack {
    fn depth(&self) -> usize {
        self.chains.iter().map(|chain| chain.members.len()).sum()
    }
}

#[derive(Debug)]
struct Vcpu {
    task: usize,
    /// The stack of interrupts, when one runs.
    interrupt: Option<Stack>,
    /// So many records are lost from here on.
    losing: u32,
}

struct Machine {
    world: World,
    now: u64,
    pids: u32,
    tasks: Vec<Stack>,
    vcpus: Vec<Vcpu>,
    pairing: Pairing,
    /// When each call ended, by the time of its entry; none for those whose end left no record.
    ends: HashMap<u64, Option<u64>>,
    entered: usize,
    certain: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum What {
    Entry,
    Return,
    Tail,
}

impl Machine {
    fn new(world: World) -> Self {
        let task = |number: usize| Stack {
            base: (number as u64 + 1) << 20 | 0x3ff0,
            pid: u32::try_from(number).unwrap() + 1,
            chains: Vec::new(),
        };
        let vcpu = |task| Vcpu { task, interrupt: None, losing: 0 };
        Self {
            world,
            now: 0,
            pids: 100,
            tasks: (0..TASKS).map(task).collect(),
            vcpus: (0..VCPUS).map(vcpu).collect(),
            pairing: Pairing::new(VCPUS),
            ends: HashMap::new(),
            entered: 0,
            certain: 0,
        }
    }

    fn stack(&mut self, vcpu: usize) -> &mut Stack {
        let vcpu = &mut self.vcpus[vcpu];
        match &mut vcpu.interrupt {
            Some(stack) => stack,
            None => &mut self.tasks[vcpu.task],
        }
    }

    fn record(
        &mut self,
        vcpu: usize,
        what: What,
        function: u32,
        other: u32,
        sp: u64,
        depth: usize,
    ) {
        let pid = self.stack(vcpu).pid;
        if self.vcpus[vcpu].losing > 0 {
            self.vcpus[vcpu].losing -= 1;
            return;
        }
        let call = Call {
            timestamp: self.now,
            vcpu: u32::try_from(vcpu).unwrap(),
            pid,
            tracer: 0,
            function,
            other,
            sp,
        };
        let mut steps = Vec::new();
        match what {
            What::Entry => self.pairing.enter(&call, Choice::ALL, &mut steps),
            What::Return => self.pairing.leave(&call, Choice::ALL, &mut steps),
            What::Tail => self.pairing.jump(&call, Choice::ALL, &mut steps),
        }
        let exact = !self.world.losses && !self.world.unseen_ends;
        for step in steps {
            match step {
                Step::Entered { depth: found, .. } if exact => assert_eq!(found as usize, depth),
                Step::Returned { frame: Some(frame), ticks, depth: found, .. } => {
                    if let Some(ticks) = ticks {
                        let entered = self.now - ticks;
                        let end = self.ends.get(&entered).copied().flatten();
                        assert_eq!(end, Some(self.now), "{frame:?}");
                        self.certain += 1;
                    }
                    assert!(!exact || found as usize >= depth);
                }
                Step::Returned { frame: None, .. } | Step::Left(_) => assert!(!exact, "{step:?}"),
                _ => {}
            }
        }
    }

    fn call(&mut self, vcpu: usize, choice: u32) {
        self.now += 1;
        let stack = self.stack(vcpu);
        let top = stack.chains.last().map_or(stack.base, |chain| chain.sp);
        let sp = top - 16 - u64::from(choice % 3) * 16;
        if sp >> 14 != stack.base >> 14 {
            return;
        }
        let (function, caller) = (1 + choice / 3 % FUNCTIONS, 1000 + choice / 16 % 3);
        let depth = stack.depth();
        let members = vec![(function, 0)];
        stack.chains.push(Chain { sp, caller, members, blind: false });
        self.entry(vcpu, depth);
    }

    /// The last member of the last chain is entered.
    fn entry(&mut self, vcpu: usize, depth: usize) {
        let now = self.now;
        let chain = self.stack(vcpu).chains.last_mut().unwrap();
        let (sp, caller) = (chain.sp, chain.caller);
        let last = chain.members.last_mut().unwrap();
        last.1 = now;
        let function = last.0;
        self.ends.insert(now, None);
        self.entered += 1;
        self.record(vcpu, What::Entry, function, caller, sp, depth);
    }

    fn give_back(&mut self, vcpu: usize) {
        self.now += 1;
        let now = self.now;
        let Some(chain) = self.stack(vcpu).chains.pop() else { return };
        let depth = self.stack(vcpu).depth();
        if chain.blind {
            return;
        }
        for (_, entered) in &chain.members {
            self.ends.insert(*entered, Some(now));
        }
        let (function, _) = *chain.members.last().unwrap();
        self.record(vcpu, What::Return, function, chain.caller, chain.sp, depth);
    }

    fn jump(&mut self, vcpu: usize, choice: u32) {
        self.now += 1;
        let world = self.world;
        let depth = self.stack(vcpu).depth();
        let Some(chain) = self.stack(vcpu).chains.last_mut() else { return };
        if chain.blind {
            return;
        }
        let from = chain.members.last().unwrap().0;
        let to = 1 + choice / 8 % FUNCTIONS;
        let (sp, again) = (chain.sp, chain.members.iter().any(|member| member.0 == to));
        match choice % 8 {
            // To what is not traced; 900 is never recorded.
            0 | 1 if world.unseen_ends => {
                chain.blind = true;
                let target = if choice.is_multiple_of(8) { 0 } else { 900 };
                self.record(vcpu, What::Tail, from, target, sp, depth);
            }
            // Not recorded, or without its target.
            kind @ (2 | 3) if world.unknown_jumps && !again => {
                chain.members.push((to, 0));
                if kind == 2 {
                    self.record(vcpu, What::Tail, from, 0, sp, depth);
                    self.now += 1;
                }
                self.entry(vcpu, depth);
            }
            _ => {
                chain.members.push((to, 0));
                self.record(vcpu, What::Tail, from, to, sp, depth);
                self.now += 1;
                self.entry(vcpu, depth);
            }
        }
    }

    /// A task goes, another comes; the first thing it does is recorded.
    fn switch(&mut self, vcpu: usize, choice: u32) {
        let next = choice as usize % TASKS;
        let busy = self.vcpus.iter().any(|vcpu| vcpu.task == next);
        if self.vcpus[vcpu].interrupt.is_some() || busy {
            return;
        }
        self.vcpus[vcpu].task = next;
        self.call(vcpu, choice / 7);
    }

    fn interrupt(&mut self, vcpu: usize) {
        match self.vcpus[vcpu].interrupt.take() {
            Some(stack) if !stack.chains.is_empty() => self.vcpus[vcpu].interrupt = Some(stack),
            Some(_) => {}
            None => {
                let (pid, base) = (self.stack(vcpu).pid, (vcpu as u64 + 100) << 20 | 0x3ff0);
                self.vcpus[vcpu].interrupt = Some(Stack { base, pid, chains: Vec::new() });
            }
        }
    }

    /// A task ends, and its stack becomes that of a new one.
    fn end(&mut self, vcpu: usize) {
        if self.vcpus[vcpu].interrupt.is_some() {
            return;
        }
        self.pids += 1;
        let pid = self.pids;
        let stack = self.stack(vcpu);
        stack.chains.clear();
        stack.pid = pid;
    }

    fn step(&mut self, choice: u32) {
        let vcpu = choice as usize % VCPUS;
        let rest = choice / 64;
        match choice / 3 % 20 {
            0..=7 => self.call(vcpu, rest),
            8..=13 => self.give_back(vcpu),
            14 | 15 => self.jump(vcpu, rest),
            16 => self.switch(vcpu, rest),
            17 => self.interrupt(vcpu),
            18 if self.world.losses && rest.is_multiple_of(4) && self.vcpus[vcpu].losing == 0 => {
                self.vcpus[vcpu].losing = 1 + rest / 4 % 12;
                self.pairing.loss(u32::try_from(vcpu).unwrap());
            }
            19 if self.world.unseen_ends && rest.is_multiple_of(8) => self.end(vcpu),
            _ => self.give_back(vcpu),
        }
    }
}

fn world() -> impl Strategy<Value = World> {
    any::<(bool, bool, bool)>().prop_map(|(losses, unseen_ends, unknown_jumps)| World {
        losses,
        unseen_ends,
        unknown_jumps,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn durations_are_true_or_not_told(world in world(), choices in vec(any::<u32>(), 0..1500)) {
        let mut machine = Machine::new(world);
        choices.into_iter().for_each(|choice| machine.step(choice));
        if world.losses || world.unseen_ends {
            return Ok(());
        }
        // All that has ended is told of, where nothing is in doubt.
        let ended = machine.ends.values().flatten().count();
        prop_assert!(machine.certain <= ended);
        if !world.unknown_jumps {
            prop_assert_eq!(machine.certain, ended);
        }
        let mut left = Vec::new();
        machine.pairing.finish(&mut left);
        prop_assert_eq!(left.len(), machine.ends.len() - ended);
    }
}
