//! Decides whether the built-in initramfs needs busybox for the line of `--run`.

use super::Args;
use crate::cli::BadUsage;
use crate::emulated::{HostArch, cache_dir};
use crate::initramfs::{APPLETS, Contents, Error, Userland};
use crate::kernel::{Near, Which};
use anyhow::Result;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use vmtrace_agent::{Line, Step};

/// What the agent gives lines to in an initramfs of the user's.
const SHELL: &str = "/bin/sh";
/// Where a login shell is named.
const PASSWD: &str = "/etc/passwd";

/// Adds the userland if the line needs it, or somebody may connect who needs it.
///
/// # Errors
/// When the line cannot be run: that is said before anything boots.
pub(super) fn find(args: &Args, guest: HostArch) -> Result<Option<Userland>> {
    let userland = cache_dir().map(|cache| cache.join("userland").join(guest.name()));
    let missing = || Error::Open {
        path: "~/.cache/vmtrace/userland".into(),
        reason: std::io::ErrorKind::NotFound.into(),
    };
    let userland = userland.ok_or_else(missing).and_then(|dir| Userland::open(&dir));
    choose(args, guest, userland)
}

/// Refuses what an initramfs of the user's is known not to have a shell for, and added files that are in there already. Of
/// one whose contents are not known ([`Contents::of`]) the guest says that.
pub(super) fn check_own(args: &Args, initramfs: &[u8]) -> Result<(), BadUsage> {
    let is_for_shell = match &args.run {
        Some(line) => !matches!(vmtrace_agent::understand(line, |_| false), Ok(Line::Steps(_))),
        None => args.interactive && args.agent_in_initrd,
    };
    if !is_for_shell && args.add.is_empty() {
        return Ok(());
    }
    let Some(contents) = Contents::of(initramfs) else { return Ok(()) };
    let name = args.initrd.iter().map(|path| path.display().to_string()).collect::<String>();
    for added in args.add.iter().filter_map(|path| path.file_name()?.to_str()) {
        if contents.has(added) {
            return Err(BadUsage(format!(
                "--add: {name} has a /{added} of its own: give the file another name"
            )));
        }
    }
    // Root's entry may name another shell.
    let shells = if args.run.is_some() { &[SHELL][..] } else { &[SHELL, PASSWD] };
    if !is_for_shell || shells.iter().any(|path| contents.has_file(path)) {
        return Ok(());
    }
    let remedy =
        format!("{name} has no {SHELL}: boot one that has, or the built-in one (no --initrd)");
    let Some(line) = &args.run else {
        return Err(BadUsage(format!("--interactive: the guest needs a shell, and {remedy}")));
    };
    let is_program = |program: &str| {
        let added = args.add.iter().any(|file| file.file_name() == Some(program.as_ref()));
        let mut folders = vmtrace_agent::PATH.split(':');
        added || folders.any(|folder| contents.has_file(&format!("{folder}/{program}")))
    };
    match vmtrace_agent::understand(line, is_program) {
        Ok(Line::Steps(_)) => Ok(()),
        Ok(Line::Shell(what)) => {
            Err(BadUsage(format!("--run: '{what}' needs a shell, and {remedy}")))
        }
        Err(error) => Err(BadUsage(format!("--run: {error}"))),
    }
}

/// How much a line wants busybox.
#[derive(Debug, PartialEq, Eq)]
enum Want {
    No,
    /// A word names one of its programs, which another program may run.
    Maybe,
    /// Because of this.
    Yes(String),
}

fn choose(
    args: &Args,
    guest: HostArch,
    userland: Result<Userland, Error>,
) -> Result<Option<Userland>> {
    if args.shares.root.is_some() || args.initrd.is_some() {
        // Lines are run by what is in there.
        return Ok(None);
    }
    let want = match &args.run {
        Some(line) => want(args, line, userland.as_ref().ok()).map_err(BadUsage)?,
        None if args.interactive => Want::Yes("the guest needs a shell".to_owned()),
        None if args.socket.is_some() || args.vsock.is_some() => Want::Maybe,
        None => Want::No,
    };
    match want {
        Want::No => Ok(None),
        Want::Maybe => Ok(userland.ok()),
        Want::Yes(what) => userland.map(Some).map_err(|error| {
            let cause = match error {
                Error::Open { reason, .. } if reason.kind() == std::io::ErrorKind::NotFound => {
                    format!("no busybox for {} guests is in the cache", guest.name())
                }
                error => error.to_string(),
            };
            let remedy = remedy(guest);
            let option = if args.interactive { "--interactive" } else { "--run" };
            BadUsage(format!("{option}: {what}, and {cause}; {remedy}")).into()
        }),
    }
}

fn remedy(guest: HostArch) -> String {
    format!("run: vmtrace setup userland-{} (in a clone: scripts/setup)", guest.name())
}

