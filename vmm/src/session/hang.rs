//! A guest that hangs: one of its CPUs cannot be interrupted any more, or cannot be taken from its task.
//!
//! A kernel keeps interrupts off for microseconds, at worst for milliseconds. Without them nothing wakes
//! a CPU, its clock stands still, no other CPU gets an answer, and no watchdog that needs a timer can
//! say so. So from time to time all vCPUs are stopped for a look at them. When one could not be
//! interrupted, they are looked at more often, until it can be, or it has been too long. A kernel that boots keeps them
//! off until its memory, its clocks and its scheduler are there, which takes as long as the machine is slow.
//!
//! With interrupts on it is what the kernel calls a soft lockup: the CPU is in the kernel, with the same task at every
//! look, which was not taken off in between although another one is to run. Somebody always comes to wait: who deletes
//! timers, counts pages, or waits for a grace period of RCU. A task that computes for hours while nobody else is to run,
//! or that is taken off now and then, is none; nor is a CPU that is idle: `--timeout` ends a guest that is blocked for
//! ever.

use super::arch;
use super::controller::Controller;
use super::vm::{Paused, Vm};
use crate::machine::{MachineError, Registers};
use crate::stream::MarkKind;
use crate::tracer::{Guest, Running, Scheduling};
use std::time::{Duration, Instant};

/// How often a guest is looked at that is well.
const LOOK: Duration = Duration::from_secs(10);
/// How often once it may be one that hangs. A CPU that has interrupts on now and then is found out
/// within a few looks.
const AGAIN: Duration = Duration::from_millis(100);
/// For how much the time between two of these counts at most: a machine that was suspended, or busy
/// with something else, has not run the guest all the time.
const MOST: Duration = Duration::from_millis(200);
/// For how long a task must be held at the least: initcalls and self-tests keep a CPU for seconds. The kernel's own
/// watchdog, where it has one, says so after as long (kernel/watchdog.c).
const HELD: Duration = Duration::from_secs(20);
/// How long a kernel may take to have interrupts on for the first time, at the least.
const BOOTS: Duration = Duration::from_secs(60);
/// What is said to be wrong.
const OFF: &str = "interrupts were off";
const HELD_UP: &str = "others waited for the CPU of a task";
/// vCPUs that the message names.
const NAMED: usize = 8;

/// Where the kernel leaves a CPU for good, with interrupts off (arch/x86/kernel/smpboot.c and
/// process.c): one that was taken offline, and all when it halts or makes room for another kernel.
const LEFT: [&str; 2] = ["play_dead", "stop_this_cpu"];

/// What a look has shown of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// An interrupt would be taken.
    Interruptible,
    /// It would not.
    Stuck,
    /// The guest does not use it.
    Off,
}

/// A task in the kernel while another one is to run: its address, its number, and how often it was taken off.
type Held = (u64, u32, u64);

/// All that a look has shown of a vCPU. Its task is held also while an interrupt is served, with others off.
type Look = (State, Option<Held>);

/// When to look, and what was seen.
pub(super) struct HangWatch {
    /// How long a CPU may be like that; `None`: nobody looks.
    limit: Option<Duration>,
    due: Instant,
    looked: Instant,
    /// The guest's kernel has had interrupts on.
    booted: bool,
    /// For how long each vCPU has been stuck at every look.
    stuck: Vec<Option<Duration>>,
    /// For how long no vCPU could be interrupted.
    none: Option<Duration>,
    /// For how long each vCPU has been held in the same way.
    held: Vec<Option<(Held, Duration)>>,
}

impl HangWatch {
    pub(super) fn new(limit: Option<Duration>, now: Instant) -> Self {
        let due = now + limit.unwrap_or(LOOK).min(LOOK);
        let (stuck, held) = (Vec::new(), Vec::new());
        Self { limit, due, looked: now, booted: false, stuck, none: None, held }
    }

    /// Another kernel of the guest's boots (kexec).
    pub(super) fn boots_anew(&mut self) {
        self.booted = false;
    }

    /// The guest's kernel has booted as far as it does without interrupts, seen or not.
    fn has_booted(&mut self) {
        self.booted = true;
    }

    /// How long interrupts may be off.
    fn off(&self, limit: Duration) -> Duration {
        if self.booted { limit } else { limit.max(BOOTS) }
    }

