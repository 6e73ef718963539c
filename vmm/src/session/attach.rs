//! When the controller attaches, what it holds, when it lets go.
//!
//! ```text
//! boot ─ (x86-64: write of MSR_LSTAR) ─► it is known where the kernel is; tripwire
//!                              on early_trace_init
//!      ─ early_trace_init ───► ftrace_init is done: annex, exits rewritten (riscv64), sites
//!                              (or, with --from, a tripwire on that function); tripwire
//!                              on ftrace_free_init_mem
//!      ─ (x86-64) ───────────► stubs of exits are made while the guest runs
//!      ─ rest_init (x86-64) ─► alternatives are patched: returns can be held, programs end
//!                              as the kernel's own code does
//!      ─ ftrace_free_init_mem► sites of .init.text are given back
//!      ─ modules come and go ► their sites are taken, and given back: [`super::modules`]
//!      ─ machine_kexec ──────► the kernel makes room for another: all sites are given back; if that is
//!                              the same, all begins anew: [`super::anew`]
//!      ─ end ────────────────► the same
//! ```
//!
//! Tripwires of [`super::verdict`] tell how the guest ends, from the attach on.
//!
//! Whatever goes wrong with tracing is a note, not an end: the guest lives on.

use super::SessionError;
use super::arch;
use super::controller::{Controller, Output, Stage};
use super::plan::Plan;
use super::room;
use super::tripwires::Purpose;
use super::vm::{Paused, Vm};
use crate::kernel::Exits;
use crate::machine::{MachineError, TRAP_INSTRUCTION};
use crate::relay::{self, ExitReader, Relay, Setup, Targets};
use crate::stream::{Context, Header, Initcall, MarkKind};
use crate::tracer::{Attachment, ExitPlan, Guest, Image, Options};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;

/// Called right after `ftrace_init` (init/main.c).
const AFTER_FTRACE_INIT: &str = "early_trace_init";
/// Called before `.init.text` is freed (init/main.c, `kernel_init`), the best first.
const BEFORE_FREE_INIT: [&str; 2] = ["ftrace_free_init_mem", "free_initmem"];
/// Called last before another kernel is entered, also after a panic (kernel/kexec_core.c).
const BEFORE_KEXEC: &str = "machine_kexec";

impl Controller {
    /// The kernel is in memory, and no vCPU has run.
    pub(super) fn loaded(&mut self, machine: &dyn Vm) {
        if self.tracing.is_empty() {
            return;
        }
        let located = machine.pause().map_err(anyhow::Error::from).and_then(|paused| {
            let image = arch::loaded(&self.kernel, &paused.registers(0)?)?;
            let stage = image.map(|image| self.wait(machine, &paused, image)).transpose();
            arch::code_changed();
            stage
        });
        match located {
            Ok(Some(stage)) => self.stage = stage,
            Ok(None) => {}
            Err(error) => self.give_up(&error),
        }
    }

    /// The guest has told where one of its symbols is.
    pub(super) fn entry_known(&mut self, machine: &dyn Vm, vcpu: usize, address: u64) {
        if !matches!(self.stage, Stage::Unknown) || self.tracing.is_empty() {
            return;
        }
        let located = machine.pause().map_err(anyhow::Error::from).and_then(|paused| {
            let image = self.locate(machine, &paused, vcpu, arch::WATCHED_SYMBOL, address)?;
            self.check_next(machine.ram(), vcpu, &image)?;
            let stage = self.wait(machine, &paused, image)?;
            self.account(paused, MarkKind::Pause, "kernel located".into());
            Ok(stage)
        });
        match located {
            Ok(stage) => self.stage = stage,
            Err(error) if self.kernels.waits() => {
                self.next_is_untraced(&error);
                self.stage = Stage::Off;
            }
            Err(error) => self.give_up(&error),
        }
    }

    fn locate(
        &self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        symbol: &str,
        address: u64,
    ) -> anyhow::Result<Image> {
        let tables = arch::tables(&paused.registers(vcpu)?);
        Ok(Image::locate(machine.ram(), &self.kernel, symbol, address, tables)?)
    }

    /// Makes the guest stop after `ftrace_init`.
    fn wait(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        image: Image,
    ) -> anyhow::Result<Stage> {
        self.lay(Purpose::Attach, machine, paused, &image, AFTER_FTRACE_INIT)?;
        Ok(Stage::Located { image })
    }

