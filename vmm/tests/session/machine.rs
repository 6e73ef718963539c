//! A machine without KVM: a guest in plain memory whose vCPUs do what a script says.
//!
//! It keeps what a real machine promises, and fails the test when the controller does not keep its part:
//! no pause in a pause, each vCPU that is parked released once, and after every pause a trap in memory
//! wherever one is armed. That none is anywhere else is seen at the end, by the image.

mod vm;

use crate::fake_guest::module::{CODE, Module};
use crate::fake_guest::{ANNEX, Fake, Record};
use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vm_memory::Bytes;
use vmtrace::deadline::Deadline;
use vmtrace::kernel::{Exit, ExitKind, Site};
use vmtrace::machine::{
    Detour, Diverted, Event, ExitObserver, ExitReason, MachineError, Registers, Room,
};
use vmtrace::relay::ConsoleLines;
use vmtrace::serve::{Control, ControlRequest, Reply, Sink};
use vmtrace::session::{
    Closing, Outcome, Paused, SessionError, Stopped, Tracing, Vm, Wake, Work, attend,
};
use vmtrace::tracer::annex::Memory;
use vmtrace::tracer::{Guest, Image, return_address};

/// How often something is looked for that is to happen, and for how long.
const TICK: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_secs(20);
pub(crate) const VCPUS: usize = 2;
/// Sites of the functions of a module: of `plain`, `across` and `my_init`.
pub(crate) const OF_MODULE: [u64; 3] = [0x14, 0xffe, 0x1ff0];
/// How far into a function a trap can be.
const INSIDE: usize = 96;

