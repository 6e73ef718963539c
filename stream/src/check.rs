//! Checks that frames are consistent: their numbers, positions and totals.

use std::collections::HashMap;

use super::dictionary::{FormatKey, FormatsSize};
use super::frame::{Frame, Loss, ValuesList};
use super::mark::LossReason;
use super::wire::FrameHead;

/// What a reader has seen of one vCPU, counted from the start of the trace.
#[derive(Clone, Copy, Debug, Default)]
struct Position {
    records: u64,
    lost: u64,
    /// Records that this consumer was too slow for.
    missed: u64,
}

/// Verifies that frames fit together.
#[derive(Debug, Default)]
pub(super) struct Check {
    /// The number of the next frame that has one.
    sequence: u32,
    vcpus: Vec<Position>,
    /// The header was made for this consumer: it joined late.
    joining: bool,
    /// Lengths of the texts of formats.
    formats: HashMap<FormatKey, usize>,
    formats_size: FormatsSize,
}

impl Check {
    /// Takes the next frame; `Err` says what does not fit.
    pub(super) fn frame(&mut self, head: &FrameHead, frame: &Frame<'_>) -> Result<(), String> {
        self.number(head, frame)?;
        match frame {
            Frame::Header(header) => {
                if !self.vcpus.is_empty() {
                    return Err("a second header".into());
                }
                let vcpus = usize::try_from(header.vcpus).unwrap_or(0);
                self.vcpus = vec![Position::default(); vcpus];
                self.joining = head.is_local();
                Ok(())
            }
            Frame::Join(totals) => self.join(totals),
            Frame::Records(batch) => {
                let position = position(&mut self.vcpus, batch.vcpu)?;
                let expected = position.records;
                if batch.first != expected {
                    return Err(format!(
                        "records of vCPU {} go on at {} instead of {expected}",
                        batch.vcpu, batch.first
                    ));
                }
                add(&mut position.records, u64::from(batch.count))
            }
            Frame::Counts(counts) => position(&mut self.vcpus, counts.vcpu).map(|_| ()),
            Frame::Values(list) => self.values(list.clone()),
            Frame::Loss(loss) => self.loss(head.is_local(), loss),
            Frame::End(summary) => {
                let totals = summary.vcpus.iter().map(|vcpu| (vcpu.records, vcpu.lost));
                self.end(totals)
            }
            _ => Ok(()),
        }
    }

    fn number(&mut self, head: &FrameHead, frame: &Frame<'_>) -> Result<(), String> {
        let sequence = head.sequence.get();
        let may_jump = head.is_local() && matches!(frame, Frame::Loss(_) | Frame::Header(_));
        if may_jump {
            self.sequence = sequence;
        } else if sequence != self.sequence {
            return Err(format!("frame {sequence} where frame {} should be", self.sequence));
        }
        if !head.is_local() {
            self.sequence = self.sequence.wrapping_add(1);
        }
        Ok(())
    }

    /// Formats have limits for all of them together.
    fn values(&mut self, list: ValuesList<'_>) -> Result<(), String> {
        for values in list {
            let (key, length) = ((values.function, values.tracer, values.of), values.text.len());
            let size = self.formats_size.with(length, self.formats.get(&key).copied());
            self.formats_size = size.map_err(|error| error.to_string())?;
            self.formats.insert(key, length);
        }
        Ok(())
    }

    fn join(&mut self, totals: &[(u64, u64)]) -> Result<(), String> {
        if !std::mem::take(&mut self.joining) {
            return Err("a join frame, but nobody joined".into());
        }
        if totals.len() != self.vcpus.len() {
            return Err(format!("totals of {} vCPUs, {} exist", totals.len(), self.vcpus.len()));
        }
        for (position, (records, lost)) in self.vcpus.iter_mut().zip(totals) {
            (position.records, position.lost) = (*records, *lost);
        }
        Ok(())
    }

    fn loss(&mut self, local: bool, loss: &Loss) -> Result<(), String> {
        let position = position(&mut self.vcpus, loss.vcpu)?;
        let own = loss.reason == LossReason::Consumer;
        if local != own {
            return Err(format!("a loss with reason {} that is not the consumer's", loss.reason));
        }
        let total = if own {
            add(&mut position.records, loss.count)?;
            &mut position.missed
        } else {
            &mut position.lost
        };
        add(total, loss.count)?;
        if *total != loss.total {
            return Err(format!(
                "vCPU {} has lost {} records, the frame says {}",
                loss.vcpu, total, loss.total
            ));
        }
        Ok(())
    }

    fn end(&self, totals: impl ExactSizeIterator<Item = (u64, u64)>) -> Result<(), String> {
        if totals.len() != self.vcpus.len() {
            return Err(format!("totals of {} vCPUs, {} exist", totals.len(), self.vcpus.len()));
        }
        for (vcpu, (position, total)) in self.vcpus.iter().zip(totals).enumerate() {
            let seen = (position.records, position.lost);
            if seen != total {
                return Err(format!(
                    "vCPU {vcpu}: {} records and {} lost were seen, the totals say {} and {}",
                    seen.0, seen.1, total.0, total.1
                ));
            }
        }
        Ok(())
    }
}

fn position(vcpus: &mut [Position], vcpu: u32) -> Result<&mut Position, String> {
    let count = vcpus.len();
    let position = usize::try_from(vcpu).ok().and_then(|index| vcpus.get_mut(index));
    position.ok_or_else(|| format!("vCPU {vcpu}, but only {count} exist"))
}

fn add(total: &mut u64, count: u64) -> Result<(), String> {
    *total = total.checked_add(count).ok_or("a count overflows")?;
    Ok(())
}
