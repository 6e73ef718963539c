//! The guest agent: `/init` of the built-in initramfs, or an ordinary command in any system.
//!
//! As process 1 it makes a minimal system, loads the modules it was given, runs one command line, reports
//! over the agent channel (see `README.md`) and powers off. Called by the name of an applet (`ls`, `cat`, ...)
//! it is that applet, so that a command line can do something where there is no userland at all.

mod applets;
mod channel;
mod command;
mod init;
mod words;

use std::process::ExitCode;

const USAGE: &str =
    "usage: vmtrace-agent run 'COMMAND LINE' | applet NAME [ARGUMENT]... | --version";

fn main() -> ExitCode {
    if std::process::id() == 1 {
        init::main();
    }
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    let name = std::path::Path::new(&name).file_name().unwrap_or_default();
    if let Some(applet) = applets::find(name) {
        return applet(&args.collect::<Vec<_>>());
    }
    let args: Vec<_> = args.collect();
    match (args.first().and_then(|a| a.to_str()), args.get(1..).unwrap_or_default()) {
        (Some("run"), [line]) => command::run_as_process(line),
        (Some("applet"), [name, rest @ ..]) => match applets::find(name) {
            Some(applet) => applet(rest),
            None => fail(&format!("no applet {}", name.to_string_lossy())),
        },
        (Some("--version"), []) => {
            println!("vmtrace-agent {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        _ => fail(USAGE),
    }
}

fn fail(message: &str) -> ExitCode {
    eprintln!("vmtrace-agent: {message}");
    ExitCode::from(2)
}
