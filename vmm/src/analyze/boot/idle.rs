//! The idle times of vCPUs.

/// What a vCPU does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Nothing was heard of it.
    #[default]
    Unseen,
    Busy,
    /// Since these ticks.
    Idle(u64),
}

/// Idle times so far, in ticks.
#[derive(Debug, Default)]
pub(super) struct Idle {
    vcpus: Vec<(State, u64)>,
    /// Since when nobody has anything to do.
    all_since: Option<u64>,
    /// For so long that was so.
    pub(super) all: u64,
    /// Some time of it was seen.
    pub(super) known: bool,
}

impl Idle {
    pub(super) fn new(vcpus: usize) -> Self {
        Self { vcpus: vec![(State::Unseen, 0); vcpus], ..Self::default() }
    }

    fn vcpu(&mut self, vcpu: u32) -> Option<&mut (State, u64)> {
        self.vcpus.get_mut(usize::try_from(vcpu).ok()?)
    }

    /// A record of a vCPU.
    pub(super) fn seen(&mut self, vcpu: u32) {
        if let Some((state @ State::Unseen, _)) = self.vcpu(vcpu) {
            *state = State::Busy;
            // Whatever it does now, others did something to make it run.
            self.all_since = None;
        }
    }

    /// It has nothing to do.
    pub(super) fn enter(&mut self, vcpu: u32, ticks: u64) {
        let Some((state, _)) = self.vcpu(vcpu) else { return };
        if matches!(state, State::Idle(_)) {
            return;
        }
        *state = State::Idle(ticks);
        if !self.vcpus.iter().any(|(state, _)| *state == State::Busy) {
            self.all_since = Some(ticks);
        }
    }

    /// It has something to do again; gives from when to when nobody had.
    pub(super) fn exit(&mut self, vcpu: u32, ticks: u64) -> Option<(u64, u64)> {
        let (state, total) = self.vcpu(vcpu)?;
        let State::Idle(since) = *state else { return None };
        *state = State::Busy;
        *total = total.saturating_add(ticks.saturating_sub(since));
        self.known = true;
        let since = self.all_since.take()?;
        self.all = self.all.saturating_add(ticks.saturating_sub(since));
        Some((since, ticks))
    }

    /// Records of it are missing: nobody knows what it did.
    pub(super) fn loss(&mut self, vcpu: u32) {
        if let Some((state, _)) = self.vcpu(vcpu) {
            *state = State::Busy;
            self.all_since = None;
        }
    }

    /// Nothing is of interest any more.
    pub(super) fn stop(&mut self, ticks: u64) -> Option<(u64, u64)> {
        let all = (0..).take(self.vcpus.len()).filter_map(|vcpu| self.exit(vcpu, ticks));
        all.last()
    }

    /// Idle ticks of each vCPU that was seen.
    pub(super) fn each(&self) -> impl Iterator<Item = (u32, u64)> {
        let seen = (0..).zip(&self.vcpus).filter(|(_, (state, _))| *state != State::Unseen);
        seen.map(|(vcpu, (_, ticks))| (vcpu, *ticks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_has_anything_to_do_only_when_all_have_not() {
        let mut idle = Idle::new(3);
        idle.seen(0);
        idle.enter(0, 10);
        assert_eq!(idle.exit(0, 20), Some((10, 20)));
        idle.seen(1);
        idle.enter(0, 30);
        idle.enter(1, 40);
        // Twice, by two tracers.
        idle.enter(1, 41);
        assert_eq!(idle.exit(0, 60), Some((40, 60)));
        assert_eq!(idle.exit(0, 60), None);
        assert_eq!(idle.exit(1, 70), None);
        assert_eq!((idle.all, idle.each().collect::<Vec<_>>()), (30, vec![(0, 40), (1, 30)]));
    }

    // It may have worked for most of the time.
    #[test]
    fn what_was_lost_is_not_taken_for_idle() {
        let mut idle = Idle::new(1);
        idle.seen(0);
        idle.enter(0, 10);
        idle.loss(0);
        assert_eq!(idle.exit(0, 1000), None);
        idle.enter(0, 1000);
        assert_eq!(idle.stop(1005), Some((1000, 1005)));
        assert_eq!((idle.all, idle.each().next()), (5, Some((0, 5))));
    }
}
