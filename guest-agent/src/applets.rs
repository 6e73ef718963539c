//! The agent's built-in commands, each a function of its arguments.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::channel::drain_console;

/// An applet: arguments without its name, exit code.
pub(crate) type Applet = fn(&[OsString]) -> ExitCode;

/// Those that other systems do not have.
pub(crate) const NEW: [&str; 1] = ["mark"];

/// The applet of that name. The initramfs has a link in `/bin` for each of them.
pub(crate) fn find(name: &OsStr) -> Option<Applet> {
    Some(match name.to_str()? {
        "cat" => cat,
        "echo" => echo,
        "false" => |_| ExitCode::FAILURE,
        "ls" => ls,
        "mark" => crate::mark::mark,
        "poweroff" => poweroff,
        "sleep" => sleep,
        "true" => |_| ExitCode::SUCCESS,
        "write" => write,
        _ => return None,
    })
}

/// `cat [FILE]...`: the files, or standard input, to standard output.
fn cat(args: &[OsString]) -> ExitCode {
    let copy = |name: &OsStr| -> io::Result<()> {
        let mut out = io::stdout().lock();
        if name == "-" {
            io::copy(&mut io::stdin().lock(), &mut out)?;
        } else {
            io::copy(&mut File::open(name)?, &mut out)?;
        }
        out.flush()
    };
    if args.is_empty() {
        return each("cat", &[OsString::from("-")], copy);
    }
    each("cat", args, copy)
}

/// `echo [-n] [WORD]...`
fn echo(args: &[OsString]) -> ExitCode {
    let (words, end) = match args {
        [first, rest @ ..] if first == "-n" => (rest, ""),
        all => (all, "\n"),
    };
    let mut line = words.join(OsStr::new(" "));
    line.push(end);
    finish("echo", io::stdout().lock().write_all(line.as_bytes()))
}

/// `ls [PATH]...`: the names in a directory, sorted, one a line.
fn ls(args: &[OsString]) -> ExitCode {
    let list = |path: &OsStr| -> io::Result<()> {
        let mut names = if std::fs::metadata(path)?.is_dir() {
            std::fs::read_dir(path)?.map(|e| Ok(e?.file_name())).collect::<io::Result<Vec<_>>>()?
        } else {
            vec![path.to_owned()]
        };
        names.sort();
        let mut out = io::stdout().lock();
        for name in names {
            out.write_all(name.as_bytes())?;
            out.write_all(b"\n")?;
        }
        out.flush()
    };
    if args.is_empty() {
        return each("ls", &[OsString::from(".")], list);
    }
    each("ls", args, list)
}

/// `poweroff`: by the agent where that is process 1, which waits for what the command has written and no
/// more; else at once.
fn poweroff(args: &[OsString]) -> ExitCode {
    if !args.is_empty() {
        return usage("poweroff");
    }
    let program = |of: &str| std::fs::read_link(format!("/proc/{of}/exe")).ok();
    if program("1").is_some_and(|one| program("self") == Some(one))
        && kill(Pid::from_raw(1), Signal::SIGUSR2).is_ok()
    {
        loop {
            std::thread::park();
        }
    }
    drain_console();
    nix::unistd::sync();
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    finish("poweroff", Err(error.into()))
}

/// `sleep SECONDS`, with a fraction if wanted.
fn sleep(args: &[OsString]) -> ExitCode {
    let seconds = match args {
        [one] => one.to_str().and_then(|s| s.parse().ok()),
        _ => None,
    };
    match seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()) {
        Some(time) => {
            std::thread::sleep(time);
            ExitCode::SUCCESS
        }
        None => usage("sleep SECONDS"),
    }
}

/// `write FILE TEXT`: TEXT and a line end into FILE, which is emptied or made first; what `echo TEXT >FILE`
/// is in a shell, as the files of tracefs and sysfs want it.
fn write(args: &[OsString]) -> ExitCode {
    let [file, text] = args else { return usage("write FILE TEXT") };
    let mut text = text.clone();
    text.push("\n");
    let write = || File::create(file)?.write_all(text.as_bytes());
    finish(&format!("write: {}", file.to_string_lossy()), write())
}

fn each(name: &str, args: &[OsString], f: impl Fn(&OsStr) -> io::Result<()>) -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for arg in args {
        if let Err(e) = f(arg) {
            eprintln!("{name}: {}: {e}", arg.to_string_lossy());
            code = ExitCode::FAILURE;
        }
    }
    code
}

fn finish(what: &str, result: io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{what}: {e}");
            ExitCode::FAILURE
        }
    }
}

fn usage(text: &str) -> ExitCode {
    eprintln!("usage: {text}");
    ExitCode::from(2)
}
