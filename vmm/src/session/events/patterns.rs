//! Which events are asked for: modules that come later may have some.

use super::is_meant_in;
use crate::kernel::Functions;

/// What was asked for and what was taken back, in that order: the last that means an event counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patterns(Vec<(String, bool)>);

impl Patterns {
    /// Asks for what a pattern means.
    pub fn add(&mut self, pattern: &str) {
        self.say(pattern, true);
    }

    /// Asks for it no more; whether that was asked for by the same pattern.
    pub fn remove(&mut self, pattern: &str) -> bool {
        let known = self.0.iter().any(|(known, wanted)| *wanted && known == pattern);
        self.say(pattern, false);
        known
    }

    fn say(&mut self, pattern: &str, wanted: bool) {
        self.0.retain(|(known, _)| known != pattern);
        if wanted || !self.0.is_empty() {
            self.0.push((pattern.to_owned(), wanted));
        }
    }

    /// Whether an event (by its full name) of a module is asked for.
    pub fn want(&self, name: &str, module: &str) -> bool {
        let mut last = self.0.iter().rev();
        last.find(|(pattern, _)| is_meant_in(pattern, name, Some(module)))
            .is_some_and(|(_, wanted)| *wanted)
    }

    /// Patterns of events of modules, and of nothing else.
    pub fn of_modules(&self) -> impl Iterator<Item = &str> {
        let wanted = self.0.iter().filter(|(_, wanted)| *wanted);
        let of_modules = wanted.filter(|(pattern, _)| Functions::of(pattern).module().is_some());
        of_modules.map(|(pattern, _)| &**pattern)
    }

    /// Whether anything is asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|(_, wanted)| !wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // An event that was taken back would come again with the module, and one that was asked for
    // would not come at all.
    #[test]
    fn the_last_word_on_an_event_counts() {
        let mut patterns = Patterns::default();
        assert!(!patterns.want("ext4:ext4_sync", "ext4"));
        assert!(!patterns.remove("ext4:*"), "nothing was asked for");
        assert_eq!(patterns, Patterns::default());
        patterns.add("ext4:*");
        assert!(patterns.want("ext4:ext4_sync", "ext4") && !patterns.want("jbd2:a", "jbd2"));
        assert!(!patterns.remove("ext4:ext4_sync"));
        assert!(!patterns.want("ext4:ext4_sync", "ext4") && patterns.want("ext4:other", "ext4"));
        patterns.add("ext4_sync");
        assert!(patterns.want("ext4:ext4_sync", "ext4"));
        assert!(patterns.remove("ext4:*") && !patterns.want("ext4:other", "ext4"));
        assert!(patterns.remove("ext4_sync") && patterns.is_empty());
    }

    #[test]
    fn some_mean_modules_and_nothing_else() {
        let mut patterns = Patterns::default();
        ["sched:*", "ext4:*:mod:ext4", ":mod:kvm-*"].iter().for_each(|it| patterns.add(it));
        assert_eq!(patterns.of_modules().collect::<Vec<_>>(), ["ext4:*:mod:ext4", ":mod:kvm-*"]);
        assert!(patterns.want("ext4:a", "ext4") && !patterns.want("ext4:a", "other"));
        assert!(patterns.want("kvm:kvm_exit", "kvm_amd") && !patterns.want("kvm:kvm_exit", "kvm"));
        assert!(!is_meant_in(":mod:*", "sched:sched_switch", None));
    }
}
