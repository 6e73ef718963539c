//! Parses the value of `--arg`.

use std::fmt;

use super::super::Kernel;
use super::path::Path;
use super::{Near, SpecError};

/// One argument of `--arg`: `FUNCTION: PATH, PATH...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArgumentSpec {
    /// A pattern for names of functions, as [`glob::matches`](super::super::glob::matches) has them.
    pub function: String,
    /// What to show of them, each for [`Kernel::path`].
    pub paths: Vec<String>,
}

impl ArgumentSpec {
    /// Reads an argument of `--arg`.
    ///
    /// # Errors
    /// All that is wrong whatever the kernel.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let no_paths = || SpecError::NoPaths { text: text.trim().to_owned() };
        let (function, paths) = text.split_once(':').ok_or_else(no_paths)?;
        let function = function.trim();
        if function.is_empty() || function.contains(|c: char| c.is_whitespace() || c == ',') {
            return Err(SpecError::NoFunction { function: function.to_owned() });
        }
        if paths.trim().is_empty() {
            return Err(no_paths());
        }
        let mut names: Vec<&str> = Vec::new();
        for text in paths.split(',') {
            let name = Path::parse(text.trim())?.shown;
            if names.contains(&name) {
                return Err(SpecError::Twice { name: name.to_owned() });
            }
            names.push(name);
        }
        let paths = paths.split(',').map(|path| path.trim().to_owned()).collect();
        Ok(Self { function: function.to_owned(), paths })
    }
}

/// As it was given.
impl fmt::Display for ArgumentSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.function, self.paths.join(", "))
    }
}

impl Kernel {
    /// The sites of the functions that `--arg` is about, as indices into [`Kernel::sites`].
    ///
    /// # Errors
    /// None matches; names that are like it are told.
    pub fn argument_sites(&self, spec: &ArgumentSpec) -> Result<Vec<usize>, SpecError> {
        let function = &spec.function;
        let sites = self.select_with_report(std::slice::from_ref(function), &[]).sites;
        if !sites.is_empty() {
            return Ok(sites);
        }
        let all = self.sites().iter().filter_map(|site| self.site_name(site));
        // What a pattern was meant to match is not known.
        let names = match function.contains(['*', '?', '[']) {
            true => Near::default(),
            false => Near::to(function, all),
        };
        Err(SpecError::Unknown { function: function.clone(), names })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What is meant for one function would be asked of another, or silently lost.
    #[test]
    fn an_argument_is_a_pattern_and_paths() {
        let spec = |function: &str, paths: &[&str]| ArgumentSpec {
            function: function.to_owned(),
            paths: paths.iter().map(|path| (*path).to_owned()).collect(),
        };
        for (text, expected) in [
            ("vfs_read: file->f_flags", spec("vfs_read", &["file->f_flags"])),
            ("vfs_read:file", spec("vfs_read", &["file"])),
            (
                " vfs_* : name=file->f_path.dentry->d_name.name:40,count ",
                spec("vfs_*", &["name=file->f_path.dentry->d_name.name:40", "count"]),
            ),
            ("f.isra.0: a[3].b, $ret", spec("f.isra.0", &["a[3].b", "$ret"])),
        ] {
            assert_eq!(ArgumentSpec::parse(text), Ok(expected), "{text}");
        }
        for (text, part) in [
            ("", "names no values"),
            ("vfs_read", "names no values"),
            ("vfs_read:", "names no values"),
            ("vfs_read: ,", "a parameter's name"),
            ("vfs_read: a,", "a parameter's name"),
            (": a", "is not a function"),
            ("a b: c", "is not a function"),
            ("a: b, b", "'b' is given twice"),
            ("a: x=b, x=c", "'x' is given twice"),
            ("a: b->", "'b->' at its character 4"),
        ] {
            let error = ArgumentSpec::parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
