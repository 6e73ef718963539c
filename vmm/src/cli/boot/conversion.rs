//! Writes a trace for another tool (`-o trace.dat`): the run writes the stream to a file beside it,
//! which is converted when the run is over.
//!
//! By then the process that runs the guest can neither create files nor start programs
//! (docs/security.md). So a separate process is started first and waits for the end.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use vmtrace_system::say;

use super::Args;
use crate::cli::convert::{DONE, GO};
use crate::cli::life::BEAT;
use crate::cli::{BadUsage, exit};
use crate::convert::Format;
use crate::deadline::{self, Deadline};
use crate::emulated::THIS_PROGRAM;
use crate::files;

/// Signals that arrive within this many milliseconds of the end of the run count as those that ended
/// it.
const TOGETHER: u16 = 1000;
/// What people have names of traces end with that they compress: there is no such format.
const COMPRESSED: [&str; 5] = ["gz", "xz", "zst", "bz2", "zip"];

/// Who converts.
pub(super) struct Conversion {
    stream: PathBuf,
    place: PathBuf,
    tell: ChildStdin,
    answer: ChildStdout,
}

impl Conversion {
    /// Lets the run write a stream beside the output where that is to be of another format, by its
    /// name: `None` where it is a stream itself.
    ///
    /// # Errors
    /// When that cannot be. Nothing has changed then.
    pub(super) fn prepare(args: &mut Args) -> Result<Option<Self>> {
        let Some(place) = args.output.clone() else { return Ok(None) };
        let Some(format) = format(&place)? else { return Ok(None) };
        let shown = || format!("-o {}", place.display());
        if args.compress.is_some() {
            let (shown, format) = (shown(), format.name());
            let what = "--compress is for vmtrace's own format: leave it out, or give the file \
                        another name";
            return Err(BadUsage(format!("{shown} is of the format {format}, and {what}")).into());
        }
        // Links are followed: what is there is replaced, and not the link.
        let target = files::target(&place).with_context(shown)?;
        let Some(target) = target.filter(|it| it.is_file() || it.is_dir() || !it.exists()) else {
            bail!(
                "{}: {} is written to files only: for the stream give a name with another ending",
                shown(),
                format.name()
            );
        };
        // What the converter would find at the end.
        format.output(&target).with_context(shown)?;
        let stream = beside(&target).with_context(shown)?;
        let mut output = OsString::from("--output=");
        output.push(&target);
        let child = Command::new(THIS_PROGRAM)
            .args(["convert", "--once-told", "--format", &format.name()])
            .arg(output)
            .arg(&stream)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Signals of the terminal are for the run, which ends in order by them.
            .process_group(0)
            .spawn();
        let converts = child.map_err(anyhow::Error::from).and_then(|mut child| {
            let pipes = (child.stdin.take(), child.stdout.take());
            let (Some(tell), Some(answer)) = pipes else { bail!("no way to it") };
            Ok((tell, answer))
        });
        let (tell, answer) = match converts {
            Ok(converts) => converts,
            Err(error) => {
                let _ = std::fs::remove_file(&stream);
                return Err(error.context(format!("{}: no process to convert it", shown())));
            }
        };
        args.output = Some(stream.clone());
        Ok(Some(Self { stream, place, tell, answer }))
    }

    /// Converts what was written, if anything was. That may take long, but not so long as `time` without a
    /// sign of life.
    ///
    /// # Errors
    /// When that fails: the stream is there still, and the error says where.
    fn finish(self, deadline: &Deadline, time: Duration) -> Result<()> {
        let Self { stream, place, mut tell, answer } = self;
        let (here, there) = (stream.display().to_string(), place.display().to_string());
        deadline.set_lost(Box::new(move || {
            Some(format!(
                "the trace is in {here} until the process that converts it has written {there}"
            ))
        }));
        deadline.begin("a part of the conversion of the trace", time);
        let told = tell.write_all(GO);
        // Its end is what the other side waits for.
        drop(tell);
        let answered = told.and_then(|()| heard(answer, deadline));
        deadline.set_lost(Box::new(|| None));
        deadline.begin_open("what follows the run");
        if answered.is_ok_and(|answer| answer == DONE) {
            return Ok(());
        }
        let (stream, place) = (stream.display(), place.display());
        bail!("{place} is not the whole trace, which is in {stream}: see vmtrace convert");
    }
}

/// Converts what a run has written that went so.
///
/// # Errors
/// That of the run, or of the conversion.
pub(super) fn then(
    code: Result<u8>,
    conversion: Option<Conversion>,
    deadline: &Deadline,
) -> Result<u8> {
    let converted = conversion.map_or(Ok(()), |it| it.finish(deadline, deadline::TIME));
    match (code, converted) {
        (code, Ok(())) => code,
        (Ok(_), Err(error)) => Err(error),
        (Err(error), Err(also)) => {
            say!("vmtrace: error: {also:#}");
            Err(error)
        }
    }
}

/// The run is over, and with it what has seen to signals: from now on they end the process.
///
/// # Errors
/// When they cannot be handled.
pub(super) fn end_by_signals() -> io::Result<()> {
    end_by_signals_if(&Arc::new(AtomicBool::new(true)))
}

fn end_by_signals_if(insists: &Arc<AtomicBool>) -> io::Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let code = i32::from(exit::FAILED);
        signal_hook::flag::register_conditional_shutdown(signal, code, Arc::clone(insists))?;
    }
    Ok(())
}

