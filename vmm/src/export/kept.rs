//! What is written in line after line, made once: of tasks and of functions.

use std::io;
use std::num::NonZeroU64;

use super::Name;

/// vCPUs of which the last task is kept.
const VCPUS: usize = 16;
/// Names that are kept.
const NAMES: usize = 1 << 12;

/// Who was where, as an event tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Who<'a> {
    pub(crate) vcpu: u32,
    pub(crate) pid: u32,
    pub(crate) tgid: Option<u32>,
    pub(crate) comm: Option<&'a str>,
}

/// What was made of tasks: most events are of the task of the one before.
#[derive(Debug)]
pub(crate) struct Tasks<T>([Option<Task<T>>; VCPUS]);

#[derive(Debug)]
struct Task<T> {
    vcpu: u32,
    pid: u32,
    tgid: Option<u32>,
    comm: Option<Box<str>>,
    made: T,
}

impl<T> Default for Tasks<T> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| None))
    }
}

impl<T> Tasks<T> {
    /// What was made of this one, if that is the last one of its vCPU.
    #[inline]
    pub(crate) fn get(&self, who: Who<'_>) -> Option<&T> {
        let Task { vcpu, pid, tgid, comm, made } = self.0.get(place(who))?.as_ref()?;
        let known = Who { vcpu: *vcpu, pid: *pid, tgid: *tgid, comm: comm.as_deref() };
        (known == who).then_some(made)
    }

    /// This was made of it.
    pub(crate) fn keep(&mut self, who: Who<'_>, made: T) {
        let Who { vcpu, pid, tgid, comm } = who;
        if let Some(kept) = self.0.get_mut(place(who)) {
            *kept = Some(Task { vcpu, pid, tgid, comm: comm.map(Into::into), made });
        }
    }
}

fn place(who: Who<'_>) -> usize {
    usize::try_from(who.vcpu).unwrap_or(0) % VCPUS
}

/// What was made of names.
#[derive(Debug)]
pub(crate) struct Names<T>(Box<[Known<T>]>);

#[derive(Clone, Debug, Default)]
struct Known<T> {
    /// See [`Name::number`].
    number: Option<NonZeroU64>,
    made: T,
}

impl<T: Clone + Default> Default for Names<T> {
    fn default() -> Self {
        Self(vec![Known::default(); NAMES].into())
    }
}

impl<T> Names<T> {
    /// What `make` makes of a name; `None` for one that has no number: nothing is kept of that.
    ///
    /// # Errors
    /// As `make`.
    #[inline]
    pub(crate) fn find(
        &mut self,
        name: &Name<'_>,
        make: impl FnOnce(&Name<'_>) -> io::Result<T>,
    ) -> io::Result<Option<&T>> {
        let Some(number) = name.number else { return Ok(None) };
        let place = usize::try_from(number.get()).unwrap_or(0) % NAMES;
        let Some(known) = self.0.get_mut(place) else { return Ok(None) };
        if known.number != Some(number) {
            *known = Known { number: Some(number), made: make(name)? };
        }
        Ok(Some(&known.made))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A line with the task of another one is wrong without a sign of it.
    #[test]
    fn tasks_are_kept_as_they_are_told() {
        let mut tasks = Tasks::default();
        let who = Who { vcpu: 1, pid: 7, tgid: Some(7), comm: Some("sh") };
        assert_eq!(tasks.get(who), None);
        tasks.keep(who, "a");
        assert_eq!(tasks.get(who), Some(&"a"));
        let others = [
            Who { vcpu: 2, ..who },
            Who { vcpu: 17, ..who },
            Who { pid: 8, ..who },
            Who { tgid: None, ..who },
            Who { comm: Some("ls"), ..who },
            Who { comm: None, ..who },
        ];
        assert!(others.iter().all(|&other| tasks.get(other).is_none()));
        tasks.keep(others[1], "b");
        assert_eq!((tasks.get(who), tasks.get(others[1])), (None, Some(&"b")));
    }

    #[test]
    fn names_are_made_once_and_again_when_another_takes_the_place() {
        let mut names = Names::default();
        let name = |number| Name { address: 1, symbol: None, number: NonZeroU64::new(number) };
        let mut made = 0;
        let mut find = |number: u64| {
            let make = |_: &Name<'_>| {
                made += 1;
                Ok(made)
            };
            names.find(&name(number), make).unwrap().copied()
        };
        let far = u64::try_from(NAMES).unwrap();
        let found = [1, 1, 2, 1, 0, 1 + far, 1 + far, 1].map(&mut find);
        assert_eq!(found, [Some(1), Some(1), Some(2), Some(1), None, Some(3), Some(3), Some(4)]);
    }
}