    /// When to look next, if ever.
    fn due(&self) -> Option<Instant> {
        self.limit.map(|_| self.due)
    }

    /// The guest goes on after a look: only what it runs from now on counts, and it must have run before it is looked
    /// at again. A busy machine takes longer to stop it than it had in between.
    fn went_on(&mut self, now: Instant) {
        self.due += now.saturating_duration_since(self.looked);
        self.looked = now;
    }

    /// A look, for which the guest was asked to stop at that time, has shown this of each vCPU. Returns whether that
    /// is so for too long.
    fn seen(&mut self, looks: &[Look], now: Instant) -> bool {
        let Some(limit) = self.limit else { return false };
        let since = now.saturating_duration_since(self.looked).min(MOST);
        let longer = |is: bool, time: Option<Duration>| {
            is.then(|| time.map_or(Duration::ZERO, |time| time + since))
        };
        self.stuck.resize(looks.len(), None);
        self.held.resize(looks.len(), None);
        let all = self.stuck.iter_mut().zip(&mut self.held);
        for ((time, held), (state, task)) in all.zip(looks) {
            *time = longer(*state == State::Stuck, *time);
            let before = held.filter(|(before, _)| Some(before) == task.as_ref());
            *held =
                task.map(|task| (task, before.map_or(Duration::ZERO, |(_, time)| time + since)));
        }
        let none = looks.iter().all(|(state, _)| *state != State::Interruptible);
        self.booted |= !none;
        self.none = longer(none && !looks.is_empty(), self.none);
        let longest = self.stuck.iter().chain([&self.none]).filter_map(|time| *time).max();
        let held = self.held.iter().filter_map(|held| Some(held.as_ref()?.1)).max();
        self.looked = now;
        let again = longest.is_some() || held.is_some();
        self.due = now + if again { AGAIN } else { LOOK.min(limit) };
        longest >= Some(self.off(limit)) || held >= Some(limit.max(HELD))
    }

    /// What is wrong, for how long, and with which vCPUs: all, if it is only that none could be interrupted.
    fn hung(&self) -> (&'static str, Duration, Vec<usize>) {
        let limit = self.limit.unwrap_or_default();
        let off = self.off(limit);
        let which = |is: &dyn Fn(usize) -> bool| -> Vec<usize> {
            (0..self.stuck.len()).filter(|&vcpu| is(vcpu)).collect()
        };
        let stuck = which(&|vcpu| self.stuck[vcpu] >= Some(off));
        let held = limit.max(HELD);
        let all_held = which(&|vcpu| self.held[vcpu].is_some_and(|(_, time)| time >= held));
        match (stuck.is_empty(), all_held.is_empty()) {
            (false, _) => (OFF, off, stuck),
            (true, false) => (HELD_UP, held, all_held),
            (true, true) => (OFF, off, which(&|_| true)),
        }
    }
}

impl Controller {
    /// When the guest is to be looked at.
    pub(super) fn hang_deadline(&self) -> Option<Instant> {
        self.hang.due()
    }

    /// Looks at the guest if it is time. Returns what is to be said of one that hangs.
    pub(super) fn look_for_hang(&mut self, machine: &dyn Vm) -> Option<String> {
        if self.hang.due().is_none_or(|due| Instant::now() < due) {
            return None;
        }
        // One that waits for room waits for us; one that has panicked has its own deadline.
        let excused = machine.room().wanted_for().is_some() || self.verdict.deadline().is_some();
        let scheduling = self.verdict.scheduling(&self.kernel);
        let asked = Instant::now();
        let paused = if excused { None } else { machine.pause().ok() };
        let Some(paused) = paused else {
            self.hang.seen(&[], asked);
            return None;
        };
        let ram = machine.ram();
        // It may hang since before the first look.
        if let Some(image) = self.verdict.image
            && matches!(self.has_booted(ram, &image), Ok(Some(true)))
        {
            self.hang.has_booted();
        }
        let state = |vcpu| self.state(ram, &paused, vcpu, scheduling.as_ref());
        let vcpus: Vec<_> = (0..paused.vcpus()).map(state).collect();
        let looks: Vec<Look> = vcpus.iter().map(|(look, _)| *look).collect();
        let hangs = self.hang.seen(&looks, asked);
        let message = hangs.then(|| self.hang_message(&vcpus));
        // Whoever measures how long the guest takes must know. Nothing of what is traced has changed, as
        // other pauses say: calls go on.
        self.count_pause(paused, MarkKind::Note, "looked whether the guest hangs".to_owned());
        self.hang.went_on(Instant::now());
        message
    }

