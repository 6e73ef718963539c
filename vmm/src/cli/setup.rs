//! `vmtrace setup`: fetches kernels and guests' busybox from Debian's packages, by the script that developers use
//! (`images/fetch`). apt checks signatures and handles mirrors and proxies better than new code would.

use crate::emulated::HostArch;
use anyhow::{Context as _, Result};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// The whole program for bash, embedded, so that it needs no files.
const SCRIPT: &str =
    concat!(include_str!("../../../images/apt.sh"), "\n", include_str!("../../../images/fetch"));

/// Arguments of `vmtrace setup`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// What to fetch: host-x86_64, host-riscv64 (what emulated hosts need), userland-x86_64,
    /// userland-riscv64 (busybox for guests), a kernel to trace as --list has them, or all; by
    /// default host and userland of this machine's architecture
    #[arg(value_name = "NAME", conflicts_with = "list")]
    names: Vec<String>,
    /// Show the names, and which of them are fetched
    #[arg(long)]
    list: bool,
    /// Fetch the newest versions, even if older ones are there
    #[arg(long, conflicts_with = "list")]
    refresh: bool,
    /// Report errors only
    #[arg(long)]
    quiet: bool,
}

/// Becomes the script; its exit code is the program's.
pub(super) fn run(args: &Args) -> Result<u8> {
    let error = command(args).exec();
    Err(error).context("setup is a bash script: install bash")
}

fn command(args: &Args) -> Command {
    let mut command = Command::new("bash");
    command.args(["--norc", "-c", SCRIPT, "vmtrace setup"]);
    command.env("VMTRACE_FETCH_AS", "vmtrace setup").env_remove("BASH_ENV");
    if args.refresh {
        command.arg("--refresh");
    }
    if args.quiet {
        command.arg("--quiet");
    }
    if args.list {
        command.arg("list");
    } else if args.names.is_empty() {
        let arch = HostArch::native().name();
        command.args([format!("host-{arch}"), format!("userland-{arch}")]);
    }
    command.args(&args.names);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// Runs a line on a cache; returns the exit code, and what was said.
    fn setup(cache: &Path, line: &str) -> (Option<i32>, String) {
        let words = std::iter::once("setup").chain(line.split_whitespace());
        let args = <Line as clap::Parser>::try_parse_from(words).unwrap().args;
        let output = command(&args).env("VMTRACE_CACHE", cache).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    }

    // Without the source tree: the script is not where it looks for what belongs to it.
    #[test]
    fn the_script_is_whole() {
        let cache = tempfile::tempdir().unwrap();
        let (code, said) = setup(cache.path(), "--list");
        assert_eq!(code, Some(0), "{said}");
        for name in ["x86_64-6.12", "riscv64-7", "host-x86_64", "host-riscv64", "userland-riscv64"]
        {
            let line = said.lines().find(|line| line.split(' ').next() == Some(name));
            assert!(line.is_some_and(|line| line.ends_with("not fetched")), "{said}");
        }
    }

    #[test]
    fn an_unknown_name_is_one_error() {
        let cache = tempfile::tempdir().unwrap();
        let (code, said) = setup(cache.path(), "host-vax");
        assert_eq!(code, Some(1), "{said}");
        assert!(said.starts_with("vmtrace setup: error: unknown kernel host-vax; "), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }

    // Not code for the shell.
    #[test]
    fn names_are_arguments() {
        let cache = tempfile::tempdir().unwrap();
        let (code, said) = setup(cache.path(), "$(touch${IFS}/tmp/x);");
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("unknown kernel $(touch${IFS}/tmp/x);"), "{said}");
    }
}