/// What happens next in the machine.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// vCPU 0 writes the register that says where the kernel is. Nothing happens when that is not watched.
    Located,
    /// The same of a kernel that is not where the image would be, by this vCPU.
    Elsewhere(usize),
    /// These vCPUs call a function. They are parked one after the other if there is a trap in it; who
    /// comes later may find it gone.
    Calls(&'static str, Vec<usize>),
    /// This vCPU calls a function, whose first program counts down to a trigger's call and stops there.
    /// Nothing happens where it does not.
    Counts(&'static str, usize),
    /// This vCPU returns from a function, where the first program does that.
    Ends(&'static str, usize),
    /// vCPU 0 comes, in kernel mode, to what may be a trap instruction at this address, where none is armed.
    Strays(fn(&FakeVm) -> u64),
    /// vCPU 0 tells the pvpanic device that the kernel panics, and whether a crash kernel will run, after it has
    /// printed why, if it has.
    Panics(Option<&'static str>, bool),
    /// vCPU 0 comes to this address. It is parked there if a trap is armed.
    Comes(fn(&FakeVm) -> u64),
    /// These commands come, all at once.
    Asks(Vec<Control>),
    /// The guest is gone.
    Exits(ExitReason),
    /// The guest, or who tests it, does something.
    Does(fn(&FakeVm)),
    /// All of these, before anybody attends to the first.
    Together(Vec<Step>),
    /// The guest runs on until this is so.
    Until(fn(&FakeVm) -> bool),
    /// The guest runs on for so long.
    Runs(Duration),
}

/// What becomes of the call of a self-test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SelfCall {
    /// It writes its record and returns.
    #[default]
    Returns,
    /// It returns without a record.
    Forgets,
    /// It comes back with another register than it began with.
    Spoils,
    /// The vCPU cannot be sent away.
    Refused,
}

#[derive(Default)]
struct State {
    steps: VecDeque<Step>,
    registers: [Registers; VCPUS],
    /// Where each vCPU waits to be released.
    parked: [Option<u64>; VCPUS],
    /// Those that were released where a trap still is.
    again: BTreeSet<usize>,
    traps: BTreeSet<u64>,
    paused: bool,
    pauses: usize,
    /// A vCPU that was sent away, and what it had.
    away: Option<(usize, Registers, Detour)>,
    self_call: SelfCall,
    clock: u64,
    gone: bool,
    asked: bool,
    released: usize,
    /// How often the register was watched again.
    watches: usize,
    /// How often it was written.
    written: usize,
    /// Since when something is waited for.
    waits: Option<Instant>,
    answers: Vec<UnixStream>,
    /// What the console says of a panic.
    printed: Option<String>,
}

pub(crate) struct FakeVm {
    pub(crate) fake: Fake,
    image: Image,
    sender: Sender<Event>,
    events: Receiver<Event>,
    woken: Arc<AtomicBool>,
    room: Arc<Room>,
    control: Sender<ControlRequest>,
    /// Which pauses fail, by their number.
    failing: RefCell<BTreeSet<usize>>,
    /// Whether writes fail, or the guest spoils what is ours: then traps may be where they should not.
    broken: bool,
    state: RefCell<State>,
}

/// How a run ended.
pub(crate) struct Ran {
    pub(crate) outcome: Result<Outcome, SessionError>,
    pub(crate) stream: Vec<u8>,
    /// What was said to those who asked, in their order.
    pub(crate) answers: Vec<String>,
    pub(crate) vm: FakeVm,
}

impl Ran {
    pub(crate) fn outcome(&self) -> &Outcome {
        self.outcome.as_ref().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Notes of the summary, a line each.
    pub(crate) fn notes(&self) -> String {
        self.outcome().summary.notes.join("\n")
    }

    /// So many times vCPUs were parked and released.
    pub(crate) fn released(&self) -> usize {
        self.vm.state.borrow().released
    }
}

/// Everything that a run may be told beside its steps.
#[derive(Default)]
pub(crate) struct Trouble {
    pub(crate) failing_pauses: BTreeSet<usize>,
    pub(crate) self_call: SelfCall,
    /// See [`FakeVm::broken`].
    pub(crate) broken: bool,
    /// How far the first kernel is moved.
    pub(crate) slide: u64,
}

#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Traces a guest that does this, and then powers off.
pub(crate) fn run(fake: Fake, tracing: Tracing, steps: Vec<Step>, trouble: Trouble) -> Ran {
    let (sender, events) = channel();
    let (control, requests) = channel();
    fake.move_by(trouble.slide);
    let image = fake.locate(trouble.slide).unwrap();
    let state = State {
        steps: steps.into(),
        registers: [registers_of(&fake); VCPUS],
        self_call: trouble.self_call,
        clock: 1000,
        ..State::default()
    };
    let mut vm = FakeVm {
        image,
        sender,
        events,
        woken: Arc::default(),
        room: Arc::new(Room::new(VCPUS)),
        control,
        failing: RefCell::new(trouble.failing_pauses),
        broken: trouble.broken,
        state: RefCell::new(state),
        fake,
    };
    let output = Output::default();
    let (_joining, joins) = channel();
    let work = Work {
        kernel: Arc::clone(&vm.fake.kernel),
        tracing,
        stream: Sink::from(Box::new(output.clone())),
        joins,
        control: requests,
        timeout: None,
        hang: None,
        deadline: Deadline::never(),
        commands: Box::new(|_| Ok(())),
        closing: Box::new(Closing::default),
    };
    let outcome = attend(&mut vm, work, ConsoleLines::default(), || false);
    let streams = std::mem::take(&mut vm.state.get_mut().answers);
    let answers = streams.into_iter().map(|mut stream| {
        let mut line = String::new();
        stream.read_to_string(&mut line).unwrap();
        line.trim_end().to_owned()
    });
    let answers = answers.collect();
    let stream = std::mem::take(&mut *output.0.lock().unwrap());
    Ran { outcome, stream, answers, vm }
}

/// What a CPU has when its kernel says where it is.
fn registers_of(fake: &Fake) -> Registers {
    let (rip, rsp) = (fake.runtime(fake.link(fake.tables().0)), fake.runtime(fake.stack()));
    Registers { rip, rsp, cr3: fake.symbol("init_top_pgt"), ..Registers::default() }
}

impl FakeVm {
    /// The bytes at a virtual address, of RAM or the annex, so many of them.
    pub(crate) fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let physical = self.image.tables.translate(&self.fake, address).unwrap();
        let mut bytes = vec![0; len];
        match physical.checked_sub(ANNEX) {
            Some(offset) => {
                let at = usize::try_from(offset).unwrap();
                self.fake.annex.slice().read_slice(&mut bytes, at).unwrap();
            }
            None => self.fake.read(physical, &mut bytes).unwrap(),
        }
        bytes
    }

    /// The armed trap that a call of this function comes to: in the function, or where it jumps to.
    pub(crate) fn trap_in(&self, function: &str) -> Option<u64> {
        let entry = self.fake.runtime(self.fake.link(function));
        let traps = &self.state.borrow().traps;
        let within = traps.range(entry..entry + 16).next();
        let within = within.copied().or_else(|| {
            let body = self.bytes(entry, INSIDE);
            let ways = (entry + 5..).zip(body.windows(5)).filter_map(|(next, bytes)| {
                let &[0xe8 | 0xe9, a, b, c, d] = bytes else { return None };
                Some(next.wrapping_add_signed(i32::from_le_bytes([a, b, c, d]).into()))
            });
            ways.into_iter().find(|target| traps.contains(target))
        });
        // Or in what calls of it lead to, which goes on with it.
        within.or_else(|| {
            let goes_on = |trap: &&u64| {
                let next = **trap + self.fake.trap().len() as u64;
                let &[0xe9, a, b, c, d] = &self.bytes(next, 5)[..] else { return false };
                (next + 5).wrapping_add_signed(i32::from_le_bytes([a, b, c, d]).into()) == entry
            };
            traps.iter().find(goes_on).copied()
        })
    }

    /// A module is there as it is loaded, and what the guest calls about modules from now on is about it.
    pub(crate) fn module_comes(&self) {
        let module = Module::new(&self.fake, OF_MODULE);
        let mut state = self.state.borrow_mut();
        state.registers.iter_mut().for_each(|registers| registers.rdi = module.books);
    }

    /// Writes to RAM at a virtual address.
    pub(crate) fn put(&self, address: u64, bytes: &[u8]) {
        let physical = self.image.tables.translate(&self.fake, address).unwrap();
        self.fake.write(physical, bytes).unwrap();
    }

    /// The site of the module's function `plain`.
    pub(crate) fn plain(&self) -> Vec<u8> {
        self.bytes(CODE + OF_MODULE[0], 5)
    }

    /// The guest's kernel has patched its alternatives.
    pub(crate) fn patch_alternatives(&self) {
        let at = self.fake.symbol("alternatives_patched");
        self.fake.ram().write(at, &1_u32.to_le_bytes()).unwrap();
    }

    /// The armed traps.
    pub(crate) fn traps(&self) -> BTreeSet<u64> {
        self.state.borrow().traps.clone()
    }

    /// A trap that nobody has asked for.
    pub(crate) fn arm(&self, address: u64) {
        self.state.borrow_mut().traps.insert(address);
    }

    /// How many pauses there were, failed ones included.
    pub(crate) fn pauses(&self) -> usize {
        self.state.borrow().pauses
    }

    fn park(&self, vcpu: usize, address: u64) {
        let mut state = self.state.borrow_mut();
        assert_eq!(state.parked[vcpu], None, "vCPU {vcpu} is parked");
        state.parked[vcpu] = Some(address);
        state.registers[vcpu].rip = address;
    }

    /// A vCPU writes the register that says where the kernel is: so far from where the image would be.
    fn write_register(&self, vcpu: usize, distance: u64) -> bool {
        let mut state = self.state.borrow_mut();
        if state.written > state.watches {
            return false;
        }
        state.written += 1;
        drop(state);
        let value = self.fake.runtime(self.fake.link("entry_SYSCALL_64")) + distance;
        self.park(vcpu, value);
        self.sender.send(Event::MsrWrite { vcpu, index: 0xc000_0082, value }).unwrap();
        true
    }

    /// vCPU 0 calls a function that is traced, and its program writes a record.
    pub(crate) fn records(&self, function: &str) {
        let kernel = &self.fake.kernel;
        let site = kernel.site_of(function).unwrap();
        assert_eq!(self.fake.bytes(site)[0], 0xe8, "{function} is not traced");
        let at = return_address(kernel, &kernel.sites()[site]);
        self.writes(self.fake.runtime(at), 0, 0, &[]);
    }

    /// vCPU 0 calls what is traced from the link address `caller` (0: from nowhere), and the program with this number
    /// writes a record, which is of a run-time address.
    pub(crate) fn writes(&self, at: u64, caller: u64, program: u16, fields: &[u64]) {
        let mut state = self.state.borrow_mut();
        state.clock += 100;
        let (task, time) = (self.fake.runtime(self.fake.link("init_task")), state.clock);
        let caller = if caller == 0 { 0 } else { self.fake.runtime(caller) & 0xffff_ffff };
        let record = Record { task, caller, pid: 1, time, site: at & 0xffff_ffff, program };
        self.fake.hit_with(record, fields, 1);
    }

    /// Another kernel of the same image is in memory, and its CPUs are as they are when it begins.
    pub(crate) fn reload(&self) {
        self.reload_at(0);
    }

    /// The same of one that was moved by so much.
    pub(crate) fn reload_at(&self, slide: u64) {
        self.fake.reload();
        self.fake.move_by(slide);
        let mut state = self.state.borrow_mut();
        assert_eq!(state.traps, BTreeSet::new(), "traps of the kernel that is gone");
        state.registers = [registers_of(&self.fake); VCPUS];
    }

    /// The next pause fails.
    pub(crate) fn fail_pause(&self) {
        self.failing.borrow_mut().insert(self.state.borrow().pauses + 1);
    }

    /// Whether all pauses that are to fail have.
    pub(crate) fn has_failed(&self) -> bool {
        self.failing.borrow().is_empty()
    }

    /// Nothing happens for a while, and then this step again, unless it is over after as long as it has waited.
    fn waits(&self, step: Step, is_over: impl FnOnce(Duration) -> bool) -> bool {
        let since = *self.state.borrow_mut().waits.get_or_insert_with(Instant::now);
        if is_over(since.elapsed()) {
            self.state.borrow_mut().waits = None;
            return false;
        }
        let mut state = self.state.borrow_mut();
        state.steps.push_front(step);
        state.asked = true;
        let wake = self.waker();
        std::thread::spawn(move || {
            std::thread::sleep(TICK);
            wake();
        });
        true
    }

    /// How often the register was watched again.
    pub(crate) fn watches(&self) -> usize {
        self.state.borrow().watches
    }

    /// Does a step; whether somebody has to attend to something now.
    fn take(&self, step: Step) -> bool {
        match step {
            Step::Located => self.write_register(0, 0),
            Step::Elsewhere(vcpu) => self.write_register(vcpu, 0x20_0000),
            Step::Calls(function, vcpus) => {
                let Some(address) = self.trap_in(function) else { return false };
                for &vcpu in &vcpus {
                    self.park(vcpu, address);
                    self.sender.send(Event::Trap { vcpu, address }).unwrap();
                }
                true
            }
            Step::Counts(function, vcpu) => self.stops(vcpu, self.count_down(function, vcpu)),
            Step::Ends(function, vcpu) => self.stops(vcpu, self.count_down_at_end(function, vcpu)),
            Step::Strays(at) => {
                let address = at(self);
                assert!(!self.traps().contains(&address), "{address:#x} is armed");
                self.park(0, address);
                self.sender.send(Event::Stray { vcpu: 0, address }).unwrap();
                true
            }
            Step::Panics(why, crash_kernel) => {
                self.state.borrow_mut().printed = why.map(str::to_owned);
                self.park(0, 0);
                self.sender.send(Event::Panics { vcpu: 0, crash_kernel }).unwrap();
                true
            }
            Step::Comes(at) => {
                let address = at(self);
                if !self.traps().contains(&address) {
                    return false;
                }
                self.park(0, address);
                self.sender.send(Event::Trap { vcpu: 0, address }).unwrap();
                true
            }
            Step::Asks(commands) => {
                for command in commands {
                    let (ours, theirs) = UnixStream::pair().unwrap();
                    let reply = Reply::to(theirs);
                    // Nobody hears it any more when the trace has ended.
                    self.control.send(ControlRequest { command, reply }).unwrap();
                    self.state.borrow_mut().answers.push(ours);
                }
                self.state.borrow_mut().asked = true;
                self.waker()();
                true
            }
            Step::Exits(reason) => {
                self.state.borrow_mut().gone = true;
                self.sender.send(Event::Exit(reason)).unwrap();
                true
            }
            Step::Does(what) => {
                what(self);
                false
            }
            Step::Until(is_so) => {
                let is_over = |waited| {
                    let is_over = is_so(self);
                    assert!(is_over || waited < LONGEST, "it has not come to what is waited for");
                    is_over
                };
                self.waits(step, is_over)
            }
            Step::Runs(time) => self.waits(step, |waited| waited >= time),
            // Each is done, whether it parks somebody or not.
            Step::Together(steps) => {
                steps.into_iter().fold(false, |any, step| self.take(step) | any)
            }
        }
    }

    /// A vCPU stops in a program, if it does.
    fn stops(&self, vcpu: usize, trap: Option<u64>) -> bool {
        let Some(trap) = trap else { return false };
        self.park(vcpu, trap);
        self.sender.send(Event::Trap { vcpu, address: trap }).unwrap();
        true
    }

    /// What the first program of a function's site does that counts down; where it stops, if this is the call.
    fn count_down(&self, function: &str, vcpu: usize) -> Option<u64> {
        let kernel = &self.fake.kernel;
        let (location, returns) = if function == "plain" {
            (CODE + OF_MODULE[0], CODE + OF_MODULE[0] + 5)
        } else {
            let site = kernel.sites()[kernel.site_of(function)?];
            (self.fake.runtime(site.location), self.fake.runtime(return_address(kernel, &site)))
        };
        let &[0xe8, a, b, c, d] = &self.bytes(location, 5)[..] else { return None };
        let program = returns.wrapping_add_signed(i32::from_le_bytes([a, b, c, d]).into());
        // mov r10, [rsp]
        self.count_down_in((program, 4), returns, vcpu)
    }

    /// The same where it returns.
    fn count_down_at_end(&self, function: &str, vcpu: usize) -> Option<u64> {
        let kernel = &self.fake.kernel;
        let site = kernel.site_of(function)?;
        let is_it = |exit: &&Exit| exit.site as usize == site && exit.kind == ExitKind::Return;
        let exit = self.fake.runtime(kernel.exits().unwrap().all().iter().find(is_it)?.address);
        let leads = |from: u64| {
            let &[0xe9, a, b, c, d] = &self.bytes(from, 5)[..] else { return None };
            Some(from.wrapping_add(5).wrapping_add_signed(i32::from_le_bytes([a, b, c, d]).into()))
        };
        let stub = leads(exit)?;
        // mov ecx, what names the exit
        let &[0xb9, a, b, c, d] = &self.bytes(stub, 5)[..] else { return None };
        let named = u32::from_le_bytes([a, b, c, d]);
        // mov r10d, ecx
        self.count_down_in((leads(stub + 5)?, 3), named.into(), vcpu)
    }

    /// The same in a program that loads what tells the site (`told`) by so many bytes.
    fn count_down_in(&self, (program, load): (u64, u64), told: u64, vcpu: usize) -> Option<u64> {
        // `lock dec` of a counter at an address, and from there to behind the jump.
        const DECREMENT: [u8; 5] = [0xf0, 0x48, 0xff, 0x0c, 0x25];
        const TO_LOAD: u64 = 5 + 4 + 2;
        // Of what looks for the beginning of a call as well.
        const LEN: usize = 256;
        let code = self.bytes(program, LEN);
        let at = code.windows(5).position(|bytes| bytes == DECREMENT)?;
        let address = i32::from_le_bytes(code[at + 5..at + 9].try_into().unwrap());
        let counter = i64::from(address).cast_unsigned();
        let place = self.image.tables.translate(&self.fake, counter).unwrap() - ANNEX;
        let place = usize::try_from(place).unwrap();
        let left: u64 = self.fake.annex.slice().read_obj(place).unwrap();
        self.fake.annex.slice().write_obj(left.wrapping_sub(1), place).unwrap();
        let trap = program + at as u64 + TO_LOAD + load;
        assert!(self.traps().contains(&trap), "no trap at {trap:#x} in {code:02x?}");
        self.state.borrow_mut().registers[vcpu].r10 = told;
        (left == 1).then_some(trap)
    }

    /// A vCPU that was sent to a site comes back from there.
    fn self_test(&self, vcpu: usize, start: u64) {
        let kernel = &self.fake.kernel;
        let is_it = |site: &&Site| self.fake.runtime(site.location) == start;
        let site = kernel.sites().iter().find(is_it).unwrap();
        let returns = self.fake.runtime(return_address(kernel, site));
        // What a call pushes and a return takes back.
        let caller = self.fake.read_u64(self.fake.at(self.fake.stack() - 8)).unwrap();
        self.fake.ram().write(self.fake.at(self.fake.stack() - 8), &[0; 8]).unwrap();
        let mut state = self.state.borrow_mut();
        let time = state.clock;
        match state.self_call {
            SelfCall::Forgets | SelfCall::Refused => {}
            SelfCall::Returns | SelfCall::Spoils => self.fake.hit(
                Record {
                    task: self.fake.runtime(self.fake.link("init_task")),
                    caller: caller & 0xffff_ffff,
                    pid: 0,
                    time,
                    site: returns & 0xffff_ffff,
                    program: 0,
                },
                1,
            ),
        }
        if state.self_call == SelfCall::Spoils {
            state.registers[vcpu].rbx ^= 1;
        }
        drop(state);
        self.park(vcpu, returns);
        self.sender.send(Event::Trap { vcpu, address: returns }).unwrap();
    }

    /// Goes on until there is something to attend to.
    fn advance(&self) {
        loop {
            let mut state = self.state.borrow_mut();
            let waits = state.parked.iter().any(Option::is_some) || state.asked || state.gone;
            if waits {
                return;
            }
            if let Some(vcpu) = state.again.pop_first() {
                let address = state.registers[vcpu].rip;
                drop(state);
                if self.traps().contains(&address) {
                    self.park(vcpu, address);
                    return self.sender.send(Event::Trap { vcpu, address }).unwrap();
                }
                continue;
            }
            if let Some((vcpu, _, detour)) = state.away
                && state.registers[vcpu].rip == detour.address
            {
                drop(state);
                return self.self_test(vcpu, detour.address);
            }
            let next = state.steps.pop_front();
            drop(state);
            if self.take(next.unwrap_or(Step::Exits(ExitReason::PowerOff))) {
                return;
            }
        }
    }
}
