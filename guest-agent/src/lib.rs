//! The guest agent: `/init` of the built-in initramfs, or an ordinary service in any system.
//!
//! As process 1 it prepares a minimal system, loads the modules in the initramfs, serves the host over vsock, runs
//! one command line, reports over the agent channel (see `README.md`) and powers off. If it is called by the name
//! of an applet (`ls`, `cat`, ...), it is that applet: so a guest without a userland can run simple commands.
//!
//! The VMM uses [`protocol`]; the rest is public for tests.

mod applets;
mod channel;
mod clock;
mod command;
mod console;
mod init;
mod mark;
mod output;
pub mod protocol;
pub mod reaper;
mod root;
pub mod server;
mod words;

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

const USAGE: &str = "usage: vmtrace-agent serve [--port N] | mark TEXT | run 'COMMAND LINE' \
                     | applet NAME [ARGUMENT]... | --version";

pub use command::PATH;
pub use words::{Line, Step};

/// How a command line is run in a system of vmtrace's own that has a shell, and these programs beside it.
///
/// # Errors
/// Why it cannot be run at all, for the user.
pub fn understand(line: &str, is_program: impl Fn(&str) -> bool) -> Result<Line, String> {
    match words::understand(line, is_program).map_err(|error| error.to_string())? {
        Line::Steps(steps) if steps.is_empty() => Err("there is no command in it".to_owned()),
        line => Ok(line),
    }
}

/// Whether the applet of that name leaves a command to a real program (busybox's): it has options.
pub fn needs_program(name: impl AsRef<OsStr>, args: &[impl AsRef<OsStr>]) -> bool {
    let option = |arg: &OsStr| arg.len() > 1 && arg.as_encoded_bytes().starts_with(b"-");
    ["cat", "ls"].iter().any(|applet| name.as_ref() == *applet)
        && args.iter().any(|arg| option(arg.as_ref()))
}

/// The whole program.
pub fn main() -> ExitCode {
    if std::process::id() == 1 {
        init::main();
    }
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    let name = std::path::Path::new(&name).file_name().unwrap_or_default();
    if let Some(applet) = applets::find(name) {
        let args: Vec<_> = args.collect();
        // Without a real one the applet says that it knows no options.
        if needs_program(name, &args) {
            command::become_real(name, &args);
        }
        return applet(&args);
    }
    let args: Vec<_> = args.collect();
    match (args.first().and_then(|a| a.to_str()), args.get(1..).unwrap_or_default()) {
        (Some("serve"), options) => serve(options),
        (Some("mark"), words) => mark::mark(words),
        (Some("run"), [line]) => command::run_as_process(line),
        (Some("login"), [shell]) => console::login(shell.as_ref()),
        (Some("shell"), [shell]) => console::become_shell(shell.as_ref()),
        (Some("applet"), [name, rest @ ..]) => match applets::find(name) {
            Some(applet) => applet(rest),
            None => fail(&format!("no applet {}", name.to_string_lossy())),
        },
        (Some("--version"), []) => {
            println!("{}", server::SOFTWARE);
            ExitCode::SUCCESS
        }
        _ => fail(USAGE),
    }
}

/// `vmtrace-agent serve [--port N]`, until it is killed.
fn serve(options: &[OsString]) -> ExitCode {
    let port = match options {
        [] => Some(protocol::AGENT_PORT),
        [option, port] if option == "--port" => port.to_str().and_then(|port| port.parse().ok()),
        _ => None,
    };
    let Some(port) = port else { return fail(USAGE) };
    let error = match server::Listener::bind(port) {
        Ok(listener) => {
            let server = server::Server::new(reaper::Reaper::new());
            let log = |line: &str| eprintln!("vmtrace-agent: {line}");
            format!("vsock port {port}: {}", listener.serve(&server, log))
        }
        Err(error) => error,
    };
    eprintln!("vmtrace-agent: {error}");
    ExitCode::FAILURE
}

fn fail(message: &str) -> ExitCode {
    eprintln!("vmtrace-agent: {message}");
    ExitCode::from(2)
}
