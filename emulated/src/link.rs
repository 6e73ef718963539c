//! The outer end of the connection: a thread reads frames and passes each to its receiver; see [`super::wire`].

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::iter;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitStatus;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use super::wire::{
    Accepted, Connect, DATA_MAX, Decoder, Exited, Frame, Hello, Kind, Listen, ProtocolError, WINDOW,
};

/// Messages of the host other than data.
#[derive(Debug)]
pub(super) enum Event {
    Hello(Hello),
    Exited(u32, Exited),
    Done(u32),
    Failed(u32, String),
    /// The connection ended; nothing comes any more.
    Lost(Option<ProtocolError>),
    /// QEMU ended.
    Died(Option<ExitStatus>),
}

/// Sends frames, from any thread.
#[derive(Debug, Clone)]
pub(super) struct Link {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    out: Mutex<UnixStream>,
    state: Mutex<State>,
    /// Signalled when credit arrives, a stream is stopped or the connection ends.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    streams: HashMap<u32, Stream>,
    /// Who waits for the answer to a request, by its number.
    asking: HashMap<u32, mpsc::Sender<Result<(), String>>>,
    /// Who takes the connections to a socket in the host.
    listeners: HashMap<u32, mpsc::Sender<Connection>>,
    next: u32,
    lost: bool,
}

#[derive(Debug, Default)]
struct Stream {
    /// Where incoming data goes; none: nobody reads it here.
    reader: Option<mpsc::Sender<Vec<u8>>>,
    /// What the host may still send.
    window: u32,
    /// What may still be sent to the host.
    credit: u32,
    /// The host reads no more.
    stopped: bool,
    /// What is sent into it comes from here.
    source: Option<Source>,
}

/// A socket that somebody may be waiting to read from. When that is for nothing, it ends.
#[derive(Debug)]
struct Source(UnixStream);

impl Drop for Source {
    fn drop(&mut self) {
        // Fails when there is no peer any more, which is another end.
        let _ = self.0.shutdown(Shutdown::Read);
    }
}

/// The two streams of a connection to a socket in the host.
#[derive(Debug)]
pub(super) struct Connection {
    /// To the socket.
    pub(super) input: u32,
    /// From there, and what comes.
    pub(super) output: u32,
    pub(super) data: mpsc::Receiver<Vec<u8>>,
}

/// Why there is no tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TunnelError {
    /// Nobody listens there.
    Refused(String),
    /// The host is gone.
    Lost,
}

impl Link {
    /// Starts reading; events go to `events`.
    pub(super) fn start(socket: UnixStream, events: mpsc::Sender<Event>) -> io::Result<Self> {
        let input = socket.try_clone()?;
        let shared =
            Shared { out: Mutex::new(socket), state: Mutex::default(), changed: Condvar::new() };
        let link = Self { shared: Arc::new(shared) };
        let reader = link.clone();
        thread::Builder::new().name("host-link".to_owned()).spawn(move || {
            let error = reader.read(input, &events).err();
            reader.end();
            let _ = events.send(Event::Lost(error));
        })?;
        Ok(link)
    }

    /// A number for a new job or stream.
    pub(super) fn number(&self) -> u32 {
        let mut state = self.state();
        state.next = state.next.wrapping_add(1).max(1);
        state.next
    }

    /// A new stream from the host; the receiver ends when the host closes it.
    pub(super) fn open_read(&self) -> (u32, mpsc::Receiver<Vec<u8>>) {
        let (sender, receiver) = mpsc::channel();
        let id = self.number();
        let stream = Stream { reader: Some(sender), window: WINDOW, ..Stream::default() };
        let mut state = self.state();
        if !state.lost {
            state.streams.insert(id, stream);
        }
        (id, receiver)
    }

    /// A new stream to the host.
    pub(super) fn open_write(&self) -> u32 {
        let id = self.number();
        self.state().streams.insert(id, Stream { credit: WINDOW, ..Stream::default() });
        id
    }

    pub(super) fn send(&self, frame: &Frame) -> io::Result<()> {
        lock(&self.shared.out).write_all(&frame.to_bytes())
    }

