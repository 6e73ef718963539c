//! `--share`: directories of this machine that the guest can mount.

use super::headings;
use crate::devices::virtio::fs::{MAX_TAG, Share};
use crate::emulated::THIS_PROGRAM;
use anyhow::{Context, Result, anyhow, bail};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use vmtrace_share::READY;

/// The tag of the root.
const ROOT: &str = "vmtrace-root";

/// Options about shares.
#[derive(Clone, Debug, clap::Args)]
pub struct Shares {
    /// Share a directory of this machine with the guest (virtio-fs), read-only unless rw is given; may be
    /// repeated. T is share0, share1 and so on if no tag is given. In the built-in initramfs, under --root,
    /// and in an --initrd with --run or --interactive, the agent loads the driver if it is a module, and
    /// mounts the share at /mnt/T. In any other --initrd: `mount -t virtiofs T DIR`
    #[arg(long, value_name = "DIR[,rw][,tag=T]", value_parser = parse, help_heading = headings::MACHINE)]
    pub share: Vec<Spec>,
    /// Use a directory of this machine as the guest's root; it may be / itself. The guest reads it by
    /// virtio-fs, and keeps its changes in memory. The agent is process 1; the shell in the directory
    /// runs the line of --run
    #[arg(long, value_name = "DIR", conflicts_with_all = ["initrd", "add"], value_parser = parse_root, help_heading = headings::MACHINE)]
    pub root: Option<Spec>,
    /// With --root: process 1 instead of the agent, such as /sbin/init. The agent mounts the root and
    /// the shares, and then executes it
    #[arg(long, value_name = "PATH", requires = "root", conflicts_with = "run", help_heading = headings::MACHINE)]
    pub init: Option<String>,
    /// A share that is served elsewhere, by its tag.
    #[arg(long, hide = true, value_name = "TAG", requires = "share_gateway")]
    pub share_tag: Vec<String>,
    /// Where: by a gateway to them, in their order.
    #[arg(long, hide = true, value_name = "PATH")]
    pub share_gateway: Option<PathBuf>,
}

/// A share as the user has named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    pub(super) path: PathBuf,
    pub(super) writable: bool,
    tag: Option<String>,
}

/// Only what ends like options has some: names may have commas.
fn parse(text: &str) -> Result<Spec, String> {
    let (mut path, mut writable, mut tag) = (text, None, None);
    loop {
        let (rest, option) = path.rsplit_once(',').unwrap_or((path, ""));
        match option {
            "rw" | "ro" if writable.is_none() => writable = Some(option == "rw"),
            _ => match option.strip_prefix("tag=") {
                Some(name) if tag.is_none() => tag = Some(checked(name)?),
                _ => break,
            },
        }
        path = rest;
    }
    if path.is_empty() {
        return Err("a share has a directory: DIR, DIR,rw or DIR,tag=NAME".to_owned());
    }
    Ok(Spec { path: path.into(), writable: writable.unwrap_or(false), tag })
}

/// Of which the guest changes nothing.
fn parse_root(text: &str) -> Result<Spec, String> {
    if text.is_empty() {
        return Err("a root is a directory".to_owned());
    }
    Ok(Spec { path: text.into(), writable: false, tag: Some(ROOT.to_owned()) })
}

/// It is a name of a directory in the guest, too.
fn checked(tag: &str) -> Result<String, String> {
    if tag == ROOT {
        return Err(format!("{ROOT} is the tag of --root"));
    }
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let fits = (1..=MAX_TAG).contains(&tag.len()) && !tag.starts_with('.');
    if fits && tag.chars().all(good) {
        return Ok(tag.to_owned());
    }
    Err(format!(
        "'{tag}' cannot be a tag: letters, digits, '_', '-' and '.', at most {MAX_TAG}, and no '.' first"
    ))
}

impl Shares {
    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.share.len() + self.share_tag.len() + usize::from(self.root.is_some())
    }

    /// Where a directory is the root: process 1 in there, or nothing for the agent.
    pub(super) fn process_1(&self) -> Option<&str> {
        self.root.as_ref().map(|_| self.init.as_deref().unwrap_or_default())
    }

    /// All that are served, with their tags.
    fn served(&self) -> impl Iterator<Item = (String, &Spec)> {
        let shares = self.mounts().map(|(tag, _)| tag).zip(&self.share);
        shares.chain(self.root.iter().map(|root| (ROOT.to_owned(), root)))
    }

    /// Tags of those to be mounted, and whether the guest may write there.
    pub(super) fn mounts(&self) -> impl Iterator<Item = (String, bool)> {
        let tag = |(number, share): (usize, &Spec)| {
            let tag = share.tag.clone().unwrap_or_else(|| format!("share{number}"));
            (tag, share.writable)
        };
        self.share.iter().enumerate().map(tag)
    }

    /// Looks at all of them.
    ///
    /// # Errors
    /// When one cannot be a share, or not beside the others.
    pub(super) fn check(&self) -> Result<()> {
        let mut tags = Vec::new();
        for (tag, share) in self.served() {
            share.check()?;
            if tags.contains(&tag) {
                bail!("--share: two are called {tag}: give each a tag of its own (,tag=NAME)");
            }
            tags.push(tag);
        }
        Ok(())
    }

    /// Starts who serves them, or finds them where they are served.
    ///
    /// # Errors
    /// When one cannot be served.
    pub(super) fn start(&self, unconfined: bool) -> Result<Vec<Share>> {
        let served = self.served().map(|(tag, share)| {
            let shown = || format!("{} {}", share.option(), share.path.display());
            Ok(Share { tag, server: share.serve(unconfined).with_context(shown)? })
        });
        let gateway = self.share_gateway.as_deref().unwrap_or(Path::new(""));
        let elsewhere = self.share_tag.iter().enumerate().map(|(number, tag)| {
            let server = reach(gateway, number).with_context(|| format!("share {tag}"))?;
            Ok(Share { tag: tag.clone(), server })
        });
        served.chain(elsewhere).collect()
    }
}