    /// A tripwire was hit; the vCPU stands at it.
    ///
    /// # Errors
    /// When vCPUs do not stop, and the guest cannot go on without what the tripwire is for.
    pub(super) fn trapped(
        &mut self,
        machine: &dyn Vm,
        vcpu: usize,
        address: u64,
    ) -> Result<(), SessionError> {
        let attended = match self.tripwires.at(address) {
            Some(Purpose::Attach) => self.ftrace_is_ready(machine, vcpu, address)?,
            Some(Purpose::From) => self.awaited_call_comes(machine, address)?,
            Some(Purpose::Settle) => self.alternatives_are_patched(machine, address)?,
            Some(Purpose::FreeInit) => self.init_is_freed(machine, address)?,
            Some(Purpose::Leave) => self.kernel_leaves(machine)?,
            Some(Purpose::End(sign)) => self.end_told(machine, vcpu, address, sign),
            Some(Purpose::Update { moment, next }) => {
                self.guest_updates(machine, vcpu, (moment, next))
            }
            Some(Purpose::Tracepoints { moment, next }) => {
                self.guest_changes_tracepoints(machine, vcpu, (moment, next))
            }
            Some(Purpose::Module { moment, next }) => {
                self.module_told(machine, vcpu, (moment, next))
            }
            Some(Purpose::Program(stop)) => self.triggered(machine, vcpu, address, stop),
            Some(Purpose::SelfTest(reached)) => self.self_tested(machine, vcpu, reached),
            None => false,
        };
        if !attended {
            self.unattended(machine, address)?;
        }
        Ok(())
    }

    /// `ftrace_init` is done: attaches. Whether this was attended to, as with all of these.
    fn ftrace_is_ready(
        &mut self,
        machine: &dyn Vm,
        vcpu: usize,
        address: u64,
    ) -> Result<bool, MachineError> {
        let Stage::Located { image } = self.stage else { return Ok(false) };
        let plan = self.planned();
        let paused = machine.pause()?;
        self.stage = Stage::Off;
        self.disarm(machine, &paused, address);
        match self.attach(machine, &paused, vcpu, image, address, &plan) {
            Ok(stage) => self.stage = stage,
            Err(error) => self.give_up(&error),
        }
        if matches!(self.stage, Stage::Testing(_)) {
            self.count_pause(paused, MarkKind::Pause, "self-test".into());
        } else {
            self.account_attach(paused);
        }
        Ok(true)
    }

    /// The function of `--from` is called: takes the sites.
    fn awaited_call_comes(&mut self, machine: &dyn Vm, address: u64) -> Result<bool, MachineError> {
        // While the guest still runs.
        self.planned();
        let paused = machine.pause()?;
        let stage = std::mem::replace(&mut self.stage, Stage::Off);
        let Stage::Attached { mut attachment, from: Some(site) } = stage else {
            self.stage = stage;
            return Ok(false);
        };
        self.disarm(machine, &paused, address);
        let enabled = attachment
            .disarm(machine.ram(), site)
            .map_err(anyhow::Error::from)
            .and_then(|()| self.enable(machine, &mut attachment));
        self.stage = Stage::Attached { attachment, from: None };
        if let Err(error) = enabled {
            self.note(format!("not traced: {error}"));
        }
        let text = format!("{} sites", self.summary.sites.patched);
        self.account(paused, MarkKind::Attach, text);
        Ok(true)
    }

    /// Returns can be held from now on.
    fn alternatives_are_patched(
        &mut self,
        machine: &dyn Vm,
        address: u64,
    ) -> Result<bool, MachineError> {
        let plan = self.planned();
        let paused = machine.pause()?;
        let Some((mut attachment, from)) = self.take_attached() else { return Ok(false) };
        self.disarm(machine, &paused, address);
        let ram = machine.ram();
        let mut settled = attachment.settle(ram, &self.kernel).map_err(Into::into);
        if settled.is_ok() {
            self.look_at_fixed_calls(ram, &attachment);
        }
        let waits = !plan.exits.is_empty() || self.tracing.waits_for_alternatives();
        if from.is_none() && waits {
            // Nobody has seen ends before.
            let ticks = paused.tsc(0).unwrap_or(0);
            attachment.counters().begin_calls(plan.choosy(), ticks);
            settled = settled.and_then(|()| self.enable(machine, &mut attachment));
        }
        if let Err(error) = settled {
            self.note(format!("returns and switches are not traced: {error}"));
        }
        let mut text = format!("{} exits", attachment.held_exits());
        if attachment.held_switches() > 0 {
            let held = attachment.held_switches();
            let _ = write!(text, ", {held} switches of interrupts and preemption");
        }
        self.watch_for_kexec(machine, &paused, attachment.image());
        self.stage = Stage::Attached { attachment, from };
        self.account(paused, MarkKind::Filter, text);
        Ok(true)
    }

