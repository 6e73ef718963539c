//! `vmtrace run`: commands, modules and files of a guest, by its agent.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::exit;
use crate::agent::protocol::{Command, Entry, LoadedModule, Reason, Run};
use crate::agent::{AgentError, Connection, Endpoint, Handle, Streams};
use crate::files::Output;
use vmtrace_system::say;

/// The exit status if the command could not be run for a reason for which shells have no number.
const CANNOT_RUN: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// The numbers that commands leave free, as `env` and `chroot` of coreutils have them.
pub(super) const HELP: &str = "\
The exit code is the command's, or 128 and its signal's number; 125 if vmtrace or the agent
failed (also where there is no such socket), 126 if the program cannot be started, 127 if there is
none. With --modules, --list and --fetch, which run nothing, it is 0, or 1 for a failure.";

/// Arguments of `vmtrace run`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true))]
pub struct Args {
    /// Unix socket of `vmtrace boot --socket` or of a vsock device (as Firecracker's), or vsock:CID[:PORT]
    socket: PathBuf,
    /// Program in the guest and its arguments
    #[arg(trailing_var_arg = true, group = "what", value_name = "CMD")]
    command: Vec<OsString>,
    /// Run a command line: by the guest's /bin/sh, or split into words where there is none
    #[arg(short = 'c', long, value_name = "LINE", group = "what")]
    command_line: Option<OsString>,
    /// Run it in this directory of the guest
    #[arg(long, value_name = "DIR", conflicts_with_all = ["modules", "list", "fetch"])]
    cwd: Option<OsString>,
    /// Set a variable of its environment; may be repeated
    #[arg(short, long, value_name = "NAME=VALUE", conflicts_with_all = ["modules", "list", "fetch"])]
    env: Vec<OsString>,
    /// Print the loaded modules: name, size, users, state, address
    #[arg(long, group = "what")]
    modules: bool,
    /// List this directory of the guest
    #[arg(long, value_name = "PATH", group = "what")]
    list: Option<OsString>,
    /// Print this file of the guest
    #[arg(long, value_name = "PATH", group = "what")]
    fetch: Option<OsString>,
    /// Write the file of --fetch here
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["command", "command_line", "modules", "list"])]
    output: Option<PathBuf>,
    /// Wait up to SECS seconds for the socket to appear and the agent to answer
    #[arg(long, value_name = "SECS", default_value_t = 0)]
    wait: u64,
    /// SOCKET is that of a vsock device
    #[arg(long)]
    vsock: bool,
    /// The agent's vsock port, unless SOCKET determines it [default: 1025]
    #[arg(long, value_name = "N")]
    port: Option<u32>,
}

/// Asks the agent; returns the exit code.
///
/// # Errors
/// When modules or files cannot be had; what concerns a command is printed here, since it has its own exit status.
pub fn run(args: Args) -> Result<u8> {
    let endpoint = Endpoint::parse(&args.socket, args.port, args.vsock);
    let connection = endpoint.connect_within(Duration::from_secs(args.wait));
    if args.modules {
        let modules = connection?.modules()?;
        return printed(modules.iter().try_for_each(print_module));
    }
    if let Some(path) = args.list {
        return match connection?.list(path.as_bytes(), |entry| print_entry(&entry)) {
            Err(AgentError::Output(error)) => printed(Err(error)),
            done => Ok(done.map(|()| exit::DONE)?),
        };
    }
    if let Some(path) = args.fetch {
        return fetch(connection?, &path, args.output);
    }
    let command = match args.command_line {
        Some(line) => Command::Line(line.into_vec()),
        None => Command::Program(args.command.into_iter().map(OsString::into_vec).collect()),
    };
    let run = Run {
        command,
        directory: args.cwd.unwrap_or_default().into_vec(),
        environment: args.env.into_iter().map(OsString::into_vec).collect(),
    };
    Ok(connection
        .map_err(Into::into)
        .and_then(|connection| execute(connection, run))
        .unwrap_or_else(|error| {
            say!("vmtrace: error: {error:#}");
            failure(&error)
        }))
}

/// A reader of standard output that has seen enough is no error.
fn printed(result: io::Result<()>) -> Result<u8> {
    super::inspect::ignore_closed_pipe(result)?;
    Ok(exit::DONE)
}

fn print_module(module: &LoadedModule) -> io::Result<()> {
    let LoadedModule { name, size, address, state, users } = module;
    let users = if users.is_empty() { "-".to_owned() } else { users.join(",") };
    writeln!(io::stdout(), "{name} {size} {users} {state} {address:#018x}")
}

fn print_entry(entry: &Entry) -> io::Result<()> {
    // Names may have anything in them.
    let name = String::from_utf8_lossy(&entry.name);
    let name: String = name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    writeln!(io::stdout(), "{} {:>12} {name}", mode(entry.mode), entry.size)
}

/// As `ls -l` has it.
fn mode(mode: u32) -> String {
    let kind = match mode >> 12 {
        0o01 => 'p',
        0o02 => 'c',
        0o04 => 'd',
        0o06 => 'b',
        0o10 => '-',
        0o12 => 'l',
        0o14 => 's',
        _ => '?',
    };
    let mut text = String::from(kind);
    for (bit, c) in (0..9).rev().zip("rwxrwxrwx".chars()) {
        text.push(if mode >> bit & 1 == 1 { c } else { '-' });
    }
    text
}

fn fetch(connection: Connection, path: &OsString, output: Option<PathBuf>) -> Result<u8> {
    let Some(to) = output else {
        return match connection.fetch(path.as_bytes(), &mut io::stdout().lock()) {
            Err(AgentError::Output(error)) => printed(Err(error)),
            done => Ok(done.map(|_| exit::DONE)?),
        };
    };
    // An older file is whole until the new one is.
    let text = || to.display().to_string();
    let file = Output::open(&to).with_context(text)?;
    match connection.fetch(path.as_bytes(), &mut file.file()) {
        Err(error @ AgentError::Output(_)) => return Err(error).with_context(text),
        done => done?,
    };
    file.done().with_context(text)?;
    Ok(exit::DONE)
}

fn execute(connection: Connection, run: Run) -> Result<u8> {
    let (mut stdout, mut stderr) = (io::stdout(), io::stderr());
    let streams =
        Streams { stdin: Box::new(io::stdin()), stdout: &mut stdout, stderr: &mut stderr };
    let ended = connection.run(run, streams, forward_signals)?;
    Ok(ended.code())
}

/// Signals are for the command in the guest; who insists ends the connection, which kills it.
fn forward_signals(handle: Handle) {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    match signal_hook::iterator::Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM]) {
        Ok(mut signals) => {
            std::thread::spawn(move || {
                let mut asked = false;
                for signal in &mut signals {
                    match u8::try_from(signal) {
                        Ok(signal) if !asked => handle.signal(signal),
                        _ => handle.disconnect(),
                    }
                    asked = true;
                }
            });
        }
        Err(error) => log::warn!("signals are not handled: {error}"),
    }
}

fn failure(error: &anyhow::Error) -> u8 {
    match error.downcast_ref() {
        Some(AgentError::Failed(failure)) => match failure.reason {
            Reason::NotFound => NOT_FOUND,
            Reason::Denied => NOT_EXECUTABLE,
            Reason::Other | Reason::BadRequest | Reason::Busy => CANNOT_RUN,
        },
        _ => CANNOT_RUN,
    }
}
