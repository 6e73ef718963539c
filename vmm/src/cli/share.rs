//! `vmtrace serve-share`: serves a directory to the guest of another vmtrace, which starts this
//! process.

use super::exit;
use crate::sandbox;
use anyhow::{Context, Result};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use vmtrace_share::{Rights, Server};

/// Serve a directory to a guest, by standard input
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// What is served
    #[arg(long, value_name = "DIR")]
    directory: PathBuf,
    /// The guest may change it
    #[arg(long)]
    writable: bool,
    /// As of boot
    #[arg(long)]
    no_seccomp: bool,
}

/// Runs the subcommand; returns the exit code.
///
/// # Errors
/// When the directory cannot be served, or there is nobody to serve it to.
pub(super) fn run(args: &Args) -> Result<u8> {
    let shown = || format!("--share {}", args.directory.display());
    let rights = if args.writable { Rights::Write } else { Rights::Read };
    // The library tells the log of each message that is none: as many as a guest likes.
    if std::env::var_os("VMTRACE_LOG").is_none() {
        log::set_max_level(log::LevelFilter::Off);
    }
    // A descriptor for each file that the guest knows of.
    vmtrace_system::raise_descriptor_limit();
    let input = std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
    let stream = UnixStream::from(input);
    stream.set_nonblocking(false).context("standard input")?;
    let server = Server::open(&args.directory, rights).with_context(shown)?;
    if !args.no_seccomp {
        sandbox::confine_share(&args.directory, args.writable).with_context(shown)?;
    }
    server.serve(&stream).with_context(shown)?;
    Ok(exit::DONE)
}
