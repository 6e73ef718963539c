//! Parses the value of `--arg`.

use std::fmt;

use super::super::Kernel;
use super::super::functions::{Functions, MODULE, selects};
use super::path::Path;
use super::{Near, SpecError};

/// One argument of `--arg`: `FUNCTION: PATH, PATH...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArgumentSpec {
    /// A pattern of functions as filters have them: `GLOB`, `GLOB:mod:NAME` or `:mod:NAME`.
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
        let text = text.trim();
        let (function, paths) =
            split_module(text).or_else(|| text.split_once(':')).ok_or_else(no_paths)?;
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

    /// Whether only functions of modules are meant.
    #[must_use]
    pub fn names_module(&self) -> bool {
        Functions::of(&self.function).module().is_some()
    }

    /// Whether only functions of modules are meant, and this may be one of these.
    #[must_use]
    pub fn is_about(&self, module: &str) -> bool {
        self.names_module() && Functions::of(&self.function).reaches(module)
    }

    /// Whether a function of this module is meant that has these names.
    pub fn means<'a>(&self, module: &str, names: &(impl Iterator<Item = &'a str> + Clone)) -> bool {
        selects(std::slice::from_ref(&self.function), &[], Some(module), names)
    }

    /// Whether a path may begin with what the function returns.
    #[must_use]
    pub fn tells_result(&self) -> bool {
        let mut names = self.paths.iter().filter_map(|path| Some(Path::parse(path).ok()?.name.0));
        names.any(|name| ["$ret", "retval"].contains(&name))
    }
}

/// `GLOB:mod:NAME: PATHS` at its last colon but those of the paths. A path may be called mod, and have a length.
fn split_module(text: &str) -> Option<(&str, &str)> {
    let (glob, rest) = text.split_once(MODULE).filter(|(glob, _)| !glob.contains(':'))?;
    let (module, paths) = rest.split_once(':')?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_-*?[]".contains(c);
    let function = text.get(..glob.len() + MODULE.len() + module.len())?;
    module.chars().all(is_name).then_some((function, paths))
}

/// As it was given.
impl fmt::Display for ArgumentSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.function, self.paths.join(", "))
    }
}

impl Kernel {
    /// The sites of the functions that `--arg` is about, as indices into [`Kernel::sites`]. None if it is about
    /// those of modules.
    ///
    /// # Errors
    /// None matches; names that are like it are told.
    pub fn argument_sites(&self, spec: &ArgumentSpec) -> Result<Vec<usize>, SpecError> {
        let function = &spec.function;
        if spec.names_module() {
            return Ok(Vec::new());
        }
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
            ("a_*:mod:m: b->c, d:40", spec("a_*:mod:m", &["b->c", "d:40"])),
            (" :mod:snd-*:b ", spec(":mod:snd-*", &["b"])),
            ("a: mod:40", spec("a", &["mod:40"])),
            ("a:mod:40", spec("a", &["mod:40"])),
            ("a:mod:40,b:30", spec("a", &["mod:40", "b:30"])),
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
            (" a b:mod:m: c", "is not a function"),
            ("a:mod:m:", "names no values"),
            ("a: b, b", "'b' is given twice"),
            ("a: x=b, x=c", "'x' is given twice"),
            ("a: b->", "'b->' at its character 4"),
        ] {
            let error = ArgumentSpec::parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    // A value of a function of a module would be recorded of others, or its end would not be looked at.
    #[test]
    fn functions_of_modules_are_meant_as_filters_mean_them() {
        let spec = |text| ArgumentSpec::parse(text).unwrap();
        let (any, own) = (spec("a*: b, x=$ret"), spec("a*:mod:m-1: b, c->ret"));
        assert!(!any.names_module() && own.names_module());
        assert!(own.is_about("m_1") && !own.is_about("m") && !any.is_about("m_1"));
        for (spec, module, name, is_meant) in [
            (&any, "m", "ab", true),
            (&any, "m", "b", false),
            (&own, "m_1", "ab", true),
            (&own, "m", "ab", false),
        ] {
            let names = ["none", name].into_iter();
            assert_eq!(spec.means(module, &names), is_meant, "{spec}: {name} of {module}");
        }
        assert!(any.tells_result() && !own.tells_result() && spec("a: retval->b").tells_result());
    }
}