    /// Finds out what static calls for security modules are in this guest, if somebody looks for ends of calls that have gone on
    /// there: where such a module is called last, a function is left for it.
    pub(super) fn look_at_fixed_calls(&mut self, ram: &dyn Guest, attachment: &Attachment) {
        if self.tracing.directed.is_some() || !self.tracing.wants_aid() || !attachment.is_settled()
        {
            return;
        }
        let before = self.planned();
        let calls = self.kernel.exits().map(Exits::fixed_calls).unwrap_or_default();
        let jumps = calls.iter().filter(|&&(_, address)| !attachment.is_return(ram, address));
        let directed: BTreeSet<u32> = jumps.map(|&(site, _)| site).collect();
        if !directed.is_empty() {
            let thought = self.tracing.jumping(&self.kernel);
            self.tracing.directed = Some(directed);
            let found = self.tracing.jumping(&self.kernel);
            let mut news = found.iter().filter(|(site, _)| !thought.contains_key(site));
            if let Some((&site, target)) = news.next() {
                let target = self.kernel.symbols().primary_at(*target).unwrap_or("another one");
                self.note_once(format!(
                    "calls of {} functions may have no end: they go on in one that may be left for a security module (such as {} in {target})",
                    1 + news.count(),
                    self.name(site)
                ));
            }
        } else {
            self.tracing.directed = Some(directed);
        }
        self.tracing_changed();
        if *self.planned() == *before {
            self.plan = Some(before);
        }
    }

    /// Sites of `.init.text` are given back.
    fn init_is_freed(&mut self, machine: &dyn Vm, address: u64) -> Result<bool, MachineError> {
        let paused = machine.pause()?;
        let Some((mut attachment, from)) = self.take_attached() else { return Ok(false) };
        self.disarm(machine, &paused, address);
        let text = match attachment.release_init(machine.ram()) {
            Ok(restored) => format!("{} sites of .init.text given back", restored.sites),
            Err(error) => {
                self.note(error.to_string());
                String::new()
            }
        };
        // Late initcalls are over: from now on it goes evenly.
        self.look_at_clock(machine, &paused, attachment.image());
        self.stage = Stage::Attached { attachment, from };
        // Nobody can call these any more: nothing is missed of them.
        self.count_pause(paused, MarkKind::Note, text);
        Ok(true)
    }

    /// Lays a tripwire where the kernel leaves for another one; none in kernels that cannot.
    fn watch_for_kexec(&mut self, machine: &dyn Vm, paused: &Paused<'_>, image: &Image) {
        let laid = self.lay(Purpose::Leave, machine, paused, image, BEFORE_KEXEC);
        if let Err(error) = laid {
            log::debug!("kexec is not seen: {error}");
        }
    }

    /// The pause ends in which the guest was to be attached to: it is said only if it was.
    pub(super) fn account_attach(&mut self, paused: Paused<'_>) {
        if matches!(self.stage, Stage::Attached { .. }) {
            let text = format!("{} sites", self.summary.sites.patched);
            self.account(paused, MarkKind::Attach, text);
        } else {
            self.count_pause(paused, MarkKind::Pause, "not traced".into());
        }
    }

