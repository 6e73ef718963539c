//! The self-test of an attach: a vCPU calls one function for us alone, and goes back to where it was.

use super::arch;
use super::controller::{Controller, Stage};
use super::plan::Plan;
use super::tripwires::Purpose;
use super::vm::{Paused, Vm};
use crate::kernel::SiteSection;
use crate::machine::{Detour, Diverted, Registers, TRAP_INSTRUCTION};
use crate::stream::MarkKind;
use crate::tracer::{Attachment, Duty, Reached, Seen, SelfTest};
use anyhow::{Context, bail};
use std::time::{Duration, Instant};

/// Sites that are tried; the guest may have its reasons for one or the other.
const TRIES: usize = 16;
/// A call takes microseconds; after this the guest is taken back.
const PATIENCE: Duration = Duration::from_secs(30);

/// A test that is under way.
pub(super) struct Testing {
    attachment: Box<Attachment>,
    sent: Sent,
}

/// A vCPU that was sent away.
struct Sent {
    test: SelfTest,
    vcpu: usize,
    /// What it had, and what it began with.
    diverted: Diverted,
    begun: Registers,
    ticks: u64,
    /// Where it stood.
    stopped: u64,
    deadline: Instant,
}

impl Controller {
    /// Takes one of the planned sites alone, and sends the vCPU there, which stands at `stopped`.
    /// Without a site that can be taken there is no test, and that is a note.
    pub(super) fn begin_self_test(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        mut attachment: Box<Attachment>,
        stopped: u64,
        plan: &Plan,
    ) -> anyhow::Result<Result<Testing, Box<Attachment>>> {
        match self.send(machine, paused, vcpu, &mut attachment, stopped, plan) {
            Ok(Some(sent)) => Ok(Ok(Testing { attachment, sent })),
            Ok(None) => Ok(Err(attachment)),
            Err(error) => {
                self.give_back(machine, paused, attachment);
                Err(error)
            }
        }
    }

    fn send(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        vcpu: usize,
        attachment: &mut Attachment,
        stopped: u64,
        plan: &Plan,
    ) -> anyhow::Result<Option<Sent>> {
        let ram = machine.ram();
        let from = [arch::stack_pointer(&paused.registers(vcpu)?), stopped];
        let mut why = None;
        for (site, duty) in self.test_candidates(plan) {
            let place = (site, attachment.program(ram, &self.kernel, &duty)?);
            let begun =
                attachment.begin_self_test(ram, &self.kernel, place, &TRAP_INSTRUCTION, from)?;
            let test = match begun {
                Ok(test) => test,
                Err(reason) => {
                    why = Some(reason);
                    continue;
                }
            };
            let (address, stack) = test.start();
            let detour = Detour { address, stack, returns_to: stopped, faults: test.faults() };
            let purpose = |trap| test.reached(trap).map(Purpose::SelfTest);
            self.tripwires.arm_all(paused, test.traps(), purpose);
            let sent = paused.divert(vcpu, &detour).and_then(|diverted| {
                match paused.registers(vcpu).and_then(|begun| Ok((begun, paused.tsc(vcpu)?))) {
                    Ok((begun, ticks)) => Ok((diverted, begun, ticks)),
                    Err(error) => paused.put_back(vcpu, &diverted).and(Err(error)),
                }
            });
            let (diverted, begun, ticks) = match sent {
                Ok(sent) => sent,
                Err(error) => {
                    // Nobody would attend to its traps.
                    for trap in test.traps() {
                        self.disarm(machine, paused, trap);
                    }
                    attachment.end_self_test(ram, &self.kernel, &test, None)?;
                    return Err(error.into());
                }
            };
            let deadline = Instant::now() + PATIENCE;
            return Ok(Some(Sent { test, vcpu, diverted, begun, ticks, stopped, deadline }));
        }
        if let Some(why) = why {
            self.note(format!("no self-test: no site could be taken for it ({why})"));
        }
        Ok(None)
    }

    /// Sites with what they are to do; some that are never given back first.
    fn test_candidates(&self, plan: &Plan) -> Vec<(usize, Duty)> {
        let sites = self.kernel.sites();
        let stays = |site: usize| sites.get(site).is_some_and(|it| it.section == SiteSection::Text);
        let planned = plan.sites.iter().filter(|(site, _)| stays(*site));
        let planned = planned.filter_map(|&(site, duty)| {
            // The call that is made is one of no task that anybody means.
            Some((site, plan.duties.get(usize::try_from(duty).ok()?)?.of_all_calls()))
        });
        let candidates: Vec<_> = planned.take(TRIES).collect();
        if !candidates.is_empty() {
            return candidates;
        }
        // Nothing yet; a command may ask for more at any time.
        let entry = Duty::entry(vec![0]);
        (0..sites.len())
            .filter(|&site| stays(site))
            .take(TRIES)
            .map(|it| (it, entry.clone()))
            .collect()
    }

