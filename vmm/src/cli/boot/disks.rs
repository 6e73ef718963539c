//! `--disk`: files and devices that become the guest's disks.

use super::files::Identity;
use super::headings;
use crate::devices::virtio::blk::{Disk, DiskError};
use crate::emulated::HostDisk;
use anyhow::{Context, Result, bail};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Options about disks.
#[derive(Clone, Debug, clap::Args)]
pub struct Disks {
    /// Add a disk to the guest (virtio): a raw image or a block device, read-only unless rw is given, as in
    /// `--disk root.img,rw --cmdline root=/dev/vda`; may be repeated, up to 16 times: /dev/vda, /dev/vdb
    /// and so on. If the drivers are modules, the agent loads them in the built-in initramfs, under --root,
    /// and in an --initrd with --run or --interactive. Any other --initrd has to load its own
    #[arg(long, value_name = "FILE[,rw]", value_parser = parse, help_heading = headings::MACHINE)]
    pub disk: Vec<Spec>,
}

/// A disk as the user has named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    pub(super) path: PathBuf,
    writable: bool,
}

/// Only what ends like an option is one: names may have commas.
fn parse(text: &str) -> Result<Spec, String> {
    let (path, writable) = match (text.strip_suffix(",rw"), text.strip_suffix(",ro")) {
        (Some(path), _) => (path, true),
        (_, Some(path)) => (path, false),
        _ => (text, false),
    };
    if path.is_empty() {
        return Err("a disk has a file: FILE or FILE,rw".to_owned());
    }
    Ok(Spec { path: path.into(), writable })
}

impl Disks {
    /// Whether there are any.
    pub(super) fn any(&self) -> bool {
        !self.disk.is_empty()
    }

    /// Names of all.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.disk.iter().map(|disk| disk.path.as_path())
    }

    /// Opens and locks them all.
    ///
    /// # Errors
    /// When one cannot be a disk, or not beside the others, or somebody else uses it.
    pub(super) fn open(&self) -> Result<Vec<Disk>> {
        for (index, one) in self.disk.iter().enumerate() {
            let Some(file) = Identity::of(&one.path) else { continue };
            let mut others = self.disk.iter().skip(index + 1);
            if let Some(other) = others.find(|other| {
                (one.writable || other.writable) && Identity::of(&other.path) == Some(file.clone())
            }) {
                let (one, other) = (one.path.display(), other.path.display());
                bail!(
                    "--disk {one} and --disk {other} are the same file, and what is written to one \
                     would damage the other: give each disk a file of its own"
                );
            }
        }
        self.disk.iter().map(Spec::open).collect()
    }
}

impl Spec {
    fn open(&self) -> Result<Disk> {
        let opened = Disk::open(&self.path, self.writable);
        let missing = matches!(&opened, Err(DiskError::Open { source, .. })
            if source.kind() == ErrorKind::NotFound);
        let name = self.path.to_string_lossy();
        let opened = opened.context("--disk");
        match name.rsplit_once(',') {
            Some((_, option)) if missing => {
                opened.with_context(|| format!("disks have no option {option}, only rw and ro"))
            }
            _ => opened,
        }
    }
}

/// The same for an emulated host.
pub(super) fn for_host(disks: &[Disk]) -> Vec<HostDisk> {
    let of = |disk: &Disk| HostDisk {
        path: disk.path().to_owned(),
        writable: disk.writable(),
        block_device: disk.is_block_device(),
    };
    disks.iter().map(of).collect()
}

/// The options of the vmtrace in an emulated host that has these disks.
pub(super) fn in_host(disks: &[Disk]) -> impl Iterator<Item = String> {
    disks.iter().zip('a'..='z').map(|(disk, letter)| {
        let how = if disk.writable() { "rw" } else { "ro" };
        format!("--disk=/dev/vd{letter},{how}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::args;
    use std::fs::{self, File};

    fn open(line: &str) -> Result<Vec<Disk>> {
        args(line).unwrap().disks.open()
    }

    /// What is wrong; `@` is the directory.
    fn error(directory: &Path, line: &str) -> String {
        let at = format!("{}/", directory.display());
        format!("{:#}", open(&line.replace('@', &at)).unwrap_err()).replace(&at, "@")
    }

    #[test]
    fn only_what_ends_like_an_option_is_one() {
        let spec = |text| parse(text).map(|spec| (spec.path, spec.writable));
        assert_eq!(spec("a.img"), Ok(("a.img".into(), false)));
        assert_eq!(spec("a.img,rw"), Ok(("a.img".into(), true)));
        assert_eq!(spec("a,rw,ro"), Ok(("a,rw".into(), false)));
        assert_eq!(spec("a,b.img"), Ok(("a,b.img".into(), false)));
        assert!(spec(",rw").is_err() && spec("").is_err());
    }

    // Anything else would be found out by a guest whose root cannot be mounted.
    #[test]
    fn what_is_no_disk_is_one_clear_error_before_anything_boots() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for (name, bytes) in [("good", 1024), ("a,b", 512), ("odd", 1000), ("empty", 0)] {
            File::create(at(name)).unwrap().set_len(bytes).unwrap();
        }
        let error = |line: &str| error(directory.path(), line);
        let good =
            |line: &str| open(&line.replace('@', &format!("{}/", directory.path().display())));
        let disks = good("--disk @good,rw --disk @a,b").unwrap();
        assert_eq!(
            in_host(&disks).collect::<Vec<_>>(),
            ["--disk=/dev/vda,rw", "--disk=/dev/vdb,ro"]
        );
        assert_eq!(disks[0].bytes(), 1024);
        let used = error("--disk @good");
        assert!(used.starts_with("--disk: @good is used by another program"), "{used}");
        drop(disks);
        assert_eq!(good("--disk @good --disk @good").unwrap().len(), 2, "both are only read");
        for (line, what, remedy) in [
            ("--disk @none", "@none", "No such file"),
            ("--disk @good,wr", "no option wr", "rw and ro"),
            ("--disk @", "is a directory", "an image"),
            ("--disk @empty", "@empty is empty", "truncate -s"),
            ("--disk @odd,rw", "@odd has 1000 bytes", "truncate -s %512"),
            ("--disk /dev/null", "neither a file nor a block device", "an image"),
            ("--disk @good,rw --disk @good", "are the same file", "a file of its own"),
        ] {
            let error = error(line);
            assert!(error.contains(what) && error.contains(remedy), "{line}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
        fs::hard_link(at("good"), at("hard")).unwrap();
        assert!(error("--disk @good --disk @hard,rw").contains("are the same file"));
    }
}