    fn attach(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        image: Image,
        stopped: u64,
        plan: &Plan,
    ) -> anyhow::Result<Stage> {
        let ram = machine.ram();
        // By now the kernel has its own page tables.
        let entry = self.kernel.symbols().address(AFTER_FTRACE_INIT).unwrap_or(0);
        let entry = image.runtime(entry);
        let image = self.locate(machine, paused, vcpu, AFTER_FTRACE_INIT, entry)?;
        self.begin_anew(paused, image.slide)?;
        let annex = machine.annex().ok_or_else(|| anyhow::anyhow!("the machine has no annex"))?;
        let sites = self.tracing.returning();
        let of_modules = self.tracing.may_want_exits();
        // Another one when the tracers have changed since.
        let fits = |plan: &ExitPlan| plan.sites() == sites && plan.is_of_modules() == of_modules;
        let exit_plan = match self.exit_plan.take().filter(fits) {
            Some(plan) => plan,
            None => ExitPlan::new(&self.kernel, &sites, of_modules)?,
        };
        let (overflow, cpus) = (self.tracing.overflow, machine.vcpus() as u64);
        let clock_hz = machine.clock_hz();
        let buffer = self.tracing.buffer;
        let options = Options { overflow, cpus, buffer, clock_hz, returns: &exit_plan };
        let attachment = Attachment::new(ram, &self.kernel, image, annex, options)?;
        let mut attachment = attachment.with_room(std::mem::take(&mut self.room));
        if let Some(past) = self.kernels.past.take() {
            attachment = attachment.with_past(past);
        }
        attachment.stop_by(&TRAP_INSTRUCTION);
        if let Some(follow) = &self.tracing.follow {
            attachment.follow()?;
            follow.note_strangers(&self.kernel, &mut attachment);
        }
        self.share(machine, paused, &mut attachment);
        let attachment = Box::new(attachment);
        match self.begin_self_test(machine, paused, vcpu, attachment, stopped, plan)? {
            Ok(testing) => Ok(Stage::Testing(Box::new(testing))),
            Err(attachment) => self.begin_tracing(machine, paused, vcpu, attachment, stopped),
        }
    }

    /// All that is needed is in the guest: starts the relay and takes sites. The vCPU goes on at
    /// `stopped`.
    pub(super) fn begin_tracing(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        mut attachment: Box<Attachment>,
        stopped: u64,
    ) -> anyhow::Result<Stage> {
        // Not before: triggers may have been added in the self-test.
        self.set_triggers(&mut attachment);
        match self.take_sites(machine, paused, vcpu, &mut attachment, stopped) {
            Ok(from) => {
                self.tell_anew();
                Ok(Stage::Attached { attachment, from })
            }
            Err(error) => {
                self.disarm_ways(machine, paused);
                self.give_back(machine, paused, attachment);
                Err(error)
            }
        }
    }

    fn take_sites(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        attachment: &mut Attachment,
        stopped: u64,
    ) -> anyhow::Result<Option<usize>> {
        let (ram, image) = (machine.ram(), *attachment.image());
        paused.set_rip(vcpu, attachment.resume(ram, stopped)?)?;
        self.watch_tracepoints(machine, paused, attachment);
        self.watch_modules(machine, paused, attachment);
        match self.stream.take() {
            Some(output) => self.begin_stream(machine, paused, attachment, output)?,
            None => self.go_on(attachment)?,
        }
        let from = match self.tracing.from {
            None => {
                self.enable(machine, attachment)?;
                None
            }
            Some(site) => match attachment.arm(ram, &self.kernel, site, &TRAP_INSTRUCTION)? {
                Ok(address) => {
                    self.tripwires.arm(Purpose::From, paused, address);
                    Some(site)
                }
                Err(reason) => anyhow::bail!("--from {}: {reason}", self.name(site)),
            },
        };
        // After the exits, which are found by what the image has there.
        self.watch_the_end(machine, paused, image);
        let settles_at = Attachment::settles_at(&self.kernel);
        let mut lay = |purpose, name| self.lay(purpose, machine, paused, &image, name);
        // Always: a live filter may want functions of .init.text later.
        let is_seen = BEFORE_FREE_INIT.iter().any(|name| lay(Purpose::FreeInit, name).is_ok());
        let settles = settles_at.map(|name| lay(Purpose::Settle, name)).transpose();
        if !is_seen {
            // Without it we could not know when that memory is gone.
            let restored = attachment.leave_init(ram)?;
            if restored.sites > 0 {
                self.note("functions of .init.text are not traced: no tripwire".into());
            }
        }
        let settles = settles.unwrap_or_else(|error| {
            if self.tracing.waits_for_alternatives() {
                self.note(format!("returns and switches are not traced: {error}"));
            }
            None
        });
        // Else then, since alternatives may be in that code.
        if settles.is_none() {
            self.watch_for_kexec(machine, paused, &image);
        }
        Ok(from)
    }

    fn begin_stream(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        attachment: &Attachment,
        output: Output,
    ) -> anyhow::Result<()> {
        let image = attachment.image();
        let Output { primary, joins, console, exits } = output;
        exits.iter().for_each(ExitReader::begin);
        let resolve = relay::resolver(&self.kernel, image.slide);
        let setup = Setup {
            header: self.header(machine, image.slide),
            stream: self.hub(machine, primary, resolve)?,
            joins,
            readers: attachment.readers(),
            exits,
            tasks: attachment.tasks(),
            memory: machine.shared_ram(),
            kernel: Arc::clone(&self.kernel),
            targets: Targets::default(),
            ticks: paused.tsc(0)?,
            console,
            waiting: room::waiting(machine, self.tracing.overflow),
        };
        self.relay = Some(Relay::start(setup, machine.waker())?);
        Ok(())
    }

