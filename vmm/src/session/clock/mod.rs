//! The clock of the guest's log, found in the guest's memory while it is paused.
//!
//! The kernel stamps lines of its log with `local_clock` (kernel/sched/clock.c), which begins later
//! than the machine's clock, that of records. Both have one rate, so that a single number says how
//! they stand to each other. It is not known before there is anything to trace: on x86-64 the clock
//! follows the kernel's tick until it is marked stable, on riscv64 it does not exist. It is
//! looked at when the kernel frees `.init.text`, and once more at the end.

mod riscv64;
mod x86_64;

use super::controller::Controller;
use super::mark;
use super::vm::{Paused, Vm};
use crate::export::seconds;
use crate::kernel::{Arch, Kernel};
use crate::stream::{GuestClock, MarkKind, nanoseconds};
use crate::tracer::{Guest, Image};
use std::time::Duration;

const BILLION: i128 = 1_000_000_000;

/// What the clock of the guest's log showed at a moment, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shown {
    now: i128,
    /// The same if it went on as it began.
    as_begun: i128,
}

impl Shown {
    /// Where that is on a clock of `hz` ticks a second that showed `ticks`; `None` where the log's
    /// clock began before that one, which no kernel does.
    fn beside(self, ticks: u64, hz: u64) -> Option<GuestClock> {
        let since = rounded(self.now.checked_mul(i128::from(hz))?, BILLION);
        let zero_ticks = u64::try_from(i128::from(ticks).checked_sub(since)?).ok()?;
        let zero_ns = u64::try_from(nanoseconds(zero_ticks, hz)).ok()?;
        let early_ns = i64::try_from(self.as_begun - self.now).ok()?;
        Some(GuestClock { zero_ticks, zero_ns, early_ns, drift_ns: 0 })
    }
}

/// A quotient, to the nearest.
fn rounded(number: i128, by: i128) -> i128 {
    number.saturating_add(by / 2).div_euclid(by)
}

/// Variables of a guest's kernel. All that they hold is the guest's word.
struct Variables<'a> {
    guest: &'a dyn Guest,
    image: &'a Image,
    kernel: &'a Kernel,
}

impl Variables<'_> {
    /// The beginnings of all variables of this name, of which static ones may share one.
    fn all<const N: usize>(&self, name: &str) -> impl Iterator<Item = [u8; N]> {
        self.kernel.symbols().addresses(name).filter_map(|address| {
            let mut bytes = [0; N];
            let address = self.image.runtime(address);
            self.image.read(self.guest, address, &mut bytes).ok().map(|()| bytes)
        })
    }

    /// The only one, or the first.
    fn first<const N: usize>(&self, name: &str) -> Option<[u8; N]> {
        self.all(name).next()
    }
}

/// The clock of the log beside that of `hz` ticks a second that shows `ticks`; `None` while it is
/// not one that goes evenly, and for kernels that do not show it.
fn compare(variables: &Variables<'_>, ticks: u64, hz: u64) -> Option<GuestClock> {
    let shown = match variables.kernel.arch() {
        Arch::X86_64 => x86_64::shown(variables, ticks),
        Arch::Riscv64 => riscv64::shown(variables, ticks, hz),
    };
    shown?.beside(ticks, hz)
}

impl Controller {
    /// Looks at the clock of the guest's log. The first time that it can be told, the stream gets a
    /// mark; later ones tell how far it has drifted since.
    pub(super) fn look_at_clock(&mut self, machine: &dyn Vm, paused: &Paused<'_>, image: &Image) {
        // The summary has one clock: the first kernel's.
        if self.kernels.anew > 0 {
            return;
        }
        let ram = machine.ram();
        let variables = Variables { guest: ram, image, kernel: &self.kernel };
        let Ok(ticks) = paused.tsc(0) else { return };
        let Some(clock) = compare(&variables, ticks, machine.clock_hz()) else { return };
        if let Some(known) = &mut self.summary.guest_clock {
            let gained = i128::from(known.zero_ns) - i128::from(clock.zero_ns);
            known.drift_ns = i64::try_from(gained).unwrap_or(0);
            return;
        }
        self.summary.guest_clock = Some(clock);
        if let Some(relay) = &self.relay {
            relay.mark(mark(ticks, MarkKind::Clock, Duration::ZERO, told(&clock)));
        }
    }
}

/// For people who see the stream alone.
fn told(clock: &GuestClock) -> String {
    let mut text = format!("0 of the guest's log is {} s of the trace", seconds(clock.zero_ns));
    if clock.early_ns != 0 {
        let way = if clock.early_ns > 0 { "ahead" } else { "behind" };
        let early = seconds(clock.early_ns.unsigned_abs());
        text += &format!(", early in the boot its times are up to {early} s {way}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    // A time of the log that is wrong by a microsecond is of another line.
    #[test]
    fn the_beginning_is_where_the_log_shows_nothing() {
        let shown = Shown { now: 4_000_000_000, as_begun: 4_500_000_000 };
        let clock = shown.beside(11_000_000_000, 2_000_000_000).unwrap();
        let GuestClock { zero_ticks, zero_ns, early_ns, drift_ns } = clock;
        assert_eq!((zero_ticks, zero_ns), (3_000_000_000, 1_500_000_000));
        assert_eq!((early_ns, drift_ns), (500_000_000, 0));
        // Half a tick and more is the next one.
        let shown = |now| Shown { now, as_begun: now };
        let zero = |now| shown(now).beside(100, 10_000_000).map(|clock| clock.zero_ticks);
        assert_eq!((zero(49), zero(50), zero(149)), (Some(100), Some(99), Some(99)));
        // The guest may say anything.
        for now in [i128::MAX, i128::MIN, 1 << 90, -(1 << 90)] {
            assert_eq!(shown(now).beside(100, u64::MAX), None, "{now}");
        }
        assert_eq!(zero(10_050), None, "before the machine began");
    }

    #[test]
    fn people_are_told_in_seconds() {
        let clock = GuestClock { zero_ns: 1_434_518_999, ..GuestClock::default() };
        assert_eq!(told(&clock), "0 of the guest's log is 1.434518 s of the trace");
        let early = GuestClock { early_ns: -59_024_182, ..clock };
        let text = told(&early);
        assert!(
            text.ends_with(", early in the boot its times are up to 0.059024 s behind"),
            "{text}"
        );
    }
}
