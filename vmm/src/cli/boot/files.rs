//! Detects files of a run that are the same file.

use super::Args;
use crate::files;
use anyhow::{Result, bail};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The identity of a file, whatever its name.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Identity {
    /// Device and inode.
    There(u64, u64),
    /// Where it would be made.
    Missing(PathBuf),
}

impl Identity {
    /// `None` for what can take any number of outputs (`/dev/null`), and what nobody can make.
    pub(super) fn of(path: &Path) -> Option<Identity> {
        match fs::metadata(path) {
            Ok(file) if file.file_type().is_char_device() => None,
            Ok(file) => Some(Identity::There(file.dev(), file.ino())),
            Err(_) => files::target(path).ok().flatten().map(Identity::Missing),
        }
    }
}

/// Refuses outputs that would destroy an input, or each other, or that nobody can make.
///
/// # Errors
/// With the names of both.
pub(super) fn check(args: &Args, kernel: &Path) -> Result<()> {
    let console = match args.console.as_str() {
        "stderr" | "none" => None,
        path => Some(("--console", Path::new(path))),
    };
    let trace = args.output.as_deref().map(|path| ("-o", path));
    let (rules, results) = args.rules.files();
    let results = results.map(|path| ("--results", path.as_path()));
    let outputs: Vec<_> = trace.into_iter().chain(console).chain(results).collect();
    let options = [
        ("--initrd", &args.initrd),
        ("--system-map", &args.system_map),
        ("--boot-image", &args.boot_image),
    ];
    let options = options.into_iter().filter_map(|(name, path)| Some((name, path.as_deref()?)));
    let added = args.add.iter().map(|path| ("--add", path.as_path()));
    let inputs: Vec<_> = std::iter::once(("the kernel", kernel))
        .chain(options)
        .chain(added)
        .chain(args.disks.paths().map(|path| ("--disk", path)))
        .chain(rules.iter().map(|path| ("--rules", path.as_path())))
        .collect();
    for (option, path) in &outputs {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
            bail!("{option} {}: there is no directory {}", path.display(), parent.display());
        }
        let Some(file) = Identity::of(path) else { continue };
        if let Some((input, other)) =
            inputs.iter().find(|(_, other)| Identity::of(other).as_ref() == Some(&file))
        {
            let (path, other) = (path.display(), other.display());
            bail!("{option} {path} would overwrite {input} ({other}): choose another file");
        }
    }
    for (index, (one, path)) in outputs.iter().enumerate() {
        let Some(file) = Identity::of(path) else { continue };
        let mut others = outputs.iter().skip(index + 1);
        if let Some((other, same)) =
            others.find(|(_, same)| Identity::of(same).as_ref() == Some(&file))
        {
            let (path, same) = (path.display(), same.display());
            bail!(
                "{one} {path} and {other} {same} are the same file: choose another for one of them"
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::args;
    use std::os::unix::fs::symlink;

    /// What is wrong with a command line; `@` is the directory.
    fn error(directory: &Path, line: &str) -> Option<String> {
        let at = format!("{}/", directory.display());
        let args = args(&line.replace('@', &at)).unwrap();
        check(&args, &directory.join("kernel"))
            .err()
            .map(|error| error.to_string().replace(&at, "@"))
    }

    // The user's kernel was cut to nothing before anybody had read it.
    #[test]
    fn no_output_is_an_input() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for file in ["kernel", "initrd", "map", "added", "other"] {
            fs::write(at(file), file).unwrap();
        }
        symlink("kernel", at("link")).unwrap();
        fs::hard_link(at("kernel"), at("hard")).unwrap();
        let error = |line: &str| error(directory.path(), line);
        for output in ["@kernel", "@./kernel", "@link", "@hard"] {
            for option in ["-o", "--console"] {
                let error = error(&format!("{option} {output}")).unwrap();
                assert!(error.starts_with(option) && error.contains("the kernel"), "{error}");
            }
        }
        assert_eq!(
            error("--initrd @initrd -o @initrd").unwrap(),
            "-o @initrd would overwrite --initrd (@initrd): choose another file"
        );
        assert!(error("--system-map @map --console @map").unwrap().contains("--system-map"));
        assert!(error("--add @other --add @added -o @added").unwrap().contains("--add (@added)"));
        assert_eq!(error("--add @added --system-map @map -o @other --console @new"), None);
        assert_eq!(error("--add @missing -o @new"), None);
        assert!(error("--disk @other,rw -o @other").unwrap().contains("--disk (@other)"));
        let rules = "--rules @other --results junit=@other";
        assert!(error(rules).unwrap().starts_with("--results @other would overwrite --rules"));
    }

    // Two writers of one file leave a trace that nobody can read.
    #[test]
    fn outputs_are_two_files() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("there"), "").unwrap();
        symlink("new", at("link")).unwrap();
        symlink(".", at("self")).unwrap();
        let error = |line: &str| error(directory.path(), line);
        for (one, other) in
            [("@there", "@there"), ("@new", "@new"), ("@new", "@link"), ("@self/new", "@link")]
        {
            let error = error(&format!("-o {one} --console {other}")).unwrap();
            assert!(error.contains("are the same file"), "{error}");
        }
        let results = "--results tap=@new --results junit=@there --console @link";
        assert!(error(results).unwrap().contains("are the same file"));
        assert_eq!(error("-o @there --console @new"), None);
        assert_eq!(error("-o /dev/null --console /dev/null"), None);
        assert_eq!(error("-o none --console none"), None);
        let nowhere = error("-o @no/where").unwrap();
        assert_eq!(nowhere, "-o @no/where: there is no directory @no");
    }
}