/// What a line needs; the error is what cannot be run.
fn want(args: &Args, line: &str, userland: Option<&Userland>) -> Result<Want, String> {
    let added = |name: &str| {
        let name = name.strip_prefix("./").or(name.strip_prefix('/')).unwrap_or(name);
        args.add.iter().find(|file| file.file_name() == Some(name.as_ref()))
    };
    let is_program = |name: &str| APPLETS.contains(&name) || added(name).is_some();
    let steps = match vmtrace_agent::understand(line, is_program)? {
        Line::Shell(what) => return Ok(Want::Yes(format!("'{what}' needs a shell"))),
        Line::Steps(steps) => steps,
    };
    let has = |name: &str| userland.is_some_and(|userland| userland.has(name));
    let scripts = args.add.iter().any(|file| interpreter(file).is_some());
    let mut want = if scripts { Want::Maybe } else { Want::No };
    let mut all_known = true;
    for Step { words, .. } in &steps {
        let Some((name, rest)) = words.split_first() else { continue };
        let program = name.strip_prefix("/bin/").unwrap_or(name);
        if let Some(file) = added(name) {
            if let Some(interpreter) = interpreter(file).filter(|path| added(path).is_none()) {
                return Ok(Want::Yes(format!("{name} is a script for {interpreter}")));
            }
        } else if APPLETS.contains(&program) {
            if vmtrace_agent::needs_program(program, rest) {
                return Ok(Want::Yes(format!("the agent's {name} has no options")));
            }
            continue;
        } else if !program.contains('/') && has(program) {
            return Ok(Want::Yes(format!("{name} is a program of busybox")));
        } else if all_known && !name.contains('/') {
            return Err(unknown(args, name, userland));
        }
        // It may make others, and run others.
        all_known = false;
        if rest.iter().any(|word| has(word)) {
            want = Want::Maybe;
        }
    }
    Ok(want)
}

/// The error that says what there is: names that are like it, and where all are listed.
fn unknown(args: &Args, name: &str, userland: Option<&Userland>) -> String {
    let added = args.add.iter().filter_map(|file| file.file_name()?.to_str());
    let own: Vec<&str> = APPLETS.into_iter().chain(added).collect();
    let others: Vec<&str> = userland
        .map(|userland| userland.programs().filter(|program| !own.contains(program)).collect())
        .unwrap_or_default();
    let near = Near::to(name, own.iter().chain(&others).copied());
    let near = if near.which == Which::Like { near.to_string() } else { String::new() };
    let more = match userland {
        Some(_) => {
            format!(", and {} of busybox (--run 'busybox --list' prints their names)", others.len())
        }
        None => {
            "; vmtrace setup fetches busybox, which has more (in a clone: scripts/setup)".into()
        }
    };
    format!(
        "--run: there is no program {name} in the built-in initramfs{near}; add a static one by --add FILE. There are {}{more}",
        own.join(", ")
    )
}

