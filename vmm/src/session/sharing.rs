//! Sites that the guest's own ftrace uses as well: its updates, and who waits for their end.

use super::controller::{Controller, Stage};
use super::tripwires::Purpose;
use super::vm::{Paused, Vm};
use crate::kernel::FtraceKind;
use crate::machine::TRAP_INSTRUCTION;
use crate::serve::{Control, ControlRequest};
use crate::stream::{MarkKind, Skipped};
use crate::tracer::{Attachment, Moment};
use std::collections::BTreeMap;

impl Controller {
    /// Lets sites be shared with the guest, if that can be. None is held yet.
    pub(super) fn share(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        attachment: &mut Attachment,
    ) {
        match attachment.share(machine.ram(), &self.kernel, &TRAP_INSTRUCTION) {
            Ok(traps) => self.tripwires.arm_all(paused, traps, |trap| {
                attachment.moment(trap).map(|(moment, next)| Purpose::Update { moment, next })
            }),
            Err(error) => {
                self.note(format!("the guest's own ftrace is refused what is traced: {error}"));
            }
        }
    }

    /// An update of the guest's ftrace begins or ends. Whether this was attended to.
    pub(super) fn guest_updates(
        &mut self,
        machine: &dyn Vm,
        vcpu: usize,
        (moment, next): (Moment, u64),
    ) -> bool {
        let Stage::Attached { attachment, .. } = &mut self.stage else { return false };
        let paused = match machine.pause() {
            Ok(paused) => paused,
            Err(error) => {
                // It stands there still, and the machine is gone.
                self.note(format!("an update of the guest's ftrace was not seen: {error}"));
                return true;
            }
        };
        let ram = machine.ram();
        let mut skipped = Vec::new();
        let done = match moment {
            Moment::Begin => attachment.lend(ram, &self.kernel).map(|lent| {
                let why = lent.foreign.first().map(|&site| (site, lent.foreign.len()));
                (lent.sites, why)
            }),
            Moment::End => {
                let taken = attachment.take_again(ram, &self.kernel, &TRAP_INSTRUCTION);
                taken.map(|(count, left)| {
                    skipped = left;
                    (count - skipped.len(), None)
                })
            }
        };
        let went_on = paused.set_rip(vcpu, next);
        let shared = attachment.shared().values().sum::<usize>() as u64;
        let (count, failed) = match done {
            Ok((count, None)) => (count, went_on.err().map(|error| error.to_string())),
            Ok((count, Some((site, foreign)))) => {
                let name = self.name(site);
                let why =
                    format!("{foreign} sites did not hold our call any more (such as {name})");
                (count, Some(why))
            }
            Err(error) => (0, Some(error.to_string())),
        };
        let text = match moment {
            Moment::Begin => format!("the guest's ftrace begins to change {count} sites"),
            Moment::End => {
                let sites = &mut self.summary.sites;
                sites.patched = sites.patched.saturating_sub(skipped.len() as u64);
                sites.guest_updates += 1;
                sites.shared = sites.shared.max(shared);
                format!("the guest's ftrace is done: {count} sites, {shared} shared")
            }
        };
        // Calls whose beginning is not seen lie between marks of this kind.
        if count == 0 {
            self.count_pause(paused, MarkKind::Note, text);
        } else {
            self.account(paused, MarkKind::Filter, text);
        }
        for Skipped { reason, count, examples } in self.skipped(&skipped) {
            let examples = examples.join(", ");
            self.note(format!(
                "{count} sites are used only by the guest since an update of its ftrace: {reason} \
                 (such as {examples})"
            ));
        }
        match failed {
            Some(why) => self.anomaly(machine, why),
            None if moment == Moment::End => self.catch_up(machine),
            None => {}
        }
        true
    }

    /// Does what had to wait for the end of an update.
    fn catch_up(&mut self, machine: &dyn Vm) {
        if std::mem::take(&mut self.late) {
            self.enable_late(machine);
        }
        for request in std::mem::take(&mut self.waiting) {
            self.request(machine, request);
        }
    }

    fn enable_late(&mut self, machine: &dyn Vm) {
        let stage = std::mem::replace(&mut self.stage, Stage::Off);
        let Stage::Attached { mut attachment, from: None } = stage else {
            self.stage = stage;
            return;
        };
        // While the guest still runs.
        self.planned();
        let paused = match machine.pause() {
            Ok(paused) => paused,
            Err(error) => {
                self.note(format!("not traced: {error}"));
                self.stage = Stage::Attached { attachment, from: None };
                return;
            }
        };
        if let Err(error) = self.enable(machine, &mut attachment) {
            self.note(format!("not traced: {error}"));
        }
        self.stage = Stage::Attached { attachment, from: None };
        let text = format!("{} sites", self.summary.sites.patched);
        self.account(paused, MarkKind::Filter, text);
    }

    /// Does what a request says, or keeps it until sites can be changed.
    pub(super) fn request(&mut self, machine: &dyn Vm, request: ControlRequest) {
        let changes = matches!(
            request.command,
            Control::Filter(_)
                | Control::TracerAdd(_)
                | Control::TracerRemove(_)
                | Control::EventAdd(_)
                | Control::EventRemove(_)
                | Control::TriggerAdd { .. }
                | Control::TriggerRemove(_)
                | Control::LatencyStart { .. }
                | Control::LatencyStop { .. }
                | Control::Pause
                | Control::Resume
        );
        if changes && self.is_lent() {
            self.waiting.push(request);
            return;
        }
        self.control(machine, request);
    }

    /// How many sites are shared with what the guest's ftrace calls from them: functions of its own,
    /// and trampolines that it has made; where sites have a literal, the ops in that.
    pub(super) fn shared(&self) -> BTreeMap<String, usize> {
        let Stage::Attached { attachment, .. } = &self.stage else { return BTreeMap::new() };
        let slide = attachment.image().slide;
        let made = match self.kernel.ftrace_kind() {
            FtraceKind::CallOps => "ops",
            FtraceKind::Fentry | FtraceKind::Patchable => "trampoline",
        };
        let name = |target: u64| match self.kernel.symbols().primary_at(target.wrapping_sub(slide))
        {
            Some(name) => name.to_owned(),
            None => format!("{made} {target:#x}"),
        };
        let shared = attachment.shared();
        shared.into_iter().map(|(target, count)| (name(target), count)).collect()
    }

    /// Whether an update of the guest's ftrace is under way.
    pub(super) fn is_lent(&self) -> bool {
        matches!(&self.stage, Stage::Attached { attachment, .. } if attachment.is_lent())
    }
}