    /// Says that `bytes` of a stream were taken.
    pub(super) fn grant(&self, stream: u32, bytes: usize) -> io::Result<()> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if let Some(stream) = self.state().streams.get_mut(&stream) {
            stream.window = stream.window.saturating_add(bytes);
        }
        self.send(&Frame::number(Kind::Credit, stream, bytes))
    }

    /// Ends a stream on this side alone.
    pub(super) fn abandon(&self, stream: u32) {
        self.state().streams.remove(&stream);
        self.shared.changed.notify_all();
    }

    /// Reads no more of a stream.
    pub(super) fn stop(&self, stream: u32) -> io::Result<()> {
        self.send(&Frame::new(Kind::Stop, stream))
    }

    /// Sends everything from `from`, as fast as it is taken, and closes the stream.
    pub(super) fn copy(&self, stream: u32, mut from: impl Read) -> io::Result<()> {
        let mut buffer = vec![0; DATA_MAX];
        let result = loop {
            let room = self.wait_credit(stream, DATA_MAX);
            let Some(buffer) = buffer.get_mut(..room).filter(|b| !b.is_empty()) else {
                break Ok(());
            };
            match from.read(buffer) {
                Ok(0) => break Ok(()),
                Ok(n) => {
                    self.state()
                        .streams
                        .entry(stream)
                        .and_modify(|s| s.credit -= u32::try_from(n).unwrap_or(s.credit));
                    self.send(&Frame::with(
                        Kind::Data,
                        stream,
                        buffer.get(..n).unwrap_or_default(),
                    ))?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => break Err(e),
            }
        };
        self.state().streams.remove(&stream);
        self.send(&Frame::new(Kind::Close, stream)).and(result)
    }

    /// Sends a request and waits for its answer.
    fn ask(&self, kind: Kind, number: u32, request: &impl Serialize) -> Result<(), TunnelError> {
        let lost = || TunnelError::Lost;
        let (sender, answer) = mpsc::channel();
        {
            let mut state = self.state();
            if state.lost {
                return Err(TunnelError::Lost);
            }
            state.asking.insert(number, sender);
        }
        let frame = Frame::json(kind, number, request).map_err(|_| lost())?;
        self.send(&frame).map_err(|_| lost())?;
        answer.recv().map_err(|_| lost())?.map_err(TunnelError::Refused)
    }

    /// Connects `local` to the unix socket at `path` in the host, and passes bytes on in both
    /// directions until both are through.
    pub(super) fn tunnel(&self, path: &str, local: &UnixStream) -> Result<(), TunnelError> {
        let (output, data) = self.open_read();
        let input = self.open_write();
        let connect = Connect { path: path.to_owned(), input, output };
        if let Err(error) = self.ask(Kind::Connect, self.number(), &connect) {
            self.abandon(output);
            self.abandon(input);
            return Err(error);
        }
        self.pass(Connection { input, output, data }, local, &[], Vec::new());
        Ok(())
    }

    /// Has the host listen at `path`. The connections that come are received with the number
    /// that [`Link::unlisten`] wants.
    pub(super) fn listen(
        &self,
        path: &str,
    ) -> Result<(u32, mpsc::Receiver<Connection>), TunnelError> {
        let (sender, connections) = mpsc::channel();
        let number = self.number();
        self.state().listeners.insert(number, sender);
        let asked = self.ask(Kind::Listen, number, &Listen { path: path.to_owned() });
        if asked.is_err() {
            self.state().listeners.remove(&number);
        }
        asked.map(|()| (number, connections))
    }

    /// Ends that.
    pub(super) fn unlisten(&self, number: u32) {
        self.state().listeners.remove(&number);
        let _ = self.stop(number);
    }

    /// Ends a connection of the host's.
    pub(super) fn refuse(&self, connection: &Connection) {
        self.abandon(connection.output);
        self.abandon(connection.input);
        let _ = self.stop(connection.output);
        let _ = self.send(&Frame::new(Kind::Close, connection.input));
    }

    /// Passes bytes on between the host and `local` until both directions are through; those of
    /// `to_host` and `to_local` come first.
    pub(super) fn pass(
        &self,
        connection: Connection,
        local: &UnixStream,
        to_host: &[u8],
        to_local: Vec<u8>,
    ) {
        let Connection { input, output, data } = connection;
        if let Some(stream) = self.state().streams.get_mut(&input) {
            stream.source = local.try_clone().ok().map(Source);
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                let _ = self.copy(input, to_host.chain(local));
                // Only sends no more, or is gone? Both directions have an end, and so has this.
                let mut fds = [PollFd::new(local.as_fd(), PollFlags::empty())];
                while poll(&mut fds, PollTimeout::NONE) == Err(Errno::EINTR) {}
                let _ = self.stop(output);
            });
            let mut out = local;
            for bytes in iter::once(to_local).chain(data) {
                if out.write_all(&bytes).is_err() {
                    let _ = self.stop(output);
                    break;
                }
                let _ = self.grant(output, bytes.len());
            }
            // The peer may still have something to say, until nobody is left to hear it.
            let _ = local.shutdown(Shutdown::Write);
        });
    }

    /// Waits until something may be sent; 0: never again.
    fn wait_credit(&self, stream: u32, most: usize) -> usize {
        let mut state = self.state();
        loop {
            if state.lost {
                return 0;
            }
            match state.streams.get(&stream) {
                None | Some(Stream { stopped: true, .. }) => return 0,
                Some(Stream { credit: 0, .. }) => {}
                Some(s) => return usize::try_from(s.credit).unwrap_or(most).min(most),
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn read(
        &self,
        mut input: UnixStream,
        events: &mpsc::Sender<Event>,
    ) -> Result<(), ProtocolError> {
        let mut decoder = Decoder::default();
        let mut buffer = vec![0; 256 << 10];
        loop {
            match input.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => decoder.push(buffer.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Ok(()),
            }
            while let Some(frame) = decoder.frame()? {
                if let Some(event) = self.take(frame)? {
                    let _ = events.send(event);
                }
            }
        }
    }

    fn take(&self, frame: Frame) -> Result<Option<Event>, ProtocolError> {
        let id = frame.stream;
        let mut state = self.state();
        match frame.kind {
            Kind::Hello => return Ok(Some(Event::Hello(frame.as_json()?))),
            Kind::Exited => return Ok(Some(Event::Exited(id, frame.as_json()?))),
            Kind::Done => match state.asking.remove(&id) {
                Some(waiting) => drop(waiting.send(Ok(()))),
                None => return Ok(Some(Event::Done(id))),
            },
            Kind::Failed => {
                let reason = String::from_utf8_lossy(&frame.payload).into_owned();
                match state.asking.remove(&id) {
                    Some(waiting) => drop(waiting.send(Err(reason))),
                    None => return Ok(Some(Event::Failed(id, reason))),
                }
            }
            Kind::Data => {
                // A stream that is gone here may still have data under way.
                let Some(stream) = state.streams.get_mut(&id) else { return Ok(None) };
                let length = u32::try_from(frame.payload.len()).unwrap_or(u32::MAX);
                stream.window = stream
                    .window
                    .checked_sub(length)
                    .ok_or(ProtocolError("more data than allowed"))?;
                if let Some(reader) = &stream.reader {
                    let _ = reader.send(frame.payload);
                }
            }
            Kind::Credit => {
                let more = frame.as_number()?;
                if let Some(stream) = state.streams.get_mut(&id) {
                    stream.credit = stream.credit.saturating_add(more);
                }
                self.shared.changed.notify_all();
            }
            Kind::Close => drop(state.streams.remove(&id)),
            Kind::Stop => {
                if let Some(stream) = state.streams.get_mut(&id) {
                    stream.stopped = true;
                    stream.source = None;
                }
                self.shared.changed.notify_all();
            }
            Kind::Accepted => {
                let Accepted { input, output } = frame.as_json()?;
                // Nobody takes connections any more: the job that makes them is at its end.
                let Some(listener) = state.listeners.get(&id) else { return Ok(None) };
                let (sender, data) = mpsc::channel();
                if listener.send(Connection { input, output, data }).is_ok() {
                    // Here, since data may be in the very next frame.
                    let reader =
                        Stream { reader: Some(sender), window: WINDOW, ..Stream::default() };
                    state.streams.insert(output, reader);
                    state.streams.insert(input, Stream { credit: WINDOW, ..Stream::default() });
                }
            }
            Kind::Run | Kind::Signal | Kind::Put | Kind::Connect | Kind::Listen => {
                return Err(ProtocolError("unexpected request"));
            }
        }
        Ok(None)
    }

    /// Ends every stream, so that nobody waits for what cannot come.
    fn end(&self) {
        let mut state = self.state();
        state.lost = true;
        state.streams.clear();
        state.asking.clear();
        state.listeners.clear();
        self.shared.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
