//! Runs a command and forwards its streams. One thread does it all, and never waits for a single
//! stream.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process;
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::link::{Link, OUT_MAX, non_blocking, pipe_capacity};
use super::unexpected;
use crate::command;
use crate::protocol::{
    Command, DATA_MAX, Exit, Failure, Frame, ProtocolError, Reason, Run, Stream, WINDOW,
};
use crate::reaper::{Child, Reaper};

/// A command that was started.
pub(super) struct Running {
    child: Child,
    exit: Option<Exit>,
    stdin: Input,
    outputs: [Output; 2],
}

/// Starts a command in a process group of its own.
pub(super) fn start(reaper: &Arc<Reaper>, run: &Run) -> Result<Running, Failure> {
    let mut command = command(run)?;
    spawn(reaper, &mut command).map_err(|error| {
        let name = command.get_program().to_string_lossy();
        Failure::new(&error, format!("{name}: {error}"))
    })
}

fn spawn(reaper: &Arc<Reaper>, command: &mut process::Command) -> io::Result<Running> {
    let (stdin, stdout, stderr) = (io::pipe()?, io::pipe()?, io::pipe()?);
    non_blocking(&stdin.1)?;
    non_blocking(&stdout.0)?;
    non_blocking(&stderr.0)?;
    command.stdin(stdin.0).stdout(stdout.1).stderr(stderr.1).process_group(0);
    let child = reaper.spawn(command)?;
    // Our ends of the command's ends: while they are open there is no end of file.
    command.stdin(process::Stdio::null()).stdout(process::Stdio::null());
    command.stderr(process::Stdio::null());
    let outputs = [Output::new(Stream::Stdout, stdout.0), Output::new(Stream::Stderr, stderr.0)];
    Ok(Running { child, exit: None, stdin: Input::new(stdin.1), outputs })
}

fn command(run: &Run) -> Result<process::Command, Failure> {
    let bad = |text: String| Failure { reason: Reason::BadRequest, text };
    let os = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    let mut environment = Vec::new();
    for variable in &run.environment {
        let equals = variable.iter().position(|byte| *byte == b'=').filter(|at| *at > 0);
        let parts = equals.and_then(|at| Some((variable.get(..at)?, variable.get(at + 1..)?)));
        let Some((name, value)) = parts else {
            let text = String::from_utf8_lossy(variable);
            return Err(bad(format!("the variable {text:?} is not NAME=VALUE")));
        };
        environment.push((os(name), os(value)));
    }
    let path =
        environment.iter().rev().find(|(name, _)| name == "PATH").map(|(_, path)| path.clone());
    let path = path.or_else(|| std::env::var_os("PATH")).unwrap_or_else(|| command::PATH.into());
    let mut command = match &run.command {
        Command::Line(line) => command::of_line(OsStr::from_bytes(line)),
        Command::Program(words) => {
            let Some((name, arguments)) = words.split_first() else {
                return Err(bad("no program is named".to_owned()));
            };
            let mut command = process::Command::new(find(OsStr::from_bytes(name), &path)?);
            command.args(arguments.iter().map(|word| OsStr::from_bytes(word)));
            command
        }
    };
    if !run.directory.is_empty() {
        let directory = Path::new(OsStr::from_bytes(&run.directory));
        // Else the program would seem to be missing.
        match std::fs::metadata(directory) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Err(bad(format!("{}: not a directory", directory.display()))),
            Err(error) => return Err(bad(format!("{}: {error}", directory.display()))),
        }
        command.current_dir(directory);
    }
    command.env("PATH", path).envs(environment);
    Ok(command)
}

/// The program of that name; one with a `/` is relative to the command's directory, and left to the system.
fn find(name: &OsStr, path: &OsStr) -> Result<OsString, Failure> {
    if name.as_bytes().contains(&b'/') {
        return Ok(name.to_owned());
    }
    command::find(name, path).map(Into::into).map_err(|missing| Failure {
        reason: if missing == command::NOT_FOUND { Reason::NotFound } else { Reason::Denied },
        text: format!("{}: {}", name.to_string_lossy(), command::why(missing)),
    })
}

