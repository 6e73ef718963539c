//! Command lines: a usage error or values, never a panic.

use clap::Parser;
use vmtrace::cli::{boot, ctl, functions, report, run as guest_run, stream};

macro_rules! lines {
    ($($name:ident: $args:ty),* $(,)?) => {
        $(#[derive(Parser)]
        #[command(no_binary_name = true)]
        struct $name {
            #[command(flatten)]
            _args: $args,
        })*

        /// Parses words as each of the subcommands would.
        fn parse(words: &[String]) {
            $(if let Err(error) = $name::try_parse_from(words) {
                assert!(!error.to_string().is_empty());
            })*
        }
    };
}

lines! {
    Boot: boot::Args,
    Ctl: ctl::Args,
    Functions: functions::Args,
    Report: report::Args,
    Run: guest_run::Args,
    Stream: stream::Args,
}

pub(crate) fn run(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let words: Vec<String> = text.split('\n').take(40).map(str::to_owned).collect();
    parse(&words);
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    [
        "vmlinuz\n-f\nvfs_*\n-n\n*_read\n--cpus\n2\n--memory\n512M\n--args\n--arg\nvfs_read: file->f_flags",
        "vmlinuz\n--tracer\nfs=vfs_*:graph+args\n--timeout\n2.5\n--run\nls\n-o\nx.vmt\n--console\nnone",
        "/tmp/socket\nfilter\n-f\nvfs_*",
        "/tmp/socket\ntracer\nadd\nfs=vfs_*",
        "x.vmt\n--graph",
        "vmlinuz\n--buffer\n64K\n--overflow\noverwrite\n--socket\n/tmp/s\n--host\nemulated",
    ]
    .map(|line| line.as_bytes().to_vec())
    .to_vec()
}
