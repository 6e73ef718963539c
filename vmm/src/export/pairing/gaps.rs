//! Gaps where records are missing, and the frames that become uncertain by them.
//!
//! Lost records may include the return of an open frame and the entry of the next call of the same
//! function at the same stack pointer. So a frame has no certain duration if its task may have run
//! on a vCPU with a gap while the frame was open. A task that leaves a vCPU is followed there by
//! records of other tasks. So between two consecutive records of a task on one vCPU, it ran on no
//! other vCPU.

/// Gaps of all vCPUs so far.
#[derive(Debug)]
pub(super) struct Gaps {
    vcpus: Vec<Vcpu>,
    /// How many are in a gap.
    open: u32,
    /// Counts everything that happens.
    clock: u64,
    /// When a gap last began or ended.
    edge: u64,
    /// When the functions that are traced last changed.
    change: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Vcpu {
    /// Counts its records, and its gaps.
    serial: u64,
    open: bool,
}

/// When and where a stack had a record.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moment {
    pub(super) clock: u64,
    vcpu: u32,
    serial: u64,
}

impl Gaps {
    pub(super) fn new(vcpus: usize) -> Self {
        let vcpus = vec![Vcpu::default(); vcpus];
        Self { vcpus, open: 0, clock: 0, edge: 0, change: 0 }
    }

    fn vcpu(&mut self, vcpu: u32) -> Option<&mut Vcpu> {
        self.vcpus.get_mut(usize::try_from(vcpu).ok()?)
    }

    /// A record of a vCPU; says whether frames of a stack that had its last record at `before`
    /// are doubtful now.
    pub(super) fn record(&mut self, vcpu: u32, before: Option<Moment>) -> (Moment, bool) {
        self.clock += 1;
        let (clock, open) = (self.clock, self.open > 0);
        let serial = self.vcpu(vcpu).map_or(0, |known| {
            known.serial += 1;
            known.serial
        });
        let doubtful = before.is_some_and(|before| {
            let next = before.vcpu == vcpu && before.serial + 1 == serial;
            self.change > before.clock || (!next && (open || self.edge > before.clock))
        });
        self.end(vcpu);
        (Moment { clock, vcpu, serial }, doubtful)
    }

    /// A record without a stack pointer.
    pub(super) fn plain(&mut self, vcpu: u32) {
        // None of these are in question before the first loss.
        if self.open > 0 {
            self.clock += 1;
            self.end(vcpu);
        }
    }

    /// Records of a vCPU are missing from here to its next one.
    pub(super) fn begin(&mut self, vcpu: u32) {
        self.clock += 1;
        let clock = self.clock;
        let Some(known) = self.vcpu(vcpu) else { return };
        // What comes next does not follow what was before.
        known.serial += 1;
        if !std::mem::replace(&mut known.open, true) {
            self.open += 1;
        }
        self.edge = clock;
    }

    fn end(&mut self, vcpu: u32) {
        let clock = self.clock;
        if self.vcpu(vcpu).is_some_and(|known| std::mem::take(&mut known.open)) {
            self.open -= 1;
            self.edge = clock;
        }
    }

    /// Other functions are traced from here on: calls may have been missed.
    pub(super) fn change(&mut self) {
        self.clock += 1;
        self.change = self.clock;
    }
}
