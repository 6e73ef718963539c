//! One consumer: writes its queue to its socket, in the event loop of the consumers.

use super::queue::{Chunk, Popped, Queue};
use super::refilter::Refilter;
use super::request::{Format, Globs, Origin, StreamRequest};
use crate::events::{EventOps, EventSet, Events, MutEventSubscriber, watch};
use crate::export::{Graph, Json, Player, Text};
use std::collections::HashSet;
use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

/// A consumer of the stream.
#[derive(Debug)]
pub struct Join {
    /// Where it is to be sent.
    pub stream: UnixStream,
    /// How.
    pub request: StreamRequest,
    /// Who it is.
    pub origin: Origin,
}

/// From globs to functions as records name them: low halves of entry addresses. Only who knows
/// the kernel knows all names of a function.
pub type Resolve = Arc<dyn Fn(&Globs) -> HashSet<u32> + Send + Sync>;

/// Chunks before it is the turn of others.
const TURN: usize = 4;

/// Gets its bytes as its socket takes them. Nobody waits for it.
pub(super) struct Consumer {
    queue: Arc<Queue>,
    /// Until the consumer is left.
    stream: Option<UnixStream>,
    form: Form,
    resolve: Resolve,
    /// What the socket has still to take.
    unsent: Unsent,
}

/// What the queue's bytes become.
enum Form {
    /// Not known yet.
    Asked(StreamRequest),
    /// Nothing else.
    Raw,
    Made {
        maker: Box<dyn Write + Send>,
        made: Made,
        /// Nothing follows.
        ended: bool,
    },
}

/// What a maker has made.
#[derive(Clone, Default)]
struct Made(Arc<Mutex<Vec<u8>>>);

impl Made {
    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Write for Made {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

enum Unsent {
    Shared(Chunk, usize),
    Own(Vec<u8>, usize),
}

impl Unsent {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Shared(chunk, from) => chunk.get(*from..).unwrap_or_default(),
            Self::Own(bytes, from) => bytes.get(*from..).unwrap_or_default(),
        }
    }

    fn advance(&mut self, count: usize) {
        match self {
            Self::Shared(_, from) | Self::Own(_, from) => *from += count,
        }
    }
}

/// How a turn has ended.
enum Turn {
    /// There is more to do at once.
    More,
    /// Something will happen first.
    Waits,
    /// Everything was sent.
    Over,
}

impl Consumer {
    /// # Errors
    /// When the socket cannot be used.
    pub(super) fn new(queue: Arc<Queue>, join: Join, resolve: Resolve) -> io::Result<Self> {
        let Join { stream, request, .. } = join;
        stream.set_nonblocking(true)?;
        let (form, unsent) = (Form::Asked(request), Unsent::Own(Vec::new(), 0));
        Ok(Self { queue, stream: Some(stream), form, resolve, unsent })
    }

    fn turn(&mut self) -> io::Result<Turn> {
        for _ in 0..TURN {
            if !self.send()? {
                return Ok(Turn::Waits);
            }
            if let Form::Asked(request) = &self.form {
                // Here, since it takes its time: whoever adds consumers has none.
                self.form = Form::of(request, &self.resolve);
            }
            match (self.queue.pop(), &mut self.form) {
                (Popped::Wait, _) => return Ok(Turn::Waits),
                (Popped::Chunk(chunk), Form::Raw | Form::Asked(_)) => {
                    self.unsent = Unsent::Shared(chunk, 0);
                }
                (Popped::Chunk(chunk), Form::Made { maker, made, .. }) => {
                    maker.write_all(&chunk)?;
                    maker.flush()?;
                    self.unsent = Unsent::Own(made.take(), 0);
                }
                (Popped::End, Form::Made { maker, made, ended }) if !*ended => {
                    *ended = true;
                    maker.flush()?;
                    self.unsent = Unsent::Own(made.take(), 0);
                }
                (Popped::End, _) => return Ok(Turn::Over),
            }
        }
        Ok(Turn::More)
    }

    /// Sends what the socket takes; whether that is all there was.
    fn send(&mut self) -> io::Result<bool> {
        let Some(mut stream) = self.stream.as_ref() else {
            return Err(ErrorKind::NotConnected.into());
        };
        while !self.unsent.bytes().is_empty() {
            match stream.write(self.unsent.bytes()) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.unsent.advance(count);
                    self.queue.note_sent(count);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn leave(&mut self, ops: &mut EventOps<'_>) {
        if let Some(stream) = self.stream.take() {
            let _ = ops.remove(Events::empty(&stream));
        }
        self.queue.leave();
    }
}

impl MutEventSubscriber for Consumer {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if self.stream.is_none() {
            return;
        }
        // It has closed both directions. (One that only sends no more may still read.)
        let gone = events.event_set().intersects(EventSet::HANG_UP | EventSet::ERROR);
        match self.turn() {
            Ok(Turn::Waits | Turn::More) if gone => self.leave(ops),
            Ok(Turn::Waits) => {}
            Ok(Turn::More) => self.queue.bell().ring(),
            // An error is the consumer's leaving; there is nobody to tell.
            Ok(Turn::Over) | Err(_) => self.leave(ops),
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        watch(ops, self.queue.bell().events(0));
        if let Some(stream) = &self.stream {
            watch(ops, Events::new(stream, EventSet::OUT | EventSet::EDGE_TRIGGERED));
        }
        self.queue.bell().ring();
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        // Nobody waits for one that is no more.
        self.queue.leave();
    }
}

impl Form {
    fn of(request: &StreamRequest, resolve: &Resolve) -> Self {
        let functions = (!request.globs.is_empty()).then(|| resolve(&request.globs));
        if request.format == Format::Raw && functions.is_none() && request.tracer.is_none() {
            return Self::Raw;
        }
        let made = Made::default();
        let out: Box<dyn Write + Send> = match request.format {
            Format::Raw => Box::new(made.clone()),
            Format::Text => Box::new(Player::new(Text::new(made.clone()))),
            Format::Graph => Box::new(Player::new(Graph::new(made.clone()))),
            Format::Json => Box::new(Player::new(Json::new(made.clone()))),
        };
        let maker = if functions.is_none() && request.tracer.is_none() {
            out
        } else {
            Box::new(Refilter::new(out, functions, request.globs.clone(), request.tracer.clone()))
        };
        Self::Made { maker, made, ended: false }
    }
}