    /// What a vCPU is like, and where it stands.
    fn state(
        &self,
        ram: &dyn Guest,
        paused: &Paused<'_>,
        vcpu: usize,
        scheduling: Option<&Scheduling>,
    ) -> (Look, Option<u64>) {
        let look = || -> Result<Option<Registers>, MachineError> {
            if paused.is_stopped(vcpu)? { Ok(None) } else { paused.registers(vcpu).map(Some) }
        };
        match look() {
            // One that cannot be seen may be well.
            Err(_) => ((State::Interruptible, None), None),
            Ok(None) => ((State::Off, None), None),
            Ok(Some(registers)) => {
                let at = arch::program_counter(&registers);
                let state = match is_interruptible(ram, &registers) {
                    true => State::Interruptible,
                    // Where it is not known where the kernel is, it is not known who is left.
                    false if self.verdict.image.is_none() => State::Off,
                    false if LEFT.iter().any(|name| self.place(at).contains(name)) => State::Off,
                    false => State::Stuck,
                };
                let held = scheduling.and_then(|it| held(ram, &registers, it));
                ((state, held), Some(at))
            }
        }
    }

    fn hang_message(&self, vcpus: &[(Look, Option<u64>)]) -> String {
        let started = vcpus.iter().enumerate().filter_map(|(vcpu, (_, at))| Some((vcpu, (*at)?)));
        let (what, time, all) = self.hang.hung();
        let (hung, others): (Vec<_>, Vec<_>) = started.partition(|(vcpu, _)| all.contains(vcpu));
        let name = |&(vcpu, at): &(usize, u64)| {
            let place = self.place(at);
            match vcpus.get(vcpu) {
                // Who is held is told where that is what is wrong.
                Some(((_, Some((_, pid, _))), _)) if what == HELD_UP && all.contains(&vcpu) => {
                    format!("vCPU {vcpu}, task {pid} in {place}")
                }
                _ => format!("vCPU {vcpu} in {place}"),
            }
        };
        let list = |all: &[(usize, u64)]| {
            let mut places: Vec<String> = all.iter().take(NAMED).map(name).collect();
            let more = all.len().saturating_sub(NAMED);
            places.extend((more > 0).then(|| format!("and {more} more")));
            places.join(", ")
        };
        let mut text = format!("{what} for {} s: {}", time.as_secs(), list(&hung));
        if !others.is_empty() {
            text += &format!("; the others: {}", list(&others));
        }
        text
    }

    /// A run-time address as the kernel prints it.
    pub(super) fn place(&self, address: u64) -> String {
        let Some(image) = &self.verdict.image else { return format!("{address:#x}") };
        let link = address.wrapping_sub(image.slide);
        let module = self.functions.values().find(|function| {
            link.checked_sub(function.site.entry).is_some_and(|at| at < function.size.into())
        });
        if let Some(function) = module {
            let offset = link - function.site.entry;
            return format!("{}+{offset:#x} [{}]", function.name(), function.module);
        }
        match self.kernel.symbols().lookup(link) {
            Some((name, start)) => format!("{name}+{:#x}", link - start),
            None => format!("{address:#x}"),
        }
    }
}

/// The task of a vCPU, if it is held.
fn held(ram: &dyn Guest, registers: &Registers, scheduling: &Scheduling) -> Option<Held> {
    let tables = arch::tables(registers);
    let running = scheduling.look(arch::task_base(registers), |address, out| {
        // Words do not cross pages.
        ram.read(tables.translate(ram, address).ok()?, out).ok()
    });
    of_running(arch::program_counter(registers), running?)
}

fn of_running(at: u64, running: Running) -> Option<Held> {
    let Running { task, pid, switches, is_wanted } = running;
    // In user mode a task can be taken off at any time, and who is idle waits for others itself.
    (is_wanted && pid != 0 && at >> 63 != 0).then_some((task, pid, switches))
}

fn is_interruptible(ram: &dyn Guest, registers: &Registers) -> bool {
    let tables = arch::tables(registers);
    arch::is_interruptible(registers, |address| {
        // In two halves: instructions lie on 2-byte boundaries, and the next page may be anywhere.
        let half = |address| {
            let physical = tables.translate(ram, address).ok()?;
            let mut bytes = [0; 2];
            ram.read(physical, &mut bytes).ok()?;
            Some(u32::from(u16::from_le_bytes(bytes)))
        };
        Some(half(address)? | half(address.wrapping_add(2))? << 16)
    })
}