impl Running {
    /// Until the command has ended. A connection that ends first takes the command with it.
    pub(super) fn serve(mut self, link: &mut Link) -> io::Result<()> {
        let served = self.relay(link);
        if served.is_err() {
            self.child.signal_group(Signal::SIGKILL);
        }
        served
    }

    fn relay(&mut self, link: &mut Link) -> io::Result<()> {
        loop {
            // Some may have come with the request.
            while let Some(frame) = link.frame()? {
                self.take(frame)?;
            }
            self.stdin.feed(link)?;
            for output in &mut self.outputs {
                output.relay(link, self.exit.is_some())?;
            }
            if let Some(exit) = self.exit
                && self.outputs.iter().all(|output| output.pipe.is_none())
            {
                return Ok(link.queue(&Frame::Exited(exit))?);
            }
            link.flush()?;
            self.wait(link)?;
        }
    }

    /// Waits for something to happen, and reads what came from the host.
    fn wait(&mut self, link: &mut Link) -> io::Result<()> {
        let room = link.waiting() < OUT_MAX;
        let socket = if link.waiting() == 0 {
            PollFlags::POLLIN
        } else {
            PollFlags::POLLIN | PollFlags::POLLOUT
        };
        let mut fds = vec![PollFd::new(link.fd(), socket)];
        if self.exit.is_none() {
            fds.push(PollFd::new(self.child.ended(), PollFlags::POLLIN));
        }
        if let Some(pipe) = &self.stdin.pipe {
            // Without a reader it is an error, which is always looked for.
            let wanted =
                if self.stdin.bytes.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
            fds.push(PollFd::new(pipe.as_fd(), wanted));
        }
        for output in &self.outputs {
            if let Some(pipe) = output.pipe.as_ref().filter(|_| output.credit > 0 && room) {
                fds.push(PollFd::new(pipe.as_fd(), PollFlags::POLLIN));
            }
        }
        match poll(&mut fds, PollTimeout::NONE) {
            Err(nix::Error::EINTR) | Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let happened = |fd: &PollFd<'_>| fd.any().unwrap_or(true);
        let (from_host, mut rest) = (fds.first().is_some_and(happened), fds.iter().skip(1));
        let ended = self.exit.is_none() && rest.next().is_some_and(happened);
        let no_reader = self.stdin.pipe.is_some()
            && rest
                .next()
                .and_then(PollFd::revents)
                .is_some_and(|e| e.contains(PollFlags::POLLERR));
        drop(fds);
        if ended {
            let status = self.child.wait()?;
            let number = |number: i32| u8::try_from(number).unwrap_or(u8::MAX);
            self.exit = Some(match (status.code(), status.signal()) {
                (Some(code), _) => Exit::Status(number(code)),
                (None, signal) => Exit::Signal(number(signal.unwrap_or_default())),
            });
            for output in &mut self.outputs {
                output.command_ended();
            }
        }
        if no_reader {
            self.stdin.stop(link)?;
        }
        if from_host && !link.fill()? {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    fn take(&mut self, frame: Frame) -> io::Result<()> {
        match frame {
            Frame::Data(Stream::Stdin, bytes) => self.stdin.take(&bytes)?,
            Frame::End(Stream::Stdin) => self.stdin.ended = true,
            Frame::Credit(stream, bytes) => {
                let output = self.output(stream)?;
                output.credit = output.credit.checked_add(bytes).ok_or_else(unexpected)?;
            }
            Frame::Stop(stream) => self.output(stream)?.pipe = None,
            Frame::Signal(number) => {
                let signal = Signal::try_from(i32::from(number))
                    .map_err(|_| ProtocolError("a signal that does not exist"))?;
                self.child.signal_group(signal);
            }
            _ => return Err(unexpected()),
        }
        Ok(())
    }

    fn output(&mut self, stream: Stream) -> io::Result<&mut Output> {
        self.outputs.iter_mut().find(|output| output.stream == stream).ok_or_else(unexpected)
    }
}

/// The way to the command's standard input.
struct Input {
    pipe: Option<PipeWriter>,
    bytes: VecDeque<u8>,
    /// What the host may still send.
    window: u32,
    /// What it may send again, once told.
    freed: u32,
    /// The host sends no more.
    ended: bool,
}

impl Input {
    fn new(pipe: PipeWriter) -> Self {
        Self { pipe: Some(pipe), bytes: VecDeque::new(), window: WINDOW, freed: 0, ended: false }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.window = match self.window.checked_sub(length) {
            Some(window) if !self.ended => window,
            _ => return Err(ProtocolError("more standard input than was agreed to")),
        };
        if self.pipe.is_some() {
            self.bytes.extend(bytes);
        }
        Ok(())
    }

    /// Gives the command what it takes now.
    fn feed(&mut self, link: &mut Link) -> io::Result<()> {
        while let Some(pipe) = &mut self.pipe
            && !self.bytes.is_empty()
        {
            match pipe.write(self.bytes.as_slices().0) {
                Ok(count) => {
                    self.bytes.drain(..count);
                    self.freed += u32::try_from(count).unwrap_or(u32::MAX);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.stop(link),
            }
        }
        if self.ended && self.bytes.is_empty() {
            self.pipe = None;
        }
        // At once if the host has to wait for it; and never more than can be sent.
        let worth = self.freed > WINDOW / 4 || self.freed > 0 && self.bytes.is_empty();
        if worth && !self.ended && link.waiting() < OUT_MAX {
            link.queue(&Frame::Credit(Stream::Stdin, self.freed))?;
            self.window += self.freed;
            self.freed = 0;
        }
        Ok(())
    }

    /// The command reads no more.
    fn stop(&mut self, link: &mut Link) -> io::Result<()> {
        self.bytes.clear();
        if self.pipe.take().is_some() && !self.ended {
            link.queue(&Frame::Stop(Stream::Stdin))?;
        }
        Ok(())
    }
}

/// The way from one of the command's outputs.
struct Output {
    stream: Stream,
    pipe: Option<PipeReader>,
    credit: u32,
    /// Once the command has ended: what may still be its own.
    left: usize,
}

impl Output {
    fn new(stream: Stream, pipe: PipeReader) -> Self {
        Self { stream, pipe: Some(pipe), credit: WINDOW, left: usize::MAX }
    }

    /// Nothing is waited for any more. What a program in the background writes later has no end, but all that the
    /// command wrote itself is in the pipe now.
    fn command_ended(&mut self) {
        if let Some(pipe) = &self.pipe {
            self.left = pipe_capacity(pipe);
        }
    }

    /// Passes one piece on, if there is one and the host wants it.
    fn relay(&mut self, link: &mut Link, command_ended: bool) -> io::Result<()> {
        let Some(pipe) = self.pipe.as_mut().filter(|_| self.credit > 0 && link.waiting() < OUT_MAX)
        else {
            return Ok(());
        };
        let credit = usize::try_from(self.credit).unwrap_or(usize::MAX);
        let mut bytes = vec![0; DATA_MAX.min(credit).min(self.left)];
        match pipe.read(&mut bytes) {
            Ok(count @ 1..) => {
                bytes.truncate(count);
                self.credit -= u32::try_from(count).unwrap_or(u32::MAX);
                if command_ended {
                    self.left -= count;
                }
                return Ok(link.queue(&Frame::Data(self.stream, bytes))?);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock && !command_ended => return Ok(()),
            _ => {}
        }
        self.pipe = None;
        Ok(link.queue(&Frame::End(self.stream))?)
    }
}
