//! `vmtrace sandbox`: tries a forbidden or allowed operation in a confined thread. For tests.

use super::exit;
use crate::sandbox::trial::{Deed, attempt};
use crate::sandbox::{Settings, Thread, set_up};
use anyhow::{Context, Result};
use std::path::PathBuf;
use vmtrace_system::say;

/// Try something in the sandbox
#[derive(Debug, clap::Args)]
pub struct Args {
    /// As a thread of this kind
    #[arg(value_parser = parse_thread)]
    thread: Thread,
    /// program, process, internet, code, trace, machine, guest, handler, signal, thread, read,
    /// write, remove, terminal, panic, work
    #[arg(value_parser = ["program", "process", "internet", "code", "trace", "machine", "guest",
        "handler", "signal", "thread", "read", "write", "remove", "terminal", "panic", "work"])]
    deed: String,
    /// What is read, written or removed
    #[arg(default_value = "/")]
    file: PathBuf,
    /// A file to be written at the end
    #[arg(long)]
    written: Option<PathBuf>,
    /// A directory whose files are removed at the end
    #[arg(long)]
    cleared: Option<PathBuf>,
    /// The terminal is raw
    #[arg(long)]
    terminal: bool,
    /// As of boot
    #[arg(long)]
    no_seccomp: bool,
}

fn parse_thread(name: &str) -> Result<Thread, String> {
    Thread::ALL
        .into_iter()
        .find(|thread| thread.name() == name)
        .ok_or_else(|| format!("there are {:?}", Thread::ALL.map(Thread::name)))
}

/// Runs the subcommand; returns the exit code.
///
/// # Errors
/// When the deed fails otherwise than by the sandbox's ending the process.
pub fn run(args: Args) -> Result<u8> {
    let deed = match args.deed.as_str() {
        "program" => Deed::Program,
        "process" => Deed::Process,
        "internet" => Deed::Internet,
        "code" => Deed::Code,
        "trace" => Deed::Trace,
        "machine" => Deed::Machine,
        "guest" => Deed::Guest,
        "handler" => Deed::Handler,
        "signal" => Deed::Signal,
        "thread" => Deed::Thread,
        "read" => Deed::Read(args.file),
        "write" => Deed::Write(args.file),
        "remove" => Deed::Remove(args.file),
        "terminal" => Deed::Terminal,
        "panic" => Deed::Panic,
        _ => Deed::Work,
    };
    set_up(&Settings {
        unfiltered: args.no_seccomp,
        cleared: args.cleared.into_iter().collect(),
        written: args.written.into_iter().collect(),
        terminal: args.terminal,
    })?;
    attempt(args.thread, deed).context("refused")?;
    say!("done");
    Ok(exit::DONE)
}