impl Spec {
    fn is_root(&self) -> bool {
        self.tag.as_deref() == Some(ROOT)
    }

    fn option(&self) -> &str {
        if self.is_root() { "--root" } else { "--share" }
    }

    fn check(&self) -> Result<()> {
        let shown = format!("{} {}", self.option(), self.path.display());
        let found = fs::read_dir(&self.path);
        let Err(error) = found else { return Ok(()) };
        let name = self.path.to_string_lossy().into_owned();
        let option = name.rsplit_once(',').filter(|_| !self.path.exists() && !self.is_root());
        let error = anyhow!(error).context(match option {
            Some((_, option)) => {
                format!("{shown}: shares have no option {option}, only rw, ro and tag=NAME")
            }
            None => format!("{shown} is not a directory that can be read"),
        });
        Err(error)
    }

    /// Starts a process that serves it: what a guest could make of a bug in there is not done with
    /// the guest's memory at hand, nor with more rights than for this directory (docs/security.md).
    fn serve(&self, unconfined: bool) -> Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(THIS_PROGRAM);
        command.arg("serve-share").arg("--directory").arg(&self.path);
        command.args(self.writable.then_some("--writable"));
        command.args(unconfined.then_some(crate::sandbox::OPTION));
        // Signals of the terminal are for the run, which ends in order by them.
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().context("no process to serve it")?;
        drop(command);
        let mut said = [0];
        let ready = (&ours).read_exact(&mut said);
        if ready.is_err() || said != [READY] {
            bail!("the process that was to serve it has ended (process {})", child.id());
        }
        Ok(ours)
    }
}

/// Connects to the gateway.
fn reach(gateway: &Path, number: usize) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(gateway)?;
    writeln!(stream, "CONNECT {number}")?;
    let mut answer = [0; 3];
    stream.read_exact(&mut answer)?;
    if answer != *b"OK\n" {
        bail!("its gateway has refused");
    }
    Ok(stream)
}

/// The options of the vmtrace in an emulated host that has these shares behind a gateway.
pub(super) fn in_host(shares: &[Share], gateway: &str) -> Vec<String> {
    let tags = shares.iter().map(|share| format!("--share-tag={}", share.tag));
    let gateway = (!shares.is_empty()).then(|| format!("--share-gateway={gateway}"));
    tags.chain(gateway).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::args;

    #[test]
    fn only_what_ends_like_options_has_some() {
        let spec = |text| parse(text).map(|spec| (spec.path, spec.writable, spec.tag));
        let tag = |tag: &str| Some(tag.to_owned());
        assert_eq!(spec("/a"), Ok(("/a".into(), false, None)));
        assert_eq!(spec("/a,rw"), Ok(("/a".into(), true, None)));
        assert_eq!(spec("/a,tag=x,rw"), Ok(("/a".into(), true, tag("x"))));
        assert_eq!(spec("/a,rw,tag=x"), Ok(("/a".into(), true, tag("x"))));
        assert_eq!(spec("/a,rw,ro"), Ok(("/a,rw".into(), false, None)));
        assert_eq!(spec("/a,b"), Ok(("/a,b".into(), false, None)));
        for bad in ["", ",rw", "a,tag=", "a,tag=x/y", "a,tag=vmtrace-root", "a,tag=..", "a,tag=é"]
        {
            assert!(spec(bad).is_err(), "{bad}");
        }
        let long = |length| parse(&format!("a,tag={}", "x".repeat(length)));
        assert!(long(MAX_TAG).is_ok() && long(MAX_TAG + 1).is_err());
    }

    #[test]
    fn a_root_is_one_share_more() {
        let shares = args("--root / --share /tmp").unwrap().shares;
        assert_eq!((shares.count(), shares.process_1()), (2, Some("")));
        assert_eq!(shares.mounts().count(), 1, "the agent mounts it otherwise");
        let shares = args("--root / --init /sbin/init").unwrap().shares;
        assert_eq!(shares.process_1(), Some("/sbin/init"));
        for bad in
            ["--root / --initrd x", "--root / --add x", "--init x", "--root / --init x --run y"]
        {
            assert!(args(bad).is_err(), "{bad}");
        }
    }

    // Anything else would be found out by a guest that cannot mount it.
    #[test]
    fn what_is_no_share_is_one_clear_error_before_anything_boots() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("d")).unwrap();
        fs::create_dir(at("a,b")).unwrap();
        fs::write(at("file"), "").unwrap();
        let check = |line: &str| {
            let line = line.replace('@', &format!("{}/", directory.path().display()));
            args(&line).unwrap().shares.check().map_err(|error| format!("{error:#}"))
        };
        assert_eq!(check("--share @d --share @d,rw --share @a,b"), Ok(()));
        for (line, what, remedy) in [
            ("--share @none", "none is not a directory", "No such file"),
            ("--share @file", "file is not a directory", "Not a directory"),
            ("--share @d,wr", "no option wr", "rw, ro and tag"),
            ("--share @d,tag=x --share @a,b,tag=x", "two are called x", ",tag=NAME"),
            ("--root @none", "none is not a directory", "No such file"),
            ("--root @d,rw", "--root @d,rw is not a directory", "No such file"),
            ("--share @d,tag=share1 --share @d", "two are called share1", ",tag=NAME"),
        ] {
            let error = check(line).unwrap_err();
            let line = line.replace('@', &format!("{}/", directory.path().display()));
            let what = what.replace('@', &format!("{}/", directory.path().display()));
            assert!(error.contains(&what) && error.contains(remedy), "{line}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
