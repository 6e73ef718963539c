//! Patterns of filters in ftrace's syntax: `GLOB`, `GLOB:mod:NAME` and `:mod:NAME`.

use super::glob;

/// Between functions and the module that they must be in.
pub(crate) const MODULE: &str = ":mod:";

/// Which functions a pattern of a filter means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Functions<'a> {
    /// Of these names.
    glob: &'a str,
    /// In modules of these names; none: anywhere.
    module: Option<&'a str>,
}

impl<'a> Functions<'a> {
    /// Takes a pattern apart. What is left out means everything, on both sides.
    pub fn of(pattern: &'a str) -> Self {
        let all = |glob: &'a str| if glob.is_empty() { "*" } else { glob };
        match pattern.split_once(MODULE) {
            None => Self { glob: pattern, module: None },
            Some((glob, module)) => Self { glob: all(glob), module: Some(all(module)) },
        }
    }

    /// The glob of their own names.
    pub fn glob(&self) -> &'a str {
        self.glob
    }

    /// The glob of the module's name, if only functions of modules are meant.
    pub fn module(&self) -> Option<&'a str> {
        self.module
    }

    /// Whether a function of this name is meant, in this module; `None`: in the kernel itself.
    pub fn matches(&self, name: &str, module: Option<&str>) -> bool {
        let is_there = match (self.module, module) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(wanted), Some(module)) => is_module(wanted, module),
        };
        is_there && glob::matches(self.glob, name)
    }

    /// Whether functions of this module can be meant.
    pub fn reaches(&self, module: &str) -> bool {
        self.module.is_none_or(|wanted| is_module(wanted, module))
    }
}

/// Files have dashes where the kernel's names have underscores.
fn is_module(wanted: &str, module: &str) -> bool {
    // A dash within brackets is a range.
    if wanted.contains('[') {
        return glob::matches(wanted, module);
    }
    glob::matches(&wanted.replace('-', "_"), &module.replace('-', "_"))
}

/// Whether filters choose a function of a module that has these names.
pub fn selects<'a>(
    filter: &[String],
    notrace: &[String],
    module: Option<&str>,
    names: &(impl Iterator<Item = &'a str> + Clone),
) -> bool {
    let any = |patterns: &[String]| {
        patterns
            .iter()
            .map(|pattern| Functions::of(pattern))
            .any(|functions| names.clone().any(|name| functions.matches(name, module)))
    };
    (filter.is_empty() || any(filter)) && !any(notrace)
}

#[cfg(test)]
mod tests {
    use super::*;

    // A filter that means the kernel's functions as well would trace what nobody asked for.
    #[test]
    fn patterns_mean_what_ftrace_means_by_them() {
        let matches = |pattern, name, module| Functions::of(pattern).matches(name, module);
        for module in [None, Some("ext4")] {
            assert!(matches("ext4_*", "ext4_read", module));
            assert!(!matches("ext4_*", "vfs_read", module));
        }
        for pattern in ["ext4_*:mod:ext4", ":mod:ext4", "*:mod:ext?", "ext4_*:mod:", ":mod:*"] {
            assert!(matches(pattern, "ext4_read", Some("ext4")), "{pattern}");
            assert!(!matches(pattern, "ext4_read", None), "{pattern}");
        }
        assert!(!matches(":mod:ext4", "ext4_read", Some("ext3")));
        assert!(!matches("vfs_*:mod:ext4", "ext4_read", Some("ext4")));
        assert!(matches(":mod:snd-hda", "f", Some("snd_hda")));
        assert!(matches(":mod:ext[2-4]", "f", Some("ext3")));
        assert_eq!(Functions::of("a:mod:b").module(), Some("b"));
        assert_eq!(Functions::of("a:graph").module(), None);
    }

    #[test]
    fn filters_choose_and_leave_out() {
        let patterns = |list: &[&str]| list.iter().map(|&one| one.to_owned()).collect::<Vec<_>>();
        let selects = |filter: &[&str], notrace: &[&str], names: &[&str]| {
            selects(&patterns(filter), &patterns(notrace), Some("dummy"), &names.iter().copied())
        };
        assert!(selects(&[], &[], &["a"]) && selects(&["b", ":mod:dummy"], &[], &["a"]));
        assert!(!selects(&["b"], &[], &["a"]) && selects(&["b"], &[], &["a", "b"]));
        assert!(!selects(&[], &[":mod:dummy"], &["a"]) && selects(&[], &[":mod:other"], &["a"]));
        assert!(!selects(&[":mod:dummy"], &["a"], &["a", "b"]));
    }
}