#[cfg(test)]
mod tests {
    use super::State::{Interruptible, Off, Stuck};
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);
    const HOUR: Duration = Duration::from_secs(3600);

    /// Looks whenever it is time, for an hour: when it was too long, and after how many looks.
    fn watch(looks_at: impl Fn(u32) -> Vec<Look>) -> (Option<HangWatch>, u32) {
        let begun = Instant::now();
        let mut watch = HangWatch::new(Some(LIMIT), begun);
        let mut looks = 0;
        loop {
            let now = watch.due().unwrap();
            if now > begun + HOUR {
                return (None, looks);
            }
            let hangs = watch.seen(&looks_at(looks), now);
            looks += 1;
            if hangs {
                let time = now.duration_since(begun);
                assert!(time >= LIMIT && time <= LIMIT + LOOK, "{time:?}");
                return (Some(watch), looks);
            }
        }
    }

    /// The same of tasks that nobody waits for.
    fn only(states: impl Fn(u32) -> Vec<State>) -> (Option<HangWatch>, u32) {
        watch(|look| states(look).into_iter().map(|state| (state, None)).collect())
    }

    // A verdict on a guest that lives ends somebody's run; none on one that is dead lets it go on
    // for ever.
    #[test]
    fn a_guest_hangs_when_a_cpu_is_stuck_at_every_look() {
        let (watch_one, _) = only(|_| vec![Interruptible, Stuck]);
        assert_eq!(watch_one.unwrap().hung(), (OFF, LIMIT, vec![1]));
        // None that runs is as good as one that is stuck.
        let all = only(|_| vec![Off, Off]).0.unwrap();
        assert_eq!(all.hung(), (OFF, LIMIT, vec![0, 1]));
        // A guest that is well costs a pause every few seconds.
        let (found, looks) = only(|_| vec![Interruptible, Off]);
        assert!(found.is_none() && looks == 360, "{looks}");
        // One that has interrupts off nearly all the time is none that hangs.
        let now_and_then = |look| if look % 100 == 0 { Interruptible } else { Stuck };
        let (found, looks) = only(|look| vec![now_and_then(look)]);
        assert!(found.is_none() && looks > 15_000, "{looks}");
        // Nor is one whose CPUs take turns.
        let turns =
            |look| if look % 2 == 0 { [Stuck, Interruptible] } else { [Interruptible, Stuck] };
        assert!(only(|look| turns(look).to_vec()).0.is_none());
    }

    // A guest that computes is none that hangs, and one whose CPU nobody gets any more would run for ever.
    #[test]
    fn a_guest_hangs_when_a_task_is_held_at_every_look() {
        const WELL: Look = (Interruptible, None);
        let held = |task, switches| Some((task, 1, switches));
        let (found, _) = watch(|_| vec![WELL, (Interruptible, held(7, 40))]);
        assert_eq!(found.unwrap().hung(), (HELD_UP, LIMIT, vec![1]));
        // Now and then it is interrupted.
        let state = |look| if look % 3 == 0 { Stuck } else { Interruptible };
        let (found, _) = watch(|look| vec![(state(look), held(7, 40)), WELL]);
        assert_eq!(found.unwrap().hung(), (HELD_UP, LIMIT, vec![0]));
        // It was taken off in between, another one was there, or nobody waited.
        let switched = |look: u32| held(7, u64::from(look / 100));
        let other = |look: u32| held(u64::from(look % 2), 40);
        let unwanted = |look: u32| if look.is_multiple_of(100) { None } else { held(7, 40) };
        for task in [&switched as &dyn Fn(u32) -> Option<Held>, &other, &unwanted] {
            assert!(watch(|look| vec![(Interruptible, task(look)), WELL]).0.is_none());
        }
        // Interrupts come first: without them nothing else happens, either.
        let both = watch(|_| vec![(Interruptible, held(7, 40)), (Stuck, held(8, 40))]).0.unwrap();
        assert_eq!(both.hung(), (OFF, LIMIT, vec![1]));
        // A short limit is for interrupts that are off.
        let now = Instant::now();
        let mut short = HangWatch::new(Some(Duration::from_secs(1)), now);
        let times = (0..150).map(|look| now + look * MOST);
        let look = [(Interruptible, held(7, 40))];
        let when: Vec<_> = times.filter(|&at| short.seen(&look, at)).collect();
        assert_eq!(when.first(), Some(&(now + HELD)));
    }

    // On a slow machine a kernel boots for seconds before it has interrupts on, which is no hang; also the next one.
    #[test]
    fn a_kernel_that_boots_has_interrupts_off_for_longer() {
        const SHORT: Duration = Duration::from_secs(4);
        let now = Instant::now();
        let mut watch = HangWatch::new(Some(SHORT), now);
        let mut at = now;
        let mut stuck_for = |watch: &mut HangWatch, state| {
            let begun = at;
            while !watch.seen(&[(state, None), (Off, None)], at) {
                at += MOST;
            }
            let time = at.duration_since(begun);
            assert_eq!(watch.hung().1, time);
            at += MOST;
            assert!(!watch.seen(&[(Interruptible, None), (Off, None)], at));
            at += MOST;
            time
        };
        // Also where it is not known which CPU is stuck.
        assert_eq!(stuck_for(&mut watch, Off), BOOTS);
        assert_eq!(stuck_for(&mut watch, Stuck), SHORT);
        watch.boots_anew();
        assert_eq!(stuck_for(&mut watch, Stuck), BOOTS);
        // One that hung before anybody looked.
        watch.boots_anew();
        watch.has_booted();
        assert_eq!(stuck_for(&mut watch, Stuck), SHORT);
        assert_eq!(stuck_for(&mut watch, Off), SHORT);
    }

    // Who is idle, or in user mode, gives its CPU up by itself.
    #[test]
    fn a_task_is_held_in_the_kernel_alone() {
        const KERNEL: u64 = 0xffff_ffff_8100_0000;
        let running = Running { task: 7, pid: 1, switches: 40, is_wanted: true };
        assert_eq!(of_running(KERNEL, running), Some((7, 1, 40)));
        assert_eq!(of_running(0x40_1000, running), None);
        for other in [Running { pid: 0, ..running }, Running { is_wanted: false, ..running }] {
            assert_eq!(of_running(KERNEL, other), None);
        }
    }

    // A guest that was not run has had no time to be interrupted.
    #[test]
    fn time_in_which_nobody_looked_counts_little() {
        let now = Instant::now();
        let mut watch = HangWatch::new(Some(LIMIT), now);
        assert!(!watch.seen(&[(Stuck, None)], now));
        assert!(!watch.seen(&[(Stuck, None)], now + 10 * LIMIT));
        assert_eq!((watch.stuck[0], watch.none), (Some(MOST), Some(MOST)));
        // Nor is anything known of it when it could not be stopped.
        assert!(!watch.seen(&[], now + 11 * LIMIT));
        assert!(!watch.seen(&[(Stuck, None)], now + 12 * LIMIT));
        assert_eq!((watch.stuck[0], watch.none), (Some(Duration::ZERO), Some(Duration::ZERO)));
    }

    // On a machine that takes seconds to stop a guest, looks would otherwise follow each other without a moment in which
    // the guest runs, and a section of its kernel with interrupts off would never end.
    #[test]
    fn what_a_look_takes_counts_nothing() {
        let now = Instant::now();
        let mut watch = HangWatch::new(Some(LIMIT), now);
        let (mut at, mut looks) = (now, 0_u32);
        loop {
            at = at.max(watch.due().unwrap());
            let hangs = watch.seen(&[(Stuck, None)], at);
            looks += 1;
            at += Duration::from_secs(3);
            watch.went_on(at);
            assert_eq!(watch.due(), Some(at + AGAIN));
            if hangs {
                break;
            }
        }
        let all = LIMIT.as_millis() / AGAIN.as_millis();
        assert_eq!(u128::from(looks), all + 1, "each has counted for the time before it");
    }

    #[test]
    fn nobody_looks_who_was_not_asked_to() {
        let mut watch = HangWatch::new(None, Instant::now());
        assert!(watch.due().is_none() && !watch.seen(&[(Stuck, None)], Instant::now()));
        let short = HangWatch::new(Some(Duration::from_secs(2)), Instant::now());
        assert!(short.due() <= Some(Instant::now() + Duration::from_secs(2)));
    }
}
