//! Connections: reads the first line of each, and hands it to whom it is for.

use super::consumer::Join;
use super::guests::GuestReaders;
use super::request::{Control, LINE_MAX, Origin, Request};
use crate::private_socket::{Acceptor, SocketError};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// A connection that asks for nothing is closed after this time.
const ASK_TIME: Duration = Duration::from_secs(10);
/// A command's answer may wait for a pause of the guest.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// Connections at once, of the host and of the guest each.
const MAX_CONNECTIONS: usize = 64;

/// What a command comes to: text for people, or why not.
pub type Answer = Result<String, String>;

/// A command on its way to the controller.
#[derive(Debug)]
pub struct ControlRequest {
    /// What to do.
    pub command: Control,
    /// Where the answer goes.
    pub answer: Sender<Answer>,
}

/// Opens a connection to the agent in the guest.
pub type OpenAgent = Arc<dyn Fn() -> Result<UnixStream, String> + Send + Sync>;

/// Those who deal with requests.
#[derive(Clone)]
pub struct Services {
    /// The relay.
    pub joins: Sender<Join>,
    /// The controller.
    pub control: Sender<ControlRequest>,
    /// Makes the controller look.
    pub wake: Arc<dyn Fn() + Send + Sync>,
    /// The way to the agent, if there is one.
    pub agent: Option<OpenAgent>,
    /// Who in the guest may read.
    pub readers: GuestReaders,
    connections: [Arc<AtomicUsize>; 2],
}

/// Counts itself as long as it lives.
struct Slot(Arc<AtomicUsize>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Services {
    /// Services without an agent, and closed to readers in the guest.
    #[must_use]
    pub fn new(
        joins: Sender<Join>,
        control: Sender<ControlRequest>,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> Self {
        let readers = GuestReaders::default();
        Self { joins, control, wake, agent: None, readers, connections: Default::default() }
    }

    /// Serves processes of the host on a unix socket at `path`, for the owner of this process
    /// alone.
    ///
    /// # Errors
    /// When there cannot be a socket.
    pub fn listen(self, path: &Path) -> Result<Acceptor, SocketError> {
        Acceptor::start(path, move |stream| self.take(stream, Origin::Host, Ok(())))
    }

    /// Deals with a new connection of the guest, from its port `guest_port`, in a thread of its own.
    pub fn take_guest(&self, stream: UnixStream, guest_port: u32) {
        self.take(stream, Origin::Guest, self.readers.check(guest_port));
    }

    /// `reads`: whether it may read the trace, or why not.
    fn take(&self, stream: UnixStream, origin: Origin, reads: Result<(), &'static str>) {
        let count = match origin {
            Origin::Host => &self.connections[0],
            Origin::Guest => &self.connections[1],
        };
        let slot = Slot(Arc::clone(count));
        if count.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            refuse(&stream, "too many connections at once; try again later");
            return;
        }
        let services = self.clone();
        let spawned = std::thread::Builder::new().name("request".into()).spawn(move || {
            let _slot = slot;
            services.serve(stream, origin, reads);
        });
        if let Err(error) = spawned {
            log::warn!("a connection is not served: {error}");
        }
    }

    fn serve(&self, stream: UnixStream, origin: Origin, reads: Result<(), &str>) {
        let asked = first_line(&stream)
            .map_err(|error| error.to_string())
            .and_then(|line| Request::parse(&line, origin).map_err(|error| error.to_string()));
        match asked {
            Err(error) => refuse(&stream, &error),
            Ok(Request::Stream(request)) => {
                if let Err(reason) = reads {
                    return refuse(&stream, reason);
                }
                if let Err(unsent) = self.joins.send(Join { stream, request, origin }) {
                    refuse(&unsent.0.stream, "the trace has ended");
                }
            }
            Ok(Request::Control(command)) => match self.control(command) {
                Ok(text) => answer(&stream, &format!("OK {text}")),
                Err(error) => refuse(&stream, &error),
            },
            Ok(Request::Agent) => {
                let none = || Err("this run has no connection to an agent: see --modules".into());
                match self.agent.as_ref().map_or_else(none, |open| open()) {
                    Ok(agent) => {
                        answer(&stream, "OK");
                        splice(&stream, &agent);
                    }
                    Err(error) => refuse(&stream, &error),
                }
            }
        }
    }

    /// Tells the controller what to do, and returns where its answer will be; `None` when the
    /// trace has ended.
    pub fn request(&self, command: Control) -> Option<Receiver<Answer>> {
        let (sender, receiver) = channel();
        self.control.send(ControlRequest { command, answer: sender }).ok()?;
        (self.wake)();
        Some(receiver)
    }

    /// Has the controller do something, and waits for it.
    ///
    /// # Errors
    /// Why it cannot be done.
    pub fn control(&self, command: Control) -> Answer {
        let (sender, receiver) = channel();
        let ended = || "the trace has ended".to_owned();
        self.control.send(ControlRequest { command, answer: sender }).map_err(|_| ended())?;
        (self.wake)();
        receiver.recv_timeout(ANSWER_TIME).unwrap_or_else(|_| Err(ended()))
    }
}

fn answer(mut stream: &UnixStream, line: &str) {
    // Who does not wait for the answer does not get it.
    let _ = stream.write_all(format!("{}\n", line.trim_end()).as_bytes());
}

pub(super) fn refuse(stream: &UnixStream, reason: &str) {
    answer(stream, &format!("ERR {}", reason.replace('\n', " ")));
}

/// The first line, without its end. Takes not a byte more: what follows may be another's.
fn first_line(mut stream: &UnixStream) -> io::Result<String> {
    let end = Instant::now() + ASK_TIME;
    let mut line = Vec::new();
    let mut byte = [0];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let late = |error: io::Error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::other("no request came in time"),
            _ => error,
        };
        if stream.read(&mut byte).map_err(late)? == 0 {
            return Err(io::Error::other("the connection ended before its first line did"));
        }
        match byte {
            [b'\n'] => break,
            _ if line.len() >= LINE_MAX => {
                return Err(io::Error::other("the first line is too long"));
            }
            [other] => line.push(other),
        }
    }
    stream.set_read_timeout(None)?;
    String::from_utf8(line).map_err(|_| io::Error::other("the first line is not UTF-8"))
}

/// Passes bytes on in both directions until both are through.
fn splice(one: &UnixStream, other: &UnixStream) {
    let copy = |mut from: &UnixStream, mut to: &UnixStream| {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
        let _ = from.shutdown(Shutdown::Read);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| copy(other, one));
        copy(one, other);
    });
}