/// The last part of the path that a script names.
fn interpreter(file: &Path) -> Option<String> {
    // A FIFO would wait for somebody to write.
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut start = Vec::new();
    File::open(file).ok()?.take(256).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let path = String::from_utf8_lossy(line).split_whitespace().next()?.to_owned();
    Some(path.rsplit('/').next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::boot::tests::args;
    use std::fs;

    fn busybox() -> Result<Userland, Error> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("busybox"), "\x7fELF").unwrap();
        fs::write(dir.path().join("applets"), "cat\nls\nps\nsh\ntest\nwc\n").unwrap();
        fs::write(dir.path().join("package"), "busybox-static 1\n").unwrap();
        Userland::open(dir.path())
    }

    fn none() -> Result<Userland, Error> {
        let reason = std::io::ErrorKind::NotFound.into();
        Err(Error::Open { path: "busybox".into(), reason })
    }

    fn chosen(options: &str, line: Option<&str>, have: Result<Userland, Error>) -> Result<bool> {
        let mut args = args(options).unwrap();
        args.run = line.map(str::to_owned);
        choose(&args, HostArch::X86_64, have).map(|userland| userland.is_some())
    }

    // The guests of simple lines stay as small as they are, and no shell is in their traces.
    #[test]
    fn busybox_is_for_lines_that_need_it() {
        for line in ["ls /", "echo wc; sleep 6 && cat /x", "mark sh", "./x y", "x a", "/bin/ls"] {
            assert!(!chosen("--add /nowhere/x", Some(line), busybox()).unwrap(), "{line}");
            assert!(!chosen("--add /nowhere/x", Some(line), none()).unwrap(), "{line}");
        }
        for line in
            ["ls / | wc -l", "cd /", "ps", "ls && /bin/ps", "ls -l /", "test -e /x", "X=1 ps"]
        {
            assert!(chosen("", Some(line), busybox()).unwrap(), "{line}");
        }
        // One of the user's own.
        assert!(!chosen("--add /nowhere/ls --add /nowhere/cd", Some("ls -l; cd"), none()).unwrap());
        // Who runs it may do without.
        assert!(chosen("--add /nowhere/x", Some("x wc"), busybox()).unwrap());
        assert!(!chosen("--add /nowhere/x", Some("x wc"), none()).unwrap());
        assert!(!chosen("", None, busybox()).unwrap());
        assert!(chosen("--socket s", None, busybox()).unwrap());
        assert!(!chosen("--socket s", None, none()).unwrap());
        assert!(chosen("--interactive", None, busybox()).unwrap());
        // A shell of its own.
        assert!(!chosen("--interactive --root /", None, none()).unwrap());
    }

    #[test]
    fn what_cannot_be_run_is_a_usage_error() {
        let error = |options: &str, line: &str, have: fn() -> Result<Userland, Error>| {
            let error = chosen(options, Some(line), have()).unwrap_err();
            assert!(error.is::<BadUsage>(), "{error}");
            let text = error.to_string();
            assert!(text.starts_with("--run: ") && !text.contains('\n'), "{text}");
            text
        };
        for (line, what) in [("ls | wc", "'|' needs a shell"), ("cd /", "'cd' needs a shell")] {
            let said = error("", line, none);
            assert!(said.contains(what) && said.contains("no busybox for x86_64"), "{said}");
            assert!(said.contains("vmtrace setup userland-x86_64"), "{said}");
        }
        assert!(error("", "ls -l /", none).contains("ls has no options"));
        let said = error("--add /nowhere/x", "ls && pss", busybox);
        assert!(said.contains("no program pss") && said.contains("; near: ps; add"), "{said}");
        assert!(said.contains("write, x, and 4 of busybox (--run 'busybox --list'"), "{said}");
        assert!(!said.contains("setup"), "{said}");
        let said = error("", "zzzzzz", busybox);
        assert!(!said.contains("near"), "{said}");
        let said = error("", "ps", none);
        assert!(said.contains("no program ps") && said.contains("vmtrace setup"), "{said}");
        // What a program before it may have made is the guest's to know.
        assert!(chosen("--add /nowhere/x", Some("/x && pss"), busybox()).is_ok());
        assert!(chosen("", Some("/elsewhere/x"), busybox()).is_ok());
    }

    // Who sits at the console has nothing to do there without a shell.
    #[test]
    fn an_interactive_guest_needs_busybox() {
        let error = chosen("--interactive", None, none()).unwrap_err();
        assert!(error.is::<BadUsage>(), "{error}");
        let text = error.to_string();
        assert!(
            text.starts_with("--interactive: the guest needs a shell, and no busybox"),
            "{text}"
        );
        assert!(text.contains("vmtrace setup userland-x86_64"), "{text}");
    }

    // It was told after a whole boot.
    #[test]
    fn an_initrd_without_a_shell_is_refused_before_the_boot() {
        let archive = |names: &[&str]| {
            let mut archive = crate::initramfs::Archive::new(Vec::new());
            for name in names {
                archive.file(name, 0o755, 0, std::io::empty()).unwrap();
            }
            archive.finish().unwrap()
        };
        let check = |options: &str, line: Option<&str>, initramfs: &[u8]| {
            let mut args = args(&format!("--initrd i.img {options}")).unwrap();
            args.run = line.map(str::to_owned);
            super::super::images::start_agent(&mut args).unwrap();
            check_own(&args, initramfs).map_err(|error| error.to_string())
        };
        let (bare, own) = (archive(&["bin/ls", "sbin/cd"]), archive(&["bin/sh", "data"]));
        for line in ["ls | wc", "X=1 ls", "read x", "ls >x"] {
            let error = check("", Some(line), &bare).unwrap_err();
            assert!(error.starts_with("--run: '"), "{error}");
            assert!(error.contains("i.img has no /bin/sh") && !error.contains('\n'), "{error}");
            assert_eq!(check("", Some(line), &own), Ok(()));
            // Compressed in a way that is not known here.
            assert_eq!(check("", Some(line), b"BZh91AY"), Ok(()));
        }
        for line in ["ls", "cd /", "ls; /none 'a | b'"] {
            assert_eq!(check("", Some(line), &bare), Ok(()), "{line}");
        }
        assert!(check("", Some("ls 'a"), &bare).unwrap_err().contains("closing '"));
        let error = check("--interactive", None, &bare).unwrap_err();
        assert!(error.starts_with("--interactive: the guest needs a shell, and i.img"), "{error}");
        assert_eq!(check("--interactive", None, &own), Ok(()));
        assert_eq!(check("--interactive --cmdline=rdinit=/x", None, &bare), Ok(()));
        // The kernel would take the user's own.
        for options in ["--add /nowhere/data", "--interactive --add /nowhere/data"] {
            let error = check(options, None, &own).unwrap_err();
            assert!(error.contains("i.img has a /data of its own"), "{error}");
        }
        assert_eq!(check("--add /nowhere/new", Some("new"), &own), Ok(()));
    }

    #[test]
    fn scripts_need_their_interpreter() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("test.sh");
        fs::write(&script, "#! /bin/sh -e\nls\n").unwrap();
        let options = format!("--add {}", script.display());
        assert!(chosen(&options, Some("/test.sh"), busybox()).unwrap());
        assert!(chosen(&options, Some("ls"), busybox()).unwrap());
        assert!(!chosen(&options, Some("ls"), none()).unwrap());
        let error = chosen(&options, Some("test.sh a"), none()).unwrap_err().to_string();
        assert!(error.contains("test.sh is a script for sh"), "{error}");
    }
}
