//! The guest goes on with another kernel (kexec). If that runs the same image, tracing begins anew, as a new part of
//! the same stream. It may run elsewhere (KASLR): the stream has the addresses of the first one (`relay/slides.rs`).
//!
//! ```text
//! machine_kexec ──► all is given back; the register by which a kernel says where it is is watched again
//!      ─ its write ───────► the given image? Then a tripwire as at the first boot
//!      ─ early_trace_init ► what the old kernel has left in the annex is taken, and the annex wiped;
//!                           annex, self-test and sites as at the first boot
//! ```

use super::controller::{Controller, Stage};
use super::mark;
use super::vm::{Paused, Vm};
use crate::deadline;
use crate::machine::MachineError;
use crate::relay::{self, Left, SNAPSHOT_TIME};
use crate::serve::ControlRequest;
use crate::stream::MarkKind;
use crate::tracer::{Attachment, Guest, Image, Past};
use anyhow::{anyhow, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// What is known of the guest's kernels.
#[derive(Default)]
pub(super) struct Kernels {
    /// One has left, and it is not known yet whether the next one can be traced.
    waits: bool,
    /// The slide of the first one, once it has left.
    first: Option<u64>,
    /// Kernels that were traced after the first one.
    pub(super) anew: u32,
    /// What is left of the one that was traced last.
    pub(super) past: Option<Past>,
}

impl Kernels {
    /// Whether the next one is still to come.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }
}

/// Where a kernel at this slide begins, beside the first one.
fn begins(first: u64, slide: u64) -> String {
    let text = "the guest's kernel starts anew (kexec)";
    match (slide.checked_sub(first), first.wrapping_sub(slide)) {
        (Some(0), _) => text.into(),
        (Some(above), _) => format!("{text}, {above:#x} above where the first one was"),
        (None, below) => format!("{text}, {below:#x} below where the first one was"),
    }
}

impl Controller {
    /// The kernel leaves for another one: nothing of this one is touched any more. Whether this was attended to.
    ///
    /// # Errors
    /// When vCPUs do not stop: what is held could not be given back, and the guest must not go on with it.
    pub(super) fn kernel_leaves(&mut self, machine: &dyn Vm) -> Result<bool, MachineError> {
        let Stage::Attached { attachment, .. } = &self.stage else { return Ok(false) };
        let slide = attachment.image().slide;
        // What may be another's between the two.
        self.look_at_triggers();
        for trigger in self.tracing.triggers.iter_mut().filter(|it| !it.fired) {
            trigger.left = trigger.left.max(1);
        }
        self.tell_counted();
        self.tell_all_untold();
        for ControlRequest { reply, .. } in std::mem::take(&mut self.waiting) {
            reply.send(Err("the guest's kernel leaves for another one".into()));
        }
        self.give_all_back(machine)?;
        self.leave_the_end(machine)?;
        match self.watch_for_next(machine) {
            Ok(()) => {
                self.forget_modules();
                (self.keepers, self.late, self.ahead) = (BTreeMap::new(), false, None);
                self.jumps.kernel_starts();
                (self.tracing.directed, self.tracing.unheld) = (None, BTreeSet::new());
                self.kernels.first.get_or_insert(slide);
                self.kernels.waits = true;
                self.stage = Stage::Unknown;
                let text = "kernel leaves for another one (kexec)".into();
                self.mark(machine, MarkKind::Note, Duration::ZERO, text);
            }
            Err(why) => self.next_is_untraced(&why),
        }
        Ok(true)
    }

    /// Lets the next kernel tell where it is.
    fn watch_for_next(&self, machine: &dyn Vm) -> anyhow::Result<()> {
        ensure!(self.relay.is_some(), "tracing has not begun");
        ensure!(self.kernels.past.is_some(), "not all sites were given back");
        // Its first CPU may be any, and it has a part of the memory alone.
        ensure!(!self.verdict.has_panicked(), "the one before has panicked");
        let paused = machine.pause()?;
        let watched = machine.watch_again()?;
        drop(paused);
        ensure!(watched, "on this architecture a kernel does not say where it is");
        Ok(())
    }

    /// Says that the kernel with which the guest goes on is not traced.
    pub(super) fn next_is_untraced(&mut self, why: &dyn std::fmt::Display) {
        self.kernels.waits = false;
        self.note(format!(
            "the guest goes on with another kernel (kexec), which is not traced: {why}"
        ));
    }

    /// Whether a kernel that is not the first can be traced: this vCPU boots it, and it is here. The first can.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn check_next(
        &self,
        ram: &dyn Guest,
        vcpu: usize,
        image: &Image,
    ) -> anyhow::Result<()> {
        if !self.kernels.waits() {
            return Ok(());
        }
        // The other one may have come back to the first (kexec jump), whose start-up code is gone.
        ensure!(self.has_booted(ram, image)? != Some(true), "it has booted before");
        // Numbers of CPUs would not be those of vCPUs.
        ensure!(vcpu == 0, "vCPU {vcpu} boots it, not the first one");
        // Else nobody knows which addresses are to be told as the first one's.
        let moved = self.kernels.first != Some(image.slide);
        ensure!(
            !moved || relay::image(&self.kernel).is_some(),
            "it runs at another address than the first one (KASLR), and the image does not say where it \
             ends: boot both without (nokaslr)"
        );
        Ok(())
    }

    /// Whether the kernel that is here has a scheduler, and with it interrupts. `None`: it does not tell.
    ///
    /// # Errors
    /// When its memory cannot be read.
    pub(super) fn has_booted(
        &self,
        ram: &dyn Guest,
        image: &Image,
    ) -> anyhow::Result<Option<bool>> {
        let Some(state) = self.kernel.symbols().address("system_state") else { return Ok(None) };
        let mut found = [0; 4];
        ram.read(image.physical_of(state), &mut found)?;
        // `SYSTEM_BOOTING` (linux/kernel.h)
        Ok(Some(u32::from_le_bytes(found) != 0))
    }

    /// The next kernel, which runs at this slide, is about to be attached to: takes what the last one has left, and
    /// makes the annex as it was for that one. Nothing is done for the first.
    ///
    /// # Errors
    /// When the relay has failed, or the annex cannot be written.
    pub(super) fn begin_anew(&mut self, paused: &Paused<'_>, slide: u64) -> anyhow::Result<()> {
        if !std::mem::take(&mut self.kernels.waits) {
            return Ok(());
        }
        self.kernels.anew += 1;
        // It may wait for the output.
        self.deadline.allow(SNAPSHOT_TIME + deadline::TIME);
        let relay = self.relay.as_ref().ok_or_else(|| anyhow!("the trace has ended"))?;
        let left = relay.leave(slide).ok_or_else(|| anyhow!("the relay has failed"))?;
        let Left { given_up, corrupt } = left;
        corrupt.into_iter().for_each(|what| self.note(what));
        if given_up > 0 {
            self.note(format!(
                "the output of the trace was stuck when the guest's kernel left for another one: {given_up} records \
                 were left in the rings, and count as lost"
            ));
        }
        self.counters.take().ok_or_else(|| anyhow!("the annex is not ours"))?.wipe()?;
        if let Some(relay) = &self.relay {
            let ticks = paused.tsc(0).unwrap_or(0);
            let text = begins(self.kernels.first.unwrap_or(slide), slide);
            relay.mark(mark(ticks, MarkKind::Note, Duration::ZERO, text));
        }
        Ok(())
    }

    /// The relay goes on with what the next kernel writes.
    ///
    /// # Errors
    /// When there is no relay.
    pub(super) fn go_on(&mut self, attachment: &Attachment) -> anyhow::Result<()> {
        let relay = self.relay.as_ref().ok_or_else(|| anyhow!("attached twice"))?;
        relay.enter(attachment.readers(), attachment.tasks());
        Ok(())
    }

    /// A kernel that is not the first is traced.
    pub(super) fn tell_anew(&mut self) {
        if self.kernels.anew == 1 {
            self.note(
                "the guest's kernel started anew (kexec), and was traced again; the clock of the guest's log is \
                 that of the first one"
                    .into(),
            );
        }
    }

    /// What the kernel is that is not traced, to begin a note.
    pub(super) fn untraced_kernel(&self) -> &'static str {
        if self.kernels.anew > 0 || self.kernels.waits() {
            "the kernel that started anew (kexec) is not traced"
        } else {
            "not traced"
        }
    }

    /// Modules are gone with their kernel. Who means their functions waits for the next one's.
    fn forget_modules(&mut self) {
        let own = self.kernel.sites().len();
        for tracer in self.tracing.tracers.iter_mut().flatten() {
            tracer.sites.retain(|site| *site < own);
            tracer.limits.retain(|site| *site < own);
        }
        for trigger in &mut self.tracing.triggers {
            trigger.sites.retain(|site| *site < own);
        }
        // What is at their addresses is something else's, or nothing.
        for function in self.functions.values_mut() {
            Arc::make_mut(function).size = 0;
        }
        self.module_exits.clear();
        self.forget_events_of_modules();
        self.tracing_changed();
    }

    /// Says of a guest that has ended that its last kernel was not traced. False: it was the first one.
    pub(super) fn next_never_told(&mut self, before: &str) -> bool {
        let waits = self.kernels.waits();
        if waits {
            self.next_is_untraced(&format!("the guest ended before {before}"));
        }
        waits
    }
}