/// The whole answer, without signs of life. Who does not want to wait for it ends this process: the converter
/// goes on.
fn heard(mut answer: ChildStdout, deadline: &Deadline) -> io::Result<Vec<u8>> {
    let insists = Arc::new(AtomicBool::new(false));
    end_by_signals_if(&insists)?;
    loop {
        let mut wanted = [PollFd::new(answer.as_fd(), PollFlags::POLLIN)];
        match poll(&mut wanted, PollTimeout::from(TOGETHER)) {
            Err(Errno::EINTR) => {}
            _ => break,
        }
    }
    insists.store(true, Ordering::Relaxed);
    let (mut text, mut piece) = (Vec::new(), [0; 64]);
    loop {
        let heard = match answer.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            heard => piece.get(..heard?).unwrap_or_default(),
        };
        if heard.is_empty() {
            return Ok(text);
        }
        deadline.renew();
        text.extend(heard.iter().copied().filter(|byte| *byte != BEAT));
    }
}

/// The format that goes with a name; `None` for a stream.
///
/// # Errors
/// When the name means one that there is not.
fn format(place: &Path) -> Result<Option<Format>> {
    let ending = place.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let inner = place.file_stem().and_then(|stem| Format::of(Path::new(stem)));
    match inner {
        Some(format) if COMPRESSED.contains(&ending) => bail!(
            "-o {}: {} is not written compressed: leave .{ending} out",
            place.display(),
            format.name()
        ),
        _ => Ok(Format::of(place)),
    }
}

/// A new file in the same directory.
fn beside(place: &Path) -> Result<PathBuf> {
    let name = place.file_name().context("this is not the name of a file")?.to_string_lossy();
    let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty());
    let file = tempfile::Builder::new()
        .prefix(&format!("{name}."))
        .suffix(".vmt")
        .tempfile_in(parent.unwrap_or(Path::new(".")))?;
    let (_, path) = file.keep()?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::cli::boot::tests::args;
    use crate::deadline::Guard;

    // A disk that is gone, or somebody has stopped it: the run was over, and its process was not.
    #[test]
    fn a_converter_that_does_nothing_is_not_waited_for() {
        // So long that a busy machine does not keep a thread from running in it.
        const TIME: Duration = Duration::from_secs(5);
        let (late, lates) = std::sync::mpsc::channel();
        let look = Duration::from_millis(5);
        let late = move |what| late.send(what).unwrap();
        let guard = Guard::start_with(deadline::STEP, exit::FAILED, look, late).unwrap();
        let deadline = guard.deadline();
        deadline.set_code(0);
        let (mut goes, tell) = io::pipe().unwrap();
        let (answer, mut answers) = io::pipe().unwrap();
        let conversion = Conversion {
            stream: "t.dat.1.vmt".into(),
            place: "t.dat".into(),
            tell: OwnedFd::from(tell).into(),
            answer: OwnedFd::from(answer).into(),
        };
        let waits = std::thread::spawn(move || conversion.finish(&deadline, TIME));
        let mut told = Vec::new();
        goes.read_to_end(&mut told).unwrap();
        assert_eq!(told, GO);
        // It goes on for longer than that.
        let begun = std::time::Instant::now();
        while begun.elapsed() < TIME * 3 / 2 {
            answers.write_all(&[BEAT]).unwrap();
            assert_eq!(lates.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
            std::thread::sleep(TIME / 50);
        }
        let late = lates.recv_timeout(60 * TIME).unwrap();
        // Not with the run's.
        assert_eq!(late.code, exit::FAILED);
        let line = late.to_string();
        assert!(line.contains("conversion") && line.contains("in t.dat.1.vmt until"), "{line}");
        // What it says at last is no other for that.
        answers.write_all(DONE).unwrap();
        drop(answers);
        waits.join().unwrap().unwrap();
    }

    fn prepared(line: &str) -> Result<Option<Conversion>> {
        Conversion::prepare(&mut args(line).unwrap())
    }

    // Who has always written streams to names of any kind still does.
    #[test]
    fn only_names_of_other_formats_are_converted() {
        for name in
            ["trace", "t.vmt", "/dev/null", "trace.dat.vmt", "x.vmtrace", "t.gz", "run-6.12"]
        {
            let mut args = args(&format!("-o {name}")).unwrap();
            assert!(Conversion::prepare(&mut args).unwrap().is_none(), "{name}");
            assert_eq!(args.output.as_deref(), Some(Path::new(name)));
        }
    }

    // A boot that takes a minute, and then has nowhere to write to.
    #[test]
    fn places_that_cannot_be_are_told_before_the_boot() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        std::fs::write(at("t.ctf"), "").unwrap();
        std::fs::create_dir(at("t.csv")).unwrap();
        std::fs::create_dir_all(at("t.uftrace/sub")).unwrap();
        nix::unistd::mkfifo(Path::new(&at("t.json")), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let bad = [
            ("t.ctf", "a directory"),
            ("t.csv", "a directory is there"),
            ("t.uftrace", "something is there"),
            ("t.json", "files only"),
            ("none/t.dat", "No such file"),
            ("t.dat.gz", "leave .gz out"),
            ("t.pftrace --compress zstd", "--compress is for vmtrace's own format"),
        ];
        for (name, why) in bad {
            let error = prepared(&format!("-o {}", at(name))).err().expect(name);
            let text = format!("{error:#}");
            let (name, _) = name.split_once(' ').unwrap_or((name, ""));
            assert!(text.starts_with("-o ") && text.contains(name) && text.contains(why), "{text}");
        }
        let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(left.len(), 4, "{left:?}");
    }
}
