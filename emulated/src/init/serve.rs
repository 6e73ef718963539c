//! The loop of process 1 handles frames from the outer side, output of jobs, and exited children. It is one
//! thread that never blocks.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::jobs::{self, Job, Listener, Sink, Source};
use super::port::Port;
use crate::wire::{
    Accepted, Connect, DATA_MAX, Decoder, FIRST_ACCEPTED, Frame, HEADER, Hello, Kind, PROTOCOL,
    ProtocolError, Put, Run,
};

/// Nothing is read from jobs while this much waits for the port.
const OUT_MAX: usize = 512 << 10;

/// Frames that a job sends at a time: a quarter of [`OUT_MAX`].
const FRAMES: usize = 4;
/// Frames up to this length have memory of their own.
const SHORT: usize = DATA_MAX / 8;

struct Server {
    port: Port,
    decoder: Decoder,
    out: Out,
    jobs: Vec<Job>,
    sources: Vec<Source>,
    sinks: Vec<Sink>,
    listeners: Vec<Listener>,
    /// Nobody is accepted until something has ended: there are no descriptors left.
    full: bool,
    /// The number of the next stream of our own.
    next: u32,
}

/// Serves until the outer side is gone.
pub(super) fn serve(
    port: Port,
    kvm_error: Option<String>,
    notes: Vec<String>,
    source: &str,
) -> io::Result<()> {
    let mut children = SigSet::empty();
    children.add(Signal::SIGCHLD);
    children.thread_block()?;
    let children = SignalFd::with_flags(&children, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    let mut server = Server {
        port,
        decoder: Decoder::default(),
        out: Out::default(),
        jobs: Vec::new(),
        sources: Vec::new(),
        sinks: Vec::new(),
        listeners: Vec::new(),
        full: false,
        next: FIRST_ACCEPTED,
    };
    let release =
        std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    let hello = Hello { protocol: PROTOCOL, release, kvm_error, notes, source: source.to_owned() };
    server.send(&Frame::json(Kind::Hello, 0, &hello).map_err(io::Error::other)?);
    while server.turn(&children)? {}
    Ok(())
}

impl Server {
    /// Waits for something and deals with it; false: the end.
    fn turn(&mut self, children: &SignalFd) -> io::Result<bool> {
        let ready = self.wait(children)?;
        if ready.children {
            while children.read_signal()?.is_some() {}
            self.reap();
        }
        if ready.port_in && !self.receive()? {
            return Ok(false);
        }
        // By id: the lists may have changed since they were polled.
        for id in ready.sources {
            self.forward(id);
        }
        for id in ready.hung_up {
            self.sinks.iter_mut().filter(|s| s.id == id && s.is_socket()).for_each(Sink::hang_up);
        }
        for id in ready.sinks {
            self.write(id);
        }
        for id in ready.listeners {
            self.accept(id);
        }
        self.out.flush(&mut self.port)?;
        Ok(true)
    }

    fn wait(&self, children: &SignalFd) -> io::Result<Ready> {
        let read = PollFlags::POLLIN;
        let port = if self.out.len == 0 { read } else { read | PollFlags::POLLOUT };
        let sources: Vec<&Source> =
            self.sources.iter().filter(|s| s.credit > 0 && self.out.len < OUT_MAX).collect();
        let sinks: Vec<&Sink> =
            self.sinks.iter().filter(|s| s.pending() || s.is_socket()).collect();
        let listeners: Vec<&Listener> = self.listeners.iter().filter(|_| !self.full).collect();
        let mut fds =
            vec![PollFd::new(self.port.as_fd(), port), PollFd::new(children.as_fd(), read)];
        fds.extend(sources.iter().map(|s| PollFd::new(s.as_fd(), read)));
        fds.extend(sinks.iter().map(|s| {
            // An end is always told.
            let wanted = if s.pending() { PollFlags::POLLOUT } else { PollFlags::empty() };
            PollFd::new(s.as_fd(), wanted)
        }));
        fds.extend(listeners.iter().map(|l| PollFd::new(l.as_fd(), read)));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        let mut any = fds.iter().map(|fd| fd.revents().is_some_and(|r| !r.is_empty()));
        let port_in = fds
            .first()
            .and_then(PollFd::revents)
            .is_some_and(|r| r != PollFlags::POLLOUT && !r.is_empty());
        let (_, children) = (any.next(), any.next().unwrap_or_default());
        let pick = |ids: Vec<u32>, any: &mut dyn Iterator<Item = bool>| -> Vec<u32> {
            ids.into_iter().zip(any).filter_map(|(id, any)| any.then_some(id)).collect()
        };
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
        let first = 2 + sources.len();
        let mut hung_up =
            fds.iter().skip(first).map(|fd| fd.revents().is_some_and(|r| r.intersects(gone)));
        let sources = pick(sources.iter().map(|s| s.id).collect(), &mut any);
        let ids: Vec<u32> = sinks.iter().map(|s| s.id).collect();
        let hung_up = pick(ids.clone(), &mut hung_up);
        let sinks = pick(ids, &mut any);
        let listeners = pick(listeners.iter().map(|l| l.id).collect(), &mut any);
        Ok(Ready { port_in, children, sources, sinks, hung_up, listeners })
    }

    fn send(&mut self, frame: &Frame) {
        self.out.push(frame.to_bytes());
    }

    fn receive(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        while let Some(n) = self.port.read(&mut buffer)? {
            if n == 0 {
                return Ok(false);
            }
            self.decoder.push(buffer.get(..n).unwrap_or_default());
            while let Some(frame) = self.decoder.frame().map_err(io::Error::other)? {
                self.take(&frame).map_err(io::Error::other)?;
            }
            // Requests wait while answers to earlier ones do.
            if self.out.len > OUT_MAX {
                break;
            }
        }
        Ok(true)
    }

    fn take(&mut self, frame: &Frame) -> Result<(), ProtocolError> {
        let id = frame.stream;
        match frame.kind {
            Kind::Run => {
                let run: Run = frame.as_json()?;
                match jobs::start(id, &run) {
                    Ok((job, sources, sink)) => {
                        self.jobs.push(job);
                        self.sources.extend(sources);
                        self.sinks.extend(sink);
                    }
                    Err(e) => {
                        self.send(&Frame::with(Kind::Failed, id, e.to_string()));
                        for stream in [run.stdout, run.stderr]
                            .into_iter()
                            .chain(run.outputs.iter().map(|o| o.1))
                        {
                            self.send(&Frame::new(Kind::Close, stream));
                        }
                    }
                }
            }
            Kind::Signal => {
                let number = frame.as_number()?;
                self.jobs.iter().filter(|job| job.id == id).for_each(|job| job.signal(number));
            }
            Kind::Put => match Sink::put(id, &frame.as_json::<Put>()?) {
                Ok(sink) => self.sinks.push(sink),
                Err(e) => {
                    self.send(&Frame::with(Kind::Failed, id, e.to_string()));
                    self.send(&Frame::new(Kind::Stop, id));
                }
            },
            Kind::Connect => {
                let connect: Connect = frame.as_json()?;
                match Sink::connect(&connect) {
                    Ok((sink, source)) => {
                        self.sinks.push(sink);
                        self.sources.push(source);
                        self.send(&Frame::new(Kind::Done, id));
                    }
                    Err(e) => self.send(&Frame::with(Kind::Failed, id, e.to_string())),
                }
            }
            Kind::Data => {
                // A stream that ended here may still have data under way.
                if let Some(sink) = self.sinks.iter_mut().find(|s| s.id == id) {
                    if !sink.push(&frame.payload) {
                        return Err(ProtocolError("more data than allowed"));
                    }
                    self.write(id);
                }
            }
            Kind::Close => {
                if let Some(sink) = self.sinks.iter_mut().find(|s| s.id == id) {
                    sink.closing = true;
                    self.write(id);
                }
            }
            Kind::Credit => {
                let more = frame.as_number()?;
                for source in self.sources.iter_mut().filter(|s| s.id == id) {
                    source.credit = source.credit.saturating_add(more);
                }
            }
            Kind::Listen => match Listener::new(id, &frame.as_json()?) {
                Ok(listener) => {
                    self.listeners.push(listener);
                    self.send(&Frame::new(Kind::Done, id));
                }
                Err(e) => self.send(&Frame::with(Kind::Failed, id, e.to_string())),
            },
            // Closing the pipe is how a job learns it.
            Kind::Stop => {
                self.listeners.retain(|l| l.id != id);
                self.close_source(id);
            }
            Kind::Hello | Kind::Exited | Kind::Done | Kind::Failed | Kind::Accepted => {
                return Err(ProtocolError("unexpected answer"));
            }
        }
        Ok(())
    }

    /// Tells the outer side of everybody who has connected.
    fn accept(&mut self, id: u32) {
        while let Some(listener) = self.listeners.iter().find(|l| l.id == id) {
            let numbers = Accepted { input: self.next, output: self.next.wrapping_add(1) };
            let accepted = listener
                .accept()
                .and_then(|socket| socket.map(|socket| Sink::socket(socket, numbers)).transpose());
            match accepted {
                Ok(None) => return,
                Ok(Some((sink, source))) => {
                    self.next = self.next.wrapping_add(2) | FIRST_ACCEPTED;
                    self.sinks.push(sink);
                    self.sources.push(source);
                    if let Ok(frame) = Frame::json(Kind::Accepted, id, &numbers) {
                        self.send(&frame);
                    }
                }
                Err(_) => {
                    self.full = true;
                    return;
                }
            }
        }
    }

    /// Sends what a job wrote: much at a time, since each look at what there is costs as much as a frame, but not so
    /// much that it fills the way out for all others.
    fn forward(&mut self, id: u32) {
        let Some(source) = self.sources.iter_mut().find(|s| s.id == id) else { return };
        for _ in 0..FRAMES {
            if source.credit == 0 || self.out.len >= OUT_MAX {
                break;
            }
            let mut room = self.out.room();
            match source.read(&mut room) {
                Ok(None) => return self.out.free.push(room),
                // So much room would be held for each of many short ones.
                Ok(Some(length @ 1..=SHORT)) => {
                    self.out.push(room.get(..length).unwrap_or_default().to_vec());
                    self.out.free.push(room);
                }
                Ok(Some(length @ 1..)) => self.out.push_part(room, length),
                Ok(Some(0)) | Err(_) => return self.close_source(id),
            }
        }
    }

    fn close_source(&mut self, id: u32) {
        let before = self.sources.len();
        self.sources.retain(|s| s.id != id);
        if self.sources.len() != before {
            self.full = false;
            self.send(&Frame::new(Kind::Close, id));
        }
    }

    /// Writes to a file or a job's input, and ends that when all of it came.
    fn write(&mut self, id: u32) {
        let Some(sink) = self.sinks.iter_mut().find(|s| s.id == id) else { return };
        let written = sink.write();
        let end = if sink.is_put {
            // The answer comes when the sender is through, whatever happened.
            sink.closing.then(|| match &sink.error {
                None => Frame::new(Kind::Done, id),
                Some(e) => Frame::with(Kind::Failed, id, e.to_string()),
            })
        } else if sink.error.is_some() {
            Some(Frame::new(Kind::Stop, id))
        } else {
            (sink.closing && !sink.pending()).then(|| Frame::new(Kind::Close, id))
        };
        if written > 0 {
            self.send(&Frame::number(Kind::Credit, id, written));
        }
        if let Some(frame) = end {
            self.sinks.retain(|s| s.id != id);
            self.full = false;
            self.send(&frame);
        }
    }

    /// Takes note of every child that ended, jobs or what they left behind.
    fn reap(&mut self) {
        while let Some((pid, status)) = wait_any() {
            if let Some(n) = self.jobs.iter().position(|job| job.is(pid)) {
                let job = self.jobs.swap_remove(n);
                let (id, stdin) = (job.id, job.stdin);
                if let Ok(frame) = Frame::json(Kind::Exited, id, &job.ended(status)) {
                    self.send(&frame);
                }
                // Nobody reads its input any more.
                if let Some(stdin) = stdin.filter(|id| self.sinks.iter().any(|s| s.id == *id)) {
                    self.sinks.retain(|s| s.id != stdin);
                    self.send(&Frame::new(Kind::Stop, stdin));
                }
            }
        }
    }
}

/// Frames on their way to the port.
#[derive(Default)]
struct Out {
    /// Each with its length.
    frames: VecDeque<(Vec<u8>, usize)>,
    /// So much of the first one is gone already.
    start: usize,
    len: usize,
    /// Memory of those that are gone. What is new to the process costs more than all that is done with it.
    free: Vec<Vec<u8>>,
}

impl Out {
    fn push(&mut self, frame: Vec<u8>) {
        let length = frame.len();
        self.push_part(frame, length);
    }

    /// One that is no longer than this.
    fn push_part(&mut self, frame: Vec<u8>, length: usize) {
        self.len += length;
        self.frames.push_back((frame, length));
    }

    /// Room for the longest one with data.
    fn room(&mut self) -> Vec<u8> {
        self.free.pop().unwrap_or_else(|| vec![0; HEADER + DATA_MAX])
    }

    /// Writes what the port takes.
    fn flush(&mut self, port: &mut Port) -> io::Result<()> {
        while let Some((frame, length)) = self.frames.front() {
            let rest = frame.get(self.start..*length).unwrap_or_default();
            let Some(n) = port.write(rest)? else { break };
            self.len -= n;
            self.start += n;
            if n == rest.len() {
                self.start = 0;
                let gone = self.frames.pop_front().map(|(frame, _)| frame);
                self.free.extend(gone.filter(|frame| frame.len() == HEADER + DATA_MAX));
            }
        }
        Ok(())
    }
}

/// What `poll` found.
struct Ready {
    port_in: bool,
    children: bool,
    sources: Vec<u32>,
    sinks: Vec<u32>,
    /// Those of the sinks that nobody reads.
    hung_up: Vec<u32>,
    listeners: Vec<u32>,
}

/// A child that ended, if there is one. (nix's `waitpid` fails on real-time signals.)
#[allow(unsafe_code)]
fn wait_any() -> Option<(libc::pid_t, ExitStatus)> {
    let mut status = 0;
    // SAFETY: waitpid writes one int through the pointer, which is valid for it.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    (pid > 0).then(|| (pid, ExitStatus::from_raw(status)))
}