    /// When a test has to be over, if there is one.
    pub(super) fn test_deadline(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Testing(testing) => Some(testing.sent.deadline),
            _ => None,
        }
    }

    /// The test has come to this end. Whether this was attended to.
    pub(super) fn self_tested(&mut self, machine: &dyn Vm, vcpu: usize, reached: Reached) -> bool {
        let stage = std::mem::replace(&mut self.stage, Stage::Off);
        let Stage::Testing(testing) = stage else {
            self.stage = stage;
            return false;
        };
        debug_assert_eq!(vcpu, testing.sent.vcpu);
        self.end_self_test(machine, *testing, Some(reached));
        true
    }

    /// A test that has not come to an end in time does so now.
    pub(super) fn test_overdue(&mut self, machine: &dyn Vm) {
        if self.test_deadline().is_none_or(|deadline| Instant::now() < deadline) {
            return;
        }
        if let Stage::Testing(testing) = std::mem::replace(&mut self.stage, Stage::Off) {
            self.end_self_test(machine, *testing, None);
        }
    }

    /// Looks at what was recorded, lets the vCPU go on where it was, and begins to trace.
    fn end_self_test(&mut self, machine: &dyn Vm, testing: Testing, reached: Option<Reached>) {
        let paused = match machine.pause() {
            Ok(paused) => paused,
            Err(error) => {
                // It is still away: it stops again where it stands, and must be put back.
                self.note(format!("the self-test cannot be ended: {error}"));
                self.stage = Stage::Testing(Box::new(testing));
                return;
            }
        };
        let Testing { mut attachment, sent } = testing;
        let (vcpu, stopped, ticks) = (sent.vcpu, sent.stopped, sent.ticks);
        let name = self.name(sent.test.site());
        if let Err(error) = self.conclude(machine, &paused, &mut attachment, sent, reached) {
            let what = format!("the self-test has failed (a call of {name}): {error:#}");
            self.note(format!("{}: {what}", self.untraced_kernel()));
            self.anomaly.found(what);
            self.give_back(machine, &paused, attachment);
            self.count_pause(paused, MarkKind::Pause, String::new());
            return;
        }
        let now = paused.tsc(vcpu).unwrap_or(ticks);
        log::debug!("self-test: {name} wrote its record, {} ticks", now.saturating_sub(ticks));
        match self.begin_tracing(machine, &paused, vcpu, attachment, stopped) {
            Ok(stage) => self.stage = stage,
            Err(error) => self.give_up(&error),
        }
        self.account_attach(paused);
    }

    /// Puts the guest back as it was before the test.
    ///
    /// # Errors
    /// When not exactly that was seen which has to be.
    fn conclude(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        attachment: &mut Attachment,
        sent: Sent,
        reached: Option<Reached>,
    ) -> anyhow::Result<()> {
        let Sent { test, vcpu, diverted, begun, ticks, stopped, .. } = sent;
        let look = || {
            let now = paused.registers(vcpu)?;
            match reached {
                Some(Reached::End) => {
                    if let Some(changed) = arch::changed(&begun, &now) {
                        bail!("{changed} was not as before when the program returned");
                    }
                    let ticks = [ticks, paused.tsc(vcpu)?];
                    Ok(Seen { vcpu, returns_to: stopped, ticks })
                }
                Some(Reached::Fault(vector)) => {
                    let number = vector.map_or_else(String::new, |number| format!(" {number}"));
                    bail!("exception{number} ({})", arch::fault(&now))
                }
                None => bail!(
                    "the program did not return; the vCPU is at {:#x}",
                    arch::program_counter(&now)
                ),
            }
        };
        let seen = look();
        for trap in test.traps() {
            self.disarm(machine, paused, trap);
        }
        let put_back = paused.put_back(vcpu, &diverted).context("registers were not put back");
        let ram = machine.ram();
        let (as_seen, failed) = match seen {
            Ok(seen) => (Some(seen), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let ended = attachment.end_self_test(ram, &self.kernel, &test, as_seen);
        failed.and(put_back).and(ended.map_err(Into::into))
    }

    /// The guest is gone, or tracing has to end, before the test is over.
    pub(super) fn abandon_self_test(
        &mut self,
        machine: &dyn Vm,
        paused: &Paused<'_>,
        testing: Testing,
    ) {
        let Testing { mut attachment, sent } = testing;
        let name = self.name(sent.test.site());
        let untraced = self.untraced_kernel();
        self.note(format!("{untraced}: the guest ended in the self-test (a call of {name})"));
        // That it was not over is no news.
        let _ = self.conclude(machine, paused, &mut attachment, sent, None);
        self.give_back(machine, paused, attachment);
    }
}
