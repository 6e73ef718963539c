//! Signs of life of a process that another one waits for.

use std::io::{self, Write};
use std::time::Duration;

use nix::sys::resource::{Usage, UsageWho, getrusage};

/// A sign of life; it is no part of any answer.
pub(super) const BEAT: u8 = b'.';
/// How often the process looks at itself.
const LOOK: Duration = Duration::from_secs(2);
/// How much CPU time is a sign of life: reading and writing a megabyte takes about that, and a process that is
/// stuck in a system call takes none.
const WORK: Duration = Duration::from_millis(1);

/// Writes to standard output from now on whenever the process has worked, until nobody reads that.
///
/// # Errors
/// When the system has no thread left.
pub(super) fn tell() -> io::Result<()> {
    let beat = || {
        let mut out = io::stdout();
        out.write_all(&[BEAT]).and_then(|()| out.flush())
    };
    let look = || {
        std::thread::sleep(LOOK);
        worked()
    };
    std::thread::Builder::new().name("life".into()).spawn(move || watch(look, beat))?;
    Ok(())
}

/// The CPU time of the other threads; nothing where the system does not say.
fn worked() -> Duration {
    let time = |usage: Usage| {
        [usage.user_time(), usage.system_time()].into_iter().fold(Duration::ZERO, |sum, time| {
            let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
            sum + Duration::from_secs(seconds)
                + Duration::from_micros(u64::try_from(time.tv_usec()).unwrap_or(0))
        })
    };
    let of = |who| getrusage(who).map(time).unwrap_or_default();
    of(UsageWho::RUSAGE_SELF).saturating_sub(of(UsageWho::RUSAGE_THREAD))
}

fn watch(mut look: impl FnMut() -> Duration, mut beat: impl FnMut() -> io::Result<()>) {
    let mut before = Duration::ZERO;
    loop {
        let now = look();
        if now >= before + WORK {
            if beat().is_err() {
                return;
            }
            before = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Else whoever waits ends while the work goes on, or waits for ever for one that is stuck.
    #[test]
    fn work_is_told_and_nothing_else() {
        let mut looks = [0, 400, 1000, 1000, 1900, 2100, 2100].into_iter();
        let (mut at, mut beats) = (0, Vec::new());
        let ended = std::cell::Cell::new(false);
        let look = || {
            at = looks.next().unwrap_or_else(|| {
                ended.set(true);
                9000
            });
            Duration::from_micros(at)
        };
        watch(look, || {
            beats.push(());
            if ended.get() { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
        });
        assert_eq!(beats.len(), 3, "at 1000, at 2100, and the one that nobody reads");
    }

    #[test]
    fn work_of_other_threads_counts_and_that_of_this_one_does_not() {
        let spin = || {
            let begun = worked_here();
            while worked_here() < begun + 20 * WORK {}
        };
        let before = worked();
        std::thread::spawn(spin).join().unwrap();
        assert!(worked() >= before + 10 * WORK);
    }

    fn worked_here() -> Duration {
        let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
        let micros = usage.user_time().tv_usec() + usage.system_time().tv_usec();
        let seconds = usage.user_time().tv_sec() + usage.system_time().tv_sec();
        Duration::from_micros(u64::try_from(micros + 1_000_000 * seconds).unwrap())
    }
}
