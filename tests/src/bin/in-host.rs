//! Runs programs in one emulated host, for development: `in-host [--riscv64] [--verbose] [--icount]
//! [--cpus N] [--memory MIB] [--start-timeout SECONDS] [--file NAME=PATH]... -- PROGRAM [ARGUMENT]... [-- PROGRAM ...]`. PROGRAM is
//! a static program of the host's architecture; `vmtrace` is the one of this build.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use vmtrace::emulated::{EmulatedHost, FileSource, HostArch, HostOptions, Interrupts, Job};

fn main() -> ExitCode {
    match run() {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("in-host: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<u8> {
    let interrupts = Arc::new(Interrupts::install()?);
    let mut options = HostOptions {
        progress: true,
        vmtrace: vmtrace_tests::vmtrace()?,
        source: vmtrace::SOURCE,
        interrupts: Some(interrupts.clone()),
        ..HostOptions::default()
    };
    let mut args = std::env::args().skip(1);
    loop {
        let arg = args.next().context("no program; see the source")?;
        let mut value = || args.next().with_context(|| format!("{arg} lacks a value"));
        match arg.as_str() {
            "--riscv64" => {
                options.arch = HostArch::Riscv64;
                options.vmtrace = vmtrace_tests::vmtrace_for(options.arch)?;
            }
            "--verbose" => options.verbose = true,
            "--icount" => options.icount = true,
            "--cpus" => options.cpus = value()?.parse()?,
            "--memory" => options.memory = value()?.parse()?,
            "--start-timeout" => options.start_timeout = Duration::from_secs(value()?.parse()?),
            "--file" => {
                let value = value()?;
                let (name, path) = value.split_once('=').context("--file NAME=PATH")?;
                options.files.push((name.to_owned(), FileSource::Path(path.into())));
            }
            "--" => break,
            _ => bail!("unknown option {arg}"),
        }
    }
    let jobs: Vec<String> = args.collect();
    let mut host = EmulatedHost::start(&options)?;
    let mut code = 0;
    for job in jobs.split(|arg| arg == "--") {
        let (program, args) = job.split_first().context("no program")?;
        let (mut stdout, mut stderr) = (std::io::stdout(), std::io::stderr());
        let mut run = Job::new(args, &mut stdout, &mut stderr);
        if program != "vmtrace" {
            let path = format!("/bin/{}", program.rsplit('/').next().unwrap_or(program));
            host.put_file(&path, &FileSource::Path(program.into()))?;
            run.program = Some(path);
        }
        run.interrupts = Some(interrupts.clone());
        code = host.run(run)?.exit_code();
    }
    Ok(code)
}