    pub(super) fn header(&self, machine: &dyn Vm, slide: u64) -> Header {
        let mut header = Header {
            arch: std::env::consts::ARCH.to_owned(),
            clock: arch::CLOCK.to_owned(),
            clock_hz: machine.clock_hz(),
            // A guest's clock starts at 0 with the machine.
            clock_start: 0,
            release: self.kernel.release().to_owned(),
            vcpus: u32::try_from(machine.vcpus()).unwrap_or(0),
            slide,
            address_base: Header::TOP_4_GIB,
            vmtrace_version: env!("CARGO_PKG_VERSION").to_owned(),
            extra: self.tracing.context.then(Context::header).into_iter().collect(),
        };
        if self.tracing.calls_initcalls(&self.kernel) {
            let calls = self.kernel.initcalls();
            header.add_initcalls(calls.iter().map(|call| Initcall {
                address: call.address.wrapping_add(slide),
                name: call.name,
                level: call.level,
            }));
        }
        header
    }

    /// Gives every site back, whether the guest lives or is gone.
    pub(super) fn detach(&mut self, machine: &dyn Vm) {
        if let Err(error) = self.give_all_back(machine) {
            self.stage = Stage::Off;
            self.note(format!("sites were not given back: {error}"));
        }
    }

    /// As [`Controller::detach`], for who cannot go on without.
    ///
    /// # Errors
    /// When vCPUs do not stop: all is as it was.
    pub(super) fn give_all_back(&mut self, machine: &dyn Vm) -> Result<(), MachineError> {
        let paused = machine.pause()?;
        // Whoever waits is told that the trace has ended.
        self.waiting.clear();
        match std::mem::replace(&mut self.stage, Stage::Off) {
            Stage::Unknown if !self.tracing.is_empty() => {
                let symbol = arch::WATCHED_SYMBOL;
                if self.next_never_told(&format!("it said where it is ({symbol})")) {
                    return Ok(());
                }
                self.note(format!(
                    "not traced: the guest ended before it said where it is ({symbol}), so \
                     before ftrace_init"
                ));
            }
            Stage::Located { .. } => {
                self.disarm_for(machine, &paused, Purpose::Attach);
                if self.next_never_told(AFTER_FTRACE_INIT) {
                    return Ok(());
                }
                self.note(format!("not traced: the guest ended before {AFTER_FTRACE_INIT}"));
            }
            Stage::Testing(testing) => self.abandon_self_test(machine, &paused, *testing),
            Stage::Attached { attachment, from } => {
                if let Some(site) = from {
                    let name = self.name(site);
                    self.note(format!("not traced: {name} was never called"));
                }
                self.disarm_ways(machine, &paused);
                self.look_at_clock(machine, &paused, attachment.image());
                if let Some(text) = self.give_back(machine, &paused, attachment) {
                    self.account(paused, MarkKind::Detach, text);
                }
            }
            Stage::Unknown | Stage::Off => {}
        }
        Ok(())
    }

    /// Takes away the tripwires of an attached guest that lead on from there; those of its end stay. Before sites are
    /// given back: one may be on a function that is held.
    fn disarm_ways(&mut self, machine: &dyn Vm, paused: &Paused<'_>) {
        for purpose in [Purpose::From, Purpose::FreeInit, Purpose::Settle, Purpose::Leave] {
            self.disarm_for(machine, paused, purpose);
        }
    }

    /// Gives all back that is held; what there is to tell of it.
    pub(super) fn give_back(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        mut attachment: Box<Attachment>,
    ) -> Option<String> {
        self.tripwires.disarm_attachment(machine.ram(), paused);
        self.counters = Some(attachment.counters().clone());
        match attachment.release_all(machine.ram(), &self.kernel) {
            Ok(restored) => {
                self.kernels.past = Some(attachment.into_past());
                self.foreign(&restored.foreign);
                Some(format!("{} sites given back", restored.sites))
            }
            Err(error) => {
                let what = format!("not all sites were given back: {error}");
                self.note(what.clone());
                self.anomaly.found(what);
                None
            }
        }
    }
}
